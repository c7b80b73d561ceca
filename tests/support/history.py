"""Histories of a server's clients, and the proof that no answer in one contradicts another.

A history has two lines for every operation of a client: its invocation and its answer, with the times of one monotonic
clock. The answer is ``ok``, ``no`` (the server says that nothing was done), or ``unknown``: the connection was lost, so
the operation may have happened at any later time or never. This is the form of Jepsen's histories (K. Kingsbury,
jepsen.io). Deciding whether a history is linearizable is NP-complete in general (Gibbons and Korach, SIAM J. Comput.
1997; the search of Knossos and Porcupine). As in Elle (Kingsbury and Alvaro, VLDB 2020) the operations are chosen so
that no search is needed: every request has a unique tag, ids are unique, and what a job is only grows. So the order of
two reads of a job follows from what they return, and it must agree with the order in time: a read that was invoked
after another one was answered must not return less.

`check` returns everything that no order of the operations explains. A history that it accepts does not prove that the
server is right, only that no client could have noticed anything wrong.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ok", "no", "unknown"]
ENDED = frozenset({"succeeded", "failed", "cancelled"})
FOREVER = float("inf")
# Faults that end or stop ranks: a job may lose its attempt; those of them that are the machine's memory; and those in
# which the server's clock is not the clients'.
OF_MEMORY, OF_CLOCK = frozenset({"out-of-memory"}), frozenset({"clock-jump"})
# Refusals after which a request may have been recorded all the same: the disk failed while it was written. A sync that
# fails leaves its transaction in SQLite's log, where the next process finds it whole.
UNSURE = frozenset({500, 503, 507})
# Faults under which a job fails by the server's documentation: in its first attempt and in its second; and failures in
# a row after which all waiting jobs fail.
ATTEMPTS, IN_A_ROW = 2, 6


@dataclass(frozen=True)
class Operation:
    """An operation of a client.

    Attributes:
        number: in the history.
        f: submit, status, cancel, fetch, list, events, peek (another owner's job), fault.
        owner: who asks.
        asked: arguments.
        outcome: whether it happened.
        told: what the answer says; of an unknown outcome, what came before the connection was lost.
        invoked, answered: seconds; an unknown outcome is answered never.
    """

    number: int
    f: str
    owner: str
    asked: Mapping[str, Any]
    outcome: Outcome
    told: Mapping[str, Any]
    invoked: float
    answered: float


def perhaps(one: Operation) -> bool:
    """Whether an operation may have happened."""
    return one.outcome != "no" or one.told.get("status") in UNSURE


@dataclass(frozen=True)
class Anomaly:
    """A contradiction.

    Attributes:
        kind: of it.
        what: a sentence.
        operations: their numbers in the history.
    """

    kind: str
    what: str
    operations: tuple[int, ...] = ()


class Recorder:
    """Writes a history; any thread may call.

    Args:
        file: for the lines.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = Path(file).open("w", encoding="utf-8")  # noqa: SIM115 - it stays open
        self._lock, self._number = threading.Lock(), 0
        self.counts: Counter[str] = Counter()
        # What turns the times of a history into those of the calendar.
        self._write({"wall": time.time() - time.monotonic()})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def invoke(self, f: str, owner: str, **asked: Any) -> int:
        """An operation begins; its number."""
        with self._lock:
            self._number += 1
            self._write({"op": self._number, "f": f, "owner": owner, "at": time.monotonic(), "asked": asked})
            return self._number

    def answer(self, number: int, outcome: Outcome, **told: Any) -> None:
        """It has an outcome."""
        at = time.monotonic()
        with self._lock:
            self.counts[outcome] += 1
            self._write({"op": number, "is": outcome, "at": at, "told": told})

    def close(self) -> None:
        """The history ends."""
        with self._lock:
            self._file.close()


@dataclass
class History:
    """All operations, by invocation, and the seconds between the history's clock and the calendar's."""

    operations: list[Operation]
    wall: float = 0.0

    @classmethod
    def read(cls, lines: Iterable[str]) -> History:
        """From JSON lines; an operation without an answer has an unknown outcome."""
        begun: dict[int, dict[str, Any]] = {}
        answers: dict[int, dict[str, Any]] = {}
        wall = 0.0
        for line in lines:
            entry = json.loads(line)
            if "wall" in entry:
                wall = entry["wall"]
            else:
                (begun if "f" in entry else answers)[entry["op"]] = entry
        found = []
        for number, one in begun.items():
            answer = answers.get(number, {"is": "unknown", "told": {}})
            never = answer["is"] == "unknown" and one["f"] != "fault"
            found.append(
                Operation(
                    *(number, one["f"], one["owner"], one["asked"], answer["is"], answer["told"], one["at"]),
                    FOREVER if never else answer.get("at", FOREVER),
                )
            )
        return cls(sorted(found, key=lambda operation: operation.invoked), wall)

    def of(self, *names: str) -> Iterator[Operation]:
        """The operations of some kinds."""
        return (one for one in self.operations if one.f in names)


@dataclass(frozen=True)
class View:
    """What one answer says about a job, and when that was so: at some time between two."""

    told: Mapping[str, Any]
    begin: float
    end: float
    operation: int


@dataclass
class Book:
    """What a history says about one job.

    Attributes:
        tag: of its idempotency key, which is in its prompt.
        accepted: when the first answer named it; invoked: when a client first asked for it.
        gone: answers that there is no such job.
    """

    id: str
    owner: str = ""
    tag: str = ""
    accepted: float = FOREVER
    invoked: float = -FOREVER
    views: list[View] = field(default_factory=list)
    cancels: list[Operation] = field(default_factory=list)
    fetches: list[Operation] = field(default_factory=list)
    streams: list[Operation] = field(default_factory=list)
    gone: list[Operation] = field(default_factory=list)

    @property
    def last(self) -> Mapping[str, Any] | None:
        """What the latest answer says: if the job has ended, one that says so."""
        ended = [view for view in self.views if view.told["status"] in ENDED] or self.views
        return max(ended, key=lambda view: (view.begin, view.end)).told if ended else None


class Checker:
    """Reads a history once, and lists what contradicts.

    Args:
        history: of all clients.
        slack: pictures by which an owner may be ahead of another one beyond the theorem (those under way at a restart).
        finished: the history ends with reads of every job after the last fault: then all have to have ended.
    """

    def __init__(self, history: History, slack: int = 8, finished: bool = True) -> None:
        self.history, self.slack, self.finished = history, slack, finished
        self.anomalies: list[Anomaly] = []
        self.figures: Counter[str] = Counter()
        self.books: dict[str, Book] = {}
        self.submits: dict[str, list[Operation]] = defaultdict(list)
        self.faults = [*history.of("fault")]
        self._starts = sorted(one.invoked for one in self.faults)

    def run(self) -> list[Anomaly]:
        """All anomalies."""
        self._collect()
        for book in self.books.values():
            self._identity(book)
            self._order(book)
            self._streams(book)
            self._cancelled(book)
            self._files(book)
            self._end(book)
        self._keys()
        self._lists()
        self._isolation()
        self._fairness()
        return self.anomalies

    def _found(self, kind: str, what: str, *operations: int) -> None:
        self.anomalies.append(Anomaly(kind, what, operations))

    # ---- reading

    def _collect(self) -> None:
        for one in self.history.operations:
            self.figures[one.f] += 1
            if one.f == "submit":
                self.submits[one.asked["tag"]].append(one)
            job = one.told.get("job")
            if one.outcome == "ok" and job is not None:
                self._seen(one, job)
            if one.f == "list" and one.outcome == "ok":
                for told in one.told["jobs"]:
                    self._seen(one, told)
            if one.f in ("cancel", "fetch", "events") and one.asked["id"] in self.books:
                book = self.books[one.asked["id"]]
                {"cancel": book.cancels, "fetch": book.fetches, "events": book.streams}[one.f].append(one)
            if one.f in ("status", "cancel", "events") and one.outcome == "no" and one.told.get("status") == 404:
                self._book(one.asked["id"]).gone.append(one)
            if one.f == "events":
                self._seen_events(one)
        for book in self.books.values():
            # Whichever of the requests with its key was the one that made it.
            book.invoked = min((one.invoked for one in self.submits.get(book.tag, ())), default=-FOREVER)

    def _book(self, id: str) -> Book:
        return self.books.setdefault(id, Book(id))

    def _seen(self, one: Operation, told: Mapping[str, Any]) -> None:
        book = self._book(told["id"])
        if one.f == "peek":
            return
        book.views.append(View(told, one.invoked, one.answered, one.number))
        book.owner = book.owner or one.owner
        book.tag = book.tag or told["tag"]
        book.accepted = min(book.accepted, one.answered)

    def _seen_events(self, one: Operation) -> None:
        """The last event of a stream says what the job is, when it came."""
        for event in one.told.get("events", ()):
            if event["event"] in ENDED and "job" in event:
                view = View(event["job"], one.invoked, event["at"], one.number)
                self._book(one.asked["id"]).views.append(view)

    # ---- faults

    def disturbed(self, begin: float, end: float, least: int = 1, only: frozenset[str] | None = None) -> bool:
        """Whether at least so many faults were in force between two times."""
        found = 0
        for fault in self.faults[: bisect_right(self._starts, end)]:
            if fault.answered >= begin and (only is None or fault.asked["kind"] in only):
                found += 1
        return found >= least

    # ---- what is checked of one job

    def _identity(self, book: Book) -> None:
        """A job is what was asked for, and stays it."""
        for one in ("n", "seed", "tag", "steps"):
            values = {
                json.dumps(view.told[one]): view.operation for view in book.views if view.told.get(one) is not None
            }
            if len(values) > 1:
                self._found("changed", f"{book.id}: {one} is {' and '.join(sorted(values))}", *values.values())
        asked = self.submits.get(book.tag)
        if not asked:
            self._found("ghost", f"{book.id} is there, and no client has asked for it", *_numbers(book.views))
            return
        for name in ("n", "seed", "steps"):
            wanted = asked[0].asked.get(name)
            if book.views and wanted is not None and book.views[0].told[name] != wanted:
                said = f"{book.id}: {name} is {book.views[0].told[name]}, and {wanted} was asked for"
                self._found("changed", said, asked[0].number)
        if any(one.owner != book.owner for one in asked):
            self._found(
                "foreign", f"{book.id} was asked for by {asked[0].owner} and is {book.owner}'s", asked[0].number
            )
        sure = [one for one in asked if perhaps(one)]
        if not sure:
            self._found("ghost", f"{book.id} is there, and the server had refused it", *_numbers(asked))
        elif all(one.outcome == "no" for one in sure):
            # The disk failed and the server said so, but the row was on it.
            self.figures["refused and done all the same"] += 1

    def _order(self, book: Book) -> None:
        """A read that began after another one had ended returns no less."""
        moments = [(view.end, 0, view) for view in book.views] + [(view.begin, 1, view) for view in book.views]
        moments.sort(key=lambda moment: (moment[0], moment[1]))
        # Of the reads that have ended: the first that says that the job has ended, and the latest that it was running.
        over: View | None = None
        running: View | None = None
        attempt, done, receipts = 0, set[str](), dict[str, str]()
        for _, invoked, view in moments:
            told = view.told
            if not invoked:
                if told["status"] in ENDED:
                    over = over or view
                elif told["status"] == "running" and (running is None or view.begin > running.begin):
                    running = view
                attempt = max(attempt, told["attempt"])
                done |= set(told["done"])
                continue
            for known in filter(None, (over, running)):
                self._follows(book, known, view)
            if told["attempt"] < attempt:
                said = f"{book.id}: attempt {told['attempt']} after attempt {attempt}"
                self._found("went-back", said, view.operation)
            if not done <= set(told["done"]):
                said = f"{book.id}: pictures {sorted(done - set(told['done']))} were done, and are not"
                self._found("went-back", said, view.operation)
        for view in book.views:
            for index, receipt in view.told["done"].items():
                if receipts.setdefault(index, receipt) != receipt:
                    self._found("receipt", f"{book.id}: picture {index} has two receipts", view.operation)
        ended = {view.told["status"]: view.operation for view in book.views if view.told["status"] in ENDED}
        if len(ended) > 1:
            self._found("two-ends", f"{book.id} ended as {' and as '.join(sorted(ended))}", *ended.values())

    def _follows(self, book: Book, known: View, view: View) -> None:
        before, after = known.told["status"], view.told["status"]
        if before in ENDED and after != before:
            said = f"{book.id} is {after}, and was {before} before"
            self._found("went-back", said, known.operation, view.operation)
        elif (
            (before, after) == ("running", "queued")
            and view.told["attempt"] == known.told["attempt"]
            and not self.disturbed(known.begin, view.end)
        ):
            said = f"{book.id} is queued again, and nothing had failed"
            self._found("went-back", said, known.operation, view.operation)

    def _streams(self, book: Book) -> None:
        for one in book.streams:
            last, images, over = one.asked.get("after", 0), Counter[int](), None
            for event in one.told.get("events", ()):
                if over is not None:
                    self._found("after-end", f"{book.id}: {event['event']} came after {over}", one.number)
                if event["id"] <= last:
                    self._found("event-order", f"{book.id}: event {event['id']} came after {last}", one.number)
                last = max(last, event["id"])
                if event["event"] == "image":
                    images[event["image"]] += 1
                if event["event"] in ENDED:
                    over = event["event"]
            if images and max(images.values()) > 1:
                self._found("event-order", f"{book.id}: a stream has one picture twice", one.number)
            if one.outcome == "ok" and over is None:
                self._found("event-order", f"{book.id}: a stream ended before the job", one.number)

    def _cancelled(self, book: Book) -> None:
        """After a confirmed cancel nothing more is done."""
        confirmed = [one for one in book.cancels if one.outcome == "ok" and one.told["job"]["status"] == "cancelled"]
        if not confirmed:
            return
        first = min(confirmed, key=lambda one: one.answered)
        allowed = set(first.told["job"]["done"])
        for view in book.views:
            if view.begin > first.answered and (more := set(view.told["done"]) - allowed):
                said = f"{book.id}: pictures {sorted(more)} were done after its cancel was confirmed"
                self._found("after-cancel", said, first.number, view.operation)
        for fetch in book.fetches:
            if fetch.invoked > first.answered and fetch.outcome == "ok" and str(fetch.asked["index"]) not in allowed:
                said = f"{book.id}: picture {fetch.asked['index']} is there after its cancel was confirmed"
                self._found("after-cancel", said, first.number, fetch.number)

    def _files(self, book: Book) -> None:
        """A picture that is done can be read, and its bytes are the right ones, whenever it is read."""
        ready: dict[str, float] = {}
        receipts: dict[str, str] = {}
        for view in book.views:
            for index, receipt in view.told["done"].items():
                ready[index] = min(ready.get(index, FOREVER), view.end)
                receipts[index] = receipt
        digests: dict[int, tuple[str, int]] = {}
        for fetch in book.fetches:
            index = fetch.asked["index"]
            if (
                fetch.outcome == "no"
                and fetch.told.get("status") == 404
                and ready.get(str(index), FOREVER) < fetch.invoked
            ):
                said = f"{book.id}: picture {index} was done and is not there"
                self._found("result-lost", said, fetch.number)
            if fetch.outcome != "ok":
                continue
            if not fetch.told["right"]:
                self._found("wrong-bytes", f"{book.id}: picture {index} is not what was asked for", fetch.number)
            before = digests.setdefault(index, (fetch.told["sha256"], fetch.number))
            if before[0] != fetch.told["sha256"]:
                said = f"{book.id}: picture {index} was read with different bytes"
                self._found("wrong-bytes", said, before[1], fetch.number)
            own = fetch.told.get("receipt")
            if own is not None and str(index) in receipts and own != receipts[str(index)]:
                said = f"{book.id}: picture {index} has another receipt in its file than in its job"
                self._found("receipt", said, fetch.number)

    def _end(self, book: Book) -> None:
        """An accepted job is not lost, and ends as somebody asked or as a fault explains."""
        known = min((view.end for view in book.views), default=FOREVER)
        for one in book.gone:
            if known < one.invoked and one.owner == book.owner:
                self._found("lost", f"{book.id} is not known any more", one.number)
        last = book.last
        if last is None or not book.tag:
            return
        self.figures[f"jobs {last['status']}"] += 1
        number = book.views[-1].operation
        if last["status"] not in ENDED:
            if self.finished:
                self._found("lost", f"{book.id} is {last['status']} at the end", number)
        elif last["status"] == "cancelled":
            if not any(perhaps(one) for one in book.cancels):
                self._found("unasked", f"{book.id} is cancelled, and no client has asked for that", number)
        elif last["status"] == "succeeded":
            if len(last["done"]) != last["n"]:
                said = f"{book.id} has succeeded with {len(last['done'])} of {last['n']} pictures"
                self._found("result-lost", said, number)
        elif not self._explained(book, last):
            said = f"{book.id} has failed ({last['error']}: {last.get('message', '')[:200]}), and no fault explains it"
            self._found("unasked", said, number)

    def _explained(self, book: Book, last: Mapping[str, Any]) -> bool:
        """Whether faults explain that a job has failed, by the rules of docs/serving.md."""
        begin = min((one.invoked for one in self.submits.get(book.tag, ())), default=0.0)
        ends = [view.end for view in book.views if view.told["status"] == "failed"]
        end, code = min(ends), last["error"]
        if code == "out_of_memory":
            return self.disturbed(begin, end, 1, OF_MEMORY)
        if code in ("rank_failed", "stalled"):
            least = IN_A_ROW if "in a row" in last.get("message", "") else ATTEMPTS
            again = last["attempt"] >= ATTEMPTS or least == IN_A_ROW
            return again and self.disturbed(begin, end, least)
        return False

    # ---- what is checked of all jobs

    def _keys(self) -> None:
        """One result a key: repeated requests are one job, unless that was cancelled."""
        by_tag: dict[str, list[Book]] = defaultdict(list)
        for book in self.books.values():
            if book.tag:
                by_tag[book.tag].append(book)
        for tag, books in by_tag.items():
            kept = [book for book in books if not any(perhaps(one) for one in book.cancels)]
            if len(kept) > 1 or len(books) > 1 + sum(len(book.cancels) > 0 for book in books):
                said = f"one key has {len(books)} jobs: {', '.join(book.id for book in books)}"
                self._found("two-jobs", said, *_numbers(self.submits.get(tag, ())))
        for tag, asked in self.submits.items():
            accepted = [one for one in asked if one.outcome == "ok"]
            if accepted and tag not in by_tag:
                self._found("lost", f"the job of {tag} was accepted and never seen", *_numbers(accepted))

    def _lists(self) -> None:
        accepted: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for book in self.books.values():
            if book.accepted < FOREVER:
                accepted[book.owner].append((book.accepted, book.invoked, book.id))
        for jobs in accepted.values():
            jobs.sort()
        for one in self.history.of("list"):
            if one.outcome == "ok":
                self._list(one, accepted[one.owner])

    def _list(self, one: Operation, accepted: Sequence[tuple[float, float, str]]) -> None:
        ids = [job["id"] for job in one.told["jobs"]]
        if len(set(ids)) < len(ids):
            self._found("list", "a list has a job twice", one.number)
        for id in ids:
            if self.books[id].owner not in ("", one.owner):
                self._found("foreign", f"{id} of {self.books[id].owner} is in a list of {one.owner}", one.number)
        latest_invoked = -FOREVER
        for id in reversed(ids):
            # From the oldest on: none was accepted before one behind it in the list was asked for.
            if self.books[id].accepted < latest_invoked:
                self._found("list", f"a list has {id} in front of a later job", one.number)
            if self.books[id].accepted < FOREVER:
                latest_invoked = max(latest_invoked, self.books[id].invoked)
        status = one.asked.get("status")
        if status is not None:
            wrong = [job["id"] for job in one.told["jobs"] if job["status"] != status]
            if wrong:
                self._found("list", f"a list of {status} jobs has {wrong[0]}", one.number)
            return
        present = set(ids)
        newest = accepted[: bisect_left(accepted, (one.invoked, 0.0, ""))]
        if len(ids) >= one.asked["limit"]:
            # Those that were asked for after the oldest in it was accepted belong into it.
            bounds = [self.books[id].accepted for id in ids if self.books[id].accepted < FOREVER]
            if not bounds:
                return
            newest = [job for job in newest if job[1] > min(bounds)]
        missing = [id for _, _, id in newest if id not in present]
        if missing:
            self._found(
                "list", f"a list lacks {missing[0]}, which was accepted before ({len(missing)} in all)", one.number
            )

    def _isolation(self) -> None:
        for one in self.history.of("peek"):
            if one.outcome == "ok":
                self._found("foreign", f"{one.owner} has read {one.asked['id']}, which is another one's", one.number)

    def _fairness(self) -> None:
        """While two owners wait, neither gets more than the other, up to a bound.

        Start-time fair queueing bounds the difference by two of the largest packets (Goyal, Vin and Cheng, SIGCOMM
        1996, theorem 1). A job is a packet of all its pictures here, as clients see only when its first one began; so
        it is twice that, and ``slack``. Times are those of the server's answers, which have one clock except while a
        fault makes it jump. Pictures of jobs that did not succeed count where that helps the server.
        """
        waits: dict[str, list[tuple[float, float]]] = defaultdict(list)
        starts: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        largest = 0.0
        for book in self.books.values():
            told = book.last
            if told is None or not book.tag or told.get("created") is None:
                continue
            work = told["n"] * (told.get("steps") or 1.0)
            largest = max(largest, work)
            began = told.get("started") or told.get("finished")
            if began is not None and began > told["created"]:
                waits[book.owner].append((told["created"], began))
            if told.get("started"):
                sure = work if told["status"] == "succeeded" and told["attempt"] == 1 else 0.0
                starts[book.owner].append((told["started"], sure, work))
        unit = max(((told.get("steps") or 1.0) for told in self._lasts()), default=1.0)
        bound = 4 * largest + self.slack * unit
        # A jump of the clock, and all that failed: what was under way is charged twice or not at all.
        cuts = _union([(one.invoked + self.history.wall, one.answered + self.history.wall) for one in self.faults])
        self.figures["fairness bound"] = int(bound)
        for one, other in permutations(sorted(waits), 2):
            both = _without(_common(_union(waits[one]), _union(waits[other])), cuts)
            for begin, end in both:
                moments = sorted(
                    [(at, sure) for at, sure, _ in starts[one] if begin <= at <= end]
                    + [(at, -most) for at, _, most in starts[other] if begin <= at <= end]
                )
                ahead = best = 0.0
                for _, work in moments:
                    ahead = max(0.0, ahead + work)
                    best = max(best, ahead)
                self.figures["fairness worst"] = max(self.figures["fairness worst"], int(best))
                if moments:
                    self.figures["fairness intervals"] += 1
                if best > bound:
                    said = f"{one} got {best:g} steps more than {other} in {end - begin:.1f} s in which both waited"
                    self._found("unfair", f"{said}; {bound:g} are allowed")

    def _lasts(self) -> Iterator[Mapping[str, Any]]:
        return (told for book in self.books.values() if (told := book.last) is not None)


def _numbers(found: Iterable[Operation | View]) -> tuple[int, ...]:
    return tuple(one.number if isinstance(one, Operation) else one.operation for one in found)[:8]


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _common(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found, left, right = [], 0, 0
    while left < len(one) and right < len(other):
        begin, end = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        if begin < end:
            found.append((begin, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found


def _without(
    intervals: Sequence[tuple[float, float]], cuts: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    if not cuts:
        return [*intervals]
    edges = [(-FOREVER, cuts[0][0]), *((one[1], other[0]) for one, other in pairwise(cuts)), (cuts[-1][1], FOREVER)]
    return _common(intervals, [(begin, end) for begin, end in edges if begin < end])


def check(history: History, slack: int = 8, finished: bool = True) -> list[Anomaly]:
    """Everything in a history that contradicts; see `Checker`."""
    return Checker(history, slack, finished).run()

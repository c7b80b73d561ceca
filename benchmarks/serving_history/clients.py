"""Clients that record every operation and every answer."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.history import ENDED, Recorder

# Seconds for an answer, after which a client goes away; between two attempts to connect.
PATIENCE, PAUSE = 4.0, 0.1
# Jobs of an owner that may be under way; jobs of it that clients look at most.
UNDER_WAY, RECENT = 12, 80
# How often operations are drawn.
WEIGHTS = {"submit": 20, "status": 40, "fetch": 22, "list": 6, "events": 5, "cancel": 4, "peek": 3}

# What a picture should be: whether these bytes are right for a request and a picture's number, and its receipt.
Judge = Callable[[Mapping[str, Any], int, bytes], tuple[bool, str | None]]


def receipt_digest(receipt: Any) -> str:
    """Short, for a history."""
    return hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest()[:16]


def brief(job: Mapping[str, Any]) -> dict[str, Any]:
    """Of a job what a history keeps; its tag is its seed, of which each request has its own."""
    request, error = job["request"], job["error"] or {}
    done = {str(one["index"]): receipt_digest(one["receipt"]) for one in job["images"] if one["url"]}
    return {
        "id": job["id"], "tag": str(request["seed"]), "status": job["status"], "attempt": job["attempt"],
        "n": request["n"], "seed": request["seed"], "steps": request["steps"], "done": done,
        "created": job["created"], "started": job["started"], "finished": job["finished"],
        "error": error.get("code"), "message": (error.get("message") or "")[:200],
    }  # fmt: skip


@dataclass
class Owner:
    """An API key, and what its clients know together.

    Attributes:
        recent: ids of its latest jobs.
        live: of jobs that are not known to have ended.
        wishes: requests by tag.
    """

    name: str
    key: str
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))
    live: set[str] = field(default_factory=set)
    wishes: dict[str, dict[str, Any]] = field(default_factory=dict)
    by_id: dict[str, str] = field(default_factory=dict)
    unsure: deque[str] = field(default_factory=lambda: deque(maxlen=50))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, job: Mapping[str, Any]) -> None:
        """An answer about a job."""
        with self.lock:
            if job["id"] not in self.by_id:
                self.recent.append(job["id"])
                self.by_id[job["id"]] = job["tag"]
                self.live.add(job["id"])
            if job["status"] in ENDED:
                self.live.discard(job["id"])


class Asker:
    """One connection to the server, as one owner; every request is recorded."""

    def __init__(self, port: Callable[[], int], owner: Owner, recorder: Recorder, judge: Judge) -> None:
        self.owner, self._port, self._recorder, self._judge = owner, port, recorder, judge
        self._connection: http.client.HTTPConnection | None = None
        self._refused = False

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _send(self, method: str, path: str, body: Any = None, key: str | None = None) -> http.client.HTTPResponse:
        self._refused = False
        if self._connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port(), timeout=PATIENCE)
            try:
                connection.connect()
            except OSError:
                # It was not sent.
                self._refused = True
                raise
            self._connection = connection
        headers = {"Authorization": f"Bearer {self.owner.key}", "Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        return self._connection.getresponse()

    def ask(
        self, f: str, asked: Mapping[str, Any], method: str, path: str, body: Any = None, key: str | None = None
    ) -> tuple[int, bytes] | None:
        """Send a request; its status and body, or None: the outcome is unknown or there is no server, as is recorded.

        The caller records every other outcome with `done`.
        """
        self._number = self._recorder.invoke(f, self.owner.name, **asked)
        try:
            response = self._send(method, path, body, key)
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if self._refused:
                self.done("no", status=0)
                time.sleep(PAUSE)
            else:
                self.done("unknown", error=type(error).__name__)
            return None

    def done(self, outcome: Any, **told: Any) -> None:
        """Record the outcome of the latest request."""
        self._recorder.answer(self._number, outcome, **told)

    def _job(self, answer: tuple[int, bytes] | None) -> dict[str, Any] | None:
        """Record an answer that is a job, or a refusal."""
        if answer is None:
            return None
        status, body = answer
        if status not in (200, 202):
            self.done("no", status=status, message=body[:200].decode("utf-8", "replace"))
            return None
        job = brief(json.loads(body))
        self.done("ok", job=job)
        return job

    # ---- operations

    def submit(self, tag: str, wish: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ask for a job; again with the same tag it is the same job."""
        asked = {"tag": tag, **{name: wish[name] for name in ("n", "seed", "steps")}}
        answer = self.ask("submit", asked, "POST", "/v1/jobs", dict(wish), f"{self.owner.name}-{tag}")
        job = self._job(answer)
        if job is not None:
            self.owner.saw(job)
        elif answer is None or answer[0] >= 500:
            self.owner.unsure.append(tag)
        return job

    def status(self, id: str) -> dict[str, Any] | None:
        """Read a job."""
        job = self._job(self.ask("status", {"id": id}, "GET", f"/v1/jobs/{id}"))
        if job is not None:
            self.owner.saw(job)
        return job

    def cancel(self, id: str) -> None:
        """Cancel a job."""
        job = self._job(self.ask("cancel", {"id": id}, "DELETE", f"/v1/jobs/{id}"))
        if job is not None:
            self.owner.saw(job)

    def peek(self, id: str) -> None:
        """Read a job of another owner."""
        self._job(self.ask("peek", {"id": id}, "GET", f"/v1/jobs/{id}"))

    def fetch(self, id: str, index: int) -> None:
        """Read a picture."""
        answer = self.ask("fetch", {"id": id, "index": index}, "GET", f"/v1/jobs/{id}/images/{index}")
        if answer is None:
            return
        status, body = answer
        if status != 200:
            self.done("no", status=status)
            return
        wish = self.owner.wishes[self.owner.by_id[id]]
        right, receipt = self._judge(wish, index, body)
        self.done("ok", sha256=hashlib.sha256(body).hexdigest(), right=right, receipt=receipt)

    def list(self, limit: int, status: str | None = None) -> list[dict[str, Any]] | None:
        """Read the owner's jobs."""
        asked = {"limit": limit, **({"status": status} if status else {})}
        query = "&".join(f"{name}={value}" for name, value in asked.items())
        answer = self.ask("list", asked, "GET", f"/v1/jobs?{query}")
        if answer is None:
            return None
        if answer[0] != 200:
            self.done("no", status=answer[0])
            return None
        jobs = [brief(job) for job in json.loads(answer[1])["data"]]
        self.done("ok", jobs=jobs)
        for job in jobs:
            self.owner.saw(job)
        return jobs

    def events(self, id: str, most: int) -> None:
        """Follow a job to its end, or leave after so many events."""
        self._number = self._recorder.invoke("events", self.owner.name, id=id, after=0)
        seen: list[dict[str, Any]] = []
        outcome, status = "unknown", 200
        try:
            response = self._send("GET", f"/v1/jobs/{id}/events")
            status = response.status
            if status != 200:
                response.read()
                outcome = "no"
            else:
                fields: dict[str, str] = {}
                while len(seen) < most and (line := response.readline()):
                    name, _, value = line.decode().rstrip("\n").partition(":")
                    if name:
                        fields[name] = value.removeprefix(" ")
                        continue
                    if line == b"\n" and "data" in fields:
                        self._event(fields, seen)
                    fields = {}
                    if seen and seen[-1]["event"] in ENDED:
                        # What may come after the end is read as well.
                        outcome, most = "ok", len(seen) + 10
        except (OSError, http.client.HTTPException, ValueError):
            # After the last event a connection may be lost like any other one.
            if self._refused:
                outcome, status = "no", 0
                time.sleep(PAUSE)
        self.close()
        self.done(outcome, events=seen, status=status)

    def _event(self, fields: Mapping[str, str], seen: list[dict[str, Any]]) -> None:
        data = json.loads(fields["data"])
        event: dict[str, Any] = {"id": int(fields.get("id", 0)), "event": fields["event"], "at": time.monotonic()}
        if event["event"] == "image":
            event["image"] = data["index"]
        if event["event"] in ENDED:
            event["job"] = brief(data)
            self.owner.saw(event["job"])
        if event["event"] != "error":
            seen.append(event)


class Client(Asker):
    """A client that does one operation after the other, drawn by chance.

    Args:
        number: of the client; with ``seed`` it decides what is drawn.
        others: owners whose jobs are none of its business.
        wish: makes a request for a seed.
    """

    def __init__(
        self,
        port: Callable[[], int],
        owner: Owner,
        recorder: Recorder,
        judge: Judge,
        number: int,
        seed: int,
        others: list[Owner],
        wish: Callable[[random.Random, int], dict[str, Any]],
    ) -> None:
        super().__init__(port, owner, recorder, judge)
        self._random = random.Random(f"{seed} {number}")
        self._others, self._wish = others, wish
        self._tags = iter(range(number * 10_000_000, (number + 1) * 10_000_000, 16))

    def run(self, over: threading.Event) -> None:
        """Until it is over."""
        while not over.is_set():
            self.one()
        self.close()

    def one(self) -> None:
        """One operation."""
        draw = self._random
        (what,) = draw.choices([*WEIGHTS], [*WEIGHTS.values()])
        with self.owner.lock:
            recent = [*self.owner.recent]
            live = [*self.owner.live]
        if not recent or len(live) < UNDER_WAY // 2:
            what = "submit"
        elif what == "submit" and len(live) >= UNDER_WAY:
            what = "status"
        if what == "submit":
            self._submit()
            return
        if what == "list":
            self.list(
                draw.choice([1, 5, 20, 50]), draw.choice([None, None, "queued", "running", "succeeded", "cancelled"])
            )
            return
        if what == "peek":
            foreign = [id for other in self._others for id in [*other.recent][-3:]]
            if foreign:
                self.peek(draw.choice(foreign))
            return
        # Half of the reads are of jobs that may change.
        id = draw.choice(live if live and draw.random() < 0.5 else recent)
        if what == "status":
            self.status(id)
        elif what == "cancel":
            self.cancel(id)
        elif what == "fetch":
            self.fetch(id, draw.randrange(self.owner.wishes[self.owner.by_id[id]]["n"]))
        else:
            self.events(id, draw.choice([1, 3, 10_000]))

    def _submit(self) -> None:
        draw, owner = self._random, self.owner
        again = [*owner.unsure]
        if again and draw.random() < 0.7:
            # The answer was lost: it is asked for again.
            tag = draw.choice(again)
            if self.submit(tag, owner.wishes[tag]) is not None:
                with contextlib.suppress(ValueError):
                    owner.unsure.remove(tag)
        elif owner.recent and draw.random() < 0.15:
            tag = owner.by_id[draw.choice([*owner.recent])]
            self.submit(tag, owner.wishes[tag])
        else:
            seed = next(self._tags)
            owner.wishes[str(seed)] = self._wish(draw, seed)
            self.submit(str(seed), owner.wishes[str(seed)])

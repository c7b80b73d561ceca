"""The checker of histories finds every kind of anomaly, and the server's own histories have none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from support.history import History, check

Lines = list[dict[str, Any]]


class Written:
    """A history by hand: operations follow one another, a second each."""

    def __init__(self) -> None:
        self.lines: Lines = [{"wall": 1000.0}]
        self.number, self.now = 0, 0.0

    def op(self, f: str, owner: str, asked: dict[str, Any], outcome: str = "ok", **told: Any) -> int:
        self.number += 1
        self.lines.append({"op": self.number, "f": f, "owner": owner, "at": self.now, "asked": asked})
        self.lines.append({"op": self.number, "is": outcome, "at": self.now + 0.5, "told": told})
        self.now += 1.0
        return self.number


def view(id: str, status: str = "queued", done: int = 0, **more: Any) -> dict[str, Any]:
    receipts = {str(index): f"receipt {id} {index}" for index in range(done)}
    tag = id.removeprefix("job_")
    times = {"created": 1000.0, "started": None, "finished": None}
    return {"id": id, "tag": tag, "status": status, "attempt": 1, "n": 2, "seed": 7, "steps": 4, "error": None} | {
        "done": receipts, **times, **more,
    }  # fmt: skip


def right() -> Written:
    """A server with every kind of event: two owners, a repeated request, a cancel, a failure, a fault, lost answers."""
    log = Written()
    wish = {"tag": "a1", "n": 2, "seed": 7, "steps": 4}
    log.op("submit", "a", wish, "unknown")
    log.op("submit", "a", wish, job=view("job_a1"))
    log.op("submit", "a", wish, job=view("job_a1"))
    log.op("submit", "b", {**wish, "tag": "b1"}, job=view("job_b1"))
    log.op("submit", "a", {**wish, "tag": "no"}, "no", status=429)
    log.op("status", "a", {"id": "job_a1"}, job=view("job_a1", "running", started=1003.0))
    log.op("fault", "", {"kind": "kill-rank"})
    log.op("fault", "", {"kind": "out-of-memory"})
    log.op("status", "a", {"id": "job_a1"}, job=view("job_a1", attempt=2))
    log.op("fetch", "a", {"id": "job_a1", "index": 0}, "no", status=404)
    log.op("status", "a", {"id": "job_a1"}, job=view("job_a1", "running", 1, attempt=2))
    log.op("cancel", "b", {"id": "job_b1"}, job=view("job_b1", "cancelled", finished=1020.0))
    log.op("fetch", "b", {"id": "job_b1", "index": 0}, "no", status=404)
    done = view("job_a1", "succeeded", 2, attempt=2, finished=1030.0)
    events = [
        {"id": 1, "event": "queued", "at": 4.0},
        {"id": 2, "event": "started", "at": 5.0},
        {"id": 3, "event": "image", "image": 0, "at": 11.0},
        {"id": 4, "event": "image", "image": 1, "at": 12.0},
        {"id": 5, "event": "succeeded", "at": 13.2, "job": done},
    ]
    log.op("events", "a", {"id": "job_a1", "after": 0}, events=events)
    for index in (0, 1):
        log.op("fetch", "a", {"id": "job_a1", "index": index}, sha256=f"{index}", right=True,
               receipt=f"receipt job_a1 {index}")  # fmt: skip
    log.op("submit", "b", {**wish, "tag": "b2"}, job=view("job_b2"))
    failed = view("job_b2", "failed", attempt=2, error="rank_failed", message="rank 1 was killed")
    log.op("fault", "", {"kind": "kill-rank"})
    log.op("fault", "", {"kind": "stop-rank"})
    log.op("status", "b", {"id": "job_b2"}, job=failed)
    log.op("list", "a", {"limit": 50}, jobs=[done])
    log.op("list", "b", {"limit": 50}, jobs=[failed, view("job_b1", "cancelled", finished=1020.0)])
    log.op("list", "b", {"limit": 50, "status": "failed"}, jobs=[failed])
    log.op("peek", "b", {"id": "job_a1"}, "no", status=404)
    return log


def found(log: Written, slack: int = 2) -> set[str]:
    lines = [json.dumps(line) for line in log.lines]
    return {anomaly.kind for anomaly in check(History.read(lines), slack)}


def told(log: Written, f: str, **asked: Any) -> dict[str, Any]:
    """What the last such operation was told."""
    number = next(
        line["op"]
        for line in reversed(log.lines)
        if line.get("f") == f and asked.items() <= {**line["asked"], "owner": line["owner"]}.items()
    )
    return next(line["told"] for line in log.lines if line.get("op") == number and "is" in line)


def test_a_right_history_has_no_anomaly() -> None:
    assert found(right()) == set()


def lost(log: Written) -> None:
    log.op("status", "a", {"id": "job_a1"}, "no", status=404)


def unfinished(log: Written) -> None:
    log.op("submit", "a", {"tag": "a2", "n": 2, "seed": 7, "steps": 4}, job=view("job_a2"))


def two_jobs(log: Written) -> None:
    log.op("submit", "a", {"tag": "a1", "n": 2, "seed": 7, "steps": 4},
           job=view("job_x", "succeeded", 2, tag="a1"))  # fmt: skip


def refused_and_done(log: Written) -> None:
    log.op("list", "a", {"limit": 1}, jobs=[view("job_no", "succeeded", 2)])


def never_asked(log: Written) -> None:
    log.op("list", "a", {"limit": 1}, jobs=[view("job_who", "succeeded", 2)])


def ends_twice(log: Written) -> None:
    log.op("status", "b", {"id": "job_b1"}, job=view("job_b1", "succeeded", 2))


def goes_back(log: Written) -> None:
    log.op("status", "a", {"id": "job_a1"}, job=view("job_a1", "running", 2, attempt=2))


def forgets_a_picture(log: Written) -> None:
    log.op("status", "a", {"id": "job_a1"}, job=view("job_a1", "succeeded", 1, attempt=2))


def attempts_go_back(log: Written) -> None:
    log.op("status", "a", {"id": "job_a1"}, job=view("job_a1", "succeeded", 2))


def queued_again(log: Written) -> None:
    log.op("submit", "a", {"tag": "a3", "n": 2, "seed": 7, "steps": 4}, job=view("job_a3"))
    log.op("status", "a", {"id": "job_a3"}, job=view("job_a3", "running"))
    log.op("status", "a", {"id": "job_a3"}, job=view("job_a3", "queued"))
    log.op("status", "a", {"id": "job_a3"}, job=view("job_a3", "succeeded", 2))


def after_cancel(log: Written) -> None:
    log.op("status", "b", {"id": "job_b1"}, job=view("job_b1", "cancelled", 1))


def file_after_cancel(log: Written) -> None:
    log.op("fetch", "b", {"id": "job_b1", "index": 0}, sha256="0", right=True)


def wrong_bytes(log: Written) -> None:
    told(log, "fetch", id="job_a1", index=1)["right"] = False


def other_bytes(log: Written) -> None:
    log.op("fetch", "a", {"id": "job_a1", "index": 1}, sha256="other", right=True)


def other_receipt(log: Written) -> None:
    told(log, "fetch", id="job_a1", index=1)["receipt"] = "another one"


def file_lost(log: Written) -> None:
    log.op("fetch", "a", {"id": "job_a1", "index": 1}, "no", status=404)


def half_of_the_pictures(log: Written) -> None:
    log.op("submit", "a", {"tag": "a4", "n": 2, "seed": 7, "steps": 4}, job=view("job_a4", "succeeded", 1))


def other_seed(log: Written) -> None:
    log.op("status", "b", {"id": "job_b2"}, job={**told(log, "status", id="job_b2")["job"], "seed": 8})


def unasked_cancel(log: Written) -> None:
    log.op("submit", "a", {"tag": "a5", "n": 2, "seed": 7, "steps": 4}, job=view("job_a5", "cancelled"))


def unexplained(log: Written) -> None:
    log.op("submit", "a", {"tag": "a6", "n": 2, "seed": 7, "steps": 4},
           job=view("job_a6", "failed", attempt=2, error="rank_failed"))  # fmt: skip


def list_lacks(log: Written) -> None:
    log.op("list", "b", {"limit": 50}, jobs=[told(log, "status", id="job_b2")["job"]])


def short_list_lacks(log: Written) -> None:
    log.op("list", "b", {"limit": 1}, jobs=[view("job_b1", "cancelled")])


def list_in_another_order(log: Written) -> None:
    told(log, "list", owner="b", limit=50, status="failed")["jobs"] *= 1
    for line in log.lines:
        if line.get("told", {}).get("jobs", [{}])[-1].get("id") == "job_b1":
            line["told"]["jobs"].reverse()


def list_twice(log: Written) -> None:
    told(log, "list", owner="a")["jobs"] *= 2


def list_of_another_status(log: Written) -> None:
    log.op("list", "a", {"limit": 50, "status": "failed"}, jobs=[told(log, "list", owner="a")["jobs"][0]])


def foreign(log: Written) -> None:
    told(log, "list", owner="b", status="failed")["jobs"].append(told(log, "list", owner="a")["jobs"][0])


def peeked(log: Written) -> None:
    log.op("peek", "b", {"id": "job_a1"}, job=told(log, "list", owner="a")["jobs"][0])


def events_in_another_order(log: Written) -> None:
    told(log, "events")["events"][1]["id"] = 1


def event_after_the_end(log: Written) -> None:
    told(log, "events")["events"].append({"id": 6, "event": "step", "at": 14.0})


def picture_twice_in_a_stream(log: Written) -> None:
    told(log, "events")["events"][3]["image"] = 0


def stream_ends_early(log: Written) -> None:
    told(log, "events")["events"].pop()


def starved(log: Written) -> None:
    """Two owners wait with twenty jobs each for 40 s, and one is served first."""
    for number in range(40):
        owner = "ab"[number % 2]
        started = 2000.0 + (number // 2 if owner == "a" else 20 + number // 2)
        job = view(f"job_{owner}s{number}", "succeeded", 2, created=1990.0, started=started, finished=started + 1)
        log.op("submit", owner, {"tag": f"{owner}s{number}", "n": 2, "seed": 7, "steps": 4}, job=job)


PLANTED: dict[str, list[Callable[[Written], None]]] = {
    "lost": [lost, unfinished],
    "two-jobs": [two_jobs],
    "ghost": [refused_and_done, never_asked],
    "two-ends": [ends_twice],
    "went-back": [goes_back, forgets_a_picture, attempts_go_back, queued_again],
    "after-cancel": [after_cancel, file_after_cancel],
    "wrong-bytes": [wrong_bytes, other_bytes],
    "receipt": [other_receipt],
    "result-lost": [file_lost, half_of_the_pictures],
    "changed": [other_seed],
    "unasked": [unasked_cancel, unexplained],
    "list": [list_lacks, short_list_lacks, list_in_another_order, list_twice, list_of_another_status],
    "foreign": [foreign, peeked],
    "event-order": [events_in_another_order, picture_twice_in_a_stream, stream_ends_early],
    "after-end": [event_after_the_end],
    "unfair": [starved],
}


@pytest.mark.parametrize(
    ("kind", "plant"), [(kind, plant) for kind, plants in PLANTED.items() for plant in plants],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)  # fmt: skip
def test_a_planted_anomaly_is_found(kind: str, plant: Callable[[Written], None]) -> None:
    log = copy.deepcopy(right())
    plant(log)
    assert kind in found(log)


def test_owners_that_take_turns_are_fair() -> None:
    log = right()
    for number in range(40):
        owner = "ab"[number % 2]
        job = view(f"job_{owner}s{number}", "succeeded", 2, created=1990.0, started=2000.0 + number, finished=2100.0)
        log.op("submit", owner, {"tag": f"{owner}s{number}", "n": 2, "seed": 7, "steps": 4}, job=job)
    assert found(log) == set()


def test_what_two_reads_at_the_same_time_return_has_no_order() -> None:
    log = right()
    log.op("submit", "a", {"tag": "a7", "n": 2, "seed": 7, "steps": 4}, job=view("job_a7"))
    end = view("job_a7", "succeeded", 2)
    first, second = (log.op("status", "a", {"id": "job_a7"}, job=job) for job in (end, view("job_a7", "running", 1)))
    assert "went-back" in found(log)
    # The second one was invoked before the first one was answered.
    for line in log.lines:
        if line.get("op") == second and "f" in line:
            line["at"] -= 0.9
    assert found(log) == set()
    assert first < second

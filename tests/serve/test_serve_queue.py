"""The server's queue and results on disk, and the service that shares tasks out, on ranks that are threads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import hashlib
import itertools
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ditmesh.errors import ConfigError, InputError
from ditmesh.serve.errors import IdempotencyKey, KeyReused, NoSpace, QueueFull, Stopping, StorageError, UnknownJob
from ditmesh.serve.http.errors import refusal_response
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.queue import dispatch
from ditmesh.serve.queue.database import FILE
from ditmesh.serve.queue.queue import Queue
from ditmesh.serve.queue.results import ResultFiles
from ditmesh.serve.queue.storage import storage_error
from ditmesh.serve.service import Service
from ditmesh.serve.settings import ServiceSettings
from ditmesh.serve.types import Input, JobError, JobImage, JobRequest
from support.faults import held, more_than
from support.queues import OTHERS, QueueProcess
from support.serve import PNG, assert_right, ended, picture, serving, until
from support.train import importing_tests

DIGEST = "0" * 64
SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None


def request(n: int = 1, **more: Any) -> JobRequest:
    return JobRequest(**{"model": "m", "prompt": "a fox", "seed": 7, **more}, n=n)


def image(index: int) -> JobImage:
    return JobImage(index=index, seed=7 + index, url=f"/{index}")


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory, where a commit costs nothing: for what kills processes and not machines."""
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        yield Path(folder)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """``opened(...)``: the queue of one folder, the one before closed."""
    queues: list[Queue] = []

    def open_again(now: Any = time.time, **options: Any) -> Queue:
        for queue in queues:
            queue.close()
        queues[:] = [Queue(tmp_path / "server", ServiceSettings(**options), now)]
        return queues[0]

    yield open_again
    for queue in queues:
        queue.close()


def begun(queue: Queue, most: int = 10**6) -> list[str]:
    """Begins pictures until none waits; the jobs in order."""
    order = []
    while len(order) < most and (head := queue.head()) is not None:
        assert queue.begin(head.id) is not None
        order.append(head.id)
    return order


# ---- the queue


def test_a_job_lives_and_is_there_after_a_restart(opened: Any) -> None:
    queue = opened()
    asked = request(2, inputs=(Input(role="image", digest=DIGEST),), priority=3)
    queue.submit("a", asked, "me", 1.0)
    queue = opened()
    job = queue.job("a", "me")
    assert (job.status, job.request, job.attempt, len(job.images)) == ("queued", asked, 1, 2)
    assert [one.seed for one in job.images] == [7, 8]
    assert queue.inputs() == {DIGEST}
    with pytest.raises(UnknownJob, match="no job 'a'"):
        queue.job("a", "somebody else")
    assert (queue.begin("a"), queue.begin("a"), queue.begin("a")) == (0, 1, None)
    assert queue.finish("a", 1, "1.png", image(1)).status == "running"
    # The ranks were at picture 0 when the server ended: it waits again, and nothing is held against the job.
    queue = opened()
    job = queue.job("a")
    assert (job.status, job.attempt, job.images[1].url) == ("running", 1, "/1")
    assert (queue.begin("a"), queue.begin("a")) == (0, None)
    job = queue.finish("a", 0, "0.png", image(0))
    assert job.status == "succeeded"
    assert job.expires == job.finished + queue.keep
    assert queue.finish("a", 0, "0.png", image(0)) is None
    assert queue.cancel("a") is None
    assert (queue.queued, queue.running, queue.run) == (0, 0, 3)
    assert queue.file("a", 0) == "0.png"


def test_a_request_with_a_key_is_one_job(opened: Any) -> None:
    now, once = [1e9], IdempotencyKey("k", "same")
    options: dict[str, Any] = {"keep": 100.0, "max_queue": 1, "now": lambda: now[0]}
    queue = opened(**options)
    first = queue.submit("a", request(), "me", 1.0, key=once)
    # The queue is full, which it is for others only; and after a restart as well.
    for _ in range(2):
        assert queue.submit("b", request(), "me", 1.0, key=once) == first
        assert queue.repeated("me", once) == first
        assert queue.repeated("me", IdempotencyKey("other", "same")) is None
        assert queue.repeated("somebody else", once) is None
        with pytest.raises(KeyReused, match="'k' came with another request before; use a new key"):
            queue.submit("b", request(), "me", 1.0, key=IdempotencyKey("k", "different"))
        queue = opened(**options)
    # What was cancelled is begun anew.
    queue.cancel("a")
    assert queue.repeated("me", once) is None
    assert queue.submit("b", request(), "me", 1.0, key=once).id == "b"
    queue.fail("b", JobError(code="internal", message="no"))
    assert queue.repeated("me", once).status == "failed"
    now[0] += 101
    queue.forget(queue.expired())
    assert queue.ids() == set()
    assert queue.repeated("me", once) is None
    assert queue._database.connection.execute("SELECT count(*) FROM keys").fetchone()[0] == 0


def test_a_file_of_an_earlier_server_gets_what_it_lacks(opened: Any) -> None:
    queue = opened()
    queue.submit("a", request(), "", 1.0)
    queue._database.connection.execute("DROP TABLE keys")
    queue._database.connection.execute("ALTER TABLE jobs DROP COLUMN due")
    queue = opened()
    assert queue.job("a").status == "queued"
    queue.submit("b", request(), "", 1.0, key=IdempotencyKey("k", "same"))
    assert queue.repeated("", IdempotencyKey("k", "same")).id == "b"


def test_jobs_without_results_are_remembered_up_to_a_number(opened: Any) -> None:
    now = [1e9]
    queue = opened(now=lambda: now[0])
    for number in range(6):
        queue.submit(f"a{number}", request(), "", 1.0)
        now[0] += 1
        if number == 0:
            queue.begin("a0")
            queue.finish("a0", 0, "0.png", image(0))
        elif number < 5:
            queue.cancel(f"a{number}")
    assert queue.surplus(2, without_results=True) == ["a2", "a1"]
    assert queue.surplus(4) == ["a0"]
    queue.forget(queue.surplus(2, without_results=True))
    assert queue.ids() == {"a0", "a3", "a4", "a5"}


@pytest.mark.parametrize("first", ["heavy", "light"])
def test_one_owner_with_many_jobs_does_not_hold_up_another(opened: Any, first: str) -> None:
    queue = opened()
    for number in range(40):
        queue.submit(f"heavy{number}", request(), "heavy", 1.0)
    begun(queue, 10)
    for number in range(5):
        queue.submit(f"light{number}", request(), "light", 1.0)
    places = queue.places()
    order = begun(queue)
    # No credit for having been away, and no punishment for the others: they take turns.
    assert [one[:5] for one in order[:10]].count("light") == 5
    assert [id for id in order if id.startswith("light")] == [f"light{number}" for number in range(5)]
    # Places are what then happens.
    assert sorted(places, key=lambda id: places[id]) == order


def test_shares_are_of_work_and_by_weight(opened: Any) -> None:
    queue = opened(weights={"double": 2.0}, max_queue=10_000, max_per_owner=10_000)
    for number in range(120):
        queue.submit(f"double{number}", request(), "double", 1.0)
        queue.submit(f"single{number}", request(), "single", 1.0)
        queue.submit(f"large{number}", request(), "large", 4.0)
    counts = Counter(id.rstrip("0123456789") for id in begun(queue, 130))
    # Of work 2 : 1 : 1, of pictures so many:
    assert counts["double"] == pytest.approx(130 * 2 / 3.25, abs=4)
    assert counts["single"] == pytest.approx(130 / 3.25, abs=4)
    assert counts["large"] == pytest.approx(130 * 0.25 / 3.25, abs=4)


def test_a_priority_orders_the_jobs_of_its_owner(opened: Any) -> None:
    queue = opened()
    queue.submit("a-usual", request(), "a", 1.0)
    queue.submit("a-late", request(priority=-1), "a", 1.0)
    queue.submit("b-usual", request(), "b", 1.0)
    for number in range(3):
        queue.submit(f"b-urgent{number}", request(priority=10), "b", 1.0)
    places = queue.places()
    order = begun(queue)
    # Owners take turns, whatever they call urgent; of two that have had as much the more urgent job goes first.
    assert order == ["b-urgent0", "a-usual", "b-urgent1", "a-late", "b-urgent2", "b-usual"]
    assert sorted(places, key=lambda id: places[id]) == order


def test_a_deadline_orders_the_jobs_of_its_owner_and_priority(opened: Any) -> None:
    queue = opened(now=lambda: 1e9)
    queue.submit("a-patient", request(), "a", 1.0)
    queue.submit("a-later", request(deadline_ms=90_000), "a", 1.0)
    queue.submit("a-soon", request(deadline_ms=30_000), "a", 1.0)
    queue.submit("a-urgent", request(priority=1), "a", 1.0)
    for number in range(3):
        queue.submit(f"b-{number}", request(deadline_ms=1000 - number), "b", 1.0)
    # After a restart as well.
    queue = opened(now=lambda: 1e9)
    places = queue.places()
    order = begun(queue)
    assert [id for id in order if id[0] == "a"] == ["a-urgent", "a-soon", "a-later", "a-patient"]
    assert [id for id in order if id[0] == "b"] == ["b-2", "b-1", "b-0"]
    # Owners take turns, whatever their deadlines are.
    assert sorted(id[0] for id in order[:2]) == sorted(id[0] for id in order[2:4]) == ["a", "b"]
    assert sorted(places, key=lambda id: places[id]) == order


def test_a_late_job_waits_like_a_patient_one(opened: Any) -> None:
    clock = [1000.0]
    queue = opened(now=lambda: clock[0])
    queue.submit("late", request(deadline_ms=1000), "a", 1.0)
    queue.submit("patient", request(), "a", 1.0)
    queue.submit("in-time", request(deadline_ms=60_000), "a", 1.0)
    assert queue.head().id == "late"
    clock[0] += 2.0
    assert begun(queue) == ["in-time", "late", "patient"]


def test_one_owner_who_asks_for_the_highest_priority_again_and_again_starves_no_other(opened: Any) -> None:
    queue = opened()
    for number in range(5):
        queue.submit(f"greedy{number}", request(priority=10), "b", 1.0)
    begun(queue, 3)
    queue.submit("modest", request(), "a", 1.0)
    order = []
    for number in range(5, 20):
        queue.submit(f"greedy{number}", request(priority=10), "b", 1.0)
        order += begun(queue, 1)
    assert "modest" in order[:2]


def test_jobs_of_a_later_version_fail_and_the_others_go_on(opened: Any, tmp_path: Path) -> None:
    queue = opened()
    for id in ("later", "wrong", "right", "old"):
        queue.submit(id, request(2, seed=4), "", 1.0)
    queue.begin("later")
    for number in (0, 1):
        while queue.begin("old") is not None:
            pass
        queue.finish("old", number, f"{number}.png", image(number))
    queue.close()
    with sqlite3.connect(tmp_path / "server" / FILE) as db:
        for id in ("later", "old"):
            (text,) = db.execute("SELECT request FROM jobs WHERE id = ?", (id,)).fetchone()
            later = json.dumps(json.loads(text) | {"sharpness": 1})
            db.execute("UPDATE jobs SET request = ? WHERE id = ?", (later, id))
        db.execute("UPDATE jobs SET request = '{\"model\": 5}' WHERE id = 'wrong'")
        db.execute("UPDATE pictures SET image = '{' WHERE picture = 1")
    db.close()
    queue = opened()
    assert queue.unread == ["later", "wrong"]
    assert [job.id for job, _ in queue.live()] == ["right"]
    assert "field 'sharpness' is not known" in queue.job("later").error.message
    assert (queue.job("later").status, queue.job("wrong").status) == ("failed", "failed")
    # What has ended is shown as far as it is known.
    assert queue.job("old").status == "succeeded"
    assert queue.job("old").request.prompt == request().prompt
    assert {job.id for job in queue.jobs("")} == {"later", "wrong", "right", "old"}
    assert begun(queue) == ["right", "right"]
    queue.close()
    with sqlite3.connect(tmp_path / "server" / FILE) as db:
        assert "sharpness" in db.execute("SELECT request FROM jobs WHERE id = 'later'").fetchone()[0]
    db.close()


def test_jobs_of_a_model_that_is_gone_fail_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        models = [ModelSpec("one", "emoji-sd3"), ModelSpec("two", "emoji-sd3")]
        async with serving(tmp_path, models=models, grace=0.0) as service:
            job = await service.submit(JobRequest(prompt="fox", model="two", steps=2000), "")
        async with serving(tmp_path, models=models[:1]) as service:
            gone = await service.job(job.id, "")
            assert gone.status == "failed"
            assert "has no model 'two' any more; submit the job again for one of: one" in gone.error.message
            assert [event.event async for event in service.events(job.id, "")][-1] == "failed"
            assert service.state().queued == 0

    asyncio.run(main())
    assert "1 jobs of models that this server does not have ('two') have failed" in caplog.text


def sqlite_error(code: int) -> sqlite3.Error:
    """An error as SQLite raises it."""
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "words", "status"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room on the disk", 507),
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit of open files", 503),
        (OSError(errno.EACCES, "Permission denied"), "give the server's user the right", 500),
        (OSError(errno.EIO, "Input/output error"), "check the disk for errors", 500),
        (OSError(errno.EEXIST, "File exists"), "give another folder", 500),
        (sqlite_error(sqlite3.SQLITE_BUSY), "end the other process", 503),
        (sqlite_error(sqlite3.SQLITE_FULL), "make room on the disk", 507),
        (sqlite_error(sqlite3.SQLITE_CORRUPT), "start the server again", 500),
    ],
)
def test_errors_of_the_system_keep_their_names(error: Any, words: str, status: int) -> None:
    found = storage_error("cannot write /x", error)
    assert words in str(found)
    assert (error.strerror if isinstance(error, OSError) else str(error)) in str(found)
    assert refusal_response(found).status == status
    assert ("retry-after" in {name.lower() for name in refusal_response(found).headers}) is (status == 503)


def test_mistakes_are_not_errors_of_the_disk(opened: Any) -> None:
    assert storage_error("cannot", sqlite3.OperationalError("no such table: x")) is None
    queue = opened()
    with pytest.raises(sqlite3.OperationalError, match="no such table"), queue._change() as db:
        db.execute("SELECT * FROM nowhere")


def test_an_input_image_is_its_owners(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as service:
            digest = await service.put_input(PNG)
            asked = JobRequest(prompt="fox", strength=0.5, inputs=(Input(role="image", digest=digest),))
            await service.submit(asked, "mine")
            await service.release_input(digest)
            await service.submit(asked, "mine")
            with pytest.raises(InputError, match="is not on the server any more; send the image again"):
                await service.submit(asked, "somebody else's")

    asyncio.run(main())


def test_a_job_that_a_stopping_server_puts_back_is_told_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, grace=0.0) as service:
            job = await service.submit(JobRequest(prompt="fox", steps=2000), "")
            live = service.live_jobs[job.id]
            await until(lambda: live.progress.get(0, 0) > 2)
        (again,) = [event.data for event in live.log.events if event.event == "restarted"]
        assert again == {"attempt": 1, "reason": "the server is stopping"}

    asyncio.run(main())


def test_a_locked_queue_is_not_a_full_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as service:
            await service.on_disk(service.queue._database.connection.execute, "PRAGMA busy_timeout = 50")
            job = await service.submit(JobRequest(prompt="fox", steps=20), "")
            await until(lambda: service.live_jobs[job.id].progress.get(0, 0) > 2)
            with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(StorageError, match=r"locked.*end the other process") as found:
                    await service.submit(JobRequest(prompt="hen"), "")
                assert not isinstance(found.value, NoSpace)
                await until(lambda: service.has_unwritten)
                other.execute("ROLLBACK")
            # What was done meanwhile was kept, and is written then.
            await assert_right(service, await ended(service, job))

    asyncio.run(main())


def test_what_a_damaged_queue_cannot_take_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(tmp_path) as service:
            job = await service.submit(JobRequest(prompt="fox", steps=20), "")

            def damaged(*arguments: Any) -> None:
                raise storage_error("cannot write", sqlite_error(sqlite3.SQLITE_CORRUPT))

            monkeypatch.setattr(service.queue, "finish", damaged)
            failed = await ended(service, job)
            assert (failed.status, failed.error.code) == ("failed", "storage")
            assert not service.has_unwritten

    asyncio.run(main())


def test_what_was_not_generated_is_not_charged(opened: Any) -> None:
    queue = opened()
    for owner in "ab":
        for number in range(4):
            queue.submit(f"{owner}{number}", request(), owner, 1.0)
    assert begun(queue, 2) == ["a0", "b0"]
    assert queue.cancel("a0", [0.0]).status == "cancelled"
    assert begun(queue, 3) == ["a1", "a2", "b1"]


def test_attempts_are_counted_and_second_ones_go_first(opened: Any) -> None:
    queue = opened()
    for id in "abc":
        queue.submit(id, request(2), "", 1.0)
    assert begun(queue, 4) == ["a", "a", "b", "b"]
    assert queue.interrupt("b", [0, 1]).attempt == 2
    assert queue.job("b").status == "queued"
    head = queue.head()
    assert (head.id, head.again) == ("b", True)
    assert queue.head(again=False).id == "c"
    assert queue.interrupt("a", [1], counts=False).attempt == 1
    assert queue.fail("b", JobError(code="stalled", message="rank 1")).error.code == "stalled"
    assert queue.job("b").error.message == "rank 1"
    assert queue.interrupt("b", [0]) is None
    assert begun(queue) == ["a", "c", "c"]


def test_a_picture_that_is_reported_twice_counts_once(opened: Any) -> None:
    """Ranks that were given up may answer late: the first report stays, and no other picture counts as done."""
    queue = opened()
    queue.submit("a", request(2), "", 1.0)
    queue.begin("a")
    queue.begin("a")
    assert queue.finish("a", 0, "0.png", image(0)).status == "running"
    assert queue.finish("a", 0, "0-2.png", image(0)) is None
    assert queue.file("a", 0) == "0.png"
    assert queue.job("a").status == "running"
    assert queue.finish("a", 1, "1.png", image(1)).status == "succeeded"


def test_bounds_of_the_queue(opened: Any) -> None:
    queue = opened(max_queue=10, max_per_owner=4)
    queue.submit("a", request(3), "a", 2.0)
    with pytest.raises(QueueFull, match="3 images of yours wait already, and 4 may") as caught:
        queue.submit("b", request(3), "a", 2.0)
    assert caught.value.retry_after == 5.0
    with pytest.raises(InputError, match="n 5 is more than the 4 images that may wait; use n 4 at most"):
        queue.submit("b", request(5), "a", 1.0)
    # Nobody's name is everybody's.
    queue.submit("c", request(6), "", 2.0)
    with pytest.raises(QueueFull, match="9 images wait already, and 10 may"):
        queue.submit("d", request(2), "", 2.0)
    with pytest.raises(QueueFull, match="9 images wait already, and 10 may"):
        queue.submit("d", request(2), "b", 2.0)
    # What is done makes room.
    queue.begin("c")
    queue.finish("c", 0, "0.png", image(0))
    queue.submit("d", request(2), "", 1.0)
    assert queue.jobs("a") == [queue.job("a")]
    assert [job.id for job in queue.jobs("")] == ["d", "c"]
    assert [job.id for job in queue.jobs("", 1)] == ["d"]
    assert [job.id for job in queue.jobs("", status="running")] == ["c"]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "begin", "finish", "interrupt", "cancel", "fail", "forget", "open"]),
        st.integers(0, 2**16),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS)
def test_no_order_of_events_loses_or_repeats_a_picture(operations: list[tuple[str, int]]) -> None:
    """Against a model of what a queue is, in a few lines."""
    running_indices: dict[str, set[int]] = {}
    done: dict[str, set[int]] = {}
    size: dict[str, int] = {}
    status: dict[str, str] = {}
    names = (f"j{number}" for number in itertools.count())
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        queue = Queue(folder, ServiceSettings(keep=0.0, max_queue=12, max_per_owner=6))
        for what, number in operations:
            live = [id for id in status if status[id] in ("queued", "running")]
            id = live[number % len(live)] if live else ""
            if what == "submit":
                new, n, owner = next(names), 1 + number % 3, "ab"[number % 2]
                waiting = sum(size[one] - len(done[one]) for one in live)
                with contextlib.suppress(QueueFull):
                    queue.submit(new, request(n, priority=number % 3 - 1), owner, 1.0 + number % 5)
                    assert waiting + n <= 12
                    size[new], status[new], running_indices[new], done[new] = n, "queued", set(), set()
            elif what == "begin":
                head = queue.head()
                if head is None:
                    assert all(len(running_indices[one] | done[one]) == size[one] for one in live)
                else:
                    index = queue.begin(head.id)
                    assert index not in running_indices[head.id] | done[head.id]
                    assert index in range(size[head.id])
                    running_indices[head.id].add(index)
                    status[head.id] = "running"
            elif what == "finish" and id and running_indices[id]:
                index = min(running_indices[id])
                running_indices[id].discard(index)
                done[id].add(index)
                status[id] = queue.finish(id, index, f"{index}.png", image(index)).status
                assert (status[id] == "succeeded") == (len(done[id]) == size[id])
            elif what == "interrupt" and id and running_indices[id]:
                lost, running_indices[id] = running_indices[id], set()
                status[id] = queue.interrupt(id, lost).status
            elif what == "cancel" and id:
                status[id] = queue.cancel(id).status
            elif what == "fail" and id:
                status[id] = queue.fail(id, JobError(code="internal", message="")).status
            elif what == "forget":
                for one in queue.expired():
                    queue.forget([one])
                    for book in (size, status, running_indices, done):
                        book.pop(one)
            elif what == "open":
                queue.close()
                queue = Queue(folder, ServiceSettings(keep=0.0, max_queue=12, max_per_owner=6))
                for one in live:
                    running_indices[one].clear()
                    status[one] = "running" if done[one] else "queued"
            assert queue.ids() == status.keys()
            for one, expected in status.items():
                job = queue.job(one)
                assert job.status == expected
                assert {got.index for got in job.images if got.url is not None} == done[one]
            assert queue.queued == sum(one == "queued" for one in status.values())
            assert queue.running == sum(one == "running" for one in status.values())
            assert queue.places().keys() == {one for one in status if status[one] == "queued"}
        queue.close()


DRILL = """
import json, os, signal, sys
from pathlib import Path
from ditmesh.serve.queue import database, queue, results, rows
from ditmesh.serve.types import JobImage, JobRequest

FILES = {queue.__file__, database.__file__, rows.__file__, results.__file__}
folder, counts = Path(sys.argv[1]), []

def image(index):
    return JobImage(index=index, seed=index, url=f"/{index}")

def life(say):
    jobs, files = queue.Queue(folder / "server"), results.ResultFiles(folder / "server")
    for number in range(2):
        id = f"{os.getpid()}-{number}"
        jobs.submit(id, JobRequest(model="m", prompt="x", n=2, seed=0), "me", 1.0)
        say("accepted", id)
        for index in (jobs.begin(id), jobs.begin(id)):
            jobs.finish(id, index, files.write(id, index, f"{id} {index}".encode()), image(index))
            say("done", id, index)
        if number:
            jobs.forget([id])
            files.remove(id)
            say("forgotten", id)
    jobs.close()

def child(at, out):
    lines = 0
    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    life(lambda *said: os.write(out, (json.dumps(said) + "\\n").encode()))
    os._exit(0)

at, step, kills = 1, int(sys.argv[2]), 0
while True:
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        child(at, theirs)
    os.close(theirs)
    said = [json.loads(line) for line in os.fdopen(ours).read().splitlines()]
    ended = os.waitpid(pid, 0)[1] == 0
    # The next server.
    jobs, files = queue.Queue(folder / "server"), results.ResultFiles(folder / "server")
    assert jobs.aside is None
    files.sweep(jobs.ids(), jobs.inputs())
    gone = {one[1] for one in said if one[0] == "forgotten"}
    for what, id, *rest in said:
        if id in gone:
            continue
        # The kill may have come when the job was forgotten already, and not said so.
        if id not in jobs.ids():
            assert id.endswith("-1") and said[-1][:2] == ["done", id], said
            continue
        job = jobs.job(id)
        assert job.status != "failed"
        if what == "done":
            path, _ = files.path(id, jobs.file(id, rest[0]))
            assert path.read_bytes() == f"{id} {rest[0]}".encode()
    # Whatever is said to be there is there.
    for id in jobs.ids():
        for one in jobs.job(id).images:
            if one.url is not None:
                path, _ = files.path(id, jobs.file(id, one.index))
                assert path.read_bytes() == f"{id} {one.index}".encode()
    # Accepted jobs can be done to their ends, whatever they were at.
    while (head := jobs.head()) is not None:
        index = jobs.begin(head.id)
        jobs.finish(head.id, index, files.write(head.id, index, f"{head.id} {index}".encode()), image(index))
    assert not jobs.live()
    for id in jobs.ids():
        assert jobs.job(id).status == "succeeded"
    jobs.forget(jobs.ids())
    files.sweep(jobs.ids(), jobs.inputs())
    assert not [path for path in (folder / "server" / "results").rglob("*")], "left behind"
    assert files.bytes == 0
    jobs.close()
    if ended:
        break
    kills, at = kills + 1, at + step
print(kills)
"""


def test_kill_9_between_any_two_statements(quick: Path) -> None:
    """What was accepted is there, what was said to be done is on disk, and nothing else is left."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", DRILL, str(quick), "3"],
        env=importing_tests(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) > 100


def test_another_version_is_refused_and_a_broken_file_moved_aside(opened: Any, tmp_path: Path) -> None:
    queue = opened()
    queue.submit("a", request(), "", 1.0)
    folder = tmp_path / "server"
    with pytest.raises(ConfigError, match=rf"is used by another server \(process {os.getpid()}\); end that, or give"):
        Queue(folder)
    queue.close()
    with sqlite3.connect(folder / FILE) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(ConfigError, match="was written by version 7, and this ditmesh has queues of version 1"):
        Queue(folder)
    # Nor did it keep the lock, or touch anything.
    with sqlite3.connect(folder / FILE) as db:
        assert db.execute("SELECT id FROM jobs").fetchall() == [("a",)]
        db.execute("PRAGMA user_version = 1")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    (folder / "results" / "a").mkdir(parents=True)
    (folder / "results" / "a" / "0.png").write_bytes(PNG)
    (folder / "keys.json").write_text("{}")
    broken = (folder / FILE).read_bytes()[:5000]
    (folder / FILE).write_bytes(broken)
    queue = opened()
    assert queue.ids() == set()
    assert queue.aside is not None
    assert queue.aside.parent == folder
    assert (queue.aside / FILE).read_bytes() == broken
    assert (queue.aside / "results" / "a" / "0.png").read_bytes() == PNG
    assert (folder / "keys.json").exists()
    queue.close()
    (folder / FILE).write_bytes(b"no database at all" * 100)
    assert opened().aside is not None
    assert len([*folder.glob("broken-*")]) == 2


@pytest.mark.parametrize("run", ["first", "later"])
def test_other_programs_that_use_the_file_cost_no_job(run: str, quick: Path) -> None:
    """A process has the queue open, another program does something with the file, and then the first one is killed."""
    folders = {how: quick / how.replace(" ", "-") for how in OTHERS}
    if run == "later":
        for folder in folders.values():
            Queue(folder).close()
    with QueueProcess() as server:
        for how, folder in folders.items():
            server.send(folder, "before")
            server.wait_for("ended")
            log = (folder / f"{FILE}-wal").stat().st_ino
            OTHERS[how](folder / FILE)
            assert (folder / f"{FILE}-wal").stat().st_ino == log, how
            server.send(folder, "after")
            server.wait_for("ended")
            server.send(folder, "after-waits")
            server.wait_for("accepted")
    for how, folder in folders.items():
        queue = Queue(folder)
        told = {job.request.prompt: job.status for job in queue.jobs("")}
        queue.close()
        assert told == {"before": "succeeded", "after": "succeeded", "after-waits": "queued"}, how


@pytest.mark.matrix
def test_a_process_that_is_killed_beside_other_programs_loses_and_doubles_no_job(quick: Path) -> None:
    """200 kills at random moments, in the first and in later runs of 50 folders; other programs use the file."""
    generator = random.Random(0)
    kills: Counter[str] = Counter()
    for number in range(50):
        folder, accepted, ended_jobs, asked = quick / str(number), {}, set(), []
        for run in range(4):
            over, uses = threading.Event(), Counter()

            def use(over: threading.Event = over, uses: Counter = uses, folder: Path = folder) -> None:
                while not over.is_set():
                    how = generator.choice([*OTHERS])
                    if (folder / FILE).exists():
                        OTHERS[how](folder / FILE)
                        uses[how] += 1
                    time.sleep(generator.uniform(0, 0.01))

            server, other = QueueProcess(), threading.Thread(target=use)
            other.start()
            server.wait_for("starting")
            again = [key for key in asked if key not in accepted]
            keys = [f"{number}-{run}-{job}{'-waits' * (job % 3 == 0)}" for job in range(200)]
            asked += keys
            sender = threading.Thread(
                target=lambda s=server, f=folder, keys=(*again, *keys): [s.send(f, key) for key in keys]
            )
            sender.start()
            # Some die while they open the folder, the others at work.
            opens = (run + number) % 4 == 0
            if not opens:
                server.wait_for("open")
            time.sleep(generator.uniform(0, 0.04 if opens else 0.25))
            for word, *said in server.kill():
                if word == "accepted":
                    # A request that is sent again is the same job.
                    assert accepted.setdefault(said[0], said[1]) == said[1]
                elif word == "ended":
                    ended_jobs.add(said[1])
            sender.join()
            over.set()
            other.join()
            kills["first" if run == 0 else "later"] += 1
            kills["uses of other programs"] += uses.total()
        queue = Queue(folder)
        jobs = queue.jobs("", limit=10**6)
        queue.close()
        statuses = {job.id: job.status for job in jobs}
        assert set(accepted.values()) <= statuses.keys()
        assert all(statuses[id] == "succeeded" for id in ended_jobs)
        prompts = Counter(job.request.prompt for job in jobs)
        assert set(prompts.values()) <= {1}
        assert prompts.keys() <= set(asked)
        kills["jobs accepted"] += len(accepted)
        kills["jobs ended"] += len(ended_jobs)
    print(dict(kills))
    assert (kills["first"], kills["later"]) == (50, 150)
    assert kills["jobs ended"] > 500


# ---- results


def test_results_and_inputs_expire_and_leave_nothing(opened: Any, tmp_path: Path) -> None:
    now = [1e9]
    queue = opened(keep=100.0, now=lambda: now[0])
    results = ResultFiles(queue.folder, ServiceSettings(keep=100.0), lambda: now[0])
    digest, other = results.put_input(b"fox"), results.put_input(b"hen")
    assert digest == hashlib.sha256(b"fox").hexdigest()
    queue.submit("a", request(2, inputs=(Input(role="image", digest=digest),)), "", 1.0)
    queue.begin("a")
    assert results.write("a", 0, PNG + b"0") == "0.png"
    assert results.write("a", 1, b"RIFF....WEBP") == "1.webp"
    assert results.path("a", "0.png") == (queue.folder / "results" / "a" / "0.png", "image/png")
    queue.finish("a", 0, "0.png", image(0))
    now[0] += 101
    # The job is not done, and needs its input; nobody needs the other one.
    assert queue.expired() == []
    results.sweep(queue.ids(), queue.inputs())
    assert results.input(digest) is not None
    assert results.input(other) is None
    queue.begin("a")
    queue.finish("a", 1, "1.webp", image(1))
    now[0] += 99
    assert queue.expired() == []
    now[0] += 2
    assert queue.expired() == ["a"]
    # As after a kill: a beginning of a file, and the results of a job that nobody knows.
    (queue.folder / "results" / "a" / ".1-abc.tmp").write_bytes(b"half")
    results.write("unknown", 0, b"x")
    results = ResultFiles(queue.folder, ServiceSettings(keep=100.0), lambda: now[0])
    assert results.bytes == len(PNG) + 1 + 12 + 3 + 1
    queue.forget(["a"])
    results.sweep(queue.ids(), queue.inputs())
    assert [path.name for path in queue.folder.rglob("*") if path.parent.name in ("results", "inputs", "a")] == []
    assert results.bytes == 0
    with pytest.raises(UnknownJob):
        queue.job("a")


# ---- the service, on ranks that are threads


def test_jobs_are_done_side_by_side_and_each_is_what_it_is_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, replicas=2, max_batch=3) as service:
            assert not service.state().ready
            asked = [JobRequest(prompt=f"fox {number}", n=1 + number % 4, priority=number % 2) for number in range(16)]
            jobs = [await service.submit(one, "abc"[number % 3]) for number, one in enumerate(asked)]
            assert {job.status for job in jobs} == {"queued"}
            for number, job in enumerate(jobs):
                await assert_right(service, await ended(service, job, "abc"[number % 3]), "abc"[number % 3])
            state = service.state()
            assert state.ready
            assert (state.queued, state.running) == (0, 0)
            assert [one.restarts for one in state.replicas] == [0, 0]
            assert all(one.calls for one in state.replicas)
            # Steps of several ran as one.
            assert max(image.receipt["company"] for job in await service.jobs("a") for image in job.images) > 1
            # Nobody else's.
            with pytest.raises(UnknownJob):
                await service.job(jobs[0].id, "b")
            with pytest.raises(UnknownJob):
                await service.result(jobs[0].id, 0, "b")
            with pytest.raises(UnknownJob):
                await anext(service.events(jobs[0].id, "b"))
            with pytest.raises(UnknownJob, match="no image 99"):
                await service.result(jobs[0].id, 99, "a")

    asyncio.run(main())


def test_events_are_numbered_and_told_to_whoever_comes_late(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as service:
            job = await service.submit(JobRequest(prompt="fox", n=2, steps=30, previews=10), "me")
            seen = []
            async for event in service.events(job.id, "me"):
                seen.append(event)
                if event.event == "step" and event.data["step"] == 5:
                    break
            # The connection was lost; meanwhile there is more.
            await until(lambda: service.live_jobs[job.id].progress.get(0, 0) >= 20)
            now = await service.job(job.id, "me")
            assert now.steps == 60
            assert 20 <= now.step < 60
            assert now.eta is not None
            assert 0 < now.eta < 5
            async for event in service.events(job.id, "me", after=seen[-1].id):
                seen.append(event)
            assert [event.id for event in seen] == sorted({event.id for event in seen})
            names = Counter(event.event for event in seen)
            assert (names["queued"], names["started"], names["step"], names["image"]) == (1, 1, 60, 2)
            assert seen[-1].event == "succeeded"
            assert seen[-1].data == (await service.job(job.id, "me")).model_dump(mode="json")
            steps = [event.data["step"] for event in seen if event.event == "step" and event.data["image"] == 1]
            assert steps == [*range(1, 31)]
            whole = [event async for event in service.events(job.id, "me")]
            assert [event.id for event in whole if event.event != "preview"] == [
                event.id for event in seen if event.event != "preview"
            ]
            assert [event async for event in service.events(job.id, "me", after=seen[-1].id)] == []
        async with serving(tmp_path) as service:
            # Of an earlier run what the state says; numbers go on behind whatever that run had.
            told = [event async for event in service.events(job.id, "me", after=seen[-1].id)]
            assert [event.event for event in told] == ["started", "image", "image", "succeeded"]
            assert told[0].id > seen[-1].id
            assert told[-1].data["id"] == job.id

    asyncio.run(main())


def test_cancel(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_batch=2) as service:
            running = await service.submit(JobRequest(prompt="one", steps=10_000, n=2), "")
            waiting = await service.submit(JobRequest(prompt="two"), "")
            await until(lambda: service.live_jobs[running.id].progress.get(1, 0) > 3)
            first = await service.submit(JobRequest(prompt="three", priority=-1), "")
            assert (await service.job(first.id, "")).position == 1
            job = await service.cancel(first.id, "")
            assert (job.status, job.position) == ("cancelled", None)
            assert [event.event async for event in service.events(first.id, "")] == ["queued", "cancelled"]
            with pytest.raises(UnknownJob):
                await service.cancel(running.id, "somebody")
            job = await service.cancel(running.id, "")
            assert job.status == "cancelled"
            # Its ranks stop at the next step, and are there for the next.
            group = service._dispatcher.slots[0]
            await until(lambda: not any(live.id == running.id for live, _ in group.running.values()), 1.0)
            await assert_right(service, await ended(service, waiting))
            assert (await service.cancel(waiting.id, "")).status == "succeeded"

    asyncio.run(main())


def test_a_job_is_cancelled_while_the_server_stops(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, grace=60.0) as service:
            job = await service.submit(JobRequest(prompt="fox", steps=2000), "")
            await until(lambda: service.live_jobs[job.id].progress.get(0, 0) > 2)
            began = time.monotonic()
            stopping = asyncio.create_task(service.stop(60.0))
            await asyncio.sleep(0.1)
            assert (await service.cancel(job.id, "")).status == "cancelled"
            # Not after the time that jobs are given to end.
            await asyncio.wait_for(stopping, 30.0)
            assert time.monotonic() - began < 30.0

    with contextlib.suppress(RuntimeError):
        # It is stopped already.
        asyncio.run(main())


def test_input_pictures_of_refused_jobs_are_removed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as service:
            folder = tmp_path / "inputs"

            def asked(digest: str, **more: Any) -> JobRequest:
                return JobRequest(prompt="fox", inputs=(Input(role="image", digest=digest),), strength=0.5, **more)

            digest, other = await service.put_input(b"fox"), await service.put_input(b"hen")
            with pytest.raises(InputError):
                await service.submit(asked(digest, width=66, height=64), "")
            # Another request has it as well, and is accepted later.
            assert await service.put_input(b"fox") == digest
            await service.release_input(digest)
            assert {path.name for path in folder.iterdir()} == {digest, other}
            await service.submit(asked(digest), "")
            await service.release_input(digest)
            await service.release_input(other)
            assert [path.name for path in folder.iterdir()] == [digest]
            assert service._pending_inputs == {}

    asyncio.run(main())


def test_models_are_loaded_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [ModelSpec("a", "emoji-sd3"), ModelSpec("b", "emoji-dit-s"), ModelSpec("c", "emoji-sd3")]

    async def main() -> None:
        async with serving(tmp_path, models=models, max_loaded=2) as service:
            assert [card.id for card in service.models()] == ["a", "b", "c"]
            assert [card.loaded for card in service.models()] == [False] * 3
            for names, loaded in (("aba", "ab"), ("cc", "bc"), ("ab", "ab")):
                jobs = [
                    await service.submit(JobRequest(prompt="lion", model=name if name != "a" else ""), "")
                    for name in names
                ]
                for job, name in zip(jobs, names, strict=True):
                    assert job.request.model == name
                    await assert_right(service, await ended(service, job))
                if names != "ab":
                    assert "".join(card.id for card in service.models() if card.loaded) == loaded
            assert service.models()[0].pipeline == "Fake"
        monkeypatch.setattr(dispatch, "SWITCH", 0.05)
        async with serving(tmp_path, models=models) as service:
            # What is at work is not unloaded, which these ranks would not survive.
            slow, other = [
                await service.submit(JobRequest(prompt="lion", model=name, steps=60), "") for name in ("a", "b")
            ]
            await assert_right(service, await ended(service, other))
            assert (await service.job(slow.id, "")).status == "succeeded"
            assert service.state().replicas[0].restarts == 0

    asyncio.run(main())


def test_a_model_that_does_not_load_fails_its_jobs_and_no_others(tmp_path: Path) -> None:
    models = [
        ModelSpec("well", "emoji-sd3"),
        ModelSpec("breaks", "emoji-sd3", dtype="float16"),
        ModelSpec("refuses", "emoji-sd3", dtype="bfloat16"),
    ]

    async def main() -> None:
        async with serving(tmp_path, models=models, max_loaded=2) as service:
            jobs = [
                await service.submit(JobRequest(prompt="fox", model=name, steps=40), "")
                for name in ("well", "breaks", "refuses", "well", "breaks")
            ]
            done = [await ended(service, job) for job in jobs]
            assert [job.status for job in done] == ["succeeded", "failed", "failed", "succeeded", "failed"]
            assert [job.attempt for job in done] == [1] * 5
            assert "model breaks could not be loaded: rank 0 of 1 raised ArithmeticError" in done[1].error.message
            assert done[1].error.code == "rank_failed"
            assert done[2].error.message == "model refuses could not be loaded: this model is broken"

    asyncio.run(main())


def test_what_cannot_be_done_is_refused_with_the_names_of_the_fields(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": "sd4"}, r"model 'sd4' is none of the server's \(sd3, dit\); did you mean 'sd3'\?"),
        ({"width": 64}, "width and height belong together"),
        ({"width": 66, "height": 64}, "size 66x64: the model needs multiples of 4; use 64x64 or 68x64"),
        ({"prompt": " "}, "prompt 1 is empty"),
        ({"strength": 0.5}, "strength needs image as well"),
        ({"loras": [{"name": "oil"}]}, r"lora 'oil' is none of those that the server offers for sd3 \(none\)"),
        ({"inputs": [{"role": "image", "digest": DIGEST}]}, "input 0000000000000000… is not on the server any more"),
        ({"inputs": [{"role": "mask", "digest": DIGEST}]}, "mask needs image as well"),
        ({"model": "dit", "prompt": "lio"}, "takes classes and has none of that name; .* such as 'lion'"),
        ({"model": "dit", "prompt": "lion", "width": 32, "height": 32}, "one size only, 64x64; leave size out"),
    ]

    async def main() -> None:
        models = [ModelSpec("sd3", "emoji-sd3"), ModelSpec("dit", "emoji-dit-s")]
        async with serving(tmp_path, models=models) as service:
            for more, said in wrong:
                with pytest.raises(InputError, match=said) as caught:
                    await service.submit(JobRequest(**{"prompt": "fox", **more}), "")
                assert "--" not in str(caught.value)
            # What only the ranks find out.
            job = await ended(service, await service.submit(JobRequest(prompt="! refuse"), ""))
            assert job.error == JobError(code="invalid_request", message="the pipeline cannot do that")
            with pytest.raises(InputError, match="sd3 generates images, not videos; leave frames and fps out"):
                await service.submit(JobRequest(prompt="fox", frames=8), "")
            digest = await service.put_input(PNG)
            asked = JobRequest(prompt="fox", strength=0.5, inputs=(Input(role="image", digest=digest),))
            await assert_right(service, await ended(service, await service.submit(asked, "")))
            assert await service.jobs("", status="queued") == []
        with pytest.raises(Stopping):
            await service.submit(JobRequest(prompt="fox"), "")
        # Connections may be open for a while yet.
        service.live_jobs.clear()
        for late in (service.job(job.id, ""), service.jobs(""), service.result(job.id, 0, "")):
            with pytest.raises(Stopping, match="the server is stopping; ask again"):
                await late

    asyncio.run(main())
    with pytest.raises(InputError, match="2 models have 1 names"):
        Service([ModelSpec("a", "emoji-sd3")] * 2, tmp_path)


def test_a_stop_ends_what_is_under_way_and_leaves_the_rest(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_batch=1) as service:
            jobs = [await service.submit(JobRequest(prompt=f"fox {number}", steps=20), "") for number in range(3)]
            await until(lambda: service.live_jobs[jobs[0].id].progress.get(0, 0) > 2)
            follower = asyncio.create_task(ended(service, jobs[2]))
        # Its events have ended as well.
        with contextlib.suppress(RuntimeError):
            await asyncio.wait_for(follower, 1.0)
        async with serving(tmp_path, max_batch=1, grace=0.0) as service:
            assert [(await service.job(job.id, "")).status for job in jobs] == ["succeeded", "queued", "queued"]
            await until(lambda: service.live_jobs[jobs[1].id].progress.get(0, 0) > 2)
        async with serving(tmp_path) as service:
            for job in jobs:
                job = await ended(service, job)
                await assert_right(service, job)
                assert job.attempt == 1

    asyncio.run(main())


def test_bounds_of_the_service(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_queue=6, max_per_owner=4) as service:
            await ended(service, await service.submit(JobRequest(prompt="fox"), ""))
            jobs = [await service.submit(JobRequest(prompt="slow", steps=200, n=2), "a") for _ in range(2)]
            with pytest.raises(QueueFull):
                await service.submit(JobRequest(prompt="one too many"), "a")
            for job in jobs:
                await ended(service, job, "a")
            await ended(service, await service.submit(JobRequest(prompt="now"), "a"), "a")

    asyncio.run(main())


FULL = """
import asyncio, contextlib, json, resource, sys
from pathlib import Path
from support.serve import assert_right, ended, serving, until
from ditmesh.serve.errors import StorageError
from ditmesh.serve.types import JobRequest

async def main():
    async with serving(Path(sys.argv[1])) as service:
        jobs = [await service.submit(JobRequest(prompt=f"fox {n}", steps=100), "") for n in range(3)]
        await until(lambda: service.live_jobs[jobs[2].id].progress.get(0, 0) > 2)
        # Files may not grow, as on a disk that is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        submit, put = service.submit(JobRequest(prompt="more"), ""), service.put_input(b"hen")
        for what in (submit, put, service.cancel(jobs[2].id, "")):
            try:
                await what
            except StorageError as error:
                print(error)
        await until(lambda: not service._dispatcher.slots[0].running)
        print([(await service.job(job.id, "")).status for job in jobs])
        events = [event.event for event in service.live_jobs[jobs[0].id].log.events]
        print([event for event in events if event not in ("step", "queued")])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for job in jobs:
            await assert_right(service, await ended(service, job))
        await assert_right(service, await ended(service, await service.submit(JobRequest(prompt="more"), "")))
        print("right")

asyncio.run(main())
"""


def test_a_full_disk_refuses_jobs_and_loses_none(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", FULL, str(tmp_path)],
        env=importing_tests(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    submit, put, cancel, statuses, events, right = run.stdout.splitlines()
    assert "cannot write to" in submit
    assert "disk I/O error" in submit
    assert "inputs" in put
    assert "make room on the disk" in put
    assert "cannot write to" in cancel
    assert statuses == "['running', 'running', 'running']"
    assert events == "['started', 'paused']"
    assert right == "right"


def test_what_is_accepted_or_written_is_on_the_disk(opened: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A power cut takes what is in memory alone: the row of a job, and a result that has its name already."""
    queue = opened()
    assert queue._database.connection.execute("PRAGMA synchronous").fetchone()[0] == 2
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), sync(file)))
    monkeypatch.setattr(Path, "replace", lambda old, new: (done.append(str(new)), replace(old, new))[1])
    results = ResultFiles(tmp_path / "files", ServiceSettings(reserve=0))
    name = results.write("job", 0, PNG)
    folder = tmp_path / "files" / "results" / "job"
    assert done[0].endswith(".tmp")
    assert done[1:] == [str(folder / name), str(folder), str(folder.parent)]


def test_a_picture_is_written_before_it_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes the few bytes of a row, and not those of a picture."""

    async def main() -> None:
        async with serving(tmp_path) as service:
            write, failures = service.results.write, []

            def full(job: str, number: int, data: bytes) -> str:
                assert service.queue.file(job, number) is None
                if len(failures) < 2:
                    failures.append(number)
                    raise NoSpace("no space left on device")
                return write(job, number, data)

            monkeypatch.setattr(service.results, "write", full)
            job = await ended(service, await service.submit(JobRequest(prompt="fox"), ""))
            await assert_right(service, job)
            assert failures == [0, 0]

    asyncio.run(main())


def test_the_oldest_results_go_when_there_are_too_many(tmp_path: Path) -> None:
    async def main() -> None:
        size = len(picture("", 0))
        async with serving(tmp_path, max_disk=20 * size) as service:
            jobs = []
            for number in range(30):
                jobs.append(await ended(service, await service.submit(JobRequest(prompt=f"fox {number}"), "")))
            await service.sweep()
            assert len([*tmp_path.glob("results/*/*.png")]) <= 20
            with pytest.raises(UnknownJob):
                await service.job(jobs[0].id, "")
            await assert_right(service, await service.job(jobs[-1].id, ""))
            # Inputs push results out, but may have half of the room only.
            await service.put_input(b"x" * 9 * size)
            await service.sweep()
            assert len([*tmp_path.glob("results/*/*.png")]) <= 11
            with pytest.raises(NoSpace, match="keeps 0 MiB of input images at most"):
                await service.put_input(b"y" * 2 * size)

        async with serving(tmp_path, max_history=3) as service:
            await service.sweep()
            assert [job.id for job in await service.jobs("")] == [job.id for job in reversed(jobs[-3:])]
            assert len([*tmp_path.glob("results/*/*.png")]) == 3

        async with serving(tmp_path, reserve=2**60) as service:
            with pytest.raises(NoSpace, match="MiB left; ask again when room has been made"):
                await service.submit(JobRequest(prompt="fox"), "")

    asyncio.run(main())


@pytest.mark.matrix
def test_hundreds_of_cancelled_and_refused_jobs_leave_nothing(quick: Path) -> None:
    generator = random.Random(0)

    async def some(service: Service, number: int) -> None:
        """Cancelled before, while and after it runs, or refused; some are followed."""
        for _ in range(number):
            job = await service.submit(JobRequest(prompt="fox", n=generator.randint(1, 3), steps=5), "")
            events = service.events(job.id, "")
            if generator.random() < 0.3:
                await anext(events)
            await asyncio.sleep(generator.choice([0, 0, 0.01, 0.04]))
            await service.cancel(job.id, "")
            await events.aclose()
            with pytest.raises(InputError):
                await service.submit(JobRequest(prompt="fox", width=66, height=64), "")

    async def main() -> None:
        async with serving(quick, keep=0.5) as service:
            await some(service, 150)
            await until(lambda: not service._dispatcher.slots[0].running)
            gc.collect()
            before, threads = held(), threading.active_count()
            tracemalloc.start()
            await some(service, 20)
            grown = []
            for _ in range(2):
                gc.collect()
                start = tracemalloc.get_traced_memory()[0]
                await some(service, 140)
                await until(lambda: not service._dispatcher.slots[0].running)
                gc.collect()
                grown.append(tracemalloc.get_traced_memory()[0] - start)
            tracemalloc.stop()
            # Bytes: what is kept for those who come late is bounded.
            assert grown[-1] < 200_000, grown
            await asyncio.sleep(0.6)
            await service.sweep()
            assert service.queue.ids() == set()
            assert [*quick.glob("results/*")] == []
            assert threading.active_count() == threads
            assert more_than(before) == {}

    asyncio.run(main())


def test_the_process_of_the_queue_does_without_torch(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, pathlib\nfrom support import serve as t\n"
        "from ditmesh.serve.types import JobRequest\n"
        "async def main():\n"
        "    async with t.serving(pathlib.Path(sys.argv[1])) as service:\n"
        "        job = await service.submit(JobRequest(prompt='x'), '')\n"
        "        await t.assert_right(service, await t.ended(service, job))\n"
        "asyncio.run(main()); print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)],
        env=importing_tests(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.split()[-1:] == ["False"], run.stderr

"""The server's queue and results on disk, and the service that shares tasks out, on ranks that are threads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ditmesh.errors import ConfigError, InputError
from ditmesh.serve.errors import NoSpace, QueueFull, Stopping, StorageError, UnknownJob
from ditmesh.serve.http.errors import refusal_response
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.queue.database import FILE, TABLES, VERSION
from ditmesh.serve.queue.queue import Queue
from ditmesh.serve.queue.results import ResultFiles
from ditmesh.serve.queue.storage import storage_error
from ditmesh.serve.service import Service
from ditmesh.serve.settings import ServiceSettings
from ditmesh.serve.types import Input, JobError, JobImage, JobRequest
from support.serve import PNG, assert_right, ended, picture, serving, until
from support.train import importing_tests

DIGEST = "0" * 64


def request(n: int = 1, **more: Any) -> JobRequest:
    return JobRequest(**{"model": "m", "prompt": "a fox", "seed": 7, **more}, n=n)


def with_input(data: bytes, **more: Any) -> JobRequest:
    """A request for an edit of an image."""
    digest = hashlib.sha256(data).hexdigest()
    return JobRequest(prompt="fox", strength=0.5, inputs=(Input(role="image", digest=digest),), **more)


def image(index: int) -> JobImage:
    return JobImage(index=index, seed=7 + index, url=f"/{index}")


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
    assert (queue.job_with_input(DIGEST, "me"), queue.job_with_input(DIGEST, "")) == ("a", None)
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


def test_owners_have_equal_shares_of_the_work(opened: Any) -> None:
    queue = opened()
    for number in range(40):
        queue.submit(f"heavy{number}", request(), "heavy", 4.0)
    begun(queue, 10)
    for number in range(20):
        queue.submit(f"light{number}", request(), "light", 1.0)
    places = queue.places()
    order = begun(queue)
    # No credit for having been away, and no punishment for the others: they take turns, by what an image takes.
    assert Counter(id[:5] for id in order[:10]) == {"light": 8, "heavy": 2}
    # Places are what then happens.
    assert sorted(places, key=lambda id: places[id]) == order
    # What was not generated is not charged.
    for owner in "ab":
        for number in range(4):
            queue.submit(f"{owner}{number}", request(), owner, 1.0)
    assert begun(queue, 2) == ["a0", "b0"]
    assert queue.cancel("a0", [0.0]).status == "cancelled"
    assert begun(queue, 3) == ["a1", "a2", "b1"]


def test_priorities_and_deadlines_order_the_jobs_of_their_owner(opened: Any) -> None:
    clock = [1e9]
    queue = opened(now=lambda: clock[0])
    queue.submit("a-late", request(deadline_ms=1000), "a", 1.0)
    queue.submit("a-patient", request(), "a", 1.0)
    queue.submit("a-later", request(deadline_ms=90_000), "a", 1.0)
    queue.submit("a-soon", request(deadline_ms=30_000), "a", 1.0)
    queue.submit("a-urgent", request(priority=1), "a", 1.0)
    for number in range(4):
        queue.submit(f"b-{number}", request(priority=number, deadline_ms=60_000 - number), "b", 1.0)
    # After a restart as well; a job that is late by then waits like a patient one.
    queue = opened(now=lambda: clock[0])
    clock[0] += 2.0
    places = queue.places()
    order = begun(queue)
    assert [id for id in order if id[0] == "a"] == ["a-urgent", "a-soon", "a-later", "a-late", "a-patient"]
    assert [id for id in order if id[0] == "b"] == ["b-3", "b-2", "b-1", "b-0"]
    # Owners take turns, whatever they call urgent.
    assert [sorted(id[0] for id in order[turn : turn + 2]) for turn in (0, 2, 4, 6)] == [["a", "b"]] * 4
    assert sorted(places, key=lambda id: places[id]) == order


def test_a_deadline_that_cannot_be_met_any_more_does_not_go_first(opened: Any) -> None:
    clock = [1e9]
    queue = opened(now=lambda: clock[0])
    queue.submit("first", request(), "a", 2.0)
    picture = queue.begin("first")
    clock[0] += 8.0
    queue.finish("first", picture, "first.png", JobImage(index=0, seed=0))
    queue.submit("hopeless", request(deadline_ms=6000), "a", 2.0)
    queue.submit("small", request(deadline_ms=7000), "a", 1.0)
    queue.submit("possible", request(deadline_ms=9000), "a", 2.0)
    # Of an image with other work nothing is known.
    assert [(queue.head(id).left, queue.head(id).seconds) for id in ("possible", "hopeless")] == [(9, 8), (None, 8)]
    assert begun(queue) == ["small", "possible", "hopeless"]


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
        (OSError(errno.EIO, "Input/output error"), "check the disk for errors", 500),
        (sqlite_error(sqlite3.SQLITE_BUSY), "end the program that uses it", 503),
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


def test_an_input_image_is_its_owners(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as service:
            asked = with_input(PNG)
            job = await service.submit(asked, "mine", files={asked.inputs[0].digest: PNG})
            await service.submit(asked, "mine")
            with pytest.raises(InputError, match="is not on the server any more; send the image again"):
                await service.submit(asked, "somebody else's")
            # What is refused leaves no file.
            with pytest.raises(InputError, match="multiples of 4"):
                await service.submit(with_input(PNG, width=66, height=64), "mine")
            await assert_right(service, await ended(service, job, "mine"), "mine")
            assert len([*tmp_path.glob("results/*")]) == 2

    asyncio.run(main())


def test_a_locked_queue_is_no_full_disk_and_a_damaged_one_fails_jobs(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as service:
            await service.on_disk(service.queue._database.connection.execute, "PRAGMA busy_timeout = 50")
            job = await service.submit(JobRequest(prompt="fox", steps=20), "")
            await until(lambda: service.live_jobs[job.id].progress.get(0, 0) > 2)
            with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(StorageError, match=r"locked.*end the program") as found:
                    await service.submit(JobRequest(prompt="hen"), "")
                assert not isinstance(found.value, NoSpace)
                await until(lambda: service.write_error is not None)
                other.execute("ROLLBACK")
            # What was done meanwhile was kept, and is written then.
            await assert_right(service, await ended(service, job))

            def damaged(*arguments: Any) -> None:
                raise storage_error("cannot write", sqlite_error(sqlite3.SQLITE_CORRUPT))

            # A damaged queue takes nothing however often it is tried.
            service.queue.finish = damaged
            failed = await ended(service, await service.submit(JobRequest(prompt="fox"), ""))
            assert (failed.status, failed.error.code) == ("failed", "storage")
            assert service.write_error is None

    asyncio.run(main())


def test_attempts_are_counted_and_second_ones_go_first(opened: Any) -> None:
    queue = opened()
    for id in "abc":
        queue.submit(id, request(2), "", 1.0)
    assert begun(queue, 4) == ["a", "a", "b", "b"]
    assert queue.interrupt("b", [0, 1]).attempt == 2
    assert queue.job("b").status == "queued"
    head = queue.head()
    assert (head.id, head.again) == ("b", True)
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


def test_another_version_and_a_broken_file_are_refused(opened: Any, tmp_path: Path) -> None:
    queue = opened()
    queue.submit("a", request(), "", 1.0)
    folder = tmp_path / "server"
    with pytest.raises(ConfigError, match=rf"is used by another server \(process {os.getpid()}\); end that, or give"):
        Queue(folder)
    queue.close()
    with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match="was written by version 7, and this ditmesh has queues of version 2"):
        Queue(folder)
    # Nor did it keep the lock, or touch anything.
    with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as db:
        assert db.execute("SELECT id FROM jobs").fetchall() == [("a",)]
        db.execute("PRAGMA user_version = 2")
    whole = (folder / FILE).read_bytes()
    for broken in (whole[:5000], b"no database at all" * 100):
        (folder / FILE).write_bytes(broken)
        with pytest.raises(StorageError, match="move the folder away"):
            Queue(folder)
        assert (folder / FILE).read_bytes() == broken


def test_what_a_queue_holds_has_a_version() -> None:
    """Another form of requests or tables needs another `VERSION`: queues of before are then refused and not misread."""
    held = TABLES + " ".join(sorted(JobRequest.model_fields))
    assert (VERSION, hashlib.sha256(held.encode()).hexdigest()[:16]) == (2, "57a153ecd77b8db7")


# ---- results


def test_results_and_inputs_expire_and_leave_nothing(opened: Any) -> None:
    now = [1e9]
    queue = opened(keep=100.0, now=lambda: now[0])
    results = ResultFiles(queue.folder)
    queue.submit("a", request(2), "", 1.0)
    results.write("a", f"{DIGEST}.png", b"fox")
    queue.begin("a")
    assert results.write("a", "0.png", PNG + b"0") == "0.png"
    assert results.write("a", "1.webp", b"RIFF....WEBP") == "1.webp"
    assert results.path("a", "0.png") == (queue.folder / "results" / "a" / "0.png", "image/png")
    queue.finish("a", 0, "0.png", image(0))
    now[0] += 101
    # The job is not done, and needs its input.
    assert queue.expired() == []
    results.sweep(queue.ids())
    assert results.path("a", f"{DIGEST}.png")[0].exists()
    queue.begin("a")
    queue.finish("a", 1, "1.webp", image(1))
    now[0] += 99
    assert queue.expired() == []
    now[0] += 2
    assert queue.expired() == ["a"]
    # As after a kill: a beginning of a file, and the results of a job that nobody knows.
    (queue.folder / "results" / "a" / ".1-abc.tmp").write_bytes(b"half")
    results.write("unknown", "0.png", b"x")
    results = ResultFiles(queue.folder)
    assert results.bytes == len(PNG) + 1 + 12 + 3 + 1
    queue.forget(["a"])
    results.sweep(queue.ids())
    assert [*(queue.folder / "results").iterdir()] == []
    assert results.bytes == 0
    with pytest.raises(UnknownJob):
        queue.job("a")


# ---- the service, on ranks that are threads


def test_jobs_are_done_side_by_side_and_each_is_what_it_is_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, replicas=2, max_batch=3) as service:
            assert not service.state().ready
            asked = [JobRequest(prompt=f"fox {n}", n=1 + n % 4, priority=n % 2, steps=20) for n in range(16)]
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


def test_what_cannot_be_done_is_refused_with_the_names_of_the_fields(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": "sd4"}, r"model 'sd4' is none of the server's \(sd3, dit\); did you mean 'sd3'\?"),
        ({"width": 64}, "width and height belong together"),
        ({"width": 66, "height": 64}, "size 66x64: the model needs multiples of 4; use 64x64 or 68x64"),
        ({"prompt": " "}, "prompt 1 is empty"),
        ({"loras": [{"name": "oil"}]}, r"lora 'oil' is none of those that the server offers for sd3 \(none\)"),
        ({"inputs": [{"role": "mask", "digest": DIGEST}]}, "mask needs image as well"),
        ({"model": "dit", "prompt": "lio"}, "takes classes and has none of that name; .* such as 'lion'"),
    ]

    async def main() -> None:
        models = [ModelSpec("sd3", "emoji-sd3"), ModelSpec("dit", "emoji-dit-s")]
        async with serving(tmp_path, models=models, grace=0.0) as service:
            for more, said in wrong:
                with pytest.raises(InputError, match=said) as caught:
                    await service.submit(JobRequest(**{"prompt": "fox", **more}), "")
                assert "--" not in str(caught.value)
            # What only the ranks find out.
            job = await ended(service, await service.submit(JobRequest(prompt="! refuse"), ""))
            assert job.error == JobError(code="invalid_request", message="the pipeline cannot do that")
            with pytest.raises(InputError, match="sd3 generates images, not videos; leave frames and fps out"):
                await service.submit(JobRequest(prompt="fox", frames=8), "")
            asked = with_input(PNG)
            job = await service.submit(asked, "", files={asked.inputs[0].digest: PNG})
            await assert_right(service, await ended(service, job))
            gone = await service.submit(JobRequest(prompt="lion", model="dit", steps=10_000), "")
        with pytest.raises(Stopping):
            await service.submit(JobRequest(prompt="fox"), "")
        # Connections may be open for a while yet.
        service.live_jobs.clear()
        for late in (service.job(job.id, ""), service.jobs(""), service.result(job.id, 0, "")):
            with pytest.raises(Stopping, match="the server is stopping; ask again"):
                await late
        # Jobs of a model that is gone fail at the start.
        async with serving(tmp_path, models=models[:1]) as service:
            failed = await service.job(gone.id, "")
            assert failed.status == "failed"
            assert "has no model 'dit' any more; submit the job again for one of: sd3" in failed.error.message
            assert [event.event async for event in service.events(gone.id, "")][-1] == "failed"

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
        for what in (service.submit(JobRequest(prompt="more"), ""), service.cancel(jobs[2].id, "")):
            try:
                await what
            except StorageError as error:
                print(error)
        await until(lambda: service.write_error is not None)
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
    submit, cancel, statuses, events, right = run.stdout.splitlines()
    assert "cannot write to" in submit
    assert "disk I/O error" in submit
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
    name = results.write("job", "0.png", PNG)
    folder = tmp_path / "files" / "results" / "job"
    assert done[0].endswith(".tmp")
    assert done[1:] == [str(folder / name), str(folder), str(folder.parent)]


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
        async with serving(tmp_path, reserve=2**60) as service:
            with pytest.raises(NoSpace, match="MiB left; ask again when room has been made"):
                await service.submit(JobRequest(prompt="fox"), "")

    asyncio.run(main())

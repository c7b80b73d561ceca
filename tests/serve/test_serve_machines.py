"""The queue and the dispatcher against models, in any order of events; and a crash after every change of a file."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ditmesh.serve.errors import NoSpace, QueueFull, StorageError
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.queue import dispatch, jobs
from ditmesh.serve.service import Service
from ditmesh.serve.settings import ServiceSettings
from ditmesh.serve.types import ENDED, Job, JobRequest
from ditmesh.serve.worker.protocol import Cancel, Cancelled, Finished, ModelReady, Start, TaskFailed, TaskStepped
from ditmesh.serve.worker.replicas import RanksDown, RanksUp
from support.fault_points import fault_points, missing
from support.serve import PNG
from support.train import importing_tests

SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None
ANY = st.integers(0, 2**16)


# ---- the dispatcher


class PlayedReplica:
    """A replica whose ranks do what the machine lets them do."""

    def __init__(self, name: str, make: Any, say: Any, specs: Any, limits: Any, function: Any) -> None:
        self.name, self._say, self._specs = name, say, specs
        self.up, self.running = False, {}

    def start(self) -> None: ...

    def stop(self) -> None:
        self.up = False

    def join(self, seconds: float = 0.0) -> None: ...

    def say(self, message: Any) -> None:
        self._say(self, message)

    def come_up(self) -> None:
        self.up = True
        self.say(RanksUp())
        for spec in self._specs:
            self.say(ModelReady(spec.name, {"pipeline": "Fake", "batching": True, "steps": 4}, {}, ""))

    def send(self, command: Any) -> None:
        """Commands to ranks that are gone are dropped."""
        if not self.up:
            return
        if isinstance(command, Start):
            assert command.id not in self.running
            self.running[command.id] = command, 0
        elif isinstance(command, Cancel) and command.id in self.running:
            _, step = self.running.pop(command.id)
            self.say(Cancelled(command.id, step))


class DispatcherMachine(RuleBasedStateMachine):
    """The service on two replicas that the machine plays, on a disk that may refuse to write."""

    @initialize()
    def begin_with_nothing(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.mkdtemp(dir=SHARED)
        self.known: dict[str, dict[str, Any]] = {}
        self.downs = 0
        self.fails = False
        self.open()

    def open(self) -> None:
        options = ServiceSettings(
            launcher="support.serve:ThreadRanks", device="cpu", replicas=2, max_batch=2, max_queue=20, max_per_owner=20
        )
        with mock.patch.object(dispatch, "Replica", PlayedReplica):
            self.service = Service([ModelSpec("sd3", "emoji-sd3")], self.folder, options)
        self.run(self.service.start())
        # The disk fails as the machine says.
        change, write = self.service.queue._change, self.service.results.write

        @contextlib.contextmanager
        def changed() -> Any:
            if self.fails:
                raise NoSpace("the disk is full")
            with change() as db:
                yield db

        def written(*arguments: Any) -> str:
            if self.fails:
                raise NoSpace("the disk is full")
            return write(*arguments)

        self.service.queue._change, self.service.results.write = changed, written
        self.settle()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def settle(self) -> None:
        """Until the dispatcher has nothing left to do."""

        async def quiet() -> None:
            calm = 0
            while calm < 3:
                await self.service.on_disk(lambda: None)
                await asyncio.sleep(0)
                blocked = self.fails and self.service.write_error is not None
                busy = not blocked and (
                    self.service._dispatcher._inbox.qsize()
                    or self.service.wake.is_set()
                    or self.service.change.locked()
                )
                calm = 0 if busy else calm + 1

        self.run(quiet())

    @property
    def replicas(self) -> list[Any]:
        return [slot.replica for slot in self.service._dispatcher.slots]

    def tasks(self) -> list[tuple[Any, str]]:
        return [(replica, id) for replica in self.replicas for id in replica.running]

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        try:
            self.all_ends()
        finally:
            self.run(self.service.stop(0.0))
            self.loop.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def all_ends(self) -> None:
        """When nothing fails any more every job ends."""
        self.fails = False
        for _ in range(500):
            for replica in self.replicas:
                if not replica.up:
                    replica.come_up()
            self.service.wake.set()
            self.settle()
            for replica, id in self.tasks():
                self.finished(replica, id)
            self.settle()
            if all(self.job(id).status in ENDED for id in self.known):
                break
        for id, known in self.known.items():
            job = self.job(id)
            allowed = {"succeeded"} | ({"cancelled"} if known["cancelled"] else set())
            allowed |= {"failed"} if known["refused"] or self.downs > 1 else set()
            assert job.status in allowed, (job, known)
            if job.status == "succeeded":
                assert all(one.url is not None for one in job.images)
                for one in job.images:
                    file = self.run(self.service.result(id, one.index, ""))
                    assert file.path.read_bytes() == PNG + f"{id}/{one.index}".encode()

    def job(self, id: str) -> Job:
        return self.run(self.service.job(id, ""))

    # ---- what clients do

    @rule(n=st.integers(1, 3))
    def submit(self, n: int) -> None:
        try:
            job = self.run(self.service.submit(JobRequest(prompt="fox", n=n, steps=4), ""))
        except QueueFull:
            return
        except StorageError:
            assert self.fails or self.service.write_error is not None
            return
        self.known[job.id] = {"cancelled": False, "refused": False, "done": set(), "status": "queued", "attempt": 1}
        self.settle()

    @rule(number=ANY)
    def cancel(self, number: int) -> None:
        if self.known:
            id = [*self.known][number % len(self.known)]
            try:
                job = self.run(self.service.cancel(id, ""))
            except StorageError:
                assert self.fails
                return
            assert job.status in ENDED
            self.known[id]["cancelled"] |= job.status == "cancelled"
            self.settle()
            if job.status == "cancelled":
                assert not any(task.startswith(id) for _, task in self.tasks())

    # ---- what ranks do

    @rule(number=ANY)
    def ranks_start(self, number: int) -> None:
        replica = self.replicas[number % 2]
        if not replica.up:
            replica.come_up()
            self.settle()

    @rule(number=ANY, why=st.sampled_from(["rank 0 was killed", "rank 0 stalled"]))
    def ranks_end(self, number: int, why: str) -> None:
        replica = self.replicas[number % 2]
        if replica.up:
            replica.up = False
            replica.running.clear()
            self.downs += 1
            replica.say(RanksDown(why=why))
            self.settle()

    @precondition(lambda self: bool(self.tasks()))
    @rule(number=ANY, what=st.sampled_from(["step", "finish", "finish", "refuse"]))
    def ranks_report(self, number: int, what: str) -> None:
        tasks = self.tasks()
        replica, id = tasks[number % len(tasks)]
        task, step = replica.running[id]
        if what == "step":
            if step < 3:
                replica.running[id] = task, step + 1
                replica.say(TaskStepped(id, step + 1, 4, len(replica.running)))
        elif what == "finish":
            self.finished(replica, id)
        else:
            del replica.running[id]
            self.known[id.partition("/")[0]]["refused"] = True
            replica.say(TaskFailed(id, "invalid_request", "no"))
        self.settle()

    def finished(self, replica: Any, id: str) -> None:
        del replica.running[id]
        replica.say(Finished(id, PNG + id.encode(), 64, 64, {}))

    @rule()
    def late_report(self) -> None:
        """Of a task that is not known (any more)."""
        self.replicas[0].say(Finished("job_none/0", PNG, 64, 64, {}))
        self.settle()

    # ---- what the machine does

    @rule(fails=st.booleans())
    def disk(self, fails: bool) -> None:
        self.fails = fails
        if not fails:
            self.service.wake.set()
        self.settle()

    @rule()
    def killed(self) -> None:
        """kill -9, and a new server on what is on the disk."""
        old, service = self.folder, self.service
        # What is on the disk now, and no lock.
        self.folder = tempfile.mkdtemp(dir=SHARED)
        shutil.copytree(old, self.folder, dirs_exist_ok=True)
        for replica in self.replicas:
            replica.up = False
        self.fails = False
        self.run(service.stop(0.0))
        shutil.rmtree(old, ignore_errors=True)
        for known in self.known.values():
            # What was only in memory may be lost; what was told to be done was on the disk.
            known["attempt"] = 1
        self.open()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "service"):
            return
        tasks = [id for _, id in self.tasks()]
        assert len(set(tasks)) == len(tasks), "a picture is made twice"
        for replica in self.replicas:
            assert len(replica.running) <= 2 * 2
        for id, known in self.known.items():
            job = self.job(id)
            done = {one.index for one in job.images if one.url is not None}
            assert known["done"] <= done
            # The job under which ranks fail twice fails, once it runs alone. Before that, each replica may have failed
            # under some of its images, beside those of other jobs.
            assert known["attempt"] <= job.attempt <= 1 + len(self.replicas)
            if known["status"] in ENDED:
                assert job.status == known["status"]
                assert known["done"] == done
            if known["cancelled"]:
                assert job.status == "cancelled"
            known.update(done=done, status=job.status, attempt=job.attempt)
            if job.status in ENDED:
                assert not any(task.startswith(id) for task in tasks)
        listed = [job.id for job in self.run(self.service.jobs("", 1000))]
        assert listed == [*self.known][::-1]


@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.matrix)])
def test_any_order_of_events(monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    monkeypatch.setattr(jobs, "RETRY", 0.001)
    # The same events in every run.
    few = settings(max_examples=examples, stateful_step_count=30, derandomize=True)
    few = settings(few, deadline=None, suppress_health_check=[*HealthCheck])
    run_state_machine_as_test(DispatcherMachine, settings=few)


# ---- a crash at every change of a file

CRASHES = """
import itertools, json, os, shutil, signal, sys
from pathlib import Path
from ditmesh.serve.queue import queue, results
from ditmesh.serve.types import Input, JobImage, JobRequest
from support import fault_points as points

folder, actions = Path(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]
kinds, every = int(sys.argv[3]), int(sys.argv[4])
faults = points.FaultPoints.own()

def image(index):
    return JobImage(index=index, seed=index, url=f"/{index}")

def opened():
    return queue.Queue(folder / "server"), results.ResultFiles(folder / "server")

def life(say):
    jobs, files = opened()
    for number in range(3):
        id = f"j{number}"
        digest = f"{number}" * 64
        files.write(id, f"{digest}.png", f"input {number}".encode())
        asked = JobRequest(model="m", prompt="x", n=2, seed=0, inputs=(Input(role="image", digest=digest),))
        jobs.submit(id, asked, "me", 1.0)
        say("accepted", id, digest)
        if number == 1:
            jobs.begin(id)
            jobs.cancel(id)
            say("cancelled", id)
            continue
        for index in (jobs.begin(id), jobs.begin(id)):
            jobs.finish(id, index, files.write(id, f"{index}.png", f"{id} {index}".encode()), image(index))
            say("done", id, index)
    jobs.forget(["j0"])
    say("forgotten", "j0")
    files.remove("j0")
    jobs.close()

def child(out):
    life(lambda *said: os.write(out, (json.dumps(said) + "\\n").encode()))
    os._exit(0)

def verify(said):
    jobs, files = opened()
    assert not [*folder.rglob(".*.tmp")], "unfinished files"
    files.sweep(jobs.ids())
    gone = {one[1] for one in said if one[0] == "forgotten"}
    # The last promise may be one step ahead of what was said.
    almost = {"j0"} if said and said[-1] == ["done", "j2", 1] else set()
    for what, id, *rest in said:
        if id in gone or (id in almost and id not in jobs.ids()):
            continue
        job = jobs.job(id, "me")
        if what == "accepted":
            assert files.path(id, f"{rest[0]}.png")[0].read_bytes() == f"input {id[1]}".encode()
        if what == "cancelled":
            assert job.status == "cancelled"
        if what == "done":
            assert files.path(id, jobs.file(id, rest[0]))[0].read_bytes() == f"{id} {rest[0]}".encode()
    for id in jobs.ids():
        for one in jobs.job(id).images:
            if one.url is not None:
                assert files.path(id, jobs.file(id, one.index))[0].read_bytes() == f"{id} {one.index}".encode()
    while (head := jobs.head()) is not None:
        index = jobs.begin(head.id)
        jobs.finish(head.id, index, files.write(head.id, f"{index}.png", f"{head.id} {index}".encode()), image(index))
    assert all(jobs.job(id).status in ("succeeded", "cancelled") for id in jobs.ids())
    jobs.close()

points_seen = 0
for action in actions:
    for at in itertools.count(1, every):
        shutil.rmtree(folder / "server", ignore_errors=True)
        ours, theirs = os.pipe()
        faults.at(action, at, kinds)
        if (pid := os.fork()) == 0:
            child(theirs)
        os.close(theirs)
        said = [json.loads(line) for line in os.fdopen(ours).read().splitlines()]
        ended = os.waitpid(pid, 0)[1]
        faults.clear()
        verify(said)
        if not ended:
            break
        assert ended == signal.SIGKILL, ended
        points_seen += 1
print(points_seen)
"""


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.parametrize(
    ("actions", "kinds", "every", "least"),
    [
        pytest.param("3", "2,4", 1, 44, id="after each sync and rename"),
        pytest.param("2,3,4", "1,2,4,8,16,32,64", 5, 100, id="around some of all changes", marks=pytest.mark.matrix),
    ],
)
def test_a_crash_loses_nothing_that_was_promised(actions: str, kinds: str, every: int, least: int) -> None:
    """In SQLite's calls as well: before a change, after it, and in the middle of a write."""
    mask = sum(int(kind) for kind in kinds.split(","))
    with tempfile.TemporaryDirectory(dir=SHARED) as folder, fault_points(folder) as faults:
        run = subprocess.run(
            [sys.executable, "-P", "-c", CRASHES, folder, actions, str(mask), str(every)],
            env=faults.environment(importing_tests() | {"PYTHONFAULTHANDLER": "1"}),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) >= least

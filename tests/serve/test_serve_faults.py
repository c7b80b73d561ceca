"""Ranks of a server that die, raise, stop or hang, and a server that is killed: nothing accepted is lost or wrong."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ditmesh.errors import ConfigError, RankFailed
from ditmesh.launch import RankPool
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.service import Service
from ditmesh.serve.types import Job, JobRequest
from ditmesh.serve.worker import replicas
from support import rank_functions as on_rank
from support.processes import family, marked, wait_until_gone
from support.serve import ThreadRanks, assert_right, ended, serving
from support.train import importing_tests

# Seconds within which a server has ranks again.
BACK = 30.0
REAL: dict[str, Any] = {"launcher": "local", "threads": 1, "stall": 4.0, "load": 60.0}

SAID = {
    "raise": ("rank_failed", "rank 1 of 2 raised ArithmeticError: on purpose"),
    "kill": ("rank_failed", "rank 1 of 2 was killed by SIGKILL"),
    "hang": ("stalled", "ranks 0, 1 of 2 had not said anything for 4 s"),
}


async def done(service: Service, asked: list[JobRequest]) -> list[Job]:
    """Jobs that are accepted at once, when all have ended."""
    jobs = [await service.submit(one, "") for one in asked]
    return [await ended(service, job) for job in jobs]


def test_a_rank_that_fails_costs_nobody_a_picture(tmp_path: Path) -> None:
    """Once: the job that was under way and its company are done by new ranks, the same pictures."""

    async def main() -> None:
        async with serving(tmp_path / "server", devices=2, **REAL) as service:
            for how, (_, said) in SAID.items():
                guilty = JobRequest(prompt=f"! {how} rank=1 step=5 once={tmp_path / how}", steps=8)
                asked = [guilty, *(JobRequest(prompt=f"{how} {number}", n=2, steps=8) for number in range(4))]
                began = time.monotonic()
                jobs = await done(service, asked)
                for job in jobs:
                    await assert_right(service, job)
                assert (tmp_path / how).exists()
                assert jobs[0].attempt == 2
                assert time.monotonic() - began < BACK
                restarted = [one for one in service.live_jobs[jobs[0].id].log.events if one.event == "restarted"]
                assert [one.data["attempt"] for one in restarted] == [2]
                assert restarted[0].data["reason"].startswith(said)
                # A second attempt has no company but the same job's.
                again = [job for job in jobs if job.attempt == 2]
                assert all(image.receipt["company"] <= job.request.n for job in again for image in job.images)
            state = service.state().replicas[0]
            assert state.restarts == len(SAID)
            assert state.message.startswith(SAID["hang"][1])
            # Where each rank was, without folders.
            assert "rank 1: serve.py line" in state.message
            assert "/" not in state.message

    asyncio.run(main())


def test_the_job_under_which_ranks_fail_twice_fails_and_its_company_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path / "server", devices=2, replicas=2, **REAL) as service:
            asked = [JobRequest(prompt=f"! {how} rank=1 step=3", steps=8) for how in ("raise", "kill")]
            asked += [JobRequest(prompt=f"fox {number}", n=3, steps=6) for number in range(6)]
            jobs = await done(service, asked)
            for job, how in zip(jobs, ("raise", "kill"), strict=False):
                assert (job.status, job.attempt) == ("failed", 2)
                assert job.error.code == SAID[how][0]
                assert job.error.message.startswith(SAID[how][1])
                assert job.error.message.endswith("; it was the second time for this job")
            for job in jobs[2:]:
                await assert_right(service, job)
            assert sum(one.restarts for one in service.state().replicas) <= 4

    asyncio.run(main())


SERVER = """
import asyncio, sys
from pathlib import Path
from ditmesh.serve.types import JobRequest
from support.serve import serving, until
from test_serve_faults import REAL

async def main():
    async with serving(Path(sys.argv[1]), devices=2, **REAL) as service:
        await until(lambda: service.state().ready, 60.0)
        for number in range(6):
            job = await service.submit(JobRequest(prompt=f"fox {number}", steps=30, n=2), "")
            print(job.id, job.request.seed, flush=True)
        await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_kill_9_of_the_server_ends_its_ranks_and_loses_no_job(tmp_path: Path) -> None:
    mark, environment = marked(importing_tests())
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, "-P", str(tmp_path / "server.py"), str(tmp_path / "server")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        accepted = [process.stdout.readline().split() for _ in range(6)]
        # In the middle of the first ones.
        time.sleep(0.5)
        assert len(family(mark)) >= 3
        process.kill()
    assert wait_until_gone(mark, 10.0) == []

    async def main() -> None:
        async with serving(tmp_path / "server") as service:
            for id, seed in accepted:
                job = await ended(service, await service.job(id, ""))
                assert (job.status, job.attempt, job.request.seed) == ("succeeded", 1, int(seed))
                await assert_right(service, job)

    asyncio.run(main())


# ---- replicas whose ranks cannot be started


class Refused(ThreadRanks):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise ConfigError("there is no GPU")


class Mute:
    """A launcher that takes no replies."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __enter__(self) -> Mute:
        return self

    def __exit__(self, *exception: object) -> None: ...


class Flaky(ThreadRanks):
    """Ranks that do not start so many times."""

    failures: list[float] = []  # noqa: RUF012
    most = 3

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if len(self.failures) < self.most:
            self.failures.append(time.monotonic())
            raise RankFailed("rank 0 of 1 ended without an answer (exit code 1)", 0)


@pytest.mark.parametrize(
    ("launcher", "dtype", "said"),
    [
        ("test_serve_faults:Refused", "float32", "the ranks of replica-0 have failed: ranks cannot be started: there"),
        ("test_serve_faults:Mute", "float32", "the ranks of replica-0 have failed: ranks cannot be started: Mute"),
        ("test_serve_faults:Flaky", "float32", "the ranks of replica-0 have failed 6 times in a row: rank 0 of 1"),
        ("support.serve:ThreadRanks", "bfloat16", "model m could not be loaded: this model is broken"),
    ],
)
def test_a_server_that_never_serves_gives_up_and_keeps_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, dtype: Any, said: str
) -> None:
    monkeypatch.setattr(replicas, "BACKOFF", 0.01)
    monkeypatch.setattr(Flaky, "failures", [])
    monkeypatch.setattr(Flaky, "most", 100)

    async def main() -> None:
        models = [ModelSpec("m", "emoji-sd3", dtype=dtype)]
        async with serving(tmp_path, launcher=launcher, models=models) as service:
            job = await service.submit(JobRequest(prompt="fox"), "")
            why = await asyncio.wait_for(service.permanent_failure(), 10.0)
            assert why.startswith(said)
            assert why.endswith("; the jobs stay in the queue")
            assert not service.state().ready
            assert (await service.job(job.id, "")).status == "queued"
        async with serving(tmp_path, models=[ModelSpec("m", "emoji-sd3")]) as service:
            await assert_right(service, await ended(service, job))

    asyncio.run(main())


def test_ranks_that_do_not_start_are_started_again_after_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        Flaky.failures.clear()
        async with serving(tmp_path, launcher="test_serve_faults:Flaky") as service:
            job = await ended(service, await service.submit(JobRequest(prompt="fox"), ""))
            await assert_right(service, job)
            # No attempt of the job's: it had not begun.
            assert job.attempt == 1
            assert service.state().replicas[0].restarts == 3
            first, second, third = Flaky.failures
            assert second - first >= 0.4
            assert third - second >= 0.8

    asyncio.run(main())


# ---- what a server needs of a pool


def test_a_watch_breaks_a_call_off_and_says_what_was_missed() -> None:
    with RankPool(2, threads=1) as pool:
        began = time.monotonic()

        def late() -> str | None:
            return "done what they should" if time.monotonic() - began > 2 else None

        with pytest.raises(RankFailed, match=r"ranks 0, 1 of 2 had not done what they should") as caught:
            pool.run(on_rank.stay_away, 1, watch=late)
        assert "in stay_away" in str(caught.value)
        # The ranks would stay away for longer.
        assert time.monotonic() - began < 60
        assert pool.closed
        # A pool that is closed takes replies as a rank that is gone does.
        pool.reply("nobody hears this")

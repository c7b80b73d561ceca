"""Ranks: started, watched, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ditmesh.errors import ConfigError, RankFailed
from ditmesh.launch import (
    RankPool,
    _ctrl_c_waits,
    default_threads,
    from_torchrun,
    init_from_environment,
    resolve_device,
)
from support import processes
from support import rank_functions as on_rank

Ranks = Callable[[int], RankPool]


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Three ranks that a test may break."""
    with RankPool(3, threads=1, timeout=60.0) as pool:
        yield pool


def assert_gone(pool: RankPool) -> None:
    assert pool.closed
    assert [pid for pid in pool.pids if processes.alive(pid)] == []


@pytest.mark.parametrize("size", [2, 3])
def test_results_come_in_rank_order(ranks: Ranks, size: int) -> None:
    pool = ranks(size)
    assert pool.run(on_rank.identity, "a") == [(rank, size, "a") for rank in range(size)]
    assert pool.run(on_rank.identity, value=7) == [(rank, size, 7) for rank in range(size)]


def test_ranks_share_a_process_group_over_many_calls(ranks: Ranks) -> None:
    for value in (1.0, 2.0, 3.0):
        assert [float(result) for result in ranks(3).run(on_rank.total, value)] == [6 * value] * 3


def test_messages_arrive_in_order_from_every_rank(ranks: Ranks) -> None:
    heard: list[list[int]] = [[], []]
    results = ranks(2).run(on_rank.count_to, 50, on_message=lambda rank, message: heard[rank].append(message))
    assert results == [50, 50]
    assert heard == [list(range(50))] * 2


def test_threads_are_set_in_torch_and_for_libraries() -> None:
    with RankPool(1, threads=2) as pool:
        assert pool.run(on_rank.threads) == [(2, "2")]


def test_default_threads_share_out_the_cores() -> None:
    assert default_threads(10_000, "cpu") == 1
    assert default_threads(1, "cuda") <= 8
    assert default_threads(1, "cpu") >= default_threads(2, "cpu") >= 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "raised ValueError: rank 1 had enough"),
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGSEGV", "was killed by SIGSEGV"),
        ("leave", "ended without an answer (exit code 0)"),
        ("sys.exit", "raised SystemExit: 3"),
        ("unpicklable", "raised Odd: cannot travel"),
    ],
)
def test_a_failed_rank_ends_the_job_with_its_own_story(pool: RankPool, how: str, said: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        pool.run(on_rank.fail, 1, how)
    assert time.monotonic() - started < 10
    assert caught.value.rank == 1
    # Whoever raised would raise again.
    assert caught.value.lost == ((1,) if how in ("SIGKILL", "SIGSEGV", "leave") else ())
    assert f"rank 1 of 3 {said}" in str(caught.value)
    if how in ("raise", "SIGSEGV", "sys.exit", "unpicklable"):
        # Its own traceback: this file's line, not the barrier in which the others waited.
        assert "rank_functions.py" in str(caught.value)
        assert "barrier" not in str(caught.value).split("raise ValueError")[-1]
    assert_gone(pool)
    with pytest.raises(ConfigError, match=r"is closed \(rank 1 of 3 .*make a new one"):
        pool.run(on_rank.identity)


def test_the_exception_itself_is_the_cause(pool: RankPool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(on_rank.refuse)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert str(caught.value.__cause__) == "not like this; like that"


def test_the_root_cause_wins_over_lost_connections(pool: RankPool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(on_rank.lose_peer, 2)
    assert caught.value.rank == 2
    assert "the real reason" in str(caught.value)
    assert_gone(pool)


def test_ctrl_c_is_heard_once_a_program_has_started() -> None:
    """The program never hears it."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('deaf')"
    said = []

    def both() -> None:
        with _ctrl_c_waits():
            # To this thread: any other one would pass it on at once.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            said.append(subprocess.check_output([sys.executable, "-c", code]))

    # What a shell starts in the background is deaf to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            both()
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == [b"deaf\n"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_deadline_says_which_rank_is_late_and_where_it_is(pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        pool.run(on_rank.stay_away, 1, deadline=1.0)
    assert time.monotonic() - started < 10
    assert "had not answered within 1 s" in str(caught.value)
    assert "in stay_away" in str(caught.value)
    assert_gone(pool)


def test_a_collective_has_a_deadline_of_its_own() -> None:
    with RankPool(2, threads=1, timeout=2.0) as pool:
        started = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            pool.run(on_rank.stay_away, 1)
        assert time.monotonic() - started < 12
        assert caught.value.rank == 0
        assert caught.value.lost == (1,)
        # The rank that waited in vain, and where the other one was instead.
        assert "Timed out" in str(caught.value)
        assert "rank 1 was here" in str(caught.value)
        assert_gone(pool)


def test_a_rank_that_dies_between_calls_is_noticed(pool: RankPool) -> None:
    os.kill(pool.pids[2], signal.SIGKILL)
    with pytest.raises(RankFailed, match="rank 2 of 3 was killed by SIGKILL"):
        pool.run(on_rank.identity)
    assert_gone(pool)


def test_what_cannot_be_sent_leaves_the_pool_open(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="importable module"):
        ranks(2).run(lambda: None)
    assert ranks(2).run(on_rank.identity) == [(0, 2, None), (1, 2, None)]


def test_an_answer_that_cannot_be_sent_is_a_failure_of_its_rank(pool: RankPool) -> None:
    with pytest.raises(RankFailed, match="pickle"):
        pool.run(on_rank.answer_with_a_function)
    assert_gone(pool)


def test_a_receiver_that_raises_ends_the_ranks(pool: RankPool) -> None:
    def interrupt(rank: int, message: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(on_rank.count_to, 3, on_message=interrupt)
    assert_gone(pool)


def test_closing_ends_the_ranks_and_is_harmless_twice() -> None:
    pool = RankPool(2, threads=1)
    pool.close()
    assert_gone(pool)
    pool.close()
    with pytest.raises(ConfigError, match="is closed"):
        pool.run(on_rank.identity)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"world_size": 0}, "0 ranks"),
        ({"world_size": 1, "threads": 0}, "0 threads"),
        ({"world_size": 1, "timeout": 0.0}, "timeout of 0.0"),
        ({"world_size": 1, "device": "tpu"}, "device 'tpu' is unknown"),
    ],
)
def test_impossible_pools_are_refused(arguments: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RankPool(**arguments)


def test_every_rank_needs_a_gpu_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"gpus \[0, 2, 3\] are 3 for 2 ranks"):
        RankPool(2, gpus=(0, 2, 3))


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device("auto", 2) == "cuda"
    assert resolve_device("cpu", 3) == "cpu"
    with pytest.raises(ConfigError, match="3 ranks need 3 GPUs, but 2 are there; use at most 2 devices"):
        resolve_device("auto", 3)


def test_ranks_of_torchrun_start_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not from_torchrun()
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        init_from_environment()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    assert from_torchrun()
    with pytest.raises(ConfigError, match="rank of torchrun already"):
        RankPool(2)


OWNER = """
import sys
from ditmesh.launch import RankPool
from support import rank_functions
if __name__ == "__main__":
    pool = RankPool(2, threads=1, preload=("torch",))
    print("ready", *pool.pids, flush=True)
    if sys.argv[1] == "busy":
        pool.run(rank_functions.stay_away, 1)
    elif sys.argv[1] == "idle":
        sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["busy", "idle", "exit"])
def test_no_rank_outlives_its_owner(tmp_path: Path, how: str) -> None:
    """Killed in the middle of a call, killed between calls, or just leaving without closing the pool."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    mark, environment = processes.marked({"PYTHONPATH": os.pathsep.join(sys.path)})
    owner = subprocess.Popen(
        [sys.executable, str(script), how],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        pids = list(map(int, owner.stdout.readline().split()[1:]))
        assert len(pids) == 2
        if how == "exit":
            assert owner.wait(30) == 0
        else:
            assert all(map(processes.alive, pids))
            time.sleep(0.3)
            owner.kill()
            owner.wait(10)
        assert processes.wait_until_gone(mark, 10) == []
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdin.close()
        owner.stdout.close()

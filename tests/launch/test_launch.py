"""Ranks: started, watched, ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ditmesh.errors import ConfigError, RankFailed
from ditmesh.launch import RankPool, from_torchrun, init_from_environment, launcher, resolve_device
from ditmesh.launch.processes import block_sigint
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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "raised ValueError: rank 1 had enough"),
        ("SIGKILL", "was killed by SIGKILL"),
        pytest.param("SIGSEGV", "was killed by SIGSEGV", marks=pytest.mark.matrix),
        ("leave", "ended without an answer (exit code 0)"),
        pytest.param("sys.exit", "raised SystemExit: 3", marks=pytest.mark.matrix),
        ("unpicklable", "raised Odd: cannot travel"),
    ],
)
def test_a_failed_rank_ends_the_job_with_its_own_story(pool: RankPool, how: str, said: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        pool.run(on_rank.fail, 1, how)
    assert time.monotonic() - started < 60
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
        with block_sigint():
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
    assert time.monotonic() - started < 60
    assert "had not answered within 1 s" in str(caught.value)
    assert "in stay_away" in str(caught.value)
    assert_gone(pool)


def test_a_collective_has_a_deadline_of_its_own() -> None:
    with RankPool(2, threads=1, timeout=2.0) as pool:
        started = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            pool.run(on_rank.stay_away, 1)
        assert time.monotonic() - started < 60
        assert caught.value.rank == 0
        assert caught.value.lost == (1,)
        # The rank that waited in vain, and where the other one was instead.
        assert "Timed out" in str(caught.value)
        assert "rank 1 was here" in str(caught.value)
        # Which one that is, and where, comes first.
        first = str(caught.value).split("\n", 1)[0]
        assert first.startswith("rank 1 of 2 stalled at File ")
        assert first.endswith("in stay_away: rank 0 waited for it in vain")
        assert_gone(pool)


def test_a_rank_that_dies_between_calls_is_noticed(pool: RankPool) -> None:
    os.kill(pool.pids[2], signal.SIGKILL)
    with pytest.raises(RankFailed, match="rank 2 of 3 was killed by SIGKILL"):
        pool.run(on_rank.identity)
    assert_gone(pool)


def test_what_cannot_be_sent_leaves_the_pool_open(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="importable module"):
        ranks(2).run(identity_of(threading.Lock()))
    assert ranks(2).run(on_rank.identity) == [(0, 2, None), (1, 2, None)]


def identity_of(value: object) -> Callable[[], object]:
    return lambda: value


def test_functions_without_a_name_travel_by_value(ranks: Ranks) -> None:
    answers = ranks(2).run(identity_of([1, 2]))
    assert answers == [[1, 2]] * 2
    assert [answer(3) for answer in ranks(2).run(lambda: lambda x: x + 1)] == [4, 4]


# ---- a failed call, and the next one


def test_a_program_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("from ditmesh.launch import RankPool\nRankPool(2, preload=())\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, path], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert 'if __name__ == "__main__":' in ended.stderr
    assert "of 2 ended without an answer (exit code 1)" in ended.stderr.strip().splitlines()[-1]


def test_what_all_ranks_raise_alike_leaves_the_pool_open(pool: RankPool) -> None:
    pids = pool.pids
    pool.run(on_rank.keep, "a model")
    for _ in range(2):
        with pytest.raises(RankFailed, match="not like this") as caught:
            pool.run(on_rank.refuse)
        assert caught.value.pool_open
        assert pool.run(on_rank.keep) == [["a model"]] * 3
    assert [float(result) for result in pool.run(on_rank.total, 1.0)] == [6.0] * 3
    assert pool.pids == pids


def test_what_one_rank_raises_while_the_others_answer_leaves_the_pool_open(pool: RankPool) -> None:
    pool.run(on_rank.keep, "a model")
    with pytest.raises(RankFailed, match="rank 2 of 3 raised ValueError: rank 2 had enough") as caught:
        pool.run(on_rank.raise_on, 2)
    assert caught.value.pool_open
    assert pool.run(on_rank.keep) == [["a model"]] * 3
    assert [float(result) for result in pool.run(on_rank.total, 1.0)] == [6.0] * 3


def test_a_message_of_a_failed_call_is_not_taken_for_a_later_one(pool: RankPool) -> None:
    with pytest.raises(RankFailed, match="not taken") as caught:
        pool.run(on_rank.leave_a_message)
    assert caught.value.pool_open
    assert pool.run(on_rank.pass_on, 2.0) == [2.0] * 3


def test_garbage_is_collected_without_looking_at_what_ranks_share() -> None:
    """Each rank took 137 MiB for itself in its first full collection, which came after a hundred thousand cycles."""
    with RankPool(1, threads=1) as pool:
        ((grown, shared, waiting),) = pool.run(on_rank.collect_garbage)
    assert grown < 16
    assert shared > 100_000
    assert waiting < 20_000


def test_a_fork_server_that_cannot_import_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('no HybridCache')\n")
    (tmp_path / "program.py").write_text(
        "from ditmesh.launch import RankPool\n"
        "from ditmesh import RankFailed\n"
        "if __name__ == '__main__':\n"
        "    try:\n        RankPool(2, preload=['broken_library'])\n"
        "    except RankFailed as error:\n        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("rank 0 could not start: the process that ranks are forked from has ended")
    assert "RuntimeError: no HybridCache" in done.stderr


# ---- launchers


@pytest.mark.parametrize("name", ["rya", "nowhere.to.be:Found", "support.launchers:Nothing"])
def test_a_launcher_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no launcher '{name}'.*package.module:Class"):
        launcher(name, 1)


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
        ({"world_size": 1, "timeout": 0.0}, "timeout of 0 seconds"),
        ({"world_size": 1, "timeout": float("nan")}, "timeout of nan seconds is not possible"),
        ({"world_size": 1, "timeout": float("inf")}, "timeout of inf seconds is not possible"),
        ({"world_size": 1, "device": "tpu"}, "device tpu: torch .* has none here, .*; use cpu, or install"),
    ],
)
def test_impossible_pools_are_refused(arguments: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RankPool(**arguments)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: torch.device(kind))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert resolve_device("auto", 2) == resolve_device(kind, 2) == kind
    assert resolve_device("cpu", 3) == "cpu"
    with pytest.raises(ConfigError, match="3 ranks need 3 GPUs, but 2 are there; use at most 2 devices"):
        resolve_device("auto", 3)
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, kind, "gloo")
    assert (resolve_device("auto", 2), resolve_device(kind, 2)) == ("cpu", kind)


def test_ranks_of_torchrun_start_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not from_torchrun()
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        init_from_environment()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    assert from_torchrun()
    with pytest.raises(ConfigError, match="rank of torchrun already"):
        RankPool(2)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0"}, "RANK, WORLD_SIZE and LOCAL_RANK are not set; start this with `torchrun --nproc-per-node N`"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number; start this with"),
        ({"RANK": "", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "RANK='' is not a number"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR and MASTER_PORT, by which ranks find"),
        ({"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "RANK=3 is none of WORLD_SIZE"),
    ],
)
def test_half_an_environment_of_torchrun_is_refused_in_one_sentence(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(says)):
        init_from_environment()


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


@pytest.mark.parametrize("how", ["busy", pytest.param("idle", marks=pytest.mark.matrix), "exit"])
def test_no_rank_outlives_its_owner(tmp_path: Path, how: str) -> None:
    """Killed in the middle of a call, killed between calls, or just leaving without closing the pool."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    mark, environment = processes.marked({"PYTHONPATH": os.pathsep.join(sys.path)})
    owner = subprocess.Popen(
        [sys.executable, str(script), how], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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

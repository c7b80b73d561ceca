"""Ranks beside a running program, which stays itself: real processes, killed and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.errors import ConfigError, InputError, LayoutError, RankFailed
from engine.test_first_call import call, model
from support.models import relative_error

ULYSSES = {"ulysses": 2}
# Attributes by which a model is known to be parallelised, and to refuse to be copied.
MARKS = ("_ditmesh_engine", "_ditmesh_followed", "__deepcopy__", "__reduce_ex__")


@pytest.fixture
def followers() -> Iterator[ditmesh.Followers]:
    with ditmesh.Followers(2, "cpu", 1, timeout=60) as made:
        yield made
    assert not dist.is_initialized()


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.02)
    return not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


@torch.no_grad()
def test_the_copies_stay_what_the_model_is(followers: ditmesh.Followers) -> None:
    net, given = model(), call()
    kind, before, truth = type(net), set(vars(net)), net(**given)[0]
    handle = followers.parallelize(net, ULYSSES)
    assert relative_error(net(**given)[0], truth) <= 1e-5
    # In place; another tensor; an attribute; in inference mode, where nothing shows it.
    net.embed.weight.mul_(1.5)
    net.layers[1].kv.weight = torch.nn.Parameter(net.layers[1].kv.weight * 0.5, requires_grad=False)
    net.layers[0].strength = [2.0]
    changed = net(**given)[0]
    assert followers.run(_strength) == [[2.0]]
    with torch.inference_mode():
        net.out.weight = torch.nn.Parameter(net.out.weight * 1.0, requires_grad=False)
        net(**given)
        net.out.weight.mul_(0.5)
    handle.update(["out.weight"])
    halved = net(**given)[0]
    handle.close()
    assert type(net) is kind
    assert set(vars(net)) == before
    assert relative_error(halved, net(**given)[0]) <= 1e-5
    with torch.inference_mode():
        net.out.weight.mul_(2.0)
    assert relative_error(changed, net(**given)[0]) <= 1e-5
    assert relative_error(changed, truth) > 1e-2
    net.layers.append(net.layers[0])
    other = followers.parallelize(net, {"ring": 2})
    net.layers[0] = torch.nn.Sequential(net.layers[0])
    with pytest.raises(InputError, match="has other modules than when it was copied"):
        net(**given)
    other.close()


def _strength() -> list[float]:
    from ditmesh.followers.followers import copies

    (copy,) = copies.values()
    return copy.module.layers[0].strength  # type: ignore[union-attr, no-any-return]


@torch.no_grad()
def test_a_model_that_sleeps_is_as_it_was(followers: ditmesh.Followers) -> None:
    net, given = model(), call()
    seen: list[int] = []
    net.layers[0].register_forward_hook(lambda *_: seen.append(1))
    truth, before = net(**given)[0], {name: dict(vars(one)) for name, one in net.named_modules()}
    handle = followers.parallelize(net, {**ULYSSES, "reproducible": True}, sleeps=True)
    for _ in range(2):
        assert torch.equal(net(**given)[0], truth)
        with handle.awake():
            assert relative_error(handle.call(net, (), given)[0], truth) <= 1e-5
        for name, one in net.named_modules():
            # Attributes and hooks, down to the blocks.
            now = {key: value for key, value in vars(one).items() if key not in MARKS}
            assert now.keys() == before[name].keys(), name
            hooks = {
                key for key, value in now.items() if key.endswith("hooks") and len(value) != len(before[name][key])
            }
            assert not hooks, name
    late: list[int] = []
    net.layers[2].register_forward_hook(lambda *_: late.append(1))
    with handle.awake():
        handle.call(net, (), given)
    # Reproducible mode runs the two samples one after the other; the program alone runs them together.
    assert late == [1, 1]
    net(**given)
    assert late == [1, 1, 1]
    net.layers[1].forward = lambda *args, **kwargs: None
    with pytest.raises(InputError, match="'forward' of a parallelised module was replaced"):
        handle.wake()
    del net.layers[1].forward
    handle.close()
    assert torch.equal(net(**given)[0], truth)


@torch.no_grad()
def test_a_rank_that_is_lost_is_said_in_a_sentence() -> None:
    net, given = model(), call()
    truth = net(**given)[0]
    with ditmesh.Followers(2, "cpu", 1, timeout=60) as followers:
        followers.parallelize(net, ULYSSES)
        net(**given)
        pids = followers.pids
        os.kill(pids[0], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1"):
            net(**given)
        assert time.monotonic() - started < 20
        assert followers.closed
        assert gone(pids)
        with pytest.raises(ConfigError, match="have ended"):
            net(**given)
    assert not dist.is_initialized()
    # The model is as it was, and new ranks take it.
    assert torch.equal(net(**given)[0], truth)
    with ditmesh.Followers(2, "cpu", 1) as followers:
        followers.parallelize(net, ULYSSES)
        assert relative_error(net(**given)[0], truth) <= 1e-5


@torch.no_grad()
def test_errors_and_refusals(followers: ditmesh.Followers) -> None:
    with pytest.raises(ConfigError, match=r"process group of torch\.distributed already"):
        ditmesh.Followers(2, "cpu", 1)
    with pytest.raises(ZeroDivisionError):
        followers.run(_divide, 0)
    assert followers.run(_divide, 2) == [0.5]
    net, given = model(), call()
    truth = net(**given)[0]
    with pytest.raises(ConfigError, match="4 ranks"):
        followers.parallelize(net, {"ulysses": 4})
    handle = followers.parallelize(net, ULYSSES)
    net(**given)
    with pytest.raises(LayoutError, match="nonsense"):
        net(**given, nonsense=1)
    assert relative_error(net(**given)[0], truth) <= 1e-5
    # As `expand(batch)` makes a timestep of a batch of one.
    one = {name: value[:1] for name, value in given.items()} | {"when": torch.tensor(300.0).expand(1)}
    with torch.no_grad():
        handle.close()
        truth = net(**one)[0]
        followers.parallelize(net, ULYSSES)
        assert relative_error(net(**one)[0], truth) <= 1e-5


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*(nested tensors|quant)")
def test_arguments_that_cannot_be_sent_are_named(followers: ditmesh.Followers) -> None:
    cases = {
        "a tensor on the meta device": torch.empty(2, device="meta"),
        "a nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "in the layout torch.sparse_coo": torch.eye(2).to_sparse(),
        "a quantised tensor": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "cannot pickle '_thread.lock'": threading.Lock(),
        "cannot pickle 'generator'": (number for number in ()),
    }
    net, given = model(), call()
    truth = net(**given)[0]
    followers.parallelize(net, ULYSSES)
    for words, value in cases.items():
        for named, path in (({"sharpness": value}, "sharpness"), ({"sharpness": {"a": [1, value]}}, "sharpness")):
            start = time.monotonic()
            with pytest.raises(InputError, match=rf"^{path}.*cannot be sent to the other ranks.*({words})") as error:
                net(**given, **named)
            assert "\n" not in str(error.value)
            assert time.monotonic() - start < 1
        assert relative_error(net(**given)[0], truth) <= 1e-5


def _divide(number: int) -> float:
    return 1 / number


HOST = """
import sys, torch, time
import ditmesh
from engine.test_first_call import call, model

if __name__ == "__main__":
    net, given = model(), call()
    followers = ditmesh.Followers(2, "cpu", 1)
    followers.parallelize(net, {"ulysses": 2})
    with torch.no_grad():
        net(**given)
        print(*followers.pids, flush=True)
        while True:
            net(**given)
"""


@pytest.mark.matrix
def test_ranks_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(HOST, encoding="utf-8")
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent / "src"), str(tests)])}
    environment["TMPDIR"] = str(tmp_path)
    host = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert host.stdout is not None
    pids = [int(word) for word in host.stdout.readline().split()]
    assert len(pids) == 1
    assert not gone(pids, 0)
    host.kill()
    host.communicate()
    assert gone(pids)
    limit = time.monotonic() + 15
    while (left := [one for one in tmp_path.iterdir() if one.is_dir()]) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left


PROGRAM = """
import ditmesh

LEVEL = 3

class Answer:
    def __init__(self, number):
        self.number = number

def raised(number):
    return Answer(number + LEVEL)

def prepare():
    import builtins
    builtins.prepared = raised(1).number

def prepared():
    import builtins
    return getattr(builtins, "prepared", None)

def refused():
    raise ValueError("refused")

print("started")
with ditmesh.Followers(2, "cpu", 1, prepare=prepare) as followers:
    (answer,) = followers.run(raised, 4)
    print(isinstance(answer, Answer), answer.number, followers.run(prepared), followers.run(lambda: LEVEL))
    try:
        followers.run(refused)
    except ValueError as error:
        print(error)
with ditmesh.Ranks(2, "cpu", 1, import_main=False) as ranks:
    print([answer.number for answer in ranks.run(raised, 5)])
"""


@pytest.mark.matrix
def test_functions_of_the_program_itself_run_on_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["started", "True 7 [4] [3]", "refused", "[8, 8]"]

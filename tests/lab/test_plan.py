"""`ditmesh plan`: what a rank's program does in a step, the seconds of it, and the table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.core.clock import timestep_of
from ditmesh.lab.plan.hardware import device, link, machine
from ditmesh.lab.plan.roofline import predict, synchronous_steps
from ditmesh.lab.plan.step import Steps, steps_of
from ditmesh.layout.conventions import Size
from ditmesh.memory.cards import parts
from ditmesh.memory.catalogue import shapes
from ditmesh.memory.sizes import Workload
from support.commands import run as run_command
from support.models import inputs, run, tiny
from support.sample import sampled

# Even everywhere: nothing is rounded.
EVEN = Size(rows=8, cols=8, text=32, batch=1)
JOB = Workload(8, 8, text=32, steps=10, element=4)


def steps(name: str, config: dict[str, Any], job: Workload = JOB) -> Steps:
    """The work of a tiny model of a family."""
    model = tiny(name)
    return steps_of(type(model).__name__, dict(model.config), ParallelConfig(**config), job, torch.float32)


@pytest.mark.parametrize(
    "name", sampled(["Flux", "Flux2", "SD3", "PixArt", "Wan", "QwenImage", "LTX", "HunyuanVideo", "Mochi"], of=3)
)
def test_flops_are_those_of_torchs_counter(name):
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(tiny(name), inputs(name, EVEN, masks=False))
    assert steps(name, {}).steady.flops == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_every_part_has_a_source():
    table = parts()
    assert all(len(entry["source"]) > 10 for kind in ("devices", "links") for entry in table[kind].values())


# --- what travels ------------------------------------------------------------------------------------------------


def sent(name: str, config: dict[str, Any], size: Size) -> list[int]:
    """Bytes that this rank sends in an exact step and in the one behind it."""
    model, made = tiny(name), inputs(name, size, masks=False)
    clock, found = timestep_of(model), []
    with ditmesh.parallelized(model, {**config, "shared_memory": False}):
        engine = ditmesh.engine_of(model)
        engine.begin_request(steps=2)
        for step in range(2):
            engine.mesh.traffic.reset()
            run(model, {**made, clock: made[clock] * (1 - 0.1 * step)})
            found.append(sum(engine.mesh.traffic.bytes_sent.values()))
    return found


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Flux", {"ulysses": 2}),
        ("Flux2", {"ring": 2, "reproducible": True, "tiles": 2}),
        ("SD3", {"tensor": 2}),
        ("Flux", {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}),
        pytest.param("SD3", {"ulysses": 2, "text": "replicate"}, marks=pytest.mark.matrix),
        ("Mochi", {"ring": 2}),
        pytest.param("Flux", {"ulysses": 2, "shard": 2}, marks=pytest.mark.matrix),
    ],
    ids=lambda value: value if isinstance(value, str) else ParallelConfig(**value).describe(),
)
def test_bytes_are_those_that_travel(ranks, name, config):
    found = steps(name, config)
    # Of two ranks an all-reduce sends as much as the tensor has.
    for travelled in ranks(2).run(sent, name, config, EVEN):
        assert sum(found.steady.sent.values()) == pytest.approx(travelled[1], rel=0.02)


# --- seconds -----------------------------------------------------------------------------------------------------


def predicted(config: dict[str, Any], **changes: Any) -> Any:
    """A tiny model's prediction on two devices."""
    model, made = tiny("Flux"), replace(machine("h100", 2), **changes)
    given = type(model).__name__, dict(model.config), ParallelConfig(**config)
    return predict(*given, replace(JOB, element=4), made, torch.float32)


def test_a_step_is_the_sum_of_its_terms():
    one = predicted({"ulysses": 2})
    assert one.latency == pytest.approx(10 * sum(one.steady.values()))
    assert {"matrix products", "attention", "elementwise", "waits for ulysses"} <= set(one.steady)


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"pipe": 2}], ids=str)
def test_a_slower_link_never_helps(config):
    times = [predicted(config, link=link(speed)).latency for speed in ("100GB/s", "1GB/s", "0.001GB/s")]
    assert times == sorted(times)
    assert config == {"pipe": 2} or times[0] < times[2]


def test_a_device_computes_while_the_host_launches():
    """A step takes as long as the slower of the two; where kernels do not wait in a queue, as long as both."""
    busy = predicted({}, device=replace(device("h100"), launch=0.0)).step
    assert predicted({}, device=replace(device("h100"), launch=1e-12)).step == pytest.approx(busy)
    late = predicted({}, device=replace(device("h100"), launch=1.0)).step
    both = predicted({}, device=replace(device("h100"), launch=1.0, ahead=False)).step
    assert both == pytest.approx(late + busy)


@pytest.mark.parametrize(("warmup", "count"), [("fixed(4)", 4), ("sqrt(2)", 5)])
def test_synchronous_steps_are_the_policys(warmup, count):
    assert 1 <= synchronous_steps(ParallelConfig(ring=2, exchange="displaced", warmup=warmup), 20) <= 20
    assert warmup != "fixed(4)" or synchronous_steps(ParallelConfig(ring=2, warmup=warmup), 20) == count


# --- the command -------------------------------------------------------------------------------------------------


def plan(capfd: Any, *words: str | Path) -> tuple[int, str, str]:
    """Exit code and output of the command."""
    code = run_command("plan", *words)
    said = capfd.readouterr()
    return code, said.out, said.err


@pytest.mark.matrix
def test_a_plan_ends_with_the_line_to_type(capfd):
    code, out, err = plan(capfd, "pixart-sigma", "--hardware", "l40s", "--devices", "2", "--stale", "--json")
    assert code == 0, err
    result = json.loads(out)
    fitting = [one for one in result["configurations"] if one["fits"]]
    times = [one["denoising_seconds"] for one in fitting]
    assert times == sorted(times)
    assert all(one["why"] and one["terms"] for one in fitting)
    assert {"ulysses=2", "ring=2", "cfg=2", "1 device"} <= {one["words"] for one in fitting}
    assert any("displaced" in one["words"] for one in fitting)
    command = 'ditmesh generate "..." --model PixArt-alpha/PixArt-Sigma-XL-2-1024-MS --devices 2'
    assert result["command"].startswith(command)
    # "auto" takes the same, or it is said how they differ.
    assert result["verdict"].startswith('"auto" chosen: cfg=2')
    assert fitting[0]["words"] == "cfg=2" or "of the fastest row's time" in result["verdict"]


@pytest.mark.matrix
def test_few_steps_are_planned_exact(capfd):
    code, out, err = plan(capfd, "emoji-flux", "-s", "4", "--hardware", "h100", "-n", "2", "--stale", "--json")
    assert code == 0, err
    refused = json.loads(out)["refused"]
    for words in ("pipe=2 patches=2", "ring=2 exchange=displaced warmup=fixed(4)"):
        assert refused[words].startswith("with 4 steps keys")


@pytest.mark.matrix
def test_a_plan_of_what_does_not_fit(capfd):
    code, out, err = plan(capfd, "pixart-sigma", "--hardware", "4090", "--devices", "1", "--memory", "8")
    assert code == 0, err
    assert "none of these fits: --devices 1 --offload group fits" in " ".join(out.split())
    assert "ditmesh generate" not in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("flux.1-dew", "--hardware", "h100"), "flux.1-dev"),
        (("flux.1-dev", "--hardware", "h1000"), "did you mean 'h100'"),
        (("flux.1-dev", "--hardware", "h20", "--dtype", "float32"), "no speed of h20 in float32"),
        (("flux.1-dev", "--hardware", "h100", "--link", "rope"), "10GB/s"),
        (("flux.1-dev", "--hardware", "h100", "--size", "1000x1000"), "multiples of 16"),
        ((), "say which model"),
    ],
)
def test_refusals_are_one_sentence(capfd, words, says):
    code, _, err = plan(capfd, *words)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


# --- the tables of others ----------------------------------------------------------------------------------------


TABLES = sorted((Path(__file__).parents[2] / "benchmarks" / "published").glob("*.yaml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_published_tables_have_a_source_and_fit_the_catalogue(path):
    table = yaml.safe_load(path.read_text())
    # A file at a commit, or a thread.
    assert re.search(r"@[0-9a-f]{8}|github\.com/\S+/pull/\d+", table["source"])
    assert shapes()[table["model"]].token_grid(*table["size"], table.get("frames", 1))
    made = machine(table["device"], table["devices"])
    assert link(table["link"]).bandwidth > 0
    for row in table["rows"]:
        assert ParallelConfig(**row["config"]).world_size <= made.devices
        assert row["seconds"] > 0

"""The adaptive policy with a number of synchronous steps at most."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

import ditmesh
from ditmesh.comm import Link
from ditmesh.errors import ConfigError
from ditmesh.staleness.policy import Adaptive, Outlook, PastStep, parse
from ditmesh.staleness.schedule import even_levels
from ditmesh.strategies.pipefusion.pipeline import PipeFusion
from support.models import RAGGED, inputs, tiny
from support.pipelines import MAKERS, arguments, draw


def synchronous(policy: str, drifts: list[float], devices: int = 4) -> list[int]:
    """The synchronous ones of as many steps as there are drifts."""
    outlook, past = Outlook(devices, even_levels(len(drifts))), []
    for step, drift in enumerate(drifts):
        decision = parse(policy).decide(step, outlook, past)
        past.append(PastStep(decision.synchronous, drift if step else None))
    return [step for step, before in enumerate(past) if before.synchronous]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 12])
def test_never_more_than_so_many(most):
    """A budget that nothing fits in is cut off by the number; the steps are spent, all of them."""
    steps = synchronous(f"adaptive(0.0001, {most})", [0.2] * 12)
    assert len(steps) == most
    assert steps[0] == 0


def test_so_many_steps_go_where_errors_are_largest():
    """They are the steps that a budget of the same number would choose, and those of the largest predicted errors."""
    steps = synchronous("adaptive(0.0001, 4)", [0.2] * 12)
    past = [PastStep(step == 0, 0.2 if step else None) for step in range(12)]
    outlook = Outlook(4, even_levels(12))
    predicted = [parse("adaptive(9)").decide(step, outlook, past[:step]).predicted or 0.0 for step in range(12)]
    worst = sorted(range(1, 12), key=lambda step: -predicted[step])[:3]
    assert set(steps) == {0, *worst}
    # Not those of a fixed warm-up.
    assert steps != [0, 1, 2, 3]


def test_a_budget_that_is_kept_needs_no_number():
    drifts = [0.2] * 12
    assert synchronous("adaptive(0.04, 11)", drifts) == synchronous("adaptive(0.04)", drifts)
    assert len(synchronous("adaptive(0.04, 2)", drifts)) == 2 < len(synchronous("adaptive(0.04)", drifts))
    assert synchronous("adaptive(9, 5)", drifts) == [0]


def test_reads():
    assert parse("adaptive(0.05)") == Adaptive(0.05)
    assert parse("adaptive(0.05, 6)") == Adaptive(0.05, 6)


@pytest.mark.parametrize(
    "text", ["adaptive(0.1, 0)", "adaptive(0.1, 1.5)", "adaptive(0, 3)", "adaptive(inf, 3)", "adaptive(1, nan)"]
)
def test_refuses(text):
    with pytest.raises(ConfigError, match="is not a warm-up policy"):
        parse(text)


# --- PipeFusion: the drift of a step is known a step later ------------------------------------------------------------


def pipelined(config: dict[str, Any], steps: int = 8, name: str = "flux") -> dict[str, Any]:
    """What a pipeline draws in patches, and all that was decided and measured."""
    pipe = MAKERS[name]()
    with ditmesh.parallelized(pipe, {"patches": 4, **config}, timeout=300):
        engine = ditmesh.engine_of(pipe)
        known: list[list[bool]] = []
        decide = engine.control.policy.decide

        class Watched:
            def decide(self, step: int, outlook: Outlook, past: Any) -> Any:
                known.append([before.drift is not None for before in past])
                return decide(step, outlook, past)

        engine.control.policy = Watched()
        latents = draw(pipe, arguments(name, [1, 2], steps=steps))
        log = engine.staleness.steps
        return {
            "latents": latents,
            "flushes": engine.parts(PipeFusion)[0].flushes,
            "decisions": [(record.synchronous, record.reason, record.predicted, record.filled) for record in log],
            "drift": [record.drift for record in log],
            "known": known,
        }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return torch.equal(one["latents"], other["latents"]) and all(
        one[key] == other[key] for key in one if key != "latents"
    )


def returns(found: dict[str, Any]) -> int:
    """How often a synchronous step follows a stale one."""
    steps = [synchronous for synchronous, *_ in found["decisions"]]
    return sum(now and not before for before, now in pairwise(steps))


BUDGET = "adaptive(0.02)"


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Four patches on one device."""
    return pipelined({"warmup": BUDGET})


@pytest.mark.parametrize(
    "config",
    [{"pipe": 2}, pytest.param({"pipe": 4}, marks=pytest.mark.matrix), {"pipe": 2, "shared_memory": False}],
    ids=str,
)
def test_stages_decide_as_one_device_does(ranks, alone, config):
    """Decisions, reasons, drift of every block and the picture: to the bit, on every rank.

    The only pauses are those of a synchronous step after a stale one, which wants the whole picture.
    """
    for result in ranks(config["pipe"]).run(pipelined, {"warmup": BUDGET, **config}):
        assert same(result, alone)
    assert alone["flushes"] == returns(alone)
    assert 1 < sum(synchronous for synchronous, *_ in alone["decisions"]) < 8
    assert alone["drift"][0] == {}
    assert all(len(drift) == 4 and min(drift.values()) > 0 for drift in alone["drift"][1:])


def test_what_is_known_when_a_step_is_decided(alone):
    """After a synchronous step all drifts; after a stale one all but its own, which the stages behind still measure."""
    for step, known in enumerate(alone["known"]):
        before_last = [at > 0 for at in range(max(0, step - 1))]
        last = [alone["decisions"][step - 1][0] and step > 1] if step else []
        assert known == before_last + last
    assert {known[-1] for known in alone["known"][2:]} == {True, False}


@pytest.mark.parametrize("axes", [{"cfg": 2}, {"data": 2}, {"ulysses": 2}, {"ring": 2}], ids=str)
def test_all_ranks_of_the_job_decide_alike(ranks, axes):
    """Also those that see other rows, branches, heads and tokens; drift is that of all of them."""
    results = ranks(4).run(pipelined, {"warmup": BUDGET, "pipe": 2, **axes})
    for result in results:
        assert {key: result[key] for key in ("decisions", "drift", "known")} == {
            key: results[0][key] for key in ("decisions", "drift", "known")
        }
        assert result["flushes"] == returns(result)


def test_budgets_at_both_ends(ranks):
    """Nothing fits into no budget; into a huge one everything but the first step."""
    for budget, expected in (("adaptive(0.000001)", [True] * 5), ("adaptive(1000)", [True] + [False] * 4)):
        for result in ranks(2).run(pipelined, {"warmup": budget, "pipe": 2}, 5, "sd3"):
            assert [synchronous for synchronous, *_ in result["decisions"]] == expected


def on_its_own(config: dict[str, Any]) -> dict[str, Any]:
    """Every rank takes its own drift for that of all."""
    with mock.patch.object(Link, "all_reduce_async", lambda self, tensor: lambda timeout: tensor):
        return pipelined(config)


def test_drift_that_is_not_shared_is_noticed(ranks):
    """With a budget that no stale step breaks, so that ranks do not wait for one another for ever."""
    first, second = ranks(2).run(on_its_own, {"warmup": "adaptive(1000)", "pipe": 2})
    assert first["drift"] != second["drift"]


def unmoved(config: dict[str, Any]) -> list[dict[str, float]]:
    """Drift by block when every step has the same inputs."""
    model, made = tiny("SD3"), inputs("SD3", RAGGED)
    with torch.no_grad(), ditmesh.parallelized(model, {"patches": 3, **config}):
        engine = ditmesh.engine_of(model)
        engine.control.measure_drift = True
        engine.begin_request(steps=4)
        for _ in range(4):
            engine.clock.advance()
            model(**made)
        engine.end_request()
        return [record.drift for record in engine.staleness.steps]


def test_what_does_not_move_does_not_drift(ranks):
    """Keys of a patch are compared with its own; text, which goes with the first patch or with every one, too."""
    first, *others = ranks(2).run(unmoved, {"pipe": 2, "warmup": "first_last(1, 1)"})[0]
    assert first == {}
    assert all(len(drift) == 3 and max(drift.values()) < 1e-5 for drift in others)
    for text in ("shard", "replicate"):
        _, *others = ranks(2).run(unmoved, {"ulysses": 2, "warmup": "first_last(1, 1)", "text": text})[0]
        assert all(len(drift) == 3 and max(drift.values()) < 1e-5 for drift in others)


def test_half_of_the_other_patches_is_stale():
    """Predicted errors are in proportion to the share of stale keys."""
    past = [PastStep(True), PastStep(False, 0.2), PastStep(False, 0.2)]
    noise = even_levels(8)
    patches = parse("adaptive(9)").decide(3, Outlook(4, noise, 3 / 8), past)
    devices = parse("adaptive(9)").decide(3, Outlook(4, noise), past)
    assert patches.predicted == pytest.approx(devices.predicted / 2)

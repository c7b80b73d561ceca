"""Every step's load of a rank, and tokens that move while ranks become faster or slower."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.core.clock import TransformerCall
from ditmesh.strategies.balance import EQUAL_SPEEDS
from ditmesh.strategies.loads import StepLoads, Watch
from ditmesh.strategies.tokens import TokenStrategy
from support.models import RAGGED, inputs, relative_error, run, tiny
from support.stale import displaced, next_step

TOLERANCE = 1e-5


# --- when tokens move: no clock but a simulated one ------------------------------------------------------------------


def shares_over(speeds_at: Any, steps: int, ranks: int = 2, noise: float = 0.0, seed: int = 0) -> list[list[float]]:
    """Shares of simulated ranks in every step. Their times are known one step late, as on ranks."""
    chance, watch = random.Random(seed), Watch()
    shares, made, told, skip = [1 / ranks] * ranks, [], None, False
    for step in range(steps):
        if told is not None and not skip and (moved := watch.see(*told)) is not None:
            shares, skip = list(moved), True
        else:
            skip = False
        made.append(list(shares))
        took = [share / speed for share, speed in zip(shares, speeds_at(step), strict=True)]
        # Neighbours take a core for a step, now and then, for a long time.
        took = [one * chance.lognormvariate(0, noise) * (2 if noise and chance.random() < 0.01 else 1) for one in took]
        told = took, shares
    return made


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_equal_ranks_stay_even(ranks, seed):
    """Over 1,000 steps that differ by a tenth by chance, with one in a hundred of double length."""
    made = shares_over(lambda step: [1.0] * ranks, 1000, ranks, noise=0.1, seed=seed)
    assert max(abs(share * ranks - 1) for shares in made for share in shares) <= 0.03


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slow_rank_costs_little_six_steps_later(ranks):
    """It works at half its speed from step 100 on, and at its own again from step 200 on."""

    def speeds(step: int) -> list[float]:
        return [1.0] * (ranks - 1) + [0.5 if 100 <= step < 200 else 1.0]

    made = shares_over(speeds, 300, ranks, noise=0.03)
    # Of several ranks the others may stay by as much longer as counts as equal, when it is fast again.
    for first, last, bound in ((106, 200, 1.15), (240, 300, 1 + EQUAL_SPEEDS)):
        for step in range(first, last):
            balanced = 1 / sum(speeds(step))
            took = max(share / speed for share, speed in zip(made[step], speeds(step), strict=True))
            assert took <= bound * balanced, (step, made[step])
    assert max(made[105]) > min(made[105]) > 0


def test_loads_are_of_steps():
    """Seconds, waiting and tokens of each step, by a clock of the test; the last one ends with the request."""
    now, waited = [0.0], [0.0]
    loads = StepLoads(lambda: waited[0], lambda: (3, 5), ((0, 1, 0), (1, 2, 1)))
    loads._clock = lambda: now[0]
    for step in range(3):
        loads.begin_step(TransformerCall(request=0, step=step))
        now[0] += 2.0 + step
        waited[0] += 0.5
    loads.end_request()
    assert [(one.step, one.seconds, one.waited, one.computed, one.tokens) for one in loads.steps] == [
        (step, 2.0 + step, 0.5, 1.5 + step, 5) for step in range(3)
    ]
    loads.begin_step(TransformerCall(request=1, step=0))
    assert loads.steps == []


def test_a_group_sees_its_own_times_and_the_slowest_tensor_rank():
    """Two groups of two sequence ranks with two tensor ranks each; the second group's rank 1 is slow."""
    moved: list[Any] = []
    world = {}

    def post(told: torch.Tensor) -> Any:
        world["sum"] = world.get("sum", torch.zeros_like(told)) + told
        seconds = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 3.0]]])
        return lambda _: seconds

    now = [0.0]
    loads = StepLoads(
        lambda: 0.0,
        lambda: (8, 8),
        ((1, 0, 0), (2, 2, 2)),
        post,
        lambda speeds, step: moved.append((speeds, step)) is None,
    )
    loads._clock = lambda: now[0]
    with torch.no_grad():
        for step in range(8):
            loads.begin_step(TransformerCall(request=0, step=step))
            now[0] += 1.0
    assert moved[0] == ((0.75, 0.25), 6)


# --- on ranks --------------------------------------------------------------------------------------------------------


def slowed(config: dict[str, Any], steps: int, slow_from: int) -> dict[str, Any]:
    """A request in which rank 1 takes twice as long for a token from a step on, by a clock of the test."""
    model, made = tiny("Flux"), inputs("Flux", RAGGED)
    truth = run(model, made)
    now, step = [0.0], [0]

    def tick(_: Any, args: Any, kwargs: Any) -> None:
        tokens = kwargs.get("hidden_states", args[0] if args else None).shape[1]
        now[0] += tokens * (2.0 if step[0] >= slow_from and dist.get_rank() == 1 else 1.0)

    errors = []
    with ditmesh.parallelized(model, config), torch.no_grad():
        engine = ditmesh.engine_of(model)
        engine.balances[0].wanted = False
        (loads,) = [one._loads for one in engine.strategies if isinstance(one, TokenStrategy)]
        loads._clock, loads._waited = lambda: now[0], lambda: 0.0
        handle = model.transformer_blocks[0].register_forward_pre_hook(tick, with_kwargs=True)
        try:
            engine.begin_request(steps)
            for step[0] in range(steps):
                next_step(model)
                errors.append(relative_error(run(model, made), truth))
            engine.end_request()
        finally:
            handle.remove()
        found = {"loads": engine.all_loads(), "speeds": engine.balances[0].speeds, "error": max(errors)}
        if engine.staleness is not None:
            found["reasons"] = [(record.synchronous, record.reason) for record in engine.staleness.steps]
    return found


@pytest.mark.parametrize(
    "config",
    [{"ring": 2, "speeds": "auto"}, displaced(2, "fixed(1)", speeds="auto", compress="int4", predict="linear")],
    ids=str,
)
def test_tokens_move_while_a_request_runs(ranks, config):
    """Exact in every step, at a synchronous step of a stale strategy; all ranks alike; loads are told by all."""
    first, second = ranks(2).run(slowed, config, 16, 6)
    assert first["speeds"] == second["speeds"] == (0.667, 0.333)
    assert max(first["error"], second["error"]) <= (TOLERANCE if "exchange" not in config else 0.02)
    zero, one = first["loads"]
    # Slow in steps 6 to 9, which all ranks know when step 11 begins.
    assert [load.moved for load in zero] == [load.moved for load in one] == [step == 11 for step in range(16)]
    tokens = [(a.tokens, b.tokens) for a, b in zip(zero, one, strict=True)]
    assert tokens == [(32, 32)] * 11 + [(43, 21)] * 5
    balanced = 64 / 1.5
    assert all(max(a.computed, b.computed) <= 1.15 * balanced for a, b in zip(zero[12:], one[12:], strict=True))
    if "reasons" in first:
        assert first["reasons"] == second["reasons"]
        assert [step for step, (exact, _) in enumerate(first["reasons"]) if exact] == [0, 11]
        assert first["reasons"][11] == (True, "tokens move between ranks")


def test_a_simulation_measures_nothing():
    with pytest.raises(ditmesh.ConfigError, match="speeds='auto' is not simulated"):
        ditmesh.simulate(tiny("DiT"), {"ring": 2, "speeds": "auto"})

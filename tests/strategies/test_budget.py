"""Budgets of the adaptive policy in decibels and in seconds, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.core.clock import CallClock
from ditmesh.errors import ConfigError
from ditmesh.staleness.budget import PIXELS, AdaptiveDecibels, AdaptiveSeconds
from ditmesh.staleness.control import WarmupControl
from ditmesh.staleness.drift import DriftMonitor
from ditmesh.staleness.policy import Adaptive, Outlook, PastStep, parse
from ditmesh.staleness.schedule import even_levels
from support.models import RAGGED, inputs, run, tiny
from support.stale import displaced, next_step


def test_reads_units():
    assert parse("adaptive(40dB)") == AdaptiveDecibels(40.0)
    assert parse("adaptive( 42.5 dB, 6)") == AdaptiveDecibels(42.5, 6)
    assert parse("adaptive(3.5s)") == AdaptiveSeconds(3.5)
    assert parse("adaptive(0.05, 6)") == Adaptive(0.05, 6)
    assert ParallelConfig(ring=2, exchange="displaced", warmup="adaptive(40dB)").warmup == "adaptive(40dB)"


@pytest.mark.parametrize("text", ["adaptive(40m)", "adaptive(-1s)", "adaptive(0dB)", "adaptive(3s, 0)", "fixed(3s)"])
def test_refuses(text):
    with pytest.raises(ConfigError, match=r"is not a warm-up policy.*'adaptive\(40dB\)'"):
        parse(text)


def decided(text: str, drifts: list[float], seconds: tuple[float, float] = (2.0, 1.0)) -> tuple[list[PastStep], str]:
    """Steps with such drifts that take so long, synchronous and stale; and the verdict."""
    policy, outlook, past = parse(text), Outlook(4, even_levels(len(drifts))), []
    for step, drift in enumerate(drifts):
        exact = policy.decide(step, outlook, past).synchronous
        past.append(PastStep(exact, drift if step else None, seconds[0] if exact else seconds[1]))
    return past, policy.verdict(outlook, past)  # type: ignore[attr-defined]


@pytest.mark.parametrize("least", [20, 25, 30, 60])
def test_decibels_are_kept(least):
    past, verdict = decided(f"adaptive({least}dB)", [0.2] * 12)
    assert "is kept" in verdict
    made = Adaptive(1.0).made(Outlook(4, even_levels(12)), past)
    assert made * PIXELS <= 10 ** (-least / 20) * 1.006


def test_decibels_are_said_to_be_broken():
    """Keys that suddenly drift ten times as far as predicted; and a number of steps that does not do."""
    _, verdict = decided("adaptive(30dB)", [0.1] * 9 + [3.0] * 3)
    assert "is broken" in verdict
    assert "drifted more" in verdict
    _, verdict = decided("adaptive(60dB, 2)", [0.2] * 12)
    assert "is broken" in verdict
    assert "no more than 2 steps" in verdict


@pytest.mark.parametrize(("limit", "exact"), [(24.5, 11), (20.2, 8), (16.5, 4), (13.2, 1)])
def test_seconds_are_spent_and_kept(limit, exact):
    """Twelve steps of one second, or two where synchronous: all time is used, and no more."""
    past, verdict = decided(f"adaptive({limit}s)", [0.2] * 12)
    assert "is kept" in verdict
    assert sum(one.synchronous for one in past) == exact


@pytest.mark.parametrize("steps", [3, 12, 15])
def test_requests_that_end_early_or_late_have_a_verdict(steps):
    """A second-order sampler takes more steps than it announces; a user may stop one."""
    past = [PastStep(step == 0, 0.1 if step else None, 1.0) for step in range(steps)]
    for text in ("adaptive(20dB)", "adaptive(60s)"):
        assert "the budget is" in parse(text).verdict(Outlook(4, even_levels(12)), past)  # type: ignore[attr-defined]


def test_seconds_are_said_to_be_broken():
    past, verdict = decided("adaptive(5s)", [0.2] * 12)
    assert [one.synchronous for one in past] == [True] + [False] * 11
    assert "is broken" in verdict
    assert "13 s" in verdict


def test_time_is_spent_where_errors_are_largest():
    past, _ = decided("adaptive(16.5s)", [0.2] * 12)
    same = parse("adaptive(0.0001, 4)")
    other: list[PastStep] = []
    for step in range(12):
        other.append(PastStep(same.decide(step, Outlook(4, even_levels(12)), other).synchronous, 0.2 if step else None))
    assert [one.synchronous for one in past] == [one.synchronous for one in other]


def test_times_of_all_ranks_are_shared():
    """A rank's own clock is not what is decided by: the mean over ranks is."""
    now = [0.0]
    clock = CallClock()
    # Another rank, which takes three seconds where this one takes one.
    monitor = DriftMonitor(lambda sums: lambda _: sums + torch.tensor([[3.0, 1.0]]) if sums.numel() else sums)
    control = WarmupControl(AdaptiveSeconds(100.0), 2, monitor, clock, timer=lambda: now[0])
    control.begin_request(4)
    for step in range(4):
        clock.tick({"timestep": step}, {}, {})
        now[0] += 1.0
    control.end_request()
    assert [record.seconds for record in control.log.steps] == [2.0] * 4
    assert "the steps took 8 s" in control.log.verdict


def verdicts(warmup: str) -> tuple[str, list[bool], list[Any]]:
    model, made = tiny("Flux"), inputs("Flux", RAGGED)
    with ditmesh.parallelized(model, displaced(2, warmup)):
        engine = ditmesh.engine_of(model)
        engine.begin_request(5)
        for step in range(5):
            next_step(model)
            run(model, {**made, "timestep": made["timestep"] * (1 - 0.1 * step)})
        engine.end_request()
        log = engine.staleness
        return log.verdict, [record.synchronous for record in log.steps], [record.seconds for record in log.steps]


@pytest.mark.parametrize(
    ("warmup", "kept"), [("adaptive(0.001s)", False), ("adaptive(600s)", True), ("adaptive(6dB)", True)]
)
def test_ranks_decide_alike_and_say_so(ranks, warmup, kept):
    first, second = ranks(2).run(verdicts, warmup)
    assert first == second
    assert ("is kept" in first[0]) == kept
    assert all(first[2]) == warmup.endswith("s)")


def drifts(predict: str | None) -> list[float | None]:
    """Of seven synchronous steps of a picture that forms evenly."""
    model, made = tiny("Flux"), inputs("Flux", RAGGED)
    other = torch.randn(made["hidden_states"].shape, generator=torch.Generator().manual_seed(7))
    with ditmesh.simulated(model, displaced(2, "fixed(7)", predict=predict)):
        engine = ditmesh.engine_of(model)
        engine.control.measure_drift = True
        engine.begin_request(7)
        for step in range(7):
            next_step(model)
            share = 0.002 * step
            moved = (1 - share) * made["hidden_states"] + share * other
            run(model, {**made, "hidden_states": moved})
        engine.end_request()
        return [record.mean_drift for record in engine.staleness.steps]


def test_drift_is_that_of_keys_as_they_are_used():
    """From the fourth step on a stale step has the error of keys that are moved on: half, where they move evenly."""
    plain, moved = drifts(None), drifts("linear")
    assert moved[:3] == plain[:3]
    assert moved[3:] == [pytest.approx(0.5 * drift, rel=0.05) for drift in plain[3:] if drift is not None]


def test_seconds_are_not_simulated():
    with pytest.raises(ConfigError, match="is not simulated: virtual ranks take turns"):
        ditmesh.simulate(tiny("DiT"), displaced(2, "adaptive(3s)"))

"""Which steps are synchronous: policies, the clock, drift, and that all ranks agree."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import diffusers
import pytest
import torch

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.core.clock import CallClock
from ditmesh.errors import FewStepsWarning
from ditmesh.staleness.control import WarmupControl
from ditmesh.staleness.drift import SAMPLED_TOKENS, DriftMonitor, drifts_of
from ditmesh.staleness.policy import FEW_STEPS, Decision, Outlook, PastStep, parse
from ditmesh.staleness.schedule import even_levels, noise_levels
from support.pipelines import MAKERS, arguments, draw
from support.sample import sampled
from support.stale import decisions, displaced

# --- policies -----------------------------------------------------------------------------------------------------


def synchronous(warmup: str, steps: int, devices: int = 4, drift: float = 0.1) -> list[int]:
    """The synchronous steps of a request in which every step drifts alike."""
    past: list[PastStep] = []
    for step in range(steps):
        decision = parse(warmup).decide(step, Outlook(devices, even_levels(steps)), past)
        past.append(PastStep(decision.synchronous, None if step == 0 else drift))
    return [step for step, before in enumerate(past) if before.synchronous]


@pytest.mark.parametrize(
    ("policy", "devices", "expected"),
    [
        ("fixed(3)", 4, [0, 1, 2]),
        ("fixed(0)", 4, []),
        ("sqrt(2)", 4, [0, 1, 2, 3]),
        ("sqrt(0.5)", 2, [0]),
        ("adaptive(9, 3)", 4, [0]),
        ("steps(5 0)", 4, [0, 5]),
        ("steps()", 4, []),
        (" fixed( 2 ) ", 4, [0, 1]),
    ],
)
def test_decisions(policy, devices, expected):
    assert synchronous(policy, 10, devices) == expected


@pytest.mark.parametrize(
    "wrong", ["fixed", "fixed(-1)", "fixed(1.5)", "steps(-1)", "adaptive(1, 0)", "always(3)", "adaptive(nan)"]
)
def test_wrong_policies_are_refused(wrong):
    with pytest.raises(ditmesh.ConfigError, match=r"is not a warm-up policy; use 'fixed\(4\)', .*'adaptive\(0.05\)'"):
        ParallelConfig(ring=2, exchange="displaced", warmup=wrong)


def test_the_number_of_steps_must_be_known():
    with pytest.raises(ditmesh.ConfigError, match=r"needs the number of steps.*begin_request\(steps"):
        parse("adaptive(0.1)").decide(1, Outlook(4), [PastStep(True)])


def test_adaptive_spends_its_budget_where_it_is_cheap():
    """The larger the budget, the fewer the synchronous steps, the first always among them."""
    chosen = [synchronous(f"adaptive({budget})", 12) for budget in (1e-6, 0.01, 0.02, 0.03, 10.0)]
    counts = [len(steps) for steps in chosen]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (12, 1)
    assert 1 < counts[2] < 12
    assert all(steps[0] == 0 for steps in chosen)
    # Errors of late steps stay, those of earlier ones are mended: the last are the last to be given up.
    assert chosen[2][-1] == 11


def test_adaptive_follows_the_schedule():
    """A step that moves nothing costs nothing, however far keys have drifted."""
    noise = (1.0, 0.75, 0.5, 0.25, 0.001, 0.0)
    past = [PastStep(True), PastStep(False, 0.3), PastStep(False, 0.3), PastStep(False, 0.3)]
    last, before = (parse("adaptive(0.2)").decide(step, Outlook(2, noise), past[:step]) for step in (4, 3))
    assert last.predicted is not None
    assert before.predicted is not None
    assert last.predicted < before.predicted / 100


def test_the_factor_of_drift_is_the_mean_of_the_latest_two_steps():
    noise = even_levels(8)

    def predicted(*drifts: float) -> float:
        past = [PastStep(True), *(PastStep(True, drift) for drift in drifts)]
        return parse("adaptive(0.2)").decide(4, Outlook(2, noise), past).predicted or 0.0

    first, second = predicted(0.1, 0.2, 0.0), predicted(0.1, 0.0, 0.4)
    assert 0 < first < second
    assert predicted(0.1, 0.2, 0.4) == pytest.approx(first + second)
    assert predicted(0.9, 0.2, 0.4) == predicted(0.1, 0.2, 0.4)


def test_adaptive_falls_back_when_drift_grows():
    """Errors already made count: when keys drift further than foreseen, the rest is synchronous."""
    noise = even_levels(10)
    calm = [PastStep(True), *[PastStep(False, 0.01)] * 4]
    wild = [PastStep(True), *[PastStep(False, 0.9)] * 4]
    assert not parse("adaptive(0.1)").decide(5, Outlook(4, noise), calm).synchronous
    assert parse("adaptive(0.1)").decide(5, Outlook(4, noise), wild).synchronous
    # The same drift on one device is no error at all.
    assert not parse("adaptive(0.1)").decide(5, Outlook(1, noise), wild).synchronous


def test_never_more_than_so_many():
    """A budget that nothing fits in is cut off by the number: the steps are spent, and one that is kept needs none."""
    steps = synchronous("adaptive(0.0001, 4)", 12, drift=0.2)
    # Not those of a fixed warm-up.
    assert (len(steps), steps[0]) == (4, 0)
    assert steps != [0, 1, 2, 3]
    assert synchronous("adaptive(0.04, 11)", 12, drift=0.2) == synchronous("adaptive(0.04)", 12, drift=0.2)


# --- noise levels ---------------------------------------------------------------------------------------------------


def test_noise_levels_by_hand():
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    flow.set_timesteps(4)
    assert noise_levels(flow) == (*flow.sigmas[:4].tolist(), 0.0)
    flow.set_begin_index(2)  # image to image
    assert noise_levels(flow) == (*flow.sigmas[2:4].tolist(), 0.0)
    ddim = diffusers.DDIMScheduler()
    ddim.set_timesteps(4)
    share = float(ddim.alphas_cumprod[750]) ** 0.5, (1 - float(ddim.alphas_cumprod[750])) ** 0.5
    assert noise_levels(ddim)[0] == pytest.approx(share[1] / sum(share))
    assert noise_levels(None) is None


# --- the clock ------------------------------------------------------------------------------------------------------

CONDITION = {"prompt": torch.ones(1, 3, 2)}
NEGATIVE = {"prompt": torch.zeros(1, 3, 2)}


def ticked(calls: list[tuple[float, float, Any]]) -> list[tuple[int, int, bool]]:
    """Step, branch, and steadiness of calls given by timestep, latents and prompt."""
    clock, found = CallClock(), []
    for timestep, latents, others in calls:
        call = clock.tick({"t": torch.tensor([timestep])}, {"x": torch.full((1, 2), float(latents))}, others)
        found.append((call.step, call.branch, call.steady))
    return found


BOTH = [(9, 0, CONDITION), (9, 0, NEGATIVE), (5, 1, CONDITION), (5, 1, NEGATIVE), (1, 2, CONDITION)]
# Heun evaluates at the end of one interval and at the start of the next.
TWICE = [(9, 0, CONDITION), (5, 1, CONDITION), (5, 2, CONDITION), (1, 3, CONDITION), (1, 4, CONDITION)]


@pytest.mark.parametrize(
    ("calls", "places"),
    [
        (BOTH, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]),
        # Video to video: the unconditional branch sees other latents.
        ([(t, x + 7 * (c is NEGATIVE), c) for t, x, c in BOTH], [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]),
        (TWICE, [(step, 0) for step in range(5)]),
        ([(t, x, c) for t, x, _ in TWICE for c in (CONDITION, NEGATIVE)], [(s, b) for s in range(5) for b in (0, 1)]),
    ],
    ids=["branches", "latents of their own", "twice", "twice with branches"],
)
def test_steps_and_branches(calls, places):
    assert [found[:2] for found in ticked(calls)] == places


def test_a_call_that_has_the_arguments_of_the_step_before_is_steady():
    calls = [(9, 0, CONDITION), (5, 1, CONDITION), (1, 2, NEGATIVE)]
    assert ticked(calls) == [(0, 0, False), (1, 0, True), (2, 0, False)]


def test_latents_written_in_place():
    clock, latents = CallClock(), torch.zeros(1, 2)
    clock.tick({"t": 5.0}, {"x": latents}, CONDITION)
    latents += 1
    assert clock.tick({"t": 5.0}, {"x": latents}, CONDITION).step == 1


def test_a_new_request_starts_from_zero():
    clock = CallClock()
    clock.tick({"t": 9.0}, {"x": torch.zeros(1)}, CONDITION)
    clock.begin_request()
    call = clock.tick({"t": 9.0}, {"x": torch.zeros(1)}, CONDITION)
    assert (call.request, call.step, call.branch, call.steady) == (1, 0, 0, False)


class Scheduler:
    """Counts its steps, as most of diffusers' do; its timesteps repeat, as Heun's do."""

    def __init__(self, counts: bool) -> None:
        self.timesteps = torch.tensor([900.0, 600.0, 600.0, 300.0, 300.0])
        if counts:
            self.step_index: int | None = None

    def step(self, number: int) -> None:
        if hasattr(self, "step_index"):
            self.step_index = number + 1


def test_a_scheduler_that_is_not_stepped_is_not_believed():
    """Its count stands still while the timesteps go on: they are compared."""
    scheduler = Scheduler(True)
    scheduler.step_index = 0
    clock = CallClock(lambda: scheduler)
    steps = [
        clock.tick({"t": torch.tensor([9.0 - n // 2])}, {"x": torch.zeros(1)}, (CONDITION, NEGATIVE)[n % 2]).step
        for n in range(6)
    ]
    assert steps == [0, 0, 1, 1, 2, 2]
    # Nor one that is put in its place in the middle of a request.
    scheduler = Scheduler(True)
    assert clock.tick({"t": torch.tensor([7.0])}, {"x": torch.zeros(1)}, CONDITION).branch == 2
    assert clock.tick({"t": torch.tensor([6.0])}, {"x": torch.zeros(1)}, CONDITION).step == 3


def test_a_clock_holds_nothing_between_requests():
    clock, latents = CallClock(), torch.zeros(2, 3)
    gone = weakref.ref(latents)
    for number in range(3):
        clock.tick({"t": torch.tensor(9.0 - number)}, {"x": latents}, {"prompt": torch.ones(2)})
    clock.end_request()
    del latents
    gc.collect()
    assert gone() is None


# --- drift --------------------------------------------------------------------------------------------------------


def close_step(monitor: DriftMonitor) -> list[float | None]:
    """Drift of the step that has run, by block."""
    return drifts_of(monitor.take().unsqueeze(0))[0]


def test_drift_by_hand():
    monitor = DriftMonitor(lambda sums: sums)
    first, second = monitor.add_block("first"), monitor.add_block("second")
    k = torch.randn(1, 2, 1000, 4, generator=torch.Generator().manual_seed(0))
    monitor.observe(first, "k", 0, (k, k), dim=2)
    monitor.observe(second, "k2", 0, (k, k), dim=2)
    assert close_step(monitor) == [None, None]
    monitor.observe(first, "k", 1, (1.1 * k, 1.1 * k), dim=2)
    monitor.observe(second, "k2", 1, (k, k), dim=2)
    assert close_step(monitor) == [pytest.approx(0.1 / 1.1), 0.0]
    # Not one step apart: nothing to compare with.
    monitor.observe(first, "k", 3, (k, k), dim=2)
    assert close_step(monitor) == [None, None]
    assert monitor._of.value.samples["k"][1].shape[3] <= SAMPLED_TOKENS
    monitor.reset()
    monitor.observe(first, "k", 4, (2 * k, k), dim=2)
    assert close_step(monitor) == [None, None]


def test_drift_from_a_prediction_by_hand():
    """Keys that move evenly: half of the change is predicted, from the third sample in a row on."""
    monitor = DriftMonitor(lambda sums: sums)
    block, found = monitor.add_block("block"), []
    for step, share in enumerate([0.0, 0.0, 0.0, 0.5, 0.5, None, 0.5, 0.5]):
        keys = torch.full((1, 1, 8, 2), 10.0 + step)
        monitor.observe(block, "k", step, (keys, keys), dim=2, share=share)
        found.append(close_step(monitor)[0])
    expected = [None, 1 / 11, 1 / 12, 0.5 / 13, 0.5 / 14, 1 / 15, 1 / 16, 0.5 / 17]
    assert found == [None, *map(pytest.approx, expected[1:])]


class EveryOther:
    reads_drift = True

    def decide(self, step: int, outlook: Outlook, past: Any) -> Decision:
        return Decision(step % 2 == 0, f"step {step} of {outlook.total} on {outlook.devices}")


def test_control_keeps_a_log():
    monitor = DriftMonitor(lambda sums: 2 * sums)
    block = monitor.add_block("block")
    clock = CallClock()
    control = WarmupControl(EveryOther(), 3, monitor, clock, lambda: even_levels(4))
    for _ in range(2):
        clock.begin_request()
        control.begin_request()
        for step in range(4):
            clock.tick({"t": 10 - step}, {"x": torch.full((1,), float(step))}, CONDITION)
            value = torch.full((1, 1, 1, 1), 1.0 + step)
            monitor.observe(block, "k", clock.call.step, (value, value), dim=2)
            assert control.decision.synchronous == (step % 2 == 0)
        control.end_request()
        assert control.log.summary() == "2 of 4 steps synchronous"
        assert control.log.steps[1].reason == "step 1 of 4 on 3"
        assert [record.mean_drift for record in control.log.steps] == [None, *map(pytest.approx, (1 / 2, 1 / 3, 1 / 4))]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ("FlowMatchEulerDiscreteScheduler", [True] * 4),
        ("HeunDiscreteScheduler", [True] * 2 + [False] * 5),
        (None, [True] * 4),
    ],
)
def test_noise_goes_on_where_no_level_is_evaluated_twice(sampler, expected):
    """A second evaluation of one level is no step on, and neither is the one after it two of them."""
    scheduler = None if sampler is None else getattr(diffusers, sampler)()
    if scheduler is not None:
        scheduler.set_timesteps(4)
        assert len(scheduler.timesteps) == len(expected)
    clock = CallClock()
    control = WarmupControl(EveryOther(), 2, DriftMonitor(lambda sums: sums), clock, lambda: noise_levels(scheduler))
    control.begin_request()
    assert [control.goes_on(step) for step in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("config", "steps", "warned"),
    [({"patches": 2}, 4, False), ({"patches": 2}, 5, True), (displaced(2), FEW_STEPS, False), (displaced(1), 4, False)],
    ids=str,
)
def test_few_steps_are_warned_of(config, steps, warned):
    """One sentence, where a step was stale: the default makes four steps exact."""
    pipe = MAKERS["flux"]()
    around = ditmesh.parallelized if "patches" in config else ditmesh.simulated
    with around(pipe, config), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draw(pipe, arguments("flux", [1], steps=steps))
    said = [str(one.message) for one in caught if one.category is FewStepsWarning]
    assert [sentence.startswith(f"with {steps} steps keys") for sentence in said] == [True] * warned


# --- on ranks --------------------------------------------------------------------------------------------------------


def decided(name: str, config: dict[str, Any], steps: int) -> tuple[list[tuple[bool, str]], list[float | None], str]:
    pipe = MAKERS[name]()
    with ditmesh.parallelized(pipe, config):
        draw(pipe, arguments(name, [1, 2], steps=steps))
        log = ditmesh.engine_of(pipe).staleness
        return decisions(pipe), [record.mean_drift for record in log.steps], log.summary()


@pytest.mark.parametrize(
    ("name", "given"), sampled(MAKERS, [(2, {}), (4, {"cfg": 2}), (4, {"data": 2})], of=2), ids=str
)
def test_all_ranks_decide_alike(ranks, name, given):
    """Also those that see other rows and other branches: drift is that of all ranks, to the bit."""
    world, axes = given
    results = ranks(world).run(decided, name, {**axes, **displaced(2, "adaptive(0.04)")}, 8)
    assert all(result == results[0] for result in results)
    found, drifts, summary = results[0]
    count = sum(synchronous for synchronous, _ in found)
    assert 1 < count < 8  # the budget is neither everything nor nothing
    assert summary == f"{count} of 8 steps synchronous"
    assert drifts[0] is None
    assert all(drift is not None and drift > 0 for drift in drifts[1:])

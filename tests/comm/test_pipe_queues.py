"""PipeFusion under NCCL's queues: what a receive costs that is posted too early, and pairs that are not connected."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from nccl_rules.program import Compute, Half, HostWait, PointToPoint, Program, Wait
from nccl_rules.record import computing, recorded
from nccl_rules.replay import replay
from support.models import variant
from support.pipelines import arguments, draw, flux

# Lost to queues, at most, of a request's time.
LOST = 1.05
SIDE = 160


# --- programs that are written down


def stale_steps(stages: int, patches: int, steps: int, ahead: int) -> list[Program]:
    """PipeFusion's stale steps, whose receives are posted so many patches ahead; all stages are equal."""
    programs: list[Program] = [[] for _ in range(stages)]
    numbers = [0] * stages

    def message(stage: int, direction: Any, peer: int, group: str) -> int:
        numbers[stage] += 1
        half = Half(direction, peer, 4, "float32")
        programs[stage].append(PointToPoint(numbers[stage], group, (half,), False))
        return numbers[stage]

    predictions: list[int] = []
    for step in range(steps):
        for stage, program in enumerate(programs):
            receives: list[int] = []
            expected = [message(0, "recv", stages - 1, "back") for _ in range(patches)] if stage == 0 else []
            for patch in range(patches):
                while stage and len(receives) < min(patches, patch + 1 + ahead):
                    receives.append(message(stage, "recv", stage - 1, "pipe"))
                if stage:
                    program.append(Wait(receives[patch]))
                elif step:
                    program.append(Wait(predictions[patch]))
                program.append(Compute(1.0))
                message(stage, "send", *((stage + 1, "pipe") if stage + 1 < stages else (0, "back")))
            predictions = expected or predictions
    return programs


@pytest.mark.parametrize(("stages", "patches"), [(2, 4), (3, 3), (3, 4), (4, 4), (4, 8), (8, 8)])
def test_one_patch_ahead_loses_nothing_and_all_patches_ahead_do(stages, patches):
    ideal = replay(stale_steps(stages, patches, 24, patches), "ideal").seconds
    ahead = replay(stale_steps(stages, patches, 24, 1), "eager")
    assert (ahead.findings, ahead.deadlock) == ([], [])
    assert ahead.seconds <= LOST * ideal
    all_at_once = replay(stale_steps(stages, patches, 24, patches), "eager").seconds
    assert (all_at_once > 1.2 * ideal) == (stages > 2)


# --- recorded requests


def request(stages: int, early: bool, whole: bool) -> Program:
    """The program of a request of this rank.

    Args:
        stages: of a model of 6 blocks a stage.
        early: receives of all patches of a step are posted before its first patch is computed.
        whole: with what connects the ranks, and what a first request looks at more.
    """
    import ditmesh
    from ditmesh.strategies.pipefusion.pipeline import PipeFusion

    patch_run = PipeFusion._patch_run

    def posted_early(self: Any, plan: Any, buffers: Any, patches: int, patch: int) -> Any:
        if patches == 1:
            return patch_run(self, plan, buffers, patches, patch)
        if patch == 0:
            self.early = [patch_run(self, plan, buffers, patches, each) for each in range(patches)]
        return self.early[patch]

    config = {"pipe": stages, "patches": 4, "warmup": "fixed(1)", "shared_memory": False}
    pipe = flux()
    layers = 3 * stages
    pipe.register_modules(transformer=variant("Flux", num_layers=layers, num_single_layers=layers))

    def call() -> None:
        draw(pipe, arguments("flux", [1], steps=8, height=SIDE, width=SIDE, true_cfg_scale=1.0))

    with (
        mock.patch.object(PipeFusion, "_patch_run", posted_early if early else patch_run),
        recorded() as recorder,
        ditmesh.parallelized(pipe, config),
    ):
        if not whole:
            call()
            recorder.program.clear()
        with computing(recorder, pipe.transformer, (SIDE // 16) ** 2):
            call()
        return list(recorder.program)


def test_receives_of_all_patches_at_once_are_found_slow(ranks):
    """Negative control of the test that a request loses nothing."""
    programs = ranks(4).run(request, 4, True, False)
    outcome = replay(programs, "eager")
    assert (outcome.findings, outcome.deadlock) == ([], [])
    assert outcome.seconds > 1.2 * replay(programs, "ideal").seconds


def connects(entry: Any) -> bool:
    """Whether an operation sends the byte that connects ranks."""
    return isinstance(entry, PointToPoint) and {half.dtype for half in entry.halves} == {"uint8"}


def test_pairs_are_connected_before_a_host_can_wait_for_its_device(ranks):
    """Where pairs connect at their first message, and the last stage waits for its device in every block."""
    programs = ranks(2).run(request, 2, False, True)
    assert all(any(map(connects, program)) for program in programs)
    programs[-1] = [
        one for entry in programs[-1] for one in ([entry, HostWait()] if isinstance(entry, Compute) else [entry])
    ]
    for rule in ("eager", "lazy"):
        outcome = replay(programs, rule)
        assert (outcome.findings, outcome.deadlock) == ([], [])
    unconnected: list[Program] = []
    for program in programs:
        numbers = {entry.number for entry in program if isinstance(entry, PointToPoint) and connects(entry)}
        unconnected.append(
            [entry for entry in program if not (isinstance(entry, (PointToPoint, Wait)) and entry.number in numbers)]
        )
    assert replay(unconnected, "lazy").deadlock

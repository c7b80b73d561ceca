"""Requests that keep something from step to step, in turns by random schedules, against each alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import ditmesh
from ditmesh.core.kept import KeptState, KeptStates
from ditmesh.serve.worker.batching import Batcher, PipelineTask, copied
from support import more_pipelines, pipelines

SIDES = (64, 96)


@dataclass(frozen=True)
class Asked:
    """A request: number of its prompt and seed, steps, and side in pixels where the family takes one."""

    number: int
    steps: int
    side: int = 64


def made(name: str, asked: Asked) -> dict[str, Any]:
    """Arguments of a request's call."""
    if name in pipelines.MAKERS:
        return pipelines.arguments(
            name, [asked.number + 1], asked.number, asked.steps, height=asked.side, width=asked.side
        )
    return more_pipelines.arguments(name, [asked.number + 1], asked.number, asked.steps)


def latents(name: str, output: Any) -> torch.Tensor:
    """What a request returns."""
    return torch.as_tensor(
        getattr(output, more_pipelines.FAMILIES[name].result if name not in pipelines.MAKERS else "images")
    )


def pipeline(name: str) -> Any:
    """A family's pipeline of tiny random parts."""
    pipe = pipelines.MAKERS[name]() if name in pipelines.MAKERS else more_pipelines.FAMILIES[name].make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def in_turns(
    name: str, config: dict[str, Any], asked: Sequence[Asked], seeds: Sequence[int], shared: bool = False
) -> dict[str, Any]:
    """Random schedules of some requests on all ranks: which pictures are those of each alone, to the bit.

    In every schedule requests come, pause and go on at random; one is cancelled at a random step, and must leave
    nothing. A rank function.

    Args:
        name: of a family.
        config: of the ranks.
        asked: the requests.
        seeds: of the schedules.
        shared: the planted fault: all requests have one state.
    """
    pipe = pipeline(name)
    template = copy.copy(pipe)
    states = KeptState()
    fault = mock.patch.object(KeptStates, "new", return_value=states)
    found: dict[str, Any] = {"same": [], "switches": 0, "left": [], "sent": []}
    with torch.no_grad(), ditmesh.parallelized(pipe, config, timeout=60):
        engine = ditmesh.engine_of(pipe)
        traffic, world = engine.mesh.traffic.bytes_sent, engine.mesh.world
        truths = [latents(name, pipe(**made(name, one))).clone() for one in asked]
        found["others"] = sum(
            one.shape == other.shape and torch.equal(one, other)
            for place, one in enumerate(truths)
            for other in truths[:place]
        )
        batcher = Batcher(pipe, template, world.all_gather_object, world.rank, world.size)
        found["why"], found["alone"] = batcher.why, batcher.alone
        for seed in seeds:
            if shared:
                states.begun = False
            with fault if shared else nullcontext():
                runs = _schedule(batcher, template, name, asked, random.Random(seed), found)
            found["same"].append(
                [torch.equal(latents(name, run.output), truth) for run, truth in zip(runs, truths, strict=True)]
            )
            found["failures"] = [str(run.failure) for run in runs if run.failure is not None]
            del runs
            found["left"].append(batcher.kept_bytes())
        batcher.close()
        found["sent"] = sum(traffic.values())
        again = latents(name, pipe(**made(name, asked[0])))
        found["restored"] = torch.equal(again, truths[0])
    return found


def _schedule(
    batcher: Batcher, template: Any, name: str, asked: Sequence[Asked], chance: random.Random, found: dict[str, Any]
) -> list[PipelineTask]:
    """One schedule; the tasks, which have ended."""
    device = torch.device("cpu")
    runs = [PipelineTask(copied(template), made(name, one), one.number, device) for one in asked]
    # One more, which is cancelled.
    doomed = PipelineTask(copied(template), made(name, asked[0]), 99, device)
    left, before = [*runs, doomed], None
    until, turns = chance.randrange(1, 6), 0
    while left:
        # A few are awake at a time: the others have not come, or are paused.
        awake = chance.sample(left, min(len(left), chance.randint(1, 3)))
        for _ in range(chance.randint(1, 4)):
            awake = [run for run in awake if run in left]
            if not awake:
                break
            run = chance.choice(awake)
            found["switches"] += run is not before
            before = run
            # Turns that put another one aside are not this one's.
            while (trouble := batcher.turn(run)) is None and batcher.in_hand is not run:
                pass
            assert trouble is None, trouble
            if run is doomed:
                turns += 1
                if turns == until or run.ended:
                    run.leave()
                    batcher.release(run)
                    left.remove(run)
            elif run.ended:
                assert batcher.end_turns(run) is None
                left.remove(run)
    return runs

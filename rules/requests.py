"""Requests, calls and training steps on fake CUDA devices, beside the same on CPUs."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.strategies.sequence import SequenceParallel
from ditmesh.train import reduce_gradients, run
from ditmesh.train.gradients import reduce as averaging
from ditmesh.train.trainer import Progress, Trainer
from ditmesh.zoo import path as find
from rules.fake_cuda import KIND, FakeDevice, fake_device, on_device, unavailable
from rules.fake_world import one_of
from support import gradients, more_pipelines, pipelines
from support.families import family_by_hand
from support.models import RAGGED, inputs, sizes, tiny
from support.stale import moving
from support.syncs import OURS, Sync
from support.train import configured, settings

STEPS = 5


@dataclass
class OnCuda:
    """What one rank has seen.

    Attributes:
        error: largest difference from the same configuration on CPUs, over the largest magnitude.
        steady: what ditmesh would have waited for in the last step, by place and operation.
        after: the same, after the last step: where latents are decoded.
    """

    error: float = 0.0
    steady: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)


def both(
    work: Callable[[FakeDevice | None], dict[str, Any]], found: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """What some work makes on CPUs and on a fake CUDA device, and what ditmesh waited for there.

    Args:
        work: gets the device, whose looks it may clear; its result is read at the end.
        found: see `fake_device`.
    """
    assert unavailable() is None
    made: list[dict[str, Tensor]] = []
    looks: dict[str, int] = {}
    for context in (nullcontext(), fake_device(found)):
        with context as device:
            results = work(device)
            if device is not None:
                looks = ours(device.looks)
                results = {key: device.values(one) if isinstance(one, Tensor) else one for key, one in results.items()}
            made.append({key: torch.as_tensor(one).clone() for key, one in results.items()})
    return made[0], made[1], looks


def pipeline(family: str) -> tuple[Any, Callable[[], dict[str, Any]], str]:
    """A pipeline with models of its own, what makes the arguments of its call, and where its result is."""
    if family in pipelines.MAKERS:
        pipe, result, arguments = pipelines.MAKERS[family](), "images", pipelines.arguments
    else:
        made = more_pipelines.FAMILIES[family]
        pipe, result, arguments = made.make(), made.result, more_pipelines.arguments
    models = {name: copy.deepcopy(one) for name, one in pipe.components.items() if isinstance(one, nn.Module)}
    pipe.register_modules(**models)
    pipe.set_progress_bar_config(disable=True)
    return pipe, partial(arguments, family, [1, 2], steps=STEPS), result


def planted() -> dict[str, int]:
    """What a request on one rank sees of a host wait of ditmesh in every attention."""
    # As if it stood in ditmesh.
    fault = eval(compile("lambda x: x.sum().item()", str(OURS / "made_up.py"), "eval"))
    attend = SequenceParallel.attend

    def faulty(self: SequenceParallel, q: Tensor, *others: Any) -> Tensor:
        if on_device(q):
            fault(q)
        return attend(self, q, *others)

    with mock.patch.object(SequenceParallel, "attend", faulty):
        return request("sd3", {"ring": 2}).steady


@torch.no_grad()
def request(family: str, config: dict[str, Any]) -> OnCuda:
    """One request of a family of pipelines on a CPU and on a fake CUDA device. On every rank of the configuration."""
    config = {**config, "shared_memory": False}
    pipe, call, result = pipeline(family)
    with ditmesh.parallelized(pipe, config):
        truth = torch.as_tensor(getattr(pipe(**call()), result))
    marks: list[int] = []
    with fake_device() as device:
        for model in pipe.components.values():
            if isinstance(model, nn.Module):
                model.to(KIND)
        arguments = tree_map_only(Tensor, lambda tensor: tensor.to(KIND), call())
        # Generators of the device, which draw the numbers of those of CPUs.
        seeds = [one.initial_seed() for one in arguments["generator"]]
        arguments["generator"] = [torch.Generator(KIND).manual_seed(seed) for seed in seeds]
        with ditmesh.parallelized(pipe, config):
            scheduler = type(pipe.scheduler)
            step = scheduler.step

            def stepped(*args: Any, **kwargs: Any) -> Any:
                done = step(*args, **kwargs)
                marks.append(len(device.looks))
                return done

            with mock.patch.object(scheduler, "step", stepped):
                drawn = getattr(pipe(**arguments), result)
        value = device.values(drawn).clone() if isinstance(drawn, Tensor) else torch.as_tensor(drawn)

    return OnCuda(
        error=float((value.float() - truth.float()).abs().max() / truth.float().abs().max()),
        steady=ours(device.looks[marks[-2] : marks[-1]]),
        after=ours(device.looks[marks[-1] :]),
    )


def _moved(value: Any, known: dict[int, Tensor]) -> Any:
    """Arguments on ``cuda``: what was one tensor stays one."""
    return tree_map_only(Tensor, lambda one: known.setdefault(id(one), one.detach().to(KIND)), value)


def ours(looks: list[Sync]) -> dict[str, int]:
    """What ditmesh waits for, by place and operation."""
    return dict(Counter(f"{one.place} {one.operation}" for one in looks if one.owner == "ditmesh"))


def alone(name: str, config: dict[str, Any], rank: int, steps: int) -> dict[str, int] | str:
    """A rank of a configuration in this process, for which no other rank has to be there.

    What the host would have waited for in the last of some steps, by place and operation; or why ditmesh refuses this.
    """
    model, given = copy.deepcopy(tiny(name)), inputs(name, RAGGED)
    calls = list(moving(name, RAGGED, steps)) if "hidden_states" in given else [given] * steps
    with one_of(ParallelConfig(**config).world_size, rank), fake_device() as device, torch.no_grad():
        model.to(KIND)
        calls = _moved(calls, {})
        try:
            with ditmesh.parallelized(model, {**config, "shared_memory": False}):
                engine = ditmesh.engine_of(model)
                engine.begin_request(steps)
                for call in calls:
                    device.looks.clear()
                    engine.clock.advance()
                    model(**call)
                looks = ours(device.looks)
                engine.end_request()
        except (ditmesh.InputError, ditmesh.ConfigError) as error:
            return f"{type(error).__name__}: {error}"
    return looks


def summed_late(pause: float = 0.3) -> list[float]:
    """Sums over ranks, of which the second comes later: by ditmesh's gradients, and by torch's function."""
    rank, found = dist.get_rank(), []
    with fake_device() as device:
        for owner in (averaging.dist, dist):
            own = torch.full((4,), 1.0 + rank, device=KIND)
            time.sleep(pause * rank)
            work = owner.all_reduce(own, async_op=True)
            work.wait()
            found.append(float(device.values(own).clone()[0]))
    return found


def trained(name: str, config: dict[str, Any], again: bool) -> tuple[float, str, dict[str, int]]:
    """A training step on CPUs and on fake CUDA devices, whose backward runs in autograd's thread of the device.

    The worst relative error of a gradient, whose it is, and what the host waits for in a second step; ``again``: with
    activation checkpointing.
    """

    def steps(device: FakeDevice | None) -> dict[str, Any]:
        model = copy.deepcopy(tiny(name))
        if again:
            model.enable_gradient_checkpointing()
        size = sizes(name)["B=2 ragged"]
        arguments = {key: gradients.cast(value, torch.float32) for key, value in inputs(name, size).items()}
        if device is not None:
            model.to(KIND)
            arguments = _moved(arguments, {})
        with ditmesh.parallelized(model, {**config, "shared_memory": False}):
            for _ in range(2):
                if device is not None:
                    device.looks.clear()
                model.zero_grad(set_to_none=True)
                output = model(**arguments)[0]
                (output.square().mean() + output.mean()).backward()
                reduce_gradients(model, ditmesh.engine_of(model).mesh)
            return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    truth, values, looks = both(steps)
    return (*gradients.error(values, truth), looks)


def training_run(folder: str, config: dict[str, Any]) -> tuple[list[float], list[float], dict[str, int]]:
    """Two steps of a `Trainer` with a data set's folder, on CPUs and on fake CUDA devices.

    Both losses, and what the host waits for in the last step, by owner, file and operation.
    """
    assert unavailable() is None
    losses, looks = [], Counter()
    optimizer_step = Trainer._optimizer_step

    def moved(pipe: Any, *_: Any, **__: Any) -> Any:
        for one in pipe.components.values():
            if isinstance(one, nn.Module):
                one.to(KIND)
        return pipe

    for on_cuda in (False, True):
        out = Path(folder, f"out-{on_cuda}")
        # What DistributedDataParallel does in C++ knows no fake device.
        made = configured(settings(Path(folder), out, max_train_steps=2, sharding="none", **config))
        pipe = DiffusionPipeline.from_pretrained(find(made.pretrained_model_name_or_path))
        with fake_device() if on_cuda else nullcontext() as device, ExitStack() as stack:
            # To observe a pipeline is to look at values, which fake tensors do not have.
            stack.enter_context(mock.patch("ditmesh.train.trainer.ObservedFamily", family_by_hand))
            if device is not None:
                stack.enter_context(mock.patch.object(DiffusionPipeline, "to", moved))

            def step(self: Trainer, *given: Any, device: Any = device) -> Any:
                if device is not None:
                    device.looks.clear()
                done = optimizer_step(self, *given)
                if device is not None:
                    looks.clear()
                    looks.update(f"{x.owner} {x.place.partition(':')[0]} {x.operation}" for x in device.looks)
                return done

            stack.enter_context(mock.patch.object(Trainer, "_optimizer_step", step))
            trainer = stack.enter_context(Trainer(made, pipe, KIND if on_cuda else "cpu", timeout=100.0))
            losses.append(list(trainer.run().losses.values()))
    return losses[0], losses[1], dict(looks)


def whole_run(given: dict[str, Any]) -> tuple[dict[int, float], list[str], list[str]]:
    """A run of `train` on fake CUDA devices: losses by step, why checkpoints were not written, and files written."""
    losses: dict[int, float] = {}

    def report(message: Any) -> None:
        if isinstance(message, Progress):
            losses[message.step] = message.loss

    config = configured(given)
    with ExitStack() as stack:
        # Buffers that a text encoder fills in have no values on a fake device; nor has what a pipeline is observed by.
        pipe = run._read_pipeline(config, math.inf)
        stack.enter_context(mock.patch.object(run, "_read_pipeline", return_value=pipe))
        stack.enter_context(mock.patch("ditmesh.train.trainer.ObservedFamily", family_by_hand))
        stack.enter_context(fake_device(found=True))
        stack.enter_context(mock.patch.object(run, "device_of_rank", return_value=torch.device(KIND)))
        unsaved = run.train(config, report=report, check_memory=False)["unsaved"]
    out = Path(given["output_dir"])
    return losses, unsaved, sorted(file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file())

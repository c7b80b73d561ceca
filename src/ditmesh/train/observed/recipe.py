"""What training must know of a pipeline, derived from runs of it, and the check that no wrong recipe passes.

A pipeline's loop shows everything that trainers write down for a model by hand: how latents are packed and scaled,
what the transformer calls the time, which part of its result is the prediction, and with which sign. It is derived with
stand-ins (see `maps` and `watch`), and then tried in the pipeline's own loop: with the *target* of training in the
place of every result of the transformer, the loop must end in the latents that the target leads to. With a wrong sign,
scale, packing or time it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ..objective import NoiseTables
from .maps import Fills, NumberMap
from .watch import PipelineWatcher, Watched, WatchedStep, replaced, tensors_in, values_in

# How far from the chosen latents the pipeline's loop may end, relative to the largest: solvers of higher order, and
# schedulers with whole timesteps, are off by some thousandths. Planted errors are off by a tenth and more.
MOST_OFF = 0.02
# Of affine times.
TIME_TOLERANCE = 1e-3


@dataclass(frozen=True)
class TimeArgument:
    """An argument of the transformer that is the time: ``scale * t + shift`` of the scheduler's timestep ``t``."""

    path: str
    scale: float
    shift: float

    def of(self, timesteps: Tensor) -> Tensor:
        """The transformer's time."""
        return timesteps * self.scale + self.shift

    def describe(self) -> str:
        """It in words, such as ``timestep = t / 1000``."""
        scale = {1.0: "t", 1e-3: "t / 1000", -1e-3: "-t / 1000", -1.0: "-t"}.get(self.scale, f"{self.scale:g} t")
        text = scale if not self.shift else f"{self.shift:g} {'-' if scale[0] == '-' else '+'} {scale.lstrip('-')}"
        return f"{self.path} = {text}"


@dataclass(frozen=True)
class Recipe:
    """How one size of latents of a pipeline is trained.

    Attributes:
        times: arguments that are the time; at least one.
        noisy: path of the argument that holds the sampler's sample.
        into: from a sample to that argument, of a call for one.
        prediction: from the transformer's result to what the scheduler is given, both for one sample.
        latents: from a sample to what the autoencoder decodes.
        back: the inverse of ``latents``.
        arguments: of the first call.
        first: the first step, with what the transformer computed for it.
        error: how far from the chosen latents the loop ended, relative to the largest; NaN: not tried.
    """

    times: tuple[TimeArgument, ...]
    noisy: str
    into: NumberMap
    prediction: NumberMap
    latents: NumberMap
    back: NumberMap
    arguments: Mapping[str, Any] = field(repr=False)
    first: WatchedStep = field(repr=False)
    error: float = float("nan")

    def on(self, device: torch.device) -> Recipe:
        """The recipe with its tensors on a device."""
        return replace(
            self,
            into=self.into.on(device),
            prediction=self.prediction.on(device),
            latents=self.latents.on(device),
            back=self.back.on(device),
            arguments=replaced(self.arguments, {path: one.to(device) for path, one in tensors_in(self.arguments)}),
        )

    def describe(self) -> dict[str, str]:
        """It in words, by what each is about."""
        return {
            "time": ", ".join(time.describe() for time in self.times),
            "input": f"{self.noisy}: {self.into.describe()}",
            "prediction": self.prediction.describe(),
            "latents": self.latents.describe(),
            "round trip": f"off by {self.error:.1e}",
        }


def derive(watcher: PipelineWatcher, request: Mapping[str, Any]) -> Recipe:
    """Read a recipe off a pipeline's own loop; not tried yet, see `round_trip`.

    Args:
        watcher: of the pipeline.
        request: arguments of its call for one image or video, without guidance.

    Raises:
        ConfigError: one sentence that says what of the pipeline is of no known form.
    """
    watcher.forget()
    base = watcher.run({**request, "num_inference_steps": 3})
    shape, result = _checked(base, watcher)
    sample_fills, result_fills = Fills(shape), Fills(result)
    steps = max(len(sample_fills), len(result_fills)) + 2
    request = {**request, "num_inference_steps": steps}
    plain = watcher.run(request)
    _checked(plain, watcher)
    prediction = _prediction(watcher, request, result_fills)
    noisy, into = _input(watcher, request, sample_fills, plain)
    times = _times(plain, noisy)
    last = len(plain.steps) - 1
    decoded = []
    for fill in sample_fills.values:
        seen = watcher.run(request, samples=lambda step, fill=fill: fill if step == last else None).decoded
        assert seen is not None
        decoded.append(seen[0])
    latents = sample_fills.map_of(decoded, "what the autoencoder decodes")
    if not latents.covers:
        raise ConfigError("the autoencoder decodes not every number of the sampler's last sample exactly once")
    return Recipe(times, noisy, into, prediction, latents, latents.inverse(), base.calls[0].arguments, base.steps[0])


def round_trip(
    watcher: PipelineWatcher, request: Mapping[str, Any], recipe: Recipe, tables: NoiseTables, steps: int = 4
) -> float:
    """Run the pipeline's loop with the target of training in the place of every result of the transformer.

    Args:
        watcher, request: as for `derive`.
        recipe: what is tried.
        tables: noise levels and target of training.

    Returns:
        How far from the path that training takes to the chosen latents it is at most, and from them at the decoder,
        relative to the largest number there.
    """
    chosen = torch.randn(recipe.latents.source, generator=torch.Generator().manual_seed(1))
    back, time = recipe.into.inverse(), recipe.times[0]
    noise, worst = torch.empty(0), 0.0

    def target(call: int, arguments: Mapping[str, Any]) -> Tensor:
        nonlocal noise, worst
        values = dict(values_in(arguments))
        noisy = back(values[recipe.noisy].float().cpu()[None])[0]
        moment = (float(torch.as_tensor(values[time.path]).flatten()[0]) - time.shift) / time.scale
        if not call:
            # The loop begins with noise; where that is not all, it is what the chosen latents leave of it.
            noise = tables.noise_of(noisy, chosen, moment)
        path = tables.noisy_of(chosen, noise, moment)
        worst = max(worst, _off(noisy, path))
        wanted = tables.target_of(chosen, noise, moment)
        full = torch.zeros(recipe.prediction.source).flatten()
        map_ = recipe.prediction
        full[map_.index.flatten()] = ((wanted - map_.base) / map_.scale).flatten()
        return full.view(recipe.prediction.source)

    seen = watcher.run({**request, "num_inference_steps": steps}, results=target)
    assert seen.decoded is not None
    return max(worst, _off(seen.decoded[0].float().cpu(), recipe.latents(chosen[None])[0]))


def _off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    off = float((found - wanted).abs().max() / wanted.abs().max())
    return off if off == off else float("inf")


def _checked(seen: Watched, watcher: PipelineWatcher) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a sample and of a result, of a run that training can follow."""
    name = type(watcher.model).__name__
    if not seen.calls:
        raise ConfigError(f"the pipeline calls no {name}")
    if not seen.steps:
        raise ConfigError("the pipeline's scheduler takes no step")
    if seen.decoded is None:
        raise ConfigError("no autoencoder decodes what the loop ends in")
    if len(seen.decoded) != 1:
        raise ConfigError(f"the autoencoder decodes {len(seen.decoded)} latents for one sample")
    if [step.call for step in seen.steps] != list(range(len(seen.calls))):
        per_step = len(seen.calls) / len(seen.steps)
        raise ConfigError(f"{name} is called {per_step:g} times a step, also without guidance")
    return tuple(seen.steps[0].sample.shape), tuple(seen.calls[0].result.shape)


def _answers(
    fills: Fills, ask: Callable[[int], tuple[Watched, int]], take: Callable[[Watched, int], Tensor]
) -> list[Tensor]:
    """What has come of every fill; a run that has fewer steps than there are fills is followed by another one.

    Args:
        ask: runs with the fills from a number on; how many were used.
        take: what has come of the fill of a number, counted from the first of the run.
    """
    found: list[Tensor] = []
    while len(found) < len(fills):
        seen, used = ask(len(found))
        if used < 1:
            raise ConfigError("the loop has a single step")
        found += [take(seen, number) for number in range(min(used, len(fills) - len(found)))]
    return found


def _prediction(watcher: PipelineWatcher, request: Mapping[str, Any], fills: Fills) -> NumberMap:
    """From the transformer's result to what the scheduler is given."""

    def ask(start: int) -> tuple[Watched, int]:
        values = fills.values[start:]
        seen = watcher.run(request, results=lambda call, _: values[min(call, len(values) - 1)])
        return seen, len(seen.steps)

    found = fills.map_of(
        _answers(fills, ask, lambda seen, number: seen.steps[number].output), "what the scheduler is given"
    )
    if found.base.abs().max() > 1e-4 * found.scale.abs().max():
        raise ConfigError("what the scheduler is given is not the transformer's result alone")
    found = found.without_base()
    if not bool((found.scale != 0).all()) or found.index.unique().numel() != found.index.numel():
        raise ConfigError("a part of what the scheduler is given is not the transformer's")
    return found


def _input(watcher: PipelineWatcher, request: Mapping[str, Any], fills: Fills, plain: Watched) -> tuple[str, NumberMap]:
    """The argument that holds the sample, and how."""

    def ask(start: int) -> tuple[Watched, int]:
        values = fills.values[start:]
        seen = watcher.run(request, samples=lambda step: values[min(step, len(values) - 1)])
        return seen, len(seen.calls) - 1

    runs: list[tuple[Watched, int]] = []
    _answers(fills, lambda start: runs.append(ask(start)) or runs[-1], lambda seen, number: torch.empty(0))
    first, before = dict(tensors_in(runs[0][0].calls[1].arguments)), dict(tensors_in(plain.calls[1].arguments))
    depends = [
        path
        for path, value in first.items()
        if path in before and (value.shape != before[path].shape or not torch.equal(value, before[path]))
    ]
    if not depends:
        raise ConfigError("no argument of the transformer holds the sampler's sample")
    if len(depends) > 1:
        raise ConfigError(f"several arguments depend on the sample ({', '.join(depends)})")
    (path,) = depends
    answers = [
        dict(tensors_in(seen.calls[number + 1].arguments))[path] for seen, used in runs for number in range(used)
    ][: len(fills)]
    found = fills.map_of(answers, f"{path} of the transformer")
    if not found.covers:
        raise ConfigError(f"{path} of the transformer holds not every number of the sampler's sample exactly once")
    return path, found


def _times(seen: Watched, noisy: str) -> tuple[TimeArgument, ...]:
    """Arguments that change from step to step beside the sample: all must be times."""
    every = [dict(values_in(call.arguments)) for call in seen.calls]
    moments = np.array([step.timestep for step in seen.steps])
    times = []
    for path in every[0]:
        values = [one.get(path) for one in every]
        if path == noisy or _same(values):
            continue
        if not all(isinstance(value, (Tensor, float, int)) for value in values):
            raise ConfigError(f"{path} of the transformer changes from step to step, and is no number")
        rows = [torch.as_tensor(value).double().flatten().cpu() for value in values]
        if any(not len(row) or bool((row != row[0]).any()) for row in rows):
            raise ConfigError(f"{path} of the transformer changes from step to step, and is not one number a call")
        found = np.array([float(row[0]) for row in rows])
        scale, shift = np.polyfit(moments, found, 1)
        off = np.abs(scale * moments + shift - found).max() / max(np.abs(found).max(), 1e-12)
        if off > TIME_TOLERANCE:
            raise ConfigError(f"{path} of the transformer is no straight function of the scheduler's timestep")
        scale, shift = _round(float(scale), 1e-5), _round(float(shift), 1e-3)
        times.append(TimeArgument(path, scale, shift))
    if not times:
        raise ConfigError("no argument of the transformer is the time")
    return tuple(sorted(times, key=lambda time: "time" not in time.path))


def _round(value: float, unit: float) -> float:
    """A number that has come through float32, or half precision, as it was meant."""
    near = round(round(value / unit) * unit, 9)
    return near if abs(near - value) <= max(5e-4 * abs(value), 0.3 * unit) else value


def _same(values: Sequence[Any]) -> bool:
    first, *others = values
    if isinstance(first, Tensor):
        return all(isinstance(one, Tensor) and one.shape == first.shape and torch.equal(one, first) for one in others)
    try:
        return all(bool(one == first) for one in others)
    except (RuntimeError, ValueError):
        return all(one is first for one in others)

"""A recipe for training a pipeline, derived from runs of it, and the check that no wrong recipe passes.

A pipeline's loop shows everything that trainers write down for a model by hand: how latents are packed and scaled,
what the transformer calls the time, which part of its result is the prediction, and with which sign. It is derived with
stand-ins (see `maps` and `watch`), and then tried in the pipeline's own loop: with the *target* of training in the
place of every result of the transformer, the loop must end in the latents that the target leads to. With a wrong sign,
scale, packing or time it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ..config import SECOND
from ..objective import NoiseTables
from .arguments import are_equal
from .maps import FillValues, NumberMap
from .watch import ObservedRun, PipelineWatcher, WatchedStep, replaced, sample_of, tensors_in, values_in

# The largest distance of the loop's end from the chosen latents, relative to the largest: solvers of higher order, and
# schedulers with whole timesteps, are off by some thousandths. Planted errors are off by a tenth and more.
MOST_OFF = 0.02
# Of affine times, and of those between the lines of a table.
TIME_TOLERANCE, TABLE_TOLERANCE = 1e-3, 5e-3
# The argument by which a transformer of several samples, images and sound, computes each by itself.
ISOLATE = "isolate_modalities"
# Steps of the loops that are looked at, of those in which a solver's own error is small, and of the one that shows
# every level of noise.
STEPS, FINE_STEPS, MANY_STEPS = 4, 40, 120
# The spread of the noise in the sample of a solver which adds noise of its own.
NOISE_SPREAD = (0.6, 1.6)


class SeveralBranches(ConfigError):
    """The transformer is called for several branches of guidance at once, also without guidance."""


@dataclass(frozen=True)
class TimeArgument:
    """An argument of the transformer that is the time: ``scale * t + shift`` of the scheduler's timestep ``t``.

    Attributes:
        path: of the argument.
        scale, shift: of the argument's shape, float64; where a frame or a token is given, ``scale`` is 0.
        table: timesteps, ascending, and what stands for them in ``t``'s place; None: ``t`` itself.
    """

    path: str
    scale: Tensor
    shift: Tensor
    table: tuple[np.ndarray, np.ndarray] | None = None

    def of(self, timestep: Tensor) -> Tensor:
        """The argument at a timestep, which is a number in a tensor."""
        if self.table is not None:
            timestep = timestep.new_tensor(np.interp(float(timestep), *self.table))
        return timestep * self.scale.to(timestep.device) + self.shift.to(timestep.device)

    def moment(self, value: Any) -> float:
        """The timestep of an argument."""
        place = int(self.scale.abs().argmax())
        seen = float(torch.as_tensor(value).flatten()[place])
        moment = (seen - float(self.shift.flatten()[place])) / float(self.scale.flatten()[place])
        if self.table is None:
            return moment
        times, values = self.table
        order = values.argsort()
        return float(np.interp(moment, values[order], times[order]))


@dataclass(frozen=True)
class Recipe:
    """The recipe for training one size of latents of a pipeline.

    Attributes:
        times: arguments that are the time; at least one.
        inputs: paths of the arguments that hold the sampler's sample, and from a sample to each, of a call for one.
            Numbers of them that are none of the sample's are given, such as those of a first frame.
        prediction: from the transformer's result to the scheduler's input, both for one sample.
        latents, back: from a sample to the autoencoder's input, where constants are given; and its inverse.
        arguments, first, result: of the first call, the first step, and the transformer's result there.
        error: how far from the chosen latents the loop ended, relative to the largest; NaN: not tried.
        steps: of the loop in which it is tried.
    """

    times: tuple[TimeArgument, ...]
    inputs: tuple[tuple[str, NumberMap], ...]
    prediction: NumberMap
    latents: NumberMap
    back: NumberMap
    arguments: Mapping[str, Any] = field(repr=False)
    first: WatchedStep = field(repr=False)
    result: Tensor = field(repr=False)
    error: float = float("nan")
    steps: int = STEPS

    @property
    def given(self) -> tuple[str, ...]:
        """Inputs with numbers that are not the sample's."""
        return tuple(path for path, into in self.inputs if not bool((into.scale != 0).all()))

    def on(self, device: torch.device) -> Recipe:
        """The recipe with its tensors on a device."""
        return replace(
            self,
            inputs=tuple((path, into.on(device)) for path, into in self.inputs),
            prediction=self.prediction.on(device),
            latents=self.latents.on(device),
            back=self.back.on(device),
            arguments=replaced(self.arguments, {path: one.to(device) for path, one in tensors_in(self.arguments)}),
        )


def derive_recipe(watcher: PipelineWatcher, request: Mapping[str, Any]) -> Recipe:
    """Read a recipe off a pipeline's own loop, without guidance; not tried yet, see `round_trip`.

    Raises `ConfigError`: one sentence that says what of the pipeline is of no known form.
    """
    watcher.forget()
    watcher.fixed.clear()
    watcher.by_parts = False
    request = {**request, "num_inference_steps": STEPS}
    plain = watcher.run(request)
    if plain.calls and not plain.steps:
        # Copies of the scheduler may step, one for every part of the sample.
        watcher.by_parts = True
        plain = watcher.run(request)
    shape, result = _checked(plain, watcher)
    samples, last = FillValues(shape), len(plain.steps) - 1
    decoded = []
    for fill in samples.values:
        seen = watcher.run(request, samples=lambda step, fill=fill: fill if step == last else None).decoded
        assert seen is not None
        decoded.append(seen[0])
    latents = samples.map_of(decoded, "the autoencoder's input", lenient=True)
    inputs = _inputs(watcher, request, samples)
    prediction = _prediction(watcher, request, FillValues(result), shape)
    counts = torch.stack([into.held for _, into in inputs]).sum(0)
    if bool((counts > 1).any()):
        raise ConfigError(f"several arguments hold the sample ({', '.join(path for path, _ in inputs)})")
    held = counts > 0
    live = latents.unique_marks & held & (prediction.scale != 0)
    if not bool(live.any()):
        raise ConfigError("no number of the sampler's sample is predicted, decoded and given to the transformer")
    first = plain.calls[0]
    tensors = dict(tensors_in(first.arguments))
    # Where nothing of the sample stands in an argument, what is given.
    only = {path: into.only(live) for path, into in inputs}
    inputs = tuple(
        (path, replace(into, base=torch.where(into.scale != 0, into.base, tensors[path].float().cpu())))
        for path, into in only.items()
    )
    prediction = replace(prediction, scale=prediction.scale * live, index=prediction.index * live)
    if prediction.index[live].unique().numel() != int(live.sum()):
        raise ConfigError("a number of the transformer's result is the prediction of two")
    latents = latents.only(live)
    # Of levels of noise that few steps do not have, such as the last ones.
    every = watcher.run({**request, "num_inference_steps": MANY_STEPS})
    _checked(every, watcher)
    for path, into in inputs:
        given, *others = (dict(tensors_in(call.arguments))[path][into.scale == 0] for call in every.calls)
        if any(not torch.equal(given, other) for other in others):
            raise ConfigError(f"{path} of the transformer holds given numbers that change from step to step")
    times, beside = _times(watcher, plain, every, [path for path, _ in inputs])
    watcher.bounds = _bounds(watcher, every)
    arguments, result = first.arguments, first.result
    if beside:
        arguments, result = _isolated(watcher, arguments, beside)
    return Recipe(times, inputs, prediction, latents, latents.inverse(), arguments, plain.steps[0], result)


def round_trip(
    watcher: PipelineWatcher,
    request: Mapping[str, Any],
    recipe: Recipe,
    tables: NoiseTables,
    renewed: bool = False,
) -> float:
    """Run the pipeline's loop with the target of training in the place of every result of the transformer.

    Args:
        tables: noise levels and target of training.
        renewed: the solver adds noise of its own in every step, so that the path is another one after each.

    Returns:
        How far from the path that training takes to the chosen latents it is at most, and from them at the decoder,
        relative to the largest number there.
    """
    live = recipe.latents.held
    chosen = torch.randn(recipe.latents.source, generator=torch.Generator().manual_seed(1)) * live
    ways = [(path, into.inverse()) for path, into in recipe.inputs]
    time = recipe.times[0]
    noise, worst = torch.empty(0), 0.0

    def target(call: int, arguments: Mapping[str, Any]) -> Tensor:
        nonlocal noise, worst
        values = dict(values_in(arguments))
        moment = time.moment(values[time.path])
        for number, (path, back) in enumerate(ways):
            noisy = back(values[path].float().cpu()[None])[0]
            if not number and (renewed or not call):
                # The loop begins with noise; where that is not all, it is what the chosen latents leave of it.
                noise = tables.noise_of(noisy, chosen, moment) * live
                spread = float(noise[live].std())
                worst = (
                    worst if not renewed or NOISE_SPREAD[0] < spread < NOISE_SPREAD[1] else max(worst, abs(spread - 1))
                )
            worst = max(worst, _off(noisy, tables.noisy_of(chosen, noise, moment) * back.scale.bool()))
        wanted = tables.target_of(chosen, noise, moment)
        full = torch.zeros(recipe.prediction.source).flatten()
        map_ = recipe.prediction
        full[map_.index[live]] = wanted[live] / map_.scale[live]
        return full.view(recipe.prediction.source)

    seen = watcher.run({**request, "num_inference_steps": recipe.steps}, results=target)
    assert seen.decoded is not None
    there = recipe.latents.scale != 0
    return max(worst, _off(seen.decoded[0].float().cpu()[there], recipe.latents(chosen[None])[0][there]))


def _off(found: Tensor, wanted: Tensor) -> float:
    off = float((found - wanted).abs().max() / wanted.abs().max())
    return off if off == off else float("inf")


def _checked(seen: ObservedRun, watcher: PipelineWatcher) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a sample and of a result, of a run that training can follow."""
    name = type(watcher.model).__name__
    if not seen.calls:
        raise ConfigError(f"the pipeline calls no {name}")
    if not seen.steps:
        raise ConfigError("the pipeline's scheduler takes no step")
    if seen.decoded is None:
        raise ConfigError("no autoencoder decodes the result of the loop")
    if len(seen.decoded) != 1:
        raise ConfigError(f"the autoencoder decodes {len(seen.decoded)} latents for one sample")
    if [step.call for step in seen.steps] != list(range(len(seen.calls))):
        per_step = len(seen.calls) / len(seen.steps)
        raise ConfigError(f"{name} is called {per_step:g} times a step, also without guidance")
    return tuple(seen.steps[0].sample.shape), tuple(seen.calls[0].result.shape)


def _prediction(
    watcher: PipelineWatcher, request: Mapping[str, Any], fills: FillValues, shape: tuple[int, ...]
) -> NumberMap:
    """The map from the transformer's result to the scheduler's input; 0 where that is something else."""
    answers = []
    for fill in fills.values:
        # A sample of zeros: some schedulers are given a part of it.
        seen = watcher.run(request, lambda call, _, fill=fill: fill, lambda step: torch.zeros(shape), steps=2)
        if len(seen.steps) < 2:
            raise ConfigError("the loop has a single step")
        answers.append(seen.steps[1].output)
    if answers[0].shape != shape:
        raise ConfigError(f"the scheduler is given {tuple(answers[0].shape)} for a sample of {shape}")
    number_map = fills.map_of(answers, "the scheduler's input", lenient=True)
    # Numbers that are not the transformer's result alone are left out.
    clean = number_map.base.abs() <= 1e-4 * number_map.scale.abs().max()
    scale = number_map.scale * clean
    if watcher.levels is not None:
        # Its size is the sampler's; what the transformer predicts is of the size of latents.
        sizes = scale[scale != 0].abs()
        if not sizes.numel() or float(sizes.max() / sizes.min()) > 1 + TIME_TOLERANCE:
            raise ConfigError("the scheduler's input is not one multiple of the transformer's result")
        scale = scale.sign() * watcher.levels.sign
    return replace(number_map.without_base(), scale=scale, index=number_map.index * clean)


def _inputs(
    watcher: PipelineWatcher, request: Mapping[str, Any], fills: FillValues
) -> tuple[tuple[str, NumberMap], ...]:
    """The arguments that hold the sample, and how."""
    answers = []
    for fill in fills.values:
        seen = watcher.run(request, samples=lambda step, fill=fill: fill, calls=2)
        if len(seen.calls) < 2:
            raise ConfigError("the loop has a single step")
        answers.append(dict(tensors_in(seen.calls[1].arguments)))
    zeros, noise = answers[0], answers[-1]
    depends = [path for path in zeros if path not in noise or not are_equal(zeros[path], noise[path])]
    if not depends:
        raise ConfigError("no argument of the transformer holds the sampler's sample")
    inputs = []
    for path in depends:
        try:
            if any(
                answer.get(path, zeros[path]).shape != zeros[path].shape or path not in answer for answer in answers
            ):
                raise ConfigError(f"{path} of the transformer has another shape for another sample")
            into = fills.map_of([answer[path] for answer in answers], f"{path} of the transformer")
        except ConfigError as error:
            if len(depends) == 1:
                raise
            raise ConfigError(f"several arguments depend on the sample ({', '.join(depends)}): {error}") from None
        if bool((into.held & ~into.unique_marks).any()):
            raise SeveralBranches(f"{path} of the transformer holds numbers of the sampler's sample more than once")
        inputs.append((path, into))
    return tuple(sorted(inputs, key=lambda pair: -int(pair[1].held.sum())))


def _times(
    watcher: PipelineWatcher, few: ObservedRun, many: ObservedRun, inputs: Sequence[str]
) -> tuple[tuple[TimeArgument, ...], list[str]]:
    """Arguments that change from step to step beside the sample: times, and what the model can be kept apart from."""
    every = [dict(values_in(call.arguments)) for call in many.calls]
    moments = np.array([step.timestep for step in many.steps])
    times: list[TimeArgument] = []
    beside: list[str] = []
    for path in every[0]:
        values = [one.get(path) for one in every]
        if path in inputs or _same(values):
            continue
        if not all(isinstance(value, (Tensor, float, int)) for value in values):
            raise ConfigError(f"{path} of the transformer changes from step to step, and is no number")
        if len({torch.as_tensor(value).shape for value in values}) != 1:
            raise ConfigError(f"{path} of the transformer changes its shape from step to step")
        argument = _affine(path, values, moments)
        if argument is None and watcher.levels is not None:
            argument = _tabled(path, values, moments, few)
        if argument is None and ISOLATE in every[0]:
            beside.append(path)
            continue
        if argument is None:
            raise ConfigError(
                f"{path} of the transformer is no straight function of the scheduler's timestep, number by number"
            )
        times.append(argument)
    if not times:
        raise ConfigError("no argument of the transformer is the time")
    return tuple(sorted(times, key=lambda time: "time" not in time.path)), beside


def _bounds(watcher: PipelineWatcher, seen: ObservedRun) -> tuple[float, float] | None:
    """The timesteps at which the one of two transformers that is trained is called; None: there is one."""
    if getattr(watcher.pipe, SECOND, None) is None:
        return None
    moments: tuple[list[float], list[float]] = ([], [])
    for step, call in zip(seen.steps, seen.calls, strict=True):
        moments[call.is_second].append(step.timestep)
    first, second = moments
    if not first or not second:
        raise ConfigError(f"there is a second transformer, and all of {MANY_STEPS} steps use one of the two")
    if min(first) <= max(second):
        raise ConfigError("there is a second transformer, which does not take over at low noise once and for all")
    # Training's timesteps lie closer than the loop's.
    share = watcher.pipe.config.get("boundary_ratio")
    count = watcher.pipe.scheduler.config.num_train_timesteps
    boundary = min(first) if share is None else float(share) * count
    if not max(second) < boundary <= min(first):
        raise ConfigError(f"boundary_ratio={share} is not where the second transformer takes over")
    # At the boundary it is the first one's turn.
    return (boundary, float(count)) if watcher.denoiser != SECOND else (0.0, math.nextafter(boundary, 0.0))


def _isolated(
    watcher: PipelineWatcher, arguments: Mapping[str, Any], beside: Sequence[str]
) -> tuple[Mapping[str, Any], Tensor]:
    """Arguments of a call in which other samples, such as of sound, have no part, and what comes of it."""
    watcher.fixed[ISOLATE] = True
    alone = {**arguments, **watcher.fixed}
    others = replaced(alone, {path: torch.randn_like(dict(tensors_in(arguments))[path]) for path in beside})
    with torch.no_grad():
        first, second = (sample_of(watcher.model(**one))[0] for one in (alone, others))
    if not torch.equal(first, second):
        raise ConfigError(
            f"{', '.join(beside)} of the transformer is another sample, which cannot be separated from it"
        )
    return alone, first


def _affine(path: str, values: Sequence[Any], moments: np.ndarray) -> TimeArgument | None:
    """A time of which every number is a straight function of the timestep, or the same always."""
    rows = torch.stack([torch.as_tensor(value).double().cpu() for value in values])
    columns = rows.flatten(1).cpu().numpy()
    if not columns.shape[1]:
        return None
    scale, shift = np.polyfit(moments, columns, 1)
    off = np.abs(np.outer(moments, scale) + shift - columns).max() / max(np.abs(columns).max(), 1e-12)
    if off > TIME_TOLERANCE:
        return None
    same = (columns == columns[:1]).all(0)
    scales = [0.0 if fixed else _round(float(number), 1e-5) for number, fixed in zip(scale, same, strict=True)]
    shifts = [
        float(value) if fixed else _round(float(number), 1e-3)
        for number, value, fixed in zip(shift, columns[0], same, strict=True)
    ]
    moving = [pair for pair, fixed in zip(zip(scales, shifts, strict=True), same, strict=True) if not fixed]
    if any(
        abs(number - other) > 1e-6 * abs(other) + 1e-9
        for pair in moving
        for number, other in zip(pair, moving[0], strict=True)
    ):
        # Numbers that move on straight lines of their own, such as a second sample, are no time.
        return None
    shape = rows.shape[1:]
    return TimeArgument(
        path,
        torch.tensor(scales, dtype=torch.float64).view(shape),
        torch.tensor(shifts, dtype=torch.float64).view(shape),
    )


def _tabled(path: str, values: Sequence[Any], times: np.ndarray, few: ObservedRun) -> TimeArgument | None:
    """A time that is one function of the timestep, by a table of it; in a loop of few steps it must hold."""
    rows = torch.stack([torch.as_tensor(value).double().cpu() for value in values])
    columns = rows.flatten(1).cpu().numpy()
    if (columns != columns[:, :1]).any():
        return None
    order = times.argsort()
    ones = torch.ones(rows.shape[1:], dtype=torch.float64)
    argument = TimeArgument(path, ones, torch.zeros_like(ones), (times[order], columns[order, 0]))
    largest = np.abs(columns).max()
    for step, call in zip(few.steps, few.calls, strict=True):
        seen = float(torch.as_tensor(dict(values_in(call.arguments))[path]).flatten()[0])
        held = float(argument.of(torch.tensor(step.timestep)).flatten()[0])
        if abs(held - seen) > TABLE_TOLERANCE * largest:
            return None
    return argument


def _round(value: float, unit: float) -> float:
    """A number that has come through float32, or half precision, as it was meant."""
    near = round(round(value / unit) * unit, 9)
    return near if abs(near - value) <= max(5e-4 * abs(value), 0.3 * unit) else value


def _same(values: Sequence[Any]) -> bool:
    first, *others = values
    if isinstance(first, Tensor):
        return all(
            isinstance(value, Tensor) and value.shape == first.shape and torch.equal(value, first) for value in others
        )
    try:
        return all(bool(value == first) for value in others)
    except (RuntimeError, ValueError):
        return all(value is first for value in others)

"""Training of pipelines without an adapter, by what runs of the pipeline have shown."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..config import TrainConfig
from ..families import Conditions, TextFamily, rows_of, stacked
from ..objective import NoiseTables
from .recipe import MOST_OFF, Recipe, derive, round_trip
from .watch import PipelineWatcher, replaced, sample_of, values_in

# Arguments of pipelines that switch guidance off: the value that leaves one branch, by what is tried in turn.
GUIDANCE = ("guidance_scale", "true_cfg_scale")
WITHOUT_GUIDANCE = (1.0, 0.0)
# Captions of unlike length: what they change in the transformer's arguments is a condition.
CAPTIONS = ("", "a red fox")
# Solvers that add noise of their own, and the one without it that samples from the same levels.
STOCHASTIC = {"DDPMScheduler": "DDIMScheduler", "CogVideoXDPMScheduler": "CogVideoXDDIMScheduler"}


def check_observable(kind: type, second: bool, config: TrainConfig) -> Mapping[str, inspect.Parameter]:
    """Refuse a pipeline that cannot be trained without an adapter, by its class; the parameters of its call.

    Args:
        kind: the pipeline's class.
        second: whether it has a second transformer.
        config: the run.

    Raises:
        ConfigError: it takes no prompt alone, or a setting needs an adapter.
    """
    name, parameters = kind.__name__, inspect.signature(kind.__call__).parameters
    if "prompt" not in parameters:
        raise ConfigError(f"{name} cannot be trained: it takes no prompt")
    if second:
        raise ConfigError(
            f"{name} cannot be trained: a second transformer takes over at low noise; train one at a time, as a "
            "pipeline without the other"
        )
    if config.token_share < 1:
        raise ConfigError(f"token_share: the tokens of {name} are not known in training; leave it out")
    if trained := [one for one in config.train_modules if one != "transformer"]:
        raise ConfigError(
            f"train_modules: {name} is trained without an adapter, which has no gradients of {', '.join(trained)}; "
            "leave it out"
        )
    return parameters


class ObservedFamily(TextFamily):
    """How a pipeline's transformer is called, seen by running the pipeline with stand-ins.

    Args:
        pipe: the pipeline; it takes ``prompt``, and everything else by itself.
        config: the objective; guidance of distilled models is 1.

    Attributes:
        videos: latents are those of videos, (B, C, F, H, W).
        recipes: by the shape of a sample's latents.
        captions: paths of the transformer's arguments that depend on the caption.

    Raises:
        ConfigError: it takes no prompt alone, or has no autoencoder.
    """

    def __init__(self, pipe: Any, config: TrainConfig) -> None:
        self.name = type(pipe).__name__
        second = getattr(pipe, "transformer_2", None) is not None
        parameters = check_observable(type(pipe), second, config)
        self._parameters = set(parameters)
        self.videos = "num_frames" in parameters
        self.recipes: dict[tuple[int, ...], Recipe] = {}
        self._watcher = PipelineWatcher(pipe)
        self._config = config
        self._guidance = WITHOUT_GUIDANCE[0]
        self.captions: list[str] = []
        # The size at which captions are encoded.
        self._size: tuple[int, int] = (0, 0)
        self._on_device: dict[tuple[tuple[int, ...], torch.device], Recipe] = {}
        # By shape of latents the arguments of a call for two samples; None: it is called for one at a time.
        self._two: dict[tuple[int, ...], Mapping[str, Any] | None] = {}

    def _request(self, said: Sequence[str], size: tuple[int, int], length: int | None = None) -> dict[str, Any]:
        """Arguments of the pipeline's call for some captions."""
        wanted: dict[str, Any] = {
            "prompt": list(said) if len(said) > 1 else said[0],
            "height": size[0],
            "width": size[1],
            "num_inference_steps": 4,
            "output_type": "pt",
            "num_frames": self._config.num_frames,
            "max_sequence_length": length,
            "use_resolution_binning": False,
            **dict.fromkeys(GUIDANCE, self._guidance),
        }
        return {name: value for name, value in wanted.items() if name in self._parameters and value is not None}

    # --- before the first step ------------------------------------------------------------------------------

    def check_size(self, pipe: Any, size: tuple[int, int]) -> None:
        """Observe the pipeline at a size of training, and try what was seen.

        Raises:
            ConfigError: one sentence that says what cannot be derived, or that what was derived is wrong.
        """
        text = f"{self.name} at {size[0]} x {size[1]} pixels"
        error: ConfigError | None = None
        known = bool(self.recipes)
        for guidance in (self._guidance,) if known else WITHOUT_GUIDANCE:
            self._guidance = guidance
            try:
                recipe = self._observed(pipe, size)
                break
            except ConfigError as caught:
                error = error or caught
            except Exception as caught:  # Of the pipeline's own.
                error = error or ConfigError(f"its call fails ({type(caught).__name__}: {caught})")
        else:
            raise ConfigError(f"{text} cannot be trained: {error}") from error
        if recipe.error > MOST_OFF:
            raise ConfigError(
                f"{text} cannot be trained: with the target of training in the place of the transformer's results, its "
                f"own loop ends {recipe.error:.2g} (of the largest latent) from the latents of the target, so that "
                "something of it is not understood"
            )
        encoded = self._latents_of(pipe, size)
        if encoded != recipe.latents.shape:
            raise ConfigError(
                f"{text}: its autoencoder makes latents of {encoded} of such an image, and its loop ends in those of "
                f"{recipe.latents.shape}; change resolution or aspect_ratio_buckets"
            )

    def _observed(self, pipe: Any, size: tuple[int, int]) -> Recipe:
        length = self._config.max_sequence_length
        lengths = length if isinstance(length, tuple) else (length,)
        request = self._request(CAPTIONS[1:], size, lengths[0])
        recipe = derive(self._watcher, request)
        recipe = replace(recipe, error=self._tried(pipe, request, recipe))
        one = recipe.arguments
        other = self._watcher.first_call(self._request(CAPTIONS[:1], size, lengths[0]))
        fixed = {recipe.noisy, *(time.path for time in recipe.times)}
        changed = [path for path in _differing(one, other) if path not in fixed]
        unknown = [path for path in changed if not _is_number(dict(values_in(one)).get(path))]
        if unknown:
            raise ConfigError(f"{', '.join(unknown)} of the transformer depends on the caption, and is no tensor")
        if not self.recipes:
            self._size, self.captions = size, changed
        elif changed != self.captions:
            raise ConfigError(
                f"other arguments depend on the caption ({', '.join(changed)}) than at {self._size[0]} x "
                f"{self._size[1]} pixels"
            )
        else:
            there = dict(values_in(self._watcher.first_call(self._request(CAPTIONS[1:], self._size, lengths[0]))))
            here = dict(values_in(one))
            both = [path for path in changed if not _equal(there.get(path), here[path])]
            if both:
                raise ConfigError(f"{', '.join(both)} of the transformer depends on the caption and the size")
        shape = recipe.latents.shape
        self.recipes[shape], self._two[shape] = recipe, None
        # Pipelines that take one prompt only are called for each sample.
        with suppress(Exception):
            two = self._watcher.first_call(self._request(CAPTIONS[1:] * 2, size, lengths[0]))
            merged([one, one], one, two)
            self._two[shape] = two
        off = self._off_first_step(pipe, recipe, lengths[0])
        if off > MOST_OFF:
            del self.recipes[shape]
            raise ConfigError(
                f"called as in training, for two images, the transformer predicts something else than in the first "
                f"step of the pipeline (by {off:.2g} of the largest number)"
            )
        return recipe

    def _off_first_step(self, pipe: Any, recipe: Recipe, length: int | None) -> float:
        """How far the prediction of training is from the pipeline's own, at its first step."""
        first, caption = recipe.first, CAPTIONS[1]
        latents = recipe.latents.moved(first.sample[None]).expand(2, *recipe.latents.shape)
        wanted = recipe.latents.moved(first.output[None].to(latents))
        times = torch.full((2,), first.timestep, dtype=torch.float64, device=latents.device)
        with torch.no_grad():
            found = self.predict(pipe, pipe.transformer, latents, times, self.encode(pipe, [caption] * 2, length))
        return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))

    def _tried(self, pipe: Any, request: Mapping[str, Any], recipe: Recipe) -> float:
        """The error of the round trip, by a solver without noise of its own."""
        import diffusers

        own = pipe.scheduler
        calm = STOCHASTIC.get(type(own).__name__)
        tables = NoiseTables(own, self._config)
        if calm is None:
            return round_trip(self._watcher, request, recipe, tables)
        pipe.scheduler = getattr(diffusers, calm).from_config(own.config)
        try:
            return round_trip(self._watcher, request, recipe, tables)
        finally:
            pipe.scheduler = own

    def _latents_of(self, pipe: Any, size: tuple[int, int]) -> tuple[int, ...]:
        frames = self._config.num_frames
        blank = torch.zeros(1, 3, *(() if frames is None else (frames,)), *size)
        moments = self.moments(pipe, blank.to(pipe.vae.device, pipe.vae.dtype))
        return (moments.shape[1] // 2, *moments.shape[2:])

    # --- what training asks of a family ---------------------------------------------------------------------

    def moments(self, pipe: Any, values: Tensor) -> Tensor:
        """(B, 2C, ...): mean and standard deviation of the latents of pictures or videos."""
        if values.dim() == 4 and _takes_frames(pipe.vae):
            values = values.unsqueeze(2)
        return super().moments(pipe, values)

    def scaled(self, pipe: Any, latents: Tensor) -> Tensor:
        """The autoencoder's latents as the loop ends in them, each number at its place in the autoencoder's form."""
        found = self._recipe(latents).latents
        return (latents - found.base.to(latents)) / found.scale.to(latents)

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        """What the captions change in the transformer's arguments."""
        rows = []
        for caption in said:
            values = dict(values_in(self._watcher.first_call(self._request([caption], self._size, length))))
            self._watcher.forget()
            rows.append({path: torch.as_tensor(values[path]) for path in self.captions})
        return stacked(rows)

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        """The prediction for latents (B, C, [F,] H, W), in the same shape."""
        recipe = self._recipe(latents)
        template = dict(values_in(recipe.arguments))
        noisy = recipe.into(recipe.back.moved(latents))
        calls = []
        for number, row in enumerate(rows_of(conditions, len(latents))):
            changes: dict[str, Any] = {path: _like(template[path], row[path]) for path in self.captions}
            changes[recipe.noisy] = noisy[number].to(template[recipe.noisy].dtype)
            for time in recipe.times:
                value = time.of(timesteps[number].double())
                changes[time.path] = _like(template[time.path], value.expand(_shape(template[time.path])))
            calls.append(replaced(recipe.arguments, changes))
        two = self._two[recipe.latents.shape]
        if len(calls) == 1 or (two is not None and len({_form(call) for call in calls}) == 1):
            results = sample_of(model(**(calls[0] if len(calls) == 1 else merged(calls, recipe.arguments, two))))
        else:
            # Captions of unlike length: a call for each.
            results = torch.cat([sample_of(model(**call)) for call in calls])
        return recipe.latents.moved(recipe.prediction(results.to(latents.dtype)))

    def _recipe(self, latents: Tensor) -> Recipe:
        """The recipe of latents (B, ...), on their device."""
        shape, device = tuple(latents.shape[1:]), latents.device
        if shape not in self.recipes:
            raise ConfigError(f"{self.name} was not observed with latents of {shape}")
        if (shape, device) not in self._on_device:
            self._on_device[shape, device] = self.recipes[shape].on(device)
        return self._on_device[shape, device]


def merged(calls: Sequence[Any], one: Any, two: Any, path: str = "") -> Any:
    """The arguments of one call for several samples, by those of a call for each.

    What a call for two samples has twice as much of is a row, or an item of a list, for every sample; what it has the
    same is all samples'.

    Args:
        calls: arguments of calls for one sample, of the same form.
        one, two: arguments of the pipeline's call for one sample and for two.

    Raises:
        ConfigError: an argument is neither.
    """
    found: Any = None
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        found = _merged_tensors(calls, one, two)
    elif isinstance(one, Mapping) and isinstance(two, Mapping) and one.keys() == two.keys():
        found = {
            key: merged([call[key] for call in calls], one[key], two[key], f"{path}.{key}".strip(".")) for key in one
        }
    elif isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        found = _merged_lists(calls, one, two, path)
    elif one is None and two is None:
        return None
    elif not isinstance(one, (Tensor, Mapping, list, tuple)) and _equal(one, two):
        found = calls[0]
    if found is None:
        raise ConfigError(f"{path} of the transformer is of another form for two images than for one")
    return found


def _merged_tensors(calls: Sequence[Tensor], one: Tensor, two: Tensor) -> Tensor | None:
    if one.shape == two.shape and all(_equal(call, calls[0]) for call in calls):
        return calls[0]
    apart = [dim for dim in range(one.dim()) if one.dim() == two.dim() and one.shape[dim] != two.shape[dim]]
    if len(apart) == 1 and two.shape[apart[0]] == 2 * one.shape[apart[0]]:
        return torch.cat(list(calls), apart[0])
    return None


def _merged_lists(calls: Sequence[Sequence[Any]], one: Sequence[Any], two: Sequence[Any], path: str) -> Any:
    kind: Any = type(one)
    if len(one) == len(two):
        every = enumerate(zip(one, two, strict=True))
        return kind([merged([call[at] for call in calls], *both, f"{path}.{at}") for at, both in every])
    if len(two) == 2 * len(one):
        return kind([item for call in calls for item in call])
    return None


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Paths of values that are not the same in two calls' arguments.

    Raises:
        ConfigError: one call has arguments that the other has not.
    """
    here, there = dict(values_in(one)), dict(values_in(other))
    if here.keys() != there.keys():
        odd = sorted(here.keys() ^ there.keys())
        raise ConfigError(f"{', '.join(odd)} of the transformer is there with some captions only")
    return [path for path, value in here.items() if not _equal(value, there[path])]


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.shape == other.shape
            and bool(torch.equal(one, other))
        )
    return type(one) is type(other) and bool(one == other)


def _is_number(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float))


def _like(template: Any, value: Tensor) -> Any:
    """A value as the pipeline passes it: of the template's type."""
    return value.to(template.dtype) if isinstance(template, Tensor) else type(template)(value.item())


def _shape(template: Any) -> tuple[int, ...]:
    return tuple(template.shape) if isinstance(template, Tensor) else ()


def _form(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (path, tuple(value.shape) if isinstance(value, Tensor) else value if _is_number(value) else None)
        for path, value in values_in(arguments)
    )


def _takes_frames(vae: Any) -> bool:
    """Whether an autoencoder is one of videos, which takes an image as a video of one frame."""
    from torch import nn

    first = next((one for one in vae.modules() if isinstance(one, (nn.Conv2d, nn.Conv3d))), None)
    return isinstance(first, nn.Conv3d)

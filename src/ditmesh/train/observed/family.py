"""Training of pipelines without an adapter, by what runs of the pipeline have shown."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.digests import tensor_digest
from ...errors import ConfigError
from ..config import TrainConfig
from ..families import Conditions, TextFamily, sample_conditions, stacked
from ..objective import NoiseTables
from .base import base_pipeline, check_alike
from .recipe import FINE_STEPS, MOST_OFF, Recipe, SeveralBranches, derive_recipe, round_trip
from .watch import PipelineWatcher, replaced, sample_of, values_in

if TYPE_CHECKING:
    from PIL.Image import Image

# Arguments of pipelines that switch guidance off: the value that leaves one branch, by what is tried in turn.
GUIDANCE = ("guidance_scale", "true_cfg_scale")
WITHOUT_GUIDANCE = (1.0, 0.0)
# Other guidance, and the value without it.
OFF: dict[str, Any] = {
    "pag_scale": 0.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_rescale": 0.0,
    "enable_temporal_reasoning": False,
    "image_cond_noise_scale": 0.0,
    # A flow map from a time to the same time is the flow.
    "use_mean_velocity": False,
}
# Captions of unlike length: what they change in the transformer's arguments is a condition.
CAPTIONS = ("", "a red fox")
# Arguments of pipelines that take an image beside the caption, the first of them that one has; and its mask.
PICTURE_ARGUMENTS = ("control_image", "image", "images", "cond_image")
MASK_ARGUMENT = "mask_image"
# Branches of guidance that pipelines may have for good.
BRANCHES = (2, 3)
# Solvers that add noise of their own, and the one without it that samples from the same levels.
STOCHASTIC = {
    "DDPMScheduler": "DDIMScheduler",
    "CogVideoXDPMScheduler": "CogVideoXDDIMScheduler",
    "EulerAncestralDiscreteScheduler": "EulerDiscreteScheduler",
}
# Those for which there is none.
RENEWED = ("CosineDPMSolverMultistepScheduler",)
# The largest distance of the first step in training from the pipeline's own, relative to the largest number: of whole
# precision, and of half.
MOST_OFF_FIRST = {torch.float32: 1e-4, torch.float64: 1e-4}


def check_observable(kind: type, config: TrainConfig) -> None:
    """Refuse a pipeline that cannot be trained without an adapter, by its class.

    Args:
        kind: the pipeline's class.

    Raises:
        ConfigError: it takes no prompt alone, or a setting needs an adapter.
    """
    name, parameters = kind.__name__, inspect.signature(kind.__call__).parameters
    if "prompt" not in parameters:
        raise ConfigError(f"{name} cannot be trained: it takes no prompt")
    if trained := [one for one in config.train_modules if one != config.denoiser]:
        raise ConfigError(
            f"train_modules: {name} is trained without an adapter, which has no gradients of {', '.join(trained)}; "
            "leave it out"
        )


class ObservedFamily(TextFamily):
    """A family that is seen by running its pipeline with stand-ins.

    Args:
        pipe: the pipeline; it takes ``prompt``, and everything else by itself.
        config: the objective; guidance of distilled models is 1.

    Attributes:
        videos: latents are those of videos, (B, C, F, H, W).
        recipes: by the shape of a sample's latents.
        captions, pictured: paths of the transformer's arguments that depend on the caption, and on an image beside it.

    Raises:
        ConfigError: it takes no prompt alone, or has no autoencoder.
    """

    def __init__(self, pipe: Any, config: TrainConfig) -> None:
        self.name = type(pipe).__name__
        check_observable(type(pipe), config)
        if getattr(pipe, config.denoiser, None) is None:
            raise ConfigError(f"train_modules: {self.name} has no {config.denoiser} here; leave it out")
        self.recipes: dict[tuple[int, ...], Recipe] = {}
        self._config = config
        self._own, self._base = pipe, base_pipeline(pipe)
        self._guidance = WITHOUT_GUIDANCE[0]
        self.captions: list[str] = []
        self.pictured: list[str] = []
        # The size at which captions are encoded.
        self._size: tuple[int, int] = (0, 0)
        self._on_device: dict[tuple[tuple[int, ...], torch.device], Recipe] = {}
        # By shape of latents the arguments of a call for two samples; None: it is called for one at a time.
        self._two: dict[tuple[int, ...], Mapping[str, Any] | None] = {}
        self._watch(self._own)

    def _watch(self, pipe: Any, picture: str | None = None) -> None:
        """Look at a pipeline: the own one or the one without its task; with an image beside the caption, or none."""
        self._parameters = set(inspect.signature(type(pipe).__call__).parameters)
        self.videos = "num_frames" in self._parameters
        self._watcher = PipelineWatcher(pipe, self._config.denoiser)
        self._picture = picture

    @property
    def scheduler(self) -> Any:
        """The scheduler with the noise levels of training."""
        levels = self._watcher.levels
        return self._watcher.pipe.scheduler if levels is None else levels.scheduler

    @property
    def reference(self) -> str | None:
        """The argument for a reference image that a data set has for each sample; None: it takes none of those."""
        return None if self.source_image is not None else self._picture

    @property
    def source_image(self) -> str | None:
        """The image of the sample itself beside its caption: ``"first frame"``, ``"hole"``; None: none."""
        if self._picture is None:
            return None
        return "first frame" if self.videos else "hole" if MASK_ARGUMENT in self._parameters else None

    @property
    def moments_of_training(self) -> tuple[float, float] | None:
        """The lowest and the highest timestep at which the trained transformer is called; None: at all."""
        return self._watcher.bounds

    @property
    def base(self) -> type | None:
        """The class of the pipeline that is trained in the own one's place; None: it is the own one."""
        return None if self._watcher.pipe is self._own else type(self._watcher.pipe)

    def _request(
        self, said: Sequence[str], size: tuple[int, int], length: int | None = None, picture: Image | None = None
    ) -> dict[str, Any]:
        wanted: dict[str, Any] = {
            "prompt": list(said) if len(said) > 1 else said[0],
            "height": size[0],
            "width": size[1],
            "num_inference_steps": 4,
            "output_type": "pt",
            "num_frames": self._config.num_frames,
            "max_sequence_length": length,
            "use_resolution_binning": False,
            # Kontext enlarges smaller images to a megapixel.
            "max_area": size[0] * size[1],
            "_auto_resize": False,
            **OFF,
            **dict.fromkeys(GUIDANCE, self._guidance),
        }
        if self._picture is not None and picture is not None:
            wanted |= self._pictures(picture)
        return {name: value for name, value in wanted.items() if name in self._parameters and value is not None}

    def _pictures(self, picture: Image) -> dict[str, Any]:
        """Arguments that hold an image; its transparent part is to be painted, if a pipeline takes a mask."""
        assert self._picture is not None
        found: dict[str, Any] = {self._picture: picture.convert("RGB")}
        if self._picture != "image" and "image" in self._parameters:
            found["image"] = found[self._picture]
        if MASK_ARGUMENT in self._parameters:
            if "A" not in picture.getbands():
                raise ConfigError(f"{self.name} takes a mask: images need transparent pixels where it is to paint")
            found[MASK_ARGUMENT] = picture.getchannel("A").point([255] * 128 + [0] * 128)
        return found

    def _stand_in(self, size: tuple[int, int], number: int = 0) -> Image | None:
        """An image of large spots, half of it transparent; None: none stands beside the caption."""
        if self._picture is None:
            return None
        import PIL.Image

        spots = np.random.default_rng(number).integers(0, 256, (3, 3, 3), dtype=np.uint8)
        found = PIL.Image.fromarray(spots).resize((size[1], size[0]), PIL.Image.Resampling.BICUBIC).convert("RGBA")
        found.paste(0, (found.width // 2, 0, found.width, found.height))
        return found

    # --- before the first step ------------------------------------------------------------------------------

    def check_size(self, pipe: Any, size: tuple[int, int]) -> None:
        """Observe the pipeline at a size of training, and try the derived recipe.

        Raises:
            ConfigError: one sentence that names the part that cannot be derived, or that the recipe is wrong.
        """
        text = f"{self.name} at {size[0]} x {size[1]} pixels"
        errors: list[ConfigError] = []
        recipe: Recipe | None = None
        for way in (None,) if self.recipes else self._ways():
            if way is not None:
                self._watch(way[0], way[1])
                self._guidance = way[2]
            try:
                recipe = self._observed(pipe, size)
                break
            except ConfigError as caught:
                errors.append(caught)
            except Exception as caught:  # Of the pipeline's own.
                errors.append(ConfigError(f"its call fails ({type(caught).__name__}: {caught})"))
            if way is not None:
                self.recipes.clear()
                if self.base is not None:
                    # A message about what the own pipeline lacks is more to the point.
                    errors.clear()
        if recipe is None:
            raise ConfigError(f"{text} cannot be trained: {errors[0]}") from errors[0]
        encoded = self._latents_of(pipe, size)
        if encoded != recipe.latents.shape:
            raise ConfigError(
                f"{text}: its autoencoder makes latents of {encoded} of such an image, and its loop ends in those of "
                f"{recipe.latents.shape}; change resolution or aspect_ratio_buckets"
            )

    def _ways(self) -> Iterator[tuple[Any, str | None, float]]:
        """The ways that are looked at in turn: pipeline, argument of an image, guidance."""
        for pipe in (self._base, self._own):
            if getattr(pipe, self._config.denoiser, None) is None:
                continue
            parameters = inspect.signature(type(pipe).__call__).parameters
            picture = next((name for name in PICTURE_ARGUMENTS if name in parameters), None)
            has_pictures = any(one.has_references for one in self._config.data_sets)
            for reference in dict.fromkeys((picture, None) if has_pictures else (None, picture)):
                for guidance in WITHOUT_GUIDANCE:
                    yield pipe, reference, guidance

    def _observed(self, pipe: Any, size: tuple[int, int]) -> Recipe:
        length = self._config.max_sequence_length
        first = length[0] if isinstance(length, tuple) else length
        picture = self._stand_in(size)
        request = self._request(CAPTIONS[1:], size, first, picture)
        recipe = self._derived(request)
        recipe = self._best(request, recipe)
        if recipe.error > MOST_OFF:
            raise ConfigError(
                "with the target of training in the place of the transformer's results, its own loop ends "
                f"{recipe.error:.2g} (of the largest latent) from the latents of the target, so that something of it "
                "is not understood"
            )
        if self.base is not None:
            self._check_base(size, first, recipe)
        one = recipe.arguments
        changed = self._changed(recipe, self._request(CAPTIONS[:1], size, first, picture))
        if not changed:
            raise ConfigError("no argument of the transformer depends on the caption")
        pictured = []
        if self._picture is not None:
            other = self._request(CAPTIONS[1:], size, first, self._stand_in(size, 1))
            pictured = self._changed(recipe, other, recipe.given)
        if not self.recipes:
            self._size, self.captions, self.pictured = size, changed, pictured
        elif (changed, pictured) != (self.captions, self.pictured):
            raise ConfigError(
                f"other arguments depend on the caption ({', '.join(changed + pictured)}) than at {self._size[0]} x "
                f"{self._size[1]} pixels"
            )
        elif self._picture is None:
            there = dict(values_in(self._watcher.first_call(self._request(CAPTIONS[1:], self._size, first))))
            here = dict(values_in(one))
            both = [path for path in changed if not _equal(there.get(path), here[path])]
            if both:
                raise ConfigError(f"{', '.join(both)} of the transformer depends on the caption and the size")
        shape = recipe.latents.shape
        self.recipes[shape], self._two[shape] = recipe, None
        # Pipelines that take one prompt only are called for each sample.
        with suppress(Exception):
            two = self._watcher.first_call(self._request(CAPTIONS[1:] * 2, size, first, picture))
            merged([one, one], one, two)
            self._two[shape] = two
        off = float("inf")
        if self._two[shape] is not None:
            # Some take several prompts and compute one.
            with suppress(Exception):
                off = self._off_first_step(pipe, recipe, CAPTIONS[1], size, first)
        most = MOST_OFF_FIRST.get(recipe.result.dtype, MOST_OFF)
        if off > most:
            self._two[shape] = None
            off = self._off_first_step(pipe, recipe, CAPTIONS[1], size, first)
        if off > most:
            del self.recipes[shape]
            raise ConfigError(
                f"called as in training, for two images, the transformer predicts something else than in the first "
                f"step of the pipeline (by {off:.2g} of the largest number)"
            )
        return recipe

    def _best(self, request: Mapping[str, Any], recipe: Recipe) -> Recipe:
        """The recipe, tried; where it fails, with the other sign, and in a finer loop.

        Some schedulers step along what they are given, and some against it: one of the two arrives. A solver's own
        error is less in a loop of more steps, and that of a wrong recipe is not.
        """
        found = replace(recipe, error=self._tried(request, recipe))
        if found.error <= MOST_OFF:
            return found
        turned = replace(recipe, prediction=replace(recipe.prediction, scale=-recipe.prediction.scale))
        found = min(found, replace(turned, error=self._tried(request, turned)), key=lambda one: one.error)
        if MOST_OFF < found.error < 10 * MOST_OFF:
            found = replace(found, steps=FINE_STEPS)
            found = replace(found, error=self._tried(request, found))
        return found

    def _derived(self, request: Mapping[str, Any]) -> Recipe:
        self._watcher.branches = 1
        for branches in BRANCHES:
            try:
                return derive_recipe(self._watcher, request)
            except SeveralBranches:
                self._watcher.branches = branches
        return derive_recipe(self._watcher, request)

    def _changed(self, recipe: Recipe, request: Mapping[str, Any], given: Sequence[str] = ()) -> list[str]:
        """Paths of what another request changes in the transformer's arguments, beside the sample and the time.

        Args:
            recipe: with the arguments of the one.
            given: of what holds the sample, paths at which other numbers may be others.
        """
        one, other = recipe.arguments, self._watcher.first_call(request)
        inputs = dict(recipe.inputs)
        fixed = {*inputs, *(time.path for time in recipe.times)}
        changed = [path for path in _differing(one, other) if path not in fixed]
        here, there = dict(values_in(one)), dict(values_in(other))
        for path in given:
            apart = inputs[path].scale == 0
            changed += [path] if not torch.equal(here[path].cpu()[apart], there[path].cpu()[apart]) else []
        unknown = [path for path in changed if not _is_number(here.get(path))]
        if unknown:
            raise ConfigError(f"{', '.join(unknown)} of the transformer depends on the caption, and is no tensor")
        return changed

    def draws_from_prompts(self) -> bool:
        """True if the own pipeline can be called with a prompt alone, without an image beside it."""
        length = self._config.max_sequence_length
        kept = self._watcher, self._parameters, self._picture, self.videos
        self._watch(self._own)
        try:
            self._watcher.first_call(
                self._request(CAPTIONS[1:], self._size, length[0] if isinstance(length, tuple) else length)
            )
        except Exception:
            # The pipeline's own, of any kind.
            return False
        finally:
            self._watcher, self._parameters, self._picture, self.videos = kept
        return True

    def _check_base(self, size: tuple[int, int], length: int | None, recipe: Recipe) -> None:
        """Compare the own pipeline's first call with that of the one in its place, where it can be made."""
        kept = self._watcher, self._parameters, self._picture, self._guidance, self.videos
        unlike: list[ConfigError] = []
        for _, picture, guidance in [way for way in self._ways() if way[0] is self._own]:
            self._watch(self._own, picture)
            self._guidance, own = guidance, None
            # Of the pipeline's own, where stand-ins are not what it takes.
            with suppress(Exception):
                own = self._watcher.first_call(self._request(CAPTIONS[1:], size, length, self._stand_in(size)))
            try:
                if own is not None:
                    check_alike(type(self._own), own, recipe.arguments)
                    unlike.clear()
                    break
            except ConfigError as error:
                unlike.append(error)
        self._watcher, self._parameters, self._picture, self._guidance, self.videos = kept
        if unlike:
            raise unlike[0]

    def _off_first_step(
        self, pipe: Any, recipe: Recipe, caption: str, size: tuple[int, int], length: int | None
    ) -> float:
        """The distance of training's prediction for a caption from the pipeline's own, at its first step."""
        first = recipe.first
        latents = recipe.latents.moved(first.sample[None]).expand(2, *recipe.latents.shape)
        wanted = recipe.latents.moved(recipe.prediction(recipe.result[None].to(latents)))
        times = torch.full((2,), first.timestep, dtype=torch.float64, device=latents.device)
        picture = self._stand_in(size)
        conditions = self.encode(pipe, [caption] * 2, length, None if picture is None else [picture] * 2)
        with torch.no_grad():
            found = self.predict(pipe, self._watcher.model, latents, times, conditions)
        there = (recipe.latents.scale != 0).to(wanted.device)
        wanted, found = wanted[0][there], found[:, there]
        return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))

    def _tried(self, request: Mapping[str, Any], recipe: Recipe) -> float:
        """The error of the round trip, by a solver without noise of its own."""
        import diffusers

        pipe = self._watcher.pipe
        own = pipe.scheduler
        tables, renewed = NoiseTables(self.scheduler, self._config), type(own).__name__ in RENEWED
        calm = STOCHASTIC.get(type(own).__name__)
        if calm is not None:
            pipe.scheduler = getattr(diffusers, calm).from_config(own.config)
        elif own.config.get("stochastic_sampling"):
            pipe.scheduler = type(own).from_config(own.config, stochastic_sampling=False)
        try:
            return round_trip(self._watcher, request, recipe, tables, renewed=renewed)
        finally:
            pipe.scheduler = own

    def _latents_of(self, pipe: Any, size: tuple[int, int]) -> tuple[int, ...]:
        frames = self._config.num_frames
        blank = torch.zeros(1, 3, *(() if frames is None else (frames,)), *size)
        moments = self.moments(pipe, blank.to(pipe.vae.device, pipe.vae.dtype))
        return (moments.shape[1] // 2, *moments.shape[2:])

    # --- what training asks of a family ---------------------------------------------------------------------

    def moments(self, pipe: Any, values: Tensor) -> Tensor:
        """(B, 2C, ...): mean and standard deviation of the latents of images or videos."""
        if values.dim() == 4 and _takes_frames(pipe.vae):
            values = values.unsqueeze(2)
        return super().moments(pipe, values)

    def scaled(self, pipe: Any, latents: Tensor) -> Tensor:
        """The autoencoder's latents as the loop ends in them, each number at its place in the autoencoder's form."""
        found = self._recipe(latents).latents
        scale = found.scale.to(latents)
        return torch.where(scale != 0, (latents - found.base.to(latents)) / torch.where(scale != 0, scale, 1), 0)

    def trained(self, latents: Tensor) -> Tensor | None:
        """Ones where latents (B, ...) are predicted and zeros where they are given, (1, ...); None: all are."""
        there = self._recipe(latents).latents.scale != 0
        return None if bool(there.all()) else there.to(latents)[None]

    def encode(
        self, pipe: Any, said: Sequence[Any], length: int | None, references: Sequence[Image | None] | None = None
    ) -> Conditions:
        """Changes in the transformer's arguments by the captions, and by images beside them.

        Args:
            said: captions.
            length: tokens of a prompt.
            references: an image for every caption, of the size of its sample, where `reference` or `source_image` is
                not None. In an image with a hole what is to be painted is transparent.

        Raises:
            ConfigError: an image is missing, or lacks transparent pixels.
        """
        rows = []
        for number, caption in enumerate(said):
            picture = None if references is None else references[number]
            if self._picture is not None and picture is None:
                raise ConfigError(f"{self.name} draws from an image beside the caption, and a sample has none")
            size = self._size if picture is None else (picture.height, picture.width)
            request = self._request([caption], size, length, picture)
            values = dict(values_in(self._watcher.first_call(request)))
            self._watcher.forget()
            paths = dict.fromkeys((*self.captions, *self.pictured))
            rows.append({path: torch.as_tensor(values[path]) for path in paths})
        return stacked(rows)

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        """The prediction for latents (B, C, [F,] H, W), in the same shape."""
        recipe = self._recipe(latents)
        template = dict(values_in(recipe.arguments))
        samples = recipe.back.moved(latents)
        noisy = {path: into(samples) for path, into in recipe.inputs}
        calls = []
        for number, row in enumerate(sample_conditions(conditions, len(latents))):
            changes: dict[str, Any] = {path: _like(template[path], value) for path, value in row.items()}
            for path, into in recipe.inputs:
                value = noisy[path][number]
                if path in row:
                    value = torch.where(into.scale != 0, value, row[path].to(value))
                changes[path] = value.to(template[path].dtype)
            for time in recipe.times:
                changes[time.path] = _like(template[time.path], time.of(timesteps[number].double()))
            calls.append(replaced(recipe.arguments, changes))
        two = self._two[recipe.latents.shape]
        if len(calls) == 1 or (two is not None and len({_form(call) for call in calls}) == 1):
            results = sample_of(model(**(calls[0] if len(calls) == 1 else merged(calls, recipe.arguments, two))))
        else:
            # Captions of unlike length: a call for each.
            results = torch.cat([sample_of(model(**call)) for call in calls])
        return recipe.latents.moved(recipe.prediction(results.to(latents.dtype)))

    def _recipe(self, latents: Tensor) -> Recipe:
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
        raise ConfigError(f"{path} of the transformer has another form for two images than for one")
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
    """Paths of values that are not the same in two calls' arguments."""
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
    return type(one) is type(other) and (bool(one == other) or _state(one) == _state(other) != ())


def _state(value: Any) -> Any:
    """The state of an object, such as a cache of keys, to tell it from another of its class; empty if it has none."""
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, Mapping):
        return tuple((str(key), _state(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_state, value))
    if isinstance(value, (int, float, str, type(None))):
        return value
    return (type(value).__name__, _state(vars(value))) if hasattr(value, "__dict__") else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float))


def _like(template: Any, value: Tensor) -> Any:
    """A value as the pipeline passes it: of the template's type."""
    return value.to(template.dtype) if isinstance(template, Tensor) else type(template)(value.item())


def _form(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (path, tuple(value.shape) if isinstance(value, Tensor) else value if _is_number(value) else None)
        for path, value in values_in(arguments)
    )


def _takes_frames(vae: Any) -> bool:
    """True if an autoencoder is one of videos, which takes an image as a video of one frame."""
    first = next((one for one in vae.modules() if isinstance(one, (nn.Conv2d, nn.Conv3d))), None)
    return isinstance(first, nn.Conv3d)

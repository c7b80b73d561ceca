"""Training of pipelines by what runs of them have shown."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...generate.modular import call_parameters, component_names
from ..conditions import Conditions, latent_moments, sample_conditions, stacked
from ..config import TrainConfig
from .arguments import are_equal, argument_forms, differing_paths, is_number, merged, row_dim, typed_like
from .base import base_pipeline, check_alike
from .recipe import MOST_OFF, Recipe
from .view import LABEL_ARGUMENT, PICTURE_ARGUMENTS, WITHOUT_GUIDANCE, PipelineView
from .watch import replaced, sample_of, values_in

if TYPE_CHECKING:
    from PIL.Image import Image

# Captions of unlike length: what they change in the transformer's arguments is a condition. And labels.
CAPTIONS = ("", "a red fox")
LABELS = (None, 0)
# The largest distance of the first step in training from the pipeline's own, relative to the largest number: of whole
# precision, and of half.
MOST_OFF_FIRST = {torch.float32: 1e-4, torch.float64: 1e-4}


def check_observable(kind: type) -> None:
    """Refuse a pipeline that cannot be trained, by its class.

    Raises `ConfigError`: it takes no prompt and no class label, or needs a scheduler for sound.
    """
    # Where it may be left out, the sound has a copy of the video's.
    argument = inspect.signature(kind).parameters.get("audio_scheduler")
    if "audio_scheduler" in component_names(kind) and (argument is None or argument.default is not None):
        raise ConfigError(
            f"{kind.__name__} cannot be trained: it denoises video and sound together with a scheduler for each, and a "
            "run follows one; call ditmesh.parallelize(...) in a training loop of your own (docs/training.md)"
        )
    parameters = call_parameters(kind)
    if "prompt" not in parameters and LABEL_ARGUMENT not in parameters:
        raise ConfigError(f"{kind.__name__} cannot be trained: it takes no prompt")


class ObservedFamily:
    """How a pipeline is trained, seen by running it with stand-ins.

    Attributes:
        conditioned_by: ``"text"`` or ``"label"``.
        videos: latents are those of videos, (B, C, F, H, W).
        recipes: by the shape of a sample's latents.
        captions, pictured: paths of the transformer's arguments that depend on the caption, and on an image beside it.

    Raises:
        ConfigError: it takes no prompt alone, or has no autoencoder.
    """

    def __init__(self, pipe: Any, config: TrainConfig) -> None:
        self.name = type(pipe).__name__
        check_observable(type(pipe))
        if getattr(pipe, config.denoiser, None) is None:
            raise ConfigError(f"train_modules: {self.name} has no {config.denoiser} here; leave it out")
        if getattr(pipe, "scheduler", None) is None:
            raise ConfigError(f"{self.name} cannot be trained: it has no scheduler, which a run follows")
        self.recipes: dict[tuple[int, ...], Recipe] = {}
        self._config = config
        self._own, self._base = pipe, base_pipeline(pipe)
        by_prompt = "prompt" in call_parameters(pipe)
        self.conditioned_by = "text" if by_prompt else "label"
        self._examples: Sequence[Any] = CAPTIONS if by_prompt else LABELS
        # Encoders that are trained beside the transformer, through which gradients flow.
        self._encoders = [name for name in config.model.train_modules if name != config.denoiser]
        self.captions: list[str] = []
        self.pictured: list[str] = []
        # The size at which captions are encoded.
        self._size: tuple[int, int] = (0, 0)
        self._on_device: dict[tuple[tuple[int, ...], torch.device], Recipe] = {}
        # By shape of latents the arguments of a call for two samples; None: it is called for one at a time.
        self._two: dict[tuple[int, ...], Mapping[str, Any] | None] = {}
        # By path the dimension of captions that are encoded together as each by itself: those of one length.
        self._caption_dims: dict[str, int | None] = {}
        self._view = self._viewed(pipe)
        self.videos = self._view.videos

    def _viewed(self, pipe: Any, picture: str | None = None, guidance: float = WITHOUT_GUIDANCE[0]) -> PipelineView:
        return PipelineView(pipe, self._config, picture, guidance)

    @property
    def scheduler(self) -> Any:
        """The scheduler with the noise levels of training."""
        return self._view.scheduler

    @property
    def reference(self) -> str | None:
        """The argument for a reference image that a data set has for each sample; None: it takes none of those."""
        return None if self.source_image is not None else self._view.picture

    @property
    def source_image(self) -> str | None:
        """The image of the sample itself beside its caption: ``"first frame"``, ``"hole"``; None: none."""
        return self._view.source_image

    @property
    def moments_of_training(self) -> tuple[float, float] | None:
        """The lowest and the highest timestep at which the trained transformer is called; None: at all."""
        return self._view.watcher.bounds

    @property
    def base(self) -> type | None:
        """The class of the pipeline that is trained in the own one's place; None: it is the own one."""
        return None if self._view.pipe is self._own else type(self._view.pipe)

    def prepare(self, pipe: Any) -> None:
        """Switch off a model's own dropping of labels; the trainer drops them."""
        for module in self._view.watcher.model.modules():
            # In training mode diffusers drops labels itself, different ones in every block.
            if hasattr(module, "dropout_prob") and hasattr(module, "num_classes"):
                module.dropout_prob = 0.0

    # --- before the first step ------------------------------------------------------------------------------

    def check_size(self, pipe: Any, size: tuple[int, int]) -> None:
        """Observe the pipeline at a size of training, and try the derived recipe.

        Raises `ConfigError`: one sentence that names the part that cannot be derived, or that the recipe is wrong.
        """
        text = f"{self.name} at {size[0]} x {size[1]} pixels"
        errors: list[ConfigError] = []
        recipe: Recipe | None = None
        for way in (None,) if self.recipes else self._ways():
            if way is not None:
                self._view = self._viewed(*way)
                self.videos = self._view.videos
            try:
                recipe = self._observed(pipe, size)
                break
            except ConfigError as caught:
                errors.append(caught)
            except Exception as caught:  # Of the pipeline's own.
                sentence = f"its call fails ({type(caught).__name__}: {caught})"
                errors.append(ConfigError(f"{sentence}; if that is about its size, change resolution or buckets"))
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
            parameters = call_parameters(pipe)
            picture = next((name for name in PICTURE_ARGUMENTS if name in parameters), None)
            has_pictures = any(one.has_references for one in self._config.data.sets)
            for reference in dict.fromkeys((picture, None) if has_pictures else (None, picture)):
                for guidance in WITHOUT_GUIDANCE:
                    yield pipe, reference, guidance

    def _observed(self, pipe: Any, size: tuple[int, int]) -> Recipe:
        length = self._config.data.max_sequence_length
        first = length[0] if isinstance(length, tuple) else length
        view = self._view
        picture = view.stand_in(size)
        recipe = view.best_recipe(view.request(self._examples[1:], size, first, picture))
        if recipe.error > MOST_OFF:
            raise ConfigError(
                "with the target of training in the place of the transformer's results, its own loop ends "
                f"{recipe.error:.2g} (of the largest latent) from the latents of the target, so that something of it "
                "is not understood"
            )
        if self.base is not None:
            self._check_base(size, first, recipe)
        arguments = recipe.arguments
        changed = self._changed(recipe, self._view.request(self._examples[:1], size, first, picture))
        if not changed:
            raise ConfigError("no argument of the transformer depends on the caption or label")
        pictured = []
        if self._view.picture is not None:
            other = self._view.request(self._examples[1:], size, first, self._view.stand_in(size, 1))
            pictured = self._changed(recipe, other, recipe.given)
        if not self.recipes:
            self._size, self.captions, self.pictured = size, changed, pictured
        elif (changed, pictured) != (self.captions, self.pictured):
            raise ConfigError(
                f"other arguments depend on the caption ({', '.join(changed + pictured)}) than at {self._size[0]} x "
                f"{self._size[1]} pixels"
            )
        elif self._view.picture is None:
            first_values = dict(
                values_in(self._view.watcher.first_call(self._view.request(self._examples[1:], self._size, first)))
            )
            values = dict(values_in(arguments))
            both = [path for path in changed if not are_equal(first_values.get(path), values[path])]
            if both:
                raise ConfigError(f"{', '.join(both)} of the transformer depends on the caption and the size")
        self._check_first_step(pipe, recipe, size, first, picture)
        self._check_encoders(pipe, first, picture)
        if picture is None and None not in self._two.values():
            with suppress(Exception):
                self._caption_dims = self._dims_of_captions(first)
        return recipe

    def _dims_of_captions(self, length: int | None) -> dict[str, int | None]:
        """The dimensions of captions that are encoded together; empty: together each is another one."""
        alone = [self._conditions([word], self._size, length, None) for word in self._examples]
        together = self._conditions(self._examples, self._size, length, None)
        dims = {path: row_dim(value, alone[0][path], len(alone)) for path, value in together.items()}
        for row, other in zip(alone, self._split(together, dims, len(alone)), strict=True):
            for path, value in row.items():
                if value.shape != other[path].shape or not torch.allclose(
                    value.float(), other[path].float(), 1e-4, 1e-5
                ):
                    return {}
        return dims

    def _check_first_step(
        self, pipe: Any, recipe: Recipe, size: tuple[int, int], length: int | None, picture: Image | None
    ) -> None:
        """Keep a recipe with which training predicts what the pipeline does; for two samples at once, if it can be."""
        shape, arguments, example = recipe.latents.shape, recipe.arguments, self._examples[1]
        self.recipes[shape], self._two[shape] = recipe, None
        # Pipelines that take one prompt only are called for each sample.
        with suppress(Exception):
            two = self._view.watcher.first_call(self._view.request([example] * 2, size, length, picture))
            merged([arguments, arguments], arguments, two)
            self._two[shape] = two
        off = float("inf")
        if self._two[shape] is not None:
            # Some take several prompts and compute one.
            with suppress(Exception):
                off = self._off_first_step(pipe, recipe, example, size, length)
        most = MOST_OFF_FIRST.get(recipe.result.dtype, MOST_OFF)
        if off > most:
            self._two[shape] = None
            off = self._off_first_step(pipe, recipe, example, size, length)
        if off > most:
            del self.recipes[shape]
            raise ConfigError(
                f"called as in training, for two images, the transformer predicts something else than in the first "
                f"step of the pipeline (by {off:.2g} of the largest number)"
            )

    def _check_encoders(self, pipe: Any, length: int | None, picture: Image | None) -> None:
        """Refuse encoders to train on which no condition depends."""
        encoders = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
        if unknown := [name for name in self._encoders if name not in encoders]:
            raise ConfigError(f"train_modules: {type(pipe).__name__} has no module {unknown[0]!r}")
        weights = [weight for part in encoders.values() for weight in part.parameters()]
        trained = [weight.requires_grad for weight in weights]
        try:
            for name in self._encoders:
                for part, module in encoders.items():
                    module.requires_grad_(part == name)
                with torch.enable_grad():
                    references = None if picture is None else [picture]
                    conditions = self.encode(pipe, self._examples[1:], length, references)
                if not any(value.requires_grad for value in conditions.values()):
                    raise ConfigError(f"train_modules: no gradient reaches {name}; leave it out")
        finally:
            for weight, flag in zip(weights, trained, strict=True):
                weight.requires_grad_(flag)

    def _changed(self, recipe: Recipe, request: Mapping[str, Any], given: Sequence[str] = ()) -> list[str]:
        """Paths of what another request changes in the transformer's arguments, beside the sample and the time.

        Args:
            recipe: with the arguments of the one.
            given: of what holds the sample, paths at which other numbers may be others.
        """
        arguments, other = recipe.arguments, self._view.watcher.first_call(request)
        inputs = dict(recipe.inputs)
        fixed = {*inputs, *(time.path for time in recipe.times)}
        changed = [path for path in differing_paths(arguments, other) if path not in fixed]
        values, other_values = dict(values_in(arguments)), dict(values_in(other))
        for path in given:
            apart = inputs[path].scale == 0
            changed += [path] if not torch.equal(values[path].cpu()[apart], other_values[path].cpu()[apart]) else []
        unknown = [path for path in changed if not is_number(values.get(path))]
        if unknown:
            raise ConfigError(f"{', '.join(unknown)} of the transformer depends on the caption, and is no tensor")
        return changed

    def _check_base(self, size: tuple[int, int], length: int | None, recipe: Recipe) -> None:
        """Compare the own pipeline's first call with that of the one in its place, where it can be made."""
        unlike: list[ConfigError] = []
        for _, picture, guidance in [way for way in self._ways() if way[0] is self._own]:
            view, call = self._viewed(self._own, picture, guidance), None
            # Of the pipeline's own, where stand-ins are not what it takes.
            with suppress(Exception):
                call = view.watcher.first_call(view.request(self._examples[1:], size, length, view.stand_in(size)))
            try:
                if call is not None:
                    check_alike(type(self._own), call, recipe.arguments)
                    return
            except ConfigError as error:
                unlike.append(error)
        if unlike:
            raise unlike[0]

    def _off_first_step(
        self, pipe: Any, recipe: Recipe, caption: Any, size: tuple[int, int], length: int | None
    ) -> float:
        """The distance of training's prediction for a caption from the pipeline's own, at its first step."""
        first = recipe.first
        latents = recipe.latents.moved(first.sample[None]).expand(2, *recipe.latents.shape)
        wanted = recipe.latents.moved(recipe.prediction(recipe.result[None].to(latents)))
        times = torch.full((2,), first.timestep, dtype=torch.float64, device=latents.device)
        picture = self._view.stand_in(size)
        conditions = self.encode(pipe, [caption] * 2, length, None if picture is None else [picture] * 2)
        with torch.no_grad():
            found = self.predict(pipe, self._view.watcher.model, latents, times, conditions)
        there = (recipe.latents.scale != 0).to(wanted.device)
        wanted, found = wanted[0][there], found[:, there]
        return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))

    def _latents_of(self, pipe: Any, size: tuple[int, int]) -> tuple[int, ...]:
        frames = self._config.data.num_frames
        blank = torch.zeros(1, 3, *(() if frames is None else (frames,)), *size)
        moments = self.moments(pipe, blank.to(pipe.vae.device, pipe.vae.dtype))
        return (moments.shape[1] // 2, *moments.shape[2:])

    # --- what training asks for ---------------------------------------------------------------------

    def moments(self, pipe: Any, values: Tensor) -> Tensor:
        """(B, 2C, ...): mean and standard deviation of the latents of images or videos."""
        if values.dim() == 4:
            # An autoencoder of videos takes an image as a video of one frame.
            first = next((one for one in pipe.vae.modules() if isinstance(one, (nn.Conv2d, nn.Conv3d))), None)
            values = values.unsqueeze(2) if isinstance(first, nn.Conv3d) else values
        return latent_moments(pipe.vae, values)

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
        self, pipe: Any, words: Sequence[Any], length: int | None, references: Sequence[Image | None] | None = None
    ) -> Conditions:
        """Changes in the transformer's arguments by the captions, and by images beside them.

        Where gradients are recorded, they reach encoders that are trained.

        Args:
            words: captions or labels.
            length: tokens of a prompt.
            references: an image for every caption, of the size of its sample, where `reference` or `source_image` is
                not None. In an image with a hole what is to be painted is transparent.

        Raises:
            ConfigError: an image is missing, or lacks transparent pixels; or a label is none of the model's.
        """
        if self._caption_dims and references is None:
            values = self._conditions(words, self._size, length, None)
            return stacked(self._split(values, self._caption_dims, len(words)))
        rows = []
        for number, word in enumerate(words):
            picture = None if references is None else references[number]
            if self._view.picture is not None and picture is None:
                raise ConfigError(f"{self.name} draws from an image beside the caption, and a sample has none")
            size = self._size if picture is None else (picture.height, picture.width)
            rows.append(self._conditions([word], size, length, picture))
        return stacked(rows)

    def _conditions(
        self, words: Sequence[Any], size: tuple[int, int], length: int | None, picture: Image | None
    ) -> Conditions:
        """The transformer's arguments that depend on captions, in one call of the pipeline for all."""
        watcher = self._view.watcher
        gradients = bool(self._encoders) and torch.is_grad_enabled()
        values = dict(values_in(watcher.first_call(self._view.request(words, size, length, picture), gradients)))
        watcher.forget()
        return {path: torch.as_tensor(values[path]) for path in dict.fromkeys((*self.captions, *self.pictured))}

    def _split(self, values: Conditions, dims: Mapping[str, int | None], count: int) -> list[Conditions]:
        """Conditions that captions have together, for each."""
        pieces = {
            path: [value] * count if (dim := dims[path]) is None else value.chunk(count, dim)
            for path, value in values.items()
        }
        return [{path: pieces[path][number] for path in pieces} for number in range(count)]

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        """The prediction for latents (B, C, [F,] H, W), in the same shape."""
        recipe = self._recipe(latents)
        template = dict(values_in(recipe.arguments))
        samples = recipe.back.moved(latents)
        noisy = {path: into(samples) for path, into in recipe.inputs}
        calls = []
        for number, row in enumerate(sample_conditions(conditions, len(latents))):
            changes: dict[str, Any] = {path: typed_like(template[path], value) for path, value in row.items()}
            for path, into in recipe.inputs:
                value = noisy[path][number]
                if path in row:
                    value = torch.where(into.scale != 0, value, row[path].to(value))
                changes[path] = value.to(template[path].dtype)
            for time in recipe.times:
                changes[time.path] = typed_like(template[time.path], time.of(timesteps[number].double()))
            calls.append(replaced(recipe.arguments, changes))
        two = self._two[recipe.latents.shape]
        if len(calls) == 1 or (two is not None and len({argument_forms(call) for call in calls}) == 1):
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

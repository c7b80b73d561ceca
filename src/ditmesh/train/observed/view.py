"""Ways to call a pipeline in which it is observed, and the recipe that such a call shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError
from ...generate.modular import call_parameters
from ..config import TrainConfig
from ..objective import NoiseTables
from .recipe import FINE_STEPS, MOST_OFF, Recipe, SeveralBranches, derive_recipe, round_trip
from .watch import PipelineWatcher

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
# Of pipelines that draw by a class in place of a prompt.
LABEL_ARGUMENT = "class_labels"
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


class PipelineView:
    """One way to call a pipeline: with an image beside the caption or without, and with a value that is no guidance.

    Args:
        config: the objective, the transformer that is trained, and the number of frames.
        picture: the argument that holds an image beside the caption; None: none.
        guidance: of the arguments of `GUIDANCE`.
    """

    def __init__(
        self, pipe: Any, config: TrainConfig, picture: str | None = None, guidance: float = WITHOUT_GUIDANCE[0]
    ) -> None:
        self.pipe, self.picture, self.guidance = pipe, picture, guidance
        self._config, self._frames = config, config.data.num_frames
        self.parameters = set(call_parameters(pipe))
        self.videos = "num_frames" in self.parameters
        self.watcher = PipelineWatcher(pipe, config.denoiser)

    @property
    def scheduler(self) -> Any:
        """The scheduler with the noise levels of training."""
        levels = self.watcher.levels
        return self.pipe.scheduler if levels is None else levels.scheduler

    @property
    def source_image(self) -> str | None:
        """The image of the sample itself beside its caption: ``"first frame"``, ``"hole"``; None: none."""
        if self.picture is None:
            return None
        return "first frame" if self.videos else "hole" if MASK_ARGUMENT in self.parameters else None

    def request(
        self, words: Sequence[Any], size: tuple[int, int], length: int | None = None, picture: Image | None = None
    ) -> dict[str, Any]:
        """Arguments of the pipeline's call.

        Args:
            words: captions or labels.
            size: (height, width) in pixels.
            length: tokens of a prompt.

        Raises:
            ConfigError: a label is none of the model's, or the image lacks transparent pixels.
        """
        wanted: dict[str, Any] = {
            "prompt": list(words) if len(words) > 1 else words[0],
            LABEL_ARGUMENT: self._labels(words) if "prompt" not in self.parameters else None,
            "height": size[0],
            "width": size[1],
            "num_inference_steps": 4,
            "output_type": "pt",
            "num_frames": self._frames,
            "max_sequence_length": length,
            "use_resolution_binning": False,
            # Kontext enlarges smaller images to a megapixel.
            "max_area": size[0] * size[1],
            "_auto_resize": False,
            **OFF,
            **dict.fromkeys(GUIDANCE, self.guidance),
        }
        if self.picture is not None and picture is not None:
            wanted |= self._pictures(picture)
        return {name: value for name, value in wanted.items() if name in self.parameters and value is not None}

    def _labels(self, words: Sequence[Any]) -> list[int]:
        """Class labels; the one after the last class stands for none."""
        none = self.watcher.model.config["num_embeds_ada_norm"]
        if wrong := [label for label in words if label is not None and not 0 <= int(label) < none]:
            raise ConfigError(f"label {wrong[0]} is none of the model's classes 0 to {none - 1}")
        return [none if label is None else int(label) for label in words]

    def _pictures(self, picture: Image) -> dict[str, Any]:
        """Arguments that hold an image; its transparent part is to be painted, if a pipeline takes a mask."""
        assert self.picture is not None
        images: dict[str, Any] = {self.picture: picture.convert("RGB")}
        if self.picture != "image" and "image" in self.parameters:
            images["image"] = images[self.picture]
        if MASK_ARGUMENT in self.parameters:
            if "A" not in picture.getbands():
                raise ConfigError(
                    f"{type(self.pipe).__name__} takes a mask: images need transparent pixels where it is to paint"
                )
            images[MASK_ARGUMENT] = picture.getchannel("A").point([255] * 128 + [0] * 128)
        return images

    def stand_in(self, size: tuple[int, int], number: int = 0) -> Image | None:
        """An image of large spots, half of it transparent; None: none stands beside the caption."""
        if self.picture is None:
            return None
        import PIL.Image

        spots = np.random.default_rng(number).integers(0, 256, (3, 3, 3), dtype=np.uint8)
        image = PIL.Image.fromarray(spots).resize((size[1], size[0]), PIL.Image.Resampling.BICUBIC).convert("RGBA")
        image.paste(0, (image.width // 2, 0, image.width, image.height))
        return image

    def best_recipe(self, request: Mapping[str, Any]) -> Recipe:
        """The recipe that a call shows, tried; where it fails, with the other sign, and in a finer loop.

        Some schedulers step along what they are given, and some against it: one of the two arrives. A solver's own
        error is less in a loop of more steps, and that of a wrong recipe is not.
        """
        recipe = self._derived(request)
        recipe = replace(recipe, error=self.error_of(request, recipe))
        if recipe.error <= MOST_OFF:
            return recipe
        turned = replace(recipe, prediction=replace(recipe.prediction, scale=-recipe.prediction.scale))
        turned = replace(turned, error=self.error_of(request, turned))
        recipe = turned if turned.error < recipe.error else recipe
        if MOST_OFF < recipe.error < 10 * MOST_OFF:
            recipe = replace(recipe, steps=FINE_STEPS)
            recipe = replace(recipe, error=self.error_of(request, recipe))
        return recipe

    def _derived(self, request: Mapping[str, Any]) -> Recipe:
        self.watcher.branches = 1
        for branches in BRANCHES:
            try:
                return derive_recipe(self.watcher, request)
            except SeveralBranches:
                self.watcher.branches = branches
        return derive_recipe(self.watcher, request)

    def error_of(self, request: Mapping[str, Any], recipe: Recipe) -> float:
        """The error of the round trip, by a solver without noise of its own."""
        import diffusers

        pipe = self.pipe
        sampler = pipe.scheduler
        tables, renewed = NoiseTables(self.scheduler, self._config), type(sampler).__name__ in RENEWED
        calm = STOCHASTIC.get(type(sampler).__name__)
        if calm is not None:
            pipe.scheduler = getattr(diffusers, calm).from_config(sampler.config)
        elif sampler.config.get("stochastic_sampling"):
            pipe.scheduler = type(sampler).from_config(sampler.config, stochastic_sampling=False)
        try:
            return round_trip(self.watcher, request, recipe, tables, renewed=renewed)
        finally:
            pipe.scheduler = sampler

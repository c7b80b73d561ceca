"""Pipelines of the exams, observed as training observes them; and a table of what becomes of each.

PYTHONPATH=src:tests:. python -m support.observed [NAME ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from diffusers import AutoencoderKL
from diffusers.configuration_utils import FrozenDict

from ditmesh.errors import ConfigError
from ditmesh.train.config import TrainConfig
from ditmesh.train.observed.family import CAPTIONS, LABELS, MOST_OFF_FIRST, ObservedFamily
from ditmesh.train.observed.maps import NumberMap
from ditmesh.train.observed.recipe import MOST_OFF, Recipe, TimeArgument
from ditmesh.train.observed.view import GUIDANCE, OFF, PipelineView
from support import exam
from support.exam import TABLE, Exam
from support.train import configured

# And calls that no other test makes: every given frame is given for good, and none a little.
EXAMS = {**exam.EXAMS, **{name: exam.exam(name, row=row) for name, row in TABLE["observed"].items()}}
# Exams of modular pipelines end before the autoencoder; tests/generate/test_modular.py trains some.
CLASSIC = [name for name in EXAMS if "Modular" not in name]
# What calls of exams have for guidance, and cannot have without.
NOT_WITHOUT_GUIDANCE = dict.fromkeys(("AnyFlowPipeline", "AnyFlowFARPipeline"), ("negative_prompt_embeds",))
# The prompts, or labels, of exams by caption or label.
OTHER = "another caption"
NUMBERS: dict[Any, int] = {CAPTIONS[0]: 2, CAPTIONS[1]: 1, OTHER: 2, LABELS[0]: 2, LABELS[1]: 1}


def settings(**more: Any) -> TrainConfig:
    return configured(
        {"pretrained_model_name_or_path": "m", "train_data_dir": "d", "output_dir": "o", "resolution": 64, **more}
    )


class StubVae:
    """An autoencoder for pipelines of exams that have none: the decoder is never reached."""

    dtype, device = torch.float32, torch.device("cpu")
    spatial_compression_ratio, temporal_compression_ratio = 8, 4

    def __init__(self, pipe: Any) -> None:
        # Some cannot do without means, and some not with these.
        means = {"latents_mean": [0.1] * 4, "latents_std": [0.5] * 4, "z_dim": 4}
        if type(pipe).__name__ == "MochiPipeline":
            means = dict.fromkeys(means)
        levels = {"block_out_channels": (8,) * 4, "encoder_block_out_channels": (8,) * 6}
        self.config = FrozenDict({"scaling_factor": 0.5, "shift_factor": 0.1, "latent_channels": 4, **means, **levels})
        # Of normalised latents.
        self.bn = SimpleNamespace(running_mean=torch.full((8,), 0.1), running_var=torch.full((8,), 0.5))

    def forward(self, *args: Any) -> None:
        """Latte asks for its parameters."""

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    def to(self, *args: Any, **kwargs: Any) -> StubVae:
        return self


def pictures_in(value: Any) -> bool:
    """Whether there are pictures in an exam's arguments."""
    if isinstance(value, dict):
        return any(pictures_in(one) for one in value.values())
    if isinstance(value, (list, tuple)):
        return any(pictures_in(one) for one in value)
    return isinstance(value, PIL.Image.Image)


def inverted(value: Any) -> Any:
    """An exam's arguments with other pictures; masks stay."""
    if isinstance(value, dict):
        return {name: inverted(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(inverted(one) for one in value)
    return PIL.ImageOps.invert(value) if isinstance(value, PIL.Image.Image) and value.mode == "RGB" else value


class ExamView(PipelineView):
    """A pipeline that is called as its exam calls it."""

    def __init__(self, exam: Exam, name: str, *way: Any) -> None:
        super().__init__(way[0], settings(), *way[1:])
        self._exam, self._name = exam, name

    def asked(self, numbers: list[int]) -> dict[str, Any]:
        call = self._exam.call(numbers)
        if "max_text_length" in call:
            # What stands around a caption would leave none of it.
            call["max_text_length"] = 200
        left_out = ("generator", *NOT_WITHOUT_GUIDANCE.get(self._name, ()))
        return {name: value for name, value in call.items() if name not in left_out and name in self.parameters}

    def stand_in(self, size: tuple[int, int], number: int = 0) -> PIL.Image.Image | None:
        return None if self.picture is None else PIL.Image.new("L", (1, 1), number)

    def request(
        self, words: Sequence[Any], size: tuple[int, int], length: int | None = None, picture: Any = None
    ) -> dict[str, Any]:
        call = self.asked([NUMBERS[word] for word in words])
        if picture is not None and picture.getpixel((0, 0)):
            call = inverted(call)
        asked = {"num_inference_steps": 4, "output_type": "pt", **OFF}
        asked |= dict.fromkeys(GUIDANCE, self.guidance)
        return call | {name: value for name, value in asked.items() if name in self.parameters}


class ExamFamily(ObservedFamily):
    """What is observed of a pipeline that is called as its exam calls it."""

    def __init__(self, exam: Exam, pipe: Any) -> None:
        self._exam = exam
        if getattr(pipe, "vae", StubVae) is None:
            pipe.vae = StubVae(pipe)
        if isinstance(getattr(pipe, "vae", None), AutoencoderKL) and pipe.vae.config.shift_factor is None:
            # PRX calculates with it.
            pipe.vae.register_to_config(shift_factor=0.0)
        pipe.set_progress_bar_config(disable=True)
        super().__init__(pipe, settings())

    def _viewed(self, pipe: Any, picture: str | None = None, guidance: float = 1.0) -> PipelineView:
        return ExamView(self._exam, type(self._own).__name__, pipe, picture, guidance)

    def _ways(self) -> Iterator[tuple[Any, str | None, float]]:
        seen = []
        for pipe, _, guidance in super()._ways():
            asked = ExamView(self._exam, type(self._own).__name__, pipe, None, guidance).asked([1])
            way = pipe, "image" if pictures_in(asked) else None, guidance
            if way not in seen:
                seen.append(way)
                yield way

    def _latents_of(self, pipe: Any, size: tuple[int, int]) -> tuple[int, ...]:
        # Without an autoencoder there is nothing to compare with.
        return list(self.recipes)[-1]


def observed(name: str) -> tuple[Any, ExamFamily, Recipe]:
    """A pipeline of the exams, what is observed of it, and its recipe."""
    exam = EXAMS[name]
    pipe = exam.make()
    family = ExamFamily(exam, pipe)
    family.check_size(pipe, (0, 0))
    return pipe, family, next(iter(family.recipes.values()))


def turned(map_: NumberMap, order: torch.Tensor) -> NumberMap:
    """A map that takes the numbers it holds in another order."""
    there = map_.scale != 0
    index = map_.index.clone()
    index[there] = index[there][order]
    return replace(map_, index=index)


def planted(pipe: Any, family: ExamFamily, recipe: Recipe) -> dict[str, float]:
    """The round trip's error of recipes with one mistake each, and the first step's of another branch."""
    prediction, latents, time = recipe.prediction, recipe.latents, recipe.times[0]
    (path, into), *others = recipe.inputs
    there = latents.scale != 0
    held = int(there.sum())
    order = torch.randperm(held, generator=torch.Generator().manual_seed(0))
    wrong = {
        "sign": replace(recipe, prediction=replace(prediction, scale=-prediction.scale)),
        "scale of the prediction": replace(recipe, prediction=replace(prediction, scale=0.9 * prediction.scale)),
        "order of the prediction": replace(recipe, prediction=turned(prediction, order)),
        "scale of the latents": replace(recipe, latents=replace(latents, scale=1.1 * latents.scale)),
        "shift of the latents": replace(recipe, latents=replace(latents, base=latents.base + 0.5 * latents.scale)),
        "order of the latents": replace(recipe, latents=turned(latents, torch.arange(held).flip(0))),
        "scale of the input": replace(recipe, inputs=((path, replace(into, scale=0.8 * into.scale)), *others)),
        "time": replace(recipe, times=(replace(time, scale=1.3 * time.scale),)),
        "shift of the time": replace(recipe, times=(replace(time, shift=time.shift + shift_of(time)),)),
    }
    request = family._view.request(family._examples[1:], (0, 0), None, family._view.stand_in((0, 0)))
    found = {what: family._view.error_of(request, one) for what, one in wrong.items()}
    # Its tolerance is another one.
    branch = family._off_first_step(pipe, recipe, family._examples[0], (0, 0), None)
    found["branch"] = branch * MOST_OFF / MOST_OFF_FIRST[recipe.result.dtype]
    return found


def shift_of(time: TimeArgument) -> torch.Tensor:
    """A wrong shift of a time: 300 of a thousand timesteps, or as much of a table."""
    if time.table is None:
        return 300 * time.scale.abs()
    return 0.3 * float(np.ptp(time.table[1])) * torch.ones_like(time.scale)


def result_of(name: str) -> str:
    """What becomes of a pipeline: a line."""
    try:
        found = observed(name)
    except ConfigError as error:
        return f"refused: {error}"
    family, recipe = found[1:]
    least = min(planted(*found).items(), key=lambda pair: pair[1])
    stands_in = "" if family.base is None else f", as {family.base.__name__}"
    return f"derived{stands_in}: off by {recipe.error:.1e}, and with a planted mistake by {least[1]:.2g} ({least[0]})"


def main(names: Sequence[str]) -> None:
    """Print the table."""
    for name in names or EXAMS:
        if hasattr(EXAMS[name].make(), "transformer"):
            print(f"{name}\t{result_of(name)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

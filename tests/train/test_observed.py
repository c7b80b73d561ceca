"""Training of pipelines without an adapter: what is derived, what is refused, and that no wrong recipe passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from ditmesh import zoo
from ditmesh.errors import ConfigError
from ditmesh.train.config import TrainConfig
from ditmesh.train.families import family_of, rows_of, stacked
from ditmesh.train.objective import NoiseTables
from ditmesh.train.observed.check import checked_recipe
from ditmesh.train.observed.family import CAPTIONS, ObservedFamily
from ditmesh.train.observed.maps import Fills
from ditmesh.train.observed.recipe import MOST_OFF, Recipe, round_trip
from ditmesh.train.trainer import Trainer
from support.exam import Exam, images, others, videos
from support.train import folder_of, save_pipeline

EXAMS: dict[str, Exam] = {**images.EXAMS, **videos.EXAMS, **others.EXAMS}
# The prompts of exams by caption.
OTHER = "another caption"
NUMBERS = {CAPTIONS[0]: 2, CAPTIONS[1]: 1, OTHER: 2}

# Some that are derived always: packed, moved, a flipped sign, a part of the result, lists of samples, videos.
ALWAYS = [
    "ChromaPipeline",
    "Flux2Pipeline",
    "HiDreamImagePipeline",
    "HunyuanVideoPipeline",
    "Kandinsky5T2VPipeline",
    "LTXPipeline",
    "Lumina2Pipeline",
    "MochiPipeline",
    "QwenImagePipeline",
    "SanaPipeline",
    "WanPipeline",
    "ZImagePipeline",
    "CogVideoXPipeline",
]


def settings(**more: Any) -> TrainConfig:
    return TrainConfig.read(
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
        self.config = FrozenDict({"scaling_factor": 0.5, "shift_factor": 0.1, "latent_channels": 4, **means})

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    def to(self, *args: Any, **kwargs: Any) -> StubVae:
        return self


class ExamFamily(ObservedFamily):
    """What is observed of a pipeline that is called as its exam calls it."""

    def __init__(self, exam: Exam, pipe: Any) -> None:
        self._exam = exam
        if getattr(pipe, "vae", StubVae) is None:
            pipe.vae = StubVae(pipe)
        pipe.set_progress_bar_config(disable=True)
        super().__init__(pipe, settings())

    def _request(self, said: Sequence[str], size: tuple[int, int], length: int | None = None) -> dict[str, Any]:
        call = self._exam.call([NUMBERS[one] for one in said])
        call = {name: value for name, value in call.items() if name != "generator"}
        if "pag_scale" in self._parameters:
            call["pag_scale"] = 0.0
        asked = {"num_inference_steps": 4, "output_type": "pt"}
        asked |= {name: self._guidance for name in ("guidance_scale", "true_cfg_scale") if name in self._parameters}
        return call | asked

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


def planted(pipe: Any, family: ExamFamily, recipe: Recipe) -> dict[str, float]:
    """The round trip's error of recipes with one mistake each."""
    prediction, latents, into, time = recipe.prediction, recipe.latents, recipe.into, recipe.times[0]
    order = torch.randperm(prediction.index.numel(), generator=torch.Generator().manual_seed(0))
    turned = prediction.index.flatten()[order].view(prediction.index.shape)
    wrong = {
        "sign": replace(recipe, prediction=replace(prediction, scale=-prediction.scale)),
        "scale of the prediction": replace(recipe, prediction=replace(prediction, scale=0.9 * prediction.scale)),
        "order of the prediction": replace(recipe, prediction=replace(prediction, index=turned)),
        "scale of the latents": replace(recipe, latents=replace(latents, scale=1.1 * latents.scale)),
        "shift of the latents": replace(recipe, latents=replace(latents, base=latents.base + 0.5 * latents.scale)),
        "order of the latents": replace(
            recipe, latents=replace(latents, index=latents.index.flatten().flip(0).view(latents.shape))
        ),
        "scale of the input": replace(recipe, into=replace(into, scale=0.8 * into.scale)),
        "time": replace(recipe, times=(replace(time, scale=1.3 * time.scale),)),
        "shift of the time": replace(recipe, times=(replace(time, shift=time.shift + 300 * abs(time.scale)),)),
    }
    request = family._request(CAPTIONS[1:], (0, 0))
    tables = NoiseTables(pipe.scheduler, family._config)
    return {what: round_trip(family._watcher, request, one, tables) for what, one in wrong.items()}


@pytest.mark.parametrize("name", ALWAYS)
def test_a_pipeline_without_an_adapter_is_derived(name: str):
    """Its loop ends where the target leads; a batch of two is called as the pipeline calls; one by one is the same."""
    pipe, family, recipe = observed(name)
    assert recipe.error < MOST_OFF
    latents = torch.randn(2, *recipe.latents.shape, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([300.0, 700.0]) * float(pipe.scheduler.config.num_train_timesteps) / 1000
    conditions = family.encode(pipe, [CAPTIONS[1], OTHER], None)
    both = family.predict(pipe, pipe.transformer, latents, times, conditions)
    assert both.shape == latents.shape
    for number, row in enumerate(rows_of(conditions, 2)):
        one = slice(number, number + 1)
        alone = family.predict(pipe, pipe.transformer, latents[one], times[one], stacked([row]))
        assert float((alone - both[one]).detach().abs().max() / alone.detach().abs().max()) < 1e-5
    # The loss reaches the weights.
    both.square().mean().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in pipe.transformer.parameters())


@pytest.mark.parametrize("name", ["ChromaPipeline", "Lumina2Pipeline", "MochiPipeline", "WanPipeline"])
def test_no_wrong_recipe_passes(name: str):
    pipe, family, recipe = observed(name)
    errors = planted(pipe, family, recipe)
    assert min(errors.values()) > MOST_OFF, errors


@pytest.mark.matrix
@pytest.mark.parametrize("name", EXAMS)
def test_every_pipeline_is_derived_or_refused(name: str):
    """Each is derived, so that every planted mistake shows, or refused in a sentence of one line."""
    if not hasattr(EXAMS[name].make(), "transformer"):
        pytest.skip("it has no transformer")
    said, found = "", None
    try:
        found = observed(name)
    except ConfigError as error:
        said = str(error)
    if found is None:
        assert name not in ALWAYS
        assert "\n" not in said
        return
    errors = planted(*found)
    assert min(errors.values()) > MOST_OFF, errors


@pytest.mark.parametrize(
    ("model", "size", "frames"),
    [
        ("emoji-sd3", (64, 64), None),
        ("emoji-flux", (64, 64), None),
        ("emoji-wan", (64, 64), 9),
        ("pixart", (32, 48), None),
    ],
)
def test_what_is_observed_is_what_adapters_say(model: str, size: tuple[int, int], frames: int | None, tmp_path: Path):
    folder = save_pipeline(model, tmp_path) if model == "pixart" else zoo.path(model)
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    config = settings(max_sequence_length=16, num_frames=frames)
    adapter, family = family_of(pipe, config), ObservedFamily(pipe, config)
    family.check_size(pipe, size)
    assert (family.videos, family.conditioned_by) == (adapter.videos, adapter.conditioned_by)
    draw = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, *(() if frames is None else (frames,)), *size, generator=draw) * 2 - 1
    said, times = ["a red fox", "a cactus"], torch.tensor([300.0, 700.0])
    with torch.no_grad():
        moments = adapter.moments(pipe, pixels)
        assert torch.equal(family.moments(pipe, pixels), moments)
        truth = adapter.scaled(pipe, moments.chunk(2, dim=1)[0])
        latents = family.scaled(pipe, moments.chunk(2, dim=1)[0])
        assert off(latents, truth) < 1e-6
        conditions = adapter.encode(pipe, said, 16)
        assert {name: value.shape for name, value in conditions.items()}.keys() == set(family.captions)
        wanted = adapter.predict(pipe, pipe.transformer, truth, times, conditions)
        found = family.predict(pipe, pipe.transformer, truth, times, family.encode(pipe, said, 16))
        assert off(found, wanted) < 1e-6


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("WanPipeline two transformers", "a second transformer takes over at low noise"),
        ("FluxInpaintPipeline", "is not a linear function of each number alone"),
        ("FluxControlNetPipeline", "several arguments depend on the sample"),
        ("LTXImageToVideoPipeline", "is not one number a call"),
        ("Cosmos2VideoToWorldPipeline", "mixes numbers"),
    ],
)
def test_what_cannot_be_derived_is_refused_in_a_sentence(name: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        observed(name)


def test_labels_have_an_adapter_and_nothing_to_derive():
    with pytest.raises(ConfigError, match="is trained by labels, with the adapter ClassConditional"):
        checked_recipe(settings(pretrained_model_name_or_path="fashion-dit"))


def test_an_encoder_that_is_trained_has_no_gradients_here():
    pipe = EXAMS["ChromaPipeline"].make()
    with pytest.raises(ConfigError, match="no gradients of text_encoder"):
        ObservedFamily(pipe, settings(train_modules=["transformer", "text_encoder"]))


def test_a_run_without_an_adapter(tmp_path: Path):
    """`Trainer` on a saved pipeline, with conditions from the cache and from the encoders."""
    pipe = EXAMS["ChromaPipeline"].make()
    pipe.save_pretrained(tmp_path / "chroma")
    data = folder_of(tmp_path / "data", 4)
    given = {
        "pretrained_model_name_or_path": str(tmp_path / "chroma"),
        "train_data_dir": str(data),
        "output_dir": str(tmp_path / "out"),
        "resolution": 32,
        "max_sequence_length": 12,
        "train_batch_size": 2,
        "max_train_steps": 3,
        "learning_rate": 1e-3,
        "proportion_empty_prompts": 0.3,
        "cache_dir": str(tmp_path / "cache"),
    }
    losses = {}
    for kept in (True, False):
        change = {"output_dir": str(tmp_path / f"out-{kept}")} | ({} if kept else {"cache_dir": None})
        config = TrainConfig.read({**given, **change})
        pipe = DiffusionPipeline.from_pretrained(tmp_path / "chroma")
        pipe.set_progress_bar_config(disable=True)
        with Trainer(config, pipe, timeout=100.0) as trainer:
            assert isinstance(trainer.family, ObservedFamily)
            losses[kept] = list(trainer.run().losses.values())
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert losses[True][0] != losses[True][-1]


def test_maps_of_numbers_and_their_way_back():
    fills = Fills((2, 3, 40))
    shift = torch.rand(40, 6)

    def packed(value: torch.Tensor) -> torch.Tensor:
        return value.permute(2, 0, 1).reshape(40, 6) * -0.5 + shift

    found = fills.map_of([packed(one) for one in fills.values], "it")
    value = torch.randn(3, 2, 3, 40)
    assert torch.allclose(found(value), torch.stack([packed(one) for one in value]), atol=1e-5)
    assert torch.allclose(found.inverse()(found(value)), value, atol=1e-5)
    half = fills.map_of([packed(one).bfloat16() for one in fills.values], "it")
    assert torch.equal(half.index, found.index)
    with pytest.raises(ConfigError, match="it mixes numbers"):
        fills.map_of([one.cumsum(-1) for one in fills.values], "it")
    with pytest.raises(ConfigError, match="not a linear function"):
        fills.map_of([one * (1 + one.abs()) if one.min() < 0 else one for one in fills.values], "it")


def test_rows_of_unlike_lengths_are_told_apart():
    rows = [{"a": torch.ones(2, 3), "b": torch.ones(2)}, {"a": torch.ones(4, 3), "b": torch.ones(2)}]
    both = stacked(rows)
    assert both["a"].shape == (2, 4, 3)
    assert [row["a"].shape for row in rows_of(both, 2)] == [(2, 3), (4, 3)]
    assert all(torch.equal(row["b"], torch.ones(2)) for row in rows_of(both, 2))

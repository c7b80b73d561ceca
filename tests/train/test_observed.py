"""Training of pipelines as they are observed: what is derived, what is refused, and that no wrong recipe passes."""

from __future__ import annotations

import copy
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from ditmesh import zoo
from ditmesh.errors import ConfigError
from ditmesh.train.checkpoints.export import export
from ditmesh.train.conditions import sample_conditions, stacked
from ditmesh.train.data.references import source_image
from ditmesh.train.model.adapters import add_adapters
from ditmesh.train.observed.base import base_class
from ditmesh.train.observed.family import CAPTIONS, ObservedFamily
from ditmesh.train.observed.maps import FillValues
from ditmesh.train.observed.recipe import MOST_OFF
from ditmesh.train.observed.watch import sample_of
from ditmesh.train.parallel import trained_modules
from ditmesh.train.trainer import Trainer
from support.exam.values import film
from support.families import BY_HAND
from support.observed import CLASSIC, EXAMS, OTHER, observed, planted, settings
from support.sample import sampled
from support.train import save_pipeline
from support.trainable import LEAST, REFUSED, UPSTREAM

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
    # A time for each token, a given frame, a second transformer; a time that is a table, scaled samples; branches of
    # guidance for good, a scheduler for each frame, a sample of sound beside.
    "LTXImageToVideoPipeline",
    "WanImageToVideoPipeline two transformers",
    "CosmosTextToWorldPipeline",
    "Cosmos2VideoToWorldPipeline",
    "AllegroPipeline",
    "OmniGenPipeline",
    "SkyReelsV2DiffusionForcingPipeline",
    "LTX2ImageToVideoPipeline",
    "FluxFillPipeline",
    "FluxControlNetPipeline",
]


@pytest.mark.parametrize("name", sampled(ALWAYS, of=4))
def test_a_pipeline_is_derived(name: str):
    """Its loop ends where the target leads; a batch of two is called as the pipeline calls; one by one is the same."""
    pipe, family, recipe = observed(name)
    assert recipe.error < MOST_OFF
    latents = torch.randn(2, *recipe.latents.shape, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([300.0, 700.0]) * float(family.scheduler.config.num_train_timesteps) / 1000
    pictures = [family._view.stand_in((0, 0), number) for number in range(2)]
    conditions = family.encode(pipe, [CAPTIONS[1], OTHER], None, None if pictures[0] is None else pictures)
    both = family.predict(pipe, pipe.transformer, latents, times, conditions)
    assert both.shape == latents.shape
    for number, row in enumerate(sample_conditions(conditions, 2)):
        one = slice(number, number + 1)
        alone = family.predict(pipe, pipe.transformer, latents[one], times[one], stacked([row]))
        assert float((alone - both[one]).detach().abs().max() / alone.detach().abs().max()) < 1e-5
    given = family.trained(latents)
    assert given is None or 0 < float(given.mean()) < 1
    # The loss reaches the weights.
    both.square().mean().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in pipe.transformer.parameters())


@pytest.mark.parametrize("name", ["ChromaPipeline", "CosmosTextToWorldPipeline", "LTXImageToVideoPipeline"])
def test_no_wrong_recipe_passes(name: str):
    pipe, family, recipe = observed(name)
    errors = planted(pipe, family, recipe)
    assert min(errors.values()) > MOST_OFF, errors


@pytest.mark.matrix
@pytest.mark.parametrize("name", CLASSIC)
def test_every_pipeline_is_derived_or_refused(name: str):
    """Each is derived, so that every planted mistake shows, or refused in a sentence of one line."""
    if not hasattr(EXAMS[name].make(), "transformer"):
        pytest.skip("it has no transformer")
    if (sentence := REFUSED.get(name)) is not None:
        with pytest.raises(ConfigError) as refused:
            observed(name)
        assert sentence in str(refused.value)
        assert "\n" not in str(refused.value)
        return
    errors = planted(*observed(name))
    assert min(errors.values()) > MOST_OFF, errors


def test_most_pipelines_of_diffusers_tests_are_derived():
    """The count; the test before shows for each exam that it is so."""
    derived = {name.split()[0] for name in CLASSIC if name not in REFUSED}
    assert not REFUSED.keys() - EXAMS.keys()
    assert sum(name in derived for name in UPSTREAM) >= LEAST


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "FluxControlNetPipeline" else pytest.mark.matrix)
        for name in CLASSIC
        if base_class(getattr(diffusers, name.split()[0], object)) is not None and name not in REFUSED
    ],
)
def test_what_is_trained_as_another_pipeline_loads_in_the_own(name: str, tmp_path: Path):
    """A LoRA, or where there is none the weights, of the pipeline in its place."""
    pipe, family, recipe = observed(name)
    if family.base is None:
        pytest.skip("it is trained itself")
    fresh, trained = EXAMS[name].make(), copy.deepcopy(pipe.transformer)
    fresh.register_modules(transformer=copy.deepcopy(fresh.transformer))
    pipe.register_modules(transformer=trained)
    assert family.base.__name__ != type(pipe).__name__
    config = settings(output_dir=str(tmp_path), lora={"rank": 2})
    arguments = {key: value for key, value in recipe.arguments.items() if key != "return_dict"}
    with torch.no_grad():
        before = sample_of(trained(**arguments))
        if not hasattr(type(pipe), "save_lora_weights"):
            for number, weight in enumerate(trained.parameters()):
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
            trained.save_pretrained(tmp_path / "transformer")
            fresh.register_modules(transformer=type(trained).from_pretrained(tmp_path / "transformer"))
        else:
            add_adapters(pipe, config)
            for number, (path, weight) in enumerate(trained.named_parameters()):
                if ".lora_B" in path:
                    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
            weights = {f"transformer.{path}": one for path, one in trained.named_parameters() if ".lora_" in path}
            folder = export(pipe, weights, config, type(trained), 1)
            fresh.load_lora_weights(str(folder))
        after, found = sample_of(trained(**arguments)), sample_of(fresh.transformer(**arguments))
    assert off(found, after) < 1e-5
    assert off(before, after) > 1e-3


@pytest.mark.parametrize(
    ("model", "size", "frames"),
    [
        ("emoji-sd3", (64, 64), None),
        ("emoji-wan", (64, 64), 9),
        pytest.param("emoji-flux", (64, 64), None, marks=pytest.mark.matrix),
        pytest.param("fashion-dit", (32, 32), None, marks=pytest.mark.matrix),
        pytest.param("pixart", (32, 48), None, marks=pytest.mark.matrix),
    ],
)
def test_what_is_observed_is_what_is_written_by_hand(
    model: str, size: tuple[int, int], frames: int | None, tmp_path: Path
):
    folder = save_pipeline(model, tmp_path) if model == "pixart" else zoo.path(model)
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    config = settings(max_sequence_length=16, num_frames=frames)
    by_hand, family = BY_HAND[type(pipe.transformer).__name__], ObservedFamily(pipe, config)
    family.check_size(pipe, size)
    assert (family.videos, family.conditioned_by) == (by_hand.videos, by_hand.conditioned_by)
    draw = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, *(() if frames is None else (frames,)), *size, generator=draw) * 2 - 1
    words = ["a red fox", "a cactus"] if family.conditioned_by == "text" else [3, None]
    times = torch.tensor([300.0, 700.0])
    with torch.no_grad():
        moments = by_hand.moments(pipe, pixels)
        assert torch.equal(family.moments(pipe, pixels), moments)
        truth = by_hand.scaled(pipe, moments.chunk(2, dim=1)[0])
        latents = family.scaled(pipe, moments.chunk(2, dim=1)[0])
        assert off(latents, truth) < 1e-6
        conditions = by_hand.encode(pipe, words, 16)
        assert {name: value.shape for name, value in conditions.items()}.keys() == set(family.captions)
        wanted = by_hand.predict(pipe, pipe.transformer, truth, times, conditions)
        found = family.predict(pipe, pipe.transformer, truth, times, family.encode(pipe, words, 16))
        assert off(found, wanted) < 1e-6


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Kandinsky5I2VPipeline", "holds given numbers that change from step to step"),
        pytest.param("Cosmos2_5_TransferPipeline", "several arguments depend on the sample", marks=pytest.mark.matrix),
        ("Kandinsky6TI2VAPipeline", "is no straight function"),
        ("SanaSprintPipeline", "its call fails"),
        ("VisualClozePipeline", "it takes no prompt"),
        ("MiniMaxH3ModularPipeline", "video and sound together"),
        ("EchoModularPipeline", "it has no scheduler"),
    ],
)
def test_what_cannot_be_derived_is_refused_in_a_sentence(name: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        observed(name)


def test_an_encoder_that_is_trained_has_gradients():
    """The own call of a pipeline records none; a part of it that conditions do not depend on is refused."""
    pipe = EXAMS["ChromaPipeline"].make()
    pipe.set_progress_bar_config(disable=True)
    wanted = {"max_sequence_length": 12, "resolution": 32}
    family = ObservedFamily(pipe, settings(train_modules=["transformer", "text_encoder"], **wanted))
    family.check_size(pipe, (32, 32))
    conditions = family.encode(pipe, CAPTIONS, 12)
    with torch.no_grad():
        assert not any(value.requires_grad for value in family.encode(pipe, CAPTIONS, 12).values())
    latents = torch.randn(2, *next(iter(family.recipes)), generator=torch.Generator().manual_seed(0))
    family.predict(pipe, pipe.transformer, latents, torch.tensor([300.0, 700.0]), conditions).square().mean().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in pipe.text_encoder.parameters())
    odd = ObservedFamily(pipe, settings(train_modules=["transformer", "vae"], **wanted))
    with pytest.raises(ConfigError, match="no gradient reaches vae"):
        odd.check_size(pipe, (32, 32))
    with pytest.raises(ConfigError, match="recomputes blocks without the mask"):
        trained_modules(pipe, settings(gradient_checkpointing=True, **wanted))


def test_a_video_of_a_picture_is_trained_with_its_first_frame(tmp_path: Path):
    """The given frame is the sample's, also from the cache; and does not count in the loss."""
    EXAMS["LTXImageToVideoPipeline"].make().save_pretrained(tmp_path / "ltx")
    (tmp_path / "data").mkdir()
    for number in range(2):
        frames = film([1], 9, 3 * number, (96, 96))
        frames[0].save(tmp_path / "data" / f"{number}.gif", save_all=True, append_images=frames[1:])
        (tmp_path / "data" / f"{number}.txt").write_text("a film")
    losses = {}
    for kept in (True, False):
        config = settings(
            pretrained_model_name_or_path=str(tmp_path / "ltx"),
            train_data_dir=str(tmp_path / "data"),
            output_dir=str(tmp_path / f"out-{kept}"),
            resolution=96,
            num_frames=9,
            max_sequence_length=24,
            train_batch_size=2,
            max_train_steps=2,
            learning_rate=1e-3,
            cache_dir=str(tmp_path / "cache") if kept else None,
        )
        pipe = DiffusionPipeline.from_pretrained(tmp_path / "ltx")
        pipe.set_progress_bar_config(disable=True)
        with Trainer(config, pipe, timeout=100.0) as trainer:
            assert isinstance(trainer.family, ObservedFamily)
            assert trainer.family.source_image == "first frame"
            batch = trainer.data.batch(trainer.data.order.step(0)[0])
            assert batch.mask is not None
            # One of two frames of latents.
            assert torch.equal(batch.mask[:, :, 0], torch.zeros_like(batch.mask[:, :, 0]))
            assert torch.equal(batch.mask[:, :, 1], torch.full_like(batch.mask[:, :, 1], 2.0))
            given = batch.conditions["hidden_states"]
            assert not torch.equal(given[0], given[1])
            losses[kept] = list(trainer.run().losses.values())
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_an_image_with_a_hole():
    values = torch.linspace(-1, 1, 3 * 40 * 64).view(3, 40, 64)
    found = [source_image("hole", values, seed) for seed in (0, 0, 1)]
    holes = [torch.from_numpy(np.asarray(one.getchannel("A")).copy()) == 0 for one in found]
    assert torch.equal(holes[0], holes[1])
    assert not torch.equal(holes[0], holes[2])
    assert all(0.05 < float(hole.float().mean()) < 0.6 for hole in holes)
    shown = torch.from_numpy(np.asarray(source_image("first frame", values[:, None], 0)).copy()).permute(2, 0, 1)
    assert float((shown / 127.5 - 1 - values).abs().max()) < 0.005


def test_maps_of_numbers_and_their_way_back():
    fills = FillValues((2, 3, 40))
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
    assert [row["a"].shape for row in sample_conditions(both, 2)] == [(2, 3), (4, 3)]
    assert all(torch.equal(row["b"], torch.ones(2)) for row in sample_conditions(both, 2))

"""Whole pipelines of many families: what the ranks draw together is what the unmodified pipeline draws alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.guiders import AdaptiveProjectedGuidance, AutoGuidance, ClassifierFreeGuidance, SkipLayerGuidance
from diffusers.hooks import FasterCacheConfig, LayerSkipConfig

import ditmesh
from ditmesh.engine import denoisers
from ditmesh.layout import layout_of
from support.models import component, made, relative_error
from support.more_pipelines import FAMILIES, arguments, draw
from support.sample import sampled

TOLERANCE = 1e-4  # of latents; float32
STEPS = 3

BATCHED = [name for name, family in FAMILIES.items() if family.guidance == "batched"]
SEQUENTIAL = [name for name, family in FAMILIES.items() if family.guidance == "sequential"]


@dataclass
class Seen:
    """What one rank saw of a parallel call.

    Attributes:
        own: the largest error of any result against its own prompt drawn alone by the unmodified pipeline.
        other: the smallest difference of any result from another prompt drawn with the same noise.
        runs: how often this rank ran the first block of each transformer.
        rows: rows of the batch in each of these runs, transformer by transformer; ``alone``: in those of
            one prompt on one device.
    """

    own: float
    other: float
    runs: list[int]
    rows: list[int]
    alone: list[int]


def seen(name: str, config: dict[str, Any], prompts: list[int]) -> Seen:
    """Draws the prompts together, in parallel, and each alone, in the same process."""
    pipe = FAMILIES[name].make()
    models = denoisers(pipe)
    rows: list[list[int]] = [[] for _ in models]
    handles = []
    for model, found in zip(models, rows, strict=True):
        layout = layout_of(model)
        assert layout is not None
        block = model.get_submodule(layout.regions[0].blocks)[0]

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[int] = found) -> None:
            found.append(len(args[0] if args else kwargs["hidden_states"]))

        handles.append(block.register_forward_pre_hook(note, with_kwargs=True))
    try:
        alone = [draw(name, pipe, [prompt], row, STEPS)[0] for row, prompt in enumerate(prompts)]
        others = [draw(name, pipe, [prompt + 5], row, STEPS)[0] for row, prompt in enumerate(prompts)]
        # Of one picture of those that were drawn alone, transformer by transformer.
        rows_alone = [count for found in rows for count in found[: len(found) // (2 * len(prompts))]]
        for found in rows:
            found.clear()
        with ditmesh.parallelized(pipe, config):
            together = draw(name, pipe, prompts, 0, STEPS)
    finally:
        for handle in handles:
            handle.remove()
    assert together.shape == torch.stack(alone).shape
    return Seen(
        own=max(relative_error(result, truth) for result, truth in zip(together, alone, strict=True)),
        other=min(relative_error(result, truth) for result, truth in zip(together, others, strict=True)),
        runs=[len(found) for found in rows],
        rows=[count for found in rows for count in found],
        alone=rows_alone,
    )


def check(results: list[Seen]) -> None:
    """Every result is its own prompt's, and a mixed-up prompt would have shown."""
    for result in results:
        assert result.own < TOLERANCE
        assert result.other > 100 * TOLERANCE


@pytest.mark.parametrize("name", sampled(FAMILIES, of=3))
def test_three_prompts_over_two_ranks(ranks, name):
    results = ranks(2).run(seen, name, {"data": 2}, [1, 2, 3])
    check(results)
    # No row is computed twice.
    for runs, alone in zip(zip(*(result.rows for result in results), strict=True), results[0].alone, strict=True):
        assert sum(runs) == 3 * alone


@pytest.mark.parametrize("name", sampled(BATCHED, of=2))
def test_batched_guidance_halves_the_rows(ranks, name):
    results = ranks(2).run(seen, name, {"cfg": 2}, [1])
    check(results)
    for result in results:
        assert result.runs == [STEPS]
        assert [2 * rows for rows in result.rows] == result.alone


@pytest.mark.parametrize("name", sampled(SEQUENTIAL, of=3))
def test_sequential_guidance_runs_one_branch_per_rank(ranks, name):
    """A transformer's first step learns what the branches are; at every other step each rank runs one."""
    results = ranks(2).run(seen, name, {"cfg": 2}, [1])
    check(results)
    for result in results:
        assert sum(result.runs) == STEPS + len(result.runs)
        assert set(result.rows) == set(result.alone)


@pytest.mark.matrix
def test_guidance_in_calls_of_different_sizes(ranks):
    """LTX-2: both branches in one call, and a third prediction, without what the streams say to one another."""
    results = ranks(2).run(seen, "ltx2", {"cfg": 2}, [1])
    check(results)
    for result in results:
        assert 2 * result.rows[0] == result.alone[0]


# --- guidance that diffusers' guiders compute ------------------------------------------------------------------------


def without_a_layer() -> LayerSkipConfig:
    return LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=False, skip_ff=True)


GUIDERS = {
    # Two branches; the second one is the model without a layer.
    "auto": lambda: AutoGuidance(guidance_scale=3.0, auto_guidance_config=without_a_layer()),
    # Three branches; the third one is the first one without a layer.
    "skip layer": lambda: SkipLayerGuidance(
        guidance_scale=3.0,
        skip_layer_config=without_a_layer(),
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
    ),
    # Remembers the predictions of the steps before.
    "projected": lambda: AdaptiveProjectedGuidance(guidance_scale=3.0, adaptive_projected_guidance_momentum=-0.5),
    # Begins late and ends early.
    "interval": lambda: ClassifierFreeGuidance(guidance_scale=3.0, start=0.3, stop=0.7),
}


def guided(guider: str) -> tuple[float, float]:
    """Error of guidance over two ranks, and what the guidance does to the latents."""
    name = "hunyuan_video_15"
    pipe = FAMILIES[name].make()
    plain = draw(name, pipe, [1], steps=5)
    pipe.guider = GUIDERS[guider]()
    truth = draw(name, pipe, [1], steps=5)
    pipe.guider = GUIDERS[guider]()
    with ditmesh.parallelized(pipe, {"cfg": 2}):
        value = draw(name, pipe, [1], steps=5)
    return relative_error(value, truth), relative_error(plain, truth)


@pytest.mark.parametrize("guider", GUIDERS)
def test_guiders(ranks, guider):
    """A branch that changes the model before its call is not run in another call's place."""
    for error, effect in ranks(2).run(guided, guider):
        assert error < TOLERANCE
        assert effect > 100 * TOLERANCE


def skipping_guidance(config: dict[str, Any]) -> tuple[float, float]:
    """Error with Faster Cache, which takes the first half of the batch for one branch, and the cache's effect."""
    name, prompts, steps = "cogvideox", [1, 2], 6
    pipe = FAMILIES[name].make()
    cache = {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": (-1, 901),
        "unconditional_batch_skip_range": 2,
        "unconditional_batch_timestep_skip_range": (-1, 901),
        "attention_weight_callback": lambda _: 0.5,
        "current_timestep_callback": lambda: pipe.current_timestep,
    }
    plain = draw(name, pipe, prompts, steps=steps)
    try:
        pipe.transformer.enable_cache(FasterCacheConfig(**cache))
        truth = draw(name, pipe, prompts, steps=steps)
        pipe.transformer.disable_cache()
        pipe.transformer.enable_cache(FasterCacheConfig(**cache))
        with ditmesh.parallelized(pipe, config):
            value = draw(name, pipe, prompts, steps=steps)
    finally:
        pipe.transformer.disable_cache()
    return relative_error(value, truth), relative_error(plain, truth)


@pytest.mark.parametrize("config", [{"cfg": 2}, {"data": 2}, {"ulysses": 2}], ids=str)
def test_a_cache_that_skips_a_branch_of_guidance(ranks, config):
    for error, effect in ranks(2).run(skipping_guidance, config):
        assert error < TOLERANCE
        assert effect > 100 * TOLERANCE


# --- decoders --------------------------------------------------------------------------------------------------------


DECODERS = {
    # Removes the last noise itself: it is told how much there is in every row.
    "ltx": (
        partial(component, "LTX vae removing noise"),
        {"decode_timestep": [0.0, 0.05, 0.1], "decode_noise_scale": 0.025},
    ),
    # Takes the frames of videos as rows, and mixes them.
    "latte": (
        partial(
            component,
            "AutoencoderKLTemporalDecoder",
            block_out_channels=(32,),
            down_block_types=("DownEncoderBlock2D",),
            sample_size=8,
        ),
        {},
    ),
}


def decoded(name: str) -> float:
    """Error of three decoded videos."""
    pipe = FAMILIES[name].make()
    make, more = DECODERS[name]
    pipe.vae = made(make)
    pipe.set_progress_bar_config(disable=True)

    def videos() -> torch.Tensor:
        with torch.no_grad():
            return pipe(**{**arguments(name, [1, 2, 3]), "output_type": "pt", **more}).frames

    truth = videos()
    assert all(relative_error(truth[row], truth[row - 1]) > 100 * TOLERANCE for row in range(3))
    with ditmesh.parallelized(pipe, {"data": 2}):
        return relative_error(videos(), truth)


@pytest.mark.parametrize("name", DECODERS)
def test_videos_decoded_over_two_ranks(ranks, name):
    for error in ranks(2).run(decoded, name):
        assert error < TOLERANCE

"""Whole pipelines of many families: what the ranks draw together is what the unmodified pipeline draws alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from diffusers.guiders import AdaptiveProjectedGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig

import ditmesh
from support.models import component, made, relative_error
from support.more_pipelines import FAMILIES, arguments, draw

TOLERANCE = 1e-4  # of latents; float32


# --- guidance that diffusers' guiders compute ------------------------------------------------------------------------


def without_a_layer() -> LayerSkipConfig:
    return LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=False, skip_ff=True)


GUIDERS = {
    # Three branches; the third one is the first one without a layer.
    "skip layer": lambda: SkipLayerGuidance(
        guidance_scale=3.0,
        skip_layer_config=without_a_layer(),
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
    ),
    # Remembers the predictions of the steps before.
    "projected": lambda: AdaptiveProjectedGuidance(guidance_scale=3.0, adaptive_projected_guidance_momentum=-0.5),
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

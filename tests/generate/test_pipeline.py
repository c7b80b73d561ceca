"""Whole pipelines: the embedded model on several ranks draws the picture of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

import ditmesh
from ditmesh import zoo

PROMPTS = ["a red fox", "a cactus", "a pizza"]
# One step of the 8-bit pixels, which is what rounding may do to differences of 1e-6.
TOLERANCE = 1


@cache
def load() -> Any:
    """Once in a process: every test restores it."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(zoo.path())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures(pipe: Any, prompts: list[str], **more: Any) -> np.ndarray:
    count = len(prompts) * more.get("num_images_per_prompt", 1)
    result = pipe(
        prompts,
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=[torch.Generator().manual_seed(number) for number in range(count)],
        output_type="np",
        **more,
    )
    return (result.images * 255).round().astype(int)


@pytest.fixture(scope="module")
def truth_of(ranks) -> Callable[..., np.ndarray]:
    """Pictures of one device, each drawn once for all tests."""
    drawn: dict[str, np.ndarray] = {}

    def of(prompts: list[str], **more: Any) -> np.ndarray:
        key = f"{prompts} {more}"
        if key not in drawn:
            (drawn[key],) = ranks(1).run(alone, prompts, more)
        return drawn[key]

    return of


def alone(prompts: list[str], more: dict[str, Any]) -> np.ndarray:
    return pictures(load(), prompts, **more)


def compared(truth: np.ndarray, config: dict[str, Any], prompts: list[str], **more: Any) -> tuple[int, bool]:
    """Largest difference of 8-bit pixels, and equality."""
    pipe = load()
    vae_calls = []
    handle = pipe.vae.decoder.register_forward_hook(lambda *_: vae_calls.append(1))
    with ditmesh.parallelized(pipe, config):
        value = pictures(pipe, prompts, **more)
    handle.remove()
    assert vae_calls
    return int(abs(value - truth).max()), bool((value == truth).all())


@pytest.mark.parametrize(
    "config",
    [{"ulysses": 2}, {"cfg": 2, "ulysses": 2}, pytest.param({"ulysses": 8}, marks=pytest.mark.matrix)],
    ids=str,
)
def test_the_same_picture(ranks, truth_of, config):
    prompts = PROMPTS[:1] + PROMPTS[-1:]
    truth = truth_of(prompts)
    assert abs(truth[0] - truth[-1]).max() > 50
    for difference, equal in ranks(prod(config.values())).run(compared, truth, config, prompts):
        assert difference <= TOLERANCE
        # Keys in one device's order: at 2 ranks no bit of the picture changes.
        assert equal or config != {"ulysses": 2}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        pytest.param({"data": 2}, {"num_images_per_prompt": 2}, marks=pytest.mark.matrix),
        ({"data": 2, "cfg": 2}, {"negative_prompt": ["blue", "", "red"]}),
    ],
    ids=str,
)
def test_several_pictures_per_prompt(ranks, truth_of, config, more):
    """Order and noise are those of one device: prompt by prompt, picture by picture."""
    truth = truth_of(PROMPTS, **more)
    for difference, _ in ranks(prod(config.values())).run(compared, truth, config, PROMPTS, **more):
        assert difference <= TOLERANCE


def shared_pipeline() -> tuple[bool, bool]:
    """The VAE and the text encoders are not touched, and restore gives the very same picture."""
    pipe = load()
    truth = pictures(pipe, PROMPTS[:1])
    untouched = {name: dict(vars(pipe.components[name])) for name in ("vae", "text_encoder", "text_encoder_2")}
    ditmesh.parallelize(pipe, {"ulysses": 2})
    same = all(vars(pipe.components[name]) == before for name, before in untouched.items())
    ditmesh.restore(pipe)
    return same, bool((pictures(pipe, PROMPTS[:1]) == truth).all())


def test_other_components_are_untouched(ranks):
    assert ranks(2).run(shared_pipeline) == [(True, True)] * 2

"""diffusers' caches on several ranks: the decisions, and so the pictures, of one device."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)

import ditmesh
from support.models import relative_error
from support.pipelines import MAKERS, arguments, draw

CACHES = {
    "first block": lambda: FirstBlockCacheConfig(threshold=0.72),
    "taylorseer": lambda: TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, max_order=1),
}


def cached(
    cache: str, config: dict[str, Any], enable_first: bool, guidance: float = 1.0
) -> tuple[float, list[int], list[int], float]:
    """Error against one device with the same cache; blocks computed per rank and on one device; effect of the cache."""
    pipe = MAKERS["flux"]()
    transformer = pipe.transformer
    made = {"steps": 8, "true_cfg_scale": guidance}
    exact = draw(pipe, arguments("flux", [1], **made))
    computed: list[int] = []
    last = transformer.single_transformer_blocks[-1]
    handle = last.attn.register_forward_pre_hook(lambda *_: computed.append(1))
    try:
        transformer.enable_cache(CACHES[cache]())
        truth = draw(pipe, arguments("flux", [1], **made))
        alone = len(computed)
        transformer.disable_cache()
        computed.clear()
        if enable_first:
            transformer.enable_cache(CACHES[cache]())
        ditmesh.parallelize(pipe, config)
        if not enable_first:
            transformer.enable_cache(CACHES[cache]())
        value = draw(pipe, arguments("flux", [1], **made))
        ditmesh.restore(pipe)
    finally:
        handle.remove()
        if transformer.is_cache_enabled:
            transformer.disable_cache()
    return relative_error(value, truth), [alone], [len(computed)], relative_error(truth, exact)


@pytest.mark.parametrize("enable_first", [True, False], ids=["cache first", "parallel first"])
@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_caches(ranks, cache, config, enable_first):
    for error, alone, together, effect in ranks(2).run(cached, cache, config, enable_first):
        assert error < 1e-4
        assert alone == together
        assert effect > 1e-3  # the cache did skip something


@pytest.mark.parametrize("cache", CACHES)
def test_every_branch_of_guidance_has_a_cache_of_its_own(ranks, cache):
    """A branch run in another one's place would look into that one's cache."""
    for error, alone, together, effect in ranks(2).run(cached, cache, {"cfg": 2}, True, 3.0):
        assert error < 1e-4
        assert alone == together
        assert effect > 1e-3


# What else diffusers has, with settings that skip something in few steps.
OTHERS = {
    **CACHES,
    "pab": lambda pipe: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: pipe._current_timestep,
    ),
    "faster": lambda pipe: FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: pipe._current_timestep,
        is_guidance_distilled=True,
        attention_weight_callback=lambda _: 0.5,
    ),
}


def said(cache: str, config: dict[str, Any], enable_first: bool) -> str:
    """The sentence that refuses a cache; or how far off its picture is."""
    pipe = MAKERS["flux"]()
    make = OTHERS[cache]
    settings = make(pipe) if cache not in CACHES else make()
    made = arguments("flux", [1], steps=4, true_cfg_scale=1.0)
    exact = draw(pipe, made)
    try:
        if enable_first:
            pipe.transformer.enable_cache(settings)
        with ditmesh.parallelized(pipe, config):
            if not enable_first:
                pipe.transformer.enable_cache(settings)
            try:
                return f"off by {relative_error(draw(pipe, made), exact)}"
            except ditmesh.ConfigError as error:
                return str(error)
    finally:
        pipe.transformer.disable_cache()


@pytest.mark.parametrize(
    ("cache", "enable_first"), [("first block", True), ("first block", False), ("pab", False), ("faster", True)]
)
def test_a_cache_that_would_mix_tiles_is_refused(ranks, cache, enable_first):
    for words in ranks(2).run(said, cache, {"ulysses": 2, "reproducible": True}, enable_first):
        assert "tile by tile" in words
        assert "disable_cache()" in words


@pytest.mark.parametrize("first", [True, False])
def test_a_cache_that_would_mix_patches_is_refused(ranks, first):
    assert "patch by patch" in ranks(2).run(said, "first block", {"pipe": 2, "warmup": "fixed(1)"}, first)[1]

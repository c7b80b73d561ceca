"""diffusers' caches on several ranks: the decisions, and so the pictures, of one device."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig

import ditmesh
from support.models import relative_error
from support.pipelines import MAKERS, arguments, draw
from support.sample import sampled

CACHES = {
    "first block": lambda: FirstBlockCacheConfig(threshold=0.72),
    "taylorseer": lambda: TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, max_order=1),
}


def cached(
    cache: str, config: dict[str, Any], enable_first: bool, guidance: float = 1.0
) -> tuple[float, int, int, float]:
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
    return relative_error(value, truth), alone, len(computed), relative_error(truth, exact)


@pytest.mark.parametrize(
    ("config", "enable_first", "cache"), sampled([{"ulysses": 2}, {"ring": 2}], [True, False], CACHES, of=2), ids=str
)
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


def said(config: dict[str, Any], enable_first: bool) -> str:
    """The sentence that refuses a cache; or how far off its picture is."""
    pipe = MAKERS["flux"]()
    made = arguments("flux", [1], steps=4, true_cfg_scale=1.0)
    exact = draw(pipe, made)
    try:
        if enable_first:
            pipe.transformer.enable_cache(CACHES["first block"]())
        with ditmesh.parallelized(pipe, config):
            if not enable_first:
                pipe.transformer.enable_cache(CACHES["first block"]())
            try:
                return f"off by {relative_error(draw(pipe, made), exact)}"
            except ditmesh.ConfigError as error:
                return str(error)
    finally:
        pipe.transformer.disable_cache()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("config", "part"),
    [({"ulysses": 2, "reproducible": True}, "tile by tile"), ({"pipe": 2, "warmup": "fixed(1)"}, "patch by patch")],
    ids=str,
)
def test_a_cache_that_would_mix_parts_of_an_image_is_refused(ranks, config, part, first):
    for words in ranks(2).run(said, config, first):
        assert part in words
        assert "disable_cache()" in words

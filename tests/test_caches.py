"""diffusers' caches on several ranks: the decisions, and so the pictures, of one device."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig

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


def restored() -> bool:
    pipe = MAKERS["flux"]()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    head = pipe.transformer.transformer_blocks[0]._diffusers_hook.hooks["fbc_leader_block_hook"]
    before = dict(vars(head))
    with ditmesh.parallelized(pipe, {"ulysses": 2}):
        draw(pipe, arguments("flux", [1], true_cfg_scale=1.0))
        assert "_should_compute_remaining_blocks" in vars(head)
    same = vars(head).keys() == before.keys()
    pipe.transformer.disable_cache()
    return same


def test_restore_leaves_the_cache_as_it_was(ranks):
    assert ranks(2).run(restored) == [True, True]


def test_versions():
    """The hooks this relies on are there in the installed diffusers."""
    from diffusers.hooks import first_block_cache

    assert hasattr(first_block_cache.FBCHeadBlockHook, "_should_compute_remaining_blocks"), diffusers.__version__
    assert torch.__version__

"""diffusers' caches on several ranks: the decisions, and so the pictures, of one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


def without_residual() -> list[bool]:
    """The decisions of a head block that adds nothing, with ranks and as diffusers takes them."""
    pipe = MAKERS["flux"]()
    model = pipe.transformer
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    head = model.transformer_blocks[0]._diffusers_hook.hooks["fbc_leader_block_hook"]
    state = SimpleNamespace(head_block_residual=None)
    head.state_manager = SimpleNamespace(get_state=lambda: state, reset=lambda: None)
    zero, one, bad = torch.zeros(1, 4, 8), torch.ones(1, 4, 8), torch.full((1, 4, 8), torch.nan)
    pairs = [(zero, zero), (zero, one), (one, zero), (one, bad)]
    found = []
    with ditmesh.parallelized(pipe, {"ulysses": 2}):
        (caches,) = [one for one in ditmesh.engine_of(pipe).strategies if one.name == "caches"]
        for before, now in pairs:
            state.head_block_residual = before
            alone = head._should_compute_remaining_blocks(now)
            patch = caches._agree(head)
            found += [alone, head._should_compute_remaining_blocks(now)]
            patch.undo()
    model.disable_cache()
    return found


def test_without_a_residual_the_decision_is_that_of_diffusers(ranks):
    for found in ranks(2).run(without_residual):
        assert found[::2] == found[1::2]


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

"""Attention over ranks: kernels by name, by-passes that are refused, no waiting for the device, partitions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ditmesh
from ditmesh.attention import kernels, masks
from ditmesh.attention.kernels import lse
from ditmesh.core.partition import Partition
from ditmesh.errors import ConfigError, DitmeshError, LayoutError
from support.models import RAGGED, inputs, relative_error, run, tiny, variant
from support.parity import parity
from support.sample import sampled

TOLERANCE = 1e-5


def spelt_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Softmax attention of (B, H, S, D) without torch's function."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v


# --- by-passes -------------------------------------------------------------------------------------------------------


FLUX = "diffusers.models.transformers.transformer_flux.dispatch_attention_fn"


def own(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return spelt_out(q, k, v, attn_mask).transpose(1, 2)


class OwnProcessor:
    """A processor that does all as the one before, and computes attention by itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with mock.patch(FLUX, own):
            return self.inner(*args, **kwargs)


def one_processor(model: Any) -> Callable[[], None]:
    attention = model.transformer_blocks[1].attn
    before = attention.processor
    attention.processor = OwnProcessor(before)
    return lambda: setattr(attention, "processor", before)


def plug_in(_: Any) -> Callable[[], None]:
    before = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, scale: Any = None, **_: Any) -> Tensor:
        return spelt_out(query, key, value, attn_mask, scale)

    F.scaled_dot_product_attention = attend
    return lambda: setattr(F, "scaled_dot_product_attention", before)


def module(_: Any) -> Callable[[], None]:
    patch = mock.patch(FLUX, own)
    patch.start()
    return patch.stop


BY_PASSES = {"one processor": one_processor, "plug-in": plug_in, "module": module}


def by_passed(how: str, config: dict[str, Any], cache: bool = False) -> tuple[str | None, float, float]:
    """What a call says whose attention is by-passed after `parallelize`, and errors of the calls before and after."""
    model, arguments = variant("Flux"), inputs("Flux", RAGGED)
    truth = run(model, arguments)
    said = None
    if cache:
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.0))
    with ditmesh.parallelized(model, config):
        before = relative_error(called(model, arguments, cache), truth)
        undo = BY_PASSES[how](model)
        try:
            called(model, arguments, cache)
        except DitmeshError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            undo()
        after = relative_error(called(model, arguments, cache), truth)
    if cache:
        model.disable_cache()
    return said, before, after


def called(model: Any, arguments: dict[str, Any], cache: bool) -> Tensor:
    if not cache:
        return run(model, arguments)
    with model.cache_context("cond"):
        return run(model, arguments)


@pytest.mark.parametrize(("how", "config"), sampled(BY_PASSES, [{"ulysses": 2}, {"ring": 2}], of=2), ids=str)
def test_attention_that_is_computed_elsewhere_is_an_error_on_all_ranks(ranks, how, config):
    for said, before, after in ranks(2).run(by_passed, how, config):
        assert said is not None
        assert said.startswith("LayoutError: ")
        assert "transformer_blocks" in said or how == "plug-in"
        assert max(before, after) <= TOLERANCE


STALE = [{"ring": 2, "exchange": name} for name in ("displaced", "naive")]


@pytest.mark.parametrize(
    "config", [*STALE, {"ulysses": 2, "reproducible": True}, {"reproducible": True}, {"patches": 2}], ids=str
)
def test_every_strategy_notices(ranks, config):
    for said, *_ in ranks(config.get("ulysses", config.get("ring", 1))).run(by_passed, "module", config):
        assert said is not None
        assert said.startswith("LayoutError: ")


def test_a_cache_that_leaves_blocks_out_hides_nothing(ranks):
    for said, *_ in ranks(2).run(by_passed, "one processor", {"ulysses": 2}, True):
        assert said is not None
        assert said.startswith("LayoutError: ")


# --- kernels ---------------------------------------------------------------------------------------------------------


class Plain:
    """A kernel that somebody else has written; it does not return its LSE."""

    name, deterministic = "plain", False
    calls = 0

    def supports(self, q_bhsd: Tensor, mask: Tensor | None) -> bool:
        return q_bhsd.dtype == torch.float32

    def attend(self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Any, scale: Any) -> Tensor:
        type(self).calls += 1
        # What it calls is its own business.
        assert F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd).shape == q_bhsd.shape
        return spelt_out(q_bhsd, k_bhsd, v_bhsd, mask, scale)


class Telling(Plain):
    """One that does."""

    name, deterministic = "telling", True

    def attend_with_lse(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Any, scale: Any
    ) -> tuple[Tensor, Tensor]:
        type(self).calls += 1
        bias = None if mask is None else lse.additive(mask, torch.float32)
        return kernels.attend_with_lse_reference(q_bhsd, k_bhsd, v_bhsd, bias, scale)


def with_kernels(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """What a function returns, or a message, while two more kernels are known; and how often they were called."""
    Plain.calls = Telling.calls = 0
    with mock.patch.dict(kernels.KERNELS):
        for kernel in (Plain(), Telling()):
            kernels.register(kernel)
        try:
            found = function(*arguments)
        except DitmeshError as error:
            found = f"{type(error).__name__}: {error}"
    return found, Plain.calls + Telling.calls


PLAIN = [{**config, "attention": "plain"} for config in ({"ulysses": 2}, STALE[0], {"pipe": 2})]
TELLING = [{**config, "attention": "telling"} for config in ({"ring": 2}, {"ulysses": 2, "reproducible": True})]


@pytest.mark.parametrize("name", ["SD3", pytest.param("PixArt", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("config", [*PLAIN, *TELLING], ids=str)
def test_a_kernel_from_outside(ranks, name, config):
    for result, calls in ranks(2).run(with_kernels, parity, name, config, RAGGED):
        assert result["error"] <= TOLERANCE
        assert calls > 0


def test_what_a_kernel_cannot_do_is_refused_by_name(ranks):
    for config, words in (
        ({"ring": 2, "attention": "plain"}, ("'plain'", "log-sum-exp", "ulysses=2", "'native' or 'math' or 'telling'")),
        ({"ulysses": 2, "reproducible": True, "attention": "plain"}, ("'plain'", "same bits", "'native'")),
        ({"ulysses": 2, "attention": "none"}, ("'none'", "'native' or 'math' or 'plain' or 'telling'", "register")),
    ):
        for said, calls in ranks(2).run(with_kernels, parity, "SD3", config, RAGGED):
            assert said.startswith("ConfigError: ")
            assert all(word in said for word in words), said
            assert calls == 0
    local = kernels.LocalAttention(Plain())
    half = torch.zeros(1, 1, 2, 8, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"attention='plain' does not support queries of .* in torch.float16 on cpu"):
        local(half, half, half)
    with mock.patch.dict(kernels.KERNELS):
        kernels.register(found := Plain())
        kernels.register(found)
        with pytest.raises(ConfigError, match="there is an attention kernel 'plain'"):
            kernels.register(Plain())


def with_plug_in(name: str, config: dict[str, Any]) -> tuple[Any, int]:
    """`parity` where the program has put a function of its own in the place of torch's; how often it was called."""
    calls = []

    def sage(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, scale: Any = None, **_: Any) -> Tensor:
        calls.append(1)
        return spelt_out(query, key, value, attn_mask, scale)

    with mock.patch.object(F, "scaled_dot_product_attention", sage):
        model, arguments = tiny(name), inputs(name, RAGGED)
        truth = run(model, arguments)
        calls.clear()
        try:
            with ditmesh.parallelized(model, config):
                found = relative_error(run(model, arguments), truth)
        except DitmeshError as error:
            found = str(error)
    return found, len(calls)


def test_a_plug_in_that_was_there_before_computes_in_blocks_too(ranks):
    for error, calls in ranks(2).run(with_plug_in, "Flux", {"ulysses": 2}):
        assert error <= TOLERANCE
        assert calls > 0
    for config, words in (({"ring": 2}, "log-sum-exp"), ({"ulysses": 2, "reproducible": True}, "same bits")):
        for said, calls in ranks(2).run(with_plug_in, "Flux", config):
            assert "sage, which replaces torch's scaled_dot_product_attention, does not" in said
            assert words in said
            assert calls == 0
    for error, calls in ranks(2).run(with_plug_in, "Flux", {"ring": 2, "attention": "math"}):
        assert error <= TOLERANCE
        assert calls == 0


def test_lse_where_torch_has_renamed_its_kernels():
    q, k = torch.randn(2, 3, 7, 16), torch.randn(2, 3, 11, 16)
    mask = torch.rand(2, 1, 7, 11) > 0.3
    out, told = kernels.attend_with_lse(q, k, k, mask)
    with mock.patch.object(lse, "fused", return_value=None):
        again, told_again = kernels.attend_with_lse(q, k, k, mask)
    torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(told_again, told, rtol=1e-5, atol=1e-6)
    assert lse.fused("_scaled_dot_product_flash_attention_for_cpu") is not None
    assert lse.fused("_an_attention_of_another_release") is None


# --- partitions ------------------------------------------------------------------------------------------------------


def test_partitions_of_streams():
    tokens = Partition(((4, 3, 2), (5, 5, 5)), frozenset((1,)), ("image", "text"))
    whole = torch.arange(14)
    assert (tokens.totals, tokens.total, tokens.lengths) == ((9, 5), 14, (9, 8, 7))
    assert tokens.take(whole, 0, 1).tolist() == [4, 5, 6, 9, 10, 11, 12, 13]
    assert tokens.take(whole, 0, range(1, 3)).tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert torch.equal(tokens.join([tokens.take(whole, 0, part) for part in range(3)], 0), whole)
    assert tokens.regroup([range(2), range(2, 3)]).blocks == ((7, 2), (5, 5))
    assert tokens.of(range(1, 3)).blocks == ((3, 2), (5, 5))
    assert tokens.select(("text", "audio", "image")).names == ("text", "image")
    assert tokens.select(("text", "image")).replicated == {0}
    assert tokens.resized("text", 2).lengths == (6, 5, 4)
    assert [tokens.first(5, part) for part in range(3)] == [4, 1, 0]
    assert tokens.first(3, 2, block=1) == 3
    assert (tokens.start(2), tokens.start(2, block=1)) == (7, 9)
    assert tokens == Partition(((4, 3, 2), (5, 5, 5)), frozenset((1,)), ("image", "text"))


def test_masks_are_those_of_their_queries_heads_and_keys():
    """What a rank takes of a mask of all tokens, and what ranks make together of masks of their own."""
    tokens, mask = Partition(((4, 3, 2),)), torch.rand(2, 6, 9, 9)
    assert torch.equal(masks.of_queries(mask, tokens, range(1, 3)), mask[:, :, 4:])
    assert masks.of_queries(mask[:, :, :1], tokens, range(1, 3)).shape == (2, 6, 1, 9)
    assert torch.equal(masks.of_heads(mask, 2, 3), mask[:, 2:5])
    assert torch.equal(masks.of_own_keys(mask, tokens, tokens, 1), mask[:, :, 4:7, 4:7])
    kept = torch.rand(2, 1, 1, 9)
    parts = kept.split(tokens.lengths, 3)
    link: Any = SimpleNamespace(rank=2, size=3, all_gather=lambda piece, lengths, dim: torch.cat(parts, dim))
    assert torch.equal(masks.whole_keys(parts[2], tokens, link), kept)
    # A block that builds the product of what each token has.
    flags = (kept > 0.5).float()
    parts = flags.split(tokens.lengths, 3)
    own = parts[2].transpose(-1, -2) * parts[2]
    whole = masks.everywhere(own, tokens, tokens, link, range(2, 3))
    assert torch.equal(whole, (flags.transpose(-1, -2) * flags)[:, :, 7:])
    with pytest.raises(LayoutError, match="no outer product"):
        masks.everywhere(own + torch.eye(2).flip(0), tokens, tokens, link, range(2, 3))

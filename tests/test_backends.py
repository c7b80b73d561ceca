"""Attention backends of diffusers over ranks: those that a CPU can run, and stand-ins for those that it cannot."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models import attention_dispatch as dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

import ditmesh
from ditmesh.attention import kernels
from ditmesh.attention.kernels import attend_with_lse_reference, backends, local_attention
from ditmesh.errors import ConfigError, DitmeshError, LayoutError
from support.models import RAGGED, inputs, relative_error, run, tiny
from support.pipelines import arguments, draw, flux

TOLERANCE = 1e-5


# --- stand-ins -------------------------------------------------------------------------------------------------------
# With the signatures of the real functions, their layouts and what they tell, computed in float32.

CALLS: list[tuple[str, dict[str, Any]]] = []


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Output (B, S, H, D) and LSE (B, H, S) of tensors (B, S, H, D)."""
    assert not causal
    out, lse = attend_with_lse_reference(*(t.transpose(1, 2) for t in (q, k, v)), None, scale)
    return out.transpose(1, 2).contiguous(), lse


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert dropout_p == 0
    assert window_size == (-1, -1)
    CALLS.append(("flash", {"q": q.shape, "k": k.shape, "scale": softmax_scale}))
    out, lse = attended(q, k, v, softmax_scale, causal)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_3_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    CALLS.append(("_flash_3", {"q": q.shape, "k": k.shape, "scale": softmax_scale}))
    out, lse = attended(q, k, v, softmax_scale, causal)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Tensors (all tokens, H, D); the LSE is (H, all queries), and +inf for a query without a key."""
    CALLS.append(("flash_varlen", {"q": q.shape, "k": k.shape, "scale": softmax_scale}))
    outs, told = [], []
    for q_start, q_end, k_start, k_end in zip(
        cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
    ):
        one = (t[None, a:b] for t, a, b in ((q, q_start, q_end), (k, k_start, k_end), (v, k_start, k_end)))
        out, lse = attended(*one, softmax_scale, causal)
        outs.append(out[0].nan_to_num())
        told.append(lse[0].masked_fill(lse[0] == -torch.inf, torch.inf))
    out = torch.cat(outs)
    return (out, torch.cat(told, dim=1), None) if return_attn_probs else out


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    assert tensor_layout == "NHD"
    assert not kwargs
    CALLS.append(("sage", {"q": q.shape, "k": k.shape, "scale": sm_scale}))
    out, lse = attended(q, k, v, sm_scale, is_causal)
    return (out, lse) if return_lse else out


class Xops:
    """Of xformers."""

    @staticmethod
    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
        CALLS.append(("xformers", {"q": query.shape, "k": key.shape, "scale": scale}))
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return attend_with_lse_reference(q, k, v, attn_bias, scale)[0].transpose(1, 2)


HUB = {
    "flash_hub": flash_attn_func,
    "_flash_3_hub": flash_attn_3_func,
    "flash_varlen_hub": flash_attn_varlen_func,
    "sage_hub": sageattn,
}
STAND_INS = {
    "flash": {"_CAN_USE_FLASH_ATTN": True, "flash_attn_func": flash_attn_func},
    "flash_varlen": {"_CAN_USE_FLASH_ATTN": True, "flash_attn_varlen_func": flash_attn_varlen_func},
    "_flash_3": {
        "_CAN_USE_FLASH_ATTN_3": True,
        "flash_attn_3_func": flash_attn_3_func,
        # The operator has no implementation on the CPU; what it calls is the same.
        "_wrapped_flash_attn_3": dispatch._wrapped_flash_attn_3._init_fn,
    },
    "sage": {"_CAN_USE_SAGE_ATTN": True, "sageattn": sageattn},
    "xformers": {"_CAN_USE_XFORMERS_ATTN": True, "xops": Xops},
}
TELLING = ["flash", "_flash_3", "sage", "flash_hub", "_flash_3_hub", "sage_hub", "flash_varlen_hub"]
SILENT = ["flash_varlen", "xformers"]


@contextmanager
def installed(name: str, checks: bool = False) -> Iterator[None]:
    """A stand-in is what diffusers' function of a backend calls; ``checks``: with diffusers' checks of tensors."""
    member = AttentionBackendName(name)
    with ExitStack() as undo:
        for attribute, value in STAND_INS.get(name, {}).items():
            undo.enter_context(mock.patch.object(dispatch, attribute, value))
        if name in HUB:
            # What has been fetched is not fetched again.
            fetched = dict.fromkeys(("kernel_fn", "wrapped_forward_fn", "wrapped_backward_fn"), HUB[name])
            undo.enter_context(mock.patch.multiple(dispatch._HUB_KERNELS_REGISTRY[member], **fetched))
            undo.enter_context(mock.patch.object(dispatch, "is_kernels_available", return_value=True))
            undo.enter_context(mock.patch.object(dispatch, "is_kernels_version", return_value=True))
        if name in STAND_INS or name in HUB:
            if not checks:
                undo.enter_context(mock.patch.dict(_AttentionBackendRegistry._constraints, {member: []}))
        else:
            real = _AttentionBackendRegistry._backends[member]

            @functools.wraps(real)
            def counted(*args: Any, **kwargs: Any) -> Any:
                CALLS.append((name, {}))
                return real(*args, **kwargs)

            undo.enter_context(mock.patch.dict(_AttentionBackendRegistry._backends, {member: counted}))
            lse = backends.TRAITS[name].lse
            if callable(lse):

                def told(*call: Any) -> Any:
                    CALLS.append((name, {}))
                    return lse(*call)

                traits = {name: backends.Traits("any", told, deterministic=backends.TRAITS[name].deterministic)}
                undo.enter_context(mock.patch.dict(backends.TRAITS, traits))
        # Setting a backend on a model sets it for the process.
        undo.callback(_AttentionBackendRegistry.set_active_backend, _AttentionBackendRegistry._active_backend)
        yield


# --- parity ----------------------------------------------------------------------------------------------------------

BEFORE, AFTER, CONFIGURED = "before", "after", "configured"


def with_backend(
    name: str,
    config: dict[str, Any],
    how: str = CONFIGURED,
    model_name: str = "Flux",
    checks: bool = False,
    masks: bool = False,
) -> dict[str, Any]:
    """A forward with a backend against the unmodified model; or what was said, and by then how often it was called."""
    model, given = tiny(model_name), inputs(model_name, RAGGED, masks)
    truth = run(model, given)
    found: dict[str, Any] = {}
    with installed(name, checks):
        CALLS.clear()
        registry, active = dict(_AttentionBackendRegistry._backends), _AttentionBackendRegistry._active_backend
        if how == BEFORE:
            model.set_attention_backend(name)
        own = [getattr(module.processor, "_attention_backend", None) for module in attentions(model)]
        try:
            with ditmesh.parallelized(model, {**config, **({"attention": name} if how == CONFIGURED else {})}):
                if how == AFTER:
                    model.set_attention_backend(name)
                found["error"] = relative_error(run(model, given), truth)
                found["calls"] = [(kind, call) for kind, call in CALLS]
                found["warm"] = relative_error(run(model, given), truth)
        except DitmeshError as error:
            found |= {"said": f"{type(error).__name__}: {error}", "calls": [*CALLS]}
        found["restored"] = dict(_AttentionBackendRegistry._backends) == registry and (
            how == AFTER
            or [getattr(module.processor, "_attention_backend", None) for module in attentions(model)] == own
        )
        found["active"] = _AttentionBackendRegistry._active_backend == active or how != CONFIGURED
        model.reset_attention_backend()
    found["after"] = relative_error(run(model, given), truth)
    return found


def attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "processor", None) is not None]


def check(found: dict[str, Any], kind: str, least: int = 1) -> None:
    assert "said" not in found, found["said"]
    assert max(found["error"], found["after"]) <= TOLERANCE
    assert sum(name == kind for name, _ in found["calls"]) >= least
    assert found["restored"]
    assert found["active"]


@pytest.mark.parametrize("how", [BEFORE, AFTER, CONFIGURED])
@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}], ids=str)
@pytest.mark.parametrize("name", ["_native_math", "flex"])
def test_a_backend_computes_on_every_rank(ranks, name, config, how):
    if name == "flex" and how == AFTER:
        how = BEFORE if config.get("ring") else AFTER
    for found in ranks(2).run(with_backend, name, config, how):
        check(found, name, least=4)


@pytest.mark.parametrize(
    "config",
    [
        {"ring": 2, "exchange": "displaced"},
        {"pipe": 2},
        {"cfg": 2},
        {"data": 2},
        {"tensor": 2},
        {"ulysses": 2, "compile": "eager"},
        {"data": 2, "compile": "eager"},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [BEFORE, CONFIGURED])
def test_every_strategy_takes_a_backend(ranks, config, how):
    for found in ranks(2).run(with_backend, "_native_math", config, how):
        check(found, "_native_math")


@pytest.mark.parametrize("model", ["SD3", "PixArt", "QwenImage"])
def test_processors_that_do_not_ask_for_backends_have_them_configured(ranks, model):
    for found in ranks(2).run(with_backend, "flex", {"ulysses": 2}, CONFIGURED, model, False, True):
        check(found, "flex")


KIND = {"flash_hub": "flash", "_flash_3_hub": "_flash_3", "sage_hub": "sage", "flash_varlen_hub": "flash_varlen"}


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_backends_that_tell_their_lse(ranks, config):
    for name in TELLING:
        for found in ranks(2).run(with_backend, name, config, BEFORE if name == "flash" else CONFIGURED):
            check(found, KIND.get(name, name), least=4)
            if name in ("flash", "_flash_3", "sage"):
                shapes = {(call["q"], call["k"]) for _, call in found["calls"]}
                # (B, S, H, D): all 96 tokens and 4 of 8 heads, or half the tokens and all heads.
                whole, half = (torch.Size((2, *shape)) for shape in ((96, 4, 16), (48, 8, 16)))
                assert shapes == ({(whole, whole)} if "ulysses" in config else {(half, half)})


def test_backends_that_do_not_tell_it(ranks):
    for name in SILENT:
        for found in ranks(2).run(with_backend, name, {"ulysses": 2}):
            check(found, name)
        for how in (BEFORE, AFTER, CONFIGURED):
            for found in ranks(2).run(with_backend, name, {"ring": 2}, how):
                assert found["said"].startswith(f"ConfigError: attention={name!r} does not tell the log-sum-exp"), found
                assert "ulysses=2" in found["said"]
                assert not found["calls"]
                assert found["after"] <= TOLERANCE
                assert found["restored"]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [BEFORE, AFTER, CONFIGURED])
def test_what_a_backend_does_not_take_is_refused_by_name(ranks, how):
    for found in ranks(2).run(with_backend, "flash", {"ulysses": 2}, how, "Flux", True):
        assert "attention='flash' does not support queries of" in found["said"]
        assert "torch.float32" in found["said"]
        assert not found["calls"]
        # Before any rank works, where it can be known.
        assert found["said"].startswith("LayoutError" if how == AFTER else "ConfigError")


def test_masks_that_a_backend_does_not_take(ranks):
    for found in ranks(2).run(with_backend, "flash", {"ulysses": 2}, CONFIGURED, "Flux", False, True):
        assert "attention='flash' does not support queries of" in found["said"]
        assert " mask of " in found["said"]


@pytest.mark.parametrize("name", ["flash", "_flash_3", "sage", "xformers", "flash_hub"])
def test_what_is_not_installed_is_refused(name):
    with pytest.raises(ConfigError, match=rf"^attention='{name}' cannot be used here: .*; or use attention='native'$"):
        local_attention(name)
    with pytest.raises(ConfigError, match=rf"'{name}' cannot be used here"):
        ditmesh.parallelize(tiny("Flux"), {"attention": name})


def test_names(ranks):
    with pytest.raises(ConfigError, match=r"attention='flsh' is no kernel.*_flash_3.*; did you mean 'flash'\?$"):
        local_attention("flsh")
    # All backends that diffusers has are known here.
    assert set(kernels.known()) | {"native"} == {member.value for member in AttentionBackendName}
    for name in ("_native_cudnn", "_native_efficient"):
        with pytest.raises(ConfigError, match=rf"'{name}' does not support queries of .* on cpu"):
            ditmesh.parallelize(tiny("Flux"), {"attention": name})


def overruled(model: Any) -> str:
    with installed("flex"), ditmesh.parallelized(model, {"ulysses": 2, "attention": "_native_math"}):
        model.set_attention_backend("flex")
        try:
            run(model, inputs("Flux", RAGGED))
        except DitmeshError as error:
            return str(error)
        finally:
            model.reset_attention_backend()
    return ""


def test_a_backend_that_is_set_beside_a_configured_one(ranks):
    for said in ranks(2).run(lambda: overruled(tiny("Flux"))):
        assert "asks for the attention backend 'flex', but attention='_native_math' was configured" in said


def block_mask() -> str:
    from torch.nn.attention.flex_attention import create_block_mask

    model, given = tiny("Flux"), inputs("Flux", RAGGED)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 96, 96, device="cpu")
    real = "diffusers.models.transformers.transformer_flux.dispatch_attention_fn"
    with installed("flex"), ditmesh.parallelized(model, {"ulysses": 2}):
        model.set_attention_backend("flex")
        masked = functools.partial(dispatch.dispatch_attention_fn)

        def sparse(*args: Any, **kwargs: Any) -> Any:
            return masked(*args, **{**kwargs, "attn_mask": mask})

        try:
            with mock.patch(real, sparse):
                run(model, given)
        except DitmeshError as error:
            return str(error)
        finally:
            model.reset_attention_backend()
    return ""


def test_sparse_masks_are_refused_by_name(ranks):
    for said in ranks(2).run(block_mask):
        assert "a mask of type BlockMask (backend 'flex')" in said


def on_one_rank(rank: int) -> str:
    pipe = flux()
    with installed("_native_math"), ditmesh.parallelized(pipe, {"ulysses": 2}):
        draw(pipe, arguments("flux", [1]))
        if rank == 1:
            pipe.transformer.set_attention_backend("_native_math")
        try:
            draw(pipe, arguments("flux", [1]))
        except DitmeshError as error:
            return str(error)
        finally:
            pipe.transformer.reset_attention_backend()
    return ""


def as_rank() -> str:
    import torch.distributed as dist

    return on_one_rank(dist.get_rank())


def test_a_backend_that_is_set_on_one_rank_only(ranks):
    for said in ranks(2).run(as_rank):
        assert "the ranks disagree on transformer settings (rank 1 differs from rank 0): attention backend" in said


# --- bits ------------------------------------------------------------------------------------------------------------


def bits(config: dict[str, Any], name: str) -> Any:
    model = tiny("Flux")
    try:
        with installed(name), ditmesh.parallelized(model, {**config, "reproducible": True, "attention": name}):
            return run(model, inputs("Flux", RAGGED))
    except DitmeshError as error:
        return str(error)


def test_only_torch_s_math_is_reproducible(ranks):
    (truth,) = ranks(1).run(bits, {}, "_native_math")
    for config in ({"ulysses": 2}, {"ring": 2}):
        for found in ranks(2).run(bits, config, "_native_math"):
            assert torch.equal(found, truth)
    for name in ("flex", "flash"):
        for said in ranks(2).run(bits, {"ulysses": 2}, name):
            assert f"attention={name!r} does not promise the same bits" in said


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_varlen_hub", "flex", "_native_math"])
def test_lse_with_masks_and_without_keys(name):
    q, k, v = torch.randn(2, 3, 7, 16), torch.randn(2, 3, 11, 16), torch.randn(2, 3, 11, 16)
    mask = torch.ones(2, 1, 1, 11, dtype=torch.bool)
    mask[0, ..., 2:5] = False
    # The second sample sees no key.
    mask[1] = False
    truth = attend_with_lse_reference(q, k, v, kernels.lse.additive(mask, torch.float32), 0.3)
    with installed(name):
        local = local_attention(name, ring=2)
        out, lse = local.with_lse(q, k, v, mask, 0.3)
        torch.testing.assert_close(out, truth[0])
        torch.testing.assert_close(lse, truth[1])
        torch.testing.assert_close(local(q, k, v, mask, 0.3)[0], truth[0][0])
        none = local.with_lse(q, k[:, :, :0], v[:, :, :0])
        assert not none[0].any()
        assert (none[1] == -torch.inf).all()


def test_a_mask_with_holes_where_visible_keys_have_to_come_first():
    q = torch.randn(1, 2, 4, 16)
    mask = torch.tensor([True, True, False, False])[None, None, None]
    with installed("flash_varlen"):
        local = local_attention("flash_varlen")
        truth = attend_with_lse_reference(q, q[:, :, :2], q[:, :, :2], None, None)[0]
        torch.testing.assert_close(local(q, q, q, mask), truth)
        with pytest.raises(LayoutError, match="'flash_varlen' does not support"):
            local(q, q, q, mask.flip(-1))


def test_an_lse_of_another_shape_is_refused():
    q = torch.randn(1, 2, 4, 16)
    wrong = mock.Mock(return_value=(q.transpose(1, 2), torch.zeros(1, 4, 2), None))
    said = pytest.raises(LayoutError, match=r"'flash' told its log-sum-exp as \(1, 4, 2\) where \(1, 2, 4\)")
    with installed("flash"), mock.patch.object(dispatch, "flash_attn_func", wrong), said:
        local_attention("flash", ring=2).with_lse(q, q, q)

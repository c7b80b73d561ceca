"""Attention backends of diffusers over ranks: those that a CPU can run, and stand-ins for those that it cannot."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from ditmesh.attention.kernels import lse as torch_lse
from ditmesh.errors import ConfigError, DitmeshError, LayoutError
from support.models import RAGGED, inputs, relative_error, run, tiny
from support.sample import sampled

TOLERANCE = 1e-5


# --- stand-ins -------------------------------------------------------------------------------------------------------
# With the signatures of the real functions, their layouts and what they return, computed in float32.

CALLS: list[tuple[str, dict[str, Any]]] = []


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Output (B, S, H, D) and LSE (B, H, S) of tensors (B, S, H, D)."""
    assert not causal
    out, lse = attend_with_lse_reference(*(t.transpose(1, 2) for t in (q, k, v)), None, scale)
    return out.transpose(1, 2).contiguous(), lse


# Parameters that diffusers may set; all others have to be left at their defaults.
SET = {"q", "k", "v", "softmax_scale", "sm_scale", "return_attn_probs", "return_lse", "deterministic", "kwargs"}
SET |= {"tensor_layout"}


def stand_in(name: str, parameters: str, behind: tuple[Any, ...] = (), options: Iterable[str] = ()) -> Any:
    """A package's function with these parameters, for tensors (B, S, H, D).

    Args:
        behind: what it returns behind the LSE.
        options: further keywords that it takes, which diffusers leaves alone.
    """
    bound: Any = eval(f"lambda {parameters}: locals()")
    defaults = {one.name: one.default for one in inspect.signature(bound).parameters.values()}

    def function(*args: Any, **kwargs: Any) -> Any:
        given = bound(*args, **kwargs)
        scale, causal = given.get("softmax_scale", given.get("sm_scale")), given.get("causal", given.get("is_causal"))
        assert all(value == defaults[one] for one, value in given.items() if one not in SET), given
        assert given.get("tensor_layout", "NHD") == "NHD"
        assert not given.get("kwargs", {}).keys() - {*options}
        q, k, v = given["q"], given["k"], given["v"]
        CALLS.append((name, {"q": q.shape, "k": k.shape, "scale": scale}))
        out, lse = attended(q, k, v, scale, causal)
        return (out, lse, *behind) if given.get("return_attn_probs") or given.get("return_lse") else out

    return function


FLASH = "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False"
FLASH_3 = "causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
FLASH_3 += "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
FLASH_3 += "return_attn_probs=False"
SAGE = "q, k, v, tensor_layout='HND', is_causal=False, sm_scale=None, return_lse=False, **kwargs"

flash_attn_func = stand_in("flash", f"q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, {FLASH}", (None,))
flash_attn_3_func = stand_in("_flash_3", f"q, k, v, softmax_scale=None, {FLASH_3}")
aiter_flash_attn_func = stand_in(
    "aiter_fa2",
    "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1, 0), bias=None, alibi_slopes=None, "
    "deterministic=True, return_lse=False, return_attn_probs=False",
)
sageattn = stand_in("sage", SAGE)


def flash_attn_4_func(
    q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, **kwargs
):
    """Returns a pair always; without a gradient to compute there is no LSE in it."""
    assert not kwargs
    CALLS.append(("flash_4", {"q": q.shape, "k": k.shape, "scale": softmax_scale}))
    return attended(q, k, v, softmax_scale, causal)[0], None


def sdpa_kernel_of(name: str) -> Callable[..., Any]:
    """Of torch: which kernel its attention may take. Here any may, that of the CPU."""

    @contextmanager
    def sdpa_kernel(backends: Any, set_priority: bool = False) -> Iterator[None]:
        assert backends == SDPA[name]
        CALLS.append((name, {}))
        yield

    return sdpa_kernel


SDPA = {
    "_native_cudnn": torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
    "_native_efficient": torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
    "_native_flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
}


def cudnn_operator(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    """Of aten: the LSE is (B, H, S, 1), and the rest is for its gradient."""
    assert compute_log_sumexp
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
    assert all(tensor.is_contiguous() for tensor in (query, key, value))
    out, lse = attend_with_lse_reference(query, key, value, attn_bias, scale)
    return out, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], None, None, None


def efficient_operator(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    """Of aten: rows of the bias begin at multiples of 16 bytes, and the LSE is padded to multiples of 32 queries."""
    assert compute_log_sumexp
    assert (dropout_p, is_causal) == (0.0, False)
    if attn_bias is not None:
        assert attn_bias.shape == (*query.shape[:3], key.shape[2])
        assert attn_bias.stride(-1) == 1
        assert all(stride * attn_bias.element_size() % 16 == 0 for stride in attn_bias.stride()[:-1])
    out, lse = attend_with_lse_reference(query, key, value, attn_bias, scale)
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.nan)
    padded[..., : lse.shape[2]] = lse
    return out, padded, None, None


def flash_operator(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Of aten, which takes float16 and bfloat16."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
    out, lse = attend_with_lse_reference(query, key, value, None, scale)
    return out, lse, None, None, query.shape[2], key.shape[2], None, None, None


OPERATORS = {
    "_scaled_dot_product_cudnn_attention": cudnn_operator,
    "_scaled_dot_product_efficient_attention": efficient_operator,
    "_scaled_dot_product_flash_attention": flash_operator,
}


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
    "sage_hub": sageattn,
    "aiter_fa2_hub": aiter_flash_attn_func,
    "flash_4_hub": flash_attn_4_func,
}
SAGE_QK = {
    "_sage_qk_int8_pv_fp8_cuda": {"qk_quant_gran", "pv_accum_dtype", "smooth_k", "smooth_v"},
    "_sage_qk_int8_pv_fp8_cuda_sm90": {"qk_quant_gran", "pv_accum_dtype", "smooth_k"},
    "_sage_qk_int8_pv_fp16_cuda": {"qk_quant_gran", "pv_accum_dtype", "smooth_k", "smooth_v"},
    "_sage_qk_int8_pv_fp16_triton": {"quantization_backend", "smooth_k"},
}
STAND_INS = {
    "flash": {"_CAN_USE_FLASH_ATTN": True, "flash_attn_func": flash_attn_func},
    "_flash_3": {
        "_CAN_USE_FLASH_ATTN_3": True,
        "flash_attn_3_func": flash_attn_3_func,
        # The operator has no implementation on the CPU; what it calls is the same.
        "_wrapped_flash_attn_3": dispatch._wrapped_flash_attn_3._init_fn,
    },
    "sage": {"_CAN_USE_SAGE_ATTN": True, "sageattn": sageattn},
    "xformers": {"_CAN_USE_XFORMERS_ATTN": True, "xops": Xops},
    **{
        name: {"_CAN_USE_SAGE_ATTN": True, name.replace("_sage_", "sageattn_"): stand_in(name, SAGE, (), SAGE_QK[name])}
        for name in SAGE_QK
    },
}
WITH_LSE = [
    *("flash", "_flash_3", "sage", "flash_hub", "_flash_3_hub", "sage_hub", "aiter_fa2_hub"),
    *(*SAGE_QK, *SDPA),
]
WITHOUT_LSE = ["xformers", "flash_4_hub"]


@contextmanager
def installed(name: str, checks: bool = False) -> Iterator[None]:
    """A stand-in is what diffusers' function of a backend calls; ``checks``: with diffusers' checks of tensors."""
    # A model that was dropped without `restore` has the registry intercepted until it is collected: not in between.
    gc.collect()
    member = AttentionBackendName(name)
    with ExitStack() as undo:
        for attribute, value in STAND_INS.get(name, {}).items():
            undo.enter_context(mock.patch.object(dispatch, attribute, value))
        if name in SDPA:
            undo.enter_context(mock.patch.object(torch.nn.attention, "sdpa_kernel", sdpa_kernel_of(name)))
            undo.enter_context(mock.patch.dict(backends.TRAITS, {name: replace(backends.TRAITS[name], cuda=False)}))
            if name == "_native_cudnn":
                undo.enter_context(mock.patch.object(torch_lse, "fused", OPERATORS.get))
        if name in HUB:
            # What has been fetched is not fetched again.
            fetched = dict.fromkeys(("kernel_fn", "wrapped_forward_fn", "wrapped_backward_fn"), HUB[name])
            undo.enter_context(mock.patch.multiple(dispatch._HUB_KERNELS_REGISTRY[member], **fetched))
            undo.enter_context(mock.patch.object(dispatch, "is_kernels_available", return_value=True))
            undo.enter_context(mock.patch.object(dispatch, "is_kernels_version", return_value=True))
        if (name in STAND_INS or name in HUB or name in SDPA) and not checks:
            undo.enter_context(mock.patch.dict(_AttentionBackendRegistry._constraints, {member: []}))
        if name not in STAND_INS and name not in HUB:
            real = _AttentionBackendRegistry._backends[member]

            @functools.wraps(real)
            def counted(*args: Any, **kwargs: Any) -> Any:
                CALLS.append((name, {}))
                return real(*args, **kwargs)

            undo.enter_context(mock.patch.dict(_AttentionBackendRegistry._backends, {member: counted}))
            with_lse = backends.TRAITS[name].lse
            if callable(with_lse):

                def counted_too(*call: Any) -> Any:
                    CALLS.append((name, {}))
                    return with_lse(*call)

                traits = {name: replace(backends.TRAITS[name], lse=counted_too)}
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
                found["error"] = max(relative_error(run(model, given), truth) for _ in range(2))
                found["calls"] = [(kind, call) for kind, call in CALLS]
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


@pytest.mark.parametrize(
    ("pair", "how"),
    sampled(
        [
            ("_native_math", {"ulysses": 2}),
            ("_native_math", {"ring": 2}),
            ("flex", {"ulysses": 2}),
            ("flex", {"ring": 2}),
        ],
        [BEFORE, AFTER, CONFIGURED],
        of=3,
    ),
    ids=str,
)
def test_a_backend_computes_on_every_rank(ranks, pair, how):
    name, config = pair
    for found in ranks(2).run(with_backend, name, config, how):
        check(found, name, least=4)


@pytest.mark.parametrize(
    ("config", "how"),
    sampled(
        [
            {"ring": 2, "exchange": "displaced"},
            {"pipe": 2},
            {"cfg": 2},
            {"data": 2},
            {"tensor": 2},
            {"ulysses": 2, "compile": "eager"},
        ],
        [BEFORE, CONFIGURED],
        of=2,
    ),
    ids=str,
)
def test_every_strategy_takes_a_backend(ranks, config, how):
    for found in ranks(2).run(with_backend, "_native_math", config, how):
        check(found, "_native_math")


@pytest.mark.parametrize("model", ["SD3", "QwenImage"])
def test_processors_that_do_not_ask_for_backends_have_them_configured(ranks, model):
    for found in ranks(2).run(with_backend, "flex", {"ulysses": 2}, CONFIGURED, model, False, True):
        check(found, "flex")


@pytest.mark.parametrize("config", [pytest.param({"ulysses": 2}, marks=pytest.mark.matrix), {"ring": 2}], ids=str)
def test_backends_with_an_lse(ranks, config):
    for name in WITH_LSE:
        for found in ranks(2).run(with_backend, name, config, BEFORE if name == "flash" else CONFIGURED):
            check(found, name.removesuffix("_hub"), least=4)
            if name in ("flash", "_flash_3", "sage"):
                shapes = {(call["q"], call["k"]) for _, call in found["calls"]}
                # (B, S, H, D): all 96 tokens and 4 of 8 heads, or half the tokens and all heads.
                whole, half = (torch.Size((2, *shape)) for shape in ((96, 4, 16), (48, 8, 16)))
                assert shapes == ({(whole, whole)} if "ulysses" in config else {(half, half)})


def test_all_backends_are_tried():
    assert {*WITH_LSE, *WITHOUT_LSE, "_native_math", "flex"} == {*kernels.known_backends()}


def test_backends_without_an_lse(ranks):
    for name in WITHOUT_LSE:
        for found in ranks(2).run(with_backend, name, {"ulysses": 2}):
            check(found, name.removesuffix("_hub"))
        for how in (BEFORE, AFTER, CONFIGURED) if name == "xformers" else (CONFIGURED,):
            for found in ranks(2).run(with_backend, name, {"ring": 2}, how):
                assert found["said"].startswith(f"ConfigError: attention={name!r} does not return the log-sum-exp")
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
    with pytest.raises(ConfigError, match=r"attention='sage_varlen' is a backend of diffusers that ditmesh does not"):
        local_attention("sage_varlen")
    for name in ("_native_cudnn", "_native_efficient"):
        with pytest.raises(ConfigError, match=rf"'{name}' does not support queries of .* on cpu"):
            ditmesh.parallelize(tiny("Flux"), {"attention": name})


def test_a_backend_that_is_set_beside_a_configured_one(ranks):
    for found in ranks(2).run(with_backend, "flex", {"ulysses": 2, "attention": "_native_math"}, AFTER):
        assert "asks for the attention backend 'flex', but attention='_native_math' was configured" in found["said"]


def bits(config: dict[str, Any]) -> Tensor:
    with ditmesh.parallelized(tiny("Flux"), {**config, "reproducible": True, "attention": "_native_math"}):
        return run(tiny("Flux"), inputs("Flux", RAGGED))


def test_only_torch_s_math_is_reproducible(ranks):
    (truth,) = ranks(1).run(bits, {})
    for config in ({"ulysses": 2}, {"ring": 2}):
        assert all(torch.equal(found, truth) for found in ranks(2).run(bits, config))
    for name in ("flex", "flash"):
        for found in ranks(2).run(with_backend, name, {"ulysses": 2, "reproducible": True}):
            assert f"attention={name!r} does not promise the same bits" in found["said"]


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_native_math", "_native_cudnn", "_native_efficient"])
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


@pytest.mark.parametrize("name", [*WITH_LSE, *WITHOUT_LSE])
def test_scales(name):
    """A scale that is not the usual one is taken."""
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))
    with installed(name):
        local = local_attention(name)
        for scale in (None, 0.25, 0.7):
            truth = attend_with_lse_reference(q, k, v, None, scale)
            torch.testing.assert_close(local(q, k, v, None, scale), truth[0])
            if name in WITH_LSE:
                torch.testing.assert_close(local_attention(name, ring=2).with_lse(q, k, v, None, scale), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_operators_of_torch_on_cuda(masked, dtype):
    """What the ring calls there by default; the operators stand in with what torch declares of them."""
    q, k, v = (torch.randn(2, 3, length, 16).to(dtype) for length in (7, 11, 11))
    bias = torch.zeros(2, 1, 7, 11, dtype=dtype) if masked else None
    if bias is not None:
        bias[..., 3:5] = -torch.inf
    kind = "efficient" if masked or dtype == torch.float32 else "flash"
    chosen = mock.patch.object(torch_lse, "_cuda_kernel", return_value=kind)
    with mock.patch.object(torch_lse, "fused", OPERATORS.get), chosen:
        out, found = torch_lse._cuda(q, k, v, bias, 0.3)
    truth = attend_with_lse_reference(q, k, v, bias, 0.3)
    torch.testing.assert_close(out, truth[0])
    torch.testing.assert_close(found[..., :7], truth[1])


def test_operators_of_torch_are_as_their_stand_ins():
    """The names, the order and the defaults of their arguments, and the shapes that torch declares."""
    for name, stand_in in OPERATORS.items():
        real = getattr(torch.ops.aten, name).default._schema.arguments
        ours = list(inspect.signature(stand_in).parameters.values())
        assert [one.name for one in real] == [one.name for one in ours]
        assert [one.kwarg_only for one in real] == [one.kind is one.KEYWORD_ONLY for one in ours]
        q, k = torch.empty(2, 3, 40, 16, device="meta"), torch.empty(2, 3, 24, 16, device="meta")
        given = (q, k, k) if name.endswith("_flash_attention") else (q, k, k, None, True)
        declared = getattr(torch.ops.aten, name)(*given)
        half = [torch.zeros_like(one, device="cpu", dtype=torch.bfloat16) for one in given[:3]]
        assert [one.shape for one in declared[:2]] == [one.shape for one in stand_in(*half, *given[3:])[:2]]


def test_an_lse_of_another_shape_is_refused():
    q = torch.randn(1, 2, 4, 16)
    wrong = mock.Mock(return_value=(q.transpose(1, 2), torch.zeros(1, 4, 2), None))
    said = pytest.raises(LayoutError, match=r"'flash' returned its log-sum-exp as \(1, 4, 2\) where \(1, 2, 4\)")
    with installed("flash"), mock.patch.object(dispatch, "flash_attn_func", wrong), said:
        local_attention("flash", ring=2).with_lse(q, q, q)

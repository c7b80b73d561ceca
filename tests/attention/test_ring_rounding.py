"""Ring attention of 2, 4 and 8 ranks in half precision, held to float64: as good as one device's own kernel."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ditmesh.attention.kernels import LocalAttention, attend_with_lse, attend_with_lse_reference, merge_, merge_out_
from ditmesh.attention.kernels.backends import BackendWithLse
from ditmesh.attention.kernels.builtin import Math, Native
from support.ring_rounding import CASES, gradients, rms_error, round_the_ring

# Of one kernel's error: 0.73 to 1.00 is measured. Parts that come rounded from their kernel have 1.06 to 1.35, and
# merged in half precision 2 on 8 ranks.
BAR = 1.2
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_is_as_close_to_float64_as_one_device(name, dtype):
    case = CASES[name]
    (q, k, v), mask = case.tensors(dtype)
    truth = attend_with_lse(q.double(), k.double(), v.double(), mask)[0]
    alone = rms_error(attend_with_lse(q, k, v, mask)[0], truth)
    # The larger ones once.
    for ranks in (2, 4, 8) if case.tokens == 512 else (8,):
        value = round_the_ring(case, dtype, ranks)
        assert value.dtype == dtype
        error = rms_error(value, truth) / alone
        assert error <= BAR, (ranks, error)
    if dtype == torch.bfloat16 and case.tokens == 512:
        assert rms_error(round_the_ring(case, dtype, 2, parts=dtype), truth) > BAR * alone, "parts that come rounded"


def test_a_scale_of_the_model_counts():
    case = CASES["512 tokens"]
    (q, k, v), _ = case.tensors(torch.float64)
    value = round_the_ring(case, torch.float64, 4, scale=0.5)
    assert rms_error(value, attend_with_lse(q, k, v, None, 0.5)[0]) < 1e-10
    assert rms_error(value, attend_with_lse(q, k, v)[0]) > 0.1


@pytest.mark.parametrize("ranks", [2, 8])
def test_gradients_of_any_number_of_ranks_are_as_close_to_float64_as_one_device_s(ranks):
    """Gradients of keys and values travel round the ring and every rank adds its own, in float32."""
    case, dtype = CASES["values with a mean"], torch.bfloat16
    truth, alone = (gradients(case, kind, 1) for kind in (torch.float64, dtype))
    found = gradients(case, dtype, ranks)
    for value, one, true, bar in zip(found, alone, truth, (BAR, 1.0, 1.0), strict=True):
        assert value.dtype == dtype
        assert rms_error(value, true) <= bar * rms_error(one, true)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rounded_parts_are_a_second_rounding_of_the_size_of_the_first(ranks):
    """They are larger than their sum by the root of their number, and weigh the less; products here are exact."""
    (q, k, v), _ = CASES["512 tokens"].tensors(torch.bfloat16)
    q, k, v = (tensor.double() for tensor in (q, k, v))
    truth, _ = attend_with_lse(q, k, v)
    found = [attend_with_lse(q, *block) for block in zip(k.chunk(ranks, 2), v.chunk(ranks, 2), strict=True)]
    sizes = torch.stack([part for part, _ in found]).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt()
    assert 0.93 * ranks**0.5 < sizes < 1.02 * ranks**0.5

    def error(parts: list[torch.Tensor]) -> float:
        weights = torch.stack([lse for _, lse in found]).softmax(0)
        whole = sum(weight[..., None] * part for weight, part in zip(weights, parts, strict=True))
        assert isinstance(whole, torch.Tensor)
        return rms_error(whole.bfloat16(), truth) / rms_error(truth.bfloat16(), truth)

    assert error([part for part, _ in found]) == pytest.approx(1.0, abs=1e-3)
    assert error([part.bfloat16().double() for part, _ in found]) == pytest.approx(2**0.5, abs=0.03)


def test_a_sum_in_half_precision_is_found():
    dtype, ranks = torch.bfloat16, 8
    (q, k, v), _ = CASES["512 tokens"].tensors(dtype)
    truth = attend_with_lse(q.double(), k.double(), v.double())[0]
    alone = rms_error(attend_with_lse(q, k, v)[0], truth)
    out, lse = None, None
    for block in zip(k.chunk(ranks, 2), v.chunk(ranks, 2), strict=True):
        part, part_lse = attend_with_lse(q.float(), *(tensor.float() for tensor in block))
        part = part.to(dtype)
        out, lse = (part, part_lse) if out is None or lse is None else merge_(out, lse, part, part_lse)
    assert out is not None
    assert rms_error(out, truth) > 1.5 * alone


@pytest.mark.parametrize("amx", [False, True])
def test_copies_are_made_where_they_cost_little(amx):
    """Of the kernels of torch and of ditmesh; a function of a program gets its tensors as they are."""
    q = torch.zeros(1, 2, 3, 8)
    with mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=amx):
        found = {
            name: [LocalAttention(kernel).unrounded(q.to(dtype)) for dtype in DTYPES]
            for name, kernel in (
                ("native", Native()),
                ("math", Math()),
                ("_native_flash", BackendWithLse("_native_flash")),
                ("_native_math", BackendWithLse("_native_math")),
                ("flash", BackendWithLse("flash")),
                ("mine", SimpleNamespace(name="mine")),
            )
        }
    single = torch.float32
    fast = [torch.bfloat16 if amx else single, single, single, torch.float64]
    wide = [single, single, single, torch.float64]
    assert found == {
        **dict.fromkeys(("native", "_native_flash"), fast),
        **dict.fromkeys(("math", "_native_math"), wide),
        **{name: list(DTYPES) for name in ("flash", "mine")},
    }


def test_float32_models_have_the_bits_of_tensors_that_are_not_copied():
    case = CASES["uneven lengths"]
    assert torch.equal(
        round_the_ring(case, torch.float32, 4), round_the_ring(case, torch.float32, 4, attend=attend_with_lse)
    )


def test_a_merge_of_queries_that_all_see_a_key_needs_no_guard_against_nan():
    """The same bits with one kernel less; a query that sees no key needs it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    one, other = (attend_with_lse(q, k[:, :, part], v[:, :, part]) for part in (slice(0, 8), slice(8, 16)))
    guarded, lse = merge_(one[0].clone(), one[1], *other)
    plain, plain_lse = merge_(one[0].clone(), one[1], *other, blind=False)
    assert torch.equal(guarded, plain)
    assert torch.equal(lse, plain_lse)
    assert torch.equal(guarded, merge_out_(one[0].clone(), one[1], *other))
    nothing = attend_with_lse_reference(q, k[:, :, :0], v[:, :, :0], None, None)
    assert merge_out_(nothing[0].clone(), nothing[1], *nothing).isfinite().all()
    assert merge_out_(nothing[0].clone(), nothing[1], *nothing, blind=False).isnan().all()

"""Ring attention of 2, 4 and 8 ranks in half precision, held to float64: as good as one device's own kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ditmesh.attention.kernels import (
    LocalAttention,
    attend_with_lse,
    attend_with_lse_reference,
    function_kernel,
    merge_,
    merge_out_,
)
from ditmesh.attention.kernels import lse as lse_
from ditmesh.attention.kernels.backends import BackendWithLse
from ditmesh.attention.kernels.builtin import Math, Native
from ditmesh.attention.ring import ring_attention
from ditmesh.comm import Traffic
from ditmesh.strategies.simulated import VirtualLink, _as_rank, _meet
from ditmesh.strategies.virtual import run_together

# Of one kernel's error: 0.73 to 1.00 is measured. Parts that come rounded from their kernel have 1.06 to 1.35, and
# merged in half precision 2 on 8 ranks.
BAR = 1.2
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
RAGGED = {2: [300, 212], 4: [200, 0, 171, 141], 8: [90, 0, 64, 70, 31, 100, 1, 156]}


@dataclass(frozen=True)
class Case:
    """Attention over several ranks.

    Attributes:
        tokens, heads, width: of the queries.
        mean, factor: of the values; of the scores.
        masked: whether queries see a random 70 % of the keys, and one query none.
        resident: keys that every rank has.
        ragged: whether ranks have unlike numbers of tokens.
    """

    tokens: int = 512
    heads: int = 2
    width: int = 64
    mean: float = 0.0
    factor: float = 1.0
    masked: bool = False
    resident: int = 0
    ragged: bool = False

    def tensors(self, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
        """Queries; keys and values, of which resident ones come first; the mask."""
        torch.manual_seed(0)
        keys = self.resident + self.tokens
        q, k, v = (torch.randn(1, self.heads, length, self.width) for length in (self.tokens, keys, keys))
        mask = torch.rand(1, 1, self.tokens, keys) > 0.3 if self.masked else None
        if mask is not None:
            mask[:, :, 5] = False
        return [(q * self.factor).to(dtype), k.to(dtype), (v + self.mean).to(dtype)], mask

    def lengths(self, ranks: int) -> list[int]:
        """Tokens of every rank."""
        return RAGGED[ranks] if self.ragged else [self.tokens // ranks] * ranks


CASES = {
    "512 tokens": Case(),
    "2048 tokens": Case(tokens=2048, heads=1),
    "heads of 128": Case(width=128),
    "values with a mean": Case(mean=2.0),
    "scores three times as large": Case(factor=3.0),
    "masks": Case(masked=True),
    "resident keys": Case(resident=77, masked=True),
    "uneven lengths": Case(ragged=True, masked=True, resident=20),
}


def rms_error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())


def round_the_ring(case: Case, dtype: torch.dtype, ranks: int, **given: Any) -> Tensor:
    """What all ranks compute together."""
    given = given or {"parts": torch.float32}
    (q, k, v), mask = case.tensors(dtype)
    stay, lengths = case.resident, case.lengths(ranks)
    link = VirtualLink("ring", ranks, Traffic())
    own_q = q.split(lengths, 2)
    own_k, own_v = (tensor[:, :, stay:].split(lengths, 2) for tensor in (k, v))

    def of_rank(rank: int) -> Tensor:
        def mask_of(block: int) -> Tensor:
            assert mask is not None
            rows = mask.split(lengths, 2)[rank]
            at_home = [rows[..., :stay]] if block == rank else []
            return torch.cat([*at_home, rows[..., stay:].split(lengths, 3)[block]], 3)

        resident = (k[:, :, :stay], v[:, :, :stay]) if stay else None
        own = own_q[rank], own_k[rank], own_v[rank]
        return ring_attention(link, *own, lengths, resident, mask_of if mask is not None else None, **given)

    return torch.cat(run_together([partial(_as_rank, rank, partial(of_rank, rank)) for rank in range(ranks)], _meet), 2)


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
    with mock.patch.object(lse_, "_amx", return_value=amx):
        found = {
            name: [LocalAttention(kernel).unrounded(q.to(dtype)) for dtype in DTYPES]
            for name, kernel in (
                ("native", Native()),
                ("math", Math()),
                ("_native_flash", BackendWithLse("_native_flash")),
                ("_native_math", BackendWithLse("_native_math")),
                ("flash", BackendWithLse("flash")),
                ("mine", function_kernel("mine", lambda *_: q, lambda *_: (q, q))),
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

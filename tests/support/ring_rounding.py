"""Ring attention of simulated ranks in half precision, to be held to float64."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from ditmesh.attention.ring import ring_attention
from ditmesh.comm import Link, Traffic
from ditmesh.lab.study.simulation import VirtualLink, _as_rank, _meet
from ditmesh.strategies.virtual import run_together

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

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], Tensor | None]:
        """Queries; keys and values, of which resident ones come first; the mask. The same numbers on every device."""
        torch.manual_seed(0)
        keys = self.resident + self.tokens
        q, k, v = (torch.randn(1, self.heads, length, self.width) for length in (self.tokens, keys, keys))
        mask = torch.rand(1, 1, self.tokens, keys) > 0.3 if self.masked else None
        if mask is not None:
            mask[:, :, 5] = False
        given = [tensor.to(dtype).to(device) for tensor in (q * self.factor, k, v + self.mean)]
        return given, None if mask is None else mask.to(device)

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


def round_the_ring(case: Case, dtype: torch.dtype, ranks: int, device: str = "cpu", **given: Any) -> Tensor:
    """The output of all simulated ranks; ``given`` is for `ring_attention`, and empty: from float32 copies."""
    given = given or {"parts": torch.float32}
    (q, k, v), mask = case.tensors(dtype, device)
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


class ThreadLink:
    """One rank's end of a ring whose ranks are threads: a backward pass of torch cannot be a coroutine."""

    def __init__(self, rank: int, queues: list[Queue[list[Tensor]]]) -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Any:
        self._queues[(self.rank + 1) % self.size].put([tensor.clone() for tensor in tensors])
        return SimpleNamespace(wait=partial(self._queues[self.rank].get, timeout=60))


def gradients(case: Case, dtype: torch.dtype, ranks: int) -> list[Tensor]:
    """The gradients of queries, keys and values, of a sum that weighs every output otherwise."""
    whole, _ = case.tensors(dtype)
    weights = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    lengths, queues = case.lengths(ranks), [Queue[list[Tensor]]() for _ in range(ranks)]
    own = [[part.clone().requires_grad_() for part in tensor.split(lengths, 2)] for tensor in whole]

    def learn(rank: int) -> None:
        link = cast(Link, ThreadLink(rank, queues))
        out = ring_attention(link, *(parts[rank] for parts in own), lengths)
        out.backward(weights.split(lengths, 2)[rank])

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(learn, range(ranks)))
    return [torch.cat([cast(Tensor, part.grad) for part in parts], 2) for parts in own]

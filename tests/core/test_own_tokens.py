"""Tensors of which a rank holds its own tokens: what they stay, and when tokens are gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ditmesh.comm import PeerError
from ditmesh.core.partition import Partition
from ditmesh.parts.own_tokens import OwnTokens
from ditmesh.parts.part import whole_of

TOKENS, RANK = Partition(((4, 2),)), 1
WIDTH = 6


class Ranks:
    """Two ranks of which one is here; the other one's tokens come from what all of it would be."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.whole = torch.randn(2, TOKENS.total, WIDTH, generator=generator)
        self.truth = self.whole
        self.gathered = 0
        own = TOKENS.take(self.whole, 1, RANK).contiguous()
        self.lazy = OwnTokens.of(own, 1, TOKENS, RANK, self.gather)

    def gather(self, own: Tensor) -> Tensor:
        self.gathered += 1
        assert torch.allclose(own, TOKENS.take(self.truth, 1, RANK), rtol=1e-6, atol=1e-7)
        return self.truth


WEIGHT, BIAS = torch.randn(4, WIDTH), torch.randn(4)
SCALE, ROW, TABLE = torch.randn(2, 1, WIDTH), torch.randn(WIDTH), torch.randn(6, WIDTH)
PER_TOKEN = torch.randn(2, 6, WIDTH)
BY_TOKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "norm and shift": lambda x: F.layer_norm(x, (WIDTH,)) * (1 + SCALE) + SCALE,
    "rms norm": lambda x: F.rms_norm(x, (WIDTH,), ROW, 1e-6),
    "rms norm by hand": lambda x: x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6),
    "a table": lambda x: x + TABLE,
    "a tensor of all tokens": lambda x: PER_TOKEN * x,
    "with itself": lambda x: (x - 0.5) * x.float(),
    "dtype": lambda x: x.to(torch.bfloat16).type_as(ROW),
    "activations": lambda x: F.gelu(F.silu(x), approximate="tanh"),
}


@pytest.mark.parametrize("name", BY_TOKEN)
def test_what_acts_on_every_token_by_itself_waits_for_nobody(name):
    ranks = Ranks()
    with torch.inference_mode():
        result = BY_TOKEN[name](ranks.lazy)
        ranks.truth = BY_TOKEN[name](ranks.whole)
        assert isinstance(result, OwnTokens)
        assert ranks.gathered == 0
        assert (result.shape, result.dtype) == (ranks.truth.shape, ranks.truth.dtype)
        assert torch.equal(whole_of(result), ranks.truth)
    assert ranks.gathered == 1


def write(x: Tensor) -> Tensor:
    x += 1
    return x


def write_to_a_view(x: Tensor) -> Tensor:
    x.detach().add_(1)
    return x + 0


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda x: x.reshape(2, 3, 2, WIDTH),
    "slice": lambda x: x[:, 2:],
    "cat": lambda x: torch.cat([x, x], dim=1),
    "over tokens": lambda x: x.mean(1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "norm of tokens": lambda x: F.layer_norm(x, (6, WIDTH)),
    "einsum": lambda x: torch.einsum("bsc,sd->bdc", x, TABLE),
    "in place": write,
    "through a view": write_to_a_view,
    "out": lambda x: torch.add(x, 1, out=torch.empty(2, 6, WIDTH)),
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1),
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_done_with_all_tokens(name):
    ranks = Ranks()
    truth = OTHERS[name](ranks.whole.clone())
    with torch.no_grad():
        result = OTHERS[name](ranks.lazy)
    assert type(result) is Tensor
    assert torch.equal(result, truth)
    assert ranks.gathered == 1


def test_tokens_are_gathered_once():
    ranks = Ranks()
    assert torch.equal(ranks.lazy.flatten(), ranks.whole.flatten())
    # Afterwards everybody sees the same memory.
    ranks.lazy.mul_(2)
    assert torch.equal(ranks.lazy + 0, ranks.truth)
    assert ranks.gathered == 1


def test_tokens_of_another_share_are_not_mixed():
    ranks, own = Ranks(), torch.randn(2, 3, WIDTH)
    other = OwnTokens.of(own, 1, Partition(((3, 3),)), RANK, lambda own: torch.cat([own, own], 1))
    with torch.no_grad():
        assert torch.equal(ranks.lazy + other, ranks.whole + torch.cat([own, own], 1))


def test_a_rank_that_asks_alone_is_told_what_it_asked_for():
    def nobody_comes(_):
        raise PeerError("rank 1 has not come")

    own = OwnTokens.of(torch.zeros(1, 2, 4), 1, Partition(((2, 2),)), 0, nobody_comes)
    with pytest.raises(PeerError, match=r"rank 1 has not come \('max' behind the last block wants"):
        own.max()

"""Compression of keys and values for the wire."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor


class Codec:
    """Cast of tokens' keys and values to a floating dtype for the wire; values beyond its range become its largest."""

    # Whether it takes the difference from what the others have, and not keys and values themselves.
    differences = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def empty(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A flat tensor that takes `encode` of a tensor (S, 2, B, H, D) of that shape."""
        return torch.empty(prod(shape), dtype=self.dtype, device=device)

    def encode(self, tokens: Tensor) -> Tensor:
        """(S, 2, B, H, D), K before V, to a flat contiguous tensor of its own memory."""
        limit = torch.finfo(self.dtype).max
        if torch.finfo(tokens.dtype).max > limit:
            tokens = tokens.clamp(-limit, limit)
        flat = torch.empty(tokens.shape, dtype=self.dtype, device=tokens.device)
        return flat.copy_(tokens).view(-1)

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tokens again, (S, 2, B, H, D), in any floating dtype."""
        return flat.view(shape)

    def size(self, width: int) -> float:
        """Bytes of an element on the wire, of heads that are so wide; scales of whole messages are left out."""
        return float(self.dtype.itemsize)

    def extra(self, rows: float, tokens: float, heads: float, width: int) -> float:
        """Bytes of a message that stand beside its elements, of so many rows, tokens, heads and elements of a head."""
        return 0.0


class Int8(Codec):
    """8-bit integers with a float32 scale for K and for V of every sample and head: max|x| / 127, symmetric.

    The error is at most half a scale. On the wire: the integers, then the scales, as bytes.
    """

    def __init__(self) -> None:
        super().__init__(torch.int8)

    def empty(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return super().empty((prod(shape) + prod(shape[1:4]) * 4,), device)

    def encode(self, tokens: Tensor) -> Tensor:
        values = tokens.float()
        scale = values.abs().amax(dim=(0, 4), keepdim=True) / 127  # (1, 2, B, H, 1)
        whole = (values / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([whole.reshape(-1), scale.reshape(-1).view(torch.int8)])

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = prod(shape)
        _, two, batch, heads, _ = shape
        # A copy: the scales may begin at a byte that is no multiple of four.
        scale = flat[count:].clone().view(torch.float32).view(1, two, batch, heads, 1)
        return flat[:count].view(shape).float() * scale


class Int4(Codec):
    """4-bit integers with a float16 scale for K and for V of every token and head: max|x| / 7, symmetric.

    A scale of its own for every token keeps the few large ones from taking all levels. The error is at most half a
    scale, and what rounding the scale adds. On the wire: two integers a byte, then the scales, as bytes. A byte holds
    an element of the first half of a head and one of the second, 16 · second + first: both halves stay contiguous.
    """

    def __init__(self) -> None:
        super().__init__(torch.int8)

    def empty(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        tokens, dim = prod(shape[:-1]), shape[-1]
        return super().empty((tokens * ((dim + 1) // 2 + 2),), device)

    def size(self, width: int) -> float:
        return ((width + 1) // 2 + 2) / width

    def encode(self, tokens: Tensor) -> Tensor:
        values = tokens.float()
        limits = torch.finfo(torch.float16)
        largest = values.abs().amax(dim=4, keepdim=True)  # (S, 2, B, H, 1)
        scale = (largest / 7).clamp_(limits.tiny, limits.max).half()
        whole = (values / scale.float()).round_().clamp_(-7, 7)
        if whole.shape[-1] % 2:
            whole = torch.nn.functional.pad(whole, (0, 1))
        first, second = whole.chunk(2, dim=-1)
        flat = self.empty(tuple(tokens.shape), tokens.device)
        packed, scales = flat.split([first.numel(), 2 * scale.numel()])
        packed.view(first.shape).copy_(torch.add(first, second, alpha=16))
        # As bytes: where there are an odd number of them before, they cannot be written as numbers.
        scales.copy_(scale.view(-1).view(torch.int8))
        return flat

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        tokens, dim = prod(shape[:-1]), shape[-1]
        half = (dim + 1) // 2
        packed = flat[: tokens * half].view(*shape[:-1], half).float()
        # A copy: the scales may begin at an odd byte.
        scale = flat[tokens * half :].clone().view(torch.float16).view(*shape[:-1], 1).float()
        second = (packed / 16).round_()
        first = packed.sub_(second, alpha=16)
        return torch.cat([first.mul_(scale), second.mul_(scale)], dim=-1)[..., :dim]


class Int4Differences(Int4):
    """`Int4` of what is new."""

    differences = True


class FewLevels(Codec):
    """Differences in two to four levels, an even distance apart, around the mean of a channel.

    From one step to the next most channels of K and V move alike at all tokens, and some much more than others. So a
    message has for every channel (of K or V, a sample and a head) its mean over the tokens and its spread, in six
    levels each: spreads fall from the largest of K or V and a sample by half an octave, means are in units of their
    channel's spread. And it has for every token's K or V the distance of the levels in units of those spreads, the
    least squares of what they stand for. Distances and the units are powers of two in quarters, 8 bits each.

    On the wire, as bytes: the levels, as many a byte as fit; a byte for K and for V of every token and sample; for
    the channels their means and their spreads, three a byte; and for K and V of every sample the largest spread and
    the unit of means. Where that ends, the receiver's sums are the sender's: products of the same numbers in the same
    order.

    Args:
        levels: how many.
    """

    differences = True
    # Distance of the levels of a normal distribution of spread 1 that lose the least, by their number (Max 1960,
    # "Quantizing for minimum distortion").
    DISTANCES: ClassVar[dict[int, float]] = {2: 1.5958, 3: 1.2240, 4: 0.9957, 6: 0.7334}
    IN_A_BYTE: ClassVar[dict[int, int]] = {2: 8, 3: 5, 4: 4, 6: 3}
    # A quarter of an octave each; 0 is nothing.
    QUARTERS, ONE = 4, 160
    # Levels of means and of spreads, and what a level of spreads is, in quarters.
    SIX, FALL = 6, 2
    # A channel that moves alike everywhere has a spread all the same, for its mean to be in units of.
    LEAST = 1 / 8

    def __init__(self, levels: int) -> None:
        super().__init__(torch.uint8)
        self.levels, self.distance = levels, self.DISTANCES[levels]
        self._powers = torch.tensor([0.0, *(2.0 ** ((code - self.ONE) / self.QUARTERS) for code in range(1, 256))])

    def _parts(self, shape: tuple[int, ...]) -> list[int]:
        """Bytes of the parts of a message."""
        tokens, two, batch, heads, dim = shape
        channels = two * batch * heads * dim
        few, six = -(-tokens * channels // self.IN_A_BYTE[self.levels]), -(-channels // self.IN_A_BYTE[self.SIX])
        return [few, tokens * two * batch, six, six, two * batch, two * batch]

    def empty(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.empty(sum(self._parts(shape)), dtype=self.dtype, device=device)

    def size(self, width: int) -> float:
        return 1 / self.IN_A_BYTE[self.levels]

    def extra(self, rows: float, tokens: float, heads: float, width: int) -> float:
        return 2 * rows * (tokens + 2 * heads * width / self.IN_A_BYTE[self.SIX] + 2)

    def encode(self, tokens: Tensor) -> Tensor:
        values, shape = tokens.float().contiguous(), tuple(tokens.shape)
        tiny = torch.finfo(torch.float32).tiny
        mean = values.mean(dim=0, keepdim=True)  # (1, 2, B, H, D)
        spread = values.square().mean(dim=0, keepdim=True).sub_(mean.square().mul_(1 - self.LEAST**2))
        spread = spread.clamp_min_(0.0).sqrt_()
        largest = self._nearest(spread.amax(dim=(3, 4), keepdim=True))
        fall = (self._power(largest) / spread.clamp_min_(tiny)).log2_().mul_(self.QUARTERS / self.FALL).round_()
        fall.clamp_(0, self.SIX - 1)
        spread = self._spread(largest, fall)
        mean /= spread.clamp_min(tiny)
        unit = self._nearest(mean.square().mean(dim=(3, 4), keepdim=True).sqrt_().mul_(self.DISTANCES[self.SIX]))
        means = self._levels(mean, self._power(unit), self.SIX)
        values = (values / spread.clamp_min(tiny)).sub_(self._mean(means, unit))
        distance = values.square().mean(dim=(3, 4), keepdim=True).sqrt_().mul_(self.distance)  # (S, 2, B, 1, 1)
        codes = self._levels(values, distance, self.levels)
        steps = codes - (self.levels - 1) / 2
        best = (values * steps).sum(dim=(3, 4)) / steps.square().sum(dim=(3, 4)).clamp_min_(1e-12)
        flat = self.empty(shape, tokens.device)
        places = flat.split(self._parts(shape))
        places[0].copy_(self._packed(codes.view(-1), self.levels))
        places[1].copy_(self._nearest(best).view(-1))
        places[2].copy_(self._packed(means.view(-1), self.SIX))
        places[3].copy_(self._packed(fall.view(-1), self.SIX))
        places[4].copy_(largest.view(-1))
        places[5].copy_(unit.view(-1))
        return flat

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        tokens, two, batch = shape[:3]
        levels, distances, means, falls, largest, unit = flat.split(self._parts(shape))
        channels = (1, *shape[1:])
        spread = self._spread(largest.view(1, two, batch, 1, 1), self._unpacked(falls, self.SIX, channels))
        mean = self._mean(self._unpacked(means, self.SIX, channels), unit.view(1, two, batch, 1, 1))
        values = self._unpacked(levels, self.levels, shape).sub_((self.levels - 1) / 2)
        values.mul_(self._power(distances).view(tokens, two, batch, 1, 1))
        return values.add_(mean).mul_(spread)

    def _spread(self, largest: Tensor, fall: Tensor) -> Tensor:
        """Spreads of channels: so many levels below the largest one's code."""
        return self._power((largest - fall * self.FALL).clamp_min_(0))

    def _mean(self, means: Tensor, unit: Tensor) -> Tensor:
        """Means of channels in units of their spreads."""
        return (means - (self.SIX - 1) / 2).mul_(self._power(unit))

    @staticmethod
    def _levels(values: Tensor, distance: Tensor, levels: int) -> Tensor:
        """The nearest of some levels around 0, from 0."""
        codes = values / distance.clamp_min(torch.finfo(torch.float32).tiny)
        return codes.add_((levels - 1) / 2).round_().clamp_(0, levels - 1)

    def _power(self, codes: Tensor) -> Tensor:
        if self._powers.device != codes.device:
            self._powers = self._powers.to(codes.device)
        return self._powers[codes.int()]

    def _nearest(self, values: Tensor) -> Tensor:
        """Codes (uint8) of the powers that are nearest; of nothing, and of less, 0."""
        codes = values.log2().mul_(self.QUARTERS).add_(self.ONE).round_()
        # Of nothing the logarithm is minus infinity, of less no number.
        return codes.nan_to_num_(0.0, 255.0, 0.0).clamp_(0, 255).to(torch.uint8)

    def _packed(self, codes: Tensor, levels: int) -> Tensor:
        """Bytes (as float) of codes (as float): a byte has one of each of several runs, which stay contiguous."""
        in_a_byte = self.IN_A_BYTE[levels]
        runs = torch.nn.functional.pad(codes, (0, -codes.numel() % in_a_byte)).view(in_a_byte, -1)
        packed = runs[-1].clone()
        for run in reversed(runs[:-1].unbind()):
            packed.mul_(levels).add_(run)
        return packed

    def _unpacked(self, packed: Tensor, levels: int, shape: tuple[int, ...]) -> Tensor:
        rest = packed.float()
        runs = torch.empty((self.IN_A_BYTE[levels], rest.numel()), device=packed.device)
        for run in runs.unbind():
            above = ((rest + 0.5) / levels).floor_()
            torch.sub(rest, above, alpha=levels, out=run)
            rest = above
        return runs.view(-1)[: prod(shape)].view(shape)


def codec(name: str | None) -> Codec | None:
    """The codec of `ParallelConfig.compress`; None where nothing is compressed."""
    return None if name is None else CODECS[name]()


CODECS: dict[str, Callable[[], Codec]] = {
    "fp16": partial(Codec, torch.float16),
    "bf16": partial(Codec, torch.bfloat16),
    "int8": Int8,
    "int4": Int4,
    "residual4": Int4Differences,
    "residual2": partial(FewLevels, 4),
    "residual1.6": partial(FewLevels, 3),
    "residual1": partial(FewLevels, 2),
}

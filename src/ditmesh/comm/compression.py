"""Compression of keys and values for the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

# Gives memory of a shape, float32, where a tensor lies.
Room = Callable[[tuple[int, ...], Tensor], Tensor]


def _fresh(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, device=like.device)


class Codec:
    """Cast of tokens' keys and values to a floating dtype for the wire; values beyond its range become its largest."""

    # Whether it takes the difference from what the others have, and not keys and values themselves.
    differences = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # Memory for intermediate results, by dtype and number.
        self._rooms: dict[tuple[torch.dtype, int], Tensor] = {}

    def forget(self) -> None:
        """Give the memory for intermediate results back."""
        self._rooms.clear()

    def _room(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.float32, number: int = 0
    ) -> Tensor:
        """Memory for an intermediate result, which lasts until the same number is asked for again.

        A CPU gets the same memory every time: what was just written lies in its caches, and fresh memory does not. A
        GPU has no such gain, and its allocator keeps memory by itself.
        """
        if like.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=like.device)
        kept, count = self._rooms.get((dtype, number)), prod(shape)
        if kept is None or kept.numel() < count:
            kept = self._rooms[dtype, number] = torch.empty(count, dtype=dtype)
        return kept[:count].view(shape)

    def together(self, slots: Sequence[Tensor]) -> Tensor:
        """Tokens of several places (S, 2, B, H, D), one after the other; only until the next call of the codec."""
        if len(slots) == 1:
            return slots[0]
        first = slots[0]
        return torch.cat([*slots], out=self._room(joined(slots), first, first.dtype, 2))

    def new(self, slots: Sequence[Tensor], shown: Tensor) -> Tensor:
        """Tokens of several places less what is shown of them: float32 and contiguous; as short-lived."""
        if len(slots) > 2 or shown.dtype != torch.float32:
            return self.together(slots).float() - shown.float()
        # As many kernels for one or two streams, and what is written is read once less.
        new = self._room(tuple(shown.shape), shown)
        for slot, before, place in _by_slot(slots, shown, new):
            torch.sub(slot, before, out=place)
        return new

    def empty(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A flat tensor that takes `encode` of a tensor (S, 2, B, H, D) of that shape."""
        return torch.empty(prod(shape), dtype=self.dtype, device=device)

    def length(self, shape: tuple[int, ...]) -> int:
        """Elements of `encode` of a tensor (S, 2, B, H, D) of that shape."""
        return self.empty(shape, torch.device("meta")).numel()

    def encode(self, tokens: Tensor) -> Tensor:
        """(S, 2, B, H, D), K before V, to a flat contiguous tensor of its own memory."""
        limit = torch.finfo(self.dtype).max
        if torch.finfo(tokens.dtype).max > limit:
            tokens = torch.clamp(tokens, -limit, limit, out=self._room(tuple(tokens.shape), tokens, tokens.dtype))
        flat = torch.empty(tokens.shape, dtype=self.dtype, device=tokens.device)
        return flat.copy_(tokens).view(-1)

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tokens again, (S, 2, B, H, D), in any floating dtype."""
        return self._decoded(flat, shape, _fresh)

    def _decoded(self, flat: Tensor, shape: tuple[int, ...], room: Room) -> Tensor:
        """`decode` into memory that a function gives."""
        return flat.view(shape)

    def encode_new(self, values: Tensor, shown: Tensor) -> Tensor:
        """The message of differences, and what is shown moved on by what the receivers make of it.

        Args:
            values: the differences (S, 2, B, H, D), float32 and contiguous; they are overwritten.
            shown: the same tokens as all others have them, in any floating dtype; written to.
        """
        message = self.encode(values)
        shown.add_(self.decode(message, tuple(shown.shape)))
        return message

    def put(self, flat: Tensor, slots: Sequence[Tensor]) -> None:
        """Write a message's tokens into their places (S, 2, B, H, D), one after the other; add differences to them."""
        shape = joined(slots)
        tokens = self._decoded(flat, shape, self._room)
        for slot, part in _by_slot(slots, tokens):
            if self.differences:
                slot.add_(part)
            else:
                slot.copy_(part)

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
        values, shape = tokens.float(), tuple(tokens.shape)
        room = self._room(shape, values)
        scale = torch.abs(values, out=room).amax(dim=(0, 4), keepdim=True) / 127  # (1, 2, B, H, 1)
        whole = torch.div(values, scale.clamp_min(torch.finfo(torch.float32).tiny), out=room).round_().clamp_(-127, 127)
        flat = self.empty(shape, values.device)
        flat[: whole.numel()].view(shape).copy_(whole)
        flat[whole.numel() :].copy_(scale.reshape(-1).view(torch.int8))
        return flat

    def _decoded(self, flat: Tensor, shape: tuple[int, ...], room: Room) -> Tensor:
        count = prod(shape)
        _, two, batch, heads, _ = shape
        # A copy: the scales may begin at a byte that is no multiple of four.
        scale = flat[count:].clone().view(torch.float32).view(1, two, batch, heads, 1)
        return room(shape, flat).copy_(flat[:count].view(shape)).mul_(scale)


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
        return self._coded(tokens.float())[0]

    def _coded(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The message of float32 values, their integers as float32, for as long as a room lasts, and the scales."""
        limits, room = torch.finfo(torch.float16), self._room(tuple(values.shape), values, number=1)
        largest = torch.abs(values, out=room).amax(dim=4, keepdim=True)  # (S, 2, B, H, 1)
        half = (largest / 7).clamp_(limits.tiny, limits.max).half()
        scale = half.float()
        whole = torch.div(values, scale, out=room).round_().clamp_(-7, 7)
        integers = self._room(tuple(values.shape), values, torch.int8).copy_(whole)
        if whole.shape[-1] % 2:
            integers = torch.nn.functional.pad(integers, (0, 1))
        first, second = integers.chunk(2, dim=-1)
        flat = self.empty(tuple(values.shape), values.device)
        packed, scales = flat.split([first.numel(), 2 * half.numel()])
        torch.add(first, second, alpha=16, out=packed.view(first.shape))
        # As bytes: where there are an odd number of them before, they cannot be written as numbers.
        scales.copy_(half.view(-1).view(torch.int8))
        return flat, whole, scale

    def _uncoded(self, flat: Tensor, shape: tuple[int, ...], room: Room) -> tuple[Tensor, Tensor]:
        """A message's integers and scales, as float32."""
        tokens, dim = prod(shape[:-1]), shape[-1]
        half = (dim + 1) // 2
        packed = flat[: tokens * half].view(*shape[:-1], half)
        # A copy: the scales may begin at an odd byte.
        scale = flat[tokens * half :].clone().view(torch.float16).view(*shape[:-1], 1).float()
        second = (packed + 8).bitwise_right_shift_(4)
        whole = room(shape, flat)
        whole[..., half:].copy_(second[..., : dim - half])
        whole[..., :half].copy_(torch.sub(packed, second, alpha=16))
        return whole, scale

    def _decoded(self, flat: Tensor, shape: tuple[int, ...], room: Room) -> Tensor:
        whole, scale = self._uncoded(flat, shape, room)
        return whole.mul_(scale)

    def put(self, flat: Tensor, slots: Sequence[Tensor]) -> None:
        whole, scale = self._uncoded(flat, joined(slots), self._room)
        for slot, part, of in _by_slot(slots, whole, scale):
            if self.differences:
                # Exact products: a fused sum has the same bits.
                slot.addcmul_(part, of)
            else:
                torch.mul(part, of, out=slot)


class Int4Differences(Int4):
    """`Int4` of what is new."""

    differences = True

    def encode_new(self, values: Tensor, shown: Tensor) -> Tensor:
        flat, whole, scale = self._coded(values)
        shown.addcmul_(whole, scale)
        return flat


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
        values = tokens.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return self._coded(values)[0]

    def encode_new(self, values: Tensor, shown: Tensor) -> Tensor:
        flat, steps, distances, mean, spread = self._coded(values)
        shown.add_(steps.mul_(self._power(distances)).add_(mean).mul_(spread))
        return flat

    def _coded(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The message of float32 values, which are overwritten, and what a receiver reads in it.

        That are the levels around 0, codes of their distances, and means and spreads of the channels.
        """
        shape = tuple(values.shape)
        tiny = torch.finfo(torch.float32).tiny
        mean = values.mean(dim=0, keepdim=True)  # (1, 2, B, H, D)
        room = torch.square(values, out=self._room(shape, values, number=1))
        spread = room.mean(dim=0, keepdim=True).sub_(mean.square().mul_(1 - self.LEAST**2))
        spread = spread.clamp_min_(0.0).sqrt_()
        largest = self._nearest(spread.amax(dim=(3, 4), keepdim=True))
        fall = (self._power(largest) / spread.clamp_min_(tiny)).log2_().mul_(self.QUARTERS / self.FALL).round_()
        fall.clamp_(0, self.SIX - 1)
        spread = self._spread(largest, fall)
        mean /= spread.clamp_min(tiny)
        unit = self._nearest(mean.square().mean(dim=(3, 4), keepdim=True).sqrt_().mul_(self.DISTANCES[self.SIX]))
        means = self._levels(mean, self._power(unit), self.SIX)
        mean = self._mean(means - (self.SIX - 1) / 2, unit)
        torch.addcdiv(-mean, values, spread.clamp_min(tiny), out=values)
        torch.square(values, out=room)
        distance = room.mean(dim=(3, 4), keepdim=True).sqrt_().mul_(self.distance)  # (S, 2, B, 1, 1)
        codes = self._levels(values, distance, self.levels, out=room)
        flat = self.empty(shape, values.device)
        places = flat.split(self._parts(shape))
        self._pack(codes, self.levels, places[0])
        steps = codes.sub_((self.levels - 1) / 2)
        best = values.mul_(steps).sum(dim=(3, 4))
        best /= torch.square(steps, out=values).sum(dim=(3, 4)).clamp_min_(1e-12)
        distances = self._nearest(best)
        places[1].copy_(distances.view(-1))
        self._pack(means, self.SIX, places[2])
        self._pack(fall, self.SIX, places[3])
        places[4].copy_(largest.view(-1))
        places[5].copy_(unit.view(-1))
        return flat, steps, distances.view(*shape[:3], 1, 1), mean, spread

    def _decoded(self, flat: Tensor, shape: tuple[int, ...], room: Room) -> Tensor:
        tokens, two, batch = shape[:3]
        levels, distances, means, falls, largest, unit = flat.split(self._parts(shape))
        channels = (1, *shape[1:])
        fall = self._steps(falls, self.SIX, channels, _fresh).add_((self.SIX - 1) / 2)
        spread = self._spread(largest.view(1, two, batch, 1, 1), fall)
        mean = self._mean(self._steps(means, self.SIX, channels, _fresh), unit.view(1, two, batch, 1, 1))
        distance = self._power(distances).view(tokens, two, batch, 1, 1)
        return self._steps(levels, self.levels, shape, room).mul_(distance).add_(mean).mul_(spread)

    def _spread(self, largest: Tensor, fall: Tensor) -> Tensor:
        """Spreads of channels: so many levels below the largest one's code."""
        return self._power((largest - fall * self.FALL).clamp_min_(0))

    def _mean(self, steps: Tensor, unit: Tensor) -> Tensor:
        """Means of channels in units of their spreads, from their levels around 0, which are overwritten."""
        return steps.mul_(self._power(unit))

    @staticmethod
    def _levels(values: Tensor, distance: Tensor, levels: int, out: Tensor | None = None) -> Tensor:
        """The nearest of some levels around 0, from 0."""
        distance = distance.clamp_min(torch.finfo(torch.float32).tiny)
        # Two passes: torch has no vectorised kernel for one of tensors of which two are broadcast.
        return torch.div(values, distance, out=out).add_((levels - 1) / 2).round_().clamp_(0, levels - 1)

    def _power(self, codes: Tensor) -> Tensor:
        if self._powers.device != codes.device:
            self._powers = self._powers.to(codes.device)
        return self._powers[codes.int()]

    def _nearest(self, values: Tensor) -> Tensor:
        """Codes (uint8) of the powers that are nearest; of nothing, and of less, 0."""
        codes = values.log2().mul_(self.QUARTERS).add_(self.ONE).round_()
        # Of nothing the logarithm is minus infinity, of less no number.
        return codes.nan_to_num_(0.0, 255.0, 0.0).clamp_(0, 255).to(torch.uint8)

    def _pack(self, codes: Tensor, levels: int, place: Tensor) -> None:
        """Write codes (as float) into bytes: one has one of each of several runs, which stay contiguous."""
        count = self.IN_A_BYTE[levels]
        # Signed bytes are faster than others to convert, and sums and products of both have the same bits.
        integers = self._room(tuple(codes.shape), codes, torch.int8).copy_(codes).view(-1)
        if rest := -integers.numel() % count:
            integers = torch.nn.functional.pad(integers, (0, rest))
        runs = integers.view(count, -1).unbind()
        packed, place = runs[-1], place.view(torch.int8)
        for run in reversed(runs[:-1]):
            packed = torch.add(run, packed, alpha=levels, out=place)

    def _steps(self, packed: Tensor, levels: int, shape: tuple[int, ...], room: Room) -> Tensor:
        """Levels around 0 of the codes in bytes, as float32."""
        count, middle = self.IN_A_BYTE[levels], (levels - 1) / 2
        runs = room((count, packed.numel()), packed)
        bits = levels.bit_length() - 1
        if levels == 1 << bits:
            for number, run in enumerate(runs.unbind()):
                run.copy_((packed >> bits * number).bitwise_and_(levels - 1).view(torch.int8))
        else:
            rest = packed.float()
            for run in runs.unbind():
                above = ((rest + 0.5) / levels).floor_()
                torch.sub(rest, above, alpha=levels, out=run)
                rest = above
        return runs.view(-1)[: prod(shape)].view(shape).sub_(middle)


def joined(slots: Sequence[Tensor]) -> tuple[int, ...]:
    """Shape of several slots, one after the other."""
    return (sum(slot.shape[0] for slot in slots), *slots[0].shape[1:])


def _by_slot(slots: Sequence[Tensor], *wholes: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Every slot, and its tokens' parts of tensors of all."""
    lengths = [slot.shape[0] for slot in slots]
    return zip(slots, *(whole.split(lengths) for whole in wholes), strict=True)


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

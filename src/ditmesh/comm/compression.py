"""Compression of keys and values for the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import frexp, ldexp, prod
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
        first, (tokens, *rest, dim) = slots[0], joined(slots)
        return one_after_other(slots, out=self._room((*rest, tokens, dim), first, first.dtype, 2))

    def new(self, slots: Sequence[Tensor], shown: Tensor) -> Tensor:
        """Tokens of several places less what is shown of them: float32, heads by heads; as short-lived."""
        if len(slots) > 2 or shown.dtype != torch.float32:
            now, before = (by_head(tokens).float().contiguous() for tokens in (self.together(slots), shown))
            return by_token(now - before)
        # As many kernels for one or two streams, and what is written is read once less.
        new = by_token(self._room(tuple(by_head(shown).shape), shown))
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
        limit, values = torch.finfo(self.dtype).max, by_head(tokens)
        if torch.finfo(tokens.dtype).max > limit:
            values = torch.clamp(values, -limit, limit, out=self._room(tuple(values.shape), tokens, tokens.dtype))
        flat = torch.empty(values.shape, dtype=self.dtype, device=tokens.device)
        return flat.copy_(values).view(-1)

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tokens again, (S, 2, B, H, D), in any floating dtype."""
        return self._decoded(flat, shape, _fresh)

    def _decoded(self, flat: Tensor, shape: tuple[int, ...], room: Room) -> Tensor:
        """`decode` into memory that a function gives."""
        tokens, *rest, dim = shape
        return by_token(flat.view(*rest, tokens, dim))

    def encode_new(self, values: Tensor, shown: Tensor) -> Tensor:
        """The message of differences, and what is shown moved on by what the receivers make of it.

        Args:
            values: the differences (S, 2, B, H, D), as `new` gives them; they are overwritten.
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
        values = by_head(tokens).float()
        room = self._room(tuple(values.shape), values)
        scale = torch.abs(values, out=room).amax(dim=(3, 4), keepdim=True) / 127  # (2, B, H, 1, 1)
        whole = torch.div(values, scale.clamp_min(torch.finfo(torch.float32).tiny), out=room).round_().clamp_(-127, 127)
        flat = self.empty(tuple(tokens.shape), values.device)
        flat[: whole.numel()].view(whole.shape).copy_(whole)
        flat[whole.numel() :].copy_(scale.reshape(-1).view(torch.int8))
        return flat

    def _decoded(self, flat: Tensor, shape: tuple[int, ...], room: Room) -> Tensor:
        count = prod(shape)
        tokens, two, batch, heads, dim = shape
        # A copy: the scales may begin at a byte that is no multiple of four.
        scale = flat[count:].clone().view(torch.float32).view(two, batch, heads, 1, 1)
        inside = (two, batch, heads, tokens, dim)
        return by_token(room(inside, flat).copy_(flat[:count].view(inside)).mul_(scale))


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
        return self._coded(by_head(tokens).float())[0]

    def _coded(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The message of float32 values (2, B, H, S, D), their integers as float32 and the scales.

        The integers last as long as a room does.
        """
        limits, room = torch.finfo(torch.float16), self._room(tuple(values.shape), values, number=1)
        largest = torch.abs(values, out=room).amax(dim=4, keepdim=True)  # (2, B, H, S, 1)
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
        """A message's integers and scales, as float32, (S, 2, B, H, D) and (S, 2, B, H, 1)."""
        tokens, *rest, dim = shape
        vectors, half = prod(shape[:-1]), (dim + 1) // 2
        packed = flat[: vectors * half].view(*rest, tokens, half)
        # A copy: the scales may begin at an odd byte.
        scale = flat[vectors * half :].clone().view(torch.float16).view(*rest, tokens, 1).float()
        second = (packed + 8).bitwise_right_shift_(4)
        whole = room((*rest, tokens, dim), flat)
        whole[..., half:].copy_(second[..., : dim - half])
        whole[..., :half].copy_(torch.sub(packed, second, alpha=16))
        return by_token(whole), by_token(scale)

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
        flat, whole, scale = self._coded(by_head(values))
        by_head(shown).addcmul_(whole, scale)
        return flat


class FewLevels(Codec):
    """Differences in two to four levels, an even distance apart, around the mean of a channel.

    From one step to the next most channels of K and V move alike at all tokens, and some much more than others. So a
    message has for every channel (of K or V, a sample and a head) its mean over the tokens and its spread, in six
    levels each: spreads fall from the largest of K or V and a sample by half an octave, means are in units of their
    channel's spread. And it has for every token's K or V the distance of the levels in units of those spreads, from
    the length of its normalised values. Distances and the units have four values an octave, the largest spread two, 8
    bits each.

    Means and spreads are those of some of the tokens, where there are many: what a message says of them is coarser than
    that. On a CPU many operations on the small tensors of channels cost nearly what passes over tokens do, so there are
    few: codes are bits of the numbers themselves, and what codes stand for is looked up.

    On the wire, as bytes: the levels, as many a byte as fit, in the order (2, B, H, S, D); a byte for K and for V of
    every sample and token; for the channels their means and their spreads, three a byte; and for K and V of every
    sample the largest spread and the unit of means. Where that ends, the receiver's sums are the sender's: products of
    levels, distances and spreads are exact, so a fused sum has the same bits.

    Args:
        levels: how many.
    """

    differences = True
    # Distance of the levels of a normal distribution of spread 1 that lose the least, by their number (Max 1960,
    # "Quantizing for minimum distortion").
    DISTANCES: ClassVar[dict[int, float]] = {2: 1.5958, 3: 1.2240, 4: 0.9957, 6: 0.7334}
    IN_A_BYTE: ClassVar[dict[int, int]] = {2: 8, 3: 5, 4: 4, 6: 3}
    # Levels of means and of spreads.
    SIX = 6
    # A channel that moves alike everywhere has a spread all the same, for its mean to be in units of.
    LEAST = 1 / 8
    # The exponent of a code of 0 for a distance or a unit.
    LOWEST = -40
    # Means and spreads are those of at least so many tokens, and of one in so many where there are more.
    TOKENS, EVERY = 128, 4
    # Of so many channels none is further than 8 bits from 0, in distances: not even if all else are 0.
    FITS = 8192

    def __init__(self, levels: int) -> None:
        super().__init__(torch.uint8)
        self.levels, self.distance = levels, self.DISTANCES[levels]
        self._tables: dict[torch.device, _Tables] = {}

    def _parts(self, shape: tuple[int, ...]) -> list[int]:
        """Bytes of the parts of a message."""
        tokens, two, batch, heads, dim = shape
        channels = two * batch * heads * dim
        few, six = -(-tokens * channels // self.IN_A_BYTE[self.levels]), -(-channels // self.IN_A_BYTE[self.SIX])
        return [few, tokens * two * batch, 2 * six, two * batch, two * batch]

    def empty(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.empty(sum(self._parts(shape)), dtype=self.dtype, device=device)

    def size(self, width: int) -> float:
        return 1 / self.IN_A_BYTE[self.levels]

    def extra(self, rows: float, tokens: float, heads: float, width: int) -> float:
        return 2 * rows * (tokens + 2 * heads * width / self.IN_A_BYTE[self.SIX] + 2)

    def encode(self, tokens: Tensor) -> Tensor:
        return self._coded(by_head(tokens).to(torch.float32, copy=True, memory_format=torch.contiguous_format))[0]

    def encode_new(self, values: Tensor, shown: Tensor) -> Tensor:
        flat, moved = self._coded(by_head(values))
        by_head(shown).add_(moved)
        return flat

    def _coded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The message of float32 values (2, B, H, S, D), which are overwritten, and what receivers make of it."""
        two, batch, heads, tokens, dim = values.shape
        shape, channels = (tokens, two, batch, heads, dim), two * batch * heads * dim
        tables = self._tables_on(values.device)
        parts = self._parts(shape)
        flat = torch.empty(sum(parts), dtype=torch.uint8, device=values.device)
        # What is not levels, as integers, and its parts.
        rest = torch.empty(sum(parts[1:]), dtype=torch.int32, device=values.device)
        distances, sixes, largest, units = rest.split(parts[1:])
        # Means and spreads of channels, (2, B, H, 1, D).
        some = values[:, :, :, :: min(self.EVERY, max(1, tokens // self.TOKENS))]
        mean = some.mean(dim=3, keepdim=True)
        squares = torch.mul(some, some, out=self._room(tuple(some.shape), values, number=1))
        spread = squares.mean(dim=3, keepdim=True).addcmul_(mean, mean, value=self.LEAST**2 - 1)
        # Exponents of squares are half octaves of spreads; of what is no number the sign bit may be set.
        halves = spread.view(torch.int32).bitwise_right_shift_(23)
        top = torch.amax(halves, dim=(2, 4), keepdim=True, out=largest.view(two, batch, 1, 1, 1)).clamp_(0, 255)
        codes = torch.empty((2, 3, parts[2] // 2), dtype=torch.int32, device=values.device)
        if codes.numel() > 2 * channels:
            codes.zero_()
        means, falls = codes.view(2, -1)[:, :channels].view(2, *mean.shape).unbind()
        torch.sub(top, halves, out=falls).clamp_(0, self.SIX - 1)
        spread = _looked_up(tables.falls, falls).mul_(_looked_up(tables.halves, top))
        mean.div_(spread)
        size = self.DISTANCES[self.SIX] / (heads * dim) ** 0.5
        unit = self._codes(mean, (2, 4), size, units.view(two, batch, 1, 1, 1))
        power = _looked_up(tables.powers, unit)
        means.copy_(mean.div_(power).add_(self.SIX / 2).clamp_(0, self.SIX - 0.01))
        mean = torch.sub(means, (self.SIX - 1) / 2).mul_(power)
        # Means less values, in units of spreads.
        torch.addcmul(mean, values, spread.reciprocal(), value=-1, out=values)
        # Halves of distances, as steps are odd numbers.
        size = self.distance / 2 / (heads * dim) ** 0.5
        lengths = torch.linalg.vector_norm(values, dim=4, keepdim=True)
        half = self._codes(lengths, 2, size, distances.view(two, batch, 1, tokens, 1))
        # Dense along a head, as torch has no vectorised kernel where two of three tensors repeat one number.
        middle = values.new_full((dim,), self.levels / 2)
        found = torch.addcmul(middle, values, _looked_up(tables.inverses, half), out=values)
        if heads * dim > self.FITS:
            found.clamp_(0, self.levels - 1)
        integers = self._room(tuple(values.shape), values, torch.int8).copy_(found).clamp_(0, self.levels - 1)
        self._pack(integers, flat[: parts[0]])
        steps = values.copy_(torch.add(tables.least, integers, alpha=2, out=integers))
        steps.mul_(_looked_up(tables.powers, half))
        moved = torch.addcmul(mean.mul_(spread), steps, spread, out=steps)
        packed = torch.add(codes[:, 0], codes[:, 1], alpha=self.SIX, out=sixes.view(2, -1))
        packed.add_(codes[:, 2], alpha=self.SIX**2)
        flat[parts[0] :].copy_(rest)
        return flat, moved

    def _decoded(self, flat: Tensor, shape: tuple[int, ...], room: Room) -> Tensor:
        tokens, two, batch, heads, dim = shape
        channels, tables, parts = (two, batch, heads, 1, dim), self._tables_on(flat.device), self._parts(shape)
        # What is not levels, as indices.
        distances, sixes, largest, units = flat[parts[0] :].int().split(parts[1:])
        means, falls = sixes.chunk(2)
        spread = tables.six_falls.index_select(1, falls).view(-1)[: prod(channels)].view(channels)
        spread = spread.mul_(_looked_up(tables.halves, largest.view(two, batch, 1, 1, 1)))
        mean = tables.six_means.index_select(1, means).view(-1)[: prod(channels)].view(channels)
        mean = mean.mul_(_looked_up(tables.powers, units.view(two, batch, 1, 1, 1))).mul_(spread)
        distance = _looked_up(tables.steps, distances.view(two, batch, 1, tokens, 1))
        moved = self._steps(flat[: parts[0]], (two, batch, heads, tokens, dim), room).mul_(distance)
        return by_token(torch.addcmul(mean, moved, spread, out=moved))

    def _tables_on(self, device: torch.device) -> _Tables:
        found = self._tables.get(device)
        if found is None:
            found = self._tables[device] = _Tables(self.levels, device)
        return found

    def _codes(self, parts: Tensor, dim: int | tuple[int, ...], scale: float, out: Tensor) -> Tensor:
        """Codes (int32) of lengths over some dimensions, times a number.

        The exponent of a square as float32, and the first bit that follows: two parts of an octave of squares.
        """
        squares = torch.mul(parts, parts).sum(dim=dim, keepdim=True).mul_(scale**2 * 2.0 ** (-127 - 2 * self.LOWEST))
        bits = squares.view(torch.int32).bitwise_right_shift_(22)
        # Of infinity and of what is no number the largest or the least.
        return torch.clamp(bits, 0, 255, out=out)

    def _pack(self, integers: Tensor, place: Tensor) -> None:
        """Write levels (int8, from 0) into bytes: one has one of each of several runs, which stay contiguous."""
        count, integers = self.IN_A_BYTE[self.levels], integers.view(-1)
        if rest := -integers.numel() % count:
            integers = torch.nn.functional.pad(integers, (0, rest))
        runs = integers.view(count, -1).unbind()
        # Signed bytes are faster than others to convert, and sums and products of both have the same bits.
        packed, place = runs[-1], place.view(torch.int8)
        for run in reversed(runs[:-1]):
            packed = torch.add(run, packed, alpha=self.levels, out=place)

    def _steps(self, packed: Tensor, shape: tuple[int, ...], room: Room) -> Tensor:
        """Levels around 0 of the codes in bytes, as float32: times `_Tables.steps` they are differences."""
        count = self.IN_A_BYTE[self.levels]
        bits = self.levels.bit_length() - 1
        whole = room((count, packed.numel()), packed)
        if self.levels == 1 << bits:
            # Products take the bits of a run to the top of its bytes, where what is above them is lost.
            runs, packed = self._room(tuple(whole.shape), packed, torch.int8), packed.view(torch.int8)
            torch.mul(self._tables_on(packed.device).factors, packed, out=runs)
            # As signed bytes half of all levels are below 0, and a half step lies in the middle.
            top = 1 << (8 - bits)
            whole.copy_(runs.bitwise_and_(-top).add_(top // 2 - 128))
        else:
            rest = packed.float()
            for run in whole.unbind()[:-1]:
                above = torch.div(rest, self.levels, rounding_mode="trunc")
                torch.sub(rest, above, alpha=self.levels, out=run)
                rest = above
            whole[-1].copy_(rest)
            whole.sub_((self.levels - 1) / 2)
        return whole.view(-1)[: prod(shape)].view(shape)


class _Tables:
    """What codes of `FewLevels` stand for, by code, on a device.

    Their digits are few, so that products of all that belong together are exact: 4 bits of a distance or a unit, 8 of a
    half octave.

    Attributes:
        powers: halves of distances, and units of means.
        steps: halves of distances, for levels as `FewLevels._steps` gives them.
        inverses: what values times -1 are multiplied by, to be in units of distances.
        halves: spreads, by the exponent of their squares.
        falls: spreads over the largest.
        least: the lowest step, int8, without dimensions.
        factors: what takes the bits of every run to the top of a byte, int8 (runs, 1).
        six_means, six_falls: levels of means around 0, and `falls`, by byte and the place in it (3, 256).
    """

    def __init__(self, levels: int, device: torch.device) -> None:
        codes, bits, six = range(256), levels.bit_length() - 1, FewLevels.SIX
        powers = [2.0 ** (code // 4 + FewLevels.LOWEST) * (9 / 8, 21 / 16, 25 / 16, 15 / 8)[code % 4] for code in codes]
        step = 2.0 ** (bits - 7) if levels == 1 << bits else 2.0
        falls = [_rounded(2.0 ** (-fall / 2)) for fall in range(six)]
        sixes = [code // place % six for place in (1, six, six**2) for code in codes]
        tables = (
            powers,
            [step * power for power in powers],
            [-0.5 / power for power in powers],
            # The middle of what has an exponent, by logarithms.
            [_rounded(2.0 ** ((code - 126.5) / 2)) for code in codes],
            falls,
            [level - (six - 1) / 2 for level in sixes],
            [falls[level] for level in sixes],
        )
        # One copy to the device.
        whole = torch.tensor([number for table in tables for number in table], dtype=torch.float32, device=device)
        self.powers, self.steps, self.inverses, self.halves, self.falls, six_means, six_falls = whole.split(
            [len(table) for table in tables]
        )
        self.six_means, self.six_falls = six_means.view(3, 256), six_falls.view(3, 256)
        # A factor of 128 is -128 as a signed byte; their products have the same bits.
        factors = [1 << 8 - bits * run for run in range(1, 8 // bits + 1)]
        small = torch.tensor([257 - levels, *factors], dtype=torch.uint8, device=device).view(torch.int8)
        self.least, self.factors = small[0], small[1:, None]


def _rounded(value: float) -> float:
    """A number in 8 bits of its own."""
    digits, exponent = frexp(value)
    return ldexp(round(digits * 256) / 256, exponent)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.view(-1)).view(codes.shape)


def by_head(tokens: Tensor) -> Tensor:
    """A view (2, B, H, S, D) of (S, 2, B, H, D): the order in which keys and values lie in memory, and in messages."""
    return tokens.permute(1, 2, 3, 0, 4)


def by_token(values: Tensor) -> Tensor:
    """A view (S, 2, B, H, D) of (2, B, H, S, D)."""
    return values.permute(3, 0, 1, 2, 4)


def one_after_other(slots: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """A copy of several slots (S, 2, B, H, D) in one, in memory (2, B, H, S, D) as theirs: a head's tokens together."""
    return by_token(torch.cat([by_head(slot) for slot in slots], dim=3, out=out))


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

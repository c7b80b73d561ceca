"""Compression of keys and values for the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor


class Codec:
    """Cast of tokens' keys and values to a floating dtype for the wire; values beyond its range become its largest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def empty(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A flat tensor that takes `encode` of a tensor (S, 2, B, H, D) of that shape."""
        return torch.empty(prod(shape), dtype=self.dtype, device=device)

    def encode(self, tokens: Tensor) -> Tensor:
        """(S, 2, B, H, D), K before V, to a flat contiguous tensor of its own memory."""
        limit, values = torch.finfo(self.dtype).max, by_head(tokens)
        if torch.finfo(tokens.dtype).max > limit:
            values = values.clamp(-limit, limit)
        flat = torch.empty(values.shape, dtype=self.dtype, device=tokens.device)
        return flat.copy_(values).view(-1)

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tokens again, (S, 2, B, H, D), in any floating dtype; they may lie in the message's memory."""
        tokens, *rest, dim = shape
        return by_token(flat.view(*rest, tokens, dim))

    def put(self, flat: Tensor, slots: Sequence[Tensor]) -> None:
        """Write a message's tokens into their places (S, 2, B, H, D), one after the other."""
        for slot, part in _by_slot(slots, self.decode(flat, joined(slots))):
            slot.copy_(part)

    def size(self, width: int) -> float:
        """Bytes of an element on the wire, of heads that are so wide; scales of whole messages are left out."""
        return float(self.dtype.itemsize)


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
        scale = values.abs().amax(dim=(3, 4), keepdim=True) / 127  # (2, B, H, 1, 1)
        whole = (values / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127, 127)
        flat = self.empty(tuple(tokens.shape), values.device)
        flat[: whole.numel()].view(whole.shape).copy_(whole)
        flat[whole.numel() :].copy_(scale.reshape(-1).view(torch.int8))
        return flat

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = prod(shape)
        tokens, two, batch, heads, dim = shape
        # A copy: the scales may begin at a byte that is no multiple of four.
        scale = flat[count:].clone().view(torch.float32).view(two, batch, heads, 1, 1)
        return by_token(flat[:count].view(two, batch, heads, tokens, dim) * scale)


class Int4(Codec):
    """What is new since the step before, as 4-bit integers with a float16 scale for K and V of every token and head.

    The scale is max|x| / 7, symmetric. A scale of its own for every token keeps the few large ones from taking all
    levels. The error of a message is at most half a scale, and what rounding the scale adds; the next difference
    includes it. On the wire: two integers a byte, then the scales, as bytes. A byte holds an element of the first half
    of a head and one of the second, 16 · second + first: both halves stay contiguous.
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
        """The message of float32 values (2, B, H, S, D), their integers as float32 and the scales."""
        limits = torch.finfo(torch.float16)
        largest = values.abs().amax(dim=4, keepdim=True)  # (2, B, H, S, 1)
        half = (largest / 7).clamp_(limits.tiny, limits.max).half()
        scale = half.float()
        numbers = (values / scale).round_().clamp_(-7, 7)
        integers = numbers.to(torch.int8)
        if numbers.shape[-1] % 2:
            integers = torch.nn.functional.pad(integers, (0, 1))
        first, second = integers.chunk(2, dim=-1)
        flat = self.empty(tuple(values.shape), values.device)
        packed, scales = flat.split([first.numel(), 2 * half.numel()])
        torch.add(first, second, alpha=16, out=packed.view(first.shape))
        # As bytes: where there are an odd number of them before, they cannot be written as numbers.
        scales.copy_(half.view(-1).view(torch.int8))
        return flat, numbers, scale

    def _uncoded(self, flat: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """A message's integers and scales, as float32, (S, 2, B, H, D) and (S, 2, B, H, 1)."""
        tokens, *rest, dim = shape
        vectors, half = prod(shape[:-1]), (dim + 1) // 2
        packed = flat[: vectors * half].view(*rest, tokens, half)
        # A copy: the scales may begin at an odd byte.
        scale = flat[vectors * half :].clone().view(torch.float16).view(*rest, tokens, 1).float()
        second = (packed + 8).bitwise_right_shift_(4)
        whole = torch.cat([torch.sub(packed, second, alpha=16), second[..., : dim - half]], dim=-1).float()
        return by_token(whole), by_token(scale)

    def decode(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        whole, scale = self._uncoded(flat, shape)
        return whole.mul_(scale)

    def put(self, flat: Tensor, slots: Sequence[Tensor]) -> None:
        """Add a message's differences to the tokens (S, 2, B, H, D) of their places, one after the other."""
        whole, scale = self._uncoded(flat, joined(slots))
        for slot, part, of in _by_slot(slots, whole, scale):
            # Exact products: a fused sum has the same bits.
            slot.addcmul_(part, of)

    def encode_new(self, slots: Sequence[Tensor], shown: Tensor) -> Tensor:
        """The message of what is new, and what is shown moved on by what the receivers make of it.

        Args:
            slots: the tokens (S, 2, B, H, D) of several places, one after the other.
            shown: the same tokens as all others have them, in any floating dtype; written to.
        """
        new = torch.empty_like(by_head(shown), dtype=torch.float32, memory_format=torch.contiguous_format)
        for slot, before, place in _by_slot(slots, shown, by_token(new)):
            # As many kernels as streams, and what is written is read once less.
            torch.sub(slot, before.float(), out=place)
        flat, whole, scale = self._coded(new)
        by_head(shown).addcmul_(whole, scale)
        return flat


def by_head(tokens: Tensor) -> Tensor:
    """A view (2, B, H, S, D) of (S, 2, B, H, D): the order in which keys and values lie in memory, and in messages."""
    return tokens.permute(1, 2, 3, 0, 4)


def by_token(values: Tensor) -> Tensor:
    """A view (S, 2, B, H, D) of (2, B, H, S, D)."""
    return values.permute(3, 0, 1, 2, 4)


def one_after_other(slots: Sequence[Tensor]) -> Tensor:
    """A copy of several slots (S, 2, B, H, D) in one, in memory (2, B, H, S, D) as theirs: a head's tokens together."""
    return by_token(torch.cat([by_head(slot) for slot in slots], dim=3))


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
}

"""Compression of keys and values for the wire."""

from __future__ import annotations

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


def codec(name: str | None) -> Codec | None:
    """The codec of `ParallelConfig.compress`: ``"fp16"``, ``"bf16"``, ``"int8"``, ``"int4"``, or None."""
    if name is None:
        return None
    return {"fp16": Codec(torch.float16), "bf16": Codec(torch.bfloat16), "int8": Int8(), "int4": Int4()}[name]

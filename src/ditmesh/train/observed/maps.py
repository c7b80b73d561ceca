"""Maps of one tensor's numbers into another, found by the results of chosen numbers.

Pipelines pack latents into tokens, scale and shift them channel by channel, put them among the tokens of a reference,
or change a sign. All of that is one form: every number of the output is a constant, or one number of the input times
a factor, plus a constant. Other maps are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import ConfigError

# Places are told in digits of this base: half precision holds them, and their multiples, apart.
BASE = 32
# The largest error of a number, relative to the largest: float32 of a few operations, and half precision.
MAP_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
HALF_TOLERANCE = 2e-2


@dataclass(frozen=True)
class NumberMap:
    """``output = base + scale * input[index]``, number by number, of tensors of one sample without its batch dimension.

    Attributes:
        source, shape: of the input and the output.
        base, scale: of the output's shape, float32.
        index: flat places in the input, of the output's shape; 0 where ``scale`` is 0.
    """

    source: tuple[int, ...]
    shape: tuple[int, ...]
    base: Tensor
    scale: Tensor
    index: Tensor

    @property
    def held(self) -> Tensor:
        """Marks of the input's numbers that stand in the output, of the input's shape."""
        found = torch.zeros(_size(self.source), dtype=torch.bool)
        found[self.index[self.scale != 0]] = True
        return found.view(self.source)

    @property
    def unique_marks(self) -> Tensor:
        """Marks of the input's numbers that stand in the output exactly once, of the input's shape."""
        places = self.index[self.scale != 0]
        return (torch.bincount(places, minlength=_size(self.source)) == 1).view(self.source)

    def only(self, numbers: Tensor) -> NumberMap:
        """The map of some numbers of the input alone; the others' places are constants.

        Args:
            numbers: of the input's shape; whether it stays.
        """
        stays = (self.scale != 0) & numbers.flatten()[self.index]
        return replace(self, scale=self.scale * stays, index=self.index * stays)

    def __call__(self, value: Tensor) -> Tensor:
        """(B, *shape) of (B, *source), differentiable."""
        return self._on(self.base, value) + self._on(self.scale, value) * self.moved(value)

    def moved(self, value: Tensor) -> Tensor:
        """The numbers at their places, neither scaled nor shifted: (B, *shape) of (B, *source)."""
        found = value.flatten(1)[:, self.index.flatten().to(value.device)]
        return found.view(len(value), *self.shape)

    def inverse(self) -> NumberMap:
        """The input by the output's numbers; 0 for what does not stand there, the first place of what stands twice."""
        seen = self.scale.flatten() != 0
        places, numbers = self.index.flatten()[seen].flip(0), torch.arange(seen.numel())[seen].flip(0)
        back = torch.zeros(_size(self.source), dtype=torch.long)
        back[places] = numbers
        held = self.held.flatten()
        scale = torch.where(held, 1 / self.scale.flatten()[back], 0.0)
        base = -self.base.flatten()[back] * scale
        back = back * held
        return NumberMap(
            self.shape, self.source, base.view(self.source), scale.view(self.source), back.view(self.source)
        )

    def on(self, device: torch.device) -> NumberMap:
        """The map with its tensors on a device."""
        base, scale, index = (one.to(device) for one in (self.base, self.scale, self.index))
        return replace(self, base=base, scale=scale, index=index)

    def without_base(self) -> NumberMap:
        """The map without its constants."""
        return replace(self, base=torch.zeros_like(self.base))

    def _on(self, part: Tensor, value: Tensor) -> Tensor:
        return part.to(value.device, value.dtype)


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


class FillValues:
    """Chosen numbers for one tensor: zeros, ones, the digits of every place, noise.

    Args:
        shape: of one sample, without its batch dimension.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, size = tuple(shape), _size(shape)
        places = torch.arange(size)
        self.digits = 1
        while BASE**self.digits < size:
            self.digits += 1
        digits = [(places // BASE**power % BASE).float() for power in range(self.digits)]
        noise = torch.randn(size, generator=torch.Generator().manual_seed(0))
        self.values = [one.view(self.shape) for one in (torch.zeros(size), torch.ones(size), *digits, noise)]

    def __len__(self) -> int:
        return len(self.values)

    def map_of(self, seen: Sequence[Tensor], what: str, lenient: bool = False) -> NumberMap:
        """The map from the results of all fills.

        Args:
            seen: tensors without their batch dimension, in the order of `values`.
            what: the name of the tensor, for the error.
            lenient: numbers that are not of the form become constants; not all may.

        Raises:
            ConfigError: the results are not of this form.
        """
        dtype = seen[0].dtype
        zeros, ones, *digits, noise = (one.double().cpu() for one in seen)
        scale = ones - zeros
        largest = scale.abs().max()
        tolerance = MAP_TOLERANCE.get(dtype, HALF_TOLERANCE)
        scale[scale.abs() <= tolerance * largest] = 0
        safe = torch.where(scale == 0, 1, scale)
        index, off = torch.zeros_like(scale, dtype=torch.long), torch.zeros_like(scale)
        for power, digit in enumerate(digits):
            exact = (digit - zeros) / safe
            whole = exact.round()
            off = torch.maximum(off, (exact - whole).abs() * (scale != 0))
            index += (whole.long() * BASE**power) * (scale != 0)
        size = _size(self.shape)
        mixed = ~(off <= 0.3) | (index < 0) | (index >= size)
        if bool(mixed.any()) and not (lenient and bool((~mixed & (scale != 0)).any())):
            raise ConfigError(f"{what} mixes numbers: no number of it is one of the {size}, scaled and shifted")
        scale, index = scale * ~mixed, index * ~mixed
        # Numbers such as 1 and 0.5 have come through float32.
        nice = (scale * 2**10).round() / 2**10
        scale = torch.where((scale - nice).abs() <= 1e-6 * largest, nice, scale)
        expected = zeros + scale * self.values[-1].double().flatten()[index.flatten()].view(index.shape)
        wrong = (expected - noise).abs() / max(float(expected.abs().max()), 1e-12)
        bent = ~(wrong <= tolerance)
        if bool(bent.any()) and not (lenient and bool((~bent & (scale != 0)).any())):
            raise ConfigError(f"{what} is not a linear function of each number alone (off by {float(wrong.max()):.1e})")
        scale, index = scale * ~bent, index * ~bent
        return NumberMap(self.shape, tuple(scale.shape), zeros.float(), scale.float(), index)

"""Checks for the same latents in every step, and the same result, on every rank; callbacks may change them.

A few sums of the latents that the transformer is called with are kept on the device. When the request is over they are
read, and compared once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..config import ParallelConfig
from ..core.arguments import MISSING, Arguments
from ..core.patching import Proceed
from ..core.values import is_plain
from ..errors import InputError
from .base import CallArguments, Context, Strategy

# Sums of a tensor: of every so manyth element, so that shifted, mirrored and permuted values have other sums.
SUMS = 13
# Elements of a result that are looked at, at most.
LOOKED_AT = 1 << 20
# The largest distance of ranks' sums, relative to the norm of all elements. Ranks need not round alike: their devices
# may differ, and some kernels of autoencoders add up in any order.
SUM_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
ROUGH = 3e-2
# With promised bits: sums of equal bits, on devices that add up in other orders.
EXACT = 1e-6


def sums_of(values: Tensor) -> Tensor:
    """Sums of a tensor's elements, in float32, and the norm of all last: at most 2 * `SUMS` numbers, on its device."""
    flat = values.detach().reshape(-1)
    rows = flat.numel() // SUMS
    table, rest = flat[: rows * SUMS].view(rows, SUMS), flat[rows * SUMS :]
    # torch takes no norm in a narrower type than the elements have.
    wide = torch.promote_types(flat.dtype, torch.float32)
    norm = torch.linalg.vector_norm(flat, dtype=wide).to(torch.float32).reshape(1)
    return torch.cat([table.sum(0, dtype=torch.float32), rest.to(torch.float32), norm])


def relative_distance(here: Tensor, there: Tensor) -> float:
    """The distance of two tensors' `sums_of` relative to the norm; infinite if sizes, NaN or infinities differ."""
    if here.shape != there.shape:
        return float("inf")
    same = (here == there) | (here.isnan() & there.isnan())
    if bool(same.all()):
        return 0.0
    odd = ~same
    if not bool((here[odd].isfinite() & there[odd].isfinite()).all()):
        return float("inf")
    difference = torch.where(odd, here - there, 0.0).double()
    scale = float(here[-1].nan_to_num(posinf=0.0).double()) or float(there[-1].nan_to_num(posinf=0.0).double())
    return float(torch.linalg.vector_norm(difference)) / scale if scale else float("inf")


class SameLatents(Strategy):
    """Raises an error if the latents or the result of a request differ between its ranks."""

    name = "latents"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Of this request: by step and number of the tensor its sums, and how far apart they may be.
        self._noted: dict[tuple[int, int], tuple[Tensor, float]] | None = None
        self._result: list[Tensor] = []

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.world_size > 1 and config.inputs != "trust"

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            undo.callback(model.chain.add(self._around_call))

    def arguments(self, pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        # Only in a pipeline's call all ranks are known to come to an end of the request together.
        self._noted, self._result = {}, []
        return args, kwargs

    def _around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """Note the sums of the latents that a call is given."""
        call = self.context.clock.call
        if self._noted is not None and call.branch == 0 and arguments.names:
            latents = arguments.get(arguments.names[0])
            for number, value in enumerate(tree_leaves(latents) if latents is not MISSING else ()):
                # Patches that are on their way have a type of their own: no rank has all of them.
                if is_plain(value) and value.is_floating_point() and value.numel() and not value.is_meta:
                    self._noted[call.step, number] = sums_of(value), SUM_TOLERANCE.get(value.dtype, ROUGH)
        return proceed(arguments)

    def result(self, value: Any) -> Any:
        if self._noted is not None:
            self._result = [sums_of(one) for one in _images_in(value)]
        return value

    def end_request(self, failed: bool) -> None:
        noted, result = self._noted, self._result
        self._noted, self._result = None, []
        link = self.context.mesh.world
        if failed or noted is None or link.size == 1:
            return
        mine = {key: sums for key, (sums, _) in noted.items()} | {(-1, n): sums for n, sums in enumerate(result)}
        every: list[Mapping[tuple[int, int], Tensor]] = link.all_gather_object(_on_the_host(mine))
        # In the order of the steps; the result comes last.
        for step, number in sorted(every[0], key=lambda key: (key[0] < 0, key)):
            bits = self.context.config.reproducible and step >= 0
            limit = EXACT if bits else noted.get((step, number), (None, ROUGH))[1]
            odd = [
                rank
                for rank, other in zip(link.ranks, every, strict=True)
                if (step, number) in other and relative_distance(other[step, number], every[0][step, number]) > limit
            ]
            if odd:
                ranks = f"rank {odd[0]} has" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} have"
                what = "images at the end" if step < 0 else f"latents in step {step + 1}"
                raise InputError(
                    f"{ranks} other {what} than rank {link.ranks[0]}, so the image would be none that one device "
                    "makes: a callback, or code that runs between the steps, gives the ranks different values; let it "
                    "draw from the generator that the pipeline is given, or seed it alike on every rank"
                )


def _on_the_host(sums: Mapping[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
    """The sums, in one copy from each device."""
    copies: dict[tuple[int, int], Tensor] = {}
    for device in {one.device for one in sums.values()}:
        keys = [key for key, one in sums.items() if one.device == device]
        parts = torch.cat([sums[key] for key in keys]).cpu().split([len(sums[key]) for key in keys])
        # Of its own memory: pickle takes all of what a tensor is a view of.
        copies.update({key: part.clone() for key, part in zip(keys, parts, strict=True)})
    return copies


def _images_in(value: Any) -> Iterator[Tensor]:
    import numpy as np
    from PIL.Image import Image

    for leaf in tree_leaves(value):
        if isinstance(leaf, Image):
            leaf = np.asarray(leaf)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fui":
            leaf = torch.from_numpy(np.ascontiguousarray(leaf).astype(np.float32, copy=False))
        if is_plain(leaf) and leaf.numel() and not leaf.is_complex() and not leaf.is_meta:
            flat = leaf.detach().reshape(-1)
            step = max(1, flat.numel() // LOOKED_AT)
            yield flat[:: step + (step + 1) % 2].float()

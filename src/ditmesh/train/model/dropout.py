"""Dropout for a rank's part of the tokens, with the masks that one device draws for these tokens.

Every rank draws the mask for the whole sequence, from a generator that all ranks of the sequence have in one state, and
takes its own tokens of it. So ranks draw as often as one device does, and the generator stays in step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from ...comm.mesh import Mesh
from ...core.partition import Partition
from ...core.patching import Patch
from ...engine import engine_of
from ...errors import ConfigError
from ...layout import Region, layout_of
from ...strategies.hooks import ModelHooks

DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def dropping(model: nn.Module) -> dict[str, nn.Module]:
    """The dropout modules of a model in training, by path."""
    return {name: one for name, one in model.named_modules() if isinstance(one, DROPOUTS) and cast(Any, one).p > 0}


def dropout_refusal(model: nn.Module, mesh: Mesh) -> str | None:
    """The reason why masks would differ from those of one device; None: they do not.

    Args:
        model: a transformer with its adapters, before it is made parallel.
    """
    found = dropping(model)
    if not found or mesh.sequence.size * mesh.tensor.size == 1:
        return None
    name, first = next(iter(found.items()))
    what = f"{name} has dropout p={cast(Any, first).p:g}"
    way = "use data ranks alone, or no dropout"
    if mesh.tensor.size > 1:
        return f"{what}, and tensor ranks would draw masks for a part of the features each; {way}"
    layout = layout_of(model)
    # A text that every rank has whole could have as many tokens as a rank has of the image.
    apart = layout is None or any(not planned.queries for region in layout.regions for planned in region.attention)
    if apart or any(type(one) is not nn.Dropout for one in found.values()):
        name = type(model).__name__
        return f"{what}, and it is not known which of its tokens a rank of ulysses or ring has in {name}; {way}"
    return None


class TokenDropout:
    """The dropout modules of a parallel model, replaced until `close`.

    Args:
        model: parallelised; `dropout_refusal` has returned None for it.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        layout = layout_of(model)
        self._link = mesh.sequence
        self._handler = cast(Any, next(one.get(ModelHooks).handler for one in engine_of(model).models))
        self._patches: list[Patch] = []
        for name, module in dropping(model).items():
            regions = layout.regions if layout is not None else ()
            region = next((one for one in regions if name.startswith(f"{one.blocks}.")), None)
            if region is not None:
                self._patches.append(Patch(module, "forward", partial(self._forward, name, module, region)))

    def close(self) -> None:
        """Restore the modules' forwards."""
        for patch in self._patches:
            patch.undo()

    def _forward(self, name: str, module: nn.Module, region: Region, value: Tensor) -> Tensor:
        p = cast(Any, module).p
        # Without tokens: modulation, the same on every rank.
        if not module.training or value.dim() < 3:
            return F.dropout(value, p, module.training)
        cut = self._cut(name, region, value.shape[-2])
        dim = value.dim() - 2
        whole = value.new_ones((*value.shape[:dim], cut.total, value.shape[-1]))
        return value * cut.copy(F.dropout(whole, p), dim, self._link.rank)

    def _cut(self, name: str, region: Region, length: int) -> Partition:
        """The tokens of a tensor with ``length`` of this rank's tokens."""
        tokens, rank = self._handler.tokens(), self._link.rank
        found: dict[Any, Partition] = {}
        for names in self._orders(region, tokens):
            cut = tokens.select(names)
            if cut.lengths[rank] == length:
                found[(cut.total, *cut.runs(rank))] = cut
        if len(found) != 1:
            every = ", ".join(f"{total} of {one}" for one, total in zip(tokens.names, tokens.totals, strict=True))
            raise ConfigError(
                f"{name} drops out of {length} tokens, and it is not known which of {every} they are; use data ranks "
                "alone, or no dropout"
            )
        return next(iter(found.values()))

    def _orders(self, region: Region, tokens: Partition) -> Iterator[tuple[str, ...]]:
        yield from ((name,) for name in tokens.names)
        for planned in region.attention:
            for names in (planned.queries, planned.keys):
                if len(names) > 1:
                    yield names

"""The check that attention was intercepted: a block that computes it elsewhere would see this rank's tokens only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import nn

from ..core.library import is_of_libraries
from ..errors import LayoutError
from ..layout import Attention
from .caches import diffusers_hooks
from .hooks import BlockSite


class Coverage:
    """Compares the attention calls that blocks make with those that the layout lists.

    A layout lists the calls of the block that makes most of them. Another one of its list makes at least one for each
    of its attention modules. Fewer are right only where a cache of diffusers leaves some out, and then the same
    processors have made them all before, through the same functions.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, nn.Module] = {}
        # The processors with which a block has made all its calls, as `_processors` returns them.
        self._covered: dict[str, list[tuple[Any, ...]]] = {}

    def watch(self, site: BlockSite, block: nn.Module) -> None:
        self._blocks[site.path] = block

    def check(self, site: BlockSite, planned: Sequence[Attention], made: int) -> None:
        """Refuse a block that was seen to make fewer attention calls than it has computed."""
        if made >= len(planned):
            if site.path not in self._covered:
                self._covered[site.path] = _processors(site, self._blocks[site.path])
            return
        if not any(call.keys for call in planned):
            return
        block = self._blocks[site.path]
        entries = self._covered.get(site.path)
        if entries is not None and made >= len(entries) - 1 > 0:
            return
        processors = _processors(site, block)
        least = max(1, min(len(processors) - 1, len(planned)))
        if made >= least:
            self._covered.setdefault(site.path, processors)
            return
        # Some of diffusers' hooks leave a module out.
        hooked = any(diffusers_hooks(module) for module in block.modules())
        if entries is not None and hooked and len(entries) == len(processors):
            pairs = (pair for was, now in zip(entries, processors, strict=True) for pair in zip(was, now, strict=True))
            # Backends are names.
            if all(a is b or (isinstance(a, str) and a == b) for a, b in pairs):
                return
        if "forward" in vars(block) and not is_of_libraries(vars(block)["forward"]):
            raise LayoutError(
                f"{site.path} has a forward of your own, which made {made} attention calls through torch's "
                f"scaled_dot_product_attention where the layout of {site.model} lists {least}, and whether it is right "
                "with this rank's tokens only is not known; leave a block out with diffusers' hooks (LayerSkipConfig), "
                "or use cfg or data"
            )
        raise LayoutError(
            f"{site.path} made {made} attention calls through torch's scaled_dot_product_attention, but the layout of "
            f"{site.model} lists {least}; what computes the others sees this rank's tokens only: use the attention "
            "backend 'native' and processors that call that function, or choose a kernel with "
            "ParallelConfig(attention=...)"
        )


def _processors(site: BlockSite, block: nn.Module) -> list[tuple[Any, ...]]:
    """Every attention module's processor in a block, its backend and its dispatcher; last torch's function and backend.

    The dispatcher is diffusers', as the processor's module names it: a program may have put another function there.
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    leaves = {leaf.module for leaf in site.region.leaves}
    processors = [getattr(module, "processor", None) for name, module in block.named_modules() if name not in leaves]
    entries = [
        (
            processor,
            getattr(processor, "_attention_backend", None),
            getattr(sys.modules.get(type(processor).__module__), "dispatch_attention_fn", None),
        )
        for processor in processors
        if processor is not None
    ]
    return [*entries, (F.scaled_dot_product_attention, *_AttentionBackendRegistry.get_active_backend())]

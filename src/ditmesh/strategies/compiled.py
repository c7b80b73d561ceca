"""torch.compile under the hooks.

A block is compiled inside its hooks: those that cut and gather run in Python around it, and attention is
one opaque operator (`ditmesh::attend`) that asks at run time who computes it. The graph therefore has no break
and does not depend on ranks, layers or requests; only on shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from ..config import ParallelConfig
from ..core.patching import Patch
from ..errors import InputError
from ..layout import TokenLayout
from .base import Strategy


def compile_blocks(model: nn.Module, layout: TokenLayout, backend: str) -> Callable[[], None]:
    """Compile each block of the layout's lists as one graph; returns the undo. `InputError`: no such backend."""
    if backend == "inductor":
        from torch._inductor import config

        if config.triton.cudagraphs:
            raise InputError(
                "torch._inductor.config.triton.cudagraphs is on, and what ranks send inside a block cannot be recorded "
                "in a CUDA graph; switch it off (TORCHINDUCTOR_CUDAGRAPHS=0)"
            )
    known = torch.compiler.list_backends(None)
    if backend not in known:
        raise InputError(f"compile={backend!r} is not a backend of torch.compile here; use one of {', '.join(known)}")
    undo = ExitStack()
    for region in layout.regions:
        for block in model.get_submodule(region.blocks).children():
            undo.callback(Patch(block, "forward", torch.compile(block.forward, backend=backend, fullgraph=True)))
    return undo.close


class CompiledBlocks(Strategy):
    """Blocks of every transformer, compiled."""

    name = "compile"
    no_gradient = "attention is an operator without a gradient in blocks that compile=... has compiled"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.compile is not None

    def apply(self, undo: ExitStack) -> None:
        assert self.context.config.compile is not None
        for model in self.context.models:
            undo.callback(compile_blocks(model.model, model.layout, self.context.config.compile))

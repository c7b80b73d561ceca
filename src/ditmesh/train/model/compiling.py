"""torch.compile of a transformer's blocks in training.

Blocks are compiled one by one ("regional compilation"): they share their code, so that one graph, forward and
backward, serves all of them, and what is around them, such as gradient checkpointing, is as before.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from ...core.patching import Patch
from ...errors import ConfigError
from ..config import TrainConfig


def compile_blocks_of(model: nn.Module, config: TrainConfig, undo: ExitStack) -> None:
    """Compile the forward of every block in the transformer's lists.

    Args:
        config: ``compile`` is True for inductor, or another backend's name.
        undo: gets what puts the blocks' own forwards back.

    Raises:
        ConfigError: torch has no such backend, or the model has no blocks.
    """
    backend = "inductor" if config.model.compile is True else str(config.model.compile)
    known = torch.compiler.list_backends(None)
    if backend not in known:
        raise ConfigError(f"compile={backend!r} is not a backend of torch.compile here; use one of {', '.join(known)}")
    lists = [one for one in model.children() if isinstance(one, nn.ModuleList)]
    if not any(len(one) for one in lists):
        raise ConfigError(f"compile: {type(model).__name__} has no lists of blocks to compile; leave compile out")
    for blocks in lists:
        for block in blocks:
            undo.callback(Patch(block, "forward", torch.compile(block.forward, backend=backend)))

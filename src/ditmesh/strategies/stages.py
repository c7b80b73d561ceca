"""Blocks to stages: which rank of the pipe axis has which blocks, and their weights.

A stage is a run of consecutive blocks over all block lists of a model, in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Link
from ..errors import ConfigError, InputError
from ..layout import TokenLayout
from ..methods import replace_method

# Parts of a parameter's path that mark work on a vector or on the short text stream, not on the image's tokens.
_NOT_IMAGE = ("norm", "ada", "mod", "context", "add_", "txt", "text", "temb", "time", "to_k_ip", "to_v_ip")


def balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cut a row of blocks into consecutive stages so that the slowest is as fast as possible.

    Args:
        costs: cost of every block, in any unit.
        stages: how many stages; at most as many as blocks.

    Returns:
        Number of blocks of every stage, each at least one. Among equally good cuts the one with the smallest sum
        of squared stage costs, then the one whose first stages are longest.

    Raises:
        ConfigError: fewer blocks than stages.

    >>> balanced([2, 2, 1, 1, 1, 1], 2)
    (2, 4)
    """
    blocks = len(costs)
    if stages > blocks:
        raise ConfigError(f"{blocks} blocks cannot be shared by pipe={stages} stages; use pipe <= {blocks}")
    sums = [0.0, *accumulate(costs)]
    # best[k][n]: (slowest, squares, minus the lengths) of the best cut of the first n blocks into k stages
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(stages):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (slowest, squares, lengths) in best.items():
            for end in range(start + 1, blocks + 1):
                cost = sums[end] - sums[start]
                cut = (max(slowest, cost), squares + cost * cost, (*lengths, start - end))
                if end not in longer or cut < longer[end]:
                    longer[end] = cut
        best = longer
    return tuple(-length for length in best[blocks][2])


def blocks_of(model: nn.Module, layout: TokenLayout) -> list[tuple[str, nn.Module]]:
    """Every block with its path, in the order of the layout's lists."""
    return [
        (f"{region.blocks}.{index}", block)
        for region in layout.regions
        for index, block in enumerate(model.get_submodule(region.blocks).children())
    ]


def estimated_costs(model: nn.Module, layout: TokenLayout) -> list[float]:
    """Cost of every block: the weights that each image token passes through. Works without memory for them."""
    costs = []
    for _, block in blocks_of(model, layout):
        shapes = [(path, shape_of(parameter)) for path, parameter in block.named_parameters()]
        weights = [(path, shape.numel()) for path, shape in shapes if len(shape) >= 2]
        work = sum(count for path, count in weights if not any(mark in path.lower() for mark in _NOT_IMAGE))
        costs.append(float(work or sum(count for _, count in weights) or 1))
    return costs


def stage_of(lengths: Sequence[int]) -> list[int]:
    """The stage of every block.

    >>> stage_of((2, 3))
    [0, 0, 1, 1, 1]
    """
    return [stage for stage, length in enumerate(lengths) for _ in range(length)]


class StageWeights:
    """The weights of a model's blocks, each on its own stage only. In place; `close` is the exact inverse.

    Args:
        model: the transformer: whole on every rank, or with this rank's blocks only, as `ditmesh.load` leaves it.
        layout: its block lists.
        lengths: blocks of every stage.
        link: the stages.
    """

    def __init__(self, model: nn.Module, layout: TokenLayout, lengths: Sequence[int], link: Link) -> None:
        self.link = link
        self._blocks = [block for _, block in blocks_of(model, layout)]
        self._stage = stage_of(lengths)
        self._undo: list[Callable[[], None]] = []
        # Shapes of what is given up here.
        self._shapes: dict[int, torch.Size] = {}
        kept = kept_parameters(model, layout)
        for block, stage in zip(self._blocks, self._stage, strict=True):
            for parameter in block.parameters():
                self._shapes[id(parameter)] = shape_of(parameter)
                if stage != link.rank and parameter.numel() and id(parameter) not in kept:
                    setattr(parameter, ABSENT, parameter.shape)
                    parameter.data = parameter.data.new_empty(0)
                elif stage == link.rank and hasattr(parameter, ABSENT):
                    raise InputError(
                        "this model was loaded for other stages; load it with the configuration it is to run with"
                    )
        for name in ("save_pretrained", "save_lora_adapter"):
            if hasattr(model, name):
                self._undo.append(replace_method(model, name, _refuse_to(name)))

    def close(self) -> None:
        """Give every rank all blocks again, bit for bit. Collective over the link; needs room for all of them."""
        while self._undo:
            self._undo.pop()()
        with torch.no_grad():
            for block, stage in zip(self._blocks, self._stage, strict=True):
                for parameter in block.parameters():
                    parameter.data = self._from(stage, parameter)

    def _from(self, stage: int, parameter: nn.Parameter) -> Tensor:
        shape = self._shapes.get(id(parameter), parameter.shape)
        mine = stage == self.link.rank
        value = parameter.data if mine else parameter.data.new_empty(shape)
        received = self.link.broadcast(value.contiguous(), stage)
        if hasattr(parameter, ABSENT):
            delattr(parameter, ABSENT)
        return value if mine else received


def kept_parameters(model: nn.Module, layout: TokenLayout) -> set[int]:
    """Parameters (by id) inside blocks that every stage needs. All of them where nobody has reviewed the layout."""
    modules = [model] if layout.source != "reviewed" else [model.get_submodule(path) for path in layout.kept]
    return {id(parameter) for module in modules for parameter in module.parameters()}


# The attribute of a parameter that is not on this rank; holds its shape.
ABSENT = "_ditmesh_absent"


def shape_of(parameter: Tensor) -> torch.Size:
    """The shape of a parameter, here or on another stage."""
    return getattr(parameter, ABSENT, parameter.shape)


def elsewhere(model: nn.Module, layout: TokenLayout, lengths: Sequence[int], stage: int) -> set[str]:
    """Names of the parameters that a stage does not hold."""
    kept = kept_parameters(model, layout)
    return {
        f"{path}.{name}"
        for (path, block), owner in zip(blocks_of(model, layout), stage_of(lengths), strict=True)
        for name, parameter in block.named_parameters()
        if owner != stage and id(parameter) not in kept
    }


def spread_parameters(model: nn.Module, layout: TokenLayout) -> set[str]:
    """Names of the parameters that some stage lacks, if this model was loaded stage by stage; else none."""
    if not any(hasattr(parameter, ABSENT) for parameter in model.parameters()):
        return set()
    return {f"{path}.{name}" for path, block in blocks_of(model, layout) for name, _ in block.named_parameters()}


def _refuse_to(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError(f"{name}() would save this stage's blocks only; call ditmesh.restore(...) first")

    return refuse

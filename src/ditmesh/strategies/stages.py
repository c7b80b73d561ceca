"""Blocks to stages: which rank of the pipe axis has which blocks, and their weights.

A stage is a run of consecutive blocks over all block lists of a model, in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Link
from ..config import ParallelConfig
from ..errors import ConfigError, InputError
from ..layout import TokenLayout
from ..mesh import Mesh
from ..methods import replace_method
from .balance import Balance, mixed

# Parts of a parameter's path that mark work on a vector or on the short text stream, not on the image's tokens.
_NOT_IMAGE = ("norm", "ada", "mod", "context", "add_", "txt", "text", "temb", "time", "to_k_ip", "to_v_ip")


def balanced(costs: Sequence[float], stages: int, speeds: Sequence[float] | None = None) -> tuple[int, ...]:
    """Cut a row of blocks into consecutive stages so that the slowest is as fast as possible.

    Args:
        costs: cost of every block, in any unit.
        stages: how many stages; at most as many as blocks.
        speeds: relative speed of every stage; default: all alike. A stage takes its blocks' costs over its speed.

    Returns:
        Number of blocks of every stage, each at least one. Among equally good cuts the one with the smallest sum
        of squared stage times, then the one whose first stages are longest.

    Raises:
        ConfigError: fewer blocks than stages.

    >>> balanced([2, 2, 1, 1, 1, 1], 2)
    (2, 4)
    >>> balanced([1, 1, 1, 1, 1, 1], 2, (2, 1))
    (4, 2)
    """
    speeds = (1.0,) * stages if speeds is None else speeds
    blocks = len(costs)
    if stages > blocks:
        way = f"pipe={blocks} or less" if blocks > 1 else "pipe=1"
        raise ConfigError(
            f"{blocks} {'block' if blocks == 1 else 'blocks'} cannot be shared by pipe={stages} stages; use {way}"
        )
    sums = [0.0, *accumulate(costs)]
    # best[k][n]: (slowest, squares, minus the lengths) of the best cut of the first n blocks into k stages
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for speed in speeds:
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (slowest, squares, lengths) in best.items():
            for end in range(start + 1, blocks + 1):
                time = (sums[end] - sums[start]) / speed
                cut = (max(slowest, time), squares + time * time, (*lengths, start - end))
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


def first_cut(model: nn.Module, layout: TokenLayout, config: ParallelConfig) -> tuple[int, ...]:
    """Blocks of every stage before anything has been measured. Works without memory for the weights.

    Raises:
        ConfigError: fewer blocks than stages, or ``stages`` that are not the model's blocks.
    """
    if isinstance(config.stages, tuple):
        blocks = len(blocks_of(model, layout))
        if sum(config.stages) != blocks:
            raise ConfigError(
                f"stages={list(config.stages)} are {sum(config.stages)} blocks, but {layout.model} has {blocks}; give "
                "numbers that add up to them, or 'estimated' or 'measured'"
            )
        return config.stages
    speeds = config.weights if isinstance(config.weights, tuple) and config.pipe > 1 else None
    return balanced(estimated_costs(model, layout), config.pipe, speeds)


def kinds_of(model: nn.Module, layout: TokenLayout) -> list[int]:
    """The kind of every block, numbered in the order of their first: blocks of a list with weights of one shape.

    They cost the same. The numbers are the same on all ranks, wherever the weights are.
    """
    known: dict[Any, int] = {}
    kinds = []
    for path, block in blocks_of(model, layout):
        shapes = tuple((name, tuple(shape_of(parameter))) for name, parameter in block.named_parameters())
        kinds.append(known.setdefault((path.rpartition(".")[0], type(block), shapes), len(known)))
    return kinds


def stage_of(lengths: Sequence[int]) -> list[int]:
    """The stage of every block.

    >>> stage_of((2, 3))
    [0, 0, 1, 1, 1]
    """
    return [stage for stage, length in enumerate(lengths) for _ in range(length)]


class Stages:
    """The stages of one transformer: which has which blocks, and their weights. In place; `close` is the exact inverse.

    What is measured: the cost of every kind of block (``stages="measured"``), and the speed of every stage
    (``weights="auto"``). Both need the inputs of a call, so the model is first cut by what is known without one, and
    blocks move when the first call has told more. All ranks agree on the numbers, and so on the cut: ranks that share
    a block (tensor, sequence) must have it together, and rows and branches must find the same stages.

    Args:
        model: the transformer: whole on every rank, or with this rank's blocks only, as `ditmesh.load` leaves it.
        layout: its block lists.
        config: ``stages``, ``weights``.
        mesh: ranks and links.

    Attributes:
        lengths: blocks of every stage.
        costs: cost of every block, in any unit: estimated, or measured relative to the cheapest.
        balance: speeds of the stages.
        kinds: the kind of every block.
        wanted: whether the next call of the transformer is to measure; set it to measure again.
    """

    def __init__(self, model: nn.Module, layout: TokenLayout, config: ParallelConfig, mesh: Mesh) -> None:
        self.lengths = first_cut(model, layout, config)
        self.kinds = kinds_of(model, layout)
        self.costs = estimated_costs(model, layout)
        several = mesh.pipe.size > 1
        self.balance = Balance(
            config.weights if several else None, mesh.world, mesh.device, mesh.pipe.size, mesh.pipe.rank
        )
        self._config, self._mesh = config, mesh
        self._measured: list[float] | None = None
        self.wanted = several and (config.stages == "measured" or config.weights == "auto")
        self._weights = StageWeights(model, layout, self.lengths, mesh.pipe) if several else None

    def measured(self, seconds: Sequence[float]) -> None:
        """Cut anew by the time that this rank takes for a block of every kind, and move blocks. A collective call.

        Nothing of a request may be kept or under way.
        """
        self.wanted = False
        if self._config.weights == "auto":
            self.balance.agree(sum(seconds[kind] for kind in self.kinds))
        if self._config.stages == "measured":
            self._agree_on_costs(seconds)
        lengths = balanced(self.costs, len(self.lengths), self.balance.weights)
        if lengths != self.lengths and self._weights is not None:
            self._weights.move(lengths)
            self.lengths = lengths

    def _agree_on_costs(self, seconds: Sequence[float]) -> None:
        world = self._mesh.world
        mine = torch.tensor([seconds], dtype=torch.float64, device=self._mesh.device)
        # Relative to the whole model: how fast a rank is does not count here.
        shares = mine / mine[:, self.kinds].sum()
        everybody = world.gather(shares, (1,) * world.size, dim=0)
        fresh = everybody.quantile(0.5, dim=0).tolist()
        self._measured = fresh if self._measured is None else mixed(fresh, self._measured)
        # As with speeds: no more digits than a measurement is worth.
        self.costs = [round(self._measured[kind] / min(self._measured), 2) for kind in self.kinds]

    def close(self) -> None:
        """Give every rank all blocks again, bit for bit. A collective call."""
        if self._weights is not None:
            self._weights.close()


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
        self._kept = kept_parameters(model, layout)
        for block, stage in zip(self._blocks, self._stage, strict=True):
            for parameter in block.parameters():
                self._shapes[id(parameter)] = shape_of(parameter)
                if stage != link.rank and parameter.numel() and id(parameter) not in self._kept:
                    _give_up(parameter)
                elif stage == link.rank and hasattr(parameter, ABSENT):
                    raise InputError(
                        "this model was loaded for other stages; load it with the configuration it is to run with"
                    )
        for name in ("save_pretrained", "save_lora_adapter"):
            if hasattr(model, name):
                self._undo.append(replace_method(model, name, _refuse_to(name)))

    def move(self, lengths: Sequence[int]) -> None:
        """Let stages have other numbers of blocks: what changes hands is sent, block by block. A collective call.

        Args:
            lengths: blocks of every stage, as many in all as before.
        """
        after = stage_of(lengths)
        with torch.no_grad():
            for block, old, new in zip(self._blocks, self._stage, after, strict=True):
                for parameter in block.parameters() if old != new else ():
                    if id(parameter) in self._kept:
                        continue
                    shape = self._shapes.setdefault(id(parameter), shape_of(parameter))
                    # One at a time and in the same order everywhere: no two stages wait for one another.
                    if self.link.rank == old:
                        self.link.send([parameter.data], new).wait()
                        _give_up(parameter)
                    elif self.link.rank == new:
                        (received,) = self.link.receive([parameter.data.new_empty(shape)], old).wait()
                        # What arrives may lie in memory that is only lent.
                        parameter.data = received.clone()
                        if hasattr(parameter, ABSENT):
                            delattr(parameter, ABSENT)
        self._stage = after

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


def _give_up(parameter: nn.Parameter) -> None:
    setattr(parameter, ABSENT, parameter.shape)
    parameter.data = parameter.data.new_empty(0)


@contextmanager
def filled(block: nn.Module) -> Iterator[None]:
    """A block that can run, wherever its weights are: those of other stages are zeros while inside.

    Time does not depend on values.
    """
    absent = [parameter for parameter in block.parameters() if hasattr(parameter, ABSENT)]
    try:
        for parameter in absent:
            parameter.data = parameter.data.new_zeros(shape_of(parameter))
        yield
    finally:
        for parameter in absent:
            parameter.data = parameter.data.new_empty(0)


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

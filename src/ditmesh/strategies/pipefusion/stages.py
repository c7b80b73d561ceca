"""Blocks to stages: which rank of the pipe axis has which blocks, and their weights.

A stage is a run of consecutive blocks over all block lists of a model, in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...comm import PeerError
from ...comm.mesh import Mesh
from ...config import ParallelConfig
from ...core.patching import refuse_calls, refuse_loading, refuse_reading, refuse_saving, wrap_methods
from ...errors import ConfigError, InputError
from ...layout import Stream, TokenLayout
from ..base import Strategy


class StageDone(Exception):
    """Leaves the transformer's forward where the rest of it is not wanted, such as after a stage's last block."""


def balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cut a row of blocks into consecutive stages so that the slowest is as fast as possible: blocks of every stage.

    Among equally good cuts the one with the smallest sum of squared stage times, then the one with the longest first
    stages. `ConfigError`: fewer blocks than stages.

    >>> balanced([2, 2, 1, 1, 1, 1], 2)
    (2, 4)
    """
    blocks = len(costs)
    if stages > blocks:
        way = f"pipe={blocks} or less" if blocks > 1 else "pipe=1"
        raise ConfigError(
            f"{blocks} {'block' if blocks == 1 else 'blocks'} cannot be shared by pipe={stages} stages; use {way}"
        )
    sums = [0.0, *accumulate(costs)]
    # (slowest, squares, minus the lengths) of the best cut of the first so many blocks
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(stages):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (slowest, squares, lengths) in best.items():
            for end in range(start + 1, blocks + 1):
                time = sums[end] - sums[start]
                cut = (max(slowest, time), squares + time * time, (*lengths, start - end))
                longer[end] = min(cut, longer.get(end, cut))
        best = longer
    return tuple(-length for length in best[blocks][2])


# Names in diffusers' blocks for modules that work on a vector or on the short text stream, not on image tokens.
_BESIDE_IMAGE = ("norm", "ada", "mod", "context", "add_", "txt", "text", "temb", "time", "to_k_ip", "to_v_ip")


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
        work = sum(count for path, count in weights if not any(mark in path.lower() for mark in _BESIDE_IMAGE))
        costs.append(float(work or sum(count for _, count in weights) or 1))
    return costs


def first_cut(model: nn.Module, layout: TokenLayout, config: ParallelConfig) -> tuple[int, ...]:
    """The number of blocks of every stage, without memory for weights; `ConfigError`: they are not the model's."""
    if isinstance(config.stages, tuple):
        blocks = len(blocks_of(model, layout))
        if sum(config.stages) != blocks:
            raise ConfigError(
                f"stages={list(config.stages)} are {sum(config.stages)} blocks, but {layout.model} has {blocks}; give "
                "numbers that add up to them, or leave stages out"
            )
        return config.stages
    return balanced(estimated_costs(model, layout), config.pipe)


def kinds_of(model: nn.Module, layout: TokenLayout) -> list[int]:
    """The kind of every block, numbered in the order of their first: blocks of a list with weights of one shape."""
    numbers: dict[Any, int] = {}
    kinds = []
    for path, block in blocks_of(model, layout):
        shapes = tuple((name, tuple(shape_of(parameter))) for name, parameter in block.named_parameters())
        kinds.append(numbers.setdefault((path.rpartition(".")[0], type(block), shapes), len(numbers)))
    return kinds


def stage_of(lengths: Sequence[int]) -> list[int]:
    """The stage of every block: ``(2, 3)`` gives ``[0, 0, 1, 1, 1]``."""
    return [stage for stage, length in enumerate(lengths) for _ in range(length)]


class Stages:
    """The stages of one transformer: which has which blocks, and their weights. In place; `close` is the exact inverse.

    Attributes:
        model: whole on every rank, or with this rank's blocks only, as `ditmesh.load` leaves it.
        numbers: of every block, by its path; ``regions``: its block list, by its number.
        lengths: blocks of every stage.
    """

    def __init__(self, model: nn.Module, layout: TokenLayout, config: ParallelConfig, mesh: Mesh) -> None:
        self.model, self.mesh, self.link = model, mesh, mesh.pipe
        self._blocks = [block for _, block in blocks_of(model, layout)]
        self.numbers = {path: number for number, (path, _) in enumerate(blocks_of(model, layout))}
        self.regions = [region for region in layout.regions for _ in model.get_submodule(region.blocks).children()]
        self.lengths = first_cut(model, layout, config)
        self._undo = ExitStack()
        if self.link.size == 1:
            return
        # Adapters that are loaded later are on every stage.
        kept = kept_parameters(model, layout)
        stays = {id(part) for one in model.parameters() if id(one) in kept for part in parts_of(one)}
        for owner, parameter in self._parameters():
            if owner == self.link.rank and hasattr(parameter, ABSENT_ATTRIBUTE):
                raise InputError(
                    "this model was loaded for other stages; load it with the configuration it is to run with"
                )
            if owner != self.link.rank and parameter.numel() and id(parameter) not in stays:
                give_up(parameter)
        error = InputError("saving would write this stage's blocks only; call ditmesh.restore(...) first")
        self._undo.callback(refuse_saving(model, error))
        self._undo.callback(refuse_loading(model, self._absent, "nothing"))
        self._undo.callback(refuse_reading(model, self._absent, "nothing, as another stage has its block,"))
        names = ("fuse_lora", "unfuse_lora", "load_lora_adapter", "fuse_qkv_projections")
        self._undo.callback(wrap_methods(model, names, self._call_guarded))

    @property
    def first(self) -> int:
        """Number of this stage's first block."""
        return sum(self.lengths[: self.link.rank])

    @property
    def last(self) -> int:
        """Number of this stage's last block."""
        return sum(self.lengths[: self.link.rank + 1]) - 1

    def read_after(self, number: int) -> list[Stream]:
        """The streams of a block's result that are read."""
        region, following = self.regions[number], self.regions[number + 1 : number + 2]
        chained = bool(following) and (following[0] is region or following[0].chained)
        return [stream for stream in region.streams if stream.used_after or chained]

    def _absent(self) -> set[int]:
        """Ids of the parameters that are on other stages."""
        every = (parameter for block in self._blocks for parameter in block.parameters())
        return {id(p) for p in every if any(hasattr(part, ABSENT_ATTRIBUTE) for part in parts_of(p))}

    def _call_guarded(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model that changes weights in place, or makes others of them."""
        if name == "fuse_qkv_projections":
            raise InputError(
                f"fuse_qkv_projections() was called with pipe={self.link.size}, and most projections are on other "
                "stages; call ditmesh.restore(...), fuse, and parallelize again"
            )
        # What is written to weights of other stages is written there as well, and let go of here.
        with nullcontext() if name == "load_lora_adapter" and not kwargs.get("hotswap") else filled(self.model):
            return method(*args, **kwargs)

    def close(self) -> None:
        """Give every rank all blocks again, bit for bit. Collective over the stages; see `whole_or_refused`."""
        self._undo.close()
        with whole_or_refused(self.model), torch.no_grad():
            for owner, parameter in self._parameters() if self.link.size > 1 else ():
                if self.link.rank == owner:
                    self.link.broadcast(parameter.data.contiguous(), owner)
                else:
                    like = parameter.data.new_empty(shape_of(parameter))
                    take_back(parameter, self.link.broadcast(like, owner))

    def _parameters(self) -> list[tuple[int, Tensor]]:
        """Every parameter of the blocks, or the plain tensors that it is made of, with the stage that has its block."""
        return [
            (owner, part)
            for owner, block in zip(stage_of(self.lengths), self._blocks, strict=True)
            for parameter in block.parameters()
            for part in parts_of(parameter)
        ]


@contextmanager
def whole_or_refused(model: nn.Module) -> Iterator[None]:
    """Put a model's weights together again inside; if they do not come, the model refuses its calls: `PeerError`."""
    try:
        yield
    except RuntimeError as error:
        lost = PeerError(
            f"the weights of {type(model).__name__} could not be put together again ({error}); load the model again"
        )
        refuse_calls(model, lost)
        raise lost from error


def kept_parameters(model: nn.Module, layout: TokenLayout) -> set[int]:
    """Parameters (by id) inside blocks that every stage needs. All of them where the layout is not reviewed."""
    modules = [model] if layout.source != "reviewed" else [model.get_submodule(path) for path in layout.kept]
    return {id(parameter) for module in modules for parameter in module.parameters()}


# The attribute of a parameter that is not on this rank; holds its shape.
ABSENT_ATTRIBUTE = "_ditmesh_absent"
# The same of one of which this rank holds a part, elsewhere; it is whole while its module runs.
IN_PIECES = "_ditmesh_in_pieces"


def parts_of(parameter: Tensor) -> Iterator[Tensor]:
    """A parameter itself; of one that wraps others (torchao's quantised weights), the plain tensors inside it."""
    if not is_traceable_wrapper_subclass(parameter):
        yield parameter
        return
    for name in parameter.__tensor_flatten__()[0]:
        yield from parts_of(getattr(parameter, name))


def give_up(parameter: Tensor) -> None:
    """Let go of a parameter's values; its shape stays known."""
    setattr(parameter, ABSENT_ATTRIBUTE, parameter.shape)
    parameter.data = parameter.data.new_empty(0)


def take_back(parameter: Tensor, value: Tensor) -> None:
    """The inverse of `give_up`."""
    parameter.data = value
    if hasattr(parameter, ABSENT_ATTRIBUTE):
        delattr(parameter, ABSENT_ATTRIBUTE)


@contextmanager
def filled(model: nn.Module) -> Iterator[None]:
    """A model whose weights of other stages are zeros while inside."""
    parts = (part for parameter in model.parameters() for part in parts_of(parameter))
    absent = [part for part in parts if hasattr(part, ABSENT_ATTRIBUTE)]
    try:
        for parameter in absent:
            parameter.data = parameter.data.new_zeros(shape_of(parameter))
        yield
    finally:
        for parameter in absent:
            parameter.data = parameter.data.new_empty(0)


def shape_of(parameter: Tensor) -> torch.Size:
    """The shape of a parameter, here or on another stage, whole or in pieces."""
    return getattr(parameter, ABSENT_ATTRIBUTE, getattr(parameter, IN_PIECES, parameter.shape))


def is_away(parameter: Tensor) -> bool:
    """True if a parameter's values are not in it: on another stage, or in pieces."""
    return hasattr(parameter, ABSENT_ATTRIBUTE) or hasattr(parameter, IN_PIECES)


def elsewhere(model: nn.Module, layout: TokenLayout, lengths: Sequence[int], stage: int) -> set[str]:
    """Names of the parameters that a stage does not hold."""
    kept_ids = kept_parameters(model, layout)
    return {
        f"{path}.{name}"
        for (path, block), owner in zip(blocks_of(model, layout), stage_of(lengths), strict=True)
        for name, parameter in block.named_parameters()
        if owner != stage and id(parameter) not in kept_ids
    }


def spread_parameters(model: nn.Module, layout: TokenLayout) -> set[str]:
    """Names of the parameters that some stage lacks, if this model was loaded stage by stage; else none."""
    if not any(hasattr(parameter, ABSENT_ATTRIBUTE) for parameter in model.parameters()):
        return set()
    return {f"{path}.{name}" for path, block in blocks_of(model, layout) for name, _ in block.named_parameters()}


class PipeStrategy(Strategy):
    """The base of strategies that run patches of the image through stages."""

    name = "pipe"
    promise = "none"
    no_gradient = "patches attend to keys of an earlier step, which have no gradient path"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.stages_or_patches


class PipelineStages(PipeStrategy):
    """The stages of every transformer of a pipeline."""

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        reason = None
        streams = [stream for region in layout.regions for stream in region.streams]
        if layout.alternating:
            reason = "its block lists run by turns over frames and over tokens, which are not patches of one another"
        elif any(region.leaves or region.grid for region in layout.regions):
            reason = "its blocks mix tokens by convolution or linear attention, of which no stale keys can be kept"
        elif any(stream.name not in ("image", "text") for stream in streams):
            reason = "it denoises two streams of tokens at once, and only one is cut into patches"
        elif any(stream.folded for stream in streams):
            reason = "its tokens are folded into the batch"
        elif any(fold.axes > 1 for region in layout.regions for fold in region.folds):
            reason = "its tokens stand along several dimensions of a tensor, of which a patch would be no run"
        if reason is not None:
            raise ConfigError(f"{layout.model} cannot run with pipe or patches: {reason}; use ulysses, ring or tensor")
        first_cut(model, layout, config)

    def prepare(self, pipe: Any) -> None:
        for model in self.context.models:
            if absent := next((path for path, p in model.model.named_parameters() if p.is_meta), None):
                raise InputError(
                    f"{absent} is not loaded (it is on the meta device), so pipe={self.context.config.pipe} could not "
                    "share it out; take off CPU offloading, or load the model with ditmesh.load()"
                )

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            stages = Stages(model.model, model.layout, self.context.config, self.context.mesh)
            undo.callback(model.add(stages).close)

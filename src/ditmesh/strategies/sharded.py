"""Weights that do not fit: every rank holds a part of each block's, and gathers a block's while it runs.

After ZeRO's third stage and FSDP (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277), for
inference: nothing is reduced. The tensors of a block lie one after the other in memory that is cut evenly by bytes, and
are used where they lie: only a tensor that lies on two ranks is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Link, Transfer
from ..comm.state import Spec
from ..config import ParallelConfig
from ..core.alignment import ALIGNMENT, memory, offset_of, rounded_up
from ..core.alive import PLAIN_TENSORS
from ..core.arguments import Arguments
from ..core.partial_run import partial_run
from ..core.patching import CallChain, Proceed, refuse_loading, refuse_reading, refuse_saving, wrap_methods
from ..core.values import as_bytes
from ..errors import ConfigError, InputError
from ..layout import TokenLayout
from .base import Strategy
from .caches import diffusers_hooks
from .pipefusion.stages import (
    ABSENT_ATTRIBUTE,
    IN_PIECES,
    StageDone,
    kept_parameters,
    parts_of,
    shape_of,
    whole_or_refused,
)

# Outside of blocks, linears, convolutions and embeddings from this share of a model's bytes on are in pieces, too.
MIN_SHARDED_SHARE = 1e-3
# The excess over its share that a rank may hold of a unit, so that no tensor lies on two ranks.
MAX_EXCESS = 0.02
# Gathers that may be under way or waiting for their block.
MAX_PENDING_GATHERS = 2
# The attribute of a model that was read in pieces.
UNITS = "_ditmesh_units"


@dataclass(frozen=True)
class Packed:
    """The order of tensors (shapes and dtypes) in memory, and the ranks' shares of that memory.

    ``offsets``: how far behind a multiple of `ALIGNMENT` each begins, as kernels may look at that; default: 0, as
    torch's own do.
    """

    specs: tuple[Spec, ...]
    ranks: int
    offsets: tuple[int, ...] = ()

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The byte at which every tensor begins, and the one where the last one ends, rounded up."""
        offsets = self.offsets or (0,) * len(self.specs)
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in self.specs]
        room = [rounded_up(offset + size) for offset, size in zip(offsets, sizes, strict=True)]
        ends = [*accumulate(room, initial=0)]
        return (*(end + offset for end, offset in zip(ends, offsets, strict=False)), ends[-1])

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The byte at which every rank's part begins, and the last one's end; between tensors where possible."""
        total = self.starts[-1]
        share = rounded_up(-(-total // self.ranks))
        edges = [start - start % ALIGNMENT for start in self.starts]
        bounds = [0]
        for even in (min(total, rank * share) for rank in range(1, self.ranks)):
            nearest = min(edges, key=lambda edge: abs(edge - even))
            bounds.append(nearest if bounds[-1] <= nearest and abs(nearest - even) <= MAX_EXCESS * share else even)
        return (*bounds, total)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every rank's part."""
        return tuple(high - low for low, high in pairwise(self.bounds))

    @cached_property
    def places(self) -> list[list[tuple[int, slice]]]:
        """The ranks that hold some of each tensor, with which bytes of their parts."""
        places = []
        for (shape, dtype), start in zip(self.specs, self.starts, strict=False):
            stop = start + prod(shape) * dtype.itemsize
            places.append(
                [
                    (rank, slice(max(start, low) - low, min(stop, high) - low))
                    for rank, (low, high) in enumerate(pairwise(self.bounds))
                    if max(start, low) < min(stop, high)
                ]
            )
        return places

    def runs(self, rank: int) -> Iterator[tuple[int, slice, slice]]:
        """A rank's part of a tensor: its number, the bytes, and their place in the rank's memory."""
        for number, places in enumerate(self.places):
            for owner, part in places:
                if owner == rank:
                    offset = self.bounds[rank] - self.starts[number]
                    yield number, slice(part.start + offset, part.stop + offset), part


def balanced_order(sizes: Sequence[int], ranks: int) -> list[int]:
    """An order of tensors in which few lie on two ranks: each, the largest first, goes to the rank with least.

    >>> balanced_order([6, 1, 1, 1, 1, 4, 4], 2)
    [0, 1, 2, 3, 5, 6, 4]
    """
    held: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        rank = filled.index(min(filled))
        held[rank].append(number)
        filled[rank] += sizes[number]
    return [number for numbers in held for number in numbers]


@dataclass(frozen=True)
class GatherGroup:
    """Parameters that are gathered together: paths of the modules that run with them, and their names."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]


# complex: one walk over the modules, where a block and a layer outside of blocks take different parameters.
def grouped(model: nn.Module, lists: Collection[str], kept: Collection[int] = ()) -> list[GatherGroup]:
    """The parameters of a model that can be in pieces: those of every block, and of large layers outside of blocks.

    Adapters (peft's) stay whole, and so do parameters of several blocks, those used outside of their block as well
    (``kept``, by id), and modules that are no layers. Works without values. ``lists`` are paths.
    """
    blocks = [f"{path}.{name}" for path in lists for name, _ in model.get_submodule(path).named_children()]
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    modules, total = dict(model.named_modules(remove_duplicate=False)), sum(map(_bytes_of, model.parameters()))
    groups: list[GatherGroup] = []
    taken = set(kept)
    for path, module in modules.items():
        block = next((one for one in blocks if f"{path}.".startswith(f"{one}.")), None)
        if block not in (None, path):
            continue
        group = {
            f"{path}.{name}": parameter
            for name, parameter in module.named_parameters(recurse=block is not None)
            # Not an adapter's.
            if id(parameter) not in taken and not any(part.startswith("lora_") for part in name.split("."))
        }
        if block is not None:
            group = {n: p for n, p in group.items() if all(other.startswith(f"{path}.") for other in holders[id(p)])}
            runs_with = (path,)
        else:
            large = isinstance(module, _LAYERS) and sum(map(_bytes_of, group.values())) >= MIN_SHARDED_SHARE * total
            runs_with = tuple(dict.fromkeys(name.rpartition(".")[0] for p in group.values() for name in holders[id(p)]))
            if not large or not all(isinstance(modules[home], _LAYERS) for home in runs_with):
                continue
        if group:
            taken.update(map(id, group.values()))
            groups.append(GatherGroup(path, runs_with, tuple(group)))
    return groups


def groups_of(model: nn.Module, layout: TokenLayout, ahead: bool = False) -> list[GatherGroup]:
    """The parameters of a transformer that can be in pieces; none where the layout is not reviewed.

    ``ahead``: those of modules whose values are computed ahead stay whole, as no step gathers them.
    """
    if layout.source != "reviewed":
        return []
    everywhere = kept_parameters(model, layout)
    if ahead:
        from .ahead import modules_ahead

        paths = tuple(f"{path}." for path in modules_ahead(model))
        every = model.named_parameters(remove_duplicate=False)
        everywhere |= {id(parameter) for name, parameter in every if name.startswith(paths)}
    return grouped(model, [region.blocks for region in layout.regions], everywhere)


def parameters_in_pieces(model: nn.Module, layout: TokenLayout) -> int:
    """The number of a transformer's parameters that ``shard`` distributes."""
    names = (name for group in groups_of(model, layout) for name in group.parameters)
    return sum(model.get_parameter(name).numel() for name in names)


_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _bytes_of(parameter: Tensor) -> int:
    return sum(prod(shape_of(part)) * part.element_size() for part in parts_of(parameter))


@dataclass(eq=False)
class Unit:
    """Weights that are gathered together.

    Attributes:
        modules: they run with it; the model itself: it is there while the model runs.
        parameters, parts: of the model, and the plain tensors that they are made of.
        packed, piece: how those lie in memory, and this rank's part of it, bytes.
        running, lent: the calls in progress that run with it, and the memory that was lent for what was received.
        changes: the state of each tensor when it was let go of.
    """

    name: str
    modules: list[nn.Module]
    parameters: Sequence[Tensor]
    parts: Sequence[Tensor]
    packed: Packed
    piece: Tensor
    running: int = 0
    lent: list[list[Tensor]] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.changes = [*map(_changes, self.parts)]

    def cut(self, rank: int) -> None:
        """Take this rank's part of tensors that are whole, and let go of them."""
        for number, source, target in self.packed.runs(rank):
            self.piece[target].copy_(as_bytes(self.parts[number])[source])
        for part, (shape, _) in zip(self.parts, self.packed.specs, strict=True):
            setattr(part, IN_PIECES, torch.Size(shape))
        self.empty()

    def fill(self, pieces: Sequence[Tensor], own: bool = False) -> None:
        """Fill the tensors from all ranks' parts; ``own``: in memory of their own."""
        for number, (part, (shape, dtype)) in enumerate(zip(self.parts, self.packed.specs, strict=True)):
            chunks = [pieces[rank][place] for rank, place in self.packed.places[number]]
            flat = chunks[0]
            if own or len(chunks) > 1:
                offset = self.packed.starts[number] % ALIGNMENT
                flat = memory(sum(part.numel() for part in chunks), offset, self.piece.device)
                torch.cat(chunks, out=flat)
            part.data = flat.view(dtype).view(shape)

    def empty(self) -> None:
        """Let go of the tensors' values. They keep their dimensions: adapters are made by those."""
        for part, (shape, _) in zip(self.parts, self.packed.specs, strict=True):
            part.data = part.data.new_empty((0, *shape[1:]))
        self.changes = [*map(_changes, self.parts)]

    def check(self) -> None:
        """Reject tensors that were cast, moved or changed, because gathered weights would not show it."""
        device = self.piece.device
        for part, (_, dtype) in zip(self.parts, self.packed.specs, strict=True):
            if part.dtype != dtype or part.device != device:
                raise InputError(
                    f"the weights of {self.name} were {dtype} on {device} when ranks shared them out and are "
                    f"{part.dtype} on {part.device} now; call ditmesh.restore(...), cast or move them, and parallelise "
                    "again"
                )
        if self.changes != [*map(_changes, self.parts)]:
            raise InputError(
                f"the weights of {self.name} were changed while ranks hold them in pieces, so that the change "
                "is lost; call ditmesh.restore(...), change them, and parallelize again"
            )


def _changes(tensor: Tensor) -> tuple[int, int]:
    """How often a tensor was changed in place, and which memory it has, which an assignment to ``.data`` replaces."""
    # torch does not count the changes of a tensor that was made in inference mode.
    return 0 if tensor.is_inference() else tensor._version, tensor.untyped_storage()._cdata


def units_of(model: nn.Module, groups: Iterable[GatherGroup], link: Link) -> list[Unit]:
    """The parts of whole weights that this rank is to hold; the others are let go of, block by block."""
    groups, units = list(groups), []
    # All of them before any is let go of.
    for name in (name for group in groups for name in group.parameters):
        _check_plain(name, model.get_parameter(name), link)
    for group in groups:
        every = [model.get_parameter(name) for name in group.parameters]
        parameters = [one for one in every if not any(hasattr(part, ABSENT_ATTRIBUTE) for part in parts_of(one))]
        found = [part for p in parameters for part in parts_of(p) if part.numel() and part.is_contiguous()]
        parts = [found[number] for number in balanced_order([part.nbytes for part in found], link.size)]
        if parts:
            specs = tuple((tuple(part.shape), part.dtype) for part in parts)
            packed = Packed(specs, link.size, tuple(map(offset_of, parts)))
            piece = parts[0].data.new_empty(packed.sizes[link.rank], dtype=torch.uint8)
            modules = [model.get_submodule(path) for path in group.modules]
            units.append(Unit(group.name, modules, parameters, parts, packed, piece))
            with torch.no_grad():
                units[-1].cut(link.rank)
    return units


def _check_plain(name: str, parameter: Tensor, link: Link) -> None:
    if parameter.is_meta:
        raise InputError(
            f"{name} is not loaded (it is on the meta device), so {link.size} ranks could not share it out; take off "
            "CPU offloading, or load the model with ditmesh.load()"
        )
    for part in parts_of(parameter):
        if type(part) not in PLAIN_TENSORS or part.layout is not torch.strided:
            raise InputError(
                f"{name} is a {type(part).__name__}, which ranks cannot share out in pieces; use torchao's or plain "
                "weights, or leave shard out"
            )


class ShardedWeights:
    """The weights of one model in pieces on the ranks of a link. In place; `close` is the exact inverse.

    `InputError`: a weight cannot be cut; or hooks of CPU offloading keep all of them.

    Args:
        model: whole, or with this rank's pieces only, as `ditmesh.load` leaves it.
        link: the ranks. They call the same modules in the same order.
        chain: what wraps the model's forward; the gathering becomes its next layer.
    """

    def __init__(
        self, model: nn.Module, groups: Callable[[], Iterable[GatherGroup]], link: Link, chain: CallChain
    ) -> None:
        self.model, self.link = model, link
        for path, module in model.named_modules():
            if "group_offloading" in diffusers_hooks(module) or hasattr(module, "_hf_hook"):
                raise InputError(
                    f"{path or type(model).__name__} is offloaded to the CPU, which keeps all of its weights there, so "
                    "that no rank could hold a part of them only; take the offloading off, or leave shard out"
                )
        units: list[Unit] | None = vars(model).pop(UNITS, None)
        if units is not None and any(unit.packed.ranks != link.size for unit in units):
            raise InputError("this model was loaded for other ranks; load it with the configuration it is to run with")
        self.units = units_of(model, groups(), link) if units is None else units
        self._pending: dict[Unit, tuple[Transfer, list[list[Tensor]]]] = {}
        # Memory for what is received, by its sizes, where several units have those; and what may still come after a
        # failure.
        sizes = Counter(unit.packed.sizes for unit in self.units)
        self._spare: dict[tuple[int, ...], list[list[list[Tensor]]]] = {one: [] for one in sizes if sizes[one] > 1}
        self._abandoned: list[Any] = []
        # The unit that runs after each, as the latest call has shown; after None the first.
        order = [None, *self.units]
        self._following: dict[Unit | None, Unit] = dict(pairwise(order))  # type: ignore[arg-type]
        self._latest: Unit | None = None
        self._undo = ExitStack()
        self._undo.callback(chain.add(self._around_call))
        # Units that run with the model itself.
        self._always = [unit for unit in self.units if unit.modules == [model]]
        for unit in self.units:
            for module in unit.modules if unit not in self._always else ():
                # Hooks that stay where others go (`layout.derive.without_hooks`).
                enter: Any = partial(self._enter, unit)
                leave: Any = partial(self._leave, unit)
                enter.brings_weights = leave.brings_weights = True
                self._undo.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                self._undo.callback(module.register_forward_hook(leave, always_call=True).remove)
        error = InputError("saving would write empty weights, which ranks share in pieces; call ditmesh.restore(...)")
        self._undo.callback(refuse_saving(model, error))
        self._undo.callback(refuse_loading(model, self.spread, "this rank's piece"))
        self._undo.callback(refuse_reading(model, self.spread, "nothing, as its weights are in pieces on all ranks,"))

        def with_whole(_: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.whole():
                return method(*args, **kwargs)

        names = ("fuse_lora", "unfuse_lora", "fuse_qkv_projections")
        self._undo.callback(wrap_methods(model, names, with_whole))

    def spread(self) -> set[int]:
        """Ids of the parameters that are in pieces."""
        return {id(parameter) for unit in self.units for parameter in unit.parameters}

    @property
    def held(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(unit.piece.nbytes for unit in self.units)

    # --- a call --------------------------------------------------------------------------------------------------

    def _around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """Gather the weights of a unit while the one before runs, and free them after it."""
        self._abandoned.clear()
        self._finish()
        if (first := self._following.get(None)) is not None:
            self._start(first)
        try:
            for unit in self._always:
                self._enter(unit)
            output = proceed(arguments)
        except StageDone:
            # A stage of PipeFusion has done its blocks; the other ranks here do as it does.
            self._finish()
            raise
        except BaseException:
            # Nothing is waited for; messages in flight keep their memory until the next call.
            self._abandoned += self._pending.values()
            self._pending.clear()
            for unit in self.units:
                self._release(unit)
            raise
        for unit in self._always:
            self._leave(unit)
        self._finish()
        return output

    def _enter(self, unit: Unit, *_: Any) -> None:
        if partial_run() is not None:
            # Only some ranks may be in one, and what is in pieces has no values there.
            return
        unit.running += 1
        if unit.running > 1:
            return
        unit.check()
        with torch.inference_mode(False), torch.no_grad():
            if unit not in self._pending:
                self._start(unit)
            transfer, unit.lent = self._pending.pop(unit)
            received, rank = transfer.wait(), self.link.rank
            unit.fill([*received[:rank], unit.piece, *received[rank:]])
            self._following[self._latest], self._latest = unit, unit
            following = self._following.get(unit)
            if following is not None and following not in self._pending and not following.running:
                self._start(following)

    def _leave(self, unit: Unit, *_: Any) -> None:
        unit.running = max(0, unit.running - 1)
        if not unit.running:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        unit.running = 0
        if unit.lent:
            unit.empty()
            self._spare.get(unit.packed.sizes, []).append(unit.lent)
            unit.lent = []

    def _start(self, unit: Unit) -> None:
        """Send this rank's piece, and let the others' come; in the same order on all ranks."""
        while len(self._pending) >= MAX_PENDING_GATHERS:
            self._take()
        if spare := self._spare.get(unit.packed.sizes):
            lent = spare.pop()
        else:
            own = self.link.rank
            lent = [[unit.piece.new_empty(0 if n == own else size)] for n, size in enumerate(unit.packed.sizes)]
        self._pending[unit] = self.link.all_gather_async([unit.piece], lent), lent

    def _take(self) -> None:
        """Take the oldest prefetched unit, which is not wanted after all."""
        unit = next(iter(self._pending))
        transfer, lent = self._pending.pop(unit)
        transfer.wait()
        self._spare.get(unit.packed.sizes, []).append(lent)

    def _finish(self) -> None:
        """Take prefetched units that were not needed, which other ranks have sent."""
        self._latest = None
        while self._pending:
            self._take()

    # --- whole weights -------------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights whole on every rank inside; they may be changed there, alike on all. A collective call."""
        self._gather()
        try:
            yield
        finally:
            with torch.no_grad():
                for unit in self.units:
                    unit.cut(self.link.rank)

    def _gather(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for unit in self.units:
                unit.fill(gather_unit(unit, self.link), own=True)

    def close(self) -> None:
        """Give every rank all weights again, bit for bit. Collective over the link; see `whole_or_refused`."""
        self._undo.close()
        self._abandoned.clear()
        self._spare.clear()
        with whole_or_refused(self.model):
            self._finish()
            self._gather()
            for unit in self.units:
                for part in unit.parts:
                    delattr(part, IN_PIECES)
            self.units.clear()


def gather_unit(unit: Unit, link: Link) -> list[Tensor]:
    """All ranks' pieces of a unit. Collective."""
    return [part for (part,) in link.all_gather_list([unit.piece], [[(size,)] for size in unit.packed.sizes])]


class ShardedModels(Strategy):
    """The weights of every transformer of a pipeline, in pieces on ranks that would hold the same."""

    name = key = "shard"
    no_gradient = "weights are on a rank while their block runs forward, and no longer"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.shard > 1

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        if layout.source != "reviewed":
            raise ConfigError(
                f"shard={config.shard} lets go of a block's weights behind its call, and whether {layout.model} uses "
                "them elsewhere is not reviewed; use tensor to cut its weights, or leave shard out"
            )

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            groups = partial(groups_of, model.model, model.layout, self.context.config.precompute)
            sharded = ShardedWeights(model.model, groups, self.context.job.shard, model.chain)
            undo.callback(model.add(sharded).close)

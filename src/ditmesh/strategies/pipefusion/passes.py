"""Runs of a transformer's forward on one stage of PipeFusion: dry runs that show how patches lie, and those of patches.

Most blocks are skipped, and what is around them, the glue, runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from ...comm import Transfer
from ...core.arguments import Arguments
from ...core.partition import Partition
from ...core.patching import Proceed
from ...errors import InputError, LayoutError
from ...layout import Region, Stream
from ...parts.lazy import SHARED_OWNER, Owners
from ..hooks import BlockSite
from ..sequence import result_of
from ..token_cuts import shared
from .patches import Buffers, ForwardRun, PatchParallel, skipped
from .stages import StageDone, Stages


@dataclass
class PatchPlan:
    """The places of patches in streams, inputs and outputs of calls of one form; found by dry runs.

    Attributes:
        tokens: image tokens of every patch, by block list.
        streams: shape and dtype of the streams where a list begins, by block list and stream.
        outputs, owners: every tensor the model returns, on the meta device, and which patch owns which element of it.
        leaves, spec: the model's output, flattened; an empty tensor stands for every tensor.
        skips: block -> the earlier block that passes it image tokens besides the streams, by number.
        text_along: block lists through which text must go with every patch.
        takes: whether inputs with these owners can be used patch by patch, by the owners' ids.
    """

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    streams: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    owners: list[Owners] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    skips: dict[int, int] = field(default_factory=dict)
    text_along: set[str] = field(default_factory=set)
    takes: dict[tuple[int, ...], tuple[bool, Any]] = field(default_factory=dict)

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output with these tensors."""
        given = iter(tensors)
        return tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


class DryRun(ForwardRun):
    """Runs the glue only, up to the list ``until``, and records the streams it sees.

    ``poison``: block list, start and length of a run of image tokens that are set to NaN when it ends.
    """

    def __init__(
        self, stages: Stages, poison: tuple[Region, int, int] | None = None, until: Region | None = None
    ) -> None:
        self._stages, self._poison, self._until = stages, poison, until
        self.shapes: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
        self.entered: dict[str, Tensor] = {}
        self.skips: dict[int, int] = {}
        # Number and image tokens of the block that returned them, by the tensor's id.
        self._made: dict[int, tuple[int, Tensor]] = {}

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        region = site.region
        if site.index == 0:
            values = {stream.name: arguments.get(stream.arg) for stream in region.streams}
            self.shapes[region.blocks] = {
                name: (value.shape, value.dtype) for name, value in values.items() if isinstance(value, Tensor)
            }
            self.entered[region.blocks] = values[region.main.name]
            if self._until is not None and self._until.blocks == region.blocks:
                raise StageDone
        for path in region.local:
            value = arguments.get(path)
            if isinstance(value, Tensor):
                if id(value) not in self._made:
                    raise LayoutError(
                        f"{site.path}: {path!r} is not what an earlier block returned, so its patches cannot be told"
                    )
                self.skips[self._stages.numbers[site.path]] = self._made[id(value)][0]

    def block(self, site: BlockSite, proceed: Proceed, arguments: Arguments) -> Any:
        main = site.region.main
        # A tensor of its own, so that it can be told from what other blocks return.
        value = arguments.get(main.arg).clone()
        if self._poison is not None and self._poison[0].blocks == site.region.blocks and site.is_last:
            value.narrow(main.dim, *self._poison[1:]).fill_(torch.nan)
        self._made[id(value)] = (self._stages.numbers[site.path], value)
        return skipped(site.region, arguments, {main.name: value})


class TextlessRun(ForwardRun):
    """A dry run that tries this stage's first block of every list on the second patch without text.

    ``failed`` are block lists with a block that raised, or returned another number of tokens.
    """

    patch = 1

    def __init__(self, stages: Stages, plan: PatchPlan, patches: int) -> None:
        self._stages, self._plan, self.patches = stages, plan, patches
        self.failed: set[str] = set()
        self._tried: set[str] = set()

    def block(self, site: BlockSite, proceed: Proceed, arguments: Arguments) -> Any:
        region, stages = site.region, self._stages
        own = stages.first <= stages.numbers[site.path] <= stages.last
        if own and has_text(region) and region.blocks not in self._tried:
            self._tried.add(region.blocks)
            if not self._runs(site, proceed, arguments.copy()):
                self.failed.add(region.blocks)
        return skipped(site.region, arguments)

    def _runs(self, site: BlockSite, proceed: Proceed, arguments: Arguments) -> bool:
        region = site.region
        if any(stream.replicate for stream in region.streams):
            return False
        # Text goes with the first patch.
        text = (0,) * (self.patches - 1)
        lengths: dict[str, tuple[int, ...]] = {
            stream.name: (arguments.get(stream.arg).shape[stream.dim], *text) for stream in region.streams
        }
        lengths[region.main.name] = self._plan.tokens[region.blocks]
        held = Partition.beside([shared(stream, lengths[stream.name]) for stream in region.streams])
        # Of a cut argument, a dimension of size 1 is the same for all tokens.
        cuts = [(stream.arg, stream.dim, (stream.name,), None, 0) for stream in region.streams]
        cuts += [(cut.arg, cut.dim, cut.tokens, cut.ndim, 2) for cut in region.cuts]
        for path, dim, names, ndim, least in cuts:
            value, tokens = arguments.get(path), held.select(names)
            if isinstance(value, Tensor) and ndim in (None, value.dim()) and value.shape[dim] == tokens.total >= least:
                arguments.set(path, tokens.take(value, dim % value.dim(), self.patch).contiguous())
        try:
            output = proceed(arguments)
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            # Errors that say nothing of the text: memory that is full, a rank that is lost.
            raise
        except Exception:
            return False
        for stream in region.streams:
            value = result_of(output, stream)
            if isinstance(value, Tensor) and value.shape[stream.dim] != held.select((stream.name,)).lengths[self.patch]:
                return False
        return True


class PatchRun(ForwardRun):
    """One patch on its way through this stage; the last one ``finishes``: it runs the model to its end."""

    def __init__(
        self,
        stages: Stages,
        handler: PatchParallel,
        plan: PatchPlan,
        buffers: Buffers,
        patches: int,
        patch: int,
        send: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self._stages, self._handler, self._plan, self._send = stages, handler, plan, send
        self.buffers, self.patches, self.patch = buffers, patches, patch
        self._link = stages.mesh.pipe
        self.finishes = self._link.rank == self._link.size - 1
        self._arriving: Transfer | None = None
        self._arrived: list[str | int] = []
        self._received: dict[str | int, Tensor] = {}
        # Results of this stage's blocks that later stages are passed besides the streams.
        self._skips: dict[int, Tensor] = {}

    def tokens(self, region: Region) -> tuple[int, ...]:
        return self._plan.tokens[region.blocks]

    def text_along(self, region: Region) -> bool:
        return region.blocks in self._plan.text_along

    def _sent_after(self, number: int) -> list[tuple[str | int, Region, Stream]]:
        """The tensors that the stage ending with block ``number`` sends to the next: streams, then skips by block."""
        regions = self._stages.regions
        region, known = regions[number], self._plan.streams[regions[number].blocks]
        streams = [(stream.name, region, stream) for stream in self._stages.read_after(number) if stream.name in known]
        crossing = {source for block, source in self._plan.skips.items() if source <= number < block}
        return [*streams, *((source, regions[source], regions[source].main) for source in sorted(crossing))]

    def expect(self) -> None:
        """Post the receive of the previous stage's tensors for this patch."""
        if self._link.rank == 0:
            return
        handler, buffers = self._handler, []
        handler.start(self)
        for key, region, stream in self._sent_after(self._stages.first - 1):
            shape, dtype = self._plan.streams[region.blocks][stream.name]
            here = handler.token_cut.of_patches(region, stream, shape[stream.dim]).lengths[handler.link.rank]
            size = (*shape[: stream.dim], here, *shape[stream.dim + 1 :])
            buffers.append(torch.empty(size, dtype=dtype, device=self._stages.mesh.device))
            self._arrived.append(key)
        handler.start(None)
        self._arriving = self._link.receive(buffers, self._link.rank - 1)

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        source = self._plan.skips.get(self._stages.numbers[site.path])
        if source is not None and source in self._received:
            for path in site.region.local:
                arguments.set(path, self._received[source])

    def block(self, site: BlockSite, proceed: Proceed, arguments: Arguments) -> Any:
        number, stages = self._stages.numbers[site.path], self._stages
        if stages.first <= number <= stages.last:
            return proceed(arguments)
        if number != stages.first - 1 or self._arriving is None:
            return skipped(site.region, arguments)
        self._received = dict(zip(self._arrived, self._arriving.wait(), strict=True))
        return skipped(
            site.region, arguments, {key: value for key, value in self._received.items() if isinstance(key, str)}
        )

    def after_block(self, site: BlockSite, output: Any) -> Any:
        number, stages = self._stages.numbers[site.path], self._stages
        if not stages.first <= number <= stages.last:
            return output
        if number in self._plan.skips.values():
            self._skips[number] = result_of(output, site.region.main)
        if number == stages.last and not self.finishes:
            streams = {stream.name: result_of(output, stream) for stream in site.region.streams}
            tensors = {**self._received, **self._skips, **streams}
            self._send([tensors[key] for key, *_ in self._sent_after(number)])
            raise StageDone
        return output


def has_text(region: Region) -> bool:
    """True if a stream of text goes through a block list."""
    return any(stream.name == "text" for stream in region.streams)


def marked_tokens(stream: Tensor, dim: int) -> Tensor:
    """The tokens of a stream that hold a NaN: (S,)."""
    return torch.isnan(stream).transpose(0, dim).flatten(1).any(1)


def runs_of(marked: list[Tensor], model: str, blocks: str) -> tuple[int, ...]:
    """Tokens of every patch in a list, from those of the list before; the preceding patch gets unowned ones."""
    together = torch.stack(marked).long().sum(0)
    starts = [int(mark.nonzero()[0]) if bool(mark.any()) else -1 for mark in marked]
    ordered = all(a < b for a, b in pairwise(starts)) and starts[0] >= 0
    ends = [*starts[1:], len(together)]
    inside = all(int(mark.nonzero()[-1]) < end for mark, end in zip(marked, ends, strict=True) if bool(mark.any()))
    if int(together.max()) > 1 or not ordered or not inside:
        raise InputError(
            f"the patches of a picture are not runs of tokens in {blocks} of {model} in this call: samples with texts "
            "of different lengths before the picture, or glue that mixes tokens; use one prompt at a time, or no pipe"
        )
    starts[0] = 0
    return tuple(end - start for start, end in zip(starts, ends, strict=True))


def owners_of(marked: list[Tensor], model: str) -> Owners:
    """The patch that owns each element of an output, from the elements that each patch marks."""
    of = torch.full(marked[0].shape, SHARED_OWNER, dtype=torch.int16, device=marked[0].device)
    for patch, mark in enumerate(marked):
        if bool((of[mark] != SHARED_OWNER).any()):
            raise LayoutError(
                f"what {model} does after its last block mixes tokens, so its output does not fall into patches; "
                "use ulysses, ring or tensor"
            )
        of[mark] = patch
    return Owners(of, len(marked))

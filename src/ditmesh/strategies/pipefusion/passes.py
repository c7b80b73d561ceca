"""Passes through a transformer on one stage of PipeFusion: to look at it, try it, time it, or compute one patch.

A pass runs the model's own forward. What happens at every block is the pass's: most blocks are passed over, and what
is around them, the glue, runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from ...comm.link import Link, Transfer
from ...core.arguments import Arguments
from ...errors import InputError, LayoutError
from ...layout import Region
from ..balance import median_seconds
from ..hooks import BlockSite
from .lazy import COMMON, Owners
from .patches import Memory, PatchParallel, is_read, passed_over, streams_of
from .stages import Stages, filled


class StageDone(Exception):
    """Leaves the transformer's forward where the rest of it is not wanted, such as after a stage's last block."""


@dataclass
class Plan:
    """What one look at a call has told: how its patches lie in streams, inputs and outputs.

    Attributes:
        tokens: image tokens of every patch, by block list.
        streams: shape and dtype of the streams where a list begins, by block list and stream.
        outputs: shape and dtype of every tensor the model returns, on the meta device.
        owners: whose which element of it is.
        leaves, spec: what the model returns, taken apart; an empty tensor stands for every tensor.
        skips: block -> the earlier block whose image tokens it is passed besides the streams, by number.
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
        """What the model returns, with these tensors."""
        given = iter(tensors)
        return tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


class Stage(Protocol):
    """What a pass knows of the stage it runs on; see `PipeFusion`.

    Attributes:
        numbers: of every block, by its path.
        regions: the block list of every block, by its number.
    """

    model: nn.Module
    link: Link
    handler: PatchParallel
    stages: Stages
    device: torch.device
    patches: int
    numbers: dict[str, int]
    regions: list[Region]

    @property
    def first(self) -> int:
        """Number of the stage's first block."""
        ...

    @property
    def last(self) -> int:
        """Number of its last one."""
        ...

    def send_on(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors to the next stage."""
        ...


class Pass:
    """A run that cuts nothing and leaves the blocks' streams as they come."""

    memory: Memory | None = None
    patches, patch = 1, 0

    def __init__(self, owner: Stage) -> None:
        self.owner = owner

    def tokens(self, region: Region) -> tuple[int, ...]:
        raise AssertionError("nothing is cut")

    def text_along(self, region: Region) -> bool:
        return False

    def enter(self, site: BlockSite, arguments: Arguments) -> None:
        pass

    def arrive(self, site: BlockSite, arguments: Arguments) -> None:
        pass

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        return passed_over(site, arguments)

    def leave(self, site: BlockSite, output: Any) -> Any:
        return output

    def number(self, site: BlockSite) -> int:
        return self.owner.numbers[site.path]


class Look(Pass):
    """Runs the glue only, and records what it sees.

    Args:
        owner: whose.
        poison: block list and run of image tokens that are NaN when it ends.
        until: stop where this list begins.
    """

    def __init__(self, owner: Stage, poison: tuple[Region, int, int] | None, until: Region | None) -> None:
        super().__init__(owner)
        self.poison, self.until = poison, until
        self.shapes: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
        self.entered: dict[str, Tensor] = {}
        self.skips: dict[int, int] = {}
        self._made: dict[int, tuple[int, Tensor]] = {}

    def enter(self, site: BlockSite, arguments: Arguments) -> None:
        region = site.region
        if site.index == 0:
            values = {stream.name: arguments.get(stream.arg) for stream in region.streams}
            self.shapes[region.blocks] = {
                name: (value.shape, value.dtype) for name, value in values.items() if isinstance(value, Tensor)
            }
            self.entered[region.blocks] = values[region.main.name]
            if self.until is region:
                raise StageDone
        for path in region.local:
            value = arguments.get(path)
            if isinstance(value, Tensor):
                if id(value) not in self._made:
                    raise LayoutError(
                        f"{site.path}: {path!r} is not what an earlier block returned, so its patches cannot be told"
                    )
                self.skips[self.number(site)] = self._made[id(value)][0]

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        main = site.region.main
        # A tensor of its own, so that it can be told from what other blocks return.
        value = arguments.get(main.arg).clone()
        if self.poison is not None and self.poison[0] is site.region and site.is_last:
            value.narrow(main.dim, self.poison[1], self.poison[2]).fill_(torch.nan)
        self._made[id(value)] = (self.number(site), value)
        return passed_over(site, arguments, {main.name: value})


class Trial(Pass):
    """Runs this stage's first block of every list with a patch that has no text."""

    patch = 1

    def __init__(self, owner: Stage, plan: Plan) -> None:
        super().__init__(owner)
        self.plan = plan
        self.patches = owner.patches
        self.failed: set[str] = set()
        self._tried: set[str] = set()

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        region, owner = site.region, self.owner
        texts = [stream for stream in region.streams if stream.name == "text"]
        own = owner.first <= self.number(site) <= owner.last
        if own and texts and region.blocks not in self._tried:
            self._tried.add(region.blocks)
            if not self._can(site, forward, arguments):
                self.failed.add(region.blocks)
        return passed_over(site, arguments)

    def _can(self, site: BlockSite, forward: Callable[..., Any], given: Arguments) -> bool:
        """Whether the block runs on the second patch without text."""
        arguments = copy(given)
        arguments.args, arguments.kwargs = list(given.args), dict(given.kwargs)
        region, plan = site.region, self.plan
        if any(stream.replicate for stream in region.streams):
            return False
        image, total = region.main, sum(plan.tokens[region.blocks])
        count = plan.tokens[region.blocks][1]
        segments = {image.name: (0, count, total)}
        for stream in region.streams:
            if stream.name == "text":
                length = arguments.get(stream.arg).shape[stream.dim]
                segments[stream.name] = (0, 0, length)

        def part(value: Tensor, dim: int, names: Sequence[str]) -> Tensor:
            pieces, start = [], 0
            for name in names:
                if name in segments:
                    first, length, whole = segments[name]
                    pieces.append(value.narrow(dim, start + first, length))
                    start += whole
            return torch.cat(pieces, dim) if start == value.shape[dim] else value

        for stream in region.streams:
            if stream.name in segments:
                value = arguments.get(stream.arg)
                arguments.set(stream.arg, part(value, stream.dim, (stream.name,)).contiguous())
        for cut in region.cuts:
            value = arguments.get(cut.arg)
            if isinstance(value, Tensor) and cut.ndim in (None, value.dim()) and value.shape[cut.dim] > 1:
                arguments.set(cut.arg, part(value, cut.dim % value.dim(), cut.tokens).contiguous())
        try:
            output = forward(*arguments.args, **arguments.kwargs)
        except Exception:
            return False
        for stream in region.streams:
            value = output if stream.out is None else output[stream.out]
            wanted = segments.get(stream.name, (0, 0, 0))[1]
            if isinstance(value, Tensor) and value.shape[stream.dim] != wanted:
                return False
        return True


class Timing(Pass):
    """Runs the glue, and times the first block of every kind: as much work on every rank.

    A picture that goes through a block patch by patch costs what it costs as a whole: tokens and queries add up, and
    every query sees all keys.

    Attributes:
        seconds: time of every kind.
    """

    def __init__(self, owner: Stage) -> None:
        super().__init__(owner)
        self.seconds: list[float] = []

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        owner = self.owner
        # Kinds are numbered in the order in which blocks run.
        if owner.stages.kinds[self.number(site)] == len(self.seconds):
            with filled(owner.model.get_submodule(site.path)):
                work = partial(forward, *arguments.args, **arguments.kwargs)
                self.seconds.append(median_seconds(work, owner.device))
        return passed_over(site, arguments)


class PatchPass(Pass):
    """One patch on its way through this stage.

    Attributes:
        finishes: whether this is the last stage, which runs the model to its end.
    """

    def __init__(self, owner: Stage, plan: Plan, memory: Memory, patches: int, patch: int) -> None:
        super().__init__(owner)
        self.plan, self.memory = plan, memory
        self.patches, self.patch = patches, patch
        self.finishes = owner.link.rank == owner.link.size - 1
        self._arriving: Transfer | None = None
        self._arrived: list[str | int] = []
        self._received: dict[str | int, Tensor] = {}
        # Results of this stage's blocks that later stages are passed besides the streams.
        self._skips: dict[int, Tensor] = {}

    def tokens(self, region: Region) -> tuple[int, ...]:
        return self.plan.tokens[region.blocks]

    def text_along(self, region: Region) -> bool:
        return region.blocks in self.plan.text_along

    # --- messages ----------------------------------------------------------------------------------------

    def _contents(self, number: int) -> list[tuple[str | int, Region, str]]:
        """What goes from the stage that ends with block ``number`` to the next: streams, then skips by block."""
        owner, region = self.owner, self.owner.regions[number]
        site = _Boundary(owner, number)
        found: list[tuple[str | int, Region, str]] = [
            (stream.name, region, stream.name)
            for stream in region.streams
            if stream.name in self.plan.streams[region.blocks] and is_read(site, stream)  # type: ignore[arg-type]
        ]
        crossing = {source for block, source in self.plan.skips.items() if source <= number < block}
        return found + [(source, owner.regions[source], owner.regions[source].main.name) for source in sorted(crossing)]

    def expect(self) -> None:
        """Post the receipt of what the stage before sends for this patch."""
        owner = self.owner
        if owner.link.rank == 0:
            return
        owner.handler.start(self)
        buffers = []
        for name, region, stream_name in self._contents(owner.first - 1):
            shape, dtype = self.plan.streams[region.blocks][stream_name]
            stream = region.stream(stream_name)
            tokens = owner.handler.partition(region, stream, shape[stream.dim])
            here = tokens.lengths[owner.handler.link.rank]
            size = (*shape[: stream.dim], here, *shape[stream.dim + 1 :])
            buffers.append(torch.empty(size, dtype=dtype, device=owner.device))
            self._arrived.append(name)
        owner.handler.start(None)
        self._arriving = owner.link.receive(buffers, owner.link.rank - 1)

    # --- blocks ------------------------------------------------------------------------------------------

    def arrive(self, site: BlockSite, arguments: Arguments) -> None:
        source = self.plan.skips.get(self.number(site))
        if source is not None and source in self._received:
            for path in site.region.local:
                arguments.set(path, self._received[source])

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        number, owner = self.number(site), self.owner
        if owner.first <= number <= owner.last:
            return forward(*arguments.args, **arguments.kwargs)
        if number != owner.first - 1 or self._arriving is None:
            return passed_over(site, arguments)
        self._received = dict(zip(self._arrived, self._arriving.wait(), strict=True))
        streams = {name: value for name, value in self._received.items() if isinstance(name, str)}
        return passed_over(site, arguments, streams)

    def leave(self, site: BlockSite, output: Any) -> Any:
        number, owner = self.number(site), self.owner
        if not owner.first <= number <= owner.last:
            return output
        if number in self.plan.skips.values():
            self._skips[number] = streams_of(site, output)[site.region.main.name]
        if number == owner.last and not self.finishes:
            streams = streams_of(site, output)
            kept = {**self._received, **self._skips}
            owner.send_on(
                [streams[name] if isinstance(name, str) else kept[name] for name, *_ in self._contents(number)]
            )
            raise StageDone
        return output


class _Boundary:
    """A block's place as `is_read` wants it, by number."""

    def __init__(self, owner: Stage, number: int) -> None:
        regions, region = owner.regions, owner.regions[number]
        self.region = region
        self.is_last = number + 1 == len(regions) or regions[number + 1] is not region
        self.feeds_next = self.is_last and number + 1 < len(regions) and regions[number + 1].chained


def marked_tokens(stream: Tensor, dim: int) -> Tensor:
    """Which tokens of a stream hold a NaN: (S,)."""
    return torch.isnan(stream).transpose(0, dim).flatten(1).any(1)


def runs_of(marked: list[Tensor], model: str, blocks: str) -> tuple[int, ...]:
    """Tokens of every patch in a list, from those of the list before; tokens of nobody go to the patch before them."""
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
    """Whose which element of an output is."""
    of = torch.full(marked[0].shape, COMMON, dtype=torch.int16, device=marked[0].device)
    for patch, mark in enumerate(marked):
        if bool((of[mark] != COMMON).any()):
            raise LayoutError(
                f"what {model} does after its last block mixes tokens, so its output does not fall into patches; "
                "use ulysses, ring or tensor"
            )
        of[mark] = patch
    return Owners(of, len(marked))

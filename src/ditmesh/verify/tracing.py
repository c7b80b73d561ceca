"""Traces of a pipeline's intermediate tensors: written on one device, compared on several.

A `Recorder` observes what every block of the transformer returns and what the scheduler is given and returns; it
changes nothing. On one device a `TraceWriter` keeps that in a folder. On several, every rank's `TraceComparer` reads
the same folder and compares its own part, wherever the strategies have put it: nothing is gathered or sent for it.
Afterwards `merge` puts the parts of all ranks together.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from math import ceil, inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..core.clock import CallClock, timestep_of
from ..engine import DENOISERS, ENGINE, Engine, denoisers, find_layout
from ..generate.steps import SchedulerStep, StepEvents
from ..layout import Region, TokenLayout
from ..parts.part import whole_of
from ..quality.metrics import absolute_error, token_digests
from ..strategies.hooks import Piece, Tap

SCHEDULER = "scheduler"


@dataclass(frozen=True)
class Spot:
    """A tensor's place in a request: step, call and block.

    Attributes:
        request: number of the pipeline's call, from 0.
        step: denoising step, from 1; 0 for the latents that the first step starts from.
        call: the transformer's call within the step, from 1 (guidance makes two); 0 for the scheduler's tensors.
        path: the block, ``"transformer_blocks.3"`` (after the transformer's name, if there are two), or
            ``"scheduler"``.
        tensor: name of the stream, ``"image"``; of the scheduler's tensors ``"prediction"`` (after guidance) or
            ``"latents"`` (after the step).
    """

    request: int
    step: int
    call: int
    path: str
    tensor: str


class Sink(Protocol):
    """Receives a recorder's observations."""

    def take(self, spot: Spot, tensor: Tensor, row: int, dim: int, start: int) -> None:
        """A part of the tensor of a spot: rows from ``row`` of the batch, tokens from ``start`` along ``dim``."""
        ...

    def end_call(self) -> None:
        """Called after a run of the transformer, or the pipeline's call, has ended."""
        ...


# --------------------------------------------------------------------------------------------------
# Observing


class Recorder:
    """Observes a pipeline, parallelised or not, until it is closed::

        with Recorder(pipe, sink) as recorder:
            recorder.begin(0)
            pipe(...)
            recorder.end()

    Args:
        pipe: a diffusers pipeline with a transformer and a scheduler.
        sink: gets the observations.
    """

    def __init__(self, pipe: Any, sink: Sink) -> None:
        self.sink = sink
        self.request, self.step = 0, 1
        # The scheduler's tensors, held until the request ends, because reading one may wait for it.
        self._held: list[tuple[int, str, Tensor]] = []
        engine: Engine | None = getattr(pipe, ENGINE, None)
        # An engine's clock counts requests by itself.
        self._clock = CallClock(lambda: pipe.scheduler) if engine is None else engine.clock
        self._own_clock = self._clock if engine is None else None
        models = denoisers(pipe)
        names = {id(getattr(pipe, name, None)): f"{name}." for name in DENOISERS}
        with ExitStack() as undo:
            for model in models:
                undo.callback(model.register_forward_pre_hook(lambda *_: sink.end_call(), prepend=True).remove)
                tap = functools.partial(self._observe, names[id(model)] if len(models) > 1 else "")
                # Stages run patches; the forward that could be watched only plans that, with no values.
                if engine is None or not engine.config.stages_or_patches:
                    self._watch_blocks(undo, engine, model, tap)
                if self._own_clock is not None:
                    undo.callback(self._own_clock.watch(model, timestep_of(model)))
            undo.callback(StepEvents(pipe.scheduler, self._stepped).undo)
            self._undo = undo.pop_all()

    @staticmethod
    def _watch_blocks(undo: ExitStack, engine: Engine | None, model: nn.Module, tap: Tap) -> None:
        hooks = [hooks for hooks in engine.hooks if hooks.model is model] if engine is not None else []
        for one in hooks:
            one.tap = tap
            undo.callback(setattr, one, "tap", None)
        if not hooks:
            undo.callback(watch_blocks(model, find_layout(model), tap))

    def begin(self, request: int) -> None:
        """Called before a call of the pipeline."""
        self.request, self.step = request, 1
        self._held.clear()
        if self._own_clock is not None:
            self._own_clock.begin_request()

    def end(self) -> None:
        """Called after the call: pass on the held tensors."""
        self.sink.end_call()
        if self._own_clock is not None:
            self._own_clock.end_request()
        for step, name, value in self._held:
            # Of stages a tensor may still be in patches; every rank asks for the same ones in the same order.
            flat = whole_of(value).detach()
            # (B, ·, W): rows first, and a last dimension to digest.
            flat = flat.reshape(flat.shape[0], -1, flat.shape[-1]) if flat.dim() > 1 else flat.reshape(1, 1, -1)
            self.sink.take(Spot(self.request, step, 0, SCHEDULER, name), flat, 0, 1, 0)
        self._held.clear()
        self.sink.end_call()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        """Take every hook off again."""
        self._undo.close()

    def _stepped(self, step: SchedulerStep) -> None:
        if self.step == 1:
            self._hold(0, "latents", step.sample)
        self._hold(self.step, "prediction", step.prediction)
        self._hold(self.step, "latents", step.latents())
        self.step += 1

    def _hold(self, step: int, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._held.append((step, name, value))

    def _observe(self, prefix: str, path: str, piece: Piece) -> None:
        call, row = self._clock.call, 0
        if call.rows is not None:
            # A block may hold several rows for one of the batch (the frames of a video).
            first, end = call.rows
            row = first * (piece.tensor.shape[0] // (end - first))
        # Steps and calls are counted from 1 here.
        spot = Spot(self.request, call.step + 1, call.branch + 1, prefix + path, piece.stream)
        self.sink.take(spot, piece.tensor.detach(), row, piece.dim, piece.start)


def watch_blocks(model: nn.Module, layout: TokenLayout, tap: Tap) -> Callable[[], None]:
    """Pass the block outputs of a model that is not parallelised to a tap; returns the removal."""
    undo = ExitStack()
    tokens: dict[str, int] = {}

    def after(region: Region, index: int, _: nn.Module, __: Any, output: Any) -> None:
        for stream in region.streams:
            value, dim = output if stream.out is None else output[stream.out], stream.dim
            if not isinstance(value, Tensor):
                continue
            if stream.folded:
                value, dim = value.unflatten(dim, (-1, tokens[stream.name])), dim + 1
            tokens[stream.name] = value.shape[dim]
            tap(f"{region.blocks}.{index}", Piece(stream.name, value, dim, 0))

    for region in layout.regions:
        for index, block in enumerate(model.get_submodule(region.blocks).children()):
            undo.callback(block.register_forward_hook(functools.partial(after, region, index)).remove)
    return undo.close


# --------------------------------------------------------------------------------------------------
# Writing


@dataclass(frozen=True)
class TraceEntry:
    """A tensor in a trace.

    Attributes:
        spot: its place.
        shape: of the whole tensor.
        dim: dimension of its tokens; dimension 0 is the batch.
        stride: every ``stride``-th value of the last dimension is kept.
        values, digests: what is kept of its values, and the digests of its tokens (`token_digests`).
    """

    spot: Spot
    shape: tuple[int, ...]
    dim: int
    stride: int
    values: Tensor
    digests: Tensor


@dataclass
class _Pending:
    """The received parts of one tensor: values and digests, by row and first token."""

    dim: int
    width: int
    stride: int
    parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def joined(self, of: int) -> Tensor:
        """The values (``of`` 0) of the whole tensor, or the digests of its tokens (``of`` 1)."""
        rows: dict[int, list[Tensor]] = {}
        for row, start in sorted(self.parts):
            rows.setdefault(row, []).append(self.parts[row, start][of])
        return torch.cat([torch.cat(parts, self.dim) for parts in rows.values()], 0)


class TraceWriter:
    """A sink that writes a trace into a folder, one file for each run of the transformer.

    Digests of all tokens are kept, so that no bit can differ unseen. Of the values, which are there to measure by how
    much, every k-th channel is kept, where k is as small as the budget allows: 1 unless the model is large.

    Args:
        folder: an empty folder.
        budget: bytes that the values may take. Where more runs come than were expected, every other channel of
            what was written is given up, as often as needed.
        calls: runs of the transformer to expect.

    Attributes:
        stride: k; None before the first run has ended.
    """

    def __init__(self, folder: str | Path, budget: float, calls: int) -> None:
        self.stride: int | None = None
        self._folder = Path(folder)
        self._budget, self._calls = budget, calls
        self._pending: dict[Spot, _Pending] = {}
        self._files = self._kept = 0

    def take(self, spot: Spot, tensor: Tensor, row: int, dim: int, start: int) -> None:
        """Parts of one tensor may come in any order; the same part twice counts once."""
        pending = self._pending.setdefault(spot, _Pending(dim, tensor.shape[-1], self._stride_of(spot)))
        values = tensor[..., :: pending.stride].to("cpu", copy=True).contiguous()
        pending.parts[row, start] = (values, token_digests(tensor).cpu())

    def end_call(self) -> None:
        """Write the parts received since the last time.

        Raises:
            OSError: there is no space left.
        """
        if not self._pending:
            return
        if self.stride is None:
            # The first call shows the total size.
            size = sum(values.nbytes for pending in self._pending.values() for values, _ in pending.parts.values())
            self.stride = max(1, ceil(size * self._calls / self._budget))
        entries = []
        for spot, pending in self._pending.items():
            stride = self._stride_of(spot)
            values = pending.joined(0)[..., :: stride // pending.stride].contiguous()
            shape = (*values.shape[:-1], pending.width)
            entries.append((astuple(spot), shape, pending.dim, stride, values, pending.joined(1)))
        self._pending.clear()
        self._kept += self._write(self._folder / f"{self._files:08}.pt", entries)
        self._files += 1
        while self._kept > self._budget and self.stride < entries[0][1][-1]:
            self._thin()

    def _thin(self) -> None:
        """Keep every other channel of existing and future parts."""
        self.stride, self._kept = 2 * (self.stride or 1), 0
        for file in sorted(self._folder.glob("*.pt")):
            entries = []
            for spot, shape, dim, stride, values, digests in torch.load(file, weights_only=True):
                if Spot(*spot).path != SCHEDULER:
                    stride, values = 2 * stride, values[..., ::2].contiguous()
                entries.append((spot, (*values.shape[:-1], shape[-1]), dim, stride, values, digests))
            self._kept += self._write(file, entries)

    @staticmethod
    def _write(file: Path, entries: list[Any]) -> int:
        """Write the entries of a run; bytes of values that a larger stride would make fewer."""
        data = io.BytesIO()
        torch.save(entries, data)
        file.write_bytes(data.getbuffer())
        return sum(values.nbytes for spot, _, _, _, values, _ in entries if Spot(*spot).path != SCHEDULER)

    def _stride_of(self, spot: Spot) -> int:
        return 1 if spot.path == SCHEDULER else self.stride or 1


class Trace:
    """The entries that a `TraceWriter` left in a folder. Values are read from disk when they are used.

    Attributes:
        entries: in the order in which one device computed them.
        places: of spots in ``entries``.
    """

    def __init__(self, folder: str | Path) -> None:
        files = sorted(Path(folder).glob("*.pt"))
        calls = [torch.load(file, mmap=True, weights_only=True) for file in files]
        self.entries = [TraceEntry(Spot(*spot), *more) for call in calls for spot, *more in call]
        self.places = {entry.spot: place for place, entry in enumerate(self.entries)}


# --------------------------------------------------------------------------------------------------
# Comparing


@dataclass(frozen=True)
class ComparedPart:
    """A part of a tensor, compared on one rank.

    Attributes:
        place: of the tensor in the trace.
        rank: holds the part.
        rows, tokens: first and how many, of the batch and along the dimension of tokens.
        equal: whether all bits are the same.
        token: the first token that differs, if one does.
        largest: absolute difference; scale: largest absolute value of one device's tensor, in this part.
    """

    place: int
    rank: int
    rows: tuple[int, int]
    tokens: tuple[int, int]
    equal: bool
    token: int | None
    largest: float
    scale: float


class TraceComparer:
    """A sink that compares received parts with a trace.

    Attributes:
        unknown: spots that the trace does not have, in order.
    """

    def __init__(self, trace: Trace, rank: int) -> None:
        self.trace, self.rank = trace, rank
        self.parts: list[ComparedPart] = []
        self.unknown: dict[Spot, None] = {}

    def take(self, spot: Spot, tensor: Tensor, row: int, dim: int, start: int) -> None:
        """Compare a part; a tensor of another shape or type differs infinitely."""
        place = self.trace.places.get(spot)
        if place is None:
            self.unknown[spot] = None
            return
        entry = self.trace.entries[place]
        rows, tokens = (row, tensor.shape[0]), (start, tensor.shape[dim])
        shape = list(entry.shape)
        if dim == entry.dim and sum(rows) <= shape[0] and sum(tokens) <= shape[dim]:
            shape[0], shape[dim] = rows[1], tokens[1]
        if list(tensor.shape) != shape or dim != entry.dim or tensor.dtype != entry.values.dtype:
            self.parts.append(ComparedPart(place, self.rank, rows, tokens, False, start, inf, 0.0))
            return
        theirs, digests = (whole.narrow(0, *rows).narrow(dim, *tokens) for whole in (entry.values, entry.digests))
        apart = (digests != token_digests(tensor).cpu()).movedim(dim, 0).flatten(1).any(1).nonzero()
        equal = not len(apart)
        ours = theirs if equal else tensor[..., :: entry.stride].cpu()
        errors = absolute_error(ours, theirs) if theirs.numel() else (0.0, 0.0)
        token = None if equal else start + int(apart[0])
        self.parts.append(ComparedPart(place, self.rank, rows, tokens, equal, token, *errors))

    def end_call(self) -> None:
        """Does nothing, because no parts are held."""


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor of all ranks against one device.

    Attributes:
        spot: its place.
        seen: share of its tokens that some rank has shown, 0 to 1.
        equal: whether all that was seen has the same bits.
        error: largest absolute difference over the largest absolute value on one device; largest: the difference.
        token: the first token that differs; ranks: those that hold it, or another part that differs.
    """

    spot: Spot
    seen: float
    equal: bool
    error: float
    largest: float
    token: int | None = None
    ranks: tuple[int, ...] = ()


def merge(trace: Trace, parts: Sequence[ComparedPart]) -> list[ComparedTensor]:
    """All ranks' parts put together, a result for each tensor of the trace, in one device's order.

    The scheduler's tensors come at the end of their step.
    """
    by_place: dict[int, list[ComparedPart]] = {}
    for part in parts:
        by_place.setdefault(part.place, []).append(part)
    results = []
    for place, entry in enumerate(trace.entries):
        seen = np.zeros((entry.shape[0], entry.shape[entry.dim]), dtype=bool)
        mine = by_place.get(place, [])
        for part in mine:
            (row, rows), (start, tokens) = part.rows, part.tokens
            seen[row : row + rows, start : start + tokens] = True
        differing = [part for part in mine if not part.equal]
        largest = max((part.largest for part in mine), default=0.0)
        scale = max((part.scale for part in mine), default=0.0)
        results.append(
            ComparedTensor(
                spot=entry.spot,
                seen=float(seen.mean()) if seen.size else 1.0,
                equal=not differing,
                error=largest / scale if scale else (inf if largest else 0.0),
                largest=largest,
                token=min((part.token for part in differing if part.token is not None), default=None),
                ranks=tuple(sorted({part.rank for part in differing})),
            )
        )
    # Stable: within a call the order stays that of one device.
    return sorted(results, key=lambda one: (one.spot.request, one.spot.step, one.spot.call or inf))

"""What a pipeline computes on its way to a picture, written down on one device and compared on others.

A `Recorder` looks at what every block of the transformer returns and at what the scheduler is given and gives back;
it changes nothing. On one device a `TraceWriter` keeps that in a folder. On several, every rank's `TraceComparer`
reads the same folder and compares its own part, wherever the strategies have put it: no tensor is gathered for it and
nothing is sent. The owner of the ranks then puts the parts together with `merge`.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, inf, prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ...core.alignment import ALIGNMENT
from ...core.clock import CallClock, timestep_of
from ...core.patching import Patch
from ...engine import DENOISERS, ENGINE, Engine, denoisers, find_layout
from ...layout import TokenLayout
from ...quality.metrics import absolute_error, token_digests
from ...strategies.hooks import Piece, Tap

SCHEDULER = "scheduler"


@dataclass(frozen=True)
class Spot:
    """A tensor's place in the making of pictures.

    Attributes:
        request: number of the pipeline's call, from 0.
        step: denoising step, from 1; 0 for what the first step starts from.
        call: the transformer's call within the step, from 1 (guidance makes two); 0 for the scheduler's tensors.
        path: the block, ``"transformer_blocks.3"`` (with the transformer's name before it, if there are two), or
            ``"scheduler"``.
        tensor: name of the stream, ``"image"``; of the scheduler's tensors ``"prediction"`` (what the
            transformer makes of the step, after guidance) or ``"latents"`` (what the step leaves).
    """

    request: int
    step: int
    call: int
    path: str
    tensor: str


class Sink(Protocol):
    """Whoever takes what a recorder sees."""

    def take(self, spot: Spot, tensor: Tensor, row: int, dim: int, start: int) -> None:
        """A part of the tensor of a spot.

        Args:
            spot: whose part.
            tensor: rows ``row`` … of the batch (dimension 0), tokens ``start`` … along ``dim``, whole otherwise.
        """
        ...

    def end_call(self) -> None:
        """One run of the transformer, or the pipeline's call, is over."""
        ...


# --------------------------------------------------------------------------------------------------
# Looking


class Recorder:
    """Looks at a pipeline, parallelised or not, until it is closed::

        with Recorder(pipe, sink) as recorder:
            recorder.begin(0)
            pipe(...)
            recorder.end()

    Args:
        pipe: a diffusers pipeline with a transformer and a scheduler.
        sink: gets what is seen.
    """

    def __init__(self, pipe: Any, sink: Sink) -> None:
        self.sink = sink
        self.request, self.step = 0, 1
        self._undo: list[Callable[[], None]] = []
        # The scheduler's tensors, held until the request is over: to look at one may mean to wait for it.
        self._kept: list[tuple[int, str, Tensor]] = []
        engine = getattr(pipe, ENGINE, None)
        clock = CallClock(lambda: pipe.scheduler) if engine is None else engine.clock
        # An engine's clock is told of requests by itself.
        self._own_clock = clock if engine is None else None
        models = denoisers(pipe)
        names = {id(getattr(pipe, name, None)): f"{name}." for name in DENOISERS}
        try:
            for model in models:
                prefix = names[id(model)] if len(models) > 1 else ""
                _Watch(self, model, prefix, engine, clock, self._undo)
                if engine is None:
                    self._undo.append(clock.watch(model, timestep_of(model)))
            scheduler = pipe.scheduler
            replaced = Patch(scheduler, "step", self._stepping(scheduler.step))
            self._undo.append(replaced)
        except BaseException:
            self.close()
            raise

    def begin(self, request: int) -> None:
        """A call of the pipeline is about to start."""
        self.request, self.step = request, 1
        self._kept.clear()
        if self._own_clock is not None:
            self._own_clock.begin_request()

    def end(self) -> None:
        """The call is over: hand on what was held back."""
        self.sink.end_call()
        if self._own_clock is not None:
            self._own_clock.end_request()
        for step, name, value in self._kept:
            flat = value.detach()
            # (B, ·, W): rows first, and a last dimension to digest.
            flat = flat.reshape(flat.shape[0], -1, flat.shape[-1]) if flat.dim() > 1 else flat.reshape(1, 1, -1)
            self.sink.take(Spot(self.request, step, 0, SCHEDULER, name), flat, 0, 1, 0)
        self._kept.clear()
        self.sink.end_call()

    def close(self) -> None:
        """Take every hook off again. Harmless when already closed."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        # Pipelines ask for the signature of this method: `wraps` passes the original's on.
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if self.step == 1:
                self._keep(0, "latents", given.get("sample"))
            self._keep(self.step, "prediction", given.get("model_output"))
            result = original(*args, **kwargs)
            self._keep(self.step, "latents", result[0] if isinstance(result, tuple) else result.prev_sample)
            self.step += 1
            return result

        return step

    def _keep(self, step: int, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._kept.append((step, name, value))


class _Watch:
    """Watches one transformer for a recorder."""

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        prefix: str,
        engine: Engine | None,
        clock: CallClock,
        undo: list[Callable[[], None]],
    ) -> None:
        self._recorder, self._prefix, self._clock = recorder, prefix, clock
        undo.append(model.register_forward_pre_hook(self._begin, prepend=True).remove)
        hooks = [hooks for hooks in engine.hooks if hooks.model is model] if engine is not None else []
        for one in hooks:
            one.tap = self._see
            undo.append(functools.partial(setattr, one, "tap", None))
        if not hooks:
            undo.append(watch_blocks(model, find_layout(model), self._see))

    def _begin(self, *_: Any) -> None:
        self._recorder.sink.end_call()

    def _see(self, path: str, piece: Piece) -> None:
        call = self._clock.call
        row = 0
        if call.rows is not None:
            # A block may hold several rows for one of the batch (the frames of a video).
            first, end = call.rows
            row = first * (piece.tensor.shape[0] // (end - first))
        # Steps and calls are counted from 1 here.
        spot = Spot(self._recorder.request, call.step + 1, call.branch + 1, self._prefix + path, piece.stream)
        self._recorder.sink.take(spot, piece.tensor.detach(), row, piece.dim, piece.start)


def watch_blocks(model: nn.Module, layout: TokenLayout, tap: Tap) -> Callable[[], None]:
    """Show a tap what the blocks of a model that is not parallelised return; the result takes it off again."""
    handles = []
    tokens: dict[str, int] = {}
    for region in layout.regions:
        for index, block in enumerate(model.get_submodule(region.blocks).children()):

            def after(_: nn.Module, __: Any, output: Any, region: Any = region, index: int = index) -> None:
                for stream in region.streams:
                    value, dim = output if stream.out is None else output[stream.out], stream.dim
                    if not isinstance(value, Tensor):
                        continue
                    if stream.folded:
                        value, dim = value.unflatten(dim, (-1, tokens[stream.name])), dim + 1
                    tokens[stream.name] = value.shape[dim]
                    tap(f"{region.blocks}.{index}", Piece(stream.name, value, dim, 0))

            handles.append(block.register_forward_hook(after))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# --------------------------------------------------------------------------------------------------
# Writing


@dataclass(frozen=True)
class Entry:
    """A tensor in a trace.

    Attributes:
        spot: where it was seen.
        shape, dtype: of the whole tensor.
        dim: dimension of its tokens; dimension 0 is the batch.
        stride: every so manieth value of the last dimension is in the file.
        values, digests: where its values, and the digests of its tokens (`token_digests`), begin, in bytes.
    """

    spot: Spot
    shape: tuple[int, ...]
    dtype: str
    dim: int
    stride: int
    values: int
    digests: int

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of what is in the file."""
        return (*self.shape[:-1], ceil(self.shape[-1] / self.stride))


@dataclass
class _Pending:
    """The parts of one tensor that have come: row, first token, values, digests."""

    dim: int
    width: int
    stride: int
    parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def joined(self, of: int) -> Tensor:
        """The whole tensor (``of`` 0), or the digests of its tokens (``of`` 1)."""
        rows: dict[int, list[Tensor]] = {}
        for row, start in sorted(self.parts):
            rows.setdefault(row, []).append(self.parts[row, start][of])
        return torch.cat([torch.cat(parts, self.dim) for parts in rows.values()], 0)


class TraceWriter:
    """A sink that keeps what it takes in a folder.

    Digests of all tokens are kept, so that no bit can differ unseen. Of the values, which are there to measure by how
    much, every k-th channel is kept, where k is as small as the budget allows: 1 unless the model is large.

    Args:
        folder: an empty folder.
        budget: bytes that the values may take, about.
        calls: runs of the transformer to expect, at most.
    """

    def __init__(self, folder: str | Path, budget: float, calls: int) -> None:
        self.folder = Path(folder)
        self.stride: int | None = None
        self._budget, self._calls = budget, calls
        self._entries: list[Entry] = []
        self._pending: dict[Spot, _Pending] = {}
        self._values = (self.folder / "values.bin").open("wb")
        self._digests = (self.folder / "digests.bin").open("wb")

    def take(self, spot: Spot, tensor: Tensor, row: int, dim: int, start: int) -> None:
        """See `Sink`. Parts of one tensor may come in any order; the same part twice counts once."""
        stride = 1 if spot.path == SCHEDULER else self.stride or 1
        pending = self._pending.setdefault(spot, _Pending(dim, tensor.shape[-1], stride))
        values = tensor[..., ::stride].to("cpu", copy=True).contiguous()
        pending.parts[row, start] = (values, token_digests(tensor).cpu())

    def end_call(self) -> None:
        """Write what was taken since the last time."""
        if self.stride is None and self._pending:
            # The first call tells how much there will be.
            size = sum(values.nbytes for pending in self._pending.values() for values, _ in pending.parts.values())
            self.stride = max(1, ceil(size * self._calls / self._budget))
        for spot, pending in self._pending.items():
            stride = 1 if spot.path == SCHEDULER else self.stride or 1
            values = pending.joined(0)[..., :: stride // pending.stride]
            entry = Entry(
                spot,
                (*values.shape[:-1], pending.width),
                str(values.dtype).removeprefix("torch."),
                pending.dim,
                stride,
                _append(self._values, values),
                _append(self._digests, pending.joined(1)),
            )
            self._entries.append(entry)
        self._pending.clear()

    def close(self) -> None:
        """Finish the files."""
        with self._values, self._digests:
            self.end_call()
        index = [asdict(entry) for entry in self._entries]
        (self.folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


class Trace:
    """What a `TraceWriter` left in a folder. Values are read from disk when they are asked for.

    Attributes:
        entries: in the order in which one device computed them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        self.entries = [Entry(Spot(**item.pop("spot")), tuple(item.pop("shape")), **item) for item in index]
        self._places = {entry.spot: place for place, entry in enumerate(self.entries)}
        self._values = _mapped(self.folder / "values.bin")
        self._digests = _mapped(self.folder / "digests.bin")

    def find(self, spot: Spot) -> int | None:
        """The place of a spot in `entries`."""
        return self._places.get(spot)

    def values(self, entry: Entry) -> Tensor:
        """The values kept of a tensor."""
        dtype = getattr(torch, entry.dtype)
        size = prod(entry.kept) * dtype.itemsize
        return self._values[entry.values : entry.values + size].view(dtype).view(entry.kept)

    def digests(self, entry: Entry) -> Tensor:
        """The digests of a tensor's tokens."""
        shape = entry.shape[:-1]
        return self._digests[entry.digests : entry.digests + prod(shape) * 8].view(torch.int64).view(shape)


def _append(file: Any, tensor: Tensor) -> int:
    """Write a tensor's bytes, aligned as in memory; where they begin."""
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
    start = file.tell()
    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return start


def _mapped(path: Path) -> Tensor:
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0).byte()


# --------------------------------------------------------------------------------------------------
# Comparing


@dataclass(frozen=True)
class Part:
    """A part of a tensor, compared on one rank.

    Attributes:
        place: of the tensor in the trace.
        rank: who held the part.
        rows, tokens: first and how many, of the batch and along the dimension of tokens.
        equal: whether all bits are the same.
        token: the first token that differs, if one does.
        largest, total, count: largest and summed absolute difference, and the number of values compared.
        scale: largest absolute value of one device's tensor, in this part.
    """

    place: int
    rank: int
    rows: tuple[int, int]
    tokens: tuple[int, int]
    equal: bool
    token: int | None
    largest: float
    total: float
    count: int
    scale: float


class TraceComparer:
    """A sink that compares what it takes with a trace.

    Attributes:
        parts: the comparisons.
        unknown: spots that the trace does not have, in the order seen.
    """

    def __init__(self, trace: Trace, rank: int) -> None:
        self.trace, self.rank = trace, rank
        self.parts: list[Part] = []
        self.unknown: dict[Spot, None] = {}

    def take(self, spot: Spot, tensor: Tensor, row: int, dim: int, start: int) -> None:
        """See `Sink`."""
        place = self.trace.find(spot)
        if place is None:
            self.unknown[spot] = None
            return
        entry = self.trace.entries[place]
        rows, tokens = (row, tensor.shape[0]), (start, tensor.shape[dim])
        fits = (
            len(entry.shape) == tensor.dim()
            and dim == entry.dim
            and row + rows[1] <= entry.shape[0]
            and start + tokens[1] <= entry.shape[dim]
            and all(a == b for d, (a, b) in enumerate(zip(entry.shape, tensor.shape, strict=True)) if d not in (0, dim))
            and str(tensor.dtype) == f"torch.{entry.dtype}"
        )
        if not fits:
            # Another shape or type altogether.
            self.parts.append(Part(place, self.rank, rows, tokens, False, start, inf, inf, 1, 0.0))
            return

        def part(whole: Tensor) -> Tensor:
            return whole.narrow(0, *rows).narrow(dim, *tokens)

        apart = part(self.trace.digests(entry)) != token_digests(tensor).cpu()
        equal, token = not bool(apart.any()), None
        theirs = part(self.trace.values(entry))
        largest = total = 0.0
        if equal:
            scale = float(torch.nan_to_num(theirs.float()).abs().max()) if theirs.numel() else 0.0
        else:
            along = apart.movedim(dim, 0).flatten(1).any(1)
            token = start + int(along.nonzero()[0])
            largest, total, scale = absolute_error(tensor[..., :: entry.stride].cpu(), theirs)
        self.parts.append(Part(place, self.rank, rows, tokens, equal, token, largest, total, theirs.numel(), scale))

    def end_call(self) -> None:
        """Nothing is held back."""


@dataclass(frozen=True)
class Compared:
    """A tensor of all ranks against one device.

    Attributes:
        spot: where it was seen.
        seen: share of its tokens that some rank has shown, 0 to 1.
        equal: whether all that was seen has the same bits.
        error: largest absolute difference over the largest absolute value on one device.
        largest, mean: absolute difference.
        token: the first token that differs; ranks: who held it, or another part that differs.
    """

    spot: Spot
    seen: float
    equal: bool
    error: float
    largest: float
    mean: float
    token: int | None = None
    ranks: tuple[int, ...] = ()


def merge(trace: Trace, parts: Sequence[Part]) -> list[Compared]:
    """All ranks' parts put together, a result for each tensor of the trace, in one device's order.

    The scheduler's tensors come at the end of their step.
    """
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part.place, []).append(part)
    results = []
    for place, entry in enumerate(trace.entries):
        seen = np.zeros((entry.shape[0], entry.shape[entry.dim]), dtype=bool)
        mine = found.get(place, [])
        for part in mine:
            (row, rows), (start, tokens) = part.rows, part.tokens
            seen[row : row + rows, start : start + tokens] = True
        differing = [part for part in mine if not part.equal]
        largest = max((part.largest for part in mine), default=0.0)
        scale = max((part.scale for part in mine), default=0.0)
        count = sum(part.count for part in mine)
        results.append(
            Compared(
                spot=entry.spot,
                seen=float(seen.mean()) if seen.size else 1.0,
                equal=not differing,
                error=largest / scale if scale else (inf if largest else 0.0),
                largest=largest,
                mean=sum(part.total for part in mine) / count if count else 0.0,
                token=min((part.token for part in differing if part.token is not None), default=None),
                ranks=tuple(sorted({part.rank for part in differing})),
            )
        )
    # Stable: within a call the order stays that of one device.
    return sorted(results, key=lambda one: (one.spot.request, one.spot.step, one.spot.call or inf))

"""Timelines: when every rank computes, posts messages and waits, as a Chrome trace.

The format is the Trace Event Format that chrome://tracing and Perfetto (ui.perfetto.dev) read: a process for every
rank, with a lane for modules, one for blocks, and one for waiting. Messages under way are drawn from when they are
posted to when the rank that waits for them goes on, so that one that hides behind computation can be told from one that
does not.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Lanes of a rank.
MODULES, BLOCKS, WAITING = "modules", "blocks", "waiting for ranks"


@dataclass(frozen=True)
class Span:
    """An operation of a rank from ``began`` to ``ended``, in seconds since the timeline began on this rank."""

    lane: str
    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class Message:
    """A message or collective of a rank.

    Attributes:
        axis, kind: the link it went over, and the link's method.
        sent: bytes that this rank sent.
        posted, waited, ended: seconds since the timeline began: when it was posted, when the rank began to wait for it,
            and when it went on. No rank waited for it where the last two are None.
    """

    axis: str
    kind: str
    sent: int
    posted: float
    waited: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class RankTimeline:
    """The timeline of one rank.

    Attributes:
        host: name of the machine.
        origin: of ``began`` and the like on that machine's clock, in seconds.
    """

    spans: tuple[Span, ...] = ()
    messages: tuple[Message, ...] = ()
    host: str = ""
    origin: float = 0.0


@dataclass
class _Posted(AbstractContextManager[None]):
    """A message on its way; entered while its rank waits for it. Times are marks of the clock."""

    mark: Callable[[], Any]
    axis: str
    kind: str
    sent: int
    posted: Any
    waited: Any = None
    ended: Any = None

    def __enter__(self) -> None:
        self.waited = self.mark()

    def __exit__(self, *error: object) -> None:
        self.ended = self.mark()


@dataclass
class TimelineRecorder:
    """Records one rank of a pipeline until it is closed. Every rank of the job creates one; all start together.

    On a GPU times are those of the stream that computes (CUDA events), on a CPU those of the thread that computes.

    Args:
        models: its transformers, and the paths of their lists of blocks.
        traffic: of the mesh; its messages are shown; None: there is none.
        alone: no other rank of the job records.
    """

    pipe: Any
    models: Sequence[tuple[nn.Module, Sequence[str]]]
    traffic: Any = None
    alone: bool = False
    _open: list[tuple[str, str, Any]] = field(default_factory=list)
    _spans: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    _messages: list[_Posted] = field(default_factory=list)

    def __enter__(self) -> TimelineRecorder:
        """Install the hooks. A collective call of the recording ranks."""
        self._on_cuda = next(self.models[0][0].parameters()).is_cuda
        names = {id(part): name for name, part in self.pipe.components.items() if isinstance(part, nn.Module)}
        with ExitStack() as undo:
            for part in self.pipe.components.values():
                if isinstance(part, nn.Module):
                    self._time(undo, part, MODULES, names[id(part)])
                if isinstance(decoder := getattr(part, "decoder", None), nn.Module):
                    self._time(undo, decoder, MODULES, f"{names[id(part)]}.decoder")
            for model, lists in self.models:
                for path in lists:
                    for index, block in enumerate(model.get_submodule(path).children()):
                        self._time(undo, block, BLOCKS, f"{path}.{index}")
            if self.traffic is not None:
                self.traffic.watcher = self
                undo.callback(setattr, self.traffic, "watcher", None)
            if dist.is_initialized() and not self.alone:
                dist.barrier()
            if self._on_cuda:
                torch.cuda.synchronize()
            self._start, self._origin = self._mark(), time.perf_counter()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Take every hook off again."""
        self._undo.close()

    def post(self, axis: str, kind: str, sent: int) -> AbstractContextManager[object]:
        """See `ditmesh.comm.state.MessageWatcher`."""
        message = _Posted(self._mark, axis, kind, sent, self._mark())
        self._messages.append(message)
        return message

    def result(self) -> RankTimeline:
        """The recorded timeline; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        spans = tuple(Span(lane, name, self._at(a), self._at(b)) for lane, name, a, b in self._spans)
        messages = tuple(
            Message(
                one.axis, one.kind, one.sent, self._at(one.posted),
                *((None, None) if one.ended is None else (self._at(one.waited), self._at(one.ended))),
            )
            for one in self._messages
        )  # fmt: skip
        return RankTimeline(spans, messages, socket.gethostname(), self._origin)

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _at(self, mark: Any) -> float:
        return self._start.elapsed_time(mark) / 1e3 if self._on_cuda else mark - self._start

    def _time(self, undo: ExitStack, module: nn.Module, lane: str, name: str) -> None:
        def before(*_: Any) -> None:
            self._open.append((lane, name, self._mark()))

        def after(*_: Any) -> None:
            # A call that raised left its beginning behind.
            while self._open:
                *what, began = self._open.pop()
                if what == [lane, name]:
                    self._spans.append((lane, name, began, self._mark()))
                    return

        undo.callback(module.register_forward_pre_hook(before, prepend=True).remove)
        undo.callback(module.register_forward_hook(after).remove)


@dataclass(frozen=True)
class Overlap:
    """The overlap of an axis's messages with computation, over all ranks of a configuration.

    Attributes:
        messages: how many; sent: their bytes.
        under_way: seconds from posting to the end of waiting, added up.
        waited: seconds of it that ranks did nothing but wait.
    """

    messages: int
    sent: int
    under_way: float
    waited: float


def overlaps(ranks: Sequence[RankTimeline]) -> dict[str, Overlap]:
    """Overlaps by axis. Messages that no rank waited for are not counted."""
    found: dict[str, list[Message]] = {}
    for rank in ranks:
        for message in rank.messages:
            if message.ended is not None:
                found.setdefault(message.axis, []).append(message)
    return {
        axis: Overlap(
            len(messages),
            sum(one.sent for one in messages),
            sum(one.ended - one.posted for one in messages if one.ended is not None),
            sum(one.ended - one.waited for one in messages if one.ended is not None and one.waited is not None),
        )
        for axis, messages in found.items()
    }


def write_chrome_trace(file: str | Path, configs: Mapping[str, Sequence[RankTimeline]]) -> None:
    """Write the timelines of some configurations, each of which starts at time 0.

    Ranks of one host share its clock; of several hosts each starts at 0, where the ranks left a barrier together.

    Args:
        file: is replaced; read by chrome://tracing and ui.perfetto.dev.
        configs: the ranks' timelines, by name of the configuration.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for name, ranks in configs.items():
        shared = len({rank.host for rank in ranks}) == 1
        start = min((rank.origin for rank in ranks), default=0.0)
        for number, rank in enumerate(ranks):
            _add(events, process, f"{name}, rank {number}", rank, rank.origin - start if shared else 0.0)
            process += 1
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(file).write_text(text + "\n", encoding="utf-8")


def _add(events: list[dict[str, Any]], process: int, name: str, rank: RankTimeline, later: float) -> None:
    def at(seconds: float) -> float:
        return round((seconds + later) * 1e6, 3)

    lanes = {lane: number for number, lane in enumerate((MODULES, BLOCKS, WAITING))}
    events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
    events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
    for lane, thread in lanes.items():
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}})

    def span(lane: str, what: str, began: float, ended: float, **more: Any) -> None:
        place = {"pid": process, "tid": lanes[lane], "ts": at(began), "dur": round((ended - began) * 1e6, 3)}
        events.append({"ph": "X", "name": what, "cat": lane, **place, "args": more})

    for one in rank.spans:
        span(one.lane, one.name, one.began, one.ended)
    for number, message in enumerate(rank.messages):
        if message.ended is None or message.waited is None:
            continue
        what = f"{message.axis} {message.kind}"
        span(WAITING, what, message.waited, message.ended, bytes_sent=message.sent)
        ends = {"name": what, "cat": "under way", "id": f"{process}.{number}", "pid": process, "tid": lanes[WAITING]}
        events.append({"ph": "b", **ends, "ts": at(message.posted), "args": {"bytes_sent": message.sent}})
        events.append({"ph": "e", **ends, "ts": at(message.ended)})

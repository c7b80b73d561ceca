"""Messages between the ranks of a pool: results to rank 0, and from there one log of events to all."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.gloo import new_group
from ...comm.mesh import ENDLESS
from ...engine.sent import NumberedTensors, as_bytes, dumped, loaded
from ..schedule.core import Run
from ..schedule.costs import Kind, Mode
from ..types import RankState
from .protocol import PictureTask
from .rendezvous import FailureReason
from .sockets import connected

# --- values with tensors


def packed(value: Any) -> bytes:
    """A value with tensors as bytes; tensors of any device."""
    numbered, tensors = NumberedTensors(), []
    body = dumped(value, lambda obj: numbered.number(obj) if isinstance(obj, Tensor) else None)
    for tensor in numbered.found:
        data = as_bytes(tensor).cpu().numpy().tobytes() if tensor.numel() else b""
        tensors.append((tensor.dtype, tuple(tensor.shape), tensor.device.type != "cpu", data))
    return pickle.dumps((body, tensors))


def unpacked(data: bytes, device: torch.device) -> Any:
    """The value of `packed`; tensors that were on a device are on ``device``, in memory of their own."""
    body, packs = pickle.loads(data)
    tensors = []
    for dtype, shape, moved, raw in packs:
        # torch's own allocation is aligned: sums in kernels may depend on that.
        tensor = torch.empty(shape, dtype=dtype)
        if raw:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        tensors.append(tensor.to(device) if moved else tensor)
    return loaded(body, tensors.__getitem__)


# --- events: the same for all ranks, in one order


@dataclass(frozen=True)
class Joined:
    """A task is in the pool: every rank begins it."""

    task: PictureTask


@dataclass(frozen=True)
class Left:
    """A task is to be forgotten; ``cancelled``: the owner is told so, and the ``step`` that it had reached."""

    id: str
    cancelled: bool = True
    step: int = 0


@dataclass(frozen=True)
class Assigned:
    """Ranks are to make the next calls of tasks."""

    number: int
    run: Run


@dataclass(frozen=True)
class Recall:
    """A run that has no end of its own is to end after the call that it is at."""

    number: int


@dataclass(frozen=True)
class Answers:
    """The results of a task's calls, in order, from the ranks that made them; the others keep them.

    Attributes:
        id: of the task.
        ranks: that have made them.
        data: `packed` list of the results; empty: for ranks that do not need it.
        ended: the task is done: all ranks forget it; the first of those that made the call has reported it.
    """

    id: str
    ranks: range
    data: bytes
    ended: bool


@dataclass(frozen=True)
class Failing:
    """A task has failed: every rank forgets it, and rank 0 reports the reason."""

    id: str
    reason: FailureReason


@dataclass(frozen=True)
class Loading:
    """Every rank loads the next model."""

    load: Any


@dataclass(frozen=True)
class Renewing:
    """Every rank makes the links of a way of a model again."""

    model: str
    mode: Mode


@dataclass(frozen=True)
class Ending:
    """Every rank returns."""


# --- results: from a rank to rank 0


@dataclass(frozen=True)
class TaskAfter:
    """A task after a run.

    Attributes:
        step, steps: that are done, and that there are.
        narrow: its next call is one of another component than a transformer.
        ended: nothing is left of it.
    """

    step: int
    steps: int
    narrow: bool
    ended: bool


@dataclass(frozen=True)
class Relayed:
    """What a rank has to tell the owner."""

    message: Any


@dataclass
class RunDone:
    """A rank's results of a run.

    Attributes:
        number: of the run; rank: that reports.
        answers: by task, `packed`; of the first rank of the run alone.
        after: of each task.
        calls: kind, number of requests and seconds of the next calls of all its tasks, each time; made: number of
            calls by task.
        parts: task, whether it came before the steps, and seconds of each other call, and of its preparation and end.
        failed: by task.
        broken: the way's links are to be made again.
        number_of_calls: of transformers; rows: of these calls; batch: of the latest.
        missing: tasks that are not on this rank (any more).
        state: of the rank.
        sent: bytes, by axis, since the start.
    """

    number: int
    rank: int
    answers: dict[str, bytes] = field(default_factory=dict)
    after: dict[str, TaskAfter] = field(default_factory=dict)
    calls: list[tuple[Kind, int, float]] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)
    parts: list[tuple[str, bool, float]] = field(default_factory=list)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    broken: bool = False
    number_of_calls: int = 0
    rows: int = 0
    batch: int = 0
    missing: list[str] = field(default_factory=list)
    state: RankState | None = None
    sent: Mapping[str, int] = field(default_factory=dict)


# --- transport

# Bytes of the first part of a message, and of the length that it begins with.
FIRST, LENGTH = 4096, 8


class Channel:
    """Messages between rank 0 and the others, over sockets of the host, or between hosts over process groups.

    Made by all ranks at the same time.

    Messages go out in one order, and threads receive them: no sender waits for a rank that computes.

    Attributes:
        events: for this rank, in order.
        recalled: numbers of runs that are to end (`Recall`): what a rank looks at while it is at a run.

    Args:
        rank, size: this rank, and their number.
        inbox: on rank 0 called with each message for it, in the thread that received it.
        gather: every rank's value, in rank order; None: process groups are used in any case.
    """

    def __init__(
        self, rank: int, size: int, inbox: Callable[[Any], None], gather: Callable[[Any], list[Any]] | None = None
    ) -> None:
        self.rank, self.size, self._inbox = rank, size, inbox
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.recalled: set[int] = set()
        # Several threads of a rank have something to say; a message is two of the group's.
        self._sending = threading.Lock()
        self._sockets = None if gather is None or size == 1 else connected(rank, size, gather)
        grouped = size > 1 and self._sockets is None
        # Messages are waited for as long as a server lives.
        self._down: Any = new_group(backend="gloo", timeout=ENDLESS) if grouped else None
        self._up: Any = new_group(backend="gloo", timeout=ENDLESS) if grouped else None
        self._threads: list[threading.Thread] = []
        sources = range(1, size) if rank == 0 else [0] if size > 1 else []
        for source in sources:
            target = self._hear if rank == 0 else self._listen
            thread = threading.Thread(target=target, args=(source,), name=f"ditmesh-pool-{source}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def publish(self, events: list[Any]) -> None:
        """Send events to all ranks, in order, from rank 0's conductor."""
        for rank in range(1, self.size):
            self._send(events, rank, self._down)
        self._take(events)

    def tell(self, message: Any) -> None:
        """Send rank 0's conductor a message."""
        if self.rank == 0:
            self._inbox(message)
        else:
            self._send(message, 0, self._up)

    def close(self) -> None:
        """End the threads, after the last event. All ranks call this."""
        if self.size == 1:
            return
        if self.rank > 0:
            self._send(None, 0, self._up)
        for thread in self._threads:
            thread.join()
        for connection in (self._sockets or {}).values():
            connection.close()
        for group in (self._down, self._up):
            if group is not None:
                dist.destroy_process_group(group)

    def _take(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, Recall):
                self.recalled.add(event.number)
            else:
                self.events.put(event)

    def _send(self, message: Any, rank: int, group: Any) -> None:
        data = pickle.dumps(message)
        if self._sockets is not None:
            with self._sending:
                self._sockets[rank].send_bytes(data)
            return
        # The receiver waits for a first part of this size, so that it is not asked before: most messages are no longer.
        whole = bytearray(max(FIRST, LENGTH + len(data)))
        whole[:LENGTH] = len(data).to_bytes(LENGTH, "little")
        whole[LENGTH : LENGTH + len(data)] = data
        body = torch.frombuffer(whole, dtype=torch.uint8)
        with self._sending:
            dist.send(body[:FIRST], rank, group=group)
            if len(whole) > FIRST:
                dist.send(body[FIRST:], rank, group=group)

    def _receive(self, rank: int, group: Any) -> Any:
        if self._sockets is not None:
            return pickle.loads(self._sockets[rank].recv_bytes())
        first = torch.empty(FIRST, dtype=torch.uint8)
        dist.recv(first, rank, group=group)
        data = first.numpy().tobytes()
        length = int.from_bytes(data[:LENGTH], "little")
        if length > FIRST - LENGTH:
            rest = torch.empty(LENGTH + length - FIRST, dtype=torch.uint8)
            dist.recv(rest, rank, group=group)
            data += rest.numpy().tobytes()
        return pickle.loads(memoryview(data)[LENGTH : LENGTH + length])

    def _hear(self, source: int) -> None:
        # The launcher hears of a rank that is gone.
        with suppress(EOFError, ConnectionError):
            while (message := self._receive(source, self._up)) is not None:
                self._inbox(message)

    def _listen(self, source: int) -> None:
        while True:
            try:
                events = self._receive(source, self._down)
            except (EOFError, ConnectionError):
                self.events.put(RuntimeError(f"rank {source} is gone"))
                return
            except Exception as error:
                self.events.put(error)
                return
            self._take(events)
            if any(isinstance(event, Ending) for event in events):
                return

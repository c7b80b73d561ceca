"""The rendezvous of a replica's ranks before every round: commands, measurements and failures."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...comm import PeerError
from ...comm.objects import gather_objects
from ...errors import LayoutError, shortened
from ..types import RankState
from .protocol import Command, FailureCode, Message, Stop

# Characters of an error's text that are reported.
MAX_MESSAGE = 500


class HostAllGather:
    """All-gather of any Python objects over a process group of the host (gloo).

    Attributes:
        deadline: of its collectives, in seconds: that of the default group; None: torch's own.
    """

    def __init__(self) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self.deadline: float | None = None
        self._group: Any = None
        if self.size > 1:
            # New groups do not take it over.
            world: Any = dist.group.WORLD
            deadline = getattr(getattr(world._get_backend(torch.device("cpu")), "options", None), "_timeout", None)
            self.deadline = None if deadline is None else deadline.total_seconds()
            self._group = dist.new_group(backend="gloo", timeout=deadline)

    def __call__(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order: anything that can be pickled. A collective call."""
        return [value] if self._group is None else gather_objects(value, self._group)

    def close(self) -> None:
        """Free the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)


@dataclass(frozen=True)
class FailureReason:
    """The reason why one rank cannot run a task; ``consequence``: another rank knows the cause."""

    code: FailureCode
    message: str
    consequence: bool = False


@dataclass
class RoundMessage:
    """A rank's contribution to the all-gather before each round.

    Attributes:
        commands: the owner's, of rank 0.
        stuck: tasks with a call that has failed, and why.
        failed: tasks that have ended in an error.
        state: of the rank, now and then.
        now: on its monotonic clock.
    """

    commands: list[Command] = field(default_factory=list)
    stuck: dict[str, FailureReason] = field(default_factory=dict)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    state: RankState | None = None
    now: float = 0.0


class RankRendezvous:
    """The synchronisation of a replica's ranks before every round. Only rank 0 talks to the owner.

    Attributes:
        gather: every rank's value, in rank order (`HostAllGather`).
        message: this rank's contribution to the next round.
        states: of the ranks, by rank, as last told.
    """

    def __init__(self, report: Any) -> None:
        self.gather = HostAllGather()
        self.rank, self.size = self.gather.rank, self.gather.size
        self.message = RoundMessage()
        self.states: dict[int, RankState] = {}
        self._report = report
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # Ranks never block on the owner.
        threading.Thread(target=self._read, name="ditmesh-commands", daemon=True).start()

    def _read(self) -> None:
        """Read the owner's commands, which come to every rank; the next message after a stop is none."""
        command = None
        while not isinstance(command, Stop):
            try:
                command = self._report.reply()
            except (EOFError, OSError):
                command = Stop()
            if self.rank == 0:
                self._commands.put(command)

    def meet(self, wait: float, state: RankState | None) -> list[RoundMessage]:
        """Every rank's message, in rank order. A collective call.

        Args:
            wait: seconds that rank 0 waits for a command.
            state: of this rank, if it is to be told.
        """
        message, self.message = self.message, RoundMessage()
        message.state = state
        if self.rank == 0:
            with suppress(queue.Empty):
                message.commands.append(self._commands.get(timeout=wait) if wait else self._commands.get_nowait())
                while True:
                    message.commands.append(self._commands.get_nowait())
        message.now = time.monotonic()
        messages = self.gather(message)
        self.states.update({one.state.rank: one.state for one in messages if one.state is not None})
        return messages

    def send(self, message: Message) -> None:
        """Report to the owner; only rank 0 does."""
        if self.rank == 0:
            self._report(message)

    def close(self) -> None:
        """Free the process groups."""
        self.gather.close()


def failure_of(error: BaseException) -> FailureReason:
    """The error's text for a report."""
    message = shortened(error, MAX_MESSAGE)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in message:
        return FailureReason(
            "out_of_memory", f"there is not enough memory for this image ({message}); ask for a smaller one"
        )
    if isinstance(error, (PeerError, FloatingPointError)):
        return FailureReason("internal", message, consequence=isinstance(error, PeerError))
    if isinstance(error, (ValueError, TypeError, NotImplementedError, LayoutError)):
        return FailureReason("invalid_request", message)
    return FailureReason("internal", f"{type(error).__name__}: {message}")

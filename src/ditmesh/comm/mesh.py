"""The device mesh: process groups and links for the axes of a `ParallelConfig`.

A `Mesh` is passed as an argument and never looked up: several can live in one process.

A process group's collectives cannot say what they belong to: after a failure on one rank, the next collective of that
rank would meet one of another request on the others. So ranks meet at *boundaries*: before every request they tell one
another, over a process group of their own, which request they come for and whether the one before has failed. If it
has, on any rank, all of them make new process groups and new shared memory before the first tensor travels.
"""

from __future__ import annotations

import copy
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..config import ParallelConfig
from .grid import RankGrid
from .link import Link
from .state import PeerError
from .watcher import FailureWatcher, Notice

# Seconds a collective may wait for a missing rank.
DEFAULT_DEADLINE_SECONDS = 600.0
# Deadline of receives that may never be answered, such as the failure watcher's.
ENDLESS = timedelta(days=10_000)

# The remedy in an error about an unusable mesh.
_WAY_OUT = "call ditmesh.restore on every rank and parallelize again, or restart the job"

_GIVEN_UP_HERE = "the job has failed on this rank, and its mesh was given up; restart the job"

_CLOSED = "this mesh is closed; make a new one, or call ditmesh.parallelize again"


class _Arrival(NamedTuple):
    """A rank's message at a boundary: the state of the previous request, and the purpose of the next."""

    number: int
    outcome: int
    messages: int
    purpose: str

    def packed(self) -> torch.Tensor:
        words = _ARRIVAL.pack(*self[:3], self.purpose.encode()[:104])
        return torch.frombuffer(bytearray(words), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, packed: torch.Tensor) -> _Arrival:
        number, outcome, messages, text = _ARRIVAL.unpack(bytes(packed.tolist()))
        return cls(number, outcome, messages, text.rstrip(b"\0").decode(errors="replace"))


_ARRIVAL = struct.Struct("<3q104s")
# The request has not failed; it has, and groups are as they were; it has, and groups were given up.
_FINE, _FAILED, _GIVEN_UP = range(3)


class Mesh(RankGrid):
    """The ranks of one configuration, laid out as a grid of axes, with one `Link` per axis.

    Attributes:
        traffic: bytes this rank has sent, by axis.
        hosts: which ranks share a host.
        world: link over all ranks.
        batch: link over the data and cfg axes, which both share out rows.
        data, cfg: links of the two alone.
        pipe: link of the stages; stage = its rank. pipe_back: the same ranks, for messages of the last stage.
        ring, ulysses: links of the two sequence axes.
        sequence: link over both of them; sequence rank = ring rank × ulysses degree + ulysses rank.
        tensor: link of the ranks that share weights.
        shard: link of the ranks that hold a part each of weights that would be equal on them.
    """

    def __init__(
        self,
        config: ParallelConfig,
        device: torch.device | str | None = None,
        timeout: float = DEFAULT_DEADLINE_SECONDS,
        links: Mapping[str, Link] | None = None,
    ) -> None:
        """Build the groups. A collective call: every rank of the job makes the same one.

        Args:
            config: degrees of the axes; they must multiply to the world size.
            device: where this rank's tensors live; default: torch's current accelerator when the process group
                has its backend (NCCL), else the CPU.
            timeout: deadline of every collective, in seconds; on NCCL for ranks to meet, and for collectives at least
                `LEAST_ON_NCCL`.
            links: by attribute name, of a mesh of this process alone; its other links have one rank. No group is built.

        `ConfigError`: the degrees do not multiply to the world size, or no process group exists though more than one
        rank is asked for; or, on all ranks alike, one of them computes where its process group or the configuration
        does not work.
        """
        super().__init__(config, device, timeout, links)
        self._watcher: FailureWatcher | None = None
        self._outcome = _FINE
        # Why no boundary can be reached any more.
        self._broken: str | None = None
        self._depth = 0
        self._renewed: list[Callable[[], None]] = []
        # The ranks that meet at a boundary.
        self._peers: Sequence[int] = range(self.world_size)
        self._state.peers = self._peers
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Make the process group and shared memory of every link. Collective over all ranks."""
        if self.world_size == 1:
            return
        if self._control is None:
            self._meet_hosts()
        firsts = self._join_links()
        if not self._over_gloo and self._watcher is None:
            ring = self.new_host_group(ENDLESS)
            assert ring is not None
            self._watcher = FailureWatcher(ring, self._receive_notice)
        # A group is there for one rank while another still connects, and would be lost if the first one failed now.
        dist.barrier(group=self._control)
        # After a failure these are new links.
        self._state.refusal = None
        self._connect_peers(firsts)

    def data_group(self) -> Mesh:
        """The mesh of the ranks that have this one's place on the data axis; they alone meet at its boundaries.

        Without the others they cannot renew their links, so that a failed request breaks it. Its rank, world size, byte
        counters and `close` are the whole mesh's.
        """
        group = copy.copy(self)
        group.world, group.batch = self._links.get("group", self.world), self.cfg
        group.data, group._peers, group._renewed = self._links["alone"], group.world.ranks, []
        return group

    @property
    def waited(self) -> float:
        """Seconds for which this rank's host has waited for other ranks on any link, since the mesh was made."""
        return self._state.waited

    @property
    def deadline(self) -> float:
        """Seconds that a collective may wait for a missing rank."""
        return self._deadline.total_seconds()

    @property
    def failed(self) -> bool:
        """True if the request in progress has failed on this rank; the next boundary mends it."""
        return self.world_size > 1 and (self._outcome != _FINE or self._state.lost)

    @contextmanager
    def request(self, purpose: str = "a request") -> Iterator[None]:
        """The length of a request: `begin_request`, and `fail_request` when it raises."""
        self.begin_request(purpose)
        self._depth += 1
        try:
            yield
            if self._depth == 1 and self._watcher is not None:
                # The device may still compute with tensors that a group received before it was aborted.
                if self.device.type != "cpu":
                    torch.accelerator.current_stream(self.device).synchronize()
                self._state.report()
        except BaseException:
            self.fail_request()
            raise
        finally:
            self._depth -= 1

    def begin_request(self, purpose: str = "a request") -> None:
        """A boundary, at which all ranks synchronise. A collective call.

        If the request before has failed on any rank, process groups and shared memory are renewed; see `when_renewed`.
        ``purpose``: the reason for the boundary; the same on every rank (the first 104 bytes count). `PeerError`: a
        rank has not come before the deadline, or has ended: the mesh is broken, and every later call says so; or the
        ranks have come for different purposes: they may try again.
        """
        if self.world_size == 1:
            return
        if self._broken is not None:
            raise PeerError(self._broken)
        with self._lock:
            self._state.meeting = True
        outcome = _GIVEN_UP if self._state.lost else self._outcome
        every = self._meet(_Arrival(self._state.number, outcome, self._state.messages, purpose))
        other = next((rank for rank, arrival in enumerate(every) if arrival.purpose != every[0].purpose), None)
        self._state.begin(max(arrival.number for arrival in every) + 1, self._peers)
        if other is not None:
            sentence = (
                f"the ranks have come for different things: rank {self._peers[0]} for {every[0].purpose}, rank "
                f"{self._peers[other]} for {every[other].purpose}; make the same calls with the same inputs on all"
            )
            raise self._fail(sentence)
        outcomes = {arrival.outcome for arrival in every}
        # A rank that failed before it sent anything needs no renewal, unless another rank has sent.
        if _GIVEN_UP in outcomes or (_FAILED in outcomes and any(arrival.messages for arrival in every)):
            self._renew()
        self._go_on()

    def _go_on(self) -> None:
        """Allow the use of links; a notice that came during the boundary counts."""
        self._outcome = _FINE
        with self._lock:
            self._state.refusal, self._state.lost, self._state.meeting = None, False, False
            early, self._state.early = self._state.early, []
        for notice in early:
            self._receive_notice(notice)

    def fail_request(self) -> None:
        """Fail the request in progress on this rank: let the others know, use no link before the next boundary.

        Others that wait for this rank learn of it at once, with the error that is being handled.
        """
        if self.world_size > 1 and not self.failed:
            self._fail("this request has failed on this rank; call the pipeline again, on every rank")

    def _receive_notice(self, notice: Notice) -> None:
        """Another rank has failed a request: abort the groups that this rank may wait for. In the watcher's thread."""
        state = self._state
        with self._lock:
            if notice.rank not in state.peers or (notice.request is not None and notice.request < state.number):
                return
            if state.meeting or (notice.request is not None and notice.request > state.number):
                # The other rank has left the boundary earlier.
                state.early.append(notice)
                return
            if state.refusal is not None:
                return
            state.refusal = (
                f"rank {notice.rank} has failed this request ({notice.reason}); call the pipeline again, on every rank"
            )
            # Without messages this rank waits for none; all ranks may have refused the request alike.
            if state.messages or notice.request is None:
                state.lost = True
                self._abort([*self._groups, *self._averaging])

    def when_renewed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a function to be called on all ranks after links were renewed; returns what undoes this.

        For what ranks remember of earlier agreements: after a failure one may remember what another does not.
        """
        self._renewed.append(callback)
        return lambda: self._renewed.remove(callback)

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Fail the request when a call of a transformer raises; returns what undoes this.

        Outside of a request (`request`), the call after a failed one begins with a boundary.
        """
        if self.world_size == 1:
            return lambda: None
        # The number of the request in which a call is in progress.
        running: int | None = None

        def begin(*_: Any) -> None:
            nonlocal running
            # Broken off in a way in which torch's hooks are not called, such as Ctrl-C. A request that is over by now
            # was failed by its opener.
            if running == self._state.number:
                left()
            if self._depth == 0 and self.failed:
                # The previous call may have returned values from an aborted group.
                self._state.report()
                self.begin_request(f"a call of {type(model).__name__}")
            running = self._state.number

        def done(*_: Any) -> None:
            nonlocal running
            running = None

        def left(*_: Any) -> None:
            # Activation checkpointing leaves a call by an exception once it has computed what it needs.
            if running is not None and type(sys.exc_info()[1]).__name__ != "_StopRecomputationError":
                self.fail_request()
            done()

        undo = ExitStack()
        undo.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
        undo.callback(model.register_forward_hook(done).remove)
        # Called last, and when the model has raised.
        undo.callback(model.register_forward_hook(left, always_call=True).remove)
        return undo.close

    def _meet(self, mine: _Arrival) -> list[_Arrival]:
        """Every rank's message at this boundary, in rank order."""
        others = [rank for rank in self._peers if rank != self.rank]
        if not others:
            return [mine]
        packed, rank = mine.packed(), others[0]
        boxes = {rank: torch.empty_like(packed) for rank in others}
        try:
            works = []
            for move, box in ((dist.irecv, boxes), (dist.isend, dict.fromkeys(others, packed))):
                for rank in others:
                    works.append((rank, move(box[rank], rank, group=self._control)))
            for peer, work in works:
                rank = peer
                work.wait()
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            when = " after a request had failed" if self.failed else ""
            what = f"did not come to {mine.purpose} within {self._deadline.total_seconds():g} s"
            what = what if late else "has ended or has given up"
            raise self._break(f"rank {rank} {what}{when}; {_WAY_OUT}") from error
        return [mine if rank == self.rank else _Arrival.unpacked(boxes[rank]) for rank in self._peers]

    def _fail(self, sentence: str) -> PeerError:
        """Fail the request; returns the error to raise."""
        self._outcome, self._state.refusal = max(self._outcome, _FAILED), sentence
        if self._memory is not None:
            self._memory.fail()
        if self._watcher is not None:
            error = sys.exc_info()[1]
            reason = sentence if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
            self._watcher.tell(self._state.number, reason)
        # Over gloo the peers see the closed connection. NCCL communicators are slow to make, and a request without
        # messages may have failed on all ranks alike.
        if self._over_gloo or self._state.messages:
            self._drop()
        return PeerError(sentence)

    def _break(self, sentence: str) -> PeerError:
        """Fail all requests from now on; returns the error to raise."""
        self._broken, error = sentence, self._fail(sentence)
        if self._watcher is not None:
            # The next rank may be the one that does not answer.
            self._watcher.close(seconds=1.0)
        if self._control is not None:
            dist.destroy_process_group(self._control)
            self._control = None
        return error

    def _drop(self) -> None:
        """Abandon process groups with pending messages."""
        self._outcome = _GIVEN_UP
        self._destroy(self._groups)

    def _renew(self) -> None:
        if len(self._peers) < self.world_size:
            raise self._break(f"a request has failed, and its links are also those of other data ranks; {_WAY_OUT}")
        self._drop()
        if self._memory is not None:
            self._memory.close()
        try:
            self._connect()
        except RuntimeError as error:
            raise self._break(f"the links could not be renewed after a request had failed; {_WAY_OUT}") from error
        self._go_on()
        try:
            for callback in list(self._renewed):
                callback()
        except BaseException:
            self.fail_request()
            raise

    def abandon(self) -> None:
        """Break the mesh on this rank alone, for a job that has failed on it: no collective call.

        Others that wait for this rank learn of it at once over the CPU, else at the deadline; also those that wait in
        `gradient_group`. What is undone later needs no other rank.
        """
        if self.world_size > 1:
            self._break(_GIVEN_UP_HERE)
            self._drop()
            self._destroy(self._averaging)

    def close(self) -> None:
        """Free process groups and shared memory. A collective call; the default process group stays.

        In a fork of the process that made the mesh nothing is freed: all of it is the other's.
        """
        if os.getpid() != self._process:
            return
        self._broken = self._broken or _CLOSED
        self._state.refusal = self._broken
        if self._watcher is not None:
            self._watcher.close()
        # gloo's threads end with the last reference to a group, which a link would hold until it is collected.
        for link in self._links.values():
            link.drop()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        for groups in (self._groups, self._averaging):
            while groups:
                dist.destroy_process_group(groups.pop())
        if self._control is not None:
            # A data group of this mesh may have given it up.
            with suppress(ValueError):
                dist.destroy_process_group(self._control)
            self._control = None

    def __repr__(self) -> str:
        return f"Mesh({self.config.describe()}, rank {self.rank} of {self.world_size}, {self.device})"

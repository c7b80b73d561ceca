"""The ways of tensors between the ranks of one mesh axis: a process group, shared memory, a graph that is compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from .backends import CARRIED, backend_of, carries_none
from .shared import SharedChannel
from .state import Header, PeerError, RequestState, Traffic, raise_for_peer

# Tensors, and the ranks of the link that all of them go to.
Outgoing = Sequence[tuple[Sequence[Tensor], Sequence[int]]]
# Tensors of the shapes and dtypes of what comes, which may take it, and the rank it comes from.
Incoming = Sequence[tuple[Sequence[Tensor], int]]
Way = Literal["graph", "memory", "tags", "packed"]

# Backends that tell messages of one group apart by their tags.
TAGGED = ("gloo",)


class Transfer:
    """A transfer of tensors from other ranks.

    Holds the buffers of received and sent tensors, and the process group's handles, until `wait`: gloo hangs when a
    send's handle is dropped, and a buffer must outlive its transfer. ``messages`` are functions that wait for more
    tensors, which come after ``received``; ``link`` is the link's name, for error messages; ``state`` counts waiting.
    """

    def __init__(
        self,
        received: Sequence[Tensor] = (),
        sent: Sequence[Tensor] = (),
        works: Sequence[dist.Work] = (),
        messages: Sequence[Callable[[timedelta | None], list[Tensor]]] = (),
        link: str = "",
        state: RequestState | None = None,
    ) -> None:
        self._state = state or RequestState()
        self._received, self._sent = list(received), list(sent)
        self._works, self._messages = list(works), list(messages)
        self._link = link
        self._cancelled = False

    def cancel(self) -> None:
        """Drop the handles and buffers, and raise in every later wait for the transfer."""
        self._cancelled = True
        for kept in (self._works, self._received, self._sent, self._messages):
            kept.clear()

    def wait(self, timeout: timedelta | None = None) -> list[Tensor]:
        """Block until the tensors are here (on CUDA: until the current stream may use them), and return them.

        ``timeout``: how long to wait for each; default: the group's deadline.

        `PeerError`: a rank has failed or has not done its part, or the transfer's request is over.
        """
        if self._cancelled:
            raise PeerError(f"the request of this transfer over the {self._link} link is over; call the model again")
        limit = () if timeout is None else (timeout,)
        while self._works:
            try:
                with self._state.waiting():
                    self._works.pop(0).wait(*limit)
            except RuntimeError as error:
                raise_for_peer(self._link, error, self._state)
        self._sent.clear()
        while self._messages:
            self._received += self._messages.pop(0)(timeout)
        return self._received


class Transports:
    """The process group and shared memory of a link, and the messages that travel over them.

    Attributes: see `Link`.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, traffic: Traffic, state: RequestState | None = None
    ) -> None:
        self.name, self.traffic = name, traffic
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self._group: dist.ProcessGroup | None = None
        # What carries the group's tensors.
        self._backend = ""
        self._channel: SharedChannel | None = None
        self._state = RequestState() if state is None else state
        # Transfers over the process group that may be under way.
        self._transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._others = [peer for peer in range(self.size) if peer != rank]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the link's ranks; None for a link of one rank. After a failure it raises `PeerError`."""
        if self._group is None:
            self._state.check()
        return self._group

    @property
    def transport(self) -> str:
        """The transport of tensors: ``"shared memory"``, or the group's backend, such as ``"gloo"``."""
        self._state.check()
        return self._backend if self._channel is None else "shared memory"

    def drop(self) -> None:
        """Drop every transfer, the process group and the shared memory; no tensor can be sent until `connect`."""
        for transfer in list(self._transfers):
            transfer.cancel()
        self._group = self._channel = None

    def connect(
        self,
        group: dist.ProcessGroup | None,
        shared: SharedChannel | None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Use a process group and, where given, shared memory.

        `ConfigError`: the group carries no tensors of this device.

        Args:
            group: of all ranks of the link.
            shared: where all of them are on this rank's host.
            device: of the tensors that travel.
        """
        backend = "" if group is None else backend_of(group, device)
        if group is not None and not backend:
            raise ConfigError(carries_none(torch.device(device).type))
        self._group, self._channel, self._backend = group, shared, backend

    def connect_peers(self, device: torch.device, timeout: timedelta, singly: Sequence[tuple[int, int]] = ()) -> None:
        """Send a byte between all pairs of ranks, and wait for it, so that they are connected. A collective call.

        gloo's are from the start. NCCL connects two ranks at their first message, and both hosts wait for it: one that
        posts a message early would wait for a rank that waits for its work. Where there is no connection, this is the
        first to fail.

        Args:
            device: of the tensors that will travel.
            timeout: how long to wait for each rank.
            singly: ranks of the group that will send and receive single messages, in the same order on all ranks:
                without a device of the default group such pairs have communicators of their own.
        """
        if self.size == 1 or self._way != "packed":
            return
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        boxes = [([torch.empty_like(byte)], peer) for peer in self._others]
        self._over_group("send", [([byte], self._others)], boxes).wait(timeout)
        for sender, receiver in singly:
            outgoing: Outgoing = [([byte], [receiver])] if self.rank == sender else []
            incoming: Incoming = [([torch.empty_like(byte)], sender)] if self.rank == receiver else []
            self._over_group("send", outgoing, incoming).wait(timeout)

    @property
    def _way(self) -> Way:
        """The way of the link's tensors at this moment.

        ``"graph"``: collectives of the process group, which the compiler of the graph in progress knows; ``"memory"``:
        shared by all ranks of the link; ``"tags"``: messages one by one over a process group that tells them apart;
        ``"packed"``: over a process group in which all that a rank sends in a collective is one buffer, as on NCCL.
        """
        if torch.compiler.is_compiling():
            return "graph"
        self._state.check()
        if self._channel is not None:
            return "memory"
        return "tags" if self._backend in TAGGED else "packed"

    @property
    def packs(self) -> bool:
        """True if all that a rank sends in a collective is one buffer, as on NCCL; else messages go one by one."""
        return self._group is not None and self._channel is None and self._way == "packed"

    def _enter(self, kind: str) -> None:
        """Begin an operation; no part of a compiled graph."""
        if torch.compiler.is_compiling():
            return
        self._state.enter()
        if self.traffic.observer is not None:
            self.traffic.observer(self.name, kind)

    def _together(self, collective: Callable[..., Any], *tensors: Any) -> Any:
        """Run a collective of the process group."""
        if torch.compiler.is_compiling():
            return collective(*tensors, group=self.group)
        try:
            with self._state.waiting():
                return collective(*tensors, group=self.group)
        except RuntimeError as error:
            raise_for_peer(self.name, error, self._state)

    def _start(self, kind: str, outgoing: Outgoing, incoming: Incoming) -> Transfer:
        """Start messages between pairs of ranks, not counted.

        ``outgoing`` are tensors and the ranks of the group that all of them go to; ``incoming`` are tensors of the
        shapes and dtypes of what comes, which may take it, and the rank it comes from.
        """
        if self._way != "memory":
            return self._over_group(kind, outgoing, incoming)
        shared = self._channel
        assert shared is not None
        for tensors, to in outgoing:
            shared.send(kind, tensors, to)
        messages = [shared.expect(kind, [(tuple(t.shape), t.dtype) for t in like], peer) for like, peer in incoming]
        return Transfer(messages=messages, link=self.name)

    def _over_group(self, kind: str, outgoing: Outgoing, incoming: Incoming) -> Transfer:
        sent = [([tensor.contiguous() for tensor in tensors], to) for tensors, to in outgoing]
        operations = self._operations(kind, sent, incoming)
        try:
            if operations and outgoing and incoming:
                # One batch: NCCL needs the sends and receives of a ring in one group call, or it can deadlock.
                works = dist.batch_isend_irecv(operations)
            else:
                # No batch: one may need all ranks of the group, and here two of them have to do with one another.
                works = [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]
        except RuntimeError as error:
            raise_for_peer(self.name, error, self._state)
        received = [t for tensors, _ in incoming for t in tensors]
        return self._under_way(received, [t for tensors, _ in sent for t in tensors], works)

    def _operations(self, kind: str, outgoing: Outgoing, incoming: Incoming) -> list[dist.P2POp]:
        """Messages over the process group, which are begun in this order."""
        # Empty tensors are not sent: both sides know the shapes, and not every backend carries zero bytes.
        moves = [(dist.irecv, t, peer) for tensors, peer in incoming for t in tensors if t.numel()]
        moves += [(dist.isend, t, peer) for tensors, to in outgoing for peer in to for t in tensors if t.numel()]
        group, tagged, operations = self.group, bool(moves) and self._way == "tags", []
        for move, t, peer in moves:
            assert t.dtype in CARRIED, f"NCCL does not carry {t.dtype}"
            tag = Header.of(self._state.number, kind, [(tuple(t.shape), t.dtype)]).tag if tagged else 0
            operations.append(dist.P2POp(move, t, self.ranks[peer], group, tag))
        return operations

    def _posted(self, given: Tensor, receive: Tensor, collective: Callable[..., Any], *more: Any) -> Transfer:
        """Start a collective of the process group that takes one buffer, and fills another."""
        assert given.dtype in CARRIED, f"NCCL does not carry {given.dtype}"
        try:
            work = collective(receive, given, *more, group=self.group, async_op=True)
        except RuntimeError as error:
            raise_for_peer(self.name, error, self._state)
        return self._under_way([receive], [given], [work])

    def _under_way(
        self, received: Sequence[Tensor], sent: Sequence[Tensor], works: Sequence[dist.Work | None]
    ) -> Transfer:
        """A transfer over the process group, which `drop` cancels."""
        begun = [work for work in works if work is not None]
        transfer = Transfer(received, sent, begun, link=self.name, state=self._state)
        self._transfers.add(transfer)
        return transfer

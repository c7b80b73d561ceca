"""Collectives and transfers between the ranks of one mesh axis: all_to_all, all_gather, all_reduce, shift, send."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial, reduce
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from .backends import CARRIED, backend_of, carries_none
from .hosts import Relay, relay_of
from .objects import broadcast_object, gather_objects
from .shared import SharedChannel
from .state import DesyncError, Header, PeerError, RequestState, Spec, Traffic, raise_for_peer

# For every rank of a link, tensors; for every rank, shapes.
TensorsByRank = Sequence[Sequence[Tensor]]
ShapesByRank = Sequence[Sequence[tuple[int, ...]]]
# Tensors, and the ranks of the link that all of them go to.
Outgoing = Sequence[tuple[Sequence[Tensor], Sequence[int]]]
# Tensors of the shapes and dtypes of what comes, which may take it, and the rank it comes from.
Incoming = Sequence[tuple[Sequence[Tensor], int]]
Watched = AbstractContextManager[object]

# Pieces of unlike sizes are filled up to the longest as long as so many times of their elements travel: in one
# all-gather, of which every rank sends its piece once.
_FILLED = 1.5
# Its name in this torch.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
# Messages are not observed.
_UNSEEN: Watched = nullcontext()


class Cancellable(Protocol):
    """Something that holds a transfer, or is going to."""

    def cancel(self) -> None:
        """Drop it, and raise `request_over` in every later wait for it."""


def request_over(link: str) -> PeerError:
    """The error of who waits for a transfer over a link after the end of its request."""
    return PeerError(f"the request of this transfer over the {link} link is over; call the model again")


class Transfer:
    """A transfer of tensors from other ranks.

    Holds the buffers of received and sent tensors, and the process group's handles, until `wait`: gloo hangs when a
    send's handle is dropped, and a buffer must outlive its transfer. ``messages`` are functions that wait for more
    tensors, which come after ``received``; ``link`` is the link's name, for error messages; ``state`` counts waiting;
    ``watched`` is entered while `wait` waits.
    """

    def __init__(
        self,
        received: Sequence[Tensor] = (),
        sent: Sequence[Tensor] = (),
        works: Sequence[dist.Work] = (),
        messages: Sequence[Callable[[timedelta | None], list[Tensor]]] = (),
        link: str = "",
        state: RequestState | None = None,
        watched: Watched = _UNSEEN,
    ) -> None:
        self._state, self._watched = state or RequestState(), watched
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

        Args:
            timeout: how long to wait for each; default: the group's deadline.

        Raises:
            PeerError: a rank has failed or has not done its part, or the transfer's request is over.
        """
        if self._cancelled:
            raise request_over(self._link)
        limit = () if timeout is None else (timeout,)
        with self._watched:
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


class Link:
    """The ranks this rank shares one mesh axis with.

    Tensors travel through shared memory where the ranks have some, else over the process group; see `connect`.

    Attributes:
        name: the axis, under which bytes are counted.
        ranks: global ranks of the group, in axis order.
        rank, size: this rank's place in the group, and the group's size. A group of one never communicates.
        traffic: what counts the bytes sent.
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
        # Transfers over the process group that may be under way, and those that others hold.
        self._transfers: weakref.WeakSet[Cancellable] = weakref.WeakSet()
        self._others = [peer for peer in range(self.size) if peer != rank]
        # Peers on other hosts.
        self._far: frozenset[int] = frozenset()
        # How gathers go there, where some host has several ranks of the link.
        self._relay: Relay | None = None

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
        return self._backend if self._channel is None or self._far else "shared memory"

    @property
    def _shared(self) -> SharedChannel | None:
        """The shared memory of all ranks of the link, if there is one and no graph is compiled."""
        # A compiled graph holds collectives of the process group, which the compiler knows.
        return None if self._far or torch.compiler.is_compiling() else self._channel

    def hold(self, transfer: Cancellable) -> None:
        """Cancel a transfer in `drop`, too; it is not kept alive."""
        self._transfers.add(transfer)

    def drop(self) -> None:
        """Drop every transfer, the process group and the shared memory; no tensor can be sent until `connect`."""
        for transfer in list(self._transfers):
            transfer.cancel()
        self._group = self._channel = None

    def connect(
        self,
        group: dist.ProcessGroup | None,
        shared: SharedChannel | None,
        hosts: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Use a process group and, where given, shared memory.

        Args:
            group: of all ranks of the link.
            shared: between those of this rank's host.
            hosts: for every rank of the link the number of its host; default: all have one.
            device: of the tensors that travel.

        Raises:
            ConfigError: the group carries no tensors of this device.
        """
        backend = "" if group is None else backend_of(group, device)
        if group is not None and not backend:
            raise ConfigError(carries_none(torch.device(device).type))
        self._group, self._channel, self._backend = group, shared, backend
        self._far = frozenset(peer for peer, host in enumerate(hosts) if host != hosts[self.rank])
        self._relay = relay_of(hosts, self.rank)

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
        if self.size == 1 or self._matches:
            return
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        boxes = [([torch.empty_like(byte)], peer) for peer in self._others]
        self._over_group("send", [([byte], self._others)], boxes).wait(timeout)
        for sender, receiver in singly:
            outgoing: Outgoing = [([byte], [receiver])] if self.rank == sender else []
            incoming: Incoming = [([torch.empty_like(byte)], sender)] if self.rank == receiver else []
            self._over_group("send", outgoing, incoming).wait(timeout)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order: anything that can be pickled. Not counted."""
        every: list[Any] = [value] * self.size
        if self.size > 1:
            self._enter("all_gather_object")
            every = self._together(gather_objects, value)
        return every

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """One rank's value, on every rank: anything that can be pickled. Not counted."""
        if self.size > 1:
            self._enter("broadcast_object")
            value = self._together(broadcast_object, value, self.ranks[source])
        return value

    def _count_to(self, peer: int, sent: int) -> None:
        self.traffic.add(self.name, sent, sent if peer in self._far else 0)

    def _enter(self, kind: str) -> None:
        """Begin an operation; no part of a compiled graph."""
        if torch.compiler.is_compiling():
            return
        self._state.enter()
        if self.traffic.observer is not None:
            self.traffic.observer(self.name, kind)

    def _watch(self, kind: str, sent: int) -> Watched:
        """Report a posted message; enter the result while waiting for it. Not part of a compiled graph."""
        if torch.compiler.is_compiling() or self.traffic.watcher is None:
            return _UNSEEN
        return self.traffic.watcher.post(self.name, kind, sent)

    def _together(self, collective: Callable[..., Any], *tensors: Any) -> Any:
        """Run a collective of the process group."""
        if torch.compiler.is_compiling():
            return collective(*tensors, group=self.group)
        try:
            with self._state.waiting():
                return collective(*tensors, group=self.group)
        except RuntimeError as error:
            raise_for_peer(self.name, error, self._state)

    @property
    def _matches(self) -> bool:
        """True if the process group tells messages apart by their tags."""
        if torch.compiler.is_compiling():
            return False
        self._state.check()
        return self._backend == "gloo"

    @property
    def packs(self) -> bool:
        """True if all that a rank sends in a collective is one buffer, as on NCCL; else messages go one by one."""
        return self._through_group and not torch.compiler.is_compiling() and not self._matches

    @property
    def bundles(self) -> bool:
        """True if one message is cheaper than several, as over a process group; see `Bundles`."""
        self._state.check()
        return self._through_group and not torch.compiler.is_compiling()

    @property
    def _through_group(self) -> bool:
        """True if tensors travel over the process group, to some of the ranks at least."""
        return self._group is not None and (self._channel is None or bool(self._far))

    def all_to_all_packed(
        self, packed: Tensor, outgoing: Sequence[int], incoming: Sequence[int]
    ) -> Callable[[], Tensor]:
        """All-to-all of one buffer, where the link `packs`; returns at once: a function that waits for the result.

        One kernel packs it, however many ranks there are; so does the part that a rank sends to itself.

        Args:
            packed: contiguous and 1-D: the elements for every rank, in rank order. Not written to before the wait.
            outgoing: how many of its elements go to every rank of the group.
            incoming: how many come from each.

        Returns:
            The elements of all ranks, in rank order.
        """
        self._enter("all_to_all")
        bytes_to = [count * packed.element_size() for count in outgoing]
        sent = sum(bytes_to[peer] for peer in self._others)
        self.traffic.add(self.name, sent, sum(bytes_to[peer] for peer in self._far))
        receive = packed.new_empty(sum(incoming))
        transfer = self._posted("all_to_all", sent, packed, receive, dist.all_to_all_single, [*incoming], [*outgoing])
        return lambda: transfer.wait()[0]

    def _posted(
        self, kind: str, sent: int, given: Tensor, receive: Tensor, collective: Callable[..., Any], *more: Any
    ) -> Transfer:
        """Start a collective of the process group that takes one buffer, and fills another."""
        assert given.dtype in CARRIED, f"NCCL does not carry {given.dtype}"
        watched = self._watch(kind, sent)
        try:
            work = collective(receive, given, *more, group=self.group, async_op=True)
        except RuntimeError as error:
            raise_for_peer(self.name, error, self._state)
        return self._under_way([receive], [given], [work], watched)

    def all_to_all(self, outgoing: TensorsByRank, shapes: ShapesByRank) -> list[list[Tensor]]:
        """All-to-all with tensors of their own shapes for every pair of ranks.

        Args:
            outgoing: for every rank of the group the tensors it is to have, any strides; all of one dtype.
            shapes: shapes of the tensors that every rank sends here.

        Returns:
            The tensors from every rank, contiguous; in this rank's own place its own tensors, untouched.
        """
        return self._exchange("all_to_all", outgoing, shapes)()

    def all_to_all_async(self, outgoing: TensorsByRank, shapes: ShapesByRank) -> Callable[[], list[list[Tensor]]]:
        """`all_to_all` that returns at once: a function that waits for the others'. Call it once.

        The outgoing tensors may be written to at once.
        """
        return self._exchange("all_to_all", outgoing, shapes)

    def _exchange(self, kind: str, outgoing: TensorsByRank, shapes: ShapesByRank) -> Callable[[], list[list[Tensor]]]:
        if self.size == 1:
            return lambda: [list(outgoing[0])]
        if not any(outgoing) and not any(shapes):
            return lambda: [[] for _ in outgoing]
        self._enter(kind)
        return self._all_to_all(kind, outgoing, shapes)

    def _all_to_all(self, kind: str, outgoing: TensorsByRank, shapes: ShapesByRank) -> Callable[[], list[list[Tensor]]]:
        if (shared := self._shared) is not None:
            return self._exchange_shared(shared, kind, outgoing, shapes)
        return self._exchange_packed(kind, outgoing, shapes)

    def _exchange_shared(
        self, shared: SharedChannel, kind: str, outgoing: TensorsByRank, shapes: ShapesByRank
    ) -> Callable[[], list[list[Tensor]]]:
        me, others, mine = self.rank, self._others, list(outgoing[self.rank])
        dtype = mine[0].dtype
        sent = sum(t.nbytes for peer in others for t in outgoing[peer])
        self.traffic.add(self.name, sent)
        watched = self._watch(kind, sent)
        if kind == "all_gather":
            # One message for all.
            shared.send(kind, mine, others)
        else:
            for peer in others:
                shared.send(kind, outgoing[peer], [peer])
        receive = {
            peer: shared.expect(kind, [(tuple(shape), dtype) for shape in shapes[peer]], peer) for peer in others
        }

        def wait() -> list[list[Tensor]]:
            with watched:
                return [mine if peer == me else receive[peer](None) for peer in range(self.size)]

        return wait

    def _exchange_packed(
        self, kind: str, outgoing: TensorsByRank, shapes: ShapesByRank
    ) -> Callable[[], list[list[Tensor]]]:
        """Over the process group, one message per peer: the tensors for it lie one after the other."""
        me, others, mine = self.rank, self._others, list(outgoing[self.rank])
        assert mine[0].dtype in CARRIED, f"NCCL does not carry {mine[0].dtype}"
        in_splits = [0 if peer == me else sum(t.numel() for t in parts) for peer, parts in enumerate(outgoing)]
        out_splits = [0 if peer == me else sum(map(prod, wanted)) for peer, wanted in enumerate(shapes)]
        send = mine[0].new_empty(sum(in_splits))
        parts = [part for peer in others for part in outgoing[peer]]
        for place, part in zip(_views(send, [part.shape for part in parts]), parts, strict=True):
            place.copy_(part)
        receive = send.new_empty(sum(out_splits))
        across = sum(in_splits[peer] for peer in self._far)
        self.traffic.add(self.name, send.nbytes, across * send.element_size())
        transfer = None
        if self._matches:
            # gloo takes a short message for a long one, and ends the process over the opposite: tags tell them apart.
            chunks, places = send.split(in_splits), receive.split(out_splits)
            transfer = self._start(kind, [([chunks[p]], [p]) for p in others], [([places[p]], p) for p in others])
        elif torch.compiler.is_compiling():
            dist.all_to_all_single(receive, send, out_splits, in_splits, group=self.group)
        else:
            transfer = self._posted(kind, send.nbytes, send, receive, dist.all_to_all_single, out_splits, in_splits)

        def wait() -> list[list[Tensor]]:
            if transfer is not None:
                transfer.wait()
            return [
                mine if peer == me else _views(chunk, shapes[peer])
                for peer, chunk in enumerate(receive.split(out_splits))
            ]

        return wait

    def all_gather(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """Every rank's piece, in rank order, along ``dim``; on every rank.

        Args:
            lengths: sizes along ``dim`` of every rank's piece, which may differ.
            dim: dimension that was cut (not negative).
        """
        if self.size == 1:
            return piece
        shapes = [[(*piece.shape[:dim], length, *piece.shape[dim + 1 :])] for length in lengths]
        if self.packs and len(set(lengths)) == 1 and prod(piece.shape[:dim]) == 1 and piece.numel():
            # The received pieces lie one after the other.
            whole = self._gather_packed([piece], [piece.numel()] * self.size)
            return whole.view(*piece.shape[:dim], sum(lengths), *piece.shape[dim + 1 :])
        return torch.cat([part for (part,) in self._gather([piece], shapes)], dim=dim)

    def all_gather_list(self, tensors: Sequence[Tensor], shapes: ShapesByRank) -> list[list[Tensor]]:
        """Every rank's tensors, on every rank; the received ones are this rank's alone, to be written to.

        Args:
            tensors: this rank's, any strides; all of one dtype.
            shapes: shapes of every rank's tensors.
        """
        parts = self._gather(tensors, shapes)
        near = self._others if self._relay is None else self._relay.near
        if self._channel is None or len(near) < 2:
            return parts
        # The other receivers of a message read the same memory.
        return [part if peer == self.rank else [tensor.clone() for tensor in part] for peer, part in enumerate(parts)]

    def _gather(self, tensors: Sequence[Tensor], shapes: ShapesByRank) -> list[list[Tensor]]:
        sizes = [sum(map(prod, of)) for of in shapes] if self.packs else []
        if any(sizes) and self.size * max(sizes) <= _FILLED * sum(sizes):
            parts = self._gather_packed(tensors, sizes).view(self.size, -1)
            return [
                list(tensors) if peer == self.rank else _views(part[:size], of)
                for peer, (part, size, of) in enumerate(zip(parts, sizes, shapes, strict=True))
            ]
        if self._relay is None or not any(shapes) or torch.compiler.is_compiling():
            return self._exchange("all_gather", [tensors] * self.size, shapes)()
        self._enter("all_gather")
        incoming = [[tensors[0].new_empty(shape) for shape in of] for of in shapes]
        received = iter(self._gather_by_hosts(self._relay, "all_gather", tensors, incoming).wait())
        return [list(tensors) if peer == self.rank else [next(received) for _ in of] for peer, of in enumerate(shapes)]

    def _gather_packed(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """All-gather of one buffer of every rank over the process group, sent once; shorter ones are filled up.

        NCCL goes between hosts as it likes; bytes are counted as if a tensor went to each of them once.

        Args:
            sizes: elements of every rank's tensors.
        """
        self._enter("all_gather")
        mine, longest = tensors[0], max(sizes)
        if len(tensors) == 1 and mine.is_contiguous() and mine.numel() == longest:
            packed = mine.view(-1)
        else:
            packed = mine.new_empty(longest)
            used = packed[: sizes[self.rank]]
            for place, tensor in zip(_views(used, [tensor.shape for tensor in tensors]), tensors, strict=True):
                place.copy_(tensor)
        own = sizes[self.rank] * packed.element_size()
        hosts = len(self._far if self._relay is None else self._relay.to)
        self.traffic.add(self.name, len(self._others) * own, hosts * own)
        receive = packed.new_empty(self.size * longest)
        sent = len(self._others) * packed.nbytes
        return self._posted("all_gather", sent, packed, receive, getattr(dist, _ALL_GATHER)).wait()[0]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same bits on every rank.

        Counted as what a ring all-reduce sends from each rank, whatever the backend does: 2 (n - 1) / n of the
        tensor, rounded down to a byte.

        Args:
            tensor: of one shape and dtype on every rank; overwritten with the sum when it is contiguous.
        """
        if self.size == 1:
            return tensor
        self._enter("all_reduce")
        tensor = tensor.contiguous()
        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        if self._shared is None:
            with self._watch("all_reduce", sent):
                self._together(dist.all_reduce, tensor)
        else:
            self._sum(tensor.view(-1))
        self._count_to((self.rank + 1) % self.size, sent)
        return tensor

    def all_reduce_async(self, tensor: Tensor) -> Callable[[timedelta | None], Tensor]:
        """The sum of all ranks' tensors, the same bits on every rank; returns at once. For small ones: all send to all.

        Args:
            tensor: of one shape and dtype on every rank; not to be written to any more.

        Returns:
            Waits for the other ranks', as `Transfer.wait` does, and returns the sum. Call it once, in order of posting.
        """
        # Never passed on inside of a host: stages of a pipeline come to wait for it at other times.
        transfer = self._gather_from_all([tensor], [[torch.empty_like(tensor)] for _ in range(self.size)])
        return lambda timeout: self._added_up(transfer.wait(timeout), tensor)

    def _added_up(self, received: Sequence[Tensor], own: Tensor) -> Tensor:
        """The sum of the other ranks' tensors, one each, and this rank's own: in rank order."""
        return reduce(torch.add, [*received[: self.rank], own, *received[self.rank :]])

    def _sum(self, flat: Tensor) -> None:
        """All-reduce as a reduce-scatter, of which every rank adds up its part, and an all-gather."""
        kind, others, parts = "all_reduce", self._others, flat.tensor_split(self.size)
        mine = parts[self.rank]
        scattered = self._start(kind, [([parts[p]], [p]) for p in others], [([mine], p) for p in others])
        mine.copy_(self._added_up(scattered.wait(), mine))
        gathered = self._start(kind, [([mine], others)], [([parts[p]], p) for p in others])
        for peer, part in zip(others, gathered.wait(), strict=True):
            parts[peer].copy_(part)

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Transfer:
        """Send ``tensors`` to the next rank of the ring, receive as many from the previous one; returns at once.

        Args:
            tensors: any strides; they must not be written to before `Transfer.wait` returns.
            shapes: shapes of what the previous rank sends, in the same order; dtypes are those of ``tensors``.
        """
        self._enter("shift")
        received = [t.new_empty(shape) for t, shape in zip(tensors, shapes, strict=True)]
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self._count_to(following, sum(t.nbytes for t in tensors))
        return self._start("shift", [(tensors, [following])], [(received, previous)])

    def send(self, tensors: Sequence[Tensor], to: int) -> Transfer:
        """Send tensors to one rank of the group; returns at once.

        Args:
            tensors: any strides, not to be written to before `Transfer.wait` returns. Empty ones are not sent.
            to: rank in the group. It calls `receive` with the same shapes, in the same order.
        """
        self._enter("send")
        self._count_to(to, sum(t.nbytes for t in tensors))
        return self._start("send", [(tensors, [to])], [])

    def receive(self, tensors: Sequence[Tensor], source: int) -> Transfer:
        """Receive tensors from a rank of the group; returns at once.

        Args:
            tensors: of the message's shapes and dtypes, which may be filled: use the result of `Transfer.wait`.
            source: rank in the group.
        """
        self._enter("receive")
        return self._start("send", [], [(tensors, source)])

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """One rank's tensor on every rank of the group. Counted on the ranks that send it, once per receiver.

        Over gloo it goes to one rank of every other host, which hands it to the others there; NCCL does as it likes,
        and is counted on the rank that has the tensor, as if it did the same.

        Args:
            tensor: contiguous; on other ranks it is overwritten.
            source: rank in the group that has the values.
        """
        if self.size == 1:
            return tensor
        self._enter("broadcast")
        if self._relay is not None and self._matches:
            self._broadcast_by_hosts(self._relay, tensor, source)
            return tensor
        if self._shared is None:
            with self._watch("broadcast", (self.size - 1) * tensor.nbytes if self.rank == source else 0):
                self._together(dist.broadcast, tensor, self.ranks[source])
        elif self.rank == source:
            self._start("broadcast", [([tensor], self._others)], [])
        else:
            # Copied: all receivers read the same memory.
            tensor.copy_(self._start("broadcast", [], [([tensor], source)]).wait()[0])
        if self.rank == source:
            hosts = len(self._far if self._relay is None else self._relay.to)
            self.traffic.add(self.name, (self.size - 1) * tensor.nbytes, hosts * tensor.nbytes)
        return tensor

    def _broadcast_by_hosts(self, relay: Relay, tensor: Tensor, source: int) -> None:
        """`broadcast` that sends a tensor to one rank of every other host, which passes it on inside of it."""
        kind, taker = "broadcast", relay.takers.get(source, source)
        far = relay.to if self.rank == source else ()
        near = relay.near if self.rank == taker else ()
        sent = (len(far) + len(near)) * tensor.nbytes
        if sent:
            self.traffic.add(self.name, sent, len(far) * tensor.nbytes)
        inside = partial(self._through_memory, self._channel) if self._channel else self._over_group
        with self._watch(kind, sent):
            if self.rank == taker != source:
                self._over_group(kind, [], [([tensor], source)]).wait()
            posted = [self._over_group(kind, [([tensor], far)], [])]
            if self.rank == taker:
                posted.append(inside(kind, [([tensor], near)], []))
            else:
                # Copied: all receivers read the same memory.
                got = _passed_on(inside(kind, [], [([tensor], taker)]).wait, [self.ranks[source]], None)
                tensor.copy_(got[0])
            for transfer in posted:
                transfer.wait()

    def all_gather_async(self, outgoing: Sequence[Tensor], incoming: TensorsByRank) -> Transfer:
        """Send the same tensors to every other rank, receive theirs, rank by rank; returns at once.

        To a host with several ranks of the link they travel once. One rank there takes them, and passes them on inside
        of its host when it waits itself: what goes between hosts travels beside whatever is computed meanwhile, the
        copies inside of a host do not. So the ranks of a host have to wait for their transfers in the same order.

        Args:
            outgoing: any strides; they must not be written to before `Transfer.wait` returns.
            incoming: for every rank of the group contiguous tensors of the shapes and dtypes that it sends, which may
                take them; this rank's own entry is not used. What `Transfer.wait` returns is only to be read: others
                may read the same memory.
        """
        if self._relay is None or torch.compiler.is_compiling():
            return self._gather_from_all(outgoing, incoming)
        self._enter("all_gather_async")
        return self._gather_by_hosts(self._relay, "all_gather_async", outgoing, incoming)

    def _gather_from_all(self, outgoing: Sequence[Tensor], incoming: TensorsByRank) -> Transfer:
        kind, others = "all_gather_async", self._others
        self._enter(kind)
        sent = sum(t.nbytes for t in outgoing)
        self.traffic.add(self.name, len(others) * sent, len(self._far) * sent)
        return self._start(kind, [(outgoing, others)], [(incoming[peer], peer) for peer in others])

    def _gather_by_hosts(
        self, relay: Relay, kind: str, outgoing: Sequence[Tensor], incoming: TensorsByRank
    ) -> Transfer:
        """Start an all-gather that sends tensors to one rank of every other host, which passes them on inside of it."""
        me, near, shared = self.rank, relay.near, self._channel
        # For every rank of this host the ranks on others that send it tensors, and the tensors.
        taken = {peer: [far for far, taker in relay.takers.items() if taker == peer] for peer in (me, *near)}
        passed = {peer: [tensor for far in of for tensor in incoming[far]] for peer, of in taken.items()}
        own, relayed = sum(t.nbytes for t in outgoing), sum(t.nbytes for t in passed[me])
        sent = own * (len(relay.to) + len(near)) + relayed * len(near)
        self.traffic.add(self.name, sent, own * len(relay.to))
        watched = self._watch(kind, sent)
        if shared is None:
            first = self._over_group(
                kind, [(outgoing, (*relay.to, *near))], [(incoming[peer], peer) for peer in (*taken[me], *near)]
            )

            def arrive(timeout: timedelta | None) -> list[Tensor]:
                first.wait(timeout)
                onward = [(passed[me], near)], [(passed[peer], peer) for peer in near]
                self._over_group(kind, *onward).wait(timeout)
                return [tensor for peer in self._others for tensor in incoming[peer]]

            return Transfer(messages=[arrive], link=self.name, watched=watched)
        across = self._over_group(kind, [(outgoing, relay.to)], [(incoming[peer], peer) for peer in taken[me]])
        shared.send(kind, outgoing, near)
        theirs = {peer: shared.expect(kind, _specs(incoming[peer]), peer) for peer in near}
        # Its place among the messages is that of the posting, whichever transfer is waited for first.
        give = shared.promise(kind, _specs(passed[me]), near)
        takes = {peer: shared.expect(kind, _specs(passed[peer]), peer) for peer in near}

        def arrive_through_memory(timeout: timedelta | None) -> list[Tensor]:
            across.wait(timeout)
            give(passed[me])
            parts = {peer: take(timeout) for peer, take in theirs.items()}
            parts |= {peer: list(incoming[peer]) for peer in taken[me]}
            for taker, take in takes.items():
                got = iter(_passed_on(take, [self.ranks[peer] for peer in taken[taker]], timeout))
                parts |= {peer: [next(got) for _ in incoming[peer]] for peer in taken[taker]}
            return [tensor for peer in self._others for tensor in parts[peer]]

        return Transfer(messages=[arrive_through_memory], link=self.name, watched=watched)

    def _start(self, kind: str, outgoing: Outgoing, incoming: Incoming) -> Transfer:
        """Start messages between pairs of ranks, not counted.

        ``outgoing`` are tensors and the ranks of the group that all of them go to; ``incoming`` are tensors of the
        shapes and dtypes of what comes, which may take it, and the rank it comes from.
        """
        watched = self._watch(kind, sum(t.nbytes for tensors, to in outgoing for t in tensors for _ in to))
        if (shared := self._shared) is not None:
            return self._through_memory(shared, kind, outgoing, incoming, watched)
        return self._over_group(kind, outgoing, incoming, watched)

    def _through_memory(
        self, shared: SharedChannel, kind: str, outgoing: Outgoing, incoming: Incoming, watched: Watched = _UNSEEN
    ) -> Transfer:
        for tensors, to in outgoing:
            shared.send(kind, tensors, to)
        messages = [shared.expect(kind, _specs(like), peer) for like, peer in incoming]
        return Transfer(messages=messages, link=self.name, watched=watched)

    def _over_group(self, kind: str, outgoing: Outgoing, incoming: Incoming, watched: Watched = _UNSEEN) -> Transfer:
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
        return self._under_way(received, [t for tensors, _ in sent for t in tensors], works, watched)

    def _operations(self, kind: str, outgoing: Outgoing, incoming: Incoming) -> list[dist.P2POp]:
        """Messages over the process group, which are begun in this order."""
        # Empty tensors are not sent: both sides know the shapes, and not every backend carries zero bytes.
        moves = [(dist.irecv, t, peer) for tensors, peer in incoming for t in tensors if t.numel()]
        moves += [(dist.isend, t, peer) for tensors, to in outgoing for peer in to for t in tensors if t.numel()]
        group, tagged, operations = self.group, bool(moves) and self._matches, []
        for move, t, peer in moves:
            assert t.dtype in CARRIED, f"NCCL does not carry {t.dtype}"
            tag = Header.of(self._state.number, kind, [(tuple(t.shape), t.dtype)]).tag if tagged else 0
            operations.append(dist.P2POp(move, t, self.ranks[peer], group, tag))
        return operations

    def _under_way(
        self, received: Sequence[Tensor], sent: Sequence[Tensor], works: Sequence[dist.Work | None], watched: Watched
    ) -> Transfer:
        """A transfer over the process group, which `drop` cancels."""
        begun = [work for work in works if work is not None]
        transfer = Transfer(received, sent, begun, link=self.name, state=self._state, watched=watched)
        self._transfers.add(transfer)
        return transfer


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _specs(tensors: Sequence[Tensor]) -> list[Spec]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _passed_on(
    take: Callable[[timedelta | None], list[Tensor]], origins: Sequence[int], timeout: timedelta | None
) -> list[Tensor]:
    """Receive relayed tensors; an error also names the original senders, of which one may have failed."""
    try:
        return take(timeout)
    except DesyncError:
        raise
    except PeerError as error:
        ranks = " and ".join(f"rank {one}" for one in origins)
        raise PeerError(f"{error}; it passes on what {ranks} sent") from error

"""A process group that holds its callers to NCCL's rules at run time, with real values on the CPU.

`ruled` gives it to a mesh's links, as they have NCCL on GPUs. What NCCL would hang on hangs here until the group's
deadline or `RulesGroup.abort`, also when the other rank's process has ended: no closed connection tells the others.
What NCCL would take for something else raises `RuleBroken`:

* A group's operations run one after the other, in order of issue, in a thread that stands for the group's stream.
  Unbatched messages stand in the same queue (eager), or in one for each pair of ranks (lazy), which is connected at its
  first message and holds the host up until both are there. A batch is one operation.
* A message or collective is matched by its place in the queue. Count, dtype and kind have to agree.
* Outputs are poisoned at issue (NaN, 0xA5). Buffers may neither be written to nor given back before the end.
* Ranks of two groups issue their operations in the same order on both; see `EXEMPT`.
* No int16 and the like, no strides, no tags, no message to the rank itself, no tensors of
  another device, no pickled objects unless the group carries them over gloo beside, as ``cpu:gloo,cuda:nccl`` does.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
import uuid
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d

from ditmesh.comm.backends import CARRIED

# Links whose ranks issue in an order of their own: stages of a pipeline.
EXEMPT = frozenset({"pipe", "pipe_back"})
# Operations of a group that its dump shows.
SHOWN = 12
# Seconds that the end of a group waits for its threads.
CLOSED = 5.0
# Longest pause before an operation touches its buffers, by `Settings.delay`, in seconds.
PAUSES = {"early": 0.0, "random": 0.002, "late": 0.05}


class RuleBroken(AssertionError):
    """What NCCL would carry to the wrong place, crash on or misread. No RuntimeError: nothing takes it for a peer's."""


@dataclass
class Settings:
    """How groups made from now on behave.

    Attributes:
        mode: of unbatched messages: ``"eager"`` or ``"lazy"``.
        delay: before an operation touches its buffers: ``"early"``, ``"random"`` or ``"late"``.
        objects: whether pickled objects go over gloo beside; else they are refused, as NCCL alone would move them.
    """

    mode: str = os.environ.get("DITMESH_RULES_MODE", "eager")
    delay: str = os.environ.get("DITMESH_RULES_DELAY", "random")
    objects: bool = True


SETTINGS = Settings()


# --- buffers


_HELD: Counter[int] = Counter()
_LOCK = threading.RLock()


def _bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor, through a tensor of its own: other owners of the storage are the caller's."""
    raw, place = torch.empty(0, dtype=torch.uint8), tensor.storage_offset() * tensor.element_size()
    return raw.set_(tensor.untyped_storage(), place, (tensor.nbytes,), (1,)).numpy()


class _Buffer:
    """The bytes of a tensor that an operation reads or writes, and what they have to be meanwhile."""

    def __init__(self, tensor: Tensor, written: bool, what: str) -> None:
        self.what, self.written, self.dtype, self.count = what, written, tensor.dtype, tensor.numel()
        self._storage = tensor.untyped_storage()._cdata
        self.bytes = _bytes_of(tensor)
        with _LOCK:
            _HELD[self._storage] += 1

    def poison(self) -> None:
        self.bytes[:] = 0xFF if self.dtype.is_floating_point else 1 if self.dtype == torch.bool else 0xA5

    def seal(self) -> None:
        self._sum = zlib.crc32(self.bytes)

    def check(self) -> None:
        with _LOCK:
            # Each of ours owns the storage once, and so does Python's object for it.
            freed = torch._C._storage_Use_Count(self._storage) <= _HELD[self._storage] + 1
        if freed:
            raise RuleBroken(f"freed in flight: {self.what}")
        if zlib.crc32(self.bytes) != self._sum:
            raise RuleBroken(f"written while in flight: {self.what}")

    def value(self, data: bytes) -> Tensor:
        """Bytes as a flat tensor of this one's dtype."""
        return torch.frombuffer(bytearray(data), dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)

    def write(self, data: bytes) -> None:
        if data:
            self.bytes[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8).numpy()

    def release(self) -> None:
        with _LOCK:
            _HELD[self._storage] -= 1
        del self.bytes


# --- frames between two ranks


class _Gone(Exception):
    """The queue has been given up."""


class _Wire:
    """Connections of one queue to its peers, each read by a thread of its own."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self._connections = connections
        self._inbox: defaultdict[tuple[int, str], deque[tuple[dict[str, Any], bytes]]] = defaultdict(deque)
        # Frames, operations, and the end.
        self.news = threading.Condition()
        self.given_up = False
        for peer in connections:
            threading.Thread(target=self._read, args=(peer,), daemon=True).start()

    def _read(self, peer: int) -> None:
        # A peer whose process has ended, or that has given the group up, NCCL does not see: this rank goes on waiting.
        with suppress(EOFError, OSError):
            while True:
                kind, header, data = self._connections[peer].recv()
                with self.news:
                    self._inbox[peer, kind].append((header, data))
                    self.news.notify_all()

    def post(self, peer: int, kind: str, data: bytes = b"", **header: Any) -> None:
        with suppress(OSError):
            self._connections[peer].send((kind, header, data))

    def take(self, peer: int, kind: str) -> tuple[dict[str, Any], bytes]:
        """The next frame of a kind; a rank that has ended sends none, and nothing says so."""
        self.wait(lambda: self._inbox[peer, kind])
        return self._inbox[peer, kind].popleft()

    def wait(self, ready: Callable[[], Any]) -> None:
        with self.news:
            self.news.wait_for(lambda: self.given_up or ready())
        if self.given_up:
            raise _Gone

    def untaken(self) -> list[str]:
        """What other ranks have come with, and this one has not asked for."""
        return [f"rank {peer} has come with {kind}" for (peer, kind), frames in list(self._inbox.items()) if frames]

    def give_up(self) -> None:
        """Whoever waits on a connection, here or in a thread of its own, goes on; from any thread."""
        with self.news:
            if self.given_up:
                return
            self.given_up = True
            self.news.notify_all()
        for connection in self._connections.values():
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)


def _connections(
    store: Any, name: str, rank: int, peers: Sequence[int], limit: float, gone: Callable[[], bool]
) -> dict[int, Connection]:
    """One connection to each peer, once all have come; the host waits here."""

    def until(ready: Callable[[], bool]) -> None:
        while not ready():
            if gone():
                raise dist.DistBackendError("the group was aborted while its ranks connected")
            if time.monotonic() > limit:
                raise dist.DistBackendError(f"timed out while {name} was connected\n{dump()}")
            time.sleep(0.001)

    found: dict[int, Connection] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"ditmesh-rules-{uuid.uuid4().hex}"
        listener.bind(f"\0{address}")
        listener.listen()
        listener.setblocking(False)
        store.set(f"{name}/{rank}", address)
        for peer in (peer for peer in peers if peer > rank):
            until(lambda peer=peer: store.check([f"{name}/{peer}"]))
            end = socket.socket(socket.AF_UNIX)
            end.connect("\0" + store.get(f"{name}/{peer}").decode())
            found[peer] = Connection(end.detach())
            found[peer].send(rank)

        def accepted() -> bool:
            with suppress(BlockingIOError):
                end, _ = listener.accept()
                end.setblocking(True)
                connection = Connection(end.detach())
                found[connection.recv()] = connection
            return len(found) == len(peers)

        until(accepted)
    return found


# --- operations


@dataclass(eq=False)
class _Operation(Work):
    """An operation in a queue, and the handle that its caller gets."""

    group: RulesGroup
    number: int
    text: str
    # Ranks of the group that it needs.
    peers: tuple[int, ...]
    run: Callable[[_Wire], None]
    buffers: list[_Buffer]
    issued: str
    limit: float
    # Operations issued on other groups before, by peer.
    before: dict[int, dict[str, int]]
    state: str = "queued"
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__()

    def finish(self, error: BaseException | None = None) -> None:
        with _LOCK:
            if self.done.is_set():
                return
            self.error, self.state = error, "failed" if error else "done"
            for buffer in self.buffers:
                buffer.release()
            self.buffers = []
            self.done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = time.monotonic() + timeout.total_seconds() if timeout else self.limit
        if not self.done.wait(max(0.0, limit - time.monotonic())):
            self.group.lose(self)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def __str__(self) -> str:
        return f"#{self.number} {self.text}, issued at {self.issued}"


class _Queue:
    """Operations that run one after the other, in a thread of their own: a stream."""

    def __init__(self, group: RulesGroup, connections: Mapping[int, Connection]) -> None:
        self._group, self.wire = group, _Wire(connections)
        self.waiting: deque[_Operation] = deque()
        self.thread = threading.Thread(target=self._work, name=f"rules-{group.name_}", daemon=True)
        self.thread.start()

    def add(self, operation: _Operation) -> None:
        with self.wire.news:
            self.waiting.append(operation)
            self.wire.news.notify_all()

    def _work(self) -> None:
        generator = random.Random(f"{self._group.name_} {self._group.rank()}")
        with suppress(_Gone):
            while True:
                self.wire.wait(lambda: self.waiting)
                self._carry_out(self.waiting[0], generator)
                self.waiting.popleft()

    def _carry_out(self, operation: _Operation, generator: random.Random) -> None:
        operation.state, delay = "running", self._group.settings.delay
        time.sleep(PAUSES[delay] * (generator.random() if delay == "random" else 1.0))
        error = None
        buffers = operation.buffers
        try:
            for buffer in buffers:
                buffer.check()
            operation.run(self.wire)
            for buffer in buffers:
                # What was received is there now; what was sent has to be as it was.
                if not buffer.written:
                    buffer.check()
        except _Gone:
            raise
        except BaseException as found:
            if self.wire.given_up:
                raise _Gone from found
            # The other rank finds the same by what it has been told.
            error = found
            self._group.found.append(found)
        operation.finish(error)


_GROUPS: list[RulesGroup] = []
# Operations issued on each group that concern a peer, by group and global rank.
_ISSUED: Counter[tuple[str, int]] = Counter()


def dump() -> str:
    """The queues of all groups of this process, as NCCL's flight recorder has them."""
    with _LOCK:
        return "\n".join(line for group in _GROUPS for line in group.described())


def _caller() -> str:
    """The lines outside of torch that lead here, the innermost first."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 4:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name:
            lines.append(f"{os.path.basename(name)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class RulesGroup(dist.ProcessGroup):
    """The process group; see the module."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self.settings = replace(SETTINGS)
        self.ranks, self.name_, self._store, self._timeout = tuple(ranks), name, store, timeout.total_seconds()
        self.links: set[str] = set()
        self.found: list[BaseException] = []
        self.history: deque[_Operation] = deque(maxlen=SHOWN)
        self._number, self._gone = 0, ""
        self._queues: dict[int | None, _Queue] = {}
        # What carries objects, and nothing else.
        beside = dist.PrefixStore("host/", store)
        self.host = dist.ProcessGroup(beside, rank, len(ranks))
        gloo = dist.ProcessGroupGloo(beside, rank, len(ranks), timeout)
        self.host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        distributed_c10d._world.pg_group_ranks[self.host] = {rank: place for place, rank in enumerate(ranks)}
        if self.settings.mode == "eager":
            self._queue(None)
        with _LOCK:
            _GROUPS.append(self)

    # --- what torch asks a group

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "rules"

    def name(self) -> str:
        return "rules"

    @property
    def group_name(self) -> str:
        return self.name_

    @property
    def group_desc(self) -> str:
        return "rules"

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self.name_

    def _get_backend(self, device: torch.device | str) -> RulesGroup:
        device = torch.device(device)
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # --- collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Operation:
        (tensor,), how = tensors, _reduction(opts)
        self._refuse(tensor, "all_reduce")
        # It writes its own source.
        mine = _bytes_of(tensor).tobytes()

        def run(wire: _Wire, buffers: list[_Buffer]) -> None:
            buffers[0].write(_reduced(buffers[0], self._swap(wire, [mine] * self.size()), how))

        return self._collective("all_reduce", run, outputs=[tensor], agreed=(tensor.numel(), str(tensor.dtype), how))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> _Operation:
        (tensor,), root = tensors, opts.rootRank
        source = root == self.rank()

        def run(wire: _Wire, buffers: list[_Buffer]) -> None:
            if not source:
                buffers[0].write(wire.take(root, "data")[1])
                return
            for peer in range(self.size()):
                if peer != root:
                    wire.post(peer, "data", buffers[0].bytes.tobytes())

        kinds = {"inputs": [tensor]} if source else {"outputs": [tensor]}
        return self._collective("broadcast", run, agreed=(tensor.numel(), str(tensor.dtype), root), **kinds)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> _Operation:
        return self._gather(outputs[0], inputs[0])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Operation:
        parts = output.view(-1).chunk(self.size()) if output.numel() else [output] * self.size()
        # Views: the caller holds the whole.
        return self._gather(parts, given)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Operation:
        """What torch's functional collectives call, with one pair."""
        ((output, given),) = zip(outputs, inputs, strict=True)
        return self.all_gather_single(output, given, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather(self, outputs: Sequence[Tensor], given: Tensor) -> _Operation:
        # In place, as FSDP has it: the source is its part of what comes.
        inside = bool(given.numel()) and given.data_ptr() == outputs[self.rank()].data_ptr()
        mine = _bytes_of(given).tobytes() if inside and given.is_contiguous() else None

        def run(wire: _Wire, buffers: list[_Buffer]) -> None:
            source = buffers[-1].bytes.tobytes() if mine is None else mine
            for buffer, part in zip(buffers, self._swap(wire, [source] * self.size()), strict=False):
                buffer.write(part)

        agreed = ([part.numel() for part in outputs], str(given.dtype))
        inputs = [given] if mine is None else []
        return self._collective("all_gather", run, outputs=outputs, inputs=inputs, agreed=agreed)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, incoming: Sequence[int], outgoing: Sequence[int], opts: Any = None
    ) -> _Operation:
        size, row = self.size(), given[:1].numel() * given.element_size() if given.dim() else given.element_size()
        row_in = output[:1].numel() * output.element_size()
        sends = list(outgoing) or [len(given) // size] * size
        takes = list(incoming) or [len(output) // size] * size

        def run(wire: _Wire, buffers: list[_Buffer]) -> None:
            data, begin, parts = buffers[1].bytes, 0, []
            for count in sends:
                parts.append(data[begin : begin + count * row].tobytes())
                begin += count * row
            got = self._swap(wire, parts)
            for peer, part in enumerate(got):
                if len(part) != takes[peer] * row_in:
                    raise RuleBroken(
                        f"{buffers[0].what}: rank {self.ranks[peer]} sends {len(part)} bytes, and rank "
                        f"{self.ranks[self.rank()]} expects {takes[peer] * row_in}"
                    )
            buffers[0].write(b"".join(got))

        return self._collective("all_to_all", run, outputs=[output], inputs=[given], agreed=(str(given.dtype),))

    alltoall_base = all_to_all_single

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Operation:
        how = _reduction(opts)

        def run(wire: _Wire, buffers: list[_Buffer]) -> None:
            data, one = buffers[1].bytes, output.nbytes
            parts = self._swap(wire, [data[p * one : (p + 1) * one].tobytes() for p in range(self.size())])
            buffers[0].write(_reduced(buffers[0], parts, how))

        agreed = (output.numel(), str(given.dtype), how)
        return self._collective("reduce_scatter", run, outputs=[output], inputs=[given], agreed=agreed)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> _Operation:
        return self._collective("barrier", lambda wire, _: self._swap(wire, [b""] * self.size()), agreed=())

    def _swap(self, wire: _Wire, parts: Sequence[bytes]) -> list[bytes]:
        """A part for each rank of the group, for one from each."""
        others = [peer for peer in range(self.size()) if peer != self.rank()]
        for peer in others:
            wire.post(peer, "data", parts[peer])
        return [wire.take(peer, "data")[1] if peer in others else part for peer, part in enumerate(parts)]

    # --- messages

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> _Operation:
        return self._messages([(True, tensors[0], to, tag)])

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> _Operation:
        return self._messages([(False, tensors[0], source, tag)])

    def batch(self, moves: Sequence[dist.P2POp]) -> _Operation:
        """One group call: all halves are under way together."""
        halves = [(one.op is dist.isend, one.tensor, one.group_peer, one.tag) for one in moves]
        return self._messages(halves, batched=True)

    def _messages(self, moves: Sequence[tuple[bool, Tensor, int, int]], batched: bool = False) -> _Operation:
        words = [f"{'send to' if sends else 'recv from'} rank {self.ranks[peer]}" for sends, _, peer, _ in moves]
        text = f"batch of {', '.join(words)}" if batched else words[0]
        for (_, tensor, peer, tag), word in zip(moves, words, strict=True):
            self._refuse(tensor, word)
            if peer == self.rank():
                raise RuleBroken(f"{self.described_name}: {word}, which is itself")
            if tag:
                raise RuleBroken(f"{self.described_name}: {word} has tag {tag}, and NCCL matches by order alone")
        number, me = self._next(), self.ranks[self.rank()]
        buffers = [
            _Buffer(tensor, not sends, f"the buffer of {word} (#{number} of {self.described_name})")
            for (sends, tensor, _, _), word in zip(moves, words, strict=True)
        ]
        # No tensor of the caller's: this would keep it alive.
        halves = [(sends, peer, buffer) for (sends, _, peer, _), buffer in zip(moves, buffers, strict=True)]

        def run(wire: _Wire) -> None:
            for sends, peer, buffer in halves:
                what = {"n": buffer.count, "d": str(buffer.dtype), "o": operation.before[peer], "q": number}
                wire.post(peer, "send" if sends else "recv", **what)
            for sends, peer, buffer in halves:
                theirs, _ = wire.take(peer, "recv" if sends else "send")
                name = f"{self.described_name}, #{number} {text}"
                self._in_order(theirs["o"], peer, operation, name)
                if (theirs["n"], theirs["d"]) != (buffer.count, str(buffer.dtype)):
                    verbs = ("sends", "receives") if sends else ("receives", "sends")
                    raise RuleBroken(
                        f"{name}: rank {me} {verbs[0]} {buffer.count} {buffer.dtype}, and rank {self.ranks[peer]} "
                        f"{verbs[1]} {theirs['n']} {theirs['d']} (its #{theirs['q']}); issued at {operation.issued}"
                    )
            for sends, peer, buffer in halves:
                if sends:
                    wire.post(peer, "data", buffer.bytes.tobytes())
            for sends, peer, buffer in halves:
                if not sends:
                    buffer.write(wire.take(peer, "data")[1])

        peers = tuple(sorted({peer for _, peer, _ in halves}))
        operation = self._operation(number, text, peers, run, buffers)
        return self._issue(operation, peers[0] if self.settings.mode == "lazy" and not batched else None)

    # --- issue

    @property
    def described_name(self) -> str:
        links = "/".join(sorted(self.links)) or "no link"
        return f"group {self.name_} ({links}, ranks {','.join(map(str, self.ranks))})"

    def _next(self) -> int:
        if self._gone:
            raise dist.DistBackendError(f"{self.described_name} {self._gone}")
        if self.found:
            raise self.found[0]
        self._number += 1
        return self._number

    def _refuse(self, tensor: Tensor, what: str) -> None:
        reason = ""
        if tensor.device.type != "cpu":
            reason = f"a tensor on {tensor.device} in a group of the CPU"
        elif tensor.dtype not in CARRIED:
            reason = f"NCCL does not carry {tensor.dtype}"
        elif not tensor.is_contiguous():
            reason = f"a buffer of shape {tuple(tensor.shape)} with strides {tensor.stride()}, not contiguous"
        if reason:
            raise RuleBroken(f"{self.described_name}: {what}: {reason}")

    def _collective(
        self,
        kind: str,
        run: Callable[[_Wire, list[_Buffer]], Any],
        agreed: tuple[Any, ...],
        outputs: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
    ) -> _Operation:
        for tensor in (*outputs, *inputs):
            self._refuse(tensor, kind)
        number = self._next()
        described = f"{kind} (#{number} of {self.described_name})"
        buffers = [_Buffer(tensor, True, f"an output of {described}") for tensor in outputs]
        buffers += [_Buffer(tensor, False, f"the source of {described}") for tensor in inputs]
        others = [peer for peer in range(self.size()) if peer != self.rank()]
        mine = [kind, *agreed]

        def carried(wire: _Wire) -> None:
            for peer in others:
                wire.post(peer, "collective", a=mine, o=operation.before[peer], q=number)
            for peer in others:
                theirs, _ = wire.take(peer, "collective")
                self._in_order(theirs["o"], peer, operation, described)
                if theirs["a"] != mine:
                    raise RuleBroken(
                        f"{described}: rank {self.ranks[self.rank()]} calls {mine}, and rank {self.ranks[peer]} "
                        f"{theirs['a']} (its #{theirs['q']}); issued at {operation.issued}"
                    )
            run(wire, buffers)

        operation = self._operation(number, kind, tuple(others), carried, buffers)
        return self._issue(operation, None)

    def _operation(
        self, number: int, text: str, peers: tuple[int, ...], run: Callable[[_Wire], None], buffers: list[_Buffer]
    ) -> _Operation:
        with _LOCK:
            before = {peer: self._seen_with(peer) for peer in peers}
            for peer in peers:
                _ISSUED[self.name_, self.ranks[peer]] += 1
        limit = time.monotonic() + self._timeout
        return _Operation(self, number, text, peers, run, buffers, _caller(), limit, before)

    def _issue(self, operation: _Operation, pair: int | None) -> _Operation:
        for buffer in operation.buffers:
            if buffer.written:
                buffer.poison()
        for buffer in operation.buffers:
            buffer.seal()
        self.history.append(operation)
        self._queue(pair, operation).add(operation)
        if self._gone:
            # Aborted by another thread after it was allowed: the end of the queue may have missed it.
            operation.finish(dist.DistBackendError(f"{self.described_name} {self._gone}"))
        return operation

    def _queue(self, pair: int | None, first: _Operation | None = None) -> _Queue:
        if pair not in self._queues:
            me, size = self.rank(), self.size()
            peers = [pair] if pair is not None else [peer for peer in range(size) if peer != me]
            name = "all" if pair is None else f"pair {min(me, pair)} {max(me, pair)}"
            limit = first.limit if first else time.monotonic() + self._timeout

            connections = _connections(self._store, name, me, peers, limit, lambda: bool(self._gone))
            self._queues[pair] = _Queue(self, connections)
        return self._queues[pair]

    # --- order over groups

    def _exempt(self) -> bool:
        return bool(self.links & EXEMPT)

    def _seen_with(self, peer: int) -> dict[str, int]:
        """How many operations with this peer were issued on every other group that both are in."""
        rank = self.ranks[peer]
        groups = [group for group in _GROUPS if group is not self and rank in group.ranks and not group._exempt()]
        return {} if self._exempt() else {group.name_: _ISSUED[group.name_, rank] for group in groups}

    def _in_order(self, theirs: Mapping[str, int], peer: int, operation: _Operation, name: str) -> None:
        for other, count in operation.before[peer].items():
            if theirs.get(other, count) != count:
                described = next((group.described_name for group in _GROUPS if group.name_ == other), other)
                raise RuleBroken(
                    f"{name}: rank {self.ranks[self.rank()]} has issued {count} operations on {described} before, and "
                    f"rank {self.ranks[peer]} {theirs[other]}: an order over groups of its own on each rank; issued at "
                    f"{operation.issued}"
                )

    # --- ends

    def lose(self, operation: _Operation) -> None:
        """An operation is late: as NCCL's watchdog does, end the group."""
        ranks = ", ".join(str(self.ranks[peer]) for peer in operation.peers)
        self._end(
            "timed out",
            f"{self.described_name}: {operation} timed out: rank {ranks} did not come to it; queues of rank "
            f"{self.ranks[self.rank()]}:\n{dump()}",
        )

    def abort(self) -> None:
        """Waiting callers of this rank raise; other ranks are told nothing."""
        self._end("was aborted", f"{self.described_name} was aborted")

    def shutdown(self) -> None:
        self._end("was destroyed", f"{self.described_name} was destroyed with operations under way")
        for queue in list(self._queues.values()):
            if queue.thread is not threading.current_thread():
                queue.thread.join(CLOSED)
        with _LOCK:
            if self in _GROUPS:
                _GROUPS.remove(self)
        # gloo's threads end with the last reference.
        distributed_c10d._world.pg_group_ranks.pop(self.__dict__.pop("host", None), None)

    def _end(self, how: str, words: str) -> None:
        self._gone = self._gone or how
        for queue in list(self._queues.values()):
            queue.wire.give_up()
            for operation in list(queue.waiting):
                operation.finish(dist.DistBackendError(words))

    def described(self) -> Iterator[str]:
        yield f"{self.described_name}{', ' + self._gone if self._gone else ''}: {self._number} operations"
        for operation in self.history:
            yield f"    {operation.state}: {operation}"
        for queue in self._queues.values():
            for line in queue.wire.untaken():
                yield f"    {line} of its own"


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _reduction(opts: Any) -> str:
    """Name of the operation that options ask for."""
    if opts is None:
        return "SUM"
    how = next((name for name in _REDUCTIONS if opts.reduceOp == getattr(dist.ReduceOp, name)), None)
    if how is None:
        raise RuleBroken(f"{opts.reduceOp} is none of {', '.join(_REDUCTIONS)}")
    return how


def _reduced(like: _Buffer, parts: Sequence[bytes], how: str) -> bytes:
    """In rank order, so that all ranks have the same bits."""
    total, *more = [like.value(part) for part in parts]
    for part in more:
        total = total | part if total.dtype == torch.bool and how == "SUM" else _REDUCTIONS[how](total, part)
    total = total / len(parts) if how == "AVG" else total
    return total.contiguous().view(torch.uint8).numpy().tobytes() if total.numel() else b""


# --- in the place of NCCL


def _created(options: Any, _: Any) -> RulesGroup:
    return RulesGroup(
        options.store, options.group_rank, options.global_ranks_in_group, options.group_id, options.timeout
    )


def register() -> None:
    """Let ``dist.new_group(..., backend="rules")`` make such groups."""
    if "RULES" not in dist.Backend._plugins:
        dist.Backend.register_backend("rules", _created, extended_api=True, devices=["cpu"])


@contextmanager
def ruled(mode: str = SETTINGS.mode, delay: str = SETTINGS.delay, objects: bool = True) -> Iterator[None]:
    """Links that are made while this is entered use groups of the rules, as on GPUs they use NCCL; see `Settings`.

    Shared memory is not used; the default group and those that name gloo stay gloo's.
    """
    from ditmesh.comm import grid
    from ditmesh.comm.link import Link

    register()
    batched, connect = dist.batch_isend_irecv, Link.connect

    def batch_isend_irecv(moves: list[dist.P2POp]) -> list[Any]:
        group = moves[0].group
        return [group.batch(moves)] if isinstance(group, RulesGroup) else batched(moves)

    def named(self: Link, group: Any, *more: Any, **others: Any) -> None:
        if isinstance(group, RulesGroup):
            group.links.add(self.name)
        connect(self, group, *more, **others)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(SETTINGS, mode=mode, delay=delay, objects=objects))
        patches.enter_context(mock.patch.object(grid, "possible", return_value=False))
        patches.enter_context(mock.patch.object(Link, "connect", named))
        patches.enter_context(mock.patch.object(grid, "group_options", return_value={"backend": "rules"}))
        patches.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv))
        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
            patches.enter_context(mock.patch.object(dist, name, _with_objects(getattr(dist, name), name)))
        yield


def _with_objects(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def host_of(given: Any) -> Any:
        if not isinstance(given, RulesGroup):
            return given
        if not given.settings.objects:
            raise RuleBroken(f"{given.described_name}: {name} pickles objects through NCCL; issued at {_caller()}")
        return given.host

    def moved(*args: Any, **kwargs: Any) -> Any:
        return function(*map(host_of, args), **{key: host_of(value) for key, value in kwargs.items()})

    return moved

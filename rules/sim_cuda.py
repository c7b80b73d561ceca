"""CUDA's asynchrony with values: kernels stand in streams and are carried out late, in any order that events allow.

On the device of `fake_cuda` every kernel has run when its call returns. Here the host only appends it to a stream, and
a thread that stands for the device carries it out: when the host waits, when the host has been idle for a moment, or
when too much stands in the streams. Each communicator has a stream of its own, which begins after what the current
stream had when the operation was issued; `Work.wait` makes the current stream wait, and not the host. Memory that the
program gives back is handed out again at once, as torch's allocator does, and holds NaN until it is written to.

So numbers come out wrong where a program uses what is not there yet. And every access is compared with those before
by vector clocks (Lamport 1978, doi:10.1145/359545.359563; Mattern 1989): two of them to the same bytes, of which one
writes, and which no stream's order and no event puts one before the other, are a finding with both places, whatever
the order in this run was.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from support.syncs import INDEXING, asked_by, waits

from .fake_cuda import FREE, STAND_INS, FakeDevice, Look, Messages, cuda

COMPUTE = "compute"
# Seconds without a new kernel after which the device goes on by itself: other ranks may wait for it.
IDLE = 0.05
# Kernels that may stand in all streams; CUDA has room for about as many in each.
LONGEST = 1024
# Accesses of a piece of memory that are kept.
KEPT = 48
# Seconds that a host waits for its device.
DEADLINE = 100.0


class Region(NamedTuple):
    """Bytes of a piece of memory: those of a tensor with strides."""

    size: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        return cls(tensor.element_size(), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def bounds(self) -> tuple[int, int]:
        if 0 in self.shape:
            return 0, 0
        last = sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        return self.offset * self.size, (self.offset + last + 1) * self.size

    def meets(self, other: Region) -> bool:
        (low, high), (low_, high_) = self.bounds, other.bounds
        if max(low, low_) >= min(high, high_):
            return False
        if self.size != other.size:
            return True
        with unset_fake_temporarily(), no_dispatch():
            marks = torch.zeros(max(high, high_) // self.size, dtype=torch.int8)
            for one in (self, other):
                marks.as_strided(one.shape, one.stride, one.offset).add_(1)
            return bool((marks > 1).any())


@dataclass(eq=False)
class Task:
    """What stands in a stream.

    Attributes:
        stream, number: its place.
        name, place: what it is, and who launched it.
        run: carries it out; called by the device.
        after: tasks of other streams that have to be done before.
        clock: by stream, the number of the last task that is done before this one ends, itself among them.
    """

    stream: str
    number: int
    name: str
    place: str
    run: Callable[[], Any]
    after: list[Task]
    clock: dict[str, int]
    begun: bool = False
    done: bool = False

    def __str__(self) -> str:
        return f"{self.name} on {self.stream}, launched at {self.place}"


class _Use(NamedTuple):
    task: Task
    region: Region
    writes: bool


@dataclass(eq=False)
class Block:
    """A piece of the device's memory, and who uses it."""

    storage: torch.UntypedStorage
    uses: list[_Use] = field(default_factory=list)
    # Streams for which it is kept after it was given back.
    recorded: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Stream:
    name: str
    count: int = 0
    clock: dict[str, int] = field(default_factory=dict)
    waiting: deque[Task] = field(default_factory=deque)
    last: Task | None = None
    # Tasks of other streams that the next one has to follow.
    joined: list[Task] = field(default_factory=list)


def _merged(clock: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: max(clock.get(name, 0), other.get(name, 0)) for name in clock.keys() | other.keys()}


class SimDevice(FakeDevice):
    """See the module.

    Args:
        order: which of several streams goes on: ``"early"``: those of communicators, ``"late"``: others, ``"random"``.
        seed: of the random order.
        idle: seconds without a new kernel after which it goes on.

    Attributes:
        findings: a sentence for every fault.
        ahead: the most kernels that were launched and not carried out.
        reused: pieces of memory that were handed out again.
    """

    def __init__(self, order: str = "random", seed: int = 0, idle: float = IDLE) -> None:
        super().__init__()
        self._idle = idle
        self.order, self.findings, self.ahead, self.reused = order, list[str](), 0, 0
        self.current = COMPUTE
        self._random = random.Random(seed)
        self._streams: dict[str, _Stream] = {}
        self._blocks: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._free: dict[int, list[Block]] = defaultdict(list)
        self._dead: deque[tuple[Block, dict[str, int]]] = deque()
        self._kept: list[Block] = []
        self._turn = threading.Condition(threading.RLock())
        self._wanted: set[Task] = set()
        self._pending, self._latest, self._closed = 0, 0.0, False
        self._error: BaseException | None = None
        self._links: dict[str, ThreadPoolExecutor] = {}
        self._thread = threading.Thread(target=self._work, name="sim-device", daemon=True)
        self._thread.start()

    # --- streams

    def stream(self, name: str) -> _Stream:
        return self._streams.setdefault(name, _Stream(name))

    def launch(
        self,
        name: str,
        run: Callable[[], Any],
        uses: Sequence[tuple[Block, Region, bool]] = (),
        stream: str | None = None,
        place: str | None = None,
    ) -> Task:
        """Append to a stream; the host goes on, unless there is no room."""
        place = place or ":".join(asked_by(__file__)[:2])
        with self._turn:
            self._check()
            own = self.stream(stream or self.current)
            own.count += 1
            after, own.joined = own.joined, []
            own.clock = {**own.clock, own.name: own.count}
            task = Task(own.name, own.count, name, place, run, after, own.clock)
            self._compare(task, uses)
            own.waiting.append(task)
            own.last = task
            self._pending += 1
            self.ahead, self._latest = max(self.ahead, self._pending), time.monotonic()
            self._turn.notify_all()
            if self._pending > LONGEST:
                self._until(lambda: self._pending <= LONGEST // 2)
        return task

    def join(self, task: Task) -> None:
        """Let the current stream wait for a task."""
        with self._turn:
            own = self.stream(self.current)
            own.joined.append(task)
            own.clock = _merged(own.clock, task.clock)

    def follow(self, name: str, other: str) -> None:
        """Let a stream wait for what another has."""
        with self._turn:
            own, before = self.stream(name), self.stream(other)
            own.joined += [*before.joined, *([before.last] if before.last else [])]
            own.clock = _merged(own.clock, before.clock)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    # --- the host waits

    def finish(self, *tasks: Task) -> None:
        """Wait for tasks."""
        with self._turn:
            self._wanted.update(tasks)
            self._turn.notify_all()
            self._until(lambda: all(task.done for task in tasks))
            self._wanted.difference_update(tasks)

    def flush(self) -> None:
        """Wait for the current stream."""
        own = self.stream(self.current)
        self.finish(*own.joined, *([own.last] if own.last else []))

    def synchronize(self, *_: Any) -> None:
        """Wait for all streams."""
        self.finish(*[one.last for one in list(self._streams.values()) if one.last])

    def _until(self, ready: Callable[[], bool]) -> None:
        limit = time.monotonic() + DEADLINE
        while not ready():
            self._check()
            if time.monotonic() > limit:
                standing = "\n".join(f"    {one.waiting[0]}" for one in self._streams.values() if one.waiting)
                raise TimeoutError(f"the device does not go on; the first of every stream:\n{standing}")
            # A host that waits launches nothing: the device is idle soon.
            self._latest = 0.0
            self._turn.notify_all()
            self._turn.wait(0.05)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # --- the device

    def _work(self) -> None:
        with torch.no_grad():
            while (task := self._next()) is not None:
                if task.stream not in self._links:
                    self._carry_out(task)
                else:
                    self._links[task.stream].submit(self._carry_out, task)

    def _next(self) -> Task | None:
        with self._turn:
            while not self._closed:
                heads = [one.waiting[0] for one in self._streams.values() if one.waiting]
                ready = [one for one in heads if not one.begun and all(before.done for before in one.after)]
                idle = time.monotonic() - self._latest > self._idle
                if ready and (self._wanted or idle or self._pending > LONGEST):
                    task = self._chosen(ready)
                    task.begun = True
                    return task
                self._turn.wait(self._idle / 2 if ready else 1.0)
        return None

    def _chosen(self, ready: list[Task]) -> Task:
        links = [one for one in ready if one.stream in self._links]
        others = [one for one in ready if one.stream not in self._links]
        first = {"early": links, "late": others}.get(self.order) or ready
        return self._random.choice(first)

    def _carry_out(self, task: Task) -> None:
        try:
            with torch.no_grad():
                task.run()
        except BaseException as error:
            error.add_note(f"in {task}")
            self._error = self._error or error
        with self._turn:
            task.done = True
            self._streams[task.stream].waiting.popleft()
            self._pending -= 1
            self._turn.notify_all()

    def close(self) -> None:
        """End the device's threads; what stands in its streams is dropped."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._thread.join(5)
        for link in self._links.values():
            link.shutdown(wait=False, cancel_futures=True)

    # --- accesses

    def _compare(self, task: Task, uses: Sequence[tuple[Block, Region, bool]]) -> None:
        for block, region, writes in uses:
            for use in block.uses:
                known = task.clock.get(use.task.stream, 0) >= use.task.number
                if known or use.task is task or not (writes or use.writes) or not use.region.meets(region):
                    continue
                self._found(_named(task, writes, use))
            block.uses.append(_Use(task, region, writes))
            if len(block.uses) > KEPT:
                now = self.stream(COMPUTE).clock
                old = [use for use in block.uses if now.get(use.task.stream, 0) >= use.task.number]
                block.uses = [use for use in block.uses if use not in old[: -KEPT // 2]]

    def _found(self, sentence: str) -> None:
        if sentence not in self.findings:
            self.findings.append(sentence)

    # --- memory

    def _allocated(self, nbytes: int) -> Block:
        self._bury()
        size = max(1, -(-nbytes // 512)) * 512
        if self._free[size]:
            self.reused += 1
            return self._free[size].pop()
        with unset_fake_temporarily(), no_dispatch():
            return Block(torch.empty(size, dtype=torch.uint8).untyped_storage())

    def _bury(self) -> None:
        """Look at what was given back; it is handed out again."""
        while self._dead:
            block, clock = self._dead.popleft()
            later = False
            for use in block.uses:
                if use.task.stream == COMPUTE or clock.get(use.task.stream, 0) >= use.task.number:
                    continue
                if use.task.stream in block.recorded:
                    later = later or not use.task.done
                else:
                    self._found(
                        f"freed in flight: memory of {use.task} was given back before the current stream waited for "
                        "it, and without record_stream"
                    )
            # One sentence for each fault: it is not told again of the next tensor there.
            block.uses = [use for use in block.uses if use.task.stream in block.recorded]
            (self._kept if later else self._free[block.storage.nbytes()]).append(block)
        for block in [one for one in self._kept if all(use.task.done for use in one.uses)]:
            self._kept.remove(block)
            block.uses, block.recorded = [], set()
            self._free[block.storage.nbytes()].append(block)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory until a stream is done with it."""
        self._block(tensor).recorded.add(getattr(stream, "name", stream))

    def _block(self, tensor: Tensor) -> Block:
        return self._blocks[tensor.untyped_storage()._cdata][1]

    def _new(self, fake: Tensor) -> Block:
        """Memory for a tensor of a new storage."""
        storage = fake.untyped_storage()
        block = self._allocated(storage.nbytes())
        self._blocks[storage._cdata] = StorageWeakRef(storage), block
        weakref.finalize(storage, self._died, storage._cdata, block)
        return block

    def _died(self, key: int, block: Block) -> None:
        # At any moment, in any thread.
        known = self._blocks.get(key)
        if known is not None and known[1] is block:
            del self._blocks[key]
        self._dead.append((block, self.stream(self.current).clock))

    def view_of(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        with unset_fake_temporarily(), no_dispatch():
            whole = torch.empty(0, dtype=tensor.dtype)
            return whole.set_(self._block(tensor).storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def values(self, tensor: Tensor) -> Tensor:
        self.flush()
        return self.view_of(tensor)

    def use(self, tensor: Tensor, writes: bool) -> tuple[Block, Region, bool]:
        return self._block(tensor), Region.of(tensor), writes

    # --- kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented
        name = func._schema.name.rpartition("::")[2]
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        target = kwargs.get("device")
        makes = target is not None and torch.device(target).type == "cuda"
        if not makes and not any(one.is_cuda for one in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        by_host = name in INDEXING and any(isinstance(one, Tensor) and not one.is_cuda for one in args[1])
        if by_host or func.namespace == "c10d" or waits(name, args, kwargs) or not _AT_ONCE.isdisjoint(func.tags):
            # The host waits, or random numbers are drawn in the order in which it asks for them.
            self.flush()
            self.launch(name, _nothing, self._uses(func, args, kwargs))
            return super().__torch_dispatch__(func, types, args, kwargs)
        return self._late(func, name, args, kwargs)

    def _late(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        uses = self._uses(func, args, kwargs)
        # Pageable memory of the host is read at once.
        given = tree_map_only(Tensor, self._argument, (args, kwargs))
        fake = args[0] if name == "copy_" and not args[0].is_cuda else func(*args, **kwargs)
        leaves, outputs, results = tree_leaves(fake), list[tuple[int, Tensor]](), dict[int, Tensor]()
        for place, one in enumerate(leaves):
            if not isinstance(one, Tensor) or any(one is own for own in args):
                continue
            if not one.is_cuda:
                with unset_fake_temporarily(), no_dispatch():
                    results[place] = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)
                outputs.append((place, results[place]))
            elif one.untyped_storage()._cdata not in self._blocks:
                uses.append((self._new(one), Region.of(one), True))
                outputs.append((place, self.view_of(one)))
        if not func.is_view and name not in FREE:
            self.launches[name] += 1
        if outputs or func._schema.is_mutable:
            run = _poison(outputs) if name in FREE and outputs else _kernel(func, *given, outputs)
            self.launch(name, run, uses)
        if not results:
            return fake
        return tree_map_only(Tensor, lambda one: next(iter(results.values())) if not one.is_cuda else one, fake)

    def _uses(self, func: Any, args: Any, kwargs: Any) -> list[tuple[Block, Region, bool]]:
        found: list[tuple[Block, Region, bool]] = []
        if func.is_view:
            return found
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for one in tree_leaves(value):
                if isinstance(one, Tensor) and one.is_cuda:
                    found.append(self.use(one, writes))
        return found

    def _argument(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda or getattr(tensor, "is_pinned_here", False):
            return self.view_of(tensor)
        with unset_fake_temporarily(), no_dispatch():
            return tensor.detach().clone()

    def _keep(self, fake: Tensor, found: Tensor, name: str = "") -> Tensor:
        """The host has waited, and the result is there."""
        if fake.is_cuda and fake.untyped_storage()._cdata not in self._blocks:
            self._new(fake)
            value = self.view_of(fake)
            with unset_fake_temporarily(), no_dispatch():
                value.copy_(found)
        return fake if fake.is_cuda else found


_AT_ONCE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _nothing() -> None:
    """It has been done by the host."""


def _kernel(func: Any, args: Any, kwargs: Any, outputs: list[tuple[int, Tensor]]) -> Callable[[], None]:
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    function = STAND_INS.get(func.overloadpacket, func)

    def run() -> None:
        found = tree_leaves(function(*args, **kwargs))
        for place, output in outputs:
            if output.numel():
                output.copy_(found[place])

    return run


def _poison(outputs: list[tuple[int, Tensor]]) -> Callable[[], None]:
    def run() -> None:
        for _, output in outputs:
            output.fill_(float("nan") if output.dtype.is_floating_point else 1 if output.dtype == torch.bool else 85)

    return run


def _named(task: Task, writes: bool, use: _Use) -> str:
    if use.task.stream.startswith("link "):
        if use.writes and not writes:
            return f"used before the wait: {task} reads what {use.task} receives, and has not waited for it"
        return f"written in flight: {task} writes what {use.task} uses, and has not waited for it"
    return f"streams race: {task} and {use.task} use the same bytes, and neither waits for the other"


# --- messages


@dataclass(eq=False)
class _Work:
    """The handle of an operation."""

    device: SimDevice
    task: Task

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.device.join(self.task)
        if timeout is not None:
            self.device.looks.append(Look("wait with a deadline", *asked_by(__file__)[:2]))
            self.device.finish(self.task)
        return True

    def is_completed(self) -> bool:
        return self.task.done


class _Move(NamedTuple):
    sends: bool
    tensor: Tensor
    peer: int
    group: Any
    # What ditmesh calls of a single one.
    op: Callable[..., Any]
    tag: int


class SimMessages(Messages):
    """Stands in for ``torch.distributed``: operations of a group stand in a stream, and values travel over gloo."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__(device)
        self._sim = device
        self._transports: dict[str, Any] = {}

    def _transport(self, group: Any) -> Any:
        """gloo's of the same ranks, for the device alone: objects go over the other. Collective at first."""
        name = group.group_name
        if name not in self._transports:
            store = dist.PrefixStore(f"sim/{name}", dist.distributed_c10d._get_default_store())
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            self._transports[name] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=DEADLINE))
            self._sim._links[f"link {name}"] = ThreadPoolExecutor(1)
        return self._transports[name]

    def _issue(
        self,
        kind: str,
        group: Any,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        begin: Callable[..., Sequence[Any]],
        async_op: bool,
    ) -> _Work | None:
        for tensor in (*reads, *writes):
            assert tensor.is_cuda, "NCCL carries no tensors of the host"
            assert tensor.is_contiguous(), "NCCL carries no strides"
        group = group if group is not None else dist.group.WORLD
        transport, stream, sim = self._transport(group), f"link {group.group_name}", self._sim
        self._launched(kind)
        sim.follow(stream, sim.current)
        uses = [*(sim.use(one, False) for one in reads), *(sim.use(one, True) for one in writes)]
        sources, targets = [sim.view_of(one) for one in reads], [sim.view_of(one) for one in writes]

        def run() -> None:
            for work in begin(transport, sources, targets):
                work.wait()

        task = sim.launch(kind, run, uses, stream)
        work = _Work(sim, task)
        if async_op:
            return work
        work.wait()
        return None

    def _moves(self, kind: str, moves: Sequence[_Move]) -> _Work:
        group = moves[0].group
        group = group if group is not None else dist.group.WORLD
        reads = [one.tensor for one in moves if one.sends]
        writes = [one.tensor for one in moves if not one.sends]
        to = [dist.get_group_rank(group, one.peer) for one in moves if one.sends]
        of = [dist.get_group_rank(group, one.peer) for one in moves if not one.sends]

        def begin(transport: Any, sources: list[Tensor], targets: list[Tensor]) -> list[Any]:
            works = [transport.recv([one], peer, 0) for one, peer in zip(targets, of, strict=True)]
            return [*works, *(transport.send([one], peer, 0) for one, peer in zip(sources, to, strict=True))]

        work = self._issue(kind, group, reads, writes, begin, True)
        assert work is not None
        return work

    def isend(self, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> _Work:
        return self._moves("isend", [_Move(True, tensor, peer, group, self.isend, tag)])

    def irecv(self, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> _Work:
        return self._moves("irecv", [_Move(False, tensor, peer, group, self.irecv, tag)])

    def P2POp(self, move: Any, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:  # noqa: N802
        return _Move(move == self.isend, tensor, peer, group, move, tag)

    def batch_isend_irecv(self, moves: list[Any]) -> Any:
        return [self._moves("batch_isend_irecv", moves)]

    def all_to_all_single(
        self, output: Tensor, given: Tensor, incoming: Any, outgoing: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        incoming, outgoing = list(incoming), list(outgoing)

        def begin(transport: Any, sources: list[Tensor], targets: list[Tensor]) -> list[Any]:
            return [transport.alltoall_base(targets[0], sources[0], incoming, outgoing)]

        return self._issue("all_to_all", group, [given], [output], begin, async_op)

    def all_gather_single(self, output: Tensor, given: Tensor, group: Any = None, async_op: bool = False) -> Any:
        def begin(transport: Any, sources: list[Tensor], targets: list[Tensor]) -> list[Any]:
            parts = list(targets[0].view(-1).chunk(transport.size()))
            return [transport.allgather([parts], [sources[0].view(-1)])]

        return self._issue("all_gather", group, [given], [output], begin, async_op)

    all_gather_into_tensor = all_gather_single

    def broadcast(self, tensor: Tensor, source: int, group: Any = None, async_op: bool = False) -> Any:
        root = source if group is None else dist.get_group_rank(group, source)

        def begin(transport: Any, sources: list[Tensor], targets: list[Tensor]) -> list[Any]:
            return [transport.broadcast((targets or sources)[0], root)]

        mine = dist.get_rank(group) == root
        tensors = ([tensor], []) if mine else ([], [tensor])
        return self._issue("broadcast", group, *tensors, begin, async_op)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        def begin(transport: Any, sources: list[Tensor], targets: list[Tensor]) -> list[Any]:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            return [transport.allreduce([targets[0]], options)]

        return self._issue("all_reduce", group, [], [tensor], begin, async_op)


# --- in the place of CUDA


class Stream:
    """``torch.cuda.Stream``, and the context manager ``torch.cuda.stream``."""

    def __init__(self, device: SimDevice, name: str) -> None:
        self._device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self._device.follow(self.name, other.name)

    def wait_event(self, event: Event) -> None:
        with self._device.on(self.name):
            event.wait()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        with self._device.on(self.name):
            self._device.flush()


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, device: SimDevice, **_: Any) -> None:
        self._device = device
        self._task: Task | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._task = self._device.launch("event", _nothing, stream=stream.name if stream else None)

    def wait(self, stream: Stream | None = None) -> None:
        with self._device.on(stream.name if stream else self._device.current):
            if self._task is not None:
                self._device.join(self._task)

    def query(self) -> bool:
        return self._task is None or self._task.done

    def synchronize(self) -> None:
        if self._task is not None:
            self._device.finish(self._task)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def _pinned(tensor: Tensor, *_: Any) -> Tensor:
    """A copy that a device reads when it comes to it, and not when it is asked to."""
    tensor = tensor.clone()
    tensor.is_pinned_here = True  # pyright: ignore
    return tensor


@contextmanager
def sim_cuda(order: str = "random", seed: int = 0, idle: float = IDLE) -> Iterator[SimDevice]:
    """An asynchronous ``cuda`` device of this process, or of this rank; see `SimDevice`."""
    device = SimDevice(order, seed, idle)
    made = iter(range(1 << 30))
    with ExitStack() as stack:
        stack.callback(device.close)
        messages = SimMessages(device)
        for owner, name, stand_in in (
            (Tensor, "record_stream", lambda tensor, stream: device.record_stream(tensor, stream)),
            (torch.cuda, "Stream", lambda *_, **__: Stream(device, f"stream {next(made)}")),
            (torch.cuda, "Event", lambda **named: Event(device, **named)),
            (torch.cuda, "current_stream", lambda *_: Stream(device, device.current)),
            (torch.cuda, "stream", lambda stream: device.on(stream.name)),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(cuda(device, messages))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pinned))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", device.synchronize))
        yield device
        device.synchronize()
        device._bury()

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
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..config import AXES, REPLICAS, ParallelConfig
from ..errors import ConfigError
from . import Hosts, Link, PeerError, RequestState, SharedChannel, SharedMemory, Traffic, find_hosts, possible
from .backends import backend_of, carries_none, device_of_rank, group_options
from .gloo import new_group
from .objects import gather_objects
from .watcher import FailureWatcher, Notice
from .whereabouts import Whereabouts

# Seconds a collective may wait for a missing rank.
DEFAULT_DEADLINE = 600.0
# Seconds. NCCL counts from the moment an operation is queued, behind all earlier work of its device, so that a shorter
# deadline would end jobs with long steps. The failure watcher reports failed ranks without it.
LEAST_ON_NCCL = 300.0
# Deadline of receives that may never be answered, such as the failure watcher's.
ENDLESS = timedelta(days=10_000)
# Links of a mesh, and the axes on which their ranks differ.
LINKS: dict[str, tuple[str, ...]] = {
    "world": AXES,
    "batch": ("data", "cfg"),
    "data": ("data",),
    "cfg": ("cfg",),
    "pipe": ("pipe",),
    # What flows back to the first stage has a group of its own: on NCCL a pair of ranks that both wait to receive from
    # one another in one group would wait for ever.
    "pipe_back": ("pipe",),
    "ring": ("ring",),
    "ulysses": ("ulysses",),
    "sequence": ("ring", "ulysses"),
    "tensor": ("tensor",),
    # What `Mesh.data_group` has in place of world and data.
    "group": AXES[1:],
    # Ranks that hold a part each of equal weights: of those that differ on these axes, so many neighbours.
    "shard": REPLICAS,
    "alone": (),
}

# Axes of ranks that hold the same weights, each with a part of their gradient.
AVERAGED = ("data", "ring", "ulysses")

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


def _current(device: torch.device | str | None) -> torch.device:
    """The device of this rank, which is its current one from now on."""
    device = device_of_rank() if device is None else torch.device(device)
    if device.type != "cuda":
        return device
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index != torch.cuda.current_device():
        # Else torch would make this rank's communicators on the first GPU, as those of all ranks.
        torch.cuda.set_device(device)
    return device


def _links_of(config: ParallelConfig) -> list[str]:
    # Without a data axis the group is the world.
    some = {"group": config.data > 1, "shard": config.shard > 1}
    return [name for name in LINKS if some.get(name, True)]


def check_ranks(config: ParallelConfig) -> None:
    """Refuse a configuration of several ranks in a process that has joined no others.

    Raises:
        ConfigError: with the ways to start ranks.
    """
    if config.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{config.describe()} is for {config.world_size} ranks, but this process has joined no others; start it "
            f"with `torchrun --nproc-per-node {config.world_size}` and call init_from_environment() of ditmesh.launch "
            f"before the pipeline is loaded, or use `ditmesh generate --devices {config.world_size}`"
        )


class Mesh:
    """The ranks of one configuration, laid out as a grid of axes, with one `Link` per axis.

    Attributes:
        config: the configuration it was made from.
        device: the device this rank computes on.
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
        timeout: float = DEFAULT_DEADLINE,
        links: Mapping[str, Link] | None = None,
    ) -> None:
        """Build the groups. A collective call: every rank of the job makes the same one.

        Args:
            config: degrees of the axes; they must multiply to the world size.
            device: where this rank's tensors live; default: the current CUDA device when the process group
                runs on NCCL, else the CPU.
            timeout: deadline of every collective, in seconds; on NCCL for ranks to meet, and for collectives at least
                `LEAST_ON_NCCL`.
            links: by attribute name, of a mesh of this process alone; its other links have one rank. No group is built.

        Raises:
            ConfigError: the degrees do not multiply to the world size, or no process group exists though
                more than one rank is asked for; or, on all ranks alike, one of them computes where its process group
                or the configuration does not work.
        """
        initialised = links is None and dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if initialised else 1
        if links is None:
            check_ranks(config)
        if links is None:
            config.check_world_size(world_size)
        self.config = config
        self._process = os.getpid()
        self.device = _current(device) if initialised else torch.device(device or "cpu")
        self.rank, self.world_size = dist.get_rank() if initialised else 0, world_size
        self.traffic = Traffic() if links is None else next(iter(links.values())).traffic
        self.hosts = Hosts.single(world_size)
        self._deadline = timedelta(seconds=timeout)
        self._groups: list[dist.ProcessGroup] = []
        # Peers see the closed connections of a rank that gives its gloo groups up; other backends need the watcher.
        self._over_gloo = True
        self._watcher: FailureWatcher | None = None
        # The watcher's thread aborts groups that this thread makes and destroys.
        self._lock = threading.Lock()
        # The group of `gradient_group`, once made.
        self._averaging: list[dist.ProcessGroup] = []
        self._memory: SharedMemory | None = None
        self._control: dist.ProcessGroup | None = None
        self._state = RequestState()
        self._outcome = _FINE
        # Why no boundary can be reached any more.
        self._broken: str | None = None
        self._depth = 0
        self._renewed: list[Callable[[], None]] = []
        # The ranks that meet at a boundary.
        self._peers: Sequence[int] = range(world_size)
        self._state.peers = self._peers
        if links is not None:
            self._links = {name: links.get(name) or Link(name, [0], 0, self.traffic) for name in LINKS}
        else:
            self._links = {name: self._link(name) for name in _links_of(config)}
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        every = self._links
        self.world, self.batch, self.data, self.cfg = every["world"], every["batch"], every["data"], every["cfg"]
        self.pipe, self.pipe_back, self.tensor = every["pipe"], every["pipe_back"], every["tensor"]
        self.ring, self.ulysses, self.sequence = every["ring"], every["ulysses"], every["sequence"]
        self.shard = every.get("shard", every["alone"])

    def data_group(self) -> Mesh:
        """The mesh of the ranks that have this one's place on the data axis; they alone meet at its boundaries.

        Without the others they cannot renew their links, so that a failed request breaks it. Its rank, world size, byte
        counters and `close` are the whole mesh's.
        """
        group = copy.copy(self)
        group.world, group.batch = self._links.get("group", self.world), self.cfg
        group.data, group._peers, group._renewed = self._links["alone"], group.world.ranks, []
        return group

    def shares_weights_as(self, config: ParallelConfig) -> bool:
        """True if `shard` joins the ranks that a configuration says."""
        return (self.config.shard, self.config.replicas) == (config.shard, config.replicas)

    @property
    def gradient_group(self) -> dist.ProcessGroup | None:
        """The process group over which gradients are averaged: the ranks of the data and sequence axes.

        They hold the same weights. For `DistributedDataParallel` and ``DeviceMesh.from_group``; it stays until `close`.
        None for one rank. Made when it is first asked for, which is a collective call of all ranks of the job.
        """
        if not self._averaging and self.config.size_of(AVERAGED) > 1:
            self._averaging.append(self._new_subgroup(self.config.groups(AVERAGED)))
        return self._averaging[0] if self._averaging else None

    def new_host_group(self, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """A gloo group of all ranks of the job for the caller alone, who destroys it. A collective call.

        For what exchanges at a pace of its own, such as a thread. None for a process that is no rank of a job.

        Args:
            timeout: deadline of its collectives; default: the mesh's.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = new_group(backend="gloo", timeout=timeout or self._deadline)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _new_subgroup(self, sets: list[list[int]]) -> dist.ProcessGroup:
        """A process group of each of these sets of ranks, of which this rank is in one.

        A collective call: all ranks make all of them, in one order.
        """
        options, mine, timeout = group_options(self.device), None, self._deadline
        if backend_of(None, self.device) == "nccl":
            timeout = max(timeout, timedelta(seconds=LEAST_ON_NCCL))
        for ranks in sets:
            group = new_group(ranks, timeout=timeout, **options)
            if self.rank in ranks:
                mine = group
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    def _keeps_order(self, name: str) -> bool:
        """True if messages of a link keep an order of their own, or are long under way: it shares no process group.

        NCCL carries what one group is given in that order: stages post theirs in another order than the sums of all
        ranks, and what is to travel beside the computation would hold up what is waited for.
        """
        return name in ("pipe", "pipe_back", "shard") or (name == "ring" and self.config.exchange == "displaced")

    def _sets(self, name: str) -> list[list[int]]:
        return self.config.shard_groups() if name == "shard" else self.config.groups(LINKS[name])

    def _link(self, name: str) -> Link:
        ranks = next(ranks for ranks in self._sets(name) if self.rank in ranks)
        return Link(name, ranks, ranks.index(self.rank), self.traffic, self._state)

    def _connect(self) -> None:
        """Make the process group and shared memory of every link. Collective over all ranks."""
        if self.world_size == 1:
            return
        if self._control is None:
            # Between hosts, also where the tensors travel between GPUs.
            self._control = self.new_host_group()
            self.agree(self._misplaced())
            self.hosts = find_hosts(self._control, possible(self.world_size))
            self._state.whereabouts = Whereabouts(self.rank, self.world_size)
            # Also for a mesh that was dropped without `close`.
            weakref.finalize(self._state, self._state.whereabouts.close).atexit = False
        if self.config.shared_memory and self.device.type == "cpu" and self.hosts.shares:
            near = self.hosts.near[self.rank]
            self._memory = SharedMemory(len(self._links), self._deadline, self._state, self._control, near)
        firsts = self._join_links()
        self._over_gloo = all(backend_of(group, self.device) == "gloo" for group in self._groups)
        if not self._over_gloo and self._watcher is None:
            ring = self.new_host_group(ENDLESS)
            assert ring is not None
            self._watcher = FailureWatcher(ring, self._receive_notice)
        # A group is there for one rank while another still connects, and would be lost if the first one failed now.
        dist.barrier(group=self._control)
        # After a failure these are new links.
        self._state.refusal = None
        for link in firsts:
            onward = [*pairwise(range(link.size))]
            # Predictions go back to the first stage, gradients to the one before.
            backward = dict.fromkeys([(link.size - 1, 0), *((later, one) for one, later in onward)])
            singly = {"pipe": onward, "pipe_back": [*backward]}
            link.connect_peers(self.device, self._deadline, singly.get(link.name, ()))

    def _join_links(self) -> list[Link]:
        """Give every link a process group, one for each set of ranks; the first link of every group."""
        memory = self._memory
        # Not the default group for the world: after a failure it could be neither given up nor made again.
        made: dict[tuple[str, str], dist.ProcessGroup] = {}
        firsts: list[Link] = []
        for number, (name, link) in enumerate(self._links.items()):
            if link.size > 1:
                sets = self._sets(name)
                key = name if self._keeps_order(name) else "", str(sets)
                if key not in made:
                    made[key] = self._new_subgroup(sets)
                    with self._lock:
                        self._groups.append(made[key])
                    firsts.append(link)
                hosts = self.hosts.numbers
                here = [rank for rank in link.ranks if hosts[rank] == hosts[self.rank]]
                joined = len(here) > 1 and self.hosts.joins(here)
                shared = SharedChannel(memory, number, link.ranks) if memory and joined else None
                link.connect(made[key], shared, [hosts[rank] for rank in link.ranks], self.device)
        return firsts

    def agree(self, refusal: str) -> None:
        """Refuse something on all ranks if one of them does, before any of them begins. A collective call.

        Args:
            refusal: this rank's, a sentence; empty: it has none.

        Raises:
            ConfigError: the first refusal, the same sentence on all ranks.
        """
        every = [refusal] if self.world_size == 1 else gather_objects(refusal, self._control)
        first = next((rank for rank, said in enumerate(every) if said), None)
        if first is not None:
            alone = not all(every)
            raise ConfigError(f"rank {first}: {every[first]}" if alone else every[first])

    def check_device(self, device: torch.device | None) -> None:
        """Refuse, on all ranks alike, a model that computes on another kind of device. A collective call.

        Args:
            device: the model's; None: it has no weights.

        Raises:
            ConfigError: on all ranks alike.
        """
        self.agree(self.misfit(device))

    def misfit(self, device: torch.device | None) -> str:
        """The reason why a model on this device cannot run on this rank of the mesh; empty: it can."""
        if self.world_size == 1 or device is None or device.type == "meta":
            return ""
        indices = {device.index, self.device.index} - {None}
        if device.type == self.device.type and len(indices) < 2:
            return ""
        return (
            f"the model is on {device}, and its mesh on {self.device}; move the model to its rank's device before the "
            "mesh is made, or restore it, move it and parallelize it again"
        )

    def _misplaced(self) -> str:
        """The reason why this rank's device does not fit its process group or the configuration; empty: it does."""
        kind = self.device.type
        if not backend_of(None, self.device):
            return carries_none(kind)
        waits = self.config.pipe > 1 or self.config.exchange == "displaced"
        if kind == "cuda" and waits and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            which = "pipe" if self.config.pipe > 1 else "exchange='displaced'"
            return (
                f"{which} needs exchanges to run beside computation, and CUDA_DEVICE_MAX_CONNECTIONS=1 puts them into "
                "one queue with it, where they can wait for one another for ever; unset it"
            )
        return ""

    # --- boundaries ----------------------------------------------------------------------------------------

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
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
                self._state.report()
        except BaseException:
            self.fail_request()
            raise
        finally:
            self._depth -= 1

    def begin_request(self, purpose: str = "a request") -> None:
        """A boundary, at which all ranks synchronise. A collective call.

        If the request before has failed on any rank, process groups and shared memory are renewed; see `when_renewed`.

        Args:
            purpose: the reason for the boundary; the same on every rank (the first 104 bytes count).

        Raises:
            PeerError: a rank has not come before the deadline, or has ended: the mesh is broken, and every later call
                says so; or the ranks have come for different purposes: they may try again.
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

    def _abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Abort the operations of groups on this rank; those of gloo end when the group is destroyed."""
        if self._over_gloo or not groups:
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend: Any = groups[0]._get_backend(self.device)
        # Separate aborts of NCCL communicators can wait for one another.
        together = hasattr(backend, "_group_start")
        if together:
            backend._group_start()
        for group in groups:
            group.abort()
        if together:
            backend._group_end()

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
            sentence = f"rank {rank} {what if late else 'has ended or has given up'}{when}"
            raise self._break(f"{self._state.in_vain(sentence) if late else sentence}; {_WAY_OUT}") from error
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

    def _destroy(self, groups: list[dist.ProcessGroup]) -> None:
        """Give groups up on this rank alone."""
        with self._lock:
            # Before buffers are dropped: until the abort, a collective that a peer never joined may write to them.
            self._abort(groups)
            if groups is self._groups:
                for link in self._links.values():
                    link.drop()
            while groups:
                dist.destroy_process_group(groups.pop())

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
            if self._state.whereabouts is not None:
                self._state.whereabouts.close()
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
        if self._state.whereabouts is not None:
            self._state.whereabouts.close()
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

"""The grid of a job's ranks: which rank is where, and the process groups and shared memory of its axes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..config import AXES, REPLICAS, ParallelConfig
from ..errors import ConfigError
from .backends import backend_of, carries_none, device_of_rank, group_options
from .hosts import Hosts, find_hosts
from .link import Link
from .objects import gather_objects
from .shared import SharedChannel, SharedMemory, possible
from .state import RequestState, Traffic

# Seconds. NCCL counts from the moment an operation is queued, behind all earlier work of its device, so that a shorter
# deadline would end jobs with long steps. The failure watcher reports failed ranks without it.
LEAST_ON_NCCL = 300.0
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


def _current(device: torch.device | str | None) -> torch.device:
    """The device of this rank, which is its current one from now on."""
    device = device_of_rank() if device is None else torch.device(device)
    if device.type in ("cpu", "meta"):
        return device
    if device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    if device.index != torch.accelerator.current_device_index():
        # Else torch would make this rank's communicators on the first GPU, as those of all ranks.
        torch.accelerator.set_device_index(device)
    return device


def check_ranks(config: ParallelConfig) -> None:
    """Refuse several ranks in a process that has joined no others: `ConfigError` with the ways to start them."""
    if config.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{config.describe()} is for {config.world_size} ranks, but this process has joined no others; start it "
            f"with `torchrun --nproc-per-node {config.world_size}` and call init_from_environment() of ditmesh.launch "
            f"before the pipeline is loaded, or use `ditmesh generate --devices {config.world_size}`"
        )


class RankGrid:
    """The ranks of one configuration on its axes, with one `Link` per axis. Attributes and arguments as of `Mesh`."""

    def __init__(
        self,
        config: ParallelConfig,
        device: torch.device | str | None,
        timeout: float,
        links: Mapping[str, Link] | None,
    ) -> None:
        initialised = links is None and dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if initialised else 1
        if links is None:
            check_ranks(config)
            config.check_world_size(world_size)
        self.config = config
        self.device = _current(device) if initialised else torch.device(device or "cpu")
        self.rank, self.world_size = dist.get_rank() if initialised else 0, world_size
        self.traffic = Traffic() if links is None else next(iter(links.values())).traffic
        self.hosts = Hosts.single(world_size)
        self._process = os.getpid()
        self._deadline = timedelta(seconds=timeout)
        self._groups: list[dist.ProcessGroup] = []
        # The group of `gradient_group`, once made.
        self._averaging: list[dist.ProcessGroup] = []
        # Between hosts, also where the tensors travel between GPUs.
        self._control: dist.ProcessGroup | None = None
        # Peers see the closed connections of a rank that gives its gloo groups up; other backends need the watcher.
        self._over_gloo = True
        self._memory: SharedMemory | None = None
        self._state = RequestState()
        # The failure watcher's thread aborts groups that this thread makes and destroys.
        self._lock = threading.Lock()
        # Without a data axis the group is the world.
        some = {"group": config.data > 1, "shard": config.shard > 1}
        every = self._links = (
            {name: self._link(name) for name in LINKS if some.get(name, True)}
            if links is None
            else {name: links.get(name) or Link(name, [0], 0, self.traffic) for name in LINKS}
        )
        self.world, self.batch, self.data, self.cfg = every["world"], every["batch"], every["data"], every["cfg"]
        self.pipe, self.pipe_back, self.tensor = every["pipe"], every["pipe_back"], every["tensor"]
        self.ring, self.ulysses, self.sequence = every["ring"], every["ulysses"], every["sequence"]
        self.shard = every.get("shard", every["alone"])

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
        ``timeout``: deadline of its collectives; default: the mesh's.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.new_group(backend="gloo", timeout=timeout or self._deadline)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _new_subgroup(self, sets: list[list[int]]) -> dist.ProcessGroup:
        """A process group of each of these sets of ranks, of which this rank is in one.

        A collective call: all ranks make all of them, in one order.
        """
        options, mine, timeout = group_options(self.device), None, self._deadline
        if backend_of(None, self.device) not in ("", "gloo"):
            timeout = max(timeout, timedelta(seconds=LEAST_ON_NCCL))
        for ranks in sets:
            group = dist.new_group(ranks, timeout=timeout, **options)
            if self.rank in ranks:
                mine = group
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    def _sets(self, name: str) -> list[list[int]]:
        return self.config.shard_groups() if name == "shard" else self.config.groups(LINKS[name])

    def _link(self, name: str) -> Link:
        ranks = next(ranks for ranks in self._sets(name) if self.rank in ranks)
        return Link(name, ranks, ranks.index(self.rank), self.traffic, self._state)

    def _meet_hosts(self) -> None:
        """Make the group over which ranks meet, and find out which of them share a host. Collective over all ranks."""
        self._control = self.new_host_group()
        self.agree(self._misplaced())
        self.hosts = find_hosts(self._control, possible(self.world_size))

    def _join_links(self) -> list[Link]:
        """Give every link a process group, one for each set of ranks; the first link of every group. Collective."""
        if self.config.shared_memory and self.device.type == "cpu" and self.hosts.shares:
            near = self.hosts.near[self.rank]
            self._memory = SharedMemory(len(self._links), self._deadline, self._state, self._control, near)
        memory = self._memory
        # Not the default group for the world: after a failure it could be neither given up nor made again.
        groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        firsts: list[Link] = []
        for number, (name, link) in enumerate(self._links.items()):
            if link.size > 1:
                sets = self._sets(name)
                # NCCL carries what one group is given in that order: stages post theirs in another order than the sums
                # of all ranks, and what is to travel beside the computation would hold up what is waited for.
                apart = name in ("pipe", "pipe_back", "shard") or (
                    name == "ring" and self.config.exchange == "displaced"
                )
                key = name if apart else "", str(sets)
                if key not in groups:
                    groups[key] = self._new_subgroup(sets)
                    with self._lock:
                        self._groups.append(groups[key])
                    firsts.append(link)
                shared = SharedChannel(memory, number, link.ranks) if memory and self.hosts.joins(link.ranks) else None
                link.connect(groups[key], shared, self.device)
        self._over_gloo = all(backend_of(group, self.device) == "gloo" for group in self._groups)
        return firsts

    def _connect_peers(self, firsts: Sequence[Link]) -> None:
        """Connect all pairs of ranks of every group, of which each has one of these links."""
        for link in firsts:
            onward = [*pairwise(range(link.size))]
            # Predictions go back to the first stage, gradients to the one before.
            backward = dict.fromkeys([(link.size - 1, 0), *((later, one) for one, later in onward)])
            singly = {"pipe": onward, "pipe_back": [*backward]}
            link.connect_peers(self.device, self._deadline, singly.get(link.name, ()))

    def agree(self, refusal: str) -> None:
        """Refuse something on all ranks if one of them does, before any of them begins. A collective call.

        ``refusal``: this rank's, a sentence; empty: it has none. `ConfigError`: the first refusal, the same sentence on
        all ranks.
        """
        every = [refusal] if self.world_size == 1 else gather_objects(refusal, self._control)
        first = next((rank for rank, said in enumerate(every) if said), None)
        if first is not None:
            alone = not all(every)
            raise ConfigError(f"rank {first}: {every[first]}" if alone else every[first])

    def check_device(self, device: torch.device | None) -> None:
        """Refuse, on all ranks alike, a model that computes on another kind of device. A collective call.

        ``device``: the model's; None: it has no weights.
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

    def _abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Abort the operations of groups on this rank; those of gloo end when the group is destroyed."""
        if self._over_gloo or not groups:
            return
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)
        backend: Any = groups[0]._get_backend(self.device)
        # Separate aborts of NCCL communicators can wait for one another.
        together = hasattr(backend, "_group_start")
        if together:
            backend._group_start()
        for group in groups:
            group.abort()
        if together:
            backend._group_end()

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

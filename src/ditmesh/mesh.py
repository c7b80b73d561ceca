"""Axes of a `ParallelConfig` to process groups.

A `Mesh` is passed to whoever needs it and never looked up: several can live in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from .comm import Link, SharedChannel, SharedMemory, Traffic
from .config import AXES, ParallelConfig
from .errors import ConfigError

# Seconds a collective may wait for a rank that does not come.
DEFAULT_DEADLINE = 600.0
# Links of a mesh.
LINK_NAMES = ("world", "batch", "data", "cfg", "pipe", "pipe_back", "ring", "ulysses", "sequence", "tensor")
# And those of `Mesh.data_group`.
LINKS = len(LINK_NAMES) + 2


class Mesh:
    """The ranks of one configuration, laid out as a grid of axes, with one `Link` per axis.

    Attributes:
        config: the configuration it was made from.
        device: the device this rank computes on.
        traffic: bytes this rank has sent, by axis.
        world: link over all ranks.
        batch: link over the data and cfg axes, which both share out rows.
        data, cfg: links of the two alone.
        pipe: link of the stages; stage = its rank. pipe_back: the same ranks, for what the last stage sends back.
        ring, ulysses: links of the two sequence axes.
        sequence: link over both of them; sequence rank = ring rank × ulysses degree + ulysses rank.
        tensor: link of the ranks that share weights.
    """

    def __init__(
        self,
        config: ParallelConfig,
        device: torch.device | str | None = None,
        timeout: float = DEFAULT_DEADLINE,
    ) -> None:
        """Build the groups. A collective call: every rank of the job makes the same one.

        Args:
            config: degrees of the axes; they must multiply to the world size.
            device: where this rank's tensors live; default: the current CUDA device when the process group
                runs on NCCL, else the CPU.
            timeout: deadline of every collective, in seconds.

        Raises:
            ConfigError: the degrees do not multiply to the world size, or no process group exists though
                more than one rank is asked for.
        """
        self.config = config
        self.traffic = Traffic()
        self._groups: list[dist.ProcessGroup] = []
        initialised = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if initialised else 1
        if config.world_size > 1 and not initialised:
            raise ConfigError(
                f"{config.describe()} is for {config.world_size} ranks, but this process runs alone; start it with "
                f"`torchrun --nproc-per-node {config.world_size}` and call torch.distributed.init_process_group(), "
                f"or use `ditmesh generate --devices {config.world_size}`"
            )
        config.check_world_size(world_size)
        if device is None:
            on_nccl = initialised and "nccl" in str(dist.get_backend())
            device = torch.device("cuda", torch.cuda.current_device()) if on_nccl else torch.device("cpu")
        self.device = torch.device(device)
        self.rank = dist.get_rank() if initialised else 0
        self.world_size = world_size
        self._deadline = timedelta(seconds=timeout)
        self._links = 0
        self._memory: SharedMemory | None = None
        if config.shared_memory and world_size > 1 and self.device.type == "cpu":
            self._memory = SharedMemory(LINKS, self._deadline)
        self._ranks = torch.arange(world_size).reshape(tuple(config.degrees.values()))
        self.world = self._link("world", AXES)
        self.batch = self._link("batch", ("data", "cfg"))
        self.data = self._link("data", ("data",))
        self.cfg = self._link("cfg", ("cfg",))
        self.pipe = self._link("pipe", ("pipe",))
        # What flows back to the first stage has a group of its own: on NCCL a pair of ranks that both wait to
        # receive from one another in one group would wait for ever.
        self.pipe_back = self._link("pipe_back", ("pipe",))
        self.ring = self._link("ring", ("ring",))
        self.ulysses = self._link("ulysses", ("ulysses",))
        self.sequence = self._link("sequence", ("ring", "ulysses"))
        self.tensor = self._link("tensor", ("tensor",))
        # What `data_group` has in place of world and data.
        self._group = self._link("group", AXES[1:]) if config.data > 1 else self.world
        self._alone = self._link("alone", ())

    def data_group(self) -> Mesh:
        """The ranks that have this one's place on the data axis, as a mesh without that axis.

        Its ``world`` are those ranks. Its rank, world size, byte counters and `close` are the whole mesh's.
        """
        group = copy.copy(self)
        group.world, group.batch, group.data = self._group, self.cfg, self._alone
        return group

    @classmethod
    def from_links(
        cls, config: ParallelConfig, device: torch.device | str, traffic: Traffic, links: Mapping[str, Link]
    ) -> Mesh:
        """The mesh of a process that runs alone, with links that somebody else has made; no collective call.

        Args:
            config: the configuration that the links are for.
            device: where this rank's tensors live.
            traffic: what the links count in.
            links: by attribute name; all others link this process with nobody.
        """
        mesh = cls.__new__(cls)
        mesh._hold(config, torch.device(device), 0, 1, traffic, links)
        return mesh

    def _hold(
        self,
        config: ParallelConfig,
        device: torch.device,
        rank: int,
        world_size: int,
        traffic: Traffic,
        links: Mapping[str, Link],
    ) -> None:
        self.config, self.device, self.traffic = config, device, traffic
        self.rank, self.world_size = rank, world_size
        self._groups, self._memory = [], None
        for name in LINK_NAMES:
            setattr(self, name, links.get(name) or Link(name, None, [rank], 0, traffic))

    def _link(self, name: str, axes: tuple[str, ...]) -> Link:
        """The group of ranks that differ from this one only on ``axes``.

        Every rank creates every group, in the same order, as `torch.distributed.new_group` demands.
        """
        inner = [AXES.index(axis) for axis in axes]
        outer = [dim for dim in range(len(AXES)) if dim not in inner]
        mine: dist.ProcessGroup | None = None
        members: list[int] = []
        assert inner == sorted(inner), "torch numbers the ranks of a group in ascending order"
        for ranks in self._ranks.permute(*outer, *inner).reshape(-1, self.config.size_of(axes)).tolist():
            if self.rank in ranks:
                members = ranks
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=self._deadline)
                if self.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    mine = group
                    self._groups.append(group)
        number, self._links = self._links, self._links + 1
        shared = None
        if self._memory is not None and self._memory.joins(members):
            shared = SharedChannel(self._memory, number, members)
        return Link(name, mine, members, members.index(self.rank), self.traffic, shared)

    def close(self) -> None:
        """Give process groups and shared memory back. A collective call; the default process group stays."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def __repr__(self) -> str:
        return f"Mesh({self.config.describe()}, rank {self.rank} of {self.world_size}, {self.device})"

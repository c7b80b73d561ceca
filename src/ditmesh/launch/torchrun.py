"""Ranks that ``torchrun`` has started: joined, never started or ended here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError, RankFailed
from .backend import Launcher, OnMessage, Watch
from .devices import check_timeout, join_default_group, resolve_device, use_loopback
from .failures import lost_peer
from .log_filter import hide_chatter
from .meeting import Meeting, join_error, meet

if TYPE_CHECKING:
    import torch

# Seconds for the rank that has failed to end before those that have only lost it.
EXIT_SECONDS = 10.0

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class TorchrunRank(NamedTuple):
    """The rank that this process is among all ranks, and among those of this machine, as ``torchrun`` says."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    # Whether all ranks are on this machine, as far as is known.
    alone: bool


def torchrun_rank() -> TorchrunRank | None:
    """The rank that this process is; None when ``torchrun`` (or something like it) has not started it.

    ``RANK`` and ``WORLD_SIZE`` without ``LOCAL_RANK`` are what a scheduler sets for a machine, not a rank.
    `ConfigError`: one of the variables is not a number.
    """
    values = {name: os.environ[name] for name in (*RANK_VARIABLES, "LOCAL_WORLD_SIZE") if name in os.environ}
    if not values.keys() >= {*RANK_VARIABLES}:
        return None
    for name, value in values.items():
        if not (value.isascii() and value.isdigit()):
            names = ", ".join(RANK_VARIABLES)
            raise ConfigError(f"{name}={value!r} is not a number; start this with torchrun, or unset {names}")
    rank, world_size, local_rank = (int(values[name]) for name in RANK_VARIABLES)
    # Without it all may be here, or on other hosts: then the address at which they meet shows it.
    local_size = int(values.get("LOCAL_WORLD_SIZE", local_rank + 1))
    alone = "LOCAL_WORLD_SIZE" in values and local_size == world_size
    return TorchrunRank(rank, world_size, local_rank, local_size, alone)


def from_torchrun() -> bool:
    """True if this process is a rank that ``torchrun`` (or something like it) has started."""
    return torchrun_rank() is not None


def init_from_environment(timeout: float = 600.0, device: str = "auto", quiet: bool = True) -> torch.device:
    """Join the process group that ``torchrun`` describes in the environment, if needed; returns this rank's device.

    Args:
        timeout: deadline of every collective, in seconds.
        device: see `RankPool`.
        quiet: hide what torch, diffusers and others say to nobody's use while they are imported, and show the bars of
            loading on rank 0 only. For what is imported later.

    Raises:
        ConfigError: this process is not a rank of torchrun, or the device is not there.
        MeetingError: the ranks could not connect in time, or their versions differ.
    """
    if quiet:
        hide_chatter()
    place = _join(timeout, device)[0]
    there = torchrun_rank()
    if quiet and there is not None and there.rank > 0:
        from transformers.utils.logging import disable_progress_bar

        # diffusers' own bars are on rank 0 alone.
        disable_progress_bar()
    return place


def _join(timeout: float, device: str) -> tuple[torch.device, Meeting | None]:
    """`init_from_environment`; how the ranks have met, if they have done so here."""
    import torch.distributed as dist

    place = torchrun_rank()
    if place is None:
        raise ConfigError("RANK, WORLD_SIZE and LOCAL_RANK are not set; start this with `torchrun --nproc-per-node N`")
    check_timeout(timeout)
    if not dist.is_initialized():
        if place.rank >= place.world_size:
            raise ConfigError(f"RANK={place.rank} is none of WORLD_SIZE={place.world_size} ranks; start with torchrun")
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if absent:
            raise ConfigError(
                f"{' and '.join(absent)}, by which ranks find one another, {'is' if len(absent) == 1 else 'are'} not "
                f"set; start this with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK"
            )
    kind = resolve_device(device, place.local_size)
    if place.alone:
        use_loopback()
    # A process that has joined already does not meet again.
    met = None if dist.is_initialized() else meet(place.rank, place.world_size, timeout)
    rendezvous = "env://" if met is None else met.store
    try:
        return join_default_group(kind, place.rank, place.world_size, place.local_rank, timeout, rendezvous), met
    except RuntimeError as error:
        raise join_error(place.rank, error) from error


class TorchrunRanks(Launcher):
    """The ranks that ``torchrun`` has started: every one of them makes this and calls it alike.

    A call runs in this process; answers are gathered. What fails raises here as it is: torchrun ends the other ranks.
    Only where another rank is missed, and says nothing any more, `RankFailed` names it.
    """

    def __init__(
        self, world_size: int, device: str = "auto", threads: int | None = None, timeout: float = 600.0
    ) -> None:
        """Join the process group; see `init_from_environment`. There have to be ``world_size`` ranks."""
        import torch
        import torch.distributed as dist

        there = torchrun_rank()
        if there is not None and there.world_size != world_size:
            raise ConfigError(
                f"torchrun has started {there.world_size} ranks, and {world_size} are asked for; start {world_size} "
                f"with torchrun --nproc-per-node {world_size}"
            )
        self._leaves = not dist.is_initialized()
        place, met = _join(timeout, device)
        self.device = place.type
        self._heartbeat = None if met is None or world_size == 1 else met.heartbeat()
        if threads is not None:
            torch.set_num_threads(threads)
        self.world_size, self.threads = world_size, torch.get_num_threads()
        self.is_reporter = dist.get_rank() == 0

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline: float | None = None,
        on_message: OnMessage | None = None,
        watch: Watch | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn`` in this process; see `Launcher.run`. ``on_message`` takes this rank's own reports."""
        import torch.distributed as dist

        from ..comm.objects import gather_objects

        if deadline is not None:
            # The ranks are not watched.
            raise ConfigError(f"a deadline of {deadline:g} s is not possible for ranks of torchrun; leave it out")
        if watch is not None:
            raise ConfigError("ranks of torchrun cannot be watched; use launcher 'local'")
        rank = dist.get_rank()
        if on_message is not None:
            kwargs["report"] = partial(on_message, rank)
        try:
            return gather_objects(fn(*args, **kwargs))
        except BaseException as error:
            if lost_peer(error):
                # torchrun takes the rank that ends first for the cause, and ends the others: this one takes its time.
                if self._heartbeat is None:
                    time.sleep(EXIT_SECONDS)
                elif silent := self._heartbeat.silent():
                    lost = tuple(silent)
                    raise RankFailed(self._heartbeat.describe(lost), lost[0], lost=lost) from error
            raise

    def close(self) -> None:
        """Leave the process group, if it was joined here."""
        import torch.distributed as dist

        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._leaves and dist.is_initialized():
            dist.destroy_process_group()
        self._leaves = False

"""The process of a rank: it joins, and answers calls until it is told to stop or left alone."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from .devices import join_default_group, use_loopback
from .failures import of_exception
from .heap import keep_free_memory
from .log_filter import hide_chatter
from .messages import RankChannel
from .processes import end_fork_server


@dataclass(frozen=True)
class RankSettings:
    """Settings of a rank; see `RankPool`."""

    rank: int
    world_size: int
    device: str
    gpu: int
    threads: int
    timeout: float
    # Of the owner: here ranks find one another and write where they are.
    folder: str
    # Process id of the fork server that serves this owner alone, if one does.
    server: int | None

    @property
    def stack_file(self) -> Path:
        """The file that the rank's fault handler writes to."""
        return Path(self.folder) / f"stack-{self.rank}"


def main(settings: RankSettings, connection: Connection, joins: bool) -> None:
    """Run a rank, from its first import to its end; ``joins``: before it answers calls, else when it is told to."""
    hide_chatter()
    leave_inherited()
    # The owner decides what Ctrl-C means; the terminal sends it to every process of the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        # As it is in any other process; see `processes.block_sigint`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    follower = threading.Thread(target=_follow_owner, args=(settings,), name="ditmesh-follow-owner", daemon=True)
    follower.start()
    stack_file = settings.stack_file.open("w")
    faulthandler.enable(stack_file)
    if settings.device == "cpu":
        keep_free_memory()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, stack_file)
    if not _answer_calls(settings, RankChannel(connection), joins):
        # The owner has ended, or ends this rank in a moment: the thread sees to it.
        follower.join()
    import torch.distributed as dist

    from ..comm.watcher import stop_watching

    # This process runs no exit handlers.
    stop_watching()
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_inherited() -> None:
    """Exclude the objects of the fork, half a million of libraries, from garbage collection.

    A full collection writes to the head of each object that it looks at, and so makes a copy of nearly all memory that
    this rank has in common with the fork server. Python would also make one only when a quarter as many objects are
    new as it had looked at the last time; until then, garbage of requests stays. See `gc.freeze` in Python's
    documentation.
    """
    gc.freeze()
    # Looks at next to nothing, and is the last time from now on.
    gc.collect()


def _answer_calls(settings: RankSettings, channel: RankChannel, joins: bool) -> bool:
    """Join, and answer calls; whether the owner has said that there are no more."""
    try:
        # torch may be loaded already, by the fork server: the variable is for libraries that come later.
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        use_loopback()
        import torch

        torch.set_num_threads(settings.threads)
        if joins:
            join_group(settings, "rendezvous")
    except BaseException as error:
        channel.send("failure", of_exception(settings.rank, error))
        return False
    channel.send("answer", None)
    with contextlib.suppress(EOFError, OSError):
        while _answer(settings.rank, channel):
            pass
        return True
    return False


def _answer(rank: int, channel: RankChannel) -> bool:
    """Answer the next call, of which nothing lives on; whether there was one."""
    call = channel.receive()
    try:
        request = pickle.loads(call)
        if request is None:
            return False
        if isinstance(request, bytes):
            # A reply to an earlier call, which this rank has left before it came.
            return True
        fn, args, kwargs, reports = request
        if reports:
            kwargs["report"] = channel
        channel.send("answer", fn(*args, **kwargs))
    except BaseException as error:
        # And stay, whatever it is: leaving would make the peers fail as well, and the owner may have more to run.
        channel.send("failure", of_exception(rank, error))
    return True


def _follow_owner(settings: RankSettings) -> None:
    """End this rank as soon as its owner has ended, however that happened and whatever this rank is doing."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    # A process that has another parent by now is not the server's any more, and its number may be another process's.
    if os.getppid() == settings.server:
        end_fork_server(settings.server)
    os._exit(1)


def join_group(settings: RankSettings, meeting: str) -> None:
    """Join the default process group, after leaving the one there was, with all its subgroups.

    ``meeting`` names the file by which ranks find one another, another one each time.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # A file, not a port: nothing to collide with, and no other user of the machine can connect to it.
    rendezvous = (Path(settings.folder) / meeting).as_uri()
    join_default_group(settings.device, settings.rank, settings.world_size, settings.gpu, settings.timeout, rendezvous)

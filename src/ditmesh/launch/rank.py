"""What runs in a rank: it joins, and answers calls until it is told to stop or left alone."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from .failures import of_exception
from .group import join, stay_on_loopback
from .messages import encode, receive, send


@dataclass(frozen=True)
class Settings:
    """What a rank is told when it starts.

    Attributes:
        rank, world_size: place among the ranks, and their number.
        device, gpu: what it computes on, and which.
        threads: threads of torch and of libraries.
        timeout: deadline of every collective, in seconds.
        folder: where ranks find one another and write where they are; the owner's.
        server: process id of the fork server that serves this owner alone, if one does.
    """

    rank: int
    world_size: int
    device: Literal["cpu", "cuda"]
    gpu: int
    threads: int
    timeout: float
    folder: str
    server: int | None

    @property
    def stack_file(self) -> Path:
        """Where the rank's fault handler writes."""
        return Path(self.folder) / f"stack-{self.rank}"


def main(settings: Settings, connection: Connection) -> None:
    """A rank's life."""
    # The owner decides what Ctrl-C means; the terminal sends it to every process of the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        # As it is in any other process; see `processes.ctrl_c_waits`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    follower = threading.Thread(target=_follow_owner, args=(settings,), name="ditmesh-follow-owner", daemon=True)
    follower.start()
    stack_file = settings.stack_file.open("w")
    faulthandler.enable(stack_file)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, stack_file)
    if not _answer_calls(settings, connection):
        # The owner has ended, or ends this rank in a moment: the thread sees to it.
        follower.join()
    import torch.distributed as dist

    dist.destroy_process_group()


def _answer_calls(settings: Settings, connection: Connection) -> bool:
    """Join, and answer calls; whether the owner has said that there are no more."""
    speaker = _Speaker(connection)
    try:
        _set_up(settings)
    except BaseException as error:
        speaker.send("failure", of_exception(settings.rank, error))
        return False
    speaker.send("answer", None)
    while True:
        try:
            call = receive(connection)
        except (EOFError, OSError):
            return False
        answer = _answer(settings.rank, call, speaker)
        if answer is None:
            return True
        speaker.send_bytes(answer)
        # Nothing of the last call should live until the next one.
        del call, answer


def _answer(rank: int, call: bytes, speaker: _Speaker) -> bytes | None:
    """The answer to a call, or why there is none; None: there are no more calls."""
    try:
        request = pickle.loads(call)
        if request is None:
            return None
        fn, args, kwargs, reports = request
        if reports:
            kwargs["report"] = speaker.report
        return encode(("answer", fn(*args, **kwargs)))
    except BaseException as error:
        # And stay, whatever it is: leaving would make the peers fail as well, and the owner may have more to run.
        return encode(("failure", of_exception(rank, error)))


def _follow_owner(settings: Settings) -> None:
    """End this rank as soon as its owner has ended, however that happened and whatever this rank is doing."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    # Whoever has another parent by now is not the server's any more, and its number may be another process's.
    if settings.server is not None and os.getppid() == settings.server:
        # The fork server has nobody left to serve. By itself it would take torch apart before it ends.
        with contextlib.suppress(OSError):
            os.kill(settings.server, signal.SIGKILL)
    os._exit(1)


def _set_up(settings: Settings) -> None:
    # torch may be loaded already, by the fork server: the variable is for libraries that come later.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    stay_on_loopback()
    import torch

    torch.set_num_threads(settings.threads)
    join_group(settings, "rendezvous")


def join_group(settings: Settings, meeting: str) -> None:
    """Join the default process group, after leaving the one there was, with all its subgroups.

    Args:
        settings: the rank's.
        meeting: name of the file by which ranks find one another, another one each time. A file, not a port: nothing
            to collide with, and nobody else on the machine can connect to it.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous = (Path(settings.folder) / meeting).as_uri()
    join(settings.device, settings.rank, settings.world_size, settings.gpu, settings.timeout, rendezvous)


class _Speaker:
    """What a rank tells its owner; safe from any thread of the rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        self.send_bytes(encode((kind, content)))

    def send_bytes(self, data: bytes) -> None:
        with self._lock:
            send(self._connection, data)

    def report(self, message: Any) -> None:
        """Send ``message`` to the owner's ``on_message``."""
        self.send("message", message)

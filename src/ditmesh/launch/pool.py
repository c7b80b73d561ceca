"""Ranks of this machine, on their owner's side: started, watched, ended."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RankFailed
from . import failures
from . import rank as rank_
from .backend import OnMessage
from .collect import Collector, StayingRanks
from .devices import check_timeout, default_threads, may_have_gpus, resolve_device
from .messages import OwnerChannel, encode
from .processes import block_sigint, fork_server, guarded_folder, start_fork_server, without_main_module
from .torchrun import from_torchrun

# Imported once in the fork server, so that every rank on the CPU starts with them: seconds instead of
# seconds × ranks.
PRELOAD = (
    "torch",
    "torch.distributed",
    "diffusers.pipelines.pipeline_utils",
    "transformers.modeling_utils",
    "ditmesh.generate.loading",
)

# First of all.
QUIET = f"{__package__}.quiet_process"

# Seconds.
START_SECONDS = 300.0  # for all ranks to import what they need and to find one another
JOIN_SECONDS = 10.0  # for ranks that wait for calls to join a new process group
CLOSE_SECONDS = 5.0  # for idle ranks to leave by themselves
STACK_SECONDS = 1.0  # for a rank that hangs to write down where
POLL_SECONDS = 1.0  # between looks at what is no message

GUARD_MISSING = (
    "ranks import the program's main module, which starts ranks itself; put what the program does under "
    'if __name__ == "__main__":'
)


class RankPool(StayingRanks):
    """Ranks on this machine: worker processes with a process group, for any number of calls.

    ::

        with RankPool(4) as pool:
            hashes = pool.run(generate, "a red fox")

    No process or temporary folder outlives the pool, also after a failure, after Ctrl-C, or when the owner is
    killed. A program that creates a pool needs ``if __name__ == "__main__":``, as with `multiprocessing`,
    because the ranks import its main module; a notebook does not.
    """

    is_reporter = True

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        threads: int | None = None,
        timeout: float = 600.0,
        preload: Sequence[str] = PRELOAD,
        gpus: Sequence[int] | None = None,
        import_main: bool = True,
    ) -> None:
        """Start the ranks and wait until all of them have joined.

        Args:
            device: ``"auto"`` takes GPUs when there are any, else the CPU; see `resolve_device`.
            threads: threads of each rank; default: an equal share of the physical cores (at most 8 on GPUs).
            timeout: deadline of every collective, in seconds.
            preload: modules that the fork server imports before the first rank starts (CPU only). It counts
                for the first pool of a process: the server serves them all.
            gpus: numbers of the GPUs of ranks 0, 1, …; default: rank r computes on GPU r.
            import_main: ranks import the program's main module, as `multiprocessing` has it. Without, what it defines
                travels by value, and it needs no ``if __name__ == "__main__":``.

        Raises:
            ConfigError: the device is not there, a number is out of range, or this process is itself a rank.
            RankFailed: a rank could not start.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # `multiprocessing` has started this process, which is importing the program's main module.
            raise ConfigError(GUARD_MISSING)
        if world_size < 1:
            raise ConfigError(f"{world_size} ranks are not possible; start at least 1")
        if threads is not None and threads < 1:
            raise ConfigError(f"{threads} threads per rank are not possible; use at least 1")
        check_timeout(timeout)
        if from_torchrun():
            raise ConfigError("this process is a rank of torchrun already; ranks cannot start ranks of their own")
        super().__init__()
        self.world_size = world_size
        self._owner = os.getpid()
        self.device = resolve_device(device, world_size)
        gpus = range(world_size) if gpus is None else gpus
        if len(gpus) != world_size:
            raise ConfigError(f"gpus {list(gpus)} are {len(gpus)} for {world_size} ranks; name one for each")
        self.threads = default_threads(world_size, self.device) if threads is None else threads
        self.timeout = timeout
        self.imports_main = import_main
        # By rank.
        self._processes: dict[int, Any] = {}
        self._channels: dict[int, OwnerChannel] = {}
        self._settings: list[rank_.RankSettings] = []
        # How often the ranks have joined a process group.
        self.generation = 1
        self._resources = contextlib.ExitStack()
        self._folder = Path(self._resources.enter_context(guarded_folder("ditmesh-")))
        # Registered after multiprocessing's own exit handler, so it runs before that one waits for the ranks.
        atexit.register(self.close)
        try:
            self._start(preload, gpus, import_main)
            self._collect(self._collector(START_SECONDS, "started"), joining=True)
        except BaseException as error:
            failed = isinstance(error, RankFailed)
            self._end(f"a rank could not start: {error}" if failed else "the start was broken off")
            raise

    def _start(self, preload: Sequence[str], gpus: Sequence[int], import_main: bool) -> None:
        server = None
        if self.device != "cpu":
            # CUDA does not survive a fork, and a fork server that had touched it would pass a broken copy on:
            # every rank starts from a fresh interpreter.
            context: Any = multiprocessing.get_context("spawn")
        else:
            # Ranks are forked from a server that has imported torch and diffusers but started no threads and
            # done no arithmetic: 8 ranks start in the time of one, and share the memory of the imported code.
            context = multiprocessing.get_context("forkserver")
            start_fork_server([QUIET, *preload])
            server = fork_server()
        for rank, gpu in enumerate(gpus):
            settings = rank_.RankSettings(
                rank, self.world_size, self.device, gpu, self.threads, self.timeout, str(self._folder), server
            )
            self._settings.append(settings)
            if rank < self._first:
                continue
            ours, theirs = multiprocessing.Pipe()
            # Not daemonic: a rank may start processes of its own, such as data loader workers.
            process = context.Process(
                target=rank_.main, args=(settings, theirs, self._first == 0), name=f"ditmesh-rank-{rank}"
            )
            self._channels[rank] = OwnerChannel(ours)
            # The fork server is deaf already, and may take long while it imports: waiting for it can be broken off.
            with contextlib.ExitStack() as around:
                if self.device != "cpu":
                    around.enter_context(block_sigint())
                if not import_main:
                    around.enter_context(without_main_module(process.name))
                try:
                    process.start()
                except (EOFError, ConnectionError):
                    raise RankFailed(
                        f"rank {rank} could not start: the process that ranks are forked from has ended while it "
                        "imported (it says why above); `ditmesh doctor` imports the same",
                        rank,
                    ) from None
            self._processes[rank] = process
            # Otherwise the end of the rank would not be seen as the end of its connection.
            theirs.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        return [process.pid for process in self._processes.values()]

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self.refuse_inherited()
        return super().run(fn, *args, **kwargs)

    def _call(self, call: bytes, collector: Collector) -> list[Any]:
        for channel in self._channels.values():
            # A rank that is gone is noticed, with its reason, while the answers are collected.
            channel.send(call)
        return self._collect(collector)

    def _break_off(self, on_message: OnMessage | None) -> None:
        self._kill()
        # Some work may be done and kept, and not have been heard of.
        with contextlib.suppress(BaseException):
            for rank in self._channels:
                self._hear(rank, self._collector(on_message=on_message))
        super()._break_off(on_message)

    def reply(self, content: Any) -> None:
        """Send all ranks a reply in the middle of a call, from any thread; they take it by ``report.reply()``.

        What a rank has not taken when its call ends is dropped, and so is what a closed pool is given. Raises whatever
        pickling raises.
        """
        message = encode(encode(content, main=self.imports_main))
        for channel in self._channels.values():
            channel.send(message)

    @property
    def inherited(self) -> bool:
        """True if this process is a fork of the one that has the ranks, in which it can do nothing with them."""
        return os.getpid() != self._owner

    def refuse_inherited(self) -> None:
        """Refuse to go on if this process is a fork of the one that has the ranks."""
        if self.inherited:
            raise ConfigError(
                f"these ranks belong to process {self._owner}, of which this one is a fork; call them there, or start "
                "new ones in a process that is not forked"
            )

    def close(self, reason: str = "it was closed") -> None:
        """End the ranks; ``reason`` is what `ConfigError` says to later calls."""
        if self.inherited:
            return
        if self._closed is None:
            for channel in self._channels.values():
                channel.send(encode(None))
            self._join(CLOSE_SECONDS)
        self._end(reason)

    def _join(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        for process in self._processes.values():
            process.join(max(0.0, limit - time.monotonic()))

    def _kill(self) -> None:
        """Kill the remaining ranks at once, stopped ones too."""
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
        self._join(CLOSE_SECONDS)

    def _end(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._kill()
        for channel in self._channels.values():
            channel.close(CLOSE_SECONDS)
        self._resources.close()
        atexit.unregister(self.close)

    # ---- answers and failures

    def _collect(self, collector: Collector, joining: bool = False) -> list[Any]:
        """Wait for one answer of every rank; ``joining``: without the process group that they are about to join ranks
        can do nothing else."""
        while seconds := collector.tick(time.monotonic()):
            # What ranks send, and their ends.
            heard = self._channels.keys() - collector.failed.keys()
            events: dict[Any, int] = {self._channels[rank].connection: rank for rank in heard}
            events |= {self._processes[rank].sentinel: rank for rank in heard}
            for rank in sorted({events[ready] for ready in wait([*events], min(seconds, POLL_SECONDS))}):
                self._hear(rank, collector)
        if collector.failed:
            # The others' reports so far are heard as well: they may be work that is done and kept.
            for rank in self._channels.keys() - collector.failed.keys():
                self._hear(rank, collector)
        # A program that is rank 0 itself could not join another group in the middle of its call.
        rejoin = None if joining or self._first else self._join_anew
        return collector.result(self._whereabouts, rejoin)

    def _join_anew(self) -> bool:
        """Let the ranks join a new process group: in the old one an unread message may be left."""
        name = f"rendezvous-{self.generation}"
        self.generation += 1
        try:
            for rank, channel in self._channels.items():
                channel.send(encode((rank_.join_group, (self._settings[rank], name), {}, False)))
            self._collect(self._collector(JOIN_SECONDS, "joined a new process group"), joining=True)
        except RankFailed:
            return False
        return True

    def _hear(self, rank: int, collector: Collector) -> None:
        """Read a rank's messages so far, or how it has ended."""
        channel, process = self._channels[rank], self._processes[rank]
        for data in channel.received():
            kind, content = pickle.loads(data)
            collector.take(rank, kind, content)
            if kind == "failure":
                return
        if process.is_alive() and not channel.ended:
            return
        process.join(CLOSE_SECONDS)
        collector.take(rank, "failure", failures.of_exit(rank, process.exitcode, self._stack(rank)))

    def _whereabouts(self, ranks: Sequence[int]) -> dict[int, str]:
        """The places in Python code at which the ranks are at this moment."""
        if hasattr(signal, "SIGUSR1"):
            for rank in ranks:
                with contextlib.suppress(OSError):
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
        places, limit = {}, time.monotonic() + STACK_SECONDS
        for rank in ranks:
            before, text = "", self._stack(rank)
            # Read in the middle of writing, the last thread so far would not be the main one.
            while (not text or text != before) and time.monotonic() < limit:
                time.sleep(0.05)
                before, text = text, self._stack(rank)
            # Several threads are listed; the last is the main one, which runs the calls.
            places[rank] = text.strip().rsplit("\n\n", 1)[-1] or "it did not say"
        return places

    def _stack(self, rank: int) -> str:
        """The text of the rank's fault handler, less what says nothing about the failure."""
        try:
            text = self._settings[rank].stack_file.read_text(errors="replace")
        except OSError:
            return ""
        lines, ours = [], False
        for line in text.splitlines():
            # From there outwards every rank looks the same.
            ours = (ours and line.startswith("  File")) or f'"{rank_.__file__}"' in line
            if not ours and not line.startswith("Extension modules:"):
                lines.append(line)
        return "\n".join(lines)


def begin_local_ranks(device: str, preload: Sequence[str] = PRELOAD) -> None:
    """Let what local ranks are forked from import now, beside whatever the caller does before it makes a `RankPool`.

    Does nothing where ranks are not forked: on GPUs, and in a rank of ``torchrun``.
    """
    if not from_torchrun() and (device == "cpu" or (device == "auto" and not may_have_gpus())):
        start_fork_server([QUIET, *preload])

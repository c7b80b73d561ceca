"""Start ranks on this machine, watch them, pass on their tracebacks.

Two ways to get ranks, one process group set-up:

- `RankPool` starts the ranks itself, keeps them, and runs functions on them;
- under ``torchrun`` the ranks are there already, and `init_from_environment` joins them.

A rank that fails ends the job: the others are ended at once, and the caller gets `RankFailed` with the
traceback of the rank that failed first, not of those that lost their peer because of it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from .errors import ConfigError, RankFailed

if TYPE_CHECKING:
    import torch

DeviceChoice = Literal["auto", "cpu", "cuda"]
Report = Callable[[Any], None]
OnMessage = Callable[[int, Any], None]

# Imported once in the fork server, so that every rank on the CPU starts with them: seconds instead of
# seconds × ranks.
PRELOAD = ("torch", "torch.distributed", "diffusers.pipelines.pipeline_utils", "transformers.modeling_utils")

# Seconds.
START_LIMIT = 300.0  # for all ranks to import what they need and to find one another
GRACE = 2.0  # to look for the root cause when the first failure seen looks like a consequence of another
CLOSE_LIMIT = 5.0  # for idle ranks to leave by themselves
STACK_LIMIT = 1.0  # for a rank that hangs to write down where

# What CUDA calls the failures of a device that no job can cause (cudaError_t: devices unavailable, no device, ECC and
# NVLink uncorrectable, hardware stack, contained; "unknown" is what is left of one that has fallen off the bus).
LOST_DEVICE = (
    "busy or unavailable",
    "no cuda-capable device",
    "uncorrectable",
    "hardware stack error",
    "hardware error",
    "unknown error",
)


# --------------------------------------------------------------------------------------------------
# Devices and threads


def resolve_device(device: DeviceChoice, world_size: int) -> Literal["cpu", "cuda"]:
    """``"auto"`` to what is there; refuse what is not.

    Args:
        device: ``"auto"`` takes CUDA when a GPU is there, else the CPU.
        world_size: number of ranks on this machine; each needs a GPU of its own when the device is CUDA.

    Raises:
        ConfigError: an unknown device, CUDA without a GPU, or fewer GPUs than ranks.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device!r} is unknown; use auto, cpu or cuda")
    if device == "cpu":
        return "cpu"
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        if device == "cuda":
            reason = "this torch was built without CUDA" if torch.version.cuda is None else "the driver shows no GPU"
            raise ConfigError(f"device cuda: no GPU is there ({reason}); use --device cpu, or install torch for CUDA")
        return "cpu"
    if gpus < world_size:
        raise ConfigError(
            f"{world_size} ranks need {world_size} GPUs, but {gpus} {'is' if gpus == 1 else 'are'} there; "
            f"use at most {gpus} devices, or --device cpu"
        )
    return "cuda"


def physical_cores() -> int:
    """Cores this process may use, hyper-threads of one core counted once."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    logical = sorted(os.sched_getaffinity(0))
    cores = set()
    for cpu in logical:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def default_threads(world_size: int, device: Literal["cpu", "cuda"]) -> int:
    """Threads for each of ``world_size`` ranks: the cores shared out; at most 8 where a GPU does the work."""
    share = max(1, physical_cores() // world_size)
    return min(8, share) if device == "cuda" else share


# --------------------------------------------------------------------------------------------------
# Leaving


def leave(code: int) -> NoReturn:
    """End this process, after everything that was registered for its end. For programs that are ditmesh's own.

    An idle machine would not need it. On a busy one the interpreter takes seconds to take torch apart, and a fork
    server that is still importing does not notice before it is through that its owner has gone.
    """
    atexit._run_exitfuncs()
    from multiprocessing import forkserver

    # There is no public name for it. Without it the server ends by itself, later.
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if server is not None:
        with contextlib.suppress(OSError):
            os.kill(server, signal.SIGKILL)
    for stream in (sys.stdout, sys.stderr):
        # A reader that has gone, a stream that is closed: nothing is left to be said.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Programs started meanwhile never hear Ctrl-C, which the terminal sends to all of them: their owner ends them.

    The owner hears it afterwards, or at once where it has other threads: SIGINT is blocked, which programs inherit, and
    not ignored, which would lose it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    # It would unblock SIGINT when it starts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --------------------------------------------------------------------------------------------------
# Joining a process group


def from_torchrun() -> bool:
    """Whether this process is a rank that ``torchrun`` (or something like it) has started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def init_from_environment(timeout: float = 600.0, device: DeviceChoice = "auto") -> torch.device:
    """Join the process group that ``torchrun`` describes in the environment.

    Does nothing but name the device when the process group exists already.

    Args:
        timeout: deadline of every collective, in seconds.
        device: ``"auto"`` takes CUDA when a GPU is there, else the CPU.

    Returns:
        The device of this rank.

    Raises:
        ConfigError: this process is not a rank of torchrun, or the device is not there.
    """
    if not from_torchrun():
        raise ConfigError("RANK, WORLD_SIZE and LOCAL_RANK are not set; start this with `torchrun --nproc-per-node N`")
    world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    kind = resolve_device(device, local_size)
    if local_size == world_size:
        _stay_on_loopback()
    return _join(kind, int(os.environ["RANK"]), world_size, local_rank, timeout, "env://")


def _stay_on_loopback() -> None:
    """Keep the ranks of one machine off the network: no firewall, VPN or second interface gets in the way."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def _join(
    kind: Literal["cpu", "cuda"], rank: int, world_size: int, local_rank: int, timeout: float, rendezvous: str
) -> torch.device:
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend="nccl" if kind == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if kind == "cuda" else None,
        )
    return device


# --------------------------------------------------------------------------------------------------
# The pool, as its owner sees it


class RankPool:
    """Ranks on this machine that stay: worker processes with a process group, for any number of calls.

    ::

        with RankPool(4) as pool:
            hashes = pool.run(draw, "a red fox")  # draw() is a function of an importable module

    No process outlives the pool: not after a failure, not after Ctrl-C, not when the owner is killed. A
    program that makes a pool needs ``if __name__ == "__main__":``, as every user of `multiprocessing` does,
    because the ranks import its main module.

    Attributes:
        world_size: number of ranks.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, rank r on GPU r).
        threads: threads of each rank.
        timeout: deadline of every collective of the default process group, in seconds.
        pids: process ids, in rank order.
    """

    def __init__(
        self,
        world_size: int,
        device: DeviceChoice = "cpu",
        threads: int | None = None,
        timeout: float = 600.0,
        preload: Sequence[str] = PRELOAD,
        gpus: Sequence[int] | None = None,
        folders: Sequence[str] = (),
    ) -> None:
        """Start the ranks and wait until all of them have joined.

        Args:
            world_size: number of ranks.
            device: ``"auto"`` takes CUDA when a GPU is there, else the CPU.
            threads: threads of each rank; default: the physical cores shared out (at most 8 on CUDA).
            timeout: deadline of every collective, in seconds.
            preload: modules that the fork server imports before the first rank starts (CPU only). It counts
                for the first pool of a process: the server serves them all.
            gpus: numbers of the GPUs of ranks 0, 1, …; default: rank r computes on GPU r.
            folders: temporary folders of the owner that the ranks remove when the owner was killed before it could.

        Raises:
            ConfigError: the device is not there, a number is out of range, or this process is itself a rank.
            RankFailed: a rank could not start.
        """
        if world_size < 1:
            raise ConfigError(f"{world_size} ranks are not possible; start at least 1")
        if threads is not None and threads < 1:
            raise ConfigError(f"{threads} threads per rank are not possible; use at least 1")
        if timeout <= 0:
            raise ConfigError(f"a timeout of {timeout} seconds is not possible; use more than 0")
        if from_torchrun():
            raise ConfigError("this process is a rank of torchrun already; ranks cannot start ranks of their own")
        self.world_size = world_size
        self.device: Literal["cpu", "cuda"] = resolve_device(device, world_size)
        self._gpus = tuple(range(world_size) if gpus is None else gpus)
        if len(self._gpus) != world_size:
            raise ConfigError(
                f"gpus {list(self._gpus)} are {len(self._gpus)} for {world_size} ranks; name one for each"
            )
        self.threads = default_threads(world_size, self.device) if threads is None else threads
        self.timeout = timeout
        self._closed: str | None = None
        self._lock = threading.Lock()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ditmesh-"))
        # Registered after multiprocessing's own exit handler, so it runs before that one waits for the ranks.
        atexit.register(self.close)
        try:
            self._start(preload, folders)
            self._collect(time.monotonic() + START_LIMIT, f"started within {START_LIMIT:g} s", None)
        except BaseException as error:
            self._end(
                f"a rank could not start: {error}" if isinstance(error, RankFailed) else "the start was broken off"
            )
            raise

    def _start(self, preload: Sequence[str], folders: Sequence[str]) -> None:
        if self.device == "cuda":
            # CUDA does not survive a fork, and a fork server that had touched it would pass a broken copy on:
            # every rank starts from a fresh interpreter.
            context: Any = multiprocessing.get_context("spawn")
        else:
            # Ranks are forked from a server that has imported torch and diffusers but started no threads and
            # done no arithmetic: 8 ranks start in the time of one, and share the memory of the imported code.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(list(preload))
            from multiprocessing import forkserver

            with _ctrl_c_waits():
                forkserver.ensure_running()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe(duplex=True)
            settings = _Settings(
                rank=rank,
                world_size=self.world_size,
                device=self.device,
                gpu=self._gpus[rank],
                threads=self.threads,
                timeout=self.timeout,
                folder=str(self._folder),
                folders=tuple(folders),
            )
            # Not daemonic: a rank may start processes of its own, such as data loader workers.
            process = context.Process(target=_rank_main, args=(settings, theirs), name=f"ditmesh-rank-{rank}")
            self._connections.append(ours)
            # The fork server is deaf already, and may take long while it imports: waiting for it can be broken off.
            with _ctrl_c_waits() if self.device == "cuda" else contextlib.nullcontext():
                process.start()
            self._processes.append(process)
            # Otherwise the end of the rank would not be seen as the end of its connection.
            theirs.close()

    @property
    def closed(self) -> bool:
        """Whether the pool can run nothing more."""
        return self._closed is not None

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        return [process.pid for process in self._processes]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline: float | None = None,
        on_message: OnMessage | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank at once.

        Args:
            fn: a function that can be imported by name (not a lambda, not a function inside a function).
            args: its arguments; they are pickled.
            deadline: seconds within which every rank has to answer; None: as long as the ranks like (their
                collectives have the pool's timeout all the same).
            on_message: called here, in this thread, as ``on_message(rank, message)`` for everything a
                rank reports. With it, ``fn`` gets one more argument by name, ``report``: a function that takes
                a picklable message and returns at once.
            kwargs: its keyword arguments.

        Returns:
            What every rank returned, in rank order. Return CPU tensors or plain data: results are pickled.

        Raises:
            RankFailed: a rank raised, died or missed the deadline. When its exception can be pickled, it is
                the ``__cause__``. All ranks have been ended and the pool is closed.
            ConfigError: the pool is closed.
            TypeError: ``fn`` or an argument cannot be pickled; the pool is as it was.
        """
        with self._lock:
            self._check_open()
            try:
                call = pickle.dumps((fn, args, kwargs, on_message is not None))
            except Exception as error:
                name = getattr(fn, "__qualname__", repr(fn))
                raise TypeError(
                    f"cannot send {name} and its arguments to the ranks ({error}); use a function of an "
                    f"importable module and arguments that can be pickled"
                ) from error
            try:
                for connection in self._connections:
                    # A rank that is gone is noticed, with its reason, while the answers are collected.
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        connection.send_bytes(call)
                limit = None if deadline is None else time.monotonic() + deadline
                return self._collect(limit, f"answered within {deadline:g} s" if deadline else "", on_message)
            except BaseException as error:
                self._end(str(error).split("\n", 1)[0] if isinstance(error, RankFailed) else "a call was broken off")
                raise

    def close(self) -> None:
        """End the ranks. Harmless when they are gone."""
        if self._closed is None:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send_bytes(pickle.dumps(None))
            limit = time.monotonic() + CLOSE_LIMIT
            for process in self._processes:
                process.join(max(0.0, limit - time.monotonic()))
        self._end("it was closed")

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"closed: {self._closed}" if self.closed else f"{self.threads} threads each"
        return f"RankPool({self.world_size} ranks on {self.device}, {state})"

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ConfigError(f"this RankPool is closed ({self._closed}); make a new one")

    def _end(self, reason: str) -> None:
        """Kill what is left of the ranks, at once, and remember why."""
        if self._closed is None:
            self._closed = reason
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(CLOSE_LIMIT)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    # ---- answers and failures

    def _collect(self, limit: float | None, expected: str, on_message: OnMessage | None) -> list[Any]:
        """Wait for one answer of every rank; pass messages on meanwhile.

        Args:
            limit: time on the monotonic clock; None: wait for ever.
            expected: what a rank that misses the limit has failed to do.
            on_message: receiver of the messages.
        """
        answers: dict[int, Any] = {}
        failures: list[_Failure] = []
        gone: set[int] = set()
        while len(answers) < self.world_size:
            if failures and (failures[0].weight == 0 or len(failures) + len(answers) == self.world_size):
                break
            remaining = None if limit is None else limit - time.monotonic()
            if remaining is not None and remaining <= 0:
                break
            for rank in self._next_events(gone, remaining):
                found = self._hear(rank, answers, on_message)
                if found is not None:
                    gone.add(rank)
                    if not failures:
                        # What was seen first may be a consequence; its cause shows up within moments.
                        grace = time.monotonic() + GRACE
                        limit = grace if limit is None else min(limit, grace)
                    failures.append(found)
                    failures.sort(key=lambda failure: failure.weight)
        if len(answers) == self.world_size:
            return [answers[rank] for rank in range(self.world_size)]
        if failures:
            # What the others have reported so far is heard as well: it may be work that is done and kept.
            for rank in sorted(set(range(self.world_size)) - gone):
                found = self._hear(rank, answers, on_message)
                if found is not None:
                    failures.append(found)
        silent = [r for r in range(self.world_size) if r not in answers and r not in {f.rank for f in failures}]
        if failures:
            self._raise(failures, silent)
        raise self._late(silent, expected)

    def _next_events(self, gone: set[int], timeout: float | None) -> list[int]:
        """Ranks that have said something or have ended, in rank order."""
        sources: dict[Any, int] = {}
        for rank in range(self.world_size):
            if rank not in gone:
                sources[self._connections[rank]] = rank
                sources[self._processes[rank].sentinel] = rank
        return sorted({sources[source] for source in wait(list(sources), timeout)})

    def _hear(self, rank: int, answers: dict[int, Any], on_message: OnMessage | None) -> _Failure | None:
        """Read what a rank has sent so far; its failure if that is what it comes to."""
        connection = self._connections[rank]
        try:
            while connection.poll():
                kind, content = pickle.loads(connection.recv_bytes())
                if kind == "message":
                    if on_message is not None:
                        on_message(rank, content)
                elif kind == "answer":
                    answers[rank] = content
                else:
                    return content
        except (EOFError, ConnectionResetError):
            return self._death(rank)
        return None if self._processes[rank].is_alive() else self._death(rank)

    def _death(self, rank: int) -> _Failure:
        process = self._processes[rank]
        process.join(CLOSE_LIMIT)
        code = process.exitcode
        weight = 0
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            how = f"was killed by {name}"
            if name == "SIGKILL":
                how += " (from outside; the kernel does so when memory runs out)"
            # NCCL and the C++ runtime abort a rank that has lost a peer: look for a better reason first.
            weight = 1 if name == "SIGABRT" else 0
        elif code is None:
            how = "closed its connection"
        else:
            how = f"ended without an answer (exit code {code})"
        return _Failure(rank, weight, how, self._stack(rank), None, code, True)

    def _raise(self, failures: list[_Failure], silent: Sequence[int]) -> None:
        root = failures[0]
        parts = [f"rank {root.rank} of {self.world_size} {root.what}"]
        if root.text:
            parts.append(root.text.rstrip())
        if root.weight > 0 and silent:
            # A rank that lost a collective says nothing about the one that did not come to it.
            parts.append(self._whereabouts(silent))
        cause = None
        if root.pickled_cause is not None:
            with contextlib.suppress(Exception):
                cause = pickle.loads(root.pickled_cause)
        raise RankFailed("\n\n".join(parts), root.rank, root.exit_code, _lost(failures, silent)) from cause

    def _late(self, silent: Sequence[int], expected: str) -> RankFailed:
        names = ", ".join(map(str, silent))
        return RankFailed(
            f"{'rank' if len(silent) == 1 else 'ranks'} {names} of {self.world_size} had not {expected}"
            f"\n\n{self._whereabouts(silent)}",
            silent[0],
            lost=tuple(silent),
        )

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        """Where in their Python code the ranks are at this moment."""
        if hasattr(signal, "SIGUSR1"):
            for rank in ranks:
                with contextlib.suppress(OSError):
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
        limit = time.monotonic() + STACK_LIMIT
        parts = []
        for rank in ranks:
            text = self._stack(rank)
            while not text and time.monotonic() < limit:
                time.sleep(0.05)
                text = self._stack(rank)
            # Several threads are listed; the last is the main one, which runs the calls.
            text = text.strip().rsplit("\n\n", 1)[-1]
            parts.append(f"rank {rank} was here: {text or 'it did not say'}")
        return "\n\n".join(parts)

    def _stack(self, rank: int) -> str:
        """What the rank's fault handler has written, less what says nothing about the failure."""
        try:
            text = _stack_file(str(self._folder), rank).read_text(errors="replace")
        except OSError:
            return ""
        kept, ours = [], False
        for line in text.splitlines():
            # From this module outwards every rank looks the same.
            ours = (ours and line.startswith("  File")) or f'"{__file__}"' in line
            if not ours and not line.startswith("Extension modules:"):
                kept.append(line)
        return "\n".join(kept)


# --------------------------------------------------------------------------------------------------
# What runs in a rank


@dataclass(frozen=True)
class _Settings:
    rank: int
    world_size: int
    device: Literal["cpu", "cuda"]
    gpu: int
    threads: int
    timeout: float
    folder: str
    folders: tuple[str, ...]


@dataclass(frozen=True)
class _Failure:
    """Why a rank did not answer.

    ``weight`` 0: a cause; more: perhaps a consequence of another failure. ``gone``: the rank or its device is no more.
    """

    rank: int
    weight: int
    what: str
    text: str
    pickled_cause: bytes | None
    exit_code: int | None
    gone: bool


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}"


def _rank_main(settings: _Settings, connection: Connection) -> None:
    """A rank's life: join, then answer calls until told to stop or left alone."""
    # The owner decides what Ctrl-C means; the terminal sends it to every process of the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        # As it is in any other process; see `_ctrl_c_waits`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    follower = threading.Thread(target=_follow_owner, args=(settings,), name="ditmesh-follow-owner", daemon=True)
    follower.start()
    stack_file = _stack_file(settings.folder, settings.rank).open("w")
    faulthandler.enable(stack_file)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, stack_file)
    if not _answer_calls(settings, connection):
        # The owner has ended, or ends this rank in a moment. Returning here would end the process before the thread
        # has removed what a killed owner left behind.
        follower.join()
    import torch.distributed as dist

    dist.destroy_process_group()


def _answer_calls(settings: _Settings, connection: Connection) -> bool:
    """Join, and answer calls; whether the owner has said that there are no more."""
    speaker = _Speaker(connection)
    try:
        _set_up(settings)
    except BaseException as error:
        speaker.send("failure", _failure(settings.rank, error))
        return False
    speaker.send("answer", None)
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return False
        try:
            request = pickle.loads(call)
            if request is None:
                return True
            fn, args, kwargs, reports = request
            if reports:
                kwargs["report"] = speaker.report
            answer = pickle.dumps(("answer", fn(*args, **kwargs)))
        except BaseException as error:
            # And stay until the owner has read it: leaving would make the peers fail as well.
            speaker.send("failure", _failure(settings.rank, error))
            return False
        speaker.send_bytes(answer)
        # A tensor of the last call should not live until the next one.
        del call, request, fn, args, kwargs, answer


def _follow_owner(settings: _Settings) -> None:
    """End this rank as soon as its owner has ended, however that happened and whatever this rank is doing."""
    owner, server = multiprocessing.parent_process(), os.getppid()
    assert owner is not None
    owner.join()
    for folder in (settings.folder, *settings.folders):
        shutil.rmtree(folder, ignore_errors=True)
    if settings.device == "cpu" and os.getppid() == server:
        # The fork server has nobody left to serve. By itself it would take torch apart before it ends.
        with contextlib.suppress(OSError):
            os.kill(server, signal.SIGKILL)
    os._exit(1)


def _set_up(settings: _Settings) -> None:
    # torch may be loaded already, by the fork server: the variable is for libraries that come later.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    _stay_on_loopback()
    import torch

    torch.set_num_threads(settings.threads)
    # A file, not a port: nothing to collide with, and nobody else on the machine can connect to it.
    rendezvous = (Path(settings.folder) / "rendezvous").as_uri()
    _join(settings.device, settings.rank, settings.world_size, settings.gpu, settings.timeout, rendezvous)


class _Speaker:
    """What a rank tells its owner; safe from any thread of the rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        self.send_bytes(pickle.dumps((kind, content)))

    def send_bytes(self, data: bytes) -> None:
        # When the owner is gone, so is this rank in a moment (`_follow_owner`).
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(data)

    def report(self, message: Any) -> None:
        """Send ``message`` to the owner's ``on_message``."""
        self.send("message", message)


def _failure(rank: int, error: BaseException) -> _Failure:
    # The first frame is this module's.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    first_line = (str(error).strip() or "no message").splitlines()[0]
    cause: bytes | None
    try:
        cause = pickle.dumps(error)
        pickle.loads(cause)
    except Exception:
        cause = None
    what = f"raised {type(error).__name__}: {first_line}"
    return _Failure(rank, 2 if _lost_peer(error) else 0, what, text, cause, None, _lost_device(error))


def _lost(failures: Sequence[_Failure], silent: Sequence[int]) -> tuple[int, ...]:
    """Ranks that are gone through no error of the job; ``failures[0]`` is what the job failed of."""
    root = failures[0]
    if root.gone:
        # An abort may be the consequence of another rank's; then only the first is known to be gone.
        gone = {failure.rank for failure in failures if failure.gone and failure.weight == 0}
        return tuple(sorted({root.rank} | gone))
    # Those that waited in vain say so; the one they waited for says nothing any more.
    return tuple(silent) if root.weight > 0 else ()


def _lost_device(error: BaseException) -> bool:
    """Whether the rank's GPU has failed, and not the job: CUDA says so in words only."""
    import torch

    text = str(error).lower()
    # Not an OutOfMemoryError, an illegal address or an assertion: another device would meet them as well.
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, torch.OutOfMemoryError)
        and "cuda error" in text
        and any(words in text for words in LOST_DEVICE)
    )


def _lost_peer(error: BaseException) -> bool:
    """Whether this failure may only say that another rank failed, or did not come."""
    import torch.distributed as dist

    current: BaseException | None = error
    while current is not None:
        if isinstance(current, dist.DistError):
            return True
        text = str(current).lower()
        # Gloo raises plain RuntimeErrors; these words are what they have in common.
        if isinstance(current, RuntimeError) and (
            "gloo" in text or "nccl" in text or "closed by peer" in text or "timed out waiting" in text
        ):
            return True
        current = current.__cause__
    return False

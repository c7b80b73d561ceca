"""Worker processes that live as long as the check: ranks that share the device, or one of them alone.

An import of torch and diffusers and a CUDA context take ten seconds, and the first use of a kernel another: processes
that stay pay that once. A call that fails, crashes or is late ends all of them, and the next call starts others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as ready
from pathlib import Path
from typing import Any

from basics import CHOSEN, DEVICE, ON_GPU, ROOT, Row, Skipped, exact_float32, first_line, quieten

# Seconds: for the other ranks to say what happened to them once one has failed; to start.
GRACE, START = 5.0, 120.0
# What lets several ranks of NCCL share a GPU: NCCL tells devices apart by host and bus. It is no supported setting, so
# that a hang says nothing about ditmesh: a bare exchange is tried first.
ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


class Failed(Exception):
    """A call that did not end well on some rank; says which and why."""


class Workers:
    """The processes, started when a call needs them.

    Attributes:
        deadline: on the monotonic clock: when the part that is running has to be over.
        facts: what parts have found out for later ones: ``staged``, whether gloo's messages go through the host;
            ``nccl``, whether ranks that share the GPU talk over NCCL.
        starts: how often processes were started.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.deadline = time.monotonic() + 3600
        self.facts, self.starts = facts, 0
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self._workers: list[tuple[subprocess.Popen[bytes], Connection, Path]] = []
        self._group: tuple[int, str] = (1, "")
        self._number = 0

    @property
    def transport(self) -> str:
        """What ranks that share the device talk over."""
        return "nccl" if self.facts.get("nccl") else "gloo"

    def run(self, name: str, *arguments: Any, world: int = 1, transport: str = "", limit: float = 1e9) -> list[Any]:
        """The rows of `FUNCTIONS[name]` on every rank, as a list for each.

        Raises:
            Failed: a rank failed, crashed or was late. Skipped: it cannot run here.
        """
        if world > 1:
            transport = transport or self.transport
        end = min(self.deadline, time.monotonic() + limit)
        rows: list[list[Row]] = [[] for _ in range(world)]
        for rank, row in self._answers(name, arguments, world, transport, end):
            rows[rank].append(row)
        return rows

    def stream(self, name: str, *arguments: Any) -> Iterator[Row]:
        """The rows of a function in one process, as they come; a failure is the last of them."""
        try:
            for _, row in self._answers(name, arguments, 1, "", self.deadline):
                yield row
        except Failed as error:
            yield {"ok": False, "failed": str(error)}

    def _answers(self, name: str, arguments: Any, world: int, transport: str, end: float) -> Iterator[tuple[int, Row]]:
        self._start(world)
        self._regroup(world, transport)
        call = (name, arguments, world, transport, str(self._store()))
        yield from self._asked(call, range(world), end)

    def _store(self) -> Path:
        return Path(self._folder.name) / f"store-{self.starts}-{self._number}"

    def _regroup(self, world: int, transport: str) -> None:
        """Ranks leave the group they are in before others meet: torch may wait for those that are still inside."""
        if self._group != (world, transport):
            inside = range(self._group[0] if self._group[1] else 0)
            list(self._asked(("", (), 0, "", ""), inside, time.monotonic() + 60))
            self._group = (world, transport)
            self._number += 1

    def _asked(self, call: Any, ranks: range, end: float) -> Iterator[tuple[int, Row]]:
        waiting = {self._workers[rank][1]: rank for rank in ranks}
        failed, skipped = "", ""
        try:
            for connection in waiting:
                connection.send(call)
            while waiting:
                found = ready(list(waiting), max(0.0, end - time.monotonic()))
                if not found:
                    late = "" if failed else f"{call[0]} was late on ranks {sorted(waiting.values())}"
                    raise Failed(failed or late)
                for connection in found:
                    assert isinstance(connection, Connection)
                    rank = waiting[connection]
                    try:
                        kind, content = connection.recv()
                    except (EOFError, OSError):
                        kind, content = "failed", self._last_words(rank)
                    if kind == "row":
                        yield rank, content
                        continue
                    del waiting[connection]
                    if kind == "failed":
                        failed = failed or f"rank {rank}: {content}"
                        end = min(end, time.monotonic() + GRACE)
                    elif kind == "skipped":
                        skipped = content
            if failed:
                raise Failed(failed)
        except BaseException:
            self.end()
            raise
        if skipped:
            raise Skipped(skipped)

    def _last_words(self, rank: int) -> str:
        process, _, log = self._workers[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)
        said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"exit code {process.returncode}: {said[-1][:300]}"

    def _start(self, world: int) -> None:
        new = range(len(self._workers), world)
        for rank in new:
            mine, other = Pipe()
            log = Path(self._folder.name) / f"log-{self.starts}-{rank}"
            environment = {
                **os.environ,
                # One order of sets on all ranks: diffusers writes one into its configurations.
                "PYTHONHASHSEED": "0",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                # From one process to the next: kernels that were compiled once.
                "CUDA_CACHE_MAXSIZE": str(2**32),
                **({**ONE_GPU, "NCCL_HOSTID": f"rank{rank}"} if ON_GPU else {CHOSEN: "cpu"}),
            }
            command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check"), "--worker", str(rank)]
            with log.open("w") as file:
                process = subprocess.Popen(
                    [*command, str(other.fileno())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[other.fileno()],
                    start_new_session=True,
                )
            other.close()
            self._workers.append((process, mine, log))
        if new:
            self.starts += 1
            # The time to start is not the part's.
            began = time.monotonic()
            list(self._asked(("", (), 0, "", ""), new, began + START))
            self.deadline += time.monotonic() - began

    def end(self) -> None:
        """End all processes, with what they have started."""
        for process, connection, _ in self._workers:
            connection.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._workers, self._group = [], (1, "")


def work(rank: int, descriptor: int, functions: dict[str, Callable[..., Iterator[Row]]]) -> None:
    """One worker: answers calls until the check is over."""
    import gc

    import torch
    import torch.distributed as dist

    quieten()
    exact_float32()
    torch.set_num_threads(1)
    if ON_GPU:
        with suppress(ModuleNotFoundError):
            from ditmesh.core.gpus import settle_before_cuda

            # As ditmesh's own ranks do; reproducible mode refuses a GPU that has started without it.
            settle_before_cuda()
        torch.cuda.set_device(DEVICE)
    connection, group = Connection(descriptor), ("", 1, "")
    while True:
        try:
            name, arguments, world, transport, store = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if group != (store, world, transport):
                if dist.is_initialized():
                    dist.destroy_process_group()
                group = (store, world, transport)
                if transport:
                    _meet(rank, world, transport, store)
            for row in functions[name](*arguments) if name else ():
                connection.send(("row", row))
            answer = "done", None
        except Skipped as reason:
            answer = "skipped", str(reason)
        except ModuleNotFoundError as error:
            answer = "skipped", f"{error.name} is not installed"
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = "failed", first_line(error)
        gc.collect()
        if ON_GPU:
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
        connection.send(answer)


def _meet(rank: int, world: int, transport: str, path: str) -> None:
    """Join a group: over gloo; over NCCL as ditmesh's own ranks do; or as a program that names no device."""
    import torch.distributed as dist

    store, limit = dist.FileStore(path, world), timedelta(seconds=60)
    if transport == "nccl":
        from ditmesh.launch.devices import join_default_group

        join_default_group("cuda", rank, world, 0, 60.0, store)
        return
    backend = {"gloo": "gloo", "nccl, lazy": "cpu:gloo,cuda:nccl"}[transport]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)

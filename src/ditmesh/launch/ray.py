"""Ranks as actors of a Ray cluster: on one host or several, wherever Ray finds room for them."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from .._version import library_versions
from ..errors import ConfigError, RankFailed
from ..requirements import not_installed
from . import failures
from .collect import CAUSE_SECONDS, Collector, StayingRanks
from .devices import check_timeout, default_threads, interface_of, join_default_group, use_interface, use_loopback
from .failures import Failure, of_exception
from .meeting import COMPARED_VERSIONS
from .messages import encode

# Seconds.
START_SECONDS = 300.0  # for Ray to find room, for all ranks to import what they need and to find one another
LOST_SECONDS = 30.0  # for Ray to notice that a host is gone
CONNECT_SECONDS = 10.0  # for the cluster to answer
POLL_SECONDS = 1.0  # between looks at what is not a message


class RayRanks(StayingRanks):
    """Ranks on a Ray cluster, one actor each, placed together where there is room.

    Ranks are numbered host by host, so that neighbours share one. The cluster is the one that this program has joined
    or ``RAY_ADDRESS`` names, else one that runs on this machine, or is started here and ends with the program. ditmesh
    has to be installed on every host, in the same version.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        hosts: names of the hosts of ranks 0, 1, …
    """

    is_reporter = True

    def __init__(
        self,
        world_size: int,
        device: str = "auto",
        threads: int | None = None,
        timeout: float = 600.0,
        preload: Sequence[str] = (),
        gpus: Sequence[int] | None = None,
    ) -> None:
        """Start the ranks and wait until all of them have joined.

        Args:
            device: ``"auto"`` takes CUDA when the cluster has GPUs.
            threads: of each rank, and CPUs that it takes of the cluster; default: the cluster's CPUs shared out.
            timeout: deadline of every collective, in seconds.
            preload, gpus: no use is made of them; Ray gives each rank a GPU of its own.

        Raises:
            ConfigError: Ray is not installed or not there, or has not enough CPUs or GPUs; hosts have other versions.
            RankFailed: a rank could not start.
        """
        if world_size < 1:
            raise ConfigError(f"{world_size} ranks are not possible; start at least 1")
        check_timeout(timeout)
        super().__init__()
        ray = self._ray = connected()
        self.world_size, self.timeout = world_size, timeout
        self._actors: list[Any] = []
        self.device = device_of_cluster(device, world_size)
        self.threads = threads or threads_of_cluster(self.device, world_size)
        if (there := ray.cluster_resources().get("CPU", 0)) < (needed := world_size * self.threads):
            raise ConfigError(
                f"{world_size} ranks of {self.threads} CPUs each need {needed}, and the Ray cluster has {there:g}; use "
                f"fewer devices or threads, or start Ray with more: ray start --num-cpus {needed}"
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self._kill)
            self._place(undo)
            self._join()
            self._undo = undo.pop_all()
        atexit.register(self.close)

    def _place(self, undo: contextlib.ExitStack) -> None:
        """One actor per rank, in the order of hosts."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, gpus = self._ray, int(self.device != "cpu")
        bundle = {"CPU": float(self.threads)} | ({"GPU": 1.0} if gpus else {})
        group = placement_group([bundle] * self.world_size, strategy="PACK")
        undo.callback(remove_placement_group, group)
        if not group.wait(START_SECONDS):
            raise ConfigError(
                f"Ray found no room for {self.world_size} ranks of {self.threads} CPUs{' and a GPU' if gpus else ''} "
                f"each within {START_SECONDS:g} s; wait until others have ended, or use fewer devices"
            )
        kind = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"replies": 1})(_Rank)
        for place in range(self.world_size):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
            self._actors.append(
                kind.options(num_cpus=self.threads, num_gpus=gpus, scheduling_strategy=strategy).remote(
                    self.threads, sys.path
                )
            )
        facts = self._all([actor.facts.remote() for actor in self._actors], "start")
        ours = library_versions()
        for place in facts:
            if other := [name for name in COMPARED_VERSIONS if place["versions"].get(name) != ours.get(name)]:
                name = other[0]
                raise ConfigError(
                    f"host {place['host']} has {name} {place['versions'].get(name)}, and this one {ours.get(name)}; "
                    "install the same on all hosts"
                )
        order = sorted(range(self.world_size), key=lambda place: (facts[place]["node"], place))
        self._actors = [self._actors[place] for place in order]
        self.hosts = [facts[place]["host"] for place in order]
        self._addresses = [facts[place]["address"] for place in order]

    def _join_anew(self) -> bool:
        """Let the ranks join a new process group; whether they have."""
        with contextlib.suppress(RankFailed):
            self._join()
            return True
        return False

    def _join(self) -> None:
        """Let the ranks join a process group, after leaving the one there was."""
        alone = len(set(self._addresses)) == 1
        address = "127.0.0.1" if alone else self._addresses[0]
        port = self._all([self._actors[0].meet.remote(address)], "open a port")[0]
        self.generation += 1
        self._all(
            [
                actor.join.remote(rank, self.world_size, self.device, self.timeout, address, port, alone)
                for rank, actor in enumerate(self._actors)
            ],
            "find the others",
        )

    def _all(self, references: list[Any], what: str) -> list[Any]:
        try:
            return self._ray.get(references, timeout=START_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            raise RankFailed(f"the ranks could not {what} within {START_SECONDS:g} s", 0) from None
        except self._ray.exceptions.RayError as error:
            raise RankFailed(f"a rank could not {what}: {str(error).strip().splitlines()[-1]}", 0) from error

    def reply(self, content: Any) -> None:
        """Send all ranks a reply in the middle of a call; see `RankPool.reply`."""
        data = encode(content, main=False)
        for actor in self._actors:
            actor.reply.options(concurrency_group="replies").remote(data)

    def close(self, reason: str = "they were closed") -> None:
        """End the ranks; ``reason`` is what `ConfigError` says to later calls. Harmless when they are gone."""
        self._end(reason)

    def _kill(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    def _end(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
            self._undo.close()
            atexit.unregister(self.close)

    # ---- answers and failures

    def _collector(self, *limits: Any, **watched: Any) -> Collector:
        return super()._collector(*limits, grace=_grace, **watched)

    def _call(self, call: bytes, collector: Collector) -> list[Any]:
        streams = {
            actor.call.options(num_returns="streaming").remote(call): rank for rank, actor in enumerate(self._actors)
        }
        while seconds := collector.tick(time.monotonic()):
            ready, _ = self._ray.wait(list(streams), num_returns=1, timeout=min(seconds, POLL_SECONDS))
            for stream in ready:
                kind, content = self._next(stream, streams[stream])
                collector.take(streams[stream], kind, content)
                if kind != "message":
                    del streams[stream]
        return collector.result(self._whereabouts, self._join_anew)

    def _next(self, stream: Any, rank: int) -> tuple[str, Any]:
        try:
            kind, content = self._ray.get(next(stream))
        except StopIteration:
            return "failure", failures.of_exit(rank, None, "")
        except self._ray.exceptions.RayError as error:
            said = " ".join(str(error).split()).rpartition("exit detail: ")[2].split(". ")[0]
            why = said[:200] or "Ray does not say why"
            what = f"is gone: its process on host {self.hosts[rank]}, or that host ({why})"
            return "failure", Failure(rank, 0, what, gone=True)
        return kind, pickle.loads(content) if kind == "answer" else content

    def _whereabouts(self, ranks: Sequence[int]) -> dict[int, str]:
        return {rank: f"in a process of host {self.hosts[rank]}, as `ray stack` shows there" for rank in ranks}


def _grace(failed: Collection[Failure]) -> float:
    """Seconds to wait for more after these failures."""
    # A connection that broke may be a host that is gone, which Ray takes a while to notice.
    broken = all(failure.weight and "timed out" not in failure.what.lower() for failure in failed)
    return LOST_SECONDS if broken else CAUSE_SECONDS


class _Rank:
    """The actor of a rank. Its calls run in one thread, to which CUDA's current device belongs."""

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        # The program's own modules, where this host has them.
        sys.path += [folder for folder in path if folder not in sys.path]
        # Before torch is imported.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ditmesh-rank")
        self._threads = threads
        self._rank = -1
        self._store: Any = None
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def facts(self) -> dict[str, Any]:
        """The place of this rank, and its versions."""
        import ray

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return {"host": socket.gethostname(), "address": address, "node": node, "versions": library_versions()}

    def meet(self, address: str) -> int:
        """Open a port at which ranks find one another."""
        self._store = _store()(address, 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def join(self, *settings: Any) -> None:
        """Join the process group; see `_join`."""
        self._worker.submit(self._join, *settings).result()

    def _join(
        self, rank: int, world_size: int, device: str, timeout: float, address: str, port: int, alone: bool
    ) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(self._threads)
        if alone:
            use_loopback()
        else:
            import ray

            if name := interface_of(ray.util.get_node_ip_address()):
                use_interface(name)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._rank = rank
        store = self._store if rank == 0 else _store()(address, port, is_master=False, timeout=timedelta(0, timeout))
        # Ray shows each rank its own GPU only.
        join_default_group(device, rank, world_size, 0, timeout, store)

    def call(self, data: bytes) -> Iterator[tuple[str, Any]]:
        """Answer a call: messages, and then ``("answer", pickled)`` or ``("failure", Failure)``."""
        out: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        while not self._replies.empty():
            # To an earlier call.
            self._replies.get()
        self._worker.submit(self._answer, data, out)
        while True:
            kind, content = out.get()
            yield kind, content
            if kind != "message":
                return

    def _answer(self, data: bytes, out: queue.SimpleQueue[tuple[str, Any]]) -> None:
        try:
            fn, args, kwargs, reports = pickle.loads(data)
            if reports:
                kwargs["report"] = _Report(out, self._replies)
            out.put(("answer", encode(fn(*args, **kwargs))))
        except BaseException as error:
            out.put(("failure", of_exception(self._rank, error)))

    def reply(self, data: bytes) -> None:
        """Take the owner's reply in the middle of a call."""
        self._replies.put(data)


class _Report:
    """The channel by which a function on a rank reports to the owner, and hears it."""

    def __init__(self, out: queue.SimpleQueue[tuple[str, Any]], replies: queue.SimpleQueue[bytes]) -> None:
        self._out, self._replies = out, replies

    def __call__(self, message: Any) -> None:
        # A message that cannot be pickled fails here.
        encode(message)
        self._out.put(("message", message))

    def reply(self) -> Any:
        """The owner's next reply; waits for it."""
        return pickle.loads(self._replies.get())


def _store() -> Any:
    import torch.distributed as dist

    return dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


# Ray's connection is of the process; threads that start ranks share it.
_CONNECTING = threading.Lock()


def connected() -> Any:
    """Ray, in a cluster that this program has joined till its end; `ConfigError`: not installed, or no answer."""
    try:
        import ray
        import ray.util
        from ray._private import worker
    except ImportError as error:
        raise ConfigError(not_installed("launcher ray", "ray", "ray")) from error
    with _CONNECTING:
        if ray.is_initialized():
            return ray
        address = os.environ.get("RAY_ADDRESS", "")
        host, _, port = address.rpartition(":")
        try:
            if host and port.isdecimal() and "/" not in host:
                # Ray tries for minutes to find out whether a server listens there.
                socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
            options: dict[str, Any] = {"logging_level": "error"} | ({} if address else {"include_dashboard": False})
            ray.init(log_to_driver=False, **options)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {address} ({' '.join(str(error).split())[:200]}); start one with ray start "
                "--head, or unset RAY_ADDRESS"
            ) from error
        if (tell := getattr(worker, "print_to_stdstream", None)) is not None:
            # stdout is the program's, and may be JSON. There is no setting for what Ray tells of its nodes.
            worker.print_to_stdstream = lambda data, *rest, **named: tell({**data, "is_err": True}, *rest, **named)
    return ray


def device_of_cluster(device: str, world_size: int) -> str:
    """The hardware of ``world_size`` ranks of the Ray cluster; see `RayRanks`."""
    if device == "cpu":
        return "cpu"
    if device not in ("auto", "cuda"):
        raise ConfigError(f"Ray counts no devices {device!r}; use auto, cpu or cuda, or --launcher local")
    gpus = int(connected().cluster_resources().get("GPU", 0))
    if device == "auto" and not gpus:
        return "cpu"
    if gpus < world_size:
        raise ConfigError(
            f"{world_size} ranks need {world_size} GPUs, and the Ray cluster has {gpus}; use fewer devices, or "
            "--device cpu"
        )
    return "cuda"


def threads_of_cluster(device: str, world_size: int) -> int:
    """Threads of each of ``world_size`` ranks of the Ray cluster: its CPUs shared out, at most 8 beside a GPU."""
    return default_threads(world_size, device, int(connected().cluster_resources().get("CPU", 0)))

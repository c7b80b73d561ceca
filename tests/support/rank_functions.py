"""What the tests of `RankPool` run on ranks: ranks import functions by name."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from typing import Any


def identity(value: Any = None) -> tuple[int, int, Any]:
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size(), value


def total(value: float) -> Any:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor


def count_to(last: int, *, report: Any) -> int:
    for number in range(last):
        report(number)
    return last


def fail(rank: int, how: str) -> None:
    """Fail on one rank while all the others wait for it."""
    import torch.distributed as dist

    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError(f"rank {rank} had enough")
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "SIGSEGV":
            ctypes.string_at(0)
        if how == "leave":
            os._exit(0)
        if how == "sys.exit":
            sys.exit(3)
        if how == "unpicklable":
            _raise_unpicklable()
    dist.barrier()


def _raise_unpicklable() -> None:
    class Odd(Exception):
        pass

    raise Odd("cannot travel")


def lose_peer(rank: int) -> None:
    """One rank closes its connections, so that the others fail first, and says why it did so later."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == rank:
        dist.destroy_process_group()
        time.sleep(0.5)
        raise KeyError("the real reason")
    dist.barrier()


def stay_away(rank: int) -> None:
    """One rank never comes to the barrier."""
    import torch.distributed as dist

    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def refuse() -> None:
    from ditmesh.errors import ConfigError

    raise ConfigError("not like this; like that")


def answer_with_a_lock() -> Any:
    return threading.Lock()


def collect_garbage() -> tuple[float, int, int]:
    """MiB that a full collection makes this rank's own, objects that it need not look at, and garbage that waits.

    The garbage is 50,000 lists in cycles, each thousand of which lived as long as a request does.
    """
    import psutil

    process = psutil.Process()
    before = process.memory_full_info().uss
    gc.collect()
    grown, kept = process.memory_full_info().uss - before, gc.get_freeze_count()
    for _ in range(50):
        held: list[Any] = [[] for _ in range(1000)]
        for each in held:
            each.append(each)
        gc.collect(1)
    del held, each
    return grown / 2**20, kept, gc.collect()


def raise_on(rank: int) -> int:
    """Raise on one rank, outside any collective; the others answer."""
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} had enough")
    return dist.get_rank()


def leave_a_message() -> None:
    """Rank 0 sends what rank 1, which raises, does not take."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("not taken")
    _sent.append((dist.isend(tensor := torch.tensor([1.0]), 1), tensor))


def pass_on(value: float) -> float:
    """What rank 1 gets when rank 0 sends a value."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value])
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor.zero_(), 0)
    return float(tensor)


_sent: list[Any] = []


def keep(value: Any = None) -> Any:
    """As a loaded model: what was kept last, when nothing new is."""
    if value is not None:
        _kept[:] = [value]
    return list(_kept)


_kept: list[Any] = []


def break_step(pipe: Any, rank: int) -> None:
    """Let the second step of the scheduler raise on one rank."""
    import torch.distributed as dist

    step, calls = pipe.scheduler.step, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if dist.get_rank() == rank and len(calls) == 2:
            raise ArithmeticError(f"rank {rank} breaks")
        return step(*args, **kwargs)

    pipe.scheduler.step = broken


def mend_step(pipe: Any) -> None:
    vars(pipe.scheduler).pop("step")

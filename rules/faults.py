"""Faults that are planted in what ranks ask of a group of the rules; each runs on two ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from .group import SETTINGS, RuleBroken, register, ruled

# Seconds. Those that wait in vain say so after that.
DEADLINE = 1.0


@contextmanager
def _groups(count: int = 1, **settings: object) -> Iterator[list[dist.ProcessGroup]]:
    """Groups of both ranks, under settings of their own."""
    register()
    before = dict(vars(SETTINGS))
    vars(SETTINGS).update(settings)
    made = [dist.new_group(backend="rules", timeout=timedelta(seconds=DEADLINE)) for _ in range(count)]
    try:
        yield made
    finally:
        vars(SETTINGS).update(before)
        dist.barrier()
        for group in made:
            dist.destroy_process_group(group)


def right() -> None:
    """All kinds of operations, as they should be."""
    rank = dist.get_rank()
    with _groups() as (group,):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            summed = torch.tensor([rank, 1]).to(dtype)
            dist.all_reduce(summed, group=group)
            assert summed.tolist() == torch.tensor([1, 2]).to(dtype).tolist()
        whole = torch.full((3,), float(rank))
        dist.broadcast(whole, 1, group=group)
        assert whole.tolist() == [1.0] * 3
        every = [torch.empty(2) for _ in range(2)]
        dist.all_gather(every, torch.full((2,), float(rank)), group=group)
        assert [one.tolist() for one in every] == [[0.0, 0.0], [1.0, 1.0]]
        flat = torch.empty(4)
        dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)), group=group)
        assert flat.tolist() == [0.0, 0.0, 1.0, 1.0]
        got = torch.empty(2 * (rank + 1))
        sent = torch.arange(3.0) + 10 * rank
        work = dist.all_to_all_single(got, sent, [rank + 1] * 2, [1, 2], group=group, async_op=True)
        work.wait()
        assert got.tolist() == ([1.0, 2.0, 11.0, 12.0] if rank else [0.0, 10.0])
        half = torch.empty(2)
        dist.reduce_scatter_tensor(half, torch.arange(4.0), group=group)
        assert half.tolist() == ([4.0, 6.0] if rank else [0.0, 2.0])
        box = [None, None]
        with ruled():
            dist.all_gather_object(box, rank, group=group)
        assert box == [0, 1]
        got, sent = torch.empty(2), torch.full((2,), float(rank))
        moves = [dist.P2POp(dist.irecv, got, 1 - rank, group), dist.P2POp(dist.isend, sent, 1 - rank, group)]
        group.batch(moves).wait()
        assert got.tolist() == [1.0 - rank] * 2
        message = torch.full((2,), 7.0)
        (dist.isend if rank == 0 else dist.irecv)(message, 1 - rank, group).wait()
        dist.barrier(group=group)


def _summed(wrong: Callable[[], Tensor]) -> None:
    with _groups() as (group,):
        dist.all_reduce(wrong(), group=group)


def _collective_left_out() -> None:
    with _groups() as (group,):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3), group=group)
        dist.broadcast(torch.ones(2), 0, group=group)


def _last_collective_left_out() -> None:
    with _groups() as (group,):
        for _ in range(2 - dist.get_rank()):
            dist.all_reduce(torch.ones(3), group=group)


def _sends_swapped() -> None:
    rank = dist.get_rank()
    with _groups() as (group,):
        tensors = [torch.ones(4), torch.ones(8)]
        move = dist.isend if rank == 0 else dist.irecv
        for work in [move(one, 1 - rank, group) for one in (tensors if rank == 0 else reversed(tensors))]:
            work.wait()


def _in_flight(faulty: int, fault: Callable[[list[Tensor]], object]) -> None:
    """A message of the first rank to the second, and what one of them does with its tensor meanwhile."""
    rank = dist.get_rank()
    with _groups(delay="late") as (group,):
        held = [torch.ones(4)]
        work = (dist.isend if rank == 0 else dist.irecv)(held[0], 1 - rank, group)
        assert rank == 0 or held[0].isnan().all()
        if rank == faulty:
            fault(held)
        work.wait()


def _objects_over_the_group() -> None:
    with ruled(), _groups(objects=False) as (group,):
        dist.all_gather_object([None, None], dist.get_rank(), group=group)


def _to_itself() -> None:
    with _groups() as (group,):
        group.send([torch.ones(1)], dist.get_rank(), 0)


def _tags() -> None:
    with _groups() as (group,):
        dist.isend(torch.ones(1), 1 - dist.get_rank(), group, 3)


def _own_order(waits: bool) -> None:
    """Each rank comes to another group first. If nothing waits it may pass on a GPU, and to count on that is wrong."""
    with _groups(2) as groups:
        order: Sequence[dist.ProcessGroup] = groups if dist.get_rank() == 0 else groups[::-1]
        tensors = [torch.ones(3) for _ in order]
        works = [
            dist.all_reduce(one, group=group, async_op=not waits) for one, group in zip(tensors, order, strict=True)
        ]
        for work in works:
            if work is not None:
                work.wait()


def _messages_in_a_queue() -> None:
    """Each rank waits for the other's message before it sends its own, without a batch: a deadlock in one queue."""
    rank = dist.get_rank()
    with _groups() as (group,):
        got, sent = torch.empty(2), torch.ones(2)
        for work in [dist.irecv(got, 1 - rank, group), dist.isend(sent, 1 - rank, group)]:
            work.wait()


FAULTS: dict[str, Callable[[], None]] = {
    "collective_left_out": _collective_left_out,
    "last_collective_left_out": _last_collective_left_out,
    "sends_swapped": _sends_swapped,
    "written_in_flight": partial(_in_flight, 0, lambda held: held[0].add_(1)),
    "output_written_in_flight": partial(_in_flight, 1, lambda held: held[0].zero_()),
    "freed_in_flight": partial(_in_flight, 0, lambda held: held.clear()),
    "objects_over_the_group": _objects_over_the_group,
    "int16": partial(_summed, lambda: torch.ones(3, dtype=torch.int16)),
    "strides": partial(_summed, lambda: torch.ones(3, 4).t()),
    "to_itself": _to_itself,
    "another_device": partial(_summed, lambda: torch.ones(3, device="meta")),
    "tags": _tags,
    "deadlock_by_order": partial(_own_order, True),
    "another_order_over_groups": partial(_own_order, False),
    "messages_in_a_queue": _messages_in_a_queue,
}


def found(fault: str) -> str:
    """What the rules say of one of `FAULTS` on this rank."""
    try:
        FAULTS[fault]()
    except (RuleBroken, dist.DistBackendError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def aborted() -> float:
    """Seconds from an abort on another thread to the end of waiting."""
    with _groups() as (group,):
        if dist.get_rank() == 1:
            return 0.0
        aborted_at = [0.0]

        def abort() -> None:
            aborted_at[0] = time.monotonic()
            group.abort()

        threading.Timer(0.3, abort).start()
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            dist.all_reduce(torch.ones(3), group=group)
        return time.monotonic() - aborted_at[0]

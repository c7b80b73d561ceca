"""Faults that are planted in what ranks ask of a group of the rules; each runs on two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from .group import SETTINGS, RuleBroken, register

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
        dist.all_gather_object(box, rank)
        got, sent = torch.empty(2), torch.full((2,), float(rank))
        moves = [dist.P2POp(dist.irecv, got, 1 - rank, group), dist.P2POp(dist.isend, sent, 1 - rank, group)]
        group.batch(moves).wait()
        assert got.tolist() == [1.0 - rank] * 2
        message = torch.full((2,), 7.0)
        (dist.isend if rank == 0 else dist.irecv)(message, 1 - rank, group).wait()
        dist.barrier(group=group)


def collective_left_out() -> None:
    rank = dist.get_rank()
    with _groups() as (group,):
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=group)
        dist.broadcast(torch.ones(2), 0, group=group)


def last_collective_left_out() -> None:
    rank = dist.get_rank()
    with _groups() as (group,):
        dist.all_reduce(torch.ones(3), group=group)
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=group)


def sends_swapped() -> None:
    rank = dist.get_rank()
    with _groups() as (group,):
        tensors = [torch.ones(4), torch.ones(8)]
        move = dist.isend if rank == 0 else dist.irecv
        works = [move(one, 1 - rank, group) for one in (tensors if rank == 0 else reversed(tensors))]
        for work in works:
            work.wait()


def written_in_flight() -> None:
    rank = dist.get_rank()
    with _groups(delay="late") as (group,):
        tensor = torch.ones(4)
        work = (dist.isend if rank == 0 else dist.irecv)(tensor, 1 - rank, group)
        if rank == 0:
            tensor.add_(1)
        work.wait()


def output_written_in_flight() -> None:
    rank = dist.get_rank()
    with _groups(delay="late") as (group,):
        tensor = torch.ones(4)
        work = (dist.isend if rank == 0 else dist.irecv)(tensor, 1 - rank, group)
        if rank == 1:
            assert tensor.isnan().all()
            tensor.zero_()
        work.wait()


def freed_in_flight() -> None:
    rank = dist.get_rank()
    with _groups(delay="late") as (group,):
        tensor = torch.ones(4)
        work = (dist.isend if rank == 0 else dist.irecv)(tensor, 1 - rank, group)
        if rank == 0:
            del tensor
        work.wait()


def objects_over_the_group() -> None:
    from .group import ruled

    with ruled(), _groups(objects=False) as (group,):
        dist.all_gather_object([None, None], dist.get_rank(), group=group)


def int16() -> None:
    with _groups() as (group,):
        dist.all_reduce(torch.ones(3, dtype=torch.int16), group=group)


def strides() -> None:
    with _groups() as (group,):
        dist.all_reduce(torch.ones(3, 4).t(), group=group)


def to_itself() -> None:
    with _groups() as (group,):
        group.send([torch.ones(1)], dist.get_rank(), 0)


def another_device() -> None:
    with _groups() as (group,):
        dist.all_reduce(torch.ones(3, device="meta"), group=group)


def tags() -> None:
    with _groups() as (group,):
        dist.isend(torch.ones(1), 1 - dist.get_rank(), group, 3)


def deadlock_by_order() -> None:
    """Each rank waits in another group first."""
    rank = dist.get_rank()
    with _groups(2) as groups:
        for group in groups if rank == 0 else groups[::-1]:
            dist.all_reduce(torch.ones(3), group=group)


def another_order_over_groups() -> None:
    """As before, but nothing waits: on a GPU it may hang, and it is always wrong to count on that it does not."""
    rank = dist.get_rank()
    with _groups(2) as groups:
        order = groups if rank == 0 else groups[::-1]
        tensors = [torch.ones(3) for _ in order]
        works = [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(tensors, order, strict=True)]
        for work in works:
            work.wait()


def messages_in_a_queue() -> None:
    """Each rank waits for the other's message before it sends its own, without a batch: a deadlock in one queue."""
    rank = dist.get_rank()
    with _groups(mode=str(SETTINGS.mode)) as (group,):
        got, sent = torch.empty(2), torch.ones(2)
        works = [dist.irecv(got, 1 - rank, group), dist.isend(sent, 1 - rank, group)]
        for work in works:
            work.wait()


def aborted() -> float:
    """Seconds from an abort on another thread to the end of waiting."""
    import threading

    rank = dist.get_rank()
    with _groups() as (group,):
        if rank == 1:
            return 0.0
        aborted_at = [0.0]

        def abort() -> None:
            aborted_at[0] = time.monotonic()
            group.abort()

        threading.Timer(0.3, abort).start()
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            dist.all_reduce(torch.ones(3), group=group)
        return time.monotonic() - aborted_at[0]


def found(fault: Callable[[], object]) -> str:
    """What the rules say of a fault on this rank."""
    try:
        fault()
    except (RuleBroken, dist.DistBackendError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

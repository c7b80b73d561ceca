"""Messages between ranks that share the device, without anything of ditmesh: gloo, and NCCL on a single GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from basics import DEVICE, ON_GPU, Row, first_line, guarded
from torch import Tensor
from workers import Failed, Workers

NOT_HERE = "not here: there is no GPU"

# --- gloo ----------------------------------------------------------------------------------------------------------


def try_collectives(names: list[str]) -> Iterator[Row]:
    """On a rank: for each operation over gloo with tensors on the device, ``""`` or why not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    other, x = 1 - rank, torch.full((4,), float(rank + 1), device=DEVICE)
    parts = [torch.zeros(4, device=DEVICE) for _ in range(world)]

    def transfer(batched: bool) -> Tensor:
        got = torch.zeros(4, device=DEVICE)
        pairs = [(dist.irecv, got), (dist.isend, x)]
        if batched:
            works = dist.batch_isend_irecv([dist.P2POp(op, tensor, other) for op, tensor in pairs])
        else:
            works = [op(tensor, other) for op, tensor in pairs]
        for work in works:
            assert work is not None
            work.wait()
        return got - other - 1

    def reduced() -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total - 3

    def broadcast() -> Tensor:
        given = x.clone()
        dist.broadcast(given, 0)
        return given - 1

    def gathered() -> Tensor:
        dist.all_gather(parts, x)
        return torch.stack([part - number - 1 for number, part in enumerate(parts)])

    def into_tensor() -> Tensor:
        got = torch.zeros(8, device=DEVICE)
        dist.all_gather_into_tensor(got, x)
        return got - torch.tensor([1.0] * 4 + [2.0] * 4, device=DEVICE)

    def exchanged(uneven: bool) -> Tensor:
        # Uneven: three elements for rank 0, one for rank 1, from both.
        sizes = [3, 1] if uneven else [2, 2]
        got = torch.zeros(2 * sizes[rank], device=DEVICE)
        dist.all_to_all_single(got, x, [sizes[rank]] * 2, sizes)
        half = sizes[rank]
        return got - torch.tensor([1.0] * half + [2.0] * half, device=DEVICE)

    checks: dict[str, Callable[[], Tensor]] = {
        "all_reduce": reduced,
        "broadcast": broadcast,
        "all_gather": gathered,
        "all_gather_into_tensor": into_tensor,
        "all_to_all_single": lambda: exchanged(False) + 0 * exchanged(True).sum(),
        "isend": lambda: transfer(False),
        "batch_isend_irecv": lambda: transfer(True),
    }
    found = {}
    for name in names:
        try:
            found[name] = "" if not bool(checks[name]().any()) else "another value came"
        except Exception as error:
            found[name] = first_line(error, 160)
    yield found


SAFE = ["all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_to_all_single"]
# gloo may read a device's address as if it were the host's: a crash there must not hide the others.
RISKY = ["isend", "batch_isend_irecv"]


def collectives(workers: Workers, quick: bool) -> Iterator[Row]:
    """What gloo carries with tensors on the device. What it does not carry is copied through the host further on."""
    for name, said in carried(workers).items():
        yield {"operation": name, **({"through the host": said} if said else {"direct": True}), "ok": True}


def carried(workers: Workers) -> dict[str, str]:
    """What gloo carries between two ranks with tensors on this device: ``""``, or why not."""
    found: dict[str, str] = {}
    for names in (SAFE, *([name] for name in RISKY)) if ON_GPU else (SAFE + RISKY,):
        try:
            for (answer,) in workers.run("try_collectives", names, world=2, transport="gloo", limit=30):
                found |= {name: found.get(name) or said for name, said in answer.items()}
        except Failed as error:
            found |= dict.fromkeys(names, str(error))
    workers.facts["staged"] = any(found.values())
    return found


def must_be_staged(workers: Workers) -> bool:
    """Whether messages between ranks have to be copied through the host; tried out where no part has done so."""
    if ON_GPU and "nccl" not in workers.facts:
        _ = [*_several_over_nccl(workers)]
    if workers.transport == "nccl":
        return False
    if "staged" not in workers.facts:
        carried(workers)
    return workers.facts["staged"]


def carrying(staged: bool) -> AbstractContextManager[Any]:
    """The process group as it is, or through the host."""
    return staged_through_host() if staged else nullcontext()


def staged_through_host() -> Any:
    """Let messages of the process group travel as copies in host memory, for what gloo does not carry."""

    def host(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)

    class Later:
        def __init__(self, work: Any, tensor: Tensor, copy: Tensor, receives: bool) -> None:
            self.work, self.tensor, self.copy, self.receives = work, tensor, copy, receives

        def wait(self, *timeout: Any) -> bool:
            self.work.wait(*timeout)
            if self.receives:
                self.tensor.copy_(self.copy)
            return True

        def is_completed(self) -> bool:
            return self.work.is_completed()

    isend, irecv = dist.isend, dist.irecv

    def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Later:
        there = host(tensor)
        return Later(isend(there, dst, group, tag), tensor, there, False)

    def receive(tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Later:
        there = torch.empty(tensor.shape, dtype=tensor.dtype)
        return Later(irecv(there, src, group, tag), tensor, there, True)

    @dataclass
    class Operation:
        op: Callable[..., Later]
        tensor: Tensor
        peer: int
        group: Any = None
        tag: int = 0

    def batch(operations: list[Operation]) -> list[Later]:
        return [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]

    def whole(name: str, changed: tuple[int, ...]) -> Callable[..., Any]:
        """A collective on host copies; ``changed``: which of its arguments it writes to."""
        original = getattr(dist, name)

        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            copies = [
                host(one)
                if isinstance(one, Tensor)
                else [host(part) for part in one]
                if isinstance(one, list) and one and isinstance(one[0], Tensor)
                else one
                for one in args
            ]
            original(*copies, **kwargs)
            for number in changed:
                pairs = [(args[number], copies[number])] if isinstance(args[number], Tensor) else ()
                for target, source in pairs or zip(args[number], copies[number], strict=True):
                    target.copy_(source)
            return mock.Mock(wait=lambda *_: True, is_completed=lambda: True) if async_op else None

        return call

    new = {"isend": send, "irecv": receive, "P2POp": Operation, "batch_isend_irecv": batch}
    new |= {name: whole(name, (0,)) for name in SAFE}
    return mock.patch.multiple(dist, **new)


# --- NCCL ----------------------------------------------------------------------------------------------------------


def nccl(workers: Workers, quick: bool) -> Iterator[Row]:
    """NCCL with a world of one, and two and four ranks on one GPU as far as NCCL lets them."""
    if not ON_GPU:
        for what in ("world of one", "exchange of 2 ranks", "exchange of 4 ranks"):
            yield {"what": what, "skipped": NOT_HERE}
        return
    for bound in (False, True):
        yield from workers.stream("alone_over_nccl", bound)
    yield from _several_over_nccl(workers)


def _several_over_nccl(workers: Workers) -> Iterator[Row]:
    """Ranks that share the GPU, without ditmesh: whether later parts can have NCCL."""
    for world in (2, 4):
        row = {"what": f"exchange of {world} ranks on one GPU, without ditmesh"}
        try:
            found = workers.run("bare_exchange", world=world, transport="nccl, lazy", limit=40)
            yield {**row, "seconds": max(one["seconds"] for (one,) in found), "ok": True}
            workers.facts["nccl"] = True
        except Failed as error:
            # No supported setting: what fails here is no failure of ditmesh, and ranks talk over gloo further on.
            workers.facts.setdefault("nccl", False)
            yield {**row, "skipped": f"NCCL does not let ranks share this GPU: {error}"}
            return


def alone_over_nccl(bound: bool) -> Iterator[Row]:
    """In a world of one, with the device named at the start or not: the start, twenty groups, and all collectives."""
    row: Row = {"what": "world of one" + (", device_id" if bound else "")}
    with TemporaryDirectory() as folder:
        began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            store=dist.FileStore(str(Path(folder, "store")), 1),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=60),
            device_id=DEVICE if bound else None,
        )
        try:
            dist.all_reduce(torch.ones(1, device=DEVICE))
            torch.cuda.synchronize()
            yield {**row, "step": "start", **_since(began, free), "ok": True}
            began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
            groups = []
            for _ in range(20):
                groups.append(dist.new_group([0]))
                dist.all_reduce(torch.ones(1, device=DEVICE), group=groups[-1])
            torch.cuda.synchronize()
            yield {**row, "step": "20 groups", **_since(began, free), "ok": True}
            for name, call in _to_self().items():
                yield guarded({**row, "step": name}, lambda c=call: {"ok": bool(c())})
        finally:
            dist.destroy_process_group()


def _since(began: float, free: int) -> Row:
    return {"seconds": time.perf_counter() - began, "MiB": (free - torch.cuda.mem_get_info()[0]) / 2**20}


def _to_self() -> dict[str, Callable[[], Any]]:
    """Collectives of a world of one: whether each gives back what it was given."""
    x = torch.arange(8.0, device=DEVICE)

    def same(call: Callable[[Tensor], Any]) -> Callable[[], bool]:
        def check() -> bool:
            out = torch.zeros_like(x)
            call(out)
            return torch.equal(out, x)

        return check

    def batched(out: Tensor) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, out, 0)]):
            work.wait()

    def objects() -> bool:
        found: list[Any] = [None]
        dist.all_gather_object(found, {"a": 1})
        return found == [{"a": 1}]

    return {
        "all_reduce": same(lambda out: dist.all_reduce(out.copy_(x))),
        "broadcast": same(lambda out: dist.broadcast(out.copy_(x), 0)),
        "all_gather": same(lambda out: dist.all_gather([out], x)),
        "all_gather_into_tensor": same(lambda out: dist.all_gather_into_tensor(out, x)),
        "all_to_all_single": same(lambda out: dist.all_to_all_single(out, x)),
        "reduce_scatter_tensor": same(lambda out: dist.reduce_scatter_tensor(out, x)),
        "isend and irecv as one": same(batched),
        "objects": objects,
    }


def bare_exchange() -> Iterator[Row]:
    """Every rank sends every other one a number: the control for all that ditmesh does over NCCL on one GPU."""
    began = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = torch.arange(world, device=DEVICE, dtype=torch.float32) + 10 * rank
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    right = torch.equal(got.cpu(), torch.arange(world) * 10.0 + rank)
    if not right:
        raise AssertionError(f"rank {rank} got {got.tolist()}")
    yield {"seconds": time.perf_counter() - began}


FUNCTIONS = {
    "try_collectives": try_collectives,
    "alone_over_nccl": alone_over_nccl,
    "bare_exchange": bare_exchange,
}
PARTS = {"nccl": (nccl, 75), "collectives": (collectives, 45)}

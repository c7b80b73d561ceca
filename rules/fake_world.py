"""One rank of a job of any size in one process: the other ranks are not there, and nobody waits for them.

torch's ``fake`` process group makes the groups. What other ranks would send is this rank's own where it sends as much
itself, and zeros elsewhere: shapes, operations and their order are the real ones, the results are not. Where ranks have
to agree on something, all others agree with this one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


class _Done:
    """A work that is over."""

    def wait(self, *limit: Any) -> bool:
        return True


def _filled(received: Tensor, sent: Sequence[Tensor]) -> None:
    """Write what another rank would send: what this one sends, or zeros."""
    with torch.no_grad():
        like = next((one for one in sent if one.dtype == received.dtype and one.numel()), None)
        if like is None or not received.numel():
            received.zero_()
            return
        flat = like.detach().reshape(-1)
        flat = flat.repeat(-(-received.numel() // flat.numel()))
        received.copy_(flat[: received.numel()].view(received.shape))


def _all_to_all(
    output: Tensor, given: Tensor, incoming: Any = None, outgoing: Any = None, group: Any = None, async_op: bool = False
) -> _Done:
    _filled(output, [given])
    return _Done()


def _batch(moves: list[Any]) -> list[_Done]:
    sent = [move.tensor for move in moves if move.op is dist.isend]
    for move in moves:
        if move.op is not dist.isend:
            _filled(move.tensor, [one for one in sent if one.numel() == move.tensor.numel()])
    return [_Done()]


def _received(tensor: Tensor, *others: Any, **named: Any) -> _Done:
    _filled(tensor, [])
    return _Done()


def _broadcast(tensor: Tensor, source: int, group: Any = None) -> None:
    if source != dist.get_rank():
        _filled(tensor, [])


def _gathered(every: list[Any], value: Any, group: Any = None) -> None:
    every[:] = [value] * len(every)


@contextmanager
def one_of(world: int, rank: int) -> Iterator[None]:
    """This process is a rank of a world of GPUs, until the end. No process group may be there before."""
    from ditmesh.comm import grid, link, mesh, transports
    from ditmesh.comm.hosts import Hosts

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with ExitStack() as stack:
            for owner, name, stand_in in (
                (dist, "isend", lambda *_, **__: _Done()),
                (dist, "irecv", _received),
                (dist, "P2POp", lambda op, tensor, peer, group, tag: SimpleNamespace(**locals())),
                (dist, "batch_isend_irecv", _batch),
                (dist, "all_to_all_single", _all_to_all),
                (dist, "broadcast", _broadcast),
                (dist, "all_reduce", lambda *_, **__: _Done()),
                (dist, "all_gather_object", _gathered),
                (dist, "broadcast_object_list", lambda *_, **__: None),
                (dist, "barrier", lambda *_, **__: None),
                (transports, "backend_of", lambda *_: "nccl"),
                (link.Link, "connect_peers", lambda *_: None),
                # No thread watches for failures of ranks that are not there.
                (grid, "backend_of", lambda *_: "gloo"),
                (grid, "gather_objects", lambda value, group: [value] * world),
                (torch.accelerator, "current_device_index", lambda: 0),
                (torch.accelerator, "set_device_index", lambda device: None),
                (grid, "find_hosts", lambda *_: Hosts.single(world)),
                (mesh.Mesh, "new_host_group", lambda *_: None),
                (mesh.Mesh, "_meet", lambda self, mine: [mine] * len(self._peers)),
            ):
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            yield
    finally:
        dist.destroy_process_group()
        # torch's says the rank before every line, once for every group there was.
        sys.excepthook = hook

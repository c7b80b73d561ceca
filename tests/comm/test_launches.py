"""One message a collective, as NCCL takes it: few kernels however many ranks there are, and the values of messages
that go one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rules.fake_cuda import FREE
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ditmesh import Mesh, ParallelConfig
from ditmesh.attention.ulysses import HeadExchange
from ditmesh.comm import transports
from ditmesh.comm.link import Link
from ditmesh.comm.state import Traffic
from ditmesh.core.partition import Partition, even_cut, weighted_cut
from support import ruled

HEADS, WIDTH = 24, 8


class Launches(TorchDispatchMode):
    """Kernels by the name of the operation, and the bytes that are handed to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.given = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if not func.is_view and name not in FREE:
            self.kernels[name] += 1
        if namespace == "c10d":
            self.given += args[1].nbytes
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_link(size: int) -> Iterator[Link]:
    """A link of so many ranks whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        link = Link("ulysses", range(size), 0, Traffic())
        link.connect(dist.group.WORLD, None)
        yield link
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("image", [4096, 4095])
def test_an_exchange_of_heads_launches_as_many_kernels_on_any_number_of_ranks(size, image):
    streams = Partition((even_cut(512, size), even_cut(image, size)))
    with fake_link(size) as link:
        exchange = HeadExchange(link, even_cut(HEADS, size))
        tensors = [torch.ones(1, streams.lengths[0], HEADS, WIDTH).transpose(1, 2) for _ in range(3)]
        with Launches() as seen:
            q, k, v = exchange.gather_tokens(tensors, (streams,) * 3)
            exchange.gather_heads(q, streams)
    assert q.shape == k.shape == v.shape == (1, HEADS // size, 512 + image, WIDTH)
    assert seen.kernels.total() <= 8, seen.kernels


@pytest.mark.parametrize("size", [2, 8])
def test_an_all_gather_sends_its_piece_once(size):
    with fake_link(size) as link:
        piece = torch.ones(1, 512, 64)
        with Launches() as seen:
            whole = link.all_gather(piece, [512] * size, 1)
        assert whole.shape == (1, 512 * size, 64)
        # Tokens of one sample lie one after the other as they come.
        assert seen.kernels.total() == 1, seen.kernels
        assert seen.given == piece.nbytes
        with Launches() as seen:
            link.all_gather(piece, [512] + [511] * (size - 1), 1)
        assert seen.given == piece.nbytes
        assert seen.kernels.total() <= 2, seen.kernels
        # Lengths that differ much: a piece to each of the others.
        with Launches() as seen:
            link.all_gather(piece, [512] + [8] * (size - 1), 1)
        assert seen.given == (size - 1) * piece.nbytes


# --- values


def exchanged(link: Link, streams: tuple[Partition, ...], counts: tuple[int, ...], batch: int) -> list[Tensor]:
    """What the exchanges of an attention call give, and the gradients."""
    exchange = HeadExchange(link, counts)
    torch.manual_seed(link.rank)
    tensors = [
        torch.randn(batch, tokens.lengths[link.rank], sum(counts), WIDTH).transpose(1, 2).requires_grad_()
        for tokens in streams
    ]
    whole = exchange.gather_tokens(tensors, streams)
    back = exchange.gather_heads(whole[0] + 1, streams[0])
    loss = sum((number + link.rank) * one.square().sum() for number, one in enumerate([*whole, back], 1))
    grads = torch.autograd.grad(loss, tensors)
    return [one.detach().clone() for one in (*whole, back, *grads)]


def both_ways(size: int) -> list[tuple[str, bool]]:
    """For every case whether a packed message has the bits of messages that go one by one."""
    mesh = Mesh(ParallelConfig(ulysses=size, shared_memory=False))
    link = mesh.ulysses
    text, image = Partition((even_cut(7, size),)), Partition((even_cut(33, size),))
    joint = Partition((*text.blocks, *image.blocks))
    kept = Partition(((5,) * size, *image.blocks), frozenset({0}))
    even = Partition((even_cut(4 * size, size), even_cut(8 * size, size)))
    counts = even_cut(2 * size, size), even_cut(2 * size + 1, size), weighted_cut(4 * size, range(1, size + 1))
    cases: list[tuple[str, tuple[Partition, ...]]] = [
        ("even", (even,) * 3),
        ("joint", (joint,) * 3),
        ("replicated text", (kept,) * 3),
        (
            "replicated keys",
            (image, Partition(((5,) * size,), frozenset({0})), Partition(((5,) * size,), frozenset({0}))),
        ),
        ("other keys", (text, joint, joint, image)),
    ]
    same: list[tuple[str, bool]] = []
    nothing = [0] * (size - 1)
    for name, streams in cases:
        for heads in counts:
            if min(heads) < 2:
                continue
            for batch in (1, 2):
                sent: list[int] = []
                found: list[list[Tensor]] = []
                for packs in (False, True):
                    mesh.traffic.reset()
                    with mock.patch.object(transports, "TAGGED", () if packs else ("gloo",)):
                        assert link.packs == packs
                        found.append(exchanged(link, streams, heads, batch))
                    sent.append(mesh.traffic.bytes_sent["ulysses"])
                alike = sent[0] == sent[1] and all(
                    torch.equal(one, other) and one.stride() == other.stride()
                    for one, other in zip(*found, strict=True)
                )
                same.append((f"{name}, heads {heads}, batch {batch}", alike))
    torch.manual_seed(link.rank)
    for lengths in ([3] * size, [*even_cut(3 * size - 1, size)], [9, *nothing], [0, *[4] * (size - 1)]):
        for dim in (0, 1, 2):
            shape = [1, 2, 3]
            shape[dim] = lengths[link.rank]
            piece = torch.randn(shape)
            shapes = [[tuple(length if at == dim else shape[at] for at in range(3)), (2,)] for length in lengths]
            sent, gathered = [], []
            for packs in (False, True):
                mesh.traffic.reset()
                with mock.patch.object(transports, "TAGGED", () if packs else ("gloo",)):
                    parts = link.all_gather_list([piece, torch.full((2,), float(link.rank))], shapes)
                    gathered.append([link.all_gather(piece, lengths, dim), *(one for part in parts for one in part)])
                sent.append(mesh.traffic.bytes_sent["ulysses"])
            alike = sent[0] == sent[1] and all(map(torch.equal, *gathered))
            same.append((f"gather of {lengths} along {dim}", alike))
    mesh.close()
    return same


@ruled.gloo
@pytest.mark.parametrize("size", [2, 3])
def test_a_packed_message_has_the_bits_of_messages_one_by_one(ranks, size):
    for found in ranks(size).run(both_ways, size):
        assert len(found) > 20
        assert [name for name, same in found if not same] == []

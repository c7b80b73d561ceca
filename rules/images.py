"""Requests of tiny pipelines over gloo, over the group of NCCL's rules, and under torch's own checks of collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditmesh
from rules.group import ruled
from support.faults import STRATEGIES, drawn_by, pipeline


def image(strategy: str, mode: str) -> tuple[str, torch.Tensor]:
    """What carries the tensors of a strategy, and the second of two images.

    Args:
        mode: of the rules, or ``"gloo"``.
    """
    name, config = STRATEGIES[strategy]
    pipe = pipeline(name)
    with (
        nullcontext() if mode == "gloo" else ruled(mode),
        ditmesh.parallelized(pipe, {**config, "shared_memory": False}),
    ):
        drawn_by(pipe, name)
        drawn = drawn_by(pipe, name)
        mesh = ditmesh.engine_of(pipe).mesh
        return mesh.world.transport, drawn


def by_rules(mode: str, function: Callable[..., Any], *given: Any) -> Any:
    """A function of a rank, whose links use the rules."""
    with ruled(mode):
        return function(*given)


@contextmanager
def checked_by_torch() -> Iterator[None]:
    """As under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: new groups compare every collective's kind, shapes and dtype."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def checked(strategies: list[str]) -> list[tuple[bool, torch.Tensor]]:
    """For each strategy whether torch compares its collectives, and the image."""
    found = []
    for strategy in strategies:
        name, config = STRATEGIES[strategy]
        pipe = pipeline(name)
        with checked_by_torch(), ditmesh.parallelized(pipe, {**config, "shared_memory": False}):
            group = ditmesh.engine_of(pipe).mesh.world.group
            compares = type(group._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
            found.append((compares, drawn_by(pipe, name)))
    return found


def planted() -> str:
    """What torch says of ranks that add up tensors of unlike sizes."""
    with checked_by_torch():
        mesh = ditmesh.Mesh(ditmesh.ParallelConfig(ring=2, shared_memory=False), timeout=20)
        link = mesh.ring
        with pytest.raises(RuntimeError) as caught:
            link.all_reduce(torch.ones(4 + mesh.rank))
        mesh.fail_request()
        mesh.close()
        return f"{caught.value} {caught.value.__cause__}"

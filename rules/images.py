"""Requests of tiny pipelines over gloo, and over the group of NCCL's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

import ditmesh
from ditmesh.comm.link import Link, Transfer
from rules.group import RuleBroken, ruled
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
def _without_wait() -> Iterator[None]:
    """Transfers give what they receive before it is there; their buffers stay."""
    kept: list[Transfer] = []

    def given(self: Transfer, *_: Any) -> list[torch.Tensor]:
        kept.append(self)
        return self._received

    with mock.patch.object(Transfer, "wait", given):
        yield


@contextmanager
def _freed() -> Iterator[None]:
    """What was sent is let go of after it was posted."""
    over_group, made = Link._over_group, Transfer.__init__

    def copied(self: Link, kind: str, outgoing: Any, *others: Any) -> Transfer:
        return over_group(self, kind, [([one.clone() for one in tensors], to) for tensors, to in outgoing], *others)

    def forgetful(self: Transfer, received: Any = (), sent: Any = (), *others: Any, **named: Any) -> None:
        made(self, received, (), *others, **named)

    with mock.patch.object(Link, "_over_group", copied), mock.patch.object(Transfer, "__init__", forgetful):
        yield


# Faults in what ditmesh does while messages are under way.
IN_FLIGHT: dict[str, Callable[[], Any]] = {"wait": _without_wait, "freed": _freed}


def in_flight(fault: str) -> str:
    """What a rank says of an image with one of `IN_FLIGHT` on every rank."""
    name, config = STRATEGIES["ring"]
    with ruled("eager", "late"), IN_FLIGHT[fault]():
        pipe = pipeline(name)
        try:
            with ditmesh.parallelized(pipe, {**config, "shared_memory": False, "inputs": "trust"}, timeout=20.0):
                drawn = drawn_by(pipe, name)
        except (RuleBroken, ditmesh.PeerError) as error:
            return str(error)
    return "finite" if drawn.isfinite().all() else "not finite"

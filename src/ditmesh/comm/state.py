"""The request in progress as the links of a rank see it: its number, and whether they may be used.

A request is what lies between two boundaries (`ditmesh.Mesh.begin_request`), usually one call of a pipeline. All ranks
number them alike. A message says which request it belongs to and what it is, so that one of another request, or of
another operation, is never taken for what a rank waits for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import DitmeshError

# Shape and dtype of a tensor.
Spec = tuple[tuple[int, ...], torch.dtype]

# What a message can be part of.
KINDS = ("all_to_all", "all_gather", "all_reduce", "shift", "send", "broadcast", "all_gather_async")


class PeerError(DitmeshError, dist.DistError):
    """Another rank has failed, has not come, or does something else: a consequence on this rank, not the cause."""


class DesyncError(PeerError):
    """A message is not the one this rank waits for: the ranks do not do the same thing. It was not taken."""


class RequestState:
    """Shared by a mesh and its links.

    Attributes:
        number: of the request in progress, the same on all ranks.
        messages: operations on any link since the request began.
        refusal: why no link may be used, one sentence; None: they may.
    """

    def __init__(self) -> None:
        self.number = 0
        self.messages = 0
        self.refusal: str | None = None

    def enter(self) -> None:
        """An operation on a link begins.

        Raises:
            PeerError: the request has failed here, or the mesh is broken.
        """
        self.check()
        self.messages += 1

    def check(self) -> None:
        """Refuse while links may not be used.

        Raises:
            PeerError: see `enter`.
        """
        if self.refusal is not None:
            raise PeerError(self.refusal)


class Header(NamedTuple):
    """What a message says about itself, as four words of 64 bits.

    Attributes:
        request: its request's number.
        kind: place in `KINDS`.
        size: bytes of its tensors.
        digest: of kind, shapes and dtypes.
    """

    request: int
    kind: int
    size: int
    digest: int

    @classmethod
    def of(cls, request: int, kind: str, specs: Sequence[Spec]) -> Header:
        """The header of a message of tensors with these shapes and dtypes."""
        return cls(request, *_described(kind, tuple(specs)))

    @property
    def tag(self) -> int:
        """A tag for backends that match messages by one: another message has another (31 bits)."""
        return (self.digest ^ (self.request * 0x9E3779B1)) & 0x7FFFFFFF

    def __str__(self) -> str:
        kind = KINDS[self.kind] if 0 <= self.kind < len(KINDS) else "nothing known"
        return f"{kind} of {self.size:,} bytes in request {self.request}"


@lru_cache(maxsize=4096)
def _described(kind: str, specs: tuple[Spec, ...]) -> tuple[int, int, int]:
    text = f"{kind} {[(tuple(shape), str(dtype)) for shape, dtype in specs]}"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return KINDS.index(kind), sum(prod(shape) * dtype.itemsize for shape, dtype in specs), digest


def peer_error(link: str, error: RuntimeError) -> RuntimeError:
    """What to raise for an error of a process group: a sentence where it only says that a rank did not take part."""
    text = str(error)
    known = text.lower()
    if isinstance(error, PeerError) or not ("gloo" in known or "closed by peer" in known):
        return error
    if "timed out" in known:
        what = f"timed out: a rank of the {link} link did not do its part before the deadline"
    else:
        what = f"a rank of the {link} link has failed this request, or has ended"
    return PeerError(f"{what} ({text.splitlines()[0].partition('] ')[2].partition('. ')[0]})")

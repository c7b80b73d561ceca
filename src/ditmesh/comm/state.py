"""State that the links of a rank share: the request in progress, whether they may be used, and byte counters.

A request is what lies between two boundaries (`ditmesh.Mesh.begin_request`), usually one call of a pipeline. All ranks
number them alike. A message names its request and its operation, so that a message of another request, or of
another operation, is never accepted by mistake.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ..errors import DitmeshError

if TYPE_CHECKING:
    from .watcher import Notice

# Shape and dtype of a tensor.
Spec = tuple[tuple[int, ...], torch.dtype]

# Operations that send messages.
KINDS = ("all_to_all", "all_gather", "all_reduce", "shift", "send", "broadcast", "all_gather_async")


class PeerError(DitmeshError, dist.DistError):
    """Another rank has failed, has not come, or does something else: a consequence on this rank, not the cause."""


class DesyncError(PeerError):
    """A message is not the one this rank waits for: the ranks do not do the same thing. It was not taken."""


class RequestState:
    """State shared by a mesh and its links."""

    def __init__(self) -> None:
        # Of the request in progress, the same on all ranks.
        self.number = 0
        # Operations on any link since the request began.
        self.messages = 0
        # Why no link may be used, one sentence; None: they may.
        self.refusal: str | None = None
        # Global ranks that are in the request, and may fail it.
        self.peers: Sequence[int] = ()
        # Another rank has failed it and groups were aborted; whether this rank has raised that error.
        self.lost = self.reported = False
        # This rank is at a boundary; failures of the next request that were reported meanwhile.
        self.meeting = False
        self.early: list[Notice] = []
        # Seconds for which this rank's thread has waited for other ranks.
        self.waited = 0.0

    def begin(self, number: int, peers: Sequence[int]) -> None:
        """Begin a request."""
        self.number, self.peers, self.messages, self.reported = number, peers, 0, False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds of what waits for other ranks; nothing is counted in a graph that is compiled."""
        if torch.compiler.is_compiling():
            yield
            return
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - began

    def enter(self) -> None:
        """Count an operation on a link, if it is allowed; see `check`."""
        # Counted first: the watcher's thread then sees the message, or this thread sees the refusal.
        self.messages += 1
        if self.refusal is not None:
            self.messages -= 1
            self.check()

    def check(self) -> None:
        """Refuse while links may not be used; `PeerError`: the request has failed here, or the mesh is broken."""
        if self.refusal is not None:
            self.reported = True
            raise PeerError(self.refusal)

    def report(self) -> None:
        """Raise another rank's failure of the request as a `PeerError`, unless this rank has raised it."""
        if self.lost and not self.reported:
            self.check()


class Traffic:
    """Bytes this rank has sent to other ranks and messages posted, by axis name.

    Data that a rank keeps for itself are not traffic. Counting is arithmetic on sizes known on the host: it never
    waits for a device.

    Attributes:
        bytes_sent, calls: by axis.
        blocks: those of block masks that attention on this rank has computed; a number, or a tensor of one.
        observer: called as ``observer(axis, kind)`` before every operation of a link, where ``kind`` is the link's
            method; the operation raises its exceptions. For tests and measurements; None: no observer.
    """

    def __init__(self) -> None:
        self.observer: Callable[[str, str], None] | None = None
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.blocks: torch.Tensor | int = 0

    def add(self, axis: str, sent: int) -> None:
        """Count one call on ``axis`` that sends ``sent`` bytes to other ranks.

        Compiled graphs do not count: a graph that reads the counters depends on them, and torch would compile every
        block again.
        """
        if torch.compiler.is_compiling():
            return
        self.bytes_sent[axis] += sent
        self.calls[axis] += 1

    def reset(self) -> None:
        """Start counting from zero."""
        self.bytes_sent.clear()
        self.calls.clear()
        self.blocks = 0


class Header(NamedTuple):
    """The header of a message, four words of 64 bits."""

    request: int
    # Place in `KINDS`.
    kind: int
    # Bytes of the tensors.
    size: int
    # Of kind, shapes and dtypes.
    digest: int

    @classmethod
    def of(cls, request: int, kind: str, specs: Sequence[Spec]) -> Header:
        """The header of a message of tensors with these shapes and dtypes."""
        return cls(request, *_words(kind, tuple(specs)))

    @property
    def tag(self) -> int:
        """A tag for backends that match messages by one: another message has another (31 bits)."""
        return (self.digest ^ (self.request * 0x9E3779B1)) & 0x7FFFFFFF

    def __str__(self) -> str:
        kind = KINDS[self.kind] if 0 <= self.kind < len(KINDS) else "nothing known"
        return f"{kind} of {self.size:,} bytes in request {self.request}"


@lru_cache(maxsize=4096)
def _words(kind: str, specs: tuple[Spec, ...]) -> tuple[int, int, int]:
    text = f"{kind} {[(tuple(shape), str(dtype)) for shape, dtype in specs]}"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return KINDS.index(kind), sum(prod(shape) * dtype.itemsize for shape, dtype in specs), digest


def raise_for_peer(link: str, error: RuntimeError, state: RequestState | None = None) -> NoReturn:
    """Raise an error of a process group: as a `PeerError` where it only says that a rank did not take part.

    ``state``: of the request, with the error of the rank that failed first, if that was reported.
    """
    text, backend = str(error), isinstance(error, dist.DistBackendError)
    known = backend or any(words in text.lower() for words in ("gloo", "nccl", "closed by peer"))
    if isinstance(error, PeerError) or not known:
        # Not from itself: causes would be a circle.
        raise error
    # Frames of torch refer to the group, which keeps its connections as long: other ranks would wait for this rank.
    traceback.clear_frames(error.__traceback__)
    if state is not None and state.lost and state.refusal is not None:
        state.reported = True
        raise PeerError(state.refusal) from error
    if "timed out" in text.lower() or "timeout" in text.lower():
        what = f"timed out: a rank of the {link} link did not do its part before the deadline"
    else:
        what = f"a rank of the {link} link has failed this request, or has ended"
    first = text.splitlines()[0]
    # gloo's messages begin with a place in its sources.
    said = first.partition("] ")[2].partition(". ")[0] if first.startswith("[") else first
    raise PeerError(f"{what} ({said})") from error

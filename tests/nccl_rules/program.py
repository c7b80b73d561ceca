"""What a rank asks of a process group, in order: the program that `record` writes and `replay` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Half:
    """One side of a point-to-point message.

    Attributes:
        direction: whether this rank sends or receives.
        peer: global rank of the other side.
        count: elements.
        dtype: such as ``"float32"``.
        contiguous: whether the buffer is, as NCCL needs it.
    """

    direction: Literal["send", "recv"]
    peer: int
    count: int
    dtype: str
    contiguous: bool = True


@dataclass(frozen=True)
class PointToPoint:
    """One unbatched ``isend`` or ``irecv`` (one half), or one ``batch_isend_irecv`` (several).

    Attributes:
        number: of the operation on its rank.
        group: name of the communicator.
        halves: what it moves.
        batched: whether it is one group call of NCCL.
    """

    number: int
    group: str
    halves: tuple[Half, ...]
    batched: bool


@dataclass(frozen=True)
class Collective:
    """A collective of a whole group.

    Attributes:
        number: of the operation on its rank.
        group: name of the communicator.
        ranks: global ranks of the group.
        kind: such as ``"all_reduce"``.
        agreed: what has to be the same on all ranks: counts, dtype, root. An all-to-all's counts differ by rank.
        objects: whether it moves pickled Python objects, for which the host waits.
        sizes: of an all-to-all: elements to and from every rank of the group; else empty.
    """

    number: int
    group: str
    ranks: tuple[int, ...]
    kind: str
    agreed: tuple[object, ...]
    objects: bool = False
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for an operation of this rank; the host goes on."""

    number: int


@dataclass(frozen=True)
class Compute:
    """Kernels on the compute stream, in units of cost."""

    cost: float


@dataclass(frozen=True)
class HostWait:
    """The host waits for the compute stream, as ``.item()`` does."""


Entry = PointToPoint | Collective | Wait | Compute | HostWait
# The entries of one rank, in the order of its host.
Program = list[Entry]

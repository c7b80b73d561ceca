"""Failures of ranks: which one is the cause, and what is said about it."""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import RankFailed
from .messages import encode

# What CUDA calls the failures of a device that no job can cause (cudaError_t: devices unavailable, no device, ECC and
# NVLink uncorrectable, hardware stack, contained; "unknown" is what is left of one that has fallen off the bus).
LOST_DEVICE = (
    "busy or unavailable",
    "no cuda-capable device",
    "uncorrectable",
    "hardware stack error",
    "hardware error",
    "unknown error",
)


@dataclass(frozen=True)
class Failure:
    """Why a rank did not answer.

    Attributes:
        rank: which one.
        weight: 0: a cause; more: perhaps a consequence of another failure.
        what: the rest of a sentence that begins with the rank.
        text: its traceback.
        pickled_cause: its exception.
        exit_code: of its process, when that has ended.
        gone: the rank or its device is no more.
    """

    rank: int
    weight: int
    what: str
    text: str = ""
    pickled_cause: bytes | None = None
    exit_code: int | None = None
    gone: bool = False

    @property
    def certain(self) -> bool:
        """Whether no other rank can have more to say about it."""
        return self.gone and self.weight == 0


def of_exception(rank: int, error: BaseException) -> Failure:
    """A function has raised. The first frame is that of the caller of the function, and is left out."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    first_line = (str(error).strip() or "no message").splitlines()[0]
    cause: bytes | None
    try:
        cause = encode(error)
        pickle.loads(cause)
    except Exception:
        cause = None
    what = f"raised {type(error).__name__}: {first_line}"
    return Failure(rank, 2 if lost_peer(error) else 0, what, text, cause, None, lost_device(error))


def of_death(rank: int, code: int | None, stack: str) -> Failure:
    """A process has ended, or has closed its connection.

    Args:
        code: its exit code; None: it still runs.
        stack: what its fault handler has written.
    """
    weight = 0
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        how = f"was killed by {name}"
        if name == "SIGKILL":
            how += " (from outside; the kernel does so when memory runs out)"
        # NCCL and the C++ runtime abort a rank that has lost a peer: look for a better reason first.
        weight = 1 if name == "SIGABRT" else 0
    elif code is None:
        how = "closed its connection"
    else:
        how = f"ended without an answer (exit code {code})"
    return Failure(rank, weight, how, stack, None, code, True)


def settled(failures: Sequence[Failure], answered: int, world_size: int) -> bool:
    """Whether every rank has come to an end of the call, and none has lost its device or a peer: all can go on."""
    return len(failures) + answered == world_size and not any(f.weight or f.gone for f in failures)


def alike(failures: Sequence[Failure], world_size: int) -> bool:
    """Whether all ranks have raised the same at the same place."""
    return len(failures) == world_size and len({(failure.what, failure.text) for failure in failures}) == 1


def rank_failed(failures: Sequence[Failure], stalled: Mapping[int, str], world_size: int, open: bool) -> RankFailed:
    """The error for the caller.

    Args:
        failures: what is known, causes first.
        stalled: ranks that said nothing, and where each of them was.
        open: whether the ranks can run something else.
    """
    root = failures[0]
    parts = []
    if root.weight > 0 and stalled:
        # A rank that lost a collective says nothing about the one that did not come to it: that one comes first.
        first, where = next(iter(stalled.items()))
        parts += [f"rank {first} of {world_size} stalled{_place(where)}: {_names(failures)} waited for it in vain"]
        parts += [f"rank {rank} was here: {where}" for rank, where in stalled.items()]
    parts.append(f"rank {root.rank} of {world_size} {root.what}")
    if root.text:
        parts.append(root.text.rstrip())
    error = RankFailed("\n\n".join(parts), root.rank, root.exit_code, lost(failures, tuple(stalled)), open)
    if root.pickled_cause is not None:
        with contextlib.suppress(Exception):
            error.__cause__ = pickle.loads(root.pickled_cause)
    return error


def _names(failures: Sequence[Failure]) -> str:
    ranks = sorted(failure.rank for failure in failures)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _place(where: str) -> str:
    """Where a rank was, in a few words, from what `faulthandler` wrote, the latest call first."""
    for line in where.splitlines():
        if line.lstrip().startswith("File "):
            return f" at {line.strip()}"
        if line.startswith("it is "):
            return f" ({line.removeprefix('it is ')})"
    return ""


def lost(failures: Sequence[Failure], silent: Sequence[int]) -> tuple[int, ...]:
    """Ranks that are gone through no error of the job; ``failures[0]`` is what the job failed of."""
    root = failures[0]
    if root.gone:
        # An abort may be the consequence of another rank's; then only the first is known to be gone.
        gone = {failure.rank for failure in failures if failure.certain}
        return tuple(sorted({root.rank} | gone))
    # Those that waited in vain say so; the one they waited for says nothing any more.
    return tuple(silent) if root.weight > 0 else ()


def lost_device(error: BaseException) -> bool:
    """Whether the rank's GPU has failed, and not the job: CUDA says so in words only."""
    import torch

    text = str(error).lower()
    # Not an OutOfMemoryError, an illegal address or an assertion: another device would meet them as well.
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, torch.OutOfMemoryError)
        and "cuda error" in text
        and any(words in text for words in LOST_DEVICE)
    )


def lost_peer(error: BaseException) -> bool:
    """Whether this failure may only say that another rank failed, or did not come."""
    import torch.distributed as dist

    current: BaseException | None = error
    while current is not None:
        if isinstance(current, dist.DistError):
            return True
        text = str(current).lower()
        # Gloo raises plain RuntimeErrors; these words are what they have in common.
        if isinstance(current, RuntimeError) and (
            "gloo" in text or "nccl" in text or "closed by peer" in text or "timed out waiting" in text
        ):
            return True
        current = current.__cause__
    return False

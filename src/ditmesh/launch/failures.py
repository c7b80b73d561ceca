"""Failures of ranks: finding the cause, and the error message."""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..errors import RankFailed, first_line
from .messages import encode

# CUDA's names for failures of a device that no job can cause (cudaError_t: devices unavailable, no device, ECC and
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
    """The reason why a rank did not answer; ``what`` continues a sentence that begins with the rank."""

    rank: int
    # 0: a cause; more: perhaps a consequence of another failure.
    weight: int
    what: str
    traceback: str = ""
    pickled_cause: bytes | None = None
    # The exit code of its process, if it has ended.
    exit_code: int | None = None
    # The rank or its device is lost.
    gone: bool = False

    @property
    def certain(self) -> bool:
        """True if no other rank can know more about the failure."""
        return self.gone and self.weight == 0


def of_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a function that raised an exception. The first frame, that of the caller, is omitted."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    what = f"raised {type(error).__name__}: {first_line(error, 'no message')}"
    cause = None
    with contextlib.suppress(Exception):
        pickled = encode(error)
        pickle.loads(pickled)
        cause = pickled
    return Failure(rank, 2 if lost_peer(error) else 0, what, text, cause, None, lost_device(error))


def of_exit(rank: int, code: int | None, stack: str) -> Failure:
    """The failure of a process that ended with an exit code, or (None) closed its connection."""
    name = "" if code is None else {-one.value: one.name for one in signal.Signals}.get(code, f"signal {-code}")
    if code is None:
        how = "closed its connection"
    elif code >= 0:
        how = f"ended without an answer (exit code {code})"
    else:
        how = f"was killed by {name}"
        if name == "SIGKILL":
            how += " (from outside; the kernel does so when memory runs out)"
    # NCCL and the C++ runtime abort a rank that has lost a peer: look for a better reason first.
    return Failure(rank, 1 if name == "SIGABRT" else 0, how, stack, None, code, True)


def alike(failures: Sequence[Failure], world_size: int) -> bool:
    """True if all ranks have raised the same exception at the same place."""
    return len(failures) == world_size and len({(failure.what, failure.traceback) for failure in failures}) == 1


def rank_failed(failures: Sequence[Failure], stalled: Mapping[int, str], world_size: int, open: bool) -> RankFailed:
    """The error for failures, causes first, with the silent ranks and the code position of each."""
    root = failures[0]
    parts = []
    if root.weight > 0 and stalled:
        # A rank that waited in a collective does not name the missing rank, which comes first.
        first, where = next(iter(stalled.items()))
        waiting = _names({failure.rank for failure in failures})
        parts += [f"rank {first} of {world_size} stalled{_place(where)}: {waiting} waited for it in vain"]
        parts += _whereabouts(stalled)
    parts.append(f"rank {root.rank} of {world_size} {root.what}")
    if root.traceback:
        parts.append(root.traceback.rstrip())
    # Those that waited in vain say so; the one they waited for says nothing any more.
    lost = tuple(stalled) if root.weight > 0 else ()
    if root.gone:
        # An abort may be the consequence of another rank's; then only the first is known to be gone.
        lost = tuple(sorted({root.rank} | {failure.rank for failure in failures if failure.certain}))
    error = RankFailed("\n\n".join(parts), root.rank, root.exit_code, lost, open)
    if root.pickled_cause is not None:
        with contextlib.suppress(Exception):
            error.__cause__ = pickle.loads(root.pickled_cause)
    return error


def late(stalled: Mapping[int, str], world_size: int, expected: str) -> RankFailed:
    """The error for ranks that have not done the ``expected`` action, with the code position of each."""
    parts = [f"{_names(stalled)} of {world_size} had not {expected}", *_whereabouts(stalled)]
    return RankFailed("\n\n".join(parts), next(iter(stalled)), lost=tuple(stalled))


def _whereabouts(stalled: Mapping[int, str]) -> list[str]:
    return [f"rank {rank} was here: {where}" for rank, where in stalled.items()]


def _names(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"


def _place(where: str) -> str:
    """A short code position of a rank from `faulthandler`'s output, the latest call first."""
    for line in where.splitlines():
        if line.lstrip().startswith("File "):
            return f" at {line.strip()}"
    return ""


def lost_device(error: BaseException) -> bool:
    """True if the rank's GPU has failed instead of the job, by CUDA's error text."""
    import torch

    text = str(error).lower()
    # Not an OutOfMemoryError, an illegal address or an assertion, which would occur on another device too.
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, torch.OutOfMemoryError)
        and "cuda error" in text
        and any(words in text for words in LOST_DEVICE)
    )


def lost_peer(error: BaseException | None) -> bool:
    """True if this failure may be a consequence of another rank's failure."""
    import torch.distributed as dist

    while error is not None:
        # gloo raises plain RuntimeErrors; these words occur in all of them.
        words = str(error).lower() if isinstance(error, RuntimeError) else ""
        if isinstance(error, dist.DistError) or any(
            known in words for known in ("gloo", "nccl", "closed by peer", "timed out waiting")
        ):
            return True
        error = error.__cause__
    return False

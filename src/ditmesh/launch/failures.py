"""Failures of ranks: which one is the cause, and what is said about it."""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from collections.abc import Collection, Mapping, Sequence
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
    """Why a rank did not answer: ``what`` is the rest of a sentence that begins with the rank."""

    rank: int
    # 0: a cause; more: perhaps a consequence of another failure.
    weight: int
    what: str
    traceback: str = ""
    pickled_cause: bytes | None = None
    # Of its process, when that has ended.
    exit_code: int | None = None
    # The rank or its device is no more.
    gone: bool = False

    @property
    def certain(self) -> bool:
        """Whether no other rank can have more to say about it."""
        return self.gone and self.weight == 0


def of_exception(rank: int, error: BaseException) -> Failure:
    """A function has raised. The first frame is that of the caller of the function, and is left out."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    what = f"raised {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    cause = None
    with contextlib.suppress(Exception):
        pickled = encode(error)
        pickle.loads(pickled)
        cause = pickled
    return Failure(rank, 2 if lost_peer(error) else 0, what, text, cause, None, lost_device(error))


def of_death(rank: int, code: int | None, stack: str) -> Failure:
    """A process has ended with an exit code, or (None) closed its connection; ``stack`` is from its fault handler."""
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
    """Whether all ranks have raised the same at the same place."""
    return len(failures) == world_size and len({(failure.what, failure.traceback) for failure in failures}) == 1


def rank_failed(failures: Sequence[Failure], stalled: Mapping[int, str], world_size: int, open: bool) -> RankFailed:
    """The error for failures, causes first, with the ranks that said nothing and where each of them was."""
    root = failures[0]
    parts = []
    if root.weight > 0 and stalled:
        # A rank that lost a collective says nothing about the one that did not come to it: that one comes first.
        first, where = next(iter(stalled.items()))
        waiting = _names({failure.rank for failure in failures})
        parts += [f"rank {first} of {world_size} stalled{_place(where)}: {waiting} waited for it in vain"]
        parts += _whereabouts(stalled)
    parts.append(f"rank {root.rank} of {world_size} {root.what}")
    if root.traceback:
        parts.append(root.traceback.rstrip())
    error = RankFailed("\n\n".join(parts), root.rank, root.exit_code, _lost(failures, tuple(stalled)), open)
    if root.pickled_cause is not None:
        with contextlib.suppress(Exception):
            error.__cause__ = pickle.loads(root.pickled_cause)
    return error


def late(stalled: Mapping[int, str], world_size: int, expected: str) -> RankFailed:
    """The error for ranks, and where each of them was, that had not done what was ``expected``."""
    parts = [f"{_names(stalled)} of {world_size} had not {expected}", *_whereabouts(stalled)]
    return RankFailed("\n\n".join(parts), next(iter(stalled)), lost=tuple(stalled))


def _whereabouts(stalled: Mapping[int, str]) -> list[str]:
    return [f"rank {rank} was here: {where}" for rank, where in stalled.items()]


def _names(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"


def _place(where: str) -> str:
    """Where a rank was, in a few words, from what `faulthandler` wrote, the latest call first."""
    for line in where.splitlines():
        if line.lstrip().startswith("File "):
            return f" at {line.strip()}"
        if line.startswith("it is "):
            return f" ({line.removeprefix('it is ')})"
    return ""


def _lost(failures: Sequence[Failure], silent: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks that are gone through no error of the job; ``failures[0]`` is what the job failed of."""
    root = failures[0]
    if root.gone:
        # An abort may be the consequence of another rank's; then only the first is known to be gone.
        return tuple(sorted({root.rank} | {failure.rank for failure in failures if failure.certain}))
    # Those that waited in vain say so; the one they waited for says nothing any more.
    return silent if root.weight > 0 else ()


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


def lost_peer(error: BaseException | None) -> bool:
    """Whether this failure may only say that another rank failed, or did not come."""
    import torch.distributed as dist

    while error is not None:
        # Gloo raises plain RuntimeErrors; these words are what they have in common.
        words = str(error).lower() if isinstance(error, RuntimeError) else ""
        if isinstance(error, dist.DistError) or any(
            known in words for known in ("gloo", "nccl", "closed by peer", "timed out waiting")
        ):
            return True
        error = error.__cause__
    return False

"""What rank 0 and the others share of a call that is made on all ranks: torch's modes, failures, and the mesh."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import PeerError
from ..comm.mesh import Mesh
from ..launch.failures import Failure, lost_peer


@dataclass(frozen=True)
class Modes:
    """Modes of torch that decide how a call computes, beside its arguments."""

    inference: bool
    autocast: torch.dtype | None

    @classmethod
    def here(cls, device: torch.device) -> Modes:
        """The modes of this thread."""
        kind = device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(torch.is_inference_mode_enabled(), autocast)

    @contextmanager
    def apply(self, device: torch.device) -> Iterator[None]:
        """Compute so; no gradient passes from rank to rank."""
        with (
            torch.inference_mode(self.inference),
            torch.no_grad(),
            torch.autocast(device.type, self.autocast, enabled=self.autocast is not None),
        ):
            yield


def _as_error(failure: Failure) -> Exception:
    """The exception to raise on rank 0."""
    told = PeerError(f"rank {failure.rank} has failed in this call (it {failure.what})\n\n{failure.traceback}")
    if failure.pickled_cause is None or failure.weight:
        return told
    error = pickle.loads(failure.pickled_cause)
    error.__cause__ = told
    return error


def raise_first(error: BaseException | None, failures: Sequence[Failure]) -> None:
    """Raise the exception of this rank or, if it came first, of another rank, if there is one."""
    if error is not None and not (failures and lost_peer(error)):
        raise error
    if failures:
        # Causes before consequences.
        raise _as_error(min(failures, key=lambda failure: failure.weight)) from error


def begin(engine: Any, steps: int | None) -> None:
    """Begin a request, where there is an engine yet: before the first call nothing has begun."""
    if hasattr(type(engine), "begin_request"):
        engine.begin_request(steps)


@contextmanager
def followed_call(name: str, mesh: Mesh) -> Iterator[None]:
    """A call on all ranks: after one that has failed, on any of them, they renew what they are joined by."""
    try:
        if mesh.failed:
            mesh.begin_request(f"a call of {name} that rank 0 has sent")
        yield
    except BaseException:
        mesh.fail_request()
        raise

"""A call made on rank 0 is made on all ranks: the two sides of such a call, which `Followers` connects."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..comm import PeerError
from ..comm.mesh import Mesh
from ..errors import InputError
from ..launch.failures import Failure, lost_peer
from .messages import CallReceiver, CallSender

T = TypeVar("T")


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


class CallLead:
    """Rank 0's side of calls that are made on all ranks.

    Args:
        name: of what is called.
        engine: the engine in force; before a first call that shows the layout, what stands in its place.
    """

    def __init__(self, name: str, mesh: Mesh, engine: Callable[[], Any]) -> None:
        self.name, self.mesh, self._engine = name, mesh, engine
        self.sender = CallSender(mesh)
        self._begins: tuple[int | None] | None = None
        # Whether the program tells when a request begins.
        self.requests_told = False
        self._lock = threading.Lock()
        self._caller: int | None = None

    @property
    def inside(self) -> bool:
        """True if this thread is in a call that was sent: nested calls are a part of it."""
        return self._caller == threading.get_ident()

    def begin_request(self, steps: int | None = None) -> None:
        """Let the next call begin a request of its own, on all ranks; see `Engine.begin_request`."""
        self._begins, self.requests_told = (steps,), True

    @property
    def begins_request(self) -> bool:
        """True if the next call begins a request of its own."""
        return self._begins is not None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Prepare and make a call, within the ``with`` block.

        Raises:
            InputError: another thread is in such a block.
        """
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"{self.name} is at work in another thread, and its ranks do one thing at a time, in one order; call "
                "it in one thread after the other"
            )
        self._caller = threading.get_ident()
        try:
            yield
        finally:
            self._caller = None
            self._lock.release()

    def call(
        self,
        ask: Callable[[bytes, Callable[[], Any]], Any],
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        for_others: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> Any:
        """Make a call on all ranks, within `alone`.

        Args:
            ask: sends a message to the others, who give it to `CallFollower.run`, while it runs a function here.
            proceed, args, kwargs: the call on this rank.
            for_others: the arguments on the others; default: the same.

        Raises:
            InputError: an argument cannot be sent, or wants a gradient.
            Exception: whatever the call raises here, or, if another rank's failure was first, there.
        """
        try:
            content, tensors = self._packed(for_others or (args, kwargs))
            with torch.no_grad():
                return ask(content, lambda: self._here(tensors, proceed, args, kwargs))
        except BaseException:
            # The others may have taken the message or not.
            self.sender.forget()
            raise

    def _packed(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[bytes, list[torch.Tensor]]:
        modes = Modes.here(self.mesh.device)
        given, names = call
        packed, tensors = self.sender.pack({**{f"argument {n}": one for n, one in enumerate(given)}, **names})
        return pickle.dumps((modes, self._begins, packed)), tensors

    def _here(
        self, tensors: list[torch.Tensor], proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        begins, self._begins = self._begins, None
        with followed_call(self.name, self.mesh):
            self.sender.send(tensors)
            if begins is not None:
                begin(self._engine(), *begins)
            return proceed(*args, **kwargs)


class CallFollower:
    """Another rank's side.

    Args:
        name: of what is called.
        engine: as for `CallLead`.
    """

    def __init__(self, name: str, mesh: Mesh, engine: Callable[[], Any], call: Callable[..., Any]) -> None:
        self._name, self._mesh, self._engine, self._call = name, mesh, engine, call
        self._receiver = CallReceiver(mesh)

    def run(self, content: bytes) -> None:
        """Make the call that a message tells of. Raises whatever it raises."""
        modes, begins, packed = pickle.loads(content)
        with followed_call(self._name, self._mesh), modes.apply(self._mesh.device):
            given = self._receiver.take(packed)
            if begins is not None:
                begin(self._engine(), *begins)
            args = [given.pop(name) for name in [*given] if name.startswith("argument ")]
            self._call(*args, **given)


def begin(engine: Any, steps: int | None) -> None:
    """Begin a request, where there is an engine yet: before the first call nothing has begun."""
    if hasattr(type(engine), "begin_request"):
        engine.begin_request(steps)


@contextmanager
def followed_call(name: str, mesh: Mesh) -> Iterator[None]:
    """A call on all ranks: after one that has failed, on any of them, they renew what they are joined by."""
    if mesh.failed:
        mesh.begin_request(f"a call of {name} that rank 0 has sent")
    try:
        yield
    except BaseException:
        mesh.fail_request()
        raise

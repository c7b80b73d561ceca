"""A call made on rank 0 is made on all ranks: the others wait for it, and follow.

For a program that calls a model in one process: a notebook, a page, an application. `parallelize` with ``follow=True``
on every rank, then `follow` on all but rank 0, which returns when rank 0 has restored its model.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..comm import PeerError
from ..comm.mesh import ENDLESS, Mesh
from ..comm.objects import broadcast_object, gather_objects
from ..core.request import PipelineCall
from ..errors import InputError, first_line
from .sent import CallReceiver, CallSender
from .targets import FOLLOWED, engine_of

T = TypeVar("T")


@dataclass(frozen=True)
class Modes:
    """Modes of torch that decide how a call computes, beside its arguments."""

    inference: bool
    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def here(cls, device: torch.device) -> Modes:
        """The modes of this thread."""
        kind = device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), autocast)

    @contextmanager
    def apply(self, device: torch.device) -> Iterator[None]:
        """Compute so."""
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            torch.autocast(device.type, self.autocast, enabled=self.autocast is not None),
        ):
            yield


@dataclass(frozen=True)
class FollowerFailure:
    """The reason why a rank did not finish a call.

    Attributes:
        what: the exception, in a line.
        error: it, pickled; None: it cannot be.
        lost: whether it may be a consequence of another rank's failure.
    """

    rank: int
    what: str
    traceback: str
    error: bytes | None
    lost: bool

    @classmethod
    def of(cls, rank: int, error: BaseException) -> FollowerFailure:
        """The failure that an exception is."""
        pickled = None
        with suppress(Exception):
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        text = "".join(traceback.format_exception(error))
        what = f"{type(error).__name__}: {first_line(error, 'no message')}"
        return cls(rank, what, text, pickled, lost_another(error))

    def as_error(self) -> Exception:
        """The exception to raise on rank 0."""
        told = PeerError(f"rank {self.rank} has failed in this call ({self.what})\n\n{self.traceback}")
        if self.error is None or self.lost:
            return told
        error = pickle.loads(self.error)
        error.__cause__ = told
        return error


def lost_another(error: BaseException) -> bool:
    """True if an exception may be a consequence of another rank's failure."""
    words = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, (PeerError, dist.DistError)) or any(
        known in words for known in ("gloo", "nccl", "closed by peer", "timed out waiting")
    )


def raise_first(error: BaseException | None, failures: Sequence[FollowerFailure]) -> None:
    """Raise the exception of this rank or, if it came first, of another rank, if there is one."""
    if error is not None and not (failures and lost_another(error)):
        raise error
    if failures:
        # Causes before consequences.
        raise min(failures, key=lambda one: one.lost).as_error() from error


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
        self._lock = threading.Lock()
        self._caller: int | None = None

    @property
    def inside(self) -> bool:
        """True if this thread is in a call that was sent: nested calls are a part of it."""
        return self._caller == threading.get_ident()

    def begin_request(self, steps: int | None = None) -> None:
        """Let the next call begin a request of its own, on all ranks; see `Engine.begin_request`."""
        self._begins = (steps,)

    def call(
        self,
        ask: Callable[[bytes, Callable[[], Any]], Any],
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        for_others: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> Any:
        """Make a call on all ranks.

        Args:
            ask: sends a message to the others, who give it to `CallFollower.run`, while it runs a function here.
            proceed, args, kwargs: the call on this rank.
            for_others: the arguments on the others; default: the same.

        Raises:
            InputError: an argument cannot be sent, a gradient is wanted, or the model is at work in another thread.
            Exception: whatever the call raises here, or, if another rank's failure was first, there.
        """
        if self.inside:
            return proceed(*args, **kwargs)
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"{self.name} is at work in another thread, and its ranks do one thing at a time, in one order; call "
                "it in one thread after the other"
            )
        self._caller = threading.get_ident()
        try:
            content, tensors = self._packed(for_others or (args, kwargs))
            return ask(content, lambda: self._here(tensors, proceed, args, kwargs))
        except BaseException:
            # The others may have taken the message or not.
            self.sender.forget()
            raise
        finally:
            self._caller = None
            self._lock.release()

    def _packed(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[bytes, list[torch.Tensor]]:
        modes = Modes.here(self.mesh.device)
        given, names = call
        packed, tensors = self.sender.pack({**{f"argument {n}": one for n, one in enumerate(given)}, **names})
        if modes.grad and any(tensor.requires_grad for tensor in tensors):
            raise InputError(
                f"a call of {self.name} that is sent to other ranks passes no gradient on; call it under "
                "torch.no_grad(), or train with ditmesh.train"
            )
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


class Following:
    """Calls of a target, made on rank 0, are made on all ranks of its mesh; until `restore`.

    Every rank makes one, together.
    """

    def __init__(self, target: Any, mesh: Mesh) -> None:
        self._target, self._mesh = target, mesh
        name = type(target).__name__
        # Rank 0 may call when it likes, and answers are due as all other messages are.
        self._orders, self._answers = mesh.new_host_group(ENDLESS), mesh.new_host_group()
        engine = lambda: engine_of(target)  # noqa: E731
        self.lead: CallLead | None = None
        self._ended = False
        vars(target)[FOLLOWED] = self
        if mesh.rank == 0:
            self.lead = CallLead(name, mesh, engine)
            self._class = PipelineCall(target, self._around)
        else:
            self._follower = CallFollower(name, mesh, engine, target)

    def _around(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.lead is not None
        try:
            return self.lead.call(self._ask, proceed, args, kwargs)
        finally:
            # The first call of a pipeline may put an engine around it, which would take later calls first.
            if not self._ended and not self.lead.inside and not self._class.outermost:
                self._class.undo()
                self._class = PipelineCall(self._target, self._around)

    def _ask(self, content: bytes, here: Callable[[], T]) -> T:
        self._send(content)
        error: BaseException | None = None
        value: Any = None
        try:
            value = here()
        except BaseException as raised:
            error = raised
        raise_first(error, self._met(error))
        return value

    def _send(self, content: bytes | None) -> bytes | None:
        try:
            return broadcast_object(content, group=self._orders)
        except RuntimeError as error:
            who = "a rank that follows" if self._mesh.rank == 0 else "rank 0, which this one follows,"
            raise PeerError(f"{who} has ended; restart the job") from error

    def _met(self, error: BaseException | None) -> list[FollowerFailure]:
        """The failures of the other ranks; all ranks fail the request if one of them does. Collective."""
        mine = None if error is None else FollowerFailure.of(self._mesh.rank, error)
        try:
            every = gather_objects(mine, self._answers)
        except RuntimeError as lost:
            raise PeerError("a rank has ended in a call that it followed, or gives no answer; restart the job") from (
                error or lost
            )
        if any(every):
            self._mesh.fail_request()
        return [one for rank, one in enumerate(every) if one is not None and rank != self._mesh.rank]

    def follow(self) -> None:
        """Make every call that rank 0 makes, until it restores its target; then this one is restored, too.

        Raises:
            InputError: this is rank 0.
            PeerError: rank 0 has ended.
        """
        if self.lead is not None:
            raise InputError("rank 0 makes the calls that others follow; call ditmesh.follow on the other ranks")
        while (content := self._send(None)) is not None:
            error: BaseException | None = None
            try:
                self._follower.run(content)
            except Exception as raised:
                error = raised
            self._met(error)

    def end(self) -> None:
        """Let the others return from `follow`, and remove the hooks from the target."""
        if self._ended:
            return
        self._ended = True
        vars(self._target).pop(FOLLOWED, None)
        if self.lead is not None:
            self._class.undo()
            with suppress(PeerError):
                self._send(None)
        for group in (self._orders, self._answers):
            if group is not None:
                with suppress(ValueError):
                    dist.destroy_process_group(group)

"""`Followers`: ranks beside a running program, which hold copies of its models and take part in their calls."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..comm.backends import device_of_rank
from ..comm.mesh import DEFAULT_DEADLINE_SECONDS, Mesh
from ..config import ParallelConfig
from ..core.patching import put_aside, refuse_calls
from ..core.request import PipelineCall
from ..engine import ConfigLike, engine_of, parallelize, restore
from ..engine.targets import FOLLOWED, device_of, refuse_twice
from ..errors import ConfigError, InputError
from ..launch.failures import Failure, of_exception
from .copies import CopiedModule, ModuleChange, apply_changes, take_off_hooks
from .messages import Modes, begin, followed_call, pack_call, raise_first, take_call
from .objects import Parcel, open_parcel, pack_parcel
from .processes import HostedRanks

T = TypeVar("T")

# The name by which the frame of a pipeline's call remembers that it is one run of a model.
_RUN = "_ditmesh_run"


class Followers:
    """Ranks of this machine beside this process, which is rank 0 with its own device, its own model and its own thread.

    ::

        with ditmesh.Followers(2) as followers:
            followers.parallelize(transformer, {"ulysses": 2})
            transformer(...)

    For an application that has loaded a model and goes on as it is. Each other process holds a copy of the model: on
    the CPU all of them share one, on GPUs each has its own. What is changed on the model here, between calls, is
    changed on the copies before the next call, or refused: weights, attributes and hooks are compared by content, once
    in each call of a diffusers pipeline without callbacks, and in each call of the model elsewhere. Calls pass no
    gradients on. The processes end with this one, however it ends.
    """

    def __init__(
        self,
        devices: int,
        device: str = "auto",
        threads: int | None = None,
        timeout: float = DEFAULT_DEADLINE_SECONDS,
        *,
        gpus: Sequence[int] | None = None,
        prepare: Callable[[], Any] | None = None,
    ) -> None:
        """Start the other ranks.

        Args:
            devices: number of ranks, this process included.
            device: see `RankPool`.
            threads: of each rank in a call, also of this process on the CPU; default: an equal share of the cores.
            timeout: deadline of every collective of a call, in seconds.
            gpus: their numbers, this process's first; default: its current one, and those that follow.
            prepare: is called on the other ranks first.

        Raises:
            ConfigError: the devices are not there, or this process is a rank already.
            RankFailed: a rank could not start.
        """
        if gpus is None and device != "cpu" and torch.accelerator.is_available():
            first, count = torch.accelerator.current_device_index(), torch.accelerator.device_count()
            gpus = [(first + place) % count for place in range(devices)]
        self._pool = HostedRanks(devices, device, threads, gpus)
        # This process included; the type of the ranks' devices.
        self.world_size, self.device = self._pool.world_size, self._pool.device
        self.timeout = timeout
        # One thread at a time has the ranks.
        self.turn = threading.RLock()
        # Models go when the program drops them; their copies then go before the next call.
        self.models: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        # Keys of copies without a model in this process, each with a function to call when the others drop the copy.
        self.dropped: list[tuple[str, Callable[[], None]]] = []
        # For the program that has these ranks.
        self.wanted: Any = None
        try:
            if prepare is not None:
                self.run(prepare)
        except BaseException:
            self._pool.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return self._pool.pids

    @property
    def inherited(self) -> bool:
        """True if this process is a fork of the one that has the ranks."""
        return self._pool.inherited

    @property
    def closed(self) -> bool:
        """True if the ranks have ended: they were closed, or one was lost."""
        return self._pool.closed

    @property
    def reason(self) -> str:
        """The reason why they have ended; empty: they have not."""
        return self._pool.reason

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(*args)`` on the other ranks; the results, of rank 1 first.

        Raises:
            Exception: what ``fn`` raises.
            RankFailed: a rank was lost.
        """
        return [value for value, _ in self.both(_nothing, _outcome, fn, args)]

    def parallelize(
        self, model: nn.Module, config: ConfigLike, *, sleeps: bool = False, **options: Any
    ) -> FollowedModel:
        """Copy a model to the other ranks, and make its calls run on all ranks, in place.

        Args:
            model: on this process's device, as for `ditmesh.parallelize`.
            config: as there; its degrees multiply to the number of ranks.
            sleeps: calls stay this process's own but within `FollowedModel.awake`, by `FollowedModel.call`.
            options: further ones of `ditmesh.parallelize`.

        Returns a handle; its `FollowedModel.close` undoes this.

        Raises:
            ConfigError, InputError, LayoutError: as `ditmesh.parallelize`; or the model cannot be copied.
            RankFailed: a rank was lost.
        """
        refuse_twice(model)
        own = set(model.modules())
        for followed in list(self.models.values()):
            if not own.isdisjoint(followed.module.modules()):
                raise InputError(
                    f"this {type(model).__name__} has modules in common with a {type(followed.module).__name__} that "
                    "is parallelised already; call ditmesh.restore(...) on that one first"
                )
        made = FollowedModel(self, model, ParallelConfig.read(config), options)
        made.sleep() if sleeps else made.stand_in()
        return made

    def close(self) -> None:
        """Restore the models, and end the other ranks. Harmless if they have ended, and in a fork of this process."""
        if self.inherited:
            return
        for model in list(self.models.values()):
            with suppress(Exception):
                model.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def refuse_inherited(self) -> None:
        """Refuse to go on in a fork of the process that has the ranks."""
        self._pool.refuse_inherited()

    @property
    def threads(self) -> int | None:
        """Threads of each rank in a call; None: as this process has them."""
        return self._pool.threads if self.device == "cpu" else None

    def both(self, here: Callable[[], T], fn: Callable[..., Any], *args: Any) -> list[tuple[Any, T]]:
        """The result of every other rank, each with the result of this one.

        Raises the exception of this rank or, if it came first, of another; `RankFailed`: a rank was lost.
        """
        self.refuse_inherited()
        with self.turn:
            if self.closed:
                raise ConfigError(f"the ranks beside this process have ended ({self.reason}); make new Followers")
            while self.dropped:
                key, end = self.dropped.pop()
                self._pool.together(end, drop_copy, key)
            done = self._pool.together(here, fn, *args)
        raise_first(done.error, [one for one in done.others if isinstance(one, Failure)])
        return [(other, done.value) for other in done.others]


class FollowedModule(ABC):
    """A module of this process with copies on the other ranks, which take part in its calls.

    ``closed``: whether the copies are gone; ``mesh``: of all ranks.
    """

    def __init__(self, followers: Followers, module: nn.Module) -> None:
        self.followers, self.module, self.closed = followers, module, False
        self._key, self._copied = uuid.uuid4().hex, CopiedModule(module)
        # The pipeline's call in which the content of the copies was compared.
        self._run: object = None
        # The number of steps of a request that the next call begins; and whether the program tells when one begins.
        self._begins: tuple[int | None] | None = None
        self._requests_told = False
        # The thread in a call that was sent.
        self._lock, self._caller = threading.Lock(), None
        with pack_parcel(module, followers.device) as parcel:
            followers.both(_nothing, _take_model, self._key, parcel)

    def _begin(
        self,
        config: ParallelConfig,
        begin: Callable[[Mesh], Any],
        begin_copy: Callable[..., Failure | None],
        *args: Any,
    ) -> None:
        """Join all ranks in a mesh, and prepare the module and its copies for calls.

        Args:
            begin: called here with the mesh, which is closed if this raises.
            begin_copy: called on the other ranks with the copy's key, ``config``, the mesh's deadline and ``args``.
        """
        followers, module = self.followers, self.module

        def here() -> Mesh:
            mesh = Mesh(config, device_of(module) if followers.device != "cpu" else "cpu", followers.timeout)
            try:
                begin(mesh)
            except BaseException:
                mesh.close()
                raise
            return mesh

        try:
            self.mesh: Mesh = followers.both(here, begin_copy, self._key, config, followers.timeout, *args)[0][1]
        except BaseException:
            with suppress(Exception):
                followers.both(_nothing, drop_copy, self._key)
            raise
        followers.models[self._key] = self
        # The others' meshes end with their copies.
        self._drop = weakref.finalize(self, followers.dropped.append, (self._key, self.mesh.close))
        self._drop.atexit = False
        self._copied.note()

    @property
    def inside(self) -> bool:
        """True if this thread is in a call that was sent: nested calls are a part of it."""
        return self._caller == threading.get_ident()

    def begin_request(self, steps: int | None = None) -> None:
        """Let the next call begin a request of its own, on all ranks; see `Engine.begin_request`."""
        self._begins, self._requests_told = (steps,), True

    def update(self, rewritten: Collection[str] = (), read: bool = True) -> None:
        """Bring the copies to the module's present state. Calls do this by themselves.

        All tensors are compared by content; without ``read`` those that show a change, and parameters ``rewritten``.
        `InputError`: something has changed that copies cannot be given; it is named.
        """
        if not (changes := self._copied.changes(read, rewritten)):
            return
        if self.mesh.config.cuts_weights and (names := self._copied.changed_tensors(changes)):
            raise self._changed_in_parts(names)
        with pack_parcel(changes, self.followers.device, self._copied.numbers) as parcel:
            self.followers.both(_nothing, _change_model, self._key, parcel)
        self._copied.note()

    def _changed_in_parts(self, names: Sequence[str]) -> InputError:
        return InputError(
            f"{names[0]} was changed while each rank held a part of the weights of {type(self.module).__name__} "
            f"({self.mesh.config.describe()}), and the other ranks' parts stayed as they were; load the model again, "
            "change it, and then parallelize it with ditmesh.Followers.parallelize(...), or use ulysses or ring, with "
            "which weights may be changed at any time"
        )

    def call_on_all(
        self,
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        for_others: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        rewritten: Collection[str] = (),
    ) -> Any:
        """Make one call on all ranks; a part of a call that runs is made here alone.

        ``proceed`` is the module's own call, ``for_others`` the other ranks' arguments where they differ; ``rewritten``
        names parameters to compare by content also in the middle of a run.

        Raises:
            InputError: the module is being trained, or has changed in a way that copies cannot be given; an argument
                cannot be sent; or another thread is in such a call.
            Exception: whatever the call raises, here or, if it was first, on another rank; `RankFailed`: one was lost.
        """
        if self.inside:
            return proceed(*args, **kwargs)
        self.followers.refuse_inherited()
        module = self.module
        if torch.is_grad_enabled() and module.training and any(one.requires_grad for one in module.parameters()):
            raise InputError(
                f"a call of {type(module).__name__} that is sent to other ranks passes no gradients on, and the model "
                "is in training mode with weights that require them; call it under torch.no_grad() or after eval(), or "
                "train with ditmesh.parallelize(...) under torchrun"
            )
        with self._alone(), self.followers.turn, _threads_of(self.followers):
            # A run is a request that the program has told of, or one call of a pipeline. Elsewhere each call is one.
            run = _pipeline_run()
            begins = run is None or run is not self._run
            self.update(rewritten, self._begins is not None if self._requests_told else begins)
            self._run = run
            try:
                return self._call_on_all(proceed, args, kwargs, *(for_others or (args, kwargs)))
            finally:
                if not self.closed:
                    self._copied.note()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Prepare and make a call, within the ``with`` block."""
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"{type(self.module).__name__} is at work in another thread, and its ranks do one thing at a time, in "
                "one order; call it in one thread after the other"
            )
        self._caller = threading.get_ident()
        try:
            yield
        finally:
            self._caller = None
            self._lock.release()

    def _call_on_all(
        self,
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        others_args: tuple[Any, ...],
        others_kwargs: dict[str, Any],
    ) -> Any:
        """Make a call here and on the copies; a failure ends the request on the mesh."""
        arguments = {**{f"argument {place}": value for place, value in enumerate(others_args)}, **others_kwargs}
        packed, send = pack_call(self.mesh, arguments)
        begins, modes = self._begins, Modes.here(self.mesh.device)

        def here() -> Any:
            self._begins = None
            with followed_call(type(self.module).__name__, self.mesh):
                send()
                if begins is not None:
                    begin(self.engine(), *begins)
                return proceed(*args, **kwargs)

        try:
            with torch.no_grad():
                content = pickle.dumps((modes, begins, packed))
                return self.followers.both(here, _follow_call, self._key, content)[0][1]
        except BaseException:
            if not self.followers.closed:
                self.mesh.fail_request()
            raise

    @abstractmethod
    def engine(self) -> Any:
        """The engine in force; before a first call that shows the layout, what stands in its place."""

    def close(self) -> None:
        """Drop the copies, and leave the module as it was before. Harmless if that is done, and in a fork."""
        if self.closed or self.followers.inherited:
            return
        self.closed = True
        self._drop.detach()
        self.followers.models.pop(self._key, None)
        self._end()

    @abstractmethod
    def _end(self) -> None:
        """Undo `_begin`, once."""


class FollowedModel(FollowedModule):
    """A model of this process; all ranks take part in its calls."""

    def __init__(self, followers: Followers, model: nn.Module, config: ParallelConfig, options: dict[str, Any]) -> None:
        config.check_world_size(followers.world_size)
        self.config = config
        self._class: PipelineCall | None = None
        super().__init__(followers, model)

        def begin(mesh: Mesh) -> None:
            parallelize(model, config, mesh=mesh, **options)
            engine_of(model).own_mesh()

        self._begin(config, begin, _begin_following, options)
        vars(model)[FOLLOWED] = self
        # What puts hooks back, and patches, when the model wakes.
        self._asleep: ExitStack | None = None
        self._put_back: Callable[[], None] = _nothing

    def stand_in(self) -> None:
        """Let all calls of the model in this process run on all ranks, from now on."""

        def around(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.call(proceed, args, kwargs)

        if self._class is None:
            # Ranks cannot meet inside a graph: a program that compiles what calls the model leaves its graph here.
            self._class = PipelineCall(self.module, torch.compiler.disable(around))

    call = FollowedModule.call_on_all

    def engine(self) -> Any:
        """As of any parallelised model."""
        return engine_of(self.module)

    # --- the model for others, in this process ---------------------------------------------------------------

    def sleep(self) -> None:
        """Leave the model as it was before it was parallelised, until `wake`, for calls in this process alone.

        An attention function stays replaced, which passes on what no parallel block has asked for.
        """
        if self._asleep is None:
            self._asleep = ExitStack()
            for one in self.module.modules():
                self._asleep.callback(take_off_hooks(one))
            self._put_back = put_aside(self.module.modules())

    def wake(self) -> None:
        """Undo `sleep`; `InputError`: a patched attribute was replaced meanwhile."""
        if self._asleep is not None:
            self._put_back()
            self._asleep.close()
            self._asleep = None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Parallel within the ``with`` block, and as it was outside of it."""
        self.wake()
        try:
            yield
        finally:
            self.sleep()

    def _end(self) -> None:
        vars(self.module).pop(FOLLOWED, None)
        with ExitStack() as undo:
            if self.config.cuts_weights and (names := self._copied.changed_tensors()):
                undo.callback(refuse_calls, self.module, self._changed_in_parts(names))
            if self._class is not None:
                undo.callback(self._class.undo)
            with suppress(InputError):
                self.wake()
            if self.followers.closed:
                # The channel that joins the ranks is gone.
                undo.callback(_restored, self.module)
                with suppress(Exception):
                    self.mesh.abandon()
            else:
                undo.callback(self.followers.both, functools.partial(_restored, self.module), drop_copy, self._key)


def _pipeline_run() -> object:
    """A mark of the call of a diffusers pipeline without callbacks that this is in; None: it is in none."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__":
            names = frame.f_locals
            if isinstance(names.get("self"), DiffusionPipeline):
                watched = any(names.get(name) is not None for name in ("callback_on_step_end", "callback"))
                # In the frame itself: it goes with it, and no later call can be taken for it.
                return None if watched else names.setdefault(_RUN, object())
        frame = frame.f_back
    return None


def _restored(model: nn.Module) -> None:
    with suppress(InputError):
        restore(model)


@contextmanager
def _threads_of(followers: Followers) -> Iterator[None]:
    """Compute with as many threads as the other ranks have on the CPU: all share its cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(followers.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _nothing() -> None:
    return None


# --- on the other ranks ------------------------------------------------------------------------------------------


class Copy:
    """A module's copy on this rank.

    Attributes:
        module, device: it, and where it is.
        mesh: by which calls are made; ``own``: it belongs to the copy alone, and is closed with it.
        call: makes the calls that rank 0 sends.
        engine: as of a `FollowedModule`.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device, self.own = module, device, False
        self.mesh: Mesh | None = None
        self.call: Callable[..., Any] = module
        self.engine: Callable[[], Any] = lambda: None


# The copies that this process holds, which is a rank and nothing else.
copies: dict[str, Copy] = {}


def reported(fn: Callable[..., None]) -> Callable[..., Failure | None]:
    """``fn`` for calls by rank 0: an exception becomes a `Failure`, which is returned."""

    @functools.wraps(fn)
    def outcome(*args: Any) -> Failure | None:
        return _outcome(fn, args)

    return outcome


def _outcome(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result of a function, or its failure."""
    try:
        return fn(*args)
    except Exception as error:
        return of_exception(dist.get_rank(), error)


@reported
def _take_model(key: str, parcel: Parcel) -> None:
    device = device_of_rank()
    copies[key] = Copy(open_parcel(parcel, device), device)


@reported
def _change_model(key: str, parcel: Parcel) -> None:
    copy = copies[key]
    changes: list[ModuleChange] = open_parcel(parcel, copy.device, list(copy.module.modules()))
    apply_changes(copy.module, changes)


@reported
def _begin_following(key: str, config: ParallelConfig, timeout: float, options: dict[str, Any]) -> None:
    copy = copies[key]
    mesh = copy.mesh = Mesh(config, copy.device, timeout)
    try:
        parallelize(copy.module, config, mesh=mesh, **options)
        engine_of(copy.module).own_mesh()
    except Exception:
        mesh.close()
        raise
    copy.engine = functools.partial(engine_of, copy.module)


@reported
def _follow_call(key: str, content: bytes) -> None:
    copy = copies[key]
    mesh = copy.mesh
    assert mesh is not None
    modes, begins, packed = pickle.loads(content)
    with followed_call(type(copy.module).__name__, mesh), modes.apply(mesh.device):
        given = take_call(mesh, packed)
        if begins is not None:
            begin(copy.engine(), *begins)
        args = [given.pop(name) for name in [*given] if name.startswith("argument ")]
        copy.call(*args, **given)


@reported
def drop_copy(key: str) -> None:
    copy = copies.pop(key, None)
    if copy is not None:
        _restored(copy.module)
        if copy.own and copy.mesh is not None:
            copy.mesh.close()

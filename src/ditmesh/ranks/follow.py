"""`Followers`: ranks beside a running program, which hold copies of its models and take part in their calls."""

from __future__ import annotations

import functools
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..comm.backends import device_of_rank
from ..comm.mesh import DEFAULT_DEADLINE, Mesh
from ..config import ParallelConfig
from ..core.patching import put_aside
from ..core.request import PipelineCall
from ..engine import ConfigLike, engine_of, parallelize, restore
from ..engine.follow import CallFollower, CallLead, FollowerFailure, raise_first
from ..engine.parcels import Parcel, open_parcel, pack_parcel
from ..engine.targets import device_of
from ..errors import ConfigError, InputError
from ..launch import DeviceChoice, HostedRanks
from ..launch.hosted import STOP_TIMEOUT
from .copies import CopiedModule, ModuleChange, applied

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

# Attributes of a module that hold its hooks.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class Followers:
    """Ranks of this machine beside this process, which is rank 0 with its own device, its own model and its own thread.

    ::

        with ditmesh.Followers(2) as followers:
            followers.parallelize(transformer, {"ulysses": 2})
            transformer(...)

    For an application that has loaded a model and goes on as it is. Each other process holds a copy of the model: on
    the CPU all of them share one, on GPUs each has its own. What is changed on the model here, between calls, is
    changed on the copies before the next call. The processes end with this one, however it ends.
    """

    def __init__(
        self,
        devices: int,
        device: DeviceChoice = "auto",
        threads: int | None = None,
        timeout: float = DEFAULT_DEADLINE,
        *,
        gpus: Sequence[int] | None = None,
        stop_limit: float = STOP_TIMEOUT,
        prepare: Callable[[], Any] | None = None,
    ) -> None:
        """Start the other ranks.

        Args:
            devices: number of ranks, this process included.
            device: ``"auto"`` takes CUDA when a GPU is there, else the CPU.
            threads: of each rank in a call, also of this process on the CPU; default: an equal share of the cores.
            timeout: deadline of every collective of a call, in seconds.
            gpus: their numbers, this process's first; default: its current one, and those that follow.
            stop_limit: seconds after which a rank that is stopped by a signal counts as lost.
            prepare: is called on the other ranks first.

        Raises:
            ConfigError: the devices are not there, or this process is a rank already.
            RankFailed: a rank could not start.
        """
        if gpus is None and device != "cpu" and torch.cuda.is_available():
            first, count = torch.cuda.current_device(), torch.cuda.device_count()
            gpus = [(first + place) % count for place in range(devices)]
        self._pool = HostedRanks(devices, device, threads, gpus, stop_limit)
        self.timeout = timeout
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
    def world_size(self) -> int:
        """Number of ranks, this process included."""
        return self._pool.world_size

    @property
    def device(self) -> str:
        """Type of the ranks' devices."""
        return self._pool.device

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return self._pool.pids[1:]

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

        Returns:
            A handle; its `FollowedModel.close` undoes this.

        Raises:
            ConfigError, InputError, LayoutError: as `ditmesh.parallelize`; or the model cannot be copied.
            RankFailed: a rank was lost.
        """
        made = FollowedModel(self, model, ParallelConfig.read(config), options)
        made.sleep() if sleeps else made.stand_in()
        return made

    def close(self) -> None:
        """Restore the models, and end the other ranks. Harmless if they have ended."""
        for model in list(self.models.values()):
            with suppress(Exception):
                model.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"closed: {self.reason}" if self.closed else f"{len(self.models)} models"
        return f"Followers({self.world_size} on {self.device}, {state})"

    @property
    def threads(self) -> int | None:
        """Threads of each rank in a call; None: as this process has them."""
        return self._pool.threads if self.device == "cpu" else None

    def both(self, here: Callable[[], T], fn: Callable[..., Any], *args: Any) -> list[tuple[Any, T]]:
        """The result of every other rank, each with the result of this one.

        Raises:
            Exception: of this rank, or, if it came first, of another rank.
            RankFailed: a rank was lost.
        """
        if self.closed:
            raise ConfigError(f"the ranks beside this process have ended ({self.reason}); make new Followers")
        while self.dropped:
            key, end = self.dropped.pop()
            self._pool.together(end, drop_copy, key)
        done = self._pool.together(here, fn, *args)
        raise_first(done.error, [one for one in done.others if isinstance(one, FollowerFailure)])
        return [(other, done.value) for other in done.others]


class FollowedModule(ABC):
    """A module of this process with copies on the other ranks, which take part in its calls.

    Attributes:
        closed: whether the copies are gone.
        mesh: of all ranks.
        lead: what sends calls.
    """

    def __init__(self, followers: Followers, module: nn.Module) -> None:
        self.followers, self.closed = followers, False
        self._key, self._copied = uuid.uuid4().hex, CopiedModule(module)
        with pack_parcel(module, followers.device) as parcel:
            followers.both(_nothing, _take_model, self._key, parcel)

    def _begin(
        self,
        config: ParallelConfig,
        begin: Callable[[Mesh], Any],
        begin_copy: Callable[..., FollowerFailure | None],
        *args: Any,
        engine: Callable[[], Any],
    ) -> None:
        """Join all ranks in a mesh, and prepare the module and its copies for calls.

        Args:
            begin: called here with the mesh, which is closed if this raises.
            begin_copy: called on the other ranks with the copy's key, ``config``, the mesh's deadline and ``args``.
            engine: as for `CallLead`.
        """
        followers, module = self.followers, self._copied.module

        def here() -> Mesh:
            mesh = Mesh(config, device_of(module) if followers.device == "cuda" else "cpu", followers.timeout)
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
        self.lead = CallLead(type(module).__name__, self.mesh, engine)

    def update(self, rewritten: Collection[str] = ()) -> None:
        """Bring the copies to the module's present state; see `call_on_all`. Calls do this by themselves.

        Raises:
            InputError: it has other modules than when it was copied.
        """
        copied = self._copied
        if not copied.same_modules:
            raise InputError(
                f"this {type(copied.module).__name__} has other modules than when it was copied to the other ranks; "
                "restore it and parallelize it again"
            )
        if changes := copied.changes(rewritten):
            with pack_parcel(changes, self.followers.device, copied.numbers) as parcel:
                self.followers.both(_nothing, _change_model, self._key, parcel)
            copied.note()

    def call_on_all(
        self,
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        for_others: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        rewritten: Collection[str] = (),
    ) -> Any:
        """Make one call on all ranks; a part of a call that runs is made here alone.

        Args:
            proceed: the module's own call.
            args, kwargs: of this process.
            for_others: the arguments of the other ranks, where they differ.
            rewritten: names of parameters with values that have changed where nothing shows it.

        Raises:
            Exception: whatever the call raises, here or on another rank.
            RankFailed: a rank was lost; the ranks have ended.
        """
        if self.lead.inside:
            return proceed(*args, **kwargs)
        self.update(rewritten)
        try:
            with _threads_of(self.followers):
                return self.lead.call(self._ask, proceed, args, kwargs, for_others)
        finally:
            if not self.closed:
                self._copied.note()

    def _ask(self, content: bytes, here: Callable[[], T]) -> T:
        """Make a call here and, from its content, on the copies; a failure ends the request on the mesh."""
        try:
            return self.followers.both(here, _follow_call, self._key, content)[0][1]
        except BaseException:
            if not self.followers.closed:
                self.mesh.fail_request()
            raise

    def close(self) -> None:
        """Drop the copies, and leave the module as it was before. Harmless if that is done."""
        if self.closed:
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
        self.model, self.config = model, config
        self._class: PipelineCall | None = None
        self._others_hooks = {id(one): _hook_keys(one) for one in model.modules()}
        super().__init__(followers, model)

        def begin(mesh: Mesh) -> None:
            parallelize(model, config, mesh=mesh, **options)
            engine_of(model).own_mesh()

        self._begin(config, begin, _begin_following, options, engine=lambda: engine_of(model))
        self._asleep: list[tuple[dict[Any, Any], dict[Any, Any]]] | None = None
        self._put_back: Callable[[], None] = _nothing

    def stand_in(self) -> None:
        """Let all calls of the model in this process run on all ranks, from now on."""

        def around(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.call(proceed, args, kwargs)

        if self._class is None:
            self._class = PipelineCall(self.model, around)

    call = FollowedModule.call_on_all

    # --- the model for others, in this process ---------------------------------------------------------------

    def sleep(self) -> None:
        """Leave the model as it was before it was parallelised, until `wake`, for calls in this process alone.

        An attention function stays replaced, which passes on what no parallel block has asked for.
        """
        if self._asleep is not None:
            return
        self._asleep = []
        for one in self.model.modules():
            others = self._others_hooks.setdefault(id(one), set())
            for name in _HOOKS:
                held: dict[Any, Any] = vars(one)[name]
                ours = {key: hook for key, hook in held.items() if key not in others}
                if ours:
                    self._asleep.append((held, dict(held)))
                    for key in ours:
                        del held[key]
        self._put_back = put_aside(self.model.modules())

    def wake(self) -> None:
        """Undo `sleep`.

        Raises:
            InputError: a patched attribute was replaced meanwhile.
        """
        if self._asleep is None:
            return
        self._put_back()
        # All that is there now is others'.
        for one in self.model.modules():
            self._others_hooks.setdefault(id(one), set()).update(_hook_keys(one))
        for held, before in self._asleep:
            later = {key: hook for key, hook in held.items() if key not in before}
            held.clear()
            held.update({**before, **later})
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
        with ExitStack() as undo:
            if self._class is not None:
                undo.callback(self._class.undo)
            with suppress(InputError):
                self.wake()
            if self.followers.closed:
                # The channel that joins the ranks is gone.
                undo.callback(_restored, self.model)
                with suppress(Exception):
                    self.mesh.abandon()
            else:
                undo.callback(self.followers.both, functools.partial(_restored, self.model), drop_copy, self._key)


def _hook_keys(module: nn.Module) -> set[Any]:
    return {key for name in _HOOKS for key in vars(module)[name]}


def _restored(model: nn.Module) -> None:
    with suppress(InputError):
        restore(model)


@contextmanager
def _threads_of(followers: Followers) -> Iterator[None]:
    """Compute with as many threads as the other ranks have on the CPU: all share its cores."""
    before = torch.get_num_threads()
    wanted = followers.threads or before
    if wanted != before:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if wanted != before:
            torch.set_num_threads(before)


def _nothing() -> None:
    return None


# --- on the other ranks ------------------------------------------------------------------------------------------


class Copy:
    """A model's copy on this rank.

    Attributes:
        model, device: it, and where it is.
        follower: what makes the calls that rank 0 sends.
        mesh: by which they are made.
        own: whether the mesh belongs to the copy alone, and is closed with it.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.follower: CallFollower | None = None
        self.mesh: Mesh | None = None
        self.own = False


# The copies that this process holds, which is a rank and nothing else.
copies: dict[str, Copy] = {}


def reported(fn: Callable[..., None]) -> Callable[..., FollowerFailure | None]:
    """``fn`` for calls by rank 0: an exception becomes a `FollowerFailure`, which is returned."""

    @functools.wraps(fn)
    def outcome(*args: Any) -> FollowerFailure | None:
        return _outcome(fn, args)

    return outcome


def _outcome(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result of a function, or its failure."""
    try:
        return fn(*args)
    except Exception as error:
        return FollowerFailure.of(dist.get_rank(), error)


@reported
def _take_model(key: str, parcel: Parcel) -> None:
    device = device_of_rank()
    copies[key] = Copy(open_parcel(parcel, device), device)


@reported
def _change_model(key: str, parcel: Parcel) -> None:
    copy = copies[key]
    changes: list[ModuleChange] = open_parcel(parcel, copy.device, list(copy.model.modules()))
    applied(copy.model, changes)


@reported
def _begin_following(key: str, config: ParallelConfig, timeout: float, options: dict[str, Any]) -> None:
    copy = copies[key]
    mesh = copy.mesh = Mesh(config, copy.device, timeout)
    model = copy.model
    try:
        parallelize(model, config, mesh=mesh, **options)
        engine_of(model).own_mesh()
    except Exception:
        mesh.close()
        raise
    copy.follower = CallFollower(type(model).__name__, mesh, lambda: engine_of(model), model)


@reported
def _follow_call(key: str, content: bytes) -> None:
    copy = copies[key]
    assert copy.follower is not None
    assert copy.mesh is not None
    try:
        copy.follower.run(content)
    except Exception:
        copy.mesh.fail_request()
        raise


@reported
def drop_copy(key: str) -> None:
    copy = copies.pop(key, None)
    if copy is not None:
        _restored(copy.model)
        if copy.own and copy.mesh is not None:
            copy.mesh.close()

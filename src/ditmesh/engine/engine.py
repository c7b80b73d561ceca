"""The engine that `parallelize` puts on transformers: the strategies of a recipe, and the requests they see."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ..comm import PeerError
from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.arguments import Arguments
from ..core.clock import CallClock, timestep_of
from ..core.patching import Proceed
from ..core.request import PipelineCall, RequestLeft
from ..errors import ConfigError, InputError
from ..layout import TokenLayout
from ..recipe import RECIPE, Recipe, wanted
from ..staleness.control import StalenessLog, WarmupControl
from ..strategies.balance import Balance
from ..strategies.base import Context, ParallelModel, Request
from ..strategies.hooks import ModelHooks, requires_grad
from ..strategies.loads import StepLoad
from ..strategies.tokens import TokenStrategy
from .targets import device_of, mark

Part = TypeVar("Part")


class Engine:
    """The strategies of transformers and their pipelines, installed by `parallelize`, and their removal.

    There is one engine for a set of transformers, however many pipelines share them.

    Args:
        mesh: ranks, links, and the byte counters (`mesh.traffic`).
        owns_mesh: whether `close` gives the mesh's groups back.
    """

    def __init__(
        self,
        models: Sequence[tuple[nn.Module, TokenLayout]],
        config: ParallelConfig,
        mesh: Mesh,
        owns_mesh: bool,
        recipe: Recipe = RECIPE,
    ) -> None:
        several = len(models) > 1
        self.config, self.mesh = config, mesh
        self.models = [ParallelModel(m, layout, f"{n}." if several else "") for n, (m, layout) in enumerate(models)]
        self.context = Context(config, mesh, self.models)
        # Counts the calls of the transformers.
        self.clock: CallClock = self.context.clock
        # The ranks that share a request.
        self._shared = self.context.mesh
        self.strategies = [strategy(self.context) for strategy in wanted(recipe, config)]
        self._undo = ExitStack()
        if owns_mesh:
            self.own_mesh()
        # Pipelines that use the transformers, and the undo of each.
        self._attached: dict[int, ExitStack] = {}
        self._lock = threading.RLock()
        self._in_request = False

    def open(self, target: Any) -> None:
        """Install the strategies for a pipeline, or a bare transformer."""
        pipe = self.context.pipe = None if isinstance(target, nn.Module) else target
        try:
            for strategy in self.strategies:
                strategy.prepare(pipe)
            for model in self.models:
                self._undo.callback(mark(model.model, self))
            for strategy in self.strategies:
                strategy.apply(self._undo)
            for model in self.models:
                self._undo.callback(model.chain.add(partial(self._around_call, model.model)))
                # Before all others, because they ask it for the current call.
                self._undo.callback(self.clock.watch(model.model, timestep_of(model.model, model.layout)))
                self._undo.callback(self._shared.watch(model.model))
            # The mesh must not keep an unrestored engine alive.
            renewed = weakref.WeakMethod(self._renewed)
            self._undo.callback(self._shared.when_renewed(lambda: (call := renewed()) and call()))
            # The first undo step: end the open request.
            self._undo.callback(self.end_request, failed=True)
            if pipe is not None:
                self.attach(pipe)
        except BaseException:
            # Raise the original error instead of errors of the undo.
            with suppress(Exception):
                self._shared.fail_request()
                self.close()
            raise

    def attach(self, pipe: Any) -> None:
        """Attach a pipeline to the parallelised transformers."""
        undo = self._attached[id(pipe)] = ExitStack()
        try:
            undo.callback(mark(pipe, self))
            for strategy in self.strategies:
                strategy.attach(pipe, undo)
            undo.callback(PipelineCall(pipe, partial(self._around_pipeline, pipe)).undo)
        except BaseException:
            self._attached.pop(id(pipe)).close()
            raise

    def detach(self, target: Any) -> None:
        """Undo `attach`; the last pipeline closes the engine. Collective if `close` is."""
        undo = self._attached.pop(id(target), None)
        if undo is None and self._attached:
            raise InputError(
                f"this {type(target).__name__} was parallelised with its pipeline; call ditmesh.restore(...) on that"
            )
        try:
            if undo is not None:
                if self.config.text_encoder in ("tensor", "sharded"):
                    self._meet_to_restore()
                undo.close()
        finally:
            if not self._attached:
                self.close()

    def close(self) -> None:
        """Undo everything exactly. Collective if weights are distributed or the engine created its mesh.

        `PeerError`: weights could not be put together again; everything else is undone all the same.
        """
        with self._undo:
            if self.config.cuts_weights or self.config.text_encoder in ("tensor", "sharded"):
                self._meet_to_restore()
            for undo in [*self._attached.values()]:
                self._undo.push(undo)
            self._attached.clear()

    def _meet_to_restore(self) -> None:
        # If this fails, gathering the weights fails too and reports it.
        with suppress(PeerError):
            self._shared.begin_request("restore")

    def own_mesh(self) -> None:
        """Free the mesh's groups in `close`; its creator hands it over."""
        # The last undo step, because others may need the groups.
        later = self._undo.pop_all()
        # Also for a pipeline that is dropped without `restore`; at exit the groups are already freed.
        release = weakref.finalize(self, self.mesh.close)
        release.atexit = False
        self._undo.callback(release)
        self._undo.push(later)

    # --- a request -----------------------------------------------------------------------------------------

    def begin_request(self, steps: int | None = None) -> None:
        """Begin a new request of a bare transformer with a stale strategy, on every rank. Pipelines do so themselves.

        ``steps``: number of denoising steps, which some warm-up policies want to know.
        """
        self._begin(Request(steps=steps))

    def end_request(self, failed: bool = False) -> None:
        """End the request, and wait for pending messages; ``failed``: ranks may be gone, and are asked for nothing."""
        self._in_request = False
        with ExitStack() as ends:
            # Rows compare the last calls by the clock.
            ends.callback(self.clock.end_request)
            # The outermost first; each is notified even if another one raises.
            for strategy in self.strategies:
                ends.callback(strategy.end_request, failed)

    def _begin(self, request: Request) -> None:
        self._in_request = True
        self.context.pipe = request.pipe or self.context.pipe
        self.clock.begin_request()
        for strategy in self.strategies:
            strategy.begin_request(request)

    def _around_pipeline(self, pipe: Any, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        result: Any = None
        with self.request(f"a call of {type(pipe).__name__}"):
            for model in self.models:
                weight = next(model.model.parameters(), None)
                # An offloaded model lies elsewhere between calls: it is asked where it computes.
                elsewhere = weight is not None and weight.device.type != self.mesh.device.type
                if elsewhere and (misfit := self.mesh.misfit(device_of(model.model))):
                    raise ConfigError(misfit)
            for strategy in reversed(self.strategies):
                args, kwargs = strategy.arguments(pipe, args, kwargs)
            self._begin(Request(pipe))
            try:
                result = proceed(*args, **kwargs)
                for strategy in reversed(self.strategies):
                    result = strategy.result(result)
            except RequestLeft as error:
                result = error
        if isinstance(result, RequestLeft):
            raise result
        return result

    @contextmanager
    def request(self, purpose: str) -> Iterator[Callable[..., None]]:
        """A request that its caller keeps open for calls of the transformers, the same calls on every rank.

        Inputs are not compared: the caller answers for that. Every rank enters and leaves it, for the same purpose.

        Yields:
            A function that sets the request of the next calls, before the first of them and whenever it changes. It
            takes a pipeline, whose scheduler tells steps apart; `CallClock.advance` makes the next call a step of its
            own.
        """

        def turn_to(pipe: Any) -> None:
            if self._in_request:
                self.end_request()
            self._begin(Request(pipe))

        with self._alone(), self._shared.request(purpose):
            try:
                yield turn_to
                self.end_request()
            except BaseException:
                # First, so that nothing waits any more.
                self._shared.fail_request()
                with suppress(Exception):
                    self.end_request(failed=True)
                raise

    def _renewed(self) -> None:
        """Reset all state after links were renewed, because ranks may have different state after a failure."""
        self.end_request(failed=True)
        self.clock.begin_request()
        for strategy in self.strategies:
            strategy.begin_request(Request())
            strategy.forget()

    def _around_call(self, model: nn.Module, proceed: Proceed, arguments: Arguments) -> Any:
        """One call of a transformer: the outermost layer; two threads cannot run it at the same time."""
        with self._alone():
            if requires_grad(model, arguments):
                for strategy in self.strategies:
                    strategy.before_training(model, arguments)
            elif self._attached and not self._in_request:
                for strategy in self.strategies:
                    strategy.outside_request(arguments)
            return proceed(arguments)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"{type(self.models[0].model).__name__} is at work in another thread, and its ranks do one thing at a "
                "time, in one order; call its pipelines one after the other"
            )
        try:
            yield
        finally:
            self._lock.release()

    # --- what strategies report ----------------------------------------------------------------------------

    def parts(self, kind: type[Part]) -> list[Part]:
        """The objects that a strategy left with every transformer, by their type: ``engine.parts(PipeFusion)``."""
        return [part for model in self.models if (part := model.find(kind)) is not None]

    @property
    def hooks(self) -> list[ModelHooks]:
        """The hooks of every transformer."""
        return self.parts(ModelHooks)

    @property
    def balances(self) -> list[Balance]:
        """Speeds of the sequence ranks, one per transformer."""
        return next((one.balances() for one in self.strategies if isinstance(one, TokenStrategy)), [])

    @property
    def loads(self) -> list[StepLoad]:
        """This rank's seconds, waiting and tokens in every step of the latest request; see `all_loads`."""
        return next((one.loads for one in self.strategies if isinstance(one, TokenStrategy)), [])

    def all_loads(self) -> list[list[StepLoad]]:
        """`loads` of every rank, in rank order. A collective call, after a request."""
        return self._shared.world.all_gather_object(self.loads)

    def notes(self) -> list[str]:
        """The strategies' messages to the user about the latest request, in sentences."""
        return [note for strategy in self.strategies for note in strategy.notes()]

    @property
    def control(self) -> WarmupControl | None:
        """The control of a stale strategy's synchronous steps; None if every step is exact."""
        return self.context.find(WarmupControl)

    @property
    def staleness(self) -> StalenessLog | None:
        """The decisions in every step of the latest request, with reasons; None if every step is exact."""
        return None if self.control is None else self.control.log

"""`parallelize` and `restore`: a configuration, a mesh and the models' layouts become strategies in place."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from ..comm import PeerError
from ..comm.mesh import DEFAULT_DEADLINE, Mesh
from ..comm.objects import broadcast_object
from ..config import ParallelConfig
from ..core.clock import CallClock, timestep_of
from ..core.library import library_name
from ..core.patching import Proceed
from ..core.request import PipelineCall, RequestLeft
from ..errors import ConfigError, HostsWarning, InputError, LayoutError
from ..forecast.auto import UsualCall, chosen
from ..forecast.hosts import advice
from ..layout import TokenLayout, layout_of
from ..layout.derive import block_lists
from ..layout.probe import probe
from ..layout.types import GIVEN
from ..recipe import RECIPE, Recipe, check, wanted
from ..staleness.control import StalenessLog, WarmupControl
from ..staleness.policy import WarmupPolicy
from ..strategies import support
from ..strategies.balance import Balance
from ..strategies.base import Context, ParallelModel, Request
from ..strategies.checked import CheckedLayout, LayoutCheck
from ..strategies.heads import check_heads, heads_of
from ..strategies.hooks import ModelHooks, requires_grad
from ..strategies.pipefusion.pipeline import PipeFusion
from ..strategies.pipefusion.stages import Stages
from ..strategies.rows import BatchParallel
from ..strategies.sequence import ExactSequence
from ..strategies.simulated import SimulatedExact, SimulatedStale, virtual_mesh
from ..strategies.stale.warmup import StaleSteps
from ..strategies.tokens import KnownForms
from .explain import Layer, layers_of
from .first_call import Alone, FirstCall, FirstControl

__all__ = [
    "Engine",
    "check_heads",
    "configuration_for",
    "engine_of",
    "heads_of",
    "parallelize",
    "parallelized",
    "restore",
    "simulate",
]

T = TypeVar("T")
Part = TypeVar("Part")
ConfigLike = ParallelConfig | Mapping[str, Any] | str | Path

# The attribute that holds a parallelised object's engine.
ENGINE = "_ditmesh_engine"

# Components of diffusers' pipelines that hold the denoising transformer. Wan has two, for early and for late steps;
# Ideogram 4 has one for each branch of guidance; Kandinsky's and Shap-E's denoises an embedding.
DENOISERS = ("transformer", "transformer_2", "unconditional_transformer", "prior")


class Engine:
    """The strategies of transformers and their pipelines, installed by `parallelize`, and their removal.

    There is one engine for a set of transformers, however many pipelines share them.

    Args:
        models: the transformers and their layouts.
        config: the configuration in force.
        mesh: ranks, links, and the byte counters (`mesh.traffic`).
        owns_mesh: whether `close` gives the mesh's groups back.
        recipe: strategies, in the order in which they are applied.

    Attributes:
        strategies: those in force, in that order.
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
                self._undo.callback(_mark(model.model, self))
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
            undo.callback(_mark(pipe, self))
            for strategy in self.strategies:
                strategy.attach(pipe, undo)
            undo.callback(PipelineCall(pipe, partial(self._around_pipeline, pipe)).undo)
            for network in controls(pipe):
                if _cuts_controls(self.config) and ENGINE not in vars(network):
                    _cut_control(network, self.config, self.mesh, undo)
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
                if self.config.text_encoder in ("sharded", "rank0"):
                    self._meet_to_restore()
                undo.close()
        finally:
            if not self._attached:
                self.close()

    def close(self) -> None:
        """Undo everything exactly. Collective if weights are distributed or the engine created its mesh.

        Raises:
            PeerError: weights could not be put together again; everything else is undone all the same.
        """
        with self._undo:
            if self.config.cuts_weights or self.config.text_encoder in ("sharded", "rank0"):
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
        """Begin a new request, independent of the previous one. Pipelines do this automatically.

        For a bare transformer with a stale strategy; every rank calls it.

        Args:
            steps: number of denoising steps, which some warm-up policies want to know.
        """
        self._begin(Request(steps=steps))

    def end_request(self, failed: bool = False) -> None:
        """End the request, and wait for pending messages. Pipelines do this automatically.

        Args:
            failed: it has raised; then other ranks may have gone, and nothing is asked of them.
        """
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
        """One call of a pipeline."""
        result: Any = None
        with self.request(f"a call of {type(pipe).__name__}"):
            self._check_devices()
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

    def _check_devices(self) -> None:
        """Refuse models that have been moved since.

        Raises:
            ConfigError: one of them is on another kind of device than the mesh.
        """
        for model in self.models:
            weight = next(model.model.parameters(), None)
            # What is offloaded lies elsewhere between calls: it is asked where it computes.
            elsewhere = weight is not None and weight.device.type != self.mesh.device.type
            if elsewhere and (said := self.mesh.misfit(_device_of(model.model))):
                raise ConfigError(said)

    @contextmanager
    def request(self, purpose: str) -> Iterator[Callable[[Any], None]]:
        """A request that its caller keeps open for calls of the transformers, the same calls on every rank.

        Inputs are not compared: the caller answers for that. Every rank enters and leaves it. Pipelines do this by
        themselves.

        Args:
            purpose: what the ranks meet for; the same on every rank.

        Yields:
            A function that says whose calls come next, before the first of them and whenever that changes. It takes a
            pipeline, by whose scheduler steps are told apart. `CallClock.advance` makes the next call a step of its
            own.
        """
        with self._alone(), self._shared.request(purpose):
            try:
                yield self._turn_to
                self.end_request()
            except BaseException:
                # First, so that nothing waits any more.
                self._shared.fail_request()
                with suppress(Exception):
                    self.end_request(failed=True)
                raise

    def _turn_to(self, pipe: Any) -> None:
        if self._in_request:
            self.end_request()
        self._begin(Request(pipe))

    def _renewed(self) -> None:
        """Reset all state after links were renewed, because ranks may have different state after a failure."""
        self.end_request(failed=True)
        self.clock.begin_request()
        for strategy in self.strategies:
            strategy.begin_request(Request())
            strategy.forget()

    def _around_call(self, model: nn.Module, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """One call of a transformer: the outermost layer."""
        with self._alone():
            if requires_grad(model, args, kwargs):
                for strategy in self.strategies:
                    strategy.before_training(model, args, kwargs)
            elif self._attached and not self._in_request:
                for strategy in self.strategies:
                    strategy.outside_request(args, kwargs)
            return proceed(*args, **kwargs)

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

    def explain(self) -> list[Layer]:
        """All layers around a request, a transformer's call and its blocks, outermost first, with reasons."""
        return layers_of(self.strategies, self.models)

    def _parts(self, kind: type[Part]) -> list[Part]:
        return [part for model in self.models if (part := model.find(kind)) is not None]

    @property
    def hooks(self) -> list[ModelHooks]:
        """The hooks of every transformer."""
        return self._parts(ModelHooks)

    @property
    def rows(self) -> list[BatchParallel]:
        """The split of rows and branches of every transformer, if any."""
        return self._parts(BatchParallel)

    @property
    def pipes(self) -> list[PipeFusion]:
        """PipeFusion of every transformer, if the configuration has stages or patches."""
        return self._parts(PipeFusion)

    @property
    def balances(self) -> list[Balance]:
        """Speeds of the sequence ranks, or of the stages, one per transformer; see `rebalance`."""
        return [stages.balance for stages in self._parts(Stages)] or [hooks.handler.balance for hooks in self.hooks]

    @property
    def clock(self) -> CallClock:
        """Counts the calls of the transformers."""
        return self.context.clock

    @property
    def control(self) -> WarmupControl | None:
        """The control of a stale strategy's synchronous steps; None if every step is exact."""
        return self.context.find(WarmupControl)

    @property
    def staleness(self) -> StalenessLog | None:
        """The decisions in every step of the latest request, with reasons; None if every step is exact."""
        return None if self.control is None else self.control.log

    def use_policy(self, policy: WarmupPolicy) -> None:
        """Set another warm-up policy from the next request on, for studies. Call it on all ranks.

        Raises:
            ConfigError: every step is exact.
        """
        if self.control is None:
            raise ConfigError(f"{self.config.describe()} has no stale steps to decide about; leave the policy out")
        self.control.policy = policy

    def rebalance(self) -> None:
        """Measure speeds again at the next call. Call it on all ranks.

        The speed of every sequence rank (``speeds="auto"``); with stages, at the beginning of the next request, their
        speeds and the cost of every kind of block (``stages="measured"``).

        Raises:
            ConfigError: nothing is measured.
        """
        config = self.config
        if config.speeds != "auto" and config.stages != "measured":
            given = f"stages={config.stages!r} and speeds={config.speeds!r}"
            raise ConfigError(
                f"{given if config.pipe > 1 else f'speeds={config.speeds!r}'} are not measured; use speeds='auto'"
                + (" or stages='measured'" if config.pipe > 1 else "")
            )
        for pipe in self.pipes:
            pipe.stages.wanted = config.pipe > 1
        for balance in [] if self.pipes else self.balances:
            balance.wanted = True


def parallelize(
    target: T,
    config: ConfigLike = "auto",
    *,
    mesh: Mesh | None = None,
    layout: TokenLayout | None = None,
    timeout: float = DEFAULT_DEADLINE,
    recipe: Recipe = RECIPE,
) -> T:
    """Make a diffusers DiT pipeline (or a bare transformer) run on all ranks of the job, in place.

    Every rank calls this with the same arguments, then calls the pipeline as usual with the same inputs.

    Args:
        target: a `DiffusionPipeline` with a transformer, or a diffusers transformer. Already on its device.
        config: a `ParallelConfig`, a mapping, the path of a YAML file, or ``"auto"``: the exact configuration for all
            ranks of the default process group that is predicted to be the fastest; see `configuration_for`.
        mesh: a mesh to share between several pipelines; default: a new one, which `restore` frees.
        layout: the transformer's token layout; default: the reviewed one of its class, else a probed one, else one
            derived from the first call. Your own layout is compared with one device in the first call of every form.
        timeout: deadline of every collective, in seconds, if the mesh is created here.
        recipe: the strategies in the order in which they are applied, for adding your own.

    Pipelines that share a transformer (``from_pipe``) share its ranks: call this on each of them with the same
    configuration; the weights are restored with the last pipeline.

    Returns:
        ``target`` itself.

    Raises:
        ConfigError: the degrees do not fit the ranks or the model.
        LayoutError: the class has no reviewed layout and cannot be probed.
        InputError: ``target`` has no transformer, or is parallelised already.
    """
    _refuse_twice(target)
    models = denoisers(target)
    if any(ENGINE in vars(model) for model in models):
        _share(target, models, config)
        return target
    layouts = [_given(layout, model) or _layout_before_a_call(model) for model in models]
    if config == "auto":
        config = mesh.config if mesh is not None else configuration_for(target)
    config = ParallelConfig.read(config)
    pairs = [(model, found) for model, found in zip(models, layouts, strict=True) if found is not None]
    check(recipe, config, pairs)
    for model in models:
        support.check(type(model).__name__, config, recipe, published=layout_of(model) is not None)
    owns_mesh = mesh is None
    if mesh is None:
        mesh = Mesh(config, _device_of(models[0]), timeout)
    elif mesh.config.degrees != config.degrees or (config.shard > 1 and not mesh.shares_weights_as(config)):
        raise ConfigError(f"the mesh is for {mesh.config.describe()}, the configuration for {config.describe()}")
    else:
        mesh.check_device(_device_of(models[0]))
    _warn_of_hosts(target, models[0], mesh)
    if len(pairs) == len(models) and not (config.cuts_weights and any(found.source == GIVEN for _, found in pairs)):
        Engine(pairs, config, mesh, owns_mesh, recipe).open(target)
    else:
        _wait_for_a_call(target, models, layouts, config, mesh, owns_mesh, recipe)
    return target


def _warn_of_hosts(target: Any, model: nn.Module, mesh: Mesh) -> None:
    """Warn once for all ranks if tensor or Ulysses ranks are on several hosts, with a configuration that sends less."""
    if mesh.rank == 0 and any(mesh.hosts.numbers):
        said = advice(
            library_name(model),
            getattr(model, "config", {}),
            layout_of(model),
            _usual_call(target, model),
            mesh.config,
            mesh.hosts.numbers,
            mesh.device,
        )
        if said is not None:
            warnings.warn(said, HostsWarning, stacklevel=3)


def _usual_call(target: Any, model: nn.Module, guidance: bool | None = None, image: int | None = None) -> UsualCall:
    """The known properties of the calls of a pipeline or a bare transformer."""
    element = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    return UsualCall(None if isinstance(target, nn.Module) else type(target), guidance, image, element=element)


def configuration_for(target: Any, *, guidance: bool | None = None, image: int | None = None) -> ParallelConfig:
    """The configuration of ``"auto"``: the fastest exact one for all ranks of the default process group.

    Predicted from the model's shapes (`ditmesh.forecast`), unless ``ditmesh plan --measure`` has measured it on this
    machine; on rank 0, whose choice counts for all. A collective call.

    Args:
        target: as for `parallelize`.
        guidance: whether guidance will run two branches; default: whether the pipeline does when it is not told.
        image: image tokens of a sample; default: the model's usual number.
    """
    models = denoisers(target)

    def choose(world_size: int) -> ParallelConfig:
        model, layout = models[0], layout_of(models[0])
        # Of a model that does not name its heads one is sure: the ring takes any number of ranks.
        heads = min(heads_of(one, layout_of(one)) or 1 for one in models)
        call = _usual_call(target, model, guidance, image)
        config = getattr(model, "config", {})
        return chosen(library_name(model), config, layout, heads, call, world_size, _device_of(model))

    return agreed(choose)


def agreed(choose: Callable[[int], ParallelConfig]) -> ParallelConfig:
    """The choice of rank 0 for all ranks of the default process group, because measurements may differ."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return choose(1)
    return broadcast_object(choose(dist.get_world_size()) if dist.get_rank() == 0 else None)


def _wait_for_a_call(
    target: Any,
    models: list[nn.Module],
    layouts: list[TokenLayout | None],
    config: ParallelConfig,
    mesh: Mesh,
    owns_mesh: bool,
    recipe: Recipe,
) -> None:
    """Open the engine at the first call, from which the layouts are derived or checked."""

    def open_engine(layouts: list[TokenLayout], targets: list[Any], owned: bool, alone: Alone) -> None:
        pairs = list(zip(models, layouts, strict=True))
        check(recipe, config, pairs)
        engine = Engine(pairs, config, mesh, owned, recipe)
        engine.open(targets[0])
        for model in engine.models:
            if (layout_check := model.find(LayoutCheck)) is not None:
                layout_check.alone.update(alone.get(id(model.model), {}))
        for pipe in targets[1:]:
            engine.attach(pipe)

    def in_parts(model: nn.Module, layout: TokenLayout, call: dict[str, Any]) -> Any:
        two = ParallelConfig(ring=2)
        engine = Engine(
            [(model, replace(layout, source="reviewed"))],
            two,
            virtual_mesh(two, mesh.device),
            owns_mesh=False,
            recipe=SIMULATION,
        )
        waiting = vars(model).pop(ENGINE)
        engine.open(model)
        try:
            return model(**call)
        finally:
            engine.detach(model)
            vars(model)[ENGINE] = waiting

    first = FirstCall(models, layouts, config, mesh, owns_mesh, open_engine, in_parts, _mark)
    if not isinstance(target, nn.Module):
        first.attach(target)


# Splits a ControlNet's tokens, and gathers them wherever it reads them.
CONTROLS: Recipe = (ExactSequence, KnownForms)


def _cuts_controls(config: ParallelConfig) -> bool:
    """Whether ControlNets run with split tokens: only with exact steps and without reproducible mode."""
    return ExactSequence.wanted(config) and config.sequence > 1 and config.tensor == 1


def _cut_control(network: nn.Module, config: ParallelConfig, mesh: Mesh, undo: ExitStack) -> None:
    """Split a ControlNet's tokens from its first call on; the removal goes onto ``undo``."""
    engines = ExitStack()

    def open_engine(layouts: list[TokenLayout], targets: list[Any], owned: bool, alone: Alone) -> None:
        pairs = [(network, layouts[0])]
        check(CONTROLS, config, pairs)
        engine = Engine(pairs, config, mesh, owned, CONTROLS)
        engine.open(network)
        engines.callback(engine.close)

    first = FirstControl([network], [], config, mesh, False, open_engine, None, _mark)
    undo.callback(engines.close)
    undo.callback(first.detach, network)


def _mark(owner: Any, engine: Any) -> Callable[[], None]:
    """Attach an engine, or a pending first call, to an object for `engine_of`; returns the undo."""
    vars(owner)[ENGINE] = engine
    return partial(vars(owner).pop, ENGINE, None)


def _device_of(model: nn.Module) -> torch.device | None:
    """Where a transformer computes; its weights lie elsewhere between calls when they are offloaded."""
    from diffusers.hooks.group_offloading import _get_group_onload_device

    for module in model.modules():
        # accelerate's hooks.
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    with suppress(ValueError):
        return _get_group_onload_device(model)
    parameter = next(model.parameters(), None)
    return None if parameter is None else parameter.device


def _given(layout: TokenLayout | None, model: nn.Module) -> TokenLayout | None:
    """A layout passed by the user; None if it is the reviewed one of the model's class."""
    return layout if layout is None or layout == layout_of(model) else replace(layout, source=GIVEN)


def _layout_before_a_call(model: nn.Module) -> TokenLayout | None:
    """The layout of the model's class, or one that a probe derives from generated inputs."""
    try:
        return find_layout(model)
    except LayoutError:
        if not block_lists(model):
            raise
        return None


def _refuse_twice(target: Any) -> None:
    engine = getattr(target, ENGINE, None)
    if engine is not None:
        raise InputError(f"this {type(target).__name__} is parallelised already; call ditmesh.restore(...) on it first")


def _share(target: Any, models: list[nn.Module], config: ConfigLike) -> None:
    """Attach a pipeline to transformers that another pipeline has parallelised.

    Raises:
        InputError: they are shared out in another way than is asked for, or not all of them.
    """
    engines: dict[int, Any] = {id(vars(m)[ENGINE]): vars(m)[ENGINE] for m in models if ENGINE in vars(m)}
    engine = next(iter(engines.values()))
    name = type(target).__name__
    if len(engines) > 1 or any(ENGINE not in vars(model) for model in models):
        raise InputError(
            f"only some of the {len(models)} transformers of this {name} are parallelised, through another pipeline; "
            "call ditmesh.restore(...) on that one first"
        )
    if config != "auto" and ParallelConfig.read(config) != engine.config:
        raise InputError(
            f"the transformer of this {name} is shared with a pipeline that runs with {engine.config.describe()}; give "
            f"the same configuration, or call ditmesh.restore(...) on that pipeline first"
        )
    engine.attach(target)


# The simulated strategies: token strategies of virtual ranks.
SIMULATION: Recipe = (StaleSteps, SimulatedExact, SimulatedStale, KnownForms, CheckedLayout)


def simulate(target: T, config: ConfigLike, *, layout: TokenLayout | None = None) -> T:
    """Make a pipeline (or a bare transformer) compute the result of ``config`` on virtual ranks in this process.

    Use it to study stale strategies: simulating 8 ranks on one device takes 8 times
    as long. `restore` undoes it; `engine_of` has drift and decisions as for real ranks. diffusers' caches, which
    keep state in the model, are not supported.

    Args:
        target: as for `parallelize`.
        config: the ``ring`` degree and its exchange; no other axis.
        layout: as for `parallelize`.

    Raises:
        ConfigError: another axis than ring has a degree, or a setting that the simulation does not support.
        InputError: ``target`` has no transformer, or is parallelised already.
    """
    _refuse_twice(target)
    config = ParallelConfig.read(config)
    for setting, given in (("speeds", config.speeds), ("reproducible", config.reproducible)):
        if given:
            raise ConfigError(f"{setting}={given!r} is not simulated; leave it out")
    models = denoisers(target)
    mesh = virtual_mesh(config, _device_of(models[0]) or "cpu")
    pairs = [(model, _given(layout, model) or find_layout(model)) for model in models]
    Engine(pairs, config, mesh, owns_mesh=False, recipe=SIMULATION).open(target)
    return target


@contextmanager
def simulated(target: T, config: ConfigLike, **options: Any) -> Iterator[T]:
    """`simulate` within a ``with`` block, with the same options."""
    simulate(target, config, **options)
    try:
        yield target
    finally:
        restore(target)


def restore(target: T) -> T:
    """Undo `parallelize` exactly. Every rank calls it.

    Raises:
        InputError: ``target`` is not parallelised.
    """
    waiting = getattr(target, ENGINE, None)
    (waiting if isinstance(waiting, FirstCall) else engine_of(target)).detach(target)
    return target


@contextmanager
def parallelized(target: T, config: ConfigLike = "auto", **options: Any) -> Iterator[T]:
    """`parallelize` within a ``with`` block, with the same options."""
    parallelize(target, config, **options)
    try:
        yield target
    finally:
        # An engine that failed in the first call has removed itself.
        if getattr(target, ENGINE, None) is not None:
            restore(target)


def engine_of(target: Any) -> Engine:
    """The engine of a parallelised ``target``, with its config, mesh and byte counters.

    Raises:
        InputError: there is none.
    """
    engine = getattr(target, ENGINE, None)
    if isinstance(engine, FirstCall):
        # It has a configuration and a mesh, and raises an error for everything else.
        return cast("Engine", engine)
    if not isinstance(engine, Engine):
        raise InputError(f"this {type(target).__name__} is not parallelised; call ditmesh.parallelize(...) first")
    return engine


def denoisers(target: Any) -> list[nn.Module]:
    """The denoising transformers of a pipeline, or the transformer itself.

    Raises:
        InputError: there is none, or it is compiled as a whole.
    """
    models = [target] if isinstance(target, nn.Module) else [getattr(target, name, None) for name in DENOISERS]
    found = [model for model in models if isinstance(model, nn.Module)]
    for model in found:
        inner = vars(model).get("_modules", {}).get("_orig_mod")
        if inner is not None or model._compiled_call_impl is not None:
            raise InputError(
                f"this {type(inner or model).__name__} is compiled as a whole, and ranks cannot meet inside its graph; "
                "parallelise the model that is not compiled, and compile its blocks: ParallelConfig(compile='inductor')"
            )
    if not found:
        raise InputError(
            f"{type(target).__name__} has no transformer ({' or '.join(DENOISERS)}); ditmesh parallelises diffusers' "
            "Diffusion Transformer pipelines, not U-Nets"
        )
    return found


def controls(pipe: Any) -> list[nn.Module]:
    """The ControlNets of a pipeline, one by one."""
    found = getattr(pipe, "controlnet", None)
    several = getattr(found, "nets", None)
    networks = [*several] if isinstance(several, nn.ModuleList) else [found]
    return [network for network in networks if isinstance(network, nn.Module)]


def find_layout(model: nn.Module) -> TokenLayout:
    """The reviewed layout of the model's class, else one derived by probing the model.

    Raises:
        LayoutError: no reviewed layout, and the probe failed; says why.
    """
    return layout_of(model) or probe(model)

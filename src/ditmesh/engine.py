"""`parallelize` and `restore`: config + layout + mesh -> strategies on doors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from . import support
from .compilation import compile_blocks
from .config import ParallelConfig
from .determinism import deterministic
from .doors import ModelDoors
from .errors import ConfigError, InputError
from .inputs import AgreedInputs, weights_fingerprint
from .layout import TokenLayout, layout_of
from .layout.probe import probe
from .mesh import DEFAULT_DEADLINE, Mesh
from .methods import replace_method
from .request import PipelineDoor
from .staleness.control import StalenessLog, StepControl
from .staleness.drift import DriftMonitor
from .staleness.policy import WarmupPolicy
from .staleness.policy import parse as parse_warmup
from .staleness.schedule import noise_levels
from .strategies.balance import Balance
from .strategies.batch import BatchParallel, RowSplit, Share
from .strategies.caches import AgreedCaches
from .strategies.displaced import DisplacedParallel, StaleSequence
from .strategies.naive import NaiveParallel
from .strategies.patches import PatchParallel
from .strategies.pipefusion import PipeFusion, check_layout, whole_result
from .strategies.sequence import SequenceParallel
from .strategies.simulation import SimulatedSequence, VirtualMesh
from .strategies.stages import Stages, blocks_of, first_cut, spread_parameters
from .strategies.steps import Steps, watch_calls
from .strategies.tensor import TensorParallel, already_cut
from .strategies.tiled import TiledSequence

T = TypeVar("T")
ConfigLike = ParallelConfig | Mapping[str, Any] | str | Path

# The attribute that holds a parallelised object's engine.
ENGINE = "_ditmesh_engine"

# Components of diffusers' pipelines that hold the denoising transformer (Wan has two).
DENOISERS = ("transformer", "transformer_2")


class Engine:
    """What `parallelize` put on a pipeline or transformer, and how to take it off.

    Attributes:
        config: the configuration in force.
        mesh: ranks, links, and the byte counters (`mesh.traffic`).
        doors: open doors, one set per transformer.
        rows: who shares out the rows of each transformer's batch, where that is done.
        pipes: PipeFusion of every transformer, if the configuration has stages or patches.
        control: the steps of a stale sequence strategy; None when every step is exact.
        balances: weights of the sequence ranks, or of the stages, one per transformer; see `rebalance`.
    """

    def __init__(self, target: Any, config: ParallelConfig, mesh: Mesh, owns_mesh: bool) -> None:
        self.config = config
        self.mesh = mesh
        self.doors: list[ModelDoors] = []
        self.rows: list[BatchParallel] = []
        self.control: StepControl | None = None
        self._stale: list[StaleSequence | SimulatedSequence] = []
        self.balances: list[Balance] = []
        self.pipes: list[PipeFusion] = []
        self._steps: Steps | None = None
        self._target = target
        self._owns_mesh = owns_mesh
        # What is undone by `close`, last first.
        self._undo: list[Callable[[], None]] = []

    def open(self, models: list[tuple[nn.Module, TokenLayout]]) -> None:
        """Put everything in place; the order is that of a call, from the inside out."""
        config, mesh, target = self.config, self.mesh, self._target
        object.__setattr__(target, ENGINE, self)
        self._undo.append(lambda: vars(target).pop(ENGINE))
        fingerprint = ""
        if mesh.world_size > 1 and config.inputs != "trust" and not isinstance(target, nn.Module):
            # Weights that `load` has cut differ from rank to rank, as they should.
            cut: dict[int, set[str]] = {id(model): spread_parameters(model, layout) for model, layout in models}
            for model, _ in models if mesh.tensor.size > 1 else ():
                cut[id(model)] |= already_cut(model, mesh.tensor.size)
            fingerprint = weights_fingerprint(target, cut)
        try:
            # The weights: every rank of the tensor axis keeps its slices.
            if mesh.tensor.size > 1:
                for model, _ in models:
                    self._undo.append(TensorParallel(model, mesh.tensor).close)
            # Every stage keeps its own blocks.
            stages: list[Stages] = []
            for model, layout in models if config.stages_or_patches else ():
                stages.append(Stages(model, layout, config, mesh))
                self._undo.append(stages[-1].close)
            noise = partial(_noise_of, target)
            if config.exchange != "exact":
                monitor = DriftMonitor(mesh.world.all_reduce, mesh.device)
                self.control = StepControl(parse_warmup(config.warmup), mesh.sequence.size, monitor, noise)
            patches = config.patches or config.pipe
            if config.stages_or_patches:
                monitor = DriftMonitor(mesh.world.all_reduce, mesh.device)
                self._steps = Steps(parse_warmup(config.warmup), patches, monitor, mesh.world, noise)
                self._undo.append(partial(self._steps.end_request, failed=True))
            # Blocks and attention: the tokens of a sequence.
            for number, (model, layout) in enumerate(models):
                if config.compile:
                    # Under the doors: what stands in for a block's forward is not to be compiled.
                    self._undo.append(compile_blocks(model, layout, config.compile))
                handler = self._sequence(model, layout, f"{number}." if len(models) > 1 else "")
                self.balances.append(stages[number].balance if stages else handler.balance)
                cuts = mesh.sequence.size > 1 or config.reproducible or config.stages_or_patches
                doors = ModelDoors(model, layout, handler, cuts, _settled(config))
                self.doors.append(doors)
                self._undo.append(doors.close)
                caches = AgreedCaches(model, mesh.world)
                self._undo.append(caches.close)
                handle = model.register_forward_pre_hook(lambda *_, caches=caches: caches.begin_call())
                self._undo.append(handle.remove)
                if isinstance(handler, PatchParallel) and self._steps is not None:
                    pipe = PipeFusion(model, layout, handler, mesh, stages[number], patches, self._steps)
                    self.pipes.append(pipe)
                    self._undo.append(pipe.close)
            # The transformer's call, and the decoder's: the rows of a batch, the branches of guidance.
            begin: list[Callable[[], None]] = []
            if mesh.batch.size > 1 or config.reproducible:
                alone = config.reproducible
                for number, (model, layout) in enumerate(models):
                    rows = BatchParallel(
                        model,
                        mesh.batch,
                        mesh.data,
                        mesh.cfg,
                        layout.unbatched,
                        layout.listed,
                        alone,
                        partial(self._before_rows, number),
                    )
                    self.rows.append(rows)
                    self.doors[number].followers.append(rows.follow)
                    self._undo.append(rows.close)
                    begin.append(rows.begin_request)
                vae = getattr(target, "vae", None)
                if vae is not None:
                    self._undo.append(RowSplit(vae, "decode", mesh.batch, alone).close)
            within: Callable[[], AbstractContextManager[None]] = nullcontext
            if config.reproducible:
                within = partial(deterministic, mesh.device)
                for model, _ in models:
                    self._undo.append(_inside(model, within))
            # The pipeline's call: the same inputs everywhere, nothing left over from the call before.
            if not isinstance(target, nn.Module):
                steps: list[Callable[..., Any]] = []
                if mesh.world_size > 1 and config.inputs != "trust":
                    inputs = AgreedInputs(target, mesh.world, config.inputs, fingerprint)
                    steps.append(inputs.agree)
                steps.append(_starting([*begin, self.begin_request]))
                self._undo.append(PipelineDoor(target, steps, partial(self._request, within), self._whole).close)
                if mesh.rank > 0:
                    self._undo.append(_quiet(target))
        except BaseException:
            self.close()
            raise

    @property
    def staleness(self) -> StalenessLog | None:
        """What was decided in every step of the latest request, and why; None when every step is exact."""
        source = self.control or self._steps
        return None if source is None else source.log

    def use_policy(self, policy: WarmupPolicy) -> None:
        """Let another policy decide, from the next request on: for studies of which steps matter. On all ranks alike.

        Raises:
            ConfigError: every step is exact.
        """
        source = self.control or self._steps
        if source is None:
            raise ConfigError(f"{self.config.describe()} has no stale steps to decide about; leave the policy out")
        source.policy = policy

    def begin_request(self, steps: int | None = None) -> None:
        """A new request: nothing of the one before is seen any more. Pipelines do this by themselves.

        For a bare transformer with a stale strategy; every rank calls it.

        Args:
            steps: number of denoising steps, which some warm-up policies want to know.
        """
        for handler in self._stale:
            handler.end_request()
        for pipe in self.pipes:
            pipe.begin_request()
        for source in (self.control, self._steps):
            if source is not None:
                source.begin_request(steps)

    def end_request(self, failed: bool = False) -> None:
        """The request is over: wait for what is still on its way. Pipelines do this by themselves.

        Args:
            failed: it has raised; then other ranks may have gone, and nothing is asked of them.
        """
        for handler in self._stale:
            with suppress(RuntimeError) if failed else nullcontext():
                handler.end_request()
        for pipe in self.pipes:
            pipe.end_request(failed)
        if self._steps is not None:
            self._steps.end_request(failed)
        if self.control is not None and not failed:
            self.control.end_request()

    def _sequence(self, model: nn.Module, layout: TokenLayout, prefix: str) -> SequenceParallel | SimulatedSequence:
        """The handler of a transformer's blocks; ``prefix`` tells the blocks of several transformers apart."""
        config, mesh, control = self.config, self.mesh, self.control

        def numbered(monitor: DriftMonitor) -> dict[str, int]:
            return {path: monitor.add_block(prefix + path) for path, _ in blocks_of(model, layout)}

        if self._steps is not None:
            return PatchParallel(config, mesh, self._steps.monitor, numbered(self._steps.monitor))
        if control is None and isinstance(mesh, VirtualMesh):
            handler = SimulatedSequence([SequenceParallel(config, view) for view in mesh.ranks], model)
            self._undo.append(handler.close)
            return handler
        if control is None:
            return TiledSequence(config, mesh) if config.reproducible else SequenceParallel(config, mesh)
        blocks = numbered(control.monitor)
        strategy = DisplacedParallel if config.exchange == "displaced" else NaiveParallel
        if isinstance(mesh, VirtualMesh):
            handler = SimulatedSequence([strategy(config, view, control, blocks) for view in mesh.ranks], model)
            self._undo.append(handler.close)
        else:
            handler = strategy(config, mesh, control, blocks)
        self._stale.append(handler)
        self._undo.append(lambda: self.end_request(failed=True))
        self._undo.append(watch_calls(model, control))
        return handler

    @contextmanager
    def _request(self, within: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """The length of a pipeline's call."""
        with within():
            try:
                yield
            except BaseException:
                self.end_request(failed=True)
                raise
            self.end_request()

    def _before_rows(self, number: int, run: Share) -> None:
        """Rows of a branch are about to run in transformer ``number``, whoever asked for them."""
        if self.control is not None:
            self.control.clock.rows = run.rows
            if run.ahead and run.branch is not None:
                self.control.clock.branch = run.branch
        if self.pipes:
            branch = None if run.branch is None else (run.step, (run.branch, run.link, run.ahead))
            self.pipes[number].announce(branch, run.rows)

    def _whole(self, result: Any) -> Any:
        """A pipeline's result, with whole tensors in place of patches that have still to come."""
        flushes = [pipe.flushes for pipe in self.pipes]
        result = whole_result(result) if self.pipes else result
        # At the end everything has to come anyway: that is no pause.
        for pipe, count in zip(self.pipes, flushes, strict=True):
            pipe.flushes = count
        return result

    def rebalance(self) -> None:
        """Measure again at the next call. On all ranks alike.

        The speed of every sequence rank (``weights="auto"``); with stages, at the beginning of the next request, their
        speeds and the cost of every kind of block (``stages="measured"``).

        Raises:
            ConfigError: nothing is measured.
        """
        config = self.config
        if config.weights != "auto" and config.stages != "measured":
            given = f"stages={config.stages!r} and weights={config.weights!r}"
            raise ConfigError(
                f"{given if config.pipe > 1 else f'weights={config.weights!r}'} are not measured; use weights='auto'"
                + (" or stages='measured'" if config.pipe > 1 else "")
            )
        for pipe in self.pipes:
            pipe.stages.wanted = config.pipe > 1
        for balance in [] if self.pipes else self.balances:
            balance.wanted = True

    def own_mesh(self) -> None:
        """Give the mesh's groups back in `close`: whoever made it hands it over."""
        self._owns_mesh = True

    def close(self) -> None:
        """Undo `open`, exactly. Collective when weights are cut or the engine made its own mesh."""
        while self._undo:
            self._undo.pop()()
        self.doors.clear()
        self.rows.clear()
        self.pipes.clear()
        if self._owns_mesh:
            self.mesh.close()


def parallelize(
    target: T,
    config: ConfigLike = "auto",
    *,
    mesh: Mesh | None = None,
    layout: TokenLayout | None = None,
    timeout: float = DEFAULT_DEADLINE,
) -> T:
    """Make a diffusers DiT pipeline (or a bare transformer) run on all ranks of the job, in place.

    Every rank calls this with the same arguments, then calls the pipeline as always, with the same inputs.

    Args:
        target: a `DiffusionPipeline` with a transformer, or a diffusers transformer. Already on its device.
        config: a `ParallelConfig`, a mapping, the path of a YAML file, or ``"auto"``: Ulysses as far as the
            heads divide, ring for the rest, over all ranks of the default process group.
        mesh: share the groups of several pipelines; default: groups of its own, given back by `restore`.
        layout: the transformer's token layout; default: the reviewed one of its class, else a probed one.
        timeout: deadline of every collective, in seconds, when the mesh is made here.

    Returns:
        ``target`` itself.

    Raises:
        ConfigError: the degrees do not fit the ranks or the model.
        LayoutError: the class has no reviewed layout and cannot be probed.
        InputError: ``target`` has no transformer, or is parallelised already.
    """
    if hasattr(target, ENGINE):
        raise InputError(f"this {type(target).__name__} is parallelised already; call ditmesh.restore(...) on it first")
    models = denoisers(target)
    layouts = [layout or find_layout(model) for model in models]
    for model in models:
        _check_backend(model)
    if config == "auto":
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        # Of a model that does not tell its heads one is sure: the ring takes any number of ranks.
        config = ParallelConfig.auto(world_size, min(heads_of(model) or 1 for model in models))
    config = ParallelConfig.read(config)
    if config.stages_or_patches:
        check_pipe(config, list(zip(models, layouts, strict=True)))
    for model in models:
        check_heads(config, heads_of(model), type(model).__name__)
        support.check(type(model).__name__, config)
    _check_tiles(layouts, config)
    owns_mesh = mesh is None
    if mesh is None:
        parameter = next(models[0].parameters(), None)
        mesh = Mesh(config, None if parameter is None else parameter.device, timeout)
    elif mesh.config.degrees != config.degrees:
        raise ConfigError(f"the mesh is for {mesh.config.describe()}, the configuration for {config.describe()}")
    engine = Engine(target, config, mesh, owns_mesh)
    engine.open(list(zip(models, layouts, strict=True)))
    return target


def simulate(target: T, config: ConfigLike, *, layout: TokenLayout | None = None) -> T:
    """Make a pipeline (or a bare transformer) draw in this process what ``config`` draws on its ranks.

    For studies of how many devices a stale strategy stands: 8 ranks are simulated on one device, which takes 8 times
    as long. `restore` undoes it; `engine_of` tells drift and decisions as for real ranks. diffusers' caches, which
    keep state in the model, are not for this.

    Args:
        target: as for `parallelize`.
        config: ``ring`` ranks and how they share keys; no other axis.
        layout: as for `parallelize`.

    Raises:
        ConfigError: another axis than ring has a degree, or a setting that the simulation does not know.
        InputError: ``target`` has no transformer, or is parallelised already.
    """
    if hasattr(target, ENGINE):
        raise InputError(f"this {type(target).__name__} is parallelised already; call ditmesh.restore(...) on it first")
    config = ParallelConfig.read(config)
    for setting, given in (("weights", config.weights), ("reproducible", config.reproducible)):
        if given:
            raise ConfigError(f"{setting}={given!r} is not simulated; leave it out")
    models = denoisers(target)
    for model in models:
        _check_backend(model)
    parameter = next(models[0].parameters(), None)
    mesh = VirtualMesh(config, "cpu" if parameter is None else parameter.device)
    engine = Engine(target, config, mesh, owns_mesh=False)
    engine.open([(model, layout or find_layout(model)) for model in models])
    return target


@contextmanager
def simulated(target: T, config: ConfigLike, **options: Any) -> Iterator[T]:
    """`simulate` for the length of a ``with`` block. Options as there."""
    simulate(target, config, **options)
    try:
        yield target
    finally:
        restore(target)


def restore(target: T) -> T:
    """Undo `parallelize`: the object is exactly what it was before. Every rank calls it.

    Raises:
        InputError: ``target`` is not parallelised.
    """
    engine_of(target).close()
    return target


@contextmanager
def parallelized(target: T, config: ConfigLike = "auto", **options: Any) -> Iterator[T]:
    """`parallelize` for the length of a ``with`` block. Options as there."""
    parallelize(target, config, **options)
    try:
        yield target
    finally:
        restore(target)


def engine_of(target: Any) -> Engine:
    """The engine `parallelize` put on ``target``: its config, mesh and byte counters.

    Raises:
        InputError: there is none.
    """
    engine = getattr(target, ENGINE, None)
    if not isinstance(engine, Engine):
        raise InputError(f"this {type(target).__name__} is not parallelised; call ditmesh.parallelize(...) first")
    return engine


def denoisers(target: Any) -> list[nn.Module]:
    """The denoising transformers of a pipeline, or the transformer itself.

    Raises:
        InputError: there is none.
    """
    if isinstance(target, nn.Module):
        return [target]
    models = [getattr(target, name, None) for name in DENOISERS]
    found = [model for model in models if isinstance(model, nn.Module)]
    if not found:
        raise InputError(
            f"{type(target).__name__} has no transformer ({' or '.join(DENOISERS)}); ditmesh parallelises diffusers' "
            "Diffusion Transformer pipelines, not U-Nets"
        )
    return found


def find_layout(model: nn.Module) -> TokenLayout:
    """The reviewed layout of the model's class, else one derived by probing the model.

    Raises:
        LayoutError: no reviewed layout, and the probe failed; says why.
    """
    return layout_of(model) or probe(model)


def heads_of(model: nn.Module) -> int | None:
    """The smallest number of attention heads in the model's blocks; None when the model does not say."""
    counts = [
        heads
        for module in model.modules()
        if hasattr(module, "to_q") and isinstance(heads := getattr(module, "heads", None), int)
    ]
    config = getattr(model, "config", None)
    named = (getattr(config, key, None) for key in ("num_attention_heads", "num_heads", "n_heads"))
    return min(counts, default=next((count for count in named if isinstance(count, int)), None))


def _check_tiles(layouts: list[TokenLayout], config: ParallelConfig) -> None:
    """Refuse the reproducible mode for blocks that cannot run tile by tile.

    Raises:
        ConfigError: naming what is in the way.
    """
    for layout in layouts if config.reproducible else ():
        for region in layout.regions:
            names = [leaf.module for leaf in region.leaves]
            names += [stream.arg for stream in region.streams if stream.folded]
            if names:
                raise ConfigError(
                    f"{layout.model} mixes tokens outside attention ({', '.join(names)}), so its blocks cannot run "
                    "tile by tile; leave reproducible out"
                )


def check_heads(config: ParallelConfig, heads: int | None, model: str) -> None:
    """Refuse more tensor ranks than heads, and more Ulysses ranks than a tensor rank has heads.

    Does nothing when the number of heads is not known; the first attention call looks again.

    Raises:
        ConfigError: naming both and the way out.
    """
    if heads is None:
        return
    if config.tensor > heads:
        raise ConfigError(
            f"tensor={config.tensor} is more than the {heads} attention heads of {model}; use tensor <= {heads} and "
            "ulysses or ring for the rest"
        )
    # Uneven cuts leave the last rank with the fewest heads.
    local = heads // config.tensor
    if config.ulysses > local:
        divisors = [d for d in range(1, local + 1) if local % d == 0 and config.sequence % d == 0]
        best = divisors[-1]
        whose = (
            f"{local} attention heads that tensor={config.tensor} leaves a rank"
            if config.tensor > 1
            else (f"{heads} attention heads")
        )
        raise ConfigError(
            f"ulysses={config.ulysses} is more than the {whose} of {model}; "
            f"use ulysses={best} with ring={config.sequence // best}"
        )


def _inside(model: nn.Module, within: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run a model's forward inside a context; returns the undo."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with within():
            return restore.original(*args, **kwargs)

    restore = replace_method(model, "forward", forward)
    return restore


def check_pipe(config: ParallelConfig, models: Sequence[tuple[nn.Module, TokenLayout]]) -> None:
    """Refuse what PipeFusion cannot run.

    Raises:
        ConfigError: naming it and the way out.
    """
    for model, layout in models:
        check_layout(layout)
        first_cut(model, layout, config)


def _settled(config: ParallelConfig) -> str:
    """The setting that sets itself up by one layout, in words; empty when there is none."""
    return f"patches={config.patches or config.pipe}" if config.stages_or_patches else ""


def _noise_of(target: Any) -> tuple[float, ...] | None:
    """Noise levels of the request's steps, if the target is a pipeline with a scheduler."""
    return noise_levels(getattr(target, "scheduler", None))


def _starting(begin: list[Callable[[], None]]) -> Callable[..., Any]:
    """A step of the pipeline's door that tells every strategy that a request begins."""

    def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for strategy in begin:
            strategy()
        return args, kwargs

    return start


def _quiet(pipe: Any) -> Callable[[], None]:
    """Silence a pipeline's progress bar; returns what undoes it."""
    before = vars(pipe).get("_progress_bar_config")
    pipe.set_progress_bar_config(**{**(before or {}), "disable": True})

    def undo() -> None:
        if before is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = before

    return undo


def _check_backend(model: nn.Module) -> None:
    """Attention must reach torch's own function, where the door is."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    chosen = {_AttentionBackendRegistry.get_active_backend()[0]}
    for module in model.modules():
        backend = getattr(getattr(module, "processor", None), "_attention_backend", None)
        if backend is not None:
            chosen.add(AttentionBackendName(backend))
    foreign = chosen - {AttentionBackendName.NATIVE}
    if foreign:
        names = ", ".join(sorted(str(AttentionBackendName(name).value) for name in foreign))
        raise InputError(
            f"{type(model).__name__} uses the attention backend {names}, which does not pass through torch's "
            "scaled_dot_product_attention; call model.set_attention_backend('native') first (torch picks flash or "
            "cuDNN kernels by itself there)"
        )

"""`parallelize`: a configuration, a mesh and the models' layouts become an engine on a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..comm.mesh import DEFAULT_DEADLINE, Mesh
from ..comm.objects import broadcast_object
from ..config import ParallelConfig
from ..core.library import library_name
from ..errors import ConfigError, HostsWarning, InputError, LayoutError
from ..forecast.auto import UsualCall, chosen
from ..forecast.hosts import advice
from ..layout import TokenLayout, layout_of
from ..layout.derive import block_lists
from ..layout.types import GIVEN
from ..recipe import RECIPE, Recipe, checking
from ..recipe import check_recipe as check_all
from ..strategies import support
from ..strategies.adapters import LoadedAdapters
from ..strategies.heads import heads_of
from .controls import ControlNets
from .engine import Engine
from .first_call import FirstCall
from .follow import Following
from .targets import (
    ENGINE,
    FOLLOWED,
    ConfigLike,
    denoisers,
    device_of,
    find_layout,
    given_layout,
    refuse_twice,
    restore,
)

T = TypeVar("T")


# complex: all refusals before the first rank starts work, in one place and one order.
def parallelize(
    target: T,
    config: ConfigLike = "auto",
    *,
    mesh: Mesh | None = None,
    layout: TokenLayout | None = None,
    timeout: float = DEFAULT_DEADLINE,
    recipe: Recipe = RECIPE,
    check: bool = False,
    follow: bool = False,
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
        check: compare the first call of every form with one device, whatever the layout: such a call runs twice, once
            whole on every rank, and a difference is an error on all ranks. Not with ``tensor``, ``pipe`` and ``shard``.
        follow: only rank 0 calls ``target``, and its calls are sent to the other ranks, which call `follow` instead.

    Pipelines that share a transformer (``from_pipe``) share its ranks: call this on each of them with the same
    configuration; the weights are restored with the last pipeline.

    Returns:
        ``target`` itself.

    Raises:
        ConfigError: the degrees do not fit the ranks or the model.
        LayoutError: the class has no reviewed layout and cannot be probed.
        InputError: ``target`` has no transformer, or is parallelised already.
    """
    refuse_twice(target)
    models = denoisers(target)
    if any(ENGINE in vars(model) for model in models):
        if follow:
            raise InputError(
                f"the transformer of this {type(target).__name__} is parallelised already, so that it cannot be "
                "followed as well; call ditmesh.restore(...) on its pipeline first, or leave follow out"
            )
        _share(target, models, config)
        return target
    layouts = [given_layout(layout, model) or _layout_before_a_call(model) for model in models]
    if config == "auto":
        config = mesh.config if mesh is not None else configuration_for(target)
    config = ParallelConfig.read(config)
    pairs = [(model, found) for model, found in zip(models, layouts, strict=True) if found is not None]
    recipe = checking(recipe, config) if check else recipe
    check_all(recipe, config, pairs)
    for model in models:
        support.check_tested(type(model).__name__, config, recipe, published=layout_of(model) is not None)
    owns_mesh = mesh is None
    if mesh is None:
        mesh = Mesh(config, device_of(models[0]), timeout)
    elif mesh.config.degrees != config.degrees or (config.shard > 1 and not mesh.shares_weights_as(config)):
        raise ConfigError(f"the mesh is for {mesh.config.describe()}, the configuration for {config.describe()}")
    else:
        mesh.check_device(device_of(models[0]))
    _warn_of_hosts(target, models[0], mesh)
    shown = len(pairs) == len(models) and not (config.cuts_weights and any(one.source == GIVEN for _, one in pairs))
    applied = (*recipe, LoadedAdapters, ControlNets)
    if shown:
        Engine(pairs, config, mesh, owns_mesh, applied).open(target)
    else:
        first = FirstCall(models, layouts, config, mesh, owns_mesh, applied)
        if not isinstance(target, nn.Module):
            first.attach(target)
    if follow and mesh.world_size > 1:
        Following(target, mesh)
    return target


def follow(target: Any) -> None:
    """Make every call of ``target`` that rank 0 makes, until rank 0 calls `restore`; then it is restored here, too.

    For the ranks but rank 0 that have called ``parallelize(target, ..., follow=True)``. A call that fails on one rank
    raises on rank 0, and the ranks go on following.

    Raises:
        InputError: ``target`` is not followed, or this is rank 0.
        PeerError: rank 0 has ended.
    """
    following = vars(target).get(FOLLOWED)
    if following is None:
        raise InputError(
            f"this {type(target).__name__} follows no rank; call ditmesh.parallelize(..., follow=True) on all ranks"
        )
    following.follow()
    restore(target)


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
    element = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    return UsualCall(None if isinstance(target, nn.Module) else type(target), guidance, image, element=element)


def configuration_for(target: Any, *, guidance: bool | None = None, image: int | None = None) -> ParallelConfig:
    """The configuration of ``"auto"``: the fastest exact one for all ranks of the default process group.

    Predicted from the model's shapes (`ditmesh.forecast`), unless ``ditmesh plan --measure`` has measured it on this
    machine; rank 0 chooses for all ranks. A collective call.

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
        return chosen(library_name(model), config, layout, heads, call, world_size, device_of(model))

    return agreed(choose)


def agreed(choose: Callable[[int], ParallelConfig]) -> ParallelConfig:
    """The choice of rank 0 for all ranks of the default process group, because measurements may differ."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return choose(1)
    return broadcast_object(choose(dist.get_world_size()) if dist.get_rank() == 0 else None)


def _layout_before_a_call(model: nn.Module) -> TokenLayout | None:
    """The layout of the model's class, or one that a probe derives from generated inputs."""
    try:
        return find_layout(model)
    except LayoutError:
        if not block_lists(model):
            raise
        return None


def _share(target: Any, models: list[nn.Module], config: ConfigLike) -> None:
    """Attach a pipeline to transformers that another pipeline has parallelised."""
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

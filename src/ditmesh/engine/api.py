"""`parallelize`: a configuration, a mesh and the models' layouts become an engine on a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from ..comm.grid import check_ranks
from ..comm.mesh import DEFAULT_DEADLINE_SECONDS, Mesh
from ..config import ParallelConfig
from ..core.borrowed import check_borrowed
from ..errors import ConfigError, HostsWarning, InputError, LayoutError
from ..layout import TokenLayout, layout_of
from ..layout.derive import block_lists
from ..recipe import RECIPE, Recipe, checking
from ..recipe import check_recipe as check_all
from ..strategies import support
from ..strategies.adapters import LoadedAdapters
from .auto import configuration_for
from .controls import ControlNets
from .engine import Engine
from .first_call import FirstCall
from .targets import ENGINE, ConfigLike, denoisers, device_of, find_layout, given_layout, refuse_twice, restore

T = TypeVar("T")


def parallelize(
    target: T,
    config: ConfigLike = "auto",
    *,
    mesh: Mesh | None = None,
    layout: TokenLayout | None = None,
    timeout: float = DEFAULT_DEADLINE_SECONDS,
    recipe: Recipe = RECIPE,
    check: bool = False,
) -> T:
    """Make a diffusers DiT pipeline (or a bare transformer) run on all ranks of the job, in place.

    Every rank calls this with the same arguments, then calls the pipeline as usual with the same inputs.

    Args:
        target: a `DiffusionPipeline` with a transformer, or a diffusers transformer. Already on its device.
        config: a `ParallelConfig`, a mapping, the path of a YAML file, or ``"auto"``: the exact configuration of all
            ranks of the default process group that a rule names; see `ParallelConfig.preferred`.
        mesh: a mesh to share between several pipelines; default: a new one, which `restore` frees.
        layout: the transformer's token layout; default: the reviewed one of its class, else a probed one, else one
            derived from the first call. Your own layout is compared with one device in the first call of every form.
        timeout: deadline of every collective, in seconds, if the mesh is created here.
        recipe: the strategies in the order in which they are applied, for adding your own.
        check: compare the first call of every form with one device, whatever the layout: such a call runs twice, once
            whole on every rank, and a difference is an error on all ranks. Not with ``tensor``, ``pipe`` and ``shard``.

    Pipelines that share a transformer (``from_pipe``) share its ranks: call this on each of them with the same
    configuration; the weights are restored with the last pipeline.

    Returns ``target`` itself.

    Raises:
        ConfigError: the degrees do not fit the ranks or the model.
        LayoutError: the class has no reviewed layout and cannot be probed.
        InputError: ``target`` has no transformer, or is parallelised already.
    """
    check_borrowed()
    refuse_twice(target)
    models = denoisers(target)
    if any(ENGINE in vars(model) for model in models):
        _share(target, models, config)
        return target
    if mesh is None and config != "auto" and not all(map(layout_of, models)):
        # Before a layout is looked for, which may take long. Else a mesh that is made says it, after what is wrong with
        # the configuration itself.
        config = ParallelConfig.read(config)
        recipe = checking(recipe, config) if check else recipe
        check_ranks(config)
    layouts: list[TokenLayout | None] = []
    for model in models:
        try:
            layouts.append(given_layout(layout, model) or find_layout(model))
        except LayoutError:
            if not block_lists(model):
                raise
            # The first call will show it.
            layouts.append(None)
    if config == "auto":
        config = mesh.config if mesh is not None else configuration_for(target)
    config = ParallelConfig.read(config)
    pairs = [(model, found) for model, found in zip(models, layouts, strict=True) if found is not None]
    recipe = checking(recipe, config) if check else recipe
    check_all(recipe, config, pairs)
    for model in models:
        support.check_tested(type(model).__name__, config, recipe, published=layout_of(model) is not None)
    owns_mesh = mesh is None
    mesh = Mesh(config, device_of(models[0]), timeout) if mesh is None else _fitting(mesh, config, models[0])
    _warn_of_hosts(mesh)
    applied = (*recipe, LoadedAdapters, ControlNets)
    if len(pairs) == len(models):
        Engine(pairs, config, mesh, owns_mesh, applied).open(target)
    else:
        first = FirstCall(models, config, mesh, owns_mesh, applied)
        if not isinstance(target, nn.Module):
            first.attach(target)
    return target


def _fitting(mesh: Mesh, config: ParallelConfig, model: nn.Module) -> Mesh:
    """The given mesh, if it has the axes of the configuration and the device of the model."""
    if mesh.config.degrees != config.degrees or (config.shard > 1 and not mesh.shares_weights_as(config)):
        raise ConfigError(f"the mesh is for {mesh.config.describe()}, the configuration for {config.describe()}")
    mesh.check_device(device_of(model))
    return mesh


def _warn_of_hosts(mesh: Mesh) -> None:
    """Warn once for all ranks if tensor or Ulysses ranks are on several hosts."""
    hosts, config = mesh.hosts.numbers, mesh.config
    if mesh.rank > 0 or not any(hosts):
        return
    busy = [
        f"{axis}={config.degrees[axis]}"
        for axis in ("ulysses", "tensor")
        if any(len({hosts[rank] for rank in group}) > 1 for group in config.groups((axis,)))
    ]
    if busy:
        warnings.warn(
            f"{' and '.join(busy)} {'reaches' if len(busy) == 1 else 'reach'} across hosts, where ranks exchange "
            "something in every layer; keep tensor and ulysses inside of a host, and use cfg, ring, pipe or data "
            "between hosts",
            HostsWarning,
            stacklevel=3,
        )


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

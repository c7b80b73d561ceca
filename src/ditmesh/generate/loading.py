"""`load`: read a pipeline so that no rank ever holds all weights of the transformer.

The transformer is built without memory, and every rank reads its own slices, or its own stage's blocks, from the files.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.backends import device_of_rank
from ..comm.mesh import DEFAULT_DEADLINE_SECONDS, Mesh
from ..config import ParallelConfig
from ..engine import ConfigLike, agreed, denoisers, engine_of, parallelize
from ..errors import InputError
from ..layout import known_models
from ..memory.check import check_memory as check_fits
from ..memory.check import choose_for_ranks
from ..strategies.ahead import modules_ahead
from ..strategies.pipefusion.stages import is_away
from ..strategies.text_encoders import encoders_of
from .components import read_saved
from .model_info import ModelInfo, find_model
from .modular import download
from .one_copy import shareable_components, shared_components
from .shares import load_transformer
from .weight_files import saved_denoisers, weight_files

log = logging.getLogger(__name__)

Dtypes = torch.dtype | Mapping[str, torch.dtype] | None


def load(
    path_or_id: str | Path,
    config: ConfigLike = "auto",
    *,
    mesh: Mesh | None = None,
    dtype: Dtypes = None,
    torch_dtype: Dtypes = None,
    variant: str | None = None,
    timeout: float = DEFAULT_DEADLINE_SECONDS,
    check_memory: bool = True,
    memory_limit: float | None = None,
    **components: Any,
) -> Any:
    """Load a diffusers pipeline and `parallelize` it. Every rank calls this with the same arguments.

    With ``tensor=n`` a rank reads and keeps only its slices of the transformer's weights, with ``pipe=n`` only its
    stage's blocks, with ``shard=n`` only its part of every block, and with several of them the intersection. Other
    components are loaded as usual, and so is the transformer if all three are 1.

    Args:
        path_or_id: folder of a saved pipeline, or its name on a model hub.
        config: as for `parallelize`.
        mesh: as for `parallelize`.
        dtype: dtype of the weights, or one per component (``{"transformer": ..., "default": ...}``); default:
            bfloat16 on GPUs and float32 on CPUs, as of the command line.
        torch_dtype: the former name of ``dtype``.
        variant: read the files of a variant, such as ``"fp16"``.
        timeout: deadline of every collective, in seconds, if the mesh is created here.
        check_memory: raise an error for weights that do not fit, before any are read. Memory of calls is not checked.
        memory_limit: maximum bytes of a rank; default: the free memory of its device.
        components: passed to `DiffusionPipeline.from_pretrained`: components that replace saved ones
            (``text_encoder=None``), or its own options.

    Returns the pipeline, parallelised, on the mesh's device. `ditmesh.restore` makes its transformer whole and needs
    memory for all of it.

    Raises:
        ConfigError: the degrees do not fit the ranks or the model.
        InputError: there is no such pipeline, it has no transformer, its files lack weights of a component, or its
            weights are not in safetensors files, are quantised, do not fit the model, or need more memory than there
            is; or both ``dtype`` and ``torch_dtype`` are given.
    """
    if dtype is not None and torch_dtype is not None:
        raise InputError(
            f"dtype={dtype} and torch_dtype={torch_dtype} are two names of one option; leave torch_dtype out"
        )
    dtype = torch_dtype if dtype is None else dtype
    info = find_model(path_or_id)
    if not info.local:
        info = replace(info, files=download(info, variant), local=True)
    given = {name for name in components if name in info.index}
    if config == "auto" and mesh is None:
        config = _configuration_before(info, dtype, memory_limit, given, check_memory)
    config = ParallelConfig.read(mesh.config if mesh is not None and config == "auto" else config)
    with ExitStack() as undo:
        owned = mesh is None
        if mesh is None:
            mesh = Mesh(config, timeout=timeout)
            undo.callback(mesh.close)
        if dtype is None:
            dtype = usual_dtype(mesh.device)
        if check_memory:
            kind = dtype_of(dtype, "transformer")
            check_fits(info, config, kind or torch.float32, mesh.device, limit=memory_limit, without=given)
        alike = dist.is_available() and dist.is_initialized() and mesh.world.size == dist.get_world_size()
        pipe = read_pipeline(info, config, mesh, dtype, variant, together=alike, **components)
        if mesh.device.type != "cpu":
            with weights_stay(pipe, config, mesh.device):
                pipe.to(mesh.device)
        parallelize(pipe, config, mesh=mesh)
        if owned:
            engine_of(pipe).own_mesh()
        undo.pop_all()
    return pipe


@contextmanager
def weights_stay(pipe: Any, config: ParallelConfig | str, device: torch.device) -> Iterator[None]:
    """Inside, weights that are not to be whole on a GPU stay in host memory, whatever moves there.

    They are those of modules that ``precompute`` computes ahead, and of text encoders that ranks are to cut.
    """
    held: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = []
    if device.type != "cpu" and isinstance(config, ParallelConfig):
        models = denoisers(pipe) if config.precompute else []
        parts = [model.get_submodule(path) for model in models for path in modules_ahead(model)]
        if config.text_encoder == "tensor" and config.world_size > 1:
            parts += encoders_of(pipe).values()
        for module in (module for part in parts for module in part.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                # Weights of other types, such as quantised ones, have more than their data.
                plain = type(parameter.data) is torch.Tensor and not is_away(parameter)
                if plain and parameter.device.type == "cpu":
                    held.append((module, name, parameter, parameter.data))
    for *_, parameter, data in held:
        parameter.data = data.new_empty(0)
    try:
        yield
    finally:
        for module, name, parameter, data in held:
            parameter.data = data
            module._parameters[name] = parameter


def usual_dtype(device: torch.device) -> torch.dtype:
    """The default dtype of the weights: bfloat16 on a GPU, float32 on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _configuration_before(
    info: ModelInfo, dtype: Dtypes, limit: float | None, without: Collection[str], memory: bool
) -> ParallelConfig:
    """The configuration of ``"auto"``, chosen before anything is loaded."""
    device = device_of_rank()
    kind = dtype_of(usual_dtype(device) if dtype is None else dtype, "transformer") or torch.float32
    choice = choose_for_ranks(info, kind, device, limit=limit if memory else float("inf"), without=without)
    if choice is None:
        # A class without a reviewed layout: the ring takes any number of heads.
        return agreed(lambda size: ParallelConfig.auto(size, info.heads or 1))
    if choice.config.world_size > 1 and not (dist.is_initialized() and dist.get_rank()):
        log.info("%s: %s", info.name, choice.describe())
    return choice.config


def read_pipeline(
    info: ModelInfo,
    config: ParallelConfig | None = None,
    mesh: Mesh | None = None,
    torch_dtype: Dtypes = None,
    variant: str | None = None,
    kind: type[Any] | None = None,
    together: bool = False,
    **components: Any,
) -> Any:
    """A saved pipeline on the CPU, with this rank's share of the transformers, to be parallelised.

    Args:
        config, mesh: they say which share. Default: the mesh's, and all of it.
        kind: class of the pipeline; default: the saved one.
        together: all ranks of the job call this alike, and those of a host share converted weights (`one_copy`).
    """
    import diffusers

    config = config or (ParallelConfig() if mesh is None else mesh.config)
    for name, model in saved_denoisers(info).items() if mesh is not None and config.cuts_weights else ():
        assert mesh is not None
        dtype = dtype_of(torch_dtype, name)
        if name not in components and (mesh.tensor.size > 1 or model.__name__ in known_models()):
            components[name] = load_transformer(model, info.files / name, config, mesh, dtype, variant)

    def read_with(**more: Any) -> Any:
        return read_saved(info, kind, variant=variant, **components, **more, **dtype_option(torch_dtype))

    if not (together and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return read_with()

    # Options of from_pretrained may change the loaded weights.
    plain = set(components) <= set(info.index)
    # Ranks that wait for the first one do their imports meanwhile.
    with suppress(Exception):
        getattr(diffusers, info.pipeline_class)
    hosts = mesh.hosts if mesh is not None and mesh.world_size == dist.get_world_size() else None
    pipe, shared = shared_components(shareable_components(info, components) if plain else [], read_with, hosts)
    return read_with(**shared) if pipe is None else pipe


def dtype_of(dtypes: Dtypes, name: str) -> torch.dtype | None:
    """The dtype of a component's weights; None: that of its files."""
    return dtypes.get(name, dtypes.get("default")) if isinstance(dtypes, Mapping) else dtypes


def dtype_option(torch_dtype: Dtypes) -> dict[str, Any]:
    """The argument of diffusers' ``from_pretrained`` for the weights' dtype."""
    if torch_dtype is None:
        return {}
    return {"dtype": torch_dtype if isinstance(torch_dtype, torch.dtype) else dict(torch_dtype)}


def partial_read_refusal(info: ModelInfo, variant: str | None = None) -> str | None:
    """The reason why a rank cannot read only its share of a saved pipeline's transformers; None: it can."""
    try:
        for name in saved_denoisers(info):
            weight_files(info.files / name, variant)
    except InputError as error:
        return str(error).partition(";")[0]
    return None

"""`load`: a pipeline whose weights are spread over the ranks before anybody has held them all.

`DiffusionPipeline.from_pretrained` followed by `parallelize` needs room for the whole transformer on every rank.
Here the transformer is built without memory and every rank reads its own slices, or its own stage's blocks, from the
safetensors files.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm import Link
from ..comm.mesh import DEFAULT_DEADLINE, Mesh
from ..config import ParallelConfig
from ..core.partition import Partition
from ..engine import DENOISERS, ConfigLike, engine_of, parallelize
from ..errors import InputError
from ..layout import layout_of
from ..layout.table import known_models
from ..strategies.pipefusion.stages import ABSENT, elsewhere, first_cut
from ..strategies.tensor.slices import plan
from .model_info import ModelInfo, find_model

log = logging.getLogger(__name__)

Dtypes = torch.dtype | Mapping[str, torch.dtype] | None
WEIGHTS = "diffusion_pytorch_model"


def load(
    path_or_id: str | Path,
    config: ConfigLike = "auto",
    *,
    mesh: Mesh | None = None,
    dtype: Dtypes = None,
    torch_dtype: Dtypes = None,
    variant: str | None = None,
    timeout: float = DEFAULT_DEADLINE,
    **components: Any,
) -> Any:
    """Load a diffusers pipeline and `parallelize` it. Every rank calls this with the same arguments.

    With ``tensor=n`` a rank reads and keeps only its slices of the transformer's weights, with ``pipe=n`` only its
    stage's blocks; other components are loaded as usual, and so is the transformer when both are 1. With both, every
    rank reads its slices of all blocks and then gives those of other stages up.

    Args:
        path_or_id: folder of a saved pipeline, or its name on a model hub.
        config: as for `parallelize`.
        mesh: as for `parallelize`.
        dtype: dtype of the weights, or one per component (``{"transformer": ..., "default": ...}``); default: float32.
        torch_dtype: the former name of ``dtype``.
        variant: read the files of a variant, such as ``"fp16"``.
        timeout: deadline of every collective, in seconds, when the mesh is made here.
        components: passed to `DiffusionPipeline.from_pretrained`: components that replace saved ones
            (``text_encoder=None``), or its own options.

    Returns:
        The pipeline, parallelised, on the mesh's device. `ditmesh.restore` makes its transformer whole, which
        needs room for all of it.

    Raises:
        ConfigError: the degrees do not fit the ranks or the model.
        InputError: there is no such pipeline, it has no transformer, or its weights are not in safetensors files,
            are quantised, or do not fit the model; or both ``dtype`` and ``torch_dtype`` are given.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    if dtype is not None and torch_dtype is not None:
        raise InputError(
            f"dtype={dtype} and torch_dtype={torch_dtype} are two names of one option; leave torch_dtype out"
        )
    dtype = torch_dtype if dtype is None else dtype
    info = find_model(path_or_id)
    folder = info.files if info.local else Path(DiffusionPipeline.download(info.name, variant=variant))
    saved = {name: kind for name, kind in _denoisers_in(info).items() if name not in components}
    if config == "auto" and mesh is None:
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        config = ParallelConfig.auto(world_size, info.heads or 1)
    config = ParallelConfig.read(mesh.config if mesh is not None and config == "auto" else config)
    with ExitStack() as undo:
        owned = mesh is None
        if mesh is None:
            mesh = Mesh(config, timeout=timeout)
            undo.callback(mesh.close)
        for name, kind in saved.items():
            own = dtype.get(name, dtype.get("default")) if isinstance(dtype, Mapping) else dtype
            if mesh.tensor.size > 1:
                components[name] = load_transformer(kind, folder / name, mesh.tensor, own, variant, mesh.device)
            elif mesh.pipe.size > 1 and kind.__name__ in known_models():
                components[name] = load_stage(kind, folder / name, config, mesh.pipe, own, variant, mesh.device)
        if dtype is not None:
            # By the name that every release of diffusers knows.
            components["torch_dtype"] = dict(dtype) if isinstance(dtype, Mapping) else dtype
        pipe = DiffusionPipeline.from_pretrained(folder, variant=variant, **components)
        if mesh.device.type != "cpu":
            pipe.to(mesh.device)
        parallelize(pipe, config, mesh=mesh)
        if owned:
            engine_of(pipe).own_mesh()
        undo.pop_all()
    return pipe


def load_transformer(
    kind: type[Any],
    folder: str | Path,
    link: Link,
    torch_dtype: torch.dtype | None = None,
    variant: str | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """One rank's slices of a saved transformer, for `parallelize` with ``tensor=link.size``.

    Args:
        kind: the transformer's class.
        folder: where ``config.json`` and the safetensors files are.
        link: the ranks that share the weights.
        torch_dtype: dtype of floating-point weights; default: float32. Modules that the class keeps in float32
            stay so, as with diffusers' `from_pretrained`.
        variant: as for `load`.
        device: where the slices are to be.

    Raises:
        InputError: no safetensors files, a quantised checkpoint, or weights that do not fit the class.
    """
    model = _build(kind, Path(folder), torch_dtype)
    cuts = {name: (dim, cut) for name, dim, cut in plan(model, link.size).parameters()}

    def read(name: str, stored: Any, dtype: torch.dtype) -> Tensor:
        return _read(stored, *cuts.get(name, (0, _ALL)), link.rank, dtype, torch.device(device))

    return _filled(model, Path(folder), torch_dtype, variant, device, read)


def load_stage(
    kind: type[Any],
    folder: str | Path,
    config: ParallelConfig,
    link: Link,
    torch_dtype: torch.dtype | None = None,
    variant: str | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A saved transformer with one stage's blocks, for `parallelize` with the same ``config``.

    The weights of other stages' blocks are empty tensors until `restore` fetches them from there. Arguments and
    errors as for `load_transformer`; the class has a reviewed layout.

    Args:
        config: how many stages, and how they are cut.
        link: the stages.

    Raises:
        ConfigError: fewer blocks than stages, or ``stages`` that are not the model's blocks.
    """
    model = _build(kind, Path(folder), torch_dtype)
    layout = layout_of(model)
    assert layout is not None
    absent = elsewhere(model, layout, first_cut(model, layout, config), link.rank)

    def read(name: str, stored: Any, dtype: torch.dtype) -> Tensor:
        if name in absent:
            return torch.empty(0, dtype=dtype, device=device)
        return _read(stored, 0, _ALL, 0, dtype, torch.device(device))

    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model = _filled(model, Path(folder), torch_dtype, variant, device, read)
    for name, parameter in model.named_parameters():
        if name in absent:
            setattr(parameter, ABSENT, shapes[name])
    return model


def _filled(
    model: Any,
    folder: Path,
    torch_dtype: torch.dtype | None,
    variant: str | None,
    device: torch.device | str,
    read: Callable[[str, Any, torch.dtype], Tensor],
) -> nn.Module:
    """The model with its weights from the files in ``folder``, each as ``read`` makes it of the stored one."""
    from safetensors import SafetensorError, safe_open

    kind = type(model)
    exact = tuple(getattr(kind, "_keep_in_fp32_modules", None) or ())
    saved = model.state_dict()
    wanted = dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name in saved}
    unexpected: list[str] = []
    missing = set(wanted)
    for file in weight_files(folder, variant):
        try:
            opened = safe_open(file, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {str(file)!r}: {error}; download or save the model again") from None
        with opened as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name not in wanted:
                    unexpected.append(name)
                    continue
                missing.discard(name)
                stored = tensors.get_slice(name)
                if tuple(stored.get_shape()) != tuple(wanted[name].shape):
                    raise InputError(
                        f"{name} in {str(file)!r} has shape {tuple(stored.get_shape())}, but {kind.__name__} expects "
                        f"{tuple(wanted[name].shape)}; the configuration beside it is of another model"
                    )
                dtype = wanted[name].dtype
                if torch_dtype is not None and dtype.is_floating_point:
                    dtype = torch.float32 if any(part in name.split(".") for part in exact) else torch_dtype
                owner, _, leaf = name.rpartition(".")
                module, value, before = model.get_submodule(owner), read(name, stored, dtype), wanted[name]
                if isinstance(before, nn.Parameter):
                    module._parameters[leaf] = nn.Parameter(value, requires_grad=before.requires_grad)
                else:
                    module._buffers[leaf] = value
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise InputError(
            f"{len(missing)} weights of {kind.__name__} are not in {str(folder)!r} ({some} ...); if diffusers can load "
            "this checkpoint, use DiffusionPipeline.from_pretrained(...) and ditmesh.parallelize(...)"
        )
    ignored = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if unexpected:
        log.warning("%s has weights that %s does not: %s", folder, kind.__name__, ", ".join(unexpected))
    model.register_to_config(_name_or_path=str(folder))
    for buffer in model.buffers():
        # As diffusers' from_pretrained leaves them: of the dtype asked for, unless the class is particular.
        if torch_dtype is not None and not exact and buffer.is_floating_point():
            buffer.data = buffer.data.to(torch_dtype)
        buffer.data = buffer.data.to(device)
    return model.eval()


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of a saved model, one or several.

    Raises:
        InputError: there are none.
    """
    middle = f".{variant}" if variant else ""
    for name in (f"{WEIGHTS}.safetensors.index{middle}.json", f"{WEIGHTS}{middle}.safetensors.index.json"):
        if (index := folder / name).is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / file for file in sorted(set(files))]
    single = folder / f"{WEIGHTS}{middle}.safetensors"
    if single.is_file():
        return [single]
    raise InputError(
        f"there is no {single.name} in {str(folder)!r}; slices can be read from safetensors files only. Save the model "
        "with save_pretrained(), or load it with DiffusionPipeline.from_pretrained(...) and ditmesh.parallelize(...)"
    )


# A tensor that is read whole.
_ALL = Partition(())


def _read(
    stored: Any, dim: int | None, cut: Partition | None, rank: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """This rank's slice of a stored tensor, in memory of its own: the file is mapped, not read."""
    shape = list(stored.get_shape())
    if dim is None or cut is None:
        value = torch.zeros(shape, dtype=dtype, device=device)
        if rank == 0:
            value.copy_(stored[:])
        return value
    if cut is _ALL:
        if not shape:
            return stored[...].to(dtype=dtype, device=device, copy=True)
        return torch.empty(shape, dtype=dtype, device=device).copy_(stored[:])
    shape[dim] = cut.lengths[rank]
    value = torch.empty(shape, dtype=dtype, device=device)
    start = 0
    for first, last in cut.runs(rank):
        part = stored[first:last] if dim == 0 else stored[:, first:last]
        value.narrow(dim, start, last - first).copy_(part)
        start += last - first
    return value


def _build(kind: type[Any], folder: Path, dtype: torch.dtype | None) -> Any:
    """The model without memory for its weights; small tables that are computed, not saved, are there."""
    from accelerate import init_empty_weights

    settings = dict(kind.load_config(folder))
    if settings.get("quantization_config") is not None:
        raise InputError(
            f"{str(folder)!r} is quantised; tensor parallelism cuts plain weights. Load it with "
            "DiffusionPipeline.from_pretrained(...) and use ulysses or ring"
        )
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with init_empty_weights():
            return kind.from_config(settings)
    finally:
        torch.set_default_dtype(before)


def _denoisers_in(info: ModelInfo) -> dict[str, type[Any]]:
    """Names and classes of the transformers of a saved pipeline."""
    import diffusers

    found: dict[str, type[Any]] = {}
    for name in DENOISERS:
        library, kind = (info.index.get(name) or (None, None))[:2]
        if kind is None:
            continue
        if library != "diffusers" or not hasattr(diffusers, kind):
            raise InputError(
                f"the {name} of {info.name!r} is {library}.{kind}, which diffusers {diffusers.__version__} does not "
                "have; load the pipeline yourself and call ditmesh.parallelize(...)"
            )
        found[name] = getattr(diffusers, kind)
    return found

"""`load`: read a pipeline so that no rank ever holds all weights of the transformer.

`DiffusionPipeline.from_pretrained` followed by `parallelize` needs room for the whole transformer on every rank.
Here the transformer is built without memory and every rank reads its own slices, or its own stage's blocks, from the
safetensors files.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.backends import device_of_rank
from ..comm.mesh import DEFAULT_DEADLINE, Mesh
from ..config import ParallelConfig
from ..core.digests import digest, digest_of_parts, tensor_digest, weights_of
from ..core.partition import Partition
from ..engine import DENOISERS, ENGINE, ConfigLike, agreed, denoisers, engine_of, parallelize
from ..errors import InputError
from ..layout import layout_of
from ..layout.table import known_models
from ..memory.check import check_memory as check_fits
from ..memory.check import choose_for_ranks
from ..strategies.pipefusion.stages import ABSENT_ATTRIBUTE, IN_PIECES, elsewhere, first_cut, is_away, shape_of
from ..strategies.sharded import (
    UNITS,
    GatherGroup,
    Packed,
    ShardedWeights,
    Unit,
    balanced_order,
    gather_unit,
    groups_of,
)
from ..strategies.tensor.parallel import already_cut
from ..strategies.tensor.slices import base_layer_of, plan_slices
from .components import read_saved, refuse_missing
from .model_info import ModelInfo, find_model
from .one_copy import shareable_components, shared_components

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

    Returns:
        The pipeline, parallelised, on the mesh's device. `ditmesh.restore` makes its transformer whole and
        needs memory for all of it.

    Raises:
        ConfigError: the degrees do not fit the ranks or the model.
        InputError: there is no such pipeline, it has no transformer, its files lack weights of a component, or its
            weights are not in safetensors files, are quantised, do not fit the model, or need more memory than there
            is; or both ``dtype`` and ``torch_dtype`` are given.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    if dtype is not None and torch_dtype is not None:
        raise InputError(
            f"dtype={dtype} and torch_dtype={torch_dtype} are two names of one option; leave torch_dtype out"
        )
    dtype = torch_dtype if dtype is None else dtype
    info = find_model(path_or_id)
    if not info.local:
        info = replace(info, files=Path(DiffusionPipeline.download(info.name, variant=variant)), local=True)
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
            pipe.to(mesh.device)
        parallelize(pipe, config, mesh=mesh)
        if owned:
            engine_of(pipe).own_mesh()
        undo.pop_all()
    return pipe


def usual_dtype(device: torch.device) -> torch.dtype:
    """The default dtype of the weights: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _configuration_before(
    info: ModelInfo, dtype: Dtypes, limit: float | None, without: Collection[str], memory: bool
) -> ParallelConfig:
    """The configuration of ``"auto"``, chosen before anything is loaded."""
    device = device_of_rank()
    kind = dtype_of(usual_dtype(device) if dtype is None else dtype, "transformer") or torch.float32
    choice = choose_for_ranks(info, kind, device, limit=limit, without=without, memory=memory)
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
        info: the pipeline's files, which are on this machine.
        config, mesh: as for `parallelize`; they say which share. Default: the mesh's, and all of it.
        torch_dtype, variant, components: as for `load`.
        kind: class of the pipeline; default: the saved one.
        together: all ranks of the job call this alike, and those of a host share converted weights (`one_copy`).

    Raises:
        ConfigError, InputError: as `load`.
    """
    import diffusers

    config = config or (ParallelConfig() if mesh is None else mesh.config)
    for name, model in _denoisers_in(info).items() if mesh is not None and config.cuts_weights else ():
        assert mesh is not None
        dtype = dtype_of(torch_dtype, name)
        if name not in components and (mesh.tensor.size > 1 or model.__name__ in known_models()):
            components[name] = load_transformer(model, info.files / name, config, mesh, dtype, variant)

    def whole(**more: Any) -> Any:
        return read_saved(info, kind, variant=variant, **components, **more, **dtype_option(torch_dtype))

    if not (together and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return whole()

    # Options of from_pretrained may change the loaded weights.
    plain = set(components) <= set(info.index)
    # Ranks that wait for the first one do their imports meanwhile.
    with suppress(Exception):
        getattr(diffusers, info.pipeline_class)
    hosts = mesh.hosts if mesh is not None and mesh.world_size == dist.get_world_size() else None
    pipe, shared = shared_components(shareable_components(info, components) if plain else [], whole, hosts)
    return whole(**shared) if pipe is None else pipe


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
        for name in _denoisers_in(info):
            weight_files(info.files / name, variant)
    except InputError as error:
        return str(error).partition(";")[0]
    return None


def load_transformer(
    kind: type[Any],
    folder: str | Path,
    config: ParallelConfig,
    mesh: Mesh,
    torch_dtype: torch.dtype | None = None,
    variant: str | None = None,
) -> nn.Module:
    """A saved transformer with this rank's share of the weights, for `parallelize` with the same configuration.

    With ``tensor`` a weight is this rank's slice. With ``pipe``, where the class has a reviewed layout, the weights of
    other stages' blocks are empty tensors until `restore` fetches them from there. With ``shard``, there as well, those
    in pieces are empty, and this rank's pieces beside the model. Nothing else is read from the files.

    Args:
        kind: the transformer's class.
        folder: where ``config.json`` and the safetensors files are.
        config: degrees, and how stages are cut.
        mesh: the ranks; the weights are put on its device.
        torch_dtype: dtype of floating-point weights; default: float32. Modules that the class keeps in float32
            stay so, as with diffusers' `from_pretrained`.
        variant: as for `load`.

    Raises:
        ConfigError: fewer blocks than stages, ``stages`` that are not the model's blocks, or fewer heads than ranks.
        InputError: no safetensors files, a quantised checkpoint, or weights that do not fit the class.
    """
    model = build_empty(kind, Path(folder), torch_dtype)
    rank, device = mesh.tensor.rank, mesh.device
    sliced = plan_slices(model, mesh.tensor.size).parameters() if mesh.tensor.size > 1 else ()
    cuts = {name: (dim, cut) for name, dim, cut in sliced}
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    for name, (dim, cut) in cuts.items():
        if name in shapes and dim is not None and cut is not None:
            shapes[name][dim] = cut.lengths[rank]
    absent = _elsewhere(model, config, mesh, shapes) if mesh.pipe.size > 1 else set()

    pieces = _Pieces(model, mesh, absent, shapes, torch_dtype)

    def read(name: str, stored: Any, dtype: torch.dtype) -> Tensor:
        if name in absent:
            return torch.empty(0, dtype=dtype, device=device)
        if name in pieces:

            def rows(first: int, last: int, out: Tensor | None = None) -> Tensor:
                return _read(stored, *cuts.get(name, (0, _ALL)), rank, dtype, device, (first, last), out)

            return pieces.read(name, rows)
        return _read(stored, *cuts.get(name, (0, _ALL)), rank, dtype, device)

    model = fill_weights(model, Path(folder), torch_dtype, variant, device, read)
    for name, parameter in model.named_parameters():
        if name in absent:
            setattr(parameter, ABSENT_ATTRIBUTE, torch.Size(shapes[name]))
    pieces.bind(model)
    return model


class _Pieces:
    """This rank's shards of a sharded transformer; none without a reviewed layout.

    Args:
        model: without memory for its weights.
        absent: names of parameters that other stages have.
        shapes: of the others on this rank, by name.
        torch_dtype: as for `load_transformer`.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        absent: set[str],
        shapes: Mapping[str, list[int]],
        torch_dtype: torch.dtype | None,
    ) -> None:
        self._rank = mesh.shard.rank
        self._made: list[tuple[GatherGroup, Packed, Tensor]] = []
        # By the name of a parameter: its group, and its number there.
        self._places: dict[str, tuple[int, int]] = {}
        self._by_numbers: dict[int, dict[int, tuple[slice, slice]]] = {}
        layout = layout_of(model)
        if mesh.shard.size == 1 or layout is None:
            return
        dtypes = {name: _dtype_of(model, name, p.dtype, torch_dtype) for name, p in model.named_parameters()}
        for group in groups_of(model, layout):
            there = [name for name in group.parameters if name not in absent]
            sizes = [prod(shapes[name]) * dtypes[name].itemsize for name in there]
            names = tuple(there[number] for number in balanced_order(sizes, mesh.shard.size))
            if names:
                specs = tuple((tuple(shapes[name]), dtypes[name]) for name in names)
                packed, number = Packed(specs, mesh.shard.size), len(self._made)
                piece = torch.empty(packed.sizes[self._rank], dtype=torch.uint8, device=mesh.device)
                self._made.append((replace(group, parameters=names), packed, piece))
                self._places |= {name: (number, place) for place, name in enumerate(names)}
                self._by_numbers[number] = {
                    place: (source, target) for place, source, target in packed.runs(self._rank)
                }

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str, rows: Callable[..., Tensor]) -> Tensor:
        """Read this rank's part of a parameter; returns an empty tensor in its place.

        Args:
            rows: reads some of its rows, from and to, into a tensor if one is given.
        """
        number, place = self._places[name]
        _, packed, piece = self._made[number]
        shape, dtype = packed.specs[place]
        if place in self._by_numbers[number]:
            source, target = self._by_numbers[number][place]
            flat, width = piece[target].view(dtype), prod(shape[1:])
            low, high = source.start // dtype.itemsize, source.stop // dtype.itemsize
            first, last = -(-low // width), high // width
            if shape and first < last:
                # Read into the final memory: temporary memory would leave holes.
                rows(first, last, flat[first * width - low : last * width - low].view(last - first, *shape[1:]))
            # Rows of which other ranks hold a part.
            edges = {(low, min(first * width, high)), (max(last * width, low), high)} if shape else {(0, 1)}
            for begin, end in edges:
                if begin < end and (begin % width or end % width or not shape):
                    row = begin // width
                    values = rows(row, row + 1).reshape(-1)
                    flat[begin - low : end - low].copy_(values[begin - row * width : end - row * width])
        return torch.empty(0, dtype=dtype, device=piece.device)

    def bind(self, model: nn.Module) -> None:
        """Attach the shards to the model for `parallelize`."""
        units = []
        for group, packed, piece in self._made:
            parts = [model.get_parameter(name) for name in group.parameters]
            for part, (shape, _) in zip(parts, packed.specs, strict=True):
                setattr(part, IN_PIECES, torch.Size(shape))
            modules = [model.get_submodule(path) for path in group.modules]
            units.append(Unit(group.name, modules, [*parts], [*parts], packed, piece))
        if units:
            vars(model)[UNITS] = units


def _elsewhere(model: nn.Module, config: ParallelConfig, mesh: Mesh, shapes: Mapping[str, list[int]]) -> set[str]:
    """Names of the parameters that are not on this rank's stage; none without a reviewed layout.

    Args:
        model: without memory for its weights.
        shapes: of this rank's slices, by which blocks go to stages.
    """
    layout = layout_of(model)
    if layout is None:
        return set()
    for name, parameter in model.named_parameters():
        setattr(parameter, ABSENT_ATTRIBUTE, torch.Size(shapes[name]))
    try:
        return elsewhere(model, layout, first_cut(model, layout, config), mesh.pipe.rank)
    finally:
        for parameter in model.parameters():
            delattr(parameter, ABSENT_ATTRIBUTE)


# --- split weights ----------------------------------------------------------------------------------------------


def _slices(pipe: Any, mesh: Mesh) -> dict[int, tuple[int | None, Partition | None]]:
    """The dimension and its cut, as `Plan.parameters` has them, of parameters (by id) that are this rank's slices."""
    found: dict[int, tuple[int | None, Partition | None]] = {}
    for model in denoisers(pipe) if mesh.tensor.size > 1 else ():
        cut = already_cut(model, mesh.tensor.size)
        for site in plan_slices(model, mesh.tensor.size).sites:
            for name, parameter in base_layer_of(model.get_submodule(site.path)).named_parameters(recurse=False):
                if f"{site.path}.{name}" in cut:
                    dim = site.dim_of(name)
                    found[id(parameter)] = dim, None if dim is None else site.cut
    return found


def _whole_shape(parameter: Tensor, dim: int | None, cut: Partition | None) -> tuple[int, ...]:
    shape = list(shape_of(parameter))
    if dim is not None and cut is not None:
        shape[dim] = cut.total
    return tuple(shape)


@contextmanager
def whole_shapes(pipe: Any, mesh: Mesh) -> Iterator[None]:
    """Let the weights of a pipeline that `read_pipeline` has read look whole: adapters are made by their shapes.

    There is nothing in them meanwhile.
    """
    slices = _slices(pipe, mesh)
    held: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for model in denoisers(pipe):
            for parameter in model.parameters():
                if id(parameter) in slices or is_away(parameter):
                    held.append((parameter, parameter.data))
                    shape = _whole_shape(parameter, *slices.get(id(parameter), (None, None)))
                    parameter.data = parameter.data.new_zeros(1).expand(shape)
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


def fingerprint(pipe: Any, mesh: Mesh) -> str:
    """`weights_fingerprint` of a pipeline that `read_pipeline` has read: the one of the whole pipeline. Collective."""
    slices, link = _slices(pipe, mesh), mesh.tensor
    mine: dict[str, str] = {}
    for name, tensor in _held(pipe, mesh):
        if id(tensor) not in slices:
            value = tensor_digest(tensor)
        else:
            dim, cut = slices[id(tensor)]
            # Weights that are not cut are the first rank's, and zero on the others.
            whole = [(0, tensor.shape[0])] if link.rank == 0 else []
            runs = whole if cut is None else cut.runs(link.rank)
            value = digest_of_parts(tensor, _whole_shape(tensor, dim, cut), dim or 0, runs, link.all_reduce)
        mine[name] = value.hex()[:16]
    every: list[dict[str, str]] = mesh.pipe.all_gather_object(mine) if mesh.pipe.size > 1 else [mine]
    return digest({name: value for one in reversed(every) for name, value in one.items()})


def _held(pipe: Any, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Name and values of the weights that this rank's stage holds; pieces are whole while one looks at them."""
    named = [(name, tensor) for name, tensor, _ in weights_of(pipe) if not hasattr(tensor, ABSENT_ATTRIBUTE)]
    names = {id(tensor): name for name, tensor in named}
    yield from ((name, tensor) for name, tensor in named if not is_away(tensor))
    for model in denoisers(pipe):
        for unit in _units(model):
            with torch.no_grad():
                unit.fill(gather_unit(unit, mesh.shard))
                yield from ((names[id(parameter)], parameter) for parameter in unit.parameters)
                unit.empty()


def _units(model: nn.Module) -> list[Unit]:
    engine = vars(model).get(ENGINE)
    found = [each.find(ShardedWeights) for each in getattr(engine, "models", ()) if each.model is model]
    return found[0].units if found and found[0] is not None else vars(model).get(UNITS, [])


def fill_weights(
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
                dtype = _dtype_of(model, name, wanted[name].dtype, torch_dtype)
                owner, _, leaf = name.rpartition(".")
                module, value, before = model.get_submodule(owner), read(name, stored, dtype), wanted[name]
                if isinstance(before, nn.Parameter):
                    module._parameters[leaf] = nn.Parameter(value, requires_grad=before.requires_grad)
                else:
                    module._buffers[leaf] = value
    refuse_missing(model, missing, folder)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise InputError(
            f"{len(missing)} tables of {kind.__name__} are not in {str(folder)!r} ({some} ...); load the pipeline with "
            "DiffusionPipeline.from_pretrained(...), which computes them, and use ditmesh.parallelize(...)"
        )
    ignored = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if unexpected:
        log.warning("%s has weights that %s does not: %s", folder, kind.__name__, ", ".join(unexpected))
    model.register_to_config(_name_or_path=str(folder))
    # Buffers keep the dtype that `build_empty` made them with, as diffusers' from_pretrained leaves them.
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model.eval()


def _dtype_of(model: nn.Module, name: str, made: torch.dtype, torch_dtype: torch.dtype | None) -> torch.dtype:
    """The final dtype of a weight that was created with another dtype."""
    if torch_dtype is None or not made.is_floating_point:
        return made
    exact = getattr(type(model), "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(part in name.split(".") for part in exact) else torch_dtype


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


# A whole tensor.
_ALL = Partition(())


def _read(
    stored: Any,
    dim: int | None,
    cut: Partition | None,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: tuple[int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """This rank's slice of a stored tensor, in memory of its own: the file is mapped, not read.

    ``rows``: only these of the slice, from and to; ``out``: of their shape and dtype, takes them.
    """
    shape = list(stored.get_shape())
    if not shape:
        return stored[...].to(dtype=dtype, device=device, copy=True)
    if dim is None or cut is None or cut is _ALL:
        along, runs = 0, [(0, shape[0])]
    else:
        along, runs = dim, [*cut.runs(rank)]
    shape[along] = sum(last - first for first, last in runs)
    low, high = rows or (0, shape[0])
    shape[0] = high - low
    value = torch.empty(shape, dtype=dtype, device=device) if out is None else out
    if cut is None and rank > 0:
        return value.zero_()
    start = 0
    for first, last in runs:
        if along == 1:
            value.narrow(1, start, last - first).copy_(stored[low:high, first:last])
        elif (begin := max(low, start)) < (end := min(high, start + last - first)):
            value[begin - low : end - low].copy_(stored[first + begin - start : first + end - start])
        start += last - first
    return value


def build_empty(kind: type[Any], folder: Path, dtype: torch.dtype | None) -> Any:
    """The model without memory for its weights; small tables that are computed, not saved, are there.

    Args:
        folder: with its configuration.
        dtype: of weights without one of their own.
    """
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

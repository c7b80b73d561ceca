"""A rank's share of a transformer: read from the files without the rest, and looked at as parts of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.digests import digest, digest_of_parts, tensor_digest, weights_of
from ..core.partition import Partition
from ..engine import ENGINE, denoisers
from ..layout import layout_of
from ..strategies.ahead import modules_ahead
from ..strategies.pipefusion.stages import ABSENT_ATTRIBUTE, IN_PIECES, elsewhere, first_cut, is_away
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
from ..strategies.tensor.parallel import already_cut, whole_shape
from ..strategies.tensor.slices import base_layer_of, plan_slices
from .weight_files import WHOLE, build_empty, fill_weights, final_dtype, read_slice


def load_transformer(
    kind: type[Any],
    folder: str | Path,
    config: ParallelConfig,
    mesh: Mesh,
    torch_dtype: torch.dtype | None = None,
    variant: str | None = None,
) -> nn.Module:
    """A saved transformer with this rank's share of the weights on the mesh's device, to be parallelised alike.

    With ``tensor`` a weight is this rank's slice. With ``pipe``, where the class has a reviewed layout, the weights of
    other stages' blocks are empty tensors until `restore` fetches them. With ``shard``, there as well, those in pieces
    are empty, and this rank's pieces beside the model. Nothing else is read from the files.

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
    # Weights that no step needs.
    on_host = tuple(f"{path}." for path in modules_ahead(model)) if config.precompute else ()

    def read(name: str, stored: Any, dtype: torch.dtype) -> Tensor:
        if name in absent:
            return torch.empty(0, dtype=dtype, device=device)
        if name in pieces:

            def rows(first: int, last: int) -> Tensor:
                return read_slice(stored, *cuts.get(name, (0, WHOLE)), rank, dtype, device, (first, last))

            return pieces.read(name, rows)
        where = torch.device("cpu") if name.startswith(on_host) else device
        return read_slice(stored, *cuts.get(name, (0, WHOLE)), rank, dtype, where)

    model = fill_weights(model, Path(folder), torch_dtype, variant, device, read)
    for name, parameter in model.named_parameters():
        if name in absent:
            setattr(parameter, ABSENT_ATTRIBUTE, torch.Size(shapes[name]))
    pieces.bind(model)
    return model


class _Pieces:
    """This rank's shards of a sharded transformer; none without a reviewed layout. Shapes are those on this rank."""

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
        dtypes = {name: final_dtype(model, name, p.dtype, torch_dtype) for name, p in model.named_parameters()}
        for group in groups_of(model, layout, mesh.config.precompute):
            present = [name for name in group.parameters if name not in absent]
            sizes = [prod(shapes[name]) * dtypes[name].itemsize for name in present]
            names = tuple(present[number] for number in balanced_order(sizes, mesh.shard.size))
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
        """Read this rank's part of a parameter, of which ``rows`` reads some rows; returns an empty tensor for it."""
        number, place = self._places[name]
        _, packed, piece = self._made[number]
        shape, dtype = packed.specs[place]
        if place in self._by_numbers[number]:
            source, target = self._by_numbers[number][place]
            width = prod(shape[1:])
            low, high = source.start // dtype.itemsize, source.stop // dtype.itemsize
            # Of the first and the last row other ranks may hold a part.
            first, last = low // width, -(-high // width)
            values = rows(first, last).reshape(-1)[low - first * width : high - first * width]
            piece[target].view(dtype).copy_(values)
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
    """Names of the parameters that are not on this rank's stage, by the shapes of its slices; none without a layout."""
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


# --- the whole that shares are of ---------------------------------------------------------------------------------


def _slices(pipe: Any, mesh: Mesh) -> dict[int, tuple[int | None, Partition | None]]:
    """The dimension and its cut, as `Plan.parameters` has them, of parameters (by id) that are this rank's slices."""
    slices: dict[int, tuple[int | None, Partition | None]] = {}
    for model in denoisers(pipe) if mesh.tensor.size > 1 else ():
        cut = already_cut(model, mesh.tensor.size)
        for site in plan_slices(model, mesh.tensor.size).sites:
            for name, parameter in base_layer_of(model.get_submodule(site.path)).named_parameters(recurse=False):
                if f"{site.path}.{name}" in cut:
                    dim = site.dim_of(name)
                    slices[id(parameter)] = dim, None if dim is None else site.cut
    return slices


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
                    shape = whole_shape(parameter, *slices.get(id(parameter), (None, None)))
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
            shape = whole_shape(tensor, dim, cut)
            value = digest_of_parts(tensor.to(mesh.device), shape, dim or 0, runs, link.all_reduce)
        mine[name] = value.hex()[:16]
    stages: list[dict[str, str]] = mesh.pipe.all_gather_object(mine) if mesh.pipe.size > 1 else [mine]
    return digest({name: value for stage in reversed(stages) for name, value in stage.items()})


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

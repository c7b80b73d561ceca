"""The rules of torch operations on bands of rows, as data where possible.

`BAND_RULES` maps operations of aten to rules: pointwise ones; those along some dimensions, local if rows are not among
them; moves, with which the cut moves (views, joins, shuffles of pixels); windows, for which neighbours send rows
(convolution, pooling); statistics (group norm), whose sums are added up over all ranks in float64; products, row by row
or with sums that are added up; and attention, where a rank has its rows' queries and asks all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.intercept import sdpa
from .band import Band
from .banded import Banded, BandRule, Bands, HeldPart, Operation, Outcome
from .families import OpFamily, aten, packets
from .part import dims_of, whole_of

# Rows that a view may join into one.
_JOINED_ROWS = (1, 2, 4, 8, 16)
# Elements that statistics are computed of at a time, as their float64 copy is temporary.
_CHUNK = 1 << 20


def _cut_of(value: Tensor, band: Band, bands: Bands) -> Tensor:
    """A rank's part of a tensor of the whole shape: of a plain one, or of one that may be cut otherwise. Collective."""
    if isinstance(value, Banded):
        if value.band == band:
            return value.local
        if value.band.dim == band.dim and value.band.runs == band.runs == 1:
            pieces = [piece for part in bands.fetched(value.local, value.band, band.spans()) for piece in part]
            return torch.cat(pieces, band.dim) if pieces else value.local.narrow(band.dim, 0, 0)
        value = value.whole()
    return band.partition.take(value, band.dim, bands.rank)


def pointwise(op: Operation) -> Outcome:
    """Every rank computes its own rows; what has as many rows and is not cut, or otherwise, is cut alike."""
    if op.func._schema.is_mutable and op.target is None:
        return None
    first = op.parts[0] if op.target is None else op.target
    shape = op.likes.shape if op.target is None else first.shape
    # Operands are aligned at their last dimensions.
    from_end = first.dim() - first.band.dim
    if len(shape) < from_end or shape[-from_end] != first.band.total:
        return None
    local: dict[int, Any] = {}
    for leaf in op.leaves:
        if isinstance(leaf, Tensor) and leaf.dim() >= from_end and leaf.shape[-from_end] == first.band.total:
            local[id(leaf)] = _cut_of(leaf, first.band.at(leaf.dim() - from_end), op.bands)
        elif isinstance(leaf, Banded):
            # Cut along another dimension, or a single row that is meant for all.
            local[id(leaf)] = leaf.whole()
    return HeldPart(
        op.compute(*(local.get(id(leaf), leaf) for leaf in op.leaves)), first.band.at(len(shape) - from_end)
    )


def along(name: str) -> BandRule:
    """Rule of an operation along the dimensions in an argument (a number, several, or None: all of them)."""

    def rule(op: Operation) -> Outcome:
        x, dims = op.parts[0], dims_of(op[name], op.parts[0].dim())
        if len(op.parts) > 1 or op.args[0] is not x or x.band.dim in dims:
            return None
        several = isinstance(op.likes, (list, tuple))
        # A dimension that is lost moves those behind it.
        lost = (op.likes[0] if several else op.likes).dim() < x.dim()
        local, band = op.on_local(), x.band.at(x.band.dim - lost * sum(dim < x.band.dim for dim in dims))
        return [HeldPart(one, band) for one in local] if several else HeldPart(local, band)

    return rule


def viewed(op: Operation) -> Outcome:
    """The same elements in another shape; where rows are joined, all that become one go to one rank first."""
    x, after = op.parts[0], tuple(op.likes.shape)
    for multiple in _JOINED_ROWS:
        cut = x.band if multiple == 1 else x.band.rounded(multiple)
        band = cut and cut.viewed(x.shape, after)
        if cut and band:
            return HeldPart(_cut_of(x, cut, op.bands).reshape(band.shape(after, op.bands.rank)), band)
    return None


def permuted(op: Operation) -> Outcome:
    """Dimensions in another order; `transpose` and `t` swap two."""
    x, order = op.parts[0], op["dims"]
    if order is None:
        order = list(range(x.dim()))
        one, other = (0, -1) if op["dim0"] is None else (op["dim0"], op["dim1"])
        order[one], order[other] = order[other], order[one]
    return HeldPart(op.on_local(), x.band.at([dim % x.dim() for dim in order].index(x.band.dim)))


def unsqueezed(op: Operation) -> Outcome:
    """A dimension of one element is put in."""
    x = op.parts[0]
    at = op["dim"] % (x.dim() + 1)
    return HeldPart(op.on_local(dim=at), x.band.at(x.band.dim + (at <= x.band.dim)))


def squeezed(op: Operation) -> Outcome:
    """Dimensions of one element are left out; a rank with a single row keeps its."""
    x = op.parts[0]
    out = {dim for dim in dims_of(op["dim"], x.dim()) if x.shape[dim] == 1}
    if x.band.dim in out:
        return None
    local = x.local.squeeze(tuple(out)) if out else x.local.view(x.local.shape)
    return HeldPart(local, x.band.at(x.band.dim - sum(dim < x.band.dim for dim in out)))


def expanded(op: Operation) -> Outcome:
    """Elements stand for several."""
    x, after = op.parts[0], op.likes.shape
    band = x.band.at(x.band.dim + len(after) - x.dim())
    return HeldPart(op.on_local(size=band.shape(after, op.bands.rank)), band)


def repeated(op: Operation) -> Outcome:
    """Elements are repeated; repeated rows are another run."""
    x, times = op.parts[0], list(op["repeats"])
    dim = x.band.dim + len(times) - x.dim()
    return HeldPart(op.on_local(), Band(dim, x.band.rows, x.band.runs * times[dim]))


def sliced(op: Operation) -> Outcome:
    """A part of one dimension; of the rows, those that a rank has."""
    x = op.parts[0]
    dim = op["dim"] % x.dim()
    if dim != x.band.dim:
        return HeldPart(op.on_local(), x.band)
    start, stop, step = slice(op["start"], op["end"], op["step"]).indices(x.band.total)
    if step != 1 or x.band.runs > 1:
        return None
    first, last = x.band.spans()[op.bands.rank]
    low, high = max(start, first), min(stop, last)
    part = x.local.narrow(dim, low - first, high - low) if high > low else x.local.narrow(dim, 0, 0)
    return HeldPart(part, x.band.kept(start, stop))


def joined(op: Operation) -> Outcome:
    """Tensors one behind the other, or stacked, along a dimension that is not cut."""
    tensors, first = op["tensors"], op.parts[0]
    stack = op.func.overloadpacket is aten.stack
    dim = op["dim"] % (first.dim() + stack)
    band = first.band
    # Before dimensions are renumbered.
    alike = all(x.dim() == first.dim() and x.shape[band.dim] == band.total for x in tensors)
    if not alike or (not stack and dim == band.dim):
        return None
    parts = [_cut_of(x, band, op.bands) for x in tensors]
    return HeldPart(op.on_local(tensors=parts), band.at(band.dim + (stack and dim <= band.dim)))


def shuffled(op: Operation) -> Outcome:
    """Channels become pixels, each row several; or pixels channels, several rows one."""
    x, more, fewer = op.parts[0], op["upscale_factor"], op["downscale_factor"]
    if x.band.dim in (x.dim() - 3, x.dim() - 1):
        return None
    if x.band.dim < x.dim() - 2:
        return HeldPart(op.on_local(), x.band)
    if more:
        return HeldPart(op.on_local(), x.band.scaled(more))
    cut = x.band.rounded(fewer)
    return cut and HeldPart(op.on_local(self=_cut_of(x, cut, op.bands)), cut.scaled(1, fewer))


def enlarged(op: Operation) -> Outcome:
    """Nearest neighbours: every row becomes as many."""
    x, after = op.parts[0], op.likes.shape
    if x.band.dim < 2:
        return HeldPart(op.on_local(), x.band)
    factor, rest = divmod(after[x.band.dim], x.band.total)
    if rest or x.band.runs > 1 or not factor:
        return None
    band = x.band.scaled(factor)
    size = band.shape(after, op.bands.rank)
    if not prod(size):
        return HeldPart(x.local.new_empty(size), band)
    changed = {"output_size": list(size[2:])} if op["scale_factors"] is None else {}
    return HeldPart(op.on_local(**changed), band)


def padded(name: str) -> BandRule:
    """Rule of a padding with sizes in an argument: rows are put before the first and behind the last.

    Those that are copies of rows ("reflect") have to be on one rank with these.
    """

    def rule(op: Operation) -> Outcome:
        x, pad = op.parts[0], list(op[name])
        place = 2 * (x.dim() - 1 - x.band.dim)
        above, below = pad[place : place + 2] if place < len(pad) else (0, 0)
        if min(above, below, 0) < 0 or (x.band.runs > 1 and (above or below)):
            return None
        held = [rows for rows in x.band.rows if rows]
        if op.func.overloadpacket in _REFLECTIONS and (above >= held[0] or below >= held[-1]):
            return None
        band = x.band.extended(above, below)
        size = band.shape(op.likes.shape, op.bands.rank)
        if not prod(size):
            return HeldPart(x.local.new_empty(size), band)
        if place < len(pad):
            pad[place : place + 2] = x.band.margins(op.bands.rank, above, below)
        return HeldPart(op.on_local(**{name: pad}), band)

    return rule


def convolved(op: Operation) -> Outcome:
    """A convolution: rows that a window reaches for come from the ranks that have them."""
    x = op["input"]
    if not isinstance(x, Banded) or len(op.parts) > 1 or x.band.dim == 1:
        return None
    if x.band.dim == 0:
        return HeldPart(op.on_local(), x.band)
    axis = x.band.dim - 2
    kernel = op["weight"].shape[x.band.dim]
    stride, padding, dilation = (_of_axis(op[name], axis) for name in ("stride", "padding", "dilation"))
    if op["transposed"]:
        # Windows that do not overlap.
        if kernel != stride or padding or dilation != 1 or _of_axis(op["output_padding"], axis) or x.band.runs > 1:
            return None
        return HeldPart(op.on_local(), x.band.scaled(stride)) if prod(x.local.shape) else None
    return _over_windows(op, x, kernel, stride, padding, dilation)


def pooled(op: Operation) -> Outcome:
    """Pooling by windows that need no padding of rows."""
    x = op.parts[0]
    axis = x.band.dim - (x.dim() - _POOLS[op.func.overloadpacket])
    if axis < 0:
        return HeldPart(op.on_local(), x.band)
    if _of_axis(op["padding"], axis) or op["ceil_mode"]:
        return None
    kernel, stride = op["kernel_size"], op["stride"] or op["kernel_size"]
    return _over_windows(op, x, _of_axis(kernel, axis), _of_axis(stride, axis), 0, 1)


def _of_axis(values: int | Sequence[int], axis: int) -> int:
    return values if isinstance(values, int) else values[axis if len(values) > 1 else 0]


def _over_windows(op: Operation, x: Banded, kernel: int, stride: int, padding: int, dilation: int) -> Outcome:
    """Windows of rows, beyond the image's edges with zeros."""
    if x.band.runs > 1:
        return None
    bands, dim, total = op.bands, x.band.dim, op.likes.shape[x.band.dim]
    reach = dilation * (kernel - 1)
    band = x.band.windowed(total, kernel, stride, padding, dilation)
    # Rows that every rank's windows see, with those beyond the edges, and without.
    seen = [
        (start * stride - padding, ((stop - 1) * stride - padding + reach + 1) if stop > start else -padding)
        for start, stop in band.spans()
    ]
    wanted = [(max(0, start), min(stop, x.band.total)) for start, stop in seen]
    above, middle, below = bands.fetched(x.local, x.band, wanted)
    size = band.shape(op.likes.shape, bands.rank)
    if not prod(size):
        return HeldPart(x.local.new_empty(size), band)
    if stride == 1 and 2 * padding == reach and (above or below) and x.local.shape[dim] >= reach:
        borders = [sum(piece.shape[dim] for piece in pieces) for pieces in (above, below)]
        if middle[0].shape[dim] == x.local.shape[dim] == size[dim] and set(borders) <= {0, padding}:
            return HeldPart(_with_borders(op, x.local, dim, padding, above, below), band)
    (start, stop), (first, last) = seen[bands.rank], wanted[bands.rank]
    if (start, stop) != (first, last):
        zeros = [
            x.local.new_zeros((*x.shape[:dim], rows, *x.shape[dim + 1 :])) for rows in (first - start, stop - last)
        ]
        above, below = [zeros[0], *above], [*below, zeros[1]]
    return HeldPart(_windows_alone(op, dim, [*above, *middle, *below]), band)


def _windows_alone(op: Operation, dim: int, pieces: Sequence[Tensor]) -> Tensor:
    """A layer on rows that are padded with their neighbours' rows."""
    pieces = [piece for piece in pieces if piece.shape[dim]]
    rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    spatial = _POOLS.get(op.func.overloadpacket, rows.dim() - 2)
    padding = [_of_axis(op["padding"], axis) for axis in range(spatial)]
    padding[dim - (rows.dim() - spatial)] = 0
    return op.on_local(**{op.names[0]: rows, "padding": padding})


def _with_borders(
    op: Operation, rows: Tensor, dim: int, padding: int, above: list[Tensor], below: list[Tensor]
) -> Tensor:
    """A convolution that keeps the number of rows: of a rank's own, and once more of those next to another rank's.

    So the rows are not copied to stand beside their neighbours'.
    """
    result, near, last = op.on_local(), 2 * padding, rows.shape[dim]
    if above:
        result.narrow(dim, 0, padding).copy_(_windows_alone(op, dim, [*above, rows.narrow(dim, 0, near)]))
    if below:
        border = _windows_alone(op, dim, [rows.narrow(dim, last - near, near), *below])
        result.narrow(dim, last - padding, padding).copy_(border)
    return result


def group_norm(op: Operation) -> Outcome:
    """Group norm: sums of a group's elements and of their squares, in float64, are added up over all ranks."""
    x, groups = op["input"], op["group"]
    if not isinstance(x, Banded) or len(op.parts) > 1 or x.band.dim < 2:
        return None
    batch, channels = x.shape[:2]
    # torch's result is contiguous whatever it is given; a convolution rounds otherwise where channels come last.
    local = x.local.contiguous()
    sums = op.bands.link.all_reduce(_moments(local).view(2, batch, groups, -1).sum(-1))
    mean, squares = sums / (channels // groups * op["HxW"])
    rstd = ((squares - mean * mean).clamp(min=0) + op["eps"]).rsqrt()
    # One multiplication and one addition for each element, as torch does it.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale, shift = rstd.unsqueeze(-1), (-mean * rstd).unsqueeze(-1)
    if (weight := op["weight"]) is not None:
        scale, shift = scale * weight.double().view(groups, -1), shift * weight.double().view(groups, -1)
    if (bias := op["bias"]) is not None:
        shift = shift + bias.double().view(groups, -1)
    each = (batch, groups, channels // groups)
    scale, shift = (value.expand(each).reshape(-1).to(wide) for value in (scale, shift))
    flat = local.reshape(1, batch * channels, *local.shape[2:])
    zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
    normal = torch.batch_norm(flat, scale, shift, zeros, ones, False, 0.0, 0.0, False)
    return [HeldPart(normal.reshape(local.shape), x.band), mean.to(x.dtype), rstd.to(x.dtype)]


def _moments(local: Tensor) -> Tensor:
    """Sums of every channel's elements, and of their squares: (2, batch x channels), float64."""
    flat = local.reshape(local.shape[0] * local.shape[1], -1)
    result = flat.new_zeros((2, flat.shape[0]), dtype=torch.float64)
    step = max(1, _CHUNK // max(1, flat.shape[1]))
    for start in range(0, flat.shape[0], step):
        wide = flat[start : start + step].double()
        result[0, start : start + step] = wide.sum(1)
        result[1, start : start + step] = wide.square_().sum(1)
    return result


def multiplied(op: Operation) -> Outcome:
    """Matrix products: rows of the result are a rank's where the factor's are, sums over rows are added up."""
    added = op.names[1] in ("mat1", "batch1")
    first, second = op.names[added : added + 2]
    left, right, bias = op[first], op[second], op["self"] if added else None
    if isinstance(bias, Banded):
        return None
    for name, factor, summed, beside in ((first, left, -1, second), (second, right, -2, first)):
        if not isinstance(factor, Banded) or factor.band.dim == factor.dim() + summed:
            continue
        band, other = factor.band, op[beside]
        other = _cut_of(other, band, op.bands) if factor.dim() == 3 and band.dim == 0 else whole_of(other)
        changed = {name: factor.local, beside: other}
        if bias is not None:
            dim = bias.dim() - len(op.likes.shape) + band.dim
            alike = dim < 0 or bias.shape[dim] == 1
            changed["self"] = bias if alike else band.partition.take(bias, dim, op.bands.rank)
        return HeldPart(op.on_local(**changed), band)
    if bias is not None:
        return None
    # The sum is over rows.
    cut = left.band if isinstance(left, Banded) else right.band.at(left.dim() - 1)
    return op.bands.link.all_reduce(
        op.func(_cut_of(left, cut, op.bands), _cut_of(right, cut.at(right.dim() - 2), op.bands))
    )


def attention(
    bands: Bands,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    """`scaled_dot_product_attention`: a rank asks for its queries, of all keys."""
    if not isinstance(query, Banded) or query.band.dim == query.dim() - 1 or dropout_p:
        if isinstance(query, Banded):
            bands.whole["scaled_dot_product_attention"] += 1
        return sdpa(*whole_of((query, key, value, attn_mask)), dropout_p, is_causal, **settings)
    band = query.band
    if is_causal:
        attn_mask, is_causal = query.local.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(), False
    from_end = query.dim() - band.dim

    def beside(tensor: Tensor, by_row: bool = True) -> Tensor:
        """The part of a tensor that goes with a rank's queries, or all of it."""
        if by_row and tensor.dim() >= from_end and tensor.shape[-from_end] == band.total:
            return _cut_of(tensor, band.at(tensor.dim() - from_end), bands)
        return whole_of(tensor)

    # There may be a batch of attentions, such as one for each row.
    key, value = (beside(tensor, from_end > 2) for tensor in (key, value))
    attn_mask = None if attn_mask is None else beside(attn_mask)
    shape = (*query.shape[:-1], value.shape[-1])
    local = query.local.new_empty(band.shape(shape, bands.rank))
    if local.numel():
        local = sdpa(query.local, key, value, attn_mask, 0.0, is_causal, **settings)
    return Banded(local, band, torch.empty(shape, dtype=local.dtype, device="meta"), bands)


# Dimensions that they work along.
_POOLS = {aten.avg_pool2d: 2, aten.avg_pool3d: 3}
_REFLECTIONS = {aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d}


BAND_RULES: dict[Any, BandRule] = {
    OpFamily.POINTWISE: pointwise,
    OpFamily.REDUCTION: along("dim"),
    OpFamily.PRODUCT: multiplied,
    **{
        packet: rule
        for names, rule in (
            # Arguments with values of their own, in the place of rows.
            ("alias detach copy_ fill_ zero_ zeros_like ones_like empty_like full_like", pointwise),
            # Tensors with a size of their own: every rank has all of them.
            ("new_empty new_zeros new_ones new_full", Operation.on_local),
            ("softmax _softmax log_softmax _log_softmax glu cumsum index_select", along("dim")),
            ("select split split_with_sizes unsafe_split unbind", along("dim")),
            ("flip roll", along("dims")),
            ("view _unsafe_view _reshape_alias", viewed),
            ("permute transpose t", permuted),
            ("unsqueeze", unsqueezed),
            ("squeeze", squeezed),
            ("expand", expanded),
            ("repeat", repeated),
            ("slice", sliced),
            ("cat stack", joined),
            ("pixel_shuffle pixel_unshuffle", shuffled),
            ("upsample_nearest1d upsample_nearest2d upsample_nearest3d", enlarged),
            ("_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d", enlarged),
            ("constant_pad_nd", padded("pad")),
            ("reflection_pad1d reflection_pad2d reflection_pad3d", padded("padding")),
            ("replication_pad1d replication_pad2d replication_pad3d", padded("padding")),
            ("convolution", convolved),
            ("avg_pool2d avg_pool3d", pooled),
            ("native_group_norm", group_norm),
            ("addmm baddbmm", multiplied),
        )
        for packet in packets(names)
    },
}

# Functions of torch as they are called, before it takes them apart.
FUNCTION_RULES: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": attention}

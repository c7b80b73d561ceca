"""Families of torch's operations by their effect on elements: the one table that all part tensors go by.

An operation is in a family, or in none: then it is computed on whole tensors, unless a part tensor has a rule for it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class OpFamily(Enum):
    """The effect of an operation on the elements of its operands."""

    # An element of the result is made of the operands' elements in its place, broadcast.
    POINTWISE = auto()
    # Elements change their places only: of one tensor, or of several that are joined.
    MOVE = auto()
    JOIN = auto()
    # Over the dimensions that the argument `dim` names.
    REDUCTION = auto()
    # Over the last dimensions.
    FEATURES = auto()
    # A sum over the last dimension of one matrix and the last but one of the other.
    PRODUCT = auto()
    # Of the operand shape and dtype matter, its values do not.
    SHAPE = auto()


def packets(names: str) -> list[Any]:
    """Operations of aten by name, with all their overloads; those that this torch does not have are left out."""
    return [getattr(aten, name) for name in names.split() if hasattr(aten, name)]


# Of aten's operations; those that torch itself tags as pointwise are known by that.
_FAMILIES = {
    packet: family
    for family, names in {
        OpFamily.POINTWISE: "_to_copy clone lift_fresh",
        OpFamily.MOVE: "view permute transpose t unsqueeze squeeze expand slice select split split_with_sizes unbind "
        "alias detach diagonal unfold _unsafe_view repeat flip roll index index_select pixel_shuffle pixel_unshuffle",
        OpFamily.JOIN: "cat stack",
        OpFamily.REDUCTION: "linalg_vector_norm norm sum mean amax amin var std",
        OpFamily.PRODUCT: "bmm mm",
        OpFamily.SHAPE: "zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_empty "
        "new_zeros new_ones new_full",
    }.items()
    for packet in packets(names)
}
# Of functions and methods as a program calls them.
FUNCTION_FAMILIES: dict[Callable[..., Any], OpFamily] = {
    getattr(home, name): family
    for home, family, names in (
        (Tensor, OpFamily.POINTWISE, "float half bfloat16 double to type_as contiguous clone square pow rsqrt neg add"),
        (Tensor, OpFamily.POINTWISE, "sub mul div tanh sigmoid __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__"),
        (Tensor, OpFamily.POINTWISE, "__truediv__ __rtruediv__ __pow__ __neg__"),
        (torch, OpFamily.POINTWISE, "add sub mul div pow square rsqrt neg tanh sigmoid clone"),
        (F, OpFamily.POINTWISE, "silu gelu relu"),
        (F, OpFamily.FEATURES, "linear layer_norm rms_norm"),
        (torch, OpFamily.FEATURES, "layer_norm rms_norm"),
        (Tensor, OpFamily.REDUCTION, "mean"),
        (torch, OpFamily.REDUCTION, "mean"),
    )
    for name in names.split()
}


@cache
def op_family(func: Any) -> OpFamily | None:
    """The family of an operation of aten."""
    pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    return _FAMILIES.get(func.overloadpacket, OpFamily.POINTWISE if pointwise else None)


@cache
def is_composite(func: Any) -> bool:
    """True if an operation consists of others; torch takes it apart before a tensor sees it, but in inference mode."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@cache
def is_view(func: Any) -> bool:
    """True if a result shares memory with an argument, which is not written to."""
    returned = any(one.alias_info is not None for one in func._schema.returns)
    return returned and not func._schema.is_mutable

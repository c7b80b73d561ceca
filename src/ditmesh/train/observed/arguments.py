"""Arguments of a transformer's calls: which differ between two, and those of several samples in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.digests import tensor_digest
from ...errors import ConfigError
from .watch import values_in


def merged(calls: Sequence[Any], one: Any, two: Any, path: str = "") -> Any:
    """The arguments of one call for several samples, by those of a call for each.

    What a call for two samples has twice as much of is a row, or an item of a list, for every sample; what it has the
    same is all samples'. ``one`` and ``two`` are arguments of the pipeline's call for one sample and for two.

    Raises:
        ConfigError: an argument is neither.
    """
    result: Any = None
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        result = _merged_tensors(calls, one, two)
    elif isinstance(one, Mapping) and isinstance(two, Mapping) and one.keys() == two.keys():
        result = {
            key: merged([call[key] for call in calls], one[key], two[key], f"{path}.{key}".strip(".")) for key in one
        }
    elif isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        result = _merged_items(calls, one, two, path)
    elif one is None and two is None:
        return None
    elif not isinstance(one, (Tensor, Mapping, list, tuple)) and are_equal(one, two):
        result = calls[0]
    if result is None:
        raise ConfigError(f"{path} of the transformer has another form for two images than for one")
    return result


def _merged_items(calls: Sequence[Any], single: Any, pair: Any, path: str) -> Any:
    if len(single) == len(pair):
        every = enumerate(zip(single, pair, strict=True))
        return type(single)([merged([call[at] for call in calls], *both, f"{path}.{at}") for at, both in every])
    return type(single)([item for call in calls for item in call]) if len(pair) == 2 * len(single) else None


def _merged_tensors(calls: Sequence[Tensor], single: Tensor, pair: Tensor) -> Tensor | None:
    if single.shape == pair.shape and all(are_equal(call, calls[0]) for call in calls):
        return calls[0]
    apart = [dim for dim in range(single.dim()) if single.dim() == pair.dim() and single.shape[dim] != pair.shape[dim]]
    if len(apart) == 1 and pair.shape[apart[0]] == 2 * single.shape[apart[0]]:
        return torch.cat(list(calls), apart[0])
    return None


def row_dim(value: Tensor, one: Tensor, count: int) -> int | None:
    """The dimension in which an argument has something for each of several samples; None: it is the same for all.

    Raises `ConfigError`: it is neither.
    """
    if value.shape == one.shape:
        return None
    apart = [dim for dim in range(one.dim()) if value.dim() == one.dim() and value.shape[dim] != one.shape[dim]]
    if len(apart) != 1 or value.shape[apart[0]] != count * one.shape[apart[0]]:
        raise ConfigError("captions of the transformer have another form together than alone")
    return apart[0]


def differing_paths(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Paths of values that are not the same in two calls' arguments."""
    values, other_values = dict(values_in(one)), dict(values_in(other))
    if values.keys() != other_values.keys():
        odd = sorted(values.keys() ^ other_values.keys())
        raise ConfigError(f"{', '.join(odd)} of the transformer is there with some captions only")
    return [path for path, value in values.items() if not are_equal(value, other_values[path])]


def are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.shape == other.shape
            and bool(torch.equal(one, other))
        )
    return type(one) is type(other) and (bool(one == other) or _state(one) == _state(other) != ())


def _state(value: Any) -> Any:
    """The state of an object, such as a cache of keys, to tell it from another of its class; empty if it has none."""
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, Mapping):
        return tuple((str(key), _state(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_state, value))
    if isinstance(value, (int, float, str, type(None))):
        return value
    return (type(value).__name__, _state(vars(value))) if hasattr(value, "__dict__") else ()


def is_number(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float))


def typed_like(template: Any, value: Tensor) -> Any:
    """A value as the pipeline passes it: of the template's type."""
    return value.to(template.dtype) if isinstance(template, Tensor) else type(template)(value.item())


def argument_forms(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (path, tuple(value.shape) if isinstance(value, Tensor) else value if is_number(value) else None)
        for path, value in values_in(arguments)
    )

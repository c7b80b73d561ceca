"""Joining of transformer calls: which calls of several requests fit together, and their rows as one call.

What is joined is found out by trying: before calls of a form are joined for the first time, one such call is compared
with its rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...core.arguments import Arguments, covers, parameter_names
from ...core.clock import timestep_of
from ...core.objects import holds_tensors
from ...core.values import Values, seen
from ...engine import Engine
from ...errors import LayoutError, shortened
from ...layout import TokenLayout
from ...layout.forms import form_of
from ...layout.record import off_by, tolerance
from ...layout.types import CallForm
from ...strategies.base import ParallelModel
from ...strategies.hooks import ModelHooks
from ...strategies.rows import batched_in, some_rows
from .coroutines import PendingCall, PipelineTask

# Largest difference, relative to the largest value, of a row in a batch from the row alone.
SAME = 1e-4
# Plain values of a call, which can be compared by equality.
_PLAIN = (int, float, complex, str, bytes, torch.Size, type(None), torch.dtype, torch.device)


@dataclass
class CallRows:
    """The rows of a transformer's call.

    Attributes:
        arguments: of the call.
        count: number of rows.
        batched: arguments with rows, by path with the dimension.
        times: paths of timesteps that are one number for all rows.
        shared: tensors without rows, by path: calls that are joined have equal ones.
        listed: whether lists have an item for each row.
        key: equal in calls that can be joined.
    """

    arguments: Arguments
    count: int
    batched: dict[str, int]
    times: tuple[str, ...]
    shared: dict[str, Tensor]
    listed: bool
    key: Hashable


def rows_of(model: nn.Module, layout: TokenLayout, pending: PendingCall) -> CallRows | str:
    """A call's rows, or a clause that says why they cannot run with those of other calls."""
    names, time_path = parameter_names(type(model).forward), timestep_of(model, layout)
    arguments = Arguments(names, pending.args, pending.kwargs)
    main, name = arguments.get(names[0]), type(model).__name__
    if time_path is None:
        return f"{name} takes no timestep, and requests stand at different ones"
    if not isinstance(main, (Tensor, list)):
        return f"{name} is not called with tensors of latents"
    count = len(main)
    batched = batched_in(arguments, count, layout)
    lists = [path for path in batched if not isinstance(arguments.get(path), Tensor)]
    times: list[str] = []
    shared: dict[str, Tensor] = {}
    key: list[Hashable] = [id(model), len(arguments.args)]
    for path, value in (*arguments.leaves(), *arguments.others()):
        if any(covers(known, path) for known in lists):
            continue
        if covers(time_path, path) and path not in batched and value is not None:
            if isinstance(value, Tensor) and value.numel() != 1:
                return f"{name} takes a timestep for all rows together"
            times.append(path)
            key.append((path, getattr(value, "dtype", type(value))))
        elif isinstance(value, Tensor):
            if path not in batched:
                shared[path] = value
            key.append((path, _rows_form(value, batched.get(path), count)))
        elif not isinstance(value, _PLAIN) and (callable(value) or holds_tensors(value)):
            return f"{name} is given a {type(value).__name__} ({path!r}), which may remember other calls"
        else:
            key.append((path, _plain_form(value)))
    # Lists of samples of one shape only.
    key += [(path, frozenset(map(_form, arguments.get(path)))) for path in lists]
    return CallRows(arguments, count, batched, tuple(times), shared, isinstance(main, list), tuple(key))


def _rows_form(value: Tensor, dim: int | None, count: int) -> Hashable:
    """The form of a tensor with ``count`` rows along a dimension, the same for any number of them."""
    shape = list(value.shape)
    if dim is not None:
        shape[dim] = -(shape[dim] // count)
    return tuple(shape), value.dtype, value.device


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(_form(item) for item in value)
    return _plain_form(value)


def _plain_form(value: Any) -> Hashable:
    return (type(value), value if isinstance(value, _PLAIN) else id(value))


def join_calls(calls: Sequence[CallRows]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call with the rows of several calls, in order."""
    first = calls[0].arguments
    together = Arguments(first.names, tuple(first.args), first.kwargs)
    for path, dim in calls[0].batched.items():
        values = [call.arguments.get(path) for call in calls]
        if isinstance(values[0], Tensor):
            together.set(path, torch.cat(values, dim))
        else:
            together.set(path, [item for value in values for item in value])
    device = next((value.device for _, value in first.leaves() if isinstance(value, Tensor)), None)
    for path in calls[0].times:
        times = [torch.as_tensor(call.arguments.get(path), device=device).reshape(1) for call in calls]
        together.set(path, torch.cat([one.expand(call.count) for one, call in zip(times, calls, strict=True)]))
    return tuple(together.args), together.kwargs


def split_result(output: Any, counts: Sequence[int], listed: bool) -> list[Any]:
    """The result of a joined call, split into one result for each call.

    Raises `LayoutError`: it has no row for each.
    """
    leaves, form = tree_flatten(output, is_leaf=(lambda value: isinstance(value, list)) if listed else None)
    stops = [sum(counts[: place + 1]) for place in range(len(counts))]
    parts: list[list[Any]] = [[] for _ in counts]
    for leaf in leaves:
        rows = leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None
        rows = len(leaf) if isinstance(leaf, list) else rows
        if rows not in (None, stops[-1]) or (rows is None and isinstance(leaf, Tensor)):
            raise LayoutError(f"the result has {rows} rows for {stops[-1]} samples")
        for part, stop, count in zip(parts, stops, counts, strict=True):
            part.append(leaf if rows is None else some_rows(leaf, slice(stop - count, stop)))
    return [tree_unflatten(part, form) for part in parts]


def _varied(rows: CallRows, model: nn.Module, layout: TokenLayout) -> CallRows:
    """A call of the same form with different latents, embeddings and timestep."""
    time_path = timestep_of(model, layout) or ""
    other = Arguments(rows.arguments.names, tuple(rows.arguments.args), rows.arguments.kwargs)

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            # A mask of numbers stays one of rows that are as long.
            return value.flip(-1) if value.dim() > 2 else value * 0.5
        return [changed(item) for item in value] if isinstance(value, list) else value

    for path in (*rows.batched, *rows.times):
        value = other.get(path)
        if covers(time_path, path):
            floating = value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
            value = value * 0.5 if floating else value // 2
        else:
            value = changed(value)
        other.set(path, value)
    return CallRows(other, rows.count, rows.batched, rows.times, rows.shared, rows.listed, rows.key)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a transformer's result, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


class Joiner:
    """Finds calls of transformers that can run as one, and tries every form of call before it is joined.

    Args:
        engine: of the transformers.
        exchange: gives every rank's value, in rank order. A collective call.
        begin: opens a request for a trial with these adapters; end: closes it after a trial that failed, with the
            error on the rank that has one.
    """

    def __init__(
        self,
        engine: Engine,
        exchange: Callable[[Any], list[Any]],
        begin: Callable[[tuple[tuple[str, float], ...]], None],
        end: Callable[[Exception | None], None],
    ) -> None:
        self._engine, self._exchange, self._begin, self._end = engine, exchange, begin, end
        self._models = {id(model.model): model for model in engine.models}
        self._values = Values()
        # By form of call that was tried: why rows cannot run together; empty: they can.
        self._forms: dict[tuple[int, CallForm], str] = {}

    def forget(self) -> None:
        """Forget the values of the calls so far: their request is over."""
        self._values.forget()

    def end_step(self) -> None:
        """A step of the calls has ended."""
        self._values.turn()

    def groups(self, runs: list[PipelineTask], most: int) -> list[list[tuple[PipelineTask, CallRows | None]]]:
        """Groups of at most ``most`` compatible calls, in the order of their first call. Collective."""
        if len(runs) == 1:
            # Nothing to join: its arguments are not looked at.
            return [[(runs[0], None)]]
        groups: list[list[tuple[PipelineTask, CallRows | None]]] = []
        places: dict[Hashable, list[int]] = {}
        for run in runs:
            answer = "" if run.waits_for.alone else self._rows(run.waits_for)
            rows = None if isinstance(answer, str) else answer
            alike = places.setdefault((rows.key, run.adapters), []) if rows is not None else []
            for place in alike:
                first, fits = groups[place][0][1], len(groups[place]) < most
                if fits and first and rows and self._same(first, rows) and not self._tried(run, rows):
                    groups[place].append((run, rows))
                    break
            else:
                alike.append(len(groups))
                groups.append([(run, rows)])
        return groups

    def why_not(self, run: PipelineTask) -> str:
        """The reason why calls of the form that a task waits for cannot be joined; empty: they can. Collective."""
        rows = self._rows(run.waits_for)
        return rows if isinstance(rows, str) else self._tried(run, rows)

    def _layout(self, model: ParallelModel) -> TokenLayout:
        hooks = model.find(ModelHooks)
        return model.layout if hooks is None else hooks.layout

    def _rows(self, pending: PendingCall) -> CallRows | str:
        model = self._models[id(pending.component)]
        return rows_of(model.model, self._layout(model), pending)

    def _same(self, call: CallRows, other: CallRows) -> bool:
        """True if two calls have equal tensors apart from their rows."""
        return all(self._values.same(seen(value), seen(other.shared[path])) for path, value in call.shared.items())

    def _tried(self, run: PipelineTask, rows: CallRows) -> str:
        form = id(run.waits_for.component), form_of(rows.arguments)
        if form not in self._forms:
            self._forms[form] = self._try(run, rows)
        return self._forms[form]

    def _try(self, run: PipelineTask, rows: CallRows) -> str:
        """The reason why a call's rows change when other rows are added, as a clause; empty: they do not change.

        The call runs alone, another one with other latents, embeddings and timestep runs alone, then both as one.
        """
        pending, clock = run.waits_for, self._engine.clock
        model = self._models[id(pending.component)]
        name = type(model.model).__name__
        other = _varied(rows, model.model, self._layout(model))
        failed: Exception | None = None
        try:
            self._begin(run.adapters)
            alone: list[Any] = []
            for call in (rows, other):
                clock.advance()
                alone.append(pending.call(*call.arguments.args, **call.arguments.kwargs))
            clock.advance()
            args, kwargs = join_calls([rows, other])
            together = split_result(pending.call(*args, **kwargs), [rows.count, other.count], rows.listed)
            answer = _difference(name, alone, together, 0.0 if self._engine.config.reproducible else None)
        except Exception as error:
            failed = error
            answer = f"{name} cannot take rows of two requests at a time ({shortened(error, with_kind=True)})"
        every = self._exchange(answer)
        if failed is not None or any(every):
            self._end(failed)
        return next(filter(None, every), "")


def _difference(name: str, alone: Sequence[Any], together: Sequence[Any], allowed: float | None) -> str:
    """The reason why the results of two joined calls are not those of each alone, as a clause; empty: they are.

    Args:
        name: of the transformer's class.
        allowed: difference relative to the largest value; None: that of the dtype.
    """
    first, second = (tensors_of(value) for value in alone)
    for expected, part in zip(alone, together, strict=True):
        for value, row in zip(tensors_of(expected), tensors_of(part), strict=True):
            error = off_by(row, value)
            most = (SAME if value.dtype.itemsize >= 4 else tolerance(value)) if allowed is None else allowed
            if not error <= most:
                return f"a row of {name} beside another request's is off by {error:.2g} of the largest value"
    if all(a.shape == b.shape and off_by(a, b) < 100 * SAME for a, b in zip(first, second, strict=True)):
        return f"two calls of {name} with other latents and timesteps give the same, so that nothing was learned"
    return ""

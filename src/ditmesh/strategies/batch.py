"""Batch parallelism: rows of the batch, and branches of classifier-free guidance, shared over ranks.

A transformer treats the rows of its batch independently, so cutting them changes nothing. Guidance (Ho &
Salimans 2022, arXiv:2207.12598) comes in two styles. *Batched* pipelines put all branches in one call: they
are rows like any other. *Sequential* pipelines call the transformer once per branch and step; there each
rank runs another branch at the step's first call, with arguments predicted from the step before, the results
are exchanged, and the later calls are answered from them once their arguments have proved to be as predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..alignment import ALIGNMENT
from ..comm import Link
from ..layout import TokenLayout
from ..layout.arguments import Arguments, covers, parameter_names
from ..methods import replace_method
from ..staleness.clock import same
from ..tiles import even_cut, offsets
from .lazy import LazyPatches, Owners

# Stands among the arguments of a call for what else the result depends on. No argument has such a name.
_STATE = "<state>"


@dataclass
class _Step:
    """The transformer calls at one timestep: their arguments, and results computed ahead."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    ahead: dict[int, tuple[dict[str, Any], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """One run of the model's own forward: which part of the pipeline's calls it computes.

    Attributes:
        step: number of the step, counted by new timesteps.
        branch: number of the call in its step: the branch of guidance; None where nobody shares branches out.
        ahead: whether it runs ahead of the pipeline's call.
        rows: first row of the batch, and one after the last.
        link: name of the link that shares the rows; empty when they are not shared.
    """

    step: int = 0
    branch: int | None = None
    ahead: bool = False
    rows: tuple[int, int] | None = None
    link: str = ""


class BatchParallel:
    """Stands in for a transformer's forward and shares its rows and branches out.

    Args:
        model: the transformer; its ``forward`` is replaced on the instance until `close`.
        rows: link over all ranks that may share rows (guidance and data axes).
        data: link of the data axis alone, used when the guidance axis shares branches.
        branches: link of the guidance axis.
        unbatched: arguments whose first dimension is not the batch.
        listed: arguments that are Python lists with an item per sample.
        one_by_one: run every row by itself, so that its bits do not depend on the rows beside it.
        announce: told before every run of the model what the run is.

    Attributes:
        running: what the model's own forward computes at the moment, or computed last.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Link,
        data: Link,
        branches: Link,
        unbatched: tuple[str, ...] = (),
        listed: tuple[str, ...] = (),
        one_by_one: bool = False,
        announce: Callable[[Share], None] = lambda run: None,
    ) -> None:
        self.model = model
        self._announce = announce
        self.one_by_one = one_by_one
        self.rows, self.data, self.branches = rows, data, branches
        self.unbatched, self.listed = unbatched, listed
        self._names = parameter_names(type(model).forward)
        self._restore = replace_method(model, "forward", self._call)
        self._forward: Callable[..., Any] = self._restore.original
        self.running = Share()
        self._before = _Step()
        self._now = _Step()
        self._steps = 0

    def follow(self, layout: TokenLayout) -> None:
        """The layout of the call that is about to run: which of its arguments have rows."""
        self.unbatched, self.listed = layout.unbatched, layout.listed

    def close(self) -> None:
        """Put the model's own forward back."""
        self._restore()

    def begin_request(self) -> None:
        """A new request starts: what the branches of the last one were is forgotten.

        The first step of every request then runs alike, and the same request gives the same bits twice.
        """
        self._before, self._now = _Step(), _Step()
        self._steps = 0

    # --- one call ------------------------------------------------------------------------------------------

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(self._names, args, kwargs)
        if self.branches.size == 1:
            return self._shared(arguments, self.rows)
        state, stateful = _state_of(self.model)
        seen = {**dict(arguments.leaves()), _STATE: state}
        if not self._now.calls or not same(seen.get("timestep"), self._now.calls[0].get("timestep")):
            self._before, self._now = self._now, _Step()
            self._steps += 1
            # A cache remembers every branch by itself: each rank runs all of them, as one device does.
            branches = [] if stateful else self._branches_of(self._before)
            if branches:
                self._run_ahead(arguments, branches, state)
        number = len(self._now.calls)
        self._now.calls.append(seen)
        if number in self._now.ahead:
            predicted, output = self._now.ahead.pop(number)
            if predicted.keys() == seen.keys() and all(same(seen[path], predicted[path]) for path in seen):
                return output
        sequential = bool(self._now.ahead) or number > 0
        return self._shared(arguments, self.data if sequential else self.rows, number)

    # --- guidance branches ------------------------------------------------------------------------------------

    def _branches_of(self, step: _Step) -> list[dict[str, Any]]:
        """For every call of a step, the arguments in which it differed from the first; empty if it was not guidance.

        Calls that differ in nothing, or in the latents themselves (a sampler that asks twice at one
        timestep), are not branches of guidance. Calls of a model that was changed in between (guidance by
        skipped layers hangs hooks on it for one branch only) cannot be run ahead of that change.
        """
        if len(step.calls) < 2:
            return []
        first = step.calls[0]
        main = self._names[0]
        differences: list[dict[str, Any]] = [{}]
        for call in step.calls[1:]:
            if call.keys() != first.keys():
                return []
            differing = {path: value for path, value in call.items() if not same(value, first[path])}
            if not differing or any(path == _STATE or covers(main, path) for path in differing):
                return []
            differences.append(differing)
        return differences

    def _run_ahead(self, arguments: Arguments, branches: list[dict[str, Any]], state: tuple[Any, ...]) -> None:
        """Run this rank's branches of the step, and exchange results."""
        mine: list[tuple[int, dict[str, Any], Any]] = []
        predictions: list[dict[str, Any]] = []
        for number, differing in enumerate(branches):
            branch = Arguments(self._names, tuple(arguments.args), arguments.kwargs)
            for path, value in differing.items():
                branch.set(path, value)
            predictions.append({**dict(branch.leaves()), _STATE: state})
            # With fewer branches than ranks, the ranks left over run the last one along.
            owner = min(self.branches.rank, len(branches) - 1)
            if number % self.branches.size == owner:
                mine.append((number, predictions[number], self._shared(branch, self.data, number, ahead=True)))
        rounds = -(-len(branches) // self.branches.size)
        for round_ in range(rounds):
            # A rank without a branch in the last round sends its latest result again: shapes must be known.
            _, _, output = mine[min(round_, len(mine) - 1)]
            for owner, result in enumerate(_exchanged(output, self.branches)):
                number = round_ * self.branches.size + owner
                if number < len(branches):
                    self._now.ahead[number] = (predictions[number], result)

    # --- rows --------------------------------------------------------------------------------------------------

    def _shared(self, arguments: Arguments, link: Link, branch: int | None = None, ahead: bool = False) -> Any:
        """The forward with its rows shared over ``link``; every rank gets all rows of the result.

        ``branch``: its number, where it is known; ``ahead``: it runs ahead of the pipeline's call.
        """
        batch = _batch_size(arguments.get(self._names[0]))
        if batch < 2 or (link.size == 1 and not self.one_by_one) or _takes_halves(self.model):
            self._announced(Share(self._steps, branch, ahead, (0, batch)))
            return self._forward(*arguments.args, **arguments.kwargs)
        run = Share(self._steps, branch, ahead, (0, batch), link.name)
        counts = even_cut(batch, link.size)
        start, count = offsets(counts)[link.rank], counts[link.rank]
        # A rank without rows computes the last one along, so that every rank of its group takes part alike.
        take = slice(start, start + count) if count else slice(batch - 1, batch)
        batched = _batched(arguments, batch, self.unbatched, self.listed)
        if self.one_by_one:
            rows = [slice(row, row + 1) for row in range(take.start, take.stop)]
            output = _joined([self._rows(arguments, batched, row, run) for row in rows])
        else:
            output = self._rows(arguments, batched, take, run)
        return _map(output, lambda rows: _gathered(rows, counts, link), lambda rows: _gathered_list(rows, counts, link))

    def _announced(self, run: Share) -> None:
        self.running = run
        self._announce(run)

    def _rows(self, arguments: Arguments, batched: list[str], take: slice, run: Share) -> Any:
        part = Arguments(self._names, tuple(arguments.args), arguments.kwargs)
        for path in batched:
            part.set(path, _some(arguments.get(path), take))
        self._announced(replace(run, rows=(take.start, take.stop)))
        return self._forward(*part.args, **part.kwargs)


class RowSplit:
    """Shares the rows of a method's tensors over ranks: the VAE's decode.

    Args:
        owner, name: the method; replaced on the instance until `close`.
        link: ranks that share the rows.
        one_by_one: every row by itself, as in `BatchParallel`.
    """

    def __init__(self, owner: Any, name: str, link: Link, one_by_one: bool = False) -> None:
        self.link = link
        self.one_by_one = one_by_one
        self._restore = replace_method(owner, name, self._call)

    def close(self) -> None:
        """Put the method back."""
        self._restore()

    def _call(self, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        link, batch = self.link, rows.shape[0]
        # A decoder that is told a number of frames has the frames of a video in its rows, and mixes them.
        if batch < 2 or "num_frames" in kwargs:
            return self._restore.original(rows, *args, **kwargs)
        counts = even_cut(batch, link.size)
        start, count = offsets(counts)[link.rank], counts[link.rank]
        take = slice(start, start + count) if count else slice(batch - 1, batch)

        def decoded(take: slice) -> Any:
            def part(value: Any) -> Any:
                # Whatever has a row per sample goes with it: the noise level of a decoder that removes the last noise.
                has_rows = isinstance(value, Tensor) and value.dim() and value.shape[0] == batch
                return _some(value, take) if has_rows else value

            named = {name: part(value) for name, value in kwargs.items()}
            return self._restore.original(_some(rows, take), *map(part, args), **named)

        if self.one_by_one:
            output = _joined([decoded(slice(row, row + 1)) for row in range(take.start, take.stop)])
        else:
            output = decoded(take)
        return _map(output, lambda rows: _gathered(rows, counts, link), lambda rows: rows)


def _some(value: Any, take: slice) -> Any:
    """Some rows of a tensor or a list. In memory of their own: kernels may look at where a tensor begins."""
    part = value[take]
    return part.clone() if isinstance(part, Tensor) and part.data_ptr() % ALIGNMENT else part


def _joined(outputs: list[Any]) -> Any:
    """Outputs of single rows as one of all of them."""
    if len(outputs) == 1:
        return outputs[0]
    tensors: list[list[Tensor]] = []
    lists: list[list[list[Tensor]]] = []
    for output in outputs:
        tensors.append([])
        lists.append([])
        _map(output, lambda t, all_=tensors[-1]: all_.append(t) or t, lambda t, all_=lists[-1]: all_.append(t) or t)
    rows = iter([torch.cat(parts) for parts in zip(*tensors, strict=True)])
    items = iter([[item for part in parts for item in part] for parts in zip(*lists, strict=True)])
    return _map(outputs[0], lambda _: next(rows), lambda _: next(items))


def _batch_size(main: Any) -> int:
    """Rows of the transformer's first argument: a tensor, or a list with an entry per row."""
    return main.shape[0] if isinstance(main, Tensor) else len(main)


def _batched(arguments: Arguments, batch: int, unbatched: tuple[str, ...], listed: tuple[str, ...]) -> list[str]:
    """Paths of the arguments that have a row per sample: lists with an item per sample, and tensors."""
    paths = [path for path in listed if isinstance(arguments.get(path), list) and len(arguments.get(path)) == batch]
    for path, value in arguments.leaves():
        known = any(covers(name, path) for name in (*unbatched, *listed))
        if not known and isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch:
            paths.append(path)
    return paths


def _gathered(rows: Tensor, counts: tuple[int, ...], link: Link) -> Tensor:
    def gather(rows: Tensor) -> Tensor:
        return link.gather(rows[: counts[link.rank]].contiguous(), counts, dim=0)

    if isinstance(rows, LazyPatches) and rows.settled is None:
        # Each patch is gathered when it is wanted, in the same order on all ranks; whose it is, now.
        owners, like = rows.owners, torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype, device="meta")
        everybody = owners.made(
            ("gather", link.name, counts), lambda: Owners(gather(owners.of.int()).short(), owners.patches)
        )
        return rows.sent_through(gather, like, everybody)
    return gather(rows)


def _gathered_list(rows: list[Tensor], counts: tuple[int, ...], link: Link) -> list[Tensor]:
    """Lists of equally shaped tensors, one per row."""
    return list(_gathered(torch.stack(rows), counts, link).unbind())


def _exchanged(output: Any, link: Link) -> list[Any]:
    """The output of every rank of the link, in rank order."""
    received: list[list[Tensor]] = []

    def exchange(tensor: Tensor) -> Tensor:
        def parts_of(tensor: Tensor) -> list[Tensor]:
            tensor = tensor.contiguous()
            parts = link.share([tensor], [[tuple(tensor.shape)]] * link.size)
            return [part for (part,) in parts]

        if isinstance(tensor, LazyPatches) and tensor.settled is None:
            received.append(tensor.shared_out(parts_of, link.size))
        else:
            received.append(parts_of(tensor))
        return tensor

    _map(output, exchange, lambda tensors: [exchange(tensor) for tensor in tensors])
    results = []
    for rank in range(link.size):
        tensors = iter([parts[rank] for parts in received])
        results.append(_map(output, lambda _, t=tensors: next(t), lambda old, t=tensors: [next(t) for _ in old]))
    return results


def _map(output: Any, tensor: Callable[[Tensor], Tensor], tensors: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    """A transformer's output with every tensor, and every list of tensors, replaced."""
    if isinstance(output, Tensor):
        return tensor(output)
    if isinstance(output, list):
        return tensors(output)
    if isinstance(output, tuple):
        return tuple(_map(item, tensor, tensors) for item in output)
    if isinstance(output, dict):  # diffusers' BaseOutput, too
        return type(output)(**{key: _map(value, tensor, tensors) for key, value in output.items()})
    return output


def _state_of(model: nn.Module) -> tuple[tuple[Any, ...], bool]:
    """What a call depends on besides its arguments: hooks and adapters. And whether a hook keeps state."""
    worn: list[Any] = []
    stateful = False
    for path, module in model.named_modules():
        # Keys of torch's hooks are never used twice: a hook that is hung anew is another one.
        worn += [(path, *hooks) for hooks in (module._forward_pre_hooks, module._forward_hooks) if hooks]
        for name, hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).items():
            worn.append((path, name))
            stateful = stateful or bool(getattr(hook, "_is_stateful", False))
        adapters = getattr(module, "active_adapters", None)
        if isinstance(adapters, list):
            scales = tuple(getattr(module, "scaling", {}).items())
            worn.append((path, *adapters, getattr(module, "disable_adapters", False), scales))
    return tuple(worn), stateful


def _takes_halves(model: nn.Module) -> bool:
    """Whether a hook on the model (Faster Cache) takes one half of the rows for one branch of guidance, whatever came.

    Such a model needs its batch whole.
    """
    hooks = getattr(getattr(model, "_diffusers_hook", None), "hooks", {})
    return any(getattr(hook, "is_guidance_distilled", None) is False for hook in hooks.values())

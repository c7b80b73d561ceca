"""Batch parallelism: rows of the batch, and branches of classifier-free guidance, shared over ranks.

A transformer treats the rows of its batch independently, so cutting them changes nothing. Guidance (Ho &
Salimans 2022, arXiv:2207.12598) comes in two styles. *Batched* pipelines put all branches in one call: they
are rows like any other. *Sequential* pipelines call the transformer once per branch and step; there each
rank runs another branch at the step's first call, with arguments predicted from the step before, the results
are exchanged, and the later calls are answered from them once their arguments have proved to be as predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Link
from ..config import ParallelConfig
from ..core.alignment import ALIGNMENT
from ..core.arguments import Arguments, covers, parameter_names
from ..core.clock import Call, CallClock, timestep_of
from ..core.partition import even_cut, offsets
from ..core.patching import CallChain, Patch, Proceed
from ..core.values import Seen, seen
from ..errors import InputError
from ..layout import TokenLayout
from .base import Context, Request, Strategy
from .pipefusion.lazy import LazyPatches, Owners

# Stands among the arguments of a call for what else the result depends on. No argument has such a name.
_STATE = "<state>"


@dataclass
class _Step:
    """The calls of one transformer in one step.

    Attributes:
        first: branch of the first of them.
        calls: their arguments, by path.
        ahead: results computed ahead, by the call's number, each with the arguments it was computed for and the paths
            of those that are not the first call's.
    """

    first: int = 0
    calls: list[dict[str, Seen]] = field(default_factory=list)
    ahead: dict[int, tuple[dict[str, Seen], set[str], Any]] = field(default_factory=dict)


class BatchParallel:
    """A transformer's forward, with its rows and branches shared out.

    Args:
        model: the transformer.
        chain: what wraps its forward; this becomes the next layer.
        rows: link over all ranks that may share rows (guidance and data axes).
        data: link of the data axis alone, used when the guidance axis shares branches.
        branches: link of the guidance axis.
        unbatched: arguments whose first dimension is not the batch.
        listed: arguments that are Python lists with an item per sample.
        one_by_one: run every row by itself, so that its bits do not depend on the rows beside it.
        clock: says which call this is, and is told of its parts.
        timestep: name of the transformer's timestep.

    Attributes:
        close: takes the layer off again.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: CallChain,
        rows: Link,
        data: Link,
        branches: Link,
        unbatched: tuple[str, ...] = (),
        listed: tuple[str, ...] = (),
        one_by_one: bool = False,
        *,
        clock: CallClock,
        timestep: str | None = None,
    ) -> None:
        self.model = model
        self._clock = clock
        self._timestep = timestep
        self.one_by_one = one_by_one
        self.rows, self.data, self.branches = rows, data, branches
        self.unbatched, self.listed = unbatched, listed
        self._names = parameter_names(type(model).forward)
        self._forward: Callable[..., Any] = model.forward
        self.close = chain.add(self._call)
        self.begin_request()

    def follow(self, layout: TokenLayout) -> None:
        """The layout of the call that is about to run: which of its arguments have rows."""
        self.unbatched, self.listed = layout.unbatched, layout.listed

    def begin_request(self) -> None:
        """A new request starts: what the branches of the last one were is forgotten.

        The first step of every request then runs alike, and the same request gives the same bits twice.
        """
        self._before, self._now = _Step(), _Step()
        self._at: tuple[int, int] | None = None
        self._modules: list[tuple[str, nn.Module]] | None = None
        # Whether a timestep that was taken for granted was another one; on the device.
        self._mistaken: Tensor | None = None

    def end_request(self, failed: bool = False) -> None:
        """The request is over: no argument of it is held.

        Raises:
            InputError: a branch of guidance was run ahead at another timestep than it was then asked for.
        """
        mistaken = self._mistaken
        self.begin_request()
        if mistaken is not None and not failed and bool(mistaken):
            raise InputError(
                f"{type(self.model).__name__} was called at two timesteps between two steps of the scheduler, which "
                f"cfg={self.branches.size} cannot foresee, so that the result is wrong; use cfg=1"
            )

    # --- one call ------------------------------------------------------------------------------------------

    def _call(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        self._forward = proceed
        arguments = Arguments(self._names, args, kwargs)
        if self.branches.size == 1:
            return self._shared(arguments, self.rows)
        call = self._clock.call
        state, stateful = self._state()
        found = self._seen(arguments, state)
        if (call.request, call.step) != self._at:
            self._at = (call.request, call.step)
            self._before, self._now = self._now, _Step(call.branch)
            # A cache remembers every branch by itself: each rank runs all of them, as one device does.
            branches = [] if stateful else self._branches_of(self._before)
            if branches:
                self._run_ahead(arguments, branches, state)
        number = len(self._now.calls)
        self._now.calls.append(found)
        if number in self._now.ahead:
            predicted, own, output = self._now.ahead.pop(number)
            if self._as_predicted(found, predicted, own, call):
                return output
        sequential = bool(self._now.ahead) or number > 0
        return self._shared(arguments, self.data if sequential else self.rows)

    def _seen(self, arguments: Arguments, state: tuple[Any, ...]) -> dict[str, Seen]:
        return {**{path: seen(value) for path, value in arguments.leaves()}, _STATE: Seen(state, None)}

    def _as_predicted(self, found: dict[str, Seen], predicted: dict[str, Seen], own: set[str], call: Call) -> bool:
        """Whether a call has the arguments that its result was computed for.

        Args:
            found, predicted: what it has, and was to have.
            own: paths of the arguments that it was not to have from the first call of the step.
            call: this one.
        """
        if found.keys() != predicted.keys():
            return False
        for path, value in found.items():
            expected = predicted[path]
            time = self._timestep is not None and covers(self._timestep, path) and path not in own
            if time and call.counted and _alike(value, expected) and value.key != expected.key:
                # Pipelines compute it anew for every branch. That it is the step's one the scheduler's count says;
                # the values are compared on the device, and looked at when the request is over.
                differs = (value.value != expected.value).any()
                self._mistaken = differs if self._mistaken is None else self._mistaken | differs
                self._clock.values.equated(value, expected)
            elif not self._clock.values.same(value, expected):
                return False
        return True

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
            differing = {path: one for path, one in call.items() if not self._clock.values.same(one, first[path])}
            if not differing or any(path == _STATE or covers(main, path) for path in differing):
                return []
            differences.append({path: one.value for path, one in differing.items()})
        return differences

    def _run_ahead(self, arguments: Arguments, branches: list[dict[str, Any]], state: tuple[Any, ...]) -> None:
        """Run this rank's branches of the step, and exchange results."""
        mine: list[Any] = []
        predictions: list[dict[str, Seen]] = []
        for number, differing in enumerate(branches):
            branch = Arguments(self._names, tuple(arguments.args), arguments.kwargs)
            for path, value in differing.items():
                branch.set(path, value)
            predictions.append(self._seen(branch, state))
            # With fewer branches than ranks, the ranks left over run the last one along.
            owner = min(self.branches.rank, len(branches) - 1)
            if number % self.branches.size == owner:
                with self._clock.narrowed(branch=self._now.first + number, ahead=True):
                    mine.append(self._shared(branch, self.data))
        rounds = -(-len(branches) // self.branches.size)
        for round_ in range(rounds):
            # A rank without a branch in the last round sends its latest result again: shapes must be known.
            for owner, result in enumerate(_exchanged(mine[min(round_, len(mine) - 1)], self.branches)):
                number = round_ * self.branches.size + owner
                if number < len(branches):
                    self._now.ahead[number] = (predictions[number], set(branches[number]), result)

    def _state(self) -> tuple[tuple[Any, ...], bool]:
        """What a call depends on besides its arguments: hooks and adapters. And whether a hook keeps state.

        Modules do not come and go within a request: they are listed once.
        """
        if self._modules is None:
            self._modules = list(self.model.named_modules())
        return _state_of(self._modules)

    # --- rows --------------------------------------------------------------------------------------------------

    def _shared(self, arguments: Arguments, link: Link) -> Any:
        """The forward with its rows shared over ``link``; every rank gets all rows of the result."""
        batch = _batch_size(arguments.get(self._names[0]))
        if batch < 2 or (link.size == 1 and not self.one_by_one) or _takes_halves(self.model):
            with self._clock.narrowed(rows=(0, batch)):
                return self._forward(*arguments.args, **arguments.kwargs)
        counts = even_cut(batch, link.size)
        start, count = offsets(counts)[link.rank], counts[link.rank]
        # A rank without rows computes the last one along, so that every rank of its group takes part alike.
        take = slice(start, start + count) if count else slice(batch - 1, batch)
        batched = _batched(arguments, batch, self.unbatched, self.listed)
        if self.one_by_one:
            rows = [slice(row, row + 1) for row in range(take.start, take.stop)]
            output = _joined([self._rows(arguments, batched, row, link) for row in rows])
        else:
            output = self._rows(arguments, batched, take, link)
        return _map(output, lambda rows: _gathered(rows, counts, link), lambda rows: _gathered_list(rows, counts, link))

    def _rows(self, arguments: Arguments, batched: list[str], take: slice, link: Link) -> Any:
        part = Arguments(self._names, tuple(arguments.args), arguments.kwargs)
        for path in batched:
            part.set(path, self._cut(arguments.get(path), take))
        with self._clock.narrowed(rows=(take.start, take.stop), link=link.name):
            return self._forward(*part.args, **part.kwargs)

    def _cut(self, value: Any, take: slice) -> Any:
        """Some rows of an argument; the same tensor as in the step before, if the argument is."""
        if not isinstance(value, Tensor):
            return _some(value, take)
        key = ("rows", seen(value).key, take.start, take.stop)
        part = self._clock.values.found(key, lambda: seen(_some(value, take)), (value,))
        return part.value if seen(part.value).key == part.key else _some(value, take)


class RowSplit:
    """Shares the rows of a method's tensors over ranks: the VAE's decode.

    Args:
        owner, name: the method; replaced on the instance until `close`.
        link: ranks that share the rows.
        one_by_one: every row by itself, as in `BatchParallel`.

    Attributes:
        open: whether a request of these ranks is in progress; outside of one every rank decodes what it is given, which
            may be its own.
    """

    def __init__(self, owner: Any, name: str, link: Link, one_by_one: bool = False) -> None:
        self.link = link
        self.one_by_one = one_by_one
        self.open = False
        self._restore = Patch(owner, name, self._call)
        self.close = self._restore.undo

    def _call(self, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        link, batch = self.link, rows.shape[0]
        # A decoder that is told a number of frames has the frames of a video in its rows, and mixes them.
        if batch < 2 or not self.open or "num_frames" in kwargs:
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
        return link.all_gather(rows[: counts[link.rank]].contiguous(), counts, dim=0)

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
            parts = link.all_gather_list([tensor], [[tuple(tensor.shape)]] * link.size)
            # What a rank sends may be one piece of memory for all receivers, and pipelines may write to a result.
            return [part if rank == link.rank else part.clone() for rank, (part,) in enumerate(parts)]

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


def _alike(one: Seen, other: Seen) -> bool:
    """Whether both are plain tensors of one shape."""
    a, b = one.value, other.value
    return type(a) is type(b) is Tensor and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _state_of(modules: list[tuple[str, nn.Module]]) -> tuple[tuple[Any, ...], bool]:
    """Hooks and adapters of modules, and whether a hook keeps state."""
    worn: list[Any] = []
    stateful = False
    for path, module in modules:
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


class Rows(Strategy):
    """Rows of the batch and branches of guidance of every transformer."""

    name = "data and cfg"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.rows: list[BatchParallel] = []

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`. Also on one device in reproducible mode: its rows run one by one."""
        return config.data * config.cfg > 1 or config.reproducible

    def apply(self, undo: ExitStack) -> None:
        """See `Strategy.apply`."""
        mesh = self.context.mesh
        for model in self.context.models:
            layout = model.layout
            rows = BatchParallel(
                model.model,
                model.chain,
                mesh.batch,
                mesh.data,
                mesh.cfg,
                layout.unbatched,
                layout.listed,
                self.context.config.reproducible,
                clock=self.context.clock,
                timestep=timestep_of(model.model, layout),
            )
            self.rows.append(model.add(rows))
            undo.callback(rows.close)

    def begin_request(self, request: Request) -> None:
        """See `Strategy.begin_request`."""
        for rows in self.rows:
            rows.begin_request()

    def end_request(self, failed: bool) -> None:
        """See `Strategy.end_request`."""
        for rows in self.rows:
            rows.end_request(failed)


class DecodedRows(Strategy):
    """Rows of the batch in the decoder of every pipeline."""

    name = "data and cfg"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._splits: dict[int, RowSplit] = {}

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return Rows.wanted(config)

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        """See `Strategy.attach`. Pipelines that share a decoder are decoded by the request that is open."""
        vae = getattr(pipe, "vae", None)
        if vae is not None:
            split = RowSplit(vae, "decode", self.context.mesh.batch, self.context.config.reproducible)
            self._splits[id(pipe)] = split
            undo.callback(self._splits.pop, id(pipe))
            undo.callback(split.close)

    def begin_request(self, request: Request) -> None:
        """See `Strategy.begin_request`."""
        split = self._splits.get(id(request.pipe))
        if split is not None:
            split.open = True

    def end_request(self, failed: bool) -> None:
        """See `Strategy.end_request`."""
        for split in self._splits.values():
            split.open = False

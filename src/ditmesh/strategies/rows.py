"""Batch parallelism: rows of the batch, and branches of classifier-free guidance, shared over ranks.

A transformer treats the rows of its batch independently, so cutting them changes nothing. Guidance (Ho &
Salimans 2022, arXiv:2207.12598) comes in two styles. *Batched* pipelines put all branches in one call: they
are rows like any other. *Sequential* pipelines call the transformer once per branch and step; there each
rank runs another branch at the step's first call, with arguments predicted from the step before, the results
are exchanged, and the later calls are answered from them once their arguments have proved to be as predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..comm import Link
from ..comm.autograd import all_gather
from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.alignment import ALIGNMENT
from ..core.arguments import MISSING, Arguments, covers
from ..core.clock import CallClock, TransformerCall, timestep_of
from ..core.objects import holds_tensors
from ..core.partition import Partition, even_cut
from ..core.patching import Patch, Proceed
from ..core.request import RequestValue
from ..core.values import SeenValue, is_plain, seen, tracked
from ..errors import ConfigError, InputError, LayoutError
from ..layout import TokenLayout
from ..layout.forms import argument_kind
from ..parts.banded import Banded
from ..parts.lazy import LazyPatches, Owners
from .base import Context, ParallelModel, Request, Strategy
from .caches import diffusers_hooks
from .heads import takes_batch_apart
from .hooks import ModelHooks

# Stands among the arguments of a call for what else the result depends on. No argument has such a name.
_STATE = "<state>"

# Types of values that hold nothing of an earlier call, and compare.
_PLAIN = (int, float, complex, str, bytes, torch.Size, type(None), torch.dtype, torch.device, np.generic)


@dataclass
class _StepCalls:
    """The calls of one transformer in one step: the branch of the first, and their arguments by path.

    ``ahead`` are results computed ahead, by the call's number, each with the arguments it was computed for and the
    paths of those that are not the first call's.
    """

    first: int = 0
    calls: list[dict[str, SeenValue]] = field(default_factory=list)
    ahead: dict[int, tuple[dict[str, SeenValue], set[str], Any]] = field(default_factory=dict)


@dataclass
class _Branches:
    """The branches of guidance of one request: calls of the step before and of this one, which is number ``at``.

    ``modules`` are those of the transformer, once they are known; ``mistaken`` says on the device whether a timestep
    that was taken for granted was another one.
    """

    before: _StepCalls = field(default_factory=_StepCalls)
    now: _StepCalls = field(default_factory=_StepCalls)
    at: tuple[int, int] | None = None
    modules: list[tuple[str, nn.Module]] | None = None
    mistaken: Tensor | None = None


class BatchParallel:
    """A transformer's forward, with its rows and branches shared out.

    Args:
        model: `around_call` is to be a layer around its forward.
        mesh: its guidance and data axes share rows; where the guidance axis shares branches, the data axis alone does.
        one_by_one: run every row by itself, so that its bits do not depend on the rows beside it.
    """

    def __init__(self, model: ParallelModel, mesh: Mesh, clock: CallClock, one_by_one: bool = False) -> None:
        self.model = model.model
        self._hooks = model.get(ModelHooks)
        self.one_by_one = one_by_one
        self.rows, self.data, self.branches = mesh.batch, mesh.data, mesh.cfg
        # Ranks that hold pieces of one another's weights make equally many calls.
        self._in_step = mesh.config.shard > 1
        self._clock = clock
        self._timestep = timestep_of(model.model, model.layout)
        # Ranks of the data and guidance axes that have had something to do, at most.
        self._busy = 0
        self._of = RequestValue(_Branches)

    def begin_request(self) -> None:
        # The same request gives the same bits twice.
        self._of.renew()

    def end_request(self, failed: bool = False) -> None:
        """The request is over: no argument of it is held, and timesteps that were taken for granted are looked at."""
        mistaken = self._of.renew().mistaken
        if mistaken is not None and not failed and bool(mistaken):
            raise InputError(
                f"{type(self.model).__name__} was called at two timesteps between two steps of the scheduler, which "
                f"cfg={self.branches.size} cannot foresee, so that the result is wrong; use cfg=1"
            )

    def idle(self) -> str | None:
        """After a request: which ranks had nothing to do, in a sentence, if some had not."""
        if self._busy == 0 or self._busy >= self.rows.size:
            return None
        axes = " and ".join(f"{link.name}={link.size}" for link in (self.data, self.branches) if link.size > 1)
        idle = f"{self.rows.size - self._busy} of {self.rows.size} ranks"
        return (
            f"{axes} share rows and branches of guidance, of which the model is asked for {self._busy}: {idle} have "
            "nothing to do of their own"
        )

    # --- one call ------------------------------------------------------------------------------------------

    def around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """One call of the transformer, of whole rows and of one branch."""
        if self.branches.size == 1:
            return self._shared(proceed, arguments, self.rows)
        call = self._clock.call
        state, stateful = self._state(arguments)
        given, of = self._seen(arguments, state), self._of.value
        if (call.request, call.step) != of.at:
            of.at = (call.request, call.step)
            of.before, of.now = of.now, _StepCalls(call.branch)
            # A cache (a hook's, or an object that a pipeline passes) remembers every branch by itself: each rank runs
            # all of them, as one device does.
            branches = [] if stateful else self._branches_of(of.before, given, arguments.names[0])
            if branches:
                self._run_ahead(proceed, arguments, branches, state)
        number = len(of.now.calls)
        of.now.calls.append(given)
        if number in of.now.ahead:
            predicted, own, output = of.now.ahead.pop(number)
            if self._as_predicted(given, predicted, own, call):
                return output
        # A cache with one state for all calls is given the same rows in each of them.
        sequential = bool(of.now.ahead) or (number > 0 and not stateful)
        # Other values stay whole until it is known whether the pipeline has its branches in calls of their own.
        new = not (of.before.calls or self._hooks.layout.rows) and self.data.size == 1
        return self._shared(proceed, arguments, self.data if sequential or new else self.rows)

    def _seen(self, arguments: Arguments, state: tuple[Any, ...]) -> dict[str, SeenValue]:
        plain = {path: SeenValue(value, None) for path, value in arguments.others() if isinstance(value, _PLAIN)}
        return {**{path: seen(value) for path, value in arguments.leaves()}, **plain, _STATE: SeenValue(state, None)}

    def _as_predicted(
        self, given: dict[str, SeenValue], predicted: dict[str, SeenValue], paths: set[str], call: TransformerCall
    ) -> bool:
        """True if a call's arguments are the predicted ones; ``paths``: of those that are not the first call's."""
        if given.keys() != predicted.keys():
            return False
        for path, value in given.items():
            expected = predicted[path]
            time = self._timestep is not None and covers(self._timestep, path) and path not in paths
            a, b = value.value, expected.value
            alike = is_plain(a) and is_plain(b) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            if time and call.counted and alike and value.key != expected.key:
                # Pipelines compute it again for every branch. That it is the step's one the scheduler's count says;
                # the values are compared on the device, and read when the request is over.
                differs = (a != b).any()
                of = self._of.value
                of.mistaken = differs if of.mistaken is None else of.mistaken | differs
                self._clock.values.assume_equal(value, expected)
            elif not self._clock.values.same(value, expected):
                return False
        return True

    # --- guidance branches ------------------------------------------------------------------------------------

    def _branches_of(self, step: _StepCalls, given: dict[str, SeenValue], latents: str) -> list[dict[str, Any]]:
        """For every call of a step, the arguments in which it differed from the first; empty if it was not guidance.

        Calls that differ in nothing, or in the latents themselves (a sampler that asks twice at one timestep), are not
        branches of guidance. Calls of a model that was changed in between (guidance by skipped layers hangs hooks on it
        for one branch only) cannot be run ahead of that change. ``given`` are of the first call of the next step.
        """
        if len(step.calls) < 2:
            return []
        first, *others = step.calls
        main = [path for path in first if covers(latents, path)]
        differences: list[dict[str, Any]] = [{}]
        for call in others:
            if call.keys() != first.keys():
                return []
            differing = {path: item for path, item in call.items() if not self._clock.values.same(item, first[path])}
            if not differing or _STATE in differing:
                return []
            # Latents are others in every step; some models are given their prompt first.
            if any(path in differing for path in main) and not all(
                path in given and self._clock.values.same(given[path], first[path]) for path in main
            ):
                return []
            differences.append({path: item.value for path, item in differing.items()})
        return differences

    def _run_ahead(
        self, proceed: Proceed, arguments: Arguments, branches: list[dict[str, Any]], state: tuple[Any, ...]
    ) -> None:
        now = self._of.value.now
        mine: list[Any] = []
        predictions: list[dict[str, SeenValue]] = []
        busy = min(len(branches), self.branches.size) * min(_rows_of(arguments), self.data.size)
        self._busy = max(self._busy, busy)
        last = len(branches) - 1
        along = self._in_step and last >= self.branches.size and self.branches.rank > last % self.branches.size
        for number, differing in enumerate(branches):
            branch = arguments.copy()
            for path, value in differing.items():
                branch.set(path, value)
            predictions.append(self._seen(branch, state))
            # With fewer branches than ranks, the ranks left over run the last one along; in the last round of more
            # only where others need their calls.
            if number % self.branches.size == min(self.branches.rank, last) or (along and number == last):
                with self._clock.narrowed(branch=now.first + number, ahead=True):
                    mine.append(self._shared(proceed, branch, self.data))
        for round_ in range(-(-len(branches) // self.branches.size)):
            # A rank without a branch in the last round sends its latest result again: shapes must be known.
            for owner, result in enumerate(_exchanged(mine[min(round_, len(mine) - 1)], self.branches)):
                number = round_ * self.branches.size + owner
                if number < len(branches):
                    now.ahead[number] = (predictions[number], set(branches[number]), result)

    def _state(self, arguments: Arguments) -> tuple[tuple[Any, ...], bool]:
        """What a call depends on besides values, and whether an object or a hook may keep tensors from call to call."""
        objects = [(path, value) for path, value in arguments.others() if not isinstance(value, _PLAIN)]
        state: list[Any] = [(path, argument_kind(value)) for path, value in objects]
        # An object may be empty now, and be filled by the call itself.
        stateful = any(callable(value) or hasattr(value, "__dict__") or holds_tensors(value) for _, value in objects)
        for path, module in self._modules():
            # Keys of torch's hooks are never used twice: a hook that is registered again is another one.
            state += [(path, *hooks) for hooks in (module._forward_pre_hooks, module._forward_hooks) if hooks]
            for name, hook in diffusers_hooks(module).items():
                state.append((path, name))
                stateful = stateful or bool(getattr(hook, "_is_stateful", False))
            adapters = getattr(module, "active_adapters", None)
            if isinstance(adapters, list):
                scales = tuple(getattr(module, "scaling", {}).items())
                state.append((path, *adapters, getattr(module, "disable_adapters", False), scales))
        return tuple(state), stateful

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """The transformer's modules, which do not come and go within a request."""
        of = self._of.value
        if of.modules is None:
            of.modules = list(self.model.named_modules())
        return of.modules

    # --- rows --------------------------------------------------------------------------------------------------

    def _shared(self, proceed: Proceed, arguments: Arguments, link: Link) -> Any:
        """The forward with its rows shared over ``link``; every rank gets all rows of the result."""
        batch = _rows_of(arguments)
        self._busy = max(self._busy, min(batch, link.size))
        if batch < 2 or (link.size == 1 and not self.one_by_one) or self._takes_parts():
            with self._clock.narrowed(rows=(0, batch)):
                return proceed(arguments)
        if not self._hooks.layout.rows:
            raise LayoutError(
                f"samples of this call of {type(self.model).__name__} cannot be run apart: cut out of its arguments, "
                "one of them comes out otherwise; leave data and cfg at 1"
            )
        layout = self._hooks.layout
        batched = batched_in(arguments, batch, layout)
        names = (*layout.unbatched, *layout.listed, *batched)
        for path, value in arguments.leaves():
            # A single row counts for all samples. Others, left whole beside some of the samples, would be taken for
            # theirs.
            several = isinstance(value, Tensor) and value.dim() and value.shape[0] > 1
            if several and not any(covers(name, path) for name in names):
                raise InputError(
                    f"{layout.model} was called with {batch} rows of {arguments.names[0]} and {value.shape[0]} of "
                    f"{path}, which cannot be shared out; give a row for every image (repeat embeddings "
                    "num_images_per_prompt times)"
                )

        def run(take: slice) -> Any:
            part = arguments.copy()
            for path, dim in batched.items():
                part.set(path, self._cut(arguments.get(path), take, dim, batch))
            with self._clock.narrowed(rows=(take.start, take.stop), link=link.name):
                return proceed(part)

        listed = isinstance(arguments.get(arguments.names[0]), list)
        return _share_rows(batch, link, self.one_by_one, run, listed=listed, in_step=self._in_step)

    def _takes_parts(self) -> bool:
        """True if something in the model takes a part of the rows for one branch of guidance: the batch stays whole.

        Faster Cache does, and attention into which perturbed attention guidance puts its processors for a call.
        """
        if any(getattr(hook, "is_guidance_distilled", None) is False for hook in diffusers_hooks(self.model).values()):
            return True
        return any(takes_batch_apart(module) for _, module in self._modules())

    def _cut(self, value: Any, take: slice, dim: int, batch: int) -> Any:
        """An argument of some of the samples; the same tensor as in the step before, if the argument is."""
        each = (value.shape[dim] if isinstance(value, Tensor) else len(value)) // batch
        take = slice(each * take.start, each * take.stop)
        if not isinstance(value, Tensor):
            return some_rows(value, take)
        if tracked(value):
            # A tensor that was cut without a gradient has none.
            return some_rows(value, take, dim)
        key = ("rows", seen(value).key, take.start, take.stop, dim)
        part = self._clock.values.found(key, lambda: seen(some_rows(value, take, dim)), (value,))
        return part.value if seen(part.value).key == part.key else some_rows(value, take, dim)


def _rows_of(arguments: Arguments) -> int:
    main = arguments.get(arguments.names[0])
    # A list has an entry per row.
    return main.shape[0] if isinstance(main, Tensor) else len(main)


def batched_in(arguments: Arguments, batch: int, layout: TokenLayout) -> dict[str, int]:
    """The arguments of a transformer's call that have a row or several per sample, by path with the dimension."""
    listed, known = layout.listed, (*layout.unbatched, *layout.listed)

    def has_rows(path: str, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        if any(covers(name, path) for name in layout.grouped):
            return value.shape[0] % batch == 0
        return value.shape[0] == batch and not any(covers(name, path) for name in known)

    paths = [path for path in listed if isinstance(arguments.get(path), list) and len(arguments.get(path)) == batch]
    paths += [path for path, value in arguments.leaves() if has_rows(path, value)]
    dims = {path: dim for path, dim in layout.batched if arguments.get(path) is not MISSING}
    return {**dict.fromkeys(paths, 0), **dims}


def _share_rows(
    batch: int, link: Link, one_by_one: bool, run: Callable[[slice], Any], listed: bool = False, in_step: bool = False
) -> Any:
    """The result of ``run`` for all rows of a batch; it is called with this rank's rows, or with single rows.

    It returns tensors with a row per sample, in tuples, lists or mappings; ``listed``: lists have an item per sample.
    ``in_step``: every rank calls ``run`` equally often.
    """
    leaf = (lambda value: isinstance(value, list)) if listed else None
    shares = Partition((even_cut(batch, link.size),))
    ((start, count),) = shares.places(link.rank)
    # A rank without rows computes the last one along, so that every rank of its group takes part alike.
    take = slice(start, start + count) if count else slice(batch - 1, batch)
    if one_by_one:
        outputs = [run(slice(row, row + 1)) for row in range(take.start, take.stop)]
        for _ in range(len(outputs), max(shares.lengths) if in_step else 0):
            run(slice(take.stop - 1, take.stop))
        output = tree_map(_joined, *outputs, is_leaf=leaf)
    else:
        output = run(take)
    return tree_map(lambda part: _gathered(part, shares, link), output, is_leaf=leaf)


def some_rows(value: Any, take: slice, dim: int = 0) -> Any:
    """Some rows of a tensor or a list. In memory of their own: kernels may look at where a tensor begins."""
    part = value[(slice(None),) * dim + (take,)] if dim else value[take]
    return part.clone() if isinstance(part, Tensor) and part.data_ptr() % ALIGNMENT else part


def _joined(first: Any, *others: Any) -> Any:
    """Results of single rows as one of all of them."""
    if isinstance(first, Tensor):
        return torch.cat([first, *others]) if others else first
    return sum(others, first) if isinstance(first, list) else first


def _gathered(rows: Any, shares: Partition, link: Link) -> Any:
    """All ranks' rows of a tensor, or of a list of equally shaped tensors, one per row."""
    if isinstance(rows, list):
        return list(_gathered(torch.stack(rows), shares, link).unbind())
    if not isinstance(rows, Tensor):
        return rows
    counts = shares.lengths

    def gather(rows: Tensor) -> Tensor:
        return all_gather(link, rows[: counts[link.rank]].contiguous(), counts, dim=0)

    if isinstance(rows, LazyPatches) and rows.settled is None:
        # Each patch is gathered when it is wanted, in the same order on all ranks; its owner is known now.
        owners, like = rows.owners, torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype, device="meta")
        everybody = owners.made(
            ("gather", link.name, counts), lambda: Owners(gather(owners.of.int()).short(), owners.patches)
        )
        return rows.map_versions(gather, like, everybody)
    return gather(rows)


def _exchanged(output: Any, link: Link) -> list[Any]:
    def parts_of(tensor: Tensor) -> list[Tensor]:
        tensor = tensor.contiguous()
        parts = link.all_gather_list([tensor], [[tuple(tensor.shape)]] * link.size)
        # A rank's message may be one piece of memory for all receivers, and pipelines may write to a result.
        return [part if rank == link.rank else part.clone() for rank, (part,) in enumerate(parts)]

    def exchange(part: Any) -> Sequence[Any]:
        if isinstance(part, LazyPatches) and part.settled is None:
            return part.map_to_several(parts_of, link.size)
        return parts_of(part) if isinstance(part, Tensor) else [part] * link.size

    parts, form = tree_flatten(output)
    return [tree_unflatten(rank, form) for rank in zip(*map(exchange, parts), strict=True)]


class BatchRows(Strategy):
    """Rows of the batch and branches of guidance of every transformer."""

    name = "data and cfg"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        # On one device in reproducible mode, too: its rows run one by one.
        return config.data * config.cfg > 1 or config.reproducible

    def apply(self, undo: ExitStack) -> None:
        context = self.context
        for model in context.models:
            rows = model.add(BatchParallel(model, context.mesh, context.clock, context.config.reproducible))
            undo.callback(model.chain.add(rows.around_call))

    def before_training(self, model: nn.Module, arguments: Arguments) -> None:
        if (cfg := self.context.config.cfg) > 1:
            raise ConfigError(
                f"cfg={cfg} cannot be trained: branches of guidance are foreseen without gradients; use data={cfg} for "
                "the rows of a batch"
            )

    def notes(self) -> list[str]:
        return [idle for model in self.context.models if (idle := model.get(BatchParallel).idle())]

    def begin_request(self, request: Request) -> None:
        for model in self.context.models:
            model.get(BatchParallel).begin_request()

    def end_request(self, failed: bool) -> None:
        for model in self.context.models:
            model.get(BatchParallel).end_request(failed)


class DecodedRows(Strategy):
    """Rows of the batch in the VAE's decode of every pipeline, inside of its requests."""

    name = "data and cfg"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # The pipeline of the open request.
        self._open: Any = None

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return BatchRows.wanted(config)

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        vae = getattr(pipe, "vae", None)
        if vae is None:
            return

        def decode(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
            batch = rows.shape[0]
            # A decoder that is given a number of frames has the frames of a video in its rows, and mixes them.
            # Rows of one that is cut in bands are everywhere already.
            if batch < 2 or self._open is not pipe or "num_frames" in kwargs or isinstance(rows, Banded):
                return patch.original(rows, *args, **kwargs)

            def run(take: slice) -> Any:
                def part(value: Any) -> Any:
                    # Whatever has a row per sample goes with it: the noise level of a decoder that removes noise.
                    rowed = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch
                    return some_rows(value, take) if rowed else value

                return patch.original(part(rows), *map(part, args), **{name: part(kwargs[name]) for name in kwargs})

            return _share_rows(batch, self.context.mesh.batch, self.context.config.reproducible, run)

        patch = Patch(vae, "decode", decode)
        undo.callback(patch.undo)

    def begin_request(self, request: Request) -> None:
        self._open = request.pipe

    def end_request(self, failed: bool) -> None:
        self._open = None

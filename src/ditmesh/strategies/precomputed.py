"""What does not depend on the image is computed once for all steps: modulation, embedders, the text's keys and values.

A third of the weights of FLUX.1, Stable Diffusion 3.5 or Qwen-Image sees the timestep and the text alone, and every
rank holds all of it. A partial run (`core.partial_run`) of the first call finds these modules in any
transformer: nothing goes by names. Their values for all further timesteps follow by a replay of the few operators
behind the timestep. From then on the modules return these values, and on a GPU their weights wait in host memory for
the end of the request. A call whose arguments are others than foreseen is computed when it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..config import ParallelConfig
from ..core.arguments import Arguments, covers, parameter_names
from ..core.clock import timestep_of
from ..core.partial_run import PartialRun, unknown_like
from ..core.patching import Patch, Proceed, refuse_reading
from ..core.values import SeenValue, is_plain, seen, version_of
from ..errors import ConfigError, LayoutError
from ..layout import TokenLayout
from ..layout.between import fresh
from ..layout.derive import without_hooks
from ..layout.forms import form_of
from ..layout.types import CallForm
from .base import Context, ParallelModel, Request, Strategy
from .pipefusion.stages import give_up, take_back
from .tensor.parallel import TensorParallel

# Calls of a request that may be other than foreseen; then the modules compute as ever until it ends.
MAX_SURPRISES = 4

# The values of one call: for every module what it returns, call by call.
Row = dict[str, list[Any]]


@dataclass
class _Batch:
    """Calls of one form whose values were computed together.

    ``compares``: how many are still to be compared with the modules themselves: the first, and the first replayed one.
    """

    form: CallForm
    compares: int


@dataclass
class _Foreseen:
    """A call that is to come.

    Attributes:
        batch: the calls that it was computed with.
        branch: of guidance.
        timestep, others: its tensors and numbers, but for those of the image, by path.
        row: its values.
    """

    batch: _Batch
    branch: int
    timestep: Mapping[str, SeenValue]
    others: Mapping[str, SeenValue]
    row: Row


class PrecomputedModel:
    """The precomputed values of one transformer.

    Attributes:
        modules: paths of those whose values the latest calls took from a row.
        frees_weights: whether their weights leave the device meanwhile.
        note: the reason why nothing was computed ahead in the latest request, a sentence; empty: something was.
        hits: calls of the latest request that were foreseen.
    """

    def __init__(self, model: ParallelModel, context: Context) -> None:
        self.modules: tuple[str, ...] = ()
        self.hits = 0
        self.note = ""
        self._model, self._context = model.model, context
        self._parallel = model
        # On a CPU, host memory is where they are.
        self.frees_weights = context.mesh.device.type != "cpu"
        self._timestep = timestep_of(model.model, model.layout)
        # Arguments that were others in later steps, how often, and those taken for the image's.
        self._changes: Counter[str] = Counter()
        self._image: set[str] = set()
        # Modules that see a rank's tokens, and not those of one device.
        self._excluded: set[str] = set()
        self._rows: list[_Foreseen] = []
        # Forms of calls whose values were compared.
        self._trusted: set[CallForm] = set()
        # Weights and settings of the modules that the rows were computed with, by path.
        self._states: dict[str, Any] = {}
        self._surprises = 0
        # Whether a pipeline's call is in progress, in which weights stay what they are.
        self._open = False
        self._stand_ins: dict[str, Patch] = {}
        # By path of a module whose weights are in host memory, these.
        self._away: dict[str, dict[Tensor, Tensor]] = {}
        # The row of the call in progress, the calls of each module so far, and whether values are compared.
        self._row: Row = {}
        self._calls: dict[str, int] = {}
        self._compares = False

    # --- a request ---------------------------------------------------------------------------------------

    def begin(self, of_pipeline: bool) -> None:
        """Begin a request: nothing is known of it."""
        self.end()
        self.hits, self.modules, self._open, self.note = 0, (), of_pipeline, ""

    def end(self) -> None:
        """End the request: weights come back, and values are dropped."""
        self._rows, self._row, self._states, self._surprises, self._open = [], {}, {}, 0, False
        self._bring_all()

    def close(self) -> None:
        """Undo everything."""
        self.end()
        for patch in self._stand_ins.values():
            patch.undo()
        self._stand_ins.clear()

    # --- a call ------------------------------------------------------------------------------------------

    def around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """A layer around a whole call."""
        foreseen = self._foreseen(arguments)
        if foreseen is None:
            self._bring_all()
            return proceed(arguments)
        batch = foreseen.batch
        self._leave()
        self._row, self._calls, self._compares = foreseen.row, {}, batch.compares > 0
        try:
            result = proceed(arguments)
        finally:
            self._row = {}
        if batch.compares:
            self._settle(foreseen)
            batch.compares -= 1
            if not batch.compares:
                self._trusted.add(batch.form)
        return result

    def _settle(self, foreseen: _Foreseen) -> None:
        """A call has been compared: leave out what a rank does otherwise than one device."""
        self._excluded |= {path for path, values in foreseen.row.items() if self._calls.get(path, 0) > len(values)}
        for row in self._rows:
            for path in self._excluded:
                row.row.pop(path, None)
        self.modules = tuple(path for path in self.modules if path not in self._excluded)
        for path in self._excluded & self._away.keys():
            self._bring(path)

    def _foreseen(self, arguments: Arguments) -> _Foreseen | None:
        """The call with its values, which are computed where it was not foreseen; None: it is to run as ever."""
        parts = self._parts(arguments) if self._open else None
        if parts is None and self._open:
            self.note = f"precompute: {type(self._model).__name__} is called with an object that may change in a call"
        if parts is None or self._surprises > MAX_SURPRISES:
            return None
        if any(state != self._state(path) for path, state in self._states.items()):
            # Another adapter, or another strength of it, inside of a request.
            self._rows, self._states = [], {}
            self._surprises += 1
        same, branch = self._context.clock.values.all_same, self._context.clock.call.branch
        for foreseen in self._rows:
            if same(parts[1], foreseen.others) and same(parts[0], foreseen.timestep):
                self.hits += 1
                return foreseen
        if before := [row for row in self._rows if row.branch == branch]:
            self._surprises += 1
            self._learn(before, parts[1])
            parts = self._parts(arguments)
            assert parts is not None
        try:
            rows = self._computed(arguments, *parts)
        except Exception as error:
            # What runs is decided by values of the image, or it runs outside of torch. An error of the model itself
            # comes again when it runs as ever.
            self._surprises = MAX_SURPRISES + 1
            self.note = f"precompute: nothing of {type(self._model).__name__} was computed ahead ({error})"
            return None
        self._rows = [row for row in self._rows if row.branch != branch] + rows
        return rows[0]

    def _parts(self, arguments: Arguments) -> tuple[dict[str, SeenValue], dict[str, SeenValue]] | None:
        """The timestep, and the other arguments that are not the image's; None: one of them is an object."""
        timestep: dict[str, SeenValue] = {}
        others: dict[str, SeenValue] = {}
        for path, value in arguments.leaves():
            if self._is_image(arguments, path, value):
                continue
            if isinstance(value, Tensor) and not is_plain(value):
                return None
            time = self._timestep is not None and covers(self._timestep, path) and isinstance(value, Tensor)
            (timestep if time else others)[path] = seen(value)
        for path, value in arguments.others():
            if not isinstance(value, (str, float, bool, torch.dtype, type(None))):
                return None
            others[path] = seen(value)
        return timestep, others

    def _is_image(self, arguments: Arguments, path: str, value: Any) -> bool:
        return isinstance(value, Tensor) and (covers(arguments.names[0], path) or path in self._image)

    def _learn(self, before: list[_Foreseen], others: Mapping[str, SeenValue]) -> None:
        """A tensor that is another one in two steps is taken for the image from now on (residuals of a ControlNet)."""
        same, known = self._context.clock.values.same, before[0].others
        for path, value in others.items():
            earlier = known[path].value if path in known else None
            if isinstance(value.value, Tensor) and isinstance(earlier, Tensor) and not same(value, known[path]):
                self._changes[path] += value.value.shape == earlier.shape
        self._image |= {path for path, count in self._changes.items() if count > 1}

    # --- values ------------------------------------------------------------------------------------------

    def _computed(
        self, arguments: Arguments, timestep: Mapping[str, SeenValue], others: Mapping[str, SeenValue]
    ) -> list[_Foreseen]:
        """The values of a call, and of those that differ from it in nothing but a later timestep.

        `LayoutError`: a value of the image is needed to tell what runs.
        """
        self._bring_all()
        given = arguments.copy()
        for path, value in arguments.leaves():
            if self._is_image(arguments, path, value):
                given.set(path, unknown_like(value))
        run = PartialRun([value.value for value in timestep.values()])
        watch = _Watch(self._model, run, self._parallel.find(TensorParallel), given.args, given.kwargs)
        later = [] if run.tape.obstacle else self._later(timestep)
        row = {path: calls for path, calls in watch.outputs(1 + len(later)).items() if path not in self._excluded}
        placed = run.tape.placed(row)
        rows = [row, *(run.tape.run([*times.values()], placed) for times in later)]
        run.tape.release()
        for path in row:
            self._stand_in(path)
        self.modules, self._states = tuple(row), {path: self._state(path) for path in row}
        times = [timestep, *({path: seen(value) for path, value in each.items()} for each in later)]
        form, branch = form_of(arguments), self._context.clock.call.branch
        batch = _Batch(form, 0 if form in self._trusted else min(2, len(rows)))
        return [_Foreseen(batch, branch, time, others, row) for time, row in zip(times, rows, strict=True)]

    def _later(self, timestep: Mapping[str, SeenValue]) -> list[dict[str, Tensor]]:
        """The timesteps of the calls to come, in the form of this call's: the scheduler's, scaled as this one is."""
        scheduler = getattr(self._context.pipe, "scheduler", None)
        schedule = getattr(scheduler, "timesteps", None)
        if not isinstance(schedule, Tensor) or schedule.dim() != 1 or len(timestep) != 1:
            return []
        ((path, seen_now),) = timestep.items()
        now = seen_now.value
        for times in _scaled(schedule, scheduler, now):
            found = (times[:, None] == now.reshape(1, -1)).any(1).tolist()
            if True in found:
                place = found.index(True)
                return [{path: torch.where(now == times[place], time, now)} for time in times[place + 1 :]]
        return []

    def _state(self, path: str) -> list[Any]:
        """What a module computes with: its weights as they lie in memory, and the settings of it and its layers."""
        away = self._away.get(path, {})
        return [
            [
                *(None if each in away else (each.data_ptr(), version_of(each)) for each in module.parameters(False)),
                *((name, _plain(value)) for name, value in vars(module).items() if not name.startswith("_backward")),
            ]
            for module in self._model.get_submodule(path).modules()
        ]

    # --- modules -----------------------------------------------------------------------------------------

    def _stand_in(self, path: str) -> None:
        """Let a module return the values of the call in progress."""
        if path in self._stand_ins:
            return
        module = self._model.get_submodule(path)
        patch = Patch(module, "forward", module.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            values = self._row.get(path)
            if values is None:
                return patch.original(*args, **kwargs)
            number = self._calls.get(path, 0)
            self._calls[path] = number + 1
            if not self._compares:
                return fresh(values[number])
            with self._lent(path):
                result = patch.original(*args, **kwargs)
            for hook in module._forward_hooks.values():
                # Of the slices of all ranks, as the values that were computed ahead.
                if getattr(hook, "completes", False):
                    result = hook(module, args, result)
            if number < len(values):
                self._compare(path, result, values[number])
            return result

        patch.replace(forward)
        self._stand_ins[path] = patch

    def _compare(self, path: str, result: Any, value: Any) -> None:
        pairs = [*zip(tree_leaves(result), tree_leaves(value), strict=True)]
        if any(one.shape != other.shape for one, other in pairs if isinstance(one, Tensor)):
            # It has seen a rank's tokens.
            self._excluded.add(path)
        elif not all(torch.equal(one, other) for one, other in pairs if isinstance(one, Tensor)):
            raise LayoutError(
                f"{path} of {type(self._model).__name__} returns something else in a call than was computed ahead of "
                "it; leave precompute out"
            )

    # --- weights -----------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Weights of modules whose values are known in all foreseen calls go to host memory, on a GPU."""
        for path in self.modules if self.frees_weights else ():
            if path not in self._away and all(path in foreseen.row for foreseen in self._rows):
                self._away[path] = {}
                for parameter in self._model.get_submodule(path).parameters():
                    self._away[path][parameter] = parameter.data.to("cpu", copy=True)
                    give_up(parameter)
                self._states[path] = self._state(path)

    @contextmanager
    def _lent(self, path: str) -> Iterator[None]:
        """The weights of a module on the device, for one call of it."""
        weights = self._away.get(path, {})
        for parameter, value in weights.items():
            take_back(parameter, value.to(self._context.mesh.device, copy=True))
        try:
            yield
        finally:
            for parameter in weights:
                give_up(parameter)

    def _bring(self, path: str) -> None:
        for parameter, value in self._away.pop(path).items():
            take_back(parameter, value.to(self._context.mesh.device))

    def _bring_all(self) -> None:
        for path in [*self._away]:
            self._bring(path)

    def away(self) -> set[int]:
        """The parameters whose values are in host memory now, by id."""
        return {id(parameter) for weights in self._away.values() for parameter in weights}


def _plain(value: Any) -> Any:
    """A value of settings that compares by content; of what is no setting its identity."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return id(value)


def _scaled(schedule: Tensor, scheduler: Any, like: Tensor) -> Iterable[Tensor]:
    """A schedule in the forms in which pipelines hand it to transformers, in the dtype of a timestep."""
    most = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None) or 1000
    before = schedule.to(like.device)
    after = before.to(like.dtype)
    forms = (after, after / most, before / most, (most - after) / most, (most - before) / most, 1 - after / most)
    return (form.to(like.dtype) for form in forms if form.is_floating_point() or form is after)


class _Watch:
    """What every module of a model returns in a partial run of a call, and where its weights are read.

    ``slices`` of the model's weights, if a rank holds slices.
    """

    def __init__(
        self, model: nn.Module, run: PartialRun, slices: TensorParallel | None, args: Any, kwargs: Any
    ) -> None:
        self._model, self._run = model, run
        # Of weights by the mean of the ranks, so that all ranks decide alike.
        self._whole, self._ranks = ({}, 1) if slices is None else (slices.whole_shapes(), slices.link.size)
        self._returned: dict[str, list[tuple[Any, list[int | None]]]] = {}
        self._unknown: set[str] = set()
        self._inside: list[str] = []
        # Parameters that are read while none of their modules runs.
        self._loose: set[int] = set()
        self._owners: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(parameter), []).append(name)
        run.listener = self._read
        with torch.no_grad(), without_hooks(model), ExitStack() as undo:
            for path, module in model.named_modules():
                if path:
                    enter, leave = partial(self._entered, path), partial(self._left, path)
                    undo.callback(module.register_forward_pre_hook(enter).remove)
                    undo.callback(module.register_forward_hook(leave).remove)
            with run:
                model(*fresh(args), **fresh(kwargs))

    def _entered(self, path: str, *_: Any) -> None:
        self._inside.append(path)

    def _left(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        self._inside.pop()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not tensors or any(map(self._run.is_unknown, tensors)):
            self._unknown.add(path)
        self._returned.setdefault(path, []).append((output, [version_of(tensor) for tensor in tensors]))

    def _read(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            names = self._owners.get(id(tensor))
            if names and not any(name.startswith(f"{path}.") for name in names for path in self._inside):
                self._loose.add(id(tensor))

    def outputs(self, times: int) -> Row:
        """What the outermost modules return that see nothing of the image, where their weights are larger than that."""
        row: Row = {}
        for path, calls in self._returned.items():
            outer = any(path.startswith(f"{other}.") for other in row)
            if path in self._unknown or outer or not self._pays(path, calls, times):
                continue
            for inner in [other for other in row if other.startswith(f"{path}.")]:
                del row[inner]
            row[path] = [output for output, _ in calls]
        return row

    def value_bytes(self, tree: Any, times: int) -> int:
        """Bytes of the tensors in a tree, for so many timesteps where they follow from the timestep."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        return sum(tensor.nbytes * (times if self._run.tape.follows(tensor) else 1) for tensor in tensors)

    def _pays(self, path: str, calls: list[tuple[Any, list[int | None]]], times: int) -> bool:
        parameters = [*self._model.get_submodule(path).parameters()]
        alone = all(name.startswith(f"{path}.") for each in parameters for name in self._owners[id(each)])
        if not parameters or not alone or any(id(each) in self._loose for each in parameters):
            return False
        held = 0
        for output, versions in calls:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            # Somebody has written to it since.
            if [version_of(tensor) for tensor in tensors] != versions:
                return False
            held += self.value_bytes(tensors, times)
        return held < sum(
            self._whole[parameter].numel() * parameter.element_size() / self._ranks
            if parameter in self._whole
            else parameter.nbytes
            for parameter in parameters
        )


def bytes_ahead(
    model: nn.Module, inputs: Mapping[str, Any], times: Sequence[Tensor], steps: int
) -> tuple[float, float]:
    """Bytes of the weights of modules whose values could be computed ahead, and of these values for all steps.

    Args:
        model: whole, maybe itself without values.
        inputs: of a call, by name; the first argument of the model is the image.
        times: those of the inputs that are other ones in every step.

    Raises:
        LayoutError: a value of the image is needed to tell what runs.
    """
    image = parameter_names(type(model).forward)[0]
    given = {**inputs, image: tree_map(lambda v: unknown_like(v) if isinstance(v, Tensor) else v, inputs[image])}
    watch = _Watch(model, PartialRun(times), None, (), given)
    row = watch.outputs(steps)
    weights = {id(each): each.nbytes for path in row for each in model.get_submodule(path).parameters()}
    return float(sum(weights.values())), float(watch.value_bytes(row, steps))


class Precomputed(Strategy):
    """Values of modules that see nothing of the image, computed once for all steps of a request."""

    name = "values computed ahead"
    no_gradient = "precompute=True computes for the timesteps of a scheduler"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.precompute

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            raise ConfigError(
                f"precompute=True returns values in the place of modules, which {type(model).__name__} has compiled; "
                "use one of them"
            )
        if any("_hf_hook" in vars(module) for module in model.modules()):
            raise ConfigError(
                f"precompute=True and offloading both move weights of {type(model).__name__}; use one of them"
            )

    def prepare(self, pipe: Any) -> None:
        if pipe is None:
            raise ConfigError(
                "precompute=True needs a pipeline, whose scheduler tells the timesteps; parallelize the pipeline"
            )

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            part = model.add(PrecomputedModel(model, self.context))
            undo.callback(refuse_reading(model.model, part.away, "nothing, as its values are computed ahead,"))
            undo.callback(part.close)
            undo.callback(model.chain.add(part.around_call))

    def begin_request(self, request: Request) -> None:
        for model in self.context.models:
            model.get(PrecomputedModel).begin(request.pipe is not None)

    def end_request(self, failed: bool) -> None:
        for model in self.context.models:
            model.get(PrecomputedModel).end()

    def notes(self) -> list[str]:
        return [note for model in self.context.models if (note := model.get(PrecomputedModel).note)]

"""What does not depend on the image is computed once for all steps: modulation, embedders, the text's keys and values.

A third of the weights of FLUX.1, Stable Diffusion 3.5 or Qwen-Image sees the timestep and the text alone, and every
rank holds all of it. A partial run (`core.partial_run`) of the first call finds these modules in any
transformer: nothing goes by names. The few operators behind the timestep run for all further timesteps as well. From
then on the modules return these values, and on a GPU their weights wait in host memory for the end of the request.
Weights that were in host memory before it, as `ditmesh.load` leaves them there, are on the GPU during calls of their
module alone. A call with other arguments than foreseen is computed when it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..config import ParallelConfig
from ..core.arguments import Arguments, covers, parameter_names
from ..core.clock import timestep_of
from ..core.partial_run import PartialRun, unknown_like
from ..core.patching import Patch, Proceed, refuse_reading, wrap_methods
from ..core.values import SeenValue, is_plain, seen, version_of
from ..errors import ConfigError, LayoutError
from ..layout import TokenLayout
from ..layout.between import fresh
from ..layout.derive import without_hooks
from ..layout.forms import form_of
from ..layout.types import CallForm
from .base import Context, ParallelModel, Request, Strategy
from .pipefusion.stages import blocks_of, give_up, is_away, shape_of, take_back
from .tensor.parallel import TensorParallel

# Calls of a request that may be other than foreseen; then the modules compute as ever until it ends.
MAX_SURPRISES = 4
# Containers that torch gives every module, apart from those that have a say in what it computes.
_READ = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
_NO_SETTINGS = vars(nn.Module()).keys() - _READ
# Methods of a transformer that change weights in place.
_CHANGES = ("fuse_lora", "unfuse_lora", "load_lora_adapter", "fuse_qkv_projections")

# The branch of guidance, and the rows of the batch, that a call is of.
Part = tuple[int, tuple[int, int] | None]
# The values of one call: for every module what it returns, call by call.
Row = dict[str, list[Any]]


@dataclass
class _Batch:
    """Calls whose values were computed together.

    ``compares``: how many are still to be compared with the modules themselves, of the first and the first of a later
    step; ``shapes``: by path, what a module is given in each of its calls.
    """

    form: CallForm
    compares: int
    shapes: Mapping[str, list[list[torch.Size]]]


@dataclass
class _Foreseen:
    """A call that is to come: by path its tensors and numbers, but for those of the image, and its values."""

    batch: _Batch
    part: Part
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
        self.hits, self.note = 0, ""
        self._parallel, self._model, self._context = model, model.model, context
        # On a CPU, host memory is where they are.
        self.frees_weights = context.mesh.device.type != "cpu"
        self._timestep = timestep_of(model.model, model.layout)
        # Where modules lie that run inside of a graph.
        self._compiled = self._blocks if context.config.compile is not None else ()
        # Arguments that were others in later steps, how often, and those taken for the image's.
        self._changes: Counter[str] = Counter()
        self._image: set[str] = set()
        # Modules that see a rank's tokens, and not those of one device.
        self._excluded: set[str] = set()
        self._rows: list[_Foreseen] = []
        # Forms of calls whose values were compared.
        self._trusted: set[CallForm] = set()
        # Weights and settings of the modules that the rows were computed with.
        self._state = _State(self._model)
        self._surprises = 0
        # Whether a pipeline's call is in progress, in which weights stay what they are.
        self._open = False
        self._stand_ins: dict[str, Patch] = {}
        # Parameters whose values are in host memory, and these values.
        self._away: dict[Tensor, Tensor] = {}
        # Those that are there between requests, too; None: not looked for yet, as other strategies cut weights first.
        self._homeless: set[Tensor] | None = None
        # The row of the call in progress, the calls that it was computed with, and the calls of each module so far: by
        # tile, as tiles of a block wait for one another between the calls, or inside of the module itself.
        self._row: Row = {}
        self._batch: _Batch | None = None
        self._calls: Counter[tuple[str, Any]] = Counter()
        self._running: Counter[str] = Counter()

    # --- a request ---------------------------------------------------------------------------------------

    def begin(self, of_pipeline: bool) -> None:
        """Begin a request: nothing is known of it."""
        self.end()
        self.hits, self.modules, self._open, self.note = 0, (), of_pipeline, ""

    def end(self) -> None:
        """End the request: weights come back, and values are dropped."""
        self._rows, self._state, self._surprises, self._open = [], _State(self._model), 0, False
        self._return_home()

    def close(self) -> None:
        """Undo everything; all weights are on the device."""
        self.settle()
        self.end()
        for patch in self._stand_ins.values():
            patch.undo()
        self._stand_ins.clear()

    # --- a call ------------------------------------------------------------------------------------------

    def around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """A layer around a whole call."""
        foreseen = self._foreseen(arguments)
        if foreseen is None:
            self._return_home()
            self._bring([*self._away])
            return proceed(arguments)
        batch = foreseen.batch
        self._leave()
        self._row, self._batch = foreseen.row, batch
        try:
            with self._in_graphs(batch.compares > 0):
                result = proceed(arguments)
        finally:
            self._row, self._calls = {}, Counter()
        self._leave_out()
        batch.compares -= batch.compares > 0
        if not batch.compares:
            self._trusted.add(batch.form)
        return result

    def _leave_out(self) -> None:
        """Leave out modules that have seen a rank's or a patch's tokens."""
        if not self._excluded.isdisjoint(self.modules):
            for row in self._rows:
                for path in self._excluded:
                    row.row.pop(path, None)
            self.modules = tuple(path for path in self.modules if path not in self._excluded)
            self._leave()

    def _foreseen(self, arguments: Arguments) -> _Foreseen | None:
        """The call with its values, which are computed where it was not foreseen; None: it is to run as ever."""
        parts = self._parts(arguments) if self._open else None
        if parts is None and self._open:
            self.note = f"precompute: {type(self._model).__name__} is called with an object that may change in a call"
        if parts is None or self._surprises > MAX_SURPRISES:
            return None
        if self._state.changed():
            # Another adapter, or another strength of it, inside of a request.
            self._rows, self._state = [], _State(self._model)
            self._surprises += 1
        same, call = self._context.clock.values.all_same, self._context.clock.call
        # Rows of a reproducible batch run one by one.
        part = call.branch, call.rows if self._context.config.reproducible else None
        for foreseen in self._rows:
            if same(parts[1], foreseen.others) and same(parts[0], foreseen.timestep):
                self.hits += 1
                return foreseen
        if before := [row for row in self._rows if row.part == part]:
            self._surprises += 1
            self._learn(before, parts[1])
            parts = cast(Any, self._parts(arguments))
        try:
            rows = self._computed(arguments, part, *parts)
        except Exception as error:
            if self._parallel.find(TensorParallel) is not None and not isinstance(error, LayoutError):
                # Ranks exchange slices in this run, and the others may be waiting for this one.
                raise
            # What runs is decided by values of the image, or it runs outside of torch. An error of the model itself
            # comes again when it runs as ever.
            self._surprises = MAX_SURPRISES + 1
            self.note = f"precompute: nothing of {type(self._model).__name__} was computed ahead ({error})"
            return None
        self._rows = [row for row in self._rows if row.part != part] + rows
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
        self, arguments: Arguments, part: Part, timestep: Mapping[str, SeenValue], others: Mapping[str, SeenValue]
    ) -> list[_Foreseen]:
        """The values of a call, and of those that differ from it in nothing but a later timestep.

        `LayoutError`: a value of the image is needed to tell what runs.
        """
        given = arguments.copy()
        for path, value in arguments.leaves():
            if self._is_image(arguments, path, value):
                given.set(path, unknown_like(value))
        later = self._later(timestep)
        inputs = [value.value for value in timestep.values()]
        run = PartialRun(inputs, [[*times.values()] for times in later], self._absent)
        slices = self._parallel.find(TensorParallel)
        watch = _watched(self._model, run, slices, self._lending, given.args, given.kwargs)
        if run.later.obstacle:
            later = []
        blocks = self._blocks
        row = {
            path: calls
            for path, calls in watch.outputs(1 + len(later)).items()
            # In a graph a value is a constant.
            if path not in self._excluded and (len(calls) == 1 or not path.startswith(self._compiled))
            # Strategies tell the attention calls of a block by their order.
            if not (path.startswith(blocks) and _attends(self._model.get_submodule(path)))
        }
        rows = [row, *(run.later.values(row, step) for step in range(len(later)))]
        for path in row:
            if not path.startswith(self._compiled):
                self._stand_in(path)
        self.modules, self._state = tuple(row), _State(self._model, row)
        times = [timestep, *({path: seen(value) for path, value in each.items()} for each in later)]
        form = form_of(arguments)
        shapes = {path: watch.shapes[path] for path in row}
        batch = _Batch(form, 0 if form in self._trusted else min(2, len(rows)), shapes)
        return [_Foreseen(batch, part, time, others, row) for time, row in zip(times, rows, strict=True)]

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

    @property
    def _blocks(self) -> tuple[str, ...]:
        """How the paths of modules in blocks begin."""
        layout = self._parallel.layout
        return () if layout is None else tuple(f"{path}." for path, _ in blocks_of(self._model, layout))

    def _absent(self, weight: Tensor) -> bool:
        """True if another stage has a weight, or ranks share it in pieces."""
        return is_away(weight) and weight not in self._away

    # --- modules -----------------------------------------------------------------------------------------

    def _stand_in(self, path: str) -> None:
        """Let a module return the values of the call in progress."""
        if path in self._stand_ins:
            return
        module = self._model.get_submodule(path)
        patch = Patch(module, "forward", module.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            values, batch = self._row.get(path), self._batch
            if values is None or batch is None:
                return patch.original(*args, **kwargs)
            # A pipeline of stages runs its blocks once for every patch.
            place = self._calls[path, getcurrent()] % len(values)
            self._calls[path, getcurrent()] += 1
            value, as_ever = values[place], _shapes(args, kwargs) == batch.shapes[path][place]
            if as_ever and not batch.compares:
                return value if isinstance(value, Tensor) else fresh(value)
            self._lend(module.parameters())
            self._running[path] += 1
            try:
                result = patch.original(*args, **kwargs)
            finally:
                self._running[path] -= 1
                if not self._running[path]:
                    self._withdraw(module.parameters())
            for hook in module._forward_hooks.values():
                # Of the slices of all ranks, as the values that were computed ahead.
                if getattr(hook, "completes", False):
                    result = hook(module, args, result)
            if as_ever:
                self._compare(path, result, value)
            else:
                self._excluded.add(path)
            return result

        patch.replace(forward)
        self._stand_ins[path] = patch

    @contextmanager
    def _in_graphs(self, compares: bool) -> Iterator[None]:
        """Values for compiled blocks: these run as they are while values are compared, and read constants afterwards.

        torch guards what a forward reads: with `_stand_in` it would compile each block again in each step.
        """
        inner = [path for path in self._row if path.startswith(self._compiled)]
        with ExitStack() as undo:
            if inner and compares:
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            for path in inner:
                parent, _, name = path.rpartition(".")
                modules = self._model.get_submodule(parent)._modules
                if compares:
                    self._stand_in(path)
                    undo.callback(self._stand_ins.pop(path))
                else:
                    undo.callback(modules.__setitem__, name, modules[name])
                    modules[name] = _Constant(self._row[path][0])
            yield

    def _compare(self, path: str, result: Any, value: Any) -> None:
        pairs = [*zip(tree_leaves(result), tree_leaves(value), strict=True)]
        if not all(torch.equal(one, other) for one, other in pairs if isinstance(one, Tensor)):
            raise LayoutError(
                f"{path} of {type(self._model).__name__} returns something else in a call than was computed ahead of "
                "it; leave precompute out"
            )

    # --- weights -----------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """On a GPU, weights of modules with values for all foreseen calls go to host memory, and no others."""
        if not self.frees_weights:
            return
        paths = [path for path in self.modules if all(path in foreseen.row for foreseen in self._rows)]
        leaving = {each for path in paths for each in self._model.get_submodule(path).parameters()}
        if leaving == self._away.keys():
            return
        self._bring(self._away.keys() - leaving)
        self._take_away(leaving - self._away.keys())
        self._state = _State(self._model, self.modules)

    def _take_away(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            self._away[parameter] = parameter.data.to("cpu")
            self._withdraw([parameter])

    def _bring(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            take_back(parameter, self._away.pop(parameter).to(self._context.mesh.device))

    def _return_home(self) -> None:
        """Every weight goes where it is between requests."""
        if self._homeless is None:
            kind = self._context.mesh.device.type
            self._homeless = {
                each for each in self._model.parameters() if each.device.type != kind and not is_away(each)
            }
        self._bring(self._away.keys() - self._homeless)
        self._take_away(self._homeless - self._away.keys())

    def settle(self) -> set[Tensor]:
        """Let all weights be on the device from here on; returns those that were in host memory between requests."""
        self._return_home()
        homeless, self._homeless = self._homeless or set(), set()
        self._bring([*self._away])
        return homeless

    def settled(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model that changes weights; the next request begins as those before."""
        if name == "load_lora_adapter" and not kwargs.get("hotswap"):
            # It goes by their shapes.
            return method(*args, **kwargs)
        # It may write where torch does not count.
        homeless, self._rows = self.settle(), []
        try:
            return method(*args, **kwargs)
        finally:
            self._homeless = homeless

    @contextmanager
    def _lending(self) -> Iterator[None]:
        """Inside, every module's own weights are on the device while it runs; those that are not here have shapes."""
        with ExitStack() as undo:
            for parameter in filter(self._absent, self._model.parameters()):
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data = parameter.data.new_empty(1).expand(shape_of(parameter))
            undo.callback(self._withdraw, self._away)
            for module in self._model.modules():
                own = [each for each in module.parameters(recurse=False) if each in self._away]
                if own:
                    before = module.register_forward_pre_hook(lambda *_, own=own: self._lend(own))
                    after = module.register_forward_hook(lambda *_, own=own: self._withdraw(own))
                    undo.callback(before.remove)
                    undo.callback(after.remove)
            yield

    def _lend(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter in self._away:
                take_back(parameter, self._away[parameter].to(self._context.mesh.device))

    def _withdraw(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter in self._away and parameter.numel():
                give_up(parameter)
                parameter.data = parameter.data.to(self._context.mesh.device)

    def away(self) -> set[int]:
        """The parameters whose values are in host memory now, by id."""
        return {id(parameter) for parameter in self._away}


class _Constant(nn.Module):
    """Returns a value, whatever it is given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value


class _State:
    """What modules compute with, as it was seen: weights as they lie in memory, and settings of all their layers."""

    def __init__(self, model: nn.Module, paths: Iterable[str] = ()) -> None:
        self._containers: dict[int, Any] = {}
        for path in paths:
            module = model
            for name in path.split("."):
                self._hold(module._modules)
                module = cast(nn.Module, module._modules[name])
            for each in module.modules():
                self._hold(vars(each))
        # Every step asks: containers compare with copies of them faster than Python reads what is inside.
        self._now = [*self._containers.values()]
        self._then = [dict(each) if isinstance(each, dict) else copy(each) for each in self._now]
        values = [each.values() if isinstance(each, dict) else each for each in self._now]
        self._holders = [each for each in values if any(isinstance(one, Tensor) for one in each)]
        self._memory = self._lies()

    def _hold(self, container: Any) -> None:
        if id(container) not in self._containers:
            self._containers[id(container)] = container
            for name, value in container.items() if isinstance(container, dict) else enumerate(container):
                if isinstance(value, (dict, list, tuple, set, frozenset)) and name not in _NO_SETTINGS:
                    self._hold(value)

    def _lies(self) -> list[Any]:
        tensors = [each for each in chain.from_iterable(self._holders) if isinstance(each, Tensor)]
        return [*map(Tensor.data_ptr, tensors), *map(version_of, tensors)]

    def changed(self) -> bool:
        """True if a module computes with something else than then."""
        try:
            return self._now != self._then or self._lies() != self._memory
        except (RuntimeError, ValueError):
            # Tensors, or arrays, where there were others.
            return True


def _scaled(schedule: Tensor, scheduler: Any, like: Tensor) -> Iterable[Tensor]:
    """A schedule in the forms in which pipelines hand it to transformers, in the dtype of a timestep."""
    most = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None) or 1000
    before = schedule.to(like.device)
    after = before.to(like.dtype)
    forms = (after, after / most, before / most, (most - after) / most, (most - before) / most, 1 - after / most)
    return (form.to(like.dtype) for form in forms if form.is_floating_point() or form is after)


def _attends(module: nn.Module) -> bool:
    return any(hasattr(each, "processor") for each in module.modules())


def _shapes(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Size]:
    return [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


class _Watch:
    """Notes what every module of a model returns in a partial run, and where its weights are read."""

    def __init__(self, model: nn.Module, run: PartialRun, slices: TensorParallel | None) -> None:
        self._model, self._run = model, run
        # Of weights by the mean of the ranks, so that all ranks decide alike.
        self._whole, self._ranks = ({}, 1) if slices is None else (slices.whole_shapes(), slices.link.size)
        # By path, what each call of a module was given and returned.
        self.shapes: dict[str, list[list[torch.Size]]] = {}
        self._returned: dict[str, list[tuple[Any, list[int | None]]]] = {}
        self._unknown: set[str] = set()
        self._inside: list[str] = []
        # Parameters that are read while none of their modules runs.
        self._loose: set[int] = set()
        self._undo = ExitStack()

    def __enter__(self) -> _Watch:
        self._run.listener = self._read
        for path, module in self._model.named_modules():
            if path:
                entered = module.register_forward_pre_hook(lambda *_, at=path: self._inside.append(at))
                left = module.register_forward_hook(partial(self._left, path), with_kwargs=True)
                self._undo.callback(entered.remove)
                self._undo.callback(left.remove)
        self._owners: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(parameter), []).append(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _left(self, path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._inside.pop()
        self.shapes.setdefault(path, []).append(_shapes(args, kwargs))
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
        return sum(tensor.nbytes * (times if self._run.later.follows(tensor) else 1) for tensor in tensors)

    def _pays(self, path: str, calls: list[tuple[Any, list[int | None]]], times: int) -> bool:
        parameters = [*self._model.get_submodule(path).parameters()]
        alone = all(name.startswith(f"{path}.") for each in parameters for name in self._owners[id(each)])
        # What is not here, or in pieces, cannot leave, even if the call does not read it.
        stays = any(id(each) in self._loose or self._run.is_unknown(each) for each in parameters)
        if not parameters or not alone or stays:
            return False
        held = 0
        for output, versions in calls:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            # Somebody has written to it since.
            if [version_of(tensor) for tensor in tensors] != versions:
                return False
            held += self.value_bytes(tensors, times)
        return held < sum(
            self._whole.get(each, shape_of(each)).numel()
            * each.element_size()
            / (self._ranks if each in self._whole else 1)
            for each in parameters
        )


def _watched(
    model: nn.Module,
    run: PartialRun,
    slices: TensorParallel | None,
    lending: Callable[[], AbstractContextManager[None]],
    args: Any,
    kwargs: Any,
) -> _Watch:
    """A partial run of a model, as `_Watch` has seen it."""
    with torch.no_grad(), without_hooks(model), lending(), _Watch(model, run, slices) as watch, run:
        model(*fresh(args), **fresh(kwargs))
    return watch


@dataclass(frozen=True)
class Ahead:
    """Modules whose values could be computed ahead, by path, and bytes of their weights and of these values."""

    modules: tuple[str, ...]
    weights: float
    values: float


def found_ahead(model: nn.Module, inputs: Mapping[str, Any], times: Sequence[Tensor], steps: int) -> Ahead:
    """What could be computed ahead for all steps, by a run without the values of the image.

    `LayoutError`: a value of the image is needed to tell what runs.

    Args:
        model: whole, maybe itself without values.
        inputs: of a call, by name; the first argument of the model is the image.
        times: those of the inputs that are other ones in every step.
    """
    image = parameter_names(type(model).forward)[0]
    given = {**inputs, image: tree_map_only(Tensor, unknown_like, inputs[image])}
    run = PartialRun(times)
    watch = _watched(model, run, None, nullcontext, (), given)
    row = watch.outputs(steps)
    weights = {id(each): each.nbytes for path in row for each in model.get_submodule(path).parameters()}
    return Ahead(tuple(row), float(sum(weights.values())), float(watch.value_bytes(row, steps)))


class Precomputed(Strategy):
    """Values of modules that see nothing of the image, computed once for all steps of a request."""

    name = "values computed ahead"
    no_gradient = "precompute=True computes for the timesteps of a scheduler"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.precompute

    @classmethod
    def keeps_between_steps(cls, config: ParallelConfig) -> str:
        return "precompute=True has the values of one request's steps"

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

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        for model in self.context.models:
            part = model.get(PrecomputedModel)
            # Before slices and stages are put together again.
            undo.callback(part.settle)
            undo.callback(wrap_methods(model.model, _CHANGES, part.settled))

    def begin_request(self, request: Request) -> None:
        for model in self.context.models:
            model.get(PrecomputedModel).begin(request.pipe is not None)

    def end_request(self, failed: bool) -> None:
        for model in self.context.models:
            model.get(PrecomputedModel).end()

    def notes(self) -> list[str]:
        return [note for model in self.context.models if (note := model.get(PrecomputedModel).note)]

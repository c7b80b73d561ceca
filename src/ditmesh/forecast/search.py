"""All configurations that a model and so many devices allow, and which of them serves best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ..config import AXES, ParallelConfig, TextEncoderPolicy
from ..errors import DitmeshError, InputError
from ..layout import TokenLayout
from ..recipe import RECIPE, Recipe, check_recipe, promise_of
from ..strategies import support
from ..strategies.base import Exactness, VariantLimits, variant
from ..strategies.tensor.slices import plan_slices as tensor_plan
from .candidates import grids
from .costs.hardware import Hardware
from .costs.work import Work, Workload
from .model_work import one_block_per_kind
from .prediction import MemoryOf, Prediction, predict

Objective = Literal["latency", "throughput", "cost"]
# Configurations that fit, behind which a search asks for the memory of no more; and how many walks it makes at most.
ENOUGH, MOST_LOOKS = 5, 12


@dataclass(frozen=True)
class Model:
    """A transformer that configurations are checked against.

    Attributes:
        module: on the meta device, or with its weights.
        work: its operations.
    """

    module: nn.Module
    layout: TokenLayout
    work: Work
    _uncut: dict[int, str | None] = field(default_factory=dict, repr=False, compare=False)

    def slicing_refusal(self, degree: int) -> str | None:
        """The reason why a degree of tensor parallelism is not for the model; looks at one block of every kind."""
        if degree not in self._uncut:
            self._uncut[degree] = None
            with one_block_per_kind(self.module, self.layout):
                try:
                    tensor_plan(self.module, degree)
                except DitmeshError as error:
                    self._uncut[degree] = str(error)
        return self._uncut[degree]


@dataclass(frozen=True)
class SearchLimits:
    """The limits of a search.

    Attributes:
        exactness: ``"exact"``: the same image; ``"reproducible"``: the same bits; ``"stale"``: keys of the step
            before are allowed.
        memory: bytes of a device; default: the hardware's.
        deadline: seconds of a request.
        axes: those that may have a degree.
        tested: leave out combinations that the parity matrix has not run.
        shared_memory: whether ranks of one host share memory.
        text_encoder: where text encoders are, as of `ParallelConfig`.
        memory_of: what says how much the rank that needs most holds; None: the transformer's weights are all that
            counts.
        recipe: strategies; every variant of each is tried.
    """

    exactness: Exactness = "exact"
    memory: float | None = None
    deadline: float | None = None
    axes: tuple[str, ...] = AXES
    tested: bool = True
    shared_memory: bool = True
    text_encoder: TextEncoderPolicy = "whole"
    memory_of: MemoryOf | None = None
    recipe: Recipe = RECIPE


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        best: predictions that keep to all limits, best first; of those behind the first that fit only the weights
            are known to.
        too_large: those that need more memory than a device has, those with the smallest weights first.
        too_slow: those that miss the deadline.
        refused: sentences of the checks, and how many configurations each has refused.
        room: bytes of a device.
    """

    best: list[Prediction] = field(default_factory=list)
    too_large: list[Prediction] = field(default_factory=list)
    too_slow: list[Prediction] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    room: float = float("inf")


def search(
    model: Model, workload: Workload, hardware: Hardware, limits: SearchLimits, objective: Objective = "latency"
) -> SearchResult:
    """Predict every valid configuration for the hardware's devices, or for some of them.

    Raises:
        InputError: none is valid, or none fits; names the missing memory, and a configuration that would fit.
    """
    room = hardware.device.memory if limits.memory is None else limits.memory
    found, predictions = SearchResult(room=room), list[Prediction]()
    for config in candidates(model, workload, hardware.world_size, limits):
        reason = config_refusal(config, model, limits)
        if reason is not None:
            found.refused[reason] += 1
            continue
        prediction = predict(config, model.work, workload, hardware, limits.recipe, limits.memory_of)
        if limits.deadline is not None and prediction.latency > limits.deadline:
            found.too_slow.append(prediction)
        else:
            predictions.append(prediction)
    # Of two that are as good the one with fewer devices.
    value = score(objective, hardware.world_size)
    predictions.sort(key=lambda one: (value(one), one.config.world_size))
    found.best, found.too_large = _by_memory(predictions, room)
    found.too_large.sort(key=lambda one: one.weights)
    found.too_slow.sort(key=lambda one: one.latency)
    if not found.best:
        raise InputError(_nothing(found, hardware, limits))
    return found


def _by_memory(predictions: list[Prediction], room: float) -> tuple[list[Prediction], list[Prediction]]:
    """The predictions that fit and those that do not, both in the given order.

    Hundreds of walks would take minutes. The first are made in order, until enough fit; of what is behind those only
    the weights have to. Where none of the first fits, the configurations with the smallest weights are looked at.
    """
    light = [one for one in predictions if one.weights <= room]
    fitting = 0
    for one in light[:MOST_LOOKS]:
        fitting += one.memory <= room
        if fitting == ENOUGH:
            break
    some = light if fitting else sorted(light, key=lambda one: one.weights)[:MOST_LOOKS]
    fits = {id(one) for one in some if (fitting and not one.memory_is_known) or one.memory <= room}
    best, others = list[Prediction](), list[Prediction]()
    for one in predictions:
        (best if id(one) in fits else others).append(one)
    return best, others


def score(objective: Objective, devices: int) -> Callable[[Prediction], float]:
    """The value to minimise."""
    if objective == "latency":
        return lambda one: one.latency
    if objective == "cost":
        return lambda one: one.device_seconds
    return lambda one: -one.throughput(devices)


def candidates(model: Model, workload: Workload, devices: int, limits: SearchLimits) -> Iterator[ParallelConfig]:
    """Configurations for all of the devices, and for divisors of their number, that contradict nothing."""
    most = {axis: devices if axis in limits.axes else 1 for axis in AXES}
    most["data"] = min(most["data"], workload.pictures)
    most["cfg"] = min(most["cfg"], workload.branches)
    most["tensor"] = min(most["tensor"], model.work.heads)
    most["ulysses"] = min(most["ulysses"], model.work.heads)
    most["pipe"] = min(most["pipe"], len(model.work.order))
    if limits.exactness == "exact":
        most["pipe"] = 1
    # A cut that ranks cannot share evenly wastes the remainder.
    for degrees in grids(devices, most):
        yield from _settings(degrees, workload, limits)


def _settings(degrees: dict[str, int], workload: Workload, limits: SearchLimits) -> Iterator[ParallelConfig]:
    """The configurations of some degrees: plain where that promises the exactness asked for, and every variant."""
    common = ParallelConfig(shared_memory=limits.shared_memory, text_encoder=limits.text_encoder)
    for plain in variant(common, **degrees):
        if limits.exactness != "reproducible" and promise_of(plain, limits.recipe) != "none":
            yield plain
        for strategy in limits.recipe:
            yield from strategy.variants(plain, VariantLimits(limits.exactness, workload.image))


def config_refusal(config: ParallelConfig, model: Model, limits: SearchLimits) -> str | None:
    """The reason why a configuration is not for a model, as the engine would say; None: it is."""
    # A model that ships is an outline of its class, and a user's class may only have the name of a tested one: the
    # reviewed layout is given to neither by mistake.
    name, reviewed = type(model.module).__name__, model.layout.source == "reviewed"
    key = support.combination(config, limits.recipe)
    outcome = (support.support_table().get(name, {}).get(key, {}) if reviewed else {}) if key else {"error": 0.0}
    if "refused" in outcome:
        return str(outcome["refused"])
    if "wrong" in outcome:
        return f"{name} with {key} is known to give a wrong picture"
    if limits.tested and "error" not in outcome:
        return f"{name} with {key} has not been tested"
    try:
        check_recipe(limits.recipe, config, [(model.module, model.layout)])
    except DitmeshError as error:
        return str(error)
    return model.slicing_refusal(config.tensor) if config.tensor > 1 else None


def _nothing(found: SearchResult, hardware: Hardware, limits: SearchLimits) -> str:
    """The reason why no configuration is left, and what would fit."""
    if found.too_slow:
        return (
            f"no configuration for {hardware.describe()} is done in {limits.deadline:g} s; the fastest, "
            f"{found.too_slow[0].config.describe()}, is predicted to take {found.too_slow[0].latency:.3g} s"
        )
    if found.too_large:
        predicted = [one for one in found.too_large if one.memory_is_known] or found.too_large[:1]
        least = min(predicted, key=lambda one: one.memory)
        needs = ", ".join(f"{term.memory / 1e9:.3g} GB of {term.name}" for term in least.kept if term.memory > 1e7)
        return (
            f"the model fits on no device of {found.room / 1e9:g} GB: the smallest, {least.config.describe()}, needs "
            f"{least.memory / 1e9:.3g} GB on a rank ({needs}); use devices with that much memory, more of them with "
            "tensor or (with --stale) pipe, or a smaller --dtype"
        )
    reasons = "; ".join(reason for reason, _ in found.refused.most_common(2)) or "none was tried"
    return f"no configuration of {hardware.world_size} devices is valid for this model: {reasons}"

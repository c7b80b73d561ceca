"""Optimizers by name or by the path of a class, and their state as checkpoints hold it.

A name stands for a class of torch, bitsandbytes (Dettmers et al. 2021, arXiv:2110.02861) or prodigyopt (Mishchenko and
Defazio 2023, arXiv:2306.06101).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import ConfigError, InputError, did_you_mean, first_line
from ...requirements import install_line
from ..config import TrainConfig

# The path of a class by its name.
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW",
    "Adam": "torch.optim.Adam",
    "SGD": "torch.optim.SGD",
    "Adafactor": "torch.optim.Adafactor",
    "AdamW8bit": "bitsandbytes.optim.AdamW8bit",
    "Prodigy": "prodigyopt.Prodigy",
}
# Arguments of optimizers with betas, Adam's kin, where a run gives no others.
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 1e-2, "eps": 1e-8}
# Of which parts of a weight change as in the whole weight: what tensor ranks and shards need.
ELEMENTWISE = ("AdamW", "Adam", "SGD")
# Bytes of the state for each byte of weights; of others as much as AdamW's.
STATE_PER_WEIGHT = {"SGD": 1.0, "Adafactor": 0.0, "AdamW8bit": 0.5, "Prodigy": 4.0}
# Entries of a parameter group that are the run's: its weights and its learning rate.
OF_THE_RUN = ("params", "lr", "initial_lr")
Named = Mapping[str, nn.Parameter]


def optimizer_name(config: TrainConfig) -> str:
    """The optimizer as it is called here, whatever the case of its letters, or its path."""
    wanted = config.optimizer.name
    return next((name for name, path in OPTIMIZERS.items() if wanted.lower() in (name.lower(), path.lower())), wanted)


def _class_of(config: TrainConfig) -> type[torch.optim.Optimizer]:
    wanted, name = config.optimizer.name, optimizer_name(config)
    package, _, kind = OPTIMIZERS.get(name, name).rpartition(".")
    if not package:
        near = did_you_mean(wanted, OPTIMIZERS)
        raise ConfigError(
            f"optimizer.name={wanted!r} is no optimizer; use {', '.join(OPTIMIZERS)}, or the path of a class{near}"
        )
    try:
        optimizer_class = getattr(import_module(package), kind, None)
    except ImportError as error:
        line = f"; {install_line('train')}" if name in OPTIMIZERS else ""
        raise ConfigError(f"optimizer.name={wanted!r}: {package} cannot be imported ({error}){line}") from None
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise ConfigError(f"optimizer.name={wanted!r} is no torch.optim.Optimizer; give the path of such a class")
    return optimizer_class


def _takes(kind: type) -> dict[str, inspect.Parameter]:
    given = list(inspect.signature(kind.__init__).parameters.values())[2:]
    return {one.name: one for one in given if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}


def make_optimizer(trained: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run over the weights that ask for a gradient.

    Its arguments are the rate, `ADAM` where it has betas, and ``optimizer.args``.

    Raises:
        ConfigError: the class does not exist, or does not take its arguments; names the setting.
    """
    kind = _class_of(config)
    takes = _takes(kind)
    arguments = {name: value for name, value in ADAM.items() if "betas" in takes and name in takes}
    # YAML has no tuples.
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in config.optimizer.args.items()}
    weights = [p for p in trained.parameters() if p.requires_grad]
    try:
        with redirect_stdout(StringIO()):  # Prodigy prints what it was asked for.
            return cast(Any, kind)(weights, lr=config.optimizer.learning_rate, **{**arguments, **given})
    except (TypeError, ValueError) as error:
        unknown = [name for name in given if name not in takes]
        named, near = f" ({unknown[0]!r})" if unknown else "", did_you_mean("".join(unknown[:1]), takes)
        raise ConfigError(
            f"optimizer.name={config.optimizer.name!r} does not take its arguments{named}: {first_line(error)}; "
            f"optimizer.args can have {', '.join(takes)}{near}"
        ) from None


def check_optimizer(config: TrainConfig) -> None:
    """Reject an optimizer that does not fit the run's other settings.

    Raises `ConfigError`: names the setting, its value and the way out.
    """
    name, wanted, settings = optimizer_name(config), config.optimizer.name, config.optimizer
    if settings.args.keys() & {"lr", "params"}:
        raise ConfigError("optimizer.args: the learning rate is learning_rate; leave lr out")
    if name == "Prodigy" and "learning_rate" not in settings.model_fields_set:
        raise ConfigError(
            f"optimizer.name={wanted!r} finds its own step size, which learning_rate multiplies; set learning_rate: 1.0"
        )
    if name != "AdamW" or settings.args:
        optimizer = make_optimizer(nn.Linear(1, 1), config)
        if callable(getattr(optimizer, "eval", None)):
            raise ConfigError(
                f"optimizer.name={wanted!r} has other weights to use than to train, and the latter would be saved; "
                "use another one, with ema_decay for an average"
            )
    fsdp = config.model.sharding == "fsdp" and config.parallel.world_size > 1
    tensor = config.parallel.tensor
    if (fsdp or tensor > 1) and name not in ELEMENTWISE:
        way = f"tensor={tensor}" if tensor > 1 else "sharding='fsdp'"
        raise ConfigError(
            f"optimizer.name={wanted!r} may look at whole weights, of which ranks hold parts with {way}; use data, "
            f"ulysses or ring with sharding ddp or none, or one of {', '.join(ELEMENTWISE)}"
        )


def state_per_weight(config: TrainConfig) -> float:
    """Bytes of an optimizer's state for each byte of weights, about."""
    return STATE_PER_WEIGHT.get(optimizer_name(config), 2.0)


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the first weights, times the step size that Prodigy has found."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) * float(group.get("d", 1.0) if "d_coef" in group else 1.0)


# --- state in checkpoints -------------------------------------------------------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, dict[str, Tensor]]:
    """The tensors of an optimizer's state by the names of parameters."""
    tensors: dict[str, dict[str, Tensor]] = {}
    seen = set[int]()
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if not isinstance(value, DTensor):
                # bitsandbytes has one table for all parameters; safetensors has no tensor twice.
                place = value.untyped_storage().data_ptr()
                value = value.clone() if place in seen else value
                seen.add(place)
            tensors.setdefault(name, {})[key] = value
    return tensors


def facts_of_state(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Any]:
    """The rest of an optimizer's state, as JSON can hold it.

    Returns:
        ``groups``: what it keeps in its parameter groups besides its arguments; and ``numbers``: of each parameter.
    """
    given = {*_takes(type(optimizer)), *OF_THE_RUN}
    groups = [{name: v for name, v in group.items() if name not in given} for group in optimizer.param_groups]
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                numbers.setdefault(name, {})[key] = value
    return {"groups": groups, "numbers": numbers}


def initialise_state(optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Make an optimizer's state as it is after a first step, for a checkpoint to fill. Weights may change.

    Args:
        optimizer: without any state.
    """
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)


def matching_state(state: Mapping[str, Any], names: set[str], optimizer: str) -> dict[str, Any]:
    """The optimizer's state in a checkpoint, as far as it is known: a parameter without gradients has had none.

    Args:
        state: as `optimizer_tensors` returns it, after `initialise_state`.
        names: of all tensors of the checkpoint.

    Raises:
        InputError: the state of a parameter has other parts than this optimizer's.
    """
    states: dict[str, Any] = {}
    for name, of_parameter in state.items():
        prefix = f"optimizer.state.{name}."
        saved = {one for one in names if one.startswith(prefix) and "." not in one.removeprefix(prefix)}
        if other := sorted(saved ^ {f"{prefix}{key}" for key in of_parameter}) if saved else []:
            raise InputError(
                f"the state of {optimizer} in the checkpoint has other parts than it has with these optimizer.args "
                f"({other[0].removeprefix('optimizer.state.')} ...); resume with those of its run"
            )
        if saved:
            states[name] = of_parameter
    return states


def fill_state(
    optimizer: torch.optim.Optimizer, named: Named, state: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Give an optimizer the state of a checkpoint; state that the checkpoint lacks begins with the next step."""
    numbers = facts.get("numbers", {})
    for name, parameter in named.items():
        held = optimizer.state[parameter]
        if name not in state and name not in numbers:
            del optimizer.state[parameter]
            continue
        for key, value in state.get(name, {}).items():
            held[key].copy_(value)
        held.update(numbers.get(name, {}))
    for group, told in zip(optimizer.param_groups, facts.get("groups", []), strict=False):
        group.update(told)


def finite_parts(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Any]:
    """Names and tensors of an optimizer's state for a check of finite numbers."""
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{type(optimizer).__name__}'s {key} of {name}", value

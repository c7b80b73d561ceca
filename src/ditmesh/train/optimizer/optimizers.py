"""Optimizers by name, and their state as checkpoints hold it.

A name stands for a class of torch, bitsandbytes (Dettmers et al. 2021, arXiv:2110.02861), prodigyopt (Mishchenko and
Defazio 2023, arXiv:2306.06101) or schedulefree (Defazio et al. 2024, arXiv:2405.15682).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
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
    "Muon": "torch.optim.Muon",
    "AdamW8bit": "bitsandbytes.optim.AdamW8bit",
    "Prodigy": "prodigyopt.Prodigy",
    "AdamWScheduleFree": "schedulefree.AdamWScheduleFree",
    "RAdamScheduleFree": "schedulefree.RAdamScheduleFree",
    "SGDScheduleFree": "schedulefree.SGDScheduleFree",
}
# Arguments of optimizers with betas, Adam's kin, where a run gives no others.
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 1e-2, "eps": 1e-8}
# Of which parts of a weight change as in the whole weight: what tensor ranks and shards need.
ELEMENTWISE = ("AdamW", "Adam", "SGD", "AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")
# Bytes of the state for each byte of weights; of others as much as AdamW's.
STATE_PER_WEIGHT = {"SGD": 1.0, "SGDScheduleFree": 1.0, "Adafactor": 0.0, "AdamW8bit": 0.5, "Prodigy": 4.0}
# Entries of a parameter group that are the run's: its weights and its learning rate.
OF_THE_RUN = ("params", "lr", "initial_lr")
Named = Mapping[str, nn.Parameter]


def optimizer_name(config: TrainConfig) -> str:
    """The optimizer as it is called here, whatever the case of its letters."""
    wanted = config.optimizer.name
    return next((name for name in OPTIMIZERS if name.lower() == wanted.lower()), wanted)


def _class_of(config: TrainConfig) -> type[torch.optim.Optimizer]:
    wanted, name = config.optimizer.name, optimizer_name(config)
    if name not in OPTIMIZERS:
        near = did_you_mean(wanted, OPTIMIZERS)
        raise ConfigError(f"optimizer.name={wanted!r} is no optimizer; use {', '.join(OPTIMIZERS)}{near}")
    package, _, kind = OPTIMIZERS[name].rpartition(".")
    try:
        return getattr(import_module(package), kind)
    except ImportError as error:
        top, line = package.partition(".")[0], install_line("train")
        raise ConfigError(
            f"optimizer.name={wanted!r} needs {top}, which cannot be imported ({error}); {line}"
        ) from None


def _takes(kind: type) -> dict[str, inspect.Parameter]:
    given = list(inspect.signature(kind.__init__).parameters.values())[2:]
    return {one.name: one for one in given if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}


def _arguments(kind: type, config: TrainConfig) -> dict[str, Any]:
    """The arguments of a class: the rate, `ADAM` where it has betas, and ``optimizer.args``."""
    takes = _takes(kind)
    usual = {name: value for name, value in ADAM.items() if "betas" in takes and name in takes}
    return {"lr": config.optimizer.learning_rate, **usual, **_given(config)}


def _given(config: TrainConfig) -> dict[str, Any]:
    # YAML has no tuples.
    return {name: tuple(value) if isinstance(value, list) else value for name, value in config.optimizer.args.items()}


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of blocks, and AdamW for embeddings, norms, biases and projections.

    Muon's step is scaled to AdamW's size (Liu et al. 2025, arXiv:2502.16982), so that both use one learning rate.

    Args:
        matrices: weights of linear layers in blocks.
        others: all other weights.
        config: the rate; ``optimizer.args`` are Muon's, but for the decay, which is both's.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], config: TrainConfig) -> None:
        both = [list(some) for some in (matrices, others) if some]
        rate, given = config.optimizer.learning_rate, _given(config)
        super().__init__([{"params": some} for some in both], {"lr": rate})
        muon: Any = torch.optim.Muon
        more = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": ADAM["weight_decay"], **given}
        self.parts: list[torch.optim.Optimizer] = [muon(matrices, lr=rate, **more)]
        if others:
            more = ADAM | {name: value for name, value in given.items() if name == "weight_decay"}
            self.parts.append(torch.optim.AdamW(others, lr=rate, **more))
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of each."""
        for part in self.parts:
            part.step()


def make_optimizer(trained: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run over the weights that ask for a gradient.

    Raises:
        ConfigError: the class does not exist, or does not take its arguments; names the setting.
    """
    kind = _class_of(config)
    named = {name: p for name, p in trained.named_parameters() if p.requires_grad}
    try:
        with redirect_stdout(StringIO()):  # Prodigy prints what it was asked for.
            if optimizer_name(config) == "Muon":
                hidden = _matrices_of_blocks(trained)
                matrices = [p for name, p in named.items() if name in hidden]
                if not matrices:
                    raise ConfigError(
                        "optimizer.name='Muon' is for linear layers of blocks, and none is trained; use AdamW"
                    )
                made = MuonWithAdamW(matrices, [p for name, p in named.items() if name not in hidden], config)
            else:
                made = cast(Any, kind)(list(named.values()), **_arguments(kind, config))
    except (TypeError, ValueError) as error:
        unknown = [name for name in config.optimizer.args if name not in _takes(kind)]
        named, near = f" ({unknown[0]!r})" if unknown else "", did_you_mean("".join(unknown[:1]), _takes(kind))
        raise ConfigError(
            f"optimizer.name={config.optimizer.name!r} does not take its arguments{named}: {first_line(error)}; "
            f"optimizer.args can have {', '.join(_takes(kind))}{near}"
        ) from None
    return made


def _matrices_of_blocks(trained: nn.Module) -> set[str]:
    """The names of linear layers' weights in numbered blocks."""
    return {
        f"{name}.weight"
        for name, module in trained.named_modules()
        if isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))
    }


# --- checks before a run -------------------------------------------------------------------------------------------


def check_optimizer(config: TrainConfig) -> None:
    """Reject an optimizer that does not fit the run's other settings.

    Raises:
        ConfigError: names the setting, its value and the way out.
    """
    name, wanted, settings = optimizer_name(config), config.optimizer.name, config.optimizer
    if name == "AdamW" and not settings.args:
        return
    kind = _class_of(config)
    if settings.args.keys() & {"lr", "params"}:
        raise ConfigError("optimizer.args: the learning rate is learning_rate; leave lr out")
    if name == "Prodigy" and "learning_rate" not in settings.model_fields_set:
        raise ConfigError(
            f"optimizer.name={wanted!r} finds its own step size, which learning_rate multiplies; set learning_rate: 1.0"
        )
    if is_schedule_free(kind) and settings.lr_scheduler not in ("constant", "constant_with_warmup"):
        raise ConfigError(
            f"lr_scheduler={settings.lr_scheduler!r}: {name} needs no schedule; use constant or constant_with_warmup"
        )
    if is_schedule_free(kind) and settings.ema_decay is not None:
        raise ConfigError(f"ema_decay: {name} averages the weights itself, and its average is saved; leave it out")
    # Of a block, so that Muon has a matrix.
    make_optimizer(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(1, 1)])}), config)
    fsdp = config.model.sharding == "fsdp" and config.parallel.world_size > 1
    tensor = config.parallel.tensor
    if (fsdp or tensor > 1) and name not in ELEMENTWISE:
        way = f"tensor={tensor}" if tensor > 1 else "sharding='fsdp'"
        raise ConfigError(
            f"optimizer.name={wanted!r} may look at whole weights, of which ranks hold parts with {way}; use data, "
            f"ulysses or ring with sharding ddp or none, or one of {', '.join(ELEMENTWISE)}"
        )


def is_schedule_free(kind: type) -> bool:
    """True if an optimizer has weights to train and other ones to use, between which ``train`` and ``eval`` change."""
    return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))


def state_per_weight(config: TrainConfig) -> float:
    """Bytes of an optimizer's state for each byte of weights, about."""
    return STATE_PER_WEIGHT.get(optimizer_name(config), 2.0)


# --- training and using ---------------------------------------------------------------------------------------------


def turn_to_training(optimizer: torch.optim.Optimizer) -> None:
    """Let a schedule-free optimizer take steps; nothing happens to others."""
    if is_schedule_free(type(optimizer)):
        cast(Any, optimizer).train()


@contextmanager
def weights_to_use(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context with the weights that a schedule-free optimizer would have used; afterwards every bit is as before."""
    if not is_schedule_free(type(optimizer)):
        yield
        return
    with torch.no_grad():
        before = [p.detach().clone() for p in _weights(optimizer)]
        cast(Any, optimizer).eval()
    try:
        yield
    finally:
        with torch.no_grad():
            cast(Any, optimizer).train()
            # Its way back is rounded.
            for parameter, value in zip(_weights(optimizer), before, strict=True):
                parameter.copy_(value)


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the first weights, times the step size that Prodigy has found."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) * float(group.get("d", 1.0) if "d_coef" in group else 1.0)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a group, in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


# --- state in checkpoints -------------------------------------------------------------------------------------------


def _weights(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, dict[str, Tensor]]:
    """The tensors of an optimizer's state by the names of parameters."""
    found: dict[str, dict[str, Tensor]] = {}
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
            found.setdefault(name, {})[key] = value
    return found


def facts_of_state(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Any]:
    """The rest of an optimizer's state, as JSON can hold it.

    Returns:
        ``groups``: what it keeps in its parameter groups besides its arguments; ``numbers``: of each parameter; and
        ``shapes`` of the tensors that have another one than their parameter.
    """
    parts = getattr(optimizer, "parts", [optimizer])
    given = {name for part in parts for name in _takes(type(part))} | {*OF_THE_RUN}
    groups = [{name: v for name, v in group.items() if name not in given} for group in optimizer.param_groups]
    numbers: dict[str, dict[str, Any]] = {}
    shapes: dict[str, dict[str, list[int]]] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                numbers.setdefault(name, {})[key] = value
            elif value.shape != parameter.shape and value.dim() > 0:
                shapes.setdefault(name, {})[key] = list(value.shape)
    return {"groups": groups, "numbers": numbers, "shapes": shapes}


def initialise_state(optimizer: torch.optim.Optimizer, named: Named, facts: Mapping[str, Any]) -> None:
    """Make an optimizer's state as it is after a first step, for a checkpoint to fill. Weights may change.

    Args:
        optimizer: without any state.
        facts: of the checkpoint.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    rates = [float(group["lr"]) for group in groups]
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, before, rate in zip(optimizer.param_groups, groups, rates, strict=True):
        group.update(before)
        set_rate(group, rate)
    for name, of_parameter in facts.get("shapes", {}).items():
        for key, shape in of_parameter.items():
            value = optimizer.state[named[name]].get(key) if name in named else None
            if value is not None and list(value.shape) != shape:
                # Prodigy's first weights are one zero where they were zeros.
                optimizer.state[named[name]][key] = value.new_zeros(shape)


def matching_state(state: Mapping[str, Any], names: set[str], optimizer: str) -> dict[str, Any]:
    """The optimizer's state in a checkpoint, as far as it is known.

    Args:
        state: as `optimizer_tensors` returns it, after `initialise_state`.
        names: of all tensors of the checkpoint.
        optimizer: its name.

    Raises:
        InputError: the state of a parameter has other parts than this optimizer's.
    """
    there = {name: {f"optimizer.state.{name}.{key}" for key in of_parameter} for name, of_parameter in state.items()}
    saved = {name for name in names if name.startswith("optimizer.state.")}
    known = {name: of_parameter for name, of_parameter in state.items() if there[name] & saved}
    mine = {one for name in known for one in there[name]}
    # A parameter without gradients has had no state.
    other = sorted(mine ^ {one for one in saved if one.rpartition(".")[0] in {m.rpartition(".")[0] for m in mine}})
    if other:
        raise InputError(
            f"the state of {optimizer} in the checkpoint has other parts than it has with these optimizer.args "
            f"({other[0].removeprefix('optimizer.state.')} ...); resume with those of its run"
        )
    return known


def fill_state(
    optimizer: torch.optim.Optimizer, named: Named, state: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Give an optimizer the state of a checkpoint; state that the checkpoint lacks begins with the next step.

    Args:
        optimizer: after `initialise_state`.
        state: as `optimizer_tensors` returns it.
        facts: as `facts_of_state` returns them.
    """
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
    kind = type(getattr(optimizer, "parts", [optimizer])[0]).__name__
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{kind}'s {key} of {name}", value

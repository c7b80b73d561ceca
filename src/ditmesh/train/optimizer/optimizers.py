"""Optimizers by name or by the path of their class, and their state as checkpoints hold it.

A name stands for a class of torch, bitsandbytes (Dettmers et al. 2021, arXiv:2110.02861), prodigyopt (Mishchenko and
Defazio 2023, arXiv:2306.06101) or schedulefree (Defazio et al. 2024, arXiv:2405.15682). Every optimizer is tried on two
small matrices before a run: that shows whether its state can be saved, and whether it may be given parts of weights.
"""

from __future__ import annotations

import inspect
import json
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
# Arguments by the settings that give them; the optimizers that take ``betas`` are Adam's kin and get them all.
ADAM = ("adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon")
# Of which parts of a weight change as in the whole weight: what tensor ranks and shards need.
ELEMENTWISE = ("AdamW", "Adam", "SGD", "AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")
# Bytes of the state for each byte of weights; of others as much as AdamW's.
STATE_PER_WEIGHT = {"SGD": 1.0, "SGDScheduleFree": 1.0, "Adafactor": 0.0, "AdamW8bit": 0.5, "Prodigy": 4.0}
# Entries of a parameter group that are the run's: its weights and its learning rate.
OF_THE_RUN = ("params", "lr", "initial_lr")
Named = Mapping[str, nn.Parameter]


def optimizer_name(config: TrainConfig) -> str:
    """The optimizer as messages call it: its class."""
    return config.optimizer.rpartition(".")[2] if "." in config.optimizer else _named(config.optimizer)


def _named(name: str) -> str:
    return next((known for known in OPTIMIZERS if known.lower() == name.lower()), name)


def _class_of(config: TrainConfig) -> type[torch.optim.Optimizer]:
    """The class of ``optimizer``."""
    wanted = config.optimizer
    path = OPTIMIZERS.get(_named(wanted), wanted)
    package, _, name = path.rpartition(".")
    if not package:
        raise ConfigError(
            f"optimizer={wanted!r} is no optimizer; use {', '.join(OPTIMIZERS)}, or the path of a class "
            f"such as torchao.optim.AdamW8bit{did_you_mean(wanted, OPTIMIZERS)}"
        )
    try:
        found = getattr(import_module(package), name, None)
    except ImportError as error:
        top = package.partition(".")[0]
        line = install_line("train") if path in OPTIMIZERS.values() else f"pip install {top}"
        raise ConfigError(f"optimizer={wanted!r} needs {top}, which cannot be imported ({error}); {line}") from None
    if found is None and package == "torch.optim" and name in OPTIMIZERS:
        raise ConfigError(f"optimizer={wanted!r}: torch {torch.__version__} has no {name}; install a later torch")
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError(f"optimizer={wanted!r}: {package} has no optimizer class {name!r}; give the path of one")
    return found


def _takes(kind: type) -> dict[str, inspect.Parameter]:
    given = list(inspect.signature(kind.__init__).parameters.values())[2:]
    return {one.name: one for one in given if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}


def _is_adam(kind: type) -> bool:
    return "betas" in _takes(kind)


def _adam_arguments(config: TrainConfig) -> dict[str, Any]:
    return {
        "betas": (config.adam_beta1, config.adam_beta2),
        "weight_decay": config.adam_weight_decay,
        "eps": config.adam_epsilon,
    }


def _arguments(kind: type, config: TrainConfig) -> dict[str, Any]:
    """The arguments of a class: the rate, ``adam_*`` where it has them, and ``optimizer_args``."""
    takes = _takes(kind)
    adam = _adam_arguments(config) if "betas" in takes else {}
    if config.optimizer.lower() not in {name.lower() for name in OPTIMIZERS}:
        # The defaults of a class that is given by its path are its own.
        given = {
            "betas": {"adam_beta1", "adam_beta2"},
            "weight_decay": {"adam_weight_decay"},
            "eps": {"adam_epsilon"},
        }
        adam = {name: value for name, value in adam.items() if given[name] & config.model_fields_set}
    adam = {name: value for name, value in adam.items() if name in takes}
    lists = {name: tuple(v) if isinstance(v, list) else v for name, v in config.optimizer_args.items()}
    return {"lr": config.peak_rate, **adam, **lists}


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of blocks, and AdamW for embeddings, norms, biases and projections.

    Muon's step is scaled to AdamW's size (Liu et al. 2025, arXiv:2502.16982), so that both use one learning rate.

    Args:
        matrices: weights of linear layers in blocks.
        others: all other weights.
        config: the rate, decay and AdamW's arguments; ``optimizer_args`` are Muon's.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], config: TrainConfig) -> None:
        both = [list(some) for some in (matrices, others) if some]
        super().__init__([{"params": some} for some in both], {"lr": config.peak_rate})
        muon: Any = torch.optim.Muon
        more = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": config.adam_weight_decay, **config.optimizer_args}
        more = {name: tuple(value) if isinstance(value, list) else value for name, value in more.items()}
        self.parts: list[torch.optim.Optimizer] = [muon(matrices, lr=config.peak_rate, **more)]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=config.peak_rate, **_adam_arguments(config)))
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
            if _named(config.optimizer) == "Muon":
                hidden = _matrices_of_blocks(trained)
                matrices = [p for name, p in named.items() if name in hidden]
                if not matrices:
                    raise ConfigError("optimizer='Muon' is for linear layers of blocks, and none is trained; use AdamW")
                made = MuonWithAdamW(matrices, [p for name, p in named.items() if name not in hidden], config)
            else:
                made = cast(Any, kind)(list(named.values()), **_arguments(kind, config))
    except (TypeError, ValueError) as error:
        unknown = [name for name in config.optimizer_args if name not in _takes(kind)]
        named, near = f" ({unknown[0]!r})" if unknown else "", did_you_mean("".join(unknown[:1]), _takes(kind))
        raise ConfigError(
            f"optimizer={config.optimizer!r} does not take its arguments{named}: {first_line(error)}; "
            f"optimizer_args can have {', '.join(_takes(kind))}{near}"
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
    """Reject an optimizer that does not fit the run's other settings, or of which a checkpoint cannot hold the state.

    Raises:
        ConfigError: names the setting, its value and the way out.
    """
    if _named(config.optimizer) == "AdamW" and not config.optimizer_args:
        return
    kind = _class_of(config)
    _check_settings(config, kind)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"optimizer={config.optimizer!r} computes the loss itself (a closure); use another one")
    # Of a block, so that Muon has a matrix.
    make_optimizer(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(1, 1)])}), config)
    fsdp = config.sharding == "fsdp" and config.parallel.world_size > 1
    tensor = config.parallel.tensor
    if (fsdp or tensor > 1) and _named(config.optimizer) not in ELEMENTWISE:
        way = f"tensor={tensor}" if tensor > 1 else "sharding='fsdp'"
        raise ConfigError(
            f"optimizer={config.optimizer!r} may look at whole weights, of which ranks hold parts with {way}; use "
            f"data, ulysses or ring with sharding ddp or none, or one of {', '.join(ELEMENTWISE)}"
        )


def _check_settings(config: TrainConfig, kind: type) -> None:
    """Reject settings that an optimizer does not have, or that contradict it."""
    name = optimizer_name(config)
    if config.optimizer_args.keys() & {"lr", "params"}:
        raise ConfigError("optimizer_args: the learning rate is learning_rate; leave lr out")
    unused = [one for one in ADAM if one in config.model_fields_set]
    if unused and not _is_adam(kind) and _named(config.optimizer) != "Muon":
        raise ConfigError(f"{unused[0]} is no argument of {name}; pass arguments of {name} in optimizer_args")
    if "learning_rate" not in config.model_fields_set and "d_coef" in _takes(kind):
        raise ConfigError(
            f"optimizer={config.optimizer!r} finds its own step size, which learning_rate multiplies; set "
            "learning_rate: 1.0"
        )
    if not is_schedule_free(kind):
        return
    if config.lr_scheduler not in ("constant", "constant_with_warmup"):
        raise ConfigError(
            f"lr_scheduler={config.lr_scheduler!r}: {name} needs no schedule; use constant or constant_with_warmup"
        )
    if config.use_ema:
        raise ConfigError(f"use_ema: {name} averages the weights itself, and its average is saved; leave use_ema out")


def is_schedule_free(kind: type) -> bool:
    """True if an optimizer has weights to train and other ones to use, between which ``train`` and ``eval`` change."""
    return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))


@contextmanager
def _without_compiling() -> Iterator[None]:
    """torchao compiles its step, which takes longer than one without gradients is worth."""
    with torch.compiler.set_stance("force_eager"):
        yield


def check_state(optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Reject an optimizer, after its first step, that keeps state which a checkpoint cannot hold.

    Raises:
        ConfigError: names it.
    """
    name, own = type(optimizer).__name__, {id(p) for p in named.values()}
    if any(not isinstance(key, Tensor) or id(key) not in own for key in optimizer.state):
        raise ConfigError(
            f"optimizer: {name} keeps state that belongs to no parameter, which checkpoints cannot hold; use another"
        )
    try:
        json.dumps(facts_of_state(optimizer, named))
    except TypeError as error:
        raise ConfigError(
            f"optimizer: {name} keeps state that is neither a tensor nor a number, which checkpoints cannot hold "
            f"({error}); use another one"
        ) from None


def state_per_weight(config: TrainConfig) -> float:
    """Bytes of an optimizer's state for each byte of weights, about."""
    return STATE_PER_WEIGHT.get(_named(config.optimizer), 2.0)


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


def plain_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a value of an optimizer's state: itself, or those that a quantised one consists of."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__"):
        for inner in cast(Any, value).__tensor_flatten__()[0]:
            yield from plain_tensors(f"{name}.{inner}", getattr(value, inner))
    elif isinstance(value, Tensor):
        yield name, value


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, dict[str, Any]]:
    """The tensors of an optimizer's state by the names of parameters: what is quantised under a group of its own."""
    found: dict[str, dict[str, Any]] = {}
    seen = set[int]()
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            for path, tensor in plain_tensors(key, value):
                first, _, inner = path.partition(".")
                of_parameter = found.setdefault(name, {})
                if not isinstance(tensor, DTensor):
                    # bitsandbytes has one table for all parameters; safetensors has no tensor twice.
                    place = tensor.untyped_storage().data_ptr()
                    tensor = tensor.clone() if place in seen else tensor
                    seen.add(place)
                if inner:
                    of_parameter.setdefault(first, {})[inner] = tensor
                else:
                    of_parameter[first] = tensor
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
    with _without_compiling():
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
    there: dict[str, set[str]] = {}
    for name in state:
        prefix = f"optimizer.state.{name}."
        there[name] = set()
        for key, value in state[name].items():
            there[name] |= {f"{prefix}{key}.{part}" for part in value} if isinstance(value, dict) else {prefix + key}
    saved = {name for name in names if name.startswith("optimizer.state.")}
    known = {name: of_parameter for name, of_parameter in state.items() if there[name] & saved}
    mine = {one for name in known for one in there[name]}
    # A parameter without gradients has had no state.
    other = sorted(mine ^ {one for one in saved if one.rpartition(".")[0] in {m.rpartition(".")[0] for m in mine}})
    if other:
        raise InputError(
            f"the state of {optimizer} in the checkpoint has other parts than it has with these optimizer_args "
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
            # Of a quantised tensor its parts.
            parts = value.items() if isinstance(value, dict) else [("", value)]
            whole = dict(plain_tensors("", held[key]))
            for part, tensor in parts:
                whole[f".{part}" if part else ""].copy_(tensor)
        held.update(numbers.get(name, {}))
    for group, told in zip(optimizer.param_groups, facts.get("groups", []), strict=False):
        group.update(told)


def finite_parts(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Any]:
    """Names and tensors of an optimizer's state for a check of finite numbers."""
    kind = type(getattr(optimizer, "parts", [optimizer])[0]).__name__
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            for path, tensor in plain_tensors(key, value):
                yield f"{kind}'s {path} of {name}", tensor

"""The door that tells a `StepControl` of a transformer's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..layout.arguments import Arguments, covers, parameter_names
from ..staleness.control import StepControl

# What transformers call the timestep.
TIMESTEPS = ("timestep", "t")


def watch_calls(model: nn.Module, control: StepControl) -> Callable[[], None]:
    """Tell ``control`` of every call of the transformer before it runs; returns what stops it.

    Raises:
        ConfigError: the transformer takes no timestep, by which steps are told apart.
    """
    names = parameter_names(type(model).forward)
    timestep = next((name for name in TIMESTEPS if name in names), None)
    if timestep is None:
        raise ConfigError(
            f"stale strategies tell steps by their timestep, and {type(model).__name__} takes none "
            f"({' or '.join(TIMESTEPS)}); use exchange='exact'"
        )
    own = (names[0], timestep)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = Arguments(names, args, kwargs)
        others = {path: value for path, value in arguments.leaves() if not any(covers(name, path) for name in own)}
        control.begin_call(arguments.get(timestep), arguments.get(names[0]), others)

    return model.register_forward_pre_hook(begin, with_kwargs=True).remove

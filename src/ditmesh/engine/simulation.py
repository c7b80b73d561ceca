"""N devices simulated in this process: the same strategies on virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..config import ParallelConfig
from ..errors import ConfigError
from ..layout import TokenLayout
from ..recipe import Recipe
from ..strategies.checked import CheckedLayout
from ..strategies.simulated import SimulatedExact, SimulatedStale, virtual_mesh
from ..strategies.stale.warmup import StaleSteps
from ..strategies.tokens import KnownForms
from .engine import Engine
from .targets import ConfigLike, denoisers, device_of, find_layout, given_layout, refuse_twice, restore

T = TypeVar("T")

# The simulated strategies: token strategies of virtual ranks.
SIMULATION: Recipe = (StaleSteps, SimulatedExact, SimulatedStale, KnownForms, CheckedLayout)


def simulate(target: T, config: ConfigLike, *, layout: TokenLayout | None = None) -> T:
    """Make a pipeline (or a bare transformer) compute the result of ``config`` on virtual ranks in this process.

    Use it to study stale strategies: simulating 8 ranks takes 8 times as long. `restore` undoes it; `engine_of` has
    drift and decisions as for real ranks. diffusers' caches, which keep state in the model, are not supported.

    Args:
        target, layout: as for `parallelize`.
        config: the ``ring`` degree and its exchange; no other axis.

    Raises:
        ConfigError: another axis than ring has a degree, or a setting that the simulation does not support.
        InputError: ``target`` has no transformer, or is parallelised already.
    """
    refuse_twice(target)
    config = ParallelConfig.read(config)
    if config.speeds == "auto":
        raise ConfigError("speeds='auto' is not simulated, as there is nothing to measure; give numbers, such as 2,1")
    if config.reproducible:
        raise ConfigError(f"reproducible={config.reproducible!r} is not simulated; leave it out")
    models = denoisers(target)
    mesh = virtual_mesh(config, device_of(models[0]) or "cpu")
    pairs = [(model, given_layout(layout, model) or find_layout(model)) for model in models]
    Engine(pairs, config, mesh, False, SIMULATION).open(target)
    return target


@contextmanager
def simulated(target: T, config: ConfigLike, **options: Any) -> Iterator[T]:
    """`simulate` within a ``with`` block, with the same options."""
    simulate(target, config, **options)
    try:
        yield target
    finally:
        restore(target)

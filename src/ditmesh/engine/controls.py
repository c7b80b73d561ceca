"""ControlNets beside a transformer: their tokens are cut, and gathered wherever it reads them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ..config import ParallelConfig
from ..core.arguments import Arguments
from ..core.patching import Proceed
from ..errors import ConfigError, LayoutError
from ..layout import TokenLayout
from ..recipe import Recipe
from ..strategies.base import Strategy
from ..strategies.sequence import ExactSequence
from ..strategies.tokens import KnownForms
from .engine import Engine
from .first_call import FirstCall
from .targets import ENGINE, controls

# The strategies of a ControlNet: its tokens are split, and gathered wherever the transformer reads them.
CONTROL_RECIPE: Recipe = (ExactSequence, KnownForms)


class ControlNets(Strategy):
    """The ControlNets of every pipeline, each from its first call on: by engines of their own, on the same links."""

    name = "controls"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        # Every step has to be exact, and bits are not promised.
        return ExactSequence.wanted(config) and config.sequence > 1 and config.tensor == 1

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        for network in controls(pipe):
            if ENGINE not in vars(network):
                first = FirstControl([network], self.context.config, self.context.job, False, CONTROL_RECIPE)
                undo.callback(first.detach, network)


class FirstControl(FirstCall):
    """As `FirstCall`, for a ControlNet: if it cannot be split, it runs whole on every rank."""

    def _begin(self, layouts: list[TokenLayout]) -> Engine:
        engine = super()._begin(layouts)
        self._undo.callback(engine.close)
        return engine

    def _around_call(self, model: Any, proceed: Proceed, arguments: Arguments) -> Any:
        """Derive the layout in the first call; a module that cannot be cut runs whole."""
        try:
            self._begin(self._derive(model, proceed, arguments))
        except (ConfigError, LayoutError):
            self._undo.close()
            return proceed(arguments)
        return model(*arguments.args, **arguments.kwargs)

"""Models without a known layout: the layout is derived from the first call, which then runs again in parallel.

Transformers, and ControlNets beside one: their tokens are cut, and gathered wherever it reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.arguments import Arguments, given
from ..core.generators import default_states, set_default_states
from ..core.patching import CallChain, Proceed
from ..core.request import PipelineCall
from ..errors import ConfigError, DitmeshError, InputError, LayoutError
from ..layout import TokenLayout
from ..layout.derive import derive_layout, derive_rows
from ..recipe import Recipe, check_recipe
from ..strategies.base import Strategy
from ..strategies.sequence import ExactSequence
from ..strategies.tokens import KnownForms
from .engine import Engine
from .targets import ENGINE, controls, mark

# Callback arguments of diffusers' pipelines.
CALLBACKS = ("callback_on_step_end", "callback")
# The strategies of a ControlNet.
CONTROL_RECIPE: Recipe = (ExactSequence, KnownForms)


class _Derived(BaseException):
    """Leaves a pipeline's call when its transformer's layout is known. Passes every ``except Exception``."""

    def __init__(self, layouts: list[TokenLayout]) -> None:
        super().__init__()
        self.layouts = layouts


class FirstCall:
    """Waits for the first call of transformers, and derives their layouts from it.

    Until then it stands where the engine will be. Inside a pipeline the call is broken off, the engine opened, random
    generators set back to where they stood, and the pipeline called again with the same arguments.
    """

    def __init__(
        self, models: Sequence[nn.Module], config: ParallelConfig, mesh: Mesh, owns_mesh: bool, recipe: Recipe
    ) -> None:
        self.models, self.config, self.mesh = list(models), config, mesh
        self._owns_mesh, self._recipe = owns_mesh, recipe
        self._tokens_whole = not (KnownForms.cuts_tokens(config) or config.tensor > 1)
        self._undo = ExitStack()
        self._pipes: list[Any] = []
        self._inside = False
        # Why no engine could be opened.
        self._refusal: DitmeshError | None = None
        self._wait()

    def _wait(self) -> None:
        """Stand around the calls of the models, and of the pipelines that are attached."""
        for model in self.models:
            self._undo.callback(mark(model, self))
            self._undo.callback(CallChain(model).add(partial(self._around_call, model)))
        pipes, self._pipes = self._pipes, []
        for pipe in pipes:
            self.attach(pipe)

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes that only an engine has."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise InputError(
            f"the layout of {type(self.models[0]).__name__} is not known before its first call, so there is no {name} "
            "to look at yet; call it once"
        )

    def own_mesh(self) -> None:
        """As `Engine.own_mesh`."""
        self._owns_mesh = True

    def attach(self, pipe: Any) -> None:
        """Attach the pipeline that makes the first call."""
        self._pipes.append(pipe)
        self._undo.callback(mark(pipe, self))
        self._undo.callback(PipelineCall(pipe, partial(self._around_pipeline, pipe)).undo)

    def detach(self, target: Any) -> None:
        """Undo everything without a first call."""
        self._undo.close()
        if self._owns_mesh:
            self.mesh.close()

    def _begin(self, layouts: list[TokenLayout]) -> Engine:
        """Open the engine for these layouts."""
        self._undo.close()
        pairs = list(zip(self.models, layouts, strict=True))
        try:
            check_recipe(self._recipe, self.config, pairs)
            engine = Engine(pairs, self.config, self.mesh, self._owns_mesh, self._recipe)
            target, *others = self._pipes or self.models[:1]
            engine.open(target)
            for pipe in others:
                engine.attach(pipe)
        except BaseException as error:
            # So that the next call fails, too, for this reason: it would run on every rank as on one device.
            self._refusal = copy.copy(error) if isinstance(error, DitmeshError) else None
            self._wait()
            raise
        return engine

    def _around_pipeline(self, pipe: Any, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        states = [(leaf, leaf.get_state()) for leaf in leaves if isinstance(leaf, torch.Generator)]
        default = default_states(self.mesh.device)
        self._inside = True
        try:
            # Steps before all layouts are known are repeated, and reported then.
            return proceed(*args, **{name: value for name, value in kwargs.items() if name not in CALLBACKS})
        except _Derived as derived:
            layouts = derived.layouts
        finally:
            self._inside = False
        self._begin(layouts)
        for generator, state in states:
            generator.set_state(state)
        set_default_states(self.mesh.device, default)
        return pipe(*args, **kwargs)

    def _around_call(self, model: nn.Module, proceed: Proceed, arguments: Arguments) -> Any:
        """Derive the layout in the first call, and run the call with it."""
        if self._refusal is not None:
            raise copy.copy(self._refusal)
        layouts = self._derive(model, proceed, arguments)
        if self._inside:
            raise _Derived(layouts)
        self._begin(layouts)
        return model(*arguments.args, **arguments.kwargs)

    def _derive(self, model: nn.Module, proceed: Proceed, arguments: Arguments) -> list[TokenLayout]:
        """The layout of every transformer, derived from a call. Collective."""
        names, args = arguments.names, arguments.args
        call = dict(zip(names, args, strict=False)) | arguments.kwargs
        told = given(type(model).forward, call)

        def forward(**named: Any) -> Any:
            return proceed(Arguments(names, (), named))

        answer: TokenLayout | str
        failed: Exception | None = None
        try:
            if len(args) > len(names):
                raise LayoutError(f"{type(model).__name__} was given arguments without names; pass them by name")
            if self._tokens_whole:
                answer = derive_rows(model, None, told, forward)
            else:
                _, answer = derive_layout(model, told, forward)
        except LayoutError as error:
            answer = str(error)
        except Exception as error:
            # An error of the model itself: the other ranks do not wait for this one.
            failed, answer = error, f"another rank failed in the first call of {type(model).__name__}: {error}"
        try:
            return self._agreed(model, answer)
        except LayoutError:
            if failed is not None:
                raise failed from None
            raise

    def _agreed(self, model: nn.Module, answer: TokenLayout | str) -> list[TokenLayout]:
        """The layout of every transformer, the same on all ranks. Collective."""
        every = self.mesh.world.all_gather_object(answer)
        refused = next((other for other in every if isinstance(other, str)), None)
        if refused is not None:
            raise LayoutError(refused)
        if any(other != every[0] for other in every):
            raise LayoutError(
                f"the ranks were given calls of different forms, so that the layouts of {type(model).__name__} derived "
                "from them differ; pass the same inputs on every rank"
            )
        others = [type(other).__name__ for other in self.models if type(other) is not type(model)]
        if others:
            name = type(model).__name__
            raise LayoutError(f"{name} was called, and the layout of {others[0]} is not known; pass layout= for both")
        return [every[0]] * len(self.models)


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

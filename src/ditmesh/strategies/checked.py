"""Layouts that a user hands over: the first call of every form is compared with one device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import nn

from ..config import ParallelConfig
from ..core.arguments import Arguments
from ..core.patching import Proceed
from ..errors import ConfigError, LayoutError
from ..layout import TokenLayout
from ..layout.between import fresh
from ..layout.derive import without_hooks
from ..layout.forms import form_of
from ..layout.record import result_error
from ..layout.types import GIVEN, CallForm
from ..staleness.control import WarmupControl
from .base import Context, ParallelModel, Strategy
from .tokens import KnownForms


class CheckedLayout(Strategy):
    """Compares the first call of every form with the transformer on one device, where its layout was handed over.

    The transformer runs that call twice, once whole. A stale step is not compared: the next synchronous one is.
    """

    name = "layout check"
    # Whether a layout of any origin is compared.
    every: ClassVar[bool] = False

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return KnownForms.wanted(config) or config.tensor > 1

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        if config.cuts_weights and layout.source == GIVEN:
            raise ConfigError(
                f"layout= was passed for {type(model).__name__}, and with weights that are cut ({config.describe()}) "
                "no call can be compared with one device; leave layout= out, so that it is derived from the first "
                "call, or use ulysses, ring, cfg or data"
            )

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            if self.every or model.layout.source == GIVEN:
                undo.callback(model.chain.add(LayoutCheck(model, self.context).around_call))


class CheckedCalls(CheckedLayout):
    """The same for every layout, reviewed or derived: `parallelize(..., check=True)`."""

    every = True


class LayoutCheck:
    """The comparison of one transformer."""

    def __init__(self, model: ParallelModel, context: Context) -> None:
        self._model, self._context = model, context
        self._seen: set[CallForm] = set()

    def around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """Compare the first call of every form with one device; `LayoutError` on all ranks alike where they differ."""
        form, control = form_of(arguments), self._context.find(WarmupControl)
        # In the first step nothing is stale yet.
        begins = control is not None and control.clock.call.step == 0 and self._context.config.exchange != "naive"
        if form in self._seen or not (control is None or control.decision.synchronous or begins):
            return proceed(arguments)
        model = self._model.model
        with torch.no_grad(), without_hooks(model):
            truth = model(*fresh(arguments.args), **fresh(arguments.kwargs))
        output = proceed(arguments)
        self._check_same(self._context.mesh.world.all_gather_object(result_error(output, truth)))
        self._seen.add(form)
        return output

    def _check_same(self, differences: list[tuple[float, str]]) -> None:
        """Reject the layout if a rank's `result_error` is larger than its dtype allows."""
        name, worst = type(self._model.model).__name__, max(differences)
        if worst[0] <= 1:
            return
        if self._model.layout.source == GIVEN:
            raise LayoutError(
                f"the layout of {name} that was passed as layout= is wrong for this call: the ranks' result "
                f"{worst[1]}; without layout= ditmesh derives one from the first call, which shows what to change"
            )
        raise LayoutError(
            f"{name} was compared with one device (check=True), and the ranks' result of this call {worst[1]}: "
            "something in it, a patch perhaps, uses tokens in a way that its blocks do not show; run this call on "
            "one device"
        )

"""Strategies that decide which rank has which tokens: exactly one of them is in force."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ..config import ParallelConfig
from .base import ParallelModel, Strategy
from .hooks import Handler, ModelHooks


class TokenStrategy(Strategy):
    """A handler behind the hooks of every transformer."""

    def handler(self, model: ParallelModel) -> Handler:
        """The handler of one transformer's blocks and attention; its ``around_call``, if any, becomes a layer."""
        raise NotImplementedError

    def apply(self, undo: ExitStack) -> None:
        config = self.context.config
        for model in self.context.models:
            handler = model.add(self.handler(model))
            if around := getattr(handler, "around_call", None):
                undo.callback(model.chain.add(around))
            # What PipeFusion sets itself up by does not change from call to call.
            fixed = f"patches={config.patches or config.pipe}" if config.stages_or_patches else ""
            hooks = ModelHooks(model.model, model.layout, handler, model.chain, fixed)
            undo.callback(model.add(hooks).close)

    def forget(self) -> None:
        for handler in self.handlers():
            handler.balance.forget()

    def handlers(self) -> list[Any]:
        """Of every transformer, once applied."""
        return [model.get(ModelHooks).handler for model in self.context.models]


class KnownForms(Strategy):
    """Only calls that the layout was made for: those of another form are probed or refused."""

    name = "layouts"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        # Where a block sees a part of the tokens, or a call a part of the samples.
        return cls.cuts_tokens(config) or config.data > 1 or config.cfg > 1

    @staticmethod
    def cuts_tokens(config: ParallelConfig) -> bool:
        """Whether a block sees a part of the tokens only."""
        return config.sequence > 1 or config.reproducible or config.stages_or_patches

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            hooks = model.get(ModelHooks)
            hooks.tokens_whole = not self.cuts_tokens(self.context.config)
            # Samples of a reviewed class can be cut, of calls that its layout covers.
            layout = model.layout
            if layout.source != "reviewed" or layout.refused or layout.between or not hooks.tokens_whole:
                undo.callback(model.chain.add(hooks.around_whole_call))

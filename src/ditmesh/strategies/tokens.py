"""Strategies that decide which rank has which tokens: exactly one of them is in force."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..attention.kernels import LocalAttention, backends_of
from ..config import ParallelConfig
from ..staleness.control import WarmupControl
from .balance import Balance
from .base import ParallelModel, Strategy
from .caches import stateful_hooks
from .hooks import ModelHooks
from .loads import StepLoad, StepLoads

if TYPE_CHECKING:
    from .sequence import SequenceParallel

# Speeds, which add up to 1, that differ by less leave tokens where they are.
WORTH_MOVING = 0.02


class TokenStrategy(Strategy):
    """A handler behind the hooks of every transformer."""

    def handler(self, model: ParallelModel) -> SequenceParallel:
        """The handler of one transformer's blocks and attention; its ``around_call``, if any, becomes a layer."""
        raise NotImplementedError

    def apply(self, undo: ExitStack) -> None:
        config = self.context.config
        for model in self.context.models:
            handler = model.add(self.handler(model))
            _prepare_attention(handler, model.model, config, self.context.mesh.device)
            if around := getattr(handler, "around_call", None):
                undo.callback(model.chain.add(around))
            # The facts that PipeFusion sets itself up by do not change from call to call.
            fixed = f"patches={config.patches or config.pipe}" if config.stages_or_patches else ""
            hooks = ModelHooks(model.model, model.layout, handler, model.chain, fixed)
            undo.callback(model.add(hooks).close)
        self._loads = self._watched()
        self.context.clock.on_step(self._loads.begin_step)

    def _watched(self) -> StepLoads:
        """The recorder of every step's load; with ``speeds="auto"`` it moves tokens."""
        context, config, mesh = self.context, self.context.config, self.context.mesh
        handlers = self.handlers()
        sizes = mesh.world.size // config.sequence // config.tensor, config.sequence, config.tensor
        block = mesh.world.rank // config.tensor
        place = block // config.sequence, mesh.sequence.rank, mesh.world.rank % config.tensor
        told = (lambda: mesh.waited), (lambda: getattr(handlers[0], "shares", ())), (place, sizes)
        # Of work on an accelerator the host does not see how long it took.
        balanced = config.speeds == "auto" and mesh.sequence.size > 1
        if not balanced or mesh.device.type != "cpu":
            return StepLoads(*told)

        def move(speeds: tuple[float, ...], step: int) -> bool | None:
            # A cache's values of the step before are of the tokens that a rank had then.
            if step > 0 and any(any(stateful_hooks(model.model)) for model in context.models):
                return None
            before = self.balances()[0].speeds
            if max(abs(new - old / sum(before)) for new, old in zip(speeds, before, strict=True)) < WORTH_MOVING:
                return False
            for balance in self.balances():
                balance.speeds = speeds
            if step > 0 and (control := context.find(WarmupControl)) is not None:
                control.make_synchronous("tokens move between ranks")
            return True

        return StepLoads(*told, mesh.world.all_reduce_async, move)

    @property
    def loads(self) -> list[StepLoad]:
        """This rank's steps of the latest request."""
        return self._loads.steps

    def end_request(self, failed: bool) -> None:
        self._loads.end_request(failed)

    def forget(self) -> None:
        self._loads.forget()
        for balance in self.balances():
            balance.forget()

    def balances(self) -> list[Balance]:
        """Speeds of the ranks, one per transformer, once applied."""
        return [handler.balance for handler in self.handlers()]

    def handlers(self) -> list[Any]:
        """The handlers of every transformer, once applied."""
        return [model.get(ModelHooks).handler for model in self.context.models]


def _prepare_attention(handler: Any, model: nn.Module, config: ParallelConfig, device: torch.device) -> None:
    """Reject settings that the transformer's attention kernels do not support, as far as known before a call."""
    backends = backends_of(model.modules())
    if config.attention is not None and backends - {config.attention}:
        # A function that takes another one's place has to be called.
        handler.passive = False
    if handler.passive:
        return
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    dtype = max(set(dtypes), key=dtypes.count, default=torch.float32)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    width = getattr(getattr(model, "config", None), "attention_head_dim", None)
    sample = torch.empty((1, 1, 1, width if isinstance(width, int) else 64), dtype=dtype, device=device)
    for one in getattr(handler, "handlers", [handler]):
        if isinstance(kernel := getattr(one, "kernel", None), LocalAttention):
            kernel.prepare(backends, sample)


class KnownForms(Strategy):
    """Only calls that the layout was made for: those of another form are probed or refused."""

    name = "layouts"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        # Where a block sees a part of the tokens, or a call a part of the samples.
        return cls.cuts_tokens(config) or config.data > 1 or config.cfg > 1

    @staticmethod
    def cuts_tokens(config: ParallelConfig) -> bool:
        """True if a block sees a part of the tokens only."""
        return config.sequence > 1 or config.reproducible or config.stages_or_patches

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            hooks = model.get(ModelHooks)
            hooks.tokens_whole = not self.cuts_tokens(self.context.config)
            undo.callback(model.chain.add(hooks.around_whole_call))

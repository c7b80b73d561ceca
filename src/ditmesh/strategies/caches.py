"""diffusers' caches on several ranks: every rank takes the same decision.

First Block Cache skips the remaining blocks when the first block's residual has changed little. Each rank
sees only its own tokens and rows; ranks that decide differently wait for one another for ever. Here the statistic is
summed over the ranks before it is compared, so that the decision is one device's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ParallelConfig
from ..core.patching import Patch, Proceed
from ..errors import InputError
from .base import Context, Strategy

# The method of a First Block Cache's hook that decides.
DECIDE = "_should_compute_remaining_blocks"


def diffusers_hooks(module: nn.Module) -> Mapping[str, Any]:
    """diffusers' hooks on a module, by name."""
    return getattr(getattr(module, "_diffusers_hook", None), "hooks", {})


class Caches(Strategy):
    """diffusers' caches of every transformer, deciding together.

    Ranks that share rows must agree as well as those that share tokens, since one device decides for the whole batch;
    those that share weights add the same numbers again, which leaves the ratio as it is.
    """

    name = "caches"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._agreeing: list[tuple[Any, Patch]] = []

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.world_size > 1

    def apply(self, undo: ExitStack) -> None:
        undo.callback(self._close)
        for model in self.context.models:
            undo.callback(model.chain.add(partial(self._around_call, model.model)))

    def _close(self) -> None:
        while self._agreeing:
            self._agreeing.pop()[1].undo()

    def _around_call(self, model: nn.Module, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        # A cache may be enabled before or after `parallelize`, and changed between requests.
        if self.context.mesh.world.size > 1 and getattr(model, "is_cache_enabled", True):
            for hook in _hooks_of(model):
                if hasattr(hook, DECIDE) and all(hook is not other for other, _ in self._agreeing):
                    self._agreeing.append((hook, self._agree(hook)))
        return proceed(*args, **kwargs)

    def _agree(self, hook: Any) -> Patch:
        if not hasattr(hook, "state_manager") or not hasattr(hook, "threshold"):
            raise InputError(
                f"this diffusers' {type(hook).__name__} decides in a way ditmesh does not know; disable the cache "
                "or use one rank per sequence"
            )
        link = self.context.mesh.world

        def decide(residual: Tensor) -> bool:
            state = hook.state_manager.get_state()
            before = state.head_block_residual
            if before is None:
                return True
            sums = torch.stack(
                [(residual - before).abs().sum(dtype=torch.float64), before.abs().sum(dtype=torch.float64)]
            )
            parts = link.all_gather(sums.unsqueeze(0), (1,) * link.size, dim=0)
            change, size = parts.sum(dim=0).tolist()
            return change / size > hook.threshold

        return Patch(hook, DECIDE, decide)

    def before_training(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(getattr(hook, "_is_stateful", False) for hook in _hooks_of(model)):
            raise InputError(
                f"{type(model).__name__} cannot be trained with a cache: what it keeps of an earlier step has no "
                "gradient path; take the cache off (disable_cache()) first"
            )

    def forget(self) -> None:
        # What a request that was broken off has left in diffusers' caches.
        for model in self.context.models:
            cached: Any = model.model
            if getattr(cached, "is_cache_enabled", False):
                _reset(cached)


def _hooks_of(model: nn.Module) -> list[Any]:
    return [hook for module in model.modules() for hook in diffusers_hooks(module).values()]


def _reset(model: Any) -> None:
    """Empty a model's caches. A call may be in progress: which of a pipeline's calls it is stays known."""
    managers = [hook.state_manager for hook in _hooks_of(model) if hasattr(hook, "state_manager")]
    contexts = [getattr(manager, "_context", None) for manager in managers]
    model._reset_stateful_cache()
    for manager, context in zip(managers, contexts, strict=True):
        if context is not None:
            manager.set_context(context)

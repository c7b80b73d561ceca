"""diffusers' caches on several ranks: every rank takes the same decision.

First Block Cache skips the remaining blocks when the first block's residual has changed little. Each rank
sees only its own tokens and rows; ranks that decide differently wait for one another for ever. Here the statistic is
summed over the ranks before it is compared, so that the decision is one device's.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Link
from ..config import ParallelConfig
from ..core.patching import Patch, Proceed
from ..errors import InputError
from .base import Strategy


class AgreedCaches:
    """Watches for First Block Cache hooks on a transformer's blocks and makes their decisions common.

    `begin_call` looks for hooks before every run of the transformer, so a cache may be enabled before or
    after `parallelize`, and changed between requests.

    Args:
        model: the transformer.
        link: all ranks. Those that share rows must agree as well as those that share tokens, since one device
            decides for the whole batch; those that share weights add the same numbers again, which leaves the
            ratio as it is.
    """

    def __init__(self, model: nn.Module, link: Link) -> None:
        self._model = model
        self._link = link
        self._replaced: list[tuple[Any, Patch]] = []

    def begin_call(self) -> None:
        """Attach to hooks that are new."""
        if self._link.size == 1 or not getattr(self._model, "is_cache_enabled", True):
            return
        known = [hook for hook, _ in self._replaced]
        for hook in _first_block_hooks(self._model):
            if all(hook is not other for other in known):
                self._replaced.append((hook, self._agreeing(hook)))

    def around_call(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """A layer of the model's forward that looks for hooks before each call."""
        self.begin_call()
        return proceed(*args, **kwargs)

    def close(self) -> None:
        """Give every hook its own decision back."""
        while self._replaced:
            self._replaced.pop()[1]()

    def _agreeing(self, hook: Any) -> Patch:
        if not hasattr(hook, "state_manager") or not hasattr(hook, "threshold"):
            raise InputError(
                f"this diffusers' {type(hook).__name__} decides in a way ditmesh does not know; disable the cache "
                "or use one rank per sequence"
            )

        def decide(residual: Tensor) -> bool:
            state = hook.state_manager.get_state()
            before = state.head_block_residual
            if before is None:
                return True
            sums = torch.stack(
                [(residual - before).abs().sum(dtype=torch.float64), before.abs().sum(dtype=torch.float64)]
            )
            parts = self._link.all_gather(sums.unsqueeze(0), (1,) * self._link.size, dim=0)
            change, size = parts.sum(dim=0).tolist()
            return change / size > hook.threshold

        return Patch(hook, "_should_compute_remaining_blocks", decide)


def _first_block_hooks(model: nn.Module) -> list[Any]:
    found = []
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hooks = getattr(registry, "hooks", {})
        found += [hook for hook in hooks.values() if hasattr(hook, "_should_compute_remaining_blocks")]
    return found


def _reset(model: Any) -> None:
    """Empty a model's caches. A call may be in progress: which of a pipeline's calls it is stays known."""
    managers = [
        hook.state_manager
        for module in model.modules()
        for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values()
        if hasattr(hook, "state_manager")
    ]
    contexts = [getattr(manager, "_context", None) for manager in managers]
    model._reset_stateful_cache()
    for manager, context in zip(managers, contexts, strict=True):
        if context is not None:
            manager.set_context(context)


class Caches(Strategy):
    """diffusers' caches of every transformer, deciding together."""

    name = "caches"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return config.world_size > 1

    def apply(self, undo: ExitStack) -> None:
        """See `Strategy.apply`."""
        for model in self.context.models:
            caches = AgreedCaches(model.model, self.context.mesh.world)
            undo.callback(caches.close)
            undo.callback(model.chain.add(caches.around_call))

    def forget(self) -> None:
        """See `Strategy.forget`: what a request that was broken off has left in diffusers' caches."""
        for model in self.context.models:
            cached: Any = model.model
            if getattr(cached, "is_cache_enabled", False):
                _reset(cached)

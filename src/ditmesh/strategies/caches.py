"""diffusers' caches on several ranks: every rank takes the same decision.

First Block Cache skips the remaining blocks when the first block's residual has changed little. Each rank sees only its
own tokens and rows: the statistic is summed over the ranks before it is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ParallelConfig
from ..core.arguments import Arguments
from ..core.patching import Patch, Proceed
from ..errors import ConfigError, InputError
from .base import Context, ParallelModel, Strategy

# The method of a First Block Cache's hook that decides.
DECIDE = "_should_compute_remaining_blocks"


def diffusers_hooks(module: nn.Module) -> Mapping[str, Any]:
    """diffusers' hooks on a module, by name."""
    return getattr(getattr(module, "_diffusers_hook", None), "hooks", {})


def stateful_hooks(model: nn.Module) -> Iterator[Any]:
    """Hooks of diffusers that keep something from one call to the next: its caches."""
    for module in model.modules():
        yield from (hook for hook in diffusers_hooks(module).values() if getattr(hook, "_is_stateful", False))


def state_clause(model: nn.Module) -> str:
    """A clause that names the state of a model between steps; see `Strategy.keeps_between_steps`.

    diffusers (0.42) keeps it in the hooks: some (Faster Cache, Pyramid Attention Broadcast) have one state for all
    calls, others one for every name in `cache_context`, which are branches of guidance, the same for every request.
    """
    name, hook = type(model).__name__, next(stateful_hooks(model), None)
    if getattr(model, "is_cache_enabled", False):
        named = "" if hook is None else f" ({type(hook).__name__})"
        return f"{name} has a cache{named}, which remembers the step before, but not the request of that step"
    return "" if hook is None else f"{name} has a hook that remembers calls ({type(hook).__name__})"


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
        return config.world_size > 1 or config.reproducible

    def apply(self, undo: ExitStack) -> None:
        undo.callback(self._agree_on, [], None)
        for model in self.context.models:
            undo.callback(model.chain.add(partial(self._around_call, model)))

    def _around_call(self, model: ParallelModel, proceed: Proceed, arguments: Arguments) -> Any:
        """Let ranks agree on the blocks that a cache of diffusers skips in a call."""
        # A cache may be enabled before or after `parallelize`, and changed between requests.
        if self._agreeing or getattr(model.model, "is_cache_enabled", True):
            self._check(model)
            hooks = _hooks_of(model.model) if self.context.mesh.world.size > 1 else []
            self._agree_on([hook for hook in hooks if hasattr(hook, DECIDE)], model.model)
        return proceed(arguments)

    def _check(self, model: ParallelModel) -> None:
        """Reject a cache that would reuse one part of the image for another."""
        config = self.context.config
        if not (config.reproducible or config.stages_or_patches):
            return
        part, way = "tile", "leave reproducible out"
        if config.stages_or_patches:
            part, way = "patch", "use ulysses, ring, cfg or data"
        for region in model.layout.regions:
            if hook := next(stateful_hooks(model.model.get_submodule(region.blocks)), None):
                raise ConfigError(
                    f"diffusers' cache ({type(hook).__name__}) keeps what a block made of the whole image, and "
                    f"{config.describe()} runs blocks {part} by {part}; call disable_cache(), or {way}"
                )

    def _agree_on(self, hooks: list[Any], model: nn.Module | None) -> None:
        """Let these hooks of a model, and of its hooks only these, decide together; without a model no other ones."""
        others = [one.model for one in self.context.models if model is not None and one.model is not model]
        kept = [*hooks, *(hook for other in others for hook in _hooks_of(other))] if self._agreeing else hooks
        for pair in [pair for pair in self._agreeing if all(pair[0] is not hook for hook in kept)]:
            # Of a cache that was taken off.
            self._agreeing.remove(pair)
            pair[1].undo()
        for hook in hooks:
            if all(hook is not other for other, _ in self._agreeing):
                self._agreeing.append((hook, self._agree(hook)))

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
            change, size = parts.sum(dim=0)
            # As tensors: without a residual before, the ratio is no number, or infinite.
            return (change / size).item() > hook.threshold

        return Patch(hook, DECIDE, decide)

    def before_training(self, model: nn.Module, arguments: Arguments) -> None:
        if any(stateful_hooks(model)):
            raise InputError(
                f"{type(model).__name__} cannot be trained with a cache: what it keeps of an earlier step has no "
                "gradient path; take the cache off (disable_cache()) first"
            )

    def forget(self) -> None:
        # State that an interrupted request has left in diffusers' caches.
        for model in self.context.models:
            cached: Any = model.model
            if getattr(cached, "is_cache_enabled", False):
                # A call may be in progress: which of a pipeline's calls it is stays known.
                managers = [hook.state_manager for hook in _hooks_of(cached) if hasattr(hook, "state_manager")]
                contexts = [getattr(manager, "_context", None) for manager in managers]
                cached._reset_stateful_cache()
                for manager, context in zip(managers, contexts, strict=True):
                    if context is not None:
                        manager.set_context(context)


def _hooks_of(model: nn.Module) -> list[Any]:
    return [hook for module in model.modules() for hook in diffusers_hooks(module).values()]

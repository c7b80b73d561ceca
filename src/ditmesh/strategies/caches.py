"""diffusers' caches on several ranks: every rank takes the same decision.

First Block Cache skips the remaining blocks when the first block's residual has changed little. Each rank sees only its
own tokens and rows: the statistic is summed over the ranks before it is compared. Other caches count steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn

from ..combinations import parse_cache
from ..config import ParallelConfig
from ..core.arguments import Arguments
from ..core.clock import TransformerCall
from ..core.patching import Patch, Proceed
from ..errors import ConfigError, InputError, problem_text, shortened
from ..staleness.schedule import noise_levels
from .base import ParallelModel, Request, Strategy

# The methods by which caches of diffusers decide: of a First Block Cache's hook, and of what a SeaCache's hooks share.
DECIDE, GATE = "_should_compute_remaining_blocks", "resolve_gate"


def diffusers_hooks(module: nn.Module) -> Mapping[str, Any]:
    """diffusers' hooks on a module, by name."""
    return getattr(getattr(module, "_diffusers_hook", None), "hooks", {})


def _hooks_of(model: nn.Module) -> list[Any]:
    return [hook for module in model.modules() for hook in diffusers_hooks(module).values()]


def stateful_hooks(model: nn.Module) -> Iterator[Any]:
    """Hooks of diffusers that keep something from one call to the next: its caches."""
    return (hook for hook in _hooks_of(model) if getattr(hook, "_is_stateful", False))


def state_clause(model: nn.Module) -> str:
    """A clause that names the state of a model between steps; see `Strategy.keeps_between_steps`.

    diffusers (0.42) keeps it in the hooks: some (Faster Cache, Pyramid Attention Broadcast) have one state for all
    calls, others one for every name in `cache_context`, which are branches of guidance, the same for every request.
    """
    names = [type(hook).__name__ for hook in stateful_hooks(model)]
    return f"{type(model).__name__} has a cache ({names[0]}), which remembers a step, not its request" if names else ""


class Caches(Strategy):
    """diffusers' caches of every transformer, deciding together; one that the configuration names is enabled here.

    Ranks that share rows agree as well as those that share tokens, since one device decides for the whole batch; those
    that share weights add the same numbers again.
    """

    name = "caches"
    # Arguments of the call in progress, before rows and tokens are shared out.
    _given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.world_size > 1 or config.reproducible or config.cache is not None

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            if self.context.config.cache is not None:
                undo.callback(self._enabled(self.context.config.cache, model))
            hook = model.model.register_forward_pre_hook(self._begin_call, with_kwargs=True, prepend=True)
            undo.callback(hook.remove)
            undo.callback(model.chain.add(partial(self._around_call, model)))

    def _enabled(self, cache: str, model: ParallelModel) -> Callable[[], None]:
        """Enable a cache of one transformer; returns what takes it off. `ConfigError`: the model cannot have it."""
        cached: Any = model.model
        settings = cache_settings(cache, lambda: self.context.pipe.current_timestep)
        try:
            if getattr(cached, "is_cache_enabled", True):
                raise ConfigError("it has a cache, or diffusers has none for it")
            cached.enable_cache(settings)
            self._check(model)
            hooks = _hooks_of(cached)
            if len(hooks) < 2 or any(getattr(hook, "raw_vision_callback", hook) is None for hook in hooks):
                raise ConfigError("it finds nothing to leave out")
            if hasattr(settings, "current_timestep_callback") and not hasattr(self.context.pipe, "current_timestep"):
                raise ConfigError("the pipeline does not tell its timestep")
        except (ConfigError, ValueError) as error:
            _disable(cached, settings)
            raise ConfigError(f"cache={cache!r} is not for {model.layout.model}: {error}; leave cache out") from None

        def begin_step(call: TransformerCall) -> None:
            if call.step == 0 and (levels := noise_levels(getattr(self.context.pipe, "scheduler", None))) is not None:
                vars(settings).update(vars(cache_settings(cache, steps=len(levels) - 1)))

        if hasattr(settings, "mag_ratios"):
            self.context.clock.on_step(begin_step)
        return partial(_disable, cached, settings)

    def _begin_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = (args, kwargs) if getattr(model, "is_cache_enabled", False) else ((), {})
        if getattr(model, "_is_cached", False):
            raise ConfigError(
                f"cache-dit compares tokens around blocks of {type(model).__name__} with those inside, of which a rank "
                "has a part; call cache_dit.disable_cache(...), and use a cache of diffusers (docs/attention.md)"
            )

    def _around_call(self, model: ParallelModel, proceed: Proceed, arguments: Arguments) -> Any:
        """Let ranks agree on the blocks that a cache of diffusers skips in a call."""
        with ExitStack() as agreed:
            # A cache may be enabled before or after `parallelize`, and changed between requests.
            if getattr(model.model, "is_cache_enabled", True):
                self._check(model)
                for hook in _hooks_of(model.model) if self.context.mesh.world.size > 1 else []:
                    if hasattr(hook, DECIDE):
                        agreed.callback(Patch(hook, DECIDE, partial(self._changes, hook)))
                    elif latents := getattr(hook, "raw_vision_callback", None):
                        whole = partial(lambda latents, model, *_: latents(model, *self._given), latents)
                        agreed.callback(Patch(hook, "raw_vision_callback", whole))
                        shared = hook.shared_state
                        agreed.callback(Patch(shared, GATE, partial(self._voted, shared.resolve_gate)))
            return proceed(arguments)

    def _check(self, model: ParallelModel) -> None:
        """Reject a cache that would reuse one part of the image for another."""
        config, hook = self.context.config, next(stateful_hooks(model.model), None)
        settings: Any = getattr(hook, "config", None)
        if hasattr(settings, "mag_ratios"):
            lists = [region for region in model.layout.regions if _hooks_of(model.model.get_submodule(region.blocks))]
            if config.sequence > 1 and not all(region.chained for region in lists[1:]):
                raise ConfigError(
                    f"MagCache compares tokens of {lists[0].blocks} and {lists[-1].blocks}, which {config.describe()} "
                    "shares out in two ways; use cfg or data, or another cache"
                )
            if settings.calibrate and config.world_size > 1:
                raise ConfigError("MagCache's calibrate=True measures one rank's tokens; calibrate on one device")
        if hook is not None and (config.reproducible or config.stages_or_patches):
            part = "patch by patch" if config.stages_or_patches else "tile by tile"
            raise ConfigError(
                f"diffusers' cache ({type(hook).__name__}) keeps what a block made of the whole image, and "
                f"{config.describe()} runs blocks {part}; disable_cache(), or use ulysses, ring, cfg or data alone"
            )

    def _changes(self, hook: Any, residual: Tensor) -> bool:
        """True if the first block's residual, on all ranks, has changed by more than a First Block Cache bears."""
        if (before := hook.state_manager.get_state().head_block_residual) is None:
            return True
        change, size = self._added((residual - before).abs(), before.abs())
        # As tensors: without a residual before, the ratio is no number, or infinite.
        return (change / size).item() > hook.threshold

    def _voted(self, gate: Callable[..., bool], state: Any, *given: Any) -> bool:
        """True if a SeaCache computes on any rank: unlike devices may differ at the threshold."""
        computes = gate(state, *given)
        if self._added(*torch.tensor([computes, not computes], device=self.context.mesh.device)).all():
            state.gate_should_compute, state.accumulated_distance, computes = True, 0.0, True
        return computes

    def _added(self, *values: Tensor) -> Tensor:
        """The sum of each tensor over all ranks; rows that several ranks have count once."""
        link, (row, _) = self.context.mesh.world, self.context.clock.call.rows or (0, 0)
        sums = [value.sum(dtype=torch.float64) for value in values]
        numbers = torch.stack([*sums, torch.full_like(sums[0], row)]).unsqueeze(0)
        parts = link.all_gather(numbers, (1,) * link.size, dim=0)
        alike = (parts[:, -1:] == parts[:, -1]).sum(dim=1, keepdim=True)
        return (parts / alike)[:, :-1].sum(dim=0)

    def begin_request(self, request: Request) -> None:
        # Caches know branches of guidance by name, and keys of text by their place in memory: not the request.
        self.forget()

    def end_request(self, failed: bool) -> None:
        self._given = ((), {})

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
                contexts = [manager._context for manager in managers]
                cached._reset_stateful_cache()
                for manager, context in zip(managers, contexts, strict=True):
                    manager.set_context(context)


def _disable(model: Any, settings: Any) -> None:
    """Take a cache off, and what diffusers leaves: empty registries, and methods of the class as attributes."""
    if hasattr(model, "_cache_config") and (model._cache_config is None or model._cache_config is settings):
        model._cache_config = settings
        model.disable_cache()
    for module in model.modules():
        if (registry := vars(module).get("_diffusers_hook")) is not None and not registry.hooks:
            del vars(module)["_diffusers_hook"]
        if vars(module).get("forward") == MethodType(type(module).forward, module):
            del vars(module)["forward"]


def cache_settings(cache: str, timestep: Callable[[], Any] = lambda: 0, steps: int | None = None) -> Any:
    """diffusers' settings of a cache; `ConfigError`: it does not take these values. ``steps``: of the request."""
    from diffusers import hooks

    name, args, values = parse_cache(cache)
    key = name
    try:
        kind = getattr(hooks, name)
        hints, anything = get_type_hints(kind), ConfigDict(arbitrary_types_allowed=True)
        if isinstance(model := values.get("mag_ratios"), str):
            values["mag_ratios"] = getattr(hooks.mag_cache, f"{model.upper()}_MAG_RATIOS")
        for key, value in [*zip(hints, args, strict=False), *values.items()]:
            if key in hints:
                TypeAdapter(hints[key], config=anything).validate_python(value, strict=True)
        more = {"current_timestep_callback": timestep} | ({} if steps is None else {"num_inference_steps": steps})
        return kind(*args, **{key: more[key] for key in more if key in hints} | values)
    except ValidationError as error:
        why = f"{key}: {problem_text(error.errors(include_url=False)[0])}"
    except (AttributeError, TypeError, ValueError) as error:
        why = shortened(error).split(". ")[0]
    raise ConfigError(f"cache={cache!r} is not possible: {why}; see docs/attention.md for what it takes")

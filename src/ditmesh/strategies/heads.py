"""The number of a transformer's attention heads, and the degrees that they allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import ParallelConfig
from ..errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from ..layout import TokenLayout


def heads_of(model: nn.Module, layout: TokenLayout | None = None) -> int | None:
    """The smallest number of attention heads in a layout's lists, or in all modules; None: the model does not say."""
    lists = [model.get_submodule(region.blocks) for region in layout.regions] if layout is not None else [model]
    counts = [
        heads
        for blocks in lists
        for module in blocks.modules()
        if hasattr(module, "to_q") and isinstance(heads := getattr(module, "heads", None), int)
    ]
    config = getattr(model, "config", None)
    named = (getattr(config, key, None) for key in ("num_attention_heads", "num_heads", "n_heads"))
    return min(counts, default=next((count for count in named if isinstance(count, int)), None))


def takes_batch_apart(module: nn.Module) -> bool:
    """True for attention with a processor of perturbed attention guidance, which takes the batch apart by branch."""
    return type(vars(module).get("processor")).__name__.startswith("PAG")


def check_heads(config: ParallelConfig, heads: int | None, model: str) -> None:
    """Reject more tensor ranks than heads, and more Ulysses ranks than a tensor rank has: `ConfigError`.

    Does nothing when the number of heads is not known; the first attention call checks again.
    """
    if heads is None:
        return
    if config.tensor > heads:
        raise ConfigError(
            f"tensor={config.tensor} is more than the {heads} attention heads of {model}; use tensor <= {heads} and "
            "ulysses or ring for the rest"
        )
    # Uneven cuts leave the last rank with the fewest heads.
    local = heads // config.tensor
    if config.ulysses > local:
        best = max(d for d in range(1, local + 1) if local % d == 0 and config.sequence % d == 0)
        left = f" that tensor={config.tensor} leaves a rank" if config.tensor > 1 else ""
        raise ConfigError(
            f"ulysses={config.ulysses} is more than the {local} attention heads{left} of {model}; "
            f"use ulysses={best} with ring={config.sequence // best}"
        )

"""Training of diffusion transformers on the same mesh as inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..requirements import check_versions

if TYPE_CHECKING:
    from .config import TrainConfig
    from .gradients.reduce import reduce_gradients

__all__ = ["TrainConfig", "reduce_gradients"]

check_versions("train")

# Loaded on first use: the command reads a run's configuration before it waits for torch.
_LAZY = {"TrainConfig": "config", "reduce_gradients": "gradients.reduce"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

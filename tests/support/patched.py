"""What patches could have changed on a model, to compare before and after."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def sdpa() -> Callable[..., Any]:
    """The attention function in force, once the engines of earlier tests that were never restored are collected."""
    gc.collect()
    return F.scaled_dot_product_attention


def everything(model: nn.Module) -> dict[str, object]:
    """All that could have been changed on a model: hooks, instance attributes, forwards."""
    state: dict[str, object] = {"sdpa": sdpa()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            state[f"{name}|{key}"] = dict(value) if isinstance(value, dict) else value
    return state


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    return a.keys() == b.keys() and all(
        a[key] is b[key] or a[key] == b[key] for key in a if not torch.is_tensor(a[key])
    )

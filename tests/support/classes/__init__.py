"""Tiny transformers of diffusers by class, and calls of them in the forms that their pipelines make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Case:
    """How to make a tiny transformer, and the keyword arguments of its forward by form of call."""

    make: Callable[[], nn.Module]
    calls: dict[str, Callable[[], dict[str, Any]]]

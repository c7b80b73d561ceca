"""Tiny pipelines of diffusers by class, and calls of them as their users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Exam:
    """How to make a pipeline of tiny random parts, and how it is called.

    Attributes:
        make: the pipeline; the same weights in every process.
        call: all keyword arguments of a call for prompts given by number, generators and sizes among them.
        guidance: whether the call has branches of guidance, so that ``cfg=2`` has something to share.
        several: whether it takes several prompts at once, so that ``data=2`` has.
        refused: by configuration ("ulysses=2", …; "tokens" for ulysses and ring), a word of the sentence that refuses.
    """

    make: Callable[[], Any]
    call: Callable[[list[int]], dict[str, Any]]
    guidance: bool = True
    several: bool = True
    refused: dict[str, str] = field(default_factory=dict)


def generators(prompts: list[int]) -> list[torch.Generator]:
    """One for every prompt."""
    return [torch.Generator().manual_seed(100 + one) for one in prompts]

"""Embedded models as they are shipped, in a process of the tests."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import ditmesh
from ditmesh import zoo

# One step of the 8-bit pixels, which is what rounding may do to differences of 1e-6.
TOLERANCE = 1


@cache
def pipeline_of(name: str) -> Any:
    """Loaded once in a process."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(zoo.path(name))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def on_ranks(pipe: Any, config: dict[str, Any] | None) -> AbstractContextManager[Any]:
    """The pipeline on the ranks of a configuration while inside; None: without ditmesh."""
    return nullcontext(pipe) if config is None else ditmesh.parallelized(pipe, config)


def card_of(name: str) -> tuple[str, dict[str, Any]]:
    """The card's text, and the evaluation it is written from, which is one of the settings that are recommended."""
    told, folder = zoo.EMBEDDED[name], zoo.path(name)
    measured = json.loads((folder / "training.json").read_text(encoding="utf-8"))["evaluation"]
    assert (measured["steps"], measured["guidance_scale"]) == (told.steps, told.guidance_scale)
    return (folder / "README.md").read_text(encoding="utf-8"), measured

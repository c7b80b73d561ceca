"""Embedded models as they are shipped, in a process of the tests."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ditmesh
from ditmesh import zoo
from ditmesh.cli.main import main
from ditmesh.generate.receipt import Receipt, read_receipt

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


def generated(name: str, prompt: str, folder: Path, capfd: Any) -> Receipt:
    """The receipt of what ``ditmesh generate`` makes in two steps of an embedded model with nothing else said."""
    asked = ["generate", prompt, "--model", name, "--threads", "1", "--device", "cpu", "--steps", "2"]
    with pytest.raises(SystemExit) as left:
        main([*asked, "--out", str(folder), "--json"])
    told = capfd.readouterr()
    assert left.value.code == 0, told.err
    (made,) = json.loads(told.out)["images"]
    return read_receipt(made["path"])


def check_captioned_card(name: str, accuracy: str) -> tuple[str, dict[str, Any]]:
    """The card of a model of captions states the measured figures, and they are good; both, as `card_of`."""
    card, measured = card_of(name)
    assert measured["captions"] == len(zoo.captions(name))
    assert measured[accuracy] >= 0.85
    assert f"{measured[accuracy]:.3f}" in card
    assert f"{measured['autoencoder_psnr']:.1f} dB" in card
    return card, measured


def card_of(name: str) -> tuple[str, dict[str, Any]]:
    """The card's text, and the evaluation it is written from, which is one of the settings that are recommended."""
    told, folder = zoo.EMBEDDED[name], zoo.path(name)
    measured = json.loads((folder / "training.json").read_text(encoding="utf-8"))["evaluation"]
    assert (measured["steps"], measured["guidance_scale"]) == (told.steps, told.guidance_scale)
    return (folder / "README.md").read_text(encoding="utf-8"), measured

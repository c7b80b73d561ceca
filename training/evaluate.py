"""The measure of the embedded model: is the training picture nearest to a drawing the one its caption names?

Drawing and training pictures are compared as 32x32 thumbnails by mean squared error over the pixels.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
from PIL import Image

from ditmesh.lab.study.references import nearest, read_sheet, shrink
from training import export
from training.loop import console

STEPS = 12
GUIDANCE = 2.0
ZERO_TOKENS = 16  # the pipeline's max_sequence_length; its default of 256 only costs time


def draw(
    pipe: Any,
    prompts: list[str],
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
    batch: int = 32,
    max_sequence_length: int = ZERO_TOKENS,
    size: int | None = None,
) -> np.ndarray:
    """Draws each prompt from its own seed (``seed`` + its place): (n, h, w, 3) ``uint8``.

    ``size`` in pixels is for pipelines whose own default is not their model's.
    """
    out: list[np.ndarray] = []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(some))]
        images = pipe(
            some,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
            max_sequence_length=max_sequence_length,
            height=size,
            width=size,
            output_type="np",
        ).images
        out.append((images * 255.0).round().clip(0, 255).astype(np.uint8))
    return np.concatenate(out)


def evaluate(
    model: Path,
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
    max_sequence_length: int = ZERO_TOKENS,
    size: int | None = None,
    sheet: bool = True,
) -> dict[str, Any]:
    """Loads the exported model, draws all its captions, and returns the figures.

    Writes ``samples.png`` (the drawings, in the order of the captions) beside it, with ``sheet``.
    """
    entries = json.loads((model / "captions.json").read_text(encoding="utf-8"))
    references = read_sheet(model / "thumbnails.png", len(entries))
    captions = [entry["caption"] for entry in entries]
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    began = time.monotonic()
    drawn = draw(
        pipe, captions, steps=steps, guidance=guidance, seed=seed, size=size, max_sequence_length=max_sequence_length
    )
    seconds = time.monotonic() - began
    found = nearest(shrink(drawn), references)
    right = found == np.arange(len(captions))
    if sheet:
        page = export.sheet(drawn).quantize(256, dither=Image.Dither.NONE)  # a quarter of the size
        page.save(model / "samples.png", optimize=True)
    figures = {
        "captions": len(captions),
        "steps": steps,
        "guidance_scale": guidance,
        "max_sequence_length": max_sequence_length,
        "seed": seed,
        "nearest_picture_accuracy": round(float(right.mean()), 4),
        "wrong": {captions[i]: entries[int(found[i])]["caption"] for i in np.flatnonzero(~right)},
        "seconds": round(seconds, 1),
    }
    console.print(f"nearest picture: {figures['nearest_picture_accuracy']:.3f} of {len(captions)} captions")
    return figures

"""The measure of the class-conditional models: is the training view nearest to a drawing one of its class?

As in ``training.evaluate``, drawings and training views are compared as 32x32 thumbnails. The mean error
to the nearest view is reported too: a drawing whose parts belong to different views is far from all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
from PIL import Image

from ditmesh.lab.study.references import nearest, read_references, shrink
from training import export
from training.autoencoder import psnr
from training.loop import console

STEPS = 20
GUIDANCE = 3.0
# What the figures call them, and diffusers' classes: all take their settings from the shipped scheduler.
SAMPLERS = {"DDIM": "DDIMScheduler", "DPM-Solver++": "DPMSolverMultistepScheduler", "DDPM": "DDPMScheduler"}


def use_sampler(pipe: Any, sampler: str) -> None:
    """Gives the pipeline one of ``SAMPLERS`` with the settings of the scheduler it has."""
    pipe.scheduler = getattr(diffusers, SAMPLERS[sampler]).from_config(pipe.scheduler.config)


def draw(
    pipe: Any,
    classes: list[int],
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
    batch: int = 32,
) -> np.ndarray:
    """Draws each class from its own seed (``seed`` + its place): (n, h, w, 3) ``uint8``."""
    out: list[np.ndarray] = []
    for start in range(0, len(classes), batch):
        some = classes[start : start + batch]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(some))]
        images = pipe(
            some, num_inference_steps=steps, guidance_scale=guidance, generator=generators, output_type="np"
        ).images
        out.append((images * 255.0).round().clip(0, 255).astype(np.uint8))
    return np.concatenate(out)


def judge(drawn: np.ndarray, references: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each of n drawings, reduced to the references' size: the class of the nearest view, and its PSNR in dB.

    ``drawn`` (n, h, w, 3), ``references`` (classes, views, h, w, 3), both ``uint8``.
    """
    flat = references.reshape(-1, *references.shape[2:])
    found = nearest(drawn, flat)
    return found // references.shape[1], psnr(drawn, flat[found])


def evaluate(
    model: Path,
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
    samplers: Iterable[str] = tuple(SAMPLERS),
) -> dict[str, Any]:
    """Loads the exported model and draws every class with each sampler; returns the figures.

    Writes ``samples.png`` beside it: the classes in order, drawn with the model's own scheduler.
    """
    entries = json.loads((model / "captions.json").read_text(encoding="utf-8"))
    words = [entry["caption"] for entry in entries]
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    # Not a sampler's own config: some do not hand on what only others need.
    plain = pipe.scheduler
    figures: dict[str, Any] = {
        "classes": len(words),
        "steps": steps,
        "guidance_scale": guidance,
        "seed": seed,
        "samplers": {},
    }
    for sampler in samplers:
        pipe.scheduler = plain
        use_sampler(pipe, sampler)
        began = time.monotonic()
        drawn = draw(pipe, list(range(len(words))), steps=steps, guidance=guidance, seed=seed)
        seconds = time.monotonic() - began
        references = read_references(model, len(words), drawn.shape[1])
        found, near = judge(shrink(drawn, references.shape[2]), references)
        right = found == np.arange(len(words))
        figures["samplers"][sampler] = {
            "nearest_picture_accuracy": round(float(right.mean()), 4),
            "wrong": {words[i]: words[int(found[i])] for i in np.flatnonzero(~right)},
            "psnr_to_nearest": round(float(near.mean()), 2),
            "seconds": round(seconds, 1),
        }
        console.print(f"{sampler}: nearest picture {right.mean():.3f}, {near.mean():.2f} dB")
        if sampler == "DDIM":
            page = export.sheet(drawn).quantize(256, dither=Image.Dither.NONE)  # a quarter of the size
            page.save(model / "samples.png", optimize=True)
    return figures

"""The strip of pictures in the README: one device above, two devices below.

``python benchmarks/strip.py`` writes ``docs/images/strip.png`` and says how far apart the rows are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

import ditmesh
from ditmesh import zoo

MODEL = "emoji-flux"
PROMPTS = ("a red fox", "a cactus", "a pizza", "a red apple", "an owl", "a rocket", "a snail", "a sunflower")
TILE, GAP = 96, 8
STRIP = Path(__file__).parents[1] / "docs" / "images" / "strip.png"


def pictures(pipe: object) -> list[Image.Image]:
    facts = zoo.EMBEDDED[MODEL]
    call = {
        "num_inference_steps": facts.steps,
        "guidance_scale": facts.guidance_scale,
        "max_sequence_length": facts.max_sequence_length,
        "height": facts.size,
        "width": facts.size,
    }
    return [
        pipe(prompt, generator=torch.Generator().manual_seed(seed), **call).images[0]  # type: ignore[operator]
        for seed, prompt in enumerate(PROMPTS)
    ]


def main() -> None:
    alone = DiffusionPipeline.from_pretrained(zoo.path(MODEL))
    alone.set_progress_bar_config(disable=True)
    rows = [pictures(alone)]
    with ditmesh.Ranks(2) as ranks:
        pipe = ranks.load(MODEL, {"ulysses": 2})
        pipe.set_progress_bar_config(disable=True)
        rows.append(pictures(pipe))
    size = (len(PROMPTS) * (TILE + GAP) - GAP, 2 * TILE + GAP)
    strip = Image.new("RGB", size, "white")
    for row, made in enumerate(rows):
        for column, picture in enumerate(made):
            scaled = picture.resize((TILE, TILE), Image.Resampling.BICUBIC)
            strip.paste(scaled, (column * (TILE + GAP), row * (TILE + GAP)))
    STRIP.parent.mkdir(exist_ok=True)
    strip.save(STRIP, optimize=True)
    pairs = zip(*rows, strict=True)
    worst = max(int(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max()) for a, b in pairs)
    print(f"{STRIP}: the rows differ by at most {worst} of 255")


if __name__ == "__main__":
    main()

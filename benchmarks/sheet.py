"""The sheet of images in the README: one device in the first row, two in the second, four in the third.

``python benchmarks/sheet.py`` writes ``docs/images/sheet.png`` and says how far rows are from the first. The columns
are prompts of `emoji-flux`, which knows its emoji by heart, and classes of `fashion-dit`, which makes new clothes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
from PIL import Image

import ditmesh
from ditmesh import zoo

COLUMNS = {
    "emoji-flux": ("a red fox", "a cactus", "a pizza", "an owl", "a rocket", "a snail"),
    "fashion-dit": ("sneaker", "dress", "bag", "ankle boot"),
}
DEVICES = (1, 2, 4)
TILE, GAP = 104, 8
SHEET = Path(__file__).parents[1] / "docs" / "images" / "sheet.png"


def images(pipe: Any, model: str) -> list[Image.Image]:
    """An image of every column, each from its own seed."""
    facts, asked = zoo.EMBEDDED[model], list(COLUMNS[model])
    call: dict[str, Any] = {"num_inference_steps": facts.steps, "guidance_scale": facts.guidance_scale}
    if facts.classes:
        names = zoo.captions(model)
        asked = [names.index(name) for name in asked]
    else:
        call |= {"max_sequence_length": facts.max_sequence_length, "height": facts.size, "width": facts.size}
    return pipe(asked, generator=[torch.Generator().manual_seed(seed) for seed in range(len(asked))], **call).images


def main() -> None:
    rows: list[list[Image.Image]] = [
        [image for model in COLUMNS for image in images(DiffusionPipeline.from_pretrained(zoo.path(model)), model)]
    ]
    for devices in DEVICES[1:]:
        with ditmesh.Ranks(devices) as ranks:
            config = {"ulysses": devices}
            rows.append([image for model in COLUMNS for image in images(ranks.load(model, config), model)])
    step = TILE + GAP
    sheet = Image.new("RGB", (len(rows[0]) * step - GAP, len(rows) * step - GAP), "white")
    for number, row in enumerate(rows):
        apart = [np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)) for a, b in zip(row, rows[0], strict=True)]
        print(f"{DEVICES[number]} devices: at most {max(int(each.max()) for each in apart)} of 255 from one device")
        for column, image in enumerate(row):
            large = image.convert("RGB").resize((TILE, TILE), Image.Resampling.BICUBIC)
            sheet.paste(large, (column * step, number * step))
    sheet.save(SHEET, optimize=True)


if __name__ == "__main__":
    main()

"""Images of stale strategies as they are, for the report: two that came close to the exact ones, and one that did not.

    python benchmarks/pictures.py       # minutes of one core; benchmarks/figures.py draws the figure

Rows are captions of `quality.py`'s tables at 50 and at 8 steps, columns are `COLUMNS`. Ranks are simulated.
``benchmarks/measured/pictures.png`` holds the images side by side, ``pictures.json`` their distances.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch

from figures import MEASURED
from harness import command_line, write_figures
from machine import describe_machine

MODEL, GUIDANCE, DEVICES = "emoji-dit-s", 3.0, 4
# Caption and seed: the first of the eight images of the tables, the farthest of them, and the farthest of all.
IMAGES = (("lion", 0), ("gift", 7), ("cow", 0))
STEPS = (50, 8)
STALE = {"ring": DEVICES, "exchange": "displaced", "warmup": "fixed(1)", "predict": "none"}
COLUMNS: dict[str, dict[str, Any]] = {
    "exact": {},
    "displaced": STALE,
    "displaced, moved on": STALE | {"predict": "linear"},
    "PipeFusion": {"patches": DEVICES, "warmup": "fixed(1)"},
    "naive": {"ring": DEVICES, "exchange": "naive", "warmup": "fixed(1)"},
}


def draw(pipe: Any, config: dict[str, Any], steps: int) -> list[np.ndarray]:
    """The images of one column at so many steps, each from its own seed."""
    import ditmesh

    ranks = ditmesh.simulated if "ring" in config else ditmesh.parallelized
    labels = pipe.get_label_ids([caption for caption, _ in IMAGES])
    generators = [torch.Generator().manual_seed(seed) for _, seed in IMAGES]
    with ranks(pipe, config):
        return [
            *pipe(
                labels, num_inference_steps=steps, guidance_scale=GUIDANCE, generator=generators, output_type="np"
            ).images
        ]


def main() -> None:
    """Draw and write."""
    command_line(__doc__, figures=False).parse_args()
    import diffusers
    from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
    from PIL import Image

    from ditmesh import zoo
    from ditmesh.lab.study.samplers import set_sampler
    from ditmesh.quality.metrics import psnr

    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    pipe = DiffusionPipeline.from_pretrained(zoo.path(MODEL))
    pipe.set_progress_bar_config(disable=True)
    set_sampler(pipe, "ddim", pipe.scheduler)
    lines, rows = [], []
    for steps in STEPS:
        columns = [
            [(255 * image).round().astype(np.uint8) for image in draw(pipe, config, steps)]
            for config in COLUMNS.values()
        ]
        for number, (caption, seed) in enumerate(IMAGES):
            images = [column[number] for column in columns]
            ratios = [round(psnr(image, images[0]), 2) for image in images[1:]]
            rows.append({"caption": caption, "seed": seed, "steps": steps, "psnr": ratios})
            lines.append(np.concatenate(images, axis=1))
            print(rows[-1], flush=True)
    Image.fromarray(np.concatenate(lines)).save(MEASURED / "pictures.png", optimize=True)
    figures = {"machine": describe_machine(), "columns": [*COLUMNS], "rows": rows}
    write_figures(figures, MEASURED / "pictures.json")


if __name__ == "__main__":
    main()

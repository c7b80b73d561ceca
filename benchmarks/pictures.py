"""Images of stale strategies as they are, for the report: some that came close to the exact ones, and some not.

    python benchmarks/pictures.py --model faces       # minutes of one core; benchmarks/figures.py draws the figures

Rows are captions at two numbers of steps, columns are `COLUMNS`; ranks are simulated. ``pictures-MODEL.png`` of
``benchmarks/measured`` holds the images side by side, ``pictures-MODEL.json`` their distances.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch

from figures import MEASURED
from harness import command_line, write_figures
from machine import describe_machine
from quality import folder_of, parent_of

DEVICES = 4
# Caption and seed: the first of the images of the tables, the farthest of them; of emoji also the farthest of all.
IMAGES = {"emoji-dit-s": (("lion", 0), ("gift", 7), ("cow", 0)), "faces": (("long hair", 0), ("turban", 6))}
STEPS = {"emoji-dit-s": (50, 8), "faces": (20, 8)}
STALE = {"ring": DEVICES, "exchange": "displaced", "warmup": "fixed(1)", "predict": "none"}
COLUMNS: dict[str, dict[str, Any]] = {
    "exact": {},
    "displaced": STALE,
    "displaced, moved on": STALE | {"predict": "linear"},
    "PipeFusion": {"patches": DEVICES, "warmup": "fixed(1)"},
    "naive": {"ring": DEVICES, "exchange": "naive", "warmup": "fixed(1)"},
}


def draw(pipe: Any, config: dict[str, Any], images: Sequence[tuple[str, int]], **given: Any) -> list[np.ndarray]:
    """The images of one column, each from its own seed."""
    import ditmesh

    ranks = ditmesh.simulated if "ring" in config else ditmesh.parallelized
    labels = pipe.get_label_ids([caption for caption, _ in images])
    generators = [torch.Generator().manual_seed(seed) for _, seed in images]
    with ranks(pipe, config):
        return [*pipe(labels, generator=generators, output_type="np", **given).images]


def main() -> None:
    """Draw and write."""
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--model", choices=IMAGES, required=True)
    parser.add_argument("--models", type=Path, default=Path("runs/relatives"), help="what training/relatives.py made")
    options = parser.parse_args()
    images = IMAGES[options.model]
    import diffusers
    from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
    from PIL import Image

    from ditmesh import zoo
    from ditmesh.lab.study.samplers import set_sampler
    from ditmesh.quality.metrics import psnr

    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    pipe = DiffusionPipeline.from_pretrained(folder_of(options.model, options.models))
    pipe.set_progress_bar_config(disable=True)
    set_sampler(pipe, "ddim", pipe.scheduler)
    lines, rows = [], []
    guidance = zoo.EMBEDDED[parent_of(options.model)].guidance_scale
    for steps in STEPS[options.model]:
        given = {"num_inference_steps": steps, "guidance_scale": guidance}
        drawn = [draw(pipe, config, images, **given) for config in COLUMNS.values()]
        columns = [[(255 * image).round().astype(np.uint8) for image in column] for column in drawn]
        for number, (caption, seed) in enumerate(images):
            line = [column[number] for column in columns]
            ratios = [round(psnr(image, line[0]), 2) for image in line[1:]]
            rows.append({"caption": caption, "seed": seed, "steps": steps, "psnr": ratios})
            lines.append(np.concatenate(line, axis=1))
            print(rows[-1], flush=True)
    Image.fromarray(np.concatenate(lines)).save(MEASURED / f"pictures-{options.model}.png", optimize=True)
    figures = {"machine": describe_machine(), "columns": [*COLUMNS], "rows": rows}
    write_figures(figures, MEASURED / f"pictures-{options.model}.json")


if __name__ == "__main__":
    main()

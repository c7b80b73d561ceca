"""A LoRA for four steps: its images beside those of the model in twelve, and what stale keys cost in the four.

    ditmesh train examples/four_steps.yaml       # half an hour of one core; the LoRA that ships is of this run
    pip install --no-deps stlpips-pytorch==0.0.2
    nice python benchmarks/four_steps.py         # a minute; --lora four/lora: of another run

Captions are every eighth one of the model, which the LoRA has not been trained with. ``teacher``: the model's image in
twelve steps beside that of fewer steps, with the LoRA and without it, by PSNR and by ST-LPIPS (Ghildyal and Liu 2022,
arXiv:2207.13686), a learned distance whose weights are in that package. ``stale``: the LoRA's exact image in its four
steps beside that of stale keys, on simulated ranks. Rows that are in ``--file`` are not measured again. ``--sheet``
draws images: the model's in twelve steps, in four with the LoRA, and in four without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from PIL import Image

from harness import add_missing, command_line
from quality import setup_of
from steps import Exact

MODEL, TEACHER, STEPS, HELD_OUT, COLUMNS = "emoji-flux", 12, 4, slice(4, None, 8), 12
# Steps, and whether with the LoRA.
FEWER = [(steps, False) for steps in (1, 2, 4, 6, 8)] + [(steps, True) for steps in (1, 2, 4, 8)]
# Strategies, devices (patches of PipeFusion) and warm-ups.
STALE = [(name, count, "fixed(1)") for count in (2, 4, 8) for name in ("displaced", "displaced+linear")]
STALE += [(name, 4, "fixed(1)") for name in ("pipefusion", "naive", "displaced-int4")]
STALE += [("displaced", 4, warmup) for warmup in ("fixed(0)", "fixed(2)", "fixed(3)")]


def drawn(exact: Exact, setup: Any, cell: Any, steps: int, adapted: bool) -> Any:
    """Images in so many steps, with the LoRA or without it."""
    pipe = exact.pipeline(setup)
    (pipe.enable_lora if adapted else pipe.disable_lora)()
    images = exact.images(replace(setup, steps=steps, name=f"LoRA {adapted}"), cell)
    pipe.enable_lora()
    return images


@cache
def perceptual() -> Any:
    """The learned distance of pairs of images, (n, 3, h, w) from -1 to 1, with the weights of its Python package."""
    # Modules that the package imports, and this network does not use.
    with patch.dict(sys.modules, torchvision=MagicMock(), torchsummary=MagicMock()):
        from stlpips_pytorch import stlpips  # pyright: ignore[reportMissingImports]
    return stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False).eval()


def teacher(exact: Exact, setup: Any, cell: Any, steps: int, adapted: bool) -> dict[str, Any]:
    """Images in fewer steps beside those of the model in `TEACHER`."""
    images, wanted = (drawn(exact, setup, cell, *way) for way in ((steps, adapted), (TEACHER, False)))
    with torch.no_grad():
        apart = perceptual()(*(torch.from_numpy(2 * some - 1).float().permute(0, 3, 1, 2) for some in (images, wanted)))
    return exact.compared(setup, cell, images, wanted) | {"perceptual": apart.flatten().tolist()}


def rows(exact: Exact, setup: Any, cell: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Names of every row, and what measures it."""
    for steps, adapted in FEWER:
        yield {"part": "teacher", "steps": steps, "lora": adapted}, partial(teacher, exact, setup, cell, steps, adapted)
    for name, count, warmup in STALE:
        stale = replace(cell, strategy=name, devices=count, warmup=warmup)
        row = {"part": "stale", "strategy": name, "devices": count, "warmup": warmup}
        yield row, partial(exact.measure, setup, stale)


def main() -> None:
    """Measure what is missing, and draw."""
    from ditmesh import zoo
    from ditmesh.lab.pages.charts import eight_bits
    from ditmesh.lab.study.plan import Cell

    parser = command_line(__doc__, figures=False)
    parser.add_argument("--lora", type=Path, default=zoo.path(MODEL).with_name("emoji-flux-four-steps"))
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--file", type=Path, default=Path(__file__).parent / "measured" / "four-steps.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    captions, setup = zoo.captions(MODEL)[HELD_OUT], setup_of(zoo.path(MODEL), MODEL, MODEL, STEPS)
    exact, cell = Exact(), Cell("euler", tuple(captions), tuple(range(len(captions))), ())
    exact.pipeline(setup).load_lora_weights(options.lora, adapter_name="few")
    add_missing(options.file, rows(exact, setup, cell))
    if options.sheet:
        ways = ((TEACHER, False), (STEPS, True), (STEPS, False))
        tiles = [np.concatenate(list(drawn(exact, setup, cell, *way)[:COLUMNS]), 1) for way in ways]
        Image.fromarray(eight_bits(np.concatenate(tiles))).save(options.sheet, optimize=True)


if __name__ == "__main__":
    main()

"""What stale keys cost by the number of steps: models, samplers, numbers of devices, and keys that are moved on or not.

    nice python benchmarks/steps.py                              # 8 images of each; hours of one core
    nice python benchmarks/steps.py --images 32 --model emoji-flux

Ranks are simulated, to the bit, and every image is compared with the exact image of the same caption and seed. A row is
added to ``--file`` as soon as it is measured, and rows that are there are not measured again, so a run that was broken
off goes on where it stood. The models' own samplers and few steps come first; images come in rounds of eight, each
of other captions and seeds. `benchmarks/figures.py` and `benchmarks/tables.py` draw what is there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import add_missing, command_line
from quality import folder_of, parent_of, setup_of

STEPS = (4, 6, 8, 10, 12, 20, 50)
# Each model's usual sampler, and the others that are reviewed.
SAMPLERS = {
    "emoji-flux": ("euler", "dpm", "unipc"),
    "emoji-dit-s": ("ddim", "dpm", "unipc", "ddpm", "euler"),
    "emoji-sd3": ("euler", "dpm", "unipc", "heun"),
    "fashion-dit": ("ddim", "dpm", "unipc"),
    "emoji-wan": ("euler",),
    "dit-epsilon": ("ddim", "dpm", "unipc"),
    "faces": ("ddim",),
}
# Images of one request, and of all requests at most.
ROUND, MOST = 8, 32
# Strategies, devices and warm-ups. PipeFusion's devices are patches; four synchronous steps are the default.
DISPLACED = ("displaced", "displaced+linear")
FOUR = [(name, 4, "fixed(1)") for name in DISPLACED]
PIPE = [(name, 4, "fixed(1)") for name in ("pipefusion", "pipefusion+linear")]
OTHERS = [(name, count, "fixed(1)") for count in (2, 8) for name in DISPLACED]
MORE = [("displaced+linear", 4, f"fixed({steps})") for steps in (4, 0)]
MORE += [(name, 4, "fixed(1)") for name in ("naive", "displaced-int4+linear")] + [("displaced+linear", 1, "fixed(1)")]
# Four synchronous steps elsewhere: the first and the last two, and one in each quarter.
ELSEWHERE = {"ends": (0, 1, -2, -1), "quarters": (0.0, 0.25, 0.5, 0.75)}
MORE += [("displaced+linear", 4, name) for name in ELSEWHERE]
# In the order they are measured; True: with a model's own sampler, False: with the others.
PASSES = [(True, FOUR), (False, FOUR), (True, OTHERS), (True, PIPE + MORE), (False, OTHERS + PIPE)]


def policy(warmup: str, steps: int) -> str:
    """The warm-up policy that a name of `ELSEWHERE` has with so many steps; others are policies."""
    places = [int(at * steps) if isinstance(at, float) else at % steps for at in ELSEWHERE.get(warmup, ())]
    return f"steps({' '.join(map(str, places))})" if places else warmup


def cells(options: Any) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Setup, cell and name of every row, in the order they are measured."""
    from ditmesh.generate.job import class_numbers
    from ditmesh.generate.model_info import find_model
    from ditmesh.lab.study.plan import Cell

    for number, (own, some), steps in product(range(-(-options.images // ROUND)), PASSES, STEPS):
        for model in options.model or SAMPLERS:
            parent, folder = parent_of(model), folder_of(model, options.models)
            if not folder.exists():
                continue
            captions = [entry["caption"] for entry in json.loads((folder / "captions.json").read_text("utf-8"))]
            # Evenly spaced; a model with fewer captions has some of them again, with other seeds.
            places = [(2 * at + 1) * len(captions) // (2 * MOST) for at in range(number, MOST, MOST // ROUND)]
            prompts, seeds = tuple(captions[at] for at in places), range(number * ROUND, (number + 1) * ROUND)
            labels, setup = class_numbers(prompts, find_model(folder)), setup_of(folder, model, parent, steps)
            for sampler in SAMPLERS[model][:1] if own else SAMPLERS[model][1:]:
                for name, count, warmup in some:
                    waits = policy(warmup, steps)
                    cell = Cell(sampler, prompts, tuple(seeds), tuple(labels), name, count, waits)
                    row = {"model": model, "weights": setup.weights, "sampler": sampler, "steps": steps}
                    yield setup, cell, row | {"strategy": name, "devices": count, "warmup": waits, "round": number}


class Exact:
    """Pipelines of the models, and the exact images, each drawn once."""

    def __init__(self) -> None:
        self._pipes: dict[str, tuple[Any, Any]] = {}
        self._images: dict[tuple[Any, ...], Any] = {}

    def pipeline(self, setup: Any) -> Any:
        """The pipeline of a model, loaded once."""
        from ditmesh.lab.study.running import load_study_pipeline

        if setup.model not in self._pipes:
            pipe = load_study_pipeline(setup)
            self._pipes[setup.model] = pipe, pipe.scheduler
        return self._pipes[setup.model][0]

    def images(self, setup: Any, cell: Any) -> Any:
        """The exact images of a cell, drawn once."""
        from ditmesh.lab.study.running import run_cell
        from ditmesh.lab.study.samplers import set_sampler

        pipe = self.pipeline(setup)
        set_sampler(pipe, cell.sampler, self._pipes[setup.model][1])
        if (key := (setup.name, cell.sampler, setup.steps, cell.seeds)) not in self._images:
            self._images[key] = run_cell(pipe, setup, cell.reference)[0]
        return self._images[key]

    def measure(self, setup: Any, cell: Any) -> dict[str, Any]:
        """A stale cell beside the exact images; processor seconds."""
        from ditmesh.lab.study.running import run_cell, stale

        exact, pipe = self.images(setup, cell), self.pipeline(setup)
        began = time.process_time()
        with stale(pipe, cell):
            images, predictions = run_cell(pipe, setup, cell)
        measures = self.compared(setup, cell, images, exact)
        return measures | {"evaluations": len(predictions), "seconds": round(time.process_time() - began, 2)}

    def compared(self, setup: Any, cell: Any, images: Any, exact: Any) -> dict[str, Any]:
        """Distances of images from exact ones; how many are nearest to what was asked for, if the model tells."""
        from ditmesh import zoo
        from ditmesh.lab.study.running import distances, nearest_matches_prompt

        pairs = zip(images, exact, strict=True)
        apart = [distances(list(zip(*pair, strict=True)) if images.ndim == 5 else [pair]) for pair in pairs]
        names = ("psnr", "ssim")
        references = zoo.path(parent_of(setup.name))
        measures: dict[str, Any] = {name: [row[name] and round(row[name], 4) for row in apart] for name in names}
        sets = {"right": images, "exact right": exact}
        right = {name: nearest_matches_prompt(references, cell, some) for name, some in sets.items()}
        return measures | {name: sum(each) for name, each in right.items() if each}


def main() -> None:
    """Measure what is missing."""
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--images", type=int, default=ROUND, help=f"{ROUND} to {MOST}")
    parser.add_argument("--model", action="append", choices=SAMPLERS, help="default: all")
    parser.add_argument("--models", type=Path, default=Path("runs/relatives"), help="what training/relatives.py made")
    parser.add_argument("--file", type=Path, default=Path(__file__).parent / "measured" / "steps.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    exact = Exact()
    add_missing(options.file, ((row, partial(exact.measure, setup, cell)) for setup, cell, row in cells(options)))


if __name__ == "__main__":
    main()

"""Count what stands beside the transformers of the models whose sizes ship, and write it into their files.

A plan answers in a second and cannot look at text encoders and autoencoders itself: it takes ``beside`` (numbers in
their weights) and ``decode`` (numbers alive at the peak of a whole decode, for each pixel; of pictures) from here.

    python benchmarks/memory_beside.py
"""

from __future__ import annotations

import json

import torch

from ditmesh.forecast.catalogue import CONFIGS, shapes
from ditmesh.forecast.costs.work import Workload
from ditmesh.forecast.memory.check import components_of_shape
from ditmesh.forecast.memory.phases import around

# Of a picture; activations grow with its pixels.
SIDE = 512


def main() -> None:
    for name, shape in shapes().items():
        if shape.vae is None:
            continue
        weights, _, decode = around(components_of_shape(shape), Workload(1, 1, width=SIDE, height=SIDE), torch.bfloat16)
        path = CONFIGS / f"{name}.json"
        kept = [line for line in path.read_text().splitlines() if not line.startswith((' "beside"', ' "decode"'))]
        figures = {"beside": round(weights / 2), "decode": 0 if shape.num_frames > 1 else round(decode / 2 / SIDE**2)}
        kept[1:1] = [f" {json.dumps(key)}: {value}," for key, value in figures.items()]
        path.write_text("\n".join(kept) + "\n")
        print(name, figures, flush=True)


if __name__ == "__main__":
    main()

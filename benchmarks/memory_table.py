"""Predicted memory of a rank for well-known models, as a table for docs/memory.md. Needs no GPU and no weights.

Configurations of true size are those of `ditmesh plan`, with their sources. All figures are predicted, in bfloat16, at
each model's usual size, with 0.7 GB for a process on a GPU; every component is on the device all the time, but for
text encoders that are freed, or not loaded as texts were encoded before. Of models whose text encoders and autoencoder
the catalogue does not have, the transformer alone counts, which the row says.

    python benchmarks/memory_table.py
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ditmesh import ParallelConfig
from ditmesh.errors import DitmeshError
from ditmesh.memory.cards import card
from ditmesh.memory.catalogue import Shape, shapes
from ditmesh.memory.check import components_of_shape
from ditmesh.memory.phases import needs
from ditmesh.memory.sizes import workload_of
from harness import command_line

MODELS = (
    *("pixart-sigma", "sd3.5-medium", "sd3.5-large", "z-image", "flux.1-dev", "qwen-image", "flux.2-dev"),
    *("wan-1.3b", "hunyuan-video", "wan-14b"),
    *("sana-1.6b", "ltx-video", "cogvideox-2b", "cogvideox-5b", "mochi-1"),
)
# Fewer devices come first, and of as many what is simpler.
CONFIGS = (
    *({}, {"ulysses": 2}, {"tensor": 2}, {"ulysses": 2, "shard": 2}),
    *({"tensor": 4}, {"ulysses": 4, "shard": 4}, {"ulysses": 4, "shard": 4, "text_encoder": "freed"}),
)
# The last one once more, with no text encoders on the device.
BEFORE = "`ulysses=4 shard=4`, texts encoded before"
CARDS = (24, 48, 80)


def cell(shape: Shape, config: ParallelConfig, encoders: bool = True) -> tuple[str, float]:
    """The peak in GB and its phase; infinite where the configuration is not for the model."""
    components = components_of_shape(shape)
    components = components if encoders else replace(components, encoders={})
    try:
        found = needs(components, config, workload_of(shape), torch.bfloat16, card("4090").runtime)
    except DitmeshError:
        return "–", float("inf")
    peak = max((one.peak for one in found), key=lambda phase: phase.total)
    return f"{peak.total / 1e9:.1f} {peak.name}", peak.total


def main() -> None:
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args()
    configs = [ParallelConfig(**config) for config in CONFIGS]
    titles = [f"`{config.describe()}`" if config.world_size > 1 else config.describe() for config in configs]
    titles.append(BEFORE)
    print(f"| | {' | '.join(titles)} | {' | '.join(f'{card} GB' for card in CARDS)} |")
    print("|---|" + "---|" * (len(titles) + len(CARDS)))
    for name in options.models:
        shape = shapes()[name]
        cells = [*(cell(shape, config) for config in configs), cell(shape, configs[-1], encoders=False)]
        # The first that fits, by devices.
        fits = [
            next((title for title, (_, total) in zip(titles, cells, strict=True) if total <= card * 1e9), "–")
            for card in CARDS
        ]
        size = " x ".join(map(str, shape.size)) + (f", {shape.num_frames} frames" if shape.num_frames > 1 else "")
        alone = " (transformer alone)" if shape.vae is None else ""
        print(f"| {name}, {size}{alone} | {' | '.join(text for text, _ in cells)} | {' | '.join(fits)} |", flush=True)


if __name__ == "__main__":
    main()

"""What the weights of published pipelines weigh, whole and shared out; nothing is measured, and nothing is loaded.

``python benchmarks/weights.py --write`` writes the tables of docs/cards.md between its comments.

Models are built on the meta device from the settings that their publishers give, and cut by the code that cuts them on
real ranks. The table of weights counts nothing else: no activations, no buffers of communication, nothing of CUDA
itself. That of recipes is what `ditmesh memory` predicts, with 0.7 GB for a process on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from ditmesh.config import ParallelConfig
from ditmesh.layout import layout_of
from ditmesh.layout.probe import meta_model
from ditmesh.memory.cards import card
from ditmesh.memory.catalogue import shapes
from ditmesh.memory.check import components_of_shape
from ditmesh.memory.phases import needs
from ditmesh.memory.sizes import workload_of
from ditmesh.memory.walk import encoder_on_meta, walk_encoder
from ditmesh.strategies.pipefusion.stages import elsewhere, first_cut
from ditmesh.strategies.tensor.slices import plan_slices
from harness import command_line

PAGE = Path(__file__).parents[1] / "docs" / "cards.md"
BYTES = 2  # bfloat16
DEGREES = (2, 4, 8)

# The title of a row, and the name in the catalogue.
PIPELINES = {
    "FLUX.1-dev": "flux.1-dev",
    "SD3.5 Medium": "sd3.5-medium",
    "SD3.5 Large": "sd3.5-large",
    "Qwen-Image": "qwen-image",
    "Wan2.1 T2V 14B": "wan-14b",
}


def gigabytes(parameters: Iterable[int]) -> float:
    """10^9 bytes of so many parameters."""
    return sum(parameters) * BYTES / 1e9


def whole(model: nn.Module) -> float:
    return gigabytes(parameter.numel() for parameter in model.parameters())


def tensor_share(model: nn.Module, degree: int) -> float:
    """What the first rank of ``tensor=degree`` holds, which has the most."""
    lengths = {name: (dim, cut) for name, dim, cut in plan_slices(model, degree).parameters()}
    sizes = []
    for name, parameter in model.named_parameters():
        dim, cut = lengths.get(name, (None, None))
        share = 1.0 if dim is None or cut is None else cut.lengths[0] / parameter.shape[dim]
        sizes.append(round(parameter.numel() * share))
    return gigabytes(sizes)


def stage_share(model: nn.Module, degree: int) -> float:
    """What the largest stage of ``pipe=degree`` holds."""
    layout = layout_of(model)
    assert layout is not None
    cut = first_cut(model, layout, ParallelConfig(pipe=degree))
    absent = [elsewhere(model, layout, cut, stage) for stage in range(degree)]
    return max(gigabytes(p.numel() for name, p in model.named_parameters() if name not in gone) for gone in absent)


# Devices, their memory in GB, the name in the catalogue, the program in examples/recipes, its configuration, and
# the size where it is not the model's usual one.
RECIPES: list[tuple[int, int, str, str, dict[str, int], tuple[int, int] | None]] = [
    (2, 24, "flux.1-dev", "flux1_dev", {"tensor": 2}, None),
    (2, 24, "sd3.5-large", "sd35_large", {"cfg": 2}, None),
    (2, 24, "qwen-image", "qwen_image", {"tensor": 2}, None),
    (2, 24, "wan-14b", "wan21_14b", {"tensor": 2}, (832, 480)),
    (2, 48, "flux.1-dev", "flux1_dev", {"ulysses": 2}, None),
    (2, 48, "sd3.5-large", "sd35_large", {"cfg": 2}, None),
    (2, 48, "qwen-image", "qwen_image", {"cfg": 2}, None),
    (2, 48, "wan-14b", "wan21_14b", {"cfg": 2}, None),
    (2, 48, "flux.2-dev", "flux2_dev", {"tensor": 2}, None),
    (8, 80, "flux.1-dev", "flux1_dev", {"ulysses": 8}, None),
    (8, 80, "sd3.5-large", "sd35_large", {"cfg": 2, "ulysses": 4}, None),
    (8, 80, "qwen-image", "qwen_image", {"cfg": 2, "ulysses": 4}, None),
    (8, 80, "wan-14b", "wan21_14b", {"cfg": 2, "ulysses": 4}, None),
    (8, 80, "flux.2-dev", "flux2_dev", {"ulysses": 8}, None),
]


@cache
def built(title: str) -> tuple[nn.Module, float]:
    """A pipeline's transformer without memory, and what its text encoders weigh."""
    parts = components_of_shape(shapes()[PIPELINES[title]])
    (transformer,), encoders = parts.denoisers, parts.encoders.values()
    texts = (whole(encoder_on_meta(part.kind, part.settings)) for part in encoders)
    return meta_model(transformer.kind, dict(transformer.settings)), sum(texts)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def weights_table() -> str:
    """Every pipeline, whole and on one rank of each degree."""
    rows = []
    for name in PIPELINES:
        model, texts = built(name)
        cells = [
            texts,
            whole(model),
            *(tensor_share(model, n) for n in DEGREES),
            *(stage_share(model, n) for n in DEGREES),
        ]
        rows.append([name, *(f"{cell:.1f}" for cell in cells)])
    degrees = [f"`{axis}={degree}`" for axis in ("tensor", "pipe") for degree in DEGREES]
    return markdown(["pipeline", "text encoders", "transformer", *degrees], rows)


def predicted(name: str, config: dict[str, int], size: tuple[int, int] | None) -> tuple[str, float, str, float]:
    """What is asked for, GB of encoding alone, and then the phase that needs most with its GB, of the fullest rank."""
    shape = shapes()[name]
    request = workload_of(shape, size)
    components, process = components_of_shape(shape), card("4090").runtime
    found = needs(replace(components, encoders={}), ParallelConfig(**config), request, torch.bfloat16, process)
    peak = max((one.peak for one in found), key=lambda phase: phase.total)
    # Of plain diffusers, with nothing else on the device.
    alone, parts = ParallelConfig(), components.encoders.values()
    texts = [walk_encoder(part.kind, part.settings, alone, request.text, torch.bfloat16) for part in parts]
    encoding = sum(each.weights for each in texts) + max(each.activations for each in texts) + process
    asked = f"{request.width} x {request.height}" + (f", {shape.num_frames} frames" if shape.num_frames > 1 else "")
    return asked, encoding / 1e9, peak.name, peak.total / 1e9


def recipes_table() -> str:
    """Every recipe, and what its fullest rank needs."""
    rows = []
    for devices, memory, name, program, config, size in RECIPES:
        assert ParallelConfig(**config).world_size == devices
        asked, encoding, phase, rest = predicted(name, config, size)
        on_host = program == "flux2_dev"
        assert max(rest, 0.0 if on_host else encoding) < memory
        written = f"`{config}`".replace("'", '"')
        before = "on the host" if on_host else f"{encoding:.1f}"
        rows.append([f"{devices} x {memory} GB", f"`{program}.py`", asked, written, before, f"{rest:.1f} ({phase})"])
    return markdown(["devices", "program", "size", "configuration", "encoding, GB", "afterwards, GB"], rows)


TABLES = {"weights": weights_table, "recipes": recipes_table}


def write(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The page with its tables as they are now."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        page = f"{page.split(begin)[0]}{begin}\n{table()}\n{end}{page.split(end)[1]}"
    return page


def main() -> None:
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/cards.md")
    if parser.parse_args().write:
        PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(table() for table in TABLES.values()), end="")


if __name__ == "__main__":
    main()

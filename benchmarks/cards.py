"""What to type for published models on usual machines, and what a rank needs then: the tables of docs/cards.md.

``python benchmarks/cards.py --write`` writes them between the comments of that page, and the table of models into the
READMEs. Nothing is measured, and nothing is loaded: a configuration is the one that the rule of "auto" names for so
many cards, and its memory what `ditmesh memory` predicts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

import weights
from ditmesh.config import ParallelConfig
from ditmesh.lab.plan.hardware import hardware
from ditmesh.lab.plan.subject import subject
from ditmesh.memory.cards import card
from ditmesh.memory.catalogue import Shape, shapes
from ditmesh.memory.check import Demand, components_of_shape
from ditmesh.memory.phases import Components
from ditmesh.memory.sizes import workload_of
from ditmesh.request import Offload
from ditmesh.train.config import TrainConfig
from ditmesh.train.memory import estimated_memory
from harness import command_line
from weights import markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cards.md"
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
# Devices, and the name of each in the table of devices.
MACHINES = ((2, "4090"), (4, "4090"), (2, "l40s"), (8, "h100"))
OFFLOADS: tuple[Offload, ...] = ("none", "model", "group")
# GB of one card.
SINGLE = (16, 24, 32, 48)
# Of a card a LoRA leaves a fifth for activations, which are not predicted.
TRAINING_SHARE = 0.8
# With more of a card, freed memory that the allocator keeps may be too much.
SAFE_SHARE = 0.9


@dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
        shape: its name in the catalogue, or that of the model with the same transformer.
        repository: its id on the hub; empty: that of the catalogue.
        size: a smaller one for cards on which the usual one does not fit.
        experts: transformers of these sizes, which are all on the card.
        pictures: that are edited, each of which has as many tokens as the result.
        text: tokens of a prompt, if not the usual ones.
        alone: only the transformer counts, as texts are encoded before.
    """

    title: str
    shape: str
    repository: str = ""
    size: tuple[int, int] | None = None
    experts: int = 1
    pictures: int = 0
    text: int | None = None
    alone: bool = False

    @property
    def known(self) -> Shape:
        """Its entry of the catalogue."""
        return shapes()[self.shape]

    @property
    def components(self) -> Components:
        """What is on a card."""
        parts = components_of_shape(self.known)
        parts = replace(parts, denoisers=parts.denoisers * self.experts)
        return replace(parts, encoders={}, other=0.0) if self.alone else parts

    def line(self, options: str) -> str:
        """The command to type."""
        picture = " --image fox.png" if self.pictures else ""
        return f'ditmesh generate "a red fox"{picture} --model {self.repository or self.known.repository} {options}'

    def demand(self, kind: str, size: tuple[int, int] | None, offload: Offload = "none", calls: int = 1) -> Demand:
        """What one image or video asks of cards of a kind."""
        request = workload_of(self.known, size, self.text)
        request = replace(request, rows=request.rows * (1 + self.pictures))
        return Demand(
            self.components, request, request, torch.bfloat16, kind, offload,
            calls=calls, branches=request.branches, runtime=card("4090").runtime,
        )  # fmt: skip


VIDEO = (832, 480)
MODELS = (
    Model("FLUX.1-dev", "flux.1-dev"),
    Model("FLUX.2-dev", "flux.2-dev"),
    Model("Qwen-Image", "qwen-image"),
    Model("Qwen-Image-Edit", "qwen-image", "Qwen/Qwen-Image-Edit", pictures=1, text=1536),
    Model("Z-Image", "z-image"),
    Model("Stable Diffusion 3.5 Large", "sd3.5-large"),
    Model("Stable Diffusion 3.5 Medium", "sd3.5-medium"),
    Model("Wan 2.1 14B", "wan-14b", size=VIDEO),
    Model("Wan 2.1 1.3B", "wan-1.3b"),
    Model("Wan 2.2 A14B", "wan-14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", size=VIDEO, experts=2),
    Model("HunyuanVideo", "hunyuan-video", size=VIDEO),
    Model("LTX-Video", "ltx-video"),
    Model("MiniMax-H3", "minimax-h3", size=(672, 384), alone=True),
)
BY_TITLE = {model.title: model for model in MODELS}
ON_ONE_CARD = MODELS[:9]


@dataclass(frozen=True)
class Way:
    """A configuration that fits: its options, and bytes of the rank that needs most."""

    config: ParallelConfig
    options: str
    needed: float

    def cell(self, options: str) -> str:
        """In a table, with GB in brackets."""
        return f"{f'`{options}`' if options else 'as it is'} ({self.needed / 1e9:.1f})"


def ways(model: Model, devices: int, kind: str, room: float) -> list[Way]:
    """What fits, best first: of the usual size before a smaller one, what leaves room before what fills the card, all
    components on the card before some in host memory.
    """
    for size in dict.fromkeys((None, model.size)):
        word, found = f" --size {size[0]}x{size[1]}" if size else "", list[Way]()
        for share, offload in product((SAFE_SHARE, 1.0), OFFLOADS[:1] if model.alone else OFFLOADS):
            demand = model.demand(kind, size, offload)
            choice = demand.choose(devices, share * room, False)
            if not choice.fits and share == 1.0 and devices > 1:
                # Less than the rule has: pieces of what does not go ahead.
                config = ParallelConfig(ulysses=devices, shard=devices, precompute=True)
                needed = demand.largest(config)[0]
                choice = replace(choice, config=config, needed=needed, fits=needed <= room)
            if not choice.fits or choice.needed is None:
                continue
            # The same configuration with less on the card is of use where there is little room.
            enough = max(choice.needed, SAFE_SHARE * room)
            if all(way.config != choice.config or way.needed > enough for way in found):
                options = choice.config.options() + word + ("" if offload == "none" else f" --offload {offload}")
                found.append(Way(choice.config, options, choice.needed))
        if found:
            return sorted(found, key=lambda way: max(way.needed, SAFE_SHARE * room))
    return []


@cache
def table_of(title: str) -> str:
    """Every machine: the line to type, its GB on a card, and what else fits."""
    model, rows = BY_TITLE[title], list[list[str]]()
    for devices, kind in MACHINES:
        memory = card(kind).memory
        found, line, needed = ways(model, devices, kind, memory), "nothing fits unquantised", ""
        if found:
            line, needed = f"`{model.line(found[0].options)}`", f"{found[0].needed / 1e9:.1f}"
        if found and model.alone:
            config = json.dumps(found[0].config.model_dump(exclude_defaults=True))
            line = f"`{config}`{found[0].options.partition(' --size')[2].replace(' ', ', ')}"
        also = [way.cell(way.options.partition(" ")[2].partition(" ")[2]) for way in found[1:]]
        rows.append([f"{devices} x {memory / 1e9:.0f} GB", line, needed, ", ".join(also)])
    return f"### {title}\n\n{markdown(['cards', 'type', 'GB', 'also fits'], rows)}"


def one_card() -> str:
    """The options for one card of each size."""
    rows = []
    for model in ON_ONE_CARD:
        cells = [f"`{model.repository or model.known.repository}`"]
        for memory in SINGLE:
            way = next(iter(ways(model, 1, "4090", memory * 1e9)), None)
            cells.append("no" if way is None else way.cell(way.options.removeprefix("--devices 1").strip()))
        rows.append(cells)
    return markdown(["model", *(f"{memory} GB" for memory in SINGLE)], rows)


def adapters() -> str:
    """The frozen weights of a LoRA that leave room on a card, with GB of a rank while it encodes and in a step."""
    rows = []
    for model in (each for each in MODELS if not each.alone and each.known.vae is not None):
        phases = {bits: training(model, bits) for bits in ("bf16", "int8", "nf4")}
        cells = [f"`{model.repository or model.known.repository}`"]
        for memory in (24, 48, 80):
            fitting = (bits for bits, gigabytes in phases.items() if max(gigabytes) <= TRAINING_SHARE * memory)
            bits = next(fitting, None)
            cells.append("no" if bits is None else f"`{bits}` ({phases[bits][0]:.1f}, {phases[bits][1]:.1f})")
        rows.append(cells)
    return markdown(["model", *(f"cards of {memory} GB" for memory in (24, 48, 80))], rows)


@cache
def training(model: Model, bits: str) -> tuple[float, float]:
    """GB of a rank that trains a LoRA as docs/training.md has it: while it encodes, and in a step."""
    settings = {
        "pretrained_model_name_or_path": model.known.repository,
        "output_dir": "my-lora",
        "data": {"train_data_dir": "photos", "cache_dir": "cache"},
        "lora": {"rank": 16},
        "model": {"base_precision": bits, "encoder_precision": bits, "mixed_precision": "bf16"},
    }
    config = TrainConfig.model_validate(settings)
    phases = estimated_memory(model.components, config, "4090", card("4090").runtime)
    return phases["encode"]["total"] / 1e9, phases["step"]["total"] / 1e9


def answers() -> str:
    """What is asked most, with what to type."""
    flux, wan, sd3 = (BY_TITLE[title] for title in ("FLUX.1-dev", "Wan 2.2 A14B", "Stable Diffusion 3.5 Medium"))
    on_four = ways(flux, 4, "4090", card("4090").memory)[0]
    on_eight = ways(wan, 8, "h100", card("h100").memory)[0]
    six = sd3.demand("4090", None, calls=6).choose(3, card("4090").memory, False)
    assert six.needed is not None
    encoding, step = training(BY_TITLE["Qwen-Image"], "nf4")
    lines = {
        f"Four RTX 4090 and FLUX.1-dev ({on_four.needed / 1e9:.1f} GB on each)": flux.line(on_four.options),
        f"Wan 2.2 on eight H100 ({on_eight.needed / 1e9:.1f} GB on each)": wan.line(on_eight.options),
        "Stable Diffusion 3 with six prompts, one in each line of a file, on three devices: "
        f"`{six.config.describe()}`, two images on each ({six.needed / 1e9:.1f} GB)": "ditmesh generate "
        f"--prompts six.txt --model {sd3.known.repository} --devices 3",
        "The same seed and the same image, to the bit, on 1, 2, 3 or 4 devices ([what it costs](same-image.md); "
        "without `--reproducible` the exact configurations of this page agree up to rounding)": sd3.line(
            "--devices 3 --seed 7 --reproducible"
        ),
        f"A LoRA of Qwen-Image on two cards of 24 GB ({encoding:.1f} GB while it encodes, {step:.1f} in a step, and "
        "activations): [this `run.yaml`](training.md#a-lora-of-a-published-model) with "
        "`pretrained_model_name_or_path: Qwen/Qwen-Image`": "ditmesh train run.yaml --devices 2",
    }
    return "\n".join(f"{question}:\n\n```text\n{line}\n```\n" for question, line in lines.items())


# Of README's table: the model, its transformer, pipeline and autoencoder, and what docs/comfyui.md calls it.
SUPPORTED = (
    ("FLUX.1", "FluxTransformer2DModel", "FluxPipeline", "KL", "Flux"),
    ("FLUX.2", "Flux2Transformer2DModel", "Flux2Pipeline", "KLFlux2", ""),
    ("Qwen-Image", "QwenImageTransformer2DModel", "QwenImagePipeline", "KLQwenImage", "Qwen-Image"),
    ("Qwen-Image-Edit", "QwenImageTransformer2DModel", "QwenImageEditPipeline", "KLQwenImage", "Qwen-Image"),
    ("Z-Image", "ZImageTransformer2DModel", "ZImagePipeline", "KL", ""),
    ("Stable Diffusion 3, 3.5", "SD3Transformer2DModel", "StableDiffusion3Pipeline", "KL", "SD3"),
    ("Wan 2.1", "WanTransformer3DModel", "WanPipeline", "KLWan", "Wan"),
    ("Wan 2.2 A14B", "WanTransformer3DModel", "WanPipeline two transformers", "KLWan", ""),
    ("HunyuanVideo", "HunyuanVideoTransformer3DModel", "HunyuanVideoPipeline", "KLHunyuanVideo", "HunyuanVideo"),
    ("HunyuanVideo 1.5", "HunyuanVideo15Transformer3DModel", "HunyuanVideo15Pipeline", "KLHunyuanVideo15", ""),
    ("LTX-Video", "LTXVideoTransformer3DModel", "LTXPipeline", "KLLTXVideo", "LTX-Video"),
    ("LTX-2", "LTX2VideoTransformer3DModel", "LTX2Pipeline", "KLLTX2Video", ""),
    ("MiniMax-H3", "MiniMaxH3Transformer3DModel", "MiniMaxH3ModularPipeline", "", ""),
)  # fmt: skip
# Which `ditmesh train` refuses.
UNTRAINED = ("MiniMaxH3Transformer3DModel",)


def results(page: str) -> dict[str, dict[str, str]]:
    """By the first cell of a row of a page's first table the others, by their titles."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = re.search(r"^\|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    titles, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines())
    return {row[0]: {title.split("=")[0]: cell for title, cell in zip(titles, row, strict=True)} for row in rows}


def support() -> str:
    """The rows of README's table, from the pages of results."""
    classes, pipelines = results("support.md"), results("pipelines.md")
    autoencoders = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    nodes = (ROOT / "docs" / "comfyui.md").read_text(encoding="utf-8").partition("with LoRA stacks")[0]
    rows = ""
    for title, kind, pipeline, vae, node in SUPPORTED:
        one, other = classes[kind], pipelines[pipeline]
        assert node in nodes
        right = [
            all(cell != "refused" for cell in (one["ulysses"], other["ulysses"])),
            all(cell != "refused" for cell in (one["ring"], one["gather"], other["ring"])),
            one["tensor"] != "refused",
            other["cfg"] and other["cfg"] != "refused",
            not one["pipe"].startswith("refused"),
            bool(vae) and re.search(rf"\bAutoencoder{vae}\b", autoencoders) is not None,
            kind not in UNTRAINED,
            bool(node),
        ]
        marks = ["✓" if mark else "–" for mark in right]
        marks[3] = marks[3] if other["cfg"] else "1"
        rows += f"| {' | '.join((title, *marks))} |\n"
    return rows


def predicted(
    name: str = "flux.1-dev", devices: int = 1, config: ParallelConfig | None = None, **request: Any
) -> float:
    """Milliseconds of a step on H200s, as `ditmesh plan` prints them; without a configuration by that of "auto"."""
    machine = hardware("h200", devices, "bfloat16")
    about = subject(name, machine, **request)
    config = config or about.demand.choose(devices, machine.device.memory).config
    return 1000 * about.predict(config, machine).step


TABLES = {"answers": answers, "one card": one_card, "adapters": adapters}
TABLES["models"] = lambda: "\n".join(map(table_of, BY_TITLE))


def write_rows(readme: str) -> str:
    """A README with the rows of its table as they are now."""
    head, rule, rest = readme.partition("|---|---|---|---|---|---|---|---|---|\n")
    return head + rule + support() + re.sub(r"\A(\|.*\n)*", "", rest)


def write(page: str) -> str:
    """The page with its tables as they are now."""
    return weights.write(page, TABLES)


def main() -> None:
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/cards.md and the READMEs")
    if parser.parse_args().write:
        PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        for readme in READMES:
            readme.write_text(write_rows(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(table() for table in TABLES.values()), end="")


if __name__ == "__main__":
    main()

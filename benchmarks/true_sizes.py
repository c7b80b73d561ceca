"""One step of transformers at their true sizes, with random weights: two ranks compared with one. CPU ranks, Linux.

PixArt-Sigma (0.6 billion parameters) at 1024 x 1024 pixels, 4,096 image and 300 text tokens, and Wan 2.1 1.3B at 832
x 480 pixels and 17 frames, 7,800 image and 512 text tokens. Configurations are those of `ditmesh plan`; that of
DiT-XL/2 (675 million parameters, 256 tokens at 256 x 256 pixels, with --scale 2 1,024 at 512 x 512) is the paper's.
Weights are made once, in bfloat16, in a temporary folder, and computed with in float32 (``--dtype``): matrices are
N(0, 0.02), norms 1, and what scales and shifts in blocks N(0, 0.5), so that no block is without consequence. A rank
reads its part of them (`ditmesh.generate.shares.load_transformer`), every form in processes of its own, one thread
each.

Of every form: the largest difference from one rank's output over that output's largest magnitude, which must be 1e-4 at
most in float32; seconds of the step and processor seconds of all ranks; of the worst rank the bytes of tensors, with
what is predicted (`ditmesh.memory`). Ranks trust their inputs: comparing digests of the weights, once before the first
step, is not what is measured.

    python benchmarks/true_sizes.py --json figures.json
    python benchmarks/true_sizes.py --models wan-1.3b --forms "1 rank" "ulysses=2 shard=2" --folder weights
    python benchmarks/true_sizes.py --blocks 2 --scale 0.25                      # a try in a minute

Figures are written after every form; with --folder a run that was broken off goes on with the same weights and does not
compute one rank's output again, unless it is asked for. Differences and bytes need no quiet machine, seconds do.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, write_figures
from machine import counted, describe_machine

ALONE = "1 rank"
FORMS = (ALONE, "ulysses=2", "ulysses=2 shard=2", "ring=2 shard=2", "tensor=2")
# Largest relative difference from one rank in float32.
BOUND = 1e-4
# Bytes of a file of weights.
FILE = 1 << 30
DURATION = """
How long: a block takes 3.4 processor seconds of PixArt-Sigma and 14.4 of Wan on one core of an AMD EPYC, in float32:
all forms of PixArt-Sigma 6 minutes on two such cores, those of Wan 25, of which one rank alone takes 7. Memory: 13 GB,
when two ranks hold all weights of Wan.
"""


@dataclass(frozen=True)
class Case:
    """A model and what it is asked for.

    Attributes:
        name: of the model, as `ditmesh plan` has it.
        transformer, settings: class and configuration.
        pixels, frames: of what is generated; frames of the latents.
        rows, cols, text: tokens.
    """

    name: str
    transformer: str
    settings: dict[str, Any]
    pixels: tuple[int, int]
    rows: int
    cols: int
    frames: int
    text: int

    @property
    def tokens(self) -> int:
        """Image tokens."""
        return self.rows * self.cols * self.frames


# Width, height and frames.
SIZES = {"pixart-sigma": (1024, 1024, 1), "wan-1.3b": (832, 480, 17)}
# DiT-XL/2 (Peebles and Xie 2022, arXiv:2212.09748), which the catalogue of `ditmesh plan` has not.
XL2 = "dit-xl-2"
XL2_SETTINGS = {
    "num_layers": 28,
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}


def case_of(name: str, scale: float, blocks: int | None) -> Case:
    """A model of the catalogue, with sides of the picture scaled, and some of its blocks or all (None)."""
    from ditmesh.memory.catalogue import shapes

    if name == XL2:
        side = max(1, round(16 * scale))
        settings = XL2_SETTINGS | {"sample_size": 2 * side} | ({} if blocks is None else {"num_layers": blocks})
        return Case(name, "DiTTransformer2DModel", settings, (16 * side, 16 * side), side, side, 1, 0)
    known, (width, height, frames) = shapes()[name], SIZES[name]
    rows, cols = (max(1, round(side * scale / known.pixels)) for side in (height, width))
    settings = known.config if blocks is None else {**known.config, "num_layers": blocks}
    size = cols * known.pixels, rows * known.pixels
    return Case(name, known.transformer, settings, size, rows, cols, known.frames.latents_of(frames), known.text)


def save(case: Case, folder: Path) -> int:
    """Write a transformer with random weights as diffusers does, a file at a time; its parameters."""
    from safetensors.torch import save_file

    from ditmesh.generate.weight_files import WEIGHTS
    from ditmesh.layout.probe import meta_model

    model: Any = meta_model(case.transformer, case.settings)
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}

    def write() -> None:
        name = f"{WEIGHTS}-{len(set(places.values())) + 1:05}.safetensors"
        save_file(tensors, folder / name)
        places.update(dict.fromkeys(tensors, name))
        tensors.clear()

    folder.mkdir(parents=True, exist_ok=True)
    for name, like in model.state_dict().items():
        value = torch.ones(like.shape)
        if "scale_shift_table" in name:
            value.normal_(0, 0.5, generator=generator)
        elif "norm" not in name or name.endswith("bias") or like.dim() > 1:
            value.normal_(0, 0.02, generator=generator)
        tensors[name] = value.bfloat16()
        if sum(one.nbytes for one in tensors.values()) > FILE:
            write()
    write()
    model.save_config(folder)
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(parameter.numel() for parameter in model.parameters())


def inputs_of(model: Any, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """What a pipeline passes in a step, with random latents and text; of PixArt's text the last third is padding."""
    generator = torch.Generator().manual_seed(1)
    config, frames = model.config, (case.frames,) if "3D" in case.transformer else ()
    patch = config.patch_size[-1] if isinstance(config.patch_size, (list, tuple)) else config.patch_size
    latents = (1, config.in_channels, *frames, case.rows * patch, case.cols * patch)
    if case.name == XL2:
        noise = torch.randn(latents, generator=generator).to(dtype)
        number = {"timestep": torch.tensor([500]), "class_labels": torch.tensor([388])}
        return {"hidden_states": noise, **number, "return_dict": False}
    width = getattr(config, "text_dim", None) or config.caption_channels
    given: dict[str, Any] = {
        "hidden_states": torch.randn(latents, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn((1, case.text, width), generator=generator).to(dtype),
        "timestep": torch.tensor([500]),
        "return_dict": False,
    }
    if case.transformer == "PixArtTransformer2DModel":
        mask = torch.ones(1, case.text, dtype=dtype)
        mask[:, case.text - case.text // 3 :] = 0
        given |= {"encoder_attention_mask": mask, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return given


def measured(case: Case, folder: str, form: str, dtype: torch.dtype, timeout: float) -> dict[str, Any]:
    """On a rank: loading and one step. One rank's output is kept in the folder, others compare theirs with it."""
    import diffusers

    import ditmesh
    from ditmesh.comm.mesh import Mesh
    from ditmesh.core.alive import LiveBytes
    from ditmesh.generate.shares import load_transformer
    from ditmesh.strategies.sharded import ShardedWeights

    config, began = config_of_form(form), time.perf_counter()
    mesh = Mesh(config, timeout=timeout)
    model = load_transformer(getattr(diffusers, case.transformer), folder, config, mesh, dtype)
    sharded = None
    if form != ALONE:
        ditmesh.parallelize(model, config, mesh=mesh, timeout=timeout)
        sharded = ditmesh.engine_of(model).models[0].find(ShardedWeights)
    found: dict[str, Any] = {"load_seconds": time.perf_counter() - began}
    weights = [*model.parameters(), *model.buffers(), *(unit.piece for unit in (sharded.units if sharded else ()))]
    alive, given = LiveBytes(weights), inputs_of(model, case, dtype)
    with torch.no_grad(), counted(alive):
        began, busy = time.perf_counter(), time.process_time()
        output = model(**given)[0].float()
        found["seconds"], found["processor_seconds"] = time.perf_counter() - began, time.process_time() - busy
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in weights}
    found |= {"weights": sum(held.values()), "tensors": sum(held.values()) + alive.peak}
    truth = Path(folder) / f"output-{str(dtype).removeprefix('torch.')}.pt"
    if form == ALONE:
        torch.save(output, truth)
    expected = torch.load(truth)
    found["difference"] = float((output - expected).abs().max() / expected.abs().max())
    found["finite"], found["spread"] = bool(output.isfinite().all()), float(output.std())
    found["sent"] = dict(mesh.traffic.bytes_sent)
    return found


def config_of_form(form: str) -> Any:
    """The configuration of a form."""
    from ditmesh.cli.values import parse_config
    from ditmesh.config import ParallelConfig

    return ParallelConfig() if form == ALONE else parse_config(form).model_copy(update={"inputs": "trust"})


def predicted(case: Case, form: str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of tensors in the step."""
    from ditmesh.memory.phases import Component, Components, needs
    from ditmesh.memory.sizes import Workload

    components = Components(case.name, (Component(case.transformer, case.settings),))
    width, height = case.pixels
    request = Workload(case.rows, case.cols, case.frames, case.text, width=width, height=height)
    (found,) = needs(components, config_of_form(form), request, dtype)
    return {"tensors": found.phases[1].weights + found.phases[1].activations}


def line(form: str, figures: dict[str, Any]) -> str:
    """A row of the table: predicted / measured, of the worst rank."""
    ranks, guess = figures["ranks"], figures["predicted"]
    cells = [
        f"{max(rank['difference'] for rank in ranks):.1e}",
        f"{max(rank['seconds'] for rank in ranks):.1f}",
        f"{sum(rank['processor_seconds'] for rank in ranks):.1f}",
    ]
    most = max(rank["tensors"] for rank in ranks)
    cells.append(f"{guess['tensors'] / 1e9:.2f} / {most / 1e9:.2f} GB ({guess['tensors'] / most - 1:+.1%})")
    return f"| {form} | {' | '.join(cells)} |"


def run_form(case: Case, folder: Path, form: str, dtype: torch.dtype, timeout: float) -> dict[str, Any]:
    """Figures of a form."""
    from ditmesh.launch import RankPool

    with RankPool(config_of_form(form).world_size, threads=1, device="cpu", timeout=timeout) as pool:
        ranks = pool.run(measured, case, str(folder), form, dtype, timeout)
    guess = predicted(case, form, dtype)
    right = all(rank["finite"] and rank["spread"] > 0 for rank in ranks)
    close = dtype != torch.float32 or max(rank["difference"] for rank in ranks) <= BOUND
    return {"ranks": ranks, "predicted": guess, "right": right and close}


def main() -> None:
    from ditmesh.launch import guarded_folder

    parser = command_line(f"{__doc__}{DURATION}")
    parser.add_argument(
        "--models", nargs="+", choices=[*SIZES, XL2], default=list(SIZES), help="default: all but DiT-XL/2"
    )
    parser.add_argument("--forms", nargs="+", default=list(FORMS), help=f"default: {', '.join(FORMS)}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--blocks", type=int, help="of the transformer; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of the picture's sides; default: 1")
    parser.add_argument(
        "--folder", type=Path, help="keep weights and one rank's output there; default: a temporary one"
    )
    parser.add_argument("--timeout", type=float, default=7200, help="seconds that ranks wait for one another")
    options = parser.parse_args()
    dtype, wrong = getattr(torch, options.dtype), 0
    figures: dict[str, Any] = {"machine": describe_machine()["text"], "dtype": options.dtype, "models": {}}
    with ExitStack() as undo:
        root = options.folder or Path(undo.enter_context(guarded_folder("ditmesh-true-sizes-")))
        for name in options.models:
            case = case_of(name, options.scale, options.blocks)
            folder = root / f"{name}-{options.scale:g}-{options.blocks or 'all'}"
            if not (folder / "config.json").exists():
                save(case, folder)
            known = (folder / f"output-{options.dtype}.pt").exists()
            forms = options.forms if known or ALONE in options.forms else [ALONE, *options.forms]
            parts = ", ".join(f"{count:,} {kind}" for count, kind in ((case.tokens, "image"), (case.text, "text")))
            print(
                f"\n{name}, {case.pixels[0]} x {case.pixels[1]}, {parts} tokens, {options.dtype}; predicted / measured"
            )
            print("| | difference | seconds | processor s | tensors |\n|---|---|---|---|---|", flush=True)
            found = figures["models"][name] = {"tokens": case.tokens, "blocks": options.blocks, "forms": {}}
            for form in forms:
                try:
                    found["forms"][form] = run_form(case, folder, form, dtype, options.timeout)
                    print(line(form, found["forms"][form]), flush=True)
                    wrong += not found["forms"][form]["right"]
                except Exception as error:
                    said = " ".join(str(error).split())
                    found["forms"][form], wrong = {"failed": said}, wrong + 1
                    print(f"| {form} | {said[:160]} | | | |", flush=True)
                write_figures(figures, options.json)
    print(f"\n{figures['machine']}")
    raise SystemExit(f"{wrong} forms failed or are further from one rank than {BOUND:g}" if wrong else 0)


if __name__ == "__main__":
    main()

"""What a rank's memory and a step's time are with each way of making weights fit, alone and with ``ulysses=2``.

A class-conditional pipeline with random weights is made in a temporary folder, and every form runs in processes of its
own: loading, a request that warms up, and one that is measured. On the CPU memory is private memory (RssAnon) above
what the process had before, and the C library is told to give back what is freed; on a GPU it is what torch has
allocated there at most. Processor time is that of a rank's whole process; wall time is worth something on a quiet
machine only.

    python benchmarks/memory.py --megabytes 400 --json figures.json
    python benchmarks/memory.py --forms plain "ulysses=2" "ulysses=2 shard=2" "ulysses=2 FSDP2"

Forms: words of a configuration, and besides them gloo (no shared memory), FSDP2 (torch's `fully_shard` in place of
``shard``), group-offload, model-offload, casting (float8 storage, layer by layer), int8 (torchao's weight-only
quantisation; without torchao those forms are skipped); plain is diffusers alone. Figures are written after every form.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from ditmesh.config import ParallelConfig
from harness import command_line, write_figures
from machine import describe_machine, give_freed_memory_back, resident

FORMS = [
    "plain",
    "ulysses=2",
    "ulysses=2 shard=2",
    "ulysses=2 shard=2 gloo",
    "ulysses=2 FSDP2",
    *(f"{axes}{how}" for how in ("group-offload", "model-offload", "casting", "int8") for axes in ("", "ulysses=2 ")),
    "ulysses=2 shard=2 casting",
    "ulysses=2 shard=2 int8",
]
OTHER = ("plain", "gloo", "FSDP2", "group-offload", "model-offload", "casting", "int8")


def make(folder: Path, megabytes: float, blocks: int, latent: int, dtype: torch.dtype) -> int:
    """Save a class-conditional pipeline whose transformer has about that many 10^6 bytes in float32; the exact number.

    Args:
        folder: where to.
        megabytes: of the transformer.
        blocks, latent: how many it has, and the side of its latents.
        dtype: of the transformer's weights in the file.
    """
    import diffusers

    def transformer(heads: int) -> Any:
        torch.manual_seed(0)
        return diffusers.DiTTransformer2DModel(
            num_attention_heads=heads,
            attention_head_dim=64,
            in_channels=4,
            out_channels=8,
            num_layers=blocks,
            sample_size=latent,
            patch_size=2,
            num_embeds_ada_norm=8,
        )

    with torch.device("meta"):
        sizes = {heads: sum(p.numel() * 4 for p in transformer(heads).parameters()) for heads in range(2, 49, 2)}
    model = transformer(min(sizes, key=lambda heads: abs(sizes[heads] - megabytes * 1e6)))
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, layers_per_block=1)
    size = sum(p.nbytes for p in model.parameters())
    diffusers.DiTPipeline(model.to(dtype), vae, diffusers.DDIMScheduler()).save_pretrained(folder)
    index = folder / "model_index.json"
    names = {number: f"class {number}" for number in range(8)}
    index.write_text(json.dumps({**json.loads(index.read_text()), "id2label": names}))
    return size


class Memory:
    """The most memory of this process while inside, above what it had before."""

    def __init__(self, before: int = 0) -> None:
        self._cuda, self._before, self.peak = torch.cuda.is_available(), before, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @staticmethod
    def now() -> int:
        """Bytes at the moment."""
        if torch.cuda.is_available():
            return torch.cuda.memory_allocated()
        return resident("RssAnon")

    def __enter__(self) -> Memory:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, self.now() - self._before)

    def __exit__(self, *_: Any) -> None:
        if self._cuda:
            self.peak = torch.cuda.max_memory_allocated() - self._before
        else:
            self._ended.set()
            self._thread.join()


def prepared(folder: str, form: str) -> Any:
    """The pipeline in a form, ready for a request."""
    import diffusers

    import ditmesh
    from ditmesh.cli.values import parse_config
    from ditmesh.generate.offload import offload

    words = form.split()
    settings = " ".join(word for word in words if word not in OTHER)
    config = parse_config(settings) if settings else None
    if config is not None and "gloo" in words:
        config = ParallelConfig(**{**config.model_dump(), "shared_memory": False})
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    changes = {"group-offload", "model-offload", "casting", "int8", "FSDP2", "plain"} & {*words}
    if config is not None and not changes:
        return ditmesh.load(folder, config, torch_dtype=torch.float32)
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    transformer = pipe.transformer
    if "int8" in words:
        from torchao import quantization

        quantization.quantize_(transformer, quantization.Int8WeightOnlyConfig())
    if "casting" in words:
        transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    if "group-offload" in words:
        from diffusers.hooks import apply_group_offloading

        # By block this class cannot: its last layer uses a module of the first block.
        apply_group_offloading(transformer, onload_device=device, offload_type="leaf_level")
        pipe.vae.to(device)
    elif "model-offload" in words:
        offload(pipe, "model", device)
    else:
        pipe.to(device)
    if config is not None:
        if "FSDP2" in words:
            # DTensors have no digests to compare.
            config = ParallelConfig(**{**config.model_dump(), "inputs": "trust"})
        ditmesh.parallelize(pipe, config)
    if "FSDP2" in words:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        group = ditmesh.engine_of(pipe).mesh.gradient_group
        assert group is not None
        over = DeviceMesh.from_group(group, device.type)
        # The last layer uses a module of the first block, whose weights have to be there then.
        for block in transformer.transformer_blocks[1:]:
            fully_shard(block, mesh=over)
        fully_shard(transformer, mesh=over)
    return pipe


def measured(folder: str, form: str, steps: int) -> dict[str, Any]:
    """On a rank: its peaks, and the time of a step."""
    from contextlib import suppress

    if not torch.cuda.is_available():
        give_freed_memory_back()
    pictures = []
    with suppress(Exception):
        # Lazy imports are not what is measured.
        _request(prepared(f"{folder}/small", form.replace("FSDP2", "")), 1)
    gc.collect()
    before = Memory.now()
    with Memory(before) as loading:
        pipe = prepared(f"{folder}/big", form)
    pictures.append(_request(pipe, 1))
    with Memory(before) as running:
        began, busy = time.perf_counter(), time.process_time()
        pictures.append(_request(pipe, steps))
        wall, busy = time.perf_counter() - began, time.process_time() - busy
    return {
        "load": loading.peak,
        "step": running.peak,
        "wall_seconds": wall / steps,
        "processor_seconds": busy / steps,
        "checksum": pictures[-1],
    }


def _request(pipe: Any, steps: int) -> float:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        drawn = pipe(class_labels=[1], num_inference_steps=steps, guidance_scale=1.0, generator=generator)
    return float(sum(sum(pixel) for pixel in drawn.images[0].convert("RGB").getdata()))


def missing(form: str) -> str | None:
    """What a form needs that is not installed."""
    return "torchao" if "int8" in form.split() and find_spec("torchao") is None else None


def run_form(folder: str, form: str, steps: int) -> list[dict[str, Any]]:
    """Every rank's figures of a form."""
    from ditmesh.cli.values import parse_config
    from ditmesh.launch import RankPool

    settings = " ".join(word for word in form.split() if word not in OTHER)
    with RankPool(parse_config(settings).world_size if settings else 1, threads=1, timeout=1800.0) as pool:
        return pool.run(measured, folder, form, steps)


def row(folder: str, form: str, steps: int, weights: int) -> tuple[Any, str]:
    """A form's figures, or why there are none, and its cells of the table."""
    if (package := missing(form)) is not None:
        return {"skipped": f"{package} is not installed"}, f"skipped: {package} is not installed | | | "
    try:
        ranks = run_form(folder, form, steps)
    except Exception as error:
        said = " ".join(str(error).split())
        return {"failed": said}, f"failed: {said.split('; ')[0][:160]} | | | "
    load, step = (max(rank[what] for rank in ranks) / weights for what in ("load", "step"))
    busy = sum(rank["processor_seconds"] for rank in ranks)
    wall = max(rank["wall_seconds"] for rank in ranks)
    return ranks, f"{load:.0%} | {step:.0%} | {busy:.3f} | {wall:.3f}"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=float, default=400, help="of the transformer in float32")
    parser.add_argument("--blocks", type=int, default=24, help="of the transformer")
    parser.add_argument("--latent", type=int, default=32, help="side of the latents; tokens are (side / 2) squared")
    parser.add_argument("--steps", type=int, default=4, help="of the request that is measured")
    parser.add_argument("--forms", nargs="+", default=FORMS, help="such as 'ulysses=2 shard=2'; default: all")
    options = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe_machine(), "tokens": (options.latent // 2) ** 2, "forms": {}}
    # Read as float32, so that nobody can use the mapped file as memory.
    with tempfile.TemporaryDirectory() as folder:
        weights = figures["weights"] = make(
            Path(folder) / "big", options.megabytes, options.blocks, options.latent, torch.bfloat16
        )
        make(Path(folder) / "small", 1, 1, options.latent, torch.bfloat16)
        print(f"{weights / 1e6:.0f} MB of weights, {options.blocks} blocks, {figures['tokens']} tokens\n")
        print("| form | load, % of the weights | step, % | processor s a step | wall s a step |\n|---|---|---|---|---|")
        for form in options.forms:
            figures["forms"][form], cells = row(folder, form, options.steps, weights)
            print(f"| {form} | {cells} |", flush=True)
            write_figures(figures, options.json)
    print(f"\n{json.dumps(figures, indent=1)}")


if __name__ == "__main__":
    main()

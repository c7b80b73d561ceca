"""Predicted memory of a rank beside measured: loading, encoding, a denoising step, decoding. CPU ranks, Linux.

Pipelines of the real classes with random weights of a few hundred MB run on one or two ranks, one configuration after
the other. Two things are compared with the prediction (`ditmesh.memory`), each phase by itself:

* tensors: bytes of storages that are alive at the peak, counted in the rank by the same dispatch mode that the
  prediction uses, there with values and real messages; workspace of kernels is not seen by it and left out of both;
* process: the most that the process has of its own in the phase (RssAnon and RssShmem, looked at every 2 ms), plus the
  code and tables that it had mapped before. Not VmHWM: files of weights that are mapped count there until the system
  takes their pages back. Weights are copied out of the files here, as they would be to a device. The C library is told
  to give back what is freed (M_MMAP_THRESHOLD of 1 MiB): what its heap keeps otherwise, up to 0.15 GB of decoding here,
  is not predicted. The prediction adds what a process has before it holds a model, measured in the same rank after a
  picture of an embedded model.

    python benchmarks/memory_model.py --json figures.json
    python benchmarks/memory_model.py --only "Wan, ulysses=2"

It needs no quiet machine.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, write_figures
from machine import describe_machine, give_freed_memory_back

TEXT = 64
AUTOENCODER: dict[str, Any] = {
    "block_out_channels": (64, 64, 128, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "shift_factor": 0.0,
}


def sd3(folder: str) -> None:
    """Stable Diffusion 3's classes, with two text encoders."""
    import transformers

    t5 = transformers.T5Config(d_model=512, d_ff=1024, num_layers=8, num_heads=8, d_kv=64, vocab_size=32128)
    sd3_pipeline(8, 12, transformers.T5EncoderModel(t5)).save_pretrained(folder)


def sd3_pipeline(blocks: int, heads: int, text_encoder_3: Any = None) -> Any:
    """Stable Diffusion 3's classes with random weights: a transformer of so many blocks and heads."""
    import diffusers
    import transformers

    clip = transformers.CLIPTextConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, projection_dim=256)
    none = dict.fromkeys(("text_encoder_2", "tokenizer", "tokenizer_2", "tokenizer_3"))
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=96,
            num_layers=blocks,
            attention_head_dim=64,
            num_attention_heads=heads,
            joint_attention_dim=512,
            caption_projection_dim=64 * heads,
            pooled_projection_dim=256,
            in_channels=4,
            out_channels=4,
            pos_embed_max_size=96,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(**AUTOENCODER),
        text_encoder=transformers.CLIPTextModelWithProjection(clip),
        text_encoder_3=text_encoder_3,
        **none,
    )


def flux(folder: str) -> None:
    """FLUX.1's classes."""
    import diffusers

    none = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=3,
            num_single_layers=6,
            attention_head_dim=64,
            num_attention_heads=10,
            joint_attention_dim=512,
            pooled_projection_dim=256,
            axes_dims_rope=(16, 24, 24),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(**AUTOENCODER),
        **none,
    ).save_pretrained(folder)


def pixart(folder: str) -> None:
    """PixArt's classes."""
    import diffusers

    diffusers.PixArtSigmaPipeline(
        transformer=diffusers.PixArtTransformer2DModel(
            sample_size=64,
            num_layers=8,
            num_attention_heads=12,
            attention_head_dim=64,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=768,
            caption_channels=512,
            use_additional_conditions=False,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        vae=diffusers.AutoencoderKL(**AUTOENCODER),
        text_encoder=None,
        tokenizer=None,
    ).save_pretrained(folder)


def wan(folder: str) -> None:
    """Wan's classes."""
    import diffusers

    diffusers.WanPipeline(
        transformer=diffusers.WanTransformer3DModel(
            num_layers=8, num_attention_heads=12, attention_head_dim=64, ffn_dim=3072, text_dim=512, freq_dim=128
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLWan(base_dim=32, num_res_blocks=1),
        text_encoder=None,
        tokenizer=None,
    ).save_pretrained(folder)


# The pipeline, its configuration, pixels of a side, frames.
CASES: dict[str, tuple[Callable[[str], None], dict[str, Any], int, int]] = {
    "SD3, 1 device": (sd3, {}, 320, 1),
    "SD3, ulysses=2": (sd3, {"ulysses": 2}, 320, 1),
    "SD3, tensor=2": (sd3, {"tensor": 2}, 256, 1),
    "Wan, ulysses=2": (wan, {"ulysses": 2}, 128, 9),
    "FLUX, ring=2 over gloo": (flux, {"ring": 2, "shared_memory": False}, 320, 1),
    "SD3, displaced": (sd3, {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}, 256, 1),
    "PixArt, cfg=2": (pixart, {"cfg": 2}, 256, 1),
    "SD3, pipe=2": (sd3, {"pipe": 2, "patches": 2, "warmup": "fixed(1)"}, 256, 1),
    "FLUX, 1 device": (flux, {}, 320, 1),
    "Wan, cfg=2": (wan, {"cfg": 2}, 128, 9),
    "SD3, ring=2, bands": (sd3, {"ring": 2, "vae": "bands"}, 384, 1),
    "PixArt, 1 device": (pixart, {}, 320, 1),
}


def status(*names: str) -> int:
    """Bytes that the kernel says of this process, added up."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.split(":")[0] in names)


class Own:
    """The most of RssAnon and RssShmem, looked at all the time by a thread.

    Args:
        pause: seconds between two looks.
    """

    def __init__(self, pause: float = 0.002) -> None:
        self._peak, self._pause, self._over = 0, pause, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def most(self) -> int:
        """Since the last time."""
        peak, self._peak = max(self._peak, status("RssAnon", "RssShmem")), 0
        return peak

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            self._peak = max(self._peak, status("RssAnon", "RssShmem"))
            time.sleep(self._pause)


@contextmanager
def counted(alive: Any) -> Iterator[None]:
    """Messages in shared memory are no tensors."""
    from ditmesh.comm.shared import SharedMemory

    take, slot = SharedMemory.take, SharedMemory._slot

    def taken(self: Any, *args: Any) -> Any:
        tensors = take(self, *args)
        for tensor in tensors:
            alive.hold(tensor)
        return tensors

    def slotted(self: Any, size: int) -> Any:
        made = slot(self, size)
        alive.hold(made.contents)
        return made

    SharedMemory.take, SharedMemory._slot = taken, slotted  # type: ignore[method-assign]
    try:
        with alive:
            yield
    finally:
        SharedMemory.take, SharedMemory._slot = take, slot  # type: ignore[method-assign]


def absent(folder: str) -> dict[str, None]:
    """Components that a pipeline was saved without."""
    index = json.loads((Path(folder) / "model_index.json").read_text())
    return {name: None for name, value in index.items() if value == [None, None]}


def arguments(pipe: Any, side: int, frames: int) -> dict[str, Any]:
    """Of a call with guidance."""
    name = type(pipe).__name__
    given: dict[str, Any] = {"height": side, "width": side, "num_inference_steps": 1}
    if name == "StableDiffusion3Pipeline":
        given |= {"prompt_embeds": torch.randn(1, TEXT, 512), "pooled_prompt_embeds": torch.randn(1, 256)}
        given |= {f"negative_{key}": value.clone() for key, value in given.items() if "embeds" in key}
    elif name == "FluxPipeline":
        given |= {"prompt_embeds": torch.randn(1, TEXT, 512), "pooled_prompt_embeds": torch.randn(1, 256)}
    elif name == "PixArtSigmaPipeline":
        embeds, mask = torch.randn(1, TEXT, 512), torch.ones(1, TEXT)
        given |= {"prompt_embeds": embeds, "prompt_attention_mask": mask, "negative_prompt": None}
        given |= {"negative_prompt_embeds": embeds.clone(), "negative_prompt_attention_mask": mask.clone()}
        given |= {"use_resolution_binning": False}
    else:
        given |= {"prompt_embeds": torch.randn(1, TEXT, 512), "num_frames": frames}
        given |= {"negative_prompt_embeds": given["prompt_embeds"].clone()}
    return given


def before_models(config: dict[str, Any]) -> dict[str, int]:
    """On a rank: what the process has once it has drawn a picture of an embedded model; of that, what is its own."""
    import ditmesh
    from ditmesh import zoo
    from ditmesh.generate.runner import quieten

    quieten()
    give_freed_memory_back()
    warm = ditmesh.load(zoo.path("emoji-sd3"), config if config.get("pipe", 1) == 1 else {"ulysses": 2})
    warm.set_progress_bar_config(disable=True)
    warm("a red fox", num_inference_steps=1)
    ditmesh.restore(warm)
    del warm
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {"resident": status("VmRSS"), "own": status("RssAnon", "RssShmem")}


def measured(folder: str, config: dict[str, Any], side: int, frames: int) -> dict[str, Any]:
    """On a rank: bytes of every phase, of tensors and of the process."""
    import ditmesh
    from ditmesh.core.alive import LiveBytes

    start = before_models(config)
    process: dict[str, int] = {}
    own = Own()
    pipe = ditmesh.load(folder, config, **absent(folder))
    for tensor in weights_of(pipe):
        # Pages of a mapped file come when they are read, and go when the system likes; on a device they would stay.
        tensor.data = tensor.data.clone()
    process["load"] = own.most()
    pipe.set_progress_bar_config(disable=True)
    given = arguments(pipe, side, frames)
    if ditmesh.engine_of(pipe).control is not None:
        given["num_inference_steps"] = 3
    encoders = [part for name, part in pipe.components.items() if name.startswith("text_encoder") and part is not None]
    if encoders:
        with torch.no_grad():
            for encoder in encoders:
                encoder(input_ids=torch.zeros(1, min(TEXT, 77 if "CLIP" in type(encoder).__name__ else TEXT)).long())
        process["encode"] = own.most()
    tensors: dict[str, float] = {}
    alive = LiveBytes(weights_of(pipe))
    decode, counting = pipe.vae.decode, False

    def around(*args: Any, **kwargs: Any) -> Any:
        # What the steps have taken, and then what decoding takes.
        if not counting:
            process["step"] = own.most()
            return decode(*args, **kwargs)
        before, tensors["step"] = alive.now, alive.peak
        alive.reset()
        result = decode(*args, **kwargs)
        tensors["decode"] = alive.peak - before
        return result

    pipe.vae.decode = around
    pipe(**given)
    process["decode"] = own.most()
    own.close()
    counting = True
    with counted(alive):
        pipe(**given)
    del pipe.vae.decode
    weights = {name: sum(t.nbytes for t in weights_of(pipe, [name])) for name in pipe.components}
    ditmesh.restore(pipe)
    # Code and tables that are mapped are a process's, too.
    process = {phase: most + start["resident"] - start["own"] for phase, most in process.items()}
    return {"start": start["resident"], "process": process, "tensors": tensors, "weights": weights}


def compared(
    folder: str, config: dict[str, Any], side: int, frames: int, ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is predicted, and how far it is off."""
    from ditmesh import ParallelConfig
    from ditmesh.generate.model_info import find_model
    from ditmesh.memory.check import components_of
    from ditmesh.memory.phases import needs
    from ditmesh.memory.sizes import workload_of

    info, parallel = find_model(folder), ParallelConfig(**config)
    guided = info.pipeline_class != "FluxPipeline"
    request = workload_of(info, (side, side), TEXT, guidance=guided, frames=frames if frames > 1 else None)
    worst = {what: {k: max(one[what][k] for one in ranks) for k in ranks[0][what]} for what in ("process", "tensors")}
    start = max(one["start"] for one in ranks)
    result: dict[str, Any] = {"process": {}, "tensors": {}}
    for what, before in (("process", float(start)), ("tensors", 0.0)):
        stages = needs(components_of(info), parallel, request, torch.float32, before)
        for phase in stages[0].phases:
            name = "step" if phase.name == "denoise" else phase.name
            same = [each for stage in stages for each in stage.phases if each.name == phase.name]
            most = max(each.total if what == "process" else each.activations for each in same)
            if name in worst[what]:
                found = worst[what][name]
                result[what][name] = {"measured": found, "predicted": most, "error": round(most / found - 1, 4)}
    return result


def line(name: str, case: dict[str, Any]) -> str:
    """A row of a table: predicted / measured MB and the error, of processes and of tensors."""
    cells = [
        f"{one['predicted'] / 1e6:.0f} / {one['measured'] / 1e6:.0f} ({one['error']:+.1%})" if one else ""
        for what, phases in (("process", ("load", "encode", "step", "decode")), ("tensors", ("step", "decode")))
        for phase in phases
        for one in [case[what].get(phase)]
    ]
    return f"| {name} | {' | '.join(cells)} |"


def weights_of(pipe: Any, names: list[str] | None = None) -> list[torch.Tensor]:
    """Parameters and buffers of the pipeline's models, each memory once."""
    models = [pipe.components[name] for name in names or pipe.components]
    found = [t for one in models if isinstance(one, torch.nn.Module) for t in (*one.parameters(), *one.buffers())]
    return [*{tensor.untyped_storage()._cdata: tensor for tensor in found}.values()]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="*", help="of the cases; default: all")
    parser.add_argument("--report", action="store_true", help="measure nothing, compare what the file holds")
    options = parser.parse_args()
    from ditmesh import ParallelConfig
    from ditmesh.launch import RankPool

    figures: dict[str, Any] = {"machine": describe_machine()["text"], "cases": {}}
    if options.json is not None and options.json.is_file():
        figures = json.loads(options.json.read_text())
    print("| | load | encode | step | decode | tensors, step | tensors, decode |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for name, (build, config, side, frames) in CASES.items():
            if options.only and name not in options.only:
                continue
            folder = f"{temporary}/{build.__name__}"
            if not Path(folder).exists():
                torch.manual_seed(0)
                build(folder)
            if not options.report:
                with RankPool(ParallelConfig(**config).world_size, threads=1, device="cpu", timeout=1800) as pool:
                    every = pool.run(measured, folder, config, side, frames)
                figures["cases"][name] = {"ranks": every}
            if name in figures["cases"]:
                figures["cases"][name] |= compared(folder, config, side, frames, figures["cases"][name]["ranks"])
                print(line(name, figures["cases"][name]), flush=True)
            write_figures(figures, options.json)
    print(figures["machine"])


if __name__ == "__main__":
    main()

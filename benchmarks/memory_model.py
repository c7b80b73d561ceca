"""Predicted memory of a rank beside measured: loading, encoding, a denoising step, decoding. CPU ranks, Linux.

Pipelines of the real classes with random weights of a few hundred MB run on one or two ranks, one configuration after
the other. Two things are compared with the prediction (`ditmesh.memory`), each phase by itself:

* tensors: bytes of storages that are alive at the peak, counted in the rank by the same dispatch mode that the
  prediction uses, there with values and real messages; workspace of kernels is not seen by it and left out of both;
* process: the most that the process has resident in the phase (VmHWM, reset before through clear_refs; while loading
  the most of RssAnon and RssShmem, looked at every 2 ms, as files that are mapped are nobody's memory). The
  prediction adds what a process has before it holds a model, which is measured in the same rank after it has made a
  picture with an embedded model.

    python benchmarks/memory_model.py --json figures.json
    python benchmarks/memory_model.py --only "Wan, ulysses=2"

It needs no quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from machine import describe_machine

TEXT = 128
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
    import diffusers
    import transformers

    t5 = transformers.T5Config(d_model=512, d_ff=1024, num_layers=8, num_heads=8, d_kv=64, vocab_size=32128)
    clip = transformers.CLIPTextConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, projection_dim=256)
    none = dict.fromkeys(("text_encoder_2", "tokenizer", "tokenizer_2", "tokenizer_3"))
    diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=96,
            num_layers=8,
            attention_head_dim=64,
            num_attention_heads=12,
            joint_attention_dim=512,
            caption_projection_dim=768,
            pooled_projection_dim=256,
            in_channels=4,
            out_channels=4,
            pos_embed_max_size=96,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(**AUTOENCODER),
        text_encoder=transformers.CLIPTextModelWithProjection(clip),
        text_encoder_3=transformers.T5EncoderModel(t5),
        **none,
    ).save_pretrained(folder)


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
    "SD3, 1 device": (sd3, {}, 512, 1),
    "SD3, ulysses=2": (sd3, {"ulysses": 2}, 512, 1),
    "SD3, ring=2, whole decode": (sd3, {"ring": 2, "vae": "whole"}, 384, 1),
    "SD3, tensor=2": (sd3, {"tensor": 2}, 512, 1),
    "SD3, displaced": (sd3, {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}, 384, 1),
    "SD3, pipe=2": (sd3, {"pipe": 2, "patches": 2, "warmup": "fixed(1)"}, 384, 1),
    "SD3, cfg=2": (sd3, {"cfg": 2}, 384, 1),
    "FLUX, 1 device": (flux, {}, 384, 1),
    "FLUX, ulysses=2": (flux, {"ulysses": 2}, 512, 1),
    "FLUX, ring=2 over gloo": (flux, {"ring": 2, "shared_memory": False}, 512, 1),
    "PixArt, 1 device": (pixart, {}, 512, 1),
    "PixArt, cfg=2": (pixart, {"cfg": 2}, 512, 1),
    "Wan, 1 device": (wan, {}, 160, 9),
    "Wan, ulysses=2": (wan, {"ulysses": 2}, 160, 9),
    "Wan, cfg=2": (wan, {"cfg": 2}, 160, 9),
}


def status(*names: str) -> int:
    """Bytes that the kernel says of this process, added up."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.split(":")[0] in names)


@contextmanager
def most(found: dict[str, int], phase: str) -> Iterator[None]:
    """The most that the process has resident meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    yield
    found[phase] = status("VmHWM")


@contextmanager
def most_of_its_own(found: dict[str, int], phase: str) -> Iterator[None]:
    """The same, without files that are mapped."""
    peak, over = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, status("RssAnon", "RssShmem"))
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    found[phase] = peak


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


def measured(folder: str, config: dict[str, Any], side: int, frames: int) -> dict[str, Any]:
    """On a rank: bytes of every phase, of tensors and of the process."""
    import ditmesh
    from ditmesh import zoo
    from ditmesh.core.alive import Alive
    from ditmesh.generate.run import quieten

    quieten()
    warm = ditmesh.load(zoo.path("emoji-sd3"), config if config.get("pipe", 1) == 1 else {"ulysses": 2})
    warm.set_progress_bar_config(disable=True)
    warm("a red fox", num_inference_steps=1)
    ditmesh.restore(warm)
    del warm
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    start = {"resident": status("VmRSS"), "own": status("RssAnon", "RssShmem")}
    process: dict[str, int] = {}
    with most_of_its_own(process, "load"):
        pipe = ditmesh.load(folder, config, **absent(folder))
    after = {"resident": status("VmRSS"), "own": status("RssAnon", "RssShmem")}
    pipe.set_progress_bar_config(disable=True)
    given = arguments(pipe, side, frames)
    steps = {**given, "num_inference_steps": 3} if ditmesh.engine_of(pipe).control is not None else given
    tensors: dict[str, float] = {}

    def held() -> Alive:
        modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
        return Alive(tensor for part in modules for tensor in (*part.parameters(), *part.buffers()))

    encoders = [part for name, part in pipe.components.items() if name.startswith("text_encoder") and part is not None]
    if encoders:
        with torch.no_grad(), most(process, "encode"):
            for encoder in encoders:
                encoder(input_ids=torch.zeros(1, min(TEXT, 77 if "CLIP" in type(encoder).__name__ else TEXT)).long())
    with most(process, "step"):
        pipe(**steps, output_type="latent")
    with most(process, "decode"):
        pipe(**given)
    for phase, how in (("step", {**steps, "output_type": "latent"}), ("decode", given)):
        alive = held()
        if phase == "decode":
            # Of the decoder alone.
            decode = pipe.vae.decode

            def around(*args: Any, alive: Any = alive, decode: Any = decode, **kwargs: Any) -> Any:
                before = alive.now
                alive.reset()
                try:
                    return decode(*args, **kwargs)
                finally:
                    tensors["decode"] = alive.peak - before

            pipe.vae.decode = around
        with counted(alive):
            pipe(**how)
        tensors.setdefault(phase, alive.peak)
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    weights = {
        name: sum(
            {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in part.parameters()}.values()
        )
        for name, part in modules.items()
    }
    ditmesh.restore(pipe)
    return {"start": start, "after": after, "process": process, "tensors": tensors, "weights": weights}

"""Whole pipelines with random weights, small enough to be made in a second: Stable Diffusion 3, and some for videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import CLIPTokenizer

from support.exam import flow
from support.models import component


def save_tiny_sd3(folder: Path, channels: int = 4) -> Path:
    """Write a pipeline of 32x32 pictures (16 x 16 latents, 8 x 8 tokens, 8 heads of 8) and return its folder.

    diffusers' inpainting wants 16 latent ``channels``.
    """
    torch.manual_seed(0)
    words = letters_tokenizer(folder / "words")
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=component("SD3 saved", in_channels=channels, out_channels=channels),
        scheduler=flow(shift=3.0),
        vae=component("kl saved", latent_channels=channels),
        text_encoder=component("clip saved"),
        tokenizer=words,
        text_encoder_2=component("clip saved"),
        tokenizer_2=words,
        # The pipeline cannot be loaded without one; it reads through the same tokenizer.
        text_encoder_3=component("t5 saved"),
        tokenizer_3=words,
    )
    return saved(pipe, folder / "tiny-sd3")


def save_tiny_wan(folder: Path, image_to_video: bool = False) -> Path:
    """Write a pipeline of videos (4 times smaller latents along each side and 4k + 1 frames, 8 heads of 12).

    Args:
        folder: where to.
        image_to_video: one that begins with a picture, whose latents it is given beside the noise.
    """
    torch.manual_seed(0)
    kind = diffusers.WanImageToVideoPipeline if image_to_video else diffusers.WanPipeline
    pipe = kind(
        tokenizer=letters_tokenizer(folder / "words"),
        vae=component("Wan vae saved"),
        scheduler=flow(shift=3.0),
        transformer=component("Wan saved", in_channels=12 if image_to_video else 4),
        text_encoder=component("umt5 saved"),
        **({"image_processor": None, "image_encoder": None} if image_to_video else {}),
    )
    return saved(pipe, folder / ("tiny-wan-i2v" if image_to_video else "tiny-wan"))


def save_tiny_ltx(folder: Path) -> Path:
    """Write a video pipeline (LTX; 4 x 4 pixels and 4 frames for a latent, 4 heads of 8) and return its folder."""
    torch.manual_seed(0)
    pipe = diffusers.LTXPipeline(
        transformer=component("LTX saved"),
        scheduler=flow(),
        vae=component("LTX vae saved"),
        text_encoder=component("t5 saved"),
        tokenizer=letters_tokenizer(folder / "words"),
    )
    return saved(pipe, folder / "tiny-ltx")


def save_tiny_anyflow(folder: Path) -> Path:
    """Write a pipeline that draws 17 frames in chunks of 1, 2 and 2 frames of latents, and return its folder."""
    torch.manual_seed(0)
    pipe = diffusers.AnyFlowFARPipeline(
        tokenizer=letters_tokenizer(folder / "words"),  # pyright: ignore[reportArgumentType]
        text_encoder=component("umt5 saved"),
        transformer=component("AnyFlowFARTransformer3DModel", text_dim=32),
        vae=component("Wan vae saved", latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.7, 1.1, 2.0]),
        scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
    )
    return saved(pipe, folder / "tiny-anyflow")


def saved(pipe: Any, folder: Path) -> Path:
    pipe.save_pretrained(folder)
    return folder


def letters_tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer that knows the letters and nothing else: 190 words, the first two begin and end a text."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=24)

"""A hub's cache with tiny random pipelines under the names of published ones.

Programs of the documentation name models of many gigabytes. With ``HF_HUB_CACHE`` set to this folder, and the hub
switched off, diffusers and ditmesh find these instead; nothing in either is patched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from ditmesh import zoo
from support.models import tiny

WIDTH, POOLED = 32, 16


def _tokenizer() -> Any:
    return transformers.CLIPTokenizer.from_pretrained(zoo.path() / "tokenizer")


def _size() -> dict[str, Any]:
    vocabulary = len(_tokenizer())
    return {"vocab_size": vocabulary, "bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1}


def _clip() -> Any:
    settings = {"hidden_size": POOLED, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**settings, **_size()))


def _t5() -> Any:
    settings = {"d_model": WIDTH, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=_size()["vocab_size"], decoder_start_token_id=0, **settings)
    )


def _decoder(channels: int) -> Any:
    """Halves three times, as those of Flux and Stable Diffusion 3 do."""
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        norm_num_groups=2,
        latent_channels=channels,
        shift_factor=0.1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )


def _flux() -> Any:
    transformer = tiny("Flux")
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_decoder(transformer.config.in_channels // 4),
        text_encoder=_clip(),
        tokenizer=_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(),
    )


STAND_INS: dict[str, Callable[[], Any]] = {"black-forest-labs/FLUX.1-dev": _flux}


def fill(cache: Path) -> None:
    """Write every stand-in into ``cache`` as the hub's client lays it out."""
    torch.manual_seed(0)
    for name, make in STAND_INS.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40, encoding="utf-8")
        snapshot = folder / "snapshots" / ("0" * 40)
        make().save_pretrained(snapshot)
        assert json.loads((snapshot / "model_index.json").read_text(encoding="utf-8"))

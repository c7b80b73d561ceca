"""The embedded models of emoji: their pictures, captions and untrained pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,  # pyright: ignore[reportPrivateImportUsage]
    FlowMatchEulerDiscreteScheduler,  # pyright: ignore[reportPrivateImportUsage]
    FluxPipeline,  # pyright: ignore[reportPrivateImportUsage]
    FluxTransformer2DModel,  # pyright: ignore[reportPrivateImportUsage]
)
from PIL import Image
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from training import autoencoder as ae
from training import evaluate, export, loop, text
from training.data import Entry, load

AUTOENCODER = loop.Plan(steps=4000, batch=8, rate=2e-3, warmup=50, cooldown=0.5, average=0.995)
CHANNELS = 16
STEPS = 12
GUIDANCE = 1.0  # the model knows no guidance
# Of eight copies of a picture, so many have a caption as it is written; the others are worded otherwise.
COPIES, AS_WRITTEN = 8, 6


def make_autoencoder(folder: Path) -> AutoencoderKL:
    """64x64x3 pixels <-> 16x16x16 latents; trained, unless ``folder`` has its checkpoint."""
    pictures = load(folder)
    torch.manual_seed(0)
    vae: AutoencoderKL = ae.make_autoencoder((24, 48, 48), CHANNELS).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    ae.train(vae, AUTOENCODER, pictures.chosen, pictures.wider, folder / "autoencoder.pt", loss_of=ae.psnr_loss)
    return vae


def wordings(entry: Entry, number: int) -> list[str]:
    """What the copies of a picture are called."""
    plain = [entry.captions[i % len(entry.captions)] for i in range(AS_WRITTEN)]
    others = [words for caption in entry.captions for words in text.variants(caption)[1:]]
    some = np.random.default_rng(number).choice(len(others), COPIES - AS_WRITTEN, replace=False)
    return [*plain, *(others[i] for i in some)]


class EmojiFlux:
    """``emoji-flux``: a ``FluxPipeline`` of 256 captioned emoji.

    The latents are packed two by two, so a picture is 64 tokens. The T5 encoder says the prompt's tokens, the CLIP
    encoder the whole prompt; both are trained with the transformer.
    """

    image_tokens = 64
    settings: dict[str, Any] = {  # noqa: RUF012
        "train_modules": ["transformer", "text_encoder", "text_encoder_2"],
        "resolution": 64,
        "max_sequence_length": text.MAX_TOKENS,
        "train_batch_size": 16,
        "max_train_steps": 6000,
        "learning_rate": 1.2e-3,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 100,
        "adam_beta2": 0.99,
        "adam_weight_decay": 0.0,
        "use_ema": True,
        "ema_decay": 0.99,
        "proportion_empty_prompts": 0.1,
        "checkpointing_steps": 100,
        "checkpoints_total_limit": 2,
    }

    def write_data(self, folder: Path) -> Path:
        """Eight copies of every picture, with captions of their own; returns their folder."""
        out = folder / "data"
        if not (out / "metadata.jsonl").exists():
            out.mkdir(parents=True, exist_ok=True)
            pictures = load(folder)
            lines = []
            for number, (entry, picture) in enumerate(zip(pictures.entries, pictures.chosen, strict=True)):
                for copy, caption in enumerate(wordings(entry, number)):
                    name = f"{number:03d}-{copy}.png"
                    Image.fromarray(picture).save(out / name)
                    lines.append(json.dumps({"file_name": name, "text": caption}))
            (out / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return out

    def make_pipeline(self, folder: Path) -> FluxPipeline:
        """The pipeline before the trainer sees it."""
        vae = make_autoencoder(folder)
        captions = [caption for entry in load(folder).entries for caption in entry.captions]
        tokenizer = text.make_tokenizer(captions, folder / "tokenizer")
        torch.manual_seed(0)
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        clip = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=text.MAX_TOKENS,
            **special,
        )
        # Dropout would be another one on every rank.
        t5 = T5Config(
            vocab_size=len(tokenizer),
            d_model=96,
            d_kv=24,
            d_ff=192,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            **special,
        )
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * CHANNELS,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=24,
            num_attention_heads=8,
            joint_attention_dim=96,
            pooled_projection_dim=64,
            guidance_embeds=False,
            axes_dims_rope=(4, 10, 10),
        )
        start_as_identity(transformer)
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=vae,
            text_encoder=CLIPTextModel(clip),
            tokenizer=tokenizer,
            text_encoder_2=T5EncoderModel(t5),
            tokenizer_2=tokenizer,  # pyright: ignore[reportArgumentType]
            transformer=transformer,
        )

    def export(self, trained: Path, out: Path, folder: Path) -> None:
        """The pipeline with transformer and autoencoder in float16, captions and thumbnails.

        transformers, other than diffusers, would leave text encoders in the stored type.
        """
        export.copy_pipeline(trained, out, ("transformer", "vae"))
        export.copy_vocabulary(folder / "tokenizer", out)
        pictures = load(folder)
        export.write_captions(pictures.entries, pictures.chosen, out)

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """See :func:`training.evaluate.evaluate`; and the autoencoder on the captioned pictures."""
        figures = evaluate.evaluate(out, steps=STEPS, guidance=GUIDANCE)
        vae, pictures = AutoencoderKL.from_pretrained(out / "vae"), load(folder).chosen
        restored = ae.decode(vae, ae.encode(vae, pictures))
        return figures | {"autoencoder_psnr": round(float(ae.psnr(restored, pictures).mean()), 2)}

    def write_card(self, out: Path, record: dict[str, Any]) -> None:
        """See :mod:`training.card_flux`."""
        from training.card_flux import write

        write(out, record)


def start_as_identity(model: nn.Module) -> None:
    """Even weights, and modulation and output layers of zeros (adaLN-Zero, Peebles and Xie 2022, arXiv:2212.09748)."""
    zero: list[nn.Module] = [model.proj_out]  # pyright: ignore[reportAssignmentType]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if type(module).__name__.startswith("AdaLayerNorm"):
            zero.append(module.linear)  # pyright: ignore[reportArgumentType]
    for layer in zero:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)

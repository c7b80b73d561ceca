"""The embedded models of emoji: their pictures, captions and untrained pipelines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,  # pyright: ignore[reportPrivateImportUsage]
    DiTPipeline,  # pyright: ignore[reportPrivateImportUsage]
    FlowMatchEulerDiscreteScheduler,  # pyright: ignore[reportPrivateImportUsage]
    FluxPipeline,  # pyright: ignore[reportPrivateImportUsage]
    FluxTransformer2DModel,  # pyright: ignore[reportPrivateImportUsage]
    SD3Transformer2DModel,  # pyright: ignore[reportPrivateImportUsage]
    StableDiffusion3Pipeline,  # pyright: ignore[reportPrivateImportUsage]
)
from PIL import Image
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from ditmesh import zoo
from ditmesh.core.files import written_whole
from ditmesh.lab.study.references import views
from training import autoencoder as ae
from training import card_emoji, diffusion, evaluate, evaluate_dit, export, export_dit, loop, text
from training.data import CLASSES, Entry, Pictures, load

AUTOENCODER = loop.Plan(steps=1400, batch=16, rate=2e-3, warmup=50, average=0.995)
DECODER = loop.Plan(steps=3000, batch=16, rate=1e-3, warmup=50, cooldown=0.6, average=0.995)
CHANNELS = 8
# The max_sequence_length of StableDiffusion3Pipeline.
PADDED = 256
# Pixels of a picture within a view of 64.
VIEWED = 56
# Of eight copies of a picture, so many have a caption as it is written; the others are worded otherwise.
COPIES, AS_WRITTEN = 8, 6


def make_autoencoder(folder: Path) -> AutoencoderKL:
    """64x64x3 pixels <-> 8x16x16 latents; trained, then its decoder alone, unless ``autoencoder/`` is there."""
    made = folder / "autoencoder"
    if not (made / "config.json").exists():
        pictures = load(folder)
        torch.manual_seed(0)
        vae: AutoencoderKL = ae.make_autoencoder((24, 48, 48), CHANNELS).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        ae.train(vae, AUTOENCODER, pictures.chosen, pictures.wider, folder / "autoencoder.pt")
        ae.train_decoder(vae, DECODER, pictures.chosen, pictures.wider, folder / "decoder.pt")
        vae.save_pretrained(made)
    return AutoencoderKL.from_pretrained(made)


def wordings(entry: Entry, number: int) -> list[str]:
    """What the copies of a picture are called."""
    plain = [entry.captions[i % len(entry.captions)] for i in range(AS_WRITTEN)]
    others = [words for caption in entry.captions for words in text.variants(caption)[1:]]
    some = np.random.default_rng(number).choice(len(others), COPIES - AS_WRITTEN, replace=False)
    return [*plain, *(others[i] for i in some)]


# Of `ditmesh.train.TrainConfig`, without groups, as checkpoints have them.
SETTINGS: dict[str, Any] = {
    "resolution": 64,
    "train_batch_size": 16,
    "max_train_steps": 5000,
    "learning_rate": 1.2e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 100,
    "optimizer_args": {"betas": [0.9, 0.99], "weight_decay": 0.0},
    "ema_decay": 0.99,
    "proportion_empty_prompts": 0.1,
    "checkpointing_steps": 100,
    "checkpoints_total_limit": 2,
}


def write_folder(out: Path, rows: Iterable[tuple[str, np.ndarray, dict[str, Any]]], duration: int = 0) -> None:
    """Pictures as PNG files, and ``metadata.jsonl`` with what is said of each; nothing where that file is there.

    Args:
        out: the folder.
        rows: names, pictures (H, W, 3) or the frames of videos (F, H, W, 3), and what is said of them.
        duration: milliseconds of a frame.
    """
    listing = out / "metadata.jsonl"
    if listing.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, picture, said in rows:
        first, *others = [Image.fromarray(frame) for frame in (picture if picture.ndim == 4 else [picture])]
        # An animated PNG loses nothing.
        more = {"save_all": True, "append_images": others, "duration": duration} if others else {}
        first.save(out / name, **more)
        lines.append(json.dumps({"file_name": name, **said}))
    with written_whole(listing) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Captioned:
    """What models of the captioned emoji have in common; a recipe of :mod:`training.zoo`."""

    guidance: float
    settings: dict[str, Any]

    def write_data(self, folder: Path) -> Path:
        """Copies of every picture, with captions of their own; returns their folder."""
        pictures = load(folder)
        rows = (
            (f"{number:03d}-{copy}.png", picture, {"text": caption})
            for number, (entry, picture) in enumerate(zip(pictures.entries, pictures.chosen, strict=True))
            for copy, caption in enumerate(wordings(entry, number))
        )
        write_folder(folder / "data", rows)
        return folder / "data"

    def _tokenizer(self, folder: Path) -> CLIPTokenizer:
        captions = [caption for entry in load(folder).entries for caption in entry.captions]
        return text.make_tokenizer(captions, folder / "tokenizer")

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
        return evaluate.evaluate(out, guidance=self.guidance, size=64) | autoencoder_figures(out, load(folder).chosen)

    def write_card(self, out: Path, record: dict[str, Any]) -> None:
        """See :mod:`training.card_emoji`."""
        card_emoji.write_captioned(out, record)


class EmojiFlux(_Captioned):
    """``emoji-flux``: a ``FluxPipeline`` of 256 captioned emoji.

    The autoencoder is that of ``emoji-sd3``. The latents are packed two by two, so a picture is 64 tokens. The T5
    encoder says the prompt's tokens, the CLIP encoder the whole prompt; both are trained with the transformer. No
    guidance is embedded, so a picture has only its caption to go by: no sample is without, and noise levels are high,
    where the caption decides.
    """

    guidance, image_tokens = 1.0, 64
    settings: dict[str, Any] = {  # noqa: RUF012
        **SETTINGS,
        "train_modules": ["transformer", "text_encoder", "text_encoder_2"],
        "max_sequence_length": text.MAX_TOKENS,
        "max_train_steps": 5000,
        "learning_rate": 1.5e-3,
        # Of the place in the table of levels, which begins with pure noise.
        "logit_mean": -0.7,
        "proportion_empty_prompts": 0.0,
    }

    def make_pipeline(self, folder: Path) -> FluxPipeline:
        """The pipeline before the trainer sees it."""
        vae, tokenizer = AutoencoderKL.from_pretrained(zoo.path("emoji-sd3") / "vae"), self._tokenizer(folder)
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
            in_channels=4 * vae.config["latent_channels"],
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


class EmojiSD3(_Captioned):
    """``emoji-sd3``: a ``StableDiffusion3Pipeline`` of the same emoji, one token a latent pixel.

    Behind the words there are as many zero tokens as ``max_sequence_length`` says, 256 unless told otherwise. All of
    them are keys of the attention, so the model has to know several numbers of them.
    """

    guidance, image_tokens = 2.0, 256
    settings: dict[str, Any] = {  # noqa: RUF012
        **SETTINGS,
        "train_modules": ["transformer", "text_encoder", "text_encoder_2"],
        # Mostly the shortest, which is the cheapest.
        "max_sequence_length": [text.MAX_TOKENS] * 14 + [64, PADDED],
        "cache_dir": "cache",
        "max_train_steps": 4000,
        "learning_rate": 1.5e-3,
        "lr_scheduler": "warmup_stable_decay",
        "lr_decay_steps": 1200,
        "logit_mean": -0.7,
    }

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """And the accuracy with as many zero tokens as the pipeline takes by itself."""
        padded = evaluate.evaluate(out, guidance=self.guidance, max_sequence_length=PADDED, size=64, sheet=False)
        return super().evaluate(out, folder) | {"padded_accuracy": padded["nearest_picture_accuracy"]}

    def make_pipeline(self, folder: Path) -> StableDiffusion3Pipeline:
        """The pipeline before the trainer sees it."""
        vae, tokenizer = make_autoencoder(folder), self._tokenizer(folder)
        torch.manual_seed(0)
        width = 96
        transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=1,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=6,
            num_attention_heads=8,
            attention_head_dim=24,
            joint_attention_dim=2 * width,
            caption_projection_dim=192,
            pooled_projection_dim=2 * width,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        )
        start_as_identity(transformer)
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=vae,
            text_encoder=text.make_encoder(tokenizer, width),
            tokenizer=tokenizer,
            text_encoder_2=text.make_encoder(tokenizer, width),
            tokenizer_2=tokenizer,
            text_encoder_3=text.make_silent_t5(tokenizer, 2 * width),
            tokenizer_3=tokenizer,  # pyright: ignore[reportArgumentType]
        )


class EmojiDiT:
    """``emoji-dit-s`` and ``-l``: ``DiTPipeline`` of 64 emoji by class, each in four views."""

    image_tokens = 256
    settings: dict[str, Any] = {  # noqa: RUF012
        **SETTINGS,
        "cache_dir": "cache",
        "train_batch_size": 32,
        "max_train_steps": 4000,
        "lr_scheduler": "warmup_stable_decay",
        "lr_warmup_steps": 150,
        "lr_decay_steps": 1200,
    }

    def __init__(self, layers: int, rate: float) -> None:
        self._layers = layers
        self.settings = self.settings | {"learning_rate": rate}

    def _pictures(self, folder: Path) -> Pictures:
        return load(folder, VIEWED, CLASSES)

    def write_data(self, folder: Path) -> Path:
        """All views of all classes; returns their folder."""
        rows = (
            (f"{label:02d}-{number}.png", view, {"label": label})
            for label, seen in enumerate(views(self._pictures(folder).chosen))
            for number, view in enumerate(seen)
        )
        write_folder(folder / "data", rows)
        return folder / "data"

    def make_pipeline(self, folder: Path) -> DiTPipeline:
        """The pipeline before the trainer sees it."""
        vae, pictures = AutoencoderKL.from_pretrained(zoo.path("emoji-sd3") / "vae"), self._pictures(folder)
        # DiTPipeline knows no shift.
        scale = float(1.0 / ae.encode(vae, views(pictures.chosen).reshape(-1, 64, 64, 3)).std())
        vae.register_to_config(shift_factor=None, scaling_factor=scale)
        torch.manual_seed(0)
        transformer = diffusion.make_transformer(classes=len(pictures.entries), channels=CHANNELS, layers=self._layers)
        return DiTPipeline(transformer, vae, diffusion.make_scheduler())  # pyright: ignore[reportArgumentType]

    def export(self, trained: Path, out: Path, folder: Path) -> None:
        """The pipeline with weights in float16, the names of its classes and thumbnails."""
        export.copy_pipeline(trained, out, ("transformer", "vae"))
        export_dit.write_classes(self._pictures(folder), out)

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """See :func:`training.evaluate_dit.evaluate`; and the autoencoder on the views."""
        seen = views(self._pictures(folder).chosen).reshape(-1, 64, 64, 3)
        return evaluate_dit.evaluate(out) | autoencoder_figures(out, seen)

    def write_card(self, out: Path, record: dict[str, Any]) -> None:
        """See :mod:`training.card_emoji`."""
        card_emoji.write_classes(out, record)


def autoencoder_figures(out: Path, pictures: np.ndarray) -> dict[str, float]:
    """How well an exported autoencoder restores pictures, in dB."""
    vae = AutoencoderKL.from_pretrained(out / "vae")
    restored = ae.decode(vae, ae.encode(vae, pictures))
    return {"autoencoder_psnr": round(float(ae.psnr(restored, pictures).mean()), 2)}


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

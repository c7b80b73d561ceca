# ruff: noqa: E501 (the card's tables have long rows)
"""The cards of models of videos: every figure in them is read from the record of the run that made it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from training.card import DATA_LICENSE
from training.data import PACKAGE, VERSION

CARD = """\
---
library_name: diffusers
pipeline_tag: text-to-video
license: mit
---
# {name}

A small model of videos in the form of an ordinary `{pipeline}`: {size}x{size} pixels, {frames} frames, {subjects} emoji in {motions}
motions. It exists so that tools for Diffusion Transformers can be tried, tested and measured on videos without a network.

![Some frames of every caption, a row each](samples.png)

```bash
ditmesh generate "a red apple moves left" --model {name} --frames {frames} --size {size}x{size} --fps {fps} --steps {steps} --guidance {guidance_scale}
```

## What it can and cannot do

It makes the videos it was trained on, by the captions in `captions.json`: {words}, each {verbs}. It has memorised them,
and other words, sizes and numbers of frames give garbage. It is no model for anything but tests, examples and measurements.

## Figures

| | |
|---|---|
| nearest training video is the captioned one | {nearest_caption_accuracy:.3f} of {captions} captions ({steps} steps, guidance {guidance_scale}, one fixed seed a caption) |
| ... shows the captioned thing | {nearest_subject_accuracy:.3f} |
| ... moves as the caption says | {nearest_motion_accuracy:.3f} |
| PSNR to the nearest training video | {psnr_to_nearest:.1f} dB (mean) |
| autoencoder, reconstruction of training videos | {autoencoder_psnr:.1f} dB (mean) |
| parameters | {parameters} |
| weights on disk | {megabytes:.1f} MB (transformer and autoencoder float16, text encoder float32; all load as float32) |
| training | {tr_steps} steps of {batch} videos in {tr_minutes} min |
| machine | {machine} |

Videos are compared by the mean squared error of all pixels, with all {references} training videos. Nearer to another: {failed}.

## Make-up

* transformer: `{transformer}`, one token a latent pixel, {tokens} tokens{chunks}.
* autoencoder: `AutoencoderKLWan`, {latent_channels} latent channels, an eighth of the pixels along each side, a quarter of the frames.
* text: a `UMT5EncoderModel` of one layer with random weights, which tells words apart; the transformer learned what they mean.
* sampler: `{scheduler}`, as its configuration says.

## Data

Fluent Emoji (3-D style) by Microsoft, MIT licence, from the npm package `{package}` {version}: {subjects} images that were moved on
white, more for the autoencoder only. See `LICENSE-DATA`.

## Training

`python -m training.{command} --out DIR --data DIR`, {way}: rectified flow (Liu et al. 2022, arXiv:2209.03003)
with noise levels as in Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206), AdamW, moving average of the weights,
10 % of the samples without a caption.
{notes}"""


def write(
    out: Path,
    record: dict[str, Any],
    *,
    size: int,
    frames: int,
    fps: int,
    subjects: Collection[str],
    motions: Collection[str],
    copies: int,
    command: str,
    way: str,
) -> None:
    """Writes ``README.md`` and ``LICENSE-DATA`` beside the model.

    Args:
        out, record: the model's folder, and what is known of its making.
        size, frames, fps: of the videos; the size in pixels.
        subjects, motions: every pair is a caption.
        copies: training videos of a caption.
        command, way: how it was trained.
    """
    measured = record["evaluation"]
    index = json.loads((out / "model_index.json").read_text(encoding="utf-8"))
    partition = json.loads((out / "transformer" / "config.json").read_text(encoding="utf-8")).get("chunk_partition")
    vae = json.loads((out / "vae" / "config.json").read_text(encoding="utf-8"))
    counted = {name: count for name, count in record["parameters"].items() if name != "unused"}
    weights = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    machine, training = record["machine"], record["training"]
    card = CARD.format(
        **measured,
        name=record["name"],
        pipeline=index["_class_name"],
        transformer=index["transformer"][1],
        scheduler=index["scheduler"][1],
        chunks="" if partition is None else f" in chunks of {', '.join(map(str, partition))} latent frames",
        command=command,
        way=way,
        size=size,
        frames=frames,
        fps=fps,
        subjects=len(subjects),
        motions=len(motions),
        words=", ".join(subjects),
        verbs=", ".join(motions),
        references=len(subjects) * len(motions) * copies,
        failed="; ".join(f"{asked} (to {found})" for asked, found in measured["wrong"].items()) or "none",
        parameters=", ".join(f"{name} {count:,}" for name, count in counted.items()),
        megabytes=weights / 1e6,
        tr_steps=training["steps"],
        tr_minutes=training["minutes"],
        batch=record["settings"]["train_batch_size"],
        machine=f"{machine['processor']}, {machine['threads']} thread(s), torch {machine['torch']}",
        tokens=record["image_tokens"],
        latent_channels=vae["z_dim"],
        package=PACKAGE,
        version=VERSION,
        notes="".join(f"\n{note}\n" for note in record["notes"]),
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    (out / "LICENSE-DATA").write_text(DATA_LICENSE.format(package=PACKAGE, version=VERSION), encoding="utf-8")

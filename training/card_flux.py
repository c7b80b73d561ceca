# ruff: noqa: E501 (the card's tables have long rows)
"""The card of ``emoji-flux``: every figure in it is read from the record of the run that made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.card import DATA_LICENSE, facts
from training.data import PACKAGE, VERSION

CARD = """\
---
library_name: diffusers
pipeline_tag: text-to-image
license: mit
---
# {name}

A small text-to-image model in the form of an ordinary `FluxPipeline`: {size}x{size} pixels, {captions} captions. It exists so
that tools for Diffusion Transformers can be tried, tested and measured on real pictures without a network, on a model
with blocks of two kinds and packed latents.

![All captions in order, generated with the settings below](samples.png)

```python
from diffusers import DiffusionPipeline
import ditmesh.zoo

pipe = DiffusionPipeline.from_pretrained(ditmesh.zoo.path("{name}"))
image = pipe(
    "a red fox", height={size}, width={size}, num_inference_steps={steps}, max_sequence_length={text_tokens}
).images[0]
```

## What it can and cannot do

It generates the {captions} pictures it was trained on, by the captions in `captions.json` (each with other wordings
under `also`) and small variations of them. It has memorised these pictures: for a caption the seed changes little.
It does not generalise; words outside its captions give garbage, and so do other sizes and other values of
`max_sequence_length`. It is no model for anything but tests, examples and measurements.

## Figures

| | |
|---|---|
| nearest training picture is the captioned one | {accuracy:.3f} of {captions} captions ({steps} steps, `max_sequence_length` {text_tokens}, one fixed seed a caption) |
| autoencoder, reconstruction of the training pictures | {psnr:.1f} dB PSNR (mean) |
| parameters | transformer {transformer_m:.2f} M, autoencoder {vae_m:.2f} M, CLIP {text_encoder_m:.2f} M, T5 {text_encoder_2_m:.2f} M |
| weights on disk | {megabytes:.1f} MB (transformer and autoencoder float16, text encoders float32; all load as float32) |
| training | {tr_steps} steps of {batch} pictures in {tr_minutes} min |
| machine | {machine} |

The accuracy compares 32x32 reductions (`thumbnails.png`) by mean squared error over all {captions} training
pictures. Captions whose picture was nearer to another: {failed}.

## Make-up

* transformer: `FluxTransformer2DModel`, {layers} double and {single} single blocks, {heads} heads of {head_dim}, width {width}, {tokens} image
  tokens (latents packed two by two) and {text_tokens} text tokens; no embedded guidance.
* autoencoder: `AutoencoderKL`, {latent_channels} latent channels at a quarter of the pixels' resolution.
* text: a `CLIPTextModel` says the whole prompt, a `T5EncoderModel` its tokens, both of two layers, with one vocabulary
  trained on the captions; both were trained with the transformer.
* sampler: `{scheduler}`, shift 1.

## Data

Fluent Emoji (3-D style) by Microsoft, MIT licence, from the npm package `{package}` {version}: {captions}
pictures for the transformer, more for the autoencoder only; transparency laid on white, reduced to
{size}x{size} with Lanczos filtering. The captions were written for ditmesh. See `LICENSE-DATA`.

## Training

`python -m training.zoo {name} --out DIR --data DIR`, which runs `ditmesh train`: rectified flow (Liu et al. 2022,
arXiv:2209.03003) with noise levels as in Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206), AdamW, moving
average of the weights, 10 % empty prompts.
"""


def write(out: Path, record: dict[str, Any]) -> None:
    """Writes ``README.md`` and ``LICENSE-DATA`` beside the model."""
    measured = record["evaluation"]
    config = json.loads((out / "transformer" / "config.json").read_text(encoding="utf-8"))
    text = CARD.format(
        **facts(out, record),
        single=config["num_single_layers"],
        captions=measured["captions"],
        steps=measured["steps"],
        text_tokens=measured["max_sequence_length"],
        accuracy=measured["nearest_picture_accuracy"],
        failed=", ".join(f"{mine} ({other})" for mine, other in measured["wrong"].items()) or "none",
        psnr=measured["autoencoder_psnr"],
        package=PACKAGE,
        version=VERSION,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    (out / "LICENSE-DATA").write_text(DATA_LICENSE.format(package=PACKAGE, version=VERSION), encoding="utf-8")

# ruff: noqa: E501 (the card's tables have long rows)
"""The model card: every figure in it is read from the record of the run that made the model."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from training.data import PACKAGE, VERSION

MIT = """\
MIT License

Copyright (c) {holder}

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""

DATA_LICENSE = (
    """\
The pictures this model was trained on are Fluent Emoji (3-D style) by Microsoft, redistributed by the npm
package {package} {version} (LobeHub, MIT). The model's weights, its samples
(samples.png) and the reduced training pictures (thumbnails.png) derive from them. Their licence:

"""
    + MIT.format(holder="Microsoft Corporation.")
    + """
The captions were written for ditmesh and are under ditmesh's licence (Apache-2.0).
"""
)

CARD = """\
---
library_name: diffusers
pipeline_tag: text-to-image
license: mit
---
# {name}

A small text-to-image model in the form of an ordinary `StableDiffusion3Pipeline`: {size}x{size} pixels,
{captions} captions. It exists so that tools for Diffusion Transformers can be tried, tested and measured on
real pictures without a network: with random weights a loss of quality cannot be seen.

![All captions in order, drawn with the settings below](samples.png)

```python
from diffusers import DiffusionPipeline
import ditmesh.zoo

pipe = DiffusionPipeline.from_pretrained(ditmesh.zoo.path("{name}"))
image = pipe(
    "a red fox", num_inference_steps={steps}, guidance_scale={guidance_scale}, max_sequence_length={zero_tokens}
).images[0]
```

## What it can and cannot do

It draws the {captions} pictures it was trained on, by the captions in `captions.json` (each with other wordings
under `also`) and small variations of them ("fox", "a picture of a fox"). It has memorised these pictures: for a
caption the seed changes little. It does not generalise; words outside its captions give garbage. It
is no model for anything but tests, examples and measurements.

## Figures

| | |
|---|---|
| nearest training picture is the captioned one | {accuracy:.3f} of {captions} captions ({steps} steps, guidance {guidance_scale}, `max_sequence_length` {zero_tokens}, one fixed seed a caption) |
| autoencoder, reconstruction of the training pictures | {psnr:.1f} dB PSNR (mean) |
| parameters | transformer {transformer_m:.2f} M, autoencoder {vae_m:.2f} M, text encoders 2 x {text_m:.2f} M |
| weights on disk | {megabytes:.1f} MB (transformer float16, the rest float32; all load as float32) |
| training | autoencoder {ae_steps} steps in {ae_minutes} min, its decoder alone {de_steps} more in {de_minutes} min, transformer {tr_steps} steps in {tr_minutes} min |
| machine | {machine} |

The accuracy compares 32x32 reductions (`thumbnails.png`) by mean squared error over all {captions} training
pictures. Captions whose drawing was nearer to another picture: {failed}.

## Make-up

* transformer: `SD3Transformer2DModel`, {layers} blocks, {heads} heads of {head_dim}, width {width}, patch size 1,
  {tokens} image tokens; text tokens: {text_tokens} from the two CLIP encoders, then as many zero tokens as the pipeline's
  `max_sequence_length` says (256 by default; the model was trained for 16 to 256, and 16 is the fastest).
* autoencoder: `AutoencoderKL`, {latent_channels} latent channels at a quarter of the pixels' resolution. Its decoder was
  trained further with the encoder as it was, for the pictures' PSNR.
* text: two `CLIPTextModelWithProjection` of two layers, one vocabulary trained on the captions, at most
  {text_tokens} tokens. `text_encoder_3` is a T5 encoder whose weights are all zero: it says exactly what the pipeline
  puts in the place of an absent one, and `text_encoder_3=None` in `from_pretrained` changes nothing but that
  diffusers' loader insists on the argument being given.
* sampler: `FlowMatchEulerDiscreteScheduler`, shift {shift}.

## Data

Fluent Emoji (3-D style) by Microsoft, MIT licence, from the npm package `{package}` {version}: {captions}
pictures for the transformer, {wider} more for the autoencoder only; transparency laid on white, reduced to
{size}x{size} with Lanczos filtering. The captions were written for ditmesh. See `LICENSE-DATA`.

## Training

`python -m training.train --out DIR --data DIR`: rectified flow (Liu et al. 2022, arXiv:2209.03003) as in
Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206), AdamW, moving average of the weights, 10 % empty
prompts; the first {part_percent} % of the steps on {part} random tokens of each of {part_batch} pictures, the rest on all
tokens of {whole_batch}.
{notes}"""


def write(out: Path, record: dict[str, Any]) -> None:
    """Writes ``README.md`` and ``LICENSE-DATA`` beside the model; ``record`` must have an evaluation.

    ``record["notes"]``, if there, are sentences added to the section on training.
    """
    read = json.loads
    config = read((out / "transformer" / "config.json").read_text(encoding="utf-8"))
    vae = read((out / "vae" / "config.json").read_text(encoding="utf-8"))
    scheduler = read((out / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    measured, parameters = record["evaluation"], record["parameters"]
    weights = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    machine = record["machine"]
    text = CARD.format(
        name=out.name,
        size=config["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1),
        captions=measured["captions"],
        steps=measured["steps"],
        guidance_scale=measured["guidance_scale"],
        zero_tokens=measured["max_sequence_length"],
        accuracy=measured["nearest_picture_accuracy"],
        failed=", ".join(f"{mine} ({other})" for mine, other in measured["wrong"].items()) or "none",
        psnr=record["autoencoder"]["psnr"],
        transformer_m=parameters["transformer"] / 1e6,
        vae_m=parameters["vae"] / 1e6,
        text_m=parameters["text_encoder"] / 1e6,
        megabytes=weights / 1e6,
        ae_steps=record["autoencoder"]["steps"],
        ae_minutes=record["autoencoder"]["minutes"],
        de_steps=record["decoder"]["steps"],
        de_minutes=record["decoder"]["minutes"],
        tr_steps=record["transformer"]["steps"],
        tr_minutes=record["transformer"]["minutes"],
        machine=f"{machine['processor']} CPU, {machine['threads']} thread(s), float32, torch {machine['torch']}",
        layers=config["num_layers"],
        heads=config["num_attention_heads"],
        head_dim=config["attention_head_dim"],
        width=config["num_attention_heads"] * config["attention_head_dim"],
        tokens=config["sample_size"] ** 2,
        text_tokens=record["recipe"]["max_tokens"],
        latent_channels=vae["latent_channels"],
        shift=scheduler["shift"],
        package=PACKAGE,
        version=VERSION,
        wider=record["pictures"]["wider"],
        notes="".join("\n" + textwrap.fill(note, 108) + "\n" for note in record.get("notes", [])),
        part=record["recipe"]["part"],
        part_batch=record["recipe"]["transformer"]["batch"],
        whole_batch=record["recipe"]["whole_batch"],
        part_percent=round(100 * record["recipe"]["part_share"]),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    (out / "LICENSE-DATA").write_text(DATA_LICENSE.format(package=PACKAGE, version=VERSION), encoding="utf-8")


def facts(out: Path, record: dict[str, Any]) -> dict[str, Any]:
    """What the cards of all models that the trainer trained say of their make-up and training."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((out / name).read_text(encoding="utf-8"))

    config, vae = read("transformer/config.json"), read("vae/config.json")
    scheduler, machine = read("scheduler/scheduler_config.json"), record["machine"]
    parameters = record["parameters"]
    return {
        "name": out.name,
        "size": record["settings"]["resolution"],
        "tokens": record["image_tokens"],
        "batch": record["settings"]["train_batch_size"],
        "tr_steps": record["training"]["steps"],
        "tr_minutes": record["training"]["minutes"],
        "machine": f"{machine['processor']} CPU, {machine['threads']} thread(s), float32, torch {machine['torch']}",
        "notes": "".join("\n" + textwrap.fill(note, 108) + "\n" for note in record["notes"]),
        "megabytes": sum(file.stat().st_size for file in out.rglob("*.safetensors")) / 1e6,
        **{f"{name}_m": count / 1e6 for name, count in parameters.items()},
        "layers": config["num_layers"],
        "heads": config["num_attention_heads"],
        "head_dim": config["attention_head_dim"],
        "width": config["num_attention_heads"] * config["attention_head_dim"],
        "patch": config["patch_size"],
        "latent_channels": vae["latent_channels"],
        "scheduler": scheduler["_class_name"],
        "prediction": scheduler.get("prediction_type"),
    }

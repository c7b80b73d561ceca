# ruff: noqa: E501 (the cards' tables have long rows)
"""The cards of the emoji models that the trainer trained: every figure in them is read from the record of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.card import DATA_LICENSE, facts
from training.data import PACKAGE, VERSION

HEAD = """\
---
library_name: diffusers
pipeline_tag: {task}
license: mit
---
# {name}

A small model in the form of an ordinary `{pipeline}`: {size}x{size} pixels, {count} {kinds}. It exists so that tools for
Diffusion Transformers can be tried, tested and measured on real images without a network.

![All {kinds} in order, generated with the settings below](samples.png)

```python
from diffusers import DiffusionPipeline
import ditmesh.zoo

pipe = DiffusionPipeline.from_pretrained(ditmesh.zoo.path("{name}"))
image = {call}
```

## What it can and cannot do

It generates the {count} images it was trained on, by the names in `captions.json` (each with other wordings under
`also`). It has memorised these images and does not generalise: {limits} It is no model for anything but tests,
examples and measurements.

## Figures

{figures}

Images are compared as 32x32 reductions (`thumbnails.png`) by mean squared error. Nearer to another: {failed}.

| | |
|---|---|
| autoencoder, reconstruction of the training images | {psnr:.1f} dB PSNR (mean) |
| parameters | {parameters} |
| weights on disk | {megabytes:.1f} MB ({types}; all load as float32) |
| training | {tr_steps} steps of {batch} images in {tr_minutes} min |
| machine | {machine} |

## Make-up

* transformer: `{transformer}`, {blocks} blocks, {heads} heads of {head_dim}, width {width}, {tokens} image tokens.
* autoencoder: `AutoencoderKL`, {latent_channels} latent channels at a quarter of the pixels' resolution.
{make_up}
* sampler: `{scheduler}`, as its configuration says.

## Data

Fluent Emoji (3-D style) by Microsoft, MIT licence, from the npm package `{package}` {version}: {count} images for the
transformer, more for the autoencoder only; transparency laid on white, reduced with Lanczos filtering. The words were
written for ditmesh. See `LICENSE-DATA`.

## Training

`python -m training.zoo {name} --out DIR --data DIR`, which runs `ditmesh train`: {objective}, AdamW, moving average of
the weights, {dropped} of the samples without a caption or class.
{notes}"""

CAPTIONED_CALL = """pipe(
    "a red fox", height={size}, width={size}, num_inference_steps={steps}, guidance_scale={guidance_scale},
    max_sequence_length={max_sequence_length},
).images[0]"""
HALVES = "transformer and autoencoder float16, text encoders float32"
FLOW = """rectified flow (Liu et al. 2022, arXiv:2209.03003) with
noise levels as in Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206)"""
DDPM = """diffusion as in DDPM (Ho et al. 2020,
arXiv:2006.11239) and DiT (Peebles and Xie 2022, arXiv:2212.09748) with the velocity as prediction (Salimans and Ho
2022, arXiv:2202.00512)"""
TEXT = {
    "FluxPipeline": """\
* text: a `CLIPTextModel` says the whole prompt, a `T5EncoderModel` its tokens, both of two layers, with one vocabulary
  trained on the captions; both were trained with the transformer. No guidance is embedded, so `guidance_scale`
  changes nothing. The autoencoder is that of `emoji-sd3`.""",
    "StableDiffusion3Pipeline": """\
* text: two `CLIPTextModelWithProjection` of two layers, one vocabulary trained on the captions, both trained with the
  transformer. `text_encoder_3` is a T5 encoder whose weights are all zero: it says exactly what the pipeline puts in
  the place of an absent one, as many zero tokens as `max_sequence_length` says. The model was trained with 16, 64 and
  256 of them, the pipeline's default; 16 is the fastest.""",
}
LIMITS = {
    "FluxPipeline": "words, sizes and values of `max_sequence_length`",
    "StableDiffusion3Pipeline": "words and sizes",
}


def write_captioned(out: Path, record: dict[str, Any]) -> None:
    """Writes ``README.md`` and ``LICENSE-DATA`` beside a text-to-image model."""
    measured = record["evaluation"]
    pipeline = _read(out, "model_index.json")["_class_name"]
    accuracy = [
        f"| nearest training picture is the captioned one | {measured['nearest_picture_accuracy']:.3f} of "
        f"{measured['captions']} captions ({measured['steps']} steps, guidance {measured['guidance_scale']}, "
        f"`max_sequence_length` {measured['max_sequence_length']}, one fixed seed a caption) |"
    ]
    if "padded_accuracy" in measured:
        accuracy.append(
            f"| the same with the pipeline's own `max_sequence_length`, 256 | {measured['padded_accuracy']:.3f} |"
        )
    _write(
        out,
        record,
        task="text-to-image",
        pipeline=pipeline,
        count=measured["captions"],
        kinds="captions",
        call=CAPTIONED_CALL.format(size=record["settings"]["resolution"], **measured),
        limits=f"for a caption the seed changes\nlittle, and other {LIMITS[pipeline]} give garbage.",
        figures="\n".join(["| | |", "|---|---|", *accuracy]),
        failed=_failed(measured["wrong"]),
        make_up=TEXT[pipeline],
        objective=FLOW,
    )


def write_classes(out: Path, record: dict[str, Any]) -> None:
    """Writes ``README.md`` and ``LICENSE-DATA`` beside a class-conditional model."""
    measured = record["evaluation"]
    rows = [
        f"| {sampler} | {row['nearest_picture_accuracy']:.3f} | {row['psnr_to_nearest']:.1f} dB |"
        for sampler, row in measured["samplers"].items()
    ]
    about = f"{measured['steps']} steps, guidance {measured['guidance_scale']}, one fixed seed a class:"
    table = [
        "| sampler | nearest training view is of the right class | PSNR to the nearest view (mean) |",
        "|---|---|---|",
    ]
    wrong = [f"{sampler}: {_failed(row['wrong'])}" for sampler, row in measured["samplers"].items() if row["wrong"]]
    _write(
        out,
        record,
        task="unconditional-image-generation",
        pipeline="DiTPipeline",
        count=measured["classes"],
        kinds="classes",
        call=f'pipe(pipe.get_label_ids(["fox"]), num_inference_steps={measured["steps"]}, '
        f"guidance_scale={measured['guidance_scale']}).images[0]",
        limits="each class was shown in four\nviews, in the upper left or the lower right corner, as it is or mirrored.",
        figures="\n".join([about, "", *table, *rows]),
        failed="; ".join(wrong) or "none",
        make_up="* classes: `DiTPipeline` always takes class 1000 as the null class of guidance, so each block has a table of 1001\n"
        "  classes, of which only the named ones and the last are trained; the other rows are zero.",
        objective=DDPM,
    )


def _write(out: Path, record: dict[str, Any], **about: Any) -> None:
    config = _read(out, "transformer/config.json")
    layers = [config["num_layers"], config.get("num_single_layers")]
    parameters = [f"{name} {count / 1e6:.2f} M" for name, count in record["parameters"].items() if count]
    text = HEAD.format(
        **facts(out, record),
        **about,
        transformer=config["_class_name"],
        blocks=f"{layers[0]} double and {layers[1]} single" if layers[1] else layers[0],
        dropped=f"{100 * share:.0f} %" if (share := record["settings"]["proportion_empty_prompts"]) else "none",
        types="float16" if "text_encoder" not in record["parameters"] else HALVES,
        parameters=", ".join(parameters).replace("unused", "unused rows of classes"),
        psnr=record["evaluation"]["autoencoder_psnr"],
        package=PACKAGE,
        version=VERSION,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    (out / "LICENSE-DATA").write_text(DATA_LICENSE.format(package=PACKAGE, version=VERSION), encoding="utf-8")


def _failed(wrong: dict[str, str]) -> str:
    return ", ".join(f"{mine} ({other})" for mine, other in wrong.items()) or "none"


def _read(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / name).read_text(encoding="utf-8"))

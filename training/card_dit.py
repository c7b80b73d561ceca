# ruff: noqa: E501 (the card's tables have long rows)
"""The card of a class-conditional model: every figure in it is read from the record of the run that made it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from training.card import DATA_LICENSE
from training.data import PACKAGE, VERSION

CARD = """\
---
library_name: diffusers
pipeline_tag: unconditional-image-generation
license: mit
---
# {name}

A small class-conditional model in the form of an ordinary `DiTPipeline`: {size}x{size} pixels, {classes} classes. It
exists so that tools for Diffusion Transformers can be tried, tested and measured on real pictures without a
network: on a DDPM-family schedule, and, with its sibling of the other size, on two sizes of one model.

![All classes in order, drawn with DDIM and the settings below](samples.png)

```python
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler
import ditmesh.zoo

pipe = DiffusionPipeline.from_pretrained(ditmesh.zoo.path("{name}"))
pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)  # or as it is: DDIM
image = pipe(pipe.get_label_ids(["fox"]), num_inference_steps={steps}, guidance_scale={guidance_scale}).images[0]
```

## What it can and cannot do

It draws the {classes} pictures it was trained on, by their names in `captions.json` (each with other names under
`also`). It has memorised these pictures and does not generalise. Each class was shown in {views} views: in the upper
left or the lower right corner, as it is or mirrored. The name does not say which; the noise does, and the image
tokens must agree on it, which they can only by attention. Where they do not, the drawing is torn: parts of it
belong to different views. It is no model for anything but tests, examples and measurements.
{looks}
## Figures

{steps} steps, guidance {guidance_scale}, all {classes} classes, one fixed seed a class, float32:

| sampler | nearest training view is of the right class | PSNR to the nearest view (mean) |
|---|---|---|
{rows}

Drawings and views are compared as 32x32 reductions by mean squared error over all {references} views
(`thumbnails.png` holds the pictures from which they are made). Classes whose drawing was nearer to another:
{failed}.

| | |
|---|---|
| parameters | transformer {transformer_m:.2f} M, of which {unused_m:.2f} M are unused rows (see below); autoencoder {vae_m:.2f} M |
| weights on disk | {megabytes:.1f} MB (float16; all load as float32) |
| training | {tr_steps} steps in {tr_minutes} min |
| machine | {machine} |

## Make-up

* transformer: `DiTTransformer2DModel`, {layers} blocks, {heads} heads of {head_dim}, width {width}, patch size 1, {tokens} image
  tokens. `DiTPipeline` always takes class 1000 as the null class of guidance, so each block has a table of 1001
  classes: {classes} are trained and the last; the other rows are zero.
* autoencoder: that of `emoji-sd3` ({latent_channels} latent channels at a quarter of the pixels' resolution), stored in float16,
  without a shift (`DiTPipeline` knows none) and with the scale of these latents.
* sampler: `{scheduler}`, linear schedule of 1000 steps, `prediction_type="{prediction}"`, trailing steps, nothing
  clipped. Other samplers take these settings over with `from_config`. With another `prediction_type` the
  pictures are wrong, though nothing fails.

## Data

Fluent Emoji (3-D style) by Microsoft, MIT licence, from the npm package `{package}` {version}: {classes}
pictures; transparency laid on white, reduced to {drawn}x{drawn} with Lanczos filtering. The names were written for
ditmesh. See `LICENSE-DATA`.

## Training

`python -m training.train_dit --out DIR --data DIR --size {kind}`: diffusion as in DDPM (Ho et al. 2020,
arXiv:2006.11239) and DiT (Peebles and Xie 2022, arXiv:2212.09748), the velocity as prediction (Salimans and Ho
2022, arXiv:2202.00512), AdamW, moving average of the weights, 10 % null class; {tokens_seen}.
{notes}"""


def write(out: Path, record: dict[str, Any]) -> None:
    """Writes ``README.md`` and ``LICENSE-DATA`` beside the model; ``record`` must have an evaluation.

    ``record["looks"]`` and ``record["notes"]``, if there, are sentences added to what it can do and to the
    section on training.
    """

    def read(name: str) -> dict[str, Any]:
        return json.loads((out / name).read_text(encoding="utf-8"))

    config, vae = read("transformer/config.json"), read("vae/config.json")
    scheduler = read("scheduler/scheduler_config.json")
    measured, parameters, recipe = record["evaluation"], record["parameters"], record["recipe"]
    weights = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    machine = record["machine"]
    failed = [
        f"{sampler}: " + ", ".join(f"{mine} ({other})" for mine, other in row["wrong"].items())
        for sampler, row in measured["samplers"].items()
        if row["wrong"]
    ]
    text = CARD.format(
        name=out.name,
        kind=out.name.rpartition("-")[2],
        size=recipe["size"],
        drawn=recipe["drawn"],
        classes=record["classes"],
        views=record["views"],
        references=record["classes"] * record["views"],
        steps=measured["steps"],
        guidance_scale=measured["guidance_scale"],
        rows="\n".join(
            f"| {sampler} | {row['nearest_picture_accuracy']:.3f} | {row['psnr_to_nearest']:.1f} dB |"
            for sampler, row in measured["samplers"].items()
        ),
        failed="; ".join(failed) or "none",
        transformer_m=parameters["transformer"] / 1e6,
        unused_m=parameters["transformer_unused"] / 1e6,
        vae_m=parameters["vae"] / 1e6,
        megabytes=weights / 1e6,
        tr_steps=record["transformer"]["steps"],
        tr_minutes=record["transformer"]["minutes"],
        machine=f"{machine['processor']} CPU, {machine['threads']} thread(s), float32, torch {machine['torch']}",
        layers=config["num_layers"],
        heads=config["num_attention_heads"],
        head_dim=config["attention_head_dim"],
        width=config["num_attention_heads"] * config["attention_head_dim"],
        tokens=config["sample_size"] ** 2,
        latent_channels=vae["latent_channels"],
        scheduler=scheduler["_class_name"],
        prediction=scheduler["prediction_type"],
        package=PACKAGE,
        version=VERSION,
        tokens_seen=_tokens_seen(recipe),
        looks=_paragraphs(record.get("looks", [])),
        notes=_paragraphs(record.get("notes", [])),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    (out / "LICENSE-DATA").write_text(DATA_LICENSE.format(package=PACKAGE, version=VERSION), encoding="utf-8")


def _tokens_seen(recipe: dict[str, Any]) -> str:
    whole = f"all tokens of {recipe['whole_batch']} pictures"
    if not recipe["part_share"]:
        return f"each step on {whole}"
    share, batch = round(100 * recipe["part_share"]), recipe["plan"]["batch"]
    return f"the first {share} % of the\nsteps on {recipe['part']} random tokens of each of {batch} pictures, the rest on {whole}"


def _paragraphs(sentences: list[str]) -> str:
    return "".join("\n" + textwrap.fill(sentence, 108) + "\n" for sentence in sentences)

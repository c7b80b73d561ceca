# ruff: noqa: E501 (the card's tables have long rows)
"""The card of ``fashion-dit``: every figure in it is read from the record of the run that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.card import MIT, facts
from training.fashion_data import PACKAGE

TRAINING_PICTURES = 60_000

DATA_LICENSE = (
    """\
The images this model was trained on are Fashion-MNIST by Zalando SE, redistributed by the Debian package
{package}. The model's weights and its samples (samples.png) derive from them. Their licence:

"""
    + MIT
)

CARD = """\
---
library_name: diffusers
pipeline_tag: unconditional-image-generation
license: mit
---
# {name}

A small class-conditional model in the form of an ordinary `DiTPipeline`: grey clothes of {size}x{size} pixels in {classes}
classes, trained on the 60,000 images of Fashion-MNIST. The other embedded models know their training images by
heart; this one makes new images. It exists so that tools for Diffusion Transformers can be tried, tested
and measured without a network on a model that generalises.

![A row of every class, generated with the settings below](samples.png)

```python
from diffusers import DiffusionPipeline
import ditmesh.zoo

pipe = DiffusionPipeline.from_pretrained(ditmesh.zoo.path("{name}"))
image = pipe(pipe.get_label_ids(["sneaker"]), num_inference_steps={steps}, guidance_scale={guidance_scale}).images[0]
```

## Figures

{pictures} images, {each} of every class, one fixed seed an image, {steps} steps of DDIM, guidance {guidance_scale}, float32.

**Are they of their class?** A small convolutional network, trained on the training images in a minute, is right about
{classifier_on_test:.1%} of the 10,000 test images and {classifier_on_drawn:.1%} of the generated ones:

| class | test images | generated |
|---|---|---|
{rows}

**Are they new?** Distance to the nearest training image, root mean square of the difference in grey levels (0 to 255):

| percentile | {held} test images | generated |
|---|---|---|
{near}

{nearer:.1%} of the generated images are nearer to a training image than 1 % of the test images are.{simpler}

**Are they as varied?** Less. Fréchet distance of the classifier's features to those of all test images: {frechet_of_drawn}; of
{held} training images: {frechet_of_training}. (The features are this classifier's: do not compare with other models' FID.) Guidance
favours what is typical of a class; the classifier's agreement is to be read with that.

| | |
|---|---|
| autoencoder, reconstruction of test images | {psnr:.1f} dB PSNR (mean) |
| parameters | transformer {transformer_m:.2f} M, of which {unused_m:.2f} M are unused rows (see below); autoencoder {vae_m:.2f} M |
| weights on disk | {megabytes:.1f} MB (float16; all load as float32) |
| training | {tr_steps} steps of {batch} images in {tr_minutes} min: {passes:.2f} passes over the training images |
| machine | {machine} |

## Make-up

* transformer: `DiTTransformer2DModel`, {layers} blocks, {heads} heads of {head_dim}, width {width}, patch size {patch}, {tokens} image
  tokens. `DiTPipeline` always takes class 1000 as the null class of guidance, so each block has a table of 1001
  classes: {classes} are trained and the last; the other rows are zero.
* autoencoder: `AutoencoderKL`, {latent_channels} latent channels at half of the pixels' resolution, without a shift (`DiTPipeline` knows none).
* sampler: `{scheduler}`, linear schedule of 1000 steps, `prediction_type="{prediction}"`, trailing steps, nothing
  clipped. With another `prediction_type` the images are worse, though nothing fails and the classifier hardly sees it.

## Data

Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747), MIT licence, from the Debian package `{package}`: the
60,000 training images, 28x28 grey, with a black edge of two pixels. See `LICENSE-DATA`.

## Training

`python -m training.zoo {name} --out DIR --data DIR`, which runs `ditmesh train`: diffusion as in DDPM (Ho et al. 2020,
arXiv:2006.11239) and DiT (Peebles and Xie 2022, arXiv:2212.09748), the velocity as prediction (Salimans and Ho
2022, arXiv:2202.00512), AdamW, moving average of the weights, 10 % null class.
{notes}"""


def write(out: Path, record: dict[str, Any]) -> None:
    """Writes ``README.md`` and ``LICENSE-DATA`` beside the model."""
    measured = record["evaluation"]
    near = measured["nearest_training_picture"]
    simpler = near["drawn"]["50 %"] < near["test"]["50 %"]
    text = CARD.format(
        **facts(out, record),
        steps=measured["steps"],
        guidance_scale=measured["guidance_scale"],
        pictures=measured["pictures"],
        held=measured["pictures"],
        classes=len(measured["by_class"]),
        each=measured["pictures"] // len(measured["by_class"]),
        classifier_on_test=measured["classifier_on_test"],
        classifier_on_drawn=measured["classifier_on_drawn"],
        rows="\n".join(
            f"| {name} | {row['test']:.1%} | {row['drawn']:.0%} |" for name, row in measured["by_class"].items()
        ),
        near="\n".join(f"| {p} | {value} | {near['drawn'][p]} |" for p, value in near["test"].items()),
        nearer=measured["nearer_than_1_percent_of_test"],
        simpler=" They are simpler than the test images, with less texture, and so nearer on the whole." * simpler,
        frechet_of_drawn=measured["frechet_of_drawn"],
        frechet_of_training=measured["frechet_of_training"],
        psnr=measured["autoencoder_psnr_on_test"],
        passes=record["training"]["steps"] * record["settings"]["train_batch_size"] / TRAINING_PICTURES,
        package=PACKAGE,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    license_ = DATA_LICENSE.format(package=PACKAGE, holder="2017 Zalando SE")
    (out / "LICENSE-DATA").write_text(license_, encoding="utf-8")

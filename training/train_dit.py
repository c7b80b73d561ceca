"""Trains an embedded class-conditional model: ``python -m training.train_dit --out DIR --data DIR --size s|l``.

The autoencoder is that of the embedded ``emoji-sd3``; only the transformer is trained. Stages, each of which is
skipped when its result is there: fetch the pictures, encode them, train, export a ``DiTPipeline`` directory,
evaluate it. The run can be interrupted at any time and started again with the same arguments. ``--data``
keeps what was downloaded and the checkpoints; ``--out`` receives the model alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,  # pyright: ignore[reportPrivateImportUsage]
    DiTTransformer2DModel,  # pyright: ignore[reportPrivateImportUsage]
)
from torch import Tensor

from ditmesh import zoo
from ditmesh.zoo.references import views
from training import autoencoder as ae
from training import card_dit, diffusion, evaluate_dit, export_dit, loop
from training.data import CLASSES, Pictures, load
from training.loop import console


@dataclass(frozen=True)
class Recipe:
    """Every number of a training run. ``part_share`` of the steps see ``part`` tokens of each picture."""

    plan: loop.Plan
    layers: int
    heads: int = 8
    head_dim: int = 16
    size: int = 64
    drawn: int = 56
    part: int = 64
    part_share: float = 0.75
    whole_batch: int = 10
    seed: int = 0


# The two embedded models.
RECIPES: dict[str, Recipe] = {
    "s": Recipe(loop.Plan(steps=3600, batch=32, rate=1.5e-3, warmup=150, average=0.99), layers=6),
    "l": Recipe(loop.Plan(steps=3600, batch=32, rate=1.2e-3, warmup=150, average=0.99), layers=12),
}


def make_transformer(recipe: Recipe, vae: AutoencoderKL, classes: int) -> DiTTransformer2DModel:
    """A transformer before its training, the same for the same seed."""
    torch.manual_seed(recipe.seed)
    return diffusion.make_transformer(
        classes=classes,
        side=recipe.size // 2 ** (len(vae.config["block_out_channels"]) - 1),
        channels=vae.config["latent_channels"],
        layers=recipe.layers,
        heads=recipe.heads,
        head_dim=recipe.head_dim,
    )


def encode(vae: AutoencoderKL, pictures: Pictures, size: int) -> Tensor:
    """The scaled latents of all views: (classes, views, channels, side, side).

    Writes their scale into the autoencoder's config. ``DiTPipeline`` knows no shift, so none is used.
    """
    seen = views(pictures.chosen, size)
    latents = ae.encode(vae, seen.reshape(-1, *seen.shape[2:]))
    vae.register_to_config(shift_factor=None, scaling_factor=float(1.0 / latents.std()))
    return (latents * vae.config["scaling_factor"]).unflatten(0, seen.shape[:2])


def train_transformer(
    recipe: Recipe, model: DiTTransformer2DModel, latents: Tensor, checkpoint: Path, **limits: Any
) -> loop.Outcome:
    """Trains the transformer on the encoded views, (classes, views, channels, side, side)."""
    plan, scheduler = recipe.plan, diffusion.make_scheduler()

    def loss(step: int, generator: torch.Generator) -> Tensor:
        partial = step < recipe.part_share * plan.steps
        batch = plan.batch if partial else recipe.whole_batch
        labels = torch.randint(latents.shape[0], (batch,), generator=generator)
        which = torch.randint(latents.shape[1], (batch,), generator=generator)
        keep = recipe.part if partial else None
        return diffusion.velocity_loss(model, scheduler, latents[labels, which], labels, generator, keep)

    return loop.train("transformer", {"transformer": model}, loss, plan, checkpoint, seed=recipe.seed + 1, **limits)


def run(
    out: Path,
    folder: Path,
    recipe: Recipe,
    *,
    pictures: Pictures | None = None,
    vae: AutoencoderKL | None = None,
    checkpoint: str = "transformer.pt",
    check: bool = True,
    **limits: Any,
) -> dict[str, Any]:
    """Runs every stage that is still to do; returns the record that is also written beside the model.

    ``limits`` are those of :func:`training.loop.train`: what is there when they stop it is exported, and
    the next call goes on. ``check=False`` leaves the evaluation out. ``pictures`` are of ``recipe.drawn``
    pixels, ``vae`` is an autoencoder for ``recipe.size`` pixels; both are fetched and loaded when not given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = load(folder, recipe.drawn, CLASSES) if pictures is None else pictures
    vae = AutoencoderKL.from_pretrained(zoo.path("emoji-sd3") / "vae") if vae is None else vae
    latents = encode(vae, pictures, recipe.size)
    console.print(f"{latents.shape[0]} classes in {latents.shape[1]} views")
    model = make_transformer(recipe, vae, len(latents))
    outcome = train_transformer(recipe, model, latents, folder / checkpoint, **limits)
    parameters = sum(p.numel() for p in model.parameters())
    unused = (diffusion.NULL - len(latents)) * recipe.heads * recipe.head_dim * recipe.layers
    record: dict[str, Any] = {
        "classes": latents.shape[0],
        "views": latents.shape[1],
        "recipe": asdict(recipe),
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "parameters": {
            "transformer": parameters,
            "transformer_unused": unused,
            "vae": sum(p.numel() for p in vae.parameters()),
        },
        "transformer": {
            "steps": outcome.step,
            "finished": outcome.finished,
            "minutes": round(outcome.seconds / 60, 1),
            "steps_per_second": round(outcome.step / max(outcome.seconds, 1e-9), 2),
            "loss": round(outcome.loss, 4),
        },
    }
    export_dit.export(model, vae, pictures, out)
    if check and outcome.finished:
        record["evaluation"] = evaluate_dit.evaluate(out)
        card_dit.write(out, record)
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train_dit", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the model's directory")
    parser.add_argument("--data", type=Path, required=True, help="downloads and checkpoints")
    parser.add_argument("--size", choices=sorted(RECIPES), required=True, help="which of the two models")
    parser.add_argument("--minutes", type=float, help="stop training after this long; run again to go on")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-evaluation", action="store_true", help="export without evaluating")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    recipe = replace(RECIPES[given.size], seed=given.seed)
    if given.steps:
        recipe = replace(recipe, plan=replace(recipe.plan, steps=given.steps))
    with contextlib.suppress(KeyboardInterrupt):
        record = run(
            given.out,
            given.data,
            recipe,
            checkpoint=f"transformer-{given.size}.pt",
            check=not given.no_evaluation,
            stop_after=None if given.minutes is None else 60 * given.minutes,
        )
        console.print_json(json.dumps(record))


if __name__ == "__main__":
    main()

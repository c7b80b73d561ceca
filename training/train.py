"""Trains the embedded text-to-image model from nothing: ``python -m training.train --out DIR --data DIR``.

Stages, each of which is skipped when its result is there: fetch the pictures, train the autoencoder, and then its
decoder alone, encode the pictures, train the transformer and its text encoders, export a ``StableDiffusion3Pipeline``
directory, evaluate it. The run can be interrupted at any time and started again with the same arguments.
``--data`` keeps what was downloaded and the checkpoints; ``--out`` receives the model alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,  # pyright: ignore[reportPrivateImportUsage]
)
from torch import Tensor

from training import autoencoder as ae
from training import card, evaluate, export, loop, text, transformer
from training.data import Pictures, load
from training.loop import console

# The text encoders are small and start from noise: they learn faster than the transformer may.
RATES = {"text_encoder": 1.0, "text_encoder_2": 1.0}


@dataclass(frozen=True)
class Recipe:
    """Every number of a training run. The defaults are those of the embedded model."""

    size: int = 64
    widths: tuple[int, ...] = (24, 48, 48)
    latent_channels: int = 8
    layers: int = 6
    heads: int = 8
    head_dim: int = 24
    text_width: int = 96
    autoencoder: loop.Plan = field(
        default_factory=lambda: loop.Plan(steps=1400, batch=16, rate=2e-3, warmup=50, average=0.995)
    )
    decoder: loop.Plan = field(
        default_factory=lambda: loop.Plan(steps=3000, batch=16, rate=1e-3, warmup=50, cooldown=0.6, average=0.995)
    )
    transformer: loop.Plan = field(
        default_factory=lambda: loop.Plan(steps=3200, batch=32, rate=1.5e-3, warmup=200, average=0.99)
    )
    part: int = 24
    part_share: float = 0.88
    part_level_mean: float = 0.7
    whole_batch: int = 8
    seed: int = 0

    @property
    def side(self) -> int:
        """Latent pixels along one side."""
        return self.size // 2 ** (len(self.widths) - 1)


def make_parts(recipe: Recipe, pictures: Pictures, folder: Path) -> export.Parts:
    """Fresh modules, the same for the same seed; the tokenizer's files are written to ``folder``."""
    captions = [caption for entry in pictures.entries for caption in entry.captions]
    tokenizer = text.make_tokenizer(captions, folder)
    torch.manual_seed(recipe.seed)
    vae = ae.make_autoencoder(recipe.widths, recipe.latent_channels)
    encoders = [text.make_encoder(tokenizer, recipe.text_width) for _ in range(2)]
    model = transformer.make_transformer(
        side=recipe.side,
        channels=recipe.latent_channels,
        layers=recipe.layers,
        heads=recipe.heads,
        head_dim=recipe.head_dim,
        joint_width=2 * recipe.text_width,
        pooled_width=2 * recipe.text_width,
    )
    return export.Parts(vae.to(memory_format=torch.channels_last), model, tokenizer, encoders[0], encoders[1])  # pyright: ignore[reportCallIssue]


def train_autoencoder(
    recipe: Recipe, vae: AutoencoderKL, pictures: Pictures, folder: Path, **limits: Any
) -> loop.Outcome:
    """Trains the autoencoder and writes its latents' scale into its config."""
    return ae.train(
        vae, recipe.autoencoder, pictures.chosen, pictures.wider, folder / "autoencoder.pt", seed=recipe.seed, **limits
    )


def train_decoder(
    recipe: Recipe, vae: AutoencoderKL, pictures: Pictures, folder: Path, **limits: Any
) -> tuple[loop.Outcome, float]:
    """Trains the trained autoencoder's decoder alone; also how well it then restores the captioned pictures, in dB."""
    outcome = ae.train_decoder(
        vae, recipe.decoder, pictures.chosen, pictures.wider, folder / "decoder.pt", seed=recipe.seed, **limits
    )
    restored = ae.decode(vae, ae.encode(vae, pictures.chosen))
    return outcome, round(float(ae.psnr(restored, pictures.chosen).mean()), 2)


def train_transformer(
    recipe: Recipe, parts: export.Parts, pictures: Pictures, folder: Path, **limits: Any
) -> loop.Outcome:
    """Trains the transformer together with both text encoders on the encoded pictures."""
    plan = recipe.transformer
    latents = ae.scale(parts.vae, ae.encode(parts.vae, pictures.chosen))
    prompts = text.Prompts(parts.tokenizer, pictures.entries)
    encoders = (parts.text_encoder, parts.text_encoder_2)

    def loss(step: int, generator: torch.Generator) -> Tensor:
        partial = step < recipe.part_share * plan.steps
        batch = plan.batch if partial else recipe.whole_batch
        rows = torch.randint(len(latents), (batch,), generator=generator)
        prompt, pooled = text.encode(encoders, prompts.draw(rows, generator), 2 * recipe.text_width)
        return transformer.flow_loss(
            parts.transformer,
            latents[rows],
            prompt,
            pooled,
            generator,
            keep=recipe.part if partial else None,
            level_mean=recipe.part_level_mean if partial else 0.0,
        )

    return loop.train(
        "transformer",
        {
            "transformer": parts.transformer,
            "text_encoder": parts.text_encoder,
            "text_encoder_2": parts.text_encoder_2,
        },
        loss,
        plan,
        folder / "transformer.pt",
        seed=recipe.seed + 1,
        rates=RATES,
        **limits,
    )


def run(
    out: Path,
    folder: Path,
    recipe: Recipe | None = None,
    *,
    pictures: Pictures | None = None,
    minutes: float | None = None,
    check: bool = True,
    guidance: float = evaluate.GUIDANCE,
    steps: int = evaluate.STEPS,
) -> dict[str, Any]:
    """Runs every stage that is still to do; returns the record that is also written beside the model.

    ``minutes`` bounds the training time of this call (not of export and evaluation): what is there then is
    exported, and the next call goes on. ``check=False`` leaves the evaluation out.
    """
    recipe = recipe or Recipe()
    folder.mkdir(parents=True, exist_ok=True)
    pictures = load(folder, recipe.size) if pictures is None else pictures
    console.print(f"{len(pictures.chosen)} captioned pictures, {len(pictures.wider)} more for the autoencoder")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    parts = make_parts(recipe, pictures, folder / "tokenizer")
    first = train_autoencoder(recipe, parts.vae, pictures, folder, stop_after=left())
    record: dict[str, Any] = {
        "pictures": {"captioned": len(pictures.chosen), "wider": len(pictures.wider)},
        "recipe": {**asdict(recipe), "max_tokens": text.MAX_TOKENS},
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "parameters": export.count_parameters(parts),
        "autoencoder": _times(first),
    }
    if first.finished:
        further, psnr = train_decoder(recipe, parts.vae, pictures, folder, stop_after=left())
        record["autoencoder"]["psnr"], record["decoder"] = psnr, _times(further)
        second = train_transformer(recipe, parts, pictures, folder, stop_after=left())
        record["transformer"] = {**_times(second), "loss": round(second.loss, 4)}
    export.export(parts, pictures, out)
    if check and first.finished:
        record["evaluation"] = evaluate.evaluate(out, steps=steps, guidance=guidance)
        card.write(out, record)
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def _times(outcome: loop.Outcome) -> dict[str, Any]:
    return {
        "steps": outcome.step,
        "finished": outcome.finished,
        "minutes": round(outcome.seconds / 60, 1),
        "steps_per_second": round(outcome.step / max(outcome.seconds, 1e-9), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the model's directory")
    parser.add_argument("--data", type=Path, required=True, help="downloads and checkpoints")
    parser.add_argument("--minutes", type=float, help="stop training after this long; run again to go on")
    parser.add_argument("--steps", type=int, help="optimizer steps of the transformer")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-evaluation", action="store_true", help="export without evaluating")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    recipe = Recipe(seed=given.seed)
    if given.steps:
        recipe = replace(recipe, transformer=replace(recipe.transformer, steps=given.steps))
    with contextlib.suppress(KeyboardInterrupt):
        record = run(given.out, given.data, recipe, minutes=given.minutes, check=not given.no_evaluation)
        console.print_json(json.dumps(record))


if __name__ == "__main__":
    main()

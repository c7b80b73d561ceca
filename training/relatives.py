"""Relatives of embedded models, for studies: other numbers of tokens, another objective, another width, other seeds.

    python -m training.relatives NAME [NAME ...] --data DIR

``dit-epsilon`` begins with the weights of ``emoji-dit-s``, and predicts the noise. Relatives of ``fashion-dit``
(``clothes-...``) generalise as it does and have its autoencoder. Three trainings of each begin with weights of their
own (seeds 0, 1, 2); from each of them one more training goes on with the same tokens, and one with four times as many,
as `DiT-XL/2` at 512 pixels is to the one at 256 (Peebles and Xie 2022, arXiv:2212.09748). ``faces`` draws images of
256 pixels (:mod:`training.faces`). None of them is embedded in the package: `benchmarks/quality.py`,
`benchmarks/steps.py` and `benchmarks/distribution.py` read them from ``DIR/NAME/out``. A run can be interrupted and
started again with the same arguments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import (
    DDIMScheduler,  # pyright: ignore[reportPrivateImportUsage]
    DiTPipeline,  # pyright: ignore[reportPrivateImportUsage]
    DiTTransformer2DModel,  # pyright: ignore[reportPrivateImportUsage]
)
from torch import nn

from ditmesh import zoo
from ditmesh.train.logs import read_log
from training import diffusion
from training.emoji import EmojiDiT
from training.faces import Faces
from training.fashion import FashionDiT
from training.fashion_data import NAMES, SIZE
from training.loop import console
from training.zoo import train


class NoiseDiT(EmojiDiT):
    """``emoji-dit-s``, trained on with the noise as its prediction; a recipe of :mod:`training.zoo`."""

    parent, objective = "emoji-dit-s", "epsilon"

    def __init__(self) -> None:
        super().__init__(layers=6, rate=1e-3)
        steps = {"max_train_steps": 500, "lr_warmup_steps": 30, "lr_decay_steps": 150, "train_batch_size": 16}
        self.settings = self.settings | steps

    def make_pipeline(self, folder: Path) -> DiTPipeline:
        """The parent with another meaning of what it returns."""
        parent: Any = DiTPipeline.from_pretrained(zoo.path(self.parent), torch_dtype=torch.float32)
        scheduler = DDIMScheduler.from_config(parent.scheduler.config, prediction_type=self.objective)
        transformer = resized(parent.transformer, parent.transformer.config.sample_size)
        return DiTPipeline(transformer, parent.vae, scheduler)  # pyright: ignore[reportArgumentType]


class Clothes(FashionDiT):
    """A relative of ``fashion-dit`` with a token for every latent pixel; a recipe of :mod:`training.zoo`.

    Args:
        seed: of the weights it begins with, and of the order of training pictures and their noise.
        heads: of 32 channels.
        side: pixels of a picture's side; the set's 28 are enlarged where it is not 32.
        parent: the relative whose weights it begins with; empty: its own.
        settings: of `ditmesh.train.TrainConfig`, where they differ from ``fashion-dit``'s.
    """

    def __init__(self, seed: int, *, heads: int = 2, side: int = SIZE, parent: str = "", **settings: Any) -> None:
        self.seed, self.heads, self.side, self.parent = seed, heads, side, parent
        self.image_tokens, self.objective = (side // 2) ** 2, "v_prediction"
        self.settings = FashionDiT.settings | {"resolution": side, "seed": seed, "max_train_steps": 1200} | settings

    def make_pipeline(self, folder: Path) -> DiTPipeline:
        """Fresh weights, or the parent's, with ``fashion-dit``'s autoencoder."""
        embedded: Any = DiTPipeline.from_pretrained(zoo.path("fashion-dit"), torch_dtype=torch.float32)
        side = self.side // 2
        if self.parent:
            trained = run(self.parent, folder.parent)
            parent: Any = DiTPipeline.from_pretrained(trained, torch_dtype=torch.float32)
            transformer = resized(parent.transformer, side)
        else:
            torch.manual_seed(self.seed)
            sizes = {"layers": 4, "heads": self.heads, "head_dim": 32}
            transformer = diffusion.make_transformer(classes=len(NAMES), side=side, channels=4, **sizes)
        return DiTPipeline(transformer, embedded.vae, diffusion.make_scheduler())  # pyright: ignore[reportArgumentType]

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """Left to `benchmarks/distribution.py`."""
        return {}


def resized(parent: Any, side: int) -> DiTTransformer2DModel:
    """A transformer with a parent's weights for latents of ``side`` pixels."""
    transformer: Any = DiTTransformer2DModel.from_config(dict(parent.config) | {"sample_size": side})
    # The table of positions follows from the size, and is no part of the weights.
    transformer.load_state_dict(parent.state_dict())
    for module in transformer.modules():
        if isinstance(module, nn.Module) and hasattr(module, "dropout_prob"):
            cast(Any, module).dropout_prob = 0.0  # the trainer drops labels, the same ones for all blocks
    return transformer


SEEDS = (0, 1, 2)
# Steps of a training that goes on from another, at half of its rate.
ON: dict[str, Any] = {"max_train_steps": 250, "lr_warmup_steps": 20, "learning_rate": 7.5e-4}
RELATIVES: dict[str, NoiseDiT | Clothes | Faces] = {
    **{f"clothes-{seed}": Clothes(seed) for seed in SEEDS},
    **{f"clothes-wide-{seed}": Clothes(seed, heads=4) for seed in SEEDS},
    **{f"clothes-256-tokens-{seed}": Clothes(seed, parent=f"clothes-{seed}", **ON) for seed in SEEDS},
    **{f"clothes-1024-tokens-{seed}": Clothes(seed, side=64, parent=f"clothes-{seed}", **ON) for seed in SEEDS},
    "dit-epsilon": NoiseDiT(),
    "faces": Faces(),
}


def run(name: str, folder: Path) -> Path:
    """Train a relative if it is not there; returns the pipeline's folder, with ``training.json`` in it."""
    out, recipe = folder / name / "out", RELATIVES[name]
    if (out / "training.json").exists():
        return out
    trained = train(recipe, folder / name)
    recipe.export(trained, out, folder / name)
    rows = read_log(folder / name / "run" / "loss.csv")
    record = {
        "name": name,
        "parent": recipe.parent,
        "settings": recipe.settings | {"objective": recipe.objective},
        "image_tokens": recipe.image_tokens,
        "steps": len(rows),
        "minutes": round(sum(row["seconds"] for row in rows) / 60, 1),
        "evaluation": recipe.evaluate(out, folder / name),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.relatives", description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(RELATIVES))
    parser.add_argument("--data", type=Path, required=True, help="downloads, checkpoints and the models")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.names:
        console.print(str(run(name, given.data)))


if __name__ == "__main__":
    main()

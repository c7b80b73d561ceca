"""Trains an embedded model: ``python -m training.zoo NAME --out DIR --data DIR``.

Stages, each of which is skipped when its result is there: fetch the pictures, train the autoencoder, make the
untrained pipeline and the file of settings, run ``ditmesh train`` on it, export, evaluate. The run can be
interrupted at any time and started again with the same arguments. ``--data`` keeps what was downloaded and the
checkpoints; ``--out`` receives the model alone. What else is to be told of a run on its card stands in ``notes.txt`` in
``--data``, a paragraph a line.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import yaml
from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
from torch import nn

from ditmesh.train.config import FLAT_NAMES, GROUPS, grouped
from ditmesh.train.logs import read_log
from training.emoji import EmojiDiT, EmojiFlux, EmojiSD3
from training.fashion import FashionDiT
from training.loop import console
from training.motion import EmojiWan

# Settings that are folders, and what they are called.
PLACES = {"pretrained_model_name_or_path": "untrained", "train_data_dir": "data", "output_dir": "run"}


class Recipe(Protocol):
    """What an embedded model is made of.

    Attributes:
        settings: of `ditmesh.train.TrainConfig`, without groups, but for the paths.
        image_tokens: length of the transformer's image stream.
    """

    settings: dict[str, Any]
    image_tokens: int

    def write_data(self, folder: Path) -> Path:
        """Fetch the pictures and write them as the trainer reads them; returns their folder."""
        ...

    def make_pipeline(self, folder: Path) -> DiffusionPipeline:
        """The pipeline before the trainer sees it, the same for the same machine; its autoencoder is trained here."""
        ...

    def export(self, trained: Path, out: Path, folder: Path) -> None:
        """Write what is embedded, but for figures and the card."""
        ...

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """Measure what was exported."""
        ...

    def write_card(self, out: Path, record: dict[str, Any]) -> None:
        """Write ``README.md`` and ``LICENSE-DATA``."""
        ...


RECIPES: dict[str, Recipe] = {
    "fashion-dit": FashionDiT(),
    "emoji-flux": EmojiFlux(),
    "emoji-wan": EmojiWan(),
    "emoji-sd3": EmojiSD3(),
    "emoji-dit-s": EmojiDiT(layers=6, rate=1.5e-3),
    "emoji-dit-l": EmojiDiT(layers=12, rate=1.2e-3),
}


def settings(recipe: Recipe, folder: Path, steps: int | None = None) -> dict[str, Any]:
    """The whole run, as ``ditmesh train`` reads it; in fewer steps the learning rate goes the same way."""
    whole = recipe.settings["max_train_steps"]
    rates = {name: value for name, value in recipe.settings.items() if name in ("lr_warmup_steps", "lr_decay_steps")}
    shorter = {name: max(1, value * steps // whole) for name, value in rates.items()} if steps is not None else {}
    return grouped(
        {
            **{name: str(folder / place) for name, place in PLACES.items()},
            **recipe.settings,
            **{name: str(folder / value) for name, value in recipe.settings.items() if name == "cache_dir"},
            **({} if steps is None else {"max_train_steps": steps, **shorter}),
        }
    )


def train(recipe: Recipe, folder: Path, steps: int | None = None) -> Path:
    """Everything up to the trained pipeline, whose folder is returned."""
    recipe.write_data(folder)
    if not (folder / "untrained" / "model_index.json").exists():
        recipe.make_pipeline(folder).save_pretrained(folder / "untrained")
    trained = folder / "run" / "pipeline"
    if not (trained / "model_index.json").exists():
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(settings(recipe, folder, steps), sort_keys=False), encoding="utf-8")
        threads = str(torch.get_num_threads())
        command = [sys.executable, "-m", "ditmesh", "train", str(file), "--resume", "--threads", threads]
        console.print(" ".join(command))
        subprocess.run(command, check=True)
    return trained


def describe(name: str, folder: Path) -> dict[str, Any]:
    """How the model came about: settings, machine, sizes, time."""
    rows = read_log(folder / "run" / "loss.csv")
    run = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    given = {
        FLAT_NAMES.get((group, name), name): value for group in GROUPS for name, value in run.get(group, {}).items()
    }
    pipe = DiffusionPipeline.from_pretrained(folder / "run" / "pipeline")
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    unused = [
        int((~value.any(dim=1)).sum()) * value.shape[1]
        for path, value in modules["transformer"].named_parameters()
        if path.endswith("embedding_table.weight")
    ]
    return {
        "name": name,
        "settings": {key: value for key, value in given.items() if key not in {*PLACES, "cache_dir"}},
        "image_tokens": RECIPES[name].image_tokens,
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in modules.items()}
        | {"unused": sum(unused)},
        "training": {
            "steps": len(rows),
            "minutes": round(sum(row["seconds"] for row in rows) / 60, 1),
            "loss": round(float(np.mean([row["loss"] for row in rows[-100:]])), 4),
        },
    }


def run(name: str, out: Path, folder: Path, steps: int | None = None) -> dict[str, Any]:
    """Every stage that is still to do; returns the record that is also written beside the model."""
    recipe = RECIPES[name]
    recipe.export(train(recipe, folder, steps), out, folder)
    record = describe(name, folder)
    notes = folder / "notes.txt"
    record["notes"] = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    record["evaluation"] = recipe.evaluate(out, folder)
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    recipe.write_card(out, record)
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.zoo", description=__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="the model's directory")
    parser.add_argument("--data", type=Path, required=True, help="downloads and checkpoints")
    parser.add_argument("--steps", type=int, help="optimizer steps of the transformer")
    parser.add_argument("--threads", type=int, help="CPU threads")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    console.print_json(json.dumps(run(given.name, given.out, given.data, given.steps)))


if __name__ == "__main__":
    main()

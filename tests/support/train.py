"""Small data sets and runs for tests of training."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from PIL import Image

from ditmesh.train import TrainConfig
from ditmesh.train.trainer import Trainer
from ditmesh.zoo import path as find
from ditmesh.zoo.references import read_sheet

ZOO = Path(__import__("ditmesh").__file__).parent / "zoo"


def importing_tests() -> dict[str, str]:
    """An environment in which a program finds the modules of the tests, and ditmesh where this process has it from."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def emoji(count: int) -> list[tuple[str, np.ndarray]]:
    """Captions and pictures (32, 32, 3) of real emoji."""
    model = ZOO / "emoji-sd3"
    entries = json.loads((model / "captions.json").read_text(encoding="utf-8"))[:count]
    return [
        (entry["caption"], picture)
        for entry, picture in zip(entries, read_sheet(model / "thumbnails.png", count), strict=True)
    ]


def folder_of(path: Path, count: int, side: int = 64) -> Path:
    """A data folder with ``metadata.jsonl``: captions under ``text``, numbers under ``label``."""
    path.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (caption, picture) in enumerate(emoji(count)):
        Image.fromarray(picture).resize((side, side)).save(path / f"{number:03}.png")
        lines.append(json.dumps({"file_name": f"{number:03}.png", "text": caption, "label": number}))
    (path / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tar_of(path: Path, count: int, side: int = 64) -> Path:
    """A folder with the same samples in a WebDataset tar."""
    path.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path / "shard-0.tar", "w") as tar:
        for number, (caption, picture) in enumerate(emoji(count)):
            buffer = io.BytesIO()
            Image.fromarray(picture).resize((side, side)).save(buffer, "PNG")
            for kind, content in (("png", buffer.getvalue()), ("txt", caption.encode())):
                entry = tarfile.TarInfo(f"{number:03}.{kind}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return path


def settings(data: Path, out: Path, **more: Any) -> dict[str, Any]:
    """A short run of the embedded text-to-image model."""
    return {
        "pretrained_model_name_or_path": "emoji-sd3",
        "train_data_dir": str(data),
        "output_dir": str(out),
        "resolution": 64,
        "max_sequence_length": 16,
        "train_batch_size": 2,
        "max_train_steps": 4,
        **more,
    }


def weights_after(given: dict[str, Any]) -> tuple[list[str], str]:
    """Losses of every step, in hexadecimal, and the digest of the weights after a run; ``until``: a step to stop at."""
    config = TrainConfig.read({name: value for name, value in given.items() if name != "until"})
    pipe = diffusers.DiffusionPipeline.from_pretrained(find(config.pretrained_model_name_or_path))
    pipe.set_progress_bar_config(disable=True)
    with Trainer(config, pipe, timeout=100.0) as trainer:
        outcome = trainer.run(until=given.get("until"))
        return [loss.hex() for loss in outcome.losses.values()], trainer.weights_digest()

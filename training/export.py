"""From a trained pipeline to a small directory that can be tested without the pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from ditmesh.lab.study.references import THUMBNAIL, THUMBNAIL_COLUMNS, shrink
from training.data import Entry


def copy_vocabulary(tokenizer: Path, out: Path) -> None:
    """The two files of a tokenizer that every release of transformers reads, to all tokenizers of a pipeline."""
    for folder in out.glob("tokenizer*"):
        for file in ("vocab.json", "merges.txt"):
            shutil.copy(tokenizer / file, folder / file)


def halve(file: Path) -> None:
    """Rewrites a safetensors file with its float32 tensors in float16; its config forgets where it was read from."""
    tensors = {
        name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    config = file.with_name("config.json")
    known = json.loads(config.read_text(encoding="utf-8"))
    known.pop("_name_or_path", None)
    config.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_pipeline(trained: Path, out: Path, halved: tuple[str, ...]) -> None:
    """A pipeline's folder as the trainer wrote it, without its card; the weights of ``halved`` parts in float16."""
    shutil.copytree(trained, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("README.md"))
    for part in halved:
        halve(out / part / "diffusion_pytorch_model.safetensors")


def write_captions(entries: Sequence[Entry], pictures: np.ndarray, out: Path) -> None:
    """``captions.json``, and the training pictures' thumbnails in the same order."""
    captions = [{"code": e.code, "caption": e.caption, "also": list(e.captions[1:])} for e in entries]
    (out / "captions.json").write_text(json.dumps(captions, indent=0) + "\n", encoding="utf-8")
    thumbnails(pictures).save(out / "thumbnails.png", optimize=True)


def sheet(pictures: np.ndarray, columns: int = THUMBNAIL_COLUMNS, gap: int = 0) -> Image.Image:
    """(n, h, w, 3) ``uint8`` pictures row by row on one white sheet."""
    n, height, width, _ = pictures.shape
    rows = -(-n // columns)
    page = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = (i // columns) * (height + gap), (i % columns) * (width + gap)
        page[y : y + height, x : x + width] = picture
    return Image.fromarray(page)


def thumbnails(pictures: np.ndarray, size: int = THUMBNAIL) -> Image.Image:
    """The training pictures, reduced to ``size`` pixels, on one sheet in the order of the captions."""
    return sheet(shrink(pictures, size))

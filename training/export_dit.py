"""What lies beside a class-conditional model: the names of its classes, and its pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from ditmesh.lab.study.references import shrink
from training.data import Entry, Pictures, read_entries
from training.export import sheet


def names(entry: Entry, captions: tuple[Entry, ...]) -> list[str]:
    """What a class is called: its own names, then the captions of the same picture in ``captions``.

    So a prompt of the text-to-image model ("a red fox") names the same picture here.
    """
    more = [caption for other in captions if other.code == entry.code for caption in other.captions]
    return list(dict.fromkeys((*entry.captions, *more)))


def write_classes(pictures: Pictures, out: Path) -> None:
    """The names of the classes of a saved pipeline, and the training pictures' thumbnails."""
    captions = read_entries()
    called = [names(entry, captions) for entry in pictures.entries]
    # save_pretrained leaves the names out; from_pretrained reads them here.
    index = json.loads((out / "model_index.json").read_text(encoding="utf-8"))
    index["id2label"] = {str(number): ", ".join(words) for number, words in enumerate(called)}
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    entries = [
        {"code": entry.code, "caption": words[0], "also": words[1:]}
        for entry, words in zip(pictures.entries, called, strict=True)
    ]
    (out / "captions.json").write_text(json.dumps(entries, indent=0) + "\n", encoding="utf-8")
    thumbnails(pictures.chosen).save(out / "thumbnails.png", optimize=True)


def thumbnails(pictures: np.ndarray) -> Image.Image:
    """The training pictures without mirroring or ground, reduced to half, on one sheet."""
    return sheet(shrink(pictures, pictures.shape[1] // 2))

"""The embedded models: small, trained, ordinary diffusers pipelines that need no network.

``DiffusionPipeline.from_pretrained(ditmesh.zoo.path())`` loads one. Importing this module is cheap: neither
torch nor diffusers is loaded. How a model was trained is in its README.md and in ``training/train.py`` or
``training/train_dit.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Embedded:
    """What is worth knowing about an embedded model before it is loaded.

    ``steps``, ``guidance_scale`` and ``max_sequence_length`` are those at which the figures of its card were
    measured; ``size`` is in pixels; ``image_tokens`` is the length of the transformer's image stream.
    A class-conditional model takes no text: its ``max_sequence_length`` is None, and ``classes`` says how many
    classes it has (0: it takes text).
    """

    pipeline: str
    summary: str
    size: int
    image_tokens: int
    steps: int
    guidance_scale: float
    max_sequence_length: int | None = None
    classes: int = 0


EMBEDDED: dict[str, Embedded] = {
    "emoji-sd3": Embedded(
        pipeline="StableDiffusion3Pipeline",
        summary="text to 64x64 emoji, trained on 256 captioned Fluent Emoji",
        size=64,
        image_tokens=256,
        steps=12,
        guidance_scale=2.0,
        max_sequence_length=16,
    ),
    "emoji-dit-s": Embedded(
        pipeline="DiTPipeline",
        summary="class to 64x64 emoji, 64 classes, 6 blocks, DDPM schedule",
        size=64,
        image_tokens=256,
        steps=20,
        guidance_scale=3.0,
        classes=64,
    ),
    "emoji-dit-l": Embedded(
        pipeline="DiTPipeline",
        summary="class to 64x64 emoji, 64 classes, 12 blocks, DDPM schedule",
        size=64,
        image_tokens=256,
        steps=20,
        guidance_scale=3.0,
        classes=64,
    ),
}


def path(name: str = "emoji-sd3") -> Path:
    """The directory of an embedded model, to be given to ``DiffusionPipeline.from_pretrained``.

    Raises ValueError, listing the names, when there is no such model.
    """
    if name not in EMBEDDED:
        raise ValueError(f"no embedded model is called {name!r}; there are: {', '.join(sorted(EMBEDDED))}")
    return Path(__file__).with_name(name)


def embedded(folder: Path) -> Embedded | None:
    """The embedded model that lies in ``folder``; None when it is none of them."""
    folder = folder.resolve()
    return EMBEDDED.get(folder.name) if folder.parent == Path(__file__).resolve().parent else None


def captions(name: str = "emoji-sd3") -> list[str]:
    """The captions an embedded model was trained on, one for each training picture, in their order.

    For a class-conditional model: the first name of each class, in the order of their numbers.

    Raises ValueError, listing the names, when there is no such model.
    """
    entries = json.loads((path(name) / "captions.json").read_text(encoding="utf-8"))
    return [entry["caption"] for entry in entries]

"""The embedded models: small, trained, ordinary diffusers pipelines that need no network.

``DiffusionPipeline.from_pretrained(ditmesh.zoo.path())`` loads one. Importing this module is cheap: neither
torch nor diffusers is loaded. How a model was trained is in its README.md and in ``ditmesh.zoo.train``.
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
    """

    pipeline: str
    summary: str
    size: int
    image_tokens: int
    steps: int
    guidance_scale: float
    max_sequence_length: int


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
}


def path(name: str = "emoji-sd3") -> Path:
    """The directory of an embedded model, to be given to ``DiffusionPipeline.from_pretrained``.

    Raises ValueError, listing the names, when there is no such model.
    """
    if name not in EMBEDDED:
        raise ValueError(f"no embedded model is called {name!r}; there are: {', '.join(sorted(EMBEDDED))}")
    return Path(__file__).with_name(name)


def captions(name: str = "emoji-sd3") -> list[str]:
    """The captions an embedded model was trained on, one for each training picture, in their order.

    Raises ValueError, listing the names, when there is no such model.
    """
    entries = json.loads((path(name) / "captions.json").read_text(encoding="utf-8"))
    return [entry["caption"] for entry in entries]

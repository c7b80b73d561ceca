"""Models that ship with their real sizes: configurations without weights, each with its source."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..generate.model_info import FrameCounts

CONFIGS = Path(__file__).with_name("configs")


@dataclass(frozen=True)
class Shape:
    """A model as the planner needs it: class and configuration of its transformer, and how pixels become tokens.

    Attributes:
        config: entries that are not the class's defaults.
        pixels: along one side of an image token; frames: how those of a video become tokens.
        size, num_frames, text, steps: the usual ones; 1 frame for images.
        branches: of guidance: 2, or 1 for models that have it distilled in; batched: whether they share one call.
        source: where the figures are from; repository: its id on the model hub.
        scale: pixels of a latent.
        vae, encoders: class and configuration of the autoencoder and of text encoders; None: not known.
        other: bytes of other weights.
    """

    name: str
    transformer: str
    config: dict[str, Any]
    pixels: int
    frames: FrameCounts
    size: tuple[int, int]
    num_frames: int
    text: int
    branches: int
    steps: int
    source: str
    repository: str
    batched: bool = True
    pipeline: str | None = None
    scale: int = 8
    vae: tuple[str, dict[str, Any]] | None = None
    encoders: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    other: float = 0.0

    def check_frames(self, frames: int) -> None:
        """Reject frames for an image model, and a number that the VAE would round: `InputError` with the nearest."""
        if self.num_frames == 1:
            raise InputError(f"--frames {frames}: {self.name} makes images; leave --frames out")
        self.frames.check(frames, self.name)

    def token_grid(self, width: int, height: int, frames: int) -> tuple[int, int, int]:
        """Image tokens along time, height and width; `InputError`: the size is no multiple of what a token covers."""
        if width % self.pixels or height % self.pixels:
            raise InputError(
                f"size {width}x{height}: {self.name} needs multiples of {self.pixels}; use "
                f"{max(1, width // self.pixels) * self.pixels}x{max(1, height // self.pixels) * self.pixels}"
            )
        return self.frames.latents_of(frames), height // self.pixels, width // self.pixels


@cache
def shapes() -> dict[str, Shape]:
    """The shapes that ship, by name."""
    catalogue = {}
    for path in sorted(CONFIGS.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        data["transformer"], data["size"] = data.pop("class"), tuple(data["size"])
        frames = data["frames"]
        data["frames"] = FrameCounts(*(frames if isinstance(frames, list) else (frames,)))
        name = path.name.removesuffix(".json")
        catalogue[name] = Shape(name=name, **data)
    return catalogue

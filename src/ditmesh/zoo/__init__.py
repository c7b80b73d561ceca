"""The embedded models: small, trained, ordinary diffusers pipelines that need no network.

``DiffusionPipeline.from_pretrained(ditmesh.zoo.path())`` loads one. Importing this module is cheap: neither
torch nor diffusers is loaded. How a model was trained is in its README.md, which names the script in ``training/``.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..errors import InputError
from ..requirements import install_line

# The package of the models' files, for installations that do not have them beside this module.
DATA = "ditmesh_zoo"


@dataclass(frozen=True)
class Embedded:
    """Facts about an embedded model, known before it is loaded.

    Attributes:
        summary: what it makes of what.
        steps, guidance_scale, max_sequence_length: those at which the figures of its card were measured; a
            class-conditional model takes no text, and its ``max_sequence_length`` is None.
        classes: number of classes of a class-conditional model; 0: it takes text.
        size: width and height in pixels.
        image_tokens: length of the transformer's image stream.
        frames: of a video; 0: it makes images.
    """

    pipeline: str
    summary: str
    steps: int
    guidance_scale: float
    max_sequence_length: int | None = None
    classes: int = 0
    size: int = 64
    image_tokens: int = 256
    frames: int = 0


EMBEDDED: dict[str, Embedded] = {
    name: Embedded(**facts)
    for name, facts in yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")).items()
}


def path(name: str = "emoji-sd3") -> Path:
    """The folder of an embedded model, for ``DiffusionPipeline.from_pretrained``.

    Raises ValueError, listing the names, when there is no such model; `InputError`, when the models are not installed.
    """
    if name not in EMBEDDED:
        raise ValueError(f"no embedded model is called {name!r}; there are: {', '.join(sorted(EMBEDDED))}")
    for folder in _folders():
        if (folder / name / "model_index.json").is_file():
            return folder / name
    raise InputError(
        f"the embedded model {name!r} is not installed; {install_line('zoo')} (or install "
        "src/ditmesh/zoo of a checkout), or give another model, a folder or a hub id"
    )


def _folders() -> list[Path]:
    """The folders that may hold the models: of a checkout, and of the distribution ditmesh-zoo."""
    spec = importlib.util.find_spec(DATA)
    return [Path(__file__).resolve().parent, *map(Path, (spec and spec.submodule_search_locations) or ())]


def embedded(folder: Path) -> Embedded | None:
    """The embedded model that lies in ``folder``; None when it is none of them."""
    folder = folder.resolve()
    if folder.name not in EMBEDDED or folder.parent not in [place.resolve() for place in _folders()]:
        return None
    return EMBEDDED[folder.name]


def captions(name: str = "emoji-sd3") -> list[str]:
    """The training captions of an embedded model, one for each training image, in order.

    For a class-conditional model: the first name of each class, in the order of their numbers.

    Raises ValueError, listing the names, when there is no such model.
    """
    entries = json.loads((path(name) / "captions.json").read_text(encoding="utf-8"))
    return [entry["caption"] for entry in entries]

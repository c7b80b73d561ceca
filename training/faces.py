"""``faces``: drawn faces of 256 x 256 pixels in ten classes of hair and hats, which a model can draw anew.

The faces are those of the package python-avatars (MIT; drawn by Pablo Stanley, https://avataaars.com): eyes, mouths,
beards, glasses, clothes and colours are chosen at random for each picture, out of a billion combinations, so new ones
are no training pictures.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import python_avatars as avatars
import resvg_py
import torch
from diffusers import (
    AutoencoderKL,  # pyright: ignore[reportPrivateImportUsage]
    DDIMScheduler,  # pyright: ignore[reportPrivateImportUsage]
    DiTPipeline,  # pyright: ignore[reportPrivateImportUsage]
)
from PIL import Image
from safetensors.torch import save_file

from ditmesh import zoo
from ditmesh.lab.study.references import shrink
from training import diffusion, evaluate_dit
from training.evaluate_fashion import distances, in_parts, train_classifier
from training.fashion import FashionDiT
from training.fashion_data import SIZE, narrow

SIDE = 256
NAMES = ("long hair", "bob", "bun", "afro", "short hair", "no hair", "hat", "turban", "hijab", "winter hat")
TOPS = ("STRAIGHT_1", "BOB", "BUN", "FRO", "SHORT_FLAT", "NONE", "HAT", "TURBAN", "HIJAB", "WINTER_HAT_2")
PICTURES = 6000
# Behind the faces: no hat and no shirt has this colour.
GROUND = "#c8d6e0"
# How often a face has none of what it need not have.
NOTHING = 0.6
# What a face is made of, and the members of python-avatars that are chosen from; none: all.
PARTS = {
    "eyes": ("EyeType", "CLOSED", "DEFAULT", "HAPPY", "HEART", "SIDE", "SURPRISED", "WINK", "X_DIZZY"),
    "mouth": ("MouthType", "CONCERNED", "DEFAULT", "DISBELIEF", "SAD", "SERIOUS", "SMILE", "TONGUE", "BIG_SMILE"),
    "accessory": ("AccessoryType", "KURT", "PRESCRIPTION_1", "ROUND", "SUNGLASSES"),
    "facial_hair": ("FacialHairType", "BEARD_LIGHT", "BEARD_MEDIUM", "MOUSTACHE_FANCY", "MOUSTACHE_MAGNUM"),
    "clothing": ("ClothingType", "BLAZER_SHIRT", "COLLAR_SWEATER", "HOODIE", "OVERALL", "SHIRT_CREW_NECK", "BOND_SUIT"),
    "skin_color": ("SkinColor",),
    "hair_color": ("HairColor",),
    "facial_hair_color": ("HairColor",),
    "clothing_color": ("ClothingColor",),
    "hat_color": ("ClothingColor",),
}


def face(label: int, seed: int) -> np.ndarray:
    """A face of a class: (256, 256, 3) ``uint8``."""
    chance, chosen = random.Random(seed), {}
    for part, (kind, *names) in PARTS.items():
        members = getattr(avatars, kind)
        name = chance.choice(names or [member.name for member in members])
        absent = part in ("accessory", "facial_hair") and chance.random() < NOTHING
        chosen[part] = getattr(members, "NONE" if absent else name)
    top = getattr(avatars.HairType if label < 6 else avatars.HatType, TOPS[label])
    drawing = avatars.Avatar(style=avatars.AvatarStyle.TRANSPARENT, top=top, **chosen).render()
    with Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=drawing, width=SIDE, background=GROUND)))) as png:
        return np.asarray(png.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def faces(count: int, first: int = 0) -> Iterator[dict[str, Any]]:
    """``count`` faces of all classes in turn, of seeds ``first`` and up."""
    for seed in range(first, first + count):
        yield {"image": face(seed % len(NAMES), seed), "label": seed % len(NAMES)}


class Faces(FashionDiT):
    """A model of faces with the autoencoder of ``emoji-dit-s``; a recipe of :mod:`training.zoo`."""

    parent, objective, image_tokens, names = "", "sample", 256, NAMES
    settings = FashionDiT.settings | {
        "resolution": SIDE,
        # The same steps on one rank and on two.
        "train_batch_size": 16,
        "global_batch_size": 32,
        "max_train_steps": 2000,
        "cache_dir": "cache",
    }

    def pictures(self, folder: Path) -> tuple[Sequence[np.ndarray], Sequence[int]]:
        """The training pictures and their classes."""
        drawn = list(faces(PICTURES))
        return [each["image"] for each in drawn], [each["label"] for each in drawn]

    def make_pipeline(self, folder: Path) -> DiTPipeline:
        """Fresh weights with the embedded autoencoder; four pixels make one of its latents, 4 x 4 of these a token."""
        vae: Any = AutoencoderKL.from_pretrained(zoo.path("emoji-dit-s"), subfolder="vae", torch_dtype=torch.float32)
        torch.manual_seed(0)
        sizes = {"side": SIDE // 4, "patch": 4, "layers": 6, "heads": 6, "head_dim": 32}
        transformer = diffusion.make_transformer(classes=len(NAMES), **sizes)
        # A token has 128 numbers, most of a width of 192: their noise is not to be carried through.
        scheduler = DDIMScheduler.from_config(diffusion.make_scheduler().config, prediction_type=self.objective)
        return DiTPipeline(transformer, vae, scheduler)  # pyright: ignore[reportArgumentType]

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """Are ten images of each class of their class, and how far are they from the nearest training picture?

        A classifier of the ten classes is put beside the model; `benchmarks/distribution.py` asks it, too.
        """
        grey, labels = _grey(faces(4000, 10**6))
        classifier = train_classifier(grey[400:], labels[400:], epochs=60)
        save_file(
            {name: value.half() for name, value in classifier.state_dict().items()}, out / "classifier.safetensors"
        )
        pipe = DiTPipeline.from_pretrained(out)
        pipe.set_progress_bar_config(disable=True)
        asked = [label for label in range(len(NAMES)) for _ in range(10)]
        images = evaluate_dit.draw(pipe, asked, steps=20, guidance=2.0, batch=20)
        drawn, _ = _grey({"image": image, "label": 0} for image in images)
        trained, _ = _grey(faces(PICTURES))
        right = [
            in_parts(classifier, some).argmax(1).numpy() == told
            for some, told in ((grey[:400], labels[:400]), (drawn, asked))
        ]
        near = {name: distances(some, trained) for name, some in (("new faces", grey[:400]), ("drawn", drawn))}
        return {
            "classifier_on_test": round(float(right[0].mean()), 4),
            "classifier_on_drawn": round(float(right[1].mean()), 4),
            "nearest_training_picture": {
                name: {f"{p} %": round(float(np.percentile(some, p)), 1) for p in (1, 10, 50, 90)}
                for name, some in near.items()
            },
        }


def _grey(pictures: Iterable[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Grey pictures of 28 pixels, as the classifier takes them, and their labels."""
    pairs = [(narrow(shrink(each["image"][None], SIZE))[0], each["label"]) for each in pictures]
    return np.stack([picture for picture, _ in pairs]), np.array([label for _, label in pairs])

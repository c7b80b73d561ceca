"""The measure of ``fashion-dit``: are its pictures of the right class, and are they new?

A small classifier, trained on the training pictures, says of which class a picture is. New pictures and test pictures
are compared by their distance to the nearest training picture: pictures learnt by heart would be far nearer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from training import autoencoder as ae
from training import evaluate_dit, export
from training.fashion_data import NAMES, fetch, narrow, read, widen
from training.loop import console

STEPS = 20
GUIDANCE = 2.0


class Classifier(nn.Module):
    """A small convolutional network: (n, 28, 28) ``uint8`` -> (n, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 16, 3, padding=1)
        self.third, self.last = nn.Linear(16 * 49, 32), nn.Linear(32, len(NAMES))

    def features(self, pictures: Tensor) -> Tensor:
        """(n, 32): the layer before the logits."""
        hidden = F.max_pool2d(F.relu(self.first(pictures[:, None].float() / 255.0)), 2)
        hidden = F.max_pool2d(F.relu(self.second(hidden)), 2)
        return F.relu(self.third(hidden.flatten(1)))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.last(self.features(pictures))


def train_classifier(pictures: np.ndarray, labels: np.ndarray, epochs: int = 4) -> Classifier:
    """Trained on (n, 28, 28) pictures in a minute or so."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, y = torch.from_numpy(pictures.copy()), torch.from_numpy(labels.astype(np.int64))
    steps = epochs * -(-len(x) // 128)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            falling.step()
    return model.eval()


def read_classifier(model: Path) -> Classifier:
    """The classifier with which an embedded model was measured."""
    classifier = Classifier()
    classifier.load_state_dict(load_file(model / "classifier.safetensors"))
    return classifier.eval()


@torch.no_grad()
def in_parts(call: Callable[[Tensor], Tensor], pictures: np.ndarray) -> Tensor:
    """``call`` on (n, 28, 28) pictures, some at a time."""
    return torch.cat([call(part) for part in torch.from_numpy(pictures.copy()).split(1000)])


def distances(pictures: np.ndarray, references: np.ndarray) -> np.ndarray:
    """Root mean square difference in grey levels from each picture to the nearest reference: (n,)."""
    a, b = (torch.from_numpy(p.reshape(len(p), -1).astype(np.float32)) for p in (pictures, references))
    nearest = torch.full((len(a),), float("inf"))
    for part in b.split(5000):
        nearest = torch.minimum(nearest, torch.cdist(a, part).min(dim=1).values)
    return (nearest / a.shape[1] ** 0.5).numpy()


def frechet(ours: Tensor, theirs: Tensor) -> float:
    """Fréchet distance of two sets of features as normal distributions (Heusel et al. 2017, arXiv:1706.08500)."""
    (m1, c1), (m2, c2) = ((f.double().mean(0), f.double().T.cov()) for f in (ours, theirs))
    # The trace of the root of c1 c2, whose eigenvalues are real and not negative.
    roots = torch.linalg.eigvals(c1 @ c2).real.clamp_min(0).sqrt().sum()
    return float((m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * roots)


def evaluate(model: Path, folder: Path, each: int = 100, batch: int = 100) -> dict[str, Any]:
    """Loads the exported model, draws ``each`` pictures of every class, and compares them with the test pictures.

    Writes ``samples.png``, a row of each class, and ``classifier.safetensors`` in float16.
    """
    there = fetch(folder)
    (pictures, labels), (test, told) = read(there, "train"), read(there, "t10k")
    weights = {name: value.half() for name, value in train_classifier(pictures, labels).state_dict().items()}
    save_file(weights, model / "classifier.safetensors")
    classifier = read_classifier(model)
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    asked = np.repeat(np.arange(len(NAMES)), each)
    began = time.monotonic()
    drawn = evaluate_dit.draw(pipe, asked.tolist(), steps=STEPS, guidance=GUIDANCE, batch=batch)
    seconds = time.monotonic() - began
    rows = drawn.reshape(len(NAMES), each, *drawn.shape[1:])[:, : export.THUMBNAIL_COLUMNS]
    export.sheet(rows.reshape(-1, *drawn.shape[1:])).convert("L").save(model / "samples.png", optimize=True)
    grey = narrow(drawn)
    held = np.concatenate([test[told == label][:each] for label in range(len(NAMES))])
    near, near_held = distances(grey, pictures), distances(held, pictures)
    said, said_test = (in_parts(classifier, some).argmax(1).numpy() for some in (grey, test))
    features, features_test = (in_parts(classifier.features, some) for some in (grey, test))
    seen = np.concatenate([pictures[labels == label][:each] for label in range(len(NAMES))])
    restored = ae.decode(pipe.vae, ae.encode(pipe.vae, widen(held)))
    figures = {
        "steps": STEPS,
        "guidance_scale": GUIDANCE,
        "pictures": len(asked),
        "classifier_on_test": round(float((said_test == told).mean()), 4),
        "classifier_on_drawn": round(float((said == asked).mean()), 4),
        "by_class": {
            name: {
                "test": round(float((said_test == told)[told == label].mean()), 3),
                "drawn": round(float((said == asked)[asked == label].mean()), 3),
            }
            for label, name in enumerate(NAMES)
        },
        "nearest_training_picture": {
            name: {f"{p} %": round(float(np.percentile(some, p)), 1) for p in (1, 10, 50, 90)}
            for name, some in (("test", near_held), ("drawn", near))
        },
        "nearer_than_1_percent_of_test": round(float((near < np.percentile(near_held, 1)).mean()), 4),
        "frechet_of_drawn": round(frechet(features, features_test), 2),
        "frechet_of_training": round(frechet(in_parts(classifier.features, seen), features_test), 2),
        "autoencoder_psnr_on_test": round(float(ae.psnr(restored, widen(held)).mean()), 1),
        "seconds": round(seconds, 1),
    }
    console.print(figures)
    return figures

"""What stale strategies do to a distribution of images: class, Fréchet distance and sharpness beside PSNR.

    python benchmarks/distribution.py --each 30                            # fashion-dit: minutes of one core
    python benchmarks/distribution.py --each 5 --models runs/relatives     # models of training/relatives.py

Of models that draw new clothes or faces, and the classifier that lies beside the model, or beside `fashion-dit`. Ranks
are simulated, to the bit. Every row has images of the same classes and seeds as the synchronous row; another row has
other seeds, which shows how far apart two equally good sets of so many images are. The Fréchet distance is that of the
classifier's 32 features (its formula is that of Heusel et al. 2017, arXiv:1706.08500, its network is not), to the
synchronous set. Its error is the deviation over sets drawn from this one with replacement; both are drawn alike, image
by image. Sharpness is the mean magnitude of the Laplacian over that of the synchronous set; under 1 is blur. Images of
more than 32 pixels are judged as their means of 32. A row is added to ``--file`` as soon as it is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

# The package `training` comes before the benchmark of that name.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from harness import add_missing, command_line

MODEL, STEPS, GUIDANCE, CLASSES, BATCH = "fashion-dit", 20, 2.0, 10, 50
EXACT, OTHERS = "synchronous", "synchronous, other seeds"
STALE = {"exchange": "displaced", "warmup": "fixed(1)"}
# What is drawn, by name; None: one device.
ROWS: dict[str, dict[str, Any] | None] = {
    EXACT: None,
    OTHERS: None,
    **{f"displaced, N = {n}": {"ring": n, "predict": "none", **STALE} for n in (2, 4, 8)},
    **{f'`predict="linear"`, N = {n}': {"ring": n, "predict": "linear", **STALE} for n in (2, 4, 8)},
    "naive, N = 4": {"ring": 4, **STALE, "exchange": "naive"},
}
FEWER = [name for name in ROWS if name not in (OTHERS, "displaced, N = 2", "displaced, N = 8")]  # for other models
RESAMPLES = 50  # sets drawn with replacement


def draw(pipe: Any, config: dict[str, Any] | None, labels: list[int], first: int) -> np.ndarray:
    """Every class number from its own seed, ``first`` and up: (n, h, w, 3) ``uint8``."""
    import ditmesh

    made = []
    for start in range(0, len(labels), BATCH):
        part = labels[start : start + BATCH]
        generators = [torch.Generator().manual_seed(first + start + i) for i in range(len(part))]
        more = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "np"}
        if config is None:
            images = pipe(part, generator=generators, **more).images
        else:
            with ditmesh.simulated(pipe, config):
                images = pipe(part, generator=generators, **more).images
        made.append((np.asarray(images) * 255.0).round().clip(0, 255).astype(np.uint8))
    return np.concatenate(made)


def laplacian(grey: np.ndarray) -> float:
    """Mean magnitude of the Laplacian of (n, h, w) images."""
    values = grey.astype(np.float64)
    inner = 4 * values[:, 1:-1, 1:-1] - values[:, :-2, 1:-1] - values[:, 2:, 1:-1]
    return float(np.abs(inner - values[:, 1:-1, :-2] - values[:, 1:-1, 2:]).mean())


class Judge:
    """Compares sets of images of a model with its synchronous one.

    Args:
        folder: of the model.
        labels: classes of the images, in order.
    """

    def __init__(self, folder: Path, labels: list[int]) -> None:
        from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
        from training.evaluate_fashion import read_classifier

        from ditmesh import zoo

        self.pipe = DiffusionPipeline.from_pretrained(folder)
        self.pipe.set_progress_bar_config(disable=True)
        own = (folder / "classifier.safetensors").exists()
        self.classifier, self.labels = read_classifier(folder if own else zoo.path(MODEL)), labels
        self.exact = draw(self.pipe, None, labels, 0)
        self.grey, self.features, self.classes = self.seen(self.exact)

    def seen(self, images: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray]:
        """Grey images of 28 pixels, their features and their classes."""
        from training.evaluate_fashion import in_parts
        from training.fashion_data import SIZE, narrow

        from ditmesh.lab.study.references import shrink

        grey = narrow(shrink(images, SIZE))
        return grey, in_parts(self.classifier.features, grey), in_parts(self.classifier, grey).argmax(1).numpy()

    def measure(self, name: str) -> dict[str, Any]:
        """Figures of a row; image by image beside the synchronous ones, but for other seeds."""
        from training.autoencoder import psnr
        from training.evaluate_fashion import frechet

        paired, config = name != OTHERS, ROWS[name]
        images = self.exact if name == EXACT else draw(self.pipe, config, self.labels, 0 if paired else 10**6)
        grey, features, classes = self.seen(images)
        random = np.random.default_rng(0)
        draws = [random.integers(0, len(classes), len(classes)) for _ in range(RESAMPLES)]
        others = draws if paired else [random.integers(0, len(classes), len(classes)) for _ in range(RESAMPLES)]
        sets = [frechet(features[a], self.features[b]) for a, b in zip(draws, others, strict=True)]
        measures: dict[str, Any] = {
            "right": share(classes == np.array(self.labels)),
            "same_verdict": share(classes == self.classes),
            "frechet": frechet(features, self.features),
            "frechet_error": float(np.std(sets, ddof=1)),
            "sharpness": laplacian(grey) / laplacian(self.grey),
        }
        if config is not None:
            measures["psnr"] = np.minimum(psnr(images, self.exact), 120).round(2).tolist()
        return measures


def share(right: np.ndarray) -> list[float]:
    """A share and its standard error."""
    value = float(right.mean())
    return [value, (value * (1 - value) / len(right)) ** 0.5]


def cells(folders: dict[str, Path], each: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Name of every row, and what measures it."""
    from ditmesh.lab.study.plan import weights_digest

    labels = np.repeat(np.arange(CLASSES), each).tolist()
    for name, folder in folders.items():
        judge = cache(partial(Judge, folder, labels))
        for row in FEWER if name.startswith("clothes") else ROWS:
            found = {"model": name, "weights": weights_digest(folder), "images": len(labels), "row": row}
            yield found, lambda row=row, judge=judge: judge().measure(row)


def main() -> None:
    """Measure what is missing."""
    import diffusers

    from ditmesh import zoo

    parser = command_line(__doc__, figures=False)
    parser.add_argument("--each", type=int, default=30, help="images of every class; default: 30")
    parser.add_argument("--models", type=Path, help="what training/relatives.py made: clothes and faces are measured")
    parser.add_argument("--file", type=Path, default=Path(__file__).parent / "measured" / "distribution.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    names = [f"{name}/out/training.json" for name in ("clothes-*", "faces")] if options.models else []
    trained = [file for name in names for file in sorted(options.models.glob(name))]
    folders = {file.parts[-3]: file.parent for file in trained} if options.models else {MODEL: zoo.path(MODEL)}
    add_missing(options.file, cells(folders, options.each))


if __name__ == "__main__":
    main()

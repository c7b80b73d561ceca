"""What stale strategies do to a distribution of pictures: class, Fréchet distance and sharpness beside PSNR.

    python benchmarks/distribution.py --each 30 --json benchmarks/measured/distribution.json
    python benchmarks/distribution.py --compress int8 --compress int4

Of `fashion-dit`, which draws new pictures and has its classifier beside it. Ranks are simulated, to the bit. Every
row has pictures of the same classes and seeds as the synchronous row; another row has other seeds, which shows how
far apart two equally good sets of so many pictures are. The Fréchet distance is that of the classifier's 32 features
(its formula is that of Heusel et al. 2017, arXiv:1706.08500, its network is not), to the synchronous set. Its error is
the deviation over sets drawn from this one with replacement; both are drawn alike, picture by picture. Sharpness is the
mean magnitude of the Laplacian over that of the synchronous set; under 1 is blur. Rows that are in the JSON file
already are not drawn again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

# The package `training` comes before the benchmark of that name.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from harness import command_line, write_figures
from machine import describe_machine

MODEL, STEPS, GUIDANCE, CLASSES, BATCH = "fashion-dit", 20, 2.0, 10, 50
EXACT, OTHERS = "synchronous", "synchronous, other seeds"
# Sets drawn with replacement.
RESAMPLES = 50


def displaced(devices: int, warmup: str, compress: str | None = None) -> tuple[str, dict[str, Any]]:
    """A row of displaced patches; ``compress`` is any that the configuration knows."""
    name = f"displaced, N = {devices}, {warmup}{f', {compress}' if compress else ''}"
    return name, {"ring": devices, "exchange": "displaced", "warmup": warmup, "compress": compress}


def rows(compress: list[str]) -> dict[str, dict[str, Any] | None]:
    """What is drawn, by name; None: one device."""
    return {
        EXACT: None,
        OTHERS: None,
        **dict(displaced(n, "fixed(1)") for n in (2, 4, 8)),
        **dict([displaced(4, "fixed(0)"), displaced(4, "fixed(4)"), displaced(8, "steps(0 18 19)")]),
        **dict(displaced(4, "fixed(1)", name) for name in compress),
        "PipeFusion, 4 patches, fixed(1)": {"patches": 4, "warmup": "fixed(1)"},
        "naive, N = 4, fixed(1)": {"ring": 4, "exchange": "naive", "warmup": "fixed(1)"},
        "naive, N = 4, fixed(10)": {"ring": 4, "exchange": "naive", "warmup": "fixed(10)"},
    }


def draw(pipe: Any, config: dict[str, Any] | None, labels: list[int], first: int) -> np.ndarray:
    """Every class number from its own seed, ``first`` and up: (n, 32, 32, 3) ``uint8``."""
    import ditmesh

    made = []
    for start in range(0, len(labels), BATCH):
        part = labels[start : start + BATCH]
        generators = [torch.Generator().manual_seed(first + start + i) for i in range(len(part))]

        def call(part: list[int] = part, generators: list[torch.Generator] = generators) -> Any:
            more = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "np"}
            return pipe(part, generator=generators, **more).images

        if config is None:
            pictures = call()
        elif "ring" in config:
            with ditmesh.simulated(pipe, config):
                pictures = call()
        else:
            # Patches of one process.
            with ditmesh.parallelized(pipe, config):
                pictures = call()
        made.append((np.asarray(pictures) * 255.0).round().clip(0, 255).astype(np.uint8))
    return np.concatenate(made)


def laplacian(grey: np.ndarray) -> float:
    """Mean magnitude of the Laplacian of (n, h, w) pictures."""
    values = grey.astype(np.float64)
    inner = 4 * values[:, 1:-1, 1:-1] - values[:, :-2, 1:-1] - values[:, 2:, 1:-1]
    return float(np.abs(inner - values[:, 1:-1, :-2] - values[:, 1:-1, 2:]).mean())


class Judge:
    """Compares sets of pictures with the synchronous one."""

    def __init__(self, folder: Path, labels: list[int], exact: np.ndarray) -> None:
        from training.evaluate_fashion import in_parts, read_classifier
        from training.fashion_data import narrow

        self._classifier, self._in_parts, self._narrow = read_classifier(folder), in_parts, narrow
        self.labels, self.exact = np.array(labels), exact
        self.grey, self.features, self.said = self._seen(exact)

    def _seen(self, pictures: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray]:
        grey = self._narrow(pictures)
        features = self._in_parts(self._classifier.features, grey)
        return grey, features, self._in_parts(self._classifier, grey).argmax(1).numpy()

    def figures(self, pictures: np.ndarray, paired: bool) -> dict[str, Any]:
        """Of a set; ``paired``: picture by picture with the synchronous ones."""
        from training.evaluate_fashion import frechet

        grey, features, said = self._seen(pictures)
        squares = ((pictures.astype(np.float64) - self.exact) ** 2).mean((1, 2, 3)) / 255**2
        ratios = np.minimum(-10 * np.log10(np.maximum(squares, 1e-12)), 100.0)
        random = np.random.default_rng(0)
        draws = [random.integers(0, len(said), len(said)) for _ in range(RESAMPLES)]
        others = draws if paired else [random.integers(0, len(said), len(said)) for _ in range(RESAMPLES)]
        found: dict[str, Any] = {
            "images": len(said),
            "right": share(said == self.labels),
            "same_verdict": share(said == self.said),
            "frechet": frechet(features, self.features),
            "frechet_error": spread(
                [frechet(features[a], self.features[b]) for a, b in zip(draws, others, strict=True)]
            ),
            "sharpness": laplacian(grey) / laplacian(self.grey),
        }
        if paired:
            found["psnr"] = [float(ratios.mean()), spread(ratios) / len(ratios) ** 0.5]
            found["psnr_percentiles"] = [float(np.percentile(ratios, p)) for p in (0, 5, 50, 95)]
        return found


def share(right: np.ndarray) -> list[float]:
    """A share and its standard error."""
    value = float(right.mean())
    return [value, (value * (1 - value) / len(right)) ** 0.5]


def spread(values: Any) -> float:
    """The standard deviation."""
    return float(np.std(values, ddof=1))


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    psnr = "" if "psnr" not in found else f"{found['psnr'][0]:.1f} ± {found['psnr'][1]:.1f}"
    return (
        f"{name:<36}{found['right'][0]:>8.1%}{found['same_verdict'][0]:>9.1%}{psnr:>14}"
        f"{found['frechet']:>9.2f} ± {found['frechet_error']:<6.2f}{found['sharpness']:>9.3f}"
    )


def main() -> None:
    """Draw and compare."""
    parser = command_line(__doc__)
    parser.add_argument("--each", type=int, default=30, help="pictures of every class; default: 30")
    parser.add_argument("--compress", action="append", help="a row with this compression; default: int8 and int4")
    parser.add_argument("--only", action="append", help="rows whose names hold this, or one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import diffusers
    from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]

    from ditmesh import zoo

    diffusers.utils.logging.disable_progress_bar()
    folder = zoo.path(MODEL)
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    labels = np.repeat(np.arange(CLASSES), options.each).tolist()
    machine = describe_machine()
    setup = {"model": MODEL, "steps": STEPS, "guidance": GUIDANCE, "each": options.each}
    figures: dict[str, Any] = {"machine": machine, "setup": setup, "rows": {}}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text(encoding="utf-8"))
        figures["rows"] = known["rows"] if known["setup"] == setup else {}
    print(
        f"{MODEL}, DDIM, {STEPS} steps, {len(labels)} pictures a row, seeds 0 to {len(labels) - 1}; {machine['text']}"
    )
    print(f"{'':<36}{'class':>8}{'verdict':>9}{'PSNR':>14}{'Fréchet':>9}{'':9}{'sharp':>9}")
    judge: Judge | None = None
    for name, config in rows(options.compress or ["int8", "int4"]).items():
        if options.only and not any(part in name for part in options.only) and name != EXACT:
            continue
        if name not in figures["rows"]:
            if judge is None:
                judge = Judge(folder, labels, draw(pipe, None, labels, 0))
            began = time.perf_counter()
            same = name != OTHERS
            pictures = judge.exact if name == EXACT else draw(pipe, config, labels, 0 if same else 10**6)
            seconds = {"seconds": time.perf_counter() - began}
            figures["rows"][name] = judge.figures(pictures, same) | seconds
            write_figures(figures, options.json)
        print(line(name, figures["rows"][name]), flush=True)


if __name__ == "__main__":
    main()

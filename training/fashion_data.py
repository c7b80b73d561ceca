"""Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747; MIT licence): grey pictures of clothes in 10 classes.

60,000 pictures of 28x28 pixels for training and 10,000 for tests; here with a black edge of two pixels.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import numpy as np

PACKAGE = "dataset-fashion-mnist"
INSIDE = Path("usr/share/datasets/fashion-mnist")
NAMES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
EDGE = 2
SIZE = 28 + 2 * EDGE


def fetch(folder: Path) -> Path:
    """The folder of the four files of the set, which are fetched as a Debian package if they are not there.

    Raises RuntimeError when they can neither be found nor fetched.
    """
    for there in (folder / INSIDE, Path("/") / INSIDE):
        if (there / "train-images-idx3-ubyte.gz").exists():
            return there
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"{missing[0]} was not found, and {folder / INSIDE} has no Fashion-MNIST; put its four .gz files there"
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
    found = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if done.returncode != 0 or not found:
        raise RuntimeError(f"`apt-get download {PACKAGE}` failed ({done.returncode}): {done.stderr.strip()}")
    subprocess.run(["dpkg-deb", "-x", found[-1].name, "."], cwd=folder, check=True)
    return folder / INSIDE


def read(there: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (n, 28, 28) and labels (n,), ``uint8``; ``part`` is ``train`` or ``t10k``."""
    with gzip.open(there / f"{part}-images-idx3-ubyte.gz") as file:
        pictures = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    with gzip.open(there / f"{part}-labels-idx1-ubyte.gz") as file:
        return pictures, np.frombuffer(file.read(), np.uint8, offset=8)


def widen(pictures: np.ndarray) -> np.ndarray:
    """(n, 28, 28) grey -> (n, 32, 32, 3), with a black edge."""
    edged = np.pad(pictures, ((0, 0), (EDGE, EDGE), (EDGE, EDGE)))
    return np.repeat(edged[..., None], 3, axis=3)


def narrow(pictures: np.ndarray) -> np.ndarray:
    """(n, 32, 32, 3) -> (n, 28, 28) grey."""
    inside = pictures[:, EDGE:-EDGE, EDGE:-EDGE].astype(np.float32)
    return inside.mean(axis=3).round().astype(np.uint8)

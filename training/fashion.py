"""``fashion-dit``: classes of clothes that the model draws anew, trained on Fashion-MNIST.

Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747; MIT licence): 60,000 grey pictures of 28x28 pixels for
training and 10,000 for tests, in 10 classes; here with a black edge of two pixels. With so many pictures a small model
cannot learn them by heart, and the test pictures say how near to the training pictures new ones are.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,  # pyright: ignore[reportPrivateImportUsage]
    DiTPipeline,  # pyright: ignore[reportPrivateImportUsage]
)
from PIL import Image

from ditmesh.core.files import written_whole
from training import autoencoder as ae
from training import diffusion, export, loop

PACKAGE = "dataset-fashion-mnist"
INSIDE = Path("usr/share/datasets/fashion-mnist")
NAMES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
EDGE = 2
SIZE = 28 + 2 * EDGE

AUTOENCODER = loop.Plan(steps=600, batch=32, rate=3e-3, warmup=30, cooldown=0.6, average=0.98)


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


class FashionDiT:
    """``fashion-dit``: a ``DiTPipeline`` of 64 image tokens."""

    image_tokens = 64
    settings: dict[str, Any] = {  # noqa: RUF012
        "resolution": SIZE,
        "train_batch_size": 32,
        "max_train_steps": 1800,
        "learning_rate": 1.5e-3,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 100,
        "adam_beta2": 0.99,
        "adam_weight_decay": 0.0,
        "use_ema": True,
        "ema_decay": 0.99,
        "proportion_empty_prompts": 0.1,
        "checkpointing_steps": 100,
        "checkpoints_total_limit": 2,
    }

    def write_data(self, folder: Path) -> Path:
        """The training data as one WebDataset tar; returns its folder."""
        out = folder / "data"
        if not (out / "train.tar").exists():
            pictures, labels = read(fetch(folder), "train")
            out.mkdir(parents=True, exist_ok=True)
            with written_whole(out / "train.tar") as part, tarfile.open(part, "w") as tar:
                for number, (picture, label) in enumerate(zip(widen(pictures), labels, strict=True)):
                    file = io.BytesIO()
                    Image.fromarray(picture).save(file, "png", compress_level=1)
                    for kind, content in (("png", file.getvalue()), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{number:05d}.{kind}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
        return out

    def make_pipeline(self, folder: Path) -> DiTPipeline:
        """The pipeline before the trainer sees it: its autoencoder is trained here."""
        pictures = widen(read(fetch(folder), "train")[0][:8192])
        torch.manual_seed(0)
        vae: AutoencoderKL = ae.make_autoencoder((16, 32), 4, SIZE).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        ae.train(vae, AUTOENCODER, pictures, pictures[:0], folder / "autoencoder.pt", loss_of=ae.psnr_loss)
        # DiTPipeline knows no shift.
        scale = float(1.0 / ae.encode(vae, pictures).std())
        vae.register_to_config(shift_factor=None, scaling_factor=scale)
        torch.manual_seed(0)
        transformer = diffusion.make_transformer(classes=len(NAMES), side=SIZE // 2, channels=4, layers=5, patch=2)
        return DiTPipeline(transformer, vae, diffusion.make_scheduler())  # pyright: ignore[reportArgumentType]

    def export(self, trained: Path, out: Path, folder: Path) -> None:
        """The trained pipeline with weights in float16 and the names of its classes."""
        export.copy_pipeline(trained, out, ("transformer", "vae"))
        # save_pretrained leaves the names out; from_pretrained reads them here.
        index = json.loads((out / "model_index.json").read_text(encoding="utf-8"))
        index["id2label"] = dict(enumerate(NAMES))
        (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        entries = [{"caption": name, "also": []} for name in NAMES]
        (out / "captions.json").write_text(json.dumps(entries, indent=0) + "\n", encoding="utf-8")

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """See :mod:`training.evaluate_fashion`."""
        from training.evaluate_fashion import evaluate

        return evaluate(out, folder)

    def write_card(self, out: Path, record: dict[str, Any]) -> None:
        """See :mod:`training.card_fashion`."""
        from training.card_fashion import write

        write(out, record)

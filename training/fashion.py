"""``fashion-dit``: classes of clothes that the model draws anew, trained on Fashion-MNIST.

With 60,000 pictures a small model cannot learn them by heart, and the test pictures say how near to the training
pictures new ones are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from diffusers import (
    AutoencoderKL,  # pyright: ignore[reportPrivateImportUsage]
    DiTPipeline,  # pyright: ignore[reportPrivateImportUsage]
)

from training import autoencoder as ae
from training import card_fashion, diffusion, evaluate_fashion, export, loop
from training.fashion_data import NAMES, SIZE, fetch, read, widen

AUTOENCODER = loop.Plan(steps=600, batch=32, rate=3e-3, warmup=30, cooldown=0.6, average=0.98)


class FashionDiT:
    """``fashion-dit``: a ``DiTPipeline`` of 64 image tokens."""

    image_tokens = 64
    names = NAMES
    settings: dict[str, Any] = {  # noqa: RUF012
        "resolution": SIZE,
        "train_batch_size": 32,
        "max_train_steps": 1800,
        "learning_rate": 1.5e-3,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 100,
        "optimizer_args": {"betas": [0.9, 0.99], "weight_decay": 0.0},
        "ema_decay": 0.99,
        "proportion_empty_prompts": 0.1,
        "checkpointing_steps": 100,
        "checkpoints_total_limit": 2,
    }

    def write_data(self, folder: Path) -> Path:
        """The training data as a table of the library ``datasets``; returns its folder."""
        out = folder / "data"
        if not (out / "dataset_info.json").exists():
            pictures, labels = self.pictures(folder)
            features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
            table = datasets.Dataset.from_dict({"image": list(pictures), "label": labels}, features=features)
            # The file that ends a table is written last.
            table.save_to_disk(str(out))
        return out

    def pictures(self, folder: Path) -> tuple[Sequence[np.ndarray] | np.ndarray, Sequence[int] | np.ndarray]:
        """The training pictures, (h, w, 3) ``uint8``, and their classes."""
        pictures, labels = read(fetch(folder), "train")
        return widen(pictures), labels

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
        index["id2label"] = dict(enumerate(self.names))
        (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        entries = [{"caption": name, "also": []} for name in self.names]
        (out / "captions.json").write_text(json.dumps(entries, indent=0) + "\n", encoding="utf-8")

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """See `evaluate_fashion.evaluate`."""
        return evaluate_fashion.evaluate(out, folder)

    def write_card(self, out: Path, record: dict[str, Any]) -> None:
        """See `card_fashion.write`."""
        card_fashion.write(out, record)

"""What all model cards say: every figure is read from the record of the run that made the model."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

MIT = """\
MIT License

Copyright (c) {holder}

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""

DATA_LICENSE = (
    """\
The images this model was trained on are Fluent Emoji (3-D style) by Microsoft, redistributed by the npm
package {package} {version} (LobeHub, MIT). The model's weights, its samples
(samples.png) and the reduced training images (thumbnails.png) derive from them. Their licence:

"""
    + MIT.format(holder="Microsoft Corporation.")
    + """
The captions were written for ditmesh and are under ditmesh's licence (Apache-2.0).
"""
)


def facts(out: Path, record: dict[str, Any]) -> dict[str, Any]:
    """What the cards of all models that the trainer trained say of their make-up and training."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((out / name).read_text(encoding="utf-8"))

    config, vae = read("transformer/config.json"), read("vae/config.json")
    scheduler, machine = read("scheduler/scheduler_config.json"), record["machine"]
    parameters = record["parameters"]
    return {
        "name": record["name"],
        "size": record["settings"]["resolution"],
        "tokens": record["image_tokens"],
        "batch": record["settings"]["train_batch_size"],
        "tr_steps": record["training"]["steps"],
        "tr_minutes": record["training"]["minutes"],
        "machine": f"{machine['processor']} CPU, {machine['threads']} thread(s), float32, torch {machine['torch']}",
        "notes": "".join("\n" + textwrap.fill(note, 108) + "\n" for note in record["notes"]),
        "megabytes": sum(file.stat().st_size for file in out.rglob("*.safetensors")) / 1e6,
        **{f"{name}_m": count / 1e6 for name, count in parameters.items()},
        "layers": config["num_layers"],
        "heads": config["num_attention_heads"],
        "head_dim": config["attention_head_dim"],
        "width": config["num_attention_heads"] * config["attention_head_dim"],
        "patch": config["patch_size"],
        "latent_channels": vae["latent_channels"],
        "scheduler": scheduler["_class_name"],
        "prediction": scheduler.get("prediction_type"),
    }

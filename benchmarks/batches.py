"""More ranks and larger batches: which rule for the learning rate reaches the loss of one rank, over the same samples.

    python benchmarks/batches.py --json out.json             # a table: 1, 2 and 4 ranks, three rules
    python benchmarks/batches.py --ranks 1 2 --samples 4800  # a short run

The transformer of fashion-dit is trained from random weights on Fashion-MNIST with ``data`` on 1, 2 and 4 ranks, each
with the same samples a step, so that the global batch grows with the ranks and the steps become fewer. The learning
rate stays (``no``), grows with the global batch (``linear``; Goyal et al. 2017, arXiv:1706.02677) or with its
root (``sqrt``; Malladi et al. 2022, arXiv:2205.10287, for Adam); on one rank the three are the same.
It reports the held-out loss, and the share of images that the classifier beside fashion-dit takes for their class. All
ranks share the cores of one host: seconds say nothing of speed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import yaml
from PIL import Image

from harness import command_line, show_table, write_figures
from machine import describe_machine

# The rate on one rank, and by which root of their number a rule multiplies it on several.
RATE = 1e-3
ROOTS = {"no": 0.0, "sqrt": 0.5, "linear": 1.0}

# Images that are not trained on; the loss of 64 of them is measured.
HELD = 256
# Images of a class, and steps and guidance of each.
DRAWN, DRAW_STEPS, GUIDANCE = 10, 10, 2.0


def data_of(folder: Path, count: int) -> None:
    """Fashion-MNIST as a tar."""
    from training.fashion_data import fetch, read, widen

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ditmesh-benchmarks"
    pictures, labels = read(fetch(cache), "train")
    pictures = widen(pictures[:count])
    (folder / "train").mkdir()
    with tarfile.open(folder / "train" / "0.tar", "w") as tar:
        for number in range(count):
            buffer = io.BytesIO()
            Image.fromarray(pictures[number]).save(buffer, "PNG")
            for kind, content in (("png", buffer.getvalue()), ("cls", str(int(labels[number])).encode())):
                entry = tarfile.TarInfo(f"{number:06}.{kind}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def recognised(model: Path) -> float:
    """The share of a model's images that the classifier takes for their class."""
    import diffusers
    import numpy as np
    import torch
    from training.evaluate_fashion import in_parts, read_classifier
    from training.fashion_data import narrow

    from ditmesh import zoo

    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    right = 0
    for label in range(10):
        generators = [torch.Generator().manual_seed(100 * label + number) for number in range(DRAWN)]
        more = {"num_inference_steps": DRAW_STEPS, "guidance_scale": GUIDANCE, "output_type": "np"}
        pictures = (np.asarray(pipe([label] * DRAWN, generator=generators, **more).images) * 255).round()
        grey = narrow(pictures.clip(0, 255).astype(np.uint8))
        said = in_parts(read_classifier(zoo.path("fashion-dit")), grey).argmax(1)
        right += int((said == label).sum())
    return right / (10 * DRAWN)


def trained(folder: Path, ranks: int, rule: str, samples: int, batch: int, seed: int) -> dict[str, Any]:
    """The held-out losses and the share of recognised images of one run."""
    from ditmesh.train.config import grouped

    steps, name = samples // (ranks * batch), f"{ranks}-{rule}-{seed}"
    run = {
        "pretrained_model_name_or_path": "fashion-dit",
        "from_scratch": True,
        "seed": seed,
        "parallel": {"data": ranks},
        "train_data_dir": str(folder / "train"),
        "validation_split": HELD / (samples + HELD),
        "validation_steps": max(1, steps // 4),
        "output_dir": str(folder / name),
        "resolution": 32,
        "train_batch_size": batch,
        "max_train_steps": steps,
        "learning_rate": RATE * ranks ** ROOTS[rule],
        "lr_scheduler": "cosine",
        "lr_warmup_steps": steps // 10,
        "checkpointing_steps": steps,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(grouped(run)))
    began = time.perf_counter()
    command = [sys.executable, "-m", "ditmesh", "train", str(file), "--devices", str(ranks), "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    json.loads(done.stdout)
    with (folder / name / "loss.csv").open(newline="") as table:
        rows = [*csv.DictReader(table)]
    held = [float(row["validation_loss"]) for row in rows if row["validation_loss"] not in ("", "nan")]
    shown = recognised(folder / name / "pipeline")
    return {"held_out": held, "recognised": shown, "steps": steps, "whole": time.perf_counter() - began}


def main() -> None:
    """Train and print."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rules", nargs="*", choices=list(ROOTS), default=list(ROOTS))
    parser.add_argument("--samples", type=int, default=9600, help="samples of a run, over all ranks and steps")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step on one rank")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    result = {"machine": describe_machine(), "samples": options.samples, "batch": options.batch, "runs": runs}
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        data_of(folder, options.samples + HELD)
        for seed in options.seeds:
            for ranks in options.ranks:
                # One rank's batch is what every rule begins with.
                for rule in options.rules if ranks > 1 else ["no"]:
                    found = trained(folder, ranks, rule, options.samples, options.batch, seed)
                    runs.append({"ranks": ranks, "scale_lr": rule, "seed": seed, **found})
                    print(f"{ranks} ranks, {rule}, seed {seed}: {found['whole']:.0f} s", file=sys.stderr)
                    write_figures(result, options.json)
    rows = [
        [
            str(one["ranks"]),
            str(one["ranks"] * options.batch),
            "" if one["ranks"] == 1 else one["scale_lr"],
            f"{RATE * one['ranks'] ** ROOTS[one['scale_lr']]:.2g}",
            str(one["steps"]),
            f"{one['held_out'][-1]:.4f}",
            f"{one['recognised']:.0%}",
        ]
        for one in runs
    ]
    columns = ["ranks", "batch", "scale_lr", "rate", "steps", "held-out loss", "recognised"]
    title = f"fashion-dit from scratch, {options.samples} samples, {options.batch} a step on each rank"
    show_table(title, columns, rows, result["machine"], width=130)


if __name__ == "__main__":
    main()

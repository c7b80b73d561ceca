"""Training on two islands over a slow link: synchronous, local SGD, DiLoCo and late gradients, held-out loss and time.

    python benchmarks/islands.py --json out.json            # a table; wants a quiet machine, and root
    python benchmarks/islands.py --steps 600 --rates 200e6  # longer, at one rate
    python benchmarks/islands.py --only "DiLoCo, every 20"  # beside the synchronous run

Two hosts of Linux namespaces (see ``benchmarks/links.py``), one rank with one thread on each, train the transformer of
fashion-dit from random weights on Fashion-MNIST, a model that generalises; the same samples in the same order for every
way. The held-out loss is measured on images that no step has seen, at fixed noise levels. The trained model then draws
`DRAWN` images of every class, from the same seeds for every way, and the classifier beside fashion-dit says how many of
these it takes for their class. Seconds are those of the steps, exchanges included. Rates are of the link, headers
included.
"""

from __future__ import annotations

import csv
import io
import json
import os
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
# Before this folder, which has a script of that name.
sys.path.insert(0, str(Path(__file__).parent.parent))

import yaml
from PIL import Image

from harness import command_line, show_table, write_figures
from machine import describe_machine

PORT = 29700
# Images of a class, and steps and guidance of each.
DRAWN, DRAW_STEPS, GUIDANCE = 10, 10, 2.0
SYNCHRONOUS = "synchronous"
WAYS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {},
    "gradients one step late": {"exchange": "late_gradients"},
    "local SGD, every 20": {"every": 20, "learning_rate": 1.0, "momentum": 0.0},
    "DiLoCo, every 10": {"every": 10},
    "DiLoCo, every 20": {"every": 20},
    "DiLoCo, every 50": {"every": 50},
    "DiLoCo, every 20, int8": {"every": 20, "compress": "int8"},
    "DiLoCo, every 20, start 40": {"every": 20, "start": 40},
}


def data_of(folder: Path, count: int, held: int) -> None:
    """Fashion-MNIST as two tars: pictures to train on, and pictures to measure on."""
    from training.fashion_data import fetch, read, widen

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ditmesh-benchmarks"
    pictures, labels = read(fetch(cache), "train")
    pictures = widen(pictures[: count + held])
    for name, numbers in (("train", range(count)), ("held", range(count, count + held))):
        (folder / name).mkdir()
        with tarfile.open(folder / name / "0.tar", "w") as tar:
            for number in numbers:
                buffer = io.BytesIO()
                Image.fromarray(pictures[number]).save(buffer, "PNG")
                for kind, content in (("png", buffer.getvalue()), ("cls", str(int(labels[number])).encode())):
                    entry = tarfile.TarInfo(f"{number:06}.{kind}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def trained(hosts: Any, folder: Path, name: str, turn: int, steps: int, batch: int) -> dict[str, Any]:
    """The curve, seconds and bytes of one way."""
    way = {**WAYS[name], **({"start": steps} if name == SYNCHRONOUS else {})}
    out = folder / f"out-{turn}"
    run = {
        "pretrained_model_name_or_path": "fashion-dit",
        "from_scratch": True,
        "train_data_dir": str(folder / "train"),
        "validation_data_dir": str(folder / "held"),
        "validation_samples": 256,
        "validation_steps": max(1, steps // 4),
        "output_dir": str(out),
        "resolution": 32,
        "train_batch_size": batch,
        "max_train_steps": steps,
        "learning_rate": 1e-3,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": steps // 10,
        "checkpointing_steps": steps,
        "islands": {"count": 2, "meet": f"{hosts[0].address}:{PORT + turn}", **way},
    }
    file = folder / f"run-{turn}.yaml"
    file.write_text(yaml.safe_dump(run))
    paths = os.pathsep.join([str(Path(__file__).parent.parent / "src"), os.environ.get("PYTHONPATH", "")])
    extra = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, "-m", "ditmesh", "train", str(file), "--devices", "1", "--threads", "1", "--json"]
    began, logs, told, started = time.perf_counter(), [], [], []
    for index, host in enumerate(hosts):
        logs.append((folder / f"log-{turn}-{index}").open("w+"))
        told.append((folder / f"out-{turn}-{index}.json").open("w+"))
        more = [*command, "--set", f"islands.index={index}"]
        started.append(host.start(more, extra=extra, stdout=told[-1], stderr=logs[-1]))
    codes = [one.wait() for one in started]
    if any(codes):
        for log in logs:
            log.seek(0)
            print(log.read()[-2000:], file=sys.stderr)
        raise SystemExit(f"{name}: an island has failed")
    with (out / "loss.csv").open(newline="") as table:
        rows = [*csv.DictReader(table)]
    held = [float(row["validation_loss"]) for row in rows if row["validation_loss"] not in ("", "nan")]
    # The first step makes connections.
    seconds = [float(row["seconds"]) for row in rows[1:]]
    told[0].seek(0)
    with (out / "islands.csv").open(newline="") as table:
        outer = [*csv.DictReader(table)]
    return {
        "held_out": held,
        "seconds": sum(seconds),
        "step": statistics.median(seconds),
        "sent": json.load(told[0])["sent"],
        "agreement": [float(row["agreement"]) for row in outer],
        "recognised": recognised(out / "pipeline"),
        "whole": time.perf_counter() - began,
    }


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


def main() -> None:
    """Measure and print."""
    from support.hosts import hosts

    parser = command_line(__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=[1e9, 200e6], help="bits a second")
    parser.add_argument("--only", nargs="*", choices=list(WAYS), help="ways beside the synchronous one")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step on one island")
    options = parser.parse_args()
    names = [name for name in WAYS if name == SYNCHRONOUS or not options.only or name in options.only]
    result: dict[str, Any] = {"machine": describe_machine(), "steps": options.steps, "batch": options.batch}
    with tempfile.TemporaryDirectory() as room, hosts(2, folder=room) as pair:
        folder = Path(room)
        data_of(folder, 2 * options.steps * options.batch, 256)
        turn = 0
        for rate in options.rates:
            pair.set_rate(rate)
            found = result[f"{rate:g}"] = {}
            for name in names:
                found[name] = trained(pair, folder, name, turn, options.steps, options.batch)
                turn += 1
                print(f"{rate / 1e6:g} Mb/s, {name}: {found[name]['whole']:.0f} s", file=sys.stderr)
                write_figures(result, options.json)
            samples = 2 * options.batch * (options.steps - 1)
            rows = [
                [
                    name,
                    *(f"{loss:.4f}" for loss in one["held_out"]),
                    f"{one['recognised']:.0%}",
                    f"{samples / one['seconds']:.1f}",
                    f"{one['sent'] / 1e6:.1f}",
                ]
                for name, one in found.items()
            ]
            parts = len(next(iter(found.values()))["held_out"])
            columns = ["", *(f"held-out {number}/{parts}" for number in range(1, parts + 1)), "recognised"]
            columns += ["samples/s", "MB sent"]
            title = (
                f"fashion-dit from scratch, {options.steps} steps of 2 x {options.batch} samples, {rate / 1e6:g} Mb/s"
            )
            show_table(title, columns, rows, result["machine"], width=130)


if __name__ == "__main__":
    main()

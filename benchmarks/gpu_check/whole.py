"""Parts with whole models: rings' rounding, true sizes beside their forecast, embedded models' images, the commands."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
from basics import DEVICE, ON_GPU, Row, Skipped, digest, ditmesh, guarded, milliseconds, moved, relative_error, wait
from messages import carrying, must_be_staged
from several import OVER_GROUP, same_on_ranks, world_of
from single import _launches, streamed
from torch import Tensor
from workers import Workers

# --- rounding of ring attention ------------------------------------------------------------------------------------

# Of one kernel's error: what docs/lab/gpus.md says of parts that come rounded from their kernel, with some room.
ROUNDED = 1.4


def rounding(quick: bool) -> Iterator[Row]:
    """Errors of ring attention to float64, in units of one kernel's own, by the dtype in which parts are computed."""
    ditmesh()
    from ditmesh.attention.kernels import attend_with_lse
    from support.ring_rounding import CASES, rms_error, round_the_ring

    def check(name: str, dtype: torch.dtype, ranks: int) -> Row:
        case = CASES[name]
        (q, k, v), mask = case.tensors(dtype, DEVICE.type)
        truth = attend_with_lse(q.double(), k.double(), v.double(), mask)[0]
        alone = rms_error(attend_with_lse(q, k, v, mask)[0], truth)
        found: Row = {"one kernel": alone}
        for parts in dict.fromkeys((dtype, torch.float16, torch.float32)):
            value = round_the_ring(case, dtype, ranks, DEVICE.type, parts=parts)
            found[f"{parts} parts".removeprefix("torch.")] = rms_error(value, truth) / alone
        return {**found, "ok": found[f"{dtype} parts".removeprefix("torch.")] <= ROUNDED}

    for dtype in (torch.bfloat16, torch.float16):
        for name in list(CASES)[:1] if quick else CASES:
            for ranks in (8,) if quick else (2, 4, 8):
                row = {"case": name, "dtype": str(dtype).removeprefix("torch."), "ranks": ranks}
                yield guarded(row, partial(check, name, dtype, ranks))
    yield from _costs(quick)


def _costs(quick: bool) -> Iterator[Row]:
    """Milliseconds of a part of a ring of eight at FLUX.1's size with its merge, by the dtype of the part."""
    from ditmesh.attention.kernels import attend_with_lse, merge_

    heads, queries, width = (24, 576, 128) if ON_GPU and not quick else (2, 64, 64)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, queries, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    total = torch.zeros(1, heads, queries, width, device=DEVICE), torch.zeros(1, heads, queries, device=DEVICE)
    for parts in (torch.bfloat16, torch.float16, torch.float32):

        def part(parts: torch.dtype = parts) -> None:
            merge_(*total, *attend_with_lse(q.to(parts), k.to(parts), v.to(parts)))

        name = str(parts).removeprefix("torch.")
        yield guarded(
            {"case": f"a part of {queries} tokens with its merge", "dtype": name},
            lambda part=part: {"ms": milliseconds(part, 3 if quick else 50), **_launches(part), "ok": True},
        )


# --- true sizes ----------------------------------------------------------------------------------------------------

# Models of the catalogue; in a rehearsal two of them, with one block.
SIZES = ("flux.1-dev", "sd3.5-large", "z-image", "wan-1.3b", "pixart-sigma", "cogvideox-2b")


def true_size(known: Any, quick: bool) -> torch.nn.Module:
    """A transformer of the catalogue with random weights, in the dtype that from_pretrained gives each of them."""
    import diffusers

    settings = known.config
    if quick or not ON_GPU:
        settings = {**settings, "num_layers": 1, "num_single_layers": 1}
    kind = getattr(diffusers, known.transformer)
    with torch.device(DEVICE):
        torch.manual_seed(0)
        model: torch.nn.Module = kind.from_config(settings)
    exact = tuple(getattr(kind, "_keep_in_fp32_modules", None) or ())
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    for path, parameter in (*model.named_parameters(), *model.named_buffers()):
        if parameter.dtype == torch.float32 and not any(part in path.split(".") for part in exact):
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def sizes(quick: bool) -> Iterator[Row]:
    """A denoising step at true sizes with random weights: time and memory beside those of diffusers and forecasts."""
    package = ditmesh()

    from ditmesh.errors import InputError
    from ditmesh.lab.plan.hardware import machine, this_device
    from ditmesh.lab.plan.roofline import predict
    from ditmesh.layout import layout_of
    from ditmesh.layout.conventions import Conventions, Size, call_variants
    from ditmesh.memory.catalogue import shapes
    from ditmesh.memory.sizes import Workload
    from ditmesh.memory.walk import denoise

    def check(name: str) -> Row:
        known = shapes()[name]
        frames, rows, cols = known.token_grid(*known.size, known.num_frames)
        if quick or not ON_GPU:
            frames, rows, cols = 1, 4, 4
        job = Workload(rows, cols, frames, known.text, branches=1)
        found: Row = {"tokens": f"{frames * rows * cols} + {known.text}"}
        if ON_GPU and not quick:
            # A GPU that is not in the table of parts has no forecast of its time.
            with suppress(InputError):
                here, _ = this_device()
                given = known.transformer, known.config, package.ParallelConfig(), job, machine(here, 1)
                asked = predict(*given, torch.bfloat16)
                found["foreseen, ms"] = asked.first_step * 1e3
        model = true_size(known, quick)
        found["billion weights"] = sum(one.numel() for one in model.parameters()) / 1e9
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        if ON_GPU and not quick:
            settings = {key: value for key, value in model.config.items() if not key.startswith("_")}
            needs = denoise(known.transformer, settings, layout_of(model), package.ParallelConfig(), job, dtype)
            found["foreseen, MiB"] = needs.activations / 2**20
        reasons = []
        for way in sorted(call_variants(model), key=lambda way: way.optional):
            make = Conventions(model, way)
            make.device, make.dtype = torch.device("cpu"), torch.float32
            try:
                given = moved(make.inputs(Size(rows, cols, known.text, 1, frames)), dtype)
                with torch.no_grad():
                    truth = model(**given)[0]
                break
            except Exception as error:
                reasons.append(str(error))
        else:
            raise Skipped(f"no way to call it was found: {reasons[0][:160]}")

        @torch.no_grad()
        def forward() -> Any:
            return model(**given)[0]

        runs = 3 if quick or not ON_GPU else 5 if frames > 1 else 10
        before = milliseconds(forward, runs)
        with package.parallelized(model, {}):
            value = forward()
            wait()
            base = 0
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
            took = milliseconds(forward, runs)
            if ON_GPU:
                found["taken, MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
        pairs = zip(*((one,) if isinstance(one, Tensor) else one for one in (value, truth)), strict=True)
        error = max(relative_error(one, other) for one, other in pairs)
        found |= {"diffusers, ms": before, "ditmesh, ms": took, "over diffusers": took / before, "error": error}
        # The same kernels on the same numbers.
        return {**found, "ok": error < 1e-2}

    for name in SIZES[-2:] if quick else SIZES:
        yield guarded({"model": name}, partial(check, name))
        if ON_GPU:
            torch.cuda.empty_cache()


# --- images of the embedded models ---------------------------------------------------------------------------------

STALE = {"warmup": "fixed(2)"}
IMAGES: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "patches=2": {"patches": 2, **STALE},
    "ulysses": {"ulysses": 2},
    "ring": {"ring": 2},
    "tensor": {"tensor": 2},
    "ulysses x ring": {"ulysses": 2, "ring": 2},
    "displaced": {"ring": 2, "exchange": "displaced", **STALE},
    "displaced, linear": {"ring": 2, "exchange": "displaced", "predict": "linear", **STALE},
    "displaced, int4": {"ring": 2, "exchange": "displaced", "compress": "int4", **STALE},
    "pipe": {"pipe": 2, **STALE},
}
# What does not run a step exactly, and so has another image; in decibels the least that is right.
INEXACT = 15.0
LEAST = {"float32": 60.0, "bfloat16": 25.0}


@torch.no_grad()
def one_image(name: str, dtype: str, config: dict[str, Any], staged: bool) -> Iterator[Row]:
    """On a rank: an image or video of an embedded model, over ranks and by diffusers, both on the device."""
    package = ditmesh()
    import diffusers

    from ditmesh import zoo

    facts, folder = zoo.EMBEDDED[name], zoo.path(name)
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder).to(DEVICE, getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)

    def drawn() -> tuple[Tensor, float]:
        given: dict[str, Any] = {"num_inference_steps": facts.steps, "guidance_scale": facts.guidance_scale}
        given |= {"generator": torch.Generator().manual_seed(0), "output_type": "pt"}
        given |= {"max_sequence_length": facts.max_sequence_length}
        given |= {"height": facts.size, "width": facts.size, **({"num_frames": facts.frames} if facts.frames else {})}
        wait()
        began = time.perf_counter()
        made = pipe("a red fox", **given)
        wait()
        seconds = time.perf_counter() - began
        return (made.frames if facts.frames else made.images).float(), seconds

    drawn()
    truth, before = drawn()
    with carrying(staged), package.parallelized(pipe, {**config, **OVER_GROUP}):
        drawn()
        value, seconds = drawn()
    apart = float((value - truth).square().mean())
    decibels = 99.0 if apart == 0 else min(99.0, -10 * float(torch.tensor(apart).log10()))
    yield {
        "minus dB": -decibels,
        "same bits": torch.equal(value, truth),
        "spread": float(truth.std()),
        "diffusers, s": before,
        "seconds": seconds,
        "digest": digest(value),
    }


def images(workers: Workers, quick: bool) -> Iterator[Row]:
    """Whole images and videos of the embedded models, on one and more ranks, with diffusers on the same device."""
    ditmesh()
    from ditmesh import zoo

    there = [
        name for name in ("emoji-sd3", "emoji-flux", "emoji-wan") if (zoo.path(name) / "model_index.json").exists()
    ]
    if not there:
        raise Skipped("no embedded model is here")
    staged = must_be_staged(workers)
    for name in there[:1] if quick else there:
        for dtype in ("float32",) if quick else LEAST:
            for label in ("1 rank", "ulysses") if quick else IMAGES:
                config = IMAGES[label]
                least = INEXACT if "warmup" in config else LEAST[dtype]

                def check(
                    name: str = name, dtype: str = dtype, config: dict[str, Any] = config, least: float = least
                ) -> Row:
                    found = workers.run("one_image", name, dtype, config, staged, world=world_of(config), limit=60)
                    row = same_on_ranks(found, **{"minus dB": -least})
                    return {**row, "dB": -row.pop("minus dB"), "ok": row["ok"] and row["spread"] > 0.05}

                yield guarded({"model": name, "dtype": dtype, "strategy": label}, check)


# --- the commands --------------------------------------------------------------------------------------------------


def commands(workers: Workers, quick: bool) -> Iterator[Row]:
    """`ditmesh` as it is typed: generate and train beside the CPU; replay, verify and doctor on the device."""
    yield from workers.stream("typed", quick)


def typed(quick: bool) -> Iterator[Row]:
    """In one worker, which is in no group."""
    ditmesh()
    from ditmesh import zoo

    if not (zoo.path("emoji-sd3") / "model_index.json").exists():
        raise Skipped("no embedded model is here")
    # Ranks are told apart for NCCL; a command's are not.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NCCL_")}

    def ditmesh_(*words: Any) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "ditmesh", *map(str, words)],
            env={**environment, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        if ended.returncode:
            said = " ".join(ended.stderr.split())
            raise AssertionError(f"exit code {ended.returncode}: {said[-250:]}")
        return ended.stdout

    with TemporaryDirectory() as folder:
        root = Path(folder)

        def profile() -> Row:
            ditmesh_("doctor", "--device", DEVICE.type, "--devices", "1", "--save", root / "profile.yaml")
            text = (root / "profile.yaml").read_text(encoding="utf-8").split("link:")[0]
            return {"said": " ".join(text.split()), "ok": True}

        def generated(device: str, *more: str) -> Row:
            out = Path(mkdtemp(dir=root))
            began = time.perf_counter()
            fixed = ("--device", device, "--dtype", "float32", "--seed", "3", "--out", out)
            ditmesh_("generate", "a red fox", *fixed, *more)
            (image,) = out.glob("*.png")
            return {"image": _pixels(image), "path": image, "seconds": time.perf_counter() - began}

        def compared() -> Row:
            with ThreadPoolExecutor() as both:
                here, cpu = both.map(generated, (DEVICE.type, "cpu"))
            levels = (here["image"].int() - cpu["image"].int()).abs()
            said = f"largest difference from the CPU's image: {int(levels.max())} of 255 levels"
            return {"seconds": here["seconds"], "said": said, "ok": float(levels.float().mean()) < 2}

        def again() -> Row:
            made = generated(DEVICE.type, "--reproducible")
            said = json.loads(
                ditmesh_("replay", made["path"], "--out", root / "replayed", "--device", DEVICE.type, "--json")
            )
            return {"said": json.dumps(said)[:200], "ok": True}

        def trained(more: dict[str, Any]) -> Row:
            data = root / "data"
            data.mkdir(exist_ok=True)
            if not any(data.iterdir()):
                for number, color in enumerate(((200, 40, 40), (30, 160, 60), (40, 60, 220), (240, 200, 30))):
                    _drawn(data / f"{number}.png", color)
                    (data / f"{number}.txt").write_text("a red fox", encoding="utf-8")

            def losses(device: str) -> list[float]:
                from ditmesh.train.config import grouped

                out = Path(mkdtemp(dir=root))
                settings = {
                    "pretrained_model_name_or_path": "emoji-sd3",
                    "train_data_dir": str(data),
                    "output_dir": str(out / "run"),
                    "resolution": 64,
                    "max_sequence_length": 16,
                    "max_train_steps": 3 if quick else 5,
                    "train_batch_size": 2,
                    "learning_rate": 1e-3,
                    "seed": 0,
                    **more,
                }
                (out / "run.yaml").write_text(json.dumps(grouped(settings)), encoding="utf-8")
                ditmesh_("train", out / "run.yaml", "--device", device)
                with (out / "run" / "loss.csv").open(encoding="utf-8") as file:
                    return [float(row["loss"]) for row in csv.DictReader(file)]

            with ThreadPoolExecutor() as both:
                here, cpu = both.map(losses, (DEVICE.type, "cpu"))
            apart = max(abs(a - b) / abs(b) for a, b in zip(here, cpu, strict=True))
            return {"said": f"losses {here[0]:.4f} to {here[-1]:.4f}", "error": apart, "ok": apart < 0.1}

        def like(*more: str) -> Row:
            """The image by other settings on this device."""
            with ThreadPoolExecutor() as both:
                plain, other = both.map(lambda words: generated(DEVICE.type, *words), ((), more))
            levels = (plain["image"].int() - other["image"].int()).abs()
            said = f"largest difference: {int(levels.max())} of 255 levels"
            return {"seconds": other["seconds"], "said": said, "ok": float(levels.float().mean()) < 2}

        def verified() -> Row:
            said = ditmesh_("verify", "patches=2", "--steps", "2", "--device", DEVICE.type)
            return {"said": said[-200:], "ok": True}

        rows: dict[str, Callable[[], Row]] = {
            "generate, against the CPU": compared,
            "train, LoRA": partial(trained, {"lora": {"rank": 4}}),
            "train, all weights in bf16": partial(trained, {"mixed_precision": "bf16", "gradient_checkpointing": True}),
            **{
                f"generate --offload {kind}": partial(like, "--offload", kind)
                for kind in ("model", "group", "sequential")
                if ON_GPU
            },
            "generate --compile": partial(like, "--set", f"compile={'inductor' if ON_GPU else 'eager'}"),
            "generate --reproducible, replay": again,
            "verify": verified,
            "doctor --save": profile,
        }
        wanted = list(rows.items())[: 2 if quick else None]
        # Most of a command is its start.
        with ThreadPoolExecutor(4 if ON_GPU else 1) as several:
            yield from several.map(lambda row: guarded({"command": row[0]}, row[1]), wanted)


def _pixels(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy())


def _drawn(path: Path, color: tuple[int, int, int]) -> None:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((12, 12, 52, 52), fill=color)
    image.save(path)


FUNCTIONS: dict[str, Callable[..., Iterator[Row]]] = {
    "rounding": rounding,
    "sizes": sizes,
    "one_image": one_image,
    "typed": typed,
}


PARTS = {
    "rounding": (streamed("rounding", rounding), 45),
    "sizes": (streamed("sizes", sizes), 120),
    "images": (images, 120),
    "commands": (commands, 180),
}

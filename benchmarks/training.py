"""Training: the same curve on any ranks, memory of a long sequence, samples a second.

    python benchmarks/training.py                           # all of it; wants a quiet machine
    python benchmarks/training.py curves --reproducible     # one part
    python benchmarks/training.py speed --repeats 9 --json out.json

The model is the embedded emoji-sd3 (curves), or one of its make-up with fresh weights and positions for larger
pictures. Ranks have one thread each; data are pictures that come with the package.

*curves*: the losses of the same run on several meshes, step by step, as the largest relative difference to one rank.
*memory*: what one optimizer step adds to a process that holds the model: its largest resident memory during the step
(VmHWM, reset before it) less its resident memory before it, so activations, gradients, the optimizer's state and
buffers of messages all count. Each mesh has fresh processes. Linux only.
*speed*: contenders take turns, so that noise falls on all alike; a ratio compares the samples a second of one turn, and
the median of the ratios counts. Other work on the machine hardly changes processor seconds. accelerate's loop is that
of diffusers' scripts, with latents and captions encoded before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from rich.console import Console
from rich.table import Table

from harness import write_figures
from machine import describe_machine, resident

# Axes of `ParallelConfig` and other settings of the run, by the name of a line.
CURVES: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "ulysses=2": {"parallel": {"ulysses": 2}},
    "data=2": {"parallel": {"data": 2}},
    "data=2, ulysses=2": {"parallel": {"data": 2, "ulysses": 2}},
    "data=2, ddp_bf16": {"parallel": {"data": 2}, "sharding": "ddp_bf16"},
}
MEMORY: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "1 rank, gradient_checkpointing": {"gradient_checkpointing": True},
    "1 rank, mixed_precision: bf16": {"mixed_precision": "bf16"},
    "1 rank, 4 samples in 4 forwards": {"global_batch_size": 4},
    "1 rank, 4 samples in a forward": {"global_batch_size": 4, "train_batch_size": 4},
    "ulysses=2": {"parallel": {"ulysses": 2}},
    "ulysses=2, gradient_checkpointing": {"parallel": {"ulysses": 2}, "gradient_checkpointing": True},
}
ACCELERATE = "accelerate's DDP, 2 ranks"
SPEED: dict[str, dict[str, Any] | None] = {
    "1 rank": {},
    "data=2": {"parallel": {"data": 2}},
    "data=2, ddp": {"parallel": {"data": 2}, "sharding": "ddp"},
    "data=2, none": {"parallel": {"data": 2}, "sharding": "none"},
    "data=2, forwards of 1": {"parallel": {"data": 2}, "train_batch_size": 1},
    "data=2, mixed_precision: bf16": {"parallel": {"data": 2}, "mixed_precision": "bf16"},
    "data=2, gradient_checkpointing": {"parallel": {"data": 2}, "gradient_checkpointing": True},
    "ulysses=2": {"parallel": {"ulysses": 2}},
    ACCELERATE: None,
}
MICRO, PER_STEP = 4, 8  # samples of a forward, and of a step over all ranks
# The autoencoder's latents have a quarter of the pixels along a side, and every latent is a token.
SIDES = {"curves": 64, "memory": 256, "speed": 128}


def ranks_of(settings: dict[str, Any] | None) -> int:
    """How many ranks a line has."""
    import ditmesh

    return 2 if settings is None else ditmesh.ParallelConfig(**settings.get("parallel", {})).world_size


def larger_model(folder: Path) -> Path:
    """Save emoji-sd3 with a fresh transformer that has positions for up to 64 x 64 tokens."""
    import diffusers
    import torch

    import ditmesh.zoo

    pipe = diffusers.DiffusionPipeline.from_pretrained(ditmesh.zoo.path("emoji-sd3"))
    torch.manual_seed(0)
    config = {**pipe.transformer.config, "sample_size": 64, "pos_embed_max_size": 64}
    pipe.transformer = type(pipe.transformer).from_config(config)
    pipe.save_pretrained(folder)
    return folder


def run_of(part: str, model: str, work: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A training run on pictures that are made at its size once."""
    from support.train import folder_of

    side, data = SIDES[part], work / f"data-{SIDES[part]}"
    if not data.exists():
        folder_of(data, 32, side)
    return {
        "pretrained_model_name_or_path": model,
        "train_data_dir": str(data),
        "output_dir": tempfile.mkdtemp(dir=work),
        "cache_dir": str(work / "cache"),
        "resolution": side,
        "max_sequence_length": 16,
        "checkpointing_steps": 10**9,
        "checkpoints_total_limit": 1,
        **settings,
        **more,
    }


# --- on a rank -----------------------------------------------------------------------------------------------------


@contextmanager
def trainer_of(given: Any) -> Iterator[Any]:
    """A trainer of a run: of its configuration, or of settings without groups."""
    from diffusers import DiffusionPipeline

    from ditmesh.generate.model_info import find_model
    from ditmesh.train.config import TrainConfig, grouped
    from ditmesh.train.reinforce.trainer import ReinforcementTrainer
    from ditmesh.train.trainer import Trainer

    config = TrainConfig.read(grouped(given) if isinstance(given, dict) else given)
    pipe = DiffusionPipeline.from_pretrained(find_model(config.pretrained_model_name_or_path).files)
    pipe.set_progress_bar_config(disable=True)
    kind = Trainer if config.reinforce is None else ReinforcementTrainer
    with kind(config, pipe) as trainer:
        yield trainer


def losses(given: dict[str, Any]) -> list[float]:
    """Losses of a run's steps."""
    with trainer_of(given) as trainer:
        found = trainer.run().losses
    return [found[step] for step in sorted(found)]


def memory_of_a_step(given: dict[str, Any]) -> int:
    """Bytes that one optimizer step adds to this process at its peak, when all samples are encoded."""
    found: list[int] = []
    with trainer_of(given) as trainer:
        trainer.data.encoded.fill_cache(trainer.mesh)
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        # The peak begins anew.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        # It is called after the step, before anything is saved.
        trainer.run(report=lambda _: found.append(resident("VmHWM") - before))
    return found[0]


class Ends(list[tuple[float, float]]):
    """When steps ended: by the clock, and in this process's processor seconds."""

    def note(self, *_: Any) -> None:
        """A step has ended."""
        self.append((time.perf_counter(), time.process_time()))

    def rate(self, samples: int) -> tuple[float, float]:
        """Samples a second, and processor seconds a sample, of steps of so many; the first step is left out."""
        seconds, busy = (last - first for first, last in zip(self[0], self[-1], strict=True))
        return samples * (len(self) - 1) / seconds, busy / samples / (len(self) - 1)


def rate(given: Any) -> tuple[float, float]:
    """Samples a second of a run, and this rank's processor seconds a sample."""
    ends = Ends()
    with trainer_of(given) as trainer:
        trainer.run(report=ends.note)
    return ends.rate(trainer.config.batch)


def rate_of_accelerate(given: dict[str, Any]) -> tuple[float, float]:
    """The same run in accelerate's hands, as diffusers' scripts train SD3."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from diffusers import DiffusionPipeline
    from diffusers.training_utils import compute_density_for_timestep_sampling

    from ditmesh.train.config import TrainConfig, grouped
    from ditmesh.train.data.samples import pixels
    from ditmesh.train.data.sources import read_samples

    size, rank = dist.get_world_size(), dist.get_rank()
    # It takes the process group that is there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == size
    config = TrainConfig.read(grouped(given))
    pipe = DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    torch.manual_seed(rank)
    samples = read_samples(config.data, "text").good
    with torch.no_grad():
        pictures = [pixels(one.picture(), (config.data.resolution, config.data.resolution)) for one in samples]
        latents = torch.cat([pipe.vae.encode(one[None]).latent_dist.sample() for one in pictures])
        latents = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
        said: list[Any] = [one.words for one in samples]
        text, _, pooled, _ = pipe.encode_prompt(
            said, None, None, do_classifier_free_guidance=False, max_sequence_length=config.data.max_sequence_length
        )
    data = torch.utils.data.TensorDataset(latents, text, pooled)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=config.optimizer.train_batch_size, shuffle=True)
    model: Any = pipe.transformer.train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config.optimizer.learning_rate, weight_decay=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler, ends, batches = pipe.scheduler, Ends(), iter(())
    while len(ends) < (config.optimizer.max_train_steps or 0):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            continue
        clean, said_text, said_pooled = batch
        noise = torch.randn_like(clean)
        density = compute_density_for_timestep_sampling("logit_normal", len(clean), 0.0, 1.0)
        places = (density * len(scheduler.timesteps)).long()
        levels = scheduler.sigmas[places].view(-1, 1, 1, 1)
        prediction = model(
            hidden_states=(1 - levels) * clean + levels * noise,
            timestep=scheduler.timesteps[places],
            encoder_hidden_states=said_text,
            pooled_projections=said_pooled,
            return_dict=False,
        )[0]
        accelerator.backward((prediction - (noise - clean)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.note()
    accelerator.free_memory()
    return ends.rate(PER_STEP)


# --- the parts -----------------------------------------------------------------------------------------------------


def curves(options: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Losses of `CURVES`, and their largest relative difference to those of one rank."""
    from ditmesh.launch import RankPool

    found: dict[str, list[float]] = {}
    for name, settings in CURVES.items():
        if (options.only and name not in ("1 rank", *options.only)) or (
            options.reproducible and "sharding" in settings
        ):
            continue
        more = {"train_batch_size": 1, "global_batch_size": 4, "from_scratch": True, "learning_rate": 1e-3}
        more |= {
            "max_train_steps": options.steps or 200,
            "parallel": {**settings.get("parallel", {}), "reproducible": options.reproducible},
        }
        given = run_of("curves", "emoji-sd3", work, settings, **more)
        with RankPool(ranks_of(settings), threads=1) as pool:
            found[name] = pool.run(losses, given)[0]
    alone = found["1 rank"]
    differences = {name: max(abs(a / b - 1) for a, b in zip(line, alone, strict=True)) for name, line in found.items()}
    table = Table(title=f"emoji-sd3 from scratch, {len(alone)} steps of 4 samples, float32, one seed")
    for column in ("", "first loss", "last loss", "largest relative difference"):
        table.add_column(column, justify="right" if column else "left")
    for name, line in found.items():
        table.add_row(name, f"{line[0]:.6f}", f"{line[-1]:.6f}", f"{differences[name]:.1e}")
    console.print(table)
    return {"losses": found, "largest relative difference": differences}


def memory(options: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Bytes that a step of `MEMORY` adds, the most of any rank."""
    from ditmesh.launch import RankPool

    model = str(larger_model(work / "model"))
    found: dict[str, int] = {}
    for name, settings in MEMORY.items():
        if options.only and name not in ("1 rank", *options.only):
            continue
        given = run_of("memory", model, work, {"train_batch_size": 1, **settings}, max_train_steps=1)
        with RankPool(ranks_of(settings), threads=1) as pool:
            found[name] = max(pool.run(memory_of_a_step, given))
    table = Table(title="one optimizer step, 4,096 image tokens, one sample if not said, float32, AdamW")
    for column in ("", "MiB a rank adds", "of 1 rank"):
        table.add_column(column, justify="right" if column else "left")
    for name, size in found.items():
        table.add_row(name, f"{size / 2**20:.0f}", f"{size / found['1 rank']:.0%}")
    console.print(table)
    return {"bytes": found}


def speed(options: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Samples a second of `SPEED`, in turns."""
    model = str(larger_model(work / "model"))
    more = {"train_batch_size": MICRO, "global_batch_size": PER_STEP, "max_train_steps": 1 + (options.steps or 5)}
    title = f"emoji-sd3's make-up, 1,024 image tokens, steps of {PER_STEP} samples, one thread a rank"

    def run(settings: dict[str, Any] | None) -> dict[str, Any]:
        return run_of("speed", model, work, {**more, **(settings or {})})

    lines = {name: line for name, line in SPEED.items() if not options.only or name in options.only}
    return in_turns(lines, run, options.repeats, title, console)


def in_turns(
    lines: dict[str, dict[str, Any] | None],
    run: Callable[[dict[str, Any] | None], Any],
    repeats: int,
    title: str,
    console: Console,
) -> dict[str, Any]:
    """Samples a second, and all ranks' processor seconds a sample, of contenders that take turns."""
    from ditmesh.launch import RankPool

    found, busy = ({name: list[float]() for name in lines} for _ in range(2))
    pools = {ranks: RankPool(ranks, threads=1) for ranks in (1, 2)}
    for _ in range(repeats):
        for name, settings in lines.items():
            measured: Callable[..., Any] = rate_of_accelerate if settings is None else rate
            rates, used = zip(*pools[ranks_of(settings)].run(measured, run(settings)), strict=True)
            found[name].append(min(rates))
            busy[name].append(sum(used))
    for pool in pools.values():
        pool.close()
    first, *_, last = found
    table = Table(title=title)
    for column in ("", "samples/s, median", f"of {first}, median", "min", "max", f"of {last}, median", "processor s"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in found.items():
        r = [value / one for value, one in zip(values, found[first], strict=True)]
        against = statistics.median(value / one for value, one in zip(values, found[last], strict=True))
        row = f"{statistics.median(values):.2f}", f"{statistics.median(r):.2f}x", f"{min(r):.2f}", f"{max(r):.2f}"
        table.add_row(name, *row, f"{against:.2f}x", f"{statistics.median(busy[name]):.2f}")
    console.print(table)
    return {"samples a second": found, "processor seconds a sample": busy}


PARTS = {"curves": curves, "memory": memory, "speed": speed}


def measure(parser: argparse.ArgumentParser, parts: dict[str, Callable[..., Any]], write: Callable[..., None]) -> None:
    """Measure the parts that the command line names, and write their figures."""
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="what to measure; all of it by default")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    console = Console(width=120)
    result: dict[str, Any] = {"machine": describe_machine()}
    for name in options.parts or parts:
        with tempfile.TemporaryDirectory(prefix="ditmesh-bench-") as work:
            result[name] = parts[name](options, Path(work), console)
        write(result, options.json)
    console.print(result["machine"]["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of a curve (200), of a turn of speed (5)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of speed")
    parser.add_argument(
        "--only", nargs="+", help="contenders; the first of speed is compared with, and one rank of the others"
    )
    parser.add_argument("--reproducible", action="store_true", help="curves with `reproducible: true`")
    measure(parser, PARTS, write_figures)


if __name__ == "__main__":
    main()

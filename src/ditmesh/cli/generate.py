"""`ditmesh generate`: images and videos from prompts, on N devices."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import ParallelConfig
from ..errors import InputError, RankFailed
from ..launch import launcher, torchrun_rank
from ..report.formatting import count
from ..report.report import Report
from .options import (
    AsJson,
    ConfigFile,
    ConfigOptions,
    Devices,
    InputOptions,
    MemoryLimit,
    Overwrite,
    PictureOptions,
    RankOptions,
    at_least,
    check_offload,
    common_option,
    memory_check,
    picture_option,
    with_groups,
)
from .show import bar, emit
from .values import fetched, parallel_config, picture_job, read_prompts, videos_of

if TYPE_CHECKING:
    from ..generate.job import Generated, PictureJob
    from ..generate.model_info import ModelInfo
    from ..launch import Launcher


# Maximum number of images that are listed when a job is interrupted.
MAX_LISTED = 8

# Fields of receipts that are the same for most images of a job.
SHARED = ("config", "versions", "environment")


@dataclass(frozen=True)
class RunOptions:
    """Options of a run besides those of its images, configuration and ranks."""

    batch: Annotated[
        int | None,
        picture_option(
            help="Generate at most this many images in one call of the pipeline.",
            show_default="64, fewer if they are large",
            callback=at_least(1),
        ),
    ] = None
    config: ConfigFile = None
    memory_limit: MemoryLimit = None
    overwrite: Overwrite = False
    as_json: AsJson = False

    def of_job(self) -> dict[str, Any]:
        """Fields of a job. Raises `InputError`: the limit of memory is none."""
        checked, limit = memory_check(self.memory_limit)
        fields = {"check_memory": checked, "memory_limit": limit, "overwrite": self.overwrite}
        return fields if self.batch is None else fields | {"per_call": self.batch}


Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="Generate an image of each prompt.")]
Model = Annotated[
    str | None,
    common_option(
        "--model",
        "-m",
        help="Load this model: folder or hub id of a diffusers pipeline, or an embedded model.",
        show_default="emoji-sd3",
    ),
]
Out = Annotated[str, common_option("--out", "-o", metavar="DIR", help="Write the PNGs or MP4s into this folder.")]


@with_groups
def generate(
    *,
    prompts: Prompts = None,
    model: Model = None,
    devices: Devices = None,
    pictures: PictureOptions,
    out: Out = "pictures",
    inputs: InputOptions,
    parallel: ConfigOptions,
    ranks: RankOptions,
    run: RunOptions,
) -> None:
    """Generate images or videos from prompts on N devices. Each PNG or MP4 contains the receipt of its generation.

    Existing files are kept, and new ones get a number.

    [bold]Examples[/bold]

    ditmesh generate "a red fox" --devices 4

    ditmesh generate "a red fox, oil painting" --image fox.png --strength 0.6 --lora oil.safetensors:0.8

    ditmesh generate "a red fox runs" --model ./my-wan --devices 4 --frames 81 --fps 16

    ditmesh generate --prompts animals.txt --ulysses 2 --cfg 2 --steps 20 --out animals

    torchrun --nproc-per-node 4 -m ditmesh generate "a red fox" --model ./my-flux

    ditmesh generate "a red fox" --devices 8 --launcher ray
    """
    began, settings = time.perf_counter(), parallel.settings()
    asked = read_prompts(prompts, pictures.prompts_file)
    job, info = picture_job(model, asked, pictures, ranks.timeout, out, **inputs.of_job(), **run.of_job())
    world_size, chosen = parallel_config(devices, run.config, settings, info.heads)
    if torchrun_rank() is not None:
        check_joined(ranks)
    job, kind = _checked(job.changed(config=chosen or "auto"), info, ranks, world_size)
    if prompts and 1 < len(prompts) <= MAX_LISTED and not any(" " in prompt for prompt in prompts):
        # They may be the words of one.
        listed = ", ".join(map(repr, prompts))
        print(f"ditmesh: {len(prompts)} prompts: {listed} (quote a prompt of several words)", file=sys.stderr)
    result = _on_ranks(job, ranks, world_size, kind, began)
    if result is not None:
        emit(result, run.as_json, _say)


def _checked(job: PictureJob, info: ModelInfo, ranks: RankOptions, world_size: int) -> tuple[PictureJob, str]:
    """The job with its dtype, its model's folder and the type of device; `InputError`: it cannot be done here."""
    from ..generate.job import check_job
    from ..generate.run import PRELOAD
    from ..generate.runner import quieten
    from ..media.videos import check_video_library

    ranks.begin(PRELOAD)
    if job.files:
        # The class of pipeline is looked at.
        quieten()
    check_job(job, info, world_size)
    if videos_of(info):
        check_video_library()
    torchrun = torchrun_rank()
    kind = ranks.kind(world_size if torchrun is None else torchrun.local_size)
    check_offload(job.offload, kind)
    return fetched(job.changed(dtype=ranks.dtype_on(kind)), info), kind


def check_joined(ranks: RankOptions) -> None:
    """Reject a launcher if torchrun has started the ranks."""
    if ranks.launcher is not None:
        raise InputError(f"--launcher {ranks.launcher} starts ranks, and torchrun has started them; use one of them")


def _on_ranks(job: PictureJob, ranks: RankOptions, world_size: int, kind: str, began: float) -> dict[str, Any] | None:
    """Generate; ``began``: when the command did. What to say about it; None: another process says it."""
    # If torchrun has started the ranks, this process is one of them.
    name = "torchrun" if torchrun_rank() is not None else ranks.launcher
    with launcher(name, world_size, kind, ranks.threads, job.timeout) as started:
        start_seconds = time.perf_counter() - began
        pictures, facts = generated(job, started)
        if not started.is_reporter:
            return None
    config = pictures[0].receipt.config if isinstance(job.config, str) else job.config
    return {
        "images": [{"path": picture.path, **picture.receipt.model_dump(mode="json")} for picture in pictures],
        "out": job.out,
        "config": ParallelConfig.read(config).model_dump(),
        "devices": world_size,
        "device": kind,
        "threads": started.threads,
        **facts,
        "start_seconds": start_seconds,
        "total_seconds": time.perf_counter() - began,
    }


def generated(job: PictureJob, ranks: Launcher) -> tuple[list[Generated], dict[str, Any]]:
    """Run a job on ranks, with a progress bar; its images, and facts such as times.

    If the job is interrupted, the finished images are listed.
    """
    from rich.progress import TextColumn, TimeRemainingColumn

    from ..generate.job import Generated, Loaded, StepDone, UserNote
    from ..generate.run import generate

    pictures: list[Generated] = []
    facts: dict[str, Any] = {}
    try:
        with bar(TextColumn("steps"), TimeRemainingColumn(), shown=ranks.is_reporter) as progress:
            task = progress.add_task("loading", total=None)

            def report(_: int, message: Any) -> None:
                if isinstance(message, Loaded):
                    facts.setdefault("load_seconds", message.seconds)
                    if message.config is not None:
                        facts["config"] = message.config
                    progress.update(task, description="generating", total=message.steps * job.total)
                elif isinstance(message, UserNote):
                    progress.console.print(f"ditmesh: {message.text}", markup=False, highlight=False, soft_wrap=True)
                elif isinstance(message, StepDone):
                    words = f"generating, {message.note}" if message.note else "generating"
                    # The schedule gives the number of steps: Heun has nearly twice the requested number.
                    progress.update(task, description=words, total=message.of * job.total)
                    progress.advance(task, message.pictures * message.steps)
                elif isinstance(message, Generated):
                    # There may be many receipts: equal fields are stored once.
                    ours, first = message.receipt, pictures[0].receipt if pictures else message.receipt
                    same = {name: value for name in SHARED if (value := getattr(first, name)) == getattr(ours, name)}
                    pictures.append(replace(message, receipt=ours.model_copy(update=same)))

            facts["seconds"] = max(ranks.run(generate, job, on_message=report))
    except (RankFailed, KeyboardInterrupt):
        if pictures:
            names = ", ".join(picture.path for picture in pictures[:MAX_LISTED])
            more = f" and {len(pictures) - MAX_LISTED} more in {job.out}" if len(pictures) > MAX_LISTED else ""
            print(f"{len(pictures)} of {job.total} images were generated before: {names}{more}", file=sys.stderr)
        raise
    return pictures, facts


def _say(result: dict[str, Any]) -> Report:
    report = Report()
    report.points([picture["path"] for picture in result["images"]])
    what = "video" if any(picture.get("frames") for picture in result["images"]) else "image"
    config = ParallelConfig(**result["config"]).describe()
    devices, threads = count(result["devices"], "device"), count(result["threads"] or 0, "thread")
    on_cpu = result["device"] == "cpu" and result["threads"]
    where = f"{config}, {result['device']}{f', {threads} each' if on_cpu else ''}"
    report.text(
        f"{count(len(result['images']), what)} in {result['out']}: "
        f"{result['seconds']:.2f} s on {devices} ({where}), "
        f"{result['start_seconds']:.1f} s to start, "
        f"{result['load_seconds']:.1f} s to load, "
        f"{result['total_seconds']:.1f} s in all"
    )
    return report

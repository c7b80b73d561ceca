"""`ditmesh generate`: pictures from prompts, on N devices."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import InputError, RankFailed
from .options import AsJson, Device, DType, Guidance, Negative, NumImages, PromptsFile, Seed, Size, Steps, Timeout
from .values import embedded_or, fetched, parallel_config, parse_size, parse_stages, parse_weights, read_prompts

if TYPE_CHECKING:
    from rich.console import Console

    from ..config import ParallelConfig
    from ..drawing import Drawn, Job
    from ..launch import Launcher, Report


# As many pictures are named when a job is broken off.
NAMED = 8


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT...", help="What to draw; several prompts draw several pictures."),
    ] = None,
    prompts_file: PromptsFile = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of a diffusers pipeline, or an embedded model.", show_default="emoji-sd3"),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of ranks, each with a device of its own.", show_default="1")
    ] = None,
    ulysses: Annotated[int | None, typer.Option(help="Degree of Ulysses sequence parallelism.")] = None,
    ring: Annotated[int | None, typer.Option(help="Degree of ring attention.")] = None,
    cfg: Annotated[int | None, typer.Option(help="Ranks that share the guidance branches.")] = None,
    data: Annotated[int | None, typer.Option(help="Ranks that share the pictures of a prompt.")] = None,
    tensor: Annotated[int | None, typer.Option(help="Degree of tensor parallelism.")] = None,
    pipe: Annotated[int | None, typer.Option(help="Stages of PipeFusion: each has some of the blocks.")] = None,
    patches: Annotated[
        int | None,
        typer.Option(help="Patches of the picture in PipeFusion; they decide the result.", show_default="stages"),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(metavar="5,7|measured", help="Blocks of every stage.", show_default="estimated"),
    ] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="The same bits on any number of devices; slower.")
    ] = False,
    tiles: Annotated[
        int | None,
        typer.Option(help="Pieces of the picture in reproducible mode; they decide the bits.", show_default="8"),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="2,1|auto", help="Relative speeds of the sequence ranks, or of the stages of --pipe."),
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="When devices are lost, go on with the others (with --reproducible).")
    ] = False,
    exchange: Annotated[
        Literal["exact", "displaced", "naive"] | None,
        typer.Option(help="How ring ranks share keys: before every attention, a step late, or never."),
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help='Exact steps of a stale strategy: "fixed(4)", "adaptive(0.05)".'),
    ] = None,
    compress: Annotated[
        Literal["fp16", "bf16", "int8"] | None, typer.Option(help="What displaced keys travel as.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="The configuration, as YAML.")] = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    size: Size = None,
    seed: Seed = 0,
    num_images: NumImages = 1,
    dtype: DType = None,
    device: Device = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads of each rank.", show_default="the cores shared out")
    ] = None,
    timeout: Timeout = 600.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the PNGs.")] = Path("pictures"),
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw the same on one device too; say how much faster, how different.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw pictures from prompts on N devices. Each PNG says how it was drawn.

    [bold]Examples[/bold]

    ditmesh generate "a red fox" --devices 4

    ditmesh generate --prompts animals.txt --ulysses 2 --cfg 2 --steps 20 --out animals --compare

    torchrun --nproc-per-node 4 -m ditmesh generate "a red fox" --model ./my-flux
    """
    from ..config import ParallelConfig
    from ..drawing import Job, check_job, class_numbers
    from ..elastic import check_elastic
    from ..launch import check_timeout, resolve_device, torchrun_rank

    there = torchrun_rank()
    wanted = parse_size(size)
    asked = read_prompts(prompts, prompts_file)
    info, steps, guidance, text_tokens = embedded_or(model, steps, guidance)
    world_size, chosen = parallel_config(
        devices,
        config,
        {"ulysses": ulysses, "ring": ring, "cfg": cfg, "data": data, "tensor": tensor, "pipe": pipe},
        info.heads,
        {
            "reproducible": reproducible or None,
            "tiles": tiles,
            "weights": parse_weights(weights),
            "patches": patches,
            "stages": parse_stages(stages),
            "exchange": exchange,
            "warmup": warmup,
            "compress": compress,
        },
    )
    if tiles is not None and not reproducible:
        raise InputError(f"--tiles {tiles} counts in reproducible mode only; add --reproducible")
    if elastic:
        if there is not None:
            raise InputError(
                "--elastic starts ranks anew, and those of torchrun are not ours to start; leave torchrun out and say "
                "--devices"
            )
        check_elastic(chosen or ParallelConfig(), world_size)
    job = Job(
        model=str(info.files) if info.local else info.name,
        name=info.name,
        pipeline_class=info.pipeline_class,
        prompts=tuple(asked),
        out=str(out),
        config=chosen or "auto",
        labels=class_numbers(asked, info),
        negative=negative,
        steps=steps,
        guidance=guidance,
        size=wanted,
        max_sequence_length=text_tokens,
        seed=seed,
        images=num_images,
        timeout=timeout,
    )
    check_job(job, info, world_size)
    check_timeout(timeout)
    if threads is not None and threads < 1:
        raise InputError(f"{threads} threads compute nothing; use --threads 1 or more")
    if compare and there is not None:
        raise InputError("--compare starts ranks of its own; leave torchrun out and say --devices")
    if compare and world_size == 1:
        raise InputError("--compare with 1 device compares nothing; use --devices 2 or more")
    kind = resolve_device(device, world_size if there is None else there.local_size)
    job = replace(job, dtype=dtype or ("bfloat16" if kind == "cuda" else "float32"))
    job = fetched(job, info)
    # Where torchrun has started ranks, this process is one of them.
    result = _on_ranks(job, there and "torchrun", world_size, kind, threads, compare, elastic)
    if result is None:
        return
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        _say(result)


def _on_ranks(
    job: Job,
    name: str | None,
    world_size: int,
    kind: Literal["cpu", "cuda"],
    threads: int | None,
    compare: bool,
    elastic: bool,
) -> dict[str, Any] | None:
    """Draw on ranks of the launcher of that name, and once more on one rank when ``compare``.

    What to say about it; None: another process says it.
    """
    from ..launch import default_threads, guarded_folder, launcher

    if elastic:
        threads = threads or default_threads(world_size, kind)
        drawn, facts = _draw_elastically(job, world_size, kind, threads)
    else:
        with launcher(name, world_size, kind, threads, job.timeout) as ranks:
            drawn, facts = _draw(job, ranks)
            # The same for one device and for N: the ratio is then one of devices.
            threads = ranks.threads
            if not ranks.speaks:
                return None
    result: dict[str, Any] = {
        "pictures": [{"path": picture.path, **picture.receipt.model_dump(mode="json")} for picture in drawn],
        "out": job.out,
        "devices": world_size,
        "device": kind,
        "threads": threads,
        "config": job.config.model_dump() if not isinstance(job.config, str) else drawn[0].receipt.config,
        **facts,
    }
    if compare:
        with guarded_folder("ditmesh-compare-") as folder, launcher(name, 1, kind, threads, job.timeout) as ranks:
            alone, facts = _draw(replace(job, config=_alone(job), out=folder), ranks, "one device")
            difference = _largest_difference(drawn, alone)
        result["compare"] = {
            "one_device_seconds": facts["seconds"],
            "ratio": facts["seconds"] / result["seconds"],
            "largest_difference": difference,
        }
    return result


def _alone(job: Job) -> ParallelConfig:
    """What the job is compared with: one device, in the same mode."""
    from ..config import ParallelConfig
    from ..elastic import smaller

    if isinstance(job.config, str) or not job.config.reproducible:
        return ParallelConfig()
    return smaller(job.config, [0])


def _draw(job: Job, ranks: Launcher, what: str = "drawing") -> tuple[list[Drawn], dict[str, Any]]:
    """The pictures, and the seconds it took."""
    from ..drawing import draw

    started = time.perf_counter()
    with progress(job, what, ranks.speaks) as (report, drawn, facts):
        try:
            seconds = ranks.run(draw, job, on_message=lambda _, message: report(message))
        except (RankFailed, KeyboardInterrupt):
            _say_kept(job, drawn)
            raise
    return drawn, {**facts, "seconds": max(seconds), "total_seconds": time.perf_counter() - started}


def _draw_elastically(
    job: Job, world_size: int, kind: Literal["cpu", "cuda"], threads: int
) -> tuple[list[Drawn], dict[str, Any]]:
    """The pictures, the seconds it took, and the restarts."""
    from ..elastic import draw_elastically

    started = time.perf_counter()
    with progress(job, "drawing") as (report, drawn, facts):
        try:
            restarts, seconds = draw_elastically(job, world_size, kind, threads, report)
        except (RankFailed, KeyboardInterrupt):
            _say_kept(job, drawn)
            raise
    facts |= {"seconds": seconds, "total_seconds": time.perf_counter() - started}
    return drawn, {**facts, "restarts": [past.plain() for past in restarts]}


def _say_kept(job: Job, drawn: list[Drawn]) -> None:
    """Name the pictures that are complete on disk."""
    if drawn:
        names = [picture.path for picture in drawn[:NAMED]]
        more = f" and {len(drawn) - NAMED} more in {job.out}" if len(drawn) > NAMED else ""
        print(f"{len(drawn)} of {job.total} pictures were drawn before: {', '.join(names)}{more}", file=sys.stderr)


@contextlib.contextmanager
def progress(job: Job, what: str, shown: bool = True) -> Iterator[tuple[Report, list[Drawn], dict[str, Any]]]:
    """One bar for the whole job, fed by rank 0's reports; collects what was drawn, and facts such as times."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ..drawing import Drawn, Loaded, Stepped
    from ..elastic import Restarted

    drawn: list[Drawn] = []
    facts: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=_stderr(), disable=not shown
    ) as progress:
        bar = progress.add_task("loading", total=None)

        def report(message: Any) -> None:
            if isinstance(message, Loaded):
                facts.setdefault("load_seconds", message.seconds)
                progress.update(bar, description=what, total=message.steps * job.total)
            elif isinstance(message, Stepped):
                progress.update(bar, description=f"{what}, {message.note}" if message.note else what)
                progress.advance(bar, message.pictures * message.steps)
            elif isinstance(message, Drawn):
                drawn.append(message)
            elif isinstance(message, Restarted):
                # One line, above the bar.
                progress.console.print(f"ditmesh: {message}", markup=False, highlight=False, soft_wrap=True)
                progress.update(bar, description="loading")

        yield report, drawn, facts


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _largest_difference(drawn: list[Drawn], alone: list[Drawn]) -> int:
    """Largest difference of any channel of any pixel, of 255."""
    import numpy
    from PIL import Image

    largest = 0
    for ours, theirs in zip(drawn, alone, strict=True):
        with Image.open(ours.path) as one, Image.open(theirs.path) as other:
            left, right = (numpy.asarray(image.convert("RGBA"), dtype=numpy.int16) for image in (one, other))
        largest = max(largest, int(abs(left - right).max()))
    return largest


def _say(result: dict[str, Any]) -> None:
    from rich.console import Console

    from ..config import ParallelConfig

    # Paths stay on one line: they are there to be copied.
    console = Console(highlight=False, soft_wrap=True)
    for picture in result["pictures"]:
        console.print(picture["path"], markup=False)
    count = len(result["pictures"])
    config = ParallelConfig(**result["config"]).describe()
    devices = f"{result['devices']} {'device' if result['devices'] == 1 else 'devices'}"
    threads = f"{result['threads']} {'thread' if result['threads'] == 1 else 'threads'}"
    on_cpu = result["device"] == "cpu"
    where = f"{config}, {result['device']}{f', {threads} each' if on_cpu else ''}"
    console.print(
        f"{count} {'picture' if count == 1 else 'pictures'} in {result['out']}: "
        f"{result['seconds']:.2f} s on {devices} ({where}), "
        f"{result['load_seconds']:.1f} s to load, {result['total_seconds']:.1f} s in all",
        markup=False,
    )
    for past in result.get("restarts", ()):
        console.print(f"restarted at step {past['step']}: {past['to']} ranks instead of {past['from']}", markup=False)
    if "compare" in result:
        facts = result["compare"]
        pixels = (
            "the same pixels"
            if facts["largest_difference"] == 0
            else f"pixels differ by at most {facts['largest_difference']} of 255"
        )
        console.print(
            f"one device{f' ({threads})' if on_cpu else ''}: {facts['one_device_seconds']:.2f} s; "
            f"{devices}: {facts['ratio']:.2f} times as fast, {pixels}",
            markup=False,
        )

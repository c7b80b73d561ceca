"""`ditmesh verify`: does a configuration draw what one device draws?"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import ConfigError, InputError
from .options import AsJson, Device, DType, Guidance, Negative, NumImages, PromptsFile, Seed, Size, Steps, Timeout
from .values import configs_of, embedded_or, fetched, parse_size, read_prompts

if TYPE_CHECKING:
    from ..config import ParallelConfig
    from ..drawing import Job
    from ..verification.runs import Run, Task
    from ..verification.verdicts import Verdict


def verify(
    configs: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG...", help='What to verify: words such as "ulysses=2 cfg=2", or a YAML file.'),
    ] = None,
    more_configs: Annotated[
        list[str] | None, typer.Option("--configs", metavar="CONFIG", help="The same, as an option.")
    ] = None,
    all_of: Annotated[
        int | None, typer.Option("--all", metavar="N", help="Every sensible configuration of N devices.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to draw; may be given again.", show_default="a red fox, if embedded")
    ] = None,
    prompts_file: PromptsFile = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of a diffusers pipeline.", show_default="the embedded model"),
    ] = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    size: Size = None,
    seed: Seed = 0,
    num_images: NumImages = 1,
    dtype: DType = None,
    device: Device = "auto",
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of each rank, and of the one device.", show_default="the cores shared out"),
    ] = None,
    timeout: Timeout = 600.0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest relative difference of latents and pictures.",
            show_default="float32 1e-4, float16 0.02, bfloat16 0.1; none for stale strategies",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with pictures and curves.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw on one device and on several, and say whether, by how much, and where first they differ.

    The one device runs the pipeline as diffusers has it; for a reproducible configuration it runs the same settings on
    one device, and every bit has to be the same. Exits with code 1 when a configuration is outside its tolerance.

    [bold]Examples[/bold]

    ditmesh verify "ulysses=2" "ring=2 cfg=2" --prompt "a red fox"

    ditmesh verify --all 4 --steps 8 --html verify.html
    """
    from ..drawing import Job, check_config, check_folder, check_job, class_numbers
    from ..launch import check_timeout, resolve_device
    from ..support import check as check_support
    from ..verification.runs import sensible

    asked = configs_of([*(more_configs or []), *(configs or [])])
    if not asked and all_of is None:
        raise InputError('there is no configuration to verify; write one, such as "ulysses=2", or say --all 2')
    if all_of is not None and all_of < 2:
        raise InputError(f"--all {all_of} compares nothing; use --all 2 or more")
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"a tolerance of {tolerance:g} is not possible; use 0 or more, such as 1e-4")
    check_timeout(timeout)
    if threads is not None and threads < 1:
        raise InputError(f"{threads} threads compute nothing; use --threads 1 or more")
    if html is not None:
        check_folder(html.parent)
        if html.is_dir():
            raise InputError(f"--html {str(html)!r} is a folder; give the name of a file in it")
    wanted = parse_size(size)
    info, steps, guidance, text_tokens = embedded_or(model, steps, guidance)
    prompts = read_prompts(prompt or (["a red fox"] if model is None and prompts_file is None else None), prompts_file)
    job = Job(
        model=str(info.files) if info.local else info.name,
        name=info.name,
        pipeline_class=info.pipeline_class,
        prompts=tuple(prompts),
        out=tempfile.gettempdir(),
        config="auto",
        labels=class_numbers(prompts, info),
        negative=negative,
        steps=steps,
        guidance=guidance,
        size=wanted,
        max_sequence_length=text_tokens,
        seed=seed,
        images=num_images,
        timeout=timeout,
    )
    largest = max([config.world_size for config in asked] + [all_of or 1])
    check_job(job, info, largest)
    for config in asked:
        check_config(config, info, config.world_size, wanted)
        check_support(info.transformer_class, config)
    offered = []
    if all_of is not None:
        guided = guidance is None or guidance > 1
        offered = [c for c in sensible(all_of, info, num_images, guided, wanted) if c not in asked]
    kind = resolve_device(device, largest)
    job = replace(job, dtype=dtype or ("bfloat16" if kind == "cuda" else "float32"))
    job = fetched(job, info)
    result, page = _verify(job, asked, offered, kind, threads, tolerance, html is not None)
    if html is not None and page is not None:
        page.write(html)
        result["html"] = str(html)
    if as_json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        _say(result)
    if not result["passed"]:
        raise typer.Exit(1)


def _verify(
    job: Job,
    asked: Sequence[ParallelConfig],
    offered: Sequence[ParallelConfig],
    kind: Literal["cpu", "cuda"],
    threads: int | None,
    tolerance: float | None,
    with_page: bool,
) -> tuple[dict[str, Any], Any]:
    """Run everything; the result as data, and the page when one is wanted."""
    from ..launch import default_threads, guarded_folder, launcher
    from ..quality import perceptual
    from ..receipt import library_versions
    from ..verification.runs import Task, name_of, reference_of
    from ..verification.verdicts import judge

    configs = [*asked, *offered]
    # One number for all: kernels may round otherwise with another number of threads.
    threads = threads or default_threads(max(config.world_size for config in configs), kind)
    references = list(dict.fromkeys(reference_of(config) for config in configs))
    runs: dict[str, list[Run]] = {}
    alone: dict[str, Run] = {}
    traces: dict[ParallelConfig | None, str] = {}
    verdicts: dict[str, Verdict] = {}
    with (
        guarded_folder("ditmesh-verify-") as folder,
        _Progress(len(references) + len(configs)) as bar,
    ):
        for number, reference in enumerate(references):
            traces[reference] = str(Path(folder) / f"trace-{number}")
            os.mkdir(traces[reference])

        def run(devices: int, tasks: Sequence[Task]) -> list[list[Run]]:
            """For each task every rank's run."""
            from ..verification.runs import run_tasks

            bar.say(f"starting {devices} {'rank' if devices == 1 else 'ranks'}")
            with launcher(None, devices, kind, threads, job.timeout) as pool:
                every = pool.run(run_tasks, job, tasks, on_message=lambda _, began: bar.begin(began.what))
            return [list(of_ranks) for of_ranks in zip(*every, strict=True)]

        tasks = [Task(reference, traces[reference], writes=True) for reference in references]
        for reference, (done,) in zip(references, run(1, tasks), strict=True):
            alone[name_of(reference)] = done
        for devices in sorted({config.world_size for config in configs}):
            mine = [
                config
                for config in configs
                if config.world_size == devices and not alone[name_of(reference_of(config))].refused
            ]
            done = run(devices, [Task(config, traces[reference_of(config)]) for config in mine]) if mine else []
            runs |= {name_of(config): of_ranks for config, of_ranks in zip(mine, done, strict=True)}
        bar.say("comparing")
        for config in configs:
            name, reference = name_of(config), reference_of(config)
            single = alone[name_of(reference)]
            # What one device refuses, several do not have to be asked.
            found = judge(
                job, config, runs.get(name, [single]), single, traces[reference], tolerance, perceptual.available()
            )
            if found.refused and config in asked:
                raise ConfigError(f"{name}: {found.refused}")
            verdicts[name] = found
    drawn = [verdict for verdict in verdicts.values() if not verdict.refused]
    if not drawn:
        raise InputError(f"none of the {len(verdicts)} configurations can run: {next(iter(verdicts.values())).refused}")
    facts = {
        "model": job.name,
        "prompts": list(job.prompts),
        "seed": job.seed,
        "steps": job.steps,
        "guidance": job.guidance,
        "size": list(job.size) if job.size else None,
        "images": job.images,
        "dtype": job.dtype,
        "device": kind,
        "threads": threads,
        "versions": library_versions(),
        "one_device": [
            {"config": name, "seconds": one.seconds, "repeats": one.repeats, "channel_stride": one.stride}
            for name, one in alone.items()
            if not one.refused
        ],
    }
    result = {
        **facts,
        "configs": [
            verdict.as_data() | {"outcome": verdict.outcome, "judged": verdict.judged} for verdict in verdicts.values()
        ],
        "passed": all(verdict.passed for verdict in drawn),
    }
    page = None
    if with_page:
        from ..verification.page import page_of

        rank_0 = {name: of_ranks[0] for name, of_ranks in runs.items()}
        page = page_of(job, list(verdicts.values()), rank_0, alone, {k: v for k, v in facts.items() if v is not None})
    return result, page


class _Progress:
    """A bar that counts runs, and says what is running."""

    def __init__(self, runs: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._bar = self._progress.add_task("starting", total=runs)
        self._begun = 0

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def say(self, what: str) -> None:
        """What happens between runs."""
        self._progress.update(self._bar, description=what, completed=self._begun)

    def begin(self, what: str) -> None:
        """A run begins; the one before is done."""
        self._progress.update(self._bar, description=what, completed=self._begun)
        self._begun += 1


def _say(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    single = ", ".join(f"{one['config']} {one['seconds']:.2f} s" for one in result["one_device"])
    console.print(
        f"{_count(len(result['prompts']), 'prompt')}, {result['dtype']} on {result['device']}, "
        f"{_count(result['threads'], 'thread')} a rank; compared with: {single}",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("configuration", overflow="fold", min_width=16)
    for name in ("largest", "PSNR dB", "SSIM", "latents", "seconds", "sent MB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", min_width=10)
    for verdict in result["configs"]:
        colour = "yellow" if not verdict["judged"] else "green" if verdict["passed"] else "red"
        outcome = f"[{colour}]{verdict['outcome']}[/]"
        if verdict["refused"]:
            table.add_row(verdict["config"], *[""] * 6, outcome)
            continue
        table.add_row(
            verdict["config"],
            _error(verdict["largest"]),
            f"{verdict['psnr']:.1f}" if verdict["psnr"] is not None else "",
            f"{verdict['ssim']:.4f}",
            _error(verdict["latents"]),
            f"{verdict['seconds']:.2f}",
            f"{sum(verdict['bytes_sent'].values()) / 1e6:.2f}",
            outcome,
        )
    console.print(table)
    for one in result["one_device"]:
        if not one["repeats"]:
            console.print(f"{one['config']}: two runs of it gave different bits", markup=False, soft_wrap=True)
        if one["channel_stride"] > 1:
            console.print(
                f"{one['config']}: every bit was compared; how far blocks differ was measured on one channel in "
                f"{one['channel_stride']}",
                markup=False,
                soft_wrap=True,
            )
    for verdict in result["configs"]:
        for line in _lines(verdict):
            console.print(line, markup=False, soft_wrap=True)
    if "html" in result:
        console.print(result["html"], markup=False, soft_wrap=True)


def _lines(verdict: dict[str, Any]) -> list[str]:
    """What a row of the table has no room for."""
    from ..verification.verdicts import Found

    name = verdict["config"]
    if verdict["refused"]:
        return [f"{name}: {verdict['refused']}"]
    lines = []
    if verdict["first_bit"] is not None:
        first = Found(**verdict["first_bit"])
        lines.append(f"{name}: first bits that differ: {first.describe()}")
        beyond = verdict["first_beyond"]
        if beyond is not None:
            lines.append(f"{name}: first beyond the tolerance: {Found(**beyond).describe()}")
        if verdict["promise"] != "bits" and len(verdict["growth"]) > 1:
            start, end = verdict["growth"][0], verdict["growth"][-1]
            lines.append(
                f"{name}: difference of the latents {_error(start['latents'])} after step {start['step']}, "
                f"{_error(end['latents'])} after step {end['step']}"
            )
    if not verdict["repeats"]:
        lines.append(f"{name}: two runs of it gave different bits")
    if verdict["seen"] < 1:
        lines.append(f"{name}: {verdict['seen']:.1%} of one device's tensors were compared; the rest was not computed")
    return lines


def _error(value: float | None) -> str:
    """JSON has no infinity: it has null."""
    return "infinite" if value is None else f"{value:.1e}" if value else "0"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

"""`ditmesh study`: measure the quality of stale strategies."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..report.formatting import count
from ..request import PictureRequest, parse_size
from .options import (
    AsJson,
    Device,
    DType,
    Guidance,
    LauncherName,
    PromptsFile,
    RankOptions,
    Seed,
    Size,
    Steps,
    at_least,
    with_groups,
)
from .show import bar, emit
from .values import download, embedded_or, read_prompts, videos_of

if TYPE_CHECKING:
    from ..generate.model_info import ModelInfo
    from ..lab.study.plan import Cell, StudyPlan
    from ..report.report import Report

# Number of captions of an embedded model if there are no prompts.
PROMPTS = 4


@dataclass(frozen=True)
class StudyOptions:
    """Options of the combinations and the measurements."""

    prompts_file: PromptsFile = None
    devices: Annotated[str, typer.Option(metavar="2,4,8", help="Study these numbers of devices.")] = "2,4"
    warmup: Annotated[
        str,
        typer.Option(
            metavar="0,4,sqrt(2)",
            help="Study these warm-up policies; a number means that many synchronous steps first.",
        ),
    ] = "0,1,2,4"
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Study these of displaced, pipefusion, naive, and displaced-fp16, -bf16, -int8 and -int4, "
            "which compress the messages; +linear behind a displaced one moves keys on.",
        ),
    ] = "displaced,naive"
    sampler: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Study these samplers: ddim,dpm for a DDPM model, euler,heun for a flow, own for the model's.",
        ),
    ] = "own"
    images: Annotated[
        int,
        typer.Option(help="Generate this many images of every prompt, each with its own seed.", callback=at_least(1)),
    ] = 1
    steps: Steps = None
    guidance: Guidance = None
    size: Size = None
    frames: Annotated[
        int | None,
        typer.Option(help="Generate this many frames of a video.", show_default="the pipeline's", callback=at_least(1)),
    ] = None
    seed: Seed = 0
    batch: Annotated[
        int, typer.Option(help="Generate at most this many images in one call of the pipeline.", callback=at_least(1))
    ] = 8
    detail: Annotated[
        bool,
        typer.Option(help="Measure errors of attention, and on the same latents, in each first request."),
    ] = True
    real: Annotated[
        bool, typer.Option("--real", help="Also run the first request of each combination on real ranks, timed.")
    ] = False
    target: Annotated[
        float | None,
        typer.Option(
            metavar="DB",
            help="Find the rule for a warm-up that reaches this PSNR.",
            show_default="what all N reach",
            callback=at_least(0),
        ),
    ] = None
    jobs: Annotated[
        int,
        typer.Option(help="Run cells in this many processes at the same time, one thread each.", callback=at_least(1)),
    ] = 1
    dtype: DType = "float32"
    device: Device = "auto"
    launcher: LauncherName = None
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="DIR", help="Write into this folder; finished cells are not run again."),
    ] = "study"


@with_groups
def study(
    context: typer.Context,
    options: StudyOptions,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT...", help="Generate from these prompts; by default from captions of an embedded model."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Load this model: folder or hub id, or the name of an embedded model."),
    ] = "emoji-sd3",
    as_json: AsJson = False,
) -> None:
    """Measure how much quality stale strategies cost, for devices x warm-up x sampler x strategy.

    N devices are simulated in one process, to the bit. Writes report.html and results.json. A study that
    was broken off goes on where it stood.

    [bold]Examples[/bold]

    ditmesh study "a red fox" --devices 2,4,8 --warmup 0,1,2,4,8 --steps 12

    ditmesh study fox owl --model emoji-dit-s --sampler ddim,dpm --warmup "0,2,4,adaptive(0.05)" --images 4
    """
    from ..generate.job import check_named
    from ..lab.pages.charts import check_charts
    from ..layout.probe import layout_of_class

    check_charts()
    check_named(options.out)
    if options.launcher is not None and not options.real:
        raise InputError(f"--launcher {options.launcher} starts real ranks, and all are simulated; add --real")
    plan, info = _plan(options, prompts, model)
    layout_of_class(info.transformer_class, info.transformer)
    made_by = _provenance(context.obj or ())
    emit(_run(plan, options, made_by), as_json, _say)


def _provenance(arguments: Sequence[str]) -> dict[str, Any]:
    """The origin of a page's figures: command line (without folders), code, machine and libraries."""
    from ..lab.study.plan import without_folder
    from ..launch.hardware import describe_machine

    machine = describe_machine()
    cpu, gpus = machine["cpu"], [gpu["name"] for gpu in machine["gpus"]]
    return {
        "command line": shlex.join(map(without_folder, ("ditmesh", *arguments))),
        "processor": f"{cpu['model']}, {count(cpu['cores'], 'core')}, {cpu['memory_gb']:g} GB",
        "GPUs": ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)) or None,
        "platform": machine["platform"],
        "versions": machine["versions"],
    }


def _plan(options: StudyOptions, prompts: list[str] | None, model: str) -> tuple[StudyPlan, ModelInfo]:
    """The checked plan, and the facts in the model's files."""
    from .. import zoo
    from ..generate.arguments import check_options, check_output
    from ..generate.job import class_numbers
    from ..generate.model_info import find_model, parameters_of
    from ..lab.study import plan as planning

    info, steps, guidance, text_tokens = embedded_or(
        str(zoo.path(model)) if model in zoo.EMBEDDED else model, options.steps, options.guidance
    )
    if not info.local:
        info = find_model(download(info.name))
    asked = prompts
    if not prompts and options.prompts_file is None and zoo.embedded(info.files) is not None:
        asked = zoo.captions(info.files.name)[:PROMPTS]
    words = read_prompts(asked, options.prompts_file)
    steps = 20 if steps is None else steps
    size, frames = parse_size(options.size), options.frames or info.default_frames
    if "sample_size" not in info.transformer:
        size = size or info.default_size
    if frames is not None and not videos_of(info):
        raise InputError(f"--frames {frames}: {info.pipeline_class} generates images; leave --frames out")
    if size is not None:
        info.check_size(*size)
    if parameters := parameters_of(info.pipeline_class):
        check_output(info.pipeline_class, parameters)
        asked_size = None if info.labels else parse_size(options.size)
        check_options(info.pipeline_class, parameters, PictureRequest(guidance=options.guidance), asked_size)
    ranks = RankOptions(options.device, options.dtype)
    setup = planning.Setup(
        model=str(info.files),
        name=model,
        weights=planning.weights_digest(info.files),
        steps=steps,
        guidance=guidance,
        size=size,
        max_sequence_length=text_tokens,
        dtype=ranks.dtype_on("cpu"),
        device=ranks.kind(1),
        frames=frames,
    )
    plan = planning.make_plan(
        setup,
        info,
        devices=planning.read_devices(options.devices),
        warmups=planning.read_warmups(options.warmup, steps),
        samplers=planning.split_list(options.sampler, "--sampler"),
        strategies=planning.read_strategies(options.strategy),
        prompts=words,
        labels=class_numbers(words, info),
        images=options.images,
        seed=options.seed,
        batch=options.batch,
        detail=options.detail,
        real=options.real,
    )
    return plan, info


def _run(plan: StudyPlan, options: StudyOptions, made_by: dict[str, Any]) -> dict[str, Any]:
    """Run the missing cells, with real ranks from the launcher if needed, and write the report."""
    from ..lab.study.analysis import StudyResults
    from ..lab.study.page import write
    from ..lab.study.store import Store, run_cells

    out = Path(options.out)
    store = Store(out)
    with bar() as progress:
        task = progress.add_task("loading", total=len(plan.cells))
        there = sum(store.get(cell, plan.setup) is not None for cell in plan.cells)
        progress.update(task, completed=there)

        def on_cell(cell: Cell | None, total: int) -> None:
            if cell is None:
                progress.advance(task)
            else:
                progress.update(task, description=cell.describe())

        ran = run_cells(plan, store, options.jobs, on_cell, options.launcher)
        progress.update(task, description="writing")
        cells = [found for cell in plan.cells if (found := store.get(cell, plan.setup)) is not None]
        data = write(StudyResults(plan, cells), out, options.target, made_by)
    shown = ("findings", "table", "rules", "against_fixed")
    facts = {"out": str(out), "report": str(out / "report.html"), "cells": len(plan.cells), "ran": ran}
    return facts | {name: data[name] for name in shown}


def _say(result: dict[str, Any]) -> Report:
    from ..lab.pages.charts import number_text
    from ..lab.study.analysis import Mean
    from ..report.report import Report

    def number(mean: dict[str, Any], digits: int) -> str:
        return f"{Mean(mean['value'], None, mean['count']):.{digits}f}"

    def cells(row: dict[str, Any]) -> list[str]:
        synchronous, sent = row["synchronous"]["value"], row["sent"]
        return [
            str(row["devices"]),
            row["warmup"],
            "" if synchronous is None else f"{synchronous:.3g} of {row['evaluations']}",
            f"{Mean(**row['psnr']):.2f}",
            number(row["ssim"], 4),
            number(row["right"], 2),
            number_text(row["seconds"]),
            "" if sent is None else number_text(sum(sent.values()) / 1e6),
        ]

    report = Report()
    names = ("N", "warm-up", "synchronous", "PSNR dB", "SSIM", "nearest", "time s", "sent MB")
    for pair in dict.fromkeys((row["sampler"], row["strategy"]) for row in result["table"]):
        rows = [cells(row) for row in result["table"] if (row["sampler"], row["strategy"]) == pair]
        report.table(names, rows, f"{pair[1]}, {pair[0]}", keys=2)
    right = [row["right_synchronous"] for row in result["table"] if row["right_synchronous"]["value"] is not None]
    if right:
        report.text(
            f"nearest: share of images that are nearest to the training image asked for; of the synchronous ones "
            f"{number(right[0], 2)}"
        )
    report.points([*result["findings"], result["report"]])
    return report

"""The page that `ditmesh verify --html` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...config import ParallelConfig
from ...core.files import without_folder
from ...generate.job import PictureJob
from ...quality import perceptual
from ...quality.pictures import as_picture
from ...report.formatting import number_text, setting_text
from ...report.report import StyledText
from ...verify.runs import RankRun
from ...verify.verdicts import TOLERANCES, Verdict
from ..pages import charts as figures
from ..pages import curves
from ..pages.curves import Series
from ..pages.page import Download, GridImage, Page, as_csv

# Maximum number of images of a configuration on the page.
MAX_IMAGES = 4


def page_of(
    job: PictureJob,
    verdicts: Sequence[Verdict],
    runs: Mapping[str, RankRun],
    references: Mapping[str, RankRun],
    facts: Mapping[str, Any],
    data: Mapping[str, Any],
) -> Page:
    """The page of a verification.

    Args:
        job, verdicts: the request, and the verdicts on the configurations.
        runs, references: rank 0's run of each configuration, and the runs of one device, by name.
        facts: where it ran and by what, by name.
        data: everything found, as JSON can hold it; it can be saved from the page.
    """
    name = without_folder(job.name)
    report = Page(
        "Verification against one device",
        f"{name}, {job.total} {'picture' if job.total == 1 else 'pictures'}, seed {job.seed}",
    )
    ran = [verdict for verdict in verdicts if not verdict.refused]
    report.section("Outcome")
    report.table(*_outcomes(verdicts), "Every configuration against one device")
    report.table(
        ("configuration", "first bits that differ", "first beyond the tolerance"),
        [_where(verdict) for verdict in verdicts],
        "Where it first differs from one device",
    )
    report.text(
        "Differences of pictures are of values from 0 to 1, those of latents relative to the largest value on one "
        "device; of several pictures the worst counts. Exact configurations are judged by a tolerance that rounding "
        f"explains ({job.dtype}: {TOLERANCES[job.dtype]:g} unless another was given), reproducible ones by their bits, "
        "stale ones only if a tolerance was given.",
        note=True,
    )
    said = json.dumps({**data, "model": name, "made_by": dict(facts)}, indent=1, allow_nan=False) + "\n"
    report.downloads([Download("verify.csv", csv_of(verdicts)), Download("verify.json", said)])
    if ran:
        report.section("Growth of the difference")
        lines = [
            Series(
                one.config,
                tuple(step.step for step in one.where.growth),
                tuple(step.latents for step in one.where.growth),
            )
            for one in ran
        ]
        title = "Relative difference of the latents after every step, by configuration"
        chart = figures.line_chart(lines, title, "step", "largest relative difference", log_y=True)
        report.chart(chart, "Difference of the latents after every step. 0 on the axis: the same bits.")
    for verdict in ran:
        _configuration(report, job, verdict, runs[verdict.config], references[verdict.reference])
    report.section("Circumstances")
    report.table(*_settings(verdicts), "Settings of the configurations; others are the usual ones")
    report.facts({**_circumstances(job, references), **facts}, "What was run, by what, and where")
    return report


def csv_of(verdicts: Sequence[Verdict]) -> str:
    """One line for every configuration."""
    names = ("config", "reference", "devices", "promise", "outcome", "judged", "passed", "refused", "tolerance")
    measured = ("equal", "blocks_equal", "repeats", "seen", "error", "largest", "mean", "psnr", "ssim", "perceptual")
    measured += ("latents", "seconds", "one_device_seconds")
    rows = []
    for verdict in verdicts:
        values = {**asdict(verdict.agreement), **asdict(verdict.accuracy), **asdict(verdict.cost)}
        sent = {f"bytes_{axis}": verdict.cost.bytes_sent.get(axis, 0) for axis in _axes(verdicts)}
        found = {name: values[name] for name in measured} | sent
        places = {"first_bit": verdict.where.first_bit, "first_beyond": verdict.where.first_beyond}
        rows.append(
            {name: getattr(verdict, name) for name in names}
            | (dict.fromkeys(found) if verdict.refused else found)
            | {name: place.describe() if place else None for name, place in places.items()}
        )
    return as_csv(rows)


def _axes(verdicts: Sequence[Verdict]) -> list[str]:
    return sorted({axis for verdict in verdicts for axis in verdict.cost.bytes_sent})


def _outcomes(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    axes = _axes(verdicts)
    axes = axes if len(axes) > 1 else []
    header = ["configuration", "verdict", "same bits", "largest", "mean", "PSNR (dB)", "SSIM", perceptual.METRIC]
    header += ["latents", "seconds", "one device (s)", "speed-up", "sent (MB)", *(f"{axis} (MB)" for axis in axes)]
    # Without differences there is no PSNR column.
    equal = "equal" if any(one.accuracy.psnr is not None for one in verdicts) else ""

    def row(verdict: Verdict) -> list[str]:
        outcome = StyledText(verdict.outcome, ("good" if verdict.passed else "bad") if verdict.judged else "")
        if verdict.refused:
            return [verdict.config, outcome] + [""] * (len(header) - 2)
        far, cost = verdict.accuracy, verdict.cost
        return [
            verdict.config,
            outcome,
            "yes" if verdict.agreement.equal else "no",
            number_text(far.largest, 2),
            number_text(far.mean, 2),
            equal if far.psnr is None else f"{far.psnr:.1f}",
            f"{far.ssim:.4f}",
            "" if far.perceptual is None else f"{far.perceptual:.4f}",
            number_text(far.latents, 2),
            number_text(cost.seconds),
            number_text(cost.one_device_seconds),
            f"{cost.one_device_seconds / cost.seconds:.2f}" if cost.seconds else "",
            number_text(sum(cost.bytes_sent.values()) / 1e6),
            *(number_text(cost.bytes_sent.get(axis, 0) / 1e6) for axis in axes),
        ]

    return header, [row(verdict) for verdict in verdicts]


def _settings(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    usual = ParallelConfig().model_dump(mode="json")
    changed = [name for name in usual if any(verdict.settings[name] != usual[name] for verdict in verdicts)]
    rows: list[list[str]] = []
    for verdict in verdicts:
        settings = verdict.settings
        values = [setting_text(settings[name]) if settings[name] != usual[name] else "" for name in changed]
        rows.append([verdict.config, str(verdict.devices), *(StyledText(value, "name") for value in values)])
    return ["configuration", "devices", *changed], rows


def _circumstances(job: PictureJob, references: Mapping[str, RankRun]) -> dict[str, Any]:
    prompts = job.prompts
    facts: dict[str, Any] = {
        "model": without_folder(job.name),
        **{f"prompt {number}" if len(prompts) > 1 else "prompt": text for number, text in enumerate(prompts, 1)},
        "pictures of each prompt": job.n,
        "seed": job.seed,
        "steps": job.steps,
        "guidance scale": job.guidance,
        "picture size": f"{job.size[0]} × {job.size[1]} pixels" if job.size else None,
        "precision": job.dtype,
    }
    for name, one in references.items():
        if not one.refused:
            kept = "every channel" if one.stride == 1 else f"one channel in {one.stride}; bits of all"
            facts[f"compared with {name}"] = {
                "time": f"{number_text(one.seconds)} s",
                "two runs gave the same bits": one.repeats,
                "sizes of differences are measured on": kept,
            }
    return facts


def _where(verdict: Verdict) -> list[str]:
    if verdict.refused:
        return [verdict.config, StyledText(f"refused: {verdict.refused}", "words"), StyledText("", "words")]
    places = (verdict.where.first_bit, verdict.where.first_beyond)
    return [verdict.config, *(StyledText(place.describe() if place else "none", "words") for place in places)]


def _configuration(report: Page, job: PictureJob, verdict: Verdict, run: RankRun, alone: RankRun) -> None:
    report.section(verdict.config)
    report.text(_sentences(verdict))
    pairs = [pair for calls in zip(run.pictures, alone.pictures, strict=True) for pair in zip(*calls, strict=True)]
    # Frames of each video; 1 of an image.
    each = len(pairs) // job.total
    _pictures(report, job, verdict, pairs, each)
    if each > 1:
        _frames(report, job, verdict, each)
    _blocks(report, verdict)


def _sentences(verdict: Verdict) -> str:
    said, where = [f"Compared with {verdict.reference}: {verdict.outcome}."], verdict.where
    if where.first_bit is None:
        said.append("Nothing differs.")
    else:
        said.append(f"The first bits that differ: {where.first_bit.describe()}.")
        beyond = where.first_beyond
        said.append(f"First beyond the tolerance: {beyond.describe()}." if beyond else "Nothing beyond the tolerance.")
    if not verdict.agreement.repeats:
        said.append("Two runs of this configuration gave different bits.")
    return " ".join(said)


def _pictures(report: Page, job: PictureJob, verdict: Verdict, pairs: Sequence[tuple[Any, Any]], each: int) -> None:
    """Images, or frames of the first video: of the configuration, of one device, and their difference."""
    first = range(len(pairs))[:MAX_IMAGES]
    if each > 1:
        # Evenly spaced.
        first = [round(place * (each - 1) / (MAX_IMAGES - 1)) for place in range(MAX_IMAGES)]
    shown = dict.fromkeys(first)
    apart = {number: np.abs(as_picture(pairs[number][0]) - as_picture(pairs[number][1])) for number in shown}
    # One scale serves all of a configuration's images.
    bright = figures.scale_maximum(list(apart.values()))
    rows = []
    for number in shown:
        ours, theirs = pairs[number]
        what = f"“{job.prompts[number // each // job.n]}”, seed {job.seed + number // each}"
        what += f", frame {number % each + 1}" if each > 1 else ""
        difference, differs = verdict.accuracy.pictures[number], bool(apart[number].any())
        caption = f"difference, largest {number_text(difference.largest, 2)}" if differs else "no difference"
        alt = "the difference of the two pictures" + (": black, they are equal" if difference.equal else "")
        pair = GridImage(theirs, f"{verdict.reference}: {what}"), GridImage(ours, f"{verdict.config}: {what}")
        shades = figures.coloured(apart[number], bright)
        rows.append([*pair, GridImage(shades, caption, alt, bright if differs else None)])
    left = len(pairs) - len(rows)
    more = f" {left} more {'frames ' if each > 1 else ''}were generated." if left else ""
    scale = "of values from 0 to 1; the bright end of the scale is the 99th percentile of the differences shown"
    report.pictures(
        rows, f"One device, {verdict.config}, and the largest absolute difference of a pixel, {scale}.{more}"
    )


def _frames(report: Page, job: PictureJob, verdict: Verdict, each: int) -> None:
    steps = tuple(float(frame + 1) for frame in range(each))
    lines = [
        Series(
            f"video {video + 1}" if job.total > 1 else verdict.config,
            steps,
            tuple(one.mean for one in verdict.accuracy.pictures[video * each : (video + 1) * each]),
        )
        for video in range(job.total)[:MAX_IMAGES]
    ]
    title = f"Mean absolute difference of every frame, {verdict.config}"
    chart = figures.line_chart(lines, title, "frame", "mean absolute difference", log_y=True)
    report.chart(chart, "Difference of every frame, of values from 0 to 1. 0 on the axis: the same bits.")


def _blocks(report: Page, verdict: Verdict) -> None:
    heat = verdict.where.heat
    if not heat or verdict.agreement.blocks_equal:
        return
    blocks = {(block, str(step)): error for block, row in heat.items() for step, error in row.items()}
    grid = curves.grid(blocks, columns=map(str, sorted({step for row in heat.values() for step in row})))
    title = f"Relative difference of every block's tokens at every step, {verdict.config}"
    chart = figures.heat_map(grid, title, "step", "block", log=True)
    report.chart(chart, "Largest relative difference of what each block returns, by step")

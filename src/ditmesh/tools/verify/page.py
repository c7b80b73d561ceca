"""The page that `ditmesh verify --html` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...config import ParallelConfig
from ...core.files import without_folder
from ...generate.job import PictureJob
from ...quality import curves, figures, perceptual
from ...quality.curves import Series
from ...quality.pictures import as_picture
from ...quality.report import Cell, Download, Page, Shown, as_csv, number_text, plain
from .runs import Run
from .verdicts import TOLERANCES, Verdict

# Pictures of one configuration that are shown.
SHOWN = 4


def page_of(
    job: PictureJob,
    verdicts: Sequence[Verdict],
    runs: Mapping[str, Run],
    references: Mapping[str, Run],
    facts: Mapping[str, Any],
    data: Mapping[str, Any],
) -> Page:
    """The page of a verification.

    Args:
        job, verdicts: what was generated, and the verdicts on the configurations.
        runs, references: rank 0's run of each configuration, and the runs of one device, by name.
        facts: where it ran and by what, by name.
        data: everything found, as JSON can hold it; it can be saved from the page.
    """
    name = without_folder(job.name)
    page = Page(
        "Verification against one device",
        f"{name}, {job.total} {'picture' if job.total == 1 else 'pictures'}, seed {job.seed}",
    )
    ran = [verdict for verdict in verdicts if not verdict.refused]
    page.section("Outcome")
    page.table(*_outcomes(verdicts), "Every configuration against one device")
    page.table(
        ("configuration", "first bits that differ", "first beyond the tolerance"),
        [_where(verdict) for verdict in verdicts],
        "Where it first differs from one device",
    )
    page.text(
        "Differences of pictures are of values from 0 to 1, those of latents relative to the largest value on one "
        "device; of several pictures the worst counts. Exact configurations are judged by a tolerance that rounding "
        f"explains ({job.dtype}: {TOLERANCES[job.dtype]:g} unless another was given), reproducible ones by their bits, "
        "stale ones only if a tolerance was given.",
        note=True,
    )
    said = json.dumps({**data, "model": name, "made_by": dict(facts)}, indent=1, allow_nan=False) + "\n"
    page.downloads([Download("verify.csv", csv_of(verdicts)), Download("verify.json", said)])
    if ran:
        page.section("Growth of the difference")
        lines = [
            Series(one.config, tuple(step.step for step in one.growth), tuple(step.latents for step in one.growth))
            for one in ran
        ]
        title = "Relative difference of the latents after every step, by configuration"
        chart = figures.line_chart(lines, title, "step", "largest relative difference", log_y=True)
        page.chart(chart, "Difference of the latents after every step. 0 on the axis: the same bits.")
    for verdict in ran:
        _configuration(page, job, verdict, runs[verdict.config], references[verdict.reference])
    page.section("Circumstances")
    page.table(*_settings(verdicts), "Settings of the configurations; others are the usual ones")
    page.facts({**_circumstances(job, references), **facts}, "What was run, by what, and where")
    return page


def csv_of(verdicts: Sequence[Verdict]) -> str:
    """One line for every configuration."""
    names = ("config", "reference", "devices", "promise", "outcome", "judged", "passed", "refused", "tolerance")
    names += ("equal", "blocks_equal", "repeats", "seen", "error", "largest", "mean", "psnr", "ssim", "perceptual")
    names += ("latents", "seconds", "one_device_seconds")
    rows = []
    for verdict in verdicts:
        row = {name: getattr(verdict, name) for name in names}
        row |= {
            f"bytes_{axis}": None if verdict.refused else verdict.bytes_sent.get(axis, 0) for axis in _axes(verdicts)
        }
        places = {"first_bit": verdict.first_bit, "first_beyond": verdict.first_beyond}
        row |= {name: place.describe() if place else None for name, place in places.items()}
        if verdict.refused:
            row |= dict.fromkeys(names[names.index("equal") :])
        rows.append(row)
    return as_csv(rows)


def _axes(verdicts: Sequence[Verdict]) -> list[str]:
    return sorted({axis for verdict in verdicts for axis in verdict.bytes_sent})


def _outcomes(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[str | Cell]]]:
    axes = _axes(verdicts)
    header = ["configuration", "verdict", "same bits", "largest", "mean", "PSNR (dB)", "SSIM", perceptual.NAME]
    header += [
        "latents",
        "seconds",
        "one device (s)",
        "speed-up",
        "sent (MB)",
        *(f"{axis} (MB)" for axis in axes if len(axes) > 1),
    ]
    rows = []
    for verdict in verdicts:
        row: list[str | Cell] = [verdict.config]
        row.append(Cell(verdict.outcome, ("good" if verdict.passed else "bad") if verdict.judged else ""))
        if not verdict.refused:
            sent = [sum(verdict.bytes_sent.values()), *(verdict.bytes_sent.get(a, 0) for a in axes if len(axes) > 1)]
            psnr = "equal" if verdict.psnr is None else f"{verdict.psnr:.1f}"
            row += ["yes" if verdict.equal else "no", number_text(verdict.largest, 2), number_text(verdict.mean, 2)]
            row += [psnr if any(one.psnr is not None for one in verdicts) else "", f"{verdict.ssim:.4f}"]
            row += ["" if verdict.perceptual is None else f"{verdict.perceptual:.4f}", number_text(verdict.latents, 2)]
            row += [number_text(verdict.seconds), number_text(verdict.one_device_seconds)]
            row.append(f"{verdict.one_device_seconds / verdict.seconds:.2f}" if verdict.seconds else "")
            row += [number_text(count / 1e6) for count in sent]
        rows.append(row + [""] * (len(header) - len(row)))
    return header, rows


def _settings(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[str | Cell]]]:
    """The settings that any of the configurations has changed."""
    usual = ParallelConfig().model_dump(mode="json")
    changed = [name for name in usual if any(verdict.settings[name] != usual[name] for verdict in verdicts)]
    rows: list[list[str | Cell]] = []
    for verdict in verdicts:
        settings = verdict.settings
        values = [plain(settings[name]) if settings[name] != usual[name] else "" for name in changed]
        rows.append([verdict.config, str(verdict.devices), *(Cell(value, "name") for value in values)])
    return ["configuration", "devices", *changed], rows


def _circumstances(job: PictureJob, references: Mapping[str, Run]) -> dict[str, Any]:
    """What was run, for people."""
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


def _where(verdict: Verdict) -> list[str | Cell]:
    if verdict.refused:
        return [verdict.config, Cell(f"refused: {verdict.refused}", "words"), Cell("", "words")]
    places = (verdict.first_bit, verdict.first_beyond)
    return [verdict.config, *(Cell(place.describe() if place else "none", "words") for place in places)]


def _configuration(page: Page, job: PictureJob, verdict: Verdict, run: Run, alone: Run) -> None:
    page.section(verdict.config)
    sentence = f"Compared with {verdict.reference}: {verdict.outcome}."
    if verdict.first_bit is None:
        sentence += " Nothing differs."
    else:
        sentence += f" The first bits that differ: {verdict.first_bit.describe()}."
        beyond = verdict.first_beyond
        sentence += f" First beyond the tolerance: {beyond.describe()}." if beyond else " Nothing beyond the tolerance."
    if not verdict.repeats:
        sentence += " Two runs of this configuration gave different bits."
    page.text(sentence)
    pairs = [pair for calls in zip(run.pictures, alone.pictures, strict=True) for pair in zip(*calls, strict=True)]
    # Frames of each video; 1 of a picture.
    each, rows = len(pairs) // job.total, []
    first = range(len(pairs))[:SHOWN]
    if each > 1:
        # Of the first video some, evenly spaced.
        first = [round(place * (each - 1) / (SHOWN - 1)) for place in range(SHOWN)]
    shown = dict.fromkeys(first)
    apart = {number: np.abs(as_picture(pairs[number][0]) - as_picture(pairs[number][1])) for number in shown}
    # One scale serves all of a configuration's pictures.
    bright = figures.brightest(list(apart.values()))
    for number in shown:
        ours, theirs = pairs[number]
        what = f"“{job.prompts[number // each // job.n]}”, seed {job.seed + number // each}"
        what += f", frame {number % each + 1}" if each > 1 else ""
        difference, differs = verdict.pictures[number], bool(apart[number].any())
        caption = f"difference, largest {number_text(difference.largest, 2)}" if differs else "no difference"
        alt = "the difference of the two pictures" + (": black, they are equal" if difference.equal else "")
        pair = Shown(theirs, f"{verdict.reference}: {what}"), Shown(ours, f"{verdict.config}: {what}")
        shades = figures.coloured(apart[number], bright)
        rows.append([*pair, Shown(shades, caption, alt, bright if differs else None)])
    left = len(pairs) - len(rows)
    more = f" {left} more {'frames ' if each > 1 else ''}were generated." if left else ""
    scale = "of values from 0 to 1; the bright end of the scale is the 99th percentile of the differences shown"
    page.pictures(rows, f"One device, {verdict.config}, and the largest absolute difference of a pixel, {scale}.{more}")
    if each > 1:
        steps = tuple(float(frame + 1) for frame in range(each))
        lines = [
            Series(
                f"video {video + 1}" if job.total > 1 else verdict.config,
                steps,
                tuple(one.mean for one in verdict.pictures[video * each : (video + 1) * each]),
            )
            for video in range(job.total)[:SHOWN]
        ]
        title = f"Mean absolute difference of every frame, {verdict.config}"
        chart = figures.line_chart(lines, title, "frame", "mean absolute difference", log_y=True)
        page.chart(chart, "Difference of every frame, of values from 0 to 1. 0 on the axis: the same bits.")
    blocks = {(block, str(step)): error for block, row in verdict.heat.items() for step, error in row.items()}
    if blocks and not verdict.blocks_equal:
        steps = sorted({step for row in verdict.heat.values() for step in row})
        grid = curves.grid(blocks, columns=map(str, steps))
        title = f"Relative difference of every block's tokens at every step, {verdict.config}"
        heat = figures.heat_map(grid, title, "step", "block", log=True)
        page.chart(heat, "Largest relative difference of what each block returns, by step")

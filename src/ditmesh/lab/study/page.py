"""The study's page, and its figures as JSON and CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...quality.metrics import as_picture
from ...report.report import StyledText
from ..pages.charts import (
    Chart,
    Series,
    coloured,
    eight_bits,
    grid,
    heat_map,
    line_chart,
    number_text,
    scale_maximum,
)
from ..pages.page import GridImage, Page
from .analysis import CAP, Combination, Mean, StudyResults, capped, findings
from .maps import place_maps
from .plan import SYNCHRONOUS, Pair, without_folder
from .samplers import scheduler_class

# Images of a grid, and lines of a chart, that still can be told apart.
ROWS, LINES = 8, 6
# Pixels of an image's side, on the page; larger ones are shrunk.
SIDE = 512


def write(
    results: StudyResults, folder: Path, target: float | None = None, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write ``report.html`` and ``results.json`` to the study's folder; returns the JSON's data.

    The target, in dB, is that of `StudyResults.rule`; the facts say where the figures are from, by name.
    """
    plan = results.plan
    rules = {pair: results.rule(*pair, target) for pair in plan.pairs}
    sentences = findings(results, rules)
    setup = {name: value for name, value in asdict(plan.setup).items() if name != "model"}
    data = {
        "setup": setup | {"name": without_folder(plan.setup.name)},
        "made_by": dict(facts or {}),
        "devices": list(plan.devices),
        "warmups": list(plan.warmups),
        "samplers": list(plan.samplers),
        "strategies": list(plan.strategies),
        "findings": sentences,
        "table": [asdict(row) for row in results.rows()],
        "rules": [{**pair._asdict(), **rule} for pair, rule in rules.items() if rule is not None],
        "against_fixed": results.against_fixed(),
        "cells": results.cells,
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page_of(results, folder / "cells", sentences, facts or {}).write(folder / "report.html")
    return data


def page_of(results: StudyResults, images: Path, sentences: Sequence[str], facts: Mapping[str, Any]) -> Page:
    """The page.

    Args:
        images: folder of its PNGs.
        facts: where the figures are from, by name.
    """
    plan = results.plan
    setup = plan.setup
    report = Page(
        "What stale strategies cost",
        f"{without_folder(setup.name)}, {setup.steps} steps, {setup.dtype} on {setup.device}; devices "
        f"{', '.join(map(str, plan.devices))}; {', '.join(plan.strategies)}; sampler {', '.join(plan.samplers)}",
    )
    report.section("What the figures say")
    report.points(sentences)
    report.section("Quality")
    for pair in plan.pairs:
        _table(report, results, pair)
    rows = results.rows()
    if not any(row.seconds is not None for row in rows):
        report.text(
            "Ranks were simulated: no time was measured. --real runs real ranks, too, and times them.", note=True
        )
    if unknown := sorted({row.strategy for row in rows if row.sent is None}):
        report.text(f"Not known without --real: bytes that {' and '.join(unknown)} would send.", note=True)
    for title, note, show in (
        ("Warm-up", "", lambda pair: _warmup_charts(report, results, pair)),
        ("Images", "", lambda pair: _images(report, results, pair, images)),
        ("Error of the prediction, step by step", PREDICTION, lambda pair: _loss_curves(report, results, pair)),
        ("Step by layer", "", lambda pair: _heat_maps(report, results, pair)),
        ("Where in the image", "", lambda pair: _places(report, results, pair)),
    ):
        report.section(title)
        if note:
            report.text(note)
        for pair in plan.pairs:
            show(pair)
    _real_ranks(report, results)
    report.section("Circumstances")
    kinds = {name: scheduler_class(name, Path(setup.model)) for name in plan.samplers}
    run = {name: value for name, value in asdict(setup).items() if name != "model" and value is not None} | {
        "name": without_folder(setup.name),
        "devices (N)": plan.devices,
        "warm-up policies": plan.warmups,
        "samplers": [f"{name} ({kind})" if kind else name for name, kind in kinds.items()],
        "strategies": plan.strategies,
        "prompts": [f"“{prompt}”" for prompt in dict.fromkeys(prompt for _, prompt, _ in results.synchronous)],
        "seeds": sorted({seed for _, _, seed in results.synchronous}),
        "images": len({(prompt, seed) for _, prompt, seed in results.synchronous}),
    }
    report.facts({**run, **facts}, "What was run, by what, and where")
    report.text("Cells that were in the folder already may have been run by another version, or elsewhere.", note=True)
    return report


PREDICTION = (
    "Relative L2 distance of what the sampler is given (noise, or velocity, after guidance) from what the synchronous "
    "run gives it. On its own trajectory it holds the errors of all steps before; on the same latents the exact "
    "transformer is given the stale run's inputs, so it holds this step's alone (before guidance; first request only)."
)


def _table(report: Page, results: StudyResults, pair: Pair) -> None:
    mine = [row for row in results.rows() if (row.sampler, row.strategy) == pair]
    axes = sorted({axis for row in mine for axis in row.sent or ()})
    header = ["configuration", "synchronous", "PSNR dB", "SSIM", "nearest image", "time s", "one device s"]
    header += ["sent MB", *(f"{axis} MB" for axis in axes if len(axes) > 1)]
    rows, exact = [], ""
    for row in mine:
        equal = f" ({row.equal} equal)" if row.equal else ""
        quality = (f"{row.psnr:.2f}{equal}", f"{row.ssim:.4f}", f"{row.right:.3f}")
        costs = [number_text(row.seconds), number_text(row.one_device_seconds), number_text(row.megabytes)]
        if len(axes) > 1:
            costs += ["" if row.sent is None else number_text(row.sent.get(axis, 0) / 1e6) for axis in axes]
        synchronous = "" if row.synchronous.value is None else f"{row.synchronous.value:.3g} of {row.evaluations}"
        rows.append((f"N = {row.devices}, {row.warmup}", synchronous, *quality, *costs))
        if row.right_synchronous.value is not None:
            exact = (
                " Nearest image: share of images that are nearest to the training image asked for (of the "
                f"synchronous ones: {row.right_synchronous:.3f})."
            )
    costs = [" Sent: by all ranks together in the first request."] if axes else []
    if any(row.seconds is not None for row in mine):
        costs.append(" Time: of the first request on real ranks, the slowest rank's.")
    report.table(
        header,
        rows,
        f"{pair}: against the synchronous image; mean ± standard error over images. In means an "
        f"equal image counts as {CAP:g} dB.{exact}{''.join(costs)}",
    )


def _warmup_charts(report: Page, results: StudyResults, pair: Pair) -> None:
    of, lines = f"{pair}", []
    for devices in results.plan.devices:
        fixed = results.stale_fixed(*pair, devices)
        if fixed:
            lines.append(_line(f"N = {devices}", fixed, [results.row(at).psnr for at in fixed.values()]))
    if not lines:
        return
    chart = line_chart(lines, f"PSNR over warm-up, {of}", "warm-up steps", "PSNR, dB")
    report.charts([(chart, f"{of}: PSNR against the synchronous image; bars: standard error.")])


def _line(name: str, xs: Iterable[float], means: Sequence[Mean]) -> Series:
    values = tuple(nan if m.value is None else m.value for m in means)
    series = Series(name, tuple(map(float, xs)), values)
    if all(m.error is None for m in means):
        return series
    errors = [m.error or 0.0 for m in means]
    low, high = (tuple(v + sign * e for v, e in zip(values, errors, strict=True)) for sign in (-1, 1))
    return replace(series, low=low, high=high)


def _images(report: Page, results: StudyResults, pair: Pair, folder: Path) -> None:
    """The image with the lowest PSNR, with every policy and N, each above its difference from the synchronous one."""
    hidden = results.plan.warmups[ROWS:]
    more = f" Not shown: {', '.join(hidden)}." if hidden else ""
    psnr = {
        (image["prompt"], image["seed"], at): capped(image["psnr"])
        for at in results.by
        if at[:2] == pair
        for image in results.images(at)
    }
    if not psnr:
        return
    report.images(
        _rows_of(results, pair, folder, min(psnr, key=lambda image: psnr[image])[:2]),
        f"{pair}: the image with the lowest PSNR of all, at the top left the synchronous one; under each the largest "
        "absolute difference of a pixel's 8-bit values, of values from 0 to 1. One scale serves a row: its bright end "
        "is the 99th percentile of the row's differences. Dashes: where the ranks' shares of the image meet, if they "
        f"are even.{more}",
    )


def _rows_of(results: StudyResults, pair: Pair, folder: Path, asked: tuple[str, int]) -> list[list[GridImage]]:
    """For every policy a row of one image by N, and a row of their differences; the synchronous one stands once."""
    exact_file = folder / results.synchronous[(pair.sampler, *asked)]["file"]
    exact, rows = _read(exact_file), []
    for warmup in results.plan.warmups[:ROWS]:
        pictures: list[tuple[int, str, Image.Image]] = []
        for devices in results.plan.devices:
            for image in results.images((pair.sampler, pair.strategy, devices, warmup)):
                if (image["prompt"], image["seed"]) == asked:
                    psnr = CAP + 1 if image["psnr"] is None else image["psnr"]
                    over = f"{psnr:.1f} dB" if psnr <= CAP else f"over {CAP:g} dB"
                    caption = f"N = {devices}, {warmup}: {'equal' if image['equal'] else over}"
                    pictures.append((devices, caption, _read(folder / image["file"])))
        if not pictures:
            continue
        begin = GridImage(None) if rows else _shown(exact, SYNCHRONOUS, asked[0])
        apart = [np.abs(as_picture(ours) - as_picture(exact)) for _, _, ours in pictures]
        bright = scale_maximum(apart)
        rows.append([begin, *(_shown(ours, caption, asked[0]) for _, caption, ours in pictures)])
        # Frames of a video lie beside one another in its image: no line says where tokens are in each.
        still = results.plan.setup.frames is None
        rows.append(
            [
                GridImage(None),
                *(
                    _difference(one, bright, devices if still else 1, caption.partition(":")[0])
                    for one, (devices, caption, _) in zip(apart, pictures, strict=True)
                ),
            ]
        )
    return rows


def _read(file: Path) -> Image.Image:
    with Image.open(file) as image:
        return image.convert("RGB")


def _shown(image: Image.Image, caption: str, prompt: str, bright: float | None = None) -> GridImage:
    if max(image.size) > SIDE:
        image = image.copy()
        image.thumbnail((SIDE, SIDE))
    return GridImage(image, caption, f"{prompt}, {caption}", bright)


def _difference(apart: np.ndarray, bright: float, devices: int, name: str) -> GridImage:
    if not apart.any():
        return GridImage(np.zeros_like(apart), "no difference", f"{name}: no difference from the synchronous image")
    borders = [rank / devices for rank in range(1, devices)]
    shades = Image.fromarray(eight_bits(coloured(apart, bright, borders)))
    caption = f"difference, largest {number_text(float(apart.max()), 2)}"
    return _shown(shades, caption, f"{name} against the synchronous image", bright)


def _loss_curves(report: Page, results: StudyResults, pair: Pair) -> None:
    charts: list[tuple[Chart, str]] = []
    by: dict[int, list[Combination]] = {}
    for at in results.by:
        row = results.row(at)
        # Where every step is synchronous there is no error.
        if row.synchronous.value != row.evaluations and at[:2] == pair:
            by.setdefault(at[2], []).append(at)
    for devices, some in by.items():
        # If there are too many, the last one asked for still is shown.
        some, of = [*some[: LINES - 1], *some[LINES - 1 :][-1:]], f"{pair}, {devices} devices"
        own = {at[3]: results.prediction_errors(at) for at in some}
        same = {at[3]: [Mean(e, None, 1) for e in results.by[at][0].get("same_latents") or ()] for at in some}
        for errors, on, bars in (
            (own, "on its own trajectory", "; mean over images, bars: standard error"),
            ({name: means for name, means in same.items() if means}, "on the same latents", ""),
        ):
            if errors:
                lines = [_line(name, range(1, len(means) + 1), means) for name, means in errors.items()]
                chart = line_chart(lines, f"Error {on}, {of}", "step", "relative error")
                charts.append((chart, f"{of}: {on}{bars}."))
    report.charts(charts)


def _heat_maps(report: Page, results: StudyResults, pair: Pair) -> None:
    """Maps of the most devices with the shortest warm-up there is, which show most."""
    some = [at for at in results.by if at[:2] == pair and at[3] in results.plan.warmups]
    some = [at for at in some if at[2] == max(at[2] for at in some)]
    if not some:
        return
    # Without any warm-up the first step alone would be seen.
    at = next((at for at in some if at[3] != "fixed(0)"), some[0])
    first, of = results.by[at][0], f"{pair}, {at[2]} devices, {at[3]}"
    steps = first.get("steps", [])
    charts: list[tuple[Chart, str]] = []
    drifts = {(block, str(s["step"] + 1)): drift for s in steps for block, drift in s["drift"].items()}
    if drifts:
        shades = grid(drifts, _ordered({block for block, _ in drifts}), [str(s["step"] + 1) for s in steps])
        chart = heat_map(shades, f"Drift of keys and values, {of}", "step", "block")
        charts.append((chart, f"{of}: relative L2 distance of keys and values from the step before."))
    if errors := first.get("attention_error"):
        values = {(block, str(int(s) + 1)): e for block, by in errors.items() for s, e in by.items() if e is not None}
        shades = grid(values, _ordered(errors), [str(step + 1) for step in range(first["evaluations"])])
        chart = heat_map(shades, f"Error of attention, {of}", "step", "block")
        caption = f"{of}: relative L2 error of attention's output against exact attention, same inputs."
        charts.append((chart, caption))
    report.charts(charts)


def _places(report: Page, results: StudyResults, pair: Pair) -> None:
    """Maps by place, of the same combination as the maps by layer."""
    some = [at for at in results.by if at[:2] == pair and at[3] != "fixed(0)" and results.by[at][0].get("token_error")]
    if not some:
        report.text(
            f"{pair}: not measured (--detail measures it in the first request of every combination).", note=True
        )
        return
    at = max(some, key=lambda at: at[2])
    first = results.by[at][0]
    waits = {step["step"] for step in first.get("steps", ()) if step["synchronous"]}
    stale = [step for step in range(first["evaluations"]) if step not in waits]
    place_maps(report, first["token_error"], at[2], stale, f"{pair}, {at[2]} devices, {at[3]}")


def _ordered(blocks: Iterable[str]) -> list[str]:
    return sorted(blocks, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def _real_ranks(report: Page, results: StudyResults) -> None:
    if not results.real:
        return
    report.section("Real ranks")
    rows = []
    for result in results.real:
        cell = result["cell"]
        for number, rank in enumerate(result["ranks"]):
            work = rank["seconds"] - rank["in_collectives"]
            rows.append(
                (
                    f"{cell['sampler']}, {cell['strategy']}, N = {cell['devices']}, {cell['warmup']}",
                    str(number),
                    f"{work:.3f}",
                    f"{rank['in_collectives']:.3f}",
                    f"{rank['bytes_sent'] / 1e6:.2f}",
                    StyledText("yes", "good") if result["equal_to_simulation"] else StyledText("no", "bad"),
                )
            )
    report.table(
        ("run", "rank", "working, s", "inside collectives, s", "sent, MB", "same bits as simulated"),
        rows,
        "One request on real ranks, the second of two. Time inside collectives is sending and waiting.",
    )

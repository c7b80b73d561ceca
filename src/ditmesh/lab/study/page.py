"""The study's page, and its figures as JSON and CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...core.files import without_folder
from ...quality.perceptual import HINT, METRIC, available
from ...quality.pictures import as_picture, eight_bits
from ...report.formatting import number_text
from ...report.report import StyledText
from ..pages.charts import Chart, bar_chart, coloured, heat_map, line_chart, scale_maximum, scatter_chart
from ..pages.curves import Point, Series, grid
from ..pages.page import Download, GridImage, Page, as_csv
from .analysis import (
    CAP,
    Combination,
    Mean,
    StudyResults,
    findings,
    latency,
    logged_synchronous_steps,
    policy_findings,
)
from .maps import layer_charts, load_charts, place_maps
from .plan import SYNCHRONOUS, Pair
from .samplers import scheduler_class

# Images of a grid, and lines of a chart, that still can be told apart.
ROWS, LINES = 8, 6
# Images that have a distribution.
DISTRIBUTED = 8
# Pixels of an image's side, on the page; larger ones are shrunk.
SIDE = 512

Rules = Mapping[Pair, Mapping[str, Any] | None]


def write(
    results: StudyResults, folder: Path, target: float | None = None, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write ``report.html``, ``results.json`` and ``results.csv`` to the study's folder; returns the JSON's data.

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
        "root_pairs": [{**pair._asdict(), **roots} for pair in plan.pairs for roots in results.root_pairs(*pair)],
        "against_fixed": results.against_fixed(),
        "against_others": results.against_others(),
        "single_steps": results.single_steps(),
        "cells": results.cells,
    }
    files = (
        Download("results.csv", csv_of(results)),
        Download("results.json", json.dumps(data, indent=1, allow_nan=False) + "\n"),
    )
    for file in files:
        (folder / file.name).write_text(file.text, encoding="utf-8")
    page_of(results, folder / "cells", sentences, rules, facts or {}, files).write(folder / "report.html")
    return data


def csv_of(results: StudyResults) -> str:
    """One line for every image, with the time of its request on real ranks and the bytes sent in it by axis."""
    measures = ("prompt", "seed", "equal", "psnr", "ssim", "perceptual", "right", "file")
    axes = sorted({axis for result in results.cells for axis in result.get("sent") or ()})
    rows = []
    for result in results.cells:
        cell, sent = result["cell"], result.get("sent")
        synchronous = cell["strategy"] == SYNCHRONOUS
        request = {name: cell[name] for name in ("sampler", "strategy", "devices", "warmup", "real")} | {
            "evaluations": result["evaluations"],
            "synchronous_steps": result["evaluations"] if synchronous else logged_synchronous_steps(result),
            "seconds": latency(result),
            "one_device_seconds": result.get("one_device_seconds"),
        }
        request |= {f"bytes_{axis}": None if sent is None else sent.get(axis, 0) for axis in axes}
        rows += [request | {name: image[name] for name in measures} for image in result["images"]]
    return as_csv(rows)


def page_of(
    results: StudyResults,
    images: Path,
    sentences: Sequence[str],
    rules: Rules,
    facts: Mapping[str, Any],
    files: Sequence[Download],
) -> Page:
    """The page.

    Args:
        images: folder of its PNGs.
        rules: `StudyResults.rule` by sampler and strategy.
        facts: where the figures are from, by name.
        files: for download from the page.
    """
    plan = results.plan
    setup = plan.setup
    report = Page(
        "What stale strategies cost",
        f"{without_folder(setup.name)}, {setup.steps} steps, {setup.dtype} on {setup.device}; devices "
        f"{', '.join(map(str, plan.devices))}; {', '.join(plan.strategies)}; sampler {', '.join(plan.samplers)}",
    )
    report.downloads(files)
    report.section("What the figures say")
    policies = policy_findings(results)
    report.points([sentence for sentence in sentences if sentence not in policies])
    report.section("Quality")
    for pair in plan.pairs:
        _table(report, results, pair)
    if not available():
        report.text(HINT, note=True)
    report.section("Quality against time and bytes")
    _costs(report, results)
    if policies:
        report.section("Policies with as many synchronous steps")
        report.points(policies, "In words")
        _others(report, results)
    for title, note, show in (
        ("Warm-up", "", lambda pair: _warmup_charts(report, results, pair, rules.get(pair))),
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
    _single_steps(report, results)
    _real_ranks(report, results)
    report.section("Circumstances")
    report.facts({**circumstances(results), **facts}, "What was run, by what, and where")
    report.text("Cells that were in the folder already may have been run by another version, or elsewhere.", note=True)
    return report


def circumstances(results: StudyResults) -> dict[str, Any]:
    """The circumstances of the runs, for people."""
    plan, setup = results.plan, results.plan.setup
    asked = list(dict.fromkeys((prompt, seed) for _, prompt, seed in results.synchronous))
    seeds = sorted({seed for _, seed in asked})
    return {
        "model": without_folder(setup.name),
        "digest of the weights": setup.weights,
        "steps": setup.steps,
        "guidance scale": setup.guidance,
        "image size": f"{setup.size[0]} × {setup.size[1]} pixels" if setup.size else None,
        **({"frames": setup.frames} if setup.frames is not None else {}),
        "longest prompt": f"{setup.max_sequence_length} tokens" if setup.max_sequence_length else None,
        "precision": setup.dtype,
        "device": setup.device,
        "devices (N)": plan.devices,
        "warm-up policies": plan.warmups,
        "samplers": [
            f"{name} ({kind})" if (kind := scheduler_class(name, Path(setup.model))) else name for name in plan.samplers
        ],
        "strategies": plan.strategies,
        "prompts": [f"“{prompt}”" for prompt in dict.fromkeys(prompt for prompt, _ in asked)],
        "seeds": f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 2 else seeds,
        "images": len(asked),
    }


PREDICTION = (
    "Relative L2 distance of what the sampler is given (noise, or velocity, after guidance) from what the synchronous "
    "run gives it. On its own trajectory it holds the errors of all steps before; on the same latents the exact "
    "transformer is given the stale run's inputs, so it holds this step's alone (before guidance; first request only)."
)


def _table(report: Page, results: StudyResults, pair: Pair) -> None:
    mine = [row for row in results.rows() if (row.sampler, row.strategy) == pair]
    axes = sorted({axis for row in mine for axis in row.sent or ()})
    header = ["configuration", "synchronous", "PSNR dB", "SSIM", METRIC, "nearest image", "time s", "one device s"]
    header += ["sent MB", *(f"{axis} MB" for axis in axes if len(axes) > 1)]
    rows, exact = [], ""
    for row in mine:
        equal = f" ({row.equal} equal)" if row.equal else ""
        quality = (f"{row.psnr:.2f}{equal}", f"{row.ssim:.4f}", f"{row.perceptual:.4f}", f"{row.right:.3f}")
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


def _costs(report: Page, results: StudyResults) -> None:
    """Quality against cost, one chart for every sampler and measure of cost."""
    charts = []
    for sampler in results.plan.samplers:
        rows = [row for row in results.rows() if row.sampler == sampler and row.psnr.value is not None]
        alone = next((row.one_device_seconds for row in rows if row.one_device_seconds is not None), None)
        beside = "" if alone is None else f" One device took {number_text(alone)} s."
        for what, axis, cost, more in (
            ("time", "time of a request, s", "seconds", f" First request, on real ranks.{beside}"),
            ("bytes", "sent by all ranks, MB", "megabytes", " First request; all ranks and axes together."),
            (
                "synchronous steps",
                "steps in which ranks wait, %",
                "share_synchronous",
                " Stale steps send as much as synchronous ones, and compute meanwhile: what is sent does not tell "
                "warm-ups apart, and the share of steps that wait does.",
            ),
        ):
            points = [
                Point(
                    f"N = {row.devices}, {row.warmup}", f"N={row.devices} {row.warmup}", row.strategy, x, row.psnr.value
                )
                for row in rows
                if (x := getattr(row, cost)) is not None and row.psnr.value is not None
            ]
            if points:
                chart = scatter_chart(points, f"PSNR against {what}, {sampler}", axis, "PSNR, dB")
                caption = (
                    f"{sampler}: quality against {what}; up and left is better. Numbers are those of the table "
                    f"below. Ringed and joined: the Pareto front, which nothing measured beats on both.{more}"
                )
                charts.append((chart, caption))
    report.charts(charts)
    if not any(row.seconds is not None for row in results.rows()):
        report.text(
            "Ranks were simulated: no time was measured. --real runs real ranks, too, and times them.", note=True
        )
    unknown = sorted({row.strategy for row in results.rows() if row.sent is None})
    if unknown:
        report.text(f"Not known without --real: bytes that {' and '.join(unknown)} would send.", note=True)


def _others(report: Page, results: StudyResults) -> None:
    rows = []
    for policy in results.against_others():
        for other in policy["others"]:
            apart = Mean(**other["difference"])
            kind = ("good" if (apart.value or 0) > 0 else "bad") if apart.is_clear else ""
            same = other["same_steps"]
            rows.append(
                (
                    f"{policy['sampler']}, {policy['strategy']}, N = {policy['devices']}",
                    f"{policy['synchronous']:g} of {policy['evaluations']}",
                    StyledText(policy["warmup"], "name"),
                    f"{Mean(**policy['psnr']):.2f}",
                    StyledText(other["warmup"], "name"),
                    f"{Mean(**other['psnr']):.2f}",
                    StyledText("the same steps" if same else f"{apart:+.2f}", kind),
                    "" if same else f"{other['closer']} of {apart.count}",
                )
            )
    if rows:
        report.table(
            ("of", "synchronous", "adaptive", "PSNR dB", "other policy", "PSNR dB", "difference dB", "closer"),
            rows,
            "Adaptive policies beside others with as many synchronous steps, on the same images; coloured: over two "
            "standard errors of the difference. Closer: images on which the adaptive one has the higher PSNR.",
        )


def _warmup_charts(report: Page, results: StudyResults, pair: Pair, rule: Mapping[str, Any] | None) -> None:
    of, lines = f"{pair}", []
    for devices in results.plan.devices:
        fixed = results.stale_fixed(*pair, devices)
        if fixed:
            lines.append(_line(f"N = {devices}", fixed, [results.row(at).psnr for at in fixed.values()]))
    if not lines:
        return
    chart = line_chart(lines, f"PSNR over warm-up, {of}", "warm-up steps", "PSNR, dB")
    charts = [(chart, f"{of}: PSNR against the synchronous image; bars: standard error.")]
    if rule is None or rule["fit"] is None:
        report.charts(charts)
        return
    needed = {float(n): warmup for n, warmup in rule["needed"].items() if warmup is not None}
    fit, base, devices = rule["fit"], rule["sqrt"]["base"], tuple(needed)
    series = [
        Series("needed", devices, tuple(needed.values())),
        Series(f"{fit['a']:.2f} N^{fit['b']:.2f}", devices, tuple(fit["a"] * n ** fit["b"] for n in devices)),
        Series(f"{base:.2f} √N", devices, tuple(base * n**0.5 for n in devices)),
    ]
    chart = line_chart(series, f"Warm-up needed, {of}", "devices N", "warm-up steps")
    report.charts([*charts, (chart, f"{of}: warm-up steps needed for {rule['target_psnr']:g} dB.")])


def _line(name: str, xs: Iterable[float], means: Sequence[Mean]) -> Series:
    values = tuple(nan if m.value is None else m.value for m in means)
    series = Series(name, tuple(map(float, xs)), values)
    if all(m.error is None for m in means):
        return series
    errors = [m.error or 0.0 for m in means]
    low, high = (tuple(v + sign * e for v, e in zip(values, errors, strict=True)) for sign in (-1, 1))
    return replace(series, low=low, high=high)


def _images(report: Page, results: StudyResults, pair: Pair, folder: Path) -> None:
    """One image with every policy and N, and under each how it differs from the synchronous one: first and worst."""
    hidden = results.plan.warmups[ROWS:]
    more = f" Not shown: {', '.join(hidden)}." if hidden else ""
    first, worst = _first_and_worst(results, pair)
    for which, asked in (("first", first), ("worst", worst)):
        if asked is None or (which == "worst" and asked == first):
            continue
        rows = _rows_of(results, pair, folder, asked)
        what = "the first image" if which == "first" else "the image with the lowest PSNR of all"
        report.images(
            rows,
            f"{pair}: {what}, at the top left the synchronous one; under each the largest absolute "
            "difference of a pixel's 8-bit values, of values from 0 to 1. One scale serves a row: its bright end is "
            "the 99th percentile of the row's differences. Dashes: where the ranks' shares of the image meet, if they "
            f"are even.{more}",
        )
    _distribution(report, results, pair)
    _frames(report, results, pair)


def _first_and_worst(results: StudyResults, pair: Pair) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Prompt and seed of the first image, and of the one with the lowest PSNR of any policy and N."""
    some = [
        (image["prompt"], image["seed"], image["psnr"])
        for at in results.asked()
        if at[:2] == pair
        for image in results.images(at)
    ]
    if not some:
        return None, None
    worst = min(some, key=lambda one: CAP + 1 if one[2] is None else one[2])
    return some[0][:2], worst[:2]


def _rows_of(results: StudyResults, pair: Pair, folder: Path, asked: tuple[str, int]) -> list[list[GridImage]]:
    """For every policy a row of one image by N, and a row of their differences; the synchronous one stands once."""
    exact_file = folder / results.synchronous[(pair.sampler, *asked)]["file"]
    exact, rows = _read(exact_file), []
    for warmup in results.plan.warmups[:ROWS]:
        found: list[tuple[int, str, Image.Image]] = []
        for devices in results.plan.devices:
            for image in results.images((pair.sampler, pair.strategy, devices, warmup)):
                if (image["prompt"], image["seed"]) == asked:
                    psnr = CAP + 1 if image["psnr"] is None else image["psnr"]
                    over = f"{psnr:.1f} dB" if psnr <= CAP else f"over {CAP:g} dB"
                    caption = f"N = {devices}, {warmup}: {'equal' if image['equal'] else over}"
                    found.append((devices, caption, _read(folder / image["file"])))
        if not found:
            continue
        begin = GridImage(None) if rows else _shown(exact, SYNCHRONOUS, asked[0])
        apart = [np.abs(as_picture(ours) - as_picture(exact)) for _, _, ours in found]
        bright = scale_maximum(apart)
        rows.append([begin, *(_shown(ours, caption, asked[0]) for _, caption, ours in found)])
        # Frames of a video lie beside one another in its image: no line says where tokens are in each.
        still = results.plan.setup.frames is None
        rows.append(
            [
                GridImage(None),
                *(
                    _difference(one, bright, devices if still else 1, caption.partition(":")[0])
                    for one, (devices, caption, _) in zip(apart, found, strict=True)
                ),
            ]
        )
    return rows


def _distribution(report: Page, results: StudyResults, pair: Pair) -> None:
    """Share of the images up to every PSNR, a line for each policy, at the most devices."""
    charted = _charted(results, pair)
    if not charted:
        return
    devices = max(charted)
    lines = []
    for at in charted[devices]:
        values = sorted(results.psnr_of(at).values())
        if len(values) >= DISTRIBUTED:
            shares = tuple(100 * (place + 1) / len(values) for place in range(len(values)))
            lines.append(Series(at[3], tuple(values), shares))
    if lines:
        of = f"{pair}, {devices} devices"
        chart = line_chart(lines, f"Images up to every PSNR, {of}", "PSNR, dB", "share of the images, %")
        report.chart(chart, f"{of}: share of the images with at most so much PSNR; farther right is better.")


def _frames(report: Page, results: StudyResults, pair: Pair) -> None:
    values: dict[tuple[str, str], float] = {}
    count = 0
    for devices, warmup in product(results.plan.devices, results.plan.warmups):
        levels = [
            one["frames"] for one in results.images((pair.sampler, pair.strategy, devices, warmup)) if "frames" in one
        ]
        for frame, several in enumerate(zip(*levels, strict=True)):
            count = max(count, frame + 1)
            # The mean of the errors, as a root: of equal frames there is none.
            errors = [0.0 if level is None else 10 ** (-level / 10) for level in several]
            values[f"N = {devices}, {warmup}", str(frame + 1)] = float(np.mean(errors)) ** 0.5
    if values:
        found = grid(values, columns=[str(frame + 1) for frame in range(count)])
        title = f"Root mean square difference of every frame, {pair}"
        said = "of values from 0 to 1, from the synchronous video, by frame"
        report.chart(heat_map(found, title, "frame", "policy", log=True), f"{pair}: difference, {said}.")


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


def _charted(results: StudyResults, pair: Pair) -> dict[int, list[Combination]]:
    """Combinations of one chart, by the number of devices.

    Where every step is synchronous there is no error. If there are too many, the last one asked for still is shown.
    """
    by: dict[int, list[Combination]] = {}
    for at in results.asked():
        row = results.row(at)
        if row.synchronous.value != row.evaluations and at[:2] == pair:
            by.setdefault(at[2], []).append(at)
    return {devices: [*some[: LINES - 1], *some[LINES - 1 :][-1:]] for devices, some in by.items()}


def _loss_curves(report: Page, results: StudyResults, pair: Pair) -> None:
    charts: list[tuple[Chart, str]] = []
    for devices, some in _charted(results, pair).items():
        of = f"{pair}, {devices} devices"
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
    report.charts([*charts, *_attention_charts(first, of)])


def _attention_charts(first: Mapping[str, Any], of: str) -> list[tuple[Chart, str]]:
    errors = first.get("attention_error")
    if not errors:
        return []
    values = {(block, str(int(s) + 1)): e for block, by in errors.items() for s, e in by.items() if e is not None}
    shades = grid(values, _ordered(errors), [str(step + 1) for step in range(first["evaluations"])])
    chart = heat_map(shades, f"Error of attention, {of}", "step", "block")
    said = f"{of}: relative L2 error of attention's output against exact attention, same inputs."
    margins = layer_charts({block: errors[block] for block in _ordered(errors)}, first["evaluations"], of)
    return [(chart, said), *margins]


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


def _single_steps(report: Page, results: StudyResults) -> None:
    singles = results.single_steps()
    if singles:
        report.section("Which steps matter")
    for single in singles:
        of = f"{single['strategy']}, {single['sampler']}, {single['devices']} devices"
        charts = []
        for field, name, title, unit, caption in (
            (
                "gain",
                "gain",
                "Gain of one step",
                "gain, dB",
                "gain in PSNR when this step is synchronous beside the first one",
            ),
            ("psnr_with_one_stale", "PSNR", "One stale step", "PSNR, dB", "PSNR when this step alone is stale"),
        ):
            means = [Mean(**mean) for mean in single[field]]
            bars = _line(name, range(len(means)), means)
            chart = bar_chart([*map(str, single["steps"])], bars, f"{title}, {of}", unit, x_label="step")
            charts.append((chart, f"{of}: {caption}."))
        report.charts(charts)


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
    most = max(results.real, key=lambda result: result["cell"]["devices"])
    cell = most["cell"]
    of = f"{cell['strategy']}, {cell['sampler']}, {cell['devices']} devices, {cell['warmup']}"
    report.charts(load_charts(most["ranks"], of))

"""The study's page, and its figures as JSON and CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...quality.curves import Grid, Series, grid
from ...quality.figures import bar_chart, heat_map, line_chart
from ...quality.perceptual import HINT, NAME, available
from ...quality.report import Cell as TableCell
from ...quality.report import Page, Shown
from .analysis import (
    CAP,
    Combination,
    Mean,
    Results,
    findings,
    finite_or_nan,
    policy_findings,
    signed,
    synchronous_steps,
)
from .plan import SYNCHRONOUS, has_given_steps

# Pictures of a grid, and lines of a chart, that still can be looked at.
ROWS, LINES = 8, 6


def write(results: Results, folder: Path, target: float | None = None) -> dict[str, Any]:
    """Write ``report.html``, ``results.json`` and ``results.csv``; returns what the JSON holds.

    Args:
        results: the finished cells.
        folder: of the study.
        target: PSNR in dB that the rule for the warm-up is for; None: see `Results.rule`.
    """
    plan = results.plan
    rules = {
        (sampler, strategy): results.rule(sampler, strategy, target)
        for sampler in plan.samplers
        for strategy in plan.strategies
    }
    said = findings(results, rules)
    data = {
        "setup": asdict(plan.setup),
        "devices": list(plan.devices),
        "warmups": list(plan.warmups),
        "samplers": list(plan.samplers),
        "strategies": list(plan.strategies),
        "findings": said,
        "table": [asdict(row) for row in results.rows()],
        "rules": [
            {"sampler": sampler, "strategy": strategy, **rule}
            for (sampler, strategy), rule in rules.items()
            if rule is not None
        ],
        "root_pairs": [
            {"sampler": sampler, "strategy": strategy, **pair}
            for sampler, strategy in rules
            for pair in results.root_pairs(sampler, strategy)
        ],
        "against_fixed": results.against_fixed(),
        "against_others": results.against_others(),
        "single_steps": results.single_steps(),
        "cells": results.cells,
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_csv(results, folder / "results.csv")
    page_of(results, folder / "cells", said, rules).write(folder / "report.html")
    return data


def write_csv(results: Results, path: Path) -> None:
    """One line for every picture."""
    header = ["sampler", "strategy", "devices", "warmup", "real", "evaluations", "synchronous_steps"]
    header += ["prompt", "seed", "equal", "psnr", "ssim", "perceptual", "right", "file"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for result in results.cells:
            cell = result["cell"]
            steps = result["evaluations"] if cell["strategy"] == SYNCHRONOUS else synchronous_steps(result)
            for picture in result["pictures"]:
                first = [cell[name] for name in header[:5]]
                writer.writerow([*first, result["evaluations"], steps, *(picture[name] for name in header[7:])])


def page_of(
    results: Results,
    pictures: Path,
    said: Sequence[str],
    rules: Mapping[tuple[str, str], Mapping[str, Any] | None],
) -> Page:
    """The page.

    Args:
        results: the finished cells.
        pictures: folder of their PNGs.
        said: what the figures say.
        rules: see `Results.rule`, by sampler and strategy.
    """
    plan = results.plan
    setup = plan.setup
    page = Page(
        "What stale strategies cost",
        f"{setup.name}, {setup.steps} steps, {setup.dtype} on {setup.device}; devices "
        f"{', '.join(map(str, plan.devices))}; {', '.join(plan.strategies)}; sampler {', '.join(plan.samplers)}",
    )
    page.section("What the figures say")
    policies = policy_findings(results)
    page.points([sentence for sentence in said if sentence not in policies])
    page.section("Quality")
    _table(page, results)
    if not available():
        page.text(HINT, note=True)
    _others(page, results)
    _warmup_charts(page, results, rules)
    _pictures(page, results, pictures)
    _loss_curves(page, results)
    _heat_maps(page, results)
    _single_steps(page, results)
    _real_ranks(page, results)
    return page


def _table(page: Page, results: Results) -> None:
    header = ("N", "warm-up", "synchronous", "PSNR dB", "SSIM", NAME, "nearest picture")
    every = results.rows()
    for sampler in results.plan.samplers:
        for strategy in results.plan.strategies:
            rows, exact = [], ""
            for row in every:
                if (row.sampler, row.strategy) != (sampler, strategy):
                    continue
                equal = f" ({row.equal} equal)" if row.equal else ""
                quality = (row.psnr.text() + equal, row.ssim.text(4), row.perceptual.text(4))
                name = TableCell(row.warmup, "name")
                rows.append((str(row.devices), name, row.synchronous_text(), *quality, row.right.text(3)))
                if row.right_synchronous.value is not None:
                    exact = f" (of the synchronous drawings: {row.right_synchronous.text(3)})"
            page.table(
                header,
                rows,
                f"{strategy}, {sampler}: against the synchronous picture; mean ± standard error over pictures. Nearest "
                f"picture: share of drawings whose nearest training picture is the one asked for{exact}. In means an "
                f"equal picture counts as {CAP:g} dB.",
            )


def _others(page: Page, results: Results) -> None:
    found, said = results.against_others(), policy_findings(results)
    if not said:
        return
    page.section("Policies with as many synchronous steps")
    page.points(said, "In words")
    rows = []
    for beside in found:
        for other in beside["others"]:
            apart = Mean(**other["difference"])
            clear = apart.value is not None and apart.error is not None and abs(apart.value) > 2 * apart.error
            kind = ("good" if (apart.value or 0) > 0 else "bad") if clear else ""
            rows.append(
                (
                    f"{beside['sampler']}, {beside['strategy']}, N = {beside['devices']}",
                    f"{beside['synchronous']:g} of {beside['evaluations']}",
                    TableCell(beside["warmup"], "name"),
                    Mean(**beside["psnr"]).text(),
                    TableCell(other["warmup"], "name"),
                    Mean(**other["psnr"]).text(),
                    TableCell("the same steps" if other["same_steps"] else signed(apart), kind),
                    "" if other["same_steps"] else f"{other['closer']} of {apart.count}",
                )
            )
    if not rows:
        return
    page.table(
        ("of", "synchronous", "adaptive", "PSNR dB", "other policy", "PSNR dB", "difference dB", "closer"),
        rows,
        "Adaptive policies beside others with as many synchronous steps, on the same pictures; coloured: over two "
        "standard errors of the difference. Closer: pictures on which the adaptive one has the higher PSNR.",
    )


def _warmup_charts(page: Page, results: Results, rules: Mapping[tuple[str, str], Mapping[str, Any] | None]) -> None:
    plan = results.plan
    page.section("Warm-up")
    for sampler in plan.samplers:
        for strategy in plan.strategies:
            lines = []
            for devices in plan.devices:
                rows = {w: results.row(at) for w, at in results.fixed(sampler, strategy, devices).items()}
                # Where every step is synchronous the picture is the exact one.
                points = {w: row.psnr for w, row in rows.items() if w < row.evaluations}
                if points:
                    lines.append(_line(f"N = {devices}", list(points), list(points.values())))
            if not lines:
                continue
            chart = line_chart(
                lines, f"PSNR over warm-up, {strategy}, {sampler}", "warm-up steps", "PSNR, dB", whole_x=True
            )
            page.chart(chart, f"{strategy}, {sampler}: PSNR against the synchronous picture; bars: standard error.")
            rule = rules.get((sampler, strategy))
            if rule is None or rule["points"] < 2 or rule["fit"] is None:
                continue
            needed = {int(n): w for n, w in rule["needed"].items() if w is not None}
            fit, base = rule["fit"], rule["sqrt"]["base"]
            xs = tuple(float(n) for n in needed)
            series = [
                Series("needed", xs, tuple(needed.values())),
                Series(f"{fit['a']:.2f} N^{fit['b']:.2f}", xs, tuple(fit["a"] * x ** fit["b"] for x in xs)),
                Series(f"{base:.2f} √N", xs, tuple(base * x**0.5 for x in xs)),
            ]
            chart = line_chart(
                series, f"Warm-up needed, {strategy}, {sampler}", "devices N", "warm-up steps", whole_x=True
            )
            page.chart(chart, f"{strategy}, {sampler}: warm-up steps needed for {rule['target_psnr']:g} dB.")


def _line(name: str, xs: Sequence[float], means: Sequence[Mean]) -> Series:
    values = [finite_or_nan(m.value) for m in means]
    errors = [m.error or 0.0 for m in means]
    bars = any(m.error is not None for m in means)
    low = tuple(v - e for v, e in zip(values, errors, strict=True)) if bars else ()
    high = tuple(v + e for v, e in zip(values, errors, strict=True)) if bars else ()
    return Series(name, tuple(map(float, xs)), tuple(values), low, high)


def _pictures(page: Page, results: Results, folder: Path) -> None:
    plan = results.plan
    page.section("Pictures")
    for sampler in plan.samplers:
        for strategy in plan.strategies:
            rows = []
            for warmup in plan.warmups[:ROWS]:
                shown: list[Shown] = []
                for devices in plan.devices:
                    of = results.by.get((sampler, strategy, devices, warmup))
                    if not of:
                        continue
                    picture = of[0]["pictures"][0]
                    if not shown:
                        exact = results.synchronous[sampler, picture["prompt"], picture["seed"]]
                        shown.append(_shown(folder, exact["file"], SYNCHRONOUS, picture["prompt"]))
                    ratio = "equal" if picture["equal"] else f"{capped_text(picture['psnr'])} dB"
                    shown.append(
                        _shown(folder, picture["file"], f"N = {devices}, {warmup}: {ratio}", picture["prompt"])
                    )
                rows.append(shown)
            if any(rows):
                page.pictures(rows, f"{strategy}, {sampler}: the first picture; left the synchronous one.")


def capped_text(psnr: float | None) -> str:
    """A PSNR as it stands under a picture."""
    return f"over {CAP:g}" if psnr is None or psnr > CAP else f"{psnr:.1f}"


def _shown(folder: Path, file: str, caption: str, prompt: str) -> Shown:
    from PIL import Image

    with Image.open(folder / file) as image:
        return Shown(image.convert("RGB"), caption, f"{prompt}, {caption}")


def _charted(results: Results, sampler: str, strategy: str) -> dict[str, list[Combination]]:
    """Combinations of one chart, by what they have in common: one N with some warm-ups.

    Where every step is synchronous there is no error. If there are too many, the last one asked for still is shown.
    """
    found: dict[str, list[Combination]] = {}
    for at in results.by:
        row = results.row(at)
        if (
            row.synchronous.value != row.evaluations
            and at[:2] == (sampler, strategy)
            and (not has_given_steps(at[3]) or at[3] in results.plan.warmups)
        ):
            found.setdefault(f"{at[2]} devices", []).append(at)
    return {name: [*some[: LINES - 1], *some[LINES - 1 :][-1:]] for name, some in found.items()}


def _loss_curves(page: Page, results: Results) -> None:
    plan = results.plan
    page.section("Error of the prediction, step by step")
    page.text(
        "Relative L2 distance of what the sampler is given (noise, or velocity, after guidance) from what the "
        "synchronous run gives it. On its own trajectory it holds the errors of all steps before; on the same latents "
        "the exact transformer is given the stale run's inputs, so it holds this step's alone (before guidance; first "
        "request only)."
    )
    for sampler in plan.samplers:
        for strategy in plan.strategies:
            for name, some in _charted(results, sampler, strategy).items():
                own = []
                for at in some:
                    errors = results.prediction_errors(at)
                    own.append(_line(at[3], range(1, len(errors) + 1), errors))
                title = f"{strategy}, {sampler}, {name}"
                chart = line_chart(own, f"Error on its own trajectory, {title}", "step", "relative error", whole_x=True)
                page.chart(chart, f"{title}: on its own trajectory; mean over pictures, bars: standard error.")
                same = [
                    _line(at[3], range(1, len(errors) + 1), [Mean(error, None, 1) for error in errors])
                    for at in some
                    if (errors := results.by[at][0].get("same_latents"))
                ]
                if same:
                    chart = line_chart(
                        same, f"Error on the same latents, {title}", "step", "relative error", whole_x=True
                    )
                    page.chart(chart, f"{title}: on the same latents.")


def _heat_maps(page: Page, results: Results) -> None:
    """Of the most devices with the shortest warm-up there is: there is most to see."""
    plan = results.plan
    page.section("Step by layer")
    for sampler in plan.samplers:
        for strategy in plan.strategies:
            some = [at for at in results.by if at[:2] == (sampler, strategy) and at[3] in plan.warmups]
            most = max((at[2] for at in some), default=0)
            # Without any warm-up the first step alone would be seen.
            some = [at for at in some if at[2] == most]
            at = next((at for at in some if at[3] != "fixed(0)"), some[0] if some else None)
            if at is None:
                continue
            first = results.by[at][0]
            title = f"{strategy}, {sampler}, {most} devices, {at[3]}"
            drifts = drift_grid(first.get("steps", []))
            if drifts.values:
                chart = heat_map(drifts, f"Drift of keys and values, {title}", "step", "block")
                page.chart(chart, f"{title}: relative L2 distance of keys and values from the step before.")
            errors = first.get("attention_error")
            if errors:
                values = {
                    (block, str(int(s) + 1)): e for block, by in errors.items() for s, e in by.items() if e is not None
                }
                columns = [str(step + 1) for step in range(first["evaluations"])]
                chart = heat_map(
                    grid(values, _ordered(errors), columns), f"Error of attention, {title}", "step", "block"
                )
                page.chart(
                    chart, f"{title}: relative L2 error of attention's output against exact attention, same inputs."
                )


def drift_grid(steps: Sequence[Mapping[str, Any]]) -> Grid:
    """Blocks by steps (from 1)."""
    values = {(block, str(s["step"] + 1)): drift for s in steps for block, drift in s["drift"].items()}
    return grid(values, _ordered({block for block, _ in values}), [str(s["step"] + 1) for s in steps] if values else [])


def _ordered(blocks: Any) -> list[str]:
    """Block paths by list and number."""
    return sorted(blocks, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def _single_steps(page: Page, results: Results) -> None:
    found = results.single_steps()
    if not found:
        return
    page.section("Which steps matter")
    for single in found:
        groups = [str(step) for step in single["steps"]]
        where = f"{single['strategy']}, {single['sampler']}, {single['devices']} devices"
        gains = [Mean(**gain) for gain in single["gain"]]
        chart = bar_chart(
            groups, [_line("gain", range(len(gains)), gains)], f"Gain of one step, {where}", "gain, dB", x_label="step"
        )
        page.chart(chart, f"{where}: gain in PSNR when this step is synchronous beside the first one.")
        left = [Mean(**cost) for cost in single["psnr_with_one_stale"]]
        chart = bar_chart(
            groups, [_line("PSNR", range(len(left)), left)], f"One stale step, {where}", "PSNR, dB", x_label="step"
        )
        page.chart(chart, f"{where}: PSNR when this step alone is stale.")


def _real_ranks(page: Page, results: Results) -> None:
    if not results.real:
        return
    page.section("Real ranks")
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
                    TableCell("yes", "good") if result["equal_to_simulation"] else TableCell("no", "bad"),
                )
            )
    page.table(
        ("run", "rank", "working, s", "inside collectives, s", "sent, MB", "same bits as simulated"),
        rows,
        "One request on real ranks, the second of two. Time inside collectives is sending and waiting.",
    )

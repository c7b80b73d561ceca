"""The study's page, and its figures as JSON and CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import nan
from pathlib import Path
from typing import Any

from PIL import Image

from ...quality.curves import Series, grid
from ...quality.figures import bar_chart, heat_map, line_chart
from ...quality.perceptual import HINT, NAME, available
from ...quality.report import Cell as TableCell
from ...quality.report import Page, Shown
from .analysis import CAP, Combination, Mean, Results, findings, policy_findings, signed, synchronous_steps
from .plan import SYNCHRONOUS

# Pictures of a grid, and lines of a chart, that still can be told apart.
ROWS, LINES = 8, 6

Rules = Mapping[tuple[str, str], Mapping[str, Any] | None]


def write(results: Results, folder: Path, target: float | None = None) -> dict[str, Any]:
    """Write ``report.html``, ``results.json`` and ``results.csv`` to the study's folder; returns what the JSON holds.

    The target, in dB, is that of `Results.rule`.
    """
    plan = results.plan
    rules = {pair: results.rule(*pair, target) for pair in plan.pairs}
    sentences = findings(results, rules)
    data = {
        "setup": asdict(plan.setup),
        "devices": list(plan.devices),
        "warmups": list(plan.warmups),
        "samplers": list(plan.samplers),
        "strategies": list(plan.strategies),
        "findings": sentences,
        "table": [asdict(row) for row in results.rows()],
        "rules": [{"sampler": of[0], "strategy": of[1], **rule} for of, rule in rules.items() if rule is not None],
        "root_pairs": [
            {"sampler": sampler, "strategy": strategy, **pair}
            for sampler, strategy in plan.pairs
            for pair in results.root_pairs(sampler, strategy)
        ],
        "against_fixed": results.against_fixed(),
        "against_others": results.against_others(),
        "single_steps": results.single_steps(),
        "cells": results.cells,
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_csv(results, folder / "results.csv")
    page_of(results, folder / "cells", sentences, rules).write(folder / "report.html")
    return data


def write_csv(results: Results, path: Path) -> None:
    """One line for every picture."""
    header = ["sampler", "strategy", "devices", "warmup", "real", "evaluations", "synchronous_steps"]
    header += ["prompt", "seed", "equal", "psnr", "ssim", "perceptual", "right", "file"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header, extrasaction="ignore")
        writer.writeheader()
        for result in results.cells:
            synchronous = result["cell"]["strategy"] == SYNCHRONOUS
            steps = result["evaluations"] if synchronous else synchronous_steps(result)
            for picture in result["pictures"]:
                writer.writerow({**result, "synchronous_steps": steps, **result["cell"], **picture})


def page_of(results: Results, pictures: Path, sentences: Sequence[str], rules: Rules) -> Page:
    """The page, with the PNGs of a folder, the sentences of `findings`, and `Results.rule` by sampler and strategy."""
    plan = results.plan
    setup = plan.setup
    page = Page(
        "What stale strategies cost",
        f"{setup.name}, {setup.steps} steps, {setup.dtype} on {setup.device}; devices "
        f"{', '.join(map(str, plan.devices))}; {', '.join(plan.strategies)}; sampler {', '.join(plan.samplers)}",
    )
    page.section("What the figures say")
    policies = policy_findings(results)
    page.points([sentence for sentence in sentences if sentence not in policies])
    page.section("Quality")
    for pair in plan.pairs:
        _table(page, results, *pair)
    if not available():
        page.text(HINT, note=True)
    if policies:
        page.section("Policies with as many synchronous steps")
        page.points(policies, "In words")
        _others(page, results)
    page.section("Warm-up")
    for pair in plan.pairs:
        _warmup_charts(page, results, *pair, rules.get(pair))
    page.section("Pictures")
    for pair in plan.pairs:
        _pictures(page, results, *pair, pictures)
    page.section("Error of the prediction, step by step")
    page.text(PREDICTION)
    for pair in plan.pairs:
        _loss_curves(page, results, *pair)
    page.section("Step by layer")
    for pair in plan.pairs:
        _heat_maps(page, results, *pair)
    _single_steps(page, results)
    _real_ranks(page, results)
    return page


PREDICTION = (
    "Relative L2 distance of what the sampler is given (noise, or velocity, after guidance) from what the synchronous "
    "run gives it. On its own trajectory it holds the errors of all steps before; on the same latents the exact "
    "transformer is given the stale run's inputs, so it holds this step's alone (before guidance; first request only)."
)


def _table(page: Page, results: Results, sampler: str, strategy: str) -> None:
    header = ("N", "warm-up", "synchronous", "PSNR dB", "SSIM", NAME, "nearest picture")
    rows, exact = [], ""
    for row in results.rows():
        if (row.sampler, row.strategy) != (sampler, strategy):
            continue
        equal = f" ({row.equal} equal)" if row.equal else ""
        quality = (row.psnr.text() + equal, row.ssim.text(4), row.perceptual.text(4), row.right.text(3))
        rows.append((str(row.devices), TableCell(row.warmup, "name"), row.synchronous_text(), *quality))
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
    rows = []
    for policy in results.against_others():
        for other in policy["others"]:
            apart = Mean(**other["difference"])
            clear = apart.value is not None and apart.error is not None and abs(apart.value) > 2 * apart.error
            kind = ("good" if (apart.value or 0) > 0 else "bad") if clear else ""
            same = other["same_steps"]
            rows.append(
                (
                    f"{policy['sampler']}, {policy['strategy']}, N = {policy['devices']}",
                    f"{policy['synchronous']:g} of {policy['evaluations']}",
                    TableCell(policy["warmup"], "name"),
                    Mean(**policy["psnr"]).text(),
                    TableCell(other["warmup"], "name"),
                    Mean(**other["psnr"]).text(),
                    TableCell("the same steps" if same else signed(apart), kind),
                    "" if same else f"{other['closer']} of {apart.count}",
                )
            )
    if rows:
        page.table(
            ("of", "synchronous", "adaptive", "PSNR dB", "other policy", "PSNR dB", "difference dB", "closer"),
            rows,
            "Adaptive policies beside others with as many synchronous steps, on the same pictures; coloured: over two "
            "standard errors of the difference. Closer: pictures on which the adaptive one has the higher PSNR.",
        )


def _warmup_charts(page: Page, results: Results, sampler: str, strategy: str, rule: Mapping[str, Any] | None) -> None:
    of, lines = f"{strategy}, {sampler}", []
    for devices in results.plan.devices:
        fixed = results.stale_fixed(sampler, strategy, devices)
        if fixed:
            lines.append(_line(f"N = {devices}", fixed, [results.row(at).psnr for at in fixed.values()]))
    if not lines:
        return
    chart = line_chart(lines, f"PSNR over warm-up, {of}", "warm-up steps", "PSNR, dB")
    page.chart(chart, f"{of}: PSNR against the synchronous picture; bars: standard error.")
    if rule is None or rule["points"] < 2 or rule["fit"] is None:
        return
    needed = {float(n): warmup for n, warmup in rule["needed"].items() if warmup is not None}
    fit, base, devices = rule["fit"], rule["sqrt"]["base"], tuple(needed)
    series = [
        Series("needed", devices, tuple(needed.values())),
        Series(f"{fit['a']:.2f} N^{fit['b']:.2f}", devices, tuple(fit["a"] * n ** fit["b"] for n in devices)),
        Series(f"{base:.2f} √N", devices, tuple(base * n**0.5 for n in devices)),
    ]
    chart = line_chart(series, f"Warm-up needed, {of}", "devices N", "warm-up steps")
    page.chart(chart, f"{of}: warm-up steps needed for {rule['target_psnr']:g} dB.")


def _line(name: str, xs: Iterable[float], means: Sequence[Mean]) -> Series:
    values = tuple(nan if m.value is None else m.value for m in means)
    series = Series(name, tuple(map(float, xs)), values)
    if all(m.error is None for m in means):
        return series
    errors = [m.error or 0.0 for m in means]
    low, high = (tuple(v + sign * e for v, e in zip(values, errors, strict=True)) for sign in (-1, 1))
    return replace(series, low=low, high=high)


def _pictures(page: Page, results: Results, sampler: str, strategy: str, folder: Path) -> None:
    def shown(file: str, caption: str) -> Shown:
        with Image.open(folder / file) as image:
            return Shown(image.convert("RGB"), caption, f"{picture['prompt']}, {caption}")

    rows = []
    for warmup in results.plan.warmups[:ROWS]:
        row: list[Shown] = []
        for devices in results.plan.devices:
            cells = results.by.get((sampler, strategy, devices, warmup))
            if not cells:
                continue
            picture = cells[0]["pictures"][0]
            if not row:
                exact = results.synchronous[sampler, picture["prompt"], picture["seed"]]
                row.append(shown(exact["file"], SYNCHRONOUS))
            psnr = CAP + 1 if picture["psnr"] is None else picture["psnr"]
            ratio = "equal" if picture["equal"] else f"{psnr:.1f} dB" if psnr <= CAP else f"over {CAP:g} dB"
            row.append(shown(picture["file"], f"N = {devices}, {warmup}: {ratio}"))
        rows.append(row)
    if any(rows):
        page.pictures(rows, f"{strategy}, {sampler}: the first picture; left the synchronous one.")


def _charted(results: Results, sampler: str, strategy: str) -> dict[int, list[Combination]]:
    """Combinations of one chart, by the number of devices.

    Where every step is synchronous there is no error. If there are too many, the last one asked for still is shown.
    """
    by: dict[int, list[Combination]] = {}
    for at in results.asked():
        row = results.row(at)
        if row.synchronous.value != row.evaluations and at[:2] == (sampler, strategy):
            by.setdefault(at[2], []).append(at)
    return {devices: [*some[: LINES - 1], *some[LINES - 1 :][-1:]] for devices, some in by.items()}


def _loss_curves(page: Page, results: Results, sampler: str, strategy: str) -> None:
    for devices, some in _charted(results, sampler, strategy).items():
        of = f"{strategy}, {sampler}, {devices} devices"
        own = {at[3]: results.prediction_errors(at) for at in some}
        same = {at[3]: [Mean(e, None, 1) for e in results.by[at][0].get("same_latents") or ()] for at in some}
        for errors, on, bars in (
            (own, "on its own trajectory", "; mean over pictures, bars: standard error"),
            ({name: means for name, means in same.items() if means}, "on the same latents", ""),
        ):
            if errors:
                lines = [_line(name, range(1, len(means) + 1), means) for name, means in errors.items()]
                chart = line_chart(lines, f"Error {on}, {of}", "step", "relative error")
                page.chart(chart, f"{of}: {on}{bars}.")


def _heat_maps(page: Page, results: Results, sampler: str, strategy: str) -> None:
    """Of the most devices with the shortest warm-up there is: there is most to see."""
    some = [at for at in results.by if at[:2] == (sampler, strategy) and at[3] in results.plan.warmups]
    some = [at for at in some if at[2] == max(at[2] for at in some)]
    if not some:
        return
    # Without any warm-up the first step alone would be seen.
    at = next((at for at in some if at[3] != "fixed(0)"), some[0])
    first, of = results.by[at][0], f"{strategy}, {sampler}, {at[2]} devices, {at[3]}"
    steps = first.get("steps", [])
    drifts = {(block, str(s["step"] + 1)): drift for s in steps for block, drift in s["drift"].items()}
    if drifts:
        shades = grid(drifts, _ordered({block for block, _ in drifts}), [str(s["step"] + 1) for s in steps])
        page.chart(
            heat_map(shades, f"Drift of keys and values, {of}", "step", "block"),
            f"{of}: relative L2 distance of keys and values from the step before.",
        )
    errors = first.get("attention_error")
    if errors:
        values = {(block, str(int(s) + 1)): e for block, by in errors.items() for s, e in by.items() if e is not None}
        shades = grid(values, _ordered(errors), [str(step + 1) for step in range(first["evaluations"])])
        page.chart(
            heat_map(shades, f"Error of attention, {of}", "step", "block"),
            f"{of}: relative L2 error of attention's output against exact attention, same inputs.",
        )


def _ordered(blocks: Iterable[str]) -> list[str]:
    """Block paths by list and number."""
    return sorted(blocks, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def _single_steps(page: Page, results: Results) -> None:
    singles = results.single_steps()
    if singles:
        page.section("Which steps matter")
    for single in singles:
        of = f"{single['strategy']}, {single['sampler']}, {single['devices']} devices"
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
            page.chart(
                bar_chart([*map(str, single["steps"])], bars, f"{title}, {of}", unit, x_label="step"),
                f"{of}: {caption}.",
            )


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

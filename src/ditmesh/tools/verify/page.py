"""The page that `ditmesh verify --html` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...generate.job import Job
from ...quality import curves, figures, perceptual
from ...quality.curves import Series
from ...quality.report import Cell, Page, Shown
from .runs import Run
from .verdicts import TOLERANCES, Verdict

# Pictures of one configuration that are shown.
SHOWN = 4


def page_of(
    job: Job,
    verdicts: Sequence[Verdict],
    runs: Mapping[str, Run],
    references: Mapping[str, Run],
    facts: Mapping[str, Any],
) -> Page:
    """The page of a verification.

    Args:
        job, verdicts: what was generated, and the verdicts on the configurations.
        runs, references: rank 0's run of each configuration, and the runs of one device, by name.
        facts: name to value, for the list of circumstances.
    """
    page = Page(
        "Does it draw what one device draws?",
        f"{job.name}, {job.total} {'picture' if job.total == 1 else 'pictures'}, seed {job.seed}",
    )
    ran = [verdict for verdict in verdicts if not verdict.refused]
    page.section("Outcome")
    page.table(HEADER, [_row(verdict) for verdict in verdicts], "Every configuration against one device")
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
    page.table(("what", "value"), [(name, Cell(str(value), "words")) for name, value in facts.items()], "This run")
    return page


HEADER = (
    *("configuration", "verdict", "same bits", "largest", "mean", "PSNR (dB)", "SSIM", perceptual.NAME, "latents"),
    *("seconds", "one device (s)", "sent (MB)"),
)


def _row(verdict: Verdict) -> list[str | Cell]:
    outcome = Cell(verdict.outcome, ("good" if verdict.passed else "bad") if verdict.judged else "")
    if verdict.refused:
        return [verdict.config, outcome, *[""] * (len(HEADER) - 2)]
    columns = (
        (verdict.largest, ".2g"),
        (verdict.mean, ".2g"),
        (verdict.psnr, ".1f"),
        (verdict.ssim, ".4f"),
        (verdict.perceptual, ".4f"),
        (verdict.latents, ".2g"),
        (verdict.seconds, ".2f"),
        (verdict.one_device_seconds, ".2f"),
        (sum(verdict.bytes_sent.values()) / 1e6, ".2f"),
    )
    equal = "yes" if verdict.equal else "no"
    return [verdict.config, outcome, equal, *("" if value is None else format(value, spec) for value, spec in columns)]


def _where(verdict: Verdict) -> list[str | Cell]:
    if verdict.refused:
        return [verdict.config, Cell(f"refused: {verdict.refused}", "words"), Cell("", "words")]
    places = (verdict.first_bit, verdict.first_beyond)
    return [verdict.config, *(Cell(place.describe() if place else "none", "words") for place in places)]


def _configuration(page: Page, job: Job, verdict: Verdict, run: Run, alone: Run) -> None:
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
    rows = []
    for number, (ours, theirs) in enumerate(pairs[:SHOWN]):
        apart, factor = figures.amplified(ours, theirs)
        what = f"“{job.prompts[number // job.images]}”, seed {job.seed + number}"
        difference = verdict.pictures[number]
        caption = f"difference × {factor:,.0f}, largest {difference.largest:.2g}"
        alt = f"the difference of the two pictures, amplified {factor:,.0f} times"
        if difference.equal:
            alt += ": black, they are equal"
        pair = Shown(theirs, f"{verdict.reference}: {what}"), Shown(ours, f"{verdict.config}: {what}")
        rows.append([*pair, Shown(apart, caption, alt)])
    left = len(pairs) - len(rows)
    more = f" {left} more were drawn." if left else ""
    page.pictures(rows, f"One device, {verdict.config}, and the difference.{more}")
    blocks = {(block, str(step)): error for block, row in verdict.heat.items() for step, error in row.items()}
    if blocks and not verdict.blocks_equal:
        steps = sorted({step for row in verdict.heat.values() for step in row})
        grid = curves.grid(blocks, columns=map(str, steps))
        title = f"Relative difference of every block's tokens at every step, {verdict.config}"
        heat = figures.heat_map(grid, title, "step", "block", log=True)
        page.chart(heat, "Largest relative difference of what each block returns, by step")

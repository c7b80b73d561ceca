"""The page that `ditmesh verify --html` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...generate.job import Job
from ...quality import curves, figures, perceptual
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
    """Everything that was found, as a page.

    Args:
        job: what was drawn.
        verdicts: of the configurations.
        runs: rank 0's run of each configuration, by its name.
        references: the runs of one device, by name.
        facts: name to value, for the list of circumstances.
    """
    page = Page(
        "Does it draw what one device draws?",
        f"{job.name}, {job.total} {'picture' if job.total == 1 else 'pictures'}, seed {job.seed}",
    )
    drawn = [verdict for verdict in verdicts if not verdict.refused]
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
    if drawn:
        page.section("Growth of the difference")
        lines = [
            curves.per_step(verdict.config, {step.step: step.latents for step in verdict.growth}) for verdict in drawn
        ]
        chart = figures.line_chart(
            lines,
            "Relative difference of the latents after every step, by configuration",
            "step",
            "largest relative difference",
            log_y=True,
            whole_x=True,
        )
        page.chart(chart, "Difference of the latents after every step. 0 on the axis: the same bits.")
    for verdict in drawn:
        _configuration(page, job, verdict, runs[verdict.config], references[verdict.reference])
    page.section("Circumstances")
    page.table(("what", "value"), [(name, Cell(str(value), "words")) for name, value in facts.items()], "This run")
    return page


HEADER = (
    "configuration",
    "verdict",
    "same bits",
    "largest",
    "mean",
    "PSNR (dB)",
    "SSIM",
    perceptual.NAME,
    "latents",
    "seconds",
    "one device (s)",
    "sent (MB)",
)


def _row(verdict: Verdict) -> list[str | Cell]:
    kept = "good" if verdict.passed else "bad"
    outcome = Cell(verdict.outcome, kept if verdict.judged else "")
    if verdict.refused:
        return [verdict.config, outcome, *[""] * (len(HEADER) - 2)]
    return [
        verdict.config,
        outcome,
        "yes" if verdict.equal else "no",
        f"{verdict.largest:.2g}",
        f"{verdict.mean:.2g}",
        "" if verdict.psnr is None else f"{verdict.psnr:.1f}",
        f"{verdict.ssim:.4f}",
        "" if verdict.perceptual is None else f"{verdict.perceptual:.4f}",
        "" if verdict.latents is None else f"{verdict.latents:.2g}",
        f"{verdict.seconds:.2f}",
        f"{verdict.one_device_seconds:.2f}",
        f"{sum(verdict.bytes_sent.values()) / 1e6:.2f}",
    ]


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
    rows = []
    prompts = [prompt for prompt in job.prompts for _ in range(job.images)]
    pairs = [
        pair
        for ours, theirs in zip(run.pictures, alone.pictures, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    for number, (ours, theirs) in enumerate(pairs[:SHOWN]):
        apart, factor = figures.amplified(ours, theirs)
        what = f"“{prompts[number]}”, seed {job.seed + number}"
        difference = verdict.pictures[number]
        rows.append(
            [
                Shown(theirs, f"{verdict.reference}: {what}"),
                Shown(ours, f"{verdict.config}: {what}"),
                Shown(
                    apart,
                    f"difference × {factor:,.0f}, largest {difference.largest:.2g}",
                    f"the difference of the two pictures, amplified {factor:,.0f} times"
                    + (": black, they are equal" if difference.equal else ""),
                ),
            ]
        )
    left = len(pairs) - len(rows)
    page.pictures(
        rows, f"One device, {verdict.config}, and the difference." + (f" {left} more were drawn." if left else "")
    )
    blocks = {(block, str(step)): error for block, row in verdict.heat.items() for step, error in row.items()}
    if blocks and not verdict.blocks_equal:
        steps = sorted({step for row in verdict.heat.values() for step in row})
        heat = figures.heat_map(
            curves.grid(blocks, columns=map(str, steps)),
            f"Relative difference of every block's tokens at every step, {verdict.config}",
            "step",
            "block",
            log=True,
        )
        page.chart(heat, "Largest relative difference of what each block returns, by step")

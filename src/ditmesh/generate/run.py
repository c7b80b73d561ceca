"""Pictures and videos generated from prompts: what every rank does."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..launch import MessageSink
from ..launch.pool import PRELOAD as OF_ANY_RANK
from .job import Generated, Kept, Loaded, PictureJob
from .receipt import write_free
from .runner import Made, PipelineRunner

# What ranks that generate import: once, before they are forked.
PRELOAD = (*OF_ANY_RANK, __name__, "ditmesh.engine", "ditmesh.generate.loading", "ditmesh.core.digests")


def generate(job: PictureJob, kept: Kept | None = None, *, report: MessageSink | None = None) -> float:
    """Load the pipeline, make it parallel, generate everything. Every rank of the job calls this.

    Rank 0 writes each PNG or MP4 as soon as it has it and reports `Loaded`, `StepDone` and `Generated`. It never
    replaces a file that ditmesh has not written, and one that it has only when ``job.overwrite`` says so.

    Args:
        job: what to generate.
        kept: keep a journal, and go on from what it holds; None: generate everything, keep nothing.
        report: takes the reports; may be left out.

    Returns:
        Seconds that the pipeline's calls took on this rank, loading not included.

    Raises:
        InputError: the pipeline cannot do what is asked.
        LayoutError: the transformer's tokens could not be found out.
        JournalError: what the journal holds is of another request.
    """
    kept = kept or Kept("")
    runner = PipelineRunner.open(job, report)
    journal = runner.journal(kept.folder) if kept.folder else None
    runner.report(Loaded(runner.load_seconds, runner.steps, runner.sampled))
    total = 0.0
    runner.note_stretching()
    for number in range(job.calls):
        if kept.done.issuperset(job.call(number).indices):
            continue
        arguments = runner.prepare(number)
        if journal is not None:
            journal.begin(number)
        made = runner.run(number, arguments)
        total += runner.facts["seconds"]
        if runner.rank == 0:
            _save(runner, number, made, arguments, kept)
    if journal is not None:
        journal.close()
    return total


def _save(runner: PipelineRunner, number: int, made: Sequence[Made], arguments: Mapping[str, Any], kept: Kept) -> None:
    """Write the pictures or videos of a call that are not on disk yet, with receipts, and report them."""
    job, call = runner.job, runner.job.call(number)
    for place, (image, index) in enumerate(zip(made, call.indices, strict=True)):
        if index in kept.done:
            continue
        restarts = [past.plain() for past in kept.restarts if past.request == number]
        receipt = runner.receipt(index, image, arguments, restarts=restarts, place=place)
        path = Path(job.out) / file_name(index, receipt.prompt, receipt.seed, receipt.frames is not None)
        # A rank that was lost may have written the picture and not said so.
        overwrite = job.overwrite or bool(kept.restarts)
        runner.report(Generated(str(write_free(image, path, receipt, overwrite, job.number)), receipt))


def with_free_names(job: PictureJob) -> PictureJob:
    """The job with a number for its files such that none of them is there yet; the owner of the ranks calls this."""
    pattern = re.compile(r"(.*?)(?:-(\d+))?\.(?:png|mp4)")
    there = [match for name in os.listdir(job.out) if (match := pattern.fullmatch(name))]
    if job.overwrite or not there:
        return job
    first = {file_name(i, job.prompts[i // job.n], job.seed + i)[: -len(".png")] for i in range(job.total)}
    taken = [int(match[2] or 1) for match in there if match[1] in first]
    return job.changed(number=max(taken, default=0) + 1)


def file_name(index: int, prompt: str, seed: int, video: bool = False) -> str:
    """Name of a picture's or video's file: sorts by index, reads as the prompt."""
    words = re.sub(r"[^\w]+", "-", prompt.strip().casefold()).strip("-_")
    # File systems count bytes, and 255 of them are the limit everywhere.
    short = words.encode()[:80].decode(errors="ignore").strip("-_")
    return "-".join(filter(None, [f"{index:04d}", short, f"seed{seed}"])) + (".mp4" if video else ".png")

"""Generation of a job's images and videos on every rank."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..launch import MessageSink
from ..launch.pool import PRELOAD as OF_ANY_RANK
from .arguments import denoising_steps
from .files import pictures_of
from .job import Generated, Kept, Loaded, PictureJob, StepDone, UserNote
from .journal import Journal
from .model_info import find_model
from .outputs import PipelineOutput, VideoFrames
from .receipt import write_free
from .runner import PipelineRunner, Prepared, rank_of_process
from .shape import stretched

# Modules that ranks import once, before they are forked.
PRELOAD = (*OF_ANY_RANK, __name__, "ditmesh.engine", "ditmesh.generate.loading", "ditmesh.core.digests")


def generate(job: PictureJob, kept: Kept | None = None, *, report: MessageSink | None = None) -> float:
    """Load the pipeline, make it parallel, generate everything. Every rank of the job calls this.

    Rank 0 writes each PNG or MP4 as soon as it has it and reports `Loaded`, `StepDone` and `Generated`. It never
    replaces a file that ditmesh has not written, and one that it has only when ``job.overwrite`` says so.

    Args:
        kept: keep a journal, and resume from it; None: generate everything, keep nothing.
        report: takes the reports; may be left out.

    Returns:
        Seconds that the pipeline's calls took on this rank, loading not included.

    Raises:
        InputError: the pipeline cannot run the request.
        LayoutError: the transformer's tokens could not be found out.
        JournalError: the journal is of another request.
    """
    import torch.distributed as dist

    from ..comm.objects import gather_objects
    from ..engine import engine_of

    kept, rank = kept or Kept(""), rank_of_process()
    say: MessageSink = report if report is not None and rank == 0 else lambda message: None
    runner = PipelineRunner.open(job, say)
    pipe = runner.pipe
    journal = _journal(pipe, kept.folder, rank) if kept.folder else None
    say(Loaded(runner.load_seconds, denoising_steps(job, runner.parameters), runner.sampled))
    pictures = pictures_of(job.files, None if "num_frames" in runner.parameters else job.frames)
    if pictures and job.size is not None:
        _note(say, stretched(pictures, job.size, find_model(job.model).size_multiple))
    total, noted = 0.0, False
    for number in range(job.calls):
        if kept.done.issuperset(job.call(number).indices):
            continue
        prepared = runner.prepare(job, number, pictures)
        if journal is not None:
            journal.begin(number)

        def stepped(steps: int, of: int, images: int = prepared.call.images) -> None:
            # The number of a stale strategy's synchronous steps so far. A first call has changed the engine.
            log = engine_of(pipe).staleness
            say(StepDone(images, steps, of, log.summary() if log is not None else ""))

        if dist.is_available() and dist.is_initialized():
            # The clock starts when all ranks are here. On the host: NCCL's barrier would be for the world's own
            # communicator, and a rank that has ended would be missed at the deadline only.
            gather_objects(None)
        made = runner.run(prepared, stepped)
        total += runner.facts["seconds"]
        _note(say, runner.facts.get("budget"))
        for note in () if noted else engine_of(pipe).notes():
            say(UserNote(note))
        noted = True
        if rank == 0:
            _save(runner, number, prepared, made, kept, say)
    if journal is not None:
        journal.close()
    return total


def _note(report: MessageSink, text: str | None) -> None:
    if text is not None:
        report(UserNote(text))


def _journal(pipe: Any, folder: str, rank: int) -> Journal:
    """A journal of the transformers' calls: around everything else, so that it sees the pipeline's own calls."""
    from ..engine import DENOISERS, denoisers, engine_of

    own = denoisers(pipe)
    models = {name: getattr(pipe, name) for name in DENOISERS if getattr(pipe, name, None) in own}
    return Journal(models, folder, rank, engine_of(pipe).clock)


def _save(
    runner: PipelineRunner,
    number: int,
    prepared: Prepared,
    made: Sequence[PipelineOutput],
    kept: Kept,
    report: MessageSink,
) -> None:
    """Write the images or videos of a call that are not on disk yet, with receipts, and report them."""
    job = prepared.job
    restarts = [past.plain() for past in kept.restarts if past.request == number]
    for place, (one, index) in enumerate(zip(made, prepared.call.indices, strict=True)):
        if index in kept.done:
            continue
        receipt = runner.receipt(prepared, place, one, restarts=restarts)
        path = Path(job.out) / file_name(index, receipt.prompt, receipt.seed, isinstance(one, VideoFrames))
        # A lost rank may have written the image without reporting it.
        overwrite = job.overwrite or bool(kept.restarts)
        report(Generated(str(write_free(one, path, receipt, overwrite, job.number)), receipt))


def with_free_names(job: PictureJob) -> PictureJob:
    """The job with a file number so that none of its files exists yet; the owner of the ranks calls this."""
    pattern = re.compile(r"(.*?)(?:-(\d+))?\.(?:png|mp4)")
    there = [match for name in os.listdir(job.out) if (match := pattern.fullmatch(name))]
    if job.overwrite or not there:
        return job
    first = {file_name(i, job.prompts[i // job.n], job.seed + i)[: -len(".png")] for i in range(job.total)}
    taken = [int(match[2] or 1) for match in there if match[1] in first]
    return job.changed(number=max(taken, default=0) + 1)


def file_name(index: int, prompt: str, seed: int, video: bool = False) -> str:
    """Name of an image's or video's file: sorts by index, reads as the prompt."""
    words = re.sub(r"[^\w]+", "-", prompt.strip().casefold()).strip("-_")
    # File systems count bytes, and 255 of them are the limit everywhere.
    short = words.encode()[:80].decode(errors="ignore").strip("-_")
    return "-".join(filter(None, [f"{index:04d}", short, f"seed{seed}"])) + (".mp4" if video else ".png")

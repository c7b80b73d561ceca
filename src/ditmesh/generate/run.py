"""Generation of a job's images and videos on every rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..core.files import free_names, written_whole
from ..launch import MessageSink
from ..launch.pool import PRELOAD as OF_ANY_RANK
from .arguments import denoising_steps
from .files import pictures_of, stretched
from .job import Generated, Loaded, PictureJob, StepDone, UserNote
from .model_info import find_model
from .outputs import PipelineOutput, VideoFrames
from .receipt import write_free
from .runner import PipelineRunner, Prepared, rank_of_process
from .video import write_mp4

# Modules that ranks import once, before they are forked.
PRELOAD = (*OF_ANY_RANK, __name__, "ditmesh.engine", "ditmesh.generate.loading", "ditmesh.core.digests")


def generate(job: PictureJob, *, report: MessageSink | None = None) -> float:
    """Load the pipeline, make it parallel, generate everything. Every rank of the job calls this.

    Rank 0 writes each PNG or MP4 as soon as it has it and reports `Loaded`, `StepDone` and `Generated`; returns the
    seconds that the pipeline's calls took on this rank. Errors as of `PipelineRunner.open`.
    """
    import torch.distributed as dist

    from ..comm.objects import gather_objects
    from ..engine import engine_of

    rank = rank_of_process()
    say: MessageSink = report if report is not None and rank == 0 else lambda message: None
    runner = PipelineRunner.open(job, say)
    pipe = runner.pipe
    steps, config = denoising_steps(job, runner.parameters), engine_of(pipe).config.model_dump()
    say(Loaded(runner.load_seconds, steps, config))
    pictures = pictures_of(job.files, None if "num_frames" in runner.parameters else job.frames)
    if pictures and job.size is not None:
        _note(say, stretched(pictures, job.size, find_model(job.model).size_multiple))
    total, noted = 0.0, False
    group, groups, _ = runner.group
    for first in range(0, job.calls, groups):
        # The calls that run at once; a group that has none repeats the last one, so that all ranks do alike.
        numbers = range(first, min(first + groups, job.calls))
        number = numbers[min(group, len(numbers) - 1)]
        prepared = runner.prepare(job, number, pictures)

        def stepped(steps: int, of: int, images: int = prepared.call.images * len(numbers)) -> None:
            # The number of a stale strategy's synchronous steps so far. A first call has changed the engine.
            log = engine_of(pipe).staleness
            say(StepDone(images, steps, of, log.summary() if log is not None else ""))

        if dist.is_available() and dist.is_initialized():
            # The clock starts when all ranks are here. On the host: NCCL's barrier would be for the world's own
            # communicator, and a rank that has ended would be missed at the deadline only.
            gather_objects(None)
        parts: list[Path] = []
        outputs = runner.run(prepared, stepped, partial(_save_part, prepared, parts, say))
        total += runner.facts["seconds"]
        _note(say, runner.facts.get("cut"))
        for note in () if noted else engine_of(pipe).notes():
            say(UserNote(note))
        noted = True
        _save_all(runner, numbers, prepared, outputs, say)
        for path in parts:
            path.unlink(missing_ok=True)
    return total


def _note(report: MessageSink, text: str | None) -> None:
    if text is not None:
        report(UserNote(text))


def _save_part(prepared: Prepared, parts: list[Path], report: MessageSink, part: int, first: int, frames: Any) -> None:
    """Write the frames of a chunk of each video of a call, on rank 0, to files that are added to ``parts``."""
    if rank_of_process() > 0:
        return
    videos = prepared.pipe.video_processor.postprocess_video(frames, output_type="pil")
    for place, (video, index) in enumerate(zip(videos, prepared.call.indices, strict=True)):
        path = Path(prepared.job.out) / file_name(index, prepared.prompt, prepared.seed + place, True)
        parts.append(next(free for free in free_names(path.with_suffix(f".part{part}.mp4")) if not free.exists()))
        with written_whole(parts[-1]) as temporary:
            write_mp4(video, temporary, prepared.fps, {})
    if first == 0:
        _note(report, f"the first frames are in {parts[0]}, the next ones beside it until the video is written")


def _save_all(
    runner: PipelineRunner,
    numbers: Sequence[int],
    prepared: Prepared,
    results: Sequence[PipelineOutput],
    report: MessageSink,
) -> None:
    """Write and report what the groups of ranks have made of some calls, one each. Every rank calls this alike."""
    from ..comm.objects import gather_objects

    _, groups, ranks = runner.group
    rank, job = rank_of_process(), prepared.job
    # Of each group its first rank, which has its images.
    every = [results] if groups == 1 else gather_objects(results if rank % ranks == 0 else None)[::ranks]
    for outputs, number in zip(every, numbers, strict=False) if rank == 0 else ():
        call = replace(prepared, call=job.call(number))
        for place, (output, index) in enumerate(zip(outputs, call.call.indices, strict=True)):
            receipt = runner.receipt(call, place, output)
            path = Path(job.out) / file_name(index, receipt.prompt, receipt.seed, isinstance(output, VideoFrames))
            report(Generated(str(write_free(output, path, receipt, job.overwrite)), receipt))


def file_name(index: int, prompt: str, seed: int, video: bool = False) -> str:
    """Name of an image's or video's file: sorts by index, reads as the prompt."""
    words = re.sub(r"[^\w]+", "-", prompt.strip().casefold()).strip("-_")
    # File systems count bytes, and 255 of them are the limit everywhere.
    short = words.encode()[:80].decode(errors="ignore").strip("-_")
    return "-".join(filter(None, [f"{index:04d}", short, f"seed{seed}"])) + (".mp4" if video else ".png")

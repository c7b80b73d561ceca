"""Images that a run draws with the pipeline that it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..generate.job import PictureJob
from ..generate.outputs import PipelineOutput
from ..generate.runner import PipelineRunner, Prepared
from .config import TrainConfig
from .data.order import bucket_sizes


def drawing_job(
    config: TrainConfig, runner: PipelineRunner, prompts: tuple[str, ...], steps: int, seed: int, images: int = 1
) -> PictureJob:
    """A job for images of prompts, or of labels, in the size of the run; so many of each in one call."""
    length, side = config.data.max_sequence_length, config.data.resolution
    size: tuple[int | None, int | None] = (
        (side, side) if config.objective == "denoising" else bucket_sizes(config.data)[0]
    )
    labels = () if "prompt" in runner.parameters else tuple(int(prompt) for prompt in prompts)
    height, width = (None, None) if labels else size
    return PictureJob(
        model="",
        name="",
        pipeline_class=runner.kind.__name__,
        prompts=prompts,
        labels=labels,
        out="",
        height=height,
        width=width,
        frames=config.data.num_frames,
        guidance=config.guidance,
        steps=steps,
        seed=seed,
        n=images,
        max_sequence_length=length[0] if isinstance(length, tuple) else length,
    )


def drawing_call(runner: PipelineRunner, job: PictureJob, number: int = 0, **more: Any) -> Prepared:
    """A call of a job, for arrays at its own size, not at the nearest one of the published weights."""
    binned = {"use_resolution_binning": False} if "use_resolution_binning" in runner.parameters else {}
    return runner.prepare(job, number, output_type="np", **binned, **more)


def pixels_of(outputs: Sequence[PipelineOutput]) -> np.ndarray:
    """(B, H, W, 3) of images, (B, F, H, W, 3) of videos, uint8."""
    pixels = (np.stack([np.stack(output.frames) for output in outputs]) * 255).round().clip(0, 255).astype(np.uint8)
    return pixels[:, 0] if pixels.shape[1] == 1 else pixels

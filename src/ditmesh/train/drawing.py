"""Images that a run draws with the pipeline that it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..generate.job import PictureJob
from ..generate.outputs import PipelineOutput
from ..generate.runner import PipelineRunner
from .config import TrainConfig
from .data.order import bucket_sizes


def drawing_job(
    config: TrainConfig, runner: PipelineRunner, prompts: tuple[str, ...], steps: int, seed: int, images: int = 1
) -> PictureJob:
    """A job for images of prompts, or of labels, in the size of the run; so many of each in one call."""
    labelled, length = "prompt" not in runner.parameters, config.data.max_sequence_length
    height, width = config.data.resolution, config.data.resolution
    if config.reinforce is not None:
        height, width = bucket_sizes(config.data)[0]
    return PictureJob(
        model="",
        name="",
        pipeline_class=runner.kind.__name__,
        prompts=prompts,
        labels=tuple(int(prompt) for prompt in prompts) if labelled else (),
        out="",
        height=None if labelled else height,
        width=None if labelled else width,
        frames=config.data.num_frames,
        guidance=None if config.reinforce is None else config.reinforce.guidance,
        steps=steps,
        seed=seed,
        n=images,
        max_sequence_length=length[0] if isinstance(length, tuple) else length,
    )


def whole_size(runner: PipelineRunner) -> dict[str, Any]:
    """Arguments for arrays at the run's own size, not at the nearest one of the published weights."""
    more: dict[str, Any] = {"output_type": "np"}
    return more | ({"use_resolution_binning": False} if "use_resolution_binning" in runner.parameters else {})


def pixels_of(outputs: Sequence[PipelineOutput]) -> np.ndarray:
    """(B, H, W, 3) of images, (B, F, H, W, 3) of videos, uint8."""
    arrays = [np.stack(output.frames) for output in outputs]
    pixels = (np.stack(arrays) * 255).round().clip(0, 255).astype(np.uint8)
    return pixels[:, 0] if all(len(array) == 1 for array in arrays) else pixels

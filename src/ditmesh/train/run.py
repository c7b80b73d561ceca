"""A complete training run on the ranks of a job, from loading the pipeline to saving it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..comm.backends import device_of_rank
from ..comm.mesh import DEFAULT_DEADLINE_SECONDS
from ..errors import ConfigError
from ..generate.components import read_saved
from ..generate.model_info import find_model
from ..generate.runner import PipelineRunner, rank_of_process
from ..generate.video import FPS
from .checkpoints.export import export
from .config import TrainConfig
from .drawing import drawing_call, drawing_job, pixels_of
from .memory import check_training_memory
from .model.frozen import read_pipeline_frozen
from .trainer import Trainer

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig | dict[str, Any] | str | Path,
    *,
    timeout: float = DEFAULT_DEADLINE_SECONDS,
    report: Callable[[Any], None] | None = None,
    check_memory: bool = True,
    memory_limit: float | None = None,
) -> dict[str, Any]:
    """Train as a configuration says. Every rank of the job calls this.

    Rank 0 writes checkpoints' names, logs, validation images and in the end the pipeline to ``output_dir``.

    Args:
        timeout: deadline of every collective, in seconds.
        report: takes a `Preparing` now and then and one `DataReport` before the first step, and a `Progress` after
            every step; on rank 0.
        check_memory: refuse a run that does not fit, before a weight is read; what cannot be predicted is not refused.
        memory_limit: bytes that a rank may take; None: what its device has left.

    Returns:
        ``step``, ``resumed`` (the step that this run began with), ``loss`` (of the last step), sentences of `Outcome`,
        ``seconds``, ``pipeline`` (the folder of the trained pipeline, or of its LoRA weights), ``memory`` (bytes of the
        rank that needed most at the peak of the first step, on a GPU of its tensors), and ``weights`` (in reproducible
        mode a digest of the trained weights' bits, before averaging; else None).

    Raises:
        ConfigError, InputError: settings, data and model do not fit.
        FloatingPointError: the loss, a gradient or a weight is not finite.
    """
    config = TrainConfig.read(config)
    pipe = _read_pipeline(config, memory_limit if check_memory else math.inf)
    began = time.monotonic()
    model = type(getattr(pipe, config.denoiser))
    kind = Trainer
    if config.objective == "distillation":
        from .reinforce.distillation import DistillationTrainer

        kind = DistillationTrainer
    elif config.objective != "denoising":
        from .reinforce.trainer import ReinforcementTrainer

        kind = ReinforcementTrainer
    with kind(config, pipe, device_of_rank(), timeout, report if rank_of_process() == 0 else None) as trainer:
        config, validate = trainer.config, partial(_validate, trainer)
        if config.output.validation_prompts and trainer.draws_from_images:
            name = type(pipe).__name__
            raise ConfigError(
                f"validation_prompts: {name} draws from an image, and a prompt alone has none; leave it out"
            )
        # Messages of the other ranks would be the same.
        reported = report if trainer.speaks else None
        if reported is not None:
            reported(trainer.report)
        elif trainer.speaks:
            trainer.report.log(logger)
        outcome = trainer.run(report=reported, validate=validate if config.output.validation_prompts else None)
        memory = max(trainer.mesh.world.all_gather_object(outcome.peak_bytes))
        bits = trainer.state.weights_digest() if config.in_order else None
        with trainer.update.averaged():
            weights = trainer.state.weights()
            speaks = trainer.speaks
        lock = trainer.keep_folder()
    folder = Path(config.output_dir) / ("lora" if config.lora is not None else "pipeline")
    with lock:
        if speaks:
            folder = export(pipe, weights, config, model, outcome.step)
    return {
        "step": outcome.step,
        "resumed": outcome.step - len(outcome.losses),
        "loss": outcome.losses.get(outcome.step - 1),
        **{name: getattr(outcome, name) for name in ("skipped", "notes", "unsaved", "changed")},
        "seconds": time.monotonic() - began,
        "pipeline": str(folder),
        "memory": memory,
        "weights": bits,
    }


def _read_pipeline(config: TrainConfig, limit: float | None) -> Any:
    """The pipeline of a run, if it fits into so many bytes on a rank; None: what its device has left."""
    info = find_model(config.pretrained_model_name_or_path)
    if limit != math.inf and info.local:
        check_training_memory(config, info, device_of_rank(), limit)
    if config.model.base_precision is not None and not config.quantises_slices:
        pipe = read_pipeline_frozen(info, config.model.base_precision)
    else:
        pipe = read_saved(info)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _validate(trainer: Trainer, step: int) -> dict[str, Path]:
    """Draw the validation images of a step; returns their files by name, on the rank that writes them."""
    config = trainer.config
    runner, prompts = PipelineRunner(trainer.pipe, trainer.device), config.output.validation_prompts
    job = drawing_job(config, runner, prompts, config.output.validation_inference_steps, config.seed)
    # One by one, so that an image does not depend on the others.
    outputs = [runner.run(drawing_call(runner, job, number))[0] for number in range(job.calls)]
    pictures = pixels_of(outputs)
    trainer.judge(pictures)
    files: dict[str, Path] = {}
    if trainer.speaks:
        from PIL import Image

        folder = Path(config.output_dir) / "validation"
        folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pictures):
            files[f"validation/{number}"] = folder / f"step-{step}-{number}.png"
            # A video is an animated PNG, which loses nothing, and of which trackers have the first frame.
            first, *others = [Image.fromarray(frame) for frame in picture.reshape(-1, *picture.shape[-3:])]
            first.save(files[f"validation/{number}"], save_all=True, append_images=others, duration=1000 // FPS)
    return files

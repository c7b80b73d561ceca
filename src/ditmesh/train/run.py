"""A complete training run on the ranks of a job, from loading the pipeline to saving it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..comm.backends import device_of_rank
from ..comm.mesh import DEFAULT_DEADLINE
from ..errors import ConfigError
from ..generate.job import PictureJob
from ..generate.model_info import find_model
from ..generate.runner import PipelineRunner, rank_of_process
from ..zoo.references import nearest, shrink
from .checkpoints.export import export
from .config import TrainConfig
from .data.samples import pixels
from .logs.charts import validation_grid
from .logs.training_log import averaged_words
from .memory.check import check_training_memory
from .model.frozen import read_pipeline_frozen
from .trainer import Trainer

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig | dict[str, Any] | str | Path,
    *,
    timeout: float = DEFAULT_DEADLINE,
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
        ``step``, ``resumed`` (the step that this run began with), ``loss`` (of the last step), ``validation_loss`` (of
        held-out samples after it; None without them), ``validated`` (which average of the weights that is; None: the
        weights themselves), ``seconds``,
        ``skipped``, ``notes``, ``unsaved`` and ``changed`` (settings that are not the checkpoint's), each a list of
        sentences, ``overflowed`` (the steps of this run that changed no weight: gradients overflowed in float16),
        ``pipeline`` (the folder of the trained pipeline, or of its LoRA weights), ``nearest`` (of the last
        validation: the share of images with the training image of their own caption as the nearest; None without one),
        ``weights`` (in reproducible mode a digest of the trained weights' bits, before averaging; else None), ``sent``
        (bytes that the first rank has sent to other islands; None without islands).

    Raises:
        ConfigError, InputError: settings, data and model do not fit.
        FloatingPointError: the loss, a gradient or a weight is not finite.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    config = TrainConfig.read(config)
    info = find_model(config.pretrained_model_name_or_path)
    if check_memory and info.local:
        check_training_memory(config, info, device_of_rank(), memory_limit)
    lora, cut_first = config.lora, config.quantises_slices
    if config.base_precision is not None and lora is not None and not lora.fuse_base_lora and not cut_first:
        pipe = read_pipeline_frozen(info, config.base_precision)
    else:
        pipe = DiffusionPipeline.from_pretrained(info.files if info.local else info.name)
    pipe.set_progress_bar_config(disable=True)
    began = time.monotonic()
    model = type(getattr(pipe, config.denoiser))
    with Trainer(config, pipe, device_of_rank(), timeout, report if rank_of_process() == 0 else None) as trainer:
        config, validation = trainer.config, _Validation(trainer)
        # Messages of the other ranks would be the same.
        reported = report if trainer.speaks else None
        if reported is not None:
            reported(trainer.data.report)
        elif trainer.speaks:
            trainer.data.report.log(logger)
        outcome = trainer.run(report=reported, validate=validation.run if config.validation_prompts else None)
        bits = trainer.weights_digest() if config.in_order else None
        sent = None if trainer.islands is None else trainer.islands.link.sent
        with trainer.update.averaged():
            weights = trainer.weights()
            speaks = trainer.speaks
        lock = trainer.keep_folder()
    folder = Path(config.output_dir) / ("lora" if config.lora is not None else "pipeline")
    with lock:
        if speaks:
            folder = export(pipe, weights, config, model, outcome.step, outcome.losses.get(outcome.step - 1))
    return {
        "step": outcome.step,
        "resumed": outcome.step - len(outcome.losses),
        "loss": outcome.losses.get(outcome.step - 1),
        "validation_loss": outcome.held_out.get(outcome.step - 1),
        "validated": averaged_words(config).strip(" ()") or None,
        "seconds": time.monotonic() - began,
        "skipped": outcome.skipped,
        "notes": outcome.notes,
        "unsaved": outcome.unsaved,
        "changed": outcome.changed,
        "overflowed": outcome.overflowed,
        "sent": sent,
        "pipeline": str(folder),
        "nearest": validation.nearest,
        "weights": bits,
    }


class _Validation:
    """Images of the validation prompts, and the number that are nearest to their own training image."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        draws = getattr(trainer.family, "draws_from_prompts", None)
        if trainer.config.validation_prompts and draws is not None and not draws():
            raise ConfigError(
                f"validation_prompts: {type(trainer.pipe).__name__} draws from an image, and a prompt alone has none; "
                "leave it out, and use validation_data_dir or validation_split to measure the loss of images"
            )
        self.nearest: float | None = None

    def run(self, step: int) -> dict[str, Path]:
        """Draw the images of a step; returns their files by name, on the rank that writes them."""
        trainer, config = self._trainer, self._trainer.config
        runner = PipelineRunner(trainer.pipe, trainer.device)
        labelled, length = trainer.family.conditioned_by == "label", config.max_sequence_length
        said: list[Any] = [int(one) if labelled else one for one in config.validation_prompts]
        side = None if labelled else config.resolution
        job = PictureJob(
            model="",
            name="",
            pipeline_class=runner.kind.__name__,
            prompts=config.validation_prompts,
            labels=tuple(said) if labelled else (),
            out="",
            width=side,
            height=side,
            steps=config.validation_inference_steps,
            guidance=config.guidance_scale,
            seed=config.seed,
            max_sequence_length=length[0] if isinstance(length, tuple) else length,
        )
        more: dict[str, Any] = {"output_type": "np"}
        if "use_resolution_binning" in runner.parameters:
            # At the resolution of training, not at the nearest one of the published weights.
            more["use_resolution_binning"] = False
        found: list[Any] = []
        # One by one, so that an image does not depend on the others.
        for number in range(job.calls):
            found += runner.run(runner.prepare(job, number, **more))[0].frames
        pictures = (np.stack(found) * 255).round().clip(0, 255).astype(np.uint8)
        self.nearest = self._nearest(said, pictures)
        files: dict[str, Path] = {}
        if trainer.speaks:
            from PIL import Image

            folder = Path(config.output_dir) / "validation"
            folder.mkdir(parents=True, exist_ok=True)
            for number, picture in enumerate(pictures):
                files[f"validation/{number}"] = folder / f"step-{step}-{number}.png"
                Image.fromarray(picture).save(files[f"validation/{number}"])
            validation_grid(folder, config.validation_prompts, step)
        return files

    def _nearest(self, said: list[Any], pictures: np.ndarray) -> float | None:
        """The training images of prompts that are captions of the data set."""
        captions = {sample.said: number for number, sample in enumerate(self._trainer.data.samples)}
        asked = [number for number, one in enumerate(said) if one in captions]
        # Every training image is looked at: for sets of some hundreds.
        if not asked or len(self._trainer.data.samples) > 4096:
            return None
        references = []
        for sample in self._trainer.data.samples:
            try:
                whole = pixels(sample.picture(), (32, 32))
            except OSError:
                whole = torch.zeros(3, 32, 32)
            references.append(((whole + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy())
        closest = nearest(shrink(pictures[asked]), np.stack(references))
        own = [
            self._trainer.data.samples[int(place)].said == said[number]
            for place, number in zip(closest, asked, strict=True)
        ]
        return float(np.mean(own))

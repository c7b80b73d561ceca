"""Export of a pipeline or adapters, complete or not at all, and the check of disk space."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

from accelerate import init_empty_weights
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ...core.files import written_atomically, written_whole
from ...errors import InputError
from ...report.formatting import size_text
from ..config import TrainConfig
from ..model.adapters import save_adapters
from ..optimizer.optimizers import state_per_weight
from .checkpoint import MANIFEST, broken

logger = logging.getLogger(__name__)


def export_bytes(pipe: Any, config: TrainConfig) -> tuple[int, int]:
    """Bytes of one checkpoint, and of the export.

    Args:
        pipe: with the adapters of a LoRA, its weights whole.
    """
    modules = [module for module in pipe.components.values() if isinstance(module, nn.Module)]
    trained = sum(p.nbytes for module in modules for p in module.parameters() if p.requires_grad)
    # Weights, the optimizer's state, and the moving average.
    checkpoint = round(trained * (1 + state_per_weight(config) + config.use_ema))
    whole = sum(value.nbytes for module in modules for value in module.state_dict().values())
    return checkpoint, trained if config.lora is not None else whole


def check_room(config: TrainConfig, checkpoint: int, exported: int, step: int, steps: int) -> None:
    """Reject a run with an export that does not fit on the disk, and warn if not all checkpoints fit.

    Args:
        config: the run; its output folder exists.
        checkpoint, exported: bytes, as `export_bytes` returns them.
        step, steps: done, and in all.

    Raises:
        InputError: not even one checkpoint and the export fit.
    """
    free = shutil.disk_usage(config.output_dir).free
    if step >= steps:
        checkpoint = 0
    if checkpoint + exported > free:
        raise InputError(
            f"output_dir={config.output_dir!r} has {size_text(free)} left, and the end of the run needs "
            f"{size_text(checkpoint)} for a checkpoint and {size_text(exported)} for the export; free some space, or "
            "give an output_dir on another disk"
        )
    count = -(-steps // config.checkpointing_steps) - step // config.checkpointing_steps
    # An old checkpoint stays until the next one is complete.
    kept = count if config.checkpoints_total_limit is None else min(count, config.checkpoints_total_limit + 1)
    if kept * checkpoint + exported > free:
        logger.warning(
            "%d checkpoints of %s and the export of %s need more than the %s left in %s; set "
            "checkpoints_total_limit or a larger checkpointing_steps, or those that do not fit are left out",
            kept,
            size_text(checkpoint),
            size_text(exported),
            size_text(free),
            config.output_dir,
        )


def export(
    pipe: Any, weights: dict[str, Tensor], config: TrainConfig, model: type, step: int, loss: float | None
) -> Path:
    """Save the pipeline with the trained weights, or only the adapters, and a model card.

    Args:
        pipe: the pipeline that was trained; its transformer may be in shards, and is replaced.
        weights: by name, whole, on the CPU.
        model: the transformer's class.
        step, loss: the last one, and its loss.

    Returns:
        The folder. An older one of that name stays until the new one is whole.

    Raises:
        InputError: it cannot be written; says where the trained weights are.
    """
    folder = Path(config.output_dir) / ("lora" if config.lora is not None else "pipeline")
    try:
        with written_atomically(folder) as part:
            _write(pipe, weights, config, model, part)
            (part / "README.md").write_text(_card(pipe, config, folder, step, loss), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be written ({error}); {_kept(weights, config, step)}") from error
    return folder


def _kept(weights: dict[str, Tensor], config: TrainConfig, step: int) -> str:
    """The place of the trained weights after a failed export: the last checkpoint, or a file that is written now."""
    out = Path(config.output_dir)
    checkpoint = out / f"checkpoint-{step}"
    if (checkpoint / MANIFEST).exists() and broken(checkpoint) is None:
        return f"the weights of step {step} are in {checkpoint}: free some space and use --resume, which exports them"
    for place in (out, Path(tempfile.gettempdir()), Path.home()):
        file = place / f"{out.resolve().name}-step-{step}.safetensors"
        try:
            with written_whole(file) as part:
                save_file({name: value.contiguous() for name, value in weights.items()}, part)
        except (OSError, SafetensorError):
            continue
        return f"the weights of step {step} are in {file}, under their names in the pipeline: {{module}}.{{name}}"
    return "the weights of the last step could be written nowhere; go on from the last checkpoint with --resume"


def _write(pipe: Any, weights: dict[str, Tensor], config: TrainConfig, model: type, folder: Path) -> None:
    if config.lora is not None:
        save_adapters(pipe, weights, config, folder)
        return
    for name in config.train_modules:
        own = {path.removeprefix(f"{name}."): v for path, v in weights.items() if path.startswith(f"{name}.")}
        if name == config.denoiser:
            # The trained model may hold shards; the weights are not copied.
            with init_empty_weights():
                fresh = cast(Any, model).from_config(getattr(pipe, name).config)
            fresh.load_state_dict(own, assign=True)
            pipe.register_modules(**{name: fresh})
        else:
            pipe.components[name].load_state_dict(own)
    pipe.save_pretrained(str(folder))
    for file in folder.rglob("*.json"):
        _forget_place(file)


def _card(pipe: Any, config: TrainConfig, folder: Path, step: int, loss: float | None) -> str:
    given = config.model_dump(mode="json", exclude_unset=True)
    lines = [
        "---",
        "library_name: diffusers",
        f"base_model: {config.pretrained_model_name_or_path}",
        f"tags: [{'lora, ' if config.lora is not None else ''}ditmesh]",
        "---",
        "",
        f"# {folder.parent.name or 'A trained pipeline'}",
        "",
        f"`{type(pipe).__name__}`, trained with ditmesh for {step} steps of {config.batch} samples"
        + (f"; loss of the last step {loss:.4g}." if loss is not None else "."),
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {name} | `{value}` |" for name, value in given.items()),
        "",
    ]
    return "\n".join(lines)


def _forget_place(file: Path) -> None:
    """Remove local paths from a configuration."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

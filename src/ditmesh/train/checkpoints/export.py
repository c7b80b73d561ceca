"""Export of a pipeline or adapters, complete or not at all, and the check of disk space."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor, nn

from ...core.files import written_atomically
from ...errors import InputError
from ...report.formatting import size_text
from ..config import TrainConfig
from ..model.adapters import save_adapters
from ..optimizer.optimizers import state_per_weight
from .checkpoint import MANIFEST, broken


def export_bytes(pipe: Any, config: TrainConfig) -> tuple[int, int]:
    """Bytes of one checkpoint, and of the export.

    Args:
        pipe: with the adapters of a LoRA, its weights whole.
    """
    modules = [module for module in pipe.components.values() if isinstance(module, nn.Module)]
    trained = sum(p.nbytes for module in modules for p in module.parameters() if p.requires_grad)
    # Weights, the optimizer's state, and the moving average.
    checkpoint = round(trained * (1 + state_per_weight(config) + (config.optimizer.ema_decay is not None)))
    whole = sum(value.nbytes for module in modules for value in module.state_dict().values())
    return checkpoint, trained if config.lora is not None else whole


def check_room(config: TrainConfig, checkpoint: int, exported: int, step: int, steps: int) -> None:
    """Reject a run of which the last checkpoint and the export do not fit on the disk.

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
        raise InputError(f"{folder} cannot be written ({error}); {_kept(config, step)}") from error
    return folder


def _kept(config: TrainConfig, step: int) -> str:
    """The place of the trained weights after a failed export."""
    checkpoint = Path(config.output_dir) / f"checkpoint-{step}"
    if (checkpoint / MANIFEST).exists() and broken(checkpoint) is None:
        return f"the weights of step {step} are in {checkpoint}: free some space and use --resume, which exports them"
    return "the weights of the last step are in no checkpoint; go on from the last one with --resume"


def _write(pipe: Any, weights: dict[str, Tensor], config: TrainConfig, model: type, folder: Path) -> None:
    if config.lora is not None:
        save_adapters(pipe, weights, config, folder)
        return
    for name in config.model.train_modules:
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

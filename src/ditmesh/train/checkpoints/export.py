"""Export of a pipeline or adapters, complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor

from ...errors import InputError
from ..config import TrainConfig
from ..model.adapters import save_adapters
from .checkpoint import MANIFEST, broken


def export(pipe: Any, weights: dict[str, Tensor], config: TrainConfig, model: type, step: int) -> Path:
    """Save the pipeline with the trained weights, or only the adapters.

    Args:
        pipe: its transformer may be in shards, and is replaced by one of class ``model``.
        weights: by name, whole, on the CPU.
        step: the last one.

    Returns:
        The folder. An older one of that name stays until the new one is whole.

    Raises:
        InputError: it cannot be written; says where the trained weights are.
    """
    folder = Path(config.output_dir) / ("lora" if config.lora is not None else "pipeline")
    try:
        with written_atomically(folder) as part:
            _write(pipe, weights, config, model, part)
    except (OSError, SafetensorError) as error:
        checkpoint = Path(config.output_dir) / f"checkpoint-{step}"
        where = "the weights of the last step are in no checkpoint; go on from the last one with --resume"
        if (checkpoint / MANIFEST).exists() and broken(checkpoint) is None:
            where = f"the weights of step {step} are in {checkpoint}: free some space and use --resume"
        raise InputError(f"{folder} cannot be written ({error}); {where}") from error
    return folder


@contextmanager
def written_atomically(path: str | Path) -> Iterator[Path]:
    """An empty folder beside ``path`` to fill; when the block ends without an error it takes that name.

    A folder of that name stays until the new one is whole, and is removed then.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f".{path.name}-{os.getpid()}-{os.urandom(4).hex()}"
    temporary, old = path.with_name(f"{mark}.tmp"), path.with_name(f"{mark}.old")
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                # A rename may reach the disk before the data.
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(pipe: Any, weights: dict[str, Tensor], config: TrainConfig, model: type, folder: Path) -> None:
    if config.lora is not None:
        save_adapters(pipe, weights, config, folder)
        return
    modular = hasattr(pipe, "register_components")
    for name in config.model.train_modules:
        state = {path.removeprefix(f"{name}."): v for path, v in weights.items() if path.startswith(f"{name}.")}
        if name == config.denoiser:
            # The trained model may hold shards; the weights are not copied.
            with init_empty_weights():
                fresh = cast(Any, model).from_config(getattr(pipe, name).config)
            fresh.load_state_dict(state, assign=True)
            (pipe.register_components if modular else pipe.register_modules)(**{name: fresh})
        else:
            pipe.components[name].load_state_dict(state)
    pipe.save_pretrained(str(folder), **({"overwrite_modular_index": True} if modular else {}))
    for file in folder.rglob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        # A local path.
        if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

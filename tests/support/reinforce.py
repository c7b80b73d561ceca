"""Runs that learn from rewards, for tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ditmesh.train.reinforce.trainer import ReinforcementTrainer
from support.train import trainer_of


def redness(images: np.ndarray, prompts: list[str]) -> np.ndarray:
    """How much more red than green and blue an image or video has."""
    return (images[..., 0].astype(float) - images[..., 1:].mean(-1)).mean(tuple(range(1, images.ndim - 1))) / 255


def picky(images: np.ndarray, prompts: list[str]) -> np.ndarray:
    """`redness`, which raises for a cactus."""
    if "a cactus" in prompts:
        raise ValueError("a cactus is green")
    return redness(images, prompts)


def deadly(images: np.ndarray, prompts: list[str], folder: str) -> np.ndarray:
    """`redness`; in the first of all runs it kills the second rank, after the first checkpoint."""
    killed = Path(folder).with_name("killed")
    if dist.get_rank() == 1 and (Path(folder) / "checkpoint-1").exists() and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return redness(images, prompts)


def given(out: Path, **more: Any) -> dict[str, Any]:
    """A short run of the embedded Flux; names of settings are unique, and stand here without groups."""
    reinforce = {"prompts": ["a red fox", "a cactus"], "rewards": [{"function": "support.reinforce:redness"}]}
    reinforce |= {"group_size": 4, "groups": 2, "inference_steps": 3, "guidance": 1.0, **more.pop("reinforce", {})}
    run = {"pretrained_model_name_or_path": "emoji-flux", "objective": "flow_grpo", "output_dir": str(out)}
    run |= {"max_sequence_length": 16, "resolution": 64, "train_batch_size": 2, "max_train_steps": 2}
    return {**run, "learning_rate": 1e-3, "lora": {"rank": 2}, "reinforce": reinforce, **more}


# Ways to share out a run in reproducible mode.
GRID = [*({axis: size} for size in (2, 3, 4) for axis in ("data", "ulysses", "ring")), {"data": 2, "ulysses": 2}]


def trained(settings: dict[str, Any], kind: type = ReinforcementTrainer) -> tuple[list[dict[str, float]], str]:
    """The numbers of every step of a run, but for seconds, and the digest of its weights."""
    rows: list[dict[str, float]] = []
    with trainer_of(settings, kind) as trainer:
        trainer.run(report=lambda now: rows.append({"loss": now.loss, "norm": now.grad_norm, **now.numbers}))
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows], trainer.state.weights_digest()

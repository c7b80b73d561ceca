"""Runs that learn from rewards, for tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

try:
    from ditmesh.train.reinforce import rewards as rewards
except ImportError:
    # Until the room of rewards is merged.
    from importlib import import_module

    class RewardError(RuntimeError):
        def __init__(self, name: str, sentence: str) -> None:
            super().__init__(f"the reward {name!r} {sentence}")

    class Rewards:
        def __init__(self, rewards: Any) -> None:
            self.given = {}
            for reward in rewards:
                module, _, name = reward.function.partition(":")
                self.given[name] = getattr(import_module(module), name), reward

        def __call__(self, images: np.ndarray, prompts: list[str]) -> dict[str, np.ndarray]:
            scores = {}
            for name, (function, reward) in self.given.items():
                try:
                    scores[name] = np.asarray(function(images, prompts, **reward.arguments), np.float64)
                except Exception as error:
                    raise RewardError(name, f"raised {error}") from error
                if not np.isfinite(scores[name]).all():
                    raise RewardError(name, "returned nan")
            return scores

        def total(self, scores: dict[str, np.ndarray]) -> np.ndarray:
            return np.sum([reward.weight * scores[name] for name, (_, reward) in self.given.items()], axis=0)

    rewards = sys.modules["ditmesh.train.reinforce.rewards"] = ModuleType("ditmesh.train.reinforce.rewards")
    vars(rewards).update(Rewards=Rewards, RewardError=RewardError)

from ditmesh.train.reinforce.trainer import ReinforcementTrainer  # noqa: E402
from support.train import configured, loaded  # noqa: E402


def redness(images: np.ndarray, prompts: list[str]) -> np.ndarray:
    """How much more red than green and blue an image has."""
    return (images[..., 0].astype(float) - images[..., 1:].mean(-1)).mean((1, 2)) / 255


def given(out: Path, **more: Any) -> dict[str, Any]:
    """A short run of the embedded Flux; names of settings are unique, and stand here without groups."""
    reinforce = {
        "prompts": ["a red fox", "a cactus"],
        "rewards": [{"function": "support.reinforce:redness"}],
        "group_size": 4,
        "groups": 2,
        "inference_steps": 3,
        "guidance": 1.0,
    }
    return {
        "pretrained_model_name_or_path": "emoji-flux",
        "output_dir": str(out),
        "objective": "flow_grpo",
        "reinforce": reinforce | more.pop("reinforce", {}),
        "max_sequence_length": 16,
        "resolution": 64,
        "train_batch_size": 2,
        "max_train_steps": 2,
        "learning_rate": 1e-3,
        "lora": {"rank": 2},
        **more,
    }


def trained(settings: dict[str, Any], until: int | None = None) -> tuple[list[dict[str, float]], str]:
    """The numbers of every step of a run, but for seconds, and the digest of its weights."""
    config = configured(settings)
    with ReinforcementTrainer(config, loaded(config.pretrained_model_name_or_path), timeout=100.0) as trainer:
        rows: list[dict[str, float]] = []
        trainer.run(report=lambda now: rows.append({"loss": now.loss, "norm": now.grad_norm, **now.numbers}), until=until)
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows], trainer.state.weights_digest()

"""A training loop that can be stopped at any step and goes on as if it had not been.

Everything the next step depends on (weights, optimizer, moving average, random state, step number) is one
checkpoint file, replaced atomically. The learning rate is a function of the step alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.training_utils import EMAModel
from rich.console import Console
from torch import Tensor, nn

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train: ``steps`` steps of ``batch`` samples at peak rate ``rate``."""

    steps: int
    batch: int
    rate: float
    warmup: int = 100
    cooldown: float = 0.3
    average: float = 0.999
    clip: float = 1.0
    weight_decay: float = 0.0
    save_every: float = 120.0

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: linear rise, flat, linear to zero over the last ``cooldown``."""
        up = min(1.0, (step + 1) / max(1, self.warmup))
        left = (self.steps - step) / max(1.0, self.steps * self.cooldown)
        return self.rate * min(up, 1.0, max(left, 0.0))


@dataclass
class Outcome:
    """Where a loop stopped: steps done, whether those are all, seconds of training, smoothed loss."""

    step: int
    finished: bool
    seconds: float
    loss: float


def train(
    name: str,
    modules: Mapping[str, nn.Module],
    loss_of: Callable[[int, torch.Generator], Tensor],
    plan: Plan,
    checkpoint: Path,
    *,
    seed: int = 0,
    rates: Mapping[str, float] | None = None,
    stop_after: float | None = None,
    stop_at: int | None = None,
    every: Callable[[int], None] | None = None,
) -> Outcome:
    """Trains ``modules`` together on ``loss_of(step, generator)``; leaves them with averaged weights.

    ``rates`` multiplies the learning rate of single modules. The loop ends at ``plan.steps``, or earlier
    after ``stop_after`` seconds or at step ``stop_at``; in every case it first writes ``checkpoint``,
    from which the next call goes on to the same result, bit for bit, on the same machine and number of
    threads. ``every`` is called after each checkpoint while the modules carry the averaged weights.
    """
    rates = rates or {}
    groups = [
        {"params": [p for p in module.parameters() if p.requires_grad], "factor": rates.get(key, 1.0)}
        for key, module in modules.items()
    ]
    parameters = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.99), weight_decay=plan.weight_decay, fused=True)
    average = EMAModel(parameters, decay=plan.average, foreach=True)
    generator = torch.Generator().manual_seed(seed)
    step, spent, smooth = 0, 0.0, float("nan")
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for key, module in modules.items():
            module.load_state_dict(state["modules"][key])
        optimizer.load_state_dict(state["optimizer"])
        average.load_state_dict(state["average"])
        generator.set_state(state["generator"])
        step, spent, smooth = state["step"], state["seconds"], state["loss"]
        console.print(f"{name}: going on from step {step} of {plan.steps}")

    def save() -> None:
        part = checkpoint.with_suffix(".part")
        torch.save(
            {
                "modules": {key: module.state_dict() for key, module in modules.items()},
                "optimizer": optimizer.state_dict(),
                "average": average.state_dict(),
                "generator": generator.get_state(),
                "step": step,
                "seconds": spent,
                "loss": smooth,
            },
            part,
        )
        os.replace(part, checkpoint)

    for module in modules.values():
        module.train()
    end = plan.steps if stop_at is None else min(plan.steps, stop_at)
    began = saved = printed = time.monotonic()
    first = step
    while step < end and (stop_after is None or time.monotonic() - began < stop_after):
        now = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(step) * group["factor"]
        loss = loss_of(step, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, plan.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.step(parameters)
        step += 1
        value = float(loss.detach())
        if value != value:
            raise FloatingPointError(f"{name}: the loss is not a number at step {step}")
        smooth = value if smooth != smooth else 0.98 * smooth + 0.02 * value
        spent += time.monotonic() - now
        now = time.monotonic()
        if now - printed > 20 or step == end:
            pace = (step - first) / (now - began)
            console.print(
                f"{name}: step {step}/{plan.steps}  loss {smooth:.4f}  {pace:.2f} steps/s  "
                f"{(plan.steps - step) / pace / 60:.0f} min left"
            )
            printed = now
        if now - saved > plan.save_every and step < end:
            save()
            if every is not None:
                average.store(parameters)
                average.copy_to(parameters)
                every(step)
                average.restore(parameters)
            saved = time.monotonic()
    save()
    average.copy_to(parameters)
    for module in modules.values():
        module.eval()
    return Outcome(step, step >= plan.steps, spent, smooth)

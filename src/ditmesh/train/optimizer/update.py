"""Update of the weights: optimizer, learning rate, moving average, and checks for finite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import get_wsd_schedule

from ...comm.mesh import Mesh
from ...errors import ConfigError
from ..config import TrainConfig
from ..gradients.sync import GradientSync
from ..settings import OptimizerConfig
from .optimizers import check_optimizer, finite_parts, make_optimizer


class WeightUpdate:
    """The optimizer of a run with its schedule and moving average.

    Args:
        trained: modules by name, parallelised and sharded already.
        steps: optimizer steps of the run.

    Attributes:
        average: the moving average of the weights; None without ``ema_decay``.

    Raises:
        ConfigError: no parameter is trained, or the schedule does not fit the run.
    """

    def __init__(self, trained: nn.ModuleDict, config: TrainConfig, mesh: Mesh, steps: int) -> None:
        self._trained, self._config, self._mesh = trained, config.optimizer, mesh
        self._output_dir = config.output_dir
        self.parameters = [p for p in trained.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError("nothing is trained: no parameter asks for a gradient")
        check_optimizer(config)
        self.optimizer = make_optimizer(trained, config)
        self.schedule = _schedule(self.optimizer, config.optimizer, steps)
        decay = config.optimizer.ema_decay
        self.average = None if decay is None else EMAModel(self.parameters, decay=decay)

    def apply(self, sync: GradientSync, step: int) -> float:
        """Change the weights by the gradients that they hold; returns their norm before clipping. Collective.

        Args:
            step: number of the step from 1, for messages.

        Raises:
            FloatingPointError: a gradient is not finite.
        """
        norm = sync.clip(self._config.max_grad_norm)
        if not math.isfinite(norm):
            gradients = ((name, p.grad) for name, p in self._trained.named_parameters() if p.grad is not None)
            name = not_finite(gradients, self._mesh)
            where = "of all parameters together" if name is None else f"in {name}"
            raise FloatingPointError(self.unchanged(f"the norm of the gradient of step {step} is {norm} ({where})"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.step(self.parameters)
        return norm

    def unchanged(self, why: str) -> str:
        """The error message of a step with numbers that are not finite."""
        config = self._config
        return (
            f"{why}: no weight was changed by this step, and the last checkpoint in {self._output_dir} stays; "
            f"use a lower learning_rate (now {config.learning_rate:g}) or max_grad_norm ({config.max_grad_norm:g}) and "
            "--resume"
        )

    def bad_weights(self) -> str | None:
        """The name of a saved tensor that is not finite; None: none. Collective."""

        def held() -> Iterator[tuple[str, Tensor]]:
            trained = [(name, p) for name, p in self._trained.named_parameters() if p.requires_grad]
            yield from trained
            averages = self.average.shadow_params if self.average is not None else []
            for (name, _), average in zip(trained, averages, strict=False):
                yield f"the average of {name}", average
            yield from finite_parts(self.optimizer, trained)

        return not_finite(held(), self._mesh)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context with the weights that are saved: an average, if there is one; modules are in evaluation mode."""
        training = [module for module in self._trained.values() if module.training]
        if self.average is not None:
            self.average.store(self.parameters)
            self.average.copy_to(self.parameters)
        for module in training:
            module.eval()
        try:
            yield
        finally:
            for module in training:
                module.train()
            if self.average is not None:
                self.average.restore(self.parameters)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by name."""
        return {name: p for name, p in self._trained.named_parameters() if p.requires_grad}

    def schedule_from(self, step: int) -> None:
        """Continue the learning rate after ``step`` of the schedule."""
        self.schedule.last_epoch = step
        for group, rate, factor in zip(
            self.optimizer.param_groups, self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True
        ):
            group["initial_lr"] = rate
            group["lr"] = float(rate) * factor(step)


def _schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps: int) -> LambdaLR:
    if config.lr_decay_steps is None:
        return get_scheduler(
            config.lr_scheduler, optimizer=optimizer, num_warmup_steps=config.lr_warmup_steps, num_training_steps=steps
        )
    if config.lr_warmup_steps + config.lr_decay_steps > steps:
        raise ConfigError(
            f"lr_warmup_steps={config.lr_warmup_steps} and lr_decay_steps={config.lr_decay_steps} are more than "
            f"the run's {steps} steps; use fewer"
        )
    return get_wsd_schedule(
        optimizer, config.lr_warmup_steps, config.lr_decay_steps, num_training_steps=steps, decay_type="linear"
    )


def local_of(tensor: Tensor) -> Tensor:
    """A rank's own shard of a tensor; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def not_finite(named: Iterable[tuple[str, Tensor]], mesh: Mesh) -> str | None:
    """The name of a tensor of any rank that holds an infinity or a NaN, the same on every rank. Collective.

    Args:
        named: this rank's whole tensors, slices or shards.
    """
    local = [(name, local_of(value)) for name, value in named]
    local = [(name, value) for name, value in local if value.is_floating_point()]
    bad: dict[str, bool] = {}
    # One look at each device for all of its tensors; an optimizer's counts may be on the host.
    for device in {value.device for _, value in local}:
        here = [(name, value) for name, value in local if value.device == device]
        good = torch.stack([torch.isfinite(value).all() for _, value in here]).tolist()
        bad |= {name: not fine for (name, _), fine in zip(here, good, strict=True)}
    mine = next((name for name, _ in local if bad[name]), None)
    return next((name for name in mesh.world.all_gather_object(mine) if name is not None), None)

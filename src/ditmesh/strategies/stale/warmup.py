"""The synchronous steps of a request: the control that stale strategies ask."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

from torch import nn

from ...config import ParallelConfig
from ...core.arguments import Arguments
from ...core.clock import TIMESTEPS, timestep_of
from ...errors import ConfigError, FewStepsWarning, InputError
from ...layout import TokenLayout
from ...staleness.control import WarmupControl
from ...staleness.drift import DriftMonitor
from ...staleness.policy import few_steps, parse
from ...staleness.schedule import noise_levels
from ..base import ParallelModel, Request, Strategy
from ..pipefusion.stages import blocks_of


def numbered(model: ParallelModel, monitor: DriftMonitor) -> dict[str, int]:
    """Number in the drift monitor of every block of a transformer, by path."""
    return {path: monitor.add_block(model.prefix + path) for path, _ in blocks_of(model.model, model.layout)}


class StaleSteps(Strategy):
    """The steps of a request, and which of them are synchronous. Before the strategies that ask."""

    name = "warm-up"
    promise = "none"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.stale_exchange or config.stages_or_patches

    @classmethod
    def keeps_between_steps(cls, config: ParallelConfig) -> str:
        if config.stages_or_patches:
            return f"{config.describe()} keeps keys and values of patches from step to step of one request"
        return f"exchange={config.exchange!r} uses keys and values of the step before, of one request"

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        if timestep_of(model, layout) is None:
            raise ConfigError(
                f"stale strategies know steps by their timestep, and {type(model).__name__} takes none "
                f"({' or '.join(TIMESTEPS)}); use exchange='exact'"
            )

    def apply(self, undo: ExitStack) -> None:
        context, config = self.context, self.context.config
        mesh = context.mesh
        self._devices = config.patches or config.pipe if config.stages_or_patches else mesh.sequence.size
        monitor = DriftMonitor(mesh.world.all_reduce, mesh.device)

        def noise() -> tuple[float, ...] | None:
            return noise_levels(getattr(context.pipe, "scheduler", None))

        control = WarmupControl(parse(config.warmup), self._devices, monitor, context.clock, noise)
        self._control = context.add(control)

    def begin_request(self, request: Request) -> None:
        self._control.begin_request(request.steps)

    def end_request(self, failed: bool) -> None:
        self._control.end_request(failed)
        steps, context = self._control.log.steps, self.context
        is_stale = self._devices > 1 and not all(record.synchronous for record in steps)
        # Walks without values have no pipeline, and no image.
        is_told = is_stale and not failed and context.pipe is not None and context.mesh.rank == 0
        if is_told and (why := few_steps(len(steps))):
            warnings.warn(why, FewStepsWarning, stacklevel=2)

    def outside_request(self, arguments: Arguments) -> None:
        raise InputError(
            "a transformer with stale keys and values was called outside of a request, and cannot know where one "
            "begins; call ditmesh.parallelize() on the pipeline that calls it, too (they share the ranks), or "
            "ditmesh.engine_of(...).begin_request() before its first step"
        )

"""Samples that a pipeline draws with its stochastic steps, and the same calls once more with gradients.

An update runs the pipeline's own loop again, with the samples that the rollout met: in the steps that are trained the
transformer computes, with gradients, and in the others a result of the rollout stands in for it. So guidance, packing
and what else a pipeline does with predictions is in both the same code, and no model is written down here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.digests import digest
from ...core.generators import OwnGenerators
from ...errors import ConfigError
from ...generate.modular import guided_by
from ...generate.runner import PipelineRunner
from ..config import TrainConfig
from ..data.order import MicroBatch
from ..drawing import drawing_job, pixels_of, whole_size
from ..observed.watch import StandIn, remember_prompts
from ..staging import onto
from .steps import NOISE_LEVELS, NormalStep, stochastic_steps


@dataclass
class Rollout:
    """The samples of a micro-batch: images of one prompt.

    Attributes:
        micro: numbers of the samples.
        images: (B, H, W, 3), of videos (B, F, H, W, 3), uint8.
        after: the sample after each step, (B, ...).
        log_probabilities: of the trained steps, (B,) each.
        means: of the trained steps without adapters, where they are asked for.
        output: a result of the transformer.
    """

    micro: MicroBatch
    prompt: str
    images: np.ndarray = field(default_factory=lambda: np.empty(0))
    after: list[Tensor] = field(default_factory=list)
    log_probabilities: dict[int, Tensor] = field(default_factory=dict)
    means: dict[int, Tensor] = field(default_factory=dict)
    output: Any = None


class _Seen(BaseException):
    """Leaves a pipeline's call after its last trained step. No `Exception`: pipelines catch those."""


def seed_of(seed: int, *about: Any) -> int:
    """A seed for one thing of a run, such as the noise of a step of a sample."""
    return int(digest(("reinforce", seed, *about)), 16) % 2**63


class Rollouts:
    """Draws samples with a pipeline, and repeats them.

    Everything that is random about a sample follows from the run's seed and the sample's number, so that it depends on
    no batch and no rank.
    """

    def __init__(self, pipe: Any, config: TrainConfig, device: torch.device) -> None:
        assert config.reinforce is not None
        self._settings, self._config, self._device = config.reinforce, config, device
        self._runner = PipelineRunner(pipe, device)
        self._prompts: dict[str, Any] = {}
        self.level = self._settings.noise_level or NOISE_LEVELS[config.objective]

    def forget(self) -> None:
        """Forget encoded prompts."""
        self._prompts.clear()

    def draw(self, micro: MicroBatch, prompt: str, trained: Sequence[int]) -> Rollout:
        """Draw the samples of a micro-batch.

        Args:
            trained: numbers of the steps whose probabilities are kept.

        Raises:
            ConfigError: the pipeline does not step as its scheduler says.
        """
        rollout, seed = Rollout(micro, prompt), self._config.seed

        def follow(step: NormalStep) -> Tensor:
            after = step.plain
            if step.deviation:
                noise = [self._noise(after.shape[1:], seed_of(seed, s.number, step.number)) for s in micro.samples]
                after = step.drawn(onto(torch.stack(noise), after.device))
            if step.number in trained:
                rollout.log_probabilities[step.number] = step.log_probability(after)
            rollout.after.append(after)
            return after

        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            rollout.output = model(*args, **kwargs)
            return rollout.output

        with self._playing(micro.count, forward, follow) as sampler:
            outputs = self._runner.run(self._prepared(rollout))
        if len(rollout.after) != len(sampler.timesteps) or len(rollout.after) <= max(trained):
            raise ConfigError(
                f"{self._runner.kind.__name__} takes {len(rollout.after)} steps, and its scheduler has "
                f"{len(sampler.timesteps)}: objective: {self._config.objective} cannot tell one from another; use "
                "objective: denoising"
            )
        rollout.images = pixels_of(outputs)
        return rollout

    def repeat(
        self,
        rollout: Rollout,
        trained: Sequence[int],
        visit: Callable[[NormalStep], None],
        model: Callable[[], Any],
        begin: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Run the call of a rollout again; gradients are recorded if they are on.

        Args:
            trained: numbers of the steps in which the transformer computes.
            visit: called in each of them.
            model: what computes in the transformer's place.
            begin: called before the first call of the transformer in each of them.
        """
        begun: set[int] = set()
        place = 0

        def follow(step: NormalStep) -> Tensor:
            nonlocal place
            if step.number in trained:
                visit(step)
            if step.number == max(trained):
                raise _Seen
            place = step.number + 1
            return rollout.after[step.number]

        def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
            if place not in trained:
                return rollout.output
            if place not in begun:
                begun.add(place)
                begin(place)
            return model()(*args, **kwargs)

        prepared = self._prepared(rollout)
        pipe, given = prepared.pipe, dict(prepared.arguments)
        # Below the decorator that switches gradients off.
        call = inspect.unwrap(type(pipe).__call__)
        generators, played = (
            OwnGenerators(prepared.seed, self._device),
            self._playing(rollout.micro.count, forward, follow),
        )
        with generators.active(), played, guided_by(pipe, given), suppress(_Seen):
            call(pipe, **given)

    @staticmethod
    def _noise(shape: Sequence[int], seed: int) -> Tensor:
        return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))

    def _prepared(self, rollout: Rollout) -> Any:
        """The call of the pipeline, with fresh generators."""
        numbers = [sample.number for sample in rollout.micro.samples]
        steps, seeds = self._settings.inference_steps, [seed_of(self._config.seed, number) for number in numbers]
        job = drawing_job(self._config, self._runner, (rollout.prompt,), steps, seeds[0] % 2**32, len(numbers))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return self._runner.prepare(job, 0, generator=generators, **whole_size(self._runner))

    @contextmanager
    def _playing(
        self, images: int, forward: Callable[..., Any], follow: Callable[[NormalStep], Tensor]
    ) -> Iterator[Any]:
        """The pipeline with stochastic steps, and a function in the transformer's place; yields the sampler."""
        pipe, name = self._runner.pipe, self._config.denoiser
        model = vars(pipe)[name]
        is_half = self._config.model.mixed_precision == "bf16"

        def computed(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self._device.type, torch.bfloat16) if is_half else nullcontext():
                return forward(model, *args, **kwargs)

        with ExitStack() as undo:
            undo.callback(vars(pipe).__setitem__, name, model)
            vars(pipe)[name] = StandIn(model, computed)
            undo.callback(remember_prompts(pipe, self._prompts))
            yield undo.enter_context(stochastic_steps(pipe, self._config.objective, self.level, images, follow))


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """While inside, the adapters of a transformer add nothing."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: Mapping[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    try:
        for layer in layers.values():
            # Its method also says which weights are trained.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers.values():
            layer._disable_adapters = False

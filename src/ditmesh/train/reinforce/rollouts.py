"""Samples that a pipeline draws with its stochastic steps, and the same calls once more with gradients.

An update runs the pipeline's own loop again, with the samples that the rollout met: in the steps that are trained the
transformer computes, with gradients, and in the others a result of the rollout stands in for it. So guidance, packing
and what else a pipeline does with predictions is in both the same code, and no model is written down here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
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
from ...generate.runner import PipelineRunner, Prepared
from ..config import TrainConfig
from ..data.order import DrawnSample, MicroBatch
from ..drawing import drawing_call, drawing_job, pixels_of
from ..observed.watch import StandIn, remember_prompts
from ..settings import DistillConfig
from ..staging import onto
from .steps import NOISE_LEVELS, NormalStep, stochastic_steps


@dataclass
class Rollout:
    """The samples of a micro-batch, each with its prompt.

    Attributes:
        images: (B, H, W, 3), of videos (B, F, H, W, 3), uint8.
        after: the sample after each step, (B, ...).
        log_probabilities, means: of the trained steps; means are without adapters, where they are asked for.
        output: a result of the transformer.
    """

    micro: MicroBatch
    prompts: tuple[str, ...]
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


def _generator(*about: Any) -> torch.Generator:
    # On the CPU: its numbers depend on no device.
    return torch.Generator().manual_seed(seed_of(*about))


class Rollouts:
    """Draws samples with a pipeline, and repeats them; ``prompts``: results of its encoder of prompts, which are kept.

    All that is random about a sample follows from the run's seed and its number, on any rank and in any batch.
    """

    def __init__(self, pipe: Any, config: TrainConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._runner = PipelineRunner(pipe, device)
        self.prompts: dict[str, Any] = {}
        chosen = None if config.reinforce is None else config.reinforce.noise_level
        self.level = chosen or NOISE_LEVELS[config.objective]

    def draw(self, micro: MicroBatch, prompts: tuple[str, ...], trained: Sequence[int]) -> Rollout:
        """Draw the samples of a micro-batch, and keep the probabilities of the trained steps.

        Raises `ConfigError`: the pipeline does not step as its scheduler says.
        """
        rollout, seed = Rollout(micro, prompts), self._config.seed

        def follow(step: NormalStep) -> Tensor:
            after = step.plain
            if step.deviation:
                generators = [_generator(seed, sample.number, step.number) for sample in micro.samples]
                noise = torch.stack([torch.randn(after.shape[1:], generator=generator) for generator in generators])
                after = step.drawn(onto(noise, after.device))
            if step.number in trained:
                rollout.log_probabilities[step.number] = step.log_probability(after)
            rollout.after.append(after)
            return after

        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            rollout.output = model(*args, **kwargs)
            return rollout.output

        with self._playing(micro.count, forward, follow) as sampler:
            outputs = self._runner.run(self._prepared(rollout, self._config.guidance))
        if len(rollout.after) != len(sampler.timesteps) or len(rollout.after) <= max(trained):
            raise ConfigError(
                f"{self._runner.kind.__name__} takes {len(rollout.after)} steps of {len(sampler.timesteps)} in its "
                f"scheduler, which objective: {self._config.objective} does not know; use objective: denoising"
            )
        rollout.images = pixels_of(outputs)
        return rollout

    def repeat(
        self, rollout: Rollout, trained: Sequence[int], visit: Callable[[NormalStep], Any], model: Callable[[int], Any]
    ) -> None:
        """Run the call of a rollout again; gradients are recorded if they are on.

        In the trained steps ``model``, called with a step's number, gives what computes, and ``visit`` follows.
        """
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
            return model(place)(*args, **kwargs) if place in trained else rollout.output

        with self._playing(rollout.micro.count, forward, follow):
            self._call(self._prepared(rollout, self._config.guidance))

    @torch.no_grad()
    def teach(self, micro: MicroBatch, prompts: tuple[str, ...], model: Any, settings: DistillConfig) -> Rollout:
        """Draw samples without adapters, and keep those in which each of the student's steps is to arrive.

        Raises `ConfigError`: the pipeline does not step as its scheduler says.
        """
        rollout, parts = Rollout(micro, prompts), settings.teacher_steps

        def follow(step: NormalStep) -> Tensor:
            if (step.number + 1) % parts == 0:
                rollout.after.append(step.plain)
            if len(rollout.after) == settings.inference_steps:
                raise _Seen
            return step.plain

        played = self._playing(micro.count, lambda _, *args, **kwargs: model(*args, **kwargs), follow, parts)
        with without_adapters(model), played as sampler:
            self._call(self._prepared(rollout, settings.guidance))
        if len(sampler.timesteps) != parts * len(rollout.after):
            raise ConfigError(
                f"{self._runner.kind.__name__} takes {len(sampler.timesteps) // parts} steps where "
                f"distill.inference_steps={settings.inference_steps} were asked for; use so many"
            )
        return rollout

    def _call(self, prepared: Prepared) -> None:
        """Call the pipeline up to the last step that is wanted; gradients are recorded if they are on."""
        pipe, given = prepared.pipe, dict(prepared.arguments)
        # Below the decorator that switches gradients off.
        call = inspect.unwrap(type(pipe).__call__)
        with OwnGenerators(prepared.seed, self._device).active(), guided_by(pipe, given), suppress(_Seen):
            call(pipe, **given)

    @torch.no_grad()
    def keep_means(self, rollout: Rollout, trained: Sequence[int], model: Any) -> None:
        """Keep the means of trained steps as they are without the transformer's adapters."""
        with without_adapters(model):
            self.repeat(rollout, trained, lambda step: rollout.means.update({step.number: step.mean}), lambda _: model)

    def noise_of(self, sample: DrawnSample) -> torch.Generator:
        """A fresh generator of the noise that a sample begins with."""
        return _generator(self._config.seed, sample.number)

    def _prepared(self, rollout: Rollout, guidance: float | None) -> Prepared:
        """The call of the pipeline, with fresh generators."""
        config, runner, samples = self._config, self._runner, rollout.micro.samples
        settings, seed = config.reinforce or config.distill, seed_of(config.seed, samples[0].number) % 2**32
        assert settings is not None
        several = len({*rollout.prompts}) > 1
        more = {"prompt": [*rollout.prompts]} if several else {}
        images, prompts = 1 if several else len(samples), rollout.prompts[:1]
        job = drawing_job(config, runner, prompts, settings.inference_steps, seed, images).changed(guidance=guidance)
        generators = [self.noise_of(sample) for sample in samples]
        return drawing_call(runner, job, 0, generator=generators, **more)

    @contextmanager
    def _playing(
        self, images: int, forward: Callable[..., Any], follow: Callable[[NormalStep], Tensor], parts: int = 1
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
            undo.callback(remember_prompts(pipe, self.prompts))
            steps = stochastic_steps(pipe, self._config.objective, self.level, images, follow, parts)
            yield undo.enter_context(steps)


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """While inside, the adapters of a transformer add nothing."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            # The layer's method also says which weights are trained.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False

"""Continuous batching: transformer calls of several requests that wait at the same time run as one call.

Requests join and leave a batch at a step, as in Orca (Yu et al. 2022, OSDI) for language models. Each request is a
`PipelineTask`, a coroutine that stops where it calls a component and goes on with the result. Calls of a transformer
that fit together (`Joiner`) run as one, with a row and a timestep for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ...core.arguments import Arguments, parameter_names
from ...engine import DENOISERS, Engine, engine_of
from ...errors import InputError
from ...generate.loras import adapted, pipeline_has, set_loras
from ...generate.steps import in_chunks
from ...layout.forms import samples_of
from ...recipe import keeps_between_steps
from ...strategies.heads import takes_batch_apart
from .coroutines import CallInterceptor, PendingCall, PipelineTask, bare
from .device_clock import DeviceClock
from .joining import CallRows, Joiner, join_calls, split_result

# The end of the sentences that say why requests share no calls.
ONE_BY_ONE = "; requests run one after the other"


@dataclass
class FailedCalls:
    """Why calls have failed on this rank, and the runs that wait for one or were not begun because of it."""

    stuck: list[PipelineTask]
    error: Exception


@dataclass
class CallCounts:
    """Counts of calls so far.

    Attributes:
        calls, rows: of transformers.
        batch: rows of the latest call.
        waited: seconds of the latest step in which the host waited for other ranks.
        seconds: of the latest step that has finished.
    """

    calls: int = 0
    rows: int = 0
    batch: int = 0
    waited: float = 0.0
    seconds: float = 0.0


class Batcher:
    """Runs the pending calls of one pipeline's coroutines. Every rank runs the same calls in the same order.

    Args:
        pipe: parallelised, with an engine that knows its layouts.
        template: the same pipeline as it was before; every `PipelineTask` calls a copy of it (`copied`).
        exchange: gives every rank's value, in rank order. A collective call.

    Attributes:
        why: why its requests run one after the other, a sentence; empty: their steps run together.
        delegates: whether its tasks hand over their calls; else they run through the parallel pipeline itself.
        most: rows of how many requests run as one call, at most.
        counts: what has been called.
    """

    def __init__(
        self, pipe: Any, template: Any, exchange: Callable[[Any], list[Any]] = lambda value: [value], most: int = 8
    ) -> None:
        self.engine: Engine = engine_of(pipe)
        self.most = most
        self._clock = DeviceClock(self.engine.mesh.device)
        self.counts = CallCounts()
        self.why = _why_alone(pipe, self.engine)
        self.delegates = not self.why
        self._template = template
        self._interceptor = CallInterceptor(pipe, self._count)
        self._request = ExitStack()
        self._set_pipe: Callable[..., None] | None = None
        self._current_pipe: Any = None
        self._adapters: tuple[tuple[str, float], ...] | None = None

        def begin_trial(adapters: tuple[tuple[str, float], ...]) -> None:
            self._switch_to(template)
            self.adapt(adapters)

        self._joiner = Joiner(self.engine, exchange, begin_trial, self.close_request)
        # The only task of the batch: ranks run its guidance branches ahead.
        self._guided_task: PipelineTask | None = None
        # Whether calls of other components have run since the latest step.
        self._between_steps = False

    def run_alone(self, why: str, delegates: bool = False) -> None:
        """Run requests one after the other from here on."""
        self.why, self.delegates = f"{why}{ONE_BY_ONE}", delegates

    def check_joining(self, run: PipelineTask) -> None:
        """Test whether calls of the form that a task waits for can be joined, and set `why` if not. Collective."""
        if why := self._joiner.why_not(run):
            # What such a pipeline keeps is in its own call.
            self.run_alone(why, in_chunks(run.pipe))

    def close(self) -> None:
        """Restore the pipeline."""
        self.close_request()
        self._interceptor.close()

    # --- the engine's request ----------------------------------------------------------------------------------

    def close_request(self, failed: BaseException | None = None) -> None:
        """Close the engine's request until the next call; ``failed``: the error of a call in it.

        Every rank does; where one has failed, all of them renew their links when the next request is opened.
        """
        turn, self._set_pipe, self._current_pipe = self._set_pipe, None, None
        request = self._request.pop_all()
        if turn is None:
            return
        if failed is not None:
            self._guided_task = None
            request.__exit__(type(failed), failed, failed.__traceback__)
        else:
            self._set_pipe = turn
            self._end_guided_task()
            # Do not keep the last request's copy alive.
            turn(self._template)
            self._set_pipe = None
            request.close()
        self._joiner.forget()

    def _switch_to(self, pipe: Any) -> None:
        """Tell the engine which pipeline makes the transformer calls that follow; the template: many tasks together."""
        if self._set_pipe is None:
            name = type(self._template).__name__
            self._set_pipe = self._request.enter_context(self.engine.request(f"calls of {name} of many requests"))
        if self._current_pipe is not pipe:
            self._end_guided_task()
            self._set_pipe(pipe)
            self._current_pipe = pipe

    def _end_guided_task(self) -> None:
        """End the calls of the single task. If a guidance branch differed from the prediction, the task fails."""
        run, self._guided_task = self._guided_task, None
        if run is None or self._set_pipe is None:
            return
        self._current_pipe = None
        try:
            self._set_pipe(self._template)
        except InputError as error:
            run.leave()
            run.output, run.failure = None, bare(error)

    def adapt(self, adapters: tuple[tuple[str, float], ...]) -> None:
        """Activate exactly these LoRA adapters."""
        if adapters == self._adapters:
            return
        if adapters:
            _switch_loras(self._template, True)
            set_loras(self._template, dict(adapters))
        elif self._adapters is not None or any(adapted(self._template)):
            _switch_loras(self._template, False)
        self._adapters = adapters

    # --- a round -----------------------------------------------------------------------------------------------

    def round(self, runs: Sequence[PipelineTask]) -> FailedCalls | None:
        """Run pending calls and resume their tasks: the calls of a step, or one task's calls of other components.

        Text encoders and autoencoders hold up the steps of others by one task's calls at most.

        Args:
            runs: in order; the same on every rank, as are their states. Where requests run one after the other: one.

        Returns:
            What has failed here. Runs that are stuck were not resumed.
        """
        for run in runs:
            if not self.delegates:
                self._step_alone(run)
            elif not run.begun:
                run.resume()
        if not self.delegates:
            return None
        waiting = [run for run in runs if run.pending is not None]
        steps = [run for run in waiting if self.steps(run)]
        others = [run for run in waiting if not self.steps(run)]
        failed = None
        if others and not (steps and self._between_steps):
            self._between_steps = True
            self._run_components(others[0])
        else:
            self._between_steps = False
            failed = self._run_steps(steps) if steps else None
        if self._guided_task is not None and self._guided_task.ended:
            self._end_guided_task()
        return failed

    def _run_components(self, run: PipelineTask) -> None:
        """Run a task's calls of text encoders, autoencoders and other components up to its next step."""
        self._switch_to(self._current_pipe or self._template)
        self.adapt(run.adapters)
        while run.pending is not None and not self.steps(run):
            pending, answer, error = run.waits_for, None, None
            with run.generators.active(), run.during():
                try:
                    answer = pending.call(*pending.args, **pending.kwargs)
                except Exception as failed:
                    error = bare(failed)
            run.resume(answer, error)

    def _step_alone(self, run: PipelineTask) -> None:
        """Run a step of a task through the parallel pipeline itself."""
        if not run.begun:
            self.close_request()
            self.adapt(run.adapters)
        waited = self.engine.mesh.waited
        with self._clock.span():
            run.resume()
        self.counts.seconds, self.counts.waited = self._clock.seconds, self.engine.mesh.waited - waited

    def _run_steps(self, runs: list[PipelineTask]) -> FailedCalls | None:
        """Run calls of transformers; compatible calls run as one."""
        waited = self.engine.mesh.waited
        alone = len(runs) == 1 and self.engine.config.cfg > 1
        # Where they run one after the other: what is kept is half written when a call has failed.
        runs[0].waits_for.alone |= bool(self.why)
        answers: dict[PipelineTask, Any] = {}
        failed: Exception | None = None
        with self._clock.span():
            for group in self._joiner.groups(runs, self.most):
                try:
                    # With cfg ranks, the branches of a pipeline are identified by its scheduler.
                    self._switch_to(runs[0].pipe if alone else self._template)
                    self._guided_task = runs[0] if alone else None
                    self.adapt(group[0][0].adapters)
                    if not alone:
                        self.engine.clock.advance()
                    outputs = self._joined(group[0][0].waits_for, [rows for _, rows in group if rows is not None])
                except Exception as error:
                    failed = error
                    break
                for (run, _), output in zip(group, outputs, strict=True):
                    answers[run], run.batch = output, self.counts.batch
        self.counts.seconds = self._clock.seconds
        self.counts.waited = self.engine.mesh.waited - waited
        for run in runs:
            if run in answers:
                run.resume(answers[run])
        if failed is None:
            self._joiner.end_step()
            return None
        return FailedCalls([run for run in runs if run not in answers], failed)

    def steps(self, run: PipelineTask) -> bool:
        """True if a task waits for a transformer."""
        return run.pending is not None and run.pending.name in DENOISERS

    def _joined(self, pending: PendingCall, calls: list[CallRows]) -> list[Any]:
        """The results of calls that are made as one, of which ``pending`` is the first."""
        if len(calls) < 2:
            self._count(pending)
            return [pending.call(*pending.args, **pending.kwargs)]
        args, kwargs = join_calls(calls)
        self._count(pending, sum(call.count for call in calls))
        return split_result(pending.call(*args, **kwargs), [call.count for call in calls], calls[0].listed)

    def _count(self, pending: PendingCall, rows: int | None = None) -> None:
        """Count a call of a transformer with so many rows; None: as many as it has alone."""
        if rows is None:
            names = parameter_names(type(pending.component).forward)
            rows = samples_of(Arguments(names, pending.args, pending.kwargs))
        self.counts.calls += 1
        self.counts.rows += rows
        self.counts.batch = rows


def _why_alone(pipe: Any, engine: Engine) -> str:
    """The reason why a configuration or a pipeline prevents batching of steps, as a sentence."""
    models = [model.model for model in engine.models]
    # The names of states in diffusers' caches are those of branches, the same for every request.
    if kept := keeps_between_steps(tuple(type(one) for one in engine.strategies), engine.config, models):
        return f"{kept}{ONE_BY_ONE}"
    for model in models:
        if any(map(takes_batch_apart, model.modules())):
            return f"{type(model).__name__} has attention that takes the batch apart{ONE_BY_ONE}"
    if not hasattr(getattr(pipe, "scheduler", None), "step"):
        return f"{type(pipe).__name__} has no scheduler that could be copied{ONE_BY_ONE}"
    return ""


def _switch_loras(pipe: Any, on: bool) -> None:
    """Switch all adapters of a pipeline on or off."""
    from diffusers.utils.peft_utils import set_adapter_layers

    if pipeline_has(type(pipe)):
        pipe.enable_lora() if on else pipe.disable_lora()
    else:
        for _, part in adapted(pipe):
            set_adapter_layers(part, enabled=on)

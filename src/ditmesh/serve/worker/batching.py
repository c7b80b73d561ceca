"""Continuous batching: transformer calls of several requests that wait at the same time run as one call.

Requests join and leave a batch at a step, as in Orca (Yu et al. 2022, OSDI) for language models. Each request is a
`PipelineTask`, a coroutine that stops where it calls a component and goes on with the result. Calls of a transformer
that fit together (`Joiner`) run as one, with a row and a timestep for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ...core.arguments import Arguments, parameter_names
from ...engine import DENOISERS, Engine, engine_of
from ...errors import InputError
from ...generate.loras import loras_of, set_loras, switch_loras
from ...layout.forms import samples_of
from ...recipe import keeps_between_steps
from .coroutines import CallInterceptor, PendingCall, PipelineTask, bare
from .device_clock import DeviceClock
from .joining import CallRows, Joiner, join_calls, split_result

# The end of the sentences that say why requests share no calls.
ONE_BY_ONE = "; requests run one after the other"


@dataclass
class FailedCalls:
    """Calls that have failed on this rank, and why.

    Attributes:
        stuck: runs that wait for the result, with those that were not begun because of it.
        error: the reason.
    """

    stuck: list[PipelineTask]
    error: Exception


@dataclass
class CallCounts:
    """Counts of calls so far.

    Attributes:
        calls, rows: of transformers.
        batch: rows of the latest call.
        waited: seconds of the latest step in which the host waited for other ranks.
        seconds: of the latest call of every component that has finished; ``""``: of the latest step.
    """

    calls: int = 0
    rows: int = 0
    batch: int = 0
    waited: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class Batcher:
    """Runs the pending calls of one pipeline's coroutines. Every rank runs the same calls in the same order.

    Args:
        pipe: parallelised, with an engine that knows its layouts.
        template: the same pipeline as it was before; every `PipelineTask` calls a copy of it (`copied`).
        exchange: gives every rank's value, in rank order. A collective call.
        rank: this rank; size: their number.

    Attributes:
        why: why its requests run one after the other, through the parallel pipeline itself, a sentence; empty: their
            steps run together.
        most: rows of how many requests run as one call, at most.
        counts: what has been called.
    """

    def __init__(
        self,
        pipe: Any,
        template: Any,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
        rank: int = 0,
        size: int = 1,
        most: int = 8,
    ) -> None:
        self.engine: Engine = engine_of(pipe)
        self.most = most
        self._clock = DeviceClock(self.engine.mesh.device)
        self.counts = CallCounts(seconds=self._clock.seconds)
        self.why = _why_alone(pipe, self.engine)
        self._template, self._exchange, self._rank, self._size = template, exchange, rank, size
        self._interceptor = CallInterceptor(pipe, self._on_call)
        self._request = ExitStack()
        self._set_pipe: Callable[..., None] | None = None
        self._current_pipe: Any = None
        self._adapters: tuple[tuple[str, float], ...] | None = None
        self._joiner = Joiner(self.engine, exchange, self._begin_trial, self.close_request)
        # The only task of the batch: ranks run its guidance branches ahead.
        self._guided_task: PipelineTask | None = None
        # Seconds of other components' calls since the latest step.
        self._spent = 0.0

    def run_alone(self, why: str) -> None:
        """Run requests one after the other from here on."""
        self.why = f"{why}{ONE_BY_ONE}"

    def check_joining(self, run: PipelineTask) -> None:
        """Test whether calls of the form that a task waits for can be joined, and set `why` if not. Collective."""
        if why := self._joiner.why_not(run):
            self.run_alone(why)

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

    def _begin_trial(self, adapters: tuple[tuple[str, float], ...]) -> None:
        self._switch_to(self._template)
        self.adapt(adapters)

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
            switch_loras(self._template, True)
            set_loras(self._template, dict(adapters))
        elif self._adapters is not None or loras_of(self._template):
            switch_loras(self._template, False)
        self._adapters = adapters

    # --- a round -----------------------------------------------------------------------------------------------

    def round(self, runs: Sequence[PipelineTask], seconds: Mapping[str, float]) -> FailedCalls | None:
        """Run pending calls and resume their tasks: the calls of a step, or a few shorter calls.

        Text encoders and autoencoders do not hold up the steps of others: between two steps their calls take as long as
        a step at most, or are one.

        Args:
            runs: in order; the same on every rank, as are their states.
            seconds: what a call of every component takes, ``""``: a step; the same on every rank.

        Returns:
            What has failed here. Runs that are stuck were not resumed.
        """
        for run in runs:
            if not run.begun:
                run.resume()
        waiting = [run for run in runs if run.pending is not None]
        steps = [run for run in waiting if self.steps(run)]
        encoder_calls = [run for run in waiting if not self.steps(run)]
        failed = None
        if chosen := self._choose_encoder_calls(encoder_calls, seconds, bool(steps)):
            self._run_encoder_calls(chosen)
        else:
            self._spent = 0.0
            failed = self._run_steps(steps) if steps else None
        if self._guided_task is not None and self._guided_task.ended:
            self._end_guided_task()
        return failed

    def _component_answer(
        self, run: PipelineTask, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Exception | None]:
        """The result of a task's pending call of a component, or its error."""
        pending = run.waits_for
        self.adapt(run.adapters)
        with self._clock.span(pending.name), run.generators.active():
            try:
                return pending.call(*args, **kwargs), None
            except Exception as error:
                return None, bare(error)

    def _choose_encoder_calls(
        self, encoder_calls: list[PipelineTask], seconds: Mapping[str, float], others: bool
    ) -> list[PipelineTask]:
        """The calls of text encoders and autoencoders that run before the next step."""
        chosen: list[PipelineTask] = []
        limit = seconds.get("", 0.0)
        for run in encoder_calls:
            cost = seconds.get(run.waits_for.name, limit)
            if others and self._spent and self._spent + cost > limit:
                break
            if chosen and not others and len(chosen) >= self._size:
                break
            self._spent += max(cost, 1e-9)
            chosen.append(run)
        return chosen

    def _run_encoder_calls(self, runs: list[PipelineTask]) -> None:
        """Run calls of text encoders, VAEs and other components. Several calls are distributed over CPU ranks."""
        self._switch_to(self._current_pipe or self._template)
        shared = self._size > 1 and len(runs) > 1 and self.engine.mesh.device.type == "cpu"
        answers: dict[int, tuple[Any, Exception | None, Any]] = {}
        for place, run in enumerate(runs):
            if shared and place % self._size != self._rank:
                continue
            answer, error = self._component_answer(run, run.waits_for.args, run.waits_for.kwargs)
            answers[place] = (answer, error, run.generators.states)
        if shared:
            for others in self._exchange(answers):
                answers.update(others)
        for place, run in enumerate(runs):
            answer, error, states = answers[place]
            run.generators.states = states
            run.resume(answer, error)

    def _run_steps(self, runs: list[PipelineTask]) -> FailedCalls | None:
        """Run calls of transformers; compatible calls run as one."""
        waited = self.engine.mesh.waited
        alone = len(runs) == 1 and self.engine.config.cfg > 1
        answers: dict[PipelineTask, Any] = {}
        failed: Exception | None = None
        with self._clock.span(""):
            for group in self._joiner.groups(runs, self.most):
                try:
                    # With cfg ranks, the branches of a pipeline are identified by its scheduler.
                    self._switch_to(runs[0].pipe if alone else self._template)
                    self._guided_task = runs[0] if alone else None
                    outputs = self._call([rows for _, rows in group], group[0][0], alone)
                except Exception as error:
                    failed = error
                    break
                for (run, _), output in zip(group, outputs, strict=True):
                    answers[run], run.batch = output, self.counts.batch
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

    # --- one call ----------------------------------------------------------------------------------------------

    def _call(self, calls: list[CallRows | None], run: PipelineTask, alone: bool) -> list[Any]:
        """The results of joined calls; the first is that of ``run``."""
        pending = run.waits_for
        self.adapt(run.adapters)
        if not alone:
            self.engine.clock.advance()
        if len(calls) == 1:
            self._count(_samples(pending))
            return [pending.call(*pending.args, **pending.kwargs)]
        rows = [call for call in calls if call is not None]
        args, kwargs = join_calls(rows)
        self._count(sum(call.count for call in rows))
        return split_result(pending.call(*args, **kwargs), [call.count for call in rows], rows[0].listed)

    def _on_call(self, pending: PendingCall) -> None:
        self._count(_samples(pending))

    def _count(self, rows: int) -> None:
        self.counts.calls += 1
        self.counts.rows += rows
        self.counts.batch = rows


def _samples(pending: PendingCall) -> int:
    return samples_of(Arguments(parameter_names(type(pending.component).forward), pending.args, pending.kwargs))


def _why_alone(pipe: Any, engine: Engine) -> str:
    """The reason why a configuration or a pipeline prevents batching of steps, as a sentence."""
    models = [model.model for model in engine.models]
    # The names of states in diffusers' caches are those of branches, the same for every request.
    if kept := keeps_between_steps(tuple(type(one) for one in engine.strategies), engine.config, models):
        return f"{kept}{ONE_BY_ONE}"
    for model in models:
        if any(type(getattr(module, "processor", None)).__name__.startswith("PAG") for module in model.modules()):
            return f"{type(model).__name__} has attention that takes the batch apart{ONE_BY_ONE}"
    if not hasattr(getattr(pipe, "scheduler", None), "step"):
        return f"{type(pipe).__name__} has no scheduler that could be copied{ONE_BY_ONE}"
    return ""

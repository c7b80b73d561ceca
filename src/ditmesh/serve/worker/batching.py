"""Continuous batching: pipelines run as coroutines, and transformer calls that wait at the same time run as one call.

Requests join and leave a batch at a step, as in Orca (Yu et al. 2022, OSDI) for language models. No pipeline is
rewritten: each request's own ``pipe(...)`` runs as a coroutine (a greenlet) on a shallow copy of the pipeline with a
scheduler of its own. Where it calls a transformer, a text encoder or the autoencoder it stops, and goes on with the
result. Calls of a transformer that fit together run as one, with a row and a timestep for each. What is joined is found
out by looking: before calls of a form are joined for the first time, one such call is compared with its rows alone.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...core.arguments import Arguments, covers, parameter_names
from ...core.clock import timestep_of
from ...core.device_clock import DeviceClock
from ...core.generators import OwnGenerators
from ...core.kept import KeptState
from ...core.patching import Patch
from ...core.request import RequestLeft
from ...core.values import Values, seen
from ...engine import DENOISERS, Engine, engine_of
from ...errors import InputError, LayoutError, shortened
from ...generate.loras import loras_of, set_loras, switch_loras
from ...layout import TokenLayout
from ...layout.forms import form_of, holds_tensors, samples_of
from ...layout.influence import off_by, tolerance
from ...layout.types import CallForm
from ...parts.part import whole_of
from ...recipe import keeps_between_steps
from ...strategies.base import ParallelModel
from ...strategies.hooks import ModelHooks, Piece
from ...strategies.pipefusion.pipeline import whole_result
from ...strategies.rows import batched_in, some_rows

# Largest difference, relative to the largest value, of a row in a batch from the row alone.
SAME = 1e-4
# Plain values of a call, which can be compared by equality.
_PLAIN = (int, float, complex, str, bytes, torch.Size, type(None), torch.dtype, torch.device)


@dataclass
class PendingCall:
    """A component's call that a coroutine waits for.

    Attributes:
        name: of the component and, but for its forward, the method: ``"transformer"``, ``"vae.decode"``.
        component: the module.
        call: what is to be called.
        args, kwargs: its arguments.
        alone: it is not to be joined with others.
    """

    name: str
    component: nn.Module
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    alone: bool = False


class PipelineTask(greenlet):
    """A pipeline's call as a coroutine; it runs until it waits for a component's call, or ends.

    torch's default generators are its own: seeded with its seed, and put aside while others run.

    Args:
        pipe: the pipeline, a copy of its own (`copied`) if it delegates.
        arguments: of its call.
        seed: of torch's default generators.
        device: of the pipeline.
        adapters: LoRA adapters that are on in its calls, with their scales.
        delegates: it hands over its components' calls; else it is left at the end of a step only.

    Attributes:
        pending: what it waits for; None before it begins, at the end of a step, and when it has ended.
        begun, ended: whether it was resumed at all, and whether there is nothing left of it.
        output, failure: what the pipeline returned, or raised.
        batch: rows of the latest call of a transformer that it took part in.
        kept: what strategies keep of it from step to step, if they do.
    """

    def __init__(
        self,
        pipe: Any,
        arguments: Mapping[str, Any],
        seed: int,
        device: torch.device,
        adapters: tuple[tuple[str, float], ...] = (),
        delegates: bool = True,
    ) -> None:
        super().__init__(self._body)
        # Without this, a coroutine starts with an empty context.
        self.gr_context = contextvars.copy_context()
        self.pending: PendingCall | None = None
        self.pipe, self.adapters, self.delegates = pipe, adapters, delegates
        self.begun = self.ended = False
        self.output: Any = None
        self.failure: Exception | None = None
        self.batch = 0
        self.kept: KeptState | None = None
        self._arguments: Mapping[str, Any] = arguments
        # Stored while other coroutines run.
        self.generators = OwnGenerators(seed, device)

    @property
    def waits_for(self) -> PendingCall:
        """The pending call of a task that has one."""
        assert self.pending is not None
        return self.pending

    def _body(self) -> None:
        try:
            self.output = self.pipe(**self._arguments)
        except RequestLeft:
            pass
        except Exception as error:
            self.failure = bare(error)
        finally:
            self._arguments = {}

    def resume(self, answer: Any = None, error: BaseException | None = None) -> None:
        """Resume with the result of the pending call, or with an error."""
        with self.generators.active():
            if error is not None:
                self.pending = self.throw(error)
            elif self.begun:
                self.pending = self.switch(answer)
            else:
                self.begun = True
                self.pending = self.switch()
        self.ended = self.dead

    def leave(self) -> None:
        """End the coroutine at its current point."""
        if self.begun and not self.ended:
            self.resume(error=RequestLeft())
        self.ended = True

    def ask(self, pending: PendingCall | None) -> Any:
        """Called inside the coroutine: pause until `resume`, and return the result."""
        assert self.parent is not None
        return self.parent.switch(pending)


def bare(error: Exception) -> Exception:
    """An error without the frames it came from, which hold every tensor there."""
    error.__traceback__ = error.__context__ = None
    return error


def copied(pipe: Any) -> Any:
    """A copy of a pipeline with the same weights, and its own scheduler and other objects that change during a call.

    Args:
        pipe: not parallelised itself; its transformers may be.
    """
    own = copy.copy(pipe)
    for name, component in pipe.components.items():
        # Tokenizers and processors keep nothing between two calls.
        if hasattr(component, "set_timesteps") or type(component).__name__.endswith("Guidance"):
            vars(own)[name] = copy.deepcopy(component)
    return own


class CallInterceptor:
    """Routes component calls of every `PipelineTask` to the batcher; calls from other code are unchanged.

    A ControlNet's call is part of a step, and stays where it is.

    Args:
        pipe: the pipeline, parallelised.
        on_call: is told of every call of a transformer that a `PipelineTask` makes itself.
    """

    def __init__(self, pipe: Any, on_call: Callable[[PendingCall], None]) -> None:
        self._undo, self._on_call = ExitStack(), on_call
        known: set[int] = set()
        for name, component in pipe.components.items():
            if not isinstance(component, nn.Module) or id(component) in known or "controlnet" in name:
                continue
            known.add(id(component))
            if hasattr(component, "decode") and name not in DENOISERS:
                for method in ("encode", "decode"):
                    if hasattr(component, method):
                        self._add(f"{name}.{method}", component, method)
            else:
                # Around torch's hooks: they belong to the call that runs.
                self._add(name, component, "_call_impl")

    def _add(self, name: str, component: nn.Module, method: str) -> None:
        dtype = _dtype_of(component)

        def around(*args: Any, **kwargs: Any) -> Any:
            run = getcurrent()
            # A pipeline that changes a component for a call (to float32) changes it back afterwards.
            if not isinstance(run, PipelineTask) or (run.delegates and _dtype_of(component) != dtype):
                return patch.original(*args, **kwargs)
            pending = PendingCall(name, component, patch.original, args, kwargs)
            if run.delegates:
                return run.ask(pending)
            if name in DENOISERS:
                self._on_call(pending)
            return patch.original(*args, **kwargs)

        patch = Patch(component, method, around)
        self._undo.callback(patch.undo)

    def close(self) -> None:
        """Restore the components."""
        self._undo.close()


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


# --- joining -----------------------------------------------------------------------------------------------------


@dataclass
class CallRows:
    """The rows of a transformer's call.

    Attributes:
        arguments: of the call.
        count: number of rows.
        batched: arguments with rows, by path with the dimension.
        times: paths of timesteps that are one number for all rows.
        shared: tensors without rows, by path: calls that are joined have equal ones.
        listed: whether lists have an item for each row.
        key: equal in calls that can be joined.
    """

    arguments: Arguments
    count: int
    batched: dict[str, int]
    times: tuple[str, ...]
    shared: dict[str, Tensor]
    listed: bool
    key: Hashable


def rows_of(model: nn.Module, layout: TokenLayout, pending: PendingCall) -> CallRows | str:
    """A call's rows, or a clause that says why they cannot run with those of other calls.

    Args:
        model: the transformer.
        layout: of the call.
        pending: the call.
    """
    names, time_path = parameter_names(type(model).forward), timestep_of(model, layout)
    arguments = Arguments(names, pending.args, pending.kwargs)
    main, name = arguments.get(names[0]), type(model).__name__
    if time_path is None:
        return f"{name} takes no timestep, and requests stand at different ones"
    if not isinstance(main, (Tensor, list)):
        return f"{name} is not called with tensors of latents"
    count = len(main)
    batched = batched_in(arguments, count, layout)
    lists = [path for path in batched if not isinstance(arguments.get(path), Tensor)]
    times: list[str] = []
    shared: dict[str, Tensor] = {}
    key: list[Hashable] = [id(model), len(arguments.args)]
    for path, value in (*arguments.leaves(), *arguments.others()):
        if any(covers(known, path) for known in lists):
            continue
        if covers(time_path, path) and path not in batched and value is not None:
            if isinstance(value, Tensor) and value.numel() != 1:
                return f"{name} takes a timestep for all rows together"
            times.append(path)
            key.append((path, getattr(value, "dtype", type(value))))
        elif isinstance(value, Tensor):
            if path not in batched:
                shared[path] = value
            key.append((path, _rows_form(value, batched.get(path), count)))
        elif not isinstance(value, _PLAIN) and (callable(value) or holds_tensors(value)):
            return f"{name} is given a {type(value).__name__} ({path!r}), which may remember other calls"
        else:
            key.append((path, _plain_form(value)))
    # Lists of samples of one shape only.
    key += [(path, _forms(arguments.get(path))) for path in lists]
    return CallRows(arguments, count, batched, tuple(times), shared, isinstance(main, list), tuple(key))


def _rows_form(value: Tensor, dim: int | None, count: int) -> Hashable:
    """The form of a tensor with ``count`` rows along a dimension, the same for any number of them."""
    shape = list(value.shape)
    if dim is not None:
        shape[dim] = -(shape[dim] // count)
    return tuple(shape), value.dtype, value.device


def _forms(values: Sequence[Any]) -> Hashable:
    return frozenset(_form(item) for item in values)


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(_form(item) for item in value)
    return _plain_form(value)


def _plain_form(value: Any) -> Hashable:
    return (type(value), value if isinstance(value, _PLAIN) else id(value))


def join_calls(calls: Sequence[CallRows]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call with the rows of several calls, in order."""
    first = calls[0].arguments
    together = Arguments(first.names, tuple(first.args), first.kwargs)
    for path, dim in calls[0].batched.items():
        values = [call.arguments.get(path) for call in calls]
        if isinstance(values[0], Tensor):
            together.set(path, torch.cat(values, dim))
        else:
            together.set(path, [item for value in values for item in value])
    device = next((value.device for _, value in first.leaves() if isinstance(value, Tensor)), None)
    for path in calls[0].times:
        times = [torch.as_tensor(call.arguments.get(path), device=device).reshape(1) for call in calls]
        together.set(path, torch.cat([one.expand(call.count) for one, call in zip(times, calls, strict=True)]))
    return tuple(together.args), together.kwargs


def split_result(output: Any, counts: Sequence[int], listed: bool) -> list[Any]:
    """The result of a joined call, split into one result for each call.

    Raises:
        LayoutError: it has no row for each.
    """
    leaves, form = tree_flatten(output, is_leaf=(lambda value: isinstance(value, list)) if listed else None)
    stops = [sum(counts[: place + 1]) for place in range(len(counts))]
    parts: list[list[Any]] = [[] for _ in counts]
    for leaf in leaves:
        rows = leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None
        rows = len(leaf) if isinstance(leaf, list) else rows
        if rows not in (None, stops[-1]) or (rows is None and isinstance(leaf, Tensor)):
            raise LayoutError(f"the result has {rows} rows for {stops[-1]} samples")
        for part, stop, count in zip(parts, stops, counts, strict=True):
            part.append(leaf if rows is None else some_rows(leaf, slice(stop - count, stop)))
    return [tree_unflatten(part, form) for part in parts]


def _varied(rows: CallRows, model: nn.Module, layout: TokenLayout) -> CallRows:
    """A call of the same form with different latents, embeddings and timestep."""
    time_path = timestep_of(model, layout) or ""
    other = Arguments(rows.arguments.names, tuple(rows.arguments.args), rows.arguments.kwargs)

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            # A mask of numbers stays one of rows that are as long.
            return value.flip(-1) if value.dim() > 2 else value * 0.5
        return [changed(item) for item in value] if isinstance(value, list) else value

    for path in (*rows.batched, *rows.times):
        value = other.get(path)
        if covers(time_path, path):
            floating = value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
            value = value * 0.5 if floating else value // 2
        else:
            value = changed(value)
        other.set(path, value)
    return CallRows(other, rows.count, rows.batched, rows.times, rows.shared, rows.listed, rows.key)


# --- the hub -----------------------------------------------------------------------------------------------------


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
        tiles: first of the image's tokens that this rank has had, and the one after its last; None: not looked at.
    """

    calls: int = 0
    rows: int = 0
    batch: int = 0
    waited: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    tiles: tuple[int, int] | None = None


class Batcher:
    """Runs the pending calls of one pipeline's coroutines. Every rank runs the same calls in the same order.

    Args:
        pipe: parallelised, with an engine that knows its layouts.
        template: the same pipeline as it was before; every `PipelineTask` calls a copy of it (`copied`).
        exchange: gives every rank's value, in rank order. A collective call.
        rank: this rank; size: their number.

    Attributes:
        why: why its requests do not share calls, a sentence; empty: their steps run together.
        turns: whether strategies keep something of every request from step to step, so that requests take turns by
            the step (`turn`), each with its own.
        in_hand: the task that took the latest turn, until another one is to take the next.
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
        kept = keeps_between_steps(tuple(type(one) for one in self.engine.strategies), self.engine.config)
        self.why = _why_alone(pipe, self.engine)
        self.turns = bool(kept) and not self.why
        if self.turns:
            self.why = f"{kept}; requests take turns by the step, each with what is kept of it, and share no call"
        self._template, self._exchange, self._rank, self._size = template, exchange, rank, size
        self._interceptor = CallInterceptor(pipe, self._on_call)
        self._models = {id(model.model): model for model in self.engine.models}
        self._request = ExitStack()
        self._set_pipe: Callable[..., None] | None = None
        self._current_pipe: Any = None
        self._adapters: tuple[tuple[str, float], ...] | None = None
        self._values = Values()
        # By form of call that was tested: why rows cannot run together; empty: they can.
        self._forms: dict[tuple[int, CallForm], str] = {}
        # The only task of the batch: ranks run its guidance branches ahead.
        self._guided_task: PipelineTask | None = None
        # Seconds of other components' calls since the latest step.
        self._spent = 0.0
        self.in_hand: PipelineTask | None = None

    @property
    def alone(self) -> bool:
        """True if requests run one after the other, through the parallel pipeline itself."""
        return bool(self.why) and not self.turns

    def run_alone(self, why: str) -> None:
        """Run requests one after the other from here on."""
        self.why, self.turns = f"{why}; requests run one after the other", False

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
        self.in_hand = None
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
        self._values.forget()

    def _switch_to(self, pipe: Any, kept: KeptState | None = None) -> None:
        """Tell the engine which pipeline makes the transformer calls that follow; the template: many tasks together.

        Args:
            pipe: the pipeline.
            kept: what is kept of its request.
        """
        if self._set_pipe is None:
            name = type(self._template).__name__
            self._set_pipe = self._request.enter_context(self.engine.request(f"calls of {name} of many requests"))
        if self._current_pipe is not pipe:
            self._end_guided_task()
            self._set_pipe(pipe, kept)
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

    # --- turns -------------------------------------------------------------------------------------------------

    def turn(self, run: PipelineTask) -> FailedCalls | None:
        """Go on with a request, with what is kept of it: a step, or a call of another component.

        If another request's state is in hand, this turn is that one's: its messages are waited for, and it is put
        aside. All ranks must then have agreed that this went well before anything else uses the links. So at most one
        request is lost when a call fails, and all others keep what they have.

        Args:
            run: the same on every rank.

        Returns:
            What has failed here.
        """
        acting = run if self.in_hand is None else self.in_hand
        try:
            if acting is not run:
                self.in_hand = self._current_pipe = None
                self.engine.put_aside()
                return None
            if run.kept is None:
                run.kept = self.engine.kept.new()
            self._switch_to(run.pipe, run.kept)
            self.in_hand = run
            self._step_on(run)
            if run.ended and run.failure is None:
                # Patches that have still to come: all ranks ask for them.
                run.output = whole_result(run.output)
        except Exception as error:
            if acting.pending is not None:
                # What is kept of it may have changed.
                acting.pending.alone = True
            return FailedCalls([acting], error)
        return None

    def _step_on(self, run: PipelineTask) -> None:
        if not run.begun:
            run.resume()
            return
        if not self.steps(run):
            self._run_component(run)
            return
        waited, at = self.engine.mesh.waited, _step_index(run)
        with self._clock.span(""):
            while True:
                (answer,) = self._call([None], run, True)
                run.batch = self.counts.batch
                run.resume(answer)
                # The other branches of guidance; a scheduler that does not count gets a turn for each.
                if at is None or not self.steps(run) or _step_index(run) != at:
                    break
        self.counts.waited = self.engine.mesh.waited - waited

    def _run_component(self, run: PipelineTask) -> None:
        """Run the pending call of a text encoder, a VAE or another component, on every rank."""
        # Patches that have still to come: all ranks ask for them.
        args, kwargs = whole_of((run.waits_for.args, run.waits_for.kwargs))
        run.resume(*self._component_answer(run, args, kwargs))

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

    def end_turns(self, run: PipelineTask) -> Exception | None:
        """End the request of a task that has ended well on all ranks: why its result is wrong, if it is.

        Collective.
        """
        if run.kept is None or self._set_pipe is None:
            return None
        try:
            self._switch_to(run.pipe, run.kept)
            self.engine.end_kept()
        except InputError as error:
            return bare(error)
        finally:
            run.kept = self.in_hand = self._current_pipe = None
        return None

    def release(self, run: PipelineTask) -> None:
        """Free what is kept of a task, wherever it stands. Every rank does: its messages are taken first."""
        if self.in_hand is run:
            self.in_hand = self._current_pipe = None
            self.engine.put_aside()
        run.kept = None

    def kept_bytes(self) -> int:
        """Bytes that are kept of all open requests on this rank."""
        kept = self.engine.kept
        return sum(kept.nbytes(state) for state in [*kept.open])

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
            for group in self._groups(runs):
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
            self._values.turn()
            return None
        return FailedCalls([run for run in runs if run not in answers], failed)

    def _groups(self, runs: list[PipelineTask]) -> list[list[tuple[PipelineTask, CallRows | None]]]:
        """Groups of compatible calls, in the order of their first call."""
        if len(runs) == 1:
            # Nothing to join: its arguments are not looked at.
            return [[(runs[0], None)]]
        groups: list[list[tuple[PipelineTask, CallRows | None]]] = []
        places: dict[Hashable, list[int]] = {}
        for run in runs:
            found = "" if run.waits_for.alone else self._rows(run.waits_for)
            rows = None if isinstance(found, str) else found
            known = places.setdefault((rows.key, run.adapters), []) if rows is not None else []
            for place in known:
                first = groups[place][0][1]
                room = len(groups[place]) < self.most
                if room and first and rows and self._same(first, rows) and not self._why(run, rows):
                    groups[place].append((run, rows))
                    break
            else:
                known.append(len(groups))
                groups.append([(run, rows)])
        return groups

    def _layout(self, model: ParallelModel) -> TokenLayout:
        hooks = model.find(ModelHooks)
        return model.layout if hooks is None else hooks.layout

    def _rows(self, pending: PendingCall) -> CallRows | str:
        model = self._models[id(pending.component)]
        return rows_of(model.model, self._layout(model), pending)

    def _same(self, one: CallRows, other: CallRows) -> bool:
        """True if two calls have equal tensors apart from their rows."""
        return all(self._values.same(seen(value), seen(other.shared[path])) for path, value in one.shared.items())

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
        with self._seeing_tiles(pending.component):
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

    @contextmanager
    def _seeing_tiles(self, component: nn.Module) -> Iterator[None]:
        """Record which of the image's tokens this rank has, once."""
        hooks = self._models[id(component)].find(ModelHooks)
        if hooks is None or self.counts.tiles is not None or self.engine.config.sequence == 1:
            yield
            return
        main = hooks.layout.regions[0].main.name

        def tap(_: str, piece: Piece) -> None:
            if piece.stream == main:
                self.counts.tiles = piece.start, piece.start + piece.tensor.shape[piece.dim]

        hooks.tap = tap
        try:
            yield
        finally:
            hooks.tap = None

    # --- looking -----------------------------------------------------------------------------------------------

    def _why(self, run: PipelineTask, rows: CallRows) -> str:
        form = id(run.waits_for.component), form_of(rows.arguments)
        if form not in self._forms:
            self._forms[form] = self._compare_joined(run, rows)
        return self._forms[form]

    def check_joining(self, run: PipelineTask) -> None:
        """Test whether calls of this form can be joined, and set `why` if not. Collective."""
        rows = self._rows(run.waits_for)
        if why := rows if isinstance(rows, str) else self._why(run, rows):
            self.run_alone(why)

    def _compare_joined(self, run: PipelineTask, rows: CallRows) -> str:
        """The reason why a call's rows change when other rows are added, as a clause; empty: they do not change.

        The call runs alone, another one with other latents, embeddings and timestep runs alone, then both as one.
        """
        pending = run.waits_for
        model = self._models[id(pending.component)]
        name = type(model.model).__name__
        other = _varied(rows, model.model, self._layout(model))
        failed: Exception | None = None
        try:
            self._switch_to(self._template)
            self.adapt(run.adapters)
            alone: list[Any] = []
            for one in (rows, other):
                self.engine.clock.advance()
                alone.append(pending.call(*one.arguments.args, **one.arguments.kwargs))
            self.engine.clock.advance()
            args, kwargs = join_calls([rows, other])
            together = split_result(pending.call(*args, **kwargs), [rows.count, other.count], rows.listed)
            answer = self._compared(name, alone, together)
        except Exception as error:
            failed, answer = (
                error,
                f"{name} cannot take rows of two requests at a time ({shortened(error, with_kind=True)})",
            )
        every = self._exchange(answer)
        if failed is not None or any(every):
            self.close_request(failed)
        return next(filter(None, every), "")

    def _compared(self, name: str, alone: Sequence[Any], together: Sequence[Any]) -> str:
        allowed = 0.0 if self.engine.config.reproducible else None
        one, two = (tensors_of(value) for value in alone)
        for expected, found in zip(alone, together, strict=True):
            for value, part in zip(tensors_of(expected), tensors_of(found), strict=True):
                error = off_by(part, value)
                most = (SAME if value.dtype.itemsize >= 4 else tolerance(value)) if allowed is None else allowed
                if not error <= most:
                    return f"a row of {name} beside another request's is off by {error:.2g} of the largest value"
        if all(a.shape == b.shape and off_by(a, b) < 100 * SAME for a, b in zip(one, two, strict=True)):
            return f"two calls of {name} with other latents and timesteps give the same, so that nothing was learned"
        return ""


def _samples(pending: PendingCall) -> int:
    return samples_of(Arguments(parameter_names(type(pending.component).forward), pending.args, pending.kwargs))


def _step_index(run: PipelineTask) -> int | None:
    index = getattr(getattr(run.pipe, "scheduler", None), "step_index", None)
    return index if isinstance(index, int) else None


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a transformer's result, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _why_alone(pipe: Any, engine: Engine) -> str:
    """The reason why a configuration or a pipeline prevents batching of steps, as a sentence."""
    end = "; requests run one after the other"
    models = [model.model for model in engine.models]
    if kept := keeps_between_steps((), engine.config, models):
        # The names of states in diffusers' caches are those of branches, the same for every request.
        return f"{kept}{end}"
    for model in models:
        if any(type(getattr(module, "processor", None)).__name__.startswith("PAG") for module in model.modules()):
            return f"{type(model).__name__} has attention that takes the batch apart{end}"
    if not hasattr(getattr(pipe, "scheduler", None), "step"):
        return f"{type(pipe).__name__} has no scheduler that could be copied{end}"
    return ""

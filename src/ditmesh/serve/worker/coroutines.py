"""Pipelines as coroutines: a request's own call pauses where it calls a transformer, an encoder or the autoencoder.

No pipeline is rewritten: ``pipe(...)`` runs in a greenlet, on a shallow copy of the pipeline with its own scheduler.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from ...core.generators import OwnGenerators
from ...core.patching import Patch
from ...core.request import RequestLeft
from ...engine import DENOISERS
from ...generate.modular import guided_by
from ...generate.runner import Prepared


@dataclass
class PendingCall:
    """A component's call that a coroutine waits for: of ``"transformer"``, or of a method, ``"vae.decode"``.

    Attributes:
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
        prepared: the call; its pipeline is a copy of its own (`copied`) if it delegates.
        delegates: it hands over its components' calls; else it is left at the end of a step only.

    Attributes:
        adapters: LoRA adapters that are on in its calls, with their scales.
        during: a context in which it and its components' calls run.
        pending: what it waits for; None before it begins, at the end of a step, and when it has ended.
        begun, ended: whether it was resumed at all, and whether there is nothing left of it.
        output, failure: what the pipeline returned, or raised.
        batch: rows of the latest call of a transformer that it took part in.
    """

    def __init__(self, prepared: Prepared, device: torch.device, delegates: bool = True) -> None:
        super().__init__(self._body)
        # Without this, a coroutine starts with an empty context.
        self.gr_context = contextvars.copy_context()
        self.pending: PendingCall | None = None
        self.pipe, self.adapters, self.delegates = prepared.pipe, prepared.adapters, delegates
        self.during: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.begun = self.ended = False
        self.output: Any = None
        self.failure: Exception | None = None
        self.batch = 0
        self._arguments: Mapping[str, Any] = prepared.arguments
        # Stored while other coroutines run.
        self.generators = OwnGenerators(prepared.seed, device)

    @property
    def waits_for(self) -> PendingCall:
        """The pending call of a task that has one."""
        assert self.pending is not None
        return self.pending

    def _body(self) -> None:
        given = dict(self._arguments)
        try:
            with guided_by(self.pipe, given):
                self.output = self.pipe(**given)
        except RequestLeft:
            pass
        except Exception as error:
            self.failure = bare(error)
        finally:
            self._arguments = {}

    def resume(self, answer: Any = None, error: BaseException | None = None) -> None:
        """Resume with the result of the pending call, or with an error."""
        with self.generators.active(), self.during():
            if error is not None:
                self.pending = self.throw(error)
            elif self.begun:
                self.pending = self.switch(answer)
            else:
                self.begun = True
                self.pending = self.switch()
        self.ended = self.dead

    def leave(self, error: BaseException | None = None) -> None:
        """End the coroutine at its current point; ``error``: what its pipeline is told, that its ranks cannot go on."""
        if self.begun and not self.ended:
            self.resume(error=RequestLeft() if error is None else error)
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
    clone = copy.copy(pipe)
    for name, component in pipe.components.items():
        # Tokenizers and processors keep nothing between two calls.
        if hasattr(component, "set_timesteps") or type(component).__name__.endswith("Guidance"):
            vars(clone)[name] = copy.deepcopy(component)
    return clone


class CallInterceptor:
    """Routes component calls of every `PipelineTask` to the batcher; calls from other code are unchanged.

    A ControlNet's call is part of a step, and stays where it is. ``on_call`` is told of every call of a transformer
    that a `PipelineTask` makes itself.
    """

    def __init__(self, pipe: Any, on_call: Callable[[PendingCall], None]) -> None:
        self._undo, self._on_call = ExitStack(), on_call
        ids: set[int] = set()
        for name, component in pipe.components.items():
            if not isinstance(component, nn.Module) or id(component) in ids or "controlnet" in name:
                continue
            ids.add(id(component))
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

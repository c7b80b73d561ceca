"""The steps of a pipeline's scheduler: listeners are told of each after it was taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.patching import Patch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SchedulerStep:
    """A step that a scheduler has taken: the number of its timestep (None: this scheduler does not count), what the
    model returned (guided), the arguments of the call, and what the scheduler returned.
    """

    scheduler: Any
    index: int | None
    prediction: Any
    timestep: Any
    sample: Any
    result: Any

    def latents(self) -> Tensor | None:
        """The latents after the step; None: there are none."""
        from torch import Tensor

        found = self.result[0] if isinstance(self.result, tuple) else self.result.prev_sample
        return found if isinstance(found, Tensor) else None


class StepEvents:
    """Tells a listener, ``seen``, of every step of a scheduler, until `undo`; its exceptions leave the call."""

    def __init__(self, scheduler: Any, seen: Callable[[SchedulerStep], None]) -> None:
        signature = inspect.signature(scheduler.step)

        def step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            index = getattr(scheduler, "step_index", None)
            result = patch.original(*args, **kwargs)
            if index is None and (after := getattr(scheduler, "step_index", None)) is not None:
                index = after - 1
            prediction, timestep, sample = map(given.get, ("model_output", "timestep", "sample"))
            seen(SchedulerStep(scheduler, index, prediction, timestep, sample, result))
            return result

        patch = self._patch = Patch(scheduler, "step", step)

    def undo(self) -> None:
        """Stop telling. Harmless twice."""
        self._patch.undo()


def in_chunks(pipe: Any) -> bool:
    """True if a pipeline draws a video chunk by chunk, each with all its steps."""
    return callable(pipe) and "chunk_partition" in inspect.signature(type(pipe).__call__).parameters


def loop_steps(pipe: Any, planned: int) -> int:
    """Steps of a pipeline's denoising loops, once their timesteps are set; ``planned`` if its scheduler does not tell.

    Schedulers of second order (Heun) have nearly twice as many timesteps, and with an input image the loop begins
    later.
    """
    if in_chunks(pipe):
        return pipe.num_timesteps
    scheduler: Any = getattr(pipe, "scheduler", None)
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or not hasattr(scheduler, "begin_index"):
        return planned
    return max(1, len(timesteps) - (scheduler.begin_index or 0))

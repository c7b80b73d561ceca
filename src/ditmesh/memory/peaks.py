"""The measured peaks of a request's memory, phase by phase."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.objects import gather_objects
from ..core.arguments import Arguments
from ..core.patching import Patch, Proceed
from ..engine import Engine, engine_of


class Peaks:
    """This rank's peak memory by phase: tensors on a GPU, resident memory of the process on a CPU.

    Args:
        device: where the rank computes. Where the most cannot be read (a CPU without Linux) there are no phases.

    Attributes:
        found: bytes by phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.found: dict[str, int] = {}
        self._device, self._phase = device, "load"
        self._reset()

    def over(self, following: str) -> None:
        """A phase is over, another one begins."""
        most = self._most()
        if most is not None:
            self.found[self._phase] = max(most, self.found.get(self._phase, 0))
        self._phase = following
        self._reset()

    @contextmanager
    def call(self, pipe: Any) -> Iterator[None]:
        """One call of a parallelised pipeline."""
        engine, vae = engine_of(pipe), getattr(pipe, "vae", None)
        seen = isinstance(engine, Engine)
        self.over("encode" if seen else "denoise")

        def step(proceed: Proceed, arguments: Arguments) -> Any:
            if self._phase == "encode":
                self.over("denoise")
            return proceed(arguments)

        with ExitStack() as undo:
            for model in engine.models if seen else ():
                undo.callback(model.chain.add(step))
            if hasattr(vae, "decode"):
                # Previews and inputs of an image are no end of the denoising.
                patch = Patch(vae, "decode", lambda *args, **kwargs: self._decoded(patch, *args, **kwargs))
                undo.callback(patch.undo)
            yield
        self.over("idle")

    def _decoded(self, patch: Patch, *args: Any, **kwargs: Any) -> Any:
        if self._phase == "denoise":
            self.over("decode")
        return patch.original(*args, **kwargs)

    def of_all(self) -> list[dict[str, int]]:
        """The peaks of every rank of the job, in rank order. Collective."""
        mine = {phase: most for phase, most in self.found.items() if phase != "idle"}
        if not (dist.is_available() and dist.is_initialized()):
            return [mine]
        return gather_objects(mine)

    def _most(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        return None

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif sys.platform == "linux":
            # Without permission to reset it, a phase has the most so far.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

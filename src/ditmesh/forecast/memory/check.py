"""The memory check before any weights are read, and the measured peaks of a request, phase by phase."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...comm.objects import broadcast_object, gather_objects
from ...config import ParallelConfig
from ...core.arguments import Arguments
from ...core.patching import Patch, Proceed
from ...core.unexpected import MISTAKES, unexpected
from ...engine import DENOISERS, Engine, engine_of
from ...errors import DitmeshError, InputError
from ...generate.model_info import ModelInfo
from ...layout import known_models
from ...layout.describe import meta_model
from ..catalogue import Shape
from ..costs.hardware import machine
from ..costs.work import Workload
from ..model_work import work_of
from ..search import Model, SearchLimits, search
from ..workload import workload_of
from .available import free_memory
from .phases import Component, Components, largest_phase, needs

log = logging.getLogger(__name__)

# More than an image's activations take, in bytes a pixel and sample: sizes far from the limit are not predicted.
MAX_PIXEL_BYTES = 16e3
# Numbers of devices that are tried for a configuration that would fit, and how many of their configurations.
_DEVICES, _TRIED = (1, 2, 4, 8, 16), 2


def components_of(info: ModelInfo, without: Collection[str] = ()) -> Components:
    """The components of a pipeline's folder, from its JSON files; for other components the file sizes.

    Args:
        without: names of components that are left out.
    """
    parts: dict[str, Component] = {}
    encoders: dict[str, Component] = {}
    other = 0.0
    for name, value in info.index.items():
        if name.startswith("_") or name in without or not (isinstance(value, list) and len(value) == 2 and all(value)):
            continue
        library, kind = value
        settings = info.files / name / "config.json"
        if name in DENOISERS or name == "vae":
            if settings.is_file():
                parts[name] = Component(kind, json.loads(settings.read_text(encoding="utf-8")))
        elif name.startswith("text_encoder") and library == "transformers" and settings.is_file():
            encoders[name] = Component(kind, json.loads(settings.read_text(encoding="utf-8")))
        else:
            other += sum(path.stat().st_size for path in (info.files / name).glob("*.safetensors"))
    denoisers = tuple(part for name, part in parts.items() if name != "vae")
    return Components(info.name, denoisers, info.pipeline_class, encoders, parts.get("vae"), info.vae_scale, other)


def components_of_shape(shape: Shape) -> Components:
    """The components of a model in the catalogue."""
    encoders = {name: Component(*encoder) for name, encoder in shape.encoders.items()}
    vae = None if shape.vae is None else Component(*shape.vae)
    return Components(
        shape.name, (Component(shape.transformer, shape.config),), shape.pipeline, encoders, vae, shape.scale
    )


def check_memory(
    info: ModelInfo,
    config: ParallelConfig | Callable[[], ParallelConfig],
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload | None = None,
    limit: float | None = None,
    without: Collection[str] = (),
    offloaded: bool = False,
) -> None:
    """Raise an error if the request does not fit, before anything is read. Every rank calls this alike.

    A configuration that cannot be predicted is not refused.

    Args:
        info: the model; its files are here.
        config: of the ranks; or what says it, if it has to be known.
        workload: what will be asked for; None: not known, so only the weights count.
        limit: bytes that a rank may take; default: the device's free memory (on a CPU the host's, in equal parts).
        without: components that are not loaded.
        offloaded: text encoders and autoencoder are elsewhere while they do not work.

    Raises:
        InputError: on all ranks alike; names the smallest configuration that would fit, if one does.
    """
    grouped = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if grouped else 1
    room = free_memory(device, ranks) if limit is None else limit
    pixels = 0.0 if workload is None else workload.width * workload.height * workload.frames * workload.pictures
    stored = sum(path.stat().st_size for path in info.files.glob("*/*.safetensors"))
    if grouped and ranks > 1:
        # Of files as well: hosts may have other ones, and all ranks go on alike.
        rooms, sizes = zip(*gather_objects((room, stored)), strict=True)
        room, stored = min(rooms), max(sizes)
    # Files may hold half of what float32 takes.
    if stored * (2 if dtype == torch.float32 else 1) + 2 * MAX_PIXEL_BYTES * pixels < room:
        return
    sentence = None
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    try:
        known = config if isinstance(config, ParallelConfig) else config()
    except (DitmeshError, OSError) as error:
        log.debug("%s: what it needs is not known: %s", info.name, error)
        return
    # The answer is the same on all ranks, and a host with fewer cores than ranks would find it out for each in turn.
    if not grouped or dist.get_rank() == 0:
        sentence = _sentence(info, known, room, workload, dtype, kind, without, offloaded)
    if grouped and ranks > 1:
        sentence = broadcast_object(sentence)
    if sentence is not None:
        raise InputError(sentence)


def _sentence(
    info: ModelInfo,
    config: ParallelConfig,
    room: float,
    workload: Workload | None,
    dtype: torch.dtype,
    kind: Literal["cpu", "cuda"],
    without: Collection[str],
    offloaded: bool,
) -> str | None:
    """The reason why a request does not fit; None: it does, or that is not known. Arguments: see `check_memory`."""
    try:
        fit = _MemoryFit(components_of(info, without), workload, workload_of(info), dtype, offloaded, kind)
        return fit.refusal(config, room)
    except (DitmeshError, OSError) as error:
        log.debug("%s: what it needs is not known: %s", info.name, error)
    except MISTAKES as error:
        unexpected(log, error, f"{info.name} is loaded without a check of its memory")
    return None


class _MemoryFit:
    """The test of configurations against the memory of a model's ranks.

    Args:
        workload: the request; None: not known.
        usual: the model's usual request.
        dtype, offloaded: as of `check_memory`.
        device: of the ranks.
    """

    def __init__(
        self,
        components: Components,
        workload: Workload | None,
        usual: Workload,
        dtype: torch.dtype,
        offloaded: bool,
        device: Literal["cpu", "cuda"],
    ) -> None:
        self.components, self.workload, self.usual = components, workload, usual
        self.dtype, self.offloaded = dtype, offloaded
        self.device: Literal["cpu", "cuda"] = device

    def most(self, config: ParallelConfig) -> tuple[float, str]:
        """Bytes of the rank that needs most, and the phase."""
        asked, options = self.workload or self.usual, {"device": self.device, "offloaded": self.offloaded}
        if self.workload is None:
            every = needs(self.components, config, asked, self.dtype, **options)
            worst = max((one.phases[0] for one in every), key=lambda phase: phase.total)
        else:
            worst = largest_phase(self.components, config, asked, self.dtype, **options)
        return worst.total, worst.name

    def refusal(self, config: ParallelConfig, room: float) -> str | None:
        """The reason why a configuration does not fit, and one that does; None: it fits.

        Args:
            room: bytes of a rank; on a CPU a part of the host's, which all ranks share.
        """
        needed, phase = self.most(config)
        if needed <= room:
            return None
        whole = room * config.world_size if self.device == "cpu" else None
        found = self._smallest(room, whole)
        other = f"nothing on {_DEVICES[-1]} devices or fewer would fit" if found is None else found
        return (
            f"{self.components.name} with {config.describe()} needs {needed / 1e9:.3g} GB on a rank ({phase}), and "
            f"{room / 1e9:.3g} GB are free; {other}. Use that, a smaller size or dtype, or switch the check off "
            "(--no-memory-check, check_memory=False)"
        )

    def _smallest(self, room: float, whole: float | None) -> str | None:
        """The smallest configuration that fits: devices first, then seconds; ``whole``: what all ranks share."""
        part, asked = self.components.denoisers[0], self.workload or self.usual
        layout = known_models()[part.kind]
        module = meta_model(part.kind, dict(part.settings))
        model = Model(module, layout, work_of(module, layout))
        sized = replace(asked, element=self.dtype.itemsize)
        for devices in _DEVICES:
            try:
                found = search(model, sized, machine("cpu", devices), SearchLimits(memory=float("inf")))
            except InputError:
                continue
            here = room if whole is None else whole / devices
            full = [one for one in found.best if one.config.world_size == devices]
            # Weights that are too large by themselves need no closer look.
            full = [one for one in full if one.weights <= here]
            for one in sorted(full, key=lambda one: one.weights)[:_TRIED]:
                needed, _ = self.most(one.config)
                if needed <= here:
                    return (
                        f"the smallest configuration that would fit is {one.config.describe()}, "
                        f"{needed / 1e9:.3g} GB on a rank"
                    )
        return None


# --- measured peaks --------------------------------------------------------------------------------------------


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

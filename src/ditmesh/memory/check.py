"""The memory check before any weights are read, and the configuration of ``"auto"``, which has to fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from ..comm.objects import gather_objects
from ..config import ParallelConfig
from ..engine import DENOISERS, agreed, guided, refusal
from ..errors import ConfigError, DitmeshError, InputError, LayoutError, first_line
from ..generate.model_info import ModelInfo
from ..layout import TokenLayout, known_models
from ..layout.without_values import FAILURES, model_on_meta
from ..request import Offload
from ..strategies.heads import heads_of
from .available import free_memory
from .catalogue import Shape
from .phases import Component, Components, needs
from .sizes import Workload, workload_of

log = logging.getLogger(__name__)

# By the degrees of tensor and shard a configuration, and the bytes of its rank that needs most.
TooLarge = dict[tuple[int, int, bool], tuple[ParallelConfig, float]]

# More than an image's activations take, in bytes a pixel and sample: sizes far from the limit are not predicted.
MAX_PIXEL_BYTES = 16e3
# Numbers of devices for which a configuration that fits is looked for, behind the user's own.
MORE_DEVICES = (2, 4, 8, 16)


def components_of(info: ModelInfo, without: Collection[str] = ()) -> Components:
    """The components of a pipeline's folder, but those ``without``, from its JSON files; for others the file sizes."""
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
    return Components(info.name, denoisers, encoders, parts.get("vae"), info.vae_scale, other)


def components_of_shape(shape: Shape) -> Components:
    """The components of a model in the catalogue."""
    encoders = {name: Component(*encoder) for name, encoder in shape.encoders.items()}
    vae = None if shape.vae is None else Component(*shape.vae)
    return Components(
        shape.name, (Component(shape.transformer, shape.config),), encoders, vae, shape.scale, shape.other
    )


@dataclass(frozen=True)
class Demand:
    """What is asked of a model's ranks.

    Attributes:
        usual: the model's usual request; workload: the one that is asked for; None: not known, so only the weights
            count.
        offload: as of `needs`.
        images: of one call; calls: of the pipeline, which groups of ranks may make side by side.
        branches: of guidance.
        runtime: bytes that a process takes before it holds a model.
    """

    components: Components
    usual: Workload
    workload: Workload | None
    dtype: torch.dtype
    kind: str
    offload: Offload = "none"
    images: int = 1
    calls: int = 1
    branches: int = 1
    runtime: float = 0.0

    @classmethod
    def of(
        cls,
        info: ModelInfo,
        dtype: torch.dtype,
        device: torch.device,
        workload: Workload | None,
        without: Collection[str],
        offload: Offload,
        guidance: bool | None = None,
        calls: int = 1,
    ) -> Demand:
        """The demand of a pipeline's folder; arguments as for `choose_for_ranks`."""
        import diffusers

        if guidance is None:
            guidance = guided(getattr(diffusers, info.pipeline_class, None), info.transformer)
        kind, images = device.type, 1 if workload is None else workload.pictures
        parts, usual = components_of(info, without), workload_of(info)
        return cls(parts, usual, workload, dtype, kind, offload, images, calls, 1 + guidance)

    def largest(self, config: ParallelConfig, usual: bool = False) -> tuple[float, str]:
        """Bytes of the rank that needs most, and in which phase; ``usual``: where no request is known, of the model's
        usual one instead of loading alone.

        `LayoutError`: the model cannot run without values, so that is not known.
        """
        request = self.workload or self.usual
        if config.inputs == "per-data-rank":
            # Every group has a call of its own.
            config = config.model_copy(update={"data": 1, "inputs": "broadcast"})
        every = needs(self.components, config, request, self.dtype, self.runtime, self.offload, self.kind != "cpu")
        loading = self.workload is None and not usual
        phase = max((rank.phases[0] if loading else rank.peak for rank in every), key=lambda phase: phase.total)
        return phase.total, phase.name

    def choose(self, world_size: int, room: float, usual: bool = True, passed: TooLarge | None = None) -> Choice:
        """The configuration of so many devices that the rule names, with ``room`` bytes on each.

        Args:
            usual: as of `largest`.
            passed: ways to cut weights that are known not to fit into ``room``, to which others are added.
        """
        models, heads = self._models(), self.heads()
        passed = {} if passed is None else passed
        needed: dict[ParallelConfig, float] = {}

        def fits(config: ParallelConfig) -> bool:
            weights = config.tensor, config.shard, config.precompute
            # Other axes change little of what weights that are cut alike need.
            config = config.for_calls(self.images, self.calls)
            idle = config.data > self.images and config.inputs == "broadcast"
            # Nothing leaves host memory.
            vain = config.precompute and self.kind == "cpu"
            if weights in passed or idle or vain or refusal(config, models) is not None:
                return False
            if room == float("inf"):
                return True
            # What the first one needs is told; of others it is enough to know that weights alone are too many.
            if passed and not config.precompute and self._least(config) > room:
                passed[weights] = config, self._least(config)
                return False
            try:
                needed[config] = self.largest(config, usual)[0]
            except (ConfigError, LayoutError):
                # Where it is not known, whole weights are taken to fit, as for the check.
                return not config.cuts_weights
            if needed[config] > room:
                passed[weights] = config, needed[config]
            return needed[config] <= room

        images = max(self.images, self.calls)
        config = ParallelConfig.auto(world_size, heads, images=images, branches=self.branches, fits=fits)
        config = config.for_calls(self.images, self.calls)
        larger = next(iter(passed.values()), None)
        fitting = (config.tensor, config.shard, config.precompute) not in passed
        return Choice(config, self.images * self.calls, room, needed.get(config), larger if fitting else None, fitting)

    def heads(self) -> int:
        """The smallest number of attention heads of the transformers; 1 where it is not known."""
        return min((heads_of(model, layout) or 1 for model, layout in self._models()), default=1)

    def refusal(self, config: ParallelConfig, room: float, limited: bool) -> str | None:
        """The reason why a configuration does not fit into ``room`` bytes of a rank, with one that does; None: it fits.

        ``limited``: that is a limit of each rank; else what is free, which on a CPU all ranks share.
        """
        needed, phase = self.largest(config)
        if needed <= room:
            return None
        free = f"the limit is {gigabytes(room)} GB" if limited else f"{gigabytes(room)} GB are free"
        return (
            f"{self.components.name} with {config.describe()} needs {gigabytes(needed)} GB on a rank ({phase}), and "
            f"{free}; {self.fitting(config.world_size, room, limited).sentence}. To try it anyway: "
            "--memory-limit none, check_memory=False"
        )

    def fitting(self, world_size: int, room: float, limited: bool) -> WayOut:
        """A configuration that fits, with the options to type: on as many devices first, then on more."""
        # More ranks of a CPU have less memory each.
        more = self.kind != "cpu" or limited
        kinds: tuple[Offload, ...] = ("none", "model", "group")
        if self.kind == "cpu" or self.offload != "none":
            kinds = (self.offload,)
        demands = {kind: replace(self, offload=kind) for kind in kinds}
        passed: dict[str, TooLarge] = {kind: {} for kind in demands}
        counts = [world_size, *(devices for devices in MORE_DEVICES if more and devices > world_size)]
        for devices, (kind, demand) in product(counts, demands.items()):
            option = "" if kind == self.offload else f" --offload {kind}"
            with suppress(DitmeshError):
                choice = demand.choose(devices, room, False, passed[kind])
                if choice.fits and choice.needed is not None:
                    options = choice.config.options() + option
                    return WayOut(f"{options} fits, with {gigabytes(choice.needed)} GB on a rank", options)
        return WayOut(f"no exact configuration of up to {MORE_DEVICES[-1]} devices fits; use a smaller size or dtype")

    def _least(self, config: ParallelConfig) -> float:
        """Bytes that the transformers' weights take on a rank at least: where all of them are cut evenly."""
        elements = sum(each.numel() for model, _ in self._models() for each in model.parameters())
        return elements * self.dtype.itemsize / config.tensor / config.shard

    def _models(self) -> list[tuple[Any, TokenLayout]]:
        layouts = known_models()
        return [
            (model_on_meta(part.kind, json.dumps(part.settings, default=str)), layouts[part.kind])
            for part in self.components.denoisers
            if part.kind in layouts
        ]


@dataclass(frozen=True)
class WayOut:
    """What fits, in words, and the options to type for it; empty: nothing does."""

    sentence: str
    options: str = ""


@dataclass(frozen=True)
class Choice:
    """The configuration that the rule of ``"auto"`` names.

    Attributes:
        images: of all calls; room: bytes of a rank.
        needed: bytes of the rank that needs most; None: not known, or far from the limit.
        larger: the first one of the rule, which would be faster, and what it needs; None: it is this one.
        fits: whether it fits, as far as that is known; else none does.
    """

    config: ParallelConfig
    images: int = 1
    room: float = float("inf")
    needed: float | None = None
    larger: tuple[ParallelConfig, float] | None = None
    fits: bool = True

    def describe(self) -> str:
        """What was chosen, why, and what would be faster if it fitted, in one line."""
        config = self.config
        reasons = {
            "data": f"{self.images} images are shared out",
            "cfg": "each branch of guidance has its ranks",
            "tensor": "weights are cut so that they fit",
            "shard": "weights are kept in pieces so that they fit",
        }
        why = [reason for name, reason in reasons.items() if getattr(config, name) > 1]
        if config.precompute:
            why.append("weights that never see the image wait in host memory")
        if config.sequence > 1:
            why.append("ranks share an image's tokens")
        sentence = f"chosen: {config.describe()} ({', '.join(why) or 'nothing to share'}"
        if self.larger is not None:
            other, needed = self.larger
            sentence += (
                f"; {other.describe()} would be faster and needs {gigabytes(needed)} GB on a rank of "
                f"{gigabytes(self.room)} GB"
            )
        return f"{sentence})"


def gigabytes(size: float) -> str:
    """Three digits of 10^9 bytes."""
    return f"{size / 1e9:.3g}"


def check_memory(
    info: ModelInfo,
    config: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload | None = None,
    limit: float | None = None,
    without: Collection[str] = (),
    offload: Offload = "none",
) -> None:
    """Raise an error if the request does not fit, before anything is read. Every rank calls this alike.

    A configuration that cannot be predicted is not refused. `InputError`: on all ranks alike; names a configuration
    that fits, if one does.

    Args:
        workload, offload: as for `Demand`; without: components that are not loaded.
        limit: bytes that a rank may take; default: the device's free memory (on a CPU the host's, in equal parts).
    """
    room, near = _room(info, dtype, device, workload, limit)
    if not near:
        return

    def look(_: int) -> str | None:
        try:
            demand = Demand.of(info, dtype, device, workload, without, offload)
            return demand.refusal(config, room, limit is not None)
        except (DitmeshError, OSError) as error:
            log.debug("%s: what it needs is not known: %s", info.name, error)
        except FAILURES as error:
            _warn(error, f"{info.name} is loaded without a check of its memory")
        return None

    sentence = agreed(look)
    if sentence is not None:
        raise InputError(sentence)


def choose_for_ranks(
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload | None = None,
    limit: float | None = None,
    *,
    without: Collection[str] = (),
    offload: Offload = "none",
    guidance: bool | None = None,
    calls: int = 1,
) -> Choice | None:
    """The configuration of ``"auto"`` for the ranks of the default process group, before anything is read. Collective.

    None: the class has no reviewed layout, so its transformer has to be looked at first.

    Args:
        info, dtype, device, workload, limit, without, offload: as for `check_memory`; calls: as for `Demand`.
        guidance: whether it runs two branches; default: whether the pipeline does when it is not told.
    """
    if info.transformer_class not in known_models():
        return None
    room, near = _room(info, dtype, device, workload, limit)

    def look(ranks: int) -> Choice:
        demand = Demand.of(info, dtype, device, workload, without, offload, guidance, calls)
        try:
            return demand.choose(ranks, room if near else float("inf"))
        except FAILURES as error:
            _warn(error, f"The configuration of {info.name} is chosen without a look at its memory")
            return demand.choose(ranks, float("inf"))

    # A host with fewer cores than ranks would find it out for each in turn.
    return agreed(look)


def _room(
    info: ModelInfo, dtype: torch.dtype, device: torch.device, workload: Workload | None, limit: float | None
) -> tuple[float, bool]:
    """Bytes of a rank, and whether a prediction is worth it; on all ranks alike."""
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    room = free_memory(device, dist.get_world_size() if grouped else 1) if limit is None else limit
    stored = float(sum(path.stat().st_size for path in info.files.glob("*/*.safetensors")))
    if grouped:
        # Of files as well: hosts may have other ones, and all ranks go on alike.
        rooms, sizes = zip(*gather_objects((room, stored)), strict=True)
        room, stored = min(rooms), max(sizes)
    pixels = 0.0 if workload is None else workload.width * workload.height * workload.frames * workload.pictures
    # Files may hold half of what float32 computes with.
    return room, stored * (2 if dtype == torch.float32 else 1) + 2 * MAX_PIXEL_BYTES * pixels >= room


def _warn(error: Exception, consequence: str) -> None:
    """Say that a prediction has failed, and what is done without it."""
    log.warning("%s (%s: %s)", consequence, type(error).__name__, first_line(error, "no message"))
    log.debug("the traceback:", exc_info=error)

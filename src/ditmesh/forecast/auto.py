"""The configuration that ``"auto"`` stands for: the exact one that is predicted, or was measured, to be the fastest."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..config import ParallelConfig
from ..core.unexpected import MISTAKES, unexpected
from ..errors import DitmeshError, InputError
from ..layout import TokenLayout
from ..layout.describe import meta_model
from . import measurements as cache
from .costs.hardware import Hardware, known_devices, machine
from .costs.work import Workload
from .model_work import work_of
from .search import Model, SearchLimits, search

log = logging.getLogger(__name__)

# Axes with whole weights on every rank and exact steps.
EXACT_AXES = ("cfg", "ring", "ulysses")
# Default numbers of image and text tokens.
IMAGE, TEXT = 4096, 256
# Argument names for the number of text tokens.
LENGTH = "max_sequence_length"


@dataclass(frozen=True)
class UsualCall:
    """The known properties of a pipeline's calls; None: its defaults.

    Attributes:
        pipeline: the class; None: a bare transformer.
        guidance: whether guidance runs two branches.
        image, text: tokens of a sample.
        element: bytes of an element.
    """

    pipeline: type | None = None
    guidance: bool | None = None
    image: int | None = None
    text: int | None = None
    element: int = 4


def chosen(
    transformer: str,
    config: Mapping[str, Any],
    layout: TokenLayout | None,
    heads: int,
    call: UsualCall,
    world_size: int,
    device: torch.device | None = None,
) -> ParallelConfig:
    """The exact configuration of so many ranks that is predicted, or was measured, to be the fastest.

    Where the model's work cannot be looked at: Ulysses as far as the heads divide, ring for the rest.

    Args:
        transformer, config: class and configuration of the transformer.
        layout: where its tokens are, if that is known.
        heads: the smallest number of heads.
        call: what it will be asked for.
        device: where they compute; default: the CPU.
    """
    simple = ParallelConfig.auto(world_size, heads)
    if world_size == 1 or layout is None or layout.source != "reviewed":
        return simple
    try:
        twin = meta_model(transformer, dict(config))
        work, workload = work_of(twin, layout), usual_workload(config, call)
        hardware = hardware_here(world_size, device)
        measured = cache.entries().get(cache.key_of(work, workload, hardware.device.name, world_size))
        if measured is not None and measured.get("exactness") == "exact":
            return measured["config"]
        found = search(
            Model(twin, layout, work), workload, hardware, SearchLimits(memory=float("inf"), axes=EXACT_AXES)
        )
    except DitmeshError:
        # A model that cannot be analysed is parallelised without a prediction.
        return simple
    except MISTAKES as error:
        unexpected(log, error, f"{transformer} runs with {simple.describe()}, as its configuration cannot be predicted")
        return simple
    # A rank without work would be a waste.
    return next((one.config for one in found.best if one.config.world_size == world_size), simple)


def hardware_here(devices: int, device: torch.device | None = None) -> Hardware:
    """The device of this host's ranks: the table's entry for its GPU, else default CPU figures."""
    if device is None or device.type != "cuda":
        return machine("cpu", devices)
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    # The longest name: an L40S is no L40.
    parts = sorted((part for part in known_devices() if part in name), key=len)
    if not parts:
        raise InputError(f"{name} is not in the table of parts; measure it with ditmesh doctor --save FILE")
    return machine(parts[-1], devices)


def guided(pipeline: type | None, config: Mapping[str, Any]) -> bool:
    """True if a pipeline runs two branches of guidance when it is called without a word of it.

    Args:
        pipeline: its class; None: there is none.
    """
    # Guidance beside a distilled one needs a negative prompt to be given.
    given = {} if pipeline is None else inspect.signature(pipeline.__call__).parameters
    if "true_cfg_scale" in given or "guidance_scale" not in given or config.get("guidance_embeds"):
        return False
    default = given["guidance_scale"].default
    return isinstance(default, (int, float)) and default > 1


def usual_text(pipeline: type | None) -> int:
    """Text tokens that a class of pipelines takes when it is not told; None: there is none."""
    given = {} if pipeline is None else inspect.signature(pipeline.__call__).parameters
    default = given[LENGTH].default if LENGTH in given else None
    return default if isinstance(default, int) else TEXT


def batched(pipeline: str | None) -> bool:
    """True if a pipeline puts both branches of guidance into one call of its transformer, as its code says.

    Of a class that is not known: it does, which needs more.
    """
    import diffusers

    kind = getattr(diffusers, pipeline or "", None)
    if kind is None:
        return True
    code = inspect.getsource(kind.__call__)
    joined = r"cat\(\s*\[\s*(latents|latent_model_input)\s*(\]\s*\*\s*2|,\s*\1\s*\])"
    return re.search(joined + r"|latent_model_input = \w+\.repeat\(2\b", code) is not None


def usual_workload(config: Mapping[str, Any], call: UsualCall) -> Workload:
    """The workload of such calls for a transformer of this configuration."""
    branches = guided(call.pipeline, config) if call.guidance is None else call.guidance
    size, patch = config.get("sample_size"), config.get("patch_size")
    side = size // patch if isinstance(size, int) and isinstance(patch, int) and patch > 0 else None
    usual = side * side if side else IMAGE
    image, text = call.image or usual, usual_text(call.pipeline) if call.text is None else call.text
    together = not branches or batched(call.pipeline and call.pipeline.__name__)
    return Workload.of_tokens(image, text, branches=1 + branches, batched=together, element=call.element)

"""One copy of a pipeline's weights in the memory of a host, loaded once.

The first rank of every host loads the pipeline, and the others take its components over as they are
(`followers.objects`) instead of building and reading each for itself. Weights that are saved in the dtype in use are
the pages of their files, which all ranks map. Weights that are converted (bfloat16 files used in float32) or unpickled
would be memory of a process: they move into memory that all ranks of the host map. What is mapped is private to a
writer: a rank that changes a weight (a LoRA that is fused) gets pages of its own, and the others keep theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.hosts import Hosts, find_hosts
from ..comm.objects import gather_objects
from ..errors import InputError, shortened
from ..followers.objects import Parcel, open_parcel, pack_parcel
from ..launch.heap import return_free_memory
from .model_info import ModelInfo

log = logging.getLogger(__name__)

# Bytes of the largest component's weights, as they are saved, from which on sharing is worth the meeting of all ranks.
MIN_SHARED_BYTES = 16 << 20


def shareable_components(info: ModelInfo, without: Collection[str] = ()) -> list[tuple[str, int]]:
    """Names of the components with weights, and the bytes of their files; none, where sharing is not worth it.

    ``without``: components that are not read whole, or not at all.
    """
    components = []
    for name, entry in info.index.items():
        folder = info.files / name
        if name in without or not isinstance(entry, (list, tuple)) or not folder.is_dir():
            continue
        files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
        if size := sum(path.stat().st_size for path in files):
            components.append((name, size))
    return components if max((size for _, size in components), default=0) >= MIN_SHARED_BYTES else []


def shared_components(
    components: list[tuple[str, int]], load: Callable[[], Any], hosts: Hosts | None = None
) -> tuple[Any, dict[str, Any]]:
    """Components of which all ranks of a host have one copy. Every rank calls this alike.

    Args:
        components: of `shareable_components`; where ranks differ nothing is shared.
        load: loads the pipeline; the first rank of each host calls it.

    Returns the pipeline, where this rank has loaded it, and the components by name, to be loaded with; neither where
    this rank has to load for itself.
    """
    rank = dist.get_rank()
    if any(other != components for other in gather_objects(components)) or not components:
        return None, {}
    near = sorted((hosts or find_hosts(None, True)).near[rank])
    pipe, parcel = None, None
    with ExitStack() as files:
        if rank == near[0] and len(near) > 1:
            pipe, parcel = _loaded([name for name, _ in components], load, files)
        parcels: list[Parcel | None] = gather_objects(parcel)
        theirs = parcels[near[0]]
        shared = {} if theirs is None or rank == near[0] else _opened(theirs)
        # Behind this all ranks have mapped the memory, which lives on without its file.
        gather_objects(None)
    if pipe is not None:
        # Small weights leave holes between live blocks.
        return_free_memory()
    return pipe, shared


def _loaded(names: Collection[str], load: Callable[[], Any], files: ExitStack) -> tuple[Any, Parcel | None]:
    """The pipeline and its components as a parcel; None of each: it cannot be loaded; of the parcel: not sent."""
    try:
        pipe = load()
    except Exception as error:
        # Ranks that load by themselves may not run into it: one process alone is out of memory, or of descriptors.
        log.warning(
            "the first rank of this host could not load for all of its ranks, which load by themselves: %s",
            shortened(error, with_kind=True),
        )
        return None, None
    modules = {name: module for name in names if isinstance(module := getattr(pipe, name, None), nn.Module)}
    gradients = {name: [p.requires_grad for p in module.parameters()] for name, module in modules.items()}
    try:
        return pipe, files.enter_context(pack_parcel((modules, gradients), "meta", moved=True))
    except (InputError, OSError) as error:
        log.info("every rank of this host holds weights of its own: %s", error)
        return pipe, None


def _opened(parcel: Parcel) -> dict[str, nn.Module]:
    try:
        modules, gradients = open_parcel(parcel, torch.device("cpu"))
    except Exception as error:
        log.info("this rank holds weights of its own: %s", error)
        return {}
    for name, module in modules.items():
        for parameter, flag in zip(module.parameters(), gradients[name], strict=True):
            parameter.requires_grad_(flag)
        if hasattr(module, "_can_record_outputs"):
            # transformers notes in __init__, which was not called here, which outputs a class can return: without that
            # a text encoder has no hidden states.
            with torch.device("meta"):
                type(module)(module.config)
    return modules

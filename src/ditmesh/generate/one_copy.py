"""One copy of a pipeline's weights in the memory of a host, where files alone do not bring that about.

Weights that are saved in the dtype in use are the pages of their files: safetensors maps them, and all ranks of a host
have the same pages. Weights that are converted (bfloat16 files used in float32) or unpickled are memory of a process.
Here the first rank of every host loads such components and puts them into memory that all its ranks map
(`engine.parcels`), itself too. What is mapped is private to a writer: a rank that changes a weight (a LoRA that is
fused) gets pages of its own, and the others keep theirs.
"""

from __future__ import annotations

import ctypes
import json
import logging
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.hosts import find_hosts
from ..comm.objects import gather_objects
from ..engine.parcels import Parcel, packed, unpacked
from ..errors import InputError
from .model_info import ModelInfo

log = logging.getLogger(__name__)

# Bytes of a component's weights, as they are saved, from which on sharing them is worth the meeting of all ranks.
LEAST = 16 << 20
# Names of floating-point dtypes in safetensors files.
NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def to_be_shared(
    info: ModelInfo, dtype: Callable[[str], torch.dtype | None], without: Collection[str] = ()
) -> list[str]:
    """Names of the components that would be private memory of every rank.

    Args:
        info: the pipeline's files.
        dtype: of the weights of a component, by its name; None: that of its files.
        without: components that are not read whole, or not at all.
    """
    found = []
    for name, entry in info.index.items():
        folder = info.files / name
        if name in without or not isinstance(entry, (list, tuple)) or not folder.is_dir():
            continue
        private = sum(_private(path, dtype(name)) for path in folder.glob("*.safetensors"))
        if not any(folder.glob("*.safetensors")):
            private = sum(path.stat().st_size for path in folder.glob("*.bin"))
        if private >= LEAST:
            found.append(name)
    return found


def _private(path: Path, dtype: torch.dtype | None) -> int:
    """Bytes of a file's weights that are saved in another floating-point dtype than the one in use."""
    with suppress(OSError, ValueError, KeyError, struct.error), path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: Mapping[str, Any] = json.loads(file.read(size))
        return sum(
            one["data_offsets"][1] - one["data_offsets"][0]
            for name, one in header.items()
            if name != "__metadata__" and one["dtype"] in NAMES and dtype not in (None, NAMES[one["dtype"]])
        )
    return 0


def agreed_names(names: list[str]) -> list[str]:
    """The names if all ranks have found the same, else none: hosts may have other files. Every rank calls this."""
    return names if all(other == names for other in gather_objects(names)) else []


def shared_components(names: Collection[str], load: Callable[[], Any]) -> tuple[Any, dict[str, nn.Module]]:
    """Components of which all ranks of a host have one copy. Every rank calls this alike.

    Args:
        names: of the components.
        load: loads the pipeline as usual; the first rank of each host calls it.

    Returns:
        The pipeline, where this rank has loaded it, with its components in the shared memory; else None, and the
        components by name, to be loaded with. Nothing of both where a host's first rank has failed: every rank of the
        host loads for itself, and fails alike.
    """
    rank = dist.get_rank()
    near = find_hosts(None, True).near
    first = min(near[rank])
    with ExitStack() as files:
        pipe, parcel = None, None
        if rank == first and len(near[rank]) > 1:
            pipe, parcel = _loaded(names, load, files)
        every: list[Parcel | None] = gather_objects(parcel)
        found: dict[str, nn.Module] = {}
        if (theirs := every[first]) is not None:
            found = _opened(theirs)
        # Behind this all ranks have mapped the memory, which lives on without its file.
        gather_objects(None)
    if pipe is not None and found:
        pipe.register_modules(**found)
        _give_back()
    return pipe, found


def _loaded(names: Collection[str], load: Callable[[], Any], files: ExitStack) -> tuple[Any, Parcel | None]:
    """The pipeline and its components as a parcel; None of each: it cannot be loaded; of the parcel: not sent."""
    try:
        pipe = load()
    except Exception as error:
        # Every rank runs into it when it loads by itself, and says it.
        log.debug("the first rank of the host could not load: %s", error)
        return None, None
    own = {name: one for name in names if isinstance(one := getattr(pipe, name, None), nn.Module)}
    gradients = {name: [p.requires_grad for p in one.parameters()] for name, one in own.items()}
    try:
        return pipe, files.enter_context(packed((own, gradients), "meta"))
    except (InputError, OSError) as error:
        log.info("every rank of this host holds weights of its own: %s", error)
        return pipe, None


def _give_back() -> None:
    """Have the C library return memory that is free: small weights leave holes, which it would keep."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _opened(parcel: Parcel) -> dict[str, nn.Module]:
    try:
        found, gradients = unpacked(parcel, torch.device("cpu"))
    except Exception as error:
        log.info("this rank holds weights of its own: %s", error)
        return {}
    for name, module in found.items():
        for parameter, flag in zip(module.parameters(), gradients[name], strict=True):
            parameter.requires_grad_(flag)
    return found

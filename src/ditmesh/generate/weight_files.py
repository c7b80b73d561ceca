"""The files of a saved transformer: an empty model, and its weights read into it, all of them or in part."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.partition import Partition
from ..engine import DENOISERS
from ..errors import InputError
from .components import refuse_missing
from .model_info import ModelInfo

log = logging.getLogger(__name__)

WEIGHTS = "diffusion_pytorch_model"
# The cut of a weight that is read whole.
WHOLE = Partition(())


def saved_denoisers(info: ModelInfo) -> dict[str, type[Any]]:
    """The classes of a saved pipeline's denoisers, by name; an `InputError` if diffusers does not have one."""
    import diffusers

    kinds: dict[str, type[Any]] = {}
    for name in DENOISERS:
        library, kind = (info.index.get(name) or (None, None))[:2]
        if kind is None:
            continue
        if library != "diffusers" or not hasattr(diffusers, kind):
            raise InputError(
                f"the {name} of {info.name!r} is {library}.{kind}, which diffusers {diffusers.__version__} does not "
                "have; load the pipeline yourself and call ditmesh.parallelize(...)"
            )
        kinds[name] = getattr(diffusers, kind)
    return kinds


def build_empty(kind: type[Any], folder: Path, dtype: torch.dtype | None) -> Any:
    """The model without memory for its weights; small tables that are computed, not saved, are there.

    ``dtype``: of weights without one of their own.
    """
    from accelerate import init_empty_weights

    settings = dict(kind.load_config(folder))
    if settings.get("quantization_config") is not None:
        raise InputError(
            f"{str(folder)!r} is quantised; tensor parallelism cuts plain weights. Load it with "
            "DiffusionPipeline.from_pretrained(...) and use ulysses or ring"
        )
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with init_empty_weights():
            return kind.from_config(settings)
    finally:
        torch.set_default_dtype(before)


def fill_weights(
    model: Any,
    folder: Path,
    dtype: torch.dtype | None,
    variant: str | None,
    device: torch.device | str,
    read: Callable[[str, Any, torch.dtype], Tensor],
) -> nn.Module:
    """The model with its weights from the files in ``folder``, each as ``read`` makes it of the stored one."""
    kind, saved = type(model), model.state_dict()
    wanted = dict(model.named_parameters()) | {name: value for name, value in model.named_buffers() if name in saved}
    unexpected, missing = list[str](), set(wanted)
    for file, name, stored in _stored_weights(folder, variant):
        if name not in wanted:
            unexpected.append(name)
            continue
        missing.discard(name)
        before = wanted[name]
        if tuple(stored.get_shape()) != tuple(before.shape):
            raise InputError(
                f"{name} in {str(file)!r} has shape {tuple(stored.get_shape())}, but {kind.__name__} expects "
                f"{tuple(before.shape)}; the configuration beside it is of another model"
            )
        owner, _, leaf = name.rpartition(".")
        module, value = model.get_submodule(owner), read(name, stored, final_dtype(model, name, before.dtype, dtype))
        if isinstance(before, nn.Parameter):
            module._parameters[leaf] = nn.Parameter(value, requires_grad=before.requires_grad)
        else:
            module._buffers[leaf] = value
    refuse_missing(model, missing, folder)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise InputError(
            f"{len(missing)} tables of {kind.__name__} are not in {str(folder)!r} ({some} ...); load the pipeline with "
            "DiffusionPipeline.from_pretrained(...), which computes them, and use ditmesh.parallelize(...)"
        )
    ignored = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if unexpected:
        log.warning("%s has weights that %s does not: %s", folder, kind.__name__, ", ".join(unexpected))
    model.register_to_config(_name_or_path=str(folder))
    # Buffers keep the dtype that `build_empty` made them with, as diffusers' from_pretrained leaves them.
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model.eval()


def _stored_weights(folder: Path, variant: str | None) -> Iterator[tuple[Path, str, Any]]:
    """Every weight in the files of a saved model: its file, its name, and itself, of which nothing is read yet."""
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder, variant):
        try:
            opened = safe_open(file, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {str(file)!r}: {error}; download or save the model again") from None
        with opened as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield file, name, tensors.get_slice(name)


def final_dtype(model: nn.Module, name: str, made: torch.dtype, torch_dtype: torch.dtype | None) -> torch.dtype:
    """The final dtype of a weight that was created with another dtype."""
    if torch_dtype is None or not made.is_floating_point:
        return made
    exact = getattr(type(model), "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(part in name.split(".") for part in exact) else torch_dtype


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of a saved model, one or several; an `InputError` if there are none."""
    middle = f".{variant}" if variant else ""
    for name in (f"{WEIGHTS}.safetensors.index{middle}.json", f"{WEIGHTS}{middle}.safetensors.index.json"):
        if (index := folder / name).is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / file for file in sorted(set(files))]
    single = folder / f"{WEIGHTS}{middle}.safetensors"
    if single.is_file():
        return [single]
    raise InputError(
        f"there is no {single.name} in {str(folder)!r}; slices can be read from safetensors files only. Save the model "
        "with save_pretrained(), or load it with DiffusionPipeline.from_pretrained(...) and ditmesh.parallelize(...)"
    )


def read_slice(
    stored: Any,
    dim: int | None,
    cut: Partition | None,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """This rank's slice of a stored tensor, in memory of its own: the file is mapped, not read.

    ``rows``: only these of the slice, from and to.
    """
    shape = list(stored.get_shape())
    if not shape:
        return stored[...].to(dtype=dtype, device=device, copy=True)
    if dim is None or cut is None or cut is WHOLE:
        along, runs = 0, [(0, shape[0])]
    else:
        along, runs = dim, [*cut.runs(rank)]
    shape[along] = sum(last - first for first, last in runs)
    low, high = rows or (0, shape[0])
    shape[0] = high - low
    value = torch.empty(shape, dtype=dtype, device=device)
    if cut is None and rank > 0:
        return value.zero_()
    start = 0
    for first, last in runs:
        if along == 1:
            value.narrow(1, start, last - first).copy_(stored[low:high, first:last])
        elif (begin := max(low, start)) < (end := min(high, start + last - first)):
            value[begin - low : end - low].copy_(stored[first + begin - start : first + end - start])
        start += last - first
    return value

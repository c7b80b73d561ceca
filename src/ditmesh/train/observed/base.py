"""The pipeline without the task around it: what is trained in place of one that edits, paints over or is steered.

A pipeline for inpainting blends its sample with a given image after every step, one with a ControlNet adds residuals
to the blocks: neither changes what the transformer is. Its weights, and adapters of them, are those of the pipeline
that draws from a prompt alone, and so they are trained there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...errors import ConfigError
from .watch import tensors_in

# Words in the name of a pipeline's class for the task around a transformer that draws from a prompt.
TASKS = ("ControlNet", "Inpainting", "Inpaint", "Img2Img", "PAG", "VideoToVideo", "Transfer")
# Parts that reach into the transformer by arguments of their own.
CONTROL_PARTS = ("controlnet",)


def base_class(kind: type) -> type | None:
    """The pipeline of diffusers that a pipeline is, without its task; None: there is none."""
    import diffusers

    name = kind.__name__
    for task in TASKS:
        name = name.replace(task, "")
    if name == kind.__name__:
        return None
    found = getattr(diffusers, name, None) or getattr(diffusers, re.sub("Pipeline$", "PredictBasePipeline", name), None)
    if not isinstance(found, type) or "transformer" not in inspect.signature(found.__init__).parameters:
        return None
    return found


def base_pipeline(pipe: Any) -> Any | None:
    """The pipeline without its task, of the same parts; None: there is none, or it has parts that this one lacks."""
    kind = base_class(type(pipe))
    if kind is None:
        return None
    parts = dict(pipe.components)
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name in parts:
            given[name] = parts[name]
        elif name in pipe.config:
            given[name] = pipe.config[name]
        elif name != "self" and parameter.default is inspect.Parameter.empty:
            return None
    base = kind(**given)
    for name in ("_progress_bar_config", "default_sample_size", "vae_scale_factor"):
        if name in vars(pipe):
            setattr(base, name, getattr(pipe, name))
    return base


def check_alike(kind: type, own: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Refuse a pipeline that calls the transformer in another form than the one that stands in for it.

    Raises `ConfigError`: names the argument.
    """
    tensors, base_tensors = dict(tensors_in(own)), dict(tensors_in(base))
    for path in base_tensors:
        if path not in tensors or not _alike(tensors[path], base_tensors[path]):
            raise ConfigError(f"{kind.__name__} calls its transformer with another {path}")
    beside = [path for path in tensors if path not in base_tensors]
    steered = [path for path in beside if any(word in path for word in CONTROL_PARTS)]
    if len(steered) != len(beside):
        odd = next(path for path in beside if path not in steered)
        raise ConfigError(f"{kind.__name__} gives its transformer {odd} as well")


def _alike(tensor: Tensor, other: Tensor) -> bool:
    # An image in a task may be of another size, and then there are more tokens: in one dimension, not of channels.
    if tensor.dim() != other.dim():
        return False
    unlike = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != other.shape[dim]]
    return not unlike or (len(unlike) == 1 and 0 < unlike[0] + 1 < tensor.dim())

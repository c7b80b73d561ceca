"""Methods of a pipeline that load adapters or save, where a rank holds only a part of the transformer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import ParallelConfig
from ..core.patching import parts_readable, refuse_saving, wrap_methods
from ..errors import InputError
from .base import ParallelModel, Strategy
from .pipefusion.stages import filled, is_away, shape_of
from .sharded import ShardedWeights
from .tensor.parallel import TensorParallel

# Methods of diffusers' Flux pipelines that compare an adapter with the shapes of the weights it is for, and make layers
# larger where the adapter is larger (Control LoRA).
SHAPE_CHECKS = ("_maybe_expand_transformer_param_shape_or_error_", "_maybe_expand_lora_state_dict")
# The method that looks for the names of norms, and loads those of an adapter.
NORMS = "_load_norm_into_transformer"


class LoadedAdapters(Strategy):
    """The methods of a pipeline that look at weights, change or save them, past the methods of the transformer.

    Those that fit an adapter to weights see whole shapes: they would take a layer of which this rank has a slice, or
    nothing, for one that the adapter is to enlarge.
    """

    name = "adapters"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.cuts_weights

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        held = " and ".join(dict.fromkeys(type(model.model).__name__ for model in self.context.models))
        # At once: the transformer itself would refuse only when other components have been written.
        error = InputError(
            f"save_pretrained() of {type(pipe).__name__} would write this rank's part of the {held} "
            f"({self.context.config.describe()}); call ditmesh.restore(...) on every rank first"
        )
        undo.callback(refuse_saving(pipe, error))
        checks = dict.fromkeys(SHAPE_CHECKS, shapes_shown)
        for name, inside in {**checks, NORMS: lambda _: nullcontext(), "unfuse_lora": weights_there}.items():
            undo.callback(wrap_methods(pipe, (name,), partial(self._call, inside)))

    def _call(
        self,
        inside: Callable[[ParallelModel], AbstractContextManager[None]],
        _: str,
        method: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with ExitStack() as contexts:
            contexts.enter_context(parts_readable())
            for model in self.context.models:
                contexts.enter_context(inside(model))
            return method(*args, **kwargs)


@contextmanager
def weights_there(model: ParallelModel) -> Iterator[None]:
    """Weights may be changed in place inside, alike on all ranks: pieces are gathered, a collective call.

    Those of other stages are zeros; what is written to them is written on their stage as well.
    """
    sharded = model.find(ShardedWeights)
    with nullcontext() if sharded is None else sharded.whole(), filled(model.model):
        yield


@contextmanager
def shapes_shown(model: ParallelModel) -> Iterator[None]:
    """Every weight of which this rank holds a part has its whole shape inside, and no values.

    `InputError`: a layer with such a weight was replaced inside. The layers that were there are put back.
    """
    shapes = whole_shapes(model)
    parts = {parameter: parameter.data for parameter in shapes}
    layers = {
        path: layer
        for path, layer in model.model.named_modules()
        if any(parameter in parts for parameter in layer.parameters(recurse=False))
    }
    for parameter, shape in shapes.items():
        # One number that stands for all, which takes no memory.
        parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(shape)
    try:
        yield
    finally:
        for parameter, data in parts.items():
            parameter.data = data
        replaced = [path for path, layer in layers.items() if model.model.get_submodule(path) is not layer]
        for path in replaced:
            parent, _, name = path.rpartition(".")
            setattr(model.model.get_submodule(parent), name, layers[path])
    if replaced:
        raise InputError(
            f"the adapter is larger than the layer {replaced[0]!r}, of which this rank holds a part; call "
            "ditmesh.restore(...) first, load the adapter, and parallelize again"
        )


def whole_shapes(model: ParallelModel) -> dict[Tensor, torch.Size]:
    """The whole shapes of the parameters of which this rank holds a part or nothing."""
    shapes: dict[Tensor, torch.Size] = {one: shape_of(one) for one in model.model.parameters() if is_away(one)}
    tensor = model.find(TensorParallel)
    return shapes if tensor is None else {**shapes, **tensor.whole_shapes()}

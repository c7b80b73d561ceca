"""Models on tensors without values: their weights, and the form of call in which they run. Nothing is computed."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from ..errors import DitmeshError, LayoutError, first_line
from .conventions import CallVariant, Conventions, call_variants
from .probe import meta_model

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
# Exceptions of models that read values, or that are called with unexpected arguments.
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
Result = TypeVar("Result")
# The form of call with which the walk of a model has succeeded; every other form fails again.
VARIANTS: WeakKeyDictionary[nn.Module, CallVariant] = WeakKeyDictionary()


class WithoutValues(TorchFunctionMode):
    """Answers what only values could, for tensors that have none.

    ``attended`` is told of the keys and the values of every attention call.
    """

    def __init__(self, attended: Callable[[Tensor, Tensor], None] | None = None) -> None:
        super().__init__()
        self._attended = attended

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nonzero and isinstance(args[0], Tensor):
            # Of a mask, which hides nothing here.
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is torch.equal:
            # Comparisons are of tensors for all tiles, such as a timestep's modulation, or of two forms of a mask.
            one, other = args
            return one.shape == other.shape and one.dtype == other.dtype
        if func is F.scaled_dot_product_attention and self._attended is not None:
            arguments = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            self._attended(arguments["key"], arguments["value"])
        return func(*args, **(kwargs or {}))


def by_any_call(model: nn.Module, dtype: torch.dtype, run: Callable[[Conventions], Result]) -> Result:
    """A walk's result in the first form of call that runs without values; `LayoutError`: the likeliest reason."""
    reasons: list[str] = []
    for way in sorted(call_variants(model), key=lambda way: (way != VARIANTS.get(model), way.optional)):
        with fake_weights(model, dtype):
            make = Conventions(model, way)
            # The first parameter may be one that stays in float32.
            make.dtype = dtype
            try:
                result = run(make)
            except (DitmeshError, *FAILURES) as error:
                reasons.append(f"{first_line(error)} ({way})")
                continue
        VARIANTS[model] = way
        return result
    raise LayoutError(
        f"{type(model).__name__} cannot run without values, so what it needs is not known: "
        f"{reasons[0] if reasons else 'no way to call it was found'}"
    )


@lru_cache(maxsize=2)
def model_on_meta(kind: str, settings: str) -> nn.Module:
    """A transformer for walks, which leave its blocks as they were; ``settings`` is its configuration as JSON."""
    return meta_model(kind, json.loads(settings)).eval()


@contextmanager
def fake_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give a model on the meta device weights without values, which say that they are on the CPU."""
    exact = tuple(getattr(type(model), "_keep_in_fp32_modules", None) or ())
    if not hasattr(model, "register_to_config"):
        # transformers does that for float16 alone.
        exact = exact if dtype == torch.float16 else ()
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    # Weights that several modules share stay one.
    fakes: dict[int, Tensor] = {}
    with ExitStack() as undo, warnings.catch_warnings(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")
        # A way of calling the model that is not the right one is no news.
        undo.callback(_LOG.setLevel, _LOG.level)
        _LOG.setLevel(logging.CRITICAL)
        for path, module in model.named_modules():
            held: dict[str, Any]
            for held in (module._parameters, module._buffers):  # type: ignore[assignment]
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    before.append((held, name, tensor))
                    keeps = any(part in (*path.split("."), name) for part in exact)
                    kind = (torch.float32 if keeps else dtype) if tensor.is_floating_point() else tensor.dtype
                    made = torch.empty(tensor.shape, dtype=kind, device="cpu")
                    weight = isinstance(tensor, nn.Parameter)
                    fakes.setdefault(id(tensor), nn.Parameter(made, requires_grad=False) if weight else made)
                    held[name] = fakes[id(tensor)]
        try:
            yield
        finally:
            for held, name, tensor in before:
                held[name] = tensor

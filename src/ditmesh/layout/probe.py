"""The layout of a transformer without a real call: `derive_layout` on small generated inputs; models by class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import InputError, LayoutError
from .conventions import Conventions, call_variants
from .derive import block_lists, derive_layout, without_hooks
from .forms import underivable
from .models import known_models
from .record import error_line
from .types import TokenLayout

# Config entries that say how many blocks a list has; a probe needs two.
DEPTHS = ("num_layers", "num_single_layers", "num_refiner_layers", "num_attention_blocks", "depth", "n_layers")
# A model's errors for inputs that do not fit. Lost ranks and full memory are RuntimeErrors, too: see `error_line`.
_MISFITS = (
    *(RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, NameError, AssertionError, ArithmeticError),
)


def probe(model: nn.Module) -> TokenLayout:
    """The token layout of a transformer in memory, derived by running it on small inputs; it is not changed.

    `LayoutError`: the model cannot be called by diffusers' conventions, or its tensors cannot be explained as image and
    text tokens; says which.
    """
    name = type(model).__name__
    if not block_lists(model):
        raise LayoutError(f"{name} has no ModuleList of blocks, so there is nothing to parallelise")
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), without_hooks(model):
            conventions = _first_way(model, name)
            return replace(derive_layout(model, conventions.inputs(conventions.small))[1], source="probed")
    except LayoutError:
        raise
    except _MISFITS as error:
        raise underivable(f"the probe of {name} cannot follow its blocks ({error_line(error)})") from error
    finally:
        model.train(training)


def _first_way(model: nn.Module, name: str) -> Conventions:
    """The most informative way to call the model that works."""
    # What cannot be made says more than what the model makes of other inputs.
    missing = wrong = ""
    for way in call_variants(model):
        conventions = Conventions(model, way)
        try:
            model(**conventions.inputs(conventions.small))
            return conventions
        except LayoutError as error:
            missing = missing or str(error)
        except _MISFITS as error:
            wrong = wrong or error_line(error)
    raise underivable(f"{name} has no reviewed token layout, and the probe could not run it: {missing or wrong}")


def model_class(name: str) -> type[Any]:
    """The diffusers class of that name; `InputError`: the installed diffusers has no such transformer."""
    import diffusers

    cls = getattr(diffusers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InputError(f"diffusers {diffusers.__version__} has no model class {name!r}; upgrade diffusers")
    return cls


def meta_model(name: str, config: dict[str, Any]) -> nn.Module:
    """The model without storage for its weights: parameters can be counted, nothing can run."""
    with torch.device("meta"):
        return model_class(name).from_config(config)


def layout_of_class(name: str, config: dict[str, Any]) -> TokenLayout:
    """The reviewed layout of a class, or one that a probe derives of two blocks per list with random weights."""
    if (reviewed := known_models().get(name)) is not None:
        return reviewed
    short = {key: min(value, 2) if key in DEPTHS and isinstance(value, int) else value for key, value in config.items()}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return probe(model_class(name).from_config(short))

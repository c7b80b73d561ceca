"""The components of a saved pipeline: parts taken out, weights that are missing.

Libraries leave missing weights at random values, with a warning at most.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from ..errors import InputError, shortened
from .model_info import ModelInfo
from .modular import read_modular

if TYPE_CHECKING:
    from torch import nn

# Held while the two classes are patched: loads of two threads take turns.
_PATCHING = threading.RLock()

# Names of buffers with learned values. Other buffers are tables that a class computes.
STATISTICS = ("running_mean", "running_var")

# By the beginning of a pipeline's class: parts that diffusers lists as needed and its call does without, if the first
# of them is not there.
LEFT_OUT = {"StableDiffusion3": ("text_encoder_3", "tokenizer_3")}


def read_saved(info: ModelInfo, kind: type[Any] | None = None, **options: Any) -> Any:
    """A saved pipeline as diffusers' ``from_pretrained`` reads it, with values for all of its weights.

    `InputError`: it cannot be loaded, has code of its own, or lacks weights of a component.

    Args:
        kind: class of the pipeline; default: the saved one.
        options: of ``from_pretrained``; components in the place of saved ones.
    """
    import diffusers
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    if isinstance(info.index.get("_class_name"), list) and not options.get("trust_remote_code"):
        raise InputError(
            f"model {info.name!r} has code of its own (class {info.pipeline_class}), which is not run unasked; read "
            "it, and load the pipeline in a program with ditmesh.load(..., trust_remote_code=True)"
        )
    name = info.pipeline_class if kind is None else kind.__name__
    for start, parts in LEFT_OUT.items():
        if name.startswith(start) and info.index.get(parts[0]) == [None, None]:
            options = {**{part: None for part in parts if info.index.get(part) == [None, None]}, **options}
    try:
        with missing_weights_refused():
            if info.modular:
                return read_modular(info, **options)
            return (kind or DiffusionPipeline).from_pretrained(info.files if info.local else info.name, **options)
    except (MemoryError, InputError):
        raise
    except Exception as error:
        # Untrusted files can raise any exception.
        reason = shortened(error, 400, with_kind=not isinstance(error, (OSError, ValueError, ImportError)))
        if isinstance(error, UnpicklingError):
            reason = "a file of weights is a pickled program and not only tensors, and is not run"
        saved = info.index.get("_diffusers_version")
        raise InputError(
            f"model {info.name!r}{f', saved by diffusers {saved},' if saved else ''} cannot be loaded by diffusers "
            f"{diffusers.__version__} ({reason}); check its files, upgrade diffusers, or save the pipeline again"
        ) from error


@contextmanager
def missing_weights_refused() -> Iterator[None]:
    """Let ``from_pretrained`` of diffusers' and transformers' models refuse files that lack weights, in this thread,
    with an `InputError` that names the component, its class and some of the weights.
    """
    from diffusers.models.modeling_utils import ModelMixin
    from transformers.modeling_utils import PreTrainedModel

    with _PATCHING, ExitStack() as undo:
        for base in (ModelMixin, PreTrainedModel):
            before = vars(base)["from_pretrained"]
            base.from_pretrained = _checked(before, threading.get_ident())
            undo.callback(setattr, base, "from_pretrained", before)
        yield


def _checked(before: Any, thread: int) -> Any:
    """The classmethod ``from_pretrained`` with a look at its report of missing weights."""

    @functools.wraps(before.__func__)
    def from_pretrained(cls: type[Any], source: Any, *args: Any, **options: Any) -> Any:
        load = before.__get__(None, cls)
        if threading.get_ident() != thread or options.get("output_loading_info"):
            return load(source, *args, **options)
        loaded = load(source, *args, output_loading_info=True, **options)
        # Some formats of weights have no report.
        if not isinstance(loaded, tuple):
            return loaded
        model, report = loaded
        refuse_missing(model, report["missing_keys"], Path(str(source)) / (options.get("subfolder") or ""))
        return model

    return classmethod(from_pretrained)


def refuse_missing(model: nn.Module, missing: Collection[str], folder: Path) -> None:
    """Refuse a loaded model of which a parameter, or learned statistics, are in no file and would be left at random.

    ``missing``: names of weights without a value in the files; tied weights and computed tables may be among them.
    """
    names = left_random(model, missing)
    if names:
        library = type(model).__module__.partition(".")[0]
        some = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        raise InputError(
            f"the component {folder.name} ({type(model).__name__}) would be left at random in {len(names)} of its "
            f"weights, which are not in {str(folder)!r}: {some}; if a newer release of {library} has saved it, upgrade "
            f"the one of this environment (pip install -U {library}); else download or save the pipeline again"
        )


def left_random(model: nn.Module, missing: Collection[str]) -> list[str]:
    """The names among ``missing`` of weights that nothing else gives a value, sorted."""
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    absent = {name for name in missing if not any(re.search(pattern, name) for pattern in ignored)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight is there under another name.
    ids = {id(parameter) for name, parameter in parameters.items() if name not in absent}
    return sorted(
        name
        for name in absent
        if (name in parameters and id(parameters[name]) not in ids) or name.rpartition(".")[2] in STATISTICS
    )

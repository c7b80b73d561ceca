"""The components of a saved pipeline: classes that are not installed, parts taken out, weights that are missing.

Libraries leave missing weights at random values, with a warning at most.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import InputError
from .model_info import ModelInfo

if TYPE_CHECKING:
    from torch import nn

# Held while the two classes are patched: loads of two threads take turns.
_PATCHING = threading.RLock()

# Names of buffers with learned values. Other buffers are tables that a class computes.
STATISTICS = ("running_mean", "running_var")

SHOWN_NAMES = 3

# By the beginning of a pipeline's class: parts that diffusers lists as needed and its call does without, if the first
# of them is not there.
LEFT_OUT = {"StableDiffusion3": ("text_encoder_3", "tokenizer_3")}


def read_saved(info: ModelInfo, kind: type[Any] | None = None, **options: Any) -> Any:
    """A saved pipeline as diffusers' ``from_pretrained`` reads it, with values for all of its weights.

    Args:
        kind: class of the pipeline; default: the saved one.
        options: of ``from_pretrained``; components in the place of saved ones.

    Raises:
        InputError: it needs a class that is not installed, code of its own, or a part that was taken out; or weights
            of a component are missing.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    if "custom_pipeline" not in options:
        options = {**absent_components(info, kind, options), **options}
    with missing_weights_refused():
        return (kind or DiffusionPipeline).from_pretrained(info.files if info.local else info.name, **options)


def absent_components(info: ModelInfo, kind: type[Any] | None, options: Mapping[str, Any]) -> dict[str, None]:
    """The components that were taken out of a pipeline which does without them, as ``from_pretrained`` is to be told.

    Raises:
        InputError: as `read_saved`, before a weight is read.
    """
    name = info.index.get("_class_name")
    if isinstance(name, list):
        if not options.get("trust_remote_code"):
            raise InputError(
                f"model {info.name!r} has code of its own ({name[0]}.py, class {name[-1]}), which is not run unasked; "
                "read it, and load the pipeline in a program with ditmesh.load(..., trust_remote_code=True)"
            )
        return {}
    if kind is None:
        kind = _class_in("diffusers", str(name), f"model {info.name!r}", info)
    _check_classes(info, options)
    parameters, _ = cast(Any, kind)._get_signature_keys(kind)
    needed = set(parameters) - set(getattr(kind, "_optional_components", ()))
    out = sorted(part for part in needed if info.index.get(part) == [None, None])
    spared: tuple[str, ...] = next((parts for start, parts in LEFT_OUT.items() if kind.__name__.startswith(start)), ())
    for part in out:
        if part not in options and not (part in spared and set(spared[:1]) <= set(out)):
            raise InputError(
                f"model {info.name!r} has no {part}, which {kind.__name__} needs: it is [null, null] in "
                f"model_index.json; save the whole pipeline, or pass one, ditmesh.load(..., {part}=...)"
            )
    return dict.fromkeys(part for part in out if part not in options)


def _check_classes(info: ModelInfo, options: Mapping[str, Any]) -> None:
    """Refuse components of classes that the installed libraries do not have; ``options``: of others."""
    for part, entry in info.index.items():
        if part in options or not (isinstance(entry, list) and len(entry) == 2):
            continue
        if entry[0] in ("diffusers", "transformers"):
            _class_in(entry[0], str(entry[1]), f"the component {part} of model {info.name!r}", info)


def _class_in(library: str, name: str, what: str, info: ModelInfo) -> type[Any]:
    """A class of a library by its name; ``what`` is of it."""
    module = import_module(library)
    try:
        return getattr(module, name)
    except AttributeError:
        saved = info.index.get("_diffusers_version") if library == "diffusers" else None
        raise InputError(
            f"{what} is of the class {name}, which {library} {module.__version__} does not have"
            f"{f' (it was saved with {saved})' if saved else ''}; upgrade {library} (pip install -U {library})"
        ) from None


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
    if not names:
        return
    kind = type(model)
    library = kind.__module__.partition(".")[0]
    some = ", ".join(names[:SHOWN_NAMES]) + (" ..." if len(names) > SHOWN_NAMES else "")
    raise InputError(
        f"the component {folder.name} ({kind.__name__}) would be left at random in {len(names)} of its weights, which "
        f"are not in {str(folder)!r}: {some}; if a newer release of {library} has saved it, upgrade the one of this "
        f"environment (pip install -U {library}); else download or save the pipeline again"
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

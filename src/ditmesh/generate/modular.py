"""Modular pipelines of diffusers: the index of their folder, the inputs of their blocks, and how they are read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from .model_info import ModelInfo

INDEX = "modular_model_index.json"
GUIDANCE = "guidance_scale"


def as_plain_index(index: Mapping[str, Any], model: str, files: Path) -> dict[str, Any]:
    """An index like that of another pipeline: library and class of each component that is saved in the folder.

    `InputError`: its transformer is in another place.
    """
    plain, elsewhere = dict[str, Any](_modular=True), dict[str, Any]()
    for name, entry in index.items():
        if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)):
            plain[name] = entry
        elif (files / name).is_dir() or entry[2].get("pretrained_model_name_or_path") == model:
            # Of a component that was not there when the index was written only the specification knows the class.
            plain[name] = entry[:2] if entry[1] else entry[2].get("type_hint") or [None, None]
        else:
            elsewhere[name] = entry[2].get("pretrained_model_name_or_path")
    if "transformer" in elsewhere and "transformer_ref" not in plain:
        raise InputError(
            f"model {model!r} has no transformer of its own, but that of {elsewhere['transformer']!r}; in a program, "
            "load the pipeline with ModularPipeline.from_pretrained(...) and load_components(), and call "
            "ditmesh.parallelize(...), or give the folder that its save_pretrained(...) writes"
        )
    return plain


def download(info: ModelInfo, variant: str | None = None) -> Path:
    """The folder of a hub model, with the weights of its components; they are fetched if they are not here."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from huggingface_hub import snapshot_download

    if info.modular:
        parts = [f"{name}/*" for name, entry in info.index.items() if isinstance(entry, list)]
        return Path(snapshot_download(info.name, allow_patterns=[INDEX, *parts]))
    return Path(DiffusionPipeline.download(info.name, variant=variant))


def call_parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of the call of a pipeline or pipeline class; of a modular one the inputs of its blocks.

    Where its guider sets the guidance, and not an input, that is one too: see `guided_by`.
    """
    import diffusers
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline

    kind = pipe if isinstance(pipe, type) else type(pipe)
    if not issubclass(kind, ModularPipeline):
        return inspect.signature(kind.__call__).parameters
    blocks = getattr(diffusers, str(kind.default_blocks_name))() if isinstance(pipe, type) else pipe.blocks
    empty, inputs = inspect.Parameter.empty, dict[str, inspect.Parameter]()
    for item in blocks.inputs:
        if item.name is not None:
            default = empty if item.required and item.default is None else item.default
            inputs[item.name] = inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=default)
    if (guider := _guider(pipe, blocks)) is not None:
        scale = guider.guidance_scale
        inputs[GUIDANCE] = inspect.Parameter(GUIDANCE, inspect.Parameter.KEYWORD_ONLY, default=scale)
    return inputs


def component_names(kind: type) -> list[str]:
    """Names of the components that a pipeline of a class may have."""
    import diffusers
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline

    if issubclass(kind, ModularPipeline) and (name := kind.default_blocks_name) is not None:
        return [spec.name for spec in getattr(diffusers, name)().expected_components]
    return list(inspect.signature(kind.__init__).parameters)


def _guider(pipe: Any, blocks: Any) -> Any:
    """The guider that takes the guidance of a request, of a class the usual one; None: an input does, or nothing."""
    guider = getattr(pipe, "guider", None)
    if isinstance(pipe, type):
        guider = next((spec.create() for spec in blocks.expected_components if spec.name == "guider"), None)
    takes = hasattr(guider, GUIDANCE) and all(item.name != GUIDANCE for item in blocks.inputs)
    return guider if takes else None


@contextmanager
def guided_by(pipe: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Give a modular pipeline's guider the guidance that its blocks do not take; `InputError`: it has no scale."""
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline

    with ExitStack() as undo:
        if isinstance(pipe, ModularPipeline) and all(item.name != GUIDANCE for item in pipe.blocks.inputs):
            guider, scale = _guider(pipe, pipe.blocks), arguments.pop(GUIDANCE, None)
            if guider is None and scale is not None:
                raise InputError(
                    f"guidance {scale}: {type(pipe).__name__} has no guider with a guidance_scale, but "
                    f"{type(getattr(pipe, 'guider', None)).__name__}; leave the guidance out"
                )
            if guider is not None and scale is not None:
                undo.callback(setattr, guider, GUIDANCE, guider.guidance_scale)
                guider.guidance_scale = scale
        yield


def read_modular(info: ModelInfo, **options: Any) -> Any:
    """A saved modular pipeline with all components that its folder has; ``options``: components in their place."""
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline

    trust = {name: options.pop(name) for name in ("trust_remote_code",) if name in options}
    pipe = ModularPipeline.from_pretrained(info.files, **trust)
    known = pipe._component_specs
    given = {name: options.pop(name) for name in list(options) if name in known}
    pipe.update_components(**{name: part for name, part in given.items() if part is not None})
    parts = {}
    for name in pipe.pretrained_component_names:
        # load_components() leaves one out, with a warning, that cannot be read.
        if name not in given and (info.files / name).is_dir():
            spec = pipe.get_component_spec(name)
            spec.pretrained_model_name_or_path, spec.subfolder = str(info.files), name
            chosen = {key: v.get(name, v.get("default")) if type(v) is dict else v for key, v in options.items()}
            parts[name] = spec.load(**{key: value for key, value in chosen.items() if value is not None})
    pipe.register_components(**parts)
    for block in _all_blocks(pipe._blocks):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    return pipe


def _all_blocks(blocks: Any) -> Iterator[Any]:
    yield blocks
    for block in blocks.sub_blocks.values():
        yield from _all_blocks(block)

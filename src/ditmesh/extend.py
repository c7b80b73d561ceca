"""What a package of nodes uses of ditmesh beside its public names: ComfyUI's imports nothing else.

Names here stay when what they name moves inside of ditmesh.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Loaded on first use, as the names of `ditmesh` are.
_NAMES = {
    "attention.handed": "HANDED HandedAttention allow_handed",
    "cli.values": "embedded_or parallel_config parse_settings",
    "config": "AXES ParallelConfig",
    "core.arguments": "Arguments",
    "core.files": "written_whole",
    "core.request": "PipelineCall",
    "followers": "FollowedModel FollowedVae Followers",
    "followers.vae": "NotBanded",
    "generate.arguments": "check_call",
    "generate.files": "ADAPTER_LOADERS IMAGE_ARGUMENTS InputFile adapter load_adapters pipeline_for",
    "generate.job": "PER_CALL PictureJob check_content job_for",
    "generate.model_info": "find_model",
    "generate.modular": "call_parameters",
    "generate.receipt": "MOST_PIXELS Receipt text_chunk",
    "generate.runner": "PipelineRunner facts_on_rank",
    "generate.schedulers": "SCHEDULERS scheduler_named",
    "launch": "resolve_device",
    "layout.derive": "block_lists",
    "layout.forms": "form_of",
    "layout.record": "result_error",
    "media.images": "as_seen",
    "ranks": "RemotePipeline",
    "request": "PictureRequest size_of",
    "serve.types": "Event Job",
    "serve.worker.previews": "LatentColours latent_colours",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __package__), name)

"""What a package of nodes uses of ditmesh beside its public names: ComfyUI's imports nothing else.

Names here stay when what they name moves inside of ditmesh.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Loaded on first use, as the names of `ditmesh` are.
_MODULES = {
    "ADAPTER_LOADERS": "generate.files",
    "AXES": "config",
    "Arguments": "core.arguments",
    "Event": "serve.types",
    "FollowedModel": "followers",
    "FollowedVae": "followers",
    "Followers": "followers",
    "HANDED": "attention.handed",
    "HandedAttention": "attention.handed",
    "IMAGE_ARGUMENTS": "generate.files",
    "InputFile": "generate.files",
    "Job": "serve.types",
    "LatentColours": "generate.preview",
    "MOST_PIXELS": "generate.receipt",
    "NotBanded": "followers.vae",
    "PER_CALL": "generate.job",
    "ParallelConfig": "config",
    "PictureJob": "generate.job",
    "PictureRequest": "request",
    "PipelineCall": "core.request",
    "PipelineRunner": "generate.runner",
    "Receipt": "generate.receipt",
    "RemotePipeline": "ranks",
    "SCHEDULERS": "generate.schedulers",
    "adapter": "generate.files",
    "allow_handed": "attention.handed",
    "as_seen": "media.images",
    "block_lists": "layout.derive",
    "call_parameters": "generate.modular",
    "check_call": "generate.arguments",
    "check_content": "generate.job",
    "embedded_or": "cli.values",
    "facts_on_rank": "generate.runner",
    "find_model": "generate.model_info",
    "form_of": "layout.forms",
    "job_for": "generate.job",
    "latent_colours": "generate.preview",
    "load_adapters": "generate.files",
    "parallel_config": "cli.values",
    "parse_settings": "cli.values",
    "pipeline_for": "generate.files",
    "resolve_device": "launch",
    "result_error": "strategies.checked",
    "scheduler_named": "generate.schedulers",
    "size_of": "request",
    "text_chunk": "generate.receipt",
    "written_whole": "core.files",
}
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __package__), name)

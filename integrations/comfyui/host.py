"""The parts of ComfyUI that the nodes use."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import folder_paths
from comfy.cli_args import args


class Progress:
    """ComfyUI's progress bar of the running node, and its interrupt.

    Attributes:
        previews: whether ComfyUI is set to show what is being made.
    """

    def __init__(self) -> None:
        self._bar = comfy.utils.ProgressBar(1)
        method = getattr(args, "preview_method", None)
        self.previews = method is not None and getattr(method, "value", method) != "none"
        self._largest = getattr(args, "preview_size", 512)

    def check(self) -> None:
        """Raise ComfyUI's exception if the prompt is interrupted."""
        check_interrupted()

    def step(self, done: int, total: int, picture: Any = None) -> None:
        """Show the node's progress.

        Args:
            done, total: denoising steps.
            picture: a preview (PIL), or None.

        Raises:
            comfy.model_management.InterruptProcessingException: the prompt is to stop.
        """
        self.check()
        self._bar.update_absolute(done, total, None if picture is None else ("JPEG", picture, self._largest))


def check_interrupted() -> None:
    """Raise ComfyUI's exception if the prompt is interrupted."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def when_unloaded(action: Callable[[], Any]) -> None:
    """Call ``action`` whenever ComfyUI unloads all models: by its button, its API, or when memory has run out."""
    unload = comfy.model_management.unload_all_models

    @functools.wraps(unload)
    def unload_all_models(*given: Any, **named: Any) -> Any:
        action()
        return unload(*given, **named)

    comfy.model_management.unload_all_models = unload_all_models


def model_folder(name: str) -> str:
    """The folder of a model in ComfyUI's ``models/diffusers``; otherwise the name."""
    return _within("diffusers", name, os.path.isdir)


def lora_file(name: str) -> str:
    """The file of an adapter in ComfyUI's ``models/loras``; otherwise the name."""
    return _within("loras", name, os.path.isfile)


def _within(kind: str, name: str, fits: Callable[[str], bool]) -> str:
    if name and not os.path.exists(name):
        for folder in folder_paths.get_folder_paths(kind):
            path = os.path.normpath(os.path.join(folder, name))
            # Not outside the folder, except by links in it.
            if Path(path).is_relative_to(os.path.normpath(folder)) and fits(path):
                return path
    return name


def output_place(prefix: str, width: int, height: int) -> tuple[str, str, int, str]:
    """Where an image is saved: folder, prefix of the file name, number, subfolder of the output folder."""
    folder, name, number, below, _ = folder_paths.get_save_image_path(
        prefix, folder_paths.get_output_directory(), width, height
    )
    return folder, name, number, below


def metadata_allowed() -> bool:
    """Whether ComfyUI may write metadata into files."""
    return not getattr(args, "disable_metadata", False)


# --- models ------------------------------------------------------------------------------------------------------


def root() -> str:
    """ComfyUI's folder."""
    return os.path.dirname(os.path.abspath(folder_paths.__file__))


def node_folders() -> list[str]:
    """The folders of custom nodes, and of those that ComfyUI brings."""
    own = [os.path.join(root(), name) for name in ("comfy_extras", "comfy_api_nodes")]
    return [*own, *(os.path.abspath(folder) for folder in folder_paths.get_folder_paths("custom_nodes"))]


def model_arguments() -> list[str]:
    """ComfyUI's own command line, which decides about dtypes and attention."""
    return list(sys.argv)


def diffusion_model_wrappers(options: Mapping[str, Any]) -> list[Any]:
    """Wrappers that other nodes have put around the diffusion model itself."""
    import comfy.patcher_extension as extension

    return extension.get_all_wrappers(extension.WrappersMP.DIFFUSION_MODEL, options)


def put_around(patcher: Any, key: str, around: Callable[..., Any], before_run: Callable[..., Any]) -> None:
    """Let ``around(executor, ...)`` stand around every call of a clone's model, once, and be told before a sampling."""
    import comfy.patcher_extension as extension

    calls, runs = extension.WrappersMP.APPLY_MODEL, extension.CallbacksMP.ON_PRE_RUN
    patcher.remove_wrappers_with_key(calls, key)
    patcher.remove_callbacks_with_key(runs, key)
    patcher.add_wrapper_with_key(calls, key, around)
    patcher.add_callback_with_key(runs, key, before_run)


def devices_of(patcher: Any, count: int) -> tuple[str, tuple[int, ...] | None]:
    """Type of a model's device, and the numbers of so many GPUs, its own first.

    Raises:
        ConfigError: so many are not there.
    """
    from ditmesh import ConfigError

    device = patcher.load_device
    if device.type == "cpu":
        return "cpu", None
    if device.type != "cuda":
        raise ConfigError(f"ComfyUI computes on {device.type}, and ditmesh on CUDA and the CPU; bypass this node")
    import torch

    there, first = torch.cuda.device_count(), device.index if device.index is not None else torch.cuda.current_device()
    if there < count:
        raise ConfigError(
            f"{count} devices are asked for, and ComfyUI sees {there}; start it without --cuda-device, or ask for fewer"
        )
    return "cuda", tuple((first + place) % there for place in range(count))

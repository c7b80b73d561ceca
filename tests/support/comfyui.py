"""A stand-in for ComfyUI, from its documentation: the modules that nodes import, and an executor of workflows.

It has what the nodes of this project rely on: nodes that are kept by their id
and called in a thread other than the main one, in inference mode; outputs that are used again while nothing before
them has changed; interrupts, progress with previews, unloading.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

NODES = Path(__file__).parents[2] / "integrations" / "comfyui"
Workflow = Mapping[str, Mapping[str, Any]]

# Types of values that stand in a workflow; all others come through links.
WIDGETS = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}


class InterruptProcessingException(Exception):
    """As ComfyUI's."""


class SaveImage:
    """ComfyUI's own node, as far as pixels go."""

    CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "image", "save_images", (), True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"images": ("IMAGE",), "filename_prefix": ("STRING", {"default": "ComfyUI"})}}

    def save_images(self, images: torch.Tensor, filename_prefix: str) -> dict[str, Any]:
        import folder_paths  # type: ignore[import-not-found]

        folder, name, number, below, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory(), images.shape[2], images.shape[1]
        )
        saved = []
        for place, image in enumerate(images):
            pixels = numpy.clip(255.0 * image.cpu().numpy(), 0, 255).astype(numpy.uint8)
            file = f"{name}_{number + place:05}_.png"
            Image.fromarray(pixels).save(Path(folder, file), pnginfo=PngInfo())
            saved.append({"filename": file, "subfolder": below, "type": "output"})
        return {"ui": {"images": saved}}


class LoadImage:
    """ComfyUI's own node, for pictures without transparency."""

    CATEGORY, FUNCTION, RETURN_TYPES = "image", "load_image", ("IMAGE", "MASK")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"image": ("STRING", {"default": ""})}}

    def load_image(self, image: str) -> tuple[torch.Tensor, torch.Tensor]:
        with Image.open(image) as opened:
            pixels = numpy.asarray(opened.convert("RGB")).astype(numpy.float32) / 255.0
        return torch.from_numpy(pixels)[None], torch.zeros(1, *pixels.shape[:2])


class ComfyUI:
    """What nodes see of ComfyUI, and what it does with a workflow.

    Attributes:
        output: folder of its pictures.
        heard: what it has told the page: ``(kind, node or None, content)``.
        on_progress: is called with a node's progress, in the thread of the nodes.
    """

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output"
        self.models = folder / "models"
        for path in (self.output, self.models / "loras", self.models / "diffusers"):
            path.mkdir(parents=True, exist_ok=True)
        self.heard: list[tuple[str, str | None, Any]] = []
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self.modules = self._modules()
        # The package of the nodes.
        self.package: Any = None
        self.classes: dict[str, Any] = {"SaveImage": SaveImage, "LoadImage": LoadImage}
        self._interrupted = False
        self._node: str | None = None
        self._kept: dict[tuple[str, str], Any] = {}
        self._outputs: dict[str, tuple[Any, Any]] = {}

    # --- what nodes import -------------------------------------------------------------------------------------

    def _modules(self) -> dict[str, types.ModuleType]:
        def module(name: str, **content: Any) -> types.ModuleType:
            made = types.ModuleType(name)
            vars(made).update(content)
            return made

        management = module(
            "comfy.model_management",
            InterruptProcessingException=InterruptProcessingException,
            throw_exception_if_processing_interrupted=self._throw_if_interrupted,
            unload_all_models=lambda: self.heard.append(("unloaded", None, None)),
        )
        arguments = types.SimpleNamespace(
            preview_method=types.SimpleNamespace(value="latent2rgb"), preview_size=512, disable_metadata=False
        )
        utils, options = module("comfy.utils", ProgressBar=self._bar()), module("comfy.cli_args", args=arguments)
        paths = module(
            "folder_paths",
            get_output_directory=lambda: str(self.output),
            get_folder_paths=lambda kind: [str(self.models / kind)],
            get_save_image_path=self._save_path,
        )
        comfy = module("comfy", model_management=management, utils=utils, cli_args=options, __path__=[])
        return {one.__name__: one for one in (comfy, management, utils, options, paths)}

    def _bar(self) -> type[Any]:
        host = self

        class ProgressBar:
            def __init__(self, total: int) -> None:
                self.total = total

            def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
                self.total = self.total if total is None else total
                host.heard.append(("progress", host._node, (value, self.total, preview)))
                host.on_progress(value, self.total)

        return ProgressBar

    def _throw_if_interrupted(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise InterruptProcessingException

    def _save_path(self, prefix: str, folder: str, width: int, height: int) -> tuple[str, str, int, str, str]:
        there = list(Path(folder).glob(f"{prefix}_*_.png"))
        return folder, prefix, len(there) + 1, "", prefix

    # --- what users do -----------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Stop the prompt that runs."""
        self._interrupted = True

    def free(self, unload_models: bool = True, free_memory: bool = False) -> None:
        """What the page's buttons do."""
        if unload_models or free_memory:
            self.modules["comfy.model_management"].unload_all_models()
        if free_memory:
            self._kept.clear()
            self._outputs.clear()

    def run(self, workflow: Workflow, pnginfo: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run a workflow in a thread; what its output nodes show, by id. `Exception`: whatever a node raises."""
        shown: dict[str, Any] = {}
        failed: list[BaseException] = []

        def work() -> None:
            try:
                with torch.inference_mode():
                    self._run(workflow, pnginfo, shown)
            except BaseException as error:
                failed.append(error)

        self._interrupted = False
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return shown

    def executed(self) -> list[str]:
        """Ids of the nodes that have run since this was asked last, in order."""
        found = [str(node) for kind, node, _ in self.heard if kind == "executing"]
        self.heard = [one for one in self.heard if one[0] != "executing"]
        return found

    # --- execution ---------------------------------------------------------------------------------------------

    def _run(self, workflow: Workflow, pnginfo: dict[str, Any] | None, shown: dict[str, Any]) -> None:
        signs = {key: self._sign(workflow, key) for key in workflow}
        # What the workflow has no more is dropped before anything runs.
        self._kept = {at: node for at, node in self._kept.items() if workflow.get(at[0], {}).get("class_type") == at[1]}
        self._outputs = {key: out for key, out in self._outputs.items() if signs.get(key) == out[0]}
        for key, node in workflow.items():
            if getattr(self.classes[node["class_type"]], "OUTPUT_NODE", False):
                self._output(workflow, key, signs, pnginfo, shown)

    def _sign(self, workflow: Workflow, key: str) -> Any:
        """Another one when an input, or what `IS_CHANGED` says, has changed here or before."""
        node = workflow[key]
        kind, values = self.classes[node["class_type"]], dict(node["inputs"])
        links = {name: value for name, value in values.items() if isinstance(value, list)}
        plain = {name: value for name, value in values.items() if name not in links}
        changed = kind.IS_CHANGED(**plain) if hasattr(kind, "IS_CHANGED") else None
        before = tuple((name, self._sign(workflow, source), place) for name, (source, place) in sorted(links.items()))
        return node["class_type"], tuple(sorted(plain.items())), changed, before

    def _output(
        self, workflow: Workflow, key: str, signs: dict[str, Any], pnginfo: dict[str, Any] | None, shown: dict[str, Any]
    ) -> Any:
        if key in self._outputs:
            return self._outputs[key][1]
        node = workflow[key]
        kind, given = self.classes[node["class_type"]], dict(node["inputs"])
        for name, value in given.items():
            if isinstance(value, list):
                given[name] = self._output(workflow, value[0], signs, pnginfo, shown)[value[1]]
        hidden = {"PROMPT": workflow, "EXTRA_PNGINFO": pnginfo, "UNIQUE_ID": key}
        given |= {name: hidden[what] for name, what in kind.INPUT_TYPES().get("hidden", {}).items()}
        self._throw_if_interrupted()
        self._node = key
        self.heard.append(("executing", key, None))
        made = self._kept.setdefault((key, node["class_type"]), None) or kind()
        self._kept[key, node["class_type"]] = made
        result = getattr(made, kind.FUNCTION)(**given)
        if isinstance(result, dict):
            shown[key] = result["ui"]
            result = result.get("result", ())
        self._outputs[key] = signs[key], result
        return result


@contextmanager
def comfyui(folder: Path) -> Iterator[ComfyUI]:
    """A ComfyUI in which the nodes of ``integrations/comfyui`` are installed; they are removed in the end."""
    host = ComfyUI(folder)
    before = {name: sys.modules.get(name) for name in host.modules}
    sys.modules.update(host.modules)
    # As ComfyUI imports a folder of nodes: by its path.
    name = str(NODES).replace(".", "_x_")
    try:
        spec = importlib.util.spec_from_file_location(name, NODES / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        host.classes |= package.NODE_CLASS_MAPPINGS
        host.package = package
        yield host
    finally:
        host.free(free_memory=True)
        for one in [one for one in sys.modules if one.partition(".")[0] == name or one.startswith(f"{name}.")]:
            del sys.modules[one]
        for one, module in before.items():
            if module is None:
                sys.modules.pop(one, None)
            else:
                sys.modules[one] = module

"""The nodes of ditmesh for ComfyUI."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from . import host
from .mesh import MeshPipeline, MeshSettings, close_all
from .parallel import ParallelizeModel, close_followers
from .remote import ServerPipeline
from .request import (
    Lora,
    Made,
    Pipeline,
    Receipts,
    Wanted,
    as_picture,
    as_tensor,
    input_picture,
    pixels_digest,
    stamp,
)
from .vae import ParallelizeVAE

PIPELINE, LORAS, TEXT, SAMPLING, RECEIPTS = (
    *("DITMESH_PIPELINE", "DITMESH_LORAS", "DITMESH_TEXT", "DITMESH_SAMPLING", "DITMESH_RECEIPTS"),
)
CATEGORY = "ditmesh"
OWN = "the model's own"
DTYPES = ["auto", "float32", "bfloat16", "float16"]
# Degrees of a mesh, in the order of the widgets.
DEGREES = {
    "ulysses": "Ranks that share the tokens and swap attention heads.",
    "ring": "Ranks that share the tokens and pass keys and values on.",
    "cfg": "2: one rank (or group) for each branch of guidance.",
    "data": "Ranks that share the pictures of a batch.",
    "tensor": "Ranks that share the transformer's weights.",
    "pipe": "Stages of blocks (PipeFusion): approximate, keys are a step old.",
}
# Fields of a `PictureRequest` by name.
Fields = Mapping[str, Any]


def _number(default: int, least: int, most: int, tooltip: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "INT", {"default": default, "min": least, "max": most, "tooltip": tooltip, **more}


def _scheduler_names() -> list[str]:
    from ditmesh.extend import SCHEDULERS

    return [OWN, *SCHEDULERS]


class LoadPipeline:
    """Loads a diffusers pipeline on ranks of this machine; they stay until the settings change."""

    CATEGORY, FUNCTION = CATEGORY, "load"
    RETURN_TYPES, RETURN_NAMES = (PIPELINE,), ("pipeline",)
    DESCRIPTION = (
        "Loads a diffusers pipeline on several devices of this machine. They keep it between prompts, until a setting "
        "changes here or ComfyUI unloads its models."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        degrees = {name: _number(1, 1, 3 if name == "cfg" else 64, text) for name, text in DEGREES.items()}
        return {
            "required": {
                "model": (
                    "STRING",
                    {
                        "default": "emoji-sd3",
                        "tooltip": "A folder that save_pretrained wrote (also one in models/diffusers), a hub id, or a "
                        "model embedded in ditmesh.",
                    },
                ),
                **degrees,
                "dtype": (DTYPES, {"default": "auto", "tooltip": "auto: bfloat16 on GPUs, float32 on the CPU."}),
            },
            "optional": {
                "devices": _number(
                    0,
                    0,
                    512,
                    "Number of ranks. 0: as many as the degrees multiply to. With all degrees at 1 ditmesh "
                    "chooses how the ranks work together.",
                ),
                "device": (["auto", "cuda", "cpu"], {"default": "auto", "tooltip": "auto: GPUs if there are any."}),
                "threads": _number(0, 0, 512, "Threads of each rank. 0: the cores shared out."),
                "settings": (
                    "STRING",
                    {
                        "default": "",
                        "tooltip": 'More of the parallel configuration, such as "reproducible" or "patches=4 '
                        'exchange=displaced".',
                    },
                ),
                "variant": ("STRING", {"default": "", "tooltip": "Variant of the weights' files, such as fp16."}),
            },
        }

    @classmethod
    def IS_CHANGED(cls, model: str = "", **settings: Any) -> str:  # noqa: N802
        """A value that changes when the model's files are rewritten."""
        return stamp(host.model_folder(model))

    def __init__(self) -> None:
        self._pipeline: MeshPipeline | None = None

    def load(
        self,
        model: str,
        dtype: str,
        devices: int = 0,
        device: str = "auto",
        threads: int = 0,
        settings: str = "",
        variant: str = "",
        **degrees: int,
    ) -> tuple[Pipeline]:
        from ditmesh.extend import parse_settings

        config = {name: degree for name, degree in degrees.items() if degree != 1}
        given = parse_settings(settings)
        if twice := given.keys() & config.keys():
            from ditmesh import ConfigError

            raise ConfigError(f"{min(twice)} stands in a widget and in settings; leave one out")
        found = host.model_folder(model.strip())
        made = MeshSettings(
            found,
            devices or None,
            config | given,
            device,
            None if dtype == "auto" else dtype,
            threads or None,
            variant.strip() or None,
            stamp(found),
        )
        if self._pipeline is not None and self._pipeline.settings != made:
            self._pipeline.close()
            self._pipeline = None
        if self._pipeline is None:
            self._pipeline = MeshPipeline(made, self)
        self._pipeline.open()
        return (self._pipeline,)


class Connect:
    """Connects to a ditmesh server."""

    CATEGORY, FUNCTION = CATEGORY, "connect"
    RETURN_TYPES, RETURN_NAMES = (PIPELINE,), ("pipeline",)
    DESCRIPTION = "Connects to a ditmesh server (ditmesh serve), which generates on devices of its own."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {
            "required": {
                "url": ("STRING", {"default": "http://127.0.0.1:8000", "tooltip": "Address of the server."}),
                "model": ("STRING", {"default": "", "tooltip": "One of the server's models. Empty: its first."}),
            },
            "optional": {
                "key_variable": (
                    "STRING",
                    {
                        "default": "DITMESH_API_KEY",
                        "tooltip": "Environment variable of ComfyUI that holds the server's key, if it needs one. Not "
                        "the key itself: ComfyUI writes what stands here into every picture.",
                    },
                ),
                "priority": _number(0, -10, 10, "Requests of a higher one go first."),
            },
        }

    def connect(
        self, url: str, model: str, key_variable: str = "DITMESH_API_KEY", priority: int = 0
    ) -> tuple[Pipeline]:
        key = os.environ.get(key_variable.strip()) if key_variable.strip() else None
        return (ServerPipeline(url.strip(), key, model.strip(), priority),)


class AddLora:
    """Adds an adapter to a stack of adapters."""

    CATEGORY, FUNCTION = CATEGORY, "add"
    RETURN_TYPES, RETURN_NAMES = (LORAS,), ("loras",)
    DESCRIPTION = "Puts a LoRA onto a stack of LoRAs."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {
            "required": {
                "lora": (
                    "STRING",
                    {
                        "default": "",
                        "tooltip": "A file of models/loras, another file or folder, or a hub id; for a server one of "
                        "its LoRAs. Empty: none.",
                    },
                ),
                "scale": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.05}),
            },
            "optional": {"loras": (LORAS, {"tooltip": "The LoRAs so far."})},
        }

    @classmethod
    def IS_CHANGED(cls, lora: str = "", **others: Any) -> str:  # noqa: N802
        """A value that changes when the adapter's file is rewritten."""
        return stamp(host.lora_file(lora.strip())) if lora.strip() else ""

    def add(self, lora: str, scale: float, loras: tuple[Lora, ...] = ()) -> tuple[tuple[Lora, ...]]:
        return ((*loras, Lora(lora.strip(), scale)) if lora.strip() else loras,)


class WriteText:
    """The prompt and the negative prompt."""

    CATEGORY, FUNCTION = CATEGORY, "write"
    RETURN_TYPES, RETURN_NAMES = (TEXT,), ("text",)
    DESCRIPTION = "The prompt, and what the pictures should not show."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {
            "required": {
                "prompt": ("STRING", {"default": "a red fox", "multiline": True, "dynamicPrompts": True}),
                "negative": (
                    "STRING",
                    {"default": "", "multiline": True, "dynamicPrompts": True, "tooltip": "Empty: no negative prompt."},
                ),
            }
        }

    def write(self, prompt: str, negative: str) -> tuple[Fields]:
        return ({"prompt": prompt, "negative_prompt": negative or None},)


class SetSampling:
    """Steps, guidance, seed, size, number of images, scheduler, and frames of a video."""

    CATEGORY, FUNCTION = CATEGORY, "set"
    RETURN_TYPES, RETURN_NAMES = (SAMPLING,), ("sampling",)
    DESCRIPTION = "How it is sampled. Picture i of a batch has seed + i, and is the one that this seed gives alone."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        widgets = {widget.name: widget.as_input() for widget in WIDGETS.values()}
        scheduler = _scheduler_names(), {"default": OWN, "tooltip": "A class of diffusers."}
        required = {name: widgets.pop(name) for name in PLACES}
        return {"required": {**required, "scheduler": scheduler}, "optional": widgets}

    def set(self, scheduler: str, **given: Any) -> tuple[Fields]:
        from ditmesh import InputError

        width, height = given["width"], given["height"]
        if (width == 0) != (height == 0):
            raise InputError(f"width {width} and height {height}: give both, or 0 for both")
        fields: dict[str, Any] = {"scheduler": None if scheduler == OWN else scheduler}
        for name, widget in WIDGETS.items():
            value = given.get(widget.name)
            if value is not None and not (widget.least_leaves and (value == widget.least or value < 0)):
                fields[name] = value
        return (fields,)


# The order of widgets must not change: saved workflows hold their values by position. All others come behind them.
PLACES = ("seed", "steps", "guidance", "width", "height", "images")


@dataclass(frozen=True)
class Widget:
    """A widget for a field of a request; ``usual``: its default, a float where the field is one.

    ``least`` to ``most`` by ``step`` are its values; the least stands for a field that is not given, where
    ``least_leaves``.
    """

    name: str
    usual: float
    tooltip: str
    least: float = 0
    most: float = 0
    step: float | None = None
    more: dict[str, Any] = field(default_factory=dict)
    least_leaves: bool = True

    def as_input(self) -> tuple[str, dict[str, Any]]:
        """The widget as ComfyUI has it."""
        kind = "FLOAT" if isinstance(self.usual, float) else "INT"
        step = {} if self.step is None else {"step": self.step}
        limits = {"default": self.usual, "min": self.least, "max": self.most, "tooltip": self.tooltip}
        return kind, {**limits, **step, **self.more}


_SIDE = "In pixels. 0: of the image, else the model's own."
# By field of `PictureRequest`, which has the same bounds.
WIDGETS = {
    "n": Widget("images", 1, "Number of pictures.", 1, 1024, least_leaves=False),
    "width": Widget("width", 0, _SIDE, most=16384, step=8),
    "height": Widget("height", 0, _SIDE, most=16384, step=8),
    "steps": Widget("steps", 0, "Denoising steps. 0: the model's own.", most=10_000),
    "guidance": Widget("guidance", -1.0, "-1: the model's own.", -1.0, 100.0, 0.1),
    "seed": Widget(
        "seed",
        0,
        "The same seed gives the picture of `ditmesh generate --seed`.",
        # JavaScript does not represent larger numbers exactly.
        most=2**53 - 1,
        more={"control_after_generate": True},
        least_leaves=False,
    ),
    "frames": Widget("frames", 0, "Of a video. 0: the model's own number.", most=4096),
}


class Generate:
    """Generates images with ComfyUI's progress bar and previews; cancelling stops all ranks at the next step."""

    CATEGORY, FUNCTION = CATEGORY, "generate"
    RETURN_TYPES, RETURN_NAMES = ("IMAGE", RECEIPTS), ("images", "receipts")
    DESCRIPTION = (
        "Generates pictures on the mesh or the server. A video (on a mesh only) comes as its frames, for ComfyUI's "
        "Create Video."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {
            "required": {"pipeline": (PIPELINE,), "text": (TEXT,), "sampling": (SAMPLING,)},
            "optional": {
                "loras": (LORAS,),
                "image": ("IMAGE", {"tooltip": "An input image, if the model's pipeline supports it."}),
                "mask": ("MASK", {"tooltip": "White is generated again (inpainting), if supported."}),
                "strength": (
                    "FLOAT",
                    {
                        "default": 0.0,
                        "min": 0.0,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "How much of the input image is generated again. 0: the pipeline's default.",
                    },
                ),
            },
        }

    def generate(
        self,
        pipeline: Pipeline,
        text: Fields,
        sampling: Fields,
        loras: tuple[Lora, ...] = (),
        image: Any = None,
        mask: Any = None,
        strength: float = 0.0,
    ) -> tuple[Any, Receipts]:
        from ditmesh.extend import PictureRequest

        fields = {**text, **sampling}
        scheduler = fields.pop("scheduler", None)
        request = PictureRequest.read(**fields, strength=strength or None)
        pictures = input_picture(image, "image"), input_picture(mask, "mask")
        wanted = Wanted(request, scheduler, loras, *pictures)
        made: list[Made] = pipeline.generate(wanted, host.Progress())
        receipts = tuple(one.receipt for one in made)
        images = [image for one in made for image in one.images]
        digests = tuple(map(pixels_digest, images))
        inputs = tuple(one for one in pictures if one is not None)
        return as_tensor(images), Receipts(receipts, digests, inputs)


class SavePictures:
    """Saves images with the workflow, and with their receipts for `ditmesh replay`."""

    CATEGORY, FUNCTION = CATEGORY, "save"
    RETURN_TYPES: ClassVar[tuple[str, ...]] = ()
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Saves pictures as PNGs with their receipts, from which `ditmesh replay` makes them again, and with the "
        "workflow, as ComfyUI's own node does."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {
            "required": {
                "images": ("IMAGE",),
                "receipts": (RECEIPTS,),
                "filename_prefix": ("STRING", {"default": "ditmesh", "tooltip": "As in ComfyUI's SaveImage."}),
            },
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    def save(
        self,
        images: Any,
        receipts: Receipts,
        filename_prefix: str,
        prompt: Any = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        from ditmesh import InputError
        from ditmesh.extend import text_chunk, written_whole

        if len(receipts.receipts) != len(receipts.digests):
            raise InputError("these are frames of a video; save them with ComfyUI's Create Video and Save Video")
        pictures = [as_picture(image) for image in images]
        if [pixels_digest(picture) for picture in pictures] != [*receipts.digests]:
            raise InputError(
                "these pictures are not those that the receipts tell of: something between has changed, dropped or "
                "reordered them; save them with ComfyUI's SaveImage"
            )
        height, width = images.shape[1:3]
        folder, name, number, below = host.output_place(filename_prefix, width, height)
        texts = {"prompt": prompt, **(extra_pnginfo or {})} if host.metadata_allowed() else {}
        notes = {key: json.dumps(value) for key, value in texts.items() if value is not None}
        if host.metadata_allowed():
            for one in receipts.inputs:
                # Next to the image, where `ditmesh replay` looks for it.
                Path(folder, one.name).write_bytes(one.png)
        saved = []
        for place, (picture, receipt) in enumerate(zip(pictures, receipts.receipts, strict=True)):
            file = f"{name.replace('%batch_num%', str(place))}_{number + place:05}_.png"
            chunks = text_chunk(receipt) if host.metadata_allowed() else None
            for key, text in notes.items():
                chunks.add_text(key, text)
            with written_whole(Path(folder, file)) as temporary:
                picture.save(temporary, "PNG", pnginfo=chunks)
            saved.append({"filename": file, "subfolder": below, "type": "output"})
        return {"ui": {"images": saved}}


host.when_unloaded(close_all)
host.when_unloaded(close_followers)

NODE_CLASS_MAPPINGS = {
    "DitmeshParallelizeModel": ParallelizeModel,
    "DitmeshParallelizeVAE": ParallelizeVAE,
    "DitmeshLoadPipeline": LoadPipeline,
    "DitmeshConnect": Connect,
    "DitmeshLoRA": AddLora,
    "DitmeshText": WriteText,
    "DitmeshSampling": SetSampling,
    "DitmeshGenerate": Generate,
    "DitmeshSave": SavePictures,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "DitmeshParallelizeModel": "Parallelize model (ditmesh)",
    "DitmeshParallelizeVAE": "Parallelize VAE (ditmesh)",
    "DitmeshLoadPipeline": "Load pipeline on a mesh (ditmesh)",
    "DitmeshConnect": "Connect to a server (ditmesh)",
    "DitmeshLoRA": "LoRA (ditmesh)",
    "DitmeshText": "Text (ditmesh)",
    "DitmeshSampling": "Sampling (ditmesh)",
    "DitmeshGenerate": "Generate (ditmesh)",
    "DitmeshSave": "Save with receipts (ditmesh)",
}

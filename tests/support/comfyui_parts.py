"""A custom node for a real ComfyUI: a random text, so that no text encoder is needed; and files of tiny models.

Run in ComfyUI's environment it writes the files: ``python comfyui_parts.py FOLDER``, with DITMESH_COMFYUI set.
"""

from __future__ import annotations

import sys
from pathlib import Path

NODE = """
import torch

class RandomText:
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION, CATEGORY = "make", "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0}), "words": ("INT", {"default": 7})}}

    def make(self, seed, words):
        def numbers(*shape, seed=seed):
            return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return ([[numbers(1, words, 24), {"pooled_output": numbers(1, 16, seed=seed + 1)}]],)

NODE_CLASS_MAPPINGS = {"RandomText": RandomText}
"""


def main(folder: Path) -> None:
    """Write a tiny SD3 (all of whose widths are in its file) and two LoRAs of it below a folder of models."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import comfyui_graphs
    from comfyui_files import Files

    comfyui_graphs.prepare([])
    files = Files(folder, comfyui_graphs.built, lambda family: comfyui_graphs.FAMILIES[family][1])
    for loader in ("UNETLoader", "CheckpointLoaderSimple"):
        model = files.model("sd3", loader, "default")
    for seed in (1, 2):
        files.lora(model, seed, 1.0, comfyui_graphs.lora_of)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

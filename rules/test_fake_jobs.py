"""Whole jobs on fake CUDA devices, from loading to receipts: the pictures are the CPUs', no tensor is on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image

from rules.fake_cuda import KIND
from rules.jobs import both
from support.adapters import save_sd3_controlnet, save_sd3_ip_adapter
from support.tiny import save_tiny_sd3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline, input pictures, and adapters."""
    folder = tmp_path_factory.mktemp("jobs")
    # Inpainting wants 16 channels.
    model = save_tiny_sd3(folder, 16)
    rows, columns = np.mgrid[0:48, 0:96]
    colours = np.stack([rows * 5, columns * 2, (rows + columns) % 256], axis=-1).astype(np.uint8)
    Image.fromarray(colours).save(folder / "picture.png")
    mask = Image.new("L", (32, 32))
    mask.paste(255, (8, 0, 24, 16))
    mask.save(folder / "mask.png")
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(model, subfolder="transformer")
    save_sd3_controlnet(folder / "controlnet", transformer)
    save_sd3_ip_adapter(folder / "ip", transformer)
    transformer.add_adapter(
        LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v", "net.2"], init_lora_weights=False)
    )
    weights = get_peft_model_state_dict(transformer)
    diffusers.StableDiffusion3Pipeline.save_lora_weights(
        folder, transformer_lora_layers=weights, weight_name="lora.safetensors"
    )
    return folder


INPAINTED = {"files": {"image": "picture.png", "mask": "mask.png"}, "strength": 0.7, "n": 2}
EDITED = {"files": {"image": "picture.png"}, "strength": 0.7, "n": 2}
CONTROLLED = {"files": {"control": "picture.png", "controlnet": "controlnet:0.7"}, "n": 2}
PROMPTED = {"files": {"ip-adapter": "ip:0.7", "ip-image": "picture.png"}, "n": 2}
ADAPTED = {"files": {"lora": "lora.safetensors:0.8"}}

ALONE: dict[str, dict[str, Any]] = {
    "inpainting": INPAINTED,
    "half precision, adapter": {**ADAPTED, "dtype": "bfloat16"},
    "two prompts, several calls": {"prompts": ("a red fox", "a blue fish"), "n": 3, "per_call": 2},
    "image to image": EDITED,
    "ControlNet": CONTROLLED,
    "IP-Adapter": PROMPTED,
    "offloaded": {"offload": "model"},
    "Heun": {"scheduler": "FlowMatchHeunDiscreteScheduler"},
    "automatic": {"config": "auto"},
}


def given(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    files = {role: f"{folder / name}" for role, name in fields.get("files", {}).items()}
    return {**fields, "files": files, "model": str(folder / "tiny-sd3")}


@pytest.mark.parametrize("name", ALONE)
def test_a_job_of_one_rank(folder, tmp_path, name):
    fields = ALONE[name]
    worst, truth, drawn = both(folder=str(tmp_path), **given(folder, fields))
    # A step of 8 bits; in half precision a few: kernels of a GPU are laid out otherwise.
    assert worst <= (4 if "dtype" in fields else 1)
    assert drawn.pictures
    assert drawn.reports == truth.reports
    assert drawn.looks == {}
    for one in drawn.receipts:
        assert one.device == KIND
        assert one.environment is not None
        device = one.environment["device"]
        assert device == "fake GPU" if KIND == "cuda" else "name='fake GPU'" in device


SEVERAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bands, encoders in pieces": (EDITED, {"ulysses": 2, "vae": "bands", "text_encoder": "sharded"}),
    "inpainting": (INPAINTED, {"ring": 2}),
    "encoders that are freed": ({"prompts": ("a red fox", "a blue fish")}, {"ulysses": 2, "text_encoder": "freed"}),
    "sharded": (ADAPTED, {"ulysses": 2, "shard": 2}),
    "tensor": (ADAPTED, {"tensor": 2}),
    "stages": ({}, {"pipe": 2, "warmup": "fixed(1)"}),
    "IP-Adapter": (PROMPTED, {"ulysses": 2}),
    "ControlNet": (CONTROLLED, {"ulysses": 2}),
    "rows": ({"n": 2}, {"data": 2}),
    "half precision": ({"dtype": "bfloat16"}, {"cfg": 2}),
    "reproducible": ({}, {"ring": 2, "reproducible": True}),
}
# Whether the ranks have the same latents; and that they connect, before the first step.
WAITS = {"strategies/same_latents.py _to_copy", "comm/transports.py wait with a deadline"}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_job_of_two_ranks(ranks, folder, tmp_path, name):
    fields, config = SEVERAL[name]
    asked = given(folder, {**fields, "config": config})
    found = ranks(2).run(job_on_ranks, str(tmp_path), asked)
    assert found[0][1]
    for worst, count, looks in found:
        assert worst <= (4 if "dtype" in fields else 1)
        assert count in (0, found[0][1])
        if name == "bands, encoders in pieces":
            assert set(looks) <= WAITS
            assert looks["comm/transports.py wait with a deadline"] <= 2


def job_on_ranks(folder: str, fields: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """The worst pixel, the number of pictures and what was waited for. A rank function."""
    worst, _, drawn = both(folder=folder, **fields)
    return worst, len(drawn.pictures), drawn.looks

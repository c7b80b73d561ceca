"""The programs of examples/recipes, and tiny random pipelines of the classes that they load."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import transformers

from support.exam import flow
from support.exam.stand_ins import letters
from support.hub import _flux
from support.models import component, fresh, variant
from support.tiny import save_tiny_sd3, save_tiny_wan, saved

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
STEPS, SIZE, FRAMES = 2, (64, 64), 5


def _qwen_image(folder: Path) -> Path:
    """Whose text encoder reads letters; its prompt template is as long as ever."""
    torch.manual_seed(0)
    pipe = diffusers.QwenImagePipeline(
        scheduler=flow(),
        text_encoder=component("qwen25_vl").eval(),
        vae=component("qwen vae saved"),
        tokenizer=letters(),
        transformer=variant("QwenImage"),
    )
    return saved(pipe, folder)


# What FLUX.2's tokenizer makes of the two messages of a prompt, in short.
CHAT = "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"


def _flux2(folder: Path) -> Path:
    """Whose text encoder has as many layers as the pipeline takes hidden states from."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters().backend_tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT
    )
    torch.manual_seed(0)
    pipe = diffusers.Flux2Pipeline(
        scheduler=flow(),
        text_encoder=component("mistral3").eval(),
        vae=fresh("kl_flux2 deep"),
        tokenizer=tokenizer,
        transformer=variant("Flux2", joint_attention_dim=48),
    )
    return saved(pipe, folder)


def _tiny_flux(folder: Path) -> Path:
    torch.manual_seed(0)
    return saved(_flux(), folder)


MODELS: dict[str, Callable[[Path], Path]] = {
    "flux1_dev": _tiny_flux,
    "flux1_dev_int8": _tiny_flux,
    "sd35_large": lambda folder: save_tiny_sd3(folder, 16),
    "qwen_image": _qwen_image,
    "wan21_14b": save_tiny_wan,
    "flux2_dev": _flux2,
}

QUANTISED = {"flux1_dev_int8"}

# What one device is asked for, by the pipeline of plain diffusers.
CALLS: dict[str, dict[str, Any]] = {
    "flux1_dev": {"guidance_scale": 3.5},
    "flux1_dev_int8": {"guidance_scale": 3.5},
    "sd35_large": {"negative_prompt": "blurry", "guidance_scale": 4.5},
    "qwen_image": {"negative_prompt": " ", "true_cfg_scale": 4.0},
    "wan21_14b": {"negative_prompt": "blurry, still", "guidance_scale": 5.0, "num_frames": FRAMES},
    "flux2_dev": {"guidance_scale": 4.0},
}


def alone(name: str, folder: Path) -> Any:
    """The pipeline of plain diffusers."""
    if name not in QUANTISED:
        return diffusers.DiffusionPipeline.from_pretrained(folder)
    from torchao.quantization import Int8WeightOnlyConfig

    int8 = diffusers.TorchAoConfig(Int8WeightOnlyConfig())
    transformer = diffusers.AutoModel.from_pretrained(
        str(folder), subfolder="transformer", quantization_config=int8, dtype=torch.bfloat16
    )
    return diffusers.DiffusionPipeline.from_pretrained(folder, transformer=transformer, dtype=torch.bfloat16)


def source(name: str, model: Path) -> str:
    """A program with its tiny model, in float32 if it can, and with few small steps; all else is as it stands."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    changes = {
        r"^MODEL = .*$": f"MODEL = {str(model)!r}",
        # diffusers quantises nothing else.
        **({} if name in QUANTISED else {r"torch\.bfloat16": "torch.float32"}),
        r"\b1024, 1024, \d+, 0$": f"{SIZE[0]}, {SIZE[1]}, {STEPS}, 0",
        r"^FRAMES, STEPS, SEED = .*$": f"FRAMES, STEPS, SEED = {FRAMES}, {STEPS}, 0",
        r"\((?:832, 480|1280, 720)\)": repr(SIZE),
        # What a video is written with is not installed for the tests.
        r"^from diffusers.utils import export_to_video$": "from support.recipes import export_to_video",
    }
    for old, new in changes.items():
        text = re.sub(old, lambda _, new=new: new, text, flags=re.MULTILINE)
    return text


def export_to_video(frames: Any, path: str, fps: int) -> None:
    """The frames as they are."""
    torch.save(torch.as_tensor(frames), path)


def run(text: str, machine: str, folder: str) -> None:
    """On a rank: a recipe as torchrun would start it, but for the process group, which stays."""
    ranks = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": dist.get_rank()}
    ranks |= {"LOCAL_WORLD_SIZE": dist.get_world_size()}
    leave, argv, before, home = dist.destroy_process_group, sys.argv, dict(os.environ), os.getcwd()
    dist.destroy_process_group = lambda group=None: None if group is None else leave(group)
    os.environ.update({key: str(value) for key, value in ranks.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.argv = ["recipe.py", machine]
    os.chdir(folder)
    try:
        exec(compile(text, "recipe.py", "exec"), vars(ModuleType("recipe")))
    finally:
        dist.destroy_process_group, sys.argv = leave, argv
        os.environ.clear()
        os.environ.update(before)
        os.chdir(home)

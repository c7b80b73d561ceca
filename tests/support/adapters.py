"""ControlNets and IP-Adapters with random weights, saved as diffusers loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from safetensors.torch import save_file
from torch import Tensor, nn

# Width of what the encoders say of a picture.
WIDTH = 16


def made(make: Callable[[], nn.Module], std: float = 0.05) -> nn.Module:
    """A module with the same random weights in every process, and no zeros among them."""
    module = make().eval()
    draw = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data = std * torch.randn(parameter.shape, generator=draw)
    return module


def save_sd3_controlnet(folder: Path, transformer: diffusers.SD3Transformer2DModel) -> Path:
    """A ControlNet of two blocks for a Stable Diffusion 3 transformer."""
    config = {**transformer.config, "num_layers": 2, "extra_conditioning_channels": 0}
    network = made(lambda: diffusers.SD3ControlNetModel.from_config(config))
    network.save_pretrained(folder)
    return folder


def save_sd3_ip_adapter(folder: Path, transformer: diffusers.SD3Transformer2DModel) -> Path:
    """An IP-Adapter for a Stable Diffusion 3 transformer, and its SigLIP encoder beside it."""
    config = transformer.config
    width = config["num_attention_heads"] * config["attention_head_dim"]
    projection = made(
        lambda: IPAdapterTimeImageProjection(
            embed_dim=WIDTH, output_dim=width, hidden_dim=WIDTH, dim_head=64, heads=1, num_queries=3, timestep_in_dim=8
        ),
        0.3,
    )
    tensors = {f"image_proj.{name}": value for name, value in projection.state_dict().items()}
    for number in range(len(transformer.attn_processors)):
        attention = made(
            lambda: SD3IPAdapterJointAttnProcessor2_0(width, width, config["attention_head_dim"], WIDTH), 0.3
        )
        tensors |= {f"ip_adapter.{number}.{name}": value for name, value in attention.state_dict().items()}
    vision = transformers.SiglipVisionConfig(
        hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    made(lambda: transformers.SiglipVisionModel(vision), 0.3).save_pretrained(folder / "image_encoder")
    size = {"height": 32, "width": 32}
    transformers.SiglipImageProcessor(size=size).save_pretrained(folder / "image_encoder")
    return _saved(tensors, folder / "ip-adapter.safetensors")


def _saved(tensors: dict[str, Tensor], file: Path) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    return file

"""Parts of pipelines that stand in for large ones, and changes of whole pipelines; pipelines.json names them."""

from __future__ import annotations

import copy
from functools import reduce
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

from support.models import fresh, made


def letters(longest: int = 24, chat: str | None = None) -> Any:
    """A tokenizer that knows the letters and nothing else: 101 tokens.

    Args:
        longest: tokens of a prompt.
        chat: template of a conversation.
    """
    marks = ["<|vision_start|>", "<|image_pad|>"]
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *marks, *(chr(code) for code in range(32, 127))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=marks,
        model_max_length=longest,
        padding_side="right",
        chat_template=chat,
    )


class Templates:
    """In place of the processor of a model of vision and language, of which embeddings have no need."""

    def __init__(self) -> None:
        self.tokenizer = letters()

    def apply_chat_template(self, messages: Any, tokenize: bool, return_dict: bool) -> list[list[int]]:
        return [[1, 2]]


class Pixels:
    """In place of the picture processor of a model of vision and language."""

    merge_size = 2

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Tensor]:
        seen = torch.from_numpy(np.asarray(images, dtype=np.float32) / 255)
        return {"pixel_values": seen, "image_grid_thw": torch.tensor([[1, 2, 4]])}


class Sight:
    """In place of the processor of a model of vision and language."""

    image_processor = Pixels()


class Reader(nn.Module):
    """A text encoder: embeds tokens, shifted by what it sees in pictures, in three layers."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(letters()), width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, pixel_values: Any = None, **_: Any
    ) -> SimpleNamespace:
        states = [self.embed(input_ids) + (0 if pixel_values is None else pixel_values.mean())]
        for layer in self.layers:
            states.append(torch.tanh(layer(states[-1])) + states[-1])
        return SimpleNamespace(hidden_states=tuple(states))


class Unguarded:
    """In place of Cosmos' safety checker, which is a package and a download of its own."""

    def to(self, device: Any) -> Unguarded:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


class Distant(diffusers.AutoencoderKLQwenImage):
    """An autoencoder for pictures of a million pixels: between it and them, they are shrunk and widened 32 times."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.temperal_downsample = [False] * 6

    def encode(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().encode(F.avg_pool3d(x, (1, 32, 32)), *args, **kwargs)

    def decode(self, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (F.interpolate(super().decode(z, *args, **kwargs)[0], scale_factor=(1, 32, 32)),)


class DistantKL(diffusers.AutoencoderKL):
    """An autoencoder for pictures of a million pixels, which it shrinks 32 times before it encodes them."""

    def encode(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().encode(F.avg_pool2d(x, 32), *args, **kwargs)


# --- what diffusers imports with torchvision only ---------------------------------------------------------------------


def cosmos_controlnet() -> nn.Module:
    """Latents, a mask of given frames and padding; the control has as many."""
    module = import_module("diffusers.models.controlnets.controlnet_cosmos")
    if not hasattr(module, "transforms"):
        module.transforms = SimpleNamespace(
            functional=SimpleNamespace(resize=lambda image, size, interpolation: F.interpolate(image, size)),
            InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        )
    return fresh("CosmosControlNetModel")


def omnigen_letters() -> Any:
    """The tokenizer; and what the pipeline's processor of pictures is made of."""
    from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

    pipeline_omnigen.OmniGenMultiModalProcessor = processor_omnigen.OmniGenMultiModalProcessor
    processor_omnigen.transforms = SimpleNamespace(
        Compose=lambda steps: lambda image: reduce(lambda made, step: step(made), steps, image),
        Lambda=lambda function: function,
        ToTensor=lambda: lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255,
        Normalize=lambda mean, std, inplace: lambda image: (image - mean[0]) / std[0],
    )
    return letters()


# --- changes of whole pipelines ---------------------------------------------------------------------------------------


def flux_adapter(pipe: Any) -> None:
    """An IP-Adapter, whose encoder of pictures is not loaded."""
    inner, joint = pipe.transformer.inner_dim, pipe.transformer.config.joint_attention_dim
    draw = torch.Generator().manual_seed(4)
    sizes = {"to_k_ip.weight": (inner, joint), "to_v_ip.weight": (inner, joint)}
    sizes |= {"to_k_ip.bias": (inner,), "to_v_ip.bias": (inner,)}
    adapter = {
        f"{block}.{name}": 0.2 * torch.randn(size, generator=draw)
        for block in range(len(pipe.transformer.transformer_blocks))
        for name, size in sizes.items()
    }
    projection = {
        "proj.weight": torch.randn(4 * joint, 10, generator=draw),
        "proj.bias": torch.randn(4 * joint, generator=draw),
        "norm.weight": torch.ones(joint),
        "norm.bias": torch.zeros(joint),
    }
    given = {"image_proj": projection, "ip_adapter": adapter}
    pipe.load_ip_adapter(given, weight_name="", subfolder="", image_encoder_pretrained_model_name_or_path=None)
    pipe.set_ip_adapter_scale(0.7)


def sd3_adapter(pipe: Any) -> None:
    """An IP-Adapter, whose encoder of pictures is not loaded."""
    heads, depth = 8, len(pipe.transformer.attn_processors)
    attention = [made(lambda: SD3IPAdapterJointAttnProcessor2_0(64, 64, heads, 16)) for _ in range(depth)]
    projection = made(
        lambda: IPAdapterTimeImageProjection(
            embed_dim=10, output_dim=64, hidden_dim=16, dim_head=64, heads=1, num_queries=3, timestep_in_dim=8
        )
    )
    pipe.transformer._load_ip_adapter_weights(
        {
            "image_proj": projection.state_dict(),
            "ip_adapter": {f"{n}.{key}": v for n, one in enumerate(attention) for key, v in one.state_dict().items()},
        },
        low_cpu_mem_usage=False,
    )
    pipe.set_ip_adapter_scale(0.7)


def _lora(pipe: Any, model: str) -> None:
    from support import lora

    pipe.load_lora_weights(copy.deepcopy(lora.adapter(model, 7)), adapter_name="a")


def sana_lora(pipe: Any) -> None:
    _lora(pipe, "Sana")


def cogview4_lora(pipe: Any) -> None:
    _lora(pipe, "CogView4")

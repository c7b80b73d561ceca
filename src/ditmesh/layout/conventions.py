"""Small inputs for any diffusers transformer, made from the names of its forward's parameters.

diffusers' transformers share a vocabulary (`hidden_states`, `encoder_hidden_states`, `timestep`, `img_ids` …)
and say their widths in their config. That is enough to call most of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import LayoutError

# Config entries that hold the width of `encoder_hidden_states`, most specific first.
TEXT_WIDTHS = (
    *("cross_attention_input_dim", "caption_channels", "joint_attention_dim", "text_hidden_dim", "text_embed_dim"),
    *("cross_attention_dim", "text_dim", "cap_feat_dim", "context_in_dim"),
    *("cond_token_dim", "condition_dim", "dit_text_dim"),
)

# Forms of latents: images, packed tokens, videos (channels or frames first), sounds, a list of (C, F, H, W).
Form = Literal["bchw", "bsc", "bcfhw", "bfchw", "bcs", "list"]
FORMS: tuple[Form, ...] = ("bchw", "bsc", "bcfhw", "bfchw", "bcs")
# The tokens that `attention_mask` of the forward masks, where there is one.
Masked = Literal["image", "text", "joint", "nothing"]


@dataclass(frozen=True)
class Size:
    """Size of a sample: image tokens are rows × cols × frames; text and audio tokens."""

    rows: int
    cols: int
    text: int
    batch: int = 2
    frames: int = 1
    audio: int = 7

    @property
    def image(self) -> int:
        """Image tokens."""
        return self.rows * self.cols * self.frames


@dataclass(frozen=True)
class CallVariant:
    """A way to call a transformer.

    Attributes:
        form: how its latents lie.
        optional: pass optional arguments too (masks, rotary tables), so that a probe sees what follows them.
        masked: what `attention_mask` covers.
    """

    form: Form
    optional: bool = False
    masked: Masked = "nothing"


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Conventions:
    """Makes the keyword arguments of a transformer's forward."""

    size: Size
    generator: torch.Generator

    def __init__(self, model: nn.Module, way: CallVariant) -> None:
        self.config: Any = model.config
        self.way = way
        self.parameters = inspect.signature(type(model).forward).parameters
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    @property
    def small(self) -> Size:
        """Size to probe with. No two kinds of token are as many, nor as many as there are samples.

        Square images, because some models recover rows and columns from the number of tokens. Models that
        take lists pad them to multiples of 32 tokens, so theirs are.
        """
        if self.way.form == "list":
            return Size(8, 8, 32)
        return Size(4, 4, 5, frames=self.entry("video_length") or (2 if self.way.form in ("bcfhw", "bfchw") else 1))

    def inputs(self, size: Size) -> dict[str, Any]:
        """Arguments by name, the same for a size; `LayoutError`: one or its entry of the config cannot be made."""
        self.size, self.generator, values = size, torch.Generator().manual_seed(0), dict[str, Any]()
        for name, parameter in self.parameters.items():
            # Random ones in the order in which they are asked for.
            value = _ARGUMENTS[name](self) if name in _ARGUMENTS else None
            if value is not None:
                values[name] = value
            elif name != "self" and parameter.default is parameter.empty and parameter.kind in _BY_NAME:
                raise LayoutError(f"its forward wants the argument {name!r}, which the probe cannot make")
        return values

    def need(self, name: str) -> Any:
        """An entry of the config that inputs cannot be made without."""
        value = self.entry(name)
        if value is None:
            raise LayoutError(f"its config has no {name}, without which the probe cannot make its inputs")
        return value

    def entry(self, *names: str) -> Any:
        """The first of some entries of the config that is there and not None."""
        return next((value for name in names if (value := getattr(self.config, name, None)) is not None), None)

    @property
    def plane(self) -> tuple[int, int]:
        """Rows and columns of latents."""
        patch = self.entry("patch_size", "all_patch_size") or 1
        patch = patch[-1] if isinstance(patch, (tuple, list)) else patch
        return self.size.rows * patch, self.size.cols * patch

    def noise(self, *shape: int | str) -> Tensor:
        """Random numbers; a name in the shape stands for that entry of the config."""
        sizes = [self.need(size) if isinstance(size, str) else size for size in shape]
        return torch.randn(sizes, generator=self.generator).to(self.device, self.dtype)

    def vectors(self, entry: str, *tokens: int | str) -> Tensor | None:
        """Random vectors of each sample, as wide as the config's entry says, if it has that."""
        width = self.entry(entry)
        return self.noise(self.size.batch, *tokens, width) if width else None

    def text(self) -> Tensor | None:
        layers, width = self.entry("num_text_layers"), self.entry(*TEXT_WIDTHS)
        tokens = self.entry("text_len") or self.size.text
        return self.noise(self.size.batch, tokens, *([layers] if layers else []), width) if width else None

    def listed(self, *shape: int | str) -> list[Tensor] | None:
        """A random tensor for every sample, for models that take lists."""
        return [self.noise(*shape) for _ in range(self.size.batch)] if self.way.form == "list" else None

    def latents(self) -> Tensor:
        channels, frames, tokens = self.entry("in_channels") or 4, self.size.frames, self.size.image
        if "video_indices" in self.parameters:
            # Squares of latents lie in the channels.
            channels *= prod(self.need("patch_size"))
        shapes: dict[Form, tuple[int, ...]] = {
            "bsc": (tokens, channels),
            "bcs": (channels, tokens),
            "bchw": (channels, *self.plane),
            "bcfhw": (channels, frames, *self.plane),
            "bfchw": (frames, channels, *self.plane),
        }
        return self.noise(self.size.batch, *shapes[self.way.form])

    def full(self, value: float, *columns: int) -> Tensor:
        return torch.full((self.size.batch, *columns), value, device=self.device)

    def mask(self, tokens: int) -> Tensor:
        # One padding token, where padding is allowed: models drop a mask that hides nothing.
        ones = torch.ones(self.size.batch, tokens, dtype=torch.bool, device=self.device)
        if self.way.optional and self.size.batch > 1 and tokens > 1:
            ones[0, -1] = False
        return ones

    def text_mask(self, name: str) -> Tensor | None:
        parameter = self.parameters[name]
        return self.mask(self.size.text) if self.way.optional or parameter.default is parameter.empty else None

    def attention_mask(self) -> Tensor | None:
        image, text = self.size.image, self.size.text
        tokens = {"image": image, "text": text, "joint": image + text, "nothing": 0}[self.way.masked]
        return self.mask(tokens) if self.way.optional and tokens else None

    def joint_mask(self) -> dict[str, Tensor] | None:
        if not self.way.optional or self.way.masked != "nothing":
            return None
        tokens = self.size.image + self.size.text
        return {"attention_mask": torch.ones(self.size.batch, 1, 1, tokens, dtype=torch.bool, device=self.device)}

    def ids(self, text: bool = False, image: bool = False) -> Tensor:
        """Positions (tokens, axes): those of text are zero, those of the image rows and columns."""
        columns = len(self.entry("axes_dims_rope") or (0, 0, 0))
        rows, size = self.size.rows * self.size.frames, self.size
        ids = torch.zeros(size.text * text + size.image * image, columns)
        if image:
            ids[-size.image :, 1] = torch.arange(rows).repeat_interleave(size.cols)
            ids[-size.image :, 2] = torch.arange(size.cols).repeat(rows)
        return ids.to(self.device, self.dtype)

    def places(self, start: int, tokens: int) -> Tensor:
        """Where a kind of token stands in one sequence of text, sound and video."""
        return torch.arange(start, start + tokens, device=self.device)

    def packed(self) -> Tensor:
        """The kind of each token of that sequence, as MiniMax-H3 counts them."""
        kinds = {1: self.size.text, 2: self.size.audio, 0: self.size.image}
        return torch.cat([torch.full((tokens,), kind, device=self.device) for kind, tokens in kinds.items()])

    def rotary(self, tokens: int, width: int) -> tuple[Tensor, Tensor]:
        angles = self.noise(tokens, width)
        return angles.cos(), angles.sin()


# Arguments of a transformer's forward by diffusers' names, and what makes them: None where the model takes none.
_ARGUMENTS: dict[str, Callable[[Conventions], Any]] = {
    "hidden_states": lambda i: i.latents(),
    "x": lambda i: i.listed("in_channels", i.size.frames, *i.plane),
    "cap_feats": lambda i: i.listed(i.size.text, "cap_feat_dim"),
    "encoder_hidden_states": lambda i: i.text(),
    "encoder_hidden_states_2": lambda i: i.vectors("text_embed_2_dim", 2),
    "encoder_hidden_states_t5": lambda i: i.vectors("cross_attention_dim_t5", "text_len_t5"),
    "encoder_hidden_states_image": lambda i: i.vectors("image_dim", 4),
    "audio_encoder_hidden_states": lambda i: i.text(),
    "audio_hidden_states": lambda i: i.noise(i.size.batch, i.size.audio, "audio_in_channels"),
    "image_embeds": lambda i: i.vectors("image_embed_dim", 3),
    "pooled_projections": lambda i: i.vectors("pooled_projection_dim"),
    "global_hidden_states": lambda i: i.vectors("global_states_input_dim", 1),
    # Each kind of a packed sequence has a noise level of its own.
    "timestep": lambda i: i.noise(3) if "timestep_indices" in i.parameters else i.full(500.0).to(i.dtype),
    "timestep_r": lambda i: i.full(500.0).to(i.dtype) if i.entry("use_meanflow") else None,
    "t": lambda i: i.full(0.5),
    "guidance": lambda i: i.full(3.5) if i.entry("guidance_embeds") else None,
    "class_labels": lambda i: i.full(0).long(),
    "style": lambda i: i.full(0).long(),
    "image_meta_size": lambda i: i.full(64.0, 6),
    "original_size": lambda i: i.full(64.0, 2),
    "target_size": lambda i: i.full(64.0, 2),
    "crop_coords": lambda i: i.full(0.0, 2),
    "img_ids": lambda i: i.ids(image=True),
    "txt_ids": lambda i: i.ids(text=True),
    "position_ids": lambda i: (
        i.places(0, 3 * len(i.packed())).view(-1, 3) if "token_tags" in i.parameters else i.ids(text=True, image=True)
    ),
    "timestep_indices": lambda i: i.packed(),
    "token_tags": lambda i: i.packed(),
    "text_indices": lambda i: i.places(0, i.size.text),
    "audio_indices": lambda i: i.places(i.size.text, i.size.audio),
    "video_indices": lambda i: i.places(i.size.text + i.size.audio, i.size.image),
    "image_rotary_emb": lambda i: i.rotary(i.size.image, i.need("attention_head_dim")) if i.way.optional else None,
    "rotary_embedding": lambda i: i.rotary(i.size.image + 1, i.need("attention_head_dim") // 2),
    "fps": lambda i: [0] * i.size.batch if i.entry("inject_sample_info") else None,
    "img_shapes": lambda i: [[(i.size.frames, i.size.rows, i.size.cols)]] * i.size.batch,
    "num_frames": lambda i: i.size.frames,
    "height": lambda i: i.size.rows,
    "width": lambda i: i.size.cols,
    "audio_num_frames": lambda i: i.size.audio,
    "padding_mask": lambda i: torch.zeros(1, 1, *i.plane, device=i.device),
    "text_embedding_mask": lambda i: i.mask(i.need("text_len")),
    "text_embedding_mask_t5": lambda i: i.mask(i.need("text_len_t5")),
    "encoder_attention_mask": lambda i: i.text_mask("encoder_attention_mask"),
    "encoder_attention_mask_2": lambda i: i.mask(2) if i.entry("text_embed_2_dim") else None,
    "encoder_hidden_states_mask": lambda i: i.text_mask("encoder_hidden_states_mask"),
    "audio_encoder_attention_mask": lambda i: i.text_mask("audio_encoder_attention_mask"),
    "attention_mask": lambda i: i.attention_mask(),
    "joint_attention_kwargs": lambda i: i.joint_mask(),
    "added_cond_kwargs": lambda i: {"resolution": i.full(64.0, 2), "aspect_ratio": i.full(1.0, 1)},
    "return_dict": lambda i: False,
}


def call_variants(model: nn.Module) -> Iterator[CallVariant]:
    """Ways to call the model, the most informative first; the caller tries them in turn."""
    parameters = inspect.signature(type(model).forward).parameters
    forms: tuple[Form, ...] = FORMS if "hidden_states" in parameters else ("list",)
    masked: tuple[Masked, ...] = ("image", "text", "joint") if "attention_mask" in parameters else ()
    for optional, form in product((True, False), forms):
        for mask in (*masked, "nothing") if optional else ("nothing",):
            yield CallVariant(form, optional, mask)

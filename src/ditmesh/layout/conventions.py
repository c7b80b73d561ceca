"""Small inputs for any diffusers transformer, made from the names of its forward's parameters.

diffusers' transformers share a vocabulary (`hidden_states`, `encoder_hidden_states`, `timestep`, `img_ids` …)
and say their widths in their config. That is enough to call most of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import LayoutError
from .forms import kind_of

# Config entries that hold the width of `encoder_hidden_states`, most specific first.
TEXT_WIDTHS = (
    "cross_attention_input_dim",
    "caption_channels",
    "joint_attention_dim",
    "text_hidden_dim",
    "text_embed_dim",
    "cross_attention_dim",
    "text_dim",
    "cap_feat_dim",
    "context_in_dim",
    "cond_token_dim",
    "condition_dim",
    "dit_text_dim",
)

# How latents lie: pictures, packed tokens, videos (channels or frames first), sounds, a list of (C, F, H, W).
Form = Literal["bchw", "bsc", "bcfhw", "bfchw", "bcs", "list"]
FORMS: tuple[Form, ...] = ("bchw", "bsc", "bcfhw", "bfchw", "bcs")
# What `attention_mask` of the forward is a mask of, where there is one.
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
class Way:
    """A way to call a transformer.

    Attributes:
        form: how its latents lie.
        optional: pass optional arguments too (masks, rotary tables), so that a probe sees what follows them.
        masked: what `attention_mask` covers.
        per_token: a timestep for every token, as image-to-video pipelines pass it.
    """

    form: Form
    optional: bool = False
    masked: Masked = "nothing"
    per_token: bool = False

    def __str__(self) -> str:
        parts = [f"latents as {self.form}"]
        parts += ["with masks" if self.masked == "nothing" else f"with masks of {self.masked} tokens"] * self.optional
        parts += ["a timestep per token"] * self.per_token
        return ", ".join(parts)


class Conventions:
    """Makes the keyword arguments of a transformer's forward.

    Args:
        model: the transformer; its config tells widths.
        way: how to call it.
    """

    def __init__(self, model: nn.Module, way: Way) -> None:
        self.config: Any = model.config
        self.way = way
        self.parameters = inspect.signature(type(model).forward).parameters
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    @property
    def sizes(self) -> dict[str, Size]:
        """Sizes to probe with: ``"base"``, and for every kind of token (``"image"``, ``"text"`` …) one with more of it.

        Square pictures, because some models recover rows and columns from the number of tokens. Models that
        take lists pad them to multiples of 32 tokens, so theirs are.
        """
        frames = self._first(("video_length",)) or (2 if self.way.form in ("bcfhw", "bfchw") else 1)
        base = Size(4, 4, 5, frames=frames)
        sizes = {"base": base, "image": replace(base, rows=6, cols=6), "text": replace(base, text=8)}
        if self.way.form == "list":
            base = Size(4, 8, 32)
            sizes = {"base": base, "image": replace(base, rows=8), "text": replace(base, text=64)}
        if "audio_hidden_states" in self.parameters:
            sizes["audio"] = replace(base, audio=10)
        return sizes

    def inputs(self, size: Size, seed: int = 0) -> dict[str, Any]:
        """Arguments by name, the same for the same size and seed."""
        generator = torch.Generator().manual_seed(seed)
        made = {name: self._make(name, size, generator) for name in self.parameters}
        return {name: value for name, value in made.items() if value is not None}

    @property
    def fits(self) -> bool:
        """Whether this way of calling can be that of the call to be made."""
        return True

    def missing(self, size: Size) -> str:
        """What the model wants and cannot be made: an argument, or a width in the config; empty for none."""
        made = self.inputs(size)
        for name, parameter in self.parameters.items():
            variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if name in made or name == "self" or variadic:
                continue
            if name in ("encoder_hidden_states", "cap_feats"):
                return f"its config has no width for the argument {name!r} (none of {', '.join(TEXT_WIDTHS)})"
            if parameter.default is inspect.Parameter.empty:
                return f"its forward wants the argument {name!r}, which the probe cannot make"
        return ""

    def left_out(self, size: Size) -> list[str]:
        """Arguments that are optional by the forward's signature, and are not made."""
        made = self.inputs(size)
        return [name for name, given in self.parameters.items() if given.default is None and name not in made]

    def _make(self, name: str, size: Size, generator: torch.Generator) -> Any:
        batch = size.batch

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        def mask(tokens: int) -> Tensor:
            # One padding token, where padding is allowed: models drop a mask that hides nothing.
            ones = torch.ones(batch, tokens, dtype=torch.bool, device=self.device)
            if self.way.optional and batch > 1 and tokens > 1:
                ones[0, -1] = False
            return ones

        def full(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, device=self.device)

        wanted = self.way.optional or self.parameters[name].default is inspect.Parameter.empty
        match name:
            case "hidden_states":
                return noise(*self._latent_shape(size))
            case "encoder_hidden_states" | "audio_encoder_hidden_states":
                return self._text(size, noise)
            case "encoder_hidden_states_2" if width := self._first(("text_embed_2_dim",)):
                return noise(batch, 2, width)
            case "encoder_hidden_states_t5" if width := self._first(("cross_attention_dim_t5",)):
                return noise(batch, self._need("text_len_t5"), width)
            case "encoder_hidden_states_image" if width := self._first(("image_dim",)):
                return noise(batch, 4, width)
            case "image_embeds" if width := self._first(("image_embed_dim",)):
                return noise(batch, 3, width)
            case "audio_hidden_states":
                return noise(batch, size.audio, self._need("audio_in_channels"))
            case "x" if self.way.form == "list":
                patch = self._patch()
                shape = (self._need("in_channels"), size.frames, size.rows * patch, size.cols * patch)
                return [noise(*shape) for _ in range(batch)]
            case "cap_feats" if self.way.form == "list":
                return [noise(size.text, self._need("cap_feat_dim")) for _ in range(batch)]
            case "pooled_projections":
                width = self._first(("pooled_projection_dim",))
                return noise(batch, width) if width else None
            case "global_hidden_states" if width := self._first(("global_states_input_dim",)):
                return noise(batch, 1, width)
            case "timestep" if self.way.per_token:
                if self.way.form == "bcfhw" and "fps" in self.parameters:
                    return torch.linspace(0.1, 0.9, size.frames, device=self.device).expand(batch, -1)[
                        :, None, :, None, None
                    ]
                return torch.linspace(1, 900, size.image, device=self.device).expand(batch, -1)
            case "audio_timestep" if self.way.per_token:
                return torch.linspace(1, 900, size.audio, device=self.device).expand(batch, -1)
            case "timestep" | "timestep_r" if name == "timestep" or self._first(("use_meanflow",)):
                return full(500.0, batch).to(self.dtype)
            case "t":
                return full(0.5, batch)
            case "class_labels" | "style":
                return torch.zeros(batch, dtype=torch.long, device=self.device)
            case "image_meta_size":
                return full(64.0, batch, 6)
            case "original_size" | "target_size":
                return full(64.0, batch, 2)
            case "crop_coords":
                return full(0.0, batch, 2)
            case "guidance" if self._first(("guidance_embeds",)):
                return full(3.5, batch)
            case "img_ids":
                return self._image_ids(size)
            case "txt_ids":
                return torch.zeros(size.text, self._id_columns(), device=self.device, dtype=self.dtype)
            case "position_ids":
                zeros = torch.zeros(size.text, self._id_columns(), device=self.device, dtype=self.dtype)
                return torch.cat([zeros, self._image_ids(size)])
            case "fps" if self._first(("inject_sample_info",)):
                return [0] * batch
            case "img_shapes":
                return [[(size.frames, size.rows, size.cols)]] * batch
            case "num_frames":
                return size.frames
            case "height":
                return size.rows
            case "width":
                return size.cols
            case "audio_num_frames":
                return size.audio
            case "image_rotary_emb" if self.way.optional:
                return self._rotary(size.image, self._need("attention_head_dim"), generator)
            case "rotary_embedding":
                return self._rotary(size.image + 1, self._need("attention_head_dim") // 2, generator)
            case "padding_mask":
                return full(0.0, 1, 1, size.rows * self._patch(), size.cols * self._patch())
            case "added_cond_kwargs":
                return {"resolution": None, "aspect_ratio": None}
            case "return_dict":
                return False
            case "text_embedding_mask":
                return mask(self._need("text_len"))
            case "text_embedding_mask_t5":
                return mask(self._need("text_len_t5"))
            case "encoder_attention_mask_2" if self._first(("text_embed_2_dim",)):
                return mask(2)
            case "encoder_attention_mask" | "encoder_hidden_states_mask" | "audio_encoder_attention_mask" if wanted:
                return mask(size.text)
            case "attention_mask" if self.way.optional and self.way.masked != "nothing":
                tokens = {"image": size.image, "text": size.text, "joint": size.image + size.text}
                return mask(tokens[self.way.masked])
            case "joint_attention_kwargs" if self.way.optional and self.way.masked == "nothing":
                ones = torch.ones(batch, 1, 1, size.image + size.text, dtype=torch.bool, device=self.device)
                return {"attention_mask": ones}
        return None

    def _text(self, size: Size, noise: Callable[..., Tensor]) -> Tensor | None:
        width = self._first(TEXT_WIDTHS)
        if not width:
            return None
        tokens = self._first(("text_len",)) or size.text
        layers = self._first(("num_text_layers",))
        return noise(size.batch, tokens, layers, width) if layers else noise(size.batch, tokens, width)

    def _rotary(self, tokens: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        angles = torch.randn(tokens, width, generator=generator).to(self.device, self.dtype)
        return angles.cos(), angles.sin()

    def _id_columns(self) -> int:
        return len(self._first(("axes_dims_rope",)) or (0, 0, 0))

    def _image_ids(self, size: Size) -> Tensor:
        rows = torch.arange(size.rows * size.frames).repeat_interleave(size.cols)
        cols = torch.arange(size.cols).repeat(size.rows * size.frames)
        columns = [torch.zeros_like(rows), rows, cols] + [torch.zeros_like(rows)] * (self._id_columns() - 3)
        return torch.stack(columns, dim=-1).to(self.device, self.dtype)

    def _patch(self) -> int:
        patch = self._first(("patch_size", "all_patch_size")) or 1
        return patch[-1] if isinstance(patch, (tuple, list)) else patch

    def _latent_shape(self, size: Size) -> tuple[int, ...]:
        channels, batch = self._first(("in_channels",)) or 4, size.batch
        plane = (size.rows * self._patch(), size.cols * self._patch())
        return {
            "bsc": (batch, size.image, channels),
            "bcs": (batch, channels, size.image),
            "bchw": (batch, channels, *plane),
            "bcfhw": (batch, channels, size.frames, *plane),
            "bfchw": (batch, size.frames, channels, *plane),
        }[self.way.form]

    def _need(self, name: str) -> Any:
        """An entry of the config that inputs cannot be made without."""
        value = getattr(self.config, name, None)
        if value is None:
            raise LayoutError(f"its config has no {name}, without which the probe cannot make its inputs")
        return value

    def _first(self, names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := getattr(self.config, name, None)) is not None), None)


class LiveConventions(Conventions):
    """Makes arguments of the form of a call that was made.

    An argument that the conventions make of the same kind is theirs; any other is the call's own tensor, cut down
    (or repeated) along the dimensions whose size is that of the call's batch, plane, image or text tokens. Flags,
    texts and numbers are the call's.

    Args:
        model: see `Conventions`.
        way: how the latents lie.
        call: the arguments that came, by name, without those that are None.
        batch: samples.
    """

    def __init__(self, model: nn.Module, way: Way, call: Mapping[str, Any], batch: int = 2) -> None:
        super().__init__(model, way)
        self.call = call
        self.batch = batch
        main = call.get("hidden_states")
        self.main: Tensor | None = main if isinstance(main, Tensor) else None
        text = next((call[name] for name in ("encoder_hidden_states", "cap_feats") if name in call), None)
        self.text = text.shape[-2] if isinstance(text, Tensor) and text.dim() >= 3 else 0

    @property
    def fits(self) -> bool:
        """Whether the call's latents lie in this way."""
        channels = self._first(("in_channels",))
        if self.main is None:
            return self.way.form == "list"
        shape, places = self.main.shape, {"bchw": 1, "bcfhw": 1, "bcs": 1, "bsc": 2, "bfchw": 2}
        return self.main.dim() == len(self.way.form) and channels in (None, shape[places[self.way.form]])

    @property
    def sizes(self) -> dict[str, Size]:
        """As in `Conventions`, with the frames of the call: some models treat one frame otherwise."""
        axis = self.way.form.find("f")
        changes = {"batch": self.batch}
        if self.main is not None and axis >= 0:
            changes["frames"] = self.main.shape[axis]
        return {name: replace(size, **changes) for name, size in super().sizes.items()}

    def inputs(self, size: Size, seed: int = 0) -> dict[str, Any]:
        """See `Conventions`."""
        made = super().inputs(size, seed)
        return {
            name: made[name] if name in made and kind_of(made[name]) == kind_of(value) else self._resized(value, size)
            for name, value in self.call.items()
        }

    def missing(self, size: Size) -> str:
        """Nothing: all arguments are the call's."""
        return ""

    def _resized(self, value: Any, size: Size) -> Any:
        if isinstance(value, Tensor):
            for dim in range(value.dim()):
                wanted = self._wanted(value, dim, size)
                if wanted != value.shape[dim]:
                    value = value.index_select(dim, torch.arange(wanted, device=value.device) % value.shape[dim])
            return value
        if isinstance(value, dict):
            return {key: self._resized(item, size) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            items = [self._resized(item, size) for item in value]
            batch = None if self.main is None else self.main.shape[0]
            if isinstance(value, list) and len(items) == batch and items:
                items = [items[index % len(items)] for index in range(size.batch)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _wanted(self, value: Tensor, dim: int, size: Size) -> int:
        """The size that a dimension of one of the call's tensors is to have."""
        if self.main is None:
            return value.shape[dim]
        here, main, patch = value.shape[dim], self.main.shape, self._patch()
        if dim == 0 and here == main[0]:
            return size.batch
        planes = self.way.form.endswith("hw")
        if planes and value.dim() >= 4 and value.shape[-2:] == main[-2:] and dim >= value.dim() - 2:
            return (size.rows if dim == value.dim() - 2 else size.cols) * patch
        # The last dimension of numbers in three dimensions holds channels.
        if dim == 0 or here == 1 or (value.is_floating_point() and value.dim() >= 3 and dim == value.dim() - 1):
            return here
        image = main[self.way.form.find("s")] if "s" in self.way.form else _product(main[-2:]) // patch**2
        image *= size.frames if planes and "f" in self.way.form else 1
        tokens = {image: size.image, self.text: size.text, image + self.text: size.image + size.text}
        return tokens.get(here, here) if here else here


def _product(sizes: torch.Size) -> int:
    return sizes[0] * sizes[1]


def ways(model: nn.Module) -> Iterator[Way]:
    """Ways to call the model, the most informative first; the caller tries them in turn."""
    parameters = inspect.signature(type(model).forward).parameters
    forms: tuple[Form, ...] = FORMS if "hidden_states" in parameters else ("list",)
    masked: tuple[Masked, ...] = ("image", "text", "joint") if "attention_mask" in parameters else ()
    for optional, form in product((True, False), forms):
        for mask in (*masked, "nothing") if optional else ("nothing",):
            yield Way(form, optional, mask)

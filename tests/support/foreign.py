"""Small transformers with the manners of other people's code, which no table knows.

Blocks write to their arguments, modulations are dataclasses, every block is given a dict of options with patches and
identifiers, attention goes through a function that an option may replace, an argument without a default may be None,
and tokens of a film keep their three dimensions.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DEPTH = 32, 4, 2


@dataclass
class Modulation:
    """What a block does to its tokens; one row per sample, or one for every so many tokens."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Pair(NamedTuple):
    """The modulations of the image's and the text's tokens."""

    image: Modulation
    text: Modulation


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, options: Any = None) -> Tensor:
    """Attention of tensors (B, H, S, D), as (B, S, H·D); an option may stand in for it."""
    override = (options or {}).get("attention_override")
    if override is not None:
        return override(_attention, q, k, v, mask)
    return _attention(q, k, v, mask)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def turned(x: Tensor, pe: Tensor) -> Tensor:
    """Rotated by a table (B, 1, S, D/2, 2, 2)."""
    pairs = x.unflatten(-1, (-1, 1, 2))
    return (pe[..., 0] * pairs[..., 0] + pe[..., 1] * pairs[..., 1]).flatten(3)


def table(positions: Tensor, width: int) -> Tensor:
    """A rotary table for positions (S, axes)."""
    angles = (positions.sum(-1, keepdim=True) + 1) * torch.linspace(0.05, 1, width // 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))[None, None]


class Double(nn.Module):
    """Two streams; writes to both."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.image_out, self.text_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, img, txt, vec, pe, attn_mask=None, transformer_options=None):
        pair = vec[0]
        norm = [F.layer_norm(one, (WIDTH,)) for one in (img, txt)]
        given = [(1 + mod.scale) * one + mod.shift for one, mod in zip(norm, pair, strict=True)]
        parts = zip(split(self.text(given[1])), split(self.image(given[0])), strict=True)
        q, k, v = (torch.cat(pieces, 2) for pieces in parts)
        answer = attention(turned(q, pe), turned(k, pe), v, attn_mask, transformer_options)
        text = txt.shape[1]
        img += pair.image.gate * self.image_out(answer[:, text:])
        txt += pair.text.gate * self.text_out(answer[:, :text])
        for patch in (transformer_options or {}).get("patches", {}).get("double", ()):
            img = patch(img, transformer_options)
        return img, txt


class Single(nn.Module):
    """One stream of text and image; writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x, vec, pe, attn_mask=None, transformer_options=None):
        qkv, mlp = self.inner((1 + vec.scale) * F.layer_norm(x, (WIDTH,)) + vec.shift).split([3 * WIDTH, 2 * WIDTH], -1)
        q, k, v = split(qkv)
        answer = attention(turned(q, pe), turned(k, pe), v, attn_mask, transformer_options)
        x.addcmul_(vec.gate.expand_as(x), self.outer(torch.cat([answer, F.gelu(mlp)], -1)))
        return x


class ForeignImage(nn.Module):
    """(B, 4, H, W) latents and text (B, T, 8) to (B, 4, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.img_in, self.txt_in, self.mod = nn.Linear(4, WIDTH), nn.Linear(8, WIDTH), nn.Linear(1, 9 * WIDTH)
        self.double_blocks = nn.ModuleList(Double() for _ in range(DEPTH))
        self.single_blocks = nn.ModuleList(Single() for _ in range(DEPTH))
        self.final = nn.Linear(WIDTH, 4)

    def forward(
        self, x, timestep, context, attention_mask, ref_latents=None, control=None, transformer_options=None, **kwargs
    ):
        tokens = x.shape[-2] * x.shape[-1]
        pictures = [x, *(ref_latents or [])]
        img = self.img_in(torch.cat([one.flatten(2).transpose(1, 2) for one in pictures], 1))
        places = [torch.cartesian_prod(torch.arange(one.shape[-2]), torch.arange(one.shape[-1])) for one in pictures]
        txt = self.txt_in(context)
        pe = table(torch.cat([torch.zeros(txt.shape[1], 2), *places]), WIDTH // HEADS)
        parts = [Modulation(*one.chunk(3, -1)) for one in self.mod(timestep[:, None, None]).tanh().chunk(3, -1)]
        for number, block in enumerate(self.double_blocks):
            img, txt = block(
                img=img,
                txt=txt,
                vec=(Pair(*parts[:2]),),
                pe=pe,
                attn_mask=attention_mask,
                transformer_options=transformer_options,
            )
            if control is not None:
                img[:, : control[number].shape[1]] += control[number]
        text, img = txt.shape[1], torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=parts[2], pe=pe, attn_mask=attention_mask, transformer_options=transformer_options)
        return self.final(img[:, text : text + tokens]).transpose(1, 2).unflatten(2, x.shape[-2:])


class FilmBlock(nn.Module):
    """Tokens (B, T, H, W, C), a modulation for every frame; attention to itself, then to the text."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.q, self.kv = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(8, 2 * WIDTH)
        self.mod, self.ff = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, emb, text, rope, extra=None, transformer_options=None):
        x = x if extra is None else x + extra
        shift, scale, gate = (one[:, :, None, None] for one in self.mod(emb).chunk(3, -1))
        shape = x.shape
        given = (F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift).flatten(1, 3)
        q, k, v = split(self.qkv(given))
        answer = attention(turned(q, rope), turned(k, rope), v, None, transformer_options)
        x = x + gate * answer.unflatten(1, shape[1:4])
        k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.kv(text).chunk(2, -1))
        q = self.q(x.flatten(1, 3)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        x = x + attention(q, k, v, None, transformer_options).unflatten(1, shape[1:4])
        return x + self.ff(x)


class ForeignFilm(nn.Module):
    """(B, 4, T, H, W) latents and text (B, N, 8) to (B, 4, T, H, W); ``timesteps`` (B,) or (B, T)."""

    block: type[nn.Module] = FilmBlock

    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x_in, self.emb, self.final = nn.Linear(4, WIDTH), nn.Linear(1, WIDTH), nn.Linear(WIDTH, 4)
        self.extra = nn.Linear(3, WIDTH) if extra else None
        self.blocks = nn.ModuleList(self.block() for _ in range(DEPTH))

    def forward(self, x, timesteps, context, transformer_options=None, **kwargs):
        tokens = self.x_in(x.movedim(1, -1))
        places = torch.cartesian_prod(*(torch.arange(n) for n in tokens.shape[1:4])).reshape(*tokens.shape[1:4], 3)
        extra = None if self.extra is None else self.extra(places / 10)[None]
        emb = self.emb(timesteps.reshape(len(x), -1, 1)).sin()
        for block in self.blocks:
            rope = table(places.flatten(0, 2), WIDTH // HEADS)
            tokens = block(tokens, emb, context, rope, extra, transformer_options)
        return (self.final(tokens) * (1 + emb[:, :, None, None, :4])).movedim(-1, 1)


def options(batch: int, **more: Any) -> dict[str, Any]:
    """What every call and block is given beside tensors."""
    return {
        "uuids": [uuid.UUID(int=7)] * batch,
        "cond_or_uncond": [0] * batch,
        "path": PurePosixPath("a/b"),
        "sigmas": torch.linspace(0.4, 0.9, batch),
        "patches": {},
        **more,
    }


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def image_call(batch: int = 1, **more: Any) -> dict[str, Any]:
    """Arguments of `ForeignImage`; the mask is None and has no default."""
    return {
        "x": noise(batch, 4, 5, 6),
        "timestep": torch.linspace(0.3, 0.8, batch),
        "context": noise(batch, 9, 8, seed=2),
        "attention_mask": None,
        "transformer_options": options(batch),
        **more,
    }


def film_call(batch: int = 1, frames: int = 3, each: bool = False, **more: Any) -> dict[str, Any]:
    """Arguments of `ForeignFilm`; with ``each`` a timestep for every frame."""
    times = torch.linspace(0.3, 0.8, batch)
    return {
        "x": noise(batch, 4, frames, 3, 5),
        "timesteps": times[:, None] * torch.linspace(0.2, 1, frames) if each else times,
        "context": noise(batch, 7, 8, seed=2),
        "transformer_options": options(batch),
        **more,
    }


def mask_of(tokens: int) -> Tensor:
    """A mask over pairs of tokens that hides one of seven."""
    hidden = torch.arange(tokens * tokens).view(tokens, tokens) % 7 == 3
    return torch.zeros(1, 1, tokens, tokens).masked_fill(hidden, -1e9)


def with_biases(tokens: int) -> Tensor:
    return noise(1, tokens, WIDTH, seed=9) * 0.3


def calls() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """By name a model and a call of it."""
    tokens, text = 30, 9
    return {
        "image": (ForeignImage(), image_call()),
        "references": (ForeignImage(), image_call(ref_latents=[noise(1, 4, 2, 3, seed=5)])),
        "mask": (ForeignImage(), image_call(attention_mask=mask_of(tokens + text))),
        "control": (ForeignImage(), image_call(control=[with_biases(tokens), with_biases(tokens)])),
        "film": (ForeignFilm(), film_call()),
        "one frame": (ForeignFilm(), film_call(frames=1)),
        "positions": (ForeignFilm(extra=True), film_call()),
        "frames": (ForeignFilm(extra=True), film_call(each=True)),
        "two images": (ForeignImage(), image_call(2)),
        "two films": (ForeignFilm(), film_call(2)),
    }

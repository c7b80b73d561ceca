"""What pipelines are called with: functions of the prompts' numbers, which pipelines.json names by ``$``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3ImageReference, MiniMaxH3VideoReference
from torch import Tensor

# Tokens and channels of a prompt's embeddings; channels of the models without a reviewed layout.
TOKENS, WIDTH, NARROW = 12, 32, 20
# The prompt that guidance leads away from.
NEGATIVE = 0
PROMPTS = ["blurry", "a red fox", "boats", "castle"]


def drawn(prompts: list[int], *shape: int) -> Tensor:
    """(P, *shape): noise drawn from every prompt's number."""
    return torch.stack([torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + one)) for one in prompts])


def named(prompts: list[int], name: str, of_prompts: Any) -> dict[str, Any]:
    """What ``of_prompts`` makes of prompts and of negative ones, as two arguments."""
    return {name: of_prompts(prompts), f"negative_{name}": of_prompts([NEGATIVE] * len(prompts))}


# --- numbers and words ------------------------------------------------------------------------------------------------


def numbers(prompts: list[int]) -> list[int]:
    return prompts


def count(prompts: list[int]) -> int:
    return len(prompts)


def repeated(prompts: list[int], of: Any) -> list[Any]:
    """The same for every prompt."""
    return [of] * len(prompts)


def generators(prompts: list[int]) -> list[torch.Generator]:
    """One for every prompt."""
    return [torch.Generator().manual_seed(100 + one) for one in prompts]


def generator(prompts: list[int]) -> torch.Generator:
    """Of pipelines that take no list of them."""
    return generators(prompts)[0]


def words(prompts: list[int], form: str = "{}", listed: bool = False) -> str | list[str]:
    """The prompts as users write them: one, or several in a list."""
    strings = [form.format(PROMPTS[one]) for one in prompts]
    return strings[0] if len(strings) == 1 and not listed else strings


def negative_words(prompts: list[int]) -> str | list[str]:
    return words([NEGATIVE] * len(prompts))


# --- embeddings -------------------------------------------------------------------------------------------------------


def noise(prompts: list[int], shape: list[int], numbers: list[int] | None = None, offset: int = 0) -> Tensor:
    """(P, *shape): noise of the prompts, or of ``numbers``."""
    return drawn([one + offset for one in prompts] if numbers is None else numbers, *shape)


def zeros(prompts: list[int], shape: list[int]) -> Tensor:
    return torch.zeros(shape)


def random(prompts: list[int], shape: list[int], seed: int = 5, high: int = 0) -> Tensor:
    """Noise that no prompt changes, or whole numbers below ``high``."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=draw) if high else torch.randn(shape, generator=draw)


def tensor(prompts: list[int], of: Any) -> Tensor:
    return torch.tensor(of)


def mask(prompts: list[int], tokens: int = TOKENS, dtype: str = "long", negative: bool = False) -> Tensor:
    """(P, T): prompts of different lengths, padded on the right; the negative prompt is short."""
    numbers = [NEGATIVE] * len(prompts) if negative else prompts
    lengths = torch.tensor([tokens - 1 - one % 4 if one != NEGATIVE else 3 for one in numbers])
    return (torch.arange(tokens) < lengths[:, None]).to(getattr(torch, dtype))


def text(
    prompts: list[int],
    masked: str = "",
    shape: tuple[int, ...] = (TOKENS, WIDTH),
    dtype: str = "long",
    suffix: str = "",
) -> dict[str, Any]:
    """Embeddings of the prompts and the negative prompt, with masks under the name ``masked`` if there is one."""
    made = named(prompts, f"prompt_embeds{suffix}", lambda some: drawn(some, *shape))
    return made | (named(prompts, f"{masked}{suffix}", lambda some: mask(some, shape[0], dtype)) if masked else {})


def pooled(prompts: list[int], width: int = 16) -> dict[str, Any]:
    """One embedding of the whole prompt, and of the negative one."""
    return named(prompts, "pooled_prompt_embeds", lambda some: drawn(some, width))


def captions(prompts: list[int], width: int = WIDTH, lengths: list[int] | None = None) -> dict[str, Any]:
    """Captions of different lengths, as lists."""
    tokens = lengths or [TOKENS + one for one in prompts]
    return {
        "prompt_embeds": [drawn([one], length, width)[0] for one, length in zip(prompts, tokens, strict=True)],
        "negative_prompt_embeds": [drawn([NEGATIVE], 3, width)[0] for _ in prompts],
    }


def wan_text(prompts: list[int], width: int = WIDTH, tokens: int = 24) -> dict[str, Any]:
    """What Wan's text encoder makes of prompts, zeros behind the last word; its pipelines read none without ftfy."""
    return named(prompts, "prompt_embeds", lambda some: drawn(some, tokens, width) * mask(some, tokens)[..., None])


def hidream_text(prompts: list[int]) -> dict[str, Any]:
    made = named(prompts, "prompt_embeds_t5", lambda some: drawn(some, 9, NARROW))
    made |= named(prompts, "prompt_embeds_llama3", lambda some: drawn(some, 5, 6, 10).transpose(0, 1))
    return made | pooled(prompts, 14)


def kandinsky_text(prompts: list[int], tokens: int = TOKENS) -> dict[str, Any]:
    """Embeddings of words, one of the whole prompt, and where prompts that stand one behind another begin."""
    made = named(prompts, "prompt_embeds_qwen", lambda some: drawn(some, tokens, NARROW))
    made |= named(prompts, "prompt_embeds_clip", lambda some: drawn(some, 10))
    return made | named(
        prompts, "prompt_cu_seqlens", lambda some: tokens * torch.arange(len(some) + 1, dtype=torch.int32)
    )


def around_pictures(prompts: list[int], pictures: int) -> dict[str, Any]:
    """Embeddings of what stands before, between and behind pictures."""
    parts = range(2 * pictures + 1)
    return {
        "prompt_embeds": [[drawn([one + 10 * n], 4 + one + n, WIDTH)[0] for n in parts] for one in prompts],
        "negative_prompt_embeds": [[drawn([10 * n], 3, WIDTH)[0] for n in parts] for _ in prompts],
    }


def codes(prompts: list[int], count: int, seed: int, stacked: bool = False) -> Any:
    """For every prompt, numbers of the entries of a codebook."""
    made = [torch.randint(32, (count,), generator=torch.Generator().manual_seed(seed + one)) for one in prompts]
    return torch.stack(made) if stacked else made


def lengths(prompts: list[int], tokens: int = TOKENS) -> list[int]:
    return [tokens - 1 - one % 4 for one in prompts]


def ids(prompts: list[int], negative: bool = False) -> list[int]:
    """Numbers of letters."""
    return [6 + ord(letter) - 32 for letter in PROMPTS[NEGATIVE if negative else prompts[0]]]


def connected(prompts: list[int]) -> dict[str, Any]:
    """What the connectors of LTX-2 make of prompts for the video and for the sound."""
    made = named(prompts, "connector_prompt_embeds", lambda some: noise(some, [TOKENS, WIDTH]))
    made |= named(prompts, "connector_audio_prompt_embeds", lambda some: noise(some, [TOKENS, WIDTH], offset=10))
    return made | named(prompts, "connector_attention_mask", mask)


def anima_text(prompts: list[int]) -> dict[str, Any]:
    """Embeddings by one text encoder, and the tokens of another."""
    made = named(prompts, "qwen_prompt_embeds", lambda some: drawn(some, TOKENS, NARROW))
    made |= named(prompts, "t5_input_ids", lambda some: torch.stack(codes(some, TOKENS, 50)))
    made |= named(prompts, "qwen_attention_mask", mask)
    return made | named(prompts, "t5_attention_mask", mask)


def pad_mask(prompts: list[int], tokens: int = 9) -> Tensor:
    """(P, T): no token of a prompt stands for a picture."""
    return torch.zeros(len(prompts), tokens, dtype=torch.bool)


def dtype(prompts: list[int]) -> torch.dtype:
    return torch.float32


def h3_frames(prompts: list[int], count: int) -> list[Tensor]:
    """Encoded pictures of 64 x 96 pixels."""
    return [random(prompts, [1, 24, 1, 4, 6], seed=seed) for seed in range(count)]


def h3_references(prompts: list[int]) -> dict[str, Any]:
    """A picture, and a film with its sound."""
    given = [MiniMaxH3ImageReference(picture(prompts)), MiniMaxH3VideoReference([], 24.0, torch.zeros(1), 32000)]
    seen = [random(prompts, [1, 24, frames, 6, 4]) for frames in (1, 2)]
    return {
        "normalized_references": given,
        "condition_latents": seen,
        "audio_condition_latents": [random(prompts, [10, 32])],
    }


def ones(prompts: list[int], tokens: int = TOKENS) -> Tensor:
    return torch.ones(tokens, dtype=torch.long)


def grids(prompts: list[int], sizes: list[int]) -> list[Tensor]:
    return [torch.tensor([sizes]) for _ in prompts]


# --- pictures and videos ----------------------------------------------------------------------------------------------


def picture(
    prompts: list[int], seed: int = 0, size: tuple[int, int] = (28, 20), mode: str = "RGB", own: bool = False
) -> PIL.Image.Image:
    """A picture (width, height) of soft random blots; ``own``: another one for every prompt."""
    draw = torch.Generator().manual_seed(seed + own * prompts[0])
    blots = torch.randint(256, (4, 5, 4), generator=draw, dtype=torch.uint8)
    return PIL.Image.fromarray(blots.numpy(), "RGBA").resize(size, PIL.Image.Resampling.BICUBIC).convert(mode)


def hole(prompts: list[int], size: tuple[int, int] = (28, 20)) -> PIL.Image.Image:
    """A mask, white where the picture is to be drawn anew: its right half."""
    made = PIL.Image.new("L", tuple(size), 0)
    made.paste(255, (size[0] // 2, 0, *size))
    return made


def stencil(prompts: list[int], frames: int = 9) -> list[PIL.Image.Image]:
    """A film whose right half is to be painted."""
    return [hole(prompts, (80, 48))] * frames


def film(
    prompts: list[int], frames: int = 9, seed: int = 0, size: tuple[int, int] = (80, 48), own: bool = False
) -> list[PIL.Image.Image]:
    """Frames that go over from one picture to another."""
    first, last = (picture(prompts, one, size, own=own) for one in (seed, seed + 1))
    return [PIL.Image.blend(first, last, one / frames) for one in range(frames)]


def frames_of(prompts: list[int]) -> Tensor:
    """(P, C, F, H, W): a film for every prompt, values of 0 to 1."""
    values = torch.from_numpy(np.stack([np.asarray(frame) for frame in film(prompts)])).float() / 255
    return values.permute(3, 0, 1, 2)[None].repeat(len(prompts), 1, 1, 1, 1)


def right_half(prompts: list[int]) -> Tensor:
    """(P, 1, F, H, W): 255 where the film is to be painted."""
    made = torch.zeros(len(prompts), 1, 9, 48, 80)
    made[..., 40:] = 255
    return made


def walk(prompts: list[int], frames: int) -> np.ndarray:
    """(F, 4, 4): where the camera stands that goes ahead."""
    places = np.eye(4, dtype=np.float32)[None].repeat(frames, 0)
    places[:, 2, 3] = 0.05 * np.arange(frames)
    return places


def condition(prompts: list[int], kind: str, **settings: Any) -> Any:
    """What some pipelines of LTX take pictures and films in."""
    path, _, name = kind.rpartition(".")
    return getattr(import_module(f"diffusers.pipelines.{path}"), name)(**settings)

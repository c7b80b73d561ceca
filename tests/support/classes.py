"""Transformers of diffusers without a reviewed layout, and calls of them in the forms that their pipelines make.

What calls.json says of a form: ``exam``, ``prompts`` (by number), ``number`` of the call, and ``part`` of the pipeline
that is called, whose call is recorded when a test first asks for it, ``prepare`` for what changes the pipeline before,
``asked`` for arguments of the pipeline, and ``then`` for arguments that differ from those that it makes; or
``written`` and ``by`` for calls that no pipeline of an exam makes: arguments, and a function of this file.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_rfd4_proteina import CONDITION_KEYS
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0
from torch import Tensor, nn

from support.exam import EXAMS, arguments, left_out
from support.models import fresh


@dataclass(frozen=True)
class Case:
    """How to make a tiny transformer, and the keyword arguments of its forward by form of call."""

    make: Callable[[], nn.Module]
    calls: dict[str, Callable[[], dict[str, Any]]]


class _Reached(Exception):
    """The call that is to be recorded."""


# Tests go class by class, and up to 24 ranks of two processes keep what they have made.
@lru_cache(maxsize=8)
def recording(name: str, form: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a pipeline calls, and its arguments by name."""
    row = ROWS_OF_CLASSES[name]["forms"][form]
    exam, number = EXAMS[row["exam"]], row.get("number", 0)
    pipe, calls = exam.make(), []
    if "prepare" in row:
        CHANGES[row["prepare"]](pipe)
    pipe.set_progress_bar_config(disable=True)
    model = getattr(pipe, row.get("part", "transformer"))

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(copy.deepcopy(inspect.signature(model.forward).bind(*args, **kwargs).arguments))
        if len(calls) > number:
            raise _Reached

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    prompts = row.get("prompts", [1])
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            pipe(**exam.call(prompts) | arguments(row.get("asked", []), prompts))
    except _Reached:
        pass
    finally:
        handle.remove()
    then = row.get("then", {})
    changed = CHANGES[then](calls[number]) if isinstance(then, str) else arguments(then, prompts)
    call = {**calls[number], "return_dict": False, **changed}
    return copy.deepcopy(model), {key: value for key, value in call.items() if not left_out(value)}


def call_of(name: str, form: str) -> dict[str, Any]:
    """Arguments of a form of call."""
    row = ROWS_OF_CLASSES[name]["forms"][form]
    if "exam" in row:
        return copy.deepcopy(recording(name, form)[1])
    given = arguments(row.get("written", {}), [1])
    return CALLS[row["by"]](**given) if "by" in row else given


def made(name: str) -> nn.Module:
    """The model of a class: as the pipeline of its first form has it, or by a function or a name of parts.json."""
    row = ROWS_OF_CLASSES[name]
    form, first = next(iter(row["forms"].items()))
    if "model" in row:
        return MODELS[row["model"]]() if row["model"] in MODELS else fresh(row["model"])
    return copy.deepcopy(recording(name, form)[0]) if "exam" in first else fresh(name)


def noise(*shape: int, seed: int = 5) -> Tensor:
    """Random numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 3) -> Tensor:
    """Random whole numbers below ``high``."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def valid(lengths: Sequence[int], longest: int, left: bool = False) -> Tensor:
    """Which of ``longest`` tokens are real, for every sample; padding stands behind them, or before them."""
    places = torch.arange(longest).flip(0) if left else torch.arange(longest)
    return places[None] < torch.tensor(lengths)[:, None]


def written(**arguments: Any) -> dict[str, Any]:
    """Arguments of a call; a tuple stands for random numbers of that shape."""
    drawn = {key: noise(*value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    return {"return_dict": False, **drawn}


# --- changes of recorded calls, and of pipelines ---------------------------------------------------------------------


def flex(pipe: Any = None) -> nn.Module:
    """Kandinsky 5 with sparse attention, which is another backend's."""
    model = fresh("Kandinsky5Transformer3DModel nabla")
    for processor in model.attn_processors.values():
        # As `set_attention_backend` does, which changes every other model of the process, too.
        processor._attention_backend = AttentionBackendName.FLEX
    if pipe is not None:
        pipe.register_modules(transformer=model)
    return model


class Sampled(nn.Module):
    """Stands in for the tokenizer of sounds, of which a pipeline asks how long a latent is."""

    _hop_size, config = 1, type("Config", (), {"sampling_rate": 30})

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def heard(pipe: Any) -> None:
    pipe.register_modules(sound_tokenizer=Sampled())


def beside_a_picture(call: dict[str, Any]) -> dict[str, Any]:
    """Two of the prompt's tokens stand for a picture of 2 x 4 tokens."""
    mask = call["img_mask"].index_fill(1, torch.tensor([3, 4]), True)
    return {"hidden_states": noise(1, 68, 8), "img_shapes": [[(1, 2, 4), (1, 6, 10)]], "img_mask": mask}


def exchanged(call: dict[str, Any]) -> dict[str, Any]:
    """The samples in the order of a prompt that is longer than the negative one."""
    return {key: value.flip(0) for key, value in call.items() if isinstance(value, Tensor)}


def last(call: dict[str, Any]) -> dict[str, Any]:
    """The last sample alone: that of the prompt, where guidance is in the same call."""
    return {key: value[-1:] for key, value in call.items() if isinstance(value, Tensor)}


def conditioned(call: dict[str, Any]) -> dict[str, Any]:
    """A picture beside the one that is made."""
    ids = call["img_ids"] + torch.tensor([10.0, 0, 0, 0])
    return {"image_cond_hidden_states": noise(*call["hidden_states"].shape), "image_cond_ids": ids}


def as_control(call: dict[str, Any]) -> dict[str, Any]:
    """As the pipeline for control would call it, which fails (`LEFT_OUT` of the pipelines' suite)."""
    return {"inpaint_latents": "...", "control_latents": call["inpaint_latents"]}


def text_alone(call: dict[str, Any]) -> dict[str, Any]:
    return {"encoder_hidden_states": call["encoder_hidden_states"][0]}


# --- calls without a pipeline ----------------------------------------------------------------------------------------

# Heads and their channels; tokens of an image with an odd number of rows and columns, of a video's frames, of the
# longest prompt and of a sound.
HEADS, HEAD_DIM, DIM, TEXT_DIM = 4, 12, 48, 20
ROWS, COLS, FRAMES, TEXT, SOUND = 5, 7, 3, 9, 23
PIXELS = (2 * ROWS, 2 * COLS)


def dreamlite() -> nn.Module:
    model = fresh("DreamLiteTransformer2DModel")
    for module in model.modules():
        if isinstance(module, Attention):
            # As the U-Net sets it, for the keys have fewer heads than the queries.
            module.set_processor(DreamLiteAttnProcessor2_0())
    return model


def unet_part(masked: bool = False) -> dict[str, Any]:
    """As in the U-Nets of Stable Diffusion, for which it is a part and no denoiser of its own."""
    bias = torch.where(valid([TEXT, 4], TEXT), 0.0, -10000.0)[:, None] if masked else None
    given = written(hidden_states=(2, 16, ROWS, COLS), encoder_hidden_states=(2, TEXT, TEXT_DIM))
    return {**given, "cross_attention_kwargs": None, "attention_mask": None, "encoder_attention_mask": bias}


def joy_plus(shapes: list[list[tuple[int, int, int]]], lengths: list[int]) -> dict[str, Any]:
    """``shapes``: patches of the image and of those it is made from; samples with fewer are padded."""
    most = max(sum(t * h * w for t, h, w in sample) for sample in shapes)
    return written(
        hidden_states=(len(shapes), most, 4, 1, 2, 2),
        timestep=torch.full((len(shapes),), 601.0),
        encoder_hidden_states=(len(shapes), max(lengths), TEXT_DIM),
        encoder_hidden_states_mask=valid(lengths, max(lengths)).float(),
        shape_list=shapes,
    )


def proteina(lengths: list[int], passes: int = 0) -> dict[str, Any]:
    batch, longest = len(lengths), max(lengths)
    atoms = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal_coord", "hotspot")
    return written(
        bb_ca=(batch, longest, 3),
        local_latents=noise(batch, longest, 8, seed=6),
        bb_ca_time=torch.full((batch,), 0.6),
        local_latents_time=torch.full((batch,), 0.4),
        padding_mask=valid(lengths, longest),
        token_type=whole(7, batch, longest),
        atom37_mask=whole(2, batch, longest, 37, seed=8).bool(),
        conditioning={
            **{CONDITION_KEYS[name]: whole(4, batch, longest, 37, seed=n) for n, name in enumerate(atoms)},
            CONDITION_KEYS["index_group"]: whole(3, batch, longest),
            "is_in_context_conditioning": whole(2, batch, longest, seed=1).bool(),
            "supports_local_latent": torch.ones(batch, longest, dtype=torch.bool),
            "token_bond_path_length": whole(8, batch, longest, longest),
            "molecule_iid": whole(2, batch, longest),
            "molecule_entity_id": whole(2, batch, longest, seed=4),
        },
        recycle_depth=passes,
        attention_kwargs=None,
    )


def refiner(mode: str) -> dict[str, Any]:
    """``mode``: keys and values of these frames are noted ("capture..."), those of the ones before attended to."""

    def turns(length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length).float()[:, None] / 100 ** (torch.arange(0, 64, 2) / 64)
        return angles.cos().repeat_interleave(2, 1)[None], angles.sin().repeat_interleave(2, 1)[None]

    tokens, known = FRAMES * ROWS * COLS, SanaWMRefinerKVCache(2)
    if "inject" in mode:
        known.sink_pe = turns(ROWS * COLS)
        for block in range(2):
            kept = [noise(1, ROWS * COLS, 64, seed=10 * block + n) for n in range(4)]
            known.get(block).store_sink(kept[0], kept[1])
            known.get(block).store_history(kept[2], kept[3])
    return written(
        hidden_states=(1, tokens, 8),
        encoder_hidden_states=(1, TEXT, TEXT_DIM),
        timestep=torch.full((1, tokens), 601.0 if mode == "inject" else 0.0),
        video_rotary_emb=list(turns(tokens)),
        encoder_attention_mask=valid([4], TEXT, left=True).long(),
        kv_cache=known,
        kv_cache_mode=mode,
    )


def animate_2(frames: int = FRAMES, area: int = ROWS * COLS) -> nn.Module:
    model = fresh("WanAnimate2Transformer3DModel")
    with torch.compiler.set_stance("force_eager"):
        # To compile it, as the forward would, takes a minute.
        model.block_masks[frames, area] = model.create_mask(frames, area, "cpu")
    return model


def animate_2_call(mode: str) -> dict[str, Any]:
    """The video that drives ("extract"), or the video that is made, a frame longer, with its caches ("cached")."""
    known, frames = WanAnimate2KVCache(2), FRAMES + (mode == "cached")
    grid = torch.tensor([[FRAMES, ROWS, COLS]])
    given = written(
        hidden_states=[noise(4, frames, *PIXELS)],
        timestep=torch.tensor([601.0]),
        encoder_hidden_states=[noise(TEXT, TEXT_DIM)],
        encoder_hidden_states_image=(1, 6, 1280),
        condition_latents=[noise(8, frames, *PIXELS, seed=6)],
        kv_cache=known,
        kv_cache_mode=mode,
        seq_len=frames * ROWS * COLS,
    )
    if mode == "extract":
        return given | {"offset_grid_sizes": grid}
    for number, layer in enumerate(known.layer_caches):
        layer.store(*(noise(1, FRAMES * ROWS * COLS, HEADS, HEAD_DIM, seed=seed) for seed in (number, 9 + number)))
    area = {"origin_len": 4 * FRAMES - 3, "origin_area": [16 * ROWS, 16 * COLS]}
    return given | {"reference_grid_sizes": grid, **area, "is_uncondtion": False}


def spectrogram() -> dict[str, Any]:
    """The call of a denoiser whose blocks return a tuple of one."""
    prompt, sound = noise(1, TEXT, DIM), noise(1, SOUND, DIM, seed=6)
    return {
        "encodings_and_masks": [(prompt, valid([4], TEXT)), (sound, torch.ones(1, SOUND))],
        "decoder_input_tokens": noise(1, SOUND, 10),
        "decoder_noise_time": torch.tensor([0.6]),
    }


CHANGES = {
    one.__name__: one for one in (flex, heard, beside_a_picture, exchanged, last, conditioned, as_control, text_alone)
}
MODELS = {one.__name__: one for one in (flex, dreamlite, animate_2)}
CALLS = {one.__name__: one for one in (unet_part, joy_plus, proteina, refiner, animate_2_call, spectrogram)}
ROWS_OF_CLASSES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("calls.json").read_text("utf-8"))
CASES: dict[str, Case] = {
    name: Case(partial(made, name), {form: partial(call_of, name, form) for form in row["forms"]})
    for name, row in ROWS_OF_CLASSES.items()
}

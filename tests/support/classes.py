"""Transformers of diffusers without a reviewed layout, and calls of them in the forms that their pipelines make.

A call is recorded when a test first asks for it: the pipeline of an exam runs until it calls its transformer. Classes
that no pipeline of an exam calls have calls that are written down here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_rfd4_proteina import CONDITION_KEYS
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0
from torch import Tensor, nn

from support.exam import Exam, images, others, videos
from support.models import fresh

EXAMS: dict[str, Exam] = {**images.EXAMS, **videos.EXAMS, **others.EXAMS}


@dataclass(frozen=True)
class Case:
    """How to make a tiny transformer, and the keyword arguments of its forward by form of call."""

    make: Callable[[], nn.Module]
    calls: dict[str, Callable[[], dict[str, Any]]]


class _Reached(Exception):
    """The call that is to be recorded."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A call that the pipeline of an exam makes.

    Attributes:
        exam: name of the exam.
        prompts: numbers of the prompts.
        number: which of the calls.
        part: the component that is called.
        prepare: changes the pipeline.
        then: arguments that differ from those of the pipeline; an argument that is ``...`` is left out.
        asked: arguments of the pipeline beside the exam's.
    """

    exam: str
    prompts: Sequence[int] = (1,)
    number: int = 0
    part: str = "transformer"
    prepare: Callable[[Any], Any] | None = None
    then: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}
    asked: dict[str, Any] = field(default_factory=dict)

    @cache  # noqa: B019  (as many as there are in `CASES`)
    def recording(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model, and its arguments by name."""
        exam = EXAMS[self.exam]
        pipe = exam.make()
        if self.prepare is not None:
            self.prepare(pipe)
        pipe.set_progress_bar_config(disable=True)
        model, calls = getattr(pipe, self.part), []

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(copy.deepcopy(inspect.signature(model.forward).bind(*args, **kwargs).arguments))
            if len(calls) > self.number:
                raise _Reached

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                pipe(**{**exam.call(list(self.prompts)), **self.asked})
        except _Reached:
            pass
        finally:
            handle.remove()
        call = calls[self.number]
        changed = {**call, "return_dict": False, **self.then(call)}
        return copy.deepcopy(model), {key: value for key, value in changed.items() if value is not ...}

    def call(self) -> dict[str, Any]:
        return copy.deepcopy(self.recording()[1])


def recorded(model: str | None = None, /, **forms: Recorded) -> Case:
    """A case of recorded calls by form (``_`` stands for a space); the model of the first one, or one of parts.json."""
    make = partial(fresh, model) if model else lambda: copy.deepcopy(next(iter(forms.values())).recording()[0])
    return Case(make, {form.replace("_", " "): made.call for form, made in forms.items()})


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

ALONE = {"guidance_scale": 1.0}


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


def unet_part(masked: bool) -> dict[str, Any]:
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


def minimax(keyframes: int) -> dict[str, Any]:
    """Text, clean ``keyframes``, sound and video in one sequence, each with its place in time, row and column."""
    sound, frame = 11, ROWS * COLS
    given, video = keyframes * frame, FRAMES * frame
    total = TEXT + given + sound + video
    grid = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLS)).double()
    places = torch.zeros(total, 3, dtype=torch.float64)
    places[:TEXT, 0] = torch.arange(TEXT)
    places[TEXT : TEXT + given] = torch.cat([torch.full((frame, 1), float(TEXT)), grid], 1).repeat(keyframes, 1)
    places[TEXT + given : -video, 0] = TEXT + 0.5 * torch.arange(sound)
    times = TEXT + torch.arange(FRAMES).repeat_interleave(frame)
    places[-video:] = torch.cat([times[:, None], grid.repeat(FRAMES, 1)], 1)
    text, before, heard, seen = torch.arange(total).split([TEXT, given, sound, video])
    none = torch.zeros(total, dtype=torch.long)
    return written(
        hidden_states=(1, given + video, 16),
        audio_hidden_states=(1, sound, 6),
        encoder_hidden_states=(1, TEXT, TEXT_DIM),
        timestep=torch.tensor([0.0, 0.6, 0.6]),
        timestep_indices=none.index_fill(0, seen, 1).index_fill(0, heard, 2),
        attention_kwargs=None,
        token_tags=none.index_fill(0, text, 1).index_fill(0, heard, 2),
        position_ids=places,
        video_indices=torch.cat([before, seen]),
        audio_indices=heard,
        text_indices=text,
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


def animate_2() -> nn.Module:
    model = fresh("WanAnimate2Transformer3DModel")
    with torch.compiler.set_stance("force_eager"):
        # To compile it, as the forward would, takes a minute.
        model.block_masks[FRAMES, ROWS * COLS] = model.create_mask(FRAMES, ROWS * COLS, "cpu")
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


WRITTEN: dict[str, Case] = {
    "DreamLiteTransformer2DModel": Case(
        dreamlite, {"guidance": lambda: unet_part(False), "padded prompts": lambda: unet_part(True)}
    ),
    "JoyImageEditPlusTransformer3DModel": Case(
        partial(fresh, "JoyImageEditPlusTransformer3DModel"),
        {
            "edit": lambda: joy_plus([[(1, ROWS, COLS), (1, 3, 4)]], [TEXT]),
            "guidance": lambda: joy_plus([[(1, ROWS, COLS), (1, 3, 4)], [(1, ROWS, COLS)]], [4, TEXT]),
        },
    ),
    "MiniMaxH3Transformer3DModel": Case(
        partial(fresh, "MiniMaxH3Transformer3DModel"), {"prompt": lambda: minimax(0), "keyframes": lambda: minimax(2)}
    ),
    # The decoder of a frame's codes: a small causal language model over at most eight tokens, no denoiser.
    "MiniMaxMusic3RVQDepthDecoder": Case(
        partial(fresh, "MiniMaxMusic3RVQDepthDecoder"),
        {
            "first code": lambda: {"inputs_embeds": noise(2, 2, DIM)},
            "last code": lambda: {"inputs_embeds": noise(2, 8, DIM)},
        },
    ),
    "MiniMaxMusic3Transformer1DModel": Case(
        partial(fresh, "MiniMaxMusic3Transformer1DModel"),
        {
            "song": lambda: written(
                hidden_states=(1, 8, SOUND), timestep=torch.tensor([0.6]), encoder_hidden_states=(1, SOUND, 10)
            )
        },
    ),
    "PriorTransformer + shapes": Case(
        partial(fresh, "PriorTransformer + shapes"),
        {
            "guidance": lambda: written(
                hidden_states=(2, SOUND, 16), timestep=torch.tensor(601), proj_embedding=(2, TEXT, 10)
            )
        },
    ),
    # Beside the tokens of a protein there is a square of pairs, which the tokens change between blocks.
    "RFD4ProteinaTransformer": Case(
        partial(fresh, "RFD4ProteinaTransformer"),
        {"design": lambda: proteina([13]), "padded designs": lambda: proteina([13, 9], passes=2)},
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Case(
        partial(fresh, "SanaWMLTX2RefinerTransformer3DModel"),
        {
            "first frames": lambda: refiner("capture_pre_rope"),
            "next frames": lambda: refiner("inject"),
            "next frames noted": lambda: refiner("inject_and_capture_post_rope"),
        },
    ),
    "T5FilmDecoder": Case(partial(fresh, "T5FilmDecoder"), {"spectrogram": spectrogram}),
    "Transformer2DModel": Case(
        partial(fresh, "Transformer2DModel"),
        {"guidance": lambda: unet_part(False), "padded prompts": lambda: unet_part(True)},
    ),
    # As in pipelines of PixArt that were saved before it had a class of its own.
    "Transformer2DModel + patches": Case(
        partial(fresh, "Transformer2DModel + patches"),
        {
            "guidance": lambda: written(
                hidden_states=(2, 4, *PIXELS),
                encoder_hidden_states=(2, TEXT, TEXT_DIM),
                timestep=torch.tensor([601, 601]),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
                encoder_attention_mask=valid([4, TEXT], TEXT).long(),
            )
        },
    ),
    "Transformer2DModel + vectors": Case(
        partial(fresh, "Transformer2DModel + vectors"),
        {
            "guidance": lambda: written(
                hidden_states=whole(12, 2, ROWS * ROWS),
                encoder_hidden_states=(2, TEXT, TEXT_DIM),
                timestep=torch.tensor(60),
            )
        },
    ),
    # A part of video U-Nets: a place of the picture is a sample and its frames are the tokens.
    "TransformerTemporalModel": Case(
        partial(fresh, "TransformerTemporalModel"),
        {"video": lambda: written(hidden_states=(10, 16, 3, 4), num_frames=5, cross_attention_kwargs=None)},
    ),
    "WanAnimate2Transformer3DModel": Case(
        animate_2,
        {"driving video": lambda: animate_2_call("extract"), "caches read": lambda: animate_2_call("cached")},
    ),
}

TWO = (1, 2)  # prompts
RECORDED: dict[str, Case] = {
    "AceStepTransformer1DModel": recorded(
        guidance=Recorded("AceStepPipeline"), plain=Recorded("AceStepPipeline", asked=ALONE)
    ),
    "AllegroTransformer3DModel": recorded(
        guidance=Recorded("AllegroPipeline"), prompt=Recorded("AllegroPipeline", asked=ALONE)
    ),
    "AnyFlowFARTransformer3DModel": recorded(
        chunk=Recorded("AnyFlowFARPipeline", number=3), chunks_before=Recorded("AnyFlowFARPipeline", number=5)
    ),
    "AnyFlowTransformer3DModel": recorded(
        guidance=Recorded("AnyFlowPipeline"), prompt=Recorded("AnyFlowPipeline", then=last)
    ),
    "BriaFibo2Transformer2DModel": recorded(
        prompt=Recorded("BriaFibo2Pipeline", then=lambda _: {"encoder_attention_mask": None}),
        padded_prompts=Recorded("BriaFibo2Pipeline", TWO),
        edit=Recorded("BriaFibo2Pipeline pictures", TWO),
    ),
    "BriaFiboTransformer2DModel": recorded(
        guidance=Recorded("BriaFiboPipeline"),
        plain=Recorded("BriaFiboPipeline", asked=ALONE),
        edit=Recorded("BriaFiboEditPipeline"),
    ),
    "BriaTransformer2DModel": recorded(
        guidance=Recorded("BriaPipeline"),
        # The single blocks' residuals are left out: the forward takes the text off their tokens again and fails.
        controlnet=Recorded(
            "BriaPipeline", then=lambda _: {"controlnet_block_samples": [noise(2, 35, DIM, seed=n) for n in (1, 2)]}
        ),
    ),
    "ChronoEditTransformer3DModel": recorded(
        edit=Recorded("ChronoEditPipeline", number=2), frames_between=Recorded("ChronoEditPipeline")
    ),
    "CogView3PlusTransformer2DModel": recorded(guidance=Recorded("CogView3PlusPipeline")),
    "ConsisIDTransformer3DModel": recorded(
        guidance=Recorded("ConsisIDPipeline"), prompt=Recorded("ConsisIDPipeline", asked=ALONE)
    ),
    "Cosmos3OmniTransformer": recorded(
        prompt=Recorded("Cosmos3OmniPipeline", asked={"image": None}),
        image=Recorded("Cosmos3OmniPipeline"),
        sound=Recorded("Cosmos3OmniPipeline", prepare=heard, asked={"image": None, "enable_sound": True}),
    ),
    "CosmosTransformer3DModel + ControlNet": recorded(
        "CosmosTransformer3DModel + ControlNet",
        video=Recorded(
            "Cosmos2_5_TransferPipeline", then=lambda call: {"encoder_hidden_states": call["encoder_hidden_states"][0]}
        ),
    ),
    "CosmosTransformer3DModel + ControlNet and image": recorded(video=Recorded("Cosmos2_5_TransferPipeline")),
    "EasyAnimateTransformer3DModel": recorded(
        inpaint=Recorded("EasyAnimateInpaintPipeline"),
        # Whose pipeline fails (see `LEFT_OUT` of test_every_pipeline.py).
        control=Recorded(
            "EasyAnimateInpaintPipeline",
            then=lambda call: {"inpaint_latents": ..., "control_latents": call["inpaint_latents"]},
        ),
    ),
    "ErnieImageTransformer2DModel": recorded(
        guidance=Recorded("ErnieImagePipeline"), plain=Recorded("ErnieImagePipeline", asked=ALONE)
    ),
    "Flux2Transformer2DModel + caches": recorded(
        caches_filled=Recorded("Flux2KleinKVPipeline pictures"),
        caches_read=Recorded("Flux2KleinKVPipeline pictures", number=1),
    ),
    "Flux2Transformer2DModel + reference": recorded(prompt=Recorded("Flux2KleinPipeline pictures")),
    "Flux3Transformer2DModel": recorded(
        guidance=Recorded("Flux3ModularPipeline", TWO),
        edit=Recorded("Flux3ModularPipeline", TWO, then=conditioned),
    ),
    "FluxTransformer2DModel + IP-Adapter": recorded(
        prompt=Recorded("FluxPipeline IP-Adapter"), prompts=Recorded("FluxPipeline IP-Adapter", TWO)
    ),
    "GlmImageTransformer2DModel": recorded(
        prompt=Recorded("GlmImagePipeline"),
        edit=Recorded("GlmImagePipeline image", number=1),
        image_before=Recorded("GlmImagePipeline image"),
    ),
    "HeliosTransformer3DModel": recorded(prompt=Recorded("HeliosPipeline"), two_videos=Recorded("HeliosPipeline", TWO)),
    "HiDreamImageTransformer2DModel": recorded(
        square=Recorded("HiDreamImagePipeline", asked={"height": 24, "width": 24}),
        oblong=Recorded("HiDreamImagePipeline"),
    ),
    "HunyuanImageTransformer2DModel": recorded(
        prompt=Recorded("HunyuanImagePipeline"),
        prompts=Recorded("HunyuanImagePipeline", TWO),
        no_glyphs=Recorded(
            "HunyuanImagePipeline", then=lambda _: {"encoder_attention_mask_2": torch.zeros(1, 6, dtype=torch.long)}
        ),
    ),
    "HunyuanVideoFramepackTransformer3DModel": recorded(
        prompt=Recorded("HunyuanVideoFramepackPipeline"), padded_prompts=Recorded("HunyuanVideoFramepackPipeline", TWO)
    ),
    "Ideogram4Transformer2DModel": recorded(
        prompt=Recorded("Ideogram4Pipeline"),
        padded_prompts=Recorded("Ideogram4Pipeline", TWO),
        image_alone=Recorded("Ideogram4Pipeline", part="unconditional_transformer"),
    ),
    "JoyImageEditTransformer3DModel": recorded(
        prompt=Recorded("JoyImageEditPipeline"),
        # Whose pipeline brings pictures to a million pixels.
        edit=Recorded("JoyImageEditPipeline", then=lambda _: {"hidden_states": noise(1, 2, 4, 1, *PIXELS)}),
    ),
    "Kandinsky5Transformer3DModel": recorded(
        video=Recorded("Kandinsky5T2VPipeline"), images=Recorded("Kandinsky5I2IPipeline", TWO)
    ),
    "Kandinsky5Transformer3DModel nabla": Case(
        flex,
        {
            "video": Recorded(
                "Kandinsky5T2VPipeline", prepare=flex, asked={"height": 128, "width": 256, "num_frames": 9}
            ).call
        },
    ),
    "Kandinsky6SRTransformer3DModel": recorded(
        tile=Recorded("Kandinsky6SRPipeline", asked={"tiles_batch_size": 1}), tiles=Recorded("Kandinsky6SRPipeline")
    ),
    "Kandinsky6Transformer3DModel": recorded(
        video=Recorded("Kandinsky6TI2VAPipeline", asked={"sample_audio": False}),
        sound=Recorded("Kandinsky6TI2VAPipeline", then=lambda _: {"encoder_attention_mask": valid([10], 12)}),
        image=Recorded("Kandinsky6TI2VAPipeline image"),
    ),
    "LTX2VideoTransformer3DModel + mask": recorded(guidance=Recorded("LTX2InContextPipeline")),
    "LongCatAudioDiTTransformer": recorded(
        prompt=Recorded("LongCatAudioDiTPipeline"), padded_prompts=Recorded("LongCatAudioDiTPipeline", TWO)
    ),
    "LongCatImageTransformer2DModel": recorded(
        prompt=Recorded("LongCatImagePipeline"), edit=Recorded("LongCatImageEditPipeline")
    ),
    "LuminaNextDiT2DModel": recorded(guidance=Recorded("LuminaPipeline plain attention")),
    # One of its blocks runs on the noise anew and attends to the tokens of the ones before.
    "MotifVideoTransformer3DModel": recorded(
        prompt=Recorded("MotifVideoPipeline decoders"),
        image=Recorded("MotifVideoPipeline decoders", then=lambda _: {"image_embeds": noise(1, 6, 10, seed=6)}),
    ),
    "MotifVideoTransformer3DModel plain": recorded(
        prompt=Recorded("MotifVideoPipeline"),
        image=Recorded("MotifVideoPipeline", then=lambda _: {"image_embeds": noise(1, 6, 10, seed=6)}),
        two_prompts=Recorded("MotifVideoPipeline", TWO, then=lambda _: {"image_embeds": noise(2, 6, 10, seed=6)}),
    ),
    "NucleusMoEImageTransformer2DModel": recorded(
        prompt=Recorded("NucleusMoEImagePipeline", then=lambda _: {"encoder_hidden_states_mask": None}),
        padded_prompts=Recorded("NucleusMoEImagePipeline", TWO),
    ),
    "OmniGenTransformer2DModel": recorded(
        guidance=Recorded("OmniGenPipeline", then=exchanged), edit=Recorded("OmniGenPipeline pictures")
    ),
    "OvisImageTransformer2DModel": recorded(prompt=Recorded("OvisImagePipeline")),
    "PRXTransformer2DModel": recorded(guidance=Recorded("PRXPipeline")),
    "PRXTransformer2DModel + pixels": recorded(guidance=Recorded("PRXPixelPipeline")),
    "PriorTransformer": recorded(guidance=Recorded("KandinskyV22PriorPipeline", part="prior")),
    "QwenImage21Transformer2DModel": recorded(
        prompt=Recorded("QwenImage21Pipeline no cache"),
        padded_prompts=Recorded("QwenImage21Pipeline no cache", TWO),
        edit=Recorded("QwenImage21Pipeline no cache", then=beside_a_picture),
        caches_filled=Recorded("QwenImage21Pipeline"),
        caches_read=Recorded("QwenImage21Pipeline", TWO, number=2),
    ),
    "SD3Transformer2DModel + IP-Adapter": recorded(guidance=Recorded("StableDiffusion3Pipeline IP-Adapter")),
    "SanaVideoTransformer3DModel": recorded(
        guidance=Recorded("SanaVideoPipeline"), image=Recorded("SanaImageToVideoPipeline")
    ),
    "SanaWMTransformer3DModel": recorded(
        guidance=Recorded("SanaWMPipeline", number=1), prompt=Recorded("SanaWMPipeline", asked=ALONE)
    ),
    "SkyReelsV2Transformer3DModel": recorded(video=Recorded("SkyReelsV2Pipeline")),
    "SkyReelsV2Transformer3DModel + image": recorded(video=Recorded("SkyReelsV2ImageToVideoPipeline")),
    "SkyReelsV2Transformer3DModel + diffusion forcing": recorded(
        video=Recorded("SkyReelsV2DiffusionForcingPipeline frames a second")
    ),
    "SkyReelsV2Transformer3DModel + causal blocks": recorded(
        "SkyReelsV2Transformer3DModel + causal blocks",
        video=Recorded(
            "SkyReelsV2DiffusionForcingPipeline frames a second", asked={"num_frames": 13, "base_num_frames": 13}
        ),
    ),
    "StableAudio3DiTModel": recorded(
        guidance=Recorded("StableAudio3Pipeline guidance"), inpaint=Recorded("StableAudio3InpaintPipeline")
    ),
    "WanAnimateTransformer3DModel": recorded(segment=Recorded("WanAnimatePipeline")),
    "WanVACETransformer3DModel": recorded(
        control=Recorded("WanVACEPipeline"), reference=Recorded("WanVACEPipeline reference")
    ),
    "ZImageTransformer2DModel + ControlNet": recorded(
        prompt=Recorded("ZImageControlNetPipeline", asked={"guidance_scale": 0.0}),
        prompts=Recorded(
            "ZImageControlNetPipeline",
            TWO,
            asked={"guidance_scale": 0.0, "prompt_embeds": [noise(9, 32), noise(40, 32)]},
        ),
    ),
}
CASES: dict[str, Case] = {**WRITTEN, **RECORDED}

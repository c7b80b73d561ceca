"""LTX-2 (Lightricks 2025): a video and an audio stream that attend to themselves, to text and to one another.

Spatio-temporal guidance leaves the self-attention of some blocks out.
"""

from ..types import LOCAL, Attention, Cut, Region, Stream, Table, TokenLayout, rotary

IMAGE, AUDIO = ("image",), ("audio",)
# Block argument -> the stream it has an entry per token of.
ROTARY = {
    "video_rotary_emb": IMAGE,
    "audio_rotary_emb": AUDIO,
    "ca_video_rotary_emb": IMAGE,
    "ca_audio_rotary_emb": AUDIO,
}
MODULATION = {
    "temb": IMAGE,
    "temb_audio": AUDIO,
    "temb_ca_scale_shift": IMAGE,
    "temb_ca_audio_scale_shift": AUDIO,
    "temb_ca_gate": IMAGE,
    "temb_ca_audio_gate": AUDIO,
}

BLOCKS = Region(
    "transformer_blocks",
    streams=(Stream("image", "hidden_states", out=0), Stream("audio", "audio_hidden_states", out=1)),
    attention=(
        Attention(IMAGE, IMAGE, unless="all_perturbed"),
        Attention(AUDIO, AUDIO, unless="all_perturbed"),
        LOCAL,
        LOCAL,
        Attention(IMAGE, AUDIO, only_if="use_a2v_cross_attention"),
        Attention(AUDIO, IMAGE, only_if="use_v2a_cross_attention"),
    ),
    cuts=(
        *(cut for arg, tokens in ROTARY.items() for cut in rotary(arg, 1, tokens, ndim=3)),
        *(Cut(arg, 1, tokens) for arg, tokens in MODULATION.items()),
        *(cut for arg, tokens in ROTARY.items() for cut in rotary(arg, 2, tokens, ndim=4)),
    ),
    whole=(
        "encoder_hidden_states",
        "audio_encoder_hidden_states",
        "encoder_attention_mask",
        "audio_encoder_attention_mask",
        "perturbation_mask",
        "all_perturbed",
        "temb_prompt",
        "temb_prompt_audio",
    ),
)

LAYOUT = TokenLayout(
    "LTX2VideoTransformer3DModel",
    (BLOCKS,),
    tables=(
        # One angle per channel before the heads are split, or one table per head.
        Table("LTX2Attention", "query_rotary_emb", ndim=3, dim=2, width="queries"),
        Table("LTX2Attention", "key_rotary_emb", ndim=3, dim=2, width="queries"),
        Table("LTX2Attention", "query_rotary_emb", ndim=4, dim=1, width="heads"),
        Table("LTX2Attention", "key_rotary_emb", ndim=4, dim=1, width="heads"),
    ),
    refused={"video_self_attention_mask": "a mask over pairs of video tokens is not cut"},
)

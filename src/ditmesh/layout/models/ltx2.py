"""LTX-2 (Lightricks 2025): a video and an audio stream that attend to themselves, to text and to one another.

Spatio-temporal guidance leaves the self-attention of some blocks out.
"""

from ..types import LOCAL, Attention, Cut, Region, Stream, Table, TokenLayout

LAYOUT = TokenLayout(
    model="LTX2VideoTransformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states", out=0), Stream("audio", "audio_hidden_states", out=1)),
            attention=(
                Attention(queries=("image",), keys=("image",), unless="all_perturbed"),
                Attention(queries=("audio",), keys=("audio",), unless="all_perturbed"),
                LOCAL,
                LOCAL,
                Attention(queries=("image",), keys=("audio",), only_if="use_a2v_cross_attention"),
                Attention(queries=("audio",), keys=("image",), only_if="use_v2a_cross_attention"),
            ),
            cuts=(
                Cut("video_rotary_emb.0", dim=1, tokens=("image",), ndim=3),
                Cut("video_rotary_emb.1", dim=1, tokens=("image",), ndim=3),
                Cut("audio_rotary_emb.0", dim=1, tokens=("audio",), ndim=3),
                Cut("audio_rotary_emb.1", dim=1, tokens=("audio",), ndim=3),
                Cut("ca_video_rotary_emb.0", dim=1, tokens=("image",), ndim=3),
                Cut("ca_video_rotary_emb.1", dim=1, tokens=("image",), ndim=3),
                Cut("ca_audio_rotary_emb.0", dim=1, tokens=("audio",), ndim=3),
                Cut("ca_audio_rotary_emb.1", dim=1, tokens=("audio",), ndim=3),
                Cut("temb", dim=1, tokens=("image",)),
                Cut("temb_audio", dim=1, tokens=("audio",)),
                Cut("temb_ca_scale_shift", dim=1, tokens=("image",)),
                Cut("temb_ca_audio_scale_shift", dim=1, tokens=("audio",)),
                Cut("temb_ca_gate", dim=1, tokens=("image",)),
                Cut("temb_ca_audio_gate", dim=1, tokens=("audio",)),
                Cut("video_rotary_emb.0", dim=2, tokens=("image",), ndim=4),
                Cut("video_rotary_emb.1", dim=2, tokens=("image",), ndim=4),
                Cut("audio_rotary_emb.0", dim=2, tokens=("audio",), ndim=4),
                Cut("audio_rotary_emb.1", dim=2, tokens=("audio",), ndim=4),
                Cut("ca_video_rotary_emb.0", dim=2, tokens=("image",), ndim=4),
                Cut("ca_video_rotary_emb.1", dim=2, tokens=("image",), ndim=4),
                Cut("ca_audio_rotary_emb.0", dim=2, tokens=("audio",), ndim=4),
                Cut("ca_audio_rotary_emb.1", dim=2, tokens=("audio",), ndim=4),
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
        ),
    ),
    tables=(
        # One angle per channel before the heads are split, or one table per head.
        Table("LTX2Attention", "query_rotary_emb", ndim=3, dim=2, width="queries"),
        Table("LTX2Attention", "key_rotary_emb", ndim=3, dim=2, width="queries"),
        Table("LTX2Attention", "query_rotary_emb", ndim=4, dim=1, width="heads"),
        Table("LTX2Attention", "key_rotary_emb", ndim=4, dim=1, width="heads"),
    ),
    refused={
        "video_self_attention_mask": "a mask over pairs of video tokens is not cut",
    },
)

"""Whole pipelines with random weights, small enough to be made in a second: Stable Diffusion 3, and Wan for videos."""

from __future__ import annotations

import json
from pathlib import Path


def save_tiny_sd3(folder: Path, channels: int = 4) -> Path:
    """Write a pipeline of 32x32 pictures (16 x 16 latents, 8 x 8 tokens, 8 heads of 8) and return its folder.

    diffusers' inpainting wants 16 latent ``channels``.
    """
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(0)
    tokenizer = letters_tokenizer(folder / "words")
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        projection_dim=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    t5 = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, tie_word_embeddings=False
    )
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=channels,
        out_channels=channels,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=8,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=32,
        shift_factor=0.0,
        scaling_factor=1.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=CLIPTextModelWithProjection(text),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer_2=tokenizer,
        # The pipeline cannot be loaded without one; it reads through the same tokenizer.
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=tokenizer,
    )
    pipe.save_pretrained(folder / "tiny-sd3")
    return folder / "tiny-sd3"


def save_tiny_wan(folder: Path, image_to_video: bool = False) -> Path:
    """Write a pipeline of videos (4 times smaller latents along each side and 4k + 1 frames, 8 heads of 12).

    Args:
        folder: where to.
        image_to_video: one that begins with a picture, whose latents it is given beside the noise.
    """
    import torch
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    tokenizer = letters_tokenizer(folder / "words")
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
    transformer = WanTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=12,
        in_channels=12 if image_to_video else 4,
        out_channels=4,
        text_dim=32,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )
    encoder = UMT5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    kind = WanImageToVideoPipeline if image_to_video else WanPipeline
    pipe = kind(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(encoder),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
        **({"image_processor": None, "image_encoder": None} if image_to_video else {}),
    )
    name = "tiny-wan-i2v" if image_to_video else "tiny-wan"
    pipe.save_pretrained(folder / name)
    return folder / name


def save_tiny_ltx(folder: Path) -> Path:
    """Write a video pipeline (LTX; 4 x 4 pixels and 4 frames for a latent, 4 heads of 8) and return its folder."""
    import torch
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    tokenizer = letters_tokenizer(folder / "words")
    t5 = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, tie_word_embeddings=False
    )
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    pipe = LTXPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=T5EncoderModel(t5),
        tokenizer=tokenizer,
    )
    pipe.save_pretrained(folder / "tiny-ltx")
    return folder / "tiny-ltx"


def letters_tokenizer(folder: Path):
    """A CLIP tokenizer that knows the letters and nothing else."""
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=24)

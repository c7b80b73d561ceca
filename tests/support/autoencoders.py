"""Tiny autoencoders with random weights, one per class, and what they are asked to decode and encode. All float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ditmesh.comm.mesh import Mesh
from ditmesh.config import ParallelConfig
from ditmesh.parts import banded_rules as rules
from ditmesh.parts.banded import Banded, Bands
from ditmesh.strategies.vae.parallel import InBands
from support.models import stirred

LEVELS = (8, 8, 8)


@dataclass(frozen=True)
class Case:
    """One autoencoder.

    Attributes:
        make: builds it.
        latents: shape of latents to decode; rows divide by nothing.
        pixels: shape of a picture or a video to encode.
        calls: further arguments of ``decode``.
    """

    make: Callable[[], nn.Module]
    latents: tuple[int, ...]
    pixels: tuple[int, ...]
    calls: dict[str, Any] = field(default_factory=dict)


def _kl(kind: str, levels: int = 3, **settings: Any) -> nn.Module:
    return getattr(diffusers, kind)(
        **{
            "block_out_channels": (8, 16, 16)[:levels],
            "down_block_types": ("DownEncoderBlock2D",) * levels,
            "up_block_types": ("UpDecoderBlock2D",) * levels,
            "latent_channels": 4,
            "norm_num_groups": 4,
            "layers_per_block": 1,
            **settings,
        }
    )


def _dc(**settings: Any) -> nn.Module:
    return diffusers.AutoencoderDC(
        **{
            "latent_channels": 8,
            "attention_head_dim": 4,
            "encoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8, 16),
            "decoder_block_out_channels": (8, 8, 16),
            "encoder_layers_per_block": (1, 1, 2),
            "decoder_layers_per_block": (1, 1, 2),
            "encoder_qkv_multiscales": ((), (), (5,)),
            "decoder_qkv_multiscales": ((), (), (5,)),
            "upsample_block_type": "pixel_shuffle",
            "downsample_block_type": "pixel_unshuffle",
            **settings,
        }
    )


def _wan(**settings: Any) -> nn.Module:
    return diffusers.AutoencoderKLWan(
        **{
            "base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 2, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True],
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
            **settings,
        }
    )


PICTURE, LATENTS = (2, 3, 44, 32), (2, 4, 11, 8)
FILM, FRAMES = (1, 3, 5, 44, 24), (1, 4, 3, 11, 6)

CASES: dict[str, Case] = {
    "AutoencoderKL": Case(lambda: _kl("AutoencoderKL"), LATENTS, PICTURE),
    "AutoencoderKLFlux2": Case(lambda: _kl("AutoencoderKLFlux2"), LATENTS, PICTURE),
    "AsymmetricAutoencoderKL": Case(
        lambda: diffusers.AsymmetricAutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            down_block_out_channels=(8, 8),
            up_block_types=("UpDecoderBlock2D",) * 2,
            up_block_out_channels=(8, 8),
            norm_num_groups=4,
        ),
        (2, 4, 11, 8),
        (2, 3, 22, 16),
    ),
    "AutoencoderTiny": Case(
        lambda: diffusers.AutoencoderTiny(
            encoder_block_out_channels=LEVELS,
            decoder_block_out_channels=LEVELS,
            num_encoder_blocks=(1, 1, 1),
            num_decoder_blocks=(1, 1, 1),
        ),
        LATENTS,
        PICTURE,
    ),
    "AutoencoderDC": Case(_dc, (2, 8, 11, 8), (2, 3, 44, 32)),
    "AutoencoderDC interpolated": Case(
        lambda: _dc(upsample_block_type="interpolate", downsample_block_type="conv"), (1, 8, 11, 8), (1, 3, 44, 32)
    ),
    "AutoencoderKLTemporalDecoder": Case(
        lambda: diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4
        ),
        (2, 4, 11, 6),
        (2, 3, 22, 12),
        {"num_frames": 2},
    ),
    "AutoencoderKLWan": Case(_wan, FRAMES, FILM),
    "AutoencoderKLWan 2.2": Case(
        lambda: _wan(is_residual=True, patch_size=2, in_channels=12, out_channels=12, decoder_base_dim=8),
        (1, 4, 3, 11, 6),
        (1, 3, 5, 88, 48),
    ),
    "AutoencoderKLQwenImage": Case(
        lambda: diffusers.AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        (2, 4, 1, 11, 8),
        (2, 3, 1, 44, 32),
    ),
    "AutoencoderKLHunyuanVideo": Case(
        lambda: diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            block_out_channels=(8, 8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 3,
            up_block_types=("HunyuanVideoUpBlock3D",) * 3,
            spatial_compression_ratio=4,
        ),
        FRAMES,
        FILM,
    ),
    "AutoencoderKLHunyuanVideo15": Case(
        lambda: diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8), layers_per_block=1, spatial_compression_ratio=4
        ),
        FRAMES,
        FILM,
    ),
    "AutoencoderKLHunyuanImage": Case(
        lambda: diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=4,
            sample_size=64,
        ),
        LATENTS,
        PICTURE,
    ),
    "AutoencoderKLHunyuanImageRefiner": Case(
        lambda: diffusers.AutoencoderKLHunyuanImageRefiner(
            latent_channels=4,
            block_out_channels=(8, 8, 8),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
        ),
        FRAMES,
        FILM,
    ),
    "AutoencoderKLLTXVideo": Case(
        lambda: diffusers.AutoencoderKLLTXVideo(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        (1, 4, 2, 11, 4),
        (1, 3, 9, 352, 64),
    ),
    "AutoencoderKLLTXVideo with noise": Case(
        lambda: diffusers.AutoencoderKLLTXVideo(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            decoder_inject_noise=(True, True, True, True, True),
            timestep_conditioning=True,
        ),
        (1, 4, 2, 11, 4),
        (1, 3, 9, 352, 64),
        {"temb": 0.05},
    ),
    "AutoencoderKLLTX2Video": Case(
        lambda: diffusers.AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        ),
        (1, 4, 2, 11, 4),
        (1, 3, 9, 352, 64),
    ),
    "AutoencoderKLCogVideoX": Case(
        lambda: diffusers.AutoencoderKLCogVideoX(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
        ),
        (1, 4, 3, 11, 6),
        (1, 3, 9, 88, 48),
    ),
    "AutoencoderKLMochi": Case(
        lambda: diffusers.AutoencoderKLMochi(
            latent_channels=4,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        (1, 4, 2, 11, 6),
        (1, 3, 7, 88, 48),
    ),
    "AutoencoderKLCosmos": Case(
        lambda: diffusers.AutoencoderKLCosmos(
            latent_channels=4,
            encoder_block_out_channels=(8, 8, 8, 8),
            decode_block_out_channels=(8, 8, 8, 8),
            attention_resolutions=(8,),
            resolution=64,
            num_layers=1,
            latents_mean=None,
            latents_std=None,
        ),
        (1, 4, 3, 11, 6),
        (1, 3, 9, 88, 48),
    ),
    "AutoencoderKLKVAE": Case(
        lambda: diffusers.AutoencoderKLKVAE(
            channels=32, num_enc_blocks=1, num_dec_blocks=1, z_channels=4, ch_mult=(1, 1, 1), sample_size=64
        ),
        LATENTS,
        PICTURE,
    ),
    "AutoencoderKLKVAEVideo": Case(
        lambda: diffusers.AutoencoderKLKVAEVideo(ch=32, ch_mult=(1, 1, 1), num_res_blocks=1, z_channels=4),
        FRAMES,
        (1, 3, 9, 44, 24),
    ),
    "AutoencoderKLQwenImage21": Case(
        lambda: diffusers.AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        (1, 4, 1, 11, 8),
        (1, 4, 1, 88, 64),
    ),
    "AutoencoderKLMagvit": Case(
        lambda: diffusers.AutoencoderKLMagvit(
            latent_channels=4, block_out_channels=[8, 8, 8, 8], layers_per_block=1, norm_num_groups=4
        ),
        (1, 4, 3, 11, 6),
        (1, 3, 9, 88, 48),
    ),
}


@cache
def made(name: str) -> nn.Module:
    """The autoencoder of a case, with the same weights in every process."""
    torch.manual_seed(0)
    model = stirred(CASES[name].make().eval())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def result(name: str, direction: str, compute: Callable[..., Any] | None = None, dtype: str = "float32") -> Tensor:
    """What an autoencoder of diffusers returns: decoded pixels, or the parameters of encoded latents.

    Args:
        name: of the case.
        direction: ``"decode"`` or ``"encode"``.
        compute: in place of the autoencoder's method of that name.
        dtype: of weights and inputs.
    """
    case, vae = CASES[name], made(name)
    if vae.dtype != getattr(torch, dtype):
        vae = vae.to(getattr(torch, dtype))
    shape = case.latents if direction == "decode" else case.pixels
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(vae.dtype)
    calls = {key: torch.tensor([v] * shape[0]) if isinstance(v, float) else v for key, v in case.calls.items()}
    # Some decoders add noise.
    torch.manual_seed(2)
    with torch.no_grad():
        more = calls if direction == "decode" else {}
        (found,) = (compute or getattr(vae, direction))(given, return_dict=False, **more)
    return found if isinstance(found, Tensor) else found.parameters


@contextmanager
def bands_of_ranks(**settings: Any) -> Iterator[Bands]:
    """All ranks as those that share rows, in a request."""
    mesh = Mesh(ParallelConfig(ring=dist.get_world_size(), **settings))
    try:
        with mesh.request("bands"):
            yield Bands(mesh.world, rules.BAND_RULES, rules.FUNCTION_RULES)
    finally:
        mesh.close()


def against_whole(name: str, direction: str, dtype: str = "float32", **settings: Any) -> dict[str, Any]:
    """On a rank: the largest error of a result in bands, relative to the largest value, and what had no rule."""
    truth = result(name, direction, dtype=dtype).float()
    with bands_of_ranks(**settings) as bands:
        banded = InBands(made(name), bands.link)
        found = result(name, direction, lambda *args, **more: banded.call(direction, *args, **more), dtype).float()
    if dtype != "float32":
        made(name).float()
    return {
        "error": float((found - truth).abs().max() / truth.abs().max()),
        "plain": type(found) is Tensor,
        "whole": dict(banded.bands.whole),
    }


def without(what: str, name: str, direction: str) -> float:
    """On a rank: the error when rows of neighbours are zeros, or statistics are those of a rank's own rows."""
    fetched = Bands.fetched

    def zeros(self: Bands, *args: Any) -> Any:
        above, own, below = fetched(self, *args)
        return [torch.zeros_like(one) for one in above], own, [torch.zeros_like(one) for one in below]

    def own(op: Any) -> Any:
        with mock.patch.object(op.bands.link, "all_reduce", lambda sums: sums * op.bands.link.size):
            return rules.group_norm(op)

    def blind(bands: Bands, query: Banded, key: Banded, value: Banded, *args: Any, **more: Any) -> Tensor:
        with mock.patch.object(Banded, "whole", lambda one: one.local):
            return rules.attention(bands, query, key, value, *args, **more)

    patches = {
        "halo": mock.patch.object(Bands, "fetched", zeros),
        "statistics": mock.patch.dict(rules.BAND_RULES, {torch.ops.aten.native_group_norm: own}),
        "keys": mock.patch.dict(rules.FUNCTION_RULES, dict.fromkeys(rules.FUNCTION_RULES, blind)),
    }
    with patches[what]:
        return against_whole(name, direction)["error"]

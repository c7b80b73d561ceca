"""What the tiny autoencoders of parts.json are asked to decode and encode. All float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ditmesh.comm.mesh import Mesh
from ditmesh.config import ParallelConfig
from ditmesh.parts import banded_rules as rules
from ditmesh.parts.banded import Banded, Bands
from ditmesh.strategies.vae.parallel import InBands
from support.models import SECTIONS, fresh


@dataclass(frozen=True)
class Case:
    """What one autoencoder is asked for.

    Attributes:
        latents: shape of latents to decode; rows divide by nothing.
        pixels: shape of a picture or a video to encode.
        calls: further arguments of ``decode``.
    """

    latents: tuple[int, ...]
    pixels: tuple[int, ...]
    calls: dict[str, Any] = field(default_factory=dict)


PICTURE = Case((2, 4, 11, 8), (2, 3, 44, 32))
FILM = Case((1, 4, 3, 11, 6), (1, 3, 5, 44, 24))
LARGE_FILM = Case((1, 4, 3, 11, 6), (1, 3, 9, 88, 48))
LTX = Case((1, 4, 2, 11, 4), (1, 3, 9, 352, 64))
SHAPES: dict[str, Case] = {
    "AutoencoderKL": PICTURE,
    "AutoencoderKLFlux2": PICTURE,
    "AsymmetricAutoencoderKL": Case((2, 4, 11, 8), (2, 3, 22, 16)),
    "AutoencoderTiny": PICTURE,
    "AutoencoderDC": Case((2, 8, 11, 8), (2, 3, 44, 32)),
    "AutoencoderDC interpolated": Case((1, 8, 11, 8), (1, 3, 44, 32)),
    "AutoencoderKLTemporalDecoder": Case((2, 4, 11, 6), (2, 3, 22, 12), {"num_frames": 2}),
    "AutoencoderKLWan 2.2": Case((1, 4, 3, 11, 6), (1, 3, 5, 88, 48)),
    "AutoencoderKLQwenImage": Case((2, 4, 1, 11, 8), (2, 3, 1, 44, 32)),
    "AutoencoderKLHunyuanImage": PICTURE,
    "AutoencoderKLLTXVideo": LTX,
    "AutoencoderKLLTXVideo with noise": replace(LTX, calls={"temb": 0.05}),
    "AutoencoderKLLTX2Video": LTX,
    "AutoencoderKLCogVideoX": LARGE_FILM,
    "AutoencoderKLMochi": Case((1, 4, 2, 11, 6), (1, 3, 7, 88, 48)),
    "AutoencoderKLCosmos": LARGE_FILM,
    "AutoencoderKLKVAE": PICTURE,
    "AutoencoderKLKVAEVideo": Case((1, 4, 3, 11, 6), (1, 3, 9, 44, 24)),
    "AutoencoderKLQwenImage21": Case((1, 4, 1, 11, 8), (1, 4, 1, 88, 64)),
    "AutoencoderKLMagvit": LARGE_FILM,
}
CASES = {name: SHAPES.get(name, FILM) for name in SECTIONS["autoencoders"]}


@cache
def made(name: str) -> nn.Module:
    """The autoencoder of a case, with the same weights in every process."""
    model = fresh(name)
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

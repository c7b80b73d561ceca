"""The autoencoder in bands: what it decodes and encodes is what one device does, without tiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ditmesh
from ditmesh import zoo
from ditmesh.parts.band import Band, bands_of
from ditmesh.parts.banded import Banded, UncuttableOperation
from ditmesh.strategies.vae.parallel import TESTED, InBands, _why_whole, in_bands
from support.autoencoders import CASES, against_whole, bands_of_ranks, without
from support.models import fresh
from support.sample import sampled

# Operations that are computed on whole tensors: frames are written one by one into room for all.
WITHOUT = {"AutoencoderKLKVAEVideo": {"aten.copy_.default"}}
TOLERANCE = 1e-5  # relative, float32; measured errors are below 3e-6


@pytest.mark.parametrize(
    ("name", "how"), sampled(CASES, list(product(["decode", "encode"], [2, 3, 4])), of=18), ids=str
)
def test_equals_one_device(ranks, name, how):
    """11 rows of latents: bands are uneven on all numbers of ranks. Nothing else is computed on whole tensors."""
    direction, ranks_ = how
    for found in ranks(ranks_).run(against_whole, name, direction):
        assert found["error"] <= TOLERANCE
        assert found["plain"]
        assert set(found["whole"]) <= WITHOUT.get(name, set())


def test_what_auto_takes_is_what_is_tested():
    assert {name.split()[0] for name in CASES} == TESTED


@pytest.mark.parametrize("what", ["halo", "statistics", "keys"])
def test_negative_control(ranks, what):
    """Without what ranks exchange the same comparison fails, by orders of magnitude."""
    for error in ranks(2).run(without, what, "AutoencoderKL", "decode"):
        assert error > 100 * TOLERANCE


def test_over_the_process_group(ranks):
    """As between hosts."""
    for found in ranks(3).run(against_whole, "AutoencoderKLHunyuanVideo", "decode", shared_memory=False):
        assert found["error"] <= TOLERANCE


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(5, 4), (4, 4, 3), (1, 9, 0, 2), (3,) * 5])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, 1), (3, 1, 0), (3, 2, 1), (4, 2, 1), (1, 1, 0), (5, 1, 4)]
)
def test_windows_of_a_cut(rows, kernel, stride, padding):
    """Every row of the result has one rank; a layer that keeps the number of rows keeps the cut."""
    total = (sum(rows) + 2 * padding - kernel) // stride + 1
    after = Band(2, rows).windowed(total, kernel, stride, padding, 1)
    assert after.total == total
    assert min(after.rows) >= 0
    if total == sum(rows):
        assert after.rows == rows


def test_pictures_are_cut_where_encoders_halve_them():
    assert bands_of(1024, 3) == (384, 320, 320)
    assert bands_of(64, 4) == (16,) * 4
    assert sum(bands_of(37, 4)) == 37


# --- operations -------------------------------------------------------------------------------------------------------


def written_slice(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, :, 2:7] = 0.5
    y[:, 1:] += x[:, :1]
    return y


def written_view(x: Tensor) -> Tensor:
    y = (x * 1.0).contiguous()
    y.view(y.shape[0], -1, 4).mul_(2.0)
    y.diagonal(dim1=2, dim2=3).fill_(7.0)
    return y


def written_to_plain(x: Tensor) -> Tensor:
    room = torch.zeros(x.shape[0], 2 * x.shape[1], *x.shape[2:])
    room[:, : x.shape[1]] = x
    return room + 1.0


def single_head(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    scores = (tokens @ tokens.transpose(1, 2) * 0.1).softmax(-1)
    return (scores @ tokens).transpose(1, 2).reshape(x.shape)


def linear_attention(x: Tensor) -> Tensor:
    values = x.flatten(2)
    return (values @ values.transpose(1, 2).relu() @ values).reshape(x.shape)


WEIGHT = torch.randn(6, 6, 5, 3, generator=torch.Generator().manual_seed(3)) * 0.2

# What decoders do, or might: functions of (2, 6, 12, 8).
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "stride": lambda x: F.conv2d(x, WEIGHT, stride=(2, 1), padding=(2, 1)),
    "mean": lambda x: x * x.mean() + x.std(),
    "transposed": lambda x: F.conv_transpose2d(x, WEIGHT[:, :, :2, :2], stride=2),
    "transposed, overlapping": lambda x: F.conv_transpose2d(x, WEIGHT, stride=2, padding=1),
    "reflected": lambda x: F.conv2d(F.pad(x, (1, 1, 2, 2), mode="reflect"), WEIGHT),
    "channels last": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (6,)).permute(0, 3, 1, 2),
    "dimensions": lambda x: x.transpose(1, 2).movedim(1, -1).squeeze(0).swapaxes(1, 3).permute(0, 3, 1, 2) * 1.0,
    "shuffled": lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2),
    "a row": lambda x: x + x[:, :, :1] + x[:, :, 3, None],
    "written to a slice": written_slice,
    "written to a view": written_view,
    "written to a plain tensor": written_to_plain,
    "one head": single_head,
    "linear attention": linear_attention,
    "where": lambda x: torch.where(x > 0, x, x.new_zeros(()))[:, :, ::2],
    "noise": lambda x: x + torch.randn_like(x) + torch.randn(x.shape),
}
# Those that no rule covers, by what is computed on whole tensors.
WITHOUT_RULE = {
    "transposed, overlapping",
    "channels last",
    "mean",
    "a row",
    "written to a view",
    "written to a plain tensor",
    "where",
    "noise",
}


def operations_against_whole(inference: bool) -> dict[str, tuple[float, list[str]]]:
    """On a rank: of every operation the error in bands, and what had no rule; NaN where it was refused."""
    found: dict[str, tuple[float, list[str]]] = {}
    with bands_of_ranks() as bands:
        for name, function in OPERATIONS.items():
            x = torch.randn(2, 6, 12, 8, generator=torch.Generator().manual_seed(0))
            before = bands.whole.copy()
            with torch.inference_mode() if inference else torch.no_grad():
                torch.manual_seed(1)
                truth = function(x)
                torch.manual_seed(1)
                size = bands.link.size
                try:
                    value = in_bands(bands, function, (12 - 3 * (size - 1), *(3,) * (size - 1)), x)
                except UncuttableOperation:
                    found[name] = (float("nan"), [])
                    continue
            assert (value.dtype, value.shape) == (truth.dtype, truth.shape), name
            error = float((value - truth).abs().max() / truth.abs().max())
            found[name] = error, list(bands.whole - before)
    return found


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_operations(ranks, inference):
    """With a rule or without one the result is right; what is written to a view without a rule is refused."""
    for found in ranks(3).run(operations_against_whole, inference):
        refused = {name for name, (error, _) in found.items() if error != error}
        # In inference mode nobody knows whether a view has been written to.
        assert refused == {"written to a view"} | ({"a row", "where"} if inference else set())
        assert {name: error for name, (error, _) in found.items() if error > TOLERANCE} == {}
        assert {name for name, (_, whole) in found.items() if whole} <= WITHOUT_RULE


# --- pipelines --------------------------------------------------------------------------------------------------------


@cache
def load(kind: str) -> Any:
    """Once in a process: every test restores it."""
    from diffusers import DiffusionPipeline, StableDiffusion3Img2ImgPipeline

    if kind == "image":
        pipe = StableDiffusion3Img2ImgPipeline(**load("text").components)
    else:
        pipe = DiffusionPipeline.from_pretrained(zoo.path())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures(kind: str, count: int) -> np.ndarray:
    """Pixels of 0 to 1."""
    noise = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    side = load("text").transformer.config.sample_size * 8
    spots = [PIL.Image.fromarray(noise).resize((side, side))] * count
    given = {"image": spots, "strength": 0.6} if kind == "image" else {}
    return (
        load(kind)(
            ["a red fox", "a cactus", "a pizza"][:count],
            num_inference_steps=4,
            guidance_scale=3.0,
            generator=[torch.Generator().manual_seed(number) for number in range(count)],
            output_type="np",
            **given,
        )
    ).images


def in_pipeline(kind: str, count: int, config: dict[str, Any], tiled: bool = False) -> dict[str, Any]:
    """On a rank: a pipeline's pictures with its autoencoder in bands, and without."""
    pipe, seen = load(kind), {}
    vae = pipe.vae
    hooks = [
        getattr(vae, name).register_forward_hook(lambda m, args, out, n=name: seen.update({n: type(args[0])}))
        for name in ("encoder", "decoder")
    ]
    with ditmesh.parallelized(pipe, {**config, "vae": "whole"}):
        truth = pictures(kind, count)
    if tiled:
        vae.enable_tiling()
    try:
        with ditmesh.parallelized(pipe, config), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            before = dict(vars(vae))
            found = pictures(kind, count)
            again = pictures(kind, count)
            between = dict(vars(vae))
    finally:
        vae.disable_tiling()
        for hook in hooks:
            hook.remove()
    return {
        "error": float(abs(found - truth).max()),
        "repeats": bool((found == again).all()),
        "banded": {name: kind is Banded for name, kind in seen.items()},
        "untouched": before == between,
        "said": [str(one.message) for one in said if "whole" in str(one.message)],
    }


@pytest.mark.parametrize(
    ("kind", "count", "config"),
    [
        ("text", 1, {"ulysses": 2}),
        ("image", 1, {"ring": 2}),
        pytest.param("image", 3, {"cfg": 2}, marks=pytest.mark.matrix),
        pytest.param("text", 1, {"pipe": 2, "warmup": "fixed(1)"}, marks=pytest.mark.matrix),
        pytest.param("text", 2, {"data": 2, "ulysses": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_pipelines(ranks, kind, count, config):
    """The same pixels; between requests the autoencoder is as it was."""
    axes = [value for key, value in config.items() if key != "warmup"]
    for found in ranks(prod(axes)).run(in_pipeline, kind, count, {**config, "vae": "bands"}):
        assert found["error"] <= TOLERANCE
        assert found["repeats"]
        assert all(found["banded"].values())
        assert found["untouched"]
        assert found["said"] == []


def test_small_pictures_stay_whole(ranks):
    """By default, and without a word."""
    for found in ranks(2).run(in_pipeline, "text", 1, {"ulysses": 2}):
        assert found["error"] == 0.0
        assert not any(found["banded"].values())
        assert found["said"] == []


def test_tiling_is_left_alone(ranks):
    """It computes another picture: whoever wants it has it, and is told."""
    for found in ranks(2).run(in_pipeline, "text", 1, {"ulysses": 2, "vae": "bands"}, True):
        assert not any(found["banded"].values())
        assert len(found["said"]) == 1
        assert "tiling is on" in found["said"][0]


def of_minimax() -> tuple[str | None, float]:
    """Why the autoencoder of MiniMax-H3 runs whole by itself; and without tiles the error of what it encodes."""
    vae = fresh("minimax vae").requires_grad_(False)
    pixels = torch.randn(1, 3, 17, 176, 64, generator=torch.Generator().manual_seed(0))
    truth = vae.disable_tiling() or vae.encode(pixels, return_dict=False)[0].parameters
    with torch.no_grad(), bands_of_ranks() as bands:
        banded = InBands(vae, bands.link)
        found = banded.call("encode", pixels, return_dict=False)[0].parameters
        with pytest.raises(UncuttableOperation):
            banded.call("decode", torch.zeros(1, 24, 7, 11, 4))
        vae.enable_tiling()
        return _why_whole(vae, pixels, bands.link), float((found - truth).abs().max() / truth.abs().max())


def test_minimax_h3_decodes_whole(ranks):
    """By default it works in tiles, as its released frames were; without them a decoder of tokens has no bands."""
    for why, error in ranks(2).run(of_minimax):
        assert why is not None
        assert "tiling is on" in why
        assert error <= TOLERANCE

"""Models that keep keys and values: chunk by chunk what one device makes, with a share of what it keeps.

The caches are the models' own, and so is the code that writes to them, cuts windows of them and fills them anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import Tensor, nn

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.core.partition import even_cut
from support.classes import animate_2, animate_2_call, made, noise, refiner
from support.exam import EXAMS
from support.exam import draw as drawn
from support.parity import largest_error, tensors

TOLERANCE = 1e-5  # relative, float32
CHUNKS = 4
ULYSSES = {"ulysses": 2}
GATHER = {"ring": 2, "exchange": "gather"}
# Of three ranks one has two of four heads; two heads are too few, and every rank keeps them all.
GATHER_3 = {"ring": 3, "exchange": "gather"}
TENSOR = {"tensor": 2}

# A program that draws with a model, and what the model has kept then; the model; how many heads it has.
Program = tuple[Any, Callable[[], tuple[list[Tensor], Any]], int]


def windows() -> Program:
    """The refiner: frames that every chunk attends to (the sink), and a window over those of the chunk before."""
    model = made("SanaWMLTX2RefinerTransformer3DModel")

    def draw() -> tuple[list[Tensor], Any]:
        cache, out = SanaWMRefinerKVCache(2), []
        first = refiner("capture_pre_rope")
        out += tensors(model(**first | {"kv_cache": cache}))
        for layer in cache.layer_caches:
            layer.store_sink(*layer.get_captured_pre_rope())
        cache.sink_pe = tuple(first["video_rotary_emb"])
        window = first["hidden_states"].shape[1] + 3
        for chunk in range(CHUNKS):
            frames = {"hidden_states": noise(*first["hidden_states"].shape, seed=20 + chunk), "kv_cache": cache}
            for mode in ("inject", "inject_and_capture_post_rope"):
                out += tensors(model(**refiner(mode) | frames))
            for layer in cache.layer_caches:
                new = layer.get_captured_post_rope()
                old = layer.get_history() or [one[:, :0] for one in new]
                layer.store_history(*(torch.cat(pair, 1)[:, -window:] for pair in zip(old, new, strict=True)))
        return out, cache

    return model, draw, 4


def references() -> Program:
    """Wan-Animate 2: chunks that attend to a driving video, which another one takes the place of half-way."""
    model = animate_2()

    def draw() -> tuple[list[Tensor], Any]:
        cache, out = WanAnimate2KVCache(2), []
        for chunk in range(CHUNKS):
            for mode in ("extract", "cached") if chunk % 2 == 0 else ("cached",):
                call: dict[str, Any] = {**animate_2_call(mode), "kv_cache": cache}
                frames = call["hidden_states"][0]
                out += tensors(model(**call | {"hidden_states": [noise(*frames.shape, seed=30 + chunk)]}))
        return out, cache

    return model, draw, 4


def pipeline(name: str, heads: int) -> Program:
    """A pipeline; its cache is looked at after each call of its transformer: some are empty in the end."""
    pipe, kept = EXAMS[name].make(), [0]

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any], ___: Any) -> None:
        kept.append(bytes_of([value for key, value in kwargs.items() if key in ("kv_cache", "kv_caches")]))

    pipe.transformer.register_forward_hook(note, with_kwargs=True)

    def draw() -> tuple[list[Tensor], Any]:
        kept[:] = [0]
        torch.manual_seed(0)
        return tensors(drawn(pipe, EXAMS[name].call([1]))), max(kept)

    return pipe, draw, heads


PROGRAMS: dict[str, Callable[[], Program]] = {
    "SanaWMLTX2Refiner": windows,
    "WanAnimate2": references,
    "QwenImage21": lambda: pipeline("QwenImage21Pipeline", 4),
    "GlmImage": lambda: pipeline("GlmImagePipeline image", 4),
    "Flux2": lambda: pipeline("Flux2KleinKVPipeline pictures", 4),
    "AnyFlowFAR": lambda: pipeline("AnyFlowFARPipeline", 2),
}


def kept_in(value: Any) -> Iterator[Tensor]:
    """The keys and values in a cache; tables of positions beside them have fewer numbers a token."""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, tuple):
        inside = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", {})
        for item in inside.values() if isinstance(inside, dict) else inside:
            yield from kept_in(item)


def bytes_of(cache: Any) -> int:
    """Of a cache, or as they were counted."""
    return cache if isinstance(cache, int) else sum(tensor.untyped_storage().nbytes() for tensor in kept_in(cache))


def chunk_by_chunk(name: str, config: dict[str, Any]) -> tuple[list[float], float, float]:
    """Errors of two requests in turn; the share of a cache's bytes that this rank keeps; that of its heads."""
    model, draw, heads = PROGRAMS[name]()
    with torch.no_grad():
        truth, whole = draw()
        bytes_of_all = bytes_of(whole)
        with ditmesh.parallelized(model, config):
            requests = [draw() for _ in range(2)]
            errors = [largest_error(out, truth) for out, _ in requests]
            share = bytes_of(requests[1][1]) / bytes_of_all
    ranks = torch.distributed.get_world_size()
    own = even_cut(heads, ranks)[torch.distributed.get_rank()] / heads if heads >= ranks else 1.0
    return errors, share, own


SLOW = ("AnyFlowFAR", "Flux2", "GlmImage", "WanAnimate2")
CASES = [
    pytest.param(name, config, marks=[pytest.mark.matrix] * (name in SLOW or (config != ULYSSES and name != first)))
    for first in ("SanaWMLTX2Refiner",)
    for name in PROGRAMS
    for config in (ULYSSES, GATHER, GATHER_3, TENSOR)
    # Its table of positions is by channels of all heads: refused.
    if config != TENSOR or name != first
]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_chunk_by_chunk(ranks, name, config):
    number = ParallelConfig(**config).world_size
    errors, shares, heads = zip(*ranks(number).run(chunk_by_chunk, name, config), strict=True)
    assert max(max(errors)) <= (0 if config in (ULYSSES, GATHER) else TOLERANCE)
    # Lists of blocks may have their spare heads on unlike ranks.
    assert sum(shares) == pytest.approx(sum(heads), abs=1e-3), shares
    assert max(shares) <= max(heads) + 1e-3, shares


def mixed(config: dict[str, Any]) -> str:
    model, draw, _ = windows()
    out = model.transformer_blocks[1].attn1.to_out
    out[0] = nn.Sequential(nn.Softmax(-1), out[0])
    with torch.no_grad(), ditmesh.parallelized(model, config), pytest.raises(ditmesh.LayoutError) as error:
        draw()
    return str(error.value)


def test_a_module_that_mixes_its_heads_is_refused(ranks):
    for sentence in ranks(2).run(mixed, ULYSSES):
        assert "mixes its heads before the output's projection" in sentence


def refusal(config: dict[str, Any]) -> str:
    model, draw, _ = windows()
    with torch.no_grad(), ditmesh.parallelized(model, config):
        with pytest.raises(ditmesh.ConfigError) as error:
            draw()
        # And no second call that every rank would make as one device does.
        with pytest.raises(ditmesh.ConfigError, match=re.escape(str(error.value))):
            draw()
    with torch.no_grad():
        draw()
    return str(error.value)


def test_keys_that_are_kept_do_not_travel(ranks):
    assert "tensor=2 cannot run SanaWMLTX2RefinerTransformer3DModel" in ranks(2).run(refusal, TENSOR)[0]
    for sentence in ranks(2).run(refusal, {"ring": 2}):
        assert "ring=2 cannot run transformer_blocks.0.attn1" in sentence
        assert "set exchange='gather', or use ulysses" in sentence

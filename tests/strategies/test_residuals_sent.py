"""Displaced keys of which only what is new is sent: nothing is lost for good, and both sides know the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ditmesh
from ditmesh.comm import codec
from support.models import RAGGED, run, tiny
from support.stale import displaced, handler_of, moving


def walk(steps: int, tokens: int = 60) -> list[Tensor]:
    """Keys and values (tokens, 2, 2, 3, 8) that move as those of a model: channels alike, and by unlike amounts."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(1, 2, 2, 3, 8, generator=generator).mul(3).exp()
    now, found = torch.randn(tokens, 2, 2, 3, 8, generator=generator) * spread, []
    for _ in range(steps):
        found.append(now)
        together = torch.randn(1, 2, 2, 3, 8, generator=generator)
        now = now + 0.2 * spread * (together + torch.randn(now.shape, generator=generator))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[60], [20, 40], [10, 20, 30]])
def test_what_is_shown_is_what_receivers_have(dtype, cuts):
    """The sender's own copy moves on without reading the message; messages are those of `encode`."""
    packer, states = codec("int4"), [one.to(dtype) for one in walk(4)]
    assert packer is not None
    shown = states[0].clone()
    # The places of the receiver: a head's tokens lie together.
    there = states[0].permute(1, 2, 3, 0, 4).contiguous().permute(3, 0, 1, 2, 4)
    for now in states[1:]:
        expected = packer.encode(now.float() - shown.float())
        message = packer.encode_new(now.split(cuts), shown)
        assert torch.equal(message, expected)
        packer.put(message, there.split(cuts))
        assert torch.equal(shown, there)
    assert not torch.equal(shown, states[-1])


@pytest.mark.parametrize("made", [torch.zeros(5, 2, 1, 2, 8), torch.full((5, 2, 1, 2, 8), 3e4)], ids=["zeros", "large"])
def test_nothing_new_and_extremes_are_finite(made):
    packer = codec("int4")
    assert packer is not None
    message = packer.encode(made)
    assert abs(message.nbytes - made.numel() * packer.size(8)) < 1
    assert (packer.decode(message, tuple(made.shape)) - made).abs().max() <= made.abs().max()


def both_sides(compress: str, steps: list[int], config: dict[str, Any]) -> dict[str, Any]:
    """What every rank has at the end of some steps: of its own tokens as shown, of the others' as received."""
    model = tiny("SD3")
    with ditmesh.parallelized(model, displaced(**{"text": "shard", "compress": compress, **config})):
        engine = ditmesh.engine_of(model)
        engine.begin_request(20)
        for made, step in zip(moving("SD3", RAGGED, 20), range(20), strict=True):
            if step in steps:
                run(model, made)
            else:
                # The step passes without this model.
                engine.clock.advance()
                engine.clock.tick({"timestep": step + 1000.0}, {}, {})
        found = {}
        for key, buffer in handler_of(model).buffers.items():
            buffer.arrive()
            rank = buffer._ring.rank
            found[str(key)] = buffer._shown.clone(), torch.cat(buffer._slots[1 - rank]).clone()
        filled = [record.filled for record in engine.staleness.steps]
    return {"states": found, "filled": filled}


@pytest.mark.parametrize(
    ("steps", "config"),
    [
        (list(range(5)), {}),
        ([0, 1, 2, 5, 6, 7], {"predict": "linear"}),
        (list(range(5)), {"speeds": (3, 1), "predict": "linear"}),
        (list(range(4)), {"warmup": "fixed(0)"}),
        (list(range(8)), {"warmup": "steps(0 5)", "predict": "linear", "text": "replicate"}),
    ],
    ids=["plain", "steps left out", "uneven", "no warm-up", "synchronous between"],
)
def test_both_sides_know_the_same_bits(ranks, steps, config):
    one, two = ranks(2).run(both_sides, "int4", steps, config)
    assert one["states"]
    for key, (shown, received) in one["states"].items():
        assert torch.equal(shown, two["states"][key][1]), key
        assert torch.equal(received, two["states"][key][0]), key
    # After a gap a call is synchronous, on both ranks alike.
    assert one["filled"] == two["filled"]
    assert any(one["filled"]) == (len(steps) == 6)

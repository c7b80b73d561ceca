"""Displaced keys of which only what is new is sent: nothing is lost for good, and both sides know the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ditmesh
from ditmesh.comm import codec
from ditmesh.comm.compression import FewLevels, by_token
from support.models import RAGGED, inputs, run, tiny
from support.stale import displaced, handler_of, moving, next_step

RESIDUAL = ["residual4", "residual2", "residual1.6", "residual1"]


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


def lost(name: str, states: list[Tensor], feedback: bool = True) -> float:
    """Distance of what a receiver has at the end from what it should have, in units of the last step's change."""
    packer = codec(name)
    assert packer is not None
    shape = tuple(states[0].shape)
    have = states[0].clone()
    for before, now in pairwise(states):
        have = have + packer.decode(packer.encode(now - (have if feedback else before)), shape)
    return float((have - states[-1]).norm() / (states[-1] - states[-2]).norm())


@pytest.mark.parametrize(("name", "bound"), [*zip(RESIDUAL, (0.12, 0.4, 0.55, 0.9), strict=True)])
def test_what_rounding_leaves_out_is_sent_later(name, bound):
    """Errors stay what those of one message are; differences of the truth alone would let them add up."""
    states = walk(40)
    assert lost(name, states) < bound
    assert lost(name, states, feedback=False) > 2.5 * lost(name, states)


@pytest.mark.parametrize("name", RESIDUAL)
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_messages_are_as_long_as_said(name, tokens):
    packer, made = codec(name), walk(2, tokens)[1]
    assert packer is not None
    message = packer.encode(made)
    like = packer.empty(tuple(made.shape), made.device)
    assert (message.shape, message.dtype) == (like.shape, like.dtype)
    assert packer.decode(message, tuple(made.shape)).isfinite().all()
    said = made.numel() * packer.size(8) + packer.extra(2, tokens, 3, 8)
    assert abs(message.nbytes - said) < 1


@pytest.mark.parametrize("name", RESIDUAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[60], [20, 40], [10, 20, 30]])
def test_what_is_shown_is_what_receivers_have(name, dtype, cuts):
    """The sender's own copy moves on without reading the message; messages are those of `encode`."""
    packer, states = codec(name), [one.to(dtype) for one in walk(4)]
    assert packer is not None
    shown = states[0].clone()
    # The places of the receiver: a head's tokens lie together.
    there = states[0].permute(1, 2, 3, 0, 4).contiguous().permute(3, 0, 1, 2, 4)
    for now in states[1:]:
        expected = packer.encode(now.float() - shown.float())
        message = packer.encode_new(packer.new(now.split(cuts), shown), shown)
        assert torch.equal(message, expected)
        packer.put(message, there.split(cuts))
        assert torch.equal(shown, there)
    assert not torch.equal(shown, states[-1])


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_levels_are_packed_without_loss(levels):
    packer = FewLevels(levels)
    codes = torch.randint(levels, (1003,), generator=torch.Generator().manual_seed(1))
    packed = torch.empty(-(-1003 // packer.IN_A_BYTE[levels]), dtype=torch.uint8)
    packer._pack(codes.to(torch.int8), packed)
    units = packer._tables_on(packed.device).steps[0] / packer._tables_on(packed.device).powers[0]
    assert torch.equal(packer._steps(packed, (1003,), packer._room) * units, 2 * codes - (levels - 1.0))


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_products_of_what_codes_stand_for_are_exact(levels):
    """So a fused sum, of one kernel or another, has the bits of one that is rounded twice."""
    tables = FewLevels(levels)._tables_on(torch.device("cpu"))
    steps = torch.arange(1 - levels, levels, 2).double()
    few, halves = (table.double().frexp().mantissa.unique() for table in (tables.powers, tables.halves))
    spreads = torch.outer(halves, tables.falls.double()).view(-1)
    for numbers in (steps, torch.arange(6).double() - 2.5):
        products = torch.outer(torch.outer(numbers, few).view(-1), spreads)
        assert torch.equal(products, products.float().double())
        assert products.unique().numel() > 40


@pytest.mark.parametrize("name", RESIDUAL)
@pytest.mark.parametrize("cuts", [[60], [20, 40], [10, 20, 30]])
def test_messages_do_not_depend_on_how_tokens_lie_in_memory(name, cuts):
    packer, (before, now) = codec(name), walk(2)
    assert packer is not None
    messages, shown = [], []
    for order in ((0, 1, 2, 3, 4), (1, 2, 3, 0, 4), (3, 0, 1, 4, 2)):
        back = [order.index(dim) for dim in range(5)]
        there, have = (
            one.permute(order).clone(memory_format=torch.contiguous_format).permute(back) for one in (now, before)
        )
        messages.append(packer.encode_new(packer.new(there.split(cuts), have), have))
        shown.append(have)
    assert torch.equal(messages[0], packer.encode(now - before))
    assert all(torch.equal(message, messages[0]) for message in messages)
    assert all(torch.equal(have, shown[0]) for have in shown)


def parts_of(packer: FewLevels, message: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """What a message says of distances, spreads and means."""
    tokens, two, batch, heads, dim = shape
    tables = packer._tables_on(message.device)
    _, distances, sixes, largest, units = (part.long() for part in message.split(packer._parts(shape)))
    means, falls = (
        table[:, of] for table, of in zip((tables.six_means, tables.six_falls), sixes.chunk(2), strict=True)
    )
    channels = (two, batch, heads, 1, dim)
    spread = falls.reshape(-1)[: two * batch * heads * dim].view(channels)
    spread = spread * tables.halves[largest].view(two, batch, 1, 1, 1)
    mean = means.reshape(-1)[: two * batch * heads * dim].view(channels)
    mean = mean * tables.powers[units].view(two, batch, 1, 1, 1) * spread
    return {"distance": 2 * tables.powers[distances].view(two, batch, 1, tokens, 1), "spread": spread, "mean": mean}


@pytest.mark.parametrize("levels", [2, 3, 4])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_what_a_message_says_is_near_what_is(levels, size):
    packer, shape = FewLevels(levels), (300, 2, 2, 3, 8)
    generator = torch.Generator().manual_seed(3)
    # Spreads within what six levels reach.
    wide, loud = (1 + 3 * torch.rand(of, generator=generator) for of in ((1, *shape[1:]), (300, 2, 2, 1, 1)))
    values = size * (
        wide * (loud * torch.randn(shape, generator=generator) + torch.randn(wide.shape, generator=generator))
    )
    said = parts_of(packer, packer.encode(values), shape)
    values = values.permute(1, 2, 3, 0, 4)
    truth = (values.var(3, keepdim=True, correction=0) + (values.mean(3, keepdim=True) / 8).square()).sqrt()
    # Half a step of half an octave, and what a half of the tokens differs from all.
    assert (said["spread"] / truth).log2().abs().max() < 0.25 + 0.2
    assert float((said["mean"] - values.mean(3, keepdim=True)).div(truth).square().mean().sqrt()) < 0.4
    normal = (values - said["mean"]) / said["spread"]
    distance = packer.distance * normal.square().mean((2, 4), keepdim=True).sqrt()
    # A code is of squares from 1 to 1.5 times as large, and stands for what lies between.
    assert (said["distance"] / distance).log2().abs().max() < 0.175
    steps = said["distance"] * (torch.arange(levels) - (levels - 1) / 2).view(levels, 1, 1, 1, 1, 1)
    nearest = (normal - steps).abs().amin(0)
    found = (packer.decode(packer.encode(by_token(values)), shape).permute(1, 2, 3, 0, 4) - said["mean"]) / said[
        "spread"
    ]
    # All levels are the nearest.
    assert ((normal - found).abs() - nearest).abs().max() < 1e-3


@pytest.mark.parametrize(("tokens", "every"), [(1, 1), (255, 1), (256, 2), (576, 4), (4096, 4)])
def test_means_and_spreads_are_of_enough_tokens(tokens, every):
    packer, shape = FewLevels(4), (tokens, 2, 1, 2, 8)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(tokens))
    counted = torch.arange(tokens) % every == 0
    assert counted.sum() >= min(tokens, packer.TOKENS)
    first = parts_of(packer, packer.encode(values), shape)
    values[~counted] *= 100
    second = parts_of(packer, packer.encode(values), shape)
    assert torch.equal(first["mean"], second["mean"])
    assert torch.equal(first["spread"], second["spread"])
    assert torch.equal(first["distance"], second["distance"]) == (every == 1)
    values[counted] *= 100
    assert not torch.equal(first["spread"], parts_of(packer, packer.encode(values), shape)["spread"])


@pytest.mark.parametrize("levels", [2, 3, 4])
@pytest.mark.parametrize("channels", [8192, 16384])
def test_one_channel_alone_is_no_overflow(levels, channels):
    """Nothing but one channel moves at a token: it is as many distances away as can be."""
    packer = FewLevels(levels)
    values = torch.randn((64, 2, 1, 8, channels // 8), generator=torch.Generator().manual_seed(7))
    values[5], values[6] = 0.0, 0.0
    values[5, :, :, 0, 0], values[6, :, :, 0, 0] = 1e4, -1e4
    back = packer.decode(packer.encode(values), tuple(values.shape))
    assert (back[5, :, :, 0, 0] > 0).all()
    assert (back[6, :, :, 0, 0] < 0).all()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", RESIDUAL[1:])
def test_numbers_that_are_none_raise_nothing(name, bad):
    packer, made = codec(name), walk(2)[1]
    assert packer is not None
    made[3, 0, 1, 2, 4] = bad
    made[:, 1, 0] = bad
    assert packer.decode(packer.encode(made), tuple(made.shape)).shape == made.shape


@pytest.mark.parametrize("name", RESIDUAL)
def test_nothing_new_and_extremes_are_finite(name):
    packer = codec(name)
    assert packer is not None
    shape = (5, 2, 1, 2, 8)
    for made in (torch.zeros(shape), torch.full(shape, 3e4), torch.full(shape, -1e-30), torch.eye(80).view(-1)[:160]):
        made = made.reshape(shape)
        back = packer.decode(packer.encode(made), shape)
        assert back.isfinite().all()
        assert (back - made).abs().max() <= max(float(made.abs().max()), 1e-4)


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
    one, two = ranks(2).run(both_sides, "residual1.6", steps, config)
    assert one["states"]
    for key, (shown, received) in one["states"].items():
        assert torch.equal(shown, two["states"][key][1]), key
        assert torch.equal(received, two["states"][key][0]), key
    # After a gap a call is synchronous, on both ranks alike.
    assert one["filled"] == two["filled"]
    assert any(one["filled"]) == (len(steps) == 6)


def stays_near(compress: str, forget: bool) -> float:
    """Distance of the other rank's tokens from what they are, after eight stale steps at which little moves.

    Args:
        forget: the planted fault: a rank takes for granted that others have what it has.
    """
    model, made = tiny("SD3"), inputs("SD3", RAGGED)
    from ditmesh.strategies.stale.displaced import _Buffer

    original = _Buffer._packed

    def forgetful(buffer: Any, packer: Any, own: list[Tensor]) -> Tensor:
        message = original(buffer, packer, own)
        buffer._shown = torch.cat(own)
        return message

    patch = mock.patch.object(_Buffer, "_packed", forgetful if forget else original)
    with patch, ditmesh.parallelized(model, displaced(text="shard", compress=compress)):
        ditmesh.engine_of(model).begin_request(12)
        noise = torch.randn(made["hidden_states"].shape, generator=torch.Generator().manual_seed(5))
        for step in range(9):
            next_step(model)
            run(model, {**made, "hidden_states": made["hidden_states"] + 0.3 * min(step, 2) * noise})
        apart = 0.0
        for buffer in handler_of(model).buffers.values():
            buffer.arrive()
            here = torch.cat([slot for slots in buffer._slots for slot in slots])
            whole = buffer._ring.all_gather(
                torch.cat(buffer._slots[buffer._ring.rank]).contiguous(),
                tuple(sum(slot.shape[0] for slot in slots) for slots in buffer._slots),
                0,
            )
            apart = max(apart, float((here - whole).norm() / whole.norm()))
    return apart


def test_error_feedback_on_ranks(ranks):
    """When nothing moves any more, what others have comes near what is; without feedback it stays away."""
    near = ranks(2).run(stays_near, "residual2", False)
    far = ranks(2).run(stays_near, "residual2", True)
    assert max(near) < 0.02
    assert min(far) > 3 * max(near)

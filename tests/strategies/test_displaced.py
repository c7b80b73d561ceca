"""Displaced and naive patch parallelism: exact where nothing moves, one step old where something does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ditmesh
from ditmesh.comm import codec
from ditmesh.comm.compression import one_after_other
from ditmesh.config import ParallelConfig
from ditmesh.layout import layout_of
from support.models import KINDS, MAKERS, ODD, RAGGED, inputs, relative_error, run, tiny, variant
from support.pipelines import MAKERS as PIPELINES
from support.pipelines import arguments, draw
from support.sample import sampled
from support.stale import (
    all_frozen,
    counted_waits,
    displaced,
    expected_buffer_bytes,
    expected_ring_bytes,
    handler_of,
    in_one_process,
    next_step,
    on_ranks,
    outputs,
    reference,
)

TOLERANCE = 1e-5  # relative, float32; measured errors are below 1e-6


# --- nothing moves: exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.matrix) for name in MAKERS]
)
def test_equals_exact_while_nothing_moves(ranks, name):
    """B=1 with odd lengths and B=2 ragged, text cut and whole; and without the others' keys it is wrong."""
    layout = layout_of(tiny(name))
    texts = ("shard", "replicate") if any(s.name == "text" for r in layout.regions for s in r.streams) else ("shard",)
    for error, control, kept in ranks(2).run(all_frozen, name, displaced(), texts):
        assert error <= TOLERANCE
        # Sana mixes tokens by modules of its own, which exchange at every step; nothing is kept.
        assert kept == (name != "Sana")
        assert control > 100 * TOLERANCE or name == "Sana"


# --- something moves: one step old -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ring", "predict"), [(2, "none"), (3, "linear")])
def test_virtual_ranks_are_stale_by_exactly_one_step(ring, predict):
    """As the ranks above, in one process; and a request has nothing of the one before."""
    truth = reference("DiT", RAGGED, 6, ring, predict == "linear")
    with ditmesh.simulated(tiny("DiT"), displaced(ring, predict=predict)):
        first, second = (outputs(tiny("DiT"), "DiT", RAGGED, 6) for _ in range(2))
    assert max(map(relative_error, first, truth)) <= TOLERANCE
    assert all(map(torch.equal, first, second))
    with ditmesh.simulated(tiny("Flux"), displaced(ring, "fixed(0)", predict=predict)):
        first, second = (outputs(tiny("Flux"), "Flux", RAGGED, 2) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Flux", {"text": "shard"}),
        ("Flux", {"text": "replicate", "compress": "int8"}),
        ("SD3", {"text": "shard", "compress": "int4", "predict": "linear"}),
        ("DiT", {"compress": "int4", "warmup": "fixed(0)"}),
        ("SD3", {"exchange": "naive"}),
        ("SD3", {"speeds": (3, 1), "compress": "int4", "predict": "linear"}),
        ("QwenImage", {"text": "replicate", "warmup": "fixed(0)"}),
        ("Mochi", {}),
    ],
    ids=str,
)
def test_simulation_equals_ranks_to_the_bit(ranks, world, name, more):
    if world > 2 and "speeds" in more:
        pytest.skip("speeds are of two ranks")
    config = displaced(world, **more)
    truth, decided = in_one_process(name, config, RAGGED)
    for found, decided_here in ranks(world).run(on_ranks, name, config, RAGGED):
        assert all(map(torch.equal, found, truth))
        assert decided_here == decided


def test_simulation_is_put_back_exactly():
    model, made = tiny("Sana"), inputs("Sana", ODD)
    truth, before = run(model, made), dict(vars(model))
    with ditmesh.simulated(model, displaced(3)):
        assert relative_error(run(model, made), truth) <= TOLERANCE
    assert torch.equal(run(model, made), truth)
    assert vars(model).keys() == before.keys()
    with pytest.raises(ditmesh.ConfigError, match="only the ring axis is simulated; leave cfg out"):
        ditmesh.simulate(model, {"cfg": 2, "ring": 2})
    with ditmesh.simulated(model, {"ring": 2}):  # exact strategies, too
        assert relative_error(run(model, made), truth) <= TOLERANCE


def test_naive_sees_its_own_tokens_only():
    """As the first step of a displaced request without a warm-up; the second one sees the others' keys of the first."""
    found, _ = in_one_process("DiT", displaced(2, "fixed(0)"), RAGGED)
    naive, _ = in_one_process("DiT", displaced(2, "fixed(0)", exchange="naive"), RAGGED)
    assert torch.equal(found[0], naive[0])
    assert relative_error(found[1], naive[1]) > 100 * TOLERANCE


# --- what travels, and when ----------------------------------------------------------------------------------------


def traffic(name: str, config: dict[str, Any], size: Any) -> tuple[int, int, int, list[str], list[str]]:
    """Ring bytes of a synchronous and a stale step, bytes kept, and what happened on the wire in both."""
    model, made = tiny(name), inputs(name, size, masks=False)
    with counted_waits() as happened, ditmesh.parallelized(model, config):
        counters = ditmesh.engine_of(model).mesh.traffic
        ditmesh.engine_of(model).begin_request(steps=2)
        sent, events = [], []
        for _ in range(2):
            next_step(model)
            counters.reset()
            happened.clear()
            run(model, made)
            sent.append(counters.bytes_sent["ring"])
            events.append(list(happened))
        buffers = handler_of(model).buffers.values()
        kept = [tensor for b in buffers for tensor in (b.whole, *b._before, b._shown) if tensor is not None]
        return sent[0], sent[1], sum(tensor.nbytes for tensor in kept), events[0], events[1]


@pytest.mark.parametrize(
    ("compress", "predict"),
    [*((name, "none") for name in (None, "bf16", "int8")), *((name, "linear") for name in (None, "int4"))],
)
@pytest.mark.parametrize(("name", "world"), [("SD3", 2), pytest.param("Flux", 3, marks=pytest.mark.matrix)])
def test_bytes(ranks, name, world, compress, predict):
    """What is sent and what is kept equal their formulas; only what is stale is compressed."""
    config = displaced(world, text="shard", compress=compress, predict=predict)
    for rank, (synchronous, stale, kept, _, _) in enumerate(ranks(world).run(traffic, name, config, ODD)):
        assert synchronous == expected_ring_bytes(name, ODD, world, rank, None)
        assert stale == expected_ring_bytes(name, ODD, world, rank, compress)
        own = expected_ring_bytes(name, ODD, world, rank, None) // (world - 1)
        whole, shown = expected_buffer_bytes(name, ODD), own if compress == "int4" else 0
        # What is compared with: of others, and of this rank's tokens as they have them.
        assert kept == whole + shown + (0 if predict == "none" else whole - own + shown)


def test_a_stale_step_does_not_wait_for_itself(ranks):
    """Every layer's transfer is posted in one step and waited for in the next; only the end is gathered."""
    for warmup, drift in (("fixed(1)", []), ("adaptive(1000)", ["sum"])):
        for _, _, _, synchronous, stale in ranks(2).run(traffic, "Flux", displaced(2, warmup, text="shard"), ODD):
            assert synchronous == ["post", "arrive"] * 4 + ["exchange"]
            # The drift of the step before is added up where the policy reads it. Nothing is on its way after a
            # synchronous step; what this one posts is waited for by the next.
            assert stale == drift + ["post"] * 4 + ["exchange"]


def masks_and_waits(changed: bool) -> tuple[float, list[str]]:
    """A masked model of one block, whose keys no mask has touched: error of a stale step, and its transfers."""
    model, made = variant("QwenImage", num_layers=1), inputs("QwenImage", RAGGED)
    config = displaced(text="shard")
    with ditmesh.parallelized(model, config):
        run(model, made)
        next_step(model)
        run(model, made)
        if changed:
            mask = made["encoder_hidden_states_mask"].clone()
            mask[1, 3:] = False
            made = {**made, "encoder_hidden_states_mask": mask}
        next_step(model)
        with counted_waits() as events:
            value = run(model, made)
    return relative_error(value, run(model, made)), events


def test_masks_travel_only_when_they_change(ranks):
    for error, events in ranks(2).run(masks_and_waits, False):
        assert error <= TOLERANCE
        assert events.count("exchange") == 1  # the image, at the end
    for error, events in ranks(2).run(masks_and_waits, True):
        assert error <= TOLERANCE
        assert events.count("exchange") > 1


@pytest.mark.parametrize(("name", "bound"), [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 254), ("int4", 1 / 14)])
@pytest.mark.parametrize("width", [8, 7])
def test_compression_error(name, bound, width):
    """Casts: relative to every value. Integers: half a scale, of the largest value of a sample's or token's head."""
    packer = codec(name)
    tokens = torch.randn(37, 2, 3, 4, width, generator=torch.Generator().manual_seed(0)) * 50
    tokens[:, 1, 2, 3] = 0
    flat = packer.encode(tokens)
    assert flat.shape == packer.empty(tuple(tokens.shape), tokens.device).shape
    # Two streams are one message.
    assert torch.equal(packer.encode(one_after_other([tokens[:9], tokens[9:]])), flat)
    assert flat.dtype == packer.empty(tuple(tokens.shape), tokens.device).dtype
    error = (packer.decode(flat, tuple(tokens.shape)).float() - tokens).abs()
    largest = {"int8": (0, 4), "int4": (4,)}
    scale = tokens.abs().amax(dim=largest[name], keepdim=True) if name in largest else tokens.abs()
    # The scale of int4 is itself rounded, by 2^-11 at most, and the largest value is seven of it.
    slack = 1 + (14 * 2**-11 if name == "int4" else 1e-5)
    assert (error <= bound * scale * slack + 1e-12).all()
    assert error.max() > 0


# --- requests ------------------------------------------------------------------------------------------------------


class StopError(Exception):
    pass


def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 2:
        raise StopError
    return tensors


def requests(name: str, config: dict[str, Any]) -> list[bool]:
    """Whether a request's bits stay the same whatever ran before it, and nothing is kept when it is over."""
    fresh = PIPELINES[name]()
    with ditmesh.parallelized(fresh, config):
        truth = draw(fresh, arguments(name, [1], steps=5))
    pipe = PIPELINES[name]()
    ditmesh.parallelize(pipe, config)
    equal = [torch.equal(draw(pipe, arguments(name, [1], steps=5)), truth)]
    draw(pipe, arguments(name, [2], seed=9, steps=1))  # shorter than any warm-up
    equal.append(torch.equal(draw(pipe, arguments(name, [1], steps=5)), truth))
    draw(pipe, arguments(name, [3, 4], seed=9, steps=3))  # another batch
    with pytest.raises(StopError):
        draw(pipe, arguments(name, [2], seed=9, steps=5, callback_on_step_end=stop))
    equal.append(not handler_of(pipe).buffers)
    equal.append(torch.equal(draw(pipe, arguments(name, [1], steps=5)), truth))
    equal.append(not handler_of(pipe).buffers)
    ditmesh.restore(pipe)
    # A transformer by itself, taken back with transfers on their way.
    model = pipe.transformer
    key = "Flux" if name == "flux" else "SD3"
    with ditmesh.parallelized(model, config):
        ditmesh.engine_of(model).begin_request(steps=4)
        for _ in range(2):
            next_step(model)
            run(model, inputs(key, RAGGED))
    return equal


@pytest.mark.parametrize("warmup", ["fixed(0)", "adaptive(0.02)"])
def test_requests_do_not_leak(ranks, warmup):
    for equal in ranks(2).run(requests, "sd3", displaced(2, warmup)):
        assert all(equal)


# --- together with guidance and data parallelism -------------------------------------------------------------------


def pipeline_latents(name: str, config: dict[str, Any], prompts: list[int], simulate: bool = False) -> torch.Tensor:
    pipe = PIPELINES[name]()
    with (ditmesh.simulated if simulate else ditmesh.parallelized)(pipe, config):
        return draw(pipe, arguments(name, prompts, steps=5))


@pytest.mark.parametrize(
    ("name", "given"), sampled(PIPELINES, [({"cfg": 2}, [1]), ({"data": 2}, [1, 2, 3])], of=2), ids=str
)
def test_with_guidance_and_data(ranks, name, given):
    """Branches of guidance keep buffers of their own, whoever runs them: the picture is that without the axis."""
    axes, prompts = given
    truth = pipeline_latents(name, displaced(2, "fixed(2)"), prompts, simulate=True)
    exact = pipeline_latents(name, {}, prompts, simulate=True)
    for value in ranks(4).run(pipeline_latents, name, {**axes, **displaced(2, "fixed(2)")}, prompts):
        assert relative_error(value, truth) < 1e-4
        assert relative_error(truth, exact) > 1e-3


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ulysses": 2, "exchange": "displaced"}, "runs on the ring axis"),
        ({"ring": 2, "compress": "int8"}, "compress='int8' is for exchange='displaced'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ditmesh.ConfigError, match=message):
        ParallelConfig(**settings)

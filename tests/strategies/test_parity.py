"""N ranks make what one device makes: classes in float32 with a reviewed or a derived layout, and of other manners."""

from __future__ import annotations

from unittest import mock

import pytest

import ditmesh
from ditmesh.layout import layout_of
from support import foreign
from support.classes import CASES
from support.models import MAKERS, ODD, RAGGED, inputs, relative_error, run, sizes, tiny
from support.parity import (
    agreed,
    derived,
    forms_in_turn,
    made_up,
    of_class,
    of_others,
    parity,
    parity_of_all_sizes,
    without_exchange,
)
from support.sample import sampled

TOLERANCE = 1e-5  # relative, float32; measured errors are below 1e-6
MODELS = ["DiT", "PixArt", "SD3", "Flux"]
CONFIGS = [
    {"ulysses": 2},
    {"ring": 2},
    {"ulysses": 2, "ring": 2},
    {"ulysses": 3},
    {"ring": 3, "exchange": "gather"},
    {"ulysses": 2, "ring": 2, "exchange": "gather"},
]
SIZES = {"B=1": ODD, "B=2 ragged": RAGGED}


def name_of(config):
    return " ".join(f"{axis}={degree}" for axis, degree in config.items())


def ranks_of(config):
    return config.get("ulysses", 1) * config.get("ring", 1)


@pytest.mark.parametrize(("model", "config", "size"), sampled(MODELS, CONFIGS, SIZES, of=2), ids=str)
def test_equals_one_device(ranks, model, config, size):
    for text in ("shard", "replicate"):
        for result in ranks(ranks_of(config)).run(parity, model, {**config, "text": text}, SIZES[size]):
            assert result["error"] <= TOLERANCE
            assert result["repeats"]


@pytest.mark.parametrize(
    ("model", "config"),
    sampled(
        [name for name in MAKERS if name not in MODELS],
        [{"ulysses": 2}, {"ulysses": 2, "ring": 2}, {"ulysses": 3}],
        of=3,
    ),
    ids=str,
)
def test_every_class_equals_one_device(ranks, model, config):
    """B=1 with odd lengths and B=2 ragged, text cut and whole; and the negative control."""
    layout = layout_of(tiny(model))
    texts = ("shard", "replicate") if any(s.name == "text" for r in layout.regions for s in r.streams) else ("shard",)
    pool = ranks(ranks_of(config))
    for results in pool.run(parity_of_all_sizes, model, config, texts):
        for what, result in results.items():
            assert result["error"] <= TOLERANCE, what
            assert result["repeats"]
    for result in pool.run(without_exchange, parity, model, config, sizes(model)["B=2 ragged"]):
        assert result["error"] > 100 * TOLERANCE


# Ways through the derivation of a layout that no other case takes, and what refuses.
DERIVED = [
    ("HiDreamImageTransformer2DModel", "square", None),  # text that changes between blocks; gathered between blocks
    ("NucleusMoEImageTransformer2DModel", "prompt", None),  # experts that choose their tokens
    ("ConsisIDTransformer3DModel", "guidance", None),  # a stream that only counts by its length behind the blocks
    ("SD3Transformer2DModel + IP-Adapter", "guidance", None),
    ("ZImageTransformer2DModel + ControlNet", "prompt", None),
    ("StableAudio3DiTModel", "guidance", None),
    ("RFD4ProteinaTransformer", "design", "transformer_layers.0"),
    ("SanaWMLTX2RefinerTransformer3DModel", "next frames", None),  # a cache that was filled before
]


@pytest.mark.parametrize(("name", "form", "word"), DERIVED, ids=str)
def test_a_class_without_a_reviewed_layout(ranks, name, form, word):
    agreed(ranks(2).run(derived, of_class, (name, form), {"ulysses": 2}), word, TOLERANCE)


FRESH = {"exchange": "displaced", "warmup": "fixed(9)"}
# Configurations, and the calls of models with others' manners that are made with each; None: all of them.
OTHERS = [
    ({"ulysses": 2}, None),
    ({"ring": 2}, None),
    ({"ring": 2, "text": "replicate"}, ["image", "frames"]),
    ({"ring": 2, **FRESH}, ["image", "frames"]),
    ({"ulysses": 2, "reproducible": True}, ["image", "frames"]),
    ({"cfg": 2}, ["two images", "two films"]),
    ({"pipe": 2, "patches": 2, "warmup": "fixed(9)"}, ["image", "film"]),
]


@pytest.mark.parametrize(("config", "names"), OTHERS, ids=str)
def test_other_manners(ranks, config, names):
    for name in names or foreign.calls():
        # A patch of a film has no place in its tokens' three dimensions.
        word = "stand along several dimensions" if "pipe" in config and name == "film" else None
        agreed(ranks(2).run(derived, of_others, (name,), config), word, TOLERANCE)


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ulysses": 3}, {"ulysses": 2, "ring": 2}], ids=str)
def test_a_class_that_nobody_listed(ranks, config):
    """Without and with a convolution, whose tokens see their neighbours without attention; and the negative control."""
    pool = ranks(ranks_of(config))
    for convolution in (False, True):
        agreed(pool.run(derived, made_up, (convolution,), config), None, TOLERANCE)
    for result in pool.run(without_exchange, derived, made_up, (False,), config):
        assert result["error"] > 100 * TOLERANCE


def test_a_call_of_another_form_is_looked_at_anew(ranks):
    forms = ("prompt", "image", "prompt")
    for errors in ranks(2).run(forms_in_turn, "MotifVideoTransformer3DModel plain", forms, {"ulysses": 2}):
        assert max(errors) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "config"),
    sampled(["SD3", "Flux"], [{"ulysses": 2}, {"ulysses": 4}, {"ulysses": 8}, {"ring": 2, "exchange": "gather"}], of=2),
    ids=str,
)
def test_keys_in_the_order_of_one_device_give_its_bits(ranks, model, config):
    for result in ranks(ranks_of(config)).run(parity, model, config, RAGGED):
        assert result["equal"]


@pytest.mark.parametrize(
    ("model", "ring", "more"),
    [("Flux", 4, {"text": "replicate"}), ("SD3", 3, {}), ("PixArt", 2, {}), ("Sana", 3, {}), ("Wan", 2, {})],
    ids=str,
)
def test_virtual_ranks_equal_one_device(model, ring, more):
    """Keys that travel round a ring in one process: ragged text with its masks, and text that all ranks hold."""
    made = inputs(model, RAGGED)
    truth = run(tiny(model), made)
    with ditmesh.simulated(tiny(model), {"ring": ring, **more}):
        assert relative_error(run(tiny(model), made), truth) <= TOLERANCE


def bytes_of_grouped_queries(config):
    case = CASES["AceStepTransformer1DModel"]
    model = case.make()
    with ditmesh.parallelized(model, config):
        model(**case.calls["plain"]())
        before = dict(ditmesh.engine_of(model).mesh.traffic.bytes_sent)
        model(**case.calls["plain"]())
        return ditmesh.engine_of(model).mesh.traffic.bytes_sent["ring"] - before["ring"]


def test_gathered_keys_of_grouped_queries_are_not_repeated(ranks):
    """Four heads of queries share two of keys: half of what the ring sends."""
    pool = ranks(2)
    gathered = pool.run(bytes_of_grouped_queries, {"ring": 2, "exchange": "gather"})
    around = pool.run(bytes_of_grouped_queries, {"ring": 2})
    assert [2 * count for count in gathered] == around


def test_more_ranks_than_text_tokens(ranks):
    """With fewer text tokens than ranks every rank keeps the text whole."""
    from ditmesh.layout.conventions import Size

    size = Size(rows=8, cols=8, text=3, batch=2)
    for config in ({"ulysses": 4}, {"ring": 4}):
        for result in ranks(4).run(parity, "Flux", {**config, "text": "shard"}, size, False):
            assert result["error"] <= TOLERANCE


@pytest.mark.parametrize("model", sampled(MODELS, of=2))
def test_bytes_on_the_wire(ranks, model):
    """Counters equal the formula, from shapes alone."""
    from support.traffic import expected_bytes

    for config in CONFIGS:
        for size in (ODD, RAGGED):
            results = ranks(ranks_of(config)).run(parity, model, {**config, "text": "shard"}, size, False)
            for rank, result in enumerate(results):
                assert result["sent"] == expected_bytes(model, config, size, rank)


def ring_events(config):
    """What happens in one attention, in order: a transfer posted, a block computed, a transfer waited for."""
    import torch

    from ditmesh.attention import ring
    from ditmesh.comm import Link, Transfer

    events = []

    def noted(owner, name, event):
        original = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *args, **more: events.append(event) or original(*args, **more))

    mesh, q = ditmesh.Mesh(ditmesh.ParallelConfig(**config)), torch.randn(1, 2, 8, 4)
    with noted(Link, "shift", "post"), noted(Transfer, "wait", "wait"), noted(ring, "attend_with_lse", "compute"):
        ring.ring_attention(mesh.ring, q, q, q, [8] * mesh.ring.size)
    mesh.close()
    return events


@pytest.mark.parametrize("world", [2, 3])
def test_transfers_hide_behind_compute(ranks, world):
    """Each transfer is posted before a block is computed and waited for after it."""
    expected = ["post", "compute", "wait"] * (world - 1) + ["compute"]
    assert ranks(world).run(ring_events, {"ring": world}) == [expected] * world

"""Layouts that are wrong on purpose: their first call is right, or raises."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ditmesh
from ditmesh.layout import LOCAL, Cut, joint, layout_of
from ditmesh.layout.probe import layout_differences, probe
from support.models import inputs, relative_error, run, sizes, tiny


def held(region, *paths):
    """The region with these arguments passed on whole."""
    cuts = tuple(cut for cut in region.cuts if cut.arg not in paths)
    return replace(region, cuts=cuts, whole=(*region.whole, *paths))


def streams(region, name, **changes):
    """The region with one stream changed."""
    changed = tuple(replace(stream, **changes) if stream.name == name else stream for stream in region.streams)
    return replace(region, streams=changed)


def every(change):
    """A change of every region of a layout."""
    return lambda layout: replace(layout, regions=tuple(change(region) for region in layout.regions))


def second(change):
    """A change of a layout's last region."""
    return lambda layout: replace(layout, regions=(*layout.regions[:-1], change(layout.regions[-1])))


# name -> model, change of its layout, what becomes of the first call, what its message says
WRONG = {
    "rotary tables held": ("Flux", every(lambda r: held(r, "image_rotary_emb.0", "image_rotary_emb.1")), "raises", ""),
    "rotary tables forgotten": (
        "Flux",
        every(lambda r: replace(r, cuts=())),
        "raises",
        "argument 'image_rotary_emb.0'",
    ),
    "a mask held": ("Flux", every(lambda r: held(r, "joint_attention_kwargs.attention_mask")), "right", ""),
    "modulation per token held": ("LTX I2V", every(lambda r: held(r, "temb")), "raises", ""),
    "modulation cut": (
        "Flux",
        every(lambda r: replace(r, cuts=(*r.cuts, Cut("temb", 1, ("image",))), whole=())),
        "raises",
        "temb has 128 entries along dimension 1",
    ),
    "text cut as image": (
        "Wan",
        every(lambda r: replace(r, cuts=(*r.cuts, Cut("encoder_hidden_states", 1, ("image",))))),
        "raises",
        "encoder_hidden_states has 32 entries",
    ),
    "another dimension of a cut": (
        "Flux",
        every(lambda r: replace(r, cuts=(replace(r.cuts[0], dim=1), *r.cuts[1:]))),
        "raises",
        "image_rotary_emb.0 has 16 entries along dimension 1",
    ),
    "another dimension of a stream": ("Flux", every(lambda r: streams(r, "image", dim=2)), "raises", ""),
    "attention not planned": (
        "Wan",
        every(lambda r: replace(r, attention=r.attention[:1])),
        "raises",
        "makes attention call number 2",
    ),
    "attention without text": (
        "Flux",
        every(lambda r: replace(r, attention=(joint("image"),))),
        "raises",
        "attention call 1 has",
    ),
    "attention in another order": (
        "Wan",
        every(lambda r: replace(r, attention=(LOCAL, joint("image")))),
        "raises",
        "attention call 2 has",
    ),
    "attention planned that does not come": (
        "Flux",
        every(lambda r: replace(r, attention=(*r.attention, joint("image")))),
        "right",
        "",
    ),
    "text not gathered between lists": (
        "Flux",
        lambda layout: replace(
            layout,
            regions=(
                streams(layout.regions[0], "text", used_after=False),
                replace(layout.regions[1], chained=False),
            ),
        ),
        "raises or right",  # right where every rank has all of the text anyway
        "",
    ),
    "a stream read that nobody reads": (
        "LTX2",
        every(lambda r: streams(r, "audio", used_after=False)),
        "raises",
        "wrong for this call",
    ),
    "lists not chained": ("Flux", second(lambda r: replace(r, chained=False)), "right", ""),
    "skips forgotten": ("HunyuanDiT", every(lambda r: replace(r, local=())), "raises", "argument 'skip'"),
    "all tokens counted": (
        "HunyuanVideo I2V",
        every(lambda r: replace(r, counts=tuple(replace(count, part="all") for count in r.counts))),
        "raises",
        "says that it counts all",
    ),
    # Only a second opinion tells these apart from right ones: one device, or a probe.
    "attention held to be local": (
        "Flux",
        every(lambda r: replace(r, attention=(LOCAL,))),
        "right or raises",
        "wrong for this call",
    ),
    "tokens joined in another order": (
        "Flux",
        every(lambda r: replace(r, attention=(joint("image", "text"),))),
        "right or raises",
        "wrong for this call",
    ),
    "counted from the other end": (
        "HunyuanVideo I2V",
        every(lambda r: replace(r, counts=tuple(replace(count, part="last") for count in r.counts))),
        "right or raises",
        "wrong for this call",
    ),
}


def size_of(name):
    return sizes(name)["B=1"] if name == "HunyuanVideo I2V" else sizes(name)["B=2 ragged"]


def outcomes(config):
    found = {}
    for what, (name, change, _, _) in WRONG.items():
        model, call = tiny(name), inputs(name, size_of(name))
        truth = run(model, call)
        with ditmesh.parallelized(model, config, layout=change(layout_of(model))):
            try:
                value = run(model, call)
            except (RuntimeError, ditmesh.LayoutError) as error:
                found[what] = ("raises", str(error))
                continue
        error = relative_error(value, truth)
        found[what] = ("right" if error <= 1e-5 else "wrong", str(error))
    return found


@pytest.mark.parametrize(
    "config", [pytest.param({"ulysses": 2}, marks=pytest.mark.matrix), {"ring": 2, "text": "replicate"}], ids=str
)
def test_a_wrong_layout_is_not_drawn_with(ranks, config):
    for found in ranks(2).run(outcomes, config):
        for what, (_, _, outcome, message) in WRONG.items():
            # The order of joint tokens matters only where some are replicated.
            assert found[what][0] in outcome.split(" or "), (what, found[what])
            assert found[what][0] != "raises" or message in found[what][1], (what, found[what])


# What a probe says of those that only one device or a probe can tell.
PROBED = {
    "attention held to be local": "attention",
    "tokens joined in another order": "attention",
    "counted from the other end": "Count(",
}


@pytest.mark.parametrize("what", PROBED)
def test_a_probe_tells_without_a_call(what):
    name, change, _, _ = WRONG[what]
    found = layout_differences(change(layout_of(tiny(name))), probe(tiny(name)))
    assert found
    assert all(PROBED[what] in sentence for sentence in found)


@pytest.mark.parametrize("config", [{"pipe": 2, "warmup": "fixed(9)"}, {"tensor": 2, "ulysses": 2}], ids=str)
def test_with_cut_weights_no_layout_is_taken(config):
    model = tiny("Flux")
    with pytest.raises(ditmesh.ConfigError, match=r"layout= was passed for Flux.*leave layout= out"):
        ditmesh.parallelize(model, config, layout=replace(layout_of(model), kept=("proj_out",)))

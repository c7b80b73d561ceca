"""Layouts that are wrong on purpose: their first call is right, or raises."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ditmesh
from ditmesh.layout import LOCAL, Cut, joint, layout_of
from support.models import inputs, relative_error, run, sizes, tiny


def every(change):
    """A change of every region of a layout."""
    return lambda layout: replace(layout, regions=tuple(change(region) for region in layout.regions))


def held(*paths):
    """These arguments passed on whole."""
    return every(
        lambda region: replace(
            region, cuts=tuple(cut for cut in region.cuts if cut.arg not in paths), whole=(*region.whole, *paths)
        )
    )


def cut(path, tokens=("image",), **more):
    return every(lambda region: replace(region, cuts=(*region.cuts, Cut(path, 1, tokens)), **more))


def streams(name, **changes):
    """One stream changed."""
    return every(
        lambda region: replace(
            region, streams=tuple(replace(one, **changes) if one.name == name else one for one in region.streams)
        )
    )


def attention(*calls):
    return every(lambda region: replace(region, attention=calls))


def counts(part):
    return every(lambda region: replace(region, counts=tuple(replace(count, part=part) for count in region.counts)))


def text_not_gathered(layout):
    """Right where every rank has all of the text anyway."""
    first = streams("text", used_after=False)(layout).regions[0]
    return replace(layout, regions=(first, replace(layout.regions[1], chained=False)))


# name -> model, change of its layout, what becomes of the first call, what its message says
WRONG = {
    "rotary tables held": ("Flux", held("image_rotary_emb.0", "image_rotary_emb.1"), "raises", ""),
    "rotary tables forgotten": ("Flux", every(lambda r: replace(r, cuts=())), "raises", "'image_rotary_emb.0'"),
    "a mask held": ("Flux", held("joint_attention_kwargs.attention_mask"), "right", ""),
    "modulation per token held": ("LTX I2V", held("temb"), "raises", ""),
    "modulation cut": ("Flux", cut("temb", whole=()), "raises", "temb has 128 entries along dimension 1"),
    "text cut as image": ("Wan", cut("encoder_hidden_states"), "raises", "encoder_hidden_states has 32 entries"),
    "another dimension of a stream": ("Flux", streams("image", dim=2), "raises", ""),
    "attention not planned": ("Wan", attention(joint("image")), "raises", "makes attention call number 2"),
    "attention without text": ("Flux", attention(joint("image")), "raises", "attention call 1 has"),
    "attention in another order": ("Wan", attention(LOCAL, joint("image")), "raises", "attention call 2 has"),
    "text not gathered between lists": ("Flux", text_not_gathered, "raises or right", ""),
    "a stream read that nobody reads": ("LTX2", streams("audio", used_after=False), "raises", "wrong for this call"),
    "skips forgotten": ("HunyuanDiT", every(lambda r: replace(r, local=())), "raises", "argument 'skip'"),
    "all tokens counted": ("HunyuanVideo I2V", counts("all"), "raises", "says that it counts all"),
    # Only one device tells these apart from right ones.
    "attention held to be local": ("Flux", attention(LOCAL), "right or raises", "wrong for this call"),
    "tokens joined in another order": (
        *("Flux", attention(joint("image", "text"))),
        *("right or raises", "wrong for this call"),
    ),
    "counted from the other end": ("HunyuanVideo I2V", counts("last"), "right or raises", "wrong for this call"),
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


@pytest.mark.parametrize("config", [{"pipe": 2, "warmup": "fixed(9)"}, {"tensor": 2, "ulysses": 2}], ids=str)
def test_with_cut_weights_no_layout_is_taken(config):
    model = tiny("Flux")
    with pytest.raises(ditmesh.ConfigError, match=r"layout= was passed for Flux.*leave layout= out"):
        ditmesh.parallelize(model, config, layout=replace(layout_of(model), kept=("proj_out",)))

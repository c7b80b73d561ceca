"""Layouts: the reviewed table, the probe, and strict mode."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

import ditmesh
from ditmesh.core.arguments import MISSING, Arguments, covers, parameter_names
from ditmesh.layout import Cut, Region, Stream, TokenLayout, joint, known_models, layout_of
from ditmesh.layout.conventions import Size
from ditmesh.layout.probe import probe
from ditmesh.strategies.token_mixers import MIXER_RULES
from support.models import MAKERS, inputs, run, tiny

# Their blocks mix tokens in ways that only a person can describe well.
NOT_PROBED = {"Sana": r"ff\.conv_depth \(Conv2d\)"}
# What is derived of it is right, and gathers the tokens behind every block.
OTHERWISE = ("Latte",)


def of_region(ours, probed):
    """The parts of a list of blocks that a probe has seen and that a reviewed layout says otherwise, or not at all."""
    attention = tuple(replace(call, unless=None, only_if=None) for call in ours.attention[: len(probed.attention)])
    for name, mine, its in (
        ("streams", ours.streams, probed.streams),
        ("chained", ours.chained, probed.chained),
        ("attention", attention, probed.attention),
    ):
        if mine != its:
            yield name
    for cut in probed.cuts:
        same = [other for other in ours.cuts if other.arg == cut.arg and other.ndim in (None, cut.ndim)]
        if any((other.dim, other.tokens) != (cut.dim, cut.tokens) for other in same) or not (
            same or any(covers(other.arg, cut.arg) for other in ours.cuts)
        ):
            yield cut.arg
    known = (*ours.whole, *(cut.arg for cut in ours.cuts))
    yield from (path for path in probed.whole if not any(covers(name, path) for name in known))
    yield from (path for path in probed.local if path not in ours.local)
    yield from (count.arg for count in probed.counts if count not in ours.counts)


def differences(reviewed, probed):
    """As `of_region`, of a layout; it may know arguments that the probe's inputs do not bring up."""
    found = [path for path in probed.unbatched if not any(covers(name, path) for name in reviewed.unbatched)]
    found += [path for path in probed.listed if path not in reviewed.listed]
    ours, theirs = ({region.blocks: region for region in layout.regions} for layout in (reviewed, probed))
    found += sorted(ours.keys() ^ theirs.keys())
    return [*found, *(what for blocks in ours if blocks in theirs for what in of_region(ours[blocks], theirs[blocks]))]


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in (*NOT_PROBED, *OTHERWISE)])
def test_probe_agrees_with_the_reviewed_layout(name):
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert differences(layout_of(model), probe(model)) == []
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NOT_PROBED)
def test_probe_says_what_it_cannot_describe(name):
    with pytest.raises(ditmesh.LayoutError, match=NOT_PROBED[name]):
        probe(tiny(name))


def test_a_probe_sees_what_a_call_does_not():
    """The comparison above can fail: each kind of wrong layout is noticed, with right sizes, too."""
    probed, right = probe(tiny("Flux")), layout_of(tiny("Flux"))
    first, second = right.regions
    text_first = tuple(replace(stream, out=1 - stream.out) for stream in first.streams)
    other_dim = replace(first.cuts[0], dim=1), *first.cuts[1:]
    for expected, changed in {
        "streams": replace(first, streams=text_first),
        "attention": replace(first, attention=(joint("image", "text"),)),
        "image_rotary_emb.0": replace(first, cuts=other_dim),
        "temb": replace(first, whole=()),
    }.items():
        assert differences(replace(right, regions=(changed, second)), probed) == [expected]
    assert differences(replace(right, unbatched=("img_ids",)), probed) == ["txt_ids"]
    assert differences(replace(right, regions=(first,)), probed) == ["single_transformer_blocks"]


def test_every_tiny_model_has_a_reviewed_layout():
    assert {type(tiny(name)).__name__ for name in MAKERS} == set(known_models())


def test_no_class_normalises_over_the_batch_or_over_tokens():
    across = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
    assert [name for name in MAKERS for module in tiny(name).modules() if isinstance(module, across)] == []


def test_a_model_that_cannot_be_probed_is_refused_with_reasons():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = type("Config", (), {"in_channels": 4})()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, hidden_states, secret):
            return (self.blocks[0](hidden_states) + secret,)

    with pytest.raises(ditmesh.LayoutError, match=r"Strange has no reviewed token layout.*secret.*write a layout"):
        probe(Strange())
    with (
        ditmesh.parallelized(Strange(), {"reproducible": True}) as model,
        pytest.raises(ditmesh.LayoutError, match=r"Strange cannot be cut by tokens.*\(blocks\).*write a layout"),
    ):
        model(torch.ones(1, 4), torch.ones(1))


def test_a_full_memory_is_no_refusal():
    """What says nothing of the inputs is not taken for a model that cannot be probed."""
    with (
        mock.patch.object(type(tiny("DiT")), "forward", side_effect=torch.OutOfMemoryError("full")),
        pytest.raises(torch.OutOfMemoryError),
    ):
        probe(tiny("DiT"))


def test_a_model_without_blocks_is_refused():
    model = nn.Linear(2, 2)
    model.config = object()
    with pytest.raises(ditmesh.LayoutError, match="no ModuleList"):
        ditmesh.parallelize(model, {})


# --- strict mode -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block with a per-token argument and an integer that counts tokens."""

    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(16, 16)

    def forward(self, hidden_states, bias=None, count=None):
        x = self.to_q(hidden_states).unflatten(-1, (2, 8)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)
        if bias is not None:
            out = out + bias
        if count is not None:
            out = out * (count / 10)
        return hidden_states + out


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, hidden_states, bias=None, count=None):
        for block in self.blocks:
            hidden_states = block(hidden_states, bias=bias, count=count)
        return (hidden_states,)


LAYOUT = TokenLayout(
    model="Tokens", regions=(Region("blocks", (Stream("image", "hidden_states"),), attention=(joint("image"),)),)
)
COMPLETE = replace(LAYOUT, regions=(replace(LAYOUT.regions[0], cuts=(Cut("bias", 1, ("image",)),)),))


def strict(argument, layout, is_strict=True):
    model = Tokens().eval()
    x = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    extra = {"bias": torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(1)), "count": 20, "none": None}
    arguments = {"hidden_states": x, **({argument: extra[argument]} if argument != "none" else {})}
    truth = run(model, arguments)
    with ditmesh.parallelized(model, {"ring": 2, "strict": is_strict}, layout=layout):
        try:
            return float((run(model, arguments) - truth).abs().max())
        except ditmesh.LayoutError as error:
            return str(error)


def test_an_argument_that_follows_the_tokens_and_is_not_planned_is_an_error(ranks):
    for message in ranks(2).run(strict, "bias", LAYOUT):
        assert "blocks.0: argument 'bias' is a tensor of shape (2, 20, 16)" in message
        assert "20 is the number of image tokens" in message
        assert "`cuts`" in message
    for message in ranks(2).run(strict, "count", LAYOUT):
        assert "argument 'count' is the integer 20" in message


def test_a_planned_argument_is_cut(ranks):
    assert all(error < 1e-6 for error in ranks(2).run(strict, "none", LAYOUT))
    assert all(error < 1e-6 for error in ranks(2).run(strict, "bias", COMPLETE))


# --- what some layouts need besides ------------------------------------------------------------------------------


def too_few_rows():
    model = tiny("Sana")
    with ditmesh.parallelized(model, {"ulysses": 3}):
        try:
            run(model, inputs("Sana", Size(rows=2, cols=9, text=5)))
        except ditmesh.ConfigError as error:
            return str(error)


def test_a_picture_with_fewer_rows_than_ranks_is_refused(ranks):
    for message in ranks(3).run(too_few_rows):
        assert "2 rows of image tokens cannot be shared by 3 ranks" in message


def test_a_leaf_rule_refuses_what_it_does_not_describe():
    for module in (nn.Linear(2, 2), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, stride=2, padding=1)):
        with pytest.raises(ditmesh.LayoutError, match="keeps the number of rows"):
            MIXER_RULES["conv_rows"](module, None, "ff")
    with pytest.raises(ditmesh.LayoutError, match="the processor is NoneType"):
        MIXER_RULES["linear_attention"](nn.Linear(2, 2), None, "attn")


# --- arguments -------------------------------------------------------------------------------------------------


def test_arguments_are_found_and_replaced_by_path():
    def forward(self, hidden, tables=None, options=None): ...

    tables, options = (torch.zeros(1), torch.ones(1)), {"mask": torch.zeros(2)}
    arguments = Arguments(parameter_names(forward), (torch.zeros(3), tables), {"options": options, "count": 4})
    assert [path for path, _ in arguments.leaves()] == ["hidden", "tables.0", "tables.1", "options.mask", "count"]
    arguments.set("tables.1", 5)
    arguments.set("options.mask", 6)
    assert arguments.get("tables.1") == 5
    assert arguments.get("options.mask") == 6
    assert arguments.get("options.other") is MISSING
    assert arguments.get("tables.7") is MISSING
    assert torch.is_tensor(tables[1])
    assert torch.is_tensor(options["mask"])

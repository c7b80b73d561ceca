"""Layouts: the reviewed table, the probe, and strict mode."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

import ditmesh
from ditmesh.attention import masks
from ditmesh.core.arguments import MISSING, Arguments, parameter_names
from ditmesh.core.partition import Partition
from ditmesh.layout import LOCAL, Cut, Region, Stream, TokenLayout, joint, known_models, layout_of
from ditmesh.layout.conventions import Size
from ditmesh.layout.derive import derive_layout
from ditmesh.layout.probe import layout_differences, probe
from ditmesh.strategies.token_mixers import MIXER_RULES
from support.models import MAKERS, RAGGED, component, inputs, run, sizes, tiny

# Their blocks mix tokens in ways that only a person can describe well.
NOT_PROBED = {"Sana": r"ff\.conv_depth \(Conv2d\)"}
# What is derived of it is right, and gathers the tokens behind every block.
OTHERWISE = ("Latte",)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in (*NOT_PROBED, *OTHERWISE)])
def test_probe_agrees_with_the_reviewed_layout(name):
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert layout_differences(layout_of(model), probe(model)) == []
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NOT_PROBED)
def test_probe_says_what_it_cannot_describe(name):
    with pytest.raises(ditmesh.LayoutError, match=NOT_PROBED[name]):
        probe(tiny(name))


def test_differences_sees_every_part():
    """The comparison above can fail: each kind of wrong layout is noticed."""
    probed = probe(tiny("Flux"))
    right = layout_of(tiny("Flux"))
    first, second = right.regions
    text_first = tuple(dataclasses.replace(s, out=1 - s.out) for s in first.streams)
    wrong = {
        "streams": dataclasses.replace(first, streams=text_first),
        "attention": dataclasses.replace(first, attention=(joint("image", "text"),)),
        "image_rotary_emb.0": dataclasses.replace(first, cuts=first.cuts[1:]),
        "dim=1": dataclasses.replace(first, cuts=(Cut("image_rotary_emb.0", 1, ("text", "image")), *first.cuts[1:])),
        "temb": dataclasses.replace(first, whole=()),
    }
    for expected, region in wrong.items():
        found = layout_differences(dataclasses.replace(right, regions=(region, second)), probed)
        assert len(found) == (2 if expected == "image_rotary_emb.0" and len(found) == 2 else 1)
        assert expected in found[0]
    batched = layout_differences(dataclasses.replace(right, unbatched=("img_ids",)), probed)
    assert len(batched) == 1
    assert "'txt_ids'" in batched[0]
    unchained = dataclasses.replace(second, chained=False)
    assert "chained" in layout_differences(dataclasses.replace(right, regions=(first, unchained)), probed)[0]
    assert "only in the probed" in layout_differences(dataclasses.replace(right, regions=(first,)), probed)[0]


def test_every_tiny_model_has_a_reviewed_layout():
    assert {type(tiny(name)).__name__ for name in MAKERS} == set(known_models())


def test_every_layout_is_well_formed():
    for layout in known_models().values():
        for region in layout.regions:
            names = {stream.name for stream in region.streams}
            assert region.main.name == "image"
            for cut in region.cuts:
                assert set(cut.tokens) <= names
            for count in region.counts:
                assert count.stream in names
            for leaf in region.leaves:
                assert leaf.rule in MIXER_RULES
            for attention in region.attention:
                assert attention.ragged is None or region.stream(attention.ragged).replicate
                assert not attention.per_sample or attention is region.attention[-1]
                assert attention == LOCAL or set(attention.queries) | set(attention.keys) <= names


def test_a_model_that_cannot_be_probed_is_refused_with_reasons():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = type("Config", (), {"in_channels": 4})()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, hidden_states, secret):
            return (self.blocks[0](hidden_states) + secret,)

    with pytest.raises(ditmesh.LayoutError, match=r"Strange has no reviewed token layout.*secret.*Write a layout"):
        probe(Strange())
    with (
        ditmesh.parallelized(Strange(), {"reproducible": True}) as model,
        pytest.raises(ditmesh.LayoutError, match=r"Strange cannot be cut by tokens.*\(blocks\).*write a layout"),
    ):
        model(torch.ones(1, 4), torch.ones(1))


def test_a_refusal_names_what_is_missing():
    """One argument or width in one sentence, never an AttributeError of the probe itself."""
    with pytest.raises(ditmesh.LayoutError, match="its config has no attention_head_dim, without which the probe"):
        probe(component("LuminaNextDiT2DModel"))
    sound = tiny("StableAudio")
    for key in ("cross_attention_input_dim", "cross_attention_dim"):
        assert key in sound.config
    with (
        mock.patch("ditmesh.layout.conventions.TEXT_WIDTHS", ("no_such_width",)),
        pytest.raises(
            ditmesh.LayoutError, match=r"no width for the argument 'encoder_hidden_states' \(none of no_such_width\)"
        ),
    ):
        probe(sound)


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
    model="Tokens",
    regions=(Region("blocks", (Stream("image", "hidden_states"),), attention=(joint("image"),)),),
)
COMPLETE = dataclasses.replace(
    LAYOUT, regions=(dataclasses.replace(LAYOUT.regions[0], cuts=(Cut("bias", 1, ("image",)),)),)
)


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


def one_cut_missing():
    """Flux without its rotary tables planned: never a silent wrong picture."""
    layout = layout_of(tiny("Flux"))
    bare = tuple(dataclasses.replace(region, cuts=region.cuts[2:]) for region in layout.regions)
    with ditmesh.parallelized(tiny("Flux"), {"ulysses": 2}, layout=dataclasses.replace(layout, regions=bare)):
        try:
            run(tiny("Flux"), inputs("Flux", RAGGED))
        except ditmesh.LayoutError as error:
            return str(error)


def test_missing_rotary_cut_is_named(ranks):
    for message in ranks(2).run(one_cut_missing):
        assert "transformer_blocks.0: argument 'image_rotary_emb.0'" in message
        assert "text" in message
        assert "image" in message


# --- what some layouts need besides ------------------------------------------------------------------------------


def without_count():
    """HunyuanVideo's image-to-video model with its count of first-frame tokens passed on as it is."""
    from support.parity import parity

    layout = layout_of(tiny("HunyuanVideo I2V"))
    bare = tuple(
        dataclasses.replace(region, counts=(), whole=(*region.whole, "num_tokens")) for region in layout.regions
    )
    patch = pytest.MonkeyPatch()
    patch.setattr("ditmesh.engine.api.find_layout", lambda _: dataclasses.replace(layout, regions=bare))
    error = parity("HunyuanVideo I2V", {"ulysses": 3}, sizes("HunyuanVideo I2V")["B=1"])["error"]
    patch.undo()
    return error


def test_a_count_of_tokens_must_be_that_of_the_rank(ranks):
    assert max(ranks(3).run(without_count)) > 1e-3


def unreadable_mask():
    """A mask over pairs of tokens, cut both ways, says nothing of other ranks' tokens."""
    model, layout = Tokens().eval(), COMPLETE
    with ditmesh.parallelized(model, {"ring": 2}, layout=layout):
        handler = ditmesh.engine_of(model).hooks[0].handler
        tokens = Partition(((10, 10),), names=("image",))
        band = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()
        try:
            masks.everywhere(band, tokens, tokens, handler.link, range(2))
        except ditmesh.LayoutError as error:
            return str(error)


def test_a_mask_over_pairs_that_was_cut_is_refused(ranks):
    for message in ranks(2).run(unreadable_mask):
        assert "cut along queries and keys, and is no outer product" in message


def leaves_undone():
    """Parallelised and restored: the same processors, no hook left, the same picture."""
    model, arguments = MAKERS["Sana"]().eval(), inputs("Sana", RAGGED)
    processors = [block.attn1.processor for block in model.transformer_blocks]
    truth = run(model, arguments)
    with ditmesh.parallelized(model, {"ulysses": 2}):
        changed = all(
            block.attn1.processor is not old for block, old in zip(model.transformer_blocks, processors, strict=True)
        )
    same = all(block.attn1.processor is old for block, old in zip(model.transformer_blocks, processors, strict=True))
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return changed, same, hooks, torch.equal(run(model, arguments), truth)


def test_leaf_rules_come_off_exactly(ranks):
    for result in ranks(2).run(leaves_undone):
        assert result == (True, True, 0, True)


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


def test_arguments_beyond_the_named_ones_go_by_position():
    def forward(self, hidden, *rest): ...

    arguments = Arguments(parameter_names(forward), (torch.zeros(3), 7, 8), {})
    assert [path for path, _ in arguments.leaves()] == ["hidden", "*1", "*2"]
    arguments.set("*2", 9)
    assert arguments.args[2] == 9
    assert arguments.get("*0") is MISSING  # it has a name
    assert arguments.get("*3") is MISSING


# --- as files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*known_models(), "derived"])
def test_a_layout_comes_back_from_its_file(name, tmp_path):
    layout = known_models().get(name)
    if layout is None:
        layout = derive_layout(tiny("Flux"), inputs("Flux", RAGGED))[1]
        assert layout.calls
    layout.save(tmp_path / "layout.json")
    assert TokenLayout.read(tmp_path / "layout.json") == layout
    with pytest.raises(FileExistsError):
        layout.save(tmp_path / "layout.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no token layout"),
        ("[1]", "is no token layout"),
        ('{"model": "X", "regions": [{"blocks": 3}]}', "regions.0.blocks"),
        ('{"model": "X"}', "regions: field required"),
    ],
)
def test_what_is_no_layout_is_said(text, said, tmp_path):
    (tmp_path / "layout.json").write_text(text)
    with pytest.raises(ditmesh.InputError, match=said):
        TokenLayout.read(tmp_path / "layout.json")

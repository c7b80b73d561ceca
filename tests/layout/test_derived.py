"""Layouts that are derived from a call: what they hold, what is refused by name, and which calls are looked at anew."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ditmesh
from ditmesh.core.arguments import Arguments
from ditmesh.core.objects import holds_tensors, objects_in
from ditmesh.layout import LOCAL, Count, Cut, Stream, joint
from ditmesh.layout.derive import derive_layout
from ditmesh.layout.forms import form_of, news
from ditmesh.layout.probe import probe
from ditmesh.layout.types import Fold
from ditmesh.train import reduce_gradients
from support.classes import CASES
from support.foreign import (
    WIDTH,
    Double,
    FilmBlock,
    ForeignFilm,
    ForeignImage,
    Modulation,
    Pair,
    film_call,
    image_call,
    options,
)
from support.made_up import MadeUpTransformer
from support.models import relative_error, run
from support.parity import made_up_call


def test_the_probed_layout():
    (region,) = probe(MadeUpTransformer()).regions
    assert region.blocks == "layers"
    assert region.streams == (Stream("image", "tokens"),)
    assert region.attention == (joint("image"), LOCAL)
    assert region.cuts == (
        Cut("rope.0", 0, ("image",), ndim=2),
        Cut("rope.1", 0, ("image",), ndim=2),
        Cut("shift", 1, ("image",), ndim=3),
    )
    assert region.whole == ("text",)
    region = derive_layout(MadeUpTransformer(convolution=True).eval(), made_up_call())[1].regions[0]
    assert [leaf.module for leaf in region.leaves] == ["conv"]


def test_the_layout_of_a_film():
    layout = derive_layout(ForeignFilm(extra=True), film_call(each=True))[1]
    (region,) = layout.regions
    assert region.folds == (Fold("x", 1, 3, (0,)), Fold("emb", 1, 1), Fold("extra", 1, 3))
    assert {cut.arg: cut.dim for cut in region.cuts} == {"emb": 1, "rope": 2, "extra": 1}


def test_a_count_from_the_other_end():
    """Helios' blocks count the last tokens."""
    case = CASES["HeliosTransformer3DModel"]
    (region,) = derive_layout(case.make(), case.calls["prompt"]())[1].regions
    assert region.counts == (Count("original_context_length", "image", part="last"),)


def gradients(config: dict[str, Any]) -> float:
    """Relative error of the gradients of blocks whose tokens have several dimensions."""
    model, call = ForeignFilm(), film_call(each=True)
    model(**call).square().mean().backward()
    truth = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with ditmesh.parallelized(model, config):
        model(**call).square().mean().backward()
        reduce_gradients(model, ditmesh.engine_of(model).mesh)
        return max(relative_error(p.grad, t) for p, t in zip(model.parameters(), truth, strict=True))


def test_gradients_of_tokens_along_several_dimensions(ranks):
    assert max(ranks(2).run(gradients, {"ring": 2})) < 1e-4


class LeavesText(nn.Module):
    """Joint attention whose last block hands no text on; text is its first argument."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.qkv = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])

    def forward(self, txt, img):
        parts = [layer(one) for layer, one in zip(self.qkv, (txt, img), strict=True)]
        q, k, v = torch.cat(parts, dim=1)[:, None].chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return None if self.last else txt + out[:, : txt.shape[1]], img + out[:, txt.shape[1] :]


class LeavesItsText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LeavesText(number == 2) for number in range(3)])

    def forward(self, x, context):
        txt, img = context, x
        for block in self.blocks:
            txt, img = block(txt, img)
        return img


@pytest.mark.parametrize("words", [5, 6])
def test_a_text_as_long_as_the_picture_that_the_last_block_leaves_out(words: int):
    torch.manual_seed(0)
    _, layout = derive_layout(LeavesItsText().eval(), {"x": torch.randn(1, 6, 8), "context": torch.randn(1, words, 8)})
    (region,) = layout.regions
    assert {stream.arg for stream in region.streams} == {"txt", "img"}
    assert not region.alone


# --- what is refused by name ------------------------------------------------------------------------------------------


class GridBlock(FilmBlock):
    """Mixes neighbours in a row, which only the shape of the tokens tells."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x + x.roll(1, 3), *args, **kwargs)


def test_a_block_that_needs_the_shape_is_refused():
    model = ForeignFilm()
    model.blocks = nn.ModuleList(GridBlock() for _ in range(2))
    with pytest.raises(ditmesh.LayoutError, match=r"blocks\.0"):
        derive_layout(model, film_call())


class Positioned(MadeUpTransformer):
    """Its attention leaves out the last of however many keys the block sees."""

    def forward(self, *args, **kwargs):
        def attend(q, k, v, attn_mask=None, **options):
            keys = torch.arange(k.shape[2]) < k.shape[2] - 1
            return own(q, k, v, attn_mask=keys.view(1, 1, 1, -1) if q.shape == k.shape else attn_mask, **options)

        own = F.scaled_dot_product_attention
        with mock.patch.object(F, "scaled_dot_product_attention", attend):
            return super().forward(*args, **kwargs)


def test_a_mask_that_a_block_makes_by_what_it_sees_is_refused():
    """With some of the tokens it would leave out another key on every rank."""
    with pytest.raises(ditmesh.LayoutError, match=r"layers\.0: with some of its tokens it hands attention call 1"):
        derive_layout(Positioned().eval(), made_up_call())


def test_one_sample_of_latents_with_two_of_text_is_refused():
    """As AnyFlow's pipeline calls it without guidance: the first block makes two samples of one."""
    case = CASES["AnyFlowTransformer3DModel"]
    call = case.calls["prompt"]()
    call["encoder_hidden_states"] = call["encoder_hidden_states"].repeat(2, 1, 1)
    with pytest.raises(ditmesh.LayoutError, match=r"blocks\.0 returns none of its arguments in the shape that it came"):
        derive_layout(case.make(), call)


class Slotted:
    __slots__ = ("__hidden", "scale")

    def __init__(self, hidden):
        self.__hidden, self.scale = hidden, 1.0


def hiding(given):
    return {**given, "cache": Slotted(torch.ones(3))}


def mixing(given):
    return {**given, "patches": {"double": [lambda img, _: img + img.mean(1, keepdim=True)]}}


def putting(given):
    def patch(img, given):
        given["kept"] = img * 2
        return img

    return {**given, "patches": {"double": [patch]}}


def keeping(given):
    store = []

    def patch(img, _):
        store.append(img * 2)
        return img

    return {**given, "patches": {"double": [patch]}}


def adding(given):
    total = torch.zeros(WIDTH)

    def patch(img, _):
        total.add_(img.mean((0, 1)))
        return img

    return {**given, "patches": {"double": [patch]}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (hiding, r"is given 'transformer_options', a dict, which may keep tensors"),
        (mixing, r"double_blocks\.0: tokens of 'img' change other tokens"),
        (putting, r"double_blocks\.0 puts a tensor into its argument 'transformer_options\.kept'"),
        (keeping, r"double_blocks\.0 keeps what it has made of its tokens in something outside"),
        (adding, r"double_blocks\.0 writes to a tensor \(32,\) that it was not given"),
    ],
)
def test_options_that_are_refused_by_name(change, sentence):
    call = image_call()
    call["transformer_options"] = change(call["transformer_options"])
    with pytest.raises(ditmesh.LayoutError, match=sentence):
        derive_layout(ForeignImage(), call)


class Counting(Double):
    """Counts its calls, and keeps the mean of its text, and a table that depends on no token."""

    def __init__(self, attribute):
        super().__init__()
        self.attribute, self.calls, self.kept = attribute, 0, {}
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, img, txt, vec, pe, attn_mask=None, transformer_options=None):
        self.calls += 1
        if self.attribute == "mean":
            self.mean.copy_(txt.mean((0, 1)))
        elif self.attribute == "kept":
            self.kept["text"] = txt + 1
        else:
            self.kept[img.shape[1]] = torch.linspace(0, 1, img.shape[1])
        return super().forward(img, txt, vec, pe, attn_mask, transformer_options)


@pytest.mark.parametrize("attribute", ["mean", "kept", "table"])
def test_what_a_block_leaves_in_the_model_is_refused_by_name(attribute):
    model = ForeignImage()
    model.double_blocks = nn.ModuleList(Counting(attribute) for _ in range(2))
    if attribute == "table":
        assert derive_layout(model, image_call())[1].regions
        return
    with pytest.raises(ditmesh.LayoutError, match=rf"double_blocks\.0.*double_blocks\.0\.{attribute}"):
        derive_layout(model, image_call())


class Remembering(ForeignImage):
    """Adds the mean of tokens that a patch has kept, behind its last block."""

    def forward(self, x, timestep, context, attention_mask, transformer_options=None):
        store = []
        given = options(1, patches={"double": [lambda img, _: (store.append(img), img)[1]]})
        made = super().forward(x, timestep, context, attention_mask, transformer_options=given)
        return made + store[-1].mean() if store else made


def remembering(check: bool) -> float | str:
    model, call = Remembering(), image_call()
    with torch.no_grad():
        truth = model(**call)
        ditmesh.parallelize(model, {"ring": 2}, check=check)
        try:
            return relative_error(model(**call), truth)
        except ditmesh.LayoutError as error:
            return str(error)
        finally:
            if hasattr(model, "_ditmesh_engine"):
                ditmesh.restore(model)


def test_what_no_block_shows_is_caught_by_a_check(ranks):
    """The tokens that it keeps are those that the block returns."""
    assert max(ranks(2).run(remembering, False)) > 1e-4
    for sentence in ranks(2).run(remembering, True):
        assert "Remembering was compared with one device (check=True)" in sentence


def test_a_check_with_cut_weights_is_refused():
    with pytest.raises(ditmesh.ConfigError, match="no rank has all weights"):
        ditmesh.parallelize(ForeignImage(), {"tensor": 2}, check=True)


# --- arguments of calls -----------------------------------------------------------------------------------------------


class Choosy(MadeUpTransformer):
    """May be told how many tokens to expect, or be given a node of a tree."""

    def forward(self, hidden_states, encoder_hidden_states, timestep, expected=None, node=None):
        if node is not None:
            encoder_hidden_states = encoder_hidden_states * node.children[0].parent.scale
        if expected is not None and hidden_states[0, 0].numel() != expected:
            raise ValueError(f"{hidden_states[0, 0].numel()} tokens are not {expected}")
        return super().forward(hidden_states, encoder_hidden_states, timestep)


class Node:
    """Knows its children, and every one of them its parent."""

    def __init__(self, scale, parent=None):
        self.scale, self.parent, self.children = scale, parent, []
        if parent is not None:
            parent.children.append(self)


def tree(*scales):
    root = Node(scales[0])
    for scale in scales[1:]:
        Node(scale, root)
    return root


def choosy(extra: dict[str, Any]) -> float:
    model, call = Choosy().eval(), {**made_up_call(), **extra}
    truth = run(model, call)
    with ditmesh.parallelized(model, {"ulysses": 2}):
        return relative_error(run(model, call), truth)


def test_a_call_is_looked_at_as_it_is(ranks):
    """The model would refuse another number of tokens, so nothing is made smaller; an object may be inside itself."""
    assert max(ranks(2).run(choosy, {"expected": 63, "node": tree(0.5, 1.0)})) <= 1e-5


def test_forms_of_objects_that_are_inside_themselves():
    knot: list[Any] = [1.0]
    knot.append(knot)
    forms = [form_of(Arguments((), (), {"node": one})) for one in (tree(0.5, 1.0), tree(2.0, 3.0), tree(1, 2.0), knot)]
    assert forms[0] == forms[1]
    assert len(set(forms)) == 3
    assert objects_in(knot) == []
    assert not holds_tensors(tree(*range(40)))
    assert holds_tensors(tree(*range(40), torch.ones(1)))


def test_forms_tell_apart_what_a_model_may():
    base = {
        "hidden_states": torch.zeros(2, 4, 3, 10, 14),
        "timestep": torch.tensor([300, 700]),
        "encoder_hidden_states": torch.zeros(2, 9, 16),
    }

    def form(**changes):
        return form_of(Arguments((), (), {**base, **changes}))

    same = [
        {"return_dict": True},
        {"fps": None},
        {"attention_kwargs": {}},
        {"hidden_states": torch.zeros(5, 4, 2, 6, 6)},
    ]
    assert all(form(**changes) == form() for changes in same)
    other = [
        {"timestep": torch.zeros(2, 3)},
        {"timestep": torch.zeros(2)},
        {"enable_diffusion_forcing": True},
        {"fps": [1, 0]},
        # Each of them may count tokens of its own.
        {"fps": [1, 0, 1]},
        {"hidden_states": torch.zeros(2, 4, 1, 10, 14)},
    ]
    assert len({form(), *(form(**changes) for changes in other)}) == len(other) + 1
    assert news(form(fps=[1, 0], timestep=torch.zeros(2, 3)), [form()]) == "'fps', 'timestep'"


def test_plain_values_and_what_may_hide_tensors():
    plain = [uuid.UUID(int=3), Path("a"), Decimal(1), Fraction(1, 3), datetime.now(UTC), range(3), slice(1, 2)]
    assert objects_in([plain, {"a": plain}]) == []
    assert not any(map(holds_tensors, plain))
    assert not holds_tensors(Slotted(plain))
    assert holds_tensors(Slotted([torch.ones(1)]))
    # A generator shows nothing of what it holds.
    assert holds_tensors(iter([torch.ones(1)]))


@dataclass
class More(Modulation):
    """A modulation that may keep something besides its fields."""


def test_dataclasses_and_named_tuples_are_containers():
    ones, pair = torch.ones(2), Pair(Modulation(*torch.eye(3)), More(*torch.eye(3)))
    arguments = Arguments(("vec",), ([pair],), {"more": pair.text})
    assert arguments.get("vec.0.1.scale") is pair.text.scale
    arguments.set("vec.0.1.scale", ones)
    arguments.set("more.gate", ones)
    changed = arguments.get("vec")[0]
    assert type(changed) is Pair
    assert type(changed.text) is More
    assert changed.text.scale is ones
    assert pair.text.scale is not ones
    assert pair.text.gate is not ones
    assert [path for path, _ in arguments.leaves()][:2] == ["vec.0.0.shift", "vec.0.0.scale"]
    assert objects_in(pair) == []
    pair.text.kept = [torch.ones(1)]
    assert objects_in(pair) == [pair.text]

"""Models with the manners of other people's code: derived, cut, and compared with one device."""

from __future__ import annotations

import copy
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import ditmesh
from ditmesh.core.arguments import Arguments
from ditmesh.layout.derive import derive_layout
from ditmesh.layout.forms import holds_tensors, objects_in
from ditmesh.layout.types import Fold
from ditmesh.train import reduce_gradients
from support.foreign import (
    WIDTH,
    Double,
    FilmBlock,
    ForeignFilm,
    ForeignImage,
    Modulation,
    Pair,
    calls,
    film_call,
    image_call,
    options,
)
from support.models import relative_error


def run(model, call):
    with torch.no_grad():
        return model(**copy.copy(call))


def errors(names, config):
    """By name the relative errors of two calls against one device."""
    found = {}
    for name in names:
        model, call = calls()[name]
        truth = run(model, call)
        with ditmesh.parallelized(model, config):
            found[name] = [relative_error(run(model, call), truth) for _ in range(2)]
        assert torch.equal(run(model, call), truth)
    return found


# And the calls that are made with each; None: all of them.
CONFIGS = [
    ({"ulysses": 2}, None),
    ({"ring": 2}, None),
    ({"ring": 2, "text": "replicate"}, ["image", "frames"]),
    ({"ring": 2, "exchange": "displaced", "warmup": "fixed(9)"}, ["image", "frames"]),
    ({"ulysses": 2, "reproducible": True}, ["image", "frames"]),
    ({"cfg": 2}, ["two images", "two films"]),
]


@pytest.mark.parametrize(("config", "names"), CONFIGS, ids=str)
def test_calls_on_two_ranks(ranks, config, names):
    for found in ranks(2).run(errors, names or [*calls()], config):
        assert max(error for pair in found.values() for error in pair) < 1e-5, found


def patches():
    """Errors of patches of the image's tokens; and why those of a film are refused."""
    config = {"pipe": 2, "patches": 2, "warmup": "fixed(9)"}
    found = errors(["image"], config)["image"]
    model, call = calls()["film"]
    with ditmesh.parallelized(model, config), pytest.raises(ditmesh.ConfigError) as refused:
        run(model, call)
    return found, str(refused.value)


def test_patches_of_an_image_and_none_of_a_film(ranks):
    for found, refused in ranks(2).run(patches):
        assert max(found) < 1e-5
        assert "stand along several dimensions" in refused


def bits(config):
    found = []
    for name in ("image", "film", "frames"):
        model, call = calls()[name]
        with ditmesh.parallelized(model, {"reproducible": True, "tiles": 4, **config}):
            found.append([run(model, call) for _ in range(2)][1])
    return found


def test_the_same_bits_on_one_rank_and_on_two(ranks):
    (alone,) = ranks(1).run(bits, {})
    for config in ({"ulysses": 2}, {"ring": 2}):
        for found in ranks(2).run(bits, config):
            assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


def gradients(config):
    """Relative error of the gradients of blocks, with activations computed again."""
    found = []
    for kind, call in ((ForeignFilm, film_call()), (ForeignFilm, film_call(each=True))):
        model = kind()
        model(**call).square().mean().backward()
        truth = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model.checkpointing = True
        with ditmesh.parallelized(model, config):
            run(model, call)
            model(**call).square().mean().backward()
            reduce_gradients(model, ditmesh.engine_of(model).mesh)
            found += [relative_error(p.grad, t) for p, t in zip(model.parameters(), truth, strict=True)]
    return found


def test_gradients_of_tokens_along_several_dimensions(ranks):
    for found in ranks(2).run(gradients, {"ring": 2}):
        assert max(found) < 1e-4


def test_the_layout_of_a_film():
    layout = derive_layout(ForeignFilm(extra=True), film_call(each=True))[1]
    (region,) = layout.regions
    assert region.folds == (Fold("x", 1, 3, (0,)), Fold("emb", 1, 1), Fold("extra", 1, 3))
    assert {cut.arg: cut.dim for cut in region.cuts} == {"emb": 1, "rope": 2, "extra": 1}


class GridBlock(FilmBlock):
    """Mixes neighbours in a row, which only the shape of the tokens tells."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x + x.roll(1, 3), *args, **kwargs)


def test_a_block_that_needs_the_shape_is_refused():
    model = ForeignFilm()
    model.blocks = torch.nn.ModuleList(GridBlock() for _ in range(2))
    with pytest.raises(ditmesh.LayoutError, match=r"blocks\.0"):
        derive_layout(model, film_call())


# --- arguments -----------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("__hidden", "scale")

    def __init__(self, hidden):
        self.__hidden, self.scale = hidden, 1.0


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


def refusal(change):
    """What a call with something else among its options is refused with."""
    model, call = ForeignImage(), image_call()
    call["transformer_options"] = change(call["transformer_options"])
    with ditmesh.parallelized(model, {"ulysses": 2}), pytest.raises(ditmesh.LayoutError) as refused:
        run(model, call)
    return str(refused.value)


def hiding(given):
    return {**given, "cache": Slotted(torch.ones(3))}


def test_an_object_that_hides_tensors_is_refused_by_name(ranks):
    for sentence in ranks(2).run(refusal, hiding):
        assert "is given 'transformer_options', a dict, which may keep tensors" in sentence


# --- what a block does besides ---------------------------------------------------------------------------------


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
        (mixing, r"double_blocks\.0: tokens of 'img' change other tokens"),
        (putting, r"double_blocks\.0 puts a tensor into its argument 'transformer_options\.kept'"),
        (keeping, r"double_blocks\.0 keeps what it has made of its tokens in something outside"),
        (adding, r"double_blocks\.0 writes to a tensor \(32,\) that it was not given"),
    ],
)
def test_what_a_patch_must_not_do_is_refused_by_name(change, sentence):
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
    model.double_blocks = torch.nn.ModuleList(Counting(attribute) for _ in range(2))
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


def remembering(check):
    model, call = Remembering(), image_call()
    truth = run(model, call)
    ditmesh.parallelize(model, {"ring": 2}, check=check)
    try:
        return relative_error(run(model, call), truth)
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


class LeavesText(torch.nn.Module):
    """Joint attention whose last block hands no text on; text is its first argument."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.qkv = torch.nn.ModuleList([torch.nn.Linear(8, 24) for _ in range(2)])

    def forward(self, txt: torch.Tensor, img: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        parts = [layer(one) for layer, one in zip(self.qkv, (txt, img), strict=True)]
        q, k, v = torch.cat(parts, dim=1)[:, None].chunk(3, dim=-1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]
        return None if self.last else txt + out[:, : txt.shape[1]], img + out[:, txt.shape[1] :]


class LeavesItsText(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([LeavesText(number == 2) for number in range(3)])

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        txt, img = context, x
        for block in self.blocks:
            txt, img = block(txt, img)
        return img


@pytest.mark.parametrize("words", [5, 6])
def test_a_text_as_long_as_the_picture_that_the_last_block_leaves_out(words: int) -> None:
    torch.manual_seed(0)
    _, layout = derive_layout(LeavesItsText().eval(), {"x": torch.randn(1, 6, 8), "context": torch.randn(1, words, 8)})
    (region,) = layout.regions
    assert {stream.arg for stream in region.streams} == {"txt", "img"}
    assert not region.alone

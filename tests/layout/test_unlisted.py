"""A transformer that no table knows: probed when it is parallelised."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import ditmesh
from ditmesh.core.arguments import Arguments
from ditmesh.layout import LOCAL, Count, Cut, Stream, joint
from ditmesh.layout.derive import derive_layout
from ditmesh.layout.forms import form_of, holds_tensors, news, objects_in
from ditmesh.layout.probe import probe
from support.classes import CASES
from support.made_up import MadeUpTransformer
from support.models import relative_error, run
from support.parity import NoExchange
from support.sample import sampled
from support.unlisted import call_of, unlisted


def arguments():
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(2, 6, 7, 9, generator=generator),
        "encoder_hidden_states": torch.randn(2, 11, 10, generator=generator),
        "timestep": torch.tensor([300.0, 700.0]),
    }


def error_of(config, exchange):
    model = MadeUpTransformer().eval()
    truth = run(model, arguments())
    patch = pytest.MonkeyPatch()
    if not exchange:
        patch.setattr("ditmesh.strategies.sequence.ExactSequence.kind", NoExchange)
    with ditmesh.parallelized(model, config):
        value = run(model, arguments())
        source = ditmesh.engine_of(model).hooks[0].layout.source
    patch.undo()
    assert torch.equal(run(model, arguments()), truth)
    return relative_error(value, truth), source


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ulysses": 3}, {"ulysses": 2, "ring": 2}], ids=str)
def test_a_class_nobody_listed_is_probed(ranks, config):
    size = config["ulysses"] * config.get("ring", 1)
    for error, source in ranks(size).run(error_of, config, True):
        assert error <= 1e-5
        assert source == "derived"
    for error, _ in ranks(size).run(error_of, config, False):
        assert error > 1e-3


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


def convolved(config):
    model = MadeUpTransformer(convolution=True).eval()
    truth = run(model, arguments())
    with ditmesh.parallelized(model, config):
        found = run(model, arguments())
        leaves = ditmesh.engine_of(model).hooks[0].layout.regions[0].leaves
    return relative_error(found, truth), [leaf.module for leaf in leaves]


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_a_convolution_sees_all_tokens(ranks, config):
    """Its tokens see their neighbours without attention: every rank runs it on all tokens."""
    for error, modules in ranks(2).run(convolved, config):
        assert error <= 1e-5
        assert modules == ["conv"]


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
        derive_layout(Positioned().eval(), arguments())


def test_one_sample_of_latents_with_two_of_text_is_refused():
    """As AnyFlow's pipeline calls it without guidance: the first block makes two samples of one."""
    case = CASES["AnyFlowTransformer3DModel"]
    call = case.calls["prompt"]()
    call["encoder_hidden_states"] = call["encoder_hidden_states"].repeat(2, 1, 1)
    with pytest.raises(ditmesh.LayoutError, match=r"blocks\.0 returns none of its arguments in the shape that it came"):
        derive_layout(case.make(), call)


# --- calls that the probe did not make -------------------------------------------------------------------------


def call_in_parallel(name, forms, config, batch=2, layout=None):
    """Error of each form of call, one after the other on one parallelised model, or what was refused."""
    model, found = unlisted(name), []
    calls = [call_of(name, form, batch) for form in forms]
    truths = [run(model, call) for call in calls]
    with ditmesh.parallelized(model, config, layout=layout):
        for call, truth in zip(calls, truths, strict=True):
            try:
                found.append(relative_error(run(model, call), truth))
            except (ditmesh.LayoutError, ditmesh.InputError) as error:
                found.append(str(error))
    assert all(torch.equal(run(model, call), truth) for call, truth in zip(calls, truths, strict=True))
    return found


@pytest.mark.parametrize(
    ("call", "config"),
    sampled(
        [("Helios", ("plain", "history", "plain")), ("SkyReels", ("plain", "forcing"))],
        [{"ulysses": 2}, {"ring": 2, "text": "shard"}, {"ulysses": 2, "reproducible": True}],
        of=2,
    ),
    ids=str,
)
def test_a_call_of_another_form_is_looked_at_anew(ranks, call, config):
    name, forms = call
    for errors in ranks(2).run(call_in_parallel, name, forms, config):
        assert all(isinstance(error, float) and error <= 1e-5 for error in errors), errors


def test_a_call_that_only_one_sample_can_make(ranks):
    """The model adds frames' rates to timesteps in a way that fails for two samples, whoever calls."""
    for (error,) in ranks(2).run(call_in_parallel, "SkyReels fps", ("forcing",), {"ulysses": 2}, 1):
        assert error <= 1e-5


class Choosy(MadeUpTransformer):
    """May be told how many tokens to expect, or be given a node of a tree."""

    def forward(self, hidden_states, encoder_hidden_states, timestep, expected=None, node=None):
        if node is not None:
            encoder_hidden_states = encoder_hidden_states * node.children[0].parent.scale
        if expected is not None and hidden_states[0, 0].numel() != expected:
            raise ValueError(f"{hidden_states[0, 0].numel()} tokens are not {expected}")
        return super().forward(hidden_states, encoder_hidden_states, timestep)


def choosy(extra):
    model, call = Choosy().eval(), {**arguments(), **extra}
    truth = run(model, call)
    with ditmesh.parallelized(model, {"ulysses": 2}):
        try:
            return relative_error(run(model, call), truth)
        except ditmesh.LayoutError as error:
            return str(error)


def test_a_call_is_looked_at_as_it_is(ranks):
    """Nothing of it is made smaller: the model would refuse another number of tokens."""
    assert max(ranks(2).run(choosy, {"expected": 63})) <= 1e-5


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


def test_an_object_that_is_inside_itself_is_an_argument_as_any_other(ranks):
    assert max(ranks(2).run(choosy, {"node": tree(0.5, 1.0)})) <= 1e-5
    knot = [1.0]
    knot.append(knot)
    forms = [form_of(Arguments((), (), {"node": one})) for one in (tree(0.5, 1.0), tree(2.0, 3.0), tree(1, 2.0), knot)]
    assert forms[0] == forms[1]
    assert len(set(forms)) == 3
    assert objects_in(knot) == []
    assert not holds_tensors(tree(*range(40)))
    assert holds_tensors(tree(*range(40), torch.ones(1)))


def test_forms_tell_apart_what_a_model_may():
    base = call_of("SkyReels", "plain")

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


def test_a_count_from_the_other_end():
    """Helios' blocks count the last tokens."""
    for form in ("plain", "history"):
        (region,) = derive_layout(unlisted("Helios"), call_of("Helios", form))[1].regions
        assert region.counts == (Count("original_context_length", "image", part="last"),)

"""Transformers that cannot even be called by diffusers' conventions: the first call tells their layout."""

from __future__ import annotations

from functools import partial
from unittest import mock

import diffusers
import pytest
import torch

import ditmesh
from support.made_up import MadeUpTransformer
from support.models import inputs, relative_error, run, sizes, tiny


class Foreign(MadeUpTransformer):
    """Its arguments have names that no convention knows."""

    def forward(self, picture, words, when, *, sharpness=None):
        hidden = picture if sharpness is None else picture * sharpness
        return super().forward(hidden, words, when)


class ForeignPipeline(diffusers.DiffusionPipeline):
    """Noise from a generator, a few steps with both branches of guidance in one call."""

    def __init__(self, transformer):
        super().__init__()
        self.register_modules(transformer=transformer)
        self.called = 0

    @torch.no_grad()
    def __call__(self, words, generator=None, steps=3):
        self.called += 1
        latents = torch.randn(1, 6, 7, 9, generator=generator)
        for step in range(steps):
            when = torch.full((2,), 900.0 - 300 * step)
            both = self.transformer(torch.cat([latents] * 2), torch.cat([words * 0, words]), when)[0]
            latents = latents - 0.1 * (both[0] + 3 * (both[1] - both[0]))[None]
        return latents


def model():
    torch.manual_seed(0)
    return Foreign().eval()


def call(batch=2):
    generator = torch.Generator().manual_seed(3)
    return {
        "picture": torch.randn(batch, 6, 7, 9, generator=generator),
        "words": torch.randn(batch, 11, 10, generator=generator),
        "when": torch.tensor([300.0, 700.0][:batch]),
    }


CONFIGS = [{"ulysses": 2}, {"ring": 2}, {"data": 2}, {"ulysses": 2, "reproducible": True}]


def bare(config):
    net = model()
    with torch.no_grad():
        truth = [net(**call())[0], net(**call(), sharpness=torch.tensor(0.5))[0]]
        keys = set(vars(net))
        ditmesh.parallelize(net, config)
        assert ditmesh.engine_of(net).mesh.config == ditmesh.engine_of(net).config == ditmesh.ParallelConfig(**config)
        with pytest.raises(ditmesh.InputError, match="not known before its first call"):
            _ = ditmesh.engine_of(net).hooks
        found = [net(**call())[0], net(**call(), sharpness=torch.tensor(0.5))[0]]
        source = ditmesh.engine_of(net).models[0].layout.source
        ditmesh.restore(net)
        assert set(vars(net)) == keys
        assert torch.equal(net(**call())[0], truth[0])
    return [relative_error(one, other) for one, other in zip(found, truth, strict=True)], source


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_transformer_called_by_hand(ranks, config):
    for errors, source in ranks(2).run(bare, config):
        assert max(errors) <= 1e-5
        assert source == "derived"


def pipeline(config):
    pipe = ForeignPipeline(model())
    words = torch.randn(1, 11, 10, generator=torch.Generator().manual_seed(1))
    own = torch.Generator().manual_seed(5)
    truth = [pipe(words, own), pipe(words, own)]
    torch.manual_seed(7)
    unseeded = pipe(words)
    pipe.called = 0
    own = torch.Generator().manual_seed(5)
    with ditmesh.parallelized(pipe, config):
        found = [pipe(words, own), pipe(words, own)]
        torch.manual_seed(7)
        found.append(pipe(words))
        calls = pipe.called
    return [relative_error(one, other) for one, other in zip(found, [*truth, unseeded], strict=True)], calls


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"cfg": 2}], ids=str)
def test_a_pipeline_is_called_again_with_the_same_noise(ranks, config):
    for errors, calls in ranks(2).run(pipeline, config):
        assert max(errors) <= 1e-5
        # The first of the three twice.
        assert calls == 4


def never_called(config):
    pipe = ForeignPipeline(model())
    before = type(pipe), set(vars(pipe)), set(vars(pipe.transformer))
    ditmesh.parallelize(pipe, config)
    ditmesh.restore(pipe)
    return before == (type(pipe), set(vars(pipe)), set(vars(pipe.transformer)))


def test_what_was_never_called_is_restored(ranks):
    assert all(ranks(2).run(never_called, {"ulysses": 2}))


class Mixing(Foreign):
    """Adds the mean of all tokens in the blocks' own forward."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.forward = partial(self._mixed, layer.forward)

    @staticmethod
    def _mixed(forward, tokens, *args, **kwargs):
        return forward(tokens + tokens.mean(1, keepdim=True), *args, **kwargs)


def refused(case):
    rank = torch.distributed.get_rank()
    net = (Mixing() if case == "mixing" else model()).eval()
    given = call(2 if case == "mixing" or rank == 0 else 1)
    if case == "forms" and rank == 1:
        given["sharpness"] = torch.ones(1, 1, 1, 1)
    with ditmesh.parallelized(net, {"ulysses": 2}):
        with pytest.raises((ditmesh.LayoutError, ditmesh.InputError)) as caught, torch.no_grad():
            net(**given)
        return str(caught.value)


def test_what_cannot_be_derived_is_refused_on_all_ranks(ranks):
    first, second = ranks(2).run(refused, "mixing")
    assert first == second
    assert "layers.0" in first
    assert "tokens of 'tokens' change other tokens" in first


def fails_on_one_rank():
    net, rank = model(), torch.distributed.get_rank()
    bad = {**call(), "words": torch.zeros(2, 11, 9)} if rank == 1 else call()
    with torch.no_grad():
        truth = net(**call())[0]
        with ditmesh.parallelized(net, {"ulysses": 2}):
            with pytest.raises(Exception, match=r"mat1 and mat2|another rank failed") as caught:
                net(**bad)
            return type(caught.value).__name__, relative_error(net(**call())[0], truth)


def test_a_first_call_that_fails_on_one_rank(ranks):
    (first, error), (second, other) = ranks(2).run(fails_on_one_rank)
    assert (first, second) == ("LayoutError", "RuntimeError")
    assert max(error, other) <= 1e-5


def test_ranks_that_call_differently_are_told(ranks):
    assert all("pass the same inputs on every rank" in said for said in ranks(2).run(refused, "forms"))


def by_turns(config):
    """Latte without its reviewed layout: the model folds tokens into the batch between its blocks."""
    net, given = tiny("Latte"), inputs("Latte", sizes("Latte")["B=1"])
    truth = run(net, given)
    with mock.patch("ditmesh.engine.targets.layout_of", return_value=None), ditmesh.parallelized(net, config):
        found = [run(net, given), run(net, given)]
        regions = ditmesh.engine_of(net).hooks[0].layout.regions
    return max(relative_error(one, truth) for one in found), [region.alone for region in regions]


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_tokens_are_gathered_between_blocks_where_the_model_wants_them(ranks, config):
    for error, alone in ranks(2).run(by_turns, config):
        assert error <= 1e-5
        assert alone[0]

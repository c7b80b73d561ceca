"""A class of a user's own that has the name of one of diffusers', and parts of a diffusers model that were replaced."""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ditmesh
from ditmesh.core.library import is_published, library_class, library_name
from ditmesh.layout import layout_of
from ditmesh.recipe import RECIPE
from ditmesh.strategies import support
from ditmesh.strategies.vae.parallel import TESTED
from support.models import relative_error, tiny


class Mixing(nn.Module):
    """Self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width))


class TwiceOverTheImage(nn.Module):
    """Attends to the image where diffusers' block of PixArt attends to the text the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = Mixing(32, 4), Mixing(32, 4)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.near(hidden_states)
        return hidden_states + self.far(hidden_states)


class PixArtTransformer2DModel(nn.Module):
    """A fork."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.transformer_blocks = nn.ModuleList(TwiceOverTheImage() for _ in range(2))

    def forward(self, hidden_states, timestep):
        x = self.first(hidden_states) + timestep[:, None, None]
        for block in self.transformer_blocks:
            x = block(x)
        return x


class ToTheImage:
    """A processor that is none of diffusers'."""

    def __call__(self, attn, hidden_states, **_):
        return hidden_states


def fork():
    torch.manual_seed(0)
    return PixArtTransformer2DModel().eval(), {"hidden_states": torch.randn(1, 16, 8), "timestep": torch.tensor([0.5])}


def drawn(config):
    """Relative error against one device and the layout's source."""
    model, call = fork()
    with torch.no_grad():
        truth = model(**call)
        with ditmesh.parallelized(model, config):
            return relative_error(model(**call), truth), ditmesh.engine_of(model).models[0].layout.source


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_what_only_has_the_name_is_looked_at(ranks, config):
    for error, source in ranks(2).run(drawn, config):
        assert error < 1e-5
        assert source != "reviewed"


def test_a_fork_is_none_of_the_library():
    model, _ = fork()
    assert layout_of(model) is None
    assert library_name(model) == ""
    with pytest.warns(ditmesh.errors.UntestedWarning, match="PixArtTransformer2DModel with ulysses=2 .*: none"):
        support.check_tested(
            type(model).__name__, ditmesh.ParallelConfig(ulysses=2), RECIPE, published=layout_of(model) is not None
        )


def test_a_subclass_counts_while_it_replaces_no_method():
    original = diffusers.FluxTransformer2DModel
    same = type("Mine", (original,), {"__init__": lambda self: None, "note": 1})
    other = type("FluxTransformer2DModel", (original,), {"forward": lambda self: None})
    assert library_class(same) is original
    assert library_class(other) is None


@pytest.mark.parametrize("what", ["forward", "class forward", "block", "block forward", "inner", "processor"])
def test_what_was_replaced_in_a_model_of_diffusers_is_seen(what, monkeypatch):
    model = copy.deepcopy(tiny("PixArt"))
    block = model.transformer_blocks[1]
    assert layout_of(model) is not None
    if what == "forward":
        model.forward = lambda *args, **kwargs: None
    elif what == "class forward":
        monkeypatch.setattr(type(model), "forward", lambda self, hidden_states: None)
    elif what == "block":
        model.transformer_blocks[1] = TwiceOverTheImage()
    elif what == "block forward":
        block.forward = lambda *args, **kwargs: None
    elif what == "inner":
        block.ff = Mixing(32, 4)
    else:
        block.attn1.processor = ToTheImage()
    assert layout_of(model) is None
    assert not is_published(model, ["transformer_blocks"])


def test_what_leaves_a_model_as_it_is_does_not_count(ranks):
    """Adapters, offloading, compiled blocks and the hooks of `parallelize` itself."""
    from accelerate.hooks import ModelHook, add_hook_to_module
    from peft import LoraConfig

    model = copy.deepcopy(tiny("Flux"))
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    assert layout_of(model) is not None
    add_hook_to_module(model, ModelHook())
    add_hook_to_module(model.transformer_blocks[0], ModelHook())
    model.transformer_blocks[1] = torch.compile(model.transformer_blocks[1], backend="eager")
    assert layout_of(model) is not None
    assert all(ranks(2).run(seen_while_parallel))


def seen_while_parallel():
    model = copy.deepcopy(tiny("Flux"))
    with ditmesh.parallelized(model, {"ulysses": 2}):
        return layout_of(model) is not None


def test_autoencoders_go_by_class():
    original = diffusers.AutoencoderTiny
    kind = type("AutoencoderTiny", (original,), {"decode": lambda self, latents: latents})
    assert library_name(kind()) not in TESTED
    assert library_name(original()) in TESTED

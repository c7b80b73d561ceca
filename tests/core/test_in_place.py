"""Blocks that write to what they are given, and sizes that equal the number of samples by chance."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ditmesh
from ditmesh.layout.derive import derive_rows
from support.models import relative_error

WIDTH, HEADS = 32, 4


class JointBlock(nn.Module):
    """Attention over text and image; writes to its arguments, to attention's answer and to what its modules return."""

    def __init__(self, two: bool = True) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, text, gate):
        both = self.norm(torch.cat([text, x], 1))
        batch, tokens, _ = both.shape
        q, k, v = self.qkv(both).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        answer = F.scaled_dot_product_attention(q, k, v)
        answer *= 1.5
        mixed = self.out(answer.transpose(1, 2).reshape(batch, tokens, WIDTH))
        mixed *= gate[:, None]
        text += mixed[:, : text.shape[1]]
        x += mixed[:, text.shape[1] :]
        return x, text


class Joint(nn.Module):
    """A model of such blocks; with ``ignore`` it goes on with what they have written to, not with what they return."""

    def __init__(self, ignore: bool = False) -> None:
        super().__init__()
        self.first, self.text, self.ignore = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH), ignore
        self.blocks, self.last = nn.ModuleList(JointBlock() for _ in range(3)), nn.Linear(WIDTH, 8)

    def forward(self, hidden_states, encoder_hidden_states, timestep):
        x, text = self.first(hidden_states), self.text(encoder_hidden_states)
        gate = timestep[:, None].expand(-1, WIDTH)
        for block in self.blocks:
            made = block(x, text, gate)
            if not self.ignore:
                x, text = made
        return self.last(x)


class Rotated(nn.Module):
    """A model with a table per token, and embeddings with a row per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(RotatedBlock() for _ in range(2))

    def forward(self, hidden_states, img_ids, layered, timestep):
        x = self.first(hidden_states) * timestep[:, None, None]
        table = img_ids @ torch.linspace(0.1, 1.0, 3 * WIDTH).view(3, WIDTH)
        for block, text in zip(self.blocks, layered, strict=True):
            x = block(x, text, table)
        return self.last(x)


class RotatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, text, table):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x + table).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, WIDTH)
        return x + self.out(mixed) + text.mean(1, keepdim=True)


def joint(ignore: bool = False, batch: int = 1):
    torch.manual_seed(0)
    model = Joint(ignore).eval()
    given = {"hidden_states": torch.randn(batch, 16, 8), "encoder_hidden_states": torch.randn(batch, 6, 8)}
    return model, given | {"timestep": torch.linspace(0.3, 0.8, batch)}


def errors(config, batch=1, ignore=False, mode=torch.no_grad):
    """Relative errors of two calls against one device; or the sentence of a refusal."""
    model, call = joint(ignore, batch)
    with mode():
        truth = copy.deepcopy(model)(**call)
        try:
            with ditmesh.parallelized(model, config):
                return [relative_error(model(**call), truth) for _ in range(2)]
        except ditmesh.LayoutError as error:
            return str(error)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"ring": 2, "reproducible": True}, torch.no_grad),
        ({"data": 2}, torch.no_grad),
        ({"ring": 2}, torch.inference_mode),
    ],
    ids=str,
)
def test_blocks_that_write_to_their_arguments(ranks, config, mode):
    for found in ranks(2).run(errors, config, 2, False, mode):
        assert max(found) < 1e-5


def test_results_that_a_model_does_not_read_are_refused(ranks):
    for found in ranks(2).run(errors, {"ring": 2}, 1, True):
        assert "goes on with those instead of what its blocks return" in found


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_sizes_that_equal_the_number_of_samples(samples):
    torch.manual_seed(0)
    model = Rotated().eval()
    call = {
        "hidden_states": torch.randn(samples, 4, 8),
        "img_ids": torch.randn(4, 3),
        "layered": torch.randn(2, samples, 5, WIDTH),
        "timestep": torch.linspace(0.3, 0.8, samples),
    }
    layout = derive_rows(model, None, call)
    if samples > 1:
        assert layout.rows
        assert set(layout.unbatched) == {"img_ids", "layered"}
        assert layout.batched == (("layered", 1),)

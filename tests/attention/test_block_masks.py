"""Block masks of flex attention over ranks: by heads, by rows of blocks, at the indices of whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import ditmesh
from ditmesh.attention.blocks import blocks_of_heads
from ditmesh.errors import DitmeshError
from support.models import RAGGED, fresh, inputs, relative_error, run

TOLERANCE, CALLS = 1e-5, 2
ULYSSES, GATHER = {"ulysses": 2}, {"ring": 2, "exchange": "gather"}
# Of Flux: tokens of the text and of an image of 8 x 8, heads. A rank's tokens begin inside of a block of 36.
TEXT, SIDE, TOKENS, HEADS, BLOCK = 32, 8, 96, 8, 36


def window() -> BlockMask:
    """A token of the image sees the text and its neighbours in rows and columns, by a table that is captured."""
    rows, columns = torch.arange(SIDE).repeat_interleave(SIDE), torch.arange(SIDE).repeat(SIDE)
    table = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    table[TEXT:, TEXT:] = torch.maximum((rows[:, None] - rows).abs(), (columns[:, None] - columns).abs()) <= 1
    return create_block_mask(lambda b, h, q, k: table[q, k], None, None, TOKENS, TOKENS, "cpu", BLOCK)


def by_head() -> BlockMask:
    """Two heads see all, in 9 blocks each, six a token alone, in 3: two and six heads have as many."""
    shared = torch.arange(HEADS) < 2
    return create_block_mask(lambda b, h, q, k: shared[h] | (q == k), None, HEADS, TOKENS, TOKENS, "cpu", BLOCK)


def by_sample() -> BlockMask:
    """Causal, without the padding of a text. Blocks are so small that the second rank has no query of the first."""
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    valid[0, 5:20] = False
    return create_block_mask(lambda b, h, q, k: (q >= k) & valid[b, k], 2, None, TOKENS, TOKENS, "cpu", BLOCK // 3)


MASKS = (window, by_head, by_sample)


class Local(FluxAttnProcessor):
    """A user's own processor; the layout of the class knows nothing of it."""

    def __init__(self, mask: BlockMask) -> None:
        self.mask, self._attention_backend = mask, "flex"

    def __call__(self, attn: Any, tokens: Tensor, text: Any = None, mask: Any = None, rope: Any = None) -> Any:
        return super().__call__(attn, tokens, text, self.mask, rope)


def masked(mask: BlockMask, config: dict[str, Any], handed: bool = False) -> tuple[float, int, str]:
    """The error of a forward with a mask against one device, and blocks of this rank; or what is said."""
    model, given = fresh("Flux", num_layers=1, num_single_layers=1), inputs("Flux", RAGGED)
    before = _AttentionBackendRegistry._active_backend
    if handed:
        model.set_attention_backend("flex")
        given["joint_attention_kwargs"] = {"attention_mask": mask}
    else:
        model.set_attn_processor(Local(mask))
    try:
        truth = run(model, given)
        with ditmesh.parallelized(model, config):
            error = relative_error(run(model, given), truth)
            return error, int(ditmesh.engine_of(model).mesh.traffic.blocks), ""
    except DitmeshError as error:
        return torch.inf, 0, str(error)
    finally:
        model.reset_attention_backend()
        # Setting a backend on a model sets it for the process.
        _AttentionBackendRegistry.set_active_backend(before)


@pytest.mark.parametrize("config", [ULYSSES, GATHER], ids=["ulysses", "gather"])
def test_a_block_mask(ranks, config):
    # One of them is handed over with the call, of which the layout is derived.
    by_rank = ranks(2).run(lambda: [masked(mask(), config, handed=mask is window) for mask in MASKS])
    for mask, *found in zip(MASKS, *by_rank, strict=True):
        assert all(error <= TOLERANCE for error, *_ in found), found
        whole = CALLS * int(blocks_of_heads(mask()).sum()) * (HEADS // mask().shape[1]) * (2 // mask().shape[0])
        first, second = (number for _, number, _ in found)
        assert first + second == whole if config == ULYSSES else whole < first + second < 2 * whole
        assert first == second or mask is not by_head or config != ULYSSES


REFUSED = (
    ({"ring": 2}, window, "set exchange='gather', or use ulysses"),
    ({"ring": 2, "exchange": "displaced"}, window, "use ulysses, or ring with exchange='gather'"),
    ({"tensor": 2}, by_head, "leave data, cfg and tensor out for this model"),
    ({"data": 2}, by_sample, "leave data and cfg at 1"),
    ({"ulysses": 2, "attention": "native"}, window, "use attention='flex'"),
)


def test_what_cannot_be_right_is_refused(ranks):
    for found in ranks(2).run(lambda: [masked(mask(), config) for config, mask, _ in REFUSED]):
        assert all(words in sentence for (*_, words), (*_, sentence) in zip(REFUSED, found, strict=True)), found

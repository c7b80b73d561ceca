"""Digests of values."""

from __future__ import annotations

import pytest
import torch

from ditmesh.core import digests
from ditmesh.core.digests import tensor_digest
from ditmesh.core.values import Values, as_bytes, seen

LAYOUTS = {
    "a number": torch.tensor(1.5),
    "expanded to one": torch.tensor(1.5).expand(1),
    "one of a row": torch.tensor([1.5, 2.5])[::2],
    "a column": torch.tensor([[1.5, 2.5], [3.5, 4.5]])[:, 0],
    "turned": torch.tensor([[1.5, 2.5], [3.5, 4.5]]).t(),
    "none": torch.empty(0).expand(3, 0),
    "conjugate, expanded": torch.tensor(1 + 2j).conj().expand(1),
    "negative, expanded": torch.tensor(1 + 2j).conj().imag.expand(1),
    "bfloat16, expanded": torch.tensor(1.5, dtype=torch.bfloat16).expand(1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_have_bytes_however_they_lie_in_memory(name: str) -> None:
    tensor = LAYOUTS[name]
    own = torch.empty(tensor.shape, dtype=tensor.dtype)
    own.copy_(tensor)
    content = own.numpy().tobytes() if own.dtype is not torch.bfloat16 else own.view(torch.int16).numpy().tobytes()
    assert as_bytes(tensor).numpy().tobytes() == content
    assert Values().content(seen(tensor)) == content


def _swap(tensor):
    flat = tensor.view(-1)
    flat[0], flat[-1] = flat[-1].clone(), flat[0].clone()


def _flip_two_signs(tensor):
    tensor.view(-1)[:2] *= -1


def _last_bit(tensor):
    tensor.view(-1).view(torch.uint8)[0] ^= 1


@pytest.mark.parametrize("change", [_swap, _flip_two_signs, torch.neg_, _last_bit])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_digests_tell_of_any_change(change, dtype):
    generator = torch.Generator().manual_seed(0)
    for size in (3, 4096, 3 * digests.WORDS + 5):
        tensor = torch.randn(size, generator=generator).to(dtype)
        # Another place in memory that begins between two words.
        assert tensor_digest(torch.cat([tensor[:1], tensor])[1:]) == tensor_digest(tensor)
        changed = tensor.clone()
        change(changed)
        assert tensor_digest(changed) != tensor_digest(tensor)

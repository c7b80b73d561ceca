"""Digests of values."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ditmesh.core import digests
from ditmesh.core.digests import tensor_contents, tensor_digest
from ditmesh.core.values import Values, as_bytes, seen


def test_a_single_number_that_was_expanded_has_a_digest():
    """As a timestep of a batch of one, which pipelines expand."""
    assert tensor_digest(torch.tensor(3.0).expand(1)) == tensor_digest(torch.tensor([3.0]))
    assert tensor_digest(torch.tensor(3.0).expand(2)) == tensor_digest(torch.tensor([3.0, 3.0]))


LAYOUTS = {
    "a number": torch.tensor(1.5),
    "expanded to one": torch.tensor(1.5).expand(1),
    "expanded to one by one": torch.tensor(1.5).expand(1, 1),
    "expanded to two": torch.tensor(1.5).expand(2),
    "one of a row": torch.tensor([1.5, 2.5])[::2],
    "a column": torch.tensor([[1.5, 2.5], [3.5, 4.5]])[:, 0],
    "turned": torch.tensor([[1.5, 2.5], [3.5, 4.5]]).t(),
    "none": torch.empty(0).expand(3, 0),
    "conjugate, expanded": torch.tensor(1 + 2j).conj().expand(1),
    "negative, expanded": torch.tensor(1 + 2j).conj().imag.expand(1),
    "boolean, expanded": torch.tensor(True).expand(1),
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


@pytest.mark.parametrize("sums", [False, True], ids=["in host memory", "as on an accelerator"])
@pytest.mark.parametrize("change", [_swap, _flip_two_signs, torch.neg_, _last_bit])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_contents_tell_of_any_change(sums, change, dtype):
    sizes, generator = [3, 4096, 3 * digests.WORDS + 5], torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    # Another place in memory that begins between two words, and another order of dimensions.
    moved = [torch.cat([tensor[:1], tensor])[1:] for tensor in tensors]

    def contents(of):
        if not sums:
            return tensor_contents(of)
        return [(tuple(one.shape), one.dtype, digests._content_sum(one).item()) for one in of]

    before = contents(tensors)
    assert contents(moved) == before
    assert len({str(content) for content in contents([tensors[1], tensors[1].view(64, 64).T])}) == 2
    for number, tensor in enumerate(tensors):
        change(tensor)
        changed = contents(tensors)
        assert [one == other for one, other in zip(changed, before, strict=True)] == [
            other != number for other in range(len(tensors))
        ]
        before = changed


def test_contents_of_an_accelerator_wait_once():
    tensors = [torch.randn(5), torch.zeros(0), torch.randn(3, 4)]
    with mock.patch.object(digests, "HOST", ()):
        sums = tensor_contents(tensors)
        assert sums == tensor_contents([tensor.clone() for tensor in tensors])
        assert sums[0] != tensor_contents([tensors[0] + 1])[0]
    assert [len(content) for content in sums] == [4, 3, 4]

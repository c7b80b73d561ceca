"""Digests of values."""

from __future__ import annotations

import torch

from ditmesh.core.digests import tensor_digest


def test_a_single_number_that_was_expanded_has_a_digest():
    """As a timestep of a batch of one, which pipelines expand."""
    assert tensor_digest(torch.tensor(3.0).expand(1)) == tensor_digest(torch.tensor([3.0]))
    assert tensor_digest(torch.tensor(3.0).expand(2)) == tensor_digest(torch.tensor([3.0, 3.0]))

"""Bytes of the backward pass by strategy, counted on the mesh and worked out from shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ditmesh
from ditmesh.layout.conventions import Size
from support.gradients import fresh, loss_of
from support.models import tiny
from support.traffic import FLOAT, expected_bytes, split

SIZE = Size(4, 4, 6, batch=2)
HEADS, DIM = 8, 8


def sent(name: str, config: dict[str, Any], checkpointing: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """On a rank: bytes by axis of a forward that keeps what its backward pass needs, and of that."""
    model = copy.deepcopy(tiny(name))
    if checkpointing:
        model.enable_gradient_checkpointing()
    with ditmesh.parallelized(model, {**config, "inputs": "trust"}):
        traffic = ditmesh.engine_of(model).mesh.traffic
        arguments = fresh(name, SIZE, torch.float32)
        traffic.reset()
        loss = loss_of(model.train(), arguments)
        there = dict(traffic.bytes_sent)
        traffic.reset()
        loss.backward()
        return there, dict(traffic.bytes_sent)


def calls_of_attention(model: nn.Module) -> int:
    return sum(hasattr(one, "processor") for one in model.modules())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("axis", ["ulysses", "ring"])
def test_backward_sends_what_its_form_says(ranks, axis: str, checkpointing: bool):
    """SD3 on two ranks: exchanges of heads go back; keys travel again, with their gradients once more around.

    A recomputed block repeats its exchanges. The gradients of a gathered output are added up over ranks: each rank
    sends those of the other's tokens.
    """
    for rank, (forward, backward) in enumerate(ranks(2).run(sent, "SD3", {axis: 2}, checkpointing)):
        wanted = expected_bytes("SD3", {axis: 2}, SIZE, rank)
        assert forward == wanted
        again = wanted[axis] if checkpointing else 0
        if axis == "ulysses":
            # Gradients of queries, keys, values and outputs take the opposite way; all halves are alike here.
            assert backward[axis] - again == wanted[axis]
        else:
            # One hop for keys and values, as before, and two for their gradients.
            assert backward[axis] - again == 3 * wanted[axis]
        image = split(SIZE.image, 2)
        assert backward["sequence"] == SIZE.batch * image[1 - rank] * 16 * FLOAT, (backward, wanted)


def test_tensor_ranks_add_up_gradients_of_inputs(ranks):
    """One sum behind every pair of linears forward, and one of their inputs' gradients backward."""
    for forward, backward in ranks(2).run(sent, "SD3", {"tensor": 2}):
        assert forward.keys() == backward.keys() == {"tensor"}
        print(forward, backward)
        assert backward["tensor"] > 0


def test_data_ranks_send_nothing_in_the_passes(ranks):
    for forward, backward in ranks(2).run(sent, "SD3", {"data": 2}):
        assert not backward.get("ulysses")
        print(forward, backward)

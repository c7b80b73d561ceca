"""Bytes of the backward pass by strategy, counted on the mesh and worked out from shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ditmesh
from ditmesh.layout.conventions import Size
from ditmesh.strategies.tensor.slices import Site, plan
from support.gradients import fresh, loss_of
from support.models import tiny
from support.traffic import FLOAT, expected_bytes, split

SIZE = Size(4, 4, 6, batch=2)


def sent(name: str, config: dict[str, Any], checkpointing: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """On a rank: bytes by axis of a forward that keeps what its backward pass needs, and of that."""
    model = copy.deepcopy(tiny(name))
    if checkpointing:
        model.enable_gradient_checkpointing()
    with ditmesh.parallelized(model, {"inputs": "trust", **config}):
        traffic = ditmesh.engine_of(model).mesh.traffic
        arguments = fresh(name, SIZE, torch.float32)
        traffic.reset()
        loss = loss_of(model.train(), arguments)
        there = dict(traffic.bytes_sent)
        traffic.reset()
        loss.backward()
        return there, dict(traffic.bytes_sent)


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


def sums(name: str) -> tuple[int, int]:
    """Bytes that two tensor ranks send each, from the shapes that the unmodified model's layers have."""
    model = copy.deepcopy(tiny(name))
    made, there, back = plan(model, 2), [], []
    for site in made.sites:
        assert site.kind != "norm"

        def note(_: nn.Module, given: tuple[Tensor, ...], output: Tensor, site: Site = site) -> None:
            # Of two ranks each sends as much as the sum is large; of gathered features its half.
            there.append({"row": output.nbytes, "gathered": output.nbytes // 2}.get(site.kind, 0))
            # What enters weights that are cut by column gets a part of its gradient from each rank.
            back.append(0 if site.kind == "row" else given[0].nbytes)

        model.get_submodule(site.path).register_forward_hook(note)
    loss_of(model, fresh(name, SIZE, torch.float32))
    between = sum(model.get_parameter(path).nbytes for path in made.between)
    return sum(there), sum(back) + between


@pytest.mark.parametrize("name", ["SD3", "PixArt"])
def test_tensor_ranks_add_up_gradients_of_inputs(ranks, name: str):
    forward, backward = sums(name)
    assert 0 < forward < backward
    for found in ranks(2).run(sent, name, {"tensor": 2}):
        assert found == ({"tensor": forward}, {"tensor": backward})


def test_data_ranks_send_nothing_in_the_passes(ranks):
    for forward, backward in ranks(2).run(sent, "SD3", {"data": 2, "inputs": "per-data-rank"}):
        assert not any(forward.values())
        assert not any(backward.values())

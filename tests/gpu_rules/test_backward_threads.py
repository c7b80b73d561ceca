"""Backward in another thread than forward, as autograd runs that of GPUs: gradients are the same bits."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

import ditmesh
from ditmesh.train import reduce_gradients
from support.gradients import collected, fresh, loss_of
from support.models import sizes, tiny


def both_ways(name: str, config: dict[str, Any], again: bool) -> list[str]:
    """Parameters and inputs whose gradients differ between the two ways; and how many were compared."""
    model, found = copy.deepcopy(tiny(name)), []
    if again:
        model.enable_gradient_checkpointing()
    with ditmesh.parallelized(model, {**config, "shared_memory": False}):
        for threaded in (False, True):
            model.zero_grad(set_to_none=True)
            arguments = fresh(name, sizes(name)["B=2 ragged"], torch.float32)
            loss = loss_of(model, arguments)
            errors: list[BaseException] = []

            def backward(loss: torch.Tensor = loss, errors: list[BaseException] = errors) -> None:
                try:
                    loss.backward()
                except BaseException as error:
                    errors.append(error)

            if threaded:
                # Context variables start empty there.
                thread = threading.Thread(target=backward)
                thread.start()
                thread.join()
            else:
                backward()
            if errors:
                raise errors[0]
            reduce_gradients(model, ditmesh.engine_of(model).mesh)
            found.append(collected(model, arguments))
    one, other = found
    assert len(one) > 20
    return [key for key in one.keys() | other.keys() if not torch.equal(one[key], other[key])]


CONFIGS = [{"ring": 2}, {"ulysses": 2}, {"tensor": 2}, {"ulysses": 2, "reproducible": True}]


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gradients_are_those_of_one_thread(ranks, config, again):
    for differing in ranks(2).run(both_ways, "DiT" if "reproducible" in config else "Flux", config, again):
        assert differing == []

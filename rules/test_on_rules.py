"""Strategies on links that are held to NCCL's rules: no rule is broken, and images have the bits that gloo gives.

`make test-rules` runs the other tests of several ranks so.
"""

from __future__ import annotations

import pytest
import torch

from rules import images
from support.faults import STRATEGIES, world_of
from support.gradients import trained


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if world_of(name) in (2, 4)])
def test_images_have_the_bits_of_gloo(ranks, strategy):
    pool = ranks(world_of(strategy))
    (carrier, truth), *_ = pool.run(images.image, strategy, "gloo")
    assert carrier == "gloo"
    for mode in ("eager", "lazy"):
        for carrier, drawn in pool.run(images.image, strategy, mode):
            assert carrier == "rules"
            assert torch.equal(drawn, truth), mode


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        # What is received holds NaN until it is there.
        ("wait", "not finite"),
        ("freed", "freed in flight: the buffer of send"),
    ],
    ids=["wait", "freed"],
)
def test_a_planted_fault_in_flight_is_found(ranks, fault, words):
    for said in ranks(2).run(images.in_flight, fault):
        assert words in said, said


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.matrix), "lazy"])
def test_training_steps_of_fsdp2(ranks, mode):
    """torch's own collectives among ours: gathers in place, reduce-scatters, gathers of distributed tensors."""
    for error, name in ranks(2).run(images.by_rules, mode, trained, "Flux", {"ulysses": 2}, "FSDP2", True):
        assert error <= 1e-4, name

"""A model that is not whole refuses its calls."""

from __future__ import annotations

import weakref

import pytest
from torch import nn

from ditmesh.core.patching import refuse_calls


class Held:
    """What a call had in its hands."""


def test_a_refusal_holds_nothing_of_the_call_that_failed():
    model, seen = nn.Linear(2, 2), []

    def fail() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise RuntimeError("a rank is gone")

    try:
        fail()
    except RuntimeError as error:
        undo = refuse_calls(model, error)
    assert seen[0]() is None
    with pytest.raises(RuntimeError, match="a rank is gone"):
        model(None)
    undo()

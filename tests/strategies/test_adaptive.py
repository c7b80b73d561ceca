"""The adaptive policy with a number of synchronous steps at most."""

from __future__ import annotations

import pytest

from ditmesh.staleness.policy import Outlook, PastStep, parse
from ditmesh.staleness.schedule import even_levels


def synchronous(policy: str, drifts: list[float], devices: int = 4) -> list[int]:
    """The synchronous ones of as many steps as there are drifts."""
    outlook, past = Outlook(devices, even_levels(len(drifts))), []
    for step, drift in enumerate(drifts):
        decision = parse(policy).decide(step, outlook, past)
        past.append(PastStep(decision.synchronous, drift if step else None))
    return [step for step, before in enumerate(past) if before.synchronous]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 12])
def test_never_more_than_so_many(most):
    """A budget that nothing fits in is cut off by the number; the steps are spent, all of them."""
    steps = synchronous(f"adaptive(0.0001, {most})", [0.2] * 12)
    assert len(steps) == most
    assert steps[0] == 0


def test_so_many_steps_go_where_errors_are_largest():
    """They are the steps that a budget of the same number would choose, and those of the largest predicted errors."""
    steps = synchronous("adaptive(0.0001, 4)", [0.2] * 12)
    past = [PastStep(step == 0, 0.2 if step else None) for step in range(12)]
    outlook = Outlook(4, even_levels(12))
    predicted = [parse("adaptive(9)").decide(step, outlook, past[:step]).predicted or 0.0 for step in range(12)]
    worst = sorted(range(1, 12), key=lambda step: -predicted[step])[:3]
    assert set(steps) == {0, *worst}
    # Not those of a fixed warm-up.
    assert steps != [0, 1, 2, 3]


def test_a_budget_that_is_kept_needs_no_number():
    drifts = [0.2] * 12
    assert synchronous("adaptive(0.04, 11)", drifts) == synchronous("adaptive(0.04)", drifts)
    assert len(synchronous("adaptive(0.04, 2)", drifts)) == 2 < len(synchronous("adaptive(0.04)", drifts))
    assert synchronous("adaptive(9, 5)", drifts) == [0]

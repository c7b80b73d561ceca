"""How a call of all ranks ends, decided without a process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ditmesh.errors import RankFailed
from ditmesh.launch.collect import CAUSE_SECONDS, Collector
from ditmesh.launch.failures import Failure

CAUSE = Failure(1, 0, "raised ValueError: enough")
CONSEQUENCE = Failure(0, 2, "raised RuntimeError: gloo: closed by peer")
DEAD = Failure(1, 0, "was killed by SIGKILL", gone=True)


def place(ranks: Sequence[int]) -> dict[int, str]:
    return dict.fromkeys(ranks, "in wait")


def failed(collector: Collector, rejoins: bool | None = True) -> RankFailed:
    rejoin = None if rejoins is None else lambda: bool(rejoins)
    with pytest.raises(RankFailed) as caught:
        collector.result(place, rejoin)
    return caught.value


def test_answers_come_in_rank_order_and_end_the_call() -> None:
    collector = Collector(2)
    assert collector.tick(5.0) > 1e9
    collector.take(1, "answer", "b")
    collector.take(0, "answer", "a")
    assert collector.tick(6.0) == 0
    assert collector.result(place, None) == ["a", "b"]


def test_a_deadline_names_the_silent_ranks_and_where_they_are() -> None:
    collector = Collector(3, 4.0, "joined")
    collector.take(0, "answer", None)
    assert [collector.tick(now) for now in (10.0, 13.0, 14.0)] == [4.0, 1.0, 0]
    error = failed(collector)
    assert str(error).startswith("ranks 1, 2 of 3 had not joined within 4 s\n\nrank 1 was here: in wait")
    assert error.lost == (1, 2)
    assert not error.pool_open


def test_what_is_watched_for_ends_the_call_unless_a_rank_has_failed() -> None:
    said: list[str | None] = [None, "drawn anything"]
    collector = Collector(2, watch=lambda: said.pop(0))
    assert collector.tick(0.0) > 1e9
    assert collector.tick(1.0) == 0
    assert str(failed(collector)).startswith("ranks 0, 1 of 2 had not drawn anything")
    unasked = Collector(2, watch=lambda: pytest.fail("asked"))
    unasked.take(1, "failure", CAUSE)
    assert unasked.tick(0.0) == CAUSE_SECONDS


def test_a_dead_rank_ends_the_call_at_once() -> None:
    collector = Collector(3)
    collector.take(1, "failure", DEAD)
    assert collector.tick(0.0) == 0
    error = failed(collector)
    assert (error.rank, error.lost, error.pool_open) == (1, (1,), False)


def test_a_cause_that_shows_up_within_the_grace_comes_before_its_consequence() -> None:
    collector = Collector(2)
    collector.take(0, "failure", CONSEQUENCE)
    assert collector.tick(7.0) == CAUSE_SECONDS
    assert collector.tick(8.0) == CAUSE_SECONDS - 1
    collector.take(1, "failure", CAUSE)
    assert collector.tick(8.5) == 0
    error = failed(collector)
    assert error.rank == 1
    assert not error.pool_open


def test_a_rank_that_others_waited_for_in_vain_comes_first() -> None:
    collector = Collector(2, grace=lambda failures: 30.0)
    collector.take(0, "failure", CONSEQUENCE)
    assert collector.tick(0.0) == 30
    assert collector.tick(30.0) == 0
    error = failed(collector)
    assert str(error).startswith("rank 1 of 2 stalled")
    assert error.lost == (1,)


@pytest.mark.parametrize(("rejoins", "stays"), [(True, True), (False, False), (None, False)])
def test_ranks_stay_where_all_have_ended_the_call_and_join_again(rejoins: bool | None, stays: bool) -> None:
    collector = Collector(2)
    collector.take(0, "answer", None)
    collector.take(1, "failure", CAUSE)
    assert collector.tick(0.0) == 0
    assert failed(collector, rejoins).pool_open is stays


def test_what_all_raise_alike_needs_no_new_group() -> None:
    collector = Collector(2)
    for rank in range(2):
        collector.take(rank, "failure", Failure(rank, 0, CAUSE.what))
    with pytest.raises(RankFailed) as caught:
        collector.result(place, lambda: pytest.fail("joined"))
    assert caught.value.pool_open

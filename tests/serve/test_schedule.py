"""The scheduler's decisions, without ranks: deadlines, widths, batches, fairness; and a simulation of whole traces."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from benchmarks.serving_simulation import World, adaptive, fixed, trace

from ditmesh.serve.schedule.core import BURST, Run, Scheduler, Task, forecast
from ditmesh.serve.schedule.costs import AFTER, ALONE, BEFORE, Kind, Mode, StepCosts, modes_of, sizes_of

SMALL, LARGE = Kind("m", 64, 64), Kind("m", 256, 256)


def costs(small: float = 0.01, large: float = 0.1, speedup: float = 0.9, row: float = 1.0) -> StepCosts:
    """Measured: a call takes as long on n ranks as ``1 / (n * speedup)`` of it; each further row ``row`` of it."""
    found = StepCosts()
    for kind, seconds in ((SMALL, small), (LARGE, large)):
        for _ in range(3):
            for ranks in (1, 2, 4, 8):
                for mode in {Mode(1, ranks), Mode(2, ranks // 2) if ranks > 1 else ALONE}:
                    found.add(kind, mode, 1, seconds / (ranks * speedup if ranks > 1 else 1))
            for rows in range(2, 9):
                found.add(kind, ALONE, rows, seconds * (1 + row * (rows - 1)))
    return found


def task(id: str, kind: Kind = SMALL, steps: int = 10, **more: Any) -> Task:
    return Task(**{"id": id, "kind": kind, "steps": steps, "begun": True, "total": steps, "form": kind, **more})


def scheduler(ranks: int) -> Scheduler:
    return Scheduler(ranks, {"m": modes_of(ranks, 8, True)})


def where(runs: list[Run]) -> dict[str, list[int]]:
    return {id: list(run.ranks) for run in runs for id in run.tasks}


def test_a_request_by_itself_gets_the_mode_that_is_fastest():
    (run,) = scheduler(4).decide(costs(), 0.0, [task("a", LARGE)])
    assert run.mode.ranks == 4
    # Where several ranks are slower, one makes the calls.
    (run,) = scheduler(4).decide(costs(speedup=0.2), 0.0, [task("a", LARGE)])
    assert run.mode == ALONE


def test_as_many_requests_as_ranks_run_on_one_rank_each():
    runs = scheduler(4).decide(costs(), 0.0, [task(str(n), LARGE) for n in range(4)])
    assert sorted(rank for ranks in where(runs).values() for rank in ranks) == [0, 1, 2, 3]
    assert {run.mode for run in runs} == {ALONE}


def test_a_deadline_that_one_rank_misses_gets_the_fewest_ranks_that_meet_it():
    patient = [task(f"p{n}", LARGE) for n in range(4)]
    # Alone it takes 1 s, on two ranks 0.56 s.
    urgent = task("u", LARGE, deadline=0.7)
    found = where(scheduler(4).decide(costs(), 0.0, [*patient, urgent]))
    assert len(found["u"]) == 2
    assert len(found) == 3


@pytest.mark.parametrize(("deadline", "ranks"), [(1.05, 1), (1.01, 2), (0.6, 2), (0.57, 4)])
def test_a_deadline_that_leaves_no_margin_gets_more_ranks(deadline: float, ranks: int):
    # Alone it takes 1 s, on two ranks 0.556 s: less than 3 % before the deadline is not enough.
    chosen, _ = Scheduler(4, {"m": modes_of(4, 8, True)}).in_time(
        costs(), 0.0, [task("u", LARGE, deadline=deadline, begun=True)]
    )
    assert [mode.ranks for _, mode in chosen] == [ranks]


def test_what_has_no_margin_on_any_number_of_ranks_gets_those_that_end_first():
    four = 1.0 / (4 * 0.9)
    for deadline in (1.01 * four, 0.97 * four):
        ((_, mode),), ends = scheduler(4).in_time(costs(), 0.0, [task("u", LARGE, deadline=deadline)])
        assert mode.ranks == 4
        assert ends["u"] == pytest.approx(four)
    # More than what is known of costs is not given away.
    assert scheduler(4).in_time(costs(), 0.0, [task("u", LARGE, deadline=0.9 * four)])[0] == []


def test_a_small_urgent_request_passes_large_ones_at_their_next_call():
    large = [task(f"l{n}", LARGE, steps=100, arrived=0.0) for n in range(2)]
    runs = scheduler(2).decide(costs(), 5.0, [*large, task("s", SMALL, arrived=5.0, deadline=5.15)])
    assert "s" in where(runs)


def test_where_not_all_can_be_in_time_the_longest_is_left_out():
    tasks = [task("long", LARGE, steps=10, deadline=1.05)]
    tasks += [task(f"s{n}", SMALL, steps=10, deadline=1.1) for n in range(5)]
    chosen, ends = Scheduler(1).in_time(costs(), 0.0, tasks)
    assert {one.id for one, _ in chosen} == {f"s{n}" for n in range(5)}
    assert max(ends.values()) <= 1.1


def test_a_request_that_cannot_be_in_time_anyway_takes_nothing_from_those_that_can():
    hopeless = task("h", LARGE, steps=100, deadline=0.2)
    (run,) = Scheduler(1).decide(costs(), 0.0, [hopeless, task("s", SMALL, deadline=0.2)])
    assert run.tasks == ("s",)


def test_what_is_almost_done_is_not_given_up_for_a_little_too_late():
    """Seconds of calls vary by more than that, and what was done would be lost."""
    begun = task("b", SMALL, steps=10, deadline=0.095)
    fresh = task("f", SMALL, steps=10, deadline=0.095, begun=False)
    for one, kept in ((begun, True), (fresh, False), (replace(begun, deadline=0.08), False)):
        chosen, _ = Scheduler(1).in_time(costs(), 0.0, [one])
        assert bool(chosen) is kept, one


def test_like_requests_run_together_where_that_saves_time_and_not_where_it_makes_one_late():
    tasks = [task(str(n)) for n in range(4)]
    (run,) = Scheduler(1).decide(costs(row=0.2), 0.0, tasks)
    assert len(run.tasks) == 4
    (run,) = Scheduler(1).decide(costs(row=1.0), 0.0, tasks)
    assert len(run.tasks) == 1
    tight = [task("0", deadline=0.115), *tasks[1:]]
    (run,) = Scheduler(1).decide(costs(row=0.5), 0.0, tight)
    assert run.tasks == ("0",)


def test_requests_that_have_not_begun_share_the_calls_of_one_that_has():
    fresh = [task(f"f{n}", steps=10, begun=False, narrow=True, arrived=float(n)) for n in range(2)]
    (run,) = Scheduler(1).decide(costs(row=0.2), 5.0, [task("b", steps=5), *fresh])
    assert set(run.tasks) == {"b", "f0", "f1"}
    # The autoencoder's call is not shared, and holds up those that join.
    (run,) = Scheduler(1).decide(costs(row=0.2), 5.0, [task("b", steps=0, narrow=True), *fresh])
    assert run.tasks == ("b",)


def test_late_requests_share_calls_where_many_wait():
    known = costs(large=0.03, row=0.5)

    def sharing(late: int, *others: Task) -> int:
        hopeless = [task(f"h{n}", deadline=-0.5, arrived=-1.0) for n in range(late)]
        (run,) = Scheduler(1).decide(known, 0.0, [*hopeless, *others])
        return len(run.tasks)

    # Three for a rank; then a call of them may be longer than a quarter of a request, which is 0.025 s.
    assert [sharing(late) for late in (1, 2, 3, 4, 9)] == [1, 1, 3, 4, 8]
    # They join what is due, unless something else that is due waits for the rank.
    due = [task("d0", deadline=0.5), task("d1", LARGE, deadline=1.5)]
    assert sharing(9, due[0]) > 1
    assert sharing(9, *due) == 1


def test_a_batch_takes_one_rank_and_another_request_the_other_one():
    known = costs(row=0.2)
    batch, other = [task("a"), task("b")], task("l", LARGE)
    one = scheduler(2)
    runs = one.decide(known, 0.0, [*batch, other])
    assert sorted(sorted(run.tasks) for run in runs) == [["a", "b"], ["l"]]
    (shared,) = (run for run in runs if len(run.tasks) == 2)
    # While it runs, its second request does not keep the other rank from a third one.
    (run,) = one.decide(known, 0.0, [*batch, other], [shared])
    assert run.tasks == ("l",)
    # It is not ended for what would be the same batch, but for one that is larger.
    assert one.recall(known, 0.0, [*batch, other], [shared], (0,)) == []
    fresh = task("c", begun=False, narrow=True)
    assert one.recall(known, 0.0, [*batch, other, fresh], [shared], (0,)) == [0]


def test_no_rank_is_idle_for_the_sake_of_a_batch():
    runs = Scheduler(2).decide(costs(row=0.2), 0.0, [task(str(n)) for n in range(8)])
    assert [len(run.tasks) for run in runs] == [4, 4]
    runs = Scheduler(2).decide(costs(row=0.2), 0.0, [task(str(n)) for n in range(2)])
    assert [len(run.tasks) for run in runs] == [1, 1]


def test_of_requests_that_missed_their_deadlines_the_oldest_goes_first():
    late = [task("l", LARGE, deadline=1.0, arrived=0.0), task("s", SMALL, deadline=2.0, arrived=1.0)]
    assert [one.id for one, _ in Scheduler(1).order(costs(), 5.0, late)] == ["l", "s"]
    # Without deadlines a short one has waited for more times its own seconds.
    patient = [replace(one, deadline=None) for one in late]
    assert [one.id for one, _ in Scheduler(1).order(costs(), 5.0, patient)] == ["s", "l"]


def test_an_old_late_request_does_not_take_the_place_of_another_owner():
    one = Scheduler(1)
    one.charge("greedy", 2 * BURST)
    old = task("old", deadline=1.0, arrived=0.0, owner="greedy")
    late = [old, task("new", deadline=2.0, arrived=1.0, owner="modest")]
    assert [first.id for first, _ in one.order(costs(), 4.0, late)] == ["new", "old"]


def test_a_run_without_an_end_is_recalled_for_what_should_have_its_rank():
    one, found = scheduler(2), costs(speedup=0.4)
    large = [task(f"l{n}", LARGE, steps=100, arrived=0.0) for n in range(2)]
    running = one.decide(found, 0.0, large)
    assert all(run.open for run in running)
    # Nothing else is to be done, so nothing ends.
    assert one.recall(found, 5.0, large, running, (0, 1)) == []
    due = [*large, task("s", SMALL, arrived=5.0, deadline=5.15)]
    assert len(one.recall(found, 5.0, due, running, (0, 1))) == 1
    # A run that ends by itself is none that can be recalled.
    assert one.recall(found, 5.0, due, running, ()) == []


def test_a_run_is_recalled_where_its_request_should_have_more_ranks():
    one = scheduler(2)
    first, second = task("a", LARGE, steps=100), task("b", LARGE, steps=1)
    running = one.decide(costs(), 0.0, [first, second])
    assert {run.mode for run in running} == {ALONE}
    left = [run for run in running if run.tasks == ("a",)]
    assert one.recall(costs(), 1.0, [first], left, (0,)) == [0]
    # Two ranks that are hardly faster than one are not worth it.
    assert one.recall(costs(speedup=0.55), 1.0, [first], left, (0,)) == []


@pytest.mark.parametrize(("times", "ranks"), [(1.10, 1), (1.20, 2)])
def test_more_ranks_have_to_make_a_request_clearly_faster(times: float, ranks: int):
    (run,) = scheduler(2).decide(costs(speedup=times / 2), 0.0, [task("a", LARGE)])
    assert run.mode.ranks == ranks


def test_owners_share_the_ranks_whatever_their_deadlines():
    one = Scheduler(1)
    one.charge("greedy", 2 * BURST)
    greedy = [task(f"g{n}", deadline=0.2, owner="greedy") for n in range(5)]
    (run,) = one.decide(costs(), 0.0, [*greedy, task("m", owner="modest")])
    assert run.tasks == ("m",)


def test_priorities_order_the_requests_of_one_owner_alone():
    one = Scheduler(1)
    tasks = [task("a1", owner="a"), task("a2", owner="a", priority=5), task("b", owner="b", priority=10)]
    first = [id.id for id, _ in one.order(costs(), 0.0, tasks)]
    assert first.index("a2") < first.index("a1")
    assert first[0] != "b"


def test_nobody_waits_for_ever():
    """A stream of small urgent requests on one rank, and one that is patient."""
    one, known = Scheduler(1), costs()
    now, served = 0.0, 0
    patient = task("p", SMALL, steps=5, arrived=0.0)
    while patient.steps and now < 60:
        urgent = [task(f"u{now}", SMALL, arrived=now, deadline=now + 0.12)]
        (run,) = one.decide(known, now, [patient, *urgent])
        if "p" in run.tasks:
            patient = Task(**{**patient.__dict__, "steps": patient.steps - 1})
            served += 1
        now += 0.1
    assert served == 5


def test_ranks_that_are_kept_for_a_wide_call_do_short_ones_meanwhile():
    one = scheduler(2)
    running = [Run(0, ALONE, ("r",), 0, 1.0)]
    wide = task("w", LARGE, deadline=0.9)
    tasks = [task("r", LARGE, steps=1), wide, task("s", SMALL, steps=50)]
    runs = one.decide(costs(), 0.0, tasks, running, [0.3, 0.0])
    assert where(runs) in ({"s": [1]}, {"w": [1]}, {"r": [1]})


@pytest.mark.parametrize("wait", [0.05, 0.3])
def test_what_is_due_begins_on_a_free_rank_before_a_wide_call_takes_it(wait):
    """Of four ranks two are at a call; two requests come, of which the patient one would be faster on both others."""
    known, running = costs(), [Run(2, Mode(1, 2), ("r",), 1, wait)]
    for mode in [Mode(1, 2), Mode(2, 1), Mode(1, 4), Mode(2, 2)] * 7:
        known.add(SMALL, mode, 1, 0.02)
    tasks = [task("r", LARGE, arrived=0.0), task("w", LARGE, arrived=-9.0), task("s", SMALL, deadline=0.13)]
    found = where(scheduler(4).decide(known, 0.0, tasks, running, [0.0, 0.0, wait, wait]))
    assert found["s"] in ([0], [1])
    # With the small one gone, the patient one has both.
    assert where(scheduler(4).decide(known, 0.0, tasks[:2], running, [0.0, 0.0, wait, wait]))["w"] == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8, 12])
def test_runs_never_overlap_and_blocks_are_aligned(ranks):
    draw = random.Random(ranks)
    one, known = scheduler(ranks), costs()
    tasks = {
        str(n): task(str(n), draw.choice([SMALL, LARGE]), draw.randint(1, 9), narrow=draw.random() < 0.2)
        for n in range(20)
    }
    running: list[tuple[float, Run]] = []
    now = 0.0
    for _ in range(300):
        free = [max((end for end, run in running if rank in run.ranks), default=now) for rank in range(ranks)]
        runs = one.decide(known, now, list(tasks.values()), [run for _, run in running], free)
        busy = {rank for _, run in running for rank in run.ranks}
        at_work = {id for _, run in running for id in run.tasks}
        for run in runs:
            assert 0 <= run.first <= ranks - run.mode.ranks
            assert run.first % run.mode.ranks == 0
            assert not busy.intersection(run.ranks)
            assert not at_work.intersection(run.tasks)
            assert run.mode == ALONE or not any(tasks[id].narrow for id in run.tasks)
            busy.update(run.ranks)
            at_work.update(run.tasks)
            running.append((now + draw.uniform(0.5, 1.5) * run.seconds, run))
        assert runs or running or not tasks
        if not running:
            break
        now = min(end for end, _ in running)
        for _, run in [item for item in running if item[0] <= now]:
            for id in run.tasks:
                left = tasks[id].steps - 1
                if left < 0:
                    del tasks[id]
                else:
                    tasks[id] = Task(**{**tasks[id].__dict__, "steps": left, "narrow": False})
        running = [item for item in running if item[0] > now]
    assert not tasks


def test_a_forecast_counts_what_is_accepted_and_its_deadlines():
    one, known = scheduler(2), costs()
    alone = forecast(one, known, 0.0, [], [task("w", LARGE)])
    assert alone.alone == pytest.approx(0.1 * 10 / 1.8, rel=0.01)
    assert alone.alone <= alone.seconds <= 1.1 * alone.alone
    accepted = [task(f"a{n}", LARGE, deadline=2.1) for n in range(4)]
    later = forecast(one, known, 0.0, accepted, [task("w", LARGE)])
    # The accepted ones take both ranks for 2 s, so that it has to wait for them.
    assert 2.0 < later.seconds < 3.2
    # Patient ones are no hindrance.
    patient = [task(f"p{n}", LARGE) for n in range(4)]
    assert forecast(one, known, 0.0, patient, [task("w", LARGE)]).seconds == alone.seconds


def test_costs_are_guessed_from_what_is_near_and_learnt():
    found = StepCosts(prior=lambda kind: 1.0 if kind == LARGE else None)
    assert found.call(LARGE) == 1.0
    for _ in range(3):
        found.add(SMALL, ALONE, 1, 0.01)
    assert found.call(LARGE) == pytest.approx(0.01 * 16)
    for seconds in (5.0, 0.2, 0.2):
        found.add(LARGE, ALONE, 1, seconds)
    # The first call of a kind, which is slow, is not what counts.
    assert found.call(LARGE) == 0.2
    assert found.call(LARGE, Mode(1, 2)) < 0.2
    found.add_part(SMALL, BEFORE, 0.5)
    assert found.part(LARGE, BEFORE) == 0.5
    other = StepCosts()
    other.take(found.table())
    assert other.call(LARGE) == found.call(LARGE)


def test_sizes_of_blocks_divide_one_another():
    assert sizes_of(8) == [1, 2, 4, 8]
    assert sizes_of(6) == [1, 2, 6]
    assert sizes_of(7) == [1, 7]
    for ranks in range(1, 65):
        sizes = sizes_of(ranks)
        assert all(large % small == 0 for small, large in pairwise(sizes))
        assert all(mode.ranks in sizes for mode in modes_of(ranks, 4, True))


def world() -> World:
    seconds = {SMALL: 0.02, LARGE: 0.2}

    def call(kind: Kind, mode: Mode, together: int) -> float:
        return seconds[kind] * together / (mode.ranks**0.85) + 0.003

    return World(call, lambda kind, which: 0.02 if which == BEFORE else seconds[kind] if which == AFTER else 0.0)


@pytest.mark.parametrize("bursts", [1, 6])
def test_more_requests_are_in_time_than_with_every_fixed_configuration(bursts):
    """Simulated, on 8 ranks at 0.8 of their capacity."""
    kinds = [(6.0, SMALL, 20), (2.0, LARGE, 20)]
    wishes = trace(kinds, 0.8, 8, 160, world(), seed=1, bursts=bursts)
    own = adaptive(wishes, world(), scheduler(8))
    others = [fixed(wishes, world(), 8, mode, most) for mode in modes_of(8, 8, True) for most in (1, 8)]
    assert own.met >= max(one.met for one in others)
    assert own.throughput >= 0.95 * max(one.throughput for one in others)
    assert own.wide > 0.01

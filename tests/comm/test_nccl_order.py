"""The order of operations on every rank, by NCCL's rules: recorded on gloo, replayed with NCCL's queues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_rules.program import Collective, Compute, Half, HostWait, PointToPoint, Program, Wait
from nccl_rules.record import run_alone, run_recorded
from nccl_rules.replay import RULES, replay
from support.pipelines import arguments, draw, flux, sd3

# Lost to queues, at most, of a request's time.
LOST = 1.05


def request_of(name: str, config: dict[str, Any], steps: int, layers: int | None = None, side: int = 64) -> Program:
    """The program of one request on this rank; 16 pixels of the image's sides are one token's."""
    from support.models import variant

    def make() -> Any:
        pipe = {"sd3": sd3, "flux": flux}[name]()
        if layers is not None:
            pipe.register_modules(transformer=variant("Flux", num_layers=layers // 2, num_single_layers=layers // 2))
        return pipe

    def call(pipe: Any) -> None:
        more = {"true_cfg_scale": 1.0} if name == "flux" and config.get("cfg", 1) == 1 else {}
        draw(pipe, arguments(name, [1], steps=steps, height=side, width=side, **more))

    return run_recorded(make, config, call, tokens=(side // 16) ** 2)


# --- what the replay finds in programs that are written down


def message(source: int, target: int, count: int = 4, numbers: tuple[int, int] = (1, 1)) -> tuple[Any, Any]:
    """The two sides of an unbatched message on the group ``g``."""
    return (
        PointToPoint(numbers[0], "g", (Half("send", target, count, "float32"),), False),
        PointToPoint(numbers[1], "g", (Half("recv", source, count, "float32"),), False),
    )


def test_a_message_takes_its_time_and_a_queue_costs_what_stands_in_it():
    send, receive = message(0, 1)
    programs: list[Program] = [[Compute(1.0), send], [receive, Wait(1), Compute(1.0)]]
    for rule in RULES:
        outcome = replay(programs, rule, message=0.5)
        assert (outcome.findings, outcome.deadlock, outcome.seconds) == ([], [], 2.5)
    # A second message the other way does not depend on the first, but stands behind it in the group's queue.
    other, taken = message(1, 0, numbers=(2, 2))
    programs = [[Compute(1.0), send, taken, Wait(2), Compute(1.0)], [receive, other]]
    assert replay(programs, "eager", message=0.5).seconds == 3.0
    assert replay(programs, "ideal", message=0.5).seconds == 2.5


def test_planted_faults_are_named():
    send, receive = message(0, 1)
    longer, _ = message(0, 1, 8, (2, 2))
    _, taken = message(0, 1, 8, (2, 2))
    assert "4 float32, and 8 float32 are received" in replay([[send, longer], [taken, receive]], "eager").findings[0]
    assert "rank 0 sends 1 messages to rank 1, which receives 0" in replay([[send], []], "eager").findings[0]
    odd = PointToPoint(1, "g", (Half("send", 1, 4, "int16", contiguous=False),), False)
    findings = replay([[odd], [PointToPoint(1, "g", (Half("recv", 0, 4, "int16"),), False)]], "eager").findings
    assert any("does not carry int16" in one for one in findings)
    assert any("not contiguous" in one for one in findings)
    reduce = Collective(1, "g", (0, 1), "all_reduce", (4, "float32"))
    assert "collectives by rank {0: 1, 1: 0}" in replay([[reduce], []], "eager").findings[0]
    gather = Collective(1, "g", (0, 1), "broadcast", (4, "float32", 0))
    assert "collective 0 is all_reduce" in replay([[reduce], [gather]], "eager").findings[0]
    objects = Collective(1, "g", (0, 1), "all_gather_object", (), objects=True)
    assert "pickles objects over NCCL" in replay([[objects], [objects]], "eager", nccl_alone=True).findings[0]
    assert replay([[objects], [objects]], "eager").findings == []
    assert "collectives by rank" in replay([[objects], []], "eager").findings[0]
    uneven = [Collective(1, "g", (0, 1), "all_to_all", (), sizes=((0, n), (n, 0))) for n in (3, 4)]
    assert "expects" in replay([[one] for one in uneven], "eager").findings[0]


def test_two_ranks_that_wait_for_one_another_are_a_cycle():
    """Each receives before it sends, in one queue: it ends only where each direction has a queue of its own."""
    send, taken = message(0, 1, numbers=(2, 1))
    back, receive = message(1, 0, numbers=(2, 1))
    programs: list[Program] = [[receive, send], [taken, back]]
    assert replay(programs, "ideal").deadlock == []
    for rule in ("eager", "lazy"):
        outcome = replay(programs, rule)
        assert outcome.seconds == float("inf")
        assert outcome.deadlock


def test_a_host_that_waits_keeps_a_lazy_pair_from_being_connected():
    """The last stage looks at its device before its first message back, and the first stage has asked for that one."""
    send, receive = message(0, 1)
    back, expected = message(1, 0, numbers=(2, 2))
    back = PointToPoint(2, "back", back.halves, False)
    expected = PointToPoint(2, "back", expected.halves, False)
    programs: list[Program] = [
        [expected, Compute(1.0), send, Wait(2)],
        [receive, Wait(1), Compute(1.0), HostWait(), back],
    ]
    assert replay(programs, "eager").deadlock == []
    assert replay(programs, "lazy").deadlock


# --- real programs


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("sd3", {"ulysses": 2}),
    ("sd3", {"ulysses": 2, "chunks": 2}),
    ("sd3", {"ring": 2}),
    ("sd3", {"tensor": 2}),
    ("sd3", {"cfg": 2}),
    ("sd3", {"data": 2}),
    ("sd3", {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}),
    ("sd3", {"ulysses": 2, "shard": 2}),
    ("sd3", {"ring": 2, "reproducible": True}),
    ("flux", {"cfg": 2}),
    ("sd3", {"ulysses": 2, "ring": 2}),
    ("sd3", {"cfg": 2, "ulysses": 2}),
    ("sd3", {"tensor": 2, "ulysses": 2}),
    ("sd3", {"ring": 4, "exchange": "displaced", "warmup": "fixed(1)"}),
]


def identity(case: Any) -> str:
    return "-".join(f"{name}={value}" for name, value in case.items()) if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(*one, marks=[pytest.mark.matrix] * (number % 2)) for number, one in enumerate(CONFIGS)],
    ids=identity,
)
def test_every_operation_has_its_match_and_no_order_waits_for_ever(ranks, name, config):
    from ditmesh import ParallelConfig

    programs = ranks(ParallelConfig(**config).world_size).run(request_of, name, config, 3)
    assert all(any(isinstance(entry, (PointToPoint, Collective)) for entry in program) for program in programs)
    for rule in RULES:
        outcome = replay(programs, rule)
        assert (outcome.findings, outcome.deadlock) == ([], [])


STALE = {"exchange": "displaced", "warmup": "fixed(1)"}
# Of whole worlds, one rank after the other.
WORLDS: list[dict[str, Any]] = [
    {"ulysses": 8},
    {"ring": 8},
    {"tensor": 8},
    {"ulysses": 4, "ring": 2},
    {"ulysses": 2, "ring": 4},
    {"cfg": 2, "ulysses": 4},
    {"cfg": 2, "ring": 4},
    {"cfg": 2, "tensor": 4},
    {"cfg": 2, "ulysses": 2, "ring": 2},
    {"cfg": 2, "tensor": 2, "ulysses": 2},
    {"data": 2, "ulysses": 4},
    {"data": 2, "tensor": 2, "ring": 2},
    {"tensor": 2, "ulysses": 4},
    {"tensor": 4, "ring": 2},
    {"ring": 8, **STALE},
    {"cfg": 2, "ring": 4, **STALE},
    {"data": 2, "ring": 4, **STALE},
    {"tensor": 2, "ring": 4, **STALE},
    {"ulysses": 8, "shard": 8},
    {"ulysses": 4, "ring": 2, "shard": 4},
    {"cfg": 2, "ulysses": 4, "shard": 4},
]
CLASSES = ("SD3", "Flux", "Wan", "Mochi", "PixArt")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(name, config, marks=() if (row + 2 * column) % 10 == 0 else pytest.mark.matrix)
        for row, config in enumerate(WORLDS)
        for column, name in enumerate(CLASSES)
    ],
    ids=identity,
)
def test_whole_worlds_of_eight(name, config):
    from ditmesh import ParallelConfig

    programs = [run_alone(name, config, rank) for rank in range(ParallelConfig(**config).world_size)]
    assert all(any(isinstance(entry, (PointToPoint, Collective)) for entry in program) for program in programs)
    outcomes = {rule: replay(programs, rule) for rule in RULES}
    for outcome in outcomes.values():
        assert (outcome.findings, outcome.deadlock) == ([], [])
        assert outcome.seconds <= LOST * outcomes["ideal"].seconds


def test_faults_planted_in_a_real_program_are_found():
    config = {"tensor": 2, "ring": 2}
    programs = [run_alone("SD3", config, rank) for rank in range(4)]
    assert replay(programs, "eager").findings == []
    sums = [place for place, entry in enumerate(programs[3]) if isinstance(entry, Collective)]
    number = programs[3][sums[1]].number
    without = [*programs[:3], [entry for entry in programs[3] if getattr(entry, "number", None) != number]]
    assert any("collectives by rank" in one for one in replay(without, "eager").findings)
    # Wait for what was never posted.
    del without[3][:]
    without[3] += [entry for place, entry in enumerate(programs[3]) if place != sums[1]]
    assert replay(without, "eager").deadlock
    # A message that is longer than the other rank expects.
    moves = [place for place, entry in enumerate(programs[2]) if isinstance(entry, PointToPoint)]
    longer = list(programs[2])
    halves = longer[moves[0]].halves
    longer[moves[0]] = replace(longer[moves[0]], halves=(replace(halves[0], count=halves[0].count + 1), *halves[1:]))
    assert any("are received" in one for one in replay([*programs[:2], longer, programs[3]], "eager").findings)
    # Two sums of unlike size, the other way round on one rank.
    unlike = [place for place in sums if programs[3][place].kind == "all_reduce"]
    one = next(place for place in unlike if programs[3][place].agreed != programs[3][unlike[-1]].agreed)
    swapped = list(programs[3])
    swapped[one], swapped[unlike[-1]] = swapped[unlike[-1]], swapped[one]
    assert any("is all_reduce" in one for one in replay([*programs[:3], swapped], "eager").findings)


@pytest.mark.parametrize(
    ("stages", "patches"),
    [
        (2, 4),
        pytest.param(3, 3, marks=pytest.mark.matrix),
        (4, 4),
        pytest.param(4, 8, marks=pytest.mark.matrix),
        pytest.param(8, 8, marks=pytest.mark.matrix),
    ],
)
def test_pipefusion_loses_nothing_to_queues(ranks, stages, patches):
    """Unbatched messages of a group share one queue: a receive posted too early keeps this stage's sends back."""
    config = {"pipe": stages, "patches": patches, "warmup": "fixed(1)"}
    # About as many image tokens for one of text as FLUX has at 1024 x 1024: text makes the first patch longer.
    programs = ranks(stages).run(request_of, "flux", config, 8, 24 if stages != 8 else 16, 160)
    ideal = replay(programs, "ideal")
    assert (ideal.findings, ideal.deadlock) == ([], [])
    eager = replay(programs, "eager")
    assert (eager.findings, eager.deadlock) == ([], [])
    assert eager.seconds <= LOST * ideal.seconds

"""Recorded programs under NCCL's queues: what would not match, what would wait for ever, and how long a request takes.

Each rank has a host, one compute stream, and a queue for every communicator. Operations are matched as NCCL matches
them: the halves of point-to-point messages by communicator, sender and receiver in order, without tags; collectives by
their place in the communicator's sequence. The result is a graph of merged operations; a cycle is a deadlock, the
longest path the time of the request.

Rules (torch's ``ProcessGroupNCCL``):

* ``eager``: the default group is bound to a device. All operations of a group share one queue; unbatched
  point-to-point operations are serialised with them.
* ``lazy``: it is not. Every pair of ranks has a communicator of its own for unbatched operations, made at their first
  one, for which both hosts wait.
* ``ideal``: a queue for every pair and direction, and one for collectives. What is slower under another rule is lost
  to queues alone.

Pickled objects go over the gloo half of a group ``cpu:gloo,cuda:nccl``: hosts meet, and no queue has to do with it. A
group that has NCCL alone moves them through the device, which is a finding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .program import Collective, Compute, HostWait, PointToPoint, Program, Wait

Rule = Literal["eager", "lazy", "ideal"]
RULES: tuple[Rule, ...] = ("eager", "lazy", "ideal")
# What NCCL carries.
DTYPES = {"float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "uint32", "uint64"}
# (rank, number) of an operation.
Place = tuple[int, int]
Node = Hashable


@dataclass
class Outcome:
    """What a replay finds.

    Attributes:
        findings: a sentence for every operation that NCCL would refuse, mismatch or never complete.
        seconds: of the longest path, in units of cost; infinite with a deadlock.
        deadlock: the operations of a cycle, or nothing.
    """

    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    deadlock: list[str] = field(default_factory=list)


class _Merge:
    """Operations that are one, because NCCL completes them together."""

    def __init__(self) -> None:
        self._above: dict[Place, Place] = {}

    def find(self, place: Place) -> Place:
        above = self._above.setdefault(place, place)
        while above != self._above[above]:
            self._above[above] = self._above[self._above[above]]
            above = self._above[above]
        return above

    def join(self, one: Place, other: Place) -> None:
        self._above[self.find(one)] = self.find(other)


def replay(programs: Sequence[Program], rule: Rule, message: float = 0.02, nccl_alone: bool = False) -> Outcome:
    """Replay the programs of all ranks by a rule; see the module.

    Args:
        programs: by rank.
        rule: of the queues.
        message: cost of every operation between ranks, in the units of `Compute.cost`.
        nccl_alone: groups have no gloo half.
    """
    outcome, merge = Outcome(), _Merge()
    _match_messages(programs, merge, outcome)
    _match_collectives(programs, merge, outcome, nccl_alone)
    edges, costs = _graph(programs, rule, merge, message)
    _longest(edges, costs, outcome)
    return outcome


def _match_messages(programs: Sequence[Program], merge: _Merge, outcome: Outcome) -> None:
    sides: dict[tuple[str, int, int], dict[str, list[tuple[Place, int, str]]]] = defaultdict(
        lambda: {"send": [], "recv": []}
    )
    for rank, program in enumerate(programs):
        for entry in program:
            if isinstance(entry, PointToPoint):
                for half in entry.halves:
                    ends = (rank, half.peer) if half.direction == "send" else (half.peer, rank)
                    sides[(entry.group, *ends)][half.direction].append(((rank, entry.number), half.count, half.dtype))
                    where = f"rank {rank}, {entry.group}: {half.direction} of {half.count} {half.dtype}"
                    if half.dtype not in DTYPES:
                        outcome.findings.append(f"{where}: NCCL does not carry {half.dtype}")
                    if not half.contiguous:
                        outcome.findings.append(f"{where}: the buffer is not contiguous")
                    if half.peer == rank:
                        outcome.findings.append(f"{where}: a rank sends to itself")
    for (group, source, target), found in sides.items():
        sent, received = found["send"], found["recv"]
        if len(sent) != len(received):
            outcome.findings.append(
                f"{group}: rank {source} sends {len(sent)} messages to rank {target}, which receives {len(received)}"
            )
        for number, (one, other) in enumerate(zip(sent, received, strict=False)):
            if one[1:] != other[1:]:
                outcome.findings.append(
                    f"{group}: message {number} from rank {source} to rank {target} has {one[1]} {one[2]}, and "
                    f"{other[1]} {other[2]} are received"
                )
            merge.join(one[0], other[0])


def _match_collectives(programs: Sequence[Program], merge: _Merge, outcome: Outcome, nccl_alone: bool) -> None:
    by_group: dict[str, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    members: dict[str, tuple[int, ...]] = {}
    for rank, program in enumerate(programs):
        for entry in program:
            if isinstance(entry, Collective):
                by_group[_sequence(entry)][rank].append(entry)
                members[_sequence(entry)] = entry.ranks
                if entry.objects and nccl_alone:
                    outcome.findings.append(f"rank {rank}, {entry.group}: {entry.kind} pickles objects over NCCL")
    for group, by_rank in by_group.items():
        ranks = members[group]
        counts = {rank: len(by_rank[rank]) for rank in ranks}
        if len(set(counts.values())) > 1:
            outcome.findings.append(f"{group}: collectives by rank {counts}")
        for place in range(min(counts.values())):
            same = [by_rank[rank][place] for rank in ranks]
            if len({(one.kind, one.agreed) for one in same}) > 1:
                outcome.findings.append(
                    f"{group}: collective {place} is {', '.join(f'{one.kind}{one.agreed}' for one in same)}"
                )
            for sender, one in enumerate(same):
                for receiver, other in enumerate(same):
                    if one.sizes[0] and other.sizes[1] and one.sizes[0][receiver] != other.sizes[1][sender]:
                        outcome.findings.append(
                            f"{group}: all-to-all {place} sends {one.sizes[0][receiver]} elements from rank "
                            f"{ranks[sender]} to rank {ranks[receiver]}, which expects {other.sizes[1][sender]}"
                        )
            for rank, one in zip(ranks, same, strict=True):
                merge.join((rank, one.number), (ranks[0], same[0].number))


def _sequence(entry: Collective) -> str:
    """The communicator whose order a collective keeps: a group's gloo half has one of its own."""
    return f"{entry.group} (gloo)" if entry.objects else entry.group


def _queue(entry: PointToPoint | Collective, rank: int, rule: Rule) -> Hashable:
    """Which queue of a rank an operation stands in."""
    if isinstance(entry, Collective) or entry.batched or rule == "eager":
        return entry.group
    half = entry.halves[0]
    return (entry.group, half.peer) if rule == "lazy" else (entry.group, half.peer, half.direction)


def _graph(
    programs: Sequence[Program], rule: Rule, merge: _Merge, message: float
) -> tuple[dict[Node, list[Node]], dict[Node, float]]:
    edges: dict[Node, list[Node]] = defaultdict(list)
    costs: dict[Node, float] = {"start": 0.0}
    for rank, program in enumerate(programs):
        # The latest of the host, of the compute stream, and of every queue.
        host: Node = "start"
        stream: list[Node] = ["start"]
        queues: dict[Hashable, Node] = {}
        for place, entry in enumerate(program):
            if isinstance(entry, Wait):
                stream.append(("message", *merge.find((rank, entry.number))))
            elif isinstance(entry, Compute):
                node = ("compute", rank, place)
                costs[node] = entry.cost
                for before in (host, *stream):
                    edges[before].append(node)
                stream = [node]
            elif isinstance(entry, HostWait):
                node = ("host waits", rank, place)
                costs[node] = 0.0
                for before in (host, *stream):
                    edges[before].append(node)
                host = node
            elif isinstance(entry, Collective) and entry.objects:
                node = ("hosts meet", *merge.find((rank, entry.number)))
                costs[node] = 0.0
                edges[host].append(node)
                host = node
            else:
                node = ("message", *merge.find((rank, entry.number)))
                costs[node] = message
                queue = _queue(entry, rank, rule)
                if rule == "lazy" and queue not in queues and isinstance(entry, PointToPoint) and not entry.batched:
                    # Both hosts make the pair's communicator at its first message.
                    peer = entry.halves[0].peer
                    made = ("connects", entry.group, min(rank, peer), max(rank, peer))
                    costs[made] = 0.0
                    edges[host].append(made)
                    host = made
                for before in (host, *stream, *([queues[queue]] if queue in queues else [])):
                    if before != node:
                        edges[before].append(node)
                queues[queue] = node
    return edges, costs


def _longest(edges: dict[Node, list[Node]], costs: dict[Node, float], outcome: Outcome) -> None:
    """The longest path in topological order; nodes that no order reaches lie on or behind a cycle."""
    before: dict[Node, int] = defaultdict(int)
    for following in edges.values():
        for node in following:
            before[node] += 1
    ready = [node for node in costs if not before[node]]
    ends = {node: costs[node] for node in ready}
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        for after in edges[node]:
            ends[after] = max(ends.get(after, 0.0), ends[node] + costs[after])
            before[after] -= 1
            if not before[after]:
                ready.append(after)
    outcome.seconds = max(ends.values())
    if done < len(costs):
        outcome.seconds = float("inf")
        outcome.deadlock = _cycle(edges, {node for node in costs if before[node]})


def _cycle(edges: dict[Node, list[Node]], left: set[Node]) -> list[str]:
    """One cycle among nodes that have something left before them, or what waits for a message that is never posted."""
    backwards: dict[Node, Node] = {}
    for node in left:
        for after in edges[node]:
            if after in left:
                backwards.setdefault(after, node)
    seen: list[Node] = []
    node = next(iter(backwards), next(iter(left)))
    while node in backwards and node not in seen:
        seen.append(node)
        node = backwards[node]
    cycle = seen[seen.index(node) :] if node in seen else [*seen, node]
    return [" ".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in cycle]

"""What travels between hosts: which axes lie across them, and the bytes of a step that do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ...config import AXES, ParallelConfig
from ...errors import ConfigError
from .step import SHARD, Route, Term

# Axes whose ranks exchange something at every layer, and wait for it.
BUSY = ("ulysses", "tensor")


def host_numbers(text: str, world_size: int) -> tuple[int, ...]:
    """For every rank the number of its host, from the number of hosts, ``"2"``, or the ranks of each, ``"3,1"``.

    Raises:
        ConfigError: the ranks cannot be shared out so.
    """
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"hosts {text!r} are no number of hosts; use 2, or the ranks of each such as 3,1")
    counts = [int(word) for word in words]
    if len(counts) == 1:
        if world_size % counts[0]:
            raise ConfigError(
                f"{counts[0]} hosts do not share {world_size} ranks evenly; say how many each has, such as "
                f"{world_size - 1},1"
            )
        counts = [world_size // counts[0]] * counts[0]
    if sum(counts) != world_size:
        raise ConfigError(f"hosts {text} have {sum(counts)} ranks, and the configuration {world_size}; use as many")
    return tuple(host for host, count in enumerate(counts) for _ in range(count))


def across(config: ParallelConfig, hosts: Sequence[int]) -> list[str]:
    """Axes of which a group has ranks on several hosts, the busiest last.

    Args:
        config: degrees of the axes.
        hosts: for every rank the number of its host.
    """
    return [
        axis
        for axis in AXES
        if any(len({hosts[rank] for rank in group}) > 1 for group in config.groups((axis,)) if len(group) > 1)
    ]


def bytes_across(terms: Iterable[Term], config: ParallelConfig, hosts: Sequence[int]) -> dict[str, float]:
    """Bytes of a step that all ranks together send to other hosts, by axis.

    ``"sequence"`` is ring and ulysses at once, ``"shard"`` the ranks that share weights.

    Args:
        terms: of the step, for that configuration.
        config, hosts: as of `across`.
    """
    found: dict[str, float] = defaultdict(float)
    for term in terms:
        if term.route:
            name = term.axes[0] if len(term.axes) == 1 else "sequence"
            for group in config.shard_groups() if name == SHARD else config.groups(term.axes):
                here = [hosts[rank] for rank in group]
                found[name] += term.sent * (
                    _once_to_each(term.route, here)
                    if term.route in ("same to all", "from last")
                    else sum(share for a, b, share in _pairs(term.route, len(here)) if here[a] != here[b])
                )
    return {name: sent for name, sent in found.items() if sent}


def _once_to_each(route: Route, hosts: Sequence[int]) -> float:
    """Share of what a rank sends that all ranks of a group send to other hosts, where each has everything once."""
    senders = 1.0 if route == "from last" else len(hosts) / max(1, len(hosts) - 1)
    return senders * (len(set(hosts)) - 1)


def _pairs(route: Route, size: int) -> Iterator[tuple[int, int, float]]:
    """Places in a group, and the share of what a rank sends that goes from the first to the second."""
    if route == "all":
        yield from ((a, b, 1 / (size - 1)) for a in range(size) for b in range(size) if a != b)
    elif route == "ring":
        yield from ((a, (a + 1) % size, 1.0) for a in range(size))
    elif route == "back":
        yield size - 1, 0, 1.0
    else:
        yield from ((a, a + 1, 1.0 if route == "chain" else 1 / (size - 1)) for a in range(size - 1))

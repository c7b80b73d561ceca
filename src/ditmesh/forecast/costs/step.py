"""A denoising step as a sum of terms: the computation and the waits of the slowest rank.

Strategies say two things of a step, each beside its own code (`ditmesh.strategies.base.Strategy`): ``share``, what
part of the work a rank has, and ``terms``, what it exchanges and keeps. The rest is here, the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from ...config import AXES, ParallelConfig
from .hardware import Collective, Hardware
from .work import AttentionWork, BlockWork, Linear, Pointwise, Work, Workload

# Classes of terms that are fitted to measured steps, each by a factor.
CLASSES = ("linear", "attention", "pointwise", "launch", "transfer")

# Senders and receivers in a group of N ranks, and the bytes between hosts:
#   "all"          each rank, an equal part to each other rank       the parts for ranks of other hosts
#   "same to all"  each rank, the same to all others                 once to each other host
#   "ring"         each rank to the next, the last to the first      where neighbours are on two hosts
#   "from last"    the last rank, the same to all others             once to each other host
#   "chain"        each rank to the next, the last to none           where neighbours are on two hosts
#   "in turn"      as "chain", one after the other: `Term.sent` is the sum over ranks
#   "back"         the last rank to the first                        all of it, if they are on two hosts
Route = Literal["all", "same to all", "ring", "from last", "chain", "in turn", "back"]
ROUTES: dict[Collective, Route] = {
    "all_to_all": "all",
    "all_gather": "same to all",
    "all_reduce": "ring",
    "shift": "ring",
    "broadcast": "from last",
}

# The term of all kernels that a rank's host launches, its own and those of exchanges.
LAUNCHES = "kernel launches"

# Stands for an axis where ranks send one another their parts of weights that would be equal on them.
SHARD = "shard"


@dataclass(frozen=True)
class Term:
    """One line of a prediction.

    Attributes:
        name: what takes the time, or the memory.
        seconds: of a step that nothing hides.
        hidden: seconds that run beside computation.
        meetings: how often ranks wait for the last of them in a step.
        sent: bytes that a rank sends in a step.
        memory: bytes that a rank holds.
        through: name of the link.
        axes: the axes of the ranks that exchange it, or `SHARD`.
        route: from whom to whom; see `Route`.
    """

    name: str
    kind: str
    seconds: float = 0.0
    hidden: float = 0.0
    meetings: float = 0.0
    sent: float = 0.0
    memory: float = 0.0
    through: str = ""
    axes: tuple[str, ...] = ()
    route: Route | Literal[""] = ""


@dataclass(frozen=True)
class Share:
    """The share of a step that one rank computes.

    Attributes:
        rows: samples of a call.
        calls: of the transformer.
        image, text: ranks that share the tokens outside of attention.
        queries, keys: ranks that share them in attention.
        heads: ranks that share the heads, besides those that share weights.
        chunks: kernels that one attention is computed with.
        tensor: ranks that share weights.
        shard: ranks of which each keeps a part of the large weights while their layers do not run.
        pieces: times that a block runs, each on a part of the image's tokens.
        blocks: of every kind, how many run.
        rest: times that what surrounds the blocks runs.
    """

    rows: float
    calls: float
    blocks: tuple[int, ...]
    image: int = 1
    text: int = 1
    queries: int = 1
    keys: int = 1
    heads: int = 1
    chunks: int = 1
    tensor: int = 1
    shard: int = 1
    pieces: int = 1
    rest: int = 1


def launched_ahead(terms: Iterable[Term]) -> list[Term]:
    """The terms of a step on a device with a queue of kernels: launching takes time where the queue runs empty.

    A host is as fast as its launches and a device as all else; the slower one says how long a step takes.
    """
    made = list(terms)
    busy = sum(term.seconds for term in made if term.kind not in ("launch", "request", "memory"))
    for at, term in enumerate(made):
        if term.kind == "launch":
            host = term.seconds + term.hidden
            made[at] = replace(term, seconds=max(0.0, host - busy), hidden=min(host, busy))
    return made


class StepForecast:
    """One step of a request under a configuration.

    Args:
        config: degrees and settings.
        work, workload, hardware: the model's operations, the request, the devices.
        share: a rank's part of the work.
        stale: whether it is one that reuses keys of the step before.
    """

    def __init__(
        self,
        config: ParallelConfig,
        work: Work,
        workload: Workload,
        hardware: Hardware,
        share: Share,
        stale: bool = False,
    ) -> None:
        self.config, self.work, self.workload, self.hardware = config, work, workload, hardware
        self.share, self.stale = share, stale

    @property
    def weights(self) -> float:
        """Bytes of the transformer's weights that a rank keeps, which a search knows without a walk."""
        work, share = self.work, self.share
        shared = work.outside + sum(
            count * (block.parameters - block.sliced + block.sliced / share.tensor) for block, count in self.kinds()
        )
        whole = work.rest.parameters - work.outside + work.buffers
        return (whole + shared / share.shard) * self.workload.element

    def kinds(self) -> Iterator[tuple[BlockWork, int]]:
        """Kinds of blocks that run here, with how often one forward runs each."""
        yield from zip(self.work.blocks, self.share.blocks, strict=True)

    def attentions(self) -> Iterator[tuple[BlockWork, int, AttentionWork]]:
        """Attention over tokens of all sequence ranks, with its block and how often a step makes it."""
        for block, count in self.kinds():
            for one in block.operations:
                if isinstance(one, AttentionWork) and not one.local:
                    yield block, round(count * one.count * self.share.calls), one

    def replicates_text(self, block: BlockWork) -> bool:
        """True if every sequence rank has all text tokens of the block, and its own of the image."""
        return self.share.image > 1 and (block.whole_text or (block.text and self.share.text == 1))

    def size_of(self, one: AttentionWork, queries: int = 1, keys: int = 2, texts: int = 1) -> float:
        """Bytes of so many tensors of all queries, and of all keys, of one attention call, of this rank's heads.

        ``texts``: how often the text's tokens count.
        """
        image, text = self.workload.image, self.workload.text * texts
        tokens = queries * one.queries.of(image, text) + keys * one.keys.of(image, text)
        return tokens * self.share.rows * one.heads * one.width * self.workload.element / self.share.tensor

    def transfer(
        self,
        name: str,
        axes: tuple[str, ...],
        collective: Collective,
        sent: float,
        times: float,
        behind: float = 0.0,
        route: Route | None = None,
    ) -> Term:
        """Transfers between the ranks of neighbouring axes.

        Args:
            axes: the axes of the ranks that take part, or `SHARD`.
            collective: what they call.
            sent: bytes that one rank sends in each call.
            times: calls of a step.
            behind: seconds of computation that each may run beside.
            route: from whom to whom; default: as the collective has it.
        """
        size, stride = self._ranks(axes)
        seconds, share, through = self.hardware.transfer(collective, sent, size, stride)
        seconds *= self.hardware.scale.get("transfer", 1.0)
        hidden = min(seconds * share, behind)
        meetings = times if size > 1 and not behind else 0.0
        return Term(
            name,
            "transfer",
            seconds=times * (seconds - hidden) + meetings * self.hardware.named(through).sync_wait_seconds,
            hidden=times * hidden,
            meetings=meetings,
            sent=times * sent,
            through=through,
            axes=axes,
            route=ROUTES[collective] if route is None else route,
        )

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """How many ranks exchange something along neighbouring axes, and how far apart these are among all ranks."""
        if axes == (SHARD,):
            first, second, *_ = self.config.shard_groups()[0]
            return self.config.shard, second - first
        stride = prod(self.config.degrees[axis] for axis in AXES[AXES.index(axes[-1]) + 1 :])
        return self.config.size_of(axes), stride

    def bundles(self, axes: tuple[str, ...]) -> bool:
        """True if small messages along neighbouring axes travel together: where ranks share no memory of their host."""
        size, stride = self._ranks(axes)
        across = self.hardware.between is not None and size * stride > self.hardware.devices
        return self.hardware.device.ahead or across

    # --- computation ---------------------------------------------------------------------------------------

    @cached_property
    def contention(self) -> float:
        """The factor by which computation takes longer beside that of the other ranks of a host."""
        here, most = min(self.config.world_size, self.hardware.devices), self.hardware.devices
        return 1.0 if most == 1 else 1 + (self.hardware.device.contention_factor - 1) * (here - 1) / (most - 1)

    def compute(self) -> list[Term]:
        """The rank's computation, by class of term."""
        totals: dict[str, float] = dict.fromkeys(("linear", "attention", "pointwise", "launch"), 0.0)
        for block, count in self.kinds():
            self._add(totals, block, count * self.share.calls, self.share.pieces, whole=False)
        self._add(totals, self.work.rest, self.share.rest * self.share.calls, 1, whole=True)
        names = {"linear": "matrix products", "pointwise": "elementwise", "launch": LAUNCHES}
        terms = [
            Term(names.get(kind, kind), kind, seconds * self.contention * self.hardware.scale.get(kind, 1.0))
            for kind, seconds in totals.items()
        ]
        return launched_ahead(terms) if self.hardware.device.ahead else terms

    def attention_seconds(self, one: AttentionWork) -> float:
        """One attention call of this rank, without launches."""
        totals = {"attention": 0.0, "launch": 0.0}
        self._add_attention(totals, one, 1, 1, self.share)
        return totals["attention"] * self.contention * self.hardware.scale.get("attention", 1.0)

    def _add(self, totals: dict[str, float], block: BlockWork, times: float, pieces: int, whole: bool) -> None:
        """Add a kind of blocks that runs so many times; ``whole``: on all tokens."""
        share = Share(self.share.rows, 1, (), tensor=1) if whole else self.share
        for one in block.operations:
            if isinstance(one, AttentionWork):
                self._add_attention(totals, one, times, pieces, share)
            elif isinstance(one, Linear):
                self._add_linear(totals, one, block, times, pieces, share)
            else:
                self._add_pointwise(totals, one, block, times, pieces, share)

    def _tokens(self, block: BlockWork, pieces: int, share: Share) -> tuple[float, float]:
        """Image and text tokens of one run of a block outside of attention."""
        return self.workload.image / share.image / pieces, self.workload.text / (share.text if block.text else 1)

    def _add_linear(
        self, totals: dict[str, float], one: Linear, block: BlockWork, times: float, pieces: int, share: Share
    ) -> None:
        device, cut = self.hardware.device, share.tensor
        image, text = self._tokens(block, pieces, share)
        # Text runs with the first piece of a step only.
        runs = times * one.count * (pieces if one.rows.image or not one.rows.text else 1)
        rows = share.rows * one.rows.of(image, text)
        inputs = one.inputs / (cut if one.cut == "row" else 1)
        outputs = one.outputs / (cut if one.cut in ("column", "gathered") else 1)
        totals["linear"] += runs * 2 * (rows + device.rows) * inputs * (outputs + device.columns) / device.matmul
        totals["launch"] += runs * device.launch

    def _add_attention(
        self, totals: dict[str, float], one: AttentionWork, times: float, pieces: int, share: Share
    ) -> None:
        device = self.hardware.device
        queries = one.queries.of(self.workload.image / pieces, self.workload.text)
        keys = one.keys.of(self.workload.image, self.workload.text)
        heads = one.heads / share.tensor
        if one.local:
            queries /= share.image
        else:
            queries, keys, heads = queries / share.queries, keys / share.keys, heads / share.heads
        runs, chunks = times * one.count * pieces, 1 if one.local else share.chunks
        flops = 4 * share.rows * (queries + device.queries) * keys * heads * one.width
        totals["attention"] += runs * flops / device.attention
        totals["launch"] += runs * chunks * device.launch

    def _add_pointwise(
        self, totals: dict[str, float], one: Pointwise, block: BlockWork, times: float, pieces: int, share: Share
    ) -> None:
        device = self.hardware.device
        image, text = self._tokens(block, pieces, share)
        part = share.rows / (share.tensor if one.sliced else 1)
        totals["pointwise"] += (
            times * pieces * part * one.elements.of(image, text) * self.workload.element / device.bandwidth
        )
        totals["linear"] += times * pieces * part * one.flops.of(image, text) / device.matmul
        totals["launch"] += times * pieces * one.kernels * device.launch

    def pointwise(self, name: str, elements: float, times: float, kernels: int = 1) -> Iterator[Term]:
        """Terms for so many elements that are read or written by so many kernels, each of so many times."""
        seconds = elements * self.workload.element / self.hardware.device.bandwidth
        yield Term(name, "pointwise", times * seconds * self.contention * self.hardware.scale.get("pointwise", 1.0))
        yield self.launches(kernels, times)

    def launches(self, kernels: float, times: float) -> Term:
        """The term of so many kernels beside the model's own, each of so many times."""
        seconds = times * kernels * self.hardware.device.launch
        return Term(LAUNCHES, "launch", seconds * self.contention * self.hardware.scale.get("launch", 1.0))

    def exchanged(self, kernels: float, times: float) -> Iterator[Term]:
        """The term of the kernels of an exchange between GPUs: what packs, carries and takes apart.

        On a CPU they are part of a transfer's measured seconds.
        """
        if self.hardware.device.ahead:
            yield self.launches(kernels, times)

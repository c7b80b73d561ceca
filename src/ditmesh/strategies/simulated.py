"""Sequence strategies for N devices in one process: what N devices would draw, without having them.

Every virtual rank runs the transformer as a coroutine with a handler of its own, the same code that runs on real
ranks. Only the links differ: whoever would send stops, until all virtual ranks have come to the same place, and
gets what the others have sent. The arithmetic, and so every bit, is that of N real ranks of this machine. It
takes N times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Link, Traffic, Transfer
from ..comm.mesh import Mesh
from ..config import AXES, ParallelConfig
from ..core.arguments import Arguments
from ..core.patching import Proceed
from ..errors import ConfigError, LayoutError
from ..layout import Leaf
from ..staleness.control import WarmupControl
from . import token_mixers as leaves
from .base import ParallelModel
from .hooks import BlockSite, Handler, Piece
from .sequence import ExactSequence, SequenceParallel
from .stale.displaced import DisplacedParallel, StaleStrategy
from .stale.naive import NaiveParallel
from .stale.warmup import numbered
from .virtual import ask, run_together

# The virtual rank that the coroutine in progress is.
_rank: ContextVar[int] = ContextVar("ditmesh_virtual_rank")


class VirtualLink(Link):
    """A `Link` between virtual ranks of this process. Bytes are counted as if they were sent."""

    def __init__(self, name: str, rank: int, size: int, traffic: Traffic) -> None:
        super().__init__(name, range(size), rank, traffic)

    def _all_to_all(
        self, kind: str, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """See `Link.all_to_all`."""
        others = [part for peer, parts in enumerate(outgoing) if peer != self.rank for part in parts]
        self.traffic.add(self.name, sum(part.numel() * part.element_size() for part in others))
        everyone: list[Any] = ask(("exchange", outgoing))
        return [
            list(outgoing[self.rank])
            if peer == self.rank
            else [_copy(part).view(shape) for part, shape in zip(sent[self.rank], shapes[peer], strict=True)]
            for peer, sent in enumerate(everyone)
        ]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Link.all_reduce`; added up in rank order."""
        self.traffic.add(self.name, 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size)
        return torch.stack(ask(("all_reduce", tensor))).sum(dim=0)

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Transfer:
        """See `Link.shift`."""
        self.traffic.add(self.name, sum(t.numel() * t.element_size() for t in tensors))
        everyone: list[Any] = ask(("shift", tensors))
        return Transfer([_copy(t) for t in everyone[self.rank - 1]])

    def all_gather_async(self, outgoing: Sequence[Tensor], incoming: Sequence[Sequence[Tensor]]) -> Transfer:
        """See `Link.all_gather_async`. What is sent is there at once: nobody may look before `Transfer.wait`."""
        self.traffic.add(self.name, (self.size - 1) * sum(t.numel() * t.element_size() for t in outgoing))
        # All have posted before anybody goes on, so nobody overwrites what another one has still to take.
        everyone: list[Any] = ask(("post", outgoing))
        received = [_copy(t) for peer, sent in enumerate(everyone) if peer != self.rank for t in sent]
        ask(("taken", None))
        return Transfer(received)


class VirtualMesh(Mesh):
    """A mesh whose sequence ranks are virtual. Whatever else there is, is this process alone.

    Attributes:
        ranks: the mesh as each virtual rank sees it.

    Raises:
        ConfigError: another axis than ring has a degree.
    """

    def __init__(self, config: ParallelConfig, device: torch.device | str = "cpu") -> None:
        other = [axis for axis in AXES if axis != "ring" and config.degrees[axis] > 1]
        if other:
            raise ConfigError(
                f"{config.describe()}: only the ring axis is simulated; leave {' and '.join(other)} out, which does "
                "not change the picture"
            )
        self.ranks = [self._seen_by(rank, config, device) for rank in range(config.ring)]
        first = self.ranks[0]
        super().__init__(config, device, links={"ring": first.ring, "sequence": first.sequence})

    @staticmethod
    def _seen_by(rank: int, config: ParallelConfig, device: torch.device | str) -> Mesh:
        traffic = Traffic()
        links: dict[str, Link] = {name: VirtualLink(name, rank, config.ring, traffic) for name in ("ring", "sequence")}
        return Mesh(config, device, links=links)

    def close(self) -> None:
        """Nothing to give back."""


class SimulatedSequence:
    """Handler of a transformer that stands for one handler per virtual rank.

    Args:
        handlers: one for each virtual rank.
    """

    def __init__(self, handlers: Sequence[SequenceParallel]) -> None:
        self.handlers = list(handlers)
        self.balance = self.handlers[0].balance
        self.passive = False

    def end_request(self) -> None:
        """Forget everything about a request."""
        for handler in self.handlers:
            getattr(handler, "end_request", lambda: None)()

    def begin_call(self) -> None:
        """See `Handler`."""
        for handler in self.handlers:
            handler.begin_call()

    def end_call(self) -> None:
        """See `Handler`."""
        for handler in self.handlers:
            handler.end_call()

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        """See `Handler`."""
        self._mine().before_block(site, arguments)

    def after_block(self, site: BlockSite, output: Any) -> Any:
        """See `Handler`."""
        return self._mine().after_block(site, output)

    def pieces(self, site: BlockSite, output: Any) -> Iterator[Piece]:
        """See `Handler`."""
        return self._mine().pieces(site, output)

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """See `AttentionHandler`."""
        return self._mine().attend(q_bhsd, k_bhsd, v_bhsd, mask, scale)

    def adapt(self, site: BlockSite, leaf: Leaf, module: nn.Module) -> Callable[[], None]:
        """See `Handler`."""
        links = _OwnLink([handler.mesh.sequence for handler in self.handlers])
        return leaves.RULES[leaf.rule](module, links, f"{site.path}: {type(module).__name__}", leaf.processor)

    def wrap(self, site: BlockSite, block: nn.Module) -> Callable[[], None]:
        """See `Handler`. Virtual ranks are equally fast."""
        for handler in self.handlers:
            handler.coverage.watch(site, block)
        return lambda: None

    def _mine(self) -> SequenceParallel:
        return self.handlers[_rank.get()]

    def around_call(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """The transformer's forward, once for every virtual rank. All have the same result; it is the first one's."""

        def run(rank: int) -> Any:
            token = _rank.set(rank)
            try:
                return proceed(*args, **kwargs)
            finally:
                _rank.reset(token)

        return run_together([partial(run, rank) for rank in range(len(self.handlers))], _meet)[0]


class _OwnLink:
    """The link of whichever virtual rank asks."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links

    @property
    def rank(self) -> int:
        """The virtual rank's number."""
        return _rank.get()

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._links)

    def all_gather(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """See `Link.gather`."""
        return self._links[self.rank].all_gather(piece, lengths, dim)

    def all_to_all(
        self, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """See `Link.exchange`."""
        return self._links[self.rank].all_to_all(outgoing, shapes)


class SimulatedExact(ExactSequence):
    """Exact sequence parallelism of virtual ranks."""

    def handler(self, model: ParallelModel) -> Handler:
        """See `TokenStrategy.handler`."""
        return SimulatedSequence([self.kind(self.context.config, view) for view in _views(self.context.mesh)])


class SimulatedStale(StaleStrategy):
    """Stale sequence strategies of virtual ranks."""

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return config.exchange != "exact"

    def handler(self, model: ParallelModel) -> Handler:
        """See `TokenStrategy.handler`."""
        config, control = self.context.config, self.context.get(WarmupControl)
        blocks = numbered(model, control.monitor)
        kind = DisplacedParallel if config.exchange == "displaced" else NaiveParallel
        return SimulatedSequence([kind(config, view, control, blocks) for view in _views(self.context.mesh)])


def _views(mesh: Mesh) -> list[Mesh]:
    assert isinstance(mesh, VirtualMesh)
    return mesh.ranks


def _meet(questions: list[tuple[str, Any]]) -> list[list[Any]]:
    """Everybody gets what everybody has."""
    kinds = {kind for kind, _ in questions}
    if len(kinds) > 1:
        raise LayoutError(f"virtual ranks do different things at one time: {' and '.join(sorted(kinds))}")
    everyone = [what for _, what in questions]
    return [everyone] * len(questions)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)

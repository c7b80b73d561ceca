"""N devices simulated in this process: sequence strategies on virtual ranks.

Every virtual rank runs the transformer as a coroutine with a handler of its own, the same code that runs on real
ranks. Only the links differ: a virtual rank yields at each collective until all have reached it, and
gets the messages of the others. The arithmetic, and so every bit, is that of N real ranks of this machine. It
takes N times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ...comm import Link, Traffic, Transfer
from ...comm.mesh import Mesh
from ...config import AXES, ParallelConfig
from ...core.arguments import Arguments
from ...core.patching import Proceed
from ...engine.engine import Engine
from ...engine.targets import ConfigLike, denoisers, device_of, find_layout, given_layout, refuse_twice, restore
from ...errors import ConfigError, LayoutError
from ...layout import TokenLayout
from ...parts.own_tokens import OwnTokens
from ...parts.part import whole_of
from ...recipe import Recipe
from ...staleness.control import WarmupControl
from ...strategies.base import ParallelModel
from ...strategies.checked import CheckedLayout
from ...strategies.hooks import BlockSite
from ...strategies.sequence import ExactSequence, SequenceParallel
from ...strategies.stale.displaced import DisplacedParallel, NaiveParallel, StaleStrategy
from ...strategies.stale.warmup import StaleSteps, numbered
from ...strategies.tokens import KnownForms
from ...strategies.virtual import ask, run_together

T = TypeVar("T")
# The virtual rank that the coroutine in progress is.
_rank: ContextVar[int] = ContextVar("ditmesh_virtual_rank", default=0)


class VirtualLink(Link):
    """A `Link` between virtual ranks of this process. Bytes are counted as if they were sent, of all ranks."""

    def __init__(self, name: str, size: int, traffic: Traffic) -> None:
        super().__init__(name, range(size), 0, traffic)

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The virtual rank in progress."""
        return _rank.get()

    @rank.setter
    def rank(self, _: int) -> None:
        """Ignored: `Link` sets it."""

    def _count(self, tensors: Sequence[Tensor], times: int = 1) -> None:
        self.traffic.add(self.name, times * sum(tensor.nbytes for tensor in tensors))

    def _all_to_all(
        self, kind: str, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> Callable[[], list[list[Tensor]]]:
        self._count([part for peer, parts in enumerate(outgoing) if peer != self.rank for part in parts])
        everyone: list[Any] = ask(("exchange", outgoing))
        received = [
            list(outgoing[self.rank])
            if peer == self.rank
            else [_copy(part).view(shape) for part, shape in zip(sent[self.rank], shapes[peer], strict=True)]
            for peer, sent in enumerate(everyone)
        ]
        return lambda: received

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Transfer:
        self._count(tensors)
        everyone: list[Any] = ask(("shift", tensors))
        return Transfer([_copy(t) for t in everyone[self.rank - 1]])

    def all_gather_async(self, outgoing: Sequence[Tensor], incoming: Sequence[Sequence[Tensor]]) -> Transfer:
        # A message is there at once; reading it before `Transfer.wait` is an error.
        self._count(outgoing, self.size - 1)
        # All have posted before any of them goes on, so none overwrites what another one has still to take.
        everyone: list[Any] = ask(("post", outgoing))
        received = [_copy(t) for peer, sent in enumerate(everyone) if peer != self.rank for t in sent]
        ask(("taken", None))
        return Transfer(received)


def virtual_mesh(config: ParallelConfig, device: torch.device | str = "cpu") -> Mesh:
    """A mesh with virtual sequence ranks; all its other axes have this process alone.

    Raises:
        ConfigError: another axis than ring has a degree.
    """
    other = [axis for axis in AXES if axis != "ring" and config.degrees[axis] > 1]
    if other:
        raise ConfigError(
            f"{config.describe()}: only the ring axis is simulated; leave {' and '.join(other)} out, which does "
            "not change the image"
        )
    traffic = Traffic()
    links = {name: VirtualLink(name, config.ring, traffic) for name in ("ring", "sequence")}
    return Mesh(config, device, links=links)


class SimulatedSequence:
    """Handler of a transformer that stands for one handler (of ``make``) per virtual rank.

    Inside a transformer's call everything is done by the handler of the virtual rank in progress.
    """

    passive = False

    def __init__(self, make: Callable[[], SequenceParallel], ranks: int) -> None:
        self.handlers = [make() for _ in range(ranks)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handlers[_rank.get()], name)

    def _each(self, method: str) -> None:
        for rank, handler in enumerate(self.handlers):
            copy_context().run(_as_rank, rank, getattr(handler, method))

    def begin_call(self) -> None:
        self._each("begin_call")

    def end_call(self) -> None:
        self._each("end_call")

    def end_request(self) -> None:
        """Forget everything about a request of a stale strategy."""
        self._each("end_request")

    def wrap(self, site: BlockSite, block: nn.Module) -> Callable[[], None]:
        # Virtual ranks are equally fast: nothing is put on the block to time it.
        for handler in self.handlers:
            handler.coverage.watch(site, block)
        return lambda: None

    def around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """The transformer's forward, once for every virtual rank. All have the same result."""

        def forward() -> Any:
            # Ranks meet to gather tokens, which they do inside of their runs only.
            return whole_of(proceed(arguments), OwnTokens)

        return run_together([partial(_as_rank, rank, forward) for rank in range(len(self.handlers))], _meet)[0]


def _as_rank(rank: int, call: Callable[[], Any]) -> Any:
    """Call a function as a virtual rank, in a context of its own."""
    _rank.set(rank)
    return call()


class SimulatedExact(ExactSequence):
    """Exact sequence parallelism of virtual ranks."""

    no_gradient = "virtual ranks take turns inside a block, and torch does not record that"

    def handler(self, model: ParallelModel) -> SequenceParallel:
        config, mesh = self.context.config, self.context.mesh
        return cast(SequenceParallel, SimulatedSequence(lambda: self.kind(config, mesh), config.ring))


class SimulatedStale(StaleStrategy):
    """Stale sequence strategies of virtual ranks."""

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.stale_exchange

    def handler(self, model: ParallelModel) -> SequenceParallel:
        config, mesh, control = self.context.config, self.context.mesh, self.context.get(WarmupControl)
        blocks = numbered(model, control.monitor)
        kind = DisplacedParallel if config.exchange == "displaced" else NaiveParallel
        return cast(SequenceParallel, SimulatedSequence(lambda: kind(config, mesh, control, blocks), config.ring))


def _meet(questions: list[tuple[str, Any]]) -> list[list[Any]]:
    kinds = {kind for kind, _ in questions}
    if len(kinds) > 1:
        raise LayoutError(f"virtual ranks do different things at one time: {' and '.join(sorted(kinds))}")
    everyone = [what for _, what in questions]
    return [everyone] * len(questions)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


# The simulated strategies: token strategies of virtual ranks.
SIMULATION: Recipe = (StaleSteps, SimulatedExact, SimulatedStale, KnownForms, CheckedLayout)


def simulate(target: T, config: ConfigLike, *, layout: TokenLayout | None = None) -> T:
    """Make a pipeline (or a bare transformer) compute the result of ``config`` on virtual ranks in this process.

    Use it to study stale strategies: simulating 8 ranks takes 8 times as long. `restore` undoes it; `engine_of` has
    drift and decisions as for real ranks. diffusers' caches, which keep state in the model, are not supported.

    Args:
        target, layout: as for `parallelize`.
        config: the ``ring`` degree and its exchange; no other axis.

    Raises:
        ConfigError: another axis than ring has a degree, or a setting that the simulation does not support.
        InputError: ``target`` has no transformer, or is parallelised already.
    """
    refuse_twice(target)
    config = ParallelConfig.read(config)
    if config.speeds == "auto":
        raise ConfigError("speeds='auto' is not simulated, as there is nothing to measure; give numbers, such as 2,1")
    if config.reproducible:
        raise ConfigError(f"reproducible={config.reproducible!r} is not simulated; leave it out")
    models = denoisers(target)
    mesh = virtual_mesh(config, device_of(models[0]) or "cpu")
    pairs = [(model, given_layout(layout, model) or find_layout(model)) for model in models]
    Engine(pairs, config, mesh, False, SIMULATION).open(target)
    return target


@contextmanager
def simulated(target: T, config: ConfigLike, **options: Any) -> Iterator[T]:
    """`simulate` within a ``with`` block, with the same options."""
    simulate(target, config, **options)
    try:
        yield target
    finally:
        restore(target)

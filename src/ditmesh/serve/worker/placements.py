"""Ways in which some of the ranks share a call of a model's transformers, beside the rank that makes it alone.

Every way (`schedule.costs.Mode`) has an engine of its own on copies of the transformers that share their weights, and
a mesh with groups that are made once: `N / k` groups of k neighbouring ranks, each with requests of its own. A rank
goes from one to another by calling another copy; nothing is installed, sent or waited for in between.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import torch
from torch import nn

from ...comm import Link, Traffic
from ...comm.mesh import Mesh
from ...config import ParallelConfig
from ...engine import Engine
from ...errors import ConfigError
from ...layout import TokenLayout
from ...recipe import Recipe, check_recipe
from ..schedule.costs import ALONE, Mode, modes_of

Module = TypeVar("Module", bound=nn.Module)

# Attributes of peft's layers that say which adapters are on.
ADAPTERS = ("_active_adapter", "_disable_adapters")


def shared_copy(module: Module) -> Module:
    """A copy of a module with the same parameters and buffers, and hooks and attributes of its own."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo)


def alone_mesh(config: ParallelConfig, device: torch.device, timeout: float) -> Mesh:
    """The mesh of this process by itself, whatever other ranks there are."""
    links = {"alone": Link("alone", [0], 0, Traffic())}
    return Mesh(config, device, timeout, links=links)


def shared_config(config: ParallelConfig, mode: Mode, ranks: int, heads: int) -> ParallelConfig:
    """The configuration of all groups of a mode.

    Args:
        config: of one rank.
        mode: of each group.
        ranks: of all groups.
        heads: of the attention: beyond them tokens are shared as a ring.

    Raises:
        ConfigError: the settings do not go with these degrees.
    """
    ulysses = next(size for size in range(mode.tokens, 0, -1) if mode.tokens % size == 0 and size <= max(1, heads))
    degrees = {
        "data": ranks // mode.ranks,
        "cfg": mode.rows,
        "ulysses": ulysses,
        "ring": mode.tokens // ulysses,
        "inputs": "per-data-rank",
    }
    return ParallelConfig(**config.model_dump() | degrees)


class Placement:
    """One way, on this rank: an engine on copies of the transformers.

    Args:
        copies: by ``id`` of the transformer; of this way alone.
        layouts: by ``id`` of the transformer.
        config: see `shared_config`.
        device, timeout: of its mesh.
        recipe: the strategies.

    Making one is a collective call of all ranks of the pool.
    """

    def __init__(
        self,
        copies: Mapping[int, nn.Module],
        layouts: Mapping[int, TokenLayout],
        config: ParallelConfig,
        device: torch.device,
        timeout: float,
        recipe: Recipe,
    ) -> None:
        self._copies, self._layouts, self.config = copies, layouts, config
        self._device, self._timeout, self._recipe = device, timeout, recipe
        # What its copies have on, as `Placements.way` was told last.
        self.adapters: tuple[Hashable, ...] = ()
        self._open()

    def _open(self) -> None:
        self.mesh = Mesh(self.config, self._device, self._timeout)
        pairs = [(model, self._layouts[key]) for key, model in self._copies.items()]
        self.engine = Engine(pairs, self.config, self.mesh, True, self._recipe)
        self.engine.open(pairs[0][0])
        self._request = ExitStack()
        self._ready = False

    def call(self, component: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call of a transformer by the ranks of this rank's group, which all make it: its result."""
        if not self._ready:
            # No pipeline: every call is a step of its own.
            self._request.enter_context(self.engine.request("calls of a pool"))(None)
            self._ready = True
        self.engine.clock.advance()
        return self._copies[id(component)](*args, **kwargs)

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Have those adapters on that the transformers have."""
        for model in models:
            for one, other in zip(model.modules(), self._copies[id(model)].modules(), strict=False):
                if not hasattr(one, ADAPTERS[0]):
                    continue
                for name in ADAPTERS:
                    if name in vars(one):
                        vars(other)[name] = copy.copy(vars(one)[name])
                if isinstance(scaling := vars(one).get("scaling"), dict):
                    other.scaling = dict(scaling)  # type: ignore[assignment]

    def fail(self, error: BaseException) -> None:
        """Give up the request after a call has failed on any rank of the group; `renew` is next, on all ranks."""
        request, self._ready = self._request.pop_all(), False
        with suppress(Exception):
            request.__exit__(type(error), error, None)

    def renew(self) -> None:
        """Make links and engine again. A collective call of all ranks of the pool."""
        self.fail(RuntimeError("the pool's links are made again"))
        with suppress(Exception):
            self.engine.close()
        self._open()

    def close(self) -> None:
        """Free everything. A collective call of all ranks of the pool."""
        request, self._ready = self._request.pop_all(), False
        with suppress(Exception):
            request.close()
        self.engine.close()


class Placements:
    """All ways of a model on this rank.

    Args:
        models: the transformers, before anything is installed on them: they are copied.
        ranks: of the pool.
        heads: of the attention.
        rows: whether a call may have two rows for guidance, so that ranks can share them.
        widest: most ranks that share a call; 0: all.
    """

    def __init__(self, models: Sequence[nn.Module], ranks: int, heads: int, rows: bool, widest: int = 0) -> None:
        self._models, self._ranks, self._heads = list(models), ranks, heads
        shared = modes_of(ranks, heads, rows, range(1, (widest or ranks) + 1))[1:]
        self._copies = {mode: {id(model): shared_copy(model) for model in models} for mode in shared}
        self.ways: dict[Mode, Placement] = {}

    def open(
        self,
        config: ParallelConfig,
        layouts: Mapping[int, TokenLayout],
        device: torch.device,
        timeout: float,
        recipe: Recipe,
        undo: ExitStack,
    ) -> None:
        """Make the groups and install the engines. A collective call of all ranks of the pool.

        A way that the model or the settings do not allow is left out, on all ranks alike.

        Args:
            config: of one rank.
            layouts: by ``id`` of the transformer.
            device, timeout: of the meshes.
            recipe: the strategies.
            undo: takes what gives the ways back.
        """
        for mode, copies in self._copies.items():
            try:
                chosen = shared_config(config, mode, self._ranks, self._heads)
                check_recipe(recipe, chosen, [(model, layouts[key]) for key, model in copies.items()])
            except ConfigError:
                continue
            way = self.ways[mode] = Placement(copies, layouts, chosen, device, timeout, recipe)
            undo.callback(way.close)
        self._copies.clear()

    @property
    def modes(self) -> list[Mode]:
        """The ways there are, one rank alone first."""
        return [ALONE, *self.ways]

    def way(self, mode: Mode, adapters: Hashable = None) -> Placement:
        """The way of a mode, with those adapters on that the transformers have.

        Args:
            mode: one of `modes`.
            adapters: those, with their scales; while they are what they were, no module is looked at.
        """
        way = self.ways[mode]
        if way.adapters != (adapters,):
            way.follow(self._models)
            way.adapters = (adapters,)
        return way

    def traffic(self) -> dict[str, int]:
        """Bytes that this rank has sent, by axis."""
        sent: dict[str, int] = {}
        for way in self.ways.values():
            for axis, count in way.mesh.traffic.bytes_sent.items():
                sent[axis] = sent.get(axis, 0) + count
        return sent

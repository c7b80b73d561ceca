"""Launchers that are no part of ditmesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ditmesh.launch import RankPool


class KeptRanks:
    """Ranks that stay from one command to the next: those of the fixture ``ranks``."""

    device = "cpu"
    is_reporter = True
    pools: ClassVar[Callable[[int], RankPool]]

    def __init__(
        self, world_size: int, device: str, threads: int | None, timeout: float = 600.0, **options: Any
    ) -> None:
        assert (device, threads) == ("cpu", 1)
        self.world_size, self.threads = world_size, 1
        self._pool = type(self).pools(world_size)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self._pool.run(fn, *args, **kwargs)

    def close(self) -> None:
        pass

    def __enter__(self) -> KeptRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

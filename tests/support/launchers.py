"""Launchers that are no part of ditmesh."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ditmesh.errors import ConfigError, RankFailed
from ditmesh.launch import RankPool


class InThisProcess:
    """One rank: the process that asks for it."""

    device = "cpu"
    is_reporter = True

    def __init__(self, world_size: int, device: str, threads: int | None, timeout: float, **options: Any) -> None:
        import torch
        import torch.distributed as dist

        if world_size != 1:
            raise ConfigError(f"this launcher has one rank, and {world_size} are asked for; use --devices 1")
        self.world_size, self.threads = 1, threads or torch.get_num_threads()
        self._folder = tempfile.TemporaryDirectory()
        meeting = (Path(self._folder.name) / "rendezvous").as_uri()
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        print("one rank, in this process", file=sys.stderr)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline: float | None = None,
        on_message: Callable[[int, Any], None] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        if on_message is not None:
            kwargs["report"] = partial(on_message, 0)
        try:
            return [fn(*args, **kwargs)]
        except Exception as error:
            raise RankFailed(f"rank 0 of 1 raised {error}", 0, pool_open=True) from error

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
        self._folder.cleanup()

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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

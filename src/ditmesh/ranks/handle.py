"""`Ranks`: starts ranks, loads pipelines on them, and runs calls one after the other."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

from ..config import ParallelConfig
from ..engine import ConfigLike
from ..errors import ConfigError, InputError, RankFailed
from ..generate.model_info import find_model
from ..generate.modular import download
from ..launch import RankPool
from ..launch.failures import Failure, rank_failed
from ..launch.messages import encode_call
from .pipeline import RemoteCall, RemotePipeline
from .rank import free, load_named_pipeline, outcome


class Ranks:
    """Ranks of this machine, and the pipelines loaded on them.

    ::

        with ditmesh.Ranks(2) as ranks:
            pipe = ranks.load("emoji-sd3", {"cfg": 2})
            image = pipe("a red fox").images[0]

    A script needs ``if __name__ == "__main__":`` around this, as with `multiprocessing`; a notebook does
    not. Threads may share the object: their calls run one after the other.
    """

    def __init__(
        self,
        devices: int,
        device: str = "auto",
        threads: int | None = None,
        timeout: float = 600.0,
        *,
        import_main: bool = True,
    ) -> None:
        """Start the ranks.

        Args:
            devices: number of ranks, each on its own GPU or sharing the CPU's cores.
            device: see `RankPool`.
            threads: threads of each rank; default: an equal share of the physical cores (at most 8 on GPUs).
            timeout: deadline of every collective, in seconds.
            import_main: ranks import the program's main module, so that its functions can be sent to them. False is for
                applications, where importing the main module would start the application.

        Raises:
            ConfigError: the devices are not there, a number is out of range, or this process is itself a rank.
            RankFailed: a rank could not start.
        """
        self._pool = RankPool(devices, device, threads, timeout, import_main=import_main)
        self._lock = threading.Lock()
        # The thread with the running call.
        self._caller: int | None = None
        # Keys of the loaded pipelines.
        self._loaded: set[str] = set()

    def load(self, model: str | Path, config: ConfigLike = "auto", **options: Any) -> RemotePipeline:
        """Load a pipeline on all ranks and parallelise it. It stays until it or the ranks are closed.

        Args:
            model: folder of a saved pipeline, a hub id, or the name of an embedded model.
            options: more arguments of `ditmesh.load`, such as ``torch_dtype`` or ``variant``.

        Raises:
            ConfigError: the degrees do not fit the ranks or the model.
            InputError: there is no such pipeline, or `ditmesh.load` refuses it.
            RankFailed: a single rank failed; the ranks are closed if other pipelines lose their group by it.
        """
        info = find_model(model)
        folder = info.files.resolve()
        if not info.local:
            # Download once instead of on every rank.
            folder = download(info, options.get("variant"))
        if config != "auto":
            config = ParallelConfig.read(config)
            if config.inputs == "per-data-rank" and config.data > 1:
                raise ConfigError(
                    f"inputs='per-data-rank' is for data={config.data} ranks with prompts of their own, but here all "
                    "have those of one call; leave inputs out"
                )
        options.setdefault("timeout", self._pool.timeout)
        with self._alone():
            # Unique, so that a pipeline of other `Ranks` is not mistaken for one of these.
            key, generation = uuid.uuid4().hex, self._pool.generation
            try:
                # Not as an outcome: ranks that wait for one that has failed are ended soon, and not at the timeout.
                names = self._pool.run(load_named_pipeline, key, str(folder), config, os.getcwd(), options)[0]
            except RankFailed as failed:
                if self._loaded and self._pool.generation != generation:
                    self._pool.close("loading failed on the ranks one by one, which cost other pipelines their groups")
                elif failed.pool_open:
                    self._pool.run(free, key)
                raise_cause(failed)
            self._loaded.add(key)
            return RemotePipeline(self, key, *names)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; where a `RemotePipeline` is passed, it gets the rank's pipeline.

        So ``ranks.run(lambda pipe: pipe.transformer.config.num_layers, pipe)``: lambdas, closures and functions of
        notebook cells are sent by value.

        Returns the result of every rank, in rank order; tensors on the CPU.

        Raises:
            Exception: whatever ``fn`` raises, with a `RankFailed` that holds the rank's traceback as its cause.
            RankFailed: a rank died.
            TypeError: ``fn`` or an argument cannot be pickled.
        """
        with self._alone():
            return self._outcomes(encode_call(fn, args, kwargs, main=self._pool.imports_main))

    @property
    def closed(self) -> bool:
        """True if the ranks have ended: they were closed, or one was lost."""
        return self._pool.closed

    def close(self) -> None:
        """End the ranks, after a running call of another thread. Harmless if they have ended."""
        with self._alone(closing=True):
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"closed: {self._pool.reason}" if self._pool.closed else f"{len(self._loaded)} pipelines"
        return f"Ranks({self._pool.world_size} on {self._pool.device}, {state})"

    @contextlib.contextmanager
    def _alone(self, closing: bool = False) -> Iterator[None]:
        """Hold the lock for one call on open ranks."""
        if self._caller == threading.get_ident():
            raise InputError("these Ranks wait for the callback that uses them; use them after the call has returned")
        with self._lock:
            if self._pool.closed and not closing:
                raise ConfigError(
                    f"these Ranks are closed ({self._pool.reason}); make new ones with ditmesh.Ranks(...)"
                )
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None

    def _outcomes(self, call: bytes, owner: RemoteCall | None = None) -> list[Any]:
        """Results of an encoded call on every rank; see `encode_call`."""
        hear = None if owner is None else owner.hear
        outcomes = self._pool.run(outcome, os.getcwd(), call, on_message=hear)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            # Causes before consequences.
            failed = rank_failed(sorted(failures, key=lambda one: one.weight), {}, len(outcomes), True)
            if owner is not None and owner.error is not None:
                failed.__cause__ = owner.error
            raise_cause(failed)
        if owner is not None and owner.error is not None:
            raise owner.error
        return [pickle.loads(outcome) for outcome in outcomes]


def raise_cause(failed: RankFailed) -> NoReturn:
    """Raise a rank's exception with ``failed`` as its cause; or ``failed`` if it could not be pickled."""
    cause = failed.__cause__
    if cause is None:
        raise failed
    failed.__cause__ = None
    raise cause from (cause.__cause__ or failed)

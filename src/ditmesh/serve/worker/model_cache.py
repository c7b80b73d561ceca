"""The models that the ranks of a replica hold."""

from __future__ import annotations

import gc
from collections.abc import Collection
from contextlib import ExitStack, suppress

import torch

from ...comm import PeerError
from ...comm.backends import device_of_rank
from ...errors import DitmeshError
from ..offers import ModelSpec
from .loaded import LoadedModel
from .protocol import Load, ModelFailed, ModelReady
from .rendezvous import RankRendezvous, failure_of

# Seconds for which a rank that cannot load a model waits for the same error on the other ranks.
LOAD_VOTE_SECONDS = 2.0


class ModelCache:
    """The models of a rank; the least recently used are unloaded first. All ranks hold the same models.

    Attributes:
        models: by name.
        waiting: models that are to be loaded.
        current: the model with an open request.
        clock: number of tasks and rounds so far.
    """

    def __init__(self, ranks: RankRendezvous) -> None:
        self.device = device_of_rank()
        self.models: dict[str, LoadedModel] = {}
        self.waiting: list[Load] = []
        self.current: LoadedModel | None = None
        self.clock = 0
        self._ranks = ranks
        self._used: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        """True if a model is loaded, or about to be."""
        return name in self.models or any(load.spec.name == name for load in self.waiting)

    def last_use(self, name: str) -> int:
        """The time of a model's latest use, by `clock`."""
        return self._used.get(name, 0)

    def switch_to(self, model: LoadedModel | None) -> None:
        """Make a model the current one, and close the open request of another model."""
        if self.current is not None and self.current is not model:
            self.current.batcher.close_request()
        self.current = model
        if model is not None:
            self.clock += 1
            self._used[model.spec.name] = self.clock

    def next_load(self, needed: Collection[str]) -> Load | None:
        """The next model to load, if there is space for it next to the ``needed`` models."""
        load = next(iter(self.waiting), None)
        if load is None or load.spec.name in self.models or len(self.models) < max(1, load.most):
            return load
        return load if self._idle(needed) is not None else None

    def load(self, load: Load, needed: Collection[str]) -> ModelReady | ModelFailed:
        """Load a waiting model, and unload the least recently used models that are not needed. Collective."""
        self.waiting.remove(load)
        spec, unloaded = load.spec, []
        self.switch_to(None)
        if spec.name not in self.models:
            while len(self.models) >= max(1, load.most) and (name := self._idle(needed)) is not None:
                self.models.pop(name).close()
                unloaded.append(name)
            answer = self._loaded(spec)
            if isinstance(answer, str):
                return ModelFailed(spec.name, answer, tuple(unloaded))
            self.models[spec.name] = answer
        self._used[spec.name] = self.clock
        model = self.models[spec.name]
        config = model.engine.config
        mesh = {axis: degree for axis, degree in config.degrees.items() if degree > 1}
        return ModelReady(spec.name, model.card, mesh, config.describe(), tuple(unloaded))

    def close(self) -> None:
        """Unload all models."""
        # Each may need the other ranks, which do not answer after a failure.
        with suppress(Exception):
            for model in self.models.values():
                model.close()
        self.models.clear()
        self.current = None

    def _idle(self, needed: Collection[str]) -> str | None:
        """The least recently used model that is not needed."""
        return min((name for name in self.models if name not in needed), key=self.last_use, default=None)

    def _loaded(self, spec: ModelSpec) -> LoadedModel | str:
        """A loaded model, or the reason why it cannot be loaded, the same on all ranks.

        A rank that fails alone raises: the others may wait for it in the middle of loading, and all are ended at once.
        """
        model: LoadedModel | None = None
        undo = ExitStack()
        ranks = self._ranks
        try:
            model = LoadedModel.open(spec, self.device, ranks.gather, undo)
            every = ranks.vote("")
        except (DitmeshError, MemoryError, torch.OutOfMemoryError) as error:
            if isinstance(error, PeerError):
                raise
            try:
                every = ranks.vote(failure_of(error).message, LOAD_VOTE_SECONDS)
            except TimeoutError:
                raise error from None
        if model is not None and not any(every):
            return model
        if model is not None:
            model.close()
        # Process groups belong to the process: the next attempt would create them again.
        undo.close()
        gc.collect()
        return next(filter(None, every))

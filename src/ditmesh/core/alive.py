"""Bytes of tensors that are alive: what of a computation's memory is tensors, on any device and on none."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Tensors that consist of no others, with values or without.
PLAIN_TENSORS = (Tensor, Parameter, FakeTensor)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while it is entered, until they are given back.

    Works on tensors with values, on the meta device, and on fake tensors. ``held``: tensors that were there before,
    which do not count.

    Attributes:
        now: bytes that are alive.
        peak: the most since `reset`.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        # Storages that do not count, and those that do, by address.
        self._held: set[int] = set()
        self._counted: set[int] = set()
        self.now = self.peak = 0.0
        for tensor in held:
            self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        """Leave a tensor's memory out: another owner counts it."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._held:
            self._held.add(key)
            # Its address may be that of another one later.
            finalize(storage, self._held.discard, key).atexit = False

    def reset(self) -> None:
        """Restart the search for the peak."""
        self.peak = self.now

    def size_of(self, tensor: Tensor) -> float:
        """Bytes that a tensor's storage counts; 0 on the meta device."""
        return 0 if tensor.is_meta else tensor.untyped_storage().nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN_TENSORS for kind in types):
            # A tensor that consists of others: what it does with those is seen.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        return out

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self._held or key in self._counted:
            return
        self._counted.add(key)
        size = self.size_of(tensor)
        self.now += size
        self.peak = max(self.peak, self.now)
        finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: float) -> None:
        if key in self._counted:
            self._counted.discard(key)
            self.now -= size


@contextmanager
def manual_collection() -> Iterator[None]:
    """Collect garbage at the walk's own points only, among the walk's own objects.

    Else what is alive would depend on when Python collects, and most of a walk's time would go into looking at the
    objects of all libraries.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()

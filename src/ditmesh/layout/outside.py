"""Effects of a block besides its results: tensors that it writes to, and tensors that it keeps.

With some of the tokens it would leave something else behind on every rank. Whether a block does is seen while it runs
once as it is: every operation of torch passes a mode that notes which memory came into being, and which was there
before and is written to.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..core.partial_run import written_by
from .record import RecordedBlock, computed
from .types import Stream


class Traces(TorchDispatchMode):
    """Records the memory that a block allocates, and writes to memory that is not that of its arguments ``given``."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self._given = {key for tensor in given if (key := _memory(tensor)) is not None}
        # Memory that came into being, with the dtype of its first tensor.
        self._born: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self.written: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        before = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and (key := _memory(leaf)) is not None and key not in before:
                self._born[key] = (StorageWeakRef(leaf.untyped_storage()), leaf.dtype)
        for leaf in written_by(func, args, kwargs):
            key = _memory(leaf)
            if leaf.is_floating_point() and key is not None and key not in self._given and key not in self._born:
                self.written.append(leaf)
        return output

    def kept(self, returned: Iterable[Tensor]) -> list[Tensor]:
        """Tensors that came into being, still exist, and are not among the block's results."""
        without = {_memory(tensor) for tensor in returned}
        alive = []
        for key, (reference, dtype) in self._born.items():
            if key in without or reference.expired() or not (dtype.is_floating_point or dtype.is_complex):
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes() % dtype.itemsize == 0:
                found = torch.empty(0, dtype=dtype, device=storage.device)
                alive.append(found.set_(storage))  # type: ignore[call-overload]
        return alive


def _memory(tensor: Tensor) -> int | None:
    """A key that tells a tensor's memory from any other; None: it has none of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


class LeftBehind:
    """A block that has run, with the traces of its run, until nothing else holds what it has made.

    ``block`` runs it again, and knows nothing of what it returned; ``suspect``: something was kept when it had run.
    """

    def __init__(
        self, block: RecordedBlock, traces: Traces, output: Any, streams: tuple[Stream, ...], suspect: bool
    ) -> None:
        self.site = block.site
        self._block, self._traces, self._streams, self._suspect = block, traces, streams, suspect
        self._results = tensor_leaves(output)

    def where(self, model: nn.Module) -> str:
        """The places where tensors are kept that depend on the block's tokens, in words; empty: none."""
        if not self._streams or not (self._suspect or self._traces.kept(self._results)):
            return ""
        # Tables that only depend on how many tokens there are may be kept.
        leaves = self._block.leaves
        tokens = {stream.arg: torch.full_like(leaves[stream.arg], torch.nan) for stream in self._streams}
        with Traces(leaf for leaf in leaves.values() if isinstance(leaf, Tensor)) as traces:
            self._block.again(tokens, computed)
        for mixer in self._block.mixers:
            mixer.given = None
        # An object in a circle of references is on its way out.
        gc.collect()
        given = [*leaves.values(), *tokens.values()]
        kept = [tensor for tensor in traces.kept(v for v in given if isinstance(v, Tensor)) if tensor.isnan().any()]
        found = place_of(model, kept, "something outside of the model's modules") if kept else ""
        # The attributes that it keeps are to be as they were.
        self._block.again({}, computed)
        return found


def tensor_leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def place_of(model: nn.Module, tensors: Iterable[Tensor], otherwise: str) -> str:
    """Name of the model's attribute, parameter or buffer that shares memory with one of these tensors."""
    memory = {_memory(tensor) for tensor in tensors}
    for name, module in model.named_modules():
        for attribute, value in [*vars(module).items(), *module._parameters.items(), *module._buffers.items()]:
            leaves = tree_leaves(value) if not attribute.startswith("_") else ()
            if any(isinstance(leaf, Tensor) and _memory(leaf) in memory for leaf in leaves):
                return f"{name}.{attribute}".removeprefix(".")
    return otherwise

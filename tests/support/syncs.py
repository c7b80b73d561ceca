"""Host synchronisations, counted on any device: what would make Python wait if the tensors were on an accelerator."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ditmesh

# The result's size or value depends on what the tensors hold, so the host waits for them.
WAITING = {
    "_local_scalar_dense",  # item(), bool(), int(), float(), and all that consists of them
    "equal",
    "allclose",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "_linalg_check_errors",
}
# With a boolean mask they look for its true elements first.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
COPIES = {"_to_copy", "copy_", "_copy_from", "_copy_from_and_resize"}
# These read memory without an operation where the tensor is on the CPU already.
METHODS = ("tolist", "numpy", "cpu", "__array__")

OURS = Path(ditmesh.__file__).parent
# Used between CPUs of one host only.
CPU_ONLY = OURS / "comm" / "shared.py"
SCHEDULERS = Path(diffusers.__file__).parent / "schedulers"
OWNERS = {OURS: "ditmesh", SCHEDULERS: "scheduler", SCHEDULERS.parent: "diffusers"}
SKIPPED = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), __file__, "<")


@dataclass(frozen=True)
class Sync:
    """One operation that makes the host wait.

    Attributes:
        operation: such as ``equal`` or ``tolist``.
        owner: whose code called it: ``"ditmesh"``, ``"scheduler"``, ``"diffusers"``, ``"cpu"`` (a transport that exists
            on CPUs alone) or ``"other"``. The innermost frame outside torch and the standard library decides.
        place: ``file:line`` of that frame.
        stack: lines of ditmesh that led there, innermost first.
        step: how often `Syncs.mark` had been called before.
    """

    operation: str
    owner: str
    place: str
    stack: tuple[str, ...]
    step: int


@dataclass
class Syncs:
    """What `count_syncs` found, in order."""

    found: list[Sync] = field(default_factory=list)
    marks: int = 0

    def mark(self) -> None:
        """A step is over."""
        self.marks += 1

    def of(self, owner: str = "ditmesh", first: int = 0) -> list[Sync]:
        """Those of an owner in the whole steps from ``first`` on; what came after the last mark does not count."""
        return [one for one in self.found if one.owner == owner and first <= one.step < max(self.marks, 1)]

    def per_step(self, owner: str = "ditmesh", first: int = 0) -> int:
        """The most in any step from ``first`` on."""
        return max(Counter(one.step for one in self.of(owner, first)).values(), default=0)

    def places(self, owner: str = "ditmesh", first: int = 0) -> dict[str, int]:
        """How often each place and operation came, most often first."""
        counts = Counter(f"{one.place} {one.operation}" for one in self.of(owner, first))
        return dict(counts.most_common())

    def add(self, operation: str) -> None:
        owner, place, stack = asked_by()
        self.found.append(Sync(operation, owner, place, stack, self.marks))


def asked_by(through: str = __file__) -> tuple[str, str, tuple[str, ...]]:
    """Owner, place and stack, as of a `Sync`, of the operation that torch dispatches at the moment.

    ``through``: the file of the mode that it is dispatched to.
    """
    frame = sys._getframe(1)
    owner, place, stack = "other", "", []
    while frame is not None:
        name = frame.f_code.co_filename
        found = _owner(name) if name != through else None
        if found is not None:
            if not place:
                owner, place = found[0], f"{found[1]}:{frame.f_lineno}"
            if found[2]:
                stack.append(f"{found[1]}:{frame.f_lineno}")
        frame = frame.f_back
    return owner, place, tuple(stack)


@cache
def _owner(name: str) -> tuple[str, str, bool] | None:
    """Owner of a source file, its name there, and whether it is ditmesh's; None: torch's or the standard library's."""
    if name.startswith(SKIPPED):
        return None
    path = Path(name)
    inside = next((folder for folder in OWNERS if path.is_relative_to(folder)), None)
    owner = "cpu" if path == CPU_ONLY else OWNERS[inside] if inside else "other"
    return owner, str(path.relative_to(inside) if inside else path.name), inside == OURS


class _Watch(TorchDispatchMode):
    def __init__(self, syncs: Syncs) -> None:
        super().__init__()
        self.syncs = syncs
        self.silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass takes the operation apart; its parts come here
        name = func._schema.name.rpartition("::")[2]
        if not self.silent and waits(name, args, kwargs):
            self.syncs.add(name)
        return func(*args, **kwargs)


def waits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the host has to wait for the device in an operation of torch."""
    if name in WAITING:
        return True
    if name in INDEXING:
        masks = [one for one in args[1] if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)]
        return bool(masks)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and any(isinstance(one, Tensor) for one in args[:2])
    if name in COPIES:
        # `copy_` goes from its second tensor to its first, `_to_copy` from its first to a device.
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
        return torch.device(target).type != source.device.type and not _asynchronous(args, kwargs)
    return False


def _asynchronous(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))


@contextmanager
def count_syncs() -> Iterator[Syncs]:
    """Count what would make the host wait for an accelerator in this thread, with the place that asked for it.

    Counted are operations whose result the host needs (`item`, `bool`, `equal`, `nonzero`, boolean masks as indices …),
    `tolist`, `numpy`, `cpu` and ``to("cpu")``, and blocking copies to a device, as in ``torch.tensor(list, device=…)``.
    What the C++ side of an operation does by itself is not seen.
    """
    syncs = Syncs()
    watch = _Watch(syncs)

    def noted(name: str, function: Callable[..., Any], when: Callable[..., bool] = lambda *_, **__: True) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if watch.silent or not when(*args, **kwargs):
                return function(*args, **kwargs)
            syncs.add(name)
            watch.silent = True
            try:
                return function(*args, **kwargs)
            finally:
                watch.silent = False

        return call

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, noted(name, getattr(Tensor, name))))
        stack.enter_context(mock.patch.object(Tensor, "to", noted("to cpu", Tensor.to, _to_cpu)))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, noted(name, getattr(torch, name), _onto_a_device)))
        stack.enter_context(watch)
        yield syncs


def _to_cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether the host is named: a device that happens to be the CPU stands for any device."""
    return "cpu" in (*args[:1], kwargs.get("device")) and not kwargs.get("non_blocking")


def _onto_a_device(data: Any, *args: Any, **kwargs: Any) -> bool:
    return not isinstance(data, Tensor) and kwargs.get("device") not in (None, "cpu")

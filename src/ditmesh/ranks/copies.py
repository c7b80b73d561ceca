"""A module of this process, copied to other processes of the machine, and kept equal to it.

The module is pickled, functions and classes that have no name elsewhere by value; its tensors stand in it by number.
Tensors of the host lie in memory that the other processes share among themselves (`memfd_create`): they hold one copy
together. A GPU's tensor is opened by the others (CUDA IPC) and copied to their own GPU. Later only what has changed is
sent: tensors by their identity and version, attributes by their identity, or by their items where they are lists.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.patching import is_patch
from ..engine.sent import ALIGNMENT, as_bytes, from_bytes
from ..errors import InputError

# Attributes of a module that are not copied: what parallelises it here, and hooks, which are put on and off.
_OURS = ("_ditmesh_engine", "_ditmesh_followed")


class _Place(NamedTuple):
    """A tensor in a message.

    Attributes:
        start: first byte; None: it is opened by ``opened``.
        near: whether it belongs on the rank's device.
        parameter: whether it is an `nn.Parameter`.
        opened: function and arguments that open a GPU's tensor in another process.
    """

    start: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    near: bool
    parameter: bool
    opened: Any


class Parcel(NamedTuple):
    """A pickled object and where its tensors are, for another process of this machine.

    Attributes:
        data: pickled.
        places: of its tensors.
        process, file: where the memory is opened; a path, where there is no such thing.
        size: of the memory, in bytes.
    """

    data: bytes
    places: list[_Place]
    process: int
    file: int | str
    size: int


class _Pickled:
    """An object while it is pickled.

    Args:
        modules: of a copy that the other side has already, by id; they are sent as their number.
        device: type of the device whose tensors belong on the other side's own.
    """

    def __init__(self, modules: dict[int, int], device: str) -> None:
        self._modules, self._device = modules, device
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def dump(self, value: Any) -> bytes:
        import cloudpickle

        outer = self

        class CopyPickler(cloudpickle.Pickler):
            def persistent_id(self, obj: Any) -> Any:
                if type(obj) in (Tensor, nn.Parameter) and obj.layout is torch.strided and not obj.is_meta:
                    return ("tensor", outer._number(obj))
                if isinstance(obj, nn.Module) and id(obj) in outer._modules:
                    return ("module", outer._modules[id(obj)])
                return None

        stream = io.BytesIO()
        CopyPickler(stream).dump(value)
        return stream.getvalue()

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]


class _CopyUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors, self._modules = tensors, modules

    def persistent_load(self, pid: Any) -> Any:
        kind, number = pid
        return self._tensors[number] if kind == "tensor" else self._modules[number]


@contextmanager
def packed(value: Any, device: str, modules: dict[int, int] | None = None) -> Iterator[Parcel]:
    """An object for other processes of this machine, which `unpacked` it within the ``with`` block.

    Args:
        value: anything that can be pickled, modules with all their weights included.
        device: type of the device of the ranks; tensors on one come to be on each rank's own.
        modules: numbers of modules that the others have, by id.

    Raises:
        InputError: it cannot be pickled.
    """
    pickled = _Pickled(modules or {}, device)
    try:
        data = pickled.dump(value)
    except Exception as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"this {type(value).__name__} cannot be copied to other processes ({said})") from error
    places: list[_Place] = []
    size = 0
    for tensor in pickled.tensors:
        near = tensor.device.type == device
        opened = _opened(tensor) if near and device == "cuda" else None
        start = None if opened is not None else size
        known = (tuple(tensor.shape), tensor.dtype, near, isinstance(tensor, nn.Parameter), opened)
        places.append(_Place(start, *known))
        if opened is None:
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    with ExitStack() as files:
        file, number = _memory(size, files)
        if size:
            with mmap.mmap(number, size) as memory:
                whole = torch.frombuffer(memory, dtype=torch.uint8)
                for tensor, place in zip(pickled.tensors, places, strict=True):
                    if place.start is not None:
                        values = as_bytes(tensor)
                        whole[place.start : place.start + values.numel()].copy_(values)
                del whole
        yield Parcel(data, places, os.getpid(), file, size)


def _memory(size: int, files: ExitStack) -> tuple[int | str, int]:
    """Memory that other processes can open: how, and the number of its file here."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("ditmesh-copy", os.MFD_CLOEXEC)
        files.callback(os.close, number)
        found: int | str = number
    else:
        named = files.enter_context(tempfile.NamedTemporaryFile(prefix="ditmesh-copy-"))  # noqa: SIM115
        number, found = named.fileno(), named.name
    os.ftruncate(number, max(1, size))
    return found, number


def _opened(tensor: Tensor) -> Any:
    """How another process opens a GPU's tensor; None where the allocator's memory cannot be opened."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    from torch.multiprocessing.reductions import reduce_tensor

    with suppress(RuntimeError):
        return reduce_tensor(tensor.detach())
    return None


def unpacked(parcel: Parcel, device: torch.device, modules: Sequence[nn.Module] = ()) -> Any:
    """The object of a parcel of another process of this machine.

    Args:
        parcel: of `packed`, whose ``with`` block is not over.
        device: where tensors go that belong on a rank's own.
        modules: that stand in the parcel as numbers.
    """
    whole = torch.empty(0, dtype=torch.uint8)
    if parcel.size:
        path = parcel.file if isinstance(parcel.file, str) else f"/proc/{parcel.process}/fd/{parcel.file}"
        number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            # A private view: what is written to stays here, and the rest is shared among all that have opened it.
            whole = torch.frombuffer(mmap.mmap(number, parcel.size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        finally:
            os.close(number)
    tensors = []
    for place in parcel.places:
        if place.start is None:
            rebuild, args = place.opened
            tensor = rebuild(*args).to(device, copy=True)
        else:
            end = place.start + _bytes(place)
            tensor = from_bytes(whole[place.start : end], place.shape, place.dtype)
            tensor = tensor.to(device) if place.near else tensor
        tensors.append(nn.Parameter(tensor, requires_grad=False) if place.parameter else tensor)
    return _CopyUnpickler(parcel.data, tensors, modules).load()


def _bytes(place: _Place) -> int:
    count = place.dtype.itemsize
    for length in place.shape:
        count *= length
    return count


class ModuleChange(NamedTuple):
    """What is different in one module of a copy: tensors and attributes by name, and the names that are gone."""

    module: int
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    attributes: dict[str, Any]
    gone: tuple[str, ...]


class _Seen(NamedTuple):
    """A module as the copies have it."""

    parameters: dict[str, Any]
    buffers: dict[str, Any]
    attributes: dict[str, Any]


class CopiedModule:
    """The side of a copied module's own process.

    Args:
        module: it is copied as it is now, before anything is put on it that is to stay here.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._order = list(module.modules())
        self.numbers = {id(one): number for number, one in enumerate(self._order)}
        self._seen: list[_Seen] = []
        self.note()

    def note(self) -> None:
        """The copies are as the module is now."""
        self._seen = [_seen(one) for one in self._order]

    @property
    def same_modules(self) -> bool:
        """Whether it still consists of the modules that were copied."""
        order = list(self.module.modules())
        return len(order) == len(self._order) and all(a is b for a, b in zip(order, self._order, strict=True))

    def changes(self, rewritten: Collection[str] = ()) -> list[ModuleChange]:
        """What the module has that the copies do not.

        Args:
            rewritten: names of parameters that may have been written to where nothing shows it: in inference mode torch
                counts no versions.
        """
        wanted: dict[int, set[str]] = {}
        for name in rewritten:
            path, _, own = name.rpartition(".")
            with suppress(AttributeError):
                wanted.setdefault(id(self.module.get_submodule(path)), set()).add(own)
        found = []
        for number, (one, seen) in enumerate(zip(self._order, self._seen, strict=True)):
            more = wanted.get(id(one), ())
            state = vars(one)
            parameters = _different(state["_parameters"], seen.parameters, more)
            buffers = _different(state["_buffers"], seen.buffers, more)
            now = _attributes(one)
            changed = {n: v for n, v in now.items() if n not in seen.attributes or not _is(v, seen.attributes[n])}
            gone = tuple(n for n in seen.attributes if n not in now)
            if parameters or buffers or changed or gone:
                found.append(ModuleChange(number, parameters, buffers, changed, gone))
        return found


def applied(module: nn.Module, changes: Sequence[ModuleChange]) -> None:
    """Make a copy what the module has become."""
    order = list(module.modules())
    for change in changes:
        one = order[change.module]
        vars(one)["_parameters"].update(change.parameters)
        vars(one)["_buffers"].update(change.buffers)
        vars(one).update(change.attributes)
        for name in change.gone:
            vars(one).pop(name, None)


def _seen(one: nn.Module) -> _Seen:
    state = vars(one)
    return _Seen(
        {name: _tensor(value) for name, value in state["_parameters"].items()},
        {name: _tensor(value) for name, value in state["_buffers"].items()},
        {name: _held(value) for name, value in _attributes(one).items()},
    )


def _attributes(one: nn.Module) -> dict[str, Any]:
    """A module's own attributes, without those of torch and ours."""
    return {
        name: value
        for name, value in vars(one).items()
        if name not in _TORCH
        and name not in _OURS
        and not is_patch(value)
        and not name.startswith(("_forward_", "_backward_"))
    }


# What every module has.
_TORCH = frozenset(vars(nn.Module()))


def _tensor(value: Tensor | None) -> Any:
    """A tensor, by which it is told later whether it is the same: it is not kept alive."""
    if value is None:
        return None
    return weakref.ref(value), None if value.is_inference() else value._version, value.data_ptr()


def _different(now: dict[str, Any], seen: dict[str, Any], rewritten: Collection[str]) -> dict[str, Any]:
    found = {}
    for name, value in now.items():
        before = seen.get(name, _tensor)
        if value is None or before is None or before is _tensor:
            if value is not before:
                found[name] = value
            continue
        reference, version, place = before
        same = reference() is value and place == value.data_ptr() and name not in rewritten
        if not same or (version is not None and value._version != version):
            found[name] = value
    return found


class _Items(NamedTuple):
    """A list or a dictionary of an attribute, with what was in it."""

    itself: Any
    items: tuple[Any, ...]


def _held(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value)
    if type(value) in (list, dict, set):
        return _Items(value, _inside(value))
    return value


def _inside(value: Any) -> tuple[Any, ...]:
    return tuple(value.items() if isinstance(value, dict) else value)


def _is(now: Any, held: Any) -> bool:
    """Whether an attribute is what it was."""
    if isinstance(now, Tensor):
        return isinstance(held, tuple) and len(held) == 3 and not _different({"": now}, {"": held}, ())
    if isinstance(held, _Items):
        if now is not held.itself:
            return False
        items = _inside(now)
        return len(items) == len(held.items) and all(_item_is(a, b) for a, b in zip(items, held.items, strict=True))
    return now is held


def _item_is(now: Any, before: Any) -> bool:
    if type(now) is tuple and type(before) is tuple and len(now) == len(before):
        return all(a is b for a, b in zip(now, before, strict=True))
    return now is before


def names_by_value(folders: Sequence[str]) -> list[Any]:
    """Modules of plug-ins in these folders that another process could not import by their names."""
    import importlib.util

    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not any(os.path.abspath(file).startswith(os.path.abspath(one) + os.sep) for one in folders):
            continue
        try:
            known = importlib.util.find_spec(name.partition(".")[0]) is not None and name.isidentifier()
        except (ImportError, ValueError, AttributeError):
            known = False
        if not known:
            found.append(module)
    return found

"""Digests of values and of weights, which ranks compare instead of the things themselves."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .values import as_bytes, version_of

# 64-bit words of a row: few enough to stay in a CPU's cache, and for one thread (torch starts more above 32768).
WORDS = 1 << 14
# Rows that an accelerator takes at a time: 128 MiB.
ROWS = 1024
# Tensors up to this many bytes are hashed on the host: they are cheaper to copy than to sum up.
SMALL = 4096
# Of a weight that might have been written to behind torch's back, this many values are looked at.
SAMPLES = 64

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format)


def digest(value: Any) -> str:
    """A short digest of any value: equal values have equal ones in every process, see `compared`."""
    return compared(value)[0]


def compared(value: Any) -> tuple[str, bool]:
    """A value's digest, and whether all of the value went into it.

    Tensors, arrays and images count by form and bytes, generators by their state, mappings and sets without order,
    functions by their names, devices by their type, other objects by what pickle would keep of them; an object that
    shows nothing counts by its type alone, and then the second item is False.
    """
    feeder = _Feeder()
    feeder.feed(value)
    return feeder.state.hexdigest()[:16], feeder.complete


class _Feeder:
    """Feeds a value, part by part, to a hash."""

    def __init__(self) -> None:
        self.state = hashlib.sha256()
        self.complete = True
        # Containers and objects that are being fed: one that holds itself would never end.
        self._within: list[int] = []

    def _put(self, kind: str, content: bytes = b"") -> None:
        self.state.update(f"{kind} {len(content)} ".encode())
        self.state.update(content)

    def feed(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._put(type(value).__qualname__, repr(value).encode())
        elif isinstance(value, Tensor):
            self._put("tensor", tensor_digest(value))
        elif isinstance(value, torch.Generator):
            self._put("generator", value.get_state().numpy().tobytes())
        elif isinstance(value, torch.device):
            self._put("device", value.type.encode())
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            self._put(f"array {value.shape} {value.dtype}", value.tobytes())
        elif isinstance(value, Image):
            self._put(f"image {value.mode} {value.size}", value.tobytes() + bytes(value.getpalette() or ()))
        elif id(value) in self._within:
            self._put("itself")
        else:
            self._within.append(id(value))
            self._compound(value)
            self._within.pop()

    def _compound(self, value: Any) -> None:
        if isinstance(value, Mapping):
            self._all(
                f"mapping {len(value)}", (part for key in sorted(value, key=digest) for part in (key, value[key]))
            )
        elif isinstance(value, (list, tuple)):
            self._all(f"{type(value).__qualname__} {len(value)}", value)
        elif isinstance(value, (set, frozenset)):
            self._all(f"set {len(value)}", sorted(value, key=digest))
        elif callable(value):
            self._put("function", qualified_name(value).encode())
        else:
            # By what pickle would keep of it, but part by part: its bytes also show who shares what.
            try:
                reduction = value.__reduce_ex__(4)
            except Exception:
                # A lock, an open file, a stream: whatever it holds, it does not show.
                self._put("object", qualified_name(type(value)).encode())
                self.complete = False
                return
            for part in reduction if isinstance(reduction, tuple) else (reduction,):
                self.feed(list(part) if isinstance(part, Iterator) else part)

    def _all(self, kind: str, items: Iterable[Any]) -> None:
        self._put(kind)
        for item in items:
            self.feed(item)


def qualified_name(value: Any) -> str:
    """The place where a function or class is defined; for a callable object, that of its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


# --- tensors -----------------------------------------------------------------------------------------------------


def tensor_digest(tensor: Tensor) -> bytes:
    """Digest of a tensor's form and of every bit it holds, computed where the tensor is; the same on any device.

    Strided tensors of any dtype, sparse and quantised ones, and subclasses that wrap others (``__tensor_flatten__``).
    """
    state = hashlib.sha256()
    with torch.no_grad():
        for path, part in strided_leaves(tensor):
            state.update(f"{path} {tuple(part.shape)} {part.dtype} {part.is_meta};".encode())
            if not part.is_meta:
                _feed_bytes(state.update, part)
    return state.digest()


def digest_of_parts(
    held: Tensor, shape: tuple[int, ...], dim: int, runs: Sequence[tuple[int, int]], add_up: Callable[[Tensor], Tensor]
) -> bytes:
    """`tensor_digest` of a tensor of which every rank holds another part. Collective; it is put together meanwhile.

    ``held`` is this rank's part: ``runs``, as (start, stop) along ``dim``, of the tensor's ``shape``; no two ranks hold
    the same. ``add_up`` returns the sum over all ranks of a tensor of integers.
    """
    whole, place = held.detach().new_zeros(shape), 0
    for start, stop in runs:
        whole.narrow(dim, start, stop - start).copy_(held.detach().narrow(dim, place, stop - start))
        place += stop - start
    return tensor_digest(add_up(whole.view(-1).view(torch.uint8)).view(held.dtype).view(shape))


def strided_leaves(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The plain strided tensors that a tensor is made of, each with where it is in there."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        for name in names:
            yield from strided_leaves(getattr(tensor, name), f"{path}/{type(tensor).__name__} {digest(context)}.{name}")
        return
    with torch._C.DisableTorchFunctionSubclass():
        tensor = tensor.detach()
        if tensor.is_quantized:
            yield f"{path}/{tensor.qscheme()} values", tensor.int_repr()
            yield f"{path}/numbers", tensor.dequantize()
        elif tensor.layout is not torch.strided:
            yield f"{path}/{tensor.layout}", tensor.to_dense()
        else:
            # A tensor that is conjugated or negated only in name is a view with a mark on it.
            yield path, tensor.resolve_conj().resolve_neg()


def _feed_bytes(update: Callable[[bytes], Any], tensor: Tensor) -> None:
    """Feed every byte of a strided tensor: those of a small one, sums over those of a large one.

    A sum is over 64-bit words w at places i of a row: a(i) w is folded onto its lower half, multiplied with b(i) and
    added up modulo 2^64, where a(i) and b(i) are odd and look random. The fold keeps flipped signs from cancelling.
    """
    flat = as_bytes(tensor)
    if flat.numel() <= SMALL:
        update(flat.cpu().numpy().tobytes())
        return
    if flat.data_ptr() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8
    update(_row_sums(flat[: whole * 8].view(torch.int64)).cpu().numpy().tobytes())
    update(flat[whole * 8 :].cpu().numpy().tobytes())


def _row_sums(words: Tensor) -> Tensor:
    """A number for every row of `WORDS` words, of which the last may be shorter: (words,) int64 -> (rows,) int64."""
    rows = words.numel() // WORDS
    taken = min(max(rows, 1), 1 if words.device.type == "cpu" else ROWS)
    # Two buffers for all rows: fresh memory for every row would take longer than the sums.
    buffers = words.new_empty(2, taken, min(words.numel(), WORDS))
    sums = [_sums(part, buffers) for part in words[: rows * WORDS].view(rows, WORDS).split(taken)] if rows else []
    if words.numel() % WORDS:
        sums.append(_sums(words[rows * WORDS :][None], buffers))
    return torch.cat(sums)


def _sums(rows: Tensor, buffers: Tensor) -> Tensor:
    """A number for every row of words: (rows, words) int64 -> (rows,) int64."""
    first, second = _factors(rows.device)
    count, words = rows.shape
    mixed, upper = buffers[:, :count, :words].unbind()
    torch.mul(rows, first[:words], out=mixed)
    torch.bitwise_right_shift(mixed, 32, out=upper)
    return mixed.bitwise_xor_(upper).mul_(second[:words]).sum(dim=1)


@lru_cache
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two odd factors for each place of a row: SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195)."""
    state = np.arange(1, 2 * WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = torch.from_numpy((state ^ (state >> np.uint64(31)) | np.uint64(1)).view(np.int64)).to(device)
    return odd[:WORDS], odd[WORDS:]


# --- weights -----------------------------------------------------------------------------------------------------


def weights_of(pipe: Any) -> Iterator[tuple[str, Tensor, bool]]:
    """Name and tensor of every weight of a pipeline (or module): parameters, and buffers that are saved.

    The third item says whether the component is offloaded by accelerate, which moves its weights to and fro.
    """
    modules = [(f"{name}.", m) for name, m in getattr(pipe, "components", {}).items() if isinstance(m, nn.Module)]
    for component, root in modules or [("", pipe)]:
        offloaded = hasattr(root, "_hf_hook")
        for path, module in root.named_modules():
            place = f"{component}{path}." if path else component
            passing = module._non_persistent_buffers_set
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and name not in passing:
                    yield place + name, tensor, offloaded


class _Digested(NamedTuple):
    """One weight as it was when it was read last."""

    tensor: weakref.ref[Tensor]
    sign: tuple[Any, ...]
    sample: bytes
    digest: str


class WeightDigests:
    """Digests of every weight of a pipeline; unchanged weights are not hashed again.

    A weight counts as changed when it is another tensor, lies elsewhere, has another form, or was written to in place
    (torch counts that). Writes that torch does not count, through ``.data`` or numpy, show in 64 of its values, which
    are read each time, or not at all. Weights that accelerate offloads are always elsewhere: for them it is the same.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self._known: dict[str, _Digested] = {}

    def look(self, adopt: bool = False) -> dict[str, tuple[str, int]]:
        """The digest and `id` of every weight, by name.

        ``adopt``: changed weights are known to be right: they are not hashed, and equal on the ranks that adopt them.
        """
        weights = list(weights_of(self.pipe))
        before, self._known = self._known, {}
        for (name, tensor, offloaded), sample in zip(
            weights, _samples([tensor for _, tensor, _ in weights]), strict=True
        ):
            sign = _sign_of(tensor, offloaded)
            last = before.get(name)
            if last is None or last.tensor() is not tensor or (last.sign, last.sample) != (sign, sample):
                value = "as cut" if adopt and last is not None else tensor_digest(tensor).hex()[:16]
                last = _Digested(weakref.ref(tensor), sign, sample, value)
            self._known[name] = last
        return {name: (self._known[name].digest, id(tensor)) for name, tensor, _ in weights}


def _sign_of(tensor: Tensor, offloaded: bool) -> tuple[Any, ...]:
    """A value that changes when a weight is replaced, resized or written to."""
    sign: list[Any] = [version_of(tensor), tensor.shape, tensor.dtype]
    with suppress(RuntimeError, NotImplementedError):
        for _, leaf in strided_leaves(tensor) if not tensor.is_quantized else ():
            sign += [version_of(leaf)] if offloaded else [version_of(leaf), leaf.data_ptr(), leaf.device]
    return tuple(sign)


def _samples(tensors: list[Tensor]) -> list[bytes]:
    """Some bytes of every tensor, evenly spread; copied to the host together."""
    read = [b""] * len(tensors)
    samples: dict[torch.device, dict[int, Tensor]] = {}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for number, tensor in enumerate(tensors):
            leaf = tensor.detach()
            plain = leaf.layout is torch.strided and not leaf.is_quantized and not is_traceable_wrapper_subclass(leaf)
            if not plain or leaf.is_meta or not leaf.numel():
                continue
            # Places in memory, whatever the strides.
            span = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
            count = min(SAMPLES, span)
            sample = leaf.as_strided((count,), (span // count,)).contiguous().view(torch.uint8)
            samples.setdefault(leaf.device, {})[number] = sample
    for by_number in samples.values():
        content, start = torch.cat(list(by_number.values())).cpu().numpy().tobytes(), 0
        for number, sample in by_number.items():
            read[number] = content[start : start + sample.numel()]
            start += sample.numel()
    return read


def weights_fingerprint(pipe: Any) -> str:
    """Digest of all weights of a pipeline (or module): every name, shape, dtype and bit."""
    return digest({name: value for name, (value, _) in WeightDigests(pipe).look().items()})

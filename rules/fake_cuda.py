"""An accelerator that is not there: fake tensors on ``cuda``, whose values are kept on the CPU.

torch's fake tensors refuse a CPU tensor among the device's. What torch has for CUDA in its CUDA wheels alone, a device
guard and what autograd asks of a device, is a small library here, made by g++ once for every version of torch.
DITMESH_FAKE_DEVICE=name gives it another name (PrivateUse1), which torch has for the accelerator of the process then.

Gradients are computed as on a GPU, in autograd's thread of the device. torch starts these threads at the first backward
of a process: one that has had a backward before the library was loaded has none.

The rules of dtypes and architectures are not those of fake tensors, which take float64 through kernels that have none:
`has_kernels` stands in for the questions that ditmesh asks torch about them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.cuda import _pin_memory_utils
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ditmesh.comm.backends import backend_of
from support.syncs import COPIES, INDEXING, Sync, asked_by, waits

KIND = os.environ.get("DITMESH_FAKE_DEVICE", "cuda")

GUARD = """
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using namespace c10;
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device here() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, here()); }
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
// A generator of the device: it has the state and the numbers of one of the CPU.
struct Numbers : at::CPUGeneratorImpl {
  Numbers() {
    device_ = Guard::here();
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
};
struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  // Not of every version's interface.
  at::Generator getNewGenerator(DeviceIndex = -1) const { return at::make_generator<Numbers>(); }
};
struct Register {
  Register() {
    static Guard guard;
    impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  }
} now;
}
// torch made the object that answers for CUDA when it was imported: its methods are exchanged.
extern "C" void is_there(int there) {
  static Hooks mine;
#ifdef OTHER
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(&mine);
#else
  void** object = reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()));
  static void* own = *object;
  *object = there ? *reinterpret_cast<void**>(&mine) : own;
#endif
}
"""
if KIND != "cuda":
    GUARD = "#define OTHER\n" + GUARD.replace("CUDA", "PrivateUse1")


@cache
def unavailable() -> str | None:
    """Why there are no fake CUDA tensors here; None: there are, from now on."""
    reason, _ = _library()
    return reason


@cache
def _library() -> tuple[str | None, ctypes.CDLL | None]:
    """Why there is no library, or the library."""
    if KIND == "cuda" and torch.version.cuda is not None:
        return "this torch is made for CUDA, and has a guard of its own", None
    compiler = shutil.which("g++")
    if compiler is None:
        return "no g++ is installed", None
    version = f"{torch.__version__}-{zlib.crc32(GUARD.encode()):08x}"
    library = Path(tempfile.gettempdir(), f"ditmesh-guard-{os.getuid()}-{version}.so")
    if not library.exists():
        root = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "guard.cpp"), Path(folder, "guard.so")
            source.write_text(GUARD)
            command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
            command += [f"-Wl,-rpath,{root / 'lib'}", str(source), "-lc10", "-ltorch_cpu", "-o", str(made)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                return f"g++ does not compile torch's headers: {ended.stderr.strip().splitlines()[-1][:200]}", None
            # In one step: other processes may look for it.
            beside = library.with_suffix(f".{os.getpid()}")
            shutil.copy(made, beside)
            beside.replace(library)
    if KIND != "cuda":
        torch.utils.rename_privateuse1_backend(KIND)
        torch._register_device_module(KIND, Module(f"torch.{KIND}"))
        for backend in ("gloo", "fake"):
            dist.Backend.backend_capability[backend].append(KIND)
        ctypes.CDLL(str(library)).is_there(1)
        # A device's package says what autocast does; this one's casts nothing.
        LIBRARIES.append(torch.library.Library("_", "IMPL", "AutocastPrivateUse1"))
        LIBRARIES[0].fallback(torch.library.fallthrough_kernel)
    return None, ctypes.CDLL(str(library))


# Kept: what one has registered goes with it.
LIBRARIES: list[Any] = []


class Module(ModuleType):
    """What stands in for ``torch.cuda`` under another name, and says what that says without a device."""

    is_available = is_initialized = _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda _: None)
    device_count = current_device = staticmethod(lambda: 0)
    # What autocast asks for.
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])


def on_device(tensor: Tensor) -> bool:
    """True if a tensor is one of the device."""
    return tensor.device.type == KIND


# --- attention kernels -----------------------------------------------------------------------------------------------

HALF = (torch.float16, torch.bfloat16)


@contextmanager
def has_kernels(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Let torch answer which attention kernels a GPU of this compute capability has, by the rules of its C++ code."""
    ampere = capability >= (8, 0)

    def flash(call: Any, debug: bool = False) -> bool:
        fits = call.query.dtype in HALF and call.query.shape[-1] <= 256
        return ampere and fits and call.attn_mask is None

    def efficient(call: Any, debug: bool = False) -> bool:
        dtype, width = call.query.dtype, call.query.shape[-1]
        takes = {torch.float32, torch.float16} | ({torch.bfloat16} if ampere else set())
        return dtype in takes and width % (8 if dtype in HALF else 4) == 0

    cuda = torch.backends.cuda
    with (
        mock.patch.object(cuda, "can_use_flash_attention", flash),
        mock.patch.object(cuda, "can_use_efficient_attention", efficient),
    ):
        yield


# --- the device ------------------------------------------------------------------------------------------------------

# Their mean and deviation are float32 on a GPU, also where the input is of half precision.
STATISTICS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm"}
# Views and what only makes memory: no kernel is launched.
FREE = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "detach_", "set_", "resize_"),
}


class FakeDevice(TorchDispatchMode):
    """Inside of a `FakeTensorMode`: CPU tensors are real, CUDA tensors are fake, and have their values kept aside.

    Every operation runs twice: with fake tensors, which refuse what a GPU would, and with the values, on the CPU.

    Attributes:
        looks: what would have made the host wait.
        launches: kernels, by the name of the operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Sync] = []
        self.launches: Counter[str] = Counter()
        # By the address of a fake storage, which stays taken while its reference is here: the storage of its values.
        self._values: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}

    def look(self, operation: str) -> None:
        """Note an operation for which the host would wait: it needs a value of the device, or moves one."""
        self.looks.append(Sync(operation, *asked_by(__file__), 0))

    def values(self, tensor: Tensor) -> Tensor:
        """The values of a CUDA tensor: a CPU tensor of its shape and strides; views share its memory."""
        if not on_device(tensor):
            return tensor
        _, storage = self._values[tensor.untyped_storage()._cdata]
        with unset_fake_temporarily(), no_dispatch():
            whole = torch.empty(0, dtype=tensor.dtype)
            return whole.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def storage_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The storage of the values of a CUDA tensor's; a storage on the host is its own."""
        return self._values[storage._cdata][1] if storage._cdata in self._values else storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # A subclass takes the operation apart; its parts come here.
        name = func._schema.name.rpartition("::")[2]
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        target = kwargs.get("device")
        makes = target is not None and torch.device(target).type == KIND
        if not makes and not any(map(on_device, tensors)):
            # There is no driver that would pin memory of the host.
            kwargs.pop("pin_memory", None)
            _check_generator(kwargs, "cpu")
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if target is not None and torch.device(target).type == "meta":
            # A shape without memory: nothing of the device is read.
            with unset_fake_temporarily(), no_dispatch():
                given = tree_map_only(Tensor, lambda one: torch.empty_like(self.values(one), device="meta"), args)
                return func(*given, **kwargs)
        found = self._with_values(func, args, kwargs)
        if name in INDEXING and any(isinstance(one, Tensor) and not on_device(one) for one in args[1]):
            # torch takes indices on the host, and copies them.
            self.look(f"{name} by a CPU tensor")
        elif waits(name, args, kwargs):
            self.look(name)
            to_host = (target is not None and not makes) or (name == "copy_" and not on_device(args[0]))
            if to_host or not isinstance(found, Tensor):
                return args[0] if name == "copy_" else found
            if name not in COPIES:
                # Of a size that depends on the values.
                shape, strides, dtype = found.shape, found.stride(), found.dtype
                return self._keep(torch.empty_strided(shape, strides, dtype=dtype, device=KIND), found)
        if not func.is_view and name not in FREE:
            self.launches[name] += 1
        return self._paired(func(*args, **kwargs), found, name)

    def _paired(self, fake: Any, found: Any, name: str) -> Any:
        if isinstance(fake, Tensor):
            return self._keep(fake, found, name)
        if isinstance(fake, (list, tuple)):
            return type(fake)(self._paired(*both, name) for both in zip(fake, found, strict=True))
        return fake

    def _keep(self, fake: Tensor, found: Tensor, name: str = "") -> Tensor:
        """A result with its values, in new memory unless it is a view or an argument."""
        if not on_device(fake):
            return found
        storage = fake.untyped_storage()
        if storage._cdata not in self._values:
            assert found.shape == fake.shape, (found.shape, fake.shape)
            assert found.dtype == fake.dtype or name in STATISTICS, (found.dtype, fake.dtype)
            with unset_fake_temporarily(), no_dispatch():
                place = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
                whole = torch.empty(0, dtype=fake.dtype).set_(place, fake.storage_offset(), fake.shape, fake.stride())
                whole.copy_(found)
            self._values[storage._cdata] = StorageWeakRef(storage), place
            if len(self._values) % 512 == 0:
                self._values = {key: kept for key, kept in self._values.items() if not kept[0].expired()}
        return fake

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, self.values, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kernel = STAND_INS.get(func.overloadpacket)
        with unset_fake_temporarily(), _on_cpu(kwargs) as kwargs:
            found = func(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)
            if func.namespace == "c10d":
                # The caller gets the work of the fake operation, which waits for nothing.
                for work in tree_leaves(found):
                    if not isinstance(work, Tensor):
                        dist.Work.unbox(work).wait()
            return found


def _check_generator(kwargs: dict[str, Any], device: str) -> None:
    given = kwargs.get("generator")
    if given is not None and given.device.type != device:
        raise RuntimeError(f"Expected a '{device}' device type for generator but found '{given.device.type}'")


@contextmanager
def _on_cpu(kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Named arguments with a generator of the CPU in place of the device's, which goes on as that one does."""
    given = kwargs.get("generator")
    if given is None:
        yield kwargs
        return
    _check_generator(kwargs, KIND)
    twin = torch.Generator().set_state(given.get_state())
    yield {**kwargs, "generator": twin}
    given.set_state(twin.get_state())


def _attended(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None, rows: int
) -> tuple[Tensor, Tensor]:
    """What a fused kernel returns: the output, laid out as (B, S, H, D), and the LSE of so many rows."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    lse = nn.functional.pad(lse, (0, rows - lse.shape[-1]), value=float("inf"))
    return out, lse


def _flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, scale: float | None = None) -> tuple[Any, ...]:
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    out, lse = _attended(q, k, v, None, scale, q.shape[2])
    return out, lse, None, None, q.shape[2], k.shape[2], *state, torch.zeros(0, dtype=q.dtype)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, asked: bool, *_: Any, scale: float | None = None
) -> tuple[Any, ...]:
    state = torch.zeros((), dtype=torch.int64)
    out, lse = _attended(q, k, v, bias, scale, q.shape[2] + -q.shape[2] % 32)
    return out, lse if asked else lse[..., :0], state, state


def _flash_backward(grad: Tensor, *given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    return _gradients(grad, *given[:5], None, scale)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *given: Any, scale: float | None = None
) -> tuple[Tensor | None, ...]:
    assert not given[5][3], "no mask here has a gradient"
    out, lse = given[:2]
    if out.dtype != torch.float32:
        # The kernel adds up dO * O itself then, and takes a token's heads to lie side by side.
        heads, width = out.shape[1], out.shape[3]
        out = out.as_strided(out.shape, (out.stride(0), out.stride(1), heads * width, 1))
    return *_gradients(grad, q, k, v, out, lse, bias, scale), None


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, ...]:
    lse = lse[..., : q.shape[2]].contiguous()
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale
    )


STAND_INS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    torch.ops.aten._scaled_dot_product_flash_attention: _flash,
    torch.ops.aten._scaled_dot_product_efficient_attention: _efficient,
}


def _moving() -> Callable[..., nn.Module]:
    """What stands in for `nn.Module._apply`, by which modules are moved: torch exchanges no fake weight for a real one.

    A weight that is moved is another object afterwards.
    """
    apply = nn.Module._apply
    moved: dict[int, tuple[Tensor, nn.Parameter]] = {}

    def replaced(old: nn.Parameter, new: Tensor) -> nn.Parameter:
        _, known = moved.get(id(old), (None, None))
        # What was one weight of several modules stays one.
        if known is None or (known.device, known.dtype) != (new.device, new.dtype):
            known = nn.Parameter(new, requires_grad=old.requires_grad)
            moved[id(old)] = old, known
        return known

    def applied(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        own = {name: one for name, one in self._parameters.items() if one is not None}
        plain = {name: one.detach() for name, one in own.items()}
        every = {name: fn(one) for name, one in plain.items()}
        if not any(map(on_device, (*own.values(), *every.values()))):
            return apply(self, fn, recurse=False)
        for name, old in own.items():
            if every[name] is not plain[name]:
                self._parameters[name] = replaced(old, every[name])
                if old.grad is not None:
                    self._parameters[name].grad = fn(old.grad)
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else fn(buffer)
        return self

    return applied


class _Handle:
    """The work of an operation: a wait with a deadline is one of the host."""

    def __init__(self, device: FakeDevice, work: Any) -> None:
        self._device, self._work = device, work

    def wait(self, *limit: Any) -> bool:
        if limit:
            self._device.look("wait with a deadline")
        return self._work.wait(*limit)


class Messages:
    """What stands in for ``torch.distributed`` in `ditmesh.comm.link`: values travel, over gloo.

    Refuses, as NCCL does, tensors on the host. A collective, a batch and a single message are a kernel each.
    """

    # What a link calls with a tensor of its own.
    NAMES = (
        *("isend", "irecv", "all_to_all_single", "all_gather_single", "all_gather_into_tensor", "broadcast"),
        "all_reduce",
    )

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return self._launching(name) if name in self.NAMES else getattr(dist, name)

    def _launching(self, name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def call(*given: Any, **named: Any) -> Any:
            self._device.launches[name] += 1
            work = function(*(self._sent(one) if isinstance(one, Tensor) else one for one in given), **named)
            return work if work is None else _Handle(self._device, work)

        call.__name__ = name
        return call

    def _sent(self, tensor: Tensor) -> Tensor:
        assert on_device(tensor), "NCCL carries no tensors of the host"
        return self._device.values(tensor)

    def P2POp(self, move: Any, tensor: Tensor, *others: Any) -> dist.P2POp:  # noqa: N802 - torch's name
        return dist.P2POp(getattr(dist, move.__name__), self._sent(tensor), *others)

    def batch_isend_irecv(self, moves: list[dist.P2POp]) -> Any:
        self._device.launches["batch_isend_irecv"] += 1
        return [_Handle(self._device, work) for work in dist.batch_isend_irecv(moves)]


PROPERTIES = SimpleNamespace(
    name="fake GPU", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132, L2_cache_size=50 << 20
)
BUILD = torch.__config__.show()


def _of_device(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` of numbers some of which are tensors of the device: their values are read, which is a wait."""

    def call(data: Any, **kwargs: Any) -> Tensor:
        if not isinstance(data, Tensor):
            data = tree_map_only(FakeTensor, lambda one: one.item(), data)
        return build(data, **kwargs)

    return call


def _side_by_side(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention of plain torch, laid out as a GPU's kernels lay it out: a token's heads side by side."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        out = attend(*args, **kwargs)
        return out.transpose(1, 2).contiguous().transpose(1, 2) if on_device(out) and out.ndim == 4 else out

    return call


def _wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor._make_subclass` that takes a tensor of the device as well, such as a ControlNet's residuals.

    torch wraps what `detach` returns. Of a GPU's tensor that has no object of Python's yet; of a fake one it has, and
    cannot become another. A tensor of the same shape is wrapped in its place: a subclass of ditmesh keeps the tensor
    that it was made of, and computes with that one.
    """

    def call(kind: type[Tensor], given: Tensor, *others: Any, **named: Any) -> Any:
        if isinstance(given, FakeTensor) and not issubclass(kind, FakeTensor):
            with unset_fake_temporarily(), no_dispatch():
                given = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
        return make(kind, given, *others, **named)

    return call


# What `torch.cuda` says where there is a device, and what torch would ask the device then.
FOUND: tuple[tuple[Any, str, Any], ...] = (
    (torch.__config__, "show", lambda: BUILD),
    (torch.cuda, "get_device_properties", lambda *_: PROPERTIES),
    (torch.cuda, "get_device_name", lambda *_: PROPERTIES.name),
    (torch.cuda, "set_device", lambda *_: None),
    (torch.cuda, "manual_seed", lambda *_: None),
    (torch.cuda, "empty_cache", lambda: None),
    (torch.cuda, "reset_peak_memory_stats", lambda *_: None),
    (torch.cuda, "is_available", lambda: True),
    (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
    (torch.cuda, "device_count", lambda: 1),
    (fake_tensor, "init_gpu_context", lambda *_: None),
    (FakeTensorMode, "avoid_device_init", property(lambda _: True)),
    # Checkpoints are copied to the host by these. A kernel has run here when its call returns: the streams are one.
    (torch.cuda, "current_stream", lambda *_: torch.accelerator.current_stream()),
    (torch.cuda, "stream", lambda _: nullcontext()),
    (_pin_memory_utils, "pin_memory", lambda *_: None),
    (_pin_memory_utils, "unpin_memory", lambda *_: None),
)


def _staged(device: FakeDevice) -> Callable[..., Tensor]:
    """What stands in for torch's copy of a checkpoint's tensor to memory of the host, which it keeps and takes again.

    It copies whole storages, which no operation does: those of the values.
    """
    offload = StateDictStager._offload_tensor

    def staged(self: StateDictStager, tensor: Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return offload(self, tensor, memo, non_blocking)
        values = device.values(tensor)
        # torch knows what it has copied by its number.
        self._keep_alive(values, memo)
        with _disable_current_modes():
            return offload(self, values, memo, non_blocking)

    return staged


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors of memory that is there."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@contextmanager
def fake_device(found: bool = False) -> Iterator[FakeDevice]:
    """A fake device of this process, or of this rank: links take the path of NCCL.

    Args:
        found: ``torch.cuda`` says that there is a device, without which autocast and loss scales do nothing.
    """
    assert unavailable() is None, unavailable()
    module = torch.get_device_module(KIND)
    if (world := dist.group.WORLD) is not None and not backend_of(None, KIND):
        gloo = world._get_backend(torch.device("cpu"))
        world._register_backend(torch.device(KIND), dist.ProcessGroup.BackendType.GLOO, gloo)
    from ditmesh.comm import link as link_module
    from ditmesh.comm import transports
    from ditmesh.core import digests, intercept, values
    from ditmesh.train.gradients import reduce as gradients

    device = FakeDevice()
    messages, feed, samples = Messages(device), _on_host(digests._feed_bytes), _on_host(digests._samples)
    address, start = Tensor.data_ptr, torch.UntypedStorage.data_ptr
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (transports, "TAGGED", ()),
            (link_module, "dist", messages),
            (transports, "dist", messages),
            (gradients, "dist", messages),
            # Every bit of the weights is read once: by many operations, which are of no interest here.
            (digests, "_feed_bytes", lambda update, tensor: feed(update, device.values(tensor))),
            (digests, "_samples", lambda tensors: samples([device.values(one) for one in tensors])),
            # A tensor of a GPU is a plain one, at an address of its own.
            (values, "PLAIN_TYPES", (*values.PLAIN_TYPES, FakeTensor)),
            (nn.Module, "_apply", _moving()),
            (Tensor, "pin_memory", lambda tensor, *_: tensor),
            (StateDictStager, "_offload_tensor", _staged(device)),
            (Tensor, "data_ptr", lambda tensor: address(device.values(tensor))),
            (torch.UntypedStorage, "data_ptr", lambda storage: start(device.storage_of(storage))),
            # What was pickled is of the host: torch makes fake tensors of it, which hold nothing.
            (torch.storage, "_load_from_bytes", _on_host(torch.storage._load_from_bytes)),
            (dist, "all_gather_object", _on_host(dist.all_gather_object)),
            (dist, "broadcast_object_list", _on_host(dist.broadcast_object_list)),
            (dist, "gather_object", _on_host(dist.gather_object)),
            (dist, "scatter_object_list", _on_host(dist.scatter_object_list)),
            *(
                (torch.accelerator, name, lambda *_: 1 << 20)
                for name in ("memory_allocated", "memory_reserved", "max_memory_allocated")
            ),
            (module, "_lazy_init", lambda: None),
            (module, "get_rng_state", lambda *_: torch.get_rng_state()),
            (module, "set_rng_state", lambda *_: None),
            (module, "current_device", lambda: 0),
            (torch.accelerator, "synchronize", lambda *_: None),
            (module, "get_device_capability", lambda *_: (9, 0)),
            (module, "mem_get_info", lambda *_: (80 << 30, 80 << 30)),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=isinstance(owner, Module)))
        for owner, name, stand_in in FOUND if found else ():
            owner = module if owner is torch.cuda else owner
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=isinstance(owner, Module)))
        if found:
            stack.enter_context(mock.patch.object(torch, "tensor", _of_device(torch.tensor)))
            stack.enter_context(mock.patch.object(Tensor, "_make_subclass", _wrapped(Tensor._make_subclass)))
            # One function: ditmesh asks whether another has taken the place of torch's.
            plain = nn.functional.scaled_dot_product_attention is intercept.sdpa
            attend = _side_by_side(intercept.sdpa)
            stack.enter_context(mock.patch.object(intercept, "sdpa", attend))
            if plain:
                stack.enter_context(mock.patch.object(nn.functional, "scaled_dot_product_attention", attend))
        library: Any = _library()[1]
        library.is_there(1)
        stack.callback(library.is_there, 0)
        stack.enter_context(mock.patch.dict(dist.Backend.default_device_backend_map, {KIND: "nccl"}))
        stack.enter_context(has_kernels())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(device)
        yield device

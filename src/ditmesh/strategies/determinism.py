"""Everything of torch that may change a sum's bits, set and put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import ParallelConfig
from ..core.arguments import Arguments
from ..core.gpus import CUBLAS, gpu_facts, settle_before_cuda
from ..core.patching import Proceed
from ..errors import ConfigError
from .base import Context, Request, Strategy

# torch gives parts of this module other classes at import, which type checkers do not see.
_BACKENDS: Any = torch.backends


@contextmanager
def deterministic(device: torch.device | str) -> Iterator[None]:
    """While inside: deterministic algorithms, no TF32, one attention kernel, one thread on the CPU. Nests.

    A library that shares a product out over threads adds up in another order for another number of them; ranks have few
    threads each where one device has many. `ConfigError`: CUDA has started without the workspace that cuBLAS needs.
    """
    if torch.device(device).type != "cpu":
        settle_before_cuda()
        if CUBLAS not in os.environ:
            raise ConfigError(
                f"CUDA has started without {CUBLAS}, so cuBLAS may add in another order from rank to rank; set "
                f"{CUBLAS}=:4096:8 before the first use of a GPU, or call ditmesh.launch.init_from_environment() first"
            )
    cudnn, matmul = _BACKENDS.cudnn, _BACKENDS.cuda.matmul
    with ExitStack() as undo:
        for owner, name, value in (
            (cudnn, "deterministic", True),
            (cudnn, "benchmark", False),
            (matmul, "allow_fp16_reduced_precision_reduction", False),
            (matmul, "allow_bf16_reduced_precision_reduction", False),
            # Filling new memory finds bugs that read it before it is written; it costs time and changes no result.
            (torch.utils.deterministic, "fill_uninitialized_memory", False),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        _keep_float32(undo)
        undo.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        if torch.device(device).type == "cpu":
            undo.callback(_set_threads, torch.get_num_threads())
            _set_threads(1)
        else:
            # Flash where the dtype allows it, else the kernel that takes everything: which one depends on shapes
            # and dtypes alone, and those are fixed.
            undo.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True))
        yield


def _keep_float32(undo: ExitStack) -> None:
    """Compute products and convolutions of float32 in float32: neither TF32 on GPUs nor bfloat16 on CPUs.

    torch has old switches and, from 2.9 on, new ones; an old one cannot be read once a program has set a new one. So
    both are set, and put back in an order that leaves the new ones as they were.
    """
    old: list[tuple[Callable[[Any], None], Any, Any]] = []
    with suppress(RuntimeError):
        old.append((partial(setattr, _BACKENDS.cudnn, "allow_tf32"), _BACKENDS.cudnn.allow_tf32, False))
    with suppress(RuntimeError):
        old.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision(), "highest"))
    if hasattr(_BACKENDS, "fp32_precision"):
        cudnn, mkldnn = _BACKENDS.cudnn, _BACKENDS.mkldnn
        operations = [_BACKENDS.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
        # Parents first: where an operation has no precision of its own, its parent's is read, which says none by then.
        # mkldnn's own is left out: torch writes that of all operations there.
        for place in (_BACKENDS, cudnn, *operations):
            undo.callback(setattr, place, "fp32_precision", place.fp32_precision)
            place.fp32_precision = "ieee" if place in operations else "none"
    for write, before, value in old:
        undo.callback(write, before)
        write(value)


def _set_threads(threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def refuse_unlike(gpus: Sequence[Mapping[str, str]]) -> None:
    """Refuse GPUs that may give different bits, by the `gpu_facts` of all ranks in order: `ConfigError`."""
    for rank, facts in enumerate(gpus):
        unlike = [name for name, value in facts.items() if value != gpus[0].get(name)]
        if unlike:
            here, there = (", ".join(f"{name} {one.get(name)}" for name in unlike) for one in (gpus[0], facts))
            raise ConfigError(
                f"reproducible mode needs GPUs and libraries of one kind: rank 0 has {here}, and rank {rank} {there}; "
                "use ranks that are alike, or leave reproducible out"
            )


class FixedArithmetic(Strategy):
    """The settings of `deterministic` for the length of a request and of a transformer's call."""

    name = "reproducible"
    promise = "bits"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._request = ExitStack()

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.reproducible

    def apply(self, undo: ExitStack) -> None:
        mesh = self.context.mesh
        if (kind := mesh.device.type) not in ("cpu", "cuda", "meta"):
            raise ConfigError(f"reproducible is for cpu and cuda, not {kind}; leave it out, or use --device cpu")
        # Fake devices, on which memory is counted and rules are tested, have no properties.
        if mesh.device.type == "cuda" and mesh.world_size > 1 and torch.cuda.is_available():
            refuse_unlike(mesh.world.all_gather_object(gpu_facts(mesh.device)))
        for model in self.context.models:
            undo.callback(model.chain.add(self._around_call))

    def _around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """Run the call with torch's deterministic algorithms."""
        with deterministic(self.context.mesh.device):
            return proceed(arguments)

    def begin_request(self, request: Request) -> None:
        self._request.close()
        if request.pipe is not None:
            self._request.enter_context(deterministic(self.context.mesh.device))

    def end_request(self, failed: bool) -> None:
        self._request.close()

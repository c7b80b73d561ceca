"""What a single GPU can prove of ditmesh in ten minutes.

    PYTHONPATH=src python benchmarks/gpu_check.py --json out.json --markdown out.md
    PYTHONPATH=src python benchmarks/gpu_check.py --part kernels     # one part, again
    PYTHONPATH=src python benchmarks/gpu_check.py --quick            # the least of everything

It needs this repository, torch >= 2.6 and diffusers; what else is missing is named, with the parts that are skipped
for it. Every part is a process of its own with a time budget: one that fails, crashes or hangs does not end the others.
Several ranks share the GPU over gloo; what gloo cannot carry from one to another is copied through host memory.
Without a CUDA device everything runs on the CPU at reduced sizes, and says so.

Exit code: 0 when nothing failed, 1 when something did, 2 when nothing could run. Parts that are skipped do not count.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from machine import describe_machine

Row = dict[str, Any]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Relative to the largest magnitude of the truth.
TOLERANCES = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
# In the environment: "1" to copy messages through the host, "0" not to; else it is tried out.
STAGED = "GPU_CHECK_STAGED"
STEPS = 4
STALE = {"warmup": "fixed(1)"}
RANKS: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses": 2},
    "ring": {"ring": 2},
    "tensor": {"tensor": 2},
    "cfg": {"cfg": 2},
    "data": {"data": 2},
    "ring, speeds 2,1": {"ring": 2, "speeds": (2, 1)},
    "displaced": {"ring": 2, "exchange": "displaced", **STALE},
    "displaced, int8": {"ring": 2, "exchange": "displaced", "compress": "int8", **STALE},
    "naive": {"ring": 2, "exchange": "naive", **STALE},
    "pipe": {"pipe": 2, **STALE},
    "pipe, 4 patches": {"pipe": 2, "patches": 4, **STALE},
}


class Skipped(Exception):
    """A part or row that cannot run here; says why."""


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest magnitude of the truth; infinite where something is not a number."""
    error = float((value.double() - truth.double()).abs().max() / truth.double().abs().max())
    return error if error == error else float("inf")


def digest(tensor: Tensor) -> str:
    """Of every bit."""
    return hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def moved(value: Any, dtype: torch.dtype) -> Any:
    """Arguments on the device, floating-point tensors in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(DEVICE, dtype) if value.is_floating_point() else value.to(DEVICE)
    if isinstance(value, dict):
        return {key: moved(item, dtype) for key, item in value.items()}
    return [moved(item, dtype) for item in value] if isinstance(value, list) else value


def wait() -> None:
    """Until the device has done everything."""
    if ON_GPU:
        torch.cuda.synchronize()


def milliseconds(function: Callable[[], Any], runs: int) -> float:
    """Median of ``runs`` calls after two that do not count, the device empty before and after each."""
    times = []
    for _ in range(runs + 2):
        wait()
        start = time.perf_counter()
        function()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def ditmesh() -> Any:
    """The package, if the engine can be imported.

    Raises:
        Skipped: naming the module that is missing.
    """
    try:
        import ditmesh
        import ditmesh.engine
    except ModuleNotFoundError as error:
        raise Skipped(f"the engine needs {error.name}, which is not installed") from None
    return ditmesh


def refusals() -> tuple[type[Exception], ...]:
    """What ditmesh raises for what it cannot show right."""
    from ditmesh import errors

    return errors.ConfigError, errors.InputError, errors.LayoutError


def guarded(row: Row, check: Callable[[], Row]) -> Row:
    """The row with what ``check`` finds: one failure is one row's."""
    try:
        return {**row, **check()}
    except Skipped as reason:
        return {**row, "skipped": str(reason)}
    except Exception as error:
        return {**row, "ok": False, "failed": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}


# --- kernels and attention backends --------------------------------------------------------------------------------


def kernels(quick: bool) -> Iterator[Row]:
    """The log-sum-exp kernels, and a merge of two halves, against float64 attention; queries that see nothing too."""
    module = _kernels()
    attend_with_lse, merge_ = module.attend_with_lse, module.merge_

    def check(dtype: torch.dtype, dim: int, masked: bool, tolerance: float) -> Row:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 130, dim, device=DEVICE).to(dtype) for _ in range(3))
        mask = None
        if masked:
            mask = torch.rand(2, 1, 130, 130, device=DEVICE) > 0.3
            mask[..., 0] = True
            mask[0, :, 5] = False
        scores = q.double() @ k.double().transpose(-1, -2) / dim**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        truth_lse = torch.logsumexp(scores, dim=-1)
        truth = scores.softmax(dim=-1).nan_to_num(0.0) @ v.double()
        whole, lse = attend_with_lse(q, k, v, mask)
        halves = [
            attend_with_lse(q, k[:, :, part], v[:, :, part], None if mask is None else mask[..., part])
            for part in (slice(0, 57), slice(57, 130))
        ]
        merged, merged_lse = merge_(*halves[0], *halves[1])
        dead = truth_lse == float("-inf")
        errors = {
            "error": relative_error(whole, truth),
            "merged": relative_error(merged, truth),
            "lse": max(relative_error(one[~dead], truth_lse[~dead]) for one in (lse, merged_lse)),
        }
        nothing = bool(((lse == float("-inf")) == dead).all() and ((merged_lse == float("-inf")) == dead).all())
        return {**errors, "ok": nothing and max(errors.values()) < tolerance}

    for name, dtype in DTYPES.items():
        for dim in (64, 72) if quick else (40, 60, 64, 72, 96, 128, 256):
            for masked in (False, True):
                row = {"dtype": name, "head dim": dim, "mask": masked}
                yield guarded(row, lambda d=dtype, n=dim, m=masked, t=TOLERANCES[name]: check(d, n, m, t))


def _kernels() -> Any:
    """The module alone, which needs nothing but torch, where the package cannot be imported."""
    try:
        from ditmesh.attention.kernels import lse as module
    except ModuleNotFoundError:
        path = Path(__file__).parents[1] / "src" / "ditmesh" / "attention" / "kernels" / "lse.py"
        spec = importlib.util.spec_from_file_location("kernels", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def backends(quick: bool) -> Iterator[Row]:
    """torch's kernels against float64; diffusers' backends under ditmesh: the same picture, or refused by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def kernel(backend: SDPBackend, dtype: torch.dtype, tolerance: float) -> Row:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 130, 64, device=DEVICE).to(dtype) for _ in range(3))
        truth = (q.double() @ k.double().transpose(-1, -2) / 8).softmax(dim=-1) @ v.double()
        with warnings.catch_warnings(), sdpa_kernel(backend):
            warnings.simplefilter("ignore")
            try:
                value = F.scaled_dot_product_attention(q, k, v)
            except RuntimeError as error:
                raise Skipped(str(error).splitlines()[0][:120]) from None
        error = relative_error(value, truth)
        return {"error": error, "ok": error < tolerance}

    for backend in (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        for name, dtype in DTYPES.items():
            row = {"backend": f"torch {backend.name}", "dtype": name}
            yield guarded(row, lambda b=backend, d=dtype, t=TOLERANCES[name]: kernel(b, d, t))
    from diffusers.models.attention_dispatch import AttentionBackendName

    names = ["native", "_native_math"] if quick else [backend.value for backend in AttentionBackendName]
    for name in names:
        yield guarded({"backend": f"diffusers {name}", "dtype": "bfloat16"}, lambda n=name: _diffusers_backend(n))


def _diffusers_backend(name: str) -> Row:
    package = ditmesh()
    from support.models import inputs, run, sizes, tiny

    dtype = torch.bfloat16 if ON_GPU else torch.float32
    model = copy.deepcopy(tiny("Flux")).to(DEVICE, dtype)
    arguments = moved(inputs("Flux", sizes("Flux")["B=1"]), dtype)
    reference = run(model, arguments)
    try:
        model.set_attention_backend(name)
        plain = run(model, arguments)
    except Exception as error:
        raise Skipped(f"does not run in plain diffusers here: {str(error).strip().splitlines()[0][:120]}") from None
    try:
        with package.simulated(model, {"ring": 2}):
            value = run(model, arguments)
    except refusals() as error:
        return {"refused": str(error)[:120], "ok": True}
    error = relative_error(value, plain)
    return {"error": error, "plain": relative_error(plain, reference), "ok": error < 4e-2}


# --- parity in one process -----------------------------------------------------------------------------------------


def parity(quick: bool) -> Iterator[Row]:
    """Every class: parallelised on one rank, and as two simulated ranks, against the plain model.

    In half precision the error is against the plain model in float32, and may be three times the plain model's own.
    """
    ditmesh()
    from support.models import MAKERS

    for name in ["Flux", "SD3", "Wan"] if quick else MAKERS:
        for dtype in ("float32", "bfloat16") if quick else DTYPES:
            yield guarded({"class": name, "dtype": dtype}, lambda n=name, d=dtype: _parity_of(n, d))


def _parity_of(name: str, dtype_name: str) -> Row:
    package = ditmesh()
    from support.models import inputs, run, sizes, tiny

    try:
        small = tiny(name)
    except AttributeError as error:
        raise Skipped(f"this diffusers has no such class ({error})") from None
    exact = copy.deepcopy(small).to(DEVICE)
    model = copy.deepcopy(small).to(DEVICE, DTYPES[dtype_name])
    worst = {"plain": 0.0, "1 rank": 0.0, "2 simulated": 0.0}
    ok = True
    for size in sizes(name).values():
        given = inputs(name, size)
        truth = run(exact, moved(given, torch.float32))
        arguments = moved(given, DTYPES[dtype_name])
        try:
            plain = run(model, arguments)
        except RuntimeError as error:
            raise Skipped(f"plain diffusers fails in {dtype_name}: {str(error).splitlines()[0][:120]}") from None
        own = relative_error(plain, truth)
        allowed = TOLERANCES["float32"] if dtype_name == "float32" else 3 * own + 1e-3
        with package.parallelized(model, {}):
            one = run(model, arguments)
        found = {"plain": own, "1 rank": relative_error(one, truth)}
        try:
            with package.simulated(model, {"ring": 2}):
                found["2 simulated"] = relative_error(run(model, arguments), truth)
        except refusals() as error:
            worst.pop("2 simulated", None)
            return {**worst, "refused": str(error)[:120], "ok": ok}
        ok = ok and max(found.values()) <= max(allowed, own)
        worst = {key: max(value, found[key]) for key, value in worst.items()}
    return {**worst, "ok": ok}


# --- several ranks on one device -----------------------------------------------------------------------------------


def together(world: int, function: str, limit: float, *arguments: Any) -> list[Any]:
    """What ``RANK_FUNCTIONS[function]`` returns on every rank; processes of their own, which share the device.

    Raises:
        RuntimeError: a rank failed, crashed or took longer than ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        calls = [json.dumps([rank, world, folder, function, list(arguments)]) for rank in range(world)]
        # One order of sets on all ranks: diffusers writes one into its configurations.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
        logs = [Path(folder, f"log{rank}") for rank in range(world)]
        processes = []
        for call, log in zip(calls, logs, strict=True):
            with log.open("w") as file:
                processes.append(subprocess.Popen([*command, call], env=environment, stdout=file, stderr=file))
        try:
            end = time.monotonic() + limit
            while any(process.poll() is None for process in processes):
                if time.monotonic() > end:
                    raise RuntimeError(f"{function} took longer than {limit:.0f} s")
                if any(process.poll() not in (None, 0) for process in processes):
                    break
                time.sleep(0.05)
            for rank, process in enumerate(processes):
                if process.poll() not in (None, 0):
                    said = logs[rank].read_text(errors="replace").strip().splitlines() or ["no word"]
                    raise RuntimeError(f"rank {rank}, exit code {process.returncode}: {said[-1][:300]}")
            return [json.loads(Path(folder, f"answer{rank}").read_text()) for rank in range(world)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def as_rank(call: str) -> None:
    """One rank of `together`."""
    rank, world, folder, function, arguments = json.loads(call)
    quieten()
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    answer = RANK_FUNCTIONS[function](*arguments)
    Path(folder, f"answer{rank}").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def try_collectives(names: list[str]) -> dict[str, str]:
    """On a rank: for each operation over gloo with tensors on the device, ``""`` or why not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    other, x = 1 - rank, torch.full((4,), float(rank + 1), device=DEVICE)
    parts = [torch.zeros(4, device=DEVICE) for _ in range(world)]

    def transfer(batched: bool) -> Tensor:
        got = torch.zeros(4, device=DEVICE)
        pairs = [(dist.irecv, got), (dist.isend, x)]
        if batched:
            works = dist.batch_isend_irecv([dist.P2POp(op, tensor, other) for op, tensor in pairs])
        else:
            works = [op(tensor, other) for op, tensor in pairs]
        for work in works:
            assert work is not None
            work.wait()
        return got - other - 1

    def reduced() -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total - 3

    def broadcast() -> Tensor:
        given = x.clone()
        dist.broadcast(given, 0)
        return given - 1

    def gathered() -> Tensor:
        dist.all_gather(parts, x)
        return torch.stack([part - number - 1 for number, part in enumerate(parts)])

    def into_tensor() -> Tensor:
        got = torch.zeros(8, device=DEVICE)
        dist.all_gather_into_tensor(got, x)
        return got - torch.tensor([1.0] * 4 + [2.0] * 4, device=DEVICE)

    def exchanged(uneven: bool) -> Tensor:
        # Uneven: three elements for rank 0, one for rank 1, from both.
        sizes = [3, 1] if uneven else [2, 2]
        got = torch.zeros(2 * sizes[rank], device=DEVICE)
        dist.all_to_all_single(got, x, [sizes[rank]] * 2, sizes)
        half = sizes[rank]
        return got - torch.tensor([1.0] * half + [2.0] * half, device=DEVICE)

    checks: dict[str, Callable[[], Tensor]] = {
        "all_reduce": reduced,
        "broadcast": broadcast,
        "all_gather": gathered,
        "all_gather_into_tensor": into_tensor,
        "all_to_all_single": lambda: exchanged(False) + 0 * exchanged(True).sum(),
        "isend": lambda: transfer(False),
        "batch_isend_irecv": lambda: transfer(True),
    }
    found = {}
    for name in names:
        try:
            found[name] = "" if not bool(checks[name]().any()) else "another value came"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return found


SAFE = ["all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_to_all_single"]
# gloo may read a device's address as if it were the host's: a crash there must not hide the others.
RISKY = ["isend", "batch_isend_irecv"]


@cache
def carried() -> dict[str, str]:
    """What gloo carries between two ranks with tensors on this device: ``""``, or why not."""
    found: dict[str, str] = {}
    for names in (SAFE, *([name] for name in RISKY)) if ON_GPU else (SAFE + RISKY,):
        try:
            for answer in together(2, "try_collectives", 90, names):
                found |= {name: found.get(name) or said for name, said in answer.items()}
        except RuntimeError as error:
            found |= dict.fromkeys(names, str(error))
    return found


def collectives(quick: bool) -> Iterator[Row]:
    """What gloo carries with tensors on the device; nothing of ditmesh. What it does not is copied through the host."""
    for name, said in carried().items():
        yield {"operation": name, **({"through the host": said} if said else {"direct": True}), "ok": True}


def must_be_staged() -> bool:
    """Whether messages between ranks have to be copied through the host; said by whoever has tried it already."""
    said = os.environ.get(STAGED)
    return any(carried().values()) if said is None else said == "1"


def staged_through_host() -> Any:
    """Let messages of the process group travel as copies in host memory, for what gloo does not carry."""

    def host(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)

    class Later:
        def __init__(self, work: Any, tensor: Tensor, copy: Tensor, receives: bool) -> None:
            self.work, self.tensor, self.copy, self.receives = work, tensor, copy, receives

        def wait(self, *timeout: Any) -> bool:
            self.work.wait(*timeout)
            if self.receives:
                self.tensor.copy_(self.copy)
            return True

        def is_completed(self) -> bool:
            return self.work.is_completed()

    isend, irecv = dist.isend, dist.irecv

    def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Later:
        there = host(tensor)
        return Later(isend(there, dst, group, tag), tensor, there, False)

    def receive(tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Later:
        there = torch.empty(tensor.shape, dtype=tensor.dtype)
        return Later(irecv(there, src, group, tag), tensor, there, True)

    @dataclass
    class Operation:
        op: Callable[..., Later]
        tensor: Tensor
        peer: int
        group: Any = None
        tag: int = 0

    def batch(operations: list[Operation]) -> list[Later]:
        return [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]

    def whole(name: str, changed: tuple[int, ...]) -> Callable[..., Any]:
        """A collective on host copies; ``changed``: which of its arguments it writes to."""
        original = getattr(dist, name)

        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            copies = [
                host(one)
                if isinstance(one, Tensor)
                else [host(part) for part in one]
                if isinstance(one, list) and one and isinstance(one[0], Tensor)
                else one
                for one in args
            ]
            original(*copies, **kwargs)
            for number in changed:
                pairs = [(args[number], copies[number])] if isinstance(args[number], Tensor) else ()
                for target, source in pairs or zip(args[number], copies[number], strict=True):
                    target.copy_(source)
            return mock.Mock(wait=lambda *_: True, is_completed=lambda: True) if async_op else None

        return call

    new = {"isend": send, "irecv": receive, "P2POp": Operation, "batch_isend_irecv": batch}
    new |= {name: whole(name, (0,)) for name in SAFE}
    return mock.patch.multiple(dist, **new)


@contextmanager
def carrying(staged: bool) -> Iterator[None]:
    """The process group as it is, or through the host."""
    with staged_through_host() if staged else nullcontext():
        yield


@torch.no_grad()
def one_strategy(family: str, config: dict[str, Any], staged: bool) -> dict[str, Any]:
    """On a rank: errors of a strategy against the plain model in the same process.

    An exact strategy runs a pipeline; a stale one the transformer at inputs that do not move, where it is exact too.
    """
    package = ditmesh()
    from support import pipelines
    from support.models import inputs, run, sizes, tiny
    from support.stale import next_step

    stale = "warmup" in config
    config = {**config, "shared_memory": False}
    config["speeds"] = tuple(config["speeds"]) if "speeds" in config else None
    if not stale:
        pipe = pipelines.MAKERS[family.lower()]()
        pipe.transformer = copy.deepcopy(pipe.transformer).to(DEVICE)
        call = moved(pipelines.arguments(family.lower(), [1, 2], steps=STEPS), torch.float32)
        pipe.set_progress_bar_config(disable=True)

        def values() -> Tensor:
            # Generators go on where they are: each call gets new ones.
            generators = [torch.Generator().manual_seed(row) for row in range(2)]
            return pipe(**{**call, "generator": generators}).images

        truth = values()
        with carrying(staged), package.parallelized(pipe, config):
            return {"error": relative_error(values(), truth), "digest": digest(values())}
    model = copy.deepcopy(tiny(family)).to(DEVICE)
    given = moved(inputs(family, sizes(family)["B=2 ragged"]), torch.float32)
    truth = run(model, given)
    errors = []
    with carrying(staged), package.parallelized(model, config):
        for _ in range(3):
            if "exchange" in config:
                next_step(model)
            errors.append(relative_error(run(model, given), truth))
    return {"error": max(errors[:1] if config.get("exchange") == "naive" else errors)}


def some_strategies(jobs: list[tuple[str, dict[str, Any]]], staged: bool) -> list[dict[str, Any]]:
    """On a rank: `one_strategy` for each family and configuration."""
    return [one_strategy(family, config, staged) for family, config in jobs]


def strategies(quick: bool) -> Iterator[Row]:
    """Two ranks on one device over gloo, every strategy, against the plain model in float32."""
    ditmesh()
    staged = must_be_staged()
    names = ["ulysses", "ring", "tensor", "displaced", "pipe"] if quick else list(RANKS)
    # Ranks of their own for every strategy, so that a crash or a hang is that of one; starting them takes its time.
    for group in [names] if quick else [[name] for name in names]:
        jobs = [(name, family) for name in group for family in (["SD3"] if quick else ["SD3", "Flux"])]
        rows = [{"strategy": n, "model": f, "messages": "through the host" if staged else "direct"} for n, f in jobs]
        try:
            per_rank = together(2, "some_strategies", 120, [(family, RANKS[name]) for name, family in jobs], staged)
        except RuntimeError as error:
            yield from ({**row, "ok": False, "failed": str(error)} for row in rows)
            continue
        for row, answers in zip(rows, zip(*per_rank, strict=True), strict=True):
            error = max(answer["error"] for answer in answers)
            same = len({answer.get("digest") for answer in answers}) == 1
            allowed = 5e-2 if "int8" in row["strategy"] else 1e-4
            yield {**row, "error": error, "ranks agree": same, "ok": same and error <= allowed}


@torch.no_grad()
def reproducible_bits(name: str, dtype: str, configs: list[dict[str, Any]], staged: bool) -> list[str]:
    """On a rank: digests of a forward in reproducible mode, for every configuration."""
    package = ditmesh()
    from support.models import inputs, run, sizes, tiny

    model = copy.deepcopy(tiny(name)).to(DEVICE, DTYPES[dtype])
    arguments = moved(inputs(name, sizes(name)["B=2 ragged"]), DTYPES[dtype])
    found = []
    for config in configs:
        wanted = {**config, "reproducible": True, "shared_memory": False}
        with carrying(staged), package.parallelized(model, wanted):
            found += [digest(run(model, arguments)), digest(run(model, arguments))]
    return found


def reproducible(quick: bool) -> Iterator[Row]:
    """The bits of reproducible mode on one and on two ranks, twice each."""
    ditmesh()
    staged = must_be_staged()

    def check(name: str, dtype: str) -> Row:
        bits = together(1, "reproducible_bits", 120, name, dtype, [{}], False)
        bits += together(2, "reproducible_bits", 120, name, dtype, [{"ulysses": 2}, {"ring": 2}], staged)
        found = {one for answer in bits for one in answer}
        return {"digests": len(found), "digest": min(found), "ok": len(found) == 1}

    for name in ["Flux"] if quick else ["Flux", "SD3", "Wan", "QwenImage"]:
        for dtype in ["float32"] if quick else DTYPES:
            yield guarded({"model": name, "dtype": dtype}, lambda n=name, d=dtype: check(n, d))


RANK_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "try_collectives": try_collectives,
    "some_strategies": some_strategies,
    "reproducible_bits": reproducible_bits,
}


# --- what it costs -------------------------------------------------------------------------------------------------


def host(quick: bool) -> Iterator[Row]:
    """Microseconds and synchronisations of the host a block: a Flux of 19 + 38 blocks that computes next to nothing."""
    package = ditmesh()
    from overhead import BLOCKS, small_flux, small_inputs
    from support.syncs import count_syncs

    model = copy.deepcopy(small_flux()).to(DEVICE)
    arguments = moved(small_inputs(), torch.float32)
    blocks, runs = sum(BLOCKS), 3 if quick else 30

    @torch.no_grad()
    def issue() -> float:
        """Seconds until everything is queued: the host's part."""
        wait()
        start = time.perf_counter()
        model(**arguments)
        return time.perf_counter() - start

    def best() -> float:
        return min(issue() for _ in range(runs + 2)) / blocks * 1e6

    def row(config: dict[str, Any] | None) -> Row:
        before = best()
        with nullcontext() if config is None else package.parallelized(model, config):
            micros = best()
            with count_syncs() as syncs:
                issue()
            seen = _synchronisations(issue)
        found = {"microseconds a block": micros, "over diffusers": micros - before, "counted": len(syncs.found)}
        return {**found, **({} if seen is None else {"seen by CUDA": seen}), "ok": True}

    for name, config in {
        "diffusers": None,
        "ditmesh, 1 rank": {},
        "patches=2, 1 rank": {"patches": 2},
        "reproducible, 1 rank": {"reproducible": True},
    }.items():
        yield guarded({"contender": name}, lambda c=config: row(c))


def _synchronisations(function: Callable[[], Any]) -> int | None:
    """Synchronising calls that CUDA itself reports; None without CUDA."""
    if not ON_GPU:
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in said)


def flux(quick: bool) -> Iterator[Row]:
    """One double and one single block of FLUX.1 at its true widths, 1024 x 1024 pixels: milliseconds and memory."""
    package = ditmesh()
    import diffusers

    full = ON_GPU and not quick
    heads, side, text = (24, 64, 512) if full else (4, 8, 16)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    with torch.device(DEVICE):
        torch.manual_seed(0)
        model: torch.nn.Module = diffusers.FluxTransformer2DModel(
            num_layers=1,
            num_single_layers=1,
            num_attention_heads=heads,
            joint_attention_dim=4096 if full else 64,
            pooled_projection_dim=768,
            guidance_embeds=True,
        )
    model = model.eval().to(dtype)
    generator = torch.Generator().manual_seed(0)
    rows, cols = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    arguments = {
        "hidden_states": torch.randn(1, side * side, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, 4096 if full else 64, generator=generator),
        "pooled_projections": torch.randn(1, 768, generator=generator),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, cols], dim=-1).reshape(-1, 3).float(),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
    arguments = moved(arguments, dtype)

    @torch.no_grad()
    def forward() -> Tensor:
        return model(**arguments)[0]

    truth = forward()
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e9

    def row(config: dict[str, Any] | None, simulated: bool) -> Row:
        way = package.simulated if simulated else package.parallelized
        runs = 3 if not ON_GPU else 20
        before = milliseconds(forward, runs)
        with nullcontext() if config is None else way(model, config):
            value = forward()
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated() if ON_GPU else 0
            took = milliseconds(forward, runs)
            peak = (torch.cuda.max_memory_allocated() - base) / 2**20 if ON_GPU else None
        error = relative_error(value, truth)
        found = {"ms": took, "over diffusers": took / before, "error": error}
        return {**found, **({} if peak is None else {"activations, MiB": peak}), "ok": error < TOLERANCES["bfloat16"]}

    size = {"tokens": f"{side * side} + {text}", "billion weights": round(parameters, 3)}
    for name, config, simulated in (
        ("diffusers", None, False),
        ("ditmesh, 1 rank", {}, False),
        ("ring=2, simulated", {"ring": 2}, True),
        ("patches=4, 1 rank", {"patches": 4}, False),
        ("reproducible, 1 rank", {"reproducible": True}, False),
    ):
        yield guarded({"contender": name, **size}, lambda c=config, s=simulated: row(c, s))


# --- the parts, one after the other --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        run: yields rows; each that is not ``ok`` fails the part.
        seconds: its time budget on a GPU.
    """

    run: Callable[[bool], Iterator[Row]]
    seconds: float


# Their budgets come to ten minutes.
PARTS = {
    "kernels": Part(kernels, 45),
    "backends": Part(backends, 60),
    "parity": Part(parity, 120),
    "collectives": Part(collectives, 60),
    "strategies": Part(strategies, 150),
    "reproducible": Part(reproducible, 75),
    "host": Part(host, 40),
    "flux": Part(flux, 50),
}


def quieten() -> None:
    """Warnings of libraries say nothing about ditmesh."""
    warnings.filterwarnings("ignore")
    with suppress(ImportError):
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
        diffusers.utils.logging.disable_progress_bar()


def run_part(name: str, quick: bool, path: Path) -> None:
    """In a process of its own: write a line for every row as it comes."""
    quieten()
    if not ON_GPU and quick:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    with path.open("a", encoding="utf-8") as lines:
        try:
            for row in PARTS[name].run(quick):
                lines.write(json.dumps(row) + "\n")
                lines.flush()
        except Skipped as reason:
            lines.write(json.dumps({"skipped": str(reason)}) + "\n")
        except ModuleNotFoundError as error:
            lines.write(json.dumps({"skipped": f"{error.name} is not installed"}) + "\n")
        except Exception as error:
            traceback.print_exc()
            lines.write(json.dumps({"ok": False, "failed": f"{type(error).__name__}: {error}"[:300]}) + "\n")


def guarded_part(name: str, quick: bool, limit: float) -> dict[str, Any]:
    """A part's rows and what became of it, whatever happens to its process."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = Path(folder, "rows")
        path.touch()
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, str(path)]
        process = subprocess.Popen([*command, *(["--quick"] if quick else [])], start_new_session=True)
        ended = ""
        try:
            code = process.wait(limit)
            ended = f"its process ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"its {limit:.0f} seconds were over"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    failed = [row for row in rows if row.get("ok") is False]
    skipped = [row["skipped"] for row in rows if "skipped" in row]
    status = "failed" if failed or ended else "skipped" if len(skipped) == len(rows) else "ok"
    found = {"status": status, "seconds": round(time.perf_counter() - start, 1), "rows": rows}
    return {**found, **({"ended": ended} if ended else {})}


def as_markdown(result: dict[str, Any]) -> str:
    """The whole check as tables."""
    lines = [f"{result['machine']['text']}.", ""]
    if not result["cuda"]:
        lines += ["No CUDA device: on the CPU, at reduced sizes. Nothing here says anything about a GPU.", ""]
    lines += ["| part | | seconds | rows | failed | skipped |", "|---|---|---|---|---|---|"]
    for name, part in result["parts"].items():
        failed = sum(row.get("ok") is False for row in part["rows"])
        skipped = sum("skipped" in row for row in part["rows"])
        word = part["status"] + (f": {part['ended']}" if "ended" in part else "")
        lines.append(f"| {name} | {word} | {part['seconds']} | {len(part['rows'])} | {failed} | {skipped} |")
    for name, part in result["parts"].items():
        doc = (PARTS[name].run.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"### {name}", "", doc, ""]
        columns = list(dict.fromkeys(column for row in part["rows"] for column in row))
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)] if columns else []
        for row in part["rows"]:
            cells = [row.get(column, "") for column in columns]
            shown = [f"{cell:.3g}" if isinstance(cell, float) else str(cell).replace("|", "/") for cell in cells]
            lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def missing() -> list[str]:
    """What ditmesh uses and this machine does not have."""
    used = ["diffusers", "transformers", "pydantic", "yaml", "greenlet", "numpy", "PIL", "safetensors", "rich", "typer"]
    return [name for name in used if importlib.util.find_spec(name) is None]


def main() -> int:
    """Run the parts, write what was found, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=list(PARTS), help="only these")
    parser.add_argument("--quick", action="store_true", help="the least of everything")
    parser.add_argument("--budget", type=float, default=1.0 if ON_GPU else 10.0, help="factor of every time budget")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        as_rank(options.rank)
        return 0
    if options.child:
        run_part(options.child[0], options.quick, Path(options.child[1]))
        return 0
    lacking = missing()
    if "diffusers" in lacking:
        print("diffusers is not installed: nothing was checked.")
        return 2
    result: dict[str, Any] = {"machine": describe_machine(), "cuda": ON_GPU, "missing": lacking, "parts": {}}
    print(result["machine"]["text"], flush=True)
    if lacking:
        print(f"not installed: {', '.join(lacking)}", flush=True)
    for name in options.part or PARTS:
        print(f"{name} …", end=" ", flush=True)
        part = result["parts"][name] = guarded_part(name, options.quick, PARTS[name].seconds * options.budget)
        print(f"{part['status']} in {part['seconds']} s", *([part["ended"]] if "ended" in part else []), flush=True)
        for row in part["rows"]:
            if row.get("ok") is False or (set(row) == {"skipped"}):
                print(f"  {row}", flush=True)
        if name == "collectives" and part["status"] == "ok":
            os.environ.setdefault(STAGED, "1" if any("through the host" in row for row in part["rows"]) else "0")
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if options.markdown:
            options.markdown.write_text(as_markdown(result), encoding="utf-8")
    if not ON_GPU:
        print("No CUDA device: all of this ran on the CPU, at reduced sizes.")
    states = [part["status"] for part in result["parts"].values()]
    return 1 if "failed" in states else 0 if "ok" in states else 2


if __name__ == "__main__":
    sys.exit(main())

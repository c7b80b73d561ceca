"""Parts that need one process: kernels, parity, what the host does, what a block costs, what waits, memory."""

from __future__ import annotations

import copy
import platform
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from basics import (
    DEVICE,
    DTYPES,
    ON_GPU,
    TOLERANCES,
    Row,
    Skipped,
    ditmesh,
    guarded,
    milliseconds,
    moved,
    refusals,
    relative_error,
    wait,
)
from torch import Tensor
from workers import Workers

# --- the machine, kernels and attention backends -------------------------------------------------------------------


def machine(quick: bool) -> Iterator[Row]:
    """Versions, topology, and what `ditmesh doctor` says of the machine."""
    package = ditmesh()
    from ditmesh.launch.hardware import describe_machine, environment, missing

    facts = describe_machine()
    yield {"what": "ditmesh", "found": package.__version__, "ok": True}
    yield {"what": "versions", "found": ", ".join(f"{k} {v}" for k, v in facts["versions"].items()), "ok": True}
    yield {"what": "platform", "found": platform.platform(), "ok": True}
    for name in ("driver", "nccl", "torch_cuda"):
        yield {"what": name, "found": str(facts[name]), "ok": True}
    for name, value in environment(DEVICE).items():
        yield {"what": f"receipt: {name}", "found": value, "ok": True}
    for sentence in missing(facts):
        yield {"what": "missing", "found": sentence, "ok": True}
    if shutil.which("nvidia-smi"):
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
        yield {"what": "topology", "found": topology.stdout.strip(), "ok": True}


# Lengths of queries and keys: usual, odd, no keys.
LENGTHS = {"even": (128, 128), "odd": (130, 57), "no keys": (33, 0)}


def kernels(quick: bool) -> Iterator[Row]:
    """Kernels with a log-sum-exp, their backward, and a merge of two halves, against float64; blind queries too."""
    ditmesh()
    for name in DTYPES:
        for dim in (64, 72) if quick else (40, 60, 64, 72, 96, 128, 256):
            for lengths in LENGTHS if dim in (60, 64) else ("odd",):
                for masked in (False, True) if lengths != "no keys" else (False,):
                    row = {"dtype": name, "head dim": dim, "lengths": lengths, "mask": masked}
                    yield guarded(row, partial(_kernel, name, dim, lengths, masked))


def _kernel(name: str, dim: int, lengths: str, masked: bool) -> Row:
    from ditmesh.attention.kernels import attend_backward, attend_with_lse, merge_

    dtype, (queries, keys) = DTYPES[name], LENGTHS[lengths]
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, dim, device=DEVICE).to(dtype)
    k, v = (torch.randn(2, 4, keys, dim, device=DEVICE).to(dtype) for _ in range(2))
    whole, lse = attend_with_lse(q, k, v)
    if not keys:
        return {"ok": bool((whole == 0).all() and (lse == float("-inf")).all())}
    mask = None
    if masked:
        mask = torch.rand(2, 1, queries, keys, device=DEVICE) > 0.3
        mask[..., 0] = True
        mask[0, :, 5] = False
        whole, lse = attend_with_lse(q, k, v, mask)
    doubles = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores = doubles[0] @ doubles[1].transpose(-1, -2) / dim**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    truth_lse = torch.logsumexp(scores, dim=-1)
    dead = truth_lse == float("-inf")
    weights = scores.masked_fill(dead.unsqueeze(-1), 0).softmax(dim=-1).masked_fill(dead.unsqueeze(-1), 0)
    truth = weights @ doubles[2]
    grad = torch.randn_like(q)
    gradients = torch.autograd.grad(truth, doubles, grad.double())
    halves = [
        attend_with_lse(q, k[:, :, part], v[:, :, part], None if mask is None else mask[..., part])
        for part in (slice(0, keys // 2), slice(keys // 2, keys))
    ]
    merged, merged_lse = merge_(halves[0][0].float(), halves[0][1], *halves[1])
    found = attend_backward(grad, q, k, v, whole, lse, mask)
    errors = {
        "error": relative_error(whole, truth.detach()),
        "merged": relative_error(merged, truth.detach()),
        "lse": max(relative_error(one[~dead], truth_lse.detach()[~dead]) for one in (lse, merged_lse)),
        "backward": max(relative_error(one, each) for one, each in zip(found, gradients, strict=True)),
    }
    nothing = bool(((lse == float("-inf")) == dead).all() and ((merged_lse == float("-inf")) == dead).all())
    return {**errors, "ok": nothing and max(errors.values()) < 2 * TOLERANCES[name]}


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
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    names = ["native", "_native_math"] if quick else [backend.value for backend in AttentionBackendName]
    for name in names:
        yield guarded({"backend": f"diffusers {name}", "dtype": "bfloat16"}, lambda n=name: _diffusers_backend(n))
        # A backend that was chosen for one model is every model's.
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


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


# --- what it costs -------------------------------------------------------------------------------------------------


def host(quick: bool) -> Iterator[Row]:
    """Microseconds and synchronisations of the host a block: a Flux of 19 + 38 blocks that computes next to nothing."""
    package = ditmesh()
    from overhead import BLOCKS, small_flux, small_inputs
    from support.syncs import count_syncs

    model = copy.deepcopy(small_flux()).to(DEVICE)
    arguments = moved(small_inputs(), torch.float32)
    blocks, runs = sum(BLOCKS), 3 if quick else 10

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


def _flux_arguments(side: int, text: int, width: int) -> dict[str, Any]:
    """Arguments of a FLUX.1 transformer for side x side tokens of the picture and ``text`` tokens of that width."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return {
        "hidden_states": torch.randn(1, side * side, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, width, generator=generator),
        "pooled_projections": torch.randn(1, 768, generator=generator),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, cols], dim=-1).reshape(-1, 3).float(),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }


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
    arguments = moved(_flux_arguments(side, text, 4096 if full else 64), dtype)

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
            launched = _launches(forward)
            peak = (torch.cuda.max_memory_allocated() - base) / 2**20 if ON_GPU else None
        error = relative_error(value, truth)
        found = {"ms": took, "over diffusers": took / before, "error": error}
        memory = {} if peak is None else {"activations, MiB": peak}
        return {**found, **memory, **launched, "ok": error < TOLERANCES["bfloat16"]}

    size = {"tokens": f"{side * side} + {text}", "billion weights": round(parameters, 3)}
    full_contenders: tuple[tuple[str, dict[str, Any] | None, bool], ...] = (
        ("diffusers", None, False),
        ("ditmesh, 1 rank", {}, False),
        ("ring=2, simulated", {"ring": 2}, True),
        ("ring=4, simulated", {"ring": 4}, True),
        ("ring=8, simulated", {"ring": 8}, True),
        ("patches=4, 1 rank", {"patches": 4}, False),
        ("reproducible, 1 rank", {"reproducible": True}, False),
        ("compiled, 1 rank", {"compile": "inductor" if ON_GPU else "eager"}, False),
    )
    for name, config, simulated in full_contenders[:3] if quick else full_contenders:
        yield guarded({"contender": name, **size}, lambda c=config, s=simulated: row(c, s))


def _launches(function: Callable[[], Any]) -> Row:
    """Kernels of a call, and for how long the device had none: a host that is too slow shows in the gaps."""
    if not ON_GPU:
        return {}
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    wait()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        function()
        wait()
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    gaps, end = 0.0, kernels[0][1] if kernels else 0.0
    for start, stop in kernels[1:]:
        gaps += max(0.0, start - end)
        end = max(end, stop)
    return {"launches": len(kernels), "gaps, ms": gaps / 1e3}


# --- what waits for the device -------------------------------------------------------------------------------------


def waits(quick: bool) -> Iterator[Row]:
    """Three steady steps in which CUDA raises an error where the host waits; on a CPU such places are counted.

    Where plain diffusers waits by itself, CUDA's warnings are counted, and there may be no more of them.
    """
    package = ditmesh()
    from support.models import inputs, run, sizes, tiny
    from support.syncs import count_syncs

    plain = copy.deepcopy(tiny("Flux")).to(DEVICE)
    arguments = moved(inputs("Flux", sizes("Flux")["B=1"]), torch.float32)
    run(plain, arguments)
    theirs = _synchronisations(lambda: [run(plain, arguments) for _ in range(3)]) or 0
    if ON_GPU:
        yield {"contender": "diffusers", "seen by CUDA": theirs, "ok": True}

    def check(config: dict[str, Any], simulated: bool) -> Row:
        model = copy.deepcopy(plain)
        with (package.simulated if simulated else package.parallelized)(model, config):
            for _ in range(2):
                run(model, arguments)
            wait()
            if not ON_GPU:
                with count_syncs() as syncs:
                    for _ in range(3):
                        run(model, arguments)
                return {"counted": len(syncs.of()), "ok": not syncs.of()}
            if theirs:
                seen = _synchronisations(lambda: [run(model, arguments) for _ in range(3)]) or 0
                return {"seen by CUDA": seen, "ok": seen <= theirs}
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    run(model, arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return {"ok": True}

    contenders: dict[str, tuple[dict[str, Any], bool]] = {
        "1 rank": ({}, False),
        "patches=2, 1 rank": ({"patches": 2, "warmup": "fixed(1)"}, False),
        "reproducible, 1 rank": ({"reproducible": True}, False),
        "ring=2, simulated": ({"ring": 2}, True),
        "displaced, simulated": ({"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}, True),
    }
    for name, (config, simulated) in list(contenders.items())[: 3 if quick else None]:
        yield guarded({"contender": name}, partial(check, config, simulated))


# --- memory --------------------------------------------------------------------------------------------------------


def memory(quick: bool) -> Iterator[Row]:
    """Activations of a step that the memory check predicts, against the most that was allocated."""
    package = ditmesh()
    import diffusers

    from ditmesh.layout import layout_of
    from ditmesh.memory.sizes import Workload
    from ditmesh.memory.walk import denoise

    full = ON_GPU and not quick
    heads, side, text = (24, 64, 512) if full else (4, 8, 16)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    model: torch.nn.Module = diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=2, num_attention_heads=heads, joint_attention_dim=64, guidance_embeds=True
    )
    model = model.eval().to(DEVICE, dtype)
    arguments = moved(_flux_arguments(side, text, 64), dtype)
    asked, how = Workload(side, side, text=text, branches=1), dtype

    def check(config: dict[str, Any]) -> Row:
        parallel = package.ParallelConfig(**config)
        settings = {key: value for key, value in model.config.items() if not key.startswith("_")}
        foreseen = denoise("FluxTransformer2DModel", settings, layout_of(model), parallel, asked, how)
        row: Row = {"weights, MiB": foreseen.weights / 2**20, "foreseen, MiB": foreseen.activations / 2**20}
        if not ON_GPU:
            return {**row, "ok": foreseen.activations > 0}
        with torch.no_grad(), package.simulated(model, config) if config else package.parallelized(model, {}):
            for _ in range(2):
                wait()
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
                model(**arguments)
            wait()
            taken = (torch.cuda.max_memory_allocated() - base) / 2**20
        # Simulated ranks are there one after the other, and lie in one memory together.
        close = config or abs(taken / row["foreseen, MiB"] - 1) < 0.25
        return {**row, "taken, MiB": taken, "ok": bool(close)}

    for name, config in {"1 rank": {}, "ring=2, simulated": {"ring": 2}}.items():
        yield guarded({"contender": name}, partial(check, config))


PARTS = {
    "machine": (machine, 30),
    "kernels": (kernels, 45),
    "backends": (backends, 45),
    "parity": (parity, 110),
    "waits": (waits, 30),
    "host": (host, 60),
    "flux": (flux, 90),
    "memory": (memory, 30),
}
# Each runs in one worker.
FUNCTIONS = {name: run for name, (run, _) in PARTS.items()}


def streamed(name: str, function: Callable[[bool], Iterator[Row]]) -> Callable[[Workers, bool], Iterator[Row]]:
    """A part that one worker runs by itself."""

    def part(workers: Workers, quick: bool) -> Iterator[Row]:
        yield from workers.stream(name, quick)

    part.__doc__ = function.__doc__
    return part

"""This machine as a cost model sees it: speeds of a device and of the links between ranks, measured.

Every rank measures at once, as ranks compute at once; of repeats the fastest counts. A figure is the least-squares fit,
in relative terms, of the line that `ditmesh.forecast.costs.hardware` draws through it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

from ...config import ParallelConfig
from ...launch import Launcher
from ..costs.hardware import Device, Hardware, LinkSpeed, TransferSpeed

if TYPE_CHECKING:
    import torch

    from ...comm.mesh import Mesh

REPEATS = 7
# Rows, inputs and outputs of a block's matrix products.
PRODUCTS = tuple(product((16, 64, 144, 288, 576, 1152), ((256, 256), (512, 512), (512, 2048), (2048, 512))))
# Queries and keys of attention; heads and their width.
LENGTHS = ((64, 256), (256, 256), (128, 1152), (576, 1152), (1152, 1152), (1024, 2304))
HEADS, WIDTH = 4, 64
# Elements that are read and written.
ELEMENTS = (2**14, 2**17, 2**19, 2**21)
# Bytes of a rank's tensor in a transfer.
BYTES = (2**14, 2**17, 2**20, 2**22)
# Larger matrices, sequences and messages for GPUs, which are not full before.
LARGER = 8


def profile(pool: Launcher) -> tuple[Hardware, Hardware | None]:
    """Measure the machine with the ranks of a pool.

    Returns:
        The profile with the fastest link between the ranks, and one with the process group, where that is another.
    """
    every = pool.run(measure)
    alone = pool.run(alone_on_first)[0]
    first = every[0]
    together = max(one["busy"] for one in every)
    device = Device(**first["device"], contention_factor=max(1.0, together / alone))
    links = [[one["links"][at] for one in every] for at in range(len(first["links"]))]
    made = [Hardware(device=device, link=_slowest(each), devices=pool.world_size) for each in links]
    if not made:
        made = [Hardware(device=device, link=LinkSpeed(name="none", latency=0, bandwidth=1e12, source="one rank"))]
    return made[0], made[1] if len(made) > 1 else None


def measure() -> dict[str, Any]:
    """One rank's figures."""
    import torch
    import torch.distributed as dist

    from ...comm.mesh import Mesh

    links: list[dict[str, Any]] = []
    world = dist.get_world_size() if dist.is_initialized() else 1
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    where = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    made = _device(where)
    _meet()
    busy = _products(where, 576, 512, 2048)
    for shared_memory in (True, False) if world > 1 else ():
        mesh = Mesh(ParallelConfig(ring=world, shared_memory=shared_memory))
        if mesh.ring.transport not in [one["name"] for one in links]:
            links.append(_link(mesh))
        mesh.close()
    return {"device": made, "busy": busy, "links": links}


def alone_on_first() -> float:
    """Seconds of a product on the first rank while the others wait."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    where = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    _meet()
    first = not dist.is_initialized() or dist.get_rank() == 0
    seconds = _products(where, 576, 512, 2048) if first else 0.0
    _meet()
    return seconds


def _meet() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def best(call: Callable[[], object], where: torch.device) -> float:
    """Seconds of the fastest of some calls, after two that do not count."""
    import torch

    times = []
    for _ in range(REPEATS + 2):
        if where.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if where.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[2:])


def _products(where: torch.device, rows: int, inputs: int, outputs: int) -> float:
    import torch
    import torch.nn.functional as F

    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    x, w = (torch.randn(shape, device=where, dtype=dtype) for shape in ((1, rows, inputs), (outputs, inputs)))
    b = torch.randn(outputs, device=where, dtype=dtype)
    return best(lambda: F.linear(x, w, b), where)


def _device(where: torch.device) -> dict[str, Any]:
    import psutil
    import torch
    import torch.nn.functional as F

    gpu, scale = where.type == "cuda", LARGER if where.type == "cuda" else 1
    dtype = torch.bfloat16 if gpu else torch.float32

    def attention(queries: int, keys: int) -> float:
        q, k, v = (torch.randn(1, HEADS, n, WIDTH, device=where, dtype=dtype) for n in (queries, keys, keys))
        return best(lambda: F.scaled_dot_product_attention(q, k, v), where)

    def elementwise(count: int) -> float:
        x = torch.randn(1, max(1, count // 512), 512, device=where, dtype=dtype)
        scale_, shift = torch.randn(1, 1, 512, device=where, dtype=dtype), torch.randn(512, device=where, dtype=dtype)
        # Four kernels of a block: modulation, gate, activation.
        return best(lambda: F.gelu(x * (1 + scale_) + shift, approximate="tanh"), where) / 4

    sizes = [(m * scale, k * scale, n * scale) for m, (k, n) in PRODUCTS]
    times = [_products(where, *size) for size in sizes]
    speed, rows, columns = _fit_products(sizes, times)
    lengths = [(q * scale, k * scale) for q, k in LENGTHS]
    attended = [attention(*length) for length in lengths]
    attention_speed, queries = _fit_attention(lengths, attended)
    element = 2 if gpu else 4
    counts = [count * scale for count in ELEMENTS]
    line = fit_line([2.0 * count * element for count in counts], [elementwise(count) for count in counts])
    # With the imports of every rank.
    import_module("diffusers.pipelines.pipeline_utils")
    process = psutil.Process().memory_info().rss
    total = torch.cuda.get_device_properties(where).total_memory if gpu else psutil.virtual_memory().total
    return {
        "name": torch.cuda.get_device_name(where) if gpu else platform.machine(),
        "memory": float(total),
        "matmul": speed,
        "attention": attention_speed,
        "bandwidth": line.bandwidth,
        "launch": line.latency,
        "ahead": gpu,
        "rows": rows,
        "columns": columns,
        "queries": queries,
        "runtime": float(process),
        "dtype": str(dtype).removeprefix("torch."),
        "source": f"measured with torch {torch.__version__}, {torch.get_num_threads()} threads",
    }


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> TransferSpeed:
    """``latency + amount / bandwidth`` with the least relative error; neither is below zero."""
    import numpy as np

    a, t = np.asarray(amounts), np.asarray(seconds)
    columns = np.stack([1 / t, a / t], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if latency < 0:
        latency, slope = 0.0, float((a / t).sum() / (a * a / t / t).sum())
    return TransferSpeed(latency=float(latency), bandwidth=float(1 / max(slope, 1e-15)))


def _halves(most: int) -> Iterable[float]:
    return (0.0, *(2.0**power for power in range(most)))


def _fit_products(sizes: Sequence[tuple[int, int, int]], times: Sequence[float]) -> tuple[float, float, float]:
    """FLOP/s, and the rows and columns at which half of them are reached."""
    found = []
    for rows, columns in product(_halves(9), _halves(9)):
        work = [2.0 * (m + rows) * k * (n + columns) for m, k, n in sizes]
        found.append((*_one_speed(work, times), rows, columns))
    _, speed, rows, columns = min(found)
    return speed, rows, columns


def _fit_attention(lengths: Sequence[tuple[int, int]], times: Sequence[float]) -> tuple[float, float]:
    found = []
    for queries in _halves(9):
        work = [4.0 * (q + queries) * k * HEADS * WIDTH for q, k in lengths]
        found.append((*_one_speed(work, times), queries))
    _, speed, queries = min(found)
    return speed, queries


def _one_speed(work: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Squared relative error of the best speed, and the speed."""
    ratios = [amount / seconds for amount, seconds in zip(work, times, strict=True)]
    slope = sum(ratios) / sum(ratio * ratio for ratio in ratios)
    return sum((slope * ratio - 1) ** 2 for ratio in ratios), 1 / slope


def _link(mesh: Mesh) -> dict[str, Any]:
    import torch

    link, size, gpu = mesh.ring, mesh.ring.size, mesh.device.type == "cuda"
    points: dict[str, list[tuple[float, float]]] = {}
    for count in BYTES:
        elements = max(1, count * (LARGER if gpu else 1) // 4 // size)
        mine = torch.ones(elements * size, device=mesh.device)
        parts, lengths = [[piece] for piece in mine.split(elements)], [elements * size] * size
        total = float(mine.nbytes)
        calls: dict[str, tuple[float, Callable[[], object]]] = {
            "all_to_all": ((size - 1) / size, lambda p=parts, n=elements: link.all_to_all(p, [[(n,)]] * size)),
            "shift": (1.0, lambda x=mine: link.shift([x], [tuple(x.shape)]).wait()),
            "all_gather": (size - 1.0, lambda x=mine, n=lengths: link.all_gather(x, n, 0)),
            "all_reduce": (2 * (size - 1) / size, lambda x=mine: link.all_reduce(x)),
            "broadcast": (1.0, lambda x=mine: link.broadcast(x, 0)),
        }
        for name, (sent, call) in calls.items():
            _meet()
            points.setdefault(name, []).append((sent * total, best(call, mesh.device)))
    lines = {name: fit_line(*zip(*of, strict=True)) for name, of in points.items()}
    usual = lines["all_to_all"]
    return {
        "name": link.transport,
        "latency": usual.latency,
        "bandwidth": usual.bandwidth,
        "collectives": {name: line.model_dump() for name, line in lines.items()},
        # The cores that move tensors between CPUs also compute.
        "hidden": 1.0 if gpu else 0.0,
        "source": f"measured between {size} ranks",
    }


def _slowest(links: Sequence[dict[str, Any]]) -> LinkSpeed:
    """The rank with the longest transfers."""
    return LinkSpeed(**max(links, key=lambda one: one["latency"] + 1e6 / one["bandwidth"]))

"""What the engine costs the host: a Flux of 19 + 38 blocks whose arithmetic costs nothing.

    python benchmarks/overhead.py                           # microseconds a block over plain diffusers
    python benchmarks/overhead.py --against ../old/src      # and of another version, in turns
    python benchmarks/overhead.py --profile "ulysses=2"     # where they go, by function

An accelerator hides these microseconds while its queue is full, and waits for every one of them when it is not: small
pictures, many ranks, fast kernels. Each version has a process of its own (with its ranks, one thread each), and the
versions take turns contender by contender, so that a difference compares neighbours in time. In every turn the best
of several forwards counts, over the turns the median. Operations, collectives, bytes of weights that they read and host
synchronisations are counted in one more forward, not timed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Version, against_option, command_line, in_turns, serve, versions, write_figures
from machine import describe_machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BLOCKS = (19, 38)
MODEL = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": BLOCKS[0],
    "num_single_layers": BLOCKS[1],
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "pooled_projection_dim": 8,
    "axes_dims_rope": (2, 2, 4),
}
SIDE, TEXT = 4, 8  # tokens: 4 x 4 of the image, 8 of the text
PLAIN, OWN_ULYSSES = "diffusers", "diffusers' own ulysses=2, over gloo"
# Name -> ranks and settings; None: without ditmesh.
CONTENDERS: dict[str, tuple[int, dict[str, Any] | None]] = {
    PLAIN: (1, None),
    "1 rank": (1, {}),
    "ulysses=2": (2, {"ulysses": 2}),
    "ring=2": (2, {"ring": 2}),
    "tensor=2": (2, {"tensor": 2}),
    "ulysses=2, over gloo": (2, {"ulysses": 2, "shared_memory": False}),
    OWN_ULYSSES: (2, None),
    "reproducible, 1 rank": (1, {"reproducible": True}),
    "precompute, 1 rank": (1, {"precompute": True}),
    "ulysses=2 precompute": (2, {"ulysses": 2, "precompute": True}),
}
# Metadata only: no kernel is launched.
FREE = ("empty", "new_empty", "detach", "lift_fresh", "_reshape_alias", "alias")
# What is measured in every turn, in microseconds a block.
KINDS = ("microseconds", "processor", "plain", "plain processor")


# --- on a rank -----------------------------------------------------------------------------------------------------


@cache
def small_flux() -> torch.nn.Module:
    """Random weights, float32."""
    import diffusers

    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(**MODEL).eval()


@cache
def small_inputs() -> dict[str, Any]:
    """Arguments of its forward, as `FluxPipeline` passes them."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return {
        "hidden_states": torch.randn(1, SIDE * SIDE, MODEL["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT, MODEL["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(1, MODEL["pooled_projection_dim"], generator=generator),
        "timestep": torch.full((1,), 0.5),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, cols], dim=-1).reshape(-1, 3).float(),
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }


@contextmanager
def prepared(name: str) -> Iterator[torch.nn.Module]:
    """The model as a contender has it."""
    import ditmesh

    config = CONTENDERS[name][1]
    if name == OWN_ULYSSES:
        yield _own_ulysses()
    elif config is None:
        yield small_flux()
    elif config.get("precompute"):
        with (
            ditmesh.parallelized(_pipeline(), config) as pipe,
            ditmesh.engine_of(pipe).request("steps") as turn_to,
        ):
            turn_to(pipe)
            # The first two calls are compared with the modules.
            with torch.no_grad():
                for _ in range(2):
                    pipe.transformer(**small_inputs())
            yield pipe.transformer
    else:
        with ditmesh.parallelized(small_flux(), config) as model:
            yield model


@cache
def _pipeline() -> Any:
    """One that nobody asks for a picture, with the model as its transformer."""
    import diffusers

    class Steps(diffusers.DiffusionPipeline):
        def __init__(self, transformer: torch.nn.Module) -> None:
            super().__init__()
            self.register_modules(transformer=transformer)

        def __call__(self) -> None:
            pass

    return Steps(small_flux())


@cache
def _own_ulysses() -> torch.nn.Module:
    """A copy of its own: `enable_parallelism` cannot be undone."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**MODEL).eval()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    # diffusers numbers accelerators, of which a machine without any has none: rank % 0.
    with mock.patch("torch.accelerator.device_count", return_value=1):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2, mesh=mesh))
    return model


def forwards(name: str, runs: int, rounds: int = 4) -> dict[str, list[float]]:
    """Times of this rank, in seconds a forward.

    Args:
        runs: forwards in a round, after one that does not count.
        rounds: on one rank each begins with as many forwards of plain diffusers.

    Returns:
        ``seconds`` of every forward, the ``processor`` seconds that this thread had (which other tenants of a
        machine disturb less), and on one rank those of the ``plain`` model in between.
    """
    found: dict[str, list[float]] = {"seconds": [], "processor": [], "plain": [], "plain processor": []}
    together = CONTENDERS[name][0] > 1
    for _ in range(rounds):
        if not together:
            seconds, processor = _timed(small_flux(), runs, False)
            found["plain"] += seconds
            found["plain processor"] += processor
        with prepared(name) as model:
            seconds, processor = _timed(model, runs, together)
        found["seconds"] += seconds
        found["processor"] += processor
    return found


@torch.no_grad()
def _timed(model: torch.nn.Module, runs: int, together: bool) -> tuple[list[float], list[float]]:
    seconds, processor = [], []
    for _ in range(runs + 1):
        if together:
            torch.distributed.barrier()
        start, used = time.perf_counter(), time.thread_time()
        model(**small_inputs())
        seconds.append(time.perf_counter() - start)
        processor.append(time.thread_time() - used)
    return seconds[1:], processor[1:]


class OperationCounter(TorchDispatchMode):
    """Counts operations: kernels, those that only look at memory otherwise, collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional"):
            kind = "waits" if name == "wait_tensor" else "collectives"
        else:
            kind = "views" if func.is_view or name.startswith(FREE) else "kernels"
        self.counts[kind] += 1
        self.counts["weights"] += sum(one.nbytes for one in args if isinstance(one, torch.nn.Parameter))
        return func(*args, **(kwargs or {}))


def counts(name: str) -> dict[str, float]:
    """Operations, collectives and host synchronisations of one forward on this rank."""
    import ditmesh
    from support.syncs import count_syncs

    with prepared(name) as model, torch.no_grad():
        model(**small_inputs())
        with OperationCounter() as counter:
            model(**small_inputs())
        found: dict[str, float] = dict(counter.counts)
        if name not in (PLAIN, OWN_ULYSSES):
            traffic = ditmesh.engine_of(model).mesh.traffic
            traffic.reset()
            model(**small_inputs())
            # Through shared memory the transfers are no operations of torch.
            found["collectives"] = max(found.get("collectives", 0), sum(traffic.calls.values()))
        with count_syncs() as syncs:
            model(**small_inputs())
        found["host synchronisations"] = len(syncs.found)
    return found


def profile(name: str, runs: int) -> list[tuple[str, float, float, float]]:
    """Functions by their own time: name, calls a block, own and cumulative processor microseconds a block."""
    watch = cProfile.Profile(time.thread_time)
    with prepared(name) as model, torch.no_grad():
        for run in range(runs + 2):
            if CONTENDERS[name][0] > 1:
                torch.distributed.barrier()
            if run > 1:
                watch.enable()
            model(**small_inputs())
            watch.disable()
    rows = []
    measured: dict[tuple[str, int, str], Any] = pstats.Stats(watch).stats  # type: ignore[attr-defined]
    for (file, line, function), (_, calls, own, total, _) in measured.items():
        place = function if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"
        blocks = runs * sum(BLOCKS)
        rows.append((place, calls / blocks, own / blocks * 1e6, total / blocks * 1e6))
    return sorted(rows, key=lambda row: -row[2])


# --- what comes of it ----------------------------------------------------------------------------------------------


def measure(found_in: dict[str, Version], names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Let versions and contenders take turns.

    Returns:
        For every contender and version: `KINDS` of every turn, as `forwards` measures them; ``counts`` a block
        (those of host synchronisations: a forward); ``failed``.
    """
    blocks = sum(BLOCKS)
    found: dict[str, Any] = {name: {version: {kind: [] for kind in KINDS} for version in found_in} for name in names}
    for turn in range(options.repeats):
        for name in names:
            for version in in_turns([*found_in], turn):
                entry = found[name][version]
                if "failed" in entry:
                    continue
                try:
                    per_rank = found_in[version].ask("forwards", CONTENDERS[name][0], 1, name, options.runs)
                    slowest = [max(times) for times in zip(*(one["seconds"] for one in per_rank), strict=True)]
                    entry["microseconds"].append(min(slowest) / blocks * 1e6)
                    for kind in ("processor", "plain", "plain processor"):
                        entry[kind].append(min(per_rank[0][kind], default=0.0) / blocks * 1e6)
                    if not turn:
                        (first, *_) = found_in[version].ask("counts", CONTENDERS[name][0], 1, name)
                        syncs = {key: first.pop(key) for key in list(first) if key == "host synchronisations"}
                        entry["counts"] = {**{key: value / blocks for key, value in first.items()}, **syncs}
                except RuntimeError as error:
                    entry["failed"] = str(error)
    return found


def summary(found: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """A row for every contender and version; ``over`` is the median of the differences to plain diffusers."""
    rows = []
    for name, entries in found.items():
        for version in names:
            entry = entries[version]
            row: dict[str, Any] = {"contender": name, "version": version, **entry.get("counts", {})}
            if "failed" in entry:
                rows.append({**row, "failed": entry["failed"]})
                continue
            # Of the same process and turn where there is one, else of one rank in the same turn.
            alone, other = CONTENDERS[name][0] == 1, found[PLAIN][version]
            plain = entry["plain"] if alone else other["microseconds"]
            used = entry["plain processor"] if alone else other["processor"]
            times = entry["microseconds"]
            row["microseconds"] = statistics.median(times)
            row["processor"] = statistics.median(entry["processor"])
            row["processor over"] = statistics.median(a - b for a, b in zip(entry["processor"], used, strict=True))
            row["over"] = statistics.median(a - b for a, b in zip(times, plain, strict=True))
            if version != names[0] and "failed" not in entries[names[0]]:
                first = entries[names[0]]["microseconds"]
                row["ratio"] = statistics.median(a / b for a, b in zip(times, first, strict=True))
            rows.append(row)
    return rows


def as_table(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    from rich.table import Table

    table = Table(title=f"Flux, {BLOCKS[0]} + {BLOCKS[1]} blocks of width 16: microseconds of the host a block")
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "contender": ("contender", str),
        "version": ("version", str),
        "microseconds": ("microseconds", "{:.0f}".format),
        "over": ("over diffusers", "{:+.0f}".format),
        "processor": ("processor", "{:.0f}".format),
        "processor over": ("over diffusers", "{:+.0f}".format),
        "ratio": ("over the first", "{:.3f}".format),
        "kernels": ("kernels", "{:.1f}".format),
        "views": ("views", "{:.1f}".format),
        "collectives": ("collectives", "{:.2f}".format),
        "weights": ("bytes of weights", "{:.0f}".format),
        "host synchronisations": ("syncs a forward", "{:.0f}".format),
    }
    for column, (title, _) in columns.items():
        table.add_column(title, justify="left" if column in ("contender", "version") else "right")
    for row in rows:
        cells = [show(row[column]) if column in row else "" for column, (_, show) in columns.items()]
        table.add_row(*(cells if "failed" not in row else [*cells[:2], row["failed"][:60]]))
    return table


def show_profile(version: Version, name: str, options: argparse.Namespace, console: Console) -> None:
    """Print where a contender's time goes on rank 0."""
    from rich.table import Table

    rows = version.ask("profile", CONTENDERS[name][0], 1, name, options.runs)[0]
    table = Table(title=f"{name}: processor microseconds a block, under cProfile (which makes calls dearer)")
    for column in ("function", "calls", "own", "with callees"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for place, calls, own, total in rows[: options.top]:
        table.add_row(place, f"{calls:.1f}", f"{own:.1f}", f"{total:.1f}")
    console.print(table)


def main() -> None:
    """Measure, print a table, write the figures."""
    from rich.console import Console

    parser = command_line(__doc__)
    against_option(parser)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--runs", type=int, default=5, help="forwards in a round, four rounds in a turn; the best counts"
    )
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), help="contenders beside plain diffusers")
    parser.add_argument("--profile", choices=list(CONTENDERS), help="profile this contender instead")
    parser.add_argument("--top", type=int, default=40, help="functions of a profile")
    options = parser.parse_args()
    if options.serve:
        serve({"forwards": forwards, "counts": counts, "profile": profile})
        return
    console = Console(width=170)
    with versions(__file__, options.against) as processes:
        if options.profile:
            for version in processes.values():
                show_profile(version, options.profile, options, console)
            return
        names = [name for name in CONTENDERS if name == PLAIN or not options.only or name in options.only]
        found = measure(processes, names, options)
    rows = summary(found, list(processes))
    machine = describe_machine()
    console.print(as_table(rows))
    console.print(machine["text"])
    write_figures({"machine": machine, "model": MODEL, "rows": rows, "turns": found}, options.json)


if __name__ == "__main__":
    main()

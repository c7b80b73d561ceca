"""Two hosts joined by a slow link: every strategy at several rates, against its bound and against one host.

    python benchmarks/links.py                                   # a table; wants a quiet machine, and root
    python benchmarks/links.py --json out.json --picture links.svg
    python benchmarks/links.py --rates 1e9 --only ulysses=2      # one column, one line
    python benchmarks/links.py --report out.json                 # the table of an earlier run's figures
    python benchmarks/links.py --predict                         # what GPUs would see: nothing is run

A host is a set of Linux namespaces, with a network, shared memory and process numbers of its own; the link between
two is a pair of virtual interfaces that a token bucket holds to a rate (headers included: 4.5 % of what TCP sends).
Ranks stay up for a rate and take turns between strategies; the model and its inputs are those of
``benchmarks/exact.py``, and ``cfg`` has a batch of two. Each has one thread.

The bound of an exact strategy is half of one rank's time, and then its bytes over the link; of a stale one the larger
of the two. Stale strategies are timed once they are stale, a pipeline while its stages are full. One rank's time is
that of the whole model on both ranks at once, each for itself, just before and just after the strategy's turn: two
hosts share no caches, but these two do. The cores of a virtual machine are shared with others for milliseconds or
seconds, so a step is compared with the bound of cores as busy as they were in it: probes between the model's layers
(``benchmarks/quiet.py``) say how busy, and the steps of the whole model how far that shows. What is printed is the
median of these comparisons, and what both would be on quiet cores. Gloo's threads share the two cores with both ranks,
which those of real hosts would not do: what the processor did outside of the ranks' main threads is printed by itself,
and how often its bound a step would take without that: they take the cores from main threads, or these wait for them.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exact import SIDE, TEXT, benchmark_inputs, benchmark_model
from harness import command_line, write_figures
from machine import describe_machine
from pipefusion import denoise
from quiet import exponents, probed

# Steps of the whole model, on every rank for itself, before and after each turn of a strategy.
BESIDE = 2
# In how many parts of a step the ranks of an exact strategy wait for one another: about its blocks.
PARTS = 16
DISPLACED = {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}
RATES = (10e9, 1e9, 200e6)
# Of what TCP sends, in packets of 1500 bytes and with time stamps.
PAYLOAD = 1448 / 1514


@dataclass(frozen=True)
class Contender:
    """One line: a configuration, whether it is stale, and rows of the batch."""

    config: dict[str, Any]
    stale: bool = False
    batch: int = 1


CONTENDERS = {
    "ulysses=2": Contender({"ulysses": 2}),
    "ulysses=2 chunks=2": Contender({"ulysses": 2, "chunks": 2}),
    "ulysses=2 chunks=4": Contender({"ulysses": 2, "chunks": 4}),
    "ring=2": Contender({"ring": 2}),
    "tensor=2": Contender({"tensor": 2}),
    "cfg=2 (batch of 2)": Contender({"cfg": 2}, batch=2),
    "displaced": Contender(DISPLACED, stale=True),
    "displaced, fp16": Contender({**DISPLACED, "compress": "fp16"}, stale=True),
    "displaced, int8": Contender({**DISPLACED, "compress": "int8"}, stale=True),
    "displaced, int4": Contender({**DISPLACED, "compress": "int4"}, stale=True),
    "pipe=2 patches=3": Contender({"pipe": 2, "patches": 3, "warmup": "fixed(1)"}, stale=True),
}
# In the chart.
SHOWN = ("ulysses=2", "ring=2", "tensor=2", "displaced", "displaced, int8", "pipe=2 patches=3")
ALONE = {"one rank": Contender({}), "one rank (batch of 2)": Contender({}, batch=2)}


@dataclass(frozen=True)
class StepTime:
    """One step of one rank.

    Attributes:
        began: by the machine's clock, which all ranks share.
        seconds: until it ended.
        probes: when each began, seconds it took, and those of the rank's main thread.
    """

    began: float
    seconds: float
    probes: Sequence[tuple[float, float, float]]

    @property
    def without(self) -> float:
        """Seconds without the probes."""
        return self.seconds - sum(took for _, took, _ in self.probes)


def request(inputs: dict[str, Any], steps: int, stale: bool = False) -> dict[str, Any]:
    """One request: its steps but the first, and the processor's seconds a step outside of the main thread.

    A stale step lasts until the next one begins, as what it sends is under way until then. There are twice as many of
    them, and the first half is left out: it has what a slow link had no time for pile up, until a step waits for all
    that the step before has sent. So are the last two, in which a pipeline's stages are not full.
    """
    first, steps = (steps, 2 * steps) if stale else (1, steps)
    began: list[float] = []
    ended: list[float] = []
    busy = own = 0.0

    def begins(step: int) -> None:
        nonlocal busy, own
        if step == 1:
            busy, own = time.process_time(), time.thread_time()
        began.append(time.perf_counter())

    with probed(benchmark_model()) as probes:
        denoise(inputs, steps, begins, lambda step: ended.append(time.perf_counter()))
    busy, own = time.process_time() - busy, time.thread_time() - own
    made = []
    for at in range(first, steps - 1 if stale else steps + 1):
        end = began[at + 1] if stale else ended[at]
        made.append((began[at], end - began[at], [probe for probe in probes if began[at] <= probe[0] < end]))
    return {"steps": made, "others": (busy - own) / steps}


def measured(contender: Contender, steps: int) -> dict[str, Any]:
    """A request of this rank, the bytes a step that it sends to other hosts, and the whole model's steps beside it."""
    import warnings

    import ditmesh

    inputs = benchmark_inputs(contender.batch)
    if not contender.config:
        return request(inputs, steps)
    whole = request(inputs, BESIDE)["steps"]
    made = (2 * steps if contender.stale else steps) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ditmesh.parallelized(benchmark_model(), contender.config):
            engine = ditmesh.engine_of(benchmark_model())
            engine.begin_request(3)
            denoise(inputs, 2, lambda step: None)
            engine.begin_request(made)
            engine.mesh.traffic.reset()
            found = request(inputs, steps, contender.stale)
            found["across"] = sum(engine.mesh.traffic.bytes_across.values()) / made
    found["beside"] = whole + request(inputs, BESIDE)["steps"]
    return found


def rank(folder: Path, names: Sequence[str], steps: int, repeats: int) -> None:
    """What a rank of a run does: every contender in turn, so often; one file of results."""
    import torch.distributed as dist

    from ditmesh.launch import init_from_environment

    init_from_environment(timeout=300, device="cpu")
    torch.set_num_threads(1)
    every = CONTENDERS | ALONE
    results = [{name: measured(every[name], steps) for name in names} for _ in range(repeats)]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run(
    hosts: Any, ranks: Sequence[int], names: Sequence[str], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Run contenders on hosts with so many ranks each: steps of all turns, as long as the slowest rank's.

    Stale ranks do not wait for one another in every step: as long as theirs in the mean.
    """
    with tempfile.TemporaryDirectory(dir=hosts[0].folder) as room:
        command = [sys.executable, "-P", __file__, "--rank", room, "--steps", str(options.steps)]
        command += ["--repeats", str(options.repeats), "--only", *names]
        paths = os.pathsep.join([str(Path(__file__).parent.parent / "src"), os.environ.get("PYTHONPATH", "")])
        started = hosts.ranks(command, ranks, extra={"OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
        if sum(one.wait() != 0 for one in started):
            raise SystemExit("a rank has failed")
        every = [json.loads(file.read_text()) for file in Path(room).glob("*.json")]
    best = min(own for turns in every for turn in turns for found in turn.values() for own in probes_of(found))
    found = {}
    for name in names:
        of = [[turns[turn][name] for turns in every] for turn in range(options.repeats)]
        stale = (CONTENDERS | ALONE)[name].stale
        steps = [
            of_all_ranks([StepTime(*one) for one in step], stale, best)
            for ranks_of in of
            for step in zip(*(one["steps"] for one in ranks_of), strict=True)
        ]
        found[name] = {"steps": steps}
        for key in ("others", "across"):
            if key in of[0][0]:
                found[name][key] = statistics.median(max(one[key] for one in ranks_of) for ranks_of in of)
        if "beside" in of[0][0]:
            alone = [StepTime(*step) for ranks_of in of for one in ranks_of for step in one["beside"]]
            found[name]["beside"] = [of_all_ranks([step], False, best) for step in alone]
    return found


def probes_of(found: dict[str, Any]) -> list[float]:
    """Seconds of the main thread of every probe in a rank's turn."""
    return [own for key in ("steps", "beside") for _, _, probes in found.get(key, ()) for _, _, own in probes]


def of_all_ranks(ranks: Sequence[StepTime], stale: bool, best: float) -> tuple[float, float]:
    """Seconds of one step of all ranks, without the probes, and how many times as long as at best these took in it.

    An exact step lasts as long as the slowest rank's, and in every part of it all wait for the one whose core is the
    busiest. Stale ranks do not wait for one another in every step: theirs lasts as long as in the mean, and what counts
    is the core that is the busiest over all of it.
    """
    if stale:
        busy = max(statistics.mean(own for _, _, own in rank.probes) for rank in ranks)
        return statistics.mean(rank.without for rank in ranks), busy / best
    start, seconds = min(rank.began for rank in ranks), max(rank.seconds for rank in ranks)
    within: list[list[list[float]]] = [[[] for _ in ranks] for _ in range(PARTS)]
    for number, rank in enumerate(ranks):
        for at, _, own in rank.probes:
            within[min(PARTS - 1, int(PARTS * (at - start) / seconds))][number].append(own)
    # Where every rank waits for a link there are no probes.
    busy = statistics.mean(max(statistics.mean(probes) for probes in part if probes) for part in within if any(part))
    return max(rank.without for rank in ranks), busy / best


def throughput(hosts: Any) -> float:
    """Bits a second of one TCP connection from the first host to the second, headers not counted."""
    take = (
        "import socket, time\n"
        "s = socket.create_server(('0.0.0.0', 5201)); print('up', flush=True); c, _ = s.accept()\n"
        "n = 0; a = None\n"
        "while (d := c.recv(1 << 20)):\n    a = a or time.perf_counter(); n += len(d)\n"
        "print(8 * n / (time.perf_counter() - a))"
    )
    give = (
        "import socket, sys, time\n"
        f"s = socket.create_connection(({hosts[1].address!r}, 5201)); d = bytes(1 << 20); e = time.monotonic() + 3\n"
        "while time.monotonic() < e:\n    s.sendall(d)"
    )
    taker = hosts[1].start([sys.executable, "-c", take], stdout=subprocess.PIPE, text=True)
    taker.stdout.readline()
    hosts[0].run([sys.executable, "-c", give])
    return float(taker.communicate()[0])


def bound(contender: Contender, compute: float, across: float, rate: float | None) -> float:
    """Seconds a step that nothing can beat, with so many of computation: see the top."""
    wire = 8 * across / (rate * PAYLOAD) if rate else 0.0
    return max(compute, wire) if contender.stale else compute + wire


def parts(result: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """What was measured with two ranks: on one host, and at every rate."""
    rates = [one["results"] for one in result.values() if isinstance(one, dict) and "results" in one]
    return [result["one host"], *rates]


def shown_in(result: dict[str, Any]) -> float:
    """How far busy cores show in what is computed: ``seconds = quiet seconds * how busy ** this``, in all turns."""
    turns = [found["beside"] for part in parts(result) for found in part.values()]
    return exponents([[(seconds, busy, 1.0) for seconds, busy in turn] for turn in turns])[0]


def against(contender: Contender, found: dict[str, Any], rate: float | None, shown: float) -> tuple[float, float]:
    """The bound on quiet cores, and the median of how often steps take theirs, on cores as busy as they were."""
    half = statistics.median(seconds / busy**shown for seconds, busy in found["beside"]) / 2
    over = [seconds / bound(contender, half * busy**shown, found["across"], rate) for seconds, busy in found["steps"]]
    return bound(contender, half, found["across"], rate), statistics.median(over)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every figure."""
    from support.hosts import hosts

    names = options.only or list(CONTENDERS)
    result: dict[str, Any] = {"machine": describe_machine(), "steps": options.steps, "repeats": options.repeats}
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, hosts(2, folder=folder) as pair:
        console.print("one rank")
        result["alone"] = run(pair, [1, 0], list(ALONE), options)
        console.print("one host")
        result["one host"] = run(pair, [2, 0], names, options)
        for rate in options.rates:
            pair.set_rate(rate)
            console.print(f"{rate / 1e6:g} Mb/s")
            result[f"{rate:g}"] = {"throughput": throughput(pair), "results": run(pair, [1, 1], names, options)}
            write_figures(result, options.json)
    return result


def show(result: dict[str, Any], rates: Sequence[float]) -> None:
    """The table."""
    table = Table(title=f"Flux class, 4 + 8 blocks, {SIDE * SIDE} + {TEXT} tokens, float32: seconds a step")
    table.add_column("")
    table.add_column("one host", justify="right")
    table.add_column("MiB a step", justify="right")
    for rate in rates:
        table.add_column(f"{rate / 1e6:g} Mb/s", justify="right")
        table.add_column("bound", justify="right")
    others = Table(
        title="the processor's seconds a step outside of a rank's main thread: gloo's threads (and without them)"
    )
    for column in ("", "one host", *(f"{rate / 1e6:g} Mb/s" for rate in rates)):
        others.add_column(column, justify="right" if column else "left")
    shown = shown_in(result)
    for name, here in result["one host"].items():
        contender = CONTENDERS[name]
        least, over = against(contender, here, None, shown)
        runs = [result[f"{rate:g}"]["results"][name] for rate in rates]
        cells = [name, f"{least * over:.3f} ({over:.2f}x)", f"{runs[0]['across'] / 2**20:.1f}"]
        theirs = [name, f"{here['others']:.3f}"]
        for rate, found in zip(rates, runs, strict=True):
            least, over = against(contender, found, rate, shown)
            cells += [f"{least * over:.3f}", f"{least:.3f} ({over:.2f}x)"]
            theirs.append(f"{found['others']:.3f} [{over - found['others'] / least:.2f}]")
        table.add_row(*cells)
        others.add_row(*map(escape, theirs))
    console = Console()
    console.print(table)
    console.print(others)
    one, two = (
        statistics.median(seconds / busy**shown for seconds, busy in result["alone"][name]["steps"]) for name in ALONE
    )
    busy = [busy for part in parts(result) for found in part.values() for _, busy in found["steps"]]
    console.print(
        f"one rank alone: {one:.3f} s (batch of 2: {two:.3f}); probes took {statistics.median(busy):.2f} times as long "
        f"as at best in the median step, {max(busy):.2f} at most (to the power of {shown:.2f} for the model); "
        "one TCP connection: "
        + ", ".join(f"{result[f'{rate:g}']['throughput'] / 1e6:.0f} of {rate / 1e6:g} Mb/s" for rate in rates)
    )
    console.print(result["machine"]["text"])


def picture(result: dict[str, Any], rates: Sequence[float], file: Path) -> None:
    """A chart of seconds over nanoseconds a bit, in which times are straight lines and crossings can be read."""
    from ditmesh.lab.pages.charts import line_chart
    from ditmesh.lab.pages.curves import Series

    across = [1e9 / rate for rate in rates]
    lines = []
    shown = shown_in(result)
    for name in (name for name in result["one host"] if name in SHOWN):
        runs = [(rate, result[f"{rate:g}"]["results"][name]) for rate in rates]
        made = [against(CONTENDERS[name], found, rate, shown) for rate, found in runs]
        seconds = tuple(least * over for least, over in made)
        lines.append(Series(name, tuple(across), seconds))
    x_label, y_label = "nanoseconds a bit (1 is 1 Gb/s, 5 is 200 Mb/s)", "seconds a step"
    chart = line_chart(lines, "Two hosts, one rank each", x_label, y_label)
    file.write_bytes(base64.b64decode(chart.source.partition(",")[2]))


# What is predicted: a model and a device of the planner's tables, and bits a second between two hosts.
MODEL, DEVICE, PREDICTED = "flux.1-dev", "h100", (25, 100, 400)


def predict() -> None:
    """The table of a known GPU on faster links, by the planner's cost model: milliseconds a step after the warm-up."""
    from ditmesh import ParallelConfig
    from ditmesh.lab.plan.hardware import Hardware, device, link
    from ditmesh.lab.plan.roofline import predict as predicted
    from ditmesh.memory.catalogue import shape
    from ditmesh.memory.sizes import workload_of

    known = shape(MODEL)
    job = replace(workload_of(known), steps=known.steps)
    table = Table(title=f"PREDICTED: {MODEL}, {known.size[0]} px, two hosts of one {DEVICE}: milliseconds a step")
    table.add_column("")
    table.add_column("MB a rank sends", justify="right")
    for rate in PREDICTED:
        table.add_column(f"{rate} Gb/s", justify="right")
    for name, contender in {"one device": Contender({}), **CONTENDERS}.items():
        if contender.batch > known.branches:
            continue
        made = [
            predicted(
                known.transformer,
                known.config,
                ParallelConfig(**contender.config),
                job,
                Hardware(device(DEVICE), link("nvlink4"), hosts=2, between=link(f"{rate}Gb/s")),
                torch.bfloat16,
            )
            for rate in PREDICTED
        ]
        table.add_row(name, f"{made[0].sent / 1e6:.1f}", *(f"{1e3 * one.step:.1f}" for one in made))
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES), help="bits a second")
    parser.add_argument("--only", nargs="*", help="contenders")
    parser.add_argument("--steps", type=int, default=8, help="steps of a request behind the first")
    parser.add_argument("--repeats", type=int, default=3, help="requests of each, in turns")
    parser.add_argument("--picture", type=Path, help="draw a chart into this SVG")
    parser.add_argument("--report", type=Path, help="measure nothing: print what is in such a file")
    parser.add_argument("--predict", action="store_true", help="only what is predicted of GPUs")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.predict:
        predict()
        return
    if options.rank is not None:
        rank(options.rank, options.only, options.steps, options.repeats)
        return
    result = json.loads(options.report.read_text()) if options.report else measure(options)
    rates = [rate for rate in options.rates if f"{rate:g}" in result]
    show(result, rates)
    if options.picture:
        picture(result, rates, options.picture)


if __name__ == "__main__":
    main()

"""Servers under requests that wait for nobody: traces, one client for all of them, and what became of each request.

`serving_load.py --arrivals` compares servers with it. Every request is one coroutine of one process: the client takes
little of the cores that the server's ranks need. Results are decoded and compared after the last one has come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from typing import Any

import httpx
import numpy
import psutil
from PIL import Image, ImageSequence
from rich.console import Console
from rich.table import Table

from ditmesh import zoo

# Of 255: what rounding in a batch of another size may change.
TOLERANCE = 1
KINDS = ("emoji-sd3@32x32", "emoji-sd3@64x64", "emoji-flux@64x64", "emoji-wan@64x64")
# Times the seconds alone within which a request is in time; the one that goodput counts.
FACTORS, GOOD = (1.0, 1.5, 2.0), 1.5
# Coefficient of variation of the gaps between requests in bursts.
VARIATION = 3.0
# Of the closed loop that measures a server's capacity: clients, and requests before the clock starts.
CLIENTS, WARMING = 8, 8


@dataclass(frozen=True)
class Kind:
    """A sort of request: a model and a size, such as ``emoji-sd3@64x64``."""

    model: str
    size: str

    def __str__(self) -> str:
        return f"{self.model}@{self.size}"

    def body(self, number: int, steps: int | None) -> dict[str, Any]:
        """The JSON of the request with this number; a video comes without loss."""
        own, captions = zoo.EMBEDDED[self.model], zoo.captions(self.model)
        wish = {"model": self.model, "size": self.size, "prompt": captions[7 * number % len(captions)], "seed": number}
        return wish | {"steps": steps or own.steps, "format": "png"}


def kind_of(text: str) -> Kind:
    """Raises `ValueError`."""
    model, _, size = text.partition("@")
    if model not in zoo.EMBEDDED or not size:
        raise ValueError(text)
    return Kind(model, size)


# --- traces


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: when it comes, in seconds, and its number among those of its kind."""

    at: float
    kind: Kind
    number: int


def arrivals(how: str, rate: float, number: int, kinds: Sequence[Kind], distinct: int, seed: int) -> list[Arrival]:
    """A trace.

    Args:
        how: ``poisson`` or ``bursts``.
        rate: requests a second, in the mean.
        number: of requests.
        kinds: each comes as often as the others.
        distinct: different requests of each kind.
        seed: of everything that is drawn.
    """
    draw, now, found = random.Random(f"{how} {seed}"), 0.0, []
    shape = 1.0 if how == "poisson" else VARIATION**-2
    for _ in range(number):
        (kind,) = draw.choices(kinds, [1.0] * len(kinds))
        found.append(Arrival(now, kind, draw.randrange(distinct)))
        now += draw.gammavariate(shape, 1.0 / (rate * shape))
    return found


# --- servers


@contextmanager
def served(options: Sequence[str], folder: str) -> Iterator[tuple[str, int]]:
    """A server with these options, ready; its URL and the id of its process."""
    command = [sys.executable, "-m", "ditmesh", "serve", *options, "--threads", "1", "--port", "0"]
    command += ["--folder", folder, "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start: ditmesh serve {shlex.join(options)}")
        url = line.split()[-1]
        while httpx.get(f"{url}/readyz").status_code != 200:
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        if process.wait(90) != 0:
            print("the server did not end well", file=sys.stderr)


def spent(process: int) -> dict[str, float]:
    """Processor seconds so far: of the server's own process, of all its ranks, and of this process, the client."""
    server = psutil.Process(process)
    ranks = sum(sum(one.cpu_times()[:2]) for one in server.children(recursive=True))
    return {"server": sum(server.cpu_times()[:2]), "ranks": ranks, "client": sum(psutil.Process().cpu_times()[:2])}


# --- the client


@dataclass(frozen=True)
class Served:
    """What became of a request.

    Attributes:
        seconds: from its arrival until its file is there; None: it has failed.
        said: why it failed.
        off: how far its pixels are from those of the request alone, of 255.
    """

    arrival: Arrival
    seconds: float | None
    said: str = ""
    off: int = 0


class Refused(Exception):
    """A server has not done a request."""


async def one_job(http: httpx.AsyncClient, body: Mapping[str, Any]) -> tuple[bytes, float]:
    """A job from its submission to its file: the file, and its seconds in the server.

    Raises:
        Refused: the server does not do it. It is not sent again: that would be another load.
    """
    answer = await http.post("/v1/jobs", json=body)
    if not answer.is_success:
        raise Refused(answer.text)
    id = answer.json()["id"]
    async with http.stream("GET", f"/v1/jobs/{id}/events") as events:
        lines = [line async for line in events.aiter_lines() if line.startswith(("event:", "data:"))]
    name, told = (next(line for line in reversed(lines) if line.startswith(word)) for word in ("event:", "data:"))
    if name.split()[-1] != "succeeded":
        raise Refused(f"the last event of the job was {name!r}")
    job = json.loads(told.removeprefix("data:"))
    file = await http.get(f"/v1/jobs/{id}/images/0")
    if not file.is_success:
        raise Refused(file.text)
    return file.content, job["finished"] - job["created"]


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))


def replay(
    url: str, trace: Sequence[Arrival], right: Mapping[tuple[Kind, int], bytes], steps: int | None,
    deadline: Mapping[Kind, int],
) -> list[Served]:  # fmt: skip
    """All requests of a trace at their times."""
    found: list[tuple[Arrival, float | None, str, bytes]] = []

    async def ask(http: httpx.AsyncClient, arrival: Arrival, began: float) -> None:
        body = arrival.kind.body(arrival.number, steps)
        if arrival.kind in deadline:
            body["deadline_ms"] = deadline[arrival.kind]
        await asyncio.sleep(began + arrival.at - time.monotonic())
        try:
            data, _ = await one_job(http, body)
        except (Refused, httpx.HTTPError, OSError) as error:
            found.append((arrival, None, str(error)[:200], b""))
        else:
            found.append((arrival, time.monotonic() - began - arrival.at, "", data))

    async def everything() -> None:
        async with _client(url) as http:
            began = time.monotonic() + 0.5
            await asyncio.gather(*(ask(http, one, began) for one in trace))

    asyncio.run(everything())
    return [
        Served(one, seconds, said, difference(frames_of(data), right[one.kind, one.number]) if data else 0)
        for one, seconds, said, data in found
    ]


def capacity_of(url: str, kinds: Sequence[Kind], arguments: argparse.Namespace) -> float:
    """Requests a second that a server completes while `CLIENTS` clients each ask for one after the other."""
    draw = random.Random(f"capacity {arguments.seed}")
    number = WARMING + max(arguments.requests // 2, 2 * CLIENTS)
    # Of every kind its share, in any order: a sample would have another one.
    chosen = [kind for kind in kinds for _ in range(round(number / len(kinds)))]
    draw.shuffle(chosen)
    left, ends = iter(enumerate(chosen)), []

    async def client(http: httpx.AsyncClient) -> None:
        for number, kind in left:
            await one_job(http, kind.body(number % arguments.distinct, arguments.steps))
            ends.append(time.monotonic())

    async def everything() -> None:
        async with _client(url) as http:
            await asyncio.gather(*(client(http) for _ in range(CLIENTS)))

    asyncio.run(everything())
    # Neither the first requests nor the last ones, which are fewer at a time.
    ends.sort()
    return (len(ends) - CLIENTS - WARMING) / (ends[-CLIENTS - 1] - ends[WARMING - 1])


def alone_on(
    url: str, kind: Kind, arguments: argparse.Namespace, right: dict[tuple[Kind, int], bytes]
) -> tuple[float, float]:
    """Median seconds of a kind, one request at a time, and those of them outside of the server.

    The pixels of all its requests go to ``right``, once.
    """

    async def everything() -> list[tuple[float, float, bytes]]:
        found = []
        async with _client(url) as http:
            # First what is done once.
            for number in (0, *range(arguments.distinct)):
                began = time.monotonic()
                data, inside = await one_job(http, kind.body(number, arguments.steps))
                seconds = time.monotonic() - began
                found.append((seconds, seconds - inside, data))
        return found[1:]

    found = asyncio.run(everything())
    for number, (_, _, data) in enumerate(found):
        pixels = frames_of(data)
        off = difference(pixels, right.setdefault((kind, number), pixels))
        if off > TOLERANCE:
            raise SystemExit(f"{kind}: two servers make pictures that differ by {off} of 255")
    return statistics.median(one for one, _, _ in found), statistics.median(one for _, one, _ in found)


def frames_of(data: bytes) -> bytes:
    """All pixels of a picture or a video."""
    return b"".join(frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(Image.open(BytesIO(data))))


def difference(one: bytes, other: bytes) -> int:
    """Largest difference of any channel of any pixel."""
    left, right = (numpy.frombuffer(data, numpy.uint8).astype(numpy.int16) for data in (one, other))
    return int(abs(left - right).max()) if left.shape == right.shape else 255


# --- figures


def summary(found: Sequence[Served], alone: Mapping[Kind, float], length: float) -> dict[str, Any]:
    """The figures of a trace.

    Args:
        found: all its requests.
        alone: seconds of each kind.
        length: seconds from the first arrival to the last result.
    """
    seconds = sorted(one.seconds for one in found if one.seconds is not None)

    def in_time(factor: float, of: Sequence[Served]) -> int:
        return sum(one.seconds is not None and one.seconds <= factor * alone[one.arrival.kind] for one in of)

    def quantile(share: float) -> float | None:
        return seconds[min(len(seconds) - 1, int(len(seconds) * share))] if seconds else None

    by_kind = {kind: [one for one in found if one.arrival.kind == kind] for kind in alone}
    return {
        "requests": len(found),
        "done": len(seconds),
        "refused": sorted({one.said for one in found if one.seconds is None})[:5],
        "attainment": {str(factor): in_time(factor, found) / len(found) for factor in FACTORS},
        "attainment_by_kind": {
            str(kind): {str(factor): in_time(factor, of) / len(of) for factor in FACTORS}
            for kind, of in by_kind.items() if of
        },
        "goodput": in_time(GOOD, found) / length,
        "throughput": len(seconds) / length,
        "p50_seconds": quantile(0.5),
        "p95_seconds": quantile(0.95),
        "p99_seconds": quantile(0.99),
        "wrong": sum(one.off > TOLERANCE for one in found),
        "largest_difference": max((one.off for one in found), default=0),
    }  # fmt: skip


def compared(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every server under every trace."""
    kinds = arguments.kinds
    models = [word for model in dict.fromkeys(kind.model for kind in kinds) for word in ("--model", model)]
    servers = arguments.server or ["--devices 2"]
    right: dict[tuple[Kind, int], bytes] = {}
    alone, outside, capacity = dict[str, dict[Kind, float]](), dict[str, list[float]](), dict[str, float]()
    for words in servers:
        with tempfile.TemporaryDirectory() as folder, served([*shlex.split(words), *models], folder) as (url, _):
            seconds = [alone_on(url, kind, arguments, right) for kind in kinds]
            alone[words] = {kind: one for kind, (one, _) in zip(kinds, seconds, strict=True)}
            outside[words] = [one for _, one in seconds]
            capacity[words] = capacity_of(url, kinds, arguments)
    best = {kind: min(times[kind] for times in alone.values()) for kind in kinds}
    rate, runs = max(capacity.values()), list[dict[str, Any]]()

    def under(url: str, process: int, how: str, load: float, times: float, outside: Sequence[float]) -> dict[str, Any]:
        # None is sent where it is no time at all.
        deadlines = {
            kind: int(1e3 * (times * best[kind] - away)) for kind, away in zip(kinds, outside, strict=True) if times
        }
        trace = arrivals(how, load * rate, arguments.requests, kinds, arguments.distinct, arguments.seed)
        before = spent(process)
        found = replay(url, trace, right, arguments.steps, deadlines)
        after = spent(process)
        length = max((one.arrival.at + one.seconds for one in found if one.seconds is not None), default=0.0)
        figures = summary(found, best, length or 1.0)
        return figures | {"processor_seconds": {name: after[name] - before[name] for name in after}, "seconds": length}

    for words in servers:
        with tempfile.TemporaryDirectory() as folder, served([*shlex.split(words), *models], folder) as (url, process):
            for kind in kinds:
                # What is done once.
                alone_on(url, kind, argparse.Namespace(distinct=2, steps=arguments.steps), {})
            for row in product(arguments.arrivals, arguments.load, arguments.deadline):
                named = dict(zip(("arrivals", "load", "deadline"), row, strict=True))
                runs.append({"server": words, **named, **under(url, process, *row, outside[words])})
    return {
        "kinds": [str(kind) for kind in kinds],
        "alone_seconds": {words: {str(kind): of[kind] for kind in kinds} for words, of in alone.items()},
        "capacity": capacity,
        "rate_of_load_1": rate,
        "runs": runs,
    }


def show_compared(result: dict[str, Any]) -> None:
    """The runs as a table."""
    console = Console(width=140)
    for words, seconds in result["alone_seconds"].items():
        console.print(
            f"{words}: {result['capacity'][words]:.2f} requests/s in a closed loop; seconds alone "
            + ", ".join(f"{kind} {of:.3f}" for kind, of in seconds.items())
        )
    table = Table(title=result["machine"]["text"], title_justify="left")
    for name in ("server", "arrivals", "load", "deadline", "in time, 1.0 / 1.5 / 2.0", "goodput", "requests/s",
                 "p50, p95, p99", "processor s: ranks, server, client", "wrong"):  # fmt: skip
        table.add_column(name)
    for run in result["runs"]:
        times = [run[f"{name}_seconds"] for name in ("p50", "p95", "p99")]
        used = run["processor_seconds"]
        table.add_row(
            run["server"], run["arrivals"], f"{run['load']:g}", f"{run['deadline']:g}",
            " / ".join(f"{share:.0%}" for share in run["attainment"].values()), f"{run['goodput']:.2f}/s",
            f"{run['throughput']:.2f}", ", ".join("-" if one is None else f"{one:.2f}" for one in times),
            ", ".join(f"{used[name]:.1f}" for name in ("ranks", "server", "client")), str(run["wrong"]),
        )  # fmt: skip
    console.print(table)

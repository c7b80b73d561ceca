"""A server for an hour: growth of memory, descriptors and threads of each of its processes, per minute.

    python benchmarks/serving_soak.py                                     # one hour, a verdict on the last 50 minutes
    python benchmarks/serving_soak.py --minutes 4 --settle 2 --every 5 --json soak.json

It starts `ditmesh serve` with a model on two ranks and a small ``--max-history``, so that what grows with the number of
jobs is full after a few minutes. Clients then use all of the API without a pause: they submit jobs and follow them,
wait for OpenAI's endpoint, cancel, leave in the middle of a stream, list, and send requests that are refused. Every
picture is compared with the one that was made alone.

The slope is Theil's and Sen's (the median of the slopes of all pairs of samples, which single peaks do not move; Sen,
1968, doi:10.1080/01621459.1968.10480934), with the 95 % interval of Kendall's rank correlation. Samples of memory that
follow one another are alike, which makes the interval too narrow, not too wide. A process grows if its interval lies
above zero and its slope is at least 0.05 (MiB, descriptors or threads) a minute; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import httpx
import psutil
from PIL import Image

import ditmesh
from harness import command_line, show_table, write_figures
from serving_faults import Outcome, Server, until, waited_for
from serving_load import TOLERANCE, Wish, asked, difference, wishes

FIGURES = {"rss": "RSS MiB", "uss": "USS MiB", "descriptors": "descriptors", "threads": "threads"}
# A minute, from which on growth is growth.
GROWTH = 0.05
# Of a normal distribution, at 97.5 %.
NORMAL = 1.959964


def robust_slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """The median of the slopes of all pairs of points, and its 95 % interval."""
    pairs = itertools.combinations(zip(x, y, strict=True), 2)
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] != a[0])
    if not slopes:
        return math.nan, math.nan, math.nan
    number, ties = len(x), Counter(y)
    # The variance of Kendall's score, with ties.
    variance = number * (number - 1) * (2 * number + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties.values())
    wide = NORMAL * math.sqrt(variance / 18)
    low = max(0, math.floor((len(slopes) - wide) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + wide) / 2))
    return statistics.median(slopes), slopes[low], slopes[high]


def sampled(server: Server) -> dict[str, dict[str, float]]:
    """Memory in MiB, descriptors and threads of the server's processes, by what they are."""
    ranks = server.ranks
    main = psutil.Process(server.pid)
    found: dict[str, dict[str, float]] = {}
    for process in [main, *main.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            name = f"rank {ranks.index(process.pid)}" if process.pid in ranks else "another process"
            name = "HTTP" if process.pid == server.pid else "resource tracker" if "resource_tracker" in words else name
            memory = process.memory_full_info()
            found[f"{name} ({process.pid})"] = {
                "rss": memory.rss / 2**20,
                "uss": memory.uss / 2**20,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
    return found


def raw(url: str) -> httpx.Client:
    """Without what `ditmesh.Client` does when the server closes an idle connection: none is idle for long."""
    return httpx.Client(base_url=url, timeout=120.0, limits=httpx.Limits(keepalive_expiry=1.0))


class Clients:
    """Clients that ask without a pause, until it is over.

    Attributes:
        outcome: of their requests.
        counts: of what they did.
    """

    def __init__(self, url: str, chosen: list[Wish], alone: dict[Wish, bytes]) -> None:
        self.url, self.outcome, self.counts = url, Outcome(), Counter[str]()
        self._chosen, self._alone, self._over = chosen, alone, threading.Event()

    def start(self, number: int) -> None:
        """So many clients, each in a thread."""
        self._threads = [threading.Thread(target=self._run, args=(one,), daemon=True) for one in range(number)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """After what they are doing."""
        self._over.set()
        for thread in self._threads:
            thread.join(120.0)

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        kinds = {self._followed: 8, self._waited: 4, self._cancelled: 2, self._left: 2, self._read: 4, self._refused: 1}
        with ditmesh.Client(self.url, patience=120.0) as client, raw(self.url) as http:
            while not self._over.is_set():
                (kind,) = draw.choices([*kinds], [*kinds.values()])
                try:
                    kind(client, http, draw.choice(self._chosen))
                except (ditmesh.DitmeshError, httpx.HTTPError, OSError) as error:
                    self.outcome.lost.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                    time.sleep(1.0)
                self.counts[kind.__name__.strip("_")] += 1

    def _compare(self, wish: Wish, pixels: bytes) -> None:
        self.outcome.differences.append(difference(pixels, self._alone[wish]))

    def _submit(self, client: ditmesh.Client, wish: Wish) -> str:
        return client.submit(wish.prompt, seed=wish.seed, steps=wish.steps).id

    def _followed(self, client: ditmesh.Client, http: httpx.Client, wish: Wish) -> None:
        (picture,) = client.images(client.wait(self._submit(client, wish)))
        self._compare(wish, picture.tobytes())

    def _waited(self, client: ditmesh.Client, http: httpx.Client, wish: Wish) -> None:
        self._compare(wish, waited_for(self.url, wish, self.outcome))

    def _cancelled(self, client: ditmesh.Client, http: httpx.Client, wish: Wish) -> None:
        client.cancel(self._submit(client, wish))

    def _left(self, client: ditmesh.Client, http: httpx.Client, wish: Wish) -> None:
        id = self._submit(client, wish)
        with http.stream("GET", f"/v1/jobs/{id}/events") as stream:
            next(stream.iter_lines())

    def _read(self, client: ditmesh.Client, http: httpx.Client, wish: Wish) -> None:
        done = [job for job in client.jobs(50) if job.status == "succeeded"]
        if done:
            Image.open(BytesIO(client.file(done[0].id, 0))).load()
        for path in ("/v1/server", "/metrics", "/healthz", "/v1/models", "/"):
            http.get(path).raise_for_status()

    def _refused(self, client: ditmesh.Client, http: httpx.Client, wish: Wish) -> None:
        for body in ({"prompt": wish.prompt, "steps": -1}, {"prompt": wish.prompt, "what": 1}):
            assert http.post("/v1/jobs", json=body).status_code in (400, 422)
        assert http.get(f"/v1/jobs/job_{'0' * 32}").status_code == 404


def watched(server: Server, minutes: float, every: float) -> list[tuple[float, dict[str, dict[str, float]]]]:
    """Samples with their times in minutes."""
    began, samples = time.monotonic(), [(0.0, sampled(server))]
    while samples[-1][0] < minutes:
        time.sleep(max(0.0, began + len(samples) * every - time.monotonic()))
        samples.append(((time.monotonic() - began) / 60, sampled(server)))
    return samples


def growth(
    samples: list[tuple[float, dict[str, dict[str, float]]]], settle: float
) -> dict[str, dict[str, dict[str, Any]]]:
    """Slopes a minute after ``settle`` minutes, by process and figure."""
    late = [(at, found) for at, found in samples if at >= settle]
    names = dict.fromkeys(name for _, found in late for name in found)
    slopes: dict[str, dict[str, dict[str, Any]]] = {}
    for name in names:
        points = [(at, found[name]) for at, found in late if name in found]
        for figure in FIGURES if len(points) >= 5 else ():
            values = [one[figure] for _, one in points]
            slope, low, high = robust_slope([at for at, _ in points], values)
            slopes.setdefault(name, {})[figure] = {
                "slope": slope, "low": low, "high": high, "first": values[0], "last": values[-1],
                "grows": low > 0 and slope >= GROWTH,
            }  # fmt: skip
    return slopes


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The server's hour."""
    chosen = wishes(arguments.distinct, arguments.steps)
    with tempfile.TemporaryDirectory() as base:
        scratch = Path(base) / "tmp"
        scratch.mkdir()
        server = Server(arguments, Path(base) / "state", scratch, ("--max-history", str(arguments.history)))
        server.start()
        try:
            until(server.ready, 600.0)
            with httpx.Client(base_url=server.url) as http:
                alone = {wish: asked(http, wish)[1] for wish in chosen}
            clients = Clients(server.url, chosen, alone)
            clients.start(arguments.clients)
            samples = watched(server, arguments.minutes, arguments.every)
            clients.end()
        finally:
            code = server.end()
    outcome = clients.outcome
    return {
        "minutes": arguments.minutes,
        "settled_after_minutes": arguments.settle,
        "max_history": arguments.history,
        "operations": dict(clients.counts),
        "pictures": len(outcome.differences),
        "wrong": sum(far > TOLERANCE for far in outcome.differences),
        "lost": outcome.lost,
        "told": dict(outcome.errors),
        "log": server.said[-20:],
        "exit_code": code,
        "growth": growth(samples, arguments.settle),
        "samples": samples,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=10.0, help="minutes before those that the verdict is on")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two samples")
    parser.add_argument("--history", type=int, default=500, help="--max-history of the server")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="--max-batch of the server")
    parser.add_argument("--distinct", type=int, default=16, help="different pictures")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    from machine import describe_machine

    result = {"machine": describe_machine(), **measured(arguments)}
    rows = [
        [name, FIGURES[figure], f"{one['first']:.1f}", f"{one['last']:.1f}",
         f"{one['slope']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})", "GROWS" if one["grows"] else ""]
        for name, figures in result["growth"].items()
        for figure, one in figures.items()
    ]  # fmt: skip
    columns = ["process", "figure", "first", "last", "slope a minute (95 %)", ""]
    done = f"{sum(result['operations'].values())} operations, {result['pictures']} images, {result['wrong']} wrong"
    title = f"{arguments.minutes:g} minutes: {done}, {len(result['lost'])} lost"
    show_table(title, columns, rows, result["machine"])
    write_figures(result, arguments.json)
    if any(row[-1] for row in rows) or result["wrong"] or result["lost"] or result["exit_code"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

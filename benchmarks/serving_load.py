"""A server under load: 400 requests of 32 clients, every picture compared with the one that is made alone.

    python benchmarks/serving_load.py                        # starts `ditmesh serve --devices 2`, and measures
    python benchmarks/serving_load.py --json load.json       # with all figures
    python benchmarks/serving_load.py --url http://...:8000  # of a server that runs; no overhead is measured
    python benchmarks/serving_load.py --arrivals poisson,bursts --load 0.5,0.9 \\
        --server "--devices 2 --ulysses 2" --server "--devices 1 --replicas 2"     # requests that wait for nobody

First, one at a time: the pipeline as the ranks of `ditmesh.Ranks` call it, and the server, in turns; the median of the
ratios is what the server costs a picture. Then all clients at once, each with one request after the other. Of some
requests it is counted how many transformer calls begin between their acceptance and the end of their first step.

With --arrivals, requests come when a trace says so, however long earlier ones take (an open loop; Schroeder, Wierman
and Harchol-Balter, NSDI 2006), and a latency counts from that time, also if the client was late itself. Every --server
gets the same traces of small and large pictures of emoji-sd3, pictures of emoji-flux and videos of emoji-wan.
``poisson`` has exponential gaps; ``bursts`` gaps of a Gamma distribution with a coefficient of variation of 3, the
family by which BurstGPT (Wang et al., arXiv:2401.17644) describes the bursts of requests to hosted models. The mix is
even. A load of 1 is as many requests a second as the best server completes while 8 clients each send one after the
other (measured in the same run). A request is in time at a factor if it takes at most so many times as long as alone,
from its arrival until the client has the file, on the server that is fastest at that; goodput is what is in time at
1.5, per second. With ``--deadline 0,1.5`` every trace is sent without deadlines, and with those of 1.5 times the
seconds alone, less what HTTP and the client took of them.
"""

from __future__ import annotations

import argparse
import base64
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import httpx
import psutil
from PIL import Image
from rich.console import Console
from rich.table import Table

import ditmesh
from ditmesh import zoo
from harness import command_line, write_figures
from open_loop import GOOD, KINDS, TOLERANCE, compared, difference, kind_of, served, show_compared

MODEL = "emoji-sd3"
# Every how many requests the calls before the first step are counted.
PROBED = 8


@dataclass(frozen=True)
class Wish:
    """A picture to ask for."""

    prompt: str
    seed: int
    steps: int


def wishes(distinct: int, steps: int) -> list[Wish]:
    """Different ones."""
    captions = zoo.captions(MODEL)
    return [Wish(captions[7 * number % len(captions)], number, steps) for number in range(distinct)]


@contextmanager
def server(devices: int, folder: str, batch: int) -> Iterator[tuple[str, int]]:
    """A server of its own, ready; its URL and the id of its process."""
    with served(["--devices", str(devices), "--max-batch", str(batch)], folder) as found:
        yield found


def draw(pipe: Any, wish: Wish) -> tuple[float, bytes]:
    """On a rank: seconds that the pipeline's call takes, and the picture's pixels."""
    import torch

    started = time.perf_counter()
    own = zoo.EMBEDDED[MODEL]
    image = pipe(
        wish.prompt,
        num_inference_steps=wish.steps,
        guidance_scale=own.guidance_scale,
        max_sequence_length=own.max_sequence_length,
        generator=[torch.Generator().manual_seed(wish.seed)],
    ).images[0]
    return time.perf_counter() - started, image.tobytes()


def asked(http: httpx.Client, wish: Wish) -> tuple[float, bytes]:
    """Seconds until the server's answer is there, and the picture's pixels."""
    started = time.perf_counter()
    answer = http.post(
        "/v1/images/generations", json={"prompt": wish.prompt, "seed": wish.seed, "steps": wish.steps}, timeout=600
    )
    answer.raise_for_status()
    data = base64.b64decode(answer.json()["data"][0]["b64_json"])
    seconds = time.perf_counter() - started
    return seconds, Image.open(BytesIO(data)).tobytes()


def in_turns(url: str, devices: int, chosen: list[Wish], pairs: int) -> dict[str, Any]:
    """The pipeline and the server, one picture at a time, in turns."""
    bare, served, ratios, worst = [], [], [], 0
    config = ditmesh.ParallelConfig.auto(devices, 4)
    with ditmesh.Ranks(devices, threads=1) as ranks, httpx.Client(base_url=url) as http:
        pipe = ranks.load(MODEL, config)
        # What is done once.
        ranks.run(draw, pipe, chosen[0])
        asked(http, chosen[0])
        for number in range(pairs):
            wish = chosen[number % len(chosen)]
            alone, pixels = max(ranks.run(draw, pipe, wish))
            seconds, other = asked(http, wish)
            bare.append(alone)
            served.append(seconds)
            ratios.append(seconds / alone)
            worst = max(worst, difference(pixels, other))
    return {
        "pairs": pairs,
        "bare_seconds": statistics.median(bare),
        "served_seconds": statistics.median(served),
        "overhead": statistics.median(ratios) - 1,
        "largest_difference": worst,
    }


def all_at_once(work: Callable[[int], None], number: int) -> None:
    """Calls ``work`` with 0 to ``number`` - 1, each in a thread of its own."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def load(url: str, chosen: list[Wish], alone: dict[Wish, bytes], requests: int, clients: int) -> dict[str, Any]:
    """All clients at once."""
    left = iter(range(requests))
    lock = threading.Lock()
    latencies: list[float] = []
    differences: list[int] = []
    errors: list[str] = []
    before_first: list[int] = []

    def client(_: int) -> None:
        with httpx.Client(base_url=url) as http:
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                wish = chosen[number % len(chosen)]
                try:
                    if number % PROBED == PROBED - 1:
                        seconds, pixels, calls = probed(http, url, wish)
                        before_first.append(calls)
                    else:
                        seconds, pixels = asked(http, wish)
                except (httpx.HTTPError, ditmesh.DitmeshError) as error:
                    errors.append(str(error))
                    continue
                latencies.append(seconds)
                differences.append(difference(pixels, alone[wish]))

    first, started = calls_of(url), time.perf_counter()
    all_at_once(client, clients)
    seconds = time.perf_counter() - started
    calls, rows = (after - before for after, before in zip(calls_of(url), first, strict=True))
    ordered = sorted(latencies)
    return {
        "requests": requests,
        "clients": clients,
        "seconds": seconds,
        "pictures_per_second": len(latencies) / seconds,
        "p50_seconds": ordered[len(ordered) // 2],
        "p95_seconds": ordered[int(len(ordered) * 0.95)],
        "lost": requests - len(latencies),
        "errors": errors[:10],
        "wrong": sum(far > TOLERANCE for far in differences),
        "equal": differences.count(0),
        "largest_difference": max(differences),
        "calls": calls,
        "rows": rows,
        "calls_of_one_at_a_time": sum(chosen[number % len(chosen)].steps for number in range(requests)),
        "calls_before_first_step": statistics.median(before_first) if before_first else None,
    }


def probed(http: httpx.Client, url: str, wish: Wish) -> tuple[float, bytes, int]:
    """As `asked`; and transformer calls that end from acceptance to the end of the first step, its own among them."""
    started, calls = time.perf_counter(), None
    with ditmesh.Client(url) as client:
        before = calls_of(url)[0]
        job = client.submit(wish.prompt, seed=wish.seed, steps=wish.steps)
        for event in client.events(job.id):
            if event.event == "step" and calls is None:
                calls = calls_of(url)[0] - before
        (picture,) = client.images(client.job(job.id))
    return time.perf_counter() - started, picture.tobytes(), calls or 0


def calls_of(url: str) -> tuple[int, int]:
    """Calls of the transformer so far, and rows in them."""
    replicas = httpx.get(f"{url}/v1/server").json()["replicas"]
    return sum(replica["calls"] for replica in replicas), sum(replica["rows"] for replica in replicas)


def memory(process: int | None) -> int | None:
    """Bytes that a process holds."""
    return None if process is None else psutil.Process(process).memory_info().rss


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, against the server of ``--url`` or one of its own."""
    chosen = wishes(min(arguments.distinct, arguments.requests), arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        own = server(arguments.devices, folder, arguments.batch)
        with _running(arguments.url) if arguments.url else own as (url, process):
            result: dict[str, Any] = {}
            if not arguments.url:
                result["alone"] = in_turns(url, arguments.devices, chosen, arguments.pairs)
            with httpx.Client(base_url=url) as http:
                began = time.perf_counter()
                alone = {wish: asked(http, wish)[1] for wish in chosen}
                one_by_one = len(chosen) / (time.perf_counter() - began)
            before = memory(process)
            found = load(url, chosen, alone, arguments.requests, arguments.clients)
            result["load"] = found
            result["one_at_a_time_per_second"] = one_by_one
            result["throughput_ratio"] = found["pictures_per_second"] / one_by_one
            result["calls_ratio"] = found["calls"] / found["calls_of_one_at_a_time"]
            result["http_process_bytes"] = {"before": before, "after": memory(process)}
    return result


@contextmanager
def _running(url: str) -> Iterator[tuple[str, int | None]]:
    yield url, None


def show(result: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table(title=result["machine"]["text"], title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    if "alone" in result:
        alone = result["alone"]
        table.add_row("pipeline alone, median", f"{alone['bare_seconds'] * 1e3:.0f} ms")
        table.add_row("server, one at a time, median", f"{alone['served_seconds'] * 1e3:.0f} ms")
        table.add_row("server's share, median of ratios", f"{alone['overhead']:.1%}")
    found = result["load"]
    table.add_row(f"{found['requests']} requests, {found['clients']} clients", f"{found['seconds']:.1f} s")
    table.add_row("p50, p95", f"{found['p50_seconds']:.2f} s, {found['p95_seconds']:.2f} s")
    table.add_row("pictures a second; one at a time", f"{found['pictures_per_second']:.2f}; "
                  f"{result['one_at_a_time_per_second']:.2f}")  # fmt: skip
    table.add_row("transformer calls, of one at a time", f"{result['calls_ratio']:.0%}")
    table.add_row("calls to the end of the first step, median", str(found["calls_before_first_step"]))
    table.add_row("lost, wrong", f"{found['lost']}, {found['wrong']}")
    table.add_row("equal to the bit; largest difference", f"{found['equal']}; {found['largest_difference']} of 255")
    Console().print(table)


def numbers(text: str) -> list[float]:
    """With commas."""
    return [float(one) for one in text.split(",")]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--url", help="a server that runs")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--distinct", type=int, help="different ones among them (50; with --arrivals: 5 a kind)")
    parser.add_argument("--steps", type=int, help="of every request; default: the model's")
    parser.add_argument("--batch", type=int, default=8, help="--max-batch of the server")
    parser.add_argument("--pairs", type=int, default=20, help="turns of the pipeline and the server, one at a time")
    many = parser.add_argument_group("requests that wait for nobody")
    many.add_argument("--arrivals", type=lambda text: text.split(","), help="poisson, bursts or both, with a comma")
    many.add_argument("--load", type=numbers, default=[0.5, 0.9], help="loads, with commas; of 1 is what the best does")
    many.add_argument("--server", action="append", metavar="OPTIONS", help="of `ditmesh serve`; may be repeated")
    many.add_argument("--kinds", type=lambda text: [kind_of(one) for one in text.split(",")],
                      default=[kind_of(one) for one in KINDS], help=",".join(KINDS))  # fmt: skip
    many.add_argument("--deadline", type=numbers, default=[GOOD], help="of requests, in times the seconds alone, with "
                      "commas; 0: none")  # fmt: skip
    many.add_argument("--seed", type=int, default=0, help="of the traces")
    arguments = parser.parse_args()
    if unknown := {*(arguments.arrivals or ())} - {"poisson", "bursts"}:
        parser.error(f"no such arrivals: {', '.join(sorted(unknown))}; use poisson, bursts or both")
    if arguments.server and not arguments.arrivals:
        parser.error("--server needs --arrivals; give both, or neither")
    # Nothing is fetched.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from machine import describe_machine

    arguments.distinct = arguments.distinct or (5 if arguments.arrivals else 50)
    if arguments.arrivals:
        result = {"machine": describe_machine(), **compared(arguments)}
        show_compared(result)
        write_figures(result, arguments.json)
        sys.exit(1 if any(run["wrong"] for run in result["runs"]) else 0)
    arguments.steps = arguments.steps or zoo.EMBEDDED[MODEL].steps
    result = {"machine": describe_machine(), **measured(arguments)}
    show(result)
    write_figures(result, arguments.json)
    if result["load"]["lost"] or result["load"]["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""A server under load while things fail: ranks and the HTTP process are killed, the disk is full.

    python benchmarks/serving_faults.py                          # 400 requests of 32 clients, all faults in turn
    python benchmarks/serving_faults.py --requests 40 --clients 8 --steps 4 --json faults.json
    python benchmarks/serving_faults.py --faults kill-rank,full-disk
    python benchmarks/serving_faults.py --bursts 200             # of signals, at random moments, each to a new server

It starts `ditmesh serve` on a folder of its own: a small tmpfs where one can be mounted, else the full disk is a limit
on the size of the server's files. Clients behave as real ones: half of them submit jobs and follow them
(`ditmesh.Client`), half wait for OpenAI's endpoint, and send their request again when the
connection is lost or the server says that they should. Every picture is compared with the one that was made alone. The
exit code is 1 when anything accepted was lost or is wrong, a fault took longer than 30 s, or something is left behind.

With `--bursts` up to 60 SIGINT and SIGTERM come one upon the other while a server starts, while it works on a request,
or while it ends. It is to be gone within 10 s, with all of its processes.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import random
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from serving_load import MODEL, TOLERANCE, Wish, all_at_once, asked, difference, wishes

FAULTS = ("kill-rank", "kill-http", "full-disk")
# Seconds for which a client tries.
PATIENCE = 300.0
# Seconds for which the disk is full: at least, and at most if no client has noticed by then.
FULL, LONGEST_FULL = 6.0, 30.0
# In the environment of the server and of all that it starts.
MARK = "DITMESH_FAULT_DRILL"
# When signals come, and seconds in which a server is to end.
MOMENTS = ("start", "work", "end")
END = 10.0
SHARED = Path("/dev/shm")


class Server:
    """`ditmesh serve` on a folder, which may be killed and started again at the same port.

    Attributes:
        said: lines of its log.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, scratch: Path, more: Sequence[str] = ()) -> None:
        self.mark, self.folder, self.said = secrets.token_hex(8), folder, list[str]()
        self._command = [sys.executable, "-m", "ditmesh", "serve", "--devices", str(arguments.devices)]
        self._command += ["--threads", "1", "--folder", str(folder), "--max-batch", str(arguments.batch)]
        self._command += ["--log-level", "warning", *more]
        self._environment = {**os.environ, MARK: self.mark, "TMPDIR": str(scratch)}
        self.url, self._port = "", "0"

    def spawn(self) -> None:
        """Start its process."""
        self._process = subprocess.Popen(
            [*self._command, "--port", self._port],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True).start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.spawn()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start: {self.said[-1:]}")
        self.url = line.split()[-1]
        self._port = self.url.rpartition(":")[2]

    def _listen(self, lines: Any) -> None:
        self.said += [line.rstrip() for line in lines]

    @property
    def pid(self) -> int:
        """Of the HTTP process."""
        return self._process.pid

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks: children of its fork server."""
        return [rank.pid for one in psutil.Process(self.pid).children() for rank in one.children()]

    def state(self) -> dict[str, Any]:
        """As it says; empty while it does not answer."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/v1/server", timeout=5).json()
        return {}

    def ready(self, restarts: int = 0) -> bool:
        """Whether it takes jobs, having started ranks again so often."""
        state = self.state()
        return bool(state.get("ready")) and sum(one["restarts"] for one in state["replicas"]) >= restarts

    def restarts(self) -> int:
        """How often ranks were started again."""
        return sum(one["restarts"] for one in self.state()["replicas"])

    def kill(self) -> None:
        """As by kill -9."""
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Its exit code after SIGTERM."""
        self._process.terminate()
        return self._process.wait(120)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def processes(self) -> list[str]:
        """Those that carry its mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        return found


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        accepted: jobs, by their ids, as clients were told.
        done: seconds of the monotonic clock at which pictures came, in order.
        differences: of pictures from those made alone.
        lost: what clients were told of requests that came to nothing.
        errors: what they were told on the way.
        over: no more requests are under way.
    """

    accepted: set[str] = field(default_factory=set)
    done: list[float] = field(default_factory=list)
    differences: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    over: bool = False

    def error(self, said: str) -> None:
        """Something that a client was told."""
        self.errors[alike(said)] += 1


def alike(said: str) -> str:
    """A sentence without numbers and ids, which do not make it another one."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"job_[0-9a-f]{32}", "job_…", said))[:300]


# --- clients


def submitted(url: str, wish: Wish, outcome: Outcome) -> bytes:
    """A client that submits a job, follows it and reads its picture; its pixels."""
    limit, client = time.monotonic() + PATIENCE, ditmesh.Client(url, patience=PATIENCE)
    with client:
        while True:
            try:
                job = client.submit(wish.prompt, seed=wish.seed, steps=wish.steps)
                break
            except (ditmesh.DitmeshError, OSError) as error:
                outcome.error(f"submit: {error}")
                if time.monotonic() > limit:
                    raise
                time.sleep(1.0)
        outcome.accepted.add(job.id)

        def told(event: Any) -> None:
            if event.event in ("restarted", "paused"):
                outcome.error(f"{event.event}: {event.data['reason']}")

        (picture,) = client.images(client.wait(job.id, told))
        return picture.tobytes()


def waited_for(url: str, wish: Wish, outcome: Outcome) -> bytes:
    """A client of OpenAI's endpoint, which sends its request again; the picture's pixels."""
    limit = time.monotonic() + PATIENCE
    body = {"prompt": wish.prompt, "seed": wish.seed, "steps": wish.steps}
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        while True:
            try:
                answer = http.post("/v1/images/generations", json=body)
            except httpx.HTTPError as error:
                outcome.error(f"generations: {type(error).__name__}: {error}")
                again = True
            else:
                if answer.is_success:
                    break
                outcome.error(f"generations: {answer.status_code} {answer.json()['error']['message']}")
                again = answer.status_code in (429, 503, 507)
            if not again or time.monotonic() > limit:
                raise ditmesh.DitmeshError("it was given up")
            time.sleep(1.0)
        outcome.accepted.add(answer.json()["job"])
        return Image.open(BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))).tobytes()


def load(url: str, chosen: list[Wish], alone: dict[Wish, bytes], requests: int, clients: int, outcome: Outcome) -> None:
    """All clients at once, each with one request after the other."""
    left, lock = iter(range(requests)), threading.Lock()

    def client(_: int) -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            wish = chosen[number % len(chosen)]
            try:
                pixels = (submitted if number % 2 else waited_for)(url, wish, outcome)
            except Exception as error:
                outcome.lost.append(f"{type(error).__name__}: {error}")
            else:
                outcome.differences.append(difference(pixels, alone[wish]))
            outcome.done.append(time.monotonic())

    all_at_once(client, clients)
    outcome.over = True


# --- faults


def until(condition: Callable[[], bool], seconds: float = 120.0) -> float:
    """Wait for something; the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return float("inf")
        time.sleep(0.1)
    return time.monotonic() - began


def without_rank(server: Server, generator: random.Random) -> float:
    """One of the ranks is killed; seconds until there are new ones."""
    before = server.restarts()
    os.kill(generator.choice(server.ranks), signal.SIGKILL)
    return until(lambda: server.ready(before + 1))


def killed(server: Server) -> float:
    """The HTTP process is killed, and started again; seconds until it takes jobs."""
    began = time.monotonic()
    server.kill()
    server.start()
    until(server.ready)
    return time.monotonic() - began


def filled(server: Server, small: bool, outcome: Outcome) -> float:
    """The disk is full for a while; seconds until a picture comes when there is room again."""
    told = outcome.errors.total()
    if small:
        filling = server.folder / "filling"
        for size in (65536, 1):
            with contextlib.suppress(OSError), filling.open("ab", buffering=0) as file:
                while True:
                    file.write(b"\0" * size)
    else:
        limit_files(server, 1)
    time.sleep(FULL)
    until(lambda: outcome.errors.total() > told, LONGEST_FULL - FULL)
    if small:
        filling.unlink()
    else:
        limit_files(server, resource.RLIM_INFINITY)
    return next_picture(outcome)


def limit_files(server: Server, size: int) -> None:
    """Files of the HTTP process may not grow beyond so many bytes."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def next_picture(outcome: Outcome) -> float:
    """Seconds until a client has the next picture, or none is asked for any more."""
    before = len(outcome.done)
    return until(lambda: len(outcome.done) > before or outcome.over)


def drills(
    server: Server, faults: list[str], requests: int, outcome: Outcome, small: bool, seed: int
) -> list[dict[str, Any]]:
    """The faults, evenly over the load; what each has cost."""
    generator, found = random.Random(seed), []
    for number, fault in enumerate(faults):
        at = int(requests * (number + 0.5) / (len(faults) + 0.5))
        until(lambda at=at: len(outcome.done) >= at or outcome.over, 3600.0)
        began, before = time.monotonic(), len(outcome.done)
        if fault == "kill-http":
            back = killed(server)
        elif fault == "full-disk":
            back = filled(server, small, outcome)
        else:
            back = without_rank(server, generator)
        if fault != "full-disk":
            next_picture(outcome)
        picture = time.monotonic() - began
        found.append({"fault": fault, "at": before, "back_seconds": back, "next_picture_seconds": picture})
    return found


# --- bursts of signals


def burst(server: Server, moment: str, generator: random.Random, longest: float) -> dict[str, Any]:
    """A server that gets many signals at once; what became of it.

    Args:
        moment: when they come; within one of `MOMENTS` at random.
        longest: seconds that a server takes until it is ready.
    """
    if moment == "start":
        server.spawn()
        time.sleep(generator.uniform(0, longest))
    else:
        server.start()
        until(server.ready, 600.0)
        wish = {"prompt": "a red fox", "steps": 40}
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            http.post("/v1/jobs", json=wish)
        time.sleep(generator.uniform(0, 2))
    if moment == "end":
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(generator.uniform(0, 2))
    began, count, gap = time.monotonic(), generator.randint(2, 60), generator.choice((0, 0.002, 0.01, 0.03))
    sent = 0
    while sent < count and not server.ended():
        os.kill(server.pid, generator.choice((signal.SIGINT, signal.SIGTERM)))
        sent += 1
        time.sleep(gap)
    until(server.ended, 30.0)
    seconds = time.monotonic() - began
    until(lambda: not server.processes(), 5.0)
    left = server.processes()
    if not server.ended():
        server.kill()
    return {"moment": moment, "signals": sent, "gap": gap, "seconds": seconds, "processes": left}


def left_in_memory(before: set[str]) -> list[str]:
    """Shared memory that has come since and that no process has mapped: what another program works with is its own,
    and so is a semaphore, of which a server makes none.
    """
    mapped = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # A process may end at any time.
        with contextlib.suppress(OSError):
            mapped.append(maps.read_text())
    names = {path.name for path in SHARED.glob("*") if not path.name.startswith("sem.")} - before
    return sorted(name for name in names if not any(f"{SHARED / name}" in lines for lines in mapped))


def bursts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Bursts of signals, each on a server of its own; what is not as it should be."""
    generator, found = random.Random(arguments.seed), []
    shared = {path.name for path in SHARED.glob("*")}
    with tempfile.TemporaryDirectory() as base:
        scratch = Path(base) / "tmp"
        scratch.mkdir()
        server = Server(arguments, Path(base) / "first", scratch)
        began = time.monotonic()
        server.start()
        until(server.ready, 600.0)
        longest = time.monotonic() - began
        server.end()
        for number in range(arguments.bursts):
            server = Server(arguments, Path(base) / f"state-{number}", scratch)
            found.append(burst(server, MOMENTS[number % len(MOMENTS)], generator, longest))
            print(number, found[-1], flush=True)
        files = [path.name for path in scratch.iterdir()]
    wrong = [f"{one} is not over within {END:g} s" for one in found if one["seconds"] > END or one["processes"]]
    left = [*files, *left_in_memory(shared)]
    return {"bursts": found, "bad": [*wrong, *([f"left behind: {left}"] if left else [])]}


# --- all of it


@contextlib.contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """A small disk at a folder; False: none could be mounted, it is an ordinary folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        small = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        small = False
    try:
        yield small
    finally:
        if small:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The load with its faults, and what is left behind."""
    chosen = wishes(min(arguments.distinct, arguments.requests), arguments.steps)
    shared = {path.name for path in SHARED.glob("*")}
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as base:
        scratch = Path(base) / "tmp"
        scratch.mkdir()
        with disk(Path(base) / "state", arguments.disk) as small:
            server = Server(arguments, Path(base) / "state", scratch)
            server.start()
            until(server.ready, 600.0)
            with httpx.Client(base_url=server.url) as http:
                alone = {wish: asked(http, wish)[1] for wish in chosen}
            began, found = time.monotonic(), []
            drilling = threading.Thread(
                target=lambda: found.extend(
                    drills(server, arguments.faults, arguments.requests, outcome, small, arguments.seed)
                )
            )
            drilling.start()
            load(server.url, chosen, alone, arguments.requests, arguments.clients, outcome)
            seconds = time.monotonic() - began
            drilling.join()
            jobs = httpx.get(f"{server.url}/v1/jobs", params={"limit": 1000}).json()["data"]
            rss = psutil.Process(server.pid).memory_info().rss
            code = server.end()
            until(lambda: not server.processes(), 20.0)
            left = {
                "processes": server.processes(),
                "unfinished files": [str(path) for path in server.folder.rglob(".*.tmp")],
                "temporary files": [path.name for path in scratch.iterdir()],
                "shared memory": left_in_memory(shared),
            }
    return {
        "requests": arguments.requests,
        "clients": arguments.clients,
        "seconds": seconds,
        "full_disk": "tmpfs" if small else "limit on the size of files",
        "faults": found,
        "accepted": len(outcome.accepted),
        "jobs": len(jobs) - len(chosen),
        "not_done": Counter(job["status"] for job in jobs if job["status"] != "succeeded"),
        "lost": outcome.lost,
        "wrong": sum(far > TOLERANCE for far in outcome.differences),
        "equal": outcome.differences.count(0),
        "largest_difference": max(outcome.differences, default=None),
        "errors": dict(outcome.errors.most_common()),
        "log": dict(Counter(alike(line.partition(" ")[2]) for line in server.said).most_common(20)),
        "http_process_bytes": rss,
        "exit_code": code,
        "left": left,
    }


def bad(result: dict[str, Any], back: float) -> list[str]:
    """What is not as it should be; the service has to be back in so many seconds."""
    found = [
        f"{one['fault']} took {one['back_seconds']:.0f} s" for one in result["faults"] if one["back_seconds"] > back
    ]
    found += [f"left behind: {name} {what}" for name, what in result["left"].items() if what]
    found += [f"{len(result['lost'])} lost: {result['lost'][:3]}"] if result["lost"] else []
    found += [f"jobs that are not done: {dict(result['not_done'])}"] if result["not_done"] else []
    found += [f"{result['wrong']} pictures are wrong"] if result["wrong"] else []
    # A client that got no answer sends its request again, and what it had sent is drawn all the same.
    again = sum(count for error, count in result["errors"].items() if re.match("generations: (Read|RemoteP)", error))
    requests = result["requests"] + again
    found += [f"{result['jobs']} jobs for {requests} requests"] if result["jobs"] > requests else []
    return found + ([f"the server's exit code was {result['exit_code']}"] if result["exit_code"] else [])


def show(result: dict[str, Any]) -> None:
    """The figures as tables."""
    console = Console()
    table = Table(title=result["machine"]["text"], title_justify="left")
    for name in ("fault", "after pictures", "back", "next picture"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for one in result["faults"]:
        back, picture = one["back_seconds"], one["next_picture_seconds"]
        table.add_row(one["fault"], str(one["at"]), f"{back:.1f} s", f"{picture:.1f} s")
    console.print(table)
    console.print(
        f"{result['requests']} requests of {result['clients']} clients in {result['seconds']:.0f} s: "
        f"{result['accepted']} accepted, {len(result['lost'])} lost, {result['wrong']} wrong, {result['equal']} equal "
        f"to the bit (largest difference {result['largest_difference']} of 255); disk: {result['full_disk']}"
    )
    console.print("clients were told:")
    for said, count in result["errors"].items():
        console.print(f"{count:5} x {said}", highlight=False, markup=False)
    console.print("the log says:")
    for said, count in result["log"].items():
        console.print(f"{count:5} x {said}", highlight=False, markup=False)
    console.print(f"left: {result['left']}", highlight=False, markup=False)
    for said in result["bad"]:
        console.print(f"BAD: {said}", highlight=False, markup=False)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=50, help="different pictures among them")
    parser.add_argument("--steps", type=int, default=zoo.EMBEDDED[MODEL].steps)
    parser.add_argument("--batch", type=int, default=8, help="--max-batch of the server")
    parser.add_argument("--disk", type=int, default=256, help="MiB of the small disk")
    parser.add_argument("--back", type=float, default=30.0, help="seconds in which the service has to be back")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of ranks")
    parser.add_argument("--bursts", type=int, default=0, metavar="N", help="so many bursts of signals, and no load")
    parser.add_argument("--faults", type=lambda text: text.split(","), default=[*FAULTS], help=",".join(FAULTS))
    arguments = parser.parse_args()
    if unknown := set(arguments.faults) - {*FAULTS}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; use {', '.join(FAULTS)}")
    # Nothing is fetched.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from machine import describe_machine

    result = {"machine": describe_machine(), **(bursts if arguments.bursts else measured)(arguments)}
    if arguments.bursts:
        longest = max(one["seconds"] for one in result["bursts"])
        print(f"{len(result['bursts'])} bursts, {longest:.1f} s to the end at most")
        print(*(f"BAD: {words}" for words in result["bad"]), sep="\n")
    else:
        result["bad"] = bad(result, arguments.back)
        show(result)
    write_figures(result, arguments.json)
    if result["bad"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""A server under attack: honest clients, while others hold connections, send nonsense and ask for everything at once.

    python benchmarks/server_attack.py                    # 400 requests, 1,100 silent connections and all the rest
    python benchmarks/server_attack.py --json attack.json
    python benchmarks/server_attack.py --requests 40 --silent 150 --headers 500 --bodies 4 --descriptors 128

The server is the real one (HTTP, queue, results) in a process with 1,024 descriptors; its rank is a thread that makes
an "image" of a prompt and a seed without a model, so that every result can be compared. All of these go on at once:

* honest clients with a key submit jobs, follow them, read each result and compare it;
* connections that say nothing, and opened again when the server has closed them;
* half headers, each on a connection of its own;
* bodies of JSON with millions of fields that no request has;
* a greedy key, that submits jobs of the highest priority as fast as it may;
* probes of /healthz, each on a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging.config
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import httpx

from harness import command_line, write_figures

HOST = "127.0.0.1"
STEPS = 4


@dataclass(frozen=True)
class Size:
    """How much of everything there is.

    Attributes:
        requests, clients: honest ones.
        silent: connections that say nothing, at a time.
        headers: half headers in all.
        bodies, megabytes: of nonsense.
        descriptors: of the server's process.
    """

    requests: int = 400
    clients: int = 8
    silent: int = 1100
    headers: int = 20_000
    bodies: int = 100
    megabytes: int = 30
    descriptors: int = 1024


@dataclass
class Seen:
    """What happened."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    probes_failed: int = 0
    headers: int = 0
    bodies: int = 0
    greedy: int = 0
    reopened: int = 0
    peak_mib: float = 0.0
    peak_descriptors: int = 0


def serve(folder: str, keys: str) -> None:
    """The server; prints its URL."""
    from ditmesh.serve.http.app import create_app
    from ditmesh.serve.http.listen import HttpServer, bound, url_of
    from ditmesh.serve.http.logs import log_config
    from ditmesh.serve.offers import ModelSpec
    from ditmesh.serve.service import Service
    from ditmesh.serve.settings import ApiSettings, ServiceSettings
    from support.serve import serve_fake

    logging.config.dictConfig(log_config("text", "INFO"))
    models = [ModelSpec("sd3", "emoji-sd3")]
    service = Service(models, folder, ServiceSettings(launcher="support.serve:ThreadRanks", device="cpu"), serve_fake)
    listening = bound(HOST, 0)
    app = create_app(service, ApiSettings(keys=Path(keys)))
    server = HttpServer(app, grace=0.0, up=lambda: print(url_of(listening), flush=True))
    asyncio.run(server.run_on(listening))


class Attack:
    """All clients of a server."""

    def __init__(self, size: Size, port: int, process: int, honest: str, greedy: str) -> None:
        self.size, self.port, self.process = size, port, process
        self.url, self.honest, self.greedy = f"http://{HOST}:{port}", honest, greedy
        self.seen, self._lock = Seen(), threading.Lock()
        self._over = threading.Event()
        self._numbers = iter(range(size.requests))

    def run(self) -> Seen:
        """Until every honest request has its answer."""
        others = [self._silent, self._probe, self._watch, self._greedy, *[self._headers] * 2, *[self._bodies] * 2]
        threads = [threading.Thread(target=self._guarded, args=(what,), daemon=True) for what in others]
        for one in threads:
            one.start()
        # When the connections are there.
        time.sleep(1.0)
        clients = [threading.Thread(target=self._client) for _ in range(self.size.clients)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        while self.seen.headers < self.size.headers or self.seen.bodies < self.size.bodies:
            time.sleep(0.1)
        self._over.set()
        for one in threads:
            one.join(60)
        return self.seen

    def _guarded(self, what: Callable[[], None]) -> None:
        while not self._over.is_set():
            try:
                what()
                return
            except OSError:
                time.sleep(0.05)

    # ---- honest ones

    def _client(self) -> None:
        from support.serve import picture

        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            began = time.monotonic()
            body = {"prompt": f"fox {number}", "seed": number, "steps": STEPS}
            job = self._asked("POST", "/v1/jobs", json=body).json()
            while job["status"] not in ("succeeded", "failed", "cancelled"):
                time.sleep(0.05)
                job = self._asked("GET", f"/v1/jobs/{job['id']}").json()
            data = b""
            if job["status"] == "succeeded":
                data = self._asked("GET", f"/v1/jobs/{job['id']}/images/0").content
            with self._lock:
                self.seen.waited.append(time.monotonic() - began)
                if data == picture(body["prompt"], number, STEPS):
                    self.seen.right += 1
                else:
                    self.seen.wrong.append(f"{number}: {job['status']} {job['error']}")

    def _asked(self, method: str, path: str, headers: Any = None, **more: Any) -> httpx.Response:
        """An answer; a server that is busy, or has closed the connection, is asked again, as clients do."""
        headers = {"Authorization": f"Bearer {self.honest}", **(headers or {})}
        while True:
            try:
                answer = httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60, **more)
            except httpx.TransportError:
                time.sleep(0.1)
                continue
            if answer.status_code not in (429, 503):
                answer.raise_for_status()
                return answer
            time.sleep(min(2.0, float(answer.headers.get("retry-after", 1))))

    # ---- the others

    def _silent(self) -> None:
        opened: list[socket.socket] = []
        try:
            while not self._over.is_set():
                while len(opened) < self.size.silent and not self._over.is_set():
                    opened.append(socket.create_connection((HOST, self.port), timeout=5))
                    opened[-1].setblocking(False)
                    self.seen.reopened += 1
                time.sleep(0.5)
                opened = [one for one in opened if self._open(one)]
        finally:
            for one in opened:
                one.close()

    @staticmethod
    def _open(connected: socket.socket) -> bool:
        try:
            if connected.recv(4096):
                return True
        except BlockingIOError:
            return True
        except OSError:
            pass
        connected.close()
        return False

    def _headers(self) -> None:
        opened: list[socket.socket] = []
        try:
            while not self._over.is_set():
                with self._lock:
                    if self.seen.headers >= self.size.headers:
                        return
                    self.seen.headers += 1
                with contextlib.suppress(OSError):
                    opened.append(socket.create_connection((HOST, self.port), timeout=5))
                    opened[-1].sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
                while len(opened) > 200:
                    opened.pop(0).close()
                time.sleep(0.001)
        finally:
            for one in opened:
                one.close()

    def _bodies(self) -> None:
        start = b'{"prompt":"x",'
        field_ = b'"%07x":1,'
        count = self.size.megabytes * 2**20 // len(field_ % 0)
        data = start + b"".join(field_ % number for number in range(count)) + b'"y":1}'
        headers = {"Authorization": f"Bearer {self.greedy}", "Content-Type": "application/json"}
        while not self._over.is_set():
            with self._lock:
                if self.seen.bodies >= self.size.bodies:
                    return
                self.seen.bodies += 1
            with contextlib.suppress(httpx.TransportError):
                httpx.post(f"{self.url}/v1/jobs", content=data, headers=headers, timeout=60)

    def _greedy(self) -> None:
        headers = {"Authorization": f"Bearer {self.greedy}"}
        body = {"prompt": "all of it", "n": 8, "steps": 20, "priority": 10}
        while not self._over.is_set():
            try:
                answer = httpx.post(f"{self.url}/v1/jobs", json=body, headers=headers, timeout=60)
            except httpx.TransportError:
                continue
            self.seen.greedy += answer.status_code == 202
            time.sleep(0.02 if answer.status_code == 202 else 0.2)

    def _probe(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                fine = httpx.get(f"{self.url}/healthz", timeout=30).status_code == 200
            except httpx.TransportError:
                fine = False
            self.seen.probes.append(time.monotonic() - began)
            self.seen.probes_failed += not fine
            time.sleep(0.1)

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                resident = int(Path(f"/proc/{self.process}/statm").read_text().split()[1]) * page / 2**20
                self.seen.peak_mib = max(self.seen.peak_mib, resident)
                number = len(os.listdir(f"/proc/{self.process}/fd"))
                self.seen.peak_descriptors = max(self.seen.peak_descriptors, number)
            time.sleep(0.05)


def attacked(size: Size, folder: Path) -> dict[str, Any]:
    """Start a server in an empty folder, attack it, and say how it went."""
    from ditmesh.serve.http.keys import new_key

    keys, log = folder / "keys", folder / "log.txt"
    honest, greedy = new_key(keys, "honest"), new_key(keys, "greedy")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = size.silent + 1000
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, wanted)), hard))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (size.descriptors, size.descriptors))

    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder / "served"), str(keys)],
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            preexec_fn=limited,
        )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        began = time.monotonic()
        seen = Attack(size, int(url.rpartition(":")[2]), server.pid, honest, greedy).run()
        seconds = time.monotonic() - began
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
    probes, waited = sorted(seen.probes), sorted(seen.waited)
    return {
        "seconds": round(seconds, 1),
        "honest": {"asked": size.requests, "right": seen.right, "wrong": seen.wrong[:10]},
        "honest_seconds": {"median": round(statistics.median(waited), 2), "most": round(waited[-1], 2)},
        "healthz": {
            "probes": len(probes),
            "failed": seen.probes_failed,
            "median": round(statistics.median(probes), 4),
            "p99": round(probes[int(0.99 * (len(probes) - 1))], 4),
            "most": round(probes[-1], 4),
        },
        "peak_mib": round(seen.peak_mib, 1),
        "peak_descriptors": seen.peak_descriptors,
        "log_bytes": log.stat().st_size,
        "half_headers": seen.headers,
        "bodies": seen.bodies,
        "greedy_jobs": seen.greedy,
        "silent_opened": seen.reopened,
    }


def main() -> None:
    """Parse, run, print."""
    parser = command_line(__doc__)
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "KEYS"), help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args())
    if arguments["serve"]:
        serve(*arguments["serve"])
        return
    out = arguments["json"]
    size = Size(**{name: arguments[name] for name in vars(Size())})
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        found = attacked(size, Path(folder))
    print(json.dumps(found, indent=2))
    write_figures(found, out)


if __name__ == "__main__":
    main()

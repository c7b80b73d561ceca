"""What clients see of a server while everything fails, recorded and checked: 21 kinds of faults, two at a time.

    python benchmarks serving_history                                # 10,000 operations, 100 faults, seed 0
    python benchmarks serving_history --operations 100000 --faults 1000 --seed 1 --json found.json --history h.jsonl
    python benchmarks serving_history --ranks model --operations 2000 --faults 20    # `ditmesh serve` with a model
    python benchmarks serving_history --kinds kill-in-write,clock-jump --faults 40
    python benchmarks serving_history --check h.jsonl                # check a history that is there

Clients of three keys submit jobs, read, follow, cancel, list and fetch, and record each request and answer in a
history (tests/support/history.py says what its checker proves). Meanwhile a schedule that depends on the seed alone
brings faults: processes are killed and stopped, the disk is full, fails, or tears a page of the database and ends the
server in the middle of a write (tests/support/fault_points.py), its lock is held, the clock jumps, clients are slow or
vanish, a second server is started on the folder, a rank has no memory. A server that has ended is started again. *Back*
is the time from the end of both faults until a job that is asked for then is done.

The usual server is the real HTTP side, queue and dispatcher with ranks that are processes without a model, forked from
a process that has imported everything, so that a restart takes a moment; `--ranks model` is the whole program. The
folder is in memory. The exit code is 1 when anything is found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import psutil
from clients import Asker, Client, Judge, Owner, receipt_digest
from drills import Drills
from rich.console import Console
from rich.table import Table
from server import Supervised

from harness import command_line, write_figures
from support.fault_points import FaultPoints, missing
from support.history import Checker, History, Recorder

OWNERS, SHARED = 3, Path("/dev/shm")
# Pictures of one owner that are under way at a restart: of two replicas with batches of four.
SLACK = 8
# Seconds in which jobs end after the last fault.
CALM = 180.0
# A model's requests: few, so that each can be made alone as well.
PROMPTS, SIZE = ("a red fox", "a cactus", "a pizza"), "32x32"


def wish_without_model(draw: random.Random, seed: int) -> dict[str, Any]:
    """A request of 1 or 2 pictures."""
    return {"prompt": f"a fox {seed}", "seed": seed, "n": draw.choice([1, 2]), "steps": 4}


def judge_without_model(wish: Mapping[str, Any], index: int, data: bytes) -> tuple[bool, str | None]:
    """The bytes follow from the request."""
    from support.serve import picture

    return data == picture(wish["prompt"], wish["seed"] + index, wish["steps"]), None


def wish_of_model(draw: random.Random, seed: int) -> dict[str, Any]:
    """A small picture."""
    return {"prompt": draw.choice(PROMPTS), "seed": seed, "n": draw.choice([1, 2]), "steps": 3, "size": SIZE}


def judge_of_model(wish: Mapping[str, Any], index: int, data: bytes) -> tuple[bool, str | None]:
    """A whole picture, whose receipt is of the request; `compared` compares some with those made alone."""
    from PIL import Image

    from ditmesh.generate.receipt import PNG_KEYWORD

    image = Image.open(BytesIO(data))
    image.load()
    receipt = json.loads(image.info[PNG_KEYWORD])
    asked = receipt["prompt"], receipt["seed"], receipt["steps"]
    return asked == (wish["prompt"], wish["seed"] + index, wish["steps"]), receipt_digest(receipt)


class Run:
    """One run: a server, its clients and its faults."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, history: Path) -> None:
        from ditmesh.serve.http.keys import new_key

        self.arguments = arguments
        state, keys = folder / "state", folder / "keys"
        state.mkdir()
        self.owners = [Owner(name, new_key(keys, name)) for name in "abc"[:OWNERS]]
        probe = Owner("probe", new_key(keys, "probe"))
        self.recorder = Recorder(history)
        self.faults = FaultPoints(state, folder)
        scratch = folder / "tmp"
        scratch.mkdir()
        environment = self.faults.environment({**os.environ, "TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"})
        model = arguments.ranks == "model"
        self.server = Supervised("model" if model else "light", state, keys, environment, arguments.seed)
        self.judge: Judge = judge_of_model if model else judge_without_model
        self.wish = wish_of_model if model else wish_without_model
        self.probe = Asker(lambda: self.server.port, probe, self.recorder, self.judge)
        self.drills = Drills(
            self.server, self.faults, str(state / "queue.sqlite"), self.recorder, self.probe, self.wish,
            arguments.seed, arguments.longest,
        )  # fmt: skip
        self.resources: list[dict[str, float]] = []
        self._over = threading.Event()
        self._watched = threading.Event()

    def kinds(self) -> list[str]:
        """Of faults that this server can have."""
        named = self.arguments.kinds or [*self.drills.kinds]
        # Without the process that forks ranks, these are not the ranks of the real launcher.
        return [kind for kind in named if self.arguments.ranks == "model" or kind != "kill-helper"]

    def run(self) -> None:
        """Everything up to the last read."""
        if not self.server.wait_until_up():
            raise SystemExit(f"the server did not start: {self.server.said[-3:]}")
        if self.drills.back(time.monotonic()) is None:
            raise SystemExit(f"the server does no job: {self.server.said[-3:]}")
        clients = [
            Client(
                lambda: self.server.port, owner, self.recorder, self.judge, 1 + OWNERS * number + place,
                self.arguments.seed, [one for one in self.owners if one is not owner], self.wish,
            )
            for number in range(self.arguments.clients)
            for place, owner in enumerate(self.owners)
        ]  # fmt: skip
        threads = [threading.Thread(target=client.run, args=(self._over,), daemon=True) for client in clients]
        watching = threading.Thread(target=self._watch, daemon=True)
        self.began = time.monotonic()
        for thread in [*threads, watching]:
            thread.start()
        pairs = self.drills.schedule(self.arguments.faults, self.kinds())
        self.drills.run(pairs, self.arguments.pause, self._late)
        while self.recorder.counts.total() < self.arguments.operations and not self._late():
            time.sleep(0.1)
        self._over.set()
        for thread in threads:
            thread.join(60.0)
        self._calm()
        self._watched.set()
        self.seconds = time.monotonic() - self.began

    def _late(self) -> bool:
        return time.monotonic() - self.began > self.arguments.seconds

    def _calm(self) -> None:
        """Every job ends, and is read once more, with all its pictures."""
        limit = time.monotonic() + CALM
        for owner in self.owners:
            reader = Asker(lambda: self.server.port, owner, self.recorder, self.judge)
            reader.list(1000)
            waiting = sorted(owner.by_id)
            while waiting and time.monotonic() < limit:
                waiting = [id for id in waiting if not self._read(reader, id)]
                if waiting:
                    time.sleep(0.05)
            # What a lost answer was about is known now.
            for tag in [*owner.unsure]:
                reader.submit(tag, owner.wishes[tag])
            for id in sorted(owner.live):
                while time.monotonic() < limit and not self._read(reader, id):
                    time.sleep(0.05)
            reader.list(1000)
            reader.close()

    def _read(self, reader: Asker, id: str) -> bool:
        job = reader.status(id)
        if job is None or job["status"] not in ("succeeded", "failed", "cancelled"):
            return False
        for index in job["done"]:
            reader.fetch(id, int(index))
        return True

    def _watch(self) -> None:
        """Memory, descriptors and threads of each server process, over its life."""
        while not self._watched.wait(2.0):
            with_process = self.server.pid
            try:
                process = psutil.Process(with_process)
                with process.oneshot():
                    self.resources.append(
                        {
                            "pid": with_process,
                            "age": time.time() - process.create_time(),
                            "mib": process.memory_info().rss / 2**20,
                            "descriptors": process.num_fds(),
                            "threads": process.num_threads(),
                        }
                    )
            except (psutil.Error, ValueError):
                continue

    def compared(self) -> dict[str, int]:
        """Pictures of the run and the same ones made alone afterwards: how many, and the largest difference of 255."""
        if self.arguments.ranks != "model":
            return {}
        import numpy
        from PIL import Image

        def pixels(data: bytes) -> Any:
            return numpy.asarray(Image.open(BytesIO(data)).convert("RGB")).astype(int)

        found, worst = 0, 0
        for owner in self.owners:
            reader = Asker(lambda: self.server.port, owner, Recorder(os.devnull), self.judge)
            for id in sorted(owner.by_id)[: self.arguments.compared // OWNERS]:
                wish = owner.wishes[owner.by_id[id]]
                first = reader.ask("", {}, "GET", f"/v1/jobs/{id}/images/0")
                if first is None or first[0] != 200:
                    continue
                answer = reader.ask("", {}, "POST", "/v1/jobs", dict(wish) | {"n": 1}, f"alone-{id}")
                assert answer is not None
                other, status = json.loads(answer[1])["id"], "queued"
                while status in ("queued", "running"):
                    time.sleep(0.02)
                    told = reader.ask("", {}, "GET", f"/v1/jobs/{other}")
                    status = json.loads(told[1])["status"] if told else status
                alone = reader.ask("", {}, "GET", f"/v1/jobs/{other}/images/0")
                assert alone is not None
                found, worst = found + 1, max(worst, int(abs(pixels(first[1]) - pixels(alone[1])).max()))
            reader.close()
        return {"compared": found, "largest_difference": worst}


def slopes(resources: list[dict[str, float]]) -> dict[str, Any]:
    """Growth a minute, of the server's process that lived longest, in the second half of its life; standard errors."""
    ages = Counter(one["pid"] for one in resources)
    if not ages:
        return {}
    ((pid, number),) = ages.most_common(1)
    # Before that, it fills what it keeps of jobs up to a number.
    own = [one for one in resources if one["pid"] == pid][number // 2 :]
    number = len(own)
    if number < 5:
        return {}
    found: dict[str, Any] = {"minutes": (own[-1]["age"] - own[0]["age"]) / 60, "samples": number}
    x = [one["age"] / 60 for one in own]
    mean = statistics.fmean(x)
    spread = sum((at - mean) ** 2 for at in x)
    for name in ("mib", "descriptors", "threads"):
        y = [one[name] for one in own]
        middle = statistics.fmean(y)
        slope = sum((at - mean) * (value - middle) for at, value in zip(x, y, strict=True)) / spread
        rest = sum((value - middle - slope * (at - mean)) ** 2 for at, value in zip(x, y, strict=True))
        found[name] = {
            "slope": slope, "error": (rest / max(1, number - 2) / spread) ** 0.5, "first": y[0], "last": y[-1]
        }  # fmt: skip
    return found


def quantile(values: list[float], share: float) -> float | None:
    """Of sorted values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None


def checked(history: Path, slack: int) -> dict[str, Any]:
    """What the checker finds in a history."""
    with history.open(encoding="utf-8") as lines:
        checker = Checker(History.read(lines), slack)
    anomalies = checker.run()
    return {
        "operations": len(checker.history.operations) - len(checker.faults),
        "outcomes": Counter(one.outcome for one in checker.history.operations if one.f != "fault"),
        "kinds_of_operations": {name: number for name, number in checker.figures.items() if name.islower()},
        "anomalies": dict(Counter(one.kind for one in anomalies)),
        "examples": [f"{one.kind}: {one.what} {one.operations}" for one in anomalies[:30]],
    }


def measured(arguments: argparse.Namespace, base: Path) -> dict[str, Any]:
    """A run and its check."""
    history = arguments.history or base / "history.jsonl"
    run = Run(arguments, base, history)
    try:
        run.run()
        compared = run.compared()
    finally:
        run.server.end()
        run.recorder.close()
    back = [one["back_seconds"] for one in run.drills.found if one["back_seconds"] is not None]
    kinds = Counter(kind for one in run.drills.found for kind in one["faults"])
    return {
        "seed": arguments.seed,
        "ranks": arguments.ranks,
        "seconds": run.seconds,
        "faults": sum(kinds.values()),
        "kinds_of_faults": dict(sorted(kinds.items())),
        "back_seconds": {"p50": quantile(back, 0.5), "p95": quantile(back, 0.95), "p99": quantile(back, 0.99),
                         "most": max(back, default=None)},
        "not_back": run.drills.problems,
        "pairs": run.drills.found,
        "starts": run.server.starts,
        "exits": dict(run.server.exits),
        "second_servers": dict(run.drills.ended_second),
        "log": dict(run.server.log().most_common(25)),
        "growth": slopes(run.resources),
        **compared,
        **checked(history, arguments.slack),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """The figures as tables."""
    console, table = Console(), Table(title=result["machine"]["text"], title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("operations: answered, refused, unknown", ", ".join(
        str(result["outcomes"].get(name, 0)) for name in ("ok", "no", "unknown")))  # fmt: skip
    if "faults" in result:
        table.add_row("faults, kinds", f"{result['faults']}, {len(result['kinds_of_faults'])}")
        times = [result["back_seconds"][name] for name in ("p50", "p95", "p99", "most")]
        table.add_row("back in service: p50, p95, p99, longest", ", ".join(
            "-" if one is None else f"{one:.2f} s" for one in times))  # fmt: skip
        table.add_row("processes of the server", str(result["starts"]))
        for name, of in result["growth"].items():
            if isinstance(of, dict):
                table.add_row(
                    f"{name} a minute", f"{of['slope']:+.3f} ± {of['error']:.3f} ({of['last']:.0f} at the end)"
                )
    for name, number in result["kinds_of_operations"].items():
        table.add_row(name, str(number))
    table.add_row("anomalies", str(sum(result["anomalies"].values())))
    console.print(table)
    for said in [*result["examples"], *result.get("not_back", ())]:
        console.print(f"FOUND {said}", highlight=False, markup=False)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--operations", type=int, default=10_000, help="of clients, at least")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the schedule and of what clients draw")
    parser.add_argument("--clients", type=int, default=3, help="of each of the three keys")
    parser.add_argument("--ranks", choices=("light", "model"), default="light")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="of faults; default: all")
    parser.add_argument("--longest", type=float, default=1.5, help="seconds of a fault")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two pairs of faults")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no more faults after so long")
    parser.add_argument("--slack", type=int, default=SLACK, help="pictures that an owner may be ahead")
    parser.add_argument("--compared", type=int, default=24, help="pictures of a model that are made again, alone")
    parser.add_argument("--history", type=Path, metavar="FILE", help="keep the history here")
    parser.add_argument("--check", type=Path, metavar="FILE", help="only check this history")
    arguments = parser.parse_args()
    from machine import describe_machine

    machine = describe_machine()
    if arguments.check is not None:
        result = {"machine": machine, **checked(arguments.check, arguments.slack)}
    else:
        if (why := missing()) is not None:
            parser.error(why)
        with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as base:
            result = {"machine": machine, **measured(arguments, Path(base))}
    show(result)
    write_figures(result, arguments.json)
    if result["anomalies"] or result.get("not_back") or result.get("largest_difference", 0) > 1:
        sys.exit(1)


if __name__ == "__main__":
    main()

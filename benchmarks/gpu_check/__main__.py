"""What a single GPU can prove of ditmesh, in three commands of less than ten minutes each.

    PYTHONPATH=src python benchmarks/gpu_check --run first --budget 570 --json out.json --markdown out.md
    PYTHONPATH=src python benchmarks/gpu_check --run second --budget 570 --json out.json --markdown out.md
    PYTHONPATH=src python benchmarks/gpu_check --run third --budget 570 --json out.json --markdown out.md
    PYTHONPATH=src python benchmarks/gpu_check --part kernels        # one part, again
    PYTHONPATH=src python benchmarks/gpu_check --device cpu --quick  # a rehearsal of all of it without a GPU

It needs this repository, torch >= 2.6 and diffusers; what else is missing is named, with the parts that are skipped
for it. Parts come in an order in which a red one makes those after it meaningless first; each has a time budget, and
one that fails, crashes or hangs does not end the others. Ranks share the GPU: over NCCL where it lets them, else over
gloo, and what gloo cannot carry is copied through host memory. They live as long as the command; a failure ends them,
and others are started. The file of --json is written after every row and keeps parts of earlier commands on the same
machine and versions.

Exit code: 0 when nothing failed, 1 when something did, 2 when nothing could run. Parts that are skipped do not count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))


class Part(NamedTuple):
    """A part of the check: what yields its rows, of which each that is not ``ok`` fails it, and seconds on a GPU."""

    run: Callable[[Any, bool], Iterator[dict[str, Any]]]
    seconds: float


# In the order in which they run.
FIRST = ("machine", "kernels", "backends", "nccl", "collectives", "strategies", "faults", "reproducible")
SECOND = ("parity", "training", "waits", "host", "flux", "memory", "around", "server")
THIRD = ("rounding", "sizes", "images", "commands")
RUNS = {"first": FIRST, "second": SECOND, "third": THIRD}
# What the CPU takes longer for a part than a GPU.
SLOW = 6.0
# ditmesh's dependencies, and what its tests' models come from.
USED = (
    *("diffusers", "transformers", "accelerate", "safetensors", "numpy", "PIL", "psutil", "cloudpickle", "greenlet"),
    *("pydantic", "yaml", "typer", "rich", "httpx", "peft"),
)


def missing() -> list[str]:
    """What ditmesh uses and this machine does not have."""
    return [name for name in USED if importlib.util.find_spec(name) is None]


def parts() -> dict[str, Part]:
    """All parts by name."""
    import messages
    import several
    import single
    import whole

    found = {name: Part(single.streamed(name, run), seconds) for name, (run, seconds) in single.PARTS.items()}
    found |= {name: Part(*part) for module in (messages, several, whole) for name, part in module.PARTS.items()}
    return {name: found[name] for name in (*FIRST, *SECOND, *THIRD)}


def guarded_part(
    part: Part, workers: Any, quick: bool, limit: float, seen: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """A part's rows and what became of it, whatever happens to the workers; ``seen`` gets them after every row."""
    from basics import Skipped, first_line

    start, rows, ended = time.monotonic(), [], ""
    workers.deadline = start + limit
    try:
        for row in part.run(workers, quick):
            rows.append(row)
            seen({"status": "failed", "ended": "the command was ended", "seconds": 0.0, "rows": rows})
            if time.monotonic() > workers.deadline:
                ended = f"its {limit:.0f} seconds were over"
                break
    except Skipped as reason:
        rows.append({"skipped": str(reason)})
    except Exception as error:
        rows.append({"ok": False, "failed": first_line(error)})
    failed = [row for row in rows if row.get("ok") is False]
    skipped = [row for row in rows if "skipped" in row]
    status = "failed" if failed or ended else "skipped" if len(skipped) == len(rows) else "ok"
    found = {"status": status, "seconds": round(time.monotonic() - start, 1), "rows": rows}
    return {**found, **({"ended": ended} if ended else {})}


def as_markdown(result: dict[str, Any], every: dict[str, Part]) -> str:
    """The whole check as tables."""
    lines = [f"{result['machine']['text']}; {result['source']}.", ""]
    if not result["cuda"]:
        lines += ["Rehearsed on the CPU, at reduced sizes. Nothing here says anything about a GPU.", ""]
    lines += ["| part | | seconds | rows | failed | skipped |", "|---|---|---|---|---|---|"]
    for name, part in result["parts"].items():
        failed = sum(row.get("ok") is False for row in part["rows"])
        skipped = sum("skipped" in row for row in part["rows"])
        word = part["status"] + (f": {part['ended']}" if "ended" in part else "")
        lines.append(f"| {name} | {word} | {part['seconds']} | {len(part['rows'])} | {failed} | {skipped} |")
    for name, part in result["parts"].items():
        doc = (every[name].run.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"### {name}", "", doc, ""]
        columns = list(dict.fromkeys(column for row in part["rows"] for column in row))
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)] if columns else []
        for row in part["rows"]:
            cells = [row.get(column, "") for column in columns]
            shown = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
            lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", "<br>") for cell in shown) + " |")
    return "\n".join(lines) + "\n"


def earlier(path: Path | None, result: dict[str, Any]) -> dict[str, Any]:
    """What an earlier command has written on this machine with these versions; else ``result``."""
    if path is None or not path.exists():
        return result
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return result
    alike = all(before.get(key) == result[key] for key in ("machine", "source", "cuda", "quick"))
    return {**before, "missing": result["missing"]} if alike else result


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=FIRST + SECOND + THIRD, help="only these")
    parser.add_argument("--run", choices=list(RUNS), help="only the parts of one of the three commands")
    parser.add_argument("--budget", type=float, default=1e6, help="seconds after which the command ends; usual: none")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto", help="cpu: a rehearsal without a GPU")
    parser.add_argument("--quick", action="store_true", help="the least of everything")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--worker", nargs=2, type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Run the parts, write what was found, return the exit code."""
    options = options_of(sys.argv[1:])
    if options.device == "cpu":
        os.environ["GPU_CHECK_DEVICE"] = "cpu"
    if options.worker:
        return worker(*options.worker)
    lacking = missing()
    if "diffusers" in lacking:
        print("diffusers is not installed: nothing was checked.")
        return 2
    from basics import ON_GPU
    from workers import Workers

    from machine import describe_machine

    end, every = time.monotonic() + options.budget, parts()
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "source": subprocess.getoutput(f"git -C {Path(__file__).parent} describe --always --dirty"),
        "cuda": ON_GPU,
        "quick": options.quick,
        "missing": lacking,
        "facts": {},
        "parts": {},
    }
    result = earlier(options.json, result)
    print(f"{result['machine']['text']}; {result['source']}", flush=True)
    if lacking:
        print(f"not installed: {', '.join(lacking)}", flush=True)
    workers, ran = Workers(result["facts"]), []
    try:
        for name in options.part or RUNS.get(options.run, FIRST + SECOND + THIRD):
            print(f"{name} …", end=" ", flush=True)

            def write(part: dict[str, Any], name: str = name) -> None:
                result["parts"][name] = part
                if options.json:
                    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                if options.markdown:
                    options.markdown.write_text(as_markdown(result, every), encoding="utf-8")

            limit = min(every[name].seconds * (1.0 if ON_GPU else SLOW), end - time.monotonic())
            if limit <= 0:
                part: dict[str, Any] = {
                    "status": "failed",
                    "seconds": 0.0,
                    "rows": [],
                    "ended": f"the {options.budget:g} seconds of the command were over before it",
                }
            else:
                part = guarded_part(every[name], workers, options.quick, limit, write)
            ran.append(part["status"])
            print(f"{part['status']} in {part['seconds']} s", *([part["ended"]] if "ended" in part else []), flush=True)
            for row in part["rows"]:
                if row.get("ok") is False or set(row) == {"skipped"}:
                    print(f"  {row}", flush=True)
            write(part)
    finally:
        workers.end()
    if not ON_GPU:
        print("Rehearsed on the CPU, at reduced sizes.")
    return 1 if "failed" in ran else 0 if "ok" in ran else 2


def worker(rank: int, descriptor: int) -> int:
    """A worker process; see `workers`."""
    import messages
    import several
    import single
    import whole
    from workers import work

    work(rank, descriptor, {**messages.FUNCTIONS, **several.FUNCTIONS, **single.FUNCTIONS, **whole.FUNCTIONS})
    return 0


if __name__ == "__main__":
    sys.exit(main())

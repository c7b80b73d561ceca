"""What every benchmark shares: its command line, figures as JSON, and ratios of contenders that took turns."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SRC = Path(__file__).resolve().parents[1] / "src"
# Begins the line of an answer.
ANSWER = "= "


def command_line(description: str | None, figures: bool = True) -> argparse.ArgumentParser:
    """A parser with a benchmark's docstring as its help; with ``figures`` it has ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if figures:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    return parser


def traced(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures behind the command that makes them."""
    return {"command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]), **figures}


def write_figures(figures: Mapping[str, Any], file: Path | None) -> None:
    """Write figures as JSON, with their command; None: nowhere."""
    if file is not None:
        file.write_text(json.dumps(traced(figures), indent=1) + "\n", encoding="utf-8")


def write_compactly(figures: Mapping[str, Any], file: Path | None) -> None:
    """The same, with a line for every row of a table, and lines of their own for what is short."""
    if file is not None:
        file.write_text(compact(traced(figures), 4) + "\n", encoding="utf-8")


def add_missing(file: Path, rows: Iterable[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]) -> None:
    """Measure the rows that a file of JSON lines lacks, and add each as soon as it is measured.

    Args:
        rows: what a row is known by, and what measures the rest of it.
    """
    # Of torch, which not every benchmark needs.
    from machine import describe_machine

    if not file.exists():
        file.write_text(json.dumps(traced({"machine": describe_machine()})) + "\n", encoding="utf-8")
    known = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row, measure in rows:
        if not any(row.items() <= there.items() for there in known):
            line = json.dumps(row | measure())
            known.append(row)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(line + "\n")


def compact(value: Any, levels: int) -> str:
    """JSON that is broken into lines in its outer levels only, and there only where it would be long."""
    whole = json.dumps(value)
    if levels == 0 or len(whole) <= 120 or not isinstance(value, list | dict):
        return whole
    pairs = isinstance(value, dict)
    entries = [(f"{json.dumps(str(key))}: ", v) for key, v in value.items()] if pairs else [("", v) for v in value]
    lines = ",\n".join(name + compact(each, levels - 1) for name, each in entries)
    opened, closed = "{}" if pairs else "[]"
    return f"{opened}\n{lines}\n{closed}"


def paired_ratios(baseline: Sequence[float], times: Sequence[float]) -> list[float]:
    """Speed-up over the baseline, turn by turn: neighbours in time are compared, because machines drift."""
    return [b / t for b, t in zip(baseline, times, strict=True)]


def ratio_cells(ratios: Sequence[float]) -> list[str]:
    """Median, smallest and largest ratio as cells of a table."""
    return [f"{statistics.median(ratios):.3f}x", f"{min(ratios):.3f}", f"{max(ratios):.3f}"]


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], machine: Mapping[str, Any], width: int = 110
) -> None:
    """Print rows as a table whose first column is text and whose others are numbers, and the machine below it."""
    table, console = Table(title=title), Console(width=width)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(machine["text"])


# --- one process for each version ----------------------------------------------------------------------------------


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests of a `Version`: a JSON list on each line, ``[function, ranks, threads, arguments…]``.

    Args:
        functions: run on every rank, by name; they take the arguments and return what JSON can hold.
    """
    from ditmesh.launch import RankPool

    pools: dict[tuple[int, int], RankPool] = {}
    for line in sys.stdin:
        function, ranks, threads, *arguments = json.loads(line)
        try:
            if (ranks, threads) not in pools:
                pools[ranks, threads] = RankPool(ranks, threads=threads)
            answer: Any = {"results": pools[ranks, threads].run(functions[function], *arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
        print(ANSWER + json.dumps(answer), flush=True)
    for pool in pools.values():
        pool.close()


class Version:
    """A process that runs contenders with one version of ditmesh.

    Args:
        script: the benchmark; with ``--serve`` it calls `serve`.
        src: folder that holds the package.
    """

    def __init__(self, script: str, src: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(Path(script).resolve()), "--serve"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def ask(self, function: str, ranks: int, threads: int, *arguments: Any) -> list[Any]:
        """What every rank answers.

        Raises:
            RuntimeError: the function cannot run; says why.
        """
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([function, ranks, threads, *arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                answer = json.loads(line.removeprefix(ANSWER))
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer["results"]
        raise RuntimeError(f"the process that measures {function} of {arguments[0]} has ended")

    def close(self) -> None:
        """End the process and its ranks."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


def against_option(parser: argparse.ArgumentParser) -> None:
    """Let a command line name another version; such a benchmark also understands ``--serve``."""
    parser.add_argument("--against", type=Path, help="src/ of another version, to be measured in turns with this one")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)


@contextmanager
def versions(script: str, against: Path | None) -> Iterator[dict[str, Version]]:
    """Processes of the versions that take turns: ``"that"``, if another one is named, and ``"this"``."""
    folders = {"this": SRC} if against is None else {"that": against.resolve(), "this": SRC}
    with ExitStack() as stack:
        found = {}
        for name, folder in folders.items():
            found[name] = Version(script, folder)
            stack.callback(found[name].close)
        yield found


def in_turns(names: Sequence[str], turn: int) -> list[str]:
    """Versions in the order of a turn: the one that is first in one turn is last in the next."""
    return list(names)[:: 1 if turn % 2 == 0 else -1]

"""Planted faults: small wrong edits of the product, each with the tests that must see it.

A fault is one entry of a TOML file beside this module: what goes wrong for a user, the text `old` of the product, the
text `new` that takes its place, and the tests that must fail then. `old` has to stand exactly once in all of
src/ditmesh, and a test is named by its file's name without folders, so that a fault stays where it is when code moves
to another file or a test to another folder.

The edits are made in a copy of the tree. Every test runs there unchanged first and has to pass; with the fault it has
to fail by an assertion or an error, not by a time-out or by a module that cannot be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "planted-faults.md"
RECORD = HERE / "seen.json"
# Longer than any named test takes on a loaded machine. A fault that makes ranks wait for ever is not seen so.
SECONDS = 400
# What no fault changes is imported once, so that the process of a fault is a fork that has it: these modules first,
# then what else of installed packages the tests have imported when they ran unchanged.
LIBRARIES = ("torch", "torch.distributed", "diffusers", "transformers", "safetensors.torch", "PIL.Image")
# These start threads or look for devices when they are imported.
LATE = ("ray", "grpc", "tensorboard", "schemathesis")


@dataclass(frozen=True)
class Fault:
    """One planted fault; `tests` are written as ``file.py::test_name``."""

    id: str
    room: str
    wrong: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Changes with what is planted and with who must see it."""
        return hashlib.sha256(json.dumps([self.old, self.new, *self.tests]).encode()).hexdigest()[:12]

    def file(self, source: Path) -> Path:
        """The file of `source` in which `old` stands."""
        places = [path for path in sorted(source.rglob("*.py")) for _ in range(path.read_text("utf-8").count(self.old))]
        if len(places) != 1:
            names = ", ".join(str(path.relative_to(source)) for path in places) or "nowhere"
            raise ValueError(
                f"fault {self.id}: its old text stands {len(places)} times in src/ditmesh ({names}) and has to stand "
                f"there once; mend it in tests/faults/{self.room}.toml: {self.old!r}"
            )
        return places[0]

    def nodes(self, tests: Path) -> list[str]:
        """What pytest is given, from the folder above `tests`."""
        nodes = []
        for name in self.tests:
            file, _, function = name.partition("::")
            paths = sorted(tests.rglob(file))
            definition = rf"def {re.escape(function.partition('[')[0])}\("
            if len(paths) != 1 or not re.search(definition, paths[0].read_text("utf-8")):
                raise ValueError(f"no test {name} in tests/; a fault that it has to see needs another one")
            nodes.append(f"{paths[0].relative_to(tests.parent)}::{function}")
        return nodes


def read_faults(folder: Path = HERE) -> list[Fault]:
    faults = []
    for path in sorted(folder.glob("*.toml")):
        for name, entry in tomllib.loads(path.read_text("utf-8")).items():
            faults.append(Fault(id=name, room=path.stem, **{**entry, "tests": tuple(entry["tests"])}))
    return faults


@dataclass
class Outcome:
    """What a run of tests said: pytest's plug-in, which keeps the outcome of each test."""

    failed: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    broken: str = ""
    seconds: float = 0.0
    # Modules of libraries that it has imported.
    libraries: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken = f"{report.nodeid} cannot be imported"

    def of(self, node: str) -> list[str]:
        """Failures of a test function, or of the one case that `node` names."""
        return [words for name, words in self.failed.items() if name == node or name.startswith(node + "[")]

    def missed(self, nodes: Iterable[str]) -> str:
        """Why a planted fault counts as not seen by all tests that must see it; nothing where it was seen."""
        if self.broken:
            return self.broken
        for name in nodes:
            failures = self.of(name)
            if not failures:
                return f"{name} passes"
            for words in failures:
                if found := re.search(r"\b(ImportError|ModuleNotFoundError|SyntaxError|Timeout(?=Expired| >))", words):
                    return f"{name} fails by {found[1]}"
        return ""


def import_libraries(names: Iterable[str]) -> None:
    """Import what no fault changes, so that the processes of the faults, which are forks, have it already."""
    for name in names:
        if name not in sys.modules and name.partition(".")[0] not in LATE:
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Copy:
    """A copy of the tree in which faults are planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
        for name in names:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        self._time = int(time.time())

    def write(self, path: Path, text: str) -> None:
        """With a time of its own: Python takes a compiled form for current by its source's seconds and size."""
        path.write_text(text, encoding="utf-8")
        self._time += 10
        os.utime(path, (self._time, self._time))

    def run(self, nodes: list[str], first: bool = False) -> Outcome:
        """Run tests in a process of their own, which has the libraries already; `first`: end at the first failure."""
        began = time.monotonic()
        answer = self.folder / "outcome.json"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            self._child(nodes, answer, first)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() - began > SECONDS:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return Outcome(broken=f"time-out of {SECONDS} s", seconds=SECONDS)
            time.sleep(0.05)
        seconds = time.monotonic() - began
        if not answer.exists():
            return Outcome(broken="the process of the tests ended without an answer", seconds=seconds)
        return Outcome(**{**json.loads(answer.read_text("utf-8")), "seconds": seconds})

    def _child(self, nodes: list[str], answer: Path, first: bool) -> None:
        os.setpgid(0, 0)
        os.chdir(self.folder)
        with open(os.devnull, "ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.path[:] = [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(ROOT / "src")]
        sys.path.insert(0, str(self.folder / "src"))
        os.environ["PYTHONPATH"] = str(self.folder / "src")
        outcome = Outcome()
        options = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--basetemp", f"{self.folder / 'temporary'}"]
        pytest.main([*options, *["-x"][:first], *nodes], plugins=[outcome])
        files = {name: str(getattr(module, "__file__", None)) for name, module in [*sys.modules.items()]}
        outcome.libraries = [name for name, file in files.items() if "site-packages" in file]
        answer.write_text(json.dumps(vars(outcome)), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)


def unchanged(copy: Copy, faults: list[Fault]) -> dict[str, str]:
    """Tests that do not pass without a fault, each with the reason; a file of tests at a time."""
    files: defaultdict[str, set[str]] = defaultdict(set)
    for fault in faults:
        for name in fault.nodes(copy.folder / "tests"):
            files[name.partition("::")[0]].add(name)
    wrong = {}
    for file, nodes in files.items():
        outcome = copy.run(sorted(nodes))
        import_libraries(outcome.libraries)
        print(f"unchanged: {file}, {len(outcome.passed)} passed in {outcome.seconds:.0f} s", flush=True)
        for name in nodes:
            ran = any(passed == name or passed.startswith(name + "[") for passed in outcome.passed)
            if outcome.broken or outcome.of(name) or not ran:
                wrong[name] = outcome.broken or " ".join(outcome.of(name)[:1]) or "no case of it ran"
    return wrong


def run_faults(faults: list[Fault], every: list[Fault]) -> int:
    """Plant each fault, note its line in the record of all, and return how many were not seen."""
    missed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(Path(folder))
        wrong = unchanged(copy, faults)
        for fault in faults:
            nodes = fault.nodes(copy.folder / "tests")
            path = fault.file(copy.folder / "src" / "ditmesh")
            text = path.read_text("utf-8")
            seconds = 0.0
            reason = next((f"{name} fails without it: {wrong[name]}" for name in nodes if name in wrong), "")
            if not reason:
                copy.write(path, text.replace(fault.old, fault.new))
                outcome = copy.run(nodes, first=len(nodes) == 1)
                copy.write(path, text)
                reason, seconds = outcome.missed(nodes), outcome.seconds
            note(every, fault.id, {"digest": fault.digest, "seconds": round(seconds, 1), "missed": reason})
            missed += bool(reason)
            print(f"{fault.id}: {f'NOT SEEN: {reason}' if reason else 'seen'} ({seconds:.1f} s)", flush=True)
    return missed


HEAD = """# Planted faults

What the tests prove is shown by faults: each line is a small wrong edit of the product, made in a copy of
the tree, and the tests that fail with it and pass without it. `make test-faults` plants the faults one at a
time and writes this page; the edits stand in `tests/faults/`. Seconds are those of the failing run, with its
start, on a machine of two cores that was busy with other work as well.
"""


def as_markdown(faults: list[Fault], record: dict[str, Any]) -> str:
    """The page of docs."""
    seen = sum(is_seen(fault, record) for fault in faults)
    lines = [HEAD, f"{seen} of {len(faults)} are seen."]
    for room in sorted({fault.room for fault in faults}):
        lines += ["", f"## {room}", "", "| fault | what goes wrong | seen by | seconds |", "|---|---|---|---|"]
        for fault in faults:
            if fault.room == room:
                tests = ", ".join(f"`{name}`" for name in fault.tests) if is_seen(fault, record) else "**not seen**"
                seconds = record.get(fault.id, {}).get("seconds", "")
                lines.append(f"| `{fault.id}` | {' '.join(fault.wrong.split())} | {tests} | {seconds} |")
    return "\n".join(lines) + "\n"


def is_seen(fault: Fault, record: dict[str, Any]) -> bool:
    """True if the record has a run of just this fault and these tests in which all of them saw it."""
    entry = record.get(fault.id, {})
    return entry.get("digest") == fault.digest and not entry["missed"]


def note(every: list[Fault], name: str, entry: dict[str, Any]) -> None:
    """Put a fault's line into the record and the page, beside other shares that may run."""
    known = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    known[name] = entry
    kept = {fault.id: known[fault.id] for fault in every if fault.id in known}
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(as_markdown(every, kept), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the tree and see which tests notice.")
    parser.add_argument("--only", help="ids, with commas between them")
    parser.add_argument("--share", help="K/N: the K-th of N shares")
    arguments = parser.parse_args()
    every = read_faults()
    faults = [fault for fault in every if not arguments.only or fault.id in arguments.only.split(",")]
    if arguments.share:
        share, _, shares = arguments.share.partition("/")
        faults = faults[int(share) - 1 :: int(shares)]
    if not faults:
        sys.exit(f"no fault is called {arguments.only}; their names are in docs/planted-faults.md")
    for fault in faults:
        fault.file(ROOT / "src" / "ditmesh")
        fault.nodes(ROOT / "tests")
    os.environ["OMP_NUM_THREADS"] = "1"
    # Compiled once, and not again in the process of every fault.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Of the environment's plug-ins the tests need one alone; others take seconds to import.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import_libraries(LIBRARIES)
    began = time.monotonic()
    missed = run_faults(faults, every)
    print(f"{len(faults) - missed} of {len(faults)} faults seen in {time.monotonic() - began:.0f} s")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

"""The folder of a study: finished cells are written immediately, and only missing cells run."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ...core.files import finite
from ...errors import InputError
from .plan import SYNCHRONOUS, Cell, Setup, StudyPlan
from .running import SUFFIX, Runner

# Cells, one JSON object a line, in the order they were finished.
CELLS = "cells.jsonl"
IMAGE_FOLDER = "cells"

# Called before a cell runs (with how many are to run in all), and with None when it is done.
OnCell = Callable[[Cell | None, int], None]

# The runner of a worker process, made once.
_runner: Runner | None = None


class Store:
    """The finished cells of a folder, which is made if need be.

    Raises `InputError`: the folder cannot be written to, or holds a file of cells that is none.
    """

    def __init__(self, folder: Path) -> None:
        from ...generate.job import check_folder

        check_folder(folder)
        check_folder(folder / IMAGE_FOLDER)
        self.images = folder / IMAGE_FOLDER
        self._file = folder / CELLS
        self._cells: dict[str, dict[str, Any]] = {}
        lines = self._file.read_bytes().splitlines() if self._file.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                result = json.loads(line)
                self._cells[result["key"]] = result
            except (ValueError, KeyError, TypeError):
                if number < len(lines):
                    raise InputError(
                        f"{self._file} is not a study's: line {number} holds no cell; choose another --out"
                    ) from None
                # The last line was being written when the process was killed.
                self._file.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))

    def get(self, cell: Cell, setup: Setup) -> dict[str, Any] | None:
        """A finished cell with all its files; else None."""
        key = cell.key(setup)
        result = self._cells.get(key)
        if result is None:
            return None
        files = [image["file"] for image in result["images"]]
        if cell.strategy == SYNCHRONOUS:
            files.append(f"{key}{SUFFIX}")
        return result if all((self.images / name).is_file() for name in files) else None

    def add(self, result: dict[str, Any]) -> None:
        """Store a finished cell; it is on disk when this returns."""
        line = json.dumps(finite(result), allow_nan=False)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        # As it will be read back: the keys of objects are text.
        self._cells[result["key"]] = json.loads(line)


def run_cells(
    plan: StudyPlan, store: Store, jobs: int = 1, on_cell: OnCell | None = None, launcher: str | None = None
) -> int:
    """Run the cells that the store lacks, in so many processes (1: this one); returns how many were run.

    Real ranks are those of the launcher of that name; see `ditmesh.launch.launcher`.
    """
    missing = [cell for cell in plan.cells if store.get(cell, plan.setup) is None]
    say = on_cell or (lambda cell, total: None)
    if jobs == 1 or len(missing) < 2:
        runner = Runner(plan.setup, store.images, launcher)
        for cell in missing:
            say(cell, len(missing))
            store.add(runner.run(cell))
            say(None, len(missing))
        return len(missing)
    # All reference cells run first.
    first = [cell for cell in missing if cell.strategy == SYNCHRONOUS]
    rest = [cell for cell in missing if cell.strategy != SYNCHRONOUS]
    with get_context("spawn").Pool(jobs, _start, (plan.setup, store.images, launcher)) as pool:
        for some in (first, rest):
            for cell, result in pool.imap_unordered(_run, some):
                say(cell, len(missing))
                store.add(result)
                say(None, len(missing))
    return len(missing)


def _start(setup: Setup, folder: Path, launcher: str | None) -> None:
    global _runner
    import torch

    torch.set_num_threads(1)
    _runner = Runner(setup, folder, launcher)


def _run(cell: Cell) -> tuple[Cell, dict[str, Any]]:
    assert _runner is not None
    return cell, _runner.run(cell)

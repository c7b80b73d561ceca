"""Run the cells of a plan that are not on disk yet, in this process or on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .plan import SYNCHRONOUS, Cell, Plan, Setup
from .running import Runner
from .store import Store

# Told before a cell runs (and how many are to run in all), and None when it is done.
OnCell = Callable[[Cell | None, int], None]

# The runner of a worker process, made once.
_runner: Runner | None = None


def run_cells(plan: Plan, store: Store, jobs: int = 1, on_cell: OnCell | None = None) -> int:
    """Run what is missing; the number of cells that were run.

    Args:
        plan: what is wanted.
        store: what is there.
        jobs: processes that run cells at the same time; 1: this one.
        on_cell: see `OnCell`.
    """
    missing = [cell for cell in plan.cells if store.get(cell, plan.setup) is None]
    say = on_cell or (lambda cell, total: None)
    if jobs == 1 or len(missing) < 2:
        runner = Runner(plan.setup, store.pictures)
        for cell in missing:
            say(cell, len(missing))
            store.add(runner.run(cell))
            say(None, len(missing))
        return len(missing)
    # What others are compared with comes first, all of it.
    first = [cell for cell in missing if cell.strategy == SYNCHRONOUS]
    rest = [cell for cell in missing if cell.strategy != SYNCHRONOUS]
    with get_context("spawn").Pool(jobs, _start, (plan.setup, store.pictures)) as pool:
        for some in (first, rest):
            for cell, result in _done(pool, some):
                say(cell, len(missing))
                store.add(result)
                say(None, len(missing))
    return len(missing)


def _done(pool: Any, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    return pool.imap_unordered(_run, cells)


def _start(setup: Setup, folder: Path) -> None:
    global _runner
    import torch

    torch.set_num_threads(1)
    _runner = Runner(setup, folder)


def _run(cell: Cell) -> tuple[Cell, dict[str, Any]]:
    assert _runner is not None
    return cell, _runner.run(cell)

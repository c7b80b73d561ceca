"""Tokens that move while a request runs: a rank that becomes slow in mid-request, and two ranks that are alike.

    python benchmarks/moving.py [--steps 40] [--slow-from 20] [--json out.json]
    python benchmarks/moving.py --even 1000          # two equal ranks, over so many steps of a small model

Rank 1 becomes slow by sleeping in every block for as long as it has just taken: it works at half its speed, on however
many tokens it has. Every step's seconds and waiting are those of `engine.all_loads()`; the JSON file has them for every
rank and step, as a page could draw them. The balanced step is that of speeds=2,1, which know the slow rank beforehand.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import exact
from harness import command_line, show_table, write_figures
from machine import describe_machine

CONTENDERS: dict[str, dict[str, Any]] = {
    "ring=2, even": {"ring": 2},
    "ring=2, speeds=2,1": {"ring": 2, "speeds": (2, 1)},
    "ring=2, speeds=auto": {"ring": 2, "speeds": "auto"},
    "displaced, even": {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    "displaced, speeds=auto": {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)", "speeds": "auto"},
}
# Steps behind the one in which a rank becomes slow until it is asked for what a step costs.
LATER = 6


def request(
    config: dict[str, Any], steps: int, slow_from: int, small: bool
) -> list[list[tuple[float, float, int, bool]]]:
    """For every rank and step: seconds, waiting, image tokens, and whether tokens moved."""
    import torch

    import ditmesh

    if small:
        from support.models import RAGGED, inputs, tiny

        model, made = tiny("Flux"), inputs("Flux", RAGGED)
    else:
        model, made = exact.benchmark_model(), exact.benchmark_inputs()
    slow = False
    undo = []
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        began = [0.0, 0.0]

        def starts(*_: Any, began: list[float] = began) -> None:
            began[:] = time.perf_counter(), ditmesh.engine_of(model).mesh.waited

        def ends(*_: Any, began: list[float] = began) -> None:
            if slow and torch.distributed.get_rank() == 1:
                waited = ditmesh.engine_of(model).mesh.waited - began[1]
                time.sleep(max(time.perf_counter() - began[0] - waited, 0.0))

        undo += [block.register_forward_pre_hook(starts), block.register_forward_hook(ends)]
    with ditmesh.parallelized(model, config), torch.no_grad():
        engine = ditmesh.engine_of(model)
        engine.begin_request(steps)
        for step in range(steps):
            slow = step >= slow_from
            engine.clock.advance()
            model(**made)
        engine.end_request()
        every = engine.all_loads()
    for handle in undo:
        handle.remove()
    return [[(one.seconds, one.waited, one.tokens, one.moved) for one in rank] for rank in every]


def main() -> None:
    """Measure and print."""
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--slow-from", type=int, default=20)
    parser.add_argument("--even", type=int, help="two equal ranks instead, over so many steps of a small model")
    options = parser.parse_args()

    machine = describe_machine()
    figures: dict[str, Any] = {"machine": machine}
    if options.even:
        with RankPool(2, threads=1) as pool:
            first, second = pool.run(request, CONTENDERS["ring=2, speeds=auto"], options.even, options.even, True)[0]
        shares = [a[2] / (a[2] + b[2]) for a, b in zip(first[1:], second[1:], strict=True)]
        even = sum(abs(2 * share - 1) <= 0.03 for share in shares)
        rows = [
            [f"{len(shares)}", f"{sum(a[3] for a in first)}", f"{even}", f"{min(shares):.3f}", f"{max(shares):.3f}"]
        ]
        columns = ["steps", "moves", "steps within 3 % of even", "least share of rank 0", "largest"]
        show_table("Two equal ranks, speeds=auto", columns, rows, machine)
        write_figures(figures | {"loads": [first, second]}, options.json)
        return
    rows, balanced = [], 0.0
    with RankPool(2, threads=1) as pool:
        for name, config in CONTENDERS.items():
            loads = pool.run(request, config, options.steps, options.slow_from, False)[0]
            figures[name] = loads
            took = [max(step) for step in zip(*([one[0] for one in rank] for rank in loads), strict=True)]
            before = statistics.median(took[2 : options.slow_from])
            later = statistics.median(took[options.slow_from + LATER :])
            balanced = later if name == "ring=2, speeds=2,1" else balanced
            moves = ", ".join(str(step) for step, one in enumerate(loads[0]) if one[3])
            over = f"{later / balanced:.2f}" if balanced else "-"
            tokens = f"{loads[0][-1][2]} : {loads[1][-1][2]}"
            rows.append([name, f"{before:.3f}", f"{later:.3f}", over, moves, tokens])
    columns = ["", "s a step", f"from {LATER} steps after on", "of balanced", "moved at", "tokens"]
    show_table(f"Two ranks, one at half speed from step {options.slow_from} on", columns, rows, machine)
    write_figures(figures, options.json)


if __name__ == "__main__":
    main()

"""How far the predictions of `ditmesh plan` are from published tables, and what the rule of "auto" names in them.

    python benchmarks/planner.py

Nothing is fitted to the tables, and nothing runs on a device: each row is a walk of the model's program without values.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from harness import command_line

TABLES = Path(__file__).with_name("published")


def published() -> dict[str, Any]:
    """Predictions beside published tables: errors, rank correlation, winners, and the rule's choice."""
    from ditmesh import ParallelConfig
    from ditmesh.lab.plan.hardware import Hardware, device, link
    from ditmesh.lab.plan.roofline import predict
    from ditmesh.layout import layout_of
    from ditmesh.layout.probe import meta_model
    from ditmesh.memory.catalogue import shapes
    from ditmesh.memory.sizes import workload_of
    from ditmesh.strategies.heads import heads_of

    result: dict[str, Any] = {}
    for path in sorted(TABLES.glob("*.yaml")):
        table = yaml.safe_load(path.read_text())
        known = shapes()[table["model"]]
        frames, rows, cols = known.token_grid(*table["size"], table.get("frames", 1))
        asked = {"rows": rows, "cols": cols, "frames": frames, "branches": table["branches"], "steps": table["steps"]}
        job = replace(workload_of(known, text=table.get("text")), **asked)
        hardware = Hardware(device(table["device"]), link(table["link"]), table["devices"])
        configs = {ParallelConfig(**row["config"]): row["seconds"] for row in table["rows"]}
        given = known.transformer, known.config
        predicted = [predict(*given, config, job, hardware, torch.bfloat16).latency for config in configs]
        times = list(configs.values())
        # The row of one device says how fast that machine is; it is then no prediction.
        base = next((at for at, config in enumerate(configs) if config.world_size == 1), None)
        factor = times[base] / predicted[base] if base is not None else None
        others = [at for at in range(len(times)) if at != base]
        heads = heads_of(meta_model(*given), layout_of(meta_model(*given))) or 1
        most = max(config.world_size for config in configs)
        rule = ParallelConfig.auto(most, heads, branches=table["branches"], fits=configs.__contains__)
        result[path.stem] = {
            "source": table["source"],
            "rows": [
                {"config": config.describe(), "seconds": seconds, "predicted": round(guess, 2)}
                for (config, seconds), guess in zip(configs.items(), predicted, strict=True)
            ],
            "mean absolute error": _error(predicted, times, range(len(times))),
            "scaled by the row of one device": None
            if factor is None
            else _error([guess * factor for guess in predicted], times, others),
            "rank correlation": round(rank_correlation(predicted, times), 3),
            "loss of the predicted winner": round(times[predicted.index(min(predicted))] / min(times) - 1, 3),
            "loss of the rule": round(configs[rule] / min(times) - 1, 3),
        }
    tables = [*result.values()]
    for name in ("loss of the predicted winner", "loss of the rule"):
        result[f"tables without a {name}"] = sum(table[name] == 0 for table in tables)
    return result


def _error(predicted: Sequence[float], times: Sequence[float], which: Any) -> float:
    return round(statistics.mean(abs(predicted[at] / times[at] - 1) for at in which), 3)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    return statistics.correlation(ranks(one), ranks(other))


def main() -> None:
    """Predict and print."""
    command_line(__doc__).parse_args()
    print(json.dumps(published(), indent=1))


if __name__ == "__main__":
    main()

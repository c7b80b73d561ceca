"""What ranks on several hosts run: ``python -m support.host_ranks FOLDER < tasks.json``, as ranks of torchrun.

Every rank writes ``FOLDER/RANK.json``. Tasks are pairs of a tiny model's name and a configuration.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ditmesh
from ditmesh.launch import init_from_environment
from support.models import RAGGED, inputs, relative_error, run, tiny

# Even, so that formulas have whole numbers; four samples, for the axes that share them.
SIZE = replace(RAGGED, rows=8, cols=8, text=32, batch=4)


def example(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model and one call of it."""
    return tiny(name), inputs(name, SIZE, masks=False)


def hash_of(value: torch.Tensor) -> str:
    """The bits of a result."""
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def measured(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """One exact step on all ranks, against the unmodified model in the same process."""
    model, call = example(name)
    truth = run(model, call)
    with warnings.catch_warnings(record=True) as caught, ditmesh.parallelized(model, config):
        engine = ditmesh.engine_of(model)
        engine.begin_request(steps=4)
        mesh, value = engine.mesh, run(model, call)
        return {
            "error": relative_error(value, truth),
            "hash": hash_of(value),
            "hosts": list(mesh.hosts.numbers),
            "transports": {axis: getattr(mesh, axis).transport for axis in config if getattr(mesh, axis, None)},
            "warned": [str(one.message) for one in caught if one.category is ditmesh.HostsWarning],
        }


def main() -> None:
    init_from_environment(timeout=120, device="cpu")
    torch.set_num_threads(1)
    tasks = json.loads(Path(sys.argv[1], "tasks.json").read_text())
    results = [measured(name, config) for name, config in tasks]
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A small attack on a server, as benchmarks/server_attack.py has a large one: honest clients are served."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "server_attack.py"

pytestmark = pytest.mark.timeout(300)


def test_honest_clients_are_served_while_others_attack(tmp_path: Path):
    name = "server_attack"
    loaded = importlib.util.spec_from_file_location(name, SOURCE)
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    sys.modules[name] = module
    loaded.loader.exec_module(module)
    size = module.Size(requests=16, clients=4, silent=300, headers=300, bodies=4, megabytes=4, descriptors=256)
    found = module.attacked(size, tmp_path)
    assert found["honest"] == {"asked": 16, "right": 16, "wrong": []}
    assert found["healthz"]["failed"] == 0
    # Of a machine that does nothing else it is some hundredths.
    assert found["healthz"]["p99"] < 5.0
    assert found["peak_mib"] < 300
    assert found["log_bytes"] < 100_000
    assert found["peak_descriptors"] < 256

"""A small attack on a server, as benchmarks/server_attack.py has a large one: honest clients are served."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "server_attack.py"

pytestmark = pytest.mark.timeout(300)


@pytest.mark.matrix
def test_honest_clients_are_served_while_others_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SOURCE.parent)
    module = importlib.import_module(SOURCE.stem)
    size = module.Size(requests=16, clients=4, silent=300, headers=300, bodies=4, megabytes=4, descriptors=256)
    found = module.attacked(size, tmp_path)
    assert found["honest"] == {"asked": 16, "right": 16, "wrong": []}
    assert found["healthz"]["failed"] == 0
    # Of a machine that does nothing else it is some hundredths.
    assert found["healthz"]["p99"] < 5.0
    assert found["peak_mib"] < 300
    assert found["log_bytes"] < 100_000
    assert found["peak_descriptors"] < 256

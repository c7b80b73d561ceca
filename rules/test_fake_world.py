"""Every class under every strategy as ranks of up to eight GPUs: no host waits, no tensor is on the host."""

from __future__ import annotations

from typing import Any

import pytest

from ditmesh.config import ParallelConfig
from rules.requests import alone
from support.models import MAKERS

STALE = {"warmup": "fixed(1)"}
DISPLACED = {"exchange": "displaced", **STALE}
STAGES = {"patches": 3, **STALE}
CONFIGS: list[dict[str, Any]] = [
    *({axis: degree} for axis in ("ulysses", "ring", "tensor") for degree in (2, 4, 8)),
    {"data": 2},
    {"cfg": 2},
    *({"ring": degree, **DISPLACED} for degree in (2, 4, 8)),
    {"ring": 2, "exchange": "naive", **STALE},
    {"ulysses": 2, "shard": 2},
    {"ulysses": 4, "shard": 4},
    {"ulysses": 2, "ring": 2},
    {"ulysses": 4, "ring": 2},
    {"tensor": 2, "ulysses": 2},
    {"tensor": 2, "ring": 4},
    {"data": 2, "ulysses": 2},
    {"cfg": 2, "ulysses": 4},
    {"cfg": 2, "ring": 2},
    {"cfg": 2, "ring": 2, "ulysses": 2},
    {"cfg": 2, "ring": 4, **DISPLACED},
    {"tensor": 2, "ring": 2, **DISPLACED},
    {"data": 2, "cfg": 2, "ulysses": 2},
    {"pipe": 2, **STAGES},
    {"pipe": 4, "patches": 4, **STALE},
    {"cfg": 2, "pipe": 2, **STAGES},
    {"pipe": 2, "ulysses": 2, **STAGES},
    {"pipe": 2, "ring": 2, **STAGES},
    {"pipe": 2, "tensor": 2, **STAGES},
    {"cfg": 2, "pipe": 2, "ulysses": 2, **STAGES},
]
REPRODUCIBLE = [{"ulysses": 2, "reproducible": True}, {"ring": 2, "reproducible": True}]
# A rank alone cannot put slices of another stage's blocks together again, which ends a request.
ENDS_TOGETHER = {"tensor", "pipe"}
# Every class in a quarter of the configurations, another quarter for the next class.
CASES = [
    (name, config)
    for row, name in enumerate(MAKERS)
    for column, config in enumerate(CONFIGS)
    if not config.keys() >= ENDS_TOGETHER and (row + column) % 4 == 0
]
CASES += [(name, config) for name in ("DiT", "Wan") for config in REPRODUCIBLE]
# Whether a block leaves its attention out is a tensor there, which the block looks at as well.
ALLOWED = {"LTX2 STG": {"strategies/sequence.py"}}


@pytest.mark.parametrize(
    ("name", "config"), [pytest.param(*case, id=f"{case[0]}-{ParallelConfig(**case[1]).describe()}") for case in CASES]
)
def test_no_host_waits_in_a_steady_step(name, config):
    world = ParallelConfig(**config).world_size
    # One step before is enough where nothing is kept of it.
    found = alone(name, config, rank=(len(name) + world) % world, steps=3 if "warmup" in config else 2)
    if isinstance(found, str):
        pytest.skip(found)
    assert {place.partition(":")[0] for place in found} <= ALLOWED.get(name, set()), found

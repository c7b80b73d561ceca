"""Requests and training on an asynchronous device: late kernels, memory that is handed out again, and no finding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rules.requests import request
from rules.sim_cuda import LONGEST, SimDevice, sim_cuda

STALE = {"warmup": "fixed(1)"}
DISPLACED = {"ring": 2, "exchange": "displaced", **STALE}
TOLERANCE = 1e-5
# A value between two steps of int8 that a device's kernel rounds to the other: in every order of kernels alike.
COMPRESSED = 2e-4


# --- the device


def launched(device: SimDevice, count: int = 50) -> torch.Tensor:
    """Kernels that add one each."""
    x = torch.zeros(1000, device="cuda")
    for _ in range(count):
        x = x + 1
    return x


def test_the_host_runs_ahead_and_values_are_right():
    with sim_cuda(idle=2.0) as device, torch.no_grad():
        x = launched(device)
        assert device.ahead > 20
        assert float(x.sum()) == 50_000.0
        assert x[x > 3].shape == (1000,)
        view = x[2:4]
        view.mul_(10)
        assert x[:5].cpu().tolist() == [50.0, 50.0, 500.0, 500.0, 50.0]
        assert [one.operation for one in device.looks] == ["_local_scalar_dense", "index", "_to_copy"]
        assert torch.empty(3, device="cuda").cpu().isnan().all()
        assert device.reused > 20
        launched(device, 2 * LONGEST)
        assert device.ahead <= LONGEST + 1
        assert device.findings == []


def test_a_pinned_copy_is_read_late_and_another_at_once():
    with sim_cuda(idle=2.0) as device, torch.no_grad():
        pageable, pinned = torch.ones(4), torch.ones(4).pin_memory()
        launched(device)
        copies = [one.to("cuda", non_blocking=True) for one in (pageable, pinned)]
        pageable.zero_()
        pinned.zero_()
        assert [one.sum().item() for one in copies] == [4.0, 0.0]


@pytest.mark.parametrize("fault", ["wait_stream", "record_stream", "freed", None])
def test_faults_between_streams(fault):
    with sim_cuda("late", idle=2.0) as device, torch.no_grad():
        side, x = torch.cuda.Stream(), launched(device)
        if fault != "wait_stream":
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if fault not in ("record_stream", "freed"):
            x.record_stream(side)
        if fault != "wait_stream":
            del x
        other = torch.full((1000,), 7.0, device="cuda")
        event = side.record_event()
        event.wait()
        total = float(y.sum()), float(other.sum())
        assert total[1] == 7000.0
        if fault is None:
            assert (device.findings, total[0]) == ([], 100_000.0)
            return
        (found,) = device.findings
        kind = "streams race" if fault == "wait_stream" else "freed in flight"
        assert found.startswith(f"{kind}: "), found
        assert "launched at other:test_sim_cuda.py:" in found
        # Late as it was, it has read what came after.
        assert total[0] != 100_000.0


# --- ditmesh's strategies


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("sd3", "ring", {"ring": 2}),
    ("sd3", "displaced", DISPLACED),
    ("sd3", "int8", {**DISPLACED, "compress": "int8"}),
    ("sd3", "chunks", {"ulysses": 2, "chunks": 2}),
    ("sd3", "shard", {"ulysses": 2, "shard": 2}),
    ("sd3", "tensor", {"tensor": 2}),
    ("flux", "pipe", {"pipe": 2, **STALE}),
    ("sd3", "pipe", {"pipe": 2, **STALE}),
    ("flux", "displaced", DISPLACED),
    ("wan", "ring", {"ring": 2}),
]


@pytest.mark.parametrize("order", ["early", "late", "random"])
@pytest.mark.parametrize(
    ("family", "config"), [pytest.param(family, config, id=f"{family}-{name}") for family, name, config in CASES]
)
def test_a_request(ranks, family, config, order):
    found = ranks(2).run(request, family, config, order, 1)
    if found[0].refused:
        pytest.skip(found[0].refused)
    for one in found:
        assert one.findings == []
        assert one.error <= (COMPRESSED if "compress" in config else TOLERANCE)
        assert one.ahead > 20
        assert one.reused > 500
        assert {place for place in one.steady if place.startswith("ditmesh ")} == set()


@pytest.mark.parametrize(
    ("fault", "config", "words"),
    [
        ("wait", DISPLACED, "used before the wait: "),
        ("written", {"ring": 2}, "written in flight: mul_ on compute"),
        ("freed", {"ring": 2}, "freed in flight: memory of batch_isend_irecv on link"),
    ],
    ids=["wait", "written", "freed"],
)
def test_a_planted_fault_is_found_by_name(ranks, fault, config, words):
    for one in ranks(2).run(request, "sd3", config, "late", 0, fault):
        assert any(found.startswith(words) for found in one.findings), one.findings
        assert any("launched at ditmesh:" in found for found in one.findings), one.findings

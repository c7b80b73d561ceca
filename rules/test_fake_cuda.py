"""Requests on a fake CUDA device: no host waits for it, no tensor is elsewhere, and the picture is the CPUs'."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from ditmesh import ParallelConfig
from rules.fake_cuda import KIND, fake_device, on_device
from rules.requests import planted, request

STALE = {"warmup": "fixed(1)"}
MODES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ulysses": {"ulysses": 2, "vae": "bands"},
    "ring": {"ring": 2},
    "tensor": {"tensor": 2},
    "values ahead": {"precompute": True},
    "cfg": {"cfg": 2},
    "data": {"data": 2},
    "displaced": {"ring": 2, "exchange": "displaced", **STALE},
    "linear, int4": {"ring": 2, "exchange": "displaced", "predict": "linear", "compress": "int4", **STALE},
    "pipe": {"pipe": 2, **STALE},
    "shard": {"ulysses": 2, "shard": 2},
}
CASES = [
    ("flux", "ulysses"),
    ("wan", "ulysses"),
    ("pixart", "ring"),
    # Two calls a step, so that a call's step is found by comparing timesteps.
    ("flux", "displaced"),
    ("flux", "pipe"),
    *(("sd3", mode) for mode in MODES),
]
TOLERANCE = 1e-5
# A code of 4 bits turns with the last bit of what it stands for: on CPUs alone weights that differ by 1e-7 make images
# that differ by 2.2e-4.
OF_CODES = 5e-4
WAITED = ["_local_scalar_dense", "index", "index by a CPU tensor", "equal", "_to_copy"]
# Looks of the host after the last step, once a request: whether all ranks have the same latents; with stages, which
# patches the result consists of.
AFTER = {"strategies/same_latents.py": 1}
AFTER_STAGES = {"parts/lazy.py": 1}


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_a_request(ranks, family, mode):
    config = MODES[mode]
    found = ranks(ParallelConfig(**config).world_size).run(request, family, config)
    for one in found:
        assert one.error <= (OF_CODES if "compress" in config else TOLERANCE)
        # Whether the timestep is the one that the values were computed for.
        assert all("precompute" in config and "core/values.py" in place for place in one.steady), one.steady
        after = Counter[str]()
        for place, count in one.after.items():
            after[place.partition(":")[0]] += count
        most = AFTER | (AFTER_STAGES if mode == "pipe" else {})
        if "precompute" in config:
            # Weights come back from host memory.
            most = most | {"strategies/precomputed.py": 22}
        assert all(count <= most.get(file, 0) for file, count in after.items()), after


def test_a_planted_wait_is_found(ranks):
    """Negative control: a host wait in every attention, as if it stood in ditmesh."""
    for steady in ranks(2).run(planted):
        assert set(steady) == {"made_up.py:1 _local_scalar_dense"}


def test_the_device_refuses_what_a_gpu_would():
    """Negative controls: a CPU tensor among CUDA tensors; host waits are seen, and answered right."""
    with fake_device() as device, torch.no_grad():
        x = torch.arange(6.0).to(KIND)
        with pytest.raises(RuntimeError, match="to be on the same device"):
            x + torch.ones(6)
        device.looks.clear()
        assert float(x.sum()) == 15.0
        assert x[x > 3].shape == (2,)
        assert on_device(x[torch.tensor([1])])
        assert torch.equal(x, x.clone())
        assert x.view(2, 3).t().contiguous().cpu().tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert [one.operation for one in device.looks] == WAITED
        view = x[2:4]
        view.mul_(10)
        assert x.cpu().tolist() == [0.0, 1.0, 20.0, 30.0, 4.0, 5.0]


def test_generators_are_of_the_device():
    """Negative controls: a generator of the host for a tensor of the device, and the other way round."""
    with fake_device():
        one, other = (torch.Generator(where).manual_seed(3) for where in (KIND, "cpu"))
        drawn = torch.randn(4, generator=one, device=KIND)
        assert drawn.cpu().tolist() == torch.randn(4, generator=other).tolist()
        assert torch.equal(one.get_state(), other.get_state())
        with pytest.raises(RuntimeError, match=f"Expected a '{KIND}' device type for generator but found 'cpu'"):
            torch.randn(4, generator=other, device=KIND)
        with pytest.raises(RuntimeError, match=f"Expected a 'cpu' device type for generator but found '{KIND}'"):
            torch.randn(4, generator=one)

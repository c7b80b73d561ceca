"""Groups of ranks, and the settings of NCCL between hosts."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from ditmesh.config import AXES, ParallelConfig
from ditmesh.launch.devices import join_default_group, nccl_settings

ROOT = Path(__file__).parents[2]


def test_groups_are_the_ranks_that_differ_on_some_axes():
    config = ParallelConfig(cfg=2, ring=2, ulysses=3)
    assert config.groups(("ulysses",)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert config.groups(("ring",)) == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert config.groups(AXES) == [list(range(12))]
    assert config.groups(()) == [[rank] for rank in range(12)]


def test_settings_of_nccl_are_the_users_first(monkeypatch):
    for name in nccl_settings(30):
        # Set first, so that it is put back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    with mock.patch("torch.accelerator.set_device_index"), mock.patch("torch.distributed.init_process_group"):
        join_default_group("cuda", 0, 1, 0, 30.0, "env://")
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "60"
    # They are in the documents.
    text = (ROOT / "docs/hosts.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in nccl_settings(30))

"""What decides a GPU's bits: set before CUDA starts, written into receipts, and alike on all ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.core.gpus import ALLOCATOR, CUBLAS, SETTINGS, gpu_facts, settle_before_cuda
from ditmesh.launch import devices, ray
from ditmesh.launch.hardware import environment
from ditmesh.strategies.determinism import FixedArithmetic, deterministic, refuse_unlike

SXM = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132, major=9, minor=0, total_memory=80 << 30)
PCIE = SimpleNamespace(**{**vars(SXM), "multi_processor_count": 114})


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SETTINGS, ALLOCATOR, "PYTORCH_ALLOC_CONF"):
        # Set first, so that it is put back to what it was whoever has set it meanwhile.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_variables_of_cuda_are_set_once_and_only_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    settle_before_cuda()
    assert os.environ[CUBLAS] == ":16:8"
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "32768"
    assert os.environ[ALLOCATOR] == "expandable_segments:True"
    monkeypatch.delenv(ALLOCATOR)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    settle_before_cuda()
    assert ALLOCATOR not in os.environ


@pytest.mark.parametrize("way", ["ranks of a pool and of torchrun", "ranks of Ray"])
def test_every_launcher_sets_them_first(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: seen.update(os.environ))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    if way == "ranks of Ray":
        threads = torch.get_num_threads()
        ray._Rank(threads, [])._join(0, 1, "cuda", 5.0, "127.0.0.1", 0, True)
    else:
        monkeypatch.setattr(devices, "nccl_settings", lambda _: {})
        devices.join_default_group("cuda", 0, 1, 0, 5.0, "env://")
    assert {name: seen[name] for name in SETTINGS} == SETTINGS


def test_reproducible_mode_refuses_a_gpu_that_started_without_them(started: None) -> None:
    """torch looks at the environment, where the variable would be by then; cuBLAS has its workspace already."""
    with pytest.raises(ditmesh.ConfigError, match=r"CUDA has started without CUBLAS_WORKSPACE_CONFIG.*set CUBLAS"):
        deterministic("cuda").__enter__()
    assert not {*SETTINGS, ALLOCATOR} & {*os.environ}
    with deterministic("cpu"):
        assert CUBLAS not in os.environ


def test_receipts_say_which_gpu_and_which_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SXM)
    facts = environment(torch.device("cuda"))
    assert (facts["device"], facts["multiprocessors"], facts["compute capability"]) == (SXM.name, "132", "9.0")
    assert {"CUDA", "cuDNN", "cuBLAS", "cuBLAS workspace", "cuBLASLt workspace"} <= {*facts}


def test_reproducible_mode_refuses_unlike_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for gpu in (SXM, SXM, PCIE):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        found.append(gpu_facts(torch.device("cuda")))
    refuse_unlike(found[:2])
    with pytest.raises(ditmesh.ConfigError, match="rank 0 has multiprocessors 132, and rank 2 multiprocessors 114"):
        refuse_unlike(found)
    xpu: Any = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("xpu")), models=())
    with pytest.raises(ditmesh.ConfigError, match="reproducible is for cpu and cuda, not xpu; leave it out, or use"):
        FixedArithmetic(xpu).apply(ExitStack())

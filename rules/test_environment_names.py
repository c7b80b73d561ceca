"""Variables that are set for torch and NCCL have the names that torch reads."""

from __future__ import annotations

from pathlib import Path

import torch

from ditmesh.launch.nccl import nccl_settings

HEADERS = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
# NCCL's own and cuBLAS', which are in none of torch's headers.
KNOWN = {"NCCL_SOCKET_IFNAME", "NCCL_LAUNCH_ORDER_IMPLICIT", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"}


def test_torch_reads_what_is_set():
    text = "".join(path.read_text(encoding="utf-8") for path in HEADERS.rglob("*.hpp"))
    for name in nccl_settings(600.0).keys() - KNOWN:
        assert f'"{name}"' in text, name

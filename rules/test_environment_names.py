"""Variables that are set for torch and NCCL have the names that torch reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch

import ditmesh
from ditmesh.launch.nccl import nccl_settings

HEADERS = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
# NCCL's own and cuBLAS', which are in none of torch's headers.
KNOWN = {"NCCL_SOCKET_IFNAME", "NCCL_LAUNCH_ORDER_IMPLICIT", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"}


def test_torch_reads_what_is_set():
    text = "".join(path.read_text(encoding="utf-8") for path in HEADERS.rglob("*.hpp"))
    for name in nccl_settings(600.0).keys() - KNOWN:
        assert f'"{name}"' in text, name


def test_no_other_variable_of_nccl_is_named():
    found = set()
    for path in Path(ditmesh.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"(NCCL|TORCH_NCCL|TORCH_FR|CUBLAS|CUBLASLT)_[A-Z_]*[A-Z]", text):
                found.add(text)
    assert found <= KNOWN | set(nccl_settings(600.0)), found

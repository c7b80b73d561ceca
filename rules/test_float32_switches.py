"""Switches of TF32, old and new, dtypes that NCCL carries, names of variables: what a GPU would refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ditmesh.comm import Link, Traffic
from ditmesh.launch.devices import nccl_settings

SCRIPT = """
import sys, torch
from ditmesh.strategies.determinism import deterministic

B = torch.backends

def read(get):
    try:
        return get()
    except RuntimeError:
        return "mixed"

def state():
    new = [] if not hasattr(B, "fp32_precision") else [
        one.fp32_precision for one in
        (B, B.cudnn, B.cuda.matmul, B.cudnn.conv, B.cudnn.rnn, B.mkldnn.matmul, B.mkldnn.conv, B.mkldnn.rnn)
    ]
    old = [lambda: B.cudnn.allow_tf32, lambda: B.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision]
    return new, [read(one) for one in old]

exec(sys.argv[1])
before = state()
with deterministic("cpu"):
    inside = state()
    assert not {"tf32", "bf16"} & set(inside[0]), inside
    assert True not in inside[1], inside
    with deterministic("cpu"):
        pass
    assert state() == inside
assert state() == before, (before, state())
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has the old switches alone")
@pytest.mark.parametrize(
    "given",
    [
        "pass",
        'B.fp32_precision = "tf32"; B.cuda.matmul.allow_tf32 = False',
        'B.cuda.matmul.fp32_precision = "tf32"',
        'B.cudnn.conv.fp32_precision = "ieee"',
        'torch.set_float32_matmul_precision("medium")',
    ],
)
def test_reproducible_mode_keeps_float32_whichever_switches_a_program_has_set(given):
    """In a process of its own each: torch refuses to read an old switch once a new one was set."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT, given], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_links_refuse_what_nccl_does_not_carry():
    link = Link("ring", [0, 1], 0, Traffic())
    tensor = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(AssertionError, match=r"NCCL does not carry torch\.int16"):
        link.shift([tensor], [(3,)])
    with pytest.raises(AssertionError, match=r"NCCL does not carry torch\.int16"):
        link.all_to_all([[tensor], [tensor]], [[(3,)], [(3,)]])


def test_torch_reads_what_is_set():
    """Variables that are set for torch have the names that it reads; the others are NCCL's own and cuBLAS'."""
    own = {"NCCL_SOCKET_IFNAME", "NCCL_LAUNCH_ORDER_IMPLICIT", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"}
    headers = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    text = "".join(path.read_text(encoding="utf-8") for path in headers.rglob("*.hpp"))
    for name in nccl_settings(600.0).keys() - own:
        assert f'"{name}"' in text, name

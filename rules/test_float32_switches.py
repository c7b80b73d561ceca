"""torch's old and new switches of TF32, and dtypes that NCCL carries: what fails on a GPU is found on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ditmesh.comm import Link, Traffic

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

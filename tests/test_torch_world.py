"""The process group that torch sets up without the name of a backend: messages have their tags all the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from ditmesh.comm.link import Link
from ditmesh.comm.state import Traffic
from ditmesh.errors import ConfigError

PROGRAM = """
import json
import torch.distributed as dist

dist.init_process_group()
import ditmesh
from ditmesh.comm.mesh import Mesh

mesh = Mesh(ditmesh.ParallelConfig(ulysses=2, shared_memory=False))
print(json.dumps([dist.get_backend(), mesh.ulysses.transport, mesh.ulysses._matches, str(mesh.device)]))
mesh.close()
dist.destroy_process_group()
"""


def test_a_world_without_a_backends_name_sends_over_gloo_with_tags(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    # What torch says itself is what makes a comparison with "gloo" fail.
    assert found == [["undefined", "gloo", True, "cpu"]] * 2


def wrong_device() -> str:
    link = Link("ulysses", [0, 1], dist.get_rank(), Traffic())
    with pytest.raises(ConfigError) as raised:
        link.connect(dist.group.WORLD, None, device=torch.device("cuda"))
    return str(raised.value)


def test_tensors_that_a_group_does_not_carry_are_refused(ranks):
    for said in ranks(2).run(wrong_device):
        assert "carries no cuda tensors" in said
        assert 'init_process_group("cpu:gloo,cuda:nccl")' in said

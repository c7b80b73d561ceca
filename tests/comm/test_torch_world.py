"""The process group that torch sets up without the name of a backend: messages have their tags all the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from ditmesh.comm.link import Link
from ditmesh.comm.state import Header, Traffic
from ditmesh.errors import ConfigError

PROGRAM = """
import json
import sys
from pathlib import Path

import torch.distributed as dist

dist.init_process_group()
import ditmesh
from ditmesh.comm.mesh import Mesh

mesh = Mesh(ditmesh.ParallelConfig(ulysses=2, shared_memory=False))
found = [dist.get_backend(), mesh.ulysses.transport, mesh.ulysses._way, str(mesh.device)]
mesh.close()
dist.destroy_process_group()
Path(sys.argv[1], f"{mesh.rank}.json").write_text(json.dumps(found))
"""


def test_a_world_without_a_backends_name_sends_over_gloo_with_tags(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "program.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    # What torch says itself is what makes a comparison with "gloo" fail.
    assert found == [["undefined", "gloo", "tags", "cpu"]] * 2


class OnGpusAlone:
    """Answers as a group of NCCL alone does."""

    def _get_backend(self, device):
        raise RuntimeError(f"No backend type associated with device type {device.type}")


def test_tensors_that_a_group_does_not_carry_are_refused():
    for kind, backends in (("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")):
        with pytest.raises(ConfigError, match=rf'carries no {kind} tensors.*init_process_group\("{backends}"\)'):
            Link("ulysses", [0, 1], 0, Traffic()).connect(OnGpusAlone(), None, device=torch.device(kind))


def test_messages_that_differ_in_anything_have_tags_of_their_own():
    """By which a message is told from one of a request that has failed, or of another kind, shape or type."""
    usual = Header.of(1, "all_gather", [((2, 3), torch.float32)])
    others = [
        Header.of(2, "all_gather", [((2, 3), torch.float32)]),
        Header.of(1, "all_to_all", [((2, 3), torch.float32)]),
        Header.of(1, "all_gather", [((3, 2), torch.float32)]),
        Header.of(1, "all_gather", [((2, 3), torch.int32)]),
        Header.of(1, "all_gather", [((2, 3), torch.float32)] * 2),
    ]
    assert Header.of(1, "all_gather", [((2, 3), torch.float32)]) == usual
    assert len({header.tag for header in (usual, *others)}) == 6

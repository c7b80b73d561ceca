"""Which tensors are pages of a file that other processes see as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditmesh.core.mapped import pages_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": torch.randn(64, 1024), "b": torch.randn(3), "c": torch.randn(32, 64)}, tmp_path / "f.safetensors")
    return tmp_path / "f.safetensors"


def test_pages_are_those_of_the_file_until_this_process_writes_to_one(file: Path):
    one, other = load_file(file), load_file(file)
    own = torch.randn(64, 1024)
    places = pages_of([*one.values(), own])
    assert None not in places[:3]
    assert places[3] is None
    # Two mappings of a file are the same bytes, at different places in it.
    assert pages_of(other.values()) == places[:3]
    assert len({place[2] for place in places[:3]}) == 3
    part = one["a"][7:9]
    (found,) = pages_of([part])
    whole = places[list(one).index("a")]
    assert found == (*whole[:2], whole[2] + 7 * 4096, 8192)
    assert pages_of([torch.nn.Parameter(part)]) == [found]
    assert pages_of([one["a"].t(), one["a"].to("meta"), one["a"].to_sparse()]) == [None] * 3
    one["c"][0, 0] = 5
    # Of the mapping that was written to, nothing is known to be the file's.
    assert pages_of(one.values()) == [None] * 3
    assert pages_of(other.values()) == places[:3]

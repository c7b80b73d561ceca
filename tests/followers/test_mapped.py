"""Which tensors are pages of a file that other processes see as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditmesh.followers.shared_memory import files_of


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_pages_are_those_of_the_file_until_this_process_writes_to_one(tmp_path: Path):
    path = tmp_path / "f.safetensors"
    save_file({"a": torch.randn(64, 1024), "b": torch.randn(3), "c": torch.randn(32, 64)}, path)
    one, other = load_file(path), load_file(path)
    places = files_of([*one.values(), torch.randn(64, 1024)])
    for tensor, place in zip(one.values(), places, strict=False):
        assert place is not None
        assert place[0] == str(path)
        assert path.read_bytes()[place[1] :].startswith(tensor.numpy().tobytes())
    assert places[3] is None
    assert files_of(other.values()) == places[:3]
    whole = places[list(one).index("a")]
    assert whole is not None
    assert files_of([torch.nn.Parameter(one["a"][7:9])]) == [(str(path), whole[1] + 7 * 4096)]
    assert files_of([one["a"].t(), one["a"].to("meta"), one["a"].to_sparse()]) == [None] * 3
    one["c"][0, 0] = 5
    # Of the mapping that was written to, nothing is known to be the file's.
    assert files_of(one.values()) == [None] * 3
    assert files_of(other.values()) == places[:3]
    save_file({"a": torch.randn(64, 1024)}, tmp_path / "other")
    (tmp_path / "other").replace(path)
    assert files_of(other.values()) == [None] * 3

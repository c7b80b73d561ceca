"""Weights of ranks on CPUs are pages of the files: one copy for a host, until a rank writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ditmesh.launch import RankPool
from support import shared_weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def test_ranks_map_the_files_and_a_rank_that_writes_has_its_own_copy(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    size = shared_weights.save_large(tmp_path / "model", 6)
    found = ranks(2).run(shared_weights.shared, str(tmp_path / "model"), {"ulysses": 2}, True)
    for rank in found:
        assert rank["all"] == size
        # All of them, and none was written to load, compare, split or call them.
        assert (rank["in files"], rank["written"]) == (size, 0)
        assert rank["before"] == found[0]["before"]
    first, last = found
    assert last["changed"] > 0
    assert last["after"] != last["before"]
    # Neither the other rank nor the file has changed.
    assert (first["after"], first["changed"]) == (first["before"], 0)
    again = ranks(2).run(shared_weights.shared, str(tmp_path / "model"), {"ulysses": 2}, False)
    assert [rank["before"] for rank in again] == [first["before"]] * 2
    assert again[0]["picture"] == first["picture"]

"""Ranks of a server return what they no longer use."""

from __future__ import annotations

import gc
import platform
import weakref

import psutil
import pytest
import torch

from ditmesh.serve.worker.trim import MemoryTrimmer


class Holder:
    """One that refers to itself, and to a tensor."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.zeros(1000)


def test_garbage_is_collected_at_intervals():
    now = 100.0
    trimmer = MemoryTrimmer(30.0, lambda: now)
    was = gc.isenabled()
    gc.disable()
    try:
        tensor = weakref.ref(Holder().tensor)
        now = 129.0
        assert not trimmer.trim_when_due()
        assert tensor() is not None
        now = 130.0
        assert trimmer.trim_when_due()
        assert tensor() is None
        # The next interval begins there.
        now = 159.0
        assert not trimmer.trim_when_due()
    finally:
        if was:
            gc.enable()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_free_memory_below_a_live_block_is_returned():
    now = 0.0
    trimmer = MemoryTrimmer(1.0, lambda: now)
    # Blocks of the heap: malloc maps larger ones by themselves. Every tenth lives on.
    blocks = [bytearray(b"x" * 30_000) for _ in range(5_000)]
    kept = blocks[::10]
    del blocks
    gc.collect()
    before = psutil.Process().memory_info().rss
    now = 1.0
    assert trimmer.trim_when_due()
    # Of 135 MB that are free.
    assert before - psutil.Process().memory_info().rss > 80e6
    assert len(kept) == 500

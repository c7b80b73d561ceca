"""Ranks keep the memory that a call frees for the next one, and return it when asked."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from ditmesh.launch import RankPool
from ditmesh.launch.heap import keep_free_memory, return_free_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")

# A page has 4096 bytes or more.
PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCK, BLOCKS, TIMES = 12 << 20, 6, 8


def faults_of_calls(keep: bool) -> tuple[bool, float, int]:
    """Allocate and free what a transformer's call does, several times.

    Returns:
        What `keep_free_memory` has said; page faults of one time after the first few, as a share of the pages; the
        bytes that `return_free_memory` then takes off this process's memory.
    """
    import resource

    import psutil

    kept = keep and keep_free_memory()

    def call() -> None:
        held = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(BLOCKS)]
        del held

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    # In the first calls the heap still grows, by a block or two where free pieces do not fit together.
    for _ in range(TIMES):
        call()
    before = faults()
    for _ in range(TIMES):
        call()
    pages = (faults() - before) / TIMES / (BLOCK * BLOCKS / PAGE)
    resident = psutil.Process().memory_info().rss
    return_free_memory()
    return kept, pages, resident - psutil.Process().memory_info().rss


def in_a_process(keep: bool, **variables: str) -> tuple[bool, float, int]:
    call = f"import sys; sys.path[:0] = {sys.path!r}\nfrom launch.test_heap import faults_of_calls\n"
    code = f"{call}print('said', *faults_of_calls({keep}))"
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    kept, pages, returned = ran.stdout.rsplit("said", 1)[1].split()
    return kept == "True", float(pages), int(returned)


def test_a_call_finds_the_memory_of_the_call_before():
    kept, pages, returned = in_a_process(True)
    assert kept
    assert pages < 0.05
    assert returned > 0.8 * BLOCK * BLOCKS


def test_what_the_environment_says_holds():
    kept, pages, _ = in_a_process(True, MALLOC_TRIM_THRESHOLD_="65536")
    assert not kept
    assert pages > 0.5


def test_ranks_keep_it():
    with RankPool(1) as pool:
        (said,) = pool.run(faults_of_calls, False)
    _, pages, returned = said
    assert pages < 0.05
    assert returned > 0.8 * BLOCK * BLOCKS

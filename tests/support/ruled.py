"""Whether the ranks of these tests use the process group that holds them to NCCL's rules, in place of gloo.

``DITMESH_TEST_BACKEND=rules`` asks for it, and ``DITMESH_RULES_MODE=lazy`` for communicators of pairs of ranks. Ranks
have this from the environment of the tests.
"""

from __future__ import annotations

import os

import pytest

RULED = os.environ.get("DITMESH_TEST_BACKEND") == "rules"


def transport(usual: str) -> str:
    """What carries tensors of these tests, where it would usually be shared memory or gloo."""
    return "rules" if RULED else usual


def needs(what: str) -> pytest.MarkDecorator:
    """Skip a test of something that the group of NCCL's rules lacks, as NCCL does."""
    return pytest.mark.skipif(RULED, reason=f"tests {what}, and links use the group of NCCL's rules")


shared_memory = needs("shared memory")
gloo = needs("gloo")

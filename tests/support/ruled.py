"""Whether the ranks of these tests use the process group that holds them to NCCL's rules, in place of gloo.

``DITMESH_TEST_BACKEND=rules`` asks for it, and ``DITMESH_RULES_MODE=lazy`` for communicators of pairs of ranks. Ranks
have this from the environment of the tests.
"""

from __future__ import annotations

import os

import pytest

import ditmesh

RULED = os.environ.get("DITMESH_TEST_BACKEND") == "rules"


def transport(usual: str) -> str:
    """What carries tensors of these tests, where it would usually be shared memory or gloo."""
    return "rules" if RULED else usual


def needs(what: str) -> pytest.MarkDecorator:
    """Skip a test of something that the group of NCCL's rules lacks, as NCCL does."""
    return pytest.mark.skipif(RULED, reason=f"tests {what}, and links use the group of NCCL's rules")


shared_memory = needs("shared memory")
gloo = needs("gloo")


def refusal(of: type[BaseException]) -> tuple[type[BaseException], ...]:
    """What a rank raises where all refuse a call alike.

    One that comes to it first ends the communicators, as NCCL's are ended, and another that still waits for the
    operation before it hears of the refusal from that rank, in the same words.
    """
    return (of, ditmesh.PeerError) if RULED else (of,)

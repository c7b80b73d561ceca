"""Preloaded by the fork server of tests that are to hold to NCCL's rules: what it enters, ranks never leave."""

from __future__ import annotations

from .group import ruled

ENTERED = ruled()
ENTERED.__enter__()

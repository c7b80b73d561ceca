"""Ranks of a server on fake CUDA devices. Rank functions."""

from __future__ import annotations

from typing import Any

from ditmesh.serve.worker.worker import serve_rank
from support.jobs_on_fake_cuda import gpu_of_rank


def serve_on_gpu(specs: Any, *, report: Any) -> None:
    """`serve_rank` on a fake GPU."""
    with gpu_of_rank():
        serve_rank(specs, report=report)

"""Ranks of a server on fake CUDA devices: requests and previews."""

from __future__ import annotations

import pytest

from ditmesh import zoo
from ditmesh.config import ParallelConfig
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.worker.protocol import Beat, Finished, Preview
from ditmesh.serve.worker.worker import serve_rank
from rules.jobs import serve_on_gpu
from support.batching import Owner, at_once, of, picture, task

PROMPTS = ["a red apple", "a green frog"]
SMALL = {"width": 32, "height": 32, "steps": 3, "previews": 1}


@pytest.mark.parametrize("config", [{}, {"ulysses": 2}, {"cfg": 2}], ids=str)
def test_ranks_that_serve(ranks, config):
    """Pictures of two requests on CPUs and on fake GPUs; the ranks say where they compute."""
    pool, spec = ranks(2 if config else 1), ModelSpec("emoji", str(zoo.path()), ParallelConfig(**config))
    found = []
    for function in (serve_rank, serve_on_gpu):
        starts = [task(str(n), prompt, seed=n, **SMALL) for n, prompt in enumerate(PROMPTS)]
        said = Owner(at_once(*starts), 2).serve(pool, [spec], function)
        assert {message.id for message in of(said, Finished)} == {"0", "1"}
        assert {message.id for message in of(said, Preview)} == {"0", "1"}
        found.append([picture(said, str(n)) for n in range(2)])
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert abs(on_cpu - on_gpu).max() <= 1
    assert {rank.device for beat in of(said, Beat) for rank in beat.ranks} == {"cuda:0"}

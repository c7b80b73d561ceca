"""torch.compile: every block is one graph, and the result stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ditmesh
from support import ruled
from support.models import RAGGED, inputs, relative_error, run, tiny, variant

TOLERANCE = 1e-5


def compiled(name: str, config: dict[str, Any]) -> tuple[float, float, bool]:
    """Error of the compiled model in parallel, error after `restore`, and whether attention crossed ranks."""
    # With tensor, more blocks than torch compiles one function for.
    model = variant(name, num_layers=12) if "tensor" in config else tiny(name)
    arguments = inputs(name, RAGGED)
    truth = run(model, arguments)
    torch._dynamo.reset()
    with ditmesh.parallelized(model, config):
        value = run(model, arguments)
        exchanged = sum(ditmesh.engine_of(model).mesh.traffic.bytes_sent.values()) > 0
    return relative_error(value, truth), relative_error(run(model, arguments), truth), exchanged


NAMES = ["PixArt", "SD3", "Flux", "Wan", "QwenImage"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(pytest.param(name, {axis: 2}, marks=pytest.mark.matrix) for axis in ("ulysses", "ring") for name in NAMES),
        pytest.param("SD3", {"tensor": 2}, marks=ruled.needs("collectives in graphs, whose tensors torch keeps")),
    ],
    ids=str,
)
def test_blocks_compile_without_a_break(ranks, name, config):
    """fullgraph=True raises at the first break; the eager backend runs the captured graph as it is."""
    for error, after, exchanged in ranks(2).run(compiled, name, {**config, "compile": "eager"}):
        assert error < TOLERANCE
        assert after == 0
        # What a graph sends is not counted.
        assert exchanged or "tensor" in config


@pytest.mark.matrix
def test_inductor(ranks):
    for error, after, exchanged in ranks(2).run(compiled, "Flux", {"ulysses": 2, "compile": "inductor"}):
        assert error < TOLERANCE
        assert after == 0
        assert exchanged


def test_an_unknown_backend_is_refused():
    with pytest.raises(ditmesh.InputError, match=r"compile='fast' is not a backend.*inductor"):
        ditmesh.parallelize(tiny("DiT"), {"compile": "fast"})


def test_cuda_graphs_are_refused() -> None:
    """Recorded once, the messages of a block would never be sent again."""
    from torch._inductor import config as inductor

    with pytest.raises(ditmesh.ConfigError, match="never send it again; use compile='inductor'"):
        ditmesh.ParallelConfig(compile="cudagraphs")
    # torch's own patch and not pytest's: what pytest restores is hidden from torch._dynamo.reset() in every later test.
    with (
        inductor.patch({"triton.cudagraphs": True}),
        pytest.raises(ditmesh.InputError, match=r"cannot be recorded in a CUDA graph; switch it off"),
    ):
        ditmesh.parallelize(tiny("DiT"), {"compile": "inductor"})


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch has no such tag")
def test_the_compiler_knows_that_attention_is_no_part_of_a_cuda_graph() -> None:
    import ditmesh.core.intercept  # noqa: F401

    assert torch.Tag.cudagraph_unsafe in torch.ops.ditmesh.attend.default.tags

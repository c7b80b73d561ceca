"""torch.compile: every block is one graph, and the result stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ditmesh
from support.models import RAGGED, inputs, relative_error, run, tiny

TOLERANCE = 1e-5


def compiled(name: str, config: dict[str, Any]) -> tuple[float, float, bool]:
    """Error of the compiled model in parallel, error after `restore`, and whether attention crossed ranks."""
    model, arguments = tiny(name), inputs(name, RAGGED)
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
        *(
            pytest.param(name, {"ulysses": 2}, marks=() if name in ("Flux", "PixArt") else pytest.mark.matrix)
            for name in NAMES
        ),
        *(pytest.param(name, {"ring": 2}, marks=() if name == "SD3" else pytest.mark.matrix) for name in NAMES),
    ],
    ids=str,
)
def test_blocks_compile_without_a_break(ranks, name, config):
    """fullgraph=True raises at the first break; the eager backend runs the captured graph as it is."""
    for error, after, exchanged in ranks(2).run(compiled, name, {**config, "compile": "eager"}):
        assert error < TOLERANCE
        assert after == 0
        assert exchanged


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


@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_has_attentions_gradient(masked):
    """For blocks that a caller compiles and trains while another model of the process is parallel."""
    q, k, v = (torch.randn(2, 4, length, 8, requires_grad=True) for length in (9, 7, 7))
    mask = torch.randn(9, 7) if masked else None
    call = (q, k, v, mask, 0.0, False, 0.3, False, None)
    torch.library.opcheck(torch.ops.ditmesh.attend.default, call)
    out = torch.ops.ditmesh.attend(*call)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    for found, true in zip(
        torch.autograd.grad(out.sin().sum(), (q, k, v)), torch.autograd.grad(want.sin().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dropout", "bias", "reason"), [(0.1, False, "dropout_p=0.1"), (0.0, True, "its mask")])
def test_the_operator_refuses_what_has_no_gradient(dropout, bias, reason):
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    with pytest.raises(ditmesh.LayoutError, match=reason):
        torch.ops.ditmesh.attend(q, k, v, torch.zeros(3, 3, requires_grad=bias), dropout, False, None, False, None)

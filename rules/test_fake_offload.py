"""Components in host memory beside a fake CUDA device: they are there while they work, the picture is the CPUs'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from ditmesh.generate.offload import offload
from ditmesh.generate.preview import latent_colours
from rules.fake_cuda import cuda
from support.train import save_pipeline


@pytest.mark.parametrize("how", ["model", "group", "sequential"])
@torch.no_grad()
def test_a_request_with_offloaded_components(tmp_path, how):
    """Previews need the VAE before any request: it is brought to the device then, and taken away by the transformer."""
    folder = save_pipeline("flux", tmp_path)

    def drawn(pipe: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pipe.set_progress_bar_config(disable=True)
        colours = latent_colours(pipe)
        assert colours is not None
        call = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 12}
        picture = pipe("a fish", generator=torch.Generator().manual_seed(0), output_type="np", **call).images
        return torch.as_tensor(picture), colours.factors

    truth = drawn(DiffusionPipeline.from_pretrained(folder))
    pipe: Any = DiffusionPipeline.from_pretrained(folder)
    with cuda(found=True):
        offload(pipe, how, torch.device("cuda"))
        where = []
        pipe.transformer.register_forward_pre_hook(
            lambda *_: where.append({next(getattr(pipe, one).parameters()).is_cuda for one in ("vae", "text_encoder")})
        )
        found = drawn(pipe)
        assert where == [{False}] * 2
        # Of its layers each is there in its own call alone.
        assert next(pipe.vae.parameters()).is_cuda == (how == "model")
        assert next(pipe.transformer.parameters()).is_cuda
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4)

"""Text encoders of transformers, tensor-parallel: their embeddings, what a rank holds, and the way back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import ditmesh
from ditmesh.comm.mesh import Mesh
from ditmesh.config import ParallelConfig
from ditmesh.memory.walk import walk_encoder
from ditmesh.strategies.text_encoders import TextEncoders, in_slices

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
T5: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
CLIP: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
# By family: the class, and a small configuration.
ENCODERS: dict[str, tuple[Any, Any]] = {
    "T5": (hf.T5EncoderModel, hf.T5Config(**T5, feed_forward_proj="gated-gelu")),
    "T5 of one projection": (hf.T5EncoderModel, hf.T5Config(**T5)),
    "UMT5": (hf.UMT5EncoderModel, hf.UMT5Config(**T5, feed_forward_proj="gated-gelu")),
    "CLIP": (hf.CLIPTextModelWithProjection, hf.CLIPTextConfig(**CLIP, projection_dim=64, eos_token_id=2)),
    "Qwen2.5-VL": (
        hf.Qwen2_5_VLForConditionalGeneration,
        hf.Qwen2_5_VLConfig(text_config={**LLAMA, "rope_scaling": ROPE}, vision_config=VISION),
    ),
    "Qwen3": (hf.Qwen3Model, hf.Qwen3Config(**LLAMA, head_dim=16)),
    "Gemma2": (hf.Gemma2Model, hf.Gemma2Config(**LLAMA, head_dim=16)),
    "Gemma3": (hf.Gemma3TextModel, hf.Gemma3TextConfig(**LLAMA, head_dim=16)),
    "Mistral": (hf.MistralModel, hf.MistralConfig(**LLAMA)),
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA)),
    "GLM": (hf.GlmModel, hf.GlmConfig(**LLAMA, head_dim=16, pad_token_id=1)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls, config = ENCODERS[name]
    return cls(config).eval()


def sliced(names: list[str]) -> dict[str, dict[str, Any]]:
    """For every encoder the largest relative difference of a hidden state, what a rank holds, and the way back."""
    mesh = Mesh(ParallelConfig(ulysses=2))
    ids = torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(1))
    # Where a rank computes is another device than the one on which encoders are cut.
    apart = SimpleNamespace(world=mesh.world, device=torch.device("meta"))
    context: Any = SimpleNamespace(config=ParallelConfig(ulysses=2, text_encoder="tensor"), mesh=apart)
    results = {}
    for name in names:
        encoder: Any = made(name)
        weights = {key: value.clone() for key, value in encoder.state_dict().items()}
        # The tower that reads images stays whole; no prompt calls it.
        counted = [each for key, each in encoder.named_parameters() if "visual" not in key]
        total = sum(each.numel() for each in counted)
        with torch.no_grad():
            truth = encoder(input_ids=ids, output_hidden_states=True)
            slices = in_slices(name, encoder, mesh.world)
            held, stored = sum(each.numel() for each in counted), sum(each.nbytes for each in encoder.parameters())
            states = encoder(input_ids=ids, output_hidden_states=True)
            slices.close()
        moved: Any = made(name)
        TextEncoders(context)._made(name, moved)
        pairs = [*zip(truth.hidden_states, states.hidden_states, strict=True)]
        if getattr(truth, "logits", None) is not None:
            pairs.append((truth.logits, states.logits))
        results[name] = {
            "difference": max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs),
            "held": held / total,
            "moved": {each.device.type for each in moved.parameters()},
            "stored": stored,
            "restored": all(torch.equal(value, weights[key]) for key, value in encoder.state_dict().items()),
        }
    return results


def test_embeddings_of_every_family(ranks):
    for results in ranks(2).run(sliced, sorted(ENCODERS)):
        for name, result in results.items():
            assert result["difference"] < 1e-5, name
            assert result["held"] <= 0.55, name
            assert result["restored"], name
            assert result["moved"] == {"meta"}, name
            cls, config = ENCODERS[name]
            among = ParallelConfig(ulysses=2, text_encoder="tensor")
            walked = walk_encoder(cls.__name__, config.to_dict(), among, 9, torch.float32)
            assert walked.weights == pytest.approx(result["stored"], rel=0.02), name


def refused(case: str) -> str:
    mesh = Mesh(ParallelConfig(ulysses=2))
    encoder: Any = (
        hf.LlamaModel(hf.LlamaConfig(**{**LLAMA, "num_key_value_heads": 1})) if case == "heads" else made("T5")
    )
    if case == "layers":
        for block in encoder.encoder.block:
            block.layer = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(9)])
    with pytest.raises(ditmesh.ConfigError) as caught:
        in_slices("text_encoder_2", encoder, mesh.world)
    return str(caught.value)


@pytest.mark.parametrize(("case", "reason"), [("heads", "1 key and value heads"), ("layers", "cuts 0%")])
def test_an_encoder_that_cannot_be_cut_is_named_with_a_way_out(ranks, case, reason):
    for message in ranks(2).run(refused, case):
        assert message.startswith("text_encoder='tensor' does not fit text_encoder_2: ")
        assert reason in message
        assert message.endswith("; use text_encoder='sharded'")

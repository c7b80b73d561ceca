"""Frozen weights in fewer bits: what is kept of them, the same training on all ranks, bits that never change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ditmesh
from ditmesh.core.digests import weights_fingerprint
from ditmesh.generate.model_info import find_model
from ditmesh.train.model import frozen
from ditmesh.train.model.frozen import FrozenLinear, freeze, quantised, read_pipeline_frozen
from ditmesh.train.preflight import check_settings
from ditmesh.train.run import train
from ditmesh.train.trainer import Trainer
from support.sample import sampled
from support.train import configured, folder_of, loaded, save_pipeline, settings

# The largest difference from the weight, of its largest number; and bytes, of those of bfloat16.
PRECISIONS = {"bf16": (2**-8, 1.0), "int8": (0.005, 0.52), "fp8": (0.04, 0.52), "nf4": (0.16, 0.27)}


def needs(precision: str) -> None:
    if precision in frozen.QUANTISATION_PACKAGES:
        pytest.importorskip(frozen.QUANTISATION_PACKAGES[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_computes_with_what_it_keeps(precision):
    needs(precision)
    most, bytes_kept = PRECISIONS[precision]
    torch.manual_seed(0)
    whole = nn.Linear(640, 512)
    less = FrozenLinear(*quantised(whole.weight, precision), (512, 640), whole.bias)
    weight = less.dequantize()
    assert float((weight - whole.weight).abs().max() / whole.weight.abs().max()) <= most
    kept = sum(p.nbytes for name, p in less.named_parameters() if name != "bias")
    assert kept <= bytes_kept * 2 * weight.numel()
    value = torch.randn(2, 5, 640, requires_grad=True)
    same = value.detach().clone().requires_grad_()
    truth = nn.functional.linear(same, weight, whole.bias)
    truth.square().sum().backward()
    saved: list[int] = [0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        found = less(value)
    # The backward pass needs no weight that is kept for it.
    assert max(saved) < weight.numel()
    found.square().sum().backward()
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value.grad, same.grad, atol=1e-4, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert less(value).dtype == torch.bfloat16


# --- training -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    folder_of(folder / "data", 4, 32)
    save_pipeline("flux", folder)
    return folder


def run_of(root: Path, out: Path, **more: Any) -> dict[str, Any]:
    given = {"pretrained_model_name_or_path": str(root / "flux"), "resolution": 32, "max_sequence_length": 24}
    given |= {"max_train_steps": 2, "learning_rate": 3e-2, "train_batch_size": 1, "global_batch_size": 2}
    return settings(root / "data", out, **{**given, "lora": {"rank": 2}, **more})


def pipeline_of(given: dict[str, Any]) -> Any:
    model, precision = configured(given).pretrained_model_name_or_path, given.get("base_precision")
    return loaded(model) if precision is None else read_pipeline_frozen(find_model(model), precision)


def base_bits(model: nn.Module) -> dict[str, Tensor]:
    """Everything of a model but its adapters, by the names that it has without them."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name.replace(".base_layer", ""): (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in found.items()
        if "lora_" not in name
    }


def outcome(given: dict[str, Any]) -> tuple[dict[int, float], bool, str]:
    """Losses; whether the base has its bits after training; the digest of the trained weights, with reproducible."""
    config, pipe = configured(given), pipeline_of(given)
    freeze(pipe.transformer, config.model.base_precision)
    before = base_bits(pipe.transformer)
    with Trainer(config, pipe, timeout=100.0) as trainer:
        losses = trainer.run().losses
        digest = trainer.state.weights_digest() if config.in_order else ""
        after = base_bits(pipe.transformer)
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return losses, same, digest


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("nf4", {"parallel": {"ulysses": 2}}),
    ("nf4", {"parallel": {"data": 2}, "gradient_checkpointing": True}),
    ("nf4", {"parallel": {"data": 2}, "sharding": "fsdp", "gradient_checkpointing": True}),
    ("int8", {"parallel": {"ring": 2}}),
    ("int8", {"parallel": {"ring": 2}, "sharding": "fsdp"}),
    ("fp8", {"parallel": {"data": 2}}),
    ("bf16", {"parallel": {"ulysses": 2}, "sharding": "fsdp"}),
]


@pytest.mark.parametrize("precision", sampled(PRECISIONS, of=4))
def test_ranks_train_on_the_same_base(ranks, root, tmp_path, precision):
    needs(precision)
    given = run_of(root, tmp_path / "1", base_precision=precision)
    alone, same, _ = outcome(given)
    assert same
    for number, more in enumerate(more for name, more in RUNS if name == precision):
        for losses, same, _ in ranks(2).run(outcome, {**given, **more, "output_dir": str(tmp_path / f"2-{number}")}):
            assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5, more
            assert same, more
    if precision in ("nf4", "int8"):
        # It is another base than the whole one.
        whole, _, _ = outcome({**given, "base_precision": None, "output_dir": str(tmp_path / "whole")})
        assert abs(whole[0] / alone[0] - 1) > 1e-5
    rates = {**given, "learning_rate": 1e-12, "output_dir": str(tmp_path / "still")}
    still, _, _ = outcome(rates)
    assert abs(still[1] / alone[1] - 1) > 1e-4


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.matrix)])
def test_adapters_of_every_kind_above_nf4(ranks, root, tmp_path, kind):
    """In reproducible mode: the same bits on one rank and on two."""
    needs("nf4")
    given = run_of(root, tmp_path / "1", base_precision="nf4", lora={"rank": 2, "type": kind}, reproducible=True)
    alone = outcome(given)
    assert alone[1]
    assert alone[2]
    more = {"parallel": {"ulysses": 2}, "output_dir": str(tmp_path / "2")}
    for found in ranks(2).run(outcome, {**given, **more}):
        assert found == alone


def test_weights_are_read_as_they_are_frozen(root, monkeypatch):
    """One by one from the files, or of a loaded pipeline; the layers outside of blocks that are narrow stay whole."""
    needs("nf4")
    read = read_pipeline_frozen(find_model(str(root / "flux")), "nf4").transformer
    loaded = diffusers.DiffusionPipeline.from_pretrained(root / "flux").transformer
    whole = weights_fingerprint(loaded)
    freeze(loaded, "nf4")
    assert weights_fingerprint(read) == weights_fingerprint(loaded) != whole
    less = [name for name, module in read.named_modules() if isinstance(module, FrozenLinear)]
    assert any(name.startswith("single_transformer_blocks.0.") for name in less)
    assert type(read.x_embedder) is nn.Linear
    # What is as wide on both sides is kept in fewer bits wherever it is.
    monkeypatch.setattr(frozen, "WIDE", 32)
    wide = frozen.layers_to_freeze(diffusers.FluxTransformer2DModel.from_config(read.config))
    assert "context_embedder" in wide
    assert "x_embedder" not in wide
    monkeypatch.undo()
    # A second time nothing is left to do.
    freeze(read, "nf4")
    assert weights_fingerprint(read) == weights_fingerprint(loaded)


def saved_quantised(root: Path) -> Path:
    """The pipeline in a folder, its transformer quantised by diffusers with torchao."""
    from torchao.quantization import Int8WeightOnlyConfig

    config, folder = diffusers.TorchAoConfig(Int8WeightOnlyConfig()), root / "flux-int8"
    kind = diffusers.FluxTransformer2DModel
    model = kind.from_pretrained(root / "flux", subfolder="transformer", quantization_config=config)
    diffusers.FluxPipeline.from_pretrained(root / "flux", transformer=model).save_pretrained(folder)
    return folder


def test_a_quantised_checkpoint_is_a_base(ranks, root, tmp_path):
    folder = saved_quantised(root)
    given = run_of(root, tmp_path / "1", pretrained_model_name_or_path=str(folder))
    alone, same, _ = outcome(given)
    assert same
    more = {"parallel": {"data": 2}, "sharding": "ddp", "gradient_checkpointing": True}
    for losses, same, _ in ranks(2).run(outcome, {**given, **more, "output_dir": str(tmp_path / "2")}):
        assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5
        assert same
    with pytest.raises(ditmesh.ConfigError, match=r"the weights are quantised already \(Int8Tensor of torchao\)"):
        train(configured({**given, "output_dir": str(tmp_path / "twice"), "base_precision": "bf16"}))


def test_refused(root, tmp_path, monkeypatch):
    for more, said in (
        ({"lora": None, "base_precision": "nf4"}, "whole weights are trained in float32 on the device; add lora"),
        ({"base_precision": "int3"}, "base_precision='int3'"),
    ):
        with pytest.raises(ditmesh.ConfigError, match=said):
            check_settings(configured(run_of(root, tmp_path / "out", **more)))
    monkeypatch.setitem(frozen.QUANTISATION_PACKAGES, "nf4", "no_such_package")
    with pytest.raises(ditmesh.InputError, match="needs no_such_package, which is not installed; pip install"):
        frozen.check_precision("nf4")


@pytest.mark.parametrize("precision", ["nf4", pytest.param("int8", marks=pytest.mark.matrix)])
def test_tensor_ranks_quantise_their_slices(ranks, root, tmp_path, precision):
    """Each slice by itself, so that its rounding is another."""
    needs(precision)
    given = run_of(root, tmp_path / "alone", max_train_steps=2)
    alone = train(configured(given))
    less = {**given, "base_precision": precision, "parallel": {"tensor": 2}, "output_dir": str(tmp_path / "cut")}
    one, other = ranks(2).run(train, configured(less))
    assert one["loss"] == pytest.approx(alone["loss"], rel=0.1)
    assert one["loss"] != alone["loss"]
    assert one["loss"] == other["loss"]
    assert (Path(one["pipeline"]) / "pytorch_lora_weights.safetensors").exists()


@pytest.mark.matrix
def test_text_encoders_in_fewer_bits(root, tmp_path):
    """Of those that are not trained, the linear layers; the run is that of rounded embeddings."""
    given = run_of(root, tmp_path / "whole")
    whole = train(configured(given))
    less = train(configured({**given, "encoder_precision": "bf16", "output_dir": str(tmp_path / "less")}))
    assert less["loss"] == pytest.approx(whole["loss"], rel=1e-2)
    assert less["loss"] != whole["loss"]
    config = configured({**given, "encoder_precision": "bf16"})
    pipe = pipeline_of(given)
    before = sum(p.nbytes for p in pipe.text_encoder_2.parameters())
    frozen.freeze_encoders(pipe, config)
    kept = [one for one in pipe.text_encoder_2.modules() if isinstance(one, FrozenLinear)]
    assert kept
    after = sum(p.nbytes for p in pipe.text_encoder_2.parameters())
    assert before - after == 2 * sum(one.in_features * one.out_features for one in kept)
    # Trained ones stay whole.
    pipe = pipeline_of(given)
    model = config.model.model_copy(update={"train_modules": ("transformer", "text_encoder_2")})
    frozen.freeze_encoders(pipe, config.model_copy(update={"model": model}))
    assert not any(isinstance(one, FrozenLinear) for one in pipe.text_encoder_2.modules())

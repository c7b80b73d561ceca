"""The memory of training: estimated from configurations, and what ranks that train hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from torch import Tensor

import ditmesh
from ditmesh.generate.model_info import find_model
from ditmesh.memory.check import components_of
from ditmesh.train.config import TrainConfig
from ditmesh.train.memory import check_training_memory, estimated_memory, least_memory, predicted_training
from ditmesh.train.model.frozen import read_pipeline_frozen
from ditmesh.train.run import train
from ditmesh.train.trainer import Trainer
from support.sample import sampled
from support.train import configured, folder_of, made, settings


def local_bytes(tensor: Any) -> int:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes


def held(given: dict[str, Any]) -> dict[str, float]:
    """On a rank after a step: bytes of weights, gradients, the optimizer's state, the average and other components."""
    config = configured(given)
    info = find_model(config.pretrained_model_name_or_path)
    if config.model.base_precision is None:
        pipe = diffusers.DiffusionPipeline.from_pretrained(info.files)
    else:
        pipe = read_pipeline_frozen(info, config.model.base_precision)
    with Trainer(config, pipe, timeout=100.0) as trainer:
        optimizer = trainer.update.optimizer
        gradients: list[int] = []
        optimizer.register_step_pre_hook(
            lambda *_: gradients.extend(local_bytes(p.grad) for p in trainer.update.parameters if p.grad is not None)
        )
        trainer._optimizer_step(trainer.data.order.step(0))
        trained = {id(p) for p in trainer.update.parameters}
        model: Any = pipe.transformer
        weights = [(id(t) in trained, local_bytes(t)) for t in (*model.parameters(), *model.buffers())]
        state = [value for one in optimizer.state.values() for value in one.values()]
        average = trainer.update.average.shadow_params if trainer.update.average is not None else []
        others = (pipe.vae, pipe.text_encoder, pipe.text_encoder_2, getattr(pipe, "text_encoder_3", None))
        return {
            "trained": sum(size for own, size in weights if own),
            "frozen": sum(size for own, size in weights if not own),
            "gradients": sum(gradients),
            "optimizer": sum(local_bytes(v) for v in state if isinstance(v, Tensor) and v.dim()),
            "average": sum(map(local_bytes, average)),
            "others": sum(t.nbytes for m in others if m is not None for t in (*m.parameters(), *m.buffers())),
        }


data = made(lambda folder: folder_of(folder, 8))


CASES = {
    "lora, nf4 base": ("emoji-flux", {"parallel": {"data": 2}, "lora": {"rank": 4}, "base_precision": "nf4"}),
    "fsdp, average": ("emoji-sd3", {"parallel": {"data": 2}, "sharding": "fsdp", "ema_decay": 0.9999}),
    "data, average": ("emoji-sd3", {"parallel": {"data": 2}, "ema_decay": 0.9999}),
    "tensor": ("emoji-sd3", {"parallel": {"tensor": 2}}),
    "lora": ("emoji-flux", {"parallel": {"data": 2}, "lora": {"rank": 4}, "encoder_precision": "bf16"}),
}


@pytest.mark.parametrize("what", sampled(CASES, of=5))
def test_what_is_estimated_is_held(ranks, data, tmp_path, what):
    model, more = CASES[what]
    if more.get("base_precision") == "nf4":
        pytest.importorskip("bitsandbytes")
    given = settings(data, tmp_path, pretrained_model_name_or_path=model, global_batch_size=4, **more)
    config = configured(given)
    step = estimated_memory(components_of(find_model(model)), config)["step"]
    for rank in ranks(2).run(held, given):
        # Norms and biases of a tensor rank are whole, and shards of few numbers are uneven.
        assert {name: step[name] for name in rank} == pytest.approx(rank, rel=0.03, abs=2e5)
    assert step["total"] == pytest.approx(sum(step[name] for name in step if name != "total"))


def test_encoders_that_a_cache_replaces_are_in_no_step_of_a_gpu(data, tmp_path):
    components = components_of(find_model("emoji-flux"))
    for more, device, is_there in (
        ({}, "cuda", True),
        ({"cache_dir": "c"}, "cuda", False),
        ({"cache_dir": "c"}, "cpu", True),
    ):
        found = estimated_memory(components, configured(settings(data, tmp_path, lora={}, **more)), device)
        assert found["encode"]["others"] > 0
        assert found["step"]["others"] == (found["encode"]["others"] if is_there else 0)


def test_the_guide_has_what_the_command_predicts():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    run = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    rows = re.findall(r"^\| \S+ \| `(.+?)` \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert len(rows) == 7
    for name, *gigabytes in rows:
        result = predicted_training(TrainConfig.read({**run, "pretrained_model_name_or_path": name}), "4090")
        phases = result["ranks"][0]["phases"]
        assert [f"{phases[phase]['total'] / 1e9:.1f}" for phase in ("encode", "step")] == gigabytes


def test_a_run_that_cannot_fit_is_refused(data, tmp_path):
    """Before its weights are read, with what saves memory."""
    given = settings(data, tmp_path, parallel={"data": 2})
    config, info = configured(given), find_model("emoji-sd3")
    needed = least_memory(config)
    check_training_memory(config, info, torch.device("cpu"), needed)
    with pytest.raises(ditmesh.InputError, match=r"training emoji-sd3 .* GB on a rank .*--memory-limit none"):
        train(configured(given), memory_limit=0.9 * needed)


def test_a_model_that_is_not_known_is_not_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr("ditmesh.train.memory.meta_model", lambda *_: None)
    config = configured(settings(data, tmp_path))
    assert least_memory(config) is None
    check_training_memory(config, find_model("emoji-sd3"), torch.device("cpu"), 1e3)

"""The memory of training: predicted without values, and measured on ranks that train."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from torch import Tensor

import ditmesh
from ditmesh.comm.shared import SharedMemory
from ditmesh.core.alive import LiveBytes
from ditmesh.forecast.memory.check import components_of
from ditmesh.generate.model_info import find_model
from ditmesh.train import TrainConfig
from ditmesh.train.memory.check import check_training_memory, largest_workload, most_memory, predicted_training
from ditmesh.train.memory.needs import training_needs
from ditmesh.train.model.frozen import read_pipeline_frozen
from ditmesh.train.run import train
from ditmesh.train.trainer import Trainer
from support.train import folder_of, save_pipeline, settings

# The largest difference from what is measured.
TOLERANCE = 0.1


def tensors_of(pipe: Any) -> list[Tensor]:
    model = pipe.transformer
    return [*model.parameters(), *model.buffers()]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def measured(given: dict[str, Any]) -> dict[str, float]:
    """On a rank: bytes of weights, of the optimizer's state, and of tensors in a step beside them; and its stage."""
    config = TrainConfig.read(given)
    info = find_model(config.pretrained_model_name_or_path)
    if config.base_precision is None:
        pipe = diffusers.DiffusionPipeline.from_pretrained(info.files)
    else:
        pipe = read_pipeline_frozen(info, config.base_precision)
    alive = LiveBytes()
    take, slot = SharedMemory.take, SharedMemory._slot

    def taken(self: Any, *args: Any) -> Any:
        """Messages in shared memory are no tensors of this rank's own."""
        for tensor in (tensors := take(self, *args)):
            alive.hold(tensor)
        return tensors

    def slotted(self: Any, size: int) -> Any:
        alive.hold((made := slot(self, size)).contents)
        return made

    with (
        mock.patch.object(SharedMemory, "take", taken),
        mock.patch.object(SharedMemory, "_slot", slotted),
        Trainer(config, pipe, timeout=100.0) as trainer,
    ):
        trainer.data.encoded.fill_cache(trainer.mesh, trainer._preparing)
        trainer._optimizer_step(trainer.data.order.step(0))
        trained = {id(p) for p in trainer.update.parameters}
        weights = {id(local(t)): (id(t) in trained, local(t).nbytes) for t in tensors_of(pipe)}
        state = [v for one in trainer.update.optimizer.state.values() for v in one.values()]
        for tensor in (*tensors_of(pipe), *(v for v in state if isinstance(v, Tensor))):
            alive.hold(local(tensor))
        for tensor in trainer.update.average.shadow_params if trainer.update.average is not None else ():
            alive.hold(local(tensor))
        gc.collect()
        with alive:
            trainer._optimizer_step(trainer.data.order.step(1))
        return {
            "stage": trainer.mesh.pipe.rank,
            "trained": float(sum(size for own, size in weights.values() if own)),
            "frozen": float(sum(size for own, size in weights.values() if not own)),
            "optimizer": float(sum(local(v).nbytes for v in state if isinstance(v, Tensor) and v.dim())),
            "beside": alive.peak,
        }


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    folder_of(folder / "data", 8)
    for name in ("flux", "pixart"):
        save_pipeline(name, folder)
    return folder


def run_of(root: Path, out: Path, model: str = "emoji-sd3", **more: Any) -> dict[str, Any]:
    place = str(root / model) if (root / model).exists() else model
    given = {"pretrained_model_name_or_path": place, "global_batch_size": 8, "cache_dir": str(out / "cache")}
    return settings(root / "data", out, **{**given, **more})


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pixart": ("pixart", {"parallel": {"ulysses": 2}, "train_batch_size": 8}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "ulysses, checkpointing": ("emoji-sd3", {"parallel": {"ulysses": 2}, "gradient_checkpointing": True}),
    "data": ("emoji-sd3", {"parallel": {"data": 2}, "train_batch_size": 4}),
    "tensor": ("emoji-sd3", {"parallel": {"tensor": 2}, "use_ema": True}),
    "pipe": ("emoji-flux", {"parallel": {"pipe": 2}, "train_batch_size": 2}),
    "lora": ("emoji-flux", {"parallel": {"ulysses": 2}, "lora": {"rank": 4}, "train_batch_size": 4}),
    "ring": ("emoji-sd3", {"parallel": {"ring": 2}, "sharding": "none", "train_batch_size": 4}),
    "fsdp": ("emoji-sd3", {"parallel": {"data": 2}, "sharding": "fsdp", "train_batch_size": 4}),
    "ddp": ("emoji-sd3", {"parallel": {"data": 2}, "sharding": "ddp", "train_batch_size": 4}),
    "pipe, checkpointing": ("emoji-sd3", {"parallel": {"pipe": 2}, "gradient_checkpointing": True}),
    "lora, bf16 base": (
        "emoji-flux",
        {"parallel": {"ulysses": 2}, "lora": {"rank": 4}, "base_precision": "bf16", "mixed_precision": "bf16"},
    ),
    "lora, nf4 base": ("emoji-flux", {"parallel": {"data": 2}, "lora": {"rank": 4}, "base_precision": "nf4"}),
}


@pytest.mark.parametrize("what", [*CASES, *(pytest.param(name, marks=pytest.mark.matrix) for name in MORE)], ids=str)
def test_what_is_predicted_is_measured(ranks, root, tmp_path, what):
    model, more = {**CASES, **MORE}[what]
    if more.get("base_precision") == "nf4":
        pytest.importorskip("bitsandbytes")
    given = run_of(root, tmp_path, model, **more)
    config = TrainConfig.read(given)
    found = ranks(2).run(measured, given)
    info = find_model(config.pretrained_model_name_or_path)
    stages = training_needs(components_of(info), config, largest_workload(config, info))
    for rank in found:
        phases = {phase.name: phase for phase in stages[int(rank["stage"])].phases}
        step, update = phases["step"], phases["update"]
        told = {name: getattr(step, name) for name in ("trained", "frozen", "optimizer")}
        told["beside"] = max(one.activations + one.gradients for one in (step, update))
        print(what, {name: (told[name], rank[name]) for name in told})
        assert told["trained"] == pytest.approx(rank["trained"], rel=0.01)
        assert told["frozen"] == pytest.approx(rank["frozen"], rel=0.01, abs=1e5)
        assert told["optimizer"] == pytest.approx(rank["optimizer"], rel=0.01)
        whole, mine = (sum(one[name] for name in told) for one in (told, rank))
        assert whole == pytest.approx(mine, rel=TOLERANCE)
        # What is predicted is not in the weights alone.
        assert told["beside"] == pytest.approx(rank["beside"], rel=2 * TOLERANCE)


def test_a_run_that_does_not_fit_is_refused(root, tmp_path):
    """Before its weights are read, on what would fit."""
    given = run_of(root, tmp_path, "emoji-sd3", lora={"rank": 4}, train_batch_size=8)
    config, info = TrainConfig.read(given), find_model("emoji-sd3")
    check_training_memory(config, info, torch.device("cpu"), 1e12)
    needed = most_memory(config)["bytes"]
    # The table has what a process takes besides.
    assert predicted_training(config)["ranks"][0]["peak_bytes"] > needed
    check_training_memory(config, info, torch.device("cpu"), needed)
    with pytest.raises(ditmesh.InputError, match=r"training emoji-sd3 .* GB on a rank .*--no-memory-check"):
        train(given, memory_limit=0.9 * needed)
    less = most_memory(config.model_copy(update={"gradient_checkpointing": True}))["bytes"]
    assert less < needed
    with pytest.raises(ditmesh.InputError, match=r"with gradient_checkpointing: true it would need"):
        check_training_memory(config, info, torch.device("cpu"), (less + needed) / 2)
    with pytest.raises(ditmesh.InputError, match="nothing that was tried would fit"):
        check_training_memory(config, info, torch.device("cpu"), 1e3)


def test_what_is_not_predicted_is_not_refused(root, tmp_path):
    given = run_of(root, tmp_path, "emoji-flux", train_modules=["transformer", "text_encoder"])
    check_training_memory(TrainConfig.read(given), find_model("emoji-flux"), torch.device("cpu"), 1e3)

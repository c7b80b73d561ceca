"""Training steps on fake CUDA devices: backward in autograd's thread of the device, gradients those of CPUs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.launch import RankPool
from ditmesh.train.checkpoints.checkpoint import Checkpoints
from ditmesh.train.gradients.sync import GradientSync, TensorSlicesOf
from ditmesh.train.optimizer.update import not_finite
from rules.fake_cuda import KIND, fake_device
from rules.fake_world import one_of
from rules.requests import summed_late, trained, training_run, whole_run
from support.models import tiny
from support.train import folder_of, settings


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[RankPool]:
    """Ranks whose autograd has run for no tensor yet: it starts a thread for each device it knows then."""
    with RankPool(2, threads=1, timeout=120.0) as pool:
        yield pool


CASES = [
    ("SD3", {"ulysses": 2}, False),
    ("SD3", {"ring": 2}, True),
    ("Flux", {"tensor": 2}, True),
    ("Flux", {"ulysses": 2}, True),
    ("Wan", {"ring": 2}, False),
    ("PixArt", {"data": 2}, False),
    # Of others it is refused.
    *([("DiT", {"ulysses": 2, "reproducible": True}, False)] if KIND == "cuda" else ()),
]


@pytest.mark.parametrize(("name", "config", "again"), CASES)
def test_a_training_step(fresh_ranks, name, config, again):
    assert ParallelConfig(**config).world_size == 2
    for error, parameter, looks in fresh_ranks.run(trained, name, config, again):
        assert error <= 1e-4, parameter
        assert looks == {}


def test_a_sum_that_a_rank_comes_to_late_is_waited_for(fresh_ranks):
    """Also one that torch's own code calls, and whose work says nothing of its values."""
    assert fresh_ranks.run(summed_late) == [[3.0, 3.0]] * 2


def test_the_norm_of_no_gradient_is_a_tensor_of_the_device():
    """Tensor ranks add up the norms of their slices, also where none is trained; NCCL carries no tensor of the host."""
    modules = nn.ModuleDict({"text_encoder": nn.Linear(2, 2)})
    with one_of(2, 0), fake_device():
        mesh = ditmesh.Mesh(ParallelConfig(tensor=2), device=KIND)
        sync = GradientSync(modules, mesh, "auto", TensorSlicesOf(tiny("SD3"), mesh, "transformer."))
        assert sync.clip(1.0) == 0.0


def test_numbers_of_a_device_and_of_the_host_are_looked_at():
    """AdamW counts its steps on the host while everything else of it is on the GPU."""
    with one_of(1, 0), fake_device():
        mesh = ditmesh.Mesh(ParallelConfig(), device=KIND)
        fine, count = torch.ones(3, device=KIND), torch.ones(())
        assert not_finite([("weight", fine), ("steps", count)], mesh) is None
        assert not_finite([("weight", fine), ("steps", count / 0), ("average", fine / 0)], mesh) == "steps"
        assert not_finite([("weight", fine / 0), ("steps", count / 0)], mesh) == "weight"


# The loss, a number for every micro-batch in one list, and the norm of the gradient: they are logged, and a step whose
# numbers are not finite changes no weight.
READ = {"ditmesh train/trainer.py _local_scalar_dense", "ditmesh train/gradients/sync.py _local_scalar_dense"}
# For a copy to another device than CUDA's the host waits.
READ |= set() if KIND == "cuda" else {"ditmesh train/staging.py _to_copy"}


@pytest.mark.parametrize(
    "config",
    [{"parallel": {"data": 2}}, {"parallel": {"ulysses": 2}}],
    ids=lambda config: ParallelConfig(**config["parallel"]).describe(),
)
def test_the_trainers_loop(fresh_ranks, tmp_path, config):
    """Losses are those of CPUs; copies to the device are not waited for, and no tensor is on the host."""
    folder_of(tmp_path, 8)
    # AdamW's first steps go by signs, and at a usual rate what rounding has turned shows in the next losses.
    config = {**config, "learning_rate": 1e-5}
    for truth, found, looks in fresh_ranks.run(training_run, str(tmp_path), config):
        assert found == pytest.approx(truth, rel=1e-4)
        assert {what for what in looks if what.startswith("ditmesh")} <= READ
        assert looks["ditmesh train/gradients/sync.py _local_scalar_dense"] == 1


def test_checkpoints_of_tensors_of_a_device_and_of_the_host(tmp_path):
    """Each has the values of its moment."""
    with fake_device(found=True) as device:
        mesh = ditmesh.Mesh(ParallelConfig(), device=KIND)
        base = torch.arange(12.0, device=KIND)

        def state() -> dict[str, torch.Tensor]:
            half = torch.ones(3, dtype=torch.bfloat16, device=KIND)
            # Two of one storage, as slices of a flat one are.
            return {"first": base[:6].view(2, 3), "second": base[6:], "half": half, "steps": torch.tensor(3.0)}

        found = Checkpoints(tmp_path, mesh)
        for step in (1, 2, 3):
            base.fill_(step)
            assert found.save(step, state()) is None
            base.fill_(-1.0)
        for step in (1, 2, 3):
            read = {name: torch.zeros_like(one) for name, one in state().items()}
            assert found.load(tmp_path / f"checkpoint-{step}", read) == step
            assert {name: one.device.type for name, one in read.items() if name != "steps"} == dict.fromkeys(
                ("first", "second", "half"), KIND
            )
            values = {name: device.values(one).flatten().tolist() for name, one in read.items()}
            assert values == {"first": [step] * 6, "second": [step] * 6, "half": [1] * 3, "steps": [3]}
        assert base[6:].untyped_storage().data_ptr() == base.data_ptr()
        found.close()


@pytest.mark.parametrize(
    "more",
    [
        {"ema_decay": 0.9999, "mixed_precision": "bf16", "gradient_checkpointing": True},
        {"lora": {"rank": 2}, "global_batch_size": 4, "train_batch_size": 1, "max_grad_norm": 0.05},
    ],
    ids=["ema", "lora"],
)
def test_a_whole_run_and_its_resumption(fresh_ranks, tmp_path, more):
    """With images and what is saved in the end; from its checkpoint the same loss."""
    given = settings(
        folder_of(tmp_path / "data", 4),
        tmp_path / "out",
        max_train_steps=3,
        parallel={"data": 2},
        checkpointing_steps=2,
        validation_prompts=["a fish"],
        validation_steps=2,
        validation_inference_steps=1,
        sharding="none",  # What DistributedDataParallel does in C++ knows no fake device.
        **more,
    )
    losses, unsaved, files = fresh_ranks.run(whole_run, given)[0]
    assert list(losses) == [1, 2, 3]
    assert unsaved == []
    written = {"validation/step-2-0.png", "checkpoint-2/manifest.json"}
    assert written <= set(files)
    assert any(file.startswith("lora/" if "lora" in more else "pipeline/") for file in files)
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    again = {**given, "resume_from_checkpoint": "checkpoint-2"}
    found, unsaved, _ = fresh_ranks.run(whole_run, again)[0]
    assert unsaved == []
    assert found == {3: pytest.approx(losses[3], rel=1e-6)}

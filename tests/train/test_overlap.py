"""Gradients that travel during the backward pass: which weights take part, and what is averaged."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

import ditmesh
from ditmesh.comm.mesh import Mesh
from ditmesh.train.gradients.overlap import Overlapped
from ditmesh.train.gradients.sync import GradientSync, TensorSlicesOf
from support.train import folder_of, save_pipeline, settings, trainer_of


class Branches(nn.Module):
    """Two layers, and which of them a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, uses: str) -> torch.Tensor:
        return sum((getattr(self, name)(tokens) for name in uses.split()), torch.zeros(()))


def gradients_of(steps: list[list[str]], ranks: int, sharding: Any = "ddp") -> list[dict[str, torch.Tensor]]:
    """Gradients of each step on data ranks, where the forward of each micro-batch uses some layers."""
    mesh = Mesh(ditmesh.ParallelConfig(data=ranks))
    model = Branches()
    modules = nn.ModuleDict({"transformer": model})
    sync = GradientSync(modules, mesh, sharding, TensorSlicesOf(model, mesh, "transformer."))
    gradients: list[dict[str, torch.Tensor]] = []
    try:
        for step, micro_batches in enumerate(steps):
            numbers = [list(range(rank, len(micro_batches), ranks)) for rank in range(ranks)]
            mine = numbers[mesh.data.rank]
            for number in mine:
                tokens = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + number))
                with sync.accumulating(number, len(micro_batches), is_last=number == mine[-1]):
                    sync.transformer(tokens, micro_batches[number]).square().sum().backward()
            sync.reduce(numbers)
            of_step = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            gradients.append({**of_step, "overlaps": torch.tensor(isinstance(sync.transformer, Overlapped))})
            model.zero_grad(set_to_none=True)
    finally:
        sync.close()
        mesh.close()
    return gradients


@pytest.mark.parametrize(
    ("steps", "overlaps"),
    [
        ([["first second"] * 4] * 3, True),
        # One rank of two uses a layer.
        ([["first", "first second"]] * 3, False),
        # A layer that no rank uses, and that one uses later.
        ([["first"] * 4, ["first", "first second"] * 2], False),
    ],
    ids=["accumulated", "uneven", "later"],
)
def test_ranks_have_the_sum_of_all_micro_batches(ranks, steps, overlaps):
    alone = gradients_of(steps, 1)
    for found in ranks(2).run(gradients_of, steps, 2):
        assert [bool(step.pop("overlaps")) for step in found] == [overlaps] * len(steps)
        for step, (ours, whole) in enumerate(zip(found, alone, strict=True)):
            for name, gradient in ours.items():
                expected = whole.get(name, torch.zeros_like(gradient))
                assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-6), (step, name)


def sent_and_gradients(sharding: str) -> tuple[list[tuple[torch.dtype, int]], dict[str, torch.Tensor]]:
    """Dtype and elements of what torch's hook sends in two steps, and the gradients of the second."""
    sent, own = [], hooks.dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append((tensor.dtype, tensor.numel()))
        return own(tensor, *args, **kwargs)

    with mock.patch.object(hooks, "dist", mock.Mock(wraps=hooks.dist, all_reduce=all_reduce)):
        *_, last = gradients_of([["first second"] * 2] * 2, 2, sharding)
    return sent, last


def test_gradients_in_half_of_the_bytes(ranks):
    """From the second step on every gradient travels in bfloat16, once; and the negative control."""
    for (sent, ours), (nothing, exact) in zip(
        *(ranks(2).run(sent_and_gradients, way) for way in ("ddp_bf16", "ddp")), strict=True
    ):
        assert sent == [(torch.bfloat16, 2 * (4 * 4 + 4))]
        assert nothing == []
        for name in ("first.weight", "second.bias"):
            apart = float((ours[name] - exact[name]).norm() / exact[name].norm())
            assert 1e-5 < apart < 2**-7, name


def left_out_later(last: list[str]) -> Any:
    with pytest.raises(ditmesh.ConfigError) as caught:
        gradients_of([["first second"] * 4, last], 2)
    return str(caught.value)


@pytest.mark.parametrize("last", [["first"] * 4, ["first second", "first second", "first", "first"]])
def test_a_weight_without_a_gradient_in_a_later_step_ends_the_run(ranks, last):
    """In the micro-batch in which gradients travel: others are added up on each rank."""
    for sentence in ranks(2).run(left_out_later, last):
        assert "transformer.second." in sentence
        assert "sharding: none" in sentence


def losses_of(given: dict[str, Any]) -> tuple[dict[int, float], bool]:
    """Losses of a run, and whether torch averages gradients during the backward pass."""
    with trainer_of(given) as trainer:
        return trainer.run().losses, isinstance(trainer.parallel.sync.transformer, Overlapped)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    model = save_pipeline("pixart", tmp_path_factory.mktemp("model"))
    data = folder_of(tmp_path_factory.mktemp("data"), 6, 32)
    base = settings(data, tmp_path_factory.mktemp("out"), pretrained_model_name_or_path=str(model), resolution=32)
    base |= {"train_batch_size": 1, "global_batch_size": 4, "max_train_steps": 3, "learning_rate": 1e-4}
    return lambda **more: {**base, "output_dir": str(tmp_path_factory.mktemp("out")), **more}


@pytest.mark.parametrize(
    ("more", "overlaps"),
    [
        ({"parallel": {"data": 2}, "data_speeds": [3, 1], "train_modules": ["transformer", "text_encoder"]}, True),
        pytest.param({"parallel": {"data": 2}, "sharding": "none"}, False, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"ulysses": 2}}, True, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"data": 2}, "reproducible": True}, False, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"data": 2, "tensor": 2}}, True, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_runs_have_the_losses_of_one_device(ranks, given, more, overlaps):
    alone = losses_of(given(**{name: value for name, value in more.items() if name == "train_modules"}))[0]
    for losses, sent in ranks(ditmesh.ParallelConfig(**more["parallel"]).world_size).run(losses_of, given(**more)):
        assert sent == overlaps
        assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5

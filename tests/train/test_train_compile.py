"""Training with compiled blocks, and the exchange of gradients during the backward pass."""

from __future__ import annotations

import diffusers
import pytest
import torch
from torch._dynamo.utils import counters

import ditmesh
from ditmesh.core import intercept
from ditmesh.train.gradients.overlap import Overlapped
from ditmesh.train.gradients.sync import GradientSync, TensorSlicesOf
from ditmesh.train.trainer import Trainer
from support.train import configured, folder_of, save_pipeline, settings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_pipeline("pixart", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def given(tmp_path_factory, model):
    data = folder_of(tmp_path_factory.mktemp("data"), 6, 32)
    base = settings(data, tmp_path_factory.mktemp("out"), pretrained_model_name_or_path=str(model), resolution=32)
    base |= {"train_batch_size": 1, "global_batch_size": 4, "max_train_steps": 3, "learning_rate": 1e-4}
    return lambda **more: {**base, "output_dir": str(tmp_path_factory.mktemp("out")), **more}


def losses_of(given):
    """Losses of a run, whether gradients were sent during the backward pass, graphs that were compiled, and whether
    blocks have their own forwards afterwards."""
    torch._dynamo.reset()
    counters["stats"].clear()
    config = configured(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    own = [type(block).forward for block in pipe.transformer.transformer_blocks]
    with Trainer(config, pipe, timeout=200.0) as trainer:
        losses, sent = watched(trainer)
    after = [block.forward.__func__ for block in pipe.transformer.transformer_blocks]
    return losses, sent, counters["stats"]["unique_graphs"], after == own


@pytest.fixture(scope="module")
def alone(given):
    losses, _, graphs, _ = losses_of(given())
    assert graphs == 0
    return losses


@pytest.mark.parametrize(
    "more",
    [
        {"compile": "aot_eager", "gradient_checkpointing": True},
        pytest.param({"compile": True}, marks=pytest.mark.matrix),
        pytest.param({"compile": True, "gradient_checkpointing": True}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_compiled_blocks_learn_as_eager_ones(given, alone, more):
    losses, _, graphs, restored = losses_of(given(**more))
    # Blocks share their code.
    assert 1 <= graphs <= 2
    assert restored
    assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5


@pytest.mark.matrix
def test_compiled_blocks_learn_beside_a_parallel_model(given, alone):
    """While another model of the process is parallel, compiled blocks call attention as an operator."""
    with intercept.handled_by(None):
        losses, _, graphs, restored = losses_of(given(compile="aot_eager"))
    assert 1 <= graphs <= 2
    assert restored
    assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"compile": "aot_eager", "gradient_checkpointing": True}, marks=pytest.mark.matrix),
        pytest.param({"compile": True}, marks=pytest.mark.matrix),
        pytest.param({"compile": True, "sharding": "none"}, marks=pytest.mark.matrix),
        pytest.param({"compile": True, "sharding": "fsdp"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_compiled_blocks_on_data_ranks(ranks, given, alone, more):
    for losses, sent, graphs, restored in ranks(2).run(losses_of, given(parallel={"data": 2}, **more)):
        assert 1 <= graphs <= 2
        assert restored
        assert sent == ("sharding" not in more)
        assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5


@pytest.mark.parametrize("more", [{"parallel": {"ulysses": 2}}, {"parallel": {"tensor": 2}}, {"reproducible": True}])
def test_what_cannot_be_compiled_is_refused(given, more):
    with pytest.raises(ditmesh.ConfigError, match="compile=True: compiled blocks have no gradient of attention"):
        configured(given(compile=True, **more))


def test_an_unknown_backend_is_refused(given):
    with pytest.raises(ditmesh.ConfigError, match="compile='inductorr' is not a backend"):
        losses_of(given(compile="inductorr"))


@pytest.mark.parametrize(
    ("more", "overlaps"),
    [
        ({"parallel": {"data": 2}}, True),
        ({"parallel": {"ulysses": 2}}, True),
        ({"parallel": {"data": 2}, "data_speeds": [3, 1]}, True),
        ({"parallel": {"data": 2}, "train_modules": ["transformer", "text_encoder"]}, True),
        ({"parallel": {"data": 2}, "sharding": "none"}, False),
        ({"parallel": {"data": 2}, "reproducible": True}, False),
        pytest.param({"parallel": {"data": 2, "tensor": 2}}, True, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_gradients_are_averaged_during_the_backward_pass(ranks, given, alone, more, overlaps):
    for losses, sent, *_ in ranks(ditmesh.ParallelConfig(**more["parallel"]).world_size).run(losses_of, given(**more)):
        assert sent == overlaps
        if "train_modules" not in more:
            assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5


def watched(trainer):
    """Losses of a run, and whether torch averages gradients during the backward pass."""
    return trainer.run().losses, isinstance(trainer.parallel.sync.transformer, Overlapped)


class Net(torch.nn.Module):
    """Of whose weights one is not used by any sample, and one by every other."""

    def __init__(self):
        super().__init__()
        self.large, self.small = torch.nn.Linear(700, 400), torch.nn.Linear(400, 3)
        self.unused, self.sometimes = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
        self.small.weight.data = self.small.weight.data.t().contiguous().t()

    def forward(self, values, number):
        found = self.small(self.large(values))
        return self.sometimes(found) if number % 2 else found


def sums(micros):
    """Gradients over two ranks, and of all micro-batches added up by one device."""
    torch.manual_seed(0)
    modules = torch.nn.ModuleDict({"transformer": Net()})
    mesh = ditmesh.Mesh(ditmesh.ParallelConfig(data=2))
    parameters = list(modules.parameters())

    def backward(model, number):
        values = torch.randn(2, 700, generator=torch.Generator().manual_seed(number))
        model(values, number).square().sum().backward()

    sync = GradientSync(modules, mesh, "auto", TensorSlicesOf(modules["transformer"], mesh, "transformer."))
    found = []
    for _ in range(2):
        mine = micros[mesh.rank]
        for place, number in enumerate(mine):
            with sync.accumulating(number, 4, is_last=place == len(mine) - 1):
                backward(sync.transformer, number)
        sync.reduce(micros)
        found.append([p.grad.clone() for p in parameters])
        modules.zero_grad(set_to_none=True)
    for number in sorted(one for some in micros for one in some):
        backward(modules["transformer"], number)
    whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return [max(float((a - b).abs().max()) for a, b in zip(one, whole, strict=True)) for one in found]


@pytest.mark.parametrize("micros", [[[0], [2]], [[0], [1]], [[0, 1, 2], [3]]], ids=str)
def test_sums_are_those_of_one_device(ranks, micros):
    """With a weight that nothing uses, one that some samples use, and one that lies across."""
    for errors in ranks(2).run(sums, micros):
        assert max(errors) <= 1e-4

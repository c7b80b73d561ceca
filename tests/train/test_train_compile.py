"""Training with compiled blocks, and the exchange of gradients that `sharding: auto` chooses."""

from __future__ import annotations

import diffusers
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import ditmesh
from ditmesh.train import TrainConfig
from ditmesh.train.trainer import Trainer
from support.train import folder_of, save_pipeline, settings


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
    """Losses of a run, whether ranks had DistributedDataParallel, graphs that were compiled, and whether blocks have
    their own forwards afterwards."""
    torch._dynamo.reset()
    counters["stats"].clear()
    config = TrainConfig.read(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    own = [type(block).forward for block in pipe.transformer.transformer_blocks]
    with Trainer(config, pipe, timeout=200.0) as trainer:
        wrapped = isinstance(trainer.parallel.sync.transformer, DistributedDataParallel)
        losses = trainer.run().losses
    after = [block.forward.__func__ for block in pipe.transformer.transformer_blocks]
    return losses, wrapped, counters["stats"]["unique_graphs"], after == own


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


@pytest.mark.parametrize(
    "more",
    [
        {"compile": "aot_eager", "gradient_checkpointing": True},
        pytest.param({"compile": True}, marks=pytest.mark.matrix),
        pytest.param({"compile": True, "sharding": "none"}, marks=pytest.mark.matrix),
        pytest.param({"compile": True, "sharding": "fsdp"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_compiled_blocks_on_data_ranks(ranks, given, alone, more):
    for losses, wrapped, graphs, restored in ranks(2).run(losses_of, given(parallel={"data": 2}, **more)):
        assert 1 <= graphs <= 2
        assert restored
        assert wrapped == ("sharding" not in more)
        assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5


@pytest.mark.parametrize("more", [{"parallel": {"ulysses": 2}}, {"parallel": {"tensor": 2}}, {"reproducible": True}])
def test_what_cannot_be_compiled_is_refused(given, more):
    with pytest.raises(ditmesh.ConfigError, match="compile=True: compiled blocks have no gradient of attention"):
        TrainConfig.read(given(compile=True, **more))


def test_an_unknown_backend_is_refused(given):
    with pytest.raises(ditmesh.ConfigError, match="compile='inductorr' is not a backend"):
        losses_of(given(compile="inductorr"))


@pytest.mark.parametrize(
    ("more", "overlaps"),
    [
        ({"parallel": {"data": 2}}, True),
        ({"parallel": {"ulysses": 2}}, True),
        ({"parallel": {"data": 2}, "reproducible": True}, False),
        ({"parallel": {"data": 2}, "train_modules": ["transformer", "text_encoder"]}, False),
    ],
    ids=str,
)
def test_gradients_are_exchanged_during_the_backward_where_that_works(ranks, given, alone, more, overlaps):
    for losses, wrapped, *_ in ranks(2).run(losses_of, given(**more)):
        assert wrapped == overlaps
        if "train_modules" not in more:
            assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-5

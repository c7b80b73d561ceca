"""What the tests of stages in training run on every rank: micro-batches through the stages, against one device."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import ditmesh
from ditmesh.comm.mesh import Mesh
from ditmesh.engine import restore
from ditmesh.strategies.pipefusion.stages import ABSENT
from ditmesh.train import TrainConfig
from ditmesh.train.parallel import ParallelTraining
from support import lora
from support.gradients import error, fresh, in_double, loss_of
from support.models import sizes, tiny

# By turns, so that messages of several shapes follow one another.
SIZES = ("B=2 ragged", "B=1")


def calls(name: str, count: int, dtype: torch.dtype, first: int = 0) -> list[dict[str, Any]]:
    """Arguments of micro-batches; nothing but the weights asks for gradients."""
    made = [fresh(name, sizes(name)[SIZES[seed % 2]], dtype, first + seed) for seed in range(count)]
    return [{k: v.detach() if isinstance(v, Tensor) else v for k, v in one.items()} for one in made]


def made(name: str, dtype: torch.dtype, adapted: bool, checkpointing: bool, blocks: dict[str, int]) -> nn.Module:
    """A tiny model; ``blocks``: other numbers of them."""
    model = copy.deepcopy(tiny(name))
    if blocks:
        torch.manual_seed(4)
        model = type(model).from_config({**model.config, **blocks})
        for parameter in model.parameters():
            parameter.data.add_(0.05 * torch.randn(parameter.shape))
    model = model.to(dtype)
    if adapted:
        model.requires_grad_(False)
        torch.manual_seed(5)
        model.add_adapter(lora.settings(4))
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Half of them are zeros, and the other half has no gradient then.
                parameter.data.add_(0.05 * torch.randn(parameter.shape, dtype=dtype))
    model.train()
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    if checkpointing:
        model.enable_gradient_checkpointing()
    return model


def collected(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def staged_step(
    name: str,
    parallel: dict[str, Any],
    count: int = 3,
    adapted: bool = False,
    checkpointing: bool = False,
    autocast: bool = False,
    blocks: dict[str, int] | None = None,
) -> dict[str, Any]:
    """One step of ``count`` micro-batches on every data rank, in float64, or in bf16 autocast.

    Returns:
        Of this rank: the worst error of a gradient and whose it is, the share of the weights that it holds, the largest
        number of micro-batches under way, the error of a prediction without gradients, the clipped norm's error.
    """
    dtype = torch.float32 if autocast else torch.float64
    with ExitStack() as stack:
        if not autocast:
            stack.enter_context(in_double(name))
        return _staged_step(name, parallel, count, adapted, checkpointing, autocast, blocks or {}, dtype)


def _staged_step(
    name: str,
    parallel: dict[str, Any],
    count: int,
    adapted: bool,
    checkpointing: bool,
    autocast: bool,
    blocks: dict[str, int],
    dtype: torch.dtype,
) -> dict[str, Any]:
    def losses_of(model: nn.Module, call: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_of(model, call)

    model, data = made(name, dtype, adapted, checkpointing, blocks), parallel.get("data", 1)
    every = calls(name, count * data, dtype)
    alone = copy.deepcopy(model)
    for call in every:
        losses_of(alone, call).backward()
    truth = collected(alone)
    norm = torch.nn.utils.get_total_norm(list(truth.values()))
    with torch.no_grad():
        expected = alone(**every[0])[0]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = TrainConfig(
        pretrained_model_name_or_path="none",
        train_data_dir=".",
        output_dir=".",
        parallel=parallel,  # pyright: ignore
    )
    mesh, undo = Mesh(config.placement, "cpu", 100.0), ExitStack()
    undo.callback(mesh.close)
    trained = nn.ModuleDict({"transformer": model})
    total = sum(p.numel() for p in model.parameters())
    try:
        made_parallel = ParallelTraining(
            trained, model, config, mesh, undo, lambda close=None: restore(model) if close is None else close()
        )
        stages, sync = made_parallel.stages, made_parallel.sync
        assert stages is not None
        held = sum(p.numel() for p in model.parameters()) / total
        mine = every[mesh.data.rank :: data]
        stages.run(len(mine), lambda place: losses_of(model, mine[place]) * sync.share)
        sync.reduce([])
        found = collected(model)
        # Of this stage, and of tensor ranks their slices.
        cut = made_parallel.slices.own
        own = {key: cut(f"transformer.{key}", value) for key, value in truth.items() if key in found}
        result: dict[str, Any] = {"gradients": error(found, own), "names": sorted(found), "held": held}
        result["under way"] = stages.most_under_way
        with torch.no_grad():
            prediction = model(**every[0])[0]
        result["prediction"] = float((prediction - expected).abs().max() / expected.abs().max())
        result["norm"] = abs(sync.clip(0.0) / float(norm) - 1)
        result["absent"] = sorted(n for n, p in model.named_parameters() if hasattr(p, ABSENT))
    finally:
        undo.close()
    after = model.state_dict()
    result["restored"] = all(torch.equal(after[key], value) for key, value in before.items())
    result["trains again"] = all(p.requires_grad or adapted for p in model.parameters())
    return result


def refused(name: str, parallel: dict[str, Any], **more: Any) -> str:
    """Why a model cannot be trained on these stages."""
    try:
        staged_step(name, parallel, **more)
    except ditmesh.ConfigError as found:
        return str(found)
    return "nothing is wrong"

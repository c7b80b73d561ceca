"""What the tests of stages in training run on every rank: micro-batches through the stages, against one device."""

from __future__ import annotations

import copy
import weakref
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from unittest import mock

import diffusers
import torch
from peft import LoraConfig
from torch import Tensor, nn

import ditmesh
from ditmesh.comm import PeerError
from ditmesh.comm.mesh import Mesh
from ditmesh.engine import restore
from ditmesh.generate.model_info import find_model
from ditmesh.layout import layout_of
from ditmesh.strategies.pipefusion.stages import blocks_of
from ditmesh.train import TrainConfig
from ditmesh.train.gradients.stages import TrainedStages
from ditmesh.train.parallel import ParallelTraining
from ditmesh.train.trainer import Trainer
from support import lora
from support.gradients import error, fresh, in_double, loss_of
from support.models import sizes, tiny

# By turns, so that messages of several shapes follow one another.
SIZES = ("B=2 ragged", "B=1")


def calls(name: str, count: int, dtype: torch.dtype, first: int = 0) -> list[dict[str, Any]]:
    """Arguments of micro-batches; nothing but the weights asks for gradients."""
    made = [fresh(name, sizes(name)[SIZES[seed % 2]], dtype, first + seed) for seed in range(count)]
    return [{k: v.detach() if isinstance(v, Tensor) else v for k, v in one.items()} for one in made]


def made(
    name: str, dtype: torch.dtype, adapted: bool, checkpointing: bool, blocks: dict[str, int], targets: list[str] | None
) -> nn.Module:
    """A tiny model; ``blocks``: other numbers of them; ``targets``: of adapters."""
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
        model.add_adapter(lora.settings(4) if targets is None else LoraConfig(r=4, target_modules=targets))
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
    targets: list[str] | None = None,
) -> dict[str, Any]:
    """One step of ``count`` micro-batches on every data rank, in float64, or in bf16 autocast.

    Returns:
        Of this rank: the worst error of a gradient and whose it is; the shares of the weights, and of weights,
        gradients and AdamW's state that it holds; the largest number of micro-batches under way, and of graphs that
        were there at once; the errors of a prediction without gradients, and of the gradients' norm.
    """
    dtype = torch.float32 if autocast else torch.float64
    with ExitStack() as stack:
        if not autocast:
            stack.enter_context(in_double(name))
        model = made(name, dtype, adapted, checkpointing, blocks or {}, targets)
        return _staged_step(model, name, parallel, count, adapted, autocast, dtype)


def _staged_step(
    model: nn.Module,
    name: str,
    parallel: dict[str, Any],
    count: int,
    adapted: bool,
    autocast: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    def losses_of(model: nn.Module, call: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_of(model, call)

    data = parallel.get("data", 1)
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
        graphs, alive = 0, weakref.WeakSet[Marked]()

        def forward(place: int) -> Tensor:
            nonlocal graphs
            loss = losses_of(model, mine[place]) * sync.share
            graphs = max(graphs, len(alive))
            return loss

        layout = layout_of(model)
        assert layout is not None
        block = blocks_of(model, layout)[stages.first][1]
        watching = block.register_forward_pre_hook(partial(marked, alive), with_kwargs=True)
        stages.run(len(mine), forward)
        watching.remove()
        sync.reduce([])
        found = collected(model)
        # Of this stage, and of tensor ranks their slices.
        cut = made_parallel.slices.own
        own = {key: cut(f"transformer.{key}", value) for key, value in truth.items() if key in found}
        result: dict[str, Any] = {"gradients": error(found, own), "names": sorted(found), "held": held}
        result |= {"under way": stages.most_under_way, "graphs": graphs, "trained": sorted(truth)}
        result["stages from here"] = stages.link.size - stages.link.rank
        with torch.no_grad():
            prediction = model(**every[0])[0]
        result["prediction"] = float((prediction - expected).abs().max() / expected.abs().max())
        result["norm"] = abs(sync.clip(0.0) / float(norm) - 1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        optimizer.step()
        kept = [p.numel() + (0 if p.grad is None else p.grad.numel()) for p in model.parameters()]
        states = [v.numel() for state in optimizer.state.values() for v in state.values() if v.dim()]
        result["kept"] = (sum(kept) + sum(states)) / (4 * total)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(cut(f"transformer.{key}", before[key]))
    except BaseException:
        # As the trainer does: its own error is to be told.
        mesh.abandon()
        with suppress(PeerError):
            undo.close()
        raise
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


class Marked:
    """Lives as long as a graph."""


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, alive: weakref.WeakSet[Marked]) -> Tensor:
        ctx.mark = Marked()
        alive.add(ctx.mark)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def marked(alive: weakref.WeakSet[Marked], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mark the graph that a block's call is part of."""
    if torch._C._current_graph_task_id() >= 0:
        # Activation checkpointing.
        return None
    if args:
        return (_Mark.apply(args[0], alive), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: _Mark.apply(kwargs[name], alive)}


def halved(back: Any, self: TrainedStages, record: Any, loss: Tensor) -> None:
    for leaf in record.arrived:
        leaf.register_hook(lambda gradient: gradient / 2)
    back(self, record, loss)


# A method of `TrainedStages`, and what takes its place, given the method.
FAULTS: dict[str, tuple[str, Any]] = {
    "glue is not added up": ("add_up", lambda _: lambda self: None),
    "gradients change on the way": ("_backward", lambda back: lambda *given: halved(back, *given)),
    "gradients do not go back": (
        "_arrive",
        lambda arrive: lambda *given: {name: value.detach() for name, value in arrive(*given).items()},
    ),
}


def faulty_step(fault: str) -> dict[str, Any]:
    """A step in which something of the stages is wrong."""
    name, wrong = FAULTS[fault]
    with mock.patch.object(TrainedStages, name, wrong(getattr(TrainedStages, name))):
        return staged_step("SD3", {"pipe": 2})


def curve(given: dict[str, Any], until: int | None = None) -> dict[str, Tensor]:
    """A training run, and its averaged weights, on the first rank."""
    config = TrainConfig.read(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(find_model(config.pretrained_model_name_or_path).files)
    pipe.set_progress_bar_config(disable=True)
    with Trainer(config, pipe, timeout=100.0) as trainer:
        trainer.run(until=until)
        with trainer.update.averaged():
            return trainer.weights()

"""The trained modules, and their parallelisation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from torch import nn

from ..comm.mesh import Mesh
from ..core.alignment import aligned
from ..engine import parallelize
from ..errors import ConfigError
from .config import TrainConfig
from .gradients.speeds import DataSpeeds
from .gradients.sync import GradientSync, TensorSlicesOf
from .model.adapters import add_adapters
from .model.compiling import compile_blocks_of
from .model.dropout import TokenDropout, dropout_refusal, dropping
from .model.frozen import freeze, host_digest


def trained_modules(pipe: Any, config: TrainConfig) -> nn.ModuleDict:
    """The modules of ``train_modules``, with fresh weights or adapters as configured; all others are frozen.

    Raises:
        ConfigError: the pipeline has no such module, or no layers for the adapters.
    """
    unknown = [name for name in config.train_modules if not isinstance(pipe.components.get(name), nn.Module)]
    if unknown:
        raise ConfigError(f"train_modules: {type(pipe).__name__} has no module {unknown[0]!r}")
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    model: Any = modules[config.denoiser]
    for name, module in modules.items():
        module.requires_grad_(name in config.train_modules and config.lora is None)
        module.train(name in config.train_modules)
    if config.from_scratch:
        model.load_state_dict(type(model).from_config(model.config).state_dict())
    if config.lora is not None:
        add_adapters(pipe, config)
    if config.in_order:
        # Memory-mapped weights start at any address, and kernels are chosen by its alignment.
        for module in modules.values():
            for parameter in module.parameters():
                parameter.data = aligned(parameter.data)
    if config.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    return nn.ModuleDict({name: pipe.components[name] for name in config.train_modules})


class ParallelTraining:
    """The transformer on the ranks of a mesh, and the gradients of its weights. Collective.

    Args:
        trained: modules by name, whole.
        undo: gets what takes the ranks off the model again.
        restore: undoes `parallelize`, or what it is given.

    Attributes:
        speeds: of the data ranks.
        slices: what tensor ranks hold.
        sync: of the gradients.

    Raises:
        ConfigError: the model cannot be trained so.
    """

    def __init__(
        self,
        trained: nn.ModuleDict,
        model: nn.Module,
        config: TrainConfig,
        mesh: Mesh,
        undo: ExitStack,
        restore: Callable[..., None],
    ) -> None:
        self.speeds = DataSpeeds(config.data_speeds, mesh)
        problem = dropout_refusal(model, mesh)
        if problem is not None:
            raise ConfigError(problem)
        if config.base_offload and len(set(mesh.world.all_gather_object(host_digest(model)))) > 1:
            raise ConfigError(
                "base_offload: the transformer's weights in host memory differ between ranks; compare files"
            )
        # Of the whole weights: `parallelize` cuts them.
        self.slices = TensorSlicesOf(model, mesh, f"{config.denoiser}.")
        # Ranks that have whole samples only exchange gradients; attention that may cross ranks is no code to compile.
        whole = bool(config.compile) and mesh.world_size == mesh.data.size
        if (mesh.world_size > 1 or config.in_order) and not whole:
            parallelize(cast(Any, model), mesh.config, mesh=mesh)
            undo.callback(restore)
        if config.quantises_slices:
            # Slices are cut of plain weights.
            freeze(model, config.base_precision)
        if mesh.sequence.size > 1 and dropping(model):
            undo.callback(TokenDropout(model, mesh).close)
        if config.compile:
            compile_blocks_of(model, config, undo)
        self.sync = GradientSync(trained, mesh, config.sharding, self.slices)
        undo.callback(self.sync.close)
        # FSDP2 replaces the parameters.
        self.slices.follow(trained.named_parameters())

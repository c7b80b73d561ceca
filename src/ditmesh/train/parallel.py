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
from .model.frozen import freeze

DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Their forwards in diffusers 0.42.1 leave the mask out of some blocks that are recomputed.
UNMASKED = ("ChromaTransformer2DModel",)


def trained_modules(pipe: Any, config: TrainConfig) -> nn.ModuleDict:
    """The modules of ``train_modules``, with fresh weights or adapters as configured; all others are frozen.

    Raises `ConfigError`: the pipeline has no such module, or no layers for the adapters.
    """
    unknown = [name for name in config.model.train_modules if not isinstance(pipe.components.get(name), nn.Module)]
    if unknown:
        raise ConfigError(f"train_modules: {type(pipe).__name__} has no module {unknown[0]!r}")
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    model: Any = modules[config.denoiser]
    for name, module in modules.items():
        module.requires_grad_(name in config.model.train_modules and config.lora is None)
        module.train(name in config.model.train_modules)
    if config.model.from_scratch:
        model.load_state_dict(type(model).from_config(model.config).state_dict())
    if config.lora is not None:
        add_adapters(pipe, config)
    if config.in_order:
        # Memory-mapped weights start at any address, and kernels are chosen by its alignment.
        for module in modules.values():
            for parameter in module.parameters():
                parameter.data = aligned(parameter.data)
    if config.model.gradient_checkpointing:
        if type(model).__name__ in UNMASKED:
            raise ConfigError(
                f"gradient_checkpointing=True: {type(model).__name__} of diffusers recomputes blocks without the mask "
                "of the text, and gradients would be wrong; leave it out"
            )
        model.enable_gradient_checkpointing()
    return nn.ModuleDict({name: pipe.components[name] for name in config.model.train_modules})


class ParallelTraining:
    """The transformer on the ranks of a mesh, and the gradients of its weights. Collective.

    Args:
        trained: modules by name, whole.
        undo: gets what takes the ranks off the model again.
        restore: undoes `parallelize`, or what it is given.

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
        self.speeds = DataSpeeds(config.optimizer.data_speeds, mesh)
        _check_dropout(model, mesh)
        # Of the whole weights: `parallelize` cuts them.
        self.slices = TensorSlicesOf(model, mesh, f"{config.denoiser}.")
        if mesh.world_size > 1 or config.in_order:
            parallelize(cast(Any, model), mesh.config, mesh=mesh)
            undo.callback(restore)
        if config.quantises_slices:
            # Slices are cut of plain weights.
            freeze(model, config.model.base_precision)
        self.sync = GradientSync(trained, mesh, config.model.sharding, self.slices)
        undo.callback(self.sync.close)
        # FSDP2 replaces the parameters.
        self.slices.follow(trained.named_parameters())


def _check_dropout(model: nn.Module, mesh: Mesh) -> None:
    """Refuse dropout that each rank would draw for its own part of a sample: masks would not be those of one device."""
    if mesh.sequence.size * mesh.tensor.size == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS) and cast(Any, module).p > 0:
            raise ConfigError(
                f"{name} has dropout p={cast(Any, module).p:g}, and ranks of ulysses, ring and tensor would draw masks "
                "of their own; use data ranks alone, or no dropout"
            )

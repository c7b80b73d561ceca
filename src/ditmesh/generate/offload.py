"""Components that are on the device only while they work: text encoders and VAE, not the transformers."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from ..engine import denoisers
from ..request import Offload


class _WhileItWorks(ModelHook):
    """Brings a module to a device when it is called, and takes it away when a transformer or another one is."""

    def __init__(self, device: torch.device, others: list[nn.Module]) -> None:
        # diffusers asks a component's hook where the pipeline computes.
        self.execution_device = device
        self._others = others

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for other in self._others:
            if other is not module:
                other.to("cpu")
        module.to(self.execution_device)
        return args, kwargs


def offload(pipe: Any, how: Offload, device: torch.device) -> None:
    """Keep a pipeline's components but the transformers, which go to the device, on the CPU while they do not work.

    ``"model"``: a component is on the device from its call to the next one's or a transformer's; ``"group"``: its
    layers are, each during its own call (diffusers); ``"sequential"``: the same with weights that are nowhere in
    between (accelerate).
    """
    if how == "none":
        pipe.to(device)
        return
    transformers = denoisers(pipe)
    for transformer in transformers:
        transformer.to(device)
    modules = [m for m in pipe.components.values() if isinstance(m, nn.Module) and m not in transformers]
    for module in modules:
        if how == "model":
            add_hook_to_module(module, _WhileItWorks(device, modules))
        elif how == "group":
            from diffusers.hooks.group_offloading import apply_group_offloading

            apply_group_offloading(module, onload_device=device, offload_type="leaf_level")
        else:
            from accelerate import cpu_offload

            cpu_offload(module, device, offload_buffers=True)
    if how == "model":

        def leave(*_: Any) -> None:
            for module in modules:
                module.to("cpu")

        for transformer in transformers:
            transformer.register_forward_pre_hook(leave)

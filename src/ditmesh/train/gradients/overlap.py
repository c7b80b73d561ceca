"""Gradients that travel during the backward pass, by torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ...errors import ConfigError

# torch 2.14 deprecates the second. Without `init_sync`, both leave buffers as they are.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


class Overlapped(nn.Module):
    """Trained modules as one that is called as the transformer is: text encoders make its arguments.

    Args:
        modules: of which every weight that is trained gets a gradient in every backward pass.
        called: the transformer, among them.
        half: gradients travel, and are added up, in bfloat16.
    """

    def __init__(self, modules: nn.ModuleDict, called: nn.Module, group: dist.ProcessGroup, half: bool = False) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in modules.named_parameters() if p.requires_grad}
        self._arrived: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p: self._arrived.add(id(p)))
            for parameter in modules.parameters()
            if parameter.requires_grad
        ]
        self._ddp = DistributedDataParallel(
            _Called(modules, called),
            process_group=group,
            # Ranks have read equal weights, and buffers do not change.
            init_sync=False,
            gradient_as_bucket_view=True,
            **cast(Any, {_BUFFERS: False}),
        )
        if half:
            # By its own name torch refuses the hook without CUDA, and it works.
            self._ddp.register_comm_hook(group, lambda state, bucket: bf16_compress_hook(state, bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._ddp(*args, **kwargs)

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        """Around the forward and backward of a micro-batch; gradients travel in the last one of a step.

        Raises `ConfigError`: a weight got no gradient in the last one, so that torch averaged not all of them.
        """
        if not is_last:
            with self._ddp.no_sync():
                yield
            return
        self._arrived.clear()
        yield
        missing = self._names.keys() - self._arrived
        if missing:
            raise ConfigError(
                f"sharding: {self._names[missing.pop()]} got a gradient in the first step and none in this one, and "
                "DistributedDataParallel needs all of them in every step; use sharding: none"
            )

    def close(self) -> None:
        """Take the hooks off the weights."""
        for hook in self._hooks:
            hook.remove()


class _Called(nn.Module):
    def __init__(self, modules: nn.ModuleDict, called: nn.Module) -> None:
        super().__init__()
        self.trained, self.called = modules, called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.called(*args, **kwargs)

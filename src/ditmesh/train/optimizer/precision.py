"""Mixed precision and checks for finite numbers, with one decision for all ranks of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...comm.mesh import Mesh

# dtypes of the forward and backward pass, by ``mixed_precision``.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# If gradients overflow at a loss scale below this, the scale is not the cause.
LEAST_SCALE = 2.0**-10


class MeshGradScaler(torch.amp.GradScaler):
    """A loss scaler (Micikevicius et al. 2018, arXiv:1710.03740) with the same scale and skipped steps on all ranks.

    torch's own looks for infinities in the gradients of its process. Ranks of a mesh may hold slices or shards of
    them: an overflow in one of these skips the step of every rank.

    Args:
        enabled: False: gradients are neither scaled nor looked at.
    """

    def __init__(self, mesh: Mesh, enabled: bool) -> None:
        super().__init__(mesh.device.type, enabled=enabled)
        self._mesh = mesh

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and agree on whether any rank's have overflowed. Collective."""
        if not self.is_enabled():
            return
        device = self._mesh.device
        gradients = [
            local_of(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        # A rank of a sequence adds up a weight's gradient over its own tokens. Float16 has held the parts; whether it
        # can hold the sum is what one device has found.
        norms = cast(Any, torch)._foreach_norm([g for g in gradients if g.numel()], float("inf"))
        largest = torch.stack([*norms, torch.zeros((), device=device)]).max()
        super().unscale_(optimizer)
        found = self._found(optimizer)
        flags = [flag.to(device, torch.float32).reshape(1) for flag in found.values()]
        flags.append((largest > torch.finfo(torch.float16).max).float().reshape(1))
        total = torch.stack([*flags, torch.zeros(1, device=device)]).amax(0)
        verdict = self._mesh.world.all_reduce(total).clamp(max=1.0)
        # A rank without a gradient has recorded nothing, but takes part in the decision.
        for place in found or (device,):
            found[place] = verdict.to(place)

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if `step` will be skipped; after `unscale_`. The same on every rank."""
        return self.is_enabled() and any(bool(flag.item()) for flag in self._found(optimizer).values())

    def _found(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        # As torch's ShardedGradScaler does: there is no public name for it.
        return cast(Any, self)._per_optimizer_states[id(optimizer)]["found_inf_per_device"]


def local_of(tensor: Tensor) -> Tensor:
    """A rank's own shard of a tensor; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def not_finite(named: Iterable[tuple[str, Tensor]], mesh: Mesh) -> str | None:
    """The name of a tensor of any rank that holds an infinity or a NaN, the same on every rank. Collective.

    Args:
        named: this rank's whole tensors, slices or shards.
    """
    local = [(name, local_of(value)) for name, value in named]
    local = [(name, value) for name, value in local if value.is_floating_point()]
    bad: dict[str, bool] = {}
    # One look at each device for all of its tensors; an optimizer's counts may be on the host.
    for device in {value.device for _, value in local}:
        here = [(name, value) for name, value in local if value.device == device]
        good = torch.stack([torch.isfinite(value).all() for _, value in here]).tolist()
        bad |= {name: not fine for (name, _), fine in zip(here, good, strict=True)}
    mine = next((name for name, _ in local if bad[name]), None)
    return next((name for name in mesh.world.all_gather_object(mine) if name is not None), None)

"""Averaging, sharding, clipping and gathering of gradients and states over ranks.

Data and sequence ranks hold the same weights and each a part of their gradient: the mean over them is one device's
(docs/training.md). Tensor ranks hold slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ...comm.mesh import Mesh
from ...core.partition import Partition
from ...errors import ConfigError
from ...layout import layout_of
from ...strategies.pipefusion.stages import kept_parameters
from ...strategies.tensor.parallel import adapter_cuts
from ...strategies.tensor.slices import plan_slices
from ..config import SECOND, Sharding
from .ordered import OrderedGradients, weight_gradients
from .overlap import Overlapped
from .reduce import reduce_gradients


class GradientSync:
    """Synchronises the gradients of the ranks.

    With ``ddp`` the first step averages gradients after its backward passes, and DistributedDataParallel is put around
    the modules then, unless a weight got no gradient: later steps average as the first one did then. The search for
    such weights that torch has walks the graph of every forward, and has crashed (docs/decisions.md).

    Args:
        modules: the trained ones, by name; parallelised already.
        slices: what tensor ranks hold.

    Attributes:
        transformer: what to call in the place of the transformer.
        is_sum: whether every rank of a sequence has whole gradients, which are added up in a fixed order.
        share: what a rank's loss is multiplied by: the backward pass adds up what the ranks of a sequence send into
            their blocks, so that gradients there have one device's size.

    Raises:
        ConfigError: the sharding does not support the trained modules.
    """

    def __init__(self, modules: nn.ModuleDict, mesh: Mesh, sharding: Sharding, slices: TensorSlicesOf) -> None:
        self._modules, self._mesh, self._slices = modules, mesh, slices
        group = mesh.gradient_group
        self.is_sum = mesh.config.reproducible
        self.share = 1.0 if self.is_sum else 1.0 / mesh.sequence.size
        kind = ("none" if self.is_sum else "ddp") if sharding == "auto" else sharding
        self._kind: Sharding = "none" if group is None else kind
        name = next((one for one in ("transformer", SECOND) if one in modules), next(iter(modules)))
        self.transformer: nn.Module = modules[name]
        if self.is_sum:
            self._ordered = OrderedGradients(
                [p for p in modules.parameters() if p.requires_grad], weight_gradients(self.transformer), mesh
            )
        self._overlapped: Overlapped | None = None
        if self._kind == "fsdp" and group is not None:
            if list(modules) not in (["transformer"], [SECOND]):
                raise ConfigError(
                    f"sharding={sharding!r} is for the transformer alone; use sharding='ddp' to train others"
                )
            self._shard(group)

    def _shard(self, group: dist.ProcessGroup) -> None:
        from torch.distributed.fsdp import fully_shard

        # torch remembers device meshes by ranks and names, and the groups of an earlier run are gone.
        shards = DeviceMesh.from_group(group, self._mesh.device.type, mesh_dim_names=(f"gradients-{group.group_name}",))
        layout = layout_of(self.transformer)
        # Weights that are used outside of their block have to be gathered there, too: the model's gather does it.
        outside = set[int]() if layout is None else kept_parameters(self.transformer, layout)
        for blocks in self.transformer.children():
            for block in blocks if isinstance(blocks, nn.ModuleList) else ():
                if not any(id(parameter) in outside for parameter in block.parameters()):
                    fully_shard(block, mesh=shards)
        fully_shard(self.transformer, mesh=shards)

    @contextmanager
    def accumulating(self, number: int, count: int, is_last: bool) -> Iterator[None]:
        """Around the forward and backward of one micro-batch of a step.

        Args:
            number, count: which micro-batch it is, and how many the step has over all data ranks.
            is_last: whether it is this rank's last one.
        """
        if self._kind == "fsdp":
            cast(Any, self.transformer).set_requires_gradient_sync(is_last)
        with nullcontext() if self._overlapped is None else self._overlapped.accumulating(is_last):
            yield
        if self.is_sum:
            self._ordered.take(number, count)

    def reduce(self, shares: Sequence[Sequence[int]]) -> None:
        """Make the gradients of a step the sum over all micro-batches of all ranks. Collective.

        Args:
            shares: for every data rank the numbers of its micro-batches.
        """
        group = self._mesh.gradient_group
        if self.is_sum:
            self._ordered.reduce(shares)
        elif self._kind != "fsdp" and self._overlapped is None:
            unused = sum(p.requires_grad and p.grad is None for p in self._modules.parameters())
            for parameter in self._modules.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    # Of a weight that is not used, or of a rank without micro-batches.
                    parameter.grad = torch.zeros_like(parameter)
            reduce_gradients(self._modules, self._mesh)
            if self._kind.startswith("ddp") and group is not None:
                # Gradients travel during later backward passes, if no weight of any rank was unused.
                everywhere = torch.tensor(unused, device=self._mesh.device)
                dist.all_reduce(everywhere, group=group)
                if everywhere.item():
                    self._kind = "none"
                else:
                    half = self._kind == "ddp_bf16"
                    self.transformer = self._overlapped = Overlapped(self._modules, self.transformer, group, half)
        gradients = [p.grad for p in self._modules.parameters() if p.grad is not None]
        if not self.is_sum and group is not None and gradients:
            # DDP, FSDP2 and `reduce_gradients` take the mean.
            cast(Any, torch)._foreach_mul_(gradients, dist.get_world_size(group))

    def close(self) -> None:
        """Take off the weights what this has put on them."""
        if self._overlapped is not None:
            self._overlapped.close()

    def clip(self, most: float) -> float:
        """Clip the gradients of all ranks together to a norm; 0: only return it. Collective.

        Returns:
            The norm before, the same on every rank.
        """
        parameters = [p for p in self._modules.parameters() if p.grad is not None]
        sliced, rest = self._slices.parted(parameters)
        squares = self._norm(rest).square()
        if self._mesh.tensor.size > 1:
            # Zeros on the other ranks add nothing.
            squares = squares + self._mesh.tensor.all_reduce(self._norm(sliced).square().reshape(1))[0]
        norm = squares.sqrt()
        if most:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return float(norm)

    def _norm(self, parameters: list[nn.Parameter]) -> Tensor:
        if not parameters:
            return torch.zeros((), device=self._mesh.device)
        norm = torch.nn.utils.get_total_norm([cast(Tensor, p.grad) for p in parameters])
        # Of shards: all of them together.
        return cast(Any, norm).full_tensor() if hasattr(norm, "full_tensor") else norm


def _sharded_like(sample: DTensor, tensor: Tensor) -> Tensor:
    return distribute_tensor(tensor, sample.device_mesh, sample.placements, src_data_rank=None)


class TensorSlicesOf:
    """The parameters with tensor slices, and how to gather them.

    Args:
        model: the transformer, before it is cut.
        prefix: of its parameters' names.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, prefix: str) -> None:
        self._link = mesh.tensor
        self._cuts: dict[str, tuple[int | None, Partition | None]] = {}
        if self._link.size > 1:
            made = plan_slices(model, self._link.size)
            cuts = (*made.parameters(), *adapter_cuts(model, made))
            self._cuts = {prefix + name: (dim, cut) for name, dim, cut in cuts}
        self._ids: set[int] = set()

    def follow(self, named: Iterator[tuple[str, nn.Parameter]]) -> None:
        """Set the parameters by name."""
        self._ids = {id(parameter) for name, parameter in named if name in self._cuts}

    def parted(self, parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters of which a rank has its own part, and those that all hold."""
        own = [p for p in parameters if id(p) in self._ids]
        return own, [p for p in parameters if id(p) not in self._ids]

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """A parameter, or an optimizer's state of it, put together from all ranks. Collective.

        Shards (FSDP2's, of slices) become shards of the whole: one tensor at a time is whole on every rank.
        """
        dim, cut = self._cuts.get(name, (None, None))
        if name not in self._cuts or mine.dim() == 0:
            return mine
        if isinstance(mine, DTensor):
            return _sharded_like(mine, self.whole(name, mine.full_tensor()))
        if dim is None or cut is None:
            return self._link.broadcast(mine.contiguous() if self._link.rank == 0 else torch.empty_like(mine), 0)
        pieces = self._link.all_gather(mine.contiguous(), cut.lengths, dim).split(cut.lengths, dim)
        return cut.join(pieces, dim)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's slice of what `whole` returns."""
        dim, cut = self._cuts.get(name, (None, None))
        if name not in self._cuts or whole.dim() == 0:
            return whole
        if isinstance(whole, DTensor):
            return _sharded_like(whole, self.own(name, whole.full_tensor()))
        if dim is None or cut is None:
            return whole if self._link.rank == 0 else torch.zeros_like(whole)
        return cut.copy(whole, dim, self._link.rank)

    def mapped(self, state: dict[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        """The states of parameters, by name, with their tensors changed; a parameter's own or a dict of tensors."""
        changed: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, dict):
                changed[name] = {key: change(name, v) if isinstance(v, Tensor) else v for key, v in value.items()}
            else:
                changed[name] = change(name, value) if isinstance(value, Tensor) else value
        return changed

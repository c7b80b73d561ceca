"""Training on islands: outer steps over a slow link.

The ranks of an island are a job of their own. Rank r of every island holds the same part of the weights, so these ranks
exchange with one another, over gloo. Ranks of an island that hold equal weights take a share each of what travels.

The algorithm is DiLoCo's (Douillard et al. 2023, arXiv:2311.08105): some steps of the inner optimizer change the
weights of every island. The mean change, seen from the weights of the last outer step, is the negative gradient of an
outer optimizer, SGD with Nesterov momentum. The states of inner optimizers stay where they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...comm.mesh import Mesh
from ..optimizer.precision import local_of
from .link import Compressor, IslandError, IslandLink, PendingGather
from .settings import IslandsConfig

# Steps between exchanges that `auto` begins with, and the most that it takes.
FIRST, MOST = 10, 500


@dataclass(frozen=True)
class OuterStep:
    """One exchange of an island.

    Attributes:
        step: optimizer steps done when the changes were sent.
        seconds: that the ranks of this island waited for it.
        sent: bytes that this rank has sent.
        steps: optimizer steps since the outer step before.
        agreement: mean cosine of the islands' changes; 1: all changed alike. NaN for gradients.
        every: steps to the next exchange.
    """

    step: int
    steps: int
    seconds: float
    sent: int
    agreement: float
    every: int


class FlatWeights:
    """The parameters that this rank trains, as one vector of float32 on the host.

    Args:
        parameters: as the rank holds them (of FSDP2's, its shard).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.sizes = [local_of(parameter).numel() for parameter in parameters]

    def read(self) -> Tensor:
        """The values."""
        return self._joined(parameter.detach() for parameter in self._parameters)

    def gradients(self) -> Tensor:
        """Their gradients; zeros where there is none."""
        return self._joined(torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters)

    def _joined(self, tensors: Iterator[Tensor]) -> Tensor:
        return torch.cat([local_of(tensor).reshape(-1).to("cpu", torch.float32) for tensor in tensors])

    def write(self, values: Tensor) -> None:
        """Set the values."""
        with torch.no_grad():
            for parameter, part in zip(self._parameters, values.split(self.sizes), strict=True):
                local = local_of(parameter.detach())
                local.copy_(part.view_as(local))

    def write_gradients(self, values: Tensor) -> None:
        """Set the gradients."""
        for parameter, part in zip(self._parameters, values.split(self.sizes), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local = local_of(parameter.grad)
            local.copy_(part.view_as(local))

    def parts(self, values: Tensor) -> list[Tensor]:
        """Such a vector as a tensor for every parameter, in the parameter's own form."""
        found: list[Tensor] = []
        for parameter, part in zip(self._parameters, values.split(self.sizes), strict=True):
            own = torch.zeros_like(parameter.detach(), dtype=torch.float32)
            local = local_of(own)
            local.copy_(part.view_as(local))
            found.append(own)
        return found

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `parts`."""
        return self._joined(iter(parts))


class Islands:
    """The outer steps of one rank.

    Args:
        mesh: the ranks of this island.
        parameters: trained by the rank.
        replicated: whether the ranks of `Mesh.gradient_group` hold equal weights.
        timeout: deadline of an exchange, in seconds.

    Attributes:
        link: to the ranks of other islands.
        boundary: optimizer steps at the last outer step: all islands had equal weights then.
        every: steps from one exchange to the next.
    """

    def __init__(
        self,
        config: IslandsConfig,
        mesh: Mesh,
        parameters: Sequence[nn.Parameter],
        replicated: bool,
        timeout: float,
    ) -> None:
        self.config, self._mesh = config, mesh
        self.weights = FlatWeights(parameters)
        group = mesh.gradient_group if replicated else None
        self._group = group
        self._share = _share_of(sum(self.weights.sizes), group)
        self.every = FIRST if config.every == "auto" else config.every
        self.boundary, self._compressor = 0, Compressor(config.compress)
        self.link = IslandLink(config, mesh.rank, timeout)
        # The weights of the last outer step, and the outer optimizer.
        self._outer = nn.Parameter(self.weights.read(), requires_grad=False)
        self._optimizer = torch.optim.SGD(
            [self._outer], config.learning_rate, momentum=config.momentum, nesterov=config.momentum > 0
        )
        # Changes that are under way: the gather, the weights they were sent with, and the step; and late gradients.
        self._under_way: tuple[PendingGather, Tensor, int] | None = None
        self._gradients: PendingGather | None = None
        self._seconds, self._began, self._counted = 0.0, time.perf_counter(), 0

    # --- before the first step -----------------------------------------------------------------------------------

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Refuse islands that do not fit together, on all islands alike.

        Args:
            facts: what must be equal, by name, of what JSON holds.

        Raises:
            IslandError: names the first difference.
        """
        every = self.link.gather_objects(dict(facts))
        for name in facts:
            values = [one.get(name) for one in every]
            other = next((index for index, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise IslandError(
                    f"islands 0 and {other} differ in {name}: {values[0]!r} and {values[other]!r}; give all "
                    "islands the same settings, samples and weights, beside islands.index"
                )

    # --- in a step -----------------------------------------------------------------------------------------------

    def is_synchronous(self, step: int) -> bool:
        """True if gradients of step ``step``, from 0, are averaged over all islands in that step."""
        return step < self.config.start

    def is_equal_after(self, step: int) -> bool:
        """True if all islands apply the same gradients in step ``step``, so that their weights stay equal."""
        return self.is_synchronous(step) or self.config.exchange == "late_gradients"

    def average_gradients(self, step: int) -> bool:
        """After the backward of step ``step``, from 0: average gradients where they are to be. Collective.

        Returns:
            Whether there are gradients to be applied: in the first step with late gradients there are none.
        """
        if self.is_synchronous(step):
            self.weights.write_gradients(self._mean(self._send_gradients()))
            return True
        if self.config.exchange != "late_gradients":
            return True
        before, self._gradients = self._gradients, self._send_gradients()
        if before is None:
            return False
        self.weights.write_gradients(self._mean(before))
        return True

    def after_step(self, steps: int, last: bool) -> OuterStep | None:
        """After an optimizer step: send changes, or apply those that have come. Collective.

        Args:
            steps: optimizer steps done.
            last: whether the run ends here, which applies everything.

        Returns:
            The outer step that was applied, if any.
        """
        if self.is_equal_after(steps - 1):
            self.boundary = steps
            if self.config.start == steps:
                self._rebase()
            return None
        self._counted += 1
        done = None
        if self._under_way is not None and (last or steps - self._under_way[2] >= self.config.delay):
            done = self._apply(steps)
        if self._under_way is None and steps > self.boundary and (last or steps - self.boundary >= self.every):
            weights = self.weights.read()
            self._seconds = time.perf_counter()
            self._under_way = self._send(self._outer.detach() - weights), weights, steps
            if last or not self.config.delay:
                done = self._apply(steps)
        return done

    @property
    def settled(self) -> bool:
        """True if no changes are under way, which is when a checkpoint can be written."""
        return self._under_way is None

    def _rebase(self) -> None:
        """Begin to count changes from the present weights."""
        with torch.no_grad():
            self._outer.copy_(self.weights.read())
        self._began, self._counted = time.perf_counter(), 0

    def _send(self, changes: Tensor) -> PendingGather:
        return self.link.gather(self._compressor.encode(changes[self._share].contiguous()))

    def _send_gradients(self) -> PendingGather:
        # Not compressed: what rounding takes from gradients is no part of a change of weights.
        return self.link.gather(self.weights.gradients()[self._share].contiguous().view(torch.uint8))

    def _mean(self, gradients: PendingGather) -> Tensor:
        """The mean over the islands, in their order, so that all have the same bits."""
        return self._whole(torch.stack([one.view(torch.float32) for one in gradients.wait()]).mean(0))

    def _decoded(self, pending: PendingGather) -> Tensor:
        count = self._share.stop - self._share.start
        return torch.stack([self._compressor.decode(one, count) for one in pending.wait()])

    def _whole(self, mine: Tensor) -> Tensor:
        """A vector of which the equal ranks of an island have a share each."""
        if self._group is None:
            return mine
        size, total = dist.get_world_size(self._group), sum(self.weights.sizes)
        length = -(-total // size)
        device = self._mesh.device
        padded = torch.nn.functional.pad(mine, (0, length - mine.numel())).to(device)
        whole = torch.empty(length * size, device=device)
        dist.all_gather_into_tensor(whole, padded, group=self._group)
        return whole[:total].cpu()

    def _apply(self, steps: int) -> OuterStep:
        assert self._under_way is not None
        pending, sent, step = self._under_way
        self._under_way = None
        waited = time.perf_counter()
        every = self._decoded(pending)
        self._outer.grad = self._whole(every.mean(0))
        since = self._seconds if not self.config.delay else waited
        self._optimizer.step()
        self._outer.grad = None
        new = self._outer.detach().clone()
        if steps > step:
            # The progress made while the changes were under way.
            new += self.weights.read() - sent
        self.weights.write(new)
        seconds = time.perf_counter() - since
        result = OuterStep(
            step, step - self.boundary, seconds, self.link.sent, _agreement(every), self._next_every(seconds)
        )
        self.boundary = step
        self._began, self._counted = time.perf_counter(), 0
        return result

    def _next_every(self, seconds: float) -> int:
        """Steps to the next exchange; the same on all ranks of all islands."""
        if self.config.every != "auto":
            return self.config.every
        inner = (time.perf_counter() - self._began - seconds) / max(1, self._counted)
        # The slowest exchange and the fastest step of any rank.
        every = [
            one
            for island in self.link.gather_objects(self._mesh.world.all_gather_object((seconds, inner)))
            for one in island
        ]
        slowest, fastest = max(one[0] for one in every), min(one[1] for one in every)
        self.every = min(MOST, max(1, math.ceil(slowest / (self.config.overhead * max(fastest, 1e-9)))))
        return self.every

    # --- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list[Tensor]]:
        """The state that the next outer step depends on, by name, for every parameter. Collective in an island.

        ``weights``: those of the last outer step; ``momentum`` of the outer optimizer; ``lost``: what rounding has
        taken from the changes of this island.
        """
        zeros = torch.zeros_like(self._outer)
        momentum = self._optimizer.state.get(self._outer, {}).get("momentum_buffer")
        found = {"weights": self._outer.detach(), "momentum": zeros if momentum is None else momentum}
        if self.config.compress != "none":
            found["lost"] = zeros if self._compressor.lost is None else self._whole(self._compressor.lost)
        return {name: self.weights.parts(value) for name, value in found.items()}

    def facts(self) -> dict[str, int]:
        """The numbers that the next outer step depends on."""
        return {"boundary": self.boundary, "every": self.every}

    def load(self, state: Mapping[str, Sequence[Tensor]], steps: int, facts: Mapping[str, int]) -> None:
        """Go on from a checkpoint.

        Args:
            state: as `state` returns it; empty: of a run without islands, which begins here.
            steps: optimizer steps done.
            facts: as `facts` returns them.
        """
        self._rebase()
        self.boundary = facts.get("boundary", steps)
        if self.config.every == "auto":
            self.every = facts.get("every", self.every)
        loaded = {name: self.weights.joined(parts) for name, parts in state.items()}
        if "weights" in loaded:
            with torch.no_grad():
                self._outer.copy_(loaded["weights"])
        if self.config.momentum and "momentum" in loaded:
            self._optimizer.state[self._outer]["momentum_buffer"] = loaded["momentum"]
        if "lost" in loaded and self.config.compress != "none":
            self._compressor.lost = loaded["lost"][self._share].clone()

    def close(self) -> None:
        """Leave the other islands."""
        self.link.close()


def _share_of(total: int, group: dist.ProcessGroup | None) -> slice:
    if group is None:
        return slice(0, total)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    length = -(-total // size)
    return slice(min(total, rank * length), min(total, (rank + 1) * length))


def _agreement(changes: Tensor) -> float:
    """The mean cosine of pairs of islands' changes, of shape (islands, values)."""
    lengths = changes.norm(dim=1)
    count, total = len(changes), float(lengths.square().sum())
    if not total or count < 2 or not bool((lengths > 0).all()):
        return float("nan")
    unit = changes / lengths[:, None]
    return float((unit.sum(0).square().sum() - count) / (count * (count - 1)))

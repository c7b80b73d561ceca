"""The link between islands: ranks with one place in their islands exchange bytes over gloo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from ...comm.gloo import gloo_backend
from ...errors import InputError, reason_of
from .settings import IslandsConfig

# Values with one scale.
BLOCK = 1024


class IslandError(InputError):
    """The islands do not fit together, or one of them is gone."""


class IslandLink:
    """The ranks with one place in their islands, over gloo.

    Args:
        rank: this rank in its island.
        timeout: deadline of every exchange, in seconds, and of the first meeting.

    Attributes:
        sent: bytes that this rank has sent.

    Raises:
        IslandError: the islands do not meet in time.
    """

    def __init__(self, config: IslandsConfig, rank: int, timeout: float) -> None:
        self.size, self.index, self.sent = config.count, config.index, 0
        self._timeout, self._meet = timeout, config.meet
        host, port = config.address
        leads = config.index == 0 and rank == 0
        deadline = timedelta(seconds=timeout)
        try:
            # Others connect as they come.
            self._store = cast(Any, dist).TCPStore(host, port, None, leads, deadline, wait_for_workers=False)
            store = PrefixStore(f"rank-{rank}", self._store)
            self._group = gloo_backend(store, config.index, config.count, deadline)
        except (RuntimeError, ValueError) as error:
            raise IslandError(
                f"island {config.index} has not met the other {config.count - 1} at {config.meet} within {timeout:g} s "
                f"({reason_of(error)[:200]}); start all islands with the same islands.meet, and indices 0 to "
                f"{config.count - 1}"
            ) from error

    def gather(self, mine: Tensor) -> PendingGather:
        """Begin to send a tensor of bytes to the other islands; the same shape on all."""
        every = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = self._group.allgather([every], [mine])
        except RuntimeError as error:
            raise self.lost(error) from error
        self.sent += mine.numel() * (self.size - 1)
        return PendingGather(self, work, every)

    def gather_objects(self, mine: Any) -> list[Any]:
        """The value of every island, of what JSON holds."""
        data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([data.numel()]).view(torch.uint8)).wait()
        counts = [int(size.view(torch.int64)) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: data.numel()] = data
        every = self.gather(padded).wait()
        return [json.loads(bytes(one[:count].tolist())) for one, count in zip(every, counts, strict=True)]

    def lost(self, error: Exception) -> IslandError:
        """The error of an exchange that failed."""
        return IslandError(
            f"another island than {self.index} has ended, or did not answer within {self._timeout:g} s "
            f"({reason_of(error)[:200]}); start all islands again with --resume"
        )

    def close(self) -> None:
        """Leave the meeting."""
        del self._group, self._store


@dataclass
class PendingGather:
    """Tensors of all islands that are under way."""

    link: IslandLink
    work: Any
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        """The tensor of every island.

        Raises:
            IslandError: an island is gone.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.link.lost(error) from error
        return self.tensors


class Compressor:
    """The form in which float32 values travel, with error feedback.

    Args:
        kind: as `IslandsConfig.compress`.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        # The loss by rounding in the values that were sent so far.
        self.lost: Tensor | None = None

    def encode(self, values: Tensor) -> Tensor:
        """A 1-D float32 tensor as bytes."""
        if self._kind == "none":
            return values.view(torch.uint8)
        if self.lost is not None:
            values = values + self.lost
        if self._kind == "bf16":
            coded = values.bfloat16().view(torch.uint8)
        else:
            padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
            scales = padded.abs().amax(1, keepdim=True) / 127
            codes = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
            coded = torch.cat([scales.view(-1).view(torch.uint8), codes.view(-1).view(torch.uint8)])
        self.lost = values - self.decode(coded, values.numel())
        return coded

    def decode(self, coded: Tensor, count: int) -> Tensor:
        """The ``count`` values of `encode`'s bytes."""
        if self._kind == "none":
            return coded.view(torch.float32)
        if self._kind == "bf16":
            return coded.view(torch.bfloat16).float()
        blocks = -(-count // BLOCK)
        scales, codes = coded[: 4 * blocks].view(torch.float32), coded[4 * blocks :].view(torch.int8)
        return (codes.view(blocks, BLOCK).float() * scales[:, None]).view(-1)[:count]

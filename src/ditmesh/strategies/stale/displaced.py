"""Displaced patch parallelism: own keys and values fresh, the others' of the step before.

DistriFusion, Li et al. 2024, arXiv:2402.19481, on a Diffusion Transformer. From one denoising step to the next the
picture changes little, and so do keys and values. A rank therefore attends to its own tokens as they are and to
those of other ranks as they were one step earlier; what it has just computed travels while the step goes on and is
waited for where it is needed: at the same layer of the next step. A synchronous step waits at once and is exact.

With ``predict="linear"``, the default, what stands for another rank's keys of the step in progress is those of the
step before, moved on by half of what they have changed since the one before that (TaylorSeer, Liu et al. 2025,
arXiv:2503.06923, extrapolates the features of a cache).

Keys and values of all ranks lie in one buffer per branch, block and attention call, in the order one device has
them. A rank writes its own tokens into their place, and the others' into theirs when they have come.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import ClassVar

import torch
from torch import Tensor

from ...attention import masks
from ...attention.mixer import AttentionCall
from ...comm import Codec, Link, Transfer, codec
from ...comm.compression import Int4, joined, one_after_other
from ...comm.mesh import Mesh
from ...config import ParallelConfig
from ...core.partition import Partition
from ...core.request import RequestValue
from ...staleness.control import WarmupControl
from ...staleness.prediction import move_on, share_in
from ..base import ParallelModel, Request
from ..sequence import SequenceParallel
from ..tokens import TokenStrategy
from .warmup import numbered

# Branch, block, attention call of the block.
Key = tuple[int, str, int]


class StaleSequence(SequenceParallel):
    """The base of stale sequence strategies, on the ring axis; ``blocks``: numbers in the drift monitor, by path."""

    takes_block_masks = False

    def __init__(self, config: ParallelConfig, mesh: Mesh, control: WarmupControl, blocks: dict[str, int]) -> None:
        super().__init__(config, mesh)
        self.control = control
        self._blocks = blocks

    def end_request(self) -> None:
        """End the request: wait for pending messages, and clear the buffers."""

    def attend_distributed(self, attention: AttentionCall) -> Tensor:
        if attention.keys.all_replicated:
            return super().attend_distributed(attention)
        path, control = self._site.path, self.control
        now = control.clock.call
        key = (now.branch, path, self._call.attention_calls - 1)
        with torch.no_grad():
            sample = (self.link.rank, *key)
            drifting = (attention.k_bhsd, attention.v_bhsd)
            share = self.moved_on(now.step)
            control.monitor.observe(self._blocks[path], sample, now.step, drifting, dim=2, share=share)
        return self.attend_stale(key, attention)

    def attend_stale(self, key: Key, attention: AttentionCall) -> Tensor:
        """`attend_distributed` for keys of which some lie on other ranks."""
        raise NotImplementedError

    def moved_on(self, step: int) -> float | None:
        """By which share of their latest change keys of the step before are moved on in a stale step; None: never."""
        return None

    def own_tokens(self, attention: AttentionCall) -> Tensor:
        """Attention of this rank's queries over its own keys alone."""
        mask = attention.mask
        if mask is not None:
            mask = masks.of_own_keys(mask, attention.queries, attention.keys, self.link.rank)
        return self.kernel(attention.q_bhsd, attention.k_bhsd, attention.v_bhsd, mask, attention.scale)


class DisplacedParallel(StaleSequence):
    """Handler of one transformer: stale attention between synchronous steps.

    In the very first step of a request there is no step before. If the policy wants it stale all the same
    (``warmup="fixed(0)"``), a rank attends to its own tokens only, once. Later on, a call that finds no keys of the
    step before (the first of another transformer, a branch that was left out for a step, a block that a cache
    skipped) is synchronous, on all ranks alike.
    """

    travels = False

    def __init__(self, config: ParallelConfig, mesh: Mesh, control: WarmupControl, blocks: dict[str, int]) -> None:
        super().__init__(config, mesh, control, blocks)
        self._codec, self._predicts = codec(config.compress), config.predicts_keys
        self._ring, self._buffers = mesh.ring, RequestValue(_Buffers)

    @property
    def buffers(self) -> _Buffers:
        """The buffers of the request, by branch, block and attention call."""
        return self._buffers.value

    def end_request(self) -> None:
        self._buffers.renew().finish()

    def moved_on(self, step: int) -> float | None:
        if not self._predicts:
            return None
        return share_in(step, self.control.goes_on(step))

    def attend_stale(self, key: Key, attention: AttentionCall) -> Tensor:
        k_bhsd, keys, now = attention.k_bhsd, attention.keys, self.control.clock.call
        step, rows = now.step, now.rows
        buffers = self.buffers
        buffer = buffers.get(key)
        if buffer is not None:
            buffer.arrive()
        if buffer is None or not buffer.fits(k_bhsd, keys, rows):
            buffer = buffers[key] = _Buffer(k_bhsd, keys, rows, self._ring, self._codec)
        has_previous = buffer.step is not None and buffer.step >= step - 1
        synchronous = self.control.decision.synchronous
        if self._predicts and has_previous:
            buffer.move_on(step, 0.0 if synchronous else self.moved_on(step) or 0.0)
        buffer.put(k_bhsd, attention.v_bhsd)
        if not synchronous and step == 0 and not has_previous:
            out = self.own_tokens(attention)
            buffer.post(step)
            return out
        if synchronous or not has_previous:
            if not synchronous:
                self.control.log.steps[-1].filled += 1
            buffer.post(step, whole=True)
            buffer.arrive()
        else:
            buffer.post(step)
        mask = self._whole_mask(buffer, attention)
        return self.kernel(attention.q_bhsd, buffer.k_bhsd, buffer.v_bhsd, mask, attention.scale)

    def _whole_mask(self, buffer: _Buffer, attention: AttentionCall) -> Tensor | None:
        """The mask of this rank's queries over all keys.

        Other ranks' part of it comes from them, which means waiting. It is made of the call's arguments: while those
        stay what they were in the step before, which every rank sees alike, so does the mask.
        """
        if attention.mask is None:
            return None
        if buffer.mask is not None and self.control.clock.call.steady:
            return buffer.mask
        here = range(self.link.rank, self.link.rank + 1)
        queries, keys, clock = attention.queries, attention.keys, self.control.clock
        whole = masks.everywhere(attention.mask, queries, keys, self.link, here, lambda: clock.call.steady)
        # One with a row for every query is large, and not kept.
        buffer.mask = whole if whole.shape[-2] == 1 else None
        return whole


class NaiveParallel(StaleSequence):
    """Handler of one transformer: exact in synchronous steps, own tokens only in all others.

    The lossy baseline, which shows what the exchange of stale keys is worth.
    """

    def attend_stale(self, key: Key, attention: AttentionCall) -> Tensor:
        if self.control.decision.synchronous:
            return SequenceParallel.attend_distributed(self, attention)
        return self.own_tokens(attention)


class _Buffer:
    """Keys and values of all ranks for one attention call: memory (2, B, H, S, D), tokens in one device's order.

    Attributes:
        whole: a view of the memory, token by token: (S, 2, B, H, D); ``k_bhsd``, ``v_bhsd``: (B, H, S, D).
        step: the step that the other ranks' part is of; None while there is nothing.
        mask: the mask over all keys, as it was gathered last.
    """

    def __init__(
        self, k_bhsd: Tensor, keys: Partition, rows: tuple[int, int] | None, ring: Link, packer: Codec | None
    ) -> None:
        batch, heads, _, dim = k_bhsd.shape
        # A head's tokens lie together: attention reads them faster than if tokens came with all their heads.
        memory = k_bhsd.new_empty((2, batch, heads, keys.total, dim))
        self.k_bhsd, self.v_bhsd = memory[0], memory[1]
        self.whole = memory.permute(3, 0, 1, 2, 4)
        self.step: int | None = None
        self.mask: Tensor | None = None
        self._keys, self._rows = keys, rows
        self._ring = ring
        self._arriving: Transfer | None = None
        self._codec = packer
        # The codec of what is on its way.
        self._packer: Codec | None = None
        # Where only what is new is sent: this rank's tokens as all others have them.
        self._shown: Tensor | None = None
        # Where prediction is asked for: the keys of the step before the latest that are compared with, and that step.
        self._before: list[Tensor] = []
        self._before_step: int | None = None
        # For every rank's messages the memory that they come into, and the codec of which they are: the same in every
        # step, as fresh memory has to be fetched page by page.
        self._incoming: list[list[Tensor]] = []
        self._incoming_of: Codec | None = None
        # Of every rank, its tokens' places; streams that all ranks hold whole are not sent.
        places = [[self.whole.narrow(0, *place) for place in keys.places(rank)] for rank in range(ring.size)]
        self._own = places[ring.rank]
        self._slots = [[slot for block, slot in enumerate(of) if block not in keys.replicated] for of in places]

    def fits(self, k_bhsd: Tensor, keys: Partition, rows: tuple[int, int] | None) -> bool:
        """True if the call has the same rows, streams and shapes as the one the buffer was made for."""
        batch, heads, _, dim = k_bhsd.shape
        return (
            (keys, rows) == (self._keys, self._rows)
            and self.whole.shape[2:] == (batch, heads, dim)
            and (self.whole.dtype, self.whole.device) == (k_bhsd.dtype, k_bhsd.device)
        )

    def put(self, k_bhsd: Tensor, v_bhsd: Tensor) -> None:
        """Write this rank's fresh keys and values (B, H, s, D) into their places."""
        with torch.no_grad():
            start = 0
            for slot in self._own:
                part = slice(start, start + slot.shape[0])
                slot[:, 0].copy_(k_bhsd[:, :, part].permute(2, 0, 1, 3))
                slot[:, 1].copy_(v_bhsd[:, :, part].permute(2, 0, 1, 3))
                start += slot.shape[0]

    def move_on(self, step: int, share: float) -> None:
        """Move what is kept of the latest step on to ``step``, the one in progress, by a share, or only remember it.

        That is what others have sent, and this rank's tokens as they have them.
        """
        latest = self.step
        if latest is None or latest >= step:
            # A second call of one step goes on from what the first one has left.
            return
        tensors = [slot for rank, slots in enumerate(self._slots) if rank != self._ring.rank for slot in slots]
        if self._shown is not None:
            tensors.append(self._shown)
        if len(self._before) != len(tensors):
            with torch.no_grad():
                self._before = [one_after_other([now]) for now in tensors]
        else:
            move_on(tensors, self._before, share if self._before_step == latest - 1 else 0.0)
        self._before_step = latest

    def post(self, step: int, whole: bool = False) -> None:
        """Begin to send this rank's tokens to all others and to receive theirs; ``whole``: not through the codec."""
        packer = None if whole else self._codec
        self.step, self._packer = step, packer
        tensors = self._slots[self._ring.rank]
        if packer is not None:
            # One message per peer: the streams one after the other.
            with torch.no_grad():
                tensors = [self._packed(packer, tensors)]
        elif isinstance(self._codec, Int4):
            with torch.no_grad():
                self._shown = one_after_other(tensors)
        if not self._incoming or self._incoming_of is not packer:
            others = [[] if rank == self._ring.rank else slots for rank, slots in enumerate(self._slots)]
            self._incoming_of = packer
            if packer is None:
                self._incoming = [[slot.new_empty(slot.shape) for slot in slots] for slots in others]
            else:
                self._incoming = [[packer.empty(joined(s), s[0].device)] if s else [] for s in others]
        self._arriving = self._ring.all_gather_async(tensors, self._incoming)

    def _packed(self, packer: Codec, tokens: list[Tensor]) -> Tensor:
        """The message of this rank's tokens."""
        if not isinstance(packer, Int4):
            return packer.encode(one_after_other(tokens) if len(tokens) > 1 else tokens[0])
        if self._shown is None:
            # Nothing was ever sent: others have zeros.
            self._shown = one_after_other(tokens).zero_()
            for rank, slots in enumerate(self._slots):
                for slot in slots if rank != self._ring.rank else ():
                    slot.zero_()
        # The next difference includes what rounding has left out.
        return packer.encode_new(tokens, self._shown)

    def arrive(self) -> None:
        """Wait for the posted messages, if pending."""
        arriving, self._arriving = self._arriving, None
        packer, self._packer = self._packer, None
        if arriving is None:
            return
        received = iter(arriving.wait())
        for rank, slots in enumerate(self._slots):
            if rank == self._ring.rank:
                continue
            if packer is not None:
                packer.put(next(received), slots)
                continue
            for slot in slots:
                slot.copy_(next(received))

    def finish(self) -> None:
        """End the transfer of messages that will not be read."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.wait()


class _Buffers(dict[Key, _Buffer]):
    """The buffers of one request."""

    def finish(self) -> None:
        """End the transfer of all messages."""
        for buffer in self.values():
            buffer.finish()


class StaleStrategy(TokenStrategy):
    """The base of stale token strategies."""

    promise = "none"
    no_gradient = "keys of an earlier step, or none, stand for those of other ranks, and have no gradient path"
    key_of_axis = "ring"
    # The handler's class.
    kind: ClassVar[type[StaleSequence]]

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.exchange == cls.name

    def handler(self, model: ParallelModel) -> SequenceParallel:
        control = self.context.get(WarmupControl)
        return self.kind(self.context.config, self.context.mesh, control, numbered(model, control.monitor))

    def begin_request(self, request: Request) -> None:
        for handler in self.handlers():
            handler.end_request()

    def end_request(self, failed: bool) -> None:
        super().end_request(failed)
        for handler in self.handlers():
            with suppress(RuntimeError) if failed else nullcontext():
                handler.end_request()


class Displaced(StaleStrategy):
    """Keys and values of the step before."""

    name = key = "displaced"
    kind = DisplacedParallel


class Naive(StaleStrategy):
    """No exchange after the warm-up."""

    name = key = "naive"
    kind = NaiveParallel

"""Small all-gathers of which several travel as one message to every other rank.

A message has a cost of its own beside its bytes: calls and tags of every send and receive, and between hosts gloo's
thread, which takes the rank's core for milliseconds where the other rank has waited for the message. Where a message
is needed long after it was posted, it can wait for the next ones and travel with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import ceil

import torch
from torch import Tensor

from .link import Link
from .transports import Transfer, request_over

# Bytes that a bundle has at most, of the rank that sends the most.
MOST_BYTES = 1 << 20
# A round is sent in so many bundles at least: what is posted last has the time of the others to arrive.
BUNDLES = 3
# What memory is for: dtype, device, and elements of every rank.
_Form = tuple[torch.dtype, torch.device, tuple[int, ...]]
# For the message that is put together here, and for that of every rank.
_Memory = tuple[Tensor | None, list[list[Tensor]]]


def messages_of_bundle(size: float, posted: int) -> int:
    """How many messages of a round travel together, where all have one size.

    Args:
        size: bytes of a message, more than 0.
        posted: messages of the round.
    """
    return max(1, min(_share_of_round(posted), int(MOST_BYTES // size)))


def _share_of_round(posted: int) -> int:
    """The most messages of a bundle, whatever their sizes are, in a round of so many."""
    return ceil(posted / BUNDLES)


class Bundles:
    """All-gathers over one link that are waited for long after they were posted, in rounds that are alike.

    All ranks of the link post, wait, flush and end rounds in the same order, and know the sizes of all messages. A
    bundle is sent when a message comes that it has no place for, when one of its messages is waited for, and by
    `flush`: the last one of a round is not in the way of what ranks wait for before they end the round. In the first
    round, and where the link does not bundle (`Link.bundles`), every message is sent at once.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        # Memory of bundles that have been taken, as fresh memory has to be fetched page by page.
        self.free: dict[_Form, list[_Memory]] = {}
        # The bundle that is not sent yet.
        self._open: _Bundle | None = None
        # Messages of the round in progress, and of the latest one that had any.
        self._posted = self._before = 0

    def post(self, message: Tensor, sizes: Sequence[int]) -> BundledTransfer:
        """Send a message to all other ranks and receive theirs, by itself or with the next ones; returns at once.

        Args:
            message: flat, contiguous and with elements; it must not be written to any more.
            sizes: elements of every rank's message, of the same dtype.

        Raises:
            PeerError: the request has failed here, or another rank has gone.
        """
        self._posted += 1
        size = max(sizes) * message.element_size()
        if not self.link.bundles or messages_of_bundle(size, self._before) == 1:
            alone = _Bundle(self, message)
            part = alone.add(message, sizes)
            alone.send()
            return part
        full = _share_of_round(self._before)
        if self._open is not None and (self._open.count >= full or not self._open.takes(message, sizes)):
            self.flush()
        if self._open is None:
            self._open = _Bundle(self, message)
        return self._open.add(message, sizes)

    def flush(self) -> None:
        """Send the messages that have not been sent.

        Raises:
            PeerError: as `post`.
        """
        bundle, self._open = self._open, None
        if bundle is not None:
            bundle.send()

    def end_round(self) -> None:
        """`flush`; the next round is expected to have as many messages as the one that ends, if that has any."""
        self.flush()
        self._posted, self._before = 0, self._posted or self._before

    def drop(self) -> None:
        """Forget the messages that have not been sent: waiting for one of them raises `PeerError`."""
        bundle, self._open = self._open, None
        if bundle is not None:
            bundle.cancel()


class BundledTransfer:
    """The transfer of one message of a bundle."""

    def __init__(self, bundle: _Bundle, number: int) -> None:
        self._bundle, self._number = bundle, number

    def wait(self, timeout: timedelta | None = None) -> list[Tensor]:
        """Block until the message of every other rank is here, as `Transfer.wait`; call it once.

        Returns:
            The messages in rank order, flat; to be read, and only until more messages are posted.
        """
        return self._bundle.take(self._number, timeout)

    def finish(self) -> None:
        """Wait as `wait` for a message that will not be read; one that was not sent is not waited for."""
        if self._bundle.sent:
            self.wait()


class _Bundle:
    """Messages that travel together, the first of which is like ``first``."""

    def __init__(self, owner: Bundles, first: Tensor) -> None:
        self._owner, self._like = owner, first[:0]
        self._messages: list[Tensor] = []
        # Elements of every rank in the messages before each; then those in all.
        self._starts: list[tuple[int, ...]] = [(0,) * owner.link.size]
        # Messages that were not taken yet.
        self._left = 0
        self._memory: _Memory = None, []
        self._transfer: Transfer | None = None
        self._received: list[Tensor] | None = None
        self._cancelled = False
        owner.link.hold(self)

    @property
    def count(self) -> int:
        """Number of messages."""
        return len(self._starts) - 1

    @property
    def sent(self) -> bool:
        """True if the messages are on their way, or were."""
        return self._transfer is not None

    def takes(self, message: Tensor, sizes: Sequence[int]) -> bool:
        """True if there is room for one more message."""
        alike = (message.dtype, message.device) == (self._like.dtype, self._like.device)
        return alike and max(self._after(sizes)) * message.element_size() <= MOST_BYTES

    def add(self, message: Tensor, sizes: Sequence[int]) -> BundledTransfer:
        """Put one more message into the bundle."""
        self._messages.append(message)
        self._starts.append(self._after(sizes))
        self._left += 1
        return BundledTransfer(self, self.count - 1)

    def _after(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self._starts[-1], sizes, strict=True))

    def send(self) -> None:
        """Send this rank's messages as one, and receive those of the others; returns at once."""
        self._check()
        link, like, totals = self._owner.link, self._like, self._starts[-1]
        if kept := self._owner.free.get(self._form):
            own, incoming = kept.pop()
        else:
            own = None
            incoming = [[] if rank == link.rank else [like.new_empty(size)] for rank, size in enumerate(totals)]
        outgoing = self._messages[0]
        if self.count > 1:
            own = like.new_empty(totals[link.rank]) if own is None else own
            outgoing = torch.cat(self._messages, out=own)
        self._memory = own, incoming
        self._messages.clear()
        try:
            self._transfer = link.all_gather_async([outgoing], incoming)
        except BaseException:
            self.cancel()
            raise

    @property
    def _form(self) -> _Form:
        return self._like.dtype, self._like.device, self._starts[-1]

    def take(self, number: int, timeout: timedelta | None) -> list[Tensor]:
        """Wait for the bundle, and return the other ranks' parts of one message."""
        if self._transfer is None and not self._cancelled:
            self._owner.flush()
        self._check()
        if self._received is None:
            assert self._transfer is not None
            try:
                self._received = self._transfer.wait(timeout)
            except BaseException:
                # A second wait would not know what has not come.
                self.cancel()
                raise
        starts, ends = self._starts[number], self._starts[number + 1]
        others = [rank for rank in range(len(ends)) if rank != self._owner.link.rank]
        parts = [whole[starts[rank] : ends[rank]] for rank, whole in zip(others, self._received, strict=True)]
        self._left -= 1
        if self._left == 0:
            self._received = []
            self._owner.free.setdefault(self._form, []).append(self._memory)
        return parts

    def cancel(self) -> None:
        """Do not send the messages, or drop their transfer, and raise in every later wait for one of them."""
        self._cancelled = True
        self._messages.clear()
        if self._transfer is not None:
            self._transfer.cancel()

    def _check(self) -> None:
        if self._cancelled:
            raise request_over(self._owner.link.name)

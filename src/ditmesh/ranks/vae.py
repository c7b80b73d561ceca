"""An autoencoder of this process, decoding and encoding in bands on all ranks beside it."""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..engine.follow import CallFollower, CallLead, FollowerFailure
from ..engine.targets import device_of
from ..parts.banded import Uncut
from ..strategies.vae.parallel import InBands
from .copies import CopiedModule
from .follow import (
    Followers,
    call_copies,
    change_copies,
    copies,
    drop_copy,
    failure,
    give_copy,
    nothing,
    threads_of,
)


class Whole(str):
    """Why something was not computed in bands."""

    __slots__ = ()


class FollowedVae:
    """An autoencoder with ``decode`` and ``encode``, for calls in bands: each rank has a band of rows.

    The module itself stays as it is: calls of its own are this process's alone.

    Args:
        followers: the other ranks.
        vae: the autoencoder, on this process's device.

    Attributes:
        vae: it.
        closed: whether it can be called.

    Raises:
        InputError: it cannot be copied.
        RankFailed: a rank was lost.
    """

    def __init__(self, followers: Followers, vae: nn.Module) -> None:
        self.followers, self.vae, self.closed = followers, vae, False
        self._key, self._copied = uuid.uuid4().hex, CopiedModule(vae)
        give_copy(followers, self._key, vae)
        kind, timeout = followers.device, followers.timeout
        # All ranks together: which axis they are on does not matter.
        config = ParallelConfig(data=followers.world_size)

        def begin() -> Mesh:
            return Mesh(config, device_of(vae) if kind == "cuda" else "cpu", timeout)

        try:
            self.mesh: Mesh = followers.both(begin, _begin_bands, self._key, config, timeout)[0][1]
        except BaseException:
            with suppress(Exception):
                followers.both(nothing, drop_copy, self._key)
            raise
        followers.models[self._key] = self
        self._drop = weakref.finalize(self, followers.dropped.append, (self._key, self.mesh.close))
        self._drop.atexit = False
        self._lead = CallLead(type(vae).__name__, self.mesh, lambda: None)
        self._banded = InBands(vae, self.mesh.world)

    def call(self, name: str, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The result of ``decode`` or ``encode`` on all ranks, whole; or `Whole`, why it cannot be computed in bands.

        Args:
            name: of the two.
            given: latents or pixels, (batch, channels, [frames,] height, width).
            args, kwargs: further arguments.

        Raises:
            Exception: whatever the call raises, here or on another rank.
            RankFailed: a rank was lost; the ranks have ended.
        """
        if given.dim() not in (4, 5):
            return Whole("what it is given is no picture and no video")
        if given.shape[-2] < self.followers.world_size:
            return Whole(f"{given.shape[-2]} rows are too few for {self.followers.world_size} ranks")
        change_copies(self.followers, self._key, self._copied)
        call = functools.partial(_in_bands, self._banded, name)
        # In inference mode torch does not tell what has been written to.
        with threads_of(self.followers), torch.inference_mode(False), torch.no_grad():
            given = given.clone() if given.is_inference() else given
            try:
                return self._lead.call(self._ask, call, (given, *args), kwargs, ((name, given, *args), kwargs))
            finally:
                if not self.closed:
                    self._copied.note()

    def _ask(self, content: bytes, here: Callable[[], Any]) -> Any:
        return call_copies(self.followers, self.mesh, self._key, content, here)

    def close(self) -> None:
        """Drop the copies."""
        if self.closed:
            return
        self.closed = True
        self._drop.detach()
        self.followers.models.pop(self._key, None)
        with suppress(Exception):
            if self.followers.closed:
                self.mesh.abandon()
            else:
                self.followers.both(self.mesh.close, drop_copy, self._key)


def _in_bands(banded: InBands, name: str, given: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Collective. What cannot be computed in bands says so on all ranks alike, and breaks nothing off."""
    try:
        return banded.call(name, given, *args, **kwargs)
    except Uncut as refusal:
        return Whole(refusal)


# --- on the other ranks ------------------------------------------------------------------------------------------


def _begin_bands(key: str, config: ParallelConfig, timeout: float) -> FollowerFailure | None:
    copy = copies[key]
    try:
        mesh = copy.mesh = Mesh(config, copy.device, timeout)
        copy.own = True
        banded = InBands(copy.model, mesh.world)
        call = functools.partial(_in_bands, banded)
        copy.follower = CallFollower(type(copy.model).__name__, mesh, lambda: None, call)
    except Exception as error:
        return failure(error)
    return None

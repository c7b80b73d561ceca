"""An autoencoder of this process, decoding and encoding in bands on all ranks beside it."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..parts.banded import UncuttableOperation
from ..strategies.vae.parallel import InBands
from .followers import FollowedModule, Followers, copies, drop_copy, reported


class NotBanded(str):
    """The reason why something was not computed in bands."""

    __slots__ = ()


class FollowedVae(FollowedModule):
    """An autoencoder with ``decode`` and ``encode``, for calls in bands: each rank has a band of rows.

    The module itself stays as it is: calls of its own are this process's alone.

    Raises:
        InputError: it cannot be copied.
        RankFailed: a rank was lost.
    """

    def __init__(self, followers: Followers, vae: nn.Module) -> None:
        super().__init__(followers, vae)
        self.vae = vae
        # All ranks together: which axis they are on does not matter.
        self._begin(ParallelConfig(data=followers.world_size), self._begin_here, _begin_bands)

    def _begin_here(self, mesh: Mesh) -> None:
        self._banded = InBands(self.vae, mesh.world)

    def call(self, name: str, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The result of ``decode`` or ``encode`` on all ranks, whole; or `NotBanded`, the reason why not in bands.

        ``given``: latents or pixels, (batch, channels, [frames,] height, width). Raises as `call_on_all`.
        """
        if given.dim() not in (4, 5):
            return NotBanded("what it is given is no image and no video")
        if given.shape[-2] < self.followers.world_size:
            return NotBanded(f"{given.shape[-2]} rows are too few for {self.followers.world_size} ranks")
        call = functools.partial(_in_bands, self._banded, name)
        # In inference mode torch does not tell what has been written to.
        with torch.inference_mode(False), torch.no_grad():
            given = given.clone() if given.is_inference() else given
            return self.call_on_all(call, (given, *args), kwargs, ((name, given, *args), kwargs))

    def engine(self) -> None:
        """None: requests are of transformers."""

    def _end(self) -> None:
        with suppress(Exception):
            if self.followers.closed:
                self.mesh.abandon()
            else:
                self.followers.both(self.mesh.close, drop_copy, self._key)


def _in_bands(banded: InBands, name: str, given: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Collective. What cannot be computed in bands says so on all ranks alike, and breaks nothing off."""
    try:
        return banded.call(name, given, *args, **kwargs)
    except UncuttableOperation as refusal:
        return NotBanded(refusal)


# --- on the other ranks ------------------------------------------------------------------------------------------


@reported
def _begin_bands(key: str, config: ParallelConfig, timeout: float) -> None:
    copy = copies[key]
    mesh = copy.mesh = Mesh(config, copy.device, timeout)
    copy.own, copy.call = True, functools.partial(_in_bands, InBands(copy.module, mesh.world))

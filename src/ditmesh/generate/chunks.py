"""Frames of a video while it is drawn: a pipeline that keeps keys and values makes them chunk by chunk.

It decodes all of them at its end; here the video so far is decoded after each. No frame is decoded twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.patching import Patch
from ..parts.part import whole_of
from .steps import SchedulerStep, StepEvents, in_chunks

# Takes the number of a chunk, that of its first frame, and its frames (B, 3, F, H, W) from -1 to 1.
OnFrames: TypeAlias = Callable[[int, int, Tensor], None]


class ChunkFrames(ExitStack):
    """Tells ``told`` of the frames of every chunk after its last step, until it is left; on all ranks alike.

    The call runs inside of `decoding`; others may run in between. Nothing is told of other pipelines, and of a call
    that goes on with a video (``given``: its arguments).
    """

    def __init__(self, pipe: Any, given: Mapping[str, Any], told: OnFrames | None) -> None:
        super().__init__()
        self._pipe, self._frames, self._chunks = pipe, 0, list[Tensor]()
        # Of each frame of latents what the decoder was given, and has made; what it keeps after the last.
        self._decoded: list[tuple[Tensor, Tensor]] = []
        self._kept: list[Any] = []
        # The frame of latents that is decoded; how many of them were told of.
        self._place = self._shown = 0
        going_on = any(given.get(name) is not None for name in ("video", "video_latents"))
        whole = going_on or not in_chunks(pipe) or pipe.vae.use_tiling or pipe.vae.use_slicing
        self._told = None if whole else told
        if self._told is not None:
            self.callback(StepEvents(pipe.scheduler, self._stepped).undo)

    def decoding(self) -> ExitStack:
        """A context in which what the autoencoder decodes is of this call's video."""
        undo = ExitStack()
        if self._told is not None:
            self._decoder = Patch(self._pipe.vae.decoder, "forward", self._decode)
            undo.callback(self._decoder)
        return undo

    def _stepped(self, step: SchedulerStep) -> None:
        latents, vae = step.latents(), self._pipe.vae
        if latents is None or self._told is None or step.index != len(step.scheduler.timesteps) - 1:
            return
        self._chunks.append(latents.to(self._pipe.transformer.dtype))
        latents = torch.cat(self._chunks, 1).transpose(1, 2).to(vae.dtype)
        # In the pipeline's own order of operations, so that no bit differs.
        mean, deviation = (torch.tensor(vae.config[f"latents_{name}"]).to(latents) for name in ("mean", "std"))
        latents = latents / (1.0 / deviation.view(1, -1, 1, 1, 1)) + mean.view(1, -1, 1, 1, 1)
        first, video = self._frames, vae.decode(latents, return_dict=False)[0]
        self._frames, self._shown = video.shape[2], len(self._decoded)
        self._told(len(self._chunks) - 1, first, video[:, :, first:])

    def _decode(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, first_chunk: bool = False) -> Tensor:
        """The decoder's forward, of a frame of latents: of one that was decoded at its place, what came of it."""
        self._place = place = 0 if first_chunk else self._place + 1
        decoded, original = self._decoded, self._decoder.original
        if place < len(decoded):
            before, frames = decoded[place]
            # In bands all ranks have to find the same.
            if type(x) is type(before) and torch.equal(whole_of(x), whole_of(before)):
                if place == len(decoded) - 1:
                    feat_cache[:] = self._kept
                return frames
            if place < self._shown:
                warnings.warn("frames that were shown are not those of the video that is decoded now", stacklevel=2)
            del decoded[place:]
            for number, (before, _) in enumerate(decoded):
                original(before, feat_cache, [0], first_chunk=number == 0)
        frames = original(x, feat_cache, feat_idx, first_chunk=first_chunk)
        decoded.append((x, frames))
        self._kept = [*feat_cache]
        return frames

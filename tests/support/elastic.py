"""What the tests of elastic jobs run on every rank: drawing that counts, and that loses ranks on purpose."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import ditmesh
from ditmesh.generate.job import Kept, PictureJob
from ditmesh.generate.journal import Journal
from ditmesh.generate.run import generate
from support.reproducible import digest, latents, made


def rank_and_size() -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def draw_and_lose(
    job: PictureJob, kept: Kept | None = None, *, report: Any = None, log: str, plan: dict[int, Any]
) -> float:
    """`generate`, with a note of every forward and every decoded latent, and an end for some ranks.

    Args:
        job, kept, report: of `generate`.
        log: folder; ``forwards-W-R`` has a byte for every forward of rank R of W, ``latents-W-R`` the digests.
        plan: by number of ranks: the rank that is lost, before which of its forwards (from 1), and how.
    """
    rank, size = rank_and_size()
    victim, last, how = plan.get(size, (None, 0, ""))
    with counting(Path(log), size, rank) as count:
        if rank == victim:
            count.append(lambda number: number == last and lose(how))
        return generate(job, kept, report=report)


def lose(how: str) -> None:
    if how == "raise":
        raise ValueError("the job itself is wrong")
    if how == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    if how == "leave":
        os._exit(0)
    os.kill(os.getpid(), signal.Signals[how])


@contextlib.contextmanager
def counting(log: Path, size: int, rank: int) -> Iterator[list[Any]]:
    """Note forwards and latents; what is put into the list is called with the number of each forward."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel

    forward, decode = SD3Transformer2DModel.forward, AutoencoderKL.decode
    before: list[Any] = []

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with (log / f"forwards-{size}-{rank}").open("a") as file:
            file.write(".")
        for function in before:
            function((log / f"forwards-{size}-{rank}").stat().st_size)
        return forward(*args, **kwargs)

    @functools.wraps(decode)
    def noted(self: Any, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with (log / f"latents-{size}-{rank}").open("a") as file:
            file.write(digest(z) + "\n")
        return decode(self, z, *args, **kwargs)

    with (
        mock.patch.object(SD3Transformer2DModel, "forward", counted),
        mock.patch.object(AutoencoderKL, "decode", noted),
    ):
        yield before


def with_journal(family: str, config: dict[str, Any], folder: str, request: int = 0) -> dict[str, Any]:
    """One call of a tiny pipeline under a journal: its bits, and how many calls were answered and computed."""
    import torch.distributed as dist

    pipe, call = made(family, torch.float32)
    own = vars(pipe.transformer).get("forward")
    with ditmesh.parallelized(pipe, config):
        journal = Journal({"transformer": pipe.transformer}, folder, dist.get_rank())
        journal.begin(request)
        bits = digest(latents(pipe, call()))
        journal.close()
    restored = vars(pipe.transformer).get("forward") is own
    return {"bits": bits, "answered": journal.answered, "computed": journal.computed, "restored": restored}

"""A rank that something happens to: ``python -m support.host_drills WHAT TIMEOUT``, with torchrun's variables.

It prints lines: ``joined``, ``step N``, and last ``done`` or the error it ended with, in one line.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest import mock

STEPS = 100


def steps(rank: int) -> None:
    """A job: exchanges between all ranks, for some seconds."""
    import torch

    import ditmesh

    world = torch.distributed.get_world_size()
    mesh = ditmesh.Mesh(ditmesh.ParallelConfig(ring=world), timeout=float(sys.argv[2]))
    for step in range(STEPS):
        with mesh.request(f"step {step}"):
            mesh.ring.all_gather(torch.full((4,), float(rank)), [4] * world, 0)
        if step % 20 == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.05)


def main() -> None:
    import os

    from ditmesh.errors import DitmeshError
    from ditmesh.launch import meeting
    from ditmesh.launch.torchrun import TorchrunRanks

    what, timeout = sys.argv[1], float(sys.argv[2])
    rank = int(os.environ["RANK"])
    patches: list[Any] = []
    if what.startswith("other-") and rank == 1:
        library = what.removeprefix("other-")
        versions = {**meeting.library_versions(), library: "9.9.9"}
        patches.append(mock.patch.object(meeting, "library_versions", return_value=versions))
    for patch in patches:
        patch.start()
    began = time.monotonic()
    try:
        with TorchrunRanks(int(os.environ["WORLD_SIZE"]), "cpu", 1, timeout) as ranks:
            print("joined", flush=True)
            ranks.run(steps, rank)
        print("done", flush=True)
    except DitmeshError as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}", flush=True)
        # Nothing is torn down that others may hold on to.
        os._exit(1)


if __name__ == "__main__":
    main()

"""Whole jobs of images on CPUs and on fake CUDA devices."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from ditmesh.comm import backends, grid
from ditmesh.engine import engine_of, restore
from ditmesh.generate.files import adapter, input_picture
from ditmesh.generate.job import Generated, PictureJob
from ditmesh.generate.model_info import find_model
from ditmesh.generate.receipt import Receipt
from ditmesh.generate.run import generate
from ditmesh.generate.runner import PipelineRunner
from rules.fake_cuda import KIND, FakeDevice, fake_device, unavailable


@contextmanager
def gpu_of_rank() -> Iterator[FakeDevice]:
    """This rank computes on a fake GPU, whatever asks where it does."""
    assert unavailable() is None, unavailable()
    where = torch.device(KIND, 0)
    with fake_device(found=True) as device, ExitStack() as stack:
        for module in (backends, grid):
            stack.enter_context(mock.patch.object(module, "device_of_rank", return_value=where))
        yield device


@dataclass
class Drawn:
    """What a job has made.

    Attributes:
        pictures: on rank 0; arrays of 8-bit values.
        receipts: of the pictures.
        looks: what ditmesh's own code waited for on the device, by place and operation.
        reports: kinds of messages, counted.
    """

    pictures: list[np.ndarray]
    receipts: list[Receipt]
    looks: dict[str, int]
    reports: Counter[str]


def job_of(model: str, out: Path, files: dict[str, Any] | None = None, **fields: Any) -> PictureJob:
    """A job as the command line makes it; ``files``: paths of inputs by role, of adapters ``path:scale``."""
    info = find_model(model)
    given = [
        adapter(role, str(path)) if role in ("lora", "controlnet", "ip-adapter") else input_picture(role, path)  # type: ignore[arg-type]
        for role, path in (files or {}).items()
    ]
    prompts = fields.pop("prompts", ("a red fox",))
    out.mkdir(parents=True, exist_ok=True)
    return PictureJob(
        **{
            "model": model,
            "name": info.name,
            "pipeline_class": info.pipeline_class,
            "prompts": prompts,
            "prompt": prompts[0],
            "out": str(out),
            "files": tuple(given),
            "steps": 3,
            "guidance": 3.0,
            "seed": 3,
            "timeout": 100.0,
            "config": {},
            **fields,
        }
    )


def made(job: PictureJob, on_gpu: bool) -> Drawn:
    """What a job makes on this rank's CPU, or on its fake GPU. Every rank of the configuration calls this."""
    said: list[Any] = []
    opened: list[PipelineRunner] = []
    parallelize = PipelineRunner.parallelize

    def noted(self: PipelineRunner, *given: Any) -> None:
        parallelize(self, *given)
        opened.append(self)

    with gpu_of_rank() if on_gpu else nullcontext() as device, mock.patch.object(PipelineRunner, "parallelize", noted):
        try:
            generate(job, report=said.append)
        finally:
            # The process goes on, unlike that of a job.
            for runner in opened:
                engine_of(runner.pipe).own_mesh()
                restore(runner.pipe)
        looks = device.looks if device is not None else []
    files = [one for one in said if isinstance(one, Generated)]
    return Drawn(
        [np.asarray(Image.open(one.path)).astype(int) for one in files],
        [one.receipt for one in files],
        dict(Counter(f"{one.place.partition(':')[0]} {one.operation}" for one in looks if one.owner == "ditmesh")),
        Counter(type(one).__name__ for one in said),
    )


def both(model: str, folder: str, files: dict[str, Any] | None = None, **fields: Any) -> tuple[int, Drawn, Drawn]:
    """A job on CPUs and on fake GPUs: the largest difference of a pixel, and what each has made."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = [
        made(job_of(model, Path(folder, f"{where}-{os.getpid()}-{rank}"), files, **fields), bool(number))
        for number, where in enumerate(("cpu", "gpu"))
    ]
    truth, drawn = found
    assert len(truth.pictures) == len(drawn.pictures)
    worst = max((abs(a - b).max() for a, b in zip(truth.pictures, drawn.pictures, strict=True)), default=0)
    return int(worst), truth, drawn

"""A request of a pipeline on fake CUDA devices, beside the same request on CPUs."""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import ditmesh
from ditmesh.strategies.sequence import SequenceParallel
from nccl_rules.fake_cuda import cuda, move_, unavailable
from support import more_pipelines, pipelines
from support.syncs import OURS

STEPS = 5


@dataclass
class OnCuda:
    """What one rank has seen.

    Attributes:
        error: largest difference from the same configuration on CPUs, over the largest magnitude.
        steady: what the host would have waited for in the last step, by place, operation and owner.
        first: the same, of ditmesh, in the whole request.
        launches: kernels of the last step.
        messages: operations of links in the last step.
        refused: why ditmesh does not run this; then nothing else is said.
    """

    error: float = 0.0
    steady: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    messages: int = 0
    refused: str = ""


def pipeline(family: str) -> tuple[Any, Any, str]:
    """A pipeline with models of its own, what makes the arguments of its call, and where its result is."""
    if family in pipelines.MAKERS:
        pipe, result = pipelines.MAKERS[family](), "images"

        def call() -> dict[str, Any]:
            return pipelines.arguments(family, [1, 2], steps=STEPS)
    else:
        made = more_pipelines.FAMILIES[family]
        pipe, result = made.make(), made.result

        def call() -> dict[str, Any]:
            return more_pipelines.arguments(family, [1, 2] if made.several else [1], steps=STEPS)

    models = {name: copy.deepcopy(one) for name, one in pipe.components.items() if isinstance(one, nn.Module)}
    pipe.register_modules(**models)
    pipe.set_progress_bar_config(disable=True)
    return pipe, call, result


PLANTED = {
    "wait": "lambda x: x.sum().item()",
    "index": "lambda x: x[torch.tensor([0])]",
    "tensor": "lambda x: x + torch.ones(x.shape[-1])",
}


def planted(kind: str) -> dict[str, int] | str:
    """What a request on one rank sees of a fault of ditmesh in every attention; or where it is refused, and why."""
    # As if it stood in ditmesh.
    fault = eval(compile(PLANTED[kind], str(OURS / "made_up.py"), "eval"), {"torch": torch})
    attend = SequenceParallel.attend

    def faulty(self: SequenceParallel, q: Tensor, *others: Any) -> Tensor:
        if q.is_cuda:
            fault(q)
        return attend(self, q, *others)

    with mock.patch.object(SequenceParallel, "attend", faulty):
        try:
            return request("sd3", {"ring": 2}).steady
        except RuntimeError as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if OURS.as_posix() in frame.filename]
            return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}: {error}"


@torch.no_grad()
def request(family: str, config: dict[str, Any]) -> OnCuda:
    """One request on a CPU and on a fake CUDA device. On every rank of the configuration."""
    reason = unavailable()
    assert reason is None, reason
    config = {**config, "shared_memory": False}
    pipe, call, result = pipeline(family)
    try:
        with ditmesh.parallelized(pipe, config):
            truth = torch.as_tensor(getattr(pipe(**call()), result))
    except ditmesh.DitmeshError as error:
        return OnCuda(refused=f"{type(error).__name__}: {error}")
    marks: list[tuple[int, int, int]] = []
    with cuda() as device:
        for model in pipe.components.values():
            if isinstance(model, nn.Module):
                move_(model)
        arguments = tree_map_only(Tensor, lambda tensor: tensor.to("cuda"), call())
        with ditmesh.parallelized(pipe, config):
            before = len(device.looks)
            traffic = ditmesh.engine_of(pipe).mesh.traffic
            messages: list[str] = []
            scheduler = type(pipe.scheduler)
            step = scheduler.step

            def stepped(*args: Any, **kwargs: Any) -> Any:
                done = step(*args, **kwargs)
                marks.append((len(device.looks), sum(device.launches.values()), len(messages)))
                return done

            with (
                mock.patch.object(scheduler, "step", stepped),
                mock.patch.object(traffic, "observer", lambda link, kind: messages.append(kind)),
            ):
                drawn = getattr(pipe(**arguments), result)
        value = device.values(drawn).clone() if isinstance(drawn, Tensor) else torch.as_tensor(drawn)
    last, end = marks[-2], marks[-1]

    def places(looks: list[Any]) -> dict[str, int]:
        return dict(Counter(f"{one.owner} {one.place} {one.operation}" for one in looks))

    return OnCuda(
        error=float((value.float() - truth.float()).abs().max() / truth.float().abs().max()),
        steady=places(device.looks[last[0] : end[0]]),
        first=places([one for one in device.looks[before : last[0]] if one.owner == "ditmesh"]),
        launches=end[1] - last[1],
        messages=end[2] - last[2],
    )

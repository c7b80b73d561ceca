"""A server's ranks, driven by a script, and what one device draws alone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image

import ditmesh
from ditmesh import zoo
from ditmesh.launch import RankPool
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.types import JobRequest
from ditmesh.serve.worker.batching import Batcher
from ditmesh.serve.worker.coroutines import PipelineTask, copied
from ditmesh.serve.worker.loaded import LoadedModel
from ditmesh.serve.worker.protocol import Cancelled, Command, Finished, ModelFailed, ModelReady, Start, Stop, TaskFailed
from ditmesh.serve.worker.rendezvous import HostAllGather
from ditmesh.serve.worker.worker import serve_rank
from support.models import relative_error
from support.more_pipelines import FAMILIES, arguments

Send = Callable[[Command], None]

STEPS, GUIDANCE = 5, 2.0
ENDS = (Finished, TaskFailed, Cancelled, ModelFailed)


class Owner:
    """Sends commands as a script says, hears what is reported, and stops the ranks when all tasks have ended.

    Args:
        script: is called with every message and a function that sends a command.
        tasks: how many are to end.
    """

    def __init__(self, script: Callable[[Any, Send], None], tasks: int) -> None:
        self.said: list[Any] = []
        self._script, self._tasks = script, tasks

    def serve(
        self, pool: RankPool, specs: Sequence[ModelSpec], function: Callable[..., None] = serve_rank
    ) -> list[Any]:
        """Let all ranks serve; what rank 0 has reported."""

        def hear(rank: int, message: Any) -> None:
            assert rank == 0
            self.said.append(message)
            self._script(message, pool.reply)
            if isinstance(message, ENDS) and sum(isinstance(one, ENDS) for one in self.said) == self._tasks:
                pool.reply(Stop())

        pool.run(function, specs, on_message=hear, deadline=300.0)
        return self.said


def deadlines_of_loaded(spec: ModelSpec) -> list[float | None]:
    """Seconds of the ranks' own collectives, and of a loaded model's. A rank function."""
    gather = HostAllGather()
    try:
        model = LoadedModel.open(spec, torch.device("cpu"), gather)
        found = [gather.deadline, model.engine.mesh.deadline]
        model.close()
        return found
    finally:
        gather.close()


def task(id: str, prompt: str, model: str = "emoji", seed: int = 0, files: Any = None, **more: Any) -> Start:
    """A command to draw a picture of `STEPS` steps."""
    usual = {"model": model, "steps": STEPS, "guidance": GUIDANCE}
    return Start(id, JobRequest(**{**usual, "prompt": prompt, "seed": seed, **more}), 0, files or {})


def at_once(*starts: Start) -> Callable[[Any, Send], None]:
    """A script that starts tasks together."""

    def script(message: Any, send: Send) -> None:
        for start in starts if isinstance(message, ModelReady) else ():
            send(start)

    return script


def of(said: Sequence[Any], kind: type, id: str = "") -> list[Any]:
    """The messages of a kind, of one task."""
    return [one for one in said if isinstance(one, kind) and (not id or one.id == id)]


def picture(said: Sequence[Any], id: str) -> np.ndarray:
    """A task's picture, (H, W, 3) integers."""
    (finished,) = of(said, Finished, id)
    return pixels(Image.open(io.BytesIO(finished.data)))


def pixels(image: Any) -> np.ndarray:
    return np.asarray(image.convert("RGB")).astype(int)


@cache
def pipeline(name: str) -> Any:
    """An embedded model, as diffusers has it."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(zoo.path(name), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@cache
def alone(prompt: str, seed: int = 0, name: str = "emoji-sd3", **more: Any) -> np.ndarray:
    """What the unmodified pipeline draws by itself."""
    call = {"prompt": prompt, "guidance_scale": GUIDANCE, "num_inference_steps": STEPS, **more}
    return pixels(pipeline(name)(**call, generator=[torch.Generator().manual_seed(seed)]).images[0])


def save_lora(folder: Path, seed: int) -> Path:
    """An adapter of the embedded model with random weights that are seen in a picture."""
    model = copy.deepcopy(pipeline("emoji-sd3").transformer)
    torch.manual_seed(seed)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v", "net.2"], init_lora_weights=False))
    weights = {key: 2 * value for key, value in get_peft_model_state_dict(model).items()}
    name = f"adapter{seed}.safetensors"
    diffusers.StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=weights, weight_name=name)
    return folder / name


# --- on ranks ----------------------------------------------------------------------------------------------------


def staggered(name: str, config: dict[str, Any], counts: Sequence[int], truth: str = "alone") -> dict[str, Any]:
    """Requests of a family, one more every second step, against each alone: errors, calls, and steps until the first.

    Args:
        name: of a family.
        config: of the ranks.
        counts: steps of every request.
        truth: ``"alone"``: unmodified; ``"parallel"``: through the parallel pipeline, one after the other.
    """
    family = FAMILIES[name]
    pipe = family.make()
    pipe.set_progress_bar_config(disable=True)
    template = copy.copy(pipe)
    made = [lambda n=n, steps=steps: arguments(name, [n + 1], seed=n, steps=steps) for n, steps in enumerate(counts)]

    def draw(call: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(getattr(pipe(**call), family.result))

    with torch.no_grad():
        truths = [draw(call()) for call in made] if truth == "alone" else []
        with ditmesh.parallelized(pipe, config):
            truths = truths or [draw(call()) for call in made]
            world = ditmesh.engine_of(pipe).mesh.world
            batcher = Batcher(pipe, template, world.all_gather_object)
            prepared: Any = partial(SimpleNamespace, adapters=())
            calls = [prepared(pipe=copied(template), arguments=call(), seed=n) for n, call in enumerate(made)]
            runs = [PipelineTask(call, torch.device("cpu")) for call in calls]
            rounds, waited = 0, []
            while not all(run.ended for run in runs):
                active = [run for n, run in enumerate(runs) if 2 * n <= rounds and not run.ended]
                waited += [run.batch for run in active if not run.begun]
                trouble = batcher.round(active)
                assert trouble is None, trouble
                rounds += 1
            batcher.close()
        outputs = [torch.as_tensor(getattr(run.output, family.result)) for run in runs if run.failure is None]
        after = draw(made[0]())
    return {
        "why": batcher.why or [why for why in batcher._joiner._forms.values() if why],
        "errors": [relative_error(value, one) for value, one in zip(outputs, truths, strict=True)],
        "same": [torch.equal(value, one) for value, one in zip(outputs, truths, strict=True)],
        "others": min(relative_error(outputs[0], value) for value in truths[1:]),
        "calls": batcher.counts.calls,
        "restored": relative_error(after, truths[0]),
    }

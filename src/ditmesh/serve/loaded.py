"""A model on the ranks of a server: loaded, parallelised, looked at, and what its tasks are called with."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..comm.mesh import Mesh
from ..core.digests import WeightDigests, digest
from ..core.steps import SchedulerStep, StepEvents
from ..engine import Engine, engine_of, parallelize
from ..errors import ConfigError, InputError
from ..first_call import FirstCall
from ..generate.arguments import call_arguments, call_parameters, check_call, denoising_steps
from ..generate.files import (
    PICTURES,
    InputFile,
    adapter,
    check_mask,
    load_adapters,
    partial_fit,
    pictures_of,
    pipeline_for,
)
from ..generate.job import PictureJob, check_config, check_content, check_layout, job_for
from ..generate.loading import as_class, why_whole
from ..generate.model_info import ModelInfo, find_model
from ..generate.offload import offload
from ..generate.runner import facts_of, load_pipeline
from ..generate.shape import input_size
from ..generate.video import FPS
from ..media.videos import check_video_library
from ..recipe import RECIPE
from ..request import PictureRequest
from ..strategies.vae.parallel import BandedVae
from .batching import Batcher, PipelineTask, copied
from .offers import check_frames
from .previews import Projection
from .protocol import ModelSpec, PictureTask
from .types import ModelCard

# Pictures that are done at the same time are decoded on a rank each: bands of one would need all ranks at once.
RECIPE_OF_SERVERS = tuple(strategy for strategy in RECIPE if strategy is not BandedVae)

# Of the picture that a model is tried with when it is loaded: tokens along a side, at most, steps and frames.
TRIED_SIDE, TRIED_STEPS, TRIED_FRAMES = 16, 4, 9

# What pipelines call frames a second, and frames for one of latents.
RATE = "frame_rate"
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")


@dataclass
class Prepared:
    """A task as its pipeline is called.

    Attributes:
        job: what a receipt is written from.
        pipe: the pipeline, a copy of its own where steps of several tasks run together.
        arguments: of the call.
        steps: denoising steps that are taken.
        adapters: LoRA adapters that are on, with their scales.
        fps: of videos, frames a second.
    """

    job: PictureJob
    pipe: Any
    arguments: dict[str, Any]
    steps: int
    adapters: tuple[tuple[str, float], ...]
    fps: int = FPS


class LoadedModel:
    """A model of a server. Every rank makes one at the same time, with the same arguments.

    Args:
        spec: what to load.
        device: where this rank computes.
        timeout: deadline of collectives, in seconds.
        exchange, rank, size: as for `Batcher`.
        undo: what is to be given back, by all ranks at the same time, when it cannot be loaded.

    Attributes:
        batcher: runs its calls.
        projection: for previews.
        card: the fields of its `ModelCard` that loading shows.

    Raises:
        InputError: it cannot be loaded. LayoutError: its tokens cannot be placed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        exchange: Callable[[Any], list[Any]],
        rank: int,
        size: int,
        undo: ExitStack,
    ) -> None:
        self.spec, self.device = spec, device
        self.info: ModelInfo = find_model(spec.model)
        self.projection = Projection()
        self._files = [replace(adapter("lora", path), scale=1.0) for path in spec.loras.values()]
        self._size, self._exchange, self._undo = size, exchange, undo
        self._pipes: dict[str, tuple[Any, Any]] = {}
        if size > 1:
            check_layout(self.info)
        if not isinstance(spec.config, str):
            check_config(spec.config, self.info, size)
            if spec.config.vae == "bands":
                raise ConfigError(
                    "vae='bands' is for one request at a time, and a server decodes pictures of several on a rank "
                    "each; leave vae out"
                )
        pipe = self._load(rank)
        self.kind = type(pipe).__name__
        template = copy.copy(pipe)
        parallelize(pipe, spec.config, mesh=self._mesh, recipe=RECIPE_OF_SERVERS)
        if self._mesh is not None:
            # Its groups are given back with the engine.
            engine_of(pipe).own_mesh()
            self._undo.pop_all()
        self._pipes[self.kind] = pipe, template
        if isinstance(engine_of(pipe), FirstCall):
            # Its layout is found out by a call.
            prepared = self._trial(pipe)
            with torch.no_grad():
                pipe(**prepared.arguments)
        self.batcher = Batcher(pipe, template, exchange, rank, size, spec.together)
        if spec.offload != "none" and not self.batcher.why:
            self.batcher.why = (
                f"offload={spec.offload!r} moves components between the calls of one request; requests run one after "
                "the other"
            )
        self.batcher.adapt(())
        self._try(template)
        self.card = self._card(template)

    @property
    def engine(self) -> Engine:
        """What `parallelize` has made of it."""
        return self.batcher.engine

    def close(self) -> None:
        """Let go of everything. Every rank does at the same time."""
        self.batcher.close()
        self._pipes.clear()
        del self.batcher, self._mesh
        # Its mesh gives its groups back; weights are not put together again.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self, rank: int) -> Any:
        spec, config = self.spec, self.spec.config
        self._mesh = None if isinstance(config, str) else Mesh(config, device=self.device)
        if self._mesh is not None:
            self._undo.callback(self._mesh.close)
        whole = self._mesh is None or not self._mesh.config.cuts_weights or bool(self._files)
        share = None if whole or why_whole(self.info, spec.variant) is not None else self._mesh
        model = str(self.info.files) if self.info.local else self.info.name
        pipe = load_pipeline(model, self.info.name, spec.dtype, None, spec.variant, None, share)
        if spec.offload == "none":
            pipe.to(self.device)
        self._facts = facts_of(config, pipe, self.device, share, rank)
        before = {name: value for name, (value, _) in WeightDigests(pipe).look().items()} if self._files else {}
        load_adapters(pipe, self._files)
        after = {name: value for name, (value, _) in WeightDigests(pipe).look().items()} if self._files else {}
        self._weights = before, after
        self._notes = {}
        for number, (name, file) in enumerate(zip(self.spec.loras, self._files, strict=True)):
            if (note := partial_fit(pipe, file.path, f"lora{number}")) is not None:
                self._notes[name] = note
        if spec.offload != "none":
            offload(pipe, spec.offload, self.device)
        return pipe

    # --- looking at it -----------------------------------------------------------------------------------------

    def _trial(self, pipe: Any) -> Prepared:
        """A small call, to look at the model with."""
        info, parameters = self.info, call_parameters(pipe)
        prompt = next(iter(info.labels), "a picture")
        job = job_for(info, PictureRequest(prompt=prompt), "", config=self.spec.config, dtype=self.spec.dtype)
        size, most = info.default_size, TRIED_SIDE * info.size_multiple
        if size is None and "num_frames" in parameters:
            # The pipeline's own would take long.
            size = most, most
        if size is not None and not info.labels:
            job = job.changed(width=min(size[0], most), height=min(size[1], most))
        pictures = {
            name: Image.new("L" if role == "mask" else "RGB", job.size or size or (64, 64), "grey")
            for role, name in PICTURES.items()
            if name in parameters and parameters[name].default is inspect.Parameter.empty
        }
        arguments = self._arguments(job, pipe, pictures) | {"num_inference_steps": TRIED_STEPS}
        if "num_frames" in parameters:
            arguments["num_frames"] = TRIED_FRAMES
        return Prepared(job, pipe, arguments, TRIED_STEPS, ())

    def _try(self, template: Any) -> None:
        """Find out whether calls of several requests can be joined, with a small picture."""
        batcher = self.batcher
        if batcher.why:
            return
        try:
            # Before anything that ranks do together: what fails here fails on all of them.
            own = copied(template)
            run = PipelineTask(own, self._trial(own).arguments, 0, self.device)
        except Exception as error:
            batcher.why = f"it cannot be tried ({_short(error)}); requests run one after the other"
            return
        latest: Tensor | None = None

        def seen(step: SchedulerStep) -> None:
            nonlocal latest
            latest = step.latents()

        events = StepEvents(own.scheduler, seen)
        with torch.no_grad():
            while not run.ended and not batcher.why:
                if batcher.steps(run):
                    batcher.check_joining(run)
                trouble = None if batcher.why else batcher.round([run], {})
                self._agree(run.failure if trouble is None else trouble.error)
        run.leave()
        batcher.close_request()
        events.undo()
        if run.output is not None and latest is not None:
            # Of something else than images there are no previews, and its tasks fail with the reason.
            with suppress(InputError):
                frames = images_of(run.output)
                self.projection.learn_from(latest, frames[len(frames) // 2])

    def _agree(self, failed: Exception | None) -> None:
        """Whether the small picture can be made on all ranks; else requests run one after the other."""
        every = self._exchange("" if failed is None else _short(failed))
        if any(every):
            self.batcher.close_request(failed)
            reason = next(filter(None, every))
            self.batcher.why = f"a small picture to try it with failed ({reason}); requests run one after the other"

    def _card(self, template: Any) -> dict[str, Any]:
        info, parameters = self.info, call_parameters(template)
        size, defaults = info.default_size, {name: one.default for name, one in parameters.items()}
        guidance = defaults.get("guidance_scale") if self.spec.guidance is None else self.spec.guidance
        steps = self.spec.steps or defaults.get("num_inference_steps")
        return {
            "pipeline": self.kind,
            "width": size[0] if size else None,
            "height": size[1] if size else None,
            "size_multiple": info.size_multiple,
            "steps": steps if isinstance(steps, int) else None,
            "guidance": guidance if isinstance(guidance, (int, float)) else None,
            "video": "num_frames" in parameters,
            "frames": info.default_frames or _whole(defaults.get("num_frames")),
            "fps": self._fps(defaults) if "num_frames" in parameters else None,
            "frame_multiple": self._frame_multiple(template, defaults),
            "inputs": [role for role in ("image", "mask", "control") if self._takes(role)],
            "loras": list(self.spec.loras),
            "lora_notes": self._notes,
            "labels": list(info.labels),
            "loaded": True,
            "batching": not self.batcher.why,
            "why": self.batcher.why,
        }

    @staticmethod
    def _frame_multiple(template: Any, defaults: Mapping[str, Any]) -> int:
        """Frames for one of latents, where the first is one by itself; 1 where that is not how it is."""
        multiple = next((n for name in TEMPORAL if (n := _whole(getattr(template, name, None)))), 1)
        # Of some a frame of latents is always so many.
        usual = _whole(defaults.get("num_frames"))
        return 1 if usual is not None and (usual - 1) % multiple else multiple

    @staticmethod
    def _fps(defaults: Mapping[str, Any]) -> int:
        """Frames a second of a video that does not say."""
        rate = defaults.get(RATE)
        return max(1, round(rate)) if isinstance(rate, (int, float)) else FPS

    def _takes(self, role: Any) -> bool:
        files = [InputFile(role, "", "0" * 64)]
        if role == "mask":
            files.append(InputFile("image", "", "0" * 64))
        try:
            check_mask(pipeline_for(self.kind, files), files, self.info.transformer.get("in_channels"))
            return True
        except InputError:
            return False

    # --- tasks -------------------------------------------------------------------------------------------------

    def prepare(self, task: PictureTask) -> Prepared:
        """A task's call.

        Raises:
            InputError: the model cannot do it.
        """
        request, loras = task.request, list(self.spec.loras)
        for one in request.loras:
            if one.name not in loras:
                known = ", ".join(map(repr, loras)) or "none"
                raise InputError(f"model {self.spec.name!r} has no LoRA {one.name!r}; it has {known}")
        files = [replace(self._files[loras.index(one.name)], scale=one.scale) for one in request.loras]
        for one in request.inputs:
            if one.digest not in task.files:
                raise InputError(f"the input picture {one.digest[:16]}… ({one.role}) is not there; send it again")
            files.append(InputFile(one.role, task.files[one.digest], one.digest, one.scale))
        if request.frames is not None and not self.card["video"]:
            raise InputError(f"frames={request.frames}: {self.kind} makes pictures; leave frames out")
        # A seed is the picture's own: it does not matter which of a job's it is.
        width, height = self._asked_size(task, files) or (None, None)
        asked = {
            "steps": request.steps or self.spec.steps,
            "guidance": self.spec.guidance if request.guidance is None else request.guidance,
            "width": width,
            "height": height,
            "n": 1,
            "seed": (request.seed or 0) + task.index,
            "fps": None,
        }
        job = job_for(
            self.info,
            request.model_copy(update=asked),
            "",
            config=self.engine.config,
            max_sequence_length=self.spec.text_tokens,
            dtype=self.spec.dtype,
            files=tuple(files),
            variant=self.spec.variant,
            offload=self.spec.offload,
        )
        check_content(job, self.info, self._size)
        pipe, template = self._pipe_for(job)
        parameters = call_parameters(pipe)
        check_call(job, type(pipe).__name__, parameters)
        card = ModelCard.model_validate({"id": self.spec.name, "created": 0, **self.card})
        check_frames(request, card)
        if request.format == "mp4":
            check_video_library()
        own = pipe if self.batcher.why else copied(template)
        arguments = self._arguments(job, own, pictures_of(job.files))
        if request.fps is not None and RATE in parameters:
            arguments[RATE] = request.fps
        adapters = tuple((f"lora{loras.index(one.name)}", one.scale) for one in request.loras)
        fps = request.fps or card.fps or FPS
        return Prepared(job, own, arguments, denoising_steps(job, parameters), adapters, fps)

    def _asked_size(self, task: PictureTask, files: Sequence[InputFile]) -> tuple[int, int] | None:
        """Width and height that are asked for; of one side alone the other is the input image's, or the model's.

        Without both it is the input image's size; None: the model's.
        """
        request, like = task.request, input_size(self.info, files, task.request.strength)
        if request.width is None and request.height is None:
            return like
        if request.width is not None and request.height is not None:
            return request.width, request.height
        if like is not None:
            step = self.info.size_multiple
            factor = request.width / like[0] if request.width is not None else (request.height or 0) / like[1]
            width, height = (max(1, round(side * factor / step)) * step for side in like)
        elif self.info.default_size is not None:
            width, height = self.info.default_size
        else:
            raise InputError("width and height are given together or not at all; give both")
        return request.width or width, request.height or height

    def _arguments(self, job: PictureJob, pipe: Any, pictures: Mapping[str, Image.Image]) -> dict[str, Any]:
        arguments, parameters = call_arguments(job, pipe, 0, pictures), call_parameters(pipe)
        if "num_images_per_prompt" not in parameters:
            arguments.pop("num_images_per_prompt", None)
        return arguments | ({"output_type": "pil"} if "output_type" in parameters else {})

    def _pipe_for(self, job: PictureJob) -> tuple[Any, Any]:
        """The parallel pipeline of the class that takes a job's input pictures, and its template."""
        name = pipeline_for(self.kind, job.files, job.strength)
        if name not in self._pipes:
            import diffusers

            other = as_class(self._pipes[self.kind][1], getattr(diffusers, name))
            other.set_progress_bar_config(disable=True)
            own = copy.copy(other)
            if self.batcher.why:
                parallelize(other, self.engine.config)
            self._pipes[name] = other, own
        return self._pipes[name]

    def facts(self, prepared: Prepared, seconds: float) -> dict[str, Any]:
        """What a receipt says of a task beside its job; on rank 0."""
        config = self.engine.config
        facts = self._facts | {"config": config.model_dump(), "devices": self._size, "seconds": seconds}
        if prepared.adapters:
            numbers = [int(name.removeprefix("lora")) for name, _ in prepared.adapters]
            facts["weights_digest"] = adapted_digest(*self._weights, numbers)
        return facts | {"pipeline": type(prepared.pipe).__name__}


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def images_of(output: Any) -> list[Image.Image]:
    """The image of a pipeline's output, or a video's frames.

    Raises:
        InputError: it is neither.
    """
    found: list[Any]
    made = getattr(output, "images", None)
    if made is not None:
        # A list of them: layers of one image, which no file of ours holds.
        first = made[0] if isinstance(made, (list, tuple)) and made else made
        found = [first]
    else:
        frames = getattr(output, "frames", None)
        found = list(frames[0]) if frames is not None and len(frames) else [output]
    other = next((one for one in found if not isinstance(one, Image.Image)), None)
    if other is not None or not found:
        what = "layers of an image" if isinstance(other, (list, tuple)) else type(other).__name__
        raise InputError(
            f"{type(output).__name__} holds {what}, and a server has files for images and videos alone; use the "
            "pipeline itself"
        )
    return found


def adapted_digest(before: Mapping[str, str], after: Mapping[str, str], numbers: list[int]) -> str:
    """The digest of a pipeline's weights as if some adapters alone had been loaded, in this order.

    Args:
        before, after: digests of the weights by name, without adapters and with all of them.
        numbers: of the adapters, as in their names ``lora0``, ``lora1``, …
    """
    found, adapted = {}, set()
    for name, value in after.items():
        parts = name.split(".")
        place = next((place for place, part in enumerate(parts) if part.startswith("lora_")), None)
        if place is None:
            continue
        for position, number in enumerate(numbers):
            if f"lora{number}" in parts[place:]:
                adapted.add(".".join(parts[:place]))
                renamed = [f"lora{position}" if part == f"lora{number}" else part for part in parts[place:]]
                found[".".join([*parts[:place], *renamed])] = value
    for name, value in before.items():
        layer, _, weight = name.rpartition(".")
        found[f"{layer}.base_layer.{weight}" if layer in adapted else name] = value
    return digest(found)

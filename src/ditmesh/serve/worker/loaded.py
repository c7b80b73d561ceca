"""A model on the ranks of a server: loading, parallelisation, the batching test, and the arguments of tasks."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from ...comm.mesh import Mesh
from ...core.digests import WeightDigests, digest
from ...engine import Engine, engine_of, parallelize
from ...engine.first_call import FirstCall
from ...errors import ConfigError, InputError, shortened
from ...generate.arguments import check_call
from ...generate.cut_prompts import CutPrompts
from ...generate.files import IMAGE_ARGUMENTS, InputFile, adapter, check_mask_support, input_size, pipeline_for
from ...generate.job import PictureJob, check_config, check_content, job_for
from ...generate.loras import LAYERS
from ...generate.model_info import ModelInfo, find_model
from ...generate.modular import guided_by
from ...generate.outputs import PipelineOutput
from ...generate.receipt import Receipt
from ...generate.runner import PipelineRunner, Prepared, fitting_job, rank_of_process, receipt_facts, share_of
from ...generate.video import FPS
from ...media.videos import check_video_library
from ...recipe import BANDED_VAE, RECIPE
from ...request import PictureRequest, size_of
from ..offers import ModelSpec, check_output
from ..types import ModelCard
from .batching import Batcher
from .coroutines import PipelineTask, copied
from .previews import latent_colours
from .protocol import Start
from .rendezvous import HostAllGather

# Each rank decodes whole images: bands of one image would need all ranks at the same time.
RECIPE_OF_SERVERS = tuple(strategy for strategy in RECIPE if strategy is not BANDED_VAE)

# The test image at loading: the largest number of tokens along a side, steps and frames.
TRIED_SIDE, TRIED_STEPS, TRIED_FRAMES = 16, 4, 9

# What pipelines call frames a second, and frames for one of latents.
RATE = "frame_rate"
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")


class LoadedModel:
    """A model of a server; `open` loads it. Every rank opens one at the same time, with the same arguments.

    Attributes:
        colours: of its latents, for previews, which rank 0 makes; None: it has none.
        card: the fields of its `ModelCard` that loading shows.
        batcher: runs its requests' calls.
    """

    batcher: Batcher
    card: dict[str, Any]
    kind: str

    def __init__(self, spec: ModelSpec, device: torch.device, exchange: HostAllGather) -> None:
        self.spec, self.device, self._exchange = spec, device, exchange
        self.info: ModelInfo = find_model(spec.model)
        self._files = tuple(replace(adapter("lora", path), scale=1.0) for path in spec.loras.values())
        self._options = {
            "dtype": spec.dtype,
            "variant": spec.variant,
            "offload": spec.offload,
            "check_memory": spec.check_memory,
            "memory_limit": spec.memory_limit,
        }
        if exchange.deadline is not None:
            self._options["timeout"] = exchange.deadline

    @classmethod
    def open(cls, spec: ModelSpec, device: torch.device, exchange: HostAllGather) -> LoadedModel:
        """Load a model, parallelise it, and find out whether its requests can share calls. Collective.

        Args:
            exchange: all-gather of the ranks, with the deadline of their collectives.

        Raises:
            InputError: it cannot be loaded, or does not fit into memory. LayoutError: its tokens cannot be placed.
        """
        model = cls(spec, device, exchange)
        model._check()
        config = model._job.config
        # Without one the engine chooses.
        mesh = None if isinstance(config, str) else Mesh(config, device=device, timeout=model._job.timeout)
        runner = model._load(mesh)
        template = model._parallelise(runner, mesh)
        model.batcher = Batcher(runner.pipe, template.pipe, exchange, spec.together)
        if spec.offload != "none" and not model.batcher.why:
            model.batcher.run_alone(f"offload={spec.offload!r} moves components between the calls of one request")
        model.batcher.adapt(())
        model._try(template)
        model.card = model._card(template)
        return model

    @property
    def engine(self) -> Engine:
        """The engine of the pipeline."""
        return self.batcher.engine

    def close(self) -> None:
        """Free everything. Every rank calls this at the same time."""
        self.batcher.close()
        self._cuts.close()
        self._runners.clear()
        del self.batcher
        # The mesh frees its groups; weights are not restored.
        gc.collect()
        if torch.accelerator.is_available():
            torch.get_device_module().empty_cache()

    # --- opening -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuse what the model's files and its settings rule out, before any weight is read."""
        spec, size = self.spec, self._exchange.size
        if not isinstance(spec.config, str):
            check_config(spec.config, self.info, size)
            if spec.config.vae == "bands":
                raise ConfigError(
                    "vae='bands' is for one request at a time, and a server decodes images of several on a rank "
                    "each; leave vae out"
                )
        # An embedded or class-conditional model accepts only some prompts.
        request = PictureRequest(prompt=next(iter(self.info.labels), "a picture"))
        self._job = job_for(self.info, request, "", config=spec.config, files=self._files, **self._options)
        self._job, _ = fitting_job(self._job, self.device)

    def _load(self, mesh: Mesh | None) -> PipelineRunner:
        """Read the pipeline, or this rank's share of it, and the facts of its receipts."""
        job = self._job
        # Digests with some of the adapters are made of whole weights.
        share = None if self._files else share_of(job, mesh)[0]
        runner = PipelineRunner.load(job, self.device, share, checked=False, together=True)
        runner.facts = receipt_facts(job.config, runner.pipe, self.device, share)
        digests = WeightDigests(runner.pipe).look() if job.files else {}
        self._weights = {name: value for name, (value, _) in digests.items()}
        names = {file.path: name for name, file in zip(self.spec.loras, job.files, strict=True)}
        self._notes = {names[path]: note for path, note in runner.notes.items()}
        self.colours = latent_colours(runner.pipe) if rank_of_process() == 0 else None
        return runner

    def _parallelise(self, runner: PipelineRunner, mesh: Mesh | None) -> PipelineRunner:
        """Parallelise the pipeline; returns the template of its tasks' copies."""
        pipe, self.kind = runner.pipe, runner.kind.__name__
        template = PipelineRunner(copy.copy(pipe), self.device)
        runner.parallelize(self._job, mesh, RECIPE_OF_SERVERS)
        if mesh is not None:
            # Its process groups are freed with the engine.
            engine_of(pipe).own_mesh()
        # By class: the parallel pipeline, and the template of its tasks' copies.
        self._runners = {self.kind: (runner, template)}
        self._cuts = CutPrompts(pipe)
        if isinstance(engine_of(pipe), FirstCall):
            # Its layout is derived from a call.
            given = dict(self._trial(runner).arguments)
            with torch.no_grad(), guided_by(pipe, given):
                pipe(**given)
        return template

    # --- looking at it -----------------------------------------------------------------------------------------

    def _trial(self, runner: PipelineRunner) -> Prepared:
        info, parameters, job = self.info, runner.parameters, self._job.changed(files=())
        size, most = info.default_size, TRIED_SIDE * info.size_multiple
        more: dict[str, Any] = {"num_inference_steps": TRIED_STEPS}
        if "num_frames" in parameters:
            more["num_frames"] = TRIED_FRAMES
            if "chunk_partition" in parameters:
                more["chunk_partition"] = [1] * info.latent_frames(TRIED_FRAMES)
            # The pipeline's default size would take long.
            size = size or (most, most)
        if size is not None and not info.labels:
            job = job.changed(width=min(size[0], most), height=min(size[1], most))
        pictures = {
            name: Image.new("L" if role == "mask" else "RGB", job.size or size or (64, 64), "grey")
            for role, name in IMAGE_ARGUMENTS.items()
            if name in parameters and parameters[name].default is inspect.Parameter.empty
        }
        return runner.prepare(job, 0, pictures, **more)

    def _try(self, template: PipelineRunner) -> None:
        """Test with a small image whether calls of several requests can be joined."""
        batcher = self.batcher
        if batcher.why:
            return
        try:
            # Before any collective: an error here occurs on all ranks.
            run = PipelineTask(replace(self._trial(template), pipe=copied(template.pipe)), self.device)
        except Exception as error:
            batcher.run_alone(f"it cannot be tried ({shortened(error)})")
            return
        with torch.no_grad():
            while not run.ended and not batcher.why:
                if batcher.steps(run):
                    batcher.check_joining(run)
                trouble = None if batcher.why else batcher.round([run])
                failed = run.failure if trouble is None else trouble.error
                # If it fails on any rank, it has failed on all.
                every = self._exchange("" if failed is None else shortened(failed))
                if any(every):
                    batcher.close_request(failed)
                    batcher.run_alone(f"a small image to try it with failed ({next(filter(None, every))})")
        run.leave()
        batcher.close_request()

    def _card(self, template: PipelineRunner) -> dict[str, Any]:
        info, parameters, pipe = self.info, template.parameters, template.pipe
        size, defaults = info.default_size, {name: parameter.default for name, parameter in parameters.items()}
        frames, rate = _whole(defaults.get("num_frames")), defaults.get(RATE)
        multiple = next((n for name in TEMPORAL if (n := _whole(getattr(pipe, name, None)))), 1)
        # Of some a frame of latents is always so many: the first one is not apart.
        multiple = 1 if frames is not None and (frames - 1) % multiple else multiple
        fps = max(1, round(rate)) if isinstance(rate, (int, float)) else FPS

        def takes(role: Any) -> bool:
            roles = ("image", "mask") if role == "mask" else (role,)
            files = [InputFile(name, "", "0" * 64) for name in roles]
            try:
                check_mask_support(pipeline_for(self.kind, files), files, info.transformer.get("in_channels"))
            except InputError:
                return False
            return True

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
            "frames": info.default_frames or frames,
            "fps": fps if "num_frames" in parameters else None,
            "frame_multiple": multiple,
            "inputs": [role for role in ("image", "mask", "control") if takes(role)],
            "loras": list(self.spec.loras),
            "lora_notes": self._notes,
            "labels": list(info.labels),
            "loaded": True,
            "batching": not self.batcher.why,
            "why": self.batcher.why,
        }

    # --- tasks -------------------------------------------------------------------------------------------------

    def prepare(self, task: Start) -> Prepared:
        """A task's call. Raises `InputError`: the model cannot do it."""
        request, loras = task.request, list(self.spec.loras)
        check_output(request, ModelCard.model_validate({"id": self.spec.name, "created": 0, **self.card}))
        files = [replace(self._files[loras.index(lora.name)], scale=lora.scale) for lora in request.loras]
        for file in request.inputs:
            if file.digest not in task.files:
                raise InputError(f"the input image {file.digest[:16]}… ({file.role}) is not there; send it again")
            files.append(InputFile(file.role, task.files[file.digest], file.digest, file.scale))
        # Also with a size: a mask must have the shape of its image.
        of_image = input_size(self.info, files, request.strength)
        width, height = size_of(request) or of_image or (None, None)
        # The seed is that of this image, whatever its index in the job.
        asked = {
            "steps": request.steps or self.spec.steps,
            "guidance": self.spec.guidance if request.guidance is None else request.guidance,
            "width": width,
            "height": height,
            "n": 1,
            "seed": (request.seed or 0) + task.index,
        }
        job = job_for(
            self.info,
            request.model_copy(update=asked),
            "",
            config=self.engine.config,
            max_sequence_length=self.spec.text_tokens,
            files=tuple(files),
            **self._options,
        )
        check_content(job, self.info, self.engine.config.world_size)
        runner, template = self._runners_for(job)
        check_call(job, runner.kind.__name__, runner.parameters)
        if request.format == "mp4":
            check_video_library()
        prepared = (template if self.batcher.delegates else runner).prepare(job)
        own = copied(prepared.pipe) if self.batcher.delegates else prepared.pipe
        adapters = tuple((f"lora{loras.index(lora.name)}", lora.scale) for lora in request.loras)
        return replace(prepared, pipe=own, adapters=adapters)

    def _runners_for(self, job: PictureJob) -> tuple[PipelineRunner, PipelineRunner]:
        """The parallel pipeline of the class that takes a job's input images, and its template."""
        name = pipeline_for(self.kind, job.files, job.strength)
        if name not in self._runners:
            other = self._runners[self.kind][1].as_class(name)
            template = PipelineRunner(copy.copy(other.pipe), self.device)
            if not self.batcher.delegates:
                parallelize(other.pipe, self.engine.config)
            self._runners[name] = other, template
        return self._runners[name]

    def receipt(self, prepared: Prepared, made: PipelineOutput, seconds: float) -> Receipt:
        """The receipt of a task; on rank 0."""
        job = prepared.job
        facts: dict[str, Any] = {"seconds": seconds, "cut": self._cuts.sentence(prepared.prompt, job.negative_prompt)}
        if self._files:
            numbers = [int(name.removeprefix("lora")) for name, _ in prepared.adapters]
            facts["weights_digest"] = adapted_digest(self._weights, numbers)
        return self._runners[self.kind][0].receipt(prepared, 0, made, **facts)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def adapted_digest(weights: Mapping[str, str], numbers: list[int]) -> str:
    """The digest of a pipeline's weights as if some adapters alone had been loaded, in this order.

    Args:
        weights: digests of the weights by name, with all adapters.
        numbers: of the adapters, as in their names ``lora0``, ``lora1``, …
    """
    digests, adapted = {}, set()
    for name, value in weights.items():
        parts = name.split(".")
        place = next((place for place, part in enumerate(parts) if part.startswith(LAYERS)), None)
        if place is None:
            continue
        for position, number in enumerate(numbers):
            if f"lora{number}" in parts[place:]:
                adapted.add(".".join(parts[:place]))
                renamed = [f"lora{position}" if part == f"lora{number}" else part for part in parts[place:]]
                digests[".".join([*parts[:place], *renamed])] = value
    for name, value in weights.items():
        layer, _, weight = name.rpartition(".")
        if layer.endswith(".base_layer"):
            own = layer.removesuffix(".base_layer")
            digests[name if own in adapted else f"{own}.{weight}"] = value
        elif not any(part.startswith(LAYERS) for part in name.split(".")):
            digests[name] = value
    return digest(digests)

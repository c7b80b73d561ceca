"""`PipelineRunner`: a loaded pipeline that makes the calls of jobs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from .._version import library_versions
from ..errors import InputError
from ..launch import MessageSink
from ..launch.hardware import environment
from ..launch.log_filter import hide_chatter
from ..request import PictureRequest
from .arguments import CALLBACK, RATES, call_arguments, check_call, denoising_steps
from .cut_prompts import CutPrompts
from .files import load_adapters, load_controlnet, pictures_of, pipeline_for
from .job import PictureCall, PictureJob, UserNote
from .model_info import find_model
from .modular import call_parameters, guided_by
from .outputs import PipelineOutput, VideoFrames, outputs_of
from .receipt import Receipt
from .schedulers import scheduler_named
from .steps import loop_steps
from .video import FPS, frames_digest

if TYPE_CHECKING:
    import torch

    from ..comm.mesh import Mesh
    from ..config import ParallelConfig
    from ..recipe import Recipe
    from .chunks import OnFrames


@dataclass(frozen=True)
class Prepared:
    """A prepared call of a pipeline: which images of the job, and the denoising steps that are taken.

    ``adapters``: LoRA adapters that are on, with their scales, where they change from request to request.
    """

    job: PictureJob
    call: PictureCall
    pipe: Any
    kind: type[Any]
    arguments: dict[str, Any]
    steps: int
    adapters: tuple[tuple[str, float], ...] = ()

    @property
    def seed(self) -> int:
        """The seed of the call's first image, and of torch's default generators."""
        return self.job.seed + self.call.first

    @property
    def prompt(self) -> str:
        """The prompt of the call's images."""
        return self.job.prompts[self.call.prompt]

    @property
    def fps(self) -> float:
        """The frame rate of the call's videos."""
        return float(next((self.arguments[name] for name in RATES if self.arguments.get(name)), self.job.fps or FPS))


class PipelineRunner:
    """A loaded pipeline, parallelised or not, that runs the calls of jobs. All its ranks run the same calls.

    Args:
        pipe: the pipeline, or an object that is called like one, such as a `RemotePipeline`.
        device: where it computes; default: the CPU.
        kind: the pipeline's class, if another than that of ``pipe``.
        facts: what receipts say that only the run knows; of weights and environment rank 0's.

    Attributes:
        notes: on LoRA files of which a part is left out, by path.
        group: where groups of ranks make calls of their own, the number of this rank's, how many there are, and how
            many ranks each has; else ``(0, 1, 1)``.
    """

    def __init__(
        self,
        pipe: Any,
        device: torch.device | None = None,
        kind: type[Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        import torch

        self.pipe, self.device, self.kind = pipe, device or torch.device("cpu"), kind or type(pipe)
        self.parameters, self.facts = call_parameters(kind or pipe), dict(facts or {})
        self.load_seconds = 0.0
        self.notes: dict[str, str] = {}
        self.group = 0, 1, 1

    @classmethod
    def open(cls, job: PictureJob, report: MessageSink) -> PipelineRunner:
        """Load a job's pipeline and parallelise it; ``report`` takes rank 0's notes. Every rank calls this.

        Raises:
            InputError: the pipeline cannot run the request, or does not fit into memory.
            LayoutError: the transformer's tokens could not be found out.
        """
        from ..comm.backends import device_of_rank
        from ..comm.mesh import Mesh

        device, started = device_of_rank(), time.perf_counter()
        job, note = fitting_job(job, device, side_by_side=True)
        if note is not None:
            report(UserNote(note))
        mesh = None if isinstance(job.config, str) else Mesh(job.config, device=device, timeout=job.timeout)
        share, why = share_of(job, mesh)
        if why is not None:
            report(UserNote(f"every rank loads the whole transformer before it is cut: {why}"))
        runner = cls.load(job, device, share, together=True)
        for note in runner.notes.values():
            report(UserNote(note))
        runner.facts = receipt_facts(job.config, runner.pipe, device, share)
        runner.parallelize(job, mesh)
        runner.load_seconds = time.perf_counter() - started
        return runner

    @classmethod
    def load(
        cls,
        job: PictureJob,
        device: torch.device,
        mesh: Mesh | None = None,
        checked: bool = True,
        together: bool = False,
    ) -> PipelineRunner:
        """The job's pipeline, quiet, with its adapters, and not parallelised yet.

        Args:
            device: where the transformers are to be; the other components are there too unless they are offloaded.
            mesh: each rank reads only its share of the transformers, for ``mesh.config``; None: every rank reads all.
            checked: refuse a job that the pipeline cannot run.
            together: all ranks call this alike; see `read_pipeline`.
        """
        import diffusers
        import torch

        from .loading import dtype_option, read_pipeline, weights_stay
        from .shares import whole_shapes

        # Before the class is imported, which may fail for missing optional packages.
        quieten()
        name = pipeline_for(job.pipeline_class, job.files, job.strength)
        kind = getattr(diffusers, name, None)
        if checked and isinstance(kind, type):
            check_call(job, name, call_parameters(kind))
        other = kind if name != job.pipeline_class else None
        info, dtype = find_model(job.model), getattr(torch, job.dtype)
        # Messages name a folder as the user did.
        info = replace(info, name=job.name) if info.local else info
        parts = load_controlnet(job.files, dtype_option(dtype))
        pipe = read_pipeline(info, None, mesh, dtype, job.variant, other, together, **parts)
        pipe.set_progress_bar_config(disable=True)
        with whole_shapes(pipe, mesh) if mesh is not None else contextlib.nullcontext():
            notes = load_adapters(pipe, job.files)
        if job.scheduler is not None:
            pipe.scheduler = scheduler_named(job.scheduler, type(pipe.scheduler).__name__, pipe.scheduler.config)
        if job.offload == "none":
            with weights_stay(pipe, job.config, device):
                pipe.to(device)
        runner = cls(pipe, device)
        runner.notes = notes
        return runner

    def parallelize(self, job: PictureJob, mesh: Mesh | None, recipe: Recipe | None = None) -> None:
        """Make the pipeline run on all ranks as the job says, offloaded if it says so; no mesh for ``"auto"``."""
        from ..engine import configuration_for, engine_of, parallelize
        from ..recipe import RECIPE
        from .loading import weights_stay
        from .offload import offload

        config, guidance = job.config, None if job.guidance is None else job.guidance > 1
        if job.offload != "none":
            with weights_stay(self.pipe, config, self.device):
                offload(self.pipe, job.offload, self.device)
        if isinstance(config, str):
            config = configuration_for(self.pipe, guidance=guidance)
        parallelize(self.pipe, config, mesh=mesh, timeout=job.timeout, recipe=recipe or RECIPE)
        config = engine_of(self.pipe).config
        if config.inputs == "per-data-rank":
            # What a call runs on is its group.
            ranks = config.world_size // config.data
            self.group = rank_of_process() // ranks, config.data, ranks
            config = config.model_copy(update={"data": 1, "inputs": "broadcast"})
        self.facts |= {"config": config.recorded(), "devices": config.world_size}

    def as_class(self, name: str) -> PipelineRunner:
        """The runner of another class on the same components and ranks; diffusers' ``from_pipe`` casts components."""
        import diffusers
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline

        from ..engine import ENGINE, engine_of, parallelize

        pipe, kind = self.pipe, getattr(diffusers, name, None)
        if not (isinstance(kind, type) and issubclass(kind, DiffusionPipeline)):
            raise InputError(f"{name} is no pipeline of diffusers {diffusers.__version__}")
        needed, options = kind._get_signature_keys(kind)
        given = {part: value for part, value in pipe.components.items() if part in needed}
        given |= {key: value for key, value in dict(pipe.config).items() if key in options}
        try:
            sibling: Any = kind(**given)
        except TypeError as error:
            raise InputError(f"{name} cannot be made of a {self.kind.__name__}'s components ({error})") from None
        sibling.set_progress_bar_config(**getattr(pipe, "_progress_bar_config", {}))
        if getattr(pipe, ENGINE, None) is not None:
            parallelize(sibling, engine_of(pipe).config)
        return PipelineRunner(sibling, self.device, facts=self.facts)

    def prepare(
        self, job: PictureJob, number: int = 0, pictures: Mapping[str, Any] | None = None, **more: Any
    ) -> Prepared:
        """Prepare call ``number`` of a job, with ``more`` arguments in the place of the job's, or beside them.

        ``pictures``: the job's input images, by the argument that takes each; default: its files are read.
        """
        if pictures is None:
            pictures = pictures_of(job.files, None if "num_frames" in self.parameters else job.frames)
        arguments = call_arguments(job, self.parameters, number, pictures)
        if "output_type" in self.parameters:
            # Some pipelines return arrays by default.
            arguments["output_type"] = "pil"
        steps = denoising_steps(job, self.parameters)
        return Prepared(job, job.call(number), self.pipe, self.kind, arguments | more, steps)

    def run(
        self, prepared: Prepared, on_step: Callable[[int, int], None] | None = None, on_frames: OnFrames | None = None
    ) -> list[PipelineOutput]:
        """Generate the images or videos of a call; ``on_step`` takes the steps since the last time, and of how many."""
        from ..core.generators import OwnGenerators
        from .chunks import ChunkFrames

        pipe, planned, given = prepared.pipe, prepared.steps, dict(prepared.arguments)
        tells = CALLBACK in self.parameters

        def stepped(*of: Any) -> Any:
            # The timesteps are set only now; every one of them calls back, also the second half of a step of Heun's.
            on_step(1, loop_steps(pipe, planned))  # type: ignore[misc]
            return of[-1]

        if on_step is not None and tells:
            given[CALLBACK] = stepped
        started = time.perf_counter()
        # An offloaded autoencoder would take the transformer's place after every chunk.
        chunks = ChunkFrames(pipe, given, on_frames if prepared.job.offload == "none" else None)
        own = OwnGenerators(prepared.seed, self.device)
        with own.active(), CutPrompts(pipe) as cuts, guided_by(pipe, given), chunks, chunks.decoding():
            outputs = outputs_of(pipe(**given))
        self.facts["cut"] = cuts.sentence(prepared.prompt, prepared.job.negative_prompt)
        self.facts["seconds"] = time.perf_counter() - started
        if on_step is not None and not tells:
            on_step(planned, planned)
        return outputs

    def receipt(self, prepared: Prepared, place: int, made: PipelineOutput, **facts: Any) -> Receipt:
        """The receipt of a call's image or video number ``place``; ``facts``: fields that count before `facts`."""
        job, call, arguments = prepared.job, prepared.call, prepared.arguments
        asked = {name: getattr(job, name) for name in PictureRequest.model_fields if name != "n"}
        first = made.frames[0]
        asked |= {
            "prompt": prepared.prompt,
            "seed": prepared.seed + place,
            "steps": arguments["num_inference_steps"],
            "guidance": arguments.get("guidance_scale", 0.0),
            "width": first.width,
            "height": first.height,
            "frames": None,
            "fps": None,
        }
        if isinstance(made, VideoFrames):
            digest = frames_digest(made.frames)
            asked |= {"frames": len(made.frames), "fps": prepared.fps, "frames_digest": digest}
        return Receipt(
            **asked,
            index=call.first + place,
            place=place,
            max_sequence_length=arguments.get("max_sequence_length"),
            model=job.name,
            pipeline=prepared.kind.__name__,
            dtype=job.dtype,
            versions=library_versions(),
            label=job.labels[call.prompt] if job.labels else None,
            together=call.images,
            files=list(job.files),
            variant=job.variant,
            offload=job.offload,
            scheduler=job.scheduler,
            **self.facts | facts,
        )


def share_of(job: PictureJob, mesh: Mesh | None) -> tuple[Mesh | None, str | None]:
    """The mesh if ranks can read only their share of the transformers; otherwise the reason why they cannot."""
    from .loading import partial_read_refusal

    cut = mesh is not None and mesh.config.cuts_weights
    why = partial_read_refusal(find_model(job.model), job.variant) if cut else None
    return (mesh, None) if cut and why is None else (None, why)


def receipt_facts(
    config: ParallelConfig | Literal["auto"], pipe: Any, device: torch.device, share: Mesh | None
) -> dict[str, Any]:
    """The facts about weights and environment for receipts, on rank 0; empty on other ranks. Collective.

    ``share``: by which the transformers were read, or are cut by now; None: they are whole.
    """
    from ..core.digests import weights_fingerprint
    from ..strategies.determinism import deterministic
    from .shares import fingerprint

    spread = None if share is None else fingerprint(pipe, share)
    if rank_of_process() > 0:
        return {}
    reproducible = not isinstance(config, str) and config.reproducible
    # With the settings that are in force while the pipeline runs.
    with deterministic(device) if reproducible else contextlib.nullcontext():
        weights = spread or weights_fingerprint(pipe)
        return {"weights_digest": weights, "environment": environment(device), "device": device.type}


def facts_on_rank(pipe: Any) -> dict[str, Any]:
    """The facts of a parallelised pipeline's receipts; see `receipt_facts`."""
    from ..engine import engine_of

    mesh, config = engine_of(pipe).mesh, engine_of(pipe).config
    facts = receipt_facts(config, pipe, mesh.device, mesh if config.cuts_weights else None)
    return facts | {"config": config.recorded(), "devices": config.world_size} if facts else {}


def rank_of_process() -> int:
    """The rank of this process; 0 without other ranks."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def fitting_job(job: PictureJob, device: torch.device, side_by_side: bool = False) -> tuple[PictureJob, str | None]:
    """The job with the configuration of ``"auto"``, and what to say about it. Every rank calls this alike.

    Nothing is read but the model's JSON files. ``"auto"`` is left to the engine where the class has no reviewed layout.
    An `InputError` says that the job does not fit into memory. ``side_by_side``: groups of ranks may make calls alone.
    """
    import torch

    from ..memory.check import check_memory, choose_for_ranks
    from ..memory.sizes import workload_of

    if not isinstance(job.config, str) and side_by_side:
        job = job.changed(config=job.config.for_calls(job.call(0).images, job.calls))
    if not (isinstance(job.config, str) or job.check_memory):
        return job, None
    quieten()
    info, dtype, note = find_model(job.model), getattr(torch, job.dtype), None
    guided = None if job.guidance is None else job.guidance > 1
    # The largest call.
    images = max(job.call(number).images for number in range(job.calls))
    workload = workload_of(
        info, job.size, job.max_sequence_length, images, False if guided is False else None, job.frames
    )
    if isinstance(job.config, str):
        choice = choose_for_ranks(
            info,
            dtype,
            device,
            workload,
            job.memory_limit if job.check_memory else float("inf"),
            offload=job.offload,
            guidance=guided,
            calls=job.calls if side_by_side else 1,
        )
        if choice is None:
            return job, None
        job, note = job.changed(config=choice.config), choice.describe() if choice.config.world_size > 1 else None
    if job.check_memory and not isinstance(job.config, str):
        check_memory(info, job.config, dtype, device, workload, job.memory_limit, offload=job.offload)
    return job, note


def quieten() -> None:
    """Hide loading bars in this process, and show warnings of libraries only on the first rank."""
    import diffusers
    import tqdm
    import transformers

    hide_chatter()
    # Its own default is shared between processes, which we have no use for, and which Python's resource tracker
    # complains about when a rank is killed.
    tqdm.tqdm.set_lock(threading.RLock())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    first = rank_of_process() == 0
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        if not first and f"{library.__name__.upper()}_VERBOSITY" not in os.environ:
            library.utils.logging.set_verbosity_error()

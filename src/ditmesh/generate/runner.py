"""`PipelineRunner`: a loaded pipeline that makes the calls of a job."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .._version import library_versions
from ..core.steps import loop_steps
from ..errors import InputError
from ..launch import MessageSink
from ..launch.chatter import chatter_off
from ..request import request_fields
from .arguments import RATES, call_arguments, call_parameters, check_call, denoising_steps, video_call
from .job import Noted, PictureJob, StepDone
from .model_info import find_model
from .receipt import Receipt, ReceiptFile
from .shape import stretched
from .video import FPS, frames_digest

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ..comm.mesh import Mesh
    from ..config import ParallelConfig
    from ..forecast.memory.check import Peaks
    from .journal import Journal


# A picture, or the frames of a video.
Made: TypeAlias = "Image | Sequence[Image]"


class PipelineRunner:
    """A job's pipeline on this rank, loaded and parallelised, which makes the pictures of one call after the other.

    Attributes:
        job: what is generated.
        pipe: the pipeline.
        rank: of this process.
        steps: denoising steps that each picture is expected to take.
        load_seconds: time that loading took.
        sampled: the weights' `sampled_fingerprint`, where the job asks for it; rank 0's.
        facts: what receipts say that only the run knows; of weights and environment rank 0's.
        report: takes rank 0's reports.
    """

    def __init__(
        self, job: PictureJob, pipe: Any, facts: dict[str, Any], peaks: Peaks, rank: int, report: MessageSink
    ) -> None:
        from ..engine import engine_of
        from .files import pictures_of

        self.job, self.pipe, self.facts, self.rank, self.report = job, pipe, facts, rank, report
        self.load_seconds, self.sampled = 0.0, None
        self._engine, self._peaks, self._parameters = engine_of(pipe), peaks, call_parameters(pipe)
        self.steps = denoising_steps(job, self._parameters)
        self._pictures = pictures_of(job.files, None if "num_frames" in self._parameters else job.frames)
        self._ran = False

    @classmethod
    def open(cls, job: PictureJob, report: MessageSink | None = None) -> PipelineRunner:
        """Load a job's pipeline and parallelise it. Every rank calls this.

        Raises:
            InputError: the pipeline cannot do what is asked, or does not fit into memory.
            LayoutError: the transformer's tokens could not be found out.
        """
        import torch.distributed as dist

        from ..comm.mesh import Mesh
        from ..core.digests import sampled_fingerprint
        from ..engine import configuration_for, engine_of, parallelize
        from ..forecast.memory.check import Peaks
        from .files import partial_fit
        from .offload import offload

        grouped = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        say: MessageSink = report if report is not None and rank == 0 else lambda message: None
        device, started = device_of_rank(), time.perf_counter()
        if job.check_memory:
            _check_memory(job, device)
        peaks = Peaks(device)
        mesh = None if isinstance(job.config, str) else Mesh(job.config, device=device, timeout=job.timeout)
        share, why = _share(job, mesh)
        if why is not None:
            say(Noted(f"every rank loads the whole transformer before it is cut: {why}"))
        pipe = load(job, device, share)
        for number, file in enumerate(one for one in job.files if one.role == "lora"):
            if (text := partial_fit(pipe, file.path, f"lora{number}")) is not None:
                say(Noted(text))
        facts = facts_of(job.config, pipe, device, share, rank)
        sampled = sampled_fingerprint(pipe) if job.sampled and rank == 0 else None
        if job.offload != "none":
            offload(pipe, job.offload, device)
        config = job.config
        if isinstance(config, str):
            config = configuration_for(pipe, guidance=None if job.guidance is None else job.guidance > 1)
        parallelize(pipe, config, mesh=mesh, timeout=job.timeout)
        facts |= {"config": engine_of(pipe).config.model_dump(), "devices": size}
        runner = cls(job, pipe, facts, peaks, rank, say)
        runner.load_seconds, runner.sampled = time.perf_counter() - started, sampled
        return runner

    def journal(self, folder: str) -> Journal:
        """A journal of the transformers' calls: around everything else, so that it sees the pipeline's own calls."""
        from ..engine import DENOISERS, denoisers
        from .journal import Journal

        own = denoisers(self.pipe)
        models = {name: getattr(self.pipe, name) for name in DENOISERS if getattr(self.pipe, name, None) in own}
        return Journal(models, folder, self.rank, self._engine.clock)

    def note_stretching(self) -> None:
        """Report input pictures that the pipeline will stretch."""
        if self._pictures and self.job.size is not None:
            step = find_model(self.job.model).size_multiple
            if (text := stretched(self._pictures, self.job.size, step)) is not None:
                self.report(Noted(text))

    def prepare(self, number: int) -> dict[str, Any]:
        """The arguments of the pipeline's call ``number``, as receipts tell of them."""
        return call_arguments(self.job, self.pipe, number, self._pictures)

    def run(self, number: int, arguments: Mapping[str, Any]) -> list[Made]:
        """Make the pictures of call ``number``. Every rank does so at the same time.

        Raises:
            InputError: the pipeline makes something else.
        """
        import torch
        import torch.distributed as dist

        call, given = self.job.call(number), dict(arguments)
        if video_call(self._parameters):
            # Some make arrays by default.
            given["output_type"] = "pil"
        tells = "callback_on_step_end" in self._parameters
        if tells:
            given["callback_on_step_end"] = lambda *of: self._stepped(call.images, 1) or of[-1]
        if dist.is_available() and dist.is_initialized():
            # The clock starts when all are here.
            dist.barrier()
        # Some pipelines encode a control picture with noise of the process's own generator.
        torch.manual_seed(self.job.seed + call.first)
        started = time.perf_counter()
        with self._peaks.call(self.pipe):
            made = made_of(self.pipe(**given))
        self.facts |= {"seconds": time.perf_counter() - started, "peak_memory": self._peaks.of_all()}
        for model in () if self._ran else self._engine.rows:
            if (text := model.idle()) is not None:
                self.report(Noted(text))
        self._ran = True
        if not tells:
            self._stepped(call.images, self.steps, self.steps)
        return made

    def _stepped(self, images: int, steps: int, of: int | None = None) -> None:
        from ..engine import engine_of

        if of is None:
            # The timesteps are set only now; every one of them calls back, also the second half of a step of Heun's.
            of = loop_steps(getattr(self.pipe, "scheduler", None), self.steps)
        # How many steps of a stale strategy have been synchronous so far. A first call has changed the engine.
        log = engine_of(self.pipe).staleness
        self.report(StepDone(images, steps, of, log.summary() if log is not None else ""))

    def receipt(self, index: int, made: Made, arguments: Mapping[str, Any], **facts: Any) -> Receipt:
        """The receipt of picture ``index`` of the call that ran last; ``facts``: more of its fields."""
        every = {**self.facts, "pipeline": type(self.pipe).__name__, **facts}
        return receipt_of(self.job, index, made, arguments, every)


def _check_memory(job: PictureJob, device: torch.device) -> None:
    """Refuse a job that does not fit, before anything is read."""
    import torch

    from ..forecast.memory.check import check_memory
    from ..forecast.workload import workload_of
    from .loading import configuration_before

    quieten()
    info = find_model(job.model)
    guided = None if job.guidance is None or job.guidance > 1 else False
    pictures = max(job.call(number).images for number in range(job.calls))
    workload = workload_of(info, job.size, job.max_sequence_length, pictures, guided, job.frames)
    config = job.config if not isinstance(job.config, str) else lambda: configuration_before(info)
    dtype, limit = getattr(torch, job.dtype), job.memory_limit
    check_memory(info, config, dtype, device, workload, limit, offloaded=job.offload != "none")


def _share(job: PictureJob, mesh: Mesh | None) -> tuple[Mesh | None, str | None]:
    """The mesh by which ranks read only their share of the transformers, if they can; else why they cannot."""
    from .loading import why_whole

    # Samples of former receipts are of weights that are whole.
    if mesh is None or job.sampled or not mesh.config.cuts_weights:
        return None, None
    why = why_whole(find_model(job.model), job.variant)
    return (mesh, None) if why is None else (None, why)


def load(job: PictureJob, device: torch.device, mesh: Mesh | None = None) -> Any:
    """The job's pipeline, checked and quiet, with its adapters.

    Args:
        job: what is to be generated.
        device: where the transformers are to be; the other components are there too unless they are offloaded.
        mesh: each rank reads only its share of the transformers, for ``mesh.config``; None: every rank reads all.

    Raises:
        InputError: it cannot be loaded, or cannot do what the job asks.
    """
    import diffusers
    import torch

    from .files import load_adapters, load_controlnet, pipeline_for
    from .loading import dtype_option, whole_shapes
    from .schedulers import scheduler_named

    # Before the class is imported, which says what optional packages are missing.
    quieten()
    name = pipeline_for(job.pipeline_class, job.files, job.strength)
    kind = getattr(diffusers, name, None)
    # A pipeline with code of its own is known only once it is loaded.
    if isinstance(kind, type):
        check_call(job, name, inspect.signature(kind.__call__).parameters)
    other = kind if name != job.pipeline_class else None
    parts = load_controlnet(job.files, dtype_option(getattr(torch, job.dtype)))
    pipe = load_pipeline(job.model, job.name, job.dtype, None, job.variant, other, mesh, **parts)
    check_call(job, type(pipe).__name__, call_parameters(pipe))
    with whole_shapes(pipe, mesh) if mesh is not None else contextlib.nullcontext():
        load_adapters(pipe, job.files)
    if job.scheduler is not None:
        pipe.scheduler = scheduler_named(job.scheduler, type(pipe.scheduler).__name__, pipe.scheduler.config)
    return pipe.to(device) if job.offload == "none" else pipe


def load_pipeline(
    model: str,
    name: str,
    dtype: str,
    device: torch.device | str | None,
    variant: str | None = None,
    kind: type[Any] | None = None,
    mesh: Mesh | None = None,
    **components: Any,
) -> Any:
    """A diffusers pipeline on its device, without a progress bar of its own.

    Args:
        model: its folder.
        name: what the user calls it.
        dtype: of the weights, by name.
        device: None: the pipeline stays where it is loaded to.
        variant: of the weights' files.
        kind: class of the pipeline; default: the saved one.
        mesh: as for `load`.
        components: in the place of those that are saved with it.

    Raises:
        InputError: it cannot be loaded.
    """
    import torch

    from .loading import read_pipeline

    try:
        pipe = read_pipeline(find_model(model), None, mesh, getattr(torch, dtype), variant, kind, **components)
    except (MemoryError, InputError):
        raise
    except Exception as error:
        # Strangers' files: what is wrong with them can raise anything.
        said = " ".join(str(error).split())[:400] or type(error).__name__
        if isinstance(error, UnpicklingError):
            said = "a file of weights is a pickled program and not only tensors, and is not run"
        elif not isinstance(error, (OSError, ValueError, ImportError)):
            said = f"{type(error).__name__}: {said}"
        raise InputError(
            f"model {name!r} cannot be loaded ({said}); check its files, or save the pipeline again"
        ) from error
    if device is not None:
        pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def facts_of(
    config: ParallelConfig | Literal["auto"], pipe: Any, device: torch.device, share: Mesh | None, rank: int
) -> dict[str, Any]:
    """What a receipt says about weights and environment, of a pipeline that is not parallelised yet. Rank 0's."""
    from ..core.digests import weights_fingerprint
    from ..launch.hardware import environment
    from ..strategies.determinism import deterministic
    from .loading import fingerprint

    spread = None if share is None else fingerprint(pipe, share)
    if rank > 0:
        return {}
    reproducible = not isinstance(config, str) and config.reproducible
    # With the settings that are in force while the pipeline runs.
    with deterministic(device) if reproducible else contextlib.nullcontext():
        weights = spread or weights_fingerprint(pipe)
        return {"weights_digest": weights, "environment": environment(device), "device": device.type}


def facts_on_rank(pipe: Any) -> dict[str, Any]:
    """What a receipt says of a parallelised pipeline: weights, environment, ranks. Collective; rank 0's, else empty."""
    import torch.distributed as dist

    from ..engine import engine_of

    engine = engine_of(pipe)
    mesh, config = engine.mesh, engine.config
    share, rank = mesh if config.cuts_weights else None, dist.get_rank() if dist.is_initialized() else 0
    facts = facts_of(config, pipe, mesh.device, share, rank)
    return facts | {"config": config.model_dump(), "devices": config.world_size} if facts else {}


def made_of(output: Any) -> list[Made]:
    """The pictures of a pipeline's output, or the frames of its videos.

    Raises:
        InputError: it holds something else.
    """
    if hasattr(output, "images") and not any(isinstance(image, (list, tuple)) for image in output.images):
        return output.images
    if hasattr(output, "frames"):
        return [list(frames) for frames in output.frames]
    raise InputError(
        f"{type(output).__name__} holds neither images nor videos that can be written; call it from Python"
    )


def receipt_of(
    job: PictureJob, index: int, made: Made, arguments: Mapping[str, Any], facts: Mapping[str, Any]
) -> Receipt:
    """The receipt of picture or video ``index`` of a job.

    Args:
        made: the picture, or the video's frames.
        arguments: of the pipeline's call.
        facts: the fields that only the run knows.
    """
    call = job.call(job.call_of(index))
    image, video = (made[0], _about(job, made, arguments)) if isinstance(made, Sequence) else (made, {})
    asked = {name: getattr(job, name) for name, field in request_fields().items() if field.spelt is not None}
    asked |= {
        "prompt": job.prompts[call.prompt],
        "seed": job.seed + index,
        "steps": arguments["num_inference_steps"],
        "guidance": arguments.get("guidance_scale", 0.0),
        "width": image.width,
        "height": image.height,
        "frames": None,
        "fps": None,
    }
    return Receipt(
        **asked | video,
        index=index,
        max_sequence_length=arguments.get("max_sequence_length"),
        model=job.name,
        dtype=job.dtype,
        versions=library_versions(),
        label=job.labels[call.prompt] if job.labels else None,
        together=call.images,
        files=[ReceiptFile(**asdict(file)) for file in job.files],
        variant=job.variant,
        offload=job.offload,
        scheduler=job.scheduler,
        **facts,
    )


def _about(job: PictureJob, frames: Sequence[Image], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the receipt of a video says beside that of a picture."""
    fps = next((arguments[name] for name in RATES if arguments.get(name)), job.fps or FPS)
    return {"frames": len(frames), "fps": float(fps), "frames_digest": frames_digest(frames)}


def device_of_rank() -> torch.device:
    """Where this rank computes: its GPU when the job's ranks talk over NCCL, else the CPU."""
    import torch
    import torch.distributed as dist

    from ..comm.backends import backend_of

    on_cuda = dist.is_available() and dist.is_initialized() and backend_of(None, "cuda") == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def quieten() -> None:
    """Let this process of ours show no loading bars, and warnings of libraries on the first rank alone.

    N ranks that all say the same tell the user nothing more. What one says and a user can act upon stays: weights that
    a file lacks, text that is cut off.
    """
    import diffusers
    import torch.distributed as dist
    import tqdm
    import transformers

    chatter_off()
    # Its own default is shared between processes, which we have no use for, and which Python's resource tracker
    # complains about when a rank is killed.
    tqdm.tqdm.set_lock(threading.RLock())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        if not first and f"{library.__name__.upper()}_VERBOSITY" not in os.environ:
            library.utils.logging.set_verbosity_error()

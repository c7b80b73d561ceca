"""A diffusers pipeline on ranks of this machine; the ranks stay between prompts."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from .host import lora_file
from .request import Made, Wanted, Watch

if TYPE_CHECKING:
    from ditmesh.extend import InputFile, LatentColours, PictureJob, RemotePipeline

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeshSettings:
    """The model, and the ranks to load it on.

    Attributes:
        model: folder, hub id, or an embedded model.
        devices: number of ranks; None: what the degrees multiply to.
        config: settings of `ParallelConfig` that were given.
        device: ``"auto"``, ``"cuda"`` or ``"cpu"``.
        dtype: of the weights, by name; None: as the command line has it.
        threads: of each rank; None: the cores shared out.
        variant: of the weights' files.
        stamp: changes when the model's files have been rewritten.
    """

    model: str
    devices: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    dtype: str | None = None
    threads: int | None = None
    variant: str | None = None
    stamp: str = ""


@dataclass
class _Opened:
    """Ranks with a pipeline, and the changes to it since it was loaded."""

    ranks: Any
    pipe: RemotePipeline
    # Class, and settings, of its own scheduler.
    scheduler: tuple[str, Mapping[str, Any]]
    colours: LatentColours | None
    # Other classes on the same components; which scheduler each has, None: its own.
    kinds: dict[str, RemotePipeline] = field(default_factory=dict)
    schedulers: dict[str, str | None] = field(default_factory=dict)
    # None: unknown.
    adapters: tuple[InputFile, ...] | None = ()
    # Of receipts; None: to be asked for.
    facts: dict[str, Any] | None = None


class MeshPipeline:
    """Generates on ranks of this machine, which are started when needed, also after `close`.

    Attributes:
        settings: what is loaded.
        owner: the node that created it; when the node is gone, these ranks may be ended.
    """

    def __init__(self, settings: MeshSettings, owner: Any) -> None:
        self.settings = settings
        self.owner = weakref.ref(owner)
        self._lock = threading.RLock()
        self._opened: _Opened | None = None
        self._release: Any = None

    @property
    def opened(self) -> bool:
        """Whether there are ranks."""
        return self._opened is not None and not self._opened.ranks.closed

    def open(self) -> None:
        """Start the ranks and load the pipeline, if needed.

        Raises:
            DitmeshError: the model, the configuration or the machine cannot do it; see `ditmesh.Ranks`.
        """
        with self._lock:
            self._ready()

    def close(self) -> None:
        """End the ranks, after a running request."""
        with self._lock:
            self._opened, release, self._release = None, self._release, None
            if release is not None:
                release()

    def generate(self, wanted: Wanted, watch: Watch) -> list[Made]:
        """Generate the images of a request.

        Raises:
            DitmeshError: it cannot be done; the ranks stay, unless one was lost.
            Exception: what ``watch`` raises, once all ranks have stopped at the end of a step.
        """
        from ditmesh.extend import IMAGE_ARGUMENTS, PipelineRunner

        given = {"image": wanted.image, "mask": wanted.mask}
        pictures = {IMAGE_ARGUMENTS[role]: picture.image for role, picture in given.items() if picture is not None}
        with self._lock:
            job, kind, size = self._job(wanted)
            opened = self._ready()
            pipe, facts = self._prepared(opened, job, kind)
            runner = PipelineRunner(pipe, kind=kind, facts=facts)
            made: list[Made] = []
            steps = _Steps(watch, job, kind, opened.colours, size)
            for number in range(job.calls):
                shown = {} if steps.callback is None else {"callback_on_step_end": steps.callback}
                pipe.set_progress_bar_config(disable=True, on_update=steps.update)
                prepared = runner.prepare(job, number, pictures, **shown)
                made += [
                    Made(tuple(one.frames), runner.receipt(prepared, place, one))
                    for place, one in enumerate(runner.run(prepared))
                ]
                steps.behind += 1
            return made

    def _ready(self) -> _Opened:
        """The ranks and the pipeline, restarted if a rank was lost."""
        if self._opened is not None and self._opened.ranks.closed:
            log.warning("the ranks of %s are gone; they are started again", self.settings.model)
            self.close()
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> _Opened:
        import torch

        import ditmesh
        from ditmesh.extend import latent_colours

        settings = self.settings
        world_size, config, kind = self._mesh()
        make_room(self)
        # ComfyUI's main module starts ComfyUI.
        ranks = ditmesh.Ranks(world_size, kind, settings.threads, import_main=False)
        try:
            dtype = getattr(torch, self._dtype(kind))
            pipe = ranks.load(settings.model, config or "auto", dtype=dtype, variant=settings.variant)
            own, colours = pipe.scheduler, ranks.run(latent_colours, pipe)[0]
        except BaseException:
            ranks.close()
            raise
        # Also when this object has no more references.
        self._release = weakref.finalize(self, ranks.close)
        return _Opened(ranks, pipe, (own.name, own.config), colours)

    def _mesh(self) -> tuple[int, Any, str]:
        """Number of ranks, their configuration (None: the engine chooses), and the type of device."""
        from ditmesh.extend import find_model, parallel_config, resolve_device

        heads = find_model(self.settings.model).heads
        world_size, config = parallel_config(self.settings.devices, None, self.settings.config, heads)
        return world_size, config, resolve_device(self.settings.device, world_size)  # type: ignore[arg-type]

    def _dtype(self, kind: str) -> str:
        return self.settings.dtype or ("bfloat16" if kind == "cuda" else "float32")

    def _job(self, wanted: Wanted) -> tuple[PictureJob, type[Any], tuple[int, int]]:
        """The request as a checked job, its pipeline class, and the images' size."""
        import diffusers

        from ditmesh import InputError
        from ditmesh.extend import (
            MOST_PIXELS,
            PER_CALL,
            InputFile,
            adapter,
            call_parameters,
            check_call,
            check_content,
            embedded_or,
            job_for,
            pipeline_for,
            size_of,
        )

        request, settings = wanted.request, self.settings
        world_size, config, device = self._mesh()
        info, steps, guidance, tokens = embedded_or(settings.model, request.steps, request.guidance)
        size = size_of(request)
        if size is None and wanted.image is not None:
            size = info.size_like(*wanted.image.image.size, prod(info.default_size or (1024, 1024)))
        width, height = size or info.default_size or (1, 1)
        files = [
            InputFile(role, picture.name, picture.digest)
            for role, picture in (("image", wanted.image), ("mask", wanted.mask))
            if picture is not None
        ]
        files += [adapter("lora", f"{lora_file(one.name)}:{one.scale!r}") for one in wanted.loras]
        sides = {} if size is None else {"width": width, "height": height}
        job = job_for(
            info,
            request.model_copy(update={"steps": steps, "guidance": guidance, **sides}),
            "",
            config=config or "auto",
            max_sequence_length=tokens,
            per_call=max(1, min(PER_CALL, MOST_PIXELS // (width * height))),
            dtype=self._dtype(device),
            files=tuple(files),
            variant=settings.variant,
            scheduler=wanted.scheduler,
        )
        check_content(job, info, world_size)
        name = pipeline_for(job.pipeline_class, job.files, job.strength)
        kind = getattr(diffusers, name, None)
        if not isinstance(kind, type):
            raise InputError(f"{name} is no pipeline of diffusers {diffusers.__version__}; call it from Python")
        check_call(job, name, call_parameters(kind))
        return job, kind, (width, height)

    def _prepared(self, opened: _Opened, job: PictureJob, kind: type[Any]) -> tuple[RemotePipeline, dict[str, Any]]:
        """The pipeline of a class with only the job's adapters and scheduler, and its facts for receipts."""
        from ditmesh.extend import ADAPTER_LOADERS, facts_on_rank, load_adapters, scheduler_named

        name = kind.__name__
        if name == opened.pipe.class_name:
            pipe = opened.pipe
        elif name in opened.kinds:
            pipe = opened.kinds[name]
        else:
            pipe = opened.kinds[name] = opened.pipe.as_class(name)
        adapters = tuple(file for file in job.files if file.role in ADAPTER_LOADERS)
        if adapters != opened.adapters:
            before, opened.adapters, opened.facts = opened.adapters, None, None
            if before != ():
                opened.pipe.unload_lora_weights()
            if adapters:
                opened.ranks.run(load_adapters, opened.pipe, adapters)
            opened.adapters = adapters
        if job.scheduler != opened.schedulers.get(name):
            opened.schedulers.pop(name, None)
            pipe.scheduler = scheduler_named(job.scheduler or opened.scheduler[0], *opened.scheduler)
            opened.schedulers[name] = job.scheduler
        if opened.facts is None:
            opened.facts = opened.ranks.run(facts_on_rank, opened.pipe)[0]
        return pipe, opened.facts


class _Steps:
    """Reports the pipeline's progress to the watcher, and shows the latents.

    Attributes:
        callback: of the pipeline's call; None: it takes none.
        behind: calls of the pipeline that are done.
    """

    def __init__(
        self, watch: Watch, job: PictureJob, kind: type[Any], colours: LatentColours | None, size: tuple[int, int]
    ) -> None:
        from ditmesh.extend import call_parameters

        self._watch, self._job, self._kind, self._colours, self._size = watch, job, kind, colours, size
        self._picture: Any = None
        self.behind = 0
        shown = colours is not None and watch.previews
        self.callback = self._step if shown and "callback_on_step_end" in call_parameters(kind) else None

    def _step(self, pipe: Any, index: int, timestep: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        self._watch.check()
        latents = tensors.get("latents")
        if latents is not None and self._colours is not None:
            # Latents can be packed in any way; a failed preview must not fail the image.
            with contextlib.suppress(Exception):
                self._picture = self._colours.picture(latents, *self._size)
        return {}

    def update(self, done: int, total: int | None) -> None:
        """A step is done."""
        total = max(total or done, 1)
        self._watch.step(self.behind * total + done, self._job.calls * total, self._picture)


# Pipelines that may have ranks. ComfyUI asks all nodes together to free memory.
_pipelines: weakref.WeakSet[MeshPipeline] = weakref.WeakSet()


def make_room(newcomer: MeshPipeline) -> None:
    """End the ranks of a node that is gone before ``newcomer`` starts its own."""
    for pipeline in list(_pipelines):
        if pipeline is not newcomer and pipeline.opened and pipeline.owner() is None:
            pipeline.close()
    _pipelines.add(newcomer)


def close_all() -> None:
    """End all ranks; the next prompt that needs some starts them again."""
    for pipeline in list(_pipelines):
        pipeline.close()

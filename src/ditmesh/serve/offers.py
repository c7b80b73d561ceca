"""Models that a server offers: their cards and limits, known before they are loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..config import ParallelConfig
from ..errors import InputError, did_you_mean
from ..generate.files import InputFile, check_roles
from ..generate.job import check_content, job_for
from ..generate.model_info import ModelInfo, find_model
from ..generate.receipt import Dtype
from ..request import FieldError, Offload
from .types import JobRequest, ModelCard

# Fields with another name in JSON.
FIELDS = {"batch": "n"}
# Of models that do not say: for a guess at the work.
STEPS, SIDE = 28, 1024


@dataclass(frozen=True)
class ModelSpec:
    """A model that ranks can load.

    Attributes:
        name: as clients call it.
        model: folder or hub id.
        config: parallel configuration; ``"auto"``: the engine chooses.
        loras: files or folders of adapters, by name.
        steps, guidance: of requests that do not say; None: the pipeline's own.
        text_tokens: longest prompt in tokens; None: the pipeline's own.
        check_memory: refuse to load the model if one image of its usual size does not fit.
        memory_limit: bytes that a rank may take; None: what its device has left.
        together: limit of the images in one call of the transformer.
        log_prompts: libraries may quote prompts in the log.
    """

    name: str
    model: str
    config: ParallelConfig | Literal["auto"] = "auto"
    dtype: Dtype = "float32"
    variant: str | None = None
    offload: Offload = "none"
    loras: Mapping[str, str] = field(default_factory=dict)
    together: int = 8
    steps: int | None = None
    guidance: float | None = None
    text_tokens: int | None = None
    check_memory: bool = True
    memory_limit: float | None = None
    log_prompts: bool = False


@dataclass
class ServedModel:
    """A model that the server offers.

    Attributes:
        card: what clients are told; filled in when the model is loaded.
        known: the card has been filled in.
    """

    spec: ModelSpec
    info: ModelInfo
    card: ModelCard
    known: bool = False

    @classmethod
    def of(cls, spec: ModelSpec) -> ServedModel:
        """Read a model's files. Raises `InputError`: there is no such model."""
        info = find_model(spec.model)
        width, height = info.default_size or (None, None)
        card = ModelCard(
            id=spec.name,
            created=int(time.time()),
            pipeline=info.pipeline_class,
            width=width,
            height=height,
            size_multiple=info.size_multiple,
            steps=spec.steps,
            guidance=spec.guidance,
            loras=list(spec.loras),
            labels=list(info.labels),
        )
        return cls(spec, info, card)

    def loaded(self, card: Mapping[str, Any]) -> None:
        """Complete the card with the facts that the ranks found."""
        own = {"id": self.card.id, "created": self.card.created, "loras": self.card.loras, "loaded": True}
        # Facts that the server has set stay.
        own |= {name: value for name in ("steps", "guidance") if (value := getattr(self.card, name)) is not None}
        self.card = ModelCard.model_validate({**self.card.model_dump(), **card, **own})
        self.known = True

    def check(self, request: JobRequest, devices: int) -> None:
        """Reject a request that the model cannot do, as far as its files and its card tell.

        Raises `InputError`: one sentence with the names of the request's fields.
        """
        if (request.width is None) != (request.height is None):
            raise InputError("width and height belong together; give both, or none for the model's own")
        # Without the input files: whether the pipeline accepts them is known only after loading.
        asked = request.model_copy(update={"strength": None, "frames": None, "fps": None, "seed": request.seed or 0})
        try:
            check_roles([InputFile(file.role, "", file.digest) for file in request.inputs], request.strength)
            check_content(job_for(self.info, asked, "", per_call=1, config=self.spec.config), self.info, devices)
        except FieldError as error:
            # The same checks serve the command line.
            raise InputError(error.spelled(lambda name: FIELDS.get(name, name.replace("-", "_")))) from None
        if request.frames is not None and self.info.frames_of_chunks:
            self.info.check_frames(request.frames)
        for lora in request.loras:
            if lora.name not in self.spec.loras:
                there = ", ".join(self.spec.loras) or "none"
                raise InputError(
                    f"lora {lora.name!r} is none of those that the server offers for {self.spec.name} ({there})"
                    f"{did_you_mean(lora.name, self.spec.loras)}"
                )
        if not self.known:
            return
        for file in request.inputs:
            if file.role not in self.card.inputs:
                takes = ", ".join(self.card.inputs) or "none"
                raise InputError(
                    f"{self.spec.name} takes no input of role {file.role!r} (it takes {takes}); leave it out"
                )
        check_output(request, self.card)

    def work(self, request: JobRequest) -> float:
        """Estimated work of one image, in steps × megapixels × frames."""
        side = request.width or self.card.width or SIDE, request.height or self.card.height or SIDE
        return (request.steps or self.card.steps or STEPS) * side[0] * side[1] / 1e6 * (request.frames or 1)


def check_output(request: JobRequest, card: ModelCard) -> None:
    """Reject a file format, or a number of frames, that the model does not generate: pipelines would change it.

    The server does so for a model that is loaded, and the ranks in any case: before, the card is not known.

    Raises:
        InputError: one sentence.
    """
    if (request.frames or request.fps) and not card.video:
        raise InputError(f"{card.id} generates images, not videos; leave frames and fps out")
    if request.format == ("jpeg" if card.video else "mp4"):
        made, use = ("videos", "mp4, png or webp") if card.video else ("images", "png, jpeg or webp")
        raise InputError(f"{card.id} makes {made}, which are no {request.format.upper()}; ask for format {use}")
    if request.frames is not None and card.video and (request.frames - 1) % card.frame_multiple:
        before = request.frames - (request.frames - 1) % card.frame_multiple
        raise InputError(
            f"frames={request.frames}: videos of {card.id} have 1 + a multiple of {card.frame_multiple} frames; use "
            f"{before} or {before + card.frame_multiple}"
        )

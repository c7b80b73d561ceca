"""Jobs, models and states as validated data for clients, the queue and the HTTP API, without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from ..request import LONGEST_PROMPT, MOST_STEPS, MOST_TOGETHER, FieldError, PictureRequest, parse_size

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
# A job with one of these statuses has ended.
ENDED: frozenset[Status] = frozenset({"succeeded", "failed", "cancelled"})

# A week, in milliseconds.
MOST_DEADLINE = 7 * 86_400_000

Format = Literal["png", "jpeg", "webp", "mp4"]
InputRole = Literal["image", "mask", "control", "ip-image"]


class Adapter(BaseModel):
    """A LoRA that the server offers under a name, and its scale."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=128)
    scale: FiniteFloat = 1.0


class Input(BaseModel):
    """An input image: sent as a data URL, or on the server already, which stores it under its SHA-256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: InputRole
    digest: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    data: str = Field(
        default="", exclude=True, repr=False, description="A data URL: `data:image/png;base64,…` (or jpeg, webp)"
    )
    scale: FiniteFloat = 1.0

    @model_validator(mode="after")
    def _check_source(self) -> Input:
        if bool(self.digest) == bool(self.data):
            raise ValueError("an input has either data or a digest; send one of them")
        return self


# "auto": the size of the input image, else the pipeline's default.
Size = Annotated[
    str,
    # Only described: `parse_size` reads it, as for the command line.
    Field(examples=["1024x1024"], json_schema_extra={"pattern": "^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"}),
]


class JobRequest(PictureRequest):
    """The request of a job: a `PictureRequest` for one of the server's models.

    Attributes:
        width, height: of an image's size of another shape than the input image's most pipelines stretch it.
        seed: None: the server takes one at random when it accepts the job, and writes it here.
        fps: whole frames a second.
        model: one of the server's; empty: its first.
        loras: adapters that are on for this job alone.
        inputs: input images.
        size: ``"1024x768"`` stands for width and height.
        priority: of jobs with the same key those of a higher one begin first.
        deadline_ms: milliseconds from its acceptance in which its results are wanted: of jobs with the same key and
            priority the one with the earliest deadline begins first, and pauses the others on its replica, as long as
            it can be in time. None: it is patient.
        previews: every how many steps a preview is made; 0: never.
        format: of the results; of videos ``"mp4"``, or an animated ``"png"`` (lossless) or ``"webp"``.
    """

    prompt: str = Field(min_length=1, max_length=LONGEST_PROMPT)
    n: int = Field(default=1, ge=1, le=MOST_TOGETHER)
    seed: int | None = Field(default=None, ge=0, lt=2**63 - MOST_TOGETHER)  # type: ignore[assignment]
    fps: int | None = Field(default=None, ge=1, le=240)  # type: ignore[assignment]
    model: str = Field(default="", max_length=256)
    loras: tuple[Adapter, ...] = Field(default=(), max_length=8)
    inputs: tuple[Input, ...] = Field(default=(), max_length=8)
    priority: int = Field(default=0, ge=-10, le=10)
    deadline_ms: int | None = Field(default=None, ge=1, le=MOST_DEADLINE)
    previews: int = Field(default=0, ge=0, le=MOST_STEPS)
    format: Format = "png"
    size: Size | None = Field(
        default=None, exclude=True, description="WIDTHxHEIGHT, in the place of `width` and `height`"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_size(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or not isinstance(size := fields.get("size"), str):
            return fields
        rest = {name: value for name, value in fields.items() if name != "size"}
        if size == "auto":
            return rest
        try:
            width, height = parse_size(size) or (None, None)
        except FieldError as error:
            raise FieldError("size", "{}", error.spelled(lambda _: "size")) from None
        if rest.get("width", width) != width or rest.get("height", height) != height:
            raise FieldError("size", "size {!r} contradicts width and height; leave one of them out", size)
        return rest | {"width": width, "height": height}


class JobImage(BaseModel):
    """One image of a job; ``url`` and the fields after it are set when it is done.

    Attributes:
        notes: what its client should know of it, sentences: that its prompt was cut.
    """

    index: int
    seed: int
    url: str | None = None
    width: int | None = None
    height: int | None = None
    receipt: dict[str, Any] | None = None
    notes: list[str] = Field(default_factory=list)


class JobError(BaseModel):
    """The reason why a job failed: a code for programs, and a message."""

    code: Literal["invalid_request", "rank_failed", "stalled", "out_of_memory", "no_space", "storage", "internal"]
    message: str


class Job(BaseModel):
    """A job as its owner sees it.

    Attributes:
        id: ``job_`` and 32 hexadecimal digits.
        created, started, finished, expires: seconds since 1970; ``expires``: when its results are deleted.
        position: number of jobs before it while it is queued, from 0.
        step, steps: denoising steps of all its images that are done, and that there are.
        eta: seconds until it is done, while it runs.
        attempt: from 1; ranks that fail in the middle of a job begin it again once.
    """

    id: str
    object: Literal["job"] = "job"
    status: Status
    request: JobRequest
    created: float
    started: float | None = None
    finished: float | None = None
    expires: float | None = None
    position: int | None = None
    step: int = 0
    steps: int | None = None
    eta: float | None = None
    attempt: int = 1
    images: list[JobImage] = Field(default_factory=list)
    error: JobError | None = None


EventName = Literal[
    "queued", "started", "step", "preview", "frames", "image", "paused", "restarted", "succeeded", "failed", "cancelled"
]


class Event(BaseModel):
    """An event of a job; the last event has the name of its final status.

    Attributes:
        id: from 1, in order; a client that lost its connection goes on after the last it has seen.
        data: ``queued`` {position}; ``started`` {attempt}; ``step`` {image, step, steps, eta, batch};
            ``preview`` {image, step, width, height, b64_json} (a JPEG); ``frames`` {image, part, first, count, url} (a
            file of the next frames of a video that is drawn chunk by chunk); ``image`` a `JobImage`; ``paused``
            {reason}; ``restarted`` {attempt, reason}; the last: the whole `Job`.
    """

    id: int
    event: EventName
    data: dict[str, Any]


class ModelCard(BaseModel):
    """A model that the server offers: OpenAI's fields, and those that a form needs.

    Attributes:
        frames, fps: of videos that do not say; frame_multiple: a video has 1 + a multiple of these frames.
        batching: whether steps of several requests run as one batch; else ``why`` says why not.
        labels: class names of class-conditional models.
        lora_notes: of LoRAs that fit the model in part, what is missing, by name.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ditmesh"
    pipeline: str
    width: int | None = None
    height: int | None = None
    size_multiple: int = 1
    steps: int | None = None
    guidance: float | None = None
    video: bool = False
    frames: int | None = None
    fps: int | None = None
    frame_multiple: int = 1
    inputs: list[InputRole] = Field(default_factory=list)
    loras: list[str] = Field(default_factory=list)
    lora_notes: dict[str, str] = Field(default_factory=dict)
    labels: list[str] = Field(default_factory=list)
    loaded: bool = False
    batching: bool | None = None
    why: str = ""


class RankState(BaseModel):
    """One rank of a replica: its memory and latest step.

    Attributes:
        step_seconds, waiting_seconds: of its last step: in all, and waiting for other ranks.
        memory_bytes: resident on the CPU, allocated on CUDA.
    """

    rank: int
    device: str
    step_seconds: float = 0.0
    waiting_seconds: float = 0.0
    memory_bytes: int = 0


class ReplicaState(BaseModel):
    """One group of ranks.

    Attributes:
        mesh: degrees by axis, such as ``{"ulysses": 2}``.
        running: ids of the jobs under way.
        batch: rows of the transformer's latest call.
        restarts: how often its ranks were started again; message: why, the last time.
        calls: calls of the transformer since the start; rows: rows in all of them together.
        bytes: sent since the start, by axis.
    """

    name: str
    state: Literal["starting", "ready", "restarting", "stopped"]
    models: list[str] = Field(default_factory=list)
    strategy: str = ""
    mesh: dict[str, int] = Field(default_factory=dict)
    ranks: list[RankState] = Field(default_factory=list)
    running: list[str] = Field(default_factory=list)
    batch: int = 0
    calls: int = 0
    rows: int = 0
    synchronous_steps: int = 0
    drift: float | None = None
    bytes: dict[str, int] = Field(default_factory=dict)
    restarts: int = 0
    message: str = ""


class ServerState(BaseModel):
    """The server as a whole: ``GET /v1/server``."""

    version: str
    ready: bool
    queued: int
    running: int
    replicas: list[ReplicaState]

"""Messages between a replica's owner and its ranks: commands to all ranks, reports from rank 0. Pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..types import JobRequest, RankState

FailureCode = Literal["invalid_request", "out_of_memory", "internal"]


# --- commands: rank 0 takes them and passes them on, so that all ranks obey before the same step


@dataclass(frozen=True)
class Start:
    """Begin a task at the next step: one image or video of a job.

    Attributes:
        id: the job's id, ``/``, and the image's number.
        request: the job's; image ``index`` has seed ``request.seed + index``.
        files: input images on this machine, by digest.
        owner: of the job.
        left: seconds until its deadline, if that can be met; seconds: of the fastest image of its kind.
    """

    id: str
    request: JobRequest
    index: int
    files: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    left: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Cancel:
    """Stop a task at the next step, or forget it."""

    id: str


@dataclass(frozen=True)
class Stop:
    """Return immediately. This is the last command: the owner finishes or cancels running tasks first."""


Command = Start | Cancel | Stop


# --- reports


@dataclass(frozen=True)
class ModelReady:
    """A model is loaded: its card's fields, and the mesh in force."""

    name: str
    card: Mapping[str, Any]
    mesh: Mapping[str, int]
    strategy: str


@dataclass(frozen=True)
class ModelFailed:
    """A model cannot be loaded; the ranks end."""

    name: str
    message: str


@dataclass(frozen=True)
class TaskStepped:
    """A task has ended its denoising step number ``step``, from 1, in a batch of ``batch`` rows."""

    id: str
    step: int
    steps: int
    batch: int


@dataclass(frozen=True)
class Preview:
    """A small JPEG preview of the latents."""

    id: str
    step: int
    width: int
    height: int
    jpeg: bytes


@dataclass(frozen=True)
class Frames:
    """Frames of a task's video, ``count`` from ``first`` on, as a file in the requested format; ``part``: from 0."""

    id: str
    part: int
    first: int
    count: int
    data: bytes


@dataclass(frozen=True)
class Finished:
    """A task's image: the file's bytes in the requested format, with its receipt if the format can hold one."""

    id: str
    data: bytes
    width: int
    height: int
    receipt: Mapping[str, Any]


@dataclass(frozen=True)
class TaskFailed:
    """A task has failed; the ranks continue."""

    id: str
    code: FailureCode
    message: str


@dataclass(frozen=True)
class Cancelled:
    """A task was stopped, having done ``step`` steps."""

    id: str
    step: int


@dataclass(frozen=True)
class Beat:
    """The ranks are alive; sent after every step, and every second without one.

    Attributes:
        running: ids of tasks under way.
        batch: rows of the latest call of a transformer.
        calls, rows: of transformers since the start.
        bytes: sent since the start, by axis.
    """

    running: tuple[str, ...]
    batch: int
    calls: int
    rows: int
    ranks: tuple[RankState, ...]
    bytes: Mapping[str, int]
    synchronous_steps: int = 0
    drift: float | None = None


Message = ModelReady | ModelFailed | TaskStepped | Preview | Frames | Finished | TaskFailed | Cancelled | Beat

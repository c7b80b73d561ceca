"""Settings of a server: limits of requests, behaviour of the API, ranks, and storage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

# Host names by which a browser on this machine reaches the server.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LimitOption(NamedTuple):
    """The command line's option for a setting.

    Attributes:
        help: of its option.
        form: of its value.
        least: the smallest one.
        unit: the factor to the setting's own unit.
    """

    help: str
    form: str | None = None
    least: float = 1
    unit: int = 1


class ApiSettings(BaseModel):
    """Limits and behaviour of the HTTP API.

    Attributes:
        keys: file of hashed keys (`keys.Keys`); None: any client may ask.
        hosts: names under which the server answers (the ``Host`` header, without the port); empty: any.
        cors: origins of other sites with pages that may call the API.
        max_pixels: of a result, width times height; of videos that of one frame.
        max_steps, max_images, max_prompt: of a request; the last in characters, also of the negative prompt.
        max_body: bytes of a request's body.
        max_input_pixels: of an input image.
        keep_alive: seconds of silence after which a stream says that it is alive.
        state_interval: seconds between two states of a stream of server states, at least.
        retry_after: seconds after which a client of a server that is not ready may ask again.
        log_prompts: prompts are written into the log.
        page: folder of the web page; None: there is none.
        aliases: other names of models, such as those that front ends for OpenAI's API ask for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: Path | None = None
    hosts: tuple[str, ...] = LOOPBACK
    cors: tuple[str, ...] = ()
    max_pixels: Annotated[int, LimitOption("Limit the pixels of an image.")] = Field(default=2048 * 2048, ge=1)
    max_steps: Annotated[int, LimitOption("Limit the steps of an image.")] = Field(default=200, ge=1)
    max_images: Annotated[int, LimitOption("Limit the images of a job.")] = Field(default=16, ge=1)
    max_frames: Annotated[int, LimitOption("Limit the frames of a video.")] = Field(default=257, ge=1)
    max_prompt: Annotated[int, LimitOption("Limit the characters of a prompt.")] = Field(default=10_000, ge=1)
    max_body: Annotated[int, LimitOption("Limit the size of a request.", "MIB", unit=2**20)] = Field(
        default=32 * 2**20, ge=1
    )
    max_connections: Annotated[int, LimitOption("Limit the connections of all clients together.", least=8)] = Field(
        default=1024, ge=8
    )
    max_input_pixels: int = Field(default=2**24, ge=1)
    keep_alive: float = Field(default=15.0, gt=0)
    state_interval: float = Field(default=0.25, gt=0)
    retry_after: float = Field(default=5.0, gt=0)
    log_prompts: bool = False
    page: Path | None = Path(__file__).with_name("page")
    aliases: Mapping[str, str] = Field(default_factory=dict)


class ServiceSettings(BaseModel):
    """Settings of a `Service`: ranks, models, and stored results.

    Attributes:
        devices: ranks of each replica.
        replicas: number of groups of ranks.
        device, threads, timeout: as of `RankPool`; ``threads`` default: all cores shared out to all ranks.
        launcher: by name; see `launch.launcher`. It has to be `Conversing`.
        max_queue, max_per_owner: images that wait, of all keys and of one.
        max_batch: tasks that a replica runs at a time.
        keep: seconds for which results are kept.
        max_disk: bytes of all results and inputs; the oldest ended jobs are forgotten early where it takes that.
        reserve: bytes of the disk that have to be free for a job to be accepted.
        stall: seconds after which ranks are given up: without a message while they are idle, without a step or anything
            else done while they work; where steps take long, as long as four of the slowest.
        load: the same without a message while they start or load a model.
        grace: seconds that jobs under way have when the server stops.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: int = Field(default=1, ge=1)
    replicas: int = Field(default=1, ge=1)
    device: str = "auto"
    threads: int | None = None
    timeout: float = 600.0
    launcher: str | None = None
    max_queue: Annotated[int, LimitOption("Limit the images that wait.")] = 1000
    max_per_owner: int = 250
    max_batch: Annotated[int, LimitOption("Limit the images in one call of the model.")] = Field(default=8, ge=1)
    keep: Annotated[float, LimitOption("Keep results for so long.", "HOURS", 0.001, 3600)] = 86400.0
    max_disk: Annotated[
        float, LimitOption("Limit the space of results and inputs on the disk.", "GIB", 0.001, 2**30)
    ] = 10.0 * 2**30
    reserve: int = 64 * 2**20
    stall: Annotated[float, LimitOption("Start ranks again after so long without a step.", "SECONDS")] = 60.0
    load: float = 1800.0
    grace: Annotated[
        float, LimitOption("Let images under way end for so long when the server stops.", "SECONDS", 0)
    ] = 30.0

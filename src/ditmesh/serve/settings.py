"""Settings of the HTTP side: what clients may ask for, and how they are answered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

# Names that a browser on this machine calls it by.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ApiSettings(BaseModel):
    """Limits and behaviour of the HTTP API.

    Attributes:
        keys: file of hashed keys (`keys.Keys`); None: any client may ask.
        hosts: names under which the server answers (the ``Host`` header, without the port); empty: any.
        cors: origins of other sites whose pages may call the API.
        max_pixels: of a result, width times height; of videos that of one frame.
        max_frames: of a video.
        max_steps, max_images, max_prompt: of a request; the last in characters, also of the negative prompt.
        max_body: bytes of a request's body.
        max_connections: of all clients together, at a time.
        max_input_pixels: of an input picture.
        rate: jobs a minute that a key (without keys: an address) may submit; 0: any number.
        cancel_on_disconnect: a client of the OpenAI endpoints that goes away cancels its job.
        come_back: seconds for which a job of a request with an ``Idempotency-Key`` goes on without its client.
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
    max_pixels: int = Field(default=2048 * 2048, ge=1)
    max_frames: int = Field(default=257, ge=1)
    max_steps: int = Field(default=200, ge=1)
    max_images: int = Field(default=16, ge=1)
    max_prompt: int = Field(default=10_000, ge=1)
    max_body: int = Field(default=32 * 2**20, ge=1)
    max_connections: int = Field(default=1024, ge=8)
    max_input_pixels: int = Field(default=2**24, ge=1)
    rate: float = Field(default=0.0, ge=0)
    cancel_on_disconnect: bool = True
    come_back: float = Field(default=10.0, ge=0)
    keep_alive: float = Field(default=15.0, gt=0)
    state_interval: float = Field(default=0.25, gt=0)
    retry_after: float = Field(default=5.0, gt=0)
    log_prompts: bool = False
    page: Path | None = Path(__file__).with_name("page")
    aliases: Mapping[str, str] = Field(default_factory=dict)

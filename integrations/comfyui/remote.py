"""Generation on a ditmesh server."""

from __future__ import annotations

import base64
import contextlib
import io
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .request import Made, Wanted, Watch

if TYPE_CHECKING:
    from ditmesh import Client
    from ditmesh.extend import Event, Job, Receipt

# Seconds between checks whether ComfyUI wants to stop the prompt.
LOOK = 0.1


@dataclass(frozen=True)
class ServerPipeline:
    """Generates on a server.

    Attributes:
        url: of the server.
        key: of its API; None: it wants none.
        model: one of its models; empty: its first.
        priority: requests of a higher one go first.
    """

    url: str
    key: str | None
    model: str
    priority: int = 0

    def generate(self, wanted: Wanted, watch: Watch) -> list[Made]:
        """Generate the images of a request.

        Raises:
            DitmeshError: the server is not there, refuses it, or has failed.
            Exception: what ``watch`` raises; the server stops at the next step.
        """
        from ditmesh import Client, DitmeshError

        options = self._options(wanted, watch.previews)
        with Client(self.url, self.key or "") as client:
            job = client.submit(wanted.request.prompt, **options)
            try:
                done = _followed(client, job, watch)
            except BaseException:
                with contextlib.suppress(DitmeshError):
                    client.cancel(job.id)
                raise
            images: list[Any] = client.images(done)
        return [Made((image,), _receipt(image.receipt, wanted)) for image in images]

    def _options(self, wanted: Wanted, previews: bool) -> dict[str, Any]:
        """The request as `Client.submit` takes it."""
        from ditmesh import InputError

        if wanted.request.frames is not None:
            raise InputError("frames: this node takes no video from a server; set frames to 0, or choose a mesh here")
        loras = {one.name: one.scale for one in wanted.loras}
        if wanted.scheduler is not None:
            raise InputError(
                f"scheduler {wanted.scheduler}: a server uses its models' own; choose the model's own, or a mesh here"
            )
        if len(loras) < len(wanted.loras):
            twice = next(name for name in loras if sum(one.name == name for one in wanted.loras) > 1)
            raise InputError(f"LoRA {twice!r} stands twice on the stack; leave one out")
        return wanted.request.model_dump(exclude={"prompt"}, exclude_none=True) | {
            "model": self.model or None,
            "loras": loras or None,
            "image": None if wanted.image is None else wanted.image.png,
            "mask": None if wanted.mask is None else wanted.mask.png,
            "priority": self.priority or None,
            "previews": 1 if previews else None,
        }


def _followed(client: Client, job: Job, watch: Watch) -> Job:
    """Wait for a job and report it to ``watch``; returns the finished job.

    A thread listens, which may hear nothing for long: the wish to stop is not to wait for it.
    """
    heard: queue.SimpleQueue[Event | Exception | Job] = queue.SimpleQueue()

    def listen() -> None:
        try:
            heard.put(client.wait(job.id, heard.put))
        except Exception as error:
            # Pass on any exception, or the caller would wait forever. After the client is closed it is not read.
            heard.put(error)

    listener = threading.Thread(target=listen, name="ditmesh-events", daemon=True)
    listener.start()
    steps, total, picture = [0] * job.request.n, 0, None
    while True:
        watch.check()
        try:
            said = heard.get(timeout=LOOK)
        except queue.Empty:
            continue
        if isinstance(said, Exception):
            raise said
        if isinstance(said, type(job)):
            return said
        if said.event == "step":
            steps[said.data["image"]], total = said.data["step"], said.data["steps"] * len(steps)
        elif said.event == "preview":
            picture = _preview(said.data)
        elif said.event == "restarted":
            steps = [0] * len(steps)
        if total and said.event in ("step", "preview"):
            watch.step(sum(steps), total, picture)


def _preview(data: Mapping[str, Any]) -> Any:
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(data["b64_json"])))
    picture.load()
    return picture


def _receipt(receipt: Receipt | None, wanted: Wanted) -> Receipt:
    """A server's receipt, with the local names of the input images."""
    from ditmesh import InputError

    if receipt is None:
        raise InputError("the server gave no receipt with its picture; use a server of this version of ditmesh")
    names = {one.digest: one.name for one in (wanted.image, wanted.mask) if one is not None}
    files = [one.model_copy(update={"path": names.get(one.digest, one.path)}) for one in receipt.files]
    return receipt.model_copy(update={"files": files})

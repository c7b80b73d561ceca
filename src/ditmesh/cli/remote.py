"""`ditmesh generate --server URL`: generation on a server, with the same files and output."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import DitmeshError, InputError
from ..generate.outputs import Picture
from ..report.formatting import count
from ..serve.types import ENDED
from .options import InputOptions, PictureOptions
from .show import bar
from .values import read_prompts

if TYPE_CHECKING:
    from ..client import Client
    from ..generate.receipt import Receipt
    from ..serve.types import Event, Job

# Options of `generate` that a server supports; its owner sets all others.
TAKEN = {
    *("prompts", "prompts_file", "model", "steps", "guidance", "negative", "size", "seed", "num_images"),
    *("frames", "fps"),
    *("image", "strength", "mask", "control", "ip_image", "lora"),
    *("out", "overwrite", "as_json", "json_full", "server"),
}
# Images of a job; seconds for which a full server is asked again.
TOGETHER, PATIENCE = 8, 3600.0


def check_options(context: typer.Context) -> None:
    """Reject options that would be ignored.

    Raises:
        InputError: naming them.
    """
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in TAKEN
        and (source := context.get_parameter_source(parameter.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]
    if "--video" in given:
        raise InputError("--video: servers accept input images, but no input videos; leave --server out")
    if given:
        raise InputError(f"{', '.join(given)}: with --server the server decides this; give it to ditmesh serve")


def generate_on(
    server: str,
    prompts: list[str] | None,
    model: str | None,
    pictures: PictureOptions,
    inputs: InputOptions,
    out: str,
    overwrite: bool,
) -> dict[str, Any]:
    """Generate on a server; the result has the form of `ditmesh generate`.

    ``load_seconds`` is the waiting time of the first job.

    Raises:
        InputError: the server refuses it, or is not there.
    """
    from ..client import Client
    from ..generate.job import check_folder

    asked = read_prompts(prompts, pictures.prompts_file)
    check_folder(out)
    fields = _fields(model, pictures, inputs)
    first, total = fields.pop("seed"), len(asked) * pictures.num_images
    began = time.perf_counter()
    # One job for a few images: each image is the same as alone.
    parts = [
        (prompt * pictures.num_images + start, asked[prompt], min(TOGETHER, pictures.num_images - start))
        for prompt in range(len(asked))
        for start in range(0, pictures.num_images, TOGETHER)
    ]
    with Client(server, patience=PATIENCE) as client, bar() as progress:
        task = progress.add_task("waiting", total=None)

        def tell(event: Event) -> None:
            if event.event == "queued" and event.data["position"]:
                progress.update(task, description=f"waiting, {count(event.data['position'], 'job')} before")
            elif event.event == "step":
                progress.update(task, description="generating", total=event.data["steps"] * total, advance=1)

        written, jobs = _written(client, parts, first, fields, out, overwrite, tell)
    receipt = written[0][1]
    starts = [job.started or job.created for job in jobs]
    return {
        "images": [{"path": path, **one.model_dump(mode="json")} for path, one in written],
        "out": out,
        "config": receipt.config,
        "devices": receipt.devices,
        "device": receipt.device,
        "threads": int((receipt.environment or {}).get("threads", 0)) or None,
        "load_seconds": starts[0] - jobs[0].created,
        "seconds": max(job.finished or 0.0 for job in jobs) - min(starts),
        "total_seconds": time.perf_counter() - began,
        "server": client.url,
    }


def _fields(model: str | None, pictures: PictureOptions, inputs: InputOptions) -> dict[str, Any]:
    """The options that are the same for all jobs, and the first seed."""
    asked = pictures.fields()
    if (fps := asked.get("fps")) is not None:
        if fps != int(fps):
            raise InputError(f"--fps {fps:g}: servers take whole frames a second; use --fps {round(fps)}")
        asked["fps"] = int(fps)
    width, height = asked.pop("width"), asked.pop("height")
    del asked["n"]
    loras = {}
    for text in inputs.lora or ():
        name, colon, scale = text.rpartition(":")
        try:
            loras[name if colon else text] = float(scale) if colon else 1.0
        except ValueError:
            raise InputError(f"--lora {text!r}: the scale {scale!r} is not a number; write it as NAME:0.8") from None
    return asked | {
        "model": model,
        "size": None if width is None else (width, height),
        "strength": inputs.strength,
        "image": inputs.image,
        "mask": inputs.mask,
        "control": inputs.control,
        "ip_image": inputs.ip_image,
        "loras": loras or None,
    }


def _written(
    client: Client,
    parts: Sequence[tuple[int, str, int]],
    seed: int,
    fields: dict[str, Any],
    out: str,
    overwrite: bool,
    tell: Any,
) -> tuple[list[tuple[str, Any]], list[Job]]:
    """Submit all jobs, and wait for one after the other; returns paths and receipts of the files, and the jobs."""
    written: list[tuple[str, Any]] = []
    jobs: list[Job] = []
    try:
        for index, prompt, images in parts:
            jobs.append(client.submit(prompt, n=images, seed=seed + index, **fields))
        for place, (index, _, _) in enumerate(parts):
            jobs[place] = client.wait(jobs[place].id, tell)
            written += _files(client, jobs[place], index, out, overwrite)
    except BaseException:
        for job in jobs:
            if job.status not in ENDED:
                with contextlib.suppress(DitmeshError):
                    client.cancel(job.id)
        raise
    return written, jobs


def _files(client: Client, job: Job, index: int, out: str, overwrite: bool) -> Iterator[tuple[str, Receipt]]:
    """Write the results of a succeeded job, the first with number ``index``; returns paths and receipts."""
    from ..generate.receipt import PNG_KEYWORD, Receipt, copy_to_free_name, write_free
    from ..generate.run import file_name
    from ..generate.video import copy_mp4
    from ..media.videos import check_video_library

    receipts = [Receipt.model_validate(one.receipt) for one in job.images]
    named = [
        (
            receipt.model_copy(update={"index": index + place}),
            Path(out) / file_name(index + place, receipt.prompt, receipt.seed, receipt.frames is not None),
        )
        for place, receipt in enumerate(receipts)
    ]
    if all(receipt.frames is None for receipt in receipts):
        for image, (receipt, path) in zip(client.images(job), named, strict=True):
            yield str(write_free(Picture(image), path, receipt, overwrite)), receipt
        return
    check_video_library()
    for place, (receipt, path) in enumerate(named):
        with tempfile.TemporaryDirectory(prefix="ditmesh-video-") as folder:
            source = Path(folder) / path.name
            copy_mp4(client.file(job.id, place), source, job.id, {PNG_KEYWORD: receipt.model_dump_json()})
            yield str(copy_to_free_name(source, path, overwrite)), receipt

"""`ditmesh replay`: generate an image again from its receipt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..config import ParallelConfig
from ..errors import InputError
from ..generate.outputs import Picture
from ..generate.video import is_video
from ..launch import default_threads, guarded_folder, launcher, physical_cores, resolve_device
from ..report.report import Report, StyledText
from .generate import progress
from .options import AsJson, Device, Devices, Overwrite, Threads, Timeout, common_option, with_groups
from .show import emit
from .values import fetched
from .values import parse_config as config_of_words

if TYPE_CHECKING:
    from ..generate.job import Generated, PictureJob
    from ..generate.receipt import Receipt
    from ..generate.replay import Replay

# Maximum number of CPU ranks that a receipt may start, whatever the number of cores.
UNASKED = 8


@with_groups
def replay(
    image: Annotated[
        Path, typer.Argument(metavar="IMAGE.png", help="Generate this image or video (MP4) again from its receipt.")
    ],
    devices: Devices = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help='Use another configuration: words such as "ulysses=2", or a YAML file.',
            show_default="the receipt's",
        ),
    ] = None,
    model: Annotated[
        str | None,
        common_option("--model", "-m", help="Load this model: folder or hub id.", show_default="the receipt's"),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    timeout: Timeout = 600.0,
    out: Annotated[
        str, common_option("--out", "-o", metavar="DIR", help="Write the new image into this folder.")
    ] = "replayed",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Generate an image or video again from its receipt, compare the pixels, and report differences.

    Ranks, type of device and threads are those of the receipt where nothing else is said and they are there. A model
    that the receipt names is fetched from a hub only when --model says so, too.

    An image of reproducible mode has the same pixels again, on any number of devices, where nothing else that
    decides bits has changed; exits with code 1 when it has not. Any other image is compared, and nothing is promised.

    [bold]Example[/bold]

    ditmesh replay images/0000-a-red-fox-seed0.png --devices 1
    """
    from ..generate.job import check_folder, check_job
    from ..generate.receipt import read_receipt
    from ..generate.replay import job_of, place_of, receipt_config, receipt_model
    from ..resizing import resized

    was = read_receipt(image)
    if was.frames is not None and not is_video(image):
        raise InputError(f"{str(image)!r} is the strip of a video; give the MP4 next to it")
    info = receipt_model(was, model)
    own = receipt_config(was)
    chosen = config_of_words(config) if config is not None else None
    kind, there = _where(was, device, devices or (chosen.world_size if chosen else was.devices), devices, chosen)
    chosen = chosen or resized(own, there, keep="strategy", heads=info.heads)
    check_folder(out)
    with guarded_folder("ditmesh-replay-") as folder:
        job = job_of(was, info, chosen, folder, timeout, image.parent)
        check_job(job, info, there)
        number = threads or _threads(was, there, kind)
        pictures, sampled = _generated(fetched(job, info), there, kind, number)
        again = pictures[place_of(was, chosen)]
        path, found = _compared(image, was, again, sampled, Path(out), overwrite)
    result = {
        "image": str(image),
        "replayed": str(path),
        **found.as_data(),
        "devices": there,
        "device": kind,
        "threads": number,
        "config": chosen.model_dump(mode="json"),
        "seconds": again.receipt.seconds,
    }
    emit(result, as_json, _say)
    if found.promised and not found.equal:
        raise typer.Exit(1)


def _generated(
    job: PictureJob, devices: int, kind: Literal["cpu", "cuda"], threads: int
) -> tuple[list[Generated], str | None]:
    """The images of a job, and the sampled weights' digest if the ranks reported it."""
    from ..generate.run import generate

    with (
        launcher(None, devices, kind, threads, job.timeout) as ranks,
        progress(job, "generating") as (report, pictures, facts),
    ):
        ranks.run(generate, job, on_message=lambda _, message: report(message))
    return pictures, facts.get("sampled")


def _compared(
    image: Path, was: Receipt, again: Generated, sampled: str | None, out: Path, overwrite: bool
) -> tuple[Path, Replay]:
    """The path of the new image, and its differences."""
    from ..generate.receipt import copy_to_free_name, write_free
    from ..generate.replay import compare_replay

    before, after = read_media(image), read_media(again.path)
    name = out / f"{image.stem}-replayed{Path(again.path).suffix}"
    if was.frames is None:
        path = write_free(Picture(after), name, again.receipt, overwrite)
    else:
        path = copy_to_free_name(again.path, name, overwrite)
    return path, compare_replay(before, after, was, again.receipt, sampled)


def read_media(path: str | Path) -> Any:
    """An image, or the frames of a video."""
    from PIL import Image

    from ..media.videos import read_frames

    if is_video(path):
        return read_frames(path, str(path))
    with Image.open(path) as image:
        image.load()
        return image


def _where(
    was: Receipt, device: Device, wanted: int, devices: int | None, config: Any
) -> tuple[Literal["cpu", "cuda"], int]:
    """The device type and number of ranks: as in the receipt if possible."""
    import torch

    if config is not None:
        config.check_world_size(wanted)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if was.device == "cuda" and gpus else "cpu"
    if devices is None and config is None:
        if device == "cuda" and 0 < gpus < wanted:
            wanted = gpus
        limit = max(UNASKED, physical_cores())
        if device == "cpu" and wanted > limit:
            raise InputError(
                f"the receipt names {wanted} ranks, and this machine has {physical_cores()} cores; say how many with "
                "--devices"
            )
    return resolve_device(device, wanted), wanted


def _threads(was: Receipt, devices: int, kind: Literal["cpu", "cuda"]) -> int:
    said = (was.environment or {}).get("threads", "")
    if said.isdigit() and 0 < int(said) <= physical_cores():
        return int(said)
    return default_threads(devices, kind)


def _say(result: dict[str, Any]) -> Report:
    from ..generate.replay import Change

    report = Report()
    report.text(result["replayed"])
    config = ParallelConfig(**result["config"]).describe()
    report.text(f"generated again with {config} on {result['device']} in {result['seconds']:.2f} s")
    if result["equal"]:
        report.text(StyledText("the same pixels", "good"), ", as promised" if result["promised"] else "")
    elif result["largest_difference"] is None:
        report.text(StyledText("an image of another size", "bad"))
    else:
        # The frames may differ by less than compression preserves.
        ratio = " in the files" if result["psnr"] is None else f" ({result['psnr']:.1f} dB)"
        said = (
            f"{result['differing_pixels']:.1%} of the pixels differ, by at most {result['largest_difference']} of 255"
        )
        report.text(
            StyledText(f"{said}{ratio}", "bad" if result["promised"] else "unsure"),
            ", though the same ones were promised" if result["promised"] else "",
        )
    report.points([f"changed: {Change(**change).describe()}" for change in result["changes"]])
    if not result["changes"] and not result["equal"] and not result["promised"]:
        report.text("nothing that is known has changed; only reproducible mode promises the same pixels")
    return report

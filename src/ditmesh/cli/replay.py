"""`ditmesh replay`: generate an image again from its receipt."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import ParallelConfig
from ..errors import InputError
from ..launch import default_threads, guarded_folder, launcher, physical_cores, resolve_device
from ..report.report import Report, StyledText
from .generate import generated
from .options import AsJson, Device, Devices, Overwrite, Threads, Timeout, common_option, with_groups
from .show import emit
from .values import fetched, parse_config

if TYPE_CHECKING:
    from ..generate.receipt import Receipt

# Maximum number of CPU ranks that a receipt may start, whatever the number of cores.
UNASKED = 8

ImageArgument = Annotated[
    Path, typer.Argument(metavar="IMAGE.png", help="Generate this image or video (MP4) again from its receipt.")
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="CONFIG",
        help='Use another configuration: words such as "ulysses=2", or a YAML file.',
        show_default="the receipt's",
    ),
]
Model = Annotated[
    str | None, common_option("--model", "-m", help="Load this model: folder or hub id.", show_default="the receipt's")
]
Out = Annotated[str, common_option("--out", "-o", metavar="DIR", help="Write the new image into this folder.")]


@with_groups
def replay(
    image: ImageArgument,
    devices: Devices = None,
    config: Config = None,
    model: Model = None,
    device: Device = "auto",
    threads: Threads = None,
    timeout: Timeout = 600.0,
    out: Out = "replayed",
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
    from ..generate.receipt import copy_to_free_name, read_receipt
    from ..generate.replay import compare_replay, drawn_alone, job_of, pixels_of, receipt_config, receipt_model
    from ..generate.video import is_video
    from ..resizing import resized

    was = read_receipt(image)
    if was.frames is not None and not is_video(image):
        raise InputError(f"{str(image)!r} is an image with the receipt of a video; give the MP4")
    info = receipt_model(was, model)
    own, chosen = receipt_config(was), parse_config(config) if config is not None else None
    kind, count = _ranks(was, device, devices, chosen)
    chosen = chosen or resized(own, count, info.heads)
    check_folder(out)
    with guarded_folder("ditmesh-replay-") as folder:
        job = job_of(was, info, chosen, folder, timeout, image.parent)
        check_job(job, info, count)
        recorded = (was.environment or {}).get("threads", "")
        fits = recorded.isdigit() and 0 < int(recorded) <= physical_cores()
        threads = threads or (int(recorded) if fits else default_threads(count, kind))
        with launcher(None, count, kind, threads, job.timeout) as ranks:
            images, _ = generated(fetched(job, info), ranks)
        again = images[0 if drawn_alone(was, chosen) else was.place]
        name = Path(out) / f"{image.stem}-replayed{Path(again.path).suffix}"
        path = copy_to_free_name(again.path, name, overwrite)
    replayed = compare_replay(pixels_of(image), pixels_of(path), was, again.receipt)
    result = {"image": str(image), "replayed": str(path), **asdict(replayed)}
    result |= {"devices": count, "device": kind, "threads": threads, "config": chosen.model_dump(mode="json")}
    emit(result | {"seconds": again.receipt.seconds}, as_json, _say)
    if replayed.promised and not replayed.equal:
        raise typer.Exit(1)


def _ranks(was: Receipt, device: Device, devices: int | None, config: ParallelConfig | None) -> tuple[str, int]:
    """The device type and number of ranks: as in the receipt if possible."""
    import torch

    count = devices or (was.devices if config is None else config.world_size)
    if config is not None:
        config.check_world_size(count)
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if device == "auto" and not (was.device != "cpu" and gpus):
        device = "cpu"
    if devices is None and config is None:
        if device != "cpu" and gpus:
            count = min(count, gpus)
        if device == "cpu" and count > max(UNASKED, physical_cores()):
            raise InputError(
                f"the receipt names {count} ranks, and this machine has {physical_cores()} cores; say how many with "
                "--devices"
            )
    return resolve_device(device, count), count


def _say(result: dict[str, Any]) -> Report:
    report = Report()
    report.text(result["replayed"])
    config = ParallelConfig(**result["config"]).describe()
    report.text(f"generated again with {config} on {result['device']} in {result['seconds']:.2f} s")
    promised = result["promised"]
    if result["equal"]:
        report.text(StyledText("the same pixels", "good"), ", as promised" if promised else "")
    elif result["largest_difference"] is None:
        report.text(StyledText("an image of another size", "bad"))
    else:
        # The frames may differ by less than compression preserves.
        ratio = " in the files" if result["psnr"] is None else f" ({result['psnr']:.1f} dB)"
        share, most = result["differing_pixels"], result["largest_difference"]
        difference = f"{share:.1%} of the pixels differ, by at most {most} of 255{ratio}"
        if promised:
            report.text(StyledText(difference, "bad"), ", though the same ones were promised")
        else:
            report.text(StyledText(difference, "unsure"))
    report.points([f"changed: {change['what']} {change['was']} -> {change['now']}" for change in result["changes"]])
    if not result["changes"] and not result["equal"] and not promised:
        report.text("nothing that is known has changed; only reproducible mode promises the same pixels")
    return report

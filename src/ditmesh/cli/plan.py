"""`ditmesh plan`: the predicted seconds and memory of configurations on given hardware, and the line to type."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..report.report import Report, StyledText
from ..request import Offload, parse_size
from .options import (
    AsJson,
    AtOnce,
    Branches,
    Frames,
    Size,
    WeightsDType,
    at_least,
    common_option,
    job_option,
    with_groups,
)
from .show import emit
from .values import check_planned

if TYPE_CHECKING:
    from ..lab.plan.hardware import Hardware
    from ..lab.plan.subject import Plan

hardware_option = functools.partial(typer.Option, rich_help_panel="Hardware")


@dataclass(frozen=True)
class HardwareOptions:
    """Options of the hardware."""

    devices: Annotated[
        int | None, common_option("--devices", "-n", help="Plan for this many devices.", callback=at_least(1))
    ] = None
    hardware: Annotated[
        str | None,
        common_option(metavar="DEVICE", help="Plan for this device: h100, l40s, 4090 …", show_default="this machine's"),
    ] = None
    link: Annotated[
        str | None,
        hardware_option(
            metavar="LINK",
            help="Set the link between devices: nvlink4, pcie4 …, or 10GB/s.",
            show_default="the device's usual one",
        ),
    ] = None
    memory: Annotated[
        float | None, hardware_option(metavar="GB", help="Set the memory of a device.", callback=at_least(0.001))
    ] = None

    def machine(self, dtype: str) -> Hardware:
        """The hardware that they name; raises as `lab.plan.hardware.hardware`."""
        from ..lab.plan.hardware import hardware

        room = None if self.memory is None else self.memory * 1e9
        return hardware(self.hardware, self.devices, dtype, through=self.link, memory=room)


@with_groups
def plan(
    *,
    model: Annotated[
        str,
        typer.Argument(help="Plan for a model that ships (flux.1-dev, wan-14b …), or a pipeline's folder or hub id."),
    ] = "",
    machine: HardwareOptions,
    size: Size = None,
    steps: Annotated[
        int | None, common_option("--steps", "-s", help="Set the number of denoising steps.", callback=at_least(1))
    ] = None,
    frames: Frames = None,
    text: Annotated[int | None, job_option(help="Set the number of text tokens.", callback=at_least(0))] = None,
    pictures: AtOnce = 1,
    guidance: Branches = None,
    dtype: WeightsDType = "bfloat16",
    offload: Annotated[
        Offload,
        job_option(help="Keep text encoders and VAE in the host's memory while they are not in use, as generate does."),
    ] = "none",
    stale: Annotated[
        bool, job_option("--stale", help="Also predict strategies that reuse keys of the previous step.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the time and memory of configurations on hardware that need not be here. Every figure is predicted.

    [bold]Examples[/bold]

    ditmesh plan flux.1-dev --hardware 4090 --devices 4

    ditmesh plan wan-14b --hardware h100 --devices 8 --stale
    """
    check_planned(model)
    from ..lab.plan import subject as lab

    started = time.perf_counter()
    hardware = machine.machine(dtype)
    about = lab.subject(
        model,
        hardware,
        steps=steps,
        dtype=dtype if hardware.device.ahead else "float32",
        pictures=pictures,
        offload=offload,
        size=parse_size(size),
        frames=frames,
        text=text,
        guidance=guidance,
    )
    emit(_data(lab.plan(about, hardware, stale), started), as_json, _say)


def _data(plan: Plan, started: float) -> dict[str, Any]:
    """A plan as plain data; ``started``: when it was begun."""
    from ..lab.plan.subject import row_data

    workload = plan.subject.workload
    return {
        "model": plan.subject.name,
        "hardware": plan.hardware.describe(),
        "predicted": True,
        "image_tokens": workload.image,
        "text_tokens": workload.text,
        "branches": workload.branches,
        "pictures": workload.pictures,
        "steps": workload.steps,
        "configurations": [row_data(row) for row in plan.rows],
        "refused": plan.refused,
        "auto": plan.choice.config.describe(),
        "verdict": plan.verdict(),
        "command": plan.command(),
        "seconds": time.perf_counter() - started,
    }


def _say(result: dict[str, Any]) -> Report:
    from ..lab.plan.roofline import number

    report = Report()
    report.text(
        f"{result['model']} on {result['hardware']}: {result['image_tokens']:,} image and "
        f"{result['text_tokens']:,} text tokens, {result['steps']} steps, "
        f"guidance {'on' if result['branches'] > 1 else 'off'}; all figures are predicted"
    )
    rows = []
    for config in result["configurations"]:
        seconds = (
            [number(config["denoising_seconds"]), number(config["step_seconds"] * 1e3)] if config["fits"] else ["", ""]
        )
        memory = "" if config["memory_bytes"] is None else f"{config['memory_bytes'] / 1e9:.3g}"
        cells = (config["words"], str(config["devices"]), *seconds, memory)
        rows.append([StyledText(cell, "" if config["fits"] else "bad") for cell in cells])
    report.table(("configuration", "devices", "denoising s", "ms a step", "GB a rank"), rows)
    report.points([f"{config['words']}: {config['why']}" for config in result["configurations"]])
    if result["refused"]:
        reasons = list(dict.fromkeys(result["refused"].values()))
        report.text(f"{len(result['refused'])} were refused: {'; '.join(reasons[:2])}", note=True)
    report.text(result["verdict"])
    if result["command"]:
        report.text(result["command"])
    return report

"""`ditmesh plan`: predict the best configuration with reasons, without a GPU and without weights."""

from __future__ import annotations

import functools
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, InputError, did_you_mean
from ..launch import launcher
from ..report.report import Report, StyledText
from ..request import parse_size
from .options import (
    OFFLOADS,
    AsJson,
    AtOnce,
    Branches,
    Device,
    Frames,
    Size,
    WeightsDType,
    at_least,
    choice,
    common_option,
    job_option,
    output_option,
)
from .show import emit
from .values import check_planned

if TYPE_CHECKING:
    from ..forecast.costs.hardware import Hardware
    from ..forecast.explain import Line
    from ..forecast.plan.subject import PlanSubject
    from ..forecast.search import SearchResult

ENCODERS = ("whole", "sharded", "rank0", "freed", "before")
PLAN_OBJECTIVES = ("latency", "throughput", "cost")

hardware_option, goal_option, cache_option = (
    functools.partial(typer.Option, rich_help_panel=panel) for panel in ("Hardware", "Goal", "Measurements")
)


def plan(
    model: Annotated[
        str,
        typer.Argument(help="Plan for a model that ships (flux.1-dev, wan-14b …), or a pipeline's folder or hub id."),
    ] = "",
    devices: Annotated[
        int | None,
        common_option(
            "--devices",
            "-n",
            help="Plan for this many devices on all hosts.",
            callback=at_least(1),
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        common_option(
            metavar="PART|FILE",
            help="Plan for this device (h100, l40s, 4090 …), or a profile that doctor --save has written.",
            show_default="this machine's",
        ),
    ] = None,
    size: Size = None,
    steps: Annotated[
        int | None,
        common_option("--steps", "-s", help="Set the number of denoising steps.", callback=at_least(1)),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        common_option(
            "--what-if",
            metavar="NAME=VALUE",
            help="Plan again with other hardware: link=10GB/s, devices=16, hosts=2, memory=24.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        hardware_option(
            metavar="LINK",
            help="Set the link between devices of a host: nvlink4, pcie4 …, or 10GB/s.",
            show_default="the device's usual one",
        ),
    ] = None,
    hosts: Annotated[
        int, hardware_option(help="Share the devices evenly over this many hosts.", callback=at_least(1))
    ] = 1,
    between: Annotated[
        str | None, hardware_option(metavar="LINK", help="Set the link between hosts: infiniband-ndr, 25Gb/s …")
    ] = None,
    memory: Annotated[
        float | None, hardware_option(metavar="GB", help="Set the memory of a device.", callback=at_least(0.001))
    ] = None,
    frames: Frames = None,
    text: Annotated[int | None, job_option(help="Set the number of text tokens.", callback=at_least(0))] = None,
    pictures: AtOnce = 1,
    guidance: Branches = None,
    dtype: WeightsDType = "bfloat16",
    text_encoder: Annotated[
        str,
        choice(
            job_option, ENCODERS, "Place text encoders as generate does; before: a separate program encodes the prompt."
        ),
    ] = "whole",
    offload: Annotated[
        str,
        choice(
            job_option,
            OFFLOADS,
            "Keep text encoders and VAE in the host's memory while they are not in use, as generate does.",
        ),
    ] = "none",
    objective: Annotated[
        str,
        choice(
            goal_option,
            PLAN_OBJECTIVES,
            "Optimise the seconds of a request, images per hour, or device-seconds per image.",
        ),
    ] = "latency",
    exact: Annotated[bool, goal_option("--exact", help="Plan for the same image as one device (the default).")] = False,
    reproducible: Annotated[
        bool, goal_option("--reproducible", help="Plan for the same bits on any number of devices.")
    ] = False,
    stale: Annotated[
        bool, goal_option("--stale", help="Also use strategies that reuse keys of the previous step.")
    ] = False,
    deadline: Annotated[
        float | None,
        goal_option(metavar="SECONDS", help="Require that all steps finish in this time.", callback=at_least(0)),
    ] = None,
    measure: Annotated[
        bool, cache_option("--measure", help="Run the best configurations here for some steps, and store the fastest.")
    ] = False,
    device: Device = "auto",
    show_cache: Annotated[
        bool, cache_option("--show-cache", help="List the measurements stored by --measure.")
    ] = False,
    forget: Annotated[bool, cache_option("--forget", help="Delete the measurements stored by --measure.")] = False,
    html: Annotated[Path | None, output_option(metavar="FILE", help="Write a page with charts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the best configuration, the reasons, and the cost of the others. Every figure is predicted.

    [bold]Examples[/bold]

    ditmesh plan flux.1-dev --hardware h100 --devices 8

    ditmesh plan wan-14b --hardware 4090 --devices 4 --stale --what-if link=nvlink4
    """
    from ..forecast import measurements as cache

    if forget:
        count = cache.forget()
        emit({"forgotten": count}, as_json, lambda _: print(f"{count} kept plans deleted"))
        return
    if show_cache:
        emit({"kept": _kept()}, as_json, _say_kept)
        return
    if sum((exact, reproducible, stale)) > 1:
        raise InputError("--exact, --reproducible and --stale contradict one another; give one of them")
    exactness = "reproducible" if reproducible else "stale" if stale else "exact"
    check_planned(model)
    changes = [(text, _changed(text)) for text in what_if or []]
    started = time.perf_counter()
    asked: dict[str, Any] = {
        "size": parse_size(size),
        "frames": frames,
        "text": text,
        "pictures": pictures,
        "guidance": guidance,
        "steps": steps,
        "encoders": text_encoder,
        "offloaded": offload != "none",
    }
    settings: dict[str, Any] = {
        "hardware": hardware,
        "devices": devices,
        "link": link,
        "hosts": hosts,
        "between": between,
        "memory": memory,
        "dtype": dtype,
        "device": device,
    }
    made = _planned(model, asked, settings, exactness, deadline, objective)
    result = made.data()
    result["what_if"] = [
        {
            "changed": text,
            **_planned(model, asked, {**settings, **change}, exactness, deadline, objective).data(),
        }
        for text, change in changes
    ]
    if measure:
        result["measured"] = made.measure(exactness, device)
    result["seconds"] = time.perf_counter() - started
    emit(result, as_json, partial(_say, made=made))
    if html is not None:
        from ..forecast.plan.page import page_of

        page_of(made.subject, made.hardware, made.found, made.lines, result).write(html)


class _Planned:
    """A plan: the request, the hardware, and all predictions."""

    def __init__(self, subject: PlanSubject, hardware: Hardware, found: SearchResult, lines: list[Line]) -> None:
        self.subject, self.hardware, self.found, self.lines = subject, hardware, found, lines

    def data(self) -> dict[str, Any]:
        """The plan as JSON data."""
        from ..forecast.explain import as_data

        workload, work = self.subject.workload, self.subject.model.work
        return {
            "model": self.subject.name,
            "hardware": self.hardware.describe(),
            "predicted": True,
            "image_tokens": workload.image,
            "text_tokens": workload.text,
            "branches": workload.branches,
            "pictures": workload.pictures,
            "steps": workload.steps,
            "parameters": work.parameters,
            "flops_of_a_step": self.subject.model.work.flops(workload.image, workload.text)
            * workload.branches
            * workload.pictures,
            "valid": len(self.found.best),
            "too_large": len(self.found.too_large),
            "configurations": [
                {**as_data(line.prediction, self.hardware), "fits": line.fits, "why": line.sentence}
                for line in self.lines
            ],
        }

    def measure(self, exactness: str, device: str, most: int = 3) -> list[dict[str, Any]]:
        """Measure the best configurations of all ranks, and store the fastest."""
        from ..forecast.plan.measured import keep_fastest, measured

        world = self.hardware.world_size
        some = [one for one in self.found.best if one.config.world_size == world and one.config.pipe == 1][:most]
        if not some:
            raise InputError(f"no valid configuration has all {world} devices, so there is nothing to measure")
        with launcher(None, world, device, threads=1, timeout=600.0) as pool:
            results = measured(pool, self.subject, some, self.hardware)
        keep_fastest(self.subject, results, self.hardware, exactness)
        return [
            {"words": one.config.describe(), "step_seconds": seconds, "predicted_step_seconds": one.step}
            for one, seconds in results
        ]


def _planned(
    model: str, asked: dict[str, Any], settings: dict[str, Any], exactness: Any, deadline: float | None, objective: Any
) -> _Planned:
    from ..forecast.explain import comparison_table
    from ..forecast.plan.subject import subject
    from ..forecast.search import search

    chosen = _hardware(settings)
    dtype = chosen.device.dtype if settings["hardware"] is None else settings["dtype"]
    about = subject(model, dtype=dtype, **asked)
    room = None if settings["memory"] is None else settings["memory"] * 1e9
    found = search(about.model, about.workload, chosen, about.limits(chosen, exactness, room, deadline), objective)
    return _Planned(about, chosen, found, comparison_table(found, chosen, objective))


def _hardware(settings: dict[str, Any]) -> Hardware:
    import torch

    from ..forecast.auto import hardware_here
    from ..forecast.costs.hardware import Hardware, machine
    from ..forecast.costs.hardware import link as link_of

    name, hosts = settings["hardware"], settings["hosts"]
    if name is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and settings["device"] != "cpu" else 0
        count = settings["devices"] or max(gpus, 1)
        made = hardware_here(count, torch.device("cuda", 0) if gpus else None)
    elif Path(name).suffix in (".yaml", ".yml") or Path(name).is_file():
        made = Hardware.read(name)
        hosts = hosts if hosts > 1 else made.hosts
    else:
        made = machine(name, 1, settings["dtype"])
    count = settings["devices"] or made.world_size
    if count % hosts:
        raise ConfigError(f"{count} devices cannot be shared by {hosts} hosts evenly; use a multiple of {hosts}")
    changes: dict[str, Any] = {"devices": count // hosts, "hosts": hosts}
    if settings["link"] is not None:
        changes["link"] = link_of(settings["link"])
    if settings["between"] is not None:
        changes["between"] = link_of(settings["between"])
    if hosts > 1 and settings["between"] is None and made.between is None:
        raise InputError(f"{hosts} hosts: give the link --between them, such as infiniband-ndr, ethernet-25g or 25Gb/s")
    return made.model_copy(update=changes)


def _changed(text: str) -> dict[str, Any]:
    """The changes of ``--what-if``."""
    name, equals, value = text.partition("=")
    kinds = {"devices": int, "hosts": int, "memory": float, "link": str, "between": str, "hardware": str}
    if not equals or name not in kinds:
        near = did_you_mean(name, kinds) if equals else ""
        raise InputError(f"--what-if {text!r} is not NAME=VALUE with one of {', '.join(kinds)}{near}")
    try:
        made = kinds[name](value)
    except ValueError:
        raise InputError(f"--what-if {text!r}: {value!r} is not a number") from None
    if isinstance(made, (int, float)) and not made > 0:
        raise InputError(f"--what-if {text!r}: use a number above 0")
    return {name: made}


def _kept() -> list[dict[str, Any]]:
    from ..forecast import measurements as cache

    names = ("model", "image", "text", "branches", "device", "devices", "exactness", "step_seconds")
    return [
        {"key": key, "config": entry["config"].describe(), **{name: entry.get(name) for name in names}}
        for key, entry in cache.entries().items()
    ]


def _say_kept(result: dict[str, Any]) -> Report:
    report = Report()
    report.points(
        [
            f"{entry['model']}: {entry['image']} image tokens, {entry['branches']} branches, "
            f"{entry['devices']} x {entry['device']}: {entry['config']}, {entry['step_seconds'] * 1e3:.3g} ms a step"
            for entry in result["kept"]
        ]
    )
    if not result["kept"]:
        report.text("nothing is stored; ditmesh plan MODEL --measure stores its measurements")
    return report


def _say(result: dict[str, Any], made: _Planned) -> Report:
    report = Report()
    _say_plan(report, result)
    for changed in result["what_if"]:
        report.section(f"what if {changed['changed']}")
        _say_plan(report, changed)
    if "measured" in result:
        report.section("measured")
        report.text("milliseconds a step (predicted in brackets); the fastest is kept")
        report.points(
            [
                f"  {one['words']}: {one['step_seconds'] * 1e3:.3g} ({one['predicted_step_seconds'] * 1e3:.3g})"
                for one in result["measured"]
            ]
        )
    reasons = made.found.refused.most_common(2)
    if reasons:
        more = "; ".join(reason for reason, _ in reasons)
        report.text(f"{sum(made.found.refused.values())} were refused: {more}", note=True)
    return report


def _say_plan(report: Report, result: dict[str, Any]) -> None:
    from ..forecast.explain import number

    report.text(
        f"{result['model']} on {result['hardware']}: {result['image_tokens']:,} image and "
        f"{result['text_tokens']:,} text tokens, {result['steps']} steps, "
        f"guidance {'on' if result['branches'] > 1 else 'off'}; all figures are predicted"
    )
    rows = []
    for one in result["configurations"]:
        cells = [number(one["denoising_seconds"]), number(one["step_seconds"] * 1e3)]
        cells = [one["words"], str(one["devices"]), *cells, f"{one['memory_bytes'] / 1e9:.3g}"]
        rows.append([StyledText(cell, "" if one["fits"] else "bad") for cell in cells])
    report.table(("configuration", "devices", "denoising s", "ms a step", "GB a rank"), rows)
    report.points([f"{one['words']}: {one['why']}" for one in result["configurations"]])
    error = result["configurations"][0]["error"]
    if error is not None:
        report.text(f"Predictions with this hardware profile were off by {error:.0%} on average.", note=True)
    if any(one["synchronous_steps"] < result["steps"] for one in result["configurations"]):
        report.text(
            "Stale strategies lose something: on an embedded model displaced patches were 40 dB, PipeFusion 43 dB "
            "from the exact image with one synchronous step (docs/findings.md).",
            note=True,
        )

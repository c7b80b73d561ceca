"""`ditmesh doctor`: the machine's devices and versions, missing components, and whether ranks meet."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..report.report import Report, StyledText
from .options import AsJson, Device, at_least
from .show import emit


def doctor(
    devices: Annotated[
        int,
        typer.Option(
            "--devices",
            "-n",
            help="Let this many ranks exchange a tensor; with 1 none is started.",
            callback=at_least(1),
        ),
    ] = 2,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show versions, devices and backends, let ranks exchange a tensor, and report missing components.

    [bold]Example[/bold]

    ditmesh doctor --devices 4
    """
    from ..launch import device_of_launcher, launcher
    from ..launch.hardware import describe_machine, import_errors, missing, ranks_meet

    if device != "auto":
        device_of_launcher(None, device, devices)
    facts = describe_machine()
    facts["import_errors"] = import_errors()
    facts["missing"] = missing(facts)
    facts["devices"] = devices
    facts["ranks_meet"] = None
    if devices > 1:
        if device == "auto" and len(facts["gpus"]) < devices:
            device = "cpu"
        quick = ("torch", "torch.distributed")
        with launcher(None, devices, device, threads=1, timeout=120.0, preload=quick) as pool:
            facts["device"] = pool.device
            facts["ranks_meet"] = all(pool.run(ranks_meet))
    emit(facts, as_json, _say)


def _say(facts: dict[str, Any]) -> Report:
    report = Report()
    report.facts(_machine(facts))
    if facts["topology"] and len(facts["gpus"]) > 1:
        report.text(facts["topology"])
    if facts["ranks_meet"] is not None:
        result = StyledText("yes", "good") if facts["ranks_meet"] else StyledText("no", "bad")
        report.text(f"{facts['devices']} ranks on {facts['device']} exchange a tensor: ", result)
    for sentence in facts["missing"]:
        report.text(StyledText("missing", "unsure"), f" {sentence}")
    if not facts["missing"]:
        report.text(StyledText("Nothing is missing.", "good"))
    return report


def _machine(facts: dict[str, Any]) -> dict[str, str | None]:
    """The facts about the machine; None: unknown or absent."""
    cpu, memory = facts["cpu"], facts["shared_memory"]
    named = {
        "versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
        "platform": facts["platform"],
        "CPU": f"{cpu['model']}, {cpu['cores']} cores, {cpu['threads']} threads, {cpu['memory_gb']} GB",
        "GPUs": ", ".join(f"{gpu['name']} ({gpu['memory_gb']} GB)" for gpu in facts["gpus"]) or "none",
        "backends": ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in facts["backends"].items()),
        "driver": facts["driver"] and f"NVIDIA {facts['driver']}",
        "NCCL": facts["nccl"],
        "/dev/shm": memory and f"{memory['free_gb']:g} of {memory['size_gb']:g} GB free",
        "variables": ", ".join(f"{name}={value}" for name, value in facts["variables"].items()) or "none",
    }
    return {name: text or None for name, text in named.items()}

"""`ditmesh memory`: the memory of every rank, to generate or to train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import InputError
from ..report.report import Report
from ..request import parse_size
from .options import (
    AsJson,
    AtOnce,
    Branches,
    ConfigFile,
    ConfigOptions,
    Frames,
    ModelArgument,
    Size,
    WeightsDType,
    at_least,
    common_option,
    job_option,
    with_groups,
)
from .show import emit
from .values import check_planned, parallel_config

if TYPE_CHECKING:
    from ..config import ParallelConfig
    from ..memory.phases import Components
    from ..memory.sizes import Workload


@with_groups
def memory(
    *,
    model: ModelArgument = "",
    hardware: Annotated[str, common_option(metavar="DEVICE", help="Predict for this device: h100, l40s, 4090 …")] = (
        "cpu"
    ),
    size: Size = None,
    devices: Annotated[
        int | None, common_option("--devices", "-n", help="Predict for this many ranks.", callback=at_least(1))
    ] = None,
    config: ConfigFile = None,
    frames: Frames = None,
    tokens: Annotated[
        int | None, job_option("--text-tokens", help="Set the number of tokens of a prompt.", callback=at_least(1))
    ] = None,
    pictures: AtOnce = 1,
    guidance: Branches = None,
    dtype: WeightsDType = "bfloat16",
    parallel: ConfigOptions,
    as_json: AsJson = False,
) -> None:
    """Predict what every rank needs to load, encode, denoise and decode.

    Of the YAML file of a training run: what it needs to train. Nothing is read but configurations.

    [bold]Examples[/bold]

    ditmesh memory flux.1-dev --devices 2 --tensor 2 --hardware 4090

    ditmesh memory run.yaml --hardware 4090
    """
    settings = parallel.settings()
    if Path(model).suffix in (".yaml", ".yml"):
        from ..train.config import TrainConfig
        from ..train.memory import predicted_training, training_report

        if settings or config is not None or devices is not None:
            raise InputError(f"{model!r} gives the configuration of its run; leave --config, --devices and degrees out")
        emit(predicted_training(TrainConfig.read(model), hardware), as_json, training_report)
        return
    pixels = parse_size(size)
    check_planned(model or "emoji-sd3")
    count, chosen = parallel_config(devices, config, settings, None)
    request = _request(model, (pixels, tokens, pictures, guidance, frames))
    emit(_needed(request, chosen or count, dtype, hardware), as_json, _say)


def _request(model: str, asked: tuple[Any, ...]) -> tuple[Components, Workload, bool, str, str | None]:
    """The model's components, the request, whether guidance has two branches, what ``generate --model`` takes, and
    the sentence with which it refuses the pipeline; None: it does not.

    ``asked``: size, tokens, images, branches and frames, as `workload_of` takes them.
    """
    import diffusers

    from .. import zoo
    from ..engine import guided
    from ..generate.arguments import unwritten
    from ..generate.model_info import find_model, parameters_of
    from ..memory.catalogue import shapes
    from ..memory.check import components_of, components_of_shape
    from ..memory.sizes import workload_of

    shape = shapes().get(model.lower())
    if shape is None or Path(model).exists():
        info = find_model(model or zoo.path())
        branches = asked[3]
        if branches is None:
            branches = guided(getattr(diffusers, info.pipeline_class, None), info.transformer)
        refusal = unwritten(info.pipeline_class, parameters_of(info.pipeline_class))
        return components_of(info), workload_of(info, *asked), branches, model, refusal
    workload, pipeline = workload_of(shape, *asked), shape.pipeline or ""
    refusal = unwritten(pipeline, parameters_of(pipeline))
    return components_of_shape(shape), workload, workload.branches > 1, shape.repository, refusal


def _needed(
    request: tuple[Components, Workload, bool, str, str | None], chosen: ParallelConfig | int, dtype: str, hardware: str
) -> dict[str, Any]:
    """The memory of every rank on a device, and the command to type, as plain data."""
    import torch

    from ..memory.cards import card
    from ..memory.check import Demand, gigabytes
    from ..memory.phases import needs

    components, workload, guided, repository, refusal = request
    part, kind = card(hardware), getattr(torch, dtype)
    demand = Demand(
        components,
        workload,
        workload,
        kind,
        part.name,
        images=workload.pictures,
        branches=1 + guided,
        runtime=part.runtime,
    )
    # What is free on a CPU is not known of a machine in a table.
    room = float("inf") if part.name == "cpu" else part.memory
    note = None
    if isinstance(chosen, int):
        choice = demand.choose(chosen, room)
        chosen, note = choice.config, choice.describe() if chosen > 1 else None
    ranks = needs(components, chosen, workload, kind, part.runtime, gpu=part.name != "cpu")
    most, exceeds = max(rank.peak.total for rank in ranks), None
    options = chosen.options()
    if most > room:
        fitting = demand.fitting(chosen.world_size, room, limited=True)
        exceeds = f"{gigabytes(most)} GB on a rank exceed the {gigabytes(room)} GB of {part.name}; {fitting.sentence}"
        options = fitting.options
    return {
        "model": components.name,
        "config": chosen.describe(),
        "devices": chosen.world_size,
        "size": [workload.width, workload.height],
        "dtype": dtype,
        "predicted": True,
        "ranks": [one.as_data() for one in ranks],
        "chosen": note,
        "exceeds": exceeds,
        "refused": refusal,
        "command": f'ditmesh generate "..." --model {repository or "emoji-sd3"} {options}'
        if options and refusal is None
        else None,
    }


def _say(result: dict[str, Any]) -> Report:
    from ..report.memory import memory_report

    width, height = result["size"]
    lead = f"{result['model']}, {result['config']}, {width} x {height}, {result['dtype']}"
    report = memory_report(lead, result["ranks"], ("weights", "activations", "kept", "process"))
    for line in (result["chosen"], result["exceeds"], result["refused"], result["command"]):
        if line is not None:
            report.text(line)
    return report

"""`ditmesh inspect`: a model's token layout, the memory of its ranks, and the layers around a call."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import ParallelConfig
from ..errors import InputError
from ..report.report import Report, StyledText
from ..request import parse_size
from .options import (
    AsJson,
    AtOnce,
    Branches,
    ConfigOptions,
    Frames,
    Size,
    WeightsDType,
    at_least,
    common_option,
    job_option,
    with_groups,
)
from .show import emit
from .values import check_planned, parallel_config, parse_config

if TYPE_CHECKING:
    from ..generate.model_info import ModelInfo
    from ..layout import TokenLayout
    from ..memory.phases import Components
    from ..memory.sizes import Workload


layout_option = functools.partial(typer.Option, rich_help_panel="Layout")


@with_groups
def inspect(
    *,
    model: Annotated[
        str, typer.Argument(help="Inspect this model: folder or hub id of a diffusers pipeline, or an embedded model.")
    ] = "",
    named: Annotated[
        str | None,
        common_option("--model", "-m", help="Inspect this model, as with the argument."),
    ] = None,
    size: Size = None,
    devices: Annotated[
        int | None,
        common_option("--devices", "-n", help="Predict for this many ranks.", callback=at_least(1)),
    ] = None,
    config: Annotated[
        str | None,
        common_option(metavar="WORDS|FILE", help='Give the configuration in words, such as "ulysses=4 cfg=2".'),
    ] = None,
    memory: Annotated[
        bool,
        common_option("--memory", help="Predict the memory of every rank, phase by phase."),
    ] = False,
    explain: Annotated[
        bool,
        layout_option(
            "--explain",
            help="List the layers around the transformer's call and the data that ranks exchange, with reasons.",
        ),
    ] = False,
    check: Annotated[
        bool, layout_option("--check", help="Probe the class and compare with the reviewed layout.")
    ] = False,
    save: Annotated[
        Path | None,
        layout_option("--save", metavar="FILE", help="Write the layout as JSON, which TokenLayout.read reads."),
    ] = None,
    frames: Frames = None,
    tokens: Annotated[
        int | None,
        job_option("--text-tokens", help="Set the number of tokens of a prompt.", callback=at_least(1)),
    ] = None,
    pictures: AtOnce = 1,
    guidance: Branches = None,
    dtype: WeightsDType = "bfloat16",
    hardware: Annotated[
        str,
        job_option(
            metavar="DEVICE",
            help="Predict for this device: h100, l40s, 4090 …",
        ),
    ] = "cpu",
    parallel: ConfigOptions,
    as_json: AsJson = False,
) -> None:
    """Show a model's token layout, parameters and token counts; with --check, probe it and compare.

    With --memory: what every rank needs to load, encode, denoise and decode; of the YAML file of a training run, what
    it needs to train. Nothing is read but configurations.

    [bold]Examples[/bold]

    ditmesh inspect ./my-model --size 1024x1024 --check

    ditmesh inspect --memory --model flux.1-dev --devices 2 --tensor 2 --hardware 4090

    ditmesh inspect --memory run.yaml --hardware 4090

    ditmesh inspect --explain --devices 4 --ulysses 4

    Exits with code 1 when --check finds a difference.
    """
    from .. import zoo
    from ..generate.model_info import find_model

    model = named or model
    wanted = parse_size(size)
    settings = parallel.settings()
    if config is not None and (settings or devices is not None):
        raise InputError("--config gives the whole configuration; leave degrees and --devices out")
    if memory:
        request = wanted, frames, tokens, pictures, guidance
        emit(*_memory(model, request, (config, devices, settings), dtype, hardware, as_json))
        return
    asked = bool(settings) or devices is not None or config is not None
    if asked != explain:
        raise InputError(
            "--explain needs a configuration; give --config, or --devices and degrees"
            if explain
            else "a configuration belongs to --memory or --explain; give one of them too"
        )
    place = model or str(zoo.path())
    info = find_model(place)
    # It takes torch along, which a mistake does not wait for.
    from ..memory.sizes import workload_of

    workload = workload_of(info, wanted, tokens, pictures, guidance, frames)
    layout, found = _layout(info, check)
    facts = _facts(info, layout, workload) | found
    if asked:
        chosen = _config_of(config, devices, settings)
        if isinstance(chosen, int):
            chosen = ParallelConfig.auto(chosen, info.heads or 1)
        facts |= _anatomy(info.transformer_class, info.transformer, layout, chosen, workload, dtype)
    if save is not None:
        _write(layout, save)
    emit(facts, as_json, partial(_say, layout=layout, check=check))
    if found.get("differences"):
        raise typer.Exit(1)


def _memory(
    model: str,
    request: tuple[tuple[int, int] | None, int | None, int | None, int, bool | None],
    ranks: tuple[str | None, int | None, dict[str, Any]],
    dtype: str,
    hardware: str,
    as_json: bool,
) -> tuple[dict[str, Any], bool, Any]:
    """The report of --memory: of a model that generates, or of the file of a training run."""
    config, devices, settings = ranks
    if Path(model).suffix in (".yaml", ".yml"):
        from ..train.config import TrainConfig
        from ..train.memory import predicted_training, training_report

        if settings or config is not None or devices is not None:
            raise InputError(f"{model!r} gives the configuration of its run; leave --config, --devices and degrees out")
        return predicted_training(TrainConfig.read(model), hardware), as_json, training_report
    check_planned(model or "emoji-sd3")
    return _needed(_asked(model, *request), ranks, dtype, hardware), as_json, _say_memory


def _write(layout: TokenLayout, path: Path) -> None:
    try:
        layout.save(path)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}; give --save another name") from None


def _layout(info: ModelInfo, check: bool) -> tuple[TokenLayout, dict[str, Any]]:
    """The reviewed layout, or one that a probe of the class derives; with ``check`` also the probe's findings."""
    from ..layout import known_models
    from ..layout.describe import as_data, probed_layout

    reviewed = known_models().get(info.transformer_class)
    if reviewed is not None and not check:
        return reviewed, {}
    probed, differences = probed_layout(info.transformer_class, info.transformer)
    return reviewed or probed, {"probed": as_data(probed), "differences": differences} if check else {}


def _facts(info: ModelInfo, layout: TokenLayout, workload: Workload) -> dict[str, Any]:
    """A model's parameters, token counts and layout, as plain data."""
    from ..layout.describe import as_data, meta_model
    from ..strategies.sharded import parameters_in_pieces

    module = meta_model(info.transformer_class, info.transformer)
    return {
        "model": info.name,
        "pipeline": info.pipeline_class,
        "transformer": info.transformer_class,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "shared_by_shard": parameters_in_pieces(module, layout),
        "heads": info.heads,
        "size": [workload.width, workload.height],
        "image_tokens": workload.image,
        "size_multiple": info.size_multiple,
        "layout": as_data(layout),
    }


def _anatomy(
    transformer: str, sizes: Any, layout: TokenLayout, config: ParallelConfig, workload: Workload, dtype: str
) -> dict[str, Any]:
    """The layers around a call of the transformer, and the data that ranks exchange in it, as plain data."""
    import torch

    from .. import recipe
    from ..layout.describe import meta_model
    from ..memory.anatomy import anatomy

    recipe.check_recipe(recipe.RECIPE, config, [(meta_model(transformer, sizes), layout)])
    layers, exchanges = anatomy(transformer, sizes, layout, config, workload, getattr(torch, dtype))
    return {
        "config": config.describe(),
        "layers": [vars(layer) for layer in layers],
        "exchanges": None if exchanges is None else [vars(exchange) for exchange in exchanges],
    }


def _say_anatomy(report: Report, facts: dict[str, Any]) -> None:
    around, rows = "", []
    for layer in facts["layers"]:
        rows.append(("" if layer["around"] == around else layer["around"], layer["name"], layer["reason"]))
        around = layer["around"]
    report.table(("around", "what", "why"), rows, f"{facts['config']}, outermost first", keys=3)
    if facts["exchanges"] is None:
        report.text("Exchanges are not predicted for this configuration and model.")
        return
    rows = [
        (each["where"], each["link"], each["kind"], str(each["times"]), f"{each['bytes'] / 1e6:.3g}")
        for each in facts["exchanges"]
    ]
    caption = "Exchanges of rank 0 in a step, with one block of each kind; predicted"
    report.table(("where", "link", "exchange", "times", "MB"), rows, caption, keys=3)


def _config_of(config: str | None, devices: int | None, settings: dict[str, Any]) -> ParallelConfig | int:
    """The configuration that is asked for; or the number of devices, for which the rule of ``"auto"`` names one."""
    if config is not None:
        return parse_config(config)
    count, chosen = parallel_config(devices, None, settings, None)
    return chosen or count


def _say(facts: dict[str, Any], layout: TokenLayout, check: bool) -> Report:
    report = Report()
    width, height = facts["size"]
    report.text(StyledText(facts["transformer"], "strong"), f" of {facts['pipeline']} ({facts['model']})")
    report.text(
        f"{facts['parameters'] / 1e6:,.1f} million parameters, of which --shard shares out "
        f"{facts['shared_by_shard'] / max(1, facts['parameters']):.0%}; {facts['heads'] or '?'} heads; "
        f"{width} x {height} pixels are {facts['image_tokens']:,} image tokens; "
        f"sizes in multiples of {facts['size_multiple']}"
    )
    if "layers" in facts:
        _say_anatomy(report, facts)
        return report
    report.text(f"Token layout ({layout.source})")
    for region in layout.regions:
        rows = [("stream", s.arg, f"{s.name}, dimension {s.dim}") for s in region.streams]
        rows += [("cut", c.arg, f"{' + '.join(c.tokens)}, dimension {c.dim}") for c in region.cuts]
        rows += [("whole", path, "") for path in region.whole]
        for number, attention in enumerate(region.attention, 1):
            mixes = f"{' + '.join(attention.queries)} ask {' + '.join(attention.keys)}" if attention.keys else "local"
            rows.append((f"attention {number}", "", mixes))
        chained = " (fed by the list before)" if region.chained else ""
        report.table(("what", "argument", "tokens"), rows, f"{region.blocks}{chained}", keys=3)
    if layout.refused:
        report.text("Derived from the call that sets one: " + ", ".join(layout.refused))
    if check and not facts["differences"]:
        report.text(StyledText("The probe agrees with this layout.", "good"))
    for difference in facts.get("differences", []):
        report.text(StyledText("differs ", "bad"), difference)
    return report


def _asked(
    model: str,
    size: tuple[int, int] | None,
    frames: int | None,
    text: int | None,
    pictures: int,
    guidance: bool | None,
) -> tuple[Components, Workload, bool, str]:
    """The model's components, the request, whether guidance has two branches, and what ``generate --model`` takes."""
    import diffusers

    from .. import zoo
    from ..engine import guided
    from ..generate.model_info import find_model
    from ..memory.catalogue import shapes
    from ..memory.check import components_of, components_of_shape
    from ..memory.sizes import workload_of

    shape = shapes().get(model.lower())
    if shape is None or Path(model).exists():
        info = find_model(model or zoo.path())
        workload = workload_of(info, size, text, pictures, guidance, frames)
        branches = guided(getattr(diffusers, info.pipeline_class, None), info.transformer)
        return components_of(info), workload, branches if guidance is None else guidance, model
    workload = workload_of(shape, size, text, pictures, guidance, frames)
    return components_of_shape(shape), workload, workload.branches > 1, shape.repository


def _needed(
    asked: tuple[Components, Workload, bool, str],
    ranks: tuple[str | None, int | None, dict[str, Any]],
    dtype: str,
    hardware: str,
) -> dict[str, Any]:
    """The memory of every rank on a device, and the command to type, as plain data."""
    import torch

    from ..memory.cards import card
    from ..memory.check import Demand, gigabytes
    from ..memory.phases import needs

    components, workload, guided, repository = asked
    config, devices, settings = ranks
    part, kind = card(hardware), getattr(torch, dtype)
    demand = Demand(
        components,
        workload,
        workload,
        kind,
        part.kind,
        images=workload.pictures,
        branches=1 + guided,
        runtime=part.runtime,
    )
    # What is free on a CPU is not known of a machine in a table.
    room = float("inf") if part.kind == "cpu" else part.memory
    chosen, note = _config_of(config, devices, settings), None
    if isinstance(chosen, int):
        choice = demand.choose(chosen, room)
        chosen, note = choice.config, choice.describe() if chosen > 1 else None
    found = needs(components, chosen, workload, kind, part.runtime, part.kind)
    most, exceeds = max(rank.peak.total for rank in found), None
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
        "ranks": [one.as_data() for one in found],
        "chosen": note,
        "exceeds": exceeds,
        "command": f'ditmesh generate "..." --model {repository or "emoji-sd3"} {options}' if options else None,
    }


def _say_memory(result: dict[str, Any]) -> Report:
    from ..report.memory import memory_report

    width, height = result["size"]
    lead = f"{result['model']}, {result['config']}, {width} x {height}, {result['dtype']}"
    report = memory_report(lead, result["ranks"], ("weights", "activations", "kept", "shared", "process"))
    for line in (result["chosen"], result["exceeds"], result["command"]):
        if line is not None:
            report.text(line)
    return report

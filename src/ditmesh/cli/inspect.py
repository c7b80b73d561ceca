"""`ditmesh inspect`: a model's token layout, the memory of its ranks, and the traffic between hosts."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, InputError
from .options import (
    JOB,
    AsJson,
    AtOnce,
    Branches,
    ConfigOptions,
    Frames,
    Size,
    WeightsDType,
    at_least,
    common_option,
    with_groups,
)
from .show import emit
from .values import check_planned, config_of, parallel_config, parse_size

if TYPE_CHECKING:
    from ..config import ParallelConfig
    from ..forecast.costs.work import Workload
    from ..forecast.memory.phases import Components
    from ..generate.model_info import ModelInfo
    from ..layout import TokenLayout


layout_option = functools.partial(typer.Option, rich_help_panel="Layout")
job_option = functools.partial(typer.Option, rich_help_panel=JOB)


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
    hosts: Annotated[
        str | None,
        layout_option(
            metavar="N|N,N",
            help="Show the traffic between this many hosts, or between hosts with these numbers of ranks.",
        ),
    ] = None,
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
            metavar="PART|FILE",
            help="Predict for this device of plan's table, or a profile that doctor --save has written.",
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

    ditmesh inspect ./my-model --config "ulysses=4 cfg=2" --hosts 2

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
    if asked != (explain or hosts is not None):
        raise InputError(
            "a configuration is for --memory, or with --hosts for what travels between them; give both or neither"
            if not explain
            else "--explain is of a configuration; give --config, or --devices and degrees"
        )
    place = model or str(zoo.path())
    info = find_model(place)
    # It takes torch along, which a mistake does not wait for.
    from ..forecast.workload import workload_of

    workload = workload_of(info, wanted, tokens, pictures, guidance, frames)
    layout, found = _layout(info, check)
    facts = _facts(info, layout, workload) | found
    if asked:
        chosen = _config_of(config, devices, settings, info.heads)
        if explain:
            facts |= _anatomy(info.transformer_class, info.transformer, layout, chosen, workload, dtype)
        if hosts is not None:
            step = {"frames": frames, "text": tokens, "pictures": pictures, "guidance": guidance, "dtype": dtype}
            step["size"] = (workload.width, workload.height)
            facts["between_hosts"] = _between(place, step, chosen, hosts)
    if save is not None:
        _write(layout, save)
    emit(facts, as_json, partial(_show, layout=layout, check=check))
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
    """What `emit` shows with --memory: of a model that generates, or of the file of a training run."""
    config, devices, settings = ranks
    if Path(model).suffix in (".yaml", ".yml"):
        from ..train.config import TrainConfig
        from ..train.memory.check import predicted_training, show_training

        if settings or config is not None or devices is not None:
            raise InputError(f"{model!r} gives the configuration of its run; leave --config, --devices and degrees out")
        return predicted_training(TrainConfig.read(model), hardware), as_json, show_training
    check_planned(model or "emoji-sd3")
    components, workload, heads = _asked(model, *request)
    chosen = _config_of(config, devices, settings, heads)
    return _needed(components, workload, chosen, dtype, hardware), as_json, _show_memory


def _write(layout: TokenLayout, path: Path) -> None:
    try:
        layout.save(path)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}; give --save another name") from None


def _layout(info: ModelInfo, check: bool) -> tuple[TokenLayout, dict[str, Any]]:
    """The reviewed layout, or what a probe of the class derives; if it is to be checked, what the probe says."""
    from ..layout import known_models
    from ..layout.describe import as_data, checked

    reviewed = known_models().get(info.transformer_class)
    if reviewed is not None and not check:
        return reviewed, {}
    probed, differences = checked(info.transformer_class, info.transformer)
    return reviewed or probed, {"probed": as_data(probed), "differences": differences} if check else {}


def _facts(info: ModelInfo, layout: TokenLayout, workload: Workload) -> dict[str, Any]:
    """A model's parameters, token counts and layout, as plain data."""
    from ..layout.describe import as_data, on_meta
    from ..strategies.sharded import parameters_in_pieces

    module = on_meta(info.transformer_class, info.transformer)
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
    from ..forecast.memory.anatomy import anatomy
    from ..layout.describe import on_meta

    recipe.check(recipe.RECIPE, config, [(on_meta(transformer, sizes), layout)])
    layers, exchanges = anatomy(transformer, sizes, layout, config, workload, getattr(torch, dtype))
    return {
        "config": config.describe(),
        "layers": [vars(layer) for layer in layers],
        "exchanges": None if exchanges is None else [vars(exchange) for exchange in exchanges],
    }


def _show_anatomy(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{facts['config']}[/], outermost first:")
    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in ("around", "what", "why"):
        table.add_column(column, overflow="fold")
    around = ""
    for layer in facts["layers"]:
        table.add_row(
            *map(escape, ("" if layer["around"] == around else layer["around"], layer["name"], layer["reason"]))
        )
        around = layer["around"]
    console.print(table)
    if facts["exchanges"] is None:
        console.print("Exchanges are not predicted for this configuration and model.")
        return
    console.print("Exchanges of rank 0 in a step, with one block of each kind; predicted:")
    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in ("where", "link", "exchange", "times", "MB"):
        table.add_column(column, justify="right" if column in ("times", "MB") else "left")
    for each in facts["exchanges"]:
        row = (each["where"], each["link"], each["kind"], str(each["times"]), f"{each['bytes'] / 1e6:.3g}")
        table.add_row(*map(escape, row))
    console.print(table)


def _config_of(config: str | None, devices: int | None, settings: dict[str, Any], heads: int | None) -> ParallelConfig:
    """The configuration, in words or by its settings; without either one that suits so many devices."""
    from ..config import ParallelConfig

    if config is not None:
        return config_of(config)
    count, chosen = parallel_config(devices, None, settings, heads)
    return chosen or ParallelConfig.auto(count, heads or 1)


def _between(model: str, wanted: dict[str, Any], config: ParallelConfig, hosts: str) -> dict[str, Any]:
    """The traffic of a configuration between hosts, as plain data."""
    from ..forecast.costs.hardware import machine
    from ..forecast.hosts import better, between_hosts, host_numbers
    from ..forecast.plan.subject import subject
    from ..forecast.search import SearchLimits, refusal

    numbers = host_numbers(hosts, config.world_size)
    asked = subject(model, **wanted)
    if reason := refusal(config, asked.model, SearchLimits(tested=False)):
        raise ConfigError(reason)
    hardware = machine("h100", config.world_size)
    one = between_hosts(config, asked.model, asked.workload, hardware, numbers)
    other = better(one, asked.model, asked.workload, hardware, numbers) if one.busy else None
    return {
        "config": config.describe(),
        "hosts": [numbers.count(host) for host in range(max(numbers) + 1)],
        "element_bytes": asked.workload.element,
        "branches": asked.workload.branches,
        "axes": list(one.axes),
        "bytes_a_step": one.sent,
        "bytes_a_synchronous_step": one.synchronous,
        "better": None if other is None else {"config": other.config.describe(), "bytes_a_step": other.sent},
    }


def _show_between(between: dict[str, Any]) -> None:
    """Lines about the traffic between hosts."""
    from rich.console import Console

    from ..forecast.hosts import BUSY, describe_bytes

    def say(text: str) -> None:
        Console().print(text, highlight=False, soft_wrap=True)

    ranks = " + ".join(map(str, between["hosts"]))
    say(f"[bold]{between['config']}[/] on {ranks} ranks of {len(between['hosts'])} hosts, predicted, a step:")
    names = [*between["axes"], *(axis for axis in between["bytes_a_step"] if axis not in between["axes"])]
    for axis in names:
        sent = describe_bytes(between["bytes_a_step"].get(axis, 0.0))
        first = between["bytes_a_synchronous_step"].get(axis, 0.0)
        late = "" if first == between["bytes_a_step"].get(axis, 0.0) else f" ({describe_bytes(first)} when synchronous)"
        say(f"  {axis} reaches across hosts: {sent}{late}")
    if not names:
        say("  nothing goes between hosts")
    if set(names) & set(BUSY):
        best = between["better"]
        least = best and f"{best['config']} sends {describe_bytes(sum(best['bytes_a_step'].values()))}"
        say(f"  [yellow]keep ulysses and tensor inside of a host[/]{': ' + least if least else ''}")


def _show(facts: dict[str, Any], layout: TokenLayout, check: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    width, height = facts["size"]
    console.print(f"[bold]{facts['transformer']}[/] of {facts['pipeline']} ({escape(facts['model'])})", highlight=False)
    console.print(
        f"{facts['parameters'] / 1e6:,.1f} million parameters, of which --shard shares out "
        f"{facts['shared_by_shard'] / max(1, facts['parameters']):.0%}; {facts['heads'] or '?'} heads; "
        f"{width} x {height} pixels are {facts['image_tokens']:,} image tokens; "
        f"sizes in multiples of {facts['size_multiple']}",
        highlight=False,
    )
    if "layers" in facts:
        _show_anatomy(facts)
        return
    console.print(f"Token layout ({layout.source})", markup=False, highlight=False, soft_wrap=True)
    for region in layout.regions:
        table = Table(box=None, padding=(0, 2, 0, 2))
        for column in ("what", "argument", "tokens"):
            table.add_column(column, overflow="fold", no_wrap=column != "tokens")
        chained = " (fed by the list before)" if region.chained else ""
        rows = [("stream", s.arg, f"{s.name}, dimension {s.dim}") for s in region.streams]
        rows += [("cut", c.arg, f"{' + '.join(c.tokens)}, dimension {c.dim}") for c in region.cuts]
        rows += [("whole", path, "") for path in region.whole]
        for number, attention in enumerate(region.attention, 1):
            mixes = f"{' + '.join(attention.queries)} ask {' + '.join(attention.keys)}" if attention.keys else "local"
            rows.append((f"attention {number}", "", mixes))
        for values in rows:
            table.add_row(*map(escape, values))
        console.print(f"[bold]{escape(region.blocks)}[/]{chained}", highlight=False)
        console.print(table, highlight=False)
    if layout.refused:
        console.print("Derived from the call that sets one: " + ", ".join(layout.refused), highlight=False)
    if "between_hosts" in facts:
        _show_between(facts["between_hosts"])
    if check and not facts["differences"]:
        console.print("[green]The probe agrees with this layout.[/]")
    for difference in facts.get("differences", []):
        console.print(f"[red]differs[/] {escape(difference)}", highlight=False)


def _asked(
    model: str,
    size: tuple[int, int] | None,
    frames: int | None,
    text: int | None,
    pictures: int,
    guidance: bool | None,
) -> tuple[Components, Workload, int | None]:
    """The model's components, the request, and the heads of the transformer."""
    from .. import zoo
    from ..forecast.catalogue import shapes
    from ..forecast.memory.check import components_of, components_of_shape
    from ..forecast.workload import workload_of
    from ..generate.model_info import find_model

    shape = shapes().get(model.lower())
    if shape is None or Path(model).exists():
        info = find_model(model or zoo.path())
        return components_of(info), workload_of(info, size, text, pictures, guidance, frames), info.heads
    workload = workload_of(shape, size, text, pictures, guidance, frames)
    return components_of_shape(shape), workload, shape.config.get("num_attention_heads")


def _needed(
    components: Components, workload: Workload, config: ParallelConfig, dtype: str, hardware: str
) -> dict[str, Any]:
    """The memory of every rank, as JSON data."""
    import torch

    from ..forecast.costs.hardware import Hardware, device
    from ..forecast.memory.phases import needs

    profile = Path(hardware).suffix in (".yaml", ".yml") or Path(hardware).is_file()
    part = Hardware.read(hardware).device if profile else device(hardware, dtype)
    # A profile that was measured on a CPU has float32 figures.
    where = "cpu" if part.name == "cpu" or (profile and part.dtype == "float32") else "cuda"
    found = needs(components, config, workload, getattr(torch, dtype), part.runtime, where)
    return {
        "model": components.name,
        "config": config.describe(),
        "devices": config.world_size,
        "size": [workload.width, workload.height],
        "dtype": dtype,
        "predicted": True,
        "ranks": [
            {
                "stage": one.stage,
                "ranks": one.ranks,
                "phases": {phase.name: {**vars(phase), "total": phase.total} for phase in one.phases},
                "peak": one.peak.name,
                "peak_bytes": one.peak.total,
            }
            for one in found
        ],
    }


def _show_memory(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    width, height = result["size"]
    console.print(
        f"{result['model']}, {result['config']}, {width} x {height}, {result['dtype']}: GB of every rank; all figures "
        "are predicted",
        markup=False,
    )
    several = len({one["stage"] for one in result["ranks"]}) > 1
    for one in result["ranks"]:
        stages = f"stage {one['stage']}, " if several else ""
        table = Table(title=f"{stages}{one['ranks']} rank{'s' * (one['ranks'] > 1)}", title_justify="left")
        names = ("weights", "activations", "kept", "shared", "process", "total")
        for column in ("phase", *names):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for name, phase in one["phases"].items():
            style = "bold" if name == one["peak"] else None
            table.add_row(name, *(f"{phase[column] / 1e9:.3g}" for column in names), style=style)
        console.print(table)

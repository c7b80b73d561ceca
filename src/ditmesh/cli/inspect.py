"""`ditmesh inspect`: what a model's tokens look like to ditmesh, and what memory its ranks need."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from .options import AsJson, ConfigOptions, Size, at_least, one_of, with_groups
from .show import emit
from .values import parallel_config, parse_size

if TYPE_CHECKING:
    from ..layout import TokenLayout
    from ..memory.predict import Components, Request

NEEDED = "Memory"


@with_groups
def inspect(
    parallel: ConfigOptions,
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline, or an embedded model.")] = "",
    size: Size = None,
    check: Annotated[
        bool, typer.Option("--check", help="Probe the class and compare with the reviewed layout.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the layout as JSON, for TokenLayout.read.")
    ] = None,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="What every rank needs, phase by phase; predicted.", rich_help_panel=NEEDED),
    ] = False,
    named: Annotated[
        str | None, typer.Option("--model", "-m", help="The model, as the argument.", rich_help_panel=NEEDED)
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", "-n", help="Number of ranks.", callback=at_least(1), rich_help_panel=NEEDED),
    ] = None,
    frames: Annotated[
        int | None, typer.Option(help="Of a video.", callback=at_least(1), rich_help_panel=NEEDED)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--text-tokens", help="Of a prompt.", callback=at_least(1), rich_help_panel=NEEDED),
    ] = None,
    pictures: Annotated[
        int, typer.Option(help="Pictures that are generated at once.", callback=at_least(1), rich_help_panel=NEEDED)
    ] = 1,
    guidance: Annotated[
        bool | None,
        typer.Option("--guidance/--no-guidance", help="Whether it runs two branches.", rich_help_panel=NEEDED),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the weights.",
            callback=one_of(("float32", "bfloat16", "float16"), {"bf16": "bfloat16", "fp32": "float32"}),
            rich_help_panel=NEEDED,
        ),
    ] = "bfloat16",
    hardware: Annotated[
        str,
        typer.Option(
            metavar="PART|FILE",
            help="What a process has without a model: a device of plan's table, or a profile of doctor --save.",
            rich_help_panel=NEEDED,
        ),
    ] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Show a model's token layout, parameters and token counts; with --check, probe it and compare.

    With --memory: what every rank needs to load, encode, denoise and decode. Nothing is read but configurations.

    [bold]Examples[/bold]

    ditmesh inspect ./my-model --size 1024x1024 --check

    ditmesh inspect --memory --model flux.1-dev --devices 2 --tensor 2 --hardware 4090

    Exits with code 1 when --check finds a difference.
    """
    from .. import zoo
    from ..generate.model_info import find_model
    from ..layout import known_models
    from ..layout.describe import as_data, checked, on_meta

    model = named or model
    settings = parallel.settings()
    if memory:
        components, request, heads = _asked(model, parse_size(size), frames, tokens, pictures, guidance)
        count, chosen = parallel_config(devices, None, settings, heads)
        emit(_needed(components, request, count, chosen, heads, dtype, hardware), as_json, _show_memory)
        return
    if settings or devices is not None:
        raise InputError("a configuration's memory is shown with --memory; without it leave degrees and --devices out")
    info = find_model(model or zoo.path())
    name, config = info.transformer_class, info.transformer
    reviewed = known_models().get(name)
    probed, differences = checked(name, config) if check or reviewed is None else (None, [])
    layout = reviewed or probed
    assert layout is not None
    parameters = sum(parameter.numel() for parameter in on_meta(name, config).parameters())
    width, height = parse_size(size) or info.default_size or (1024, 1024)
    info.check_size(width, height)
    facts: dict[str, Any] = {
        "model": info.name,
        "pipeline": info.pipeline_class,
        "transformer": name,
        "parameters": parameters,
        "heads": info.heads,
        "size": [width, height],
        "image_tokens": info.image_tokens(width, height),
        "size_multiple": info.size_multiple,
        "layout": as_data(layout),
    }
    if check:
        facts["probed"] = as_data(probed) if probed else None
        facts["differences"] = differences
    if save is not None:
        try:
            layout.save(save)
        except OSError as error:
            raise InputError(f"cannot write {str(save)!r}: {error.strerror}; give --save another name") from None
    emit(facts, as_json, partial(_show, layout=layout, check=check))
    if differences:
        raise typer.Exit(1)


def _show(facts: dict[str, Any], layout: TokenLayout, check: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    width, height = facts["size"]
    console.print(f"[bold]{facts['transformer']}[/] of {facts['pipeline']} ({escape(facts['model'])})", highlight=False)
    console.print(
        f"{facts['parameters'] / 1e6:,.1f} million parameters, {facts['heads'] or '?'} heads; "
        f"{width} x {height} pixels are {facts['image_tokens']:,} image tokens; "
        f"sizes in multiples of {facts['size_multiple']}",
        highlight=False,
    )
    table = Table(title=f"Token layout ({layout.source})", title_justify="left")
    for column in ("blocks", "what", "argument", "tokens"):
        table.add_column(column)
    for region in layout.regions:
        chained = " (fed by the list before)" if region.chained else ""
        rows = [("stream", s.arg, f"{s.name}, dimension {s.dim}") for s in region.streams]
        rows += [("cut", c.arg, f"{' + '.join(c.tokens)}, dimension {c.dim}") for c in region.cuts]
        rows += [("whole", path, "") for path in region.whole]
        for number, attention in enumerate(region.attention, 1):
            mixes = f"{' + '.join(attention.queries)} ask {' + '.join(attention.keys)}" if attention.keys else "local"
            rows.append((f"attention {number}", "", mixes))
        for row, values in enumerate(rows):
            table.add_row(region.blocks + chained if row == 0 else "", *values)
        table.add_section()
    console.print(table)
    if layout.refused:
        console.print("Derived from the call that sets one: " + ", ".join(layout.refused), highlight=False)
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
) -> tuple[Components, Request, int | None]:
    """What takes memory, what is asked for, and the heads of the transformer."""
    from .. import zoo
    from ..generate.memory import components_of, components_of_shape, request_of
    from ..generate.model_info import find_model
    from ..memory.predict import Request
    from ..planner.catalogue import shapes

    shape = shapes().get(model.lower())
    if shape is None or Path(model).exists():
        info = find_model(model or zoo.path())
        if size is not None:
            info.check_size(*size)
        request = request_of(info, size, text, pictures, guidance is not False, -(-((frames or 1) - 1) // 4) + 1)
        return components_of(info), request, info.heads
    width, height = size or shape.size
    shape.tokens(width, height, frames or shape.num_frames)
    request = Request(
        width,
        height,
        height // shape.pixels,
        width // shape.pixels,
        ((frames or shape.num_frames) - 1) // shape.frames + 1,
        text or shape.text,
        pictures,
        shape.branches if guidance is None else 1 + guidance,
    )
    return components_of_shape(shape), request, shape.config.get("num_attention_heads")


def _needed(
    components: Components,
    request: Request,
    count: int,
    config: Any,
    heads: int | None,
    dtype: str,
    hardware: str,
) -> dict[str, Any]:
    """What every rank needs, as JSON can hold it."""
    import torch

    from ..config import ParallelConfig
    from ..costs.hardware import Hardware, device
    from ..memory.predict import needs

    profile = Path(hardware).suffix in (".yaml", ".yml") or Path(hardware).is_file()
    part = Hardware.read(hardware).device if profile else device(hardware, dtype)
    config = config or ParallelConfig.auto(count, heads or 1)
    # A profile that was measured on a CPU has float32 figures.
    where = "cpu" if part.name == "cpu" or (profile and part.dtype == "float32") else "cuda"
    found = needs(components, config, request, getattr(torch, dtype), part.runtime, where)
    return {
        "model": components.name,
        "config": config.describe(),
        "devices": config.world_size,
        "size": [request.width, request.height],
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
    for one in result["ranks"]:
        stages = f"stage {one['stage']}, " if len(result["ranks"]) > 1 else ""
        table = Table(title=f"{stages}{one['ranks']} rank{'s' * (one['ranks'] > 1)}", title_justify="left")
        names = ("weights", "activations", "kept", "shared", "process", "total")
        for column in ("phase", *names):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for name, phase in one["phases"].items():
            style = "bold" if name == one["peak"] else None
            table.add_row(name, *(f"{phase[column] / 1e9:.3g}" for column in names), style=style)
        console.print(table)

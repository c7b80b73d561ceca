"""`ditmesh inspect`: what a model's tokens look like to ditmesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, InputError
from .options import AsJson, Size
from .show import emit
from .values import parse_size

if TYPE_CHECKING:
    from ..layout import TokenLayout


def inspect(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline, or an embedded model.")] = "",
    size: Size = None,
    check: Annotated[
        bool, typer.Option("--check", help="Probe the class and compare with the reviewed layout.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the layout as JSON, for TokenLayout.read.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="WORDS|FILE", help='A configuration, such as "ulysses=4 cfg=2", for --hosts.'),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="N|N,N", help="Say what the configuration sends between so many hosts, or these with so many ranks."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's token layout, parameters and token counts; with --check, probe it and compare.

    Example: ditmesh inspect ./my-model --size 1024x1024 --check

    ditmesh inspect ./my-model --config "ulysses=4 cfg=2" --hosts 2

    Exits with code 1 when --check finds a difference.
    """
    from .. import zoo
    from ..generate.model_info import find_model
    from ..layout import known_models
    from ..layout.describe import as_data, checked, on_meta
    from ..strategies.sharded import parameters_in_pieces

    info = find_model(model or zoo.path())
    name, sizes = info.transformer_class, info.transformer
    reviewed = known_models().get(name)
    probed, differences = checked(name, sizes) if check or reviewed is None else (None, [])
    layout = reviewed or probed
    assert layout is not None
    module = on_meta(name, sizes)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    width, height = parse_size(size) or info.default_size or (1024, 1024)
    info.check_size(width, height)
    facts: dict[str, Any] = {
        "model": info.name,
        "pipeline": info.pipeline_class,
        "transformer": name,
        "parameters": parameters,
        "shared_by_shard": parameters_in_pieces(module, layout),
        "heads": info.heads,
        "size": [width, height],
        "image_tokens": info.image_tokens(width, height),
        "size_multiple": info.size_multiple,
        "layout": as_data(layout),
    }
    if check:
        facts["probed"] = as_data(probed) if probed else None
        facts["differences"] = differences
    if (config is None) != (hosts is None):
        raise InputError("--config and --hosts say together what travels between hosts; give both or neither")
    if config is not None and hosts is not None:
        facts["between_hosts"] = _between(str(model or zoo.path()), (width, height), config, hosts)
    if save is not None:
        try:
            layout.save(save)
        except OSError as error:
            raise InputError(f"cannot write {str(save)!r}: {error.strerror}; give --save another name") from None
    emit(facts, as_json, partial(_show, layout=layout, check=check))
    if differences:
        raise typer.Exit(1)


def _between(model: str, size: tuple[int, int], words: str, hosts: str) -> dict[str, Any]:
    """What a configuration sends between hosts, as plain data."""
    from ..costs.between import host_numbers
    from ..costs.hardware import machine
    from ..planner.across import better, between_hosts
    from ..planner.search import Limits, refusal
    from ..tools.planning.subject import Asked, subject
    from .values import config_of

    config = config_of(words)
    numbers = host_numbers(hosts, config.world_size)
    asked = subject(model, Asked(size=size))
    if reason := refusal(config, asked.model, Limits(tested=False)):
        raise ConfigError(reason)
    hardware = machine("h100", config.world_size)
    one = between_hosts(config, asked.model, asked.job, hardware, numbers)
    other = better(one, asked.model, asked.job, hardware, numbers) if one.busy else None
    return {
        "config": config.describe(),
        "hosts": [numbers.count(host) for host in range(max(numbers) + 1)],
        "element_bytes": asked.job.element,
        "branches": asked.job.branches,
        "axes": list(one.axes),
        "bytes_a_step": one.sent,
        "bytes_a_synchronous_step": one.synchronous,
        "better": None if other is None else {"config": other.config.describe(), "bytes_a_step": other.sent},
    }


def _show_between(between: dict[str, Any]) -> None:
    """Lines about what goes between hosts."""
    from rich.console import Console

    from ..costs.between import BUSY
    from ..planner.across import describe_bytes

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
    if "between_hosts" in facts:
        _show_between(facts["between_hosts"])
    if check and not facts["differences"]:
        console.print("[green]The probe agrees with this layout.[/]")
    for difference in facts.get("differences", []):
        console.print(f"[red]differs[/] {escape(difference)}", highlight=False)

"""`ditmesh layout`: a model's token layout, and a probe of its class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..report.report import Report, StyledText
from .options import AsJson, ModelArgument, common_option
from .show import emit

if TYPE_CHECKING:
    from ..layout import TokenLayout


def layout(
    *,
    model: ModelArgument = "",
    check: Annotated[
        bool, common_option("--check", help="Probe the class and compare with the reviewed layout.")
    ] = False,
    save: Annotated[
        Path | None,
        common_option("--save", metavar="FILE", help="Write the layout as JSON, which TokenLayout.read reads."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's token layout: the arguments of its blocks with tokens, and the attention between them.

    Nothing is read but configurations.

    [bold]Examples[/bold]

    ditmesh layout ./my-model --check

    ditmesh layout emoji-sd3 --save layout.json

    Exits with code 1 when --check finds a difference.
    """
    from .. import zoo
    from ..generate.model_info import find_model

    info = find_model(model or str(zoo.path()))
    # It takes torch along, which a mistake does not wait for.
    from ..layout import known_models
    from ..layout.describe import as_data, layout_of_class, probed_layout

    facts: dict[str, Any] = {"model": info.name, "pipeline": info.pipeline_class, "transformer": info.transformer_class}
    if check:
        probed, differences = probed_layout(info.transformer_class, info.transformer)
        reviewed = known_models().get(info.transformer_class, probed)
        facts |= {"layout": as_data(reviewed), "probed": as_data(probed), "differences": differences}
    else:
        reviewed = layout_of_class(info.transformer_class, info.transformer)
        facts["layout"] = as_data(reviewed)
    if save is not None:
        _write(reviewed, save)
    emit(facts, as_json, partial(_say, layout=reviewed))
    if facts.get("differences"):
        raise typer.Exit(1)


def _write(layout: TokenLayout, path: Path) -> None:
    try:
        layout.save(path)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}; give --save another name") from None


def _say(facts: dict[str, Any], layout: TokenLayout) -> Report:
    report = Report()
    report.text(StyledText(facts["transformer"], "strong"), f" of {facts['pipeline']} ({facts['model']})")
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
    if facts.get("differences") == []:
        report.text(StyledText("The probe agrees with this layout.", "good"))
    for difference in facts.get("differences", []):
        report.text(StyledText("differs ", "bad"), difference)
    return report

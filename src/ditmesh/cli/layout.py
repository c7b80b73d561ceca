"""`ditmesh layout`: a model's token layout."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ..report.report import Report, StyledText
from .options import AsJson, ModelArgument
from .show import emit

if TYPE_CHECKING:
    from ..layout import TokenLayout


def layout(*, model: ModelArgument = "", as_json: AsJson = False) -> None:
    """Show a model's token layout: the arguments of its blocks with tokens, and the attention between them.

    Nothing is read but configurations.

    [bold]Examples[/bold]

    ditmesh layout emoji-sd3
    """
    from .. import zoo
    from ..generate.model_info import find_model

    info = find_model(model or str(zoo.path()))
    # It takes torch along, which a mistake does not wait for.
    from ..layout.describe import layout_of_class

    found = layout_of_class(info.transformer_class, info.transformer)
    facts: dict[str, Any] = {"model": info.name, "pipeline": info.pipeline_class, "transformer": info.transformer_class}
    facts["layout"] = asdict(found)
    emit(facts, as_json, partial(_say, layout=found))


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
    return report

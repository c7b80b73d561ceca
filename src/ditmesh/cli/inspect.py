"""`ditmesh inspect`: a model's parameters, token counts and token layout."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ..report.report import Report, StyledText
from ..request import parse_size
from .options import AsJson, Frames, ModelArgument, Size
from .show import emit

if TYPE_CHECKING:
    from ..layout import TokenLayout


def inspect(*, model: ModelArgument = "", size: Size = None, frames: Frames = None, as_json: AsJson = False) -> None:
    """Show a model's parameters, its token counts, and its layout: which arguments of its blocks have tokens.

    Nothing is read but configurations.

    [bold]Example[/bold]

    ditmesh inspect ./my-model --size 1024x1024
    """
    from .. import zoo
    from ..generate.model_info import find_model
    from ..memory.sizes import workload_of

    pixels = parse_size(size)
    info = find_model(model or str(zoo.path()))
    # It takes torch along, which a mistake does not wait for.
    from ..layout.describe import layout_of_class, meta_model
    from ..strategies.sharded import parameters_in_pieces

    workload = workload_of(info, pixels, None, 1, None, frames)
    layout = layout_of_class(info.transformer_class, info.transformer)
    module = meta_model(info.transformer_class, info.transformer)
    facts = {
        "model": info.name,
        "pipeline": info.pipeline_class,
        "transformer": info.transformer_class,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "shared_by_shard": parameters_in_pieces(module, layout),
        "heads": info.heads,
        "size": [workload.width, workload.height],
        "image_tokens": workload.image,
        "size_multiple": info.size_multiple,
        "layout": asdict(layout),
    }
    emit(facts, as_json, partial(_say, layout=layout))


def _say(facts: dict[str, Any], layout: TokenLayout) -> Report:
    report = Report()
    width, height = facts["size"]
    report.text(StyledText(facts["transformer"], "strong"), f" of {facts['pipeline']} ({facts['model']})")
    report.text(
        f"{facts['parameters'] / 1e6:,.1f} million parameters, of which --shard shares out "
        f"{facts['shared_by_shard'] / max(1, facts['parameters']):.0%}; {facts['heads'] or '?'} heads; "
        f"{width} x {height} pixels are {facts['image_tokens']:,} image tokens; "
        f"sizes in multiples of {facts['size_multiple']}"
    )
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

"""`ditmesh inspect` and `ditmesh layout`: a model's parameters and token counts, and its token layout."""

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
    """Show a model's parameters, and how many tokens an image has.

    Nothing is read but configurations.

    [bold]Example[/bold]

    ditmesh inspect ./my-model --size 1024x1024
    """
    pixels = parse_size(size)
    facts, info = _facts(model)
    # It takes torch along, which a mistake does not wait for.
    import torch

    from ..layout.probe import layout_of_class, meta_model
    from ..memory.sizes import workload_of
    from ..strategies.ahead import ahead_in
    from ..strategies.sharded import parameters_in_pieces

    workload = workload_of(info, pixels, None, 1, None, frames)
    layout = layout_of_class(info.transformer_class, info.transformer)
    module = meta_model(info.transformer_class, info.transformer)
    ahead = ahead_in(module, info.transformer, torch.bfloat16).modules
    parameters = [each for path in ahead for each in module.get_submodule(path).parameters()]
    facts |= {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "shared_by_shard": parameters_in_pieces(module, layout),
        "ahead": sum(parameter.numel() for parameter in parameters),
        "modules_ahead": ahead,
        "heads": info.heads,
        "size": [workload.width, workload.height],
        "image_tokens": workload.image,
        "size_multiple": info.size_multiple,
    }
    emit(facts, as_json, _say)


def layout(*, model: ModelArgument = "", as_json: AsJson = False) -> None:
    """Show a model's token layout: the arguments of its blocks with tokens, and the attention between them.

    Nothing is read but configurations.

    [bold]Example[/bold]

    ditmesh layout emoji-sd3
    """
    facts, info = _facts(model)
    from ..layout.probe import layout_of_class

    found = layout_of_class(info.transformer_class, info.transformer)
    emit(facts | {"layout": asdict(found)}, as_json, partial(_say_layout, layout=found))


def _facts(model: str) -> tuple[dict[str, Any], Any]:
    """The names of a pipeline, and what its folder says."""
    from .. import zoo
    from ..generate.model_info import find_model

    info = find_model(model or str(zoo.path()))
    return {"model": info.name, "pipeline": info.pipeline_class, "transformer": info.transformer_class}, info


def _title(facts: dict[str, Any]) -> Report:
    report = Report()
    report.text(StyledText(facts["transformer"], "strong"), f" of {facts['pipeline']} ({facts['model']})")
    return report


def _say(facts: dict[str, Any]) -> Report:
    report, (width, height), parameters = _title(facts), facts["size"], max(1, facts["parameters"])
    report.text(
        f"{facts['parameters'] / 1e6:,.1f} million parameters, of which --shard shares out "
        f"{facts['shared_by_shard'] / parameters:.0%}, and precompute=true needs {facts['ahead'] / parameters:.0%} at "
        f"the start alone ({len(facts['modules_ahead'])} modules); {facts['heads'] or '?'} heads; "
        f"{width} x {height} pixels are {facts['image_tokens']:,} image tokens; "
        f"sizes in multiples of {facts['size_multiple']}"
    )
    return report


def _say_layout(facts: dict[str, Any], layout: TokenLayout) -> Report:
    report = _title(facts)
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

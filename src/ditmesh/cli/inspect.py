"""`ditmesh inspect`: a model's parameters and token counts, and the layers around a call of its transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import ParallelConfig
from ..report.report import Report, StyledText
from ..request import parse_size
from .options import (
    AsJson,
    ConfigOptions,
    ModelArgument,
    PredictedOptions,
    with_groups,
)
from .show import emit
from .values import config_or_devices

if TYPE_CHECKING:
    from ..generate.model_info import ModelInfo
    from ..layout import TokenLayout
    from ..memory.sizes import Workload


@with_groups
def inspect(
    *,
    model: ModelArgument = "",
    asked: PredictedOptions,
    parallel: ConfigOptions,
    as_json: AsJson = False,
) -> None:
    """Show a model's parameters and token counts.

    With a configuration also the layers around the transformer's call, with reasons. Nothing is read but
    configurations.

    [bold]Examples[/bold]

    ditmesh inspect ./my-model --size 1024x1024

    ditmesh inspect --devices 4 --ulysses 4
    """
    from .. import zoo
    from ..generate.model_info import find_model

    parse_size(asked.size)
    settings = parallel.settings()
    info = find_model(model or str(zoo.path()))
    # It takes torch along, which a mistake does not wait for.
    from ..layout.describe import layout_of_class

    workload = asked.workload(info)
    layout = layout_of_class(info.transformer_class, info.transformer)
    facts = _facts(info, layout, workload)
    if settings or asked.devices is not None or asked.config is not None:
        chosen = config_or_devices(asked.devices, asked.config, settings)
        if isinstance(chosen, int):
            chosen = ParallelConfig.auto(chosen, info.heads or 1)
        facts |= _layers(info.transformer_class, info.transformer, layout, chosen, asked.dtype)
    emit(facts, as_json, _say)


def _facts(info: ModelInfo, layout: TokenLayout, workload: Workload) -> dict[str, Any]:
    """A model's parameters and token counts, as plain data."""
    from ..layout.describe import meta_model
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
    }


def _layers(transformer: str, sizes: Any, layout: TokenLayout, config: ParallelConfig, dtype: str) -> dict[str, Any]:
    """The layers around a call of the transformer, as plain data."""
    import torch

    from .. import recipe
    from ..layout.describe import meta_model
    from ..memory.walk import layers_around

    recipe.check_recipe(recipe.RECIPE, config, [(meta_model(transformer, sizes), layout)])
    layers = layers_around(transformer, sizes, layout, config, getattr(torch, dtype))
    return {"config": config.describe(), "layers": [vars(layer) for layer in layers]}


def _say(facts: dict[str, Any]) -> Report:
    report = Report()
    width, height = facts["size"]
    report.text(StyledText(facts["transformer"], "strong"), f" of {facts['pipeline']} ({facts['model']})")
    report.text(
        f"{facts['parameters'] / 1e6:,.1f} million parameters, of which --shard shares out "
        f"{facts['shared_by_shard'] / max(1, facts['parameters']):.0%}; {facts['heads'] or '?'} heads; "
        f"{width} x {height} pixels are {facts['image_tokens']:,} image tokens; "
        f"sizes in multiples of {facts['size_multiple']}"
    )
    around, rows = "", []
    for layer in facts.get("layers", ()):
        rows.append(("" if layer["around"] == around else layer["around"], layer["name"], layer["reason"]))
        around = layer["around"]
    if rows:
        report.table(("around", "what", "why"), rows, f"{facts['config']}, outermost first", keys=3)
    return report

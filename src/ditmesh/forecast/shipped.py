"""The recorded work of the catalogue's models, so that their plans need no diffusers.

``works/NAME.json`` has what the class gives on the meta device, and for which version of diffusers that was;
`benchmarks/planner.py works` writes it. With another version the class is asked.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .._version import library_versions
from ..core.clock import timestep_of
from ..errors import InputError
from ..layout import known_models
from ..layout.describe import meta_model
from .catalogue import Shape
from .costs.work import Work, as_data, from_data
from .model_work import work_of
from .search import Model

WORKS = Path(__file__).with_name("works")


def shipped_model(shape: Shape) -> Model:
    """A model that ships: as it was derived beforehand, or from its class.

    Raises:
        InputError: its class has no reviewed layout.
        LayoutError: its work cannot be found out on the meta device.
    """
    path = WORKS / f"{shape.name}.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if data.get("diffusers") != _diffusers():
        return derived(shape.transformer, shape.config)
    work, refused = from_data(data["work"]), data["uncut"]
    uncut = {degree: refused.get(str(degree)) for degree in range(2, work.heads + 1)}
    outline = _outline(shape.transformer, work, data["timestep"])
    return Model(outline, known_models()[shape.transformer], work, uncut)


def derived(transformer: str, config: Mapping[str, Any]) -> Model:
    """A model of a class and its configuration, on the meta device.

    Raises:
        InputError: the class has no reviewed layout.
        LayoutError: its work cannot be found out on the meta device.
    """
    layout = known_models().get(transformer)
    if layout is None:
        raise InputError(
            f"{transformer} has no reviewed token layout, so its work is not known before it has run; plan knows "
            f"{', '.join(sorted(known_models()))}"
        )
    module = meta_model(transformer, dict(config))
    return Model(module, layout, work_of(module, layout))


def shipped_data(shape: Shape) -> dict[str, Any]:
    """The shipped data of a model, derived from its class."""
    model = derived(shape.transformer, shape.config)
    uncut = {degree: model.slicing_refusal(degree) for degree in range(2, model.work.heads + 1)}
    return {
        "diffusers": _diffusers(),
        "timestep": timestep_of(model.module, model.layout),
        "uncut": {str(degree): reason for degree, reason in uncut.items() if reason},
        "work": as_data(model.work),
    }


def _diffusers() -> str | None:
    return library_versions(("diffusers",)).get("diffusers")


def _outline(name: str, work: Work, timestep: str | None) -> nn.Module:
    """A stub module with the attributes that `ditmesh.recipe.check_recipe` reads of a transformer.

    These are its class's name, its name for the timestep, how many blocks its lists have, and their heads.
    """

    def forward(self: nn.Module, *args: Any) -> None:
        raise NotImplementedError(f"the outline of {name} computes nothing")

    names = ("self", timestep or "hidden_states")
    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    outline: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    for path, count in Counter(work.blocks[kind].name for kind in work.order).items():
        *parents, last = path.split(".")
        place = outline
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.add_module(last, nn.ModuleList(_block(work.heads) for _ in range(count)))
    return outline


def _block(heads: int) -> nn.Module:
    block = nn.Module()
    block.to_q, block.heads = nn.Identity(), heads  # type: ignore[assignment]
    return block

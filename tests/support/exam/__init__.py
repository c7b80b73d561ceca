"""Tiny pipelines of diffusers by class, and calls of them as their users write them: what stands in pipelines.json.

The file has rows of five kinds:

* ``values``: names for what calls are often given;
* ``calls``: names for arguments that several pipelines take;
* ``sets``: components of several pipelines, of which each takes those that it knows;
* ``families``: pipelines of the families of reviewed layouts, as `support.more_pipelines` calls them;
* ``exams``: pipelines as their users call them. A row's name begins with its class.

A component is a name of parts.json, or ``{"like": name, …}`` with some settings changed, or ``{"class": …}``. Those
that a pipeline does without when it gets embeddings and returns latents (text encoders, autoencoders) are None. In a
call ``"$name"`` or ``{"$": "name", …}`` is a value, or a function of `support.exam.values`; ``{"each": …}`` is one for
one prompt and a list of as many for several; ``"..."`` is no argument at all.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch

from support.exam import stand_ins, values
from support.models import class_of, part

Call = Callable[[list[int]], dict[str, Any]]
TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("pipelines.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Exam:
    """How to make a pipeline of tiny random parts, and how it is called.

    Attributes:
        make: the pipeline; the same weights in every process.
        call: all keyword arguments of a call for prompts given by number, generators and sizes among them.
        guidance: whether the call has branches of guidance, so that ``cfg=2`` has something to share.
        several: whether it takes several prompts at once, so that ``data=2`` has.
        refused: by configuration ("ulysses=2", …; "tokens" for ulysses and ring), a word of the sentence that refuses.
    """

    make: Callable[[], Any]
    call: Call
    guidance: bool = True
    several: bool = True
    refused: dict[str, str] = field(default_factory=dict)


def build(pipeline: type | str, **parts: Any) -> Any:
    """The pipeline of these parts; parts that it asks for and that are not given are None."""
    kind = getattr(diffusers, pipeline) if isinstance(pipeline, str) else pipeline
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    asked = {one.name: None for one in parameters if one.default is inspect.Parameter.empty}
    return kind(**{**asked, **parts})


def flow(**settings: Any) -> Any:
    """The scheduler of most flow-matching pipelines."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def pipeline(name: str, row: dict[str, Any], **changes: Any) -> Any:
    """The pipeline of a row; ``changes``: other components."""
    given = {**TABLE["sets"].get(row.get("set"), {}), **row.get("parts", {})}
    kind = class_of(row.get("kind", name.split()[0]))
    if issubclass(kind, diffusers.ModularPipeline):
        # Its denoising alone; what its encoders make is passed to the call.
        blocks = class_of(kind.default_blocks_name)()
        blocks = blocks.get_workflow(row["workflow"]) if "workflow" in row else blocks
        for block in [one for one in blocks.sub_blocks if not one.startswith("denoise")]:
            blocks.sub_blocks.pop(block)
        pipe = kind(blocks)
        pipe.update_components(**{key: part(value) for key, value in {"scheduler": "flow", **given}.items()})
        return pipe
    known = inspect.signature(kind.__init__).parameters
    parts = {key: part(value) for key, value in given.items() if key in known and key not in changes}
    pipe = build(kind, **parts, **changes)
    for attribute, value in row.get("attributes", {}).items():
        setattr(pipe, attribute, value)
    if "then" in row:
        getattr(stand_ins, row["then"])(pipe)
    return pipe


# --- calls -----------------------------------------------------------------------------------------------------------


def value(given: Any, prompts: list[int]) -> Any:
    """What stands in a call for these prompts."""
    if isinstance(given, str) and given.startswith("$"):
        given = {"$": given[1:]}
    if isinstance(given, list):
        return [value(one, prompts) for one in given]
    if not isinstance(given, dict):
        return given
    if "each" in given:
        made = [value(given["each"], [one]) for one in prompts]
        return made[0] if len(made) == 1 and not given.get("listed") else made
    if "$" not in given:
        return {key: value(one, prompts) for key, one in given.items()}
    name, settings = given["$"], {key: one for key, one in given.items() if key != "$"}
    if name in TABLE["values"]:
        return value({**TABLE["values"][name], **settings}, prompts)
    return getattr(values, name)(prompts, **{key: value(one, prompts) for key, one in settings.items()})


def arguments(given: Any, prompts: list[int]) -> dict[str, Any]:
    """Arguments of a call, by names of ``calls`` and as they are; later ones count."""
    if isinstance(given, list):
        return {key: one for some in given for key, one in arguments(some, prompts).items()}
    return arguments(TABLE["calls"][given], prompts) if isinstance(given, str) else value(given, prompts)


def left_out(given: Any) -> bool:
    return isinstance(given, str) and given == "..."


def whole_call(given: list[Any], prompts: list[int]) -> dict[str, Any]:
    """A call of two steps with a generator for every prompt, which asks for latents."""
    usual = {"num_inference_steps": 2, "output_type": "latent", "generator": "$generators"}
    made = arguments([usual, *given], prompts)
    return {key: one for key, one in made.items() if not left_out(one)}


def exam(name: str, *given: Any, row: dict[str, Any] | None = None, **changes: Any) -> Exam:
    """A row of the table; ``given``: further arguments of the call, ``changes``: other components."""
    row = TABLE["exams"][name] if row is None else row
    if "family" in row:
        family = TABLE["families"][row["family"]]
        row = {**family, "guidance": bool(family.get("guidance", True)), **row}
        row["call"] = [*family["call"], *TABLE["exams"][name].get("call", [])]
    if "like" in row:
        row = {**TABLE["exams"][row["like"]], **row}
    return Exam(
        partial(pipeline, name, row, **changes),
        partial(whole_call, [*row["call"], *given]),
        **{key: row[key] for key in ("guidance", "several", "refused") if key in row},
    )


EXAMS = {name: exam(name) for name in TABLE["exams"]}


def draw(pipe: Any, call: dict[str, Any]) -> Any:
    """What a pipeline returns, without gradients or a bar of its progress."""
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return pipe(**call)

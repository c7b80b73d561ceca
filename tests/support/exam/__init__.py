"""Tiny pipelines of diffusers by class, and calls of them as their users write them.

Parts that a pipeline does without when it gets embeddings and returns latents (text encoders, autoencoders) are None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

Call = Callable[[list[int]], dict[str, Any]]

# Tokens and channels of a prompt's embeddings; channels of the models without a reviewed layout.
TOKENS, WIDTH, NARROW = 12, 32, 20

# The prompt that guidance leads away from.
NEGATIVE = 0


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


def unipc(shift: float = 3.0) -> Any:
    """The scheduler of Wan and its kin."""
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


# --- calls -----------------------------------------------------------------------------------------------------------


def generators(prompts: list[int]) -> list[torch.Generator]:
    """One for every prompt."""
    return [torch.Generator().manual_seed(100 + one) for one in prompts]


def one_generator(prompts: list[int]) -> torch.Generator:
    """Of pipelines that take no list of them."""
    return generators(prompts)[0]


def each(value: Any) -> Callable[[list[int]], Any]:
    """One thing for one prompt, a list of as many for several."""
    return lambda prompts: value if len(prompts) == 1 else [value] * len(prompts)


def latents(*given: Mapping[str, Any] | Call, **more: Any) -> Call:
    """A call of two steps with a generator for every prompt, which asks for latents, and further arguments.

    An argument may be a function of the prompts; ``...`` stands for none at all.
    """

    def call(prompts: list[int]) -> dict[str, Any]:
        arguments = {"num_inference_steps": 2, "output_type": "latent", "generator": generators(prompts)}
        for one in (*given, more):
            arguments.update(one(prompts) if callable(one) else one)
        made = {key: value(prompts) if inspect.isfunction(value) else value for key, value in arguments.items()}
        return {key: value for key, value in made.items() if value is not ...}

    return call


def noise(prompts: list[int], *shape: int) -> torch.Tensor:
    """(P, *shape): noise drawn from every prompt's number."""
    return torch.stack([torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + one)) for one in prompts])


def mask(prompts: list[int], tokens: int = TOKENS, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """(P, T): prompts of different lengths, padded on the right; the negative prompt is short."""
    lengths = torch.tensor([tokens - 1 - one % 4 if one != NEGATIVE else 3 for one in prompts])
    return (torch.arange(tokens) < lengths[:, None]).to(dtype)


def text(
    prompts: list[int],
    masked: str = "",
    shape: tuple[int, ...] = (TOKENS, WIDTH),
    dtype: torch.dtype = torch.long,
    suffix: str = "",
) -> dict[str, Any]:
    """Embeddings of the prompts and the negative prompt, with masks under the name ``masked`` if there is one."""
    made: dict[str, Any] = {}
    for prefix, numbers in (("", prompts), ("negative_", [NEGATIVE] * len(prompts))):
        made[f"{prefix}prompt_embeds{suffix}"] = noise(numbers, *shape)
        if masked:
            made[f"{prefix}{masked}{suffix}"] = mask(numbers, shape[0], dtype)
    return made


def texts(*arguments: Any, **more: Any) -> Call:
    """As `text`, of whatever prompts."""
    return lambda prompts: text(prompts, *arguments, **more)


def pooled(width: int = 16) -> Call:
    """One embedding of the whole prompt, and of the negative one."""
    return lambda prompts: {
        "pooled_prompt_embeds": noise(prompts, width),
        "negative_pooled_prompt_embeds": noise([NEGATIVE] * len(prompts), width),
    }


def positive(call: Call) -> Call:
    """Without what guidance leads away from."""
    return lambda prompts: {key: value for key, value in call(prompts).items() if not key.startswith("negative")}

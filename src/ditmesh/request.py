"""The request of a user; each field is declared once.

The command line's options, the bodies of the HTTP APIs, jobs and receipts are made from the fields of `PictureRequest`,
or rename some of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from .errors import ConfigError, InputError, problem_text

# What of a pipeline beside the transformers is off the device while it does not work.
Offload = Literal["none", "model", "group", "sequential"]
Asked = TypeVar("Asked", bound="PictureRequest")

# What a request may ask for: denoising steps, images of one call of the pipeline, characters of a prompt, frames of a
# video, frames per second.
MOST_STEPS = 10_000
MOST_TOGETHER = 1024
LONGEST_PROMPT = 100_000
MOST_FRAMES, MOST_FPS = 4096, 1000

Count = Annotated[int, Field(ge=1, le=2**16)]
PIPELINES = "the pipeline's"


@dataclass(frozen=True)
class RequestField:
    """The description of a field of `PictureRequest` besides its type and bounds.

    Attributes:
        flags: of the command line, its spelling first; none: there is no option. ``common``: shown among the common
            ones.
        usual: the default, in words.
        argument: of a pipeline's call, which is given the value as it is. A pipeline without it refuses the field.
    """

    help: str
    flags: tuple[str, ...] = ()
    common: bool = False
    usual: str | None = PIPELINES
    argument: str | None = None

    @property
    def option(self) -> str:
        """Name of the parameter of commands."""
        return self.flags[0].strip("-").replace("-", "_")


class PictureRequest(BaseModel):
    """A request for images or videos of one prompt. Image ``i`` has seed ``seed + i``, and the same pixels as alone.

    For class-conditional models the prompt is the class's name. None is the pipeline's own; for width and height those
    of an input image, rounded to what the model can make and with no more pixels than its default. A pipeline that
    makes as many frames as its input video has is given so many of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Annotated[str, RequestField("Generate an image of each prompt.")] = Field(
        default="", max_length=LONGEST_PROMPT
    )
    negative_prompt: Annotated[
        str | None,
        RequestField("Say what the images should not show.", ("--negative",), usual=None, argument="negative_prompt"),
    ] = Field(default=None, max_length=LONGEST_PROMPT)
    n: Annotated[int, RequestField("Generate this many images per prompt.", ("--num-images",), common=True)] = Field(
        default=1, ge=1
    )
    width: Annotated[
        Count | None,
        RequestField(
            "Set width and height in pixels.", ("--size",), common=True, usual="an input image's, or the pipeline's"
        ),
    ] = None
    height: Annotated[Count | None, RequestField("")] = None
    steps: Annotated[int | None, RequestField("Set the number of denoising steps.", ("--steps", "-s"), common=True)] = (
        Field(default=None, ge=1, le=MOST_STEPS)
    )
    guidance: Annotated[
        FiniteFloat | None,
        RequestField("Set the guidance scale.", ("--guidance", "-g"), common=True, argument="guidance_scale"),
    ] = None
    strength: Annotated[
        float | None, RequestField("Set how much of --image or --video is replaced: 0 keeps it, 1 ignores it.")
    ] = Field(default=None, gt=0, le=1)
    seed: Annotated[
        int,
        RequestField(
            "Set the seed of the first image; image i has seed + i. With -1 it is random.", ("--seed",), common=True
        ),
    ] = 0
    frames: Annotated[int | None, RequestField("Generate this many frames of a video.", ("--frames",))] = Field(
        default=None, ge=1, le=MOST_FRAMES
    )
    fps: Annotated[
        float | None, RequestField("Set the frames per second of a video.", ("--fps",), usual="the pipeline's, or 16")
    ] = Field(default=None, gt=0, le=MOST_FPS)

    @classmethod
    def read(cls: type[Asked], **fields: Any) -> Asked:
        """A request of these fields; `FieldError`: a field is out of bounds."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise field_error(error) from None


def size_of(request: PictureRequest) -> tuple[int, int] | None:
    """Width and height in pixels; None: not given."""
    return None if request.width is None or request.height is None else (request.width, request.height)


def request_fields() -> dict[str, RequestField]:
    """The descriptions of the fields of a request, by name."""
    fields = PictureRequest.model_fields.items()
    return {name: next(one for one in field.metadata if isinstance(one, RequestField)) for name, field in fields}


def plain_type(name: str) -> Any:
    """The type of a field without its bounds, such as ``int | None``."""
    kind = PictureRequest.model_fields[name].annotation
    arms = [get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in get_args(kind)] or [kind]
    return arms[0] if len(arms) == 1 else arms[0] | None


def field_values(given: PictureRequest) -> dict[str, Any]:
    """The values of a request's fields by name, without fields that `PictureRequest` does not have."""
    return {name: getattr(given, name) for name in PictureRequest.model_fields}


def option_of(name: str) -> str:
    """The command line's spelling of a field of a request, or of another option."""
    flags = request_fields()[name].flags if name in PictureRequest.model_fields else ()
    return flags[0] if flags else f"--{name.replace('_', '-')}"


class FieldError(InputError):
    """A field of a request is invalid, or not supported by this model.

    Its text is the command line's; `spelled` is for other front ends.

    Args:
        field: name of the field; of a `PictureRequest`, a role of input files, or ``"size"`` and ``"batch"``.
        why: one sentence, in which names of fields stand in braces: ``"{steps} {} is not possible; use 1 or more"``.
        values: in the places of the empty braces.
    """

    def __init__(self, field: str, why: str, *values: Any) -> None:
        super().__init__(field, why, *values)
        self.field, self.why, self.values = field, why, values

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The message with the front end's names of fields."""
        return Formatter().vformat(self.why, self.values, _Spelling(spell))

    def __str__(self) -> str:
        return self.spelled(option_of)


class FieldConfigError(FieldError, ConfigError):
    """A field of a request does not fit the configuration."""


class _Spelling(dict[str, str]):
    def __init__(self, spell: Callable[[str], str]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, name: str) -> str:
        return self._spell(name)


def field_error(error: ValidationError) -> FieldError:
    """The first pydantic error as a sentence."""
    problem = error.errors(include_url=False)[0]
    name, value = str(problem["loc"][0]), problem["input"]
    if isinstance(value, str):
        texts = {"prompt": "the prompt", "negative_prompt": "the negative prompt"}
        try:
            check_text(value, texts.get(name, option_of(name)))
        except InputError as wrong:
            return FieldError(name, "{}", wrong)
    return FieldError(name, "{" + name + "} {}: {}", value, problem_text(problem))


def parse_size(text: str | None) -> tuple[int, int] | None:
    """``"96x64"`` to (width, height) in pixels; None stays None; `FieldError`: the text is not a size."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})[xX×]([0-9]{1,9})", text.strip())
    if match is None or not (int(match[1]) and int(match[2])):
        shown = text[:40] if text.strip() and text.isprintable() else repr(text[:40])
        side = re.fullmatch(r"\D*([1-9][0-9]{1,3})\D*", text)
        example = side[1] if side is not None else "1024"
        raise FieldError("width", "{width} {}: write WIDTHxHEIGHT, for example {}x{}", shown, example, example)
    return int(match[1]), int(match[2])


def check_text(text: str, name: str) -> None:
    """Reject text that is too long, or that no file can hold (an unpaired surrogate), with an `InputError`."""
    if len(text) > LONGEST_PROMPT:
        raise InputError(f"{name} has {len(text)} characters; use {LONGEST_PROMPT} at most")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} is not Unicode: character {error.start + 1} is {text[error.start]!r}, half of a pair; "
            "write it in UTF-8"
        ) from None

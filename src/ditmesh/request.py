"""The request of a user; each field is declared once.

The command line's options, the bodies of the HTTP APIs, ComfyUI's widgets, jobs and receipts are made from the fields
of `PictureRequest`, or rename some of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic.fields import FieldInfo

from .errors import ConfigError, InputError

Asked = TypeVar("Asked", bound="PictureRequest")

# What a request may ask for: denoising steps, images of one call of the pipeline, characters of a prompt, frames of a
# video, frames per second.
MOST_STEPS = 10_000
MOST_TOGETHER = 1024
LONGEST_PROMPT = 100_000
MOST_FRAMES, MOST_FPS = 4096, 1000
# JavaScript does not represent larger numbers exactly.
LARGEST_IN_PAGE = 2**53 - 1

Count = Annotated[int, Field(ge=1, le=2**16)]
PIPELINES = "the pipeline's"


@dataclass(frozen=True)
class Widget:
    """A widget of ComfyUI's node of sampling; ``usual``: its default, a float where the field is one.

    ``least`` to ``most`` by ``step`` are its values; the least stands for a field that is not given, where
    ``least_leaves``.
    """

    name: str
    usual: float
    tooltip: str
    least: float = 0
    most: float = 0
    step: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    least_leaves: bool = True

    def leaves(self, value: Any) -> bool:
        """True if a value means that the field is not given."""
        return self.least_leaves and (value == self.least or value < 0)


@dataclass(frozen=True)
class RequestField:
    """The description of a field of `PictureRequest` besides its type and bounds.

    Attributes:
        flags: of the command line, its spelling first; none: there is no option. ``common``: shown among the common
            ones.
        usual: the default, in words.
        wrong: the message about a value out of bounds, as `FieldError` takes it.
        argument: of a pipeline's call, which is given the value as it is. A pipeline without it refuses the field.
    """

    help: str
    flags: tuple[str, ...] = ()
    common: bool = False
    usual: str | None = PIPELINES
    wrong: str | None = None
    argument: str | None = None
    widget: Widget | None = None

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

    prompt: Annotated[
        str,
        RequestField(
            "Generate an image of each prompt.",
        ),
    ] = Field(default="", max_length=LONGEST_PROMPT)
    negative_prompt: Annotated[
        str | None,
        RequestField(
            "Say what the images should not show.",
            ("--negative",),
            usual=None,
            argument="negative_prompt",
        ),
    ] = Field(default=None, max_length=LONGEST_PROMPT)
    n: Annotated[
        int,
        RequestField(
            "Generate this many images per prompt.",
            ("--num-images",),
            common=True,
            widget=Widget("images", 1, "Number of pictures.", 1, MOST_TOGETHER, least_leaves=False),
        ),
    ] = Field(default=1, ge=1)
    width: Annotated[
        Count | None,
        RequestField(
            "Set width and height in pixels.",
            ("--size",),
            common=True,
            usual="an input image's, or the pipeline's",
            widget=Widget("width", 0, "In pixels. 0: of the image, else the model's own.", most=16384, step=8),
        ),
    ] = None
    height: Annotated[
        Count | None,
        RequestField(
            "",
            widget=Widget("height", 0, "In pixels. 0: of the image, else the model's own.", most=16384, step=8),
        ),
    ] = None
    steps: Annotated[
        int | None,
        RequestField(
            "Set the number of denoising steps.",
            ("--steps", "-s"),
            common=True,
            widget=Widget("steps", 0, "Denoising steps. 0: the model's own.", most=MOST_STEPS),
        ),
    ] = Field(default=None, ge=1, le=MOST_STEPS)
    guidance: Annotated[
        FiniteFloat | None,
        RequestField(
            "Set the guidance scale.",
            ("--guidance", "-g"),
            common=True,
            wrong="guidance {} is not a number; use one such as {guidance} 3.5",
            argument="guidance_scale",
            widget=Widget("guidance", -1.0, "-1: the model's own.", -1.0, 100.0, 0.1),
        ),
    ] = None
    strength: Annotated[
        float | None,
        RequestField(
            "Set how much of --image or --video is replaced: 0 keeps it, 1 ignores it.",
            wrong="strength {:g} is not possible; use more than 0 and at most 1",
        ),
    ] = Field(default=None, gt=0, le=1)
    seed: Annotated[
        int,
        RequestField(
            "Set the seed of the first image; image i has seed + i. With -1 it is random.",
            ("--seed",),
            common=True,
            widget=Widget(
                "seed",
                0,
                "The same seed gives the picture of `ditmesh generate --seed`.",
                most=LARGEST_IN_PAGE,
                more={"control_after_generate": True},
                least_leaves=False,
            ),
        ),
    ] = 0
    frames: Annotated[
        int | None,
        RequestField(
            "Generate this many frames of a video.",
            ("--frames",),
            widget=Widget("frames", 0, "Of a video. 0: the model's own number.", most=MOST_FRAMES),
        ),
    ] = Field(default=None, ge=1, le=MOST_FRAMES)
    fps: Annotated[
        float | None,
        RequestField(
            "Set the frames per second of a video.",
            ("--fps",),
            usual="the pipeline's, or 16",
            wrong="{fps} {:g} is not possible; use more than 0 and at most 1000",
        ),
    ] = Field(default=None, gt=0, le=MOST_FPS)

    @classmethod
    def read(cls: type[Asked], **fields: Any) -> Asked:
        """A request of these fields.

        Raises:
            FieldError: a field is out of bounds.
        """
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
    name, value, about = str(problem["loc"][0]), problem["input"], problem.get("ctx") or {}
    if isinstance(value, str):
        texts = {"prompt": "the prompt", "negative_prompt": "the negative prompt"}
        try:
            check_text(value, texts.get(name, option_of(name)))
        except InputError as wrong:
            return FieldError(name, "{}", wrong)
    entry = request_fields().get(name, RequestField(""))
    if entry.wrong is None and ("ge" in about or "le" in about):
        declared = _declared(PictureRequest.model_fields[name])
        least, most = (
            next((getattr(one, bound) for one in declared if hasattr(one, bound)), None) for bound in ("ge", "le")
        )
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        return FieldError(name, "{" + name + "} {} is not possible; use {}", value, bounds)
    return FieldError(name, entry.wrong or "{" + name + "} {}: {}", value, problem["msg"].lower())


def _declared(field: FieldInfo) -> list[Any]:
    """The bounds of a field, or of one of its types."""
    inside = [about for kind in get_args(field.annotation) for about in get_args(kind)[1:]]
    return [*field.metadata, *(bound for about in inside for bound in getattr(about, "metadata", ()))]


def parse_size(text: str | None) -> tuple[int, int] | None:
    """``"96x64"`` to (width, height) in pixels; None stays None.

    Raises:
        FieldError: the text is not a size.
    """
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
    """Reject text that is too long, or that no file can hold (an unpaired surrogate).

    Raises:
        InputError: naming the text.
    """
    if len(text) > LONGEST_PROMPT:
        raise InputError(f"{name} has {len(text)} characters; use {LONGEST_PROMPT} at most")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} is not Unicode: character {error.start + 1} is {text[error.start]!r}, half of a pair; "
            "write it in UTF-8"
        ) from None

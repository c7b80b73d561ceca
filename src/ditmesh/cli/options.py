"""Options that several commands have, written once.

A group of options is a dataclass; a command that takes one as a parameter, and is put through `with_groups`, has all
its fields as options. Those of the parallel configuration are made from the fields of `ParallelConfig`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ..config import ParallelConfig, did_you_mean, setting
from ..errors import ConfigError, InputError

PICTURES, RANKS, PARALLEL = "Pictures", "Ranks", "Parallel configuration"


def at_least(least: float, says: str) -> Callable[[Any], Any]:
    """Refuses numbers below ``least``, and those that are none, with a sentence that has a place for the value."""

    def check(value: Any) -> Any:
        if value is not None and not (isfinite(value) and value >= least):
            raise InputError(says.format(value=f"{value:g}" if isinstance(value, float) else value))
        return value

    return check


def one_of(words: tuple[str, ...], name: str, also: dict[str, str] | None = None) -> Callable[[Any], Any]:
    """Refuses other words, and says what was perhaps meant.

    Args:
        words: the possible ones.
        name: of the option.
        also: other words for them.
    """

    def check(value: Any) -> Any:
        value = (also or {}).get(value, value)
        if value is None or value in words:
            return value
        hint = did_you_mean(value, words)
        if name == "--device" and value.isdecimal():
            hint = f"; for {value} ranks say --devices {value}"
        raise InputError(f"{name} {value!r} is none of {', '.join(words)}{hint}")

    return check


DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

PromptsFile = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="More prompts, one a line.", rich_help_panel=PICTURES),
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Denoising steps.",
        show_default="the pipeline's",
        rich_help_panel=PICTURES,
        callback=at_least(1, "--steps {value} draws nothing: {value} steps; use --steps 1 or more"),
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        help="Guidance scale.",
        show_default="the pipeline's",
        rich_help_panel=PICTURES,
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        metavar="WxH", help="Width and height in pixels.", show_default="the pipeline's", rich_help_panel=PICTURES
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Seed of the first picture; picture i has seed + i.",
        rich_help_panel=PICTURES,
        callback=at_least(0, "--seed {value} is out of range; use --seed 0 or more"),
    ),
]
if TYPE_CHECKING:
    from ..generate.receipt import Dtype
    from ..launch import DeviceChoice as Device

    DType = Dtype | None
else:
    # Words, so that what is said of a wrong one is ours.
    DType = Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DTYPES),
            help="Type of the weights.",
            show_default="float32 on the CPU, bfloat16 on CUDA",
            rich_help_panel=RANKS,
            callback=one_of(DTYPES, "--dtype", SHORT),
        ),
    ]
    Device = Annotated[
        str,
        typer.Option(
            metavar="|".join(DEVICES),
            help="What the ranks run on; auto: GPUs if there are any.",
            rich_help_panel=RANKS,
            callback=one_of(DEVICES, "--device"),
        ),
    ]
Devices = Annotated[
    int | None,
    typer.Option(
        help="Number of ranks, each with a device of its own.",
        rich_help_panel=RANKS,
        callback=at_least(1, "{value} devices draw nothing; use --devices 1 or more"),
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads of each rank.",
        show_default="the cores shared out",
        rich_help_panel=RANKS,
        callback=at_least(1, "{value} threads compute nothing; use --threads 1 or more"),
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="How long a rank may wait for another one.",
        rich_help_panel=RANKS,
        callback=at_least(1e-9, "a timeout of {value} seconds lets no rank answer; use more than 0"),
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace pictures of the same names, if ditmesh wrote them; else they are kept."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@dataclass(frozen=True)
class PictureOptions:
    """What is generated."""

    prompts_file: PromptsFile = None
    steps: Steps = None
    guidance: Guidance = None
    negative: Annotated[
        str | None,
        typer.Option(help="What the pictures should not show.", rich_help_panel=PICTURES),
    ] = None
    size: Size = None
    seed: Seed = 0
    num_images: Annotated[
        int,
        typer.Option(
            help="Pictures per prompt.",
            rich_help_panel=PICTURES,
            callback=at_least(1, "{value} images per prompt draw nothing; use --num-images 1 or more"),
        ),
    ] = 1


@dataclass(frozen=True)
class RankOptions:
    """What ranks are."""

    device: Device = "auto"
    dtype: DType = None
    threads: Threads = None
    timeout: Timeout = 600.0

    def kind(self, world_size: int) -> Literal["cpu", "cuda"]:
        """What ``world_size`` ranks on this machine run on."""
        from ..launch import resolve_device

        return resolve_device(self.device, world_size)

    def dtype_on(self, kind: str) -> Dtype:
        """Type of the weights, on ``"cpu"`` or ``"cuda"``."""
        return self.dtype or ("bfloat16" if kind == "cuda" else "float32")


def _config_option(name: str) -> tuple[str, Any, Any]:
    """Name, annotation and default of the option for a field of `ParallelConfig`; what is not given is None."""
    known, of = ParallelConfig.model_fields[name], setting(name)
    kind, flags, default = known.annotation, (), known.default
    if kind is bool:
        flag = f"--{name.replace('_', '-')}"
        flags = (f"{flag}/--no-{flag[2:]}",) if default else (flag,)
    elif any(get_origin(arm) is tuple for arm in get_args(kind)):
        kind = str
    shown = of.usual or (None if default in (None, False, 1) else str(default))
    if kind is bool:
        shown = None
    option = typer.Option(*flags, help=of.help, metavar=of.form, show_default=shown or False, rich_help_panel=PARALLEL)
    return name, Annotated[kind | None, option], field(default=None)


def _settings(options: Any) -> dict[str, Any]:
    """The settings that were given, by name."""
    found = {}
    for one in fields(options):
        value = getattr(options, one.name)
        if value is not None:
            found[one.name] = _numbers(one.name, value) if isinstance(value, str) else value
    return found


def _numbers(name: str, text: str) -> Any:
    """``"2,1"`` to numbers where a setting is several of them; any other text stays what it is."""
    arms = get_args(ParallelConfig.model_fields[name].annotation)
    words = [word for arm in arms if get_origin(arm) is Literal for word in get_args(arm)]
    if not any(get_origin(arm) is tuple for arm in arms) or text in words:
        return text
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        form = (setting(name).form or "").partition("|")[0]
        each = "rank" if name == "weights" else "stage"
        raise ConfigError(
            f"{name} {text!r} are not numbers; write them as {form} (one for each {each}), or {' or '.join(words)}"
            f"{did_you_mean(text, words)}"
        ) from None


if TYPE_CHECKING:

    class ConfigOptions:
        """The settings of `ParallelConfig`, each an option."""

        def settings(self) -> dict[str, Any]:
            """Those that were given, by name."""
            ...
else:
    ConfigOptions = make_dataclass(
        "ConfigOptions",
        [_config_option(name) for name in ParallelConfig.model_fields if setting(name).option],
        frozen=True,
        namespace={"settings": _settings},
    )


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for every field of those of its parameters that are dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind, kind=parameter.KEYWORD_ONLY))
            continue
        own = get_type_hints(kind, include_extras=True)
        groups[parameter.name] = kind, [one.name for one in fields(kind)]
        parameters += [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=own[one.name])
            for one in fields(kind)
        ]

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, (kind, names) in groups.items():
            given[name] = kind(**{one: given.pop(one) for one in names})
        command(**given)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat

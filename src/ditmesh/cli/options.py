"""Options that several commands share.

A group of options is a dataclass; a command that takes one as a parameter, and is put through `with_groups`, has all
its fields as options. Those of the parallel configuration are made from the fields of `ParallelConfig`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from ..config import ParallelConfig, setting
from ..errors import InputError, did_you_mean
from ..request import PIPELINES, PictureRequest, parse_size, plain_type, request_fields

Result = TypeVar("Result")

# The order of panels in help.
COMMON_PANEL = "Common options"
common_option = functools.partial(typer.Option, rich_help_panel=COMMON_PANEL)
picture_option = functools.partial(typer.Option, rich_help_panel="Images and videos")
rank_option = functools.partial(typer.Option, rich_help_panel="Ranks")
input_option = functools.partial(typer.Option, rich_help_panel="Inputs and loading")
output_option = functools.partial(typer.Option, rich_help_panel="Output")
config_option = functools.partial(typer.Option, rich_help_panel="Parallel configuration")
# Options of the request in `plan`, `inspect` and `memory`.
job_option = functools.partial(typer.Option, rich_help_panel="What is generated")


def at_least(least: float, but: float | None = None) -> Callable[[typer.CallbackParam, Any], Any]:
    """Refuses numbers of an option that are below ``least`` (all ``but`` one) or not finite."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and value != but and not (isfinite(value) and value >= least):
            raise InputError(f"{param.opts[0]} {value:g} is not possible; use {param.opts[0]} {least:g} or more")
        return value

    return check


def one_of(words: tuple[str, ...], short: dict[str, str]) -> Callable[[typer.CallbackParam, Any], Any]:
    """Rejects unknown words of an option with a suggestion; ``short`` has abbreviations."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        value = short.get(value, value)
        if value is None or value in words:
            return value
        hint = did_you_mean(value, words)
        if param.name == "device" and value.isdecimal():
            hint = f"; for {value} ranks say --devices {value}"
        raise InputError(f"{param.opts[0]} {value!r} is none of {', '.join(words)}{hint}")

    return check


def choice(
    option: Callable[..., Any], words: tuple[str, ...], help: str, short: dict[str, str] | None = None, **more: Any
) -> Any:
    """An option that takes one of some words (see `one_of`); ``option`` sets its panel."""
    return option(metavar="|".join(words), help=help, callback=one_of(words, short or {}), **more)


DEVICES = ("auto", "cpu", "cuda")
OFFLOADS = ("none", "model", "group", "sequential")
DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

PromptsFile = Annotated[
    Path | None, common_option("--prompts", metavar="FILE", help="Read more prompts from this file, one per line.")
]


def request_option(name: str, panel: Callable[..., Any] | None = None, **more: Any) -> Any:
    """Annotation of the option for a field of `PictureRequest`."""
    of, field = request_fields()[name], PictureRequest.model_fields[name]
    # Width and height are one option.
    kind, form = (str | None, "WxH") if name == "width" else (plain_type(name), None)
    least = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    option = panel or (common_option if of.common else picture_option)
    shown = of.usual if field.default is None else None
    given = {"metavar": form, "help": of.help, **({} if shown is None else {"show_default": shown})} | more
    if least is not None:
        given.setdefault("callback", at_least(least))
    return Annotated[kind, option(*of.flags, **given)]


if TYPE_CHECKING:
    Steps = int | None
    Guidance = Strength = float | None
    Size = str | None
    Seed = int
else:
    Steps, Guidance, Size = (request_option(name) for name in ("steps", "guidance", "width"))
    Strength = request_option("strength", input_option, metavar="0..1", callback=None)
    Seed = request_option("seed", help="Set the seed of the first image; image i has seed + i.", callback=at_least(0))
if TYPE_CHECKING:
    from ..generate.receipt import Dtype
    from ..launch import DeviceChoice as Device

    DType = Dtype | None
else:
    # Plain text, so that the error message is ditmesh's.
    DType = Annotated[
        str | None,
        choice(
            rank_option,
            DTYPES,
            "Load the weights in this type; fp32, bf16 and fp16 are short for them.",
            SHORT,
            show_default="float32 on the CPU, bfloat16 on CUDA",
        ),
    ]
    Device = Annotated[
        str, choice(rank_option, DEVICES, "Choose the device of the ranks; auto uses GPUs if there are any.")
    ]
Devices = Annotated[
    int | None,
    common_option("--devices", "-n", help="Start this many ranks, each with its own device.", callback=at_least(1)),
]
Threads = Annotated[
    int | None,
    rank_option(
        help="Compute with this many threads on each rank.", show_default="the cores shared out", callback=at_least(1)
    ),
]
Timeout = Annotated[
    float,
    rank_option(
        metavar="SECONDS", help="Fail when a rank waits longer than this for another rank.", callback=at_least(0.001)
    ),
]
LauncherName = Annotated[
    str | None,
    rank_option(
        metavar="local|ray|NAME",
        help="Choose the launcher of the ranks: this machine, a Ray cluster (RAY_ADDRESS), or another package's.",
        show_default="local",
    ),
]
MemoryLimit = Annotated[
    str | None,
    rank_option(
        metavar="GB|none",
        help="Reject a job that needs more memory than this on a rank before anything is read; none: reject no job.",
        show_default="what its device has left",
    ),
]


def memory_check(limit: str | None) -> tuple[bool, float | None]:
    """Whether the memory of a job is checked, and the limit in bytes, from --memory-limit.

    Raises:
        InputError: the text is neither a number nor ``none``.
    """
    if limit is None or limit == "none":
        return limit is None, None
    try:
        gigabytes = float(limit)
    except ValueError:
        gigabytes = 0.0
    if not (isfinite(gigabytes) and gigabytes >= 0.001):
        raise InputError(f"--memory-limit {limit} is not possible; use gigabytes from 0.001 up, or none")
    return True, gigabytes * 1e9


Overwrite = Annotated[
    bool,
    output_option(
        "--overwrite", help="Replace files with the same names that ditmesh wrote; by default they are kept."
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Look at this model: folder or hub id of a diffusers pipeline, or an embedded model.",
        show_default="emoji-sd3",
    ),
]
ConfigFile = Annotated[
    Path | None,
    config_option("--config", "-c", metavar="FILE.yaml", help="Read the parallel configuration from this YAML file."),
]
Frames = Annotated[int | None, job_option(help="Set the number of frames of a video.", callback=at_least(1))]
AtOnce = Annotated[int, job_option(help="Set how many images are generated at once.", callback=at_least(1))]
Branches = Annotated[
    bool | None, job_option("--guidance/--no-guidance", help="Set whether guidance runs two branches.")
]
WeightsDType = Annotated[str, job_option(help="Set the type of the weights.", callback=one_of(DTYPES, SHORT))]
# What `main` makes of --json=full: the parser knows no option that may be without a value.
JsonFull = Annotated[bool, output_option("--json-full", hidden=True)]
AsJson = Annotated[bool, output_option("--json", help="Print the result as one JSON object on stdout.")]
JsonOrFull = Annotated[
    bool,
    output_option(
        "--json", help="Print the result as one JSON object on stdout; --json=full has the whole receipt of each image."
    ),
]


if TYPE_CHECKING:

    class PictureOptions:
        """Options of the request: one for each field of `PictureRequest`."""

        prompts_file: Path | None
        num_images: int

        def fields(self) -> dict[str, Any]:
            """The fields by name; a random seed is drawn here."""
            ...

    class SampleOptions(PictureOptions):
        """The same for images that are compared."""
else:

    def _asked(options: Any) -> dict[str, Any]:
        from .values import any_seed

        names = {name: of.option for name, of in request_fields().items() if of.flags}
        found = {name: value for name, one in names.items() if (value := getattr(options, one, None)) is not None}
        found["width"], found["height"] = parse_size(found.get("width")) or (None, None)
        return found | {"seed": any_seed(found["seed"])}

    def _picture_options(name: str, without: Sequence[str] = ()) -> type:
        """A dataclass with an option for every field of a request, and for a file of prompts."""
        options = [("prompts_file", PromptsFile, field(default=None))]
        for field_name, of in request_fields().items():
            if of.flags and field_name not in without:
                more = {"callback": at_least(0, but=-1)} if field_name == "seed" else {}
                default = field(default=PictureRequest.model_fields[field_name].default)
                options.append((of.option, request_option(field_name, **more), default))
        return make_dataclass(name, options, frozen=True, namespace={"fields": _asked})

    PictureOptions = _picture_options("PictureOptions")
    SampleOptions = _picture_options("SampleOptions", without=("fps",))


@dataclass(frozen=True)
class InputOptions:
    """Files beside the model, and how the model is loaded."""

    image: Annotated[str | None, input_option(metavar="FILE", help="Start from this image (img2img).")] = None
    video: Annotated[
        str | None, input_option(metavar="FILE", help="Start from this video; --frames uses its first frames.")
    ] = None
    strength: Strength = None
    mask: Annotated[
        str | None, input_option(metavar="FILE", help="Replace only the part of --image that is white here (inpaint).")
    ] = None
    control: Annotated[
        str | None,
        input_option(metavar="FILE", help="Follow this control image, with --controlnet or a control model."),
    ] = None
    controlnet: Annotated[
        str | None,
        input_option(metavar="NAME[:SCALE]", help="Load a ControlNet for the model, from a folder or hub id."),
    ] = None
    lora: Annotated[
        list[str] | None,
        input_option(metavar="NAME[:SCALE]", help="Load a LoRA from a file, folder or hub id; may be repeated."),
    ] = None
    ip_adapter: Annotated[
        str | None, input_option(metavar="NAME[:SCALE]", help="Load an IP-Adapter from a file, folder or hub id.")
    ] = None
    ip_image: Annotated[str | None, input_option(metavar="FILE", help="Pass this image to the IP-Adapter.")] = None
    scheduler: Annotated[
        str | None,
        input_option(
            metavar="CLASS",
            help="Use another diffusers scheduler, such as UniPCMultistepScheduler.",
            show_default=PIPELINES,
        ),
    ] = None
    variant: Annotated[str | None, input_option(help="Read this variant of the weight files, such as fp16.")] = None
    offload: Annotated[
        str,
        choice(
            input_option,
            OFFLOADS,
            "Keep text encoders and VAE in the host's memory while they do not run (GPUs only): each as a whole, "
            "layer by layer, or layer by layer with one copy.",
        ),
    ] = "none"

    def of_job(self) -> dict[str, Any]:
        """Fields of a job; every file has been checked.

        Raises:
            InputError: a file does not exist, or is of the wrong kind.
        """
        from ..generate.files import adapter, input_picture
        from ..generate.receipt import VARIANT
        from ..generate.schedulers import SCHEDULERS

        if self.scheduler is not None and self.scheduler not in SCHEDULERS:
            raise InputError(f"--scheduler {self.scheduler!r} is none of {', '.join(SCHEDULERS)}")
        if self.variant is not None and not re.match(VARIANT, self.variant):
            raise InputError(f"--variant {self.variant!r} is no part of a file's name; write it as fp16")
        pictures: dict[Any, str | None] = {
            "image": self.image,
            "mask": self.mask,
            "control": self.control,
            "ip-image": self.ip_image,
            "video": self.video,
        }
        files: list[Any] = [input_picture(role, path) for role, path in pictures.items() if path is not None]
        files += [adapter("lora", text) for text in self.lora or ()]
        files += [adapter("ip-adapter", self.ip_adapter)] if self.ip_adapter is not None else []
        files += [adapter("controlnet", self.controlnet)] if self.controlnet is not None else []
        names = ("strength", "scheduler", "variant", "offload")
        return {"files": tuple(files)} | {name: getattr(self, name) for name in names}


def check_offload(how: str, device: str) -> None:
    """Reject offloading on the CPU.

    Raises:
        InputError: saying so.
    """
    if how != "none" and device == "cpu":
        raise InputError(
            f"--offload {how} keeps components out of a GPU's memory, and these ranks run on the CPU; leave it out"
        )


@dataclass(frozen=True)
class RankOptions:
    """Options of the ranks."""

    device: Device = "auto"
    dtype: DType = None
    threads: Threads = None
    timeout: Timeout = 600.0
    launcher: LauncherName = None

    def kind(self, world_size: int) -> Literal["cpu", "cuda"]:
        """The device type of ``world_size`` ranks."""
        from ..launch import device_of_launcher

        return device_of_launcher(self.launcher, self.device, world_size)

    def begin(self, preload: Sequence[str]) -> None:
        """Start the imports of local ranks now; see `begin_local_ranks`."""
        from ..launch import begin_local_ranks

        if self.launcher in (None, "local"):
            begin_local_ranks(self.device, preload)

    def dtype_on(self, kind: str) -> Dtype:
        """The dtype of the weights on ``"cpu"`` or ``"cuda"``."""
        return self.dtype or ("bfloat16" if kind == "cuda" else "float32")


def _config_option(name: str, words: str | None = None, shown_in_help: bool = True) -> tuple[str, Any, Any]:
    """Name, annotation and default of the option for a field of `ParallelConfig`; None if it is not given."""
    kind = ParallelConfig.model_fields[name].annotation
    flags = (f"--{name}",) if kind is bool else ()
    option = config_option(*flags, help=words or setting(name).help, show_default=False, hidden=not shown_in_help)
    return name, Annotated[kind | None, option], field(default=None)


def _settings(options: Any) -> dict[str, Any]:
    from .values import changed_settings

    given = {name: value for name, value in vars(options).items() if value is not None}
    return changed_settings(given, given.pop("changes", ()))


if TYPE_CHECKING:

    class ConfigOptions:
        """Options for the settings of `ParallelConfig`: some have their own, --set takes all."""

        def settings(self) -> dict[str, Any]:
            """The given settings, by name."""
            ...

    class TrainingOptions(ConfigOptions):
        """The same for training, without --set: help shows the supported settings; the others raise an error."""
else:

    def _config_options(name: str, words: Mapping[str, str] | None = None) -> type:
        """A dataclass of the options; for training, whose --set changes all settings of a run, with other ``words``."""
        names = [field for field in ParallelConfig.model_fields if setting(field).option]
        options = [
            _config_option(field, (words or {}).get(field), words is None or setting(field).untrained is None)
            for field in names
        ]
        if words is None:
            others = ", ".join(field for field in ParallelConfig.model_fields if field not in names)
            words_of_set = f"Change a setting that has no option: {others}; may be repeated."
            options.append(
                (
                    "changes",
                    Annotated[list[str] | None, config_option("--set", metavar="NAME=VALUE", help=words_of_set)],
                    field(default=None),
                )
            )
        return make_dataclass(name, options, frozen=True, namespace={"settings": _settings})

    ConfigOptions = _config_options("ConfigOptions")
    TrainingOptions = _config_options(
        "TrainingOptions",
        words={
            "data": "Give this many groups of ranks samples of their own; by default all devices.",
            "reproducible": "Train to the same bits on any number of devices; this is slower.",
        },
    )


def with_groups(command: Callable[..., Result]) -> Callable[..., Result]:
    """The command with an option for every field of those of its parameters that are dataclasses."""
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind):
            hints = get_type_hints(kind, include_extras=True)
            groups[parameter.name] = kind, [one.name for one in fields(kind)]
            parameters += [
                parameter.replace(name=f.name, default=f.default, annotation=hints[f.name]) for f in fields(kind)
            ]
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def flat(**given: Any) -> Result:
        for name, (kind, names) in groups.items():
            given[name] = kind(**{one: given.pop(one) for one in names})
        return command(**given)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat

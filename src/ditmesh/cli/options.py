"""Options that several commands share.

A group of options is a dataclass; a command that takes one as a parameter, and is put through `with_groups`, has all
its fields as options. Those of the parallel configuration are made from the fields of `ParallelConfig`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from ..config import ParallelConfig, setting
from ..errors import InputError
from ..generate.receipt import Dtype
from ..request import PIPELINES, Offload, PictureRequest, parse_size, plain_type, request_fields

Result = TypeVar("Result")
Group = TypeVar("Group")

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
DType = Annotated[
    Dtype | None,
    rank_option(help="Load the weights in this type.", show_default="float32 on the CPU, bfloat16 on GPUs"),
]
Device = Annotated[str, rank_option(help="Choose the ranks' device by torch's name; auto uses GPUs if there are any.")]
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
    """Whether a job's memory is checked, and the limit in bytes; `InputError`: --memory-limit is neither."""
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
WeightsDType = Annotated[Dtype, job_option(help="Set the type of the weights.")]
AsJson = Annotated[bool, output_option("--json", help="Print the result as one JSON object on stdout.")]


# Name, annotation and default of every option.
Options = list[tuple[str, Any, Any]]


def with_options(options: Options) -> Callable[[type[Group]], type[Group]]:
    """A group of options that are made from fields of a model."""

    def add(group: type[Group]) -> type[Group]:
        group.__annotations__ = {name: kind for name, kind, _ in options}
        for name, _, default in options:
            setattr(group, name, default)
        return dataclass(frozen=True)(group)

    return add


def _picture_options(without: Sequence[str] = ()) -> Options:
    options: Options = [("prompts_file", PromptsFile, None)]
    for name, of in request_fields().items():
        if of.flags and name not in without:
            more = {"callback": at_least(0, but=-1)} if name == "seed" else {}
            options.append((of.option, request_option(name, **more), PictureRequest.model_fields[name].default))
    return options


class RequestOptions:
    """What groups with options of the request have."""

    prompts_file: Path | None
    num_images: int

    def fields(self) -> dict[str, Any]:
        """The fields by name; a random seed is drawn here."""
        from .values import any_seed

        names = {name: of.option for name, of in request_fields().items() if of.flags}
        found = {name: value for name, one in names.items() if (value := getattr(self, one, None)) is not None}
        found["width"], found["height"] = parse_size(found.get("width")) or (None, None)
        return found | {"seed": any_seed(found["seed"])}


@with_options(_picture_options())
class PictureOptions(RequestOptions):
    """Options of the request: one for each field of `PictureRequest`."""


@with_options(_picture_options(without=("fps",)))
class SampleOptions(RequestOptions):
    """The same for images that are compared."""


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
        Offload,
        input_option(
            help="Keep text encoders and VAE in the host's memory while they do not run (GPUs only): each as a whole, "
            "layer by layer, or layer by layer with one copy."
        ),
    ] = "none"

    def of_job(self) -> dict[str, Any]:
        """Fields of a job; `InputError`: a file that one names does not exist, or is of the wrong kind."""
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
    """Reject offloading on the CPU with an `InputError`."""
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

    def kind(self, world_size: int) -> str:
        """The device type of ``world_size`` ranks."""
        from ..launch import device_of_launcher

        return device_of_launcher(self.launcher, self.device, world_size)

    def begin(self, preload: Sequence[str]) -> None:
        """Start the imports of local ranks now; see `begin_local_ranks`."""
        from ..launch import begin_local_ranks

        if self.launcher in (None, "local"):
            begin_local_ranks(self.device, preload)

    def dtype_on(self, kind: str) -> Dtype:
        """The dtype of the weights on a type of device."""
        return self.dtype or ("float32" if kind == "cpu" else "bfloat16")


def config_options(words: Mapping[str, str] | None = None) -> Options:
    """For the settings of `ParallelConfig` that have one; for training with other ``words``, and those it takes."""
    options: Options = []
    for name in (name for name in ParallelConfig.model_fields if setting(name).option):
        kind, about = ParallelConfig.model_fields[name].annotation, setting(name)
        option = config_option(
            *((f"--{name}",) if kind is bool else ()),
            metavar=about.form,
            help=(words or {}).get(name, about.help),
            show_default=False,
            hidden=words is not None and about.untrained is not None,
        )
        options.append((name, Annotated[kind | None, option], None))
    return options


_OTHERS = ", ".join(name for name in ParallelConfig.model_fields if not setting(name).option)
_CHANGES = config_option(
    "--set", metavar="NAME=VALUE", help=f"Change a setting that has no option: {_OTHERS}; may be repeated."
)


class ParallelOptions:
    """What groups with options of the parallel configuration have."""

    def settings(self) -> dict[str, Any]:
        """The given settings, by name."""
        from .values import read_settings

        given = {name: value for name, value in vars(self).items() if value is not None}
        return read_settings(given.pop("changes", ()), given)


@with_options([*config_options(), ("changes", Annotated[list[str] | None, _CHANGES], None)])
class ConfigOptions(ParallelOptions):
    """Options for the settings of `ParallelConfig`: some have their own, --set takes all."""


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

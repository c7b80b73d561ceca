"""Options that several commands have, written once.

A group of options is a dataclass; a command that takes one as a parameter, and is put through `with_groups`, has all
its fields as options. Those of the parallel configuration are made from the fields of `ParallelConfig`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from ..config import RENAMED, ParallelConfig, current_names, setting
from ..errors import ConfigError, InputError, did_you_mean

Result = TypeVar("Result")

picture_option = functools.partial(typer.Option, rich_help_panel="Pictures")
rank_option = functools.partial(typer.Option, rich_help_panel="Ranks")
input_option = functools.partial(typer.Option, rich_help_panel="Inputs and loading")
config_option = functools.partial(typer.Option, rich_help_panel="Parallel configuration")


def at_least(least: float, but: float | None = None) -> Callable[[typer.CallbackParam, Any], Any]:
    """Refuses numbers of an option that are below ``least`` (all ``but`` one) or not finite."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and value != but and not (isfinite(value) and value >= least):
            raise InputError(f"{param.opts[0]} {value:g} is not possible; use {param.opts[0]} {least:g} or more")
        return value

    return check


def one_of(words: tuple[str, ...], short: dict[str, str]) -> Callable[[typer.CallbackParam, Any], Any]:
    """Refuses other words of an option, and says what was perhaps meant; ``short`` has other words for them."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        value = short.get(value, value)
        if value is None or value in words:
            return value
        hint = did_you_mean(value, words)
        if param.name == "device" and value.isdecimal():
            hint = f"; for {value} ranks say --devices {value}"
        raise InputError(f"{param.opts[0]} {value!r} is none of {', '.join(words)}{hint}")

    return check


DEVICES = ("auto", "cpu", "cuda")
OFFLOADS = ("none", "model", "group", "sequential")
DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PIPELINES = "the pipeline's"

PromptsFile = Annotated[Path | None, picture_option("--prompts", metavar="FILE", help="More prompts, one a line.")]
Steps = Annotated[
    int | None,
    picture_option("--steps", "-s", help="Denoising steps.", show_default=PIPELINES, callback=at_least(1)),
]
Guidance = Annotated[float | None, picture_option("--guidance", "-g", help="Guidance scale.", show_default=PIPELINES)]
Size = Annotated[
    str | None,
    picture_option(
        metavar="WxH", help="Width and height in pixels.", show_default="an input image's, or the pipeline's"
    ),
]
Seed = Annotated[int, picture_option(help="Seed of the first picture; picture i has seed + i.", callback=at_least(0))]
AnySeed = Annotated[
    int,
    picture_option(
        "--seed", help="Seed of the first picture; picture i has seed + i. -1: any.", callback=at_least(0, but=-1)
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
        rank_option(
            metavar="|".join(DTYPES),
            help="Type of the weights; also fp32, bf16, fp16.",
            show_default="float32 on the CPU, bfloat16 on CUDA",
            callback=one_of(DTYPES, SHORT),
        ),
    ]
    Device = Annotated[
        str,
        rank_option(
            metavar="|".join(DEVICES),
            help="What the ranks run on; auto: GPUs if there are any.",
            callback=one_of(DEVICES, {}),
        ),
    ]
Devices = Annotated[
    int | None,
    rank_option("--devices", "-n", help="Number of ranks, each with a device of its own.", callback=at_least(1)),
]
Threads = Annotated[
    int | None,
    rank_option(help="Threads of each rank.", show_default="the cores shared out", callback=at_least(1)),
]
Timeout = Annotated[
    float,
    rank_option(metavar="SECONDS", help="How long a rank may wait for another one.", callback=at_least(0.001)),
]
LauncherName = Annotated[
    str | None,
    rank_option(
        metavar="local|ray|NAME",
        help="What starts the ranks: this machine, a Ray cluster, or another package.",
        show_default="local",
    ),
]
Address = Annotated[
    str | None, rank_option(metavar="HOST:PORT", help="Of the Ray cluster.", show_default="RAY_ADDRESS")
]
MemoryLimit = Annotated[
    float | None,
    rank_option(
        metavar="GB",
        help="What a rank may take; more is refused before anything is read.",
        show_default="what its device has left",
        callback=at_least(0.001),
    ),
]
MemoryCheck = Annotated[
    bool, rank_option("--memory-check/--no-memory-check", help="Refuse what does not fit before anything is read.")
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace pictures of the same names, if ditmesh wrote them; else they are kept."),
]
# What `plan` and `inspect --memory` are asked about.
JOB = "What is generated"
Frames = Annotated[int | None, typer.Option(help="Of a video.", callback=at_least(1), rich_help_panel=JOB)]
AtOnce = Annotated[
    int, typer.Option(help="Pictures that are generated at once.", callback=at_least(1), rich_help_panel=JOB)
]
Branches = Annotated[
    bool | None,
    typer.Option("--guidance/--no-guidance", help="Whether guidance runs two branches.", rich_help_panel=JOB),
]
WeightsDType = Annotated[
    str,
    typer.Option(
        help="Of the weights.",
        callback=one_of(("float32", "bfloat16", "float16"), {"bf16": "bfloat16", "fp32": "float32"}),
        rich_help_panel=JOB,
    ),
]
JsonFull = Annotated[
    bool, typer.Option("--json-full", help="The same, with all that each picture's receipt says. Also --json=full.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@dataclass(frozen=True)
class PictureOptions:
    """What is generated."""

    prompts_file: PromptsFile = None
    steps: Steps = None
    guidance: Guidance = None
    negative: Annotated[str | None, picture_option(help="What the pictures should not show.")] = None
    size: Size = None
    seed: AnySeed = 0
    num_images: Annotated[int, picture_option(help="Pictures per prompt.", callback=at_least(1))] = 1
    frames: Annotated[
        int | None, picture_option(help="Frames of a video.", show_default=PIPELINES, callback=at_least(1))
    ] = None


@dataclass(frozen=True)
class InputOptions:
    """Files beside the model, and how the model is loaded."""

    image: Annotated[str | None, input_option(metavar="FILE", help="A picture to begin with (img2img).")] = None
    video: Annotated[
        str | None, input_option(metavar="FILE", help="A video to begin with; --frames takes its first ones.")
    ] = None
    strength: Annotated[
        float | None,
        input_option(metavar="0..1", help="How much of --image or --video is generated anew.", show_default=PIPELINES),
    ] = None
    mask: Annotated[
        str | None, input_option(metavar="FILE", help="Which part of --image: white is generated anew (inpaint).")
    ] = None
    control: Annotated[
        str | None, input_option(metavar="FILE", help="Control picture, for --controlnet or a control model.")
    ] = None
    controlnet: Annotated[
        str | None, input_option(metavar="NAME[:SCALE]", help="A ControlNet for the model: folder or hub id.")
    ] = None
    lora: Annotated[
        list[str] | None,
        input_option(metavar="NAME[:SCALE]", help="A LoRA: file, folder or hub id; may be given again."),
    ] = None
    ip_adapter: Annotated[
        str | None, input_option(metavar="NAME[:SCALE]", help="An IP-Adapter: file, folder or hub id.")
    ] = None
    ip_image: Annotated[str | None, input_option(metavar="FILE", help="The IP-Adapter's picture.")] = None
    scheduler: Annotated[
        str | None,
        input_option(
            metavar="CLASS",
            help="Another scheduler of diffusers, such as UniPCMultistepScheduler.",
            show_default=PIPELINES,
        ),
    ] = None
    variant: Annotated[str | None, input_option(help="Variant of the weights' files, such as fp16.")] = None
    offload: Annotated[
        str,
        input_option(
            metavar="|".join(OFFLOADS),
            help="On GPUs: keep text encoders and VAE in the host's memory while they do not work: each as a whole, "
            "layer by layer, or with one copy.",
            callback=one_of(OFFLOADS, {}),
        ),
    ] = "none"

    def of_job(self) -> dict[str, Any]:
        """Fields of a `Job`; every file has been looked at.

        Raises:
            InputError: a file is not there, or not what it should be.
        """
        from ..generate.files import adapter, input_picture
        from ..generate.receipt import VARIANT
        from ..generate.schedulers import NAMES

        if self.scheduler is not None and self.scheduler not in NAMES:
            raise InputError(f"--scheduler {self.scheduler!r} is none of {', '.join(NAMES)}")
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
    """Refuse offloading where there is nothing to offload from.

    Raises:
        InputError: saying so.
    """
    if how != "none" and device == "cpu":
        raise InputError(
            f"--offload {how} keeps components out of a GPU's memory, and these ranks run on the CPU; leave it out"
        )


@dataclass(frozen=True)
class RankOptions:
    """What ranks are."""

    device: Device = "auto"
    dtype: DType = None
    threads: Threads = None
    timeout: Timeout = 600.0
    launcher: LauncherName = None
    address: Address = None

    @property
    def backend(self) -> str | None:
        """The launcher's name, as `launch.launcher` takes it.

        Raises:
            InputError: an address without a launcher.
        """
        if self.address is not None and self.launcher is None:
            raise InputError(f"--address {self.address} is of a cluster; say --launcher ray as well")
        return self.launcher if self.address is None else f"{self.launcher}@{self.address}"

    def kind(self, world_size: int) -> Literal["cpu", "cuda"]:
        """What ``world_size`` ranks run on."""
        from ..launch import device_of_launcher

        return device_of_launcher(self.backend, self.device, world_size)

    def dtype_on(self, kind: str) -> Dtype:
        """Type of the weights, on ``"cpu"`` or ``"cuda"``."""
        return self.dtype or ("bfloat16" if kind == "cuda" else "float32")


def _config_option(name: str) -> tuple[str, Any, Any]:
    """Name, annotation and default of the option for a field of `ParallelConfig`; what is not given is None."""
    now = RENAMED.get(name, name)
    known, of = ParallelConfig.model_fields[now], setting(now)
    kind, flags, default = known.annotation, (), known.default
    shown = of.usual or (None if default in (None, False, 1) else str(default))
    if kind is bool:
        flag = name.replace("_", "-")
        flags, shown = (f"--{flag}/--no-{flag}" if default else f"--{flag}",), None
    elif any(get_origin(arm) is tuple for arm in get_args(kind)):
        kind = str
    option = config_option(*flags, help=of.help, metavar=of.form, show_default=shown or False, hidden=name in RENAMED)
    return name, Annotated[kind | None, option], field(default=None)


def _settings(options: Any) -> dict[str, Any]:
    """The settings that were given, by name."""
    given = current_names({name: value for name, value in vars(options).items() if value is not None})
    return {name: _numbers(name, value) if isinstance(value, str) else value for name, value in given.items()}


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
        raise ConfigError(
            f"{name} {text!r} are not numbers; write them as {form} (one for each "
            f"{'rank' if name == 'speeds' else 'stage'}), or {' or '.join(words)}{did_you_mean(text, words)}"
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
        [_config_option(name) for name in ParallelConfig.model_fields if setting(name).option]
        + [_config_option(name) for name in RENAMED],
        frozen=True,
        namespace={"settings": _settings},
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

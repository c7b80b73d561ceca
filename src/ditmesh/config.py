"""The parallel configuration: plain, validated data. This module does not use ``torch.distributed``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .combinations import check_combinations
from .errors import ConfigError, did_you_mean, problem_text, reason_of

TextPolicy = Literal["auto", "shard", "replicate"]
InputPolicy = Literal["broadcast", "per-data-rank", "trust"]
Exchange = Literal["exact", "gather", "displaced", "naive"]
Compression = Literal["fp16", "bf16", "int8", "int4"]
Prediction = Literal["linear", "none"]
VaePolicy = Literal["auto", "bands", "whole"]
TextEncoderPolicy = Literal["whole", "tensor", "sharded", "freed"]

# Mesh axes from the slowest-varying to the fastest: neighbours on the last axes sit on neighbouring ranks,
# because those axes exchange most often and profit most from the nearest links.
AXES = ("data", "cfg", "pipe", "ring", "ulysses", "tensor")

# Axes of ranks that hold equal weights.
REPLICAS = ("data", "cfg", "ring", "ulysses")

# Ranks among which "auto" exchanges heads at most: as many as a host usually has devices.
MAX_ULYSSES = 8

# Maximum of ranks of an axis, patches or tiles, so that an untrusted number cannot exhaust memory.
MAX_DEGREE = 2**16

Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]

# Settings besides degrees that a description names, in its order.
_DESCRIBED = (
    "shard",
    "patches",
    "stages",
    "exchange",
    "warmup",
    "compress",
    "predict",
    "speeds",
    "vae",
    "text_encoder",
    "cache",
)

# The reason why a setting cannot be trained.
STALE = "keys of an earlier step have no gradient"


@dataclass(frozen=True)
class Setting:
    """The description of a field of `ParallelConfig` besides its type, from which the command line is generated.

    Attributes:
        decides: whether it decides the bits of a reproducible image; the others say only who computes what.
        form: how a value is written, where the type does not show it; usual: the default, in words.
        option: whether commands have an option of its own for it; ``--set NAME=VALUE`` takes every setting.
        untrained: why training refuses it, and the way out; None: training accepts it.
    """

    help: str
    decides: bool = False
    form: str | None = None
    usual: str | None = None
    option: bool = False
    untrained: str | None = None


def setting(name: str) -> Setting:
    """The description of a field of `ParallelConfig`."""
    return next(item for item in ParallelConfig.model_fields[name].metadata if isinstance(item, Setting))


def setting_form(name: str) -> str:
    """How a value of a setting is written: ``auto|bands|whole``, ``true|false``, ``N``."""
    kind = ParallelConfig.model_fields[name].annotation
    words = [word for arm in (kind, *get_args(kind)) if get_origin(arm) is Literal for word in get_args(arm)]
    return setting(name).form or "|".join(words) or ("true|false" if kind is bool else "N")


def option_words(name: str, value: Any = None) -> str:
    """The words of a command line for a setting: ``--ring 2``, ``--set tiles=4``; without a value only its name."""
    if setting(name).option:
        return f"--{name}" if value is None or value is True else f"--{name} {value}"
    return f"--set {name}" if value is None else f"--set {name}={value}"


class ParallelConfig(BaseModel):
    """The distribution of a pipeline over ranks: ``ParallelConfig(ring=2, ulysses=2)`` is for four.

    The degrees (``data`` to ``tensor``) multiply to the number of ranks. What each setting does stands beside its
    field, for ``ditmesh generate --help`` as well; below is what one sentence does not say.

    Attributes:
        pipe: PipeFusion (Fang et al. 2024, arXiv:2405.14430): patches of the image pass through consecutive blocks on
            consecutive ranks. Stale: see ``warmup``.
        ring: K, V pass around the ring; merged by log-sum-exp. Liu et al. 2023, arXiv:2310.01889.
        ulysses: all-to-all between heads and sequence (Jacobs et al. 2023, arXiv:2309.14509). Does not have to divide
            the number of heads, but cannot exceed it.
        tensor: split by column and row. Shoeybi et al. 2019, arXiv:1909.08053.
        shard: after ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054. Divides no work, changes no bit.
        text: ``"auto"`` shards a text stream that the blocks update if each rank gets at least four tokens.
        inputs: ``"broadcast"`` uses rank 0's inputs on all ranks, ``"per-data-rank"`` those of the first rank of every
            data group. Both refuse pipelines that differ (weights, adapters, scheduler, settings); ``"trust"`` checks
            nothing. See docs/same-image.md.
        exchange: ``"exact"``: keys go round the ring while attention is computed; ``"gather"``: all are gathered
            before. ``"displaced"``: those of the previous step (DistriFusion, Li et al. 2024, arXiv:2402.19481);
            ``"naive"``: none, a lossy baseline. The last two run without Ulysses.
        patches: ``patches=4`` on one device gives the image of ``pipe=4, patches=4``.
        warmup, compress, predict: see docs/stale.md.
        speeds: not with ``pipe``; ``"auto"`` measures them while the first steps run. The result stays the same.
        reproducible: the same bits as of one device with the same setting (with PipeFusion the same patches).
        attention: None: the model's own. Ring attention supports kernels that return their log-sum-exp: see
            docs/attention.md.
        precompute: on a GPU the weights wait in host memory until the request ends. The same bits.
        vae: see docs/memory.md. In reproducible mode always whole.
        text_encoder: ``"tensor"``: embeddings differ in their last bits. See docs/memory.md.
        strict: if False, such an argument is passed on whole.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: Annotated[Degree, Setting("Share the images of a prompt over this many ranks.", option=True)] = 1
    cfg: Annotated[
        Degree,
        Setting(
            "Share the branches of classifier-free guidance over this many ranks.",
            untrained="a step has samples for all ranks, and data shares them without exchanging results; use data",
            option=True,
        ),
    ] = 1
    ring: Annotated[Degree, Setting("Set the degree of ring attention, which shares out tokens.", option=True)] = 1
    ulysses: Annotated[
        Degree, Setting("Set the degree of Ulysses, which shares out tokens, and heads in attention.", option=True)
    ] = 1
    tensor: Annotated[Degree, Setting("Set the degree of tensor parallelism, which cuts weights.", option=True)] = 1
    pipe: Annotated[
        Degree,
        Setting(
            "Set the number of PipeFusion stages: each has some of the blocks.",
            untrained="stages are for images; use sharding: fsdp, or tensor, for weights that are too large",
            option=True,
        ),
    ] = 1
    shard: Annotated[
        Degree,
        Setting(
            "Let this many ranks hold one part each of weights that they would all hold.",
            untrained="weights in pieces have no gradient; use sharding: fsdp",
            option=True,
        ),
    ] = 1
    exchange: Annotated[
        Exchange,
        Setting(
            "Choose which keys ring ranks exchange: this step's (exact, gather), the previous step's, or none.",
            decides=True,
            untrained="training passes keys round the ring; leave it out",
        ),
    ] = "exact"
    patches: Annotated[
        int | None,
        Setting(
            "Cut the image into this many patches for PipeFusion; they decide the result.",
            usual="stages",
            untrained=f"{STALE}; leave it out",
        ),
    ] = Field(default=None, ge=1, le=MAX_DEGREE)
    stages: Annotated[
        tuple[int, ...] | Literal["estimated"],
        Setting(
            "Set the number of blocks of every stage.",
            form="5,7",
            untrained="training has no stages; leave it out",
        ),
    ] = "estimated"
    warmup: Annotated[
        str,
        Setting(
            'Choose the exact steps of a stale strategy, such as "fixed(4)", "sqrt(2)" or "adaptive(0.05)".',
            decides=True,
            form="POLICY",
            untrained="training has no stale steps; leave it out",
        ),
    ] = "fixed(4)"
    compress: Annotated[
        Compression | None,
        Setting(
            "Compress the previous step's keys to this type, or what is new in them, while they travel.",
            decides=True,
            untrained="training exchanges nothing that is compressed; leave it out",
        ),
    ] = None
    predict: Annotated[
        Prediction | None,
        Setting(
            "Move the previous step's keys on by half of their latest change (linear, the default), or do not.",
            decides=True,
            untrained="training has no stale steps; leave it out",
        ),
    ] = None
    speeds: Annotated[
        tuple[float, ...] | Literal["auto"] | None,
        Setting("Give the relative speeds of sequence ranks: faster ones get more tokens.", form="2,1|auto"),
    ] = None
    reproducible: Annotated[
        bool, Setting("Generate the same bits on any number of devices; this is slower.", decides=True, option=True)
    ] = False
    tiles: Annotated[
        Degree, Setting("Cut the image into this many pieces in reproducible mode; they decide the bits.", decides=True)
    ] = 8
    text: Annotated[
        TextPolicy, Setting("Choose whether ranks share text tokens as they share image tokens.", decides=True)
    ] = "auto"
    inputs: Annotated[InputPolicy, Setting("Choose what is done about inputs that differ between ranks.")] = "broadcast"
    compile: Annotated[
        str | None,
        Setting(
            "Compile the blocks with this backend of torch.compile.",
            form="BACKEND",
            usual="not",
            untrained="compiled blocks have no gradient of attention across ranks; leave it out",
        ),
    ] = None
    attention: Annotated[
        str | None,
        Setting(
            "Choose the kernel that computes attention: native, math, flash, sage, flex …",
            decides=True,
            form="NAME",
            usual="the model's",
        ),
    ] = None
    precompute: Annotated[
        bool,
        Setting(
            "Compute what does not depend on the image once for all steps, without its weights afterwards.",
            untrained="training draws timesteps; leave it out",
        ),
    ] = False
    cache: Annotated[
        str | None,
        Setting(
            "Leave out work of some steps by a cache of diffusers, such as 'first-block(0.05)'; the image changes.",
            decides=True,
            form="NAME(VALUES)",
            untrained="what a cache keeps of an earlier step has no gradient; leave it out",
            option=True,
        ),
    ] = None
    shared_memory: Annotated[
        bool, Setting("Pass tensors between ranks on the CPUs of one host through shared memory.")
    ] = True
    vae: Annotated[
        VaePolicy,
        Setting(
            "Choose how ranks share the autoencoder: in bands of rows, or whole on each.",
            form="auto|bands|whole",
            untrained="every rank encodes its own samples whole; leave it out",
        ),
    ] = "auto"
    text_encoder: Annotated[
        TextEncoderPolicy,
        Setting(
            "Choose where text encoders are: on every rank, in slices that compute or parts, or freed after use.",
            form="whole|tensor|sharded|freed",
            untrained="text encoders run whole on every rank; leave it out, and use cache_dir to encode once",
        ),
    ] = "whole"
    strict: Annotated[bool, Setting("Refuse arguments of blocks that follow the token count and are in no layout.")] = (
        True
    )

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        check_combinations(self)

    @property
    def stages_or_patches(self) -> bool:
        """True if PipeFusion runs: several stages, or one stage with patches."""
        return self.pipe > 1 or (self.patches or 1) > 1

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of every mesh axis, in mesh order (slowest-varying first)."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks this configuration is for."""
        return self.size_of(AXES)

    @property
    def replicas(self) -> int:
        """The number of ranks that would hold equal weights and take part in the same requests."""
        return self.size_of(REPLICAS if self.inputs != "per-data-rank" else REPLICAS[1:])

    def recorded(self) -> dict[str, Any]:
        """The settings as receipts have them: a default that later versions may change is written out."""
        stale = self.exchange == "displaced" or self.stages_or_patches
        return self.model_dump() | ({"predict": "linear" if self.predicts_keys else "none"} if stale else {})

    @property
    def stale_exchange(self) -> bool:
        """True if ring ranks attend to keys of the previous step, or to their own alone."""
        return self.exchange in ("displaced", "naive")

    @property
    def predicts_keys(self) -> bool:
        """True if stale keys are moved on by half of their latest change."""
        # Reproducible images of stages keep the bits that they have always had.
        asked = self.predict or ("none" if self.reproducible else "linear")
        return (self.exchange == "displaced" or self.stages_or_patches) and asked == "linear"

    @property
    def cuts_weights(self) -> bool:
        """True if a rank holds only a part of the transformer's weights."""
        return self.tensor * self.pipe * self.shard > 1

    def size_of(self, axes: Iterable[str]) -> int:
        """Product of the degrees of ``axes``."""
        return prod(self.degrees[axis] for axis in axes)

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """All sets of ranks that differ only on these axes, which are neighbours in mesh order."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*(range(degree) for degree in self.degrees.values()))):
            where = tuple(at for axis, at in zip(AXES, place, strict=True) if axis not in axes)
            sets.setdefault(where, []).append(rank)
        return list(sets.values())

    def shard_groups(self) -> list[list[int]]:
        """All groups of neighbouring ranks that shard weights which would otherwise be equal on them."""
        # Not across data ranks with different requests.
        own = self.inputs == "per-data-rank"
        replicas = self.groups(tuple(axis for axis in REPLICAS if axis != "data" or not own))
        return [ranks[start : start + self.shard] for ranks in replicas for start in range(0, len(ranks), self.shard)]

    @property
    def sequence(self) -> int:
        """Degree of sequence parallelism: ring × ulysses."""
        return self.ring * self.ulysses

    def describe(self) -> str:
        """Short text such as ``ulysses=2 ring=2``; ``1 device`` when nothing is parallel."""
        degrees = [f"{axis}={degree}" for axis, degree in reversed(self.degrees.items()) if degree > 1]
        parts = degrees or ["1 device"]
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        for name in _DESCRIBED:
            value = getattr(self, name)
            # What is exact has no steps to warm up, and prediction is told where it is turned off.
            if self.stale_exchange if name == "warmup" else value not in (usual[name], "linear"):
                words = ",".join(f"{number:g}" for number in value) if isinstance(value, tuple) else value
                parts.append(f"{name}={words}")
        return " ".join([*parts, *(name for name in ("precompute", "reproducible") if getattr(self, name))])

    def check_world_size(self, world_size: int, given: str | None = None) -> None:
        """Raise an error if the degrees do not multiply to ``world_size`` ranks.

        ``given``: what says that there are so many, such as ``and --devices is 2``.
        """
        if self.world_size != world_size:
            degrees = [f"{axis}={degree}" for axis, degree in self.degrees.items() if degree > 1]
            there = given or f"and {world_size} {'is' if world_size == 1 else 'are'} there"
            ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
            raise ConfigError(
                f"{' x '.join(degrees) or '1 device'} needs {ranks}, {there}; use as many, or change the degrees "
                f"(for example ulysses={world_size})"
            )

    @classmethod
    def read(cls, source: ParallelConfig | Mapping[str, Any] | str | Path) -> ParallelConfig:
        """Read a configuration from a mapping or a YAML file (``"auto"`` needs a world size: see `auto`).

        `ConfigError`: the file cannot be read, is not YAML, or holds unknown or impossible values.
        """
        if isinstance(source, ParallelConfig):
            return source
        if isinstance(source, Mapping):
            return cls(**{str(key): value for key, value in source.items()})
        path = Path(source)
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the configuration {str(path)!r} ({reason_of(error)}); give a YAML file"
            ) from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
        if data is None:
            return cls()
        if not isinstance(data, Mapping):
            raise ConfigError(f"{str(path)!r} holds a {type(data).__name__}; write lines such as 'ulysses: 2'")
        return cls(**{str(key): value for key, value in data.items()})

    @classmethod
    def auto(
        cls,
        world_size: int,
        heads: int,
        *,
        images: int = 1,
        branches: int = 1,
        fits: Callable[[ParallelConfig], bool] | None = None,
    ) -> ParallelConfig:
        """The configuration that ``"auto"`` stands for: the first of `preferred` that fits, and the first if none does.

        Args:
            world_size, heads, images, branches: as for `preferred`.
            fits: whether the model can run with a configuration on its devices; default: it can.
        """
        offers = cls.preferred(world_size, heads, images=images, branches=branches)
        first = next(offers)
        return next((config for config in (first, *offers) if fits is None or fits(config)), first)

    @classmethod
    def preferred(cls, world_size: int, heads: int, *, images: int = 1, branches: int = 1) -> Iterator[ParallelConfig]:
        """Exact configurations of all devices, in the order in which ``"auto"`` takes them.

        Whole weights before ``tensor`` and ``shard``, the smaller degree of these first, and before more is cut
        ``precompute``, with which weights leave a GPU. With at least as many images as devices ``data``; else ``cfg=2``
        if guidance runs two branches, Ulysses as far as the heads divide and up to 8 ranks, and ``ring`` for the rest.
        Up to 8 ranks gather keys if the heads do not divide: one device's bits, and not slower. Among more ranks, which
        are on several hosts, keys travel beside attention.

        Args:
            heads: attention heads of the model (the smallest number among its blocks).
            images: of one call of the pipeline, or calls if those are more.
            branches: of guidance that a call runs.
        """
        for cut in _divisors(world_size):
            for name, ahead in (("tensor", False), ("tensor", True), *([("shard", False)] if cut > 1 else [])):
                weights: dict[str, Any] = {name: cut, "precompute": ahead}
                tensor = cut if name == "tensor" else 1
                if tensor > heads:
                    continue
                ranks = world_size // tensor
                if images >= world_size:
                    yield cls(**weights, data=ranks)
                    continue
                for cfg in (2, 1) if branches > 1 and ranks % 2 == 0 else (1,):
                    tokens = ranks // cfg
                    uneven = tokens <= MAX_ULYSSES and heads % (tokens * tensor) != 0
                    exchanges = ("gather", "exact") if uneven else ("exact",)
                    for ulysses in reversed(_divisors(tokens)):
                        if ulysses == 1 or (ulysses <= MAX_ULYSSES and heads % (ulysses * tensor) == 0):
                            axes = {"cfg": cfg, "ulysses": ulysses, "ring": tokens // ulysses}
                            yield from (cls(**weights, **axes, exchange=each) for each in exchanges)

    def for_calls(self, images: int, calls: int) -> ParallelConfig:
        """The configuration for so many calls of a pipeline with so many images each.

        Where data ranks outnumber the images of a call, they would have nothing to share: then each group of ranks has
        calls of its own, if it can.
        """
        if self.data <= images or calls == 1 or self.inputs != "broadcast":
            return self
        try:
            return type(self)(**{**self.model_dump(), "inputs": "per-data-rank"})
        except ConfigError:
            # Weights in pieces are of ranks that make the same calls.
            return self

    def options(self) -> str:
        """The options of a command for this configuration, such as ``--devices 4 --tensor 2 --set vae=bands``."""
        words = [f"--devices {self.world_size}"]
        for name in (*reversed(self.degrees), *(name for name in type(self).model_fields if name not in self.degrees)):
            value = getattr(self, name)
            if value == type(self).model_fields[name].default:
                continue
            if isinstance(value, tuple):
                value = ",".join(f"{number:g}" for number in value)
            elif isinstance(value, bool) and not setting(name).option:
                value = str(value).lower()
            option, *given = option_words(name, value).split(" ", 1)
            words += [option, *map(shlex.quote, given)]
        return " ".join(words)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _explain(error: ValidationError) -> str:
    """One sentence per wrong field, with what the user can do."""
    problems: dict[str, dict[str, Any]] = {}
    for problem in error.errors():
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            near = did_you_mean(name, ParallelConfig.model_fields)
            fields = ", ".join(ParallelConfig.model_fields)
            problems[f"{name!r} is not a setting of ParallelConfig; known settings: {fields}{near}"] = {}
        else:
            # One for each type that the value could have.
            problems.setdefault(f"{name}={problem['input']!r} is not possible: ", {})[problem_text(problem)] = None
    return "; ".join(start + " or ".join(words) for start, words in problems.items())

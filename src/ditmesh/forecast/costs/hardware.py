"""Hardware as a cost model sees it: devices, links, and how many of them there are.

Known parts are in `parts.yaml`, with the source of every figure; a machine's own profile is measured by
``ditmesh doctor --save`` and read here. Units are seconds, bytes, and floating-point operations.
"""

from __future__ import annotations

from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ...errors import InputError, did_you_mean, problem_text, reason_of

PARTS = Path(__file__).with_name("parts.yaml")
Collective = Literal["all_to_all", "all_gather", "all_reduce", "shift", "broadcast"]


class _Profile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        if isinstance(value, float) and not isfinite(value):
            raise ValueError("has to be a finite number")
        return value


class TransferSpeed(_Profile):
    """The speed of a transfer: n bytes take ``latency + n / bandwidth`` seconds.

    Attributes:
        latency: seconds of a call that moves nothing.
        bandwidth: bytes per second that one rank sends.
    """

    latency: float = Field(ge=0)
    bandwidth: float = Field(gt=0)

    def seconds(self, sent: float) -> float:
        """Seconds in which a rank sends so many bytes."""
        return self.latency + sent / self.bandwidth


class LinkSpeed(TransferSpeed):
    """A link between devices.

    Attributes:
        name: of the part, or how it was measured.
        collectives: those of which the speed is known by itself.
        hidden: share of a transfer that runs beside computation when the strategy lets it.
        sync_wait_seconds: seconds that ranks wait for the last of them, where nothing runs beside the transfer.
        source: where the figures are from.
    """

    name: str
    collectives: dict[Collective, TransferSpeed] = {}
    hidden: float = Field(default=1.0, ge=0, le=1)
    sync_wait_seconds: float = Field(default=0.0, ge=0)
    source: str = ""

    def speed(self, collective: Collective) -> TransferSpeed:
        """Of one collective."""
        return self.collectives.get(collective, self)


class Device(_Profile):
    """One device.

    A product of (m, k) by (k, n) takes ``launch + 2 (m + rows) k (n + columns) / matmul`` seconds: thin matrices use a
    part of the device. Attention of q queries over s keys takes ``launch + 4 (q + queries) s d / attention`` a head of
    width d, everything else ``launch + bytes read and written / bandwidth``. Where the host launches ahead, a step
    takes what the device needs, or all launches if those are more.

    Attributes:
        memory: bytes.
        matmul: FLOP/s of large matrix products.
        attention: FLOP/s of attention over many tokens.
        bandwidth: bytes per second to and from memory.
        launch: seconds that the host takes for one kernel.
        ahead: whether kernels wait in a queue, as those of a GPU do, so that the host launches while others run.
        rows, columns, queries: at so many of them half the speed is reached.
        contention_factor: how much longer all that takes while every device of the host computes.
        runtime: bytes that a process has before it holds a model.
        dtype: in which the speeds hold.
        source: where the figures are from.
    """

    name: str
    memory: float = Field(gt=0)
    matmul: float = Field(gt=0)
    attention: float = Field(gt=0)
    bandwidth: float = Field(gt=0)
    launch: float = Field(ge=0)
    ahead: bool = False
    rows: float = Field(default=0.0, ge=0)
    columns: float = Field(default=0.0, ge=0)
    queries: float = Field(default=0.0, ge=0)
    contention_factor: float = Field(default=1.0, ge=0.5, le=8)
    runtime: float = Field(default=0.0, ge=0)
    dtype: str = "bfloat16"
    source: str = ""


class Hardware(_Profile):
    """Devices and their links.

    Attributes:
        device: all devices are alike.
        link: between devices of one host.
        devices: of one host.
        hosts: how many.
        between: between hosts; its bandwidth is that of a host, which its devices share.
        error: mean absolute error of a predicted step, relative, where it is known.
        scale: factors on the terms of a step by class (``"linear"``, ``"attention"``, ``"pointwise"``, ``"launch"``,
            ``"transfer"``), fitted to measured steps.
    """

    device: Device
    link: LinkSpeed
    devices: int = Field(default=1, ge=1, le=4096)
    hosts: int = Field(default=1, ge=1, le=4096)
    between: LinkSpeed | None = None
    scale: dict[str, float] = {}
    error: float | None = Field(default=None, ge=0)

    @property
    def world_size(self) -> int:
        """Devices of all hosts."""
        return self.devices * self.hosts

    def describe(self) -> str:
        """Such as ``2 hosts x 8 x H100 over nvlink4, infiniband-ndr between hosts``."""
        hosts = f"{self.hosts} hosts x " if self.hosts > 1 else ""
        between = f", {self.between.name} between hosts" if self.hosts > 1 and self.between else ""
        return f"{hosts}{self.devices} x {self.device.name} over {self.link.name}{between}"

    def named(self, name: str) -> LinkSpeed:
        """The link of a term."""
        return self.between if self.between is not None and self.between.name == name else self.link

    def transfer(self, collective: Collective, sent: float, size: int, stride: int = 1) -> tuple[float, float, str]:
        """One collective of ranks that are ``stride`` apart.

        Args:
            collective: which.
            sent: bytes that each rank sends.
            size: ranks that take part.
            stride: distance of neighbours among all ranks, which fill one host after the other.

        Returns:
            Its seconds, the share of it that can run beside computation, and the name of the link that takes longest.
        """
        if size == 1:
            return 0.0, 1.0, self.link.name
        # Messages go out one after the other; all of a collective's latency but one is a round of the ring.
        rounds = size - 1 if collective in ("all_gather", "all_reduce") else 1
        inside = self.link.speed(collective)
        seconds = inside.seconds(sent) + (rounds - 1) * inside.latency
        if size * stride <= self.devices or self.between is None:
            return seconds, self.link.hidden, self.link.name
        speed = self.between.speed(collective)
        # Ranks of one group on one host, and groups that share its link.
        here = max(1, self.devices // stride)
        groups = max(1, self.devices // min(here, size))
        # A ring crosses once per group; an exchange of all with all crosses with what is for other hosts, and where all
        # get the same, it does so once for each of them.
        crossing, far = sent * groups, size - min(here, size)
        if collective == "all_to_all":
            crossing = sent * far / (size - 1) * self.devices
        elif collective == "all_gather":
            crossing = sent * far / (size - 1) * groups
        outside = rounds * speed.latency + crossing / speed.bandwidth
        if outside <= seconds:
            return seconds, self.link.hidden, self.link.name
        return outside, self.between.hidden, self.between.name

    @staticmethod
    def read(path: str | Path) -> Hardware:
        """A profile that ``ditmesh doctor --save`` has written, or that was written by hand.

        Raises:
            InputError: the file cannot be read, or an entry is missing or impossible; says which.
        """
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"cannot read the hardware profile {str(path)!r}: {reason_of(error)}; ditmesh doctor --save FILE "
                "writes one"
            ) from None
        except yaml.YAMLError as error:
            raise InputError(
                f"the hardware profile {str(path)!r} is not YAML: {' '.join(str(error).split())}"
            ) from None
        if not isinstance(data, dict):
            raise InputError(
                f"the hardware profile {str(path)!r} holds a {type(data).__name__}; it needs the entries device and "
                "link, as ditmesh doctor --save FILE writes them"
            )
        for entry, known in (("device", device), ("link", link), ("between", link)):
            if isinstance(data.get(entry), str):
                data[entry] = known(data[entry])
        try:
            return Hardware(**data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(
                f"the hardware profile {str(path)!r}: {where}: {problem_text(first)}; ditmesh doctor --save FILE "
                "writes one that can be read"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the profile as YAML.

        Raises:
            InputError: it cannot be written.
        """
        try:
            Path(path).write_text(yaml.safe_dump(self.model_dump(), sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {str(path)!r}: {error.strerror}; give another name") from None


@cache
def _parts() -> dict[str, Any]:
    return yaml.safe_load(PARTS.read_text(encoding="utf-8"))


def known_devices() -> list[str]:
    """Names of the devices in the table."""
    return list(_parts()["devices"])


def device(name: str, dtype: str = "bfloat16") -> Device:
    """A device of the table.

    Raises:
        InputError: it is not there, or not with this dtype; names those that are.
    """
    table, key = _parts()["devices"], _key(name)
    if key not in table:
        raise InputError(
            f"device {name!r} is not in the table ({', '.join(table)}); measure it with ditmesh doctor --save FILE and "
            f"give that file, or write one{did_you_mean(key, table)}"
        )
    entry, shares = table[key], _parts()["shares"]
    if "matmul" in entry:
        # Measured as a whole.
        return Device(name=key, **{name: value for name, value in entry.items() if name != "link"})
    if dtype not in entry["flops"]:
        raise InputError(
            f"the table has no speed of {key} in {dtype}; it has {', '.join(entry['flops'])}: use --dtype with one of "
            "these, or a profile of your own"
        )
    peak = entry["flops"][dtype]
    return Device(
        name=key,
        memory=entry["memory"],
        matmul=peak * shares["matmul"],
        attention=peak * entry.get("attention_share", shares["attention"]),
        bandwidth=entry["bandwidth"] * shares["bandwidth"],
        launch=shares["launch"],
        ahead=True,
        rows=shares["rows"],
        columns=shares["columns"],
        queries=shares["queries"],
        runtime=shares["runtime"],
        dtype=dtype,
        source=f"{entry['source']}; shares of the peak: {shares['source']}",
    )


def machine(name: str, devices: int, dtype: str = "bfloat16") -> Hardware:
    """So many devices of the table on one host, with their usual link.

    Raises:
        InputError: there is no such device.
    """
    one, table = device(name, dtype), _parts()
    error = None if "matmul" in table["devices"][one.name] else table["shares"]["error"]
    return Hardware(device=one, link=link(table["devices"][one.name]["link"]), devices=devices, error=error)


def link(name: str) -> LinkSpeed:
    """A link of the table, or one of so many ``GB/s`` or ``Gb/s``.

    Raises:
        InputError: it is neither; names those that are there.
    """
    table, key = _parts()["links"], _key(name)
    if key in table:
        entry = dict(table[key])
        share = 1.0 if entry.pop("measured", False) else _parts()["shares"]["link"]
        return LinkSpeed(**{**entry, "name": key, "bandwidth": entry["bandwidth"] * share})
    for unit, factor in (("GB/s", 1e9), ("Gb/s", 1e9 / 8)):
        if name.strip().endswith(unit):
            try:
                number = float(name.strip().removesuffix(unit))
            except ValueError:
                break
            if not (isfinite(number) and number > 0):
                break
            return LinkSpeed(
                name=name.strip(),
                bandwidth=number * factor,
                latency=_parts()["shares"]["latency"],
                source="given",
            )
    raise InputError(
        f"link {name!r} is not in the table ({', '.join(table)}); use one of these, or a bandwidth such as 10GB/s or "
        f"25Gb/s{did_you_mean(key, table)}"
    )


def _key(name: str) -> str:
    return name.strip().lower().replace(" ", "-").removeprefix("nvidia-").removeprefix("geforce-").removeprefix("rtx-")

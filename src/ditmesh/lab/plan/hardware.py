"""Devices and links as a roofline sees them, from the table of parts: seconds, bytes, floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

import torch

from ...errors import InputError, did_you_mean
from ...memory.cards import device_entry, key_of, parts

# Collectives whose messages go round in a ring, one after the other.
ROUNDS = ("all_gather", "all_reduce")


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        memory: bytes.
        matmul: FLOP/s of large matrix products.
        attention: FLOP/s of attention over many tokens.
        bandwidth: bytes per second to and from memory.
        launch: seconds that the host takes for one kernel.
        ahead: whether kernels wait in a queue, as those of a GPU do, so that the host launches while others run.
        runtime: bytes that a process has before it holds a model.
    """

    name: str
    memory: float
    matmul: float
    attention: float
    bandwidth: float
    launch: float
    ahead: bool
    runtime: float


@dataclass(frozen=True)
class LinkSpeed:
    """A link between devices: n bytes take ``latency + n / bandwidth`` seconds.

    Attributes:
        collectives: latency and bandwidth of those of which they are known by themselves.
        hidden: share of a transfer that runs beside computation when the strategy lets it.
    """

    name: str
    latency: float
    bandwidth: float
    collectives: dict[str, tuple[float, float]] = field(default_factory=dict)
    hidden: float = 1.0


@dataclass(frozen=True)
class Hardware:
    """Equal devices of one host, and their links."""

    device: Device
    link: LinkSpeed
    devices: int = 1

    def describe(self) -> str:
        """Such as ``8 x h100 over nvlink4``."""
        return f"{self.devices} x {self.device.name} over {self.link.name}"

    def transfer(self, collective: str, times: float, sent: float, size: int) -> float:
        """Seconds of so many collectives of ``size`` ranks, in all of which a rank sends ``sent`` bytes."""
        rounds = size - 1 if collective in ROUNDS else 1
        latency, bandwidth = self.link.collectives.get(collective, (self.link.latency, self.link.bandwidth))
        return times * rounds * latency + sent / bandwidth


def device(name: str, dtype: str = "bfloat16") -> Device:
    """A device of the table. Raises `InputError`: it is not there, or not with this dtype; names those that are."""
    entry, shares = device_entry(name), parts()["shares"]
    if "matmul" in entry:
        # Measured as a whole.
        speeds = {speed: float(entry[speed]) for speed in ("memory", "matmul", "attention", "bandwidth", "launch")}
        return Device(key_of(name), **speeds, ahead=False, runtime=float(entry["runtime"]))
    if dtype not in entry["flops"]:
        raise InputError(
            f"the table has no speed of {key_of(name)} in {dtype}; use --dtype with one of {', '.join(entry['flops'])}"
        )
    peak = entry["flops"][dtype]
    return Device(
        key_of(name),
        memory=entry["memory"],
        matmul=peak * shares["matmul"],
        attention=peak * entry.get("attention_share", shares["attention"]),
        bandwidth=entry["bandwidth"] * shares["bandwidth"],
        launch=shares["launch"],
        ahead=True,
        runtime=shares["runtime"],
    )


def link(name: str) -> LinkSpeed:
    """A link of the table, or one of so many ``GB/s`` or ``Gb/s``.

    Raises `InputError`: it is neither; names those that are there.
    """
    table, key, shares = parts()["links"], key_of(name), parts()["shares"]
    if key in table:
        entry = table[key]
        share = 1.0 if entry.get("measured") else shares["link"]
        known = {what: (one["latency"], one["bandwidth"]) for what, one in entry.get("collectives", {}).items()}
        return LinkSpeed(key, entry["latency"], entry["bandwidth"] * share, known, entry.get("hidden", 1.0))
    for unit, factor in (("GB/s", 1e9), ("Gb/s", 1e9 / 8)):
        if name.strip().endswith(unit):
            try:
                number = float(name.strip().removesuffix(unit))
            except ValueError:
                break
            if isfinite(number) and number > 0:
                return LinkSpeed(name.strip(), shares["latency"], number * factor)
    raise InputError(
        f"link {name!r} is not in the table ({', '.join(table)}); use one of these, or a bandwidth such as 10GB/s or "
        f"25Gb/s{did_you_mean(key, table)}"
    )


def machine(name: str, devices: int, dtype: str = "bfloat16") -> Hardware:
    """So many devices of the table on one host, with their usual link; raises as `device`."""
    return Hardware(device(name, dtype), link(device_entry(name)["link"]), devices)


def hardware(
    name: str | None, devices: int | None, dtype: str, *, through: str | None = None, memory: float | None = None
) -> Hardware:
    """The hardware that a command names.

    Args:
        name: of a device; None: this machine's.
        through: the link between devices; None: the device's usual one.
        memory: bytes of a device, in the place of its own.

    Raises:
        InputError: a part is not in the table.
    """
    if name is None:
        name, here = this_device()
        devices = devices or here
        dtype = "float32" if name == "cpu" else dtype
    made = machine(name, devices or 1, dtype)
    if through is not None:
        made = replace(made, link=link(through))
    return made if memory is None else replace(made, device=replace(made.device, memory=memory))


def this_device() -> tuple[str, int]:
    """The name of this machine's GPU, and how many there are; ``"cpu"`` without one.

    Raises:
        InputError: the GPU is not in the table.
    """
    if not torch.cuda.is_available():
        return "cpu", 1
    name = torch.cuda.get_device_name(0).lower().replace(" ", "-")
    # The longest name: an L40S is no L40.
    found = sorted((part for part in parts()["devices"] if part in name), key=len)
    if not found:
        raise InputError(f"{name} is not in the table of parts; name one of it with --hardware")
    return found[-1], torch.cuda.device_count()

"""What several commands read from the command line in the same way."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..config import ParallelConfig
from ..errors import ConfigError, InputError
from ..launch import from_torchrun


def parse_size(text: str | None) -> tuple[int, int] | None:
    """``"96x64"`` to (width, height) in pixels; None stays None.

    Raises:
        InputError: the text is not a size.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)[xX×](\d+)", text.strip())
    if match is None or not (int(match[1]) and int(match[2])):
        raise InputError(f"size {text!r} is not WIDTHxHEIGHT; write it as 1024x1024")
    return int(match[1]), int(match[2])


def read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """Prompts of the command line, then those of a file: one a line, blank lines left out.

    Raises:
        InputError: the file cannot be read, or there is no prompt at all.
    """
    found = list(prompts or [])
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot read the prompts {str(file)!r} ({reason}); give a text file") from None
        written = [line.strip() for line in lines if line.strip()]
        if not written:
            raise InputError(f"the prompts {str(file)!r} hold no prompt; write one a line")
        found += written
    if not found:
        raise InputError('there is no prompt; write one, such as "a red fox", or give a file with --prompts')
    return found


def parse_weights(text: str | None) -> tuple[float, ...] | Literal["auto"] | None:
    """``"2,1"`` to numbers; ``"auto"`` and None stay what they are.

    Raises:
        InputError: the text is neither.
    """
    if text is None or text == "auto":
        return text
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"weights {text!r} are not numbers; write them as 2,1 (one for each rank), or auto") from None


def parallel_config(
    devices: int | None,
    file: Path | None,
    degrees: dict[str, int | None],
    heads: int | None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[int, ParallelConfig | None]:
    """Number of ranks and their configuration, from whichever of the four was given.

    Args:
        devices: number of ranks; None: what the configuration multiplies to, or what torchrun has started.
        file: YAML file of a `ParallelConfig`.
        degrees: degrees of axes; those not given are None.
        heads: attention heads of the model, when known.
        settings: other settings of `ParallelConfig`; those not given are None.

    Returns:
        The ranks, and the configuration; None when only the engine can choose it.

    Raises:
        ConfigError: they contradict one another.
    """
    given = {axis: degree for axis, degree in degrees.items() if degree is not None}
    more = {name: value for name, value in (settings or {}).items() if value is not None}
    if devices is None and not given and isinstance(more.get("weights"), tuple) and not from_torchrun():
        devices = len(more["weights"])
    if devices is not None and devices < 1:
        raise ConfigError(f"{devices} devices draw nothing; use --devices 1 or more")
    if from_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if devices not in (None, started):
            raise ConfigError(
                f"--devices {devices}, but torchrun has started {started} ranks; leave --devices out, or start "
                f"{devices} with torchrun --nproc-per-node {devices}"
            )
        devices = started
    if file is not None and (given or more):
        options = ", ".join(f"--{name}" for name in (*given, *more))
        raise ConfigError(f"--config {str(file)!r} and {options} both configure; write all of it into the file")
    if file is None and not given:
        devices = devices or 1
        if heads is None and not more:
            return devices, None
        # Of a model that does not tell its heads one is sure.
        auto = ParallelConfig.auto(devices, heads or 1)
        return devices, ParallelConfig(**{**auto.model_dump(), **more})
    config = ParallelConfig.read(file) if file is not None else ParallelConfig(**given, **more)
    devices = devices or config.world_size
    config.check_world_size(devices)
    return devices, config

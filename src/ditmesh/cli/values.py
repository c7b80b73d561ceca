"""What several commands read from the command line in the same way."""

from __future__ import annotations

import os
import re
from pathlib import Path

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


def parallel_config(
    devices: int | None, file: Path | None, degrees: dict[str, int | None], heads: int | None
) -> tuple[int, ParallelConfig | None]:
    """Number of ranks and their configuration, from whichever of the three was given.

    Args:
        devices: number of ranks; None: what the configuration multiplies to, or what torchrun has started.
        file: YAML file of a `ParallelConfig`.
        degrees: degrees of axes; those not given are None.
        heads: attention heads of the model, when known.

    Returns:
        The ranks, and the configuration; None when only the engine can choose it.

    Raises:
        ConfigError: the three contradict one another.
    """
    given = {axis: degree for axis, degree in degrees.items() if degree is not None}
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
    if file is not None and given:
        options = ", ".join(f"--{axis}" for axis in given)
        raise ConfigError(f"--config {str(file)!r} and {options} both set degrees; write them into the file")
    if file is None and not given:
        devices = devices or 1
        return devices, None if heads is None else ParallelConfig.auto(devices, heads)
    config = ParallelConfig.read(file) if file is not None else ParallelConfig(**given)
    devices = devices or config.world_size
    config.check_world_size(devices)
    return devices, config

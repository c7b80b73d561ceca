"""The errors ditmesh raises: each message names the thing, the value, and the way out."""

from __future__ import annotations


class DitmeshError(Exception):
    """Base of everything ditmesh raises on purpose."""


class InputError(DitmeshError, ValueError):
    """What the user asked for cannot be done. Raised before any rank starts heavy work; exit code 2."""


class ConfigError(InputError):
    """A parallel configuration that contradicts itself, the model, or the number of devices."""


class LayoutError(DitmeshError, RuntimeError):
    """A model's tensors do not follow its token layout, or no layout could be found."""


class RankFailed(DitmeshError, RuntimeError):
    """A rank raised or died. The message holds that rank's own traceback."""

    def __init__(self, message: str, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class UntestedWarning(UserWarning):
    """A combination of model and strategies that the parity matrix has not run."""

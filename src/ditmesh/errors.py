"""The errors that ditmesh raises: each message names the setting, its value, and what the user can do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class DitmeshError(Exception):
    """Base class of all ditmesh errors."""


class InputError(DitmeshError, ValueError):
    """The request cannot be done. Raised before any rank starts heavy work; exit code 2."""


class ConfigError(InputError):
    """A parallel configuration that contradicts itself, the model, or the number of devices."""


class LayoutError(DitmeshError, RuntimeError):
    """A model's tensors do not follow its token layout, or no layout could be found."""


class RankFailed(DitmeshError, RuntimeError):
    """A rank raised an exception or died. The message contains the rank's traceback.

    Attributes:
        rank: the one that failed first.
        exit_code: of its process, when that ended by itself; negative: the signal that killed it.
        lost: ranks that are gone without an error of the job: killed, ended, silent, or without their device.
        pool_open: whether the ranks are there still and can run something else.
    """

    def __init__(
        self,
        message: str,
        rank: int,
        exit_code: int | None = None,
        lost: tuple[int, ...] = (),
        pool_open: bool = False,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.lost = lost
        self.pool_open = pool_open


class MeetingError(DitmeshError, RuntimeError):
    """Ranks on several hosts could not connect: a rank is late, cannot be reached, or has other versions."""


class ServerError(DitmeshError, RuntimeError):
    """The server failed, or cannot be reached.

    Attributes:
        status: of HTTP; None: there was no answer, or a job failed.
        code: for programs, such as ``"rank_failed"`` or ``"unavailable"``.
    """

    def __init__(self, message: str, status: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class UntestedWarning(UserWarning):
    """The parity matrix has not tested this combination of model and strategies."""


class HostsWarning(UserWarning):
    """A configuration sends data between hosts that should stay inside one host."""


class InputDifferenceWarning(UserWarning):
    """Ranks were given different inputs, and all ranks use those of the first rank."""


class FewStepsWarning(UserWarning):
    """A request had so few steps that stale keys and values may show in its images."""


class LocalTokensWarning(UserWarning):
    """A hook or forward of the user inside a model's blocks is given this rank's tokens or samples only."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``"; did you mean 'ulysses'?"`` if one or several of ``words`` are similar to ``word``; otherwise empty."""
    near = difflib.get_close_matches(word, list(words), 3, 0.6)
    likeness = [difflib.SequenceMatcher(None, one, word).ratio() for one in near]
    best = sorted(one for one, like in zip(near, likeness, strict=True) if like == likeness[0])
    return f"; did you mean {' or '.join(map(repr, best))}?" if best else ""


def problem_text(problem: Mapping[str, Any]) -> str:
    """A pydantic error as the end of a sentence."""
    message = str(problem["msg"]).removeprefix("Value error, ").rstrip(".")
    return message[:1].lower() + message[1:]


def shortened(error: BaseException, at_most: int = 200, with_kind: bool = False) -> str:
    """The message of an error on one line, for use inside another message.

    ``with_kind``: begin with the name of its class; an error without a message always does.
    """
    said = " ".join(str(error).split())
    kind = type(error).__name__
    return (f"{kind}: {said}" if with_kind and said else said or kind)[:at_most]


def first_line(error: BaseException, otherwise: str = "") -> str:
    """The first line of an error's message; of one without a message ``otherwise``, or the name of its class."""
    return (str(error).strip() or otherwise or type(error).__name__).splitlines()[0]


def reason_of(error: BaseException) -> str:
    """The reason why a file cannot be read or written: the system's message without the file's name."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())

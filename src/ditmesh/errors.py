"""The errors ditmesh raises: each message names the thing, the value, and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


class DitmeshError(Exception):
    """Base of everything ditmesh raises on purpose."""


class InputError(DitmeshError, ValueError):
    """What the user asked for cannot be done. Raised before any rank starts heavy work; exit code 2."""


class ConfigError(InputError):
    """A parallel configuration that contradicts itself, the model, or the number of devices."""


class LayoutError(DitmeshError, RuntimeError):
    """A model's tensors do not follow its token layout, or no layout could be found."""


class JournalError(DitmeshError, RuntimeError):
    """A request that was to go on from where it was broken off is another one than the journal holds."""


class RankFailed(DitmeshError, RuntimeError):
    """A rank raised or died. The message holds that rank's own traceback.

    Attributes:
        rank: the one that failed first.
        exit_code: of its process, when that ended by itself; negative: the signal that killed it.
        lost: ranks that are gone without an error of the job: killed, ended, silent, or without their device. Empty
            when a rank raised: it would do so again.
        pool_open: whether the ranks are there still and can run something else: each has answered or raised, and none
            waits for another.
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
    """Ranks on several hosts did not come together: one is late or cannot be reached, or has other versions."""


class ServerError(DitmeshError, RuntimeError):
    """The server could not do it, or cannot be reached.

    Attributes:
        status: of HTTP; None: there was no answer, or a job failed.
        code: for programs, such as ``"rank_failed"`` or ``"unavailable"``.
    """

    def __init__(self, message: str, status: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class UntestedWarning(UserWarning):
    """A combination of model and strategies that the parity matrix has not run."""


class HostsWarning(UserWarning):
    """A configuration lets ranks on several hosts exchange what is better kept inside of one."""


class InputDifferenceWarning(UserWarning):
    """Ranks were given different inputs, and all of them run the first rank's."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``"; did you mean 'ulysses'?"`` when one of ``words`` is nearly ``word``, or several alike; else nothing."""
    near = difflib.get_close_matches(word, list(words), 3, 0.6)
    likeness = [difflib.SequenceMatcher(None, one, word).ratio() for one in near]
    best = sorted(one for one, like in zip(near, likeness, strict=True) if like == likeness[0])
    return f"; did you mean {' or '.join(map(repr, best))}?" if best else ""


# By the kind of a finding of pydantic: what a value is not.
NOT_OF_KIND = {
    "int": "not a whole number",
    "float": "not a number",
    "bool": "neither true nor false",
    "string": "not text",
    "tuple": "not a list",
    "list": "not a list",
    "dict": "not a group of settings",
    "model": "not a group of settings",
    "finite_number": "not a finite number",
}


def what_is_wrong(problem: Mapping[str, Any]) -> str:
    """What pydantic has found wrong with a value, in the words of an error: "not a whole number", "below 1"."""
    kind, about, value = str(problem["type"]), problem.get("ctx") or {}, problem.get("input")
    if kind == "literal_error":
        words = [word.strip("'") for word in re.split(r", | or ", str(about["expected"]))]
        return f"none of {', '.join(words)}{did_you_mean(value, words) if isinstance(value, str) else ''}"
    bounds = {
        "greater_than_equal": ("ge", "below {0:g}; use {0:g} or more"),
        "greater_than": ("gt", "not above {0:g}; use more"),
        "less_than_equal": ("le", "above {0:g}; use {0:g} or less"),
        "less_than": ("lt", "not below {0:g}; use less"),
    }
    if kind in bounds:
        name, words = bounds[kind]
        # Bounds of whole numbers are shown as such.
        return words.replace(":g", "" if isinstance(about[name], int) else ":g").format(about[name])
    if kind == "missing":
        return "is missing"
    if kind == "too_short":
        return "empty; give one at least"
    if kind == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    of = next((one for one in NOT_OF_KIND if kind == one or kind.startswith(f"{one}_")), None)
    return NOT_OF_KIND[of] if of is not None else str(problem["msg"]).lower()


def nearest_problem(problems: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of a value that may be of several types: what is said of the one that it is nearest to."""

    def nearness(one: Mapping[str, Any]) -> tuple[int, bool, bool]:
        kind = one["type"]
        words = kind == "literal_error" and isinstance(one["input"], str)
        return len(one["loc"]), words, not kind.endswith("_type")

    return max(problems, key=nearness)


def reason_of(error: BaseException) -> str:
    """Why a file cannot be read or written: of an error of the system its words alone, without the file's name."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())

"""Errors of the server and result files, as the queue passes them to the HTTP side."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ServerError

# Seconds after which a client should retry if the server is stopping.
RESTART_SECONDS = 10.0
# As many consecutive words of a prompt are a quotation of it.
QUOTED_WORDS = 3


class QueueFull(ServerError):
    """No more jobs are taken for now.

    Attributes:
        retry_after: seconds after which it is worth asking again.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stopping(QueueFull):
    """The server is stopping."""


class StorageError(ServerError):
    """The server's folder cannot be read or written, and the operation was not done.

    Attributes:
        passes: it may work in a moment, without a person's help.
        broken: the database is damaged: it will not work however often it is tried.
    """

    def __init__(self, message: str, passes: bool = False, broken: bool = False) -> None:
        super().__init__(message)
        self.passes, self.broken = passes, broken


class NoSpace(StorageError):
    """The disk is full."""


class UnknownJob(ServerError, KeyError):
    """There is no such job, or it belongs to another client, or has expired."""

    __str__ = Exception.__str__


@dataclass(frozen=True)
class ResultFile:
    """A result on disk."""

    path: Path
    media_type: str


def without_quotes(text: str, prompts: Iterable[str | None]) -> str:
    """A text for logs and other clients, with ``…`` in the place of what it quotes of prompts.

    A quotation has `QUOTED_WORDS` consecutive words of a prompt, or all of a shorter one, in any case.
    """
    words = [(match.group().casefold(), *match.span()) for match in re.finditer(r"\w+", text)]
    hidden: set[int] = set()
    for prompt in filter(None, prompts):
        phrase = re.findall(r"\w+", prompt.casefold())
        size = min(QUOTED_WORDS, len(phrase))
        if not size:
            # It consists of signs alone.
            text = text.replace(prompt, "…" * len(prompt))
            continue
        runs = {tuple(phrase[at : at + size]) for at in range(len(phrase) - size + 1)}
        for at in range(len(words) - size + 1):
            if tuple(word for word, _, _ in words[at : at + size]) in runs:
                hidden.update(range(words[at][1], words[at + size - 1][2]))
    kept = "".join("\0" if at in hidden else letter for at, letter in enumerate(text))
    return re.sub("\0+", "…", kept)

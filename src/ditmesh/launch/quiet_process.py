"""The first module that a fork server imports: it and the ranks forked from it leave out what libraries chatter.

The server's own end, if one of the modules cannot be imported, is one sentence for the process that has started it, and
a rank that ends before it answers says why where its owner looks.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from .log_filter import hide_chatter
from .processes import NOTE_VARIABLE, tell_owner_of_errors


def note_end(file: str) -> None:
    """Let an exception that ends this process be written to ``file`` as a sentence, and not to stderr."""
    server, shown = os.getpid(), sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from ..requirements import outdated

        if os.getpid() != server:
            shown(kind, error, trace)
            return
        from ..errors import shortened

        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = ". ".join(outdated()) or f"{shortened(cause, 300, with_kind=True)}; `ditmesh doctor` names the package"
        with open(file, "w", encoding="utf-8") as written:
            written.write(text)

    sys.excepthook = note


hide_chatter()
tell_owner_of_errors()
if NOTE_VARIABLE in os.environ:
    note_end(os.environ.pop(NOTE_VARIABLE))

"""What libraries say on a server's ranks, which may quote what users have sent."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def hidden_texts(private: Callable[[], bool]) -> Iterator[None]:
    """Leave out what libraries say in this process, which may quote what users have sent; where they say it is kept.

    That is the text of log messages, warnings, and errors that end a thread or a finaliser, of all modules but ours.
    Each place speaks once.

    Args:
        private: True while there may be something to quote.
    """
    make, show, told = logging.getLogRecordFactory(), warnings.showwarning, set()
    end_of_thread, end_of_finaliser = threading.excepthook, sys.unraisablehook

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        entry = make(*args, **more)
        if private() and entry.name.partition(".")[0] != "ditmesh":
            place = f"{entry.name} line {entry.lineno}"
            entry.msg, entry.args, entry.exc_info, entry.exc_text = _without_text(place), (), None, None
            if place in told:
                # Below the level of every handler.
                entry.levelno = -1
            told.add(place)
        return entry

    def warning(message: Any, category: Any, filename: str, lineno: int, *more: Any, **options: Any) -> None:
        if private() and not category.__module__.startswith("ditmesh"):
            message = _without_text(category.__name__)
        show(message, category, filename, lineno, *more, **options)

    def thread_ended(args: Any) -> None:
        if not private():
            end_of_thread(args)
        elif args.exc_type is not SystemExit:
            _say_place(args.exc_type, args.exc_traceback)

    def finaliser_ended(args: Any) -> None:
        if private():
            _say_place(args.exc_type, args.exc_traceback)
        else:
            end_of_finaliser(args)

    logging.setLogRecordFactory(record)
    warnings.showwarning = warning
    threading.excepthook, sys.unraisablehook = thread_ended, finaliser_ended
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.showwarning = show
        threading.excepthook, sys.unraisablehook = end_of_thread, end_of_finaliser


def _without_text(what: str) -> str:
    return f"{what}: its text may quote a prompt and is left out; the option --log-prompts shows it"


def _say_place(kind: type[BaseException], at: Any) -> None:
    last = traceback.extract_tb(at)[-1:]
    where = f" in {last[0].filename} line {last[0].lineno}" if last else ""
    print(_without_text(f"{kind.__name__}{where}"), file=sys.stderr)

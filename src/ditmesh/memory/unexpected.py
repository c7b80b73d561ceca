"""Errors of code that only predicts: the work goes on without its answer, and the mistake is said."""

from __future__ import annotations

import logging
import os

from ..errors import first_line

# Errors of a mistake in a prediction; a case that cannot be predicted raises a `ditmesh.errors.DitmeshError`.
MISTAKES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
# An environment variable that makes mistakes raise, for tests.
RAISE = "DITMESH_RAISE_MISTAKES"


def unexpected(log: logging.Logger, error: Exception, what: str) -> None:
    """Log an error of a prediction: one line as a warning, its traceback for debugging.

    Args:
        error: what was raised; raised again if the environment variable `RAISE` is set.
        what: the action in place of the prediction, a whole sentence.
    """
    if os.environ.get(RAISE):
        raise error
    log.warning("%s (%s: %s)", what, type(error).__name__, first_line(error, "no message"))
    log.debug("the traceback:", exc_info=error)

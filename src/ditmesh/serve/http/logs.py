"""Logs with one line per record, as JSON or text; and a watch that reports jobs to log and metrics."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
import traceback
from collections.abc import Mapping
from typing import Any, Literal

from ...core.files import finite
from ..errors import without_quotes
from ..types import ENDED, Event, Job
from .metrics import Metrics

LogFormat = Literal["json", "text"]

logger = logging.getLogger("ditmesh.serve")


class LineFormatter(logging.Formatter):
    """One line a record; facts that are passed as ``extra={"facts": {...}}`` are fields of it.

    Args:
        form: ``"json"`` or ``"text"``.
        prompts: prompts may be in the log; without, of errors their kind and place are, and the text of those only
            that the system raises: others may quote a request.
    """

    def __init__(self, form: LogFormat, prompts: bool = False) -> None:
        super().__init__()
        self._form, self._prompts = form, prompts

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name of `logging`
        """The traceback of an exception and of its causes."""
        if self._prompts:
            return super().formatException(ei)
        error, parts = ei[1], []
        while error is not None:
            text = f": {error}" if isinstance(error, (OSError, MemoryError, sqlite3.Error)) else ""
            parts.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__ + text)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\n\n".join(reversed(parts))

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        facts: Mapping[str, Any] = getattr(record, "facts", {})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        error = self.formatException(record.exc_info) if record.exc_info else None
        if self._form == "json":
            line = {"time": when, "level": record.levelname.lower(), "logger": record.name}
            line |= {"message": record.getMessage(), **facts, **({"exception": error} if error else {})}
            return json.dumps(finite(line), allow_nan=False)
        # A line break in a client's text would look like another log line.
        words = [when, record.levelname.lower(), _one_line(record.getMessage())]
        words += [f"{name}={_one_line(str(value))}" for name, value in facts.items()]
        return " ".join(words) + (f"\n{error}" if error else "")


def _one_line(text: str) -> str:
    return text.encode("unicode_escape").decode() if not text.isprintable() else text


def log_config(form: LogFormat, level: str, prompts: bool = False) -> dict[str, Any]:
    """The configuration for `logging.config.dictConfig` and uvicorn; ``level`` is of our own messages."""
    loggers = {"ditmesh": level, "uvicorn": "ERROR", "uvicorn.error": "ERROR", "asyncio": "WARNING"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": LineFormatter, "form": form, "prompts": prompts}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": least, "propagate": False} for name, least in loggers.items()
        },
    }


class JobWatch:
    """Reports the events of jobs to log and metrics; with ``log_prompts`` prompts, too."""

    def __init__(self, metrics: Metrics, log_prompts: bool) -> None:
        self._metrics, self._log_prompts = metrics, log_prompts

    def accepted(self, job: Job, owner: str) -> None:
        """Report an accepted job."""
        self._metrics.submitted.labels(job.request.model).inc()
        facts = {"job": job.id, "model": job.request.model, "images": job.request.n}
        if owner:
            facts["owner"] = owner[:8]
        if self._log_prompts:
            facts["prompt"] = job.request.prompt
        logger.info("job accepted", extra={"facts": facts})

    def tell(self, job: Job, event: Event) -> None:
        """Report an event."""
        facts: dict[str, Any] = {"job": job.id}
        seconds = max(0.0, time.time() - job.created)
        # What quotes of its prompts may not be in the log.
        prompts = () if self._log_prompts else (job.request.prompt, job.request.negative_prompt)
        if event.event == "started" and event.data.get("attempt", 1) == 1:
            self._metrics.waiting.observe(seconds)
            facts["waited"] = round(seconds, 4)
        elif event.event == "restarted":
            self._metrics.restarts.inc()
            facts |= event.data | {"reason": without_quotes(event.data.get("reason", ""), prompts)}
        elif event.event == "image":
            for note in event.data.get("notes", ()):
                logger.info("%s", note, extra={"facts": facts})
        elif event.event in ENDED:
            self._metrics.ended.labels(event.event).inc()
            self._metrics.working.observe(seconds)
            facts["seconds"] = round(seconds, 4)
            if error := event.data.get("error"):
                self._metrics.failures.labels(error["code"]).inc()
                facts["error_code"] = error["code"]
                # What is wrong with a request may quote it.
                if error["code"] != "invalid_request" or self._log_prompts:
                    facts["error_message"] = without_quotes(error["message"], prompts)
        if event.event not in ("queued", "step", "preview", "frames", "image"):
            level = logging.WARNING if event.event in ("failed", "restarted") else logging.INFO
            logger.log(level, "job %s", event.event, extra={"facts": facts})

"""Logs with one line per record, as JSON or text; and a watch that reports jobs to log, metrics and traces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ...core.files import finite
from ...errors import DitmeshError, InputError
from ...requirements import install_line
from ..errors import without_quotes
from ..types import ENDED, Event, Job
from .metrics import Metrics
from .streams import ended, iterate_and_close

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from ..service import Service

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


class RepeatFilter(logging.Filter):
    """Lets a few records of a kind through, then one at intervals with the number of omitted records.

    A kind is a logger, a message before its values, and what was answered where. A million requests of nonsense are a
    million records; what jobs do, and requests that were answered well, is never left out.

    Args:
        most: records of a kind that get through at once.
        every: seconds after which one more does.
        clock: seconds.
    """

    # Maximum number of kinds: messages in the code, times statuses and routes.
    KINDS = 1000

    def __init__(self, most: int = 20, every: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._every, self._clock = most, every, clock
        # For each kind: the remaining records, the time of that count, and the number omitted since.
        self._kinds: dict[tuple[Any, ...], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if a record is written."""
        facts: Mapping[str, Any] = getattr(record, "facts", {})
        status = facts.get("status", 200)
        if record.levelno <= logging.INFO and 200 <= status < 400:
            return True
        kind = record.name, str(record.msg)[:200], status, facts.get("route"), facts.get("owner")
        if len(self._kinds) > self.KINDS:
            self._kinds.clear()
        now = self._clock()
        left, when, out = self._kinds.get(kind, (float(self._most), now, 0))
        left = min(float(self._most), left + (now - when) / self._every)
        if left < 1:
            self._kinds[kind] = left, now, out + 1
            return False
        self._kinds[kind] = left - 1, now, 0
        if out:
            record.facts = {**facts, "left_out": out}
        return True


def log_config(form: LogFormat, level: str, prompts: bool = False) -> dict[str, Any]:
    """The configuration for `logging.config.dictConfig` and uvicorn, with this format for both loggers.

    Args:
        form, prompts: see `LineFormatter`.
        level: of our own messages.
    """
    loggers = {"ditmesh": level, "uvicorn": "WARNING", "uvicorn.error": "WARNING", "asyncio": "WARNING"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": LineFormatter, "form": form, "prompts": prompts}},
        "filters": {"sparing": {"()": RepeatFilter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines", "filters": ["sparing"]}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": least, "propagate": False} for name, least in loggers.items()
        },
    }


@contextlib.contextmanager
def otlp_traces() -> Iterator[Tracer]:
    """A tracer that sends to the endpoint in OpenTelemetry's environment variables (``OTEL_EXPORTER_OTLP_ENDPOINT`` …).

    Remaining spans are sent at the end.

    Raises:
        InputError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InputError(
            f"--otel needs OpenTelemetry ({error.name} is missing); {install_line('otel')}, or leave --otel out"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "ditmesh"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield provider.get_tracer("ditmesh.serve")
    finally:
        provider.shutdown()


class JobWatch:
    """Follows every accepted job and reports its events to log, metrics and traces.

    Args:
        backend, metrics: of the server.
        tracer: None: no traces.
        log_prompts: log prompts, too.
    """

    def __init__(self, backend: Service, metrics: Metrics, tracer: Tracer | None, log_prompts: bool) -> None:
        self._backend, self._metrics, self._tracer, self._log_prompts = backend, metrics, tracer, log_prompts
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, job: Job, owner: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Follow an accepted job, once. ``headers``: of the request, which may name the parent span."""
        if job.id in self._tasks:
            return
        self._metrics.submitted.labels(job.request.model).inc()
        facts = {"job": job.id, "model": job.request.model, "images": job.request.n}
        if owner:
            facts["owner"] = owner[:8]
        if self._log_prompts:
            facts["prompt"] = job.request.prompt
        logger.info("job accepted", extra={"facts": facts})
        task = asyncio.create_task(self._follow(job, owner, headers), name=f"watch {job.id}")
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.id, None))

    async def close(self) -> None:
        """Stop following jobs."""
        for task in list(self._tasks.values()):
            await ended(task)

    async def _follow(self, job: Job, owner: str, headers: Mapping[str, str]) -> None:
        span = self._begin(job, headers)
        try:
            async with iterate_and_close(self._backend.events(job.id, owner)) as events:
                async for event in events:
                    self._tell(job, event, span)
        except DitmeshError as error:
            logger.warning("job is followed no more: %s", error, extra={"facts": {"job": job.id}})
        finally:
            if span is not None:
                span.end()

    def _begin(self, job: Job, headers: Mapping[str, str]) -> Span | None:
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        facts = {"ditmesh.job": job.id, "ditmesh.model": job.request.model, "ditmesh.images": job.request.n}
        return self._tracer.start_span("job", parent, SpanKind.CONSUMER, facts)

    def _tell(self, job: Job, event: Event, span: Span | None) -> None:
        facts: dict[str, Any] = {"job": job.id}
        seconds = max(0.0, time.time() - job.created)
        if event.event == "started" and event.data.get("attempt", 1) == 1:
            self._metrics.waiting.observe(seconds)
            facts["waited"] = round(seconds, 4)
        elif event.event == "restarted":
            self._metrics.restarts.inc()
            facts |= event.data | {"reason": self._unquoted(job, event.data.get("reason", ""))}
        elif event.event == "image":
            self._tell_notes(job, event)
        elif event.event in ENDED:
            error = event.data.get("error") or {}
            self._metrics.ended.labels(event.event).inc()
            self._metrics.working.observe(seconds)
            if "code" in error:
                self._metrics.failures.labels(error["code"]).inc()
            facts |= {"seconds": round(seconds, 4)}
            facts |= self._error_facts(job, error)
        if span is not None and event.event != "preview":
            plain = {name: value for name, value in event.data.items() if isinstance(value, (int, float, str))}
            span.add_event(event.event, plain if event.event not in ENDED else {})
            if event.event == "failed":
                from opentelemetry.trace import Status, StatusCode

                # The message may quote the prompt.
                span.set_attribute("error.type", facts.get("error_code", ""))
                span.set_status(Status(StatusCode.ERROR, facts.get("error_code", "")))
        if event.event not in ("queued", "step", "preview", "image"):
            level = logging.WARNING if event.event in ("failed", "restarted") else logging.INFO
            logger.log(level, "job %s", event.event, extra={"facts": facts})

    @staticmethod
    def _tell_notes(job: Job, event: Event) -> None:
        for note in event.data.get("notes", ()):
            logger.info("%s", note, extra={"facts": {"job": job.id}})

    def _error_facts(self, job: Job, error: Mapping[str, str]) -> dict[str, str]:
        """What the log says of a job's error."""
        facts = {f"error_{name}": error[name] for name in ("code", "message") if name in error}
        if error.get("code") == "invalid_request" and not self._log_prompts:
            # It is about the request.
            facts.pop("error_message", None)
        return {name: self._unquoted(job, text) for name, text in facts.items()}

    def _unquoted(self, job: Job, text: str) -> str:
        """A text without what it quotes of a job's prompts, unless they may be logged."""
        request = job.request
        return text if self._log_prompts else without_quotes(text, (request.prompt, request.negative_prompt))

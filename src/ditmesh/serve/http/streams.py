"""Server-sent events, and streams that end with their reader, their source or the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...core.files import finite
from ...errors import DitmeshError
from .errors import Refused

logger = logging.getLogger("ditmesh.serve")
# Seconds for a stream to send its pending events when the server stops.
LAST_WORDS_SECONDS = 0.5


def sse(data: Any, event: str | None = None, id: int | None = None) -> str:
    """One event; ``data`` becomes JSON in one line."""
    lines = [f"id: {id}"] if id is not None else []
    lines += [f"event: {event}"] if event is not None else []
    text = json.dumps(finite(data), separators=(",", ":"), allow_nan=False)
    return "\n".join([*lines, f"data: {text}", "", ""])


def event_schema(names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI schema of an event with these names."""
    data = {"type": "string", "contentMediaType": "application/json"}
    fields = {"id": {"type": "string"}, "event": {"type": "string", "enum": [*names]}, "data": data}
    return {"type": "object", "properties": fields, "required": ["event", "data"]}


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it is over."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


class EventStream(Response):
    """Sends the events of a source, and closes it when the source, the client or the server ends.

    Args:
        source: events as `sse` makes them.
        keep_alive: seconds of silence after which a comment is sent, by which proxies see that the stream is alive.
        closing: set when the server stops.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[str], keep_alive: float, closing: asyncio.Event) -> None:
        self.status_code, self.background = 200, None
        # nginx would wait until a buffer is full.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._source, self._keep_alive, self._closing = source, keep_alive, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        left = asyncio.ensure_future(wait_disconnect(receive))
        stops = asyncio.ensure_future(self._closing.wait())
        following: asyncio.Future[str] | None = None
        try:
            while not left.done():
                following = following or asyncio.ensure_future(_next(self._source))
                waiting = {following, left} if stops.done() else {following, left, stops}
                limit = LAST_WORDS_SECONDS if stops.done() else self._keep_alive
                await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    try:
                        text, following = following.result(), None
                    except StopAsyncIteration:
                        break
                    except Exception as error:
                        text, following = _failure(error), None
                elif left.done():
                    break
                elif stops.done():
                    if stops not in waiting:
                        break
                    continue
                else:
                    text = ": still here\n\n"
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in (left, stops, following):
                if task is not None:
                    await ended(task)
            await self._source.aclose()


def _failure(error: Exception) -> str:
    """The last event if the source fails in the middle, because the status has been sent already."""
    logger.error("a stream has failed", exc_info=error)
    message = str(error) if isinstance(error, DitmeshError) else "the server has failed; its log says more"
    return sse({"error": Refused(500, message).detail}, "error")


async def _next(source: AsyncGenerator[str]) -> str:
    return await anext(source)

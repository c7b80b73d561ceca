"""Client connections: their maximum number, their time limits, and which one is closed for a new one.

A connection without a request costs its client nothing and the server a descriptor. So each step has a time limit (a
request's header, its body, a reader of the answer), the number of connections stays below the process's limit of
descriptors, and the oldest connection without a request under way makes room for a new one. `/healthz` is answered
whatever the others do.

`LimitedConnection` stands around uvicorn's protocol as any `asyncio.Protocol` may, and `LimitedRequests` around the
application: nothing of uvicorn is overridden.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import Refused, error_response, wait_header

try:
    import resource
except ImportError:  # not on Windows
    resource = None

logger = logging.getLogger("ditmesh.serve")

# Descriptors reserved for the queue, jobs' files and ranks; with a low limit, a quarter.
RESERVED_DESCRIPTORS = 64
# Connections beyond the limit, for which only the probes are answered; other requests get 503.
SPARE_CONNECTIONS = 8
# Connections that the system queues, and that asyncio accepts in one turn of the event loop, at most.
BACKLOG, ACCEPTED_AT_ONCE = 1024, 16
# Seconds between checks of all connections.
CHECK_SECONDS = 0.5
PROBES = ("/healthz", "/readyz")
# Bytes of a request line and its headers.
LONGEST_HEADER = 16 * 1024


class ConnectionLimits:
    """Limits of the number of connections and of their times, and all connections that are open.

    Args:
        most: connections at a time; each may need a second descriptor, for a file that is sent.
        header: seconds until a request's header is there: from the connection's begin or the answer before.
        body, body_rate: seconds of a body that are free, and bytes a second that it has to come at from then on.
        write, write_rate: seconds after which an answer has to be read at so many bytes a second.
    """

    def __init__(
        self,
        most: int = 1024,
        header: float = 10.0,
        body: float = 20.0,
        body_rate: float = 4096.0,
        write: float = 30.0,
        write_rate: float = 512.0,
    ) -> None:
        self.most, self.header, self.body, self.body_rate = most, header, body, body_rate
        self.write, self.write_rate = write, write_rate
        # To accept in one turn: a request that came with its connection is read some turns later.
        self.at_once = max(1, min(ACCEPTED_AT_ONCE, most // 8))
        self.open: set[LimitedConnection] = set()
        # Those without a request under way, the oldest first.
        self.idle: dict[LimitedConnection, None] = {}

    @classmethod
    def of_process(cls, most: int) -> ConnectionLimits:
        """Limits that fit the process's descriptor limit; the soft limit is raised as far as needed."""
        fit = min(most, _descriptors(2 * most + RESERVED_DESCRIPTORS) // 2)
        if fit < most:
            logger.warning(
                "the limit of descriptors (ulimit -n) leaves room for %d connections at a time instead of %d", fit, most
            )
        return cls(most=fit)

    def make_room(self) -> bool:
        """Close the oldest idle connection if there are too many; False: there are too many, and all are busy."""
        if len(self.open) < self.most:
            return True
        oldest = next(iter(self.idle), None)
        if oldest is not None:
            oldest.drop()
        return oldest is not None

    async def watch(self) -> None:
        """Close connections that exceed their time, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for connection in list(self.open):
                connection.check(time.monotonic())


def _descriptors(wanted: int) -> int:
    """Descriptors available for connections."""
    if resource is None:
        return wanted
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted + used:
        raised = wanted + used if hard == resource.RLIM_INFINITY else min(hard, wanted + used)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return max(8, soft - used - min(RESERVED_DESCRIPTORS, soft // 4))


class LimitedConnection(asyncio.Protocol):
    """A connection of a client, which uvicorn's protocol for HTTP/1.1 reads and answers.

    Attributes:
        crowded: it came when there were too many already.
        since: when it was made or its latest answer was complete, on the monotonic clock.
    """

    def __init__(self, limits: ConnectionLimits, app_state: dict[str, Any], **of_server: Any) -> None:
        self._limits, self.crowded = limits, False
        self._transport: asyncio.Transport | None = None
        # The scope of every request has it: a lifespan's state is shared with requests.
        self._http = H11Protocol(app_state={**app_state, "connection": self}, **of_server)
        self.since = time.monotonic()
        # When the output buffer was first seen with bytes that the client has not read, and how many.
        self._unread: tuple[float, int] | None = None

    def connection_made(self, transport: Any) -> None:
        """Make room for it, or close it."""
        self._transport, limits = transport, self._limits
        self.crowded = not limits.make_room()
        limits.open.add(self)
        self.answered()
        self._http.connection_made(transport)
        if len(limits.open) > limits.most + SPARE_CONNECTIONS:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._forget()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, in pieces: the parser limits the size of incomplete headers only."""
        assert self._transport is not None
        try:
            for start in range(0, len(data), LONGEST_HEADER):
                if not self._transport.is_closing():
                    self._http.data_received(data[start : start + LONGEST_HEADER])
        except Exception:
            # Invalid bytes in a body after its answer has begun, or in a path.
            self.drop()

    def pause_writing(self) -> None:
        """As uvicorn's."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """As uvicorn's: the client has read."""
        self._unread = None
        self._http.resume_writing()

    def busy(self) -> None:
        """Record that a request has begun."""
        self._limits.idle.pop(self, None)

    def answered(self) -> None:
        """Record that no request is under way: the time for the next header begins."""
        self.since = time.monotonic()
        if self in self._limits.open:
            self._limits.idle[self] = None

    def drop(self) -> None:
        """Close immediately."""
        self._forget()
        assert self._transport is not None
        self._transport.abort()

    def _forget(self) -> None:
        self._limits.open.discard(self)
        self._limits.idle.pop(self, None)

    def check(self, now: float) -> None:
        """Close the connection if its client takes too long."""
        limits, transport = self._limits, self._transport
        assert transport is not None
        size = transport.get_write_buffer_size()
        if not size:
            self._unread = None
        elif self._unread is None:
            self._unread = now, size
        elif now - self._unread[0] > limits.write:
            if self._unread[1] - size < limits.write_rate * limits.write:
                self.drop()
                return
            self._unread = now, size
        if self in limits.idle and now - self.since > (limits.header / 4 if self.crowded else limits.header):
            transport.close()


class LimitedRequests:
    """The application with a time limit for bodies, and nothing but probes for connections beyond the limit."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: LimitedConnection | None = scope.get("state", {}).get("connection")
        if connection is None:
            await self._app(scope, receive, send)
            return
        connection.busy()
        try:
            if connection.crowded and scope["path"] not in PROBES:
                message = "there are as many connections as this server can hold; ask again"
                headers = {**wait_header(5), "Connection": "close"}
                await error_response(Refused(503, message, headers=headers))(scope, receive, send)
            else:
                await self._app(scope, timed_body(receive, self._limits), send)
        finally:
            connection.answered()


def timed_body(receive: Receive, limits: ConnectionLimits) -> Receive:
    """The messages of a request; a body that comes too slowly is refused. The application's own time is free."""
    waited, size, more = 0.0, 0, True

    async def timed() -> Message:
        nonlocal waited, size, more
        if not more:
            return await receive()
        began = time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), limits.body + size / limits.body_rate - waited)
        except TimeoutError:
            text = f"the request's body did not arrive within {limits.body:g} seconds; send it at once"
            raise HTTPException(408, text, {"Connection": "close"}) from None
        waited += time.monotonic() - began
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        return message

    return timed

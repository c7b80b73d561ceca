"""Client connections: their maximum number, their time limits, and which one is closed for a new one.

A connection without a request costs its client nothing and the server a descriptor. So each step has a time limit (a
request's header, its body, a reader of the answer), the number of connections stays below the process's limit of
descriptors, and a connection that has no request under way makes room for a new one: the oldest one of the address that
has the most of them. `/healthz` is answered whatever the others do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import Refused, error_response, wait_header

try:
    import resource
except ImportError:  # not on Windows
    resource = None

logger = logging.getLogger("ditmesh.serve")

# Descriptors reserved for the queue, jobs' files and ranks; with a low limit, a quarter.
RESERVED = 64
# Connections beyond the limit, for which only the probes are answered; other requests get 503.
SPARE = 8
# Connections accepted in one turn of the event loop; pending connections that the system queues.
AT_ONCE, BACKLOG = 16, 1024
# Seconds between checks of all connections, and before the next attempt when no descriptor is left.
LOOK, BACK_OFF = 0.5, 0.2
# Minimum seconds that a connection has for its request under any load.
MIN_HEADER_SECONDS = 0.1
# Seconds between two log lines about the same shortage.
TOLD = 60.0
PROBES = ("/healthz", "/readyz")
# Bytes of a request line and its headers.
LONGEST_HEADER = 16 * 1024
HEADER_TOO_LONG = f"the request's header has more than {LONGEST_HEADER} bytes; send a smaller one"
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the number of connections and of their times.

    Attributes:
        most: at a time; each may need a second descriptor, for a file that is sent.
        per_address: of one address (of IPv6 the first 64 bits): a proxy counts as one.
        header: seconds until a request's header is there: from the connection's begin or the answer before.
        body, body_rate: seconds of a body that are free, and bytes a second that it has to come at from then on.
        write, write_rate: seconds after which an answer has to be read at so many bytes a second.
    """

    most: int = 1024
    per_address: int = 768
    header: float = 10.0
    body: float = 20.0
    body_rate: float = 4096.0
    write: float = 30.0
    write_rate: float = 512.0

    @classmethod
    def of_process(cls, most: int) -> ConnectionLimits:
        """Limits that fit the process's descriptor limit; the soft limit is raised as far as needed."""
        fit = min(most, _descriptors(2 * most + RESERVED) // 2)
        if fit < most:
            logger.warning(
                "the limit of descriptors (ulimit -n) leaves room for %d connections at a time instead of %d", fit, most
            )
        return cls(most=fit, per_address=max(1, fit * 3 // 4))


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
    return max(8, soft - used - min(RESERVED, soft // 4))


def _party(address: str) -> str:
    """The key by which connections are counted: the address, or the network of an IPv6 address."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv6Address) and known.ipv4_mapped is None:
        return known.packed[:8].hex()
    return address


class ClientConnection(H11Protocol):
    """uvicorn's h11 protocol with time limits.

    Attributes:
        party: of the client.
        crowded: it came when there were too many already.
        since: when it was made, its request began, or that was answered, on the monotonic clock.
    """

    def __init__(self, *args: Any, registry: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.registry = registry
        self.party, self.crowded = "", False
        self._application, self.app = self.app, self._answered
        self._evicted = self._busy = False
        self.since = self._looked = time.monotonic()
        # Bytes received since then; the time of the last check of the output buffer, and its size.
        self._heard = 0
        self._backlog: tuple[float, int] | None = None

    # ---- uvicorn's hooks

    def connection_made(self, transport: Any) -> None:
        """As uvicorn's."""
        super().connection_made(transport)
        if self._evicted:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self.registry.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's."""
        self._heard += len(data)
        try:
            # The parser limits incomplete headers only: a complete one could have any size.
            for start in range(0, len(data), LONGEST_HEADER):
                if not self.transport.is_closing():
                    super().data_received(data[start : start + LONGEST_HEADER])
        except (h11.LocalProtocolError, UnicodeDecodeError):
            # Invalid bytes in a body after its answer has begun, or in a path.
            self.transport.abort()
        self._note()

    def on_response_complete(self) -> None:
        """As uvicorn's."""
        super().on_response_complete()
        self._note()

    def _should_upgrade(self) -> bool:
        # Web sockets are not supported; an upgrade request is answered like any other.
        return False

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error in the server's form."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if hint == 431:
            self._refuse(431, HEADER_TOO_LONG)
        else:
            self._refuse(400, "the request is not HTTP/1.1; send one that is")

    # ---- limits

    @property
    def busy(self) -> bool:
        """True if a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def _note(self) -> None:
        if self.busy == self._busy:
            return
        self._busy = self.busy
        self.since, self._heard = time.monotonic(), 0
        self.registry.changed(self, self._busy)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._check(scope)
        if refused is None:
            await self._application(scope, receive, send)
            return
        self.cycle.keep_alive = False
        await error_response(refused)(scope, receive, send)

    def _check(self, scope: Scope) -> Refused | None:
        """The reason why the application does not answer a request; None: it does."""
        if self.crowded:
            self.cycle.keep_alive = False
            if scope["path"] not in PROBES:
                message = "there are as many connections as this server can hold; ask again"
                return Refused(503, message, headers=wait_header(5))
        if scope["http_version"] not in ("1.0", "1.1"):
            return Refused(505, f"HTTP/{scope['http_version']} is not spoken here; use HTTP/1.1")
        if (
            len(scope["raw_path"]) + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            > LONGEST_HEADER
        ):
            return Refused(431, HEADER_TOO_LONG)
        return None

    def evict(self) -> None:
        """Close immediately, to make space for another connection."""
        self._evicted = True
        if self.transport is not None:
            self.transport.abort()

    def look(self, now: float, limits: ConnectionLimits) -> None:
        """Close the connection if it takes too long."""
        elapsed, self._looked = now - self._looked, now
        if self.transport is None or self._evicted:
            return
        if self._unread(now, limits):
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif not self._busy:
            if now - self.since > (limits.header / 4 if self.crowded else limits.header):
                self._too_slow("header", limits.header)
        elif self.cycle.more_body:
            if self.flow.read_paused:
                # The application does not read.
                self.since += elapsed
            elif self._heard < limits.body_rate * (now - self.since - limits.body):
                self._too_slow("body", limits.body)

    def _unread(self, now: float, limits: ConnectionLimits) -> bool:
        """True if the client does not read the response."""
        size = self.transport.get_write_buffer_size()
        if not size or not (self.flow.write_paused or self.transport.is_closing() or not self._busy):
            self._backlog = None
        elif self._backlog is None:
            self._backlog = now, size
        elif now - self._backlog[0] > limits.write:
            if self._backlog[1] - size < limits.write_rate * limits.write:
                return True
            self._backlog = now, size
        return False

    def _too_slow(self, what: str, seconds: float) -> None:
        began = self.busy or bool(self.conn.trailing_data[0])
        if began and not (self.busy and self.cycle.response_started):
            self._refuse(408, f"the request's {what} did not arrive within {seconds:g} seconds; send it at once")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        answer = error_response(Refused(status, message))
        headers = [*answer.raw_headers, (b"connection", b"close")]
        try:
            for event in (
                h11.Response(status_code=status, headers=headers, reason=b""),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                if (output := self.conn.send(event)) is not None:
                    self.transport.write(output)
        except h11.LocalProtocolError:
            # Part of the response has been sent.
            pass
        self.transport.close()


class Connections:
    """All connections of a server.

    Args:
        limits: of number and time.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all: dict[ClientConnection, None] = {}
        self._by_party: Counter[str] = Counter()
        # Idle connections by party, the oldest first.
        self._idle: dict[str, OrderedDict[ClientConnection, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: ClientConnection, address: str) -> bool:
        """Add a new connection; False: there is no space even for a probe."""
        party = _party(address)
        own = self._by_party[party] >= self.limits.per_address
        if own or len(self._all) >= self.limits.most:
            oldest = self._oldest(party if own else None)
            if oldest is not None:
                self.remove(oldest)
                oldest.evict()
            elif len(self._all) >= self.limits.most + SPARE:
                return False
            else:
                connection.crowded = True
        connection.party = party
        self._all[connection] = None
        self._by_party[party] += 1
        self._idle.setdefault(party, OrderedDict())[connection] = None
        return True

    def wait(self) -> float:
        """Seconds until a new connection may be accepted, because the one to be closed has not had its minimum time."""
        if len(self._all) < min(self.limits.most, self.limits.per_address):
            return 0.0
        oldest = self._oldest()
        return 0.0 if oldest is None else max(0.0, oldest.since + MIN_HEADER_SECONDS - time.monotonic())

    def _oldest(self, party: str | None = None) -> ClientConnection | None:
        """The oldest idle connection of a party, or of the party with the most."""
        if party is None:
            party = max(self._idle, key=lambda one: len(self._idle[one]), default="")
        return next(iter(self._idle.get(party, ())), None)

    def remove(self, connection: ClientConnection) -> None:
        """Remove a closed connection."""
        if connection not in self._all:
            return
        del self._all[connection]
        self._by_party[connection.party] -= 1
        if not self._by_party[connection.party]:
            del self._by_party[connection.party]
        self._leave(connection)

    def _leave(self, connection: ClientConnection) -> None:
        idle = self._idle.get(connection.party, OrderedDict())
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(connection.party, None)

    def changed(self, connection: ClientConnection, busy: bool) -> None:
        """Record that a connection's request has begun, or has been answered."""
        if busy:
            self._leave(connection)
        elif connection in self._all:
            self._idle.setdefault(connection.party, OrderedDict())[connection] = None

    async def watch(self) -> None:
        """Close connections that exceed their time, until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            for connection in list(self._all):
                try:
                    connection.look(now, self.limits)
                except Exception:
                    logger.exception("looking at a connection failed")
                    connection.evict()


class Acceptor:
    """Accepts the connections of a listening socket; closed as an `asyncio.Server` is.

    asyncio's own accepts up to its backlog before it looks at any of them, and logs a traceback for each attempt while
    there is no descriptor left.
    """

    def __init__(
        self, listening: socket.socket, connections: Connections, make: Callable[[], ClientConnection]
    ) -> None:
        self._listening, self._connections, self._make = listening, connections, make
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._told = -TOLD
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Stop accepting."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())

    async def wait_closed(self) -> None:
        """Return when the latest accepted connection is open."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._retry = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        # A request that came with its connection is read some turns later: until then no flood may close it.
        for _ in range(max(1, min(AT_ONCE, self._connections.limits.most // 8))):
            if wait := self._connections.wait():
                self._pause(wait)
                return
            try:
                connected, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # The socket stays readable, so trying again immediately would keep a core busy.
                self._pause(BACK_OFF)
                if error.errno not in SHORTAGES:
                    logger.error("connections cannot be accepted: %s", error)
                elif time.monotonic() > self._told + TOLD:
                    self._told = time.monotonic()
                    logger.error("no connection can be accepted for now: %s", error.strerror)
                return
            connection = self._make()
            if not self._connections.add(connection, str(address[0]) if address else ""):
                connected.close()
                continue
            connected.setblocking(False)
            task = self._loop.create_task(self._open(connected, connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connected: socket.socket, connection: ClientConnection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, connected)
        except OSError:
            # The connection was closed before it was handled.
            self._connections.remove(connection)
            connected.close()

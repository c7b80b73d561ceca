"""The process of the server: its socket, its signals, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ...errors import InputError, ServerError
from .connections import BACKLOG, LONGEST_HEADER, ConnectionLimits, LimitedConnection, LimitedRequests
from .intake import Server
from .streams import ended

# Seconds for sending the last responses.
SHUTDOWN_SECONDS = 5
# Seconds between looks at whether the backend takes jobs.
READY_POLL_SECONDS = 0.2

logger = logging.getLogger("ditmesh.serve")


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address and does not listen yet.

    Raises `InputError`: the port is taken, or the host is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise InputError(
            f"--host {host!r} is no address; use 127.0.0.1, or 0.0.0.0 for all of this machine's"
        ) from None
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise InputError(
            f"cannot listen at {host} on port {port} ({error.strerror or error}); use another with --port"
        ) from None
    return listening


def url_of(listening: socket.socket) -> str:
    """The URL for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    host = str({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves an application of `create_app` until a signal comes, or until the backend has given up.

    After the first SIGINT or SIGTERM running jobs finish and new ones are refused; the second one ends the server.

    Args:
        app: the application.
        grace: seconds that jobs under way have to end.
        log_config: as `logging.config.dictConfig` takes it; None: logging stays as it is.
        up: called when the server answers.
        leave: called by the second signal with its number; does not return.
        limits: of connections; default: those of the settings, as far as the process's descriptors go.
        ready: called once when the backend takes jobs, with the seconds since the start.
    """

    def __init__(
        self,
        app: FastAPI,
        grace: float,
        log_config: dict[str, Any] | None = None,
        up: Callable[[], None] = lambda: None,
        leave: Callable[[int], None] | None = None,
        limits: ConnectionLimits | None = None,
        ready: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._server: Server = app.state.server
        # Before the ranks start, because they inherit the process's descriptor limit.
        self._limits = limits or ConnectionLimits.of_process(self._server.settings.max_connections)
        protocol: Any = partial(LimitedConnection, self._limits)
        super().__init__(
            uvicorn.Config(
                LimitedRequests(app, self._limits),
                # Not here: a start error of the backend is raised as it is, and the backend stops first.
                lifespan="off",
                log_config=log_config,
                access_log=False,
                server_header=False,
                # Always h11, whichever parsers are installed: it limits headers and rejects ambiguous requests.
                http=protocol,
                h11_max_incomplete_event_size=LONGEST_HEADER,
                backlog=self._limits.at_once,
                ws="none",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._grace, self._up, self._leave, self._ready = grace, up, leave, ready

    async def run_on(self, listening: socket.socket) -> None:
        """Start the backend, serve on a bound socket, and stop.

        Raises `DitmeshError`: the backend cannot start, or (`ServerError`) has given up.
        """
        backend, failed = self._server.backend, ""

        async def watch() -> None:
            nonlocal failed
            failed = await backend.permanent_failure()
            self.should_exit = True

        async def tell_ready() -> None:
            began = time.monotonic()
            while not backend.state().ready:
                await asyncio.sleep(READY_POLL_SECONDS)
            self._ready(time.monotonic() - began)

        await backend.start()
        watching = [asyncio.ensure_future(each) for each in (watch(), self._limits.watch(), tell_ready())]
        try:
            await self.serve(sockets=[listening])
        finally:
            for task in watching:
                await ended(task)
            await self._server.stop(0.0)
        state = backend.state()
        logger.info("stopped; %d jobs wait for the next start", state.queued + state.running)
        if failed:
            raise ServerError(failed)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then the system may queue more connections than asyncio accepts at once."""
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)
        self._up()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, after the running jobs have ended; until then requests are answered."""
        await self._server.stop(self._grace)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. Unlike uvicorn, the server does not raise the signal again at the end."""
        if self.should_exit and self._leave is not None:
            self._leave(sig)
        self.should_exit = True

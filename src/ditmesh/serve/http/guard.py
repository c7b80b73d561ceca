"""Checks of every request (host, origin, key, size), and headers of every response."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..settings import ApiSettings
from .bodies import Bodies
from .errors import Refused, error_response
from .keys import Keys
from .metrics import Metrics

logger = logging.getLogger("ditmesh.serve.access")

# All resources come from this server, except images that scripts hold in memory.
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": POLICY,
}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Characters of a path in the log.
LONGEST_PATH = 200


@dataclass
class RequestGuard:
    """Middleware around the whole application.

    The owner that it finds out, the hash of the request's key, is ``request.state.owner``; empty without keys.
    """

    app: ASGIApp
    settings: ApiSettings
    keys: Keys | None
    metrics: Metrics
    bodies: Bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Web sockets are not supported: the application rejects them.
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            with self.metrics.under_way.track_inprogress():
                await self._answered(scope, receive, answer)
        except ClientDisconnect:
            # The client is still sending its body and reads no response.
            status = status or 400
        except Exception as error:
            logger.error("%s %s failed", scope["method"], _route(scope), exc_info=error)
            if status:
                # Part of the response has been sent: only closing the connection shows that the rest is missing.
                raise
            await error_response(Refused(500, "the server has failed; its log says more"))(scope, receive, answer)
        finally:
            seconds = time.perf_counter() - began
            route = _route(scope)
            self.metrics.requests.labels(scope["method"], route, str(status)).inc()
            self.metrics.request_seconds.labels(route).observe(seconds)
            facts = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 4)}
            facts["client"] = (scope.get("client") or ("",))[0]
            if status >= 400:
                # Where it was refused before there was a route, too.
                facts["path"] = scope["path"][:LONGEST_PATH]
            if job := scope.get("state", {}).get("job"):
                facts["job"] = job
            if owner := scope.get("state", {}).get("owner"):
                facts["owner"] = owner[:8]
            # Frequent successful requests: the page's files, states, polls.
            usual = scope["method"] in SAFE_METHODS and (status < 400 or (status, facts["route"]) == (503, "/readyz"))
            level = logging.DEBUG if usual else logging.INFO
            logger.log(level, "request", extra={"facts": facts})

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        try:
            state["owner"] = self._checked(scope, Headers(scope=scope))
        except Refused as refused:
            await error_response(refused)(scope, receive, send)
            return
        counted = self._counted(receive, state, state["owner"] or (scope.get("client") or ("",))[0])
        try:
            await self.app(scope, counted, send)
        finally:
            state["received"]()

    def _checked(self, scope: Scope, headers: Headers) -> str:
        """The owner of a request that may be read.

        Other host names are rejected, because a page can use them for DNS rebinding, and requests from pages of other
        sites, by the headers that browsers send.
        """
        header, method = headers.get("host", ""), scope["method"]
        name = header.rpartition(":")[0] if header.count(":") == 1 else header
        name = (header[1:].partition("]")[0] if header.startswith("[") else name).lower()
        if self.settings.hosts and name not in self.settings.hosts:
            message = f"this server does not answer as {name[:200]!r}; start it with --allow-host {name[:200]}"
            raise Refused(400, message, "wrong_host")
        origin = headers.get("origin")
        if method not in SAFE_METHODS and origin is None and headers.get("sec-fetch-site") == "cross-site":
            raise Refused(403, "pages of another site may not use this server; allow a site with --cors-origin")
        if method not in SAFE_METHODS and origin is not None and origin not in self.settings.cors:
            self._check_origin(origin, headers)
        owner, length = self._owner(scope, headers), headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal() or len(length) > 18 or int(length) > self.settings.max_body:
            raise self._too_large()
        return owner

    def _check_origin(self, origin: str, headers: Headers) -> None:
        if urlsplit(origin).netloc != headers.get("host"):
            raise Refused(403, f"pages of {origin[:200]!r} may not use this server; allow a site with --cors-origin")

    def _owner(self, scope: Scope, headers: Headers) -> str:
        path = scope["path"]
        # CORS preflight requests have no key.
        if self.keys is None or not path.startswith(("/v1/", "/metrics")) or scope["method"] == "OPTIONS":
            return ""
        kind, _, key = headers.get("authorization", "").partition(" ")
        owner = self.keys.owner(key.strip()) if kind.lower() == "bearer" and len(key) <= 1024 else None
        if owner is None:
            said = "the key is unknown" if key else "a key is needed"
            raise Refused(
                401, f"{said}; send the header Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
            )
        return owner

    def _too_large(self) -> Refused:
        return Refused(413, f"the request's body has more than {self.settings.max_body} bytes; send a smaller one")

    def _counted(self, receive: Receive, state: dict[str, Any], who: str) -> Receive:
        """Limit the body's size, also of chunked bodies without a length header.

        ``state["received"]`` is what tells that the body is needed no more.
        """
        so_far = held = 0

        def received() -> None:
            nonlocal held
            self.bodies.give_back(who, held)
            held = 0

        async def counted() -> Message:
            nonlocal so_far, held
            message = await receive()
            number = len(message.get("body", b""))
            so_far += number
            if so_far > self.settings.max_body:
                # The code that reads the body reports every other exception as "cannot be read".
                raise HTTPException(413, str(self._too_large()))
            if number:
                self.bodies.take(who, number)
                held += number
            return message

        state["received"] = received
        return counted


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "") or "other"

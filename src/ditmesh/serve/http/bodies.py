"""Bodies of requests, read under bounds: of all that are in memory, and of what JSON costs before it is parsed."""

from __future__ import annotations

import asyncio
import json
import typing
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from ...errors import did_you_mean
from ..settings import ApiSettings
from .errors import Refused, wait_header

# Bytes of JSON that holds no images.
MOST_OF_WORDS = 1024 * 1024
# Characters that make a parser allocate: 3 million small fields take gigabytes and a minute. Of a request's own fields
# there are hundreds; texts may have any number of them, quoted.
STRUCTURE, OWN = b'",[{\\', 4096
# Members of an object or a list: no field has as many.
MOST_MEMBERS = 64
# Unknown fields that are named.
NAMED = 3


# Fields that the operator bounds: the setting, and what is counted.
LIMITED = {
    "n": ("max_images", "results"),
    "steps": ("max_steps", "steps"),
    "frames": ("max_frames", "frames"),
    "prompt": ("max_prompt", "characters"),
    "negative_prompt": ("max_prompt", "characters"),
}


class Bodies:
    """Bytes of bodies that are in memory, of all requests and of each client.

    Args:
        most: of one body. All of them may have twice as many, and a client's as many as one.
    """

    def __init__(self, most: int) -> None:
        self.each = most
        self.most = 2 * most
        self.bytes = 0
        self._of: Counter[str] = Counter()

    def take(self, who: str, more: int) -> None:
        """Bytes of a client's body have come.

        Raises:
            HTTPException: there is no room for them now.
        """
        if self._of[who] + more > self.each or self.bytes + more > self.most:
            message = f"{self.bytes} bytes of requests are being read already; ask again"
            raise HTTPException(503, message, wait_header(2))
        self._of[who] += more
        self.bytes += more

    def give_back(self, who: str, number: int) -> None:
        """They are needed no more."""
        self.bytes -= number
        self._of[who] -= number
        if self._of[who] <= 0:
            del self._of[who]


def most_structure(settings: ApiSettings) -> int:
    """Characters of `STRUCTURE` that a request may have: its own, and those of two prompts, escaped in any way."""
    return OWN + 2 * 4 * settings.max_prompt


async def read_json(request: Request, known: Collection[str], most: int, settings: ApiSettings) -> dict[str, Any]:
    """The object in a request's body.

    Args:
        request: with a body that has not been read yet.
        known: names of its fields.
        most: bytes of it.
        settings: of the server.

    Raises:
        Refused: it is too large, no JSON object, or has fields that are not known.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"the body is {kind[:80]!r}; send one JSON object with Content-Type: application/json"
        raise Refused(400, message, "invalid_json")
    data, structure = bytearray(), 0
    try:
        async for piece in request.stream():
            data += piece
            structure += sum(piece.count(one) for one in STRUCTURE)
            if len(data) > most:
                raise Refused(413, f"the request's body has more than {most} bytes; send a smaller one")
            if structure > most_structure(settings):
                raise Refused(400, "the body has more fields and marks than any request; send fewer", "invalid_json")
    except ClientDisconnect:
        raise Refused(400, "the body did not come whole; send it again") from None
    # A thread: megabytes of pictures are not to stop the steps of others from being told of.
    fields = _parsed(data) if len(data) < MOST_OF_WORDS else await asyncio.to_thread(_parsed, data)
    if not isinstance(fields, dict):
        raise Refused(400, "the body is no JSON object; send one", "invalid_json")
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise unknown_fields(unknown, known)
    _check_members(fields)
    # Before the fields' own bounds, which are wider and say nothing of this server.
    check_limits(fields, settings)
    return fields


def check_limits(fields: Mapping[str, Any], settings: ApiSettings) -> None:
    """Refuse what the operator does not allow, in a request's fields or in those of its JSON.

    Raises:
        Refused: naming the field.
    """
    for name, (setting, what) in LIMITED.items():
        asked, most = fields.get(name), getattr(settings, setting)
        asked = len(asked) if isinstance(asked, str) else asked
        if isinstance(asked, int) and asked > most:
            raise Refused(400, f"{name}: {asked} {what} are more than this server's {most}; use fewer", param=name)


def unknown_fields(unknown: Collection[str], known: Collection[str]) -> Refused:
    """What is said of fields that do not exist."""
    names = [repr(name[:80]) for name in list(unknown)[:NAMED]]
    more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
    first = next(iter(unknown))[:80]
    means = did_you_mean(first, known) if len(unknown) == 1 else ""
    words = f"there is no field {', '.join(names)}{more}; leave {'it' if len(unknown) == 1 else 'them'} out{means}"
    return Refused(400, f"{first}: {words}", param=first)


def _parsed(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON; send one JSON object", "invalid_json") from None


def _check_members(fields: Mapping[str, Any]) -> None:
    """Refuse what would make an error for each of its members."""
    left: list[tuple[str, Any]] = [*fields.items()]
    while left:
        name, value = left.pop()
        if isinstance(value, (dict, list)):
            if len(value) > MOST_MEMBERS:
                raise Refused(400, f"{name}: it has {len(value)} members; use {MOST_MEMBERS} at most", param=name)
            left += [(name, one) for one in (value.values() if isinstance(value, dict) else value)]


class JsonRoute(APIRoute):
    """A route with a body, if any, that is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's."""
        handler, body = super().get_route_handler(), _body_of(self.endpoint)
        if body is None:
            return handler
        known = body.model_fields

        async def read(request: Request) -> Response:
            settings: ApiSettings = request.app.state.server.settings
            most = settings.max_body if "inputs" in known else min(MOST_OF_WORDS, settings.max_body)
            fields = await read_json(request, known, most, settings)
            return await handler(ReadRequest(request.scope, request.receive, fields))

        return read


def _body_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """The model of an endpoint's body."""
    hints = typing.get_type_hints(endpoint)
    found = (hint for name, hint in hints.items() if name != "return" and isinstance(hint, type))
    return next((hint for hint in found if issubclass(hint, BaseModel)), None)


class ReadRequest(Request):
    """A request with its JSON read."""

    def __init__(self, scope: Scope, receive: Receive, fields: dict[str, Any]) -> None:
        headers = [one for one in scope["headers"] if one[0] != b"content-type"]
        super().__init__({**scope, "headers": [*headers, (b"content-type", b"application/json")]}, receive)
        self._fields = fields

    async def body(self) -> bytes:
        """Something: `json` has what it is."""
        return b"{}"

    async def json(self) -> Any:
        """The object."""
        return self._fields

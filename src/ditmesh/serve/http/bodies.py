"""Request bodies, read within limits on the memory of all bodies and on the cost of parsing JSON."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from ...errors import did_you_mean
from ...report.formatting import enumerated
from ..settings import ApiSettings
from .errors import Refused, refusal_response, wait_header

Model = TypeVar("Model", bound=BaseModel)

# Maximum bytes of JSON without images.
MOST_OF_WORDS = 1024 * 1024
# Characters that make a parser allocate: 3 million small fields take gigabytes and a minute. Of a request's own fields
# there are hundreds; texts may have any number of them, quoted.
STRUCTURE, OWN = b'",[{\\', 4096
# Maximum number of unknown fields that an error names.
MAX_NAMED_FIELDS = 3


class Bodies:
    """Bytes of request bodies in memory, in total and for each client.

    Args:
        most: of one body. All of them may have twice as many, and a client's as many as one.
    """

    def __init__(self, most: int) -> None:
        self.each = most
        self.most = 2 * most
        self.bytes = 0
        self._of: Counter[str] = Counter()

    def take(self, who: str, more: int) -> None:
        """Count received bytes of a client's body.

        Raises:
            HTTPException: there is no room for them now.
        """
        if self._of[who] + more > self.each or self.bytes + more > self.most:
            message = f"{self.bytes} bytes of requests are being read already; ask again"
            raise HTTPException(503, message, wait_header(2))
        self._of[who] += more
        self.bytes += more

    def give_back(self, who: str, number: int) -> None:
        """Count the bytes as freed."""
        self.bytes -= number
        self._of[who] -= number
        if self._of[who] <= 0:
            del self._of[who]


async def read_body(request: Request, kind: type[Model]) -> Model:
    """The object in a request's body.

    Raises:
        Refused: it is too large, no JSON object, or a field is wrong.
    """
    settings: ApiSettings = request.app.state.server.settings
    schema = kind.model_fields
    most = settings.max_body if "inputs" in schema else min(MOST_OF_WORDS, settings.max_body)
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        message = f"the body is {media[:80]!r}; send one JSON object with Content-Type: application/json"
        raise Refused(400, message, "invalid_json")
    data, structure = bytearray(), 0
    # A request's own marks, and those of two prompts with any escapes.
    most_structure = OWN + 2 * 4 * settings.max_prompt
    try:
        async for piece in request.stream():
            data += piece
            structure += sum(piece.count(one) for one in STRUCTURE)
            if len(data) > most:
                raise Refused(413, f"the request's body has more than {most} bytes; send a smaller one")
            if structure > most_structure:
                raise Refused(400, "the body has more fields and marks than any request; send fewer", "invalid_json")
    except ClientDisconnect:
        raise Refused(400, "the body did not come whole; send it again") from None
    # In a thread, so that parsing megabytes of images does not delay other clients' events.
    fields = _parsed(data) if len(data) < MOST_OF_WORDS else await asyncio.to_thread(_parsed, data)
    if not isinstance(fields, dict):
        raise Refused(400, "the body is no JSON object; send one", "invalid_json")
    # Before pydantic, which makes an error of each.
    if unknown := [name for name in fields if name not in schema]:
        raise _unknown_fields(unknown, schema)
    return validated(kind, fields)


def validated(kind: type[Model], fields: Mapping[str, Any]) -> Model:
    """A model from those fields that are not None.

    Raises:
        Refused: a field is wrong.
    """
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise refusal_response(error) from None


def body_schema(kind: type[BaseModel], form: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The OpenAPI description of a request body in JSON, or as a form; `add_schemas` describes the fields."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}Body"}}}
    forms = {} if form is None else {"multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content | forms}}


def add_schemas(components: dict[str, Any], *kinds: type[BaseModel]) -> None:
    """Add the fields of request bodies to an OpenAPI description: answers may have models of the same names."""
    for kind in kinds:
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}Body")
        models = schema.pop("$defs", {}) | {kind.__name__: schema}
        components.update({f"{name}Body": model for name, model in models.items()})


def _unknown_fields(unknown: Collection[str], known: Collection[str]) -> Refused:
    names = enumerated((repr(name[:80]) for name in unknown), MAX_NAMED_FIELDS, "more")
    first = next(iter(unknown))[:80]
    means = did_you_mean(first, known) if len(unknown) == 1 else ""
    words = f"there is no field {names}; leave {'it' if len(unknown) == 1 else 'them'} out{means}"
    return Refused(400, f"{first}: {words}", param=first)


def _parsed(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON; send one JSON object", "invalid_json") from None

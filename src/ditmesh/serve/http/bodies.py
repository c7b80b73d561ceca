"""Request bodies, read within limits on the memory of all bodies and on the cost of parsing JSON."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
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
        """Count received bytes of a client's body. Raises `HTTPException`: there is no room for them now."""
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
    """The object in a request's body. Raises `Refused`: it is too large, no JSON object, or a field is wrong."""
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
    if unknown := [name[:80] for name in fields if name not in schema]:
        names = enumerated(map(repr, unknown), MAX_NAMED_FIELDS, "more")
        out = f"it out{did_you_mean(unknown[0], schema)}" if len(unknown) == 1 else "them out"
        raise Refused(400, f"{unknown[0]}: there is no field {names}; leave {out}", param=unknown[0])
    return validated(kind, fields)


def validated(kind: type[Model], fields: Mapping[str, Any]) -> Model:
    """A model from those fields that are not None. Raises `Refused`: a field is wrong."""
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise refusal_response(error) from None


async def read_form(request: Request, kind: type[Model], *names: str) -> tuple[Model, dict[str, bytes]]:
    """The fields of a form, and its files of these names.

    Raises `Refused`: a field is wrong or there twice, or a file has another name.
    """
    fields: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    most = request.app.state.server.settings.max_body
    async with request.form(max_files=4, max_fields=64, max_part_size=most) as form:
        for name, value in form.multi_items():
            name = name.removesuffix("[]")
            if name in files or name in fields:
                raise Refused(400, f"{name}: it is given twice; send one", param=name)
            if not isinstance(value, UploadFile):
                fields[name] = value
            elif name in names:
                files[name] = await value.read()
            else:
                raise Refused(400, f"{name}: the files here are {' and '.join(names)}; leave it out", param=name)
    return validated(kind, fields), files


def body_schema(kind: type[BaseModel], as_json: bool = True, **files: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a request body, in JSON (`add_schemas` has the fields) or as a form with files."""
    reference = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}Body"}}
    content: dict[str, Any] = {"application/json": reference} if as_json else {}
    if files:
        schema = kind.model_json_schema()
        schema.pop("$defs", None)
        # Lists of objects are no fields of a form.
        fields = {name: field for name, field in schema["properties"].items() if name not in ("inputs", "loras")}
        content["multipart/form-data"] = {"schema": {**schema, "properties": fields | files}}
    return {"requestBody": {"required": True, "content": content}}


def add_schemas(components: dict[str, Any], *kinds: type[BaseModel]) -> None:
    """Add the fields of request bodies to an OpenAPI description: answers may have models of the same names."""
    for kind in kinds:
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}Body")
        models = schema.pop("$defs", {}) | {kind.__name__: schema}
        components.update({f"{name}Body": model for name, model in models.items()})


def _parsed(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON; send one JSON object", "invalid_json") from None

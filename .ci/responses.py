"""The HTTP responses that tests of two versions see, compared: recorded by a plugin of pytest, read by this script.

    RESPONSES=new.jsonl PYTHONPATH=src:.:.ci pytest -p responses tests/serve/test_serve_http.py
    python .ci/responses.py old.jsonl new.jsonl     # the other one was recorded in a worktree of that version

Every request that goes through httpx (the official openai client too) is written with the test that sent it: method,
path, status, names of the headers, JSON or events of the body. Ids, times, ports and files are left out. Requests of
both recordings are paired by the test, the method, the path and the body that was sent.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import outputs

# Headers whose presence depends on the connection, not on the server's version.
CONNECTION = {"date", "connection", "content-length", "transfer-encoding", "content-encoding", "vary"}
IDS = re.compile(r"(job|video)_[0-9a-f]{8,}|chatcmpl-\w+")
PORTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]|\.example):\d+")
LONG = re.compile(r"[A-Za-z0-9+/=_-]{120,}")
# Seeds that the server has drawn; counts and places that depend on when a request is answered.
DRAWN = re.compile(r'("seed": ?)\d{5,}')
COUNTS = re.compile(
    r'("(?:calls|rows|ulysses|position|running|queued|batch|step|eta|retry-after)": ?)(?:\d[\d.]*|null)'
)


class _Heard:
    """A body that is written down when it has been read, or left."""

    def __init__(self, stream: Any, done: Callable[[bytes], None]) -> None:
        self.stream, self.done, self.data = stream, done, bytearray()

    def __iter__(self) -> Iterator[bytes]:
        for part in self.stream:
            self.data += part
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self.stream:
            self.data += part
            yield part

    def close(self) -> None:
        self.stream.close()
        self.done(bytes(self.data))

    async def aclose(self) -> None:
        await self.stream.aclose()
        self.done(bytes(self.data))


class _SyncHeard(_Heard, httpx.SyncByteStream): ...


class _AsyncHeard(_Heard, httpx.AsyncByteStream): ...


def neutral(text: str) -> str:
    """A text without what differs from run to run."""
    text = PORTS.sub(r"\1:PORT", IDS.sub(r"\1_ID", text))
    text = COUNTS.sub(r"\g<1>0", DRAWN.sub(r"\g<1>0", text))
    return LONG.sub("LONG", re.sub(r"/tmp/[\w./-]+", "FILE", text))


def body_of(kind: str, data: bytes) -> Any:
    """JSON of a body, events of a stream, names of metrics; None of files and pages."""
    text = neutral(data.decode("utf-8", "replace")) if "image/" not in kind and "video/" not in kind else ""
    return outputs.parsed(text) if any(one in kind for one in ("json", "event-stream", "version=")) else None


def _install() -> None:
    file = open(os.environ["RESPONSES"], "a", encoding="utf-8")  # noqa: SIM115

    def noted(request: httpx.Request, response: httpx.Response) -> Callable[[bytes], None]:
        def write(data: bytes) -> None:
            kind = response.headers.get("content-type", "")
            if "gzip" in response.headers.get("content-encoding", "") and data:
                data = gzip.decompress(data)
            try:
                sent = request.content
            except httpx.RequestNotRead:
                sent = b"(a stream)"
            boundary = re.search(r"boundary=(\S+)", request.headers.get("content-type", ""))
            if boundary:
                sent = sent.replace(boundary.group(1).strip('"').encode(), b"BOUNDARY")
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0].partition(" ")[0].rpartition("/")[2]
            line = {
                "test": test,
                "method": request.method,
                "path": neutral(str(request.url.raw_path, "ascii")),
                "sent": hashlib.sha256(neutral(sent.decode("latin1")).encode()).hexdigest()[:16],
                "said": neutral(sent.decode("latin1"))[:200],
                "status": response.status_code,
                "type": kind,
                "headers": sorted(set(response.headers) - CONNECTION),
                "body": body_of(kind, data) if request.url.path != "/openapi.json" else None,
            }
            file.write(json.dumps(line) + "\n")
            file.flush()

        return write

    plain, asynchronous = httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request

    def handle(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        response = plain(transport, request)
        response.stream = _SyncHeard(response.stream, noted(request, response))
        return response

    async def handle_later(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        response = await asynchronous(transport, request)
        response.stream = _AsyncHeard(response.stream, noted(request, response))
        return response

    httpx.HTTPTransport.handle_request = handle  # type: ignore[method-assign]
    httpx.AsyncHTTPTransport.handle_async_request = handle_later  # type: ignore[method-assign]


def read(path: str) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    found: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    with open(path, encoding="utf-8") as file:
        for line in file:
            one = json.loads(line)
            found[one["test"], one["method"], one["path"], one["sent"]].append(one)
    return found


def main() -> int:
    old, new = read(sys.argv[1]), read(sys.argv[2])
    compared, kinds = 0, Counter[str]()
    for key in old.keys() & new.keys():
        # A client that polls does so more or less often: the last of its answers is compared.
        one, other = old[key][-1], new[key][-1]
        compared += 1
        shown = ({name: run[name] for name in ("status", "type", "headers", "body")} for run in (one, other))
        for line in outputs.differences(*shown):
            kinds[f"{key[1]} {key[2].partition('?')[0]} {one['status']}: {line}"] += 1
    for name, recording, other in (("gone", old, new), ("new", new, old)):
        for key in sorted(recording.keys() - other.keys()):
            print(f"{name}: {key[0]} {key[1]} {key[2]} {recording[key][0]['said'][:80]!r}")
    for line, times in sorted(kinds.items()):
        print(f"{times} x {line}")
    print(f"{compared} responses compared, {len(kinds)} differences")
    return bool(kinds)


if "RESPONSES" in os.environ:
    _install()
if __name__ == "__main__":
    raise SystemExit(main())

"""Clients that are no clients: bytes that are not HTTP, connections that say nothing, readers that do not read."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from starlette.exceptions import HTTPException

from ditmesh.serve.http.bodies import Bodies
from ditmesh.serve.http.connections import ConnectionLimits
from ditmesh.serve.settings import ApiSettings
from support.serving import FakeBackend, serving

pytestmark = pytest.mark.timeout(60)

HOST = b"Host: 127.0.0.1\r\n"
JOB = b'{"prompt": "x", "steps": 1}'
TYPE, JSON = b"Content-Type: application/json\r\n", {"Content-Type": "application/json"}
LIMITS = ConnectionLimits(most=24, header=1.5, body=1.0, body_rate=1000.0, write=1.0, write_rate=1000.0)


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def port(backend: FakeBackend) -> Iterator[int]:
    with serving(backend, ApiSettings(keep_alive=0.2, state_interval=0.02), limits=LIMITS) as url:
        yield int(url.rpartition(":")[2])


@dataclass
class Answer:
    """What came back: statuses of all answers, the first one's body, and whether the connection was closed."""

    statuses: list[int]
    body: bytes
    closed: bool


def said(
    port: int, *parts: bytes, pause: float = 0.05, wait: float = 5.0, end: bool = False, enough: int = 0
) -> Answer:
    """Send the parts with a pause between them; read until the connection is closed, or so many answers are there."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connected:
        data, closed = b"", False
        try:
            for number, part in enumerate(parts):
                if number:
                    time.sleep(pause)
                connected.sendall(part)
            if end:
                connected.shutdown(socket.SHUT_WR)
            while True:
                if not (more := connected.recv(65536)):
                    closed = True
                    break
                data += more
                if 0 < enough <= data.count(b"HTTP/1.1 ") and data.endswith(b"}"):
                    break
        except TimeoutError:
            pass
        except ConnectionError:
            closed = True
    statuses = [int(piece[:3]) for piece in data.split(b"HTTP/1.1 ")[1:]]
    return Answer(statuses, data.partition(b"\r\n\r\n")[2], closed)


def get(path: bytes = b"/healthz", *headers: bytes, host: bytes = HOST) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + host + b"".join(one + b"\r\n" for one in headers) + b"\r\n"


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/jobs", kind: bytes = TYPE) -> bytes:
    return (
        b"POST " + path + b" HTTP/1.1\r\n" + HOST + kind + b"".join(one + b"\r\n" for one in headers) + b"\r\n" + body
    )


LENGTH = b"Content-Length: %d" % len(JOB)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (len(JOB), JOB)

# What is sent, the statuses that may come, and whether the connection has to be closed after it.
CASES: dict[str, tuple[tuple[bytes, ...], list[list[int]], bool]] = {
    "right": ((get(),), [[200]], False),
    "an unknown method": ((b"BREW /healthz HTTP/1.1\r\n" + HOST + b"\r\n",), [[405]], False),
    "TLS": ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",), [[400]], True),
    "a web socket": (
        (get(b"/healthz", b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x"),),
        [[200]],
        False,
    ),
    "a path of half characters": ((get(b"/%ff%fe"),), [[404]], False),
    "no host": ((get(host=b""),), [[400]], True),
    "two hosts": ((get(b"/healthz", b"Host: evil.test"),), [[400]], True),
    "a long header": ((get(b"/healthz", b"X: " + b"y" * 100_000),), [[400]], True),
    "many headers": ((get(b"/healthz", *[b"X%d: y" % number for number in range(6_000)]),), [[400]], True),
    "a job": ((post(JOB, LENGTH),), [[202]], False),
    "a negative length": ((post(JOB, b"Content-Length: -1"),), [[400]], True),
    "a huge length": ((post(JOB, b"Content-Length: 99999999999999999999999"),), [[400], [413]], True),
    "length and chunks": (
        (post(CHUNK + get(b"/smuggled"), LENGTH, CHUNKED),),
        # Chunks count, and what is behind them is a request of its own.
        [[202, 404], [400]],
        False,
    ),
    "chunk extensions without end": ((post(b"1;" + b"x" * 100_000, CHUNKED),), [[400]], True),
    "expect": ((post(b"", LENGTH, b"Expect: 100-continue"), JOB), [[100, 202]], False),
    "pipelined": ((get() + get(b"/readyz") + get(b"/nothing"),), [[200, 200, 404]], False),
    "pipelined, the second wrong": ((get() + b"nonsense\r\n\r\n",), [[200, 400]], True),
    "half a header, then closed": ((b"GET /healthz HTTP/1.1\r\nHo",), [[], [400]], True),
    "HEAD": ((b"HEAD /healthz HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",), [[405]], True),
    "CONNECT": ((b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n" + HOST + b"\r\n",), [[404], [405], [400]], False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_http_is_refused_and_costs_the_others_nothing(port: int, name: str):
    parts, allowed, closed = CASES[name]
    enough = 0 if closed else max(map(len, allowed))
    answer = said(port, *parts, pause=0.005, end="closed" in name, enough=enough, wait=10.0)
    assert answer.statuses in allowed
    assert answer.closed or not closed
    refused = len(answer.statuses) == 1 and answer.statuses[0] >= 400 and name != "HEAD"
    # What the parser says is no JSON.
    if refused and b"Invalid HTTP request received." not in answer.body:
        error = json.loads(answer.body[answer.body.index(b"{") : answer.body.rindex(b"}") + 1])["error"]
        assert error["message"][0].islower()
    assert said(port, get(b"/healthz", b"Connection: close")).statuses == [200]


# --- connections that take their time


def silent(port: int, number: int, first: bytes = b"") -> Iterator[socket.socket]:
    for _ in range(number):
        connected = socket.create_connection(("127.0.0.1", port), timeout=5)
        if first:
            connected.sendall(first)
        yield connected


def closed(connected: socket.socket, within: float) -> bool:
    """Whether the other side closes a connection in time."""
    connected.settimeout(within)
    try:
        while connected.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def probe(port: int, number: int) -> None:
    for _ in range(number):
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=20).status_code == 200


@pytest.mark.parametrize("first", [b"", b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_connections_that_say_nothing_make_room_and_are_closed(port: int, first: bytes):
    with contextlib.ExitStack() as stack, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
        job = http.post("/v1/jobs", json={"prompt": "x", "steps": 40}).json()["id"]
        opened = [stack.enter_context(one) for one in silent(port, 3 * LIMITS.most, first)]
        probe(port, 5)
        assert sum(closed(one, 0.0001) for one in opened) >= len(opened) - LIMITS.most
        # Whoever is left has had time enough.
        assert all(closed(one, 10.0) for one in opened)
        assert httpx.get(f"http://127.0.0.1:{port}/v1/jobs/{job}").status_code == 200


def test_half_a_header_is_closed_in_time(port: int):
    answer = said(port, b"GET /healthz HTTP/1.1\r\nHo", wait=10.0)
    assert answer.statuses == []
    assert answer.closed
    # After an answer as well: a connection that is kept is no excuse.
    answer = said(port, get() + b"GET /healthz HTTP/1.1\r\nHo", wait=10.0)
    assert answer.statuses == [200]
    assert answer.closed


@pytest.mark.matrix
def test_a_body_that_trickles_is_given_up(port: int):
    began = time.monotonic()
    answer = said(port, post(b"{", b"Content-Length: 1000"), *[b" "] * 8, pause=0.1, wait=60.0)
    assert answer.statuses == [408]
    # Long before this client gives up.
    assert time.monotonic() - began < 40
    # One that is slow and comes is taken.
    parts = [JOB[at : at + 4] for at in range(0, len(JOB), 4)]
    assert said(port, post(b"", LENGTH), *parts, pause=0.05, enough=1).statuses == [202]


@pytest.mark.matrix
def test_streams_that_nobody_reads_are_closed_and_the_server_stays_reachable(backend: FakeBackend, port: int):
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            for one in silent(port, LIMITS.most, get(b"/v1/server/events")):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stack.enter_context(one)
            # All of them have a request under way: none can be closed for others.
            probe(port, 3)
            refused = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=10)
        if refused.status_code == 503:
            break
        # On a busy machine the first streams are closed before the last ones are open.
    else:
        pytest.fail("no request was refused")
    assert refused.headers["retry-after"]
    assert "as many connections as this server can hold" in refused.json()["error"]["message"]


@pytest.mark.matrix
def test_a_client_that_does_not_read_its_answer_is_left(backend: FakeBackend, port: int):
    many = b"".join([get(b"/openapi.json")] * 400)
    connected = socket.socket()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connected.settimeout(1.0)
    connected.connect(("127.0.0.1", port))
    with connected:
        with contextlib.suppress(OSError):
            connected.sendall(many)
        # Nothing is read: the server's buffer stays full until it gives up.
        time.sleep(4.0)
        data = b""
        connected.settimeout(5.0)
        with contextlib.suppress(OSError):
            while more := connected.recv(65536):
                data += more
        assert data.count(b"HTTP/1.1 200") < 400


# --- bodies that cost more than they say


def nonsense(fields: int) -> bytes:
    return b'{"prompt":"x",' + b",".join(b'"%x":1' % number for number in range(fields)) + b"}"


BODIES = {
    "unknown fields": (nonsense(1_000_000), "more fields and marks"),
    "nested": (b'{"prompt":"x","loras":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}", "more fields and marks"),
    "nested a little": (b'{"prompt":"x","loras":' + b"[" * 3_000 + b"]" * 3_000 + b"}", "not JSON"),
    "fields of a field": (b'{"prompt":"x","loras":[{"name":"oil",' + nonsense(1_000)[14:] + b"]}", "loras.0"),
    "a large integer": (b'{"prompt":"x","seed":' + b"9" * 8_000_000 + b"}", "not JSON"),
    "a long prompt": (
        b'{"prompt":"' + b"x" * 8_000_000 + b'"}',
        "prompt: string should have at most 100000 characters, not 'xxx",
    ),
    "UTF-16": ('{"prompt":"x", "step":3}'.encode("utf-16"), "there is no field 'step'"),
    "a list": (b"[]", "no JSON object"),
    "nothing": (b"", "not JSON"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_nonsense_cost_little(backend: FakeBackend, port: int, name: str):
    data, words = BODIES[name]
    began = time.process_time()
    with contextlib.suppress(httpx.TransportError):
        # Some are refused in the middle, and the rest is not read.
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/jobs", content=data, headers=JSON, timeout=60)
        assert answer.status_code in (400, 413)
        assert answer.status_code == 413 or words in answer.json()["error"]["message"]
        assert len(answer.content) < 2_000
    # Of this process, in which the server is a thread: for a million errors it would be many.
    assert time.process_time() - began < 2


def test_a_body_is_json_whether_it_says_so_or_not(port: int):
    assert said(port, post(JOB, LENGTH, kind=b""), enough=1).statuses == [202]
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/jobs", content=b"{bad", headers=headers)
    assert answer.status_code == 400
    assert "send one JSON object with Content-Type: application/json" in answer.json()["error"]["message"]


def test_bodies_in_memory_are_bounded():
    bodies = Bodies(100)
    bodies.take("a", 60)
    with pytest.raises(HTTPException, match="60 bytes of requests are being read already"):
        bodies.take("a", 60)
    bodies.take("b", 100)
    with pytest.raises(HTTPException):
        bodies.take("c", 60)
    bodies.give_back("b", 100)
    bodies.take("c", 60)
    bodies.give_back("a", 60)
    bodies.give_back("c", 60)
    assert bodies.bytes == 0

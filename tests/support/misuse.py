"""Requests to a server that come to nothing: cancelled ones, clients that go away, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any

import httpx
from PIL import Image

JOBS, GENERATIONS, EDITS = "/v1/jobs", "/v1/images/generations", "/v1/images/edits"
# More than any of them comes to.
STEPS = 200


def _png() -> bytes:
    out = BytesIO()
    Image.effect_noise((64, 64), random.random() * 90).convert("RGB").save(out, format="PNG")
    return out.getvalue()


def _data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


# --- cancelled


def _cancelled_at_once(http: httpx.Client) -> None:
    for _ in range(2):
        job = http.post(JOBS, json={"prompt": "a fox", "steps": STEPS, "n": 2}).raise_for_status().json()
        assert http.delete(f"{JOBS}/{job['id']}").json()["status"] == "cancelled"


def _cancelled_while_running(http: httpx.Client) -> None:
    sent = {"prompt": "a fox", "steps": STEPS, "previews": 1}
    job = http.post(JOBS, json=sent).raise_for_status().json()
    seen: list[str] = []
    with http.stream("GET", f"{JOBS}/{job['id']}/events") as stream:
        for line in stream.iter_lines():
            name = line.removeprefix("event: ")
            if name == "step" and "step" not in seen:
                http.delete(f"{JOBS}/{job['id']}").raise_for_status()
            seen.append(name)
    assert "cancelled" in seen


def _cancelled_with_a_picture(http: httpx.Client) -> None:
    inputs = [{"role": "image", "data": _data_url(_png())}]
    sent = {"prompt": "a fox", "steps": STEPS, "strength": 0.9, "inputs": inputs}
    job = http.post(JOBS, json=sent).raise_for_status().json()
    http.delete(f"{JOBS}/{job['id']}").raise_for_status()


# --- clients that go away


def _gone_while_waiting(http: httpx.Client, **more: Any) -> None:
    with contextlib.suppress(httpx.ReadTimeout):
        http.post(GENERATIONS, json={"prompt": "a fox", "steps": STEPS}, timeout=0.2, **more)
        raise AssertionError("it was done in no time")


def _gone_in_a_stream(http: httpx.Client) -> None:
    sent = {"prompt": "a fox", "steps": STEPS, "stream": True, "partial_images": 3}
    with contextlib.suppress(httpx.ReadTimeout), http.stream("POST", GENERATIONS, json=sent, timeout=0.3) as stream:
        next(stream.iter_lines())


def _gone_while_following(http: httpx.Client) -> None:
    job = http.post(JOBS, json={"prompt": "a fox", "steps": STEPS}).raise_for_status().json()
    for _ in range(2):
        with http.stream("GET", f"{JOBS}/{job['id']}/events") as stream:
            next(stream.iter_lines())
    http.delete(f"{JOBS}/{job['id']}").raise_for_status()


# --- refused


def _refused(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in statuses, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}


def _no_json(http: httpx.Client) -> None:
    for content in (b"{", b"\xff\x00", b"", b"[" * 5000):
        _refused(http.post(JOBS, content=content, headers={"Content-Type": "application/json"}), 400)


def _wrong_types(http: httpx.Client) -> None:
    sent: list[Any] = [[], 3, {"prompt": 5}, {"prompt": "a", "n": -1}, {"prompt": "a", "steps": "many"}, {"hat": 1}]
    sent += [{"prompt": "a", "size": "63x64"}, {"prompt": "a" * 20_000}, {"prompt": "a", "seed": 1e300}]
    for one in sent:
        _refused(http.post(random.choice([JOBS, GENERATIONS]), json=one), 400)


def _huge(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(34):
            yield b" " * 2**20

    # It may be told while it sends, and not listen.
    with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        _refused(http.post(JOBS, content=pieces(), headers={"Content-Type": "application/json"}), 413)
    inputs = [{"role": "image", "data": _data_url(b"x" * 2**20)}]
    _refused(http.post(JOBS, content=json.dumps({"prompt": "a", "inputs": inputs})), 400)


def _bad_pictures(http: httpx.Client) -> None:
    good, half = _png(), _png()[:200]
    for data in ("no url", "data:image/png;base64,@", _data_url(b"no picture"), _data_url(half)):
        inputs = [{"role": "image", "data": _data_url(good)}, {"role": "mask", "data": data}]
        _refused(http.post(JOBS, json={"prompt": "a", "strength": 0.5, "inputs": inputs}), 400)
    _refused(http.post(EDITS, data={"prompt": "a"}, files={"image": half}), 400)
    _refused(http.post(EDITS, data={"prompt": "a"}, files={"image": good, "mask": b"no picture"}), 400)


def _unknown_names(http: httpx.Client) -> None:
    inputs = [{"role": "image", "data": _data_url(_png())}]
    sent = {"prompt": "a", "strength": 0.5, "inputs": inputs}
    _refused(http.post(JOBS, json={**sent, "model": "none"}), 404)
    # The picture was good.
    _refused(http.post(JOBS, json={**sent, "loras": [{"name": "none"}]}), 400)
    _refused(http.post(JOBS, json={"prompt": "a", "inputs": [{"role": "image", "digest": "0" * 64}]}), 400)
    _refused(http.get(f"{JOBS}/job_{'0' * 32}"), 404)
    _refused(http.delete(f"{JOBS}/none"), 404)
    _refused(http.get("/v1/nothing"), 404)


KINDS: tuple[Callable[[httpx.Client], None], ...] = (
    _cancelled_at_once,
    _wrong_types,
    _gone_while_waiting,
    _no_json,
    _cancelled_while_running,
    _bad_pictures,
    _gone_in_a_stream,
    _unknown_names,
    _cancelled_with_a_picture,
    _huge,
    _gone_while_following,
)


def misuse(url: str, requests: int, kinds: Sequence[Callable[[httpx.Client], None]] = KINDS) -> Counter[str]:
    """At least so many of them, of all kinds in turn; how many of each."""
    done: Counter[str] = Counter()

    def count(request: httpx.Request) -> None:
        done["requests"] += request.method in ("POST", "DELETE")

    with httpx.Client(base_url=url, timeout=60, event_hooks={"request": [count]}) as http:
        for kind in itertools.cycle(kinds):
            if done["requests"] >= requests:
                return done
            kind(http)
            done[kind.__name__.strip("_")] += 1
    raise AssertionError

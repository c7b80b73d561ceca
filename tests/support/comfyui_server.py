"""A real ComfyUI, without a page: started, told what to do through its API, and listened to."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.comfyui import NODES

SRC = NODES.parents[1] / "src"
# Seconds.
START_LIMIT, PROMPT_LIMIT = 180.0, 300.0
# First numbers of a binary message: a preview, as a JPEG.
PREVIEW, JPEG = 1, 1


class Listener:
    """The end of a WebSocket (RFC 6455) at which a page listens."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PROMPT_LIMIT)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        ]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self._file = self._socket.makefile("rb")
        assert b"101" in self._file.readline()
        while self._file.readline().strip():
            pass

    def message(self) -> tuple[str, Any]:
        """The next message's type and content; ``"preview"`` and a JPEG."""
        content, kind = b"", 0
        while True:
            first, second = self._file.read(2)
            size = second & 127
            if size >= 126:
                size = struct.unpack("!H" if size == 126 else "!Q", self._file.read(2 if size == 126 else 8))[0]
            part, opcode = self._file.read(size), first & 15
            if opcode >= 8:
                # A ping, or the end.
                assert opcode != 8, "the connection was closed"
                continue
            content, kind = content + part, opcode or kind
            if first & 128:
                break
        if kind == 1:
            message = json.loads(content)
            return message["type"], message["data"]
        event, form = struct.unpack("!II", content[:8])
        assert (event, form) == (PREVIEW, JPEG)
        return "preview", content[8:]

    def close(self) -> None:
        self._socket.close()


class Server:
    """A ComfyUI process.

    Attributes:
        version: of ComfyUI.
        output: folder of its pictures.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, base: Path) -> None:
        self.process, self.port = process, port
        self.output, self.input = base / "output", base / "input"
        self._client = secrets.token_hex(8)
        self.version = ""

    def ask(self, path: str, content: Any = None) -> Any:
        """What ``GET path`` answers, or ``POST path`` with ``content``."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    @contextlib.contextmanager
    def listening(self) -> Iterator[Listener]:
        """What is said to the page that has sent a prompt."""
        listener = Listener(self.port, f"/ws?clientId={self._client}")
        try:
            yield listener
        finally:
            listener.close()

    def send(self, workflow: Mapping[str, Any], pnginfo: Mapping[str, Any] | None = None) -> str:
        """Put a workflow into the queue; its id."""
        more = {} if pnginfo is None else {"extra_data": {"extra_pnginfo": pnginfo}}
        return self.ask("/prompt", {"prompt": workflow, "client_id": self._client, **more})["prompt_id"]

    def heard(self, listener: Listener, prompt: str, on: Mapping[str, Any] | None = None) -> list[tuple[str, Any]]:
        """What is said until a prompt has ended; ``on`` has functions that take a type of message."""
        found: list[tuple[str, Any]] = []
        while True:
            kind, content = listener.message()
            found.append((kind, content))
            if on is not None and kind in on:
                on[kind](content)
            ended = {"execution_success", "execution_error", "execution_interrupted"}
            if kind in ended and content["prompt_id"] == prompt:
                return found

    def run(self, workflow: Mapping[str, Any], pnginfo: Mapping[str, Any] | None = None) -> list[Path]:
        """Pictures that a workflow has saved."""
        with self.listening() as listener:
            prompt = self.send(workflow, pnginfo)
            last = self.heard(listener, prompt)[-1]
        assert last[0] == "execution_success", last
        return self.pictures(prompt)

    def pictures(self, prompt: str) -> list[Path]:
        """Pictures that a prompt has saved."""
        limit = time.monotonic() + 10
        # It is written down a moment after it was said.
        while not (history := self.ask(f"/history/{prompt}")) and time.monotonic() < limit:
            time.sleep(0.05)
        outputs = history[prompt]["outputs"]
        return [self.output / one["subfolder"] / one["filename"] for node in outputs.values() for one in node["images"]]


@contextlib.contextmanager
def server(
    comfyui: Path, python: str, base: Path, prepare: Callable[[Path], None] = lambda base: None
) -> Iterator[Server]:
    """ComfyUI with the nodes of this project, on the CPU.

    Args:
        comfyui: its folder.
        python: the interpreter that has its requirements.
        base: folder for what it writes, and for the nodes.
        prepare: is called with the folder, before it starts.
    """
    for name in ("models", "input", "output", "user"):
        (base / name).mkdir(parents=True)
    shutil.copytree(NODES, base / "custom_nodes" / "ditmesh", ignore=shutil.ignore_patterns("__pycache__"))
    prepare(base)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, str(comfyui / "main.py"), "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
    command += ["--base-directory", str(base), "--disable-api-nodes", "--preview-method", "latent2rgb"]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (base / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=base)
    made, limit = Server(process, port, base), time.monotonic() + START_LIMIT
    try:
        while not made.version:
            if process.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"ComfyUI did not start:\n{(base / 'log').read_text(errors='replace')[-4000:]}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                made.version = made.ask("/system_stats")["system"]["comfyui_version"]
            time.sleep(0.2)
        print(f"ComfyUI {made.version}", file=sys.stderr)
        yield made
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

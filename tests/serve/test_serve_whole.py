"""``ditmesh serve`` as a whole: the command, its queue, two ranks, the embedded model, and clients."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy
import openai
import psutil
import pytest
from PIL import Image

import ditmesh
from ditmesh.generate.receipt import read_receipt
from support import processes
from support.commands import run

pytestmark = pytest.mark.timeout(300)

TEST_PATH = os.pathsep.join(path for path in sys.path if path)

# What a receipt says of the run and not of the picture.
APART: dict[str, Any] = {"seconds": 0.0, "index": 0}


@dataclass
class Command:
    """A server that runs: its process, where it answers, its folder, and the mark of all its processes."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    mark: str


def started(*arguments: str | Path) -> tuple[subprocess.Popen[str], str]:
    """``ditmesh serve`` with these arguments, and the mark of its processes."""
    mark, environment = processes.marked({"PYTHONPATH": TEST_PATH})
    command = [sys.executable, "-m", "ditmesh", "serve", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), mark


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Command]:
    """A server that is ready, and ends well."""
    given = ["--devices", "2", "--ulysses", "2", "--threads", "1", "--port", "0", "--folder", folder]
    # Nobody reads the log.
    process, mark = started(*given, "--log-level", "warning")
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("ditmesh: loading emoji-sd3; listening at http://127.0.0.1:"), process.communicate()
        url = said.split()[-1]
        limit = time.monotonic() + 200
        while httpx.get(f"{url}/readyz").status_code != 200:
            assert time.monotonic() < limit
            time.sleep(0.2)
        yield Command(process, url, folder, mark)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert processes.wait_until_gone(mark, 20) == []
        assert process.stderr is not None
        assert "secret" not in process.stderr.read()
        assert re.fullmatch(r"ditmesh: ready: emoji-sd3 \(.*\) after \d+\.\d s\n", process.stdout.read())
    finally:
        process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    with running(tmp_path_factory.mktemp("serve") / "state") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Command) -> Iterator[ditmesh.Client]:
    with ditmesh.Client(server.url) as client:
        yield client


def pixels(image: Image.Image) -> numpy.ndarray:
    return numpy.asarray(image.convert("RGB")).astype(int)


def test_clients_get_what_generate_gives(
    server: Command, client: ditmesh.Client, kept_ranks: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The official client, and ditmesh's: the image of the prompt and the seed on as many devices."""
    common = ["generate", "a red fox", "--seed", "3", "--num-images", "2", "--json"]
    ranks = ("--devices", "2", "--ulysses", "2", "--threads", "1")
    assert run(*common, *ranks, "--batch", "1", "--out", tmp_path / "local") == 0
    local = json.loads(capfd.readouterr().out)
    remote = client.generate("a red fox", seed=3, n=2)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        made = client.images.generate(prompt="a red fox", n=2, extra_body={"seed": 3}).data or []
    for one, there, third in zip(local["images"], remote, made, strict=True):
        with Image.open(one["path"]) as here:
            assert (pixels(here) == pixels(there)).all()
            assert (pixels(here) == pixels(Image.open(BytesIO(base64.b64decode(third.b64_json or ""))))).all()
        ours = read_receipt(one["path"])
        assert ours.model_copy(update=APART) == there.receipt.model_copy(update=APART)


def test_a_cut_prompt_is_told_to_its_client_and_not_in_the_log(client: ditmesh.Client, server: Command):
    """The tokenizers take 16 tokens, and diffusers logs what they leave out; `running` looks at the log."""
    prompt = "a red fox and a cactus and a pizza and a hen and a cat who know secret words that nobody may read"
    (image,) = client.wait(client.submit(prompt, steps=1).id).images
    (note,) = image.notes
    limits = " and ".join(f"{name} takes 16" for name in ("tokenizer", "tokenizer_2", "tokenizer_3"))
    assert re.fullmatch(rf"\d+ tokens of the prompt were cut \({limits}\)", note)
    assert image.receipt is not None
    assert image.receipt["cut"] == note
    (image,) = client.wait(client.submit("a cactus", steps=1).id).images
    assert (image.notes, image.receipt["cut"]) == ([], None)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_process_that_answers_has_no_torch(server: Command):
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    # As docs/serving.md says.
    assert psutil.Process(server.process.pid).memory_info().rss < 150e6


# --- what is refused before a rank is started


def test_a_folder_has_one_server(server: Command):
    process, mark = started("--port", "0", "--folder", server.folder)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, ""), said
    assert "Traceback" not in said
    assert str(server.folder) in said.strip().splitlines()[-1]
    assert processes.wait_until_gone(mark, 5) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "{port}"], "use another with --port"),
        (["--host", "no.such.host.invalid"], "--host 'no.such.host.invalid' is no address"),
        (["--model", "a=emoji-sd3", "--model", "a=emoji-dit-s"], "'a' is given twice"),
        (["--model", "="], "write it as my-name=./folder"),
        (["--lora", "x=none.safetensors"], "none.safetensors"),
        (["--keys", "none"], "cannot read the keys 'none'"),
        (["--new-key", "a"], "name it with --keys FILE"),
        (["--max-steps", "0"], "use --max-steps 1 or more"),
    ],
)
def test_what_serve_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [argument.format(port=taken.getsockname()[1]) for argument in arguments]
        assert run("serve", "--folder", tmp_path, *given) == 2
    said = capfd.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_new_keys_are_printed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert run("serve", "--keys", tmp_path / "keys", "--new-key", "alice") == 0
    key = capfd.readouterr().out.strip()
    assert key.startswith("dm-")
    assert key not in (tmp_path / "keys").read_text()
    assert "alice" in (tmp_path / "keys").read_text()

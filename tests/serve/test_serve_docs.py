"""docs/serving.md and examples/serve: their commands run, their settings and metrics exist."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from ditmesh.cli import serve as command
from ditmesh.cli.main import app
from ditmesh.serve.http.app import create_app
from ditmesh.serve.http.keys import new_key
from support.commands import run as run_command
from support.serving import FakeBackend, serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples" / "serve"
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that knows the models of the page."""
    backend = FakeBackend()
    with serving(backend) as url:
        yield url


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `ditmesh serve` would have started, with all its settings."""
    started: list[Any] = []

    def note(backend: Any, settings: Any, listening: Any, grace: float, logs: Any) -> None:
        started.append((backend, settings))

    monkeypatch.setattr(command, "_serve", note)
    # Ports and addresses of the examples may be somebody else's here.
    monkeypatch.setattr("ditmesh.serve.http.listen.bound", lambda host, port: contextlib.nullcontext())
    return started


def run(line: str) -> None:
    assert run_command(*shlex.split(line)[1:]) == 0


def commands_of(text: str) -> list[str]:
    return re.findall(r"^ditmesh serve .*$", text, re.MULTILINE)


def test_commands_of_the_page_start_servers(starts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    lines = [line for _, text in BLOCKS for line in commands_of(text)]
    assert len(lines) == 4
    for line in lines:
        run(line)
    # One of them makes a key.
    assert [[card.id for card in backend.models()] for backend, _ in starts] == [
        ["emoji-sd3"], ["emoji-sd3", "clothes"], ["emoji-sd3"]
    ]  # fmt: skip
    assert starts[2][1].keys == Path("keys")
    assert "images.example.org" in starts[2][1].hosts


@pytest.mark.parametrize(
    "text",
    [text for _, text in BLOCKS if "127.0.0.1:8000" in text and not commands_of(text)],
    ids=lambda text: text[:30],
)
def test_clients_of_the_page(url: str, tmp_path: Path, text: str):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    text = text.replace("http://127.0.0.1:8000", url)
    python = "import " in text.splitlines()[0]
    shell = [sys.executable, "-c", text] if python else ["bash", "-e", "-o", "pipefail", "-c", text]
    done = subprocess.run(
        shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_path_is_on_the_page():
    for path in create_app(FakeBackend()).openapi()["paths"]:
        said = path.replace("{index}", "{i}")
        assert re.search(re.escape(said).replace(r"/v1/images/edits", ".*edits"), PAGE), path


def test_the_dashboard_asks_for_metrics_that_exist():
    registry = create_app(FakeBackend()).state.server.metrics.registry
    names = {sample.name for metric in registry.collect() for sample in metric.samples}
    names |= {f"{metric.name}_total" for metric in registry.collect() if metric.type == "counter"}
    names |= {f"{metric.name}_bucket" for metric in registry.collect() if metric.type == "histogram"}
    board = json.loads((EXAMPLES / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) >= 20
    asked = {name for query in queries for name in re.findall(r"ditmesh_\w+", query)}
    assert asked <= names
    assert set(re.findall(r"`(ditmesh_\w+)`", PAGE)) <= names | {metric.name for metric in registry.collect()}
    # Labels, too.
    labels = {label for metric in registry.collect() for sample in metric.samples for label in sample.labels}
    shown = {label for panel in board["panels"] for target in panel["targets"]
             for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}  # fmt: skip
    assert shown <= labels | {"status", "code", "model", "route", "method"}
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.matrix
def test_the_examples_start_servers(starts: list[Any], tmp_path: Path):
    """Containers and units run commands that exist, and give them longer than they need to stop."""
    (grace,) = [one.default for one in typer.main.get_command(app).commands["serve"].params if one.name == "grace"]  # type: ignore[attr-defined]
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text(encoding="utf-8"))
    service = compose["services"]["ditmesh"]
    assert int(service["stop_grace_period"].removesuffix("s")) > grace
    assert (EXAMPLES / service["build"] / "Dockerfile").exists()
    claim, deployment, entry = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > grace
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert claim["metadata"]["name"] == pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert entry["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"] == 8000
    paths = create_app(FakeBackend()).openapi()["paths"]
    assert {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} <= set(paths)
    unit = (EXAMPLES / "ditmesh.service").read_text(encoding="utf-8")
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > grace
    line = re.findall(r"ExecStart=\S+/ditmesh (.*)", unit)[0]
    for arguments in (service["command"], container["args"], shlex.split(line)):
        folder = tmp_path / str(len(starts))
        folder.mkdir()
        new_key(folder / "keys")
        # Folders of containers and units are not there.
        moved = [re.sub(r"(^|=)/(?:state|keys|var/lib/ditmesh)/", rf"\1{folder}/", word) for word in arguments]
        assert run_command(*moved) == 0
        assert starts[-1][1].keys == folder / "keys"
    assert len(starts) == 3
    assert yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]

"""What is shipped: the wheel, the image, the site, the citation; and that they agree with one another."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.trainable import REFUSALS, UPSTREAM

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    canonicalize_name(pin.name): pin.specifier
    for pin in map(Requirement, re.findall(r"^[\w.-]+==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
}


def done(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command that must end well; what it printed."""
    words, place = [str(word) for word in command], {**os.environ, **environment}
    result = subprocess.run(words, cwd=cwd, env=place, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_every_requirement_is_pinned():
    extras = PROJECT["optional-dependencies"]
    lists = [PROJECT["dependencies"], *(extras[name] for name in extras if name not in ("study", "zoo"))]
    for requirement in (Requirement(line) for lines in lists for line in lines):
        pin = PINS.get(canonicalize_name(requirement.name))
        assert pin is not None, requirement
        assert requirement.specifier.contains(next(iter(pin)).version), requirement


def test_the_image_installs_what_the_project_says():
    """pip's lines of the Dockerfile name pins and extras that exist, and files that are sent along."""
    docker = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    installs = [line for line in docker.splitlines() if "pip install" in line]
    assert len(installs) == 3
    assert "$(grep '^torch==' constraints.txt)" in installs[0]
    assert "torch" in PINS
    program = re.search(r"RUN python -c '([^']+)' *\\\n *> requirements.txt", docker)
    assert program
    lines = done(sys.executable, "-c", program[1].replace("\\\n", "")).splitlines()
    extras = ("lora", "train", "t5", "serve", "video", "data")
    assert set(lines) == {line for name in extras for line in PROJECT["optional-dependencies"][name]} | set(
        PROJECT["dependencies"]
    )
    sent = {word for line in re.findall(r"^COPY (.+)$", docker, re.MULTILINE) for word in line.split()[:-1]}
    # The wheel's own parts: its readme, its licence, its source.
    assert sent >= {"pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"], "src"}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == allowed
    assert all((ROOT / name).exists() for name in sent)
    assert f"python:{sys.version_info.major}." in docker


def test_every_page_is_in_the_navigation():
    nav, docs = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2], ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md") if not path.name.endswith(".zh.md")}
    assert sorted(re.findall(r"[\w/-]+\.md", nav)) == sorted(pages)


@pytest.mark.matrix
def test_the_site_builds(tmp_path):
    """Without a warning: every link and anchor leads somewhere, in both languages."""
    pytest.importorskip("mkdocs", reason="the site wants the docs extra: make docs")
    done(sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site", NO_MKDOCS_2_WARNING="1")
    first = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "images/sheet.png" in first
    assert "several GPUs have not been tried" in first
    assert "尚未在多块 GPU 上运行过" in (tmp_path / "site" / "zh" / "index.html").read_text(encoding="utf-8")
    assert "ditmesh.parallelize" in (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")


# Tables of docs/cards.md that a script writes.
SIZES = {"weights": ["weights", "recipes"], "cards": ["answers", "one card", "adapters", "models"]}


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("script", "table"),
    [(script, table) for script, tables in SIZES.items() for table in tables],
)
def test_the_sizes_in_a_page_are_what_its_script_computes(monkeypatch, script, table):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module(script)
    page = module.PAGE.read_text(encoding="utf-8")
    assert {*module.TABLES} == {*SIZES[script]}
    assert importlib.import_module("weights").write(page, {table: module.TABLES[table]}) == page


@pytest.mark.matrix
def test_steps_that_are_predicted(monkeypatch):
    """Those of READMEs on 1, 2, 4 and 8 H200, and of docs/gpus.md on one."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cards = importlib.import_module("cards")
    steps = [cards.predicted(devices=devices) for devices in (1, 2, 4, 8)]
    steps.append(cards.predicted(devices=8, config=cards.ParallelConfig(tensor=2, ulysses=4)))
    for readme in cards.READMES:
        (row,) = re.findall(r'^\| .*"auto".*', readme.read_text(encoding="utf-8"), re.MULTILINE)
        assert re.findall(r"(\d+) ms", row) == [f"{step:.0f}" for step in steps]
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S.*?) \| [\d,]+ \+ (\d+) \|(?:[^|]*\|){3} (\d+) ms \|", page, re.MULTILINE)
    assert len(rows) == 6
    for title, text, step in rows:
        name = title.lower().replace("wan 2.1 ", "wan-")
        assert f"{cards.predicted(name, guidance=False, text=int(text)):.0f}" == step


def test_models_by_name(monkeypatch):
    """READMEs say of a model what the pages of results say of its classes; one model's cards are those of its check."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cards = importlib.import_module("cards")
    assert cards.table_of("Stable Diffusion 3.5 Medium") in cards.PAGE.read_text(encoding="utf-8")
    for readme in cards.READMES:
        text = readme.read_text(encoding="utf-8")
        assert cards.write_rows(text) == text
        assert text.count("\n") <= 170
        assert re.findall(r"\]\((.+?)\)", text)[0] == "docs/cards.md"
    trained = {pipeline.split()[0] for _, kind, pipeline, *_ in cards.SUPPORTED if kind not in cards.UNTRAINED}
    assert trained <= set(UPSTREAM).difference(*REFUSALS.values())


def test_the_change_log_is_of_this_version(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    assert importlib.import_module("release").version_mistakes(ROOT) == []


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_a_release_can_be_cut(tmp_path):
    """Built from what is committed, checked, installed with the tested versions, and run from an empty folder."""
    pytest.importorskip("build", reason="the check wants the release extra: make release-check")
    pytest.importorskip("twine", reason="the check wants the release extra: make release-check")
    assert "the same pixels" in done(sys.executable, ROOT / ".ci" / "release.py", "--out", tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".gz", ".whl"}

"""What the documents promise: commands that run, imports that run one way, links that lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Every line of every bash block, once."""
    found: dict[str, None] = {}
    for document in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.splitlines():
                if line.strip() and not line.startswith("#"):
                    found[line.strip()] = None
    return list(found)


# `make generate` and `make test` make an environment and run these tests: CI is what runs them.
RUN = [command for command in commands() if not command.startswith(("make ", "pytest ", "python benchmarks/"))]


@pytest.mark.parametrize("command", RUN)
def test_documented_command(tmp_path, command):
    words = shlex.split(command)
    program = {"ditmesh": ["-m", "ditmesh"], "torchrun": ["-m", "torch.distributed.run"], "python": []}[words[0]]
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in words[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands():
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def tree() -> list[str]:
    """Modules and folders of the package in the order of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = re.search(r"src/ditmesh/\n(.*?)```", text, re.DOTALL)
    assert listing
    return [
        line.split()[0].removesuffix("/").removesuffix(".py")
        for line in listing.group(1).splitlines()
        if line.startswith("  ")
    ]


def test_every_module_is_in_the_tree():
    found = {
        path.stem
        for path in (ROOT / "src" / "ditmesh").iterdir()
        if (path.suffix == ".py" and not path.stem.startswith("__")) or (path / "__init__.py").exists()
    }
    assert found == set(tree())


def test_imports_run_one_way():
    """A module imports only those above it in the tree (types for checkers apart)."""
    order = {name: place for place, name in enumerate(tree())}
    package = ROOT / "src" / "ditmesh"
    wrong = []
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        here = parts[0]
        if here not in order:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = parts[: len(parts) - node.level]
            target = [*base, *(node.module or "").split(".")] if node.module else list(base)
            names = [target[0]] if target else [alias.name for alias in node.names]
            wrong += [
                f"{path.relative_to(package)} imports {name}"
                for name in names
                if name in order and name != here and order[name] > order[here]
            ]
    assert wrong == []

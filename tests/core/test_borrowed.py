"""Private names of other libraries: each is listed, and a renamed one is one sentence."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ditmesh
from ditmesh.core import borrowed
from ditmesh.core.borrowed import TESTED, Borrowed, borrowed_names

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ditmesh"
# Of Python itself, or asked for with a way to go on without it: NCCL's groups, the program of a Ray job, cache-dit.
ELSEWHERE = {
    *("_asdict", "_replace", "_fields", "_exit", "_getframe", "_run_exitfuncs", "_thread", "_is_cached"),
    *("_forkserver", "_forkserver_pid", "_inheriting", "_group_start", "_group_end", "_timeout", "_private"),
}
# Modules of private parts, of which the listed names are used; torch.compile's settings, which are set if there.
PARTS = {"_C", "_nn", "_ops", "_utils", "_pytree", "_python_dispatch", "_subclasses", "_distributed_c10d", "_inductor"}


@pytest.mark.parametrize("row", borrowed_names(), ids=lambda row: f"{row.owner}-{row.names[0]}")
def test_a_name_that_is_gone_is_one_sentence(row: Borrowed, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module(row.owner.partition(":")[0])
    library = row.owner.partition(":")[0].partition(".")[0]
    for name in row.names:
        # Many belong to classes in C++, which let none go.
        rest = dict.fromkeys(set(row.names) - {name})
        with monkeypatch.context() as patch:
            patch.setattr(
                borrowed, "owner_of", lambda other, rest=rest: SimpleNamespace(**rest) if other is row else None
            )
            with pytest.raises(ditmesh.ConfigError, match=rf"^{library} \S+ has no '{name}' in ") as caught:
                ditmesh.parallelize(torch.nn.Linear(1, 1), {})
        assert f"install {library}=={TESTED[library]}" in str(caught.value)
    assert not list(borrowed.missing())


def test_an_import_without_the_name() -> None:
    code = "from torch.utils import _pytree\ndel _pytree.tree_map\nfrom ditmesh import parallelize"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(r"ditmesh.errors.ConfigError: torch \S+ has no 'tree_map' in torch.utils._pytree", last), (
        done.stderr
    )


def private_names() -> Iterator[tuple[str, str]]:
    """Names with an underscore that the source does not define itself, and their places."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    defined: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self":
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                names = [str(given.value) for given in node.args[1:2] if isinstance(given, ast.Constant)]
            for name in names:
                if re.match(r"_[^_]", name) and name not in defined:
                    yield name, f"{path.relative_to(SOURCE)}"


def test_every_private_name_of_others_is_listed() -> None:
    listed = {name for row in borrowed_names() for name in row.names} | {
        part for row in borrowed_names() for part in re.split(r"[.:]", row.owner)
    }
    unlisted = {name: place for name, place in private_names() if name not in listed | ELSEWHERE | PARTS}
    assert not unlisted, f"list them in core/borrowed.yaml: {unlisted}"


def test_versions_are_those_of_the_constraints() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    assert {name: pinned[name] for name in TESTED} == TESTED

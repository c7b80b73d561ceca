"""What the documents promise: commands that run, imports that run one way, links that lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import hub

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(*languages: str) -> list[Block]:
    """Every fenced block of these languages, once: translations differ from the original in comments only."""
    found: dict[str, Block] = {}
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if match[1] in languages:
                place = f"{document.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 2}"
                block = Block(place, match[2])
                found.setdefault(block.meaning(), block)
    return list(found.values())


class Block(NamedTuple):
    """A fenced block: where its text begins, and the text."""

    place: str
    text: str

    def meaning(self) -> str:
        """The text without its comments."""
        lines = (re.sub(r"(^|\s+)#.*", "", line) for line in self.text.splitlines())
        return "\n".join(line for line in lines if line.strip())

    @property
    def untested(self) -> str | None:
        """Why the block is not run, as its first line says to every reader."""
        reason = re.match(r"# (?:not tested: |未测试：)(.+)", self.text)
        return reason and reason[1]

    @property
    def always(self) -> bool:
        """Whether every change has to pass it: the first program of a reader."""
        return self.place.startswith("README.md:") and not re.match(r"torchrun|ditmesh ", self.text)

    @property
    def ranks(self) -> int:
        """Ranks that run it: two under torchrun, or one program."""
        return 2 if "init_from_environment(" in self.text else 1


# CI runs these as they are: they make an environment, run the tests, or measure.
OF_CI = re.compile(r"(?:(?:make|pytest|mkdocs|python benchmarks/)[^\n]*\n)+")


def marked(found: list[Block]) -> list[Any]:
    """Blocks as parameters of a test."""
    return [pytest.param(block, id=block.place, marks=() if block.always else pytest.mark.matrix) for block in found]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Of a program that a reader pastes: the package, its commands, a hub of stand-ins."""
    cache = tmp_path_factory.mktemp("hub")
    hub.fill(cache)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(cache),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def ended(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Runs the command, which must end well; what it printed."""
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout


# Blocks that ask a server: tests/test_serve_docs.py runs them against one.
SERVED = re.compile(r"ditmesh serve|127\.0\.0\.1:8000")

# The blocks of a tutorial lead on from one another: tests/test_train_tutorial.py runs them in their order.
TUTORIAL = re.compile(r"keep\.txt|emoji-lora|out/lora")

PYTHON = [
    block
    for block in blocks("python")
    if not block.untested and not TUTORIAL.search(block.text) and not SERVED.search(block.text)
]
OF_READERS = [block for block in PYTHON if "Ranks(" in block.text]
SHARING = [block for block in PYTHON if block not in OF_READERS]


@pytest.mark.parametrize(
    ("ranks", "always"),
    [
        pytest.param(2, True, marks=pytest.mark.matrix),
        pytest.param(2, False, marks=pytest.mark.matrix),
        pytest.param(1, False, marks=pytest.mark.matrix),
    ],
)
def test_programs(tmp_path, environment, ranks, always):
    """Python blocks run as they stand, under torchrun where they ask for it; they share processes, and no names."""
    chosen = [b for b in SHARING if b.ranks == ranks and b.always == always]
    files = []
    for block in chosen:
        files.append(tmp_path / f"{block.place.replace('/', '_').replace(':', '_line_')}.py")
        files[-1].write_text(block.text, encoding="utf-8")
    assert files
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    ended([sys.executable, *launcher, "-m", "support.pasted", *map(str, files)], tmp_path, environment)


@pytest.mark.parametrize("block", marked(OF_READERS))
def test_program_that_starts_ranks(tmp_path, environment, block):
    """A script runs from its file, a notebook's cell without one."""
    if "__main__" in block.text:
        (tmp_path / "first.py").write_text(block.text, encoding="utf-8")
        ended([sys.executable, "first.py"], tmp_path, environment)
        assert any(tmp_path.glob("*.png"))
    else:
        ended([sys.executable, "-c", block.text], tmp_path, environment)


COMMANDS = [
    block
    for block in blocks("bash")
    if not block.untested
    and not OF_CI.fullmatch(block.text)
    and not TUTORIAL.search(block.text)
    and not SERVED.search(block.text)
]
HOSTS = [block for block in COMMANDS if "$NODE_RANK" in block.text]


@pytest.mark.parametrize("block", marked([block for block in COMMANDS if block not in HOSTS]))
def test_commands(tmp_path, environment, block):
    """Bash blocks run as they stand, in a folder of their own with the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert ended(["bash", "-e", "-c", block.text], tmp_path, environment).strip()


@pytest.mark.matrix
@pytest.mark.parametrize("block", HOSTS, ids=lambda block: block.place)
def test_commands_of_two_hosts(tmp_path, environment, block):
    """Two agents of torchrun on this machine stand in for two hosts."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER": "127.0.0.1", "PORT": str(free.getsockname()[1])}
    with ThreadPoolExecutor(2) as hosts:
        outputs = [
            hosts.submit(
                ended, ["bash", "-e", "-c", block.text], tmp_path, {**environment, **meeting, "NODE_RANK": str(node)}
            )
            for node in range(2)
        ]
    assert any(output.result().strip() for output in outputs)


def test_what_is_not_run_says_why():
    """Blocks that are left out are few, and say why where their reader sees it."""
    left_out = [block for block in blocks("python", "bash") if block.untested]
    assert len(left_out) <= 14, [block.place for block in left_out]
    assert all(len(block.untested) > 5 for block in left_out if block.untested)
    # Other names for the same languages would not be run.
    for document in DOCUMENTS:
        fences = re.findall(r"^```(\w+)", document.read_text(encoding="utf-8"), re.MULTILINE)
        assert not set(fences) & {"py", "python3", "sh", "shell", "console"}, document


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {target for block in blocks("bash") for target in re.findall(r"^make ([\w-]+)", block.text, re.MULTILINE)}
    assert {"generate", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        # The site's index is the README.
        if not target.startswith("http") and (document.parent / target).resolve() != ROOT / "docs" / "index.md":
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

"""What the documents promise: commands that run, imports that run one way, links that lead somewhere."""

from __future__ import annotations

import ast
import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import hub

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
        reason = re.match(r"# ((?:over the network|需要联网|not tested: |未测试：).+)", self.text)
        return reason and reason[1]

    @property
    def ranks(self) -> int:
        """Ranks that run it: two under torchrun, or one program."""
        return 2 if "init_from_environment(" in self.text else 1


# CI runs these as they are: they make an environment, run the tests, or measure.
OF_CI = re.compile(r"(?:(?:make|pytest|mkdocs|python benchmarks/)[^\n]*\n)+")


def marked(found: list[Block]) -> list[Any]:
    """Blocks as parameters of a test; every change has to pass the first program of a reader."""
    always = [block.place.startswith("README.md:") and not re.match("torchrun|ditmesh ", block.text) for block in found]
    marks = [() if first else pytest.mark.matrix for first in always]
    return [pytest.param(block, id=block.place, marks=mark) for block, mark in zip(found, marks, strict=True)]


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
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout


def shorter(text: str) -> str:
    """A block with a few steps in place of FLUX.1-dev's 28, as its images have 4,096 tokens here too."""
    return re.sub(r"(num_inference_steps=|--steps )28\b", r"\g<1>4", text)


# tests/serve/test_serve_docs.py asks a server, tests/train/test_train_tutorial.py runs a tutorial in its order,
# and tests/project/test_recipes.py the programs of examples/recipes.
ELSEWHERE = r"ditmesh serve|127\.0\.0\.1:8000|keep\.txt|emoji-lora|out/lora|CONFIGS\[sys\.argv|examples/recipes/"


def runs(block: Block) -> bool:
    """True if the block is run here."""
    return not block.untested and not re.search(ELSEWHERE, block.text)


PYTHON = [block for block in blocks("python") if runs(block)]
OF_READERS = [block for block in PYTHON if re.search(r"\b(?:Ranks|Followers)\(", block.text)]
SHARING = [block for block in PYTHON if block not in OF_READERS]


def test_programs_import_what_there_is():
    """Names of the package in programs of all pages, those that are not run among them."""
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "ditmesh":
                module = importlib.import_module(str(node.module))
                lacking = [each.name for each in node.names if not hasattr(module, each.name)]
                package = hasattr(module, "__path__")
                lacking = [name for name in lacking if not (package and find_spec(f"{node.module}.{name}"))]
                assert not lacking, block.place


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_programs(tmp_path, environment, ranks):
    """Python blocks run as they stand, under torchrun where they ask for it; they share processes, and no names."""
    files = []
    for block in (block for block in SHARING if block.ranks == ranks):
        files.append(tmp_path / f"{block.place.replace('/', '_').replace(':', '_line_')}.py")
        files[-1].write_text(shorter(block.text), encoding="utf-8")
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


COMMANDS = [block for block in blocks("bash") if runs(block) and not OF_CI.fullmatch(block.text)]
HOSTS = [block for block in COMMANDS if "$NODE_RANK" in block.text]


@pytest.mark.parametrize("block", marked([block for block in COMMANDS if block not in HOSTS]))
def test_commands(tmp_path, environment, block):
    """Bash blocks run as they stand, in a folder of their own with the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert ended(["bash", "-e", "-c", shorter(block.text)], tmp_path, environment).strip()


@pytest.mark.matrix
@pytest.mark.parametrize("block", HOSTS, ids=lambda block: block.place)
def test_commands_of_two_hosts(tmp_path, environment, block):
    """Two agents of torchrun on this machine stand in for two hosts."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER": "127.0.0.1", "PORT": str(free.getsockname()[1])}
    with ThreadPoolExecutor(2) as hosts:
        command = ["bash", "-e", "-c", block.text]
        places = [{**environment, **meeting, "NODE_RANK": str(node)} for node in range(2)]
        outputs = [hosts.submit(ended, command, tmp_path, place) for place in places]
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


LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """Names that a link may have behind ``#``, as a code host makes them: those of headings, and those written."""
    found = set(re.findall(r'<a id="([^"]+)">', text))
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for words in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        heading = re.sub(r"[`*]|\]\([^)]*\)|\[", "", words)
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(each for each in (name, *(f"{name}-{count}" for count in range(1, 99))) if each not in found))
    return found


def test_links_of_the_repository():
    """A reader of the files on a code host; `make docs` checks the links of the site."""
    wrong = []
    for document in [*DOCUMENTS, *ROOT.glob("*.md"), *ROOT.glob("integrations/*/README.md"), ROOT / "rules/README.md"]:
        text = document.read_text(encoding="utf-8")
        for link in LINK.findall(prose(text)):
            target, _, anchor = link.partition("#")
            path = document.parent / target if target else document
            outside = re.match(r"[a-z]+:", link)
            if outside or (path.exists() and (not anchor or anchor in anchors(path.read_text(encoding="utf-8")))):
                continue
            wrong.append(f"{document.relative_to(ROOT)}: {link}")
    assert wrong == []


OF_EQUAL_RANK = [
    "README{}.md",
    *(f"docs/{name}{{}}.md" for name in ("quickstart", "choosing", "training", "stale", "limits", "lab/findings")),
]


@pytest.mark.parametrize("page", OF_EQUAL_RANK)
def test_a_page_is_translated_whole(page):
    """Headings of the same levels, the same programs and figures of tables, and as many points and rows under each.

    The report of the laboratory has the same figures in its sentences, too."""
    shapes = []
    for language in ("", ".zh-CN" if page.startswith("README") else ".zh"):
        text = (ROOT / page.format(language)).read_text(encoding="utf-8")
        programs = re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        parts = re.split(r"^(#+) .*$", plain, flags=re.MULTILINE)[1:]
        counts = [part if part[0] == "#" else tuple(map(part.count, ("\n* ", "\n|"))) for part in parts]
        numbers = re.findall(r"\d+\.\d+", "".join(re.findall(r"^\|.*", plain, re.MULTILINE)))
        numbers += sorted(re.findall(r"\d+\.\d+", plain)) if "lab" in page else []
        shapes.append(([Block("", program).meaning() for program in programs], counts, numbers))
    assert shapes[0] == shapes[1]


def test_the_manual_stays_small():
    """Without references that the code writes, decisions and the laboratory."""
    others = {"classes", "pipelines", "support", "training-settings", "reference", "planted-faults", "decisions"}
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.stem not in others]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in pages if ".zh" not in path.name]
    assert len(lines) <= 28
    assert sum(lines) <= 5000
    # With the first page of the site, which is README.
    assert len(pages) - len(lines) == len([page for page in OF_EQUAL_RANK if "lab/" not in page])


@pytest.mark.parametrize("index", ["index.md", "index.zh.md"])
def test_the_index_lists_every_page(index):
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if ".zh" not in path.name} - {"index.md"}
    links = {link.split("#")[0] for link in LINK.findall((ROOT / "docs" / index).read_text(encoding="utf-8"))}
    assert {link for link in links if "/" not in link} == pages


def tree() -> list[str]:
    """Modules and folders of the package, or parts of a folder, in the order of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = re.search(r"src/ditmesh/\n(.*?)```", text, re.DOTALL)
    assert listing
    return [
        line.split()[0].removesuffix("/").removesuffix(".py")
        for line in listing.group(1).splitlines()
        if line.startswith("  ")
    ]


def test_imports_run_one_way():
    """Every module is in the tree, and imports only those above it (types for checkers apart)."""
    order = {tuple(name.split("/")): place for place, name in enumerate(tree())}
    package = ROOT / "src" / "ditmesh"
    modules = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    assert modules | {path.parent.name for path in package.glob("*/__init__.py")} == {
        name.split("/")[0] for name in tree()
    }

    def place(parts: Sequence[str]) -> int | None:
        """Of the longest entry that holds a module."""
        heads = (tuple(parts[:length]) for length in range(len(parts), 0, -1))
        return next((order[head] for head in heads if head in order), None)

    wrong = []
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        here = place(parts)
        module = ast.parse(path.read_text(encoding="utf-8"))
        for_checkers = [n for n in module.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        skipped = {node for block in for_checkers for node in ast.walk(block)}
        for node in ast.walk(module):
            if here is None or node in skipped or not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            target = [*parts[: len(parts) - node.level], *(node.module.split(".") if node.module else ())]
            for alias in node.names:
                there = place([*target, alias.name])
                if there is not None and there > here:
                    wrong.append(f"{path.relative_to(package)} imports {'.'.join([*target, alias.name])}")
    assert wrong == []


def test_decisions_are_few_and_say_what_would_reverse_them():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "decisions").glob("*.md"))
    parts = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    assert len(parts) <= 70
    assert all(re.search(r"^\* \d{4}-\d\d-\d\d: (?s:.)*^\* Reversed by: ", part, re.MULTILINE) for part in parts)

"""Checks of `make lint` on src/ditmesh: one class a name, no import circles, and a reason beside each complex function.

Import circles are looked for between files: in src by imports at the top of a module, in training/ and benchmarks/ by
those inside functions too. That imports run one way between rooms of src, late ones too, is what
tests/project/test_docs.py holds against the tree of docs/architecture.md.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "ditmesh"
MOST = 20
# Violations that are known. Each fix takes its line out of here: an entry that no longer applies is an error too.
OPEN = Path(__file__).with_name("house_open.txt")

BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity: 1, and 1 for every branch, boolean operator and comprehension; nested functions apart."""

    def within(node: ast.AST) -> int:
        return sum(
            own(child) + within(child) for child in ast.iter_child_nodes(node) if not isinstance(child, DEFINITIONS)
        )

    def own(node: ast.AST) -> int:
        if isinstance(node, ast.BoolOp):
            return len(node.values) - 1
        return 1 + len(node.ifs) if isinstance(node, ast.comprehension) else isinstance(node, BRANCHES)

    return 1 + within(function)


def complex_functions(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Names of functions above `MOST`, unless ``# complex: why`` stands on the line of the def or the one before."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or complexity(node) <= MOST:
            continue
        if not any("# complex: " in line for line in lines[max(0, node.lineno - 2) : node.lineno]):
            yield node.name


def imports(
    tree: ast.Module, module: str, is_package: bool, modules: Mapping[str, object], late: bool = False
) -> Iterator[str]:
    """Modules of ``modules`` that ``module`` imports: not for types only, and inside functions only if ``late``."""

    def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield child
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from (found for other in child.orelse for found in statements(ast.Module([other], [])))
            elif late or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from statements(child)

    for statement in statements(tree):
        if isinstance(statement, ast.Import):
            found = [alias.name for alias in statement.names]
        else:
            parts = module.split(".")
            up = statement.level - is_package
            base = ".".join(parts[: len(parts) - up]) if statement.level else ""
            base = ".".join(part for part in (base, statement.module) if part)
            names = [f"{base}.{alias.name}" for alias in statement.names]
            found = [name if name in modules else base for name in names]
        yield from (name for name in found if name in modules and name != module)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach one another."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    reach = {node: reached(node) for node in graph}
    found = {
        tuple(sorted(other for other in seen if node in reach.get(other, ())))
        for node, seen in reach.items()
        if node in seen
    }
    return [list(circle) for circle in sorted(found)]


def violations() -> Iterator[str]:
    """One line for each, without line numbers, so that a list of them stays valid while files change."""
    files = sorted((SOURCE / PACKAGE).rglob("*.py"))
    names = {".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in names.items()}
    classes: dict[str, list[str]] = defaultdict(list)
    between_files: dict[str, set[str]] = {}
    for name, tree in trees.items():
        file = names[name]
        where = file.relative_to(SOURCE / PACKAGE).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(where)
        for function in complex_functions(tree, file.read_text(encoding="utf-8").splitlines()):
            yield f"complexity above {MOST} without a comment '# complex: why': {where} {function}"
        is_package = file.name == "__init__.py"
        between_files[name] = set(imports(tree, name, is_package, names))
    for name, found in sorted(classes.items()):
        # A class that is defined twice in one file is one for type checkers and one for the program.
        if len(set(found)) > 1:
            yield f"class name defined more than once: {name}"
    # Of these folders training is a package; scripts of benchmarks import one another by their bare names.
    for folder, prefix in (("training", "training."), ("benchmarks", "")):
        scripts = {prefix + file.stem: file for file in sorted((ROOT / folder).glob("*.py"))}
        for name, file in scripts.items():
            tree = ast.parse(file.read_text(encoding="utf-8"))
            between_files[name] = set(imports(tree, name, False, scripts, late=True))
    for circle in circles(between_files):
        yield f"circle of imports between files: {' '.join(circle)}"


def main() -> int:
    found = set(violations())
    known = set(OPEN.read_text(encoding="utf-8").splitlines()) if OPEN.exists() else set()
    if "--write" in sys.argv:
        OPEN.write_text("".join(f"{line}\n" for line in sorted(found & known if known else found)), encoding="utf-8")
        return 0
    for line in sorted(found - known):
        print(line)
    for line in sorted(known - found):
        print(f"mended, take it out of {OPEN.name} (python .ci/house.py --write): {line}")
    return int(found != known)


if __name__ == "__main__":
    sys.exit(main())

"""Checks of `make lint` on src/ditmesh: one class a name, no import circles, ceilings, reasons for complex functions
and for names of CUDA.

``--budget`` prints the lines of each room beside its ceiling of ceilings.txt. A room above its ceiling fails the
check: a feature that needs more lines takes them from its own room, or raises the ceiling with the reason.
``--names`` lists values whose name is no noun; the table has a ceiling for their number.

Import circles are looked for between files, those inside functions too. So are imports against `LAYERS`;
tests/project/test_docs.py holds the order of rooms inside of a layer against the tree of docs/architecture.md.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "ditmesh"
MOST = 20
# Violations that are known. Each fix takes its line out of here: an entry that no longer applies is an error too.
OPEN = Path(__file__).with_name("house_open.txt")
CEILINGS = Path(__file__).with_name("ceilings.txt")
# Files that may name CUDA, each with its reason; all others ask `torch.accelerator`.
CUDA = Path(__file__).with_name("cuda.txt")
# Rooms that are no part of the engine: what `engine` counts is the rest of src/ditmesh.
BESIDE_THE_ENGINE = ("serve", "train", "lab", "client.py", "ray_serve.py", "cli/serve.py", "cli/train.py",
                     "cli/plan.py", "cli/study.py")  # fmt: skip

# Rooms by layer, from the bottom up: a room imports from its own layer's other rooms only where `WITHIN` says so, and
# from all layers below. What is not named is the engine, the layer below all of these.
LAYERS = (
    ("generate", "verify", "ranks", "followers"),
    ("serve", "train", "lab", "client"),
    ("cli", "ray_serve", "__main__"),
)
WITHIN = {
    "generate": {"followers"},
    "verify": {"generate"},
    "ranks": {"generate", "followers"},
    "client": {"serve"},
    "ray_serve": {"cli"},
    "__main__": {"cli"},
}
# Words that say nothing as the name of a value that lives longer than three lines: the name is its noun.
NOT_NOUNS = {"one", "found", "own", "known", "whole", "said", "there", "made", "kept", "here"}
# What a folder says about a model, read by the engine too.
IN_THE_ENGINE = {"ditmesh.generate.model_info", "ditmesh.generate.modular"}

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


def layer_of(module: str) -> tuple[int, str]:
    """The number of a module's layer, 0 for the engine, and its room."""
    room = module.split(".")[1] if module.startswith(f"{PACKAGE}.") and module not in IN_THE_ENGINE else ""
    return next(((number, room) for number, rooms in enumerate(LAYERS, 1) if room in rooms), (0, ""))


def against_layers(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Imports from a layer above, or from another room of the same layer that `WITHIN` does not allow."""
    for name, targets in graph.items():
        layer, room = layer_of(name)
        for target in sorted(targets):
            above, other = layer_of(target)
            if above > layer or (above == layer and other not in ("", room, *WITHIN.get(room, ()))):
                yield f"import against the layers: {name} imports {target}"


def names_cuda(tree: ast.Module) -> bool:
    """True if a name, an argument, an import or a string has the word."""
    words = (word for node in ast.walk(tree) for word in vars(node).values())
    return any("cuda" in word for word in words if isinstance(word, str))


def violations() -> Iterator[str]:
    """One line for each, without line numbers, so that a list of them stays valid while files change."""
    files = sorted((SOURCE / PACKAGE).rglob("*.py"))
    names = {".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in names.items()}
    classes: dict[str, list[str]] = defaultdict(list)
    between_files: dict[str, set[str]] = {}
    may_name_cuda = {line.partition(":")[0] for line in CUDA.read_text(encoding="utf-8").splitlines() if line[0] != "#"}
    for name, tree in trees.items():
        file = names[name]
        where = file.relative_to(SOURCE / PACKAGE).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(where)
        if names_cuda(tree) != (where in may_name_cuda):
            yield f"{where} {'is not' if names_cuda(tree) else 'has nothing to do'} in {CUDA.name}"
        for function in complex_functions(tree, file.read_text(encoding="utf-8").splitlines()):
            yield f"complexity above {MOST} without a comment '# complex: why': {where} {function}"
        is_package = file.name == "__init__.py"
        between_files[name] = set(imports(tree, name, is_package, names, late=True))
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
    yield from against_layers(between_files)
    for circle in circles(between_files):
        yield f"circle of imports between files: {' '.join(circle)}"
    yield from above_ceilings()


def line_count(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def definition_lengths(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[int]:
    """Lines of each definition in src, its docstring apart."""
    for file in (SOURCE / PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, kind) and isinstance(node, DEFINITIONS):
                first = node.body[0]
                has_docstring = ast.get_docstring(node) is not None
                docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
                yield (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def nameless_values(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions and the values in them that are called by a word of `NOT_NOUNS` and live longer than three lines."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        lines: dict[str, list[int]] = defaultdict(list)
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            lines[argument.arg].append(function.lineno)
        nodes: list[ast.AST] = [node for node in function.body if not isinstance(node, DEFINITIONS)]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Name):
                lines[node.id].append(node.lineno)
            # Nested functions are looked at by themselves.
            nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, DEFINITIONS)]
        yield from (
            (function.name, name) for name in NOT_NOUNS & lines.keys() if max(lines[name]) - min(lines[name]) > 3
        )


def room_lines() -> dict[str, int]:
    """Lines of each row of the table of ceilings."""
    package = SOURCE / PACKAGE
    files = sorted(package.rglob("*.py"))
    rooms: dict[str, int] = defaultdict(int)
    for file in files:
        parts = file.relative_to(package).parts
        rooms[parts[0] if len(parts) > 1 else "*.py"] += line_count([file])
    rows = {f"src/{room}": lines for room, lines in sorted(rooms.items())}
    rows["src"] = line_count(files)
    rows["engine"] = rows["src"] - sum(
        line_count([place] if place.suffix else place.rglob("*.py"))
        for place in (package / name for name in BESIDE_THE_ENGINE)
        if place.exists()
    )
    page = package / "serve" / "page"
    rows["page"] = line_count(file for file in page.rglob("*") if file.suffix in {".js", ".css", ".html"})
    places = (ROOT / "tests").rglob("*.py"), (ROOT / "rules").rglob("*.py")
    rows["tests"] = line_count([ROOT / "conftest.py", *(file for found in places for file in found)])
    rows["benchmarks"] = line_count((ROOT / "benchmarks").rglob("*.py"))
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    rows["nameless values"] = sum(len([*nameless_values(tree)]) for tree in trees)
    rows["longest class"] = max(definition_lengths(ast.ClassDef))
    rows["longest function"] = max(definition_lengths((ast.FunctionDef, ast.AsyncFunctionDef)))
    return rows


def ceilings() -> dict[str, int]:
    lines = (line for line in CEILINGS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return {name: int(number) for name, number in (line.rsplit(None, 1) for line in lines)}


def above_ceilings() -> Iterator[str]:
    rows, limits = room_lines(), ceilings()
    for name in sorted(rows.keys() | limits.keys()):
        if name not in limits:
            yield f"{name} has no ceiling in {CEILINGS.name}"
        elif name not in rows:
            yield f"{CEILINGS.name} has a ceiling for {name}, which is gone"
        elif rows[name] > limits[name]:
            yield f"{name} has {rows[name]} lines; its ceiling is {limits[name]}"


def print_budget() -> None:
    limits = ceilings()
    for name, lines in room_lines().items():
        print(f"{name:<24}{lines:>8}{limits.get(name, 0):>8}")


def main() -> int:
    if "--budget" in sys.argv:
        print_budget()
    if "--names" in sys.argv:
        for file in sorted((SOURCE / PACKAGE).rglob("*.py")):
            for function, name in nameless_values(ast.parse(file.read_text(encoding="utf-8"))):
                print(f"{file.relative_to(ROOT)} {function} {name}")
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

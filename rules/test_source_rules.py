"""What code that runs on GPUs does not do, held to its syntax: streams of its own, pickles through the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ditmesh

SOURCE = Path(ditmesh.__file__).parent

# Rules, and the files that may do it all the same.
ALLOWED: dict[str, dict[str, str]] = {
    # Everything runs on the current stream: what waits for what is then the order of the program.
    "a stream of its own": {},
    # Only what is pinned is copied behind the host's back, and who reads it has to wait.
    "a copy that is not waited for": {
        "train/staging.py": "to a device, from pinned memory that torch keeps until the copy is done"
    },
    # torch pickles objects through the device where the group has NCCL alone, and the host waits.
    "objects over a process group": {"comm/objects.py": "the one place: carried by gloo"},
    # NCCL's would be for the world's communicator, which a job may not have otherwise; the host waits for the device.
    "a barrier of all ranks": {
        "lab/study/running.py": "before a measurement",
        "verify/runs.py": "before a measurement",
    },
    # Its handle keeps the buffers, and somebody has to wait.
    "a collective whose work is dropped": {},
    # Of a tensor on a GPU it raises.
    "numpy of what may be on a device": {
        "core/digests.py": "a generator's state is on the host on every device",
        "serve/worker/previews.py": "the colours were brought to the host",
        "lab/study/running.py": "read from a file",
    },
}
COLLECTIVES = {"all_gather_object", "broadcast_object_list", "scatter_object_list", "gather_object", "send_object_list"}


def offences(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Rules that a file breaks, and the lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (node.attr == "Stream" and owner.startswith("torch")) or node.attr == "record_stream":
                yield "a stream of its own", node.lineno
            if node.attr in COLLECTIVES and owner in ("dist", "torch.distributed"):
                yield "objects over a process group", node.lineno
        if isinstance(node, ast.Call):
            named = {word.arg: word.value for word in node.keywords}
            if "non_blocking" in named:
                yield "a copy that is not waited for", node.lineno
            if ast.unparse(node.func).endswith("dist.barrier") and not node.args and "group" not in named:
                yield "a barrier of all ranks", node.lineno
            reads = isinstance(node.func, ast.Attribute) and node.func.attr == "numpy" and not node.args
            if reads and not _on_host(node.func):
                yield "numpy of what may be on a device", node.lineno
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            named = {word.arg: word.value for word in node.value.keywords}
            if isinstance(named.get("async_op"), ast.Constant) and named["async_op"].value is True:  # type: ignore
                yield "a collective whose work is dropped", node.lineno


def _on_host(value: ast.AST) -> bool:
    """Whether a chain of methods goes through the host."""
    while isinstance(value, (ast.Call, ast.Attribute)):
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Attribute) and value.func.attr == "cpu":
                return True
            if any(isinstance(given, ast.Constant) and given.value == "cpu" for given in value.args):
                return True
            value = value.func
        else:
            value = value.value
    return False


def test_the_source_keeps_the_rules():
    found = {rule: set() for rule in ALLOWED}
    for path in SOURCE.rglob("*.py"):
        for rule, line in offences(ast.parse(path.read_text(encoding="utf-8"))):
            found[rule].add(path.relative_to(SOURCE).as_posix())
            assert path.relative_to(SOURCE).as_posix() in ALLOWED[rule], f"{path}:{line}: {rule}"
    # No file is listed that does nothing of the kind.
    assert found == {rule: set(files) for rule, files in ALLOWED.items()}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("side = torch.cuda.Stream()", "a stream of its own"),
        ("x.record_stream(side)", "a stream of its own"),
        ("x.to(device, non_blocking=True)", "a copy that is not waited for"),
        ("dist.all_gather_object(every, x, group=group)", "objects over a process group"),
        ("dist.barrier()", "a barrier of all ranks"),
        ("dist.barrier(group=control)", None),
        ("dist.all_reduce(x, async_op=True)", "a collective whose work is dropped"),
        ("work = dist.all_reduce(x, async_op=True)", None),
        ("x.numpy()", "numpy of what may be on a device"),
        ("x.cpu().float().numpy()", None),
        ('x.to("cpu", torch.float32).numpy()', None),
    ],
)
def test_a_planted_line_is_found(line, rule):
    assert [name for name, _ in offences(ast.parse(line))] == ([] if rule is None else [rule])

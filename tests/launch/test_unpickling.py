"""No reader of src/ unpickles what others have written: the code is read, and the exceptions are listed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SRC = Path(__file__).parents[2] / "src" / "ditmesh"

# Readers of one's own ranks: file, function, why what is unpickled is no data of others. A rank and its owner are
# processes that one of them has started, over a socket pair or Ray's own channel; ranks of several hosts are the
# process group of one job, whose network has to be trusted (docs/hosts.md).
OWN = "a message between an owner and the ranks that it has started"
GROUP = "a message between the ranks of one process group"
EXCEPTIONS = {
    ("followers/calls.py", "_as_error", "pickle.loads"): GROUP,
    ("followers/followers.py", "_follow_call", "pickle.loads"): GROUP,
    ("followers/messages.py", "take_call", "pickle.loads"): GROUP,
    ("followers/messages.py", "_StandInUnpickler", "pickle.Unpickler"): f"{GROUP}, or {OWN}",
    ("launch/messages.py", "RankChannel.reply", "pickle.loads"): OWN,
    ("launch/failures.py", "of_exception", "pickle.loads"): "what this process has pickled a line before",
    ("launch/failures.py", "rank_failed", "pickle.loads"): OWN,
    ("launch/pool.py", "RankPool._hear", "pickle.loads"): OWN,
    ("launch/rank.py", "_answer", "pickle.loads"): OWN,
    ("launch/ray.py", "RayRanks._next", "pickle.loads"): OWN,
    ("launch/ray.py", "_Rank._answer", "pickle.loads"): OWN,
    ("launch/ray.py", "_Report.reply", "pickle.loads"): OWN,
    ("ranks/handle.py", "Ranks._outcomes", "pickle.loads"): OWN,
    ("ranks/rank.py", "outcome", "pickle.loads"): OWN,
    ("strategies/inputs.py", "AgreedInputs._received", "pickle.loads"): GROUP,
}
# Of checkpoints in the format of torch: what is in them is checked before it is read, or read with a list of names.
CHECKPOINTS = {
    ("train/checkpoints/checkpoint.py", "Checkpoints.load", "torch.distributed.checkpoint.state_dict_loader.load"),
}

# Where ranks exchange objects, which torch pickles: files of which every call is a message of one process group.
COLLECTIVES = {
    "comm/grid.py",
    "comm/hosts.py",
    "comm/link.py",
    "comm/objects.py",
    "comm/shared.py",
    "engine/auto.py",
    "engine/engine.py",
    "engine/first_call.py",
    "generate/one_copy.py",
    "generate/run.py",
    "generate/shares.py",
    "memory/check.py",
    "serve/worker/rendezvous.py",
    "launch/torchrun.py",
    "strategies/checked.py",
    "strategies/determinism.py",
    "strategies/inputs.py",
    "strategies/same_latents.py",
    "train/uneven.py",
    "train/data/agreement.py",
    "train/checkpoints/checkpoint.py",
    "train/data/encoded.py",
    "train/optimizer/update.py",
    "train/gradients/ordered.py",
    "train/gradients/speeds.py",
    "train/memory_check.py",
    "train/run.py",
    "train/state.py",
}

MODULES = ("pickle", "cloudpickle", "dill", "marshal", "joblib", "shelve", "cPickle", "_pickle")
READS = {"load", "loads", "Unpickler", "open"}
OBJECTS = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$|^gather_objects$")


class Reader(ast.NodeVisitor):
    """Collects what unpickles in a file, with the function around it."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.place: list[str] = []
        self.found: list[tuple[str, str]] = []

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            self.names[one.asname or one.name.partition(".")[0]] = (
                one.name if one.asname else one.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for one in node.names:
            self.names[one.asname or one.name] = f"{node.module}.{one.name}"

    def _inside(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.place.append(node.name)
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if self._name(base).endswith(".Unpickler"):
                self.found.append((".".join(self.place), self._name(base)))
        self.generic_visit(node)
        self.place.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _inside  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func)
        given = {word.arg: word.value for word in node.keywords}
        said = {key: value.value if isinstance(value, ast.Constant) else "?" for key, value in given.items()}
        module, _, last = name.rpartition(".")
        if self._bad(name, module, last, said):
            self.found.append((".".join(self.place), name))
        self.generic_visit(node)

    def _bad(self, name: str, module: str, last: str, said: dict[Any, Any]) -> bool:
        return (
            (module in MODULES and last in READS)
            or (name == "torch.load" and said.get("weights_only") is not True)
            or (name in ("numpy.load", "np.load") and said.get("allow_pickle", False) is not False)
            or (name in ("pandas.read_pickle", "torch.jit.load", "torch.package.PackageImporter"))
            or (module == "yaml" and last in ("load", "load_all", "unsafe_load", "full_load"))
            or (module.startswith("torch.distributed.checkpoint") and last in ("load", "load_state_dict"))
            or (last in ("FileSystemReader",) and "checkpoint" in module)
            or said.get("trust_remote_code", False) is not False
            or said.get("use_safetensors", True) is False
        )

    def visit_Attribute(self, node: ast.Attribute) -> None:
        # Also where they are passed on and not called.
        if OBJECTS.search(node.attr):
            self.found.append((".".join(self.place), "object collective"))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if OBJECTS.search(node.id):
            self.found.append((".".join(self.place), "object collective"))

    def _name(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._name(node.value)}.{node.attr}"
        return self.names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def found(code: str) -> list[tuple[str, str]]:
    """What unpickles in some code: the function, and what it calls."""
    reader = Reader()
    reader.visit(ast.parse(code))
    return reader.found


def readers() -> Iterator[tuple[str, str, str]]:
    """What unpickles in src/: file, function, call."""
    for path in sorted(SRC.rglob("*.py")):
        for place, what in found(path.read_text(encoding="utf-8")):
            yield path.relative_to(SRC).as_posix(), place, what


def test_nothing_of_others_is_unpickled():
    there = set(readers())
    pickles = {one for one in there if one[2] != "object collective"}
    assert pickles - EXCEPTIONS.keys() - CHECKPOINTS == set(), "use safetensors or JSON, or list the reason"
    assert EXCEPTIONS.keys() - pickles == set(), "no longer there"
    assert {file for file, _, what in there if what == "object collective"} == COLLECTIVES


@pytest.mark.parametrize(
    ("code", "unpickles"),
    [
        ("import torch as t\nt.load(f, weights_only=flag)", True),
        ("from torch import load\nload(f)", True),
        ("import pickle as p\np.Unpickler(f).load()", True),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", True),
        ("import torch.distributed.checkpoint as dcp\ndcp.load(state)", True),
        ("Pipeline.from_pretrained(p, trust_remote_code=True)", True),
        ("from ditmesh.comm.objects import gather_objects\ngather_objects(a)", True),
        ("import torch\ntorch.load(f, weights_only=True)", False),
        ("import json\njson.load(f)", False),
    ],
)
def test_the_reader_finds_what_unpickles(code: str, unpickles: bool):
    assert bool(found(code)) is unpickles

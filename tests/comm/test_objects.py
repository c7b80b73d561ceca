"""Python objects between ranks travel over gloo, whatever carries the tensors."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ditmesh
from ditmesh.comm import backends, objects

SOURCE = Path(ditmesh.__file__).parent
# The one file that may; what is exchanged there is exchanged over gloo.
ALLOWED = {SOURCE / "comm" / "objects.py"}


def objects_sent(text: str) -> list[int]:
    """Lines of a program that use a collective of objects of torch's."""
    names = {name for name in dir(dist) if re.search(r"_object(_list)?$", name)}
    modules, lines = {"dist", "distributed_c10d"}, []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.asname and "distributed" in alias.name}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            lines += [node.lineno for alias in node.names if alias.name in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            owner = node.value
            of = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            lines += [node.lineno] if of in modules | {"distributed"} else []
    return lines


def test_collectives_of_objects_are_called_in_one_file():
    found = {path: objects_sent(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {path for path, lines in found.items() if lines} == ALLOWED


def test_planted_calls_are_found():
    for text in (
        "dist.all_gather_object(a, b)",
        "import torch.distributed as d\nd.broadcast_object_list(a)",
        "torch.distributed.gather_object(a)",
        "from torch.distributed import scatter_object_list",
    ):
        assert objects_sent(text)
    assert not objects_sent("gather_objects(a)\nlink.all_gather_object(a)\nlink.broadcast_object(a)")


def without_gloo() -> tuple[list[Any], list[Any], int, bool]:
    """What objects do in a job that has NCCL alone; collectives of objects over its groups raise."""
    world, asked = dist.group.WORLD, backends.backend_of
    gloo: list[dist.ProcessGroup] = []

    def backend_of(group: dist.ProcessGroup | None, device: Any) -> str:
        """As of NCCL alone, but for groups made for the host."""
        if group is not None and any(group is one for one in gloo):
            return asked(group, device)
        return "" if torch.device(device).type == "cpu" else "nccl"

    def new_group(*args: Any, **named: Any) -> Any:
        made = new(*args, **named)
        if named.get("backend") == "gloo":
            gloo.append(made)
        return made

    def refuse(collective: Any) -> Any:
        def call(*args: Any, group: Any = None, **named: Any) -> Any:
            assert backend_of(group, "cpu") == "gloo", "objects over NCCL"
            return collective(*args, group=group, **named)

        return call

    new = dist.new_group
    with (
        mock.patch.object(objects, "backend_of", backend_of),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "all_gather_object", refuse(dist.all_gather_object)),
        mock.patch.object(dist, "broadcast_object_list", refuse(dist.broadcast_object_list)),
    ):
        rank = dist.get_rank()
        every = objects.gather_objects({"rank": rank})
        every += objects.gather_objects(rank + 10)
        sent = [objects.broadcast_object(("from", rank), source) for source in (0, 1)]
        try:
            dist.all_gather_object([None, None], rank)
            refused = False
        except AssertionError:
            refused = True
    made = len(gloo)
    for group in gloo:
        dist.destroy_process_group(group)
    assert world is not None
    objects._beside.pop(world, None)
    return every, sent, made, refused


def test_a_job_that_has_nccl_alone_gets_one_group_for_objects(ranks):
    for every, sent, made, refused in ranks(2).run(without_gloo):
        assert every == [{"rank": 0}, {"rank": 1}, 10, 11]
        assert sent == [("from", 0), ("from", 1)]
        assert made == 1
        assert refused

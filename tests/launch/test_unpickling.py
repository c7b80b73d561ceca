"""No reader of src/ unpickles what others have written: the code is read, and the exceptions are listed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "ditmesh"

# A rank and its owner are processes that one of them has started, over a socket pair or Ray's own channel; ranks of
# several hosts are the process group of one job, whose network has to be trusted (docs/hosts.md).
OWN = "a message between an owner and the ranks that it has started, or between the ranks of one process group"
# Files with places that unpickle, how many, and why what they unpickle is no data of others.
EXCEPTIONS = {
    "followers/followers.py": (1, OWN),
    "followers/messages.py": (3, OWN),
    "generate/components.py": (1, "a sentence that names the option"),
    "launch/failures.py": (2, OWN),
    "launch/messages.py": (2, OWN),
    "launch/pool.py": (1, OWN),
    "launch/rank.py": (1, OWN),
    "launch/ray.py": (3, OWN),
    "ranks/handle.py": (1, OWN),
    "ranks/rank.py": (1, OWN),
    "strategies/inputs.py": (1, OWN),
    # Of checkpoints in the format of torch what is in them is checked before it is read.
    "train/checkpoints/checkpoint.py": (1, "its metadata are looked at first"),
}
UNPICKLES = re.compile(
    r"\b(?:pickle|cloudpickle|dill|marshal|joblib|shelve)\.(?:loads?|Unpickler|open)\b"
    r"|\b(?:pickle|cloudpickle|torch) import [^\n]*\b(?:loads?|Unpickler)\b|import (?:\w*pickle|torch|numpy) as (?!np)"
    r"|\btorch\.load\((?![^()]*weights_only=True)|\ballow_pickle=(?!False)|\btrust_remote_code=(?!False)"
    r"|\buse_safetensors=False|\bread_pickle\b|\bjit\.load\b|\bPackageImporter\b|\byaml\.(?:unsafe_|full_)?load"
    r"|\bdcp\.load\b|\bstate_dict_loader\b"
)


def test_nothing_of_others_is_unpickled():
    found: Counter[str] = Counter()
    for path in SRC.rglob("*.py"):
        found[path.relative_to(SRC).as_posix()] += len(UNPICKLES.findall(path.read_text("utf-8")))
    assert +found == {file: count for file, (count, _) in EXCEPTIONS.items()}, "use safetensors or JSON, or list why"


@pytest.mark.parametrize(
    ("code", "unpickles"),
    [
        ("torch.load(f, weights_only=flag)", True),
        ("from torch import load", True),
        ("import pickle as p", True),
        ("pickle.Unpickler(f).load()", True),
        ("np.load(f, allow_pickle=True)", True),
        ("import torch.distributed.checkpoint as dcp\ndcp.load(state)", True),
        ("Pipeline.from_pretrained(p, trust_remote_code=True)", True),
        ("import torch\ntorch.load(f, weights_only=True)", False),
        ("import json\njson.load(f)", False),
    ],
)
def test_the_reader_finds_what_unpickles(code: str, unpickles: bool):
    assert bool(UNPICKLES.search(code)) is unpickles

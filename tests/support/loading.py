"""What the tests of loading in slices run on every rank."""

from __future__ import annotations

import shutil

import diffusers
import torch
from safetensors.torch import load_file, save_file

import ditmesh
from ditmesh import zoo
from support.models import relative_error
from support.pipelines import MAKERS, arguments, draw
from support.tensor import bits, same_bits


def absent(name):
    """The parts that these pipelines do not have, as from_pretrained wants to be told."""
    return {key: None for key, part in MAKERS[name]().components.items() if part is None}


def loaded(name, folder, config, options):
    """A pipeline loaded in slices against one loaded whole: pictures, then all bits after restore."""
    options = {**absent(name), **options}
    whole = diffusers.DiffusionPipeline.from_pretrained(folder, **options)
    truth = draw(whole, arguments(name, [1, 2]))
    ditmesh.parallelize(whole, config)
    parallel = draw(whole, arguments(name, [1, 2]))
    ditmesh.restore(whole)
    sliced = ditmesh.load(folder, config, **options)
    held = sum(p.untyped_storage().nbytes() for p in sliced.transformer.parameters())
    value = draw(sliced, arguments(name, [1, 2]))
    ditmesh.restore(sliced)
    return {
        "error": relative_error(value.float(), truth.float()),
        "equal": torch.equal(value, parallel),
        "held": held / sum(p.untyped_storage().nbytes() for p in whole.transformer.parameters()),
        "bits": same_bits(bits(whole.transformer), bits(sliced.transformer)),
        "dtypes": [p.dtype for p in whole.transformer.parameters()]
        == [p.dtype for p in sliced.transformer.parameters()],
        "buffers": all(
            torch.equal(a, b) and a.dtype == b.dtype
            for (_, a), (_, b) in zip(
                whole.transformer.named_buffers(), sliced.transformer.named_buffers(), strict=True
            )
        ),
    }


def damaged(model, component, folder):
    """A copy of an embedded pipeline of which a component lacks one weight, and that one's name."""
    shutil.copytree(zoo.path(model), folder, ignore=shutil.ignore_patterns("*.png", "README.md"))
    (file,) = (folder / component).glob("*.safetensors")
    stored = load_file(file)
    lost = sorted(stored)[len(stored) // 2]
    save_file({name: value for name, value in stored.items() if name != lost}, file, metadata={"format": "pt"})
    return lost

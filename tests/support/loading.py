"""What the tests of loading in slices run on every rank."""

from __future__ import annotations

import diffusers
import torch

import ditmesh
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

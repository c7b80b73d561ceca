"""Every pipeline of diffusers with a transformer: the same pictures from two ranks, or one sentence.

A few of them run always, all of them under the `matrix` marker; what comes of those is written to docs/pipelines.md
(``pytest tests/test_every_pipeline.py -m matrix --write-support``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import ditmesh
from support.exam import Exam, images, others, videos

EXAMS: dict[str, Exam] = {**images.EXAMS, **videos.EXAMS, **others.EXAMS}
TOLERANCE = 1e-4  # relative, float32
CONFIGS = {"ulysses=2": {"ulysses": 2}, "ring=2": {"ring": 2}, "cfg=2": {"cfg": 2}, "data=2": {"data": 2}}

# Some that run always.
ALWAYS = [
    "FluxControlNetImg2ImgPipeline",  # lists of residuals; fewer steps than asked for
    "StableDiffusion3PAGPipeline",  # attention processors that a pipeline puts in for a call
    "QwenImageModularPipeline PerturbedAttentionGuidance",  # a function mode around attention
    "QwenImage21Pipeline",  # objects that keep keys
    "SkyReelsV2DiffusionForcingPipeline frames a second",
    "Cosmos3OmniPipeline",  # causal attention; the prompt comes first
]


def tensors(result: Any) -> list[torch.Tensor]:
    """All numbers of a pipeline's output."""
    if isinstance(result, torch.Tensor):
        return [result.float()]
    if isinstance(result, np.ndarray):
        return [torch.from_numpy(result).float()]
    if isinstance(result, PIL.Image.Image):
        return [torch.from_numpy(np.asarray(result).copy()).float()]
    items = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def call(exam: Exam, pipe: Any, prompts: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(0)  # for noise that the pipeline takes from nowhere else
    with torch.no_grad():
        return tensors(pipe(**exam.call(prompts)))


def largest_error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Relative to the largest number of each tensor; a missing tensor or another shape is an error of 1."""
    if [one.shape for one in found] != [one.shape for one in truth] or not truth:
        return 1.0
    pairs = zip(found, truth, strict=True)
    errors = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs if b.numel()]
    return max(1.0 if error != error else error for error in errors)


def outcomes(name: str) -> dict[str, dict[str, Any]]:
    """By configuration, the largest relative error of two calls of the pipeline, or the sentence that refuses them."""
    exam = EXAMS[name]
    pipe = exam.make()
    pipe.set_progress_bar_config(disable=True)
    truths = {1: call(exam, pipe, [1])}
    # The prompt counts.
    assert largest_error(call(exam, pipe, [2]), truths[1]) > 10 * TOLERANCE
    if exam.several:
        truths[2] = call(exam, pipe, [1, 2])
    found: dict[str, dict[str, Any]] = {}
    for key, config in CONFIGS.items():
        if (key == "cfg=2" and not exam.guidance) or (key == "data=2" and not exam.several):
            continue
        prompts = [1, 2] if key == "data=2" else [1]
        truth = truths[len(prompts)]
        try:
            with ditmesh.parallelized(pipe, config):
                errors = [largest_error(call(exam, pipe, prompts), truth) for _ in range(2)]
            found[key] = {"error": max(errors)}
        except (ditmesh.LayoutError, ditmesh.InputError, ditmesh.ConfigError) as error:
            found[key] = {"refused": " ".join(str(error).split())}
        assert largest_error(call(exam, pipe, prompts), truth) == 0  # undone to the bit
    return found


def check(results: list[dict[str, dict[str, Any]]], name: str) -> dict[str, dict[str, Any]]:
    """Right on all ranks, or refused on all ranks by the word that stands in the exam."""
    exam, first = EXAMS[name], results[0]
    for key, one in first.items():
        axis = "tokens" if key in ("ulysses=2", "ring=2") else key
        word = exam.refused.get(key, exam.refused.get(axis))
        if "refused" in one:
            assert word is not None, (key, one["refused"])
            assert all(word in other[key].get("refused", "") for other in results), one["refused"]
        else:
            assert word is None, key
            assert max(other[key]["error"] for other in results) <= TOLERANCE, key
    return first


@pytest.mark.parametrize("name", ALWAYS)
def test_right_or_refused(ranks, name):
    check(ranks(2).run(outcomes, name), name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(EXAMS))
def test_every_pipeline(ranks, name):
    check(ranks(2).run(outcomes, name), name)

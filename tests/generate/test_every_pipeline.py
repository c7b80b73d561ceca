"""Every pipeline of diffusers with a transformer: the same pictures from two ranks, or one sentence.

A few of them run always, all of them under the `matrix` marker; what comes of those is written to docs/pipelines.md
(``pytest tests/generate/test_every_pipeline.py -m matrix --write-support``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch

import ditmesh
from ditmesh.layout.forms import WAY_OUT
from support.exam import Exam, images, others, videos

EXAMS: dict[str, Exam] = {**images.EXAMS, **videos.EXAMS, **others.EXAMS}
TOLERANCE = 1e-4  # relative, float32
CONFIGS = {"ulysses=2": {"ulysses": 2}, "ring=2": {"ring": 2}, "cfg=2": {"cfg": 2}, "data=2": {"data": 2}}

# Pipelines without an exam, and why.
LEFT_OUT = {
    "AmusedImg2ImgPipeline": "as AmusedPipeline; not tried",
    "AmusedInpaintPipeline": "as AmusedPipeline; not tried",
    "EasyAnimateControlPipeline": "it passes its own encode_prompt an argument that it does not take",
    "JoyImageEditPlusPipeline": "wants the processor of a Qwen-VL model",
    "RFD4ProteinaPipeline": "makes proteins",
    "StableAudio3AudioToAudioPipeline": "not tried",
    "VQDiffusionPipeline": "its transformer predicts classes of tokens; not tried",
}

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


PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
INTRODUCTION = f"""# Pipelines

This page lists the diffusers pipelines that were tested with ditmesh. Use any of them with `ditmesh.load` or on the
command line:

```text
ditmesh generate "a red fox" --model MODEL --devices 2 --ulysses 2
```

Each pipeline of diffusers {diffusers.__version__} was built from tiny random float32 components, called twice,
on two gloo ranks, and compared with the unmodified pipeline. The figure is the largest relative error of the output;
0 means bit-identical. *refused* means that the call raises an error; its message is below the table. A cell is empty if
the pipeline has no guidance branches, or takes only one prompt.
`pytest tests/generate/test_every_pipeline.py -m matrix --write-support` generates this page.

"""


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[Callable[[str, dict[str, dict[str, Any]]], None]]:
    """``record(name, outcomes)``: one row of the page."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    yield rows.__setitem__
    if not request.config.getoption("--write-support") or not rows:
        return
    lines = [f"| pipeline | {' | '.join(CONFIGS)} |", "|---|" + "---|" * len(CONFIGS)]
    reasons: dict[str, list[str]] = {}
    for name, row in sorted(rows.items()):
        cells = []
        for key in CONFIGS:
            found = row.get(key)
            if found is not None and "refused" in found:
                reasons.setdefault(found["refused"].removesuffix(f"; {WAY_OUT}"), []).append(f"{name} ({key})")
            cells.append("" if found is None else "refused" if "refused" in found else f"{found['error']:.0e}")
        lines.append(f"| {name} | {' | '.join('0' if cell == '0e+00' else cell for cell in cells)} |")
    classes = {name.split()[0] for name in rows}
    right = {n.split()[0] for n, row in rows.items() if all("error" in one for one in row.values())}
    lines += ["", f"{len(right)} of {len(classes)} pipelines are right in every column that they have."]
    lines += ["", "## Error messages", ""]
    lines += [f"* {'; '.join(where)}: {why}" for why, where in sorted(reasons.items(), key=lambda item: item[1])]
    PAGE.write_text(INTRODUCTION + "\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(EXAMS))
def test_every_pipeline(ranks, name, record):
    record(name, check(ranks(2).run(outcomes, name), name))


def test_no_pipeline_is_left_out():
    """All pipelines of diffusers with a transformer have an exam, or a reason why not."""
    found = set()
    for name in dir(diffusers):
        if not name.endswith("Pipeline"):
            continue
        try:
            parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
        except (ImportError, AttributeError, RuntimeError, ValueError):
            # Of a package that is not installed, or that diffusers has given up.
            continue
        if any("transformer" in parameter for parameter in parameters):
            found.add(name)
    assert found - {name.split()[0] for name in EXAMS} == set(LEFT_OUT)

"""Every pipeline of diffusers with a transformer: the same pictures from two ranks, or one sentence.

A few of them run always, all of them under the `matrix` marker; what comes of those is written to docs/pipelines.md
(``pytest tests/generate/test_pipelines.py -m matrix --write-support``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers.guiders import AdaptiveProjectedGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from torch import Tensor

import ditmesh
from support import exam
from support.exam import EXAMS
from support.models import fresh, relative_error
from support.more_pipelines import FAMILIES, arguments, draw
from support.outcome_pages import Rows, page
from support.parity import agreed, largest_error, outcome, tensors

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


def outcomes(name: str) -> dict[str, dict[str, Any]]:
    """By configuration, the largest relative error of two calls of the pipeline, or the sentence that refuses them."""
    case = EXAMS[name]
    pipe = case.make()

    def call(prompts: list[int]) -> list[Tensor]:
        torch.manual_seed(0)  # for noise that the pipeline takes from nowhere else
        return tensors(exam.draw(pipe, case.call(prompts)))

    truths = {1: call([1])}
    # The prompt counts.
    assert largest_error(call([2]), truths[1]) > 10 * TOLERANCE
    if case.several:
        truths[2] = call([1, 2])
    found: dict[str, dict[str, Any]] = {}
    for key, config in CONFIGS.items():
        if (key == "cfg=2" and not case.guidance) or (key == "data=2" and not case.several):
            continue
        prompts = [1, 2] if key == "data=2" else [1]
        found[key] = outcome(pipe, partial(call, prompts), truths[len(prompts)], config)
    return found


def check(results: list[dict[str, dict[str, Any]]], name: str) -> dict[str, dict[str, Any]]:
    """Right on all ranks, or refused on all ranks by the word that stands in the exam."""
    refused, found = EXAMS[name].refused, {}
    for key in results[0]:
        axis = "tokens" if key in ("ulysses=2", "ring=2") else key
        found[key] = agreed([one[key] for one in results], refused.get(key, refused.get(axis)), TOLERANCE)
    return found


@pytest.mark.parametrize("name", ALWAYS)
def test_right_or_refused(ranks, name):
    check(ranks(2).run(outcomes, name), name)


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
`pytest tests/generate/test_pipelines.py -m matrix --write-support` generates this page.

"""


def summary(rows: Rows) -> str:
    classes = {name.split()[0] for (name,) in rows}
    right = {name.split()[0] for (name,), row in rows.items() if all("error" in one for one in row.values())}
    return f"{len(right)} of {len(classes)} pipelines are right in every column that they have."


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    """Of docs/pipelines.md."""
    wanted = request.config.getoption("--write-support")
    with page("pipelines.md", wanted, INTRODUCTION, ["pipeline"], CONFIGS, summary) as rows:
        yield rows


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(EXAMS))
def test_every_pipeline(ranks, name, rows):
    rows[name,] = check(ranks(2).run(outcomes, name), name)


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


# --- guidance that diffusers' guiders compute ----------------------------------------------------------------------


GUIDERS = {
    # Three branches; the third one is the first one without a layer.
    "skip layer": lambda: SkipLayerGuidance(
        guidance_scale=3.0,
        skip_layer_config=LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=False, skip_ff=True),
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
    ),
    # Remembers the predictions of the steps before.
    "projected": lambda: AdaptiveProjectedGuidance(guidance_scale=3.0, adaptive_projected_guidance_momentum=-0.5),
}


def guided(guider: str) -> tuple[float, float]:
    """Error of guidance over two ranks, and what the guidance does to the latents."""
    name = "hunyuan_video_15"
    pipe = FAMILIES[name].make()
    plain = draw(name, pipe, [1], steps=5)
    pipe.guider = GUIDERS[guider]()
    truth = draw(name, pipe, [1], steps=5)
    pipe.guider = GUIDERS[guider]()
    with ditmesh.parallelized(pipe, {"cfg": 2}):
        value = draw(name, pipe, [1], steps=5)
    return relative_error(value, truth), relative_error(plain, truth)


@pytest.mark.parametrize("guider", GUIDERS)
def test_guiders(ranks, guider):
    """A branch that changes the model before its call is not run in another call's place."""
    for error, effect in ranks(2).run(guided, guider):
        assert error < TOLERANCE
        assert effect > 100 * TOLERANCE


# --- decoders ---------------------------------------------------------------------------------------------------------


SMALL = {"block_out_channels": (32,), "down_block_types": ("DownEncoderBlock2D",), "sample_size": 8}
DECODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    # Removes the last noise itself: it is told how much there is in every row.
    "ltx": (
        partial(fresh, "LTX vae removing noise"),
        {"decode_timestep": [0.0, 0.05, 0.1], "decode_noise_scale": 0.025},
    ),
    # Takes the frames of videos as rows, and mixes them.
    "latte": (partial(fresh, "AutoencoderKLTemporalDecoder", **SMALL), {}),
}


def decoded(name: str) -> float:
    """Error of three decoded videos."""
    pipe = FAMILIES[name].make()
    make, more = DECODERS[name]
    pipe.vae = make()

    def videos() -> Tensor:
        return exam.draw(pipe, {**arguments(name, [1, 2, 3]), "output_type": "pt", **more}).frames

    truth = videos()
    assert all(relative_error(truth[row], truth[row - 1]) > 100 * TOLERANCE for row in range(3))
    with ditmesh.parallelized(pipe, {"data": 2}):
        return relative_error(videos(), truth)


@pytest.mark.parametrize("name", DECODERS)
def test_videos_decoded_over_two_ranks(ranks, name):
    for error in ranks(2).run(decoded, name):
        assert error < TOLERANCE

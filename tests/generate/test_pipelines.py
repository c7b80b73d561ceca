"""Every pipeline of diffusers with a transformer: the same pictures from two ranks, or one sentence.

A few of them run always, all of them under the `matrix` marker; what comes of those is written to docs/pipelines.md
(``pytest tests/generate/test_pipelines.py -m matrix --write-support``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import diffusers
import pytest
import torch
from diffusers.guiders import AdaptiveProjectedGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from peft import LoraConfig
from torch import Tensor

import ditmesh
from ditmesh.engine import DENOISERS
from ditmesh.generate.modular import component_names
from support import exam
from support.exam import EXAMS
from support.models import fresh, relative_error
from support.more_pipelines import FAMILIES, arguments, draw
from support.outcome_pages import DOCS, Rows, page
from support.parity import agreed, largest_error, outcome, tensors

TOLERANCE = 1e-4  # relative, float32
CONFIGS = {"ulysses=2": {"ulysses": 2}, "ring=2": {"ring": 2}, "cfg=2": {"cfg": 2}, "data=2": {"data": 2}}

# Pipelines with a transformer and without an exam, and why.
LEFT_OUT = {
    "AmusedImg2ImgPipeline": "as AmusedPipeline; not tried",
    "AmusedInpaintPipeline": "as AmusedPipeline; not tried",
    "EasyAnimateControlPipeline": "it passes its own encode_prompt an argument that it does not take",
    "JoyImageEditPlusPipeline": "wants the processor of a Qwen-VL model",
    "KandinskyPriorPipeline": "as KandinskyV22PriorPipeline; not tried",
    "KandinskyV22PriorEmb2EmbPipeline": "as KandinskyV22PriorPipeline; not tried",
    "RFD4ProteinaPipeline": "makes proteins",
    "SanaWMLTX2Refiner": "wants a Gemma 3 model; not tried",
    "ShapEImg2ImgPipeline": "makes meshes; not tried",
    "ShapEPipeline": "makes meshes; not tried",
    "StableAudio3AudioToAudioPipeline": "not tried",
    "StableCascadePriorPipeline": "its prior is a U-Net",
    "StableUnCLIPPipeline": "diffusers has given it up; not tried",
    "UnCLIPPipeline": "diffusers has given it up; not tried",
    "VQDiffusionPipeline": "its transformer predicts classes of tokens; not tried",
    "WuerstchenPriorPipeline": "its prior is no transformer",
}

# Some that run always.
ALWAYS = [
    "FluxControlNetImg2ImgPipeline",  # lists of residuals; fewer steps than asked for
    "QwenImageModularPipeline PerturbedAttentionGuidance",  # a function mode around attention
    "QwenImage21Pipeline",  # objects that keep keys
    "MiniMaxH3ModularPipeline references",  # text, pictures, sound and video in one sequence; a transformer of its own
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

This page lists all pipelines of diffusers {diffusers.__version__}, modular ones too. Use any of the table with
`ditmesh.load` or on the command line:

```text
ditmesh generate "a red fox" --model MODEL --devices 2 --ulysses 2
```

A modular pipeline is read from the folder that its `save_pretrained` writes, and its own guider sets the guidance.
`parallelize` takes one behind `load_components` and `update_components`.

Each pipeline of the table was built from tiny random float32 components (of a modular pipeline, the blocks that
denoise), called twice, on two gloo ranks, and compared with the unmodified pipeline. The figure is the largest
relative error of the output; 0 means bit-identical. *refused* means that the call raises an error; its message is
below the table. A cell is empty if the pipeline has no guidance branches, or takes only one prompt.
`pytest tests/generate/test_pipelines.py -m matrix --write-support` generates this page.

"""


def wheel() -> Iterator[tuple[str, Any]]:
    """Every pipeline class of diffusers, also those that want a package that is not here."""
    for name in dir(diffusers):
        kind = getattr(diffusers, name)
        whole = isinstance(kind, type) and issubclass(kind, (diffusers.DiffusionPipeline, diffusers.ModularPipeline))
        if (whole or name.endswith("Pipeline")) and name not in ("DiffusionPipeline", "ModularPipeline"):
            yield name, kind


def untested() -> tuple[dict[str, str], list[str]]:
    """The pipelines without an exam: those that may be built, and why they are not; and those that are refused."""
    tested, reasons, refused = {name.split()[0] for name in EXAMS}, dict(LEFT_OUT), []
    for name, kind in wheel():
        if name in tested or name in reasons:
            continue
        if packages := getattr(kind, "_backends", None):
            reasons[name] = f"wants {' and '.join(one for one in packages if find_spec(one) is None)}"
        elif set(DENOISERS) & set(component_names(kind)):
            reasons[name] = "?"
        else:
            refused.append(name)
    return reasons, refused


def summary(rows: Rows) -> str:
    classes = {name.split()[0] for (name,) in rows}
    right = {name.split()[0] for (name,), row in rows.items() if all("error" in one for one in row.values())}
    reasons, refused = untested()
    return f"""{len(right)} of {len(classes)} pipelines are right in every column that they have.

## Pipelines that were not built

{chr(10).join(f"* {name}: {why}" for name, why in sorted(reasons.items()))}

## Pipelines without a Diffusion Transformer

{len(refused)} pipelines of diffusers have none of the components {", ".join(f"`{one}`" for one in DENOISERS)};
most have a U-Net. `parallelize` raises an error for them: {", ".join(sorted(refused))}."""


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


def test_no_pipeline_of_the_wheel_is_missing():
    """Each pipeline class of diffusers stands on the page: tested, refused, or with the reason why it was not built."""
    words = set(re.findall(r"\w+", (DOCS / "pipelines.md").read_text(encoding="utf-8")))
    reasons, refused = untested()
    assert "?" not in reasons.values(), [name for name, why in reasons.items() if why == "?"]
    known, every = {name.split()[0] for name in EXAMS} | set(reasons) | set(refused), {name for name, _ in wheel()}
    assert every <= known
    assert known <= words, sorted(known - words)
    # Of another release of diffusers.
    assert set(LEFT_OUT) <= every


@pytest.mark.parametrize("name", ["StableDiffusionXLModularPipeline", "DreamLitePipeline"])
def test_pipelines_without_a_transformer(name):
    assert name in untested()[1]
    kind = getattr(diffusers, name)
    pipe = kind() if issubclass(kind, diffusers.ModularPipeline) else exam.build(kind)
    with pytest.raises(ditmesh.InputError, match=f"{name} has no transformer"):
        ditmesh.parallelize(pipe, {})


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


# --- MiniMax-H3 -------------------------------------------------------------------------------------------------------


H3_EXACT = {
    "tensor": {"tensor": 2},
    "gather": {"ring": 2, "exchange": "gather"},
    "pipe": {"pipe": 2},
    "precompute": {"tensor": 2, "precompute": True},
    "shard": {"ulysses": 2, "shard": 2},
    "reproducible": {"ulysses": 2, "reproducible": True},
    # One prompt and no branches: every rank computes the same.
    "cfg": {"cfg": 2},
    "data": {"data": 2},
}
H3_STALE = {"displaced": {"ring": 2, "exchange": "displaced"}, "patches": {"pipe": 2, "patches": 3}}


def h3_axes() -> dict[str, float]:
    """Errors of a video with sound, by axis, with an adapter, in 4 steps as FastH3 takes; of stale steps in 8."""
    case = EXAMS["MiniMaxH3ModularPipeline keyframes"]
    pipe = case.make()
    targets = ["to_q", "to_out.0", "adaln_proj.linear"]
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))

    def call(steps: int) -> list[Tensor]:
        return tensors(exam.draw(pipe, {**case.call([1]), "num_inference_steps": steps}))

    truths, found = {steps: call(steps) for steps in (4, 8)}, {}
    for key, config in {**H3_EXACT, **H3_STALE}.items():
        steps = 8 if key in H3_STALE else 4
        with ditmesh.parallelized(pipe, {**config, "warmup": "fixed(1)"} if key in H3_STALE else config):
            found[key] = largest_error(call(steps), truths[steps])
            modulation = pipe.transformer.transformer_blocks[0].adaln_proj.linear.base_layer
            assert "tensor" not in config or modulation.weight.shape[0] == 432
    return found


def test_minimax_h3_on_every_axis(ranks):
    """Its packed sequence is right where nothing is stale, and close where something is."""
    for found in ranks(2).run(h3_axes):
        assert found["reproducible"] == 0
        assert all(found[key] < 1e-6 for key in H3_EXACT), found
        assert all(1e-6 < found[key] < 1e-2 for key in H3_STALE), found

"""Caches on several ranks: the decisions, and so the pictures, of one device; docs/attention.md has the figures."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import Mock

import pytest

import ditmesh
from ditmesh.core.request import RequestLeft
from ditmesh.strategies.caches import cache_settings
from support.exam import EXAMS, draw
from support.outcome_pages import DOCS
from support.parity import largest_error, tensors

FLUX = "FluxPipeline true guidance"
# A pipeline, and the cache as the setting has it; by axis, whether that enables it, before or after `parallelize`.
CACHES = {
    "First Block Cache": (FLUX, "first-block(0.72)"),
    "MagCache": (FLUX, "mag(mag_ratios=[1.0])"),
    "Pyramid Attention Broadcast": (FLUX, "pyramid(2)"),
    "SeaCache": ("WanPipeline", "sea(0.6)"),
    "TaylorSeer": (FLUX, "taylorseer(3, disable_cache_before_step=2)"),
    "TextKV": ("NucleusMoEImagePipeline", "text-kv"),
}
AXES = {"ulysses": "setting", "ring": "after", "cfg": "setting", "data": "before"}
STEPS = {"num_inference_steps": 8}
DATA, ULYSSES, TILES = {"data": 2}, {"ulysses": 2}, {"ulysses": 2, "reproducible": True}


def on_all_axes(name: str) -> dict[str, Any]:
    """By axis, the error of two requests against one device with the cache, and the calls of attention."""
    exam, setting = CACHES[name]
    pipe, computed = EXAMS[exam].make(), []
    transformer, settings = pipe.transformer, cache_settings(setting, lambda: pipe.current_timestep, 8)

    def requests() -> list[Any]:
        computed.clear()
        return [tensors(draw(pipe, EXAMS[exam].call(two) | STEPS)) for two in ([1, 2], [2, 0])]

    exact = requests()
    last = [module for module in transformer.modules() if "Attention" in type(module).__name__][-1]
    last.register_forward_hook(lambda *_: computed.append(1))
    transformer.enable_cache(settings)
    truth = requests()
    found: dict[str, Any] = {"effect": largest_error(truth[0], exact[0]), "alone": len(computed)}
    transformer.disable_cache()
    for axis, how in AXES.items():
        if how == "before":
            transformer.enable_cache(settings)
        with ditmesh.parallelized(pipe, {axis: 2} | ({"cache": setting} if how == "setting" else {})):
            if how == "after":
                transformer.enable_cache(settings)
            # As a server does that cancels a request.
            leaving = Mock(side_effect=[{}, {}, RequestLeft])
            with pytest.raises(RequestLeft):
                draw(pipe, EXAMS[exam].call([2, 1]) | STEPS | {"callback_on_step_end": leaving})
            found[axis] = max(map(largest_error, requests(), truth)), len(computed)
        if how != "setting":
            transformer.disable_cache()
    assert largest_error(requests()[0], exact[0]) == 0  # undone to the bit
    return found


ALWAYS = ("First Block Cache", "MagCache")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.matrix] * (n not in ALWAYS)) for n in CACHES])
def test_the_image_of_one_device_with_the_same_cache(ranks, name, request):
    worst = dict.fromkeys(AXES, 0.0)
    for found in ranks(2).run(on_all_axes, name):
        assert (found.pop("effect") > 1e-3) == (name != "TextKV")  # which is exact
        alone = found.pop("alone")
        for axis, (error, computed) in found.items():
            assert error < 1e-4
            # Of a derived layout the first call is broken off.
            assert computed == alone or name == "TextKV"
            worst[axis] = max(worst[axis], error)
    row = f"| {name} | {' | '.join('0' if error == 0 else f'{error:.0e}' for error in worst.values())} |"
    page = DOCS / "attention.md"
    text = re.sub(rf"^\| {name} \|.*$", row, page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert row in text
    if request.config.getoption("--write-support"):
        page.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("how", "cache", "exam", "config", "sentence"),
    [
        ("after", "first-block", FLUX, TILES, "tile by tile; disable_cache()"),
        ("before", "sea", "WanPipeline", TILES, "tile by tile"),
        ("setting", "first-block", FLUX, {"pipe": 2, "patches": 2}, "patch by patch"),
        (
            "after",
            "mag(mag_ratios=[1.0])",
            "Flux2Pipeline",
            ULYSSES,
            "transformer_blocks and single_transformer_blocks",
        ),
        ("before", "mag(calibrate=True)", FLUX, ULYSSES, "calibrate on one device"),
        ("setting", "fist-block", FLUX, DATA, "no cache of diffusers; did you mean 'first-block'"),
        ("setting", "first-block('a')", FLUX, DATA, "threshold: input should be a valid number"),
        ("setting", "text-kv", FLUX, DATA, "it finds nothing to leave out; leave cache out"),
        ("setting", "first-block", "SanaPipeline", DATA, "or diffusers has none for it"),
        ("cache-dit", "mag(calibrate=True)", FLUX, DATA, "call cache_dit.disable_cache(...)"),
    ],
)
def test_what_cannot_be_right_is_refused_in_a_sentence(ranks, how, cache, exam, config, sentence):
    for words in ranks(2).run(refused, how, cache, exam, config):
        assert sentence in words


def refused(how: str, cache: str, exam: str, config: dict[str, Any]) -> str:
    pipe = EXAMS[exam].make()
    try:
        if how == "before":
            pipe.transformer.enable_cache(cache_settings(cache))
        with ditmesh.parallelized(pipe, config | ({"cache": cache} if how == "setting" else {})):
            if how == "after":
                pipe.transformer.enable_cache(cache_settings(cache))
            pipe.transformer._is_cached = how == "cache-dit"
            draw(pipe, EXAMS[exam].call([1]))
    except ditmesh.ConfigError as error:
        return str(error)
    return "it ran"

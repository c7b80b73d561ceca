"""PipeFusion: stages, patches and stale keys, on real groups and unmodified pipelines.

Patch shapes are fixed by the number of patches, so that results for a number of patches are compared to the bit
over one, two and four stages; against one device they are compared where they must be equal: with inputs that stay
the same from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch

import ditmesh
from ditmesh.parts.lazy import LazyPatches
from ditmesh.parts.part import whole_of
from ditmesh.strategies.pipefusion import patches
from ditmesh.strategies.pipefusion.pipeline import PipeFusion
from support import more_pipelines
from support.models import MAKERS, RAGGED, inputs, relative_error, sizes, tiny
from support.pipelines import MAKERS as PIPELINES
from support.pipelines import arguments, draw
from support.ruled import RULED
from support.sample import sampled
from support.stale import next_step

TOLERANCE = 1e-5
# Why PipeFusion cannot run them.
REFUSED = {
    "LTX2": "two streams",
    "LTX2 I2V": "two streams",
    "LTX2 STG": "two streams",
    "Sana": "convolution",
    "Latte": "by turns",
}
CLASSES = [name for name in MAKERS if name not in REFUSED]


def flat(output: Any) -> torch.Tensor:
    """Everything a model returned, whole, as one vector."""
    parts = [part for item in output for part in (item if isinstance(item, (list, tuple)) else [item])]
    return torch.cat([whole_of(part).flatten() for part in parts])


def size_of(name: str) -> Any:
    """Two ragged samples; Lumina2, whose text comes before the picture, one."""
    one, two = sizes(name).values()
    return one if name == "Lumina2" else two


def frozen(name: str, config: dict[str, Any], calls: int = 3) -> dict[str, Any]:
    """The same inputs again and again: stale keys are then those of this step."""
    model, made = tiny(name), inputs(name, size_of(name))
    with torch.no_grad():
        truth = flat(model(**made))
        with ditmesh.parallelized(model, {**config, "warmup": "fixed(1)"}):
            values = []
            for _ in range(calls):
                next_step(model)
                values.append(flat(model(**made)))
            log = ditmesh.engine_of(model).staleness.steps
            synchronous = [record.synchronous for record in log]
            moved = {**made, next(iter(made)): _other(next(iter(made.values())))}
            stale = relative_error(flat(model(**moved)), truth)
        again = flat(model(**made))
    return {
        "errors": [relative_error(value, truth) for value in values],
        "synchronous": synchronous,
        "values": values[-1],
        "stale": stale,
        "restored": torch.equal(again, truth),
    }


def _other(value: Any) -> Any:
    return [one.flip(-1) for one in value] if isinstance(value, list) else value.flip(-1)


def frozen_classes(names: list[str], config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: frozen(name, config) for name in names}


@pytest.mark.parametrize("part", sampled(range(3), of=3))
def test_every_class_with_frozen_inputs_equals_one_device(ranks, part):
    """Two stages, three patches, ragged masks; to the bit what one device computes with three patches."""
    names = CLASSES[part::3]
    alone = frozen_classes(names, {"patches": 3})
    for results in ranks(2).run(frozen_classes, names, {"patches": 3, "pipe": 2}):
        for name, result in results.items():
            assert max(result["errors"]) <= TOLERANCE, name
            assert result["synchronous"] == [True, False, False], name
            assert torch.equal(result["values"], alone[name]["values"]), name
            assert result["restored"], name
            # The same comparison with other inputs: the patches were really computed.
            assert result["stale"] > 100 * TOLERANCE, name


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name(name):
    with pytest.raises(ditmesh.ConfigError, match=REFUSED[name]) as error:
        ditmesh.parallelize(tiny(name), {"patches": 2})
    assert type(tiny(name)).__name__ in str(error.value)


def test_samples_with_text_of_different_lengths_before_the_picture():
    model = tiny("Lumina2")
    with (
        torch.no_grad(),
        ditmesh.parallelized(model, {"patches": 2}),
        pytest.raises(ditmesh.InputError, match="different lengths"),
    ):
        model(**inputs("Lumina2", RAGGED))


def test_keys_of_later_patches_are_moved_on_by_half_of_their_latest_change():
    buffer, seen = patches.KVBuffer(), []
    # Step 6 follows a gap, and step 8 an evaluation at the same noise.
    for step, share in ((0, 0.0), (1, 0.0), (2, 0.5), (3, 0.5), (6, 0.5), (7, 0.5), (8, 0.0)):
        buffer.begin_step(step, share)
        if buffer.keys_values is not None:
            seen.append((step, float(buffer.keys_values[0]), float(buffer.keys_values[1])))
        buffer.begin_step(step, share)
        buffer.keys_values = torch.tensor(float(step) ** 2), torch.tensor(-(float(step) ** 2))
    assert [step for step, *_ in seen] == [1, 2, 3, 6, 7, 8]
    assert [key for _, key, _ in seen] == [0.0, 1.0 + 0.5, 4.0 + 1.5, 9.0, 36.0 + 13.5, 49.0]
    assert all(value == -key for _, key, value in seen)


def test_keys_are_moved_on_by_default_but_in_reproducible_mode():
    for settings, moved in (({}, True), ({"predict": "none"}, False), ({"reproducible": True}, False)):
        assert ditmesh.ParallelConfig(patches=4, **settings).predicts_keys is moved
    assert ditmesh.ParallelConfig(patches=4, reproducible=True, predict="linear").predicts_keys


# --- pipelines and samplers ----------------------------------------------------------------------------------------

SAMPLERS = {
    "ddim": lambda: diffusers.DDIMScheduler(clip_sample=False),
    "ddpm": lambda: diffusers.DDPMScheduler(clip_sample=False),
    "dpm++ 2": lambda: diffusers.DPMSolverMultistepScheduler(solver_order=2),
    "dpm++ sde": lambda: diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
    "unipc 2": lambda: diffusers.UniPCMultistepScheduler(solver_order=2),
}
# pipeline -> scheduler in place of its own
DRAWN: dict[str, tuple[str, Any]] = {
    **{f"dit, {sampler}": ("dit", make) for sampler, make in SAMPLERS.items()},
    "sd3, flow euler": ("sd3", None),
    "sd3, flow heun": ("sd3", lambda: diffusers.FlowMatchHeunDiscreteScheduler()),
    "flux, two branches": ("flux", None),
    **{name: (name, None) for name in ("pixart", "wan", "qwen_image", "cogview4", "hunyuan_dit", "mochi", "z_image")},
}


@contextmanager
def counted_flushes() -> Iterator[list[int]]:
    """How often all stages wait for a whole tensor: at the end of a request once, or when it is decoded."""
    assemble, flushes = PipeFusion._assemble, []

    def counted(self: PipeFusion, lazy: LazyPatches) -> torch.Tensor:
        flushes.append(1)
        return assemble(self, lazy)

    with mock.patch.object(PipeFusion, "_assemble", counted):
        yield flushes


def drawn(names: list[str], config: dict[str, Any], steps: int = 5) -> dict[str, tuple[Any, ...]]:
    """Latents, flushes and synchronous steps of pipelines; each draws twice and must draw the same."""
    found = {}
    for name in names:
        family, make = DRAWN[name]
        pipe = PIPELINES[family]() if family in PIPELINES else more_pipelines.FAMILIES[family].make()
        if make is not None:
            pipe.scheduler = make()

        def once(pipe: Any = pipe, family: str = family) -> torch.Tensor:
            # DiT's pipeline lets its scheduler draw from torch's own generator.
            torch.manual_seed(0)
            if family in PIPELINES:
                return draw(pipe, arguments(family, [1, 2], steps=steps))
            return more_pipelines.draw(family, pipe, [1, 2], steps=steps)

        with ditmesh.parallelized(pipe, {"warmup": "fixed(1)", **config}, timeout=60):
            engine = ditmesh.engine_of(pipe)
            with counted_flushes() as flushes:
                latents = once()
            synchronous = [record.synchronous or record.filled > 0 for record in engine.staleness.steps]
            again = once()
        found[name] = (latents, len(flushes), synchronous, torch.equal(latents, again), type(latents) is torch.Tensor)
    return found


@pytest.fixture(scope="module")
def alone() -> Callable[[str], torch.Tensor]:
    """Latents of a pipeline on one device, four patches one after the other."""
    return cache(lambda name: drawn([name], {"patches": 4})[name][0])


@pytest.mark.matrix
def test_unmodified_pipelines_and_samplers(ranks, alone):
    """Two stages draw to the bit what a sweep over the patches on one device draws, and never wait for all patches."""
    for results in ranks(2).run(drawn, list(DRAWN), {"patches": 4, "pipe": 2}):
        for name, (latents, flushes, synchronous, repeats, plain) in results.items():
            assert torch.equal(latents, alone(name)), name
            assert flushes == 1, name
            assert synchronous == [True] + [False] * (len(synchronous) - 1), name
            assert len(synchronous) >= 5, name
            assert (repeats, plain) == (True, True), name


@pytest.mark.matrix
def test_four_stages(ranks, alone):
    names = ["flux, two branches", "hunyuan_dit"]
    for results in ranks(4).run(drawn, names, {"patches": 4, "pipe": 4}):
        for name in names:
            assert torch.equal(results[name][0], alone(name)), name


def test_the_number_of_patches_decides(alone):
    """The control: other patches, or other warm-up, draw something else."""
    name = "sd3, flow euler"
    assert not torch.equal(drawn([name], {"patches": 3})[name][0], alone(name))
    assert not torch.equal(drawn([name], {"patches": 4, "warmup": "fixed(2)"})[name][0], alone(name))


def test_the_first_step_is_synchronous_whatever_the_policy_says():
    """Patches of a stale step need the keys of a step before."""
    name, config = "sd3, flow euler", {"patches": 4, "warmup": "fixed(0)"}
    assert torch.equal(drawn([name], config)[name][0], drawn([name], {**config, "warmup": "fixed(1)"})[name][0])


def test_all_synchronous_is_exact(ranks):
    pipe = PIPELINES["flux"]()
    truth = draw(pipe, arguments("flux", [1, 2], steps=5))
    config = {"patches": 4, "pipe": 2, "warmup": "fixed(5)"}
    for results in ranks(2).run(drawn, ["flux, two branches"], config):
        assert relative_error(results["flux, two branches"][0], truth) <= TOLERANCE


def one_row_of_text(config: dict[str, Any]) -> torch.Tensor:
    """Three images of one prompt that was embedded once: Flux's blocks give it the rows of the images."""
    pipe, generator = PIPELINES["flux"](), torch.Generator().manual_seed(0)
    made = arguments("flux", [1], num_images_per_prompt=3, generator=generator)
    with ditmesh.parallelized(pipe, config, timeout=60) if config else nullcontext():
        return draw(pipe, made)


def test_one_row_of_text_for_several_images(ranks):
    truth, stale = one_row_of_text({}), one_row_of_text({"patches": 2, "warmup": "fixed(1)"})
    for exact in ranks(2).run(one_row_of_text, {"pipe": 2, "warmup": "fixed(4)"}):
        assert relative_error(exact, truth) <= TOLERANCE
    for patched in ranks(2).run(one_row_of_text, {"pipe": 2, "warmup": "fixed(1)"}):
        assert torch.equal(patched, stale)


class Rescaling:
    """A callback that needs all patches, as guidance_rescale does in the pipelines that have it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        if step % 2:
            latents = given["latents"]
            self.seen.append(float(latents.std()))
            given["latents"] = latents / latents.std()
        return given


def with_callback(config: dict[str, Any]) -> tuple[torch.Tensor, int, list[float]]:
    pipe, callback = PIPELINES["sd3"](), Rescaling()
    with ditmesh.parallelized(pipe, {"warmup": "fixed(1)", **config}, timeout=60):
        with counted_flushes() as flushes:
            latents = draw(pipe, arguments("sd3", [1, 2], steps=5, callback_on_step_end=callback))
        return latents, len(flushes), callback.seen


def test_what_needs_the_whole_picture_waits_for_it(ranks):
    """Exactly one wait in each of the two steps whose latents the callback looks at, and one at the end."""
    latents, flushes, seen = with_callback({"patches": 4})
    assert (flushes, len(seen)) == (3, 2)
    for other, count, numbers in ranks(2).run(with_callback, {"patches": 4, "pipe": 2}):
        assert torch.equal(other, latents)
        assert (count, numbers) == (3, seen)


# A rank that is behind hears of the other's failure before it comes to its own, and gives up what it waits for. Over
# gloo what the other rank had sent before still arrives.
ENDED = (KeyError, ditmesh.PeerError) if RULED else KeyError


def failing(rank: int) -> bool:
    """A request that a callback ends in the middle, on all ranks; the next one draws what it always draws."""
    pipe = PIPELINES["flux"]()

    def stop(*args: Any) -> Any:
        if args[1] == 3:
            raise KeyError("enough")
        return {}

    with ditmesh.parallelized(pipe, {"pipe": 2, "patches": 4, "warmup": "fixed(1)"}, timeout=60):
        first = draw(pipe, arguments("flux", [1, 2], steps=5))
        with pytest.raises(ENDED):
            draw(pipe, arguments("flux", [3, 4], steps=5, callback_on_step_end=stop))
        return torch.equal(draw(pipe, arguments("flux", [1, 2], steps=5)), first)


def test_a_request_that_fails_leaves_nothing_behind(ranks):
    assert ranks(2).run(failing, 0) == [True, True]


# --- other axes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "name"), sampled(["cfg", "data"], ["flux, two branches", "sd3, flow euler"], of=2))
def test_with_rows_and_branches_shared(ranks, axis, name):
    # Branches run ahead from the second step on: one of their own, which has to be synchronous, too.
    config = {"patches": 4, "warmup": "fixed(2)"}
    truth = drawn([name], config)[name][0]
    for results in ranks(4).run(drawn, [name], {**config, "pipe": 2, axis: 2}):
        latents, flushes, *_ = results[name]
        # Rows run by themselves: other shapes, other last bits.
        assert relative_error(latents, truth) <= TOLERANCE
        assert flushes == 1


def test_branches_get_a_synchronous_step_when_they_are_shared_out(ranks):
    """With one synchronous step asked for, the step in which the branches part is another one, on all ranks alike."""
    name = "flux, two branches"
    truth = drawn([name], {"patches": 4, "warmup": "fixed(2)"})[name][0]
    for results in ranks(4).run(drawn, [name], {"patches": 4, "pipe": 2, "cfg": 2}):
        latents, flushes, synchronous, *_ = results[name]
        assert relative_error(latents, truth) <= TOLERANCE
        assert (flushes, synchronous) == (1, [True, True, False, False, False])


# --- sequence ranks inside a stage ---------------------------------------------------------------------------------


CUT_AGAIN = ["DiT", "PixArt", "SD3", "Flux", "Flux2", "HunyuanVideo", "QwenImage", "Chroma"]


@pytest.mark.parametrize(("axis", "name"), sampled(["ulysses", "ring"], CUT_AGAIN, of=5))
def test_every_patch_on_several_ranks(ranks, axis, name):
    """A patch is cut again over the ranks of its stage; the order of keys is that of one device, patch by patch."""
    alone = frozen(name, {"patches": 3})
    for result in ranks(4).run(frozen, name, {"patches": 3, "pipe": 2, axis: 2}):
        assert max(result["errors"]) <= TOLERANCE
        assert abs(result["stale"] - alone["stale"]) <= TOLERANCE
        assert result["restored"]


# --- messages --------------------------------------------------------------------------------------------------------


def traffic(size: Any) -> dict[str, int]:
    """Bytes that this rank sends in one stale step of Flux."""
    model, made = tiny("Flux"), inputs("Flux", size, masks=False)
    with torch.no_grad(), ditmesh.parallelized(model, {"pipe": 2, "patches": 4, "warmup": "fixed(1)"}):
        ditmesh.engine_of(model).begin_request(steps=3)
        for _ in range(2):
            next_step(model)
            output = model(**made)[0]
        counters = ditmesh.engine_of(model).mesh.traffic
        counters.reset()
        next_step(model)
        output = model(**made)[0]
        sent = dict(counters.bytes_sent)
        assert isinstance(output, LazyPatches)
        output.whole()
        return sent


def test_bytes_of_a_step(ranks):
    """All tokens once through the boundary (text once, not once a patch), all of the prediction once back."""
    first, last = ranks(2).run(traffic, RAGGED)
    assert first == {"pipe": 4 * RAGGED.batch * (RAGGED.image + RAGGED.text) * 128}
    assert last == {"pipe_back": 4 * RAGGED.batch * RAGGED.image * 16}

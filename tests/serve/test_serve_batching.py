"""Steps of several requests as one batch: every picture is the one that is drawn alone, on unmodified pipelines."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

import ditmesh
from ditmesh import zoo
from ditmesh.config import ParallelConfig
from ditmesh.core.digests import weights_fingerprint
from ditmesh.core.files import digest_of_file
from ditmesh.errors import RankFailed
from ditmesh.generate.model_info import find_model
from ditmesh.generate.outputs import outputs_of
from ditmesh.generate.receipt import read_receipt
from ditmesh.launch import RankPool
from ditmesh.recipe import RECIPE, keeps_between_steps
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.worker import worker
from ditmesh.serve.worker.batching import Batcher
from ditmesh.serve.worker.loaded import LoadedModel
from ditmesh.serve.worker.previews import LatentColours, preview_jpeg
from ditmesh.serve.worker.protocol import (
    Beat,
    Cancel,
    Cancelled,
    Finished,
    ModelFailed,
    ModelReady,
    Preview,
    TaskFailed,
    TaskStepped,
)
from support.batching import (
    STEPS,
    Owner,
    alone,
    at_once,
    deadlines_of_loaded,
    of,
    picture,
    pipeline,
    pixels,
    save_lora,
    staggered,
    task,
)
from support.pipelines import MAKERS

TOLERANCE = 1e-4  # after some steps; float32
EMOJI = ModelSpec("emoji", str(zoo.path()))
PROMPTS = ["a red apple", "a green frog", "a yellow star", "a blue fish"]


def spec(**config: Any) -> ModelSpec:
    more = {name: config.pop(name) for name in ("together", "loras") if name in config}
    return ModelSpec("emoji", str(zoo.path()), ParallelConfig(**config), **more)


# --- calls that are joined ---------------------------------------------------------------------------------------

IN_THE_MATRIX = [
    pytest.param(name, branches, config, marks=pytest.mark.matrix)
    for name, branches in (("wan", 2), ("dit", 1))
    for config in ({}, {"ulysses": 2}, {"cfg": 2}, {"data": 2})
]


@pytest.mark.parametrize(("name", "branches", "config"), [("dit", 1, {}), ("wan", 2, {"ulysses": 2}), *IN_THE_MATRIX])
def test_requests_that_join_at_a_step_are_drawn_as_alone(ranks, name, branches, config):
    """A call a branch and step for all that run, not for each; Wan calls its transformer for every branch."""
    for found in ranks(2 if config else 1).run(staggered, name, config, [6, 4, 5]):
        assert found["why"] == []
        assert max(found["errors"]) < TOLERANCE
        assert found["others"] > 100 * TOLERANCE
        assert found["calls"] <= branches * 9
        assert found["restored"] == 0


@pytest.mark.matrix
def test_requests_have_the_same_bits_as_alone_in_reproducible_mode(ranks):
    for found in ranks(2).run(staggered, "dit", {"ulysses": 2, "reproducible": True}, [4, 3], "parallel"):
        assert found["why"] == []
        assert found["same"] == [True, True]
        assert found["others"] > 100 * TOLERANCE
        assert found["calls"] <= 5


# --- the loop of a server's ranks --------------------------------------------------------------------------------


def busy(message: Any, send: Any) -> None:
    """A script: a request, and another one after each of its steps; and one that is cancelled."""
    if isinstance(message, ModelReady):
        send(task("0", PROMPTS[0], seed=0, previews=2))
        send(task("cancelled", PROMPTS[0], seed=9))
    if isinstance(message, TaskStepped) and message.id == "0" and message.step < len(PROMPTS):
        send(task(str(message.step), PROMPTS[message.step], seed=message.step, previews=2))
    if isinstance(message, TaskStepped) and (message.id, message.step) == ("cancelled", 2):
        send(Cancel("cancelled"))


def likeness(one: Any, other: Any) -> float:
    return float(np.corrcoef(pixels(one).ravel(), pixels(other).ravel())[0, 1])


@pytest.mark.parametrize(
    "config",
    [pytest.param({}, marks=pytest.mark.matrix), {"ulysses": 2}, pytest.param({"cfg": 2}, marks=pytest.mark.matrix)],
    ids=str,
)
def test_pictures_of_a_busy_server_are_those_of_one_device(ranks, config, tmp_path):
    pool = ranks(2 if config else 1)
    said = Owner(busy, 5).serve(pool, [spec(**config)])
    (ready,) = of(said, ModelReady)
    assert ready.card["batching"]
    assert ready.card["why"] == ""
    assert ready.mesh == config
    for n, prompt in enumerate(PROMPTS):
        assert abs(picture(said, str(n)) - alone(prompt, n)).max() <= 1
        assert [one.step for one in of(said, TaskStepped, str(n))] == [1, 2, 3, 4, 5]
    # One after the other would be 20 calls; those of the first picture, when the model was tried, count too.
    tried = next(one for one in said if isinstance(one, Beat)).calls
    assert of(said, Beat)[-1].calls - tried <= 9
    assert max(one.batch for one in of(said, TaskStepped)) >= 6
    previews = of(said, Preview)
    assert {one.step for one in previews} == {2, 4}
    # A preview shows its image, and no other.
    last = of(said, Preview, "0")[-1]
    shown = Image.open(io.BytesIO(last.jpeg))
    assert shown.size == (last.width, last.height)
    own, other = (Image.fromarray(alone(PROMPTS[n], n).astype(np.uint8)).resize(shown.size) for n in (0, 3))
    assert likeness(shown, own) > max(0.75, likeness(shown, other) + 0.1)
    (cancelled,) = of(said, Cancelled)
    assert 2 <= cancelled.step <= 3
    assert len(of(said, TaskStepped, "cancelled")) == cancelled.step
    (finished,) = of(said, Finished, "2")
    (tmp_path / "2.png").write_bytes(finished.data)
    receipt = read_receipt(tmp_path / "2.png")
    assert (receipt.seed, receipt.prompt, receipt.steps, receipt.together) == (2, PROMPTS[2], STEPS, 1)
    assert len(of(said, Beat)[-1].ranks) == pool.world_size


def test_an_image_that_can_be_in_time_pauses_others_of_its_owner(ranks):
    def script(message: Any, send: Any) -> None:
        if isinstance(message, ModelReady):
            for number, owner in enumerate("aab"):
                send(replace(task(f"{owner}{number}", PROMPTS[number], seed=number), owner=owner))
        if isinstance(message, TaskStepped) and (message.id, message.step) == ("a0", 1):
            # The second cannot be in time.
            send(replace(task("soon", PROMPTS[3], seed=3), owner="a", left=1e6, seconds=1.0))
            send(replace(task("late", PROMPTS[3], seed=3), owner="a", left=1.0, seconds=1e6))

    said = Owner(script, 5).serve(ranks(1), [spec()])
    steps = [message.id for message in of(said, TaskStepped)]
    during = steps[steps.index("soon") : len(steps) - steps[::-1].index("soon")]
    assert {id for id in during if id in ("a0", "a1", "late")} == set()
    assert during.count("b2") > 1
    assert steps.index("late") > steps.index("soon") + 4
    for number, id in enumerate(("a0", "a1", "b2", "soon")):
        assert abs(picture(said, id) - alone(PROMPTS[number], number)).max() <= 1


def test_adapters_are_on_for_their_own_requests_alone(ranks, tmp_path):
    loras = {"one": str(save_lora(tmp_path, 1)), "two": str(save_lora(tmp_path, 2))}
    asked = {"0": [], "1": [{"name": "two", "scale": 0.7}], "2": [{"name": "two"}, {"name": "one", "scale": 0.5}]}
    starts = [task(id, PROMPTS[0], loras=tuple(names)) for id, names in asked.items()]
    said = Owner(at_once(*starts), 3).serve(ranks(2), [spec(ulysses=2, loras=loras)])
    truths: dict[str, Any] = {"0": alone(PROMPTS[0], 0)}
    pipe = pipeline("emoji-sd3")
    digests = {}
    for id in ("1", "2"):
        for n, lora in enumerate(asked[id]):
            pipe.load_lora_weights(
                tmp_path, weight_name=loras[lora["name"]].rpartition("/")[2], adapter_name=f"lora{n}"
            )
        pipe.set_adapters([f"lora{n}" for n in range(len(asked[id]))], [one.get("scale", 1.0) for one in asked[id]])
        alone.cache_clear()
        truths[id] = alone(PROMPTS[0], 0)
        digests[id] = weights_fingerprint(pipe)
        pipe.unload_lora_weights()
    alone.cache_clear()
    digests["0"] = weights_fingerprint(pipe)
    for id, truth in truths.items():
        assert abs(picture(said, id) - truth).max() <= 1
        (finished,) = of(said, Finished, id)
        assert [(file["path"], file["scale"]) for file in finished.receipt["files"]] == [
            (loras[one["name"]], one.get("scale", 1.0)) for one in asked[id]
        ]
        # As `ditmesh generate` would have it.
        assert finished.receipt["weights_digest"] == digests[id]
    assert min(abs(truths[a] - truths[b]).max() for a, b in (("0", "1"), ("0", "2"), ("1", "2"))) > 20


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_random_requests_with_values_ahead_have_their_bits(ranks, tmp_path, seed):
    """Some can be in time and go before others of their owner, some are cancelled at a step; adapters change."""
    choice, loras = random.Random(seed), {name: str(save_lora(tmp_path, n)) for n, name in enumerate("ab")}
    starts, cancels = [], {}
    for number in range(10):
        adapters = tuple({"name": name, "scale": choice.choice([0.5, 1.0])} for name in choice.sample("ab", number % 3))
        more: dict[str, Any] = {"steps": choice.randint(1, 6), "guidance": choice.choice([1.0, 3.0])}
        start = task(str(number), choice.choice(PROMPTS), seed=number, loras=adapters, width=64, height=64, **more)
        starts.append(replace(start, owner=choice.choice("cd"), left=choice.choice([1e6, None, None]), seconds=1.0))
        cancels[start.id] = choice.choice([1, 2, 7, 7])

    def script(message: Any, send: Any) -> None:
        at_once(*starts)(message, send)
        if isinstance(message, TaskStepped) and cancels[message.id] == message.step:
            send(Cancel(message.id))

    # No two in one call.
    truth = Owner(at_once(*starts), 10).serve(ranks(2), [spec(ulysses=2, loras=loras, together=1)])
    said = Owner(script, 10).serve(ranks(2), [spec(ulysses=2, loras=loras, precompute=True)])
    assert 0 < len(of(said, Cancelled)) == 10 - len(of(said, Finished))
    for finished in of(said, Finished):
        assert np.array_equal(picture(said, finished.id), picture(truth, finished.id)), finished.id


def serve_odd(specs: Any, *, report: Any) -> None:
    """As `serve_rank`; of the second image nothing can be said, and the third is something else."""
    receipt, asked = LoadedModel.receipt, []

    def odd_images(output: Any) -> Any:
        if len(asked) != 2:
            return outputs_of(output)
        asked.append(output)
        return outputs_of(SimpleNamespace(images=[[*output.images, *output.images]]))

    def odd_receipt(*of: Any) -> Any:
        asked.append(of)
        if len(asked) == 2:
            raise LookupError("on purpose")
        return receipt(*of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "outputs_of", odd_images)
        patch.setattr(LoadedModel, "receipt", odd_receipt)
        worker.serve_rank(specs, report=report)


def test_what_is_wrong_with_a_task_or_its_output_fails_no_other(ranks):
    waiting = [task(str(n), PROMPTS[n % 3], seed=n, previews=1) for n in range(3)]
    waiting += [
        task("nan", PROMPTS[0], guidance=3e38, previews=1),
        task("lora", PROMPTS[1], loras=({"name": "none"},)),
        task("size", PROMPTS[1], width=66, height=64),
        task("input", PROMPTS[1], inputs=({"role": "image", "digest": "0" * 64},)),
        task("frames", PROMPTS[1], frames=5),
        task("last", PROMPTS[1], previews=1),
    ]

    def script(message: Any, send: Any) -> None:
        # One after the other.
        if isinstance(message, (ModelReady, Finished, TaskFailed)) and waiting:
            send(waiting.pop(0))

    said = Owner(script, 9).serve(ranks(2), [spec(ulysses=2)], serve_odd)
    failed = {one.id: one for one in of(said, TaskFailed)}
    asked = ("lora", "size", "input", "frames")
    assert failed.keys() == {"1", "2", "nan", *asked}
    assert {failed[id].code for id in asked} == {"invalid_request"}
    assert "66x64" in failed["size"].message
    assert failed["1"].message == "LookupError: on purpose"
    assert "holds neither images nor videos that can be written" in failed["2"].message
    assert "the latents of the last step are not finite in float32" in failed["nan"].message
    assert abs(picture(said, "last") - alone(PROMPTS[1], 0)).max() <= 1
    # Nor did it spoil the previews of others.
    assert len(of(said, Preview, "last")) == STEPS - 1


def test_a_preview_is_of_the_middle_frame_and_of_tokens_of_any_packing():
    colours = LatentColours(torch.cat([torch.eye(4)[:, :3], torch.zeros(1, 3)]), 8)
    plain = torch.rand(1, 4, 6, 4)
    shown = colours.picture(plain, 32, 48)
    assert shown is not None
    assert shown.size == (4, 6)
    video = torch.stack([torch.zeros_like(plain), plain, torch.zeros_like(plain)], dim=2)
    packed = plain.reshape(1, 4, 3, 2, 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 6, 16)
    for latents in (video, plain.flatten(2).mT, video.flatten(2).mT, packed):
        same = colours.picture(latents, 32, 48)
        assert same is not None
        assert same.tobytes() == shown.tobytes()
    for odd in (plain[:, :3], packed[:, :5], plain * float("nan")):
        assert colours.picture(odd, 32, 48) is None
    data, *size = preview_jpeg(shown)
    assert Image.open(io.BytesIO(data)).size == tuple(size) == (84, 126)


def serve_broken(specs: Any, *, report: Any, rows: int, rank: int, tasks: int) -> None:
    """As `serve_rank`, with a transformer that fails on one rank (-1: all) with so many rows, as without memory.

    No task takes its first step before so many ``tasks`` wait for theirs, whenever they have come.
    """
    kind = diffusers.SD3Transformer2DModel
    whole, whole_round, whole_steps = kind.forward, worker.TaskScheduler.round, Batcher._run_steps
    served, together = [], []

    @wraps(whole)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[0] >= rows and rank in (-1, dist.get_rank()):
            raise torch.OutOfMemoryError(f"CUDA out of memory: no room for {hidden_states.shape[0]} rows")
        return whole(self, hidden_states, *args, **kwargs)

    def one_round(self: Any, now: float) -> None:
        # Before that, the model is looked at.
        served.append(True)
        whole_round(self, now)

    def steps(self: Any, runs: Any) -> Any:
        if served and not together and len(runs) < tasks:
            return None
        together.extend(runs if served else ())
        return whole_steps(self, runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", forward)
        patch.setattr(worker.TaskScheduler, "round", one_round)
        patch.setattr(Batcher, "_run_steps", steps)
        worker.serve_rank(specs, report=report)


@pytest.mark.parametrize("rank", [pytest.param(-1, marks=pytest.mark.matrix), 1])
def test_a_batch_for_which_there_is_no_memory_is_made_smaller(ranks, rank):
    """Looking at the model takes 4 rows; 4 requests have 8."""
    starts = [task(str(n), PROMPTS[n % 3], seed=n) for n in range(4)]
    broken = partial(serve_broken, rows=6, rank=rank, tasks=4)
    said = Owner(at_once(*starts), 4).serve(ranks(2), [spec(ulysses=2)], broken)
    assert not of(said, TaskFailed)
    # Two requests, of two rows each, at a time as soon as four have failed.
    assert {one.batch for one in of(said, TaskStepped)} == {4}
    for n in range(4):
        assert abs(picture(said, str(n)) - alone(PROMPTS[n % 3], n)).max() <= 1
        assert [one.step for one in of(said, TaskStepped, str(n))] == [1, 2, 3, 4, 5]


def serve_broken_step(specs: Any, *, report: Any, id: str, step: int) -> None:
    """As `serve_rank`; rank 1 has no memory at the end of one step of a task."""
    whole = worker.TaskScheduler._stepped

    def stepped(self: Any, work: Any, model: Any) -> None:
        if (work.task.id, work.step + 1) == (id, step) and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory: no room")
        whole(self, work, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.TaskScheduler, "_stepped", stepped)
        worker.serve_rank(specs, report=report)


@pytest.mark.parametrize(
    "config",
    [
        {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)", "compress": "int8", "precompute": True},
        pytest.param({"pipe": 2, "patches": 2, "warmup": "fixed(1)"}, marks=pytest.mark.matrix),
    ],
    ids=["displaced", "pipe"],
)
def test_requests_that_keep_something_run_one_after_the_other(ranks, config):
    """One that comes in the middle, one that is cancelled, one that fails on one rank; then two of them again."""
    small: dict[str, Any] = {"width": 32, "height": 32}
    starts = {id: task(id, PROMPTS[int(id[0])], seed=int(id[0])) for id in ("0", "0 again", "2", "2 again")}
    starts |= {"1": task("1", PROMPTS[1], seed=1, **small), "3": task("3", PROMPTS[3])}
    starts["2"] = task("2", PROMPTS[2], seed=2, priority=3)

    def script(message: Any, send: Any) -> None:
        if isinstance(message, ModelReady):
            for id in ("0", "1", "3"):
                send(starts[id])
        elif isinstance(message, TaskStepped) and (message.id, message.step) == ("0", 2):
            send(starts["2"])
        elif isinstance(message, TaskStepped) and (message.id, message.step) == ("3", 2):
            send(Cancel("3"))
        elif isinstance(message, Cancelled):
            send(starts["0 again"])
            send(starts["2 again"])

    broken = partial(serve_broken_step, id="1", step=2)
    said = Owner(script, 6).serve(ranks(2), [spec(**config)], broken)
    (ready,) = of(said, ModelReady)
    assert (ready.card["batching"], ready.card["why"].split("; ")[-1]) == (False, "requests run one after the other")
    # The urgent one does not stop the one under way, and goes before the others.
    ids = [message.id for message in of(said, TaskStepped)]
    assert list(dict.fromkeys(ids)) == ["0", "2", "1", "3", "0 again", "2 again"]
    assert ids == sorted(ids, key=list(dict.fromkeys(ids)).index)
    assert [message.step for message in of(said, Cancelled)] in ([2], [3])
    assert [(message.id, message.code) for message in of(said, TaskFailed)] == [("1", "out_of_memory")]
    for id in ("0", "2"):
        assert (picture(said, id) == picture(said, f"{id} again")).all()
    # What a request computes ahead of its steps is of its own words.
    other, truth = (alone(PROMPTS[number], 2) for number in (0, 2))
    assert abs(picture(said, "2") - truth).mean() < 3 < abs(other - truth).mean()


def test_what_is_kept_of_a_step_is_one_question():
    """A server and predictions give the same reason; a cache is one as well."""
    assert "of one request" in keeps_between_steps(RECIPE, ParallelConfig(ring=2, exchange="displaced"))
    assert not keeps_between_steps(RECIPE, ParallelConfig(ulysses=2))
    pipe = MAKERS["flux"]()
    with ditmesh.parallelized(pipe, {}):
        assert not Batcher(pipe, pipe).why
        pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
        kept = keeps_between_steps(RECIPE, ParallelConfig(), [pipe.transformer])
        assert "has a cache" in kept
        assert Batcher(pipe, pipe).why == f"{kept}; requests run one after the other"
        pipe.transformer.disable_cache()
        assert not keeps_between_steps(RECIPE, ParallelConfig(), [pipe.transformer])


@pytest.mark.matrix
def test_classes_and_several_models(ranks):
    names = list(find_model(zoo.path("fashion-dit")).labels)
    fashion = ModelSpec("fashion", str(zoo.path("fashion-dit")), ParallelConfig(ulysses=2))
    labelled = [task(str(n), names[2 + n], model="fashion", seed=3 + n) for n in (1, 3)]

    def script(message: Any, send: Any) -> None:
        if isinstance(message, ModelReady) and message.name == "fashion":
            for start in (task("0", PROMPTS[0]), *labelled, task("2", "no such class", model="fashion")):
                send(start)

    said = Owner(script, 4).serve(ranks(2), [spec(ulysses=2), fashion])
    assert abs(picture(said, "0") - alone(PROMPTS[0], 0)).max() <= 1
    ready = {one.name: one.card for one in of(said, ModelReady)}
    assert ready["fashion"]["labels"] == names
    assert ready["fashion"]["batching"]
    for start in labelled:
        call = {"class_labels": [names.index(start.request.prompt)], "guidance_scale": 2.0}
        generator = [torch.Generator().manual_seed(start.request.seed)]
        truth = pixels(pipeline("fashion-dit")(**call, num_inference_steps=STEPS, generator=generator).images[0])
        assert abs(picture(said, start.id) - truth).max() <= 1
    assert [one.id for one in of(said, TaskFailed)] == ["2"]


def test_a_model_that_cannot_be_loaded_is_named_and_ends_the_ranks():
    owner = Owner(at_once(), 1)
    with RankPool(1, threads=1, timeout=60.0) as pool, pytest.raises(RankFailed, match="raised InputError"):
        owner.serve(pool, [replace(EMOJI, model="/nowhere")])
    (failed,) = of(owner.said, ModelFailed)
    assert "/nowhere" in failed.message


def test_collectives_of_a_served_model_have_the_deadline_of_its_ranks(ranks):
    for found in ranks(2).run(deadlines_of_loaded, spec(ulysses=2)):
        assert found == [120.0, 120.0]


@pytest.mark.parametrize(
    "config",
    [
        {"ulysses": 2},
        pytest.param({"ring": 2, "exchange": "displaced", "warmup": "fixed(5)"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_input_pictures_and_masks(ranks, config, tmp_path):
    """Another class of pipeline is made of the loaded parts; its steps join those of the model's own."""
    source = Image.fromarray(alone(PROMPTS[2], 2).astype(np.uint8))
    source.save(tmp_path / "source.png")
    digest = digest_of_file(tmp_path / "source.png")
    given = {"inputs": ({"role": "image", "digest": digest},), "files": {digest: str(tmp_path / "source.png")}}
    starts = [task("0", PROMPTS[0]), task("1", PROMPTS[1], seed=1, strength=0.6, **given)]
    said = Owner(at_once(*starts), 2).serve(ranks(2), [spec(**config)])
    assert "image" in of(said, ModelReady)[0].card["inputs"]
    own = pipeline("emoji-sd3")
    pipe = diffusers.StableDiffusion3Img2ImgPipeline(**own.components)
    pipe.set_progress_bar_config(disable=True)
    generator = [torch.Generator().manual_seed(1)]
    call = {"image": source, "strength": 0.6, "num_inference_steps": STEPS, "guidance_scale": 2.0}
    truth = pixels(pipe(PROMPTS[1], **call, generator=generator).images[0])
    assert abs(picture(said, "1") - truth).max() <= 1
    assert abs(picture(said, "0") - alone(PROMPTS[0], 0)).max() <= 1
    assert [(one.step, one.steps) for one in of(said, TaskStepped, "1")] == [(1, 3), (2, 3), (3, 3)]
    assert of(said, Finished, "1")[0].receipt["pipeline"] == "StableDiffusion3Img2ImgPipeline"

"""Pipelines that share a transformer, threads that share a pipeline, and patches that others put on top of ours."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ditmesh
from ditmesh.core.patching import CallChain, Patch
from support.faults import held, more_than
from support.models import ODD, inputs, run, tiny
from support.pipelines import MAKERS as PIPELINES
from support.sample import sampled
from support.tiny import save_tiny_sd3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny_sd3(tmp_path_factory.mktemp("sharing")))


CALL: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 4.0, "output_type": "pt"}


def loaded(folder: str) -> tuple[Any, Any]:
    """A text-to-image pipeline, and an image-to-image pipeline around the same parts."""
    from diffusers import StableDiffusion3Img2ImgPipeline, StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    other = StableDiffusion3Img2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    assert other.transformer is pipe.transformer
    return pipe, other


def picture(pipe: Any, seed: int | None = 0) -> torch.Tensor:
    more: dict[str, Any] = {}
    if "Img2Img" in type(pipe).__name__:
        image = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
        more = {"image": image, "strength": 0.7}
    else:
        more = {"height": 32, "width": 32}
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return pipe("a fox", generator=generator, **more, **CALL).images


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def both_parallel(folder: str, config: dict[str, Any], first: int) -> dict[str, Any]:
    """Both pipelines of one transformer parallelised; restored in either order."""
    pipes = loaded(folder)
    before = weights(pipes[0].transformer)
    truths = [picture(pipe) for pipe in pipes]
    for pipe in pipes:
        ditmesh.parallelize(pipe, config)
    errors = [float((picture(pipe) - truth).abs().max()) for pipe, truth in zip(pipes, truths, strict=True)]
    ditmesh.restore(pipes[first])
    other = pipes[1 - first]
    errors.append(float((picture(other) - truths[1 - first]).abs().max()))
    ditmesh.restore(other)
    alone = [torch.equal(picture(pipe), truth) for pipe, truth in zip(pipes, truths, strict=True)]
    return {"error": max(errors), "alone": alone, "weights": equal(before, weights(pipes[0].transformer))}


@pytest.mark.parametrize(
    ("config", "first"), sampled([{"ulysses": 2}, {"cfg": 2}, {"tensor": 2}], [0, 1], of=2), ids=str
)
def test_pipelines_that_share_a_transformer_share_its_ranks(ranks, folder, config, first):
    for found in ranks(2).run(both_parallel, folder, config, first):
        assert found["error"] < 1e-4
        assert found["alone"] == [True, True]
        assert found["weights"]


def test_pipelines_that_share_a_text_encoder_in_slices(ranks, folder):
    config = {"ulysses": 2, "text_encoder": "tensor"}
    for found in ranks(2).run(both_parallel, folder, config, 0):
        assert found == {"error": pytest.approx(0, abs=1e-4), "alone": [True, True], "weights": True}


def other_config(folder: str) -> list[str]:
    pipe, other = loaded(folder)
    messages = []
    with ditmesh.parallelized(pipe, {"ulysses": 2}):
        for target, config in ((other, {"ring": 2}), (pipe.transformer, {"ulysses": 2})):
            with pytest.raises(ditmesh.InputError) as caught:
                ditmesh.parallelize(target, config)
            messages.append(str(caught.value))
    return messages


def test_a_shared_transformer_has_one_configuration(ranks, folder):
    for messages in ranks(2).run(other_config, folder):
        assert "shared with a pipeline that runs with" in messages[0]
        assert "ulysses=2" in messages[0]
        assert "parallelised already" in messages[1]


def called_from_outside(folder: str, config: dict[str, Any], seeds: list[int | None]) -> tuple[str, float]:
    """The pipeline that was not parallelised is called; its transformer was."""
    import torch.distributed as dist

    pipe, other = loaded(folder)
    torch.manual_seed(dist.get_rank())
    seed = seeds[dist.get_rank()]
    truth = picture(other, seed)
    with ditmesh.parallelized(pipe, config):
        torch.manual_seed(dist.get_rank())
        try:
            return "", float((picture(other, seed) - truth).abs().max())
        # On a busy machine a rank comes to its call when the other one has refused it, and names that reason.
        except (ditmesh.InputError, ditmesh.PeerError) as error:
            return str(error), 0.0


def test_a_pipeline_nobody_parallelised_is_right_or_refused(ranks, folder):
    for message, error in ranks(2).run(called_from_outside, folder, {"ulysses": 2}, [0, 0]):
        assert message == ""
        assert error < 1e-4
    for message, _ in ranks(2).run(called_from_outside, folder, {"ulysses": 2}, [None, None]):
        assert "called outside of its pipeline" in message
        assert "hidden_states" in message
    for message, _ in ranks(2).run(called_from_outside, folder, {"ring": 2, "exchange": "displaced"}, [0, 0]):
        assert "outside of a request" in message


def decoded_by_two(folder: str) -> list[float]:
    """Pipelines with transformers of their own around one decoder."""
    import copy

    pipe, _ = loaded(folder)
    other = type(pipe)(**{**pipe.components, "transformer": copy.deepcopy(pipe.transformer)})
    other.set_progress_bar_config(disable=True)

    def pictures(one: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return one(["a fox", "a cat", "an owl"], height=32, width=32, generator=generator, **CALL).images

    truth = pictures(pipe)
    with ditmesh.parallelized(pipe, {"data": 2}), ditmesh.parallelized(other, {"data": 2}):
        return [float((pictures(one) - truth).abs().max()) for one in (pipe, other)]


def test_pipelines_that_share_a_decoder(ranks, folder):
    assert all(error < 1e-4 for errors in ranks(2).run(decoded_by_two, folder) for error in errors)


# --- threads -----------------------------------------------------------------------------------------------------


def from_two_threads(folder: str) -> tuple[bool, str]:
    """While one thread generates, another one calls the same pipeline."""
    pipe, _ = loaded(folder)
    truth = picture(pipe)
    inside, done = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    def wait(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        inside.set()
        done.wait(60)
        return values

    def first() -> None:
        generator = torch.Generator().manual_seed(0)
        call = {**CALL, "height": 32, "width": 32, "generator": generator, "callback_on_step_end": wait}
        found.append(pipe("a fox", **call).images)

    with ditmesh.parallelized(pipe, {"ulysses": 2}):
        thread = threading.Thread(target=first)
        thread.start()
        inside.wait(60)
        try:
            picture(pipe)
            message = "nothing was said"
        except ditmesh.InputError as error:
            message = str(error)
        done.set()
        thread.join()
    return bool((found[0] - truth).abs().max() < 1e-4), message


def test_a_second_thread_is_refused_and_the_first_one_unharmed(ranks, folder):
    for right, message in ranks(2).run(from_two_threads, folder):
        assert right
        assert "at work in another thread" in message


# --- dropped, broken off, interrupted ----------------------------------------------------------------------------


def dropped(folder: str, config: dict[str, Any]) -> tuple[dict[str, int], bool]:
    """What each of three pipelines leaves that are dropped without `restore`, and whether torch's function is back."""

    def once() -> None:
        pipe, _ = loaded(folder)
        picture(ditmesh.parallelize(pipe, config))

    # What earlier tests have dropped is gone.
    gc.collect()
    original = F.scaled_dot_product_attention
    once()
    gc.collect()
    before = held()
    for _ in range(3):
        once()
    return more_than(before), F.scaled_dot_product_attention is original


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux shows of a process")
@pytest.mark.parametrize("config", [{"ulysses": 2}, pytest.param({"cfg": 2}, marks=pytest.mark.matrix)], ids=str)
def test_a_dropped_pipeline_leaves_nothing(ranks, folder, config):
    for left, original in ranks(2).run(dropped, folder, config):
        assert not left
        assert original


class Interrupt(nn.Module):
    """Raises what torch's hooks do not catch, inside a block."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt


def test_an_interrupted_block_keeps_nothing_of_the_thread():
    model, arguments = tiny("DiT"), inputs("DiT", ODD)
    truth = run(model, arguments)
    q = torch.randn(1, 2, 5, 8)
    attended = F.scaled_dot_product_attention(q, q, q)
    ditmesh.parallelize(model, {"reproducible": True})
    kept = model.transformer_blocks[1].attn1
    model.transformer_blocks[1].attn1 = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        run(model, arguments)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), attended)
    model.transformer_blocks[1].attn1 = kept
    ditmesh.restore(model)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), attended)
    assert torch.equal(run(model, arguments), truth)


def test_a_configuration_that_is_refused_leaves_nothing(monkeypatch):
    model, arguments = tiny("SD3"), inputs("SD3", ODD)
    original, before = F.scaled_dot_product_attention, set(vars(model))
    truth = run(model, arguments)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ditmesh.ConfigError("not this one")

    for place in (
        "ditmesh.strategies.pipefusion.stages.Stages.__init__",
        "ditmesh.strategies.rows.BatchParallel.__init__",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, refuse)
            with pytest.raises(ditmesh.ConfigError, match="not this one"):
                ditmesh.parallelize(model, {"patches": 2, "reproducible": True, "warmup": "fixed(1)"})
    assert F.scaled_dot_product_attention is original
    assert set(vars(model)) == before
    with ditmesh.parallelized(model, {"reproducible": True}):
        assert torch.allclose(run(model, arguments), truth, atol=1e-5)


def test_an_undo_that_fails_does_not_stop_the_others(monkeypatch):
    model = tiny("SD3")
    original, before = F.scaled_dot_product_attention, set(vars(model))

    def fail(*_: Any) -> None:
        raise RuntimeError("a peer has gone")

    for place in ("pipefusion.stages.Stages.close", "determinism.FixedArithmetic.end_request"):
        monkeypatch.setattr(f"ditmesh.strategies.{place}", fail)
    ditmesh.parallelize(model, {"patches": 2, "reproducible": True, "warmup": "fixed(1)"})
    with pytest.raises(RuntimeError, match="a peer has gone"):
        ditmesh.restore(model)
    assert F.scaled_dot_product_attention is original
    assert set(vars(model)) == before


# --- patches -----------------------------------------------------------------------------------------------------


def test_a_wrapper_put_on_later_stays_and_ours_goes():
    """accelerate and diffusers wrap ``forward`` too, and put back what they found."""
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    truth = linear(x)
    patch = Patch(linear, "forward", lambda x: patch.original(x) + 1)
    ours = linear.forward
    linear.forward = lambda x: 2 * ours(x)
    assert torch.equal(linear(x), 2 * (truth + 1))
    patch.undo()
    assert torch.equal(linear(x), 2 * truth)
    linear.forward = ours
    assert torch.equal(linear(x), truth)


def test_patches_come_off_in_any_order():
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    truth = linear(x)
    first = Patch(linear, "forward", lambda x: first.original(x) + 1)
    second = Patch(linear, "forward", lambda x: 3 * second.original(x))
    assert torch.equal(linear(x), 3 * (truth + 1))
    first.undo()
    assert torch.equal(linear(x), 3 * truth)
    second.undo()
    assert "forward" not in vars(linear)
    assert torch.equal(linear(x), truth)


def test_layers_of_a_chain_stand_in_the_order_in_which_they_were_added():
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    truth, chain = linear(x), CallChain(linear)
    inner = chain.add(lambda proceed, arguments: proceed(arguments) + 1)
    outer = chain.add(lambda proceed, arguments: proceed(arguments) * 2)
    assert torch.equal(linear(x), (truth + 1) * 2)
    inner()
    assert torch.equal(linear(x), truth * 2)
    again = chain.add(lambda proceed, arguments: proceed(arguments) - 1)
    assert torch.equal(linear(x), truth * 2 - 1)
    outer()
    again()
    assert "forward" not in vars(linear)


def test_what_is_parallelised_is_not_copied(folder):
    pipe, _ = loaded(folder)
    truth = picture(pipe)
    with ditmesh.parallelized(pipe, {}):
        picture(pipe)
        for each in (pipe, pipe.transformer):
            said = rf"this {type(each).__name__} is parallelised.*ditmesh\.restore"
            with pytest.raises(ditmesh.InputError, match=said):
                copy.deepcopy(each)
        assert torch.equal(picture(pipe), truth)
    assert torch.equal(picture(copy.deepcopy(pipe)), truth)


def pickled(config):
    """Whether parts of a parallel pipeline are refused by pickle and torch.save, and are whole again afterwards."""
    import diffusers

    pipe = PIPELINES["flux"]()
    block, model = pipe.transformer.transformer_blocks[0], pipe.transformer
    sizes, refused = {}, []
    parts = {pipe: "FluxPipeline is", model: "FluxTransformer2DModel is", block: "FluxTransformerBlock belongs to a"}
    parts |= {block.attn.to_q: "Linear belongs to a", model.transformer_blocks: "ModuleList belongs to a"}
    for part in parts:
        sizes[part] = len(pickle.dumps(part))
    with ditmesh.parallelized(pipe, config, timeout=60):
        for part, words in parts.items():
            for save in (pickle.dumps, cloudpickle.dumps, lambda value: torch.save(value, io.BytesIO())):
                with pytest.raises(ditmesh.InputError, match=rf"^this {words}.* parallelised.*ditmesh\.restore"):
                    save(part)
        # A copy of a part has nothing of that, and shallow copies of pipelines are what requests run in.
        refused.append("__reduce_ex__" in vars(copy.deepcopy(block.norm1)))
        assert type(copy.copy(pipe)) is type(pipe)
    assert isinstance(pickle.loads(pickle.dumps(pipe)), diffusers.FluxPipeline)
    return [len(pickle.dumps(part)) - size for part, size in sizes.items()], refused


@pytest.mark.parametrize("config", sampled([{"ulysses": 2}, {"tensor": 2}, {"pipe": 2, "patches": 2}], of=3))
def test_what_is_parallelised_is_not_pickled(ranks, config):
    for differences, refused in ranks(2).run(pickled, config):
        # Memo numbers.
        assert max(map(abs, differences)) < 64
        assert refused == [False]


def test_code_of_the_user_inside_of_blocks_is_named(ranks):
    for sentences, again, whole in ranks(2).run(hooked):
        assert len(sentences) == 3
        assert "transformer_blocks.0 of FluxTransformer2DModel has a hook of your own" in sentences[0]
        assert "single_transformer_blocks.0.attn of FluxTransformer2DModel has a pre-hook" in sentences[1]
        assert "transformer_blocks.1 of FluxTransformer2DModel has a forward" in sentences[2]
        assert not again
        assert len(whole) == 1
        assert "it is given this rank's samples only" in whole[0]


def hooked() -> tuple[list[str], list[str], list[str]]:
    """The warnings of hooks and a forward on blocks: of the calls after each, of one more, and with whole tokens."""
    model = copy.deepcopy(tiny("Flux"))
    blocks, single = model.transformer_blocks, model.single_transformer_blocks[0].attn
    forward = blocks[1].forward

    def heard() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(model, inputs("Flux", ODD))
        return [str(one.message) for one in caught if issubclass(one.category, ditmesh.LocalTokensWarning)]

    sentences = []
    with ditmesh.parallelized(model, {"ulysses": 2}):
        assert not heard()
        blocks[0].register_forward_hook(lambda *_: None)
        sentences += heard()
        single.register_forward_pre_hook(lambda *_: None)
        sentences += heard()
        blocks[1].forward = lambda *args, **kwargs: forward(*args, **kwargs)
        sentences += heard()
        again = heard()
    with ditmesh.parallelized(model, {"data": 2}):
        return sentences, again, heard()


def test_a_forward_of_the_user_without_attention_is_refused_by_name(ranks):
    for said in ranks(2).run(skipped):
        assert "transformer_blocks.1 has a forward of your own, which made 0 attention calls" in said


def skipped() -> str:
    model = copy.deepcopy(tiny("Flux"))
    with ditmesh.parallelized(model, {"ulysses": 2}):
        model.transformer_blocks[1].forward = lambda hidden_states, encoder_hidden_states, **_: (
            encoder_hidden_states,
            hidden_states,
        )
        try:
            run(model, inputs("Flux", ODD))
        except ditmesh.LayoutError as error:
            return str(error)
    return ""

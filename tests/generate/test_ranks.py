"""`ditmesh.Ranks`: a pipeline on ranks behaves as the unmodified pipeline does in this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

import ditmesh
from ditmesh.errors import ConfigError, InputError, RankFailed
from ditmesh.ranks import RemotePipeline
from support import processes
from support import rank_functions as on_rank
from support.loading import damaged
from support.tiny import save_tiny_sd3

ROOT = Path(__file__).parents[2]

PROMPT, STEPS = "a red fox", 3
# Of pictures, in 255ths; of latents.
PICTURE, TOLERANCE = 1, 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd3(tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture(scope="module")
def ranks2() -> Iterator[ditmesh.Ranks]:
    with ditmesh.Ranks(2, device="cpu", threads=1, timeout=60.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pipe(ranks2: ditmesh.Ranks, folder: Path) -> RemotePipeline:
    pipe = ranks2.load(folder, {"cfg": 2})
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def local(folder: Path) -> Any:
    """The unmodified pipeline."""
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(**more: Any) -> dict[str, Any]:
    seeded = torch.Generator().manual_seed(5)
    return {"prompt": PROMPT, "num_inference_steps": STEPS, "generator": seeded, "output_type": "latent", **more}


def latents(pipe: Any, **more: Any) -> torch.Tensor:
    return pipe(**arguments(**more)).images


def assert_works(pipe: RemotePipeline, local: Any) -> None:
    torch.testing.assert_close(latents(pipe), latents(local), rtol=0, atol=TOLERANCE)


# ---- a call


def test_pictures_are_those_of_one_device_and_generators_advance(pipe: RemotePipeline, local: Any) -> None:
    results = []
    for one in (pipe, local):
        shared = torch.Generator().manual_seed(1)
        generators = [shared, torch.Generator().manual_seed(2), shared]
        output = one([PROMPT, "a cactus", "a car"], num_inference_steps=STEPS, generator=generators)
        results.append((output, [generator.get_state() for generator in generators]))
    (got, states), (want, wanted_states) = results
    assert type(got) is type(want)
    for picture, wanted in zip(got.images, want.images, strict=True):
        difference = np.asarray(picture).astype(int) - np.asarray(wanted)
        assert np.abs(difference).max() <= PICTURE
    assert all(map(torch.equal, states, wanted_states))


def test_arguments_by_position_tensors_and_tuples(pipe: RemotePipeline, local: Any) -> None:
    text, negative, pooled, negative_pooled = local.encode_prompt(PROMPT, PROMPT, PROMPT)
    given = {
        "prompt_embeds": text,
        "negative_prompt_embeds": negative,
        "pooled_prompt_embeds": pooled,
        "negative_pooled_prompt_embeds": negative_pooled,
        "prompt": None,
        "latents": torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(9)),
        "return_dict": False,
    }
    (got,) = pipe(**arguments(**given))
    (want,) = local(**arguments(**given))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    more = arguments()
    del more["prompt"]
    assert torch.equal(pipe(PROMPT, **more).images, latents(pipe))
    with pytest.raises(TypeError, match="multiple values for argument 'prompt'"):
        pipe(PROMPT, **arguments())


def test_every_step_is_told_and_can_be_the_last(pipe: RemotePipeline, local: Any) -> None:
    told: list[tuple[int, int | None]] = []

    def update(done: int, total: int | None) -> None:
        told.append((done, total))
        if stop and done == 2:
            raise InterruptedError("enough")

    stop = False
    pipe.set_progress_bar_config(disable=True, on_update=update)
    latents(pipe)
    assert told == [(n, STEPS) for n in range(1, STEPS + 1)]
    told.clear()
    stop = True
    with pytest.raises(InterruptedError, match="enough"):
        latents(pipe)
    assert [done for done, _ in told] == [1, 2]
    pipe.set_progress_bar_config(disable=True)
    assert_works(pipe, local)


def test_another_class_on_the_same_components(pipe: RemotePipeline, local: Any, ranks2: ditmesh.Ranks) -> None:
    from diffusers import StableDiffusion3Img2ImgPipeline

    other = pipe.as_class("StableDiffusion3Img2ImgPipeline")
    other.set_progress_bar_config(disable=True)
    theirs = StableDiffusion3Img2ImgPipeline.from_pipe(local)
    theirs.set_progress_bar_config(disable=True)
    more = {"image": torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32), "strength": 0.7}
    torch.testing.assert_close(latents(other, **more), latents(theirs, **more), rtol=0, atol=TOLERANCE)
    assert all(ranks2.run(lambda one, another: one.transformer is another.transformer, pipe, other))
    other.close()
    assert_works(pipe, local)
    with pytest.raises(InputError, match="NoSuchPipeline is no pipeline of diffusers"):
        pipe.as_class("NoSuchPipeline")
    with pytest.raises(
        InputError, match="StableDiffusion3ControlNetPipeline cannot be made of a StableDiffusion3Pipeline's components"
    ):
        pipe.as_class("StableDiffusion3ControlNetPipeline")
    assert_works(pipe, local)


# ---- callbacks


def halve_in_step_1(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"latents": tensors["latents"] / 2} if step == 1 else tensors


def stop_after_step_1(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    assert pipe.num_timesteps == STEPS
    pipe._interrupt = step >= 1
    return tensors


@pytest.mark.parametrize("change", [halve_in_step_1, stop_after_step_1])
def test_a_callback_runs_here_and_changes_all_ranks(pipe: RemotePipeline, local: Any, change: Callable) -> None:
    results = []
    for one in (pipe, local):
        seen: list[Any] = []

        def callback(
            pipe: Any, step: int, timestep: Any, tensors: dict[str, Any], seen: list[Any] = seen
        ) -> dict[str, Any]:
            seen.append((step, float(timestep), tensors["latents"].clone(), tensors["prompt_embeds"].shape))
            return change(pipe, step, timestep, tensors)

        asked = ["latents", "prompt_embeds"]
        drawn = latents(one, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=asked)
        results.append((seen, drawn))
    (seen, got), (wanted_seen, want) = results
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    assert (want - latents(local)).abs().max() > 100 * TOLERANCE
    assert [one[:2] for one in seen] == [one[:2] for one in wanted_seen]
    assert [one[3] for one in seen] == [one[3] for one in wanted_seen]
    for one, other in zip(seen, wanted_seen, strict=True):
        torch.testing.assert_close(one[2], other[2], rtol=0, atol=TOLERANCE)


# ---- errors


def test_errors_arrive_as_themselves_and_the_next_call_works(pipe: RemotePipeline, local: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'") as caught:
        pipe(PROMPT, colour="red")
    assert isinstance(caught.value.__cause__, RankFailed)
    assert "Traceback" in str(caught.value.__cause__)
    assert_works(pipe, local)

    class Odd(Exception):
        pass

    def fail(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        raise Odd(step)

    with pytest.raises(Odd, match="0") as callback_raised:
        latents(pipe, callback_on_step_end=fail)
    assert isinstance(callback_raised.value.__cause__, RankFailed)
    assert_works(pipe, local)
    with pytest.raises(AttributeError, match="num_timesteps"):
        latents(pipe, callback_on_step_end=lambda pipe, *step: pipe.vae)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'pop'"):
        latents(pipe, callback_on_step_end=lambda *step: None)
    with pytest.raises(InputError, match=r"callback=print would run on the ranks.*use callback_on_step_end"):
        pipe(PROMPT, callback=print)
    assert_works(pipe, local)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_alone(ranks2: ditmesh.Ranks, pipe: RemotePipeline, local: Any, rank: int) -> None:
    """The other one waits for it, or for the owner's reply to it."""
    ranks2.run(on_rank.break_step, pipe, rank)
    started = time.monotonic()
    with pytest.raises(ArithmeticError, match=f"rank {rank} breaks") as caught:
        latents(pipe)
    assert time.monotonic() - started < 60
    assert f"rank {rank} of 2 raised ArithmeticError" in str(caught.value.__cause__)
    ranks2.run(on_rank.mend_step, pipe)
    assert_works(pipe, local)


def press_ctrl_c(after: float) -> threading.Timer:
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Also where this process was started deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_interrupts_a_call_and_leaves_the_ranks(pipe: RemotePipeline, local: Any) -> None:
    timer = press_ctrl_c(0.7)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        latents(pipe, num_inference_steps=5000)
    assert time.monotonic() - started < 30
    timer.join()
    assert_works(pipe, local)
    with pytest.raises(KeyboardInterrupt):
        latents(pipe, callback_on_step_end=lambda *step: press_ctrl_c(0.2) and time.sleep(60))
    assert_works(pipe, local)


# ---- methods and attributes


def test_adapters(pipe: RemotePipeline, local: Any, folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    plain = latents(local)
    local.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    weights = {name: 3 * value for name, value in get_peft_model_state_dict(local.transformer).items()}
    local.transformer.delete_adapters("default")
    type(local).save_lora_weights(tmp_path, weights)
    drawn = []
    for one in (pipe, local):
        one.load_lora_weights(tmp_path, adapter_name="a")
        one.load_lora_weights({f"transformer.{name}": -value for name, value in weights.items()}, adapter_name="b")
        one.set_adapters(["a", "b"], adapter_weights=[0.9, 0.2])
        assert one.get_active_adapters() == ["a", "b"]
        pictures = [latents(one)]
        one.fuse_lora()
        pictures.append(latents(one))
        one.unfuse_lora()
        one.unload_lora_weights()
        drawn.append(pictures)
    torch.testing.assert_close(*drawn, rtol=0, atol=TOLERANCE)
    assert (drawn[0][0] - plain).abs().max() > 100 * TOLERANCE
    torch.testing.assert_close(latents(pipe), plain, rtol=0, atol=TOLERANCE)


def test_the_scheduler_is_assigned(pipe: RemotePipeline, local: Any) -> None:
    before = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    plain = latents(pipe)
    changed = []
    for one in (pipe, local):
        one.scheduler = FlowMatchEulerDiscreteScheduler.from_config(one.scheduler.config, shift=7.0)
        changed.append(latents(one))
    assert pipe.scheduler.config["shift"] == 7.0
    torch.testing.assert_close(*changed, rtol=0, atol=TOLERANCE)
    assert (changed[0] - plain).abs().max() > 100 * TOLERANCE
    pipe.scheduler = before
    assert torch.equal(latents(pipe), plain)
    # What would change nothing on the ranks.
    with pytest.raises(AttributeError, match=r"'set_shift' of this FlowMatch.*assign pipe.scheduler = "):
        pipe.scheduler.set_shift(2.0)
    with pytest.raises(InputError, match="dict is no scheduler"):
        pipe.scheduler = {}


def test_anything_else_says_what_to_do(ranks2: ditmesh.Ranks, pipe: RemotePipeline) -> None:
    with pytest.raises(AttributeError, match=r"'vae' of this StableDiffusion3Pipeline is on its ranks; use ranks.run"):
        _ = pipe.vae
    with pytest.raises(AttributeError, match=r"'vae' .*cannot be assigned"):
        pipe.vae = None
    blocks = ranks2.run(lambda number: (number, len(pipe.transformer.transformer_blocks)), 3)  # type: ignore[attr-defined]
    assert blocks == [(3, 2)] * 2
    assert [value.tolist() for value in ranks2.run(torch.ones, 2)] == [[1.0, 1.0]] * 2
    with pytest.raises(TypeError, match=r"cannot send .* to the ranks"):
        ranks2.run(print, threading.Lock())
    with pytest.raises(TypeError, match="pickle"):
        ranks2.run(on_rank.answer_with_a_lock)


# ---- several pipelines, several threads


def test_what_cannot_be_loaded_leaves_the_ranks(
    ranks2: ditmesh.Ranks, pipe: RemotePipeline, local: Any, tmp_path: Path
) -> None:
    folder = local.name_or_path
    lost = damaged("emoji-sd3", "text_encoder", tmp_path / "damaged")
    with pytest.raises(InputError, match=rf"the component text_encoder \(.*{lost}.*pip install -U transformers"):
        ranks2.load(tmp_path / "damaged")
    with pytest.raises(ConfigError, match="4 ranks"):
        ranks2.load(folder, {"ulysses": 4})
    with pytest.raises(InputError, match="no such folder"):
        ranks2.load("nowhere")
    with pytest.raises(ConfigError, match=r"inputs='per-data-rank'.*leave inputs out"):
        ranks2.load(folder, {"data": 2, "inputs": "per-data-rank"})
    assert_works(pipe, local)


def test_a_rank_that_dies_closes_the_ranks_with_a_sentence() -> None:
    with ditmesh.Ranks(1, device="cpu", threads=1) as ranks:
        with pytest.raises(RankFailed, match="was killed by SIGKILL"):
            ranks.run(lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(ConfigError, match=r"these Ranks are closed \(rank 0 of 1 was killed by SIGKILL.*make new"):
            ranks.run(time.time)


# ---- a notebook


@pytest.mark.matrix
def test_the_example_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    mark, environment = processes.marked({})
    for name in environment.keys() - os.environ.keys():
        monkeypatch.setenv(name, environment[name])
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    client.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    results = [output["data"] for output in outputs if output["output_type"] == "execute_result"]
    assert "RemotePipeline(StableDiffusion3Pipeline" in results[1]["text/plain"]
    assert "image/png" in results[2]
    assert len(results[3]["text/plain"].split(",")) == 10
    first, second = results[4]["text/plain"].strip("[]").split(",")
    assert int(first) == int(second) > 1
    # The kernel has gone, and what it started.
    assert processes.wait_until_gone(mark, 20) == []

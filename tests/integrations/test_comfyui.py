"""Nodes for ComfyUI, in a stand-in for it and in a real one: real ranks, the embedded model."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from ditmesh import Client, extend
from ditmesh.errors import ConfigError, InputError, RankFailed
from ditmesh.generate.receipt import read_receipt
from ditmesh.generate.video import frames_digest
from ditmesh.serve.http.keys import new_key
from ditmesh.serve.settings import ApiSettings
from ditmesh.serve.types import ENDED
from support import comfyui
from support.comfyui import NODES, WIDGETS, ComfyUI, InterruptProcessingException
from support.commands import run as ditmesh
from support.serving import FakeBackend, drawn, serving

STEPS = 4
# Of nodes that are ComfyUI's own, too, and of models in files that nobody has here.
STOCK = [NODES / "api_workflows" / f"model_{kind}.json" for kind in ("image", "video")]
WORKFLOWS = sorted({*(NODES / "api_workflows").glob("*.json")} - {*STOCK})

# What a receipt says of the run and not of the picture.
APART: dict[str, Any] = {"seconds": 0.0}


def workflow(name: str = "text_to_image", **inputs: Any) -> dict[str, Any]:
    """One of the shipped workflows, on one thread per rank; ``inputs`` by the names that they have there."""
    found = json.loads((NODES / "api_workflows" / f"{name}.json").read_text(encoding="utf-8"))
    given = {"threads": 1, "device": "cpu", "steps": STEPS, **inputs}
    for node in found.values():
        plain = {key for key, value in node["inputs"].items() if not isinstance(value, list)}
        node["inputs"] |= {key: value for key, value in given.items() if key in plain}
    return found


@pytest.fixture(scope="module")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    with comfyui.comfyui(tmp_path_factory.mktemp("comfy")) as host:
        yield host


@pytest.fixture(autouse=True)
def quiet(comfy: ComfyUI) -> None:
    comfy.on_progress = lambda done, total: None
    comfy.heard.clear()


def pixels(path: str | Path) -> numpy.ndarray:
    with Image.open(path) as image:
        return numpy.asarray(image.convert("RGB"))


def saved(comfy: ComfyUI, shown: dict[str, Any], node: str = "5") -> list[Path]:
    return [comfy.output / one["subfolder"] / one["filename"] for one in shown[node]["images"]]


@pytest.fixture
def command(kept_ranks: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[Path]]:
    """``command("--seed", 5)``: the pictures of ``ditmesh generate``, with two ranks of one thread."""

    def generate(*more: str | Path) -> list[Path]:
        given = ("--devices", "2", "--cfg", "2", "--threads", "1", "--steps", str(STEPS), "--device", "cpu", *more)
        assert ditmesh("generate", "a red fox", *given, "--out", tmp_path / "command", "--json") == 0
        return [Path(one["path"]) for one in json.loads(capfd.readouterr().out)["images"]]

    return generate


def pids(comfy: ComfyUI) -> list[int]:
    """Processes of all ranks that the nodes have started and not ended."""
    opened = [one._opened for one in comfy.package.mesh._pipelines if one.opened]
    return [pid for one in opened for pid in one.ranks._pool.pids]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return state.rpartition(")")[2].split()[0] == "Z"


# ---- definitions


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_page_s_workflows_are_the_same(comfy: ComfyUI, path: Path) -> None:
    page = json.loads((NODES / "example_workflows" / path.name).read_text(encoding="utf-8"))
    assert as_api(comfy, page) == json.loads(path.read_text(encoding="utf-8"))


def as_api(comfy: ComfyUI, page: dict[str, Any]) -> dict[str, Any]:
    """What ComfyUI's page makes of its own form of a workflow when it runs it."""
    links = {link[0]: link for link in page["links"]}
    found: dict[str, Any] = {}
    for node in page["nodes"]:
        inputs = comfy.classes[node["type"]].INPUT_TYPES()
        entries = {**inputs.get("required", {}), **inputs.get("optional", {})}
        values, given = list(node["widgets_values"]), {}
        for name, entry in entries.items():
            if isinstance(entry[0], list) or entry[0] in WIDGETS:
                given[name] = values.pop(0)
                if len(entry) > 1 and entry[1].get("control_after_generate"):
                    assert values.pop(0) in ("fixed", "randomize", "increment", "decrement")
        assert not values
        for socket in node["inputs"]:
            if socket["link"] is not None:
                number, source, place, target, slot, kind = links[socket["link"]]
                assert (number, target, kind) == (socket["link"], node["id"], socket["type"])
                assert node["inputs"][slot] is socket
                given[socket["name"]] = [str(source), place]
                origin = next(one for one in page["nodes"] if one["id"] == source)
                assert socket["link"] in origin["outputs"][place]["links"]
        found[str(node["id"])] = {"class_type": node["type"], "inputs": given}
    return found


# ---- pictures


def test_the_picture_is_the_command_s_and_can_be_replayed(
    comfy: ComfyUI, command: Callable[..., list[Path]], tmp_path: Path
) -> None:
    prompt = workflow(seed=5, images=2)
    plain = {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "plain"}}
    shown = comfy.run({**prompt, "9": plain}, {"workflow": {"nodes": []}})
    wanted = command("--seed", "5", "--num-images", "2")
    ours = saved(comfy, shown)
    assert len(ours) == len(wanted) == 2
    for mine, other, one in zip(ours, saved(comfy, shown, "9"), wanted, strict=True):
        assert numpy.array_equal(pixels(mine), pixels(one))
        # As it comes through ComfyUI's own floats and its own node.
        assert numpy.array_equal(pixels(other), pixels(one))
        got, want = read_receipt(mine), read_receipt(one)
        assert got.model_copy(update=APART) == want.model_copy(update=APART)
    with Image.open(ours[0]) as image:
        texts = dict(image.text)  # type: ignore[attr-defined]
    assert json.loads(texts["prompt"]) == {**prompt, "9": plain}
    assert json.loads(texts["workflow"]) == {"nodes": []}
    replayed = tmp_path / "replayed"
    assert ditmesh("replay", ours[1], "--threads", "1", "--out", replayed) == 0
    assert numpy.array_equal(pixels(next(replayed.glob("*.png"))), pixels(ours[1]))


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the embedded model, with random weights."""
    import diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    from ditmesh import zoo

    folder = tmp_path_factory.mktemp("lora")
    model = diffusers.SD3Transformer2DModel.from_pretrained(zoo.path(), subfolder="transformer")
    torch.manual_seed(0)
    targets = ["to_q", "to_k", "to_out.0", "net.2"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    layers = get_peft_model_state_dict(model)
    diffusers.StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    return folder / "pytorch_lora_weights.safetensors"


def test_a_stack_of_adapters_is_on_for_its_prompt_alone(
    comfy: ComfyUI, command: Callable[..., list[Path]], lora: Path
) -> None:
    (comfy.models / "loras" / "mine.safetensors").write_bytes(lora.read_bytes())
    prompt = workflow("loras", seed=7)
    (plain,) = saved(comfy, comfy.run(prompt))
    prompt["6"]["inputs"] |= {"lora": "mine.safetensors", "scale": 0.5}
    prompt["7"]["inputs"] |= {"lora": str(lora), "scale": 0.25}
    (adapted,) = saved(comfy, comfy.run(prompt))
    (wanted,) = command("--seed", "7", "--lora", f"{lora}:0.5", "--lora", f"{lora}:0.25")
    assert numpy.array_equal(pixels(adapted), pixels(wanted))
    assert not numpy.array_equal(pixels(adapted), pixels(plain))
    assert read_receipt(adapted).weights_digest == read_receipt(wanted).weights_digest
    assert [one.scale for one in read_receipt(adapted).files] == [0.5, 0.25]
    before = pids(comfy)
    prompt["6"]["inputs"]["lora"] = prompt["7"]["inputs"]["lora"] = ""
    prompt["3"]["inputs"]["seed"] = 7
    prompt["5"]["inputs"]["filename_prefix"] = "again"
    (again,) = saved(comfy, comfy.run(prompt))
    assert numpy.array_equal(pixels(again), pixels(plain))
    assert read_receipt(again).weights_digest == read_receipt(plain).weights_digest
    assert pids(comfy) == before


@pytest.mark.matrix
def test_a_picture_to_begin_with(comfy: ComfyUI, command: Callable[..., list[Path]], tmp_path: Path) -> None:
    (begin,) = saved(comfy, comfy.run(workflow(seed=8)))
    prompt = workflow("image_to_image", seed=9, image=str(begin), strength=0.6)
    (ours,) = saved(comfy, comfy.run(prompt))
    (wanted,) = command("--seed", "9", "--image", begin, "--strength", "0.6")
    assert numpy.array_equal(pixels(ours), pixels(wanted))
    receipt = read_receipt(ours)
    assert receipt.pipeline == "StableDiffusion3Img2ImgPipeline"
    # The picture that it began with lies beside it.
    assert numpy.array_equal(pixels(ours.with_name(receipt.files[0].path)), pixels(begin))
    replayed = tmp_path / "replayed"
    assert ditmesh("replay", ours, "--threads", "1", "--out", replayed) == 0
    assert numpy.array_equal(pixels(next(replayed.glob("*.png"))), pixels(ours))


@pytest.mark.matrix
def test_pictures_that_were_changed_get_no_receipt(comfy: ComfyUI) -> None:
    class Brighter:
        CATEGORY, FUNCTION, RETURN_TYPES = "image", "run", ("IMAGE",)

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
            return {"required": {"images": ("IMAGE",)}}

        def run(self, images: torch.Tensor) -> tuple[torch.Tensor]:
            return ((images + 0.1).clamp(0, 1),)

    comfy.classes["Brighter"] = Brighter
    prompt = workflow(seed=5)
    prompt["8"] = {"class_type": "Brighter", "inputs": {"images": ["4", 0]}}
    prompt["5"]["inputs"]["images"] = ["8", 0]
    with pytest.raises(InputError, match="not those that the receipts tell of"):
        comfy.run(prompt)


@pytest.mark.matrix
def test_a_video_comes_as_its_frames(comfy: ComfyUI, command: Callable[..., list[Path]]) -> None:
    prompt = workflow(model="emoji-wan", seed=5)
    prompt["3"]["inputs"]["frames"] = 5
    frames = {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "frames"}}
    ours = saved(comfy, comfy.run({**{key: prompt[key] for key in prompt if key != "5"}, "9": frames}), "9")
    (video,) = command("--seed", "5", "--model", "emoji-wan", "--frames", "5")
    assert len(ours) == 5
    # Of the frames before they are compressed.
    assert frames_digest([Image.open(path) for path in ours]) == read_receipt(video).frames_digest
    with pytest.raises(InputError, match="these are frames of a video; save them with ComfyUI's Create Video"):
        comfy.run(prompt)


# ---- what stays, and what ends


def test_only_what_has_changed_runs_again_and_the_ranks_stay(comfy: ComfyUI) -> None:
    comfy.run(workflow(seed=11))
    ranks = pids(comfy)
    assert len(ranks) == 2
    comfy.executed()
    comfy.run(workflow(seed=11))
    assert comfy.executed() == []
    comfy.run(workflow(seed=12))
    assert comfy.executed() == ["3", "4", "5"]
    assert pids(comfy) == ranks
    comfy.run(workflow(seed=12, cfg=1, ulysses=2))
    assert comfy.executed() == ["1", "4", "5"]
    assert all(map(gone, ranks))
    assert len(pids(comfy)) == 2


def test_cancel_takes_effect_within_a_step_and_the_next_prompt_works(comfy: ComfyUI) -> None:
    (before,) = saved(comfy, comfy.run(workflow(seed=13)))
    ranks = pids(comfy)
    comfy.heard.clear()
    comfy.on_progress = lambda done, total: comfy.interrupt() if done == 3 else None
    with pytest.raises(InterruptProcessingException):
        comfy.run(workflow(seed=14, steps=500))
    assert [content[0] for kind, _, content in comfy.heard if kind == "progress"] == [1, 2, 3]
    comfy.on_progress = lambda done, total: None
    (after,) = saved(comfy, comfy.run(workflow(seed=13, filename_prefix="after")))
    assert numpy.array_equal(pixels(before), pixels(after))
    assert pids(comfy) == ranks


@pytest.mark.matrix
def test_unloading_ends_the_ranks_and_the_next_prompt_starts_them(comfy: ComfyUI) -> None:
    (before,) = saved(comfy, comfy.run(workflow(seed=15)))
    ranks = pids(comfy)
    comfy.free()
    assert ("unloaded", None, None) in comfy.heard
    assert pids(comfy) == []
    assert all(map(gone, ranks))
    # What is not asked for anew is not made anew.
    comfy.run(workflow(seed=16))
    (after,) = saved(comfy, comfy.run(workflow(seed=15, filename_prefix="after")))
    assert len(pids(comfy)) == 2
    assert numpy.array_equal(pixels(before), pixels(after))


def test_a_rank_that_is_lost_costs_one_prompt(comfy: ComfyUI) -> None:
    (before,) = saved(comfy, comfy.run(workflow(seed=17)))
    ranks = pids(comfy)
    comfy.on_progress = lambda done, total: os.kill(ranks[1], signal.SIGKILL) if done == 2 else None
    with pytest.raises(RankFailed):
        comfy.run(workflow(seed=18, steps=100))
    comfy.on_progress = lambda done, total: None
    (after,) = saved(comfy, comfy.run(workflow(seed=17, filename_prefix="after")))
    assert numpy.array_equal(pixels(before), pixels(after))
    assert not set(pids(comfy)) & set(ranks)


# ---- refusals


@pytest.mark.parametrize(
    ("inputs", "error", "sentence"),
    [
        ({"model": "no-such-model"}, InputError, "model 'no-such-model': no such folder"),
        ({"devices": 3}, ConfigError, "3"),
        ({"settings": "cfg=2"}, ConfigError, "cfg stands in a widget and in settings"),
        ({"settings": "ulyses=2"}, ConfigError, "ulyses"),
        ({"width": 64}, InputError, "width 64 and height 0: give both, or 0 for both"),
        ({"width": 63, "height": 63}, InputError, "63x63"),
        ({"prompt": " "}, InputError, "prompt 1 is empty"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    comfy: ComfyUI, inputs: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as raised:
        comfy.run(workflow(seed=19, **inputs))
    assert "\n" not in str(raised.value)


# ---- a server


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(step_seconds=0.01)


@pytest.fixture(scope="module")
def url(backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server without ranks, which wants a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_A_TEST", new_key(keys, "comfyui"))
        with serving(backend, ApiSettings(keys=keys, keep_alive=0.2, max_steps=10_000)) as url:
            yield url


def at_server(url: str, name: str = "server", **inputs: Any) -> dict[str, Any]:
    found = workflow(name, **inputs)
    more = {"url": url, "model": "", "key_variable": "KEY_OF_A_TEST", "priority": 0}
    found["1"] = {"class_type": "DitmeshConnect", "inputs": more}
    return found


def test_a_server_s_pictures_with_progress_and_receipts(comfy: ComfyUI, url: str) -> None:
    prompt = at_server(url, seed=5, images=2, width=32, height=16)
    ours = saved(comfy, comfy.run(prompt))
    for seed, path in zip((5, 6), ours, strict=True):
        assert numpy.array_equal(pixels(path), numpy.asarray(drawn("a red fox", seed, (32, 16))))
        assert (read_receipt(path).seed, read_receipt(path).steps) == (seed, STEPS)
        assert os.environ["KEY_OF_A_TEST"].encode() not in path.read_bytes()
    told = [content for kind, node, content in comfy.heard if kind == "progress" and node == "4"]
    assert told[-1][:2] == (2 * STEPS, 2 * STEPS)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert any(preview is not None for _, _, preview in told)


@pytest.mark.matrix
def test_cancel_cancels_the_server_s_job(comfy: ComfyUI, url: str) -> None:
    with Client(url, os.environ["KEY_OF_A_TEST"]) as client:
        comfy.on_progress = lambda done, total: comfy.interrupt() if done == 3 else None
        with pytest.raises(InterruptProcessingException):
            comfy.run(at_server(url, seed=20, steps=10_000))
        job = client.jobs(limit=1)[0]
        limit = time.monotonic() + 10
        while (job := client.job(job.id)).status not in ENDED and time.monotonic() < limit:
            time.sleep(0.02)
    assert job.status == "cancelled"
    assert 3 <= job.step < 100


def test_the_package_uses_public_names_and_extend_alone():
    """Whatever moves inside of ditmesh, an installed package of nodes finds its names."""
    used = set()
    for file in NODES.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("ditmesh.") for alias in node.names), file
            elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("ditmesh"):
                assert node.module in ("ditmesh", "ditmesh.extend"), f"{file}:{node.lineno}"
                assert all(hasattr(sys.modules[node.module], alias.name) for alias in node.names), file
                if node.module == "ditmesh.extend":
                    used |= {alias.name for alias in node.names}
    assert used == set(extend.__all__)

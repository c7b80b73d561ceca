"""The node Parallelize model in a real ComfyUI, with its own loaders and samplers, through its API.

They run where DITMESH_COMFYUI names ComfyUI's folder, and DITMESH_COMFYUI_PYTHON a Python that has its requirements.
DITMESH_COMFYUI_MAIN, if it is set, is another folder with a main.py that starts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import comfyui_parts, comfyui_server, processes
from support.comfyui_server import Server
from support.models import relative_error

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = os.environ.get("DITMESH_COMFYUI")
    if folder is None:
        pytest.skip("DITMESH_COMFYUI names no folder of a ComfyUI")
    python = os.environ.get("DITMESH_COMFYUI_PYTHON", sys.executable)
    base = tmp_path_factory.mktemp("comfyui") / "base"

    def parts(base: Path) -> None:
        (base / "custom_nodes" / "random_text.py").write_text(comfyui_parts.NODE, encoding="utf-8")
        command = [python, comfyui_parts.__file__, str(base / "models")]
        environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, capture_output=True)

    # A main.py of one's own may put stand-ins of packages on the path.
    main = Path(os.environ.get("DITMESH_COMFYUI_MAIN", folder))
    with comfyui_server.server(main, python, base, parts) as made:
        yield made


def prompt(
    seed: int = 0,
    node: str = "KSampler",
    lora: int = 0,
    settings: str | None = None,
    steps: int = 3,
    loader: str = "UNETLoader",
) -> dict[str, Any]:
    """A workflow of stock nodes, with the node Parallelize model where there are settings."""
    file = "sd3 default.safetensors"
    unet = {"unet_name": file, "weight_dtype": "default"} if loader == "UNETLoader" else {"ckpt_name": file}
    found: dict[str, Any] = {
        "1": {"class_type": loader, "inputs": unet},
        "4": {"class_type": "RandomText", "inputs": {"seed": 5, "words": 7}},
        "5": {"class_type": "RandomText", "inputs": {"seed": 9, "words": 7}},
        "6": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 80, "height": 64, "batch_size": 1}},
        "9": {"class_type": "SaveLatent", "inputs": {"samples": ["8", 0], "filename_prefix": "latents"}},
    }
    model = ["1", 0]
    if lora:
        given = {"model": model, "lora_name": f"SD3 {lora}.safetensors", "strength_model": 1.0}
        found["2"], model = {"class_type": "LoraLoaderModelOnly", "inputs": given}, ["2", 0]
    if settings is not None:
        given = {"model": model, "ulysses": 1, "ring": 1, "cfg": 1, "settings": settings}
        found["3"], model = {"class_type": "DitmeshParallelizeModel", "inputs": given}, ["3", 0]
    text = {"positive": ["4", 0], "negative": ["5", 0]}
    if node == "KSampler":
        given = {"seed": seed, "steps": steps, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple"}
        given |= {"denoise": 1.0, "model": model, "latent_image": ["6", 0], **text}
        found["8"] = {"class_type": "KSampler", "inputs": given}
        return found
    sigmas = {"model": model, "scheduler": "simple", "steps": steps, "denoise": 1.0}
    parts = {"noise": ["10", 0], "guider": ["11", 0], "sampler": ["12", 0], "sigmas": ["13", 0]}
    return found | {
        "8": {"class_type": "SamplerCustomAdvanced", "inputs": {**parts, "latent_image": ["6", 0]}},
        "10": {"class_type": "RandomNoise", "inputs": {"noise_seed": seed}},
        "11": {"class_type": "CFGGuider", "inputs": {"model": model, "cfg": 4.0, **text}},
        "12": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "13": {"class_type": "BasicScheduler", "inputs": sigmas},
    }


def latents(server: Server, workflow: dict[str, Any]) -> torch.Tensor:
    from safetensors.torch import load_file

    with server.listening() as listener:
        number = server.send(workflow)
        last = server.heard(listener, number)[-1]
    assert last[0] == "execution_success", last
    limit = time.monotonic() + 10
    while not (history := server.ask(f"/history/{number}")) and time.monotonic() < limit:
        time.sleep(0.05)
    (saved,) = history[number]["outputs"]["9"]["latents"]
    return load_file(server.output / saved["subfolder"] / saved["filename"])["latent_tensor"]


def ended(server: Server, workflow: dict[str, Any], act: Any, at: int = 3) -> tuple[str, Any, float]:
    """How a prompt ends in the middle of whose sampling something is done, and after how many seconds."""
    begun: list[float] = []

    def progress(said: Any) -> None:
        if said["value"] == at and not begun:
            begun.append(time.monotonic())
            # In the middle of a step.
            threading.Timer(0.02, act).start()

    with server.listening() as listener:
        number = server.send(workflow)
        kind, content = server.heard(listener, number, {"progress": progress})[-1]
    return kind, content, time.monotonic() - begun[0]


@pytest.mark.parametrize("loader", ["UNETLoader", "CheckpointLoaderSimple"])
@pytest.mark.parametrize("node", ["KSampler", "SamplerCustomAdvanced"])
@pytest.mark.timeout(900)
def test_a_lora_that_changes_between_prompts(server: Server, node: str, loader: str) -> None:
    cases = [(seed, lora) for seed, lora in enumerate((0, 1, 2, 0, 2))]
    truth = [latents(server, prompt(seed, node, lora, loader=loader)) for seed, lora in cases]
    for settings in ("ulysses=2", "ring=2"):
        for (seed, lora), expected in zip(cases, truth, strict=True):
            found = latents(server, prompt(seed, node, lora, settings, loader=loader))
            assert relative_error(found, expected) <= 1e-5


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_interrupts_and_lost_ranks_of_a_real_comfyui(server: Server) -> None:
    truth = latents(server, prompt(40))
    assert relative_error(latents(server, prompt(40, settings="ulysses=2")), truth) <= 1e-5
    (rank,) = processes.ranks_of(server.process.pid)
    endless = {"settings": "ulysses=2", "steps": 5000}
    kind, _, seconds = ended(server, prompt(41, **endless), lambda: server.ask("/interrupt", {}))
    assert kind == "execution_interrupted"
    assert seconds < 60
    assert processes.ranks_of(server.process.pid) == [rank]
    for number, sent, sentence in ((42, signal.SIGKILL, "killed by SIGKILL"), (43, signal.SIGSTOP, "stopped")):
        (rank,) = processes.ranks_of(server.process.pid)
        kind, content, seconds = ended(server, prompt(number, **endless), lambda rank=rank, s=sent: os.kill(rank, s))
        print(f"{sent.name}: {content.get('exception_message')!r} after {seconds:.1f} s", file=sys.stderr)
        assert kind == "execution_error"
        assert sentence in content["exception_message"]
        assert "\n" not in content["exception_message"].strip()
        assert not processes.alive(rank)
        found = latents(server, prompt(50 + number, settings="ulysses=2"))
        assert relative_error(found, latents(server, prompt(50 + number))) <= 1e-5


# The last one: it ends the server.
@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_nothing_stays_of_a_comfyui_that_was_killed(server: Server) -> None:
    latents(server, prompt(60, settings="ulysses=2"))
    (rank,) = processes.ranks_of(server.process.pid)
    os.kill(server.process.pid, signal.SIGKILL)
    limit = time.monotonic() + 30
    while processes.alive(rank) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not processes.alive(rank)

"""The commands, as a user meets them."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from ditmesh.generate.receipt import read_receipt
from support import processes
from support.commands import refusal, run
from support.tiny import save_tiny_sd3

TEST_PATH = os.pathsep.join(path for path in sys.path if path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def facts_only(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without its weights: enough for everything that is refused before ranks start."""
    copy = tmp_path_factory.mktemp("facts") / "model"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def pixels(path: str | Path) -> numpy.ndarray:
    with Image.open(path) as image:
        return numpy.asarray(image).astype(int)


# ---- what works


def test_two_devices_draw_the_picture_of_one(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    common = ["generate", "a red fox", "a blue bird", "--model", model, "--steps", "3", "--threads", "1", "--seed", "5"]
    code = run(*common, "--devices", "2", "--num-images", "2", "--out", out, "--json")
    captured = capfd.readouterr()
    assert code == 0, captured.err
    # One JSON object and nothing else.
    result = json.loads(captured.out)
    assert [picture["prompt"] for picture in result["images"]] == ["a red fox"] * 2 + ["a blue bird"] * 2
    assert [picture["seed"] for picture in result["images"]] == [5, 6, 7, 8]
    assert sorted(path.name for path in out.iterdir()) == [
        "0000-a-red-fox-seed5.png",
        "0001-a-red-fox-seed6.png",
        "0002-a-blue-bird-seed7.png",
        "0003-a-blue-bird-seed8.png",
    ]
    # As many images as devices: each device makes its own.
    assert result["config"]["data"] == 2
    assert result["devices"] == 2
    drawn = [pixels(picture["path"]) for picture in result["images"]]
    assert all(image.shape == (32, 32, 3) and image.std() > 0 for image in drawn)
    assert not any((drawn[0] == other).all() for other in drawn[1:])
    assert run(*common, "--devices", "1", "--num-images", "2", "--out", tmp_path / "one") == 0
    assert all(abs(pixels(tmp_path / "one" / path.name) - pixels(path)).max() <= 1 for path in out.iterdir())
    receipt = read_receipt(out / "0003-a-blue-bird-seed8.png")
    assert (receipt.prompt, receipt.seed, receipt.index, receipt.steps) == ("a blue bird", 8, 3, 3)
    assert (receipt.devices, receipt.pipeline, receipt.width) == (2, "StableDiffusion3Pipeline", 32)


@pytest.mark.matrix
def test_torchrun_ranks_verify_and_the_first_is_the_one_device(model: Path) -> None:
    mark, environment = processes.marked({"PYTHONPATH": TEST_PATH})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "ditmesh", "verify", "ulysses=2", "ring=2 reproducible", "--prompt", "a red fox"]
    command += ["--model", str(model), "--steps", "2", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    fast, same = result["configs"]
    assert [one["config"] for one in result["one_device"]] == ["one device", "1 device reproducible"]
    assert fast["passed"]
    assert same["outcome"] == "same bits"
    assert all(sum(one["bytes_sent"].values()) > 0 for one in (fast, same))
    other = [word if word != "ulysses=2" else "ulysses=4" for word in command]
    done = subprocess.run(other, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert done.stderr.count("ditmesh: torchrun has started 2 ranks, and 'ulysses=4' is for 4; leave it out, or") == 1
    assert processes.wait_until_gone(mark, 10) == []


@pytest.mark.parametrize("degrees", ["", pytest.param("--ulysses 2 --shard 2", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        pytest.param(signal.SIGINT, 130, "ditmesh: stopped by Ctrl-C\n", marks=pytest.mark.matrix),
        (signal.SIGTERM, 143, "ditmesh: stopped by SIGTERM\n"),
    ],
)
def test_ctrl_c_and_sigterm_keep_what_is_drawn_and_leave_nothing_else(
    model: Path, tmp_path: Path, temporary: Path, number: int, code: int, says: str, degrees: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"picture number {number}\n" for number in range(100_000)))
    mark, environment = processes.marked({"PYTHONPATH": TEST_PATH, "TMPDIR": str(temporary)})
    command = [sys.executable, "-m", "ditmesh.cli.main", "generate", "--prompts", str(prompts), "--model", str(model)]
    command += ["--devices", "2", *degrees.split(), "--threads", "1", "--steps", "1", "--out", str(tmp_path / "out")]
    owner = processes.interruptible(command, environment)
    try:
        limit = time.monotonic() + 240
        while not list((tmp_path / "out").glob("*.png")) and time.monotonic() < limit and owner.poll() is None:
            time.sleep(0.1)
        # The command, the fork server and two ranks at least.
        assert len(processes.family(mark)) >= 4
        owner.send_signal(number)
        limit = time.monotonic() + 10
        # Those that follow change nothing.
        for again in (number, signal.SIGINT, signal.SIGTERM) * 10:
            time.sleep(0.01)
            if owner.poll() is None:
                owner.send_signal(again)
        _, said = owner.communicate(timeout=10)
        assert owner.returncode == code
        assert "Traceback" not in said
        assert said.endswith(says)
        assert processes.wait_until_gone(mark, limit - time.monotonic()) == []
    finally:
        owner.kill()
        owner.wait(10)
    drawn = sorted((tmp_path / "out").iterdir())
    assert drawn
    assert list(temporary.iterdir()) == []
    # The pictures are named: those that were reported, which may be all but the last.
    named = int(re.search(r"(\d+) of 100000 images were generated before: ", said)[1])
    assert len(drawn) - 1 <= named <= len(drawn)
    assert f"were generated before: {', '.join(map(str, drawn[: min(named, 8)]))}" in said
    for path in drawn:
        assert path.suffix == ".png"
        assert read_receipt(path).prompt.startswith("picture number")


def test_a_rank_that_dies_is_reported_and_pictures_are_kept(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ditmesh.launch import RankPool

    pids: list[int] = []
    run_on = RankPool.run

    def run_and_kill(self: RankPool, *arguments: Any, **more: Any) -> list[Any]:
        def kill() -> None:
            while len(list(tmp_path.glob("*.png"))) < 3:
                time.sleep(0.01)
            os.kill(self.pids[1], signal.SIGKILL)

        pids.extend(self.pids)
        threading.Thread(target=kill, daemon=True).start()
        return run_on(self, *arguments, **more)

    monkeypatch.setattr(RankPool, "run", run_and_kill)
    many = ["fox"] * 300
    code = run(
        "generate", *many, "--model", model, "--devices", "2", "--steps", "1", "--threads", "1", "--out", tmp_path
    )
    said = capfd.readouterr().err
    assert code == 1
    assert "rank 1 of 2 was killed by SIGKILL" in said
    assert "of 300 images were generated before" in said
    assert [pid for pid in pids if processes.alive(pid)] == []
    assert all(read_receipt(path).prompt == "fox" for path in tmp_path.glob("*.png"))


def test_no_file_is_replaced_and_pictures_come_in_batches(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two runs into one folder that holds a file of somebody else under one of the names."""
    out = tmp_path / "out"
    out.mkdir()
    names = [f"000{number}-a-red-fox-seed{number}.png" for number in range(3)]
    (out / names[1]).write_text("not ours")
    common = ["generate", FOX, "--model", model, "--steps", "1", "--threads", "1", "--num-images", "3", "--out", out]
    assert run(*common, "--batch", "2", "--overwrite", "--json") == 0
    pictures = json.loads(capfd.readouterr().out)["images"]
    # Pictures 0 and 1 in one call, 2 in another; ditmesh's own may be replaced, somebody else's not.
    assert [(one["together"], one["place"], one["seed"]) for one in pictures] == [(2, 0, 0), (2, 1, 1), (1, 0, 2)]
    assert [Path(one["path"]).name for one in pictures] == [names[0], "0001-a-red-fox-seed1-2.png", names[2]]
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert run(*common, "--json") == 0
    pictures = json.loads(capfd.readouterr().out)["images"]
    assert [one["together"] for one in pictures] == [3, 3, 3]
    numbered = [name.replace(".png", f"-{number}.png") for name, number in zip(names, (2, 3, 2), strict=True)]
    assert [Path(one["path"]).name for one in pictures] == numbered
    assert {name: (out / name).read_bytes() for name in before} == before
    assert before[names[1]] == b"not ours"


# ---- what is refused


def bad(*arguments: str, says: tuple[str, ...], name: str) -> Any:
    return pytest.param(list(arguments), says, id=name)


FOX = "a red fox"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        bad(says=("no prompt", "--prompts"), name="no prompt"),
        bad("  ", says=("prompt 1 is empty",), name="empty prompt"),
        bad(FOX, "--size", "40x30", says=("size 40x30", "multiples of 4", "40x28 or 40x32"), name="size multiple"),
        bad(FOX, "--size", "128x64", says=("size 128x64", "64x64"), name="size too large"),
        bad(FOX, "--size", "big", says=("--size big: write WIDTHxHEIGHT",), name="size malformed"),
        bad(
            FOX,
            *["--devices", "4", "--ulysses", "3"],
            says=("ulysses=3 needs 3 ranks, and --devices is 4",),
            name="degrees",
        ),
        bad(FOX, "--devices", "0", says=("--devices 0", "--devices 1"), name="no devices"),
        bad(FOX, "--ring", "65", says=("65 ranks", "64 image tokens", "at most 64"), name="tokens"),
        bad(FOX, "--config", "NONE", says=("none.txt", "No such file", "YAML"), name="config missing"),
        bad(FOX, "--config", "GOOD", "--devices", "3", says=("ulysses=2", "--devices is 3"), name="config and devices"),
        bad(FOX, "--out", "FILE", says=("folder", "--out"), name="out is a file"),
        bad(FOX, "--model", "./nowhere", says=("'./nowhere'", "no such folder", "save_pretrained"), name="no model"),
        bad(FOX, "--model", "FOLDER", says=("no model_index.json", "save_pretrained"), name="not a model"),
        bad(FOX, "--model", "UNET", says=("SomePipeline has no transformer", "unet", "Flux"), name="not a DiT"),
        bad(FOX, "--model", "CLASSES", says=(f"{FOX!r}", "takes classes", "'fox'"), name="no such class"),
        bad("fox", "--model", "CLASSES", "--size", "8x8", says=("size 8x8", "one size"), name="size of classes"),
        bad(FOX, "--out", "", says=("--out names no folder", "--out ."), name="out empty"),
        bad("half \ud83e", says=("prompt 1 is not Unicode", "character 6"), name="half a character"),
        bad(FOX, "--model", "m" * 5000, says=("cannot be a folder", "File name too long"), name="long model name"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_before_ranks_start(
    facts_only: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: tuple[str, ...],
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ditmesh.launch.RankPool.__init__", start)
    unet = tmp_path / "unet"
    unet.mkdir()
    (unet / "model_index.json").write_text('{"_class_name": "SomePipeline", "unet": ["diffusers", "UNet"]}')
    classes = tmp_path / "classes"
    shutil.copytree(facts_only, classes)
    index = json.loads((classes / "model_index.json").read_text())
    (classes / "model_index.json").write_text(json.dumps({**index, "id2label": {"0": "fox, red fox", "1": "bird"}}))
    for name, text in {"good.yaml": "ulysses: 2", "file": ""}.items():
        (tmp_path / name).write_text(text)
    names = {"NONE": "none.txt", "GOOD": "good.yaml", "FILE": "file", "FOLDER": ".", "UNET": "unet"}
    names["CLASSES"] = "classes"
    arguments = [str(tmp_path / names[word]) if word in names else word for word in arguments]
    if "--model" not in arguments:
        arguments += ["--model", str(facts_only)]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "out")]
    sentence = refusal(capsys, "generate", "--device", "cpu", *arguments)
    for words in says:
        assert words in sentence


def test_cuda_that_is_not_there_is_refused(
    facts_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    assert run("generate", FOX, "--model", facts_only, "--device", "cuda", "--out", tmp_path) == 2
    assert "has none here, or no backend to connect them; use cpu, or install torch" in capsys.readouterr().err
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    assert run("generate", FOX, "--model", facts_only, "--devices", "2", "--out", tmp_path) == 2
    assert "2 ranks need 2 GPUs, but 1 is there" in capsys.readouterr().err


def test_weights_that_are_a_program_are_refused_in_one_sentence(model: Path, tmp_path: Path) -> None:
    from ditmesh.errors import InputError
    from ditmesh.generate.components import read_saved
    from ditmesh.generate.model_info import find_model

    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    (weights,) = (copy / "text_encoder").glob("*.safetensors")
    weights.unlink()
    (copy / "text_encoder" / "pytorch_model.bin").write_bytes(pickle.dumps(Path("somewhere")))
    with pytest.raises(InputError, match=r"model .* cannot be loaded by diffusers .*pickled program") as caught:
        read_saved(find_model(copy))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("study", "fox", "--steps", "-3"), "--steps -3 is not possible"),
        (("verify", ""), "the configuration '' is empty"),
        (("verify", "ulysses=1"), "'1 device' compares one device with itself"),
        (("verify", "ulysses=2", "--num-images", "2000"), "use 1024 at most"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_other_commands_refuse(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr("ditmesh.launch.RankPool.__init__", start)
    monkeypatch.setattr("ditmesh.cli.study._run", start)
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("ditmesh: ")
    assert says in said
    assert len(said.strip().splitlines()) == 1


def test_every_setting_can_be_given(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The options and what --set takes are made from the fields, so that a new setting is among them."""
    from ditmesh.cli.options import ConfigOptions
    from ditmesh.config import ParallelConfig, setting

    changes = ["stages=5,7", "speeds=auto", "shared_memory=false", "compile=eager", "warmup=steps(0 5)"]
    more = {"stages": (5, 7), "speeds": "auto", "shared_memory": False, "compile": "eager", "warmup": "steps(0 5)"}
    assert ConfigOptions(ring=2, changes=changes).settings() == {"ring": 2, **more}
    assert all(setting(name).help for name in ParallelConfig.model_fields)
    monkeypatch.setenv("COLUMNS", "200")
    assert run("generate", "-h") == 0
    said = capsys.readouterr().out
    for name in ParallelConfig.model_fields:
        assert (f" --{name} " in said) == setting(name).option
        assert f" {name}{' ' if setting(name).option else ''}" in said.replace("--", " ").replace(",", " ").replace(
            ";", " "
        )


# ---- the others


def test_doctor_shows_the_machine_and_lets_ranks_meet(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run("doctor", "--devices", "2", "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert {"python", "torch", "diffusers", "transformers"} <= set(facts["versions"])
    assert facts["cpu"]["cores"] >= 1
    assert facts["shared_memory"]["size_gb"] >= facts["shared_memory"]["free_gb"] > 0
    assert facts["variables"]["OMP_NUM_THREADS"] == "1"
    assert facts["ranks_meet"] is True


def test_doctor_names_what_cannot_be_imported_or_is_too_old(monkeypatch, tmp_path, capsys):
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('look above') from ImportError('no HybridCache')\n")
    monkeypatch.syspath_prepend(tmp_path)
    modules = {"broken_library": "broken_library", "absent_library": "absent_library", "json": "json"}
    monkeypatch.setattr("ditmesh.launch.hardware.IMPORTS", modules)
    monkeypatch.setattr("ditmesh.requirements.requires", lambda name: ["json-x>=2", 'peft>=0.18; extra == "lora"'])
    monkeypatch.setattr("ditmesh.requirements.version", {"json-x": "2.1", "peft": "0.17.1"}.__getitem__)
    assert run("doctor", "--devices", "1") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "missing peft 0.17.1 is too old for ditmesh; pip install 'peft>=0.18'" in shown
    assert "missing broken_library cannot be imported (ImportError: no HybridCache)" in shown
    assert "absent_library" not in shown


def test_a_client_without_httpx_is_one_sentence():
    program = "import sys; sys.modules['httpx'] = None; import ditmesh; ditmesh.Client"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "a client of a server needs httpx, which is not installed; pip install 'ditmesh[serve]'"
    )


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys\nfrom ditmesh.cli.main import main\ntry:\n main(['--help'])\nfinally:\n"
    code += " print(sorted({'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": TEST_PATH}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert "generate" in done.stdout


def test_layout_shows_the_layout(capsys):
    assert run("layout", "--json") == 0
    (region,) = json.loads(capsys.readouterr().out)["layout"]["regions"]
    assert region["blocks"] == "transformer_blocks"

"""Pictures drawn again from their receipts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ditmesh import zoo
from ditmesh.config import ParallelConfig
from ditmesh.core.files import digest_of_file
from ditmesh.errors import ConfigError
from ditmesh.generate.model_info import find_model
from ditmesh.generate.receipt import Receipt, read_receipt, write_png
from ditmesh.generate.replay import changes_of, compare_replay, drawn_alone, job_of, receipt_config, receipt_model
from ditmesh.resizing import resized
from support.commands import refusal
from support.commands import run as command
from support.tiny import save_tiny_sd3

# A receipt of the first version, as it stands in pictures.
OLD: dict[str, Any] = {
    "prompt": "a red fox",
    "negative_prompt": None,
    "seed": 7,
    "index": 1,
    "steps": 2,
    "guidance": 3.0,
    "max_sequence_length": None,
    "width": 32,
    "height": 32,
    "model": "/nowhere/zoo/emoji-sd3",
    "pipeline": "StableDiffusion3Pipeline",
    "dtype": "float32",
    "device": "cpu",
    "devices": 2,
    "config": {"data": 1, "cfg": 1, "ring": 2, "ulysses": 1, "tensor": 1, "text": "auto", "inputs": "broadcast"},
    "versions": {"python": "3.11.7", "torch": "2.12.0"},
    "seconds": 1.5,
}
NEW = {
    **OLD,
    "weights_digest": "abc",
    "environment": {"torch": "2.13.0", "threads": "1", "device": "cpu", "python": "3.11.7"},
    "config": {**OLD["config"], "reproducible": True, "tiles": 8},
}


def receipt(**changes: Any) -> Receipt:
    return Receipt(**{**NEW, **changes})


def pixels(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fast(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second of two pictures that one call drew on two ranks."""
    out = tmp_path_factory.mktemp("fast")
    arguments = ["--model", model, "--steps", "2", "--threads", "1", "--ring", "2", "--num-images", "2", "--seed", "4"]
    assert command("generate", "a red fox", *arguments, "--out", out) == 0
    return out / "0001-a-red-fox-seed5.png"


@pytest.fixture(scope="module")
def reproducible(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reproducible")
    (out / "config.yaml").write_text("ring: 2\nreproducible: true\ntiles: 4\n")
    arguments = ["--model", model, "--steps", "2", "--threads", "1", "--config", out / "config.yaml"]
    assert command("generate", "a blue bird", *arguments, "--out", out) == 0
    return out / "0000-a-blue-bird-seed0.png"


# ---- what is drawn again


def test_a_receipt_holds_what_a_replay_needs(fast: Path, reproducible: Path):
    said = read_receipt(fast)
    assert (said.seed, said.together, said.place, said.devices) == (5, 2, 1, 2)
    assert said.weights_digest
    assert {"torch", "CPU", "CPU instructions", "threads", "BLAS", "device"} <= set(said.environment or {})
    assert said.environment["threads"] == "1"
    # Reproducible mode has settings of its own, and the receipt names those in force.
    strict = read_receipt(reproducible).environment
    assert strict["deterministic algorithms"] == "True"
    assert said.environment["deterministic algorithms"] == "False"


def test_a_fast_picture_again(fast: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The same call on the same ranks: the same pixels, though nobody promised them."""
    assert command("replay", fast, "--out", tmp_path, "--json") == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["equal"], result["promised"], result["changes"]) == (True, False, [])
    assert (result["devices"], result["config"]["ring"], result["threads"]) == (2, 2, 1)
    again = tmp_path / "0001-a-red-fox-seed5-replayed.png"
    assert result["replayed"] == str(again)
    assert list(tmp_path.iterdir()) == [again]
    assert (pixels(again) == pixels(fast)).all()
    assert read_receipt(again).prompt == "a red fox"


def test_a_reproducible_picture_on_other_devices(reproducible: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Drawn on two ranks, again on one: promised, and kept."""
    assert command("replay", reproducible, "--devices", "1", "--out", tmp_path, "--json") == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["promised"], result["equal"], result["largest_difference"]) == (True, True, 0)
    assert [(change["what"], change["was"], change["now"]) for change in result["changes"]] == [
        ("devices", "2", "1"),
        ("configuration", "ring=2 reproducible", "1 device reproducible"),
    ]
    assert (result["config"]["reproducible"], result["config"]["tiles"]) == (True, 4)


def test_a_promise_that_is_not_kept_is_exit_code_1(
    reproducible: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Somebody has painted over the picture; its receipt is as it was."""
    values = pixels(reproducible).copy()
    values[3, 4, 1] ^= 8
    painted = write_png(Image.fromarray(values), tmp_path / "painted.png", read_receipt(reproducible))
    assert command("replay", painted, "--devices", "1", "--out", tmp_path) == 1
    said = capfd.readouterr().out
    assert "0.1% of the pixels differ, by at most 8 of 255" in said
    assert "though the same ones were promised" in said


# ---- what is compared


def values(level: int = 0) -> np.ndarray:
    return np.full((4, 5, 3), level, dtype=np.uint8)


def picture(level: int = 0) -> Image.Image:
    return Image.fromarray(values(level))


def test_what_a_promise_needs():
    same = compare_replay(values(), values(), receipt(), receipt(devices=4))
    assert (same.promised, same.equal, same.psnr) == (True, True, None)
    other = compare_replay(values(), values(3), receipt(), receipt())
    assert (other.promised, other.equal, other.largest_difference, other.differing_pixels) == (True, False, 3, 1.0)
    for now in (
        receipt(weights_digest="other"),
        receipt(environment={**NEW["environment"], "torch": "2.14.0"}),
        receipt(config={**NEW["config"], "tiles": 4}),
        receipt(config={**NEW["config"], "reproducible": False}),
        receipt(config={**NEW["config"], "ring": 1, "patches": 2}),
        receipt(steps=3),
    ):
        found = compare_replay(values(), values(), receipt(), now)
        assert not found.promised
        assert sum(change.decides for change in found.changes) == 1
    assert not compare_replay(values(), values(), receipt(config=OLD["config"]), receipt(config=OLD["config"])).promised
    small = np.zeros((2, 5, 3), dtype=np.uint8)
    assert compare_replay(values(), small, receipt(), receipt()).largest_difference is None


def test_every_fact_of_a_receipt_is_in_its_job(tmp_path: Path):
    """What decides the image and is the receipt's own; the fields of a request are held to it in test_request.py."""
    for name in ("base.png", "control.png"):
        picture().save(tmp_path / name)
    files = [
        {"role": role, "path": str(tmp_path / name), "digest": digest_of_file(tmp_path / name), "scale": scale}
        for role, name, scale in (("image", "base.png", 1.0), ("ip-image", "control.png", 0.25))
    ]
    facts = {"max_sequence_length": 77, "dtype": "bfloat16", "scheduler": "FlowMatchHeunDiscreteScheduler"}
    facts |= {"variant": "fp16", "strength": 0.5, "files": files, "offload": "model"}
    was = receipt(**facts, device="cuda", together=3, place=2, seed=9)
    config = receipt_config(was)
    job = job_of(was, find_model("emoji-sd3"), config.model_copy(update={"reproducible": False}), tmp_path, 60.0)
    assert [vars(file) for file in job.files] == facts.pop("files")
    assert {name: getattr(job, name) for name in facts} == facts
    assert (job.n, job.seed, job.per_call) == (3, 7, 3)


def test_receipts_of_earlier_versions_can_be_read_and_replayed(tmp_path: Path):
    path = write_png(picture(), tmp_path / "old.png", Receipt(**OLD))
    # As it was written: without what did not exist.
    was = Receipt.model_validate_json(json.dumps(OLD))
    assert read_receipt(path) == was
    assert (was.weights_digest, was.environment, was.together, was.place) == (None, None, 1, 0)
    info = receipt_model(was)
    assert info.files == zoo.path("emoji-sd3")
    job = job_of(was, info, ParallelConfig(**was.config), tmp_path, 60.0)
    assert (job.prompts, job.seed, job.n, job.size) == (("a red fox",), 7, 1, (32, 32))
    texts = [change.describe() for change in changes_of(was, receipt(config=OLD["config"]))]
    assert "weights unknown -> abc" in texts
    assert "torch unknown -> 2.13.0" in texts


def test_a_reproducible_picture_is_drawn_alone_a_fast_one_with_its_neighbours(tmp_path: Path):
    was = receipt(seed=12, together=4, place=3)
    info = receipt_model(was)
    strict = ParallelConfig(ring=2, reproducible=True)
    job = job_of(was, info, strict, tmp_path, 60.0)
    assert (job.seed, job.n, drawn_alone(was, strict)) == (12, 1, True)
    job = job_of(was, info, ParallelConfig(ring=2), tmp_path, 60.0)
    assert (job.seed, job.n, drawn_alone(was, ParallelConfig(ring=2))) == (9, 4, False)


@pytest.mark.matrix
def test_the_nearest_configuration_for_other_devices():
    def near(devices: int, **settings: Any) -> ParallelConfig:
        return resized(ParallelConfig(**settings), devices, heads=8)

    assert near(2, cfg=2) == ParallelConfig(cfg=2)
    assert near(4, cfg=2) == ParallelConfig(ulysses=4)
    assert near(1, ring=2, exchange="displaced", compress="int8") == ParallelConfig()
    assert near(4, ring=2, exchange="displaced") == ParallelConfig(ring=4, exchange="displaced")
    staged = near(2, pipe=4, stages=(3, 1, 1, 1), reproducible=True)
    assert staged == ParallelConfig(pipe=2, patches=4, reproducible=True)
    # One device with the bits of several.
    assert near(1, pipe=2, reproducible=True) == ParallelConfig(patches=2, reproducible=True)
    with pytest.raises(ConfigError, match="cannot share tiles=2"):
        near(4, ring=2, reproducible=True, tiles=2)


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plain.png"], ("plain.png", "holds no receipt")),
        (["lost.png"], ("'./gone'", "--model")),
        (["odd.png"], ("'warp'", "ParallelConfig")),
        (["good.png", "--config", "ring=2", "--devices", "3"], ("ring=2", "3 are there")),
        (["hub.png"], ("'somebody/else'", "not on this machine", "--model somebody/else")),
        (["many.png"], ("5000 ranks", "--devices")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_in_one_sentence_before_ranks_start(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: tuple[str, ...],
):
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ditmesh.launch.RankPool.__init__", start)
    monkeypatch.chdir(tmp_path)
    picture().save("plain.png")
    write_png(picture(), "good.png", Receipt(**OLD))
    write_png(picture(), "lost.png", receipt(model="./gone"))
    write_png(picture(), "odd.png", receipt(config={"warp": 9}))
    write_png(picture(), "hub.png", receipt(model="somebody/else"))
    write_png(picture(), "many.png", receipt(devices=5000))

    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    # A picture names what it likes: that is no reason to ask anybody.
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    sentence = refusal(capsys, "replay", *arguments)
    for part in says:
        assert part in sentence


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({"predict": None, "compress": "residual4"}, {"predict": "none", "compress": "int4"}),
        ({"predict": "linear", "compress": "int4"}, {"predict": "linear", "compress": "int4"}),
        ({"predict": None, "compress": "int4"}, None),
        (
            {"exchange": "exact", "ring": 1, "pipe": 2, "predict": None},
            {"exchange": "exact", "ring": 1, "pipe": 2, "predict": "none"},
        ),
    ],
    ids=str,
)
def test_receipts_of_versions_that_did_not_move_keys_on(recorded: dict[str, Any], expected: dict[str, Any] | None):
    stale = {"ring": 2, "exchange": "displaced"}
    receipt = Receipt(**{**NEW, "config": {**stale, **recorded}})
    if expected is None:
        with pytest.raises(ConfigError, match="'int4' of this receipt is a code that is gone"):
            receipt_config(receipt)
        return
    config = receipt_config(receipt)
    assert config == ParallelConfig(**{**stale, **expected})
    assert ParallelConfig(**stale).recorded()["predict"] == "linear"

"""Videos: from prompts, pictures and videos to MP4, and back from the receipts in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ditmesh.generate import video
from ditmesh.generate.receipt import PNG_KEYWORD, read_receipt
from ditmesh.media.videos import read_frames
from support.commands import run as run_command
from support.tiny import save_tiny_wan

SMALL = ["--size", "32x32", "--steps", "2", "--guidance", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_wan(tmp_path_factory.mktemp("model"))


def moving(count: int = 5, side: int = 32) -> list[Image.Image]:
    """A red square that goes to the right."""
    frames = np.full((count, side, side, 3), 255, np.uint8)
    for number, frame in enumerate(frames):
        frame[8:16, 2 + 3 * number : 10 + 3 * number] = (200, 30, 30)
    return [Image.fromarray(frame) for frame in frames]


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    """A command's JSON."""
    capsys.readouterr()
    threads = [] if words[0] == "study" else ["--threads", "1"]
    assert run_command(*words, *threads, "--json") == 0
    return json.loads(capsys.readouterr().out)


def alone(model: Path, kind: str = "WanPipeline", **arguments: Any) -> list[Image.Image]:
    """What diffusers' own pipeline makes of seed 0."""
    import diffusers
    import torch

    pipe = getattr(diffusers, kind).from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 2, "guidance_scale": 1.0, "height": 32, "width": 32, **arguments}
    generator = [torch.Generator().manual_seed(0)]
    return pipe(prompt="a red fox", generator=generator, output_type="pil", **given).frames[0]


def apart(ours: list[Image.Image], theirs: list[Image.Image]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return max(int(abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)).max()) for a, b in pairs)


# --- files -------------------------------------------------------------------------------------------------------


def test_a_video_is_written_and_read(tmp_path: Path):
    frames = moving()
    video.write_mp4(frames, tmp_path / "a.mp4", 12.5, {PNG_KEYWORD: '{"prompt": "ein rötliches 狐"}'})
    video.write_mp4(frames, tmp_path / "b.mp4", 12.5, {PNG_KEYWORD: '{"prompt": "ein rötliches 狐"}'})
    assert video.metadata_of(tmp_path / "a.mp4")[PNG_KEYWORD] == '{"prompt": "ein rötliches 狐"}'
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    read = read_frames(tmp_path / "a.mp4", "a.mp4")
    # Compressed, at half of the colours' resolution.
    assert len(read) == 5
    assert apart(read, frames) < 120
    assert np.mean([abs(np.asarray(a, float) - np.asarray(b)).mean() for a, b in zip(read, frames, strict=True)]) < 4
    assert len(read_frames(tmp_path / "a.mp4", "a.mp4", 2)) == 2


def test_sides_that_are_odd_and_animated_pictures(tmp_path: Path):
    frames = [frame.resize((31, 33)) for frame in moving()]
    video.write_mp4(frames, tmp_path / "odd.mp4", 16, {})
    assert [one.size for one in read_frames(tmp_path / "odd.mp4", "odd")] == [(31, 33)] * 5
    frames[0].save(tmp_path / "moving.png", save_all=True, append_images=frames[1:])
    read = read_frames(tmp_path / "moving.png", "moving.png")
    assert video.frames_digest(read) == video.frames_digest(frames)
    assert video.frames_digest(read) != video.frames_digest(frames[::-1])


# --- generate and replay -----------------------------------------------------------------------------------------


def test_a_prompt_becomes_an_mp4_that_can_be_generated_again(
    model: Path, tmp_path: Path, kept_ranks: None, capsys: pytest.CaptureFixture[str]
):
    wanted = ["a red fox", "--model", model, "--frames", 5, "--fps", 8, *SMALL, "--devices", 2, "--reproducible"]
    made = run(capsys, "generate", *wanted, "--out", tmp_path)
    path = Path(made["images"][0]["path"])
    assert path.name == "0000-a-red-fox-seed0.mp4"
    assert (made["images"][0]["frames"], made["images"][0]["fps"]) == (5, 8.0)
    receipt = read_receipt(path)
    assert (receipt.frames, receipt.fps, receipt.pipeline) == (5, 8.0, "WanPipeline")
    assert receipt.frames_digest == made["images"][0]["frames_digest"]
    assert len(read_frames(path, str(path))) == 5
    # It is compressed, but of these frames.
    assert apart(alone(model, num_frames=5), read_frames(path, str(path))) < 120

    again = run(capsys, "replay", path, "--devices", 1, "--out", tmp_path / "again")
    assert (again["promised"], again["equal"], again["largest_difference"]) == (True, True, 0)
    assert read_receipt(again["replayed"]).frames_digest == receipt.frames_digest

    other = run(capsys, "generate", *wanted, "--seed", 1, "--out", tmp_path, "--overwrite")
    assert other["images"][0]["frames_digest"] != receipt.frames_digest
    more = run(capsys, "generate", *wanted, "--out", tmp_path)
    assert Path(more["images"][0]["path"]).name == "0000-a-red-fox-seed0-2.mp4"
    assert more["images"][0]["frames_digest"] == receipt.frames_digest


def test_the_frames_are_those_of_diffusers(
    model: Path, tmp_path: Path, kept_ranks: None, capsys: pytest.CaptureFixture[str]
):
    """One rank, fast mode: the digest in the receipt is that of what the unmodified pipeline makes."""
    made = run(capsys, "generate", "a red fox", "--model", model, "--frames", 5, *SMALL, "--out", tmp_path)
    expected = video.frames_digest(alone(model, num_frames=5))
    assert made["images"][0]["frames_digest"] == expected
    assert made["images"][0]["fps"] == 16.0


@pytest.mark.parametrize("role", ["image", pytest.param("video", marks=pytest.mark.matrix)])
def test_a_picture_or_a_video_to_begin_with(
    role: str, model: Path, tmp_path: Path, kept_ranks: None, capsys: pytest.CaptureFixture[str]
):
    frames = moving(7)
    frames[0].save(tmp_path / "in.png")
    frames[0].save(tmp_path / "in.webp", save_all=True, append_images=frames[1:], lossless=True)
    if role == "image":
        model = save_tiny_wan(tmp_path, image_to_video=True)
        given, kind = ["--image", tmp_path / "in.png"], "WanImageToVideoPipeline"
        arguments: dict[str, Any] = {"image": frames[0], "num_frames": 5}
    else:
        given, kind = ["--video", tmp_path / "in.webp", "--strength", 0.9], "WanVideoToVideoPipeline"
        arguments = {"video": frames[:5], "strength": 0.9}
    wanted = ["generate", "a red fox", "--model", model, "--frames", 5, *SMALL, *given, "--out", tmp_path / "out"]
    made = run(capsys, *wanted)["images"][0]
    assert made["frames_digest"] == video.frames_digest(alone(model, kind, **arguments))
    receipt = read_receipt(made["path"])
    assert receipt.pipeline == kind
    assert [file.role for file in receipt.files] == [role]
    on_two = run(capsys, *wanted, "--ulysses", 2, "--seed", 0)["images"][0]
    pair = (read_frames(one["path"], "") for one in (made, on_two))
    assert apart(*pair) <= 2
    again = run(capsys, "replay", made["path"], "--out", tmp_path / "again")
    assert again["equal"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--frames", "6"], "WanPipeline makes 4k + 1; use 5 or 9"),
        (["--frames", "9", "--video", "in.webp"], "has 7 frames, fewer than --frames 9"),
        (["--video", "in.webp"], "makes 4k + 1; use 5 or 9, as --frames"),
        (["--video", "in.webp", "--image", "in.png"], "leave --image out"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    words: list[str],
    said: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    frames = moving(7)
    frames[0].save("in.png")
    frames[0].save("in.webp", save_all=True, append_images=frames[1:], lossless=True)
    run_command("generate", "a red fox", "--model", model, *SMALL, *words)
    assert said in capsys.readouterr().err


def test_without_pyav_it_is_said_what_to_install(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("ditmesh.media.videos.find_spec", lambda name: None)
    run_command("generate", "a red fox", "--model", model, *SMALL)
    assert "pip install 'ditmesh[video]'" in capsys.readouterr().err


# --- verify and study --------------------------------------------------------------------------------------------


def test_videos_are_verified_frame_by_frame(
    model: Path, tmp_path: Path, kept_ranks: None, capsys: pytest.CaptureFixture[str]
):
    configs = ["ulysses=2", "ring=2 reproducible", "ring=2 exchange=displaced warmup=fixed(1)"]
    found = run(capsys, "verify", *configs, "--model", model, "--prompt", "a red fox", "--frames", 5, *SMALL)
    exact, same, stale = found["configs"]
    assert [len(one["images"]) for one in found["configs"]] == [5, 5, 5]
    assert exact["outcome"] in ("within 0.0001", "same bits")
    assert same["outcome"] == "same bits"
    assert stale["outcome"] == "not judged"
    assert not stale["equal"]


# --- training ----------------------------------------------------------------------------------------------------


def test_videos_are_trained_on(model: Path, tmp_path: Path):
    """The first loss is that of diffusers' own modules on the same noise; frames that cannot be are refused."""
    import diffusers
    import torch

    from ditmesh.errors import ConfigError
    from ditmesh.train.data.sources import read_samples
    from ditmesh.train.trainer import Trainer
    from support.train import configured

    frames, data = moving(6), tmp_path / "data"
    data.mkdir()
    frames[0].save(data / "a.png", save_all=True, append_images=frames[1:])
    (data / "a.txt").write_text("to the right")
    given = {
        "pretrained_model_name_or_path": str(model),
        "train_data_dir": str(data),
        "output_dir": str(tmp_path / "out"),
        "resolution": 32,
        "num_frames": 5,
        "max_sequence_length": 24,
        "train_batch_size": 1,
        "max_train_steps": 1,
        "weighting_scheme": "none",
    }
    pipe = diffusers.WanPipeline.from_pretrained(model)
    # So that a mistake in their scale is seen.
    pipe.vae.register_to_config(latents_mean=[0.5] * 4, latents_std=[2.0] * 4)
    seen: dict[str, Any] = {}
    with Trainer(configured(given), pipe) as trainer:
        hook = pipe.transformer.register_forward_hook(lambda *of: seen.update(out=of[-1][0].detach()))
        inner = trainer.objective

        def objective(latents: torch.Tensor, generators: Any) -> Any:
            seen["noised"], seen["latents"] = inner(latents, generators), latents
            return seen["noised"]

        trainer.objective = objective  # type: ignore[assignment]
        outcome = trainer.run()
        hook.remove()
        with pytest.raises(OSError, match="has 6 frames, and num_frames=7"):
            trainer.data.samples[0].frames(7)
    video.write_mp4(frames, data / "b.mp4", 16, {})
    assert [one.size for one in read_samples(configured(given).data, "text").good] == [(32, 32)] * 2
    assert seen["latents"].shape == (1, 4, 2, 8, 8)
    noised = seen["noised"]
    assert outcome.losses[0] == pytest.approx(float((seen["out"] - noised.target).square().mean()), rel=1e-5)
    values = torch.stack([torch.from_numpy(np.asarray(frame).copy()).permute(2, 0, 1) for frame in frames[:5]], dim=1)
    with torch.no_grad():
        found = pipe.vae.encode(values[None].float() / 127.5 - 1).latent_dist
    # The mean off, over the deviation; within what is drawn around it.
    assert ((seen["latents"] - (found.mean - 0.5) / 2).abs() <= 6 * found.std / 2).all()
    for changed, said in (
        ({"num_frames": None}, "say of how many frames"),
        ({"num_frames": 6}, "use 5 or 9"),
        ({"validation_prompts": ["to the left"]}, "leave them out"),
    ):
        with pytest.raises(ConfigError, match=said):
            Trainer(configured(given | changed | {"output_dir": str(tmp_path / "other")}), pipe)

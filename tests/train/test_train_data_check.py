"""`ditmesh train --check` of a run: what is trained and what is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from support.commands import run as run_command
from support.train import emoji, folder_of, grouped, settings


def messy(folder: Path) -> Path:
    """A folder with what people have in theirs."""
    folder_of(folder, 4, side=96)
    (folder / "metadata.jsonl").unlink()
    for number, (caption, _) in enumerate(emoji(4)):
        (folder / f"00{number}.txt").write_text(caption, encoding="utf-8")
    (folder / "000.txt").write_text(" ".join(["a red fox"] * 9), encoding="utf-8")
    (folder / "copy.PNG").write_bytes((folder / "001.png").read_bytes())
    (folder / "copy.txt").write_text("again", encoding="utf-8")
    whole = (folder / "003.png").read_bytes()
    (folder / "cut ☕.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    frames = [Image.new("RGB", (96, 96), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "film.gif", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6
    # Stored on its side: wide and low, but high when it is seen.
    Image.new("RGB", (96, 24), "teal").save(folder / "phone.jpg", exif=exif)
    return folder


def test_a_run_is_checked_with_its_data(tmp_path, capsys):
    data = messy(tmp_path / "data")
    run = settings(data, tmp_path / "out", trigger_word="an emoji", random_flip=True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(grouped(run)))
    words = ["train", "--check", str(tmp_path / "run.yaml")]
    assert run_command(*words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["data"]
    assert [(one["samples"], one["per_epoch"]) for one in found["sets"]] == [(8, 8)]
    assert found["captions"]["cut"][0].startswith("1 caption is cut by tokenizer at 16 tokens")
    assert found["captions"]["without"] == ["cut ☕.png", "film.gif", "phone.jpg"]
    assert [one.split()[0] for one in found["skipped"]] == ["empty.png", "cut"]
    assert "film.gif is animated: its first frame is trained" in found["notes"]
    assert any(one.startswith("phone.jpg has 24 x 96 pixels, of which 75% are cut away") for one in found["notes"])
    assert found["decoded"] == found["samples"] == 8
    assert run_command(*words) == 0
    assert "film.gif is animated" in capsys.readouterr().out


def test_labels_are_checked_too(tmp_path, capsys):
    run = {"pretrained_model_name_or_path": "fashion-dit", "train_data_dir": str(folder_of(tmp_path / "data", 3, 32))}
    run |= {"output_dir": str(tmp_path / "out"), "resolution": 32, "train_batch_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(grouped(run)))
    assert run_command("train", "--check", str(tmp_path / "run.yaml"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data"]["captions"]["by"] == "label"

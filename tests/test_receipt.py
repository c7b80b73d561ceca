"""What a PNG says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ditmesh.errors import InputError
from ditmesh.receipt import CHUNK, Receipt, library_versions, read_receipt, write_png


def receipt(**changes: Any) -> Receipt:
    facts: dict[str, Any] = {
        "prompt": "un renard roux, 赤い狐 🦊",
        "negative_prompt": "blur",
        "seed": 2**60,
        "index": 3,
        "steps": 20,
        "guidance": 4.5,
        "width": 5,
        "height": 4,
        "model": "./a model",
        "pipeline": "StableDiffusion3Pipeline",
        "dtype": "float32",
        "device": "cpu",
        "devices": 2,
        "config": {"ulysses": 2},
        "versions": library_versions(),
        "seconds": 1.25,
    }
    return Receipt(**{**facts, **changes})


def picture() -> Image.Image:
    return Image.fromarray(numpy.arange(60, dtype=numpy.uint8).reshape(4, 5, 3))


def test_a_receipt_survives_with_the_pixels(tmp_path: Path) -> None:
    path = write_png(picture(), tmp_path / "a.png", receipt())
    assert read_receipt(path) == receipt()
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert (numpy.asarray(image) == numpy.asarray(picture())).all()


def test_writing_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_png(picture(), tmp_path / "a.png", receipt(index=1))
    write_png(picture(), tmp_path / "a.png", receipt(index=2))
    assert read_receipt(tmp_path / "a.png").index == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_png(picture(), tmp_path / "a.png", receipt(index=1))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(InputError, match=r"cannot write '.*a\.png' \(No space left on device\); choose another folder"):
        write_png(picture(), tmp_path / "a.png", receipt(index=2))
    assert read_receipt(tmp_path / "a.png").index == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_versions_name_what_computes() -> None:
    assert {"python", "ditmesh", "torch", "diffusers", "transformers"} <= set(library_versions())


def test_files_without_a_receipt_are_refused_clearly(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    picture().save(tmp_path / "plain.png")
    odd = PngInfo()
    odd.add_itxt(CHUNK, '{"prompt": "a red fox"}')
    picture().save(tmp_path / "odd.png", pnginfo=odd)
    for name, said in {
        "missing.png": "No such file",
        "text.png": "is not a picture",
        "plain.png": "holds no receipt",
        "odd.png": "cannot be read (wrong: seed, index,",
    }.items():
        with pytest.raises(InputError) as caught:
            read_receipt(tmp_path / name)
        assert said in str(caught.value)
        assert name in str(caught.value)

"""What a PNG says about itself."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ditmesh._version import library_versions
from ditmesh.core.files import written_whole
from ditmesh.errors import InputError
from ditmesh.generate.receipt import PNG_KEYWORD, Receipt, holds_receipt, read_receipt, write_png


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


def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path):
    """Whoever reads meanwhile has the file from before."""
    path = tmp_path / "file"
    path.write_text("before")
    with written_whole(path) as temporary:
        temporary.write_text("aft")
        assert path.read_text() == "before"
    assert path.read_text() == "aft"


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_png(picture(), tmp_path / "a.png", receipt(index=1))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(InputError, match=r"cannot write '.*a\.png' \(No space left on device\); choose another folder"):
        write_png(picture(), tmp_path / "a.png", receipt(index=2))
    assert read_receipt(tmp_path / "a.png").index == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_files_without_a_receipt_are_refused_clearly(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    picture().save(tmp_path / "plain.png")
    odd = PngInfo()
    odd.add_itxt(PNG_KEYWORD, '{"prompt": "a red fox"}')
    picture().save(tmp_path / "odd.png", pnginfo=odd)
    for name, said in {
        "missing.png": "No such file",
        "text.png": "is not an image",
        "plain.png": "holds no receipt",
        "odd.png": "cannot be read (wrong: seed, index,",
    }.items():
        with pytest.raises(InputError) as caught:
            read_receipt(tmp_path / name)
        assert said in str(caught.value)
        assert name in str(caught.value)


def test_a_file_that_is_there_is_kept_when_asked(tmp_path: Path) -> None:
    path = write_png(picture(), tmp_path / "a.png", receipt(index=1), replace=False)
    with pytest.raises(FileExistsError):
        write_png(picture(), path, receipt(index=2), replace=False)
    assert read_receipt(path).index == 1
    assert [one.name for one in tmp_path.iterdir()] == ["a.png"]
    picture().save(tmp_path / "plain.png")
    (tmp_path / "text.png").write_text("not a picture")
    assert [holds_receipt(tmp_path / name) for name in ("a.png", "plain.png", "text.png", "none")] == [
        True,
        False,
        False,
        False,
    ]


def with_text(path: Path, text: str, compressed: bool = False) -> Path:
    """A picture with any text where the receipt stands."""
    info = PngInfo()
    info.add_itxt(PNG_KEYWORD, text, zip=compressed)
    picture().save(path, pnginfo=info)
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"place": 7}, "place 7 is none of 1 images"),
        ({"together": 1000, "width": 1024, "height": 1024}, "too much for one call"),
        ({"steps": 10**30}, "steps"),
        ({"dtype": "__class__"}, "dtype"),
        ({"devices": 10**9}, "devices"),
        ({"guidance": float("nan")}, "guidance"),
        ({"prompt": "x" * 200_000}, "prompt"),
    ],
    ids=str,
)
def test_a_receipt_is_somebody_elses_data(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = with_text(tmp_path / "a.png", json.dumps({**receipt().model_dump(), **changes}))
    with pytest.raises(InputError, match=says) as caught:
        read_receipt(path)
    assert len(str(caught.value)) < 1000


def test_pictures_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (tmp_path / "wide.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    with pytest.raises(InputError, match="larger than any image"):
        read_receipt(tmp_path / "wide.png")
    with pytest.raises(InputError, match="cannot read"):
        read_receipt(with_text(tmp_path / "bomb.png", "x" * 2**26, compressed=True))
    with pytest.raises(InputError, match=r"cannot read|ditmesh wrote none so long"):
        read_receipt(with_text(tmp_path / "long.png", "x" * (2**26 + 1)))
    with pytest.raises(InputError, match="ditmesh wrote none so long"):
        read_receipt(with_text(tmp_path / "longer.png", "x" * 2**23))
    deep = with_text(tmp_path / "deep.png", "[" * 100_000)
    with pytest.raises(InputError, match="cannot be read"):
        read_receipt(deep)


def test_what_tokenizers_cut_is_counted() -> None:
    from types import SimpleNamespace

    from transformers import AutoTokenizer

    from ditmesh.generate.cut_prompts import CutPrompts
    from ditmesh.zoo import path

    tokenizer = AutoTokenizer.from_pretrained(Path(path("emoji-sd3")) / "tokenizer")
    long, short = "a Red Fox, in the snow, " * 4, "a fox"
    tokens = len(tokenizer(long)["input_ids"])
    before = vars(tokenizer).copy()
    with CutPrompts(SimpleNamespace(components={"tokenizer": tokenizer, "vae": None})) as cuts:
        # As pipelines do, also after they have cleaned the text, and without a limit.
        tokenizer([long.lower().strip(), short], max_length=16, truncation=True, padding="max_length")
        tokenizer([f"{short} {long}"], padding="longest")
        assert cuts.sentence(long) == f"{tokens - 16} tokens of the prompt were cut (tokenizer takes 16)"
        assert cuts.sentence(short) is None
        assert (
            cuts.sentence(short, long) == f"{tokens - 16} tokens of the negative prompt were cut (tokenizer takes 16)"
        )
        tokenizer(long, max_length=tokens - 1, truncation=True)
        assert cuts.sentence(long) == f"1 token of the prompt was cut (tokenizer takes {tokens - 1})"
        tokenizer("another", max_length=tokens, truncation=True)
        assert cuts.sentence("another") is None
    assert vars(tokenizer) == before

"""Data sets as others have made them: each trains on what a person sees and reads, or is named, or refused."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_media import RED, SAMPLES, close, file_of, mp4_of, turned

from ditmesh.errors import InputError
from ditmesh.train.data.samples import DataReport, Samples
from ditmesh.train.data.sources import read_samples
from ditmesh.train.run import train
from ditmesh.train.trainer import Preparing, Progress
from support.train import configured, settings

PNG = file_of(np.full((8, 8, 3), RED, np.uint8))


def put(folder: Path, *files: tuple[str, bytes | str | list[Any] | dict[str, Any]]) -> None:
    """Files by name: bytes, text, JSON of a dictionary, JSON lines of a list."""
    for name, content in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "\n".join(json.dumps(one, ensure_ascii=False) for one in content)
        if isinstance(content, dict):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def pngs(*names: str) -> list[tuple[str, bytes]]:
    return [(name, PNG) for name in names]


def line(file: Any, **more: Any) -> dict[str, Any]:
    return {"file_name": file, **more}


AB = pngs("a.png", "b.png")
TWO = [("a.png", "A"), ("b.png", "B")]
BOTH = [line("a.png", text="A"), line("b.png", text="B")]
CSV = "file_name,text\na.png,A\nb.png,B\n"

# What is there; the samples (name and caption) that are found; words of the report, or of the refusal where there are
# no samples; settings.
CASES: dict[str, tuple[list[tuple[str, Any]], list[tuple[str, Any]] | None, list[str], dict[str, Any]]] = {
    # --- where captions are
    "jsonl": ([*AB, ("metadata.jsonl", BOTH)], TWO, ["with caption: 2 (2 of text in metadata.jsonl)"], {}),
    "a column prompt": ([*AB, ("metadata.csv", CSV.replace("text", "prompt"))], TWO, ["prompt in metadata.csv"], {}),
    "text goes before caption": (
        [*AB, ("metadata.jsonl", [line(n + ".png", caption="?", text=n.upper()) for n in "ab"])],
        TWO,
        ["text in metadata.jsonl"],
        {},
    ),
    "a configured column that is not there": (
        [*AB, ("metadata.jsonl", BOTH)],
        None,
        ["caption_column='long' is not in", "are text; name one"],
        {"caption_column": "long"},
    ),
    "a column of another name": (
        [*AB, ("metadata.jsonl", [line("a.png", description="A"), line("b.png", description="B")])],
        None,
        ["none of 2 samples", "has a caption (columns that are there: description)"],
        {},
    ),
    "csv of a spreadsheet": ([*AB, ("metadata.csv", ("\ufeff" + CSV.replace("\n", "\r\n")).encode())], TWO, [], {}),
    "csv with lines in cells": (
        [*AB, ("metadata.csv", 'file_name,text\na.png,"A, a\nsecond"\nb.png,"the ""B"""\n')],
        [("a.png", "A, a\nsecond"), ("b.png", 'the "B"')],
        [],
        {},
    ),
    "csv with an open quotation mark": (
        [*AB, ("metadata.csv", 'file_name,text\na.png,"A\nb.png,B\n')],
        None,
        ["metadata.csv line 3 is no row of a table"],
        {},
    ),
    "csv with empty cells": (
        [*AB, ("metadata.csv", "file_name,text\na.png,A\nb.png,\n")],
        [("a.png", "A"), ("b.png", None)],
        ["without caption: 1 (b.png)"],
        {},
    ),
    "listings that are not read": (
        [*AB, ("metadata.tsv", CSV.replace(",", "\t")), ("metadata.json", {"a.png": "A", "b.png": "B"})],
        None,
        ["none of 2 samples", "files that are not read: 1 .json, 1 .tsv (metadata.json, metadata.tsv)"],
        {},
    ),
    "a key twice": (
        [*AB, ("metadata.jsonl", '{"file_name": "a.png", "text": "A", "text": "?"}\n' + json.dumps(BOTH[1]))],
        TWO[1:],
        ["metadata.jsonl line 1 is not JSON (the key 'text' is there twice)", "left out: 1 file (a.png)"],
        {},
    ),
    "files .txt": ([*AB, ("a.txt", "A\n"), ("b.txt", "B")], TWO, ["2 of .txt"], {}),
    "files .png.txt": ([*AB, ("a.png.txt", "A"), ("b.png.txt", "B")], TWO, [], {}),
    "a listing and files that contradict it": (
        [*AB, ("metadata.jsonl", BOTH), ("a.txt", "other"), ("b.txt", "B")],
        TWO[1:],
        ["a.png is left out: text in metadata.jsonl and .txt say different things"],
        {},
    ),
    "a listing that has gaps which files fill": (
        [*AB, ("metadata.jsonl", [line("a.png", text="A"), line("b.png")]), ("b.txt", "B")],
        TWO,
        ["1 of .txt, 1 of text"],
        {},
    ),
    "images in no line": (
        [*AB, ("metadata.jsonl", BOTH[:1]), ("b.txt", "B")],
        TWO[:1],
        ["in no line of a listing, and left out: 1 file (b.png)", "files that are not read: 1 .txt (b.txt)"],
        {},
    ),
    "lines without images": ([*AB[:1], ("metadata.jsonl", BOTH)], TWO[:1], ["b.png is not there"], {}),
    "two listings": ([*AB, ("metadata.jsonl", BOTH), ("metadata.csv", CSV)], None, ["leave one there"], {}),
    "other splits": (
        [*((f"data/train/{n}", c) for n, c in [*AB, ("metadata.jsonl", BOTH)]), ("data/test/c.png", PNG)],
        [("data/train/a.png", "A"), ("data/train/b.png", "B")],
        ["not trained on, as it is beside train: data/test/"],
        {},
    ),
    "names of Windows": (
        [("images/a.png", PNG), ("metadata.jsonl", [line("images\\a.png", text="A")])],
        [("images/a.png", "A")],
        [],
        {},
    ),
    "names composed otherwise": (
        [("e\u0301.png", PNG), ("metadata.jsonl", [line("\u00e9.png", text="A")])],
        [("e\u0301.png", "A")],
        [],
        {},
    ),
    # --- text
    "a mark of UTF-8": ([*AB, ("metadata.jsonl", b"\xef\xbb\xbf" + json.dumps(BOTH[0]).encode())], TWO[:1], [], {}),
    "UTF-16 and UTF-32 with a mark": (
        [*AB, ("c.png", PNG), ("a.txt", "A".encode("utf-16")), ("c.txt", "C".encode("utf-32")), ("b.txt", "B")],
        TWO[1:],
        ["a.png is left out: a.txt line 1 is not UTF-8", "c.png is left out: c.txt line 1 is not UTF-8"],
        {},
    ),
    "Latin-1 in a listing": (
        [*AB, ("metadata.jsonl", '{"file_name": "a.png", "text": "A"}\n{"text": "café"}'.encode("latin-1"))],
        None,
        ["metadata.jsonl line 2 is not UTF-8"],
        {},
    ),
    "separators of lines in captions": (
        [*AB, ("metadata.jsonl", [line("a.png", text="A\u2028\x85\x0cb\x1e"), line("b.png", text="B\u2029")])],
        [("a.png", "A\u2028\x85\x0cb\x1e"), ("b.png", "B\u2029")],
        [],
        {},
    ),
    "half of a surrogate pair": (
        [*AB, ("metadata.jsonl", '{"file_name": "a.png", "text": "\\ud800"}\n' + json.dumps(BOTH[1]))],
        TWO[1:],
        ["metadata.jsonl line 1 has a caption with half of a surrogate pair"],
        {},
    ),
    "lines that are no JSON": (
        [*AB, ("metadata.jsonl", '{"file_name": "a.png", \n' + json.dumps(BOTH[1]))],
        TWO[1:],
        ["metadata.jsonl line 1 is not JSON", "left out: 1 file (a.png)"],
        {},
    ),
    "JSON that is deep": ([*AB, ("metadata.jsonl", "[" * 100_000)], None, ["metadata.jsonl line 1 is not JSON"], {}),
    "an empty listing": ([*AB, ("metadata.jsonl", b"")], None, ["metadata.jsonl is empty"], {}),
    # --- values
    "numbers and nothing": (
        [*pngs("c.png"), *AB, ("metadata.jsonl", [line("a.png", text=5), line("b.png", text=None), line("c.png")])],
        [("a.png", "5"), ("b.png", None), ("c.png", None)],
        ["without caption: 2 (b.png, c.png)"],
        {},
    ),
    "lists": (
        [*AB, ("metadata.jsonl", [line("a.png", text=["A", "a"]), line("b.png", text=["B"])])],
        [("a.png", ("A", "a")), TWO[1]],
        [],
        {},
    ),
    "objects and truth": (
        [
            *pngs("c.png"),
            *AB,
            ("metadata.jsonl", [line("a.png", text={}), line("b.png", text="B"), line("c.png", text=True)]),
        ],
        TWO[1:],
        ["line 1 has a caption that is no text but {}", "line 3 has a caption that is no text but true"],
        {},
    ),
    "names that lead out": (
        [*AB, ("metadata.jsonl", [line("../../etc/passwd", text="A"), line("/etc/passwd", text="A"), BOTH[1]])],
        TWO[1:],
        ["'../../etc/passwd' is outside of", "'/etc/passwd' is outside of"],
        {},
    ),
    "a name with NUL": ([*AB, ("metadata.jsonl", [line("a\0.png", text="A"), BOTH[1]])], TWO[1:], ["is not there"], {}),
    "no captions": (AB, None, ["none of 2 samples", "proportion_empty_prompts: 1"], {}),
    "no captions, allowed": (AB, [("a.png", None), ("b.png", None)], [], {"proportion_empty_prompts": 1}),
    "some empty captions": ([*AB, ("a.txt", ""), ("b.txt", "B")], [("a.png", ""), TWO[1]], ["without caption: 1"], {}),
    # --- files
    "files of macOS": ([AB[0], ("a.txt", "A"), ("._a.png", b"\0\5\x16\7"), ("__MACOSX/b.png", b"")], TWO[:1], [], {}),
    "files that break off": (
        [*AB, ("metadata.jsonl", [*BOTH, line("c.png", text="C")]), ("c.png", PNG[:20])],
        TWO,
        ["c.png is "],
        {},
    ),
}


def found_in(folder: Path, by: str = "text", **more: Any) -> Samples:
    config = configured(settings(folder, folder.parent / "out", **more))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_samples(config.data, by)
        found.check(config.data)
    return found


@pytest.mark.parametrize("name", CASES)
def test_data_sets_of_others(name, tmp_path):
    files, expected, words, more = CASES[name]
    data = tmp_path / "data"
    put(data, *files)
    if expected is None:
        with pytest.raises(InputError) as error:
            found_in(data, **more)
        said = str(error.value)
    else:
        found = found_in(data, **more)
        assert [(one.name, one.words) for one in found.good] == expected
        for sample in found.good:
            image = sample.picture()
            assert (image.height, image.width) == sample.size
            assert close(image.getpixel((4, 4)), RED)
        report = found.report()
        said = "\n".join((*report.lines, *found.corrupt))
        assert f"data: {len(expected)} sample" in said
        assert f"skipped: {len(found.corrupt)}\n" in said + "\n"
        # A data set that is as it should be is not talked about.
        assert report.odd or not found.corrupt
    for one in words:
        assert one in said, said


def test_what_is_no_file_is_skipped(tmp_path):
    put(tmp_path, ("a.png", PNG), ("a.txt", "A"), ("f.png/a.txt", "x"))
    os.mkfifo(tmp_path / "p.png")
    (tmp_path / "l.png").symlink_to(tmp_path / "l.png")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "empty.png").touch()
    found = found_in(tmp_path)
    assert [one.name for one in found.good] == ["a.png"]
    assert sorted(one.split()[0] for one in found.corrupt) == ["empty.png", "f.png", "l.png", "p.png"]
    os.mkfifo(tmp_path / "metadata.jsonl")
    with pytest.raises(InputError, match=r"metadata.jsonl is a pipe"):
        found_in(tmp_path)


def test_a_png_with_exif_behind_its_pixels_is_named(tmp_path):
    content = turned(6, "PNG")
    place = content.index(b"eXIf") - 4
    length = int.from_bytes(content[place : place + 4], "big") + 12
    end = content.index(b"IEND") - 4
    moved = content[:place] + content[place + length : end] + content[place : place + length] + content[end:]
    put(tmp_path, ("a.png", moved), ("a.txt", "A"))
    (sample,) = found_in(tmp_path).good
    with pytest.raises(OSError, match=r"a.png has 96 x 48 pixels by its header and 48 x 96"):
        sample.picture()


def test_videos_of_data_sets(tmp_path):
    put(tmp_path, ("a.mp4", mp4_of(np.full((48, 96, 3), RED, np.uint8), (0, 1, -1, 0), count=5)), ("a.txt", "A"))
    put(tmp_path, ("b.mp4", b"nothing"), ("c.jpg", turned(6, "JPEG")), ("c.txt", "C"))
    found = found_in(tmp_path, num_frames=5)
    assert [(one.name, one.size) for one in found.good] == [("a.mp4", (96, 48)), ("c.jpg", (96, 48))]
    assert [one.size for one in found.good[0].frames(5)] == [(48, 96)] * 5
    assert found.corrupt[0].startswith("b.mp4 ")
    with pytest.raises(OSError, match="has 1 frames, and num_frames=5"):
        found.good[1].frames(5)


@pytest.mark.parametrize(
    ("files", "expected", "words"),
    [
        ([("metadata.jsonl", [line("a.png", label=3), line("b.png", label="4")])], [3, 4], ""),
        ([("metadata.csv", "file_name,label\na.png,3\nb.png,\n")], [3, None], "without label: 1 (b.png)"),
        ([("metadata.jsonl", [line("a.png", label=3), line("b.png", label=0.5)])], [3], "line 2: label is 0.5"),
        ([("metadata.jsonl", [line("a.png", label=3), line("b.png", label=True)])], [3], "line 2: label is true"),
        ([("metadata.jsonl", [line("a.png", label=3), line("b.png", label=-1)])], [3], "line 2: label is -1"),
        ([("metadata.jsonl", [line("a.png", kind=3), line("b.png", kind=1)])], None, "none of 2 samples in"),
        ([], None, "none of 2 samples"),
    ],
    ids=str,
)
def test_labels(files, expected, words, tmp_path):
    put(tmp_path, *AB, *files)
    if expected is None:
        with pytest.raises(InputError) as error:
            found_in(tmp_path, "label")
        assert words in str(error.value)
    else:
        found = found_in(tmp_path, "label")
        assert [one.words for one in found.good] == expected
        assert words in "\n".join(found.report().lines)


def test_a_report_is_short(tmp_path):
    put(tmp_path, *((f"{number}.png", b"x") for number in range(50)), *AB, ("a.txt", "A"))
    lines = found_in(tmp_path).report().lines
    assert "  skipped: 50" in lines
    assert lines[-1] == "    and 47 others"
    assert len(lines) < 12
    assert max(map(len, lines)) < 200


def test_a_run_begins_with_what_it_is_trained_on(tmp_path):
    """From files that trained on white squares, lying images and empty captions."""
    data = tmp_path / "data"
    put(data, ("a.png", SAMPLES["PNG of 16 bits"][0]()), ("a.caption", "A"), ("b.jpg", turned(6, "JPEG")))
    put(data, ("c.png", b"x"), ("d.png", PNG), ("d.txt", b"\xe9"))
    given = settings(data, tmp_path / "out", max_train_steps=1, cache_dir=str(tmp_path / "cache"))
    reports: list[Any] = []
    result = train(configured(given), report=reports.append)
    reports = [one for one in reports if not isinstance(one, Preparing)]
    assert [type(one) for one in reports] == [DataReport, Progress]
    assert list(reports[0].lines) == [
        "data: 2 samples",
        "  with caption: 1 (1 of .caption)",
        "  without caption: 1 (b.jpg)",
        "  skipped: 2",
        "    c.png is not an image that can be read; its format is to be one of "
        "PNG, JPEG, WEBP, BMP, GIF, TIFF, AVIF, JPEG2000, PPM",
        "    d.png is left out: d.txt line 1 is not UTF-8 (unexpected end of data); save the file as UTF-8",
    ]
    assert len(result["skipped"]) == 2
    (data / "a.caption").unlink()
    with pytest.raises(InputError, match="none of 2 samples"):
        train(configured({**given, "output_dir": str(tmp_path / "other")}))

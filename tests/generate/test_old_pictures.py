"""What an older version drew is drawn again with the same pixels, and reproducible mode still has the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support import old_bits
from support.commands import run as run_command
from support.sample import sampled

DATA = Path(__file__).parents[1] / "data"
OLD: dict[str, Any] = json.loads((DATA / "old_bits.json").read_text(encoding="utf-8"))
PICTURES = sorted((DATA / "old_pictures").glob("*.png"))
# Strategies with settings, or with a model, that others of the pictures have as well.
MORE = {
    "cfg",
    "class",
    "class-displaced",
    "data",
    "displaced-adaptive",
    "displaced-cfg",
    "displaced-int8",
    "naive",
    "patches",
    "pipe-four-patches",
    "reproducible-patches",
    "reproducible-two-devices",
    "reproducible-weighted",
    "ring",
    "two-pictures",
    "weighted",
}
# The embedded models that drew them.
MODELS = DATA / "old_pictures" / "models"
# On another processor kernels round otherwise, at most by this much; in bfloat16 AVX2 kernels are 55.1 dB from AVX512.
PSNR, PSNR_BFLOAT16 = 60.0, 50.0


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(float)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(((a - b) ** 2).mean())
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


def elsewhere() -> str:
    """What is different from the machine that the old bits are of; empty on that machine."""
    here = old_bits.machine()
    return "; ".join(f"{key} {here[key]!r}, not {was!r}" for key, was in OLD["machine"].items() if here[key] != was)


@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize(
    "picture",
    [pytest.param(path, id=path.stem, marks=pytest.mark.matrix if path.stem in MORE else ()) for path in PICTURES],
)
def test_replay_has_the_same_pixels(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS / ("emoji-dit-s" if picture.stem.startswith("class") else "emoji-sd3")
    code = run_command("replay", picture, "--threads", "1", "--out", tmp_path, "--json", "--model", model)
    told = capsys.readouterr()
    other = elsewhere()
    assert code == 0 or other, told
    changed = {change["what"]: change for change in json.loads(told.out)["changes"]}
    # These images are from before 0.1.0, when receipts held samples of the weights.
    assert changed["weights"]["was"] == "unknown", changed
    (again,) = tmp_path.glob("*.png")
    before, after = pixels(picture), pixels(again)
    if other:
        assert psnr(before, after) >= (PSNR_BFLOAT16 if picture.stem == "bfloat16" else PSNR), other
    else:
        assert np.array_equal(before, after), f"{psnr(before, after):.1f} dB: {told.out}"


def test_the_pictures_differ() -> None:
    """Another seed or way each: a replay that drew something else would be seen."""
    found = [pixels(picture) for picture in PICTURES]
    assert len(found) == 24
    assert all(psnr(a, b) < PSNR for i, a in enumerate(found) for b in found[:i])
    (half,) = (one for picture, one in zip(PICTURES, found, strict=True) if picture.stem == "bfloat16")
    assert all(psnr(half, one) < PSNR_BFLOAT16 for one in found if one is not half)


@pytest.mark.parametrize(("name", "dtype"), sampled(old_bits.CLASSES, old_bits.DTYPES, of=4))
def test_reproducible_mode_has_the_same_bits(ranks, name: str, dtype: str) -> None:
    if other := elsewhere():
        pytest.skip(f"bits depend on the kernels: {other}")
    was = OLD["bits"][f"{name} {dtype}"]
    if old_bits.given(name, dtype) != was["given"]:
        pytest.fail("weights or inputs of the tiny model are others: that says nothing about the bits")
    assert old_bits.found(ranks, name, dtype) == was

"""The experiment of docs/lab/training.md: its blocks in their order, with fewer steps, and without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.train import emoji

ROOT = Path(__file__).parents[2]
HEADING = "## A LoRA that teaches the embedded model a new emoji\n"
# Settings of a run of seconds; on the command line, where the file stays as it is.
FAST = ["max_train_steps=24", "learning_rate=5e-3", "lr_warmup_steps=2", "global_batch_size=4", "train_batch_size=2"]


def blocks() -> list[tuple[str, str]]:
    """Language and text of the tutorial's blocks."""
    page = (ROOT / "docs" / "lab" / "training.md").read_text(encoding="utf-8")
    section = page[page.index(HEADING) + len(HEADING) :]
    return re.findall(r"^```(\w+)\n(.*?)^```", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)


def far(file: Path, target: np.ndarray) -> float:
    """Mean squared difference of a picture to another one."""
    return float(((np.asarray(Image.open(file).convert("RGB"), float) - target) ** 2).mean())


@pytest.mark.matrix
def test_the_tutorial_teaches_a_new_emoji(tmp_path):
    # A picture that the model does not know, of what ships: a strawberry on its head, its colours exchanged.
    known = dict(emoji(256))["a strawberry"]
    picture = Image.fromarray(np.ascontiguousarray(known[::-1, :, [2, 0, 1]])).resize((64, 64))
    picture.save(tmp_path / "leaf.webp", lossless=True)
    target = np.asarray(picture, float)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def run(*command: str) -> None:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]

    run("ditmesh", "generate", "a red leaf", "--out", "before", "--device", "cpu")
    # Texts fetch the picture from the network.
    prepare, settings, train = (text for language, text in blocks() if language != "text")
    run("bash", "-e", "-c", prepare.replace("--prompts keep.txt", "--prompts keep.txt --steps 2"))
    (tmp_path / "emoji-lora.yaml").write_text(settings, encoding="utf-8")
    run("bash", "-e", "-c", train.replace("--devices 2\n", " --set optimizer.".join(["--devices 2", *FAST]) + "\n"))
    (before,) = (tmp_path / "before").glob("*.png")
    (after,) = (tmp_path / "pictures").glob("*a-red-leaf*.png")
    assert far(after, target) < 0.7 * far(before, target)

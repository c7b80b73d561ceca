"""examples/recipes: each program runs as it stands on tiny models of its classes, and generates one device's image."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ditmesh import ParallelConfig
from support import recipes

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("cards", "memory"))


def constant(name: str, what: str) -> Any:
    """A constant of a program, by its name."""
    for node in ast.parse((recipes.FOLDER / f"{name}.py").read_text(encoding="utf-8")).body:
        target, _, value = ast.unparse(node).partition(" = ")
        if what in (names := re.findall(r"\w+", target)):
            values = ast.literal_eval(value)
            return values if names == [what] else values[names.index(what)]
    raise AssertionError(f"{name} has no {what}")


def configurations(name: str) -> dict[str, ParallelConfig]:
    """By machine."""
    found = constant(name, "CONFIGS").items()
    return {key: ParallelConfig(**(config[0] if isinstance(config, tuple) else config)) for key, config in found}


CASES = [(name, machine, config) for name in recipes.MODELS for machine, config in configurations(name).items()]
QUICK = [case for case in CASES if case[:2] in (("sd35_large", "2x24"), ("wan21_14b", "2x24"))]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Any:
    """``models(name)``: the tiny pipeline of a recipe, and what plain diffusers generates with it."""
    made: dict[str, tuple[Path, np.ndarray]] = {}

    def get(name: str) -> tuple[Path, np.ndarray]:
        if name not in made:
            folder = recipes.MODELS[name](tmp_path_factory.mktemp(name))
            pipe = recipes.alone(name, folder)
            pipe.set_progress_bar_config(disable=True)
            result = pipe(
                prompt=constant(name, "PROMPT"),
                width=recipes.SIZE[0],
                height=recipes.SIZE[1],
                num_inference_steps=recipes.STEPS,
                generator=torch.Generator().manual_seed(0),
                **recipes.CALLS[name],
            )
            frames = result.frames[0] if hasattr(result, "frames") else np.asarray(result.images[0], float) / 255
            made[name] = folder, np.asarray(frames)
        return made[name]

    return get


@pytest.mark.parametrize(
    ("name", "machine", "config"),
    [
        # Two of the programs, on two devices.
        pytest.param(*case, id=f"{case[0]} {case[1]}", marks=() if case in QUICK else pytest.mark.matrix)
        for case in CASES
    ],
)
def test_a_recipe_generates_what_one_device_does(ranks, models, tmp_path, name, machine, config):
    folder, expected = models(name)
    ranks(config.world_size).run(recipes.run, recipes.source(name, folder), machine, str(tmp_path))
    (written,) = tmp_path.iterdir()
    if written.suffix == ".mp4":
        found = torch.load(written, weights_only=True).numpy()
    else:
        found = np.asarray(Image.open(written), float) / 255
    assert found.shape == expected.shape
    assert float(found.std()) > 0.01  # an image, not one colour
    # In bfloat16 a sum that is rounded otherwise shows in the last bits of 8.
    assert float(np.abs(found - expected).max()) < (4.01 if name in recipes.QUANTISED else 1.01) / 255


@pytest.mark.parametrize("name", recipes.MODELS)
def test_a_program_asks_for_its_machine(name):
    """As many ranks as devices; the pages have each line that starts a program, and the first program whole."""
    text = (recipes.FOLDER / f"{name}.py").read_text(encoding="utf-8")
    found = re.match(rf'"""torchrun --nproc-per-node (\d+) examples/recipes/{name}\.py (\w+)\n', text)
    assert found
    assert configurations(name)[found[2]].world_size == int(found[1])
    for machine, config in configurations(name).items():
        assert config.world_size == int(machine.split("x")[0])
        assert f"torchrun --nproc-per-node {config.world_size} examples/recipes/{name}.py {machine}\n" in PAGE
    assert "torch.cuda.empty_cache()" in text or "rank 0 encodes" in text
    assert text.split('"""\n', 2)[1].lstrip("\n") in PAGE or name != "flux1_dev"
    assert {path.stem for path in recipes.FOLDER.glob("*.py")} == set(recipes.MODELS)

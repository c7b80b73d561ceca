"""The configuration that "auto" stands for, by its rule; and advice that works when it is followed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.engine import guided
from ditmesh.generate.model_info import find_model
from ditmesh.launch import RankPool
from ditmesh.layout import layout_of
from ditmesh.layout.probe import meta_model
from ditmesh.memory import check
from ditmesh.memory.catalogue import shapes
from ditmesh.memory.check import Demand, components_of_shape
from ditmesh.memory.sizes import workload_of
from ditmesh.strategies.heads import heads_of
from support.commands import run as run_command
from support.models import tiny
from support.pipelines import arguments, draw, sd3

PUBLISHED = sorted((Path(__file__).parents[2] / "benchmarks" / "published").glob("*.yaml"))


def test_the_rule_names_the_fastest_rows_of_published_tables():
    right, ratios = 0, []
    for path in PUBLISHED:
        table = yaml.safe_load(path.read_text())
        rows = {ParallelConfig(**row["config"]): row["seconds"] for row in table["rows"]}
        known = shapes()[table["model"]]
        model = meta_model(known.transformer, known.config)
        heads, devices = heads_of(model, layout_of(model)), max(config.world_size for config in rows)
        chosen = ParallelConfig.auto(devices, heads, branches=table["branches"], fits=rows.__contains__)
        ratios.append(rows[chosen] / min(rows.values()))
        right += ratios[-1] == 1
    assert len(PUBLISHED) == 23
    assert right >= 21
    assert max(ratios) < 1.08


@pytest.mark.parametrize(
    ("devices", "asked", "expected"),
    [
        (3, {"images": 6}, {"data": 3}),
        (4, {"images": 3, "branches": 2}, {"cfg": 2, "ulysses": 2}),
        (3, {"branches": 2}, {"ulysses": 3}),
        (5, {}, {"ring": 5, "exchange": "gather"}),
        (10, {"branches": 2}, {"cfg": 2, "ring": 5, "exchange": "gather"}),
        (16, {}, {"ulysses": 8, "ring": 2}),
        (32, {"branches": 2}, {"cfg": 2, "ulysses": 8, "ring": 2}),
    ],
    ids=str,
)
def test_the_rule_uses_all_devices(devices: int, asked: dict[str, int], expected: dict[str, int]):
    assert ParallelConfig.auto(devices, 24, **asked) == ParallelConfig(**expected)


def test_the_rule_cuts_weights_as_little_as_fits():
    offers = [config.describe() for config in ParallelConfig.preferred(4, 24)]
    whole = ["ulysses=4", "ulysses=2 ring=2", "ring=4"]
    assert offers[:7] == [*whole, *(f"{each} precompute" for each in whole), "tensor=2 ulysses=2"]
    assert offers.index("ulysses=4 shard=2") < offers.index("tensor=4") < offers.index("ulysses=4 shard=4")
    assert all(config.world_size == 4 for config in ParallelConfig.preferred(4, 24))
    # No slice without a head.
    assert not any(config.tensor > 2 for config in ParallelConfig.preferred(8, 3))


def demand(name: str, **asked: Any) -> Demand:
    known = shapes()[name]
    workload = workload_of(known)
    return Demand(components_of_shape(known), workload, workload, torch.bfloat16, "cuda", runtime=0.7e9, **asked)


def test_what_does_not_fit_whole_is_cut_and_said():
    choice = demand("flux.1-dev").choose(4, 24e9)
    assert choice.config == ParallelConfig(tensor=2, ulysses=2)
    assert choice.describe() == (
        "chosen: tensor=2 ulysses=2 (weights are cut so that they fit, ranks share an image's tokens; ulysses=4 would "
        "be faster and needs 34.8 GB on a rank of 24 GB)"
    )
    assert demand("flux.1-dev").choose(4, 80e9).config == ParallelConfig(ulysses=4)


def test_calls_are_shared_out_where_there_are_as_many_as_devices():
    some = replace(demand("pixart-sigma"), calls=6, branches=2)
    choice = some.choose(3, 80e9)
    assert choice.config == ParallelConfig(data=3, inputs="per-data-rank")
    assert "6 images are shared out" in choice.describe()
    # Groups with calls of their own share no weights.
    assert some.choose(3, 12.5e9).config.data == 1


def test_a_mistake_in_a_prediction_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    info, cpu = find_model("emoji-sd3"), torch.device("cpu")

    def mistaken(*_: Any) -> Any:
        raise TypeError("a mistake")

    monkeypatch.setattr(Demand, "largest", mistaken)
    with caplog.at_level("WARNING"):
        choice = check.choose_for_ranks(info, torch.float32, cpu, limit=1e6)
    assert choice is not None
    assert choice.config == ParallelConfig()
    assert [record.levelname for record in caplog.records if record.name == check.__name__] == ["WARNING"]


def test_whether_pipelines_are_guided():
    assert guided(diffusers.StableDiffusion3Pipeline, {})
    assert guided(diffusers.WanPipeline, {})
    # Distilled guidance, or one that wants a negative prompt.
    assert not guided(diffusers.FluxPipeline, {})
    assert not guided(diffusers.Flux2Pipeline, {"guidance_embeds": True})
    assert not guided(None, {})


def auto_configs(name: str) -> tuple[str, str, bool]:
    """What "auto" takes for a pipeline with guidance, and for its bare transformer; whether the picture is right."""
    pipe, made = sd3(), arguments("sd3", [1])
    truth = draw(pipe, dict(made, generator=[torch.Generator().manual_seed(0)]))
    with ditmesh.parallelized(pipe):
        pipeline = ditmesh.engine_of(pipe).config.describe()
        image = draw(pipe, dict(made, generator=[torch.Generator().manual_seed(0)]))
    with ditmesh.parallelized(tiny(name)):
        bare = ditmesh.engine_of(tiny(name)).config.describe()
    return pipeline, bare, torch.allclose(image, truth, atol=1e-4)


def test_auto_gives_guidance_its_ranks(ranks: Callable[[int], RankPool]):
    for pipeline, bare, right in ranks(2).run(auto_configs, "SD3"):
        assert pipeline == "cfg=2"
        assert bare == "ulysses=2"
        assert right


# --- commands ----------------------------------------------------------------------------------------------------


def said(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code and output of a command."""
    code = run_command(*words)
    captured = capfd.readouterr()
    return code, captured.out, " ".join(captured.err.split())


@pytest.mark.matrix
@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize("words", [("--devices", "2", "--ulysses", "2"), ("--devices", "1")], ids=" ".join)
def test_advice_of_a_refusal_is_a_command_that_runs(
    words: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    given = ["generate", "a fox", "--memory-limit", "0.035", "--steps", "1", "--threads", "1", "--out", str(tmp_path)]
    code, _, err = said(capfd, *given, *words)
    assert code == 2
    advised = re.search(r"(--devices \d+[-\w ]*?) fits, with ([\d.]+) GB on a rank", err)
    assert advised is not None, err
    assert float(advised[2]) < 0.035
    code, out, err = said(capfd, *given, *shlex.split(advised[1]), "--json")
    assert code == 0, err
    assert json.loads(out)["config"]["tensor"] == 2


@pytest.mark.matrix
@pytest.mark.usefixtures("kept_ranks")
def test_prompts_run_side_by_side_as_each_does_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    words = ["generate", "red", "fox", "sun", "--steps", "2", "--threads", "1", "--json"]
    code, out, err = said(capfd, *words, "--devices", "2", "--out", str(tmp_path / "two"))
    assert code == 0, err
    assert "3 prompts: 'red', 'fox', 'sun' (quote a prompt of several words)" in err
    assert "chosen: data=2 (3 images are shared out)" in err
    shared = json.loads(out)
    assert (shared["config"]["data"], shared["devices"]) == (2, 2)
    code, out, err = said(capfd, *words, "--devices", "1", "--out", str(tmp_path / "one"))
    assert code == 0, err
    alone = json.loads(out)
    names = [[Path(picture["path"]).name for picture in result["images"]] for result in (shared, alone)]
    assert names[0] == names[1]
    for one, other in zip(shared["images"], alone["images"], strict=True):
        assert Path(one["path"]).stat().st_size > 0
        assert one["config"] == other["config"]
        assert np.array_equal(*(np.asarray(Image.open(each["path"])) for each in (one, other)))


def test_memory_names_the_card_that_is_exceeded_and_what_to_type(capfd: pytest.CaptureFixture[str]):
    words = ["memory", "flux.1-dev", "--hardware", "4090", "--json"]
    code, out, err = said(capfd, *words, "--devices", "4")
    assert code == 0, err
    found = json.loads(out)
    command = 'ditmesh generate "..." --model black-forest-labs/FLUX.1-dev --devices 4 --tensor 2 --ulysses 2'
    assert found["command"] == command
    assert found["exceeds"] is None
    code, out, _ = said(capfd, *words, "--ring", "4")
    found = json.loads(out)
    assert found["exceeds"].startswith("34.8 GB on a rank exceed the 24 GB of 4090; --devices 4 --tensor 2")
    assert found["command"] == command

"""The study: cells on disk, measures that do not disturb, figures, and what they say."""

from __future__ import annotations

import json
import re
import shlex
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ditmesh
from ditmesh import zoo
from ditmesh.errors import InputError
from ditmesh.lab.study import analysis, plan, running, samplers
from ditmesh.lab.study.analysis import Mean, StudyResults
from ditmesh.lab.study.store import Store
from support.commands import run as run_command
from support.html import Reader
from support.launchers import KeptRanks

MODEL = "emoji-dit-s"
OPTIONS = ["fox", "rose", "--model", MODEL, "--devices", "2", "--steps", "3", "--sampler", "ddim"]
SMALL = [*OPTIONS, "--warmup", "0,1,3,adaptive(0.001)", "--strategy", "displaced,naive"]


def study(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> dict[str, Any]:
    assert run_command("study", *options, "--out", str(out), "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of one sampler, two strategies and four policies."""
    out = tmp_path_factory.mktemp("study")
    assert run_command("study", *SMALL, "--out", str(out), "--json") == 0
    return out


def test_files(small):
    data = json.loads((small / "results.json").read_text(encoding="utf-8"))
    # One synchronous cell, 2 strategies x 4 policies.
    assert len(data["cells"]) == 1 + 8
    assert len(data["table"]) == 8
    assert all((small / "cells" / image["file"]).is_file() for cell in data["cells"] for image in cell["images"])


def test_the_page_has_every_section_and_no_paths(small):
    html = (small / "report.html").read_text(encoding="utf-8")
    for section in ("What the figures say", "Quality", "Images", "Step by layer", "Where in the image"):
        assert f">{section}</h2>" in html
    assert not re.findall(r'(?:src|href)="(?!data:|#section-)', html)
    reader = Reader(html)
    reader.check()
    for text in (html, (small / "results.json").read_text(encoding="utf-8")):
        assert str(zoo.path(MODEL)) not in text
        assert str(small) not in text
    circumstances = dict(reader.tables[-1])
    assert circumstances["command line"] == shlex.join(["ditmesh", "study", *SMALL, "--out", small.name, "--json"])
    assert circumstances["samplers"] == "ddim (DDIMScheduler)"
    assert circumstances["prompts"] == "“fox”, “rose”"
    # Under each image that is not the synchronous one is how it differs; of each strategy the worst one.
    differences = html.count("<figcaption>difference, largest") + html.count("<figcaption>no difference")
    assert html.count("<figcaption>synchronous</figcaption>") == 2
    assert differences == html.count("<figcaption>N = 2, ") == 8
    assert html.count("<figcaption>stale steps, largest") == 2


def test_quality(small):
    """All steps synchronous: one device's picture. None: another one."""
    table = json.loads((small / "results.json").read_text())["table"]
    psnr = {(row["strategy"], row["warmup"]): row["psnr"]["value"] for row in table}
    assert psnr["displaced", "fixed(3)"] > 90
    assert psnr["naive", "fixed(3)"] > 90
    assert psnr["displaced", "fixed(0)"] < psnr["displaced", "fixed(1)"] < 60
    assert max(psnr["naive", "fixed(0)"], psnr["naive", "fixed(1)"]) < psnr["displaced", "fixed(1)"]
    assert all(row["right"]["value"] is not None for row in table)
    assert [row["synchronous"]["value"] for row in table[:3]] == [0, 1, 3]


def test_resumes(small, capsys):
    again = study(capsys, small, *SMALL)
    assert again["ran"] == 0
    lines = (small / "cells.jsonl").read_bytes().splitlines(keepends=True)
    table = again["table"]
    # Broken off while the last line was being written.
    (small / "cells.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:50])
    again = study(capsys, small, *SMALL)
    assert again["ran"] == 1
    assert again["table"] == table
    # A line in the middle that is no cell is nobody's study.
    (small / "cells.jsonl").write_bytes(b"not a cell\n" + b"".join(lines))
    assert run_command("study", *SMALL, "--out", small) == 2
    assert "line 1 holds no cell" in capsys.readouterr().err
    (small / "cells.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--devices", "2,x"], "'x' is not a number of devices"),
        (["--devices", "500"], "500 devices cannot share the 256 image tokens"),
        (["--warmup", "soon"], "is not a warm-up policy"),
        (["--warmup", ""], "is not a list"),
        (["--strategy", "magic"], "'magic' is not a stale strategy; use displaced, pipefusion, naive"),
        (["--sampler", "heun"], "does not go with a DDPM model"),
        (["--model", "emoji-sd3", "--sampler", "ddim"], "does not go with a flow-matching model"),
        (["--model", "./nowhere"], "no such folder"),
        (["--images", "0"], "--images 0 is not possible; use --images 1"),
        (["--launcher", "ray"], "--launcher ray starts real ranks, and all are simulated; add --real"),
    ],
)
def test_refuses(tmp_path, capsys, options, reason):
    prompts = [] if "--model" in options else ["fox", "--model", MODEL]
    code = run_command("study", *prompts, "--out", tmp_path / "out", *options)
    said = capsys.readouterr().err
    assert code == 2
    assert reason in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["displaced", "displaced-int8"])
def test_simulated_is_real(tmp_path, capsys, monkeypatch, ranks, strategy):
    """The study's simulation of two ranks draws what two ranks draw, to the bit; the ranks' times are told."""
    # The ranks are those of the launcher that is named, and of no other.
    monkeypatch.setenv("DITMESH_LAUNCHER", "support.launchers:Nothing")
    monkeypatch.setattr(KeptRanks, "pools", ranks, raising=False)
    options = [*OPTIONS, "--warmup", "1", "--strategy", strategy, "--real", "--no-detail"]
    options += ["--launcher", "support.launchers:KeptRanks"]
    data = study(capsys, tmp_path, *options)
    results = json.loads((tmp_path / "results.json").read_text())
    (real,) = [cell for cell in results["cells"] if cell["cell"]["real"]]
    assert real["equal_to_simulation"]
    assert len(real["ranks"]) == 2
    assert all(0 < rank["in_collectives"] < rank["seconds"] for rank in real["ranks"])
    for rank in real["ranks"]:
        # The decoder works after the last step.
        assert len(rank["steps"]) == 3
        assert sum(step["seconds"] for step in rank["steps"]) < rank["seconds"]
        assert all(0 < step["work_processor"] <= step["seconds"] for step in rank["steps"])
        # Ranks also wait for each other before the first step and after the last one.
        assert 0 < sum(step["in_collectives"] for step in rank["steps"]) <= rank["in_collectives"]
    # Every rank has half of the tokens.
    assert {rank["bytes_sent"] for rank in real["ranks"]} == {real["ranks"][0]["bytes_sent"]}
    assert any("has the same bits as the simulated one" in sentence for sentence in data["findings"])
    # The simulation counts what the ranks send.
    seconds = max(rank["seconds"] for rank in real["ranks"])
    assert data["table"][0]["seconds"] == seconds
    (simulated,) = [c for c in results["cells"] if not c["cell"]["real"] and c["cell"]["strategy"] == strategy]
    assert simulated["sent"] == real["sent"]
    assert simulated["sent"]["ring"] > 0
    assert [p["psnr"] for p in simulated["images"]] == pytest.approx([p["psnr"] for p in real["images"]], abs=0.01)


@pytest.mark.matrix
def test_taps_change_nothing(tmp_path):
    folder = zoo.path(MODEL)
    setup = plan.Setup(str(folder), MODEL, plan.weights_digest(folder), steps=2, guidance=3.0)
    runner = running.Runner(setup, tmp_path)
    cell = plan.Cell("ddim", ("fox",), (5,), (0,), "displaced", 2, "fixed(1)")
    watched = plan.Cell(**{**vars(cell), "detail": True})
    pipe = runner.pipe("ddim")
    pictures, sent = [], []
    for some in (cell, watched):
        with running.stale(pipe, some) as engine:
            taps = running.Taps(pipe, engine)
            if some.detail:
                with taps:
                    pictures.append(running.run_cell(pipe, setup, some)[0])
            else:
                pictures.append(running.run_cell(pipe, setup, some)[0])
            sent.append(dict(engine.mesh.traffic.bytes_sent))
    assert sent[0] == sent[1]
    assert np.array_equal(*pictures)
    assert taps.attention_errors()
    assert "forward" not in vars(pipe.transformer)
    assert not pipe.transformer._forward_hooks
    assert "step" not in vars(pipe.scheduler)


def test_lists():
    assert plan.split_list("1,sqrt(2),adaptive(2, 1)", "--warmup") == ["1", "sqrt(2)", "adaptive(2, 1)"]
    assert plan.read_warmups("0,20,40,sqrt(2),20", 16) == ("fixed(0)", "fixed(16)", "sqrt(2)")
    assert plan.read_warmups("steps(0 2)", 16) == ("steps(0 2)",)
    assert plan.read_devices("2, 8") == (2, 8)
    assert plan.read_strategies("naive, displaced-int4") == ("naive", "displaced-int4")
    cell = plan.Cell("own", ("fox",), (5,), (), "displaced-int4", 2, "fixed(1)")
    assert cell.config() == ditmesh.ParallelConfig(
        ring=2, exchange="displaced", compress="int4", warmup="fixed(1)", predict="none"
    )


def test_keys_tell_settings_apart():
    """Whatever changes the figures changes the key; where the model lies does not."""
    setup = plan.Setup("/a", "a", "digest", steps=4)
    cell = plan.Cell("ddim", ("fox",), (5,), (0,), "displaced", 2, "fixed(1)")
    keys = {
        cell.key(setup),
        cell.key(plan.Setup("/a", "a", "other", steps=4)),
        cell.key(plan.Setup("/a", "a", "digest", 5)),
    }
    for name, value in {"seeds": (6,), "devices": 4, "warmup": "fixed(2)", "strategy": "naive", "detail": True}.items():
        keys.add(plan.Cell(**{**vars(cell), name: value}).key(setup))
    assert len(keys) == 8
    assert cell.key(plan.Setup("/b", "b", "digest", steps=4)) == cell.key(setup)


@pytest.mark.parametrize(("model", "name"), [("emoji-sd3", "dpm"), (MODEL, "dpm"), (MODEL, "euler")])
def test_a_sampler_keeps_what_the_model_was_trained_for(model, name):
    from types import SimpleNamespace

    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    is_flow = model == "emoji-sd3"
    plain = FlowMatchEulerDiscreteScheduler(shift=3.0) if is_flow else DDIMScheduler(prediction_type="v_prediction")
    samplers.check_sampler(name, zoo.path(model))
    pipe = SimpleNamespace(scheduler=plain)
    samplers.set_sampler(pipe, name, plain)
    assert type(pipe.scheduler).__name__ == (samplers.FLOW_SAMPLERS if is_flow else samplers.DDPM)[name]
    if is_flow:
        assert pipe.scheduler.config["flow_shift"] == 3.0
    else:
        assert pipe.scheduler.config.prediction_type == "v_prediction"
    samplers.set_sampler(pipe, "own", plain)
    assert pipe.scheduler is plain
    with pytest.raises(InputError):
        samplers.check_sampler("ddim" if is_flow else "heun", zoo.path(model))


def made_up(psnr: dict[str, list[float]], synchronous: dict[str, int]) -> StudyResults:
    """A study of one strategy and N = 4 whose figures are given."""

    def result(warmup: str, numbers: list[float], strategy: str = "displaced") -> dict[str, Any]:
        cell = plan.Cell("own", ("fox",), (0,), (), strategy, 4 if strategy == "displaced" else 1, warmup)
        images = [
            {"file": "", "prompt": "fox", "seed": seed, "equal": False, "psnr": p, "ssim": 1.0, "right": True}
            for seed, p in enumerate(numbers)
        ]
        steps = [{"step": step, "synchronous": step < synchronous.get(warmup, 0)} for step in range(12)]
        return {"cell": vars(cell), "evaluations": 12, "images": images, "steps": steps, "prediction_error": []}

    setup = plan.Setup("", "", "", 12)
    exact = result("", [100.0] * 8, plan.SYNCHRONOUS)
    cells = [exact, *(result(warmup, numbers) for warmup, numbers in psnr.items())]
    return StudyResults(plan.StudyPlan(setup, (), (4,), tuple(psnr), ("own",), ("displaced",)), cells)


def rooted(level: dict[int, dict[int, float]], spread: float = 0.1) -> StudyResults:
    """A study of fixed warm-ups, with the PSNR given by devices and warm-up, on eight pictures."""
    cells = []
    for devices, curve in level.items():
        for warmup, psnr in curve.items():
            one = made_up(
                {f"fixed({warmup})": [psnr + spread * n for n in (-1, 0, 0, 1) * 2]}, {f"fixed({warmup})": warmup}
            )
            cells += one.cells[:1] if not cells else []
            cells.append({**one.cells[1], "cell": {**one.cells[1]["cell"], "devices": devices}})
    warmups = tuple(dict.fromkeys(f"fixed({w})" for curve in level.values() for w in curve))
    setup = plan.Setup("", "", "", 12)
    return StudyResults(plan.StudyPlan(setup, (), tuple(level), warmups, ("own",), ("displaced",)), cells)


def test_the_warmup_that_is_needed():
    """Curves that rise by 1 dB a step and fall by 2 with four times the devices: two more steps, not twice as many."""
    results = rooted({n: {w: 30.0 + w - log2(n) for w in (1, 2, 4, 8)} for n in (2, 4, 8, 16)})
    rule = results.rule("own", "displaced", 32.0)
    assert rule is not None
    assert rule["needed"] == {str(n): pytest.approx(2 + log2(n)) for n in (2, 4, 8, 16)}
    pair = plan.Pair("own", "displaced")
    assert any("5.0 at N = 8, 6.0 at N = 16." in sentence for sentence in analysis.findings(results, {pair: rule}))


def test_a_run_that_went_astray(tmp_path):
    """What is not a number is kept as nothing, and no picture of it passes for an equal one."""
    store = Store(tmp_path)
    store.add({"key": "x", "images": [], "prediction_error": [[float("nan"), 1.0]], 3: float("inf")})
    (line,) = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert json.loads(line) == {"key": "x", "images": [], "prediction_error": [[None, 1.0]], "3": None}
    assert analysis.mean([None, 1.0]) == Mean(1.0, None, 1)


# ---- distances


def test_the_measures_of_a_video_are_those_of_its_frames():
    exact = np.zeros((2, 16, 16, 3))
    other = exact + np.array([0.0, 0.1]).reshape(2, 1, 1, 1)
    found, same = running.distances([*zip(other, exact, strict=True)]), running.distances([(exact[0], exact[0])])
    assert found["psnr"] == pytest.approx(20 + 10 * np.log10(2))
    assert found["ssim"] == pytest.approx((1 + running.distances([(other[1], exact[1])])["ssim"]) / 2)
    assert (found["equal"], same["equal"], same["psnr"], same["ssim"]) == (False, True, None, 1)

"""The scripts in benchmarks/ run to their end."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOURCE = str(BENCHMARKS.parent / "src")


def measured(name: str, *arguments: Any, figures: Path) -> Any:
    """The figures of a script that is started by hand, without ditmesh installed, and ends well."""
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *map(str, arguments), "--json", str(figures)],
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(figures.read_text(encoding="utf-8"))


# --- every script, by its smallest run


def check_taking_turns(figures: dict[str, Any]) -> None:
    for name, times in figures["seconds"].items():
        first, second = (a / b for a, b in zip(times["this"], times["that"], strict=True))
        assert figures["ratio"][name] == pytest.approx((first + second) / 2)


def check_overhead(figures: dict[str, Any]) -> None:
    rows = figures["rows"]
    assert all("failed" not in row and row["microseconds"] > 0 and row["kernels"] > 10 for row in rows)
    assert rows[-1]["collectives"] > 0
    # One rank launches what plain diffusers launches, and never waits.
    assert rows[0]["kernels"] == rows[1]["kernels"]
    assert rows[1]["host synchronisations"] == 0


def check_training(figures: dict[str, Any]) -> None:
    assert max(figures["curves"]["largest relative difference"].values()) <= 1e-3
    bytes_of = figures["memory"]["bytes"]
    assert 0 < bytes_of["ulysses=2, gradient_checkpointing"] <= 0.6 * bytes_of["1 rank"]
    assert all(rates[0] > 0 for rates in figures["speed"]["samples a second"].values())


def check_reinforcement(figures: dict[str, Any]) -> None:
    assert figures["bits"]["data=2, ulysses=2"] == figures["bits"]["data=2"] == figures["bits"]["1 rank"]
    assert all(rates[0] > 0 for rates in figures["speed"]["samples a second"].values())


def check_faults(figures: dict[str, Any]) -> None:
    assert [row["fault"] for row in figures["faults"]] == ["kill-rank", "kill-http", "full-disk"]
    assert (figures["accepted"], figures["lost"], figures["wrong"], figures["bad"]) == (40, [], 0, [])


def check_load(figures: dict[str, Any]) -> None:
    assert (figures["load"]["lost"], figures["load"]["wrong"]) == (0, 0)
    assert figures["alone"]["largest_difference"] <= 1
    assert figures["calls_ratio"] < 1


def check_memory(figures: dict[str, Any]) -> None:
    """Pieces of weights draw the image that whole ones draw."""
    forms = figures["forms"]
    assert forms["ulysses=2"][0]["checksum"] == forms["ulysses=2 shard=2"][0]["checksum"]


def check_true_sizes(figures: dict[str, Any]) -> None:
    ranks = [rank for form in figures["models"]["wan-1.3b"]["forms"].values() for rank in form["ranks"]]
    assert all(rank["difference"] <= 1e-4 and rank["spread"] > 1e-3 for rank in ranks)
    assert all(rank["tensors"] > rank["weights"] > 0 for rank in ranks)


SMALL = ["--megabytes", "12", "--blocks", "3", "--latent", "8", "--steps", "1", "--forms", "plain", "ulysses=2"]
RUNS: dict[str, tuple[list[str], Callable[[Any], None]]] = {
    "exact": (["--repeats", "2", "--runs", "1", "--only", "ring=2", "--against", SOURCE], check_taking_turns),
    "overhead": (["--repeats", "1", "--runs", "1", "--only", "1 rank", "ulysses=2"], check_overhead),
    "training": (["--steps", "2", "--repeats", "1"], check_training),
    "reinforcement": (["bits", "speed", "--steps", "1", "--repeats", "1"], check_reinforcement),
    # Seconds depend on what else the machine does.
    "serving_faults": (
        ["--requests", "40", "--clients", "8", "--distinct", "5", "--steps", "4", "--back", "300"],
        check_faults,
    ),
    "serving_load": (
        ["--requests", "12", "--clients", "4", "--distinct", "3", "--pairs", "2", "--steps", "4"],
        check_load,
    ),
    "memory": ([*SMALL, "ulysses=2 shard=2"], check_memory),
    "true_sizes": (
        ["--models", "wan-1.3b", "--blocks", "2", "--scale", "0.1", "--forms", "1 rank", "ring=2 shard=2", "tensor=2"],
        check_true_sizes,
    ),
}
# Scripts that leave more than figures, and where.
PLACES = {"true_sizes": "--folder"}


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", RUNS)
def test_a_benchmark_runs_to_its_end(tmp_path: Path, run: str) -> None:
    name, (arguments, check) = run.split()[0], RUNS[run]
    place = [PLACES[name], tmp_path / "more.svg"] if name in PLACES else []
    check(measured(f"{name}.py", *arguments, *place, figures=tmp_path / "figures.json"))


# --- the runner, the figures of pages, and what benchmarks compute


def test_the_runner_knows_all_benchmarks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runner = runpy.run_path(str(BENCHMARKS / "__main__.py"), run_name="runner")
    runner["main"]([])
    listed = capsys.readouterr().out.splitlines()
    files = {path.stem for path in BENCHMARKS.glob("*.py")} - runner["SHARED"]
    assert {line.split()[0] for line in listed[2:]} == files | {"gpu_check"}
    with pytest.raises(SystemExit, match="there is no benchmark 'exakt'; use one of ahead, cards, comfyui_graphs, "):
        runner["main"](["exakt"])


def test_tables_of_pages_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each behind its comment, and in Chinese pages their numbers; every figure of a page is one that is drawn."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables, figures = importlib.import_module("tables"), importlib.import_module("figures")
    pages = {page: page.read_text(encoding="utf-8") for page in (BENCHMARKS.parent / "docs").rglob("*.md")}
    places = [(page, match) for page, text in pages.items() for match in tables.PLACE.finditer(text)]
    assert {match[2] for _, match in places} == set(tables.TABLES)
    for page, match in places:
        there, made = match[3], tables.markdown(match[2])
        if page.name.endswith(".zh.md"):
            there, made = ([re.findall(r"\d+(?:\.\d+)?", row) for row in text.splitlines()] for text in (there, made))
        assert there == made, (page, match[2])
    drawn = {f"findings-{name}" for name in figures.FIGURES}
    assert {name for text in pages.values() for name in re.findall(r"(findings-\w+)\.\w+", text)} == drawn


@pytest.mark.matrix
def test_figures_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    figures = importlib.import_module("figures")
    committed = figures.IMAGES
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    for draw in figures.FIGURES.values():
        file = draw(figures.Tables())
        assert file.read_bytes() == (committed / file.name).read_bytes()


@pytest.mark.matrix
def test_other_axes_draw_the_sequential_image_where_they_have_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window without tolerance, and tokens by columns that nobody cuts; with a tolerance or a cut it is another."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    axes = importlib.import_module("other_axes")
    for model in axes.MODELS:
        found = axes.measured(4, model, 2, "window 0")
        assert (found["rounds"], found["psnr"]) == ([4] * axes.IMAGES, [None] * axes.IMAGES)
        pipe, cell = axes.pipeline(model)
        with axes.turning(pipe.transformer, [None]):
            assert abs(axes.drawn(model, 4, cell) - axes.exact(model, 4, cell)).max() <= 1e-4
    for way in ("window 1", "turning"):
        found = axes.measured(4, model, 4, way)
        assert found.get("rounds", [1])[0] == 1
        assert max(found["psnr"]) < 40


# --- the check of one GPU, on the CPU


@pytest.mark.matrix
def test_the_whole_gpu_check_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three commands write one file, and together they are everything."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    check = runpy.run_path(str(BENCHMARKS / "gpu_check" / "__main__.py"), run_name="check")
    done: tuple[str, ...] = ()
    for name, parts in check["RUNS"].items():
        done += tuple(parts)
        tables = tmp_path / "out.md"
        more = ["--device", "cpu", "--quick", "--run", name, "--markdown", tables]
        result = measured("gpu_check", *more, figures=tmp_path / "out.json")
        status = {part: "skipped" if part == "nccl" else "ok" for part in done}
        assert {part: rows["status"] for part, rows in result["parts"].items()} == status
        # Every row is right or says why it is not here.
        assert all("skipped" in row or row["ok"] for part in result["parts"].values() for row in part["rows"])
        assert not result["cuda"]
        assert "Nothing here says anything about a GPU" in tables.read_text()

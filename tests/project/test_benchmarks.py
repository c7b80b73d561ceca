"""The scripts in benchmarks/ run to their end."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support import fault_points, hosts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script as it is started by hand, without ditmesh installed."""
    source = str(BENCHMARKS.parent / "src")
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def rehearsed(tmp_path: Path, *wanted: str) -> tuple[dict[str, Any], str, str]:
    """What the GPU check finds on the CPU: its figures, its tables, and what it prints."""
    figures, tables = tmp_path / "out.json", tmp_path / "out.md"
    ended = script("gpu_check", "--device", "cpu", "--quick", *wanted, "--json", figures, "--markdown", tables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(figures.read_text()), tables.read_text(), ended.stdout


def check_rehearsal(result: dict[str, Any], parts: tuple[str, ...]) -> None:
    """Every part that can run without a GPU has run, and every row is right or says why it is not here."""
    wanted = {name: "skipped" if name == "nccl" else "ok" for name in parts}
    assert {name: part["status"] for name, part in result["parts"].items()} == wanted
    assert all("skipped" in row or row["ok"] for part in result["parts"].values() for row in part["rows"])
    assert not result["cuda"]
    assert result["machine"]["torch"]


def test_the_runner_knows_all_benchmarks(tmp_path: Path) -> None:
    listed = script("__main__.py").stdout.splitlines()
    shared = {"__main__", "comfyui_files", "harness", "machine", "open_loop", "quiet"}
    files = {path.stem for path in BENCHMARKS.glob("*.py")} - shared
    assert {line.split()[0] for line in listed[2:]} == files | {"gpu_check", "serving_history"}
    unknown = script("__main__.py", "exakt")
    assert unknown.returncode == 1
    assert "there is no benchmark 'exakt'; use one of batches, big_model, " in unknown.stderr
    # As the file by itself, with its options.
    assert script("__main__.py", "memory_table", "--help").stdout == script("memory_table.py", "--help").stdout
    figures = tmp_path / "figures.json"
    few = ["--only", "no such contender", "--repeats", 1, "--runs", 1, "--json", figures]
    ended = script("__main__.py", "exact", *few)
    assert ended.returncode == 0, ended.stderr
    assert set(json.loads(figures.read_text())["speedup"].values()) == {1.0}


def test_gpu_check_on_the_cpu(tmp_path: Path) -> None:
    """Parts run to their end without a GPU; those of NCCL say that they are not here."""
    result, tables, said = rehearsed(tmp_path, "--part", "nccl", "collectives")
    check_rehearsal(result, ("nccl", "collectives"))
    assert all(row["skipped"] == "not here: there is no GPU" for row in result["parts"]["nccl"]["rows"])
    assert "on the CPU" in said
    assert "Nothing here says anything about a GPU" in tables


@pytest.mark.matrix
def test_the_whole_gpu_check_on_the_cpu(tmp_path: Path) -> None:
    """Three commands write one file, and together they are everything."""
    check = load_gpu_check()
    try:
        runs = dict(check.RUNS)
        assert set(check.parts()) == {part for parts in runs.values() for part in parts}
    finally:
        forget_gpu_check()
    result: dict[str, Any] = {}
    for name in runs:
        result, _, _ = rehearsed(tmp_path, "--run", name)
    check_rehearsal(result, tuple(part for parts in runs.values() for part in parts))


GPU_CHECK = ("basics", "messages", "several", "single", "whole", "workers", "gpu_check")


def test_the_study_of_the_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table has a plan whose model is known, and one of them runs to its figures and its JSON."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    quality = load("quality")
    known = [table for table in quality.TABLES if table.model not in quality.RELATIVES]
    cells = {table.name: len(quality.plan_of(table, 1, tmp_path).cells) for table in known}
    assert len(cells) == len(known)
    assert all(count > 1 for count in cells.values())
    small = quality.Table(
        *("detail", "emoji-dit-s", "ddim", 2, (1, 2), ("fixed(1)", "adaptive(0.05)")),
        strategies=("displaced", *quality.compressed("int8")),
        captions=1,
        detail=True,
    )
    monkeypatch.setattr(quality, "TABLES", [small])
    monkeypatch.setattr(
        sys, "argv", ["quality", "--images", "1", "--out", str(tmp_path), "--json", str(tmp_path / "q.json")]
    )
    quality.main()
    (table,) = json.loads((tmp_path / "q.json").read_text(encoding="utf-8"))["tables"]
    rows = {(row["strategy"], row["devices"], row["warmup"]): row for row in table["rows"]}
    stale, packed = (rows[name, 2, "fixed(1)"] for name in ("displaced", "displaced-int8"))
    assert ("displaced", 2, "adaptive(0.05)") in rows
    # One rank is one device.
    assert {row["equal"] for row in table["rows"] if row["devices"] == 1} == {1}
    # Of two steps the stale one sends a quarter, and scales.
    one = stale["sent"]["ring"] / 2
    assert 3 < one / (packed["sent"]["ring"] - one) < 4
    assert (len(stale["error_by_row"]), len(stale["error_by_place"])) == (2, 16)
    assert len(stale["attention_error"]) == 6
    assert stale["each"] == [pytest.approx(stale["psnr"]["value"], rel=1e-4)]


def load(name: str) -> Any:
    """A benchmark as a module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its data classes look themselves up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_figures_are_drawn_from_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of the page has its measurements in the repository, and is what they draw, to the byte."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    figures = load("figures")
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    tables = figures.Tables()
    drawn = [file for draw in figures.FIGURES.values() if (file := draw(tables)) is not None]
    page = (BENCHMARKS.parent / "docs" / "findings.md").read_text(encoding="utf-8")
    page += (BENCHMARKS.parent / "docs" / "reproducible.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"images/(findings-[a-z]+\.svg)", page))
    assert shown <= {file.name for file in drawn}
    for file in drawn:
        kept = BENCHMARKS.parent / "docs" / "images" / file.name
        if file.name in shown and matplotlib_version() == DRAWN_WITH:
            assert file.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), file.name


# Other versions place labels elsewhere.
DRAWN_WITH = "3.11.2"


def matplotlib_version() -> str:
    from importlib.metadata import version

    return version("matplotlib")


def load_gpu_check() -> Any:
    """The GPU check's program as a module; its files import one another by their bare names."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("gpu_check", BENCHMARKS / "gpu_check" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget_gpu_check() -> None:
    sys.path[:] = [path for path in sys.path if not path.endswith("gpu_check")]
    for name in GPU_CHECK:
        sys.modules.pop(name, None)


@pytest.mark.matrix
def test_ranks_of_the_gpu_check_live_until_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails on a rank is told with the rank, and the next call has other ranks."""
    # These are put back.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("GPU_CHECK_DEVICE", "cpu")
    load_gpu_check()
    try:
        import workers  # pyright: ignore[reportMissingImports]

        ranks = workers.Workers({})
        try:
            for _ in range(2):
                assert ranks.run("objects_of_ranks", False, world=2) == [[{"ok": True}]] * 2
            assert ranks.starts == 1
            with pytest.raises(workers.Failed, match=r"rank [01]: .*NoSuchGroup"):
                ranks.run("objects_of_ranks", False, world=2, transport="NoSuchGroup")
            assert ranks.run("objects_of_ranks", False, world=2) == [[{"ok": True}]] * 2
            assert ranks.starts == 2
        finally:
            ranks.end()
    finally:
        forget_gpu_check()


def test_gpu_check_fails_loudly(tmp_path: Path) -> None:
    """A part that comes when the command's time is over fails, and so does the whole."""
    figures = tmp_path / "out.json"
    ended = script("gpu_check", "--quick", "--part", "parity", "--budget", 0.001, "--json", figures)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "seconds of the command were over before it" in ended.stdout
    assert json.loads(figures.read_text())["parts"]["parity"]["status"] == "failed"


@pytest.mark.matrix
def test_gpu_check_says_what_is_missing(tmp_path: Path) -> None:
    """Without a package that the engine needs, parts are skipped, naming it."""
    (tmp_path / "pydantic.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'pydantic'\", name='pydantic')\n"
    )
    figures, path = tmp_path / "out.json", f"{tmp_path}:{BENCHMARKS.parent / 'src'}"
    wanted = ["--device", "cpu", "--quick", "--part", "parity", "--json", figures]
    ended = script("gpu_check", *wanted, PYTHONPATH=path)
    assert ended.returncode == 2, ended.stderr
    (row,) = json.loads(figures.read_text())["parts"]["parity"]["rows"]
    assert row == {"skipped": "the engine needs pydantic, which is not installed"}


@pytest.mark.matrix
def test_two_versions_take_turns(tmp_path: Path) -> None:
    figures, only = tmp_path / "out.json", ["--only", "ditmesh, 1 rank", "ring=2"]
    other = ["--against", BENCHMARKS.parent / "src"]
    ended = script("exact.py", "--repeats", 2, "--runs", 1, *only, *other, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(figures.read_text())
    assert list(found["seconds"]) == only[1:]
    for name, times in found["seconds"].items():
        first, second = (a / b for a, b in zip(times["this"], times["that"], strict=True))
        assert found["ratio"][name] == pytest.approx((first + second) / 2)
    # Each is imported from its folder.
    (tmp_path / "ditmesh").mkdir()
    (tmp_path / "ditmesh" / "__init__.py").write_text("")
    ended = script("exact.py", "--repeats", 1, "--runs", 1, "--only", "ring=2", "--against", tmp_path)
    assert ended.returncode == 1
    assert "No module named 'ditmesh.launch'" in ended.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("against", [False, True])
def test_overhead(tmp_path: Path, against: bool) -> None:
    figures = tmp_path / "out.json"
    other = ["--against", BENCHMARKS.parent / "src"] if against else []
    only = ["--only", "1 rank"] if against else ["--only", "1 rank", "ulysses=2"]
    ended = script("overhead.py", "--repeats", 1, "--runs", 1, *only, *other, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert [row["version"] for row in rows[:2]] == (["that", "this"] if against else ["this", "this"])
    for row in rows:
        assert "failed" not in row
        assert row["microseconds"] > 0
        assert row["kernels"] > 10
    if not against:
        assert rows[-1]["collectives"] > 0
        # One rank launches what plain diffusers launches, and never waits.
        assert rows[0]["kernels"] == rows[1]["kernels"]
        assert rows[1]["host synchronisations"] == 0


@pytest.mark.matrix
def test_an_hour_of_a_server_in_short(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ended = script("serving_soak.py", "--minutes", 1, "--settle", 0.3, "--every", 3, "--history", 20, "--json", figures)
    # In its first minute a server grows.
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert result["operations"]
    assert not result["wrong"]
    assert not result["lost"]
    assert any(name.startswith("rank 1") for name in result["growth"])


@pytest.mark.matrix
@pytest.mark.parametrize("config", ["tensor=2", "pipe=2"])
def test_a_rank_of_the_command_holds_and_reads_its_share(tmp_path: Path, config: str) -> None:
    """What the 1 GB of docs/benchmarks.md show, with 60 MB; and that whole loading would be seen."""
    figures = tmp_path / "figures.json"
    ended = script("big_model.py", "--megabytes", 60, "--config", config, "--whole", "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert result["bytes"] > 40e6
    for rank in result["share"]:
        assert rank["read"] < 0.55
        # Memory of a first forward counts more here than with weights that are worth sharing.
        assert rank["peak"] < 0.85
    for rank in result["whole"]:
        assert rank["peak"] > 0.95


@pytest.mark.matrix
def test_training(tmp_path: Path) -> None:
    figures, picture = tmp_path / "out.json", tmp_path / "curves.png"
    ended = script("training.py", "--steps", 2, "--repeats", 1, "--json", figures, "--picture", picture)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert max(result["curves"]["largest relative difference"].values()) <= 1e-3
    bytes_of = result["memory"]["bytes"]
    assert 0 < bytes_of["ulysses=2, gradient_checkpointing"] <= 0.6 * bytes_of["1 rank"]
    assert all(rates[0] > 0 for rates in result["speed"]["samples a second"].values())
    assert picture.exists()


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_the_faults_of_a_server_under_load_lose_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    few = ["--requests", 40, "--clients", 8, "--distinct", 5, "--steps", 4]
    ended = script("serving_faults.py", *few, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert [one["fault"] for one in result["faults"]] == ["kill-rank", "kill-http", "stop-rank", "full-disk"]
    assert (result["accepted"], result["lost"], result["wrong"], result["bad"]) == (40, [], 0, [])


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_bursts_of_signals_end_a_server(tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    ended = script("serving_faults.py", "--bursts", 6, "--seed", 1, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert len(result["bursts"]) == 6
    assert {one["moment"] for one in result["bursts"]} == {"start", "work", "end"}


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(fault_points.missing() is not None, reason=fault_points.missing() or "")
@pytest.mark.parametrize("more", [["--faults", 42], ["--ranks", "model", "--faults", 8, "--operations", 300]])
def test_what_clients_see_of_a_server_while_everything_fails_has_no_anomaly(tmp_path: Path, more: list[Any]) -> None:
    figures, history = tmp_path / "out.json", tmp_path / "history.jsonl"
    few = ["--operations", 1000, "--seed", 3, "--seconds", 400, "--json", figures, "--history", history]
    ended = script("serving_history", *few, *more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert result["anomalies"] == {}
    assert result["not_back"] == []
    assert result["faults"] >= 8
    if "model" not in more:
        assert len(result["kinds_of_faults"]) >= 19
    # A history that lost an answer is not accepted.
    lines = history.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if '"f":"submit"' in line and '"owner":"a"' in line)
    number = json.loads(lines[first])["op"]
    kept = [line for line in lines if f'"op":{number},' not in line]
    history.write_text("\n".join(kept) + "\n")
    checked = script("serving_history", "--check", history)
    assert checked.returncode == 1
    assert "no client has asked for it" in checked.stdout


@pytest.mark.matrix
def test_the_load_of_a_server_runs_to_its_end(tmp_path: Path) -> None:
    """A few requests: none is lost, none wrong."""
    figures = tmp_path / "out.json"
    few = ["--requests", 12, "--clients", 4, "--distinct", 3, "--pairs", 2, "--steps", 4]
    ended = script("serving_load.py", *few, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert (result["load"]["lost"], result["load"]["wrong"]) == (0, 0)
    assert result["alone"]["largest_difference"] <= 1
    assert result["calls_ratio"] < 1
    assert "transformer calls" in ended.stdout


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_servers_are_compared_under_requests_that_wait_for_nobody(tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    few = ["--arrivals", "poisson,bursts", "--load", "0.5", "--requests", 6, "--distinct", 2, "--steps", 3]
    servers = ["--server", "--devices 1", "--server", "--devices 2 --ulysses 2"]
    ended = script("serving_load.py", *few, *servers, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert [(run["server"], run["arrivals"]) for run in result["runs"]] == [
        (server, how) for server in ("--devices 1", "--devices 2 --ulysses 2") for how in ("poisson", "bursts")
    ]
    for run in result["runs"]:
        assert (run["deadline"], run["done"], run["wrong"], run["refused"]) == (1.5, 6, 0, [])
        shares = [run["attainment"][factor] for factor in ("1.0", "1.5", "2.0")]
        assert shares == sorted(shares)
        assert 0 < run["p50_seconds"] <= run["p95_seconds"] <= run["p99_seconds"]
        assert run["goodput"] <= run["throughput"]


def test_traces_have_their_rate_and_their_bursts() -> None:
    loaded = importlib.util.spec_from_file_location("open_loop", BENCHMARKS / "open_loop.py")
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    sys.modules["open_loop"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        loaded.loader.exec_module(module)
    kinds = [module.kind_of(text) for text in module.KINDS]
    for how, variation in (("poisson", 1.0), ("bursts", module.VARIATION)):
        trace = module.arrivals(how, 5.0, 20_000, kinds, [3, 1, 1, 1], 7, seed=0)
        gaps = [after.at - before.at for before, after in itertools.pairwise(trace)]
        mean = statistics.fmean(gaps)
        assert mean == pytest.approx(0.2, rel=0.05)
        assert statistics.stdev(gaps) / mean == pytest.approx(variation, rel=0.05)
        assert sum(one.kind == kinds[0] for one in trace) / len(trace) == pytest.approx(0.5, abs=0.02)
        assert {one.number for one in trace} == set(range(7))
        assert trace == module.arrivals(how, 5.0, 20_000, kinds, [3, 1, 1, 1], 7, seed=0)
    # Of four requests one is refused, one late, one wrong.
    one, other = kinds[0], kinds[1]
    found = [
        module.Served(module.Arrival(0.0, one, 0), 1.0),
        module.Served(module.Arrival(1.0, one, 1), 1.4, off=9),
        module.Served(module.Arrival(2.0, other, 0), 4.1),
        module.Served(module.Arrival(3.0, other, 1), None, "the queue is full"),
    ]
    figures = module.summary(found, {one: 1.0, other: 2.0}, 10.0)
    assert figures["attainment"] == {"1.0": 0.25, "1.5": 0.5, "2.0": 0.5}
    assert figures["attainment_by_kind"][str(other)] == {"1.0": 0.0, "1.5": 0.0, "2.0": 0.0}
    assert (figures["goodput"], figures["throughput"], figures["wrong"]) == (0.2, 0.3, 1)
    assert (figures["p50_seconds"], figures["p99_seconds"]) == (1.4, 4.1)
    assert figures["refused"] == ["the queue is full"]


@pytest.mark.matrix
def test_memory(tmp_path: Path) -> None:
    """Each way runs, and pieces of weights draw the picture that whole ones draw."""
    figures = tmp_path / "figures.json"
    forms = ["plain", "ulysses=2", "ulysses=2 shard=2", "casting"]
    absent = [] if find_spec("torchao") else ["int8"]
    small = ["--megabytes", 12, "--blocks", 3, "--latent", 8, "--steps", 1]
    ended = script("memory.py", *small, "--json", figures, "--forms", *forms, *absent)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(figures.read_text())["forms"]
    assert all(rank["processor_seconds"] > 0 for form in forms for rank in found[form])
    assert found["ulysses=2"][0]["checksum"] == found["ulysses=2 shard=2"][0]["checksum"]
    assert all(found[form] == {"skipped": "torchao is not installed"} for form in absent)


@pytest.mark.matrix
def test_true_sizes(tmp_path: Path) -> None:
    """Two of the blocks and a small picture: every form is one rank's output, and a second run knows that one."""
    figures, small = tmp_path / "figures.json", ["--blocks", 2, "--scale", 0.1, "--folder", tmp_path / "weights"]
    forms = ["ulysses=2", "ring=2 shard=2", "tensor=2"]
    for model in ("pixart-sigma", "wan-1.3b"):
        for some in (["1 rank"], forms if model == "wan-1.3b" else forms[1:2]):
            ended = script("true_sizes.py", "--models", model, *small, "--json", figures, "--forms", *some)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            found = json.loads(figures.read_text())["models"][model]["forms"]
            assert list(found) == some
            for form in found.values():
                assert all(rank["difference"] <= 1e-4 and rank["spread"] > 1e-3 for rank in form["ranks"])
                assert all(rank["tensors"] > rank["weights"] > 0 for rank in form["ranks"])


@pytest.mark.matrix
def test_ray_overhead_compares_the_same_pictures(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    figures = tmp_path / "out.json"
    ended = script("ray_overhead.py", "--turns", 2, "--warm", 0, "--steps", 1, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    assert len(result["turns"]) == 2
    assert set(result["ratio"]) == {"seconds", "rank", "processor"}
    assert all(0 < one[name]["rank"] < one[name]["seconds"] for one in result["turns"] for name in ("local", "ray"))
    assert "target: 1.02 from call to picture" in ended.stdout


def test_steps_on_busy_cores_tell_what_they_take_on_quiet_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exponents that samples were made with are found, whatever the groups' own times are."""
    import random

    monkeypatch.syspath_prepend(BENCHMARKS)
    from quiet import at_best, exponents

    chance = random.Random(0)
    groups = []
    for seconds in (0.1, 2.0, 0.7):
        busy = [(chance.uniform(1, 1.6), chance.uniform(1, 1.6)) for _ in range(12)]
        groups.append([(seconds * before**0.45 * after**0.3, before, after) for before, after in busy])
    found = exponents(groups)
    assert found == pytest.approx((0.45, 0.3))
    assert [at_best(sample, found) for sample in groups[1]] == pytest.approx([2.0] * 12)


def test_steps_are_compared_with_the_bound_of_cores_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were made up 1.1 times their bound are found to be that, however busy the cores were in them."""
    import random

    # It adds to the path as well.
    monkeypatch.syspath_prepend(BENCHMARKS)
    import links

    chance, rate, across, probe = random.Random(0), 1e9, 12e6, 2e-4
    wire = 8 * across / (rate * links.PAYLOAD)

    def step(seconds: float, busy: list[float]) -> Any:
        """A rank's step without its probes, of which there is one in every part of it."""
        part = (seconds + links.PARTS * probe) / links.PARTS
        probes = [(7.0 + (at + 0.5) * part, probe, probe * each) for at, each in enumerate(busy)]
        return links.StepTime(7.0, part * links.PARTS, probes)

    def core(busy: float) -> list[float]:
        return [chance.uniform(1, busy) for _ in range(links.PARTS)]

    def mean(busy: list[float]) -> float:
        return sum(busy) / len(busy)

    turns = [core(chance.uniform(1, 2)) for _ in range(8)]
    whole = [links.of_all_ranks([step(1.4 * mean(busy) ** 0.8, busy)], False, probe) for busy in turns]
    for stale in (False, True):
        steps = []
        for _ in range(9):
            first, second = core(1.9), core(1.5)
            # Exact ranks meet in every part; a stale step is the busiest core's.
            busiest = mean([max(pair) for pair in zip(first, second, strict=True)])
            busy = max(mean(first), mean(second)) if stale else busiest
            computed = 0.7 * busy**0.8
            seconds = 1.1 * (max(computed, wire) if stale else computed + wire)
            steps.append(links.of_all_ranks([step(seconds, first), step(seconds, second)], stale, probe))
        found = {"steps": steps, "beside": whole, "across": across}
        shown = links.shown_in({"one host": {"it": found}})
        assert shown == pytest.approx(0.8)
        least, over = links.against(links.Contender({}, stale=stale), found, rate, shown)
        assert least == pytest.approx(max(0.7, wire) if stale else 0.7 + wire)
        assert over == pytest.approx(1.1)


@pytest.mark.matrix
@pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing()))
def test_links(tmp_path: Path) -> None:
    """Two hosts at one rate, to the end; every step has its probes."""
    figures, chart = tmp_path / "out.json", tmp_path / "out.svg"
    wanted = ["--rates", 1e9, "--only", "ulysses=2", "displaced", "--steps", 4, "--repeats", 1]
    ended = script("links.py", *wanted, "--json", figures, "--picture", chart)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(figures.read_text())
    there = result["1e+09"]["results"]
    assert {name: len(found["steps"]) for name, found in there.items()} == {"ulysses=2": 4, "displaced": 3}
    assert all(
        0 < seconds < 60 and busy >= 1
        for found in (*result["one host"].values(), *there.values())
        for seconds, busy in (*found["steps"], *found["beside"])
    )
    assert not any(found["across"] for found in result["one host"].values())
    # Keys, values, queries and outputs of half of the heads; the prediction of half of the tokens.
    assert 27.1 <= there["ulysses=2"]["across"] / 2**20 <= 27.2
    assert "displaced" in chart.read_text()


def test_recorded_steps_on_slow_links_are_near_their_bounds() -> None:
    """In the turns that were recorded: as near as the documents say, by the two digits that are printed."""
    ended = script("links.py", "--report", BENCHMARKS / "measured" / "links.json", COLUMNS="200")
    assert ended.returncode == 0, ended.stderr
    whole = [float(found) for found in re.findall(r"│\s+\d\.\d{3} \((\d+\.\d\d)x\) ", ended.stdout)]
    without = [float(found) for found in re.findall(r" \[(\d+\.\d\d)\]", ended.stdout)]
    lines, rates = 11, 3
    assert len(whole) == lines * (rates + 1)
    assert len(without) == lines * rates
    over = [found for at, found in enumerate(whole) if at % (rates + 1)]
    assert max(over) <= 1.15
    assert max(without) <= 1.11


@pytest.mark.matrix
def test_loading_on_two_ranks(tmp_path: Path) -> None:
    """Ranks have the weights together: files as they are, and what the first rank has converted."""
    figures = tmp_path / "figures.json"
    ended = script("loading.py", "--ranks", 2, "--blocks", 1, "--repeats", 1, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    cases = json.loads(figures.read_text())["cases"]
    assert set(cases) == {"float32", "bfloat16"}
    for case in cases.values():
        assert case["seconds of the ranks"] > 0
        # A copy for each rank would be 2.
        assert case["pss"] < 1.5
        assert case["private"] < 0.75


@pytest.mark.matrix
def test_memory_above_a_frozen_base(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    figures = tmp_path / "figures.json"
    small = ("--models", "ltx-video", "--tokens", 4, "--width-scale", 0.1)
    ended = script("frozen_memory.py", *small, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    case = json.loads(figures.read_text())["models"]["ltx-video"]
    assert case["held"] < case["peak"]
    assert case["loss off"] <= 1e-5
    assert case["loss"][1] < case["loss"][0]
    # A sample for each rank, and one rank with both.
    ended = script("frozen_memory.py", *small, "--speed", "--mesh", "data=2", "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    data = json.loads(figures.read_text())["models"]["ltx-video"]
    assert data["samples a step"] == 2
    assert data["loss off"] <= 1e-5
    assert data["loss"][0] != case["loss"][0]
    assert data["loss"][1] < data["loss"][0]
    assert "peak" not in data


def test_figures_of_other_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from open_loop import Notebook
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert Notebook(tmp_path, {"seed": "0"}).once("run", lambda: 1) == 1
    assert Notebook(tmp_path, {"seed": "0"}).once("run", lambda: 2) == 1
    with pytest.raises(SystemExit, match="has figures with another seed; use another folder"):
        Notebook(tmp_path, {"seed": "1"})

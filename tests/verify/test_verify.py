"""Configurations against one device: what is equal is called equal, what is broken is found where it is."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ditmesh
from ditmesh.cli.main import main
from ditmesh.cli.values import parse_config
from ditmesh.config import ParallelConfig
from ditmesh.errors import ConfigError, InputError
from ditmesh.generate.job import PictureJob
from ditmesh.generate.model_info import find_model
from ditmesh.quality.metrics import token_digests
from ditmesh.recipe import promise_of
from ditmesh.strategies.reproducible import TiledSequence
from ditmesh.strategies.sequence import SequenceParallel
from ditmesh.verify.runs import RankRun, RunTask, budget_of, config_name, reference_config, run_tasks, sensible
from ditmesh.verify.tracing import Recorder, Spot, Trace, TraceComparer, TraceWriter, merge, watch_blocks
from ditmesh.verify.verdicts import Verdict, judge
from support import pipelines, processes
from support.html import Reader
from support.models import inputs, run, sizes, tiny
from support.tiny import save_tiny_sd3

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def job(model: Path) -> PictureJob:
    return PictureJob(
        model=str(model),
        name="tiny",
        pipeline_class="StableDiffusion3Pipeline",
        prompts=("a red fox", "a blue bird"),
        out=".",
        config="auto",
        steps=STEPS,
        guidance=3.0,
        timeout=120.0,
    )


@pytest.fixture(scope="module")
def alone(ranks, job, tmp_path_factory) -> tuple[RankRun, str]:
    """One device's run, and its trace."""
    folder = str(tmp_path_factory.mktemp("trace"))
    return ranks(1).run(run_tasks, job, [RunTask(None, folder, writes=True)])[0][0], folder


def verdicts(
    ranks: Any,
    job: PictureJob,
    alone: tuple[RankRun, str],
    configs: list[ParallelConfig],
    fn: Any = run_tasks,
    *more: Any,
):
    one, folder = alone
    every = ranks(configs[0].world_size).run(fn, job, [RunTask(config, folder) for config in configs], *more)
    found = zip(configs, zip(*every, strict=True), strict=True)
    return [judge(job, config, list(runs), one, folder) for config, runs in found]


# ---- one device


def test_one_device_is_its_own_equal(ranks, job, alone):
    """Without a configuration the same pipeline is compared: every block of every step, and nothing differs."""
    one, folder = alone
    assert one.repeats
    assert [pictures.shape for pictures in one.pictures] == [(1, 32, 32, 3)] * 2
    assert one.digests[0] != one.digests[1]
    again = ranks(1).run(run_tasks, job, [RunTask(None, folder)])[0][0]
    assert again.digests == one.digests
    compared = merge(Trace(folder), again.parts)
    # Two prompts, three steps: two blocks of two streams (the last text is not returned), prediction and latents; and
    # the latents to start from.
    assert len(compared) == 2 * (STEPS * (3 + 2) + 1)
    assert all(one.equal and one.seen == 1 and one.error == 0 for one in compared)
    order = [(one.spot.step, one.spot.path, one.spot.tensor) for one in compared[:6]]
    assert order == [
        (0, "scheduler", "latents"),
        (1, "transformer_blocks.0", "image"),
        (1, "transformer_blocks.0", "text"),
        (1, "transformer_blocks.1", "image"),
        (1, "scheduler", "prediction"),
        (1, "scheduler", "latents"),
    ]


# ---- several devices


def test_exact_strategies_pass_and_equal_ones_are_called_equal(ranks, job, alone):
    configs = [ParallelConfig(**settings) for settings in ({"ulysses": 2}, {"ring": 2}, {"cfg": 2}, {"tensor": 2})]
    found = dict(zip(("ulysses", "ring", "cfg", "tensor"), verdicts(ranks, job, alone, configs), strict=True))
    for verdict in found.values():
        assert verdict.passed, verdict
        assert verdict.agreement.repeats
        assert verdict.agreement.seen == 1
        assert 0 <= verdict.accuracy.error < 1e-5
        assert verdict.tolerance == 1e-4
        assert sum(verdict.cost.bytes_sent.values()) > 0
        assert verdict.cost.seconds > 0
        assert [step.step for step in verdict.where.growth] == [1, 2, 3]
        json.dumps(verdict.as_data(), allow_nan=False)
    same = found["ulysses"]
    assert (same.agreement.equal, same.agreement.blocks_equal, same.outcome) == (True, True, "same bits")
    assert (same.where.first_bit, same.accuracy.psnr) == (None, None)
    rounded = found["ring"]
    # Ring attention merges in another order from the first block on, and says so.
    assert not rounded.agreement.blocks_equal
    assert rounded.where.first_beyond is None
    first = rounded.where.first_bit
    assert (first.step, first.block, first.tensor) == (1, "transformer_blocks.0", "image")
    assert rounded.accuracy.psnr is None or rounded.accuracy.psnr > 100


def test_both_axes_of_rows_and_tokens_find_their_place(ranks, job, alone):
    """Rows over guidance and tokens over Ulysses: every rank compares its corner of every tensor."""
    (verdict,) = verdicts(ranks, job, alone, [ParallelConfig(cfg=2, ulysses=2)])
    assert verdict.agreement.seen == 1
    assert verdict.passed
    assert verdict.accuracy.error < 1e-5


# ---- negative controls


class BrokenExchange(SequenceParallel):
    """On rank 1, in one block of one run of the transformer, the values are not what the others sent."""

    where = ("transformer_blocks.1", 5)

    def begin_call(self):
        super().begin_call()
        self.calls = getattr(self, "calls", 0) + 1

    def attend_distributed(self, attention):
        block, call = self.where
        if self.link.rank == 1 and self._call.site.path == block and self.calls == call:
            attention = replace(attention, v_bhsd=-4 * attention.v_bhsd)
        return super().attend_distributed(attention)


def run_broken(job: PictureJob, tasks: list[RunTask]) -> list[RankRun]:
    with mock.patch("ditmesh.strategies.sequence.ExactSequence.kind", BrokenExchange):
        return run_tasks(job, tasks)


def test_a_broken_exchange_is_found_at_its_step_block_and_tensor(ranks, job, alone):
    """The fifth run of the transformer is step 2 of the second prompt."""
    (verdict,) = verdicts(ranks, job, alone, [ParallelConfig(ulysses=2)], run_broken)
    assert not verdict.passed
    assert not verdict.agreement.equal
    assert verdict.accuracy.error > 1e-3
    assert verdict.outcome == "beyond 0.0001"
    for found in (verdict.where.first_bit, verdict.where.first_beyond):
        assert (found.picture, found.step, found.block, found.tensor) == (2, 2, "transformer_blocks.1", "image")
        assert found.call == 1
    assert "prompt 2, step 2, transformer_blocks.1, image (token" in verdict.where.first_bit.describe()
    # The watched run was broken, the unwatched one (runs 7 to 12) was not.
    assert not verdict.agreement.repeats
    growth = {step.step: step for step in verdict.where.growth}
    assert (growth[1].latents, growth[1].blocks) == (0, 0)
    assert growth[2].prediction > 1e-3
    # The heat map knows the block as well.
    assert verdict.where.heat["transformer_blocks.0"][2] == 0
    assert verdict.where.heat["transformer_blocks.1"][2] > 1e-3


class BrokenSilently(SequenceParallel):
    """A bit too much, in what attention returns for one token."""

    def attend_distributed(self, attention):
        out = super().attend_distributed(attention)
        if self.link.rank == 1 and self._call.site.path == "transformer_blocks.0":
            out[0, 0, 5] *= 1 + 2**-20
        return out


def run_silently_broken(job: PictureJob, tasks: list[RunTask]) -> list[RankRun]:
    with mock.patch("ditmesh.strategies.sequence.ExactSequence.kind", BrokenSilently):
        return run_tasks(job, tasks)


def test_a_difference_far_below_the_tolerance_is_named_and_promises_are_kept_to_the_bit(ranks, job, alone):
    (verdict,) = verdicts(ranks, job, alone, [ParallelConfig(ulysses=2)], run_silently_broken)
    # Token 5 of rank 1, which has the second half of the 64 image tokens.
    assert verdict.passed
    assert not verdict.agreement.blocks_equal
    assert verdict.where.first_beyond is None
    assert verdict.where.first_bit.describe() == "step 1, transformer_blocks.0, image (token 37, rank 1)"
    # A configuration that promises bits would have failed.
    one, folder = alone
    every = ranks(2).run(run_silently_broken, job, [RunTask(ParallelConfig(ulysses=2), folder)])
    strict = judge(job, ParallelConfig(ulysses=2, reproducible=True), [runs[0] for runs in every], one, folder)
    assert strict.promise == "bits"
    assert strict.passed == strict.agreement.equal
    assert not strict.agreement.equal
    assert strict.outcome == "other bits"


class ForgetfulTiles(TiledSequence):
    """What attention gives the last tile of rank 1 is a millionth too large."""

    def _attend_tiles(self, site, asked):
        outs = super()._attend_tiles(site, asked)
        if self.link.rank == 1 and site.path == "transformer_blocks.1":
            outs[-1] = outs[-1] * (1 + 2**-20)
        return outs


def run_forgetful(job: PictureJob, tasks: list[RunTask]) -> list[RankRun]:
    with mock.patch("ditmesh.strategies.reproducible.ReproducibleSequence.kind", ForgetfulTiles):
        return run_tasks(job, tasks)


def test_stages_are_judged_by_what_the_scheduler_sees(ranks, job, alone):
    """The first steps of a pipeline of stages are exact; blocks, which run patch by patch, are not shown."""
    (found,) = verdicts(ranks, job, alone, [ParallelConfig(pipe=2, warmup="fixed(2)")])
    assert found.passed
    assert 0 < found.agreement.seen < 0.5
    assert not found.agreement.blocks_equal
    assert (found.where.first_beyond.step, found.where.first_beyond.block) == (3, "scheduler")
    assert found.where.growth[0].latents < 1e-5


def test_reproducible_configurations_are_held_to_the_bit(ranks, job, tmp_path):
    """The reference is one device with the same tiles; a difference of a millionth breaks the promise."""
    configs = [ParallelConfig(ring=2, reproducible=True), ParallelConfig(cfg=2, reproducible=True)]
    reference = reference_config(configs[0])
    assert reference == reference_config(configs[1]) == ParallelConfig(reproducible=True)
    one = ranks(1).run(run_tasks, job, [RunTask(reference, str(tmp_path), writes=True)])[0][0]
    for verdict in verdicts(ranks, job, (one, str(tmp_path)), configs):
        agreed = verdict.agreement
        assert (verdict.passed, agreed.equal, agreed.blocks_equal, agreed.seen) == (True, True, True, 1)
        assert (verdict.promise, verdict.reference) == ("bits", "1 device reproducible")
    (broken,) = verdicts(ranks, job, (one, str(tmp_path)), configs[:1], run_forgetful)
    assert not broken.passed
    assert broken.outcome == "other bits"
    # Four tiles of 8 tokens each are rank 1's; the last of them is where it goes wrong first.
    assert broken.where.first_bit.describe() == "step 1, transformer_blocks.1, image (token 56, rank 1)"
    assert broken.accuracy.error < 1e-4


# ---- every way of cutting


def cut_pieces(name: str, config: dict[str, Any]) -> tuple[int, float, bool]:
    """What a tap is shown on this rank, against the whole: pieces, largest error, and whether any was a real part."""
    transformer, arguments = tiny(name), inputs(name, next(iter(sizes(name).values())))
    whole: dict[tuple[str, str, int], torch.Tensor] = {}
    seen: dict[tuple[str, str], int] = {}

    def key(path: str, stream: str) -> tuple[str, str, int]:
        number = seen[path, stream] = seen.get((path, stream), -1) + 1
        return path, stream, number

    undo = watch_blocks(
        transformer,
        ditmesh.engine.find_layout(transformer),
        lambda path, piece: whole.update({key(path, piece.stream): piece.tensor}),
    )
    run(transformer, arguments)
    undo()
    assert not any(module._forward_hooks for module in transformer.modules())
    seen.clear()
    errors: list[float] = []
    parts: list[bool] = []

    def compare(path: str, piece: Any) -> None:
        mine = whole[key(path, piece.stream)].narrow(piece.dim, piece.start, piece.tensor.shape[piece.dim])
        assert mine.shape == piece.tensor.shape
        errors.append(float((mine - piece.tensor).abs().max() / mine.abs().max()))
        parts.append(mine.shape != whole[path, piece.stream, seen[path, piece.stream]].shape)

    with ditmesh.parallelized(transformer, config):
        ditmesh.engine_of(transformer).hooks[0].tap = compare
        run(transformer, arguments)
    assert len(errors) == len(whole)
    return len(errors), max(errors), any(parts)


@pytest.mark.parametrize("name", ["SD3", "Flux", "Latte", "Sana", "Wan"])
def test_taps_are_shown_where_their_piece_belongs(ranks, name):
    """Joint streams, two lists, tokens folded into the batch, rows of a grid, text kept whole."""
    for pieces, error, parts in ranks(2).run(cut_pieces, name, {"ulysses": 2}):
        assert pieces >= 2
        assert error < 1e-5
        assert parts


def guided_in_two_calls(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Flux with true guidance: two runs of the transformer a step, which the ranks may share."""
    import torch.distributed as dist

    pipe = pipelines.flux()

    def draw(sink: Any) -> None:
        with Recorder(pipe, sink) as recorder:
            recorder.begin(0)
            pipelines.draw(pipe, pipelines.arguments("flux", [1], steps=3))
            recorder.end()
        # The scheduler's own method is back.
        assert "step" not in vars(pipe.scheduler)

    if dist.get_rank() == 0:
        writer = TraceWriter(folder, 1e9, 6)
        draw(writer)
    dist.barrier()
    trace = Trace(folder)
    comparer = TraceComparer(trace, dist.get_rank())
    with ditmesh.parallelized(pipe, config):
        draw(comparer)
        engine = ditmesh.engine_of(pipe)
        assert all(hooks.tap is None for hooks in engine.hooks)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, comparer.parts)
    compared = merge(trace, [part for parts in everyones for part in parts])
    alone = merge(trace, comparer.parts)
    return {
        "calls": sorted({entry.spot.call for entry in trace.entries}),
        "unknown": len(comparer.unknown),
        "seen": min(one.seen for one in compared),
        "error": max(one.error for one in compared),
        "alone": min(one.seen for one in alone),
    }


@pytest.mark.matrix
@pytest.mark.parametrize("config", [{"cfg": 2}, {"ring": 2}], ids=str)
def test_branches_that_run_ahead_are_compared_with_their_own_call(ranks, tmp_path, config):
    for found in ranks(2).run(guided_in_two_calls, str(tmp_path), config):
        assert found["calls"] == [0, 1, 2]
        assert found["unknown"] == 0
        assert found["seen"] == 1
        assert found["error"] < 1e-4
        # No rank has seen everything by itself: the branches, or the tokens, are shared.
        assert found["alone"] < 1


@pytest.mark.matrix
def test_virtual_ranks_show_their_pieces_too(tmp_path):
    """Two ranks simulated in this process: the first step is exact, the others are not."""
    pipe = pipelines.flux()

    def draw(sink: Any) -> None:
        with Recorder(pipe, sink) as recorder:
            recorder.begin(0)
            pipelines.draw(pipe, pipelines.arguments("flux", [1], steps=2))
            recorder.end()

    writer = TraceWriter(tmp_path, 1e9, 4)
    draw(writer)
    comparer = TraceComparer(Trace(tmp_path), 0)
    with ditmesh.simulated(pipe, {"ring": 2, "exchange": "naive", "warmup": "fixed(1)"}):
        draw(comparer)
    compared = merge(comparer.trace, comparer.parts)
    assert all(one.seen == 1 for one in compared)
    assert max(one.error for one in compared if one.spot.step == 1) < 1e-5
    first = next(one.spot for one in compared if one.error > 1e-4)
    assert (first.step, first.path) == (2, "transformer_blocks.0")


# ---- traces


@pytest.mark.matrix
def test_a_trace_keeps_to_its_budget_when_more_calls_come_than_were_expected(tmp_path):
    """Three branches of guidance, or samplers that ask twice a step."""
    whole = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    writer = TraceWriter(tmp_path, budget=whole.nbytes / 2, calls=2)
    for step in range(1, 7):
        writer.take(Spot(0, step, 1, "blocks.0", "image"), whole * step, 0, 1, 0)
        writer.end_call()
    trace = Trace(tmp_path)
    assert sum(entry.values.nbytes for entry in trace.entries) <= whole.nbytes / 2
    assert writer.stride == 16
    for step, entry in enumerate(trace.entries, 1):
        assert torch.equal(entry.values, (whole * step)[..., ::16])
        assert torch.equal(entry.digests, token_digests(whole * step))
    comparer = TraceComparer(trace, 0)
    comparer.take(Spot(0, 2, 1, "blocks.0", "image"), whole * 2, 0, 1, 0)
    assert next(one for one in merge(trace, comparer.parts) if one.spot.step == 2).equal


def test_a_trace_keeps_to_its_budget_and_still_sees_every_bit(tmp_path):
    whole = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    spots = [Spot(0, step, 1, "blocks.0", "image") for step in (1, 2)]
    writer = TraceWriter(tmp_path, budget=whole.nbytes * 2 / 8, calls=2)
    # The parts of one device that works tile by tile come in any order; one came twice.
    for row, start, stop in ((1, 0, 6), (0, 4, 6), (0, 0, 4), (0, 0, 4)):
        writer.take(spots[0], whole[row : row + 1, start:stop], row, 1, start)
    writer.end_call()
    writer.take(spots[1], whole * 2, 0, 1, 0)
    writer.end_call()
    assert writer.stride == 8
    trace = Trace(tmp_path)
    first, second = trace.entries
    assert first.values.nbytes + second.values.nbytes < whole.nbytes
    assert first.shape == (2, 6, 64)
    assert torch.equal(first.values, whole[..., ::8])
    assert torch.equal(first.digests, token_digests(whole))
    assert torch.equal(second.values, whole[..., ::8] * 2)
    # A bit of a channel that is not kept.
    ours = whole[:, 2:].clone()
    ours[1, 1, 3] += 1e-6
    comparer = TraceComparer(trace, 1)
    comparer.take(spots[0], ours, 0, 1, 2)
    comparer.take(spots[0], whole[:, :2], 0, 1, 0)
    comparer.take(Spot(0, 9, 1, "blocks.0", "image"), whole, 0, 1, 0)
    comparer.take(spots[1], whole[..., :32], 0, 1, 0)
    found, other = merge(trace, comparer.parts)
    assert (found.equal, found.token, found.ranks, found.seen, found.error) == (False, 3, (1,), 1, 0)
    # Another shape is another tensor; a step that one device did not take is kept apart.
    assert not other.equal
    assert other.error == float("inf")
    assert [spot.step for spot in comparer.unknown] == [9]


def test_a_trace_takes_no_more_than_half_of_what_is_free(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**12, 0, 10**9))
    assert budget_of(tmp_path, 2) == 0.25e9
    assert budget_of(tmp_path, 2, 1e6) == 1e6
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**12, 0, 10**7))
    with pytest.raises(InputError, match=r"10 MB free.*--trace-dir"):
        budget_of(tmp_path, 1)


def test_a_full_disk_is_told(ranks, job, tmp_path):
    (said,) = ranks(1).run(fill_the_disk, job, str(tmp_path))
    assert "no space is left in" in said
    assert "--trace-dir" in said


def fill_the_disk(job: PictureJob, folder: str) -> str:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with mock.patch("pathlib.Path.write_bytes", full), pytest.raises(InputError) as refused:
        run_tasks(job, [RunTask(None, folder, writes=True)])
    return str(refused.value)


# ---- promises, references, combinations


def test_what_is_promised_and_compared_with():
    assert promise_of(ParallelConfig(ulysses=2)) == "tolerance"
    assert promise_of(ParallelConfig(ring=2, exchange="displaced")) == "none"
    assert promise_of(ParallelConfig(pipe=2)) == "none"
    assert promise_of(ParallelConfig(pipe=2, reproducible=True)) == "bits"
    assert reference_config(ParallelConfig(ulysses=2, cfg=2)) is None
    weighted = ParallelConfig(ulysses=2, speeds=(2, 1), reproducible=True, tiles=4)
    assert reference_config(weighted) == ParallelConfig(reproducible=True, tiles=4)
    staged = ParallelConfig(pipe=2, data=2, stages=(5, 7), reproducible=True)
    assert reference_config(staged) == ParallelConfig(patches=2, reproducible=True)
    assert config_name(weighted) == "ulysses=2 speeds=2,1 reproducible tiles=4"
    assert config_name(None) == "one device"


@pytest.mark.matrix
def test_every_sensible_configuration(model):
    info = find_model(model)
    names = [config_name(config) for config in sensible(2, info, pictures=1, guided=True)]
    assert names[:4] == ["ulysses=2", "ring=2", "cfg=2", "tensor=2"]
    assert "data=2" not in names
    assert {"ulysses=2 reproducible", "pipe=2"} <= set(names)
    stale = [name for name in names if "exchange=displaced" in name or "exchange=naive" in name]
    assert len(stale) == 2
    unguided = [config_name(config) for config in sensible(2, info, pictures=2, guided=False)]
    assert "data=2" in unguided
    assert not any("cfg" in name for name in unguided)
    four = sensible(4, info, pictures=1, guided=True)
    assert len(set(four)) == len(four)
    assert all(config.world_size == 4 for config in four)
    assert {"ulysses=2 ring=2", "ulysses=2 cfg=2", "tensor=2 cfg=2"} <= {config_name(config) for config in four}
    # The model has 8 heads: more Ulysses ranks make no sense.
    assert all(config.ulysses <= 8 for config in sensible(16, info, pictures=1, guided=True))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("ulysses=2 cfg=2 reproducible", {"ulysses": 2, "cfg": 2, "reproducible": True}),
        ("ring=2  speeds=2,1", {"ring": 2, "speeds": (2.0, 1.0)}),
        ("pipe=2 warmup=first_last(2, 1)", {"pipe": 2, "warmup": "first_last(2, 1)"}),
        ("ring=2 exchange=displaced compress=int8", {"ring": 2, "exchange": "displaced", "compress": "int8"}),
        ("tiles=4 reproducible=false", {"tiles": 4}),
    ],
)
def test_configurations_in_words(text, settings):
    assert parse_config(text) == ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ulysses", "'ulysses' in the configuration"),
        ("ulises=2", "'ulises' is not a setting"),
        ("ring=2 ring=4", "'ring' stands twice"),
        ("ulysses=two", "ulysses='two' is not possible"),
        ("nowhere.yaml", "cannot read the configuration"),
    ],
)
def test_words_that_are_no_configuration(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(text)


# ---- the command


def command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main(["verify", *map(str, arguments)])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_command_says_what_fails_and_writes_a_page(model, tmp_path, capfd):
    """With a tolerance of 0 the ring fails; Ulysses has the same bits."""
    (tmp_path / "ring.yaml").write_text("ring: 2\n")
    page = tmp_path / "pages" / "verify.html"
    code = command(
        "--configs", "ulysses=2", tmp_path / "ring.yaml", "--model", model, "--prompt", "a red fox", "--steps", "2",
        "--guidance", "3", "--size", "48x32", "--tolerance", "0", "--threads", "1", "--device", "cpu", "--json",
        "--html", page,
    )  # fmt: skip
    captured = capfd.readouterr()
    assert code == 1, captured.err
    result = json.loads(captured.out)
    assert not result["passed"]
    assert result["threads"] == 1
    assert [(one["config"], one["passed"], one["equal"]) for one in result["configs"]] == [
        ("ulysses=2", True, True),
        ("ring=2", False, False),
    ]
    assert result["configs"][1]["first_beyond"]["step"] == 1
    assert result["configs"][1]["outcome"] == "beyond 0"
    assert result["one_device"][0]["config"] == "one device"
    html = page.read_text(encoding="utf-8")
    assert html.count("<img ") == 6
    assert "https://" not in html
    assert "Compared with one device: beyond 0." in html
    assert "ring=2: “a red fox”, seed 0" in html
    reader = Reader(html)
    reader.check()
    # Nobody's folders, no data types of a language, and the result itself to save.
    assert str(tmp_path) not in html
    assert str(model) not in html
    assert not any("{'" in cell or "['" in cell for table in reader.tables for row in table for cell in row)
    circumstances = dict(reader.tables[-1])
    assert circumstances["model"] == model.name
    assert circumstances["picture size"] == "48 × 32 pixels"
    assert circumstances["versions: torch"] == result["versions"]["torch"]
    assert "--html verify.html" in circumstances["command line"]
    assert f"--model {model.name} " in circumstances["command line"]
    files = reader.files()
    rows = list(csv.DictReader(io.StringIO(files["verify.csv"])))
    assert [(row["config"], float(row["largest"])) for row in rows] == [
        (one["config"], one["largest"]) for one in result["configs"]
    ]
    assert int(rows[1]["bytes_ring"]) == result["configs"][1]["bytes_sent"]["ring"]
    assert json.loads(files["verify.json"])["configs"] == result["configs"]


@pytest.mark.parametrize("name", ["emoji-flux", pytest.param("fashion-dit", marks=pytest.mark.matrix)])
def test_embedded_models_have_a_prompt_of_their_own(name, capfd):
    code = command("ulysses=2", "--model", name, "--steps", "2", "--threads", "1", "--device", "cpu", "--json")
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert [one["equal"] for one in json.loads(captured.out)["configs"]] == [True]


@pytest.mark.matrix
def test_a_chrome_trace_shows_ranks_side_by_side_and_what_hides(model, tmp_path, capfd):
    """Every block of every step, every message where the traffic counter has it, and each wait after its posting."""
    file = tmp_path / "verify.trace.json"
    code = command(
        "--configs", "ring=2", "--configs", "ring=2 exchange=displaced warmup=fixed(1)", "--model", model,
        "--prompt", "a red fox", "--steps", "4", "--guidance", "1", "--threads", "1", "--device", "cpu", "--json",
        "--trace", file,
    )  # fmt: skip
    captured = capfd.readouterr()
    assert code == 0, captured.err
    result = json.loads(captured.out)
    assert result["trace"] == str(file)
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    stale = [name for name in names.values() if "displaced" in name]
    assert sorted(names.values()) == sorted(
        ["one device, rank 0", "ring=2, rank 0", "ring=2, rank 1", stale[0], stale[0][:-1] + "1"]
    )
    for process, name in names.items():
        mine = [event for event in events if event["pid"] == process]
        blocks = [event for event in mine if event.get("cat") == "blocks"]
        assert Counter(event["name"] for event in blocks) == {f"transformer_blocks.{index}": 4 for index in (0, 1)}
        assert all(event["dur"] > 0 for event in blocks)
        waits = [event for event in mine if event.get("cat") == "waiting for ranks"]
        begun = {event["id"]: event["ts"] for event in mine if event["ph"] == "b"}
        ended = {event["id"]: event["ts"] for event in mine if event["ph"] == "e"}
        assert len(waits) == len(begun) == len(ended)
        if name.startswith("one device"):
            assert not waits
            continue
        assert all(begun[one] <= ended[one] for one in begun)
        attention = sum(event["args"]["bytes_sent"] for event in waits if event["name"] == "ring shift")
        config = result["configs"]["displaced" in name]
        if "displaced" not in name:
            # Keys and values of both blocks, posted before this rank's own attention and waited for after it.
            assert attention > 0
            assert min(ended[one] - begun[one] for one in begun) > 0
        overlap = config["overlap"]["ring"]
        assert 0 <= overlap["waited"] <= overlap["under_way"]
        assert 0 < overlap["sent"] <= config["bytes_sent"]["ring"]
    inside = next(e for e in events if e["name"] == "transformer_blocks.0" and names[e["pid"]] == "ring=2, rank 0")
    assert any(
        event["name"] == "ring shift" and inside["ts"] <= event["ts"] <= inside["ts"] + inside["dur"]
        for event in events
        if event["pid"] == inside["pid"]
    )


def test_the_command_in_words(model, tmp_path, capfd):
    assert command("cfg=2", "--model", model, "--prompt", "a red fox", "--steps", "2", "--threads", "1") == 0
    said = capfd.readouterr().out
    assert "compared with: one device" in said
    assert "cfg=2" in said


BAD = [
    ((), ("no configuration", "ulysses=2")),
    (("--all", "1"), ("--all 1", "--all 2")),
    (("ulysses=2", "--tolerance", "-1"), ("--tolerance -1",)),
    (("ulysses=2", "--tolerance", "nan"), ("--tolerance nan",)),
    (("ulysses=9",), ("ulysses=9", "8 attention heads")),
    (("ulises=2",), ("'ulises'", "ulysses")),
    (("ring=65",), ("65 ranks", "64 image tokens")),
    (("ring=2 exchange=displaced ulysses=2",), ("exchange='displaced'", "ring")),
    (("ring=2", "--steps", "0"), ("--steps 0",)),
    (("ring=2", "--size", "31x32"), ("31x32", "multiples of 4")),
    (("ring=2", "--model", "./nowhere"), ("'./nowhere'", "no such folder")),
    (("ring=2", "--threads", "0"), ("--threads 0",)),
    (("ring=2", "--timeout", "0"), ("--timeout 0",)),
    (("ring=2", "--html", "FOLDER"), ("--html", "is a folder")),
    (("ring=2", "--trace", "FOLDER"), ("--trace", "is a folder")),
    (("ring=2", "--no-prompt"), ("there is no prompt",)),
]


@pytest.mark.matrix
def test_nothing_is_left_of_a_run_that_is_killed(model, temporary):
    """Its traces are as large as what it computes."""
    mark, environment = processes.marked(
        {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(temporary)}
    )
    words = [sys.executable, "-m", "ditmesh", "verify", "ring=2", "--prompt", "a red fox", "--model", str(model)]
    words += ["--steps", "500", "--threads", "1", "--device", "cpu"]
    owner = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 240
        while not list(temporary.glob("ditmesh-verify-*/trace-0/*")) and time.monotonic() < limit:
            time.sleep(0.02)
        assert list(temporary.glob("ditmesh-verify-*/trace-0/*"))
    finally:
        owner.kill()
        owner.wait(10)
    assert processes.wait_until_gone(mark, 30) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"), BAD, ids=lambda value: " ".join(value) if isinstance(value, tuple) else None
)
def test_bad_input_is_refused_in_one_sentence_before_ranks_start(model, tmp_path, capsys, monkeypatch, arguments, says):
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ditmesh.launch.RankPool.__init__", start)
    words = [str(tmp_path) if word == "FOLDER" else word for word in arguments if word != "--no-prompt"]
    if "--no-prompt" not in arguments:
        words += ["--prompt", "a red fox"]
    if "--model" not in words:
        words += ["--model", str(model)]
    assert command(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ditmesh: ")
    assert len(captured.err.strip().splitlines()) == 1
    for part in says:
        assert part in captured.err


def test_verdicts_of_what_cannot_run(job):
    refused = Verdict("pipe=2", {}, 2, "one device", "none", None, refused="not like this")
    assert refused.outcome == "refused"
    json.dumps(refused.as_data(), allow_nan=False)
    with tempfile.TemporaryDirectory() as folder:
        found = judge(job, ParallelConfig(ring=2), [RankRun(refused="no")] * 2, RankRun(), folder)
    assert (found.refused, found.passed) == ("no", True)

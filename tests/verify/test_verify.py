"""Configurations against one device: what is equal is called equal, what is broken is found at its step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ditmesh.config import ParallelConfig
from ditmesh.generate.job import PictureJob
from ditmesh.generate.model_info import find_model
from ditmesh.recipe import promise_of
from ditmesh.strategies.reproducible import TiledSequence
from ditmesh.strategies.sequence import SequenceParallel
from ditmesh.verify.runs import RankRun, RunTask, config_name, reference_config, run_tasks, sensible
from ditmesh.verify.steps import StepRecorder, compare_steps, merge
from ditmesh.verify.verdicts import judge
from support import pipelines
from support.commands import refusal
from support.commands import run as run_command
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
def alone(ranks, job) -> RankRun:
    """One device's run."""
    return ranks(1).run(run_tasks, job, [RunTask(None)])[0][0]


def verdicts(ranks: Any, job: PictureJob, alone: RankRun, configs: list[ParallelConfig], fn: Any = run_tasks):
    every = ranks(configs[0].world_size).run(fn, job, [RunTask(config, alone.steps) for config in configs])
    return [
        judge(job, config, list(runs), alone) for config, runs in zip(configs, zip(*every, strict=True), strict=True)
    ]


# ---- one device


def test_one_device_is_its_own_equal(ranks, job, alone):
    """Without a configuration the same pipeline is compared: every step of every prompt, and nothing differs."""
    assert alone.repeats
    assert [images.shape for images in alone.images] == [(1, 32, 32, 3)] * 2
    assert alone.digests[0] != alone.digests[1]
    again = ranks(1).run(run_tasks, job, [RunTask(None, alone.steps)])[0][0]
    assert again.digests == alone.digests
    # The latents to start from; prediction and latents of every step.
    order = [(prompt, 0, "latents") for prompt in (1, 2)]
    order += [(p, step, name) for p in (1, 2) for step in range(1, STEPS + 1) for name in ("prediction", "latents")]
    assert [(tensor.prompt, tensor.step, tensor.tensor) for tensor in again.compared] == sorted(
        order, key=lambda place: (place[0], place[1], place[2] == "latents")
    )
    assert all(tensor.equal and tensor.error == 0 for tensor in again.compared)


# ---- several devices


def test_exact_strategies_pass_and_equal_ones_are_called_equal(ranks, job, alone):
    configs = [ParallelConfig(**settings) for settings in ({"ulysses": 2}, {"ring": 2}, {"cfg": 2}, {"tensor": 2})]
    found = dict(zip(("ulysses", "ring", "cfg", "tensor"), verdicts(ranks, job, alone, configs), strict=True))
    for verdict in found.values():
        assert verdict.passed, verdict
        assert verdict.repeats
        assert 0 <= verdict.error < 1e-5
        assert verdict.tolerance == 1e-4
        assert sum(verdict.bytes_sent.values()) > 0
        assert verdict.seconds > 0
        json.dumps(verdict.as_data(), allow_nan=False)
    same = found["ulysses"]
    assert (same.equal, same.outcome) == (True, "same bits")
    assert (same.first_bit, same.psnr) == (None, None)
    rounded = found["ring"]
    # Ring attention merges in another order from the first step on, and says so.
    assert not rounded.equal
    assert rounded.first_beyond is None
    first = rounded.first_bit
    assert (first.step, first.tensor, first.ranks) == (1, "prediction", (0, 1))
    assert first.describe() == "step 1, prediction (ranks 0 and 1)"
    assert rounded.psnr is None or rounded.psnr > 100


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


def test_a_broken_exchange_is_found_at_its_step(ranks, job, alone):
    """The fifth run of the transformer is step 2 of the second prompt."""
    (verdict,) = verdicts(ranks, job, alone, [ParallelConfig(ulysses=2)], run_broken)
    assert not verdict.passed
    assert not verdict.equal
    assert verdict.error > 1e-3
    assert verdict.outcome == "beyond 0.0001"
    for found in (verdict.first_bit, verdict.first_beyond):
        assert found.describe() == "prompt 2, step 2, prediction (ranks 0 and 1)"
    # The recorded run was broken, the timed one (runs 7 to 12) was not.
    assert not verdict.repeats


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


def test_reproducible_configurations_are_held_to_the_bit(ranks, job):
    """The reference is one device with the same tiles; a difference of a millionth breaks the promise."""
    configs = [ParallelConfig(ring=2, reproducible=True), ParallelConfig(cfg=2, reproducible=True)]
    reference = reference_config(configs[0])
    assert reference == reference_config(configs[1]) == ParallelConfig(reproducible=True)
    one = ranks(1).run(run_tasks, job, [RunTask(reference)])[0][0]
    for verdict in verdicts(ranks, job, one, configs):
        assert (verdict.passed, verdict.equal) == (True, True)
        assert (verdict.promise, verdict.reference) == ("bits", "1 device reproducible")
    (broken,) = verdicts(ranks, job, one, configs[:1], run_forgetful)
    assert not broken.passed
    assert broken.outcome == "other bits"
    assert broken.first_bit.describe() == "step 1, prediction (ranks 0 and 1)"
    assert broken.error < 1e-4


# ---- steps


def test_a_recorder_keeps_what_the_scheduler_sees_and_leaves_nothing_behind():
    pipe = pipelines.flux()
    with StepRecorder(pipe) as recorder:
        pipelines.draw(pipe, pipelines.arguments("flux", [1], steps=2))
    steps = recorder.steps()
    assert list(steps) == [(0, "latents"), (1, "prediction"), (1, "latents"), (2, "prediction"), (2, "latents")]
    assert "step" not in vars(pipe.scheduler)
    with StepRecorder(pipe) as again:
        pipelines.draw(pipe, pipelines.arguments("flux", [1], steps=2))
    assert all(tensor.equal for tensor in compare_steps(1, again.steps(), steps, 0))


def test_every_bit_counts_and_what_one_lacks_differs_infinitely():
    whole = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    theirs = {(0, "latents"): whole, (1, "prediction"): whole, (1, "latents"): whole, (2, "latents"): whole}
    flipped, moved = whole.clone(), whole.clone()
    flipped[1, 1, 3].view(torch.int32).bitwise_xor_(torch.tensor(1, dtype=torch.int32))
    moved[0, 0, 0] += 1
    mine = {(0, "latents"): whole.clone(), (1, "prediction"): flipped, (1, "latents"): whole[:1], (3, "latents"): whole}
    compared = compare_steps(1, mine, theirs, 1)
    assert [(tensor.step, tensor.tensor) for tensor in compared] == [*theirs, (3, "latents")]
    assert [tensor.equal for tensor in compared] == [True, False, False, False, False]
    assert 0 < compared[1].error < 1e-6
    assert [tensor.error for tensor in compared[2:]] == [float("inf")] * 3
    # Minus zero is another number, and not a number is itself.
    zeros = {(1, "latents"): torch.zeros(3)}
    (minus,) = compare_steps(1, {(1, "latents"): -torch.zeros(3)}, zeros, 0)
    assert (minus.equal, minus.error) == (False, 0)
    # All ranks together: the largest difference, and who has one.
    (start, *_) = merge([*compare_steps(1, {**theirs, (0, "latents"): moved}, theirs, 0), *compared])
    assert (start.equal, start.ranks) == (False, (0,))
    assert start.largest == pytest.approx(1, abs=1e-6)


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
    names = [config_name(config) for config in sensible(2, info, images=1, guided=True)]
    assert names[:4] == ["ulysses=2", "ring=2", "cfg=2", "tensor=2"]
    assert "data=2" not in names
    assert {"ulysses=2 reproducible", "pipe=2"} <= set(names)
    stale = [name for name in names if "exchange=displaced" in name or "exchange=naive" in name]
    assert len(stale) == 2
    unguided = [config_name(config) for config in sensible(2, info, images=2, guided=False)]
    assert "data=2" in unguided
    assert not any("cfg" in name for name in unguided)
    four = sensible(4, info, images=1, guided=True)
    assert len(set(four)) == len(four)
    assert all(config.world_size == 4 for config in four)
    assert {"ulysses=2 ring=2", "ulysses=2 cfg=2", "tensor=2 cfg=2"} <= {config_name(config) for config in four}
    # The model has 8 heads: more Ulysses ranks make no sense.
    assert all(config.ulysses <= 8 for config in sensible(16, info, images=1, guided=True))


# ---- the command


def test_the_command_says_what_fails(model, tmp_path, capfd):
    """With a tolerance of 0 the ring fails; Ulysses has the same bits."""
    (tmp_path / "ring.yaml").write_text("ring: 2\n")
    code = run_command("verify",
        "ulysses=2", tmp_path / "ring.yaml", "--model", model, "--prompt", "a red fox", "--steps", "2",
        "--guidance", "3", "--size", "48x32", "--tolerance", "0", "--threads", "1", "--device", "cpu", "--json",
    )  # fmt: skip
    captured = capfd.readouterr()
    assert code == 1, captured.err
    result = json.loads(captured.out)
    assert not result["passed"]
    assert result["threads"] == 1
    assert [(verdict["config"], verdict["passed"], verdict["equal"]) for verdict in result["configs"]] == [
        ("ulysses=2", True, True),
        ("ring=2", False, False),
    ]
    same, ring = result["configs"]
    assert ring["first_beyond"]["step"] == 1
    assert ring["outcome"] == "beyond 0"
    assert [image["equal"] for image in same["images"]] == [True]
    assert ring["images"][0]["largest"] == ring["largest"]
    assert ring["bytes_sent"]["ring"] > 0
    assert result["one_device"][0]["config"] == "one device"


BAD = [
    ((), ("no configuration", "ulysses=2")),
    (("ulysses=2", "--tolerance", "-1"), ("--tolerance -1",)),
    (("ulysses=9",), ("ulysses=9", "8 attention heads")),
    (("ring=65",), ("65 ranks", "64 image tokens")),
    (("ring=2 exchange=displaced ulysses=2",), ("exchange='displaced'", "ring")),
    (("ring=2", "--size", "31x32"), ("31x32", "multiples of 4")),
    (("ring=2", "--model", "./nowhere"), ("'./nowhere'", "no such folder")),
    (("ring=2", "--no-prompt"), ("there is no prompt",)),
]


@pytest.mark.parametrize(
    ("arguments", "says"), BAD, ids=lambda value: " ".join(value) if isinstance(value, tuple) else None
)
def test_bad_input_is_refused_in_one_sentence_before_ranks_start(model, capsys, monkeypatch, arguments, says):
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ditmesh.launch.RankPool.__init__", start)
    words = [word for word in arguments if word != "--no-prompt"]
    if "--no-prompt" not in arguments:
        words += ["--prompt", "a red fox"]
    if "--model" not in words:
        words += ["--model", str(model)]
    sentence = refusal(capsys, "verify", *words)
    for part in says:
        assert part in sentence

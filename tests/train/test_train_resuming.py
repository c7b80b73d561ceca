"""Resuming: what may differ from the checkpoint's run, whose folder it is, and strangers' checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import diffusers
import pytest
from safetensors.torch import load_file

import ditmesh
from ditmesh.core.files import lock_of
from ditmesh.train import TrainConfig
from ditmesh.train.checkpoints.checkpoint import Checkpoints
from ditmesh.train.checkpoints.export import written_atomically
from ditmesh.train.checkpoints.folder import (
    AT_ONCE,
    NO_MATTER,
    OTHER_WEIGHTS,
    ResumeReport,
    check_output,
    run_differences,
    run_settings,
)
from ditmesh.train.logs import read_log
from ditmesh.train.run import train
from support.train import configured, folder_of, made, save_pipeline, settings, trainer_of

model = made(lambda folder: save_pipeline("flux", folder))
data = made(lambda folder: folder_of(folder, 6, 32))


def run(given, until=None):
    """Losses by step, and what was said to be changed."""
    with trainer_of(given) as trainer:
        outcome = trainer.run(until=until)
    return outcome.losses, outcome.changed


@pytest.fixture(scope="module")
def begun(model, data, tmp_path_factory):
    """A run of four steps that has stopped after two; each test has a copy of its folder."""
    out = tmp_path_factory.mktemp("begun")
    given = settings(data, out, pretrained_model_name_or_path=str(model), resolution=32, learning_rate=1e-4)
    given |= {"lora": {"rank": 2}, "train_batch_size": 1, "global_batch_size": 2, "checkpointing_steps": 1}
    run(given, 2)
    return given


@pytest.fixture
def stopped(begun, tmp_path):
    shutil.copytree(begun["output_dir"], tmp_path / "out")
    return {**begun, "output_dir": str(tmp_path / "out"), "resume_from_checkpoint": "latest"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "seed was 0 and is 1, .* allow it with resume_allow_changed: .seed."),
        ({"global_batch_size": 4}, "batch was 2 and is 4, .*set global_batch_size to 2"),
        ({"weighting_scheme": "none", "seed": 1}, "weighting_scheme was .*; seed was .*allow them .*scheme, seed."),
        ({"aspect_ratio_buckets": "32,32;16,64"}, "aspect_ratio_buckets was null and is"),
        ({"lora": {"rank": 2, "target_modules": ["to_q"]}}, "lora.target_modules was .*states of other weights"),
        ({"lora": {"rank": 2, "alpha": 8.0}}, "lora.alpha was null and is 8.0"),
        ({"optimizer": "SGD"}, "optimizer was .AdamW. and is .SGD.*allow it with"),
        ({"ema_decay": 0.9999}, "ema_decay was null and is 0.9999: the checkpoint has states of other weights"),
    ],
    ids=str,
)
def test_what_would_change_the_samples_or_weights_is_refused(begun, change, said):
    before, now = (run_settings(configured(given), "data") for given in (begun, {**begun, **change}))
    with pytest.raises(ditmesh.InputError, match=said):
        run_differences(before, now, [])


def test_a_resumed_run_says_what_has_changed(stopped):
    """Before the first step: what changes the curve, and not what does not; new rates and decays are used at once."""
    reports, rates = [], []
    adam = {"weight_decay": 0.5, "betas": [0.5, 0.999], "eps": 1e-6}
    change = {"learning_rate": 1e-5, "seed": 1, "resume_allow_changed": ["seed"], "gradient_checkpointing": True}
    with trainer_of({**stopped, **change, "optimizer_args": adam}, preparing=reports.append) as trainer:
        outcome = trainer.run(until=3, report=lambda now: rates.append(now.lr))
        group = trainer.update.optimizer.param_groups[0]
    first, *lines = next(one.lines for one in reports if isinstance(one, ResumeReport))
    assert first == "resuming from checkpoint-2: 2 of 4 steps are done"
    assert [line.strip() for line in lines] == [
        f"changes the curve: optimizer_args was {{}} and is {json.dumps(adam)} from this step on",
        "changes the curve: learning_rate was 0.0001 and is 1e-05 from this step on",
        "changes the curve: seed was 0 and is 1 from this step on (allowed)",
    ]
    assert len(outcome.changed) == 3
    assert rates == [1e-5]
    assert (group["betas"], group["weight_decay"], group["eps"]) == ((0.5, 0.999), 0.5, 1e-6)
    # Nothing but numbers and JSON, which run no code when they are read.
    folder = Path(stopped["output_dir"]) / "checkpoint-2"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


def test_every_setting_is_classified_once():
    names = {*TrainConfig.flat_names()}
    assert not {*AT_ONCE} & {*NO_MATTER}
    assert {one for one in {*AT_ONCE, *NO_MATTER, *OTHER_WEIGHTS} if "." not in one} <= names


def test_another_optimizer_begins_without_state(stopped):
    losses, changed = run({**stopped, "optimizer": "Adam", "resume_allow_changed": ["optimizer"]})
    assert list(losses) == [2, 3]
    assert changed == ['optimizer was "AdamW" and is "Adam" from this step on (allowed)']
    # Both have moments of the same names; those of the checkpoint are not Adam's.
    kept = load_file(next((Path(stopped["output_dir"]) / "checkpoint-3").glob("*.safetensors")))
    assert {float(v) for name, v in kept.items() if name.endswith(".step") and "optimizer." in name} == {1.0}


def test_arguments_that_need_another_state_are_refused(stopped):
    with pytest.raises(ditmesh.InputError, match=r"has other parts than it has with these optimizer\.args"):
        run({**stopped, "optimizer_args": {"amsgrad": True}})


def test_other_samples_are_refused_unless_allowed(stopped, data, tmp_path):
    other = folder_of(tmp_path / "other", 5, 32)
    with pytest.raises(ditmesh.InputError, match=r"other samples .*resume_allow_changed: .data."):
        run({**stopped, "train_data_dir": str(other)})
    moved = shutil.copytree(data, tmp_path / "moved")
    assert run({**stopped, "train_data_dir": str(moved)}, 3)[1] == []
    changed = run({**stopped, "train_data_dir": str(other), "resume_allow_changed": ["data", "seed"], "seed": 3})[1]
    assert sorted(one.split()[0] for one in changed) == ["data", "seed"]


def test_a_folder_of_another_run_is_refused_and_stays(stopped):
    out = Path(stopped["output_dir"])
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    new = {**stopped, "resume_from_checkpoint": None, "seed": 1}
    for attempt in (check_output, run):
        with pytest.raises(ditmesh.InputError, match="has checkpoint-1 of an earlier run; resume that run"):
            attempt(configured(new))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "run.lock"} == {
        path: content for path, content in before.items() if path.name != "run.lock"
    }


def test_two_runs_at_once_are_refused(stopped):
    held = lock_of(Path(stopped["output_dir"]) / "run.lock")
    assert held is not None
    for attempt in (check_output, run):
        with pytest.raises(ditmesh.InputError, match=r"is used by another run \(process \d+\)"):
            attempt(configured(stopped))
    held.close()
    assert list(run(stopped, 3)[0]) == [2]


def test_a_run_goes_back_only_where_no_later_checkpoint_stays(stopped, tmp_path):
    """What `latest` means would be another course else."""
    out = Path(stopped["output_dir"])
    run(stopped)
    again = {**stopped, "learning_rate": 1e-3, "resume_from_checkpoint": "checkpoint-1"}
    for attempt in (check_output, run):
        with pytest.raises(ditmesh.InputError, match="has checkpoint-2 of the run's former course; move later"):
            attempt(configured(again))
    for number in (2, 3, 4):
        (out / f"checkpoint-{number}").rename(tmp_path / f"former-{number}")
    assert list(run(again, 2)[0]) == [1]
    assert list(run({**again, "resume_from_checkpoint": "latest"})[0]) == [2, 3]
    assert [int(row["step"]) for row in read_log(out / "loss.csv")] == [0, 1, 2, 3]


# --- numbers that are not finite -----------------------------------------------------------------------------------


def broken_at(given, step):
    """A run in which one parameter's gradient is infinite in one step; what it ended with."""
    with pytest.MonkeyPatch.context() as patch, trainer_of(given) as trainer:
        name, found = next((n, p) for n, p in trainer.trained.named_parameters() if p.requires_grad)
        reduce = trainer.parallel.sync.reduce

        def reduced(shares):
            reduce(shares)
            if trainer.step == step:
                found.grad.view(-1)[0] = float("inf")

        patch.setattr(trainer.parallel.sync, "reduce", reduced)
        with pytest.raises(FloatingPointError) as error:
            trainer.run()
        return str(error.value), name


@pytest.mark.parametrize("precision", ["bf16", pytest.param("no", marks=pytest.mark.matrix)])
def test_a_gradient_that_is_not_finite_changes_and_saves_nothing(stopped, precision):
    said, name = broken_at({**stopped, "mixed_precision": precision}, 3)
    assert f"the norm of the gradient of step 4 is inf (in {name})" in said
    assert "the last checkpoint" in said
    assert sorted(path.name for path in Path(stopped["output_dir"]).glob("checkpoint-*"))[-1] == "checkpoint-3"
    assert list(run(stopped)[0]) == [3]


def test_weights_that_are_not_finite_are_not_saved(stopped):
    with trainer_of(stopped) as trainer:
        trainer.update.optimizer.register_step_post_hook(
            lambda *_: trainer.update.parameters[0].data.view(-1)[0].fill_(float("nan"))
        )
        with pytest.raises(FloatingPointError, match=r"lora_A.* is not finite after step 3: no checkpoint"):
            trainer.run()
    assert not (Path(stopped["output_dir"]) / "checkpoint-3").exists()


def test_a_caption_that_cannot_be_encoded_is_named(stopped, tmp_path):
    with trainer_of({**stopped, "output_dir": str(tmp_path / "new"), "resume_from_checkpoint": None}) as trainer:
        encode = trainer.family.encode
        wrong = trainer.data.samples[3].words

        def encoded(pipe, said, length, references):
            if wrong in said:
                raise TypeError("TextEncodeInput must be Union[...]")
            return encode(pipe, said, length, references)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.family, "encode", encoded)
            with pytest.raises(ditmesh.InputError, match=r"sample '003.png' cannot be encoded \(TypeError: TextEncode"):
                trainer.run()


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    for content, fails in (("one", False), ("two", True), ("three", False)):
        try:
            with written_atomically(tmp_path / "pipeline") as part:
                (part / "file").write_text(content)
                if fails:
                    raise OSError(28, "No space left on device")
        except OSError:
            assert fails
        assert (tmp_path / "pipeline" / "file").read_text() == ("three" if content == "three" else "one")
        assert [path.name for path in tmp_path.iterdir()] == ["pipeline"]


def test_every_file_of_a_folder_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    """After a power cut a folder that was renamed has files with nothing in them otherwise."""
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append(os.readlink(f"/proc/self/fd/{number}")), sync(number)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("renamed"), replace(old, new)))
    with written_atomically(tmp_path / "pipeline") as part:
        (part / "inner").mkdir()
        files = [part / "one", part / "inner" / "two"]
        for file in files:
            file.write_text("content")
    assert sorted(done[: done.index("renamed")]) == sorted(map(str, files))


# --- exports -----------------------------------------------------------------------------------------------------


def exported(given, loads=None):
    """A whole run by `train`; ``loads`` gathers how often a pipeline is loaded."""
    load = diffusers.DiffusionPipeline.from_pretrained
    with pytest.MonkeyPatch.context() as patch:

        def counted(*arguments, **options):
            if loads is not None:
                loads.append(arguments)
            return load(*arguments, **options)

        patch.setattr(diffusers.DiffusionPipeline, "from_pretrained", counted)
        return train(configured(given), timeout=60.0)


@pytest.mark.parametrize("lora", [{"lora": None}, pytest.param({"lora": {"rank": 2}}, marks=pytest.mark.matrix)])
def test_an_export_that_fails_leaves_the_older_one_and_the_weights(begun, tmp_path, monkeypatch, lora):
    given = {**begun, **lora, "output_dir": str(tmp_path / "out"), "max_train_steps": 2, "ema_decay": 0.9999}
    given["checkpointing_steps"] = 2
    loads = []
    done = exported({**given, "max_train_steps": 1}, loads)
    # Neither a second pipeline is loaded at the end, nor is the folder still held.
    assert len(loads) == 1
    folder = Path(done["pipeline"])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = {**given, "resume_from_checkpoint": "latest"}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ditmesh.train.checkpoints.export._write", full)
        with pytest.raises(ditmesh.InputError, match=r"No space left .*weights of step 2 are in .*checkpoint-2: "):
            exported(again)
        # Neither the last checkpoint can be written.
        shutil.rmtree(tmp_path / "out" / "checkpoint-2")
        patch.setattr(Checkpoints, "_finished", lambda *_: "No space left on device")
        with pytest.raises(ditmesh.InputError, match="weights of the last step are in no checkpoint"):
            exported(again)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.glob("out/*") if path.is_dir()) == ["checkpoint-1", folder.name]
    assert exported(again)["step"] == 2
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} != before

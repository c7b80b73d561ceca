"""Training runs: the same curve on any ranks, exact resumption, and what is left when something fails."""

from __future__ import annotations

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import diffusers
import pytest
from safetensors.torch import load_file

import ditmesh
from ditmesh.train.checkpoints.checkpoint import broken
from ditmesh.train.logs import read_log
from ditmesh.train.run import train
from ditmesh.zoo import path as find
from support.commands import run as run_command
from support.train import (
    configured,
    data_and_model,
    emoji,
    grouped,
    losses_of,
    made,
    settings,
    tiny_settings,
    trainer_of,
)

SD3, DIT = "emoji-sd3", "emoji-dit-s"


data = made(lambda folder: data_and_model(folder, 6))


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The curve of one rank with global batches of 4."""
    given = tiny_settings(data, tmp_path_factory.mktemp("alone"), global_batch_size=4)
    return losses_of(given)


@pytest.mark.parametrize(
    "more",
    [
        {"parallel": {"ulysses": 2}},
        pytest.param({"parallel": {"data": 2}}, marks=pytest.mark.matrix),
        {"parallel": {"data": 2}, "sharding": "ddp", "gradient_checkpointing": True},
        pytest.param({"parallel": {"ring": 2}, "sharding": "fsdp"}, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"tensor": 2}}, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"tensor": 2, "data": 2}, "sharding": "fsdp"}, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"tensor": 2, "ulysses": 2}, "sharding": "ddp"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_ranks_learn_as_one_device(ranks, data, alone, tmp_path, more):
    given = tiny_settings(data, tmp_path, global_batch_size=4, **more)
    for losses in ranks(ditmesh.ParallelConfig(**more["parallel"]).world_size).run(losses_of, given):
        assert losses.keys() == alone.keys()
        assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-3
    assert broken(tmp_path / "checkpoint-4") is None


def test_the_rate_rises_stays_and_falls_in_a_line(data, tmp_path):
    """Also in a run that stopped, which goes on to the bit."""
    given = settings(data, tmp_path / "a", pretrained_model_name_or_path=DIT, learning_rate=1e-3, max_train_steps=6)
    given |= {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 2, "lr_decay_steps": 2}
    given |= {"ema_decay": 0.9999, "random_flip": True, "proportion_empty_prompts": 0.3}
    whole = losses_of(given)
    rates = [row["lr"] for row in read_log(tmp_path / "a" / "loss.csv")]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 1e-3, 1e-3, 5e-4])
    parted = {**given, "output_dir": str(tmp_path / "b")}
    first = losses_of(parted, 4)
    second = losses_of({**parted, "resume_from_checkpoint": "latest"})
    assert first | second == whole
    # The loss of the last step does not depend on its rate.
    assert [row["lr"] for row in read_log(tmp_path / "b" / "loss.csv")] == rates


def test_a_schedule_that_does_not_fit_is_refused(data, tmp_path):
    given = settings(data, tmp_path / "a", pretrained_model_name_or_path=DIT, max_train_steps=8)
    with pytest.raises(ditmesh.ConfigError, match="lr_scheduler='warmup_stable_decay' with lr_decay_steps=None"):
        configured({**given, "lr_scheduler": "warmup_stable_decay"})
    with pytest.raises(ditmesh.ConfigError, match="lr_scheduler='cosine' with lr_decay_steps=2"):
        configured({**given, "lr_scheduler": "cosine", "lr_decay_steps": 2})
    given |= {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 5, "lr_decay_steps": 4}
    with pytest.raises(ditmesh.ConfigError, match="lr_warmup_steps=5 and lr_decay_steps=4 are more than the run's 8"):
        losses_of(given)


def test_the_cache_has_latents_only_where_text_encoders_are_trained(data, tmp_path):
    given = tiny_settings(
        data, tmp_path / "a", train_modules=["transformer", "text_encoder"], proportion_empty_prompts=0.3
    )
    given |= {"max_train_steps": 2}
    plain = losses_of(given)
    cached = {**given, "output_dir": str(tmp_path / "b"), "cache_dir": str(tmp_path / "cache")}
    first, again = losses_of(cached), losses_of({**cached, "output_dir": str(tmp_path / "c")})
    assert first == again
    # Text encoders learn as without it.
    assert all(abs(first[step] / plain[step] - 1) <= 1e-4 for step in plain)
    (folder,) = (tmp_path / "cache").iterdir()
    kept = [load_file(file) for file in folder.iterdir()]
    assert kept
    assert all(set(one) == {"moments"} for one in kept)


def lengths_of(given, steps=None):
    """Tokens of the prompts of every micro-batch of this rank."""
    found = []
    with trainer_of(given) as trainer:
        encode = trainer.family.encode

        def recorded(pipe, said, length, references):
            found.append(length)
            return encode(pipe, said, length, references)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.family, "encode", recorded)
            trainer.run(until=steps)
    return found


@pytest.mark.matrix
def test_prompts_of_several_lengths(ranks, data, tmp_path):
    """Each micro-batch has one, the same on all ranks of a sequence, and after a stop."""
    given = settings(data, tmp_path / "a", resolution=32, max_sequence_length=[5, 9], max_train_steps=6)
    whole = lengths_of(given)
    assert set(whole) == {5, 9}
    parted = {**given, "output_dir": str(tmp_path / "b")}
    first, second = ranks(2).run(lengths_of, {**parted, "parallel": {"ulysses": 2}}, 3)
    assert first == second == whole[: len(first)]
    assert first + lengths_of({**parted, "resume_from_checkpoint": "latest"}) == whole


def test_the_newest_checkpoint_is_truncated(data, tmp_path, caplog):
    given = tiny_settings(data, tmp_path, checkpointing_steps=2)
    whole = losses_of(given)
    newest = next((tmp_path / "checkpoint-4").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-100])
    on = losses_of({**given, "resume_from_checkpoint": "latest"})
    assert on == {step: whole[step] for step in (2, 3)}
    assert str(newest) in caplog.text
    newest.unlink()
    with pytest.raises(ditmesh.InputError, match="is missing"):
        losses_of({**given, "resume_from_checkpoint": "checkpoint-4"})


@contextmanager
def full_disk():
    """Files of this process may not grow beyond 32 KiB: Python gets an OSError."""
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))


def test_a_full_disk_while_saving_loses_nothing(data, tmp_path, caplog):
    given = tiny_settings(data, tmp_path, checkpointing_steps=2)
    losses_of(given, 2)
    before = (tmp_path / "checkpoint-2" / "manifest.json").read_bytes()
    with full_disk():
        losses = losses_of({**given, "resume_from_checkpoint": "latest"})
    # Training went on to its end, and says what could not be written.
    assert list(losses) == [2, 3]
    assert ".checkpoint-4.part" in caplog.text
    assert "File too large" in caplog.text
    assert broken(tmp_path / "checkpoint-2") is None
    assert (tmp_path / "checkpoint-2" / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-2"]


def told(capfd, *words):
    """What ``ditmesh train`` says as JSON; it must end well."""
    code = run_command("train", *words, "--threads", "1", "--device", "cpu", "--json")
    said = capfd.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)


@pytest.mark.usefixtures("kept_ranks")
def test_the_command_trains_and_exports(data, tmp_path, capfd):
    """What comes out is a pipeline that diffusers loads."""
    file = tmp_path / "run.yaml"
    given = settings(data, tmp_path / "out", max_train_steps=2, validation_steps=2, validation_inference_steps=2)
    given |= {"validation_prompts": [emoji(1)[0][0]], "ema_decay": 0.9999}
    file.write_text(json.dumps(grouped(given)))
    said = told(capfd, file, "--ulysses", 2)
    assert said["step"] == 2
    pictures = {"step-0-0.png", "step-2-0.png"}
    assert {path.name for path in (tmp_path / "out" / "validation").iterdir()} == pictures
    trained = diffusers.DiffusionPipeline.from_pretrained(said["pipeline"])
    before = load_file(find(SD3) / "transformer" / "diffusion_pytorch_model.safetensors")
    moved = [float((v - before[k]).abs().max()) for k, v in trained.transformer.state_dict().items() if k in before]
    assert 0 < max(moved) < 0.1
    assert not [f for f in Path(said["pipeline"]).rglob("*.json") if str(tmp_path) in f.read_text(encoding="utf-8")]
    more = ["--set", "optimizer.max_train_steps=3", "--set", "output.validation_prompts=[]", "--threads", "1"]
    run_command("train", file, "--ulysses", "2", "--device", "cpu", "--resume", *more)
    assert "\n1 step after 2 steps before in " in f"\n{capfd.readouterr().out}"


def exported(given):
    """The folder that a whole run comes to."""
    return train(configured(given), timeout=100.0)["pipeline"]


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"parallel": {"tensor": 2, "data": 2}, "sharding": "fsdp"}, marks=pytest.mark.matrix)],
    ids=str,
)
def test_slices_are_exported_whole(ranks, data, tmp_path, more):
    given = tiny_settings(data, tmp_path, global_batch_size=2, train_batch_size=1, max_train_steps=1, ema_decay=0.9999)
    given |= {"parallel": {"tensor": 2}, **more}
    folder, *_ = ranks(ditmesh.ParallelConfig(**given["parallel"]).world_size).run(exported, given)
    found = load_file(Path(folder) / "transformer" / "diffusion_pytorch_model.safetensors")
    before = load_file(data.with_name("flux") / "transformer" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == before.keys()
    # One step of AdamW moves a weight by its rate.
    moved = [float((found[name] - before[name]).abs().max()) for name in before]
    assert 0 < max(moved) < 1e-3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"parallel": {"ring": 2, "exchange": "displaced"}}, "cannot be trained"),
        ({"train_modules": ["transformer", "text_encoder"], "sharding": "fsdp", "parallel": {"data": 2}}, "sharding"),
        ({"train_modules": ["transformer", "unet"]}, "has no module 'unet'"),
        ({"snr_gamma": 5.0}, "snr_gamma"),
        ({"max_sequence_length": [16, 256], "cache_dir": "cache"}, "embeddings in cache_dir have one length"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_said(ranks, data, tmp_path, more, said):
    world = ditmesh.ParallelConfig(**more.get("parallel", {})).world_size
    with pytest.raises(ditmesh.DitmeshError) as error:
        ranks(world).run(losses_of, tiny_settings(data, tmp_path, **more))
    assert said in str(error.value)

"""What a run shows of itself: the held-out loss, trackers, lines."""

from __future__ import annotations

import io
import math
import sys
import types
from pathlib import Path
from typing import Any, cast

import diffusers
import numpy as np
import pytest
import torch
from ditmesh.train.data.held_out import NUM_LEVELS
from ditmesh.train.optimizer.precision import MeshGradScaler
from rich.console import Console

import ditmesh
from ditmesh.cli.train import StepLines
from ditmesh.train.data.encoders import Encoders
from ditmesh.train.data.order import DrawnSample, MicroBatch
from ditmesh.train.data.reading import read_samples
from ditmesh.train.data.samples import pixels
from ditmesh.train.logs.trackers import check_trackers
from ditmesh.train.logs.training_log import COLUMNS, TrainingLog, read_log
from ditmesh.train.optimizer.update import WeightUpdate
from ditmesh.train.run import train
from ditmesh.train.trainer import Trainer
from support.train import configured, folder_of, save_pipeline, settings


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_pipeline("pixart", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory.mktemp("data"), 8, 32)


@pytest.fixture
def given(model, data, tmp_path):
    base = settings(data, tmp_path / "out", pretrained_model_name_or_path=str(model), resolution=32)
    base |= {"learning_rate": 1e-3, "train_batch_size": 2, "global_batch_size": 4, "validation_steps": 2}
    return lambda **more: {**base, **more}


def held_out(given, until=None):
    """Held-out losses and losses of a run, and the held-out samples' names."""
    config = configured(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    pipe.set_progress_bar_config(disable=True)
    with Trainer(config, pipe, timeout=100.0) as t:
        outcome = t.run(until=until)
        trained = {sample.name for sample in t.data.samples}
        return outcome.held_out, outcome.losses, sorted(one.name for one in t.data.held_out), sorted(trained)


# --- what is done when -----------------------------------------------------------------------------------------------


def test_images_are_drawn_before_the_first_step_and_after_the_last(given):
    """Also if no multiple of validation_steps is there; a run that goes on begins with no image."""
    drawn: list[int] = []
    run = given(validation_steps=3, max_train_steps=4)
    pipe = diffusers.DiffusionPipeline.from_pretrained(run["pretrained_model_name_or_path"])
    with Trainer(configured(run), pipe, timeout=100.0) as trainer:
        trainer.run(validate=lambda step: drawn.append(step), until=2)
    assert drawn == [0]
    with Trainer(configured({**run, "resume_from_checkpoint": "latest"}), pipe, timeout=100.0) as trainer:
        trainer.run(validate=lambda step: drawn.append(step))
    assert drawn == [0, 3, 4]


@pytest.mark.parametrize("cached", [True, False])
def test_encoders_leave_the_device_while_a_cache_replaces_them(given, tmp_path, monkeypatch, cached):
    """After all is encoded; they are back for images, and for a sample whose file of the cache is damaged."""
    places: list[str] = []
    used: list[tuple[str, str]] = []
    move = Encoders._move

    def moved(self: Encoders, device: torch.device) -> None:
        places.append("device" if device.index == 0 else "host")
        move(self, device)

    monkeypatch.setattr(Encoders, "_move", moved)
    more = {"cache_dir": str(tmp_path / "cache")} if cached else {}
    run = given(validation_split=0.25, validation_steps=2, max_train_steps=3, random_flip=True, **more)
    pipe = diffusers.DiffusionPipeline.from_pretrained(run["pretrained_model_name_or_path"])
    for name in ("text_encoder", "vae"):
        part = getattr(pipe, name).encoder
        part.register_forward_pre_hook(lambda *_, name=name: used.append((name, (places or ["device"])[-1])))

    def validate(step: int) -> None:
        assert not cached or places[-1] == "device"
        if step == 2:
            for file in (tmp_path / "cache").rglob("*.safetensors"):
                file.write_bytes(b"damaged")

    with Trainer(configured(run), pipe, torch.device("cpu", 0), timeout=100.0) as trainer:
        # A device that is called otherwise than the host, and is the same.
        outcome = trainer.run(validate=validate)
        assert len(outcome.losses) == 3
        assert places[:4] == (["host", "device", "host", "device"] if cached else [])
        assert bool(outcome.notes) == cached
    assert {place for _, place in used} == {"device"}
    assert places[-1:] == (["device"] if cached else [])


# --- what a run promises beside its curve -----------------------------------------------------------------------------


@pytest.mark.parametrize("average", [True, False])
def test_the_average_by_hand_is_what_is_exported(given, model, monkeypatch, average):
    """Of the weights after every step, also of a run that stopped; without an average the last ones."""
    weights: list[dict[str, torch.Tensor]] = []
    apply = WeightUpdate.apply

    def held(update: WeightUpdate) -> dict[str, torch.Tensor]:
        return {name.removeprefix("transformer."): p.detach().clone() for name, p in update.named.items()}

    def recorded(self: WeightUpdate, *args: Any) -> tuple[float, bool]:
        # Steps alone change the weights: no validation does, and no stop.
        assert not weights or all(torch.equal(value, weights[-1][name]) for name, value in held(self).items())
        applied = apply(self, *args)
        weights.append(held(self))
        return applied

    monkeypatch.setattr(WeightUpdate, "apply", recorded)
    run = given(max_train_steps=4, ema_decay=0.2 if average else None, learning_rate=1e-2, validation_steps=1)
    with Trainer(configured(run), diffusers.DiffusionPipeline.from_pretrained(model), timeout=100.0) as trainer:
        trainer.run(until=2, validate=lambda step: None)
    result = train(configured({**run, "resume_from_checkpoint": "latest"}))
    expected = weights[0]
    for step, after in enumerate(weights[1:], 1):
        # As in diffusers: of the first weights nothing is kept, and less than ``ema_decay`` in the first steps.
        decay = min((1 + step) / (10 + step), 0.2) if average else 0.0
        expected = {name: decay * expected[name] + (1 - decay) * value for name, value in after.items()}
    exported = diffusers.DiffusionPipeline.from_pretrained(result["pipeline"]).transformer.state_dict()
    assert len(weights) == 4
    for name, value in expected.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-5, atol=1e-7)


def test_a_step_is_that_of_the_mean_over_all_its_samples(given, model):
    """Of micro-batches of unlike sizes, by hand: every sample weighs as much, and none is left out."""
    run = given(train_batch_size=3, global_batch_size=9, max_grad_norm=0.0)
    with Trainer(configured(run), diffusers.DiffusionPipeline.from_pretrained(model)) as trainer:
        batches = trainer.data.order.step(0)
        assert sorted(batch.count for batch in batches) == [2, 3, 3]
        loss = sum(trainer._losses(batch).sum() for batch in batches) / 8
        gradients = torch.autograd.grad(cast(torch.Tensor, loss), trainer.update.parameters, allow_unused=True)
        norm = torch.nn.utils.get_total_norm([one for one in gradients if one is not None])
        done = trainer._optimizer_step(batches)
    assert done.samples == 8
    assert (done.loss, done.norm) == pytest.approx((float(loss), float(norm)), rel=1e-4)


def test_gradients_are_clipped_to_the_norm_asked_for(given, model, monkeypatch):
    norms: list[float] = []
    step = MeshGradScaler.step

    def recorded(self: MeshGradScaler, optimizer: torch.optim.Optimizer) -> Any:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return step(self, optimizer)

    monkeypatch.setattr(MeshGradScaler, "step", recorded)
    reported: list[float] = []
    run = given(max_train_steps=2, max_grad_norm=1e-3, checkpointing_steps=9)
    with Trainer(configured(run), diffusers.DiffusionPipeline.from_pretrained(model)) as trainer:
        trainer.run(report=lambda now: reported.append(now.grad_norm), until=2)
    assert norms == pytest.approx([1e-3] * 2, rel=1e-3)
    assert min(reported) > 1e-2


def test_all_that_is_random_follows_from_the_seed_and_the_number_of_a_sample(given, model, tmp_path):
    """Noise, its level, mirroring, captions, dropout: not from the batch, and with seeds of their own."""

    def randomness(seed: int, numbers: list[int]) -> dict[str, Any]:
        run = given(seed=seed, random_flip=True, proportion_empty_prompts=0.5, output_dir=str(tmp_path / str(seed)))
        with Trainer(configured(run), diffusers.DiffusionPipeline.from_pretrained(model)) as trainer:
            encoded = trainer.data.encoded
            micro = MicroBatch(tuple(DrawnSample(0, number) for number in numbers), (32, 32))
            batch = encoded.batch(micro)
            noised = trainer.objective(torch.zeros_like(batch.latents), batch.generators)
            many = [encoded.drawn(DrawnSample(0, number)) for number in range(64)]
            return {
                "noise": [one.tolist() for one in noised.target.flatten(1)[:, :4]],
                "levels": noised.timesteps.tolist(),
                "mirrored": [flip for flip, _ in many],
                "captions": [said for _, said in many],
                "order": [[one.index for one in batch.samples] for batch in trainer.data.order.step(0)],
                "weights": torch.initial_seed(),
            }

    of_run = ("mirrored", "captions", "order", "weights")
    first, again, other = randomness(0, [5, 6, 7, 8]), randomness(0, [6, 7]), randomness(1, [5, 6, 7, 8])
    assert {name: again[name] for name in of_run} == {name: first[name] for name in of_run}
    for name in ("noise", "levels"):
        assert again[name] == first[name][1:3]
        assert len({*map(str, first[name])}) > 2
    assert [name for name in first if first[name] == other[name]] == []
    assert {len(set(map(str, first[name]))) for name in ("mirrored", "captions")} == {2}


# --- the held-out loss ---------------------------------------------------------------------------------------------


def test_a_split_is_not_trained_on_and_stays_when_samples_come(given, tmp_path):
    found, losses, out, trained = held_out(given(validation_split=0.25))
    assert sorted(found) == [1, 3]
    assert found[3] < found[1]
    assert (len(out), len(trained)) == (2, 6)
    assert not {*out} & {*trained}
    plain = held_out(given(output_dir=str(tmp_path / "plain")))
    assert plain[0] == {}
    assert losses != plain[1]
    more = folder_of(tmp_path / "more", 12, 32)
    _, _, again, _ = held_out(given(train_data_dir=str(more), validation_split=0.25, max_train_steps=1,
                                    output_dir=str(tmp_path / "again")))  # fmt: skip
    assert len(again) == 3


def test_the_held_out_loss_is_that_of_a_plain_loop(given, model, data, tmp_path):
    """By hand: the pipeline's own encoders, diffusers' noise, and the exported weights, which are averages."""
    result = train(configured(given(validation_split=0.375, max_train_steps=2, ema_decay=0.9999)))
    assert result["validated"] == "moving average of the weights"
    pipe = diffusers.DiffusionPipeline.from_pretrained(result["pipeline"])
    config = configured(given(validation_split=0.375, output_dir=str(tmp_path / "b")))
    whole = diffusers.DiffusionPipeline.from_pretrained(model)
    tables = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    errors = []
    with Trainer(config, whole) as trainer, torch.no_grad():
        measured = trainer.held_out
        chosen = {sample.name for sample in trainer.data.held_out}
        samples = [sample for sample in read_samples(config.data, "text").good if sample.name in chosen]
        for number, sample in enumerate(samples):
            # The autoencoder's deviation is next to nothing.
            latents = pipe.vae.encode(pixels(sample.picture(), (32, 32))[None]).latent_dist.mode() * 0.18
            text, mask, _, _ = pipe.encode_prompt(sample.words, False, max_sequence_length=16)
            for level in range(NUM_LEVELS):
                time = tables.timesteps[int((level + 0.5) / NUM_LEVELS * 1000)][None]
                noise = measured._noise(trainer.held_out._batches[0].samples[0].__class__(number, number), level,
                                        latents.shape[1:])[None]  # fmt: skip
                size = {"resolution": torch.tensor([[32.0, 32.0]]), "aspect_ratio": torch.tensor([[1.0]])}
                prediction = pipe.transformer(
                    tables.add_noise(latents, noise, time), encoder_hidden_states=text, encoder_attention_mask=mask,
                    timestep=time, added_cond_kwargs=size, return_dict=False,
                )[0].chunk(2, dim=1)[0]  # fmt: skip
                errors.append(float((prediction - noise).square().mean()))
    assert len(errors) == 3 * NUM_LEVELS
    assert result["validation_loss"] == pytest.approx(np.mean(errors), rel=1e-5)
    rows = read_log(tmp_path / "out" / "loss.csv")
    assert math.isnan(rows[0]["validation_loss"])
    assert rows[1]["validation_loss"] == result["validation_loss"]


@pytest.mark.parametrize(
    "more",
    [
        {"parallel": {"data": 2}, "sharding": "ddp"},
        {"parallel": {"ulysses": 2}},
        pytest.param({"parallel": {"data": 2}, "sharding": "fsdp"}, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"tensor": 2}}, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"data": 3}, "global_batch_size": 6}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_any_mesh_measures_the_same(ranks, given, tmp_path, more):
    """Five samples in three micro-batches, so that ranks have unequal numbers of them."""
    shared = {"validation_split": 0.4, "train_batch_size": 1, "learning_rate": 1e-6}
    shared |= {"global_batch_size": more.get("global_batch_size", 4), "ema_decay": 0.9999}
    alone, *_ = held_out(given(**shared, output_dir=str(tmp_path / "alone")))
    count = ditmesh.ParallelConfig(**more["parallel"]).world_size
    for found, *_ in ranks(count).run(held_out, given(**{**shared, **more})):
        assert found.keys() == alone.keys()
        assert all(abs(found[step] / alone[step] - 1) <= 1e-6 for step in alone)


def test_measuring_changes_no_bit_of_the_run_and_no_seed_changes_it(given, tmp_path):
    plain = held_out(given(validation_split=0.4, validation_steps=4, output_dir=str(tmp_path / "plain"),
                           lora=None, ema_decay=0.9999))[1]  # fmt: skip
    found, losses, *_ = held_out(given(validation_split=0.4, validation_steps=1, ema_decay=0.9999))
    assert losses == plain
    again = held_out(given(validation_split=0.4, validation_steps=1, output_dir=str(tmp_path / "again"),
                           learning_rate=1e-12, seed=5, weighting_scheme="none", max_train_steps=1))  # fmt: skip
    third = held_out(given(validation_split=0.4, validation_steps=1, output_dir=str(tmp_path / "third"),
                           learning_rate=1e-12, train_batch_size=1, max_train_steps=1))  # fmt: skip
    assert again[0][0] == pytest.approx(third[0][0], rel=1e-6)
    assert found[3] != found[0]


def test_a_resumed_run_keeps_the_column(given):
    on = given(validation_split=0.25)
    first, *_ = held_out(on, 2)
    rest, *_ = held_out({**on, "resume_from_checkpoint": "latest"})
    whole, *_ = held_out({**on, "output_dir": f"{on['output_dir']}-whole"})
    assert first | rest == whole
    values = [row["validation_loss"] for row in read_log(Path(on["output_dir"]) / "loss.csv")]
    assert [math.isnan(value) for value in values] == [True, False, True, False]
    assert values[1::2] == [whole[1], whole[3]]


def test_which_samples_are_held_out_is_refused_where_it_cannot_be(given):
    with pytest.raises(ditmesh.InputError, match="holds 8 of 8 samples out, which leaves none"):
        held_out(given(validation_split=0.99))


def rows_of(count):
    return [
        {**dict.fromkeys(COLUMNS, 1.0), "step": n, "loss": 1 / (n + 1), "lr": 1e-4, "grad_norm": 0.5,
         "validation_loss": math.nan}
        for n in range(count)
    ]  # fmt: skip


# --- trackers ---------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_numbers_and_the_images(given, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on = given(report_to="tensorboard", validation_split=0.25, validation_prompts=["a"], validation_inference_steps=2)
    train(configured(on))
    board = EventAccumulator(str(tmp_path / "out")).Reload()
    rows = read_log(tmp_path / "out" / "loss.csv")
    told = {event.step: event.value for event in board.Scalars("loss")}
    assert told == pytest.approx({int(row["step"]): row["loss"] for row in rows})
    assert [event.step for event in board.Scalars("validation_loss")] == [1, 3]
    assert [event.step for event in board.Images("validation/0")] == [0, 1, 3]
    assert "pixart" in board.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    # No folder of hyperparameters lies among the checkpoints.
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir() and path.name[0].isdigit()]


def test_a_tracker_that_fails_does_not_end_the_run(given, monkeypatch, caplog):
    """A stand-in for wandb that accelerate's own tracker calls, which loses its connection at the second step."""
    calls = []

    class Run:
        def log(self, values, step=None, **more):
            calls.append((step, values))
            if len(calls) == 2:
                raise ConnectionError("the network is gone")

        def finish(self):
            calls.append("finish")

    config = types.SimpleNamespace(update=lambda values, allow_val_change: calls.append(values))
    fake = types.SimpleNamespace(init=lambda project: calls.clear() or Run(), config=config)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("accelerate.tracking._available_trackers", ["wandb"])
    log = TrainingLog(configured(given(report_to=["csv", "wandb"])), 0)
    assert calls.pop()["optimizer"] == "AdamW"
    for row in rows_of(3):
        log.add(row)
    log.close()
    assert [step for step, _ in calls] == [0, 1]
    assert calls[0][1]["loss"] == 1.0
    assert "wandb gets no more of this run: ConnectionError: the network is gone" in caplog.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wandbb", "'wandbb' is no tracker; use .*; did you mean 'wandb'"),
        ("comet_ml", "comet_ml is not installed; pip install comet-ml"),
        (["tensorboard", "swanlab"], "swanlab is not installed; pip install swanlab"),
    ],
)
def test_a_tracker_that_is_not_there_is_refused(given, name, said):
    with pytest.raises(ditmesh.InputError, match=said):
        check_trackers(configured(given(report_to=name)))
    with pytest.raises(ditmesh.InputError, match=said):
        train(configured(given(report_to=name)))


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_for_each_step_where_there_is_no_terminal():
    out = io.StringIO()
    say = StepLines(Console(file=out))
    for _ in range(3):
        say({"what": "encoding samples", "ranks": []})
    say({"lines": ["data: 3 samples"]})
    now = {"step": 1, "steps": 2, "loss": 0.5, "lr": 1e-4, "grad_norm": 2.0, "samples_per_second": 3.0}
    say({**now, "seconds_left": 7.0, "overflowed": False, "validation_loss": None})
    say({**now, "step": 2, "seconds_left": 0.0, "overflowed": True, "validation_loss": 0.25})
    assert out.getvalue().splitlines() == [
        "encoding samples ...",
        "data: 3 samples",
        "step 1/2  loss 0.5000  lr 0.0001  gradient norm 2  3.0 samples/s  7 s left",
        "step 2/2  loss 0.5000  held-out loss 0.2500  lr 0.0001  gradient norm 2  3.0 samples/s  0 s left"
        "  gradients overflowed, no weight changed",
    ]

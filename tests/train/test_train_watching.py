"""What a run promises beside its curve, and what it shows of itself: trackers, lines."""

from __future__ import annotations

import io
import sys
import types
from typing import Any, cast

import pytest
import torch

import ditmesh
from ditmesh.cli.train import Shown
from ditmesh.train.data.encoder import Encoders
from ditmesh.train.data.order import DrawnSample, MicroBatch
from ditmesh.train.logs import COLUMNS, TrainingLog, read_log
from ditmesh.train.optimizer.update import WeightUpdate
from ditmesh.train.run import train
from ditmesh.train.trainer import Trainer
from support.train import configured, folder_of, loaded, made, save_pipeline, settings

model = made(lambda folder: save_pipeline("pixart", folder))
data = made(lambda folder: folder_of(folder, 8, 32))


@pytest.fixture
def given(model, data, tmp_path):
    base = settings(data, tmp_path / "out", pretrained_model_name_or_path=str(model), resolution=32)
    base |= {"learning_rate": 1e-3, "train_batch_size": 2, "global_batch_size": 4, "validation_steps": 2}
    return lambda **more: {**base, **more}


# --- what is done when -----------------------------------------------------------------------------------------------


def test_images_are_drawn_before_the_first_step_and_after_the_last(given):
    """Also if no multiple of validation_steps is there; a run that goes on between two begins with no image."""
    drawn: list[int] = []
    run = given(validation_steps=3, max_train_steps=4)
    pipe = loaded(run["pretrained_model_name_or_path"])
    with Trainer(configured(run), pipe, timeout=100.0) as trainer:
        trainer.run(validate=lambda step: drawn.append(step), until=2)
    assert drawn == [0]
    with Trainer(configured({**run, "resume_from_checkpoint": "latest"}), pipe, timeout=100.0) as trainer:
        trainer.run(validate=lambda step: drawn.append(step))
    assert drawn == [0, 3, 4]


@pytest.mark.parametrize("cached", [True, pytest.param(False, marks=pytest.mark.matrix)])
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
    run = given(validation_steps=2, max_train_steps=3, random_flip=True, **more)
    pipe = loaded(run["pretrained_model_name_or_path"])
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


@pytest.mark.parametrize("average", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_the_average_by_hand_is_what_is_exported(given, model, monkeypatch, average):
    """Of the weights after every step, also of a run that stopped; without an average the last ones."""
    weights: list[dict[str, torch.Tensor]] = []
    apply = WeightUpdate.apply

    def held(update: WeightUpdate) -> dict[str, torch.Tensor]:
        return {name.removeprefix("transformer."): p.detach().clone() for name, p in update.named.items()}

    def recorded(self: WeightUpdate, *args: Any) -> float:
        # Steps alone change the weights: no validation does, and no stop.
        assert not weights or all(torch.equal(value, weights[-1][name]) for name, value in held(self).items())
        applied = apply(self, *args)
        weights.append(held(self))
        return applied

    monkeypatch.setattr(WeightUpdate, "apply", recorded)
    run = given(max_train_steps=4, ema_decay=0.2 if average else None, learning_rate=1e-2, validation_steps=1)
    with Trainer(configured(run), loaded(model), timeout=100.0) as trainer:
        trainer.run(until=2, validate=lambda step: None)
    result = train(configured({**run, "resume_from_checkpoint": "latest"}))
    expected = weights[0]
    for step, after in enumerate(weights[1:], 1):
        # As in diffusers: of the first weights nothing is kept, and less than ``ema_decay`` in the first steps.
        decay = min((1 + step) / (10 + step), 0.2) if average else 0.0
        expected = {name: decay * expected[name] + (1 - decay) * value for name, value in after.items()}
    exported = loaded(result["pipeline"]).transformer.state_dict()
    assert len(weights) == 4
    for name, value in expected.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-5, atol=1e-7)


def test_a_step_is_that_of_the_mean_over_all_its_samples(given, model):
    """Of micro-batches of unlike sizes, by hand: every sample weighs as much, and none is left out."""
    run = given(train_batch_size=3, global_batch_size=9, max_grad_norm=0.0)
    with Trainer(configured(run), loaded(model)) as trainer:
        batches = trainer.data.order.step(0)
        assert sorted(batch.count for batch in batches) == [2, 3, 3]
        loss = sum(trainer._losses(batch).sum() for batch in batches) / 8
        gradients = torch.autograd.grad(cast(torch.Tensor, loss), trainer.update.parameters, allow_unused=True)
        norm = torch.nn.utils.get_total_norm([one for one in gradients if one is not None])
        done = trainer._optimizer_step(batches)
    assert done == pytest.approx((float(loss), float(norm)), rel=1e-4)


def test_gradients_are_clipped_to_the_norm_asked_for(given, model):
    norms: list[float] = []
    reported: list[float] = []
    run = given(max_train_steps=2, max_grad_norm=1e-3, checkpointing_steps=9)
    with Trainer(configured(run), loaded(model)) as trainer:
        step = trainer.update.optimizer.step

        def recorded() -> None:
            gradients = [p.grad for p in trainer.update.parameters if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            step()

        trainer.update.optimizer.step = recorded  # type: ignore[method-assign]
        trainer.run(report=lambda now: reported.append(now.grad_norm), until=2)
    assert norms == pytest.approx([1e-3] * 2, rel=1e-3)
    assert min(reported) > 1e-2


def test_all_that_is_random_follows_from_the_seed_and_the_number_of_a_sample(given, model, tmp_path):
    """Noise, its level, mirroring, captions, dropout: not from the batch, and with seeds of their own."""

    def randomness(seed: int, numbers: list[int]) -> dict[str, Any]:
        run = given(seed=seed, random_flip=True, proportion_empty_prompts=0.5, output_dir=str(tmp_path / str(seed)))
        with Trainer(configured(run), loaded(model)) as trainer:
            encoded = trainer.data.encoded
            micro = MicroBatch(tuple(DrawnSample(0, number) for number in numbers), (32, 32))
            batch = encoded.batch(micro)
            noised = trainer.objective(torch.zeros_like(batch.latents), batch.generators)
            many = [encoded._chances(one, torch.Generator().manual_seed(encoded.seed_of(one)))
                    for one in (DrawnSample(0, number) for number in range(64))]  # fmt: skip
            return {
                "noise": [one.tolist() for one in noised.target.flatten(1)[:, :4]],
                "levels": noised.timesteps.tolist(),
                "mirrored": [flip for flip, _ in many],
                "captions": [empty for _, empty in many],
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


# --- trackers ---------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_numbers_and_the_images(given, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on = given(report_to="tensorboard", validation_prompts=["a"], validation_inference_steps=2)
    train(configured(on))
    board = EventAccumulator(str(tmp_path / "out")).Reload()
    rows = read_log(tmp_path / "out" / "loss.csv")
    told = {event.step: event.value for event in board.Scalars("loss")}
    assert told == pytest.approx({int(row["step"]): row["loss"] for row in rows})
    assert [event.step for event in board.Images("validation/0")] == [0, 1, 3]
    assert "pixart" in board.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    # No folder of hyperparameters lies among the checkpoints.
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir() and path.name[0].isdigit()]


def test_a_tracker_that_fails_does_not_end_the_run(given, monkeypatch, caplog):
    """A stand-in for wandb, which loses its connection at the second step."""
    calls: list[Any] = []

    class Run:
        def log(self, values, step=None):
            calls.append((step, values))
            if len(calls) == 3:
                raise ConnectionError("the network is gone")

    fake = types.SimpleNamespace(init=lambda project, config: calls.append(config) or Run())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = TrainingLog(configured(given(report_to=["csv", "wandb"])), 0)
    for number in range(3):
        log.add({**dict.fromkeys(COLUMNS, 1.0), "step": number})
    log.close()
    assert calls[0]["optimizer"] == "AdamW"
    assert [step for step, _ in calls[1:]] == [0, 1]
    assert calls[1][1]["loss"] == 1.0
    assert "wandb gets no more of this run: ConnectionError: the network is gone" in caplog.text


def test_a_tracker_that_is_not_there_is_refused(given, monkeypatch):
    with pytest.raises(ditmesh.ConfigError, match=r"output.report_to.0='wandbb'"):
        configured(given(report_to="wandbb"))
    monkeypatch.setattr("ditmesh.train.logs.find_spec", lambda name: None)
    with pytest.raises(ditmesh.InputError, match="wandb is not installed; pip install wandb"):
        train(configured(given(report_to="wandb")))


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_for_each_step_where_there_is_no_terminal():
    out = io.StringIO()
    show = Shown()
    show.progress.console.file = out
    for _ in range(3):
        show({"what": "encoding samples", "done": 0, "total": 0})
    show({"lines": ["data: 3 samples"]})
    now = {"step": 1, "steps": 2, "loss": 0.5, "lr": 1e-4, "grad_norm": 2.0, "samples_per_second": 3.0}
    show({**now, "seconds_left": 7.0})
    assert out.getvalue().splitlines() == [
        "encoding samples ...",
        "data: 3 samples",
        "step 1/2  loss 0.5000  lr 0.0001  gradient norm 2  3.0 samples/s  7 s left",
    ]

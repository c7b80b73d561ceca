"""What a run is trained on: configurations, samples, their order, noise and targets."""

from __future__ import annotations

import unicodedata
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.training_utils import compute_snr
from PIL import Image

import ditmesh
from ditmesh.train.data.order import DrawnSample, MicroBatch, SampleOrder, buckets_of, shares
from ditmesh.train.data.sources import read_samples
from ditmesh.train.gradients.speeds import DataSpeeds
from ditmesh.train.objective import NoiseObjective, sample_losses
from support.train import configured, folder_of, settings

# --- configurations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"learning_rat": 1e-4}, "'learning_rat' is no training setting; did you mean 'learning_rate'"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"global_batch_size": 7}, "is no multiple of train_batch_size=2"),
        ({"lora": {"rank": 4}, "from_scratch": True}, "leave one out"),
        ({"train_data": [{"dir": "a"}]}, "data.train_data_dir and data.train_data are both there; leave one out"),
        ({"train_data_dir": "", "train_data": [{"dir": "a", "wait": 1}]}, "'data.train_data.0.wait' is no training"),
        ({"parallel": {"ulyses": 2}}, "ulysses"),
        ({"data_speeds": "auto", "sharding": "fsdp"}, "use sharding: ddp or none"),
        ({"data_speeds": [1, 2]}, "data_speeds has 2 numbers for data=1"),
        ({"data_speeds": [0]}, "optimizer.data_speeds.0=0: "),
        ({"max_sequence_length": [16, 0]}, "data.max_sequence_length.1=0: "),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(tmp_path, change, said):
    with pytest.raises(ditmesh.ConfigError) as error:
        configured({**settings(tmp_path, tmp_path), **change})
    assert said in str(error.value)


def test_the_batch_is_the_global_one_on_any_ranks(tmp_path):
    given = {**settings(tmp_path, tmp_path), "global_batch_size": 8}
    found = [configured({**given, "parallel": {"data": ranks}}) for ranks in (1, 2, 4)]
    assert {one.batch for one in found} == {8}


# --- samples ---------------------------------------------------------------------------------------------------


def test_tars_are_refused(tmp_path):
    (tmp_path / "0.tar").write_bytes(b"x")
    with pytest.raises(ditmesh.InputError, match=r"has tars, which are not read; unpack them, or make a table"):
        read_samples(configured(settings(tmp_path, tmp_path)).data, "text")


def test_labels_are_integers(tmp_path):
    config = configured(settings(folder_of(tmp_path / "data", 3), tmp_path))
    assert [one.words for one in read_samples(config.data, "label").good] == [0, 1, 2]
    wrong = configured({**settings(tmp_path / "data", tmp_path), "caption_column": "text"})
    with pytest.raises(ditmesh.InputError, match=r"metadata\.jsonl line 1: text is 'a red fox'"):
        read_samples(wrong.data, "label")


def test_what_is_corrupt_is_named_and_left_out(tmp_path):
    data = folder_of(tmp_path / "data", 4)
    (data / "001.png").write_bytes(b"nothing")
    (data / "002.png").unlink()
    with (data / "metadata.jsonl").open("a") as file:
        file.write("{not json\n")
    found = read_samples(configured(settings(data, tmp_path)).data, "text")
    assert [one.name for one in found.good] == ["000.png", "003.png"]
    assert [one.split()[0].rpartition("/")[2] for one in found.corrupt] == ["metadata.jsonl", "002.png", "001.png"]


def test_captions_by_names_with_accents_and_archives(tmp_path):
    """Parts of an accent may be characters of their own in the one name and not in the other; a zip is named."""
    for number, form in enumerate(("NFC", "NFD")):
        name = unicodedata.normalize(form, f"caf\u00e9-{number}")
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
        other = unicodedata.normalize("NFD" if form == "NFC" else "NFC", name)
        (tmp_path / f"{other}.txt").write_text(f"coffee {number}")
    (tmp_path / "more.zip").write_bytes(b"PK")
    found = read_samples(configured(settings(tmp_path, tmp_path)).data, "text")
    assert sorted(one.words for one in found.good) == ["coffee 0", "coffee 1"]
    assert found.notes == ("files that are not read: 1 .zip (more.zip)",)


def test_nothing_to_train_on(tmp_path):
    with pytest.raises(ditmesh.InputError, match="has no image"):
        read_samples(configured(settings(tmp_path, tmp_path)).data, "text")
    with pytest.raises(ditmesh.InputError, match="is no folder"):
        read_samples(configured(settings(tmp_path / "nowhere", tmp_path)).data, "text")


# --- order -----------------------------------------------------------------------------------------------------

SIZES = [(64, 64)] * 7 + [(32, 96)] * 4


def test_an_epoch_has_every_sample_once():
    order = SampleOrder(SIZES, seed=3, micro=2, per_step=3)
    assert order.per_epoch == 6
    assert order.steps(2) == 4
    seen = [batch for step in range(4) for batch in order.step(step)]
    for epoch in (seen[:6], seen[6:]):
        assert sorted(one.index for batch in epoch for one in batch.samples) == list(range(11))
        assert all(SIZES[one.index] == batch.size for batch in epoch for one in batch.samples)
    assert sorted(one.number for batch in seen for one in batch.samples) == list(range(22))
    assert [one.index for batch in seen[:6] for one in batch.samples] != [
        one.index for batch in seen[6:] for one in batch.samples
    ]
    # Steps can be asked for in any order: a run that goes on asks for later ones first.
    assert SampleOrder(SIZES, seed=3, micro=2, per_step=3).step(3) == order.step(3)
    assert SampleOrder(SIZES, seed=4, micro=2, per_step=3).step(0) != order.step(0)


def micro(cost: int) -> MicroBatch:
    return MicroBatch((DrawnSample(0, 0),), (cost, 1))


def test_ranks_share_a_step_by_what_it_takes():
    batches = [micro(cost) for cost in (9, 1, 1, 8, 2, 3)]
    found = shares(batches, [1.0, 1.0], equal_counts=False)
    assert sorted(found[0] + found[1]) == list(range(6))
    assert [sum(batches[n].cost for n in part) for part in found] == [12, 12]
    assert [len(part) for part in shares(batches, [1.0, 1.0, 1.0], equal_counts=True)] == [2, 2, 2]
    # Three times as fast: three times as much.
    fast, slow = shares([micro(1)] * 8, [3.0, 1.0], equal_counts=False)
    assert (len(fast), len(slow)) == (6, 2)
    # However slow: a rank without any would be missed where gradients are exchanged in the backward pass.
    assert [len(part) for part in shares([micro(1)] * 4, [9.0, 9.0, 1e-3], equal_counts=False)] == [2, 1, 1]


# --- objectives ------------------------------------------------------------------------------------------------


def config_of(tmp_path, **more):
    return configured(settings(tmp_path, tmp_path, **more))


def generators(count):
    return [torch.Generator().manual_seed(n) for n in range(count)]


def test_a_data_rank_of_several_devices_is_as_fast_as_its_slowest():
    """By the seconds of a sequence's ranks, which do the same work and wait for one another."""
    told = [(0, 8.0, 1.0), (0, 8.0, 4.0), (1, 8.0, 2.0), (1, 8.0, 1.0)]
    link: Any = SimpleNamespace(size=2, rank=0)
    world = SimpleNamespace(all_gather_object=lambda mine: told)
    mesh: Any = SimpleNamespace(data=link, world=world, device=torch.device("cpu"))
    speeds = DataSpeeds("auto", mesh)
    speeds.agree()
    assert speeds.values == [2.0, 4.0]
    # The latest steps count, all of them alike.
    told[1] = (0, 24.0, 4.0)
    speeds.agree()
    assert speeds.values == [(8 + 24) / (4 + 4), 4.0]


def test_rectified_flow(tmp_path):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5)  # sampling changes its tables
    objective = NoiseObjective(scheduler, config_of(tmp_path))
    clean = torch.randn(64, 4, 6, 6, generator=torch.Generator().manual_seed(9))
    found = objective(clean, generators(64))
    levels = (found.timesteps / 1000).view(-1, 1, 1, 1)
    noise = found.target + clean
    assert torch.allclose(found.latents, (1 - levels) * clean + levels * noise, atol=1e-5)
    assert 0.8 < noise.std() < 1.2
    assert found.weights.tolist() == [1.0] * 64
    # Shifted levels: the middle of a logit-normal density is 3 / (1 + 2 * 0.5) * 0.5.
    assert 0.65 < float(levels.median()) < 0.85
    # A solver of the same flow is trained alike.
    solver = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    assert torch.equal(NoiseObjective(solver, config_of(tmp_path))(clean, generators(64)).latents, found.latents)
    # A sample does not depend on its batch.
    again = objective(clean[7:9], generators(9)[7:])
    assert torch.equal(again.latents, found.latents[7:9])
    exact = sample_losses(found.target, found)
    assert exact.tolist() == [0.0] * 64


@pytest.mark.parametrize("solver", ["DDIMScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler"])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_noise_and_velocity(tmp_path, kind, solver):
    """Whatever samples: trained is on the schedule of DDPM."""
    scheduler = getattr(diffusers, solver)(prediction_type=kind)
    clean = torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(9))
    found = NoiseObjective(scheduler, config_of(tmp_path, snr_gamma=5.0))(clean, generators(8))
    alpha = scheduler.alphas_cumprod[found.timesteps].view(-1, 1, 1, 1)
    noise = (found.latents - alpha.sqrt() * clean) / (1 - alpha).sqrt()
    velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
    expected = {"epsilon": noise, "v_prediction": velocity, "sample": clean}
    assert torch.allclose(found.target, expected[kind], atol=1e-3)
    snr = compute_snr(scheduler, found.timesteps)
    least = torch.minimum(snr, torch.tensor(5.0))
    assert torch.allclose(found.weights, least / {"epsilon": snr, "v_prediction": snr + 1, "sample": 1}[kind])


@pytest.mark.parametrize(
    ("scheduler", "more", "said"),
    [
        (diffusers.FlowMatchEulerDiscreteScheduler(), {"snr_gamma": 5.0}, "leave it out for rectified flow"),
        (diffusers.DDIMScheduler(prediction_type="edm"), {}, "which nothing here trains"),
        (diffusers.EDMEulerScheduler(), {}, "EDMEulerScheduler has no beta_schedule"),
    ],
    ids=str,
)
def test_an_objective_that_does_not_fit(tmp_path, scheduler, more, said):
    with pytest.raises(ditmesh.ConfigError) as error:
        NoiseObjective(scheduler, config_of(tmp_path, **more))
    assert said in str(error.value)


def test_buckets(tmp_path):
    config = config_of(tmp_path, aspect_ratio_buckets=" 64,64; 32, 96 ;")
    assert buckets_of([(50, 50), (100, 290), (64, 64)], config.data) == [(64, 64), (32, 96), (64, 64)]
    assert buckets_of([(50, 90)], config_of(tmp_path).data) == [(64, 64)]
    for wrong in ("", "64", "64x64", "64,abc", "0,64", "64,64,64", "-8,8"):
        with pytest.raises(ditmesh.ConfigError, match="are no sizes in pixels"):
            buckets_of([(8, 8)], config_of(tmp_path, aspect_ratio_buckets=wrong).data)


def test_weights_where_nothing_is_left_of_the_signal(tmp_path):
    """A schedule that ends in noise alone has a signal-to-noise ratio of 0 there."""
    scheduler = diffusers.DDIMScheduler(rescale_betas_zero_snr=True, num_train_timesteps=4)
    objective = NoiseObjective(scheduler, config_of(tmp_path, snr_gamma=5.0))
    weights = objective(torch.zeros(64, 1, 2, 2), generators(64)).weights
    assert weights.isfinite().all()
    assert (weights == 1).any()

"""Learning from rewards: steps, losses and ranks, against plain torch and to the bit."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import ditmesh
from ditmesh.errors import InputError
from ditmesh.train.data.order import DrawnSample, MicroBatch
from ditmesh.train.logs import read_log
from ditmesh.train.reinforce.rollouts import Rollout, Rollouts, seed_of
from ditmesh.train.reinforce.steps import NormalStep, sampler_for, stochastic_steps
from ditmesh.train.reinforce.trainer import ReinforcementTrainer, has_settled
from ditmesh.train.run import train
from support import reinforce
from support.reinforce import GRID, given, trained
from support.train import configured, loaded, trainer_of

DIFFERENCE = "log_probability_difference"


def density(after: torch.Tensor, mean: torch.Tensor, deviation: float) -> torch.Tensor:
    return torch.distributions.Normal(mean.double(), deviation).log_prob(after.double()).flatten(1).mean(1)


def test_steps_are_draws_with_the_papers_means_and_deviations():
    """Flow-GRPO's equation 9, DDIM's equation 12; twice the rows, as DiT has with guidance; the last step is plain."""
    random = torch.Generator().manual_seed(0)
    flow = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    noise = diffusers.DDIMScheduler(clip_sample=False, prediction_type="v_prediction", steps_offset=1)
    for objective, own, level in (("flow_grpo", flow, 0.7), ("ddpo", noise, 0.8)):
        pipe, seen = SimpleNamespace(scheduler=own), list[NormalStep]()
        drawn = torch.randn(2, 3, 4, 4, generator=random)

        def follow(step: NormalStep, seen: list[NormalStep] = seen, drawn: torch.Tensor = drawn) -> torch.Tensor:
            seen.append(step)
            return step.drawn(drawn) if step.deviation else step.plain

        held = {**vars(own)}
        with stochastic_steps(pipe, objective, level, 2, follow) as sampler:
            sampler.set_timesteps(4)
            sample, cleaned = torch.randn(2, 3, 4, 4, generator=random).repeat(2, 1, 1, 1), sampler_for(objective, own)
            cleaned.set_timesteps(4)
            for number, time in enumerate(sampler.timesteps):
                output = torch.randn(2, 3, 4, 4, generator=random).repeat(2, 1, 1, 1)
                after = pipe.scheduler.step(output, time, sample, return_dict=False)[0]
                step, is_last = seen[-1], number == 3
                if objective == "ddpo":
                    given_noise = {} if is_last else {"eta": level, "variance_noise": drawn.repeat(2, 1, 1, 1)}
                    wanted = cleaned.step(output, time, sample, **given_noise).prev_sample
                else:
                    now, later = (float(cleaned.sigmas[number + shift]) for shift in (0, 1))
                    std = level * math.sqrt(now / (1 - (now if now < 1 else float(cleaned.sigmas[1]))))
                    drift = output + std**2 / (2 * now) * (sample + (1 - now) * output)
                    wanted = sample + drift * (later - now) + std * math.sqrt(now - later) * drawn.repeat(2, 1, 1, 1)
                    wanted = sample + output * (later - now) if is_last else wanted
                torch.testing.assert_close(after, wanted, rtol=1e-5, atol=1e-5)
                assert (step.deviation == 0) == is_last
                if not is_last:
                    wanted = density(after[:2], after[:2] - step.deviation * drawn, step.deviation)
                    torch.testing.assert_close(step.log_probability(after[:2]), wanted, rtol=1e-5, atol=1e-5)
                sample = after
        assert pipe.scheduler is own
        assert vars(own) == held


class Plain:
    """Flow-GRPO of the embedded Flux in torch, for the noise that a run draws."""

    def __init__(self, pipe: Any, prompts: list[list[Any]]) -> None:
        self.pipe, self.model, self.groups = pipe, copy.deepcopy(pipe.transformer), prompts
        self.reference = loaded("emoji-flux").transformer
        self.sigmas, self.samples = [1.0, 2 / 3, 1 / 3, 0.0], []
        for number, (prompt, *_) in enumerate(prompt for group in prompts for prompt in group):
            self.samples.append(self.sample(prompt, number))

    def mean(self, model: Any, sample: Any, step: int, latents: torch.Tensor) -> tuple[torch.Tensor, float]:
        now, later = self.sigmas[step : step + 2]
        words, pooled, ids, places = sample
        velocity = model(
            hidden_states=latents, timestep=torch.tensor([now]), encoder_hidden_states=words,
            pooled_projections=pooled, txt_ids=ids, img_ids=places, return_dict=False,
        )[0]  # fmt: skip
        std = 0.7 * math.sqrt(now / (1 - min(now, 2 / 3))) if later else 0.0
        drift = velocity + std**2 / (2 * now) * (latents + (1 - now) * velocity)
        return latents + drift * (later - now), std * math.sqrt(now - later)

    @torch.no_grad()
    def sample(self, prompt: str, number: int) -> dict[str, Any]:
        """A rollout: latents before each step and after the last, densities, means without adapters, its image."""
        pipe = self.pipe
        words, pooled, ids = pipe.encode_prompt(prompt, prompt, max_sequence_length=16)
        random = torch.Generator().manual_seed(seed_of(0, number))
        latents, places = pipe.prepare_latents(1, 8, 64, 64, torch.float32, "cpu", random)
        sample = (words, pooled, ids, places)
        path, before, means = [latents], [], []
        for step in range(3):
            mean, std = self.mean(self.model, sample, step, path[-1])
            noise = torch.randn(mean.shape[1:], generator=torch.Generator().manual_seed(seed_of(0, number, step)))
            path.append(mean + std * noise)
            if std:
                before.append(density(path[-1], mean, std))
                means.append(self.mean(self.reference, sample, step, path[-2])[0])
        flat = pipe._unpack_latents(path[-1], 64, 64, pipe.vae_scale_factor)
        flat = flat / pipe.vae.config.scaling_factor + (pipe.vae.config.shift_factor or 0.0)
        image = pipe.image_processor.postprocess(pipe.vae.decode(flat).sample, output_type="np")
        return {"sample": sample, "path": path, "before": before, "means": means, "image": (image * 255).round()}

    def updates(self, count: int, clip: float, weight: float) -> list[tuple[float, float, float]]:
        """Loss, mean ratio and divergence of each update."""
        size, found = len(self.groups[0]), []
        rewards = np.array([reinforce.redness(one["image"], [""])[0] for one in self.samples]).reshape(-1, size)
        better = ((rewards - rewards.mean(1)[:, None]) / (rewards.std(1)[:, None] + 1e-4)).reshape(-1)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(weights, 1.0)
        for _ in range(count):
            losses, ratios, divergences = [], [], []
            for one, advantage in zip(self.samples, better, strict=True):
                for step in range(2):
                    mean, std = self.mean(self.model, one["sample"], step, one["path"][step])
                    ratio = (density(one["path"][step + 1], mean, std) - one["before"][step]).exp()
                    divergence = ((mean - one["means"][step]) ** 2).mean() / (2 * std**2)
                    loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
                    losses.append(loss + weight * divergence)
                    ratios.append(ratio.item())
                    divergences.append(divergence.item())
            loss = torch.cat(losses).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), float(np.mean(ratios)), float(np.mean(divergences))))
        return found


def test_losses_and_weights_are_those_of_plain_torch(tmp_path):
    """Two groups, three updates by one rollout, in which some samples are clipped."""
    settings = {"epochs": 3, "clip_range": 5e-4, "kl_weight": 0.5}
    run = given(tmp_path, max_train_steps=1, optimizer="SGD", learning_rate=1.0, reinforce=settings)
    pipe, rows = loaded("emoji-flux"), []
    scheduler, held = pipe.scheduler, {**vars(pipe.scheduler)}
    with ReinforcementTrainer(configured(run), pipe, timeout=100.0) as trainer:
        # Noise in place of the zeros that adapters begin with.
        for parameter in trainer.update.parameters:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        groups = [[[trainer.prompts[micro.samples[0].index]]] * 4 for micro in trainer._order.step(0)]
        plain = Plain(pipe, groups)
        trainer.run(report=rows.append)
        wanted = np.mean(plain.updates(3, 5e-4, 0.5), axis=0)
        numbers = rows[0].numbers
        assert [rows[0].loss, numbers["ratio"], numbers["kl"]] == pytest.approx([*wanted], rel=1e-5, abs=1e-6)
        assert 0 < numbers["clip_fraction"] < 1
        assert numbers[DIFFERENCE] == 0
        for (name, mine), theirs in zip(pipe.transformer.named_parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert pipe.scheduler is scheduler
    assert vars(scheduler) == held


GRIDS = [pytest.param(name, GRID, marks=pytest.mark.matrix) for name in ("emoji-flux", "emoji-sd3")]


@pytest.mark.parametrize(("model", "ways"), [("emoji-flux", [{"data": 2}]), *GRIDS])
def test_ranks_and_batches_learn_the_same_bits(ranks, tmp_path, model, ways):
    """Reproducible: numbers and weights; a group whose reward fails is left out on all ranks."""
    settings = {"rewards": [{"function": "support.reinforce:picky"}], "on_reward_failure": "skip", "group_size": 2}
    settings |= {"epochs": 2, "trained_steps": 1, "kl_weight": 0.1, "guidance": 2.0}
    run = {"pretrained_model_name_or_path": model, "max_train_steps": 1, "reinforce": settings}
    alone = trained(given(tmp_path / "a", **run, parallel={"reproducible": True}, train_batch_size=1))
    for number, way in enumerate(ways):
        more = {"parallel": {**way, "reproducible": True}, "train_batch_size": 3}
        results = ranks(math.prod(way.values())).run(trained, given(tmp_path / str(number), **run, **more))
        assert all(result == alone for result in results), way
    assert [row[DIFFERENCE] for row in alone[0]] == [0]
    assert [row["skipped_groups"] for row in alone[0]] == [1]


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["emoji-flux", "emoji-sd3"])
def test_any_batch_in_any_order_has_the_probabilities_of_its_rollout(tmp_path, model):
    """Without reproducible; and a sample is nearly the one that is drawn alone."""
    config, pipe = configured(given(tmp_path, pretrained_model_name_or_path=model)), loaded(model)
    rollouts, model, order = Rollouts(pipe, config, torch.device("cpu")), pipe.transformer, np.random.default_rng(0)
    images, differences = dict[int, np.ndarray](), list[float]()
    for size in range(1, 9):
        numbers = [int(number) for number in order.permutation(8)[:size]]
        micro = MicroBatch(tuple(DrawnSample(0, number) for number in numbers), (1, 1))
        rollout = rollouts.draw(micro, ("a red fox",) * size, [0, 1])

        def visit(step: NormalStep, rollout: Any = rollout) -> None:
            now = step.log_probability(rollout.after[step.number])
            assert now.requires_grad
            differences.append((now - rollout.log_probabilities[step.number]).abs().max().item())

        rollouts.repeat(rollout, [0, 1], visit, lambda _: model)
        for number, image in zip(numbers, rollout.images.astype(int), strict=True):
            assert abs(image - images.setdefault(number, image)).max() <= 1
    assert differences == [0] * 16


@pytest.mark.matrix
def test_without_reproducible_curves_are_close(ranks, tmp_path):
    """And the update has the bits of its rollout; of tensor ranks up to rounding."""
    run = {"reinforce": {"kl_weight": 0.1}}
    alone, _ = trained(given(tmp_path / "a", **run))
    ways: list[dict[str, Any]] = [{axis: size} for size in (2, 3) for axis in ("ulysses", "data")]
    ways += [{"data": 2, "ulysses": 2}, {"data": 2, "sharding": "fsdp"}, {"tensor": 2}]
    for number, way in enumerate(ways):
        parallel = {axis: size for axis, size in way.items() if axis != "sharding"}
        run |= {"parallel": parallel, "sharding": way.get("sharding", "auto")}
        for rows, _ in ranks(math.prod(parallel.values())).run(trained, given(tmp_path / str(number), **run)):
            for row, own in zip(rows, alone, strict=True):
                assert row == pytest.approx(own, rel=1e-3, abs=1e-4), way
                assert row[DIFFERENCE] <= (1e-6 if "tensor" in way else 0), way


@pytest.mark.parametrize(("model", "prompt", "frames"), [("emoji-dit-s", "3", None), ("emoji-wan", "a fox", 5)])
def test_labels_and_videos(tmp_path, model, prompt, frames):
    """Guidance doubles the rows or the calls of a step, and the update has the bits of its rollout."""
    run = {"pretrained_model_name_or_path": model, "objective": "ddpo" if frames is None else "flow_grpo"}
    run |= {"max_train_steps": 1, "validation_prompts": [prompt], "validation_inference_steps": 1}
    settings = {"prompts": [prompt], "guidance": 2.0, "group_size": 2}
    train(configured(given(tmp_path, **run, num_frames=frames, reinforce=settings)))
    (row,) = read_log(tmp_path / "loss.csv")
    assert row[DIFFERENCE] == 0 < row["grad_norm"]
    assert Image.open(tmp_path / "validation" / "step-1-0.png").n_frames == (frames or 1)


@pytest.mark.parametrize("wrong", ["kernel", "batch"])
def test_a_planted_difference_is_seen(tmp_path, wrong):
    """Another attention kernel in the update; samples that are drawn one by one and updated two by two."""
    rows = list[Any]()
    with trainer_of(given(tmp_path, max_train_steps=1), ReinforcementTrainer) as trainer:
        repeat, draw = trainer.rollouts.repeat, trainer.rollouts.draw

        def other(*args: Any) -> None:
            with sdpa_kernel(SDPBackend.MATH):
                repeat(*args)

        def one_by_one(micro: MicroBatch, prompts: tuple[str, ...], steps: list[int]) -> Rollout:
            whole = draw(micro, prompts, steps)
            alone = [draw(MicroBatch((sample,), (1, 1)), prompts[:1], steps) for sample in micro.samples]
            whole.after = [torch.cat(each) for each in zip(*(one.after for one in alone), strict=True)]
            for step, kept in whole.log_probabilities.items():
                kept[:] = torch.cat([one.log_probabilities[step] for one in alone])
            return whole

        vars(trainer.rollouts).update({"repeat": other} if wrong == "kernel" else {"draw": one_by_one})
        trainer.run(report=rows.append)
    assert 0 < rows[0].numbers[DIFFERENCE] < 1e-3


def test_a_run_that_a_reward_has_stopped_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    """After its first step, and in the middle of its second one; and what a run writes."""
    alone = trained(given(tmp_path / "a", max_train_steps=2))
    settings = {"validation_prompts": ["a heart"], "validation_inference_steps": 2, "validation_steps": 1}
    run, calls = given(tmp_path / "b", **settings), []

    def broken(images: np.ndarray, prompts: list[str]) -> np.ndarray:
        calls.append(prompts)
        return reinforce.redness(images, prompts) * (np.nan if len(calls) in (4, 7) else 1)

    run["reinforce"]["rewards"] = [{"function": "support.reinforce:broken", "name": "redness"}]
    monkeypatch.setattr(reinforce, "broken", broken, raising=False)
    for where in ("validation after step 1", "step 2"):
        with pytest.raises(InputError, match=f"^{where}: the reward 'redness' returned nan.*--resume from step 1, or"):
            train(configured(run))
        run["resume_from_checkpoint"] = "latest"
    # A reward that was late may have more time.
    run["reinforce"]["rewards"][0]["timeout_seconds"] = 99.0
    result = train(configured(run))
    assert result["resumed"] == 1
    whole, resumed = (load_file(*(tmp_path / name / "checkpoint-2").glob("*.safetensors")) for name in "ab")
    assert [name for name in whole.keys() | resumed.keys() if not torch.equal(whole[name], resumed[name])] == []
    rows = read_log(tmp_path / "b" / "loss.csv")
    for row, own in zip(rows, alone[0], strict=True):
        assert {name: row[name] for name in own if name in row} == {k: v for k, v in own.items() if k != "norm"}
    validations = (tmp_path / "b" / "validation.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in validations] == ["step", "0", "1", "2"]
    assert {file.name for file in (tmp_path / "b" / "validation").iterdir()} == {f"step-{n}-0.png" for n in range(3)}
    assert (Path(result["pipeline"]) / "pytorch_lora_weights.safetensors").exists()


@pytest.mark.matrix
def test_a_step_in_which_a_rank_was_killed_is_done_again_to_the_bit(ranks, tmp_path):
    """While its group is rewarded, in the second step; in the other folder nobody is killed."""
    killed, whole = (given(tmp_path / name, parallel={"data": 2}, max_train_steps=3) for name in "ab")
    for run in (killed, whole):
        run["checkpointing_steps"], arguments = 1, {"folder": run["output_dir"]}
        run["reinforce"]["rewards"] = [{"function": "support.reinforce:deadly", "arguments": arguments}]
    with pytest.raises(ditmesh.RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        ranks(2).run(trained, killed)
    resumed = ranks(2).run(trained, {**killed, "resume_from_checkpoint": "latest"})
    assert resumed == [(rows[1:], weights) for rows, weights in ranks(2).run(trained, whole)]


def test_a_run_ends_where_held_out_rewards_do_not_rise(tmp_path):
    """With weights that nearly stay; and what is said of a checkpoint that cannot be written where a run ends."""
    settings = {"validation_prompts": ["a heart"], "validation_inference_steps": 1, "validation_steps": 1}
    run = given(tmp_path, **settings, max_train_steps=3, learning_rate=1e-30)
    run["reinforce"] |= {"groups": 1, "group_size": 2, "early_stopping_patience": 1}
    (tmp_path / ".checkpoint-1.part").touch()
    result = train(configured(run))
    assert result["notes"] == ["step 1: early stop, as validation_reward does not rise"]
    assert [one.partition(" (")[0] for one in result["unsaved"]] == [f"{tmp_path}/.checkpoint-1.part cannot be written"]
    run["reinforce"] |= {"early_stopping_patience": None, "rewards": [{"function": "support.reinforce:picky"}]}
    with pytest.raises(InputError, match=r"step 2: .*checkpoint, as .*\.checkpoint-1.part cannot be written"):
        train(configured({**run, "resume_from_checkpoint": "latest"}))
    # Those of the run before are not among them.
    assert [row["step"] for row in read_log(tmp_path / "validation.csv")] == [0, 1]


def test_patience_is_of_all_validations_since_the_best(tmp_path):
    for rewards, patience, settled in (([2, 3, 1], 2, False), ([3, 1, 3], 2, True), ([3, 2], 2, False)):
        (tmp_path / "log.csv").write_text("\n".join(["validation_reward", *map(str, rewards)]))
        assert has_settled(tmp_path / "log.csv", patience) is settled


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objective": "denoising"}, "use objective: flow_grpo"),
        ({"reinforce": None}, "needs prompts and rewards"),
        ({"train_data_dir": "d", "snr_gamma": 5.0}, "train_data_dir, model.snr_gamma.*leave it out"),
        ({"max_train_steps": None}, "give optimizer.max_train_steps"),
        ({"train_modules": ["transformer", "text_encoder"]}, "transformer alone"),
        ({"lora": None, "reinforce": {"kl_weight": 0.1}}, "add lora"),
        ({"reinforce": {"early_stopping_patience": 1}}, "give output.validation_prompts"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout"),
        ({"reinforce": {"trained_steps": [0, 2]}}, "0 to 1 draw noise"),
        ({"parallel": {"data": 8}}, "4 calls.*multiple of 8"),
        ({"reinforce": {"rewards": []}}, "rewards"),
    ],
    ids=str,
)
def test_contradictions_are_refused(tmp_path, change, words):
    run = {**given(tmp_path), **change}
    if change.get("reinforce"):
        run["reinforce"] = given(tmp_path)["reinforce"] | change["reinforce"]
    with pytest.raises(ditmesh.ConfigError, match=words):
        configured({name: value for name, value in run.items() if value is not None})


def test_a_scheduler_of_the_other_objective_is_refused():
    flow = diffusers.FlowMatchEulerDiscreteScheduler
    for objective, scheduler, words in (
        ("ddpo", flow(), "use objective: flow_grpo"),
        ("flow_grpo", diffusers.DDIMScheduler(), "use objective: ddpo"),
        ("distillation", diffusers.DDIMScheduler(), "DDIMScheduler is for models of noise"),
        ("flow_grpo", flow(invert_sigmas=True), "the other way round"),
    ):
        with pytest.raises(ditmesh.ConfigError, match=words):
            sampler_for(objective, scheduler)

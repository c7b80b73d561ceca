"""Distillation against plain torch, over ranks to the bit, and by the images of what it saves."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ditmesh
from ditmesh.train.reinforce.distillation import DistillationTrainer
from ditmesh.train.run import train
from support.reinforce import GRID, trained
from support.train import configured, loaded, trainer_of


def given(out: Path, **more: Any) -> dict[str, Any]:
    """A short run: one step of the student for two of the teacher, two steps in all."""
    distill = {"prompts": ["a red fox", "a cactus"], "inference_steps": 2, "teacher_steps": 2, "guidance": 2.0}
    run = {"pretrained_model_name_or_path": "emoji-sd3", "objective": "distillation", "output_dir": str(out)}
    run |= {"max_sequence_length": 16, "resolution": 64, "train_batch_size": 2, "max_train_steps": 2}
    distill |= {"samples": 4, **more.pop("distill", {})}
    return {**run, "learning_rate": 1e-3, "lora": {"rank": 2}, "distill": distill, **more}


def test_the_loss_and_weights_are_those_of_plain_torch(tmp_path):
    """A guided teacher; two prompts in a call; adapters that are not zero, which the teacher is without."""
    run, rows = given(tmp_path, max_train_steps=1, optimizer="SGD", learning_rate=1.0), []
    with trainer_of(run, DistillationTrainer) as trainer:
        pipe = trainer.pipe
        for parameter in trainer.update.parameters:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        student, teacher = copy.deepcopy(pipe.transformer), loaded("emoji-sd3").transformer
        seen, teach = list[tuple[Any, Any]](), trainer.rollouts.teach
        vars(trainer.rollouts)["teach"] = lambda micro, *args: seen.append((micro, teach(micro, *args))) or seen[-1][1]
        trainer.run(report=rows.append)
    pipe.scheduler.set_timesteps(2)
    levels, losses = pipe.scheduler.sigmas.tolist(), []
    for micro, rollout in seen:
        for place, prompt in enumerate(trainer.prompts[sample.index] for sample in micro.samples):
            words, without, pooled, nothing = pipe.encode_prompt(prompt, prompt, prompt, max_sequence_length=16)

            def predicted(model: Any, latents: Any, level: float, words: Any = words, pooled: Any = pooled) -> Any:
                time = torch.tensor([1000 * level])
                return model(latents, words, pooled, time, return_dict=False)[0]

            # The noise is that of the sample; all that follows is computed here.
            random = trainer.rollouts.noise_of(micro.samples[place])
            latents = torch.randn((1, *rollout.after[0].shape[1:]), generator=random)
            for number, (now, later) in enumerate(pairwise(levels)):
                reached = latents + (later - now) * predicted(student, latents, now)
                wanted, middle = latents, (now + later) / 2
                with torch.no_grad():
                    for start, end in ((now, middle), (middle, later)):
                        plain = predicted(teacher, wanted, start, without, nothing)
                        guided = plain + 2.0 * (predicted(teacher, wanted, start) - plain)
                        wanted = wanted + (end - start) * guided
                torch.testing.assert_close(rollout.after[number][place], wanted[0], rtol=1e-4, atol=1e-5)
                losses.append((reached - wanted).square().mean() / (latents - wanted).square().mean())
                latents = wanted
    loss = torch.stack(losses).mean()
    assert len(losses) == 8
    assert rows[0].loss == pytest.approx(loss.item(), rel=1e-4)
    weights = [p for p in student.parameters() if p.requires_grad]
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
    assert rows[0].grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for mine, theirs in zip((p for p in pipe.transformer.parameters() if p.requires_grad), weights, strict=True):
        torch.testing.assert_close(mine, theirs - theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ways", [[{"data": 2}], pytest.param(GRID, marks=pytest.mark.matrix)])
def test_ranks_and_batches_learn_the_same_bits(ranks, tmp_path, ways):
    alone = trained(given(tmp_path / "a", parallel={"reproducible": True}), DistillationTrainer)
    for number, way in enumerate(ways):
        run = given(tmp_path / str(number), parallel={**way, "reproducible": True}, train_batch_size=1)
        assert {str(one) for one in ranks(math.prod(way.values())).run(trained, run, DistillationTrainer)} == {
            str(alone)
        }


@pytest.mark.matrix
def test_without_reproducible_curves_are_close(ranks, tmp_path):
    alone, _ = trained(given(tmp_path / "a"), DistillationTrainer)
    ways: list[dict[str, Any]] = [{axis: 2} for axis in ("ulysses", "ring", "data", "tensor")]
    for number, way in enumerate([*ways, {"data": 2, "sharding": "fsdp"}]):
        run = given(tmp_path / str(number), sharding=way.pop("sharding", "auto"), parallel=way)
        for rows, _ in ranks(2).run(trained, run, DistillationTrainer):
            assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=1e-3), way


def test_few_steps_arrive_nearer_to_many(tmp_path):
    """By what diffusers itself draws with the saved LoRA, in the student's steps and without guidance."""
    distill = {"prompts": ["a red fox"], "inference_steps": 2, "samples": 2}
    more = {"lora": {"rank": 8}, "learning_rate": 3e-3, "max_train_steps": 6}
    more |= {"validation_prompts": ["a red fox"], "validation_inference_steps": 2}
    run = given(tmp_path, pretrained_model_name_or_path="emoji-flux", distill=distill, **more)
    pipe, result = loaded("emoji-flux"), train(configured(run))

    def drawn(steps: int) -> torch.Tensor:
        size = {"height": 64, "width": 64, "max_sequence_length": 16, "output_type": "pt"}
        random = torch.Generator().manual_seed(5)
        return pipe("a red fox", num_inference_steps=steps, guidance_scale=1.0, generator=random, **size)[0]

    wanted, before = drawn(4), drawn(2)
    pipe.load_lora_weights(Path(result["pipeline"]))
    assert (drawn(2) - wanted).square().mean() < 0.8 * (before - wanted).square().mean()
    assert (tmp_path / "validation" / "step-6-0.png").exists()


def test_videos_are_distilled(tmp_path):
    """Two prompts in a call, with guidance; the loss falls."""
    distill = {"prompts": ["a dog face that spins", "a cat face that spins"], "samples": 2}
    more = {"distill": distill, "lora": {"rank": 8}, "learning_rate": 3e-3, "num_frames": 5, "max_train_steps": 4}
    rows, _ = trained(given(tmp_path, pretrained_model_name_or_path="emoji-wan", **more), DistillationTrainer)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"distill": None}, "needs prompts; give them in the section distill"),
        ({"lora": None}, "add lora"),
        ({"objective": "flow_grpo"}, "needs prompts and rewards"),
        ({"objective": "denoising", "train_data_dir": "d"}, "use objective: distillation, or leave it out"),
        ({"parallel": {"data": 4}}, "2 calls.*multiple of 8"),
        ({"distill": {"prompts": "no/such.txt"}}, "distill.prompts='no/such.txt'.*give a list"),
    ],
    ids=str,
)
def test_contradictions_are_refused(tmp_path, change, words):
    run = {name: value for name, value in {**given(tmp_path), **change}.items() if value is not None}
    with pytest.raises(ditmesh.DitmeshError, match=words):
        trainer_of(run, DistillationTrainer)

"""torchrun --nproc-per-node 2 examples/own_objective.py

A training objective outside ditmesh: the model predicts the clean latents (Salimans and Ho 2022,
arXiv:2202.00512). ``objective: auto`` chooses it by the scheduler's ``prediction_type``.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import DDIMScheduler, DiffusionPipeline
from PIL import Image
from torch import Tensor

from ditmesh import zoo
from ditmesh.launch import init_from_environment
from ditmesh.train import TrainConfig
from ditmesh.train.objective import NoisyBatch, Objective, register
from ditmesh.train.trainer import Trainer


class CleanLatents(Objective):
    name = "sample"

    def __call__(
        self, latents: Tensor, noise: Tensor, scheduler: Any, generators: Sequence[torch.Generator], config: TrainConfig
    ) -> NoisyBatch:
        steps = scheduler.config["num_train_timesteps"]
        timesteps = torch.cat([torch.randint(steps, (1,), generator=one) for one in generators]).to(latents.device)
        mixed = scheduler.add_noise(latents, noise, timesteps)
        return NoisyBatch(mixed, timesteps, target=latents, weights=torch.ones(len(latents), device=latents.device))


register(CleanLatents())
device = init_from_environment()
folder = Path(tempfile.mkdtemp())
for label, colour in enumerate(("red", "green", "blue", "white")):
    Image.new("RGB", (64, 64), colour).save(folder / f"{label}.png")
    (folder / f"{label}.cls").write_text(str(label))
pipe = DiffusionPipeline.from_pretrained(zoo.path("emoji-dit-s"))
pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, prediction_type="sample", clip_sample=False)
run = {"pretrained_model_name_or_path": "emoji-dit-s", "output_dir": f"{folder}/out"}
run |= {"data": {"train_data_dir": str(folder), "resolution": 64}, "parallel": {"data": dist.get_world_size()}}
run |= {"optimizer": {"max_train_steps": 8, "learning_rate": 1e-3}}
with Trainer(TrainConfig.read(run), pipe, device) as trainer:
    losses = trainer.run().losses
if dist.get_rank() == 0:
    print(f"objective {trainer.objective.kind}:", json.dumps([round(loss, 2) for loss in losses.values()]))
dist.destroy_process_group()

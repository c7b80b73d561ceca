"""PYTHONPATH=examples ditmesh train run.yaml

A reward of one's own: `function: reward_emoji:reward` in a run's rewards. It is the log-probability of the prompt's
emoji by a classifier that the first call trains, on the thumbnails of the embedded model's training images.
"""

import json
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ditmesh import zoo
from ditmesh.lab.study.references import read_sheet, shrink

STEPS = 30
ENTRIES = json.loads((zoo.path() / "captions.json").read_text(encoding="utf-8"))
# All wordings of a caption, and the number of its emoji.
NUMBERS = {words: i for i, entry in enumerate(ENTRIES) for words in (entry["caption"], *entry["also"])}


def views(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """The pictures moved, made smaller, blurred and noisy, each otherwise."""
    count = len(pictures)
    scale = 1.0 + 0.2 * torch.rand(count, 1, 1, generator=generator)
    places = torch.cat([scale * torch.eye(2), 0.2 * torch.rand(count, 2, 1, generator=generator) - 0.1], dim=2)
    grid = F.affine_grid(places, list(pictures.shape), align_corners=False)
    moved = F.grid_sample(pictures, grid, align_corners=False)
    blurred = F.avg_pool2d(moved, 3, stride=1, padding=1)
    share = torch.rand(count, 1, 1, 1, generator=generator)
    noise = 0.3 * torch.rand(count, 1, 1, 1, generator=generator) * torch.randn(moved.shape, generator=generator)
    return share * moved + (1.0 - share) * blurred + noise


def as_tensor(images: np.ndarray) -> Tensor:
    """Images (B, H, W, 3) of any size as (B, 3, 32, 32): white, which is the ground, is 0, and black is 1."""
    return 1.0 - torch.from_numpy(shrink(images)).permute(0, 3, 1, 2) / 255.0


@lru_cache
def classifier(steps: int = STEPS) -> nn.Module:
    """The same weights in every process; with torch's own generator as it was."""
    generator = torch.Generator().manual_seed(0)
    pictures = as_tensor(read_sheet(zoo.path() / "thumbnails.png", len(ENTRIES)))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 8 * 8, len(ENTRIES))),
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
        for _ in range(steps):
            loss = F.cross_entropy(net(views(pictures, generator)), torch.arange(len(ENTRIES)), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net


def reward(images: np.ndarray, prompts: list[str]) -> list[Tensor]:
    """Images are rated one by one: in a batch, a product may be rounded otherwise."""
    scores = [classifier()(as_tensor(image[None])).log_softmax(dim=1)[0] for image in images]
    return [score[NUMBERS[prompt]] for score, prompt in zip(scores, prompts, strict=True)]

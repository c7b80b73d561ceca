"""Training on stages: samples a second of two stages, two data ranks, and torch's own pipeline, in one run.

    python benchmarks/training_stages.py                     # wants a quiet machine
    python benchmarks/training_stages.py --repeats 9 --json out.json

The model has the make-up of the embedded emoji-sd3, fresh weights and positions for larger pictures. Contenders take
turns, so that noise falls on all alike; a ratio compares the samples a second of one turn. Ranks have one thread each.
torch.distributed.pipelining runs the same blocks on the same stages in the same order (`Schedule1F1B`), over gloo, with
latents and captions encoded before, AdamW and clipping. Of every contender two figures: samples a second, and the share
of the transformer's weights that a rank holds at most.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor, nn

from harness import command_line, paired_ratios, ratio_cells, show_table, write_figures
from machine import describe_machine
from training import larger_model, run_of

TORCH = "torch.distributed.pipelining, 2 stages"
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "data=2": {"parallel": {"data": 2}},
    "pipe=2": {"parallel": {"pipe": 2}},
    TORCH: None,
}
PER_STEP = 8  # micro-batches of one sample


def rate(given: dict[str, Any]) -> tuple[float, float]:
    """Samples a second of a run without its first step, and the share of the weights that this rank holds."""
    from diffusers import DiffusionPipeline

    from ditmesh.train import TrainConfig
    from ditmesh.train.trainer import Trainer

    config = TrainConfig.read(given)
    pipe = DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    total, ends = sum(p.numel() for p in pipe.transformer.parameters()), list[float]()
    with Trainer(config, pipe) as trainer:
        held = sum(p.numel() for p in pipe.transformer.parameters())
        trainer.run(report=lambda _: ends.append(time.perf_counter()))
    return PER_STEP * (len(ends) - 1) / (ends[-1] - ends[0]), held / total


class Half(nn.Module):
    """One of two stages of SD3, as torch's pipeline wants it: a module that takes and returns tensors.

    Args:
        model: the whole transformer, whose parts it keeps.
        blocks: of the stage.
        is_first: whether it embeds latents and text, or ends with the prediction.
    """

    def __init__(self, model: Any, blocks: list[nn.Module], is_first: bool) -> None:
        super().__init__()
        self.blocks, self.time, self.is_first = nn.ModuleList(blocks), model.time_text_embed, is_first
        names = ("pos_embed", "context_embedder") if is_first else ("norm_out", "proj_out")
        self.parts = nn.ModuleDict({name: getattr(model, name) for name in names})
        self.patch, self.channels = model.config.patch_size, model.out_channels

    def forward(self, image: Tensor, text: Tensor, times: Tensor, pooled: Tensor) -> Any:
        """Streams (B, S, C) and (B, T, C) of the first stage, the prediction (B, C, H, W) of the second."""
        moment = self.time(times, pooled)
        if self.is_first:
            image, text = self.parts["pos_embed"](image), self.parts["context_embedder"](text)
        for block in self.blocks:
            text, image = block(hidden_states=image, encoder_hidden_states=text, temb=moment)
        if self.is_first:
            # torch's pipeline receives into buffers with the strides of what it was sent.
            return image.contiguous(), text.contiguous()
        image = self.parts["proj_out"](self.parts["norm_out"](image, moment))
        side, patch = int(image.shape[1] ** 0.5), self.patch
        tiles = image.view(len(image), side, side, patch, patch, self.channels)
        return tiles.permute(0, 5, 1, 3, 2, 4).reshape(len(image), self.channels, side * patch, side * patch)


def rate_of_torch(given: dict[str, Any]) -> tuple[float, float]:
    """The same blocks, sizes and numbers of steps in torch's own pipeline."""
    import torch.distributed as dist
    from diffusers import DiffusionPipeline
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from ditmesh.strategies.pipefusion.stages import balanced
    from ditmesh.train import TrainConfig
    from ditmesh.train.data.samples import Samples, pixels

    config, rank = TrainConfig.read(given), dist.get_rank()
    pipe = DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    samples = Samples.find(config, "text").good[:PER_STEP]
    with torch.no_grad():
        pictures = [pixels(one.picture(), (config.resolution, config.resolution)) for one in samples]
        clean = torch.cat([pipe.vae.encode(one[None]).latent_dist.mean for one in pictures])
        said: list[Any] = [one.said for one in samples]
        text, _, pooled, _ = pipe.encode_prompt(
            said, None, None, do_classifier_free_guidance=False, max_sequence_length=config.max_sequence_length
        )
    model = pipe.transformer.train()
    total = sum(p.numel() for p in model.parameters())
    first = balanced([1.0] * len(model.transformer_blocks), 2)[0]
    blocks = list(model.transformer_blocks)
    half = Half(model, blocks[:first] if rank == 0 else blocks[first:], rank == 0)
    optimizer = torch.optim.AdamW(half.parameters(), lr=config.learning_rate)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PER_STEP, loss_fn=lambda output, target: (output - target).square().mean())
    ends = list[float]()
    for _ in range(config.max_train_steps or 0):
        noise, levels = torch.randn_like(clean), torch.rand(len(clean))
        share = levels.view(-1, 1, 1, 1)
        beside = {"times": 1000 * levels, "pooled": pooled}
        if rank == 0:
            schedule.step((1 - share) * clean + share * noise, text, **beside)
        else:
            schedule.step(target=noise - clean, losses=[], **beside)
        torch.nn.utils.clip_grad_norm_(half.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    held = sum(p.numel() for p in half.parameters()) / total
    return PER_STEP * (len(ends) - 1) / (ends[-1] - ends[0]), held


def main() -> None:
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    held = dict.fromkeys(CONTENDERS, 0.0)
    with tempfile.TemporaryDirectory(prefix="ditmesh-bench-") as folder, RankPool(2, threads=1) as pool:
        work = Path(folder)
        model = str(larger_model(work / "model"))
        more = {"train_batch_size": 1, "global_batch_size": PER_STEP, "max_train_steps": 1 + options.steps}
        for _ in range(options.repeats):
            for name, settings in CONTENDERS.items():
                given = run_of("speed", model, work, settings or {}, **more)
                found = pool.run(rate_of_torch if settings is None else rate, given)
                rates[name].append(min(one for one, _ in found))
                held[name] = max(share for _, share in found)
    rows, seconds = [], {name: [1 / one for one in of] for name, of in rates.items()}
    for name, of in rates.items():
        against = [ratio_cells(paired_ratios(seconds[other], seconds[name])) for other in ("data=2", TORCH)]
        rows.append([name, f"{statistics.median(of):.2f}", *against[0], against[1][0], f"{held[name]:.0%}"])
    columns = ["", "samples/s", "of data=2", "min", "max", "of torch's", "weights of a rank"]
    machine = describe_machine()
    show_table(f"1,024 image tokens, {PER_STEP} micro-batches of one sample a step", columns, rows, machine)
    write_figures({"machine": machine, "samples a second": rates, "share of weights": held}, options.json)


if __name__ == "__main__":
    main()

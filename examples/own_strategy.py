"""torchrun --nproc-per-node 2 examples/own_strategy.py

A strategy outside ditmesh: every rank gathers all keys and values before each attention. It is exact, with keys in the
order of one device. It sends the same data as a ring, but does not overlap them with computation.
"""

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch import Tensor, nn

import ditmesh
from ditmesh import ConfigError, ParallelConfig, zoo
from ditmesh.attention import masks
from ditmesh.attention.mixer import AttentionCall, gather_keys
from ditmesh.launch import init_from_environment
from ditmesh.layout import TokenLayout
from ditmesh.recipe import RECIPE
from ditmesh.strategies.base import ParallelModel
from ditmesh.strategies.sequence import ExactSequence, SequenceParallel
from ditmesh.strategies.tokens import TokenStrategy


class GatherConfig(ParallelConfig):
    """``gathered=True``: ring ranks gather keys and values before each attention."""

    gathered: bool = False


class GatheredKeys(SequenceParallel):
    """The handler of the hooks: it splits tokens as usual, and attends to all keys."""

    def attend_distributed(self, attention: AttentionCall) -> Tensor:
        mask = attention.mask
        if mask is not None:
            here = range(self.link.rank, self.link.rank + 1)
            mask = masks.everywhere(mask, attention.queries, attention.keys, self.link, here)
        keys, values = gather_keys(self.mesh.ring, (attention.k_bhsd, attention.v_bhsd), attention.keys)
        return self.kernel(attention.q_bhsd, keys, values, mask, attention.scale)


class Gathered(TokenStrategy):
    """The strategy, one line of the recipe."""

    name = key = "gathered"
    key_of_axis = "ring"
    promise = "tolerance"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return getattr(config, "gathered", False)

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        if config.ulysses > 1:
            raise ConfigError(f"gathered=True runs on the ring axis; use ring={config.sequence}")

    def handler(self, model: ParallelModel) -> SequenceParallel:
        return GatheredKeys(self.context.config, self.context.mesh)


recipe = tuple(Gathered if strategy is ExactSequence else strategy for strategy in RECIPE)


def main() -> None:
    """Compare an image with that of one device."""
    device = init_from_environment()
    pipe = DiffusionPipeline.from_pretrained(zoo.path()).to(device)
    call = {"prompt": "a red fox", "num_inference_steps": 4, "output_type": "pt"}
    alone = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    with ditmesh.parallelized(pipe, GatherConfig(ring=dist.get_world_size(), gathered=True), recipe=recipe):
        together = pipe(**call, generator=torch.Generator().manual_seed(0)).images
        sent = ditmesh.engine_of(pipe).mesh.traffic.bytes_sent["ring"]
    error = float((together - alone).abs().max())
    assert error < 1e-4, error
    assert sent > 0
    if dist.get_rank() == 0:
        print(f"largest difference from one device {error:.1e}; {sent:,} bytes sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

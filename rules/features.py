"""What a program does with a pipeline between its requests, on CPUs and on fake CUDA devices. Rank functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor
from torch.utils._pytree import tree_map_only

import ditmesh
from rules.fake_cuda import cuda, unavailable
from rules.requests import ours
from support import lora
from support.models import relative_error, tiny
from support.pipelines import arguments, sd3

# Pictures of one story, by what was done before.
Drawn = dict[str, Any]


def _adapters(folder: str, where: str, config: dict[str, Any]) -> Drawn:
    """Loaded, switched, weighted, fused, exchanged and unloaded between requests."""
    pipe = sd3()
    pipe.register_modules(transformer=copy.deepcopy(tiny("SD3")))
    pipe.set_progress_bar_config(disable=True)
    pipe.to(where)
    # Two steps: the adapters are what is looked at.
    call = {**arguments("sd3", [1, 2], steps=2), "output_type": "latent"}
    call = tree_map_only(Tensor, lambda one: one.to(where), call)
    states = [one.get_state() for one in call["generator"]]
    drawn: Drawn = {}

    def draw(what: str) -> None:
        for generator, state in zip(call["generator"], states, strict=True):
            generator.set_state(state)
        drawn[what] = pipe(**call).images

    # Of its own memory: an adapter that is exchanged is written over.
    first, second = (
        {key: value.clone() for key, value in lora.adapter("SD3", seed, rank).items()}
        for seed, rank in ((1, 6), (2, 4))
    )
    with ditmesh.parallelized(pipe, config):
        draw("plain")
        pipe.load_lora_weights({**first}, adapter_name="a")
        pipe.load_lora_weights({**second}, adapter_name="b")
        pipe.set_adapters(["a"])
        draw("first")
        pipe.set_adapters(["b"])
        draw("second")
        pipe.set_adapters(["a", "b"], [0.7, -0.4])
        draw("both, weighted")
        pipe.disable_lora()
        draw("disabled")
        pipe.enable_lora()
        pipe.delete_adapters("b")
        pipe.set_adapters(["a"])
        pipe.fuse_lora(components=["transformer"], lora_scale=0.8)
        draw("fused")
        pipe.unfuse_lora(components=["transformer"])
        pipe.transformer.load_lora_adapter({**second}, adapter_name="a", prefix="transformer", hotswap=True)
        draw("exchanged")
        with mock.patch("gc.collect"):
            pipe.unload_lora_weights()
        draw("unloaded")
    return drawn


def _tiles(folder: str, where: str, config: dict[str, Any]) -> Drawn:
    """The VAE decodes tiles, in a second request also slices; the decoder's calls are counted."""
    pipe: Any = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.to(where)
    drawn: Drawn = {}
    with ditmesh.parallelized(pipe, config):
        for what in ("tiles", "tiles and slices"):
            pipe.vae.enable_tiling()
            pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 16, 16 // pipe.vae_scale_factor
            if "slices" in what:
                pipe.vae.enable_slicing()
            sizes: list[tuple[int, ...]] = []
            counted = pipe.vae.decoder.register_forward_pre_hook(
                lambda _, given, to=sizes: to.append((*given[0].shape,))
            )
            drawn[what] = pipe(
                ["a fish", "a fox"],
                generator=torch.Generator().manual_seed(0),
                height=32,
                width=32,
                num_inference_steps=2,
                max_sequence_length=12,
                output_type="np",
            ).images
            counted.remove()
            # All of an image's latents at once are no tile.
            assert len(sizes) > 2, sizes
    return drawn


def _generators(folder: str, where: str, config: dict[str, Any], differ: bool = False) -> Drawn:
    """A generator of the device in two requests, one for each image in a third; where they stand afterwards.

    Args:
        differ: ranks have seeds of their own: those of the first rank are used.
    """
    pipe = sd3()
    pipe.set_progress_bar_config(disable=True)
    pipe.register_modules(transformer=copy.deepcopy(tiny("SD3")))
    pipe.to(where)
    seed = dist.get_rank() if differ else 0

    def generator(number: int) -> torch.Generator:
        return torch.Generator(where).manual_seed(number + 10 * seed)

    one, several = generator(5), [generator(6), generator(7)]
    drawn: Drawn = {}
    with ditmesh.parallelized(pipe, config):
        for what, given in (("first", one), ("second", one), ("several", several)):
            call = {**arguments("sd3", [1, 2], steps=2), "generator": given}
            drawn[what] = pipe(**tree_map_only(Tensor, lambda x: x.to(where), call)).images
    assert {x.device.type for x in (one, *several)} == {where}
    return drawn | {"states": torch.stack([x.get_state() for x in (one, *several)])}


STORIES: dict[str, Callable[[str, str, dict[str, Any]], Drawn]] = {
    "adapters": _adapters,
    "tiles": _tiles,
    "generators": _generators,
    "generators that differ": partial(_generators, differ=True),
}


@torch.no_grad()
def told(story: str, folder: str, config: dict[str, Any]) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
    """A story on CPUs and on fake CUDA devices.

    Returns:
        By image its error, and how far it is from the first image; what ditmesh waited for on the device.
    """
    reason = unavailable()
    assert reason is None, reason
    found: list[dict[str, Tensor]] = []
    looks: dict[str, int] = {}
    for where in ("cpu", "cuda"):
        with cuda(found=True) if where == "cuda" else nullcontext() as device:
            drawn = STORIES[story](folder, where, {**config, "shared_memory": False})
            if device is not None:
                looks = ours(device.looks)
            found.append(
                {
                    what: device.values(one).clone()
                    if device is not None and isinstance(one, Tensor)
                    else torch.as_tensor(one)
                    for what, one in drawn.items()
                }
            )
    truth, other = found
    first = next(iter(truth))
    errors = {what: relative_error(other[what].double(), truth[what].double()) for what in truth}
    apart = {
        what: relative_error(one, truth[first])
        for what, one in truth.items()
        if what != first and one.shape == truth[first].shape
    }
    return errors, apart, looks

"""What `ditmesh.Followers` spends on comparing a model with its copies, beside one call of it on one device.

    python benchmarks/followers.py                  # emoji-sd3's transformer, and one with as many modules as FLUX.1
    python benchmarks/followers.py --device cuda --width 3072

One process and one thread; each figure is the least of several, on the CPU in CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import diffusers
import torch
from torch import nn

from ditmesh import zoo
from ditmesh.followers.copies import CopiedModule

REPEATS = 9


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The least time of a call, in ms: of the one thread on the CPU, which a busy machine does not prolong as much."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = []
    for _ in range(REPEATS):
        start = clock()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return 1e3 * min(times)


def sd3() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The embedded transformer, and a call of two images of 64 x 64 pixels."""
    net = diffusers.SD3Transformer2DModel.from_pretrained(zoo.path("emoji-sd3"), subfolder="transformer")
    config = net.config
    return net, {
        "hidden_states": torch.randn(2, config.in_channels, 16, 16),
        "encoder_hidden_states": torch.randn(2, 20, config.joint_attention_dim),
        "pooled_projections": torch.randn(2, config.pooled_projection_dim),
        "timestep": torch.full((2,), 500.0),
    }


def flux(width: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A transformer with the blocks of FLUX.1 in another width, and a call of one image of 256 tokens."""
    head = width // 4
    axes = (head - 2 * (head // 4 // 2 * 2), *[head // 4 // 2 * 2] * 2)
    net = diffusers.FluxTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=head,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=axes,
    )
    return net, {
        "hidden_states": torch.randn(1, 256, 64),
        "encoder_hidden_states": torch.randn(1, 64, 64),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(256, 3),
        "txt_ids": torch.zeros(64, 3),
    }


@torch.no_grad()
def line(name: str, net: nn.Module, arguments: dict[str, torch.Tensor], device: str) -> str:
    """The figures of one model."""
    net = net.to(device)
    arguments = {key: value.to(device) for key, value in arguments.items()}
    copied = CopiedModule(net)
    megabytes = sum(tensor.nbytes for tensor in net.state_dict().values()) / 1e6
    first = milliseconds(copied.changes, device)
    later = milliseconds(lambda: copied.changes(read=False), device)
    after = milliseconds(copied.note, device)
    call = milliseconds(lambda: net(**arguments), device)
    return (
        f"{name}: {megabytes:.0f} MB in {len(copied.numbers)} modules; first call of a run {first + after:.1f} ms, "
        f"later ones {later + after:.1f} ms; the call itself on one device {call:.0f} ms"
    )


def main() -> None:
    """Print a line for each model."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--width", type=int, default=64)
    given = options.parse_args()
    torch.set_num_threads(1)
    print(line("emoji-sd3", *sd3(), given.device))
    print(line(f"FLUX.1 of width {given.width}", *flux(given.width), given.device))


if __name__ == "__main__":
    main()

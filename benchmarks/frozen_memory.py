"""Memory and speed of training adapters above an NF4 base, at true widths and few blocks: two ranks, and one. Linux.

    python benchmarks/frozen_memory.py --json figures.json
    python benchmarks/frozen_memory.py --models ltx-video wan-14b --tokens 16
    python benchmarks/frozen_memory.py --speed --tokens 16 --mesh data=2         # wants the machine quiet
    python benchmarks/frozen_memory.py --models ltx-video --width-scale 0.1      # a try

Classes and widths are those of `ditmesh plan`'s catalogue, with the blocks of `BLOCKS` and random weights: numbers of
NF4 and their scales are drawn as they are stored, so that no rank ever holds a whole weight. LoRA of rank 16 on the
attention projections; float32, activation checkpointing, AdamW; two steps. Two ranks split the tokens of one sample
(ulysses=2), or process a sample each (data=2; one rank then accumulates the gradients of both), on CPUs with one
thread each.

Of the worst rank: what it has of its own (RssAnon and RssShmem, looked at every 2 ms) beyond what it had before there
was a model, when the model is there and at its peak; over the bytes that the transformer's weights alone have in
bfloat16. Beside it the bytes of the quantised weights, of the frozen ones that keep float32 (biases, norms, embeddings,
tables) and of the adapters with their gradients and AdamW's two moments. A loss may differ from one rank's on the same
base by 1e-5 at most. Memory needs no quiet machine.

With --speed: samples a second of two ranks over those of one, which runs first, by the fastest step after the first.
Memory is not looked at then, because for it the C library is told to return freed memory at once, after which every
temporary of a layer, dequantised rows first of all, costs page faults: up to 9 times the time of dequantisation.
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, show_table, write_figures
from machine import describe_machine, give_freed_memory_back
from memory_model import Own, status

# Settings of the configuration that make few blocks, and how the latents lie.
BLOCKS: dict[str, tuple[dict[str, int], str]] = {
    "flux.2-dev": ({"num_layers": 1, "num_single_layers": 2}, "bsc"),
    "qwen-image": ({"num_layers": 4}, "bsc"),
    "z-image": ({"n_layers": 5, "n_refiner_layers": 1}, "list"),
    "wan-14b": ({"num_layers": 4}, "bcfhw"),
    "ltx-video": ({"num_layers": 12}, "bsc"),
}
BOUND = 1e-5
STEPS, SPEED_STEPS = 2, 3


def frozen_at_random(model: Any, seed: int) -> None:
    """Give a model without memory random weights: NF4 where `ditmesh train` has it, else float32."""
    from ditmesh.train.model.frozen import BLOCK, SCALES, FrozenLinear, layers_to_freeze, nf4_weight, quantised

    draw = torch.Generator().manual_seed(seed)
    # Tables and the mean of scales, of weights with a deviation of 0.02.
    alike, _ = quantised(0.02 * torch.randn(SCALES, BLOCK, generator=draw), "nf4")
    for name in layers_to_freeze(model):
        layer = model.get_submodule(name)
        count = layer.weight.numel()
        scales = -(-count // BLOCK)
        parts = {
            **alike,
            "W_q": torch.randint(256, (-(-count // 2),), dtype=torch.uint8, generator=draw),
            "absmax": torch.randint(96, 160, (scales,), dtype=torch.uint8, generator=draw),
            "absmax2": alike["absmax2"].mean().expand(-(-scales // SCALES)).clone(),
        }
        bias = None if layer.bias is None else torch.nn.Parameter(torch.zeros(layer.out_features))
        less = FrozenLinear(parts, partial(nf4_weight, layer.weight.shape), tuple(layer.weight.shape), bias)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._modules[leaf] = less
    for path, module in model.named_modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None or not value.is_meta:
                continue
            norm = "norm" in f"{path}.{name}" and name == "weight" and value.dim() == 1
            made = torch.ones(value.shape) if norm else 0.02 * torch.randn(value.shape, generator=draw)
            if name in module._parameters:
                module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
            else:
                module._buffers[name] = made


def built(name: str, scale: float) -> tuple[Any, int]:
    """The model with its random base, and how many weights it has."""
    from accelerate import init_empty_weights

    from ditmesh.layout.describe import model_class
    from ditmesh.memory.catalogue import shape

    known, kind = shape(name), model_class(shape(name).transformer)
    settings = {**known.config, **BLOCKS[name][0]}
    with init_empty_weights():
        # Buffers that are computed, not saved, are there.
        model: Any = kind.from_config(settings)
        if scale != 1:
            heads = "n_heads" if "n_heads" in model.config else "num_attention_heads"
            changed: dict[str, Any] = {heads: max(2, int(model.config[heads] * scale))}
            for width in ("dim", "ffn_dim", "n_kv_heads", "cross_attention_dim"):
                if width in model.config:
                    changed[width] = int(model.config[width] * changed[heads] / model.config[heads])
            model = kind.from_config({**settings, **changed})
    count = sum(parameter.numel() for parameter in model.parameters())
    frozen_at_random(model, 0)
    return model, count


def held_by(model: Any) -> dict[str, int]:
    """Bytes of a model's weights: quantised, frozen in float32, and adapters with gradients and AdamW's moments."""
    from ditmesh.train.model.frozen import FrozenLinear

    quantised = {
        id(value)
        for layer in model.modules()
        if isinstance(layer, FrozenLinear)
        for path, value in layer.named_parameters(recurse=False)
        if path != "bias"
    }
    every = [*model.parameters(), *model.buffers()]
    return {
        "quantised": sum(one.nbytes for one in every if id(one) in quantised),
        "float32": sum(one.nbytes for one in every if id(one) not in quantised and not one.requires_grad),
        "adapters": 4 * sum(one.nbytes for one in every if one.requires_grad),
    }


def samples(given: dict[str, Any], config: dict[str, int], every: int) -> list[dict[str, Any]]:
    """Arguments of the samples that this rank processes in a step: all, or its own of two."""
    made = []
    for number in range(every):
        draw = torch.Generator().manual_seed(number)

        def other(value: Any, draw: torch.Generator = draw) -> Any:
            if isinstance(value, list):
                return [other(one) for one in value]
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 64:
                return value
            return value + 0.1 * torch.randn(value.shape, generator=draw)

        moved = ("hidden_states", "encoder_hidden_states", "x", "cap_feats")
        made.append({key: other(value) if key in moved else value for key, value in given.items()})
    return [made[torch.distributed.get_rank()]] if "data" in config else made


def trained(name: str, side: int, scale: float, config: dict[str, int], every: int, speed: bool) -> dict[str, Any]:
    """On a rank: losses of some steps of ``every`` samples, and what they take."""
    from peft import inject_adapter_in_model

    import ditmesh
    from ditmesh.layout.conventions import CallVariant, Conventions, Size
    from ditmesh.train import reduce_gradients
    from ditmesh.train.config import LoraConfig
    from ditmesh.train.model.adapters import peft_config, targets_of

    if not speed:
        give_freed_memory_back()
    # What libraries hold once they are in use.
    torch.nn.Linear(64, 64)(torch.randn(2, 64)).sum().backward()
    import bitsandbytes  # noqa: F401

    gc.collect()
    before = status("RssAnon", "RssShmem")
    model, count = built(name, scale)
    lora = LoraConfig(rank=16)
    torch.manual_seed(0)
    inject_adapter_in_model(peft_config(lora, targets_of(model, lora)), model)
    model.train()
    model.enable_gradient_checkpointing()
    frames = 2 if BLOCKS[name][1] == "bcfhw" or name == "ltx-video" else 1
    size = Size(side, side, 2 * side, batch=1, frames=frames)
    given = Conventions(model, CallVariant(BLOCKS[name][1])).inputs(size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    gc.collect()
    held = status("RssAnon", "RssShmem")
    own, losses, seconds = None if speed else Own(), [], []
    if config:
        ditmesh.parallelize(model, {**config, "inputs": "trust"})
    mine = samples(given, config, every)
    for _ in range(SPEED_STEPS if speed else STEPS):
        began, total = time.monotonic(), 0.0
        for sample in mine:
            output = model(**sample)[0]
            output = output[0] if isinstance(output, list) else output
            loss = output.square().mean()
            (loss / len(mine) / config.get("ulysses", 1)).backward()
            total += loss.item() / len(mine)
        if config:
            reduce_gradients(model, ditmesh.engine_of(model).mesh)
            for parameter in parameters if "ulysses" in config else ():
                parameter.grad = None if parameter.grad is None else 2 * parameter.grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        seconds.append(time.monotonic() - began)
    peak = 0 if own is None else own.most()
    if own is not None:
        own.close()
    if config:
        ditmesh.restore(model)
    moved = float(sum(p.detach().abs().sum() for n, p in model.named_parameters() if "lora_B" in n))
    return {
        "weights": count,
        "losses": losses,
        "held": held - before,
        "peak": peak - before,
        "seconds": min(seconds[1:]),
        "moved": moved,
        "tokens": size.image,
        "parts": held_by(model),
    }


def compared(name: str, side: int, scale: float, mesh: dict[str, int], speed: bool) -> dict[str, Any]:
    """Two ranks beside one."""
    from ditmesh.launch import RankPool

    every = mesh.get("data", 1)
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks, config in ((1, {}), (2, mesh)):
        with RankPool(ranks, threads=1, timeout=3600.0) as pool:
            found[f"{ranks}"] = pool.run(trained, name, side, scale, config, every, speed)
    alone, two = found["1"][0], found["2"]
    assert all(rank["moved"] > 0 for rank in (alone, *two)), "nothing was trained"
    # Ranks that split a sample have its loss each, ranks with a sample of their own its own.
    means = [sum(losses) / len(losses) for losses in zip(*(rank["losses"] for rank in two), strict=True)]
    off = max(abs(mine / one - 1) for mine, one in zip(means, alone["losses"], strict=True))
    bf16 = 2 * alone["weights"]
    shared = {
        "mesh": mesh,
        "blocks": BLOCKS[name][0],
        "weights": alone["weights"],
        "bf16": bf16,
        "loss": alone["losses"],
        "loss off": off,
        "seconds": max(rank["seconds"] for rank in two),
        "seconds of one rank": alone["seconds"],
        "samples a step": every,
        "tokens": alone["tokens"],
    }
    if speed:
        return {**shared, "times as fast": alone["seconds"] / shared["seconds"]}
    peak = max(rank["peak"] for rank in two)
    return {
        **shared,
        "parts": two[0]["parts"],
        "held": max(rank["held"] for rank in two),
        "peak": peak,
        "peak over bf16": peak / bf16,
        "held over bf16": max(rank["held"] for rank in two) / bf16,
        "peak of one rank": alone["peak"],
    }


def row_of(name: str, case: dict[str, Any], speed: bool) -> list[str]:
    """A model's row of the table."""
    weights, off = f"{case['weights'] / 1e9:.2f}", f"{case['loss off']:.1e}"
    if speed:
        seconds = [f"{case[key]:.2f}" for key in ("seconds of one rank", "seconds")]
        return [name, weights, str(case["tokens"]), *seconds, f"{case['times as fast']:.2f}", off]
    giga = [f"{case[key] / 1e9:.2f}" for key in ("bf16", "held", "peak")]
    giga += [f"{value / 1e9:.3f}" for value in case["parts"].values()]
    ratios = [f"{case[key]:.3f}" for key in ("held over bf16", "peak over bf16")]
    return [name, weights, *giga, *ratios, off]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--tokens", type=int, default=8, metavar="N", help="tokens along a side (and 2 N of text)")
    parser.add_argument("--mesh", default="ulysses=2", choices=("ulysses=2", "data=2"), help="what two ranks share")
    parser.add_argument("--speed", action="store_true", help="samples a second in the place of memory")
    parser.add_argument("--width-scale", type=float, default=1.0, help="part of the heads, for a try")
    given = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe_machine(), "models": {}}
    axis, _, degree = given.mesh.partition("=")
    rows = []
    for name in given.models:
        case = compared(name, given.tokens, given.width_scale, {axis: int(degree)}, given.speed)
        figures["models"][name] = case
        write_figures(figures, given.json)
        rows.append(row_of(name, case, given.speed))
        print(*rows[-1], flush=True)
    columns = ["model", "10^9 weights"]
    if given.speed:
        columns += ["image tokens", "s a step, one rank", "s a step, two ranks", "times as fast"]
    else:
        columns += [f"{what} GB" for what in ("bf16", "held", "peak")]
        columns += [f"{what} GB" for what in ("quantised", "float32", "adapters")]
        columns += ["held / bf16", "peak / bf16"]
    what = "two ranks beside one" if given.speed else "worst rank"
    show_table(f"LoRA above NF4, {given.mesh}, {what}", [*columns, "loss differs by"], rows, figures["machine"])
    wrong = [name for name, case in figures["models"].items() if case["loss off"] > BOUND]
    if wrong:
        raise SystemExit(f"losses differ by more than {BOUND:g}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

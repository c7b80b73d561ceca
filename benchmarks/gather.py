"""Keys and values gathered on every rank, beside Ulysses and the ring: 8, 6 and 5 heads, and grouped-query attention.

python benchmarks gather                            # four tables; wants a quiet machine
python benchmarks gather --json out.json            # and every figure
"""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from exact import BASELINE, MODEL, SIDE, TEXT, Contender, arguments, benchmark_inputs, compare, seconds_of

CONTENDERS = [
    BASELINE,
    Contender("ulysses=2", 2, {"ulysses": 2}),
    Contender("ring=2", 2, {"ring": 2}),
    Contender("ring=2 exchange=gather", 2, {"ring": 2, "exchange": "gather"}),
]
HEADS = (8, 6, 5)
# Lumina 2, whose four query heads share a key head.
GROUPED = {
    "in_channels": 16,
    "hidden_size": 512,
    "num_layers": 8,
    "num_refiner_layers": 1,
    "num_attention_heads": 8,
    "num_kv_heads": 2,
    "axes_dim_rope": (16, 24, 24),
    "cap_feat_dim": 512,
}


@cache
def model_and_inputs(heads: int | None) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A Flux-class model with so many heads of 64, or with None one with grouped-query attention; float32."""
    import diffusers

    torch.manual_seed(0)
    if heads is not None:
        return diffusers.FluxTransformer2DModel(**{**MODEL, "num_attention_heads": heads}).eval(), benchmark_inputs()
    inputs = {
        "hidden_states": torch.randn(1, GROUPED["in_channels"], 2 * SIDE, 2 * SIDE),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, TEXT, GROUPED["cap_feat_dim"]),
        "encoder_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
    }
    return diffusers.Lumina2Transformer2DModel(**GROUPED).eval(), inputs


def seconds(heads: int | None, config: dict[str, Any] | None, runs: int) -> float:
    """Best time of ``runs`` forwards of one of the models on this rank; see `exact.seconds_of`."""
    return seconds_of(*model_and_inputs(heads), config, runs)


def main() -> None:
    """Measure, print the tables, write the figures."""
    options = arguments(__doc__)
    path = options.json
    for heads in (*HEADS, None):
        if path is not None:
            options.json = Path(path).with_suffix(f".{heads or 'grouped'}.json")
        what = f"{heads} heads" if heads else "8 heads, 2 key heads (Lumina 2 class)"
        compare(CONTENDERS, partial(seconds, heads), f"float32; {what}", options)


if __name__ == "__main__":
    main()

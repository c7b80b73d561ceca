"""Every transformer class of diffusers without a reviewed layout: right on two ranks, or refused by a sentence.

Nothing tells ditmesh their layout: the call, in the form in which a pipeline makes it, is all it has. A few of the
cases run always, all of them under the `matrix` marker; what comes of those is written to docs/classes.md
(``pytest tests/layout/test_every_class.py -m matrix --write-support``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import ditmesh
from ditmesh.layout import known_models
from ditmesh.layout.forms import WAY_OUT
from support.classes import CASES

CONFIGS: dict[str, dict[str, Any]] = {
    "ulysses=2": {"ulysses": 2},
    "ring=2": {"ring": 2},
    "gather=2": {"ring": 2, "exchange": "gather"},
    "data=2": {"data": 2},
}
TOLERANCE = 1e-5  # relative, float32

# Ways through the derivation that no other case takes.
ALWAYS = [
    ("HiDreamImageTransformer2DModel", "square"),  # text that changes between blocks; gathered between blocks
    ("NucleusMoEImageTransformer2DModel", "prompt"),  # experts that choose their tokens
    ("ConsisIDTransformer3DModel", "guidance"),  # a stream that only counts by its length behind the blocks
    ("SD3Transformer2DModel + IP-Adapter", "guidance"),
    ("ZImageTransformer2DModel + ControlNet", "prompt"),
    ("StableAudio3DiTModel", "guidance"),
    ("GlmImageTransformer2DModel", "edit"),  # refused
]

# What is refused when tokens are cut: class (and form, or all of its forms), and what the sentence names.
REFUSED = {
    "AnyFlowFARTransformer3DModel chunks before": "attention_mask",
    "AnyFlowFARTransformer3DModel chunk": "queries",
    "Flux2Transformer2DModel + caches": "kv_cache",
    "GlmImageTransformer2DModel edit": "kv_cache",
    "GlmImageTransformer2DModel image before": "kv_cache",
    "MiniMaxMusic3RVQDepthDecoder": "is_causal",
    "QwenImage21Transformer2DModel": "transformer_blocks.0",
    "RFD4ProteinaTransformer": "transformer_layers.0",
    "SanaVideoTransformer3DModel": "Conv2d",
    "SanaWMLTX2RefinerTransformer3DModel": "kv_cache",
    "SanaWMTransformer3DModel": "blocks.0",
    "StableAudio3DiTModel inpaint": "transformer_blocks.0",
    "WanAnimate2Transformer3DModel": "kv_cache",
}


def flat(output: Any) -> list[torch.Tensor]:
    """All tensors of a result."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for item in items for tensor in flat(item)]


def outcome(name: str, form: str, config: dict[str, Any]) -> dict[str, Any]:
    """The largest relative error of two calls, or the sentence that refuses them."""
    case = CASES[name]
    model = case.make()
    with torch.no_grad():
        truth = flat(model(**case.calls[form]()))
        try:
            with ditmesh.parallelized(model, config):
                found = [flat(model(**case.calls[form]())) for _ in range(2)]
        except (ditmesh.LayoutError, ditmesh.InputError, ditmesh.ConfigError) as error:
            return {"refused": " ".join(str(error).split())}
        after = flat(model(**case.calls[form]()))
    assert all(torch.equal(a, b) for a, b in zip(after, truth, strict=True))
    pairs = [pair for one in found for pair in zip(one, truth, strict=True)]
    return {"error": max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)}


def refusal(name: str, form: str) -> str | None:
    """What the sentence that refuses a form names; None: it is not to be refused."""
    return next((word for key, word in REFUSED.items() if f"{name} {form}".startswith(key)), None)


def check(found: list[dict[str, Any]], name: str, form: str, config: str) -> dict[str, Any]:
    """Right or refused, on all ranks alike; a picture that is wrong is neither."""
    first = found[0]
    if "refused" in first:
        assert all("refused" in one for one in found)
        if config != "data=2":
            word = refusal(name, form)
            assert word is not None, first
            assert word in first["refused"]
        return first
    assert max(one["error"] for one in found) <= TOLERANCE
    assert config == "data=2" or refusal(name, form) is None
    return {"error": max(one["error"] for one in found)}


@pytest.mark.parametrize(("name", "form"), ALWAYS, ids=str)
def test_right_or_refused(ranks, name, form):
    check(ranks(2).run(outcome, name, form, {"ulysses": 2}), name, form, "ulysses=2")


PAGE = Path(__file__).parents[2] / "docs" / "classes.md"
INTRODUCTION = f"""# Classes without a reviewed layout

These transformer classes of diffusers have no reviewed layout; ditmesh derives their layout from the first
call ([layouts.md](layouts.md#a-layout-from-a-call)). For classes with a reviewed layout see [support.md](support.md).
To look at the layout of a model:

```text
ditmesh inspect MODEL
```

Each class is a tiny float32 model of diffusers {diffusers.__version__}, called twice in the form in which its
pipelines call it, on two gloo ranks, and compared with the unmodified model. The figure is the largest relative
error; 0 means bit-identical. *refused* means that the call raises an error; its message is below the table.
`pytest tests/layout/test_every_class.py -m matrix --write-support` generates this page.

"""


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str, str, dict[str, Any]], None]]:
    """``record(class, form, configuration, outcome)``: one cell of the page."""
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    yield lambda name, form, config, found: cells.setdefault((name, form), {}).__setitem__(config, found)
    if not request.config.getoption("--write-support") or not cells:
        return
    lines = [f"| transformer | call | {' | '.join(CONFIGS)} |", "|---|---|" + "---|" * len(CONFIGS)]
    reasons: dict[str, dict[str, list[str]]] = {}
    for (name, form), row in sorted(cells.items()):
        shown = []
        for config in CONFIGS:
            found = row.get(config, {})
            if "refused" in found:
                why = found["refused"].removesuffix(f"; {WAY_OUT}")
                reasons.setdefault(why, {}).setdefault(f"{name} {form}", []).append(config)
            shown.append("refused" if "refused" in found else f"{found['error']:.0e}" if found.get("error") else "0")
        lines.append(f"| {name} | {form} | {' | '.join(shown)} |")
    right = {name.split()[0] for (name, _), row in cells.items() if "error" in row.get("ulysses=2", {})}
    lines += ["", f"{len(right)} of {len({name.split()[0] for name, _ in cells})} classes run with their tokens cut."]
    lines += ["", "## Error messages", ""]
    for why, where in sorted(reasons.items(), key=lambda item: min(item[1])):
        calls = "; ".join(f"{call} ({', '.join(configs)})" for call, configs in where.items())
        lines += [f"* {calls}: {why}"]
    PAGE.write_text(INTRODUCTION + "\n".join(lines) + "\n", encoding="utf-8")


FORMS = [(name, form) for name, case in CASES.items() for form in case.calls]


@pytest.mark.matrix
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("name", "form"), FORMS, ids=str)
def test_every_form(ranks, name, form, config, record):
    record(name, form, config, check(ranks(2).run(outcome, name, form, CONFIGS[config]), name, form, config))


def test_no_class_is_left_out():
    """All transformers that diffusers exports have a reviewed layout or a case."""
    kinds = [getattr(diffusers, name) for name in dir(diffusers) if not name.startswith("_")]
    transformers = {
        kind.__name__
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) and ".transformers." in kind.__module__
    }
    assert transformers - set(known_models()) <= {name.split()[0] for name in CASES}

"""The composition matrix: every class under every strategy, and under pairs and triples of them.

``make test`` runs half of a diagonal of it, every second class under one combination; ``make test-all`` runs the
whole, and ``--write-support`` writes the outcome to ``src/ditmesh/strategies/support.json`` and ``docs/support.md``.
Classes without a reviewed layout, of which the call in the form in which a pipeline makes it is all that ditmesh has,
are written to docs/classes.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.layout import known_models
from ditmesh.parts.part import whole_of
from ditmesh.recipe import RECIPE
from ditmesh.strategies import support
from support.classes import CASES as CLASSES
from support.models import MAKERS, RAGGED, inputs, run, tiny
from support.outcome_pages import DOCS, Rows, lines_of, page, rows_of
from support.parity import agreed, derived, largest_error, of_class, tensors
from support.support_page import as_markdown

TOLERANCE = 1e-5
# The rounding of one device in float32, against float64, is 4.9e-5: its camera branch scans states over the frames.
ROUGH = {"SanaWMTransformer3DModel": 5e-5}

COMBINATIONS: list[dict[str, Any]] = [
    {"ulysses": 2},
    {"ring": 2},
    {"tensor": 2},
    {"data": 2},
    {"cfg": 2},
    {"ulysses": 2, "ring": 2},
    {"tensor": 2, "ulysses": 2},
    {"tensor": 2, "ring": 2},
    {"data": 2, "ulysses": 2},
    {"data": 2, "ring": 2},
    {"data": 2, "tensor": 2},
    {"cfg": 2, "ulysses": 2},
    {"cfg": 2, "ring": 2},
    {"cfg": 2, "tensor": 2},
    {"data": 2, "cfg": 2},
    {"data": 2, "cfg": 2, "ulysses": 2},
    {"cfg": 2, "tensor": 2, "ulysses": 2},
    {"ring": 2, "exchange": "gather"},
    {"ulysses": 2, "ring": 2, "exchange": "gather"},
    {"cfg": 2, "ring": 2, "exchange": "gather"},
    {"data": 2, "ring": 2, "exchange": "gather"},
    {"tensor": 2, "ring": 2, "exchange": "gather"},
    {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    {"cfg": 2, "ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    {"data": 2, "ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    {"tensor": 2, "ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    {"ring": 2, "exchange": "naive", "warmup": "fixed(1)"},
    {"pipe": 2, "patches": 3, "warmup": "fixed(1)"},
    {"cfg": 2, "pipe": 2, "patches": 3, "warmup": "fixed(1)"},
    {"data": 2, "pipe": 2, "patches": 3, "warmup": "fixed(1)"},
    {"pipe": 2, "ulysses": 2, "patches": 3, "warmup": "fixed(1)"},
    {"pipe": 2, "ring": 2, "patches": 3, "warmup": "fixed(1)"},
    {"pipe": 2, "tensor": 2, "patches": 3, "warmup": "fixed(1)"},
    {"ulysses": 2, "shard": 2},
]
# Three axes on eight ranks: pipes and sequences beside data, as several users of xDiT run them.
LARGE: list[dict[str, Any]] = [
    {"data": 2, "pipe": 2, "ulysses": 2, "patches": 3, "warmup": "fixed(1)"},
    {"data": 2, "cfg": 2, "pipe": 2, "patches": 3, "warmup": "fixed(1)"},
    {"data": 2, "ulysses": 2, "tensor": 2},
    {"data": 2, "ulysses": 2, "ring": 2},
]
CASES = [(name, combination) for name in MAKERS for combination in COMBINATIONS]
CASES += [(name, combination) for name in MAKERS for combination in LARGE]


def in_slice(case: int) -> bool:
    """Half of a diagonal of the matrix: every second class once."""
    name, combination = divmod(case, len(COMBINATIONS))
    return case < len(MAKERS) * len(COMBINATIONS) and combination == name % len(COMBINATIONS) and name % 2 == 0


def outcome(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What `support.json` holds for one cell, seen by one rank.

    Displaced and PipeFusion: the synchronous step, and a stale one at the same inputs, which must be exact as well.
    """
    model, arguments = tiny(name), inputs(name, RAGGED)
    truth = tensors(run(model, arguments))
    try:
        with ditmesh.parallelized(model, config):
            values = [whole_of(run(model, arguments))]
            if "pipe" in config:
                values.append(whole_of(run(model, arguments)))
            if config.get("exchange") == "displaced":
                ditmesh.engine_of(model).clock.advance()
                values.append(run(model, arguments))
    except (ditmesh.InputError, ditmesh.ConfigError) as error:
        return {"refused": str(error)}
    error = max(largest_error(tensors(value), truth) for value in values)
    return {"error": error} if error <= TOLERANCE else {"wrong": error}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(
            name,
            config,
            id=f"{name}-{support.combination(ParallelConfig(**config), RECIPE)}",
            marks=() if in_slice(i) else pytest.mark.matrix,
        )
        for i, (name, config) in enumerate(CASES)
    ],
)
def test_cell(ranks, record_support, name, config):
    results = ranks(ParallelConfig(**config).world_size).run(outcome, name, config)
    worst = max(results, key=lambda result: result.get("wrong", result.get("error", 0.0)))
    key = support.combination(ParallelConfig(**config), RECIPE)
    record_support(type(tiny(name)).__name__, key, worst)
    assert "wrong" not in worst
    # What is refused is refused by all ranks alike, and the shipped table says so.
    assert len({"refused" in result for result in results}) == 1


def test_the_page_is_the_table():
    """docs/support.md is what the table says, and no class or combination is in it that the matrix does not run."""
    page = Path(__file__).parents[2] / "docs" / "support.md"
    assert page.read_text(encoding="utf-8") == as_markdown()
    # Narrow enough to be read, and every reason stands once.
    assert all(line.count("|") <= 11 for line in as_markdown().splitlines())
    refusals = {
        outcome["refused"]
        for row in support.support_table().values()
        for outcome in row.values()
        if "refused" in outcome
    }
    assert all(as_markdown().count(sentence) == 1 for sentence in refusals)
    classes = {type(tiny(name)).__name__ for name in MAKERS}
    combinations = {support.combination(ParallelConfig(**config), RECIPE) for config in COMBINATIONS + LARGE}
    assert set(support.support_table()) <= classes
    assert all(set(row) <= combinations for row in support.support_table().values())


def test_untested_combinations_warn_by_name(monkeypatch):
    monkeypatch.setattr(support, "support_table", lambda: {"M": {"ulysses": {"error": 0.0}, "ring": {"wrong": 0.5}}})
    with pytest.warns(ditmesh.errors.UntestedWarning, match=r"M with ulysses=2 ring=2 has not been tested.*ulysses"):
        support.check_tested("M", ParallelConfig(ulysses=2, ring=2), RECIPE)
    with pytest.raises(ditmesh.ConfigError, match="M with ring=2 is known to give a wrong image"):
        support.check_tested("M", ParallelConfig(ring=2), RECIPE)
    support.check_tested("M", ParallelConfig(ulysses=4), RECIPE)


# --- classes without a reviewed layout --------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "ulysses=2": {"ulysses": 2},
    "ring=2": {"ring": 2},
    "gather=2": {"ring": 2, "exchange": "gather"},
    "data=2": {"data": 2},
}

# What is refused when tokens are cut: class (and form, or all of its forms), and what the sentence names.
REFUSED = {
    "RFD4ProteinaTransformer": "transformer_layers.0",
    "SanaVideoTransformer3DModel": "Conv2d",
    "SanaWMTransformer3DModel": "blocks.0",
    "StableAudio3DiTModel inpaint": "transformer_blocks.0",
}
# Attention that runs by heads, so that its keys do not travel.
BY_HEADS = (
    "AnyFlowFAR",
    "Flux2Transformer2DModel + caches",
    "GlmImageTransformer2DModel edit",
    "GlmImageTransformer2DModel image before",
    "MiniMaxMusic3RVQDepthDecoder",
    "QwenImage21",
    "SanaWMLTX2Refiner",
    "WanAnimate2",
)

INTRODUCTION = f"""# Classes without a reviewed layout

These transformer classes of diffusers have no reviewed layout; ditmesh derives their layout from the first
call ([layouts.md](layouts.md#a-layout-from-a-call)). For classes with a reviewed layout see [support.md](support.md).
To look at the layout of a model:

```text
ditmesh layout MODEL
```

Each class is a tiny float32 model of diffusers {diffusers.__version__}, called twice in the form in which its
pipelines call it, on two gloo ranks, and compared with the unmodified model. The figure is the largest relative
error; 0 means bit-identical. *refused* means that the call raises an error; its message is below the table.
`pytest tests/strategies/test_matrix.py -k test_every_form -m matrix --write-support` generates this page.

"""


def summary(rows: Rows) -> str:
    right = {name.split()[0] for (name, _), row in rows.items() if "error" in row.get("ulysses=2", {})}
    return f"{len(right)} of {len({name.split()[0] for name, _ in rows})} classes run with their tokens cut."


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    """Of docs/classes.md."""
    wanted = request.config.getoption("--write-support")
    with page("classes.md", wanted, INTRODUCTION, ["transformer", "call"], CONFIGS, summary) as rows:
        yield rows


@pytest.mark.matrix
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, case in CLASSES.items() for form in case.calls])
def test_every_form(ranks, name, form, config, rows):
    results = ranks(2).run(derived, of_class, (name, form), CONFIGS[config])
    word = next((word for key, word in REFUSED.items() if f"{name} {form}".startswith(key)), None)
    if config == "ring=2" and f"{name} {form}".startswith(BY_HEADS):
        word = "exchange='gather'"
    if config == "data=2":
        # Which samples cannot be run apart is none of the layout's.
        word = "" if "refused" in results[0] else None
    rows.setdefault((name, form), {})[config] = agreed(results, word, ROUGH.get(name, TOLERANCE))


def test_rows_that_did_not_run_stay_on_a_page():
    text = (DOCS / "classes.md").read_text(encoding="utf-8")
    rows = rows_of(text, 2, CONFIGS)
    lines = lines_of(["transformer", "call"], CONFIGS, rows, summary(rows))
    assert INTRODUCTION + "\n".join(lines) + "\n" == text


def test_no_class_is_left_out():
    """All transformers that diffusers exports have a reviewed layout or a case."""
    kinds = [getattr(diffusers, name) for name in dir(diffusers) if not name.startswith("_")]
    transformers = {
        kind.__name__
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) and ".transformers." in kind.__module__
    }
    assert transformers - set(known_models()) <= {name.split()[0] for name in CLASSES}

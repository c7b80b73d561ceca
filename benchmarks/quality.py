"""What stale strategies cost on small trained models: the tables and figures of docs/lab/findings.md.

    python benchmarks/quality.py                           # all of it; hours of one core
    python benchmarks/quality.py --part experiment --images 1 --json benchmarks/measured/experiment.json
    python benchmarks/quality.py --json out.json           # and every figure

It is `ditmesh study`, several times: ranks are simulated, to the bit, and every picture is compared with the
synchronous one of the same seed. What is finished is in ``--out`` and is not drawn again, so a run that was broken off
goes on where it stood. Seeds come one after another: the first round draws every picture of every table once, the next
one draws each once more from another seed, and the tables are made of what is there.

``experiment``: 50 steps, N = 2, 4, 8, fixed warm-ups from none to 40 steps, first and last steps, adaptive.
``strategies``: naive patches, PipeFusion and compressed messages at the same steps. ``detail``: errors by step, layer
and token. ``objectives``: flow matching, and the noise in place of the velocity; ``degrees``: these on other numbers of
devices. ``videos``: a few synchronous steps of a video model, by where they are. ``codecs``: every way to compress
messages. Fewer steps and other samplers are those of `steps.py`, other numbers of tokens those of `distribution.py`.
The model that is not embedded (epsilon) is that of `training/relatives.py`, looked for in ``--models``; where it is not
there, its tables are left out. `benchmarks/figures.py` draws the figures of the page from the JSON file,
`benchmarks/tables.py` prints its tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, write_compactly
from machine import describe_machine

# Pictures of one request: captions of the model, evenly spaced.
CAPTIONS = 8


@dataclass(frozen=True)
class Table:
    """One study.

    Attributes:
        part: what it answers.
        model, sampler, steps: of an embedded model.
        devices, warmups: everything is combined with everything.
        rounds: seeds at most; None: as many as are asked for.
        strategies: of `ditmesh study`.
        captions: pictures of one request.
        detail: also errors of attention, and on the same latents.
    """

    part: str
    model: str
    sampler: str
    steps: int
    devices: tuple[int, ...]
    warmups: tuple[str, ...]
    rounds: int | None = None
    strategies: tuple[str, ...] = ("displaced",)
    captions: int = CAPTIONS
    detail: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.part}-{self.model}-{self.sampler}"

    @property
    def store(self) -> str:
        """Of the folder that its cells are in: those of one model and sampler lie together, with one reference."""
        part = "experiment" if self.model == "emoji-dit-s" else "objectives"
        return f"{part}-{self.model}-{self.sampler}" if self.part in ("degrees", "objectives") else self.name


FLOW, SMALL, VIDEO = ("emoji-sd3", "euler", 12), ("emoji-dit-s", "ddim", 20), ("emoji-wan", "euler", 16)
# The experiment: 50 steps, as is usual for DiT-XL/2.
LONG = 50
WARMUPS = ("fixed(0)", "fixed(1)", "fixed(4)", "fixed(10)", "fixed(40)")
# What the same number of synchronous steps is worth elsewhere.
LAST = "steps(0 46 47 48 49)"
PLACED = (LAST, "adaptive(0.001, 5)")
NUMBERS = (2, 4, 8)
# Elsewhere, too, for models that predict something else.
SPREAD = (LAST, "adaptive(0.001, 10)", "steps(0 5 10 15 20 25 30 35 40 45)")
# Where a few synchronous steps are spent on a video.
BEGINNINGS = ("fixed(1)", "fixed(2)", "fixed(3)", "fixed(4)", "steps(0 14 15)", "steps(0 6 12)")
# Models of `training/relatives.py`, and the embedded models whose guidance they have.
RELATIVES = {"dit-epsilon": "emoji-dit-s", "faces": "fashion-dit"}


def compressed(*names: str) -> tuple[str, ...]:
    """Strategies of `ditmesh study` with messages compressed in each of these ways: any that ``compress`` knows."""
    return tuple(f"displaced-{name}" for name in names)


# What one rank must not change.
ALONE = ("displaced", "pipefusion", *compressed("int4"))
CODECS = compressed("int8", "int4")
# Keys that are moved on by half of their latest change.
PREDICTED = tuple(f"{strategy}+linear" for strategy in ("displaced", *compressed("int4")))

TABLES = [
    Table("experiment", "emoji-dit-s", "ddim", LONG, NUMBERS, (*WARMUPS, *PLACED)),
    Table("detail", "emoji-dit-s", "ddim", LONG, (4,), WARMUPS[:4], captions=4, detail=True, rounds=1),
    Table(
        "strategies",
        *("emoji-dit-s", "ddim", LONG, (4,), ("fixed(1)",)),
        strategies=("naive", "pipefusion", *compressed("int8", "int4")),
    ),
    Table("objectives", "emoji-dit-s", "ddim", LONG, (4,), SPREAD[1:]),
    Table("objectives", "dit-epsilon", "ddim", LONG, (4,), (*WARMUPS, *SPREAD)),
    Table("objectives", "emoji-sd3", "euler", LONG, (4,), (*WARMUPS, *SPREAD), captions=4),
    Table("degrees", "emoji-dit-s", "ddim", LONG, (1,), ("fixed(1)",), strategies=ALONE),
    Table("degrees", "dit-epsilon", "ddim", LONG, (1, 2, 8), ("fixed(1)",)),
    Table("degrees", "emoji-sd3", "euler", LONG, (1, 2, 8), ("fixed(1)",), captions=4),
    *(
        Table("codecs", *model, (4,), ("fixed(1)",), strategies=("displaced", *CODECS, *PREDICTED), rounds=1)
        for model in (FLOW, ("emoji-flux", "euler", 12), SMALL, VIDEO)
    ),
    Table("detail", "emoji-sd3", "euler", LONG, (4,), ("fixed(1)",), captions=4, detail=True, rounds=1),
    Table("detail", "dit-epsilon", "ddim", LONG, (4,), ("fixed(1)",), captions=4, detail=True, rounds=1),
    Table("videos", *VIDEO, (4,), BEGINNINGS, strategies=("displaced", "displaced+linear"), rounds=1),
]
PARTS = tuple(dict.fromkeys(table.part for table in TABLES))


def parent_of(model: str) -> str:
    """The embedded model whose guidance a model has."""
    return RELATIVES.get(model, model)


def folder_of(model: str, models: Path) -> Path:
    """Where a model is."""
    from ditmesh import zoo

    return models / model / "out" if model in RELATIVES else zoo.path(model)


def setup_of(folder: Path, name: str, parent: str, steps: int) -> Any:
    """What all images of a study share; ``parent``: the embedded model whose guidance and sizes it has."""
    from ditmesh import zoo
    from ditmesh.generate.model_info import find_model
    from ditmesh.lab.study import plan

    info, known = find_model(folder), zoo.EMBEDDED[parent]
    return plan.Setup(
        model=str(folder),
        name=name,
        weights=plan.weights_digest(folder),
        steps=steps,
        guidance=known.guidance_scale,
        # Elsewhere the pipeline takes the transformer's own; FLUX's has none.
        size=None if "sample_size" in info.transformer else info.default_size,
        max_sequence_length=known.max_sequence_length,
        frames=known.frames or None,
    )


def plan_of(table: Table, rounds: int, models: Path) -> Any:
    """The study's plan; that of fewer rounds is the beginning of that of more."""
    from ditmesh import zoo
    from ditmesh.generate.job import class_numbers
    from ditmesh.generate.model_info import find_model
    from ditmesh.lab.study import plan

    folder, parent = folder_of(table.model, models), parent_of(table.model)
    info, captions = find_model(folder), zoo.captions(parent)
    every = len(captions) // table.captions
    prompts = captions[every // 2 :: every][: table.captions]
    setup = setup_of(folder, table.model, parent, table.steps)
    return plan.make_plan(
        setup,
        info,
        devices=table.devices,
        warmups=table.warmups,
        samplers=(table.sampler,),
        strategies=table.strategies,
        prompts=prompts,
        labels=class_numbers(prompts, info),
        images=rounds,
        batch=table.captions,
        detail=table.detail,
    )


def measure(tables: list[Table], out: Path, rounds: int, models: Path) -> None:
    """Draw what is missing, round by round."""
    from rich.console import Console

    from ditmesh.lab.study.plan import Cell
    from ditmesh.lab.study.store import Store, run_cells

    console = Console(stderr=True, highlight=False)
    for count in range(1, rounds + 1):
        for table in tables:
            if table.rounds is not None and count > table.rounds:
                continue

            def told(cell: Cell | None, total: int, table: Table = table, count: int = count) -> None:
                if cell is not None:
                    console.print(f"round {count}, {table.name}: {cell.describe()}", markup=False)

            run_cells(plan_of(table, count, models), Store(out / table.store), on_cell=told)


def finished(tables: list[Table], out: Path, rounds: int, models: Path) -> Iterator[tuple[Table, Any]]:
    """What is there of every table, in rounds that are whole; with the study's page beside its cells."""
    from ditmesh.lab.study.analysis import StudyResults
    from ditmesh.lab.study.page import write
    from ditmesh.lab.study.store import Store

    for table in tables:
        if not (out / table.store).is_dir():
            continue
        store = Store(out / table.store)
        for count in range(min(rounds, table.rounds or rounds), 0, -1):
            plan = plan_of(table, count, models)
            cells = [store.get(cell, plan.setup) for cell in plan.cells]
            if all(cell is not None for cell in cells):
                results = StudyResults(plan, [cell for cell in cells if cell is not None])
                if table.store == table.name:
                    write(results, out / table.name)
                yield table, results
                break


def seeds_of(results: Any) -> tuple[int, list[int]]:
    """How many pictures there are, and their seeds."""
    seeds = [seed for _, _, seed in results.synchronous]
    return len(seeds), sorted(set(seeds))


def figures_of(results: Any) -> dict[str, Any]:
    """Everything that is printed or drawn of a study, as plain data."""
    plan = results.plan
    sampler, strategy = plan.samplers[0], plan.strategies[0]
    return {
        "images": seeds_of(results)[0],
        "seeds": seeds_of(results)[1],
        "prompts": sorted({prompt for _, prompt, _ in results.synchronous}),
        "rows": [row_of(results, at) for at in results.by],
        "rule": results.rule(sampler, strategy),
    }


def row_of(results: Any, at: Any) -> dict[str, Any]:
    """A combination: means, every picture's PSNR, the prediction's error by step, and what details there are."""
    errors = [(error.value, error.error) for error in results.prediction_errors(at)]
    first = results.by[at][0]
    details = ("attention_error", "same_latents")
    return rounded(
        asdict(results.row(at))
        | {"each": list(results.psnr_of(at).values()), "prediction_error": errors}
        | {"synchronous_steps": [step["step"] for step in first.get("steps", ()) if step["synchronous"]]}
        | {name: first[name] for name in details if name in first}
        | places_of(first)
    )


def places_of(first: dict[str, Any]) -> dict[str, Any]:
    """Of a request with details: the prediction's error by row of tokens and step, and by place over stale steps."""
    import numpy as np

    if "token_error" not in first:
        return {}
    values = np.array(first["token_error"]) ** 2
    waits = {step["step"] for step in first.get("steps", ()) if step["synchronous"]}
    stale = [step for step in range(len(values)) if step not in waits]
    if not stale:
        return {}
    rows, places = np.sqrt(values.mean(2)), np.sqrt(values[stale].mean(0))
    return {"error_by_row": rounded(rows.tolist(), 3), "error_by_place": rounded(places.tolist(), 3)}


def rounded(value: Any, digits: int = 5) -> Any:
    """The same with numbers of so many digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {name: rounded(each, digits) for name, each in value.items()}
    return [rounded(each, digits) for each in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Measure, and write the figures."""
    parser = command_line(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--model", action="append", help="default: all that the tables name")
    parser.add_argument("--sampler", action="append", help="default: all that the tables name")
    parser.add_argument("--images", type=int, default=3, help="pictures of every caption, each with its own seed")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="what is finished")
    parser.add_argument("--models", type=Path, default=Path("runs/relatives"), help="what training/relatives.py made")
    parser.add_argument("--show", action="store_true", help="draw nothing; figures of what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = [
        table
        for table in TABLES
        if table.part in (options.part or [table.part])
        and table.model in (options.model or [table.model])
        and table.sampler in (options.sampler or [table.sampler])
        and (folder_of(table.model, options.models) / "model_index.json").exists()
    ]
    if not options.show:
        measure(tables, options.out, options.images, options.models)
    found = list(finished(tables, options.out, options.images, options.models))
    figures = {
        "machine": describe_machine(),
        "tables": [{"table": asdict(table), **figures_of(results)} for table, results in found],
        "relatives": {
            name: json.loads(record.read_text(encoding="utf-8"))
            for name in RELATIVES
            if (record := options.models / name / "out" / "training.json").exists()
        },
    }
    write_compactly(figures, options.json)


if __name__ == "__main__":
    main()

"""How far predictions are from measured steps, and how often the configuration picked is the fastest.

    python benchmarks/planner.py measure out.json      # two ranks; wants a quiet machine
    python benchmarks/planner.py report out.json       # fits on one half of the cases, reports on the other
    python benchmarks/planner.py published             # tables of others: predictions beside their figures
    python benchmarks/planner.py works                # writes the work of the models whose sizes ship

A case is a model's shape, a number of tokens, and guidance on or off; under each all configurations of two ranks are
measured, over shared memory and over gloo: each has a copy of the model, and they take turns step by step. Before and
after every step a loop says how busy both cores are (`benchmarks/quiet.py`), and one least-squares fit over all steps
how far that shows in them; a configuration's time is the median of what its steps would have taken on quiet cores. What
a file has already counts too, so that measuring can go on another time. Half of the cases fit a factor for each class
of terms; the errors are those of the other half.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import yaml

from harness import command_line
from machine import describe_machine
from quiet import at_best, exponents, together

TEXT = 64
# Seconds for which a step waits for a quiet moment.
WAIT = 1.0
EVERY = slice(None)
SIDES = (16, 24, 32)
FLUX = {"patch_size": 1, "in_channels": 64, "joint_attention_dim": 256, "pooled_projection_dim": 128}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        "bsc",
        {
            **FLUX,
            "num_layers": 2,
            "num_single_layers": 4,
            "attention_head_dim": 64,
            "num_attention_heads": 8,
            "axes_dims_rope": (16, 24, 24),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        "bchw",
        {
            "sample_size": 64,
            "num_layers": 6,
            "attention_head_dim": 64,
            "num_attention_heads": 6,
            "joint_attention_dim": 256,
            "caption_projection_dim": 384,
            "pooled_projection_dim": 128,
        },
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        "bchw",
        {
            "num_layers": 6,
            "attention_head_dim": 48,
            "num_attention_heads": 10,
            "cross_attention_dim": 480,
            "caption_channels": 256,
            "sample_size": 64,
        },
    ),
    "wan": (
        "WanTransformer3DModel",
        "bcfhw",
        {
            "num_layers": 6,
            "attention_head_dim": 64,
            "num_attention_heads": 6,
            "text_dim": 256,
            "freq_dim": 64,
            "ffn_dim": 1152,
        },
    ),
}
EXACT: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "ulysses=2": {"ulysses": 2},
    "ring=2": {"ring": 2},
    "tensor=2": {"tensor": 2},
}
STALE = {"displaced": {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}}
GUIDED = {"cfg=2": {"cfg": 2}}


def cases() -> Iterator[dict[str, Any]]:
    """Model, side, guidance: 24 of them."""
    for name in MODELS:
        for side in SIDES:
            for branches in (1, 2):
                yield {"model": name, "side": side, "branches": branches}


def configurations(branches: int) -> dict[str, dict[str, Any]]:
    """Those of a case, by name."""
    plain = {**EXACT, **STALE, **(GUIDED if branches == 2 else {})}
    return {
        f"{name}{' over gloo' if gloo else ''}": {**settings, **({"shared_memory": False} if gloo else {})}
        for gloo in (False, True)
        for name, settings in plain.items()
        if not (gloo and not settings)
    }


@cache
def model_of(name: str) -> torch.nn.Module:
    """The model with random weights."""
    import diffusers

    torch.manual_seed(0)
    kind, _, config = MODELS[name]
    return getattr(diffusers, kind)(**config).eval()


@cache
def inputs_of(name: str, side: int, branches: int) -> dict[str, Any]:
    """Arguments of its forward, a row for each branch."""
    from ditmesh.layout.conventions import CallVariant, Conventions, Size

    return Conventions(model_of(name), CallVariant(MODELS[name][1])).inputs(Size(side, side, TEXT, batch=branches))


@cache
def mesh_of(config: str) -> Any:
    """The mesh of a configuration, made once."""
    import ditmesh

    return ditmesh.Mesh(ditmesh.ParallelConfig(**json.loads(config)))


def turns(case: dict[str, Any], count: int) -> list[dict[str, tuple[float, float, float, float]]]:
    """So many turns of every configuration: seconds of a step on this rank, by the clock and of the processor.

    And how quiet all ranks' cores were before and after it.

    One rank's step is the first rank's while the others wait. Of a stale configuration the second of two steps counts:
    what it sends behind the last one is nobody else's time.
    """
    import copy
    from contextlib import ExitStack

    import torch.distributed as dist

    import ditmesh

    inputs, step = inputs_of(case["model"], case["side"], case["branches"]), 0

    def once(model: torch.nn.Module, runs: bool) -> tuple[float, float, float, float]:
        nonlocal step
        step += 1
        made = {**inputs, "timestep": inputs["timestep"] * (1 - 0.5 * step / (24 * (count + 2)))}
        before = together(wait=WAIT)
        start, busy = time.perf_counter(), time.process_time()
        with torch.no_grad():
            if runs:
                model(**made)
        wall, busy = time.perf_counter() - start, time.process_time() - busy
        return wall, busy, before, together()

    found: list[dict[str, tuple[float, float, float, float]]] = []
    with ExitStack() as stack:
        contenders: dict[str, tuple[torch.nn.Module, bool, int]] = {}
        for name, config in configurations(case["branches"]).items():
            model = copy.deepcopy(model_of(case["model"]))
            if config:
                stack.enter_context(ditmesh.parallelized(model, config, mesh=mesh_of(json.dumps(config))))
                ditmesh.engine_of(model).begin_request(2 * (count + 2))
            contenders[name] = model, bool(config) or dist.get_rank() == 0, 2 if name.startswith("displaced") else 1
        for _ in range(count + 2):
            found.append(
                {name: [once(model, runs) for _ in range(n)][-1] for name, (model, runs, n) in contenders.items()}
            )
    return found[2:]


def measure(out: Path, minutes: float, count: int) -> None:
    """Measure every case, again and again; the file is written after every round, and goes on where it is there.

    Args:
        out: file.
        minutes: at least one round, and new ones for so long.
        count: turns in a round of the cases with most tokens; those with fewer have more.
    """
    from ditmesh.forecast.plan.profile import profile
    from ditmesh.launch import RankPool

    data = json.loads(out.read_text()) if out.exists() else {"profiles": [], "cases": []}
    found = data["cases"] or [{**case, "rounds": []} for case in cases()]
    profiles = data["profiles"]
    begun = len(profiles)
    with RankPool(2, threads=1, device="cpu") as pool:
        end = time.monotonic() + 60 * minutes
        while len(profiles) == begun or time.monotonic() < end:
            profiles.append([each.model_dump() for each in profile(pool) if each])
            for case in found:
                shape = {key: case[key] for key in ("model", "side", "branches")}
                often = round(count * (SIDES[-1] / case["side"]) ** 2)
                ranks = pool.run(turns, shape, often)
                # A step takes as long as its slowest rank.
                case["rounds"].append(
                    {
                        name: [
                            [round(max(each), 5) for each in zip(*(rank[at][name] for rank in ranks), strict=True)]
                            for at in range(often)
                        ]
                        for name in ranks[0][0]
                    }
                )
            out.write_text(json.dumps({"machine": describe_machine(), "profiles": profiles, "cases": found}))
            print(f"round {len(profiles)} of {len(found)} cases", flush=True)


def samples_of(case: dict[str, Any], clock: int, part: slice = EVERY) -> dict[str, list[list[float]]]:
    """Steps of every configuration of a case: seconds, and how busy the cores were before and after."""
    return {
        name: [[step[clock], *step[2:]] for one in case["rounds"] for step in one[name][part]]
        for name in case["rounds"][0]
    }


def times_of(samples: dict[str, list[list[float]]], shown: tuple[float, float]) -> dict[str, float]:
    """Seconds of a step of every configuration of a case: see the top."""
    return {name: statistics.median(at_best(step, shown) for step in steps) for name, steps in samples.items()}


@cache
def works() -> dict[str, Any]:
    """Every model's work."""
    from ditmesh.forecast.model_work import work_of
    from ditmesh.layout import known_models
    from ditmesh.layout.describe import meta_model

    return {name: work_of(meta_model(kind, config), known_models()[kind]) for name, (kind, _, config) in MODELS.items()}


def prediction(case: dict[str, Any], name: str, hardware: dict[str, Any]) -> Any:
    """What is predicted for a configuration of a case."""
    from ditmesh import ParallelConfig
    from ditmesh.forecast.costs.work import Workload
    from ditmesh.forecast.prediction import predict

    config = configurations(case["branches"])[name]
    job = Workload.of_tokens(case["side"] ** 2, TEXT, branches=case["branches"], steps=10, element=4)
    chosen = hardware["gloo" if "gloo" in name else "shared"]
    return predict(ParallelConfig(**config), works()[case["model"]], job, chosen)


def report(path: Path, clock: str) -> dict[str, Any]:
    """Fit on every other case, report on the others; then the other way round.

    Args:
        path: what `measure` has written.
        clock: "seconds" of the wall, or of the "processor", which a busy machine leaves alone.
    """
    from ditmesh.forecast.costs.hardware import Hardware

    data = json.loads(path.read_text())
    which = ["seconds", "processor"].index(clock)
    shown = exponents([steps for case in data["cases"] for steps in samples_of(case, which).values()])
    for case in data["cases"]:
        case["seconds"] = times_of(samples_of(case, which), shown)
    shared, *others = fastest([[Hardware(**each) for each in one] for one in data["profiles"]])
    if clock == "processor":
        # Which does not see what the other rank takes.
        alone = shared.device.model_copy(update={"contention_factor": 1.0})
        shared, *others = (one.model_copy(update={"device": alone}) for one in (shared, *others))
    plain = {"shared": shared, "gloo": others[0] if others else shared}
    result: dict[str, Any] = {"machine": data["machine"]["text"]}
    everything = list(range(len(data["cases"])))
    # Neither half has all of one model, side or guidance.
    halves = [[at for at in everything if (at + at // 2 + at // 6) % 2 == half] for half in (0, 1)]
    for label, fit_on, seen in (
        ("profile alone", [], everything),
        ("first half fits the second", halves[0], halves[1]),
        ("second half fits the first", halves[1], halves[0]),
    ):
        hardware = refit(plain, [data["cases"][at] for at in fit_on]) if fit_on else plain
        result[label] = judged([data["cases"][at] for at in seen], hardware)
    result["measuring alone"] = repeated(data["cases"], which, shown)
    print(json.dumps(result, indent=1))
    return result


def fastest(profiles: Sequence[Sequence[Any]]) -> list[Any]:
    """Of several profiles of one machine the fastest device and the fastest of every collective: the best counts."""
    device = max((one[0].device for one in profiles), key=lambda device: device.matmul)
    device = device.model_copy(update={"contention_factor": min(one[0].device.contention_factor for one in profiles)})
    made = []
    for at, first in enumerate(profiles[0]):
        links = [one[at].link for one in profiles]
        collectives = {
            name: min((link.collectives[name] for link in links), key=lambda speed: speed.seconds(1e6))
            for name in first.link.collectives
        }
        usual = collectives["all_to_all"].model_dump() if collectives else {}
        link = links[0].model_copy(update={"collectives": collectives, **usual})
        made.append(first.model_copy(update={"device": device, "link": link}))
    return made


def refit(plain: dict[str, Any], some: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Profiles with factors that fit some cases, those of each transport by themselves."""
    from ditmesh.forecast.fit import fit_profile

    made = {}
    for transport, hardware in plain.items():
        measured = [
            (prediction(case, name, plain).stale, 1 if name == "1 rank" else 2, seconds)
            for case in some
            for name, seconds in case["seconds"].items()
            if ("gloo" in name) == (transport == "gloo") or name == "1 rank"
        ]
        made[transport] = fit_profile(hardware, measured)
    return made


def choices(case: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Of what a configuration is picked: exact ones and all of them, over each transport."""
    for transport in ("", " over gloo"):
        for which, left_out in (("exact", "displaced"), ("with stale", "-")):
            names = [name for name in case["seconds"] if name.endswith("gloo") == bool(transport) or name == "1 rank"]
            yield which, [name for name in names if not name.startswith(left_out)]


def repeated(some: Sequence[dict[str, Any]], clock: int, shown: tuple[float, float]) -> dict[str, Any]:
    """How good the picks are of one who measures everything: those of every other turn, judged by the others.

    No prediction can be shown to be better than that.
    """
    picks: dict[str, list[float]] = {"exact": [], "with stale": []}
    apart = []
    for case in some:
        halves = [times_of(samples_of(case, clock, slice(half, None, 2)), shown) for half in (0, 1)]
        apart += [abs(halves[0][name] / halves[1][name] - 1) for name in halves[0]]
        for picked_by, judge in (halves, halves[::-1]):
            for which, names in choices(case):
                picked = min(names, key=lambda name: picked_by[name])
                picks[which].append(judge[picked] / min(judge[name] for name in names))
    return {
        "halves apart": {"median": round(statistics.median(apart), 4), "mean": round(statistics.mean(apart), 4)},
        "picked fastest or within 5 %": _share(picks),
    }


def _share(picks: dict[str, list[float]]) -> dict[str, str]:
    return {which: f"{sum(loss <= 1.05 for loss in each)} of {len(each)}" for which, each in picks.items()}


def judged(some: Sequence[dict[str, Any]], hardware: dict[str, Any]) -> dict[str, Any]:
    """Errors of predicted steps, and how good the configurations are that would be picked."""
    errors: dict[str, list[float]] = {}
    picks: dict[str, list[float]] = {"exact": [], "with stale": []}
    for case in some:
        times = case["seconds"]
        predicted = {name: prediction(case, name, hardware).step for name in times}
        for name in times:
            errors.setdefault(name, []).append(predicted[name] / times[name] - 1)
        for which, names in choices(case):
            picked = min(names, key=lambda name: predicted[name])
            picks[which].append(times[picked] / min(times[name] for name in names))
    every = [abs(error) for each in errors.values() for error in each]
    return {
        "cases": len(some),
        "steps": len(every),
        "mean absolute error": round(statistics.mean(every), 4),
        "of configurations": {
            name: {"mean": round(statistics.mean(each), 3), "absolute": round(statistics.mean(map(abs, each)), 3)}
            for name, each in errors.items()
        },
        "factors": {
            name: each.scale | {"crowded": each.device.contention_factor, "seconds apart": each.link.sync_wait_seconds}
            for name, each in hardware.items()
        },
        "picked fastest or within 5 %": _share(picks),
        "most lost by a pick": {which: round(max(each) - 1, 3) for which, each in picks.items()},
    }


TABLES = Path(__file__).with_name("published")


def published() -> dict[str, Any]:
    """Predictions beside published tables: errors, rank correlation, winners. Nothing is fitted to them."""
    from ditmesh import ParallelConfig
    from ditmesh.forecast.catalogue import shape
    from ditmesh.forecast.costs.hardware import Hardware, device, link
    from ditmesh.forecast.costs.work import Workload
    from ditmesh.forecast.prediction import predict
    from ditmesh.forecast.shipped import shipped_model

    result: dict[str, Any] = {}
    for path in sorted(TABLES.glob("*.yaml")):
        table = yaml.safe_load(path.read_text())
        known = shape(table["model"])
        work = shipped_model(known).work
        image = known.tokens(*table["size"], table.get("frames", 1))
        asked = {"branches": table["branches"], "batched": known.batched, "steps": table["steps"]}
        job = Workload.of_tokens(image, table.get("text", known.text), **asked)
        hardware = Hardware(device=device(table["device"]), link=link(table["link"]), devices=table["devices"])
        rows = [(row["config"], row["seconds"]) for row in table["rows"]]
        predicted = [predict(ParallelConfig(**config), work, job, hardware).latency for config, _ in rows]
        times = [seconds for _, seconds in rows]
        # The row of one device says how fast that machine is; it is then no prediction.
        base = next((at for at, (config, _) in enumerate(rows) if not config), None)
        factor = times[base] / predicted[base] if base is not None else None
        others = [at for at in range(len(rows)) if at != base]
        result[path.stem] = {
            "source": table["source"],
            "rows": [
                {"config": ParallelConfig(**config).describe(), "seconds": seconds, "predicted": round(guess, 2)}
                for (config, seconds), guess in zip(rows, predicted, strict=True)
            ],
            "mean absolute error": _error(predicted, times, range(len(rows))),
            "scaled by the row of one device": None
            if factor is None
            else _error([guess * factor for guess in predicted], times, others),
            "rank correlation": round(rank_correlation(predicted, times), 3),
            "winner predicted": predicted.index(min(predicted)) == times.index(min(times)),
            "loss of the predicted winner": round(times[predicted.index(min(predicted))] / min(times) - 1, 3),
        }
    shares = [each["winner predicted"] for each in result.values()]
    result["winners predicted"] = f"{sum(shares)} of {len(shares)}"
    print(json.dumps(result, indent=1))
    return result


def write_works() -> None:
    """The work of every model of the catalogue, beside the sizes that ship."""
    from ditmesh.forecast.catalogue import shapes
    from ditmesh.forecast.shipped import WORKS, shipped_data

    WORKS.mkdir(exist_ok=True)
    for name, one in shapes().items():
        (WORKS / f"{name}.json").write_text(json.dumps(shipped_data(one), separators=(",", ":")) + "\n")
        print(name, flush=True)


def _error(predicted: Sequence[float], times: Sequence[float], which: Any) -> float:
    return round(statistics.mean(abs(predicted[at] / times[at] - 1) for at in which), 3)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]

    return statistics.correlation(ranks(one), ranks(other))


if __name__ == "__main__":
    parser = command_line(__doc__, figures=False)
    parser.add_argument("what", choices=["measure", "report", "published", "works"])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=10, help="measure at least once, and for so long")
    parser.add_argument("--turns", type=int, default=3, help="turns in a round of the cases with most tokens")
    parser.add_argument("--clock", choices=["seconds", "processor"], default="seconds", help="what is reported on")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.file, options.minutes, options.turns)
    elif options.what == "report":
        report(options.file, options.clock)
    elif options.what == "works":
        write_works()
    else:
        published()

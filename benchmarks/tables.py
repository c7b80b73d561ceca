"""The tables of docs/lab, printed again from benchmarks/measured without a new run.

    python benchmarks/tables.py                # all of them, as Markdown
    python benchmarks/tables.py --only links
    python benchmarks/tables.py --write        # into the English pages

In a page a table stands behind a comment ``<!-- table: NAME -->``. Chinese pages have the same numbers in words of
their own; a test compares both. Warm-ups and messages of older versions have today's names here (`TODAY`).
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


import numpy as np

from figures import MEASURED, Tables, few_images, lines, read
from harness import command_line, paired_ratios
from steps import SAMPLERS as OF_STEPS
from steps import STEPS, policy

DOCS = Path(__file__).resolve().parents[1] / "docs"
TODAY = {
    "first_last(1, 4)": "steps(0 46 47 48 49)",
    "first_last(1, 2)": "steps(0 14 15)",
    "periodic(5)": "every fifth step",
    "periodic(6)": "steps(0 6 12)",
    "displaced-residual4": "`int4`",
    "displaced-int8": "`int8`",
    "displaced": "displaced",
    "displaced+linear": '`predict="linear"`',
    "pipefusion": "PipeFusion, 4 patches",
    "naive": "naive",
}
WAYS = {f"window {tolerance}": f"a window of steps, tolerance {tolerance}" for tolerance in (0.1, 0.01)}
WAYS |= {"displaced+linear": "displaced patches", "naive": "naive patches", "turning": "naive patches, cut in turn"}
SAMPLERS = {"ddim": "DDIM", "dpm": "DPM-Solver++", "unipc": "UniPC", "ddpm": "DDPM", "euler": "Euler", "heun": "Heun"}
POLICIES = {"fixed(0)": "`fixed(0)`", "fixed(4)": "`fixed(4)`", "ends": "two at each end", "quarters": "one a quarter"}
Row = Sequence[str]


def mean_error(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def apart(row: dict[str, Any], base: dict[str, Any]) -> list[float]:
    """Differences of the same images."""
    return [a - b for a, b in zip(row["each"], base["each"], strict=True)]


def signed(values: Sequence[float], digits: int = 1) -> str:
    """A mean difference, and for how many images it is positive."""
    error, closer = statistics.stdev(values) / len(values) ** 0.5, sum(value > 0 for value in values)
    return f"{statistics.mean(values):+.{digits}f} ± {error:.{digits}f} ({closer} of {len(values)})"


TABLES_OF_QUALITY = Tables()


def quality_row(parts: str, model: str, sampler: str = "", **wanted: Any) -> dict[str, Any]:
    """The first row of `quality.py` with these values in these parts' tables."""
    wanted = {"warmup": "fixed(1)", "strategy": "displaced", "devices": 4} | wanted
    for table in TABLES_OF_QUALITY.all:
        of = table["table"]
        if of["part"] in parts.split() and of["model"] == model and sampler in ("", of["sampler"]):
            for row in Tables.rows(table, **wanted):
                return row
    raise KeyError(f"{parts}, {model}, {wanted}")


# What a model predicts, its name, and the parts with its rows.
KINDS = (
    ("velocity, `emoji-dit-s`", "emoji-dit-s", "experiment objectives"),
    ("noise, `dit-epsilon`", "dit-epsilon", "objectives degrees"),
    ("flow, `emoji-sd3`", "emoji-sd3", "objectives degrees"),
)
WARMUPS = ("fixed(0)", "fixed(1)", "fixed(4)", "fixed(10)", "fixed(40)", "first_last(1, 4)", "periodic(5)")
WARMUPS += ("adaptive(0.001, 10)",)


def of_images(row: dict[str, Any], base: dict[str, Any] | None = None) -> list[str]:
    """Mean PSNR, the worst image, SSIM, and how far from the same images of another row."""
    less = "" if base is None or base is row else signed(apart(row, base))
    return [mean_error(row["each"]), f"{min(row['each']):.1f}", f"{row['ssim']['value']:.4f}", less]


def small(value: float) -> str:
    """A relative difference."""
    return f"{value:.1e}".replace("e-0", "e-") if value else "0"


def named(warmup: str) -> str:
    """A warm-up by today's name."""
    name = TODAY.get(warmup, warmup)
    return f"`{name}`" if "(" in name else name


def devices() -> Iterator[Row]:
    """Images by what the model predicts and the number of devices."""
    yield "model", "N", "PSNR, dB", "worst image", "SSIM", "less N / 2"
    for title, model, parts in KINDS:
        sampler = "euler" if model == "emoji-sd3" else "ddim"
        rows = [quality_row(parts, model, sampler, devices=count) for count in (2, 4, 8)]
        for count, row, before in zip((2, 4, 8), rows, rows[:1] + rows, strict=False):
            yield title, f"{count}", *of_images(row, before)


def costs() -> Iterator[Row]:
    """Means of `steps.py` with the default moved keys and one synchronous step, by the number of steps."""
    yield "steps", *OF_STEPS
    ways = ("displaced", "displaced"), ("pipefusion", "PipeFusion")
    for (strategy, title), count in product(ways, (4, 8, 12, 20, 50)):
        wanted: dict[str, Any] = {"strategy": f"{strategy}+linear", "steps": count}
        means = [few_images(**wanted, model=model, sampler=own) for model, (own, *_) in OF_STEPS.items()]
        yield f"{title}, {count}", *(f"{statistics.mean(images):.1f}" if images else "" for images in means)


def less_moved(**wanted: Any) -> list[str]:
    """Differences of images from those with moved keys, `fixed(1)` and the own sampler, by the steps."""
    cells = []
    for count in STEPS:
        own: dict[str, Any] = {"model": wanted["model"], "sampler": OF_STEPS[wanted["model"]][0], "steps": count}
        own["strategy"] = "displaced+linear"
        other: dict[str, Any] = wanted | {"warmup": policy(wanted.get("warmup", "fixed(1)"), count)}
        pair = few_images(**own | other), few_images(**own)
        # Images with the bits of the exact ones are at no number of decibels.
        apart = [a - b for a, b in zip(*pair, strict=False) if a is not None]
        cells.append(signed(apart).split(" (")[0] if apart else "exact" * bool(pair[0]))
    return cells


def steps() -> Iterator[Row]:
    """Images of `steps.py` by the number of steps: keys as they are → moved on (gain; worst image)."""
    yield "steps", *OF_STEPS
    for (strategy, title), count in product((("displaced", "displaced"), ("pipefusion", "PipeFusion")), STEPS):
        cells = []
        for model, (sampler, *_) in OF_STEPS.items():
            wanted = {"model": model, "sampler": sampler, "steps": count}
            # Of rounds that are not whole, the images that both have.
            pairs = [*zip(*(few_images(strategy + more, **wanted) for more in ("", "+linear")), strict=False)]
            plain, moved, gain = ([pair[0] for pair in pairs], [pair[1] for pair in pairs], [b - a for a, b in pairs])
            means = f"{statistics.mean(plain):.1f} → {statistics.mean(moved):.1f}" if gain else ""
            cells.append(f"{means} ({signed(gain).split(' (')[0]}; {min(moved):.1f})" if gain else "")
        yield f"{title}, {count}", *cells


def more_devices() -> Iterator[Row]:
    """Means of the first eight images of `steps.py` with moved keys, by the steps: of 2, 4 and 8 devices."""
    yield "steps", *OF_STEPS
    for count in STEPS:
        cells = []
        for model, (sampler, *_) in OF_STEPS.items():
            wanted = {"model": model, "sampler": sampler, "steps": count}
            of_devices = [few_images("displaced+linear", devices, round=0, **wanted) for devices in (2, 4, 8)]
            cells.append(", ".join(f"{statistics.mean(some):.1f}" for some in of_devices) if all(of_devices) else "")
        yield str(count), *cells


def few_steps() -> Iterator[Row]:
    """Samplers of `steps.py` by the number of steps, on four devices with moved keys: less the model's own sampler."""
    yield "model", "sampler", *(f"{count} steps" for count in STEPS)
    for model, (_, *others) in OF_STEPS.items():
        for sampler in others:
            yield f"`{model}`", SAMPLERS[sampler], *less_moved(model=model, sampler=sampler)


def other_ways() -> Iterator[Row]:
    """Warm-ups, messages and naive patches of `steps.py`: less moved keys with one synchronous step."""
    yield "model", "devices have", *(f"{count} steps" for count in STEPS)
    for model in OF_STEPS:
        for warmup, title in POLICIES.items():
            yield f"`{model}`", title, *less_moved(model=model, warmup=warmup)
        for strategy, title in (("displaced-int4+linear", "`int4`"), ("naive", "naive")):
            yield f"`{model}`", title, *less_moved(model=model, strategy=strategy)


def by_devices(form: str, **wanted: Any) -> str:
    """Numbers of `other_axes.py` for 2, 4 and 8 devices; nothing before all three are measured."""
    some = [row for row in lines("other-axes") if wanted.items() <= row.items()]
    for row in some:
        mean, rounds, sent = (float(np.mean(row.get(key, 1))) for key in ("psnr", "rounds", "sent"))
        row |= {"mean": mean, "worst": min(row["psnr"]), "MB": sent / 1e6, "ratio": row["steps"] / rounds}
    return ", ".join(form.format(**row) for row in some) if len(some) == 3 else ""


def axes() -> Iterator[Row]:
    """Images of `other_axes.py` at 12 steps, and what all devices send for one image: of 2, 4 and 8 devices."""
    yield "model", "devices have", "PSNR, dB", "worst image", "sent, MB"
    for model, (way, title) in product(("emoji-flux", "emoji-sd3", "emoji-dit-s", "emoji-dit-l"), WAYS.items()):
        cells = [by_devices(form, model=model, way=way, steps=12) for form in ("{mean:.1f}", "{worst:.1f}", "{MB:.2f}")]
        if cells[0]:
            yield f"`{model}`", title, *cells


def rounds() -> Iterator[Row]:
    """Windows of `other_axes.py` by the number of steps: steps over rounds, and decibels, of 2, 4 and 8 devices."""
    yield "model", "tolerance", *(f"{steps} steps: {what}" for steps in (12, 28, 50) for what in ("over rounds", "dB"))
    for model, tolerance in product(("emoji-flux", "emoji-sd3", "emoji-dit-s"), ("0.1", "0.01")):
        forms = product((12, 28, 50), ("{ratio:.2f}", "{mean:.1f}"))
        cells = (by_devices(form, model=model, way=f"window {tolerance}", steps=steps) for steps, form in forms)
        yield f"`{model}`", tolerance, *cells


def objectives() -> Iterator[Row]:
    """Synchronous steps by their places, for three models."""
    yield "synchronous steps", *(title for title, *_ in KINDS)
    for warmup in WARMUPS:
        pairs = [[quality_row(parts, model, warmup=each) for each in (warmup, "fixed(1)")] for _, model, parts in KINDS]
        gains = ["" if row is base else f" ({signed(apart(row, base)).split(' (')[0]})" for row, base in pairs]
        yield named(warmup), *(mean_error(row["each"]) + gain for (row, _), gain in zip(pairs, gains, strict=True))


def student() -> Iterator[Row]:
    """Images of `four_steps.py` in few steps, with its LoRA and without it, beside those in twelve."""
    rows = {(row["lora"], row["steps"]): row for row in lines("four-steps") if row["part"] == "teacher"}
    yield "", *(f"{steps} step{'s' * (steps > 1)}" for steps in (1, 2, 4, 6, 8))
    for measure, title, worst, digits in (("psnr", "PSNR, dB", min, 1), ("perceptual", "ST-LPIPS", max, 4)):
        for adapted, model in ((False, "`emoji-flux`"), (True, "with the LoRA for four steps")):
            some = [rows.get((adapted, steps), {}).get(measure) for steps in (1, 2, 4, 6, 8)]
            cells = (f"{mean_error(each, digits)} ({worst(each):.{digits}f})" if each else "" for each in some)
            yield f"{title}: {model}", *cells


def four_steps() -> Iterator[Row]:
    """What stale keys cost in the four steps of the LoRA of `four_steps.py`."""
    yield "devices have", "devices", "synchronous steps of 4", "PSNR, dB", "worst image"
    for row in lines("four-steps"):
        if row["part"] == "stale":
            cells = named(row["strategy"]), str(row["devices"]), row["warmup"].strip("fixed()")
            yield *cells, mean_error(row["psnr"]), f"{min(row['psnr']):.1f}"


def strategies() -> Iterator[Row]:
    """Strategies at four devices and 50 steps: quality, and what all ranks send."""
    yield "strategy", "PSNR, dB", "worst image", "SSIM", "less displaced", "sent, MB"
    base = quality_row("experiment", "emoji-dit-s", "ddim")
    for name in ("displaced", "pipefusion", "displaced-int8", "naive"):
        row = base if name == "displaced" else quality_row("strategies", "emoji-dit-s", strategy=name)
        sent = f"{sum(row['sent'].values()) / 1e6:,.0f}" if row["sent"] else ""
        yield TODAY[name], *of_images(row, base), sent


def codecs() -> Iterator[Row]:
    """Messages and moved keys on four models, against uncompressed keys as they are; bits of a number in brackets."""
    models = ("emoji-sd3", "emoji-flux", "emoji-dit-s", "emoji-wan")
    yield "", *models
    bases = [quality_row("codecs", model) for model in models]
    yield "uncompressed, dB", *(mean_error(base["each"]) for base in bases)
    for name in ("displaced-int8", "displaced-residual4", "displaced+linear"):
        cells = []
        for model, base in zip(models, bases, strict=True):
            row, steps = quality_row("codecs", model, strategy=name), base["evaluations"]
            full = base["sent"]["ring"] / steps
            bits = 32 * (row["sent"]["ring"] - full) / (full * (steps - 1))
            cell = signed(apart(row, base), 2).split(" (")[0]
            cells.append(cell + ("" if "+" in name else f" ({bits:.1f})"))
        yield TODAY[name], *cells


# Models of `training/relatives.py`, by the name of their three trainings, and what each is compared with.
CLOTHES = {
    "clothes-256-tokens": ("256 tokens, trained on", "clothes-256-tokens"),
    "clothes-1024-tokens": ("1,024 tokens, trained on", "clothes-256-tokens"),
    "clothes": ("256 tokens", "clothes"),
    "clothes-wide": ("256 tokens, twice the width", "clothes"),
}


def tokens() -> Iterator[Row]:
    """Means of three trainings with their standard error, by the number of tokens and the width of the model."""
    yield "models", "of the asked class, %", *(f"N = {n}, dB" for n in (2, 4, 8)), "difference, N = 4", "naive, N = 4"
    rows = {(row["model"], row["row"]): row for row in lines("distribution")}

    def over_seeds(kind: str, name: str) -> list[float]:
        return [statistics.mean(rows[f"{kind}-{seed}", name]["psnr"]) for seed in (0, 1, 2)]

    for kind, (title, other) in CLOTHES.items():
        share = mean_error([100 * rows[f"{kind}-{seed}", "synchronous"]["right"][0] for seed in (0, 1, 2)])
        cells = [over_seeds(kind, f'`predict="linear"`, N = {n}') for n in (2, 4, 8)]
        pairs = zip(cells[1], over_seeds(other, '`predict="linear"`, N = 4'), strict=True)
        difference = "" if kind == other else signed([a - b for a, b in pairs]).split(" (")[0]
        yield title, share, *map(mean_error, cells), difference, mean_error(over_seeds(kind, "naive, N = 4"))


def videos() -> Iterator[Row]:
    """Where a few synchronous steps of a video are worth something."""
    yield "synchronous steps of 16", "displaced, dB", "gain", 'predict="linear", dB', "gain by moving on"
    base = quality_row("videos", "emoji-wan")
    for warmup in ("fixed(1)", "fixed(2)", "fixed(3)", "fixed(4)", "first_last(1, 2)", "periodic(6)"):
        wanted = {"parts": "videos", "model": "emoji-wan", "warmup": warmup}
        plain, moved = quality_row(**wanted), quality_row(**wanted, strategy="displaced+linear")
        gain = "" if plain is base else signed(apart(plain, base))
        yield named(warmup), mean_error(plain["each"]), gain, mean_error(moved["each"]), signed(apart(moved, plain))


def distribution() -> Iterator[Row]:
    """Sets of new images, judged without a reference."""
    yield "model", "images", "of the asked class, %", "same verdict, %", "PSNR, dB", "Fréchet distance", "sharpness"
    for row in lines("distribution"):
        if row["model"] in ("faces", "fashion-dit") and not row["row"].startswith("displaced"):
            share = (f"{100 * value:.1f} ± {100 * error:.1f}" for value, error in (row["right"], row["same_verdict"]))
            psnr = mean_error(row["psnr"]) if "psnr" in row else ""
            distance = f"{row['frechet']:.2f} ± {row['frechet_error']:.2f}" if row["frechet"] > 1e-3 else "0"
            names = row["model"].removesuffix("-dit"), row["row"].replace("synchronous, ", "")
            yield *names, *share, psnr, distance, f"{row['sharpness']:.3f}"


def load() -> Iterator[Row]:
    """Processor time of every rank's steps over the mean of all ranks, without the first step."""
    yield "case", "ranks' means over the mean of all", "seconds inside collectives, share"
    for name, case in read("load")["cases"].items():
        steps = [[step["work_processor"] for step in rank["steps"][1:]] for rank in case["ranks"]]
        means = [statistics.mean(rank) for rank in steps]
        waits = [f"{100 * rank['in_collectives'] / rank['seconds']:.0f} %" for rank in case["ranks"]]
        yield name, ", ".join(f"{value / statistics.mean(means):.3f}" for value in means), ", ".join(waits)


def moving() -> Iterator[Row]:
    """A rank that becomes slow: a step six steps later over that of speeds that were given rightly."""
    yield "rank 1", "shares stay", "tokens move (at step)", "displaced, shares stay", "displaced, tokens move (at step)"
    data = read("moving")
    titles = {
        "stopped": "stopped for every second 10 ms",
        "busy": "shares its core with a loop",
        "nice": "a loop, and a lower priority",
    }
    turns = [(way, titles[way], ranks) for way, ranks in data["ways"].items()]
    turns[2:2] = [(way, "the same, second turn", ranks) for way, ranks in data["again"].items()]

    def late(ranks: list[list[list[float]]]) -> float:
        steps = [max(step[0] for step in both) for both in zip(*ranks, strict=True)]
        return statistics.median(steps[data["slow from"] + 6 :])

    for _, title, ways in turns:
        base = late(ways["ring=2, speeds given"])
        cells = []
        for name in ("ring=2, even", "ring=2, speeds=auto", "displaced, even", "displaced, speeds=auto"):
            moved = [f"{step}" for step, one in enumerate(ways[name][0]) if one[3] and step >= data["slow from"]]
            cells.append(f"{late(ways[name]) / base:.2f}" + (f" ({moved[0]})" if moved else ""))
        yield title, *cells


def true_size() -> Iterator[Row]:
    """One step of DiT-XL/2's shapes."""
    yield "tokens, ranks", "difference from one rank", "processor s", "tensors, GB", "predicted, GB"
    models = [data["models"]["dit-xl-2"] for data in map(read, ("dit-xl-2-1", "dit-xl-2-2")) if data]
    forms = {f"{model['tokens']:,}, {name}": form for model in models for name, form in model["forms"].items()}
    for name, form in forms.items():
        difference, tensors = (max(rank[key] for rank in form["ranks"]) for key in ("difference", "tensors"))
        seconds = sum(rank["processor_seconds"] for rank in form["ranks"])
        sizes = (f"{size / 1e9:.2f}" for size in (tensors, form["predicted"]["tensors"]))
        yield name, small(difference), f"{seconds:.1f}", *sizes


def links() -> Iterator[Row]:
    """Two hosts: seconds of a step, and in brackets over the bound, with and without gloo's threads."""
    yield "", "one host", "sent, MiB per step", "10 Gb/s", "1 Gb/s", "200 Mb/s"
    keys = ("seconds", "ratio to bound", "without gloo")
    for name, row in read("links")["rows"].items():
        # Its keys in four bits are no message of today.
        if "int4" not in name:
            cells = ["{:.2f} ({:.2f}; {:.2f})".format(*(one[key] for key in keys)) for one in row.values()]
            yield name, cells[0], f"{row['2e+08']['MiB sent']:.1f}", *cells[1:]


def overhead() -> Iterator[Row]:
    """What the engine costs the host, with another version beside it."""
    yield "microseconds per block", "13377bf0", "this", "over diffusers", "kernels", "collectives", "syncs per forward"
    rows = {(row["contender"], row["version"]): row for row in read("overhead")["rows"] if "failed" not in row}
    for (name, version), row in rows.items():
        if version == "this":
            times = [rows.get((name, each), {}).get("microseconds") for each in ("that", "this")]
            numbers = (f"{row[key]:.1f}" if key in row else "" for key in ("kernels", "collectives"))
            over = "" if name == "diffusers" else f"{row['over']:+.0f}"
            yield (
                name,
                *("" if t is None else f"{t:.0f}" for t in times),
                over,
                *numbers,
                f"{row['host synchronisations']}",
            )


def exact() -> Iterator[Row]:
    """Exact strategies: speed-up over plain diffusers on one rank, and what reproducible mode takes."""
    heads = {count: read(name)["seconds"] for count, name in ((8, "exact"), (6, "exact-6"), (5, "exact-5"))}
    yield "speed-up, median (min to max)", *(f"{count} heads" for count in heads), "with `reproducible`, times as long"
    alone, *names = heads[8]
    for name in [name for name in names if not name.startswith("reproducible")]:
        ratios = [paired_ratios(times[alone], times[name]) if name in times else [] for times in heads.values()]
        cells = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" if r else "" for r in ratios]
        slower = heads[8].get(f"reproducible, {name.removeprefix('ditmesh, ')}")
        over = f"{statistics.median(paired_ratios(slower, heads[8][name])):.2f}" if slower else ""
        yield name, *cells, over


def ahead() -> Iterator[Row]:
    """A step with values computed ahead, over the step without."""
    rows = {(row["model"], row["mesh"]): row for row in read("ahead")["rows"]}
    yield "seconds with over without", *(meshes := list(dict.fromkeys(mesh for _, mesh in rows))), "same bits"
    for model in dict.fromkeys(name for name, _ in rows):
        found = [rows[model, mesh] for mesh in meshes]
        equal = all(row["equal"] for row in found)
        yield f"`{model}`", *(f"{row['ratio']:.2f}" for row in found), "yes" if equal else "no"


def deadlines() -> Iterator[Row]:
    """A server with and without deadlines."""
    yield (
        "load",
        "seed",
        "in time without deadlines, with",
        "within twice the time",
        "requests per second",
        "p50, s",
        "p95, s",
    )
    runs = {(run["load"], run["seed"], run["deadline"]): run for run in read("deadlines")["runs"]}
    for at, seed in sorted({key[:2] for key in runs}):
        pair = [runs[at, seed, deadline] for deadline in (0.0, 1.5)]
        shares = [", ".join(f"{100 * run['attainment'][share]:.0f} %" for run in pair) for share in ("1.5", "2.0")]
        numbers = (("throughput", 2), ("p50_seconds", 1), ("p95_seconds", 1))
        yield (
            f"{at}",
            f"{seed}",
            *shares,
            *(", ".join(f"{run[key]:.{digits}f}" for run in pair) for key, digits in numbers),
        )


def faults() -> Iterator[Row]:
    """A server while something fails."""
    yield "fault", "after images", "server is back after, s", "next image after, s"
    for row in read("serving-faults")["faults"]:
        yield f"`{row['fault']}`", f"{row['at']}", f"{row['back_seconds']:.1f}", f"{row['next_picture_seconds']:.1f}"


def training_speed() -> Iterator[Row]:
    """Samples a second of two ranks."""
    yield "", "samples/s, median", "relative to 1 rank, median (min to max)", "relative to accelerate, median"
    rates = read("training")["speed"]["samples a second"]
    alone, theirs = rates["1 rank"], rates["accelerate's DDP, 2 ranks"]
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, alone, strict=True)]
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if values is not alone else ""
        against = statistics.median(a / b for a, b in zip(values, theirs, strict=True))
        title = re.sub(r"=2, (ddp|none)", r"=2, `sharding: \1`", name)
        yield title, f"{statistics.median(values):.2f}", f"{statistics.median(ratios):.2f}{spread}", f"{against:.2f}"


def training_curves() -> Iterator[Row]:
    """How far losses of several ranks are from those of one."""
    yield "", "largest difference from 1 rank", "reproducible"
    data = read("training")
    whole, same = (data[key]["largest relative difference"] for key in ("curves", "curves, reproducible"))
    for name in whole:
        if name != "1 rank":
            yield name, small(whole[name]), small(same[name]) if name in same else ""


def reinforcement() -> Iterator[Row]:
    """Rewards of held-out prompts, before and after."""
    runs = read("reinforcement")["learning"]
    first, *_, last = steps = [*runs["0"]["held out"]]
    yield "held-out reward", *(f"after {step} updates" for step in steps), "rise"
    for seed, run in runs.items():
        rewards = run["held out"]
        yield f"seed {seed}", *(f"{each:.3f}" for each in rewards.values()), f"{rewards[last] - rewards[first]:+.3f}"
    for name in [name for name in runs["0"] if name.startswith("held out")]:
        columns = [[run[name][step] for run in runs.values()] for step in steps]
        columns.append([run[name][last] - run[name][first] for run in runs.values()])
        title = "mean ± standard error" if name == "held out" else f"of `{name.removeprefix('held out_')}`"
        yield title, *(mean_error(column, 3) for column in columns)


def sameness() -> Iterator[Row]:
    """How far exact strategies are from one device after 1, 4 and 20 steps."""
    rows = {(row["strategy"], row["tokens"]): row for row in read("sameness")["growth"]}
    strategies, sizes = (list(dict.fromkeys(key[place] for key in rows)) for place in (0, 1))
    yield "strategy", *(f"{tokens:,} tokens" for tokens in sizes), *(f"work, {tokens:,} tokens" for tokens in sizes)
    for name in strategies:
        apart_ = (", ".join(small(value) for value in rows[name, n]["difference"].values()) for n in sizes)
        yield f"`{name}`", *apart_, *(f"{rows[name, n]['work']['ratio']:.2f}" for n in sizes)


def vae() -> Iterator[Row]:
    """An autoencoder in bands."""
    yield "ranks", "processor seconds of a rank", "of one", "peak memory", "of one", "error", "bit-identical"
    for count, row in read("vae")["ranks"].items():
        seconds, share = row["processor seconds"], 1 / row["speed-up of them"]
        equal, peak = "yes" if row["equal"] else "no", f"{row['peak'] / 2**20:.0f} MiB"
        yield count, f"{seconds:.1f}", f"{share:.0%}", peak, f"{row['of one']:.0%}", small(row["error"]), equal


def memory() -> Iterator[Row]:
    """Private memory of the rank with most, in per cent of the weights, and processor seconds of all ranks."""
    data = read("memory")
    yield "", "load", "step", "processor s"
    for form, ranks in data["forms"].items():
        load, step = (max(rank[what] for rank in ranks) / data["weights"] for what in ("load", "step"))
        yield f"`{form}`", f"{load:.0%}", f"{step:.0%}", f"{sum(rank['processor_seconds'] for rank in ranks):.2f}"


def degrees() -> Iterator[Row]:
    """How far exact strategies are from one device after 1 and 4 steps, by the number of ranks and of tokens."""
    rows = {(row["strategy"], row["tokens"]): row["difference"] for row in read("degrees")["growth"]}
    strategies, sizes = (list(dict.fromkeys(key[place] for key in rows)) for place in (0, 1))
    yield "strategy", *(f"{tokens:,} tokens" for tokens in sizes)
    for name in strategies:
        yield f"`{name}`", *(", ".join(small(value) for value in rows[name, count].values()) for count in sizes)


def files() -> Iterator[Row]:
    """Every data file: what wrote it, and where."""
    yield "file in `benchmarks/measured`", "command", "machine, versions, date"
    for path in sorted(MEASURED.glob("*.json*")):
        # Of a file of rows the first line says it.
        data = read(path.stem) or json.loads(path.read_text(encoding="utf-8").partition("\n")[0])
        machine = data["machine"]
        text = machine if isinstance(machine, str) else machine.get("text") or ", ".join(map(str, machine.values()))
        yield f"`{path.name}`", f"`{data['command']}`", text if "date" not in data else f"{text}; {data['date']}"


NAMES = (
    "devices steps axes rounds costs objectives few_steps other_ways more_devices student four_steps "
    "strategies codecs tokens videos distribution load moving true_size links exact ahead overhead deadlines faults "
    "training_speed training_curves reinforcement sameness degrees vae memory files"
)
TABLES: dict[str, Callable[[], Iterator[Row]]] = {name.replace("_", "-"): globals()[name] for name in NAMES.split()}
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)((?:\|.*\n)*)")


def markdown(name: str) -> str:
    """A table as a page has it."""
    head, *rows = TABLES[name]()
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|\n" for row in (head, *rows)]
    return "".join([lines[0], f"|{'---|' * len(head)}\n", *lines[1:]])


def main() -> None:
    """Print, or write into the pages."""
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--only", action="append", choices=TABLES, help="default: all")
    parser.add_argument("--write", action="store_true", help="into the English pages")
    options = parser.parse_args()
    for name in options.only or TABLES:
        print(f"\n{name}: {(TABLES[name].__doc__ or '').strip()}\n\n{markdown(name)}", end="")
    for page in DOCS.rglob("*.md") if options.write else ():
        text = page.read_text(encoding="utf-8")
        if not page.name.endswith(".zh.md"):
            page.write_text(PLACE.sub(lambda match: match[1] + markdown(match[2]), text), encoding="utf-8")


if __name__ == "__main__":
    main()

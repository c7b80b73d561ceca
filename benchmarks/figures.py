"""The figures of pages in docs (findings, reproducible), drawn from benchmarks/measured without a new run.

    python benchmarks/figures.py                      # all of which there are measurements, into docs/images
    python benchmarks/figures.py --only warmup

What it reads is written by `quality.py`, `distribution.py`, `load.py` and `sameness.py`
(``--json``). Every figure says its model, images and seeds; bars are standard errors of the mean over images. Needs
matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

from harness import command_line

HERE = Path(__file__).resolve().parent
MEASURED, IMAGES = HERE / "measured", HERE.parent / "docs" / "images"
# Colours that differ in lightness, too.
COLOURS = ("#1b4f8f", "#d9732e", "#2f8f5b", "#8f3f8f", "#777777", "#b09000")
MARKS = "osD^vP"


def plt() -> Any:
    """matplotlib's pyplot, for small drawings whose text stays text and whose bytes are the same in every run."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "ditmesh",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "figure.dpi": 100,
            "lines.linewidth": 1.4,
            "lines.markersize": 4.5,
            "legend.frameon": False,
        }
    )
    return pyplot


def save(figure: Any, name: str, said: str, page: str = "findings") -> Path:
    """Write a figure of a page with a line below it that says what it is of."""
    figure.tight_layout(rect=(0, 0.07 + 0.04 * said.count("\n"), 1, 1))
    figure.text(0.01, 0.012, said, fontsize=7.5, color="#444444", va="bottom")
    file = IMAGES / f"{page}-{name}.svg"
    figure.savefig(file, metadata={"Date": None, "Creator": None}, facecolor="white")
    plt().close(figure)
    # Ends of lines as the repository has them.
    file.write_text("\n".join(line.rstrip() for line in file.read_text(encoding="utf-8").splitlines()) + "\n", "utf-8")
    return file


def read(name: str) -> dict[str, Any]:
    """Measurements; empty: there are none."""
    file = MEASURED / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


class Tables:
    """The tables of `quality.py`, by part, model and sampler."""

    def __init__(self) -> None:
        self.all = read("experiment").get("tables", [])

    def find(self, part: str, model: str = "", sampler: str = "", steps: int = 0) -> dict[str, Any] | None:
        """A table; None: it was not measured."""
        for one in self.all:
            of = one["table"]
            wanted = (
                (part, of["part"]),
                (model or of["model"], of["model"]),
                (sampler or of["sampler"], of["sampler"]),
            )
            if all(ours == theirs for ours, theirs in wanted) and steps in (0, of["steps"]):
                return one
        return None

    @staticmethod
    def rows(table: dict[str, Any] | None, **wanted: Any) -> list[dict[str, Any]]:
        """Rows with these values."""
        some = [] if table is None else table["rows"]
        return [row for row in some if all(row[name] == value for name, value in wanted.items())]

    @staticmethod
    def said(table: dict[str, Any]) -> str:
        """Model, images and seeds."""
        of, seeds = table["table"], table["seeds"]
        return (
            f"{of['model']}, {of['sampler']}, {of['steps']} steps; {table['images']} images, seeds {seeds[0]} to "
            f"{seeds[-1]}"
        )


def warmup_of(row: dict[str, Any]) -> int:
    """Steps of a fixed warm-up."""
    return int(row["warmup"].removeprefix("fixed(").removesuffix(")"))


def bars(axis: Any, xs: Sequence[float], rows: Sequence[dict[str, Any]], number: int, label: str, **more: Any) -> None:
    """PSNR with standard errors."""
    ys = [row["psnr"]["value"] for row in rows]
    errors = [row["psnr"]["error"] or 0.0 for row in rows]
    style = {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "capsize": 2,
        "elinewidth": 0.8,
    }
    axis.errorbar(xs, ys, yerr=errors, label=label, **(style | more))


def draw_warmup(tables: Tables) -> Path | None:
    """PSNR over warm-up, a line for each N; policies with five synchronous steps beside; DPM-Solver++ dashed."""
    table = tables.find("experiment", "emoji-dit-s", "ddim")
    if table is None:
        return None
    figure, axis = plt().subplots(figsize=(6.4, 4.0))
    warmups = list(dict.fromkeys(row["warmup"] for row in table["rows"]))
    labels = {"first_last(1, 4)": "first 1,\nlast 4", "adaptive(0.001, 5)": "adap-\ntive, 5"}
    axis.set_xticks(range(len(warmups)), [labels.get(one) or str(warmup_of({"warmup": one})) for one in warmups])
    for sampler, style, name in (("ddim", "-", ""), ("dpm", "--", ", DPM-Solver++")):
        found = [tables.find(part, "emoji-dit-s", sampler) for part in ("experiment", "degrees")]
        every = [row for one in found for row in tables.rows(one) if row["devices"] > 1]
        for number, devices in enumerate(sorted({row["devices"] for row in every})):
            rows = [row for row in every if row["devices"] == devices]
            for is_fixed in (True, False):
                some = [row for row in rows if row["warmup"].startswith("fixed(") == is_fixed]
                places = [warmups.index(row["warmup"]) + 0.06 * (number - 1) for row in some]
                label = f"N = {devices}{name}" if is_fixed else ""
                if some:
                    bars(axis, places, some, number, label, linestyle=style if is_fixed else "none")
    axis.set_xlabel("synchronous steps at the beginning, of 50; and placed")
    axis.set_ylabel("PSNR, dB")
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
    said = tables.said(table).replace(", ddim", "")
    return save(figure, "warmup", f"{said}; DDIM where nothing is said; displaced patches; bars: standard error")


def draw_tokens(tables: Tables) -> Path | None:
    """PSNR over tokens, a line for each N."""
    some = [
        (64, tables.find("tokens", "dit-64-tokens")),
        (256, tables.find("experiment", "emoji-dit-s", "ddim")),
        (1024, tables.find("tokens", "dit-1024-tokens")),
    ]
    known = [(tokens, table) for tokens, table in some if table is not None]
    if len(known) < 2:
        return None
    figure, axis = plt().subplots(figsize=(5.0, 3.2))
    for number, devices in enumerate(known[0][1]["table"]["devices"]):
        here = [(n, found[0]) for n, one in known if (found := tables.rows(one, devices=devices, warmup="fixed(1)"))]
        places = [tokens * (1 + 0.03 * (number - 1)) for tokens, _ in here]
        bars(axis, places, [row for _, row in here], number, f"N = {devices}")
    axis.set_xscale("log", base=2)
    axis.set_xticks([tokens for tokens, _ in known], [f"{tokens:,}" for tokens, _ in known])
    axis.minorticks_off()
    axis.set_xlabel("image tokens")
    axis.set_ylabel("PSNR, dB")
    axis.legend(fontsize=8, loc="upper right")
    names = ", ".join(table["table"]["model"] for _, table in known)
    counts = sorted({one["images"] for _, one in known})
    seeds = f"{' or '.join(map(str, counts))} images each, seeds from 0"
    said = f"{names}; DDIM, 50 steps, one synchronous\n{seeds}; bars: standard error"
    return save(figure, "tokens", said)


def draw_objectives(tables: Tables) -> Path | None:
    """PSNR over warm-up at N = 4 for three kinds of model."""
    some = [
        ("velocity (DDPM), emoji-dit-s", tables.find("experiment", "emoji-dit-s", "ddim")),
        ("noise (DDPM), dit-epsilon", tables.find("objectives", "dit-epsilon")),
        ("flow matching, emoji-sd3", tables.find("objectives", "emoji-sd3")),
    ]
    known = [(name, table) for name, table in some if table is not None]
    if len(known) < 2:
        return None
    shown = {
        **{f"fixed({count})": f"{count}" for count in (0, 1, 4, 10, 40)},
        "first_last(1, 4)": "1 and\nlast 4",
        "periodic(5)": "every\nfifth",
    }
    devices = (2, 4, 8)
    every = [
        {
            row["devices"]: row
            for one in (table, more)
            for row in tables.rows(one, warmup="fixed(1)", strategy="displaced")
            if row["devices"] > 1
        }
        for _, table in known
        for more in [tables.find("degrees", table["table"]["model"], table["table"]["sampler"])]
    ]
    # Beside it the numbers of devices, where more than one model was measured on several.
    both = sum(len(few) > 1 for few in every) > 1
    figure, axes = plt().subplots(1, 1 + both, figsize=(5.4 + 2.8 * both, 3.4), squeeze=False)
    axes = axes[0]
    for number, ((name, table), few) in enumerate(zip(known, every, strict=True)):
        more = tables.find("objectives", table["table"]["model"])
        rows = {row["warmup"]: row for one in (table, more) for row in tables.rows(one, devices=4)}
        here = [warmup for warmup in shown if warmup in rows]
        places = [list(shown).index(warmup) + 0.05 * (number - 1) for warmup in here]
        bars(axes[0], places, [rows[warmup] for warmup in here], number, name, linestyle="none")
        if both:
            places = [devices.index(n) + 0.05 * (number - 1) for n in sorted(few)]
            bars(axes[1], places, [few[n] for n in sorted(few)], number, name)
            axes[1].set_xticks(range(3), list(map(str, devices)))
            axes[1].set_xlabel("N, one synchronous step")
    axes[0].set_xlim(-0.4, len(shown) - 0.6)
    axes[0].set_xticks(range(len(shown)), list(shown.values()))
    axes[0].set_xlabel("synchronous steps at the beginning, of 50; and placed; N = 4")
    axes[0].set_ylabel("PSNR, dB")
    axes[0].legend(fontsize=7.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=1 + both)
    said = "; ".join(f"{table['table']['model']}: {table['images']} images" for _, table in known)
    return save(figure, "objectives", f"50 steps (DDIM; flow: Euler), seeds from 0; bars: standard error\n{said}")


def details(tables: Tables) -> list[tuple[str, dict[str, Any]]]:
    """Detail tables by what the model predicts."""
    names = {"emoji-dit-s": "velocity", "dit-epsilon": "noise", "emoji-sd3": "flow"}
    return [(names[name], table) for name in names if (table := tables.find("detail", name)) is not None]


def draw_steps(tables: Tables) -> Path | None:
    """Error of the prediction by step: several warm-ups; and several models on the same latents."""
    some = details(tables)
    if not some:
        return None
    figure, axes = plt().subplots(1, 2, figsize=(7.6, 3.0), sharey=True)
    _, table = some[0]
    for number, warmup in enumerate(("fixed(0)", "fixed(1)", "fixed(10)")):
        for row in tables.rows(table, warmup=warmup):
            values = np.array([[value, error or 0.0] for value, error in row["prediction_error"]])
            steps = np.arange(1, len(values) + 1)
            shown = values[:, 0] > 1e-4
            axes[0].plot(steps[shown], values[shown, 0], color=COLOURS[number], label=f"warm-up {warmup_of(row)}")
            low, high = values[shown, 0] - values[shown, 1], values[shown, 0] + values[shown, 1]
            axes[0].fill_between(steps[shown], low, high, color=COLOURS[number], alpha=0.18, linewidth=0)
    axes[0].set_title("on its own trajectory (velocity)", fontsize=9)
    for number, (name, one) in enumerate(some):
        for row in tables.rows(one, warmup="fixed(1)"):
            values = np.array(row["same_latents"])
            steps = np.arange(1, len(values) + 1)
            axes[1].plot(steps[1:], values[1:], color=COLOURS[number], marker=MARKS[number], markersize=2.5, label=name)
    axes[1].set_title("this step's error alone, warm-up 1", fontsize=9)
    for axis in axes:
        axis.set_yscale("log")
        axis.set_xlabel("denoising step")
        axis.legend(fontsize=7.5)
    axes[0].set_ylabel("relative error of the prediction")
    return save(figure, "steps", f"{tables.said(table)}; N = 4, displaced; bands: standard error")


def draw_layers(tables: Tables) -> Path | None:
    """Attention's error: by layer and step as a map, and its margin by layer."""
    some = details(tables)
    if not some:
        return None
    _, table = some[0]
    (row,) = tables.rows(table, warmup="fixed(1)")
    blocks = list(row["attention_error"])
    count = len(row["prediction_error"])
    values = np.full((len(blocks), count), np.nan)
    for place, block in enumerate(blocks):
        for step, error in row["attention_error"][block].items():
            values[place, int(step)] = error
    figure, axes = plt().subplots(1, 2, figsize=(7.6, 2.8), gridspec_kw={"width_ratios": (1.7, 1)})
    image = axes[0].imshow(
        values,
        aspect="auto",
        cmap="viridis",
        interpolation="nearest",
        extent=(0.5, count + 0.5, len(blocks) - 0.5, -0.5),
    )
    axes[0].grid(visible=False)
    axes[0].set_xlabel("denoising step")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes[0], label="relative error", fraction=0.05)
    for number, (name, one) in enumerate(some):
        for each in tables.rows(one, warmup="fixed(1)"):
            found = [[v for v in by.values() if v is not None] for by in each["attention_error"].values()]
            means = [float(np.mean(v)) for v in found]
            spread = [
                [m - min(v) for m, v in zip(means, found, strict=True)],
                [max(v) - m for m, v in zip(means, found, strict=True)],
            ]
            places = [place + 0.08 * (number - 1) for place in range(len(means))]
            axes[1].errorbar(
                places,
                means,
                yerr=spread,
                color=COLOURS[number],
                marker=MARKS[number],
                capsize=2,
                elinewidth=0.7,
                label=name,
            )
    axes[1].set_xlabel("layer")
    axes[1].set_ylabel("mean over steps")
    axes[1].set_ylim(bottom=0)
    axes[1].legend(fontsize=7.5)
    return save(
        figure,
        "layers",
        f"{tables.said(table)} (map); N = 4, one synchronous step; right: bars from the smallest to the largest step",
    )


def draw_places(tables: Tables) -> Path | None:
    """The prediction's error by token, and by row of tokens over steps."""
    some = [(name, table) for name, table in details(tables) if "error_by_place" in table["rows"][0]]
    if not some:
        return None
    figure, axes = plt().subplots(1, len(some) + 1, figsize=(2.5 * (len(some) + 1) + 0.6, 2.7), squeeze=False)
    devices = 4
    for axis, (name, table) in zip(axes[0], some, strict=False):
        (row,) = tables.rows(table, warmup="fixed(1)")
        values = np.array(row["error_by_place"])
        image = axis.imshow(values, cmap="magma", interpolation="nearest")
        axis.grid(visible=False)
        for rank in range(1, devices):
            axis.axhline(len(values) * rank / devices - 0.5, color="cyan", linestyle="--", linewidth=0.8)
        axis.set_title(f"{name}: stale steps", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
        figure.colorbar(image, ax=axis, fraction=0.046)
    (row,) = tables.rows(some[0][1], warmup="fixed(1)")
    rows = np.array(row["error_by_row"])[1:].T
    image = axes[0][-1].imshow(
        rows,
        aspect="auto",
        cmap="magma",
        interpolation="nearest",
        extent=(1.5, rows.shape[1] + 1.5, rows.shape[0] + 0.5, 0.5),
    )
    axes[0][-1].grid(visible=False)
    for rank in range(1, devices):
        axes[0][-1].axhline(rows.shape[0] * rank / devices + 0.5, color="cyan", linestyle="--", linewidth=0.8)
    axes[0][-1].set_xlabel("denoising step")
    axes[0][-1].set_ylabel("row of tokens")
    axes[0][-1].set_title(f"{some[0][0]}: rows over steps", fontsize=9)
    figure.colorbar(image, ax=axes[0][-1], fraction=0.046)
    return save(
        figure,
        "places",
        "N = 4, one synchronous step of 50, 4 images, seeds 0 to 3\n"
        "relative error of the prediction; dashes: ranks' borders",
    )


def draw_bytes(tables: Tables) -> Path | None:
    """PSNR over what is sent."""
    table, base = tables.find("strategies", "emoji-dit-s"), tables.find("experiment", "emoji-dit-s", "ddim")
    if table is None or base is None:
        return None
    figure, axis = plt().subplots(figsize=(5.4, 3.2))
    some = [("displaced", base), *((name, table) for name in table["table"]["strategies"])]
    for number, (name, one) in enumerate(some):
        rows = [row for row in tables.rows(one, strategy=name, warmup="fixed(1)") if row["sent"]]
        if not rows:
            continue
        sent = [sum(row["sent"].values()) / 1e6 for row in rows]
        bars(axis, sent, rows, number, name)
        for x, row in zip(sent, rows, strict=True):
            axis.annotate(
                f"{row['devices']}", (x, row["psnr"]["value"]), xytext=(5, 3), textcoords="offset points", fontsize=7.5
            )
    axis.set_xscale("log")
    axis.set_xlabel("sent by all ranks in a request of 8 images, MB (numbers: N)")
    axis.set_ylabel("PSNR, dB")
    axis.legend(fontsize=7.5)
    return save(figure, "bytes", f"{tables.said(table)}; one synchronous step; bars: standard error")


# The models that codecs and budgets are measured on.
FOUR = ("emoji-sd3", "emoji-flux", "emoji-dit-s", "emoji-wan")


def of_four(tables: Tables, part: str) -> list[dict[str, Any]]:
    """A part's tables of these models that were measured."""
    return [table for model in FOUR if (table := tables.find(part, model)) is not None]


def steps_and_images(some: Sequence[dict[str, Any]]) -> str:
    """Of several tables."""
    steps = ", ".join(f"{one['table']['model']} {one['table']['sampler']} {one['table']['steps']}" for one in some)
    counts = sorted({one["images"] for one in some})
    return f"N = 4; steps: {steps}\n{' or '.join(map(str, counts))} images each, seeds from 0"


def bits_of(row: dict[str, Any], whole: dict[str, Any]) -> float:
    """Bits that a stale step sends for every number of keys and values, of 32, scales counted."""
    steps = whole["evaluations"]
    full = whole["sent"]["ring"] / steps
    return 32 * (row["sent"]["ring"] - full) / (full * (steps - 1))


def draw_codecs(tables: Tables) -> Path | None:
    """What compressed messages cost against uncompressed ones, over bits a number."""
    some = of_four(tables, "codecs")
    if not some:
        return None
    figure, axes = plt().subplots(1, len(some), figsize=(2.7 * len(some), 3.1), sharey=True, squeeze=False)
    for axis, table in zip(axes[0], some, strict=True):
        (whole,) = tables.rows(table, strategy="displaced")
        labels = ("whole keys: int8, int4", "differences: residual4, 2, 1.6, 1", 'residual2, 1.6, 1, predict="linear"')
        for number, kind in enumerate(("int", "residual", "residual+linear")):
            kind, _, predict = kind.partition("+")
            named = [(row, *row["strategy"].partition("+")[::2]) for row in table["rows"]]
            rows = [row for row, name, moved in named if name.startswith(f"displaced-{kind}") and moved == predict]
            if not rows:
                continue
            apart = [np.array(row["each"]) - np.array(whole["each"]) for row in rows]
            axis.errorbar(
                [bits_of(row, whole) for row in rows],
                [float(one.mean()) for one in apart],
                yerr=[float(one.std(ddof=1)) / len(one) ** 0.5 for one in apart],
                color=COLOURS[number],
                marker=MARKS[number],
                capsize=2,
                elinewidth=0.8,
                label=labels[number],
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axis.set_title(f"{table['table']['model']}, {whole['psnr']['value']:.1f} dB", fontsize=9)
        axis.set_xlabel("bits a number")
        axis.axhline(0, color="#999999", linewidth=0.8)
        for moved in tables.rows(table, strategy="displaced+linear"):
            gained = float((np.array(moved["each"]) - np.array(whole["each"])).mean())
            axis.axhline(gained, color=COLOURS[2], linewidth=0.8, linestyle="--")
    axes[0][0].set_ylabel("less uncompressed, dB")
    axes[0][0].legend(fontsize=6.5, loc="upper left")
    return save(figure, "codecs", f"{steps_and_images(some)}, one synchronous step; bars: standard error")


def draw_distribution(_: Tables) -> Path | None:
    """Class, Fréchet distance and sharpness of every row."""
    data = read("distribution")
    if not data.get("rows"):
        return None
    names = list(data["rows"])
    figure, axes = plt().subplots(1, 3, figsize=(8.2, 0.28 * len(names) + 1.2), sharey=True)
    places = np.arange(len(names))[::-1]
    for place, name in zip(places, names, strict=True):
        row = data["rows"][name]
        colour = (
            COLOURS[1] if name.startswith("naive") else COLOURS[4] if name.startswith("synchronous") else COLOURS[0]
        )
        style = {"fmt": "o", "color": colour, "capsize": 2, "elinewidth": 0.8}
        value, error = row["right"]
        axes[0].errorbar([100 * value], [place], xerr=[100 * error], **style)
        if row["frechet"] > 1e-3:
            axes[1].errorbar([row["frechet"]], [place], xerr=[row["frechet_error"]], **style)
        axes[2].errorbar([row["sharpness"]], [place], **style)
    axes[0].set_yticks(places, names, fontsize=8)
    axes[0].set_xlabel("of the asked class, %")
    axes[1].set_xscale("log")
    axes[1].set_xlabel("Fréchet distance to synchronous")
    axes[2].axvline(1, color="#999999", linewidth=0.8)
    axes[2].set_xlabel("sharpness over synchronous")
    count = data["rows"][names[0]]["images"]
    said = (
        f"fashion-dit, DDIM, {data['setup']['steps']} steps; {count} images a row, seeds 0 to {count - 1} "
        "(other seeds: from 1,000,000); bars: standard error"
    )
    return save(figure, "distribution", said)


def draw_load(_: Tables) -> Path | None:
    """Work of every rank in every step, and a rank that slows down."""
    cases = read("load").get("cases", {})
    even = [name for name, case in cases.items() if not case["slows"]]
    if not even:
        return None
    slow = [name for name, case in cases.items() if case["slows"]]
    figure, axes = plt().subplots(
        1, 1 + bool(slow), figsize=(8.0, 3.0), squeeze=False, gridspec_kw={"width_ratios": (1.2, 1)[: 1 + bool(slow)]}
    )
    lines, labels = [], []
    for name in even:
        ranks = [[1e3 * step["work_processor"] for step in rank["steps"]] for rank in cases[name]["ranks"]]
        # Shares of the mean of a step's ranks.
        table = np.array(ranks)
        lines += list(table / table.mean(0))
        labels += [f"{name}: rank {number}" if number == 0 else f"rank {number}" for number in range(len(ranks))]
    image = axes[0][0].imshow(
        np.array(lines),
        aspect="auto",
        cmap="RdBu_r",
        vmin=0.5,
        vmax=1.5,
        interpolation="nearest",
        extent=(0.5, len(lines[0]) + 0.5, len(lines) - 0.5, -0.5),
    )
    axes[0][0].set_yticks(range(len(labels)), labels, fontsize=7)
    axes[0][0].grid(visible=False)
    axes[0][0].set_xlabel("denoising step")
    axes[0][0].set_title("work of a rank over the mean of its step", fontsize=9)
    figure.colorbar(image, ax=axes[0][0], fraction=0.04)
    for number, name in enumerate(slow):
        for rank, style in zip(cases[name]["ranks"], ("-", "--"), strict=False):
            waits = [1e3 * step["in_collectives"] for step in rank["steps"]]
            label = name.removesuffix(", rank 1 slows down") if style == "-" else None
            axes[0][1].plot(range(1, len(waits) + 1), waits, style, color=COLOURS[number], label=label)
    if slow:
        axes[0][1].set_xlabel("denoising step")
        axes[0][1].set_ylabel("inside collectives, ms")
        axes[0][1].set_title("rank 1 (dashes) slows down in the middle", fontsize=9)
        axes[0][1].legend(fontsize=7)
    return save(
        figure,
        "load",
        "emoji-dit-s, DDIM, 16 steps, 4 images in one request, real ranks of one thread\n"
        "processor time (map), clock (lines)",
    )


def draw_moving(_: Tables) -> Path | None:
    """Seconds of every step while a rank becomes slow, with tokens that move, that stay, and given speeds."""
    data = read("moving")
    if not data:
        return None
    styles = {
        "ring=2, even": (COLOURS[1], "-"),
        "ring=2, speeds=auto": (COLOURS[0], "-"),
        "ring=2, speeds given": (COLOURS[2], "--"),
        "displaced, even": (COLOURS[1], ":"),
        "displaced, speeds=auto": (COLOURS[0], ":"),
    }
    names = {
        "stopped": "stopped every 10 ms",
        "busy": "a loop on its core",
        "nice": "a loop, lower priority",
    }
    figure, axes = plt().subplots(1, len(data["ways"]), figsize=(3.9 * len(data["ways"]), 3.4), squeeze=False)
    for axis, (way, found) in zip(axes[0], data["ways"].items(), strict=True):
        for name, (colour, line) in styles.items():
            if name in found:
                took = [max(step) for step in zip(*([one[0] for one in rank] for rank in found[name]), strict=True)]
                axis.plot(range(len(took)), took, color=colour, linestyle=line, linewidth=1.1, label=name)
                moves = [step for step, one in enumerate(found[name][0]) if one[3]]
                axis.plot(moves, [took[step] for step in moves], "o", color=colour, markersize=4)
        axis.axvline(data["slow from"] - 0.5, color="#777777", linewidth=0.8)
        axis.set_title(names.get(way, way), fontsize=9)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("seconds of a step, slower rank")
    axes[0][0].legend(fontsize=6.5, loc="upper left")
    said = (
        f"FLUX-shaped transformer of 12 blocks, random weights, {data['tokens']:,} image tokens, two real ranks of one"
    )
    return save(figure, "moving", f"{said} thread\nrank 1 is slow from the grey line on; dots: tokens move")


def draw_sameness(_: Tables) -> Path | None:
    """Difference of exact strategies over tokens and steps, and their speed."""
    rows = read("sameness").get("growth", [])
    if not rows:
        return None
    figure, axes = plt().subplots(1, 2, figsize=(7.6, 3.0))
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    for number, name in enumerate(names):
        mine = [row for row in rows if row["strategy"] == name]
        tokens = [row["tokens"] for row in mine]
        for after, style in (("1", ":"), ("20", "-")):
            values = [max(row["difference"][after], 1e-9) for row in mine if after in row["difference"]]
            label = name if style == "-" else None
            if values:
                axes[0].plot(tokens, values, style, color=COLOURS[number], marker=MARKS[number], label=label)
        axes[1].plot(
            tokens, [row["work"]["ratio"] for row in mine], color=COLOURS[number], marker=MARKS[number], label=name
        )
    axes[0].set_yscale("log")
    axes[0].set_ylabel("largest relative difference")
    axes[0].set_title("after 1 step (dots) and 20 (lines); 1e-9: none", fontsize=9)
    axes[1].set_ylabel("work: one device / busiest rank")
    axes[1].set_title("two ranks", fontsize=9)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(
            sorted({row["tokens"] for row in rows}), [f"{one:,}" for one in sorted({row["tokens"] for row in rows})]
        )
        axis.minorticks_off()
        axis.set_xlabel("image tokens")
        axis.legend(fontsize=7.5)
    return save(
        figure,
        "sameness",
        "FLUX-shaped transformer, 3 blocks, random weights, float32; Euler; one seed\n"
        "work: processor seconds outside of collectives",
    )


def draw_pictures(store: Path) -> Path | None:
    """An image of the first prompt and the farthest one, as every strategy draws it, and how each differs.

    Differences of a row have one scale, whose bright end is their 99th percentile; lines are the ranks' borders.

    Args:
        store: of `quality.py` (``--out``), with the images of the parts ``experiment`` and ``strategies``.
    """
    from PIL import Image

    from ditmesh.lab.pages.charts import coloured, scale_maximum
    from ditmesh.quality.metrics import as_picture

    devices, scale = 4, 2
    found: dict[str, list[dict[str, Any]]] = {}
    folders: dict[str, Path] = {}
    for part in ("experiment", "strategies"):
        folder = store / f"{part}-emoji-dit-s-ddim"
        if not (folder / "cells.jsonl").exists():
            return None
        for line in (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            cell = result["cell"]
            if cell["strategy"] == "synchronous" or (cell["devices"], cell["warmup"]) == (devices, "fixed(1)"):
                found[cell["strategy"]] = result["images"]
                folders[cell["strategy"]] = folder / "cells"
    names = [name for name in ("synchronous", "displaced", "pipefusion", "displaced-int4", "naive") if name in found]
    worst = min(range(len(found["displaced"])), key=lambda place: found["displaced"][place]["psnr"])
    rows = []
    for place in dict.fromkeys((0, worst)):
        drawn = [np.asarray(Image.open(folders[name] / found[name][place]["file"]).convert("RGB")) for name in names]
        apart = [np.abs(as_picture(one) - as_picture(drawn[0])) for one in drawn]
        # Naive patches are far off: the others have a scale of their own.
        bright = scale_maximum(apart[1:-1] if "naive" in names else apart[1:])
        borders = [rank / devices for rank in range(1, devices)]
        shades = [coloured(one, bright, borders) for one in apart]
        rows.append([one.repeat(scale, 0).repeat(scale, 1) for one in drawn])
        rows.append([(255 * one).round().astype(np.uint8).repeat(scale, 0).repeat(scale, 1) for one in shades])
        rows[-1][0] = np.full_like(rows[-1][0], 255)
        print(f"row of {found['displaced'][place]['prompt']!r}: bright end {bright:.3f}; PSNR", end=" ")
        print(", ".join(f"{name} {found[name][place]['psnr']:.1f}" for name in names[1:]))
    gap = np.full((rows[0][0].shape[0], 6, 3), 255, np.uint8)
    lines = [np.concatenate([part for one in row for part in (one, gap)], axis=1) for row in rows]
    between = np.full((6, lines[0].shape[1], 3), 255, np.uint8)
    page = np.concatenate([part for line in lines for part in (line, between)])
    file = IMAGES / "findings-pictures.png"
    Image.fromarray(page).quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"pictures: {file.name}, columns {', '.join(names)}")
    return file


FIGURES: dict[str, Callable[[Tables], Path | None]] = {
    "warmup": draw_warmup,
    "tokens": draw_tokens,
    "objectives": draw_objectives,
    "steps": draw_steps,
    "layers": draw_layers,
    "places": draw_places,
    "distribution": draw_distribution,
    "bytes": draw_bytes,
    "codecs": draw_codecs,
    "load": draw_load,
    "moving": draw_moving,
    "sameness": draw_sameness,
}


def main() -> None:
    """Draw."""
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--only", action="append", choices=FIGURES, help="default: all")
    parser.add_argument("--store", type=Path, help="quality.py's --out: also the row of images")
    options = parser.parse_args()
    tables = Tables()
    if options.store is not None:
        draw_pictures(options.store)
    for name, draw in FIGURES.items():
        if name in (options.only or [name]):
            file = draw(tables)
            print(f"{name}: {'not measured' if file is None else file.name}")


if __name__ == "__main__":
    main()

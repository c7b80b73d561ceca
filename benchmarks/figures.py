"""The figures of docs/lab and of docs/reproducible.md, drawn from benchmarks/measured without a new run.

    python benchmarks/figures.py                      # all (make figures), into docs/images
    python benchmarks/figures.py --only warmup

Every figure says its model, images and seeds, and the data file; bars are standard errors of the mean over images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

from harness import command_line
from steps import SAMPLERS, STEPS

HERE = Path(__file__).resolve().parent
MEASURED, IMAGES = HERE / "measured", HERE.parent / "docs" / "images"
# Colours that differ in lightness, too.
COLOURS = ("#1b4f8f", "#d9732e", "#2f8f5b", "#8f3f8f", "#777777", "#b09000", "#b03050")
MARKS = "osD^vPX"


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


def save(figure: Any, name: str, said: str, data: str = "experiment") -> Path:
    """Write a figure with lines below it that say what it is of, and the data file."""
    said += f"\ndata: benchmarks/measured/{next(MEASURED.glob(f'{data}.json*')).name}"
    figure.tight_layout(rect=(0, (0.1 + 0.15 * (1 + said.count("\n"))) / figure.get_figheight(), 1, 1))
    figure.text(0.01, 0.04 / figure.get_figheight(), said, fontsize=8, color="#444444", va="bottom")
    file = IMAGES / f"findings-{name}.svg"
    figure.savefig(file, metadata={"Date": None, "Creator": None}, facecolor="white")
    plt().close(figure)
    # Ends of lines as the repository has them.
    file.write_text("\n".join(line.rstrip() for line in file.read_text(encoding="utf-8").splitlines()) + "\n", "utf-8")
    return file


def read(name: str) -> dict[str, Any]:
    """Measurements; empty: there are none."""
    file = MEASURED / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


@cache
def lines(name: str) -> list[dict[str, Any]]:
    """The rows of a file that grows row by row; its first line says where they come from."""
    text = (MEASURED / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()[1:]]


def few_images(strategy: str, devices: int = 4, **wanted: Any) -> list[float]:
    """Images of `steps.py` with one synchronous step, in the order of their rounds; nothing if not measured yet."""
    wanted = {"strategy": strategy, "devices": devices, "warmup": "fixed(1)"} | wanted
    return [psnr for row in lines("steps") if wanted.items() <= row.items() for psnr in row["psnr"]]


class Tables:
    """The tables of `quality.py`, by part, model and sampler."""

    def __init__(self) -> None:
        self.all = read("experiment").get("tables", [])

    def find(self, part: str, model: str = "", sampler: str = "", steps: int = 0) -> dict[str, Any] | None:
        """A table; None: it was not measured."""
        for one in self.all:
            of = one["table"]
            wanted = part, model or of["model"], sampler or of["sampler"]
            if wanted == (of["part"], of["model"], of["sampler"]) and steps in (0, of["steps"]):
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
    mark = {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)]}
    style = {**mark, "capsize": 2, "elinewidth": 0.8}
    axis.errorbar(xs, ys, yerr=errors, label=label, **(style | more))


def draw_warmup(tables: Tables) -> Path:
    """PSNR over warm-up, a line for each N; policies with five synchronous steps beside."""
    table = tables.find("experiment", "emoji-dit-s", "ddim")
    assert table is not None
    figure, axis = plt().subplots(figsize=(6.4, 4.0))
    warmups = list(dict.fromkeys(row["warmup"] for row in table["rows"]))
    labels = {"first_last(1, 4)": "first,\nlast 4", "adaptive(0.001, 5)": "adap-\ntive, 5"}
    axis.set_xticks(range(len(warmups)), [labels.get(one) or str(warmup_of({"warmup": one})) for one in warmups])
    for number, devices in enumerate((2, 4, 8)):
        rows = tables.rows(table, devices=devices)
        for is_fixed in (True, False):
            some = [row for row in rows if row["warmup"].startswith("fixed(") == is_fixed]
            places = [warmups.index(row["warmup"]) + 0.06 * (number - 1) for row in some]
            label = f"N = {devices}" if is_fixed else ""
            bars(axis, places, some, number, label, linestyle="-" if is_fixed else "none")
    axis.set_xlabel("synchronous steps at the beginning, of 50; and placed")
    axis.set_ylabel("PSNR, dB")
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3)
    return save(figure, "warmup", f"{tables.said(table)}; displaced patches, keys as they are; bars: standard error")


def draw_counts(_: Tables) -> Path:
    """PSNR over the number of steps, with keys as they are (dotted) and moved on."""
    figure, axes = plt().subplots(1, 2, figsize=(7.4, 3.6), sharey=True)
    for axis, (strategy, title) in zip(axes, (("displaced", "displaced"), ("pipefusion", "PipeFusion")), strict=True):
        for number, (model, samplers) in enumerate(SAMPLERS.items()):
            for way, style, label in ((f"{strategy}+linear", "-", model), (strategy, ":", None)):
                some = {steps: few_images(way, model=model, sampler=samplers[0], steps=steps) for steps in STEPS}
                means = {steps: np.mean(images) for steps, images in some.items() if images}
                axis.plot([*means], [*means.values()], style, color=COLOURS[number], marker=MARKS[number], label=label)
        axis.set_xscale("log")
        axis.set_xticks(STEPS, [str(steps) for steps in STEPS])
        axis.minorticks_off()
        axis.set_xlabel("denoising steps")
        axis.set_title(f"{title}, N = 4", fontsize=9)
    axes[0].set_ylabel("PSNR, dB")
    axes[0].legend(fontsize=8)
    return save(figure, "counts", "one synchronous step; 8 to 32 images; lines: moved keys; dots: unmoved", "steps")


def draw_training(_: Tables) -> Path:
    """Losses of the same run on several meshes."""
    lines = read("training").get("curves", {}).get("losses", {})
    figure, axis = plt().subplots(figsize=(7.0, 3.6))
    for number, (name, losses) in enumerate(lines.items()):
        # Later lines are thinner, so that those that lie on one another are all seen.
        axis.plot(losses, color=COLOURS[number], linewidth=1.5 * (len(lines) - number), label=name)
    # One outlier does not flatten the rest.
    losses = sorted(loss for line in lines.values() for loss in line)
    axis.set_ylim(0, 1.08 * losses[int(0.99 * (len(losses) - 1))])
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    axis.legend(fontsize=8)
    return save(
        figure, "training", "emoji-sd3 from random weights, 200 steps of 4 samples, float32, one seed", "training"
    )


def draw_reinforcement(_: Tables) -> Path:
    """Rewards over updates, and images of held-out prompts before and after."""
    runs = read("reinforcement").get("learning", {})
    figure, axes = plt().subplots(2, 1, figsize=(7.2, 4.4), height_ratios=(2, 1))
    for number, (seed, run) in enumerate(runs.items()):
        axes[0].plot(run["reward"], color=COLOURS[number], linewidth=0.5)
        held = {int(step): reward for step, reward in run["held out"].items()}
        axes[0].plot([*held], [*held.values()], color=COLOURS[number], marker=MARKS[number], label=f"seed {seed}")
    axes[0].set_xlabel("update")
    axes[0].set_ylabel("reward")
    axes[0].legend(fontsize=8)
    axes[1].imshow(plt().imread(MEASURED / "reinforcement.png"), interpolation="nearest")
    axes[1].set_yticks((32, 96), ("before", "after"))
    axes[1].set_xticks(())
    axes[1].grid(visible=False)
    said = "emoji-flux, LoRA; thick: 12 held-out prompts, thin: samples of a step; images: seed 0"
    return save(figure, "reinforcement", said, "reinforcement")


def draw_pictures(_: Tables) -> Path:
    """Images by strategy, and beside them their differences from the exact ones."""
    from PIL import Image

    data = read("pictures-emoji-dit-s")
    with Image.open(MEASURED / "pictures-emoji-dit-s.png") as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    side, count = pixels.shape[0] // len(data["rows"]), len(data["columns"])
    figure, axes = plt().subplots(len(data["rows"]), 2 * count - 1, figsize=(7.6, 0.98 * len(data["rows"])))
    for number, row in enumerate(data["rows"]):
        line = pixels[number * side : (number + 1) * side].reshape(side, count, side, 3).swapaxes(0, 1)
        images = [*line, *np.minimum(1, 5 * np.abs(line[1:] - line[0]))]
        titles = [f"{row['steps']} steps", *(f"{ratio:.1f} dB" for ratio in row["psnr"])] + [""] * (count - 1)
        for column, (axis, image, title) in enumerate(zip(axes[number], images, titles, strict=True)):
            axis.imshow(image, interpolation="nearest")
            axis.axis("off")
            name = data["columns"][column if column < count else column - count + 1]
            above = name.replace(", ", "\n") if number == 0 else ""
            axis.set_title("\n".join(filter(None, [above, title])), fontsize=7.5)
    seeds = ", ".join(str(row["seed"]) for row in data["rows"][:3])
    text = f"emoji-dit-s, DDIM, N = 4, one synchronous step, seeds {seeds}; right: differences from exact ones, times 5"
    return save(figure, "pictures", text, "pictures-emoji-dit-s")


def draw_faces(_: Tables) -> Path:
    """Images of 256 pixels by strategy, as they are at the first number of steps."""
    from PIL import Image

    file = IMAGES / "findings-faces.jpg"
    with Image.open(MEASURED / "pictures-faces.png") as image:
        image.convert("RGB").crop((0, 0, image.width, image.height // 2)).save(file, quality=90)
    return file


def details(tables: Tables) -> list[tuple[str, dict[str, Any]]]:
    """Detail tables by what the model predicts."""
    names = {"emoji-dit-s": "velocity", "dit-epsilon": "noise", "emoji-sd3": "flow"}
    return [(names[name], table) for name in names if (table := tables.find("detail", name)) is not None]


def draw_steps(tables: Tables) -> Path:
    """Error of the prediction by step: several warm-ups; and several models on the same latents."""
    some = details(tables)
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


def draw_layers(tables: Tables) -> Path:
    """Attention's error: by layer and step as a map, and its margin by layer."""
    some = details(tables)
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


def draw_places(tables: Tables) -> Path:
    """The prediction's error by token, and by row of tokens over steps."""
    some = [(name, table) for name, table in details(tables) if "error_by_place" in table["rows"][0]]
    figure, axes = plt().subplots(2, 2, figsize=(7.2, 6.2))
    devices, axes = 4, axes.ravel()
    for axis, (name, table) in zip(axes, some, strict=False):
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
    image = axes[-1].imshow(
        rows,
        aspect="auto",
        cmap="magma",
        interpolation="nearest",
        extent=(1.5, rows.shape[1] + 1.5, rows.shape[0] + 0.5, 0.5),
    )
    axes[-1].grid(visible=False)
    for rank in range(1, devices):
        axes[-1].axhline(rows.shape[0] * rank / devices + 0.5, color="cyan", linestyle="--", linewidth=0.8)
    axes[-1].set_xlabel("denoising step")
    axes[-1].set_ylabel("row of tokens")
    axes[-1].set_title(f"{some[0][0]}: rows over steps", fontsize=9)
    figure.colorbar(image, ax=axes[-1], fraction=0.046)
    return save(
        figure,
        "places",
        "N = 4, one synchronous step of 50, 4 images, seeds 0 to 3\n"
        "relative error of the prediction; dashes: ranks' borders",
    )


def draw_load(_: Tables) -> Path:
    """Work of every rank in every step."""
    cases = read("load").get("cases", {})
    figure, axis = plt().subplots(figsize=(7.0, 3.2))
    lines, labels = [], []
    for name, case in cases.items():
        work = np.array([[step["work_processor"] for step in rank["steps"]] for rank in case["ranks"]])
        # Shares of the mean of a step's ranks.
        lines += list(work / work.mean(0))
        labels += [f"{name}: rank {number}" if number == 0 else f"rank {number}" for number in range(len(work))]
    extent = (0.5, len(lines[0]) + 0.5, len(lines) - 0.5, -0.5)
    shades = {"cmap": "RdBu_r", "vmin": 0.5, "vmax": 1.5, "interpolation": "nearest"}
    image = axis.imshow(np.array(lines), aspect="auto", extent=extent, **shades)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.grid(visible=False)
    axis.set_xlabel("denoising step")
    axis.set_title("processor time of a rank over the mean of its step", fontsize=9)
    figure.colorbar(image, ax=axis, fraction=0.04)
    return save(
        figure, "load", "emoji-dit-s, DDIM, 16 steps, 4 images in one request, real ranks of one thread", "load"
    )


def draw_moving(_: Tables) -> Path:
    """Seconds of every step while a rank becomes slow, with tokens that move, that stay, and given speeds."""
    data = read("moving")
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
    figure, axes = plt().subplots(len(data["ways"]), 1, figsize=(7.2, 2.3 * len(data["ways"])), sharex=True)
    for axis, (way, found) in zip(axes, data["ways"].items(), strict=True):
        for name, (colour, line) in styles.items():
            if name in found:
                took = [max(step) for step in zip(*([one[0] for one in rank] for rank in found[name]), strict=True)]
                axis.plot(range(len(took)), took, color=colour, linestyle=line, linewidth=1.1, label=name)
                moves = [step for step, one in enumerate(found[name][0]) if one[3]]
                axis.plot(moves, [took[step] for step in moves], "o", color=colour, markersize=4)
        axis.axvline(data["slow from"] - 0.5, color="#777777", linewidth=0.8)
        axis.set_title(f"rank 1: {names.get(way, way)}", fontsize=9)
        axis.set_ylabel("seconds of a step")
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("step")
    axes[0].legend(fontsize=7.5, loc="lower left", ncol=3)
    said = (
        f"FLUX-shaped transformer of 12 blocks, random weights, {data['tokens']:,} image tokens, two real ranks of one"
    )
    return save(
        figure,
        "moving",
        f"{said} thread\nslower rank's step; rank 1 is slow from the grey line on; dots: tokens move",
        "moving",
    )


def draw_sameness(_: Tables) -> Path:
    """Difference of exact strategies over tokens and steps, and their speed."""
    rows = read("sameness").get("growth", [])
    figure, axes = plt().subplots(1, 2, figsize=(7.6, 3.0))
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    for number, name in enumerate(names):
        mine = [row for row in rows if row["strategy"] == name]
        tokens = [row["tokens"] for row in mine]
        for after, style in (("1", ":"), ("20", "-")):
            values = [row["difference"][after] for row in mine if after in row["difference"]]
            label = name if style == "-" else None
            # A logarithm has no 0: Ulysses, which differs nowhere.
            if any(values):
                axes[0].plot(tokens, values, style, color=COLOURS[number], marker=MARKS[number], label=label)
        axes[1].plot(
            tokens, [row["work"]["ratio"] for row in mine], color=COLOURS[number], marker=MARKS[number], label=name
        )
    axes[0].set_yscale("log")
    axes[0].set_ylabel("largest relative difference")
    axes[0].set_title("after 1 step (dots) and 20 (lines); ulysses=2: 0", fontsize=9)
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
        "sameness",
    )


NAMES = "counts warmup steps layers places load moving sameness training reinforcement pictures faces"
FIGURES: dict[str, Callable[[Tables], Path]] = {name: globals()[f"draw_{name}"] for name in NAMES.split()}


def main() -> None:
    """Draw."""
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--only", action="append", choices=FIGURES, help="default: all")
    options = parser.parse_args()
    tables = Tables()
    for name, draw in FIGURES.items():
        if name in (options.only or [name]):
            print(f"{name}: {draw(tables).name}")


if __name__ == "__main__":
    main()

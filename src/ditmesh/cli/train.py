"""`ditmesh train`: train or fine-tune a transformer, on N devices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import AXES
from ..errors import ConfigError, InputError
from ..report.formatting import count, enumerated
from ..report.report import Report
from .options import (
    AsJson,
    Device,
    Devices,
    MemoryLimit,
    ParallelOptions,
    Threads,
    Timeout,
    common_option,
    config_options,
    memory_check,
    with_groups,
    with_options,
)
from .show import bar, emit

if TYPE_CHECKING:
    from ..launch import MessageSink
    from ..train.config import TrainConfig

# Sentences of a check that are printed.
MOST_POINTS = 20


@with_options(
    config_options(
        {
            "data": "Give this many groups of ranks samples of their own; by default all devices.",
            "reproducible": "Train to the same bits on any number of devices; this is slower.",
        }
    )
)
class TrainingOptions(ParallelOptions):
    """Options for the settings of `ParallelConfig`; --set changes all settings of a run. Help shows those it takes."""


@with_groups
def train(
    *,
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.yaml", help="Read the settings of the run from this file; with --check also a model."
        ),
    ],
    devices: Devices = None,
    change: Annotated[
        list[str] | None,
        common_option("--set", metavar="NAME=VALUE", help="Change a setting of the file; may be repeated."),
    ] = None,
    resume: Annotated[
        bool, common_option("--resume", help="Resume from the newest complete checkpoint in output_dir.")
    ] = False,
    check: Annotated[
        bool, common_option("--check", help="Say how the model would be trained and on what, try it, and leave.")
    ] = False,
    parallel: TrainingOptions,
    device: Device = "auto",
    threads: Threads = None,
    timeout: Timeout = 600.0,
    memory_limit: MemoryLimit = None,
    as_json: AsJson = False,
) -> None:
    """Train or fine-tune a diffusion transformer on N devices.

    Settings have the names of diffusers' training scripts. Without degrees, devices are data ranks.

    [bold]Examples[/bold]

    ditmesh train emoji.yaml --devices 2

    ditmesh train emoji.yaml --ulysses 2 --set optimizer.learning_rate=1e-5 --set lora.rank=8

    ditmesh train --check run.yaml

    torchrun --nproc-per-node 4 -m ditmesh train emoji.yaml --data 2 --ulysses 2
    """
    if check:
        emit(_checked(config, change or ()), as_json, _say_check)
        return
    from ..launch import launcher, torchrun_rank

    place = torchrun_rank()
    if place is not None and devices not in (None, place.world_size):
        raise ConfigError(f"--devices {devices}, but torchrun has started {place.world_size} ranks; leave it out")
    devices = devices if place is None else place.world_size
    chosen = _configured(config, change or (), parallel.settings(), resume, devices)
    world_size = devices or chosen.parallel.world_size
    kind = _device_of(chosen, device, place, world_size)
    checked, limit = memory_check(memory_limit)
    options = {"timeout": timeout, "check_memory": checked, "memory_limit": limit}
    show = Shown(place is None or place.rank == 0)
    with show.progress, launcher(place and "torchrun", world_size, kind, threads, timeout) as ranks:
        results = ranks.run(_on_rank, chosen, options, on_message=lambda _, now: show(now))
        is_reporter = ranks.is_reporter
    if is_reporter:
        emit({**results[0], "devices": world_size, "device": kind}, as_json, _say)


def _device_of(chosen: TrainConfig, device: str, place: Any, world_size: int) -> str:
    """The kind of device of a run whose settings, model and folders are checked before ranks start."""
    from ..generate.model_info import find_model
    from ..generate.run import PRELOAD
    from ..launch import begin_local_ranks, resolve_device
    from ..train.checkpoints.folder import check_output
    from ..train.preflight import check_run, check_settings

    check_settings(chosen)
    chosen.parallel.check_world_size(world_size)
    if place is None:
        # Under torchrun all ranks train together.
        check_output(chosen)
    info = find_model(chosen.pretrained_model_name_or_path)
    begin_local_ranks(device, (*PRELOAD, "ditmesh.train.run"))
    check_run(chosen, info)
    return resolve_device(device, world_size if place is None else place.local_size)


def _checked(config: Path, changes: Sequence[str]) -> dict[str, Any]:
    """The report of --check: how a model would be trained, and on which data, by a file of settings or by name."""
    from ..generate.runner import quieten
    from ..train.config import TrainConfig
    from ..train.observed.check import checked_recipe, loaded_pipeline

    is_run = config.suffix in (".yaml", ".yml")
    if is_run:
        run = TrainConfig.read(config).model_dump(exclude_unset=True)
    else:
        run = {"pretrained_model_name_or_path": str(config), "data": {"train_data_dir": "."}, "output_dir": "."}
    for one in changes:
        _change(run, one)
    quieten()
    chosen = TrainConfig.read(run)
    if chosen.objective != "denoising":
        raise ConfigError(f"--check has no {chosen.objective}; try it with --set optimizer.max_train_steps=1 instead")
    if not is_run:
        return checked_recipe(chosen)
    from ..train.data.check import checked_data
    from ..train.memory import least_memory
    from ..train.preflight import check_folders

    check_folders(chosen)
    pipe = loaded_pipeline(chosen)
    recipe = checked_recipe(chosen, pipe)
    return {**recipe, "data": checked_data(chosen, pipe), "memory": least_memory(chosen)}


def _say_check(result: dict[str, Any]) -> Report:
    report = Report()
    report.text(f"{result['pipeline']}, {result['transformer']}, objective {result['objective']}")
    if result["trained_as"] is not None:
        report.text(f"Its transformer is trained in {result['trained_as']}; it loads the weights and the LoRA.")
    if result["timesteps"] is not None:
        low, high = result["timesteps"]
        report.text(f"Of two transformers {result['component']} is trained, on timesteps {low:g} to {high:g}.")
    if result["picture"] is not None:
        own = {"first frame": "the sample's first frame", "hole": "the sample's image with a hole"}
        report.text(f"Its input beside the caption is {own.get(result['picture'], 'a reference image')}.")
    for size in result["sizes"]:
        rows = [["arguments by caption", ", ".join(size["captions"])]]
        if size["pictures"]:
            rows.append(["arguments by picture", ", ".join(size["pictures"])])
        rows.append(["round trip", f"ends {size['round_trip']:.1e} from the latents of the target"])
        report.table((f"{size['size'][0]} x {size['size'][1]} pixels", "as seen in the pipeline's own loop"), rows)
    if "data" in result:
        _say_data(report, result["data"])
        memory = result["memory"]
        words = "not known before a run" if memory is None else f"{memory / 1e9:.3g} GB on a rank before activations"
        report.text(f"memory: {words}; ditmesh memory has the table")
    return report


def _say_data(report: Report, data: dict[str, Any]) -> None:
    rows = []
    for row in data["sets"]:
        share = f"{row['per_epoch']} (weight {row['weight']:g})"
        rows.append([row["dir"], str(row["samples"]), share, str(row["masks"] or ""), str(row["references"] or "")])
    report.table(("data set", "samples", "in an epoch", "with mask", "with reference"), rows)
    rows = [
        [f"{bucket['size'][0]} x {bucket['size'][1]}", str(bucket["samples"]), f"{bucket['cut_away']:.0%}"]
        for bucket in data["buckets"]
    ]
    report.table(("bucket (height x width)", "samples", "cut away"), rows)
    captions = data["captions"]
    word = "captions" if captions["by"] == "text" else "labels"
    sources = ", ".join(f"{count} of {name}" for name, count in captions["sources"].items())
    report.text(f"{word}: {captions['with']} of {count(data['samples'], 'sample')} ({sources})")
    points = list(captions["cut"])
    if captions["without"]:
        points.append(f"without: {enumerated(captions['without'], 8)}")
    points += [f"skipped: {reason}" for reason in data["skipped"]]
    points += data["notes"]
    if data["decoded"] < data["samples"]:
        points.append(f"{data['decoded']} of {data['samples']} samples were decoded; the others by their heads alone")
    more = [f"and {len(points) - MOST_POINTS} others (--json has all)"] if len(points) > MOST_POINTS else []
    report.points([*points[:MOST_POINTS], *more])
    report.text(f"{count(data['steps'], 'step')} of {count(data['batch'], 'sample')}")


class Shown:
    """Shows reports of rank 0: a bar on a terminal; in a file or a scheduler's log a line for every step.

    Args:
        shown: this process shows them at all.
    """

    def __init__(self, shown: bool = True) -> None:
        self.progress = bar(shown=shown)
        self._in_lines = not self.progress.console.is_terminal
        # A bar would be one line, at the end.
        self.progress.disable |= self._in_lines
        self._task = self.progress.add_task("loading", total=None)
        self._what = ""

    def __call__(self, now: dict[str, Any]) -> None:
        """Show a report: lines, the progress before the first step, or a step."""
        if "lines" in now:
            for line in now["lines"]:
                self._say(line)
        elif "what" in now:
            what, done, total = now["what"], now["done"], now["total"]
            if self._in_lines and what != self._what:
                self._say(f"{what} ...")
            self._what = what
            words = what if total or not done else f"{what}, {done}"
            self.progress.update(self._task, description=words, total=total or None, completed=done)
        else:
            name = "reward" if "reward" in now.get("numbers", {}) else "loss"
            loss = f"{name} {now['numbers'][name] if name == 'reward' else now['loss']:.4f}"
            rate = f"{now['samples_per_second']:.1f} samples/s"
            left = f"{_time(now['seconds_left'])} left"
            if self._in_lines:
                self._say(
                    f"step {now['step']}/{now['steps']}  {loss}  lr {now['lr']:.3g}  gradient norm "
                    f"{now['grad_norm']:.3g}  {rate}  {left}"
                )
            words = f"{loss}  {rate}  {left}"
            self.progress.update(self._task, description=words, total=now["steps"], completed=now["step"])

    def _say(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _configured(
    file: Path, changes: Sequence[str], settings: dict[str, Any], resume: bool, devices: int | None
) -> TrainConfig:
    """The settings of a file with the changes by options; without degrees, devices are data ranks."""
    from ..train.config import TrainConfig

    run = TrainConfig.read(file).model_dump(exclude_unset=True)
    run["parallel"] = run.get("parallel", {}) | settings
    for one in changes:
        _change(run, one)
    if resume:
        run["output"] = {**run.get("output", {}), "resume_from_checkpoint": "latest"}
    if devices is not None and not any(run["parallel"].get(axis, 1) != 1 for axis in AXES):
        run["parallel"]["data"] = devices
    return TrainConfig.read(run)


def _on_rank(config: TrainConfig, options: dict[str, Any], *, report: MessageSink) -> dict[str, Any]:
    """Train on a rank of the command; progress is reported as plain data, which the command reads without torch."""
    from ..generate.runner import quieten
    from ..train.run import train

    quieten()
    return train(config, report=lambda now: report(asdict(now)), **options)


def _change(run: dict[str, Any], change: str) -> None:
    """Apply ``name=value``; dots lead into groups."""
    name, equals, value = change.partition("=")
    if not equals:
        raise InputError(f"--set {change!r} is not NAME=VALUE")
    *groups, last = name.split(".")
    for group in groups:
        run[group] = run[group] if run.get(group) else {}
        if not isinstance(run[group], dict):
            raise InputError(f"--set {change!r}: {group} is no group of settings")
        run = run[group]
    from ..train.config import parsed_yaml

    try:
        run[last] = parsed_yaml(value)
    except ValueError as error:
        raise InputError(f"--set {change!r}: {error}") from None
    if isinstance(run[last], str):
        # YAML reads 1e-5 as text.
        with contextlib.suppress(ValueError):
            run[last] = float(run[last])


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _say(result: dict[str, Any]) -> Report:
    report = Report()
    loss = "" if result["loss"] is None else f", loss {result['loss']:.4f}"
    before = f" after {count(result['resumed'], 'step')} before" if result["resumed"] else ""
    done = count(result["step"] - result["resumed"], "step")
    report.text(f"{done}{before} in {_time(result['seconds'])} on {count(result['devices'], 'device')}{loss}")
    if result["memory"]:
        report.text(f"{result['memory'] / 1e9:.3g} GB on a rank at the peak of the first step")
    if result["weights"] is not None:
        report.text(f"digest of the weights, the same on any number of devices: {result['weights']}")
    report.points([f"changed: {one}" for one in result["changed"]])
    for name, what in (("skipped", "skipped"), ("notes", "note"), ("unsaved", "not saved")):
        report.points([f"{what}: {one}" for one in result[name]])
    report.text(result["pipeline"])
    return report

"""`ditmesh verify`: compare configurations with one device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import library_versions
from ..config import ParallelConfig
from ..errors import ConfigError, InputError
from ..launch import TorchrunRanks, default_threads, launcher, torchrun_rank
from ..report.formatting import count
from ..report.report import Report, StyledText
from ..request import MOST_TOGETHER
from .generate import check_joined
from .options import AsJson, RankOptions, SampleOptions, at_least, common_option, with_groups
from .show import bar, emit
from .values import configs_of, fetched, picture_job, read_prompts

if TYPE_CHECKING:
    from ..generate.job import PictureJob
    from ..generate.model_info import ModelInfo
    from ..verify.runs import VerifyRanks


@dataclass(frozen=True)
class CompareOptions:
    """Options of the comparison."""

    model: Annotated[
        str | None,
        common_option(
            "--model", "-m", help="Load this model: folder or hub id, or an embedded model.", show_default="emoji-sd3"
        ),
    ] = None
    prompt: Annotated[
        list[str] | None,
        common_option(
            help="Generate from this prompt; may be repeated.", show_default="an embedded model's first caption"
        ),
    ] = None
    all_of: Annotated[
        int | None,
        common_option(
            "--all", metavar="N", help="Verify every sensible configuration of N devices.", callback=at_least(2)
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        typer.Option(
            rich_help_panel="Comparison",
            help="Accept this relative difference of latents and images at most.",
            show_default="float32 1e-4, float16 0.02, bfloat16 0.1; none for stale strategies",
            callback=at_least(0),
        ),
    ] = None


@with_groups
def verify(
    *,
    configs: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG...", help='Verify these: words such as "ulysses=2 cfg=2", or a YAML file.'),
    ] = None,
    comparing: CompareOptions,
    samples: SampleOptions,
    ranks: RankOptions,
    as_json: AsJson = False,
) -> None:
    """Generate on one device and on several, and report the first and the largest difference.

    The one device runs the pipeline as diffusers has it; for a reproducible configuration it runs the same settings on
    one device, and every bit has to be the same. Exits with code 1 when a configuration is outside its tolerance.

    [bold]Examples[/bold]

    ditmesh verify "ulysses=2" "ring=2 cfg=2" --prompt "a red fox"

    ditmesh verify --all 4 --steps 8 --json

    torchrun --nproc-per-node 2 -m ditmesh verify ulysses=2
    """
    from ..generate.job import check_job
    from ..generate.run import PRELOAD

    asked = configs_of(configs or [])
    if not asked and comparing.all_of is None:
        raise InputError('there is no configuration to verify; write one, such as "ulysses=2", or say --all 2')
    if samples.num_images > MOST_TOGETHER:
        raise InputError(f"--num-images {samples.num_images}: verify compares one call's; use {MOST_TOGETHER} at most")
    prompts = _prompts(comparing.model or "emoji-sd3", comparing.prompt, samples.prompts_file)
    together = samples.num_images
    job, info = picture_job(comparing.model, prompts, samples, ranks.timeout, tempfile.gettempdir(), per_call=together)
    largest = max([config.world_size for config in asked] + [comparing.all_of or 1])
    check_job(job, info, largest)
    ranks.begin(PRELOAD)
    offered = _checked(job, info, asked, comparing.all_of)
    joined = torchrun_rank()
    if joined is not None:
        check_joined(ranks)
        if other := next((config for config in (*asked, *offered) if config.world_size != joined.world_size), None):
            raise InputError(
                f"torchrun has started {joined.world_size} ranks, and {other.describe()!r} is for {other.world_size}; "
                "leave it out, or leave torchrun out, and ranks are started for each configuration"
            )
    kind = ranks.kind(largest if joined is None else joined.local_size)
    job = fetched(job.changed(dtype=ranks.dtype_on(kind)), info)
    result = _verify(job, asked, offered, kind, ranks, comparing.tolerance)
    if result is None:
        return
    emit(result, as_json, _say)
    if not result["passed"]:
        raise typer.Exit(1)


def _prompts(model: str, prompts: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line and of a file; otherwise an embedded model's first caption."""
    from .. import zoo

    default = zoo.captions(model)[:1] if model in zoo.EMBEDDED and file is None else None
    return read_prompts(prompts or default, file)


def _checked(
    job: PictureJob, info: ModelInfo, asked: Sequence[ParallelConfig], all_of: int | None
) -> list[ParallelConfig]:
    """The configurations to verify; raises an error for empty ones or those that do not fit."""
    from ..generate.job import check_config
    from ..recipe import RECIPE
    from ..strategies.support import check_tested as check_support
    from ..verify.runs import reference_config, sensible

    for config in asked:
        if config == (reference_config(config) or ParallelConfig()):
            raise ConfigError(f"{config.describe()!r} compares one device with itself; write such as 'ulysses=2'")
        check_config(config, info, config.world_size, job.size, job.frames or 1)
        check_support(info.transformer_class, config, RECIPE)
    if all_of is None:
        return []
    guided = job.guidance is None or job.guidance > 1
    offered = sensible(all_of, info, job.n, guided, job.size, job.frames or 1)
    return [config for config in offered if config not in asked]


def _verify(
    job: PictureJob,
    asked: Sequence[ParallelConfig],
    offered: Sequence[ParallelConfig],
    kind: str,
    ranks: RankOptions,
    tolerance: float | None,
) -> dict[str, Any] | None:
    """Run all configurations; returns the result as data. None: another rank of torchrun prints it."""
    from ..verify.runs import compared_runs, config_name, reference_config
    from ..verify.verdicts import judge

    configs = [*asked, *offered]
    with _ranks(job, configs, kind, ranks) as runner, bar(shown=runner.is_reporter) as progress:
        task = progress.add_task("starting", total=None)

        def show(action: str, begun: int, total: int | None = None) -> None:
            progress.update(task, description=action, advance=begun, total=total)

        runs = compared_runs(job, configs, runner, show)
        if not runner.is_reporter:
            return None
        show("comparing", 0)
        references = {config: reference_config(config) for config in configs}
        verdicts = [judge(job, config, runs[config], runs[references[config]][0], tolerance) for config in configs]
    for config, verdict in zip(configs, verdicts, strict=True):
        if verdict.refused and config in asked:
            raise ConfigError(f"{verdict.config}: {verdict.refused}")
    if all(verdict.refused for verdict in verdicts):
        raise InputError(f"none of the {len(verdicts)} configurations can run: {verdicts[0].refused}")
    return {
        "model": job.name,
        "prompts": list(job.prompts),
        "seed": job.seed,
        "steps": job.steps,
        "guidance": job.guidance,
        "size": list(job.size) if job.size else None,
        "images": job.n,
        "frames": job.frames,
        "dtype": job.dtype,
        "device": kind,
        "threads": runner.threads,
        "versions": library_versions(),
        "one_device": [
            {"config": config_name(reference), "seconds": run.seconds, "repeats": run.repeats}
            for reference in dict.fromkeys(references.values())
            if not (run := runs[reference][0]).refused
        ],
        "configs": [verdict.as_data() for verdict in verdicts],
        "passed": all(verdict.passed for verdict in verdicts),
    }


@contextmanager
def _ranks(job: PictureJob, configs: Sequence[ParallelConfig], kind: str, ranks: RankOptions) -> Iterator[VerifyRanks]:
    """The ranks to run on."""
    from ..verify.runs import VerifyRanks

    if (joined := torchrun_rank()) is None:
        # The same number of threads for all, because kernels may round differently otherwise.
        threads = ranks.threads or default_threads(max(config.world_size for config in configs), kind)
        yield VerifyRanks(lambda count: launcher(ranks.launcher, count, kind, threads, job.timeout), threads)
        return
    with TorchrunRanks(joined.world_size, kind, ranks.threads, job.timeout) as started:
        yield VerifyRanks(lambda _: nullcontext(started), started.threads, started.is_reporter)


def _say(result: dict[str, Any]) -> Report:
    report = Report()
    references = ", ".join(f"{run['config']} {run['seconds']:.2f} s" for run in result["one_device"])
    report.text(
        f"{count(len(result['prompts']), 'prompt')}, {result['dtype']} on {result['device']}, "
        f"{count(result['threads'], 'thread')} a rank; compared with: {references}"
    )
    header = ("configuration", "largest", "PSNR dB", "SSIM", "latents", "seconds", "sent MB", "verdict")
    report.table(header, [_cells(verdict) for verdict in result["configs"]])
    for run in result["one_device"]:
        if not run["repeats"]:
            report.text(f"{run['config']}: two runs of it gave different bits")
    for verdict in result["configs"]:
        report.points(_lines(verdict))
    return report


def _cells(verdict: dict[str, Any]) -> list[str]:
    outcome = StyledText(
        verdict["outcome"], "unsure" if not verdict["judged"] else "good" if verdict["passed"] else "bad"
    )
    if verdict["refused"]:
        return [verdict["config"], *[""] * 6, outcome]
    return [
        verdict["config"],
        _error(verdict["largest"]),
        f"{verdict['psnr']:.1f}" if verdict["psnr"] is not None else "",
        f"{verdict['ssim']:.4f}",
        _error(verdict["latents"]),
        f"{verdict['seconds']:.2f}",
        f"{sum(verdict['bytes_sent'].values()) / 1e6:.2f}",
        outcome,
    ]


def _lines(verdict: dict[str, Any]) -> list[str]:
    from ..verify.steps import ComparedTensor

    name = verdict["config"]
    if verdict["refused"]:
        return [f"{name}: {verdict['refused']}"]
    lines = []
    if verdict["first_bit"] is not None:
        first = ComparedTensor(**verdict["first_bit"])
        lines.append(f"{name}: first bits that differ: {first.describe()}")
        beyond = verdict["first_beyond"]
        if beyond is not None:
            lines.append(f"{name}: first beyond the tolerance: {ComparedTensor(**beyond).describe()}")
    if not verdict["repeats"]:
        lines.append(f"{name}: two runs of it gave different bits")
    return lines


def _error(value: float | None) -> str:
    """A difference in two digits."""
    return "infinite" if value is None else f"{value:.1e}" if value else "0"

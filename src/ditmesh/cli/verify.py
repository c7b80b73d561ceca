"""`ditmesh verify`: compare configurations with one device."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .._version import library_versions
from ..config import ParallelConfig
from ..core.files import finite
from ..errors import ConfigError, InputError
from ..launch import TorchrunRanks, default_threads, guarded_folder, torchrun_rank
from ..report.formatting import count
from ..report.report import Report, StyledText
from ..request import MOST_TOGETHER
from .generate import check_joined
from .options import AsJson, RankOptions, SampleOptions, at_least, common_option, output_option, with_groups
from .show import bar, emit, provenance
from .values import configs_of, fetched, picture_job, read_prompts

if TYPE_CHECKING:
    from ..generate.job import PictureJob
    from ..generate.model_info import ModelInfo
    from ..lab.verify.timeline import Overlap
    from ..verify.ranks import VerifyRanks
    from ..verify.runs import RankRun
    from ..verify.verdicts import Verdict


compare_option = functools.partial(typer.Option, rich_help_panel="Comparison")


@dataclass(frozen=True)
class CompareOptions:
    """Options of the comparison."""

    all_of: Annotated[
        int | None,
        common_option(
            "--all", metavar="N", help="Verify every sensible configuration of N devices.", callback=at_least(2)
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        compare_option(
            help="Accept this relative difference of latents and images at most.",
            show_default="float32 1e-4, float16 0.02, bfloat16 0.1; none for stale strategies",
            callback=at_least(0),
        ),
    ] = None
    trace_dir: Annotated[
        str | None,
        compare_option(
            metavar="DIR", help="Keep one device's results in this folder while this runs.", show_default="TMPDIR"
        ),
    ] = None
    trace_gb: Annotated[
        float,
        compare_option(
            metavar="GB",
            help="Use this much of --trace-dir, and at most half of its free space; large models keep fewer channels.",
            callback=at_least(0.001),
        ),
    ] = 4.0
    html: Annotated[str | None, output_option(metavar="FILE", help="Write a page with images and curves.")] = None
    trace: Annotated[
        str | None,
        output_option(
            metavar="FILE", help="Write the times of computation and waiting as a Chrome trace for ui.perfetto.dev."
        ),
    ] = None


@with_groups
def verify(
    context: typer.Context,
    *,
    configs: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG...", help='Verify these: words such as "ulysses=2 cfg=2", or a YAML file.'),
    ] = None,
    model: Annotated[
        str | None,
        common_option(
            "--model", "-m", help="Load this model: folder or hub id, or an embedded model.", show_default="emoji-sd3"
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        common_option(
            help="Generate from this prompt; may be repeated.", show_default="an embedded model's first caption"
        ),
    ] = None,
    more_configs: Annotated[
        list[str] | None,
        common_option("--configs", metavar="CONFIG", help="Verify this configuration too; may be repeated."),
    ] = None,
    pictures: SampleOptions,
    comparing: CompareOptions,
    ranks: RankOptions,
    as_json: AsJson = False,
) -> None:
    """Generate on one device and on several, and report the first and the largest difference.

    The one device runs the pipeline as diffusers has it; for a reproducible configuration it runs the same settings on
    one device, and every bit has to be the same. Exits with code 1 when a configuration is outside its tolerance.

    [bold]Examples[/bold]

    ditmesh verify "ulysses=2" "ring=2 cfg=2" --prompt "a red fox"

    ditmesh verify --all 4 --steps 8 --html verify.html

    torchrun --nproc-per-node 2 -m ditmesh verify ulysses=2
    """
    from ..generate.job import check_folder, check_job
    from ..generate.run import PRELOAD

    asked = configs_of([*(more_configs or []), *(configs or [])])
    if not asked and comparing.all_of is None:
        raise InputError('there is no configuration to verify; write one, such as "ulysses=2", or say --all 2')
    if pictures.num_images > MOST_TOGETHER:
        raise InputError(f"--num-images {pictures.num_images}: verify compares one call's; use {MOST_TOGETHER} at most")
    page_at, trace_at = _file_at(comparing.html, "--html"), _file_at(comparing.trace, "--trace")
    room = comparing.trace_dir if comparing.trace_dir is not None else tempfile.gettempdir()
    check_folder(room, "--trace-dir")
    prompts = _prompts("emoji-sd3" if model is None else model, prompt, pictures.prompts_file)
    job, info = picture_job(model, prompts, pictures, ranks.timeout, room, per_call=pictures.num_images)
    largest = max([config.world_size for config in asked] + [comparing.all_of or 1])
    check_job(job, info, largest)
    ranks.begin(PRELOAD)
    offered = _checked(job, info, asked, comparing.all_of)
    there = torchrun_rank()
    if there is not None:
        _check_joined(there.world_size, [*asked, *offered], ranks)
    kind = ranks.kind(largest if there is None else there.local_size)
    job = fetched(job.changed(dtype=ranks.dtype_on(kind)), info)
    made_by = None if page_at is None else provenance(context.obj or ())
    found = _verify(job, asked, offered, kind, ranks, comparing, made_by)
    if found is None:
        return
    result, page = found
    if trace_at is not None:
        result["trace"] = str(trace_at)
    if page_at is not None and page is not None:
        page.write(page_at)
        result["html"] = str(page_at)
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


def _check_joined(world_size: int, configs: Sequence[ParallelConfig], ranks: RankOptions) -> None:
    check_joined(ranks)
    for config in configs:
        if config.world_size != world_size:
            raise InputError(
                f"torchrun has started {world_size} ranks, and {config.describe()!r} is for {config.world_size}; leave "
                "it out, or leave torchrun out, and ranks are started for each configuration"
            )


def _file_at(name: str | None, option: str) -> Path | None:
    """The path of an output file, if it is writable."""
    from ..generate.job import check_folder

    if name is None:
        return None
    if not name or Path(name).is_dir():
        raise InputError(f"{option} {name!r} is a folder; give the name of a file in it")
    check_folder(Path(name).parent, option)
    return Path(name)


def _verify(
    job: PictureJob,
    asked: Sequence[ParallelConfig],
    offered: Sequence[ParallelConfig],
    kind: Literal["cpu", "cuda"],
    ranks: RankOptions,
    comparing: CompareOptions,
    made_by: dict[str, Any] | None,
) -> tuple[dict[str, Any], Any] | None:
    """Run all configurations; returns the result as data, and the page if ``made_by`` is given.

    None: another rank of torchrun says it.
    """
    from ..lab.verify.timeline import TimelineRecorder, overlaps, write_chrome_trace
    from ..verify.comparison import Comparison

    configs = [*asked, *offered]
    with _ranks(job, configs, kind, ranks) as (runner, folder), bar(shown=runner.is_reporter) as progress:
        task = progress.add_task("starting", total=None)

        def said(what: str, steps: int = 0) -> None:
            progress.update(task, description=what, advance=steps, total=comparison.runs)

        timeline = TimelineRecorder if comparing.trace is not None else None
        comparison = Comparison(job, configs, runner, folder, timeline, said)
        comparison.run(comparing.trace_gb * 1e9)
        if not runner.is_reporter:
            return None
        said("comparing")
        verdicts = comparison.verdicts(comparing.tolerance)
        for config, verdict in zip(configs, verdicts, strict=True):
            if verdict.refused and config in asked:
                raise ConfigError(f"{verdict.config}: {verdict.refused}")
    if comparing.trace is not None:
        write_chrome_trace(comparing.trace, comparison.timelines())
    overlap = {name: overlaps(of_ranks) for name, of_ranks in comparison.timelines().items()}
    where = {"device": kind, "threads": runner.threads}
    return _result(job, verdicts, comparison.alone, where, comparison.rank_0(), made_by, overlap)


@contextmanager
def _ranks(
    job: PictureJob, configs: Sequence[ParallelConfig], kind: Literal["cpu", "cuda"], ranks: RankOptions
) -> Iterator[tuple[VerifyRanks, str]]:
    """The ranks to run on, and a folder for the results of one device."""
    from ..verify.ranks import JoinedRanks, StartedRanks, joined_folder

    if (there := torchrun_rank()) is None:
        # The same number of threads for all, because kernels may round differently otherwise.
        threads = ranks.threads or default_threads(max(config.world_size for config in configs), kind)
        with guarded_folder("ditmesh-verify-", job.out) as folder:
            yield StartedRanks(ranks.launcher, kind, threads, job.timeout), folder
        return
    with (
        TorchrunRanks(there.world_size, kind, ranks.threads, job.timeout) as joined,
        joined_folder("ditmesh-verify-", job.out) as folder,
    ):
        yield JoinedRanks(joined), folder


def _result(
    job: PictureJob,
    verdicts: list[Verdict],
    alone: dict[str, RankRun],
    where: dict[str, Any],
    rank_0: dict[str, RankRun],
    made_by: dict[str, Any] | None,
    overlap: dict[str, dict[str, Overlap]],
) -> tuple[dict[str, Any], Any]:
    """The verdicts and overlaps by configuration as data, and the page if ``made_by`` is given."""
    from ..lab.verify.page import page_of

    ran = [verdict for verdict in verdicts if not verdict.refused]
    if not ran:
        raise InputError(f"none of the {len(verdicts)} configurations can run: {verdicts[0].refused}")
    facts = {
        "model": job.name,
        "prompts": list(job.prompts),
        "seed": job.seed,
        "steps": job.steps,
        "guidance": job.guidance,
        "size": list(job.size) if job.size else None,
        "images": job.n,
        "frames": job.frames,
        "dtype": job.dtype,
        **where,
        "versions": library_versions(),
        "one_device": [
            {"config": name, "seconds": one.seconds, "repeats": one.repeats, "channel_stride": one.stride}
            for name, one in alone.items()
            if not one.refused
        ],
    }
    described = [
        verdict.as_data()
        | {"overlap": {axis: asdict(value) for axis, value in overlap.get(verdict.config, {}).items()}}
        | {"outcome": verdict.outcome, "judged": verdict.judged}
        for verdict in verdicts
    ]
    result = {**facts, "configs": described, "passed": all(verdict.passed for verdict in ran)}
    if made_by is None:
        return result, None
    shown = {"device": where["device"], "threads of each rank": where["threads"], **made_by}
    return result, page_of(job, verdicts, rank_0, alone, shown, finite(result))


def _say(result: dict[str, Any]) -> Report:
    report = Report()
    single = ", ".join(f"{one['config']} {one['seconds']:.2f} s" for one in result["one_device"])
    report.text(
        f"{count(len(result['prompts']), 'prompt')}, {result['dtype']} on {result['device']}, "
        f"{count(result['threads'], 'thread')} a rank; compared with: {single}"
    )
    header = ("configuration", "largest", "PSNR dB", "SSIM", "latents", "seconds", "sent MB", "verdict")
    report.table(header, [_cells(verdict) for verdict in result["configs"]])
    for one in result["one_device"]:
        if not one["repeats"]:
            report.text(f"{one['config']}: two runs of it gave different bits")
        if one["channel_stride"] > 1:
            report.text(
                f"{one['config']}: every bit was compared; how far blocks differ was measured on one channel in "
                f"{one['channel_stride']}"
            )
    for verdict in result["configs"]:
        report.points(_lines(verdict))
    report.points([result[file] for file in ("html", "trace") if file in result])
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
    from ..verify.verdicts import Divergence

    name = verdict["config"]
    if verdict["refused"]:
        return [f"{name}: {verdict['refused']}"]
    lines = []
    if verdict["first_bit"] is not None:
        first = Divergence(**verdict["first_bit"])
        lines.append(f"{name}: first bits that differ: {first.describe()}")
        beyond = verdict["first_beyond"]
        if beyond is not None:
            lines.append(f"{name}: first beyond the tolerance: {Divergence(**beyond).describe()}")
        if verdict["promise"] != "bits" and len(verdict["growth"]) > 1:
            start, end = verdict["growth"][0], verdict["growth"][-1]
            lines.append(
                f"{name}: difference of the latents {_error(start['latents'])} after step {start['step']}, "
                f"{_error(end['latents'])} after step {end['step']}"
            )
    for axis, found in verdict["overlap"].items():
        hidden = 1 - found["waited"] / found["under_way"] if found["under_way"] else 1.0
        lines.append(
            f"{name}: {axis}: {found['messages']} messages under way for {found['under_way']:.3f} s, ranks waited "
            f"{found['waited']:.3f} s for them; {hidden:.0%} overlapped computation"
        )
    if not verdict["repeats"]:
        lines.append(f"{name}: two runs of it gave different bits")
    if verdict["seen"] < 1:
        lines.append(
            f"{name}: {verdict['seen']:.1%} of one device's tensors were compared; the rest was not computed, or "
            "stages do not show it"
        )
    return lines


def _error(value: float | None) -> str:
    """Replace infinite numbers by null, because JSON has no infinity."""
    return "infinite" if value is None else f"{value:.1e}" if value else "0"

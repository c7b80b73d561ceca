"""Verdicts on configurations, from the runs of their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from ...config import ParallelConfig
from ...core.files import finite
from ...generate.job import PictureJob
from ...quality import metrics
from ...recipe import promise_of
from ...strategies.base import Promise
from .runs import Run, name_of, reference_of
from .timeline import Overlap, overlaps
from .tracing import SCHEDULER, Compared, Trace, merge

# Largest relative difference of latents and pictures that rounding explains, by type of the weights. Measured with the
# embedded model, exact strategies stay under 5e-7, 3e-3 and 2e-2; steps multiply what the first ones differ by, and
# other models have more of both.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Divergence:
    """The first place where a configuration differs from one device.

    Attributes:
        picture: number of the prompt, from 1.
        step, call, block, tensor: as in `Spot`; the block is its path.
        token: first token of it that differs, in the scheduler's tensors the first row of values.
        ranks: who computed what differs.
        error, largest: relative and absolute difference.
    """

    picture: int
    step: int
    call: int
    block: str
    tensor: str
    token: int | None
    ranks: tuple[int, ...]
    error: float
    largest: float

    def describe(self) -> str:
        """Such as ``step 2, transformer_blocks.1, image (token 128, rank 1)``."""
        where = f"step {self.step}, {self.block}, {self.tensor}"
        if self.picture > 1:
            where = f"prompt {self.picture}, {where}"
        who = "ranks " + " and ".join(map(str, self.ranks)) if len(self.ranks) > 1 else f"rank {(*self.ranks, 0)[0]}"
        at = f"token {self.token}, " if self.token is not None and self.block != "scheduler" else ""
        return f"{where} ({at}{who})"


@dataclass(frozen=True)
class Step:
    """Largest relative difference in one step, over all prompts: of the latents, of the prediction, of any block."""

    step: int
    latents: float
    prediction: float
    blocks: float


@dataclass(frozen=True)
class Verdict:
    """A configuration against one device.

    Attributes:
        config, reference: in words; settings: as given to `ParallelConfig`.
        promise: of its strategies, see `ditmesh.recipe.promise_of`.
        tolerance: what it was judged by; None: not judged.
        passed: whether it kept its promise, or the tolerance; a refused one has not failed.
        refused: why it could not run, if it could not.
        equal: pictures and all of the scheduler's tensors have the same bits as on one device; blocks_equal: so have
            all blocks.
        seen: share of the trace that was compared.
        repeats: two runs of it gave the same bits.
        error: what is judged: the largest of the relative differences of latents (any step) and pictures.
        largest, mean, psnr, ssim, perceptual: of the worst picture; pictures: the same for every picture.
        latents: relative difference of the last step's latents.
        seconds, one_device_seconds: unrecorded, without loading; bytes_sent: then, by axis, all ranks together.
        first_bit, first_beyond: where it first differs at all, and beyond the tolerance.
        growth: difference per step; heat: the largest by block and step, over all prompts and streams.
        overlap: how far messages of the first call hid behind computation, by axis, where that was recorded.
    """

    config: str
    settings: dict[str, Any]
    devices: int
    reference: str
    promise: Promise
    tolerance: float | None
    passed: bool
    refused: str | None = None
    equal: bool = False
    blocks_equal: bool = False
    seen: float = 0.0
    repeats: bool = True
    error: float = 0.0
    largest: float = 0.0
    mean: float = 0.0
    psnr: float | None = None
    ssim: float = 1.0
    perceptual: float | None = None
    pictures: tuple[metrics.Difference, ...] = ()
    latents: float | None = None
    seconds: float = 0.0
    one_device_seconds: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    first_bit: Divergence | None = None
    first_beyond: Divergence | None = None
    growth: tuple[Step, ...] = ()
    heat: dict[str, dict[int, float]] = field(default_factory=dict)
    overlap: dict[str, Overlap] = field(default_factory=dict)

    @property
    def judged(self) -> bool:
        """Whether anything was expected of it."""
        return not self.refused and (self.promise == "bits" or self.tolerance is not None)

    @property
    def outcome(self) -> str:
        """In a few words."""
        if self.refused:
            return "refused"
        if self.promise == "bits":
            return "same bits" if self.passed else "other bits"
        if self.tolerance is None:
            return "same bits" if self.equal else "not judged"
        how = "same bits" if self.equal else f"within {self.tolerance:g}"
        return how if self.passed else f"beyond {self.tolerance:g}"

    def as_data(self) -> dict[str, Any]:
        """As JSON can hold it: infinite differences are null."""
        return finite(asdict(self))


def judge(
    job: PictureJob,
    config: ParallelConfig,
    runs: Sequence[Run],
    alone: Run,
    trace: str | Path,
    tolerance: float | None = None,
    perceptual: bool = False,
) -> Verdict:
    """The verdict on a configuration, from the runs of all its ranks.

    Args:
        job, config: what was generated, and how.
        runs: every rank's, in rank order.
        alone, trace: the one device's run, and the folder of its trace.
        tolerance: largest relative difference allowed; None: that of `TOLERANCES`, and none for stale strategies.
        perceptual: measure the learned perceptual distance too, where its weights are.
    """
    promise = promise_of(config)
    if tolerance is None and promise == "tolerance":
        tolerance = TOLERANCES[job.dtype]
    verdict = Verdict(
        config=name_of(config),
        settings=config.model_dump(mode="json"),
        devices=config.world_size,
        reference=name_of(reference_of(config)),
        promise=promise,
        tolerance=tolerance,
        passed=True,
        refused=runs[0].refused,
    )
    if verdict.refused:
        return verdict
    compared = merge(Trace(trace), [part for run in runs for part in run.parts])
    pictures = tuple(
        metrics.compare(ours, theirs, perceptual)
        for mine, whole in zip(runs[0].pictures, alone.pictures, strict=True)
        for ours, theirs in zip(mine, whole, strict=True)
    )
    states = [one for one in compared if one.spot.path == SCHEDULER]
    latents = [one for one in states if one.spot.tensor == "latents"]
    agreed = all(run.digests == runs[0].digests for run in runs)
    equal = agreed and all(one.equal for one in (*pictures, *states))
    error = max([one.error for one in latents] + [picture.largest for picture in pictures] + [0.0 if agreed else inf])
    last = max((one.spot.step for one in latents), default=0)
    beyond = tolerance if tolerance is not None else TOLERANCES[job.dtype]
    sent: Counter[str] = Counter()
    for run in runs:
        sent.update(run.sent)
    return replace(
        verdict,
        **_worst(pictures),
        passed=equal if promise == "bits" else tolerance is None or error <= tolerance,
        equal=equal,
        blocks_equal=all(one.equal and one.seen == 1 for one in compared) and not any(run.unknown for run in runs),
        seen=sum(one.seen for one in compared) / len(compared) if compared else 0.0,
        repeats=all(run.repeats for run in runs),
        error=error,
        pictures=pictures,
        latents=max((one.error for one in latents if one.spot.step == last), default=None),
        seconds=max(run.seconds for run in runs),
        one_device_seconds=alone.seconds,
        bytes_sent=dict(sent),
        first_bit=_first(compared, lambda one: not one.equal),
        first_beyond=_first(compared, lambda one: not one.error <= beyond),
        growth=_growth(compared),
        heat=_heat(compared),
        overlap=overlaps([run.timeline for run in runs if run.timeline is not None]),
    )


def _worst(pictures: Sequence[metrics.Difference]) -> dict[str, float | None]:
    """The worst value of each measure, where it was measured; equal pictures have no PSNR."""
    worst = {"largest": max, "mean": max, "psnr": min, "ssim": min, "perceptual": max}
    return {
        name: of((value for one in pictures if (value := getattr(one, name)) is not None), default=None)
        for name, of in worst.items()
    }


def _first(compared: Sequence[Compared], differs: Callable[[Compared], bool]) -> Divergence | None:
    one = next(filter(differs, compared), None)
    if one is None:
        return None
    spot = one.spot
    place = (spot.request + 1, spot.step, spot.call, spot.path, spot.tensor)
    return Divergence(*place, one.token, one.ranks, one.error, one.largest)


def _growth(compared: Sequence[Compared]) -> tuple[Step, ...]:
    kinds = ("latents", "prediction", "blocks")
    steps: dict[int, dict[str, float]] = {}
    for one in compared:
        errors = steps.setdefault(one.spot.step, dict.fromkeys(kinds, 0.0))
        kind = "blocks" if one.spot.call else one.spot.tensor
        errors[kind] = max(errors[kind], one.error)
    return tuple(Step(step, **errors) for step, errors in sorted(steps.items()) if step > 0)


def _heat(compared: Sequence[Compared]) -> dict[str, dict[int, float]]:
    heat: dict[str, dict[int, float]] = {}
    for one in compared:
        if one.spot.call:
            row = heat.setdefault(one.spot.path, {})
            row[one.spot.step] = max(row.get(one.spot.step, 0.0), one.error)
    return heat

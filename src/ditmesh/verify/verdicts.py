"""Verdicts on configurations, from the runs of their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from ..config import ParallelConfig
from ..core.files import finite
from ..generate.job import PictureJob
from ..quality import metrics
from ..recipe import promise_of
from ..strategies.base import Promise
from .runs import RankRun, config_name, reference_config
from .tracing import SCHEDULER, ComparedTensor, Trace, merge

# Largest relative difference of latents and images that rounding explains, by type of the weights. Measured with the
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
        """The place as text, such as ``step 2, transformer_blocks.1, image (token 128, rank 1)``."""
        where = f"step {self.step}, {self.block}, {self.tensor}"
        if self.picture > 1:
            where = f"prompt {self.picture}, {where}"
        who = "ranks " + " and ".join(map(str, self.ranks)) if len(self.ranks) > 1 else f"rank {(*self.ranks, 0)[0]}"
        at = f"token {self.token}, " if self.token is not None and self.block != "scheduler" else ""
        return f"{where} ({at}{who})"


@dataclass(frozen=True)
class StepDifference:
    """Largest relative difference in one step, over all prompts: of the latents, of the prediction, of any block."""

    step: int
    latents: float
    prediction: float
    blocks: float


@dataclass(frozen=True)
class Agreement:
    """The share of tensors with the same bits.

    Attributes:
        equal: images and all of the scheduler's tensors have the same bits as on one device; blocks_equal: so have
            all blocks.
        seen: share of the trace that was compared.
        repeats: two runs of the configuration gave the same bits.
    """

    equal: bool = False
    blocks_equal: bool = False
    seen: float = 0.0
    repeats: bool = True


@dataclass(frozen=True)
class Accuracy:
    """The distances of results from those of one device.

    Attributes:
        error: the judged figure: the largest of the relative differences of latents (any step) and images.
        largest, mean, psnr, ssim, perceptual: of the worst image; pictures: the same for every image.
        latents: relative difference of the last step's latents.
    """

    error: float = 0.0
    largest: float = 0.0
    mean: float = 0.0
    psnr: float | None = None
    ssim: float = 1.0
    perceptual: float | None = None
    pictures: tuple[metrics.Difference, ...] = ()
    latents: float | None = None


@dataclass(frozen=True)
class RunCost:
    """The cost of the timed run: seconds without loading, and bytes sent by axis, over all ranks."""

    seconds: float = 0.0
    one_device_seconds: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Divergences:
    """The places where results differ.

    Attributes:
        first_bit, first_beyond: where they first differ at all, and beyond the tolerance.
        growth: difference per step; heat: the largest by block and step, over all prompts and streams.
    """

    first_bit: Divergence | None = None
    first_beyond: Divergence | None = None
    growth: tuple[StepDifference, ...] = ()
    heat: dict[str, dict[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a configuration compared with one device.

    Attributes:
        config, reference: in words; settings: as given to `ParallelConfig`.
        promise: of its strategies, see `ditmesh.recipe.promise_of`.
        tolerance: the limit of the error; None: not judged.
        refused: why it could not run, if it could not.
    """

    config: str
    settings: dict[str, Any]
    devices: int
    reference: str
    promise: Promise
    tolerance: float | None
    refused: str | None = None
    agreement: Agreement = field(default_factory=Agreement)
    accuracy: Accuracy = field(default_factory=Accuracy)
    cost: RunCost = field(default_factory=RunCost)
    where: Divergences = field(default_factory=Divergences)

    @property
    def judged(self) -> bool:
        """True if the configuration has a criterion to pass."""
        return not self.refused and (self.promise == "bits" or self.tolerance is not None)

    @property
    def passed(self) -> bool:
        """True if the configuration passed; an unsupported one has not failed."""
        if not self.judged:
            return True
        if self.promise == "bits" or self.tolerance is None:
            return self.agreement.equal
        return self.accuracy.error <= self.tolerance

    @property
    def outcome(self) -> str:
        """The verdict in a few words."""
        if self.refused:
            return "refused"
        if self.promise == "bits":
            return "same bits" if self.passed else "other bits"
        if self.tolerance is None:
            return "same bits" if self.agreement.equal else "not judged"
        how = "same bits" if self.agreement.equal else f"within {self.tolerance:g}"
        return how if self.passed else f"beyond {self.tolerance:g}"

    def as_data(self) -> dict[str, Any]:
        """The verdict as flat JSON data: infinite differences are null."""
        levels = ("agreement", "accuracy", "cost", "where")
        data: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name == "refused":
                data["passed"] = self.passed
            data |= value if name in levels else {name: value}
        return finite(data)


def judge(
    job: PictureJob,
    config: ParallelConfig,
    runs: Sequence[RankRun],
    alone: RankRun,
    trace: str | Path,
    tolerance: float | None = None,
    perceptual: bool = False,
) -> Verdict:
    """The verdict on a configuration, from the runs of all its ranks.

    Args:
        job, config: the request, and the configuration.
        runs: every rank's, in rank order.
        alone, trace: the one device's run, and the folder of its trace.
        tolerance: largest relative difference allowed; None: that of `TOLERANCES`, and none for stale strategies.
        perceptual: measure the learned perceptual distance too, where its weights are.
    """
    promise = promise_of(config)
    if tolerance is None and promise == "tolerance":
        tolerance = TOLERANCES[job.dtype]
    verdict = Verdict(
        config=config_name(config),
        settings=config.model_dump(mode="json"),
        devices=config.world_size,
        reference=config_name(reference_config(config)),
        promise=promise,
        tolerance=tolerance,
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
    return replace(
        verdict,
        agreement=_agreement(runs, compared, pictures),
        accuracy=_accuracy(runs, compared, pictures),
        cost=_cost(runs, alone),
        where=_where(compared, TOLERANCES[job.dtype] if tolerance is None else tolerance),
    )


def _same_pictures(runs: Sequence[RankRun]) -> bool:
    return all(run.digests == runs[0].digests for run in runs)


def _agreement(
    runs: Sequence[RankRun], compared: Sequence[ComparedTensor], pictures: Sequence[metrics.Difference]
) -> Agreement:
    states = [one for one in compared if one.spot.path == SCHEDULER]
    return Agreement(
        equal=_same_pictures(runs) and all(one.equal for one in (*pictures, *states)),
        blocks_equal=all(one.equal and one.seen == 1 for one in compared) and not any(run.unknown for run in runs),
        seen=sum(one.seen for one in compared) / len(compared) if compared else 0.0,
        repeats=all(run.repeats for run in runs),
    )


def _accuracy(
    runs: Sequence[RankRun], compared: Sequence[ComparedTensor], pictures: tuple[metrics.Difference, ...]
) -> Accuracy:
    latents = [one for one in compared if one.spot.path == SCHEDULER and one.spot.tensor == "latents"]
    errors = [*(one.error for one in latents), *(picture.largest for picture in pictures)]
    last = max((one.spot.step for one in latents), default=0)
    return Accuracy(
        error=max([*errors, 0.0 if _same_pictures(runs) else inf]),
        **_worst(pictures),
        pictures=pictures,
        latents=max((one.error for one in latents if one.spot.step == last), default=None),
    )


def _cost(runs: Sequence[RankRun], alone: RankRun) -> RunCost:
    sent: Counter[str] = Counter()
    for run in runs:
        sent.update(run.sent)
    return RunCost(max(run.seconds for run in runs), alone.seconds, dict(sent))


def _where(compared: Sequence[ComparedTensor], tolerance: float) -> Divergences:
    return Divergences(
        first_bit=_first(compared, lambda one: not one.equal),
        first_beyond=_first(compared, lambda one: not one.error <= tolerance),
        growth=_growth(compared),
        heat=_heat(compared),
    )


def _worst(pictures: Sequence[metrics.Difference]) -> dict[str, Any]:
    """The worst value of each measure, where it was measured; equal images have no PSNR."""
    worst = {"largest": max, "mean": max, "psnr": min, "ssim": min, "perceptual": max}
    return {
        name: of((value for one in pictures if (value := getattr(one, name)) is not None), default=None)
        for name, of in worst.items()
    }


def _first(compared: Sequence[ComparedTensor], differs: Callable[[ComparedTensor], bool]) -> Divergence | None:
    one = next(filter(differs, compared), None)
    if one is None:
        return None
    spot = one.spot
    place = (spot.request + 1, spot.step, spot.call, spot.path, spot.tensor)
    return Divergence(*place, one.token, one.ranks, one.error, one.largest)


def _growth(compared: Sequence[ComparedTensor]) -> tuple[StepDifference, ...]:
    kinds = ("latents", "prediction", "blocks")
    steps: dict[int, dict[str, float]] = {}
    for one in compared:
        errors = steps.setdefault(one.spot.step, dict.fromkeys(kinds, 0.0))
        kind = "blocks" if one.spot.call else one.spot.tensor
        errors[kind] = max(errors[kind], one.error)
    return tuple(StepDifference(step, **errors) for step, errors in sorted(steps.items()) if step > 0)


def _heat(compared: Sequence[ComparedTensor]) -> dict[str, dict[int, float]]:
    heat: dict[str, dict[int, float]] = {}
    for one in compared:
        if one.spot.call:
            row = heat.setdefault(one.spot.path, {})
            row[one.spot.step] = max(row.get(one.spot.step, 0.0), one.error)
    return heat

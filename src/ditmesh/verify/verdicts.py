"""Verdicts on configurations, from the runs of their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from ..config import ParallelConfig
from ..core.files import finite
from ..generate.job import PictureJob
from ..quality import metrics
from ..recipe import promise_of
from ..strategies.base import Promise
from .runs import RankRun, config_name, reference_config
from .steps import ComparedTensor, merge

# Largest relative difference of latents and images that rounding explains, by type of the weights. Measured with the
# embedded model, exact strategies stay under 5e-7, 3e-3 and 2e-2; steps multiply what the first ones differ by, and
# other models have more of both.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Verdict:
    """The verdict on a configuration compared with one device.

    Attributes:
        config, reference: in words; settings: as given to `ParallelConfig`.
        promise: see `ditmesh.recipe.promise_of`; tolerance: the limit of the error; None: not judged.
        refused: why it could not run, if it could not.
        equal: images and all of the scheduler's tensors have the same bits as on one device.
        repeats: two runs of the configuration gave the same bits.
        error: the judged figure: the largest of the relative differences of latents (any step) and images.
        largest, mean, psnr, ssim: of the worst image; images: the same for every image.
        latents: relative difference of the last step's latents.
        seconds, one_device_seconds: of the timed run, without loading.
        bytes_sent: in it, by axis, over all ranks.
        first_bit, first_beyond: where results first differ at all, and beyond the tolerance.
    """

    config: str
    settings: dict[str, Any]
    devices: int
    reference: str
    promise: Promise
    tolerance: float | None
    refused: str | None = None
    equal: bool = False
    repeats: bool = True
    error: float = 0.0
    largest: float = 0.0
    mean: float = 0.0
    psnr: float | None = None
    ssim: float = 1.0
    images: tuple[metrics.Difference, ...] = ()
    latents: float | None = None
    seconds: float = 0.0
    one_device_seconds: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    first_bit: ComparedTensor | None = None
    first_beyond: ComparedTensor | None = None

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
            return self.equal
        return self.error <= self.tolerance

    @property
    def outcome(self) -> str:
        """The verdict in a few words."""
        if self.refused:
            return "refused"
        if self.promise == "bits":
            return "same bits" if self.passed else "other bits"
        if self.tolerance is None:
            return "same bits" if self.equal else "not judged"
        how = "same bits" if self.equal else f"within {self.tolerance:g}"
        return how if self.passed else f"beyond {self.tolerance:g}"

    def as_data(self) -> dict[str, Any]:
        """The verdict as JSON data: infinite differences are null."""
        return finite({**asdict(self), "passed": self.passed, "outcome": self.outcome, "judged": self.judged})


def judge(
    job: PictureJob,
    config: ParallelConfig,
    runs: Sequence[RankRun],
    alone: RankRun,
    tolerance: float | None = None,
) -> Verdict:
    """The verdict on a configuration, from the runs of all its ranks.

    Args:
        runs: every rank's, in rank order; alone: the one device's.
        tolerance: largest relative difference allowed; None: that of `TOLERANCES`, and none for stale strategies.
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
    compared = merge(tensor for run in runs for tensor in run.compared)
    images = tuple(
        metrics.compare(ours, theirs)
        for call, reference in zip(runs[0].images, alone.images, strict=True)
        for ours, theirs in zip(call, reference, strict=True)
    )
    same_images = all(run.digests == runs[0].digests for run in runs)
    sent: Counter[str] = Counter()
    for run in runs:
        sent.update(run.sent)
    limit = TOLERANCES[job.dtype] if tolerance is None else tolerance
    return replace(
        verdict,
        equal=same_images and all(result.equal for result in (*images, *compared)),
        repeats=all(run.repeats for run in runs),
        **_errors(compared, images, same_images),
        images=images,
        seconds=max(run.seconds for run in runs),
        one_device_seconds=alone.seconds,
        bytes_sent=dict(sent),
        first_bit=next((tensor for tensor in compared if not tensor.equal), None),
        first_beyond=next((tensor for tensor in compared if not tensor.error <= limit), None),
    )


def _errors(
    compared: Sequence[ComparedTensor], images: Sequence[metrics.Difference], same_images: bool
) -> dict[str, Any]:
    """The judged figure, the difference of the last step's latents, and the worst value of each measure of images."""
    latents = [tensor for tensor in compared if tensor.tensor == "latents"]
    errors = [*(tensor.error for tensor in latents), *(image.largest for image in images)]
    return {
        "error": max([*errors, 0.0 if same_images else inf]),
        "latents": max((tensor.error for tensor in latents if tensor.step == latents[-1].step), default=None),
        "largest": max(image.largest for image in images),
        "mean": max(image.mean for image in images),
        # Equal images have none.
        "psnr": min((image.psnr for image in images if image.psnr is not None), default=None),
        "ssim": min(image.ssim for image in images),
    }

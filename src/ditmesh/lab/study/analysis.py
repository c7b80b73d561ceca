"""Figures of a study: means with standard errors, paired differences, the warm-up needed, and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import floor, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from ...report.formatting import count
from .plan import SYNCHRONOUS, Pair, StudyPlan

# An image with the bits of the synchronous one has an infinite ratio; so much is taken for it in means.
CAP = 100.0

# Sampler, strategy, devices, warm-up.
Combination = tuple[str, str, int, str]
# Values of images, by prompt and seed.
ByImage = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class Mean:
    """A mean over images and its standard error; None where nothing was measured, or one image only."""

    value: float | None
    error: float | None
    count: int

    def __format__(self, form: str) -> str:
        """Such as ``31.40 ± 0.52`` for ``.2f``, with a sign for ``+.2f``; empty where nothing was measured."""
        if self.value is None:
            return ""
        return format(self.value, form) + ("" if self.error is None else f" ± {format(self.error, form.lstrip('+'))}")

    @property
    def is_clear(self) -> bool:
        """True if it is over two standard errors away from zero."""
        return self.value is not None and self.error is not None and abs(self.value) > 2 * self.error

    def verdict(
        self, better: str = "better", worse: str = "worse", none: str = "no difference that can be told"
    ) -> str:
        """The verdict on a difference, in words."""
        if self.value is None:
            return "not measured"
        if self.error is None:
            return f"{better if self.value > 0 else worse if self.value < 0 else none}, on one image only"
        return (better if self.value > 0 else worse) if self.is_clear else none


def mean(values: Iterable[float | None]) -> Mean:
    """Mean and standard error of the values that are not None."""
    numbers = np.array([value for value in values if value is not None], dtype=float)
    if not numbers.size:
        return Mean(None, None, 0)
    error = float(numbers.std(ddof=1)) / sqrt(numbers.size) if numbers.size > 1 else None
    return Mean(float(numbers.mean()), error, numbers.size)


def capped(psnr: float | None) -> float:
    """A PSNR in dB for means; None stands for equal images."""
    return CAP if psnr is None else min(psnr, CAP)


def mean_difference(pairs: Iterable[tuple[ByImage, ByImage]]) -> Mean:
    """Mean difference in dB between two ways to generate, each pair measured alike, by prompt and seed.

    One figure per image: several ways to generate one image are not independent.
    """
    apart: dict[tuple[str, int], list[float]] = {}
    for ours, theirs in pairs:
        for image in ours:
            # With every step synchronous there is nothing to compare.
            if image in theirs and min(ours[image], theirs[image]) < CAP:
                apart.setdefault(image, []).append(ours[image] - theirs[image])
    return mean(sum(values) / len(values) for values in apart.values())


@dataclass(frozen=True)
class Row:
    """One combination, over all its images.

    Attributes:
        synchronous, evaluations: synchronous steps of a request, and all of them.
        psnr, ssim: against the synchronous image; equal: how many images have its bits.
        right: share of images that are nearest to the training image asked for; right_synchronous: the same of
            the synchronous images.
        seconds, one_device_seconds: time of the first request on real ranks and on one device; None: not run there.
        sent: bytes that all ranks together sent in it, by axis; None: not known.
    """

    sampler: str
    strategy: str
    devices: int
    warmup: str
    synchronous: Mean
    evaluations: int
    psnr: Mean
    ssim: Mean
    right: Mean
    right_synchronous: Mean
    equal: int
    images: int
    seconds: float | None = None
    one_device_seconds: float | None = None
    sent: Mapping[str, int] | None = None

    @property
    def megabytes(self) -> float | None:
        """Sent over all axes."""
        return None if self.sent is None else sum(self.sent.values()) / 1e6


class StudyResults:
    """The finished cells of a plan, as the store has them and in the plan's order, by combination."""

    def __init__(self, plan: StudyPlan, cells: Sequence[Mapping[str, Any]]) -> None:
        self.plan = plan
        self.cells = list(cells)
        self.synchronous: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        self.by: dict[Combination, list[Mapping[str, Any]]] = {}
        self.real: list[Mapping[str, Any]] = []
        for result in self.cells:
            cell = result["cell"]
            if cell["strategy"] == SYNCHRONOUS:
                for image in result["images"]:
                    self.synchronous[cell["sampler"], image["prompt"], image["seed"]] = image
            elif cell["real"]:
                self.real.append(result)
            else:
                at = (cell["sampler"], cell["strategy"], cell["devices"], cell["warmup"])
                self.by.setdefault(at, []).append(result)

    def rows(self) -> list[Row]:
        """The rows of all combinations, in the order of the plan."""
        return [self.row(at) for at in self.by]

    def images(self, at: Combination) -> list[Mapping[str, Any]]:
        """The measurements of a combination's images."""
        return [image for result in self.by.get(at, ()) for image in result["images"]]

    def row(self, at: Combination) -> Row:
        """One combination."""
        results, images = self.by[at], self.images(at)
        exact = [self.synchronous.get((at[0], p["prompt"], p["seed"]), {}) for p in images]
        axes = ("sampler", "strategy", "devices", "warmup")
        real = next((result for result in self.real if tuple(result["cell"][axis] for axis in axes) == at), {})
        return Row(
            *at,
            synchronous=mean(logged_synchronous_steps(result) for result in results),
            evaluations=results[0]["evaluations"],
            psnr=mean(capped(p["psnr"]) for p in images),
            ssim=mean(p["ssim"] for p in images),
            right=mean(p["right"] for p in images),
            right_synchronous=mean(p.get("right") for p in exact),
            equal=sum(p["equal"] for p in images),
            images=len(images),
            seconds=latency(real),
            one_device_seconds=real.get("one_device_seconds"),
            sent=real.get("sent", results[0].get("sent")),
        )

    def psnr_of(self, at: Combination) -> dict[tuple[str, int], float]:
        """PSNR of every image of a combination, by prompt and seed."""
        return {(p["prompt"], p["seed"]): capped(p["psnr"]) for p in self.images(at)}

    def paired(self, ours: Combination, theirs: Combination) -> Mean:
        """Mean difference in dB of the same images generated in two ways; positive: the first is closer."""
        near, far = self.psnr_of(ours), self.psnr_of(theirs)
        return mean(near[image] - far[image] for image in near if image in far)

    def fixed(self, sampler: str, strategy: str, devices: int) -> dict[int, Combination]:
        """Measured combinations of a fixed warm-up, by its number of steps."""
        matches = {
            at: re.fullmatch(r"fixed\((\d+)\)", at[3]) for at in self.by if at[:3] == (sampler, strategy, devices)
        }
        return dict(sorted((int(match[1]), at) for at, match in matches.items() if match))

    def stale_fixed(self, sampler: str, strategy: str, devices: int) -> dict[int, Combination]:
        """The combinations of `fixed` with a stale step."""
        fixed = self.fixed(sampler, strategy, devices)
        return {warmup: at for warmup, at in fixed.items() if warmup < self.row(at).evaluations}

    def against_fixed(self) -> list[dict[str, Any]]:
        """Every policy that is not fixed beside the fixed warm-up with as many synchronous steps, image by image.

        Where that warm-up was not measured, its PSNR is interpolated between its measured neighbours.
        """
        compared = []
        for at in self.by:
            if at[3].startswith("fixed("):
                continue
            fixed = {warmup: self.psnr_of(place) for warmup, place in self.fixed(*at[:3]).items()}
            ours, counts = (
                self.psnr_of(at),
                {(p["prompt"], p["seed"]): logged_synchronous_steps(r) for r in self.by[at] for p in r["images"]},
            )
            theirs = {
                image: expected
                for image, count in counts.items()
                if count is not None
                and (expected := interpolate({w: of[image] for w, of in fixed.items() if image in of}, count))
                is not None
            }
            if theirs:
                row = self.row(at)
                compared.append(
                    {
                        **dict(zip(("sampler", "strategy", "devices", "warmup"), at, strict=True)),
                        "synchronous": row.synchronous.value,
                        "evaluations": row.evaluations,
                        "psnr": asdict(row.psnr),
                        "fixed_psnr": asdict(mean(theirs.values())),
                        "difference": asdict(mean(ours[image] - expected for image, expected in theirs.items())),
                    }
                )
        return compared

    def rule(self, sampler: str, strategy: str, target: float | None = None) -> dict[str, Any] | None:
        """The warm-up needed at every N for a mean PSNR; None without fixed warm-ups.

        The target is in dB; None: the highest whole number that some warm-up reaches at every N.
        """
        curves = {
            devices: {warmup: level for warmup, at in fixed.items() if (level := self.row(at).psnr.value) is not None}
            for devices in self.plan.devices
            if (fixed := self.stale_fixed(sampler, strategy, devices))
        }
        if not curves:
            return None
        if target is None:
            target = float(floor(min(max(curve.values()) for curve in curves.values())))
        needed = {devices: first_reaching(curve, target) for devices, curve in curves.items()}
        return {"target_psnr": target, "needed": {str(devices): warmup for devices, warmup in needed.items()}}

    def warmup_gains(self, pair: Pair) -> list[dict[str, Any]]:
        """For every N the PSNR with the shortest and the longest fixed warm-up that has a stale step."""
        gains = []
        for devices in self.plan.devices:
            fixed = self.stale_fixed(*pair, devices)
            if len(fixed) > 1:
                low, high = min(fixed), max(fixed)
                short, long = (self.row(fixed[warmup]).psnr for warmup in (low, high))
                difference = self.paired(fixed[high], fixed[low])
                gains.append(
                    {"devices": devices, "low": low, "high": high, "short": short, "long": long}
                    | {"difference": difference}
                )
        return gains

    def compared(self, axis: int, ours: Any, theirs: Any, of: tuple[str, ...] = ()) -> Mean:
        """Mean difference over all pairs of combinations that begin with ``of`` and differ on one axis only."""
        mine = [at for at in self.by if at[axis] == ours and at[: len(of)] == of]
        pairs: list[tuple[Any, Any]] = [(at, (*at[:axis], theirs, *at[axis + 1 :])) for at in mine]
        return mean_difference((self.psnr_of(at), self.psnr_of(other)) for at, other in pairs)

    def real_summaries(self) -> list[dict[str, Any]]:
        """For every sampler, strategy and number of real ranks its runs, over the policies that ran there."""
        groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
        for result in self.real:
            cell = result["cell"]
            groups.setdefault((cell["sampler"], cell["strategy"], cell["devices"]), []).append(result)
        return [
            {
                "sampler": sampler,
                "strategy": strategy,
                "devices": devices,
                "policies": f"{len(runs)} policies" if len(runs) > 1 else runs[0]["cell"]["warmup"],
                "others": [result["cell"]["warmup"] for result in runs if not result["equal_to_simulation"]],
                "alone": next((run["one_device_seconds"] for run in runs if "one_device_seconds" in run), None),
                "seconds": _range([seconds for run in runs if (seconds := latency(run)) is not None], 2),
                "share": _range([100 * r["in_collectives"] / r["seconds"] for run in runs for r in run["ranks"]], 0),
            }
            for (sampler, strategy, devices), runs in groups.items()
        ]

    def prediction_errors(self, at: Combination) -> list[Mean]:
        """Relative error of the prediction against the synchronous trajectory, for every evaluation."""
        steps = zip(*(result["prediction_error"] for result in self.by.get(at, [])), strict=True)
        return [mean(value for errors in step for value in errors) for step in steps]


def logged_synchronous_steps(result: Mapping[str, Any]) -> int | None:
    """Synchronous steps of a cell; None when it has no log."""
    steps = result.get("steps")
    return None if steps is None else sum(step["synchronous"] for step in steps)


def latency(result: Mapping[str, Any]) -> float | None:
    """Seconds of a cell's request: those of its slowest rank; None when it ran on no real ranks."""
    return max((rank["seconds"] for rank in result.get("ranks", ())), default=None)


def interpolate(known: Mapping[int, float], at: float) -> float | None:
    """The value at a place between measured ones; None outside of them."""
    places = sorted(known)
    if not places or not places[0] <= at <= places[-1]:
        return None
    return float(np.interp(at, places, [known[place] for place in places]))


def first_reaching(curve: Mapping[int, float], target: float) -> float | None:
    """The first point at which a curve reaches the target, straight between its points; None: it does not."""
    points = sorted(curve.items())
    if points and points[0][1] >= target:
        return float(points[0][0])
    for (left, low), (right, high) in pairwise(points):
        if low < target <= high:
            return left + (right - left) * (target - low) / (high - low)
    return None


# --------------------------------------------------------------------------------------------------
# In words


def findings(results: StudyResults, rules: Mapping[Pair, Mapping[str, Any] | None]) -> list[str]:
    """Sentences made from the figures by `findings.txt`. A difference under two standard errors is called none."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Text for terminals: the page escapes it.
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "form": format,
        "count": count,
        "mean": lambda data: Mean(**data),
        "neighbours": lambda names: list(pairwise(names)),
    }
    images = max((row.images for row in results.rows()), default=0)
    facts = {"results": results, "plan": results.plan, "rules": rules, "images": images}
    text = templates.get_template("findings.txt").render(**facts)
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _range(values: Sequence[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"

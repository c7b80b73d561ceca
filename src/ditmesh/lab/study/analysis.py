"""Figures of a study: means with standard errors, paired differences, a rule for the warm-up, and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import floor, nan, sqrt
from random import Random
from typing import Any

import numpy as np

from ...report.formatting import count
from .plan import SYNCHRONOUS, Pair, StudyPlan, has_given_steps, steps_text

# An image with the bits of the synchronous one has an infinite ratio; so much is taken for it in means.
CAP = 100.0
# Studies made of a study's images, drawn with replacement (Efron 1979), that show how sure an exponent is.
RESAMPLES = 200
# Of fewer images such studies show nothing.
FEWEST = 8
# Numbers of devices that need a warm-up, without which two parameters are not determined.
FITTED = 3

# Sampler, strategy, devices, warm-up.
Combination = tuple[str, str, int, str]
# Values of images, by prompt and seed.
ByPicture = Mapping[tuple[str, int], float]
# PSNR of all images (NaN: not measured), by devices and warm-up.
Levels = Mapping[int, Mapping[int, np.ndarray]]


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
            return f"{better if self.value > 0 else worse if self.value < 0 else none}, on one picture only"
        return (better if self.value > 0 else worse) if self.is_clear else none


def mean(values: Iterable[float | None]) -> Mean:
    """Mean and standard error of the values that are not None."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if not known.size:
        return Mean(None, None, 0)
    error = float(known.std(ddof=1)) / sqrt(known.size) if known.size > 1 else None
    return Mean(float(known.mean()), error, known.size)


def capped(psnr: float | None) -> float:
    """A PSNR in dB for means; None stands for equal images."""
    return CAP if psnr is None else min(psnr, CAP)


def mean_difference(pairs: Iterable[tuple[ByPicture, ByPicture]]) -> Mean:
    """Mean difference in dB between two ways to generate, each pair measured alike, by prompt and seed.

    One figure per image: several ways to generate one image are not independent.
    """
    apart: dict[tuple[str, int], list[float]] = {}
    for ours, theirs in pairs:
        for picture in ours:
            # With every step synchronous there is nothing to compare.
            if picture in theirs and min(ours[picture], theirs[picture]) < CAP:
                apart.setdefault(picture, []).append(ours[picture] - theirs[picture])
    return mean(sum(values) / len(values) for values in apart.values())


def _paired(ours: ByPicture, theirs: ByPicture) -> Mean:
    return mean(ours[picture] - theirs[picture] for picture in ours if picture in theirs)


@dataclass(frozen=True)
class Row:
    """One combination, over all its images.

    Attributes:
        synchronous, evaluations: synchronous steps of a request, and all of them.
        psnr, ssim, perceptual: against the synchronous image; equal: how many images have its bits.
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
    perceptual: Mean
    right: Mean
    right_synchronous: Mean
    equal: int
    pictures: int
    seconds: float | None = None
    one_device_seconds: float | None = None
    sent: Mapping[str, int] | None = None

    @property
    def megabytes(self) -> float | None:
        """Sent over all axes."""
        return None if self.sent is None else sum(self.sent.values()) / 1e6

    @property
    def share_synchronous(self) -> float | None:
        """Share of the steps in which ranks wait for messages, in percent; None where there is no log."""
        return None if self.synchronous.value is None else 100 * self.synchronous.value / self.evaluations


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
                for picture in result["pictures"]:
                    self.synchronous[cell["sampler"], picture["prompt"], picture["seed"]] = picture
            elif cell["real"]:
                self.real.append(result)
            else:
                at = (cell["sampler"], cell["strategy"], cell["devices"], cell["warmup"])
                self.by.setdefault(at, []).append(result)

    def asked(self) -> list[Combination]:
        """Every combination that was asked for, in the order of the plan."""
        return [at for at in self.by if not has_given_steps(at[3]) or at[3] in self.plan.warmups]

    def rows(self) -> list[Row]:
        """The rows of `asked`."""
        return [self.row(at) for at in self.asked()]

    def pictures(self, at: Combination) -> list[Mapping[str, Any]]:
        """The measurements of a combination's images."""
        return [picture for result in self.by.get(at, ()) for picture in result["pictures"]]

    def row(self, at: Combination) -> Row:
        """One combination."""
        results, pictures = self.by[at], self.pictures(at)
        exact = [self.synchronous.get((at[0], p["prompt"], p["seed"]), {}) for p in pictures]
        axes = ("sampler", "strategy", "devices", "warmup")
        real = next((result for result in self.real if tuple(result["cell"][axis] for axis in axes) == at), {})
        return Row(
            *at,
            synchronous=mean(logged_synchronous_steps(result) for result in results),
            evaluations=results[0]["evaluations"],
            psnr=mean(capped(p["psnr"]) for p in pictures),
            ssim=mean(p["ssim"] for p in pictures),
            perceptual=mean(p["perceptual"] for p in pictures),
            right=mean(p["right"] for p in pictures),
            right_synchronous=mean(p.get("right") for p in exact),
            equal=sum(p["equal"] for p in pictures),
            pictures=len(pictures),
            seconds=latency(real),
            one_device_seconds=real.get("one_device_seconds"),
            sent=real.get("sent", results[0].get("sent")),
        )

    def psnr_of(self, at: Combination) -> dict[tuple[str, int], float]:
        """PSNR of every image of a combination, by prompt and seed."""
        return {(p["prompt"], p["seed"]): capped(p["psnr"]) for p in self.pictures(at)}

    def paired(self, ours: Combination, theirs: Combination) -> Mean:
        """Mean difference in dB of the same images generated in two ways; positive: the first is closer."""
        return _paired(self.psnr_of(ours), self.psnr_of(theirs))

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

    def _heading(self, at: Combination) -> dict[str, Any]:
        row = self.row(at)
        return {
            **dict(zip(("sampler", "strategy", "devices", "warmup"), at, strict=True)),
            "synchronous": row.synchronous.value,
            "evaluations": row.evaluations,
            "psnr": asdict(row.psnr),
        }

    def against_fixed(self) -> list[dict[str, Any]]:
        """Every policy that is not fixed beside the fixed warm-up with as many synchronous steps, image by image.

        Where that warm-up was not measured, its PSNR is interpolated between its measured neighbours.
        """
        compared = []
        for at in self.asked():
            if at[3].startswith("fixed("):
                continue
            fixed = {warmup: self.psnr_of(place) for warmup, place in self.fixed(*at[:3]).items()}
            ours, counts = self.psnr_of(at), self._counts(at)
            theirs = {
                picture: expected
                for picture, count in counts.items()
                if count is not None
                and (expected := interpolate({w: of[picture] for w, of in fixed.items() if picture in of}, count))
                is not None
            }
            if theirs:
                measured = {
                    "fixed_psnr": asdict(mean(theirs.values())),
                    "difference": asdict(mean(ours[picture] - expected for picture, expected in theirs.items())),
                }
                compared.append(self._heading(at) | measured)
        return compared

    def against_others(self) -> list[dict[str, Any]]:
        """Every adaptive policy beside all others with as many synchronous steps, the same images.

        A policy that is not adaptive counts where it was measured on all of the adaptive one's images with the same
        number of synchronous steps in each request; the one with the highest mean PSNR comes first, which is a choice
        made after the fact, in favour of the others. ``closer``: images on which the adaptive one has the higher
        PSNR.
        """
        adaptive = [at for at in self.by if at[3].startswith("adaptive(")]
        others = [at for at in self.by if at not in adaptive and at[3] in self.plan.warmups]
        compared = []
        for at in adaptive:
            counts = self._counts(at)
            beside = [
                self._beside(at, other)
                for other in others
                if other[:3] == at[:3] and None not in counts.values() and self._counts(other) == counts
            ]
            if beside:
                beside.sort(key=lambda other: -(other["psnr"]["value"] or 0.0))
                compared.append({**self._heading(at), "others": beside})
        return compared

    def _beside(self, at: Combination, other: Combination) -> dict[str, Any]:
        ours, theirs = self.psnr_of(at), self.psnr_of(other)
        felt, felt_there = (
            {(p["prompt"], p["seed"]): p["perceptual"] for p in self.pictures(one) if p["perceptual"] is not None}
            for one in (at, other)
        )
        return {
            "warmup": other[3],
            "psnr": asdict(self.row(other).psnr),
            "difference": asdict(_paired(ours, theirs)),
            "closer": sum(ours[picture] > theirs[picture] for picture in ours),
            "perceptual_difference": asdict(_paired(felt, felt_there)),
            "same_steps": [self._synchronous(one) for one in self.by[other]]
            == [self._synchronous(one) for one in self.by[at]],
        }

    def _counts(self, at: Combination) -> dict[tuple[str, int], int | None]:
        """Synchronous steps by prompt and seed."""
        return {(p["prompt"], p["seed"]): logged_synchronous_steps(r) for r in self.by[at] for p in r["pictures"]}

    @staticmethod
    def _synchronous(result: Mapping[str, Any]) -> list[bool]:
        return [step["synchronous"] for step in result.get("steps", ())]

    def rule(self, sampler: str, strategy: str, target: float | None = None) -> dict[str, Any] | None:
        """The warm-up needed at every N for a mean PSNR, and w = a · N^b through it; None without fixed warm-ups.

        The target is in dB; None: the highest whole number that some warm-up reaches at every N. ``b_interval``: where
        b lies in 95 of 100 studies with images drawn from these with replacement; None where under three N, or
        half of those studies, reach the target, and of fewer than `FEWEST` images. ``fit``, ``sqrt``: None where
        under `FITTED` of the N need any warm-up at all: a power law through zeros is not determined.
        """
        pictures = {
            devices: {warmup: self.psnr_of(at) for warmup, at in fixed.items()}
            for devices in self.plan.devices
            if (fixed := self.stale_fixed(sampler, strategy, devices))
        }
        if not pictures:
            return None
        chosen = dict.fromkeys(picture for curve in pictures.values() for of in curve.values() for picture in of)
        levels = {
            devices: {warmup: np.array([of.get(picture, nan) for picture in chosen]) for warmup, of in curve.items()}
            for devices, curve in pictures.items()
        }
        if target is None:
            target = float(floor(min(max(curve.values()) for curve in _curves(levels).values())))
        needed = {devices: first_reaching(curve, target) for devices, curve in _curves(levels).items()}
        points = {devices: warmup for devices, warmup in needed.items() if warmup is not None}
        return {
            "target_psnr": target,
            "needed": {str(devices): warmup for devices, warmup in needed.items()},
            **_power_law(points, levels, len(chosen), target),
            "points": len(points),
            "points_above_zero": sum(warmup > 0 for warmup in points.values()),
        }

    def root_pairs(self, sampler: str, strategy: str) -> list[dict[str, Any]]:
        """The pairs that w = base · √N predicts to be equal: four times the devices with twice the warm-up.

        Every pair of measured fixed warm-ups that differ so, and the second one's PSNR less the first one's.
        """
        pairs = []
        for devices in self.plan.devices:
            few, many = (self.fixed(sampler, strategy, n) for n in (devices, 4 * devices))
            for warmup, at in few.items():
                other = many.get(2 * warmup)
                if warmup and other is not None and 2 * warmup < self.row(at).evaluations:
                    pairs.append({"devices": devices, "warmup": warmup, "difference": asdict(self.paired(other, at))})
        return pairs

    def single_steps(self) -> list[dict[str, Any]]:
        """For every sampler, what making one step synchronous gains and making one step stale costs, in dB."""
        if self.plan.which is None:
            return []
        strategy, devices = self.plan.which
        every = range(self.plan.setup.steps)

        def single(sampler: str) -> dict[str, Any]:
            def at(some: Iterable[int]) -> Combination:
                return sampler, strategy, devices, steps_text(some)

            gains = [self.paired(at({0, step}), at({0})) for step in every[1:]]
            # All but one step: the loss is counted from equal images, so the PSNR itself is what counts.
            costs = [mean(self.psnr_of(at({*every} - {step})).values()) for step in every[1:]]
            return {
                "sampler": sampler,
                "strategy": strategy,
                "devices": devices,
                "steps": [step + 1 for step in every[1:]],
                "gain": [asdict(gain) for gain in gains],
                "psnr_with_one_stale": [asdict(cost) for cost in costs],
            }

        return [single(sampler) for sampler in self.plan.samplers]

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


def _curves(levels: Levels, some: Any = slice(None)) -> dict[int, dict[int, float]]:
    """Mean PSNR over some of the images, by devices and warm-up."""
    drawn = {devices: {warmup: of[some] for warmup, of in curve.items()} for devices, curve in levels.items()}
    return {
        devices: {warmup: float(np.nanmean(of)) for warmup, of in curve.items() if not np.isnan(of).all()}
        for devices, curve in drawn.items()
    }


def _power_law(points: Mapping[int, float], levels: Levels, pictures: int, target: float) -> dict[str, Any]:
    """Both fits through the warm-ups needed, by devices; see `StudyResults.rule`."""
    fit = fit_power(points) if sum(warmup > 0 for warmup in points.values()) >= FITTED else None
    if fit is None:
        return {"fit": None, "sqrt": None}
    base, spread = fit_root(points)
    interval = None
    if len(points) > 2 and pictures >= FEWEST:
        powers = _resampled_powers(levels, pictures, target)
        if len(powers) >= RESAMPLES // 2:
            interval = [powers[round(share * (len(powers) - 1))] for share in (0.025, 0.975)]
    return {
        "fit": {"a": fit[0], "b": fit[1], "residual": fit[2], "b_interval": interval},
        "sqrt": {"base": base, "residual": spread},
    }


def _resampled_powers(levels: Levels, pictures: int, target: float) -> list[float]:
    """Exponents of w = a · N^b on images drawn with replacement, sorted; only where every N reaches the target."""
    random, powers = Random(0), []
    for _ in range(RESAMPLES):
        curves = _curves(levels, random.choices(range(pictures), k=pictures))
        points = {devices: first_reaching(curve, target) for devices, curve in curves.items()}
        reached = {devices: warmup for devices, warmup in points.items() if warmup is not None}
        fit = fit_power(reached) if len(reached) == len(levels) else None
        if fit is not None:
            powers.append(fit[1])
    return sorted(powers)


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


def fit_power(points: Mapping[int, float]) -> tuple[float, float, float] | None:
    """Least squares of w = a · N^b: a, b and the root mean square of the residuals, in steps; None under two points.

    For every b the best a is known; b is found by halving intervals around the best of a grid from -4 to 4.
    """
    if len(points) < 2 or not any(points.values()):
        return None
    devices, warmups = (np.array([*some], dtype=float) for some in (points, points.values()))

    def solve(b: float) -> tuple[float, float]:
        powers = devices**b
        a = warmups @ powers / (powers @ powers)
        return float(a), float(((warmups - a * powers) ** 2).sum())

    best, width = min((n / 20 for n in range(-80, 81)), key=lambda b: solve(b)[1]), 0.05
    while width > 1e-9:
        best = min((best - width, best - width / 2, best, best + width / 2, best + width), key=lambda b: solve(b)[1])
        width /= 2
    a, squares = solve(best)
    return a, best, sqrt(squares / len(points))


def fit_root(points: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Least squares of w = base · √N: base and the root mean square of the residuals; None without points."""
    if not points:
        return None, None
    roots, warmups = np.sqrt([*points]), np.array([*points.values()], dtype=float)
    base = float(warmups @ roots / sum(points))
    return base, float(np.sqrt(((warmups - base * roots) ** 2).mean()))


# --------------------------------------------------------------------------------------------------
# In words

# Sentences of the findings; a difference comes with its verdict.
FINDINGS = {
    "all": "Every figure is {over}. PSNR compares with the synchronous picture from the same seed.",
    "root": "{pair}: {many} devices with {longer} warm-up steps against {devices} with {warmup}, which "
    "a warm-up of base · √N takes for equal: {difference:+.2f} dB: {verdict}.",
    "warm-up": "{pair}, {devices} devices: {short:.2f} dB with {low} and {long:.2f} dB with {high} "
    "warm-up {steps}; the difference is {difference:+.2f} dB: warm-up {verdict}.",
    "compared": "{what}, the same pictures and warm-ups: {difference:+.2f} dB: {verdict} ({count}).",
    "fixed": "{warmup} with {devices} devices ({strategy}, {sampler}): {synchronous:.3g} of {evaluations} steps "
    "synchronous, {psnr:.2f} dB; the fixed warm-up with as many: {fixed_psnr:.2f} dB. Difference {difference:+.2f} dB: "
    "{verdict}.",
    "other": "{warmup} with {devices} devices ({strategy}, {sampler}) against the best other policy of those measured "
    "with {synchronous:.3g} synchronous steps, {other}: {difference:+.2f} dB: {verdict}.",
    "gain": "{strategy}, {sampler}, {devices} devices: of all steps after the first, making step {step} synchronous "
    "gains most, {mean:+.2f} dB.",
    "cost": "{strategy}, {sampler}, {devices} devices: the one stale step that costs most is step {step}: {mean:.2f} "
    "dB are left.",
    "real": "On {devices} real ranks ({strategy}, {sampler}, {policies}) the picture {bits}. A request took {seconds} "
    "s{alone}; ranks spent {share} % of their time inside collectives.",
    "needed": "{strategy}, {sampler}: for {target_psnr:g} dB the warm-up steps needed are {steps}.",
    "no fit": " A rule is not determined: {points_above_zero} of {numbers} numbers of devices need a warm-up above "
    "zero and reach the target, and a fit of two parameters takes {fitted}.",
    "fit": " Least squares: w = {a:.2f} · N^{b:.2f} (residual {residual:.2f} steps{sure}); w = {base:.2f} · √N leaves "
    "{root_residual:.2f} steps. {points} points and two parameters: an indication, not a law.",
    "sure": ", 95 of 100 resampled studies from N^{:.2f} to N^{:.2f}",
}


def findings(results: StudyResults, rules: Mapping[Pair, Mapping[str, Any] | None]) -> list[str]:
    """Sentences made from the figures. A difference under two standard errors is called none."""
    plan = results.plan
    pictures = max((row.pictures for row in results.rows()), default=0)
    over = (
        f"over {count(pictures, 'picture')}; ± is the standard error of the mean"
        if pictures > 1
        else "of one picture, and has no standard error"
    )
    said = [FINDINGS["all"].format(over=over)]
    for pair in plan.pairs:
        said += _of_strategy(results, pair)
        rule = rules.get(pair)
        if rule is not None:
            said.append(_rule_text(*pair, rule))
        for roots in results.root_pairs(*pair):
            apart = Mean(**roots["difference"])
            facts = {**roots, "difference": apart, "verdict": apart.verdict("closer", "farther off")}
            facts |= {"many": 4 * roots["devices"], "longer": 2 * roots["warmup"]}
            said.append(FINDINGS["root"].format(pair=pair, **facts))
    for ours, theirs in pairwise(plan.strategies):
        said += _compared(results, f"{ours} against {theirs}", 1, ours, theirs)
    for ours, theirs in pairwise(plan.samplers):
        said += _compared(results, f"sampler {ours} against {theirs}", 0, ours, theirs)
    said += policy_findings(results)
    for single in results.single_steps():
        for name, measured, most in (("gain", "gain", max), ("cost", "psnr_with_one_stale", min)):
            steps = zip(single["steps"], (Mean(**one) for one in single[measured]), strict=True)
            known = {step: one for step, one in steps if one.value is not None}
            if known:
                step = most(known, key=lambda step: known[step].value or 0.0)
                said.append(FINDINGS[name].format(step=step, mean=known[step], **single))
    return said + _real_text(results)


def _real_text(results: StudyResults) -> list[str]:
    """One sentence for every sampler, strategy and number of real ranks, over the policies that ran there."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for result in results.real:
        cell = result["cell"]
        groups.setdefault((cell["sampler"], cell["strategy"], cell["devices"]), []).append(result)
    said = []
    for (sampler, strategy, devices), some in groups.items():
        others = [result["cell"]["warmup"] for result in some if not result["equal_to_simulation"]]
        alone = next((result["one_device_seconds"] for result in some if "one_device_seconds" in result), None)
        facts = {
            "policies": f"{len(some)} policies" if len(some) > 1 else some[0]["cell"]["warmup"],
            "bits": f"differs from the simulated one with {', '.join(others)}"
            if others
            else "has the same bits as the simulated one",
            "seconds": _range([seconds for result in some if (seconds := latency(result)) is not None], 2),
            "alone": "" if alone is None else f", one device {alone:.2f} s",
            "share": _range([100 * r["in_collectives"] / r["seconds"] for result in some for r in result["ranks"]], 0),
        }
        said.append(FINDINGS["real"].format(sampler=sampler, strategy=strategy, devices=devices, **facts))
    return said


def _range(values: Sequence[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def policy_findings(results: StudyResults) -> list[str]:
    """The `findings` that compare policies with as many synchronous steps."""
    said = []
    for policy in results.against_fixed():
        means = {name: Mean(**policy[name]) for name in ("psnr", "fixed_psnr", "difference")}
        said.append(FINDINGS["fixed"].format_map({**policy, **means, "verdict": means["difference"].verdict()}))
    for policy in results.against_others():
        best = policy["others"][0]
        apart = Mean(**best["difference"])
        verdict = "the same steps" if best["same_steps"] else apart.verdict()
        facts = {**policy, "other": best["warmup"], "difference": apart, "verdict": verdict}
        said.append(FINDINGS["other"].format_map(facts))
    return said


def _of_strategy(results: StudyResults, pair: Pair) -> list[str]:
    plan, said = results.plan, []
    for devices in plan.devices:
        some = results.stale_fixed(*pair, devices)
        if len(some) < 2:
            continue
        low, high = min(some), max(some)
        gain = results.paired(some[high], some[low])
        facts = {
            "devices": devices,
            "low": low,
            "short": results.row(some[low]).psnr,
            "high": high,
            "long": results.row(some[high]).psnr,
            "steps": "step" if high == 1 else "steps",
            "difference": gain,
            "verdict": gain.verdict("helped", "hurt", "made no difference that can be told"),
        }
        said.append(FINDINGS["warm-up"].format(pair=pair, **facts))
    few, many = min(plan.devices), max(plan.devices)
    if few < many:
        said += _compared(results, f"{pair}: {few} devices against {many}", 2, few, many, pair)
    return said


def _compared(
    results: StudyResults, what: str, axis: int, ours: Any, theirs: Any, of: tuple[str, ...] = ()
) -> list[str]:
    """One sentence over all pairs of combinations that begin with ``of`` and differ on one axis only."""
    mine = [at for at in results.by if at[axis] == ours and at[: len(of)] == of and not has_given_steps(at[3])]
    pairs: list[tuple[Combination, Any]] = [(at, (*at[:axis], theirs, *at[axis + 1 :])) for at in mine]
    apart = mean_difference((results.psnr_of(at), results.psnr_of(other)) for at, other in pairs)
    if apart.value is None:
        return []
    facts = {"difference": apart, "verdict": apart.verdict("closer", "farther off")}
    facts["count"] = count(apart.count, "picture")
    return [FINDINGS["compared"].format(what=what, **facts)]


def _rule_text(sampler: str, strategy: str, rule: Mapping[str, Any]) -> str:
    steps = ", ".join(
        f"{'none of those measured' if warmup is None else f'{warmup:.1f}'} at N = {devices}"
        for devices, warmup in rule["needed"].items()
    )
    text = FINDINGS["needed"].format(sampler=sampler, strategy=strategy, steps=steps, **rule)
    fit, root = rule["fit"], rule["sqrt"]
    if fit is None:
        return text + FINDINGS["no fit"].format(numbers=len(rule["needed"]), fitted=FITTED, **rule)
    interval = fit["b_interval"]
    sure = "" if interval is None else FINDINGS["sure"].format(*interval)
    facts = {**rule, **fit, **root, "residual": fit["residual"], "root_residual": root["residual"], "sure": sure}
    return text + FINDINGS["fit"].format_map(facts)

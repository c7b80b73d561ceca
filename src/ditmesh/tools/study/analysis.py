"""Figures of a study: means with standard errors, paired differences, a rule for the warm-up, and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import floor, sqrt
from random import Random
from typing import Any

from .plan import SYNCHRONOUS, StudyPlan, has_given_steps, steps_text

# A picture with the bits of the synchronous one has an infinite ratio; so much is taken for it in means.
CAP = 100.0
# Studies made of a study's pictures, drawn with replacement (Efron 1979), that show how sure an exponent is.
RESAMPLES = 200
# Of fewer pictures such studies show nothing.
FEWEST = 8
# Numbers of devices that need a warm-up, without which two parameters are not determined.
FITTED = 3

# Sampler, strategy, devices, warm-up.
Combination = tuple[str, str, int, str]
# Values of pictures, by prompt and seed.
ByPicture = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class Mean:
    """A mean over pictures and its standard error; None where nothing was measured, or one picture only."""

    value: float | None
    error: float | None
    count: int

    def text(self, digits: int = 2) -> str:
        """Such as ``31.40 ± 0.52``."""
        if self.value is None:
            return ""
        return f"{self.value:.{digits}f}" + ("" if self.error is None else f" ± {self.error:.{digits}f}")


def mean(values: Iterable[float | None]) -> Mean:
    """Mean and standard error of what is not None."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return Mean(None, None, 0)
    middle = sum(known) / len(known)
    if len(known) == 1:
        return Mean(middle, None, 1)
    variance = sum((value - middle) ** 2 for value in known) / (len(known) - 1)
    return Mean(middle, sqrt(variance / len(known)), len(known))


def capped(psnr: float | None) -> float:
    """A PSNR in dB for means; None stands for equal pictures."""
    return CAP if psnr is None else min(psnr, CAP)


def difference(pairs: Iterable[tuple[ByPicture, ByPicture]]) -> Mean:
    """Mean difference in dB between two ways to generate, each pair measured alike, by prompt and seed.

    One figure a picture: what was done to one picture in several ways is not independent.
    """
    apart: dict[tuple[str, int], list[float]] = {}
    for ours, theirs in pairs:
        for picture in ours:
            # Where every step is synchronous there is nothing to compare.
            if picture in theirs and min(ours[picture], theirs[picture]) < CAP:
                apart.setdefault(picture, []).append(ours[picture] - theirs[picture])
    return mean(sum(values) / len(values) for values in apart.values())


def _paired(ours: ByPicture, theirs: ByPicture) -> Mean:
    return mean(ours[picture] - theirs[picture] for picture in ours if picture in theirs)


@dataclass(frozen=True)
class Row:
    """One combination, over all its pictures.

    Attributes:
        synchronous, evaluations: synchronous steps of a request, and all of them.
        psnr, ssim, perceptual: against the synchronous picture; equal: how many pictures have its bits.
        right: share of pictures whose nearest training picture is the one asked for; right_synchronous: the same of
            the synchronous pictures.
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
    def bytes_sent(self) -> int | None:
        """Over all axes."""
        return None if self.sent is None else sum(self.sent.values())

    @property
    def share_synchronous(self) -> float | None:
        """Share of the steps in which ranks wait for what they receive, in percent; None where there is no log."""
        return None if self.synchronous.value is None else 100 * self.synchronous.value / self.evaluations

    def synchronous_text(self) -> str:
        """Such as ``4 of 12``; empty where there is no log."""
        return "" if self.synchronous.value is None else f"{self.synchronous.value:.3g} of {self.evaluations}"


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
        """Those of `asked`."""
        return [self.row(at) for at in self.asked()]

    def row(self, at: Combination) -> Row:
        """One combination."""
        results = self.by[at]
        pictures = [picture for result in results for picture in result["pictures"]]
        exact = [self.synchronous.get((at[0], p["prompt"], p["seed"]), {}) for p in pictures]
        axes = ("sampler", "strategy", "devices", "warmup")
        real = next((result for result in self.real if tuple(result["cell"][axis] for axis in axes) == at), {})
        return Row(
            *at,
            synchronous=mean(synchronous_steps(result) for result in results),
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
        """PSNR of every picture of a combination, by prompt and seed."""
        pictures = [picture for result in self.by.get(at, []) for picture in result["pictures"]]
        return {(p["prompt"], p["seed"]): capped(p["psnr"]) for p in pictures}

    def paired(self, ours: Combination, theirs: Combination) -> Mean:
        """Mean difference in dB of the same pictures generated in two ways; positive: the first is closer."""
        return _paired(self.psnr_of(ours), self.psnr_of(theirs))

    def perceptual_of(self, at: Combination) -> dict[tuple[str, int], float]:
        """Perceptual distance of every picture of a combination, where it was measured, by prompt and seed."""
        pictures = [picture for result in self.by.get(at, []) for picture in result["pictures"]]
        return {(p["prompt"], p["seed"]): p["perceptual"] for p in pictures if p["perceptual"] is not None}

    def fixed(self, sampler: str, strategy: str, devices: int) -> dict[int, Combination]:
        """Measured combinations of a fixed warm-up, by its number of steps."""
        matches = {
            at: re.fullmatch(r"fixed\((\d+)\)", at[3]) for at in self.by if at[:3] == (sampler, strategy, devices)
        }
        return dict(sorted((int(match[1]), at) for at, match in matches.items() if match))

    def stale_fixed(self, sampler: str, strategy: str, devices: int) -> dict[int, Combination]:
        """Those of `fixed` with a stale step."""
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
        """Every policy that is not fixed beside the fixed warm-up with as many synchronous steps, picture by picture.

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
        """Every adaptive policy beside all others with as many synchronous steps, the same pictures.

        A policy that is not adaptive counts where it was measured on all of the adaptive one's pictures with the same
        number of synchronous steps in each request; the one with the highest mean PSNR comes first, which is a choice
        made after the fact, in favour of the others. ``closer``: pictures on which the adaptive one has the higher
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
        return {
            "warmup": other[3],
            "psnr": asdict(self.row(other).psnr),
            "difference": asdict(_paired(ours, theirs)),
            "closer": sum(ours[picture] > theirs[picture] for picture in ours),
            "perceptual_difference": asdict(_paired(self.perceptual_of(at), self.perceptual_of(other))),
            "same_steps": self._sets(other) == self._sets(at),
        }

    def _counts(self, at: Combination) -> dict[tuple[str, int], int | None]:
        """Synchronous steps by prompt and seed."""
        return {(p["prompt"], p["seed"]): synchronous_steps(r) for r in self.by[at] for p in r["pictures"]}

    def _sets(self, at: Combination) -> list[list[bool]]:
        """For every request which steps were synchronous."""
        return [[step["synchronous"] for step in result.get("steps", ())] for result in self.by[at]]

    def rule(self, sampler: str, strategy: str, target: float | None = None) -> dict[str, Any] | None:
        """The warm-up needed at every N for a mean PSNR, and w = a · N^b through it; None without fixed warm-ups.

        The target is in dB; None: the highest whole number that some warm-up reaches at every N. ``b_interval``: where
        b lies in 95 of 100 studies whose pictures are drawn from these with replacement; None where under three N, or
        half of those studies, reach the target, and of fewer than `FEWEST` pictures. ``fit``, ``sqrt``: None where
        under `FITTED` of the N need any warm-up at all: a power law through zeros is not determined.
        """
        pictures = {
            devices: {warmup: self.psnr_of(at) for warmup, at in fixed.items()}
            for devices in self.plan.devices
            if (fixed := self.stale_fixed(sampler, strategy, devices))
        }
        if not pictures:
            return None
        chosen = list(dict.fromkeys(picture for curve in pictures.values() for of in curve.values() for picture in of))
        curves = _curves(pictures, chosen)
        if target is None:
            target = float(floor(min(max(curve.values()) for curve in curves.values())))
        needed = {devices: first_reaching(curve, target) for devices, curve in curves.items()}
        points = {devices: warmup for devices, warmup in needed.items() if warmup is not None}
        return {
            "target_psnr": target,
            "needed": {str(devices): warmup for devices, warmup in needed.items()},
            **_power_law(points, pictures, chosen, target),
            "points": len(points),
            "points_above_zero": sum(warmup > 0 for warmup in points.values()),
        }

    def root_pairs(self, sampler: str, strategy: str) -> list[dict[str, Any]]:
        """What w = base · √N promises: four times the devices with twice the warm-up are as close.

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
            # All but one step: the loss is counted from equal pictures, so the PSNR itself is what counts.
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


def synchronous_steps(result: Mapping[str, Any]) -> int | None:
    """Synchronous steps of a cell; None when it has no log."""
    steps = result.get("steps")
    return None if steps is None else sum(step["synchronous"] for step in steps)


def latency(result: Mapping[str, Any]) -> float | None:
    """Seconds of a cell's request: those of its slowest rank; None when it ran on no real ranks."""
    return max((rank["seconds"] for rank in result.get("ranks", ())), default=None)


def _curves(
    pictures: Mapping[int, Mapping[int, ByPicture]], chosen: Sequence[tuple[str, int]]
) -> dict[int, dict[int, float]]:
    """Mean PSNR over the pictures chosen, by devices and warm-up."""
    curves: dict[int, dict[int, float]] = {}
    for devices, curve in pictures.items():
        for warmup, of in curve.items():
            some = [of[picture] for picture in chosen if picture in of]
            if some:
                curves.setdefault(devices, {})[warmup] = sum(some) / len(some)
    return curves


def _power_law(
    points: Mapping[int, float],
    pictures: Mapping[int, Mapping[int, ByPicture]],
    chosen: Sequence[tuple[str, int]],
    target: float,
) -> dict[str, Any]:
    """Both fits through the warm-ups needed, by devices; see `StudyResults.rule`."""
    fit = fit_power(points) if sum(warmup > 0 for warmup in points.values()) >= FITTED else None
    if fit is None:
        return {"fit": None, "sqrt": None}
    base, spread = fit_root(points)
    interval = None
    if len(points) > 2 and len(chosen) >= FEWEST:
        powers = _resampled_powers(pictures, chosen, target)
        if len(powers) >= RESAMPLES // 2:
            interval = [powers[round(share * (len(powers) - 1))] for share in (0.025, 0.975)]
    return {
        "fit": {"a": fit[0], "b": fit[1], "residual": fit[2], "b_interval": interval},
        "sqrt": {"base": base, "residual": spread},
    }


def _resampled_powers(
    pictures: Mapping[int, Mapping[int, ByPicture]], chosen: Sequence[tuple[str, int]], target: float
) -> list[float]:
    """Exponents of w = a · N^b on pictures drawn with replacement, sorted; only where every N reaches the target."""
    random, powers = Random(0), []
    for _ in range(RESAMPLES):
        curves = _curves(pictures, random.choices(chosen, k=len(chosen)))
        points = {devices: first_reaching(curve, target) for devices, curve in curves.items()}
        reached = {devices: warmup for devices, warmup in points.items() if warmup is not None}
        fit = fit_power(reached) if len(reached) == len(pictures) else None
        if fit is not None:
            powers.append(fit[1])
    return sorted(powers)


def interpolate(known: Mapping[int, float], at: float) -> float | None:
    """The value at a place between measured ones; None outside of them."""
    below = [place for place in known if place <= at]
    above = [place for place in known if place >= at]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    share = (at - low) / (high - low) if high > low else 0.0
    return known[low] * (1 - share) + known[high] * share


def first_reaching(curve: Mapping[int, float], target: float) -> float | None:
    """Where a curve first comes to the target, straight between its points; None if it does not."""
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

    def solve(b: float) -> tuple[float, float]:
        powers = [devices**b for devices in points]
        a = sum(w * p for w, p in zip(points.values(), powers, strict=True)) / sum(p * p for p in powers)
        return a, sum((w - a * p) ** 2 for w, p in zip(points.values(), powers, strict=True))

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
    base = sum(w * sqrt(n) for n, w in points.items()) / sum(points)
    return base, sqrt(sum((w - base * sqrt(n)) ** 2 for n, w in points.items()) / len(points))


# --------------------------------------------------------------------------------------------------
# In words


def findings(results: StudyResults, rules: Mapping[tuple[str, str], Mapping[str, Any] | None]) -> list[str]:
    """Sentences made from the figures. A difference under two standard errors is called none."""
    plan = results.plan
    pictures = max((row.pictures for row in results.rows()), default=0)
    over = (
        f"over {_count(pictures)}; ± is the standard error of the mean"
        if pictures > 1
        else "of one picture, and has no standard error"
    )
    sentences = [f"Every figure is {over}. PSNR compares with the synchronous picture from the same seed."]
    for sampler, strategy in plan.pairs:
        sentences += _of_strategy(results, sampler, strategy)
        rule = rules.get((sampler, strategy))
        if rule is not None:
            sentences.append(_rule_text(sampler, strategy, rule))
        for pair in results.root_pairs(sampler, strategy):
            apart = Mean(**pair["difference"])
            devices, warmup = pair["devices"], pair["warmup"]
            sentences.append(
                f"{strategy}, {sampler}: {4 * devices} devices with {2 * warmup} warm-up steps against {devices} "
                f"with {warmup}, which a warm-up of base · √N takes for equal: {signed(apart)} dB: "
                f"{_verdict(apart, 'closer', 'farther off')}."
            )
    for ours, theirs in pairwise(plan.strategies):
        sentences += _compared(results, f"{ours} against {theirs}", 1, ours, theirs)
    for ours, theirs in pairwise(plan.samplers):
        sentences += _compared(results, f"sampler {ours} against {theirs}", 0, ours, theirs)
    sentences += policy_findings(results)
    for single in results.single_steps():
        sentences += _single_text(single)
    return sentences + _real_text(results)


def _real_text(results: StudyResults) -> list[str]:
    """One sentence for every sampler, strategy and number of real ranks, over the policies that ran there."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for result in results.real:
        cell = result["cell"]
        groups.setdefault((cell["sampler"], cell["strategy"], cell["devices"]), []).append(result)
    sentences = []
    for (sampler, strategy, devices), some in groups.items():
        others = [result["cell"]["warmup"] for result in some if not result["equal_to_simulation"]]
        bits = (
            f"differs from the simulated one with {', '.join(others)}"
            if others
            else "has the same bits as the simulated one"
        )
        ranks = [rank for result in some for rank in result["ranks"]]
        share = [100 * rank["in_collectives"] / rank["seconds"] for rank in ranks]
        seconds = [seconds for result in some if (seconds := latency(result)) is not None]
        alone = next((result["one_device_seconds"] for result in some if "one_device_seconds" in result), None)
        beside = "" if alone is None else f", one device {alone:.2f} s"
        policies = f"{len(some)} policies" if len(some) > 1 else some[0]["cell"]["warmup"]
        sentences.append(
            f"On {devices} real ranks ({strategy}, {sampler}, {policies}) the picture {bits}. A request took "
            f"{_range(seconds, 2)} s{beside}; ranks spent {_range(share, 0)} % of their time inside collectives."
        )
    return sentences


def _range(values: Sequence[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def policy_findings(results: StudyResults) -> list[str]:
    """Of `findings` those that compare policies with as many synchronous steps."""
    sentences = []
    for policy in results.against_fixed():
        apart = Mean(**policy["difference"])
        sentences.append(
            f"{_policy(policy)}: {policy['synchronous']:.3g} of {policy['evaluations']} steps synchronous, "
            f"{Mean(**policy['psnr']).text()} dB; the fixed warm-up with as many: "
            f"{Mean(**policy['fixed_psnr']).text()} dB. Difference {signed(apart)} dB: {_verdict(apart)}."
        )
    for policy in results.against_others():
        best = policy["others"][0]
        apart = Mean(**best["difference"])
        verdict = "the same steps" if best["same_steps"] else _verdict(apart)
        sentences.append(
            f"{_policy(policy)} against the best other policy of those measured with {policy['synchronous']:.3g} "
            f"synchronous steps, {best['warmup']}: {signed(apart)} dB: {verdict}."
        )
    return sentences


def _policy(heading: Mapping[str, Any]) -> str:
    return "{warmup} with {devices} devices ({strategy}, {sampler})".format(**heading)


def _count(pictures: int) -> str:
    return f"{pictures} {'picture' if pictures == 1 else 'pictures'}"


def _of_strategy(results: StudyResults, sampler: str, strategy: str) -> list[str]:
    plan, sentences = results.plan, []
    for devices in plan.devices:
        some = results.stale_fixed(sampler, strategy, devices)
        if len(some) < 2:
            continue
        low, high = min(some), max(some)
        gain = results.paired(some[high], some[low])
        steps = "step" if high == 1 else "steps"
        sentences.append(
            f"{strategy}, {sampler}, {devices} devices: {results.row(some[low]).psnr.text()} dB with {low} and "
            f"{results.row(some[high]).psnr.text()} dB with {high} warm-up {steps}; the difference is {signed(gain)} "
            f"dB: warm-up {_verdict(gain, 'helped', 'hurt', 'made no difference that can be told')}."
        )
    few, many = min(plan.devices), max(plan.devices)
    if few < many:
        what = f"{strategy}, {sampler}: {few} devices against {many}"
        sentences += _compared(results, what, 2, few, many, (sampler, strategy))
    return sentences


def _compared(
    results: StudyResults, what: str, axis: int, ours: Any, theirs: Any, of: tuple[str, ...] = ()
) -> list[str]:
    """One sentence over all pairs of combinations that begin with ``of`` and differ on one axis only."""
    mine = [at for at in results.by if at[axis] == ours and at[: len(of)] == of and not has_given_steps(at[3])]
    pairs: list[tuple[Combination, Any]] = [(at, (*at[:axis], theirs, *at[axis + 1 :])) for at in mine]
    apart = difference((results.psnr_of(at), results.psnr_of(other)) for at, other in pairs)
    if apart.value is None:
        return []
    verdict = f"{_verdict(apart, 'closer', 'farther off')} ({_count(apart.count)})"
    return [f"{what}, the same pictures and warm-ups: {signed(apart)} dB: {verdict}."]


def _verdict(
    apart: Mean, better: str = "better", worse: str = "worse", none: str = "no difference that can be told"
) -> str:
    if apart.value is None:
        return "not measured"
    if apart.error is None:
        return f"{better if apart.value > 0 else worse if apart.value < 0 else none}, on one picture only"
    if abs(apart.value) <= 2 * apart.error:
        return none
    return better if apart.value > 0 else worse


def signed(value: Mean, digits: int = 2) -> str:
    """As `Mean.text`, with a sign."""
    text = value.text(digits)
    return text if text.startswith("-") or not text else f"+{text}"


def _rule_text(sampler: str, strategy: str, rule: Mapping[str, Any]) -> str:
    needed = ", ".join(
        f"{'none of those measured' if warmup is None else f'{warmup:.1f}'} at N = {devices}"
        for devices, warmup in rule["needed"].items()
    )
    text = f"{strategy}, {sampler}: for {rule['target_psnr']:g} dB the warm-up steps needed are {needed}."
    fit, root = rule["fit"], rule["sqrt"]
    if fit is None:
        return (
            f"{text} A rule is not determined: {rule['points_above_zero']} of {len(rule['needed'])} numbers of devices "
            f"need a warm-up above zero and reach the target, and a fit of two parameters takes {FITTED}."
        )
    interval = fit["b_interval"]
    sure = "" if interval is None else f", 95 of 100 resampled studies from N^{interval[0]:.2f} to N^{interval[1]:.2f}"
    return (
        f"{text} Least squares: w = {fit['a']:.2f} · N^{fit['b']:.2f} (residual {fit['residual']:.2f} steps{sure}); "
        f"w = {root['base']:.2f} · √N leaves {root['residual']:.2f} steps. {rule['points']} points and two "
        "parameters: an indication, not a law."
    )


def _single_text(single: Mapping[str, Any]) -> list[str]:
    gains, costs = (
        {step: Mean(**one) for step, one in zip(single["steps"], single[name], strict=True) if one["value"] is not None}
        for name in ("gain", "psnr_with_one_stale")
    )
    where = f"{single['strategy']}, {single['sampler']}, {single['devices']} devices"
    sentences = []
    if gains:
        best = max(gains, key=lambda step: gains[step].value or 0.0)
        sentences.append(
            f"{where}: of all steps after the first, making step {best} synchronous gains most, "
            f"{signed(gains[best])} dB."
        )
    if costs:
        worst = min(costs, key=lambda step: costs[step].value or 0.0)
        left = costs[worst].text()
        sentences.append(f"{where}: the one stale step that costs most is step {worst}: {left} dB are left.")
    return sentences

"""Cells to figures: means with standard errors, paired differences, a rule for the warm-up, and what they say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import floor, isfinite, nan, sqrt
from random import Random
from typing import Any

from .plan import SYNCHRONOUS, Plan, has_given_steps, steps_text

# A picture with the bits of the synchronous one has an infinite ratio; so much is taken for it in means.
CAP = 100.0
# Studies made of a study's pictures, drawn with replacement (Efron 1979), that tell how sure an exponent is.
RESAMPLES = 200
# Of fewer pictures such studies tell nothing.
FEWEST = 8

# Sampler, strategy, devices, warm-up.
Combination = tuple[str, str, int, str]


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
    found = [float(value) for value in values if value is not None]
    if not found:
        return Mean(None, None, 0)
    middle = sum(found) / len(found)
    if len(found) == 1:
        return Mean(middle, None, 1)
    variance = sum((value - middle) ** 2 for value in found) / (len(found) - 1)
    return Mean(middle, sqrt(variance / len(found)), len(found))


def capped(psnr: float | None) -> float:
    """A PSNR in dB for means; None stands for equal pictures."""
    return CAP if psnr is None else min(psnr, CAP)


def difference(pairs: Iterable[tuple[Mapping[tuple[str, int], float], Mapping[tuple[str, int], float]]]) -> Mean:
    """Mean difference in dB between two ways to draw, each pair measured alike, by prompt and seed.

    One figure a picture: what was done to one picture in several ways is not independent.
    """
    apart: dict[tuple[str, int], list[float]] = {}
    for ours, theirs in pairs:
        for picture in ours:
            # Where every step is synchronous there is nothing to compare.
            if picture in theirs and min(ours[picture], theirs[picture]) < CAP:
                apart.setdefault(picture, []).append(ours[picture] - theirs[picture])
    return mean(sum(values) / len(values) for values in apart.values())


@dataclass(frozen=True)
class Row:
    """One combination, over all its pictures.

    Attributes:
        sampler, strategy, devices, warmup: the combination.
        synchronous: synchronous steps of a request.
        evaluations: steps of a request.
        psnr, ssim, perceptual: against the synchronous picture.
        right: share of pictures whose nearest training picture is the one asked for.
        right_synchronous: the same of the synchronous pictures.
        equal: pictures with the bits of the synchronous one.
        pictures: their number.
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

    def synchronous_text(self) -> str:
        """Such as ``4 of 12``; empty where there is no log."""
        return "" if self.synchronous.value is None else f"{self.synchronous.value:.3g} of {self.evaluations}"


class Results:
    """The finished cells of a plan, by combination.

    Args:
        plan: what was wanted.
        cells: results in the order of the plan's cells, as the store has them.
    """

    def __init__(self, plan: Plan, cells: Sequence[Mapping[str, Any]]) -> None:
        self.plan = plan
        self.cells = [dict(cell) for cell in cells]
        self.synchronous: dict[tuple[str, str, int], dict[str, Any]] = {}
        self.by: dict[Combination, list[dict[str, Any]]] = {}
        self.real: list[dict[str, Any]] = []
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

    def rows(self) -> list[Row]:
        """Every combination that was asked for, in the order of the plan."""
        return [self.row(at) for at in self.by if not has_given_steps(at[3]) or at[3] in self.plan.warmups]

    def row(self, at: Combination) -> Row:
        """One combination."""
        results = self.by[at]
        pictures = [picture for result in results for picture in result["pictures"]]
        exact = [self.synchronous.get((at[0], p["prompt"], p["seed"]), {}) for p in pictures]
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
        )

    def psnr_of(self, at: Combination) -> dict[tuple[str, int], float]:
        """PSNR of every picture of a combination, by prompt and seed."""
        return {
            (p["prompt"], p["seed"]): capped(p["psnr"]) for result in self.by.get(at, []) for p in result["pictures"]
        }

    def paired(self, ours: Combination, theirs: Combination) -> Mean:
        """Mean difference in dB of the same pictures drawn in two ways; positive: the first is closer."""
        a, b = self.psnr_of(ours), self.psnr_of(theirs)
        return mean(a[picture] - b[picture] for picture in a if picture in b)

    def paired_perceptual(self, ours: Combination, theirs: Combination) -> Mean:
        """The same of the perceptual distance, where it was measured; negative: the first is closer."""
        a, b = (
            {(p["prompt"], p["seed"]): p["perceptual"] for result in self.by.get(at, []) for p in result["pictures"]}
            for at in (ours, theirs)
        )
        return mean(
            None if value is None or b[picture] is None else value - b[picture]
            for picture, value in a.items()
            if picture in b
        )

    def fixed(self, sampler: str, strategy: str, devices: int) -> dict[int, Combination]:
        """Measured combinations of a fixed warm-up, by its number of steps."""
        found = {}
        for at in self.by:
            match = re.fullmatch(r"fixed\((\d+)\)", at[3])
            if at[:3] == (sampler, strategy, devices) and match:
                found[int(match[1])] = at
        return dict(sorted(found.items()))

    def against_fixed(self) -> list[dict[str, Any]]:
        """Every policy that is not fixed beside the fixed warm-up with as many synchronous steps, picture by picture.

        Where that warm-up was not measured, its PSNR is interpolated between its measured neighbours.
        """
        found = []
        for at in self.by:
            sampler, strategy, devices, warmup = at
            if warmup.startswith("fixed(") or (has_given_steps(warmup) and warmup not in self.plan.warmups):
                continue
            fixed = {w: self.psnr_of(place) for w, place in self.fixed(sampler, strategy, devices).items()}
            apart, theirs = [], []
            for result in self.by[at]:
                count = synchronous_steps(result)
                if count is None:
                    continue
                for p in result["pictures"]:
                    known = {w: of[p["prompt"], p["seed"]] for w, of in fixed.items() if (p["prompt"], p["seed"]) in of}
                    expected = interpolate(known, count)
                    if expected is not None:
                        theirs.append(expected)
                        apart.append(capped(p["psnr"]) - expected)
            if apart:
                row = self.row(at)
                found.append(
                    {
                        "sampler": sampler,
                        "strategy": strategy,
                        "devices": devices,
                        "warmup": warmup,
                        "synchronous": row.synchronous.value,
                        "evaluations": row.evaluations,
                        "psnr": asdict(row.psnr),
                        "fixed_psnr": asdict(mean(theirs)),
                        "difference": asdict(mean(apart)),
                    }
                )
        return found

    def against_others(self) -> list[dict[str, Any]]:
        """Every adaptive policy beside all others with as many synchronous steps, the same pictures.

        A policy that is not adaptive counts where it was measured on all of the adaptive one's pictures with the same
        number of synchronous steps in each request; the one with the highest mean PSNR comes first, which is a choice
        made after the fact, in favour of the others. ``closer``: pictures on which the adaptive one has the higher
        PSNR.
        """
        found = []
        for at in self.by:
            if not at[3].startswith("adaptive("):
                continue
            ours, steps = self._counts(at), self._sets(at)
            others = []
            for theirs in self.by:
                if theirs[:3] != at[:3] or theirs[3].startswith("adaptive(") or theirs[3] not in self.plan.warmups:
                    continue
                if self._counts(theirs) == ours and None not in ours.values():
                    a, b = self.psnr_of(at), self.psnr_of(theirs)
                    others.append(
                        {
                            "warmup": theirs[3],
                            "psnr": asdict(self.row(theirs).psnr),
                            "difference": asdict(self.paired(at, theirs)),
                            "closer": sum(a[picture] > b[picture] for picture in a),
                            "perceptual_difference": asdict(self.paired_perceptual(at, theirs)),
                            "same_steps": self._sets(theirs) == steps,
                        }
                    )
            if others:
                row = self.row(at)
                found.append(
                    {
                        **dict(zip(("sampler", "strategy", "devices", "warmup"), at, strict=True)),
                        "synchronous": row.synchronous.value,
                        "evaluations": row.evaluations,
                        "psnr": asdict(row.psnr),
                        "others": sorted(others, key=lambda other: -(other["psnr"]["value"] or 0.0)),
                    }
                )
        return found

    def _counts(self, at: Combination) -> dict[tuple[str, int], int | None]:
        """Synchronous steps by prompt and seed."""
        return {(p["prompt"], p["seed"]): synchronous_steps(r) for r in self.by[at] for p in r["pictures"]}

    def _sets(self, at: Combination) -> list[list[bool]]:
        """For every request which steps were synchronous."""
        return [[step["synchronous"] for step in result.get("steps", ())] for result in self.by[at]]

    def rule(self, sampler: str, strategy: str, target: float | None = None) -> dict[str, Any] | None:
        """The warm-up needed at every N for a mean PSNR, and w = a · N^b through it; None without fixed warm-ups.

        Args:
            sampler, strategy: of which combinations.
            target: in dB; None: the highest whole number that some warm-up reaches at every N.

        ``b_interval``: where b lies in 95 of 100 studies whose pictures are drawn from these with replacement; None
        where under three N, or half of those studies, reach the target, and of fewer than `FEWEST` pictures.
        """
        pictures: dict[int, dict[int, dict[tuple[str, int], float]]] = {}
        for devices in self.plan.devices:
            curve = {}
            for warmup, at in self.fixed(sampler, strategy, devices).items():
                if warmup < self.row(at).evaluations:
                    curve[warmup] = self.psnr_of(at)
            if curve:
                pictures[devices] = curve
        if not pictures:
            return None
        known = [picture for curve in pictures.values() for of in curve.values() for picture in of]
        chosen = list(dict.fromkeys(known))
        curves = _curves(pictures, chosen)
        if target is None:
            target = float(floor(min(max(curve.values()) for curve in curves.values())))
        needed = {devices: first_reaching(curve, target) for devices, curve in curves.items()}
        points = {devices: warmup for devices, warmup in needed.items() if warmup is not None}
        fit = fit_power(points)
        base, spread = fit_root(points)
        sure = len(points) > 2 and len(chosen) >= FEWEST and fit is not None
        resampled = _resampled_powers(pictures, chosen, target) if sure else []
        interval = None
        if len(resampled) >= RESAMPLES // 2:
            interval = [resampled[round(share * (len(resampled) - 1))] for share in (0.025, 0.975)]
        return {
            "target_psnr": target,
            "needed": {str(devices): warmup for devices, warmup in needed.items()},
            "fit": None if fit is None else {"a": fit[0], "b": fit[1], "residual": fit[2], "b_interval": interval},
            "sqrt": None if base is None else {"base": base, "residual": spread},
            "points": len(points),
        }

    def root_pairs(self, sampler: str, strategy: str) -> list[dict[str, Any]]:
        """What w = base · √N promises: four times the devices with twice the warm-up are as close.

        Every pair of measured fixed warm-ups that differ so, and the second one's PSNR less the first one's.
        """
        found = []
        for devices in self.plan.devices:
            few, many = (self.fixed(sampler, strategy, n) for n in (devices, 4 * devices))
            for warmup, at in few.items():
                other = many.get(2 * warmup)
                if warmup and other is not None and 2 * warmup < self.row(at).evaluations:
                    found.append({"devices": devices, "warmup": warmup, "difference": asdict(self.paired(other, at))})
        return found

    def single_steps(self) -> list[dict[str, Any]]:
        """For every sampler, what making one step synchronous gains and making one step stale costs, in dB."""
        if self.plan.which is None:
            return []
        strategy, devices = self.plan.which
        steps, found = self.plan.setup.steps, []
        for sampler in self.plan.samplers:

            def at(some: Iterable[int], sampler: str = sampler) -> Combination:
                return sampler, strategy, devices, steps_text(some)

            every = set(range(steps))
            gains = [self.paired(at({0, step}), at({0})) for step in range(1, steps)]
            # All but one step: the loss is counted from equal pictures, so the PSNR itself is what counts.
            costs = [mean(self.psnr_of(at(every - {step})).values()) for step in range(1, steps)]
            found.append(
                {
                    "sampler": sampler,
                    "strategy": strategy,
                    "devices": devices,
                    "steps": list(range(2, steps + 1)),
                    "gain": [asdict(gain) for gain in gains],
                    "psnr_with_one_stale": [asdict(cost) for cost in costs],
                }
            )
        return found

    def prediction_errors(self, at: Combination) -> list[Mean]:
        """Relative error of the prediction against the synchronous trajectory, for every evaluation."""
        results = self.by.get(at, [])
        steps = max((len(result["prediction_error"]) for result in results), default=0)
        return [
            mean(value for result in results for value in result["prediction_error"][step]) for step in range(steps)
        ]


def synchronous_steps(result: Mapping[str, Any]) -> int | None:
    """Synchronous steps of a cell; None when it has no log."""
    steps = result.get("steps")
    return None if steps is None else sum(step["synchronous"] for step in steps)


def _curves(
    pictures: Mapping[int, Mapping[int, Mapping[tuple[str, int], float]]], chosen: Sequence[tuple[str, int]]
) -> dict[int, dict[int, float]]:
    """Mean PSNR over the pictures chosen, by devices and warm-up."""
    curves: dict[int, dict[int, float]] = {}
    for devices, curve in pictures.items():
        for warmup, of in curve.items():
            some = [of[picture] for picture in chosen if picture in of]
            if some:
                curves.setdefault(devices, {})[warmup] = sum(some) / len(some)
    return curves


def _resampled_powers(
    pictures: Mapping[int, Mapping[int, Mapping[tuple[str, int], float]]],
    chosen: Sequence[tuple[str, int]],
    target: float,
) -> list[float]:
    """Exponents of w = a · N^b on pictures drawn with replacement, sorted; only where every N reaches the target."""
    draw, found = Random(0), []
    for _ in range(RESAMPLES):
        curves = _curves(pictures, draw.choices(chosen, k=len(chosen)))
        needed = {devices: first_reaching(curve, target) for devices, curve in curves.items()}
        points = {devices: warmup for devices, warmup in needed.items() if warmup is not None}
        fit = fit_power(points) if len(points) == len(pictures) else None
        if fit is not None:
            found.append(fit[1])
    return sorted(found)


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
# What the figures say


def findings(results: Results, rules: Mapping[tuple[str, str], Mapping[str, Any] | None]) -> list[str]:
    """Sentences made from the figures. A difference under two standard errors is called none."""
    plan, said = results.plan, []
    rows = results.rows()
    pictures = max((row.pictures for row in rows), default=0)
    said.append(
        f"Every figure is over {pictures} {'picture' if pictures == 1 else 'pictures'}; ± is the standard error of "
        "the mean. PSNR compares with the synchronous picture from the same seed."
    )
    for sampler in plan.samplers:
        for strategy in plan.strategies:
            said += _of_strategy(results, sampler, strategy)
            rule = rules.get((sampler, strategy))
            if rule is not None:
                said.append(_rule_text(sampler, strategy, rule))
            for pair in results.root_pairs(sampler, strategy):
                apart = Mean(**pair["difference"])
                devices, warmup = pair["devices"], pair["warmup"]
                said.append(
                    f"{strategy}, {sampler}: {4 * devices} devices with {2 * warmup} warm-up steps against {devices} "
                    f"with {warmup}, which a warm-up of base · √N takes for equal: {signed(apart)} dB: "
                    f"{_verdict(apart, 'closer', 'farther off')}."
                )
    for ours, theirs in pairwise(plan.strategies):
        said += _compared(
            results,
            f"{ours} against {theirs}",
            [(at, (at[0], theirs, at[2], at[3])) for at in results.by if at[1] == ours and not has_given_steps(at[3])],
        )
    for ours, theirs in pairwise(plan.samplers):
        said += _compared(
            results,
            f"sampler {ours} against {theirs}",
            [(at, (theirs, *at[1:])) for at in results.by if at[0] == ours and not has_given_steps(at[3])],
        )
    said += policy_findings(results)
    for single in results.single_steps():
        said += _single_text(single)
    for result in results.real:
        cell, ranks = result["cell"], result["ranks"]
        share = [100 * rank["in_collectives"] / rank["seconds"] for rank in ranks]
        said.append(
            f"On {cell['devices']} real ranks ({cell['strategy']}, {cell['warmup']}, {cell['sampler']}) the picture "
            f"{'has the same bits as' if result['equal_to_simulation'] else 'differs from'} the simulated one; ranks "
            f"spent {min(share):.0f} to {max(share):.0f} % of {max(rank['seconds'] for rank in ranks):.2f} s inside "
            "collectives."
        )
    return said


def policy_findings(results: Results) -> list[str]:
    """Of `findings` those that compare policies with as many synchronous steps."""
    said = []
    for beside in results.against_fixed():
        apart = Mean(**beside["difference"])
        said.append(
            f"{beside['warmup']} with {beside['devices']} devices ({beside['strategy']}, {beside['sampler']}): "
            f"{beside['synchronous']:.3g} of {beside['evaluations']} steps synchronous, "
            f"{Mean(**beside['psnr']).text()} dB; the fixed warm-up with as many: "
            f"{Mean(**beside['fixed_psnr']).text()} dB. Difference {signed(apart)} dB: {_verdict(apart)}."
        )
    for beside in results.against_others():
        best = beside["others"][0]
        apart = Mean(**best["difference"])
        verdict = "the same steps" if best["same_steps"] else _verdict(apart)
        said.append(
            f"{beside['warmup']} with {beside['devices']} devices ({beside['strategy']}, {beside['sampler']}) against "
            f"the best other policy of those measured with {beside['synchronous']:.3g} synchronous steps, "
            f"{best['warmup']}: {signed(apart)} dB: {verdict}."
        )
    return said


def _of_strategy(results: Results, sampler: str, strategy: str) -> list[str]:
    plan, said = results.plan, []
    for devices in plan.devices:
        fixed = results.fixed(sampler, strategy, devices)
        some = {w: at for w, at in fixed.items() if w < results.row(at).evaluations}
        if len(some) < 2:
            continue
        low, high = min(some), max(some)
        gain = results.paired(some[high], some[low])
        steps = "step" if high == 1 else "steps"
        said.append(
            f"{strategy}, {sampler}, {devices} devices: {results.row(some[low]).psnr.text()} dB with {low} and "
            f"{results.row(some[high]).psnr.text()} dB with {high} warm-up {steps}; the difference is {signed(gain)} "
            f"dB: warm-up {_verdict(gain, 'helped', 'hurt', 'made no difference that can be told')}."
        )
    if len(plan.devices) > 1:
        few, many = min(plan.devices), max(plan.devices)
        pairs = [
            (at, (sampler, strategy, many, at[3]))
            for at in results.by
            if at[:3] == (sampler, strategy, few) and not has_given_steps(at[3])
        ]
        said += _compared(results, f"{strategy}, {sampler}: {few} devices against {many}", pairs)
    return said


def _compared(results: Results, what: str, pairs: Sequence[tuple[Combination, Combination]]) -> list[str]:
    """One sentence over all pairs of combinations that were both measured."""
    found = difference((results.psnr_of(ours), results.psnr_of(theirs)) for ours, theirs in pairs)
    if found.value is None:
        return []
    return [
        f"{what}, the same pictures and warm-ups: {signed(found)} dB: {_verdict(found, 'closer', 'farther off')} "
        f"({found.count} {'picture' if found.count == 1 else 'pictures'})."
    ]


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
    if rule["points"] < 3 or fit is None:
        return f"{text} {rule['points']} points are too few to tell a rule."
    interval = fit["b_interval"]
    sure = "" if interval is None else f", 95 of 100 resampled studies from N^{interval[0]:.2f} to N^{interval[1]:.2f}"
    return (
        f"{text} Least squares: w = {fit['a']:.2f} · N^{fit['b']:.2f} (residual {fit['residual']:.2f} steps{sure}); "
        f"w = {root['base']:.2f} · √N leaves {root['residual']:.2f} steps. {rule['points']} points and two "
        "parameters: an indication, not a law."
    )


def _single_text(single: Mapping[str, Any]) -> list[str]:
    gains = {step: Mean(**gain) for step, gain in zip(single["steps"], single["gain"], strict=True)}
    costs = {step: Mean(**c) for step, c in zip(single["steps"], single["psnr_with_one_stale"], strict=True)}
    measured = {step: gain.value for step, gain in gains.items() if gain.value is not None}
    left = {step: cost.value for step, cost in costs.items() if cost.value is not None}
    where = f"{single['strategy']}, {single['sampler']}, {single['devices']} devices"
    said = []
    if measured:
        best = max(measured, key=lambda step: measured[step])
        said.append(
            f"{where}: of all steps after the first, making step {best} synchronous gains most, "
            f"{signed(gains[best])} dB."
        )
    if left:
        worst = min(left, key=lambda step: left[step])
        said.append(f"{where}: the one stale step that costs most is step {worst}: {costs[worst].text()} dB are left.")
    return said


def finite_or_nan(value: float | None) -> float:
    """For figures: what was not measured is not a number."""
    return value if value is not None and isfinite(value) else nan

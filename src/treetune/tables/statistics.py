"""Means over seeds and problems with intervals, and tests of differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from treetune.runtime.intervals import wilson

RESAMPLES = 4000
LEVEL = 0.95

WEIGHT = 0.1
"""Of a mixture over differences, in numbers: 0.1 makes `normal_sequence` narrowest at 5 to 16 of them."""

Kind = Literal["bootstrap", "student"]

HELD = {2: 0.61, 3: 0.81, 4: 0.83, 5: 0.88}
"""The share of cases in which a "bootstrap" interval of so few seeds holds the true mean of normal draws,
instead of 0.95 (600 tries each). The "student" ones: 0.94 to 0.95."""


@dataclass(frozen=True)
class MeanWithInterval:
    """A mean and its 95 % interval; the bounds are None where nothing says how much it varies."""

    mean: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def within(self, least: float, most: float) -> MeanWithInterval:
        """Returns the estimate cut to its possible values: Student's intervals don't know that shares have
        bounds."""
        if self.low is None or self.high is None:
            return self
        return MeanWithInterval(self.mean, max(self.low, least), min(self.high, most))


def over_seeds_and_problems(
    values: Sequence[Mapping[str, float]], kind: Kind = "bootstrap"
) -> MeanWithInterval:
    """The mean of one value per problem for every seed (all seeds have the same problems).

    A hierarchical bootstrap: every resample draws seeds with replacement, and problems with
    replacement. The problems are those of one test set for all seeds, so that one draw of them
    serves all drawn seeds (the "pigeonhole" bootstrap of Owen 2007); drawing anew for every seed
    would take what makes a problem hard for noise that averages out.

    Resampled means of S seeds vary by (S − 1)/S of what they should; the seeds' part is stretched
    by √(S/(S − 1)). What a percentile interval of few seeds still lacks is the uncertainty of the
    spread itself, see HELD: `kind` "student" stretches that part further, by t(S − 1)/z, which is 2.2
    for three seeds, and holds what it says. With one seed the interval is of problems alone.

    Raises ValueError if the seeds' problems differ.
    """
    import numpy as np

    problems = list(values[0])
    for other in values[1:]:
        if other.keys() != values[0].keys():
            raise ValueError("the seeds were measured on different problems")
    matrix_SP = np.array([[one[problem] for problem in problems] for one in values])
    n_seeds, n_problems = matrix_SP.shape
    generator = np.random.default_rng(0)
    seeds_BS = generator.multinomial(n_seeds, [1 / n_seeds] * n_seeds, size=RESAMPLES) / n_seeds
    problems_BP = (
        generator.multinomial(n_problems, [1 / n_problems] * n_problems, size=RESAMPLES) / n_problems
    )
    means_B = np.einsum("bs,sp,bp->b", seeds_BS, matrix_SP, problems_BP, optimize=True)
    deviations_S = matrix_SP.mean(axis=1) - matrix_SP.mean()
    means_B += (stretch(n_seeds, kind) - 1) * (seeds_BS @ deviations_S)
    tail = (1 - LEVEL) / 2
    low, high = float(np.quantile(means_B, tail)), float(np.quantile(means_B, 1 - tail))
    return MeanWithInterval(float(matrix_SP.mean()), low, high)


def normal_sequence(values: Sequence[float], level: float = LEVEL) -> MeanWithInterval:
    """The mean of normal numbers of unknown spread, with an interval that holds at every count at once, as
    that of `confidence_sequence` does: a t-interval for whoever looks after each number.

    Each candidate mean m is left out where a mixture of normal means m + δσ, δ from N(0, 1 / WEIGHT), and of
    all spreads σ, has become 1 / (1 − level) times likelier than m: √r · ((1 + u) / (1 + r · u))^(n / 2),
    with r = WEIGHT / (n + WEIGHT), u = t² / (n − 1) and Student's t of m. That is a martingale that begins
    with 1 (Wang and Ramdas 2023, arXiv:2310.03722, the Gaussian mixture in the reduced filtration; Lai 1976),
    so that it ever gets there with a chance of at most 1 − level (Ville 1939). The bounds are None where so
    few numbers leave out none."""
    count, mean = len(values), fmean(values)
    if count < 2:
        return MeanWithInterval(mean, None, None)
    ratio = WEIGHT / (count + WEIGHT)
    bar, spread = ((1 - level) * math.sqrt(ratio)) ** (-2 / count), stdev(values)
    if bar * ratio >= 1 or not spread:  # numbers that are all the same are no normal ones
        return MeanWithInterval(mean, None, None)
    half = spread * math.sqrt((count - 1) / count * (bar - 1) / (1 - bar * ratio))
    return MeanWithInterval(mean, mean - half, mean + half)


def confidence_sequence(values: Sequence[float], bound: float, level: float = LEVEL) -> MeanWithInterval:
    """The mean of numbers between −bound and bound, drawn alike one after the other, with an interval
    that holds at every count at once: whoever looks after each number and stops when they like has it, too.

    A bet against each candidate mean m: of its capital a share c goes up or down with each number, as much
    as is fair if m is right, so that the capital is a martingale, averaged over 64 shares for each side. At
    95 % it comes to 20 times its beginning with a chance of at most 1/20 (Ville 1939), and m is left out then
    (Waudby-Smith and Ramdas, JRSS B 86, 2024, section 4; Cover's average over shares in place of their
    predicted one, so that the order doesn't matter). Nothing is assumed of the numbers' distribution: what is
    rare and large, as a run that collapses, may not have been seen yet, and the interval knows.

    Raises ValueError for a number outside of the bounds."""
    import numpy as np

    if outside := next((one for one in values if abs(one) > bound), None):
        raise ValueError(f"a difference of {outside:.3g} is outside of ±{bound:g}: set `bound` to its most")
    units_N = (np.array(values) / bound + 1) / 2
    shares_C1 = ((np.arange(64) + 0.5) / 64)[:, None]

    def is_left_out(candidate: float) -> bool:
        logs = [
            np.log1p(shares_C1 * (seen / fair - 1)).sum(axis=1)
            for seen, fair in ((units_N, candidate), (1 - units_N, 1 - candidate))
        ]
        capital = np.logaddexp.reduce(np.concatenate(logs)) - math.log(2 * len(shares_C1))
        return bool(capital >= -math.log(1 - level))

    mean, bounds = float(units_N.mean()), []
    for beyond in (0.0, 1.0):
        within = mean  # never left out: no bet against the mean itself has gained
        for _ in range(0 if within == beyond else 40):
            candidate = (within + beyond) / 2
            within, beyond = (within, candidate) if is_left_out(candidate) else (candidate, beyond)
        bounds.append((2 * beyond - 1) * bound)
    return MeanWithInterval((2 * mean - 1) * bound, *bounds)


def of_shares(values: Sequence[Mapping[str, float]], kind: Kind = "bootstrap") -> MeanWithInterval:
    """The same where each problem's value is a share, which is nowhere surer than its problems are many.

    Resampling knows no spread where all problems went alike, and too little where each of one seed went right
    or wrong: there the interval is Wilson's, of the problems.
    """
    found = over_seeds_and_problems(values, kind)
    everything = {value for of_seed in values for value in of_seed.values()}
    if everything in ({0.0}, {1.0}) or (len(values) == 1 and everything <= {0.0, 1.0}):
        problems = len(values[0])
        return MeanWithInterval(found.mean, *wilson(found.mean * problems, problems))
    return found


def over_seeds(values: Sequence[float], kind: Kind = "bootstrap") -> MeanWithInterval:
    """The same where each seed has one number and nothing is known of problems."""
    if len(values) == 1:
        return MeanWithInterval(values[0], None, None)
    return over_seeds_and_problems([{"": value} for value in values], kind)


def stretch(seeds: int, kind: Kind) -> float:
    """Returns the factor by which the part of the seeds is drawn out."""
    if seeds == 1:
        return 1.0
    factor = math.sqrt(seeds / (seeds - 1))
    if kind == "student":
        from scipy.special import ndtri, stdtrit

        factor *= float(stdtrit(seeds - 1, 0.5 + LEVEL / 2) / ndtri(0.5 + LEVEL / 2))
    return factor


SIGNIFICANT = 0.05
"""A p-value below which a difference is called one."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p-value as it counts among all of them (Holm, 1979): the smallest times their number, the next
    times one less, none below one before it, none above 1. That one of them is below 0.05 by chance alone, in
    whichever of the comparisons there is no difference, happens in at most 5 of 100 tables."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted

"""Estimates means over seeds and problems with intervals, and corrects p-values.

The name of an array ends with a letter for each axis: S seeds, P problems, B bootstrap resamples, N numbers,
C shares of capital that are bet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from treetune.runtime.intervals import CONFIDENCE_LEVEL, wilson_interval

RESAMPLES = 4000

PRIOR_WEIGHT = 0.1
"""The weight of the prior of `normal_sequence`, as if the prior were this many numbers. With 0.1, the
interval has nearly its smallest width after 4 to 16 numbers: the best weight for each count would make it
narrower by at most 11 %."""

IntervalKind = Literal["bootstrap", "student"]
"""The kind of an interval, see `interval_over_seeds_and_problems`."""

COVERAGE_OF_BOOTSTRAP = {2: 0.61, 3: 0.81, 4: 0.83, 5: 0.88}
"""The share of "bootstrap" intervals that contain the true mean, by the number of seeds. It should be 0.95.

It was measured with normal draws, 600 tries for each number of seeds. Of "student" intervals, a share of 0.94
to 0.95 contains the true mean.
"""


@dataclass(frozen=True)
class MeanWithInterval:
    """A mean and its 95 % interval: `MeanWithInterval(0.53, 0.51, 0.55)`.

    The bounds are None where the spread is unknown, as with a single seed.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def within(self, smallest: float, largest: float) -> MeanWithInterval:
        """Returns the estimate with its interval cut to the possible values.

        Student's intervals may exceed the possible values: the interval of a share may reach above 1.
        """
        if self.low is None or self.high is None:
            return self
        return MeanWithInterval(self.mean, max(self.low, smallest), min(self.high, largest))


def interval_over_seeds_and_problems(
    values: Sequence[Mapping[str, float]], kind: IntervalKind = "bootstrap"
) -> MeanWithInterval:
    """Estimates the mean of one value per problem and seed, where all seeds have the same problems.

    `values` has a mapping for each seed: `[{"test/0": 0.75, "test/1": 0.0}, {"test/0": 0.5, "test/1":
    0.25}]`.

    The interval is a hierarchical bootstrap: every resample draws seeds with replacement, and problems with
    replacement. All seeds share the problems of one test set, so one draw of problems serves all drawn seeds
    (the "pigeonhole" bootstrap of Owen 2007). Drawing problems anew for every seed would treat the
    difficulty of problems as noise that averages out over seeds.

    The variance of resampled means of S seeds is too small by a factor of (S − 1)/S, so the seeds' part is
    stretched by √(S/(S − 1)). A percentile interval of few seeds is still too narrow, because the spread
    itself is uncertain (`COVERAGE_OF_BOOTSTRAP`). `kind` "student" stretches the seeds' part further, by t(S
    − 1)/z, which is 2.2 for three seeds; its intervals contain the mean as often as they should. With a
    single seed, the interval is only about the choice of problems.

    Raises ValueError if the seeds' problems differ.
    """
    import numpy as np

    problems = list(values[0])
    for seed_values in values[1:]:
        if seed_values.keys() != values[0].keys():
            raise ValueError("the seeds were measured on different problems")
    matrix_SP = np.array([[seed_values[problem] for problem in problems] for seed_values in values])
    n_seeds, n_problems = matrix_SP.shape
    generator = np.random.default_rng(0)
    # The weight of each seed and problem in each resample: how often it is drawn, divided by all draws.
    seeds_BS = generator.multinomial(n_seeds, [1 / n_seeds] * n_seeds, size=RESAMPLES) / n_seeds
    problems_BP = (
        generator.multinomial(n_problems, [1 / n_problems] * n_problems, size=RESAMPLES) / n_problems
    )
    means_B = np.einsum("bs,sp,bp->b", seeds_BS, matrix_SP, problems_BP, optimize=True)
    # The seeds' part of a resampled mean is the mean deviation of the drawn seeds. `means_B` contains this
    # part once. Adding it `widening_factor` − 1 times makes it `widening_factor` times as large.
    deviations_S = matrix_SP.mean(axis=1) - matrix_SP.mean()
    means_B += (widening_factor(n_seeds, kind) - 1) * (seeds_BS @ deviations_S)
    tail_probability = (1 - CONFIDENCE_LEVEL) / 2
    low = float(np.quantile(means_B, tail_probability))
    high = float(np.quantile(means_B, 1 - tail_probability))
    return MeanWithInterval(float(matrix_SP.mean()), low, high)


def normal_sequence(values: Sequence[float], level: float = CONFIDENCE_LEVEL) -> MeanWithInterval:
    """Estimates the mean of normal numbers of unknown spread, with an interval that is valid at every count.

    It is a t-interval at which one may look after each number, as with `confidence_sequence`.

    A candidate mean m is excluded when the numbers are 1 / (1 − level) times likelier under a mixture than
    under m. The mixture is over normal means m + δσ, with δ from N(0, 1 / w), and over all spreads σ, where w
    is `PRIOR_WEIGHT`. The likelihood ratio is √r · ((1 + u) / (1 + r · u))^(n / 2), with r = w / (n + w), u =
    t² / (n − 1) and Student's t of m. It is a martingale that begins with 1 (Wang and Ramdas 2023,
    arXiv:2310.03722, the Gaussian mixture in the reduced filtration; Lai 1976). So the true mean is ever
    excluded with a probability of at most 1 − level (Ville 1939).

    The bounds are None where the numbers are too few to exclude any mean, and where all numbers are equal.
    """
    count, mean = len(values), fmean(values)
    if count < 2:
        return MeanWithInterval(mean, low=None, high=None)
    # At a bound, the likelihood ratio is 1 / (1 − level), so (1 + u) / (1 + r · u) is the q below. Solved for
    # u, this is u = (q − 1) / (1 − q · r). The bound's distance from the mean is spread · √(u · (n − 1) / n).
    r = PRIOR_WEIGHT / (count + PRIOR_WEIGHT)
    q = ((1 - level) * math.sqrt(r)) ** (-2 / count)
    spread = stdev(values)
    excludes_no_mean = q * r >= 1  # the likelihood ratio stays below 1 / (1 − level), however large u is
    if excludes_no_mean or spread == 0:  # equal numbers are not normally distributed
        return MeanWithInterval(mean, low=None, high=None)
    half_width = spread * math.sqrt((count - 1) / count * (q - 1) / (1 - q * r))
    return MeanWithInterval(mean, mean - half_width, mean + half_width)


def confidence_sequence(
    values: Sequence[float], bound: float, level: float = CONFIDENCE_LEVEL
) -> MeanWithInterval:
    """Estimates the mean of numbers between −bound and bound, with an interval that is valid at every count.

    One may look at the interval after each number and stop at any time. The numbers must be independent draws
    from one distribution. Nothing else is assumed about the distribution, so the interval allows for large
    numbers that are rare and have not been drawn yet, such as those of runs that collapse.

    The interval comes from bets against each candidate mean m. A share c of the capital is staked on each
    number, at odds that are fair if m is the mean; the capital is then a martingale. The capital is averaged
    over 64 shares for each direction. If m is the mean, the capital ever grows to 1 / (1 − level) times its
    start (20 times at 95 %) with a probability of at most 1 − level (Ville 1939). A candidate is excluded if
    the capital of the bets against it is that large.

    The method is that of Waudby-Smith and Ramdas (JRSS B 86, 2024, section 4), with Cover's average over
    shares in place of a predicted share, so that the order of the numbers doesn't matter.

    Raises ValueError for a number outside of the bounds.
    """
    import numpy as np

    too_large = [value for value in values if abs(value) > bound]
    if too_large:
        raise ValueError(
            f"a difference of {too_large[0]:.3g} is outside of ±{bound:g}: set `bound` to the largest"
            " possible difference"
        )
    # The bets are on numbers between 0 and 1.
    numbers_N = (np.array(values) / bound + 1) / 2

    def on_the_scale_of_values(number: float) -> float:
        return (2 * number - 1) * bound

    stakes_C1 = ((np.arange(64) + 0.5) / 64)[:, None]  # the shares of the capital that are staked

    def is_excluded(candidate: float) -> bool:
        # A gambler begins with a capital of 1, and stakes the same share of it on each number in turn. The
        # arrays have the capital after all numbers, for each share: of bets that the mean is above the
        # candidate, and of bets that it is below.
        log_capital_above_C = np.log1p(stakes_C1 * (numbers_N / candidate - 1)).sum(axis=1)
        log_capital_below_C = np.log1p(stakes_C1 * ((1 - numbers_N) / (1 - candidate) - 1)).sum(axis=1)
        log_sum = np.logaddexp.reduce(np.concatenate([log_capital_above_C, log_capital_below_C]))
        log_capital = log_sum - math.log(2 * len(stakes_C1))  # of the mean over shares and directions
        # If the candidate is the true mean, the capital reaches 1 / (1 − level) with a probability of at most
        # 1 − level.
        return bool(log_capital >= -math.log(1 - level))

    mean = float(numbers_N.mean())
    bounds = []
    for extreme in (0.0, 1.0):
        # Bisects for the bound between the mean, which is never excluded (no bet against it has gained), and
        # the extreme. After forty halvings the bound is far more precise than any table.
        inside, outside = mean, extreme
        halvings = 0 if mean == extreme else 40  # at an extreme, the bets would divide by 0
        for _ in range(halvings):
            candidate = (inside + outside) / 2
            if is_excluded(candidate):
                outside = candidate
            else:
                inside = candidate
        bounds.append(on_the_scale_of_values(outside))
    return MeanWithInterval(on_the_scale_of_values(mean), *bounds)


def interval_of_shares(
    values: Sequence[Mapping[str, float]], kind: IntervalKind = "bootstrap"
) -> MeanWithInterval:
    """Estimates the mean as `interval_over_seeds_and_problems` does, where each problem's value is a share.

    Resampling finds no spread where all shares are 0 or all are 1, and too little where a single seed has one
    answer for each problem. The interval is then Wilson's, over the problems.
    """
    estimate = interval_over_seeds_and_problems(values, kind)
    shares = set()
    for seed_values in values:
        shares |= set(seed_values.values())
    all_are_equal = shares in ({0.0}, {1.0})
    has_one_answer_each = len(values) == 1 and shares <= {0.0, 1.0}
    if all_are_equal or has_one_answer_each:
        problems = len(values[0])
        return MeanWithInterval(estimate.mean, *wilson_interval(estimate.mean * problems, problems))
    return estimate


def interval_over_seeds(values: Sequence[float], kind: IntervalKind = "bootstrap") -> MeanWithInterval:
    """Estimates the mean as `interval_over_seeds_and_problems` does, where each seed has a single number."""
    if len(values) == 1:
        return MeanWithInterval(values[0], None, None)
    return interval_over_seeds_and_problems([{"": value} for value in values], kind)


def widening_factor(seeds: int, kind: IntervalKind) -> float:
    """Returns the factor that widens the seeds' part of a bootstrap interval.

    Resampled means of S seeds have a variance that is too small by a factor of (S − 1)/S. With the kind
    "student", the quantile of Student's t replaces the normal one, too (see
    `interval_over_seeds_and_problems`).
    """
    if seeds == 1:
        return 1.0
    factor = math.sqrt(seeds / (seeds - 1))
    if kind == "student":
        from scipy.special import ndtri, stdtrit

        probability_below = 0.5 + CONFIDENCE_LEVEL / 2  # the upper bound's: 0.975 for an interval of 95 %
        student_quantile = stdtrit(seeds - 1, probability_below)
        factor *= float(student_quantile / ndtri(probability_below))
    return factor


SIGNIFICANCE_LEVEL = 0.05
"""A difference is significant if its p-value is below this."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values that are corrected for their number (Holm, 1979), in the same order.

    The smallest of n p-values is multiplied by n, the next one by n − 1, and so on. A result that would be
    below the result of a smaller p-value is raised to it, and a result above 1 becomes 1.
    `holm([0.01, 0.04, 0.03])` is `[0.03, 0.06, 0.06]`.

    Suppose that a p-value below 0.05 is called significant after the correction. Then at most 5 of 100 tables
    call a difference significant that isn't there.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    indices_by_p = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(indices_by_p):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
